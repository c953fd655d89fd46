"""Prompts that go through the model together have the numbers of single ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from architectures import cases, make_bridge
from same_findings import assert_same_findings

import ln_probe
from ln_probe import passes
from ln_probe.hooks.model import attentions
from ln_probe.hooks.norms import find_norms
from ln_probe.hooks.stream import stream, streaming

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


@pytest.mark.parametrize("arch", cases("qwen3", "bloom", slow=["olmo2"]))
def test_events_of_several_prompts_are_those_of_each(arch: str) -> None:
    """Norms inside attention too, whose rows are heads of positions; rotary tables."""
    model = make_bridge(arch, torch.float64)
    rows = [torch.tensor(p) for p in prompts()[4:]]
    sites = find_norms(model)
    norms: dict[tuple[int, str], torch.Tensor] = {}
    attention: dict[tuple[int, int], Any] = {}
    together = torch.stack(rows)
    with streaming(
        attentions(model.blocks),
        together,
        sites,
        on_norm=lambda i, s, x, y: norms.update({(i, s.name): torch.stack([x, y])}),
        on_attention=lambda i, a: attention.update({(i, a.layer): a}),
    ):
        model(together)
    for i, row in enumerate(rows):

        def norm(site: Any, x: torch.Tensor, y: torch.Tensor, i: int = i) -> None:
            torch.testing.assert_close(norms[i, site.name], torch.stack([x, y]), rtol=1e-12, atol=1e-12)

        def layer(seen: Any, i: int = i) -> None:
            there = attention[i, seen.layer]
            for name in ("x", "y", "pattern"):
                torch.testing.assert_close(getattr(there, name), getattr(seen, name), rtol=1e-12, atol=1e-12)

        stream(model, row, sites, on_norm=norm, on_attention=layer)
    assert len(attention) == (0 if arch == "olmo2" else 6)  # whose attention reads no norm
