"""A folded model is the raw one, or the check says from which norm on it is not, and why."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from architectures import cases, make_bridge, make_folded, make_hooked, process

from ln_probe.hooks import NotEquivalentError, check_equivalent


def folded_hooked(**options: Any) -> tuple[Any, Any]:
    raw = make_hooked(**options)
    rms = options.get("normalization_type") == "RMS"
    folded = make_hooked(**(options | {"normalization_type": "RMSPre" if rms else "LNPre"}))
    every = {"fold_ln": True, "center_writing_weights": not rms, "center_unembed": True, "fold_value_biases": True}
    return raw, process(folded, raw, **every)


@pytest.mark.parametrize(("arch", "dtype", "bound"), cases(
    ("gpt2", torch.float32, 1e-5), ("neox", torch.float64, 1e-6), ("qwen3", torch.float32, 1e-5),
    ("bert", torch.float64, 1e-6),
    slow=[(arch, torch.float32, 1e-5) for arch in ("opt", "neo", "llama", "gemma", "gemma2")],
))  # fmt: skip
def test_folded_bridges_are_equivalent(arch: str, dtype: torch.dtype, bound: float) -> None:
    found = check_equivalent(make_bridge(arch, dtype), make_folded(arch, dtype, centre=True))
    assert found.holds
    assert found.parts_at == ""
    assert found.logits_difference < bound
    assert len(found.normalized_difference) >= 5
    assert max(found.normalized_difference.values()) < bound


@pytest.mark.parametrize("options", [{"normalization_type": "RMS"}, {"parallel_attn_mlp": True}])
def test_folded_hooked_transformers_are_equivalent(options: dict[str, Any]) -> None:
    found = check_equivalent(*folded_hooked(**options))
    assert found.log_prob_difference < 1e-4
    assert found.logits_difference < 1e-5


SQUARE = (
    r"log-probabilities differ by up to .* nats .* bound 1e-04\)\. They part before blocks\.1\.ln1, after "
    r"blocks\.0\.ln2\. d_mlp == d_model == 32: a square W_in is folded or centred the wrong way round, load this model "
    "unfolded"
)


def test_a_square_w_in_is_caught_in_hooked_transformer() -> None:
    """The real fault of TransformerLens: fold_ln guesses the orientation of a square matrix."""
    raw, folded = folded_hooked(d_mlp=32)
    with pytest.raises(NotEquivalentError, match=SQUARE):
        check_equivalent(raw, folded)


def test_a_square_w_in_is_caught_in_the_bridge() -> None:
    with pytest.raises(NotEquivalentError, match=SQUARE):
        check_equivalent(make_bridge("gpt2", n_inner=32), make_folded("gpt2", n_inner=32))


def test_centring_a_model_with_rmsnorm_is_caught() -> None:
    raw, centred = make_bridge("llama"), make_bridge("llama")
    with torch.no_grad():
        for name, parameter in centred.named_parameters():
            if "embed" in name and parameter.ndim == 2 and "unembed" not in name:
                parameter.sub_(parameter.mean(-1, keepdim=True))
    with pytest.raises(
        NotEquivalentError,
        match=r"They part before blocks\.0\.ln1, its first norm\. Centring changes a model with RMSNorm",
    ):
        check_equivalent(raw, centred)


def test_a_wrong_unembedding_is_named() -> None:
    raw, wrong = make_bridge("neox"), make_bridge("neox")
    with torch.no_grad():
        wrong.unembed.weight.mul_(1.1)
    with pytest.raises(NotEquivalentError, match="All norms see the same: what follows the last one is wrong"):
        check_equivalent(raw, wrong)


def test_what_is_compared_and_left_as_it_was() -> None:
    raw, folded, tokens = make_bridge("gpt2"), make_folded("gpt2"), torch.arange(1, 9)
    raw.train()
    assert check_equivalent(raw, folded, tokens[None]) == check_equivalent(raw, folded, tokens)
    assert raw.training
    assert not any(m._forward_hooks for _, m in raw.named_modules() if type(m).__name__ == "HookPoint")
    with pytest.raises(ValueError, match=r"tokens must be one prompt, \[pos\] or \[1 pos\], got shape \(2, 4\)"):
        check_equivalent(raw, folded, tokens.view(2, 4))
    with pytest.raises(ValueError, match="the models have vocabularies of 50 and 60 tokens"):
        check_equivalent(raw, make_bridge("gpt2", vocab_size=60))
