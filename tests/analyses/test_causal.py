"""The causal table: the same numbers as from plain `without`, and what it says where nothing can be said."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from architectures import make_bridge
from small_models import lab

import ln_probe
from ln_probe.analyses.probes import causal, edited_passes
from ln_probe.analyses.probes.causal import Causal, norm_estimates
from ln_probe.analyses.probes.statistics import holm, infer_mean
from ln_probe.hooks import without
from ln_probe.hooks.constants import Constant, fit
from ln_probe.hooks.edits import GROUPS
from ln_probe.hooks.norm_edits import NormEdit
from ln_probe.hooks.norms import find_norms
from ln_probe.hooks.task import Objective
from ln_probe.report import Report

PROMPTS = [torch.arange(1, 13), torch.arange(20, 29), torch.tensor([7, 7, 3, 7])]
TERM = {"no_scaling": "scaling", "no_projection": "projection", "both_removed": "both"}


def measured(model: Any, prompts: Any = None, *, probe: Causal | str = "causal", **options: Any) -> Report:
    return ln_probe.analyze(model, PROMPTS if prompts is None else prompts, probes=[probe], progress=False, **options)


def drawn(count: int, length: int = 9) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(1, 40, (length,), generator=generator) for _ in range(count)]


def loss_sum(model: Any, tokens: torch.Tensor) -> float:
    with torch.no_grad():
        return float(model(tokens[None], return_type="loss")) * (len(tokens) - 1)


def test_rows_are_those_of_without() -> None:
    """Of every prompt, with its own constants; single norms with scaling frozen alone."""
    model = make_bridge("gpt2", torch.float64)
    report = measured(model)
    rows = report.causal.set_index(["sites", "variant"])
    assert set(rows.index) == {(g, v) for g in GROUPS for v in TERM} | {
        (n.name, "no_scaling") for n in find_norms(model)
    }
    by_prompt = report.tables["causal_prompts"].set_index(["sites", "variant", "prompt"])
    intact = [loss_sum(model, tokens) for tokens in PROMPTS]
    for sites, variant in (("all", "no_scaling"), ("mlp", "no_projection"), ("blocks.1.ln2", "no_scaling")):
        changes = []
        for prompt, tokens in enumerate(PROMPTS):
            with without(model, TERM[variant], sites=sites, scale=report.constants.of(prompt)):
                changes.append(loss_sum(model, tokens) - intact[prompt])
            row = by_prompt.loc[(sites, variant, prompt)]
            assert row["delta_loss"] * row["n"] == pytest.approx(changes[-1], abs=1e-5)
            assert row["n"] == len(tokens) - 1
        predicted = sum(map(len, PROMPTS)) - len(PROMPTS)
        assert rows.loc[(sites, variant), "delta_loss"] == pytest.approx(sum(changes) / predicted, abs=1e-6)
        assert rows.loc[(sites, variant), "loss"] == pytest.approx((sum(intact) + sum(changes)) / predicted, abs=1e-6)
        assert rows.loc[(sites, variant), "prompts_worse"] == sum(change > 0 for change in changes)
    assert (rows["n"] == 3).all()


def test_the_constants_that_a_bundled_model_brings_are_for_its_default_prompts() -> None:
    model = ln_probe.load_model("lm-layernorm")
    report = ln_probe.analyze(model, max_prompts=2, max_tokens=16, probes=["causal"], progress=False)
    assert report.causal["delta_loss_optimal"].isna().all()


def test_primary_contrasts_are_run_with_one_constant_and_with_loss_optimal_ones_too() -> None:
    model = make_bridge("gpt2", torch.float64)
    report = measured(model, optimal=True)
    rows = report.causal.set_index(["sites", "variant"])
    primary = [("attention", "no_scaling"), ("all", "no_scaling")]
    for prompt, others in ((0, PROMPTS[1:2]), (1, PROMPTS[::2])):  # of the other half of the prompts
        optimal = fit(model, find_norms(model), others, start=report.constants.pooled, objective=Objective())
        assert report.constants.optimal_of("all", prompt) == optimal
    for column, scale in (("uniform", lambda n, _s: {k: c.uniform for k, c in report.constants.of(n).items()}),
                          ("optimal", lambda n, s: report.constants.optimal_of(s, n))):  # fmt: skip
        assert list(rows.index[rows[f"delta_loss_{column}"].notna()]) == primary
        for sites, variant in primary:
            total = 0.0
            for prompt, tokens in enumerate(PROMPTS):
                with without(model, "scaling", sites=sites, scale=scale(prompt, sites)):
                    total += loss_sum(model, tokens)
            base = sum(loss_sum(model, tokens) for tokens in PROMPTS)
            change = (total - base) / (sum(map(len, PROMPTS)) - len(PROMPTS))
            assert rows.loc[(sites, variant), f"delta_loss_{column}"] == pytest.approx(change, abs=1e-6)


def test_what_cannot_change_is_not_run_and_says_so() -> None:
    report = measured(make_bridge("llama"))
    assert "no_projection" not in set(report.causal["variant"])
    assert report.provenance["causal"]["no_op"].keys() == {"no_projection"}
    assert "no projection" in report.provenance["causal"]["no_op"]["no_projection"]
    one, two = (report.causal[report.causal["variant"] == v].set_index("sites") for v in ("no_scaling", "both_removed"))
    pd.testing.assert_series_equal(one.loc[list(GROUPS), "loss"], two["loss"])


def test_intervals_are_of_prompt_groups_and_include_the_constants(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against plain numpy: the influence of a group's sigma on the constants of the others, to first order.

    Slopes are means over a few prompts, evenly spread.
    """
    model, prompts, some = make_bridge("gpt2", torch.float64), drawn(16), [0, 5, 10, 15]
    changes: dict[tuple[int, str], float] = {}
    holds = causal._Watching._holds

    def checked(watching: Any, row: Any, tokens: torch.Tensor, *rest: Any) -> float:
        prompt = next(i for i, other in enumerate(prompts) if torch.equal(other, tokens))
        changes[prompt, row.sites] = rest[-1]
        return holds(watching, row, tokens, *rest)

    monkeypatch.setattr(causal, "GRADIENT_PROMPTS", len(some))
    monkeypatch.setattr(causal._Watching, "_holds", checked)
    report = measured(model, prompts, probe=Causal(single_norms=False))
    constants, rows = report.constants, report.causal.set_index(["sites", "variant"])
    by_prompt = report.tables["causal_prompts"].set_index(["sites", "variant"])
    frozen, plain = by_prompt.loc[("all", "no_scaling")], by_prompt.loc[("mlp", "no_scaling")]
    assert (plain["shift"] == 0).all()
    assert frozen["shift"].sum() == pytest.approx(0.0, abs=1e-9)
    slopes = np.zeros((len(constants.sites), 2))
    assert {prompt for prompt, _ in changes} == set(some)
    assert frozen.set_index("prompt")["delta_loss"][some].mul(8).tolist() == pytest.approx(
        [changes[i, "all"] for i in some]
    )
    for prompt in some:  # derivatives by the constants, by central differences
        for site, name in enumerate(constants.sites):
            for kind in (0, 1):
                ends = []
                for step in (1e-5, -1e-5):
                    pairs = {n: [c.first, c.rest] for n, c in constants.of(prompt).items()}
                    pairs[name][kind] += step
                    scale = {n: Constant(*pair) for n, pair in pairs.items()}
                    with without(model, "scaling", sites="all", scale=scale):
                        ends.append(loss_sum(model, prompts[prompt]))
                slopes[site, kind] += (ends[0] - ends[1]) / 2e-5
    pooled = constants.sums.sum(0) / constants.counts.sum(0)
    centered = constants.sums - pooled * constants.counts
    shift = (centered * (slopes / constants.counts[some].sum(0))).sum((1, 2))
    np.testing.assert_allclose(frozen["shift"], shift, rtol=1e-3, atol=1e-6)
    tokens = frozen["n"].to_numpy(float)
    inference = infer_mean(frozen["delta_loss"].to_numpy() * tokens + shift, tokens)
    row = rows.loc[("all", "no_scaling")]
    assert (row["delta_loss_low"], row["delta_loss_high"]) == pytest.approx((inference.low, inference.high), rel=1e-3)
    inference = infer_mean(plain["delta_loss"].to_numpy() * tokens, tokens)
    row = rows.loc[("mlp", "no_scaling")]
    assert (row["delta_loss_low"], row["equivalence_bound"]) == pytest.approx((inference.low, inference.bound))


