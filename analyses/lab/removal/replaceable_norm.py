"""A language model whose LayerNorms can be replaced by constants, one by one, while it trains.

    LAYERNORM      Px / sigma
    TWO_CONSTANTS  Px / c0 at position 0, Px / c elsewhere: the mean sigmas that the norm had before it was replaced
    ONE_CONSTANT   Px / c everywhere: what the norm-free GPT-2s of Heimersheim 2024 and Baroni et al. 2025 compute

Gain and bias stay, and are trained on. Position 0 is apart at first because attention sinks live there.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from ln_probe.analyses.lab.norms import Norm
from ln_probe.analyses.lab.run_folder import MODEL_FILE
from ln_probe.analyses.lab.training import load_run
from ln_probe.analyses.lab.transformer import Block, LabTransformer

LAYERNORM, TWO_CONSTANTS, ONE_CONSTANT = range(3)
# Weight of a new batch in the running means of sigma: some ten batches (20,000 tokens at the full size), which holds
# the mean of the last layer's sigma (whose spread over tokens is a quarter of it) to a fraction of a per cent.
MEMORY = 0.1


class ReplaceableNorm(nn.Module):
    """LayerNorm that follows its own mean sigmas while it trains, and divides by them once it is replaced."""

    stage: Tensor
    first: Float[Tensor, ""]
    rest: Float[Tensor, ""]
    seen: Tensor

    def __init__(self, norm: Norm) -> None:
        """Take over gain and bias of a LayerNorm with both, at the usual radius.

        Raises:
            ValueError: another norm.
        """
        super().__init__()
        if norm.kind != "layernorm" or norm.w is None or norm.b is None or norm.radius != math.sqrt(norm.d_model):
            raise ValueError(f"only a LayerNorm with gain and bias can be replaced here, not {norm.extra_repr()}")
        self.d_model, self.eps = norm.d_model, norm.eps
        self.w, self.b = norm.w, norm.b
        for name in ("first", "rest"):
            self.register_buffer(name, torch.zeros(()))
        for name in ("stage", "seen"):
            self.register_buffer(name, torch.zeros((), dtype=torch.int64))

    def follow(self, x: Float[Tensor, "batch pos d_model"]) -> None:
        """Take a batch into the running means of sigma at position 0 and elsewhere."""
        sigma = (x.detach().var(-1, correction=0) + self.eps).sqrt()
        weight = max(MEMORY, 1 / (int(self.seen) + 1))
        for mean, part in ((self.first, sigma[:, 0]), (self.rest, sigma[:, 1:])):
            mean.lerp_(part.mean(), weight)
        self.seen += 1

    def forward(self, x: Float[Tensor, "batch pos d_model"]) -> Float[Tensor, "batch pos d_model"]:
        if self.stage == LAYERNORM:
            if self.training and torch.is_grad_enabled():
                self.follow(x)
            return F.layer_norm(x, (self.d_model,), self.w, self.b, self.eps)
        divisor = self.rest.repeat(x.shape[1])
        if self.stage == TWO_CONSTANTS:
            divisor[0] = self.first
        return (x - x.mean(-1, keepdim=True)) / divisor[:, None] * self.w + self.b


def replaceable_norms(model: LabTransformer) -> list[ReplaceableNorm]:
    """Norms in the order in which they are replaced: those of the MLPs, those of attention, the final one.

    (Heimersheim 2024, whose order this is: norms of MLPs cost least.)
    """
    blocks = [cast("Block", block) for block in model.blocks]
    found = [*(block.ln2 for block in blocks), *(block.ln1 for block in blocks), model.ln_final]
    return [cast("ReplaceableNorm", norm) for norm in found]


def make_replaceable(model: LabTransformer) -> LabTransformer:
    """The model itself, with a ReplaceableNorm in the place of each of its LayerNorms; it computes what it did."""
    for block in (cast("Block", b) for b in model.blocks):
        block.ln1, block.ln2 = (ReplaceableNorm(cast("Norm", norm)) for norm in (block.ln1, block.ln2))
    model.ln_final = ReplaceableNorm(cast("Norm", model.ln_final))
    return model


def plain(model: LabTransformer) -> LabTransformer:
    """The same function as an ordinary lab model, which `analyze` takes: LayerNorm everywhere or one constant a norm.

    Raises:
        ValueError: some norms are replaced and others are not, or position 0 still has constants of its own.
    """
    stages = {int(norm.stage) for norm in replaceable_norms(model)}
    kinds = {LAYERNORM: "layernorm", ONE_CONSTANT: "projection_only"}
    if len(stages) > 1 or not stages <= set(kinds):
        raise ValueError(f"norms at stages {sorted(stages)}: only all at {LAYERNORM} or all at {ONE_CONSTANT} is plain")
    kind = kinds[stages.pop()]
    weights = {}
    for name, value in model.state_dict().items():
        owner, leaf = name.rsplit(".", 1)
        if leaf == "rest" and kind == "projection_only":
            weights[f"{owner}.divisor"] = value
        if leaf not in ("first", "rest", "stage", "seen"):
            weights[name] = value
    made = LabTransformer(
        replace(model.cfg, norm=kind, norm_mlp=kind, norm_final=kind, divisor=None), tokenizer=model.tokenizer
    )
    made.load_state_dict(weights)
    return made.eval()


@dataclass(frozen=True)
class Start:
    """The trained model that norms are taken out of: the folder of a lab run."""

    folder: Path

    def build(self) -> LabTransformer:
        return make_replaceable(load_run(self.folder)).train()

    def to_dict(self) -> dict[str, Any]:
        weights = (self.folder / MODEL_FILE).read_bytes()
        return {"start": self.folder.name, "sha256": hashlib.sha256(weights).hexdigest()}


@dataclass(frozen=True)
class Schedule:
    """When the norms go: the i-th is replaced at `first + i every`, and its position 0 joins the others later.

    Attributes:
        first, every: steps.
        joined_every: steps between norms at which position 0 gives up its constant, after all are replaced.
    """

    first: int
    every: int
    joined_every: int

    def replaced(self, norms: int) -> int:
        """The step at which all norms are replaced."""
        return self.first + norms * self.every

    def over(self, norms: int) -> int:
        """The step from which on nothing is replaced any more."""
        return self.replaced(norms) + norms * self.joined_every

    def set_stages(self, norms: Sequence[ReplaceableNorm], step: int) -> None:
        """What each norm computes at a step."""
        for i, norm in enumerate(norms):
            joined = step >= self.replaced(len(norms)) + i * self.joined_every
            gone = step >= self.first + i * self.every
            norm.stage.fill_(ONE_CONSTANT if joined else TWO_CONSTANTS if gone else LAYERNORM)
