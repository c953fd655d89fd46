"""What was reported to TransformerLens (docs/upstream) is still so; the day it is not, report and workaround go."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest
import torch

import ln_probe
from ln_probe.hooks import NotEquivalentError, check_equivalent, linearized

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


def test_what_the_reports_recommend_instead_works() -> None:
    """The same three models: the attribution adds up, the edit in place acts, the folded model is found out."""

    def of(name: str) -> dict[str, object]:
        with pytest.raises(AssertionError) as raised:
            runpy.run_path(str(FOLDER / f"{name}.py"))
        return raised.traceback[-1].frame.f_globals

    found = of("direct_logit_attribution")
    for model in found["models"].values():  # type: ignore[attr-defined]
        ln_probe.attribute_logits(model, found["tokens"], -1, target=7).check()
    found = of("edit_in_place")
    with torch.no_grad(), linearized(found["model"]):
        logits = found["model"].run_with_hooks(  # type: ignore[attr-defined]
            found["tokens"], fwd_hooks=[(found["name"], found["double_in_place"])]
        )
    assert float((logits - found["intact"]).abs().max()) == pytest.approx(found["moved"][0], rel=1e-3)  # type: ignore[index]
    found = of("fold_ln_square_mlp")
    with pytest.raises(NotEquivalentError):
        check_equivalent(found["original"], found["model"], found["tokens"][0])
