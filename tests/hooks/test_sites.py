"""Every norm of a model: what it computes and can put out, who reads it, in what state it is, with the evidence."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from architectures import bridge_of, hugging_face, make_bridge, make_folded, make_hooked, process
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import lab, norm_of

from ln_probe.analyses.lab.norms import NORM_KINDS, Norm
from ln_probe.hooks.norm import Site, SiteError
from ln_probe.hooks.sites import (
    CENTRED,
    CENTRED_HALF,
    centred_bound,
    facts_of,
    find_sites,
    off_centre,
    reading_weights,
    writing_weights,
)

PRE_NORM = [("blocks.0.ln1", "attention"), ("blocks.0.ln2", "mlp"), ("blocks.1.ln1", "attention"),
            ("blocks.1.ln2", "mlp"), ("ln_final", "unembed")]  # fmt: skip
RMS = ("llama", "gemma", "qwen3", "olmo2")  # Hugging Face computes these norms in float32, whatever the model's format
IN_FLOAT32 = 1e-5  # of the output's RMS: how a norm that computes in float32 rounds


def check_sum(site: Site, bound: float, dtype: torch.dtype) -> None:
    """The terms add up to what the norm itself says, on streams of any shape."""
    x = 3 * torch.randn(2, 5, site.d, generator=torch.Generator().manual_seed(1), dtype=torch.float64) + 0.7
    x = x.to(dtype)
    terms = site.decompose(x)
    with torch.no_grad():
        truth = site.module(x).double()
    size = float(truth.pow(2).mean().sqrt())
    assert float((terms.total() - truth).abs().max()) <= bound * size
    summands = terms.summands()
    assert list(summands) == ["input", "projection", "bias"]
    together = torch.stack(list(summands.values())).sum(0)
    torch.testing.assert_close(together, terms.total(), rtol=1e-12, atol=1e-12 * size)
    assert site.projects or not bool(summands["projection"].any())
    assert site.bias is not None or not bool(summands["bias"].any())
    for values in (terms.x, terms.mean_component, terms.projected, terms.normalized, *summands.values()):
        assert values.shape == x.shape
        assert values.dtype == torch.float64
    assert terms.sigma.shape == terms.scale.shape == (2, 5, 1)


@pytest.mark.parametrize("arch", ["gpt2", "neox", "opt", *RMS, "bloom", "bert"])
def test_norms_of_a_bridge(arch: str) -> None:
    """Name, reader and kind; gain, bias and eps as they act, whatever the module stores (Gemma: gain - 1)."""
    for dtype in (torch.float64, torch.float32):
        every = find_sites(make_bridge(arch, dtype))
        sites = [s for s in every if s.reads not in ("query", "key")]  # those take a head's vectors
        for site in sites:
            check_sum(site, 1e-12 if dtype == torch.float64 and arch not in RMS else IN_FLOAT32, dtype)
    for site in every:
        assert (site.bias is None) == (site.kind == "rmsnorm") == (arch in RMS)
        assert site.eps == pytest.approx(1e-6 if arch in RMS and arch != "olmo2" else site.eps, rel=1e-6)
        assert site.state == "raw"
    if arch not in ("olmo2", "bloom", "bert"):
        assert [(s.name, s.reads) for s in sites] == PRE_NORM
        assert [s.layer for s in sites] == [0, 0, 1, 1, 2]
    if arch == "qwen3":
        assert [(s.name, s.reads, s.d) for s in every if s not in sites and s.layer == 0] == [
            ("blocks.0.attn.q_norm", "query", 8), ("blocks.0.attn.k_norm", "key", 8),
        ]  # fmt: skip
    if arch == "bloom":  # it hands the stream to attention for the sum: at first, the output of the embedding's norm
        assert [(s.name, s.layer) for s in sites if s.reads == "other"] == [("embed_ln", 0)]
        assert [s.attention_layers for s in sites if s.reads == "attention"] == [(0,), (1,)]
    if arch == "bert":  # attention reads the last norm of the block before, the first one that of the embedding
        assert [(s.name, s.layer, s.reads, s.attention_layers) for s in sites] == [
            ("embed_ln", 0, "attention", (0,)), ("blocks.0.ln1", 0, "mlp", ()), ("blocks.0.ln2", 0, "attention", (1,)),
            ("blocks.1.ln1", 1, "mlp", ()), ("blocks.1.ln2", 1, "other", ()), ("ln_final", 2, "unembed", ()),
        ]  # fmt: skip


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, IN_FLOAT32), (torch.bfloat16, 2**-8)])
def test_a_gain_stored_as_an_offset_is_told_beside_a_large_one(dtype: torch.dtype, bound: float) -> None:
    """Gemma's checkpoints have single gains of 50 and more: next to them 1 is little, and not for the others."""
    model = hugging_face("gemma3", dtype)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight[3] = 300.0
    for site in (s for s in find_sites(bridge_of(model)) if s.d == 32):
        x = torch.randn(2, 5, site.d, generator=torch.Generator().manual_seed(1)).to(dtype)
        truth = site.module(x).double()
        assert bool(((site.decompose(x).total() - truth).abs() <= bound * truth.abs() + 1e-6).all()), site.name


