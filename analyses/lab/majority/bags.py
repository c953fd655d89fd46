"""The loss of a one-layer transformer on bags of tokens and its gradients, from one row per distinct token.

Without positions, equal tokens of a sequence have equal queries, keys, values and outputs, so a sequence of T tokens is
its counts n [token], and everything before the softmax is a table with a row per token of the vocabulary:

    w(a, c) = n_c exp(S_ac) / Σ_c' n_c' exp(S_ac')         S = scores of token a's query and token c's key
    x_a = base_a + Σ_c w(a, c) VO_c                         base = embedding + b_O,  VO = values W_O
    logits_a = U (x_a + W_outᵀ relu(W_inᵀ LN(x_a) + b_in) + b_out)
    loss = Σ_a n_a CE(logits_a, label) / Σ n

This is exact: the same loss and gradients as T rows per sequence, but for rounding. The tables are torch's (autograd
goes through them); the rows are done by `sweep_rows`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Float64, Int64, UInt8
from torch import Tensor

from ln_probe.analyses.geometry.compiled import compiled_reordered, in_threads
from ln_probe.analyses.lab.train import with_gradients

# Rows worked on together; measured per batch of 6000 (one core): 64: 9.0 ms, 128: 7.4 (in an earlier form 16: 36, 32:
# 27, 256: no faster than 128). All they need is in one array whose rows are further apart than a step of an unrolled
# loop, so that compiled loops take the same path, and round alike, wherever the memory lies (geometry/compiled.py).
LANES = 128
_LOG2E, _LN2_HIGH, _LN2_LOW = np.float32(1.44269504), np.float32(0.693359375), np.float32(-2.12194440e-4)
_LOWEST = np.float32(-87.0)  # below it, exp is 0 in float32


@compiled_reordered
def _exp(x: np.float32) -> np.float32:
    """exp(x) to 3 units in the last place, without branches: 2^n times the polynomial of Cephes' expf."""
    x = max(x, _LOWEST)
    n = np.floor(x * _LOG2E + np.float32(0.5))
    f = x - n * _LN2_HIGH - n * _LN2_LOW
    p = np.float32(1.9875691500e-4)
    p = p * f + np.float32(1.3981999507e-3)
    p = p * f + np.float32(8.3334519073e-3)
    p = p * f + np.float32(4.1665795894e-2)
    p = p * f + np.float32(1.6666665459e-1)
    p = p * f + np.float32(5.0000001201e-1)
    p = p * f * f + f + np.float32(1.0)
    return p * np.int32((np.int32(n) + np.int32(127)) << np.int32(23)).view(np.float32)  # type: ignore[no-any-return]


@compiled_reordered
def _add_product(out: Any, M: Any, x: Any) -> None:
    """out[j] += Σ_k M[k, j] x[k], lane by lane."""
    for j in range(M.shape[1]):
        for k in range(M.shape[0]):
            t = M[k, j]
            for i in range(LANES):
                out[j, i] += t * x[k, i]


@compiled_reordered
def _add_outer(out: Any, a: Any, b: Any) -> None:
    """out[k, j] += Σ over lanes of a[k] b[j]."""
    for k in range(out.shape[0]):
        for j in range(out.shape[1]):
            t = np.float32(0)
            for i in range(LANES):
                t += a[k, i] * b[j, i]
            out[k, j] += t


@compiled_reordered
def _add_sum(out: Any, a: Any) -> None:
    """out[k] += Σ over lanes of a[k]."""
    for k in range(out.shape[0]):
        t = np.float32(0)
        for i in range(LANES):
            t += a[k, i]
        out[k] += t


@compiled_reordered
def _softmax(values: Any, weights: Any, top: Any, total: Any) -> None:
    """values[c] becomes weights[c] exp(values[c] - top), lane by lane; `top` is the largest value that has a weight."""
    top[:] = np.float32(-1e30)
    total[:] = np.float32(0)
    for c in range(values.shape[0]):
        for i in range(LANES):
            top[i] = max(top[i], values[c, i] if weights[c, i] > 0 else np.float32(-1e30))
    for c in range(values.shape[0]):
        for i in range(LANES):
            e = weights[c, i] * _exp(min(values[c, i] - top[i], np.float32(0)))
            values[c, i] = e
            total[i] += e


