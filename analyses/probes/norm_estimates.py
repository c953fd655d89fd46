"""Second-order estimates of what an edit of one norm does to the loss: all norms and edits from one pass.

    estimate = Σ <g, Δ> + ½ Σ <s, Δ>²

over the vectors of a prompt, with Δ the change of the norm's output y in the intact model, g the gradient of the loss
at y, and s the same gradient if the next tokens were drawn from the model's own predictions. The first sum is the
first-order estimate of attribution patching (Nanda 2023; Kramár et al. 2024). Frozen scaling makes some vectors longer
and others shorter, so that this sum nearly cancels, while the loss rises all the same: it is at a minimum. The second
sum is that rise, the KL divergence from the intact predictions to second order (s sᵀ is the Fisher information in
expectation; Amari 1998), with vectors at different positions taken to be independent.

One forward and two backward passes, whatever the number of norms and edits.
"""

from __future__ import annotations

import zlib
from collections.abc import Hashable, Mapping
from typing import TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from ln_probe.hooks.edits import Edit, installed
from ln_probe.hooks.model import HookedModel, at_least_float32, device_of, evaluating
from ln_probe.hooks.norm import Site

PASSES = 3.0  # forward, and twice backward to the norms alone

_Key = TypeVar("_Key", bound=Hashable)


class _Recorder(Edit):
    """An edit that changes nothing, and keeps what the norm read and gave with a leaf for the gradient there.

    Attributes:
        seen: (input, output, leaf) of each call of the norm.
    """

    def __init__(self, site: Site) -> None:
        super().__init__(site, self._record, "recorded")
        self.seen: list[tuple[Tensor, Tensor, Tensor]] = []

    def _record(self, x: Float[Tensor, "*batch d"], y: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
        leaf = torch.zeros_like(y, requires_grad=True)
        self.seen.append((x.detach(), y.detach(), leaf))
        return y + leaf


def norm_estimates(
    model: HookedModel, tokens: Int[Tensor, " pos"], edits: Mapping[_Key, Edit]
) -> dict[_Key, tuple[float, float]]:
    """Return the estimated change of the summed next-token loss of one prompt under each edit of one norm.

    Tokens are drawn with a seed that is made of the prompt, so the result depends on the prompt alone.

    Args:
        model: any hooked model with a next-token loss.
        tokens: of the prompt.
        edits: by any key; those that ask where position 0 is must know that the batch is one prompt.

    Returns:
        Both sums for each key, in nats; nothing if the loss has no gradient at any norm.
    """
    recorders = {e.site.name: _Recorder(e.site) for e in edits.values()}
    rows = tokens[None].to(device_of(model))
    with evaluating(model), torch.enable_grad(), installed(model, list(recorders.values())):
        logits = at_least_float32(model(rows, return_type="logits"))[0, :-1]
        leaves = [leaf for recorder in recorders.values() for *_, leaf in recorder.seen]
        if not logits.requires_grad:
            return {}
        shares = logits.detach().softmax(-1).cpu()
        seed = zlib.crc32(tokens.cpu().numpy().astype(np.int64).tobytes())  # (one seed would give all the same draws)
        drawn = torch.multinomial(shares, 1, generator=torch.Generator().manual_seed(seed))[:, 0].to(logits.device)
        losses = [F.cross_entropy(logits, labels, reduction="sum") for labels in (rows[0, 1:], drawn)]
        found = [torch.autograd.grad(x, leaves, retain_graph=x is losses[0], allow_unused=True) for x in losses]
    if all(g is None or not bool(g.any()) for g in found[0]):
        return {}
    slopes = {id(leaf): pair for leaf, *pair in zip(leaves, *found, strict=True) if pair[0] is not None}
    estimates: dict[_Key, tuple[float, float]] = {}
    with torch.no_grad():
        for key, edit in edits.items():
            first, second = 0.0, torch.zeros(())
            for x, y, leaf in recorders[edit.site.name].seen:
                if id(leaf) in slopes:
                    change = at_least_float32(edit.change(x, y)) - at_least_float32(y)
                    own, of_drawn = (slope * change for slope in slopes[id(leaf)])
                    first += float(own.sum(dtype=torch.float64))
                    second = second.to(y.device) + of_drawn.sum(-1, dtype=torch.float64)  # all calls read one vector
            estimates[key] = first, 0.5 * float((second**2).sum())
    return estimates
