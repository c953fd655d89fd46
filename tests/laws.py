"""Laws that hold of every model: each is a function that tries one model, in every model class that can hold it.

A law returns how it was kept, raises `Refused` where ln_probe or TransformerLens refuses by name, and fails an
assertion where it is broken. What a law compares with is written out here in plain torch, on the Hugging Face model.
"""

from __future__ import annotations

import copy
import math
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import torch
from architectures import ARCHITECTURES, HEADS, VOCAB, bridge_of, folded_in_place, hugging_face
from torch import Tensor, nn

import ln_probe
from ln_probe.hooks import without
from ln_probe.hooks.edits import InterventionError
from ln_probe.hooks.interventions import NoOpWarning
from ln_probe.hooks.model import context_length, missing_head
from ln_probe.hooks.norm import Site, SiteError
from ln_probe.hooks.sites import find_sites
from ln_probe.loading.convert import has_hooked_transformer
from ln_probe.loading.provenance import source_of

# What HookedTransformer holds of ARCHITECTURES; every other one is a bridge alone.
HOOKED = (
    "gpt2", "neox", "opt", "neo", "llama", "qwen3", "mistral", "qwen2", "gpt2-scaled-by-layer", "gpt2-unscaled",
    "gpt2-untied", "neox-sequential", "neox-no-bias", "llama-tied", "mistral-long", "qwen3-long",
)  # fmt: skip
TOKENS = torch.randint(3, VOCAB, (2, 12), generator=torch.Generator().manual_seed(5))
# Difference of logits relative to the largest that rounding in float32 explains: up to 7e-6 was measured, where an edit
# moves them by 1e-3 and more.
SAME = 5e-5
PROBES = ("decomposition", "causal", "head_effects")
MOVED = 1e-3  # what an edit must move logits by, at least, to be compared at all


def cases() -> list[tuple[str, str]]:
    """Every architecture with every model class that is tried: HookedTransformer where it can hold it, and a bridge."""
    both = has_hooked_transformer()
    classes = {a: ("hooked", "bridge") if both and a in HOOKED else ("bridge",) for a in ARCHITECTURES}
    return [(architecture, model_class) for architecture, those in classes.items() for model_class in those]


class Refused(Exception):  # noqa: N818 - no error: what a law was tried on is not to be had
    """ln_probe or TransformerLens refuses, and says why."""


class Subject:
    """One architecture: the Hugging Face model, its folder, and what `load_model` makes of it in each model class."""

    def __init__(self, architecture: str) -> None:
        self.architecture, self._home = architecture, tempfile.TemporaryDirectory(prefix="laws-")
        self.folder = Path(self._home.name) / "whole"
        self.original = hugging_face(architecture)
        self.original.save_pretrained(self.folder)
        self._models: dict[tuple[str, bool], Any] = {}

    def model(self, model_class: str, *, folded: bool = False) -> Any:
        """The loaded model.

        Raises:
            Refused: `load_model` refuses, or folding changes nothing.
        """
        key = (model_class, folded)
        if key not in self._models:
            model = loaded(self.folder, model_class)
            self._models[key] = folded_copy(model) if folded else model
        return self._models[key]

    @cached_property
    def paths(self) -> dict[str, str]:
        """Where norms and attention modules are in the Hugging Face model, by their names in a bridge."""
        try:
            bridge = self.model("bridge")
        except Refused:  # of a bridge with other logits the names are right all the same
            bridge = bridge_of(copy.deepcopy(self.original))
        places = {id(m): path.replace("._original_component", "") for path, m in bridge.original_model.named_modules()}
        components: dict[str, Any] = {s.name: s.module for s in find_sites(bridge)}
        components |= {f"blocks.{i}.attn": getattr(block, "attn", None) for i, block in enumerate(bridge.blocks)}
        return {name: places[id(component)] for name, component in components.items() if id(component) in places}

    def constants(self, sites: Sequence[Site]) -> dict[str, float]:
        """A constant for each norm that scales, other than its own mean divisor by up to a fifth."""
        inputs: dict[str, Tensor] = {}
        with ExitStack() as stack:
            for name, path in self.paths.items():

                def keep(_m: nn.Module, args: Any, kwargs: Any, name: str = name) -> None:
                    inputs[name] = _input(args, kwargs)

                module = self.original.get_submodule(path)
                stack.callback(module.register_forward_pre_hook(keep, with_kwargs=True).remove)
            logits(self.original)
        scaling = [s.name for s in sites if s.scales]
        return {n: float(inputs[n].std(-1).mean()) * (0.8 + 0.1 * (i % 5)) for i, n in enumerate(scaling)}


