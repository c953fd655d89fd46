"""What README and the site show as Python runs as it stands, block after block of a page."""

from __future__ import annotations

import re
from pathlib import Path

import matplotlib as mpl
import pytest

TOP = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.M | re.S)
PAGES = {page: BLOCK.findall(page.read_text()) for page in (TOP / "README.md", *sorted((TOP / "docs").glob("*.md")))}
SHOWN = [page for page, blocks in PAGES.items() if blocks]


@pytest.mark.slow
@pytest.mark.parametrize("page", SHOWN, ids=lambda page: page.stem)
def test_d7_the_code_of_a_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    mpl.use("Agg")
    names: dict[str, object] = {"__name__": "__main__"}
    for number, block in enumerate(PAGES[page], start=1):
        exec(compile(block, f"{page.name}, block {number}", "exec"), names)


def test_d7_the_readme_is_short_and_begins_with_what_to_type() -> None:
    text = (TOP / "README.md").read_text()
    assert len(text.splitlines()) <= 150
    begin = text[: text.index("\n## ")]
    places = [begin.index(said) for said in ("pip install ln-probe", "make report", "](examples/report.png)")]
    assert places == sorted(places)
    code = BLOCK.findall(text)[0].splitlines()
    assert len([line for line in code if line.strip()]) <= 10


def test_pages_link_to_what_is_there() -> None:
    missing = []
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text()):
            if not re.match(r"[a-z]+:", target) and not (page.parent / target).exists():
                missing.append(f"{page.name}: {target}")
    assert not missing


def test_every_page_is_in_the_sites_contents() -> None:
    listed = set(re.findall(r"^(\w+)$", (TOP / "docs" / "index.md").read_text(), re.M))
    assert {p.stem for p in PAGES if p.parent.name == "docs"} - {"index"} == listed
