"""Effects of single heads on the loss: exact ones against `without`, estimates against slopes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from architectures import make_bridge
from small_models import lab
from torch import Tensor

import ln_probe
from ln_probe.analyses.probes import edited_passes, head_effects
from ln_probe.analyses.probes.base import ProbeError
from ln_probe.analyses.probes.head_effects import HeadEffects
from ln_probe.analyses.probes.statistics import infer_mean
from ln_probe.hooks import without
from ln_probe.hooks.norm import EDITS
from ln_probe.report import Report

TERM = {"no_scaling": "scaling", "no_projection": "projection", "both_removed": "both"}
PROMPTS = torch.tensor([[3, 17, 4, 4, 29, 11, 8, 40], [1, 2, 3, 5, 8, 13, 21, 34]])
EVERY = [variant.name for variant in EDITS]

pytestmark = pytest.mark.filterwarnings("ignore::ln_probe.hooks.edits.NoOpWarning")


def measured(model: Any, prompts: Any = PROMPTS, **options: Any) -> Report:
    probe = HeadEffects(**{name: options.pop(name) for name in ("variants", "every_head") if name in options})
    return ln_probe.analyze(model, prompts, probes=[probe], progress=False, **options)


def loss(model: Any, tokens: Tensor) -> float:
    with torch.no_grad():
        logits = model(tokens[None], return_type="logits")[0].double()
    return float(torch.nn.functional.cross_entropy(logits[:-1], tokens[1:], reduction="sum"))


def drawn(count: int) -> Tensor:
    return torch.randint(1, 40, (count, 9), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("arch", ["lab", "gpt2", "neox"])  # plain attention; rotary, attention and MLP side by side
def test_effects_are_those_of_an_own_loop(arch: str) -> None:
    model = lab().double() if arch == "lab" else make_bridge(arch, torch.float64)
    report = measured(model, variants=EVERY)
    table = report.head_effects.set_index(["layer", "head", "variant"])
    assert len(table) == 2 * 4 * 3
    for layer, head, variant in [
        *((layer, head, "no_scaling") for layer in range(2) for head in range(4)),
        (0, 2, "both_removed"),
        (1, 1, "no_projection"),
    ]:
        changes = []
        for prompt, tokens in enumerate(PROMPTS):
            with without(model, TERM[variant], heads=[(layer, head)], scale=report.constants.of(prompt)):
                changes.append(loss(model, tokens))
        change = sum(changes) - sum(loss(model, tokens) for tokens in PROMPTS)
        assert table.loc[(layer, head, variant), "delta_loss"] == pytest.approx(change / 14, abs=1e-6)
        assert abs(change) > 1e-4


def test_heads_that_share_a_key_are_edited_one_by_one() -> None:
    report = measured(make_bridge("llama", torch.float64), variants=EVERY)
    table = report.head_effects.set_index(["layer", "head", "variant"])["delta_loss"]
    assert set(table.index.get_level_values("variant")) == {"no_scaling", "both_removed"}  # RMSNorm has no projection
    assert table.notna().all()
    assert (table.xs("no_scaling", level="variant") == table.xs("both_removed", level="variant")).all()
    assert table.abs().min() > 1e-6


def test_an_estimate_is_the_slope_towards_the_edited_head(monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = lab().double()
    heads: list[Any] = []
    made = head_effects._IntactHeads
    monkeypatch.setattr(head_effects, "_IntactHeads", lambda *args: heads.append(made(*args)) or heads[-1])
    tokens = PROMPTS[1]
    report = measured(model, [tokens, PROMPTS[0]], variants=EVERY)
    first = heads[1]  # the first ones are of the check
    places = [(0, 1, "no_scaling"), (1, 2, "both_removed"), (0, 3, "no_projection")]
    slopes = {}
    for layer, head, variant in places:
        change = first.edited[layer, variant] - first.z[layer]
        ends = []
        for step in (1e-4, -1e-4):

            def moved(z: Tensor, hook: Any, step: float = step, head: int = head, change: Tensor = change) -> Tensor:
                out = z.clone()
                out[0, :, head] += step * change[:, head]
                return out

            with model.hooks(fwd_hooks=[(f"blocks.{layer}.attn.hook_z", moved)]):
                ends.append(loss(model, tokens))
        slopes[layer, head, variant] = (ends[0] - ends[1]) / 2e-4
    monkeypatch.setattr(head_effects, "ESTIMATED_PROMPTS", 1)  # of the first prompt alone
    alone = measured(model, [tokens, PROMPTS[0]], variants=EVERY).head_effects.set_index(["layer", "head", "variant"])
    for place in places:
        assert alone.loc[place, "estimate"] == pytest.approx(slopes[place] / 7, rel=1e-4, abs=1e-8)
    assert (alone["n"] == report.head_effects["n"].to_numpy()).all()


def test_intervals_and_p_are_over_all_prompts() -> None:
    report = measured(lab(), drawn(16))
    table = report.head_effects
    assert set(table["variant"]) == {"no_scaling"}
    assert (table["n"] == 16).all()
    changes = {}
    model = lab()
    for layer, head in ((0, 1), (1, 3)):
        for prompt, tokens in enumerate(drawn(16)):
            with without(model, "scaling", heads=[(layer, head)], scale=report.constants.of(prompt)):
                changes.setdefault((layer, head), []).append(loss(model, tokens))
    intact = np.array([loss(model, tokens) for tokens in drawn(16)])
    rows = table.set_index(["layer", "head"])
    for place, losses in changes.items():
        inference = infer_mean(np.array(losses) - intact, np.full(16, 8.0))
        row = rows.loc[place]
        assert (row["delta_loss_low"], row["delta_loss_high"]) == pytest.approx(
            (inference.low, inference.high), rel=1e-3
        )
        assert row["prompts_worse"] == (np.array(losses) > intact).sum()
        assert row["p"] >= inference.p * 0.99
    assert measured(lab(), drawn(7)).head_effects["p"].isna().all()


def test_of_a_large_model_the_largest_on_odd_prompts_are_run_on_the_even_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    model, prompts = lab(), drawn(18)
    every = measured(model, prompts, every_head=True).head_effects.set_index(["layer", "head"])
    monkeypatch.setattr(edited_passes, "EXACT_WORK", 0.0)
    monkeypatch.setattr(head_effects, "largest", lambda estimates: edited_passes.largest(estimates, 3))
    report = measured(model, prompts)
    rows = report.head_effects.set_index(["layer", "head"])
    run = rows[rows["delta_loss"].notna()]
    assert len(run) == 3 < len(rows)
    assert (run["n"] == 9).all()
    assert rows["estimate"].notna().all()
    assert rows.drop(index=run.index)["p"].isna().all()
    assert any("3 of 8 heads" in note for note in report.notes)
    for (layer, head), row in run.iterrows():
        change = 0.0
        for prompt in range(0, 18, 2):
            with without(model, "scaling", heads=[(layer, head)], scale=report.constants.of(prompt)):
                change += loss(model, prompts[prompt])
            change -= loss(model, prompts[prompt])
        assert row["delta_loss"] == pytest.approx(change / 72, abs=1e-6)
    assert not every["delta_loss"].isna().any()


def test_rows_a_pass_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    at_once = measured(lab().double())
    monkeypatch.setattr(edited_passes, "TOKENS_AT_ONCE", 1)
    pd.testing.assert_frame_equal(measured(lab().double()).head_effects, at_once.head_effects, rtol=1e-9)


def test_models_without_a_loss_or_norms(monkeypatch: pytest.MonkeyPatch) -> None:
    for model, said in ((make_bridge("bert"), "attention is bidirectional"), (lab(norm=None), "")):
        report = ln_probe.analyze(model, PROMPTS, probes=("head_effects",), progress=False)
        assert not len(report.head_effects)
        assert any(f"head_effects: nothing was measured: {said}" in n for n in report.notes) == bool(said)
        assert not report.failures

    def fails(_: object) -> None:
        raise ValueError("attention has no outputs of heads")

    monkeypatch.setattr(head_effects._Watching, "check", fails)
    assert any("nothing was measured: attention has no outputs" in note for note in measured(lab()).notes)


def test_heads_layers_and_variants_that_are_asked_for() -> None:
    report = measured(lab(), layers=[1], heads=[2])
    assert [tuple(place) for place in report.head_effects[["layer", "head"]].to_numpy()] == [(1, 2)]
    with pytest.raises(ProbeError, match="no_scale"):
        HeadEffects(variants=["no_scale"])