@pytest.mark.parametrize(("change", "after", "expected"), [
    (-1.2, 0.0, 1.0), (1.2, 0.0, 1.0),  # the derivative promises no more than freezing itself changes
    (-0.5, 7.55, 0.5), (0.5, 6.45, 0.5), (-0.5, 99.0, 1.0), (0.5, math.nan, 1.0),
])  # fmt: skip
def test_a_derivative_that_promises_more_is_checked(change: float, after: float, expected: float) -> None:
    """By a step of one standard error of each constant, up the slope; no constant falls below its half."""
    seen: list[Any] = []

    def edited(_row: Any, _tokens: Any, pairs: Any) -> torch.Tensor:
        seen.append(pairs["n"].tolist())
        return torch.tensor(after, dtype=torch.float64)

    watching: Any = SimpleNamespace(_edited_loss=edited, run=SimpleNamespace(
        constants=SimpleNamespace(standard_errors={"n": (0.1, 0.2)})))  # fmt: skip
    tokens, slopes, constants = torch.arange(2), {"n": (3.0, -4.0)}, {"n": Constant(1.0, 0.3)}
    holds = causal._Watching._holds(watching, None, tokens, constants, slopes, 7.0, change)  # type: ignore[arg-type]
    assert holds == pytest.approx(expected)
    assert seen == ([] if abs(change) > 1 else [pytest.approx([1.1, 0.15])])


