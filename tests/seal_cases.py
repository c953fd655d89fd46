"""What may happen to a model around and during `analyze`: each case does one thing to a model, in every model class.

`outcome` says what became of it: the tables of the model itself ("identical"), the same with a note ("accepted and
noted"), an error or a failure that names what happened ("refused"), or none of these ("wrong").
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any
from unittest import mock

import torch
from architectures import VOCAB, bridge_of, hooked_transformer, hugging_face
from torch import Tensor, nn

import ln_probe
from ln_probe import measure, passes
from ln_probe.analyses.probes.base import Needs, Observer, Probe, ProbeResults, Run
from ln_probe.analyses.schema import Column, Table
from ln_probe.hooks.sealing import edits_under_way, foreign_hooks
from ln_probe.loading.convert import has_hooked_transformer
from ln_probe.report import Report
from ln_probe.seal import SealError

IDENTICAL, NOTED, REFUSED, WRONG = "identical", "accepted and noted", "refused", "wrong"
TOKENS = torch.randint(3, VOCAB, (3, 9), generator=torch.Generator().manual_seed(5))
PROBES = ("decomposition", "uniformity", "causal")
POINT = "blocks.0.hook_resid_pre"


class Happened:
    """What a case saw besides the report."""

    def __init__(self) -> None:
        self.errors: list[str] = []  # of other threads


Case = Callable[[Any, Happened], Report]


def models() -> dict[str, Callable[[], Any]]:
    """Small models of every class that this TransformerLens has, and a bundled one."""
    made = {f"TransformerBridge ({a})": lambda a=a: bridge_of(hugging_face(a)) for a in ("gpt2", "llama")}  # type: ignore[misc]
    hooked = {"HookedTransformer": _hooked} if has_hooked_transformer() else {}
    return {**hooked, **made, "bundled": lambda: ln_probe.load_model("lm-layernorm", device="cpu")}


def _hooked() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return hooked_transformer().eval()


def measured(model: Any, *more: Probe, **options: Any) -> Report:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ln_probe.analyze(model, TOKENS, probes=(*PROBES, *more), layers=[0], progress=False, **options)


def same_tables(report: Report, reference: Report) -> bool:
    return all(report.tables[name].equals(table) for name, table in reference.tables.items())


def outcome(case: Case, model: Any, reference: Report) -> tuple[str, str]:
    """What became of a case on a model, and the words that tell it.

    Args:
        case: one of CASES.
        model: as it is; it may be changed.
        reference: the report of the same model without anything done to it.
    """
    happened, before = Happened(), _hooks(model)
    try:
        report = case(model, happened)
    except SealError as error:
        return (REFUSED, str(error)) if _hooks(model) == before else (WRONG, f"left on the model after {error}")
    words = [str(f) for f in report.failures] + [n for n in report.notes if n not in reference.notes]
    if not same_tables(report, reference):
        return WRONG, "other tables"
    if report.failures:
        return REFUSED, words[0]
    if happened.errors:
        return REFUSED, happened.errors[0]
    return (NOTED, words[0]) if words else (IDENTICAL, "")


def _hooks(model: Any) -> list[str]:
    without, linear = edits_under_way(model)
    return [*map(str, foreign_hooks(model)), *(e.label for e in (*without, *linear))]


# What is done to a model.


def read(value: Any, hook: Any = None) -> None:
    """Look at an activation."""


def halve(value: Tensor, hook: Any = None) -> Tensor:
    """Change an activation."""
    return value * 0.5


def halve_input(_module: nn.Module, args: Any) -> Any:
    return (args[0] * 0.5, *args[1:]) if args and isinstance(args[0], Tensor) else None


def halve_output(_module: nn.Module, _args: Any, output: Any) -> Any:
    return output * 0.5 if isinstance(output, Tensor) else None


def gradient(value: Any, hook: Any = None) -> None:
    """Look at a gradient."""


@contextmanager
def hooked(model: Any, function: Any, direction: str = "fwd") -> Iterator[None]:
    model.hook_dict[POINT].add_hook(function, dir=direction)
    try:
        yield
    finally:
        model.hook_dict[POINT].remove_hooks(direction)


@contextmanager
def removing(handle: Any) -> Iterator[None]:
    try:
        yield
    finally:
        handle.remove()


def a_weight(model: Any) -> nn.Parameter:
    return next(p for p in model.blocks[0].parameters() if p.ndim > 1)


def edit(model: Any, *, data: bool) -> None:
    """Change a weight of the first block by a little."""
    weight = a_weight(model)
    row = (0,) * weight.ndim
    if data:
        weight.data[row] += 0.5
    else:
        with torch.no_grad():
            weight[row] += 0.5


def in_thread(work: Callable[[], None], happened: Happened) -> None:
    """Do it in another thread, and wait for its end."""

    def run() -> None:
        try:
            work()
        except Exception as error:
            happened.errors.append(str(error))

    thread = threading.Thread(target=run, name="another thread")
    thread.start()
    thread.join()


@contextmanager
def at(stage: str, work: Callable[[], None]) -> Iterator[None]:
    """Do it once, when a stage of the measurement has begun its second prompt (or, without prompts, has begun)."""
    done: list[int] = []

    def tell(what: str, number: float = 0.0, total: float = float("nan"), unit: str = "") -> None:
        if what == stage and (number == 1 or unit != "prompts") and not done:
            done.append(1)
            work()

    with mock.patch.object(passes, "tell", tell), mock.patch.object(measure, "tell", tell):
        yield
    assert done, f"{stage} was not reached"


class Doing(Probe):
    """A probe of the user that does something at one of its moments."""

    name, summary = "doing", "does something to the model"
    tables = (Table("doing", "Doing", "A row per number.", ("number",), (Column("number", "int", "a number"),)),)
    needs = Needs(norms=True, output=True)

    def __init__(self, work: Callable[[Any], object], moment: str = "prompt") -> None:
        self.work, self.moment = work, moment

    def start(self, run: Run) -> Observer:
        return _Doing(self, run.model)


class _Doing(Observer):
    def __init__(self, probe: Doing, model: Any) -> None:
        self.probe, self.model, self.done = probe, model, False
        self._at("start")

    def _at(self, moment: str) -> None:
        if moment == self.probe.moment and not self.done:
            self.done = True
            self.probe.work(self.model)

    def norm(self, prompt: int, site: Any, x: Tensor, y: Tensor) -> None:
        self._at("norm")

    def prompt(self, prompt: int, tokens: Tensor) -> None:
        self._at("prompt")

    def finish(self) -> ProbeResults:
        self._at("finish")
        return ProbeResults()


# The cases.


def _around(context: Callable[[Any], Any]) -> Case:
    def case(model: Any, _happened: Happened) -> Report:
        with context(model):
            return measured(model)

    return case


def _while(stage: str, work: Callable[[Any], None], *, thread: bool = True) -> Case:
    def case(model: Any, happened: Happened) -> Report:
        with at(stage, lambda: in_thread(lambda: work(model), happened) if thread else work(model)):
            return measured(model)

    return case


def _probe(work: Callable[[Any], object], moment: str = "prompt") -> Case:
    return lambda model, _happened: measured(model, Doing(work, moment))


def _edited_before(*, data: bool) -> Case:
    """A model that was changed before is the model: its tables are those of an equal one."""

    def case(model: Any, _happened: Happened) -> Report:
        original = measured(model)
        weight = a_weight(model)
        kept = weight.detach().clone()
        edit(model, data=data)
        changed = measured(model)
        if same_tables(changed, original):
            return changed.with_notes("the edit did not show")
        with torch.no_grad():
            weight.copy_(kept)
        return measured(model)

    return case


def _at_the_end(*, data: bool) -> Case:
    def case(model: Any, _happened: Happened) -> Report:
        return measured(model, Doing(lambda _: edit(model, data=data), "finish"))

    return case


def _looping(model: Any, _happened: Happened) -> Report:
    """Another thread runs the model under an editing hook, again and again."""
    stop, begun = threading.Event(), threading.Event()

    def loop() -> None:
        while not stop.is_set():
            with suppress(RuntimeError):  # refused
                model.run_with_hooks(TOKENS, fwd_hooks=[(POINT, halve)])
            begun.set()

    thread = threading.Thread(target=loop, name="another thread")
    thread.start()
    begun.wait()
    try:
        return measured(model)
    finally:
        stop.set()
        thread.join()


def _compiled(model: Any, _happened: Happened) -> Report:
    return measured(torch.compile(model, backend="eager"))


def _compiled_in_place(model: Any, _happened: Happened) -> Report:
    model.compile(backend="eager")
    try:
        return measured(model)
    finally:
        model._compiled_call_impl = None


def _training(model: Any, _happened: Happened) -> Report:
    model.train()
    try:
        return measured(model)
    finally:
        model.eval()


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


class _Placed:
    """What accelerate leaves on a module, for where it is not installed."""

    def __init__(self, module: nn.Module) -> None:
        self.inner = module.forward
        module._hf_hook = self  # type: ignore[assignment]
        module.forward = self.run

    def run(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs)


def accelerate(model: Any) -> Callable[[], Any]:
    """Put accelerate's hooks on a block, as `device_map` does; what takes them off."""
    block = getattr(model.blocks[0], "original_component", None) or model.blocks[0]
    try:
        from accelerate.hooks import AlignDevicesHook, add_hook_to_module, remove_hook_from_module
    except ImportError:
        _Placed(block)
        return lambda: (delattr(block, "_hf_hook"), delattr(block, "forward"))
    add_hook_to_module(block, AlignDevicesHook(execution_device="cpu"))
    return lambda: remove_hook_from_module(block)


