"""Sequences sampled from a model are the model's own: key-value caches that are wrong are not used."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from architectures import make_bridge, make_hooked
from torch import Tensor

import ln_probe
from ln_probe.hooks import default_tokens, without
from ln_probe.hooks.default_tokens import NextLogits, UnsampledError, sample
from ln_probe.hooks.edits import InterventionError

ENDS = list(range(10))


def without_a_cache(monkeypatch: pytest.MonkeyPatch, model: Any, **options: Any) -> list[list[int]]:
    with monkeypatch.context() as patch:
        patch.setattr(default_tokens, "NextLogits", lambda model, cached: NextLogits(model, cached=False))
        return [row.tolist() for row in sample(model, **options)]


def wrong_from(original: Any, position: int, harm: Callable[[Tensor], Tensor]) -> None:
    """Make a Hugging Face model give other logits from a position on, if it goes on from kept keys."""
    forward = original.forward

    def harmed(ids: Tensor, past_key_values: Any = None, use_cache: bool = False, **options: Any) -> Any:
        length = 0 if past_key_values is None else past_key_values.get_seq_length()
        output = forward(ids, past_key_values=past_key_values, use_cache=use_cache, **options)
        if 0 < length >= position:
            output.logits = harm(output.logits)
        return output

    original.forward = harmed


@pytest.mark.parametrize(("position", "harm"), [
    (20, lambda logits: logits.flip(-1)),
    (1, lambda logits: logits * float("nan")),
    (20, lambda logits: logits[..., :-1].no_such_thing),
])  # fmt: skip
def test_a_wrong_cache_is_not_used(position: int, harm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the first step or late: the sequences are those of whole passes, and a warning says so."""
    model = make_bridge("gpt2")
    expected = without_a_cache(monkeypatch, model, limit=32, seed=1, ends=ENDS[:2], count=9)
    assert max(map(len, expected)) == 32
    wrong_from(model.original_model, position, harm)
    with pytest.warns(UserWarning, match="sampled without a key-value cache, which is slower: with one, this model"):
        rows = sample(model, limit=32, seed=1, ends=ENDS[:2], count=9)
    assert [row.tolist() for row in rows] == expected


@pytest.mark.parametrize(
    ("arch", "dtype"), [("gpt2", torch.float32), ("mistral", torch.bfloat16), ("gpt2", torch.float16)]
)
def test_a_right_cache_is_used_in_every_format(arch: str, dtype: torch.dtype) -> None:
    """Rounding is not taken for a wrong cache; rows that end leave it."""
    model = make_bridge(arch, dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rows = sample(model, limit=40, seed=0, ends=ENDS[:3], count=12)
    assert len({len(row) for row in rows}) > 3
    assert max(map(len, rows)) == 32  # the context


def test_a_model_that_is_no_language_model_is_not_sampled() -> None:
    tokens = torch.arange(3, 19).view(2, 8)
    for outputs in (2, 60):
        model = make_hooked(d_vocab_out=outputs)
        said = (
            r"the model's outputs are no logits of its 50 tokens \(expected \[batch pos 50\], got "
            rf"\[32, 1, {outputs}\]\), so no sequences can be sampled from it: give token ids "
            r"\(prompts= of analyze, tokens= of without\)"
        )
        with pytest.raises(InterventionError, match=said), without(model, "scaling"):
            pass
        with without(model, "scaling", tokens=tokens) as done:
            assert done.divisors
    with pytest.raises(UnsampledError, match=said):
        ln_probe.analyze(model, probes=("decomposition",), progress=False)
    report = ln_probe.analyze(make_hooked(d_vocab_out=2), tokens, probes=("causal",), progress=False)
    assert report.provenance["calibration"]["constants"] == "leave-one-out means over the other prompts"
    assert any("the model has 2 outputs for 50 tokens" in note for note in report.notes)
