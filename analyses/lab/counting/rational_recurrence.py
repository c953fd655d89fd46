"""Which recurrent cells are weighted finite automata? What of that can be stated exactly.

Merrill et al. (2020) call a cell rationally recurrent if each of its units computes what a weighted finite automaton
computes (`start · A_1 · … · A_n · final`, a matrix for each letter), and prove that a QRNN is and an LSTM is not. Two
related things are measured: a QRNN layer written down as an automaton (`of_pooling`) against the layer's states, and
the rank of a block of the Hankel matrix H[u, v] = series(u v) of saturated cells, in exact arithmetic: no automaton
with fewer states gives the same numbers (Carlyle & Paz 1971; Fliess 1974). A rank that stops growing excludes nothing.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import cast

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor

from ln_probe.analyses.lab.counting.recurrent import QRNNLayer, RecurrentConfig
from ln_probe.analyses.lab.counting.saturated_states import LETTERS, SaturatedLayer, advance, drawn, start
from ln_probe.analyses.lab.counting.tasks import PREFIX_VOCABULARY
from ln_probe.analyses.lab.experiments import Request
from ln_probe.analyses.lab.results import Results, summarize

PRIME = 2**31 - 1  # products of two residues fit into 63 bits


@dataclass(frozen=True)
class Automaton:
    """A weighted finite automaton over the reals.

    Attributes:
        start: weight of beginning in a state. moves: of going from one to another by a letter. final: of ending in it.
    """

    start: Float[np.ndarray, " state"]
    moves: Float[np.ndarray, "letter state state"]
    final: Float[np.ndarray, " state"]

    def weights(self, word: Int[np.ndarray, " pos"]) -> Float[np.ndarray, " pos"]:
        """The weight of every prefix of a word but the empty one."""
        row, found = self.start, []
        for letter in word:
            row = row @ self.moves[letter]
            found.append(row @ self.final)
        return np.array(found)


def of_pooling(
    keep: Float[np.ndarray, "before letter"],
    added: Float[np.ndarray, "before letter"],
    out: Float[np.ndarray, "before letter"],
) -> Automaton:
    """The automaton of out_t c_t, c_t = keep_t c_(t-1) + added_t, c_0 = 0.

    A state is what was read last (nothing, one letter, or two letters) and whether an input has been taken up yet: a
    path takes up exactly one input, with its `added`, and multiplies it by every `keep` after; the sum over paths is c.

    Args:
        keep, added, out: at a letter, by the letter before; the last row: there is none.
    """
    befores, letters = keep.shape
    contexts = befores * letters + 1  # (before, letter), then the empty word
    start, final = np.zeros(2 * contexts), np.zeros(2 * contexts)
    moves = np.zeros((letters, 2 * contexts, 2 * contexts))
    start[contexts - 1] = 1.0
    for context in range(contexts):
        last = context % letters if context < contexts - 1 else letters
        if context < contexts - 1:
            final[contexts + context] = out[context // letters, context % letters]
        for letter in range(letters):
            to = last * letters + letter
            moves[letter, context, to] = 1.0
            moves[letter, context, contexts + to] = added[last, letter]
            moves[letter, contexts + context, contexts + to] = keep[last, letter]
    return Automaton(start, moves, final)


def rank_at_least(matrix: Int[np.ndarray, "row column"]) -> int:
    """The rank of a matrix of whole numbers modulo a prime, by elimination: exact, and never above the true rank."""
    rest, rank = np.mod(matrix, PRIME), 0
    for column in range(rest.shape[1]):
        below = np.flatnonzero(rest[rank:, column])
        if not len(below):
            continue
        pivot = rank + below[0]
        rest[[rank, pivot]] = rest[[pivot, rank]]
        rest[rank] = rest[rank] * pow(int(rest[rank, column]), -1, PRIME) % PRIME
        others = rest[rank + 1 :, column : column + 1]
        rest[rank + 1 :] = (rest[rank + 1 :] - others * rest[rank] % PRIME) % PRIME
        rank += 1
        if rank == len(rest):
            break
    return rank


POOLINGS = ("f", "fo", "ifo")
NETWORKS, NETWORKS_QUICK, WORDS, LENGTH = 10, 2, 3, 512  # of each pooling and seed; letters of a word
SPREAD = 4.0  # torch's initial weights leave every gate near 1/2; these reach from 0 to 1
# Cell, layers, hidden units of what is saturated and ranked.
CELLS = (
    ("rnn_tanh", 1, 3), ("gru", 1, 3), ("gru", 2, 3), ("qrnn f", 1, 3), ("qrnn fo", 1, 3), ("qrnn ifo", 1, 3),
    ("qrnn fo", 2, 3), ("qrnn ifo", 2, 3), ("lstm", 1, 1), ("lstm", 1, 3), ("lstm", 2, 3),
)  # fmt: skip
DRAWS, DRAWS_QUICK = 10, 5  # of weights, per seed
BLOCKS, BLOCKS_QUICK = (2, 4, 6), (2, 4)  # letters before and after; at 6 a block is 127 x 127 words
KEYS = ("cell", "layers", "hidden", "measure", "block")


def run(request: Request) -> Results:
    """Compare automata with layers, and rank Hankel blocks."""
    errors, ranks, draws = [], [], DRAWS_QUICK if request.quick else DRAWS
    for seed in request.seeds:
        for pooling in POOLINGS:
            errors.append((pooling, seed, largest_error(pooling, seed, NETWORKS_QUICK if request.quick else NETWORKS)))
        for number, (cell, layers, hidden) in enumerate(CELLS):
            rng = np.random.default_rng([seed, number])
            nets = [drawn(cell, layers, rng, hidden) for _ in range(draws)]
            found = [hankel_ranks(net, BLOCKS_QUICK if request.quick else BLOCKS) for net in nets]
            for block in found[0]:
                all_of = [rank[block] for rank in found]
                for name, value in (("largest", max(all_of)), ("median", np.median(all_of))):
                    ranks.append((cell, layers, hidden, f"rank, {name}", block, seed, float(value)))
    tables = analyse(
        pd.DataFrame(ranks, columns=[*KEYS, "seed", "value"]),
        pd.DataFrame(errors, columns=["pooling", "seed", "value"]),
    )
    return Results(tables, {}, {"draws": draws, "words": f"{WORDS} of {LENGTH} letters"})


def analyse(ranks: pd.DataFrame, errors: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Summary of the ranks (KEYS, `seed`, `value`), beside the largest errors (`pooling`, `seed`, `value`)."""
    return {"summary": summarize(ranks, list(KEYS)), "values": ranks, "errors": errors}


