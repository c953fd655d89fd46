"""Make sure that the model measured is the one that the user gave, from the first pass to the last.

    with Seal(model, hooks="refuse") as seal:
        seal.compare(tokens)            # do foreign hooks change anything?
        ...                             # seal.rest() between passes
    report.with_notes(*seal.notes)

Hooks, weights, modules and settings of torch can change what a model computes without a trace in the tables. They are
inspected before, during and after a measurement: what changes nothing is noted, anything else is refused or named.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, cast

import torch
from jaxtyping import Int
from torch import Tensor, nn

from ln_probe.hooks import components, interventions, sites
from ln_probe.hooks.edits import LinearEdit, suspended
from ln_probe.hooks.in_memory import is_hugging_face
from ln_probe.hooks.model import HookedModel, check_model, check_weights, device_of, evaluating, run
from ln_probe.hooks.sealing import Cover, Fingerprint, Foreign, checksum, edits_under_way, foreign_hooks
from ln_probe.hooks.sites import site_modules
from ln_probe.loading.verify import bridged

REFUSE, KEEP = "refuse", "keep"
HOOKS = (REFUSE, KEEP)
Forward = Callable[[Int[Tensor, "batch pos"]], Any]
_NAMED = 5  # hooks that a sentence names
_TRIED = (
    sites.PROBE_TOKENS,
    interventions.TOKENS,
    components.TOKENS,
)  # tokens of the inputs that norms are tried out on


class SealError(RuntimeError):
    """The model cannot be measured as it is given, or it changed while it was measured."""


class Seal:
    """A model that is measured: entered as often as needed, one entry after the other.

    Args:
        model: any hooked model.
        hooks: what happens to `foreign_hooks`: "refuse" switches them off, and raises if they change anything; "keep"
            leaves them on.
        forward: a pass over token ids [batch pos] without gradients; None: that of a TransformerLens model.

    Attributes:
        kept: the foreign hooks that the model was measured with; empty unless hooks="keep".
        changing: whether the foreign hooks change outputs or norm inputs on the first prompt.
        notes: what a reader of the report has to know.
    """

    def __init__(self, model: HookedModel | nn.Module, hooks: str = REFUSE, forward: Forward | None = None) -> None:
        check_hooks(hooks)
        self.model, self.policy = model, hooks
        self._forward: Forward = forward or (lambda tokens: run(cast(HookedModel, model), tokens, return_type="logits"))
        self.kept: tuple[Foreign, ...] = ()
        self.changing = False
        self.notes: tuple[str, ...] = ()
        self._fingerprint: Fingerprint | None = None
        self._foreign: list[Foreign] = []
        self._cover: Cover | None = None
        self._stack = ExitStack()

    @property
    def plain(self) -> dict[str, Any]:
        """For provenance, as plain JSON; empty if the model had no foreign hooks."""
        if not self._foreign:
            return {}
        return {
            "hooks": {
                "policy": self.policy,
                "measured_with": [str(f) for f in self.kept],
                "switched_off": [str(f) for f in self._foreign if f not in self.kept],
                "changing": self.changing,
            }
        }

    def __enter__(self) -> Seal:
        """Take the model for this thread: evaluation mode, foreign hooks off (unless they are kept).

        Raises:
            SealError: it is under `without`, compiled or under autocast; or its weights have changed since the seal
                was left.
        """
        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode(False))
            linear = _refuse_edited(self.model)
            refuse_autocast(device_of(self.model))
            refuse_compiled(self.model)
            if made := next((n for n, p in self.model.named_parameters() if p.is_inference()), ""):
                raise SealError(
                    f"{made.replace('_original_component.', '')} was made in torch.inference_mode, which neither "
                    "gradients nor counts of edits work with: load the model outside that block (analyze may be inside)"
                )
            self._foreign = foreign_hooks(self.model)
            fixed = [f for f in self._foreign if not f.removable]
            if fixed and self.policy != KEEP:
                raise SealError(
                    f"{_some(fixed)} in the model: what they change cannot be seen, because they cannot be taken out "
                    "for a pass. Measure the model without them (PEFT: merge_and_unload(); SAELens: reset_saes()), or "
                    'with them: hooks="keep"'
                )
            stack.enter_context(evaluating(self.model))
            stack.enter_context(suspended(self.model))
            if linear:
                self._note("a `linearized` block was active: the model was measured without it")
            self.kept = tuple(self._foreign) if self.policy == KEEP else ()
            self._cover = stack.enter_context(Cover(self.model, self._foreign, on=self.kept))
            if self._fingerprint is None:
                self._fingerprint = Fingerprint(self.model)
            self.rest()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        cover, fingerprint = self._inside()
        self._cover = None
        with self._stack:
            left = cover.left()
            cover.undo()
            if cover.refused:
                count, names = sum(cover.refused.values()), ", ".join(map(repr, cover.refused))
                self._note(
                    f"another thread ({names}) used the model while it was measured: {count} of its passes and hooks "
                    "were refused, and the numbers here do not depend on them"
                )
            if kind is None:
                if changed := fingerprint.changed():
                    raise SealError(_changed(changed))
                if left:
                    raise SealError(_added(left))

    def compare(self, tokens: Int[Tensor, " pos"]) -> None:
        """Check whether foreign hooks change the output or the input of a norm on a prompt, bit for bit.

        Raises:
            SealError: they do, and hooks="refuse"; names them.
        """
        if not self._foreign:
            return
        able = [f for f in self._foreign if f.removable and not f.backward]
        differ = bool(able) and self._differs(able, tokens)
        if self.policy == KEEP:
            self._try_short(tokens)
            self.changing = differ or not all(f.removable for f in self._foreign)
            what = "change what the model computes" if self.changing else "change nothing on the first prompt"
            self._note(
                'measured with hooks="keep": every number here, those of the intact model included, is of the model '
                f"with {_some(self._foreign)}, which {what}"
            )
            return
        if differ:
            alone = [f for f in able if self._differs([f], tokens)] if len(able) > 1 else able
            raise SealError(
                f"{_some(alone or able)} on the model and not of TransformerLens or ln_probe: with them the output or "
                "the input of a norm is another, so these numbers would not be the model's own. Remove them "
                '(model.reset_hooks(), handle.remove()), or measure the model with them: hooks="keep"'
            )
        self._note(
            f"{_some(self._foreign)} on the model and not of TransformerLens or ln_probe: outputs and norm inputs of "
            "the first prompt are equal bit for bit with them and without (backward hooks see gradients only); they "
            "were switched off during the measurement"
        )

    def rest(self) -> None:
        """Check between passes that no hook was added and no weight was written to.

        Raises:
            SealError: names the hook or the parameter.
        """
        cover, fingerprint = self._inside()
        if touched := fingerprint.touched():
            raise SealError(_changed(touched))
        if left := cover.left():
            cover.undo()
            raise SealError(_added(left))

    def _inside(self) -> tuple[Cover, Fingerprint]:
        if self._cover is None or self._fingerprint is None:
            raise RuntimeError("the seal has not been entered")
        return self._cover, self._fingerprint

    def _try_short(self, tokens: Int[Tensor, " pos"]) -> None:
        """Raise SealError if kept hooks fail on the beginning of a prompt, as short as what norms are tried out on."""
        cover, _ = self._inside()
        for short in (tokens[:length] for length in sorted({min(len(tokens), n) for n in _TRIED})):
            try:
                self._pass(short)
            except Exception as error:
                failing = []
                for each in self.kept:
                    with cover.showing([each]):
                        try:
                            self._pass(short)
                        except Exception:
                            failing.append(each)
                raise SealError(
                    f"{_some(failing or self.kept)} on the model fails on an input of {len(short)} tokens "
                    f"({type(error).__name__}: {error}), and norms are tried out on inputs of 3 to 8 tokens: let the "
                    "hook return short inputs as they are (`if value.shape[1] <= position: return value`), or remove it"
                ) from error

    def _differs(self, shown: Sequence[Foreign], tokens: Int[Tensor, " pos"]) -> bool:
        cover, _ = self._inside()
        with cover.showing(()):
            without = self._pass(tokens)
        with cover.showing(shown):
            try:
                return self._pass(tokens) != without
            except Exception:  # what a foreign hook raises here, it would raise in every pass
                return True

    def _pass(self, tokens: Int[Tensor, " pos"]) -> list[int]:
        """Checksums of every norm's inputs and of the output of one pass."""
        seen: list[Tensor] = []

        def keep(_m: nn.Module, args: Any, kwargs: Any) -> None:
            seen.extend(checksum(v).cpu() for v in (*args, *kwargs.values()) if isinstance(v, Tensor))

        with ExitStack() as stack:
            for module in site_modules(self.model).values():
                stack.callback(module.register_forward_pre_hook(keep, with_kwargs=True).remove)
            output = self._forward(tokens[None])
        return [int(s) for s in (*seen, *([checksum(output)] if isinstance(output, Tensor) else []))]

    def _note(self, text: str) -> None:
        self.notes = tuple(dict.fromkeys((*self.notes, text)))


