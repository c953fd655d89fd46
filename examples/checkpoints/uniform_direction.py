"""Do trained heads use the uniform direction? Its component is taken out of every query, and the loss measured.

    python examples/checkpoints/uniform_direction.py mgm capp-gpt-own lm-layernorm-books …   # tables/uniform-NAME.csv
    python examples/checkpoints/uniform_direction.py --runs fresh/runs        # models of `lab run fresh_seeds`
    python examples/checkpoints/uniform_direction.py --runs long/runs --trained fresh-long    # of `fresh_seeds_long`
    python examples/checkpoints/uniform_direction.py --summary                # tables/uniform-{summary,fresh}.csv

Registered before its first run (the commit that added this file). Question: Brody, Alon & Yahav (2023) say that
projection lets a head attend uniformly through the all-ones direction. Do trained heads?

Directions. A query q reads W q of a norm's normalized output, W = diag(gain) W_K of its head. With projection a q with
W q along 1 attends uniformly. W has fewer columns than rows, so what a head has is the direction u that comes nearest:
u = (W'W)^-1 W'1, at the smallest angle to 1 that any of its queries can have (`least_angle`). Components are measured
in the length |W q|, which does not depend on the basis of the head space; without its component along u, W q is exactly
orthogonal to 1. `share` is the part of |W q|² along u; a direction drawn evenly has 1/d_head on average.

Edits, each of all queries of all heads at once:
    removed          q without its component along u
    redirected       that component replaced by one of the same length along a random direction
    random_removed   a component of the same length taken off q along a random direction (the control of `removed`)
    random_redirected  such a component moved to another random direction (the control of `redirected`)
`redirected` is there because of a law: where u is exactly uniform, `removed` changes no score at all.
Random directions are even in the head's key space (in the length |W q|); DRAWS draws, of which means are taken.

Outcomes. Change of the loss, nats/token, and of normalized entropy (mean over heads and over queries that see more than
one key). Primary contrasts, of models with projection: `removed` minus intact, and `removed` minus `random_removed`, on
both outcomes. Hypothesis: trained heads make no use of the direction, so both are equivalent to zero: the 90 % CI lies
within ±0.01 nats and ±0.02 of entropy (two one-sided tests at 5 %). Use would be a loss that rises, and an entropy that
falls, more than under `random_removed` (95 % CI beyond 0). Contrasts of `redirected`, of single heads, and of models
without projection (the control, in which u is a direction like others) are exploratory.

Which models. Exploratory, because their angles had been seen: MGM, the bundled models (seed 0, the only one whose
weights are kept), CAPP-GPT. SmolLM2 has rotary positions, under which no one direction exists, and is left out.
Confirmatory: the `layernorm` models of `lab run fresh_seeds`, seeds 10 to 19, not trained when this was written;
unit the seed, Student's t; control: `scaling_only` and `none` of the same seeds. CIs of one model are over prompts.
Amended before the bundled models were run, for want of processor time: single heads of SINGLE alone.
Added after all of these, and before it was run: the same analysis of the `layernorm` models of `lab run
fresh_seeds_long` (seeds 20 to 29, trained five times as long on twice as much a step), confirmatory, because the models
above attend nearly uniformly after their 400 steps. Same hypothesis, contrasts, margins and controls.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from measure import CASES, HERE, SOURCES, books, load
from scipy import stats  # type: ignore[import-untyped]
from torch import Tensor

import ln_probe
from ln_probe.analyses.probes.statistics import infer_mean
from ln_probe.hooks import find_norms
from ln_probe.hooks.model import attentions, by_head, hooks_on, run

TABLES = HERE / "tables"
NAMES = (
    "mgm",
    "capp-gpt-own",
    *(f"lm-{norm}-books" for norm in ("layernorm", "projection_only", "scaling_only", "none")),
)
SINGLE = ("mgm", "capp-gpt-own", "lm-layernorm-books")  # of these heads are edited one at a time, too
CONTROLS = ("lm-scaling_only-books", "lm-none-books")  # without projection before attention
MARGINS = {"loss": 0.01, "entropy": 0.02}
DRAWS, SINGLE_DRAWS, SINGLE_PROMPTS, SEED = 4, 2, 16, 0
TOGETHER = 16  # prompts in a forward pass
EDITS = ("removed", "redirected", "random_removed", "random_redirected")
CONTRASTS = {
    "removed": ("removed", "intact"),
    "removed, against random": ("removed", "random_removed"),
    "redirected": ("redirected", "intact"),
    "redirected, against random": ("redirected", "random_redirected"),
}
PRIMARY = ("removed", "removed, against random")
TRAINED = ("fresh", "fresh-long")  # sets of seeds: of `lab run fresh_seeds`, of `fresh_seeds_long`


@dataclass(frozen=True, eq=False)
class Directions:
    """Of one layer: the uniform direction of each head, and random ones. All of length 1 under the metric.

    Attributes:
        metric: W'W [head d_head d_head].
        uniform: u [head d_head].
        random: [draw 2 head d_head].
        least_angle: of W u to 1, in degrees [head].
    """

    metric: Tensor
    uniform: Tensor
    random: Tensor
    least_angle: Tensor

    @classmethod
    def of(cls, W: Tensor, generator: torch.Generator) -> Directions:
        """From diag(gain) W_K [head d_model d_head], float64."""
        metric, ones = W.mT @ W, W.sum(1)
        u = torch.linalg.solve(metric, ones)
        cosine = (u * ones).sum(-1).clamp_min(0).sqrt() / W.shape[1] ** 0.5
        values, vectors = torch.linalg.eigh(metric)
        drawn = torch.randn(DRAWS, 2, *u.shape, generator=generator, dtype=torch.float64)
        # (even on the sphere of the metric: metric^(-1/2) of a direction that is even on the unit sphere)
        random = torch.einsum("hij,hj,hkj,cphk->cphi", vectors, values.rsqrt(), vectors, drawn)
        unit = partial(_unit, metric)
        return cls(metric, unit(u), unit(random), torch.rad2deg(torch.arccos(cosine.clamp_max(1))))

    def along(self, q: Tensor, direction: Tensor) -> Tensor:
        """The length of q's component along a direction, with its sign [… head]."""
        return torch.einsum("...hi,hij,hj->...h", q, self.metric, direction)

    def share(self, q: Tensor) -> Tensor:
        """The part of |W q|² along the uniform direction [… head]."""
        return self.along(q, self.uniform) ** 2 / torch.einsum("...hi,hij,...hj->...h", q, self.metric, q)

    def edited(self, q: Tensor, edit: str, draw: int) -> Tensor:
        """Queries [… head d_head] under an edit; those of `removed` do not depend on the draw."""
        length = self.along(q, self.uniform)
        one, other = self.random[draw]
        if edit in ("removed", "redirected"):
            q = q - length[..., None] * self.uniform
        else:
            away = length.abs() * self.along(q, one).sign()
            q = q - away[..., None] * one
        return q + length.abs()[..., None] * other if edit.endswith("redirected") else q


