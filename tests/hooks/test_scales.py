"""What stands for sigma: two constants, one, or others' sigmas; and where position 0 is in every kind of pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from ln_probe.hooks import without
from ln_probe.hooks.scales import Constant, Resampled, Sigmas, calibration_sigmas
from ln_probe.hooks.sites import find_sites

TOKENS = torch.arange(1, 21).view(2, 10)


def edited_by_hand(model: Any, name: str, divisor: Tensor) -> Tensor:
    """Logits with one LayerNorm dividing by `divisor` [batch pos 1], as a plain hook on its module."""
    site = next(s for s in find_sites(model) if s.name == name)

    def hook(_m: Any, args: Any, _y: Tensor) -> Tensor:
        x = args[0]
        return (x - x.mean(-1, keepdim=True)) / divisor.to(x) * site.gain.to(x) + site.bias.to(x)  # type: ignore[union-attr]

    handle = site.module.register_forward_hook(hook)
    try:
        with torch.no_grad():
            found: Tensor = model(TOKENS)
    finally:
        handle.remove()
    return found


@pytest.mark.parametrize("scale", ["frozen", "uniform"])
def test_one_constant_and_two(scale: str, make_bridge: Callable[..., Any]) -> None:
    model, name = make_bridge("gpt2", torch.float64), "blocks.1.ln1"
    site = next(s for s in find_sites(model) if s.name == name)
    sigma = calibration_sigmas(model, [site], list(TOKENS))[name]
    divisor = torch.full((2, 10, 1), float(sigma.rest.mean()), dtype=torch.float64)
    if scale == "frozen":
        divisor[:, 0] = float(sigma.first.mean())
    with torch.no_grad(), without(model, "scaling", sites=[name], scale=scale, tokens=TOKENS) as done:
        found = model(TOKENS)
    torch.testing.assert_close(found, edited_by_hand(model, name, divisor), rtol=1e-12, atol=1e-12)
    assert done.divisors[name] == Constant(float(divisor[0, 0]), float(divisor[0, 1]))
    assert done.matched


def test_resampled_sigmas_are_those_of_other_tokens() -> None:
    drawn = Resampled(Sigmas(torch.arange(100.0, 104).double().numpy(), torch.arange(1.0, 6).double().numpy()), "seed")
    first = torch.zeros(3, 7, 1, dtype=torch.bool)
    first[:, 0] = True
    values = drawn.at(first, torch.zeros(3, 7, 4))
    assert set(values[:, 0].flatten().tolist()) <= {100, 101, 102, 103}
    assert set(values[:, 1:].flatten().tolist()) == {1, 2, 3, 4, 5}
    assert torch.equal(values, drawn.at(first, torch.zeros(3, 7, 4)))  # asked again for the same vectors
    assert not torch.equal(values, drawn.at(first, torch.ones(3, 7, 4)))


def test_resampling_repeats_with_its_seed(make_bridge: Callable[..., Any]) -> None:
    model = make_bridge("gpt2")
    found = []
    for seed in (0, 0, 1):
        with torch.no_grad(), without(model, "scaling", scale="resampled", tokens=TOKENS, seed=seed) as done:
            found.append(model(TOKENS))
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])
    assert done.matched


@pytest.mark.parametrize("arch", ["gpt2", "llama", "hooked"])
def test_with_a_cache_later_tokens_are_not_position_0(
    arch: str, make_bridge: Callable[..., Any], request: pytest.FixtureRequest
) -> None:
    """Token by token, with earlier keys and values kept: the same logits as all at once.

    Rotary tables are float32 in every format, and on some processors differ in the last bit with the number of
    positions, so the intact model's two passes may differ, too.
    """
    hooked = arch == "hooked"
    model = request.getfixturevalue("make_hooked")(dtype=torch.float64) if hooked else make_bridge(arch, torch.float64)
    scale = {s.name: {"first": 3.0, "rest": 0.7} for s in find_sites(model)}

    def apart() -> float:
        """The largest difference of the two ways, relative to the largest logit."""
        whole = model(TOKENS)
        if hooked:
            from transformer_lens.cache.key_value_cache import TransformerLensKeyValueCache as Cache

            cache = Cache.init_cache(model.cfg, "cpu", 2)
            steps = [
                model(part, past_kv_cache=cache, attention_mask=torch.ones_like(part))
                for part in (TOKENS[:, :4], *TOKENS[:, 4:].split(1, dim=1))
            ]
        else:
            steps, cache = [], None
            for part in (TOKENS[:, :4], *TOKENS[:, 4:].split(1, dim=1)):
                out = model.original_model(part, past_key_values=cache, use_cache=True)
                cache = out.past_key_values
                steps.append(out.logits)
        assert torch.equal(model(TOKENS), whole)
        return float((torch.cat(steps, dim=1) - whole).abs().max() / whole.abs().max())

    with torch.no_grad():
        intact = apart()
        assert intact < 1e-6
        with without(model, "scaling", sites="all", scale=scale):
            assert apart() < 1e-9 + 10 * intact


def test_padding_on_the_left_moves_position_0(make_bridge: Callable[..., Any]) -> None:
    model = make_bridge("gpt2", torch.float64)
    padded = torch.cat([torch.zeros(1, 3, dtype=torch.long), TOKENS[:1]], dim=1)
    mask = torch.tensor([[0] * 3 + [1] * 10])
    scale = {s.name: (3.0, 0.7) for s in find_sites(model)}
    with torch.no_grad(), without(model, "scaling", sites="all", scale=scale):
        whole = model(TOKENS[:1])
        shifted = model(padded, attention_mask=mask)[:, 3:]
    torch.testing.assert_close(shifted, whole, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("given", [True, (1.0, 2.0, 3.0), {"first": 1.0}, "1"])
def test_what_is_no_constant(given: object) -> None:
    with pytest.raises(ValueError, match="a constant is a number or"):
        Constant.of(given)