@compiled_reordered
def sweep_rows(
    counts: Any, label: Any, chosen: Any, eps: Any, total: Any, tables: Any, gradients: Any
) -> tuple[float, float]:
    """Sum of losses and number of correct tokens of some examples; adds to the gradients (over `total`) of `tables`."""
    S, VO, base, gain, bias, W_in, b_in, W_out, b_out, U = tables
    dS, dVO, dbase, dgain, dbias, dW_in, db_in, dW_out, db_out, dU = gradients
    C, d = VO.shape
    m, L = W_in.shape[1], U.shape[0]
    one, zero = np.float32(1), np.float32(0)
    scratch = np.zeros((3 * C + 2 * L + 6 * d + 2 * m + 7, LANES), np.float32)
    at = 0
    n, at = scratch[at : at + C], at + C  # counts of the row's example
    w, at = scratch[at : at + C], at + C  # attention weights
    dw, at = scratch[at : at + C], at + C
    p, at = scratch[at : at + L], at + L  # logits, then probabilities, then their gradient
    ones, at = scratch[at : at + L], at + L
    x, at = scratch[at : at + d], at + d  # the stream after attention
    unit, at = scratch[at : at + d], at + d  # normalized
    y, at = scratch[at : at + d], at + d  # with gain and bias
    x2, at = scratch[at : at + d], at + d  # the stream after the MLP
    dx, at = scratch[at : at + d], at + d
    dy, at = scratch[at : at + d], at + d
    h, at = scratch[at : at + m], at + m
    dh, at = scratch[at : at + m], at + m
    weight, top, z, inverse = scratch[at], scratch[at + 1], scratch[at + 2], scratch[at + 3]
    s1, s2, value = scratch[at + 4], scratch[at + 5], scratch[at + 6]
    ones[:] = one
    wanted = np.zeros(LANES, np.int64)
    factor = np.empty(C, np.float32)
    loss = correct = 0.0
    token, example, fresh = 0, 0, True
    while token < C:  # token by token, so that the rows of one sweep share their scores
        if fresh:
            highest, lowest = S[token].max(), S[token].min()
            for c in range(C):
                factor[c] = _exp(S[token, c] - highest)
            fresh = False
        lanes = 0
        while lanes < LANES and example < len(chosen):
            e = chosen[example]
            example += 1
            if counts[e, token] > 0:
                wanted[lanes], weight[lanes] = label[e], np.float32(counts[e, token])
                for c in range(C):
                    n[c, lanes] = np.float32(counts[e, c])
                lanes += 1
        here = token
        if example == len(chosen):
            token, example, fresh = token + 1, 0, True
        if lanes == 0:
            continue
        for i in range(lanes, LANES):  # the rest repeats the first row, with no weight
            weight[i] = zero
            for c in range(C):
                n[c, i] = n[c, 0]
        # attention
        if highest - lowest < -_LOWEST:
            z[:] = zero
            for c in range(C):
                for i in range(LANES):
                    t = factor[c] * n[c, i]
                    w[c, i] = t
                    z[i] += t
        else:  # measured from the largest score among the row's own tokens: factors may all have underflowed
            for c in range(C):
                w[c] = S[here, c]
            _softmax(w, n, top, z)
        for c in range(C):
            for i in range(LANES):
                w[c, i] /= z[i]
        for k in range(d):
            x[k] = base[here, k]
        _add_product(x, VO, w)
        # LayerNorm and MLP
        s1[:], s2[:] = zero, zero
        for k in range(d):
            for i in range(LANES):
                s1[i] += x[k, i]
        for k in range(d):
            for i in range(LANES):
                t = x[k, i] - s1[i] / np.float32(d)
                unit[k, i] = t
                s2[i] += t * t
        for i in range(LANES):
            inverse[i] = one / np.sqrt(s2[i] / np.float32(d) + eps)
        for k in range(d):
            for i in range(LANES):
                t = unit[k, i] * inverse[i]
                unit[k, i] = t
                y[k, i] = gain[k] * t + bias[k]
                x2[k, i] = x[k, i] + b_out[k]
        for j in range(m):
            h[j] = b_in[j]
        _add_product(h, W_in, y)
        for j in range(m):
            for i in range(LANES):
                h[j, i] = max(h[j, i], zero)
        _add_product(x2, W_out, h)
        # logits and loss
        p[:] = zero
        _add_product(p, U.T, x2)
        for i in range(LANES):
            value[i] = p[wanted[i] if i < lanes else 0, i]
        _softmax(p, ones, top, z)
        for i in range(lanes):
            loss += weight[i] * (np.log(z[i]) + top[i] - value[i])
            if value[i] >= top[i]:
                correct += weight[i]
        # and back
        for i in range(LANES):
            weight[i] /= total
        for c in range(L):
            for i in range(LANES):
                p[c, i] *= weight[i] / z[i]
        for i in range(lanes):
            p[wanted[i], i] -= weight[i]
        _add_outer(dU, p, x2)
        dx[:], dh[:], dy[:] = zero, zero, zero
        _add_product(dx, U, p)
        _add_sum(db_out, dx)
        _add_outer(dW_out, h, dx)
        _add_product(dh, W_out.T, dx)
        for j in range(m):
            for i in range(LANES):
                dh[j, i] = dh[j, i] if h[j, i] > zero else zero
        _add_sum(db_in, dh)
        _add_outer(dW_in, y, dh)
        _add_product(dy, W_in.T, dh)
        _add_sum(dbias, dy)
        s1[:], s2[:] = zero, zero
        for k in range(d):
            t1 = zero
            for i in range(LANES):
                t1 += dy[k, i] * unit[k, i]
            dgain[k] += t1
            for i in range(LANES):
                t = gain[k] * dy[k, i]
                dy[k, i] = t
                s1[i] += t
                s2[i] += t * unit[k, i]
        for k in range(d):
            for i in range(LANES):
                dx[k, i] += inverse[i] * (dy[k, i] - (s1[i] + unit[k, i] * s2[i]) / np.float32(d))
        _add_sum(dbase[here], dx)
        _add_outer(dVO, w, dx)
        dw[:], s1[:] = zero, zero
        _add_product(dw, VO.T, dx)
        for c in range(C):
            for i in range(LANES):
                s1[i] += w[c, i] * dw[c, i]
        for c in range(C):
            for i in range(LANES):
                dw[c, i] = w[c, i] * (dw[c, i] - s1[i])
        _add_sum(dS[here], dw)
    return loss, correct


