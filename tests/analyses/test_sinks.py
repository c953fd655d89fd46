"""The probe `sinks`: sinks by hand, a token's own key unscaled by brute force, the sinks of real checkpoints."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import make_bridge
from torch import Tensor

import ln_probe
from ln_probe.analyses.lab.transformer import LabConfig, LabTransformer
from ln_probe.analyses.probes.sinks import MUCH, _Layer, counting_queries
from ln_probe.hooks.norms import find_norms

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


def layer(*, causal: bool = True, window: int | None = None) -> _Layer:
    return _Layer([0], counting_queries(4, causal=causal, window=window), torch.zeros(1, 4), torch.zeros(1, 4))


def test_uniform_attention_by_hand() -> None:
    assert layer().queries.tolist() == [3, 3, 2, 1]
    visible = torch.ones(4, 4).tril()
    pattern = visible / visible.sum(-1, keepdim=True)
    torch.testing.assert_close(layer().uniform.float(), pattern[1:].sum(0))
    assert layer(causal=False).queries.tolist() == [4, 4, 4, 4]
    assert layer(causal=False).uniform.tolist() == [1.0] * 4
    near = layer(window=2)  # a query sees itself and the one before it
    assert near.queries.tolist() == [1, 2, 2, 1]
    assert near.uniform.tolist() == [0.5, 1.0, 1.0, 0.5]


def test_even_attention_in_a_window_is_as_even_as_it_looks() -> None:
    """Queries of zero attend evenly to the 8 keys that they see: position 0 gets what uniform attention gives."""
    model = make_bridge("mistral")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "q_proj" in name:
                parameter.zero_()
    tokens = torch.randint(1, 50, (1, 20), generator=torch.Generator().manual_seed(3))
    heads = ln_probe.analyze(model, tokens, probes=("sinks",), progress=False).tables["sink_heads"]
    assert (heads["first_attention"] - heads["first_uniform"]).abs().max() < 1e-6


def test_a_planted_sink() -> None:
    """Two of four heads of layer 1 give position 3 nine tenths of their attention, from the fifth query on."""
    model = model_of()

    def planted(pattern: Tensor, hook: Any) -> Tensor:
        out = pattern.clone()
        if pattern.shape[-1] < LENGTH:  # what is run to find the norms, or to calibrate
            return out
        for head in (0, 2):
            out[:, head, 4:] *= 0.1 / (1 - out[:, head, 4:, 3:4]).clamp_min(1e-6)
            out[:, head, 4:, 3] = 0.9
        return out

    with model.hooks(fwd_hooks=[("blocks.1.attn.hook_pattern", planted)]):
        report = ln_probe.analyze(model, TOKENS[None], probes=("sinks",), progress=False, hooks="keep")
    assert not report.failures
    sinks = report.tables["sinks"].set_index("position")
    assert sinks.index[sinks["sink"]].tolist() == [3]
    row = sinks.loc[3]
    assert (row["sink_layer"], row["outlier"], row["emerges_at"]) == (1, False, "")
    pattern = model.run_with_cache(TOKENS[None])[1]
    others = (pattern["blocks.1.attn.hook_pattern"][0, [1, 3], 3:, 3] > MUCH).sum()
    own = (pattern["blocks.1.attn.hook_pattern"][0, [0, 2], 3, 3] > MUCH).sum()
    assert row["sink_rate"] == pytest.approx((2 * 12 + int(others) + int(own)) / (4 * 13))
    heads = report.tables["sink_heads"].set_index(["layer", "head"])
    assert heads.loc[(1, 0), "attention"] == pytest.approx(
        (12 * 0.9 + float(pattern["blocks.1.attn.hook_pattern"][0, 0, 3, 3])) / 13, rel=1e-5
    )
    assert heads.loc[(0, 1), "first_attention"] == pytest.approx(
        float(pattern["blocks.0.attn.hook_pattern"][0, 1, 1:, 0].mean()), rel=1e-5
    )
    assert any("an attention sink (in layer 1" in f for f in report.findings())


@pytest.mark.parametrize("positions", ["learned", "rotary"])
def test_its_own_key_unscaled_by_brute_force(positions: str) -> None:
    """Attention recomputed with one key made of Px / c: the mean over heads, queries and layers."""
    model = model_of(positions=positions)
    with torch.no_grad():
        model.embed.W_E[5] *= 40
    report = ln_probe.analyze(model, TOKENS[None], probes=("sinks",), progress=False)
    row = report.tables["sinks"].set_index("position").loc[4]
    assert row["outlier"]
    assert row["emerges_at"] == "blocks.0.ln1"
    assert row["writer"] == "the embedding"
    constants = report.provenance["constants"]
    _, cache = model.run_with_cache(TOKENS[None])
    there, without, count = 0.0, 0.0, 0
    for site in (s for s in find_norms(model) if s.reads == "attention"):
        attn = model.blocks[site.layer].attn
        kind = "rot_" if positions == "rotary" else ""
        q, k = (cache[f"blocks.{site.layer}.attn.hook_{kind}{n}"][0] for n in "qk")
        x = cache[f"blocks.{site.layer}.hook_resid_pre"][0]
        y = site.affine((x - x.mean(-1, keepdim=True)) / constants[site.name]["rest"])
        unscaled = attn._project(y[None], attn.W_K, attn.b_K)
        unscaled = attn._turn(unscaled)[0] if positions == "rotary" else unscaled[0]
        changed = k.clone()
        changed[4] = unscaled[4]
        for keys, into in ((k, 0), (changed, 1)):
            scores = torch.einsum("qhd,khd->hqk", q, keys) / math.sqrt(8)
            scores = scores.masked_fill(torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1), -math.inf)
            got = float(scores.softmax(-1)[:, 4:, 4].sum())
            there, without = there + got * (into == 0), without + got * (into == 1)
        count += 4 * (LENGTH - 4)
    assert row["received_there"] == pytest.approx(there / count, rel=1e-4)
    assert row["received_no_scaling"] == pytest.approx(without / count, rel=1e-4)
    assert abs(row["received_no_scaling"] - row["received_there"]) > 0.01


def test_what_the_first_token_receives_by_counting() -> None:
    """Of the queries behind it, how many give token 0 much, and how much they give it: head by head."""
    model = model_of(positions="learned")
    with torch.no_grad():
        model.embed.W_E[5] *= 40
    prompts = torch.stack([TOKENS, TOKENS.roll(3)])
    heads = ln_probe.analyze(model, prompts, probes=("sinks",), progress=False).tables["sink_heads"]
    _, cache = model.run_with_cache(prompts)
    rates = []
    for row in heads.itertuples():
        pattern = cache[f"blocks.{row.layer}.attn.hook_pattern"][:, row.head, 1:, 0]
        assert row.first_rate == pytest.approx(float((pattern > MUCH).double().mean()), abs=1e-9)
        assert row.first_attention == pytest.approx(float(pattern.double().mean()), rel=1e-5)
        rates.append(row.first_rate)
    assert len(set(rates)) > 1, "rates that are all alike tell no head from another"


def test_nothing_to_find() -> None:
    model, tokens = model_of(), torch.arange(1, 31)[None]
    report = ln_probe.analyze(model, tokens, probes=("sinks",), progress=False)
    if not len(report.tables["sinks"]):
        assert any("no token is an outlier" in f for f in report.findings())


def test_short_prompts_are_noted() -> None:
    report = ln_probe.analyze(model_of(), torch.tensor([[1, 2, 3], [4, 5, 6]]), probes=("sinks",), progress=False)
    assert any("2 prompts of fewer than 8 tokens were not searched" in n for n in report.notes)
    unseen = "sinks: in 2 prompts no token is seen by 10 queries that see another one: no sink can be detected there"
    assert unseen in report.notes
    assert not report.failures


@pytest.mark.slow
def test_position_0_of_a_real_checkpoint(mgm: Path) -> None:
    """Found among all positions, with the norm at which it emerges and what wrote it."""
    model = ln_probe.load_model(mgm, allow_pickle=True)
    report = ln_probe.analyze(model, probes=("sinks",), max_tokens=96, progress=False)
    sinks = report.tables["sinks"]
    first = sinks[(sinks["position"] == 0) & sinks["outlier"]]
    assert first["prompt"].nunique() == report.provenance["prompts"]["count"]
    assert (first["emerges_at"] != "").all()
    assert (first["writer"] != "").all()
    assert first["sink"].mean() > 0.5
    assert (first["received"] > first["uniform"]).all()
    assert first["received"].mean() > 3 * first["uniform"].mean()  # (in short prompts uniform attention is much, too)
    assert any(f.startswith("Position 0:") and "written by" in f for f in report.findings())
