"""What the geometry is compared with: a linear program per key, and the published selectability algorithm."""

from __future__ import annotations

import numpy as np
from scipy.optimize import linprog

# The published prefilter gives up after so many reflections; more only delay the linear program on interior
# keys.
REFLECTIONS = 100
# Seconds after which a linear program is given up: HiGHS cycles without end on some keys with lognormal
# norms.
TIME_LIMIT = 1.0


def feasibility(keys: np.ndarray, i: int) -> bool | None:
    """Is key i selectable, by HiGHS: no convex weights of the other keys reproduce it. None: it gave up."""
    others = np.delete(keys, i, axis=0)
    sums = np.vstack([others.T, np.ones(len(others))])
    solved = linprog(
        np.zeros(len(others)),
        A_eq=sums,
        b_eq=np.append(keys[i], 1.0),
        method="highs",
        options={"time_limit": TIME_LIMIT},
    )
    return {0: False, 2: True}.get(int(solved.status))


def reflections(keys: np.ndarray, i: int) -> bool | None:
    """The prefilter: reflect the query at the plane on which the winner ties with key i, until key i wins."""
    query = keys[i] / np.linalg.norm(keys[i])
    for _ in range(REFLECTIONS):
        winner = int(np.argmax(keys @ query))
        if winner == i:
            return True
        normal = keys[i] - keys[winner]
        query = query - 2.0 * (normal @ query) / (normal @ normal) * normal
    return None


def chebyshev(keys: np.ndarray, i: int) -> bool:
    """Is there a ball of queries in the box that all select key i: its largest radius, by HiGHS."""
    steps = np.delete(keys, i, axis=0) - keys[i]
    dim = keys.shape[1]
    solved = linprog(
        np.append(np.zeros(dim), -1.0),
        A_ub=np.column_stack([steps, np.linalg.norm(steps, axis=1)]),
        b_ub=np.zeros(len(steps)),
        bounds=[(-100.0, 100.0)] * dim + [(0.0, None)],
        method="highs",
        options={"time_limit": TIME_LIMIT},
    )
    return bool(solved.status == 0 and solved.x[-1] > 1e-8)


def published(keys: np.ndarray, i: int) -> bool:
    """Is key i selectable, by reflections, then the Chebyshev centre (Grivas, Bogoychev & Lopez 2022; used by
    Brody, Alon & Yahav 2023)."""
    found = reflections(keys, i)
    return chebyshev(keys, i) if found is None else found
