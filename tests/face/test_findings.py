"""What reports say is what was measured: constants, names of tokens, a model without scaling beside one with it."""

from __future__ import annotations

from typing import Any

import pytest
from architectures import make_bridge

import ln_probe
from ln_probe.guard import indices, seed_of


def test_layers_and_units_are_said_in_every_answer() -> None:
    tokens = [list(range(1, 30)), list(range(2, 31))]
    report = ln_probe.analyze(make_bridge("gpt2"), tokens, layers=[1], heads=[0, 2], progress=False)
    loss, projection, heads, *rest = report.findings()
    assert "in layer 1" in loss
    assert "not tested (2 prompts)" in loss
    assert "in layer 1" in projection
    assert "L1H" in heads
    assert len(rest) == 3
    assert not any("nan" in text for text in report.findings())


@pytest.mark.parametrize(
    ("given", "shown"), [(1, "1"), ("0", "'0'"), ([0.5], "[0.5]"), (["0"], "['0']"), ([True], "[True]")]
)
def test_what_is_no_list_of_layers(given: Any, shown: str) -> None:
    with pytest.raises(TypeError) as error:
        indices(given, "layer", 2)
    assert str(error.value).endswith(f"got {shown}")
    assert indices(range(2), "layer", 2) == [0, 1]
    assert indices([-1, 0, -3], "layer", 3) == [2, 0, 0], "negative layers count from the end"
    for numbers, what in (([3], "layer"), ([-4], "layer"), ([-1], "head"), ([], "head")):
        with pytest.raises(ValueError, match=what):
            indices(numbers, what, 3)
    assert seed_of(10**18) == 10**18
    for seed in (-1, 10**18 + 1):
        with pytest.raises(ValueError, match="seed"):
            seed_of(seed)
