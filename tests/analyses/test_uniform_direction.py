"""The uniform direction of heads: what taking it out of queries does, by law, and what the script measures."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import ln_probe
from ln_probe.analyses.lab.transformer import LabConfig
from ln_probe.analyses.probes.uniformity import entropy_ratio
from ln_probe.hooks.model import run

ROWS = [[3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1, 8, 2, 8, 1, 8]]


@pytest.fixture(scope="module")
def script() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(Path(__file__).parents[2] / "examples" / "checkpoints")
        return importlib.import_module("uniform_direction")


def model(d_head: int) -> torch.nn.Module:
    """Two layers whose gains, biases and weights are all far from their initial values."""
    torch.manual_seed(d_head)
    made = LabConfig(2, 16, 2, 11, 8, d_head=d_head, norm="layernorm").build().eval()
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


def test_random_directions_have_an_even_share(script: Any) -> None:
    """A query drawn evenly in the head's key space has 1/d_head of its square along any direction, on average."""
    torch.manual_seed(0)
    found = script.Directions.of(torch.randn(1, 16, 4, dtype=torch.float64), torch.Generator().manual_seed(0))
    roots = torch.linalg.cholesky(found.metric[0].inverse())
    q = torch.einsum("ij,qj->qi", roots, torch.randn(20_000, 4, dtype=torch.float64))[:, None]
    assert float(found.share(q).mean()) == pytest.approx(0.25, abs=0.01)


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


def test_a_single_head_is_edited_alone(script: Any) -> None:
    made = model(4)
    of = script.directions(made)
    whole, one = script.measure(made, of, ROWS, "removed"), script.measure(made, of, ROWS, "removed", 0, (1, 0))
    intact = script.measure(made, of, ROWS, "intact")
    np.testing.assert_allclose(one[1][:, 0], intact[1][:, 0], atol=1e-9)
    np.testing.assert_allclose(one[1][:, 1, 1], intact[1][:, 1, 1], atol=1e-9)
    assert np.abs(one[1][:, 1, 0] - intact[1][:, 1, 0]).min() > 1e-6
    assert (whole[0] != one[0]).all()


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


def test_verdicts(script: Any) -> None:
    """From planted changes: 0.001 nats is equivalent to nothing, 0.1 is not; the same over seeds."""
    generator = np.random.default_rng(0)
    tables = []
    for _ in range(6):
        noise = generator.normal(0, 0.02, 40)
        rows = {"predicted": np.full(40, 10), "loss_intact": np.full(40, 30.0), "entropy_intact": np.full(40, 5.0)}
        for edit, change in zip(script.EDITS, (0.001, 0.1, 0.0, 0.0), strict=True):
            rows |= {f"loss_{edit}": 30 + 10 * change + noise, f"entropy_{edit}": 5 + noise}
        tables.append(pd.DataFrame(rows))
    for found in (pd.DataFrame(script.contrasts(tables[0])), pd.DataFrame(script.over_seeds(tables))):
        loss = found[found["outcome"] == "loss"].set_index("contrast")
        assert loss.loc["removed", "equivalent"]
        assert not loss.loc["redirected", "equivalent"]
        assert loss.loc["redirected", "change"] == pytest.approx(0.1, abs=0.01)
        assert (loss["family"] == "primary").sum() == 2
