"""Mutation testing of what is measured: does a test notice when an operator, a number or a condition is another one?

A seeded sample of the mutants that cosmic-ray's operators make of `analyses/geometry`, `analyses/probes`, `hooks/sites`
and `hooks/variants`, spread over the files in proportion to how many each has, a fifth of it in compiled loops. Left
out: annotations, `if TYPE_CHECKING`, `__all__`, and what does not compile. Strings are not mutated. Each mutant meets
the fast tests of `TESTS` that execute its lines, the quickest first, until one fails. What was changed, the outcome
and which test failed are a row of `bench/mutants.csv`; survivors have a reason (`why`: a kind of WHY, or
"open"), and that stays as long as it survives.

Nothing is written to the tree: a process with the libraries loaded forks one for each mutant, in which the import
system reads the mutated text. Compiled loops are cached on disk, so where one is mutated (or a constant that one uses)
numba is off in that process, and the tests are those that finish in time without it.

Needs `pip install cosmic-ray coverage`.

    python bench/mutants.py --map                             which test executes which lines (minutes)
    python bench/mutants.py --map tests/hooks/test_sites.py   these anew
    python bench/mutants.py                                   draws, runs; resumes
    python bench/mutants.py --again                           what was not killed nor explained, with more of the tests
    python bench/mutants.py --again tests/hooks/test_sites.py   with these
    python bench/mutants.py --table
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import csv
import importlib
import importlib.machinery
import json
import os
import random
import re
import signal
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numba
import pytest

ROOT = Path(__file__).resolve().parents[1]
MAP, RESULTS = ROOT / "build" / "mutants.json", ROOT / "bench" / "mutants.csv"
FILES = ("analyses/geometry/*.py", "analyses/probes/*.py", "hooks/sites.py", "hooks/variants.py")
TESTS = ("tests/hooks/test_*.py", "tests/analyses/test_*.py")
NOT_THESE = re.compile("_lab_|test_lab|_crasp|_attribution")  # they use what is mutated, and take long
# With tests that are quick without numba.
UNCOMPILED = re.compile("attain|budget|decomp|exact|formulas|geometry_|hull|key_s|large|last_res|temporal|unif|verdict")
SLOWEST, ENOUGH = 3.0, 5.0  # seconds of a processor: of a test without numba, of all tests of a mutant
PATIENCE = 90.0  # and of the wall, before a mutant's process is stopped
COLUMNS = ("file", "line", "operator", "occurrence", "change", "loop", "outcome", "test", "seconds", "why")
# Why a mutant is none that a test of results could kill: no verdict, bound or sentence is another one.
WHY = ("speed", "same", "proposal")
Row = dict[str, str]


@dataclass(frozen=True)
class Mutant:
    """One change of one file; `loop`: it is in a compiled loop, or a constant of one."""

    file: str
    line: int
    operator: str
    occurrence: int
    loop: bool

    def key(self) -> tuple[str, str, str]:
        return self.file, self.operator, str(self.occurrence)

    def source(self) -> str | None:
        from cosmic_ray.mutating import mutate_code
        from cosmic_ray.plugins import get_operator

        made: str | None = mutate_code((ROOT / self.file).read_text(), get_operator(self.operator)(), self.occurrence)
        return made

    def change(self) -> str:
        """The line before and after (the first that differs)."""
        before, after = (ROOT / self.file).read_text().splitlines(), str(self.source()).splitlines()
        at = next((i for i, pair in enumerate(zip(before, after, strict=False)) if pair[0] != pair[1]), 0)
        return f"{before[at].strip()} → {after[at].strip()}"


def is_compiled(node: ast.AST) -> bool:
    return isinstance(node, ast.FunctionDef) and any("compiled" in ast.dump(mark) for mark in node.decorator_list)


def left_out(tree: ast.Module) -> Iterator[ast.AST]:
    """What no mutant may lie in."""
    for node in ast.walk(tree):
        if isinstance(node, ast.arg | ast.AnnAssign) and node.annotation is not None:
            yield node.annotation
        elif isinstance(node, ast.FunctionDef) and node.returns is not None:
            yield node.returns
        elif (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING") or (
            isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
        ):
            yield node


def inside(node: Any, line: int, column: int) -> bool:
    return (node.lineno, node.col_offset) <= (line, column) < (node.end_lineno, node.end_col_offset)


def names_in_loops() -> set[str]:
    loops = (f for path in (ROOT / "analyses").rglob("*.py") for f in ast.walk(ast.parse(path.read_text())))
    return {n.id for f in loops if is_compiled(f) for n in ast.walk(f) if isinstance(n, ast.Name)}


def mutants() -> list[Mutant]:
    """All that there are, but for those that cannot be compiled: these go when they are drawn."""
    from cosmic_ray.ast import ast_nodes, get_ast
    from cosmic_ray.plugins import get_operator, operator_names

    found, used = [], names_in_loops()
    operators = [(name, get_operator(name)) for name in operator_names() if not get_operator(name).arguments()]
    for path in sorted(p for pattern in FILES for p in ROOT.glob(pattern)):
        text = path.read_text()
        tree, parsed = ast.parse(text), list(ast_nodes(get_ast(text)))
        unwanted, loops = list(left_out(tree)), [n for n in tree.body if is_compiled(n)]
        loops += [n for n in tree.body if isinstance(n, ast.Assign) and used & {ast.unparse(t) for t in n.targets}]
        for name, operator in operators:
            places = (place for node in parsed for place in operator().mutation_positions(node))
            for occurrence, ((line, column), _) in enumerate(places):
                if not any(inside(node, line, column) for node in unwanted):
                    loop = any(inside(node, line, column) for node in loops)
                    found.append(Mutant(str(path.relative_to(ROOT)), line, name, occurrence, loop))
    return found


def compiles(mutant: Mutant) -> bool:
    made = mutant.source()
    try:
        return made is not None and ast.dump(ast.parse(made)) != ast.dump(ast.parse((ROOT / mutant.file).read_text()))
    except SyntaxError:
        return False


def sample(count: int, seed: int, known: Container[tuple[str, str, str]]) -> list[Mutant]:
    """Drawn in proportion to what each file has, one of each file at least, in an order that is drawn too."""
    rng, by_file = random.Random(seed), defaultdict(list)
    for mutant in mutants():
        by_file[mutant.file, mutant.loop].append(mutant)
    drawn: list[Mutant] = []
    for loop, wanted in ((False, count - count // 5), (True, count // 5)):
        groups = [group for (_, is_loop), group in by_file.items() if is_loop == loop]
        for group in groups:
            quota = max(1, round(wanted * len(group) / sum(map(len, groups))))
            usable = (mutant for mutant in rng.sample(group, len(group)) if mutant.key() in known or compiles(mutant))
            drawn += [mutant for mutant, _ in zip(usable, range(quota), strict=False)]
    rng.shuffle(drawn)
    return drawn


class Watching:
    """Tells of each test what it executed (`executed`: seconds and lines) and of a run what failed first."""

    def __init__(self, seconds: float, coverage: Any = None) -> None:
        self.seconds, self.coverage, self.failed, self.stopped = seconds, coverage, "", False
        self.begun, self.passed = 0.0, dict[str, float]()

    @pytest.hookimpl(trylast=True)
    def pytest_configure(self) -> None:
        from hypothesis import HealthCheck, Phase, settings

        phases, quiet = (Phase.explicit, Phase.generate), list(HealthCheck)
        settings.register_profile("same", deadline=None, derandomize=True, phases=phases, suppress_health_check=quiet)
        settings.load_profile("same")

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        def stop(*_: Any) -> None:
            self.stopped = True
            raise TimeoutError(f"{item.nodeid} took more than {self.seconds} s of a processor")

        signal.signal(signal.SIGPROF, stop)
        signal.setitimer(signal.ITIMER_PROF, self.seconds)
        if self.coverage:
            self.coverage.switch_context(item.nodeid)
        self.begun = time.process_time()
        try:
            return (yield)
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed = self.failed or report.nodeid
        elif report.when == "call" and report.passed:
            self.passed[report.nodeid] = round(time.process_time() - self.begun, 3)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.failed = self.failed or f"{report.nodeid} (import)"


def in_child(work: Callable[[], Any], seconds: float) -> Any:
    """What `work` returns in a separate process: None if it ended otherwise, "timeout" if it was stopped."""
    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:
        os.setsid()
        silent = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silent, 1)
        os.dup2(silent, 2)
        try:
            with os.fdopen(writer, "w") as pipe:
                json.dump(work(), pipe)
        finally:
            os._exit(0)
    os.close(writer)
    signal.signal(signal.SIGALRM, lambda *_: os.killpg(pid, signal.SIGKILL))
    signal.setitimer(signal.ITIMER_REAL, seconds)
    begun = time.monotonic()
    with os.fdopen(reader) as pipe:
        told = pipe.read()
    signal.setitimer(signal.ITIMER_REAL, 0)
    os.waitpid(pid, 0)
    return json.loads(told) if told else "timeout" if time.monotonic() - begun >= seconds else None


def run_tests(tests: list[str], watching: Watching, loop: bool, mutant: Mutant | None = None) -> None:
    """In a child: pytest, with the mutated text in place of its file's."""
    sys.dont_write_bytecode = mutant is not None
    numba.config.DISABLE_JIT = loop  # type: ignore[attr-defined]
    if mutant is not None:
        name, text, loader = Path(mutant.file), str(mutant.source()).encode(), importlib.machinery.SourceFileLoader
        read = loader.get_data

        def get_data(self: Any, path: str) -> bytes:
            if path.endswith(f"ln_probe/{mutant.file}"):
                return text
            if f"ln_probe/{name.parent}/__pycache__/{name.stem}." in path:
                raise OSError("not this one: the text is another")
            return read(self, path)

        loader.get_data = get_data  # type: ignore[method-assign]
    pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *tests][mutant is None :], plugins=[watching])


