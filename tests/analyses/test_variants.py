"""A variant is one object: registering one adds its rows everywhere, and changes no other number."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from small_models import lab
from torch import Tensor

import ln_probe
from ln_probe.analyses.probes.columns import CAUSAL, CAUSAL_PROMPTS, HEAD_EFFECTS, HEADS, KEYS
from ln_probe.hooks import without
from ln_probe.hooks.norm import Site
from ln_probe.hooks.sites import find_sites
from ln_probe.hooks.variants import VARIANT_WITHOUT, VARIANTS, Variant, edits_of_norms, no_op, register
from ln_probe.page.figures import causal_effects, entropy_by_layer

PROMPTS = torch.randint(0, 50, (33, 6), generator=torch.Generator().manual_seed(1)).tolist()


def of_tanh(site: Site, x: Tensor, constant: float | Tensor | None) -> Tensor:
    return torch.tanh(0.5 * x)


TANH = Variant(
    "example_tanh",
    frozenset({"scaling", "projection"}),
    "tanh instead",
    "#000000",
    "x",
    "Replacing norms by tanh",
    "norm replaced by tanh",
    transform=of_tanh,
    without="norm",
)


@contextmanager
def registered(variant: Variant) -> Iterator[Variant]:
    try:
        yield register(variant)
    finally:
        del VARIANTS[variant.name]
        VARIANT_WITHOUT.pop(variant.without, None)


def small() -> Any:
    return lab(d_model=16, n_heads=2, n_ctx=16)


def report_of(model: object) -> ln_probe.Report:
    """The loss on prompts that are enough for intervals, the geometry of a few of them."""
    losses = ln_probe.analyze(model, PROMPTS, probes=("causal", "head_effects"), layers=[1], progress=False)
    keys = ln_probe.analyze(
        model, PROMPTS[:2], probes=("selectability", "uniformity"), layers=[1], heads=[0], progress=False
    )
    return losses.with_tables(heads=keys.heads, keys=keys.keys)


@pytest.fixture(scope="module")
def before() -> ln_probe.Report:
    return report_of(small())


@pytest.fixture(scope="module")
def after(before: ln_probe.Report) -> Iterator[ln_probe.Report]:
    with registered(TANH):
        yield report_of(small())


def test_a_new_variant_is_measured_everywhere_and_changes_no_other_number(
    before: ln_probe.Report, after: ln_probe.Report
) -> None:
    for table in (CAUSAL, CAUSAL_PROMPTS, HEADS, HEAD_EFFECTS, KEYS):
        now, then = after.tables[table.name], before.tables[table.name]
        mine = now["variant"] == TANH.name
        assert mine.any(), table.name
        pd.testing.assert_frame_equal(now[~mine].reset_index(drop=True), then, check_exact=True)
    causal = after.causal[after.causal["variant"] == TANH.name].set_index("sites")
    assert causal.loc["all", "no_op"] == ""
    assert abs(causal.loc["all", "delta_loss"]) > 1e-3
    effects = after.head_effects.groupby("variant")["delta_loss"].agg(lambda x: x.abs().max())
    assert effects[TANH.name] > 1e-4
    entropy = after.heads[after.heads["space"] == "head"].groupby("variant")["entropy_ratio"].mean()
    assert abs(entropy[TANH.name] - entropy["intact"]) > 1e-6


def test_its_tests_are_a_family_of_their_own(after: ln_probe.Report) -> None:
    families = after.causal.groupby("family")["variant"].agg(set)
    assert families["primary"] == {"no_scaling", "no_projection"}
    assert [name for name, variants in families.items() if TANH.name in variants] == [
        "exploratory: groups, example_tanh",
        "exploratory: single norms, example_tanh",
    ]
    mine = after.head_effects[after.head_effects["variant"] == TANH.name]
    assert mine["p_sign"].notna().all()


def test_pictures_and_findings_show_it(after: ln_probe.Report) -> None:
    for figure in (causal_effects(after), entropy_by_layer(after)):
        labels = {text for axes in figure.axes for text in axes.get_legend_handles_labels()[1]}
        assert any(TANH.label in text for text in labels)
    row = after.causal.set_index(["sites", "variant"]).loc[("mlp", TANH.name)]
    told = any(TANH.wording.lower() in text.lower() for text in after.findings())
    assert told or not row["p_mean"] < 0.05


def test_without_switches_it_on(after: ln_probe.Report) -> None:
    model = small()
    site = next(s for s in find_sites(model) if s.layer == 1 and "attention" in s.reads)
    seen: list[tuple[Tensor, Tensor]] = []
    with without(model, "norm", sites=[site.name]):
        handle = site.module.register_forward_hook(lambda _m, args, y: seen.append((args[0], y)))
        model(torch.tensor(PROMPTS[:1]))
        handle.remove()
    x, y = seen[-1]
    torch.testing.assert_close(y, site.affine(torch.tanh(0.5 * x)))
    assert no_op(site, TANH.name) == ""


def test_two_variants_that_do_the_same_are_one_computation() -> None:
    """Another name for a standard variant has its numbers, bit for bit, and does not replace its rows."""
    with registered(Variant("twin", frozenset({"scaling"}), "twin", "#000000", "x", "Twinning", "twin")):
        found = ln_probe.analyze(small(), PROMPTS[:2], probes=("causal",), layers=[1], progress=False)
    rows = found.causal.set_index(["sites", "variant"])
    for sites in ("attention", "all"):
        one, two = (rows.loc[(sites, v), ["delta_loss", "kl"]].to_numpy(float) for v in ("no_scaling", "twin"))
        np.testing.assert_array_equal(one, two)


def test_names_are_taken_once() -> None:
    with pytest.raises(ValueError, match="there is a variant 'both_removed' already: give yours another name"):
        register(VARIANTS["both_removed"])
    with pytest.raises(ValueError, match=r"without\(model, 'scaling'\) is a variant already"):
        register(replace(TANH, name="another", without="scaling"))


def test_what_is_standard_is_fixed() -> None:
    assert [v.name for v in edits_of_norms(standard=True)] == ["no_scaling", "no_projection", "both_removed"]
