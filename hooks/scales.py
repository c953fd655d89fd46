"""Replace sigma by constants: for each norm, its mean sigma at position 0 and at the other positions.

Position 0 has its own constant because attention sinks are there: in SmolLM2-135M their sigma is hundreds of times the
others', and a single constant would make their vectors hundreds of times too long (Heimersheim 2024 treats the first
position separately for the same reason). Values of `scale=` in `without`:

    frozen      the two constants
    uniform     the constant of the other positions everywhere
    optimal     two constants that minimize the loss (`ln_probe.hooks.optimal_constants`)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Timer
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Bool, Float, Float64, Int
from rich.console import Console
from torch import Tensor

from ln_probe.hooks.capture import stream
from ln_probe.hooks.model import HookedModel, context_length, evaluating, vocabulary_size
from ln_probe.hooks.norm import Site

SCALES = FROZEN, UNIFORM, OPTIMAL = "frozen", "uniform", "optimal"
_SOON = 0.5  # seconds


@dataclass(frozen=True)
class Constant:
    """What a norm divides by instead of its sigma.

    Attributes:
        first: at position 0; rest: elsewhere.
    """

    first: float
    rest: float

    @classmethod
    def of(cls, given: object) -> Constant:
        """From a number (everywhere the same), a pair, or {"first": …, "rest": …} as in a report's provenance.

        Raises:
            ValueError: something else.
        """
        if isinstance(given, Constant):
            return given
        if isinstance(given, Mapping) and set(given) == {"first", "rest"}:
            given = (given["first"], given["rest"])
        values = tuple(map(_number, given if isinstance(given, tuple | list) else (given, given)))
        if len(values) != 2 or None in values:
            raise ValueError(f'a constant is a number or {{"first": number, "rest": number}}, got {given!r}')
        return cls(float(values[0]), float(values[1]))

    @property
    def plain(self) -> dict[str, float]:
        """As JSON has it."""
        return {"first": self.first, "rest": self.rest}

    @property
    def uniform(self) -> Constant:
        """The one constant for all positions."""
        return Constant(self.rest, self.rest)

    def at(self, first: Bool[Tensor, "*batch 1"], like: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch 1"]:
        """The divisor of every vector, given which belong to position 0; in the precision of `like`."""
        rest = torch.full_like(like[..., :1], self.rest)
        return rest if self.first == self.rest else rest.masked_fill(first, self.first)

    def rows(self, length: int) -> Float64[Tensor, "pos 1"]:
        """The divisor of every position of one prompt."""
        rows = torch.full((length, 1), self.rest, dtype=torch.float64)
        rows[:1] = self.first
        return rows


@runtime_checkable
class Divisor(Protocol):
    """What a norm divides by instead of its sigma."""

    def at(self, first: Bool[Tensor, "*batch 1"], like: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch 1"]: ...


def mean_sigmas(model: HookedModel, sites: Sequence[Site], prompts: Iterable[Int[Tensor, " _"]]) -> dict[str, Constant]:
    """Return the mean sigma of each norm over the tokens of some prompts, at position 0 and elsewhere.

    Costs one forward pass a prompt. Without other positions, the mean at position 0 stands for them.

    Raises:
        ActivationError: a norm's input or output is not finite.
    """
    first: dict[str, list[np.ndarray]] = {s.name: [] for s in sites}
    rest: dict[str, list[np.ndarray]] = {s.name: [] for s in sites}
    length = 0

    def on_norm(site: Site, x: Tensor, _y: Tensor) -> None:
        sigma = site.sigma(x.double())[:, 0].cpu().numpy()
        heads = max(1, len(x) // length)
        first[site.name].append(sigma[:heads])
        rest[site.name].append(sigma[heads:])

    with evaluating(model):
        for row in prompts:
            length = len(row)
            stream(model, row, sites, on_norm=on_norm)
    means: dict[str, Constant] = {}
    for name in (name for name in first if first[name]):
        of_first, of_rest = np.concatenate(first[name]), np.concatenate(rest[name])
        means[name] = Constant(float(of_first.mean()), float((of_rest if len(of_rest) else of_first).mean()))
    return means


@contextmanager
def announced(text: str) -> Iterator[None]:
    """Print a line on a terminal or in a notebook if what happens meanwhile takes longer than half a second."""
    console = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
    timer = Timer(_SOON, console.print, [f"ln_probe: {text}"])
    if console.is_terminal or console.is_jupyter:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


_WHOLE = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def check_tokens(model: HookedModel, tokens: object) -> list[Int[Tensor, " _"]]:
    """Check calibration tokens: a tensor [batch pos], or a list of rows of different lengths.

    Raises:
        ValueError: not whole numbers, empty, outside the vocabulary, or longer than the context.
        TypeError: neither a tensor nor a list of rows.
    """
    rows = token_rows(tokens)
    if max(map(len, rows)) < 2:
        raise ValueError(
            f"tokens {[len(rows), max(map(len, rows))]} hold no position besides 0: frozen scales are means over the "
            "others, so give at least two positions"
        )
    for row in rows:
        check_ids(model, row)
    return rows


def check_ids(model: HookedModel, row: Int[Tensor, " pos"]) -> None:
    """Raise ValueError if a prompt is longer than the model's context or holds an id outside its vocabulary."""
    size, limit = vocabulary_size(model), context_length(model)
    if len(row) > limit:
        raise ValueError(f"{len(row)} tokens are more than the context of {limit}: cut the prompt")
    if len(wrong := row[(row < 0) | (row >= size)]):
        raise ValueError(f"token id {int(wrong[0])} is outside the vocabulary of {size} (0 … {size - 1})")