def load_libraries() -> None:
    """Import what a child imports, but for the project itself: once, here."""

    def used() -> list[str]:
        some = [
            f"tests/{name}.py" for name in ("hooks/test_sites", "analyses/test_exact", "analyses/test_head_effects")
        ]
        run_tests([*some, "-k", "nothing"], Watching(60), False)
        return sorted(name for name, module in sys.modules.items() if getattr(module, "__file__", None))

    for name in in_child(used, 300) or ():
        if name.split(".")[0] not in ("ln_probe", "tests", "conftest", "__main__"):
            with contextlib.suppress(Exception):  # (one that only imports as part of another)
                importlib.import_module(name)
    importlib.import_module("torch").set_num_threads(1)


def map_file(path: str, loop: bool) -> dict[str, Any]:
    """In a child: which tests of a file pass in time, how long they take, and which lines they execute."""
    import coverage

    watched = [f"{ROOT}/analyses/geometry/*", f"{ROOT}/analyses/probes/*", f"{ROOT}/hooks/*"]
    measured = coverage.Coverage(data_file=None, include=watched, config_file=False)
    watching = Watching(SLOWEST if loop else 20 * SLOWEST, measured)  # (compiling takes a minute, once)
    measured.start()
    run_tests([path], watching, loop)
    measured.stop()
    data, lines = measured.get_data(), defaultdict[str, dict[str, list[int]]](dict)
    for file in data.measured_files():
        for line, tests in data.contexts_by_lineno(file).items():
            for test in tests:
                lines[test].setdefault(str(Path(file).relative_to(ROOT)), []).append(line)
    return {test: [seconds, lines[test]] for test, seconds in watching.passed.items()}