def _unit(metric: Tensor, v: Tensor) -> Tensor:
    return v / torch.einsum("...hi,hij,...hj->...h", v, metric, v).sqrt()[..., None]


def directions(model: Any) -> dict[int, Directions]:
    """Of every layer whose attention reads a norm."""
    generator = torch.Generator().manual_seed(SEED)
    attn = attentions(model)
    found = {}
    for site in find_norms(model):
        for layer in site.attention_layers:
            W = attn[layer].W_K.detach().double()
            W = W if site.gain is None else site.gain.double()[:, None] * W
            found[layer] = Directions.of(W, generator)
    return dict(sorted(found.items()))


@torch.no_grad()
def measure(
    model: Any,
    of: dict[int, Directions],
    rows: Sequence[Sequence[int]],
    edit: str,
    draw: int = 0,
    only: tuple[int, int] | None = None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The summed loss [row] of prompts under an edit; entropy and share along u [row layer head], means of queries.

    Args:
        model, of: a model and its `directions`.
        rows: token ids, of equal length.
        edit, draw: "intact", or one of EDITS with a draw.
        only: layer and head that alone are edited.
    """
    shares, queries, keys = {}, {}, {}

    def ask(layer: int, _m: Any, _args: Any, _kwargs: Any, q: Tensor) -> Tensor | None:
        queries[layer] = own = by_head(q, len(of[layer].uniform)).double()
        shares[layer] = of[layer].share(own)[:, 1:].mean(1)
        if edit == "intact" or (only is not None and only[0] != layer):
            return None
        changed = of[layer].edited(own, edit, draw)
        if only is not None:
            one = own.clone()
            one[:, :, only[1]] = changed[:, :, only[1]]
            changed = one
        queries[layer] = changed
        return changed.to(q).reshape(q.shape)

    def answer(layer: int, _m: Any, _args: Any, _kwargs: Any, k: Tensor) -> None:
        keys[layer] = by_head(k, len(of[layer].uniform)).float()

    points = [
        (f"blocks.{layer}.attn.hook_{x}", partial(f, layer)) for layer in of for x, f in (("q", ask), ("k", answer))
    ]
    tokens = torch.tensor([list(row) for row in rows])
    with hooks_on([(model.hook_dict[name], hook) for name, hook in points]):
        logits = run(model, tokens, return_type="logits")[:, :-1]
    losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1).double(), tokens[:, 1:].flatten(), reduction="none")
    entropies = []
    for layer in of:
        scores = torch.einsum("bqhi,bkhi->bhqk", queries[layer].float(), keys[layer]) / queries[layer].shape[-1] ** 0.5
        entropies.append(entropy_ratios(scores)[..., 1:].double().mean(-1))
    each = (torch.stack(list(x), 1).numpy() for x in (entropies, [shares[layer] for layer in of]))
    return losses.view(len(rows), -1).sum(1).numpy(), *each


def entropy_ratios(scores: Tensor) -> Tensor:
    """Entropy of causal attention over the log of visible keys, of scores [… query key]: log sum exp s - mean of s.

    (In float32 and few steps: most of the time goes here. To 1e-5 that of `uniformity.entropy_ratio`.)
    """
    count = torch.arange(1, scores.shape[-1] + 1, dtype=scores.dtype)
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    top = scores.masked_fill(hidden, -torch.inf).amax(-1, keepdim=True)
    scores = (scores - top).masked_fill_(hidden, -torch.inf)
    weight = scores.exp()
    total = weight.sum(-1)
    mean = weight.mul_(scores.masked_fill_(hidden, 0.0)).sum(-1) / total
    return (total.log() - mean) / count.log()


def alike(prompts: Sequence[Sequence[int]]) -> Iterator[list[int]]:
    """Numbers of prompts of equal length, at most TOGETHER at a time."""
    lengths: dict[int, list[int]] = {}
    for number, row in enumerate(prompts):
        lengths.setdefault(len(row), []).append(number)
    for numbers in lengths.values():
        yield from (numbers[i : i + TOGETHER] for i in range(0, len(numbers), TOGETHER))


def all_heads(model: Any, prompts: Sequence[Sequence[int]]) -> pd.DataFrame:
    """A row per prompt: `predicted` tokens, and the loss and entropy (sums over predicted tokens) intact and edited."""
    of, found = directions(model), []
    for numbers in alike(prompts):
        rows = [prompts[number] for number in numbers]
        count = len(rows[0]) - 1
        loss, entropy, share = measure(model, of, rows, "intact")
        cells = {"prompt": numbers, "predicted": count, "share": share.mean((1, 2)) * count,
                 "loss_intact": loss, "entropy_intact": entropy.mean((1, 2)) * count}  # fmt: skip
        for edit in EDITS:
            draws = [measure(model, of, rows, edit, draw) for draw in range(1 if edit == "removed" else DRAWS)]
            cells[f"loss_{edit}"] = np.mean([d[0] for d in draws], axis=0)
            cells[f"entropy_{edit}"] = np.mean([d[1].mean((1, 2)) for d in draws], axis=0) * count
        found.append(pd.DataFrame(cells))
    return pd.concat(found).sort_values("prompt", ignore_index=True)


def single_heads(model: Any, prompts: Sequence[Sequence[int]]) -> pd.DataFrame:
    """A row per head: least angle, share along u, and changes with its own queries alone edited."""
    of = directions(model)
    chosen = [prompts[i] for i in np.linspace(0, len(prompts) - 1, min(SINGLE_PROMPTS, len(prompts))).astype(int)]
    groups = [[chosen[number] for number in numbers] for numbers in alike(chosen)]
    weight = np.array([len(row) - 1 for rows in groups for row in rows], float)

    def every(*edit: Any) -> list[np.ndarray]:
        """Loss, entropy and share of all chosen prompts."""
        measured = [measure(model, of, rows, *edit) for rows in groups]
        return [np.concatenate(each) for each in zip(*measured, strict=True)]

    intact = every("intact")
    rows = []
    for place, (layer, each) in enumerate(of.items()):
        for head in range(len(each.uniform)):
            cells = {"layer": layer, "head": head, "least_angle_deg": float(each.least_angle[head]),
                     "share": np.average(intact[2][:, place, head], weights=weight),
                     "even_share": 1 / each.uniform.shape[-1],
                     "entropy": np.average(intact[1][:, place, head], weights=weight)}  # fmt: skip
            for edit in ("removed", "random_removed"):
                draws = range(1 if edit == "removed" else SINGLE_DRAWS)
                got = [every(edit, draw, (layer, head)) for draw in draws]
                loss, entropy = (np.mean([g[i] for g in got], axis=0) - intact[i] for i in (0, 1))
                cells[f"loss_{edit}"] = loss.sum() / weight.sum()
                cells[f"entropy_{edit}"] = np.average(entropy[:, place, head], weights=weight)
            rows.append(cells)
    return pd.DataFrame(rows)


def contrasts(rows: pd.DataFrame) -> Iterator[dict[str, Any]]:
    """Every contrast of one model with its CI over prompts, from `all_heads`."""
    weight = rows["predicted"].to_numpy(float)
    for outcome, margin in MARGINS.items():
        for contrast, (edit, reference) in CONTRASTS.items():
            change = (rows[f"{outcome}_{edit}"] - rows[f"{outcome}_{reference}"]).to_numpy(float)
            found = infer_mean(change, weight)
            mean, intact = change.sum() / weight.sum(), rows[f"{outcome}_intact"].sum() / weight.sum()
            row = _verdict(outcome, contrast, mean, found.low, found.high, found.bound, margin)
            yield row | {"units": len(rows), "intact": intact}


def over_seeds(tables: Sequence[pd.DataFrame]) -> Iterator[dict[str, Any]]:
    """Every contrast of several seeds with Student's t, from a table of `all_heads` for each."""
    for outcome, margin in MARGINS.items():
        for contrast, (edit, reference) in CONTRASTS.items():
            values = np.array([
                (t[f"{outcome}_{edit}"] - t[f"{outcome}_{reference}"]).sum() / t["predicted"].sum() for t in tables
            ])  # fmt: skip
            error = values.std(ddof=1) / len(values) ** 0.5
            t95, t90 = (float(stats.t.ppf(1 - tail, len(values) - 1)) * error for tail in (0.025, 0.05))
            center = float(values.mean())
            intact = np.mean([t[f"{outcome}_intact"].sum() / t["predicted"].sum() for t in tables])
            yield _verdict(outcome, contrast, center, center - t95, center + t95, abs(center) + t90, margin) | {
                "units": len(values), "intact": float(intact),
            }  # fmt: skip


def _verdict(
    outcome: str, contrast: str, change: float, low: float, high: float, bound: float, margin: float
) -> dict[str, Any]:
    return {
        "outcome": outcome, "contrast": contrast, "family": "primary" if contrast in PRIMARY else "exploratory",
        "change": change, "low": low, "high": high, "bound": bound, "margin": margin, "equivalent": bound < margin,
    }  # fmt: skip


def measured(name: str, model: Any, prompts: Sequence[Sequence[int]], *, single: bool = True) -> None:
    """Write the tables of one model, and its prompts for `second_way.py`."""
    (TABLES / "tokens").mkdir(exist_ok=True)
    source = "books" if "lm-" in name or "fresh" in name else name  # (those models share their tokenizer)
    (TABLES / "tokens" / f"{source}.json").write_text(json.dumps([list(map(int, row)) for row in prompts]) + "\n")
    all_heads(model, prompts).to_csv(TABLES / f"uniform-{name}.csv", index=False, float_format="%.7g")
    if single:
        single_heads(model, prompts).to_csv(TABLES / f"uniform-heads-{name}.csv", index=False, float_format="%.6g")


def summarize() -> None:
    """tables/uniform-summary.csv: a row per model and contrast; of fresh seeds, per norm and contrast."""
    rows = []
    for name in NAMES:
        if (path := TABLES / f"uniform-{name}.csv").is_file():
            table = pd.read_csv(path)
            share = table["share"].sum() / table["predicted"].sum()
            rows += [{"model": name, "share": share, **each} for each in contrasts(table)]
    rows = [row if row["model"] not in CONTROLS else row | {"family": "control"} for row in rows]
    for trained, norm in product(TRAINED, ("layernorm", "projection_only", "scaling_only", "none")):
        tables = [pd.read_csv(p) for p in sorted(TABLES.glob(f"uniform-{trained}/{norm}-seed*.csv"))]
        if len(tables) > 1:
            share = float(np.mean([t["share"].sum() / t["predicted"].sum() for t in tables]))
            found = [{"model": f"{trained} {norm}", "share": share, **each} for each in over_seeds(tables)]
            family = {"projection_only": "exploratory"}.get(norm, "control")  # confirmatory: `layernorm` alone
            rows += found if norm == "layernorm" else [row | {"family": family} for row in found]
    made = pd.DataFrame(rows)
    made.to_csv(TABLES / "uniform-summary.csv", index=False, float_format="%.6g")
    print(made.to_string())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(NAMES))
    parser.add_argument("--runs", type=Path, help="folder of runs of `ln-probe lab run fresh_seeds`")
    parser.add_argument("--trained", choices=TRAINED, default=TRAINED[0], help="which experiment's runs they are")
    parser.add_argument("--summary", action="store_true", help="only make the summary again")
    args = parser.parse_args()
    if unknown := set(args.names) - set(NAMES):
        parser.error(f"no model called {', '.join(sorted(unknown))}; there are {', '.join(NAMES)}")
    torch.set_num_threads(1)
    for name in args.names:
        case = CASES[name]
        model = load(case)
        measured(name, model, SOURCES[case.prompts](model, case.tokens), single=name in SINGLE)
    if args.runs:
        (TABLES / f"uniform-{args.trained}").mkdir(exist_ok=True)
        for folder in sorted(p.parent for p in args.runs.glob("*/model.safetensors")):
            if not (TABLES / f"uniform-{args.trained}/{folder.name}.csv").exists():
                model = ln_probe.load_model(folder)
                measured(f"{args.trained}/{folder.name}", model, books(model, 128), single=False)
                print(folder.name, flush=True)
    summarize()


if __name__ == "__main__":
    main()
