"""What a recurrent network's cell does letter by letter: which dimension counts, and whether the network reads it.

Weiss, Goldberg & Yahav (2018) show an LSTM that counts by the trace of its cell state over a^n b^n. Here the dimension
is found instead of picked: over each run of one letter (a phase) a line is laid through each dimension of the state by
least squares; a dimension is a candidate for a phase if it goes one way there and the other way in an earlier phase,
straight in both (`STRAIGHT`), and counts if these lines also tell every letter apart (`READABLE`). The state is an
LSTM's c as it is carried on (normed, if a norm stands on it), any other cell's h.

Three looks at the same counter that share nothing with the fit:

    differences     the mean step from letter to letter, beside the slope
    reading         after how many b's the network first allows what comes after a^n b^n: its own count of n
    moving          that dimension moved by the slope of k letters before the b's: does the network end k letters later?
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import cast

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from ln_probe.analyses.lab.counting.counter_languages import EOS, bos
from ln_probe.analyses.lab.counting.counting_tasks import ACCEPTED
from ln_probe.analyses.lab.counting.recurrent import NormedLayer, RecurrentTagger

# R²; of a state that nears a limit: .9992 if its slope falls by a fifth in the phase, .996 by 40 %. So it is passed by
# what bends by several letters, and is asked for beside READABLE, not in its place.
STRAIGHT = 0.999
SETTLING = 5  # letters at the beginning of a phase that are left out of every fit: gates turn over there
# Of a letter: what a count may be off its line and still be right when it is rounded. A dimension counts only if the
# line through each of its two phases in the longest trained word is off by no more: one that bends further takes some
# numbers of letters for others.
READABLE = 0.5
MOVED = 20  # letters' worth by which a dimension is moved at most, either way
SLACK = 30  # letters beyond the longest run that a network is given to end a phase in
PHASES = "abc"


@dataclass(frozen=True)
class Cell:
    """The states of a layer for some words, [word hidden]."""

    h: Float[Tensor, "word hidden"]
    c: Float[Tensor, "word hidden"]


class LetterByLetter:
    """A trained tagger of one layer that reads a letter at a time, in float64.

    Args:
        model: a `RecurrentTagger`.
        letters: 2 for a^n b^n, 3 for a^n b^n c^n.

    Raises:
        ValueError: more than one layer, or a QRNN, whose state is not carried by its gates.
    """

    def __init__(self, model: nn.Module, letters: int) -> None:
        if not isinstance(model, RecurrentTagger) or model.cfg.n_layers != 1 or model.cfg.cell.startswith("qrnn"):
            what = model.cfg if isinstance(model, RecurrentTagger) else type(model).__name__
            raise ValueError(f"traces are of one LSTM, GRU or Elman layer, got {what}")
        self.model = copy.deepcopy(model).double().eval()
        self.letters, self.layer = letters, cast("NormedLayer", self.model.layers[0])
        with torch.no_grad():
            self._inputs = self.layer.inputs(self.model.embed(torch.arange(bos(letters) + 1))[None])[0]

    def start(self) -> Cell:
        """After the token that begins every word."""
        zero = torch.zeros(1, self.model.cfg.hidden, dtype=torch.float64)
        return self.read(Cell(zero, zero), bos(self.letters))

    @torch.no_grad()
    def read(self, cell: Cell, token: int) -> Cell:
        return Cell(*self.layer.step(self._inputs[token].expand(len(cell.h), -1), cell.h, cell.c))

    @torch.no_grad()
    def allows(self, cell: Cell, token: int) -> Tensor:
        """Whether the network gives a token a probability that counts as accepted, [word]."""
        accepted: Tensor = self.model.out(cell.h).softmax(-1)[:, token] > ACCEPTED
        return accepted

    def state(self, cell: Cell) -> Float[Tensor, "word hidden"]:
        return cell.c if self.model.cfg.cell == "lstm" else cell.h

    def moved(self, cell: Cell, by: Float[Tensor, "word hidden"]) -> Cell:
        """One word's state, a copy for each row of `by` with that added."""
        there = (self.state(cell) + by).contiguous()
        if self.model.cfg.cell == "lstm":
            return Cell(cell.h.expand_as(there), there)
        return Cell(there, cell.c.expand_as(there))


def phases(reader: LetterByLetter, n: int) -> Float[np.ndarray, "phase letter hidden"]:
    """The state after every letter of a^n b^n (c^n)."""
    cell, found = reader.start(), []
    for phase in range(reader.letters):
        for _ in range(n):
            cell = reader.read(cell, 1 + phase)
            found.append(reader.state(cell)[0].numpy())
    return np.stack(found).reshape(reader.letters, n, -1)


@dataclass(frozen=True)
class Line:
    """slope · letter + start, through some letters of a trace (counted from 1).

    Attributes:
        r2: the share of variance it explains; NaN where nothing moves.
        off: the largest distance of the trace from it, in letters (of its slope); infinite where the slope is 0.
    """

    slope: float
    start: float
    r2: float
    off: float


def line_through(trace: Float[np.ndarray, " letter"]) -> Line:
    """The least-squares line through all letters but the first SETTLING.

    Raises:
        ValueError: fewer than three letters are left.
    """
    if len(trace) < SETTLING + 3:
        raise ValueError(f"a line takes {SETTLING + 3} letters or more, got {len(trace)}")
    letter = np.arange(1, len(trace) + 1)[SETTLING:]
    kept = trace[SETTLING:]
    slope, start = (float(x) for x in np.polyfit(letter, kept, 1))
    rest = kept - start - slope * letter
    spread = float(((kept - kept.mean()) ** 2).sum())
    still = spread <= 1e-20 * max(1.0, float(np.abs(kept).max())) ** 2 * len(kept)  # nothing but rounding moves
    r2 = float("nan") if still else 1 - float((rest**2).sum()) / spread
    return Line(slope, start, r2, float(np.abs(rest).max()) / abs(slope) if slope and not still else float("inf"))


