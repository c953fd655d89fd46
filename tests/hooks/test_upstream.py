"""What was reported to TransformerLens (docs/upstream) is still so; the day it is not, report and workaround go."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

pytestmark = pytest.mark.filterwarnings("ignore")  # of what becomes deprecated in TransformerLens
FOLDER = Path(__file__).resolve().parents[2] / "docs" / "upstream"
REPORTS = (FOLDER / "README.md").read_text(encoding="utf-8")
NUMBER = re.compile(r"-?\d+\.\d+")
STILL = {
    "direct_logit_attribution": "the sum of the attributions is not the logit",
    "edit_in_place": "the edit in place is lost",
    "fold_ln_square_mlp": "the folded model is another model",
}


def test_every_script_has_its_report() -> None:
    assert {p.stem for p in FOLDER.glob("*.py")} == STILL.keys() == set(re.findall(r"^`(\w+)\.py`\.", REPORTS, re.M))


@pytest.mark.parametrize("name", STILL)
def test_transformer_lens_still_does_this(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(AssertionError, match=STILL[name]):
        runpy.run_path(str(FOLDER / f"{name}.py"))
    for line in capsys.readouterr().out.splitlines():
        words = r"(-?\d+\.\d+)".join(map(re.escape, NUMBER.split(line)))
        (quoted,) = re.findall(rf"^    {words}$", REPORTS, re.M)
        quoted = [float(n) for n in ([quoted] if isinstance(quoted, str) else quoted)]
        assert quoted == pytest.approx([float(n) for n in NUMBER.findall(line)], abs=2e-3)
