"""Prompts together have the numbers of single ones; on a GPU, where there is one, those of the CPU (`-m cuda`)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from architectures import cases, make_bridge
from same_findings import assert_same_findings

import ln_probe
from ln_probe import passes
from ln_probe.analyses.probes import BUILT_IN
from ln_probe.hooks import without

BATCH = torch.randint(0, 50, (2, 28), generator=torch.Generator().manual_seed(5))
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
    here = ln_probe.analyze(make_bridge(arch), BATCH, **asked)
    model = make_bridge(arch).to("cuda")
    there = ln_probe.analyze(model, BATCH, batch_size=batch_size, **asked)
    assert not there.failures
    assert_same_findings(here.tables, there.tables, COMPARED)


@pytest.mark.cuda
@needs_gpu
def test_interventions_and_attribution_on_a_gpu() -> None:
    found = []
    for device in ("cpu", "cuda"):
        model = make_bridge("gpt2").to(device)
        with without(model, "scaling", tokens=BATCH):
            edited = model(BATCH.to(device)).cpu()
        found.append((edited, ln_probe.attribute_logits(model, BATCH[:1], -1).table))
    assert torch.allclose(found[0][0], found[1][0], rtol=COMPARED, atol=COMPARED)
    pd.testing.assert_frame_equal(found[0][1], found[1][1], rtol=COMPARED, atol=COMPARED)


@pytest.mark.cuda
@needs_gpu
def test_the_command_line_on_a_gpu(tmp_path: Path) -> None:
    asked = ["report", "lm-layernorm", "--device", "cuda", "--max-prompts", "2", "--out", str(tmp_path)]
    subprocess.run([sys.executable, "-m", "ln_probe", *asked], check=True, capture_output=True, text=True)
    assert (tmp_path / "lm-layernorm" / "report.html").exists()


LENGTHS = (12, 10, 10, 2, 12, 12, 12)
PROBES = ("decomposition", "selectability", "uniformity", "sinks", "causal", "head_effects")
KINDS = ["gpt2", "neox", "llama", "qwen3", "neo", "bloom", "gptj", "olmo2", "bert"]  # gemma3: norms of its keys


def prompts() -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [rng.integers(1, 50, n).tolist() for n in LENGTHS]


@pytest.fixture
def passed(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Lengths of the prompts of every pass."""
    seen: list[list[int]] = []
    streaming = passes.streaming

    def counted(layers: Any, rows: Any, *more: Any) -> Any:
        seen.append([len(r) for r in rows])
        return streaming(layers, rows, *more)

    monkeypatch.setattr(passes, "streaming", counted)
    return seen


@pytest.mark.parametrize("arch", cases("gemma3", slow=KINDS))
def test_together_is_alone(arch: str, passed: list[list[int]]) -> None:
    model = make_bridge(arch, torch.float64)
    alone = ln_probe.analyze(model, prompts(), probes=PROBES, progress=False, batch_size=1)
    assert {len(p) for p in passed} == {1}
    passed.clear()
    together = ln_probe.analyze(model, prompts(), probes=PROBES, progress=False, batch_size=2)
    assert passed == [[12], [10, 10], [2], [12, 12], [12]] * 2
    assert_same_findings(alone.tables, together.tables, 1e-6)
