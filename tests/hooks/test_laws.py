"""Every law of `laws.py`, of every architecture in every model class that can hold it; what is refused is listed."""

from __future__ import annotations

import re

import pytest
from laws import LAWS, Refused, cases, subject

# A few that differ most: learned, rotary and ALiBi positions; parallel blocks, grouped keys, tied and untied heads, an
# encoder with a norm in its head.
FAST = ("gpt2", "neox", "mistral", "mpt", "bert", "phi")
# What is refused, and with which words; anything else that is refused is a failure.
NOT_LOADED = {
    "biogpt": "architecture 'BioGptForCausalLM' is not supported",
    "persimmon": "architecture 'PersimmonForCausalLM' is not supported",
}
NO_BRIDGE = (
    "gpt2-unscaled", "cohere", "cohere2", "hunyuan", "falcon-40b", "gpt-bigcode-many-keys"
)  # fmt: skip
NOT_FAITHFUL = r"could not be loaded faithfully as TransformerBridge"
NO_CONTEXT = ("bloom", "biogpt", "mamba", "persimmon")  # configs that name no context length
NO_READER = ("olmo2", "olmo3", "exaone4", "mamba")
NOT_FOLDED = (
    "olmo2", "bert", "opt-350m", "bert-decoder", "exaone4", "glm", "glm4", "modernbert-decoder", "nanochat", "nemotron",
    "olmo3", "openai-gpt", "vaultgemma",
)  # fmt: skip


def refusal(architecture: str, model_class: str, law: str) -> str | None:
    """What a refusal has to say there; None where nothing may be refused."""
    if architecture in NOT_LOADED:
        return NOT_LOADED[architecture]
    if architecture in NO_BRIDGE and model_class == "bridge":
        return NOT_FAITHFUL
    if law == "context" and architecture in NO_CONTEXT:
        return "the config names no context length"
    if law == "all heads" and architecture in NO_READER:
        return "the attention of layer 0 reads no norm"
    if law == "folding" and architecture in NOT_FOLDED:
        return "fold_ln changed nothing|cannot do fold_ln"
    return None


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize(
    ("architecture", "model_class"),
    [pytest.param(a, c, marks=() if a in FAST else pytest.mark.slow) for a, c in cases()],
)
def test_law(architecture: str, model_class: str, law: str) -> None:
    message = ""
    try:
        LAWS[law](subject(architecture), model_class)
    except Refused as refused:
        message = str(refused)
    if message:
        expected = refusal(architecture, model_class, law)
        assert expected is not None, message
        assert re.search(expected, message)


def test_the_table_is_large_enough() -> None:
    """At least 40 architectures and variants that can be loaded."""
    loaded = {a for a, c in cases() if refusal(a, c, "context") is None}
    assert len(loaded) >= 40
    assert set(FAST) <= loaded
