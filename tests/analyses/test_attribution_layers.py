"""What a part does through later layers, sigmas and patterns held: against reruns without it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from small_models import lab
from torch import Tensor

from ln_probe.analyses.attribution import attribute_logits, attribute_through_layers
from ln_probe.analyses.attribution.shared import AttributionError
from ln_probe.hooks import linearized

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


def test_heads_of_an_attention_only_model_are_what_reruns_without_them_lose(make_hooked: Callable[..., Any]) -> None:
    model = make_hooked(attn_only=True, dtype=torch.float64)
    found = attribute_through_layers(model, TOKENS, target=3)
    effects = found.table.set_index("part")["effect"]
    for layer in range(2):
        for head in range(4):
            lost = found.total - without_head(model, layer, head, 3)
            assert lost == pytest.approx(effects[f"L{layer}H{head}"], abs=1e-10)


def test_direct_mediated_and_what_is_left_over(make_bridge: Callable[..., Any]) -> None:
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


def test_a_pattern_that_cannot_be_held_is_named(make_bridge: Callable[..., Any]) -> None:
    with pytest.raises(AttributionError, match=r"the attention pattern of layer [01] cannot be held: this world shows"):
        attribute_through_layers(make_bridge("opt"), TOKENS)
