"""The law `analyze` = `key_geometry`: head-space verdicts are those of the keys in their own coordinates.

W_Q may remove directions (relative singular value below 1e-9), never rescale them. What the head's own queries reach is
the column `reachable`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from architectures import cases, make_bridge, make_hooked
from jaxtyping import Float

import ln_probe
from ln_probe.analyses.geometry.check import TAU
from ln_probe.analyses.probes.base import Needs, Observer, Probe, Run
from ln_probe.analyses.probes.uniformity import AttentionLayer
from ln_probe.analyses.schema import Table

TOKENS = torch.randint(2, 50, (1, 22), generator=torch.Generator().manual_seed(5))
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


def check(model: Any, tokens: torch.Tensor = TOKENS, **options: Any) -> tuple[Any, list[KeySet]]:
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
    table, sets = check(make_bridge(arch), TOKENS[:, :20], layers=[1])
    assert set(table.index.get_level_values("layer")) == {1}
    for each in sets if arch == "bloom" else ():
        np.testing.assert_allclose(np.diff(each.bias), 4.0 ** -(each.place[1] + 1))  # ALiBi's slopes of four heads


def test_queries_without_a_bound() -> None:
    table, _ = check(squeezed(make_hooked(**SMALL, normalization_type=None), 0.0), TOKENS)
    assert table["reachable"].isna().all()


@pytest.mark.slow
def test_a_bundled_model() -> None:
    table, sets = check(ln_probe.load_model("lm-layernorm"), torch.arange(3, 67)[None])
    assert len(table) == 64 * len(sets)


def test_what_the_heads_queries_reach_is_a_column() -> None:
    """A query of the set that puts the key on top, by more than tau of what the set sees of the keys."""
    model = squeezed(make_hooked(**SMALL), 1e-8, count=5)
    table, sets = check(model, TOKENS)
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
