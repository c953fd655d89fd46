"""Brackets of margins and attainable attention by general solvers that share nothing with the geometry."""

from __future__ import annotations

from typing import Any

import clarabel
import numpy as np
from geometry_families import Case
from scipy import sparse
from scipy.optimize import minimize


def measured(case: Case) -> tuple[np.ndarray, np.ndarray]:
    """Keys as the queries see them and what is added to their scores; without queries the keys over their RMS norm."""
    keys = case.keys.astype(np.longdouble)
    centred = keys - keys.mean(axis=0)
    if case.query_set is None:
        return (centred / np.sqrt((centred**2).sum(axis=1).mean())).astype(float), np.zeros(len(keys))
    center, axes = case.query_set
    lifts = centred @ center
    if case.bias is not None:
        lifts = lifts + (case.bias - np.mean(case.bias))
    return (centred @ axes).astype(float), lifts.astype(float)


def margin(case: Case, i: int) -> tuple[float, float]:
    """Lower and upper bound of the margin of key i, by a cone program (Clarabel); rounding is not allowed for."""
    rows, lifts = measured(case)
    others = np.delete(np.arange(len(rows)), i)
    steps, leads = rows[i] - rows[others], lifts[i] - lifts[others]
    query, weights = cone_program(steps, leads)
    query = query / max(float(np.linalg.norm(query)), 1.0)
    share = np.maximum(weights, 0.0) / np.maximum(weights, 0.0).sum()
    lower, upper = float((steps @ query + leads).min()), float(share @ leads + np.linalg.norm(share @ steps))
    return (max(lower, 0.0) if case.query_set is None else lower), upper


def cone_program(steps: np.ndarray, lifts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The query u, |u| <= 1, with the largest min_j (lifts_j + u · steps_j), and the weights of its dual.

    maximize t subject to lifts_j + u · steps_j - t >= 0 and (1, u) in the second-order cone.
    """
    # What no query of the set brings down to the others is left out: it would set the scale.
    length = np.linalg.norm(steps, axis=1)
    low = np.flatnonzero(lifts - length <= (lifts + length).min() + 1e-9 * np.abs(lifts).max())
    every, steps, lifts = len(lifts), steps[low], lifts[low] - lifts[low].mean()
    size = max(float(np.abs(steps).max(initial=0.0)), float(np.abs(lifts).max(initial=0.0)), 1e-300)
    steps, lifts = steps / size, lifts / size
    number, r = steps.shape
    rows = np.zeros((number + 1 + r, r + 1))
    rows[:number, :r], rows[:number, r] = -steps, 1.0
    rows[number + 1 :, :r] = -np.eye(r)
    right = np.concatenate([lifts, [1.0], np.zeros(r)])
    settings = clarabel.DefaultSettings()
    settings.verbose = False
    settings.tol_gap_abs = settings.tol_gap_rel = settings.tol_feas = 1e-12
    cones = [clarabel.NonnegativeConeT(number), clarabel.SecondOrderConeT(1 + r)]
    objective = np.append(np.zeros(r), -1.0)
    solver = clarabel.DefaultSolver(
        sparse.csc_matrix((r + 1, r + 1)), objective, sparse.csc_matrix(rows), right, cones, settings
    )
    solved = solver.solve()
    weights = np.zeros(every)
    weights[low] = np.array(solved.z)[:number]
    return np.array(solved.x)[:r], weights


def attention(case: Case, i: int, start: np.ndarray) -> tuple[float, float]:
    """Bounds of the largest softmax weight of key i: at a point of SLSQP's ascent, and what its gradient allows."""
    rows, lifts = measured(case)
    scores, steps = lifts - lifts[i], rows - rows[i]

    def loss(u: np.ndarray) -> Any:
        return np.logaddexp.reduce(scores + steps @ u)

    def slope(u: np.ndarray) -> Any:
        exponents = scores + steps @ u
        return np.exp(exponents - np.logaddexp.reduce(exponents)) @ steps

    ball = {"type": "ineq", "fun": lambda u: 1 - u @ u, "jac": lambda u: -2 * u}
    options = {"maxiter": 1000, "ftol": 1e-14}
    runs = [
        minimize(loss, s, jac=slope, constraints=ball, method="SLSQP", options=options) for s in (start, 0.5 * start)
    ]
    best = min(runs, key=lambda run: run.fun)
    u = best.x / max(float(np.linalg.norm(best.x)), 1.0)
    gradient = slope(u)
    gap = float(gradient @ u + np.linalg.norm(gradient))
    return float(np.exp(-loss(u))), float(min(np.exp(gap - loss(u)), 1.0))
