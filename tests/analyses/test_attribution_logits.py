"""Where a logit comes from, entry by entry: targets, neurons, caches, refusals (sums: test_attribution_forms.py)."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from architectures import make_bridge, make_folded
from attribution_checks import TOKENS, pattern_of
from small_models import lab

from ln_probe.analyses.attribution.features import Features
from ln_probe.analyses.attribution.logits import TERMS, attribute_logits, logit_lens
from ln_probe.analyses.attribution.scores import attribute_scores
from ln_probe.analyses.attribution.shared import AttributionError
from ln_probe.hooks.components import Part, SplitError

pytestmark = [pytest.mark.lens, pytest.mark.filterwarnings("ignore::ln_probe.hooks.edits.NoOpWarning")]


def test_targets() -> None:
    model = make_bridge("gpt2")
    with torch.no_grad():
        logits = model(TOKENS[None])[0, -1].double()
    one = attribute_logits(model, TOKENS, -1)
    assert one.label == f"logit of {int(logits.argmax())}"
    assert one.total == pytest.approx(float(logits.max()), abs=1e-5)
    two = attribute_logits(model, TOKENS[None], -1, 3, 4)
    assert two.total == pytest.approx(float(logits[3] - logits[4]), abs=1e-5)
    assert two.label == "logit of 3 minus 4"
    sets = attribute_logits(model, TOKENS.tolist(), 9, [3, 5, 7], torch.tensor([4, 6]))
    assert sets.total == pytest.approx(float(logits[[3, 5, 7]].mean() - logits[[4, 6]].mean()), abs=1e-5)
    several = attribute_logits(model, TOKENS, -1, [3, 5, 7, 9, 11], [4, 6, 8, 10]).label
    assert several == "logit of 3, 5, 7, 9, … (5 tokens, their mean) minus 4, 6, 8, 10"
    mean = attribute_logits(model, TOKENS.numpy(), -1, target=3, against="mean").check()
    assert mean.total == pytest.approx(float(logits[3] - logits.mean()), abs=1e-5)
    three, four = (attribute_logits(model, TOKENS, -1, target=t).terms for t in (3, 4))
    assert torch.allclose(two.terms, three - four, atol=1e-9)
    model.tokenizer = lambda text, **_: {"input_ids": [int(text)]}
    assert attribute_logits(model, TOKENS, -1, "3", "4").total == two.total


def test_pairs_of_answers() -> None:
    """TransformerLens's convention: a column of correct tokens, and one of incorrect ones."""
    model, prompts = make_bridge("gpt2"), TOKENS.view(2, 5)
    answers = torch.tensor([[3, 4], [5, 6]])
    for given, some in ((answers.tolist(), prompts), (answers[:1], prompts[:1])):
        pairs = torch.as_tensor(given)
        expected = attribute_logits(model, some, -1, target=pairs[:, :1], against=pairs[:, 1:]).check()
        assert torch.equal(attribute_logits(model, some, pos=-1, answer_tokens=given).terms, expected.terms)
        lens = logit_lens(model, some, pos=-1, answer_tokens=given).table
        last = lens["logit"].to_numpy()[-len(some) :]
        assert last == pytest.approx(torch.as_tensor(expected.own).reshape(-1).numpy(), abs=1e-5)
    with pytest.raises(AttributionError, match="pos=-1"):
        attribute_logits(model, prompts, answer_tokens=answers)


def test_caches() -> None:
    for model in (make_bridge("neox"), make_bridge("gemma2"), lab()):
        _, cache = model.run_with_cache(TOKENS[None])
        expected = attribute_logits(model, TOKENS, -2, 3)
        for given in (cache, dict(cache.items())):
            found = attribute_logits(model, given, -2, 3).check()
            # (with hooks on them, the laboratory's patterns are computed another way than without)
            assert torch.allclose(found.terms, expected.terms, atol=2e-6)
        assert found.own == pytest.approx(expected.own, abs=2 * expected.bound * expected.scale)
    raw, centred = make_bridge("gpt2"), make_folded("gpt2", centre=True)
    _, cache = centred.run_with_cache(TOKENS[None])
    with pytest.raises(SplitError, match="another model"):
        attribute_logits(raw, cache, -1)
    with pytest.raises(SplitError, match="ln_final"):
        attribute_logits(raw, dict(cache.items()), -1)
    _, cache = raw.run_with_cache(TOKENS[None], names_filter=lambda n: "mlp" not in n)
    with pytest.raises(SplitError, match=r"blocks\.0\.mlp\.out\.hook_out"):
        attribute_logits(raw, cache, -1)
    _, cache = raw.run_with_cache(TOKENS.view(2, 5))
    with pytest.raises(AttributionError, match="target="):
        attribute_logits(raw, cache, -1)


