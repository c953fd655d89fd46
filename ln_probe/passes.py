"""The two passes over the prompts.

The first takes what needs no constant: statistics of every norm, the constants that replace sigma among them, and how
far the queries of every head reach. In the second, which needs these, the probes observe every prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from jaxtyping import Float64, Int
from torch import Tensor

from ln_probe.analyses.probes.base import Failure, Probe, ProbeObserver, ProbeResults, Run
from ln_probe.analyses.probes.decomposition import NormStatistics
from ln_probe.analyses.probes.uniformity import AttentionLayer, LayerMaps
from ln_probe.analyses.progress import TimeLeft, tell, tell_inner, tell_left
from ln_probe.exhibits import AttentionRecorder
from ln_probe.hooks.constants import Constant
from ln_probe.hooks.model import HookedModel, device_of, evaluating, plain_path, run
from ln_probe.hooks.norm import Norm
from ln_probe.hooks.stream import AttentionInput, stream_together

_STREAM = "stream"  # the kind of work that probes of norms and attention share

# ------------------------------------------------------------------------------------------------------------ batches


def batch_limit(model: HookedModel, batch_size: int | None) -> Callable[[int], int]:
    """Return how many prompts of a length go through the model together.

    Args:
        batch_size: the same for every length; None: one on a CPU, where a prompt keeps all cores busy, and on a GPU as
            memory allows.
    """
    memory = gpu_memory(device_of(model))
    cfg: Any = model.cfg
    token = 8 * max(int(getattr(cfg, "d_vocab", 0)), 40 * int(cfg.d_model))  # bytes that live at a time
    pair = 16 * int(getattr(cfg, "n_heads", 0))
    return lambda length: batch_size or max(1, memory // (length * (token + pair * length)))


def gpu_memory(device: torch.device) -> int:
    """Return the bytes that a batch may take on a GPU; 0 on a CPU."""
    return torch.cuda.mem_get_info(device)[0] // 4 if device.type == "cuda" else 0


def batches(
    stage: str,
    prompts: Sequence[Tensor],
    limit: Callable[[int], int],
    watchers: Callable[[int], object] = lambda _: None,
) -> Iterator[tuple[range, Int[Tensor, "batch pos"]]]:
    """Yield the numbers and the tokens of the prompts that go through the model together, and report progress.

    Neighbours share a batch if they are of one length and `watchers` are equal for both.
    """
    first = 0
    while first < len(prompts):
        length, watching = len(prompts[first]), watchers(first)
        last = min(len(prompts), first + limit(length))
        alike = range(first + 1, last)
        end = next((n for n in alike if len(prompts[n]) != length or watchers(n) != watching), last)
        tell(stage, first, float(len(prompts)), "prompts")
        yield range(first, end), torch.stack(list(prompts[first:end]))
        first = end


# --------------------------------------------------------------------------------------------------------- first pass


def check_finite(model: HookedModel, tokens: Int[Tensor, " pos"]) -> None:
    """Raise ValueError if a weight, or a logit of a prompt, is not finite; names the first one with its place."""
    for name, parameter in model.named_parameters():
        _check_finite(plain_path(name), parameter.detach())
    with evaluating(model):
        logits = run(model, tokens[None], return_type="logits")
    if isinstance(logits, Tensor):
        _check_finite("the logits of the first prompt", logits[0])


def _check_finite(what: str, value: Tensor) -> None:
    # A sum with NaN or infinity in it is not finite; looking at every entry takes ten times as long.
    if not torch.isfinite(value.sum()) and len(places := (~torch.isfinite(value)).nonzero()):
        place = places[0].tolist()
        raise ValueError(f"{what}: {float(value[tuple(place)])} at {place}: is the checkpoint damaged, or try float32")


def first_pass(
    model: HookedModel,
    prompts: Sequence[Int[Tensor, " _"]],
    inputs: Sequence[Norm],
    statistics: Sequence[NormStatistics],
    layers: Sequence[int],
    limit: Callable[[int], int],
    maps: LayerMaps | None,
) -> Float64[np.ndarray, "prompt 2 norm 2"]:
    """Run all prompts; statistics and maps take in what they show.

    Args:
        inputs: the model's norms, and identities where attention reads the stream.
        statistics: of the norms that are measured.
        layers: whose attention is observed.
        maps: None: no probe needs attention.

    Returns:
        sums and counts of sigma, of each prompt and norm, at position 0 and elsewhere.

    Raises:
        ActivationError: an input or output of a norm is not finite; names it.
    """
    places = {s.site.name: place for place, s in enumerate(statistics)}
    sums = np.zeros((len(prompts), 2, len(statistics), 2))
    numbers, length = range(0), 1

    def on_norm(row: int, norm: Norm, x: Tensor, y: Tensor) -> None:
        if (place := places.get(norm.name)) is not None:
            sums[numbers[row], :, place] = statistics[place].add(x, y, heads=max(1, len(x) // length))

    def on_attention(_: int, seen: AttentionInput) -> None:
        assert maps is not None
        tell_inner(f"layer {seen.layer + 1}")
        maps.observe(seen)

    watch: Any = {"layers": layers, "on_norm": on_norm, "on_attention": None if maps is None else on_attention}
    for numbers, tokens in batches("first pass", prompts, limit):  # noqa: B007 - the callbacks read it
        length = tokens.shape[1]
        stream_together(model, tokens, inputs, **watch)
    return sums


# -------------------------------------------------------------------------------------------------------- second pass


def second_pass(
    run: Run,
    probes: Sequence[Probe],
    inputs: Sequence[Norm],
    limit: Callable[[int], int],
    maps: LayerMaps | None,
    recorder: AttentionRecorder | None,
    *,
    default: bool = False,
) -> dict[str, ProbeResults | Failure]:
    """Run all prompts and return each probe's results by its name.

    Args:
        inputs: the model's norms, and identities where attention reads the stream.
        maps: of the first pass; None: no probe needs attention.
        recorder: records attention; None: there is none to record.
        default: whether these are the model's default prompts, of which a probe takes no more than `Probe.prompts`.
    """
    every = [ProbeObserver(p, run, p.prompts if default else None) for p in probes]
    radii = {} if maps is None else maps.radii()
    numbers, norms, attention = range(0), list[ProbeObserver](), list[ProbeObserver]()

    def on_norm(row: int, norm: Norm, x: Tensor, y: Tensor) -> None:
        for observer in norms:
            observer.call("norm", numbers[row], norm, x, y)

    def on_attention(row: int, seen: AttentionInput) -> None:
        assert maps is not None
        number, norm = numbers[row], seen.norm
        constant = Constant(1.0, 1.0) if norm.is_identity else run.constants.of(number)[norm.name]
        attended = AttentionLayer(seen, partial(maps.read, seen), constant, radii.get(seen.layer), number, run.heads)
        for observer in attention:
            tell_inner(f"{observer.probe.name}, layer {seen.layer + 1}")
            observer.call("attention", number, attended)
        if recorder is not None:
            recorder.attention(number, attended)

    streamed = [w for w in every if w.probe.needs.norms or (w.probe.needs.attention and maps is not None)]
    sizes = {w.probe.name: [w.probe.work(n) for n in range(len(run.prompts)) if w.takes(n)] for w in every}
    work = TimeLeft(sizes | {_STREAM: [1.0] * max((len(sizes[w.probe.name]) for w in streamed), default=1)})
    for numbers, tokens in batches("second pass", run.prompts, limit, lambda n: [w.takes(n) for w in every]):
        watching = [w for w in every if w.takes(numbers.start)]
        norms = [w for w in watching if w.probe.needs.norms]
        attention = [w for w in watching if w.probe.needs.attention and maps is not None]
        recorded = recorder is not None and any(map(recorder.takes, numbers))
        if norms or attention or recorded:
            with work.step(_STREAM, len(numbers)):
                stream_together(
                    run.model,
                    tokens,
                    inputs,
                    layers=run.layers,
                    on_norm=on_norm if norms else None,
                    on_attention=on_attention if attention or recorded else None,
                )
        for number in numbers:
            for observer in watching:
                with work.step(observer.probe.name):
                    if observer.probe.needs.output:
                        tell_inner(observer.probe.name)
                        observer.call("prompt", number, run.prompts[number])
                    observer.call("end", number)
        tell_left(work.left)
    return {w.probe.name: w.results() for w in every}
