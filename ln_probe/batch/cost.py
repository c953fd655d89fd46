"""What a run will cost, as far as that is known before a model is loaded."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ln_probe.analyses.files import read_json
from ln_probe.analyses.probes.base import Shape
from ln_probe.analyses.probes.registry import chosen
from ln_probe.analyses.probes.shared_passes import TOKENS_AT_ONCE
from ln_probe.batch.run import Run
from ln_probe.batch.shards import DEFAULT, WINDOWS, ShardedCorpus
from ln_probe.batch.suite import Target, hub_info
from ln_probe.prompt_sources import SAMPLED

# What follows was measured on one core of two (`bench/plan.py`, and each unit of its reports alone).
# A worker without a model: Python, torch, TransformerLens, numba, what a report has drawn.
_WORKER_BYTES = 700 * 2**20
# Copies of the weights while a model is loaded, by the bytes of a number: the original's, ours, and what is underway
# between them; 2.0 to 2.2 in float32, 3.1 in bfloat16.
_COPIES = {8: 2.2, 4: 2.2, 2: 3.2}
# Besides the weights, while prompts are measured: activations, and two blocks of logits of edits that go together.
_MEASURING_BYTES = 400 * 2**20
# Bytes of a number in each format that models are loaded in, and the one they are loaded in by default.
_ITEM_BYTES = {"float32": 4, "float64": 8, "bfloat16": 2, "float16": 2}
_DTYPE = "float32"
# Multiplications a second of one core on a forward pass, by format, and seconds of a block in a pass, in addition.
_MULTIPLICATIONS = {"float32": 4e10, "float64": 1.2e10, "bfloat16": 4e10, "float16": 2.5e10}
_BLOCK_SECONDS = 2e-3
# Seconds of one core until a worker has imported what it needs, and numbers of weights that are loaded and compared
# with the original's logits in one.
_START_SECONDS, _LOADED = 7.0, 3.3e7
# The first pass, the constants, what pictures show: passes, and seconds of a layer of d_model 768, which grow with its
# power 1.5. The report and its page: seconds, and of each layer.
_CALIBRATING, _LAYER_SECONDS, _REPORT_SECONDS, _REPORT_LAYER = 4.0, 1.0, 5.0, 0.6
_WINDOW_TOKENS = 128  # of a bundled model's own prompts
_CHARACTERS_PER_TOKEN = 4.0  # of English text with a vocabulary of 50 000


@dataclass(frozen=True)
class Cost:
    """Of one checkpoint. Numbers that are not known without loading it are NaN.

    Attributes:
        units: of work; shards of them with keys to measure.
        tokens: of all prompts.
        seconds: of one core.
        serial_seconds: of them, those that no second worker can take: starting, calibration, the report.
        memory_bytes: of the worker that holds it.
        disk_bytes: of results until the report is made.
        download_bytes: of files that are not in the model hub's cache.
    """

    units: int
    tokens: float
    seconds: float
    serial_seconds: float
    memory_bytes: float
    disk_bytes: float
    download_bytes: float = 0.0


def cost(run: Run, target: Target, prompts: Sequence[float]) -> Cost:
    """A rough estimate: what each probe says of itself, and forward passes; `prompts` are lengths in tokens."""
    from ln_probe.models import bundled_models

    units = len(list(run.units())) + 1
    shape = shape_of(target)
    limit = min(run.settings.max_tokens, shape.get("context", math.inf))
    default = run.corpus.given == DEFAULT
    if default and target.name in bundled_models():  # which bring windows of their own text
        prompts = [_WINDOW_TOKENS] * min(WINDOWS, run.corpus.count)
    lengths = [min(length, limit) for length in prompts]
    tokens = float(sum(lengths))
    about = _measured_shape(run, target, lengths)
    parameters = _parameters(target)
    pass_of_token = parameters / _MULTIPLICATIONS[run.dtype or _DTYPE]
    pass_of_prompt = _BLOCK_SECONDS * about.layers
    found, seconds = [], 0.0
    for probe in chosen(run.settings.probes):
        taken = tuple(lengths[: probe.prompts] if default else lengths)
        found.append(probe.cost(replace(about, lengths=taken)))
        seconds += found[-1].seconds + found[-1].passes * (sum(taken) * pass_of_token + len(taken) * pass_of_prompt)
    watched = any(p.watches for p in run.probes)
    seconds += watched * (tokens * pass_of_token + len(lengths) * pass_of_prompt)
    width = 1.0 if math.isnan(about.width) else about.width / 768
    serial = _START_SECONDS + parameters / _LOADED + _CALIBRATING * tokens * pass_of_token
    serial += about.layers * (_LAYER_SECONDS * width**1.5 + _REPORT_LAYER) + _REPORT_SECONDS
    return Cost(
        units,
        tokens,
        seconds + serial,
        serial,
        _memory(run, target),
        sum(c.disk_bytes for c in found),
        hub_info(target).download_bytes,
    )


def _measured_shape(run: Run, target: Target, lengths: Sequence[float]) -> Shape:
    """What is measured of a checkpoint, with prompts of these lengths."""
    shape = shape_of(target)
    layers = len(run.settings.layers) if run.settings.layers is not None else shape.get("layers", math.nan)
    of_words = shape.get("vocabulary", math.nan), shape.get("width", math.nan)
    return Shape(layers, shape.get("heads", math.nan), tuple(lengths), *of_words, sampled=_has_no_tokenizer(target))


def _has_no_tokenizer(target: Target) -> bool:
    folder = Path(os.path.expanduser(target.name))
    known = ("tokenizer", "vocab", "merges", "spiece", "lab.json")
    return (folder / "config.json").is_file() and not any(p.name.startswith(known) for p in folder.iterdir())


def _memory(run: Run, target: Target) -> float:
    """Bytes of a worker at its peak: while the model is loaded, while prompts are measured, or weights."""
    item = _ITEM_BYTES[run.dtype or _DTYPE]
    shape = shape_of(target)
    words = shape.get("vocabulary", 0.0)
    # TransformerLens has a separate unembedding where the file has one matrix for both ends.
    weights = (_parameters(target) + words * shape.get("width", 0.0)) * item
    about = _measured_shape(run, target, ())
    most = max((p.cost(about).memory_bytes for p in chosen(run.settings.probes)), default=0.0)
    measuring = _MEASURING_BYTES + 8.0 * TOKENS_AT_ONCE * words
    return _WORKER_BYTES + weights + max((_COPIES[item] - 1) * weights, measuring, most)


def prompt_lengths(corpus: ShardedCorpus, file: Path) -> list[float]:
    """Tokens of each prompt before they are cut: counted, or guessed from the length of the text."""
    from ln_probe.hooks.default_tokens import SAMPLED_TOKENS

    if corpus.given == SAMPLED:
        return [float(SAMPLED_TOKENS)] * corpus.count
    with file.open(encoding="utf-8") as lines:
        return [
            len(entry["tokens"]) if "tokens" in entry else len(entry["text"]) / _CHARACTERS_PER_TOKEN
            for entry in map(json.loads, lines)
        ]


def shape_of(target: Target) -> dict[str, float]:
    """Layers, heads and context from the configuration next to the weights, as far as it has them."""
    from ln_probe.models import bundled_folder, bundled_models

    folder = bundled_folder(target.name) if target.name in bundled_models() else Path(os.path.expanduser(target.name))
    names = {
        "layers": ("n_layers", "num_hidden_layers", "n_layer", "num_layers"),
        "heads": ("n_heads", "num_attention_heads", "n_head", "num_heads"),
        "context": ("n_ctx", "max_position_embeddings", "n_positions"),
        "vocabulary": ("d_vocab", "vocab_size"),
        "width": ("d_model", "hidden_size", "n_embd"),
    }
    config: dict[str, Any] = {}
    for file in ("lab.json", "config.json"):
        try:
            held = read_json(folder / file)
        except (OSError, ValueError):
            continue
        held = held.get("model") if isinstance(held, dict) and file == "lab.json" else held
        config = held if isinstance(held, dict) else {}
    config = config or hub_info(target).config
    return {
        what: float(config[n])
        for what, all_names in names.items()
        for n in all_names[::-1]
        if isinstance(config.get(n), int | float)
    }


def _parameters(target: Target) -> float:
    """How many numbers the weights are."""
    if target.parameters:
        return float(target.parameters)
    about = hub_info(target)
    config = about.config.get("text_config") or about.config
    stored = str(config.get("dtype") or config.get("torch_dtype")) if isinstance(config, dict) else _DTYPE
    return about.weight_bytes / _ITEM_BYTES.get(stored, _ITEM_BYTES[_DTYPE]) or math.nan


def default_workers(run: Run, targets: Sequence[Target]) -> int:
    """As many workers as there are processors, units and room in memory for."""
    from ln_probe.analyses.geometry.compiled import available

    units = sum(len(list(run.units())) for t in targets if not t.error)
    needed = [m for t in targets if not t.error and not math.isnan(m := _memory(run, t))]
    return int(max(1, min(available(), units, _room() / max([_WORKER_BYTES, *needed]))))


def _room(group: Path = Path("/sys/fs/cgroup")) -> float:
    """Bytes of memory that are free: of this machine, and of the container that this process runs in."""
    found = [math.inf]
    with suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        found.append(1024 * float(next(line.split()[1] for line in lines if line.startswith("MemAvailable:"))))
    with suppress(OSError, ValueError):  # "max": no limit
        found.append(float((group / "memory.max").read_text()) - float((group / "memory.current").read_text()))
    return min(found)


def cost_table(run: Run, costs: Mapping[Target, Cost | None], there: Mapping[Target, int], workers: int) -> str:
    """A line per checkpoint, and the sum; a question mark where a model would have to be loaded."""
    found = [c for c in costs.values() if c is not None]
    rows = {
        t: (
            t.label,
            str(c.units),
            str(there[t]),
            number(c.tokens),
            duration(c.seconds),
            size(c.memory_bytes),
            size(c.disk_bytes),
        )
        for t, c in costs.items()
        if c is not None
    }
    head = ("checkpoint", "units", "done", "tokens", "core time", "memory", "disk")
    widths = [max(map(len, column)) for column in zip(head, *rows.values(), strict=True)]

    def line(label: str, *cells: str) -> str:
        return "  ".join([label.ljust(widths[0]), *(c.rjust(w) for c, w in zip(cells, widths[1:], strict=True))])

    lines = [line(*head)]
    lines += [line(*rows[t]) if t in rows else f"{t.label}  failed: {t.error}" for t in costs]
    units, each, shards = sum(c.units for c in found), run.corpus.per_shard, run.corpus.shards
    lines.append(
        f"{units} units, {shards} shard{'s' * (shards != 1)} of {each} prompt{'s' * (each != 1)}: "
        f"about {duration(_wall(found, workers))} with {workers} worker{'s' * (workers != 1)} (a rough estimate), "
        f"at most {size(math.fsum(c.disk_bytes for c in found))} of results under {run.work} until the reports are made"
    )
    downloads = sorted(c.download_bytes for c in found)[::-1]
    if any(downloads):
        least, both = size(downloads[0]), size(math.fsum(downloads[:2]))
        lines.append(
            f"{size(math.fsum(downloads))} to download and keep in the hub's cache; with --disk at least {least}, or "
            f"{both} to fetch the next checkpoint while one is measured"
        )
    return "\n".join(lines)


def _wall(costs: Sequence[Cost], workers: int) -> float:
    """Seconds with so many workers, of which one calibrates a checkpoint and makes its report."""
    serial = math.fsum(c.serial_seconds for c in costs)
    return (math.fsum(c.seconds for c in costs) - serial) / workers + serial / max(1, min(workers, len(costs)))


def number(value: float) -> str:
    return "?" if math.isnan(value) else f"{value:,.0f}"


def duration(seconds: float) -> str:
    if math.isnan(seconds):
        return "?"
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def size(value: float) -> str:
    if math.isnan(value):
        return "?"
    return f"{value / 2**20:.0f} MB" if value < 2**30 else f"{value / 2**30:.1f} GB"