def test_constants_of_other_text_add_nothing_to_intervals() -> None:
    report = measured(lab(), calibration=drawn(2), probe=Causal(single_norms=False))
    assert (report.tables["causal_prompts"]["shift"] == 0).all()


def test_primary_contrasts_and_exploratory_families_are_adjusted_apart() -> None:
    report = measured(lab(), drawn(16))
    rows, by_prompt = report.causal, report.tables["causal_prompts"]
    assert rows["family"].value_counts().to_dict() == {
        "primary": 4, "exploratory: groups": 8, "exploratory: single norms, no_scaling": 5,
    }  # fmt: skip
    assert not any("one by one" in note for note in report.notes), "every norm was run on every prompt"
    for _, family in rows.groupby("family"):
        alone = []
        for row in family.itertuples():
            mine = by_prompt[(by_prompt["sites"] == row.sites) & (by_prompt["variant"] == row.variant)]
            tokens = mine["n"].to_numpy(float)
            alone.append(infer_mean(mine["delta_loss"].to_numpy() * tokens + mine["shift"].to_numpy(), tokens).p)
        np.testing.assert_allclose(family["p"], holm(alone))


def test_prompts_of_one_group_count_once() -> None:
    prompts = drawn(36)
    report = measured(lab(), prompts, groups=[i // 2 for i in range(36)], probe=Causal(single_norms=False))
    by_prompt = report.tables["causal_prompts"]
    assert by_prompt["stratum"].tolist()[: 12 * 3] == [""] * 36
    mine = by_prompt[(by_prompt["sites"] == "mlp") & (by_prompt["variant"] == "no_projection")]
    change = (mine["delta_loss"] * mine["n"]).to_numpy().reshape(18, 2).sum(1)
    inference = infer_mean(change, np.full(18, 16.0))
    row = report.causal.set_index(["sites", "variant"]).loc[("mlp", "no_projection")]
    assert (row["delta_loss_low"], row["n"]) == pytest.approx((inference.low, 36))
    few = measured(lab(), prompts, groups=[i % 15 for i in range(36)], probe=Causal(single_norms=False))
    assert few.causal[["delta_loss_low", "p", "equivalence_bound"]].isna().all(axis=None)
    assert not few.causal["sites"].str.startswith("blocks").any(), "no single norms"
    assert [note for note in few.notes if "15 prompt groups" not in note] == list(report.notes) == []
    just = measured(lab(), prompts, groups=[i % 16 for i in range(36)], probe=Causal(single_norms=False))
    assert (just.causal["p"].notna().all(), list(just.notes)) == (True, [])


@pytest.mark.parametrize("model", [lab(causal=False), make_bridge("bert")], ids=["lab", "bert"])
def test_a_bidirectional_model_has_no_next_token_loss(model: Any) -> None:
    report = measured(model)
    assert len(report.causal) == len(report.tables["causal_prompts"]) == 0
    assert any("bidirectional" in note for note in report.notes)


def test_one_token_predicts_nothing() -> None:
    report = measured(make_bridge("gpt2"), [PROMPTS[0], torch.tensor([4])])
    assert (report.causal["n"] == 1).all()
    assert set(report.tables["causal_prompts"]["prompt"]) == {0}
    report = measured(make_bridge("gpt2"), [torch.tensor([4]), torch.tensor([5])])
    assert len(report.causal) == 0
    assert any("nothing is predicted" in note for note in report.notes)


def test_a_norm_that_nobody_heeds_does_not_take_the_others_with_it() -> None:
    model = lab()
    with torch.no_grad():
        model.blocks[1].attn.W_O.zero_()
    report = measured(model)
    assert not {"blocks.1.ln1", "attention", "all"} & set(report.causal["sites"])
    assert {"blocks.0.ln1", "mlp", "final"} <= set(report.causal["sites"])
    assert any("causal: blocks.1.ln1" in note for note in report.notes)


def test_an_edit_that_overflows_is_said_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without scaling at every norm a stream can grow past the format's largest number (SmolLM2 in float32 does)."""
    model = make_bridge("gpt2")
    tiny = {norm.name: Constant(1e-30, 1e-30) for norm in find_norms(model)}
    monkeypatch.setattr("ln_probe.analyses.constants.Constants.of", lambda *_: tiny)
    report = measured(model)
    rows = report.causal.set_index(["sites", "variant"])
    assert rows.loc[("all", "no_scaling"), ["loss", "delta_loss", "delta_loss_low", "prompts_worse"]].isna().all()
    assert math.isfinite(rows.loc[("all", "no_projection"), "delta_loss"])
    assert any("not finite" in note and "all no_scaling" in note for note in report.notes)


@pytest.mark.parametrize("norm", [0, 1, -1])
def test_the_first_sum_is_the_derivative_of_the_loss(norm: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = lab().double()
    site, tokens = find_norms(model)[norm], PROMPTS[0]
    change = torch.randn(len(tokens), site.d, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    monkeypatch.setattr(NormEdit, "output", lambda edit, x: edit.norm.module(x) + change)
    first, _ = norm_estimates(model, tokens, {"it": NormEdit(site, ["intact"])})["it"]
    losses = []
    for step in (1e-5, -1e-5):

        def moved(y: torch.Tensor, hook: Any, step: float = step) -> torch.Tensor:
            return y + step * change

        with model.hooks(fwd_hooks=[(f"{site.name}.hook_out", moved)]):
            losses.append(loss_sum(model, tokens))
    assert first == pytest.approx((losses[0] - losses[1]) / 2e-5, rel=1e-5)


def test_the_second_sum_is_the_divergence_of_the_predictions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the final norm it is, over draws of the tokens, KL(intact ‖ edited) to second order."""
    model: Any = lab().double()
    site = find_norms(model)[-1]
    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(1, int(model.cfg.d_vocab), (200, 9), generator=generator)
    change = 0.02 * torch.randn(9, 1, dtype=torch.float64, generator=generator).expand(9, site.d)
    sums, divergence = 0.0, 0.0
    monkeypatch.setattr(NormEdit, "output", lambda edit, x: edit.norm.module(x) + change)
    for tokens in rows:
        sums += norm_estimates(model, tokens, {"it": NormEdit(site, ["intact"])})["it"][1]
        with torch.no_grad():
            before = model(tokens[None]).log_softmax(-1)[0, :-1]
            with model.hooks(fwd_hooks=[(f"{site.name}.hook_out", lambda y, hook: y + change)]):
                after = model(tokens[None]).log_softmax(-1)[0, :-1]
        divergence += float((before.exp() * (before - after)).sum())
    assert sums == pytest.approx(divergence, rel=0.15)  # 1600 draws, each with a relative deviation of about √2


def test_of_a_large_model_the_largest_on_odd_prompts_are_run_on_the_even_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    model, prompts = lab(), drawn(18)
    every = measured(model, prompts).causal.set_index("sites")
    monkeypatch.setattr(edited_passes, "EXACT_WORK", 0.0)
    monkeypatch.setattr(causal, "largest", lambda estimates: edited_passes.largest(estimates, 2))
    report = measured(model, prompts)
    rows = report.causal[~report.causal["sites"].isin(GROUPS)].set_index("sites")
    run = rows[rows["delta_loss"].notna()]
    by_prompt = report.tables["causal_prompts"]
    assert len(run) == 2 < len(rows)
    assert (run["n"] == 9).all()
    assert rows["estimate"].notna().all()
    assert (rows.drop(index=run.index)["n"] == 18).all()
    for sites in run.index:
        mine = by_prompt[by_prompt["sites"] == sites]
        assert mine["prompt"].tolist() == list(range(0, 18, 2))
        assert run.loc[sites, "delta_loss"] == pytest.approx(mine["delta_loss"].mean())
    constants, estimates = report.constants, {}
    for prompt in range(18):
        edits = {n.name: NormEdit.of(n, "no_scaling", constants.of(prompt)[n.name].pair) for n in find_norms(model)}
        for name, terms in norm_estimates(model, prompts[prompt], edits).items():
            estimates.setdefault(name, []).append(terms)
    sizes = {name: np.abs(np.sum(terms[1::2], 0)).sum() for name, terms in estimates.items()}
    for table, first in ((every, edited_passes.ESTIMATED_PROMPTS), (rows, 18)):
        for name, terms in estimates.items():
            assert table.loc[name, "estimate"] == pytest.approx(np.sum(terms[:first]) / (8 * first), rel=1e-4)
    assert set(run.index) == set(sorted(sizes, key=lambda name: -sizes[name])[:2])
    assert any("2 of 5 norms" in note for note in report.notes)
    exact = measured(model, prompts, probe=Causal(every_norm=True)).causal.set_index("sites")
    pd.testing.assert_series_equal(exact["delta_loss"], every["delta_loss"])