# A batch is cut into as many, for threads; a fixed number, so that sums do not depend on the threads. Every piece ends
# in partly filled sweeps: 4 pieces cost 7 % more than 2 (one core).
PIECES = 2


@dataclass(frozen=True)
class Bags:
    """Sequences as counts: `counts` [example token], the class to predict, and which examples to look at."""

    counts: UInt8[np.ndarray, "example token"]
    label: UInt8[np.ndarray, " example"]
    chosen: Int64[np.ndarray, " batch"]


@dataclass(frozen=True)
class Tables:
    """What the rows are made of; `S` [query key], `VO` and `base` [token d], then the second norm, MLP, unembedding."""

    S: Float[Tensor, "query key"]
    VO: Float[Tensor, "token d"]
    base: Float[Tensor, "token d"]
    gain: Float[Tensor, " d"]
    bias: Float[Tensor, " d"]
    W_in: Float[Tensor, "d d_mlp"]
    b_in: Float[Tensor, " d_mlp"]
    W_out: Float[Tensor, "d_mlp d"]
    b_out: Float[Tensor, " d"]
    U: Float[Tensor, "label d"]

    def all(self) -> tuple[Tensor, ...]:
        return tuple(vars(self).values())


def bag_loss(tables: Tables, bags: Bags, eps: float) -> Float[Tensor, ""]:
    """Mean cross-entropy over all tokens of the chosen examples, differentiable in every table (float32, on the CPU).

    `eps` is of the norm before the MLP.
    """
    loss, _, gradients = _sweep(bags, eps, tables)
    return with_gradients(loss, tables.all(), [torch.from_numpy(g.astype(np.float32)) for g in gradients])


def bag_accuracy(tables: Tables, bags: Bags, eps: float) -> tuple[float, float]:
    """Mean loss, and the share of tokens at which the label has the largest logit."""
    return _sweep(bags, eps, tables)[:2]


def _sweep(bags: Bags, eps: float, tables: Tables) -> tuple[float, float, list[Float64[np.ndarray, " ..."]]]:
    """Mean loss, accuracy, and the gradient of the loss by every table."""
    total = float(bags.counts[bags.chosen].sum(dtype=np.int64))
    inputs = [np.ascontiguousarray(t.detach().numpy(), np.float32) for t in tables.all()]

    def one(piece: Int64[np.ndarray, " batch"]) -> tuple[float, float, list[Float64[np.ndarray, " ..."]]]:
        gradients = [np.zeros(t.shape) for t in inputs]
        scalars = np.float32(eps), np.float32(total)
        loss, correct = sweep_rows(bags.counts, bags.label, piece, *scalars, tuple(inputs), tuple(gradients))
        return loss, correct, gradients

    done = in_threads(one, np.array_split(bags.chosen, PIECES), torch.get_num_threads())
    gradients = [np.sum([d[2][i] for d in done], axis=0) for i in range(len(inputs))]
    return sum(d[0] for d in done) / total, sum(d[1] for d in done) / total, gradients
