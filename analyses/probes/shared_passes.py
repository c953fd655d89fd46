"""One prompt under many edits: what several passes have in common is computed once.

* Blocks before the first edited norm return what they returned in the unedited pass.
* Edits that begin at the same block go through the model together, a row of the batch each.
* Logits are not kept: the unembedding is applied a block of the vocabulary at a time, and cross-entropy, KL and top-1
  agreement are summed while the block is in the processor's cache. Where a model's own logits are anything else than
  W_Uᵀ y + b_U to rounding (a soft cap, a 16-bit format), they are taken as the model gives them.

A row of a batch is what it would be alone, up to the rounding of matrix products.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from ln_probe.analyses.probes.uniformity import entropy_ratio
from ln_probe.analyses.progress import tell_inner
from ln_probe.hooks.model import (
    Hook,
    HookedModel,
    at_least_float32,
    attentions,
    blocks,
    child_of,
    device_of,
    hooks_on,
    run,
    vocabulary_size,
    weight_of,
)
from ln_probe.hooks.norm import INTACT
from ln_probe.hooks.norm_edits import NormEdit, installed
from ln_probe.hooks.stream import ActivationError, is_causal, window_of
from ln_probe.hooks.task import Objective

# Tokens that go through the model at once: on one core, matrix products of GPT-2 small's shape reach 70 billion
# operations a second at 110 tokens, 84 at 440, and no more at 1000. In bytes: 12 MB an MLP layer.
TOKENS_AT_ONCE = 1024
_Key = TypeVar("_Key", bound=Hashable)


@dataclass(frozen=True)
class Job:
    """One way to edit the model.

    Attributes:
        edits: of one or several norms.
        whole: whether distributions and attention are compared too; otherwise the loss is all that is wanted.
    """

    edits: Sequence[NormEdit]
    whole: bool = True


class SharedPasses:
    """Passes of one prompt through one model, the unedited one first.

    Args:
        model: in evaluation mode.
        objective: the loss.
        tokens: of the prompt.
        causal: whether attention is; None: not known yet.

    Attributes:
        causal: likewise; known after a pass over more than one token.
        outputs: of every block in the unedited pass; empty if blocks cannot be passed over.
        entropy: sum and count of its entropy ratios, by layer.
        vocabulary: number of outputs.
        reference: its next-token distributions; None where the output is no logits of tokens.
        sums: of the intact model on this prompt, as `effects` gives them.
    """

    def __init__(
        self, model: HookedModel, objective: Objective, tokens: Int[Tensor, " pos"], causal: bool | None = None
    ) -> None:
        self.model, self.objective, self.tokens, self.causal = model, objective, tokens, causal
        found: dict[int, list[tuple[float, float]]] = {}
        outputs: list[Any] = []
        after: list[Hook] = [(block, lambda *seen: outputs.append(seen[-1])) for block in blocks(model)]
        with hooks_on(after), self._watching(found), _reading(model, skip=False) as read:
            output = run(model, tokens[None], return_type="logits")
        # Blocks that run twice, or not at all, cannot be passed over.
        self.outputs = outputs if len(outputs) == len(blocks(model)) else []
        self.entropy = {layer: sums[0] for layer, sums in found.items()}
        self.vocabulary = int(output.shape[-1]) if isinstance(output, Tensor) and output.ndim == 3 else 0
        self.reference, self.sums = None, _unknown()
        if objective.function is None or self.vocabulary >= vocabulary_size(model):
            logits = at_least_float32(output.detach())
            self.reference = Reference(logits, find_unembedding(model, read, logits), tokens.to(logits.device))
            self.sums = self.reference.itself()
            check_logits(self.reference.level.value())
        if objective.function is not None:
            self.sums["nll"] = float(objective.sums(output, tokens[None].to(device_of(model)))[0])
        if self.entropy:
            totals = map(math.fsum, zip(*self.entropy.values(), strict=True))
            self.sums |= dict(zip(("entropy", "queries"), totals, strict=True))

    def effects(self, jobs: Mapping[_Key, Job]) -> dict[_Key, Sums]:
        """Of each job: `nll`, `kl` and `agree` (NaN if only the loss is wanted), `entropy` and `queries`: sums over
        the prompt."""
        waiting: dict[tuple[int, bool], list[_Key]] = {}
        for key, job in jobs.items():
            start = min(e.norm.layer for e in job.edits) if self.outputs else 0
            waiting.setdefault((start, job.whole), []).append(key)
        most = max(1, TOKENS_AT_ONCE // len(self.tokens))
        done: dict[_Key, Sums] = {}
        for (start, whole), keys in waiting.items():
            parts = -(-len(keys) // most)
            for part in range(parts):  # of equal size, so that none is a straggler
                some = keys[len(keys) * part // parts : len(keys) * (part + 1) // parts]
                tell_inner(f"edited passes: {len(done)} of {len(jobs)}")
                done |= dict(zip(some, self._together([jobs[k] for k in some], start, whole), strict=True))
        return {key: done[key] for key in jobs}

    def _together(self, jobs: Sequence[Job], start: int, whole: bool) -> list[Sums]:
        rows, tokens = len(jobs), self.tokens.expand(len(jobs), -1)
        changes: dict[str, dict[int, NormEdit]] = {}
        for row, job in enumerate(jobs):
            for edit in job.edits:
                changes.setdefault(edit.norm.name, {})[row] = edit
        edits = [_by_row(rows, by_row) for by_row in changes.values()]
        seen: dict[int, list[tuple[float, float]]] = {}
        reference, own = self.reference, self.objective.function is None
        blockwise = reference is not None and reference.unembedding is not None
        with (
            passed_over(blocks(self.model)[:start], self.outputs, rows),
            installed(self.model, edits),
            self._watching(seen) if whole else nullcontext(),
            _reading(self.model, skip=blockwise and own) as read,
        ):
            output = run(self.model, tokens, return_type="logits")
        if reference is None:
            made = [_unknown() for _ in jobs]
        else:
            made = reference.compare(read[0] if blockwise else at_least_float32(output.detach()), whole)
        if not own:
            losses = self.objective.sums(output, tokens.to(device_of(self.model)))
            for sums, loss in zip(made, losses.tolist(), strict=True):
                sums["nll"] = loss
        for row, sums in enumerate(made):
            entropy = {layer: sum_ for layer, sum_ in self.entropy.items() if layer < start}
            entropy |= {layer: each[row] for layer, each in seen.items()}
            total, queries = (math.fsum(e[i] for e in entropy.values()) for i in (0, 1))
            sums |= {"entropy": total if queries else math.nan, "queries": queries}
        return made

    def _watching(self, seen: dict[int, list[tuple[float, float]]]) -> AbstractContextManager[None]:
        """Sum and count of entropy ratios over heads and queries, by layer and row, of what attention pays."""

        def add(layer: int, attn: nn.Module, _m: nn.Module, _args: Any, _kwargs: Any, pattern: Tensor) -> None:
            each = [self._entropies(attn, row) for row in pattern.detach()]
            seen[layer] = [(float(ratios.sum()), float(ratios.numel())) for ratios in each]

        layers = attentions(self.model).items()
        points = [(i, attn, point) for i, attn in layers if (point := child_of(attn, "hook_pattern")) is not None]
        return hooks_on([(point, partial(add, layer, attn)) for layer, attn, point in points])

    def _entropies(self, attn: nn.Module, pattern: Float[Tensor, "head query key"]) -> Float[Tensor, "head later"]:
        """Of queries that had a choice: all but the first, or all in a bidirectional model."""
        wide = at_least_float32(pattern)
        if self.causal is None and len(pattern[0]) > 1:
            self.causal = is_causal(pattern)
        if self.causal is not False:
            return entropy_ratio(wide, window=window_of(attn, wide))[:, 1:]
        entropy: Tensor = torch.special.entr(wide).sum(-1) / math.log(pattern.shape[-1])
        return entropy


def check_logits(level: Float[Tensor, " pos"]) -> None:
    """Raise ActivationError if the intact model's logits are not finite; `level`: their log Σ exp at each position."""
    if len(places := (~torch.isfinite(level)).nonzero()):
        raise ActivationError(f"the intact logits at position {int(places[0])} are not finite: try dtype='float32'")


