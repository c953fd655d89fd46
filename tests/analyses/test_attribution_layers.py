"""What a part does through later layers, against reruns without it; and where attribution went wrong once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from architectures import make_bridge, make_hooked
from small_models import lab
from torch import Tensor

import ln_probe
from ln_probe import attribute_scores
from ln_probe.analyses.attribution import attribute_logits, attribute_through_layers
from ln_probe.analyses.attribution.shared import AttributionError
from ln_probe.hooks import linearized
from ln_probe.hooks.components import find_wiring
from ln_probe.hooks.sites import find_sites

TOKENS = torch.arange(1, 11)


def without_head(model: Any, layer: int, head: int, target: int) -> float:
    """The last logit with a head's z zeroed at every position, sigmas and patterns those of the intact run."""
    kept: dict[str, Tensor] = {}
    points = [f"blocks.{i}.attn.hook_pattern" for i in range(2)]
    model.run_with_hooks(
        TOKENS[None], fwd_hooks=[(n, lambda t, hook: kept.__setitem__(hook.name, t.detach())) for n in points]
    )

    def drop(z: Tensor, hook: Any) -> Tensor:
        z = z.clone().reshape(*z.shape[:2], 4, -1)
        z[:, :, head] = 0
        return z

    hooks = [(n, lambda t, hook: kept[hook.name]) for n in points]
    sigmas = linearized.sigmas(model, TOKENS)
    with torch.no_grad(), linearized(model, sigma=sigmas):
        edited = model.run_with_hooks(TOKENS[None], fwd_hooks=[*hooks, (f"blocks.{layer}.attn.hook_z", drop)])
    return float(edited[0, -1, target])


def test_heads_of_an_attention_only_model_are_what_reruns_without_them_lose() -> None:
    model = make_hooked(attn_only=True, dtype=torch.float64)
    found = attribute_through_layers(model, TOKENS, target=3)
    effects = found.table.set_index("part")["effect"]
    for layer in range(2):
        for head in range(4):
            lost = found.total - without_head(model, layer, head, 3)
            assert lost == pytest.approx(effects[f"L{layer}H{head}"], abs=1e-10)


def test_direct_mediated_and_what_is_left_over() -> None:
    for model in (make_bridge("gpt2", torch.float64), make_bridge("neox", torch.float64), lab().double()):
        found = attribute_through_layers(model, TOKENS, 6, target=3, against=4)
        direct = attribute_logits(model, TOKENS, 6, target=3, against=4)
        table = found.table.set_index("part")
        for part, value in direct.table.set_index("part")["contribution"].items():
            if part in table.index:
                assert table.loc[part, "direct"] == pytest.approx(value, abs=1e-12)
        assert table["direct"].add(table["mediated"]).sub(table["effect"]).abs().max() <= 1e-12
        assert abs(table.loc["L1 mlp", "mediated"]) <= 1e-10  # nothing comes after it
        assert table.loc["L0 mlp", "mediated"] != pytest.approx(0.0, abs=1e-6)
        assert found.total == pytest.approx(direct.total, abs=1e-10)
        first = found.remainders.iloc[0]
        embeddings = table[table["kind"].isin(["embedding", "position"])]["effect"].sum()
        assert first["first_order"] == pytest.approx(embeddings, abs=1e-10)  # the stream there is made of them
        assert first["first_order"] + first["remainder"] == pytest.approx(found.total, abs=1e-12)
        assert "patterns held" in found._repr_html_()


def test_a_pattern_that_cannot_be_held_is_named() -> None:
    with pytest.raises(AttributionError, match=r"the attention pattern of layer [01] cannot be held: this world shows"):
        attribute_through_layers(make_bridge("opt"), TOKENS)


LONGER = torch.arange(1, 21)


def wiring_of(model: Any) -> dict[str, dict[str, float]]:
    reads = find_wiring(model, find_sites(model)).reads
    return {at: {str(source): factor for source, factor in made.items()} for at, made in reads.items()}


@pytest.mark.parametrize(("arch", "dtype"), [("neox", torch.bfloat16), ("gemma2", torch.bfloat16)])
def test_rounding_of_16_bits_bends_no_factor(arch: str, dtype: torch.dtype) -> None:
    """The same sources with the same factors as in float32, up to the rounding of a scaled embedding."""
    exact, rounded = wiring_of(make_bridge(arch)), wiring_of(make_bridge(arch, dtype))
    assert exact.keys() == rounded.keys()
    for at, made in exact.items():
        assert made.keys() == rounded[at].keys(), at
        assert rounded[at] == pytest.approx(made, rel=5e-3), at


