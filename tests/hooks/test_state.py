"""Raw, folded, centred: told from weights and the stream, in every world, with the evidence."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from ln_probe.analyses.lab.transformer import LabConfig, LabTransformer
from ln_probe.hooks.sites import (
    CENTRED,
    CENTRED_HALF,
    centred_bound,
    find_sites,
    off_centre,
    reading_weights,
    writing_weights,
)

PRE_NORM = ["gpt2", "neox", "opt", "neo", "llama", "gemma", "qwen3"]
PROJECTS = ["gpt2", "neox", "opt", "neo"]


@pytest.mark.parametrize(("fold", "centre", "state"), [
    (False, False, "raw"), (True, False, "folded"), (False, True, "centred"), (True, True, "folded+centred"),
])  # fmt: skip
def test_hooked_states(fold: bool, centre: bool, state: str, make_hooked: Callable[..., Any]) -> None:
    raw = make_hooked()
    model = make_hooked(normalization_type="LNPre" if fold else "LN")
    model.load_and_process_state_dict(
        raw.state_dict(), fold_ln=fold, center_writing_weights=centre, center_unembed=False, fold_value_biases=False
    )
    sites = find_sites(model)
    assert {s.state for s in sites} == {state}
    for site in sites:
        assert ("no gain and no bias" in site.evidence) == fold
        assert ("every writing weight before it is centred" in site.evidence) == centre
        assert ("which writes to it, is not centred" in site.evidence) != centre


@pytest.mark.parametrize("arch", PRE_NORM)
@pytest.mark.parametrize("centre", [False, True])
def test_bridge_states(arch: str, centre: bool, make_folded: Callable[..., Any]) -> None:
    """A bridge in compatibility mode keeps class and config; centring is not done to models with RMSNorm."""
    sites = [s for s in find_sites(make_folded(arch, centre=centre)) if s.reads not in ("query", "key")]
    assert {s.state for s in sites} == {"folded+centred" if centre and arch in PROJECTS else "folded"}
    assert all(s.evidence.startswith("gain is exactly 1") for s in sites)


def test_what_folding_leaves_alone_stays_raw(make_folded: Callable[..., Any]) -> None:
    for arch in ("bert", "olmo2"):
        assert {s.state for s in find_sites(make_folded(arch))} == {"raw"}, arch
    assert {s.state for s in find_sites(make_folded("qwen3")) if s.reads in ("query", "key")} == {"raw"}
    post = {s.name: s.state for s in find_sites(make_folded("gemma2")) if s.layer == 0}
    assert post == {
        "blocks.0.ln1": "folded",
        "blocks.0.ln1_post": "raw",
        "blocks.0.ln2": "folded",
        "blocks.0.ln2_post": "raw",
    }


def test_a_unit_gain_alone_is_not_folded(make_bridge: Callable[..., Any]) -> None:
    """An untrained model has gains of exactly 1 that nobody folded."""
    model = make_bridge("gpt2")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "ln" in name:
                parameter.fill_(1.0 if name.endswith("weight") else 0.0)
    for site in find_sites(model):
        assert site.state == "raw"
        assert "gain is exactly 1 and bias 0, but nothing shows that they were folded away" in site.evidence


def test_folded_weights_without_the_flag_are_known_by_their_readers(make_folded: Callable[..., Any]) -> None:
    model = make_folded("gpt2")
    model.compatibility_mode = False
    for site in find_sites(model):
        assert site.state == "folded"
        assert "what reads it is centred as folding leaves it" in site.evidence


def test_a_centred_embedding_centres_the_first_norm_only() -> None:
    torch.manual_seed(0)
    model = LabTransformer(LabConfig(n_layers=2, d_model=32, n_heads=4, d_vocab=50, n_ctx=32))
    with torch.no_grad():
        for weight in (model.embed.W_E, model.pos_embed.W_pos):  # type: ignore[union-attr]
            weight.sub_(weight.mean(-1, keepdim=True))
        for norm in (model.blocks[0].ln1, model.ln_final):  # a unit gain that reads the tied, centred W_E looks folded
            norm.w.uniform_(0.5, 1.5)  # type: ignore[union-attr,operator]
    sites = find_sites(model)
    assert [s.state for s in sites] == ["centred", "raw", "raw", "raw", "raw"]
    assert "blocks.0.attn.W_O, which writes to it, is not centred" in sites[1].evidence


def test_a_stream_that_happens_to_be_centred_is_not_called_so() -> None:
    """The three probed tokens have zero mean, another one has not."""
    torch.manual_seed(0)
    model = LabTransformer(LabConfig(n_layers=1, d_model=32, n_heads=4, d_vocab=50, n_ctx=32, positions="none"))
    with torch.no_grad():
        weight = model.embed.W_E
        weight.sub_(weight.mean(-1, keepdim=True))
        weight[7] += 1.0
    site = find_sites(model)[0]
    assert site.state == "raw"
    assert "of its RMS; W_E, which writes to it, is not centred" in site.evidence


def test_a_wrong_fold_is_seen_without_the_raw_model(make_hooked: Callable[..., Any]) -> None:
    """d_mlp == d_model: TransformerLens takes the mean of W_in along the wrong axis."""
    raw = make_hooked(d_mlp=32)
    model = make_hooked(d_mlp=32, normalization_type="LNPre")
    model.load_and_process_state_dict(
        raw.state_dict(), fold_ln=True, center_writing_weights=False, center_unembed=False, fold_value_biases=False
    )
    with torch.no_grad():
        model.blocks[1].attn.W_K += 0.5
    evidence = {s.name: s.evidence for s in find_sites(model)}
    assert "blocks.1.attn.W_K is not centred as the others that read it are" in evidence["blocks.1.ln1"]
    assert "is not centred as the others" not in evidence["blocks.0.ln1"]


@pytest.mark.parametrize("arch", [*PRE_NORM, "bert", "bloom", "gemma2", "olmo2"])
def test_every_weight_is_shown(arch: str, make_bridge: Callable[..., Any]) -> None:
    model = make_bridge(arch)
    found = {w.name: w for w in writing_weights(model)}
    biased = arch in (*PROJECTS, "bert", "bloom")
    for layer in range(2):
        names = [f"blocks.{layer}.attn.W_O", f"blocks.{layer}.mlp.W_out"]
        names += [f"blocks.{layer}.attn.b_O", f"blocks.{layer}.mlp.b_out"] if biased else []
        for name in names:
            assert found[name].off_centre > 1e-3, name
    assert ("W_pos" in found) == (arch in ("gpt2", "opt", "neo", "bert"))
    read = [w.name for w in reading_weights(model, "attention+mlp", [1])]
    gated = arch in ("llama", "gemma", "gemma2", "qwen3", "olmo2")
    assert read == [
        *(f"blocks.1.attn.W_{n}" for n in "QKV"),
        "blocks.1.mlp.W_in",
        *(["blocks.1.mlp.W_gate"] if gated else []),
    ]


def test_off_centre_is_the_largest_mean_over_the_rms() -> None:
    weight = torch.tensor([[1.0, -1.0], [1.0, 1.0], [0.0, 0.0]])
    assert off_centre(weight) == pytest.approx(1 / math.sqrt(4 / 6))
    assert off_centre(weight, dim=0) == pytest.approx((2 / 3) / math.sqrt(4 / 6))
    assert off_centre(torch.zeros(3, 4)) == 0.0
    tall = torch.randn(3000, 8, generator=torch.Generator().manual_seed(0))
    assert off_centre(tall) == pytest.approx(
        float(tall.double().mean(-1).abs().max() / tall.double().pow(2).mean().sqrt())
    )


def test_bounds_follow_the_format() -> None:
    assert centred_bound(torch.float32) == centred_bound(torch.float64) == CENTRED
    assert centred_bound(torch.bfloat16) == centred_bound(torch.float16) == CENTRED_HALF
    generator = torch.Generator().manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        weight = torch.randn(200, 768, generator=generator, dtype=torch.float64)
        weight -= weight.mean(-1, keepdim=True)
        assert off_centre(weight.to(dtype)) < centred_bound(dtype) / 5
