"""Prompts that go through the model together: the same tables as one after another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from same_findings import BRACKETED

import ln_probe
from ln_probe import passes
from ln_probe.analyses.geometry.newton import WEIGHT_GAP
from ln_probe.hooks.capture import looks_ahead, stream, stream_together
from ln_probe.hooks.sites import facts_of, find_sites

LENGTHS = (12, 10, 11, 2, 12, 12)  # the fourth is far shorter: it goes alone
PROBES = ("decomposition", "selectability", "uniformity", "sinks", "causal")


def prompts() -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [rng.integers(1, 50, n).tolist() for n in LENGTHS]


def assert_alike(one: pd.DataFrame, other: pd.DataFrame, name: str, relative: float) -> None:
    assert list(one.columns) == list(other.columns)
    assert len(one) == len(other), name
    for column in one.columns.drop("reconstruction_error", errors="ignore"):  # which is rounding itself
        a, b = one[column], other[column]
        if column in BRACKETED.get(name, ()):  # found to WEIGHT_GAP, by steps that rounding can change
            np.testing.assert_allclose(b, a, rtol=0, atol=WEIGHT_GAP)
        elif pd.api.types.is_float_dtype(a):
            np.testing.assert_allclose(b, a, rtol=relative, atol=relative * np.nan_to_num(a.abs().max()))
        else:
            assert a.equals(b), f"{name}.{column}"


@pytest.fixture
def passed(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Lengths of the prompts of every pass that was made."""
    seen: list[list[int]] = []
    whole = passes.stream_together

    def counted(model: Any, rows: Any, *more: Any, **options: Any) -> None:
        seen.append([len(r) for r in rows])
        whole(model, rows, *more, **options)

    monkeypatch.setattr(passes, "stream_together", counted)
    return seen


KINDS = ["gpt2", "neox", "llama", "qwen3", "neo", "gemma3", "bloom", "gptj", "olmo2"]
FAST = ("gemma3",)  # norms of its keys, and windows


@pytest.mark.parametrize("arch", [pytest.param(k, marks=[] if k in FAST else pytest.mark.slow) for k in KINDS])
def test_together_is_alone(arch: str, make_bridge: Callable[..., Any], passed: list[list[int]]) -> None:
    model = make_bridge(arch, torch.float64)
    alone = ln_probe.analyze(model, prompts(), probes=PROBES, keys="all", progress=False, batch_size=1)
    assert {len(p) for p in passed} == {1}
    passed.clear()
    together = ln_probe.analyze(model, prompts(), probes=PROBES, keys="all", progress=False, batch_size=4)
    assert passed == [[12, 10, 11], [2], [12, 12]] * 2
    for name, table in alone.tables.items():
        assert_alike(table, together.tables[name], name, 1e-6)


@pytest.mark.slow
def test_together_in_single_precision(make_hooked: Callable[..., Any], passed: list[list[int]]) -> None:
    model = make_hooked()
    tables = [
        ln_probe.analyze(model, prompts(), probes=PROBES[:4], keys="all", progress=False, batch_size=n).tables
        for n in (1, 2)
    ]
    assert [12, 10] in passed
    for name, table in tables[0].items():
        assert_alike(table, tables[1][name], name, 1e-6)


@pytest.mark.slow
def test_prompts_of_a_model_that_looks_ahead_are_not_padded(
    make_bridge: Callable[..., Any], passed: list[list[int]]
) -> None:
    model = make_bridge("bert", torch.float64)
    tables = [
        ln_probe.analyze(model, prompts(), probes=PROBES[:4], keys="all", progress=False, batch_size=n).tables
        for n in (1, 4)
    ]
    assert passed[len(LENGTHS) * 2 :] == [[12], [10], [11], [2], [12, 12]] * 2
    for name, table in tables[0].items():
        assert_alike(table, tables[1][name], name, 1e-6)


@pytest.mark.parametrize("arch", [*KINDS, "bert"])
def test_who_looks_ahead(arch: str, make_bridge: Callable[..., Any]) -> None:
    model = make_bridge(arch)
    assert looks_ahead(model, facts_of(model).read) == (arch == "bert")


def test_who_looks_ahead_without_norms_and_with_a_vocabulary_of_two(make_hooked: Callable[..., Any]) -> None:
    for direction in ("causal", "bidirectional"):
        model = make_hooked(normalization_type=None, d_vocab=2, attention_dir=direction)
        assert looks_ahead(model, facts_of(model).read) == (direction == "bidirectional")


@pytest.mark.parametrize("arch", ["qwen3", "olmo2", "bloom"])
def test_what_is_seen_of_a_prompt(arch: str, make_bridge: Callable[..., Any]) -> None:
    """Norms inside attention too, whose rows are heads of positions; rotary tables; no padding."""
    model = make_bridge(arch, torch.float64)
    rows = [torch.tensor(p) for p in prompts()[:4]]
    sites = find_sites(model)
    norms: dict[tuple[int, str], torch.Tensor] = {}
    attention: dict[tuple[int, int], Any] = {}
    stream_together(
        model,
        rows,
        sites,
        on_norm=lambda i, s, x, y: norms.update({(i, s.name): torch.stack([x, y])}),
        on_attention=lambda i, a: attention.update({(i, a.layer): a}),
    )
    for i, row in enumerate(rows):

        def norm(site: Any, x: torch.Tensor, y: torch.Tensor, i: int = i) -> None:
            torch.testing.assert_close(norms[i, site.name], torch.stack([x, y]), rtol=1e-12, atol=1e-12)

        def layer(seen: Any, i: int = i, length: int = len(row)) -> None:
            there = attention[i, seen.layer]
            for name in ("x", "y", "pattern"):
                torch.testing.assert_close(getattr(there, name), getattr(seen, name), rtol=1e-12, atol=1e-12)
            assert there.causal
            assert there.pattern.shape[-1] == length
            if seen.cos_sin is not None:
                torch.testing.assert_close(there.cos_sin, seen.cos_sin)

        stream(model, row, sites, on_norm=norm, on_attention=layer)
    assert len(attention) == (0 if arch == "olmo2" else 8)  # whose attention reads no norm


def test_a_wrong_batch_size(make_hooked: Callable[..., Any]) -> None:
    for wrong in (0, -1, True, 2.5, "4"):
        with pytest.raises(ValueError, match=r"batch_size must be a number of prompts, 1 or more, got"):
            ln_probe.analyze(make_hooked(), [[1, 2, 3]], batch_size=wrong, progress=False)


def test_angles_that_depend_on_the_length_are_not_padded(
    make_bridge: Callable[..., Any], passed: list[list[int]]
) -> None:
    rope = {
        "rope_type": "longrope",
        "short_factor": [1.0] * 4,
        "long_factor": [4.0] * 4,
        "rope_theta": 1e4,
        "original_max_position_embeddings": 11,
    }
    model = make_bridge("llama", torch.float64, rope_parameters=rope)
    ln_probe.analyze(model, prompts(), probes=("uniformity",), progress=False, batch_size=4)
    assert passed == [[12], [10], [11], [2], [12, 12]] * 2


def test_a_run_goes_on_with_fewer_prompts_at_once(tmp_path: Any) -> None:
    from ln_probe.batch.run import Run
    from ln_probe.batch.shards import ShardedCorpus
    from ln_probe.settings import Settings

    corpus = ShardedCorpus("prompts.jsonl", "prompts", 1, "0", 1)
    one, other = (Run(tmp_path, Settings(batch_size=n), corpus) for n in (None, 2))
    assert one.identity == other.identity
