"""Attention to position 0 as Gu et al. count it, by hand; outlier tokens that are planted; real checkpoints."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from architectures import make_bridge, make_hooked
from small_models import norm_of
from torch import Tensor

import ln_probe
from ln_probe.analyses.lab.norms import calibrate
from ln_probe.analyses.lab.transformer import LabConfig, LabTransformer
from ln_probe.analyses.probes.sinks import LEAST_TOKENS, MUCH, TokenSizes
from ln_probe.hooks.norms import find_norms
from ln_probe.hooks.stream import stream
from ln_probe.outliers import outlier_tokens

LENGTH = 16
TOKENS = torch.arange(1, LENGTH + 1)


def model_of(seed: int = 0, **options: Any) -> LabTransformer:
    torch.manual_seed(seed)
    model = LabConfig(**({"n_layers": 2, "d_model": 32, "n_heads": 4, "d_vocab": 40, "n_ctx": 32} | options)).build()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(8)
    return model.eval()


def sinks_of(model: Any, tokens: Any, **options: Any) -> ln_probe.Report:
    return ln_probe.analyze(model, tokens, probes=("sinks",), progress=False, **options)


def test_attention_to_position_0_by_counting() -> None:
    """Gu et al. average over all queries, position 0's own too (it decides twice); `first_attention` leaves it out."""
    model, prompts = model_of(26, positions="learned"), torch.stack([TOKENS, TOKENS.roll(3), TOKENS.roll(7)])
    heads = sinks_of(model, prompts).sink_heads
    _, cache = model.run_with_cache(prompts)
    for row in heads.itertuples():
        pattern = cache[f"blocks.{row.layer}.attn.hook_pattern"][:, row.head, :, 0].double()
        assert row.sink_rate == pytest.approx(float((pattern.mean(1) > MUCH).double().mean()))
        assert row.first_attention == pytest.approx(float(pattern[:, 1:].mean()), rel=1e-5)
        assert row.n == 3
    assert heads["sink_rate"].nunique() > 1, "rates that are all alike tell no head from another"


def test_attention_with_scaling_frozen_is_that_of_frozen_keys() -> None:
    """Queries are the intact model's; every key is made of Px / c."""
    model = model_of(positions="learned")
    report = sinks_of(model, torch.stack([TOKENS, TOKENS.roll(3)]))
    _, cache = model.run_with_cache(TOKENS[None])
    site = next(s for s in find_norms(model) if s.name == "blocks.0.ln1")
    x = cache["blocks.0.hook_resid_pre"][0].double()
    constant = report.constants.of(0)["blocks.0.ln1"]
    constants = torch.tensor([constant.first] + [constant.rest] * (LENGTH - 1)).double()[:, None]
    keys = torch.einsum("pd,hdk->phk", site.affine(site.project(x) / constants), model.blocks[0].attn.W_K.double())
    q = cache["blocks.0.attn.hook_q"][0].double()
    scores = torch.einsum("qhd,khd->hqk", q, keys + model.blocks[0].attn.b_K.double()) / 8**0.5
    hidden = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
    pattern = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    single = sinks_of(model, TOKENS[None], calibration=TOKENS.roll(3)[None], layers=[0], batch_size=1)
    frozen = single.constants.of(0)["blocks.0.ln1"]
    assert frozen.rest == pytest.approx(report.constants.of(0)["blocks.0.ln1"].rest)
    first = pattern[:, 1:, 0].mean(1)
    assert single.sink_heads["first_attention_no_scaling"].tolist() == pytest.approx(first.tolist(), rel=1e-4)
    row = single.sinks.set_index("position").loc[0]
    assert row["received_no_scaling"] == pytest.approx(float(first.mean()), rel=1e-4)


def test_a_planted_sink() -> None:
    """Two of four heads of layer 1 give position 3 nine tenths of their attention, from the fifth query on."""
    model = model_of()

    def planted(pattern: Tensor, hook: Any) -> Tensor:
        out = pattern.clone()
        if pattern.shape[-1] == LENGTH:
            for head in (0, 2):
                out[:, head, 4:] *= 0.1 / (1 - out[:, head, 4:, 3:4]).clamp_min(1e-6)
                out[:, head, 4:, 3] = 0.9
        return out

    with model.hooks(fwd_hooks=[("blocks.1.attn.hook_pattern", planted)]):
        sinks = sinks_of(model, TOKENS[None], hooks="keep").sinks.set_index("position")
    assert sinks.index[sinks["kind"].str.contains("sink")].tolist() == [3]
    assert sinks.loc[3, "received"] > 2 * sinks.loc[3, "uniform"]
    assert sinks.loc[3, "n"] == LENGTH - 3


