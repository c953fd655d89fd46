"""On a GPU, where there is one (`-m cuda`), compared with the CPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from architectures import make_bridge
from same_findings import assert_same_findings

import ln_probe
from ln_probe.analyses.probes import BUILT_IN
from ln_probe.hooks import without

TOKENS = torch.randint(0, 50, (2, 28), generator=torch.Generator().manual_seed(5))
ALL = tuple(BUILT_IN)
PROMPTS = ["In the beginning", "Call me Ishmael. Some years ago"]
COMPARED = 1e-4  # what single precision leaves between two devices

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")


@pytest.mark.cuda
@needs_gpu
@pytest.mark.parametrize(
    "arch", ["gpt2", "neox", "mistral", "gemma3", "bloom", "mpt", "gptj", "qwen3", "bert", "olmo2"]
)
@pytest.mark.parametrize("batch_size", [1, None])
def test_every_probe_on_a_gpu(arch: str, batch_size: int | None) -> None:
    """Tables within 1e-4 of the CPU's, verdicts the same; `None`: as many prompts together as the memory holds."""
    asked: dict[str, Any] = {"probes": ALL, "progress": False}
    here = ln_probe.analyze(make_bridge(arch), TOKENS, **asked)
    model = make_bridge(arch).to("cuda")
    there = ln_probe.analyze(model, TOKENS, batch_size=batch_size, **asked)
    assert not there.failures
    assert_same_findings(here.tables, there.tables, COMPARED)


@pytest.mark.cuda
@needs_gpu
def test_interventions_and_attribution_on_a_gpu() -> None:
    found = []
    for device in ("cpu", "cuda"):
        model = make_bridge("gpt2").to(device)
        with without(model, "scaling", tokens=TOKENS):
            edited = model(TOKENS.to(device)).cpu()
        found.append((edited, ln_probe.attribute_logits(model, TOKENS[:1], -1).table))
    assert torch.allclose(found[0][0], found[1][0], rtol=COMPARED, atol=COMPARED)
    pd.testing.assert_frame_equal(found[0][1], found[1][1], rtol=COMPARED, atol=COMPARED)


@pytest.mark.cuda
@needs_gpu
def test_the_command_line_on_a_gpu(tmp_path: Path) -> None:
    asked = ["report", "lm-layernorm", "--device", "cuda", "--max-prompts", "2", "--out", str(tmp_path)]
    subprocess.run([sys.executable, "-m", "ln_probe", *asked], check=True, capture_output=True, text=True)
    assert (tmp_path / "lm-layernorm" / "report.html").exists()