def make_map(files: list[str]) -> None:
    found = json.loads(MAP.read_text()) if files and MAP.exists() else {"compiled": {}, "uncompiled": {}}
    every = sorted(str(p.relative_to(ROOT)) for pattern in TESTS for p in ROOT.glob(pattern))
    for path in files or [path for path in every if not NOT_THESE.search(path)]:
        for kind in ("compiled", "uncompiled"):
            if kind == "compiled" or UNCOMPILED.search(path):
                begun = time.monotonic()
                found[kind] = {test: told for test, told in found[kind].items() if not test.startswith(path + "::")}
                told = in_child(lambda path=path, loop=kind != "compiled": map_file(path, loop), 600)  # type: ignore[misc]
                found[kind] |= told if isinstance(told, dict) else {}
                print(f"{path} {kind}: {len(told or ())} tests, {time.monotonic() - begun:.0f} s", flush=True)
        MAP.parent.mkdir(exist_ok=True)
        MAP.write_text(json.dumps(found))


def touched(mutant: Mutant) -> tuple[range, set[str]]:
    """The lines of the mutant's statement, and of a statement at the top of a module the names it gives."""
    tree = ast.parse((ROOT / mutant.file).read_text())
    statements = [n for n in ast.walk(tree) if isinstance(n, ast.stmt)]
    begin = {n: min([n.lineno, *(mark.lineno for mark in getattr(n, "decorator_list", ()))]) for n in statements}
    around = [n for n in statements if begin[n] <= mutant.line <= int(n.end_lineno or 0)]
    inner: Any = max(around, key=lambda n: (n.lineno, -int(n.end_lineno or 0)))
    end = inner.body[0].lineno - 1 if getattr(inner, "body", None) else inner.end_lineno
    top = not any(isinstance(n, ast.FunctionDef) for n in around)
    names = {n.id for n in ast.walk(inner) if isinstance(n, ast.Name)} if top else set()
    if isinstance(inner, ast.FunctionDef | ast.ClassDef):  # a default value, a decorator: any test that calls it
        return range(inner.body[0].lineno, int(inner.end_lineno or 0) + 1), set()
    return range(inner.lineno, max(end, inner.lineno) + 1), names


