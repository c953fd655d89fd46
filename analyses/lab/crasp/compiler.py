"""Does a transformer with compiled weights say what the C-RASP interpreter says, and what does it need a norm for?

After Yang, Cadilhac & Chiang (2025, "Knee-Deep in C-RASP") and Yang & Chiang (2024, "Counting Like Transformers"),
whose construction needs LayerNorm's scaling (`weights`). Nothing is trained: every program of the laboratory is
compared with the interpreter on all short and some random long words, under every norm.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import torch

from ln_probe.analyses.lab.crasp.crasp import parse
from ln_probe.analyses.lab.crasp.weights import compile_program
from ln_probe.analyses.lab.norms import NORM_KINDS, SCALES
from ln_probe.analyses.lab.results import Results, summarize
from ln_probe.analyses.lab.train import step_generator

if TYPE_CHECKING:
    from ln_probe.analyses.lab.experiments import Request


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


def _reached(last: int) -> list[str]:
    """Definitions `in_j`: the position lies in block j or later of a word that begins with a (depth j - 1)."""
    lines = ["in_1 := true"]
    for block in range(2, last + 1):
        lines.append(f"in_{block} := #[in_{block - 1} and Q_{block_symbol(block)}] > 0")
    return lines


def last_block(k: int) -> str:
    """A program that holds exactly on the last block of a word of L_k; its depth is max(0, k - 2).

    A position is in the last block if an earlier one was in block k - 1 and it carries the last letter.
    """
    if k == 1:
        return "last := true"
    return "\n".join([*_reached(k - 1), f"last := in_{k - 1} and Q_{block_symbol(k)}"])


def blocks(k: int) -> str:
    """A program that accepts L_k (k blocks, beginning with a) among words over {a, b}; its depth is max(2, k)."""
    begins = "begins_with_a := #[Q_b and #[Q_a] == 0] == 0"
    return "\n".join([begins, *_reached(k + 1), f"member := begins_with_a and in_{k} and not in_{k + 1}"])


def gate_program(depth: int) -> str:
    """A program whose every level asks for the majority of the one below: comparisons of counts of comparisons."""
    lines = ["level_1 := #[Q_a] > #[Q_b]"]
    lines += [f"level_{i} := 2 * #[level_{i - 1}] > #[true]" for i in range(2, depth + 1)]
    return "\n".join(lines)


EVERY_WORD_TO, QUICK_EVERY_WORD_TO = 8, 6  # letters
LETTERS, WORDS, QUICK_WORDS = 200, 1000, 30
FEW_WORDS = 15  # random words where a norm does not suffice, and words for the operations
KEYS = ("program", "norm")

CASES = "x := Q_a ? min(#[Q_a], 3) : (#[Q_b] > 2 ? max(#[Q_a] - #[Q_b], -1) : 2 * #[true] - 5)"
# Every program of the laboratory and of its interpreter's tests that ends in a Boolean, but the deepest (198 levels),
# and the symbols of its words.
PROGRAMS: dict[str, tuple[str, Sequence[str]]] = {
    "majority": (MAJORITY, "ab"),
    "Dyck-1": (DYCK_1, "()"),
    "a^n b^n": (A_N_B_N, "ab"),
    "a^n b^n c^n": (A_N_B_N_C_N, "abc"),
    "within 5": (L_5, "ab"),
    **{f"last block of L{k}": (last_block(k), "ab") for k in range(1, 9)},
    **{f"member of L{k}": (blocks(k), "ab") for k in range(1, 6)},
    **{f"majority of majorities, depth {k}": (gate_program(k), "ab") for k in range(1, 4)},
    "names": ("x := #[Q_a] > 0  y := #[x] > 1  z := y and x", "ab"),
    "unused depth": ("x := #[#[Q_a] > 0] > 0  y := Q_b", "ab"),
    "a letter": ("symbol := Q_a", "ab"),
    "nothing": ("x := #[Q_a] < 0 or false", "ab"),
    "large factors": ("x := 1000000 * #[Q_a] < 999999 * #[Q_b]", "ab"),
    "layers of counts": ("x := #[#[Q_a] > 1 and Q_b] + #[Q_a] > 2 ? 1 : 0 y := x == 1 or Q_b", "ab"),
    "cases, counted": (f"{CASES} y := 2 * #[x > 1] != #[x <= 1] + 1", "ab"),
}
COMPARISONS = "#[Q_a] > 5 and not #[Q_b] > #[Q_a] or #[Q_b] > 2 * #[Q_a]"
CHOICE = "#[Q_a] > #[Q_b] ? #[Q_a] : 2 * #[Q_b]"
OPERATIONS = {  # the rows of the table of operations: what each is tried on
    "NOT, AND, OR of letters": "x := not Q_a or Q_b and Q_a",
    "COMPARE of sums, read at the end": "x := 2 * #[Q_a] - #[Q_b] + 7 > #[true]",
    "COMPARE, counted": gate_program(2),
    "NOT, AND, OR of comparisons, read at the end": f"x := {COMPARISONS}",
    "NOT, AND, OR of comparisons, counted": f"x := {COMPARISONS} y := 2 * #[x] > #[true]",
    "MIN, MAX compared": "x := max(#[Q_a], 40) < 2 * min(#[Q_b], 50)",
    "CONDITIONAL on a comparison, compared": f"x := ({CHOICE}) > 90",
}


def random_words(
    alphabet: Sequence[str], letters: int, count: int, generator: torch.Generator
) -> list[tuple[str, ...]]:
    """Draw words of three kinds in turn: letters drawn evenly; runs with a random mean length; sorted letters.

    Even letters alone would never be in a language such as a^n b^n or L_k.
    """
    words = []
    for number in range(count):
        drawn = torch.randint(len(alphabet), (letters,), generator=generator)
        if number % 3 == 1:
            change = float(10 ** (-2 * torch.rand((), generator=generator)))  # per letter: 1 to 1/100
            begins = torch.rand(letters, generator=generator) < change
            begins[0] = True
            drawn = drawn[begins][begins.cumsum(0) - 1]
        elif number % 3 == 2:
            drawn = drawn.sort().values
        words.append(tuple(alphabet[i] for i in drawn))
    return words


def agreement(name: str, seed: int, words: int, every_word_to: int) -> list[dict[str, Any]]:
    """Compare a program under every norm with the interpreter: a row per measure."""
    source, alphabet = PROGRAMS[name]
    program = parse(source)
    short = list(itertools.product(alphabet, repeat=every_word_to))
    long = random_words(alphabet, LETTERS, words, step_generator(seed, len(name)))
    truths = [np.stack([program.run(word) for word in w]) for w in (short, long)]
    rows = []
    for norm in NORM_KINDS:
        compiled = compile_program(program, norm, alphabet=alphabet, n_ctx=LETTERS + 1)
        enough = norm in SCALES
        shares: dict[str, tuple[float, int]] = {}  # of words or answers, and of how many words
        for measure, given, truth in zip(("every_short_word", "random_words"), (short, long), truths, strict=True):
            few = slice(None) if enough or measure == "every_short_word" else slice(-FEW_WORDS, None)
            right = compiled.run(given[few]) == truth[few]
            shares[measure] = float(right.all(1).mean()), len(right)
            shares[f"{measure}_answers"] = float(right.mean()), len(right)
        cfg = compiled.model.cfg
        about = {"program": name, "norm": norm, "suffices": enough, "depth": program.depth, "layers": cfg.n_layers}
        about |= {"attending": compiled.attending, "d_model": cfg.d_model, "every_word_to": every_word_to, "seed": seed}
        rows += [{**about, "words": n, "measure": measure, "value": value} for measure, (value, n) in shares.items()]
    return rows


def operations_table(seed: int = 0) -> pd.DataFrame:
    """Share of right answers on words of LETTERS: `operation, program`, and a column per norm."""
    rows = []
    for operation, source in OPERATIONS.items():
        program = parse(source)
        words = random_words("ab", LETTERS, FEW_WORDS, step_generator(seed, 1))
        truth = np.stack([program.run(word) for word in words])
        row: dict[str, Any] = {"operation": operation, "program": source.replace("\n", "  ")}
        for norm in NORM_KINDS:
            compiled = compile_program(program, norm, alphabet="ab", n_ctx=LETTERS + 1)
            row[norm] = float((compiled.run(words) == truth).mean())
        rows.append(row)
    return pd.DataFrame(rows)


def run(request: Request) -> Results:
    """Compile and compare every program, and report what each operation needs."""
    rows: list[dict[str, Any]] = []
    for seed, (name, (_, alphabet)) in itertools.product(request.seeds, PROGRAMS.items()):
        every_word_to = QUICK_EVERY_WORD_TO if request.quick and len(alphabet) > 2 else EVERY_WORD_TO
        rows += agreement(name, seed, QUICK_WORDS if request.quick else WORDS, every_word_to)
    tables = analyse(pd.DataFrame(rows), operations_table())
    settings = {"every_word_to": EVERY_WORD_TO, "letters": LETTERS, "few_words": FEW_WORDS, "arithmetic": "float64"}
    return Results(tables, {}, settings)


def analyse(table: pd.DataFrame, operations: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Summary of the rows of `agreement`, beside what each operation needs."""
    summary = summarize(table, [*KEYS, "measure"])
    return {"summary": summary, "agreement": table, "operations": operations}