def _unknown() -> Sums:
    return dict.fromkeys(("nll", "kl", "agree"), math.nan)


@contextmanager
def _reading(model: HookedModel, *, skip: bool) -> Iterator[list[Tensor]]:
    """The unembedding's inputs while this lasts; with `skip` it computes nothing, and returns a column of its input."""
    found: list[Tensor] = []
    module = child_of(model, "unembed")

    def hook(_m: nn.Module, args: Any, _kwargs: Any) -> None:
        if args and isinstance(args[0], Tensor):
            found.append(args[0].detach())

    if module is None:
        yield found
        return
    with _replaced(module, lambda x, *_, **__: x[..., :1]) if skip else nullcontext(), hooks_on((), [(module, hook)]):
        yield found


def _by_row(rows: int, edits: Mapping[int, NormEdit]) -> NormEdit:
    """Return the edits of one norm, each on its own row of a batch, as one."""
    first, none = next(iter(edits.values())), torch.full((2,), math.nan, dtype=torch.float64)
    variants = [edits[row].variants[0] if row in edits else INTACT.name for row in range(rows)]
    constants = [edits[row].constants if row in edits else None for row in range(rows)]
    if all(pair is None for pair in constants):
        return NormEdit(first.norm, variants, None, first.label)
    return NormEdit(
        first.norm, variants, torch.stack([none if pair is None else pair[0] for pair in constants]), first.label
    )


