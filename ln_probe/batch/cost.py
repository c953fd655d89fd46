"""What a run will cost, as far as that is known before a model is loaded."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ln_probe.analyses.files import read_json
from ln_probe.analyses.probes.base import Shape
from ln_probe.analyses.probes.registry import chosen
from ln_probe.batch.run import Run
from ln_probe.batch.shards import DEFAULT, ShardedCorpus
from ln_probe.batch.suite import Target, hub_info
from ln_probe.prompt_sources import SAMPLED

# A worker with a small model: Python, torch, TransformerLens, numba (650 MB at its peak with lm-layernorm).
_WORKER_BYTES = 700 * 2**20
# Copies of the weights while a model is loaded: the original's, ours, and what is underway between them.
_COPIES = 3.0
# Bytes of a number in each format that models are loaded in, and the one they are loaded in by default.
_ITEM_BYTES = {"float32": 4, "float64": 8, "bfloat16": 2, "float16": 2}
_DTYPE = "float32"
_MULTIPLICATIONS = 2.5e10  # a second, of one core on a forward pass
# Seconds of one core until a worker has imported what it needs, and bytes of weights that are loaded and compared with
# the original's logits in one: 16 s for GPT-2 small.
_START_SECONDS, _LOADED = 7.0, 6e7
_CHARACTERS_PER_TOKEN = 4.0  # of English text with a vocabulary of 50 000


@dataclass(frozen=True)
class Cost:
    """Of one checkpoint. Numbers that are not known without loading it are NaN.

    Attributes:
        units: of work; shards of them with keys to measure.
        tokens: of all prompts.
        seconds: of one core.
        memory_bytes: of the worker that holds it.
        disk_bytes: of results until the report is made.
        download_bytes: of files that are not in the model hub's cache.
    """

    units: int
    tokens: float
    seconds: float
    memory_bytes: float
    disk_bytes: float
    download_bytes: float = 0.0


def cost(run: Run, target: Target, prompts: Sequence[float]) -> Cost:
    """A rough estimate: what each probe says of itself, and forward passes; `prompts` are lengths in tokens."""
    units = len(list(run.units())) + 1
    shape = shape_of(target)
    limit = min(run.settings.max_tokens, shape.get("context", math.inf))
    lengths = [min(length, limit) for length in prompts]
    tokens = float(sum(lengths))
    layers = len(run.settings.layers) if run.settings.layers is not None else shape.get("layers", math.nan)
    heads = shape.get("heads", math.nan)
    default = run.corpus.given == DEFAULT
    of_words = shape.get("vocabulary", math.nan), shape.get("width", math.nan)
    passed = (1.0 + any(p.watches for p in run.probes)) * tokens  # the first pass, and what the probes watch
    found = []
    for probe in chosen(run.settings.probes):
        taken = tuple(lengths[: probe.prompts] if default else lengths)
        found.append(probe.cost(Shape(layers, heads, taken, *of_words)))
        passed += found[-1].passes * sum(taken)
    weights = _loaded_bytes(run, target) or math.nan
    forward = passed * (_parameters(target) or math.nan) / _MULTIPLICATIONS
    starting = _START_SECONDS + weights / _LOADED
    return Cost(
        units,
        tokens,
        sum(c.seconds for c in found) + forward + starting,
        _WORKER_BYTES + _COPIES * weights,
        sum(c.disk_bytes for c in found),
        hub_info(target).download_bytes,
    )


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
    """How many numbers the weights are; 0 if that is not known."""
    if target.parameters:
        return float(target.parameters)
    about = hub_info(target)
    config = about.config.get("text_config") or about.config
    stored = str(config.get("dtype") or config.get("torch_dtype") or _DTYPE) if isinstance(config, dict) else _DTYPE
    return about.weight_bytes / _ITEM_BYTES.get(stored, _ITEM_BYTES[_DTYPE])


def _loaded_bytes(run: Run, target: Target) -> float:
    """Of the weights in memory, in the format that they are loaded in, not the one on disk; 0: not known."""
    return _parameters(target) * _ITEM_BYTES[run.dtype or _DTYPE]


def default_workers(run: Run, targets: Sequence[Target]) -> int:
    """As many workers as there are processors, units and room in memory for."""
    from ln_probe.analyses.geometry.compiled import available

    units = sum(len(list(run.units())) for t in targets if not t.error)
    largest = max((_loaded_bytes(run, t) for t in targets), default=0.0)
    room = math.inf
    if hasattr(os, "sysconf") and "SC_AVPHYS_PAGES" in os.sysconf_names:
        room = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / (_WORKER_BYTES + _COPIES * largest)
    return int(max(1, min(available(), units, room)))


def cost_table(run: Run, costs: Sequence[tuple[Target, Cost | None]], there: Mapping[Target, int], workers: int) -> str:
    """A line per checkpoint, and the sum; what is not known without loading a model is a question mark."""
    rows = [("checkpoint", "units", "done", "tokens", "core time", "memory", "disk")]
    known = [c for _, c in costs if c is not None]
    for target, c in costs:
        if c is None:
            rows.append((target.label, "failed:", target.error, "", "", "", ""))
        else:
            rows.append(
                (
                    target.label,
                    str(c.units),
                    str(there.get(target, 0)),
                    number(c.tokens),
                    duration(c.seconds),
                    size(c.memory_bytes),
                    size(c.disk_bytes),
                )
            )
    seconds = math.fsum(c.seconds for c in known)
    disk = math.fsum(c.disk_bytes for c in known)
    plain = [r for r in rows if r[1] != "failed:"]
    widths = [max(len(r[i]) for r in plain) for i in range(len(rows[0]))]
    lines = [
        f"{r[0]}  failed: {r[2]}"
        if r[1] == "failed:"
        else "  ".join(v.ljust(w) if i == 0 else v.rjust(w) for i, (v, w) in enumerate(zip(r, widths, strict=True)))
        for r in rows
    ]
    units, each, shards = sum(c.units for c in known), run.corpus.per_shard, run.corpus.shards
    lines.append(
        f"{units} units, {shards} shard{'s' * (shards != 1)} of {each} prompt{'s' * (each != 1)}: "
        f"about {duration(seconds / workers)} with {workers} worker{'s' * (workers != 1)} (a rough estimate), "
        f"at most {size(disk)} of results under {run.work} until the reports are made"
    )
    downloads = sorted(c.download_bytes for c in known)[::-1]
    if any(downloads):
        least, both = size(downloads[0]), size(math.fsum(downloads[:2]))
        lines.append(
            f"{size(math.fsum(downloads))} to download and keep in the hub's cache; with --disk at least {least}, or "
            f"{both} to fetch the next checkpoint while one is measured"
        )
    return "\n".join(lines)


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
