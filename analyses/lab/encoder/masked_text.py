"""Masked language modelling: some tokens of a window are hidden, and the encoder says which they were.

After Devlin et al. 2019, section 3.1: 15 % of the tokens are chosen; of these 80 % become a mask, 10 % another token
drawn at random, 10 % stay. The boundary at the beginning of a window (BERT's [CLS]) is never chosen.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from ln_probe.analyses.lab.text_task import TextTask
from ln_probe.analyses.lab.training import step_generator
from ln_probe.analyses.lab.transformer import LabTransformer

CHOSEN, MASKED, REPLACED = 0.15, 0.8, 0.1  # published
MASKS = 1_000_003  # added to a seed: masks are drawn apart from windows
HELD_OUT_MASKS = -1  # the step whose generator draws the masks of held-out windows


@dataclass(frozen=True)
class Masked:
    """Windows with some tokens hidden.

    Attributes:
        tokens: what the encoder sees.
        places: which positions were chosen, as many in every window.
        targets: the tokens that stood there.
    """

    tokens: Int[Tensor, "batch pos"]
    places: Int[Tensor, "batch chosen"]
    targets: Int[Tensor, "batch chosen"]


def masked(windows: Int[Tensor, "batch pos"], mask: int, generator: torch.Generator) -> Masked:
    """Hide tokens of windows.

    Args:
        windows: tokens, below `mask`; the first of each is never chosen.
        mask: the token that hides.
        generator: draws places and what becomes of them.
    """
    count, length = windows.shape
    chosen = max(1, round(CHOSEN * (length - 1)))
    places = 1 + torch.rand((count, length - 1), generator=generator).topk(chosen, dim=1).indices
    targets = windows.gather(1, places)
    fate = torch.rand(places.shape, generator=generator)
    drawn = torch.randint(mask, places.shape, generator=generator)
    seen = torch.where(fate < MASKED, mask, torch.where(fate < MASKED + REPLACED, drawn, targets))
    return Masked(windows.scatter(1, places, seen), places, targets)


class MaskedTextTask:
    """Masked windows of text; the vocabulary is the text's and a mask, which is its last token.

    Args:
        text: windows of training and held-out text.
    """

    name = "masked_language_model"

    def __init__(self, text: TextTask) -> None:
        self.text = text
        self.mask = text.d_vocab

    @property
    def identity(self) -> dict[str, Any]:
        return {**self.text.identity, "chosen": CHOSEN, "masked": MASKED, "replaced": REPLACED}

    def batch(self, step: int, size: int, seed: int) -> Masked:
        return masked(self.text.batch(step, size, seed), self.mask, step_generator(MASKS + seed, step))

    def held_out(self, count: int) -> Masked:
        """Windows of the held-out text, with the same masks every time."""
        return masked(self.text.held_out(count), self.mask, step_generator(MASKS, HELD_OUT_MASKS))

    def logits(self, model: nn.Module, batch: Masked) -> Float[Tensor, "batch chosen d_vocab"]:
        """Of the chosen positions alone."""
        lab = cast("LabTransformer", model)
        stream = lab.stream(batch.tokens)
        at = stream.gather(1, batch.places[..., None].expand(-1, -1, stream.shape[-1]))
        found: Tensor = lab.unembed(at)
        return found

    def loss(self, model: nn.Module, batch: Masked) -> Float[Tensor, ""]:
        """Mean cross-entropy of the chosen tokens, in nats."""
        return F.cross_entropy(self.logits(model, batch).flatten(0, 1), batch.targets.flatten())

    @torch.no_grad()
    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Loss and accuracy on the chosen tokens of held-out windows."""
        held = self.held_out(self.text.valid_windows)
        logits, targets = self.logits(model, held).flatten(0, 1), held.targets.flatten()
        right = float((logits.argmax(-1) == targets).double().mean())
        return {"valid_loss": float(F.cross_entropy(logits, targets)), "valid_accuracy": right}

    def unigram_loss(self) -> float:
        """What the training text's token frequencies alone (each counted once more) give on these held-out tokens."""
        counts = 1.0 + torch.bincount(self.text.train_tokens, minlength=self.text.d_vocab).double()
        targets = self.held_out(self.text.valid_windows).targets.flatten()
        return float(-(counts / counts.sum()).log()[targets].mean())

    def write_files(self, out: Path) -> None:
        self.text.write_files(out)