@contextmanager
def accelerated(model: Any) -> Iterator[None]:
    take_off = accelerate(model)
    try:
        yield
    finally:
        take_off()


def _global_hook(function: Any) -> Callable[[Any], Any]:
    return lambda _model: removing(nn.modules.module.register_module_forward_hook(function))


def _replaced(model: Any) -> Any:
    module = model.blocks[0]
    inner = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        return inner(*args, **kwargs)

    return mock.patch.dict(module.__dict__, {"forward": forward})


CASES: dict[str, tuple[Case, tuple[str, ...]]] = {
    # name: (the case, outcomes that are right)
    "nothing": (_around(lambda m: nullcontext()), (IDENTICAL,)),
    "read-only hook": (_around(lambda m: hooked(m, read)), (NOTED,)),
    "read-only torch hook": (
        _around(lambda m: removing(m.blocks[0].register_forward_hook(lambda *_: None))), (NOTED,)
    ),
    "editing hook": (_around(lambda m: hooked(m, halve)), (REFUSED,)),
    "editing torch hook": (_around(lambda m: removing(_norm(m).register_forward_hook(halve_output))), (REFUSED,)),
    "forward pre-hook": (_around(lambda m: removing(_norm(m).register_forward_pre_hook(halve_input))), (REFUSED,)),
    "read-only forward pre-hook": (
        _around(lambda m: removing(_norm(m).register_forward_pre_hook(lambda *_: None))), (NOTED,)
    ),
    "backward hook": (_around(lambda m: hooked(m, gradient, "bwd")), (NOTED,)),
    "torch backward hook": (
        _around(lambda m: removing(_norm(m).register_full_backward_hook(lambda *_: None))), (NOTED,)
    ),
    "global hook, read-only": (_around(_global_hook(lambda *_: None)), (NOTED,)),
    "global hook, editing": (_around(_global_hook(halve_output)), (REFUSED,)),
    "replaced forward": (_around(_replaced), (NOTED,)),
    "weight edit before": (_edited_before(data=False), (IDENTICAL,)),
    "weight edit before, .data": (_edited_before(data=True), (IDENTICAL,)),
    "weight edit in the first pass": (_while("first pass", lambda m: edit(m, data=False)), (REFUSED,)),
    "weight edit in the first pass, .data": (_while("first pass", lambda m: edit(m, data=True)), (REFUSED,)),
    "weight edit in the second pass": (_while("second pass", lambda m: edit(m, data=False)), (REFUSED,)),
    "weight edit in the second pass, .data": (_while("second pass", lambda m: edit(m, data=True)), (REFUSED,)),
    "weight edit in a probe": (_probe(lambda m: edit(m, data=False)), (REFUSED,)),
    "weight edit in a probe, .data": (_probe(lambda m: edit(m, data=True)), (REFUSED,)),
    "weight edit while a probe watches, .data": (_probe(lambda m: edit(m, data=True), "norm"), (REFUSED,)),
    "weight edit at the end": (_at_the_end(data=False), (REFUSED,)),
    "weight edit at the end, .data": (_at_the_end(data=True), (REFUSED,)),
    "hook added by a thread": (
        _while("second pass", lambda m: m.hook_dict[POINT].add_hook(halve)), (REFUSED,)
    ),
    "pass of a thread": (_while("second pass", lambda m: _forward(m)), (REFUSED,)),
    "run_with_hooks in a thread": (
        _while("second pass", lambda m: m.run_with_hooks(TOKENS, fwd_hooks=[(POINT, halve)])), (REFUSED,)
    ),
    "run_with_hooks in a thread, in a loop": (_looping, (IDENTICAL, NOTED, REFUSED)),
    "autocast, bfloat16": (_around(lambda m: torch.autocast("cpu", torch.bfloat16)), (REFUSED,)),
    "autocast, float16": (_around(lambda m: torch.autocast("cpu", torch.float16)), (REFUSED,)),
    "torch.compile": (_compiled, (REFUSED,)),
    "module.compile()": (_compiled_in_place, (REFUSED,)),
    "train mode": (_training, (NOTED,)),
    "inference mode": (_around(lambda m: torch.inference_mode()), (IDENTICAL,)),
    "no_grad": (_around(lambda m: torch.no_grad()), (IDENTICAL,)),
    "default dtype float64": (_around(lambda m: default_dtype(torch.float64)), (IDENTICAL,)),
    "accelerate": (_around(accelerated), (IDENTICAL,)),
    "inside without": (_around(lambda m: ln_probe.hooks.without(m, "scaling", tokens=TOKENS)), (REFUSED,)),
    "inside linearized": (_around(lambda m: ln_probe.hooks.linearized(m)), (NOTED,)),
}  # fmt: skip


def _forward(model: Any, context: Any = None) -> None:
    with torch.no_grad() if context is None else context:
        model(TOKENS)


def _norm(model: Any) -> nn.Module:
    module: nn.Module = model.blocks[0].ln1
    return module
