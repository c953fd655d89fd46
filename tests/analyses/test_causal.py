"""The causal table: the same numbers as from plain `without`, and what it says where nothing can be said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from architectures import make_bridge
from small_models import lab

import ln_probe
from ln_probe.analyses.constants import Constants
from ln_probe.analyses.probes import causal as causal_table
from ln_probe.analyses.probes.edited_runs import SINGLE_NORM_PROMPTS, EditedRuns
from ln_probe.analyses.probes.tables import CAUSAL
from ln_probe.hooks import without
from ln_probe.hooks.constants import Constant, mean_sigmas
from ln_probe.hooks.model import HookedModel
from ln_probe.hooks.norm import VARIANTS
from ln_probe.hooks.norms import find_norms

PROMPTS = [torch.arange(1, 13), torch.arange(20, 29), torch.tensor([7, 7, 3, 7])]
NUMBERS = ["loss", "delta_loss", "kl", "top1_agreement", "entropy_change"]


def separate(prompts: int) -> Constants:
    """Every prompt a group of its own, nothing known of sigma."""
    nothing = np.zeros((prompts, 0, 2))
    return Constants((), np.arange(prompts), nothing, nothing)


def tabulated(frames: list[pd.DataFrame]) -> pd.DataFrame:
    return causal_table.table(frames, separate(SINGLE_NORM_PROMPTS + 40))


def noted(frames: list[pd.DataFrame]) -> list[str]:
    return causal_table.notes_on(frames, separate(SINGLE_NORM_PROMPTS + 40))


def measured(
    model: HookedModel, prompts: list[torch.Tensor] = PROMPTS, **options: Any
) -> tuple[EditedRuns, pd.DataFrame, list[str]]:
    """The analysis, its table and its notes."""
    sites = find_norms(model)
    effects = EditedRuns(model, sites, mean_sigmas(model, sites, prompts), **options)
    frames = [effects.measure(i, row) for i, row in enumerate(prompts)]
    return effects, tabulated(frames), [*effects.notes(), *noted(frames)]


def forward_passes(model: Any, effects: EditedRuns) -> list[int]:
    """Rows of every batch that goes through the model: those of its final norm, which no edit passes over."""
    (final,) = [s for s in find_norms(model) if s.reads == "unembed"]
    rows: list[int] = []
    handle = final.module.register_forward_hook(lambda _m, _args, output: rows.append(len(output)))
    effects.measure(0, PROMPTS[0])
    handle.remove()
    return rows


def test_primary_contrasts_are_run_with_one_constant_and_with_loss_optimal_ones_too() -> None:
    """Against `without` with the same constants."""
    model = make_bridge("gpt2", torch.float64)
    sites = find_norms(model)
    means = mean_sigmas(model, sites, PROMPTS)
    best = {n: Constant(1.1 * c.first, 0.9 * c.rest) for n, c in means.items()}
    effects = EditedRuns(model, sites, means, optimal=lambda group, prompt: best if group == "all" else {})
    rows = tabulated([effects.measure(0, PROMPTS[0])]).set_index(["sites", "variant"])
    with torch.no_grad():
        with without(model, "scaling", sites="attention", scale={n: c.uniform for n, c in means.items()}):
            one = float(model(PROMPTS[0][None], return_type="loss"))
        with without(model, "scaling", sites="all", scale=best):
            optimal = float(model(PROMPTS[0][None], return_type="loss"))
    base = (rows["loss"] - rows["delta_loss"]).iloc[0]
    assert rows.loc[("attention", "no_scaling"), "delta_loss_uniform"] == pytest.approx(one - base, abs=1e-10)
    assert rows.loc[("all", "no_scaling"), "delta_loss_optimal"] == pytest.approx(optimal - base, abs=1e-10)
    assert rows["delta_loss_optimal"].notna().sum() == 1
    known = rows.index[rows["delta_loss_uniform"].notna()]
    assert list(known) == [("attention", "no_scaling"), ("all", "no_scaling")]


def test_single_norms_are_taken_from_the_first_prompts() -> None:
    model = make_bridge("gpt2")
    sites = find_norms(model)
    effects = EditedRuns(model, sites, mean_sigmas(model, sites, PROMPTS))
    early, late = (effects.measure(n, PROMPTS[2]) for n in (SINGLE_NORM_PROMPTS - 1, SINGLE_NORM_PROMPTS))
    assert set(early["sites"]) - set(late["sites"]) == {s.name for s in sites}
    counts = tabulated([early, late]).set_index(["sites", "variant"])["prompts"]
    assert counts.loc[("all", "both_removed")] == 2
    assert counts.loc[("ln_final", "both_removed")] == 1
    assert "causal: single norms were edited on the first 1 of 2 prompts" in noted([early, late])


def test_what_cannot_change_is_not_computed_and_says_so() -> None:
    model = make_bridge("llama")
    effects, table, _ = measured(model)
    # The unedited model; then scaling at five sites and three groups (the fourth is the final norm), with two constants
    # and, of two groups, with one: edits that begin at the same block (0, 1, or after both) together. Then estimates.
    assert forward_passes(model, effects) == [1, 5, 2, 1, 2, 1]
    rows = table.set_index(["sites", "variant"])
    kept = rows.xs("no_projection", level="variant")
    assert (kept["delta_loss"] == 0).all()
    assert (kept["kl"] == 0).all()
    assert (kept["no_op"] == "rmsnorm: it has no projection").all()
    assert (rows.xs("no_scaling", level="variant")["no_op"] == "").all()
    one, two = rows.xs("no_scaling", level="variant"), rows.xs("both_removed", level="variant")
    pd.testing.assert_frame_equal(one[NUMBERS], two[NUMBERS])


@pytest.mark.parametrize("prompts", [[PROMPTS[0], torch.tensor([4])], [torch.tensor([4])]], ids=len)
def test_one_prompt_gives_no_interval_and_one_token_no_loss(prompts: list[torch.Tensor]) -> None:
    _, table, notes = measured(make_bridge("gpt2"), prompts)
    assert table[["delta_loss_low", "delta_loss_high"]].isna().all(axis=None)
    assert table["kl"].notna().all()
    if len(prompts[0]) == 1:
        assert table[["loss", "delta_loss", "entropy_change"]].isna().all(axis=None)
    else:
        assert table["delta_loss"].notna().all()
        assert notes == [
            "causal: 1 prompt predicts something; confidence intervals need 32 groups, so there are none, and loss "
            "changes are of these prompts alone"
        ]


def test_a_bidirectional_model_has_no_next_token_loss() -> None:
    _, table, notes = measured(lab(causal=False))
    assert table[["loss", "delta_loss", "delta_loss_low"]].isna().all(axis=None)
    assert table["kl"].notna().all()
    assert table["entropy_change"].notna().all()
    assert [note[:70] for note in notes] == ["causal: the loss is not applicable: attention is bidirectional, so the"]


def test_logits_that_mean_nothing_are_left_out() -> None:
    _, table, notes = measured(make_bridge("gpt2"), meaningless="its head is drawn at random")
    assert table[["loss", "delta_loss", "kl", "top1_agreement"]].isna().all(axis=None)
    assert table["entropy_change"].notna().all()
    assert "left out: its head is drawn at random" in notes[0]


def test_a_norm_that_nobody_heeds_does_not_take_the_others_with_it() -> None:
    model = lab()
    with torch.no_grad():
        model.blocks[1].attn.W_O.zero_()
    _, table, notes = measured(model)
    lost = table[table["sites"].isin(["blocks.1.ln1", "attention", "all"]) & (table["variant"] != "intact")]
    assert lost[NUMBERS].isna().all(axis=None)
    assert table.drop(lost.index)[NUMBERS].notna().all(axis=None)
    assert "causal: blocks.1.ln1: the edit was lost" in notes[0]


def test_an_edit_that_overflows_is_said_to() -> None:
    """Without scaling at every norm a stream can grow past the format's largest number (SmolLM2 in float32 does)."""
    model = make_bridge("gpt2")
    sites = find_norms(model)
    effects = EditedRuns(model, sites, dict.fromkeys((s.name for s in sites), 1e-30))
    frames = [effects.measure(i, row) for i, row in enumerate(PROMPTS)]
    rows = tabulated(frames).set_index(["sites", "variant"])
    numbers = ["loss", "delta_loss", "delta_loss_low", "kl", "entropy_change", "prompts_worse", "p_sign"]
    assert rows.loc[("all", "no_scaling"), numbers].isna().all()
    assert rows.loc[("all", "no_projection"), NUMBERS].notna().all()
    assert any("logits are not finite, so there are no numbers: " in n and "all no_scaling" in n for n in noted(frames))


