"""Norms one at a time: what estimates are, and which norms of a large model are run."""

from __future__ import annotations

import math
from typing import Any

import pandas as pd
import pytest
import torch
from small_models import lab

import ln_probe
from ln_probe.analyses.probes import edited_runs, leading
from ln_probe.analyses.probes import statistics as inference
from ln_probe.analyses.probes.causal import Causal, by_prompt, table
from ln_probe.analyses.probes.edited_runs import EditedRuns, norm_estimates
from ln_probe.hooks.constants import mean_sigmas
from ln_probe.hooks.edits import GROUPS
from ln_probe.hooks.model import HookedModel
from ln_probe.hooks.norm_edits import NormEdit
from ln_probe.hooks.norms import find_norms

PROMPTS = [torch.arange(1, 13), torch.arange(20, 29), torch.tensor([7, 7, 3, 7])]


def runs_of(model: HookedModel, **options: Any) -> EditedRuns:
    sites = find_norms(model)
    return EditedRuns(model, sites, mean_sigmas(model, sites, PROMPTS), **options)


@pytest.mark.parametrize("norm", [0, 1, -1])
def test_the_first_sum_is_the_derivative_of_the_loss(norm: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = lab().double()
    site, tokens = find_norms(model)[norm], PROMPTS[0]
    change = torch.randn(len(tokens), site.d, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    monkeypatch.setattr(NormEdit, "output", lambda _edit, _x, y: y + change)
    first, _ = norm_estimates(model, tokens, {0: NormEdit(site, ["intact"])})[0]
    losses = []
    for step in (1e-5, -1e-5):

        def moved(y: torch.Tensor, hook: Any, step: float = step) -> torch.Tensor:
            return y + step * change

        with torch.no_grad(), model.hooks(fwd_hooks=[(f"{site.name}.hook_out", moved)]):
            losses.append(float(model(tokens[None], return_type="loss")) * (len(tokens) - 1))
    assert first == pytest.approx((losses[0] - losses[1]) / 2e-5, rel=1e-5)


def test_the_second_sum_is_the_divergence_of_the_predictions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the final norm it is, over draws of the tokens, KL(intact ‖ edited) to second order."""
    model: Any = lab().double()
    site = find_norms(model)[-1]
    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(1, int(model.cfg.d_vocab), (200, 9), generator=generator)
    change = 0.02 * torch.randn(9, site.d, dtype=torch.float64, generator=generator)
    sums, divergence = 0.0, 0.0
    monkeypatch.setattr(NormEdit, "output", lambda _edit, _x, y: y + change)
    for tokens in rows:
        sums += norm_estimates(model, tokens, {0: NormEdit(site, ["intact"])})[0][1]
        with torch.no_grad():
            before = model(tokens[None]).log_softmax(-1)[0, :-1]
            with model.hooks(fwd_hooks=[(f"{site.name}.hook_out", lambda y, hook: y + change)]):
                after = model(tokens[None]).log_softmax(-1)[0, :-1]
        divergence += float((before.exp() * (before - after)).sum())
    assert sums == pytest.approx(divergence, rel=0.15)  # 1600 draws, each with a relative deviation of about √2


def test_estimates_of_a_small_model_are_next_to_exact_effects() -> None:
    runs = runs_of(lab())
    assert runs.exact == set(runs.sites)
    assert not any("estimated" in note for note in runs.notes())
    rows = runs.measure(0, PROMPTS[0])
    single = rows[~rows["sites"].isin(GROUPS) & (rows["variant"] != "intact")]
    assert single[["nll", "estimate"]].notna().all(axis=None)
    assert rows.loc[rows["sites"].isin(GROUPS), "estimate"].isna().all()
    nothing = single[single["no_op"] != ""]
    assert (nothing["estimate"] == 0).all()
    again = runs_of(lab()).measure(0, PROMPTS[0])
    pd.testing.assert_frame_equal(again, rows)  # what tokens are drawn is fixed


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every model is large, and two norms are run."""
    monkeypatch.setattr(leading, "EXACT_WORK", 0.0)
    monkeypatch.setattr(edited_runs, "LEADING_NORMS", 2)


@pytest.mark.usefixtures("large")
def test_of_a_large_model_the_leading_norms_are_run_and_the_others_estimated() -> None:
    model = lab()
    runs, every = runs_of(model, first=PROMPTS), runs_of(model, exact=[s.name for s in find_norms(model)])
    assert len(runs.exact) == 2 < len(runs.sites)
    frames, whole = ([r.measure(i, row) for i, row in enumerate(PROMPTS)] for r in (runs, every))
    assert runs.exact == runs_of(model, first=PROMPTS[::-1]).exact
    constants = ln_probe.analyze(model, PROMPTS, probes=["decomposition"], progress=False).constants
    made, complete = (table(f, constants).set_index(["sites", "variant"]) for f in (frames, whole))
    run = made.index.get_level_values("sites").isin([*GROUPS, *runs.exact])
    columns = [c for c in made if c not in ("p_sign", "p_mean")]
    pd.testing.assert_frame_equal(made.loc[run, columns], complete.loc[run, columns], check_dtype=False)  # (int or NaN)
    alone = made[~run].drop(index="intact", level="variant")
    assert alone["delta_loss"].isna().all()
    assert alone["estimate"].notna().all()
    pd.testing.assert_series_equal(made["estimate"], complete["estimate"])
    assert set(by_prompt(frames, constants)["sites"]) == {*GROUPS, *runs.exact}
    assert any(f"2 of {len(runs.sites)} norms were run exactly one by one" in note for note in runs.notes())


def test_p_of_single_norms_is_adjusted_for_all_of_them(monkeypatch: pytest.MonkeyPatch, large: None) -> None:
    prompts = [torch.randint(1, 40, (9,), generator=torch.Generator().manual_seed(i)) for i in range(6)]
    report = ln_probe.analyze(lab(), prompts, probes=["causal"], progress=False)
    rows = report.causal[(report.causal["variant"] == "no_scaling") & ~report.causal["sites"].isin(GROUPS)]
    run = rows[rows["delta_loss"].notna()]
    assert len(run) == 2 < len(rows)
    kept = report.tables["causal_prompts"]
    changes = [kept[(kept["sites"] == s) & (kept["variant"] == "no_scaling")]["delta_loss"] for s in run["sites"]]
    tests = [inference.sign_test(c.to_numpy()) for c in changes] + [math.nan] * (len(rows) - 2)
    assert run["p_sign"].tolist() == pytest.approx(inference.holm(tests, [True] * len(rows))[:2].tolist())
    assert run["p_sign"].min() > inference.holm(tests[:2]).min()
    assert rows.drop(index=run.index)[["p_sign", "p_mean", "prompts_worse", "kl"]].isna().all(axis=None)
    assert "norms were run exactly one by one" in " ".join(report.notes)
    every = ln_probe.analyze(lab(), prompts, probes=[Causal(every_norm=True)], progress=False).causal
    assert every.loc[every["variant"] != "intact", "delta_loss"].notna().all()


@pytest.mark.usefixtures("large")
def test_without_a_next_token_loss_every_norm_is_run() -> None:
    for model, options in ((lab(causal=False), {}), (lab(), {"loss": lambda output, tokens: output.mean((1, 2))})):
        found = ln_probe.analyze(model, PROMPTS, probes=["causal"], progress=False, **options).causal
        assert found["estimate"].isna().all()
        assert found.loc[found["variant"] != "intact", "entropy_change"].notna().all()


def test_the_largest_sums_of_sizes_are_chosen() -> None:
    """Terms of one kind add up over prompts, those of two kinds do not cancel."""
    one = {("a", "no_scaling"): (1.0, 1.0), ("b", "no_projection"): (-2.0, 1.5), ("c", "no_scaling"): (4.0, 0.0)}
    two = {("a", "no_scaling"): (1.0, 1.0), ("c", "no_scaling"): (-4.0, 0.0)}
    assert leading.with_largest([one, two], 2) == ["a", "b"]
    assert leading.with_largest([], 2) == []


def test_a_norm_that_is_not_there_is_refused() -> None:
    with pytest.raises(ValueError, match=r"exact: 'blocks\.9\.ln1' is no norm that is measured"):
        runs_of(lab(), exact=["blocks.9.ln1"])


def test_a_prompt_of_one_token_leaves_the_estimates_of_the_others() -> None:
    runs = runs_of(lab())
    frames = [runs.measure(0, torch.tensor([4])), runs.measure(1, PROMPTS[0])]
    constants = ln_probe.analyze(lab(), PROMPTS, probes=["decomposition"], progress=False).constants
    pd.testing.assert_series_equal(table(frames, constants)["estimate"], table(frames[1:], constants)["estimate"])
    assert table(frames[:1], constants)["estimate"].isna().all()
