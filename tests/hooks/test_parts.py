"""Small parts of the hooks, each against its definition: tokens, losses, position 0, constants, numbers."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from small_models import norm_of

from ln_probe.hooks.constants import Constant, _batches, given_constants, some, weights_sample
from ln_probe.hooks.model import Facts, dtype_of, relative_difference, whole_number
from ln_probe.hooks.norm_edits import Positions
from ln_probe.hooks.task import Objective, ObjectiveError, check_tokens, encode, twins, unpadded

FACTS = Facts(None, 50, 8, True, {"eos": [], "bos": [], "pad": []}, "", None, {})


def test_token_ids_at_the_edges() -> None:
    for given, rows in (
        (torch.tensor([0, 49]), [[0, 49]]),
        (torch.tensor([[3] * 8], dtype=torch.uint8), [[3] * 8]),
        ([[1, 2], torch.tensor([3], dtype=torch.int16)], [[1, 2], [3]]),
        (((4, 5),), [[4, 5]]),
    ):
        checked = check_tokens(FACTS, given)
        assert [row.tolist() for row in checked] == rows
        assert {row.dtype for row in checked} == {torch.int64}
    for wrong, word in (([[3] * 9], "context"), ([[50]], "id 50"), ([[7, -1]], "id -1"), ([[]], "empty")):
        with pytest.raises(ValueError, match=word):
            check_tokens(FACTS, wrong)


class Words:
    """A tokenizer of numbers; `adds`: what it puts before every text."""

    def __init__(self, first: int | None, *adds: int) -> None:
        self.bos_token_id, self.adds = first, adds

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [*self.adds, *map(int, text.split())]}


@pytest.mark.parametrize(("tokenizer", "trained", "asked", "ids"), [
    (Words(1), True, None, [1, 5, 6]), (Words(1), False, None, [5, 6]), (Words(1), False, True, [1, 5, 6]),
    (Words(1, 1), True, None, [1, 5, 6]), (Words(1, 1), True, False, [5, 6]), (Words(1, 1, 1), True, True, [1, 5, 6]),
    (Words(None), True, None, [5, 6]), (Words(None, 1, 1), True, False, [1, 1, 5, 6]),
])  # fmt: skip
def test_the_first_token_of_a_text(tokenizer: Any, trained: bool, asked: bool | None, ids: list[int]) -> None:
    facts = replace(FACTS, tokenizer=tokenizer, prepend_bos=trained)
    assert encode(facts, "5 6", prepend_bos=asked).tolist() == ids
    if tokenizer.bos_token_id is None:
        with pytest.raises(ValueError, match="bos"):
            encode(facts, "5", prepend_bos=True)
    for text, word in ((" ", "empty"), ("five", "fails")):
        with pytest.raises(ValueError, match=word):
            encode(facts, text)


@pytest.mark.parametrize(("pad", "ends", "rows", "expected"), [
    (0, [], [[0, 0, 5, 6], [0, 7, 8, 9]], [[5, 6], [7, 8, 9]]),
    (0, [], [[5, 0, 6, 0], [7, 8, 9, 1]], [[5, 0, 6], [7, 8, 9, 1]]),
    (0, [0], [[0, 0, 5, 6], [0, 7, 8, 9]], [[0, 5, 6], [0, 7, 8, 9]]),  # the token begins texts too
    (0, [0], [[5, 6, 0, 0], [7, 8, 9, 0]], [[5, 6, 0], [7, 8, 9, 0]]),
    (0, [0], [[0, 5, 6, 0], [7, 8, 9, 1]], [[5, 6], [7, 8, 9, 1]]),
    (None, [], [[0, 5]], [[0, 5]]),
    (0, [], [[0, 5], [6]], [[0, 5], [6]]),
])  # fmt: skip
@pytest.mark.parametrize("kind", ["bos", "eos"])
def test_padding_is_left_out(pad: int | None, ends: list[int], rows: Any, expected: Any, kind: str) -> None:
    special = {"eos": [], "bos": [], kind: ends, "pad": [] if pad is None else [pad]}
    cut, notes = unpadded(replace(FACTS, special=special), list(map(torch.tensor, rows)))
    assert [row.tolist() for row in cut] == expected
    changed = sum(map(len, rows)) - sum(map(len, expected))
    assert len(notes) == bool(changed)
    with pytest.raises(ValueError, match="prompt 1 is"):
        unpadded(replace(FACTS, special=special | {"pad": [3]}), [torch.tensor([1, 3]), torch.tensor([3, 3])])


def test_losses_and_their_weights() -> None:
    tokens = torch.tensor([[1, 2, 3], [4, 0, 4]])
    logits = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    own, given = Objective(), Objective.of(lambda output, tokens: output.sum((1, 2)))
    by_hand = [[-math.log(float(logits[b, t].softmax(0)[tokens[b, t + 1]])) for t in (0, 1)] for b in (0, 1)]
    assert own.by_token(logits, tokens).tolist() == [pytest.approx(row) for row in by_hand]
    assert own.sums(logits, tokens).tolist() == pytest.approx([sum(row) for row in by_hand])
    assert given.sums(logits, tokens).tolist() == pytest.approx(logits.sum((1, 2)).tolist())
    assert [own.weight(tokens[0, :n]) for n in (0, 1, 3)] == [0, 0, 2]
    assert given.weight(tokens[0]) == 1
    assert (own.unit.split("/")[0], given.unit.split()[0]) == ("nats", "units")
    for wrong in (lambda o, t: o.sum((1, 2)).long(), lambda o, t: o.sum((0, 1)), lambda o, t: 1.0, lambda o, t: o[9]):
        with pytest.raises(ObjectiveError):
            Objective.of(wrong).sums(logits, tokens)
    with pytest.raises(ObjectiveError, match="finite"):
        Objective.of(lambda o, t: o.sum((1, 2)) * math.inf).check(logits[:1], tokens[:1])


def test_what_has_no_next_token_loss() -> None:
    own, two = Objective(), twins(FACTS)
    assert two.shape == (2, 4)
    assert torch.equal(two[0, :-1], two[1, :-1])
    assert two[0, -1] != two[1, -1]
    logits = torch.randn(1, 4, 50).expand(2, -1, -1).clone()
    logits[1, -1] += 1.0  # a last logit may differ
    assert own.obstacle(FACTS, logits) == ""
    few = (logits[..., :49], logits[0], None)
    assert all("outputs" in own.obstacle(FACTS, each) for each in few)
    for share, is_causal in ((0.01, True), (0.03, False)):  # rounding in bfloat16 reaches 1e-2
        ahead = logits.clone()
        ahead[1, 1, 3] += share * float(logits.abs().max())
        assert (own.obstacle(FACTS, ahead) == "") == is_causal
    assert own.obstacle(replace(FACTS, missing_head="no head"), logits) == "no head"
    assert Objective.of(lambda output, tokens: output).obstacle(FACTS, None) == ""


@pytest.mark.parametrize(("call", "first"), [
    ({}, [[1, 0, 0, 0], [1, 0, 0, 0]]),
    ({"attention_mask": torch.tensor([[0, 0, 1, 1], [0, 1, 1, 1]])}, [[0, 0, 1, 0], [0, 1, 0, 0]]),
    ({"position_ids": torch.tensor([[0, 1, 0, 1], [0, 1, 2, 3]])}, [[1, 0, 1, 0], [1, 0, 0, 0]]),
    ({"past_key_values": SimpleNamespace(get_seq_length=lambda: 3)}, [[0] * 4] * 2),
    ({"past_kv_cache_entry": SimpleNamespace(past_keys=torch.zeros(2, 5, 1, 1))}, [[0] * 4] * 2),
])  # fmt: skip
def test_where_position_0_is(call: Any, first: list[list[int]]) -> None:
    """In every shape that a norm is given: [batch pos d], by heads in either order, and flat."""
    norm, inside = norm_of(), replace(norm_of(), reads="query", d=8)
    positions = Positions()
    assert not positions.first(norm, torch.zeros(2, 4, 16)).any()  # outside a pass
    assert positions.enter((torch.zeros(2, 4, 16),), call, is_block=False)
    assert positions.is_whole
    truth = torch.tensor(first).bool()
    assert torch.equal(positions.first(norm, torch.zeros(2, 4, 16))[..., 0], truth)
    assert torch.equal(positions.first(norm, torch.zeros(2, 4, 3, 16))[..., 0], truth[:, :, None].expand(2, 4, 3))
    assert torch.equal(positions.first(inside, torch.zeros(2, 3, 4, 8))[..., 0], truth[:, None].expand(2, 3, 4))
    assert torch.equal(positions.first(norm, torch.zeros(8, 16))[..., 0], truth.flatten())
    assert torch.equal(positions.first(norm, torch.zeros(24, 16))[..., 0], truth.flatten().repeat_interleave(3))
    assert not positions.enter((torch.zeros(2, 4, 16),), {}, is_block=True)  # the first block of this pass
    positions.leave(1)
    assert not positions.first(norm, torch.zeros(2, 4, 16)).any()
    for partial in ("start_at_layer", "stop_at_layer"):
        assert positions.enter((torch.zeros(2, 4),), {partial: 1}, is_block=False)
        assert not positions.is_whole
        assert bool(positions.first(norm, torch.zeros(2, 4, 16)).any()) == (partial == "stop_at_layer")
        positions.leave(1)
    assert positions.enter((torch.zeros(2, 4, 16),), {}, is_block=True)  # `forward` alone
    assert bool(positions.first(norm, torch.zeros(2, 4, 16)).any())
    positions.leave(0)
    assert not positions.is_running


def test_constants_from_what_users_give() -> None:
    pair = Constant(1.0, 3.0)
    for given in ((1.0, 3.0), [1, 3], {"first": 1, "rest": 3}, pair, pair.plain, tuple(pair.pair)):
        assert Constant.of(given) == pair
    assert Constant.of(torch.tensor(2.0)) == Constant(2.0, 2.0)
    assert pair.uniform == Constant(3.0, 3.0)
    for wrong in ((1.0, 0.0), (0.0, 1.0), (1.0, math.inf), (math.inf, 1.0), "x", {"rest": 1.0}):
        with pytest.raises(ValueError, match="constant"):
            Constant.of(wrong)
    assert given_constants({"a": 2, "b": pair, "c": 9}, ["b", "a"]) == {"b": pair, "a": Constant(2.0, 2.0)}
    assert given_constants(4.0, ["a", "b"]) == dict.fromkeys("ab", Constant(4.0, 4.0))
    assert some(list("abcdef")) == "a, b, c, d, e, f"
    assert some(list("abcdefg")) == "a, b, c, d, e, f, … (7 in all)"
    rows = [torch.tensor([i] * n) for i, n in enumerate((3, 5, 3, 512, 512, 512, 3))]
    assert [batch[:, 0].tolist() for batch in _batches(rows, 50)] == [[0, 2, 6], [1], [3, 4], [5]]
    assert [len(batch) for batch in _batches(rows[3:6], 1 << 17)] == [1, 1, 1]
    parameters = [torch.arange(10.0), torch.arange(5000.0).view(50, 100)]
    sample = weights_sample(parameters)
    assert torch.equal(sample[:10], parameters[0])
    assert 1000 < len(sample) - 10 <= 2500
    assert len({*sample[10:].diff().tolist()}) == 1


def test_numbers_and_lines() -> None:
    assert [whole_number(v, "n", 2) for v in (2, np.int64(3), torch.tensor(4))] == [2, 3, 4]
    for wrong in (1, 2.0, True, torch.tensor(True), np.bool_(True), "2", None):
        with pytest.raises(KeyError, match="n must"):
            whole_number(wrong, "n", 2, KeyError)
    assert dtype_of([torch.zeros(1).long(), torch.zeros(1).half(), torch.zeros(1)]) == torch.float16
    assert dtype_of([]) == torch.float32
    reference = torch.tensor([3.0, -4.0])
    assert relative_difference(reference + 1.0, reference) == 0.25
    assert relative_difference(torch.ones(2), torch.zeros(2)) == 1.0
    for bad in (torch.ones(3), torch.tensor([math.nan, 0.0])):
        assert relative_difference(bad, reference) == math.inf
    assert repr(norm_of().decompose(torch.ones(2, 16))).startswith("Terms(x=<2 x 16>")
