"""The loss of a one-layer transformer on bags of tokens, from one row per distinct token, with its gradients.

Without positions, equal tokens of a sequence have equal queries, keys, values and outputs, so a sequence of T tokens is
its counts n [token], and everything before the softmax is a table with a row per token of the vocabulary:

    w(a, c) = n_c exp(S_ac) / Σ_c' n_c' exp(S_ac')         S = scores of token a's query and token c's key
    x_a = base_a + Σ_c w(a, c) VO_c                         base = embedding + b_O,  VO = values W_O
    logits_a = U (x_a + W_outᵀ relu(W_inᵀ LN(x_a) + b_in) + b_out)
    loss = Σ_a n_a CE(logits_a, label) / Σ n

This is exact: the same loss and gradients as T rows per sequence, but for rounding. The tables are torch's (autograd
goes through them); the rows are done in `rows.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Float32, Float64, Int64, UInt8
from torch import Tensor

from ln_probe.analyses.geometry.compiled import in_threads
from ln_probe.analyses.lab.majority.bags.rows import sweep_rows

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
    """Mean cross-entropy over all tokens of the chosen examples, differentiable in every table.

    Args:
        tables: float32, on the CPU.
        bags: the examples.
        eps: of the norm before the MLP.
    """
    loss: Tensor = _BagLoss.apply(bags, eps, *tables.all())  # type: ignore[no-untyped-call]
    return loss


def bag_accuracy(tables: Tables, bags: Bags, eps: float) -> tuple[float, float]:
    """Mean loss, and the share of tokens at which the label has the largest logit."""
    loss, accuracy, _ = _sweep(bags, eps, [t.detach().numpy() for t in tables.all()])
    return loss, accuracy


class _BagLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, bags: Bags, eps: float, *tables: Tensor) -> Tensor:
        loss, _, gradients = _sweep(bags, eps, [t.detach().numpy() for t in tables])
        ctx.save_for_backward(*(torch.from_numpy(g.astype(np.float32)) for g in gradients))
        return torch.tensor(loss)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        return (None, None, *(upstream * g for g in ctx.saved_tensors))


def _sweep(
    bags: Bags, eps: float, tables: list[Float32[np.ndarray, " ..."]]
) -> tuple[float, float, list[Float64[np.ndarray, " ..."]]]:
    """Mean loss, accuracy, and the gradient of the loss by every table."""
    total = float(bags.counts[bags.chosen].sum(dtype=np.int64))
    inputs = [np.ascontiguousarray(t, np.float32) for t in tables]

    def one(piece: Int64[np.ndarray, " batch"]) -> tuple[float, float, list[Float64[np.ndarray, " ..."]]]:
        gradients = [np.zeros(t.shape) for t in inputs]
        scalars = (np.float32(eps), np.float32(total))
        arguments: tuple[Any, ...] = (bags.counts, bags.label, piece, *scalars, *inputs, *gradients)
        loss, correct = sweep_rows(*arguments)
        return loss, correct, gradients

    done = in_threads(one, np.array_split(bags.chosen, PIECES), torch.get_num_threads())
    gradients = [np.sum([d[2][i] for d in done], axis=0) for i in range(len(inputs))]
    return sum(d[0] for d in done) / total, sum(d[1] for d in done) / total, gradients
