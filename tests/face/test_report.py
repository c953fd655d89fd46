"""Reports are saved whole and load as they were; damaged folders are named."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from faulty import without_pages

import ln_probe
from ln_probe.analyses.files import CHECKSUM, checksums, sha256_of_file, with_checksum
from ln_probe.analyses.probes.causal import family
from ln_probe.analyses.probes.columns import BUILT_IN, CAUSAL, CAUSAL_PROMPTS, INTERVALS
from ln_probe.analyses.probes.statistics import infer_mean
from ln_probe.report import PRINTED, Report, slug


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A page that is read is drawn after `monkeypatch.undo()`."""
    without_pages(monkeypatch)


def test_saved_reports_load_as_they_were(report: Report, tmp_path: Path) -> None:
    folder = report.save(tmp_path / "r")
    loaded = ln_probe.load_report(folder)
    for table in (t.name for t in BUILT_IN):
        pd.testing.assert_frame_equal(loaded.tables[table], report.tables[table], check_dtype=False)
    assert loaded.causal is loaded.tables["causal"]
    assert dict(loaded.provenance) == json.loads(json.dumps(report.provenance))
    assert (loaded.notes, loaded.findings(), repr(loaded)) == (report.notes, report.findings(), repr(report))
    assert sorted(p.name for p in folder.iterdir()) == sorted(
        ["report.json", "report.html", "exhibits.npz", *(f"{t}.parquet" for t in (d.name for d in BUILT_IN))]
    )


def test_print_gives_the_first_findings_and_says_how_many_more_there_are(report: Report) -> None:
    first, *rest = str(report).splitlines()
    assert first.startswith(f"{report.name} on {report.provenance['prompts']['count']} prompt")
    said = " ".join(line.strip() for line in rest)
    assert said.startswith(f"- {report.findings()[0]}")
    assert said.endswith(f"… and {len(report.findings()) - PRINTED} more: report.findings()")
    assert "\x1b" not in str(replace(report, provenance={"model": {"name": "\x1b[31m"}}))
    assert str(Report()) == "model\n- Nothing was measured: no table holds a row."


