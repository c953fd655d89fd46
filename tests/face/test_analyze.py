"""A model in, a report out: on real checkpoints, in both TransformerLens worlds, and with bad input."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ln_probe
from ln_probe.report import TABLES, Report

CLOSED_FORM = {
    "layernorms": ["tokens", "mean_share", "angle_to_ones_deg", "norm_before_mean", "norm_before_cv", "norm_after_mean",
                   "scale_mean", "scale_cv", "gain_mean", "gain_cv", "bias_norm", "mean_share_tail", "sigma_mean",
                   "sigma_mean_tail", "norm_before_mean_tail", "eps"],
    "heads": ["keys", "query_radius", "entropy_ratio", "uniform_angle_deg", "score_spread", "score_spread_floor",
              "pattern_max_median"],
    "keys": ["pattern_max"],
}  # fmt: skip
SAME = {
    "layernorms": ["site", "layer", "kind", "reads", "state"],
    "heads": ["layer", "head", "space", "variant", "keys", "unselectable", "duplicate", "by_theorem", "no_op"],
    "keys": ["layer", "head", "space", "variant", "prompt", "position", "token"],
}  # fmt: skip
SAFE_MARGIN = 1e-6  # verdicts must be identical where the margin is above 10 tau


def assert_same_findings(one: Report, two: Report, tolerance: float) -> None:
    """Closed-form columns within `tolerance` relative, verdicts and NaN masks identical, brackets overlapping."""
    for table, columns in SAME.items():
        a, b = getattr(one, table), getattr(two, table)
        assert len(a) == len(b) > 0, table
        for column in columns:
            assert (a[column].astype(str) == b[column].astype(str)).all(), f"{table}.{column}"
    for table, columns in CLOSED_FORM.items():
        for column in columns:
            a, b = (getattr(r, table)[column].to_numpy(float) for r in (one, two))
            assert (np.isnan(a) == np.isnan(b)).all(), f"{table}.{column}"
            # relative to the column's size: a spread of 1e-6 between keys of size 1 is rounding
            scale = np.maximum(np.abs(b), np.nanmax(np.abs(b), initial=0) * 1e-2)
            worst = np.nanmax(np.abs(a - b) / np.where(scale > 0, scale, 1), initial=0)
            assert worst < tolerance, f"{table}.{column}: {worst:.2e}"
    margins = two.keys["margin_lower"].to_numpy(float)
    clear = ~(margins < SAFE_MARGIN) | np.isnan(margins)
    assert (one.keys["verdict"][clear] == two.keys["verdict"][clear]).all()
    slack = 1e-4 * (1 + two.keys["margin_upper"])
    assert not (one.keys["margin_lower"] > two.keys["margin_upper"] + slack).any()
    assert not (two.keys["margin_lower"] > one.keys["margin_upper"] + slack).any()


def two_worlds(path: Path, tokens: torch.Tensor, **how: Any) -> tuple[Report, Report]:
    pytest.importorskip("transformer_lens")
    try:
        from transformer_lens import HookedTransformer  # noqa: F401
    except ImportError:
        pytest.skip("this TransformerLens has no HookedTransformer to compare with")
    reports = []
    for world in ("hooked", "bridge"):
        model = ln_probe.load_model(path, world=world, **how)  # type: ignore[arg-type]
        reports.append(ln_probe.analyze(model, tokens, progress=False, keys="all"))
    return reports[0], reports[1]


def test_capp_gpt_in_both_worlds(capp: Path) -> None:
    tokens = torch.randint(0, 53, (2, 96), generator=torch.Generator().manual_seed(0))
    hooked, bridge = two_worlds(capp, tokens)
    assert_same_findings(hooked, bridge, 1e-4)
    for report in (hooked, bridge):
        assert report.layernorms["reconstruction_error"].max() < 1e-5
        assert len(report.layernorms) == 9
        assert report.heads["undecided"].sum() == 0


@pytest.mark.slow
def test_mgm_in_both_worlds(mgm: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(4, 9669, (1, 128), generator=generator)
    tokens[:, 0] = 2
    hooked, bridge = two_worlds(mgm, tokens, allow_pickle=True)
    assert_same_findings(hooked, bridge, 1e-4)
    for report in (hooked, bridge):
        assert report.layernorms["reconstruction_error"].max() < 1e-5
        assert len(report.layernorms) == 17


def test_a_report_says_where_it_came_from(capp: Path) -> None:
    report = ln_probe.analyze(ln_probe.load_model(capp), "sampled", max_tokens=16, layers=[1], progress=False)
    provenance = report.provenance
    assert provenance["model"]["kind"] == "folder"
    assert len(provenance["model"]["weights_sha256"]) == 64
    assert provenance["prompts"] | {"sha256": ""} == {
        "source": "sampled", "count": 4, "tokens": 64, "longest": 16, "sha256": "",
    }  # fmt: skip
    assert provenance["arguments"]["layers"] == [1]
    assert provenance["thresholds"]["tau"] == 1e-7
    assert set(provenance["constants"]) == {"blocks.1.ln1", "blocks.1.ln2"}
    row = report.layernorms.set_index("site").loc["blocks.1.ln1"]
    assert provenance["constants"]["blocks.1.ln1"] == pytest.approx(row["sigma_mean_tail"])
    assert set(report.heads["layer"]) == {1}
    assert any("sampled from the model itself" in n for n in report.notes)


def test_layers_and_heads_are_a_selection_of_the_whole(make_bridge: Callable[..., Any]) -> None:
    model, tokens = make_bridge("gpt2"), torch.arange(1, 25)[None]
    whole = ln_probe.analyze(model, tokens, progress=False, keys="all")
    part = ln_probe.analyze(model, tokens, progress=False, keys="all", layers=[1], heads=[0, 2])
    expected = whole.heads[(whole.heads["layer"] == 1) & whole.heads["head"].isin([-1, 0, 2])].reset_index(drop=True)
    assert part.heads.equals(expected)
    assert set(part.keys["head"]) == {-1, 0, 2}
    assert set(part.layernorms["layer"]) == {1}


def test_probes_fill_only_their_tables(make_bridge: Callable[..., Any]) -> None:
    model, tokens = make_bridge("gpt2"), torch.arange(1, 17)[None]
    only = ln_probe.analyze(model, tokens, probes=("decomposition",), progress=False)
    assert len(only.layernorms) == 5
    assert len(only.heads) == len(only.keys) == 0
    uniform = ln_probe.analyze(model, tokens, probes=("uniformity",), progress=False)
    assert len(uniform.layernorms) == len(uniform.keys) == 0
    assert uniform.heads["entropy_ratio"].notna().all()
    assert uniform.heads["unselectable"].isna().all()


def test_the_model_is_left_as_it_was(make_bridge: Callable[..., Any]) -> None:
    model, tokens = make_bridge("gpt2"), torch.arange(1, 17)[None]
    model.train()
    before = {n: p.clone() for n, p in model.named_parameters()}
    ln_probe.analyze(model, tokens, progress=False)
    assert model.training
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())
    assert not any(m._forward_hooks for _, m in model.named_modules() if type(m).__name__ == "HookPoint")


def test_a_model_without_norms_is_reported_as_such(make_hooked: Callable[..., Any]) -> None:
    report = ln_probe.analyze(make_hooked(normalization_type=None), torch.arange(9)[None], progress=False)
    assert [len(getattr(report, t)) for t in TABLES] == [0] * 5
    assert "the model has no normalization" in report.notes[0]
    assert report.findings() == ["The model has no normalization: there is nothing to take apart."]
    assert "no normalization" in report._repr_html_()


def test_unsupported_scores_are_a_note_and_the_rest_is_measured(make_hooked: Callable[..., Any]) -> None:
    model = make_hooked(positional_embedding_type="alibi")
    report = ln_probe.analyze(model, torch.arange(20)[None], progress=False)
    assert any("head space was not measured. layer 0: the model's attention pattern differs" in n for n in report.notes)
    assert set(report.heads["space"]) == {"normalized"}
    assert len(report.layernorms) == 5


def test_centred_streams_are_called_no_ops(make_hooked: Callable[..., Any]) -> None:
    model = make_hooked()
    model.load_and_process_state_dict(
        model.state_dict(), fold_ln=False, center_writing_weights=True, center_unembed=False, fold_value_biases=False
    )
    report = ln_probe.analyze(model, torch.arange(20)[None], progress=False)
    assert any("5 of 5 norms read a stream that is already centred" in n for n in report.notes)
    assert any("Projection removes nothing" in f for f in report.findings())
    rows = report.heads.set_index(["space", "layer", "head", "variant"]).sort_index()
    assert (rows.xs("no_projection", level="variant")["no_op"] != "").all()


def test_nan_weights_name_the_site(make_hooked: Callable[..., Any]) -> None:
    model = make_hooked()
    with torch.no_grad():
        model.blocks[0].mlp.W_out[0, 0] = float("nan")
    with pytest.raises(ValueError, match=r"blocks\.1\.ln1: its input holds NaN or infinite values"):
        ln_probe.analyze(model, torch.arange(20)[None], progress=False)


def test_a_single_token(make_bridge: Callable[..., Any]) -> None:
    report = ln_probe.analyze(make_bridge("gpt2"), torch.tensor([[3]]), progress=False)
    assert (report.keys["verdict"] == "selectable").all()
    assert report.keys["margin_lower"].isna().all()
    assert report.heads["entropy_ratio"].isna().all()
    assert "<" in report._repr_html_()


@pytest.mark.parametrize(("options", "said"), [
    ({"probes": ("decompositon",)}, r"unknown probes \('decompositon',\): give a list of decomposition, selectability"),
    ({"probes": ()}, "unknown probes"),
    ({"probes": "uniformity"}, "unknown probes 'uniformity'"),
    ({"layers": [2]}, "no layer 2: the model has layers 0 … 1"),
    ({"layers": []}, "an empty list of layers leaves nothing to analyze"),
    ({"heads": [-1]}, "no head -1: the model has heads 0 … 3"),
    ({"keys": "some"}, "keys must be one of hardest, all, got 'some'"),
    ({"max_tokens": 0}, "max_tokens must be at least 1, got 0"),
])  # fmt: skip
def test_bad_arguments(options: dict[str, Any], said: str, make_bridge: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match=said):
        ln_probe.analyze(make_bridge("gpt2"), torch.arange(9)[None], progress=False, **options)
