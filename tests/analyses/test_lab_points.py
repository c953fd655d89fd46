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
    point = kind()
    point.add_hook(lambda value, hook: 2 * value + (hook is point))
    point.add_hook(lambda value, hook: 2 * value + 10, prepend=True)
    point.add_hook(lambda value, hook: None)
    point.add_hook(lambda value, hook: 2 * value + 100, is_permanent=True)
    assert float(point(torch.tensor(3.0))) == 2 * (2 * (2 * 3 + 10) + 1) + 100
    point.remove_hooks()
    assert [one.is_permanent for one in point.fwd_hooks] == [True]
    assert float(point(torch.tensor(3.0))) == 106


def test_a_plain_tokenizer_reads_prompts_as_transformers_does(prose: Path, tmp_path: Path) -> None:
    TextTask([prose], 300, 16).write_files(tmp_path)
    given = {"tokenizer_file": str(tmp_path / "tokenizer.json"), "bos_token": TEXT_BOUNDARY, "eos_token": TEXT_BOUNDARY}
    plain, theirs = points.PlainTokenizer(**given), points.tokenizer_class()(**given)
    assert type(theirs) is PreTrainedTokenizerFast
    text = f"{TEXT_BOUNDARY}was lit, and “it” came home"
    assert plain(text)["input_ids"] == theirs(text)["input_ids"]
    assert plain.decode(theirs(text)["input_ids"]) == text
    assert all(getattr(plain, f"{t}_token_id") == getattr(theirs, f"{t}_token_id") for t in ("bos", "eos", "pad"))


def test_transformer_lens_is_left_out_before_the_first_model(monkeypatch: pytest.MonkeyPatch) -> None:
    points.leave_out_transformer_lens()  # too late: models are there
    assert points.HookPoint is HookPoint
    monkeypatch.delitem(sys.modules, "ln_probe.analyses.lab.transformer")
    for name in ("HookPoint", "HookedRootModule"):
        monkeypatch.setitem(vars(points), name, None)
    monkeypatch.setattr(points, "tokenizer_class", points.tokenizer_class)
    try:
        points.leave_out_transformer_lens()
        assert points.HookPoint.__name__ == "HookPoint"
    finally:
        points.PlainPoint.__name__ = "PlainPoint"
    assert points.tokenizer_class() is points.PlainTokenizer
    root = points.HookedRootModule()
    root.inner = torch.nn.Sequential(torch.nn.Linear(2, 2), points.HookPoint())
    root.setup()
    assert {name: point.name for name, point in root.hook_dict.items()} == {"inner.1": "inner.1"}
    with pytest.raises(AttributeError, match="Hooked"):
        _ = points.Hooked
