"""Reports are saved whole and load as they were; damaged folders are named."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest

import ln_probe
from ln_probe.analyses.tables import BUILT_IN
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
    with pytest.raises(ValueError, match="has format 99, this ln_probe reads 3"):
        ln_probe.load_report(folder)


@pytest.mark.parametrize(("name", "folder"), [
    ("gpt2", "gpt2"), ("EleutherAI/pythia-70m", "EleutherAI-pythia-70m"), ("../..", "model"), ("a b\u00e9", "a-b"),
    ("</script>", "script"), ("..", "model"),
])  # fmt: skip
def test_slugs_are_plain_folder_names(name: str, folder: str) -> None:
    assert slug(name) == folder
