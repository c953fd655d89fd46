"""Holding sigma: which sigmas, models and tokens are refused, and a lost edit. (Gradients: test_edit_formulas.py.)"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small_models import lab

from ln_probe.hooks import InterventionError, LostEditError, find_norms, linearized

TOKENS = torch.arange(1, 21).view(2, 10)

pytestmark = pytest.mark.filterwarnings("ignore::ln_probe.hooks.edits.NoOpWarning")


def test_sigmas_of_other_tokens_are_refused(worlds: list[tuple[str, Any]]) -> None:
    for _, model in worlds:
        sigmas = linearized.sigmas(model, TOKENS.flip(1))
        assert set(sigmas) == {s.name for s in find_norms(model)}
        said = r"sigma was given for tokens \[2, 10\], and the norm's input is"
        with pytest.raises(InterventionError, match=said), linearized(model, sigma=sigmas):
            model(TOKENS[:, :5])
        for few in ({n: s[0, :2] for n, s in sigmas.items()}, {n: s[:, :1] for n, s in sigmas.items()}):
            with pytest.raises(InterventionError, match="was given for tokens"), linearized(model, sigma=few):
                model(TOKENS)  # (of two tokens, for two prompts; of one token, for all)


def test_a_lost_edit_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    model = lab()
    block = model.blocks[1]
    monkeypatch.setattr(block, "forward", lambda resid: resid)  # a block that calls none of its norms
    with pytest.raises(LostEditError, match=r"blocks.1.ln1"), linearized(model):
        pass


def test_what_cannot_be_held() -> None:
    model = lab()
    good = linearized.sigmas(model, TOKENS)
    for sigma, word in (
        (None, "got None"), ("frozen", "mapping"), ({"blocks.9.ln1": good["ln_final"]}, "blocks.9.ln1"),
        ({"ln_final": -good["ln_final"]}, "positive"), ({"ln_final": 3.0}, "tensor"),
    ):  # fmt: skip
        with pytest.raises(InterventionError, match=word), linearized(model, sigma=sigma):  # type: ignore[arg-type]
            pass
    said = r"blocks.0.ln1 is already under linearized"
    with linearized(model), pytest.raises(InterventionError, match=said), linearized(model):
        pass
    bare = lab(norm=None, norm_mlp=None, norm_final=None)
    with pytest.raises(InterventionError, match="linear"), linearized(bare):
        pass


def test_tokens_that_are_none_are_refused() -> None:
    model = lab()
    for tokens, word in (
        ("a text", "list of rows"), (torch.tensor([1, 99]), "vocabulary"), (torch.ones(40).long(), "context"),
        (torch.ones(0).long(), "int64"), (torch.ones(1, 1, 1).long(), "int64"), (torch.ones(3), "float32"),
        ([[1, 2], [3]], "length"), (torch.tensor([-1, 2]), "token id -1"),
    ):  # fmt: skip
        with pytest.raises((TypeError, ValueError), match=word):
            linearized.sigmas(model, tokens)
