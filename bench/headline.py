"""What freezing LayerNorm's scaling costs, with constants of three kinds, on models of many kinds.

    python bench/headline.py            # every model that is there and has no rows in bench/results/headline.csv yet
    python bench/headline.py mgm --again --values FOLDER

For the norms that attention reads and for all norms, the loss increase per token (under a loss of the model's own: per
prompt) when each norm divides by two constants instead of sigma, one at position 0 and one elsewhere:

    delta_before         the means over bundled calibration passages, as in version 0.2
    delta_leave_one_out  of each prompt, the means over all other measured prompts
    delta_held_out       the means over other prompts of the same kind, none of which is measured

The last is the reference: leave-one-out constants need no prompts but the measured ones and should agree with it.
`difference` is leave-one-out minus held-out, paired by prompt, with a 95 % percentile bootstrap interval over prompts,
constants held; `agrees` says whether its size is at most 0.01 or 10 % of delta_held_out. `half_width` is that of the
interval that `ln_probe.freezing_cost` gives (the choice of constants included; its estimate has to be
delta_leave_one_out, computed here independently), `half_width_prompts` that of the same bootstrap over prompts alone.

Corpora and CAPP-GPT are read from LN_PROBE_SHARED, MGM from LN_PROBE_MGM, SmolLM2 from LN_PROBE_GGUF.
"""

from __future__ import annotations

import os
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pandas as pd
import torch
import typer
from jaxtyping import Float64, Int
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "checkpoints"))

import measure

import ln_probe
from ln_probe.analyses.probes import statistics
from ln_probe.hooks import find_norms, without
from ln_probe.hooks.constants import mean_sigmas
from ln_probe.hooks.edits import NoOpWarning
from ln_probe.hooks.model import context_length, run
from ln_probe.hooks.norm import Norm
from ln_probe.hooks.task import Objective, bundled_texts, encode, special_tokens, tokenizer_of

RESULTS = Path(__file__).parent / "results" / "headline.csv"
GROUPS = ("attention", "all")
PROMPTS = 64
RESAMPLES, SEED = 2000, 0
LEAST, SHARE = 0.01, 0.1  # leave-one-out agrees with held-out constants within the larger of these
COLUMNS = ("model", "group", "prompts", "loss", "delta_before", "delta_leave_one_out", "delta_held_out", "difference",
           "low", "high", "agrees", "half_width", "half_width_prompts", "command", "seconds")  # fmt: skip

Tokens = Int[Tensor, " pos"]
Constants = Mapping[str, Mapping[str, float]]  # of each norm: {"first": at position 0, "rest": elsewhere}


# Models and their prompts


@dataclass(frozen=True)
class Measured:
    """Two sets of prompts of the same kind, no window of one overlapping one of the other.

    Attributes:
        prompts: those that are measured.
        others: those that constants are taken from.
        loss: of a model's output and the token ids [batch pos], the mean of each prompt; None: the next-token loss.
    """

    prompts: list[list[int]]
    others: list[list[int]]
    loss: Callable[[Any, Tensor], Tensor] | None = None


@dataclass(frozen=True)
class Case:
    """A model, its prompts, and the variable that says where it is ("" where nothing has to be said)."""

    load: Callable[[], Any]
    prompts: Callable[[Any], Measured]
    variable: str = ""


def _from_checkpoints(name: str, variable: str = "") -> Case:
    """A case of `examples/checkpoints/measure.py` with its prompts, and others from the same source."""
    case = measure.CASES[name]
    source = measure.SOURCES[case.prompts]

    def prompts(model: Any) -> Measured:
        return Measured(source(model, case.tokens), source(model, case.tokens, others=True))

    return Case(lambda: measure.load(case), prompts, variable)


def _bundled(name: str) -> Case:
    return Case(
        lambda: ln_probe.load_model(name),
        lambda model: Measured(measure.books(model, 128), measure.books(model, 128, others=True)),
    )


CASES = {
    "mgm": _from_checkpoints("mgm", "LN_PROBE_MGM"),
    "smollm2-135m": _from_checkpoints("smollm2-135m", "LN_PROBE_GGUF"),
    "capp-gpt": _from_checkpoints("capp-gpt-own"),
    **{name: _bundled(name) for name in ("lm-layernorm", "lm-scaling_only", "lm-projection_only", "lm-none",
                                         "lm-layernorm-removed")},
}  # fmt: skip


