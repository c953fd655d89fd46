"""Plain hook points and the plain tokenizer beside TransformerLens's and transformers' own."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformer_lens.hook_points import HookPoint
from transformers import PreTrainedTokenizerFast

from ln_probe.analyses.lab import points
from ln_probe.analyses.lab.text_task import TextTask
from ln_probe.analyses.lab.train import TEXT_BOUNDARY


@pytest.mark.parametrize("kind", [points.PlainPoint, HookPoint])
def test_hooks_change_a_value_in_order(kind: type[Any]) -> None:
    point, seen = kind(), []

    def adding(number: float) -> Any:
        def hook(value: torch.Tensor, hook: Any) -> torch.Tensor | None:
            seen.append((number, hook is point))
            return 2 * value + number if number else None

        return hook

    point.add_hook(adding(1.0))
    point.add_hook(adding(10.0), prepend=True)
    point.add_hook(adding(0.0))
    point.add_hook(adding(100.0), is_permanent=True)
    assert float(point(torch.tensor(3.0))) == 2 * (2 * (2 * 3 + 10) + 1) + 100
    assert seen == [(10.0, True), (1.0, True), (0.0, True), (100.0, True)]
    assert [one.is_permanent for one in point.fwd_hooks] == [False, False, False, True]
    point.remove_hooks()
    assert len(point.fwd_hooks) == 1
    assert float(point(torch.tensor(3.0))) == 106


def test_a_plain_model_names_its_points() -> None:
    root = points.PlainRoot()
    root.inner = torch.nn.Sequential(points.PlainPoint(), torch.nn.Linear(2, 2))
    root.hook_end = points.PlainPoint()
    root.setup()
    assert {name: point.name for name, point in root.hook_dict.items()} == {
        "inner.0": "inner.0",
        "hook_end": "hook_end",
    }


def test_a_plain_tokenizer_reads_prompts_as_transformers_does(prose: Path, tmp_path: Path) -> None:
    TextTask([prose], 300, 16).write_files(tmp_path)
    names = {"bos_token": TEXT_BOUNDARY, "eos_token": TEXT_BOUNDARY}
    file = str(tmp_path / "tokenizer.json")
    plain, theirs = points.PlainTokenizer(file, **names), PreTrainedTokenizerFast(tokenizer_file=file, **names)
    text = f"{TEXT_BOUNDARY}was lit, and “it” came home"
    ids = theirs(text)["input_ids"]
    assert plain(text)["input_ids"] == ids
    assert plain.decode(ids) == theirs.decode(ids) == text
    assert (plain.bos_token_id, plain.eos_token_id, plain.pad_token_id) == (
        theirs.bos_token_id, theirs.eos_token_id, theirs.pad_token_id,
    )  # fmt: skip
    assert points.tokenizer_class() is PreTrainedTokenizerFast
    assert points.HookPoint is HookPoint


def test_transformer_lens_is_left_out_before_the_first_model(monkeypatch: pytest.MonkeyPatch) -> None:
    points.leave_out_transformer_lens()  # too late: models are there
    assert "HookPoint" not in vars(points)
    monkeypatch.delitem(sys.modules, "ln_probe.analyses.lab.transformer")
    for name in ("HookPoint", "HookedRootModule"):
        monkeypatch.setitem(vars(points), name, None)
    monkeypatch.setattr(points, "tokenizer_class", points.tokenizer_class)
    try:
        points.leave_out_transformer_lens()
        assert points.HookPoint.__name__ == "HookPoint"
    finally:
        points.PlainPoint.__name__ = "PlainPoint"
    assert (points.HookPoint, points.HookedRootModule) == (points.PlainPoint, points.PlainRoot)
    assert points.tokenizer_class() is points.PlainTokenizer
    with pytest.raises(AttributeError, match="Hooked"):
        _ = points.Hooked
