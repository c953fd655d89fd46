"""The numbers of the longer examples, against definitions."""

from __future__ import annotations

import runpy
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch

from ln_probe.hooks import linearized

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "scripts"


def run_example(name: str) -> dict[str, Any]:
    return runpy.run_path(str(FOLDER / f"{name}.py"))


def test_gpt2_without_norms() -> None:
    """The saved model divides by the constants: gain·Px / c, written out in a copy with the weights before."""
    names = run_example("gpt2_without_norms")
    model, constants, loaded = names["model"], names["constants"], names["loaded"]
    norms = names["layer_norms"](model)
    for name, norm in norms.items():
        gain = norm.weight.detach() * constants[name] / names["EPS"] ** 0.5

        def by_hand(x: torch.Tensor, norm: Any = norm, gain: Any = gain, c: float = constants[name]) -> torch.Tensor:
            return gain * (x - x.mean(-1, keepdim=True)) / c + norm.bias

        norm.forward = by_hand
    with torch.no_grad():
        expected = model(names["tokens"]).logits
    torch.testing.assert_close(loaded(names["tokens"]).logits.detach(), expected, rtol=1e-4, atol=1e-5)


def test_gradient_through_later_layers() -> None:
    """The largest effect is the derivative of the logit by a factor on that head, with all sigmas held."""
    names = run_example("gradient_through_later_layers")
    model, tokens = names["model"], names["tokens"]
    layer, head = names["layer"], names["head"]
    sigmas, logits = linearized.sigmas(model, tokens), []
    for factor in (1.05, 0.95):

        def scale(z: torch.Tensor, hook: Any, factor: float = factor) -> torch.Tensor:
            scaled = z.clone()
            scaled[:, :, head] *= factor
            return scaled

        with torch.no_grad(), linearized(model, sigma=sigmas):
            hooks = [(f"blocks.{layer}.attn.hook_z", scale)]
            logits.append(float(model.run_with_hooks(tokens, fwd_hooks=hooks)[0, -1, names["answer"]]))
    effect = float(names["effects"][layer, head])
    assert abs((logits[0] - logits[1]) / 0.1 - effect) < 0.02 * abs(effect) + 1e-4


def test_what_sets_sigma() -> None:
    """The shares and eps add up to sigma²."""
    names = run_example("what_sets_sigma")
    total = sum(names["shares"].values()) + names["norm"].eps
    torch.testing.assert_close(total, names["squares"], rtol=1e-5, atol=0.0)


def _node_scores(result: Any) -> torch.Tensor:
    return torch.tensor([result.node_scores[node] for node in sorted(result.node_scores, key=str)])


@pytest.mark.parametrize("granularity", ["node", "edge"])
def test_attribution_patching_with_hooks_is_that_of_a_model_edited_by_hand(granularity: str) -> None:
    if granularity == "edge" and version("transformer-lens") < "4":
        pytest.skip("TransformerLens scores edges from version 4.3 on")
    path = FOLDER.parent / "hooks" / "attribution_patching.py"
    names = runpy.run_path(str(path), {"granularity": granularity})
    scores, by_hand = names["scores"], names["by_hand"]
    torch.testing.assert_close(_node_scores(scores), _node_scores(by_hand), rtol=1e-5, atol=1e-5)
    if granularity == "edge":
        assert scores.edge_scores.keys() == by_hand.edge_scores.keys()
        for edge, score in scores.edge_scores.items():
            assert score == pytest.approx(by_hand.edge_scores[edge], abs=1e-5)


def test_activation_patching_with_hooks_is_that_of_a_model_edited_by_hand() -> None:
    names = runpy.run_path(str(FOLDER.parent / "hooks" / "activation_patching.py"))
    torch.testing.assert_close(names["scores"], names["by_hand"].detach(), rtol=1e-5, atol=1e-5)
    assert names["scores"].std() > 0.01


def test_a_model_with_saes_and_hooks_is_a_model_edited_by_hand() -> None:
    pytest.importorskip("sae_lens", reason="pip install sae-lens")
    names = runpy.run_path(str(FOLDER.parent / "hooks" / "sae_with_frozen_norms.py"))
    torch.testing.assert_close(names["edited"], names["by_hand"], rtol=1e-5, atol=1e-5)