def loaded(folder: Path, model_class: str) -> Any:
    try:
        return ln_probe.load_model(folder, device="cpu", world=model_class)  # type: ignore[arg-type]
    except ValueError as error:
        raise Refused(str(error).replace(str(folder), "the folder")) from error


def folded_copy(model: Any) -> Any:
    before = logits(model)
    try:
        folded_in_place(model)
    except Exception as error:
        raise Refused(f"cannot do fold_ln: {error}") from error
    if torch.equal(logits(model), before):
        raise Refused("fold_ln changed nothing")
    return model


@lru_cache(maxsize=1)
def subject(architecture: str) -> Subject:
    """The architecture, kept until another one is asked for."""
    return Subject(architecture)


def difference(values: Tensor, reference: Tensor) -> float:
    """Largest absolute difference, relative to the largest reference."""
    return float((values - reference).abs().max() / reference.abs().max())


def logits(model: Any, tokens: Tensor = TOKENS) -> Tensor:
    with torch.no_grad():
        output = model(tokens)
    found: Tensor = output if isinstance(output, Tensor) else output.logits
    return found.double()


# By hand, in plain torch.


def norm_by_hand(norm: nn.Module, x: Tensor, divisor: float) -> Tensor:
    """A Hugging Face norm with a constant instead of its scaling."""
    kind = type(norm).__name__
    weight, bias = getattr(norm, "weight", None), getattr(norm, "bias", None)
    y = (x if "RMSNorm" in kind else x - x.mean(-1, keepdim=True)) / divisor
    if weight is not None:
        y = y * (1 + weight if "Gemma" in kind or kind == "NemotronLayerNorm1P" else weight)
    return y if bias is None else y + bias