def chosen(mutant: Mutant, found: Any, budget: float) -> list[str]:
    """The tests that execute the mutant's lines, the quickest first, as many as take `budget` seconds."""
    lines, names = touched(mutant)
    where = {mutant.file: set(lines)}
    if names:  # executed by the import: the lines that use what it gives
        for path in (p for pattern in FILES for p in ROOT.glob(pattern)):
            uses = (n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Name) and n.id in names)
            where[str(path.relative_to(ROOT))] = {n.lineno for n in uses}
    seen = mutant.loop or mutant.operator.endswith("RemoveDecorator")  # of a compiled function no line is seen
    told = (found["uncompiled"] if seen else found["compiled"]).items()
    fitting = [(s, t) for t, (s, told_lines) in told if any(set(told_lines.get(f, ())) & at for f, at in where.items())]
    if not fitting:  # a decorator, a constant that nothing here uses: any test that executes the file
        fitting = [(seconds, test) for test, (seconds, told_lines) in told if mutant.file in told_lines]
    spent, tests = 0.0, list[str]()
    for seconds, test in sorted(fitting):
        spent += seconds
        if spent <= budget or not tests:
            tests.append(test)
    return tests


def judge(mutant: Mutant, found: Any, budget: float) -> Row:
    tests, begun = chosen(mutant, found, budget), time.monotonic()
    anew = 10 if mutant.operator.endswith("RemoveDecorator") else 1  # compiled code is another one: none of the cache's

    def work() -> list[Any]:
        if anew > 1:
            os.environ["NUMBA_CACHE_DIR"] = tempfile.mkdtemp()
        watching = Watching(anew * (SLOWEST + budget))
        run_tests(tests, watching, mutant.loop, mutant)
        return [watching.failed, watching.stopped] if watching.failed or not watching.passed else []

    told = in_child(work, anew * (budget + PATIENCE)) if tests else []
    late = told == "timeout" or bool(told and told[1])
    outcome = "timeout" if late else "killed" if told is None or told else "survived"
    by = "" if told == "timeout" else "crash" if told is None else told[0] if told else "" if tests else "not reached"
    cells = (mutant.file, mutant.line, mutant.operator.split("/")[1], mutant.occurrence, mutant.change(), mutant.loop)
    return dict(zip(COLUMNS, map(str, (*cells, outcome, by, round(time.monotonic() - begun, 1), "")), strict=True))


def read() -> dict[tuple[str, str, str], Row]:
    if not RESULTS.exists():
        return {}
    with RESULTS.open(newline="") as file:
        return {(r["file"], "core/" + r["operator"], r["occurrence"]): r for r in csv.DictReader(file)}


def mutant_of(row: Row) -> Mutant:
    number, line = int(row["occurrence"]), int(row["line"])
    return Mutant(row["file"], line, "core/" + row["operator"], number, row["loop"] == "True")


def write(rows: dict[tuple[str, str, str], Row]) -> None:
    with RESULTS.open("w", newline="") as file:
        table = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        table.writeheader()
        table.writerows(rows[key] for key in sorted(rows, key=lambda key: (key[0], int(rows[key]["line"]), *key)))


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--map", nargs="*", metavar="TESTS")
    parser.add_argument("--again", nargs="*", metavar="TESTS")
    parser.add_argument("--sample", type=int, default=440)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rows = read()
    os.chdir(ROOT)
    load_libraries()
    assert "ln_probe" not in sys.modules, "a child has to read it anew"
    if options.map is not None:
        return make_map(options.map)
    found = json.loads(MAP.read_text())
    anew = options.again is not None
    if options.again:
        found = {k: {t: told for t, told in of.items() if t.split("::")[0] in options.again} for k, of in found.items()}
    left = [mutant_of(row) for row in rows.values() if row["outcome"] != "killed" and row["why"] not in WHY]
    for mutant in left if anew else sample(options.sample, options.seed, rows):
        if anew or mutant.key() not in rows:
            row = judge(mutant, found, 8 * ENOUGH if anew else ENOUGH)
            if row["outcome"] == "survived" and mutant.key() in rows:
                row["why"] = rows[mutant.key()]["why"]
            if row["outcome"] == "killed" or not options.again:
                rows[mutant.key()] = row
            write(rows)
            print(
                row["outcome"], f"{row['file']}:{row['line']}", row["change"], row["test"], row["seconds"], flush=True
            )


if __name__ == "__main__":
    main()
