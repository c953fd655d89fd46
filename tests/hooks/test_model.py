"""Models that cannot be measured are refused, and told why."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from architectures import hugging_face, make_bridge, make_hooked

import ln_probe
from ln_probe.hooks.model import check_model, logit_factor, ordinary_tokens


def refusals(model: Any) -> str:
    """Return what both `check_model` and `analyze` say of a model that they refuse."""
    messages = []
    for use in (check_model, lambda m: ln_probe.analyze(m, torch.arange(5)[None], progress=False)):
        with pytest.raises(ValueError) as raised:  # noqa: PT011  (the caller looks for a word)
            use(model)
        messages.append(str(raised.value))
    assert messages[0] == messages[1]
    return messages[0]


def test_models_without_all_their_weights() -> None:
    half = make_bridge("llama")
    half.blocks[1].mlp.to("meta")
    assert "meta" in refusals(half)
    assert "transformer.wte.weight" in refusals(make_bridge("gpt2").to("meta"))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e4m3fn])
def test_quantized_models(dtype: torch.dtype) -> None:
    model = make_hooked()
    model.blocks[0].attn.W_Q = torch.nn.Parameter(torch.zeros(8, 4).to(dtype), requires_grad=False)
    assert "blocks.0.attn.W_Q is quantized" in refusals(model)


@pytest.mark.parametrize(("arch", "factor"), [("gpt2", 1.0), ("cohere", 0.0625), ("granite", 0.5)])
def test_what_the_unembeddings_logits_are_multiplied_by(arch: str, factor: float) -> None:
    assert logit_factor(make_bridge(arch)) == factor


def test_tokens_that_logits_are_compared_on_are_not_special() -> None:
    config = hugging_face("llama", pad_token_id=0, bos_token_id=1, eos_token_id=[2, 9]).config
    drawn = set(ordinary_tokens(config, torch.device("cpu"))[0].tolist())
    assert len(drawn) > 10
    assert not drawn & {0, 1, 2, 9}
