"""What findings say is what was measured: of the layers and heads asked for, without norms, of few prompts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from architectures import bridge_of, make_bridge, make_hooked, norm_free

import ln_probe
from ln_probe.analyses.probes.base import among_heads, in_layers
from ln_probe.analyses.probes.statistics import PROMPTS_NEEDED
from ln_probe.guard import whole_numbers
from ln_probe.page.index import IndexEntry, forest, index_page
from ln_probe.page.page import report_page
from ln_probe.page.verdict import verdict
from ln_probe.prompts import summary
from ln_probe.report import Report


@pytest.fixture(scope="module")
def model() -> Any:
    return ln_probe.load_model("lm-layernorm")


def said(report: ln_probe.Report) -> list[str]:
    return [str(text) for text in report.findings()]


@pytest.mark.parametrize(("window", "causal", "length", "told"), [
    (None, True, 12, True), (None, True, 10, False), (10, True, 40, True), (9, True, 40, False),
    (None, False, 10, True), (None, False, 9, False),
])  # fmt: skip
def test_sinks_are_told_of_where_enough_queries_see_a_token(
    window: int | None, causal: bool, length: int, told: bool
) -> None:
    more: dict[str, Any] = {"attention_dir": "causal" if causal else "bidirectional", "n_ctx": 64}
    if window is not None:
        more |= {"use_local_attn": True, "window_size": window, "attn_types": ["local"] * 2}
    made = make_hooked(n_layers=2, **more)
    report = ln_probe.analyze(made, [list(range(1, length + 1))], probes=["sinks"], progress=False)
    assert (report.tables["sink_heads"]["seen_by"] >= 10).all() == told
    assert said(report)[0].startswith("Whether attention has a sink cannot be decided") != told
    unseen = "in 1 prompt no token is seen by 10 queries that see another one: no sink can be detected there"
    assert any(unseen in note for note in report.notes) != told


def test_unselectable_keys_are_not_explained_away() -> None:
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
    assert all(text.startswith("0.0 % of keys cannot") for text in said(report) if "follows from theory" in text)


def test_constants_of_position_0_are_of_the_token_that_prompts_begin_with(model: Any) -> None:
    """Behind one first token position 0 has the same sigma on every prompt; without it, that of another token."""
    texts, at = ["a b c d e f g h i j", "k l m n o p q r s t"], "blocks.2.ln1"
    with_first, without = (
        [report.constants.of(prompt)[at] for prompt in (0, 1)]
        for report in (
            ln_probe.analyze(model, texts, prepend_bos=bos, probes=["decomposition"], progress=False)
            for bos in (True, False)
        )
    )
    assert with_first[0].first == pytest.approx(with_first[1].first, rel=1e-6)
    assert without[0].first != pytest.approx(without[1].first, rel=0.1)
    assert {c.first for c in with_first}.isdisjoint(c.first for c in without)


def test_tokens_of_the_same_name_are_counted_one_by_one() -> None:
    found = summary("here", [torch.arange(6)], lambda i: "�" if i < 5 else "a")["commonest"]
    assert len(found) == 6
    assert sum(found.values()) == pytest.approx(1, abs=1e-3)
    assert np.isclose(list(found.values()), 1 / 6, atol=1e-3).all()


def test_prompts_of_one_token_say_nothing_of_lengths(model: Any) -> None:
    report = ln_probe.analyze(model, [[5]], probes=["decomposition"], progress=False)
    assert not any("nan" in text for text in said(report))


@pytest.mark.slow
def test_entropy_is_a_mean_over_queries_in_both_directions() -> None:
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


def test_layers_and_heads_in_words() -> None:
    assert in_layers({}) == in_layers({"arguments": {"layers": None}}) == among_heads({}) == ""
    assert in_layers({"arguments": {"layers": [2]}}) == " in layer 2"
    assert in_layers({"arguments": {"layers": [3, 1, 1]}}) == " in layers 1, 3"
    assert among_heads({"arguments": {"heads": [4]}}) == " (head 4 alone)"
    assert among_heads({"arguments": {"heads": [1, 0]}}) == " (heads 0, 1 alone)"


@pytest.fixture(scope="module")
def part(causal: pd.DataFrame) -> Report:
    made = ln_probe.analyze(make_bridge("gpt2"), [list(range(1, 30))] * 2, layers=[1], heads=[0, 2], progress=False)
    return made.with_tables(causal=causal)


@pytest.mark.slow
def test_every_norm_is_every_norm_of_the_layers_asked_for(part: Report, report: Report, causal: pd.DataFrame) -> None:
    whole = report.with_tables(causal=causal)
    for page, found, there in ((report_page(part), part, True), (report_page(whole), whole, False)):
        said = [f for f in found.findings() if "at every norm" in f]
        assert said
        assert all(("in layer 1" in f) == there for f in said)
        card = verdict(found)
        assert all(("in layer 1" in text) == there for text in (*card.sentences[:1], *(b.what for b in card.bars)))
        assert card.sentences[0] in page
    assert "Freezing the scaling of every norm in layer 1" in report_page(part)


def test_an_index_says_which_norms_its_marks_are_of(part: Report, report: Report, causal: pd.DataFrame) -> None:
    labels = [t.get_text() for t in forest(["a"], [part]).legends[0].get_texts()]
    assert labels == ["at every norm in layer 1", "at attention alone in layer 1"]
    one, both = (
        index_page([IndexEntry("a", report=part), IndexEntry("b", report=other)])
        for other in (part, report.with_tables(causal=causal))
    )
    assert "at every norm in layer 1" in one
    assert "at every norm of the layers that each was asked for" in both


@pytest.mark.parametrize(
    ("given", "told"), [(1, "1"), ("0", "'0'"), ([0.5], "[0.5]"), (["0"], "['0']"), ([True], "[True]")]
)
def test_what_is_no_list_of_layers(given: Any, told: str) -> None:
    with pytest.raises(TypeError) as error:
        whole_numbers(given, "layers")
    assert str(error.value) == f"layers must be a list of whole numbers, such as [0, 1], got {told}"
    assert whole_numbers(range(2), "layers") == (0, 1)


COLUMNS = ["margin_median", "attainable_median", "attainable_median", "pattern_max_median", "entropy_ratio",
           "score_spread", "unselectable"]  # fmt: skip


@pytest.mark.slow
def test_a_norm_free_model_beside_one_with_norms() -> None:
    prompts = torch.randint(50, (32, 10), generator=torch.Generator().manual_seed(0))
    reports = [ln_probe.analyze(m, prompts, progress=False) for m in (make_bridge("gpt2"), bridge_of(norm_free()))]
    free = reports[1]
    assert not free.failures
    assert any(
        f.startswith("A norm-free model: none of its 5 norms scales (5 subtract the mean") for f in free.findings()
    )
    assert not any(f.startswith("A norm-free model") for f in reports[0].findings())
    effects = free.tables["head_effects"].set_index("variant")
    assert (effects.loc["no_scaling", "delta_loss"] == 0).all(), "there is no scaling to take away"
    assert (effects.loc["no_projection", "delta_loss"] != 0).all()
    assert np.isfinite(effects[["delta_loss", "estimate"]]).all(axis=None)
    both = ln_probe.compare(reports, ["with norms", "norm-free"])
    heads = both.heads.xs("head", level="space")
    for column in COLUMNS:
        assert np.isfinite(heads[column].astype(float)).all(axis=None), column
    paired = both.paired[both.paired["variant"] == "no_projection"]
    assert len(paired)
    assert np.isfinite(paired["difference"]).all()
    enough = paired["prompts"] >= PROMPTS_NEEDED  # groups; single norms are measured on fewer, and have no interval
    assert 0 < enough.sum() < len(paired)
    assert (np.isfinite(paired[["low", "high"]]).all(axis=1) == enough).all()
    assert (paired["prompts"] >= 12).all()
    assert len(free.by_head()) == 8
    assert "<svg" in free._repr_html_()