# Constants


def constants_before(model: Any, sites: Sequence[Norm], prompts: Sequence[Tokens]) -> Constants:
    """Those of version 0.2: means over bundled passages. Empty for a model without a tokenizer.

    With the first token in front that all prompts begin with, if the model declares it; without the first token of the
    calibration sequences if no prompt begins with it.
    """
    limit = min(512, context_length(model))
    if tokenizer_of(model) is None:
        return {}
    rows = [encode(model, text)[:limit] for text in bundled_texts("calibration")]
    starts, begun = ({int(row[0]) for row in group} for group in (rows, prompts))
    if len(starts) == 1:
        if not starts & begun and min(map(len, rows)) > 1:
            rows = [row[1:] for row in rows]
    elif len(begun) == 1 and begun <= set(special_tokens(model, "bos")):
        rows = [torch.cat([row.new_tensor(list(begun)), row]) for row in rows]
    return constants_of(model, sites, rows)


def constants_of(model: Any, sites: Sequence[Norm], prompts: Sequence[Tokens]) -> Constants:
    """The mean sigma of each norm over these prompts, at position 0 and elsewhere."""
    return {name: constant.plain for name, constant in mean_sigmas(model, sites, prompts).items()}


def leave_one_out(model: Any, sites: Sequence[Norm], prompts: Sequence[Tokens]) -> list[Constants]:
    """Of each prompt the mean sigma of each norm over all prompts that are not equal to it.

    Raises:
        ValueError: all prompts are equal, or no other prompt has a second token.
    """
    groups: dict[tuple[int, ...], list[int]] = {}
    for number, row in enumerate(prompts):
        groups.setdefault(tuple(row.tolist()), []).append(number)
    where = ("first", "rest")
    sums = {site.name: {w: np.zeros(len(prompts)) for w in where} for site in sites}
    counts = {w: np.zeros(len(prompts)) for w in where}
    for number, row in enumerate(prompts):
        means = mean_sigmas(model, sites, [row])
        for w in where if len(row) > 1 else where[:1]:
            counts[w][number] = 1 if w == "first" else len(row) - 1
            for name, mean in means.items():
                sums[name][w][number] = getattr(mean, w) * counts[w][number]
    found: dict[int, Constants] = {}
    for same in groups.values():
        others = np.delete(np.arange(len(prompts)), same)
        if not all(counts[w][others].sum() for w in where):
            raise ValueError("there is no other prompt of at least two tokens to take constants from")
        constants = {
            name: {w: float(by_prompt[w][others].sum() / counts[w][others].sum()) for w in where}
            for name, by_prompt in sums.items()
        }
        found |= dict.fromkeys(same, constants)
    return [found[number] for number in range(len(prompts))]


# The table


def losses(model: Any, prompts: Sequence[Tokens], objective: Objective) -> Float64[np.ndarray, " prompt"]:
    """The loss of each prompt times its weight."""
    found = []
    with torch.no_grad():
        for row in prompts:
            output = run(model, row[None], return_type="logits")
            found.append(float(objective.sums(output, row[None].to(output.device))[0]))
    return np.array(found)


def frozen(
    model: Any, prompts: Sequence[Tokens], objective: Objective, group: str, constants: Sequence[Constants]
) -> Float64[np.ndarray, " prompt"]:
    """The same with scaling frozen at constants of each prompt; the context is entered once for equal ones."""
    if not constants[0]:
        return np.full(len(prompts), np.nan)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NoOpWarning)
        if all(each is constants[0] for each in constants):
            with without(model, "scaling", sites=group, scale=constants[0]):
                return losses(model, prompts, objective)
        found = []
        for row, each in zip(prompts, constants, strict=True):
            with without(model, "scaling", sites=group, scale=each):
                found.append(losses(model, [row], objective))
    return np.concatenate(found)


def interval(change: Float64[np.ndarray, " prompt"], weight: Float64[np.ndarray, " prompt"]) -> tuple[float, float]:
    """95 % percentile bootstrap over prompts of sum(change) / sum(weight)."""
    drawn = np.random.default_rng(SEED).multinomial(len(change), np.full(len(change), 1 / len(change)), RESAMPLES)
    low, high = np.quantile(drawn @ change / (drawn @ weight), (0.025, 0.975))
    return float(low), float(high)