def test_in_a_report(tmp_path: Path) -> None:
    model, tokens = make_bridge("gpt2"), torch.stack([torch.arange(1, 17), torch.arange(20, 36)])
    report = ln_probe.analyze(model, tokens, probes=("causal",), progress=False)
    assert [c for c in CAUSAL.names if c in report.causal] == CAUSAL.names
    assert len(report.causal) == len(VARIANTS) * (4 + 5)
    assert len(report.layernorms) == len(report.heads) == 0
    row = report.causal.set_index(["sites", "variant"]).loc[("mlp", "no_scaling")]
    losses = []
    for prompt in range(2):
        with torch.no_grad(), without(model, "scaling", sites="mlp", scale=report.constants.of(prompt)):
            losses.append(float(model(tokens[prompt][None], return_type="loss")))
    assert float(row["loss"]) == pytest.approx(np.mean(losses), rel=1e-5)
    report.save(tmp_path / "r")
    pd.testing.assert_frame_equal(ln_probe.load_report(tmp_path / "r").causal, report.causal)
    assert any(
        "Removing projection at every norm changes the loss by" in said and "on 2 prompts: no CI" in said
        for said in report.findings()
    )
    part = ln_probe.analyze(model, tokens, probes=("causal",), layers=[1], progress=False)
    assert list(dict.fromkeys(part.causal["sites"])) == ["attention", "mlp", "all", "blocks.1.ln1", "blocks.1.ln2"]
    assert any("groups of the causal table hold the norms of layers 1 alone" in n for n in part.notes)
    assert len(ln_probe.analyze(model, tokens, probes=("uniformity",), progress=False).causal) == 0


