"""Do trained heads use the uniform direction? Its component is taken out of every query, and the loss measured.

    python examples/checkpoints/uniform_direction.py mgm capp-gpt-own lm-layernorm-books …   # tables/uniform-NAME.csv
    python examples/checkpoints/uniform_direction.py --runs fresh/runs        # models of `lab run fresh_seeds`
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

Which models. Exploratory, because their angles had been looked at: MGM, the bundled models (seed 0, the only one whose
weights are kept), CAPP-GPT. SmolLM2 has rotary positions, under which no one direction exists, and is left out.
Confirmatory: the `layernorm` models of `lab run fresh_seeds`, seeds 10 to 19, not trained when this was written;
unit the seed, Student's t; control: `scaling_only` and `none` of the same seeds. CIs of one model are over prompts.
Amended before the bundled models were run, for want of processor time: single heads of SINGLE alone.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
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
from ln_probe.analyses.probes.uniformity import entropy_ratio
from ln_probe.hooks import find_sites
from ln_probe.hooks.attention import visible_softmax
from ln_probe.hooks.model import attentions, hooks_on, run

TABLES = HERE / "tables"
NAMES = (
    "mgm",
    "capp-gpt-own",
    *(f"lm-{norm}-books" for norm in ("layernorm", "projection_only", "scaling_only", "none")),
)
SINGLE = ("mgm", "capp-gpt-own", "lm-layernorm-books")  # of these heads are edited one at a time, too
MARGINS = {"loss": 0.01, "entropy": 0.02}
DRAWS, SINGLE_DRAWS, SINGLE_PROMPTS, SEED = 4, 2, 16, 0
EDITS = ("removed", "redirected", "random_removed", "random_redirected")
CONTRASTS = {
    "removed": ("removed", "intact"),
    "removed, against random": ("removed", "random_removed"),
    "redirected": ("redirected", "intact"),
    "redirected, against random": ("redirected", "random_redirected"),
}
PRIMARY = ("removed", "removed, against random")


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
        """The length of q's component along a direction, with its sign [query head]."""
        return torch.einsum("qhi,hij,hj->qh", q, self.metric, direction)

    def share(self, q: Tensor) -> Tensor:
        """The part of |W q|² along the uniform direction [query head]."""
        return self.along(q, self.uniform) ** 2 / torch.einsum("qhi,hij,qhj->qh", q, self.metric, q)

    def edited(self, q: Tensor, edit: str, draw: int) -> Tensor:
        """Queries [query head d_head] under an edit; those of `removed` do not depend on the draw."""
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
    for site in find_sites(model):
        for layer in site.attention_layers:
            W = attn[layer].W_K.detach().double()
            W = W if site.gain is None else site.gain.double()[:, None] * W
            found[layer] = Directions.of(W, generator)
    return dict(sorted(found.items()))


@torch.no_grad()
def measure(
    model: Any,
    of: dict[int, Directions],
    row: Sequence[int],
    edit: str,
    draw: int = 0,
    only: tuple[int, int] | None = None,
) -> tuple[float, np.ndarray, np.ndarray]:
    """The summed loss of a prompt under an edit; entropy [layer head] and share along u [layer head], means of queries.

    Args:
        model, of: a model and its `directions`.
        row: token ids.
        edit, draw: "intact", or one of EDITS with a draw.
        only: layer and head that alone are edited.
    """
    shares, queries, keys = {}, {}, {}

    def ask(layer: int, _m: Any, _args: Any, _kwargs: Any, q: Tensor) -> Tensor | None:
        queries[layer] = own = q[0].double()
        shares[layer] = of[layer].share(own)[1:].mean(0)
        if edit == "intact" or (only is not None and only[0] != layer):
            return None
        changed = of[layer].edited(own, edit, draw)
        if only is not None:
            one = own.clone()
            one[:, only[1]] = changed[:, only[1]]
            changed = one
        queries[layer] = changed
        return changed.to(q)[None]

    def answer(layer: int, _m: Any, _args: Any, _kwargs: Any, k: Tensor) -> None:
        keys[layer] = k[0].double()

    points = [
        (f"blocks.{layer}.attn.hook_{x}", partial(f, layer)) for layer in of for x, f in (("q", ask), ("k", answer))
    ]
    tokens = torch.tensor([list(row)])
    with hooks_on([(model.hook_dict[name], hook) for name, hook in points]):
        logits = run(model, tokens, return_type="logits")[0, :-1].double()
    loss = float(torch.nn.functional.cross_entropy(logits, tokens[0, 1:], reduction="sum"))
    entropies = []
    for layer in of:
        scores = torch.einsum("qhi,khi->hqk", queries[layer], keys[layer]) / queries[layer].shape[-1] ** 0.5
        entropies.append(entropy_ratio(visible_softmax(scores))[:, 1:].mean(1).tolist())
    return loss, np.array(entropies), np.array([shares[layer].tolist() for layer in of])