def token_rows(tokens: object) -> list[Int[Tensor, " _"]]:
    """Return token ids as one tensor per prompt, from a tensor [batch pos] or a list of rows of different lengths.

    Raises:
        ValueError: something else than whole numbers, other axes, or an empty row.
        TypeError: neither a tensor nor a list of rows.
    """
    if not isinstance(tokens, Tensor | list | tuple):
        raise TypeError(
            f"tokens must be a tensor of token ids [batch pos] or a list of rows, got {type(tokens).__name__}"
        )
    found: list[Tensor] = []
    if isinstance(tokens, Tensor):
        found = list(tokens) if tokens.ndim == 2 else []
        shape = f"{str(tokens.dtype).removeprefix('torch.')} {list(tokens.shape)}"
    else:
        shape = f"a list of {len(tokens)}"
        try:
            found = [row if isinstance(row, Tensor) else torch.tensor(row) for row in tokens]
        except (TypeError, ValueError, RuntimeError):
            ids = [i for row in tokens if isinstance(row, list | tuple) for i in row if isinstance(i, int)]
            if huge := [i for i in ids if abs(i) >= 2**63]:
                raise ValueError(f"token id {huge[0]} is outside any vocabulary") from None
        if found and all(row.ndim == 0 for row in found):
            shape = f"one row of {len(found)}: write [[…]]"
    if not found or not all(r.ndim == 1 and len(r) > 0 and r.dtype in _WHOLE for r in found):
        raise ValueError(
            f"tokens must be whole numbers [batch pos], got {shape} (prompts of several lengths: a list of rows, none "
            "of them empty)"
        )
    return [row.long() for row in found]


def token_batch(model: HookedModel, tokens: object) -> Int[Tensor, "batch pos"]:
    """Token ids that run together: [pos], [batch pos], or a list of rows of one length.

    Raises:
        TypeError, ValueError: as `token_rows` and `check_ids`; rows of different lengths.
    """
    rows = token_rows(tokens[None] if isinstance(tokens, Tensor) and tokens.ndim == 1 else tokens)
    if len(lengths := {len(row) for row in rows}) > 1:
        raise ValueError(f"tokens must be rows of one length, got lengths {sorted(lengths)}")
    for row in rows:
        check_ids(model, row)
    return torch.stack(rows)


def divisors_of(
    scale: object, names: Sequence[str], sigmas: Callable[[], Mapping[str, Constant]]
) -> dict[str, Constant]:
    """Return what each of these norms divides by; `sigmas` are measured if `scale` needs them.

    Args:
        scale: one of SCALES but OPTIMAL, a number, or constants by name (as `Constant.of` takes them).
        names: of the norms.
        sigmas: measures the mean sigmas of these norms.

    Raises:
        ValueError: something else; a name is missing, or a divisor is no positive finite number.
    """
    found: dict[str, Constant] = {}
    if isinstance(scale, str) and scale in SCALES:
        measured = sigmas() if names else {}
        found = {n: measured[n] if scale == FROZEN else measured[n].uniform for n in names}
    elif isinstance(scale, Mapping):
        if missing := [n for n in names if n not in scale]:
            raise ValueError(f"scale has no entry for {some(missing)}")
        for n in names:
            try:
                found[n] = Constant.of(scale[n])
            except ValueError as error:
                raise ValueError(f"{n}: {error}") from None
    elif (number := _number(scale)) is None:
        named = ", ".join(map(repr, SCALES))
        raise ValueError(f"scale must be one of {named}, a positive number or a mapping, got {scale!r}")
    elif not (number > 0 and np.isfinite(number)):
        raise ValueError(f"scale must be a positive finite number, got {number!r}")
    else:
        found = dict.fromkeys(names, Constant.of(number))
    for name, value in found.items():
        if wrong := [v for v in (value.first, value.rest) if not (v > 0 and np.isfinite(v))]:
            raise ValueError(f"{name}: its divisor must be a positive finite number, got {wrong[0]!r}")
    return found


def _number(given: Any) -> Any:
    """A number, also that in a tensor or an array without axes; None: it is none."""
    plain = given.item() if getattr(given, "ndim", None) == 0 else given
    return plain if isinstance(plain, int | float) and not isinstance(plain, bool) else None


def some(names: Sequence[str]) -> str:
    """Names for a message; of many the first six."""
    return ", ".join(names[:6]) + (f", … ({len(names)} in all)" if len(names) > 6 else "")