def _input(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    return next(v for v in (*args, *kwargs.values()) if isinstance(v, Tensor))


@contextmanager
def norms_by_hand(original: Any, constants: Mapping[str, float]) -> Iterator[None]:
    """Constants instead of scaling at some norms of a Hugging Face model, by their paths."""
    with ExitStack() as stack:
        for path, divisor in constants.items():

            def hook(norm: nn.Module, args: Any, kwargs: Any, _y: Tensor, divisor: float = divisor) -> Tensor:
                return norm_by_hand(norm, _input(args, kwargs), divisor)

            stack.callback(original.get_submodule(path).register_forward_hook(hook, with_kwargs=True).remove)
        yield


@contextmanager
def read_by_hand(original: Any, reads: Mapping[str, tuple[str, float]]) -> Iterator[None]:
    """Attention that reads another output of a norm, by its path: that with a constant instead of scaling. Whatever
    else reads the norm reads its own output."""
    with ExitStack() as stack:
        for path, (norm_path, divisor) in reads.items():
            inputs: list[Tensor] = []
            norm, attention = original.get_submodule(norm_path), original.get_submodule(path)
            attention = getattr(attention, "self", attention)  # BERT's: the rest adds the residual

            def keep(_m: nn.Module, args: Any, kwargs: Any, inputs: list[Tensor] = inputs) -> None:
                inputs.append(_input(args, kwargs))

            def read(
                _m: nn.Module,
                args: Any,
                kwargs: Any,
                norm: nn.Module = norm,
                divisor: float = divisor,
                inputs: list[Tensor] = inputs,
            ) -> tuple[Any, Any]:
                edited = norm_by_hand(norm, inputs[-1], divisor)
                if "hidden_states" in kwargs:
                    return args, {**kwargs, "hidden_states": edited}
                return (edited, *args[1:]), kwargs

            stack.callback(norm.register_forward_pre_hook(keep, with_kwargs=True).remove)
            stack.callback(attention.register_forward_pre_hook(read, with_kwargs=True).remove)
        yield


# The laws.


def context(subject: Subject, model_class: str) -> str:
    """The context length is the one that the checkpoint's config names."""
    options = ARCHITECTURES[subject.architecture][2]
    names = [name for name in ("max_position_embeddings", "n_positions", "max_seq_len") if name in options]
    model = subject.model(model_class)
    if not names:
        raise Refused("the config names no context length")
    assert context_length(model) == options[names[0]], (
        f"{context_length(model)}, and the config has {options[names[0]]}"
    )
    return f"{context_length(model)} tokens"


def all_heads(subject: Subject, model_class: str) -> str:
    """All heads together are the norm edited for queries, keys and values alone."""
    model = subject.model(model_class)
    sites = _sites(model)
    constants = subject.constants(sites)
    readers = {layer: s for s in sites if s.scales for layer in s.attention_layers}
    heads = [(layer, head) for layer in sorted(readers) or [0] for head in range(HEADS)]
    with _refusals(), warnings.catch_warnings():
        warnings.simplefilter("ignore", NoOpWarning)
        with without(model, "scaling", heads=heads, scale=constants):
            edited = logits(model)
    reads = {
        subject.paths[f"blocks.{layer}.attn"]: (subject.paths[s.name], constants[s.name])
        for layer, s in readers.items()
    }
    intact = logits(subject.original)
    with read_by_hand(subject.original, reads):
        expected = logits(subject.original)
    return _same(edited, expected, intact)


def by_hand(subject: Subject, model_class: str) -> str:
    """With equal constants, scaling frozen at every norm is the Hugging Face model edited by hand."""
    model = subject.model(model_class)
    constants = subject.constants(_sites(model))
    if not constants:
        raise Refused("no norm scales")
    with _refusals(), without(model, "scaling", sites=list(constants), scale=constants):
        edited = logits(model)
    intact = logits(subject.original)
    with norms_by_hand(subject.original, {subject.paths[name]: c for name, c in constants.items()}):
        expected = logits(subject.original)
    return _same(edited, expected, intact)


def folding(subject: Subject, model_class: str) -> str:
    """A folded model is the raw one, intact and with scaling frozen at every norm."""
    raw = subject.model(model_class)
    folded = subject.model(model_class, folded=True)
    constants = subject.constants(_sites(raw))
    results = []
    with _refusals():
        for model in (raw, folded):
            intact = _centred(logits(model))
            with without(model, "scaling", sites=list(constants), scale=constants):
                results.append((intact, _centred(logits(model))))
    (raw_intact, raw_frozen), (folded_intact, folded_frozen) = results
    assert difference(folded_intact, raw_intact) < SAME, f"intact: {difference(folded_intact, raw_intact):.1e}"
    return _same(folded_frozen, raw_frozen, raw_intact)


def head(subject: Subject, model_class: str) -> str:
    """A head that was not in the checkpoint is not measured: the folder of the body alone."""
    whole = subject.model(model_class)
    folder = subject.folder.with_name("body")
    if not folder.exists():
        if subject.original.base_model is subject.original:
            raise Refused("the model has no body apart from its head")
        subject.original.base_model.save_pretrained(folder)
    model = loaded(folder, model_class)
    report = ln_probe.analyze(model, TOKENS[:1], probes=PROBES, progress=False)
    losses = report.tables["causal"][["loss", "delta_loss", "kl", "top1_agreement"]]
    own = bool(subject.original.config.tie_word_embeddings) and difference(logits(model), logits(whole)) < SAME
    if own:
        assert missing_head(model) == ""
        assert losses["loss"].notna().all(), "losses are left out"
        return "the embedding, which is the head"
    reason = missing_head(model)
    assert "no language-model head" in reason, f"nothing is said of the head: {source_of(model).notes}"
    assert losses.isna().all(axis=None), "losses"
    assert any("no language-model head" in note for note in report.notes), report.notes
    assert not len(report.tables["head_effects"])
    inside = {id(m) for m in model.original_model.base_model.modules()} if model_class == "bridge" else None
    for site in find_sites(model):
        if inside is not None and id(site.module) not in inside:
            assert site.name not in set(report.tables["layernorms"]["site"]), site.name
    message = _message(lambda: ln_probe.attribute_logits(model, TOKENS[0]), ValueError)
    assert "no language-model head" in message, f"logits are read: {message!r}"
    return "left out"


LAWS: dict[str, Callable[[Subject, str], str]] = {
    "context": context,
    "all heads": all_heads,
    "by hand": by_hand,
    "folding": folding,
    "head": head,
}


def _sites(model: Any) -> list[Site]:
    try:
        sites = find_sites(model)
    except SiteError as error:
        raise Refused(str(error)) from error
    if not sites:
        raise Refused("the model has no norm")
    return sites


@contextmanager
def _refusals() -> Iterator[None]:
    try:
        yield
    except InterventionError as error:
        raise Refused(str(error)) from error


def _message(call: Callable[[], Any], expected: type[Exception]) -> str:
    """What a call raises, in words; empty if it raises nothing."""
    try:
        call()
    except expected as error:
        return str(error)
    return ""


def _centred(values: Tensor) -> Tensor:
    return values - values.mean(-1, keepdim=True)


def _same(edited: Tensor, expected: Tensor, intact: Tensor) -> str:
    moved = difference(expected, intact)
    assert moved > MOVED, f"the edit moves logits by {moved:.1e} of the largest alone, so nothing is compared"
    apart = difference(edited, expected)
    assert apart < SAME, f"{apart:.1e} of the largest logit apart, of {moved:.1e} that the edit moves it"
    assert math.isfinite(apart)
    return f"{apart:.0e}"
