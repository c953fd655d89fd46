"""What attributions consist of, entry by entry: their tables, places and labels; which parts features replace."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from architectures import make_bridge
from attribution_checks import TOKENS, pattern_of

from ln_probe.analyses.attribution import attribute_logits, attribute_scores, logit_lens
from ln_probe.analyses.attribution.logits import TERMS
from ln_probe.analyses.attribution.shared import AttributionError
from ln_probe.hooks.components import Part

pytestmark = [pytest.mark.lens, pytest.mark.filterwarnings("ignore::ln_probe.hooks.edits.NoOpWarning")]
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
    values = np.abs(result.values.flatten(1).numpy())
    order = np.argsort(-np.nanmean(values, axis=1), kind="stable")[:4]
    assert list(largest["part"]) == [result.components[i].name for i in order]
    assert largest["mean_abs"].to_numpy() == pytest.approx(np.nanmean(values, axis=1)[order])
    means = np.nanmean(result.values.flatten(1).numpy(), axis=1)
    assert largest["mean"].to_numpy() == pytest.approx(means[order])
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
