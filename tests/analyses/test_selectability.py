"""The tables of keys and heads: a row a key, what random keys give, and verdicts of keys in their own coordinates."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from architectures import cases, make_bridge, make_hooked
from jaxtyping import Float

import ln_probe
from ln_probe.analyses.geometry import compiled
from ln_probe.analyses.geometry.check import TAU
from ln_probe.analyses.geometry.key_geometry import random_unselectable
from ln_probe.analyses.geometry.queries import query_radius
from ln_probe.analyses.probes import selectability
from ln_probe.analyses.probes.base import Needs, Observer, Probe, Run
from ln_probe.analyses.probes.uniformity import AttentionLayer, LayerMaps
from ln_probe.analyses.schema import Table
from ln_probe.hooks.attention import read_heads
from ln_probe.hooks.norm import VARIANTS
from ln_probe.hooks.norms import find_norms
from ln_probe.hooks.stream import AttentionInput, stream

TOKENS = torch.arange(2, 26)
GEOMETRY: dict[str, Any] = {"probes": ("selectability", "uniformity"), "progress": False}


def test_tables_depend_neither_on_threads_nor_on_what_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [TOKENS.tolist(), TOKENS[:9].tolist()]
    tables = []
    for threads, waiting in ((1, 100), (3, 0)):
        monkeypatch.setattr(compiled, "_share", threads)
        monkeypatch.setattr(selectability, "MOST_WAITING", waiting)
        tables.append(ln_probe.analyze(make_bridge("gpt2"), prompts, **GEOMETRY).tables)
    for name in ("heads", "keys"):
        pd.testing.assert_frame_equal(tables[0][name], tables[1][name])


def test_every_key_has_a_row_and_heads_are_summed_up_from_them() -> None:
    report = ln_probe.analyze(make_bridge("gpt2"), [TOKENS.tolist(), TOKENS[:9].tolist()], **GEOMETRY)
    keys, heads = report.keys, report.heads
    assert set(keys["variant"]) == {"intact", "no_scaling"}
    assert len(keys) == 2 * 4 * 2 * (24 + 9)
    assert (keys["n"] == keys["prompt"].map({0: 24, 1: 9})).all()
    assert (keys["margin_lower"] <= keys["margin_upper"]).all()
    for place, rows in keys.groupby(["layer", "head", "variant"]):
        head = heads.set_index(["layer", "head", "variant"]).loc[place]
        assert head["unselectable"] == (rows["verdict"] == "unselectable").mean()
        assert head["attainable_median"] == rows["attainable"].median()
        assert head["margin_median"] == rows[["margin_lower", "margin_upper"]].mean(axis=1).median()
        assert head["pattern_max_median"] == rows["pattern_max"].median()
        assert head["unreachable"] == 1 - rows["reachable"].astype(float).mean()
        assert rows["prompt"].tolist() == [0] * 24 + [1] * 9
        assert rows["position"].tolist() == [*range(24), *range(9)]
        assert rows["token"].tolist() == [str(int(i)) for i in (*TOKENS, *TOKENS[:9])]
        assert head["n"] == len(rows) == 33
    order = heads[["layer", "variant"]].drop_duplicates().to_numpy().tolist()
    assert order == [[layer, variant] for layer in (0, 1) for variant in VARIANTS]
    unknown = ["margin_median", "attainable_median", "unreachable"]
    assert heads.query("variant == 'no_projection'")[unknown].isna().all(axis=None)
    about = report.provenance["selectability"]
    assert [about[name] for name in ("prompts", "keys_per_prompt", "d_head", "undecided")] == [2, 20, 8, 0]
    assert about["random_unselectable"] == random_unselectable(20, 8)


def test_random_keys() -> None:
    """Nearly all of many keys in few dimensions; none of d + 1; in the plane the figure of Rényi & Sulanke (1963)."""
    assert random_unselectable(9, 8) == 0.0
    assert random_unselectable(256, 2) == pytest.approx(1 - 2 * math.sqrt(2 * math.pi * math.log(256)) / 256)
    assert 0.1 < random_unselectable(128, 8) < 0.13
    keys = np.random.default_rng(3).standard_normal((40, 60, 3))
    alone = [(ln_probe.key_geometry(one, margins=False).verdict == "unselectable").mean() for one in keys]
    assert random_unselectable(60, 3) == pytest.approx(np.mean(alone), abs=0.03)


@pytest.mark.parametrize("arch", ["gpt2", "neox", "qwen3"])
def test_observed_queries_are_within_reach(arch: str) -> None:
    model, seen = make_bridge(arch), list[AttentionInput]()
    with torch.no_grad():  # gains that are not 1, and biases that move the center away from 0
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.linspace(-0.5, 1.0, len(parameter)))
    sites = find_norms(model)
    stream(model, TOKENS, sites, on_attention=seen.append)
    maps = LayerMaps(sites)
    for attended in seen:
        radius = query_radius(read_heads(attended, sites), attended.norm, attended.y)
        assert radius.shape == (24, 4)
        assert 0 < float(radius.max()) <= 1 + 1e-4  # float32 rounding of the norm's output
        maps.observe(attended)
        assert maps.radii()[attended.layer] == pytest.approx(np.quantile(radius.numpy(), 0.95, axis=0))


def test_without_a_bound_on_queries_there_are_no_margins() -> None:
    report = ln_probe.analyze(make_hooked(normalization_type=None), TOKENS[None], probes=["selectability"])
    unknown = ["margin_lower", "margin_upper", "attainable", "attainable_upper", "reachable"]
    assert report.keys[unknown].isna().all(axis=None)
    assert {"unselectable", "selectable"} <= set(report.keys["verdict"])
    assert report.keys["pattern_max"].notna().all()
    assert any("nothing bounds the queries" in note for note in report.notes)


def test_unselectable_keys_are_not_explained_away() -> None:
    """Few keys are selectable in general position; a W_K of rank 1 sends them to a line."""
    model = make_hooked(normalization_type="LN")
    tokens = [list(range(1, 1 + model.cfg.d_head))]
    assert ln_probe.analyze(model, tokens, **GEOMETRY).provenance["selectability"]["by_theorem"]
    with torch.no_grad():
        for block in model.blocks:
            W = block.attn.W_K
            W.copy_(torch.einsum("hd,k->hdk", W[..., 0], torch.ones(W.shape[-1])))
    report = ln_probe.analyze(model, tokens, **GEOMETRY)
    assert (report.heads["unselectable"] > 0).all()
    assert not report.provenance["selectability"]["by_theorem"]


WINDOW = torch.randint(2, 50, (1, 22), generator=torch.Generator().manual_seed(5))
REMOVED = 1e-9
SMALL: dict[str, Any] = {"n_layers": 1, "n_heads": 2}


@dataclass
class KeySet:
    """The keys that one query sees in one head, under one variant, and the queries that the head can make there."""

    place: tuple[int, int, str, int]  # layer, head, variant, prompt
    seen: slice
    keys: Float[np.ndarray, "key d_head"]
    bias: Float[np.ndarray, " key"] | None
    center: Float[np.ndarray, " d_head"]
    axes: Float[np.ndarray, "d_head axis"]

    def in_span(self) -> tuple[np.ndarray, np.ndarray | None]:
        """The keys without the directions that W_Q removes, and the bias that the rest of the center adds."""
        left, values, _ = np.linalg.svd(self.axes)
        there = left[:, : int((values > REMOVED * values[0]).sum())]
        if there.shape[1] == len(left):
            return self.keys, self.bias
        outside = self.center - there @ (there.T @ self.center)
        if np.linalg.norm(outside) <= REMOVED * np.linalg.norm(self.center):
            return self.keys @ there, self.bias
        return self.keys @ there, self.keys @ outside + (0.0 if self.bias is None else self.bias)


class Recorder(Probe):
    """Keeps the keys of every head, as the probes get them."""

    name = "recorder"
    summary = "the keys that are judged together"
    tables = (Table("recorded", "Recorded", "Nothing.", (), {"nothing": ("count", "nothing")}),)
    needs = Needs(attention=True)

    def __init__(self) -> None:
        self.sets: list[KeySet] = []

    def start(self, run: Run) -> Observer:
        return _Recording(self.sets)


class _Recording(Observer):
    def __init__(self, sets: list[KeySet]) -> None:
        self.sets = sets

    def attention(self, prompt: int, attended: AttentionLayer) -> None:
        for variant in ("intact", "no_scaling") if attended.heads is not None else ():
            if variant not in attended.variants:
                continue
            keys = attended.keys(variant).permute(1, 0, 2)[attended.chosen].cpu().numpy()
            for seen in attended.key_sets:
                last = seen.stop - 1
                queries = attended.reachable(last) or attended.directions(last)
                for row, head in enumerate(attended.chosen):
                    bias = attended.key_bias
                    self.sets.append(
                        KeySet(
                            (attended.layer, head, variant, prompt),
                            seen,
                            keys[row, seen].copy(),
                            None if bias is None else bias[row, seen].copy(),
                            queries[0][row].copy(),
                            queries[1][row].copy(),
                        )
                    )


def check(model: Any, tokens: torch.Tensor = WINDOW, **options: Any) -> tuple[Any, list[KeySet]]:
    """Every verdict of head space against `key_geometry` of the same keys; the table, and the sets of keys."""
    recorder = Recorder()
    report = ln_probe.analyze(model, tokens, probes=["selectability", recorder], progress=False, **options)
    table = report.keys.set_index(["layer", "head", "variant", "prompt"]).sort_index()
    compared = 0
    for each in recorder.sets:
        rows = table.loc[[each.place]].sort_values("position")
        rows = rows[(rows["position"] >= each.seen.start) & (rows["position"] < each.seen.stop)]
        keys, bias = each.in_span()
        geometry = ln_probe.key_geometry(keys, bias, margins=False)
        geometry.certify()
        wrong = rows["verdict"].to_numpy() != geometry.verdict
        assert not wrong.any(), (each.place, rows[wrong], geometry.verdict[wrong])
        prove(keys, bias, geometry)
        compared += len(rows)
    assert compared == len(table) > 0
    by_head = table.groupby(["layer", "head", "variant"])
    heads = report.heads.set_index(["layer", "head", "variant"])
    hidden, shares = by_head["verdict"].agg(lambda v: (v == "unselectable").mean()), 1 - by_head["reachable"].mean()
    np.testing.assert_allclose(heads["unselectable"].loc[hidden.index], hidden, atol=1e-12)
    np.testing.assert_allclose(heads["unreachable"].loc[shares.index], shares.astype(float), atol=1e-12)
    return table, recorder.sets


def prove(keys: np.ndarray, bias: np.ndarray | None, geometry: Any) -> None:
    """Witnesses put their keys on top, weights reproduce theirs."""
    centred = keys - keys.mean(axis=0)
    added = np.zeros(len(keys)) if bias is None else bias
    size = np.sqrt((centred**2).sum(axis=1).mean())
    for i, verdict in enumerate(geometry.verdict):
        if verdict == "selectable":
            scores = centred @ geometry.witness(i) + added
            assert (np.delete(scores, i) < scores[i]).all()
        elif verdict == "unselectable":
            weights = geometry.weights(i)
            assert weights.min() >= 0
            assert weights.sum() == pytest.approx(1.0)
            assert np.linalg.norm(weights @ centred - centred[i]) <= 1.001 * TAU * size
            assert weights @ added >= added[i] - 1.001 * TAU * np.ptp(added)


def squeezed(model: Any, factor: float, *, bias: bool = True, count: int = 3) -> Any:
    """The model with `count` directions of every head's W_Q (and b_Q) multiplied by `factor`."""
    with torch.no_grad():
        for block in model.blocks:
            block.attn.W_Q[..., :count] *= factor
            if bias:
                block.attn.b_Q[..., :count] *= factor
    return model