def holds_to(trace: Float[np.ndarray, " letter"]) -> int:
    """Up to which letter of a phase a trace is a straight count: the last of those in a row within READABLE of a line.

    The line is laid anew through the letters up to each; where it first leaves one of them by more, a count can no
    longer be read off any line by rounding. 0 if that is so from the beginning.
    """
    for last in range(SETTLING + 3, len(trace) + 1):
        if line_through(trace[:last]).off > READABLE:
            return last - 1 if last > SETTLING + 3 else 0
    return len(trace)


def dimension_table(trace: Float[np.ndarray, "phase letter hidden"]) -> pd.DataFrame:
    """A row per dimension and phase: `dimension`, `phase`, `slope`, `r2`, `difference` (the mean step)."""
    rows = []
    for dimension in range(trace.shape[2]):
        for phase in range(len(trace)):
            line = line_through(trace[phase, :, dimension])
            kept = trace[phase, SETTLING:, dimension]
            step = float(kept[-1] - kept[0]) / (len(kept) - 1)
            rows.append((dimension, PHASES[phase], line.slope, line.r2, step))
    return pd.DataFrame(rows, columns=["dimension", "phase", "slope", "r2", "difference"])


@dataclass(frozen=True)
class Counter:
    """The dimension that counts for a phase, or, if none does, the one that comes nearest to it.

    Attributes:
        dimension: its number. earlier, phase: it goes one way in `earlier` and back in `phase` (numbers of phases).
        straight: the smaller R² of the two; NaN if no dimension turns at all (then `dimension` is 0).
        counting: every dimension that counts for the phase, from the same earlier phase or another.
        turning: every dimension that goes the other way than in that earlier phase, straight or not.
    """

    dimension: int
    earlier: int
    phase: int
    straight: float
    counting: tuple[int, ...]
    turning: tuple[int, ...]

    @property
    def counts(self) -> bool:
        return self.dimension in self.counting


def counter_of(dimensions: pd.DataFrame, phase: int) -> Counter:
    """What counts for a phase: slopes of opposite sign there and in an earlier phase, R² of STRAIGHT or more in both.

    Of several the straightest is named.

    Args:
        dimensions: as `dimension_table`. phase: 1 or 2.
    """
    slope, r2 = (
        dimensions.pivot(index="dimension", columns="phase", values=name).to_numpy(float) for name in ("slope", "r2")
    )
    best, counting = (float("nan"), 0, 0), list[int]()
    for earlier in range(phase):
        turns = slope[:, earlier] * slope[:, phase] < 0
        least = np.minimum(r2[:, earlier], r2[:, phase])  # NaN, if it stands still in either
        for dimension in np.flatnonzero(turns & ~np.isnan(least)).tolist():
            if np.isnan(best[0]) or least[dimension] > best[0]:
                best = (float(least[dimension]), dimension, earlier)
            if least[dimension] >= STRAIGHT:
                counting.append(dimension)
    turning = tuple(np.flatnonzero(slope[:, best[2]] * slope[:, phase] < 0).tolist())
    return Counter(best[1], best[2], phase, float(best[0]), tuple(dict.fromkeys(counting)), turning)


def letters_read(reader: LetterByLetter, cell: Cell, phase: int, most: int) -> Float[np.ndarray, " word"]:
    """After how many letters of a phase each word's network first allows what follows the phase; NaN: not by `most`."""
    after = EOS if phase == reader.letters - 1 else 2 + phase
    found = np.full(len(cell.h), np.nan)
    for count in range(most + 1):
        new = reader.allows(cell, after).numpy() & np.isnan(found)
        found[new] = count
        if not np.isnan(found).any():
            break
        cell = reader.read(cell, 1 + phase)
    return found


def before_phase(reader: LetterByLetter, phase: int, n: Int[np.ndarray, " word"]) -> Cell:
    """The state after a^n … up to a phase, for each n (ascending)."""
    found = []
    cell = reader.start()
    for count in range(1, int(n.max()) + 1):
        cell = reader.read(cell, 1)
        if count in n:
            there = cell
            for earlier in range(1, phase):
                for _ in range(count):
                    there = reader.read(there, 1 + earlier)
            found.append(there)
    return Cell(torch.cat([s.h for s in found]), torch.cat([s.c for s in found]))


def carried(
    reader: LetterByLetter, phase: int, n: int, slopes: Float[np.ndarray, " hidden"]
) -> tuple[float, pd.DataFrame]:
    """How many letters later the network ends a phase per letter's worth that its state was moved by before it.

    Args:
        phase: that ends. n: letters of the phases before. slopes: of the state, per letter; 0 where it is not moved.

    Returns:
        The least-squares slope of letters read over letters moved (NaN if fewer than half the words end), and the
        table `moved`, `read`.
    """
    by = np.arange(-MOVED, MOVED + 1)
    cell = before_phase(reader, phase, np.array([n]))
    shifted = reader.moved(cell, torch.from_numpy(by[:, None] * slopes[None]))
    read = letters_read(reader, shifted, phase, n + MOVED + SLACK)
    ends = ~np.isnan(read)
    slope = float(np.polyfit(by[ends], read[ends], 1)[0]) if ends.sum() * 2 >= len(by) else float("nan")
    return slope, pd.DataFrame({"moved": by, "read": read})
