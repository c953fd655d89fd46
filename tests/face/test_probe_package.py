"""A probe of another package: into the report, the page, `describe`, the command line and a batch run;
and what becomes of one that raises, lies about its tables, takes another's name or is not installed."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from architectures import make_bridge
from faulty import command, ended, ends, started, tables, write_prompts

import ln_probe
from ln_probe.analyses.probes import registry
from ln_probe.analyses.probes.base import Needs, Observer, Piece, Probe, ProbeError, ProbeResults
from ln_probe.analyses.probes.columns import BUILT_IN, LAYERNORMS
from ln_probe.analyses.schema import Column, Table
from ln_probe.measure import ProbeFailedWarning

HERE = Path(__file__).parent / "probe_package"
TOKENS = [[1, 7, 30, 4, 22, 9], [5, 5, 17, 46, 3], [44, 8, 19, 6]]
PACKAGE = "package ln-probe-lengths 1.0"


def installed(package: Path, home: Path) -> Path:
    """The package as an installer leaves it: its modules, and its metadata made from its pyproject.toml."""
    project = tomllib.loads((package / "pyproject.toml").read_text())["project"]
    shutil.copytree(package, home, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    info = home / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    info.mkdir()
    said = f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    (info / "METADATA").write_text(f"{said}Summary: {project['description']}\n")
    lines = [f"{name} = {target}" for name, target in project["entry-points"][registry.GROUP].items()]
    (info / "entry_points.txt").write_text("\n".join([f"[{registry.GROUP}]", *lines, ""]))
    return home


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return installed(HERE, tmp_path / "site")


@pytest.fixture
def package(home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The package, installed in this process."""
    monkeypatch.syspath_prepend(str(home))
    yield home
    sys.modules.pop("lengths_probe", None)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    return write_prompts(tmp_path / "prompts.jsonl", TOKENS)


@pytest.fixture
def path_to_it(home: Path) -> dict[str, str]:
    """The environment of a process in which the package is installed."""
    return {"PYTHONPATH": os.pathsep.join([str(home), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])}


def test_it_is_thirty_lines() -> None:
    lines = (HERE / "lengths_probe.py").read_text().splitlines()
    body = lines[lines.index("class Watching(Observer):") :]
    assert sum(bool(line.strip()) for line in body) <= 30


