"""Every norm of a model: what it computes, who reads it, in what state it is."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from small_models import lab

from ln_probe.analyses.lab.norms import NORM_KINDS, Norm
from ln_probe.hooks.norm import SiteError
from ln_probe.hooks.sites import facts_of, find_sites

PRE_NORM = [("blocks.0.ln1", "attention"), ("blocks.0.ln2", "mlp"), ("blocks.1.ln1", "attention"),
            ("blocks.1.ln2", "mlp"), ("ln_final", "unembed")]  # fmt: skip
KIND = {"gpt2": "layernorm", "neox": "layernorm", "opt": "layernorm", "neo": "layernorm", "llama": "rmsnorm",
        "gemma": "rmsnorm", "qwen3": "rmsnorm"}  # fmt: skip


@pytest.mark.parametrize("arch", KIND)
def test_bridge_sites(arch: str, make_bridge: Callable[..., Any]) -> None:
    sites = [s for s in find_sites(make_bridge(arch)) if s.reads not in ("query", "key")]
    assert [(s.name, s.reads) for s in sites] == PRE_NORM
    assert {s.kind for s in sites} == {KIND[arch]}
    assert [s.layer for s in sites] == [0, 0, 1, 1, 2]
    assert {s.state for s in sites} == {"raw"}


@pytest.mark.parametrize("arch", KIND)
def test_parameters_are_the_ones_that_act(arch: str, make_bridge: Callable[..., Any]) -> None:
    """Site.affine and Site.sigma reproduce the module, whatever it stores (Gemma: gain - 1)."""
    model = make_bridge(arch)
    x = torch.randn(5, 32) * 3 + 1
    for site in find_sites(model):
        vectors = x[:, : site.d]
        kept = vectors - vectors.mean(-1, keepdim=True) if site.projects else vectors
        with torch.no_grad():
            expected = site.module(vectors[None]).reshape(5, -1)
        torch.testing.assert_close(site.affine(kept / site.sigma(vectors)), expected, rtol=1e-5, atol=1e-6)
        assert (site.bias is None) == (site.kind == "rmsnorm")
        assert site.eps == pytest.approx(1e-6 if site.kind == "rmsnorm" else 1e-5, rel=1e-6)


def test_qk_norms_are_sites(make_bridge: Callable[..., Any]) -> None:
    found = {(s.name, s.reads, s.d) for s in find_sites(make_bridge("qwen3")) if s.d == 8}
    assert {(n, r) for n, r, _ in found if n.startswith("blocks.0")} == {
        ("blocks.0.attn.q_norm", "query"),
        ("blocks.0.attn.k_norm", "key"),
    }


@pytest.mark.parametrize("parallel", [False, True])
def test_hooked_sites(parallel: bool, make_hooked: Callable[..., Any]) -> None:
    sites = find_sites(make_hooked(parallel_attn_mlp=parallel))
    assert [(s.name, s.reads) for s in sites] == PRE_NORM


def test_two_parallel_norms_with_equal_parameters_are_told_apart(make_hooked: Callable[..., Any]) -> None:
    model = make_hooked(parallel_attn_mlp=True)
    with torch.no_grad():
        for block in model.blocks:
            block.ln2.w.copy_(block.ln1.w)
            block.ln2.b.copy_(block.ln1.b)
    assert [s.reads for s in find_sites(model)] == ["attention", "mlp", "attention", "mlp", "unembed"]


def test_post_norm_sites(make_bridge: Callable[..., Any]) -> None:
    """BERT: attention of a block reads the last norm of the block before, the first one that of the embedding."""
    sites = find_sites(make_bridge("bert"))
    assert [(s.name, s.layer, s.reads, s.attention_layers) for s in sites] == [
        ("embed_ln", 0, "attention", (0,)), ("blocks.0.ln1", 0, "mlp", ()), ("blocks.0.ln2", 0, "attention", (1,)),
        ("blocks.1.ln1", 1, "mlp", ()), ("blocks.1.ln2", 1, "other", ()), ("ln_final", 2, "unembed", ()),
    ]  # fmt: skip


def test_a_norm_whose_output_only_comes_along_is_not_read(make_bridge: Callable[..., Any]) -> None:
    """BLOOM hands the residual stream to attention for the sum: at the first block, the embedding norm's output."""
    sites = {s.name: s for s in find_sites(make_bridge("bloom"))}
    assert (sites["embed_ln"].reads, sites["embed_ln"].layer) == ("other", 0)
    assert [s.attention_layers for s in sites.values() if s.reads == "attention"] == [(0,), (1,)]


@pytest.mark.parametrize("kind", NORM_KINDS)
@pytest.mark.parametrize("radius", [None, 0.5])
def test_lab_norms(kind: str, radius: float | None) -> None:
    model = lab(norm=kind, radius=radius)
    site = find_sites(model)[0]
    assert (site.name, site.reads, site.kind, site.state) == ("blocks.0.ln1", "attention", kind, "raw")
    assert site.scales == (kind in ("layernorm", "scaling_only"))
    assert site.projects == (kind in ("layernorm", "projection_only"))
    x = torch.randn(7, 32) + 0.5
    kept = x - x.mean(-1, keepdim=True) if site.projects else x
    torch.testing.assert_close(site.affine(kept / site.sigma(x)), site.module(x), rtol=1e-5, atol=1e-6)
    if site.scales:
        assert site.radius == pytest.approx(radius or math.sqrt(32))
    else:
        assert site.constant_scale == pytest.approx(float(site.module.divisor))  # type: ignore[arg-type]


def test_a_model_without_norms_has_no_sites(make_hooked: Callable[..., Any]) -> None:
    assert find_sites(make_hooked(normalization_type=None)) == []


def test_nan_gain_names_the_site(make_hooked: Callable[..., Any]) -> None:
    model = make_hooked()
    with torch.no_grad():
        model.blocks[1].ln2.w[3] = float("nan")
    with pytest.raises(
        SiteError, match=r"blocks\.1\.ln2: its gain holds NaN or infinite values; the checkpoint is damaged"
    ):
        find_sites(model)


def test_a_norm_of_another_form_is_refused() -> None:
    class Twisted(Norm):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + x.roll(1, dims=-1)

    model = lab()
    model.blocks[0].ln1 = Twisted("layernorm", 32)
    model.setup()
    with pytest.raises(SiteError, match=r"blocks\.0\.ln1 \(Twisted\): output is not gain·normalized \+ bias"):
        find_sites(model)


@pytest.mark.parametrize(("given", "said"), [
    ("gpt2", "load it first, ln_probe.load_model\\('gpt2'\\)"),
    (torch.nn.Linear(2, 2), "Linear is not a TransformerLens model: pass a HookedTransformer"),
])  # fmt: skip
def test_what_is_not_a_model(given: object, said: str) -> None:
    with pytest.raises(TypeError, match=said):
        find_sites(given)


def test_facts_are_kept_until_a_weight_changes(make_hooked: Callable[..., Any]) -> None:
    model = make_hooked(d_vocab=4000)  # so that the embedding is a large weight
    first = facts_of(model)
    assert facts_of(model) is first
    model.W_E.data[0, 0] += 1
    assert facts_of(model, checksums=False) is first  # PyTorch does not count edits through .data
    second = facts_of(model)
    assert second is not first
    with torch.no_grad():
        model.W_E[0, 0] += 1
    third = facts_of(model, checksums=False)
    assert third is not second
    model.ln_final.w.data[0] += 1
    assert facts_of(model, checksums=False) is not third  # of small weights every bit is compared