@pytest.mark.parametrize("kind", ["LN", "LNPre", "RMS", "RMSPre"])
def test_norms_of_a_hooked_transformer(kind: str) -> None:
    for dtype, bound, parallel in ((torch.float64, 1e-12, False), (torch.float32, IN_FLOAT32, True)):
        sites = find_sites(make_hooked(normalization_type=kind, dtype=dtype, parallel_attn_mlp=parallel))
        assert [(s.name, s.reads) for s in sites] == PRE_NORM
        for site in sites:
            check_sum(site, bound, dtype)
    assert find_sites(make_hooked(normalization_type=None)) == []


@pytest.mark.parametrize("kind", NORM_KINDS)
@pytest.mark.parametrize("radius", [None, 0.5])
def test_norms_of_the_laboratory(kind: str, radius: float | None) -> None:
    sites = find_sites(lab(norm=kind, radius=radius).double())
    for site in sites:
        check_sum(site, 1e-12, torch.float64)
    site = sites[0]
    assert (site.name, site.reads, site.kind, site.state) == ("blocks.0.ln1", "attention", kind, "raw")
    assert site.scales == (kind in ("layernorm", "scaling_only"))
    assert site.projects == (kind in ("layernorm", "projection_only"))
    if site.scales:
        assert site.radius == pytest.approx(radius or math.sqrt(32))
    else:
        assert site.constant_scale == pytest.approx(float(site.module.divisor))  # type: ignore[arg-type]


def test_two_parallel_norms_with_equal_parameters_are_told_apart() -> None:
    model = make_hooked(parallel_attn_mlp=True)
    with torch.no_grad():
        for block in model.blocks:
            block.ln2.w.copy_(block.ln1.w)
            block.ln2.b.copy_(block.ln1.b)
    assert [s.reads for s in find_sites(model)] == ["attention", "mlp", "attention", "mlp", "unembed"]


