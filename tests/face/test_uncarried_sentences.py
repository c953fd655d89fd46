"""Sentences and figures that a fresh reading found uncarried by what was measured."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import ln_probe
from ln_probe.analyses.probes import causal_findings, unembedding
from ln_probe.hooks.default_tokens import begun_like
from ln_probe.hooks.model import transformed_logits
from ln_probe.prompting.prompts import summary


@pytest.fixture(scope="module")
def model() -> Any:
    return ln_probe.load_model("lm-layernorm")


def said(report: ln_probe.Report) -> list[str]:
    return [str(text) for text in report.findings()]


def test_norms_that_were_not_looked_at_are_not_absent(model: Any) -> None:
    report = ln_probe.analyze(model, [list(range(1, 10))], probes=["writers"], progress=False)
    assert len(report.tables["writers"])
    assert not any("no normalization" in text for text in said(report))


def test_prompts_too_short_for_sinks(model: Any) -> None:
    report = ln_probe.analyze(model, [list(range(1, 10))], probes=["sinks"], progress=False)
    assert said(report)[0].startswith("Whether attention has a sink cannot be told where no token is seen by 10 others")
    assert any("in 1 prompt no token is seen by 10 queries that see another one" in note for note in report.notes)


@pytest.mark.parametrize(("window", "causal", "length", "told"), [
    (None, True, 12, True), (None, True, 10, False), (10, True, 40, True), (9, True, 40, False),
    (None, False, 10, True), (None, False, 9, False),
])  # fmt: skip
def test_sinks_are_told_of_where_enough_queries_see_a_token(
    make_hooked: Callable[..., Any], window: int | None, causal: bool, length: int, told: bool
) -> None:
    more: dict[str, Any] = {"attention_dir": "causal" if causal else "bidirectional", "n_ctx": 64}
    if window is not None:
        more |= {"use_local_attn": True, "window_size": window, "attn_types": ["local"] * 2}
    made = make_hooked(n_layers=2, **more)
    report = ln_probe.analyze(made, [list(range(1, length + 1))], probes=["sinks"], progress=False)
    assert (report.tables["sink_heads"]["seen_by"] >= 10).all() == told
    assert said(report)[0].startswith("Whether attention has a sink cannot be told") != told
    assert any("no sink can be told there" in note for note in report.notes) != told


def test_unselectable_keys_are_not_explained_away(make_hooked: Callable[..., Any]) -> None:
    """Few keys are selectable in general position; a W_K of rank 1 sends them to a line."""
    tiny = make_hooked(normalization_type="LN")
    with torch.no_grad():
        for block in tiny.blocks:
            W = block.attn.W_K
            W.copy_(torch.einsum("hd,k->hdk", W[..., 0], torch.ones(W.shape[-1])))
    tokens = [list(range(1, 1 + tiny.cfg.d_head))]
    report = ln_probe.analyze(tiny, tokens, probes=["selectability"], progress=False)
    rows = report.heads[(report.heads["space"] == "head") & (report.heads["variant"] == "intact")]
    assert (rows["unselectable"] > 0).all()
    assert (rows["by_theorem"] == "").all()
    assert all("0.0 % intact" in text for text in said(report) if "by theorem" in text)


def test_undecided_tokens_are_not_said_to_be_stuck() -> None:
    rows = pd.DataFrame({"verdict": ["unselectable"] * 3 + ["undecided"] * 4, "token": "a", "attainable": math.nan})
    assert unembedding._hardest(rows) == ["3 tokens can never be the most likely one."]
    (text,) = unembedding._hardest(rows[rows["verdict"] == "undecided"])
    assert text.startswith("No token is known never to be")


def test_capped_logits_have_no_margins(make_hooked: Callable[..., Any]) -> None:
    tiny = make_hooked(normalization_type="LN")
    plain = ln_probe.analyze(tiny, [[1, 2, 3]], probes=["unembedding"], progress=False).unembedding
    assert transformed_logits(tiny) == ""
    tiny.cfg.output_logits_soft_cap = 2.0
    report = ln_probe.analyze(tiny, [[1, 2, 3]], probes=["unembedding"], progress=False)
    capped = report.unembedding
    assert capped[["margin_lower", "margin_upper", "attainable", "attainable_upper"]].isna().all(axis=None)
    assert capped["verdict"].tolist() == plain["verdict"].tolist()
    assert any("output_logits_soft_cap is 2" in note for note in report.notes)


def test_constants_of_position_0_are_of_its_kind(model: Any) -> None:
    with_first, without = (
        ln_probe.analyze(model, ["a b c d e f g h i j"] * 2, prepend_bos=bos, probes=["causal"], progress=False)
        for bos in (True, False)
    )
    at = "blocks.2.ln1"
    assert with_first.provenance["constants"][at] != without.provenance["constants"][at]
    assert any(note.startswith("no prompt begins with token") for note in without.notes)
    assert not any("begins with token" in note for note in with_first.notes)


def test_calibration_begins_as_the_prompts_do() -> None:
    rows = [torch.tensor([0, 5, 6]), torch.tensor([0, 7])]
    assert begun_like([0, 0], rows, [0]) == (rows, ())
    shorter, (note,) = begun_like([3, 4], rows, [0])
    assert [r.tolist() for r in shorter] == [[5, 6], [7]]
    assert note.startswith("no prompt begins with token 0")
    same, (note,) = begun_like([3, 0, 0], rows, [0])
    assert same is rows
    assert note.startswith("1 of 3 prompts do not begin with token 0")
    plain = [r[1:] for r in rows]
    begun, nothing = begun_like([0, 0], plain, [0])
    assert [r.tolist() for r in begun] == [[0, 5, 6], [0, 7]]
    assert nothing == ()
    assert begun_like([9, 9], plain, [0]) == (plain, ())  # all begin alike, but with no token for beginnings


def test_only_what_is_comparable_is_paired(model: Any) -> None:
    prompts = [list(range(1, 20)), list(range(30, 50))]
    whole, first = (
        ln_probe.analyze(model, prompts, layers=layers, probes=["causal"], progress=False) for layers in (None, [0])
    )
    other = ln_probe.analyze(model, [list(range(2, 20))], probes=["causal"], progress=False)
    compared = ln_probe.compare([whole, first, other], ["whole", "one layer", "other prompts"])
    assert not len(compared.paired)
    assert [note.split(":")[0] for note in compared.notes] == ["other prompts", "one layer"]
    assert "measured on other prompts than whole" in compared.notes[0]
    assert "measured in other layers than whole" in compared.notes[1]
    assert "measured in other layers" in compared._repr_html_()
    again = ln_probe.compare([whole, whole], ["a", "b"])
    assert len(again.paired)
    assert again.notes == ()


def test_a_norm_that_is_not_needed_is_not_needed_most() -> None:
    row = {"variant": "no_scaling", "no_op": "", "loss": 3.0, "prompts": 12, "p_adjusted": 0.01, "p_mean": math.nan}
    row |= {"delta_loss_low": math.nan, "delta_loss_high": math.nan, "delta_loss_median": math.nan}
    rows = pd.DataFrame([row | {"sites": f"blocks.{i}.ln1", "delta_loss": -0.02 * (i + 1), "prompts_worse": 0}
                         for i in range(3)])  # fmt: skip
    (finding,) = causal_findings._single(rows)
    assert "at blocks.2.ln1 it falls on 12 of 12 prompts, by 0.06 nats per token on average; at" in finding.text
    mixed = pd.concat([rows, rows.iloc[:1].assign(sites="blocks.3.ln1", delta_loss=0.03, prompts_worse=12)])
    (finding,) = causal_findings._single(mixed)
    assert finding.text.index("blocks.2.ln1") < finding.text.index("blocks.1.ln1") < finding.text.index("blocks.3.ln1")
    assert "at blocks.3.ln1 it rises on 12 of 12 prompts, by 0.03" in finding.text


def test_tokens_of_the_same_name_are_counted_one_by_one() -> None:
    found = summary("here", [torch.arange(6)], lambda i: "�" if i < 5 else "a")["commonest"]
    assert len(found) == 6
    assert sum(found.values()) == pytest.approx(1, abs=1e-3)
    assert np.isclose(list(found.values()), 1 / 6, atol=1e-3).all()


def test_prompts_of_one_token_say_nothing_of_lengths(model: Any) -> None:
    report = ln_probe.analyze(model, [[5]], probes=["decomposition"], progress=False)
    assert not any("nan" in text for text in said(report))


def test_what_is_not_there_to_take_away_is_not_compared(make_hooked: Callable[..., Any]) -> None:
    """Without norms "without scaling" is the same model, and no figure of its own stands beside it."""
    tokens = torch.arange(1, 25)[None]
    for kind, beside in ((None, False), ("LN", True)):
        report = ln_probe.analyze(
            make_hooked(normalization_type=kind), tokens, probes=("selectability",), progress=False
        )
        said = [f for f in report.findings() if "can select" in f]
        assert said
        assert all(("without scaling" in f) == beside for f in said)


def test_entropy_is_a_mean_over_queries_in_both_directions(make_bridge: Callable[..., Any]) -> None:
    """Prompts of other lengths count with the queries that have a choice: all of them, if they see both ways."""
    for arch in ("bert", "gpt2"):
        model, prompts = make_bridge(arch), [list(range(1, n)) for n in (6, 20, 13)]
        report = ln_probe.analyze(model, prompts, probes=("uniformity",), progress=False)
        sums, count = 0.0, 0
        for row in prompts:
            _, cache = model.run_with_cache(torch.tensor([row]))
            pattern = cache["blocks.0.attn.hook_pattern"][0, 1].double()
            for query, weights in enumerate(pattern):
                keys = len(row) if arch == "bert" else query + 1
                if keys > 1:
                    sums -= float(torch.special.xlogy(weights, weights).sum()) / np.log(keys)
                    count += 1
        heads = report.heads.set_index(["layer", "head", "space", "variant"])
        assert heads.loc[(0, 1, "head", "intact"), "entropy_ratio"] == pytest.approx(sums / count, rel=1e-6)