def all_heads(model: Any, prompts: Sequence[Sequence[int]]) -> pd.DataFrame:
    """A row per prompt: `predicted` tokens, and the loss and entropy (sums over predicted tokens) intact and edited."""
    of, rows = directions(model), []
    for prompt, row in enumerate(prompts):
        count = len(row) - 1
        loss, entropy, share = measure(model, of, row, "intact")
        cells = {"prompt": prompt, "predicted": count, "share": share.mean() * count,
                 "loss_intact": loss, "entropy_intact": entropy.mean() * count}  # fmt: skip
        for edit in EDITS:
            draws = [measure(model, of, row, edit, draw) for draw in range(1 if edit == "removed" else DRAWS)]
            cells[f"loss_{edit}"] = float(np.mean([d[0] for d in draws]))
            cells[f"entropy_{edit}"] = float(np.mean([d[1].mean() for d in draws])) * count
        rows.append(cells)
    return pd.DataFrame(rows)


def single_heads(model: Any, prompts: Sequence[Sequence[int]]) -> pd.DataFrame:
    """A row per head: least angle, share along u, and changes with its own queries alone edited."""
    of = directions(model)
    chosen = [prompts[i] for i in np.linspace(0, len(prompts) - 1, min(SINGLE_PROMPTS, len(prompts))).astype(int)]
    weight = np.array([len(row) - 1 for row in chosen], float)
    intact = [measure(model, of, row, "intact") for row in chosen]
    rows = []
    for place, (layer, each) in enumerate(of.items()):
        for head in range(len(each.uniform)):
            cells = {"layer": layer, "head": head, "least_angle_deg": float(each.least_angle[head]),
                     "share": np.average([i[2][place, head] for i in intact], weights=weight),
                     "even_share": 1 / each.uniform.shape[-1],
                     "entropy": np.average([i[1][place, head] for i in intact], weights=weight)}  # fmt: skip
            for edit in ("removed", "random_removed"):
                draws = range(1 if edit == "removed" else SINGLE_DRAWS)
                got = [[measure(model, of, row, edit, d, (layer, head)) for d in draws] for row in chosen]
                loss = np.array([np.mean([g[0] for g in some]) - i[0] for some, i in zip(got, intact, strict=True)])
                change = [
                    np.mean([g[1][place, head] for g in some]) - i[1][place, head]
                    for some, i in zip(got, intact, strict=True)
                ]
                cells[f"loss_{edit}"] = loss.sum() / weight.sum()
                cells[f"entropy_{edit}"] = np.average(change, weights=weight)
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
    for norm in ("layernorm", "projection_only", "scaling_only", "none"):
        tables = [pd.read_csv(p) for p in sorted(TABLES.glob(f"uniform-fresh/{norm}-seed*.csv"))]
        if len(tables) > 1:
            share = float(np.mean([t["share"].sum() / t["predicted"].sum() for t in tables]))
            rows += [{"model": f"fresh {norm}", "share": share, **each} for each in over_seeds(tables)]
    made = pd.DataFrame(rows)
    made.to_csv(TABLES / "uniform-summary.csv", index=False, float_format="%.6g")
    print(made.to_string())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(NAMES))
    parser.add_argument("--runs", type=Path, help="folder of runs of `ln-probe lab run fresh_seeds`")
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
        (TABLES / "uniform-fresh").mkdir(exist_ok=True)
        for folder in sorted(p.parent for p in args.runs.glob("*/model.safetensors")):
            if not (TABLES / f"uniform-fresh/{folder.name}.csv").exists():
                model = ln_probe.load_model(folder)
                measured(f"fresh/{folder.name}", model, books(model, 128), single=False)
                print(folder.name, flush=True)
    summarize()


if __name__ == "__main__":
    main()
