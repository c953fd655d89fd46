"""Does a transformer with compiled weights say what the C-RASP interpreter says, and what does it need a norm for?

After Yang, Cadilhac & Chiang (2025, "Knee-Deep in C-RASP"), who prove that C-RASP and transformers of fixed precision
(outside attention) do the same at every depth, and Yang & Chiang (2024, "Counting Like Transformers"), whose
construction needs LayerNorm. Nothing is trained: programs are compiled in three ways and compared with the
interpreter on all short words and on random long ones, under every norm.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure

from ln_probe.analyses.files import write_atomically
from ln_probe.analyses.lab.arithmetic import Rounding
from ln_probe.analyses.lab.crasp import depth_task
from ln_probe.analyses.lab.crasp.crasp import Program, parse
from ln_probe.analyses.lab.crasp.crasp_compiler import CONSTRUCTIONS, CompiledProgram, compile_program
from ln_probe.analyses.lab.crasp.depth_task import gate_program
from ln_probe.analyses.lab.crasp.lowering import Construction
from ln_probe.analyses.lab.norms import NORM_KINDS, SCALES
from ln_probe.analyses.lab.results import Results, panels, summarize
from ln_probe.analyses.lab.train import step_generator

if TYPE_CHECKING:
    from ln_probe.analyses.lab.experiments import Request


MEASURED = 3  # version of what `agreement` measures: rows kept of another are measured again
EVERY_WORD_TO = 8  # letters; the answers at a word's letters are those of its prefixes
LETTERS, WORDS, QUICK_WORDS = 200, 1000, 30
QUICK_EVERY_WORD_TO = 6  # of more than two letters
FEW_WORDS = 15  # random words where a norm does not suffice, and words for the operations
SHORT_CLIP = 4  # positions of a clip, or of a bound of cases, that is too short for LETTERS
LENGTHS = (50, 100, 200, 400, 800, 1600)
LENGTHS_PROGRAM = gate_program(2)  # a comparison that is counted and compared again
KEYS = ("program", "construction", "norm")

CASES = "x := Q_a ? min(#[Q_a], 3) : (#[Q_b] > 2 ? max(#[Q_a] - #[Q_b], -1) : 2 * #[true] - 5)"
# Every program of the laboratory, those of its interpreter's tests but the deepest (198 levels, which the compiler's
# tests run), and the symbols of its words.
PROGRAMS: dict[str, tuple[str, Sequence[str]]] = {
    "majority": (depth_task.MAJORITY, "ab"),
    "Dyck-1": (depth_task.DYCK_1, "()"),
    "a^n b^n": (depth_task.A_N_B_N, "ab"),
    "a^n b^n c^n": (depth_task.A_N_B_N_C_N, "abc"),
    "within 5": (depth_task.L_5, "ab"),
    **{f"last block of L{k}": (depth_task.last_block(k), "ab") for k in range(1, 9)},
    **{f"member of L{k}": (depth_task.blocks(k), "ab") for k in range(1, 6)},
    **{f"majority of majorities, depth {k}": (gate_program(k), "ab") for k in range(1, 4)},
    "precedence": (
        "A := #[Q_a] - #[Q_b]  B := A + 1 < 2 * A  out := not B or Q_a and B ? 1 : B and Q_b ? 2 : 3",
        "ab",
    ),
    "names": ("x := #[Q_a] > 0  y := #[x] > 1  z := y and x", "ab"),
    "unused depth": ("x := #[#[Q_a] > 0] > 0  y := Q_b", "ab"),
    "a letter": ("symbol := Q_a", "ab"),
    "largest factor": ("A := 2147483647 * #[Q_a]", "ab"),
    "two symbols": ("x := #[Q_a] + #[Q_b]", "ab"),
    "long symbols": ('x := #[Q_"<s>"] + #[Q_token_7]', ("<s>", "token_7", "a")),
    "nothing": ("x := #[Q_a] < 0 or false", "ab"),
    "large factors": ("x := 1000000 * #[Q_a] < 999999 * #[Q_b]", "ab"),
    "layers of counts": ("x := #[#[Q_a] > 1 and Q_b] + #[Q_a] > 2 ? 1 : 0 y := x == 1 or Q_b", "ab"),
    "cases": (CASES, "ab"),
    "cases, counted": (f"{CASES} y := 2 * #[x > 1] != #[x <= 1] + 1", "ab"),
    "a constant": ("x := 7", "ab"),
    "a choice": ("x := Q_a ? 3 : -2", "ab"),
    "a sum": ("A := 2147483646 * #[Q_a] + #[Q_b]", "ab"),
    "counted comparison": ("x := #[#[Q_a] > #[Q_b]]", "ab"),
}  # fmt: skip

# What operations are exact with. A bound is of the counts among which a case is chosen, on words up to a length.
NEITHER, BOUND, SHARPENED = "neither", "a bound for the length", "scaling or clip or rounding"


COMPARISONS = "#[Q_a] > 5 and not #[Q_b] > #[Q_a] or #[Q_b] > 2 * #[Q_a]"
CHOICE = "#[Q_a] > #[Q_b] ? #[Q_a] : 2 * #[Q_b]"
# The rows of the table of operations: what each is tried on, and what is enough for it regardless of this compiler
# (`docs/compiler.md` says why; not measured). An output that is a count has no place in fixed precision.
OPERATIONS = {
    "NOT, AND, OR of letters": ("x := not Q_a or Q_b and Q_a", NEITHER),
    "COUNTING": ("x := #[Q_a]", NEITHER),
    "ADD, SUB, integer factors": ("x := 2 * #[Q_a] - #[Q_b] + #[true]", NEITHER),
    "CONST": ("x := 7", NEITHER),
    "COMPARE, read at the end": (depth_task.MAJORITY, NEITHER),
    "COMPARE, counted": (gate_program(2), SHARPENED),
    "NOT, AND, OR of comparisons, read at the end": (f"x := {COMPARISONS}", NEITHER),
    "NOT, AND, OR of comparisons, counted": (f"x := {COMPARISONS} y := 2 * #[x] > #[true]", SHARPENED),
    "MIN, MAX as a count": ("x := max(#[Q_a] - #[Q_b], min(3, #[Q_b]))", NEITHER),
    "MIN, MAX compared": ("x := max(#[Q_a], 40) < 2 * min(#[Q_b], 50)", NEITHER),
    "CONDITIONAL on a letter, as a count": ("x := Q_a ? #[Q_a] : -#[Q_b]", NEITHER),
    "CONDITIONAL on a comparison, as a count": (f"x := {CHOICE}", BOUND),
    "CONDITIONAL on a comparison, compared": (f"x := ({CHOICE}) > 90", NEITHER),
}


@dataclass(frozen=True)
class Means:
    """A way to run a program, as a column of the table of operations.

    Attributes:
        clip_to: positions that a clip, or the bound by which a count's cases are chosen, is built for; None: all.
    """

    construction: Construction
    norm: str
    clip_to: int | None = None
    rounding: Rounding = "down"
    eps: float | None = None

    @property
    def built(self) -> str:
        norm = "a constant in the norm's place" if self.norm == "none" else self.norm
        length = f"{self.clip_to} positions" if self.clip_to else "all positions"
        said = f"construction {self.construction}, {norm}"
        return said + (f", rounded {self.rounding}" if self.construction == "rounding" else f", bounds for {length}")


MEANS = {
    "neither": Means("scaling", "none"),
    "scaling": Means("scaling", "layernorm"),
    "scaling, short bound": Means("scaling", "layernorm", SHORT_CLIP),
    "clip": Means("clip", "none"),
    "clip too short": Means("clip", "none", SHORT_CLIP),
    "rounding": Means("rounding", "none"),
    "rounding to nearest": Means("rounding", "none", rounding="nearest"),
}
CURVES = {
    "scaling": Means("scaling", "layernorm"),
    "scaling, eps 1e-5": Means("scaling", "layernorm", eps=1e-5),
    f"clip for {LETTERS} letters": Means("clip", "none", LETTERS + 1),
    "neither": Means("scaling", "none"),
    "rounding": Means("rounding", "layernorm"),
    "rounding to nearest": Means("rounding", "layernorm", rounding="nearest"),
}


def random_words(
    alphabet: Sequence[str], letters: int, count: int, generator: torch.Generator
) -> list[tuple[str, ...]]:
    """Words of three kinds in turn: letters drawn evenly; runs with a random mean length; sorted letters.

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


