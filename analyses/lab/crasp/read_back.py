"""From a transformer to a program: the weights of a compiled model read back into C-RASP.

The direction from transformer to program of Yang, Cadilhac & Chiang (2025, "Knee-Deep in C-RASP"). Where a norm's
scaling makes truth values of what attention brings, the stream between blocks is one of finitely many vectors. Which
one is a Boolean function of the letter (the embedding) and, block by block, of the vector before and of what uniform
attention brought: a sum of counts of the positions at which each vector stands, over t + 1. An MLP without biases bends
where such a sum crosses a whole number, so every block adds one level of counts. Nothing but the weights is read, and
between two bends several sums and lengths are tried: where the outcome differs, the model is refused.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from ln_probe.analyses.lab.crasp.crasp import Program
from ln_probe.analyses.lab.crasp.temporal import Formula, Formulas, Sum, program_of
from ln_probe.analyses.lab.crasp.weights import BOS, CompiledProgram
from ln_probe.analyses.lab.norms import SCALES
from ln_probe.analyses.lab.transformer import Block

MOST_STATES = 4096  # vectors that the stream can be at one block, times answers of attention
LENGTHS = (999.0, 1499.0)  # of which t + 1 is tried: any number of letters is alike to an MLP without biases
BEYOND = 100.0  # how far beyond the outermost bend a sum is tried
DIGITS = 6  # to which vectors that are the same agree

Requirement = tuple[Sum, bool]  # a sum of counts, and whether it is below 0


@dataclass(frozen=True)
class _Answer:
    """Sums between two bends of one coordinate of attention: two of them, and what says that the sum lies there."""

    sums: tuple[float, float]
    requirements: tuple[Requirement, ...]


def read_back(compiled: CompiledProgram) -> Program:
    """Read a compiled model's weights as a program, with at most a level of counts per block."""
    model = compiled.model
    uniform = all(not bool(W.any()) for block in model.blocks for W in (block.attn.W_Q, block.attn.W_K))
    if not uniform or model.cfg.positions != "none":
        raise ValueError("attention that is not uniform, or positions: only uniform attention without them is read")
    if model.cfg.norm not in SCALES:
        raise ValueError(f"a {model.cfg.norm!r} norm makes no truth values: only norms that scale are read")
    store = Formulas()
    with torch.no_grad():
        start = model.embedded(torch.arange(len(compiled.alphabet) + 1)[:, None])[:, 0]
        bos, states = start[BOS], start[BOS + 1 :]
        holds = [store.symbol(symbol) for symbol in compiled.alphabet]
        for block in model.blocks:
            bos, states, holds = _after(block, bos, states, holds, store)
        logits = model.unembed(states[:, None])[:, 0]
    return program_of(store.any_of([h for h, row in zip(holds, logits, strict=True) if row[1] > row[0]]))


def _after(
    block: Block,
    bos: Float[Tensor, " d_model"],
    states: Float[Tensor, "state d_model"],
    holds: list[Formula],
    store: Formulas,
) -> tuple[Tensor, Tensor, list[Formula]]:
    """BOS, the vectors that the stream can be after a block, and where each stands."""
    W_V, W_O = block.attn.W_V[0], block.attn.W_O[0]
    values = (torch.cat([bos[None], states]) @ W_V).round(decimals=DIGITS).numpy()
    if np.abs(values - values.round()).max() > 0:
        raise ValueError("attention brings numbers that are not whole: no sum of counts is read from it")
    columns = _answers(values.astype(np.int64), (W_O @ block.mlp.W_in).numpy(), holds)
    ways = list(_ways(columns))
    if len(ways) * len(states) > MOST_STATES:
        raise ValueError(f"too wide: {len(states)} vectors times {len(ways)} answers; at most {MOST_STATES} together")
    outcomes: dict[bytes, tuple[Tensor, list[Formula]]] = {}
    for way in ways:
        here = store.true
        for total, below in itertools.chain.from_iterable(answer.requirements for answer in way):
            holds_here = store.below(total)
            here = store.both(here, holds_here if below else store.negate(holds_here))
        tried = [
            _through(block, states + torch.tensor([answer.sums[i] for answer in way]).double() / length @ W_O)
            for i, length in itertools.product((0, 1), LENGTHS)
        ]
        if any((other - tried[0]).abs().max() > 10.0**-DIGITS for other in tried):
            raise ValueError("the stream is not one of finitely many vectors: a sum's size is seen, not its sign alone")
        for vector, before in zip(tried[0].round(decimals=DIGITS) + 0.0, holds, strict=True):
            if (formula := store.both(before, here)) is not store.false:
                outcomes.setdefault(vector.numpy().tobytes(), (vector, []))[1].append(formula)
    after_bos = _through(block, (bos + bos @ W_V @ W_O)[None])[0].round(decimals=DIGITS) + 0.0
    return (
        after_bos,
        torch.stack([vector for vector, _ in outcomes.values()]),
        [store.any_of(formulas) for _, formulas in outcomes.values()],
    )


