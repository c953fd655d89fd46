"""The last resort for one key: a linear program (HiGHS) that gives a query and convex weights at once."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float64
from scipy.optimize import linprog  # type: ignore[import-untyped]

from ln_probe.analyses.geometry.min_norm import BUDGET

# Seconds. HiGHS has been seen to cycle without end on 512 keys with lognormal norms. The limit on iterations comes
# first on any machine that is not stuck, so that what is decided does not depend on how busy it is.
TIME_LIMIT = 20.0
# What one iteration costs, in passes over all numbers of the program: pricing, two triangular solves, and a share of a
# factorization.
_PASSES = 4


def separate(
    others: Float64[np.ndarray, "other dim"], key: Float64[np.ndarray, " dim"], ray: bool, budget: float = BUDGET
) -> tuple[Float64[np.ndarray, " dim"], Float64[np.ndarray, " other"]]:
    """The query in the unit box with the largest score gap, and convex weights from its dual.

    Either may be all zero if the solver fails: the caller checks both.

    Args:
        others, key: in well-scaled coordinates.
        ray: whether the query's last coordinate must not be negative (keys with a bias).
        budget: multiply-adds, which limit the iterations.

    Raises:
        ValueError: a budget that is not positive.
    """
    if not budget > 0.0:
        raise ValueError(f"budget must be positive, got {budget}: it is the number of multiply-adds per key")
    number, dim = others.shape
    difference = others - key
    size = max(float(np.abs(difference).max()), 1e-300)
    box = [(-1.0, 1.0)] * dim
    if ray:
        box[-1] = (0.0, 1.0)
    solved = linprog(
        np.append(np.zeros(dim), -1.0),
        A_ub=np.column_stack([difference / size, np.ones(number)]),
        b_ub=np.zeros(number),
        bounds=[*box, (0.0, None)],
        method="highs",
        options={
            "primal_feasibility_tolerance": 1e-10,
            "dual_feasibility_tolerance": 1e-10,
            "time_limit": TIME_LIMIT,
            "maxiter": int(min(max(budget / (_PASSES * number * dim), 1.0), 1e9)),
        },
    )
    if solved.x is None:
        return np.zeros(dim), np.zeros(number)
    weights = np.maximum(-np.asarray(solved.ineqlin.marginals), 0.0)
    total = float(weights.sum())
    return np.asarray(solved.x[:dim]), weights / total if total > 0.0 else weights