def test_what_cannot_be_attributed() -> None:
    model = make_bridge("gpt2")
    every: dict[str, Any] = {"tokens": TOKENS, "positions": None}
    for options, word in (
        ({"tokens": TOKENS, "target": 50}, "token id 50"),
        ({"tokens": TOKENS, "target": []}, "target"),
        ({"tokens": TOKENS, "target": " Paris"}, "tokenizer"),
        ({"tokens": TOKENS.view(1, 2, 5)}, "tokens"),
        ({"tokens": [[1, 2], [3, 77]], "positions": None}, "token id 77"),
        ({"tokens": TOKENS, "positions": [0, 10]}, "positions"),
        ({**every, "target": [1, 2]}, "an id for each position"),
        ({**every, "against": 50}, "token id 50"),
        ({"tokens": TOKENS, "components": "parts"}, "components"),
        ({"tokens": torch.tensor([0.5])}, "whole numbers"),
        ({"tokens": torch.ones(40).long()}, "context"),
        ({"tokens": TOKENS, "pos": -1}, "positions and pos"),
        ({"tokens": TOKENS, "target": 3, "answer_tokens": 3}, "target and answer_tokens"),
    ):
        with pytest.raises(AttributionError, match=word):
            attribute_logits(model, options.pop("tokens"), **({"positions": -1} | options))
    found: list[Any] = [attribute_logits(model, TOKENS, -1), attribute_logits(model, TOKENS)]
    for each in (*found, attribute_scores(model, TOKENS, 1, 0, query=7, key=3)):
        assert len(each.top(2)) == 2
        for k in (-1, 0, 1.5, True, None, "2"):
            with pytest.raises(AttributionError, match=f"{k!r}"):
                each.top(k)
    with pytest.raises(TypeError, match="TransformerLens"):
        attribute_logits(torch.nn.Linear(2, 2), TOKENS, -1)


def test_another_map_after_the_final_norm_is_noticed() -> None:
    model = make_bridge("gpt2")
    model.unembed.register_forward_hook(lambda _m, _a, out: 1.1 * out)
    with pytest.raises(AttributionError, match="add up"):
        attribute_logits(model, TOKENS, -1).check()


def test_half_precision_says_its_bound() -> None:
    found = attribute_logits(make_bridge("llama", torch.bfloat16), TOKENS, -1).check()
    assert 0.016 < found.bound < 0.032
    assert found.error < found.bound


def test_the_table_of_a_notebook_is_safe() -> None:
    found = attribute_logits(make_bridge("gpt2"), TOKENS, -1)
    parts = (replace(found.components[0], name="</text><script>alert(1)</script>"), *found.components[1:])
    html = replace(found, components=parts, label="<b>x</b>")._repr_html_()
    assert "<script" not in html
    assert "<b>" not in html
    largest = found.top(3)["contribution"].abs()
    assert list(largest) == sorted(found.table["contribution"].abs(), reverse=True)[:3]


RAGGED = [TOKENS, TOKENS[4:8], TOKENS.flip(0)]


@pytest.fixture(scope="module")
def gpt2() -> Any:
    return make_bridge("gpt2", torch.float64)


def test_every_row_of_the_logits_table(gpt2: Any) -> None:
    result = attribute_logits(gpt2, RAGGED, target=3).check()
    lengths = [len(row) for row in RAGGED]
    assert result.at.tolist() == [[t if t < n else -1 for t in range(10)] for n in lengths]
    for fields in (result.total, result.own, result.scale, result.sigma):
        assert torch.equal(fields.isfinite(), result.at >= 0)
    table = result.table
    assert list(table) == ["batch", "position", "part", "kind", "layer", "index", "contribution", *TERMS]
    assert len(table) == len(result.components) * sum(lengths)
    number = {part.name: i for i, part in enumerate(result.components)}
    for row in table.to_dict("records"):
        i = number[row["part"]]
        terms = result.terms[i, :, row["batch"], row["position"]].tolist()
        assert [row[term] for term in TERMS] == terms
        assert row["contribution"] == pytest.approx(float(result.values[i, row["batch"], row["position"]]), abs=1e-14)
        part = result.components[i]
        assert (row["kind"], row["layer"], row["index"]) == (part.kind, part.layer, part.index)
    for b, ids in enumerate(RAGGED):
        with torch.no_grad():
            own, cache = gpt2.run_with_cache(ids[None])
        assert result.own[b, : len(ids)].tolist() == pytest.approx(own[0, :, 3].tolist())
        assert result.scale[b, : len(ids)].tolist() == pytest.approx(own[0].abs().amax(-1).tolist())
        x = cache["blocks.1.hook_resid_post"][0]
        assert result.sigma[b, : len(ids)].tolist() == pytest.approx((x.var(-1, correction=0) + 1e-5).sqrt().tolist())
    largest = result.top(4)
    values = result.values.flatten(1).numpy()
    sizes = np.nanmean(np.abs(values), axis=1)
    order = np.argsort(-sizes, kind="stable")[:4]
    assert list(largest["part"]) == [result.components[i].name for i in order]
    assert largest["mean_abs"].to_numpy() == pytest.approx(sizes[order])
    assert largest["mean"].to_numpy() == pytest.approx(np.nanmean(values, axis=1)[order])
    wrong = result.own.clone()
    wrong[2, 5] += 1.0
    with pytest.raises(AttributionError, match="position 5 of prompt 2"):
        replace(result, own=wrong).check()


