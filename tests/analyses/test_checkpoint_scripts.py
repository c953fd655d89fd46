"""Scripts of examples/checkpoints: the uniform direction of heads, and attribution patching, norms held or not."""

from __future__ import annotations

import importlib
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ln_probe
from ln_probe.analyses.lab.transformer import LabConfig
from ln_probe.analyses.probes.uniformity import entropy_ratio
from ln_probe.hooks import linearized
from ln_probe.hooks.model import run

ROWS = [[3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1, 8, 2, 8, 1, 8]]


def imported(name: str) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(Path(__file__).parents[2] / "examples" / "checkpoints")
        return importlib.import_module(name)


@pytest.fixture(scope="module")
def script() -> Any:
    return imported("uniform_direction")


def model(d_head: int, layers: int = 2) -> torch.nn.Module:
    """Gains, biases and weights are all far from their initial values."""
    torch.manual_seed(d_head)
    made = LabConfig(layers, 16, 2, 11, 8, d_head=d_head, norm="layernorm").build().eval()
    with torch.no_grad():
        for weights in made.parameters():
            weights += 0.3 * torch.randn_like(weights)
    return made


def test_what_is_left_is_orthogonal_to_ones_in_any_basis(script: Any) -> None:
    torch.manual_seed(0)
    W, q, B = (torch.randn(*shape, dtype=torch.float64) for shape in ((3, 16, 5), (7, 3, 5), (3, 5, 5)))
    found = script.Directions.of(W, torch.Generator().manual_seed(0))
    left = torch.einsum("hdi,qhi->qhd", W, found.edited(q, "removed", 0))
    torch.testing.assert_close(left.sum(-1), torch.zeros(7, 3, dtype=torch.float64))
    # the angle from its definition: the projection of 1 onto the columns of W
    onto = torch.linalg.qr(W).Q
    cosine = torch.linalg.norm(onto.mT @ torch.ones(16, dtype=torch.float64), dim=-1) / 4
    torch.testing.assert_close(found.least_angle, torch.rad2deg(torch.arccos(cosine)))
    # in another basis of the head space, the same change of W q
    turned = script.Directions.of(W @ B, torch.Generator().manual_seed(0))
    same = torch.einsum(
        "hdi,qhi->qhd", W @ B, turned.edited(torch.einsum("hij,qhj->qhi", B.inverse(), q), "removed", 0)
    )
    torch.testing.assert_close(same, left)
    for edit in script.EDITS:
        gone = q - found.edited(q, edit, 1)
        length = torch.einsum("qhi,hij,qhj->qh", gone, found.metric, gone).sqrt()
        if edit.endswith("removed"):
            torch.testing.assert_close(length, found.along(q, found.uniform).abs())


def test_an_exactly_uniform_direction_changes_no_score(script: Any) -> None:
    """With as many dimensions as the stream a head has it, and by law nothing changes; elsewhere something does."""
    for d_head, exact in ((16, True), (4, False)):
        made = model(d_head)
        of = script.directions(made)
        intact = script.measure(made, of, ROWS, "intact")
        removed = script.measure(made, of, ROWS, "removed")
        redirected = script.measure(made, of, ROWS, "redirected")
        assert (np.abs(removed[0] - intact[0]).max() < 1e-4) == exact
        assert np.abs(redirected[0] - intact[0]).min() > 1e-3
        assert (np.abs(removed[1] - intact[1]).max() < 1e-5) == exact
        assert all((each.least_angle < 1e-3).all() == exact for each in of.values())


@pytest.mark.parametrize("bundled", [False, True])
def test_intact_figures_are_the_models_own(script: Any, bundled: bool) -> None:
    """Of a lab model, and of a bridge, which shows the queries of all heads in one row."""
    made: Any = ln_probe.load_model("lm-layernorm") if bundled else model(4)
    loss, entropy, _ = script.measure(made, script.directions(made), ROWS, "intact")
    tokens = torch.tensor(ROWS)
    assert loss.sum() == pytest.approx(14 * float(run(made, tokens, return_type="loss")), rel=1e-5)
    _, cache = made.run_with_cache(tokens)
    for layer in (0, 1):
        for row in (0, 1):
            own = entropy_ratio(cache[f"blocks.{layer}.attn.hook_pattern"][row])[:, 1:].mean(1)
            np.testing.assert_allclose(entropy[row, layer], own, atol=1e-5)


