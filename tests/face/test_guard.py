"""Models that `analyze` refuses, models that it measures with hooks of users, and models that change meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from architectures import make_bridge, make_hooked
from torch import Tensor

import ln_probe
from ln_probe import guard
from ln_probe.analyses.probes.base import Needs, Observer, Probe, Run
from ln_probe.analyses.schema import Table
from ln_probe.guard import ModelStateError
from ln_probe.hooks import linearized, without

TOKENS = torch.tensor([[3, 7, 11, 19, 23, 4, 9, 31], [5, 2, 40, 8, 17, 29, 6, 1]])
MODELS: dict[str, Callable[[], Any]] = {
    "bridge": partial(make_bridge, "gpt2"),
    "hooked": partial(make_hooked, normalization_type="LN"),
}


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest) -> Any:
    return MODELS[request.param]().eval()


def analyzed(model: Any, *probes: Any, **options: Any) -> ln_probe.Report:
    return ln_probe.analyze(model, TOKENS, probes=probes or ("decomposition",), progress=False, **options)


def halve(value: Tensor, hook: Any = None) -> Tensor:
    return value / 2


class Adapter(torch.nn.Module):
    """As of a package that changes what a model computes."""

    __module__ = "peft.tuners"


def halve_output(_module: Any, _args: Any, output: Tensor) -> Tensor:
    return output / 2


def read(value: Tensor, hook: Any = None) -> None:
    return None


def add_hook(model: Any, permanent: bool = False) -> None:
    model.add_hook("blocks.0.ln1.hook_normalized", halve, is_permanent=permanent)


def replace_forward(model: Any) -> None:
    norm = model.ln_final
    whole = norm.forward
    norm.forward = lambda x: whole(x) / 2


# What a user has put on the model, and what the message or the note names.
HOOKS: dict[str, tuple[Callable[[Any], object], str]] = {
    "hook point": (add_hook, r"blocks\.0\.ln1\.hook_normalized \(.*halve\)"),
    "permanent": (partial(add_hook, permanent=True), r"hook_normalized \(.*halve\)"),
    "only read": (lambda m: m.add_hook("blocks.1.ln2.hook_scale", read), r"hook_scale \(.*read\)"),
    "backward": (lambda m: m.add_hook("blocks.0.ln1.hook_scale", read, dir="bwd"), r"hook_scale \(.*read\)"),
    "module": (lambda m: m.ln_final.register_forward_hook(halve_output), r"ln_final \(.*halve_output\)"),
    "partial": (lambda m: m.ln_final.register_forward_hook(partial(halve_output)), r"ln_final \(.*halve_output\)"),
    "wrapped": (lambda m: m.ln_final.add_module("lora", Adapter()), r"ln_final\.lora \(peft\.tuners\.Adapter\)"),
    "the model": (lambda m: m.register_forward_hook(halve_output), r"the model \(.*halve_output\)"),
    "forward": (replace_forward, r"ln_final.* \(.*replace_forward"),
}  # fmt: skip


@pytest.mark.parametrize("case", HOOKS)
def test_hooks_of_users_are_refused_and_named(model: Any, case: str) -> None:
    install, named = HOOKS[case]
    install(model)
    with pytest.raises(ModelStateError, match=named):
        analyzed(model)


def test_kept_hooks_are_measured_and_named() -> None:
    model = make_bridge("gpt2").eval()
    intact = analyzed(model)
    model.add_hook("blocks.1.hook_resid_pre", halve)
    kept = analyzed(model, hooks="keep")
    assert any("halve" in note for note in kept.notes)
    length = [r.layernorms.set_index("site").loc["blocks.1.ln1", "input_norm"] for r in (kept, intact)]
    assert length[0] == pytest.approx(length[1] / 2, rel=1e-5)
    assert model(TOKENS).isfinite().all()
    assert len(model.hook_dict["blocks.1.hook_resid_pre"].fwd_hooks) == 1, "it is left on the model"


def test_kept_hooks_act_on_edited_passes_too() -> None:
    model = make_bridge("gpt2").eval()
    model.add_hook("blocks.1.hook_mlp_out", halve)
    table = analyzed(model, "causal", hooks="keep").causal.set_index(["sites", "variant"])
    with without(model, "projection", sites="all"), torch.no_grad():
        loss = float(model(TOKENS, return_type="loss"))
    assert table.loc[("all", "no_projection"), "loss"] == pytest.approx(loss, rel=1e-5)


@pytest.mark.parametrize(("around", "word"), [
    (lambda m: without(m, "projection"), "without"),
    (linearized, "linearized"),
    (lambda _: torch.autocast("cpu", torch.bfloat16), "autocast"),
])  # fmt: skip
def test_a_model_in_a_context_is_refused(model: Any, around: Callable[[Any], Any], word: str) -> None:
    with around(model), pytest.raises(ModelStateError, match=word):
        analyzed(model)
    assert len(analyzed(model).layernorms) == 5


def test_a_compiled_model_is_refused(model: Any) -> None:
    model.blocks[0].compile()
    with pytest.raises(ModelStateError, match=r"^blocks\.0 is compiled"):
        analyzed(model)
    with pytest.raises(ModelStateError, match=r"^OptimizedModule is compiled"):
        guard.check_state(torch.compile(torch.nn.Linear(2, 2)))


NOTHING = Table("nothing", "Nothing", "A row per norm.", ("site",), {"site": ("text", "the norm")})


class Doing(Probe):
    """Does something to the model during the second pass."""

    name, summary, tables, needs = "doing", "does something", (NOTHING,), Needs(output=True)

    def __init__(self, work: Callable[[Any], object]) -> None:
        self.work = work

    def start(self, run: Run) -> Observer:
        observer = Observer()
        observer.prompt = lambda number, tokens: self.work(run.model)  # type: ignore[assignment, method-assign]
        return observer


def change(model: Any) -> None:
    with torch.no_grad():
        next(model.ln_final.parameters()).mul_(2)


def exchange(model: Any) -> None:
    weight = next(model.ln_final.parameters())
    weight.data = weight.data.clone()


@pytest.mark.parametrize("work", [change, exchange])
def test_a_parameter_that_changes_meanwhile_is_named(model: Any, work: Callable[[Any], object]) -> None:
    with pytest.raises(ModelStateError, match=r"ln_(final|f)\.\w+ changed"):
        analyzed(model, Doing(work))


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode, nullcontext])
def test_contexts_that_change_nothing(context: Callable[[], AbstractContextManager[None]]) -> None:
    model = make_bridge("gpt2").train()
    before = {name: p.clone() for name, p in model.named_parameters()}
    with context():
        report = analyzed(model, "causal")
    assert report.causal["loss"].notna().all()
    assert model.training
    assert any("training mode" in note for note in report.notes)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


@pytest.mark.parametrize(("weight", "place", "value", "word"), [
    ("unembed.W_U", (3, 5), torch.nan, r"W_U: nan at \[3, 5\]"),
    ("blocks.1.attn.W_K", (3, 5, 0), torch.inf, r"W_K: inf at \[3, 5"),
    ("unembed.W_U", (slice(None), 7), 3e38, r"inf at \[0, 7\]"),  # a finite weight, under which logits overflow
], ids=["nan", "inf", "overflow"])  # fmt: skip
def test_weights_and_logits_that_are_not_finite_are_named_with_their_place(
    weight: str, place: tuple[Any, ...], value: float, word: str
) -> None:
    model = make_hooked(normalization_type="LN").eval()
    with torch.no_grad():
        dict(model.named_parameters())[weight][place] = value
    with pytest.raises(ValueError, match=word):
        analyzed(model, "causal")


def test_a_model_on_mps_is_measured_as_a_copy_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_bridge("gpt2").eval()
    monkeypatch.setattr(guard, "device_of", lambda _: torch.device("mps"))
    with pytest.warns(UserWarning, match="MPS"):
        hooked, notes = guard.hooked_model(model)
    assert hooked is not model
    assert notes == (guard.ON_MPS,)


def test_texts_begin_as_in_training_at_every_door() -> None:
    model: Any = ln_probe.load_model("lm-layernorm")
    text = "And the ships came home."
    table = ln_probe.analyze(model, text, probes="causal", progress=False).causal_prompts
    with torch.no_grad():
        assert table["loss"].iloc[0] == pytest.approx(float(model(text, return_type="loss")), rel=1e-5)
        _, cache = model.run_with_cache(text)
    by_text, by_cache = (ln_probe.attribute_logits(model, given, -1, target=7) for given in (text, cache))
    assert by_text.own == pytest.approx(by_cache.own, rel=1e-5)