def test_position_0_and_the_longest_other_token_are_always_there() -> None:
    kinds = sinks_of(model_of(), torch.stack([TOKENS, TOKENS.roll(5)])).sinks.groupby("prompt")["kind"].agg("+".join)
    assert (kinds.str.startswith("first") & kinds.str.count("longest").eq(1)).all()
    single = sinks_of(model_of(), torch.tensor([[3]]))
    assert single.sinks["kind"].tolist() == ["first"]
    assert single.sink_heads.empty
    bare = sinks_of(make_bridge("lfm2"), TOKENS[None], layers=[0]).sinks  # of a block that does not attend
    assert bare["kind"].tolist() == ["first", "longest"]
    assert bare["received"].isna().all()
    assert (bare["n"] == 0).all()
    parallel = sinks_of(make_bridge("neox"), TOKENS[None]).sinks  # two norms of one vector: the first is named
    assert not parallel["site"].str.contains("ln2").any()
    assert {*sinks_of(make_bridge("bert"), torch.tensor([[1, 2]])).sinks["n"]} == {2}, "both see both"
    short = sinks_of(model_of(), torch.tensor([[1, 2, 3], [4, 5, 6]]))
    assert any(note.startswith("sinks: 2 prompts of fewer than 8 tokens") for note in short.notes)


def test_rows_of_tokens_by_definition() -> None:
    """Over the queries that see a position and another one, of all heads; lengths over all norms of the stream."""
    model, prompts = model_of(3, positions="learned"), torch.stack([TOKENS, TOKENS.roll(5)])
    sinks = sinks_of(model, prompts).sinks
    _, cache = model.run_with_cache(prompts)
    points = [f"blocks.{layer}.hook_resid_{at}" for layer in (0, 1) for at in ("pre", "mid")]
    names = [s.name for s in find_norms(model)]
    patterns = torch.cat([cache[f"blocks.{layer}.attn.hook_pattern"] for layer in (0, 1)], dim=1).double()
    for row in sinks.itertuples():
        inputs = torch.stack([cache[point][row.prompt].double() for point in (*points, "blocks.1.hook_resid_post")])
        vectors = inputs - inputs.mean(-1, keepdim=True)
        ratios = vectors.norm(dim=-1) / vectors.norm(dim=-1).median(dim=1, keepdim=True).values
        first = max(1, row.position)
        queries = torch.arange(first, LENGTH)
        assert (row.n, row.token) == (LENGTH - first, str(int(prompts[row.prompt, row.position])))
        assert row.received == pytest.approx(float(patterns[row.prompt, :, first:, row.position].mean()), rel=1e-5)
        assert row.uniform == pytest.approx(float((1 / (queries + 1)).mean()))
        assert row.length_ratio == pytest.approx(float(ratios[:, row.position].max()), rel=1e-5)
        assert row.site == names[int(ratios[:, row.position].argmax())]
        largest = vectors[ratios[:, row.position].argmax(), row.position].square()
        shares, order = (largest / largest.sum()).sort(descending=True)
        count = min(4, 1 + int((shares.cumsum(0) < 0.5).sum()))
        shown = [f"{int(i)} ({100 * float(share):.0f} %)" for share, i in zip(shares[:4], order[:4], strict=True)]
        assert ", ".join(shown).startswith(row.dimensions)
        assert len(row.dimensions.split(", ")) >= count
        if "longest" in row.kind:
            assert row.length_ratio == pytest.approx(float(ratios[:, 1:].max()), rel=1e-5)
    assert sinks["prompt"].is_monotonic_increasing
    assert sinks.groupby("prompt")["position"].is_monotonic_increasing.all()