def test_damaged_reports(report: Report, tmp_path: Path) -> None:
    """Cut, missing or of another version; flipped bits and links are those of `test_fault_files`."""
    folder = report.save(tmp_path / "r")
    for name in ("exhibits.npz", "heads.parquet"):
        whole = (folder / name).read_bytes()
        for broken in (whole[: len(whole) // 2], whole[:-30], b"", b"not a zip"):
            (folder / name).write_bytes(broken)
            with pytest.raises(ValueError, match=rf"{name} is damaged .*make the report again"):
                ln_probe.load_report(folder)
        (folder / name).unlink()
        with pytest.raises(FileNotFoundError, match=rf"{name} is missing: make the report again"):
            ln_probe.load_report(folder)
        (folder / name).write_bytes(whole)
    with pytest.raises(FileNotFoundError, match=r"holds no report\.json: not a finished report's folder"):
        ln_probe.load_report(tmp_path)
    for content, said in (
        ('{"format": 2', r"report\.json is damaged"),
        ('{"format": 99, "provenance": {}, "notes": []}', "has format 99, this ln_probe reads 2, 3, 4: make"),
    ):
        (folder / "report.json").write_text(content)
        with pytest.raises(ValueError, match=said):
            ln_probe.load_report(folder)


OLD = Path(__file__).parent / "report_0_1_0"  # made by ln_probe 0.1.0: one layer, two heads, two prompts of 6 tokens


HEADS_LATER = ["unreachable_fraction", "attainable_last_median", "attainable_last_p05", "queries", "keys_all",
               "prompts", *(f"{name}_{end}" for name in INTERVALS for end in ("low", "high"))]  # fmt: skip
SINCE_FAMILIES = ["family", "equivalence_bound", "delta_loss_optimal", "delta_loss_optimal_low",
                  "delta_loss_optimal_high", "groups"]  # fmt: skip
LATER = {  # columns that came since
    "layernorms": ["constant_first", "constant_rest", "constant_ratio_first", "constant_ratio_rest"],
    "heads": HEADS_LATER,
    "keys": ["reachable", "attainable_upper", "attainable_last", "attainable_last_upper", "judged_at"],
    "causal": [
        *SINCE_FAMILIES,
        "p_mean",
        "delta_loss_median",
        "delta_loss_uniform",
        "prompts_worse",
        "p_sign",
        "estimate",
    ],
}
POSITIONS = ("attainable", "attainable_median", "attainable_p05")


def test_attainable_attention_of_an_earlier_report_is_that_of_the_last_position() -> None:
    report = ln_probe.load_report(OLD)
    written = {n: pd.read_parquet(OLD / f"{n}.parquet") for n in ("heads", "keys")}
    pd.testing.assert_series_equal(
        report.keys["attainable_last"], written["keys"]["attainable"], check_names=False, check_exact=True
    )
    for column in ("attainable_median", "attainable_p05"):
        moved = report.heads[column.replace("attainable", "attainable_last")]
        pd.testing.assert_series_equal(moved, written["heads"][column], check_names=False, check_exact=True)
        assert report.heads[column].isna().all()
    assert report.keys[["attainable", "attainable_upper", "reachable"]].isna().all(axis=None)
    assert any("attainable attention was of queries at the last position" in note for note in report.notes)


def test_the_variant_neither_of_earlier_reports_is_both_removed() -> None:
    assert (pd.read_parquet(OLD / "heads.parquet")["variant"] == "neither").any()
    with pytest.warns(DeprecationWarning, match=r"the variant 'neither' \(in .*report_0_1_0, read under its name of"):
        report = ln_probe.load_report(OLD)
    for table in (report.heads, report.keys, report.causal):
        assert set(table["variant"]) == {"intact", "no_scaling", "no_projection", "both_removed"}
    compared = ln_probe.compare([report, report], names=["a", "b"])
    assert "both_removed" in compared.heads.index.get_level_values("variant")


def test_reports_of_0_1_0_are_read(tmp_path: Path) -> None:
    report = ln_probe.load_report(OLD)
    assert {n: len(t) for n, t in report.tables.items()} == {
        "layernorms": 3, "heads": 12, "keys": 92, "causal": 28, "causal_prompts": 0, "unembedding": 0,
        "head_effects": 0, "sinks": 0, "sink_heads": 0, "token_sizes": 0, "outlier_dimensions": 0,
        "scale_sums": 0,
    }  # fmt: skip
    for table in BUILT_IN:
        # Columns that are gone since are kept where they are known.
        gone = ["delta_loss_tail", "divisor", "matched"] if table.name == "causal" else []
        assert report.tables[table.name].columns.tolist() == [*table.names, *gone]
        if len(report.tables[table.name]):
            written = pd.read_parquet(OLD / f"{table.name}.parquet").replace({"variant": {"neither": "both_removed"}})
            since = [c for c in table.names if c not in written]
            assert sorted(since) == sorted(LATER.get(table.name, [])), "a column that is new: add it to LATER"
            read = report.tables[table.name]
            if table.name == "causal":  # its effects had one constant, and intervals that covered too little
                assert read[["delta_loss_low", "delta_loss_high"]].isna().all(axis=None)
                scaled = read["variant"].isin(["no_scaling", "both_removed"])
                for unknown in ("delta_loss", "loss", "kl", "top1_agreement", "entropy_change"):
                    assert (read[unknown].isna() == scaled).all()
                    if unknown != "delta_loss":
                        written = written.assign(**{unknown: written[unknown].where(~scaled)})
                read = read.assign(
                    delta_loss=read["delta_loss"].fillna(read["delta_loss_uniform"]), delta_loss_uniform="", family=""
                )
                written = written.drop(columns=["delta_loss_low", "delta_loss_high"])
            # Attainable attention was that of the last position, and what any position allows was not known.
            moved = {c: c.replace("attainable", "attainable_last") for c in written if c in POSITIONS}
            read = read.assign(**{old: read[new] for old, new in moved.items()}, **dict.fromkeys(moved.values()))
            assert read[since].replace("", None).isna().all(axis=None)
            there = read[written.columns]
            pd.testing.assert_frame_equal(there, written, check_exact=True)
    assert report.provenance["ln_probe"] == "0.1.0"
    assert sum(text.startswith("Removing projection at every norm changes") for text in report.findings()) == 1
    assert not any(text.startswith("Freezing scaling") for text in report.findings())
    assert (report.causal["family"] == "primary").sum() == 4
    with pytest.raises(ValueError, match="did not keep the sums of sigma: make it again"):
        report.constants  # noqa: B018
    assert "one constant in the place of every sigma" in report.notes[-1]
    assert not any(note.startswith("causal: intervals come from") for note in report.notes)
    assert "`heads` and `keys` without scaling are of that constant, too" in report.notes[-1]
    assert report.attention(0).document()
    again = ln_probe.load_report(report.save(tmp_path / "again"))
    assert all(again.tables[n].equals(t) for n, t in report.tables.items())
    assert again.findings() == report.findings()


def test_reports_of_0_2_0_are_read(tmp_path: Path) -> None:
    """Made by the last commit of 0.2.0: one layer, two heads, two prompts of 6 tokens; norms, heads, sinks, effects."""
    folder = Path(__file__).parent / "report_0_2_0"
    report = ln_probe.load_report(folder)
    assert report.provenance["ln_probe"] == "0.2.0"
    assert len(report.causal_prompts) == 42
    assert set(report.causal["variant"]) == {"intact", "no_scaling", "no_projection", "both_removed"}
    for name, read in report.tables.items():
        if (folder / f"{name}.parquet").exists():
            written = pd.read_parquet(folder / f"{name}.parquet").replace({"variant": {"neither": "both_removed"}})
            assert len(read) == len(written)
            written = written.rename(columns={"p_adjusted": "p_sign"})
            assert set(written) <= set(read)
            same = [c for c in written if c not in ("p_sign", "p_mean")]  # Holm within families since
            pd.testing.assert_frame_equal(read[same], written[same], check_exact=True, check_dtype=False)
    assert (report.causal["family"] == "primary").sum() == 4
    again = ln_probe.load_report(report.save(tmp_path / "again"))
    assert all(again.tables[n].equals(t) for n, t in report.tables.items())
    assert again.findings() == report.findings()


@pytest.mark.slow
def test_columns_that_came_later_are_unknown_and_more_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An earlier ln_probe may have known fewer columns, a later one more."""
    folder = Path(shutil.copytree(OLD, tmp_path / "r"))
    heads = pd.read_parquet(folder / "heads.parquet")
    heads.drop(columns=["score_spread", "no_op"]).assign(extra=1.5).to_parquet(folder / "heads.parquet", index=False)
    report = ln_probe.load_report(folder)
    assert report.heads["score_spread"].isna().all()
    assert (report.heads["no_op"] == "").all()
    assert set(report.heads.columns) == {*heads.columns, *HEADS_LATER, "extra"}
    assert report.describe("heads").set_index("column").loc["extra", "meaning"].startswith("not described")
    monkeypatch.undo()
    assert "<svg" in report.to_html(tmp_path / "page.html").read_text()


@pytest.mark.parametrize("without", [SINCE_FAMILIES, [*SINCE_FAMILIES, "p_mean", "delta_loss_median"]])
def test_earlier_reports_get_the_statistics_of_this_version(without: list[str], tmp_path: Path) -> None:
    """From what every prompt gave; as they were, and not called significant, where that was not kept."""
    generator = np.random.default_rng(0)
    kept = [
        {"prompt": i, "sites": sites, "variant": "no_scaling", "predicted": 20 + i, "loss": 3.0, "delta_loss": change}
        for sites, size in (("all", 0.5), ("attention", 0.03))
        for i, change in enumerate(size + generator.normal(0, 0.1, 40))
    ]
    by_prompt = CAUSAL_PROMPTS.frame([row | {"group": row["prompt"]} for row in kept])
    groups = by_prompt.groupby("sites", sort=False)
    means = [float(np.average(r["delta_loss"], weights=r["predicted"])) for _, r in groups]
    effects = [
        {"sites": s, "variant": v, "family": family(s, v), "loss": 3.0 + d, "delta_loss": d, "delta_loss_low": d - w,
         "delta_loss_high": d + w, "prompts_worse": 39, "p_sign": 0.001, "prompts": 40, "no_op": ""}
        for s, mean in zip(("all", "attention"), means, strict=True)
        for v, d, w in (("intact", 0.0, 0.0), ("no_scaling", mean, 0.01))
    ]  # fmt: skip
    now = Report(
        {"causal": CAUSAL.frame(effects), "causal_prompts": by_prompt},
        {"model": {"name": "old"}, "arguments": {"seed": 3}},
    )
    old = tmp_path / "old"
    without_columns(now.save(old), "causal", without)
    without_columns(old, "causal_prompts", ["group", "delta_loss_optimal"])
    read = ln_probe.load_report(old)
    assert any("its constants come from other text than its prompts, and intervals do not" in n for n in read.notes)
    rows = read.causal.set_index(["sites", "variant"])
    assert rows.loc[("all", "no_scaling"), "family"] == "primary"
    assert rows.loc[("all", "no_scaling"), "groups"] == 40
    assert rows.loc[("all", "intact"), "family"] == ""
    assert rows.loc[("all", "no_scaling"), "p_mean"] < 0.001
    assert rows.loc[("all", "no_scaling"), "delta_loss_low"] > 0.45
    assert rows.loc[("all", "intact"), "delta_loss_median"] == 0
    mine = by_prompt[by_prompt["sites"] == "all"]
    again = infer_mean((mine["delta_loss"] * mine["predicted"]).to_numpy(), mine["predicted"].to_numpy(float), seed=3)
    assert rows.loc[("all", "no_scaling"), "delta_loss_low"] == again.low
    assert rows.loc[("all", "no_scaling"), "equivalence_bound"] == again.bound
    assert "Freezing scaling at every norm raises the loss by" in read.findings()[0]
    assert ln_probe.load_report(read.save(tmp_path / "again")).causal.equals(read.causal)
    bare = tmp_path / "bare"
    without_columns(Report({"causal": now.causal}, now.provenance).save(bare), "causal", without)
    read = ln_probe.load_report(bare)
    assert read.causal["delta_loss_low"].equals(now.causal["delta_loss_low"])
    assert not any("intervals do not include" in note for note in read.notes)
    (text,) = read.findings()
    assert "Freezing scaling at every norm does not significantly change the loss (" in text
    assert text.count("; p not known)") == 2


def without_columns(folder: Path, table: str, columns: list[str]) -> None:
    """What an earlier version would have written: a table without columns, described and hashed so."""
    path = folder / f"{table}.parquet"
    pd.read_parquet(path).drop(columns=columns).to_parquet(path, index=False)
    about = json.loads((folder / "report.json").read_text())
    described = about["tables"][table]["columns"]
    about["tables"][table]["columns"] = [c for c in described if c["name"] not in columns]
    about["files"] = checksums(folder, list(about["files"]))
    about.pop(CHECKSUM)
    (folder / "report.json").write_bytes(with_checksum(about))


def test_unknown_tables_are_kept_and_shown(report: Report, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = pd.DataFrame({"word": ["a", "<u>"], "count": [1, 2]})
    loaded = ln_probe.load_report(replace(report, tables={**report.tables, "mine": mine}).save(tmp_path / "r"))
    pd.testing.assert_frame_equal(loaded.tables["mine"], mine)
    assert loaded.describe("mine")["dtype"].tolist() == ["text", "int"]
    pd.testing.assert_frame_equal(ln_probe.load_report(loaded.save(tmp_path / "s")).tables["mine"], mine)
    monkeypatch.undo()
    page = loaded.to_html(tmp_path / "page.html").read_text()
    assert 'id="table-mine"' in page
    assert "&lt;u&gt;" in page
    assert "<u>" not in page
    joined = ln_probe.compare([loaded, loaded], ["a", "b"])
    assert set(joined.tables) == {t.name for t in BUILT_IN}  # nobody said what tells its rows apart


WRONG: list[tuple[Callable[[Any], object], str]] = [
    (lambda r: r.with_tables(causal=pd.DataFrame({"a": [1]})), "table 'causal' lacks the column 'sites': it has a"),
    (lambda r: r.with_tables(nope=r.heads), "this report has no table 'nope' to replace: there are layernorms, heads"),
    (lambda r: r.with_tables(heads=3), "with_tables takes data frames, got int as heads"),
    (lambda r: r.with_notes("a", 3), "a note must be a text, got 3"),
    (lambda r: r.with_notes(["x"]), "a note must be a text, got a list"),
    (lambda r: r.describe([]), r"this report has no table \[\]: there are layernorms"),
    (lambda r: r.save(""), r"folder is empty: write \. for the current folder"),
    (lambda r: r.save(3), r"folder must be a text or a pathlib\.Path, got 3"),
    (lambda r: r.save("other", index=3), "index must be a text, got 3"),
    (lambda r: r.to_html(None), r"path must be a text or a pathlib\.Path, got None"),
    (lambda r: r.to_html(""), "path is empty"),
    (lambda r: r.to_html("page.html", index=3), "index must be a text, got 3"),
    (lambda r: r.to_html("."), r"\. is a folder: give a file, such as report\.html"),
    (lambda r: r.to_html("file/page.html"), r"file/page\.html cannot be written \((Not a directory|File exists)\)"),
    (lambda r: r.to_html("x" * 300), r"x+ cannot be written \(File name too long\): choose another path"),
    (lambda r: r.attention(text=" "), "text must hold some text, got ' '"),
    (lambda r: r.attention(text=3), "text must be a text, got 3"),
    (lambda r: r.attention(99, text="a"), "no layer 99: the model has layers 0 … 1"),
    (lambda r: r.attention(head=-1, text="a"), "no head -1: the model has heads 0 … 3"),
    (lambda r: r.attention(prompt=3, text="a"), "no prompt 3: text is prompt 0, and there is no other"),
    (lambda r: ln_probe.load_report(""), "folder is empty"),
    (lambda r: ln_probe.load_report(3), r"folder must be a text or a pathlib\.Path, got 3"),  # type: ignore[arg-type]
    (lambda r: ln_probe.load_report("nope"), r"nope does not exist: give the folder that Report\.save wrote"),
    (lambda r: ln_probe.load_report("file"), "file is a file: give the folder"),
    (lambda r: ln_probe.load_report("."), r"\. holds no report\.json: not a finished report's folder"),
    (lambda r: ln_probe.compare([r]).to_html(""), "path is empty"),
    (lambda r: ln_probe.compare([r]).to_html("."), r"\. is a folder: give a file"),
    (lambda r: r.attention().to_html(3), r"path must be a text or a pathlib\.Path, got 3"),
]


@pytest.mark.parametrize(("call", "said"), WRONG)
def test_wrong_arguments_leave_no_file(
    call: Callable[[Any], object], said: str, report: Report, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.chdir(tmp_path)
    with pytest.raises((ValueError, TypeError, OSError), match=said):
        call(report)
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize(("changes", "options", "said"), [
    ({}, {"index": 3}, "index must be a text, got 3"),
    ({"provenance": {"seen": {1}}}, {}, "set is not JSON serializable"),
    ({"tables": {"unembedding": pd.DataFrame({"token": [1, "a"]})}}, {}, "Conversion failed for column token"),
])  # fmt: skip
def test_a_save_that_fails_leaves_the_report_saved_before(
    changes: dict[str, Any], options: dict[str, Any], said: str, report: Report, tmp_path: Path
) -> None:
    folder = report.save(tmp_path / "r")
    before = sorted(folder.iterdir())
    with pytest.raises((ValueError, TypeError), match=said):
        replace(report, **changes).save(folder, **options)
    assert sorted(folder.iterdir()) == before
    pd.testing.assert_frame_equal(ln_probe.load_report(folder).heads, report.heads)


@pytest.mark.parametrize(("change", "said"), [
    (lambda t: t.drop(columns="layer"), r"heads\.parquet is damaged \(table 'heads' lacks the column 'layer'"),
    (lambda t: t.assign(keys="many"), r"heads\.keys is declared as int, and holds"),
    (lambda t: pd.concat([t, t]), "table 'heads' has two rows about the same thing"),
])  # fmt: skip
def test_tables_that_are_not_what_they_should_be(
    change: Callable[[pd.DataFrame], pd.DataFrame], said: str, report: Report, tmp_path: Path
) -> None:
    new = report.save(tmp_path / "new")
    listed = json.loads((new / "report.json").read_text())
    for folder in (new, Path(shutil.copytree(OLD, tmp_path / "old"))):
        file = folder / "heads.parquet"
        change(pd.read_parquet(file)).to_parquet(file, index=False)
        if folder == new:  # with a hash that is right, as a later version might have written it
            with pytest.raises(ValueError, match=r"heads\.parquet is damaged \(its content is not what was written\)"):
                ln_probe.load_report(folder)
            listed["files"][file.name] = sha256_of_file(file)
            (folder / "report.json").write_bytes(with_checksum({k: v for k, v in listed.items() if k != CHECKSUM}))
        with pytest.raises(ValueError, match=said):
            ln_probe.load_report(folder)


@pytest.mark.parametrize(("name", "folder"), [
    ("gpt2", "gpt2"), ("EleutherAI/pythia-70m", "EleutherAI-pythia-70m"), ("../..", "model"), ("a b\u00e9", "a-b"),
    ("</script>", "script"), ("..", "model"),
])  # fmt: skip
def test_slugs_are_plain_folder_names(name: str, folder: str) -> None:
    assert slug(name) == folder


def test_a_report_stays_where_another_cannot_be_saved(report: Report, tmp_path: Path) -> None:
    report.save(tmp_path / "kept")
    (tmp_path / "kept" / "heads.parquet").unlink()
    (tmp_path / "kept" / "heads.parquet").mkdir()
    before = (tmp_path / "kept" / "report.json").read_bytes()
    with pytest.raises(IsADirectoryError, match=r"heads\.parquet is a folder, but a file of the report"):
        report.save(tmp_path / "kept")
    assert (tmp_path / "kept" / "report.json").read_bytes() == before


def test_names_of_compared_reports_can_be_steps(report: Report) -> None:
    assert [*ln_probe.compare([report, report], names=[1000, 2000]).summary["model"]] == ["1000", "2000"]
    with pytest.raises(TypeError, match="names must be a list of texts"):
        ln_probe.compare([report, report], names={"before", "after"})  # type: ignore[arg-type]
