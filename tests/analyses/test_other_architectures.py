"""Architectures that were refused without a word or read wrongly: measured, or refused by name."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import hugging_face, make_bridge
from transformers import PreTrainedModel

import ln_probe
from ln_probe.hooks.norms import find_norms

TOKENS = torch.randint(3, 50, (1, 10), generator=torch.Generator().manual_seed(0))
PROBES = ("decomposition", "selectability", "uniformity")


def folder(model: PreTrainedModel, home: Path) -> Any:
    model.save_pretrained(home / "model")
    return ln_probe.load_model(home / "model", device="cpu")


@pytest.mark.parametrize("eps", [0.1, 1e3])
@pytest.mark.parametrize(("arch", "option", "kind"), [("gpt2", "layer_norm_epsilon", "layernorm"),
                                                      ("llama", "rms_norm_eps", "rmsnorm")])  # fmt: skip
def test_a_large_eps_is_read(arch: str, option: str, kind: str, eps: float) -> None:
    """Studies that anneal eps go through such."""
    model = make_bridge(arch, **{option: eps})
    for site in find_norms(model):
        assert (site.kind, site.eps) == (kind, pytest.approx(eps, rel=1e-3))
    report = ln_probe.analyze(model, TOKENS, probes=("decomposition",), progress=False)
    assert (report.layernorms["reconstruction_error"] < 1e-5).all()


def test_alibi_of_falcon(tmp_path: Path) -> None:
    model = folder(hugging_face("falcon-alibi"), tmp_path)
    report = ln_probe.analyze(model, TOKENS, probes=PROBES, progress=False)
    assert not any("head space" in n for n in report.notes)
    assert len(report.heads)
    found = ln_probe.attribute_scores(model, TOKENS, 1, 1, query=5, key=2, against=3).check()
    pattern = model.run_with_cache(TOKENS)[1]["blocks.1.attn.hook_pattern"][0, 1, 5].double()
    assert found.total == pytest.approx(math.log(pattern[2] / pattern[3]), rel=1e-4)


def test_projections_around_the_stream_are_followed(tmp_path: Path) -> None:
    """OPT-350m: embeddings are the stream's through `project_in`, logits are read through `project_out`."""
    original = hugging_face("opt-350m")
    model = folder(original, tmp_path)
    with torch.no_grad():
        logits = original(TOKENS).logits[0].double()
    found = ln_probe.attribute_logits(model, TOKENS[0], slice(0, -1), against="mean").check()
    own = logits[range(len(logits) - 1), TOKENS[0, 1:]] - logits[:-1].mean(1)
    assert torch.allclose(found.total[0], own, atol=1e-5 * float(logits.abs().max()))
    one = ln_probe.attribute_scores(model, TOKENS, 1, 1, query=5, key=2, against=3).check()
    assert {"embed", "pos_embed", "L0H0", "L0 mlp"} <= set(one.pairs.columns)
