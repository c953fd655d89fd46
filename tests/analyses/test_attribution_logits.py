"""Where a logit comes from: targets, neurons, caches, pictures, refusals (sums: test_attribution_forms.py)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from architectures import make_bridge, make_folded
from attribution_checks import TOKENS
from small_models import lab

from ln_probe.analyses.attribution.logits import attribute_logits, logit_lens
from ln_probe.analyses.attribution.scores import attribute_scores
from ln_probe.analyses.attribution.shared import AttributionError
from ln_probe.hooks.components import SplitError

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
        ({"tokens": TOKENS, "positions": 1.0}, "positions"),
        ({"tokens": TOKENS.view(1, 2, 5)}, "tokens"),
        ({"tokens": [[1, 2], [3, 77]], "positions": None}, "token id 77"),
        ({"tokens": TOKENS, "positions": [0, 10]}, "positions"),
        ({"tokens": TOKENS, "positions": slice(9, 3)}, "positions"),
        ({"tokens": TOKENS, "positions": []}, "positions"),
        ({**every, "target": [1, 2]}, "an id for each position"),
        ({**every, "target": torch.full((1, 10), -100)}, "token id -100"),
        ({**every, "against": 50}, "token id 50"),
        ({"tokens": TOKENS, "components": "parts"}, "components"),
        ({"tokens": torch.tensor([0.5])}, "whole numbers"),
        ({"tokens": torch.ones(40).long()}, "context"),
        ({"tokens": "a text"}, "tokenizer"),
        ({"tokens": []}, "tokens"),
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
    found = attribute_logits(model, TOKENS, -1)
    with pytest.raises(AttributionError, match="add up"):
        found.check()


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
