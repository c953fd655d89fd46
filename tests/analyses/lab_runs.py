"""Experiments of the laboratory run from end to end, and the relative transformer by its definition."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch

from ln_probe.analyses.lab.approximation.relative import D_HEAD
from ln_probe.analyses.lab.experiments import Request, run
from ln_probe.analyses.lab.results import Results


def ran(experiment: str, out: Path, seeds: tuple[int, ...] = (0, 1), **options: Any) -> Results:
    """Results of an experiment's quick form, in the folder `out`; options go to Request."""
    request = Request(out, seeds, **({"quick": True, "progress": False} | options))
    return run(experiment, request, command="", ln_probe_version="0")


def by_definition(model: Any, x: torch.Tensor) -> torch.Tensor:
    """A RelativeTransformer through the whole attention row of the last position."""
    pre = model.cfg.norm_order == "pre"
    stream = model.embed[(x > 0).long()]
    read = model.norm_attention(stream) if pre else stream
    score = model.lag_bias().flip(1).expand(len(x), -1, -1)  # [batch head pos]
    if model.cfg.dot_product:
        query = torch.einsum("bd,hde->bhe", read[:, -1], model.W_Q)
        score = score + torch.einsum("bhe,bsd,hde->bhs", query, read, model.W_K) / math.sqrt(D_HEAD)
    z = torch.einsum("bhs,bsd,hde->bhe", score.softmax(-1), read, model.W_V)
    last = stream[:, -1] + torch.einsum("bhe,hed->bd", z, model.W_O)
    last = last if pre else model.norm_attention(last)
    if model.ffn is not None:
        last = last + model.ffn(model.norm_ffn(last) if pre else last)
    last = last if pre else model.norm_ffn(last)
    return model.out(last).squeeze(-1)
