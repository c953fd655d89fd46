"""From a transformer to a program: the weights of a compiled model read back into C-RASP.

The direction of Yang, Cadilhac & Chiang (2025, "Knee-Deep in C-RASP") that begins with a transformer: in fixed
precision outside attention the stream at a position is one of finitely many vectors. Which one is a Boolean function of
the letter (the embedding) and, block by block, of the vector before and of what attention brought, rounded to the grid.
With uniform attention a mean is at least k steps where a sum of counts, of the positions at which each vector stands,
is not below 0. So every block adds one level of counts. Nothing but the weights and the grid is read.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from ln_probe.analyses.lab.arithmetic import Precision, fixed_precision
from ln_probe.analyses.lab.crasp.cases import Sum
from ln_probe.analyses.lab.crasp.crasp import Program
from ln_probe.analyses.lab.crasp.crasp_compiler import BOS, CompiledProgram
from ln_probe.analyses.lab.crasp.temporal import Formula, Formulas, program_of
from ln_probe.analyses.lab.transformer import Block

MOST_STATES = 4096  # vectors that the stream can be at one block, and ways in which attention can answer
MOST_STEPS = 2**16  # of the grid that a mean can lie on

Requirement = tuple[Sum[Formula], bool]  # a sum of counts, and whether it is below 0


@dataclass(frozen=True)
class _Answer:
    """Steps of the grid between which one coordinate of attention's mean lies, all alike to what follows."""

    steps: int
    requirements: tuple[Requirement, ...]


def read_back(compiled: CompiledProgram) -> Program:
    """Read a compiled model's weights as a program, with at most a level of counts per block.

    Raises:
        ValueError: it is not in fixed precision, its attention is not uniform, or more than MOST_STATES vectors or
            MOST_STEPS steps would have to be distinguished.
    """
    model, grid = compiled.model, compiled.precision
    if grid is None:
        raise ValueError(
            f"compiled with {compiled.construction!r}, whose stream is not rounded: only 'rounding' is read"
        )
    uniform = all(not bool(W.any()) for block in model.blocks for W in (block.attn.W_Q, block.attn.W_K))
    if not uniform or model.cfg.positions != "none":
        raise ValueError("attention that is not uniform, or positions: only uniform attention without them is read")
    store = Formulas()
    with torch.no_grad(), fixed_precision(model, grid):
        tokens = torch.arange(len(compiled.alphabet) + 1)[:, None]
        start = model.embedded(tokens)[:, 0]
        bos, states = start[BOS], start[BOS + 1 :]
        holds = [store.symbol(symbol) for symbol in compiled.alphabet]
        for block in model.blocks:
            bos, states, holds = _after(block, grid, bos, states, holds, store)
        said = model.unembed(states[:, None])[:, 0]
    return program_of(store.any_of([h for h, logits in zip(holds, said, strict=True) if logits[1] > logits[0]]))


def _after(
    block: Block,
    grid: Precision,
    bos: Float[Tensor, " d_model"],
    states: Float[Tensor, "state d_model"],
    holds: list[Formula],
    store: Formulas,
) -> tuple[Tensor, Tensor, list[Formula]]:
    """BOS, the vectors that the stream can be after a block, and where each stands."""
    seen: list[Tensor] = []
    both = torch.cat([bos[None], states])
    with block.attn.hook_v.register_forward_hook(lambda *args: seen.append(args[2])):
        after_bos = block(both[:, None])[0, 0]  # alone, each attends to itself
    values = (seen[0][:, 0].flatten(1) / grid.step).round().long().numpy()
    columns = [_answers(values[:, c], c, block, grid, holds) for c in range(values.shape[1])]
    ways = list(_ways(columns))
    if len(ways) * len(states) > MOST_STATES:
        raise ValueError(f"too wide: {len(states)} vectors times {len(ways)} answers; at most {MOST_STATES} together")
    found: dict[bytes, tuple[Tensor, list[Formula]]] = {}
    for way in ways:
        here = store.true
        for total, below in itertools.chain.from_iterable(answer.requirements for answer in way):
            holds_here = store.below(total)
            here = store.both(here, holds_here if below else store.negate(holds_here))
        z = torch.tensor([answer.steps for answer in way], dtype=torch.float64) * grid.step
        z = z.view(1, 1, block.attn.cfg.n_heads, -1)
        with block.attn.hook_z.register_forward_hook(lambda *args, z=z: z.expand_as(args[2])):
            outcome = block(states[:, None])[:, 0]
        for vector, before in zip(outcome, holds, strict=True):
            if (formula := store.both(before, here)) is not store.false:
                found.setdefault(vector.numpy().tobytes(), (vector, []))[1].append(formula)
    return (
        after_bos,
        torch.stack([vector for vector, _ in found.values()]),
        [store.any_of(formulas) for _, formulas in found.values()],
    )


def _answers(values: np.ndarray, column: int, block: Block, grid: Precision, holds: list[Formula]) -> list[_Answer]:
    """What one coordinate of attention can bring, in groups that add the same to the stream once that is rounded.

    `values` are of BOS and of every vector, in steps.
    """
    low, high = int(values.min()), int(values.max())
    if high - low >= MOST_STEPS:
        raise ValueError(f"too wide: a mean of {high - low + 1} steps of the grid; at most {MOST_STEPS}")
    W_O = block.attn.W_O.flatten(0, 1)
    steps = torch.arange(low, high + 1, dtype=torch.float64)
    adds = steps[:, None] * grid.step * W_O[column]
    alone = (W_O != 0).sum(0) <= 1  # entries that no other coordinate adds to: only their rounded sum is seen
    rest = torch.zeros(()) if block.attn.b_O is None else block.attn.b_O
    adds = torch.where(alone, grid.round(adds + rest), adds)
    begins = [0, *(int(i) + 1 for i in (adds[1:] != adds[:-1]).any(1).nonzero())]
    answers = []
    for first, after in zip(begins, [*begins[1:], None], strict=True):
        least = [(_less_than(values, low + first, holds), False)] if first else []
        most = [] if after is None else [(_less_than(values, low + after, holds), True)]
        answers.append(_Answer(low + first, (*least, *most)))
    return answers


def _less_than(values: np.ndarray, steps: int, holds: list[Formula]) -> Sum[Formula]:
    """The sum that is below 0 where the mean over BOS and the letters so far is less than so many steps."""
    total: Sum[Formula] = Sum((), int(values[0]) - steps)
    for formula, value in zip(holds, values[1:], strict=True):
        total = total.plus(Sum(((formula, int(value) - steps),)))
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
    if left[0].plus(right[0]) != Sum():  # only of a sum and its negative
        return left[0] != right[0] or left[1] == right[1]
    if left[1] == right[1]:  # both below 0: never; neither: where it is 0, which no multiple of the factors may reach
        common, constant = math.gcd(*(n for _, n in left[0].terms)), left[0].constant
        return not left[1] and (constant % common == 0 if common else constant == 0)
    return True
