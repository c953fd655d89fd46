"""What holds of every architecture: terms add up, edits compose, single heads make the whole."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import pytest
import torch
from architectures import ARCHITECTURES, VOCAB, cases, make_bridge
from compose import distance

from ln_probe.hooks import find_norms, linearized, without
from ln_probe.hooks.norm import NormError

# A few that differ most: learned, rotary and ALiBi positions; parallel blocks, grouped keys, an encoder.
FAST = ("gpt2", "neox", "mistral", "mpt", "bert", "phi")
TOKENS = torch.randint(3, VOCAB, (2, 7), generator=torch.Generator().manual_seed(3))
# TransformerLens or transformers cannot run these; of these, a norm is unknown or runs twice in a pass.
NOT_RUN = ("falcon-40b", "gpt-bigcode-many-keys")
UNKNOWN = ("nanochat", *(["nemotron"] if version("transformer-lens").startswith("3.") else []))


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        result: torch.Tensor = model(TOKENS, return_type="logits")
    return result


@pytest.mark.parametrize("name", cases(*FAST, slow=[a for a in ARCHITECTURES if a not in (*FAST, *NOT_RUN)]))
def test_edits_of_an_architecture(name: str) -> None:
    model = make_bridge(name)
    if name in UNKNOWN:
        with pytest.raises(NormError):
            find_norms(model)
        return
    norms = find_norms(model)
    intact = logits(model)
    for norm in (n for n in norms if n.reads not in ("query", "key")):
        x = 3 * torch.randn(2, 5, norm.d, generator=torch.Generator().manual_seed(1)) + 0.7
        with torch.no_grad():
            y = norm.module(x)
        assert distance(norm.decompose(x).total(), y.double()) < 1e-5, norm.name
    with linearized(model):
        assert distance(logits(model), intact) < 5e-5
    scale = {n.name: (3.0, 2.0) for n in norms}
    read = [n.name for n in norms if "attention" in n.reads.split("+")]
    rest = [n.name for n in norms if n.name not in read and (n.projects or n.scales)]
    if not read:
        return
    alone = all(n.reads == "attention" and n.attention_layers == (n.layer,) for n in norms if n.name in read)
    with without(model, "scaling", scale=scale, sites=read):
        attention = logits(model)
        with without(model, "scaling", scale=scale, sites=rest):
            nested = logits(model)
    with without(model, "scaling", scale=scale, sites=[*read, *rest]):
        assert torch.equal(logits(model), nested)
    assert torch.equal(logits(model), intact)
    layers = [layer for n in norms for layer in n.attention_layers]
    every = [(layer, head) for layer in layers for head in range(int(model.cfg.n_heads))]
    with without(model, "scaling", scale=scale, heads=every):
        assert not alone or distance(logits(model), attention) < 1e-4
