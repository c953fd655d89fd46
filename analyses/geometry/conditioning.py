"""How far can the verdicts on a set of keys be trusted to mean something? Figures, and a warning where they say no."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64, Int64

from ln_probe.analyses.geometry.judged import Judged
from ln_probe.analyses.geometry.key_coordinates import TAU, KeyCoordinates
from ln_probe.analyses.geometry.margins import measured, propose
from ln_probe.analyses.geometry.verdicts import Verdicts

_EPS = float(np.finfo(np.float64).eps)
# Beyond these a figure is spoken of. Directions that differ more than this in spread are told apart by tau alone: what
# is thinner than tau counts as flat. Keys that far from the origin have lost half of float32's digits to their offset.
_SPREAD, _OFFSET = 1e6, 1e4
# Scores that rounding moves by more than this (nats) have no attention worth stating.
SCORE_NOISE = 1e-3
# A share of keys this near to the tolerance makes the tolerance decide.
_NEAR_SHARE = 0.01
# How close to the best gap a query has to be to tell whether it is above 2 tau.
_ROUGHLY = 0.3


@dataclass(frozen=True)
class Conditioning:
    """Figures of one set of keys.

    Attributes:
        spread: largest over smallest RMS of the keys along the directions of their span.
        offset_over_spread: length of the mean key over the RMS norm of the centred keys.
        score_noise: eps times the largest score before cancellation, nats; NaN without a query set.
        near_tau: number of keys whose verdict lies within a factor 2 of the tolerance, and undecided ones.
    """

    spread: float
    offset_over_spread: float
    score_noise: float
    near_tau: int

    def warnings(self, number: int) -> tuple[str, ...]:
        """What endangers the verdicts, a sentence each; empty if nothing does."""
        found = []
        if self.spread > _SPREAD:
            found.append(
                f"keys spread {self.spread:.1e} times further in one direction than in another: what is thinner than "
                f"tau ({TAU:g} of their RMS norm) counts as flat"
            )
        if self.offset_over_spread > _OFFSET:
            found.append(
                f"the mean key is {self.offset_over_spread:.1e} times longer than keys are apart: if they were "
                "computed in float32, few digits of their differences are left; centre them before rounding"
            )
        if self.score_noise > SCORE_NOISE:
            found.append(
                f"scores are so large that float64 rounds them by {self.score_noise:.1e} nats: bounds of attention and "
                "margins are wide; use a smaller query set"
            )
        if self.near_tau > _NEAR_SHARE * number:
            found.append(
                f"{self.near_tau} of {number} keys are within a factor 2 of the tolerance {TAU:g}, or undecided: "
                "strict=True decides them exactly"
            )
        return tuple(found)


def conditioning(
    sets: KeyCoordinates, where: Judged, verdicts: Verdicts, clear: Float64[np.ndarray, " key"]
) -> Conditioning:
    """Figures of one set, from its coordinates, its verdicts and how clear they are (`Proved.clear`)."""
    near = np.isnan(clear) | ((clear < 0) & (clear < -TAU / 2))
    weak = np.flatnonzero((clear > 0) & (clear < 2 * TAU))  # by the query that was found; is there a better one?
    if len(weak):
        near[weak[_best_gap(sets, where, verdicts, weak) < 2 * TAU]] = True
    return Conditioning(
        spread=float(sets.stretch.max() / sets.stretch.min()) if len(sets.stretch) else 1.0,
        offset_over_spread=where.offset_over_spread,
        score_noise=_EPS * where.largest_score,
        near_tau=int(near.sum()),
    )


def _best_gap(
    sets: KeyCoordinates, where: Judged, verdicts: Verdicts, keys: Int64[np.ndarray, " some"]
) -> Float64[np.ndarray, " some"]:
    """The relative score gap that the query towards the nearest point of the hull of the others gives."""
    space = measured(sets, where, through_queries=False)
    if len(space.distinct) < 2:
        return np.zeros(len(keys))
    query = propose(space, verdicts, _ROUGHLY, keys, np.inf).point
    scores = query @ space.rows.T
    own = scores[np.arange(len(keys)), keys]
    for k, i in enumerate(keys):
        scores[k, np.linalg.norm(space.rows - space.rows[i], axis=1) <= TAU] = -np.inf
    return np.asarray(own - scores.max(axis=1))
