"""What README, CONTRIBUTING and the site state about measurements is what the committed tables hold, what they show as
Python runs as it stands, and what they link to is there."""

from __future__ import annotations

import importlib.util
import json
import re
import runpy
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
import pytest
from faulty import word_tokenizer
from hub_standin import reached
from transformers import GPT2Config, GPT2LMHeadModel

from ln_probe.analyses.probes.tables import CAUSAL, CAUSAL_PROMPTS

TOP = Path(__file__).resolve().parents[2]
RESULTS = TOP / "bench" / "results"
CHECKPOINTS = TOP / "examples" / "checkpoints"
TABLES = CHECKPOINTS / "tables"
PUBLISHED = TOP / "analyses" / "lab" / "published"
PAGES = sorted((TOP / "docs").glob("*.md"))
MEASURED: dict[str, Any] = runpy.run_path(str(TOP / "docs" / "measured.py"))
SUMMARY: dict[str, Any] = runpy.run_path(str(CHECKPOINTS / "summary.py"))
DIRECTIVE = re.compile(r"^```\{measured\} (\S+)\n(?::where: (.*)\n)?((?:.+ = .+\n)+)```$", re.MULTILINE)
BLOCK = re.compile(r"^```(?:python|\{code-cell\} ipython3)\n(.*?)^```", re.M | re.S)
README = (TOP / "README.md").read_text(encoding="utf-8")
WITH_CODE = [p for p in (TOP / "README.md", *PAGES) if BLOCK.search(p.read_text(encoding="utf-8"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_tables_of_a_page_can_be_made(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    tables = DIRECTIVE.findall(text)
    assert len(tables) == text.count("```{measured}"), f"{page.name}: a directive that cannot be read"
    for files, where, columns in tables:
        rows = MEASURED["table"](files, columns.splitlines(), where).splitlines()[2:]
        assert any(re.search(r"\d", row) for row in rows), f"{page.name}: {files} shows no figure"


def test_every_claim_of_the_sources_has_its_figure_or_its_reason() -> None:
    sources = re.findall(r"^```\{claims\} (\w+)$", (TOP / "docs" / "laboratory.md").read_text(encoding="utf-8"), re.M)
    assert len(sources) == 5
    rows = [row for source in sources for row in MEASURED["claims"](source)]
    assert len(rows) >= 40
    assert sum(row["status"] == "scaled down" for row in rows) <= 15 / 40 * len(rows)
    assert all(re.search(r"\d|test_|planted", row["here"]) for row in rows if row["status"] != "not done")
    shown = MEASURED["claims_table"]("brody").splitlines()
    assert {line.count("|") for line in shown} == {8}
    assert "| 0.75 (read off) | 0.64 [0.59, 0.68] | partly |" in "".join(shown)


def test_a_table_shows_the_rows_of_its_files(tmp_path: Path) -> None:
    found = MEASURED["table"](
        "bench/results/optimal.csv", ["model = `{model}`", "change = {delta_mean:+.2f}"], "group == 'attention'"
    )
    rows = pd.read_csv(RESULTS / "optimal.csv").query("group == 'attention'")
    expected = [f"| `{r.model}` | {r.delta_mean:+.2f} |" for r in rows.itertuples()]
    assert found.splitlines() == ["| model | change |", "| --- | --- |", *expected]
    unknown = MEASURED["table"]("bench/results/headline.csv", ["d = {difference:+.3f}"], "model == 'smollm2-135m'")
    assert unknown.splitlines()[-1] == "| – |"  # no number: logits overflow
    with pytest.raises(ValueError, match="title"):
        MEASURED["table"]("bench/results/headline.csv", ["{model}"])


def test_every_table_has_its_command_and_is_shown() -> None:
    about = pd.read_csv(RESULTS / "about.csv")
    assert list(about["table"]) == sorted({p.stem for p in RESULTS.glob("*.csv")} - {"about"})
    assert about["command"].notna().all()
    for command in about["command"]:
        assert all((TOP / script).is_file() for script in re.findall(r"bench/\w+\.py", command)), command
    pages = "".join(p.read_text(encoding="utf-8") for p in PAGES)
    for table in about["table"]:
        assert f"bench/results/{table}.csv" in pages, f"no page shows {table}"


@pytest.mark.parametrize("name", list(SUMMARY["summaries"]()))
def test_summaries_follow_from_the_values(name: str) -> None:
    kept = pd.read_csv(TABLES / f"{name}.csv")
    pd.testing.assert_frame_equal(kept, SUMMARY["summaries"]()[name], rtol=1e-5, check_dtype=False)


BUNDLED = [f"lm-{norm}" for norm in ("layernorm", "scaling_only", "projection_only", "none")]
PRETRAINED = ["MGM", "CAPP-GPT", "SmolLM2-135M", "MiniLM-L6"]


def one_row(table: Path, **place: object) -> pd.Series[Any]:
    """Return the only row of a table with these values."""
    rows = pd.read_csv(table)
    for column, value in place.items():
        rows = rows[rows[column] == value]
    assert len(rows) == 1
    return rows.iloc[0]


def with_interval(row: pd.Series[Any], columns: tuple[str, str, str], digits: int) -> str:
    mean, low, high = row[list(columns)]
    return f"{mean:+.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


def percents(shares: pd.Series[Any]) -> str:
    """Return the range of shares in whole percent."""
    return " to ".join(map(str, sorted(set((100 * shares).round().astype(int))))) + " %"


def figures_of_findings() -> list[str]:
    """Return every measured figure of README's findings, in their order, from the committed tables."""
    keys = pd.read_csv(TABLES / "keys-at-length-summary.csv")
    pretrained = keys[keys["model"].isin(PRETRAINED)]
    assert set(pretrained["model"]) == set(PRETRAINED)
    assert not pretrained[["unselectable", "undecided"]].any().any()  # not rounded to 0 %
    paper = pd.read_csv(PUBLISHED / "language_model" / "summary.csv")
    paper = paper.query("space == 'head' and measure == 'unselectable_fraction' and step == step.max()")
    ours, random = (keys.query("model == @model and n == 256") for model in ("lm-layernorm", "random"))
    assert not pretrained["normal"].any()
    majority: dict[str, Any] = {
        "table": PUBLISHED / "majority" / "contrasts.csv", "step": 1000, "measure": "train_loss", "seeds": 10,
    }  # fmt: skip
    contrasts = ("size 1/sqrt(d) of values alone", "no projection, at radius sqrt(d)")
    causal: dict[str, Any] = {"table": TABLES / "lm-layernorm-books" / "causal.csv"}
    books = pd.read_csv(TABLES / "books-summary.csv")
    books = books.query("model == 'lm-layernorm' and sites == 'all' and variant == 'no_scaling'")
    removed: dict[str, Any] = {"table": PUBLISHED / "remove_norm" / "effects.csv", "difference": "removed - kept"}
    seeds, prompts = ("mean", "ci_low", "ci_high"), ("delta_loss", "delta_loss_low", "delta_loss_high")
    registered = pd.read_csv(PUBLISHED / "registered" / "contrasts.csv").set_index(["item", "contrast"])
    shape = registered.loc[(4, "projection, divisor 1 minus layernorm, loss at step 3000")]
    return [
        percents(pretrained["share"]),
        *(percents(paper[paper["norm"] == norm]["mean"]) for norm in ("layernorm", "projection_only")),
        percents(random[random["d_head"] == 2]["share"]),
        *(percents(ours[ours["variant"] == variant]["share"]) for variant in ("intact", "no_scaling")),
        percents(random[random["d_head"] == 8]["share"]),
        *(with_interval(one_row(**majority, contrast=contrast), seeds, 2) for contrast in contrasts),
        "+0.05",  # read off figure 4b
        with_interval(shape, ("estimate", "low", "high"), 3),
        with_interval(one_row(**causal, sites="all", variant="no_scaling"), prompts, 3),
        *(f"{increase:+.3f}" for increase in books["delta_loss"]),
        with_interval(one_row(**causal, sites="attention", variant="no_scaling"), prompts, 3),
        with_interval(one_row(**causal, sites="all", variant="no_projection"), prompts, 3),
        with_interval(one_row(**removed, measure="valid_loss"), seeds, 3),
    ]


def test_figures_of_readme_are_those_of_the_tables() -> None:
    findings = " ".join(README.partition("## Three findings")[2].partition("\n## ")[0].split())
    typed = re.findall(r"[+-]\d\.\d+(?: \[[-\d., ]+\])?|\d+(?: to \d+)? %", findings.partition("1. ")[2])
    assert typed == figures_of_findings()


@pytest.mark.slow
@pytest.mark.parametrize("page", WITH_CODE, ids=lambda page: page.stem)
def test_the_code_of_a_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    mpl.use("Agg")
    names: dict[str, object] = {"__name__": "__main__"}
    for number, block in enumerate(BLOCK.findall(page.read_text(encoding="utf-8")), start=1):
        exec(compile(block, f"{page.name}, block {number}", "exec"), names)
    assert names.keys() > {"__name__", "__builtins__"}, "the code defines nothing"


def test_pages_link_to_what_is_there() -> None:
    missing = []
    for page in (TOP / "README.md", *PAGES):
        for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text()):
            if not re.match(r"[a-z]+:", target) and not (page.parent / target).exists():
                missing.append(f"{page.name}: {target}")
    assert not missing


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"checkpoints_{name}", CHECKPOINTS / f"{name}.py")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # dataclasses look it up there
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("folder", sorted(p.parent for p in TABLES.glob("*/causal.csv")), ids=lambda p: p.name)
def test_tables_come_from_what_every_prompt_gave(folder: Path) -> None:
    table, by_prompt = (pd.read_csv(folder / f"{name}.csv") for name in ("causal", "causal_prompts"))
    assert list(table.columns) == [c for c in CAUSAL.names if c != "estimate"]
    assert list(by_prompt.columns) == CAUSAL_PROMPTS.names
    groups = table[table["sites"].isin(["attention", "mlp", "final", "all"])]
    assert len(groups)
    for row in groups[groups["variant"] != "intact"].to_dict("records"):
        rows = by_prompt[(by_prompt["sites"] == row["sites"]) & (by_prompt["variant"] == row["variant"])]
        assert len(rows) == row["n"] == 64
        mean = (rows["delta_loss"] * rows["n"]).sum(skipna=False) / rows["n"].sum()
        np.testing.assert_allclose(mean, row["delta_loss"], rtol=2e-5, atol=1e-5)


WORDS = ["?", "<s>", "</s>", "whale", "swims", "under", "ship", "men", "row", "land", "before", "night", "storm"]


@pytest.mark.lens
def test_one_command_measures_models_of_the_hub_and_prints_which_predictions_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measure, random = script("measure"), np.random.default_rng(0)
    known = measure.predictions()
    assert (known["low"] <= known["high"]).all()
    assert set(known["models"]) <= {3, 4}
    paragraphs = [" ".join(random.choice(WORDS[3:], 90)) + " .\n" for _ in range(20)]
    corpus = tmp_path / "Salesforce" / "wikitext"  # which `datasets` reads in place of the hub's
    corpus.mkdir(parents=True)
    pd.DataFrame({"text": paragraphs}).to_parquet(corpus / "test.parquet")
    (corpus / "README.md").write_text(
        "---\nconfigs:\n- config_name: wikitext-2-v1\n  data_files: [{split: test, path: test.parquet}]\n---\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    monkeypatch.setattr(measure, "SHARED", tmp_path)
    monkeypatch.setattr(measure, "PROMPTS", 6)
    command = ["measure.py", "--out", str(tmp_path / "checked"), "--check"]
    for name, vocabulary in {"gpt2": WORDS, "other": ["?", "<s>", "</s>", "ATG", "TAG"]}.items():
        shape = GPT2Config(n_embd=32, n_head=4, n_layer=2, n_positions=160, vocab_size=len(vocabulary))
        GPT2LMHeadModel(shape).save_pretrained(tmp_path / "models" / name)
        word_tokenizer(vocabulary).save_pretrained(tmp_path / "models" / name)
    with reached(tmp_path / "cache", monkeypatch) as hub:
        hub.add("gpt2", {"main": tmp_path / "models" / "gpt2"})
        hub.add("gpt2-medium", {"main": tmp_path / "models" / "gpt2"})  # the registered commit is gone
        hub.add(measure.CASES["pythia-1.4b"].model, {"step143000": tmp_path / "models" / "other"})
        hub.add(measure.CASES["gpt2-small-without-norms"].model, {"main": tmp_path / "models" / "gpt2"})
        served = hub.commit("gpt2", "main")
        monkeypatch.setitem(measure.CASES, "gpt2", replace(measure.CASES["gpt2"], revision=served))
        names = ["gpt2", "gpt2-small-without-norms", "gpt2-medium", "pythia-70m", "pythia-1.4b"]
        monkeypatch.setattr(sys, "argv", [*command, *names])
        assert measure.main() == 1
        printed = capsys.readouterr()
        assert f"gpt2: revision {served}\n" in printed.out
        resolved = hub.commit(measure.CASES["gpt2-small-without-norms"].model, "main")
        assert f"gpt2-small-without-norms: revision {resolved}, not pinned" in printed.out
        about = json.loads((tmp_path / "checked" / "gpt2-small-without-norms" / "about.json").read_text())
        assert about["model"]["commit"] == resolved
        assert len(re.findall(r"^gpt2: (?:holds|FAILS|not measured): ", printed.out, re.M)) == len(known) == 8
        assert (tmp_path / "checked" / "gpt2" / "values.csv").exists()
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        monkeypatch.setattr(sys, "argv", [*command, "pythia-70m"])
        assert measure.main() == 1
    errors = printed.err + capsys.readouterr().err
    for name, word in (("gpt2-medium", "revision"), ("pythia-70m", "offline|OFFLINE"), ("pythia-1.4b", "vocabulary")):
        assert re.search(rf"^{name}: not measured: .*{word}", errors, re.M), errors


def test_a_text_that_is_missing_or_another_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measure = script("measure")
    monkeypatch.setattr(measure, "SHARED", tmp_path)
    with pytest.raises(SystemExit, match=r"kjv\.txt.*[0-9a-f]{64}"):
        measure.corpus("kjv.txt")
    (tmp_path / "corpora").mkdir()
    (tmp_path / "corpora" / "kjv.txt").write_text("In the end")
    with pytest.raises(SystemExit, match="another"):
        measure.corpus("kjv.txt")
