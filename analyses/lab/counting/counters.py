"""Counters by hand: an LSTM and a ReLU-RNN that count in float32, what each norm does to them, and a GRU's bound.

Weiss, Goldberg & Yahav (2018, section 3) claim that LSTMs and ReLU-RNNs can count, squashing RNNs and GRUs cannot. So
weights are written down that decide a^n b^n, and the largest N is measured such that a network is exact on every n = 1
… N (in the sense of `tasks.counted`). An LSTM adds 1 or -1 to one cell; a ReLU-RNN to one unit, and a second
one, less by 1, makes min(count, 1) of it. `mirrored` is an LSTM whose cells are pairs (c, -c), so projection does
nothing. A GRU's state is an average of numbers between -1 and 1: it moves by a share of the way, here
2^-k of it. Then n letters up and n down leave an error of n²/2^k steps, so it counts to the n at which that is three
quarters of a step, until float32 does not hold the step (k = 24): bounded, where an LSTM's bound is 2^24.
"""

from __future__ import annotations

from dataclasses import dataclass

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from ln_probe.analyses.lab.counting.recurrent import NormedLayer, RecurrentConfig, RecurrentTagger
from ln_probe.analyses.lab.counting.tasks import ACCEPTED, TERMS, allowed_next, counted_words
from ln_probe.analyses.lab.experiments import Request
from ln_probe.analyses.lab.results import Results, summarize

LARGEST, LARGEST_GRU, QUICK_LARGEST = 1000, 3000, 100
STEPS = range(4, 25)  # a GRU's k
SITES = {"lstm": ("state", "readout", "gates"), "mirrored lstm": ("state",), "rnn_relu": ("state", "gates")}
KEYS = ("model", "norm", "norm_site")
SURE = 30.0  # into a sigmoid or tanh: 0, 1 or -1 in float32
LOGIT = 10.0
A, B = 1, 2  # tokens; EOS is 0, BOS 3


@dataclass(frozen=True)
class Cell:
    """A network by hand; `step`: of a GRU, k."""

    model: str
    norm: str = "none"
    norm_site: str = "gates"
    step: int = 0

    def build(self) -> RecurrentTagger:
        """The network."""
        cell = self.model.removeprefix("mirrored ")
        hidden = 6 if self.model.startswith("mirrored") else 4
        cfg = RecurrentConfig(cell, 4, 3, d_embed=4, hidden=hidden, norm=self.norm, norm_site=self.norm_site)
        model = RecurrentTagger(cfg)
        layer = model.layers[0]
        assert isinstance(layer, NormedLayer)
        with torch.no_grad():
            for tensor in (*layer.weights.parameters(), model.out.weight, model.out.bias):
                tensor.zero_()
            model.embed.weight.copy_(torch.eye(4))
            w_ih, w_hh, b_ih, _ = layer.weights.parameters()
            {"lstm": _lstm, "rnn_relu": _relu, "gru": _gru}[cell](w_ih, w_hh, b_ih, hidden, self.step)
            _read(model.out.weight, model.out.bias, cell)
        return model.eval()


def _lstm(w: Tensor, u: Tensor, b: Tensor, hidden: int, step: int) -> None:
    """Cells: the count, whether the letter is b, and if there is room their negatives."""
    for cell, sign in ((0, 1.0), (1, 1.0), *(((3, -1.0), (4, -1.0)) if hidden > 4 else ())):
        kept = cell % 3 == 0
        b[cell], b[hidden + cell], b[3 * hidden + cell] = SURE, SURE if kept else -SURE, SURE
        new = w[2 * hidden + cell]
        new[A], new[B] = (sign * SURE, -sign * SURE) if kept else (-sign * SURE, sign * SURE)
        new[3] = 0.0 if kept else -sign * SURE


def _relu(w: Tensor, u: Tensor, b: Tensor, hidden: int, step: int) -> None:
    """Units: the count, whether the letter is b, the count less 1."""
    w[0, A], w[0, B], u[0, 0] = 1.0, -1.0, 1.0
    w[1, B] = 1.0
    w[2, A], w[2, B], u[2, 0], b[2] = 1.0, -1.0, 1.0, -1.0


def _gru(w: Tensor, u: Tensor, b: Tensor, hidden: int, step: int) -> None:
    """Units: the count in steps of 2^-k, whether the letter is b, and tanh of twice the count."""
    b[:hidden] = SURE  # reset: read all
    b[hidden : 2 * hidden] = -SURE  # update: keep nothing …
    b[hidden] = float(torch.logit(torch.tensor(1 - 2.0**-step, dtype=torch.float64)))  # … but of the count
    new = 2 * hidden
    w[new, A], w[new, B] = SURE, -SURE
    w[new + 1, B], b[new + 1] = 2 * SURE, -SURE
    u[new + 2, 0], w[new + 2, A], w[new + 2, B] = 2.0 * 2**step, 2.0, -2.0


def _read(W: Tensor, b: Tensor, cell: str) -> None:
    """Logits of EOS, a and b from a sign of b and from u: 0 where the count is, else 0.76 to 1."""
    positive = torch.zeros(W.shape[1])
    positive[2 if cell == "gru" else 0] = 1.0
    if cell == "rnn_relu":
        positive[2] = -1.0
    is_b = torch.zeros(W.shape[1])
    is_b[1] = {"lstm": 1 / 0.7616, "gru": 1.0, "rnn_relu": 2.0}[cell]
    off = -1.0 if cell == "rnn_relu" else 0.0  # so that it is 1 where the letter is b, else -1
    W[0], b[0] = LOGIT * (is_b - 2.6 * positive), LOGIT * off
    W[A], b[A] = -LOGIT * is_b, -LOGIT * off
    W[B], b[B] = 2 * LOGIT * positive, -0.76 * LOGIT


def exact_to(model: RecurrentTagger, largest: int) -> int:
    """The largest N such that a network is exact on a^n b^n for every n = 1 … N, in float32 step by step."""
    layer = model.layers[0]
    assert isinstance(layer, NormedLayer)
    for start in range(1, largest + 1, 250):
        n = torch.arange(start, min(start + 250, largest + 1))
        with torch.no_grad():
            states = layer.unfused(model.embed(counted_words(2, n)[0]))
            p: Float[Tensor, "word pos token"] = model.out(states).softmax(-1)
        for row, count in zip(p, n.tolist(), strict=True):
            if not torch.equal(row[: 2 * count + 1] > ACCEPTED, allowed_next(2, count)):
                return int(count) - 1
    return largest


def grid() -> tuple[Cell, ...]:
    normed = [Cell(model, norm, site) for model, sites in SITES.items() for site in sites for norm in TERMS]
    return (*(Cell(model) for model in SITES), *normed, *(Cell("gru", step=k) for k in STEPS))


def run(request: Request) -> Results:
    """Measure every network by hand."""
    rows = []
    for cell in grid():
        largest = QUICK_LARGEST if request.quick else LARGEST_GRU if cell.model == "gru" else LARGEST
        site = "none" if cell.norm == "none" else cell.norm_site
        rows.append((cell.model, cell.norm, site, cell.step, 0, exact_to(cell.build(), largest)))
    tables = analyse(pd.DataFrame(rows, columns=[*KEYS, "step", "seed", "value"]))
    return Results(tables, {}, {"arithmetic": "float32"})


def analyse(frame: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """The largest n of every network: KEYS, `step`, `mean`, `seeds`."""
    return {"summary": summarize(frame, [*KEYS, "step"])[[*KEYS, "step", "mean", "seeds"]], "values": frame}