def interpreted(program: Program, words: Sequence[Sequence[str]]) -> np.ndarray:
    """What the interpreter says at every letter, [word letter]."""
    return np.stack([program.run(word) for word in words])


def compiled_with(means: Means, program: Program, alphabet: Sequence[str], letters: int) -> CompiledProgram:
    """A program for words of so many letters."""
    return compile_program(
        program,
        means.construction,
        means.norm,
        alphabet=alphabet,
        n_ctx=letters + 1,
        clip_to=means.clip_to,
        eps=means.eps,
    )


def agreement(name: str, seed: int, words: int, every_word_to: int) -> list[dict[str, Any]]:
    """A program in every construction under every norm, compared with the interpreter: a row per measure."""
    source, alphabet = PROGRAMS[name]
    program = parse(source)
    short = list(itertools.product(alphabet, repeat=every_word_to))
    long = random_words(alphabet, LETTERS, words, step_generator(seed, len(name)))
    truths = [interpreted(program, w) for w in (short, long)]
    rows = []
    for construction, norm in itertools.product(CONSTRUCTIONS, NORM_KINDS):
        if construction == "rounding" and program.output.kind == "count":
            continue  # named as unsupported
        made = compile_program(program, construction, norm, alphabet=alphabet, n_ctx=LETTERS + 1)
        enough = construction != "scaling" or norm in SCALES  # meant to be right under this norm
        shares: dict[str, tuple[float, int]] = {}  # of words or answers, and of how many words
        for measure, given, truth in zip(("every_short_word", "random_words"), (short, long), truths, strict=True):
            if measure == "random_words" and not enough:
                given, truth = given[-FEW_WORDS:], truth[-FEW_WORDS:]
            right = made.run(given) == truth
            shares[measure] = float(right.all(1).mean()), len(given)
            shares[f"{measure}_answers"] = float(right.mean()), len(given)
        about = {
            "program": name,
            "construction": construction,
            "norm": norm,
            "suffices": enough,
            "depth": program.depth,
            "layers": made.layers,
            "attending": made.attending,
            "d_model": made.model.cfg.d_model,
            "bits": made.precision.bits if made.precision else None,
            "fraction": made.precision.fraction if made.precision else None,
            "every_word_to": every_word_to,
            "seed": seed,
        }
        rows += [{**about, "words": n, "measure": measure, "value": value} for measure, (value, n) in shares.items()]
    return rows


