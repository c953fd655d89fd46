"""One row a head of what the other tables say, and the picture of it."""

from __future__ import annotations

import numpy as np
import pytest
from matplotlib.figure import Figure

from ln_probe.analyses.probes.columns import BY_HEAD
from ln_probe.page.figures import svg
from ln_probe.page.heads import MEASURES, heads_map, measures_of
from ln_probe.report import Report


def test_every_figure_is_that_of_its_table(report: Report) -> None:
    table = report.by_head()
    assert table[["layer", "head"]].to_numpy().tolist() == [[i, h] for i in range(2) for h in range(4)]
    assert table.columns.tolist() == BY_HEAD.names
    effects = report.tables["head_effects"].set_index(["layer", "head", "variant"])
    heads = report.heads[report.heads["space"] == "head"].set_index(["layer", "head", "variant"])
    sinks = report.tables["sink_heads"].set_index(["layer", "head"])
    for row in table.to_dict("records"):
        place = (row["layer"], row["head"])
        assert row["delta_loss"] == effects.loc[(*place, "no_scaling"), "delta_loss"]
        assert row["delta_loss_both_removed"] == effects.loc[(*place, "both_removed"), "delta_loss"]
        assert row["exact"]
        intact, frozen = (heads.loc[(*place, v)] for v in ("intact", "no_scaling"))
        assert row["entropy_change"] == frozen["entropy_ratio"] - intact["entropy_ratio"]
        assert row["received"] == intact["pattern_max_median"]
        assert row["margin"] == intact["margin_median"]
        assert row["first_attention"] == sinks.loc[place, "first_attention"]


def test_effects_that_were_not_run_are_estimated(report: Report) -> None:
    effects = report.tables["head_effects"].copy()
    gone = (effects["layer"] == 1) & (effects["head"] == 2)
    effects.loc[gone, ["delta_loss", "p_adjusted"]] = np.nan
    table = report.with_tables(head_effects=effects).by_head().set_index(["layer", "head"])
    estimate = effects[gone & (effects["variant"] == "no_scaling")]["estimate"].iloc[0]
    assert table.loc[(1, 2), "delta_loss"] == estimate
    assert not table.loc[(1, 2), "exact"]
    assert table.loc[(1, 1), "exact"]


def test_sorted_by_size(report: Report) -> None:
    sizes = report.by_head("delta_loss")["delta_loss"].abs()
    assert sizes.is_monotonic_decreasing
    with pytest.raises(ValueError, match="by_head has no column 'loss_delta': there are layer, head, delta_loss"):
        report.by_head("loss_delta")


def test_a_report_without_heads(report: Report) -> None:
    empty = Report()
    assert len(empty.by_head()) == 0
    assert empty.by_head().columns.tolist() == BY_HEAD.names
    assert measures_of(empty) == []
    some = report.with_tables(head_effects=report.tables["head_effects"].iloc[:0])
    assert len(some.by_head()) == 8
    assert some.by_head()["delta_loss"].isna().all()
    assert "delta_loss" not in measures_of(some)


def test_the_picture_of_every_measure(report: Report) -> None:
    for measure in measures_of(report):
        figure = heads_map(report, measure)
        assert isinstance(figure, Figure)
        mesh = figure.axes[0].collections[0]
        table = report.by_head().pivot(index="layer", columns="head", values=measure)
        np.testing.assert_array_equal(np.asarray(mesh.get_array()).reshape(2, 4), table.to_numpy())
        low, high = mesh.get_clim()
        assert (low == -high) == bool(MEASURES[measure].signed or (table < 0).any(axis=None))
        assert svg(figure, "x") == svg(heads_map(report, measure), "x")
    with pytest.raises(ValueError, match="unknown measure 'size': there are delta_loss"):
        heads_map(report, "size")


def test_the_page_offers_the_measures(report: Report) -> None:
    from ln_probe.page.page import groups

    (group,) = [g for g in groups(report) if g.id == "heads-pictures"]
    (shown,) = group.pictures
    assert [d.name for d in shown.drawings] == [MEASURES[m].title for m in measures_of(report)]
    assert [d.first for d in shown.drawings].count(True) == 1
    assert any(
        f.startswith("No effect of a single head can be significant: 1 prompt is too few") for f in report.findings()
    )
