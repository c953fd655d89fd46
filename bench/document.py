"""What pages say of time, memory, agreement and tests, made of `bench/results` and other committed tables.

`python docs/made.py` writes it. A table of `bench/results` has the figures as they were printed, and a row in
`about.csv`: command, machine, version, where they are known. Single figures are in `single.csv`, with the same words.
"""

from __future__ import annotations

import csv
import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path
from textwrap import fill

import pandas as pd

ROOT = Path(__file__).resolve().parents[1]
RESULTS, MUTANTS = ROOT / "bench" / "results", ROOT / "bench" / "mutants.csv"
COMPILER = ROOT / "analyses" / "lab" / "published" / "compiler"
AIM_FOUR_PROMPTS = 180  # seconds that were aimed at for a report on four prompts
MLP_7B = 11008  # hidden units of a 7B model's MLP, with a gate
Row = dict[str, str]


@cache
def read(name: str) -> list[Row]:
    """The rows of a table, every cell as it was written."""
    with (RESULTS / f"{name}.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def one(name: str) -> str:
    """A single figure."""
    (row,) = (row for row in read("single") if row["name"] == name)
    return row["value"]


def where(name: str, **cells: str) -> Row:
    """The one row of a table with these cells."""
    (row,) = (row for row in read(name) if all(row[column] == cell for column, cell in cells.items()))
    return row


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    first, *rest = (f"| {' | '.join(cells)} |".replace("|  |", "| |") for cells in (head, *rows))
    return "\n".join([first, "|---" * (first.count(" | ") + 1) + "|", *rest])


def said(*paragraphs: str) -> str:
    """Paragraphs in lines; no line begins with a per cent sign."""
    lines = (fill(p.replace(" %", "\xa0%"), 120, break_long_words=False, break_on_hyphens=False) for p in paragraphs)
    return "\n\n".join(lines).replace("\xa0", " ")


# cost.md


def whole_command() -> str:
    titles = {
        ("before", "4"): "version 0.1.0, four prompts, its five probes",
        ("here", "4"): "now, four prompts, seven probes (`--stages whole --prompts 4`), median of 3",
        ("here", "default"): "now, the 32 prompts of the default report (`--stages whole`), one run",
    }
    machine = f"two processors of {one('processor')} GFLOP/s each (together {one('processors')})"
    head = (f"whole command, {machine}", "wall, s", "CPU, s", "largest process", "first page, s", "`plan` said, s")
    rows = []
    for (checkout, prompts), title in titles.items():
        row = where("whole", stage="whole", checkout=checkout, prompts=prompts)
        rest = (row[column] or "–" for column in ("page_s", "planned_s"))
        rows.append((title, row["wall_s"], row["cpu_s"], f"{row['largest_gb']} GB", *rest))
    return table(head, rows)


def whole_stages() -> str:
    now = [row for row in read("whole") if row["checkout"] == "here" and row["stage"] != "whole"]
    before = {row["stage"]: row["wall_s"] for row in read("whole") if row["checkout"] == "before"}
    return table(
        ("stage", "wall, s", "CPU, s", "largest process", "0.1.0, s"),
        ((r["stage"], r["wall_s"], r["cpu_s"], f"{r['largest_gb']} GB", before.get(r["stage"], "–")) for r in now),
    )


def whole_arithmetic() -> str:
    took = int(where("whole", stage="whole", checkout="here", prompts="4")["wall_s"])
    groups, norms = int(one("causal-passes-groups")), int(one("causal-passes-norms"))
    passes = 32 * groups + 12 * norms
    seconds = passes * float(one("gpt2-pass")) / float(one("processors"))
    return said(
        "Here each stage makes the first pass again and the calibration constants of 16 more prompts, which the whole "
        "command does once; `selectability` measures two query sets and bounds of attainable attention, which it did "
        f"not. {AIM_FOUR_PROMPTS} s were aimed at for four prompts and are missed by {took - AIM_FOUR_PROMPTS} s: "
        "`causal` (single norms too), `selectability` and `head_effects`, which is new, are arithmetic on both "
        "processors.",
        "What keeps the default report from five minutes is arithmetic: losses without a term are "
        f"{groups} passes for each of 32 prompts and {norms} more (75 edits, half of the blocks each) for twelve of "
        f"them, {passes:,} passes of {one('gpt2-pass')} GFLOP, which two such processors do in {seconds:.0f} s before "
        "anything else is done. `--max-prompts`, `--probes` and a machine with more processors are what shortens it.",
    )


def make_report() -> str:
    return said(
        "`make report` (five bundled models, 32 prompts each where the loss needs them, seven probes): "
        f"{one('make-report-64')} s at 64 tokens a prompt, with warm kernels; whole prompts "
        f"{one('make-report-warm')} s warm, {one('make-report-cold')} s cold. Version 0.1.0 took "
        f"{one('make-report-before')} s for four models, four prompts and five probes. A model takes about "
        f"{one('bundled-model')} s of one processor, most of it selectability ({one('bundled-selectability')}), losses "
        f"({one('bundled-losses')}) and single heads ({one('bundled-heads')}); 45 s for all of them was aimed at and "
        "is out of reach while intervals need 32 prompts."
    )


def scale() -> str:
    rows = [row for row in read("scale") if not row["power"]]
    if any(row["undecided"] != "0" for row in rows):
        raise ValueError("scale: the page says that no verdict was left undecided")
    intro = said(
        "Two threads, two idle processors; each row a process of its own (which holds about "
        f"{one('scale-before-it-begins')} MB before it begins); no verdict was left undecided."
    )
    note = {"7B layer": " (a layer of a 7B model)"}
    head = ("tokens", "heads", "d_head", "keys of a head", "wall, s", "CPU, s", "process, MB")
    columns = ("wall_s", "cpu_s", "peak_mb")
    cells = (
        (r["tokens"], r["heads"], r["d_head"], r["sample"] + note.get(r["what"], ""), *(r[c] for c in columns))
        for r in rows
    )
    return f"{intro}\n\n{table(head, cells)}"


def scale_growth() -> str:
    def grows(sample: str) -> str:
        tokens, heads, d_head = (
            f"{what}^{row['power']}"
            for what in ("tokens", "heads", "d_head")
            for row in read("scale")
            if row["power"] and row["what"] == what and row["sample"] == sample
        )
        return f"{tokens}, {heads} and {d_head}"

    largest = where("scale", what="7B layer")
    tokens, heads, d_head = (int(largest[c]) for c in ("tokens", "heads", "d_head"))
    width = heads * d_head
    weights, scores = 4 * (4 * width**2 + 3 * width * MLP_7B) / 1e9, 4 * heads * tokens**2 / 1e9
    return said(
        f"Fitted over 256 … 4096 tokens, 2 … 16 heads, d_head 16 … 128, CPU time grows with {grows('all')} where all "
        f"keys are measured, with {grows('64')} where 64 of each head are. The forward pass of a float32 layer of that "
        f"shape holds about {weights:.1f} GB of weights and {scores:.1f} GB of scores; the whole process above, "
        f"{largest['peak_mb']} MB."
    )


# speed.md


def geometry_speed() -> str:
    columns = ("keys", "n", "d", "(a)", "(b)", "verdict", "+ margin", "(a)/verdict", "(b)/verdict")
    titles = {"+ margin": "verdict and margin to 1 %", "(a)/verdict": "(a) / verdict", "(b)/verdict": "(b) / verdict"}
    cells = (
        [r[c].replace(" × 12 heads", ", twelve heads in one call") for c in columns] for r in read("geometry-speed")
    )
    return table((titles.get(c, c) for c in columns), cells)


def geometry_before() -> str:
    easy = [float(r["+ margin"]) / float(r["(b)"]) for r in read("geometry-speed")[:2]]
    if max(easy) >= 10:
        raise ValueError("speed: the page says that the easy rows stay below 10 times of (b)")
    return said(
        "(On a busy machine: compare within a row.) The easy rows stay below 10× of (b), which is one matrix–vector "
        "product per key there; ours includes the certificate, and the products alone (64 × 512 numbers a key) take "
        f"{one('products-float64')} μs, in float32 {one('products-float32')}.",
        "Beside 0.1.0, which proved nothing before it returned, by turns (before the kernels were taken apart, which "
        f"costs {one('kernels-apart')} % more): the 512-key rows take {one('before-512-least')} to "
        f"{one('before-512-most')} times as long, the rows of 128 keys {one('before-128-verdicts')} times (verdicts) "
        f"to {one('before-128-margins')} times (with margins); there a set is so small that what a proof costs per "
        "call counts.",
    )


def geometry_checks() -> str:
    columns = ("keys", "n", "d", "verdicts", "verdicts and margins")
    head = ("keys", "n", "d", "verdicts alone", "with margins")
    return table(head, ([r[c] for c in columns] for r in read("geometry-checks")))


def geometry_hard() -> str:
    keys = dict.fromkeys((r["keys"], r["n"], r["d"]) for r in read("geometry-hard"))
    rows = []
    for name, n, d in keys:
        found = (where("geometry-hard", keys=name, n=n, d=d, bias=bias) for bias in ("no", "yes"))
        rows.append((name, f"{n} × {d}", *(f"{r['verdict']}; {r['+ margin']}" for r in found)))
    return table(("keys", "n × d", "without a bias", "with one"), rows)


def geometry_right() -> str:
    wrong, differ = one("verdicts-wrong"), one("verdicts-differ")
    return said(
        f"Of {one('verdicts-keys')} keys (these families and adversarial ones whose verdicts are known) {wrong} were "
        f"wrong, undecided or without a certificate that holds; {differ} of {one('verdicts-asked')} differ from HiGHS. "
        f"The slowest key of all families took {one('slowest-key')} s (norms × lognormal(4) with a bias, d = 128). "
        f"Before the kernels were taken apart, 20,000 float32 LayerNorm'd keys took {one('keys-20000')}."
    )


def geometry_pools() -> str:
    names = {
        "d = 64, norms × lognormal(1)": "d = 64, norms × lognormal(1), before the kernels were taken apart",
        "MGM layer 4 head 0, random token ids": "MGM's layer 4 (random token ids), with 0.1.0: at most "
        f"{one('pool-memory')} GB for the whole process",
    }
    rows = [
        (title, *(r["seconds"] for r in read("geometry-pool") if r["keys"] == name)) for name, title in names.items()
    ]
    return table(("keys; verdicts, seconds", "10⁴", "3·10⁴", "10⁵"), rows)


def geometry_heads() -> str:
    columns = ("keys", "verdicts", "and margins", "and attainable")
    head = ("keys", "verdicts, s", "with margins, s", "with attainable attention, s")
    return table(head, ([r[c] for c in columns] for r in read("geometry-heads")))


def probe() -> str:
    models = list(dict.fromkeys(r["model"] for r in read("probe")))
    rows = [
        ("verdicts and margins, intact", "intact", "passes"),
        ("selectability: both spaces, four variants, reachable and observed attention", "selectability", "passes"),
        ("all of `analyze`, the causal probe's forward passes included", "whole", "passes"),
        ("peak memory, selectability", "selectability", "memory"),
        ("peak memory, all of `analyze`", "whole", "memory"),
    ]
    alone = (where("probe", model=model, part="whole")["forward_s"] for model in (models[0], "MGM"))
    intro = said(
        "With 0.1.0, the whole probe on one prompt of 512 tokens, 2 threads, in forward passes of the same model "
        "(`bench/probe.py`; a pass takes {} s, of MGM {} s); peak memory beside that of the forward pass:".format(
            *alone
        )
    )
    head = ("", f"{models[0]}, random weights", *models[1:])
    cells = ((title, *(where("probe", model=m, part=part)[column] for m in models)) for title, part, column in rows)
    return f"{intro}\n\n{table(head, cells)}"


def decomposition() -> str:
    worlds = {"bridge": "bridge", "hooked": "HookedTransformer"}
    parts = {
        "bare": "{}: bare forward passes",
        "decomposition": '`analyze(…, probes=("decomposition",))`',
        "cache": "`run_with_cache` and the same statistics",
    }
    columns = ("seconds", "of_bare", "peak_mb", "memory")
    cells = ((parts[r["part"]].format(worlds[r["world"]]), *(r[c] for c in columns)) for r in read("decomposition"))
    return table(("", "seconds", "… of bare", "peak, MB", "… of bare"), cells)


# Other pages


def attribution_cost() -> str:
    logit, score, writers, means = (
        where("attribution", part=part) for part in ("logit", "score", "writers", "attribution")
    )
    return said(
        "`python bench/attribution.py` (GPT-2 small's shape, 512 tokens, 2 threads, beside a forward pass of the same "
        f"process): a logit over all parts {logit['passes']} passes (from the model to the table), a score "
        f"{score['passes']}, the probe `writers` {writers['passes']} passes a prompt, its own included, and "
        f"{writers['memory']} times the memory, `attribution` {means['passes']} and {means['memory']}."
    )


def parity() -> str:
    rows = read("parity")
    models, forms = (list(dict.fromkeys(r[column] for r in rows)) for column in ("model", "form"))
    found = table(
        ("HookedTransformer 3.9 against bridge 3.9", *forms),
        (
            (m, *("{closed_form}; {pattern_max}".format(**where("parity", model=m, form=form)) for form in forms))
            for m in models
        ),
    )
    (verdicts,) = {r["verdicts"] for r in rows}
    (differing,) = {r["differing"] for r in rows}
    (bridges,) = {r["bridges"] for r in rows}
    if bridges != "0":
        raise ValueError("parity: the page says that the bridges of 3.9 and 4.3 are identical")
    return f"{found}\n\n" + said(
        f"Bridge 3.9 against bridge 4.3: identical to the last bit in all {len(rows)}. Verdicts differing: {differing} "
        f"of {verdicts} in every cell; both kinds occur."
    )


def page_size() -> str:
    row = where("page", what="size")
    return said(f"A page about 12 × 12 heads at 512 tokens takes {row['value']} {row['unit']} (`bench/page.py`).")


def batch() -> str:
    return said(
        f"Two workers are {one('batch-speedup')} times as fast as one on 2 cores, and a command with one worker took "
        f"{one('batch-one')} s where a bare loop over `analyze` took {one('batch-loop')} s (two checkpoints, 32 "
        "prompts of 256 tokens, torch threads 1; `bench/batch.py`, one repeat)."
    )


def exact() -> str:
    *_, some, most = read("geometry-exact")
    return said(
        "With python-flint and gmpy2 (`pip install 'ln-probe[exact]'`) that takes "
        f"{most['with libraries']} s of a processor instead of {most['without']} for {most['n']} keys of {most['d']} "
        f"dimensions, {some['with libraries']} instead of {some['without']} for {some['n']} of {some['d']} "
        "(`bench/geometry.py exact`)."
    )


def folded_effect() -> str:
    return said(
        "**In a folded model the weights that read a norm are centred by `fold_ln`, so projection cannot be studied "
        f"there at all** (effect {one('folded-effect')}, in the same model unfolded up to "
        f"{one('unfolded-effect')} nats on logits)."
    )


def _coverage() -> pd.DataFrame:
    found = pd.read_csv(ROOT / "bench" / "interval_coverage.csv")
    return found.replace({"effects": {"outliers": "outliers 10 %"}})


def coverage_given() -> str:
    """What intervals and p are worth where intervals are given."""
    lines = ["| effects | prompts | coverage | given | coverage were all given | p < 0.05/4 |", "|---" * 6 + "|"]
    for kind, prompts, given, coverage, every, first in _coverage().dropna().itertuples(index=False):
        lines.append(f"| {kind} | {prompts} | {coverage:.3f} | {given:.4f} | {every:.3f} | {first:.4f} |")
    return "\n".join(lines)


def coverage_with_constants() -> str:
    """Coverage where the constants are estimated from the same prompts, by how sigma and effects are correlated."""
    table = pd.read_csv(ROOT / "bench" / "interval_coverage_constants.csv").replace(
        {"effects": {"outliers": "outliers 10 %"}}
    )
    lines = ["| effects | prompts | correlation with sigma | coverage | over prompts alone |", "|---" * 5 + "|"]
    for row in table.itertuples(index=False):
        lines.append(
            f"| {row.effects} | {row.prompts} | {row.correlation:g} | {row.coverage:.3f} | "
            f"{row.coverage_over_prompts_alone:.3f} |"
        )
    return "\n".join(lines)


def refits() -> str:
    """Standard errors against exact refits."""
    lines = [
        "| model | norms | loss increase | half-width of the 95 % CI | its standard error, over that of exact refits "
        "| over that of prompts alone |",
        "|---" * 6 + "|",
    ]
    for row in read("intervals"):
        change, half, exact, alone = (
            float(row[c])
            for c in ("delta_loss", "half_width", "linearized_over_exact", "linearized_over_prompts_alone")
        )
        lines.append(f"| `{row['model']}` | {row['sites']} | {change:+.3f} | {half:.3f} | {exact:.2f} | {alone:.2f} |")
    return "\n".join(lines)


def headline() -> str:
    """Loss increases with constants of three kinds."""
    lines = [
        "| model | norms | intact loss | constants as in version 0.2 | leave-one-out | of held-out prompts "
        "| difference of the last two | half-width of the 95 % CI | … over prompts alone |",
        "|---" * 9 + "|",
    ]
    for row in read("headline"):
        kinds = ("delta_before", "delta_leave_one_out", "delta_held_out")
        cells = [f"{float(row[c]):+.3f}" if row[c] else "–" for c in kinds]
        ends = "logits not finite"
        if row["difference"]:
            ends = f"{float(row['difference']):+.4f} [{float(row['low']):.4f}, {float(row['high']):.4f}]"
        widths = ["–" if not row[c] else f"{float(row[c]):.3f}" for c in ("half_width", "half_width_prompts")]
        cells = [row["model"], row["group"], f"{float(row['loss']):.3f}", *cells, ends, *widths]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def optimal() -> str:
    """Both estimates of the bundled models, and whether the fits converged."""
    lines = [
        "| model | norms | pooled mean constants (the start) | loss-optimal constants "
        "| … on the prompts they were fitted on | fits that converged |",
        "|---" * 6 + "|",
    ]
    for row in read("optimal"):
        cells = [f"{float(row[c]):+.3f}" for c in ("delta_mean", "delta_optimal", "delta_optimal_same_prompts")]
        lines.append(
            f"| `{row['model']}` | {row['group']} | " + " | ".join(cells) + f" | {row['converged']} of "
            f"{row['descents']} |"
        )
    return "\n".join(lines)


def coverage_of_all() -> str:
    """What intervals of any number of prompts would cover, without the rules that leave them out."""
    wide = _coverage().pivot(index="effects", columns="prompts", values="coverage_were_all_given")
    wide = wide.loc[list(dict.fromkeys(_coverage()["effects"]))]
    lines = ["| effects | " + " | ".join(map(str, wide.columns)) + " |", "|---" * (1 + len(wide.columns)) + "|"]
    return "\n".join(
        [*lines, *(f"| {k} | " + " | ".join(f"{x:.3f}" for x in row) + " |" for k, row in wide.iterrows())]
    )


def compiler_bits() -> str:
    rows = pd.read_parquet(COMPILER / "agreement.parquet", columns=["program", "bits"]).dropna()
    bits = rows.groupby("program")["bits"].first().astype(int)
    large = bits.pop("large factors")
    return said(
        "The grid's size depends on the program's factors, never on the length: "
        f"{bits.min()} to {bits.max()} bits for the programs here, {large} for the one with factors of a million."
    )


def compiler_eps() -> str:
    rows = pd.read_csv(COMPILER / "lengths.csv")
    blunted = rows[(rows["means"] == "scaling, eps 1e-5") & (rows["value"] < 1)].sort_values("letters").iloc[0]
    settings = json.loads((COMPILER / "results.json").read_text(encoding="utf-8"))["settings"]
    programs = pd.read_parquet(COMPILER / "agreement.parquet", columns=["program"])["program"].nunique()
    return said(
        "LayerNorm's usual eps (1e-5) blunts the comparison of counts that differ by one as words get long: the first "
        f"wrong answers are at {blunted['letters']} letters ({100 * (1 - blunted['value']):.1f} % of the answers; "
        "table `lengths`).",
        f"`ln-probe lab run compiler` measures it: tables `agreement` ({programs} programs, the laboratory's and those "
        "of its interpreter's tests, in every construction under every norm on all words up to "
        f"{settings['every_word_to']} letters and on {settings['words']:,} random ones of {settings['letters']} "
        f"letters, {settings['few_words']} where the norm does not suffice), `operations` (each column says in "
        "`results.json`, `settings.means`, what it is built with) and `lengths` (a counted comparison over length). "
        "The deepest program of the tests, 198 levels, is compiled there and not here.",
    )


def mutants_table(rows: Iterable[Mapping[str, str]] | None = None) -> str:
    """What came of the mutants, by where they are; `why`: what survived and changes no result, or "open"."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for row in mutants() if rows is None else rows:
        group = row["file"].removesuffix(".py") if row["file"].startswith("hooks") else str(Path(row["file"]).parent)
        group += ", compiled loops" if row["loop"] == "True" else ""
        for name in (group, "all"):
            counts[name][row["outcome"] if row["why"] in ("", "open") else "none"] += 1
    head = ("", "mutants", "change no result", "killed", "of these by time", "survived", "killed of the others")
    lines = []
    for group, c in sorted(counts.items(), key=lambda pair: pair[0] == "all"):
        killed, share = _killed(c)
        lines.append((group, *map(str, (c.total(), c["none"], killed, c["timeout"], c["survived"], share))))
    return table(head, lines)


def _killed(c: Counter[str]) -> tuple[int, str]:
    killed = c["killed"] + c["timeout"]
    return killed, f"{killed / (c.total() - c['none']):.0%}".replace("%", " %")


def mutants() -> list[Row]:
    with MUTANTS.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def mutants_killed() -> str:
    rows = mutants()
    c = Counter(row["outcome"] if row["why"] in ("", "open") else "none" for row in rows)
    killed, share = _killed(c)
    return said(
        f"Of all {len(rows)} the tests kill {killed}, {100 * killed / len(rows):.0f} %; of the {len(rows) - c['none']} "
        f"that could change a result, {share} (90 % were aimed at). Of the first {one('mutants-first')}, met by the "
        f"tests there were before, {one('mutants-first-killed')} % were killed."
    )


def mutants_open() -> str:
    lines = defaultdict(list)
    for row in mutants():
        if row["why"] == "open":
            lines[Path(row["file"]).stem].append(row["line"])
    what = {
        "certificates": "terms of the doubt about attention's bound",
        "proofs": "a tolerance that is another by 2e-6 of itself",
        "whole_numbers": "an allowance for underflow",
    }
    if lines.keys() != what.keys():
        raise ValueError(f"open mutants are of {', '.join(lines)}: say what they are")
    each = "; ".join(f"{kind} (`{name}` {', '.join(lines[name])})" for name, kind in what.items())
    return said(
        f"Open are {sum(map(len, lines.values()))}, all guards against rounding: {each}. Judged by hand was one: its "
        "test is slower than those mapped (`registry` 190)."
    )


def coverage() -> str:
    return said(
        "`pip install pytest-cov`, `pytest --cov=ln_probe tests`: the fast tests reach "
        f"{one('coverage')} % of lines and branches (the bodies of compiled kernels, which cannot be seen, are left "
        f"out; counted as not reached, {one('coverage-kernels')} %)."
    )


BLOCKS: dict[str, Callable[[], str]] = {
    "attribution-cost": attribution_cost,
    "batch": batch,
    "coverage-constants": coverage_with_constants,
    "refits": refits,
    "headline": headline,
    "optimal": optimal,
    "coverage-given": coverage_given,
    "coverage": coverage_of_all,
    "compiler-bits": compiler_bits,
    "compiler-eps": compiler_eps,
    "decomposition": decomposition,
    "exact": exact,
    "folded-effect": folded_effect,
    "geometry-before": geometry_before,
    "geometry-checks": geometry_checks,
    "geometry-hard": geometry_hard,
    "geometry-heads": geometry_heads,
    "geometry-pools": geometry_pools,
    "geometry-right": geometry_right,
    "geometry-speed": geometry_speed,
    "make-report": make_report,
    "mutants": mutants_table,
    "mutants-killed": mutants_killed,
    "mutants-open": mutants_open,
    "page-size": page_size,
    "parity": parity,
    "probe": probe,
    "scale": scale,
    "scale-growth": scale_growth,
    "test-coverage": coverage,
    "whole-arithmetic": whole_arithmetic,
    "whole-command": whole_command,
    "whole-stages": whole_stages,
}