@pytest.mark.parametrize(("query", "key", "against"), [
    (None, None, None), (None, 1, None), (-1, None, 0), (None, None, "mean"), (3, None, "mean"), (None, 0, 1),
])  # fmt: skip
def test_every_row_of_the_scores_table(gpt2: Any, query: Any, key: Any, against: Any) -> None:
    result = attribute_scores(gpt2, RAGGED, 1, 2, query, key, against).check()
    pairs: dict[tuple[int, int, int], tuple[float, float, float]] = {}
    for b, row in enumerate(RAGGED):
        paid = pattern_of(gpt2, 1, row)[2]
        _, cache = gpt2.run_with_cache(row[None])
        scores = cache["blocks.1.attn.hook_attn_scores"][0, 2].detach()
        for q in range(len(row)) if query is None else [query % len(row)]:
            seen = scores[q, : q + 1]
            other = 0.0 if against is None else float(seen.mean() if against == "mean" else scores[q, against])
            for k in range(len(row)) if key is None else [key]:
                if k <= q and not (isinstance(against, int) and against > q):
                    pairs[b, q, k] = (float(scores[q, k]) - other, float(paid[q, k]), float(seen.abs().max()))
    table = result.table
    assert list(table)[:4] == ["batch", "query", "key", "side"]
    summed = table.groupby(["batch", "query", "key"])["contribution"].sum()
    assert {*summed.index} == {*pairs}
    assert len(table) == len(pairs) * len(result.components)
    present = result.total.isfinite()
    at = torch.nonzero(present)[:, 0], result.queries[present], result.keys[present]
    for b, q, k, total, own, weight, scale in zip(
        *(t.tolist() for t in (*at, *(f[present] for f in (result.total, result.own, result.weight, result.scale)))),
        strict=True,
    ):
        expected = pairs[b, q, k]
        assert (total, own) == pytest.approx((expected[0], expected[0]), abs=1e-9)
        assert summed[b, q, k] == pytest.approx(total, abs=1e-12)
        assert (weight, scale) == pytest.approx(expected[1:], rel=1e-9)
    words = [f"score{'s' if query is None or key is None else ''} of L1H2"]
    words += [f"from {query}"] * (query is not None) + [f"to {key}"] * (key is not None)
    assert result.label.startswith(" ".join(words))
    assert ("minus" in result.label, "mean" in result.label) == (against is not None, against == "mean")
    flat = torch.nonzero(present.flatten())[:, 0]
    wrong, some = result.own.clone(), int(flat[len(flat) // 2])
    wrong.view(-1)[some] += 1.0
    b, q, k = (int(t[len(flat) // 2]) for t in at)
    with pytest.raises(AttributionError, match=rf"query {q}, key {k} of prompt {b}"):
        replace(result, own=wrong).check()


@pytest.mark.parametrize("real", [True, False])
def test_caps_and_factors_that_the_logits_show(real: bool) -> None:
    """Settings that a model declares, and does or does not apply."""
    model = make_bridge("gpt2", torch.float64)
    model.cfg.output_logits_soft_cap, model.cfg.logit_scale = 3.0, 0.5
    with torch.no_grad():
        plain = model(TOKENS[None])[0]
    if real:
        model.unembed.register_forward_hook(lambda _m, _a, out: 3.0 * (0.5 * out / 3.0).tanh())
    result = attribute_logits(model, TOKENS, target=3).check()
    assert result.soft_cap == (3.0 if real else 0.0)
    expected = plain[:, 3] * (0.5 if real else 1.0)
    torch.testing.assert_close(result.total[0], expected.double(), rtol=1e-6, atol=1e-6)
    lens = logit_lens(model, TOKENS).check()
    torch.testing.assert_close(lens.values[-1, 0, :, 3], 3.0 * (expected / 3.0).tanh() if real else expected)
    cached = attribute_logits(model, model.run_with_cache(TOKENS[None])[1], target=3)
    torch.testing.assert_close(cached.total[0], 0.5 * plain[:, 3].double(), rtol=1e-6, atol=1e-6)


def test_the_lens_says_where_it_fails(gpt2: Any) -> None:
    lens = logit_lens(gpt2, RAGGED, slice(0, 3)).check()
    assert repr(lens).startswith("LogitLens(3 layers, 3 x 3 positions; ")
    rows = [(layer, b, t) for layer in range(3) for b in range(3) for t in range(3)]
    assert [*lens.table[["layer", "batch", "position"]].itertuples(index=False, name=None)] == rows
    for row in lens.table.to_dict("records"):
        logits = lens.values[row["layer"], row["batch"], row["position"]]
        chances = logits.softmax(-1)
        assert row["top"] == int(logits.argmax())
        assert row["token"] == str(row["top"])
        assert row["probability"] == pytest.approx(float(chances.max()))
        assert row["entropy"] == pytest.approx(float(-(chances * chances.log()).sum()))
        final = lens.values[-1, row["batch"], row["position"]]
        assert row["logit"] == pytest.approx(float(logits[final.argmax()]))
    assert "most likely" in lens.label
    html = lens._repr_html_()
    shown = lens.table[lens.table["batch"] == 0].sort_values(["layer", "position"], ascending=[False, True])
    assert re.findall(r">(\d+)</div>", html) == [*shown["token"]]
    assert f"{lens.table['probability'].iloc[0] / 2:.3f}" in html
    assert replace(lens, error=lens.bound).check()
    with pytest.raises(AttributionError, match="own"):
        replace(lens, error=2 * lens.bound).check()
    model = make_bridge("gpt2", torch.float64)
    model.unembed.register_forward_hook(lambda _m, _a, out: 1.5 * out)
    assert logit_lens(model, TOKENS).error == pytest.approx(1 / 3)
    cached = logit_lens(gpt2, gpt2.run_with_cache(TOKENS[None])[1])
    assert math.isnan(cached.error)
    assert cached.bound == lens.bound


PARTS = [
    (-1, Part("embed", "embedding")), (-1, Part("pos_embed", "position")), (1, Part("L0H1", "head", 0, 1)),
    (1, Part("L0 b_O", "bias", 0)), (1, Part("blocks.0.ln1_post bias", "norm bias", 0)), (3, Part("L0 mlp", "mlp", 0)),
    (3, Part("L0 b_out", "bias", 0)), (3, Part("blocks.0.ln2_post bias", "norm bias", 0)),
    (0, Part("L0 resid_pre feature 3", "feature", 0)), (2, Part("L0 resid_mid skip", "skip", 0)),
    (1, Part("L0 attn_out decoder bias", "decoder bias", 0)), (4, Part("L0 resid_post other features", "feature", 0)),
    (4, Part("L1 resid_pre reconstruction error", "error", 1)), (5, Part("L1H0", "head", 1, 0)),
    (7, Part("L1 mlp", "mlp", 1)), (8, Part("L1 resid_post feature 0", "feature", 1)),
]  # fmt: skip
POINTS = ("resid_pre", "attn_out", "resid_mid", "mlp_out", "resid_post")


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("when", range(5))
def test_features_replace_what_came_before_or_what_one_writer_wrote(layer: int, when: int) -> None:
    """Steps of the pass, four for each block: a point of the stream shows all earlier writes, a writer's its own."""
    features = Features(f"blocks.{layer}.hook_{POINTS[when]}", torch.zeros(2, 3), torch.zeros(4, 2))
    for step, part in PARTS:
        own = 4 * layer + when
        assert features.replaces(part) == (step == own if when in (1, 3) else step < own), part.name


def test_the_largest_features_at_some_tokens_are_named() -> None:
    """By |activation|·|direction|, of all tokens asked for; none that is silent there."""
    sizes, active = torch.tensor([1.0, 9.0, 3.0, 2.0]), torch.tensor([[[4.0, 0.0, -2.0, 0.0], [0.0, 7.0, 0.0, 1.0]]])
    features = Features("blocks.0.hook_resid_pre", torch.diag(sizes), active, top=2)
    assert [features.chosen(rows) for rows in ([0], [1], [0, 1])] == [[0, 2], [1, 3], [1, 2]]
    assert replace(features, top=9).chosen([0]) == [0, 2]
