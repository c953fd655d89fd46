"""Item 5: queries moved towards the uniform direction and away from it, beside the same between random directions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from uniform_direction import DRAWS, Directions, alike, by_head, directions, measure

EDITS = ("away", "away_random", "towards", "towards_random")


class Moved(Directions):
    """Every edit takes the component of q along one direction and puts one of the same length along another.

    away: from the uniform direction to a random one. away_random: as much, from one random direction to another.
    towards: from a random direction to the uniform one (with the sign that q has along it). towards_random: the same
    component, to another random direction.
    """

    def edited(self, q: Tensor, edit: str, draw: int) -> Tensor:
        one, other = self.random[draw]
        if not edit.startswith("towards"):
            return super().edited(q, "redirected" if edit == "away" else "random_redirected", draw)
        length = self.along(q, one)
        goal, sign = (self.uniform, self.along(q, self.uniform).sign()) if edit == "towards" else (other, 1.0)
        return q - length[..., None] * one + (length.abs() * sign)[..., None] * goal


def outcomes(model: Any, prompts: Sequence[Sequence[int]]) -> Iterator[tuple[int, str, float]]:
    """Prompt number, measure, value: loss and entropy (sums over predicted tokens; means over draws), share, chance."""
    of = {layer: Moved(**vars(each)) for layer, each in directions(model).items()}
    chance = float(np.mean([1 / each.uniform.shape[-1] for each in of.values()]))
    for numbers in alike(prompts):
        rows = [prompts[number] for number in numbers]
        count = len(rows[0]) - 1
        intact = measure(model, of, rows, "intact")
        losses, entropies = {"intact": intact[0]}, {"intact": intact[1]}
        for edit in EDITS:
            draws = [measure(model, of, rows, edit, draw) for draw in range(DRAWS)]
            losses[edit] = np.mean([d[0] for d in draws], axis=0)
            entropies[edit] = np.mean([d[1] for d in draws], axis=0)
        for place, number in enumerate(numbers):
            yield number, "predicted", count
            yield number, "share", float(intact[2][place].mean())
            yield number, "chance", chance
            for edit, loss in losses.items():
                yield number, f"loss_{edit}", float(loss[place])
                yield number, f"entropy_{edit}", float(entropies[edit][place].mean()) * count


@torch.no_grad()
def shares(model: Any, prompts: Sequence[Sequence[int]]) -> Iterator[tuple[int, str, float]]:
    """Prompt number, measure, value: the share alone, for a model that has no loss."""
    of = directions(model)
    names = [f"blocks.{layer}.attn.hook_q" for layer in of]
    for number, row in enumerate(prompts):
        _, cache = model.run_with_cache(torch.tensor([row]), names_filter=names)
        queries = [
            by_head(cache[name], len(each.uniform)).double() for each, name in zip(of.values(), names, strict=True)
        ]
        each = [layer.share(q)[:, 1:].mean() for layer, q in zip(of.values(), queries, strict=True)]
        yield number, "share", float(np.mean(each))
        yield number, "chance", float(np.mean([1 / d.uniform.shape[-1] for d in of.values()]))
