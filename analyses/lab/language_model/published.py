"""The published language models: d 8, four layers, four heads, and only the norm before attention varies.

After Brody, Alon & Yahav 2023, section 4.2: a GPT-2 with `ln_1` either LayerNorm or its projection alone (nothing
divides there, so `divisor` is 1), both without gain and bias. A third model divides the projected vectors by a constant
measured at initialization. What share of a context's keys can no query select: before the norm, after it, and as
a head sees them? Read on windows and, in place of SST-2 (table 3), on single sentences. Two sizes: one that a CPU
trains in minutes, and the published one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import cast

import pandas as pd
import torch
from jaxtyping import Float, Int
from matplotlib.figure import Figure
from torch import Tensor

from ln_probe.analyses.geometry.check import NAMES, UNSELECTABLE
from ln_probe.analyses.geometry.check import UNDECIDED as NOT_DECIDED
from ln_probe.analyses.geometry.key_geometry import key_geometry
from ln_probe.analyses.lab.experiments import Request
from ln_probe.analyses.lab.results import Results, contrasted, line_panels, minus_reference, select, summarize
from ln_probe.analyses.lab.runs import Run, carry_out, curves, finished, measured_once, planned, shared_settings
from ln_probe.analyses.lab.text_task import TextTask, sentences
from ln_probe.analyses.lab.train import checkpoint_steps, read_metrics, text_training, weights_of
from ln_probe.analyses.lab.transformer import LabConfig, LabTransformer

LAYERS, D_MODEL, HEADS = 4, 8, 4  # published
GPT2_VOCABULARY, GPT2_CONTEXT, GPT2_EMBED_STD = 50257, 1024, 0.02
CONTEXTS = 16  # held-out windows whose keys are measured
BEFORE, NORMALIZED, HEAD = "before the norm", "normalized", "head"
SENTENCES = ", sentences"  # after a space: of sentences of at most 128 tokens, not of windows
NORMS = (("layernorm", None, "-"), ("projection_only", 1.0, "1"), ("projection_only", None, "measured"))
KEYS = ["norm", "divisor", "step", "layer", "space", "measure"]
PLACED = ["layer", "space", "measure", "value"]  # of shares of keys
FRACTION, UNDECIDED, LOSS = "unselectable_fraction", "undecided_fraction", "valid_loss"
_WITH, _WITHOUT = ("layernorm", "-"), ("projection_only", "1")
PUBLISHED = pd.DataFrame(  # tables 1 and 2, and figure 4 (test loss, one run each)
    [
        *((*_WITHOUT, layer, NORMALIZED, FRACTION, p) for layer, p in enumerate((0.510, 0.322, 0.347, 0.368))),
        *((*_WITH, layer, NORMALIZED, FRACTION, 0.0) for layer in range(LAYERS)),
        *((*_WITH, layer, BEFORE, FRACTION, p) for layer, p in enumerate((0.448, 0.285, 0.223, 0.261))),
        (*_WITHOUT, -1, "-", LOSS, 7.38),
        (*_WITH, -1, "-", LOSS, 7.33),
    ],
    columns=["norm", "divisor", "layer", "space", "measure", "published"],
)


# The authors' script sets no learning rate, and reads checkpoint 34000 with scaling and 50000 without.
PUBLISHED_HOW = (
    "tables 1 and 2; losses read off figure 4; one run each. Measured at 34,000 steps with scaling and at 50,000 "
    "without (the authors' script): scaling and training time are confounded there. Dropout 0.1; here none"
)


@dataclass(frozen=True)
class Size:
    """Everything that is not published shape: vocabulary, window, batch (windows), steps, learning rate."""

    d_vocab: int
    n_ctx: int
    batch: int
    steps: int
    lr: float = 2e-3
    embed_std: float = GPT2_EMBED_STD
    valid_windows: int = 64
    measured_at: tuple[float, ...] = (0, 1 / 20, 1 / 4, 1 / 2)  # shares of the steps whose models are measured, too
    sentences: int = 64  # that the final models are read on


SMALL = Size(d_vocab=1024, n_ctx=256, batch=4, steps=1500)
TINY = Size(d_vocab=512, n_ctx=128, batch=4, steps=300, sentences=16)
# Published: 50000 steps of 16 windows at 5e-5. A window takes a core a third of a second: fewer and larger steps.
FULL = Size(GPT2_VOCABULARY, GPT2_CONTEXT, batch=2, steps=3000, valid_windows=8, sentences=0)
# Measuring a model's keys takes longer than these steps: the first and the last.
FULL_TINY = Size(GPT2_VOCABULARY, GPT2_CONTEXT, batch=1, steps=40, valid_windows=2, measured_at=(0,), sentences=0)


def published_model(norm: str, divisor: float | None, size: Size) -> LabConfig:
    """The published shape at a size of vocabulary and window."""
    return LabConfig(
        n_layers=LAYERS, d_model=D_MODEL, n_heads=HEADS, d_vocab=size.d_vocab, n_ctx=size.n_ctx, norm=norm,
        divisor=divisor, affine=False, bias_qkv=False, bias_unembed=False, act_fn="gelu_new", embed_std=size.embed_std,
    )  # fmt: skip


def make_runs(request: Request, size: Size) -> list[Run]:
    """A run per seed and norm; at GPT-2's vocabulary only the two that were published."""
    task = TextTask(
        request.texts, size.d_vocab, size.n_ctx, tokenizer=request.tokenizer, valid_windows=size.valid_windows
    )
    return planned(
        NORMS[: 2 if size.d_vocab == GPT2_VOCABULARY else None],
        request,
        keys=lambda cell: {"norm": cell[0], "divisor": cell[2]},
        task=lambda *_: task,
        spec=lambda cell: published_model(cell[0], cell[1], size),
        training=lambda _, seed: text_training(
            size,
            seed,
            size.lr,
            evaluate_every=max(1, size.steps // 20),
            save_at=tuple(int(share * size.steps) for share in size.measured_at),
            state_every=max(1, size.steps // 100),
        ),
    )


def run(request: Request) -> Results:
    """At the size a CPU trains."""
    return _run(request, TINY if request.quick else SMALL)


def run_full(request: Request) -> Results:
    """At the published size, with fewer steps."""
    return _run(request, FULL_TINY if request.quick else FULL)


def _run(request: Request, size: Size) -> Results:
    runs = make_runs(request, size)
    lost = carry_out(runs, request)
    started = finished(runs, checkpoints=True)
    places, text = key_places(range(LAYERS)), cast("TextTask", started[0].task)
    windows = text.held_out(CONTEXTS)
    fractions = pd.concat(
        [
            unselectable_at_checkpoints(started, windows, places),
            *(on_sentences(run, text, places, size.sentences) for run in started if run.finished and size.sentences),
        ]
    )
    losses = select(curves(started), measure=["train_loss", LOSS]).assign(layer=-1, space="-")
    evaluated = [read_metrics(run.folder) for run in started]
    reached = min(int(table["step"].max()) if len(table) else 0 for table in evaluated)
    at_kept = losses[losses["step"].isin({*fractions["step"], reached})]
    values = pd.concat([fractions, at_kept], ignore_index=True)[[*KEYS, "seed", "value"]]
    settings = shared_settings(started[0], ("norm", "divisor")) | {"contexts": CONTEXTS, "published": PUBLISHED_HOW}
    tables = analyse(values, losses, size.steps, size.d_vocab)
    return Results(tables, plot(tables), settings, lost)


def unselectable_share(
    keys: Float[Tensor, "batch pos d_model"] | Float[Tensor, "batch pos head d_head"],
) -> dict[str, float]:
    """Shares of keys that no query can select among those of their context (and head), and of undecided keys."""
    sets = keys.transpose(1, 2).flatten(0, 1) if keys.ndim == 4 else keys
    verdict = key_geometry(sets.detach().double().numpy(), margins=False).verdict
    shares = {FRACTION: UNSELECTABLE, UNDECIDED: NOT_DECIDED}
    return {measure: float((verdict == NAMES[number]).mean()) for measure, number in shares.items()}


def key_places(layers: Iterable[int], spaces: Sequence[str] = (BEFORE, NORMALIZED, HEAD)) -> dict[tuple[int, str], str]:
    """Hook names of the keys of pre-norm layers, by layer and space."""
    leaves = {BEFORE: "hook_resid_pre", NORMALIZED: "ln1.hook_normalized", HEAD: "attn.hook_k"}
    return {(layer, space): f"blocks.{layer}.{leaves[space]}" for layer in layers for space in spaces}


@torch.no_grad()
def unselectable_keys(
    model: LabTransformer, tokens: Int[Tensor, "batch pos"], places: Mapping[tuple[int, str], str]
) -> Iterator[tuple[int, str, str, float]]:
    """Layer, space, measure (FRACTION and UNDECIDED), and share of the keys of each context (and head), the mean.

    `places` are hook names of the keys, by layer and space.
    """
    _, cache = model.run_with_cache(tokens, names_filter=list(places.values()), return_type=None)
    for (layer, space), name in places.items():
        for measure, share in unselectable_share(cache[name]).items():
            yield layer, space, measure, share


def unselectable_at_checkpoints(
    runs: Iterable[Run], tokens: Int[Tensor, "batch pos"], places: Mapping[tuple[int, str], str]
) -> pd.DataFrame:
    """`unselectable_keys` of every checkpoint of runs, a row per layer and space; kept in the run's folder."""

    def measured(run: Run, step: int) -> pd.DataFrame:
        shares = unselectable_keys(cast(LabTransformer, run.model(step)), tokens, places)
        return pd.DataFrame(shares, columns=PLACED)

    rows = []
    for run in runs:
        for step in checkpoint_steps(run.folder):
            name, weights = f"unselectable-{step:07d}", weights_of(run.folder, step)
            table = measured_once(run.folder, name, weights, partial(measured, run, step))
            rows.append(table.assign(step=step, seed=run.seed, **dict(run.keys)))
    return pd.concat(rows, ignore_index=True)


def on_sentences(run: Run, text: TextTask, places: Mapping[tuple[int, str], str], count: int) -> pd.DataFrame:
    """`unselectable_keys` of a finished run on single sentences, means over them; kept in the run's folder."""

    def measure() -> pd.DataFrame:
        model = cast("LabTransformer", run.model())
        rows = [row for one in sentences(text, count) for row in unselectable_keys(model, one[None], places)]
        groups = pd.DataFrame(rows, columns=PLACED).groupby(PLACED[:-1], sort=False, as_index=False)
        return cast("pd.DataFrame", groups["value"].mean())

    shares = measured_once(run.folder, f"sentences-{count}", weights_of(run.folder), measure)
    about = {"step": run.training.steps, "seed": run.seed}
    return shares.assign(space=shares["space"] + SENTENCES, **about, **dict(run.keys))


def analyse(frame: pd.DataFrame, losses: pd.DataFrame, steps: int, d_vocab: int) -> dict[str, pd.DataFrame]:
    """Summary of KEYS, `seed`, `value`: shares and losses at the measured steps, beside what was published at the end.

    `effects`: at the ends, the other norms minus LayerNorm (of one seed; shares are means over layers), and sentences
    minus windows; Holm's p over all rows. Losses of a small vocabulary do not compare with the published ones.
    """
    summary = summarize(frame, KEYS, PUBLISHED, shares=(FRACTION, UNDECIDED))
    other = summary["step"] != steps
    if d_vocab != GPT2_VOCABULARY:
        other |= summary["measure"] == LOSS
    summary.loc[other, "published"] = float("nan")
    read = frame["space"].str.endswith(SENTENCES)
    ends = frame[frame["step"].isin({steps, *frame["step"][read]}) & frame["measure"].isin((FRACTION, LOSS))]
    same, norms = ["step", "space", "measure", "seed"], ["norm", "divisor"]
    means = cast("pd.DataFrame", ends.groupby([*same, *norms], sort=False, as_index=False)["value"].mean())
    seen = select(means, space=[HEAD, HEAD + SENTENCES, "-"])
    normalized = select(means, norm="projection_only", divisor="1", space=[NORMALIZED, NORMALIZED + SENTENCES])
    pairs = [
        minus_reference(seen, seen["norm"] == "layernorm", same).assign(minus="layernorm"),
        minus_reference(normalized, normalized["space"] == NORMALIZED, ["step", "measure", "seed"]).assign(
            minus="windows"
        ),
    ]
    effects = contrasted(pd.concat(pairs, ignore_index=True), [*norms, "step", "space", "measure", "minus"])
    return {"summary": summary, "curves": losses, "seeds": frame, "effects": effects}


def plot(tables: Mapping[str, pd.DataFrame]) -> dict[str, Figure]:
    """Unselectable fractions over training, a panel per layer."""
    rows = select(tables["summary"], measure=FRACTION, space=[BEFORE, NORMALIZED, HEAD]).sort_values("step")
    named = rows.assign(line=rows["norm"] + ", " + rows["divisor"] + ": " + rows["space"])
    return {"unselectable": line_panels(named, ["layer"], "step", "line", ylabel="unselectable keys (x: published)")}