def rows_of(name: str, values: Path | None) -> list[dict[str, Any]]:
    """The rows of one model; the change of every prompt is kept under `values`."""
    case, began = CASES[name], time.perf_counter()
    model = case.load()
    given = case.prompts(model)
    prompts, others = ([torch.tensor(row) for row in rows] for rows in (given.prompts, given.others))
    assert not {*map(tuple, given.prompts)} & {*map(tuple, given.others)}, "a measured prompt is among the others"
    objective, sites = Objective.of(given.loss), find_norms(model)
    objective.check(model, prompts[0])
    weight = np.array([float(objective.weight(row)) for row in prompts])
    intact = losses(model, prompts, objective)
    of_prompt = leave_one_out(model, sites, prompts)
    kinds: dict[str, Sequence[Constants]] = {
        "before": [constants_before(model, sites, prompts)] * len(prompts),
        "leave_one_out": of_prompt,
        "held_out": [constants_of(model, sites, others)] * len(prompts),
    }
    cost = ln_probe.freezing_cost(model, given.prompts, loss=given.loss, max_tokens=max(map(len, given.prompts)))
    product = cost.table[cost.table["variant"] == "no_scaling"].set_index("sites")
    found, kept = [], []
    for group in GROUPS:
        change = {k: frozen(model, prompts, objective, group, c) - intact for k, c in kinds.items()}
        delta = {k: float(c.sum() / weight.sum()) for k, c in change.items()}
        paired = change["leave_one_out"] - change["held_out"]
        difference, (low, high) = float(paired.sum() / weight.sum()), interval(paired, weight)
        known = np.isfinite(difference)  # of a model whose logits overflow there is no number
        agrees = abs(difference) <= max(LEAST, SHARE * abs(delta["held_out"])) if known else ""
        theirs = product.loc[group]
        if not np.isclose(theirs["delta_loss"], delta["leave_one_out"], rtol=1e-4, atol=1e-4, equal_nan=True):
            raise SystemExit(f"{name}, {group}: freezing_cost says {theirs['delta_loss']}, here {delta}")
        half_width = (theirs["delta_loss_high"] - theirs["delta_loss_low"]) / 2
        alone = statistics.infer_mean(change["leave_one_out"], weight)
        cells = (name, group, len(prompts), intact.sum() / weight.sum(), *delta.values(), difference, low, high, agrees,
                 half_width, (alone.high - alone.low) / 2, f"python bench/headline.py {name}",
                 round(time.perf_counter() - began))  # fmt: skip
        found.append(dict(zip(COLUMNS, cells, strict=True)))
        by_prompt = {k: c / weight for k, c in change.items()}
        kept.append(pd.DataFrame({"group": group, "weight": weight, "loss": intact / weight, **by_prompt}))
        shown = pd.DataFrame(found[-1:], columns=COLUMNS[:13])
        print(shown.to_string(index=False, header=group == GROUPS[0]), flush=True)
    if values is not None:
        values.mkdir(parents=True, exist_ok=True)
        pd.concat(kept).to_csv(values / f"{name}.csv", index_label="prompt", float_format="%.6g")
    return found


def main(
    names: Annotated[list[str] | None, typer.Argument(help=", ".join(CASES))] = None,
    again: Annotated[bool, typer.Option("--again", help="measure models that have rows, too")] = False,
    values: Annotated[Path | None, typer.Option(help="a folder for every prompt's changes of the loss")] = None,
) -> None:
    if unknown := set(names or ()) - set(CASES):
        raise SystemExit(f"no model called {', '.join(sorted(unknown))}; there are {', '.join(CASES)}")
    torch.set_num_threads(1)
    for name in names or CASES:
        table = pd.read_csv(RESULTS) if RESULTS.exists() else pd.DataFrame(columns=COLUMNS)
        if name in set(table["model"]) and not again:
            print(f"{name}: has rows (--again measures it once more)")
            continue
        variable = CASES[name].variable
        if variable and not os.environ.get(variable):
            print(f"{name}: not measured, {variable} is not set")
            continue
        measured = pd.DataFrame(rows_of(name, values), columns=COLUMNS)
        table = pd.concat([table[table["model"] != name], measured]) if len(table) else measured
        order = {model: place for place, model in enumerate(CASES)}
        table = table.sort_values("model", key=lambda column: column.map(order), kind="stable")[list(COLUMNS)]
        table.to_csv(RESULTS, index=False, float_format="%.6g")


if __name__ == "__main__":
    typer.run(main)