def test_a_part_of_the_last_layer_goes_through_no_other() -> None:
    """Its whole effect is the direct one, soft cap or not."""
    for options in ({}, {"output_logits_soft_cap": 2.0}):
        model = make_hooked(attn_only=True, dtype=torch.float64, **options)
        found = attribute_through_layers(model, LONGER)
        last = found.table[found.table["layer"] == found.table["layer"].max()]
        assert len(last)
        assert last["mediated"].abs().max() < 1e-8
        assert attribute_logits(model, LONGER, -1).soft_cap == options.get("output_logits_soft_cap", 0.0)


def test_keys_whose_attention_underflows_are_seen_all_the_same() -> None:
    """Scores so far apart that float32 attention is exactly 0: the mean is over what the mask lets through."""
    model, wide = make_bridge("gpt2"), make_bridge("gpt2", torch.float64)
    with torch.no_grad():
        for one in (model, wide):
            for name, parameter in one.named_parameters():
                if "attn" in name and name.endswith("weight"):
                    parameter.mul_(12)
    asked: dict[str, Any] = {"layer": 0, "head": 2, "query": 19, "key": 3, "against": "mean"}
    pattern = model.run_with_cache(LONGER[None])[1]["blocks.0.attn.hook_pattern"][0, 2, 19]
    assert (pattern == 0).any()
    found, expected = (attribute_scores(m, LONGER, **asked).check() for m in (model, wide))
    assert found.total == pytest.approx(expected.total, rel=1e-4)


@pytest.mark.parametrize("outputs", [40, 60])
def test_outputs_that_are_not_the_inputs(outputs: int) -> None:
    model = make_hooked(d_vocab_out=outputs)
    first = int(model(LONGER[None])[0, -1].argmax())
    assert attribute_logits(model, LONGER, -1, against="mean").check().label.startswith(f"logit of {first} ")
    with pytest.raises(AttributionError, match=f"token id {outputs} is outside the vocabulary of {outputs}"):
        attribute_logits(model, LONGER, -1, target=outputs)
    said = rf"token id {outputs}, the next one at one of these positions, has no logit: the model has {outputs} outputs"
    if outputs < 50:
        with pytest.raises(AttributionError, match=said):
            attribute_logits(model, torch.tensor([1, 2, outputs]))
        attribute_logits(model, torch.tensor([1, 2, outputs, 3]), [0, 2]).check()
    if outputs > 50:
        assert attribute_logits(model, LONGER, -1, target=outputs - 1).check()


def test_tokens_of_any_kind_of_whole_number() -> None:
    model = make_bridge("gpt2")
    plain = attribute_logits(model, LONGER, 3, target=7).total
    for position, target in ((np.int64(3), np.int64(7)), (torch.tensor(3), torch.tensor(7)), (3, np.array([7]))):
        assert attribute_logits(model, LONGER, position, target=target).total == plain
    for wrong in (2.7, True, [None]):
        with pytest.raises(AttributionError, match="a token id must be a whole number"):
            attribute_logits(model, LONGER, -1, target=wrong)


def test_an_input_for_every_head() -> None:
    """`set_use_split_qkv_input`: a norm sees each token once for every head, all the same."""
    model = make_hooked(dtype=torch.float64)
    expected = attribute_logits(model, LONGER, -1).check().total
    score = attribute_scores(model, LONGER, 1, 2, 9, 3).check().total
    report = ln_probe.analyze(model, LONGER[None], probes=("decomposition", "uniformity", "sinks"), progress=False)
    model.set_use_split_qkv_input(True)
    assert attribute_logits(model, LONGER, -1).check().total == pytest.approx(expected, rel=1e-9)
    assert attribute_scores(model, LONGER, 1, 2, 9, 3).check().total == pytest.approx(score, rel=1e-9)
    split = ln_probe.analyze(model, LONGER[None], probes=("decomposition", "uniformity", "sinks"), progress=False)
    np.testing.assert_allclose(split.heads["entropy_ratio"], report.heads["entropy_ratio"], rtol=1e-9)
    np.testing.assert_allclose(split.layernorms["sigma_mean"], report.layernorms["sigma_mean"], rtol=1e-9)


def test_large_weights_edited_through_data_between_calls() -> None:
    """PyTorch does not count such edits, so what is known of the model is kept; sums are of the weights as they are."""
    model = make_hooked(d_vocab=4000, dtype=torch.float64)
    before = attribute_logits(model, LONGER, -1, target=3).check()
    model.W_E.data.mul_(3)
    model.W_U.data.mul_(2)
    found = attribute_logits(model, LONGER, -1, target=3).check()
    assert found.total == pytest.approx(float(model(LONGER[None])[0, -1, 3].detach()), abs=1e-10 * found.scale)
    assert abs(found.total - before.total) > 1e-3