def largest_error(pooling: str, seed: int, networks: int) -> float:
    """How far the automata's weights are from a QRNN layer's states, relative to the largest of the word."""
    worst = 0.0
    generator = torch.Generator().manual_seed(seed)
    for number in range(networks):
        torch.manual_seed(1000 * seed + number)
        letters, layer = drawn_layer(pooling)
        words = torch.randint(PREFIX_VOCABULARY, (WORDS, LENGTH), generator=generator)
        with torch.no_grad():
            states = layer(letters[words]).numpy()
            gates = [gate.numpy() for gate in by_context(letters, layer)]
        for unit in range(states.shape[-1]):
            automaton = of_pooling(*(gate[..., unit] for gate in gates))
            for word, given in zip(words.numpy(), states[..., unit], strict=True):
                worst = max(worst, float(np.abs(automaton.weights(word) - given).max() / np.abs(given).max()))
    return worst


def drawn_layer(pooling: str) -> tuple[Tensor, QRNNLayer]:
    """A QRNN's embedding [letter width] and first layer, in float64, initial weights times SPREAD."""
    model = RecurrentConfig(f"qrnn {pooling}", PREFIX_VOCABULARY, 2).build().double()
    layer = cast("QRNNLayer", model.layers[0])
    with torch.no_grad():
        layer.gates.weight *= SPREAD
    return model.embed.weight, layer


def by_context(letters: Tensor, layer: QRNNLayer) -> tuple[Tensor, Tensor, Tensor]:
    """keep, added and out at each letter by the letter before (last row: none), [before letter hidden]."""
    befores = torch.cat([letters, torch.zeros_like(letters[:1])])
    return layer.terms(torch.stack([torch.cat([letters, row.expand_as(letters)], dim=-1) for row in befores]))


def hankel_ranks(net: list[SaturatedLayer], blocks: tuple[int, ...]) -> dict[int, int]:
    """The largest rank over the units of the last layer, of the block of words of at most so many letters."""
    words, states = list[tuple[int, ...]]([()]), start(net)
    after: dict[tuple[int, ...], np.ndarray] = {(): states[0]}
    for _ in range(2 * max(blocks)):
        words = [(*word, letter) for letter in range(LETTERS) for word in words]
        states = np.vstack([advance(net, states, letter) for letter in range(LETTERS)])
        after.update(zip(words, states, strict=True))
    units = range(len(states[0]) - net[-1].size, len(states[0]) - net[-1].size + net[-1].U.shape[1])
    found = {}
    for block in blocks:
        short = [w for n in range(block + 1) for w in itertools.product(range(LETTERS), repeat=n)]
        cube = np.array([[after[(*u, *v)] for v in short] for u in short])
        found[block] = max(rank_at_least(cube[..., unit]) for unit in units)
    return found