@contextmanager
def passed_over(skipped: Sequence[nn.Module], outputs: Sequence[Any], rows: int) -> Iterator[None]:
    """While it lasts these blocks compute nothing and return what they returned before; the last of them for every row
    of the batch."""

    def repeated(output: Tensor) -> Tensor:
        one = output.ndim > 1 and output.shape[0] == 1
        return output.expand(rows, *output.shape[1:]).contiguous() if one else output

    def returning(output: Any) -> Callable[..., Any]:
        return lambda *_args, **_kwargs: output

    with ExitStack() as stack:
        last = len(skipped) - 1
        for k, (block, output) in enumerate(zip(skipped, outputs, strict=False)):
            stack.enter_context(_replaced(block, returning(mapped(repeated, output) if k == last else output)))
        yield


def mapped(change: Callable[[Tensor], Tensor], output: Any) -> Any:
    """A block's output with every tensor of it changed (a block of OpenAI's first GPT returns a list)."""
    if isinstance(output, Tensor):
        return change(output)
    if isinstance(output, tuple | list):
        return type(output)(mapped(change, part) for part in output)
    return output


@contextmanager
def _replaced(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """The module computes something else while it lasts."""
    before = module.__dict__.get("forward")
    module.__dict__["forward"] = forward  # not setattr: a bridge hands that on to what it wraps
    try:
        yield
    finally:
        del module.__dict__["forward"]
        if before is not None:
            module.__dict__["forward"] = before


# --------------------------------------------------------------------------------------------- next-token distributions

# Logits that are processed together: 6 MB, which stay in the cache.
_LOGITS = 1_500_000
_NARROWEST = 1024  # columns of the unembedding at a time: with fewer its product is slower
# Logits made here may differ from the model's by this many units in the last place of the largest, times √d_model.
_UNITS = 16.0

Sums = dict[str, float]


class Reference:
    """The next-token distributions of one prompt in the unedited model, and how others compare with them.

    Args:
        logits: of the model, [1 pos vocab].
        unembedding: what makes logits of the final norm's output; None: the model itself does.
        tokens: of the prompt.
    """

    def __init__(
        self, logits: Float[Tensor, "1 pos vocab"], unembedding: Unembedding | None, tokens: Int[Tensor, " pos"]
    ) -> None:
        self.unembedding, self.after = unembedding, tokens[1:]
        self.logits = logits[0]
        if unembedding is not None:  # made as those of edited models are, so that rounding is the same
            self.logits = torch.cat([part[0] for _, part in unembedding.blocks(unembedding.read)], dim=-1)
        self.favourite = self.logits.argmax(-1)
        self.level = _LogSum(self.logits.shape[:1], self.logits)
        for _, part in _columns(self.logits[None]):
            self.level.add(part[0])
        self.shares = (self.logits - self.level.value()[:, None].to(self.logits)).exp_()

    def itself(self) -> Sums:
        """The unedited model compared with itself."""
        wanted = torch.full((1, len(self.after)), math.nan, dtype=torch.float64, device=self.logits.device)
        _pick(self.logits[None, :-1], self.after, slice(0, self.logits.shape[-1]), wanted)
        loss = float((self.level.value()[:-1] - wanted[0]).sum())
        return {"nll": loss, "kl": 0.0, "agree": float(len(self.logits))}

    def compare(self, made: Float[Tensor, "row pos size"], whole: bool) -> list[Sums]:
        """Sums over the prompt for each row of logits, or of what the unembedding reads: `nll`, and if `whole` is
        wanted `kl` (NaN unless all is finite) and `agree`."""
        parts = _columns(made) if self.unembedding is None else self.unembedding.blocks(made)
        rows, length = made.shape[:2]
        level = _LogSum((rows, length), self.logits)
        wanted = torch.full((rows, max(0, length - 1)), math.nan, dtype=torch.float64, device=made.device)
        own, apart = (torch.zeros(rows, length, dtype=torch.float64, device=made.device) for _ in range(2))
        own -= math.inf
        for columns, part in parts:
            _pick(part[:, :-1], self.after, columns, wanted)
            if whole:
                _pick(part, self.favourite, columns, own)
                difference = self.logits[:, columns] - part
                apart += difference.mul_(self.shares[:, columns]).sum(-1)
            level.add(part)
        value = level.value()
        losses = (value[:, :-1] - wanted).sum(-1)
        found = [{"nll": float(loss), "kl": math.nan, "agree": math.nan} for loss in losses]
        if whole:
            distances = (apart + value - self.level.value()).sum(-1)
            agreed = (own >= level.largest).sum(-1)
            for sums, distance, agree in zip(found, distances.tolist(), agreed.tolist(), strict=True):
                if math.isfinite(distance):
                    sums |= {"kl": distance, "agree": float(agree)}
        return found


class _LogSum:
    """log Σ exp over the vocabulary, a block at a time, in double precision."""

    def __init__(self, shape: Sequence[int], like: Tensor) -> None:
        self.largest = torch.full(tuple(shape), -math.inf, dtype=like.dtype, device=like.device)
        self.total = torch.zeros(tuple(shape), dtype=torch.float64, device=like.device)

    def add(self, part: Float[Tensor, "*batch columns"]) -> None:
        largest = torch.maximum(self.largest, part.amax(-1))
        self.total *= (self.largest.double() - largest.double()).nan_to_num(nan=0.0).exp()
        self.total += (part - largest[..., None]).exp_().sum(-1)
        self.largest = largest

    def value(self) -> Float[Tensor, "*batch"]:
        return self.largest.double() + self.total.log()


class Unembedding:
    """W_U and b_U, applied a block of the vocabulary at a time.

    Attributes:
        read: what the unembedding read in the unedited pass, [1 pos d_model].
    """

    def __init__(
        self, weight: Float[Tensor, "d_model vocab"], bias: Float[Tensor, " vocab"] | None, read: Tensor
    ) -> None:
        self.weight, self.bias, self.read = weight, bias, read

    def blocks(
        self, read: Float[Tensor, "row pos d_model"]
    ) -> Iterator[tuple[slice, Float[Tensor, "row pos columns"]]]:
        """Logits, a slice of the vocabulary at a time."""
        size = self.weight.shape[1]
        flat = read.reshape(-1, read.shape[-1])
        step = min(size, max(_NARROWEST, _LOGITS // len(flat)))
        for first in range(0, size, step):
            columns = slice(first, min(first + step, size))
            part = torch.mm(flat, self.weight[:, columns])
            if self.bias is not None:
                part += self.bias[columns]
            yield columns, part.view(*read.shape[:2], -1)


def find_unembedding(
    model: HookedModel, read: Sequence[Tensor], logits: Float[Tensor, "1 pos vocab"]
) -> Unembedding | None:
    """The model's unembedding, if its logits are W_Uᵀ y + b_U of what it read."""
    weight, bias, size = weight_of(model, "W_U"), weight_of(model, "b_U"), logits.shape[-1]
    if len(read) != 1 or weight is None or weight.dtype not in (torch.float32, torch.float64):
        return None
    made, lift = read[0], bias if bias is not None and bool(bias.any()) else None
    if made.ndim != 3 or made.shape[:2] != logits.shape[:2] or weight.shape != (made.shape[-1], size):
        return None
    if not made.dtype == logits.dtype == weight.dtype or (lift is not None and lift.shape != (size,)):
        return None
    found = Unembedding(weight, lift, made)
    allowed = _UNITS * math.sqrt(len(weight)) * torch.finfo(weight.dtype).eps * float(logits.abs().max())
    near = all(float((part - logits[..., c]).abs().max()) <= allowed for c, part in found.blocks(made))
    return found if near else None


def _columns(logits: Float[Tensor, "row pos vocab"]) -> Iterator[tuple[slice, Float[Tensor, "row pos columns"]]]:
    """Logits that are there, a slice of the vocabulary at a time."""
    step = max(_NARROWEST, _LOGITS // max(1, logits.shape[0] * logits.shape[1]))
    for first in range(0, logits.shape[-1], step):
        columns = slice(first, min(first + step, logits.shape[-1]))
        yield columns, logits[..., columns]


def _pick(
    part: Float[Tensor, "row pos columns"], which: Int[Tensor, " pos"], columns: slice, out: Float[Tensor, "row pos"]
) -> None:
    """Into `out`, the logits of the tokens `which` (one a position), of those that are among these columns."""
    here = ((which >= columns.start) & (which < columns.stop)).nonzero()[:, 0]
    out[:, here] = part[:, here, which[here] - columns.start].to(out)