def test_a_nearly_dead_w_q_changes_no_verdict() -> None:
    table, _ = check(squeezed(make_hooked(**SMALL), 1e-8))
    plain, _ = check(make_hooked(**SMALL))
    assert (table["verdict"] == plain["verdict"]).loc[0].all(), "the keys of layer 0 are the same"


@pytest.mark.parametrize("bias", [True, False])
def test_directions_that_w_q_removes_are_removed_from_the_keys(bias: bool) -> None:
    """With a b_Q left there, its score is a bias per key."""
    table, sets = check(squeezed(make_hooked(**SMALL), 0.0, bias=bias, count=5))
    assert sets[0].in_span()[0].shape[1] == 3
    assert (sets[0].in_span()[1] is None) == bias
    assert {"selectable", "unselectable"} <= set(table["verdict"])


@pytest.mark.parametrize("arch", cases("gpt2", "neox", "llama", "bloom", "mistral", "bert", slow=["neo"]))
def test_tiny_models_of_several_architectures(arch: str) -> None:
    table, sets = check(make_bridge(arch), WINDOW[:, :20], layers=[1])
    assert set(table.index.get_level_values("layer")) == {1}
    for each in sets if arch == "bloom" else ():
        np.testing.assert_allclose(np.diff(each.bias), 4.0 ** -(each.place[1] + 1))  # ALiBi's slopes of four heads
    for each in sets if arch == "neox" else ():  # the queries at the last position, turned as it is
        exact = ln_probe.key_geometry(each.keys, query_set=(each.center, each.axes), margins="exact")
        rows = table.loc[[each.place]].sort_values("position")
        assert (rows["margin_lower"].to_numpy() <= exact.margin_upper).all()
        assert (rows["margin_upper"].to_numpy() >= exact.margin_lower).all()