class Twisted(Norm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + x.roll(1, dims=-1)


def test_what_has_no_norms_that_can_be_told_is_refused() -> None:
    damaged, twisted, site = make_hooked(), lab(), norm_of()
    with torch.no_grad():
        damaged.blocks[1].ln2.w[3] = float("nan")
    twisted.blocks[0].ln1 = Twisted("layernorm", 32)
    twisted.setup()
    cases: list[tuple[Callable[[Any], object], Any, type[Exception], str]] = [
        (find_sites, damaged, SiteError, r"^blocks\.1\.ln2: its gain holds NaN or infinite values; the checkpoint is"),
        (find_sites, twisted, SiteError, r"blocks\.0\.ln1 \(Twisted\): output is not gain·normalized \+ bias"),
        (find_sites, "gpt2", TypeError, r"load it first, ln_probe.load_model\('gpt2'\)"),
        (find_sites, torch.nn.Linear(2, 2), TypeError, "Linear is not a TransformerLens model: pass a HookedTransform"),
        (site.decompose, torch.zeros(2, 7), ValueError, r"blocks\.0\.ln1 normalizes vectors of length 16, got \[2, 7"),
        (site.decompose, torch.zeros(2, 16, dtype=torch.long), TypeError, r"real numbers \[… 16\], got torch\.int64"),
        (site.decompose, [0.0] * 16, TypeError, r"vectors of real numbers \[… 16\], got list"),
    ]
    for call, what, error, said in cases:
        with pytest.raises(error, match=said):
            call(what)


def test_facts_are_kept_until_a_weight_changes() -> None:
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


# Terms, and what a norm can put out.


def test_terms_are_what_they_are_called() -> None:
    site = norm_of()
    x = torch.randn(6, 16, dtype=torch.float64) + 2
    terms = site.decompose(x)
    torch.testing.assert_close(terms.mean_component + terms.projected, x)
    assert float(terms.projected.sum(-1).abs().max()) < 1e-12
    assert float((terms.mean_component * terms.projected).sum(-1).abs().max()) < 1e-12
    variance = x.numpy().var(axis=-1)
    np.testing.assert_allclose(terms.scale[:, 0], 1 / np.sqrt(variance + 1e-5), rtol=1e-12)
    # on the sphere of radius sqrt(d)·sqrt(s²/(s²+eps)) (science: exactly sqrt(d) only when eps = 0)
    np.testing.assert_allclose(terms.normalized.norm(dim=-1), 4 * np.sqrt(variance / (variance + 1e-5)), rtol=1e-12)
    removed = -terms.mean_component / terms.sigma * site.gain
    torch.testing.assert_close(terms.summands()["projection"], removed, rtol=1e-9, atol=1e-12)


@settings(max_examples=20, deadline=None)
@given(shift=st.floats(-100, 100), factor=st.floats(1e-2, 1e3), seed=st.integers(0, 1000))
def test_projection_forgets_the_mean_and_scaling_the_length(shift: float, factor: float, seed: int) -> None:
    site = norm_of()
    x = torch.randn(3, 16, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    base = site.decompose(x)
    torch.testing.assert_close(site.decompose(x + shift).normalized, base.normalized, rtol=1e-9, atol=1e-9)
    longer = site.decompose(x * factor)
    spread = base.projected.pow(2).mean(-1, keepdim=True)
    eps_effect = ((spread + site.eps) / (spread + site.eps / factor**2)).sqrt()
    torch.testing.assert_close(longer.normalized, base.normalized * eps_effect, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("norm", ["layernorm", "scaling_only"])
def test_the_reachable_set_holds_every_output_and_its_edge_is_reached(norm: str) -> None:
    """Outputs are c + A u with |u| ≤ 1, near 1 for long vectors; read through a map W they are Wᵀ of that."""
    site = norm_of(norm=norm)
    found = site.reachable()
    center, axes = found
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(200, site.d, generator=generator, dtype=torch.float64) * torch.logspace(-3, 3, 200)[:, None]
    y = site.affine(site.normalize(x))
    u = (y - center) @ torch.linalg.pinv(axes).T
    torch.testing.assert_close(u @ axes.T + center, y, rtol=1e-9, atol=1e-9)
    lengths = u.norm(dim=-1)
    assert float(lengths.max()) <= 1 + 1e-9
    assert float(lengths[-1]) == pytest.approx(1, abs=1e-6)
    W = torch.randn(3, site.d, 4, generator=generator, dtype=torch.float64)
    read = site.reachable(W)
    torch.testing.assert_close(read[0], torch.stack([w.T @ center for w in W]))
    torch.testing.assert_close(read[1], torch.stack([w.T @ axes for w in W]))
    unbounded = replace(site, kind="projection_only", constant_scale=1.0, radius=math.nan)
    assert unbounded.reachable() is None
    assert unbounded.reachable(W) is None


def test_vectors_that_are_not_the_norms_are_refused() -> None:
    site, x = norm_of(), torch.ones(2, 16)
    for name in ("project", "sigma", "normalize", "affine", "decompose", "directions", "reachable"):
        wrong: list[Any] = [torch.ones(3), torch.ones(()), x.long(), [1.0], "x"]
        for vectors in wrong if name in ("directions", "reachable") else [*wrong, None]:
            with pytest.raises((TypeError, ValueError), match="normalizes vectors of"):
                getattr(site, name)(vectors)
    for divisor in (0, -1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match=f"a divisor must be positive and finite, got {divisor}"):
            site.normalize(x, divisor=divisor)


# Raw, folded, centred.


@pytest.mark.parametrize(("fold", "centre", "state"), [
    (False, False, "raw"), (True, False, "folded"), (False, True, "centred"), (True, True, "folded+centred"),
])  # fmt: skip
def test_states_of_a_hooked_transformer(fold: bool, centre: bool, state: str) -> None:
    model = make_hooked(normalization_type="LNPre" if fold else "LN")
    sites = find_sites(process(model, make_hooked(), fold_ln=fold, center_writing_weights=centre))
    assert {s.state for s in sites} == {state}
    for site in sites:
        assert ("no gain and no bias" in site.evidence) == fold
        assert ("every writing weight before it is centred" in site.evidence) == centre
        assert ("which writes to it, is not centred" in site.evidence) != centre


@pytest.mark.parametrize(("arch", "centre", "state"), [
    ("gpt2", False, "folded"), ("gpt2", True, "folded+centred"), ("neox", True, "folded+centred"),
    ("opt", True, "folded+centred"), ("neo", True, "folded+centred"), ("gemma", True, "folded"),
    ("qwen3", False, "folded"),
])  # fmt: skip
def test_states_of_a_bridge(arch: str, centre: bool, state: str) -> None:
    """A bridge in compatibility mode keeps class and config; centring is not done to models with RMSNorm."""
    for site in find_sites(make_folded(arch, centre=centre)):
        inside = site.reads in ("query", "key")
        assert site.state == ("raw" if inside else state)
        assert inside or site.evidence.startswith("gain is exactly 1")


def test_what_folding_leaves_alone_stays_raw() -> None:
    for arch in ("bert", "olmo2"):
        assert {s.state for s in find_sites(make_folded(arch))} == {"raw"}, arch
    assert [(s.name, s.state) for s in find_sites(make_folded("gemma2")) if s.layer == 0] == [
        ("blocks.0.ln1", "folded"), ("blocks.0.ln1_post", "raw"), ("blocks.0.ln2", "folded"),
        ("blocks.0.ln2_post", "raw"),
    ]  # fmt: skip


def test_folded_weights_without_the_flag_are_known_by_their_readers() -> None:
    model = make_folded("gpt2")
    model.compatibility_mode = False
    for site in find_sites(model):
        assert site.state == "folded"
        assert "what reads it is centred as folding leaves it" in site.evidence


def test_a_gain_below_one_is_not_folded() -> None:
    model = make_folded("gpt2")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "ln" in name and name.endswith("weight"):
                parameter.fill_(0.9)
    assert {s.state for s in find_sites(model)} == {"raw"}


def test_a_unit_gain_alone_is_not_folded() -> None:
    """An untrained model has gains of exactly 1 that nobody folded."""
    model = make_bridge("gpt2")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "ln" in name:
                parameter.fill_(1.0 if name.endswith("weight") else 0.0)
    for site in find_sites(model):
        assert site.state == "raw"
        assert "gain is exactly 1 and bias 0, but nothing shows that they were folded away" in site.evidence


def test_only_what_every_token_bears_out_is_called_centred() -> None:
    model = lab()
    with torch.no_grad():
        for weight in (model.embed.W_E, model.pos_embed.W_pos):
            weight.sub_(weight.mean(-1, keepdim=True))
        for norm in (model.blocks[0].ln1, model.ln_final):  # a unit gain that reads the tied, centred W_E looks folded
            norm.w.uniform_(0.5, 1.5)
    sites = find_sites(model)
    assert [s.state for s in sites] == ["centred", "raw", "raw", "raw", "raw"]
    assert "blocks.0.attn.W_O, which writes to it, is not centred" in sites[1].evidence
    with torch.no_grad():
        model.embed.W_E[7] += 1.0  # the probed tokens have zero mean, this one has not
    site = find_sites(model)[0]
    assert site.state == "raw"
    assert "of its RMS; W_E, which writes to it, is not centred" in site.evidence


def test_a_wrong_fold_is_seen_without_the_raw_model() -> None:
    """d_mlp == d_model: TransformerLens takes the mean of W_in along the wrong axis."""
    model = process(make_hooked(d_mlp=32, normalization_type="LNPre"), make_hooked(d_mlp=32), fold_ln=True)
    with torch.no_grad():
        model.blocks[1].attn.W_K += 0.5
    evidence = {s.name: s.evidence for s in find_sites(model)}
    assert "blocks.1.attn.W_K is not centred as the others that read it are" in evidence["blocks.1.ln1"]
    assert "is not centred as the others" not in evidence["blocks.0.ln1"]


@pytest.mark.parametrize("arch", ["gpt2", "neox", "neo", "gemma", "bert", "bloom", "olmo2"])
def test_every_weight_is_shown(arch: str) -> None:
    model = make_bridge(arch)
    found = {w.name: w for w in writing_weights(model)}
    gated = arch in RMS
    for layer in range(2):
        names = [f"blocks.{layer}.attn.W_O", f"blocks.{layer}.mlp.W_out"]
        names += [] if gated else [f"blocks.{layer}.attn.b_O", f"blocks.{layer}.mlp.b_out"]
        for name in names:
            assert found[name].off_centre > 1e-3, name
    assert ("W_pos" in found) == (arch in ("gpt2", "neo", "bert"))
    assert [w.name for w in reading_weights(model, "attention+mlp", [1])] == [
        *(f"blocks.1.attn.W_{n}" for n in "QKV"), "blocks.1.mlp.W_in", *(["blocks.1.mlp.W_gate"] if gated else []),
    ]  # fmt: skip


def test_off_centre_is_the_largest_mean_over_the_rms_and_bounds_follow_the_format() -> None:
    weight = torch.tensor([[1.0, -1.0], [1.0, 1.0], [0.0, 0.0]])
    assert off_centre(weight) == pytest.approx(1 / math.sqrt(4 / 6))
    assert off_centre(weight, dim=0) == pytest.approx((2 / 3) / math.sqrt(4 / 6))
    assert off_centre(torch.zeros(3, 4)) == 0.0
    generator = torch.Generator().manual_seed(0)
    tall = torch.randn(3000, 8, generator=generator).double()
    assert off_centre(tall.float()) == pytest.approx(float(tall.mean(-1).abs().max() / tall.pow(2).mean().sqrt()))
    assert centred_bound(torch.float32) == centred_bound(torch.float64) == CENTRED
    assert centred_bound(torch.bfloat16) == centred_bound(torch.float16) == CENTRED_HALF
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        weight = torch.randn(200, 768, generator=generator, dtype=torch.float64)
        weight -= weight.mean(-1, keepdim=True)
        assert off_centre(weight.to(dtype)) < centred_bound(dtype) / 5
