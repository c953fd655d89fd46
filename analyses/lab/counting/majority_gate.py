"""A majority gate without training: LayerNorm of what attention averages.

Uniform attention over a prefix of length t gives (#a / t, #b / t). Projection off the ones-vector takes half the
difference, (d, -d) / (2t) with d = #a - #b; scaling divides by its size and leaves sign(d) (1, -1) whatever t is.
"""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from ln_probe.analyses.lab.norms import NORM_KINDS, SCALES, Norm

GATE_LENGTHS = (5, 15, 51, 151, 501, 1501, 5001)  # odd, so that one a more than b's is possible


def gate(shares: Float[Tensor, "*batch 2"], norm: str, eps: float = 0.0) -> Float[Tensor, "*batch 2"]:
    """The pair (#a, #b) / t after a norm without gain and bias; norms that do not scale divide by 1.

    Raises:
        ValueError: an unknown norm.
    """
    module = Norm(norm, 2, eps=eps, divisor=None if norm in SCALES else 1.0, gain=False, bias=False)
    with torch.no_grad():
        out: Tensor = module.to(shares.dtype)(shares)
    return out


def gate_table(lengths: Sequence[int] = GATE_LENGTHS, eps: float = 1e-5) -> pd.DataFrame:
    """What is left to tell #a = #b + 1 from #b = #a + 1 at each length.

    Columns: `norm, length, output`: half the difference between the two cases in the first coordinate, so 1 is a full
    gate and what is near 0 is hard to read. `eps` is torch's default.

    Raises:
        ValueError: a length that is not odd and positive.
    """
    rows = []
    for norm in NORM_KINDS:
        for length in lengths:
            if length < 1 or length % 2 == 0:
                raise ValueError(f"lengths must be odd and positive, got {length}: of an even one no half is one more")
            more, less = (length + 1) / (2 * length), (length - 1) / (2 * length)
            pairs = torch.tensor([[more, less], [less, more]], dtype=torch.float64)
            out = gate(pairs, norm, eps)
            rows.append((norm, length, float(out[0, 0] - out[1, 0]) / 2))
    return pd.DataFrame(rows, columns=["norm", "length", "output"])