def operations_table(seed: int = 0) -> pd.DataFrame:
    """Which operations need scaling, which a clip can do, which nothing: share of right answers on words of LETTERS.

    Columns: `operation, program, output`, one per entry of MEANS (NaN: unsupported), `exact_with` (what this compiler
    used where every answer was right, see `exact_with`), `in_principle` (see OPERATIONS).
    """
    rows = []
    for operation, (source, in_principle) in OPERATIONS.items():
        program = parse(source)
        words = random_words("ab", LETTERS, FEW_WORDS, step_generator(seed, 1))
        truth = interpreted(program, words)
        row: dict[str, Any] = {
            "operation": operation,
            "program": source.replace("\n", "  "),
            "output": program.output.kind,
        }
        for name, means in MEANS.items():
            if means.construction == "rounding" and row["output"] == "count":
                row[name] = float("nan")
                continue
            made = compiled_with(means, program, "ab", LETTERS)
            row[name] = float((made.run(words, means.rounding) == truth).mean())
        rows.append(row | {"exact_with": exact_with(row), "in_principle": in_principle})
    return pd.DataFrame(rows)


def exact_with(right: Mapping[str, Any]) -> str:
    """With what a row of `operations_table` has only right answers.

    NEITHER: with a constant in the norm's place and no bound; BOUND: with that constant, but not where the bound by
    which cases are chosen is too short; else those of scaling, clip and rounding that are exact.
    """
    if right["neither"] == 1:
        return NEITHER if right["scaling, short bound"] == 1 else BOUND
    return " or ".join(name for name in ("scaling", "clip", "rounding") if right[name] == 1)


def lengths_table(lengths: Sequence[int], seed: int = 0) -> pd.DataFrame:
    """Share of right answers on random words of several lengths: `means, letters, value`."""
    program = parse(LENGTHS_PROGRAM)
    rows = []
    for letters in lengths:
        words = random_words("ab", letters, FEW_WORDS, step_generator(seed, letters))
        truth = interpreted(program, words)
        for name, means in CURVES.items():
            said = compiled_with(means, program, "ab", letters).run(words, means.rounding)
            rows.append((name, letters, float((said == truth).mean())))
    return pd.DataFrame(rows, columns=["means", "letters", "value"])