def test_its_table_reaches_report_page_and_describe(
    package: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_bridge("gpt2")
    report = ln_probe.analyze(model, prompts, probes=["lengths", "decomposition"], progress=False)
    table = report.tables["lengths"]
    assert len(table) == 5 * len(TOKENS)
    assert list(table["prompt"].unique()) == [0, 1, 2]
    longest = table.groupby("site")["longest"].max()
    assert (longest >= report.layernorms.set_index("site")["norm_before_mean"]).all()
    said = report.describe("lengths").set_index("column")
    assert said.loc["longest"].tolist() == ["float", "L2 norm", "length of the longest vector"]
    assert any(text.startswith("The longest vector has length") for text in report.findings())
    assert report.provenance["probes"] == {"lengths": PACKAGE}
    page = report.to_html(tmp_path / "page.html").read_text()
    for part in ('id="table-lengths"', "A row per norm and prompt.", 'id="lengths-drawn"', "The longest vector has"):
        assert part in page
    assert 'title="length of the longest vector (L2 norm)"' in page

    folder = report.save(tmp_path / "saved")
    loaded = ln_probe.load_report(folder)
    pd.testing.assert_frame_equal(loaded.tables["lengths"], table)
    assert loaded.findings() == report.findings()
    monkeypatch.undo()  # the package is gone
    sys.modules.pop("lengths_probe")
    alone = ln_probe.load_report(folder)
    pd.testing.assert_frame_equal(alone.tables["lengths"], table)
    pd.testing.assert_frame_equal(alone.describe("lengths"), report.describe("lengths"))
    assert f"the probe 'lengths' of {PACKAGE} is not installed here: its tables are kept" in alone.notes[-1]
    assert 'id="table-lengths"' in alone.to_html(tmp_path / "again.html").read_text()


def test_the_command_line_lists_it(path_to_it: dict[str, str]) -> None:
    _, printed = ended(started("report", "--help", COLUMNS="300", TERM="dumb", **path_to_it), 0)
    said = " ".join(printed.replace("│", " ").split())
    for name, (_, summary) in registry.BUILT_IN.items():
        assert f"{name}: {summary}" in said
    assert f"lengths: how long the vectors are that each norm reads ({PACKAGE})" in said


@pytest.mark.slow
def test_workers_of_a_batch_run_have_it(
    path_to_it: dict[str, str], prompts: Path, lab_suite: list[Path], tmp_path: Path
) -> None:
    asked = ["--prompts", prompts, "--shard", 1, "--max-tokens", 12, "--workers", 1, "--probes", "lengths,causal"]
    ended(started("report", lab_suite[0], *asked, "--quiet", "--out", tmp_path / "whole", **path_to_it), 0)
    names = {Path(name).name for name in tables(tmp_path / "whole")}
    assert names == {f"{t.name}.parquet" for t in BUILT_IN} | {"lengths.parquet", "exhibits.npz"}
    report = ln_probe.load_report(next((tmp_path / "whole").glob("*/report.json")).parent)
    assert list(report.tables["lengths"]["prompt"].unique()) == [0, 1, 2]
    assert (report.causal["prompts"] == 3).all()


@pytest.mark.slow
def test_pieces_where_its_package_is_gone(
    package: Path, prompts: Path, lab_suite: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others' results are written, its pieces are kept, and joined once it is back."""
    out = tmp_path / "out"
    line = [lab_suite[0], "--prompts", prompts, "--shard", 2, "--probes", "lengths,decomposition", "--workers", 0]
    ends(0, command, "report", *line, "--out", out, "--unit", "1/1")
    with monkeypatch.context() as gone:
        gone.setattr(sys, "path", [p for p in sys.path if p != str(package)])
        sys.modules.pop("lengths_probe", None)
        _, said = ends(1, command, "merge", out, "--workers", 0)
        assert f"the probe 'lengths' of {PACKAGE} failed: it is not installed here" in said
        report = ln_probe.load_report(next(out.glob("*/report.json")).parent)
        assert len(report.layernorms) == 5
        assert "lengths" not in report.tables
        assert [f.probe for f in report.failures] == ["lengths"]
        _, said = ends(2, command, "report", *line, "--out", out)
        assert "unknown probe 'lengths': choose from decomposition" in said
    assert list(out.rglob("prompts-*.safetensors"))
    ends(0, command, "merge", out, "--workers", 0)
    report = ln_probe.load_report(next(out.glob("*/report.json")).parent)
    assert len(report.tables["lengths"]) == 5 * len(TOKENS)
    assert not report.failures


# ------------------------------------------------------------------------------------------------------- bad probes

COLUMNS = (Column("prompt", "int", "its number"), Column("size", "float", "tokens"))
TABLE = Table("sizes", "Sizes", "A row per prompt.", ("prompt",), COLUMNS)


class Sizes(Probe):
    name, summary, tables, needs = "sizes", "tokens of each prompt", (TABLE,), Needs(output=True)

    def start(self, view: Any) -> Observer:
        return Counting()


class Counting(Observer):
    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def prompt(self, prompt: int, tokens: Any) -> None:
        self.rows.append({"prompt": prompt, "size": float(len(tokens))})

    def piece(self) -> Piece:
        return Piece(tables={"sizes": TABLE.frame(self.rows)})


def raising(where: str) -> Probe:
    """A probe that raises in one of its places."""

    def fail(*_: object) -> Any:
        raise RuntimeError(f"in {where}")

    made = Sizes()
    if where in ("prompt", "piece"):
        watching = Counting()
        setattr(watching, where, fail)
        made.start = lambda view: watching  # type: ignore[method-assign]
    else:
        setattr(made, where, fail)
    return made


def returning(frame: Any) -> Probe:
    """A probe that makes this table."""
    made = Sizes()
    made.finish = lambda pieces, context: ProbeResults({"sizes": frame})  # type: ignore[method-assign]
    return made


@pytest.fixture(scope="module")
def expected() -> ln_probe.Report:
    probes = [Sizes(), "decomposition"]
    return ln_probe.analyze(make_bridge("gpt2"), torch.arange(9)[None], probes=probes, progress=False)


def test_a_probe_may_be_an_object(expected: ln_probe.Report) -> None:
    assert expected.tables["sizes"].to_dict("records") == [{"prompt": 0, "size": 9.0}]
    assert expected.provenance["arguments"]["probes"] == ["sizes", "decomposition"]


GOOD = pd.DataFrame({"prompt": [0, 1], "size": [1.0, 2.0]})


WRONG_TABLES = [
    (returning(GOOD[["prompt"]]), "TableError: table 'sizes' lacks the column 'size': it has prompt"),
    (returning(GOOD.assign(more=1)), "TableError: table 'sizes' has a column 'more' that is not declared"),
    (returning(GOOD[["size", "prompt"]]), "TableError: table 'sizes' has its columns in another order: size, prompt"),
    (returning(GOOD.assign(size=["a", "b"])), "TableError: sizes.size is declared as float, and holds"),
    (returning(GOOD.assign(prompt=[1, 1])), "TableError: table 'sizes' has two rows about the same thing (prompt"),
]  # fmt: skip


@pytest.mark.parametrize(("bad", "said"), [
    *((raising(where), f"RuntimeError: in {where}") for where in ("start", "prompt", "piece", "finish", "marks")),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in WRONG_TABLES),
    (returning([1]), "TableError: table 'sizes' is a list, not a DataFrame"),
])  # fmt: skip
def test_a_bad_probe_fails_alone(bad: Probe, said: str, expected: ln_probe.Report, tmp_path: Path) -> None:
    model, tokens = make_bridge("gpt2"), torch.arange(9)[None]
    with pytest.warns(ProbeFailedWarning, match=r"the probe 'sizes' of module .*test_probe_package failed: "):
        report = ln_probe.analyze(model, tokens, probes=["decomposition", bad], progress=False)
    (failure,) = report.failures
    assert (failure.probe, failure.package) == ("sizes", f"module {__name__}")
    assert said in failure.error
    assert str(failure) in report.notes
    pd.testing.assert_frame_equal(report.layernorms, expected.layernorms)
    assert not len(report.tables["sizes"])
    loaded = ln_probe.load_report(report.save(tmp_path / "r"))
    assert loaded.failures == report.failures
    with pytest.warns(ProbeFailedWarning), pytest.raises(ProbeError, match="the probe 'sizes' of module"):
        ln_probe.analyze(model, tokens, probes=[bad], progress=False)


def test_names_that_exist() -> None:
    class Other(Sizes):
        name = "causal"

    class Thief(Sizes):
        tables = (Table("heads", "Heads", "Mine.", (), (Column("size", "float", "tokens"),)),)

    class Again(Sizes):
        name = "again"

    model = make_bridge("gpt2")
    for probes, said in (
        ([Other()], r"the probe 'causal' of module .*test_probe_package has the name of one of ln_"),
        ([Thief()], r"the probe 'sizes' of module .* declares a table 'heads': that is the name of"),
        ([Sizes(), Again()], r"declares a table 'sizes', which another probe declares too: rename it"),
        ([3], r"a probe is a name or a Probe, got int"),
        ([type("Bare", (Sizes,), {"tables": ()})()], r"needs a tables \(tuple\)"),
    ):
        with pytest.raises(ProbeError, match=said):
            ln_probe.analyze(model, torch.arange(9)[None], probes=probes, progress=False)


@pytest.mark.parametrize(("source", "said"), [
    ("raise OSError('no weights here')", r"cannot be loaded \(OSError: no weights here\)"),
    ("Lengths = 3", "is a int, not a Probe"),
    ("from ln_probe.analyses.probes.causal import Causal as Lengths", "calls itself 'causal': use one name"),
])  # fmt: skip
def test_packages_that_cannot_be_used(source: str, said: str, package: Path, prompts: Path, tmp_path: Path) -> None:
    (package / "lengths_probe.py").write_text(source)
    sys.modules.pop("lengths_probe", None)
    with pytest.raises(ProbeError, match=f"the probe 'lengths' of {PACKAGE} {said}"):
        ln_probe.analyze(make_bridge("gpt2"), prompts, probes=["lengths"], progress=False)
    _, error = ends(
        2, command, "report", "lm-none", "--probes", "lengths", "--out", tmp_path / "out", "--prompts", prompts
    )
    assert f"the probe 'lengths' of {PACKAGE}" in error
    assert not (tmp_path / "out").exists()


def test_a_package_that_takes_a_built_in_name(package: Path) -> None:
    points = next(package.glob("*.dist-info")) / "entry_points.txt"
    points.write_text(f"[{registry.GROUP}]\ncausal = lengths_probe:Lengths\n")
    with pytest.warns(UserWarning, match=f"the probe 'causal' of {PACKAGE} is left out: ln_probe has one of that name"):
        found = registry.entries()
    assert found["causal"].package == registry.OWN


def test_a_failure_in_a_work_unit_leaves_the_others(
    package: Path, prompts: Path, lab_suite: list[Path], tmp_path: Path
) -> None:
    """It raises on the second prompt alone; its exit status says so, and the page."""
    text = (package / "lengths_probe.py").read_text()
    (package / "lengths_probe.py").write_text(
        text.replace("        self.rows.append(", "        1 / (1 - prompt)\n        self.rows.append(", 1)
    )
    line = [lab_suite[0], "--prompts", prompts, "--shard", 1, "--workers", 0, "--out", tmp_path / "out"]
    printed, _ = ends(1, command, "report", *line, "--probes", "lengths,decomposition", "--json")
    (model,) = json.loads(printed)["models"]
    assert model["error"] is None
    assert model["failed_probes"] == [f"the probe 'lengths' of {PACKAGE} failed: ZeroDivisionError: division by zero"]
    report = ln_probe.load_report(Path(model["page"]).parent)
    assert len(report.layernorms) == 5
    assert not len(report.tables["lengths"])
    assert "ZeroDivisionError" in Path(model["page"]).read_text()


def test_pieces_join_in_the_order_of_prompts() -> None:
    """Any division of the prompts gives the same table."""
    from ln_probe.hooks.model import evaluating
    from ln_probe.passes import Passes
    from ln_probe.settings import Settings

    model = make_bridge("gpt2")
    rows = list(enumerate(torch.tensor(row) for row in TOKENS))
    probe = registry.find("uniformity")
    with evaluating(model):
        passes = Passes(model, Settings(probes=("uniformity",)))
        calibration = passes.calibrate(rows)
        parts = [passes.measure(rows[:1], calibration), passes.measure(rows[1:], calibration)]
        whole = passes.measure(rows, calibration)
    from ln_probe.analyses.probes.base import Context

    context = Context(calibration, None, lambda p, i: "")
    divided = probe.finish([p["uniformity"] for p in parts], context).tables["heads"]  # type: ignore[misc]
    together = probe.finish([whole["uniformity"]], context).tables["heads"]  # type: ignore[list-item]
    pd.testing.assert_frame_equal(divided, together, check_exact=True)
    assert np.isfinite(together["entropy_ratio"]).all()
    assert LAYERNORMS.name not in whole