@pytest.mark.slow
def test_mgm_against_an_edit_of_the_hugging_face_model(mgm: Path) -> None:
    """Scaling frozen before attention, once more: in GPT2LMHeadModel itself, with constants computed by hand."""
    from transformers import AutoModelForCausalLM

    model: Any = ln_probe.load_model(mgm, allow_pickle=True)
    tokens = torch.randint(4, 9669, (3, 96), generator=torch.Generator().manual_seed(0))
    tokens[:, 0] = 2
    report = ln_probe.analyze(model, tokens, probes=("causal",), progress=False)
    rows = report.causal.set_index(["sites", "variant"])
    original = AutoModelForCausalLM.from_pretrained(mgm, attn_implementation="eager").eval()
    seen: dict[int, torch.Tensor] = {}
    for layer, block in enumerate(original.transformer.h):
        block.ln_1.register_forward_pre_hook(lambda _m, args, layer=layer: seen.__setitem__(layer, args[0]))
    with torch.no_grad():
        intact = float(original(tokens, labels=tokens).loss)
        sigmas = []
        for layer, block in enumerate(original.transformer.h):
            block.ln_1._forward_pre_hooks.clear()
            sigmas.append((seen[layer].double().var(-1, correction=0) + block.ln_1.eps).sqrt())
        edited = []
        for prompt in range(3):
            others = [p for p in range(3) if p != prompt]
            for sigma, block in zip(sigmas, original.transformer.h, strict=True):
                c = torch.full((96, 1), float(sigma[others, 1:].mean()))
                c[0] = float(sigma[others, 0].mean())
                block.ln_1.forward = lambda x, m=block.ln_1, c=c: (x - x.mean(-1, keepdim=True)) / c * m.weight + m.bias
            edited.append(float(original(tokens[prompt : prompt + 1], labels=tokens[prompt : prompt + 1]).loss))
    assert rows.loc[("attention", "intact"), "loss"] == pytest.approx(intact, rel=1e-5)
    assert rows.loc[("attention", "no_scaling"), "loss"] == pytest.approx(np.mean(edited), rel=1e-4)


def test_sums_of_prompts_become_rates_per_token() -> None:
    def sums(variant: str, **more: float) -> dict[str, Any]:
        row: dict[str, Any] = {"prompt": 3, "sites": "all", "variant": variant, "predicted": 8, "positions": 4}
        row |= {"queries": 2, "nll": 16.0, "nll_uniform": 18.0, "nll_optimal": 20.0, "kl": 0.0, "agree": 4.0}
        return row | {"entropy": 3.0} | more

    nothing = np.zeros((4, 0, 2))
    constants = Constants((), np.array([0, 1, 0, 2]), nothing, nothing)
    (row,) = causal_table.by_prompt([
        pd.DataFrame([sums("intact"), sums("both_removed", nll=24.0, kl=6.0, agree=3.0, entropy=4.0)])
    ], constants).to_dict("records")  # fmt: skip
    assert row == {
        "prompt": 3, "group": 2, "sites": "all", "variant": "both_removed", "predicted": 8, "loss": 2.0,
        "delta_loss": 1.0, "shift": 0.0, "delta_loss_uniform": 0.25, "delta_loss_optimal": 0.5,
        "kl": 1.5, "top1_agreement": 0.75, "entropy_change": 0.5,
    }  # fmt: skip
    one = causal_table.by_prompt([pd.DataFrame([sums("intact"), sums("no_projection", predicted=0)])], constants)
    assert one[["loss", "delta_loss_uniform", "delta_loss_optimal"]].isna().all(axis=None)
