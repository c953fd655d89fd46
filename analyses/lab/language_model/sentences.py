"""A decoder without scaling and an encoder without any norm, read on sentences: which keys can no query select?

After Brody, Alon & Yahav 2023, tables 3 and 4, each model next to the same one with LayerNorm:

* table 3: the decoder of tables 1 and 2 (`published_language_model`), trained with projection alone before attention;
* table 4: an encoder of BERT's shape (d 8, four heads, four layers, 3072 hidden units) with all norms the identity.

Read are sentences of at most 128 tokens, longer ones cut, each a context of its own. What differs from the source: the
text given (wikitext-2) stands for SST-2 and for the Wikipedia of the published decoders; the encoder learns to fill in
masked tokens, and not to classify sentences; training is far shorter; no dropout (published: 0.1).

Hypotheses, written down before the runs, of shares of unselectable keys (means over layers):

1. In the decoder without scaling, what attention reads has fewer in sentences than in windows of 256 tokens.
2. As heads see them, the decoder without scaling has more than the one with LayerNorm.
3. As heads see them, the encoder without norms has more than the one with LayerNorm. (What attention reads after
   LayerNorm has none, by theorem.)
4. Without norms the encoder's held-out masked loss is higher.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

import pandas as pd
import torch
from jaxtyping import Int
from torch import Tensor

from ln_probe.analyses.lab.experiments import Request
from ln_probe.analyses.lab.language_model import encoder, published_language_model
from ln_probe.analyses.lab.language_model.encoder import WHOLE, encoder_config
from ln_probe.analyses.lab.language_model.published_language_model import (
    FRACTION,
    HEAD,
    LAYERS,
    LOSS,
    NORMALIZED,
    published_model,
    unselectable_keys,
)
from ln_probe.analyses.lab.results import (
    Results,
    contrasted,
    minus_reference,
    select,
    summarize_kinds,
)
from ln_probe.analyses.lab.run_folder import kept_beside, weights_of
from ln_probe.analyses.lab.text_task import MaskedTextTask, TextTask
from ln_probe.analyses.lab.train import Run, Task, carry_out, curves, finished, planned, shared_settings, text_training
from ln_probe.analyses.lab.transformer import LabTransformer

DECODER, ENCODER, IDENTITY, NO_SCALING = "decoder", "encoder", "identity", "projection_only"
# A step takes a core 0.05 and 0.08 seconds (published: 50,000 steps of 16 windows of 1024 for decoders).
DECODERS = replace(published_language_model.SMALL, steps=300)
ENCODERS = replace(encoder.SMALL, batch=4, steps=200, valid_windows=64)
CELLS = ((DECODER, NO_SCALING), (DECODER, WHOLE), (ENCODER, IDENTITY), (ENCODER, WHOLE))
HIDDEN = 3072  # published, of the encoder
LONGEST = 128  # tokens of a sentence, the boundary before it among them: published
READ, READ_QUICK = 64, 16  # sentences
WINDOWS = 8  # of the decoder's training length, read for comparison
LONG = f"{NORMALIZED}, long windows"
KEYS = ["shape", "norm", "step", "layer", "space", "measure"]
MEASURED = 1  # version of what is measured
ENDS = re.compile(r"(?<=[.?!])\s+|\n\s*\n")


def sentences(text: TextTask, count: int) -> list[Int[Tensor, " pos"]]:
    """The first sentences of a text's held-out part, a boundary token and at most LONGEST - 1 tokens each.

    Headings and what else does not end in a full stop, a question mark or an exclamation mark are left out.

    Raises:
        ValueError: there are not as many (says how many).
    """
    held = text.tokenizer.decode(text.valid_tokens.tolist())
    parts = [part.strip() for part in ENDS.split(held)]
    whole = [part for part in parts[1:] if part.endswith((".", "?", "!"))]  # the first may have begun before
    if len(whole) < count:
        raise ValueError(f"the held-out text has {len(whole)} sentences and {count} are read: give more text")
    ids = [torch.tensor(text.tokenizer.encode(part).ids[: LONGEST - 1]) for part in whole[:count]]
    return [torch.cat([torch.tensor([text.boundary]), one]) for one in ids]


def make_runs(request: Request) -> list[Run]:
    """A run per seed, model and norm; within a seed and model all see the same batches."""
    decoders = published_language_model.TINY if request.quick else DECODERS
    encoders = encoder.TINY if request.quick else ENCODERS
    sizes: dict[str, published_language_model.Size | encoder.Size] = {DECODER: decoders, ENCODER: encoders}
    texts = {
        shape: TextTask(request.texts, s.d_vocab, s.n_ctx, tokenizer=request.tokenizer, valid_windows=s.valid_windows)
        for shape, s in sizes.items()
    }
    tasks: dict[str, Task] = {DECODER: texts[DECODER], ENCODER: MaskedTextTask(texts[ENCODER])}
    specs = {(DECODER, WHOLE): published_model(WHOLE, None, decoders)}
    specs[DECODER, NO_SCALING] = published_model(NO_SCALING, 1.0, decoders)
    for norm in (IDENTITY, WHOLE):
        specs[ENCODER, norm] = replace(encoder_config("narrow", norm, encoders), d_mlp=HIDDEN)
    rates = {DECODER: decoders.lr, ENCODER: encoder.RATES["narrow"]}
    return planned(
        CELLS,
        request,
        keys=lambda cell: {"shape": cell[0], "norm": cell[1]},
        name="-".join,
        task=lambda cell, _: tasks[cell[0]],
        spec=specs.__getitem__,
        training=lambda cell, seed: text_training(
            sizes[cell[0]], seed, rates[cell[0]], evaluate_every=sizes[cell[0]].steps // 5
        ),
    )


def run(request: Request) -> Results:
    """Train what is not trained, and read every model on sentences, decoders on long windows as well."""
    runs = make_runs(request)
    lost = carry_out(runs, request)
    done = finished(runs)
    read = pd.concat([read_on_sentences(one, READ_QUICK if request.quick else READ) for one in done])
    losses = select(curves(done), measure=LOSS).assign(layer=-1, space="-")
    ends = losses["step"] == losses.groupby(["shape", "norm", "seed"])["step"].transform("max")
    values = pd.concat([read, losses[ends]], ignore_index=True)[[*KEYS, "seed", "value"]]
    settings = {
        str(one.keys["shape"]): shared_settings(one, ("norm", "norm_mlp", "norm_read", "norm_final", "divisor"))
        for one in done
    }
    return replace(findings(values, settings), diverged=lost)


def read_on_sentences(run: Run, count: int) -> pd.DataFrame:
    """Unselectable shares of a finished run's model: the columns KEYS, `seed`, `value`; kept in its folder."""
    text = run.task if isinstance(run.task, TextTask) else cast(MaskedTextTask, run.task).text
    is_decoder = run.keys["shape"] == DECODER
    places = published_language_model.key_places(range(LAYERS)) if is_decoder else encoder.key_places()

    def measured() -> pd.DataFrame:
        model = cast(LabTransformer, run.model())
        contexts = [one[None] for one in sentences(text, count)]
        rows = [(layer, space, value) for c in contexts for layer, space, value in unselectable_keys(model, c, places)]
        if is_decoder:
            long = {place: name for place, name in places.items() if place[1] == NORMALIZED}
            rows += [(layer, LONG, v) for layer, _, v in unselectable_keys(model, text.held_out(WINDOWS), long)]
        table = pd.DataFrame(rows, columns=["layer", "space", "value"])
        return cast("pd.DataFrame", table.groupby(["layer", "space"], sort=False, as_index=False)["value"].mean())

    found = kept_beside(run.folder, f"sentences-{count}", weights_of(run.folder), MEASURED, measured)
    return found.assign(step=run.training.steps, measure=FRACTION, seed=run.seed, **dict(run.keys))


