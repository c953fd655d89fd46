"""C-RASP programs of the laboratory: majority, Dyck-1, a^n b^n (c^n), L_5, and the languages L_k.

L_k are words of k alternating blocks, L1 = a+, L2 = a+b+, L3 = a+b+a+, … `last_block(k)` holds on the last block and
has depth k - 2; Yang, Cadilhac & Chiang (2025, "Knee-Deep in C-RASP") prove that no program of smaller depth does.
`gate_program(depth)` asks for a majority (depth 1), for the majority of the prefixes' majorities (depth 2), and so on.
"""

from __future__ import annotations

MAJORITY = "majority := #[Q_a] > #[Q_b]"

DYCK_1 = """
open := #[Q_"("]
close := #[Q_")"]
never_negative := #[open < close] == 0
dyck := open == close and never_negative
"""

A_N_B_N = """
in_order := #[Q_a and #[Q_b] > 0] == 0    // no a after a b
a_n_b_n := in_order and #[Q_a] == #[Q_b]
"""

A_N_B_N_C_N = """
in_order := #[Q_a and #[Q_b or Q_c] > 0 or Q_b and #[Q_c] > 0] == 0
a_n_b_n_c_n := in_order and #[Q_a] == #[Q_b] and #[Q_b] == #[Q_c]
"""

L_5 = "l_5 := #[Q_a] - #[Q_b] < 5 and #[Q_b] - #[Q_a] < 5"

SYMBOLS = "ab"


def block_symbol(number: int) -> str:
    """The letter of the block with this number (from 1): a, b, a, b, …"""
    return SYMBOLS[(number - 1) % 2]


def _check_blocks(k: int) -> None:
    if k < 1:
        raise ValueError(f"k must be at least 1 block, got {k}")


def _reached(last: int) -> list[str]:
    """Definitions `in_j`: the position lies in block j or later of a word that begins with a (depth j - 1)."""
    lines = ["in_1 := true"]
    for block in range(2, last + 1):
        lines.append(f"in_{block} := #[in_{block - 1} and Q_{block_symbol(block)}] > 0")
    return lines


def last_block(k: int) -> str:
    """A program that holds exactly on the last block of a word of L_k; its depth is max(0, k - 2).

    A position is in the last block if an earlier one was in block k - 1 and it carries the last letter.

    Raises:
        ValueError: k below 1.
    """
    _check_blocks(k)
    if k == 1:
        return "last := true"
    return "\n".join([*_reached(k - 1), f"last := in_{k - 1} and Q_{block_symbol(k)}"])


def blocks(k: int) -> str:
    """A program that accepts L_k (k blocks, beginning with a) among words over {a, b}; its depth is max(2, k).

    Raises:
        ValueError: k below 1.
    """
    _check_blocks(k)
    begins = "begins_with_a := #[Q_b and #[Q_a] == 0] == 0"
    return "\n".join([begins, *_reached(k + 1), f"member := begins_with_a and in_{k} and not in_{k + 1}"])


def gate_program(depth: int) -> str:
    """A program whose every level asks for the majority of the one below: comparisons of counts of comparisons.

    Raises:
        ValueError: depth below 1.
    """
    if depth < 1:
        raise ValueError(f"depth must be at least 1 level, got {depth}")
    lines = ["level_1 := #[Q_a] > #[Q_b]"]
    lines += [f"level_{i} := 2 * #[level_{i - 1}] > #[true]" for i in range(2, depth + 1)]
    return "\n".join(lines)