def hooked_model(given: object, tokenizer: Any = None, hooks: str = REFUSE) -> tuple[HookedModel, tuple[str, ...]]:
    """Return the model to measure (a bridge for a Hugging Face model in memory) and notes on the latter's hooks.

    Raises:
        SealError: it is compiled, under autocast, or under hooks that change what it computes.
        TypeError, ValueError: as `check_model`, or `bridged`.
    """
    check_hooks(hooks)
    refuse_compiled(given)
    if not is_hugging_face(given):
        if tokenizer is not None:
            raise ValueError(
                f"tokenizer= is for a Hugging Face model in memory: a {type(given).__name__} brings its own "
                "(model.tokenizer)"
            )
        return check_model(given), ()
    from ln_probe.loading.verify import probe_tokens

    original: Any = given
    check_weights(original)
    if _refuse_edited(original):
        raise SealError("a `linearized` block is active on this Hugging Face model: leave it, and measure then")

    def forward(tokens: Int[Tensor, "batch pos"]) -> Any:
        with torch.no_grad():
            return getattr(original(tokens), "logits", None)

    if not foreign_hooks(original):
        refuse_autocast(device_of(original))
        return check_model(bridged(original, tokenizer)), ()
    with Seal(original, hooks, forward) as seal:
        device = next(original.parameters()).device
        seal.compare(probe_tokens(original.config, device)[0])
        return check_model(bridged(original, tokenizer)), seal.notes