def _through(block: Block, stream: Float[Tensor, "state d_model"]) -> Float[Tensor, "state d_model"]:
    """A block's norms and MLP, after attention has been added."""
    mid = block.ln1(stream[:, None])
    out: Tensor = block.ln2(mid + block.mlp(mid))[:, 0]
    return out


def _answers(
    values: Int[np.ndarray, "vector coordinate"], seen: Float[np.ndarray, "coordinate unit"], holds: Sequence[Formula]
) -> list[list[_Answer]]:
    """For each coordinate of attention the sums that an MLP treats alike; one if all vectors but BOS add nothing.

    `values` are of BOS and of every vector, `seen` the weight with which each hidden unit reads a coordinate.
    """
    constant = np.asarray(~values[1:].any(axis=0))
    fixed = values[0] * constant @ seen  # what units read of the coordinates that BOS alone brings
    answers = []
    for column, weights in enumerate(seen):
        first = int(values[0, column])
        if constant[column]:
            answers.append([_Answer((first, first), ())])
            continue
        read = weights != 0
        if (seen[~constant][:, read] != 0).sum(0).max(initial=1) > 1:
            raise ValueError("a hidden unit reads two sums of counts at once: such a model is not read")
        bends = sorted({round(float(b), DIGITS) for b in -fixed[read] / weights[read]})
        common = math.gcd(*(int(v) for v in values[1:, column]))
        limits = [-math.inf, *bends, math.inf]
        answers.append(
            [
                answer
                for low, high in itertools.pairwise(limits)
                if (answer := _between(values[:, column], low, high, common, holds)) is not None
            ]
        )
    return answers


def _between(
    values: Int[np.ndarray, " vector"], low: float, high: float, common: int, holds: Sequence[Formula]
) -> _Answer | None:
    """The answer whose sums lie between two bends, the lower one included above 0, the upper one below; None: none."""
    start = int(values[0])  # sums are `start` and multiples of `common` more or less
    least = -math.inf if math.isinf(low) else start + common * math.ceil((low - start) / common)
    most = math.inf if math.isinf(high) else start + common * math.floor((high - start) / common)
    if most == high and high > 0:  # of two pieces that meet in a sum, the outer one has it
        most -= common
    if least == low and low < 0:
        least += common
    if least > most:
        return None
    first = most - BEYOND * common if math.isinf(least) else least
    last = least + BEYOND * common if math.isinf(most) else most
    above = [] if math.isinf(least) else [(_less_than(values, int(least), holds), False)]
    below = [] if math.isinf(most) else [(_less_than(values, int(most) + 1, holds), True)]
    return _Answer((first, last), (*above, *below))


def _less_than(values: Int[np.ndarray, " vector"], bound: int, holds: Sequence[Formula]) -> Sum:
    """The sum of counts that is below 0 where the sum over BOS and the letters so far is less than a bound."""
    total: Sum = Sum((), int(values[0]) - bound)
    for formula, value in zip(holds, values[1:], strict=True):
        total = total.plus(Sum(((formula, int(value)),)))
    return total


def _ways(columns: list[list[_Answer]], chosen: tuple[_Answer, ...] = ()) -> Iterator[tuple[_Answer, ...]]:
    """An answer per coordinate, without those that no counts can give."""
    if len(chosen) == len(columns):
        yield chosen
        return
    for answer in columns[len(chosen)]:
        before = list(itertools.chain.from_iterable(a.requirements for a in chosen))
        if all(_possible(old, new) for old in before for new in answer.requirements):
            yield from _ways(columns, (*chosen, answer))


def _possible(left: Requirement, right: Requirement) -> bool:
    """Whether counts could meet both (True where this is not seen at once)."""
    if left[0].terms == right[0].terms and left[1] != right[1]:  # x + a >= 0 and x + b < 0
        above, below = (left[0], right[0]) if right[1] else (right[0], left[0])
        return above.constant > below.constant
    opposite = left[0].plus(right[0])
    if opposite.terms or left[1] != right[1]:
        return True
    # x + a and -x + b, both below 0 (then their sum is below -1) or neither (then it is not below 0).
    return opposite.constant < -1 if left[1] else opposite.constant >= 0