def random_model(seed: int) -> LabTransformer:
    """A small model of random shape and norm, with weights of ordinary size."""
    torch.manual_seed(seed)
    norm = ("layernorm", "scaling_only", "projection_only", "none")[seed % 4]
    positions = ("learned", "none", "rotary", "sinusoidal")[seed // 4 % 4]
    model = LabConfig(1 + seed % 2, (16, 32, 48)[seed % 3], 2, 40, 24, norm=norm, positions=positions).build()
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


def sizes_of(model: Any, tokens: Tensor) -> TokenSizes:
    sizes = TokenSizes()
    stream(model, tokens, find_norms(model), on_norm=lambda site, x, _: sizes.add(site, x) is None)
    return sizes


def test_the_dimensions_of_a_massive_activation() -> None:
    model, tokens = make_bridge("gpt2"), torch.arange(1, 21)

    def added(x: Tensor, hook: Any) -> Tensor:
        out = x.clone()
        out[:, 7, 5] += 1e5
        return out

    with model.hooks(fwd_hooks=[("blocks.0.hook_mlp_out", added)]):
        sizes = sizes_of(model, tokens)
        row = sinks_of(model, tokens[None], hooks="keep").sinks.set_index("position").loc[7]
    assert sizes.massive.nonzero().flatten().tolist() == [7]
    assert row["dimensions"] == "5 (97 %)"
    assert row["kind"] == "longest+outlier+massive"
    assert row["site"] in ("blocks.1.ln1", "blocks.1.ln2", "ln_final")
    half, x = TokenSizes(), torch.randn(20, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    for values in (x, x.float()):
        half.add(find_norms(model)[0], values)
    assert torch.equal(half.ratio, half.ratios["blocks.0.ln1"]), "as exact in half precision"


@pytest.mark.parametrize(("entry", "usual", "massive"), [(101, 0.1, True), (99, 0.09, False), (101, 0.102, False)])
def test_massive_activations_as_they_are_defined(entry: float, usual: float, massive: bool) -> None:
    """Above 100, and above 1000 times the median (Sun et al. 2024)."""
    x = usual * torch.tensor([1.0, -1.0]).repeat(12, 8)
    x[4, 3] = entry
    sizes = TokenSizes()
    sizes.add(norm_of(), x)
    assert sizes.massive.tolist() == [massive and at == 4 for at in range(12)]
    assert sizes.dimensions(0).count("(6 %)") == 4, "however little they make up"


def test_a_mask_of_rows_of_several_lengths_and_sizes_of_the_norms() -> None:
    model, rows = random_model(0), [prompt(0), prompt(0)[:-3], prompt(0)[: LEAST_TOKENS - 1]]
    for row in rows:
        row[2] = 39
    with torch.no_grad():
        model.embed.W_E[39] *= 1000
    outliers = outlier_tokens(model, rows)
    assert outliers.mask.nonzero().tolist() == [[0, 2], [1, 2]], "a few tokens have no median"
    assert not outliers.massive[:, 3:].any()
    _, cache = model.run_with_cache(rows[0][None])
    x = cache["blocks.0.hook_resid_pre"][0]
    length = (x - x.mean(-1, keepdim=True)).norm(dim=-1)
    ratio = outliers.ratio["blocks.0.ln1"]
    assert torch.allclose(ratio[0], length / length.median())
    assert ratio[1, -3:].isnan().all()
    padded = make_bridge("llama", pad_token_id=0)
    with pytest.warns(UserWarning, match="padding"):
        found = outlier_tokens(padded, F.pad(rows[0][None], (3, 2)))
    alone = outlier_tokens(padded, rows[0][None])
    for name, values in alone.ratio.items():
        torch.testing.assert_close(found.ratio[name], F.pad(values, (3, 2), value=math.nan), equal_nan=True)
    assert found.mask.tolist() == F.pad(alone.mask, (3, 2)).tolist()
    with pytest.raises(ValueError, match="whole numbers"):
        outlier_tokens(random_model(0), torch.rand(1, 4))
    with pytest.raises(ValueError, match="normalization"):
        outlier_tokens(make_hooked(normalization_type=None), TOKENS[None])
    with pytest.raises(TypeError, match="TransformerLens"):
        ln_probe.outlier_tokens(object(), torch.arange(4)[None])


@pytest.mark.parametrize("model", ["llama", "gpt2"])
def test_vectors_without_length_are_no_outliers_and_count_in_no_median(model: Any) -> None:
    """Padding embedded as zeros; equal entries, whose projection is rounding. Both would make a median of nothing."""
    bridge = make_bridge(model)
    with torch.no_grad():
        bridge.embed.weight[0] = 0.0 if model == "llama" else 3.3
        if model == "gpt2":
            bridge.pos_embed.weight.zero_()
    tokens = torch.tensor([[0, 0, 0, 0, 0, 5, 0, 9, 12, 0], [0] * 10])
    ratio = outlier_tokens(bridge, tokens).ratio["blocks.0.ln1"]
    x = bridge.embed.weight[tokens[0]].double()
    length = (x if model == "llama" else x - x.mean(-1, keepdim=True)).norm(dim=-1)
    expected = torch.where(tokens[0] == 0, 0.0, length / length[[5, 7, 8]].median())
    assert torch.allclose(ratio[0].double(), expected, atol=1e-6)
    assert not ratio[1].any()


def test_a_norm_inside_an_mlp_has_vectors_of_another_width() -> None:
    """SoLU's norm, of 80 entries; the stream has 32."""
    model, tokens = make_hooked(act_fn="solu_ln"), torch.arange(1, 17)[None]
    outliers = outlier_tokens(model, tokens)
    assert set(outliers.ratio) == {s.name for s in find_norms(model) if s.d == 32}
    report = ln_probe.analyze(model, tokens, probes=["sinks", "decomposition"], progress=False)
    _, cache = model.run_with_cache(tokens)
    inside = cache["blocks.1.mlp.hook_mid"][0].double()
    sigma = (inside.var(-1, correction=0) + model.cfg.eps).sqrt().mean()
    norms = report.layernorms.set_index("site")
    assert norms.loc["blocks.1.mlp.ln", "sigma_mean"] == pytest.approx(float(sigma), rel=1e-5)
    assert report.sinks["site"].isin(list(outliers.ratio)).all()