def test_queries_without_a_bound() -> None:
    table, _ = check(squeezed(make_hooked(**SMALL, normalization_type=None), 0.0), WINDOW)
    assert table["reachable"].isna().all()


def test_what_the_heads_queries_reach_is_a_column() -> None:
    """A query of the set that puts the key on top, by more than tau of what the set sees of the keys."""
    model = squeezed(make_hooked(**SMALL), 1e-8, count=5)
    table, sets = check(model, WINDOW)
    assert table["reachable"].dtype == "boolean"
    for each in sets:
        rows = table.loc[[each.place]].sort_values("position")
        seen = (each.keys - each.keys.mean(axis=0)) @ each.axes
        size = np.sqrt((seen**2).sum(axis=1).mean())
        expected = rows["margin_lower"].to_numpy() > TAU * size
        assert (rows["reachable"].to_numpy(bool) == expected).all()
        # No query of many drawn at random puts an unreachable key on top.
        u = np.random.default_rng(1).standard_normal((4000, each.axes.shape[1]))
        u /= np.linalg.norm(u, axis=1, keepdims=True)
        top = (each.keys @ (each.center[:, None] + each.axes @ u.T)).argmax(axis=0)
        assert rows["reachable"].to_numpy(bool)[np.unique(top)].mean() > 0.9
    beyond = (table["verdict"] == "selectable") & ~table["reachable"]
    assert beyond.any(), "keys that only queries far beyond the head's own select"
