"""Weighted finite automata: the one that a quasi-recurrent unit is, and how many states a unit's would need.

An automaton gives a word the weight `start · A_1 · … · A_n · final`, a matrix for each letter. What some automaton
gives is a rational series; a cell whose units are such series is rationally recurrent (Merrill et al. 2020). A unit
with pooling c_t = keep_t c_(t-1) + added_t whose gates see the last two letters alone is one, whatever its weights:
`of_pooling` writes its automaton down. The smallest automaton of a series has as many states as the rank of its Hankel
matrix, H[u, v] = series(u v) (Carlyle & Paz 1971, "Realizations by stochastic finite automata"; Fliess 1974, "Matrices
de Hankel"), so the rank of any block of it is a lower bound of the number of states.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int

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

    Raises:
        ValueError: arrays of other or unequal shapes.
    """
    befores, letters = keep.shape
    if not keep.shape == added.shape == out.shape or befores != letters + 1:
        raise ValueError(
            f"keep, added and out must all be [letters + 1, letters], got {keep.shape}, {added.shape}, {out.shape}"
        )
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
