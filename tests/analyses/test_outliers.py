"""Tokens and dimensions that are planted are found, with what wrote them; none are found where there are none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from architectures import make_bridge
from torch import Tensor

import ln_probe
from ln_probe.analyses.lab.norms import calibrate
from ln_probe.analyses.lab.transformer import LabConfig, LabTransformer
from ln_probe.analyses.probes.outliers import LEAST_TOKENS, PromptOutliers, outlier_tokens
from ln_probe.hooks.norm import Norm
from ln_probe.hooks.norms import find_norms
from ln_probe.hooks.stream import stream


def random_model(seed: int) -> LabTransformer:
    """A small model of random shape and norm, with weights of ordinary size."""
    torch.manual_seed(seed)
    norm = ("layernorm", "scaling_only", "projection_only", "none")[seed % 4]
    positions = ("learned", "none", "rotary", "sinusoidal")[seed // 4 % 4]
    width = (16, 32, 48)[seed % 3]
    config = LabConfig(1 + seed % 2, width, 2, 40, 24, norm=norm, positions=positions)
    model = config.build()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.mul_(1 + 4 * torch.rand(()))
            elif name.endswith((".w", ".b")):
                parameter.add_(0.2 * torch.randn_like(parameter))
    with calibrate(model):
        model(prompt(seed)[None])
    return model.eval()


def prompt(seed: int) -> Tensor:
    """Twenty tokens of forty, number 39 not among them."""
    return torch.randint(39, (20,), generator=torch.Generator().manual_seed(seed))


def looked_at(model: LabTransformer, sites: list[Norm], tokens: Tensor) -> tuple[PromptOutliers, list[int]]:
    """What is found in one prompt, and the outliers at its first norm."""
    found, at_first = PromptOutliers(sites), list[int]()

    def look(site: Norm, x: Tensor, y: Tensor) -> None:
        sizes = found.add(site, x, y)
        if site is sites[0] and sizes is not None:
            at_first.extend(sizes.outlier.nonzero().flatten().tolist())

    stream(model, tokens, sites, on_norm=look)
    return found, at_first


@pytest.mark.parametrize("seeds", [range(5), pytest.param(range(5, 50), marks=pytest.mark.slow)], ids=["few", "all"])
def test_what_is_planted_is_found_and_nothing_else(seeds: range) -> None:
    """In 50 random models: nothing as they are; one token, or one dimension, of the embedding × 1000, always."""
    for seed in seeds:
        model, tokens = random_model(seed), prompt(seed)
        sites, weights = find_norms(model), model.embed.W_E.detach().clone()
        found, _ = looked_at(model, sites, tokens)
        assert (found.found, found.dimensions) == ({}, {}), seed
        assert not found.massive.any(), seed
        at = seed % len(tokens)
        tokens[at] = 39
        with torch.no_grad():
            model.embed.W_E[39] *= 1000
        found, at_first = looked_at(model, sites, tokens)
        assert at_first == [at], seed
        # (Without scaling, tokens that attend to it become outliers behind the first norm.)
        assert (found.found[at].emerges_at, found.found[at].writer) == (sites[0].name, "the embedding"), seed
        dimension = 3 * seed % model.cfg.d_model
        with torch.no_grad():
            model.embed.W_E.copy_(weights)[:, dimension] *= 1000
        found, _ = looked_at(model, sites, prompt(seed))
        assert {d for site, d in found.dimensions if site == sites[0].name} == {dimension}, seed


def test_a_mask_of_rows_of_several_lengths() -> None:
    model, rows = random_model(0), [prompt(0), prompt(0)[:-3], prompt(0)[: LEAST_TOKENS - 1]]
    for row in rows:
        row[2] = 39
    with torch.no_grad():
        model.embed.W_E[39] *= 1000
    mask = outlier_tokens(model, rows).mask
    assert mask.nonzero().tolist() == [[0, 2], [1, 2]], "a few tokens have no median"


def added_at(position: int, dimension: int, size: float) -> Callable[..., Tensor]:
    def hook(x: Tensor, hook: Any) -> Tensor:
        out = x.clone()
        out[:, position, dimension] += size
        return out

    return hook


@pytest.mark.parametrize(("arch", "place", "site", "writer"), [
    ("gpt2", "blocks.0.hook_mlp_out", "blocks.1.ln1", "the mlp of block 0"),
    ("gpt2", "blocks.1.hook_attn_out", "blocks.1.ln2", "the attention of block 1"),
    ("llama", "blocks.1.hook_mlp_out", "ln_final", "the mlp of block 1"),
    ("neox", "blocks.0.hook_attn_out", "blocks.1.ln1", "the attention of block 0 and the mlp of block 0"),
])  # fmt: skip
def test_what_wrote_it(arch: str, place: str, site: str, writer: str) -> None:
    model, tokens = make_bridge(arch), torch.arange(1, 21)
    sites = find_norms(model)
    found = PromptOutliers(sites)
    with model.hooks(fwd_hooks=[(place, added_at(7, 5, 1e5))]):
        stream(model, tokens, sites, on_norm=lambda s, x, y: found.add(s, x, y) and None)
    assert list(found.found) == [7]
    one = found.found[7]
    assert (one.emerges_at, one.writer) == (site, writer)
    assert one.writer_share == pytest.approx(1.0, abs=0.02)
    assert one.dimensions.startswith("5 (")
    assert found.massive.nonzero().flatten().tolist() == [7]


def test_sizes_are_those_of_the_norms() -> None:
    model, tokens = random_model(0), prompt(0)
    found = outlier_tokens(model, tokens[None])
    with torch.no_grad():
        _, cache = model.run_with_cache(tokens[None])
    x = cache["blocks.0.hook_resid_pre"][0]
    torch.testing.assert_close(found.before["blocks.0.ln1"][0], x.norm(dim=-1))
    torch.testing.assert_close(found.sigma["blocks.0.ln1"][0], cache["blocks.0.ln1.hook_scale"][0, :, 0])
    torch.testing.assert_close(found.after["blocks.0.ln1"][0], model.blocks[0].ln1(x).norm(dim=-1))
    length = (x - x.mean(-1, keepdim=True)).norm(dim=-1)
    torch.testing.assert_close(found.ratio["blocks.0.ln1"][0], length / length.median())


def test_what_is_no_tokens() -> None:
    with pytest.raises(ValueError, match="whole numbers"):
        outlier_tokens(random_model(0), torch.arange(4))
    with pytest.raises(TypeError, match="is not a TransformerLens model"):
        ln_probe.outlier_tokens(object(), torch.arange(4)[None])