def _refuse_edited(model: HookedModel | nn.Module) -> list[LinearEdit]:
    """Raise SealError for a model under `without`; return the edits of `linearized`."""
    without, linear = edits_under_way(model)
    if without:
        raise SealError(
            f"{without[0].site.name} is under an intervention ({without[0].label}): analyze edits these norms itself: "
            "leave the with block"
        )
    return linear


def check_hooks(hooks: object) -> None:
    """Raise ValueError if `hooks` is none of HOOKS."""
    if hooks not in HOOKS:
        raise ValueError(f"hooks must be one of {', '.join(map(repr, HOOKS))}, got {hooks!r}")


def refuse_autocast(device: torch.device) -> None:
    """Raise SealError under `torch.autocast` of the CPU or of the model's device."""
    if active := next((d for d in dict.fromkeys(("cpu", device.type)) if torch.is_autocast_enabled(d)), ""):
        dtype = str(torch.get_autocast_dtype(active)).removeprefix("torch.")
        raise SealError(
            f"torch.autocast is on ({active}, {dtype}): the model would compute in another format than its weights "
            f'have. Leave the autocast block, or load the model in that format: ln_probe.load_model(…, dtype="{dtype}")'
        )


def refuse_compiled(model: object) -> None:
    """Raise SealError for what `torch.compile` returns, or a model with a compiled module: it does not call hooks."""
    if "_orig_mod" in getattr(model, "_modules", {}):
        raise SealError(
            f"{type(model).__name__} is a model compiled by torch.compile, which does not call the hooks that measure "
            "it: pass the model itself, model._orig_mod"
        )
    for path, module in model.named_modules() if isinstance(model, nn.Module) else ():
        name = f"model.{path.replace('_original_component.', '')}".rstrip(".")
        if "_orig_mod" in module._modules:
            raise SealError(f"{name} is compiled by torch.compile: put the module itself there, {name}._orig_mod")
        if module.__dict__.get("_compiled_call_impl") is not None:
            raise SealError(
                f"{name} is compiled ({name}.compile()), and compiled modules do not call the hooks that measure them: "
                "measure a model that is not compiled"
            )


def _changed(name: str) -> str:
    return (
        f"{name} changed while the model was measured (another thread, a hook or the loss?), so its tables would mix "
        "two models and none is made: measure again when nothing else writes to the model, or measure a copy "
        "(copy.deepcopy)"
    )


def _added(left: Sequence[str]) -> str:
    return (
        f"while the model was measured, another caller added {'; '.join(left)}, so no table is made; it was removed: "
        "measure again when nothing else uses the model"
    )


def _some(found: Sequence[Foreign]) -> str:
    """Count hooks and name the first of them."""
    more = f", … ({len(found)} in all)" if len(found) > _NAMED else ""
    count = f"{len(found)} hook{'s' * (len(found) > 1)}"
    return f"{count} ({'; '.join(map(str, found[:_NAMED]))}{more})"
