"""Counting: labels by brute force, cells against torch, known networks, counters by hand, and traces of cells."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

from ln_probe.analyses.lab.counting import tasks, traces
from ln_probe.analyses.lab.counting.recurrent import RecurrentConfig
from ln_probe.analyses.lab.norms import NORM_KINDS


def belongs(language: str, word: str) -> bool:
    if language == "L5":
        return abs(word.count("a") - word.count("b")) < 5
    after = "a" if language == "anbnaS" else ""
    return any(word.startswith("a" * n + "b" * n + after) for n in range(1, len(word) + 1))


@pytest.mark.parametrize("language", ["L5", "anbnS", "anbnaS"])
def test_labels_of_all_short_words(language: str) -> None:
    words = list(itertools.product((0, 1), repeat=9))
    labels = tasks.prefix_labels(language, torch.tensor(words))
    for word, row in zip(words, labels.tolist(), strict=True):
        letters = "".join("ab"[i] for i in word)
        assert row == [belongs(language, letters[: t + 1]) for t in range(9)], letters


@pytest.mark.parametrize("letters", [2, 3])
@pytest.mark.parametrize("n", [1, 2, 4])
def test_what_may_come_next_by_brute_force(letters: int, n: int) -> None:
    language = [
        [tasks.bos(letters), *(1 + x for x in range(letters) for _ in range(m)), tasks.EOS] for m in range(1, n + 3)
    ]
    word = language[n - 1]
    table = tasks.allowed_next(letters, n)
    for i in range(letters * n + 1):
        following = {other[i + 1] for other in language if other[: i + 1] == word[: i + 1]}
        assert set(table[i].nonzero().flatten().tolist()) == following


class Known(torch.nn.Module):
    """Knows a^n b^n (c^n) for a range of n, and gives a wrong token a chance at the end of other words."""

    def __init__(self, letters: int, knows: tuple[int, int], chance: float) -> None:
        super().__init__()
        self.letters, self.knows, self.chance = letters, knows, chance

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        n = int((tokens[0] == 1).sum())
        table = tasks.allowed_next(self.letters, n).double()
        p = table / table.sum(-1, keepdim=True)
        if not self.knows[0] <= n <= self.knows[1]:
            p[-1] = (1 - self.chance) * p[-1]
            p[-1, 1] += self.chance
        return (p + 1e-12).log()[None]


@pytest.mark.parametrize("letters", [2, 3])
def test_exactness_of_known_networks(letters: int) -> None:
    for knows, chance, expected in (
        ((1, 7), 0.02, (1, 7, 12)),
        ((3, 7), 0.02, (3, 7, 12)),
        ((3, 7), 0.004, (1, 12, 12)),  # below what counts as accepted
        ((20, 20), 0.02, (0, 0, 12)),
        ((1, 7), 0.999, (1, 7, 7)),  # then EOS itself is rejected
    ):
        found = tasks.counted(Known(letters, knows, chance), letters, 12)
        assert tuple(found[key] for key in ("exact_from", "exact_to", "accepted_to")) == expected


@pytest.mark.parametrize(("cell", "site", "norm"), [
    *((cell, site, norm) for cell in ("gru", "rnn_tanh") for site in ("state", "gates") for norm in NORM_KINDS[:3]),
    *((cell, "nowhere", "none") for cell in ("lstm", "gru", "rnn_tanh", "rnn_relu")),
    *(("lstm", site, norm) for site in ("state", "readout", "gates") for norm in NORM_KINDS[:3]),
])  # fmt: skip
def test_a_norm_in_the_cell_by_definition(cell: str, site: str, norm: str) -> None:
    """The equations of each cell letter by letter, with the laboratory's norm at its place; values and gradients."""
    torch.manual_seed(0)
    layer = RecurrentConfig(cell, 3, 2, norm=norm, norm_site=site).build().double().layers[0]
    if layer.norm_state is not None:
        assert (layer.norm_state.w is None) == (layer.norm_state.b is None) == (site == "state")
    for weight in layer.parameters():
        weight.data += 0.3 * torch.randn_like(weight)
    x = torch.randn(5, 7, 4, dtype=torch.float64)
    w_ih, w_hh, b_ih, b_hh = layer.weights.parameters()
    h, c = states = [torch.zeros(5, 10).double()] * 2
    for t in range(7):
        i, r = x[:, t] @ w_ih.T, h @ w_hh.T
        if site == "gates":
            i, r = layer.norm_input(i), layer.norm_recurrent(r)
        i, r = i + b_ih, r + b_hh
        if cell == "lstm":
            put, keep, new, show = (i + r).chunk(4, dim=-1)
            c = keep.sigmoid() * c + put.sigmoid() * new.tanh()
            c = layer.norm_state(c) if site == "state" else c
            h = show.sigmoid() * (layer.norm_state(c) if site == "readout" else c).tanh()
        elif cell == "gru":
            (i_r, i_z, i_n), (r_r, r_z, r_n) = i.chunk(3, dim=-1), r.chunk(3, dim=-1)
            z = (i_z + r_z).sigmoid()
            h = z * h + (1 - z) * (i_n + (i_r + r_r).sigmoid() * r_n).tanh()
        else:
            h = (i + r).tanh() if cell == "rnn_tanh" else (i + r).relu()
        h = layer.norm_state(h) if site == "state" and cell != "lstm" else h
        states.append(h)
    expected, weights, parameters = torch.stack(states[2:], dim=1), torch.randn(7, 10).double(), [*layer.parameters()]
    gradients = torch.autograd.grad((expected * weights).sum(), parameters)
    for out in (layer(x), layer.unfused(x)):  # torch's kernel, where there is no norm, and step by step
        actual = (out, *torch.autograd.grad((out * weights).sum(), parameters))
        torch.testing.assert_close(actual, (expected, *gradients), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("cell", ["qrnn", "qrnn f", "qrnn ifo"])
def test_qrnn_by_definition(cell: str) -> None:
    torch.manual_seed(0)
    model = RecurrentConfig(cell, 2, 2).build().double()
    layer, x = model.layers[0], torch.randn(1, 6, 4, dtype=torch.float64)
    weight, bias = layer.gates.weight, layer.gates.bias
    c, out, before = torch.zeros(10).double(), [], torch.cat([torch.zeros(1, 4).double(), x[0]])
    for t in range(6):
        gates = (weight @ torch.cat([x[0, t], before[t]]) + bias).split(10)
        z, f = gates[0].tanh(), gates[1].sigmoid()
        i = gates[3].sigmoid() if cell == "qrnn ifo" else 1 - f
        c = f * c + i * z
        out.append(c if cell == "qrnn f" else gates[2].sigmoid() * c)
    torch.testing.assert_close(layer(x)[0], torch.stack(out))


def test_which_dimension_counts() -> None:
    """One that turns, straight both ways; without such a one the straightest that turns, and no candidate."""
    up, bent = np.arange(20.0), np.arange(20.0) ** 1.5
    still, rises, turns = [0 * up] * 3, [up, up + 20, up + 40], [up, bent[::-1], 0 * up]
    counts, later = [0 * up, 3 * up, -2 * up], [up, up, -up]
    trace = np.stack([np.stack(d) for d in (still, rises, turns, counts, later)], axis=2)
    assert traces.counter_of(trace, 2)[2] == 2
    assert traces.counter_of(trace[:, :, :4], 2) == (3, 1, 1)
    assert traces.counter_of(trace, 1) == (2, 0, 0)
    assert traces.counter_of(trace[:, :, :2], 2) == (0, 0, 0)
    wave = 5 * up + np.where(up == 9, 1.0, 0.0)
    line = traces.line_through(wave)
    x = np.arange(6, 21)
    slope, start = np.polyfit(x, wave[5:], 1)
    assert line.slope == pytest.approx(slope)
    assert line.off == pytest.approx(np.abs(wave[5:] - start - slope * x).max() / slope)
    assert line.r2 == pytest.approx(np.corrcoef(x, wave[5:])[0, 1] ** 2)
    assert np.isnan(traces.line_through(0 * up + 3).r2)
    assert traces.line_through(0 * up + 3).off == math.inf