def findings(values: pd.DataFrame, settings: Mapping[str, Any]) -> Results:
    """Tables and plots from KEYS, `seed`, `value`: shares and held-out loss at the last step."""
    shares = values["measure"] == FRACTION
    summary = summarize_kinds([(values[shares], "share"), (values[~shares], "mean")], KEYS)
    differences = effects(values)
    return Results(
        summary=summary,
        tables={"seeds": values, "effects": differences},
        figures={"unselectable": encoder.draw(summary.assign(step=0))},
        settings={
            **settings,
            "seeds": sorted({int(seed) for seed in values["seed"]}),
            "sentences": f"the first of the held-out text, cut to {LONGEST} tokens; they stand for SST-2",
        },
    )


def effects(values: pd.DataFrame) -> pd.DataFrame:
    """What the hypotheses are about: no scaling or no norm minus LayerNorm, and sentences minus long windows.

    Returns:
        shape, norm, space, measure, and the columns of `contrasted`, means over layers; Holm's p over all rows.
    """
    same, first = ["shape", "measure", "seed"], ["norm", "space"]
    means = cast("pd.DataFrame", values.groupby([*same, *first], sort=False, as_index=False)["value"].mean())
    seen = means[means["space"].isin([HEAD, "-"])]
    read = select(means, shape=DECODER, norm=NO_SCALING, space=[NORMALIZED, LONG])
    pairs = [
        minus_reference(seen, seen["norm"] == WHOLE, [*same, "space"]).assign(minus=WHOLE),
        minus_reference(read, read["space"] == LONG, [*same, "norm"]).assign(minus=LONG),
    ]
    return contrasted(pd.concat(pairs, ignore_index=True), ["shape", *first, "measure", "minus"])
