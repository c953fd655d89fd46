"""Which truth values the stream holds after every block of a compiled program, and what each block does.

One attention layer per level of counting. With rounding, a comparison leaves attention as a truth value, and the
block's MLP combines: one block per level. Without, the MLP has to sharpen the comparison first, so a level whose
formulas combine comparisons takes a second block whose attention is off. (The kinks of one layer of ReLUs are whole
hyperplanes; "both sums are positive" changes along half of one.)
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from ln_probe.analyses.lab.compiler.decisions import FALSE, TRUE
from ln_probe.analyses.lab.compiler.lowering import Lowered, Sum

Construction = Literal["scaling", "clip", "rounding"]


@dataclass(frozen=True)
class Step:
    """One block.

    Attributes:
        before, after: functions whose truth values the stream holds; the first two are TRUE and BOS.
        asked: variables whose sums this block's attention brings.
        sums: counts it brings, for an output that is a count.
        task: of the MLP. "combine": `after` from `before` and sharp answers; "sharpen": answers become truth values;
            "choose": the sum whose guard holds.
    """

    before: tuple[int, ...]
    after: tuple[int, ...]
    asked: tuple[int, ...] = ()
    sums: tuple[Sum, ...] = ()
    task: Literal["combine", "sharpen", "choose"] = "combine"

    @property
    def attends(self) -> bool:
        return bool(self.asked or self.sums)


def plan(lowered: Lowered, construction: Construction) -> tuple[Step, ...]:
    """The blocks of a program, first to last; at least one."""
    if isinstance(lowered.output, int):
        depth = lowered.depth
        last: Iterable[int] = [lowered.output]
    else:
        depth = max(1, lowered.depth)  # the number of positions has to be seen once
        asked = sorted({v for guard, _ in lowered.output for v in lowered.decisions.variables(guard)})
        last = [lowered.decisions.variable(v) for v in asked]  # the guards' own values are never needed
    needs = {depth: held(lowered, last)}
    for level in range(depth, 0, -1):
        below = _parts(lowered, needs[level], level)
        counted = [f for v in lowered.asked(needs[level], level) for f, _ in lowered.sum_of(v).terms]
        if level == depth and not isinstance(lowered.output, int):
            counted += [f for _, total in lowered.output for f, _ in total.terms]
        needs[level - 1] = held(lowered, [*below, *counted])
    steps: list[Step] = []
    for level in range(1, depth + 1):
        steps += _level(lowered, construction, needs[level - 1], needs[level], level, level == depth)
    return tuple(steps) or (Step(needs[0], needs[0]),)


def _level(
    lowered: Lowered,
    construction: Construction,
    before: tuple[int, ...],
    after: tuple[int, ...],
    level: int,
    last: bool,
) -> list[Step]:
    asked = tuple(lowered.asked(after, level))
    if last and not isinstance(lowered.output, int):
        sums = tuple(total for _, total in lowered.output)
        steps = [Step(before, after, asked, sums, "sharpen")]
        return [*steps, Step(after, held(lowered, ()), task="choose")] if len(sums) > 1 else steps
    if construction == "rounding":
        return [Step(before, after, asked)]
    answers = [lowered.decisions.variable(v) for v in asked]
    known = {*before, *answers}
    known |= {lowered.decisions.negate(f) for f in known}
    if set(after) <= known:
        return [Step(before, after, asked, task="sharpen")]
    sharp = held(lowered, [*_parts(lowered, after, level), *answers])
    return [Step(before, sharp, asked, task="sharpen"), Step(sharp, after)]


def _parts(lowered: Lowered, functions: Iterable[int], level: int) -> list[int]:
    """What has to be known from below a level to tell functions of it: they themselves, or their older variables."""
    parts: list[int] = []
    for function in functions:
        if lowered.level(function) < level:
            parts.append(function)
        else:
            older = sorted(v for v in lowered.decisions.variables(function) if lowered.levels[v] < level)
            parts += [lowered.decisions.variable(v) for v in older]
    return parts


def held(lowered: Lowered, functions: Iterable[int]) -> tuple[int, ...]:
    """TRUE, BOS, then the functions, each once, and not beside its own negation."""
    kept = [TRUE, lowered.bos]
    for function in functions:
        if function not in (*kept, FALSE) and lowered.decisions.negate(function) not in kept:
            kept.append(function)
    return tuple(kept)
