"""Reports are saved whole and load as they were; damaged folders are named."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest

import ln_probe
from ln_probe.analyses.machinery.plain_json import SEAL, sealed
from ln_probe.analyses.tables import BUILT_IN
from ln_probe.loading.provenance import sha256_of_file
from ln_probe.reporting.report import Report, slug


def test_saved_reports_load_as_they_were(report: Report, tmp_path: Path) -> None:
    folder = report.save(tmp_path / "r")
    loaded = ln_probe.load_report(folder)
    for table in (t.name for t in BUILT_IN):
        pd.testing.assert_frame_equal(getattr(loaded, table), getattr(report, table), check_dtype=False)
    assert dict(loaded.provenance) == json.loads(json.dumps(report.provenance))
    assert (loaded.notes, loaded.findings(), repr(loaded)) == (report.notes, report.findings(), repr(report))
    assert sorted(p.name for p in folder.iterdir()) == sorted(
        ["report.json", "report.html", "exhibits.npz", *(f"{t}.parquet" for t in (d.name for d in BUILT_IN))]
    )


def test_damaged_reports(report: Report, tmp_path: Path) -> None:
    folder = report.save(tmp_path / "r")
    kept = folder / "exhibits.npz"
    whole = kept.read_bytes()
    flipped = bytearray(whole)
    flipped[300:340] = bytes(40)
    for broken in (whole[: len(whole) // 2], whole[:-30], b"", b"not a zip", bytes(flipped)):
        kept.write_bytes(broken)
        with pytest.raises(ValueError, match=r"exhibits\.npz is damaged .*make the report again"):
            ln_probe.load_report(folder)
    kept.unlink()
    with pytest.raises(FileNotFoundError, match=r"exhibits\.npz is missing: make the report again"):
        ln_probe.load_report(folder)
    kept.write_bytes(whole)
    with pytest.raises(FileNotFoundError, match=r"holds no report\.json: not a finished report's folder"):
        ln_probe.load_report(tmp_path)
    heads = folder / "heads.parquet"
    content = heads.read_bytes()
    heads.write_bytes(content[: len(content) // 2])
    with pytest.raises(ValueError, match=r"heads\.parquet is damaged .*make the report again"):
        ln_probe.load_report(folder)
    heads.unlink()
    with pytest.raises(FileNotFoundError, match=r"heads\.parquet is missing: make the report again"):
        ln_probe.load_report(folder)
    (folder / "report.json").write_text('{"format": 2')
    with pytest.raises(ValueError, match=r"report\.json is damaged"):
        ln_probe.load_report(folder)
    (folder / "report.json").write_text('{"format": 99, "provenance": {}, "notes": []}')
    with pytest.raises(ValueError, match="has format 99, this ln_probe reads 2, 3, 4: make the report again"):
        ln_probe.load_report(folder)


OLD = Path(__file__).parent / "report_0_1_0"  # made by ln_probe 0.1.0: one layer, two heads, two prompts of 6 tokens


HEADS_LATER = [
    "queries",
    "keys_all",
    "prompts",
    "unselectable_fraction_low",
    "unselectable_fraction_high",
    "margin_median_low",
    "margin_median_high",
    "margin_p05_low",
    "margin_p05_high",
    "attainable_median_low",
    "attainable_median_high",
    "attainable_p05_low",
    "attainable_p05_high",
]
LATER = {  # columns that came since
    "heads": HEADS_LATER,
    "keys": ["attainable_upper", "judged_at"],
    "causal": ["delta_loss_uniform", "delta_loss_resampled", "prompts_worse", "p_adjusted", "divisor_first"],
}


def test_reports_of_0_1_0_are_read(tmp_path: Path) -> None:
    report = ln_probe.load_report(OLD)
    assert {n: len(t) for n, t in report.tables.items()} == {
        "layernorms": 3, "heads": 12, "keys": 92, "causal": 28, "causal_prompts": 0, "unembedding": 0,
        "head_effects": 0, "sinks": 0, "sink_heads": 0, "token_sizes": 0, "outlier_dimensions": 0,
    }  # fmt: skip
    for table in BUILT_IN:
        gone = ["delta_loss_tail"] if table.name == "causal" else []  # kept where it is known
        assert report.tables[table.name].columns.tolist() == [*table.names, *gone]
        if len(report.tables[table.name]):
            written = pd.read_parquet(OLD / f"{table.name}.parquet")
            since = [c for c in table.names if c not in written]
            assert since == LATER.get(table.name, [])
            read = report.tables[table.name]
            if table.name == "causal":  # its effects had one constant, and intervals that covered too little
                assert read[["delta_loss_low", "delta_loss_high"]].isna().all(axis=None)
                scaled = read["variant"].isin(["no_scaling", "neither"])
                for unknown in ("delta_loss", "loss", "kl", "top1_agreement", "entropy_change"):
                    assert (read[unknown].isna() == scaled).all()
                    if unknown != "delta_loss":
                        written = written.assign(**{unknown: written[unknown].where(~scaled)})
                read = read.assign(
                    delta_loss=read["delta_loss"].fillna(read["delta_loss_uniform"]), delta_loss_uniform=""
                )
                written = written.drop(columns=["delta_loss_low", "delta_loss_high"])
            assert read[since].replace("", None).isna().all(axis=None)
            there = read[written.columns]
            pd.testing.assert_frame_equal(there, written, check_exact=True)
    assert report.provenance["ln_probe"] == "0.1.0"
    assert any(text.startswith("Without projection at every norm") for text in report.findings())
    assert "one constant in the place of every sigma" in report.notes[-1]
    assert not any(note.startswith("causal: intervals come from") for note in report.notes)
    assert "`heads` and `keys` without scaling are of that constant, too" in report.notes[-1]
    assert report.attention(0).document()
    again = ln_probe.load_report(report.save(tmp_path / "again"))
    assert all(again.tables[n].equals(t) for n, t in report.tables.items())
    assert again.findings() == report.findings()


def test_columns_that_came_later_are_unknown_and_more_are_kept(tmp_path: Path) -> None:
    """An earlier ln_probe may have known fewer columns, a later one more."""
    folder = Path(shutil.copytree(OLD, tmp_path / "r"))
    heads = pd.read_parquet(folder / "heads.parquet")
    heads.drop(columns=["score_spread", "no_op"]).assign(extra=1.5).to_parquet(folder / "heads.parquet", index=False)
    report = ln_probe.load_report(folder)
    assert report.heads["score_spread"].isna().all()
    assert (report.heads["no_op"] == "").all()
    assert set(report.heads.columns) == {*heads.columns, *HEADS_LATER, "extra"}
    assert report.describe("heads").set_index("column").loc["extra", "meaning"].startswith("not described")
    assert "<svg" in report.to_html(tmp_path / "page.html").read_text()


def test_unknown_tables_are_kept_and_shown(report: Report, tmp_path: Path) -> None:
    mine = pd.DataFrame({"word": ["a", "<u>"], "count": [1, 2]})
    loaded = ln_probe.load_report(report.with_tables(mine=mine).save(tmp_path / "r"))
    pd.testing.assert_frame_equal(loaded.tables["mine"], mine)
    assert loaded.describe("mine")["dtype"].tolist() == ["text", "int"]
    page = loaded.to_html(tmp_path / "page.html").read_text()
    assert 'id="table-mine"' in page
    assert "&lt;u&gt;" in page
    assert "<u>" not in page
    pd.testing.assert_frame_equal(ln_probe.load_report(loaded.save(tmp_path / "s")).tables["mine"], mine)
    joined = ln_probe.compare([loaded, loaded], ["a", "b"])
    assert set(joined.tables) == {t.name for t in BUILT_IN}  # nobody said what tells its rows apart


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
            (folder / "report.json").write_bytes(sealed({k: v for k, v in listed.items() if k != SEAL}))
        with pytest.raises(ValueError, match=said):
            ln_probe.load_report(folder)


@pytest.mark.parametrize(("name", "folder"), [
    ("gpt2", "gpt2"), ("EleutherAI/pythia-70m", "EleutherAI-pythia-70m"), ("../..", "model"), ("a b\u00e9", "a-b"),
    ("</script>", "script"), ("..", "model"),
])  # fmt: skip
def test_slugs_are_plain_folder_names(name: str, folder: str) -> None:
    assert slug(name) == folder
