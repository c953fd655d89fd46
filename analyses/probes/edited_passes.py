"""Losses of one prompt under many edits: what the passes share is computed once.

* Blocks before the first edited norm return what they returned in the intact pass.
* Edits that begin at the same block go through the model together, a row of the batch each.
* Logits are not stored: W_U is applied to a block of the vocabulary at a time, and the loss is summed while the block
  is in the processor's cache. Where a model's own logits are not W_Uᵀ y + b_U up to rounding (a soft
  cap, a 16-bit format), they are taken as the model gives them.
* Attention of GPT-2's form runs as one product without hook points (`PlainAttention`).

A row of a batch is what it would be alone, up to the rounding of matrix products.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int, Int64
from torch import Tensor, nn

from ln_probe.analyses.constants import halves_of
from ln_probe.analyses.probes.base import Observer, ProbeResults
from ln_probe.analyses.progress import tell_inner
from ln_probe.hooks.model import (
    ABSENT,
    Hook,
    HookedModel,
    attentions,
    child_of,
    device_of,
    evaluating,
    hooks_on,
    run,
    tensors_in,
    weight_of,
)
from ln_probe.hooks.norm import INTACT
from ln_probe.hooks.norm_edits import NormEdit, installed
from ln_probe.hooks.stream import ActivationError
from ln_probe.hooks.task import Objective

# Tokens that go through the model at once on a CPU: on one core, matrix products of GPT-2 small's shape reach 70
# billion operations a second at 110 tokens, 84 at 440, and no more at 1000. In bytes: 12 MB an MLP layer.
TOKENS_AT_ONCE = 1024
# On a GPU, edits that begin at different blocks go together up to so many tokens: fewer take as long.
GPU_TOKENS = 2048
# Single heads and norms are run one by one where that takes at most two minutes of two cores, in multiplications and
# additions: a core does 3e10 a second, with all that lies between; a GPU a hundred times as many as two cores.
EXACT_WORK, GPU_FACTOR = 8e12, 100.0
# Where all heads and norms are run, estimates beside them are of so many of the first prompts. Where not, so many with
# the largest estimates on odd prompts are run on the even ones.
ESTIMATED_PROMPTS, LEADING = 8, 8

_Part = TypeVar("_Part", bound=Hashable)


def is_affordable(model: HookedModel, parts: int, prompts: Iterable[Int[Tensor, " _"]]) -> bool:
    """Return whether so many heads or norms can be run one by one on these prompts (EXACT_WORK).

    A pass runs half of the blocks on average, and the unembedding.
    """
    weights = sum(p.numel() for block in model.blocks for p in block.parameters()) / 2
    weights += int(model.cfg.d_model) * int(model.cfg.d_vocab)
    work = 2.0 * weights * parts * sum(map(len, prompts))
    factor = GPU_FACTOR if device_of(model.parameters()).type == "cuda" else 1.0
    return bool(work <= EXACT_WORK * factor)


def choosing_prompts(groups: Int64[np.ndarray, " prompt"]) -> set[int]:
    """Return the odd prompts, on which the heads and norms to run on the others are chosen."""
    return {prompt for prompt, half in enumerate(halves_of(groups.tolist())) if half == 1}


def largest(estimates: Iterable[Mapping[_Part, Sequence[float]]], count: int = LEADING) -> list[_Part]:
    """Return the heads or norms with the largest estimates, the largest first.

    Args:
        estimates: of each prompt that chooses, the terms of each estimate. Its size is the sum of the terms' sizes over
            these prompts: terms that cancel are no sign of a small effect.
        count: how many are returned.
    """
    sums: dict[_Part, Any] = {}
    for by_part in estimates:
        for part, terms in by_part.items():
            sums[part] = sums.get(part, 0.0) + np.asarray(terms)
    return sorted(sums, key=lambda part: -float(np.abs(sums[part]).sum()))[:count]


def rows_at_once(device: torch.device, cfg: Any, length: int) -> int:
    """Return how many rows of a length go through a model together: on a GPU as memory allows."""
    if device.type != "cuda":
        return max(1, TOKENS_AT_ONCE // length)
    token = 8 * max(int(cfg.d_vocab), 40 * int(cfg.d_model)) + 16 * int(getattr(cfg, "n_heads", 0)) * length
    return max(1, torch.cuda.mem_get_info(device)[0] // 4 // (length * token))


class Silent(Observer):
    """Measures nothing, and says why."""

    def __init__(self, note: str) -> None:
        self.note = note

    def finish(self) -> ProbeResults:
        return ProbeResults(notes=[self.note])


# ----------------------------------------------------------- passes of a prompt


class EditedPasses:
    """Passes of one prompt through one model, the intact one first.

    Args:
        model: in evaluation mode.
        objective: the loss.
        tokens: of the prompt.
        after, before: hooks of the intact pass.
        differentiable: whether the intact pass has gradients.

    Attributes:
        loss: of the intact model, summed over the prompt.
        by_token: the intact loss of each predicted token (one number under a user's loss).
        edited_by_token: the same under each edit of the last call of `losses`.

    Raises:
        ActivationError: the intact logits are not finite.
    """

    def __init__(
        self,
        model: HookedModel,
        objective: Objective,
        tokens: Int[Tensor, " pos"],
        after: Sequence[Hook] = (),
        before: Sequence[Hook] = (),
        *,
        differentiable: bool = False,
    ) -> None:
        self.model, self.objective = model, objective
        self.tokens = tokens[None].to(device_of(model.parameters()))
        outputs: list[Any] = []
        attended: dict[int, Any] = {}
        record: list[Hook] = [(block, lambda *seen: outputs.append(seen[-1])) for block in model.blocks]
        record += [(attn, partial(_keep, attended, layer)) for layer, attn in attentions(model.blocks).items()]
        with torch.set_grad_enabled(differentiable), hooks_on([*after, *record], before), _final(model) as final:
            output = model(self.tokens, return_type="logits")
            by_token = objective.by_token(output, self.tokens)
            self.loss = by_token.sum(-1, dtype=torch.float64)[0]
        self.by_token, self.edited_by_token = by_token.detach()[0].double(), dict[int, Tensor]()
        is_whole = len(outputs) == len(model.blocks)  # not blocks that run twice, or not at all
        self._outputs = [mapped(Tensor.detach, output) for output in outputs] if is_whole else []
        self._attended = {layer: mapped(Tensor.detach, output) for layer, output in attended.items()}
        self._unembedding = None
        if objective.function is None:
            check_logits(output[0].detach())
            self._unembedding = Unembedding.of(model, final, output.detach())
        if self._unembedding is not None:  # as the edited losses: a bias of 1e-6 is significant beside no effect
            self.by_token = self._unembedding.losses(final[0], self.tokens[0, 1:])[0]

    def losses(self, edits: Sequence[Sequence[NormEdit]]) -> list[float]:
        """Return the summed loss under each of these edits of norms."""
        by_start: dict[tuple[int, bool], list[int]] = {}
        for number, norms in enumerate(edits):
            start = min(edit.norm.layer for edit in norms)
            is_behind_attention = all(edit.norm.reads == "mlp" for edit in norms if edit.norm.layer == start)
            by_start.setdefault((start, is_behind_attention), []).append(number)
        losses, self.edited_by_token = [math.nan] * len(edits), {}
        least = GPU_TOKENS // self.tokens.shape[1] if self.tokens.is_cuda else 1
        for (start, is_behind_attention), numbers in merged(by_start, least):
            for part in self._parts(numbers):
                rows: dict[str, dict[int, NormEdit]] = {}
                for row, number in enumerate(part):
                    for edit in edits[number]:
                        rows.setdefault(edit.norm.name, {})[row] = edit
                together = [_by_row(len(part), by_row) for by_row in rows.values()]
                with self._attention_passed_over(start, len(part)) if is_behind_attention else nullcontext():
                    values = self.losses_of_rows(len(part), start, installed(self.model, together))
                for number, of_tokens, loss in zip(part, values, values.sum(-1, dtype=torch.float64), strict=True):
                    losses[number], self.edited_by_token[number] = float(loss), of_tokens
        return losses

    def _parts(self, numbers: Sequence[int]) -> Iterator[Sequence[int]]:
        """Yield what goes through the model together: parts of equal size, so that none is a straggler."""
        parts = -(-len(numbers) // rows_at_once(self.tokens.device, self.model.cfg, self.tokens.shape[1]))
        for part in range(parts):
            tell_inner(f"edited passes: {len(numbers) * part // parts} of {len(numbers)}")
            yield numbers[len(numbers) * part // parts : len(numbers) * (part + 1) // parts]

    def losses_of_heads(
        self,
        layer: int,
        z: Float[Tensor, "pos head d_head"],
        edited: Mapping[int, Float[Tensor, "pos d_head"]],
        replaced: Callable[[Float[Tensor, "row pos head d_head"]], AbstractContextManager[None]],
    ) -> list[float]:
        """Return the summed loss with another output of one head, for each head that is edited.

        Args:
            layer: of the heads.
            z: their outputs in the intact model.
            edited: the other output of each head.
            replaced: runs the layer with these outputs of its heads.
        """
        losses: list[float] = []
        for heads in self._parts(list(edited)):
            rows = z.expand(len(heads), *z.shape).clone(memory_format=torch.contiguous_format)
            for row, head in enumerate(heads):
                rows[row, :, head] = edited[head]
            losses += self.losses_of_rows(len(heads), layer, replaced(rows)).sum(-1, dtype=torch.float64).tolist()
        return losses

    @contextmanager
    def _attention_passed_over(self, layer: int, rows: int) -> Iterator[None]:
        """Let the attention of a block return what it returned in the intact pass."""
        if not self._outputs or layer not in self._attended:
            yield
            return
        attn = attentions(self.model.blocks)[layer]
        output = mapped(partial(_repeated, rows), self._attended[layer])
        with replaced_forward(attn, lambda *_args, **_kwargs: output):
            yield

    def losses_of_rows(self, rows: int, start: int, edits: AbstractContextManager[None]) -> Float[Tensor, "row next"]:
        """Return the loss of each token in each of `rows` copies of the prompt under edits from a block on."""
        tokens = self.tokens.expand(rows, -1)
        skipped = self.model.blocks[: start if self._outputs else 0]
        with (
            passed_over(skipped, self._outputs, rows),
            edits,
            _final(self.model, skip=self._unembedding is not None) as final,
        ):
            output = run(self.model, tokens, return_type="logits")
        if self._unembedding is not None:
            return self._unembedding.losses(final[0], self.tokens[0, 1:])
        return self.objective.by_token(output, tokens)


def merged(by_start: Mapping[_Part, Sequence[int]], least: int) -> list[tuple[_Part, list[int]]]:
    """Return the numbers by where they start, those of the next start with the last one's until that has `least`."""
    parts: list[tuple[_Part, list[int]]] = []
    for start in sorted(by_start):  # type: ignore[type-var]
        if parts and len(parts[-1][1]) < least:
            parts[-1][1].extend(by_start[start])
        else:
            parts.append((start, list(by_start[start])))
    return parts


def check_logits(logits: Float[Tensor, "pos vocab"]) -> None:
    """Raise ActivationError if the intact model's logits are not finite."""
    if not bool(torch.isfinite(logits.sum())) and len(places := (~torch.isfinite(logits)).nonzero()):
        place = int(places[0, 0])
        raise ActivationError(f"the intact logits at position {place} are not finite: try dtype='float32'")


@contextmanager
def _final(model: HookedModel, *, skip: bool = False) -> Iterator[list[Tensor]]:
    """Record the unembedding's inputs; with `skip` it computes nothing and returns a column of its input."""
    inputs: list[Tensor] = []
    module = child_of(model, "unembed")

    def hook(_m: nn.Module, args: Any, _kwargs: Any) -> None:
        if args and isinstance(args[0], Tensor):
            inputs.append(args[0].detach())

    if module is None:
        yield inputs
        return
    column = replaced_forward(module, lambda x, *_, **__: x[..., :1]) if skip else nullcontext()
    with column, hooks_on((), [(module, hook)]):
        yield inputs


def _by_row(rows: int, edits: Mapping[int, NormEdit]) -> NormEdit:
    """Return the edits of one norm, each on its own row of a batch, as one."""
    first, nothing = next(iter(edits.values())), torch.full((2,), math.nan, dtype=torch.float64)
    variants = [edits[row].variants[0] if row in edits else INTACT.name for row in range(rows)]
    constants = [edits[row].constants if row in edits else None for row in range(rows)]
    if all(pair is None for pair in constants):
        return NormEdit(first.norm, variants, None, first.label)
    pairs = torch.stack([nothing if pair is None else pair[0] for pair in constants])
    return NormEdit(first.norm, variants, pairs, first.label)


@contextmanager
def passed_over(skipped: Sequence[nn.Module], outputs: Sequence[Any], rows: int) -> Iterator[None]:
    """Let blocks compute nothing and return what they returned before, the last one for every row of the batch."""

    def returning(output: Any) -> Callable[..., Any]:
        return lambda *_args, **_kwargs: output

    with ExitStack() as stack:
        last = len(skipped) - 1
        for k, (block, output) in enumerate(zip(skipped, outputs, strict=False)):
            value = mapped(partial(_repeated, rows), output) if k == last else output
            stack.enter_context(replaced_forward(block, returning(value)))
        yield


def _repeated(rows: int, output: Tensor) -> Tensor:
    is_row = output.ndim > 1 and output.shape[0] == 1
    return output.expand(rows, *output.shape[1:]).contiguous() if is_row else output


def _keep(values: dict[int, Any], layer: int, *seen: Any) -> None:
    values[layer] = seen[-1]


def mapped(change: Callable[[Tensor], Tensor], output: Any) -> Any:
    """Return a block's output with every tensor of it changed (a block of OpenAI's first GPT returns a list)."""
    if isinstance(output, Tensor):
        return change(output)
    if isinstance(output, tuple | list):
        return type(output)(mapped(change, part) for part in output)
    return output


@contextmanager
def replaced_forward(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Let a module compute something else."""
    before = module.__dict__.get("forward")
    module.__dict__["forward"] = forward  # not setattr: a bridge hands that on to what it wraps
    try:
        yield
    finally:
        del module.__dict__["forward"]
        if before is not None:
            module.__dict__["forward"] = before


# -------------------------------------------------------------- plain attention

# Logits computed here may differ from the model's by this many units in the last place of the largest, times √d_model.
_UNITS = 16.0
_QUERIES = 32  # that attend together


class PlainAttention:
    """Attention of GPT-2's form, softmax(q k / √d_head) v, without hook points: half the time of a bridge's.

    Args:
        model: any hooked model.
        is_tuple: whether its attention returns a tuple, as a bridge's does.
    """

    def __init__(self, model: HookedModel, is_tuple: bool) -> None:
        self._is_tuple = is_tuple
        self._layers: list[tuple[nn.Module, Tensor, Tensor, Tensor, Tensor, int]] = []
        for attn in attentions(model.blocks).values():
            weights = [getattr(attn, f"W_{letter}").detach() for letter in "QKV"]
            biases = [getattr(attn, f"b_{letter}").detach().reshape(-1) for letter in "QKV"]
            heads, d, _ = weights[0].shape
            read = torch.cat([w.transpose(0, 1).reshape(d, -1) for w in weights], dim=1)
            W_O, b_O = (getattr(attn, name).detach() for name in ("W_O", "b_O"))
            self._layers.append((attn, read, torch.cat(biases), W_O.reshape(-1, d), b_O, heads))

    @classmethod
    def of(cls, model: HookedModel, tokens: Int[Tensor, " pos"]) -> PlainAttention | None:
        """Return the plain attention of a model; None where its logits on a prompt are not the model's own.

        None also where hook points have hooks, which would not be called, and in 16-bit formats.
        """
        if any(getattr(m, "fwd_hooks", None) or getattr(m, "bwd_hooks", None) for m in model.modules()):
            return None
        outputs: list[Any] = []
        layers = attentions(model.blocks).values()
        record: list[Hook] = [(attn, lambda *seen: outputs.append(seen[-1])) for attn in layers]
        with evaluating(model):
            with hooks_on(record):
                logits = run(model, tokens[None], return_type="logits")
            if not isinstance(logits, Tensor) or logits.dtype not in (torch.float32, torch.float64) or not outputs:
                return None
            try:
                plain = cls(model, isinstance(outputs[0], tuple))
                with plain.replaced():
                    instead = run(model, tokens[None], return_type="logits")
            except (*ABSENT, IndexError):
                return None
        units = _UNITS * math.sqrt(int(model.cfg.d_model)) * torch.finfo(logits.dtype).eps
        is_same = instead.shape == logits.shape and (instead - logits).abs().max() <= units * logits.abs().max()
        return plain if bool(is_same) else None

    @contextmanager
    def replaced(self) -> Iterator[None]:
        """Run the model with plain attention."""
        with ExitStack() as stack:
            for layer, (attn, *_) in enumerate(self._layers):
                stack.enter_context(replaced_forward(attn, self._forward(layer)))
            yield

    @contextmanager
    def with_heads(self, layer: int, z: Float[Tensor, "row pos head d_head"]) -> Iterator[None]:
        """Run the model with these outputs of a layer's heads."""
        with replaced_forward(self._layers[layer][0], lambda *_, **__: self._written(layer, z)):
            yield

    def _forward(self, layer: int) -> Callable[..., Any]:
        _, read, bias, _, _, heads = self._layers[layer]

        def forward(*args: Any, **kwargs: Any) -> Any:
            x = tensors_in(args, kwargs)[0]
            qkv = torch.addmm(bias, x.reshape(-1, x.shape[-1]), read).view(*x.shape[:2], 3, heads, -1)
            return self._written(layer, _attention(*qkv.permute(2, 0, 3, 1, 4)).transpose(1, 2))

        return forward

    def _written(self, layer: int, z: Float[Tensor, "row pos head d_head"]) -> Any:
        _, _, _, write, bias, _ = self._layers[layer]
        out = torch.addmm(bias, z.reshape(-1, len(write)), write).view(*z.shape[:2], -1)
        return (out, None) if self._is_tuple else out


def _attention(
    q: Float[Tensor, "row head pos d_head"], k: Float[Tensor, "row head pos d_head"], v: Tensor
) -> Float[Tensor, "row head pos d_head"]:
    """Return causal attention, a block of queries at a time: no keys that none of them sees."""
    outputs = []
    for first in range(0, q.shape[2], _QUERIES):
        last = min(first + _QUERIES, q.shape[2])
        seen = torch.ones(last - first, last, dtype=torch.bool, device=q.device).tril(first)
        keys, values = k[:, :, :last], v[:, :, :last]
        outputs.append(F.scaled_dot_product_attention(q[:, :, first:last], keys, values, attn_mask=seen))
    return torch.cat(outputs, dim=2)


# ------------------------------------------------------------------ unembedding

# Logits that are processed together: 6 MB, which stay in the cache; on a GPU, 800 MB.
_LOGITS, _GPU_LOGITS = 1_500_000, 200_000_000
_NARROWEST = 1024  # columns of the unembedding at a time: with fewer its product is slower


class Unembedding:
    """W_U and b_U, applied a block of the vocabulary at a time."""

    def __init__(self, weight: Float[Tensor, "d_model vocab"], bias: Float[Tensor, " vocab"] | None) -> None:
        self.weight, self.bias = weight, bias

    @classmethod
    def of(cls, model: HookedModel, read: Sequence[Tensor], logits: Float[Tensor, "1 pos vocab"]) -> Unembedding | None:
        """Return the model's unembedding, if its logits are W_Uᵀ y + b_U of what it read."""
        weight, bias = weight_of(model, "W_U"), weight_of(model, "b_U")
        if len(read) != 1 or weight is None or weight.dtype not in (torch.float32, torch.float64):
            return None
        y, size = read[0], logits.shape[-1]
        if y.ndim != 3 or y.shape[:2] != logits.shape[:2] or weight.shape != (y.shape[-1], size):
            return None
        bias = bias if bias is not None and bool(bias.any()) else None
        if not y.dtype == logits.dtype == weight.dtype or (bias is not None and bias.shape != (size,)):
            return None
        unembedding = cls(weight, bias)
        units = _UNITS * math.sqrt(len(weight)) * torch.finfo(weight.dtype).eps * float(logits.abs().max())
        is_same = all(float((part - logits[..., c]).abs().max()) <= units for c, part in unembedding.logits(y))
        return unembedding if is_same else None

    def logits(self, y: Float[Tensor, "row pos d_model"]) -> Iterator[tuple[slice, Float[Tensor, "row pos columns"]]]:
        """Yield the logits of what the unembedding reads, a slice of the vocabulary at a time."""
        size, flat = self.weight.shape[1], y.reshape(-1, y.shape[-1])
        step = min(size, max(_NARROWEST, (_GPU_LOGITS if y.is_cuda else _LOGITS) // len(flat)))
        for first in range(0, size, step):
            columns = slice(first, min(first + step, size))
            part = torch.mm(flat, self.weight[:, columns])
            if self.bias is not None:
                part += self.bias[columns]
            yield columns, part.view(*y.shape[:2], -1)

    def losses(self, y: Float[Tensor, "row pos d_model"], following: Int[Tensor, " next"]) -> Float[Tensor, "row next"]:
        """Return the next-token losses of each row of what the unembedding reads."""
        y = y[:, :-1]
        shape = y.shape[:2]
        largest_logit = torch.full(shape, -math.inf, dtype=y.dtype, device=y.device)
        total, own = (torch.zeros(shape, dtype=torch.float64, device=y.device) for _ in range(2))
        for columns, part in self.logits(y) if len(following) else ():
            inside = ((following >= columns.start) & (following < columns.stop)).nonzero()[:, 0]
            own[:, inside] = part[:, inside, following[inside] - columns.start].double()
            larger = torch.maximum(largest_logit, part.amax(-1))
            total *= (largest_logit.double() - larger.double()).nan_to_num(nan=0.0).exp()
            total += (part - larger[..., None]).exp_().sum(-1)
            largest_logit = larger
        return largest_logit.double() + total.log() - own