def test_prompts_of_other_lengths(script: Any) -> None:
    """A table's rows are those of the prompts alone, whatever goes through the model with them."""
    made = model(4)
    prompts = [ROWS[0], ROWS[1][:5], ROWS[1]]
    whole = script.all_heads(made, prompts)
    assert list(whole["prompt"]) == [0, 1, 2]
    for number, row in enumerate(prompts):
        alone = script.all_heads(made, [row])
        np.testing.assert_allclose(whole.iloc[[number], 1:], alone.iloc[:, 1:], rtol=1e-4)
    heads = script.single_heads(made, prompts)
    assert len(heads) == 4
    assert heads["even_share"].eq(0.25).all()


STEP = 1e-4


@pytest.fixture(scope="module")
def patching() -> Any:
    return imported("attribution_patching")


@pytest.fixture(scope="module")
def deep_model() -> torch.nn.Module:
    return model(8, layers=3).double()


def pair(patching: Any) -> Any:
    return patching.Pair(torch.tensor([0, 3, 1, 4, 1, 5]), torch.tensor([0, 3, 7, 4, 1, 5]), 2, 9)


@pytest.mark.parametrize("hold", [False, True])
def test_estimates_are_derivatives(patching: Any, deep_model: Any, hold: bool) -> None:
    """Of heads, positions and paths; with sigma held, of the model that divides by the corrupt run's sigmas."""
    points, given = patching.Points(deep_model), pair(patching)
    clean, _ = patching.activations(deep_model, points, given.clean)
    corrupt, logits = patching.activations(deep_model, points, given.corrupt)
    base = float(given.metric(logits))
    sigma = linearized.sigmas(deep_model, given.corrupt[None])
    slopes = patching.gradients(deep_model, points, given, hold=hold)
    nodes, expected = [], []
    for kind, layer, index in (("z", 0, 1), ("z", 2, 0), ("resid", 1, 3), ("resid", 2, 5)):
        mine = (slice(None), index) if kind == "z" else (index,)
        change = clean[kind, layer][mine] - corrupt[kind, layer][mine]
        nodes.append((kind, layer, index, corrupt[kind, layer][mine] + STEP * change))
        expected.append(float((slopes[kind, layer][mine] * change).sum()))
    with linearized(deep_model, sigma) if hold else nullcontext():
        exact = patching.patched(deep_model, points, given, nodes)
    assert [(v - base) / STEP for v in exact] == pytest.approx(expected, rel=1e-2, abs=1e-6)
    assert min(map(abs, expected[1:])) > 1e-5

    receiver = (2, 1)
    weight = slopes["z", 2][:, 1]
    paths = patching.path_gradients(deep_model, points, given, receiver, weight, hold=hold)
    sources, expected = [], []
    for layer, head in ((0, 0), (1, 1)):
        change = clean["z", layer][:, head] - corrupt["z", layer][:, head]
        sources.append((layer, head, corrupt["z", layer][:, head] + STEP * change))
        expected.append(float((paths[layer][:, head] * change).sum()))
    with linearized(deep_model, sigma) if hold else nullcontext():
        seen = patching.received(deep_model, points, given, corrupt, receiver, sources)
    found = [float((weight * (z - corrupt["z", 2][:, 1])).sum()) / STEP for z in seen]
    assert found == pytest.approx(expected, rel=1e-2, abs=1e-7)


def test_a_pair_from_end_to_end(patching: Any, deep_model: Any) -> None:
    points, given = patching.Points(deep_model), pair(patching)
    nodes = patching.effects(deep_model, points, given)
    assert set(nodes["kind"]) == {"heads", "positions", "paths"}
    of = nodes[nodes["kind"] == "positions"]
    assert of["index"].min() == 2  # what comes before the changed token is the same in both runs
    rows = list(patching.agreement(nodes))
    assert {r["kind"] for r in rows} == {*patching.KINDS}
    perfect = nodes.assign(standard=nodes["exact"], linearized=-nodes["exact"])
    for row in patching.agreement(perfect):
        assert (row["rank_standard"], row["rank_linearized"]) == pytest.approx((1, -1))
        assert (row["error_standard"], row["error_linearized"]) == pytest.approx((0, 2))
