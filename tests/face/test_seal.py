"""`analyze` seals the model: what somebody else does to it changes no number, or is refused by name."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from architectures import hugging_face, make_bridge
from seal_cases import (
    CASES,
    POINT,
    TOKENS,
    Doing,
    gradient,
    halve,
    halve_output,
    hooked,
    measured,
    models,
    outcome,
    read,
    same_tables,
)
from torch import nn

import ln_probe
from ln_probe.hooks.sealing import foreign_hooks
from ln_probe.page.page import report_page
from ln_probe.report import Report
from ln_probe.seal import SealError

pytestmark = pytest.mark.lens

# Read-only, editing and backward hooks have tests of their own below.
FAST = (
    "nothing", "forward pre-hook", "global hook, editing", "weight edit in the first pass",
    "weight edit in a probe, .data", "weight edit at the end", "run_with_hooks in a thread", "autocast, bfloat16",
    "torch.compile", "inference mode", "default dtype float64", "accelerate", "inside without",
)  # fmt: skip
ACCEPTED = (
    "read-only hook", "read-only torch hook", "read-only forward pre-hook", "backward hook", "torch backward hook",
    "train mode", "inference mode", "default dtype float64", "accelerate",
)  # fmt: skip
FIRST = next(iter(models()))
_reports: dict[str, Report] = {}


def fresh(name: str) -> tuple[Any, Report]:
    """A new model, and the report of an equal one, which is made once."""
    if name not in _reports:
        _reports[name] = measured(models()[name]())
    return models()[name](), _reports[name]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "case"),
    [
        pytest.param(name, case, marks=() if name == FIRST and case in FAST else pytest.mark.slow)
        for name in models()
        for case in CASES
    ],
)
def test_case(name: str, case: str) -> None:
    model, reference = fresh(name)
    do, right = CASES[case]
    result, words = outcome(do, model, reference)
    assert result in right, words


@pytest.fixture
def bridge() -> Any:
    return make_bridge("gpt2")


def name_of_point(model: Any) -> str:
    """What the hook point at the beginning of the first block calls itself: bridges have other names for it."""
    return str(model.hook_dict[POINT].name)


def test_kept_hooks_are_measured_and_said_everywhere(bridge: Any) -> None:
    """Halving what the first MLP writes by a hook is halving the weights that write it."""
    model = make_bridge("gpt2")
    model.hook_dict["blocks.0.hook_mlp_out"].add_hook(halve)
    name = model.hook_dict["blocks.0.hook_mlp_out"].name
    report = measured(model, hooks="keep")
    written = bridge.blocks[0].mlp.original_component.c_proj
    with torch.no_grad():
        written.weight.mul_(0.5)
        written.bias.mul_(0.5)
    expected = measured(bridge)
    columns = ["delta_loss", "loss"]
    np.testing.assert_allclose(report.causal[columns], expected.causal[columns], rtol=0, atol=1e-6)
    assert not np.allclose(report.causal["loss"], measured(make_bridge("gpt2")).causal["loss"], atol=1e-3)
    about = report.provenance["hooks"]
    assert about["policy"] == "keep"
    assert about["changing"] is True
    assert about["measured_with"] == [f"{name} (forward hook seal_cases.halve)"]
    note = (
        'measured with hooks="keep": every number here, those of the intact model included, is of the model with 1 hook'
    )
    assert report.notes[0].startswith(note)
    assert report.notes[0].endswith("which change what the model computes")
    page = report_page(report)
    assert "Measured with hooks" in page
    assert f"{name} (forward hook seal_cases.halve)" in page
    assert model.hook_dict["blocks.0.hook_mlp_out"].fwd_hooks


def test_hooks_that_change_nothing_stay_on_the_model(bridge: Any) -> None:
    reference = measured(bridge)
    with hooked(bridge, read), hooked(bridge, gradient, "bwd"):
        report = measured(bridge)
        assert [f.function for f in foreign_hooks(bridge)] == ["seal_cases.read", "seal_cases.gradient"]
    assert same_tables(report, reference)
    assert report.provenance["hooks"]["switched_off"] == [
        f"{name_of_point(bridge)} ({what})"
        for what in ("forward hook seal_cases.read", "backward hook seal_cases.gradient")
    ]
    assert "hooks" not in reference.provenance
    assert not foreign_hooks(bridge)


def test_only_what_changes_something_is_named(bridge: Any) -> None:
    bridge.hook_dict["blocks.1.hook_resid_pre"].add_hook(read)
    with hooked(bridge, halve), pytest.raises(SealError) as refused:
        measured(bridge)
    assert str(refused.value) == (
        f"1 hook ({name_of_point(bridge)} (forward hook seal_cases.halve)) on the model and not of TransformerLens or "
        "ln_probe: with them the output or the input of a norm is another, so these numbers would not be the model's "
        'own. Remove them (model.reset_hooks(), handle.remove()), or measure the model with them: hooks="keep"'
    )
    with hooked(bridge, halve):
        for function in (ln_probe.freezing_cost, ln_probe.norm_constants):
            with pytest.raises(SealError, match=r"seal_cases\.halve"):
                function(bridge, TOKENS)
        report = ln_probe.analyze(bridge, TOKENS, probes=["causal"], progress=False, hooks="keep")
        cost = ln_probe.freezing_cost(bridge, TOKENS, hooks="keep")
        constants = ln_probe.norm_constants(bridge, TOKENS, hooks="keep")
    assert constants.of(0) == cost.constants.of(0)
    rows = report.causal.set_index(["sites", "variant"])
    assert cost.estimate == pytest.approx(float(rows.loc[("all", "no_scaling"), "delta_loss"]), abs=1e-6)
    assert any(note.startswith('measured with hooks="keep"') for note in cost.notes)


def test_a_kept_hook_that_fails_on_short_inputs_is_named(bridge: Any) -> None:
    """Norms are tried out on a few tokens, and a hook that patches a later position fails there."""

    def patch(value: Any, hook: Any) -> Any:
        value[:, 4] = 0.0
        return value

    def guarded(value: Any, hook: Any) -> Any:
        return patch(value, hook) if value.shape[1] > 4 else value

    bridge.blocks[1].register_forward_hook(lambda *_: None)
    with hooked(bridge, patch), pytest.raises(SealError) as refused:
        ln_probe.freezing_cost(bridge, TOKENS, hooks="keep")
    assert f"1 hook ({name_of_point(bridge)} (forward hook" in str(refused.value)
    assert "patch)) on the model fails on an input of 3 tokens (IndexError: " in str(refused.value)
    for length in (4, 8):

        def refuses(value: Any, hook: Any, length: int = length) -> Any:
            assert value.shape[1] != length
            return value

        said = rf"refuses\)\) on the model fails on an input of {length} tokens \(AssertionError"
        with hooked(bridge, refuses), pytest.raises(SealError, match=said):
            ln_probe.freezing_cost(bridge, TOKENS, hooks="keep")
    with hooked(bridge, guarded):
        assert np.isfinite(ln_probe.freezing_cost(bridge, TOKENS, hooks="keep").loss)


@pytest.mark.slow
def test_a_hook_that_edits_later_prompts_alone_changes_no_number(bridge: Any) -> None:
    """It is equal on the first prompt; it is off for all of them."""
    reference = measured(bridge)

    def later(value: Any, hook: Any) -> Any:
        return value * 0.5 if value.shape[0] > 1 else None

    with hooked(bridge, later):
        assert same_tables(measured(bridge), reference)


@pytest.mark.slow
def test_a_gradient_that_is_edited_changes_no_interval() -> None:
    """Intervals are computed with gradients, so backward hooks are off, too."""
    tokens = torch.randint(3, 50, (33, 6), generator=torch.Generator().manual_seed(1))
    model = make_bridge("gpt2")
    options: dict[str, Any] = {"probes": ("causal",), "progress": False}
    reference = ln_probe.analyze(model, tokens, **options)
    assert reference.causal["delta_loss_low"].notna().any()
    with hooked(model, lambda g, hook: g * 0, "bwd"):
        report = ln_probe.analyze(model, tokens, **options)
    assert report.causal.equals(reference.causal)


def test_handles_stay_valid(bridge: Any) -> None:
    """A hook that its owner removes during the measurement is gone afterwards; others can be removed."""
    first = bridge.blocks[0].register_forward_hook(lambda *_: None)
    second = bridge.blocks[0].register_forward_hook(lambda *_: None)
    measured(bridge, Doing(lambda _: first.remove()))
    assert len(foreign_hooks(bridge)) == 1
    second.remove()
    assert not foreign_hooks(bridge)


def test_what_transformer_lens_installs_at_its_first_pass_stays() -> None:
    """A bridge that was never run puts hooks of its own on at its first pass, and can take them off."""

    def installed(model: Any) -> int:
        return sum(len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.modules())

    run, fresh_one = make_bridge("gpt2"), make_bridge("gpt2")
    run(TOKENS)
    measured(fresh_one)
    assert installed(fresh_one) == installed(run) > 0
    for block in fresh_one.blocks:
        block._teardown_capture_hooks()
    assert installed(fresh_one) == 0


def test_the_model_may_be_copied_meanwhile(bridge: Any) -> None:
    copies: list[Any] = []
    report = measured(bridge, Doing(lambda model: copies.append(copy.deepcopy(model)), "start"))
    assert not report.failures
    assert not foreign_hooks(copies[0])
    copies[0](TOKENS)
    copies[0].blocks[0].register_forward_hook(lambda *_: None)


def test_a_wrapped_module_is_refused_or_kept(bridge: Any) -> None:
    """PEFT and SAE wrappers stand in the model; what they change cannot be seen by taking them out."""
    wrapper = type("Linear", (nn.Identity,), {"__module__": "peft.tuners.lora.layer"})
    bridge.blocks[0].add_module("adapter", wrapper())
    with pytest.raises(
        SealError, match=r"1 hook \(blocks\.0\.adapter \(module peft\.tuners\.lora\.layer\.Linear\)\) in"
    ):
        measured(bridge)
    report = measured(bridge, hooks="keep")
    assert report.provenance["hooks"]["changing"] is True


def test_a_model_of_saelens_is_the_plain_model_until_it_has_an_sae(bridge: Any) -> None:
    """Its HookedSAETransformer is the model under another class; an SAE takes the place of a hook point."""
    module = "sae_lens.analysis.hooked_sae_transformer"
    reference = measured(bridge)
    bridge.__class__ = type("HookedSAETransformer", (type(bridge),), {"__module__": module})
    assert same_tables(measured(bridge), reference)
    bridge.blocks[0].add_module("sae", type("_SAEWrapper", (nn.Identity,), {"__module__": module})())
    with pytest.raises(SealError, match=r"blocks\.0\.sae \(module .*_SAEWrapper\)\) in the model: .* reset_saes\(\)"):
        measured(bridge)


@pytest.mark.slow
def test_a_hugging_face_model_in_memory() -> None:
    model = hugging_face("gpt2")
    reference = measured(model)
    norm = model.transformer.h[0].ln_1
    handle = norm.register_forward_hook(lambda *_: None)
    report = measured(model)
    assert same_tables(report, reference)
    assert report.notes[0].startswith("1 hook (transformer.h.0.ln_1 (forward hook")
    handle.remove()
    handle = norm.register_forward_hook(halve_output)
    with pytest.raises(SealError, match=r"transformer\.h\.0\.ln_1 \(forward hook seal_cases\.halve_output\)"):
        measured(model)
    assert len(norm._forward_hooks) == 1
    handle.remove()
    with pytest.raises(SealError, match=r"pass the model itself, model\._orig_mod"):
        measured(torch.compile(model, backend="eager"))
    assert same_tables(measured(model), reference)


def test_messages(bridge: Any) -> None:
    with torch.inference_mode():
        model = make_bridge("gpt2")
    with pytest.raises(SealError, match=r"was made in torch\.inference_mode, .*: load the model outside that block"):
        measured(model)
    with pytest.raises(ValueError, match="hooks must be one of 'refuse', 'keep', got 'off'"):
        measured(bridge, hooks="off")
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(SealError) as refused:
        measured(bridge)
    assert str(refused.value) == (
        "torch.autocast is on (cpu, bfloat16): the model would compute in another format than its weights have. Leave "
        'the autocast block, or load the model in that format: ln_probe.load_model(…, dtype="bfloat16")'
    )


def test_a_transformer_lens_that_keeps_hooks_elsewhere_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ln_probe.hooks.edits.HANDLES", ("forward_handles", "backward_handles"))
    with pytest.raises(RuntimeError, match=r"cannot see the hooks that users add with TransformerLens .* \(3\.9\.0"):
        foreign_hooks(models()[FIRST]())