def _kept(path: Path, of: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """Rows that an earlier call measured; None if there are none of just that."""
    try:
        held = json.loads(path.read_text())
        return list(held["rows"]) if held["of"] == of else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def run(request: Request) -> Results:
    """Compile and compare every missing program, and report what each operation needs."""
    words = QUICK_WORDS if request.quick else WORDS
    names = [n for n in PROGRAMS if not request.quick or n not in {f"last block of L{k}" for k in (6, 7, 8)}]
    rows: list[dict[str, Any]] = []
    for seed, (number, name) in itertools.product(request.seeds, enumerate(names)):
        path = request.out / "runs" / f"program{number}-seed{seed}.json"
        every_word_to = QUICK_EVERY_WORD_TO if request.quick and len(PROGRAMS[name][1]) > 2 else EVERY_WORD_TO
        source, alphabet = PROGRAMS[name]
        letters = alphabet if isinstance(alphabet, str) else list(alphabet)
        of = {"measured": MEASURED, "source": source, "alphabet": letters, "words": [every_word_to, words]}
        held = _kept(path, of)
        if held is None and not request.collect:
            held = agreement(name, seed, words, every_word_to)
            path.parent.mkdir(exist_ok=True)
            write_atomically(path, json.dumps({"of": of, "rows": held}).encode())
        rows += held or []
    lengths = LENGTHS[:4] if request.quick else LENGTHS
    return findings(pd.DataFrame(rows), operations_table(), lengths_table(lengths), request.quick)


def findings(table: pd.DataFrame, operations: pd.DataFrame, lengths: pd.DataFrame, quick: bool = False) -> Results:
    """Summary, figures and sentences from the rows of `agreement`, `operations_table` and `lengths_table`."""
    summary = pd.DataFrame() if table.empty else summarize(table, [*KEYS, "measure"])
    return Results(
        summary,
        tables={"agreement": table, "operations": operations, "lengths": lengths},
        figures={"lengths": length_curves(lengths)},
        conclusions=(*_conclusions(table), *_operation_conclusions(operations)),
        settings={
            "every_word_to": QUICK_EVERY_WORD_TO if quick else EVERY_WORD_TO,
            "letters": LETTERS,
            "words": 0 if table.empty else int(table.loc[table["measure"] == "random_words", "words"].max()),
            "few_words": FEW_WORDS,
            "short_clip": SHORT_CLIP,
            "means": {name: means.built for name, means in MEANS.items()},
            "lengths_program": LENGTHS_PROGRAM,
            "arithmetic": "float64",
            "rounding": "down (the largest number of the grid that is not above), everywhere but inside attention",
            "published": "the equivalence at every depth and the construction with LayerNorm are theorems, not figures",
        },
    )


def _conclusions(table: pd.DataFrame) -> Iterator[str]:
    if table.empty:
        return
    for (construction, enough), part in table.groupby(["construction", "suffices"], sort=False):
        models = part.groupby(["program", "norm", "seed"])["value"].min()
        said = f"{(models == 1).sum()} of {len(models)} models right on every word"
        norms = ", ".join(dict.fromkeys(part["norm"]))
        yield f"{construction} under {norms}{'' if enough else ' (does not suffice)'}: {said}."
    ours = table[table["construction"] == "rounding"].drop_duplicates(["program", "norm"])
    same = (ours["layers"] == ours["depth"].clip(lower=1)).all()
    yield f"rounding: layers {'equal' if same else 'do not equal'} the program's depth (at least 1) in every model."


def _operation_conclusions(operations: pd.DataFrame) -> Iterator[str]:
    for row in operations.to_dict("records"):
        operation, compiled, enough = (str(row[column]) for column in ("operation", "exact_with", "in_principle"))
        if compiled != enough:
            yield f"{operation}: as compiled exact with {compiled}, in principle with {enough}."
        else:
            yield f"{operation}: {'needs neither' if enough == NEITHER else f'exact with {enough}'}."


def length_curves(lengths: pd.DataFrame) -> Figure:
    """Share of right answers over length, a line per means."""
    figure, (ax,) = panels(1, 6, 3.6)
    for number, (name, line) in enumerate(lengths.groupby("means", sort=False)):
        ax.plot(line["letters"], line["value"], marker="osv^Dx"[number % 6], markersize=4, alpha=0.8, label=str(name))
    ax.set(xscale="log", xlabel="letters", ylabel="answers right", title="A majority of majorities, compiled")
    ax.legend(fontsize=7)
    return figure
