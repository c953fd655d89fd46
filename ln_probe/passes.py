"""The two passes over the prompts, and what is chosen between them: the constants that replace sigma.

The first pass takes what needs no constant: statistics of every norm, sums of sigma among them, and how far the queries
of every head reach. In the second, which needs the constants, the probes observe every prompt.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float, Float64, Int
from torch import Tensor, nn

from ln_probe.analyses.constants import CALIBRATION, OWN_MEANS, Constants, Halves, group_numbers, halves_of
from ln_probe.analyses.probes.base import Failure, Probe, ProbeObserver, ProbeResults, Run
from ln_probe.analyses.probes.causal import PRIMARY_SITES, Causal
from ln_probe.analyses.probes.edited_passes import PlainAttention, rows_at_once
from ln_probe.analyses.probes.uniformity import AttentionLayer, LayerMaps
from ln_probe.analyses.progress import TimeLeft, tell, tell_inner, tell_left
from ln_probe.analyses.text import counted
from ln_probe.hooks.constants import Constant, bundled_constants, fit, mean_sigmas, some
from ln_probe.hooks.edits import members
from ln_probe.hooks.model import Facts, HookedModel, attentions, device_of, facts_of, plain_path
from ln_probe.hooks.model import run as run_model
from ln_probe.hooks.norm import Norm
from ln_probe.hooks.norms import layers_in_words, structure_of
from ln_probe.hooks.stream import AttentionInput, streaming
from ln_probe.hooks.task import CALIBRATION as CALIBRATION_PART
from ln_probe.hooks.task import Objective, default_tokens, twins
from ln_probe.prompts import BUNDLED, Prompts, calibration_prompts, make_prompts, summary

if TYPE_CHECKING:
    from ln_probe.analyses.probes.decomposition import NormStatistics
    from ln_probe.exhibits import AttentionRecorder

_CENTRED_SHARE = 1e-9  # of the mean in a vector's squared length: centred weights leave 1e-14, others above 1e-6
_ONE_GROUP = "there is one group of prompts (give more prompts, or calibration=)"
CENTRED = (
    "the stream has mean 0 at every norm (centred weights), so removing projection changes nothing: load the model "
    "unprocessed, with HookedTransformer.from_pretrained_no_processing or ln_probe.load_model"
)
FINISH_S = 1.5  # of processor time behind the second pass: statistics and the page, in the bundled models
_STREAM = "stream"  # the kind of work that probes of norms and attention share


def batch_sizes(
    device: torch.device,
    cfg: Any,
    prompts: Sequence[Tensor],
    batch_size: int | None,
    probes: Sequence[Probe],
) -> dict[int, int]:
    """Return how many prompts of a length go through the model together, by length.

    Args:
        device, cfg: of the model.
        batch_size: the same for every length; None: on a CPU one, or several where no probe sees attention; on a GPU as
            memory allows.
        probes: those that observe the prompts.
    """
    together = device.type == "cuda" or not any(probe.needs.attention for probe in probes)
    lengths = set(map(len, prompts))
    return {n: batch_size or (rows_at_once(device, cfg, n) if together else 1) for n in lengths}


def batches(
    stage: str,
    prompts: Sequence[Tensor],
    sizes: Mapping[int, int],
    watchers: Callable[[int], object] = lambda _: None,
) -> Iterator[tuple[range, Int[Tensor, "batch pos"]]]:
    """Yield the numbers and tokens of prompts that go through the model together, and report progress.

    Neighbours share a batch if they have one length and equal `watchers`.
    """
    first = 0
    while first < len(prompts):
        length, watching = len(prompts[first]), watchers(first)
        last = min(len(prompts), first + sizes[length])
        alike = range(first + 1, last)
        end = next((n for n in alike if len(prompts[n]) != length or watchers(n) != watching), last)
        tell(stage, first, float(len(prompts)), "prompts")
        yield range(first, end), torch.stack(list(prompts[first:end]))
        first = end


def check_finite(values: Sequence[tuple[str, Tensor]]) -> None:
    """Raise ValueError if one of these tensors is not finite; names it, with the place."""
    # A sum with NaN or infinity in it is not finite: a tenth of the time of every entry, and one wait for a GPU.
    sums = torch.stack([value.sum().float().to(values[0][1].device) for _, value in values])
    for number in (~sums.isfinite()).nonzero().flatten().tolist():
        path, value = values[number]
        if len(places := (~torch.isfinite(value)).nonzero()):
            place = places[0].tolist()
            what = f"{plain_path(path)}: {float(value[tuple(place)])} at {place}"
            raise ValueError(f"{what}: is the checkpoint damaged, or try float32")


def first_pass(
    model: HookedModel,
    prompts: Sequence[Int[Tensor, " _"]],
    inputs: Sequence[Norm],
    sites: Sequence[Norm],
    statistics: Sequence[NormStatistics],
    layers: Sequence[int],
    sizes: Mapping[int, int],
    maps: LayerMaps | None,
) -> tuple[Float64[np.ndarray, "prompt 2 norm 2"], float]:
    """Run all prompts; statistics and maps take in what they show.

    Args:
        inputs: the model's norms, and identities where attention reads the stream.
        sites: the norms that are measured.
        statistics: of each of them; empty: sums of sigma alone are wanted.
        layers: whose attention is observed.
        sizes: how many prompts go through the model together, by length.
        maps: None: no probe needs attention.

    Returns:
        sums and counts of sigma, of each prompt and norm, at position 0 and elsewhere; and, over the norms that
        project, the largest share of the mean in the squared length of what they read (NaN without such norms).

    Raises:
        ActivationError: an input or output of a norm is not finite; names it.
    """
    places = {site.name: place for place, site in enumerate(sites)}
    sums = np.zeros((len(prompts), 2, len(sites), 2))
    numbers, length, mean_share = range(0), 1, math.nan

    def on_norm(row: int, norm: Norm, x: Tensor, y: Tensor) -> None:
        nonlocal mean_share
        if (place := places.get(norm.name)) is not None:
            heads = max(1, len(x) // length)
            of_prompt = statistics[place].add(x, y, heads=heads) if statistics else _sigma_sums(norm, x, heads)
            sums[numbers[row], :, place] = of_prompt
        if norm.projects and numbers[row] == 0:
            x = x.double()
            mean_share = np.fmax(mean_share, float(x.mean(-1).square().mean() / x.square().mean()))

    def on_attention(_: int, seen: AttentionInput) -> None:
        assert maps is not None
        tell_inner(f"layer {seen.layer + 1}")
        maps.observe(seen)

    attended = attentions(model.blocks)
    plain = PlainAttention.of(model, max(prompts, key=len)) if maps is None else None
    with nullcontext() if plain is None else plain.replaced():
        for numbers, tokens in batches("first pass", prompts, sizes):  # noqa: B007 - the callbacks read it
            length = tokens.shape[1]
            with streaming(attended, tokens, inputs, on_norm, None if maps is None else on_attention, layers):
                run_model(model, tokens)
    return sums, mean_share


def _sigma_sums(norm: Norm, x: Float[Tensor, "pos d"], heads: int) -> tuple[tuple[float, float], tuple[int, int]]:
    """Return the sums of sigma at position 0 and elsewhere, and how many each is a sum of."""
    sigma = norm.sigma(x.double())[:, 0]
    return (float(sigma[:heads].sum()), float(sigma[heads:].sum())), (heads, len(sigma) - heads)


# ------------------------------------------------------------------ second pass


@dataclass(frozen=True, eq=False)
class Start:
    """A measurement up to the constants.

    Attributes:
        run: all that probes get.
        inputs: the model's norms, and identities where attention reads the stream.
        sizes: how many prompts go through the model together, by length.
        maps: of attention layers; None: no probe needs attention.
        provenance: where prompts and constants come from, as plain JSON.
        notes: for the reader.
    """

    run: Run
    inputs: Sequence[Norm]
    sizes: Mapping[int, int]
    maps: LayerMaps | None
    provenance: Mapping[str, Any]
    notes: Sequence[str]


def second_pass(
    start: Start, probes: Sequence[Probe], recorder: AttentionRecorder | None = None, *, default: bool = False
) -> dict[str, ProbeResults | Failure]:
    """Run all prompts and return each probe's results by its name.

    Args:
        recorder: records attention; None: there is none to record.
        default: whether these are the model's default prompts, of which a probe takes `Probe.prompts` at most.
    """
    run, maps = start.run, start.maps
    constants, heads = run.constants, run.heads
    every = [ProbeObserver(p, run, p.prompts if default else None) for p in probes]
    radii = {} if maps is None else maps.radii()
    numbers, norms, attention = range(0), list[ProbeObserver](), list[ProbeObserver]()

    def on_norm(row: int, norm: Norm, x: Tensor, y: Tensor) -> None:
        for observer in norms:
            observer.call("norm", numbers[row], norm, x, y)

    def on_attention(row: int, seen: AttentionInput) -> None:
        assert maps is not None
        number, norm = numbers[row], seen.norm
        constant = Constant(1.0, 1.0) if norm.is_identity else constants.of(number)[norm.name]
        attended = AttentionLayer(seen, partial(maps.read, seen), constant, radii.get(seen.layer), heads)
        for observer in attention:
            tell_inner(f"{observer.probe.name}, layer {seen.layer + 1}")
            observer.call("attention", number, attended)
        if recorder is not None and recorder.takes(number) and not recorder.failure:
            try:
                recorder.attention(number, attended)
            except Exception as error:  # the probes' tables stand
                recorder.failure = f"attention is not shown: {type(error).__name__}: {error}"

    needs_attention = [w for w in every if w.probe.needs.attention and maps is not None]
    streamed = [w for w in every if w.probe.needs.norms or w in needs_attention]
    counts = {w.probe.name: sum(map(w.takes, range(len(run.prompts)))) for w in every}
    wall_time, processor_time = time.monotonic(), time.process_time()
    work = TimeLeft(counts | {_STREAM: max((counts[w.probe.name] for w in streamed), default=1)})
    for numbers, tokens in batches("second pass", run.prompts, start.sizes, lambda n: [w.takes(n) for w in every]):
        watching = [w for w in every if w.takes(numbers.start)]
        norms = [w for w in watching if w.probe.needs.norms]
        attention = [w for w in watching if w in needs_attention]
        recorded = recorder is not None and any(map(recorder.takes, numbers))
        started, before = time.thread_time(), {w.probe.name: w.seconds for w in watching}
        if norms or attention or recorded:
            callbacks = on_norm if norms else None, on_attention if attention or recorded else None
            with streaming(attentions(run.model.blocks), tokens, start.inputs, *callbacks, run.layers):
                run_model(run.model, tokens)
            observing = sum(w.seconds - before[w.probe.name] for w in watching)
            work.add(_STREAM, time.thread_time() - started - observing, len(numbers))
        for number in numbers:
            for observer in watching:
                if observer.probe.needs.output:
                    tell_inner(observer.probe.name)
                    observer.call("prompt", number, run.prompts[number])
                observer.call("end", number)
        for observer in watching:
            work.add(observer.probe.name, observer.seconds - before[observer.probe.name], len(numbers))
        if numbers.start:  # the first prompt also prepares
            share = (time.process_time() - processor_time) / (time.monotonic() - wall_time)
            tell_left((work.left + FINISH_S) / min(1.0, max(0.1, share)))
    return {w.probe.name: w.results() for w in every}


# ------------------------------------------------- prompts, norms and constants


def measure_norms(
    model: HookedModel,
    prompts: Any,
    *,
    probes: Sequence[Probe],
    max_tokens: int,
    seed: int,
    loss: Objective | None = None,
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    calibration: Any = None,
    groups: Sequence[Hashable] | None = None,
    token_names: Mapping[int, str] | None = None,
    prepend_bos: bool | None = None,
    max_prompts: int | None = None,
    batch_size: int | None = None,
    optimal: bool = False,
) -> Start:
    """Prepare the prompts, check model and loss on the first, run the first pass, and choose the constants.

    Args:
        model: in evaluation mode; the others as of `analyze`, checked.
    """
    tell("preparing prompts")
    facts = facts_of(model)
    device = device_of(model.parameters())
    how: dict[str, Any] = {"max_tokens": max_tokens, "prepend_bos": prepend_bos}
    ready = make_prompts(facts, prompts, token_names=token_names, max_prompts=max_prompts, **how)
    other = None if calibration is None else calibration_prompts(facts, calibration, **how)
    group_of = group_numbers(ready.tokens, groups)
    on_overlap = () if other is None else _overlap(ready, other)
    loss = Objective() if loss is None else loss
    check_finite([(path, parameter.detach()) for path, parameter in model.named_parameters()])
    first = ready.tokens[0][None].to(device)
    output = run_model(model, first, return_type="logits")
    if isinstance(output, Tensor):
        check_finite([("the logits of the first prompt", output[0])])
    loss.check(output, first)
    structure = structure_of(model)
    inputs, of_random_head = structure.attention_inputs, list[str]()
    body = getattr(getattr(model, "original_model", None), "base_model", None)
    if facts.missing_head and isinstance(body, nn.Module):  # (BERT's head has a norm)
        of_body = set(body.modules())
        of_random_head = [norm.name for norm in inputs if norm.module not in of_body]
        inputs = [norm for norm in inputs if norm.module in of_body]
    norms = [norm for norm in inputs if not norm.is_identity]
    measured = list(range(len(model.blocks))) if layers is None else sorted(set(layers))
    # The norm that attention reads can stand in the block before (post-norm): its constant is needed too.
    sites = norms
    if layers is not None:
        sites = [norm for norm in norms if {norm.layer, *norm.attention_layers} & set(measured)]
    statistics: list[NormStatistics] = []
    if any(probe.name == "decomposition" for probe in probes):  # (which imports numba: the freezing cost does not)
        from ln_probe.analyses.probes.decomposition import NormStatistics

        statistics = [NormStatistics(site) for site in sites]
    looking = [p.name for p in probes if p.needs.attention]
    maps = LayerMaps(norms) if looking and any(norm.attention_layers for norm in inputs) else None
    sizes = batch_sizes(device, model.cfg, ready.tokens, batch_size, probes)
    sums, mean_share = first_pass(model, ready.tokens, inputs, sites, statistics, measured, sizes, maps)
    means = Constants(tuple(site.name for site in sites), group_of, sums[:, 0], sums[:, 1])
    constants, on_constants, calibrated_on = means, tuple[str, ...](), dict[str, Any]()
    if text := _calibration(facts, means, sites, other):
        tokens, source, on_constants = text
        given = mean_sigmas(model, sites, tokens) if tokens else None
        constants = replace(means, source=source, given=given)
        calibrated_on = summary(source, tokens) if tokens else {}
    obstacle = ""
    if any(p.needs.output for p in probes):
        obstacle = loss.obstacle(facts, run_model(model, twins(facts), return_type="logits"))
    if any(p.name == Causal.name for p in probes):
        shipped = _shipped(facts, model.parameters(), ready) if prompts is None else None
        if shipped is None and optimal:
            shipped = {} if obstacle else _fitted(model, norms, constants, ready, loss)
        constants = replace(constants, optimal=shipped or {})
    run = Run(
        model,
        norms,
        constants,
        measured,
        None if heads is None else sorted(set(heads)),
        loss,
        ready.tokens,
        ready.strings,
        statistics,
        seed,
        ready.strata if groups is None else (),
        obstacle,
    )
    notes = [*ready.notes, *_notes(inputs, looking, of_random_head)]
    if maps is not None:
        notes += maps.notes()
    if structure.unhooked:
        notes.append(f"norms without hook points are neither measured nor edited: {some(structure.unhooked)}")
    if mean_share <= _CENTRED_SHARE:
        notes.append(CENTRED)
    notes += [*on_overlap, *on_constants, *constants.notes()]
    about = {
        "prompts": dict(ready.summary),
        "constants": {name: c.plain for name, c in constants.pooled.items()},
        "calibration": {
            "constants": constants.source,
            "given": constants.given is not None,
            "groups": constants.group_count,
            **calibrated_on,
        },
    }
    return Start(run, inputs, sizes, maps, about, notes)


def _overlap(prompts: Prompts, calibration: Prompts) -> tuple[str, ...]:
    """Return a note on prompts that the calibration text has too; ValueError if that text cannot be used."""
    if max(map(len, calibration.tokens)) < 2:
        raise ValueError("calibration: its prompts have one token each: give prompts of at least two")
    rows, others = ({tuple(row.tolist()) for row in given.tokens} for given in (prompts, calibration))
    if rows == others:
        raise ValueError("calibration: these are the prompts that are measured: leave it out, or give other text")
    note = f"{counted(len(rows & others), 'prompt')} in the calibration text too: their own sigma is in their constants"
    return (note,) * bool(rows & others)


def _calibration(
    facts: Facts, measured: Constants, norms: Sequence[Norm], calibration: Prompts | None
) -> tuple[Sequence[Tensor], str, tuple[str, ...]] | None:
    """Return the prompts that constants come from, what provenance calls them, and notes.

    They are the user's `calibration`; else, where all measured prompts form one group, the model's calibration
    windows, or the bundled passages, or none: then the constants are the prompts' own means.
    None: constants come from the other prompts.
    """
    if calibration is not None:
        return calibration.tokens, f"{CALIBRATION} ({calibration.source})", ()
    if measured.group_count > 1 or not measured.group_count or not norms:
        return None
    own = facts.bundled_prompts
    if own is None and facts.tokenizer is None:
        return (), OWN_MEANS, (f"{_ONE_GROUP}, so the constants are its own means",)
    source = f"{CALIBRATION} ({BUNDLED if own is None else own.source})"
    note = f"{_ONE_GROUP}, so the constants are {source}"
    return default_tokens(facts, CALIBRATION_PART), source, (note,)


def _shipped(facts: Facts, parameters: Iterable[Tensor], prompts: Prompts) -> dict[str, Halves] | None:
    """Return the loss-optimal constants that a bundled model brings for its default prompts."""
    shipped = bundled_constants(facts, parameters)
    if not shipped or shipped["prompts_sha256"] != summary("", prompts.tokens)["sha256"]:
        return None
    return dict(shipped["halves"])


def _fitted(
    model: HookedModel, norms: Sequence[Norm], constants: Constants, prompts: Prompts, loss: Objective
) -> dict[str, Halves]:
    """Return loss-optimal constants of the primary contrasts' groups of norms, fitted on each half of the prompts."""
    fitted: dict[str, Halves] = {}
    halves = halves_of(constants.groups.tolist())
    numbered = list(zip(prompts.tokens, halves, strict=True))
    first = [row for row, half in numbered if half == 0]
    second = [row for row, half in numbered if half == 1]
    for group in PRIMARY_SITES:
        frozen = [n for n in members(norms, group) if n.scales and n.name in constants.sites]
        if frozen and second:
            tell(f"fitting loss-optimal constants ({group})")
            of_half = partial(fit, model, frozen, start=constants.pooled, objective=loss)
            fitted[group] = of_half(first), of_half(second)
    return fitted


def _notes(inputs: Sequence[Norm], looking: Sequence[str], left_out: Sequence[str]) -> list[str]:
    """Return what a reader has to know about the norms of a model.

    Args:
        looking: the probes that need attention.
        left_out: names of norms that are not measured.
    """
    notes = []
    identities = [norm.layer for norm in inputs if norm.is_identity]
    if len(identities) == len(inputs):
        notes.append("the model has no normalization: keys and queries are measured of the stream itself")
    elif not any(norm.attention_layers for norm in inputs):
        unmeasured = f", so {' and '.join(looking)} could not be measured" if looking else ""
        notes.append(f"no norm of this model is read by attention{unmeasured}")
    if 0 < len(identities) < len(inputs):
        notes.append(f"attention reads the residual stream itself, with no norm, in {layers_in_words(identities)}")
    if left_out:
        notes.append(f"{', '.join(left_out)} was not measured: it belongs to the head, which was drawn at random")
    return notes
