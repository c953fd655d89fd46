"""A model in, a report out: on real checkpoints, in both TransformerLens worlds, with bad input; the headline alone;
losses of the user's own."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from architectures import cases, folded_in_place, make_bridge, make_hooked
from small_models import lab
from torch import Tensor

import ln_probe
from ln_probe import exhibits
from ln_probe.analyses.probes.tables import TABLES
from ln_probe.analyses.text import with_interval
from ln_probe.hooks.model import facts_of
from ln_probe.hooks.task import Objective, ObjectiveError
from ln_probe.passes import CENTRED, _shipped
from ln_probe.prompts import make_prompts

pytestmark = pytest.mark.lens

GEOMETRY = ("decomposition", "selectability", "uniformity")


@pytest.fixture(scope="module")
def gpt2() -> Any:
    """For tests that change nothing of it."""
    return make_bridge("gpt2")


def test_layers_and_heads_are_a_selection_of_the_whole(gpt2: Any) -> None:
    tokens = torch.arange(1, 13)[None]
    how: dict[str, Any] = {"probes": GEOMETRY, "progress": False}
    whole = ln_probe.analyze(gpt2, tokens, **how)
    part = ln_probe.analyze(gpt2, tokens, layers=[1], heads=[0, 2], **how)
    expected = whole.heads[(whole.heads["layer"] == 1) & whole.heads["head"].isin([0, 2])].reset_index(drop=True)
    assert part.heads.equals(expected)
    assert set(part.keys["head"]) == {0, 2}
    assert set(part.layernorms["layer"]) == {1}


@pytest.mark.parametrize(("centred", "norm"), [(True, "layernorm"), (False, "layernorm"), (True, "scaling_only")])
def test_a_stream_of_mean_0_is_told_whatever_its_size(centred: bool, norm: str) -> None:
    model = lab(n_layers=1, norm=norm, norm_mlp=norm, norm_final=norm)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.split(".")[-1] in ("W_E", "W_pos", "W_O", "b_O", "W_out", "b_out"):
                weight.copy_(1e-4 * (weight - weight.mean(-1, keepdim=True) if centred else weight))
    report = ln_probe.analyze(model, torch.arange(1, 13)[None], probes=("decomposition",), progress=False)
    assert (CENTRED in report.notes) == (centred and norm == "layernorm")


def test_attention_is_shown_of_the_first_tokens(gpt2: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exhibits, "TOKENS_SHOWN", 12)
    for count in (12, 13):
        shown = ln_probe.analyze(gpt2, torch.arange(1, count + 1)[None], probes=GEOMETRY, progress=False).exhibits
        assert len(shown.attention.tokens) == 12
        assert any("first 12 of the 13 tokens" in note for note in shown.notes) == (count == 13)


def test_a_post_norm_model_is_measured_block_by_block() -> None:
    """BERT: attention reads the norm of the block before. (Its columns: test_models_in_memory.py.)"""
    model, tokens = make_bridge("bert"), torch.arange(1, 25)[None]
    how: dict[str, Any] = {"probes": GEOMETRY, "progress": False}
    report = ln_probe.analyze(model, tokens, **how)
    assert set(report.heads["layer"]) == {0, 1}
    assert any("not causal" in n for n in report.notes)
    # one layer alone needs the constant of a norm in the block before
    part = ln_probe.analyze(model, tokens, layers=[1], **how)
    assert part.heads.equals(report.heads[report.heads["layer"] == 1].reset_index(drop=True))
    assert list(part.layernorms["site"]) == ["blocks.1.ln1", "blocks.1.ln2"]


HALF = list(product(("gpt2", "neox", "llama", "gemma", "qwen3", "bert"), (torch.bfloat16, torch.float16)))


@pytest.mark.parametrize(("arch", "dtype"), cases(HALF[0], slow=HALF[1:]))
def test_half_precision_is_measured_whole(arch: str, dtype: torch.dtype) -> None:
    report = ln_probe.analyze(make_bridge(arch, dtype), torch.arange(1, 21)[None], progress=False)
    assert len(report.heads)
    assert not any("than rounding in" in note for note in report.notes)


def test_a_model_without_norms_is_reported_as_such() -> None:
    """No norm to take apart, and heads as in any other model."""
    report = ln_probe.analyze(make_hooked(normalization_type=None), torch.arange(9)[None], progress=False)
    assert {t.name for t in TABLES if len(report.tables[t.name])} == {"heads", "keys", "sinks", "sink_heads"}
    assert report.sinks["kind"].str.startswith("first").tolist() == [True]
    assert report.sinks["length_ratio"].isna().all()
    sinks = next(text for text in report.findings() if "position 0" in text)
    assert "uniform: " in sinks
    assert not any(word in sinks for word in ("nan", "median", "Not measured"))
    assert "no normalization" in report.notes[0]
    assert "no normalization" in report.findings()[0]
    assert "no normalization" in report._repr_html_()


@pytest.mark.parametrize("make", [make_hooked, lambda: make_bridge("gpt2")])
def test_a_folded_model_is_told_what_to_load(make: Any) -> None:
    model = folded_in_place(make(), centre=True)
    report = ln_probe.analyze(model, torch.arange(1, 11)[None], probes="causal", progress=False)
    assert any("from_pretrained_no_processing" in note and "load_model" in note for note in report.notes)


def test_unsupported_scores_are_a_note_and_the_rest_is_measured() -> None:
    model = make_hooked(attn_scores_soft_cap=3.0)
    report = ln_probe.analyze(model, torch.arange(20)[None], probes=GEOMETRY, progress=False)
    assert any("soft cap of 3" in n for n in report.notes)
    assert report.heads.empty
    assert len(report.layernorms) == 5


def test_a_single_token(gpt2: Any) -> None:
    report = ln_probe.analyze(gpt2, torch.tensor([[3]]), progress=False)
    assert (report.keys["verdict"] == "selectable").all()
    assert report.keys["margin_lower"].isna().all()
    assert report.heads["entropy_ratio"].isna().all()
    assert "<" in report._repr_html_()


@pytest.mark.parametrize("options", [
    {"probes": ("decompositon",)}, {"probes": ()}, {"probes": None},
    {"max_tokens": None}, {"max_tokens": 1}, {"max_tokens": "9"},
    {"seed": None}, {"seed": 2**64}, {"seed": 1.5},
    {"groups": {"a"}}, {"groups": [float("nan")]}, {"groups": [torch.tensor(1)]}, {"groups": [[1]]},
    {"vocab": ""}, {"vocab": []}, {"optimal": "x"}, {"progress": "no"}, {"prepend_bos": "no"},
    {"layers": [2]}, {"layers": []}, {"heads": [-1]},
    *({"batch_size": wrong} for wrong in (0, -1, True, 2.5, "4")),
])  # fmt: skip
def test_bad_arguments_are_named(options: dict[str, Any], gpt2: Any) -> None:
    name = next(iter(options)).removesuffix("s")
    with pytest.raises((ValueError, TypeError), match=name):
        ln_probe.analyze(gpt2, torch.arange(9)[None], **({"progress": False} | options))


TOKENS = torch.randint(1, 50, (6, 12), generator=torch.Generator().manual_seed(0))


def next_token(output: Tensor, tokens: Tensor) -> Tensor:
    losses = F.cross_entropy(output[:, :-1].flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
    return losses.view(len(tokens), -1).mean(-1)


def drifting(output: Tensor, tokens: Tensor) -> Tensor:
    return torch.rand(len(tokens))


def test_the_headline_is_the_number_of_the_report(gpt2: Any) -> None:
    cost = ln_probe.freezing_cost(gpt2, TOKENS)
    report = ln_probe.analyze(gpt2, TOKENS, probes=["causal"], progress=False)
    rows = report.causal.set_index(["sites", "variant"])
    row = rows.loc[("all", "no_scaling")]
    assert cost.estimate == pytest.approx(float(row["delta_loss"]), abs=1e-6)
    assert np.isnan(cost.low)
    assert cost.loss == pytest.approx(float(row["loss"] - row["delta_loss"]), abs=1e-6)
    assert repr(cost) == report.findings()[0]
    assert cost.constants.of(2) == report.constants.of(2) == ln_probe.norm_constants(gpt2, TOKENS).of(2)
    assert ln_probe.norm_constants(gpt2, TOKENS, max_prompts=2).of(1) == ln_probe.norm_constants(gpt2, TOKENS[:2]).of(1)
    assert set(cost.table["family"]) == {"primary"}
    with pytest.raises(ValueError, match="max_tokens"):
        ln_probe.norm_constants(gpt2, TOKENS, max_tokens=1)


@pytest.mark.parametrize("overflow", [False, True])
def test_the_headline_in_words_and_as_json(overflow: bool, gpt2: Any) -> None:
    """All contrasts, scaling first, with their intervals; what is not known is None."""
    rows = torch.randint(1, 50, (16, 6), generator=torch.Generator().manual_seed(1))
    cost = ln_probe.freezing_cost(gpt2, rows, progress=False)
    if overflow:
        cost = replace(cost, table=cost.table.assign(p=math.nan, delta_loss=math.nan), estimate=math.nan)
    expected = []
    for variant in ("no_scaling", "no_projection"):
        for sites in ("attention", "all"):
            row = cost.table.set_index(["variant", "sites"]).loc[(variant, sites)]
            size, ends = with_interval(row["delta_loss"], row["delta_loss_low"], row["delta_loss_high"])
            p = "< 0.001" if row["p"] < 0.001 else f"{row['p']:.2g}"
            expected.append(["not finite"] if overflow else [size, ends, p])
    lines = str(cost).partition("\n\n")[2].splitlines()
    assert [re.split(r" {2,}", line)[1:] for line in lines[1:5]] == expected
    assert lines[6].startswith(f"intact loss: {cost.loss:.4g} nats/token on 16 prompts")
    plain = json.loads(json.dumps(cost.plain, allow_nan=False))
    assert (plain["estimate"] is None, plain["loss"], plain["prompts"]) == (overflow, cost.loss, cost.prompts)
    assert plain["constants"]["pooled"]["ln_final"]["rest"] == cost.constants.pooled["ln_final"].rest
    kept = [{k: None if v != v else v for k, v in row.items()} for row in cost.table.to_dict("records")]
    assert plain["contrasts"] == kept


def test_what_a_report_records_of_its_call(gpt2: Any) -> None:
    how: dict[str, Any] = {"layers": [-1], "heads": [2], "max_tokens": 9, "seed": 3, "batch_size": 2, "optimal": False}
    how |= {"loss": "test_analyze:next_token", "probes": ["uniformity"]}
    report = ln_probe.analyze(gpt2, TOKENS, progress=False, **how)
    assert report.provenance["arguments"] == how | {"layers": [1], "tokenizer": None}
    assert report.provenance["shape"] == {"d_model": 32, "layers": 2, "heads": 4}


def test_a_model_without_a_next_token_loss_is_told_so() -> None:
    report = ln_probe.analyze(make_hooked(d_vocab_out=3), TOKENS, probes=["causal"], progress=False)
    assert report.causal["loss"].isna().all()
    assert any("3 outputs" in note and "loss=" in note for note in report.notes)
    with pytest.raises(ValueError, match="loss="):
        ln_probe.freezing_cost(make_bridge("bert"), TOKENS)


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda output, tokens: output.mean(), "must return"),
        (lambda output, tokens: 3.0, "must return"),
        (lambda output, tokens: torch.full((len(tokens),), float("nan")), "finite"),
        (drifting, "fixed"),
        (lambda: 1.0, "raised TypeError"),
        (lambda output, tokens: {}["a"], "raised KeyError"),
        ("math:nope", "nope"),
        ("math:pi", "got float"),
        (3, "got int"),
        ("nowhere_to_be_found:loss", "nowhere_to_be_found"),
        ("loss", "module:function"),
    ],
)
def test_a_loss_that_cannot_be_used_is_refused(loss: Any, message: str, gpt2: Any) -> None:
    with pytest.raises(ObjectiveError, match=message):
        ln_probe.freezing_cost(gpt2, TOKENS, loss=loss)


def test_a_loss_without_a_gradient_has_intervals_over_prompts_alone(gpt2: Any) -> None:
    def errors(output: Tensor, tokens: Tensor) -> Tensor:
        return (output[:, :-1].argmax(-1) != tokens[:, 1:]).double().mean(-1)

    report = ln_probe.analyze(gpt2, TOKENS, probes=["causal"], progress=False, loss=errors)
    assert any("choice of constants" in note for note in report.notes)
    assert report.causal["delta_loss"].notna().all()


def test_an_objective_is_named_after_its_function() -> None:
    assert Objective.of(next_token).name.endswith("test_analyze:next_token")
    assert Objective.of("torch:numel").name == "torch:numel"
    assert Objective.of(None).unit == "nats/token"


def test_a_bundled_model_brings_loss_optimal_constants_for_its_own_prompts() -> None:
    model = ln_probe.load_model("lm-layernorm", device="cpu")
    own, other = (make_prompts(model, prompts) for prompts in (None, "The ships came home."))
    assert set(_shipped(facts_of(model), model.parameters(), own) or ()) == {"attention", "all"}
    assert _shipped(facts_of(model), model.parameters(), other) is None
