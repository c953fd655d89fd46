"""Does linearizing norms make attribution patching more faithful? Estimates beside exact activation patching.

    python examples/checkpoints/attribution_patching.py lm-layernorm mgm capp-gpt   # tables/patching-NAME.csv
    python examples/checkpoints/attribution_patching.py --summary                   # tables/patching-summary.csv

Registered before its first run (the commit that added this file).

Patching. Of a pair of prompts of equal length, `clean` and `corrupt`, a node of the corrupt run takes its activation
from the clean run; its exact effect is the change of m = logit(a) - logit(b) at the last position. The estimate of
attribution patching (Nanda 2023; Syed, Rager & Conmy 2023) is the gradient of m in the corrupt run times the change of
the activation; `linearized` is the same with every norm's sigma held while the gradient is taken
(`ln_probe.hooks.linearized`).

Nodes. `heads`: the output z of one head, at all positions. `positions`: the residual stream before one block at one
position. `paths`: the output of one head, as far as it reaches m through one later component alone and directly: the
head of the last block whose exact effect in that pair is largest. All other heads and all MLPs keep their corrupt
outputs. Nodes whose activation is the same in both runs are left out.

Prompts, 48 pairs per model. `lm-layernorm`: induction. 24 random tokens twice, without the last; in the corrupt prompt
the last token of the first copy is another one; a and b are the two tokens. `mgm`, `capp-gpt`: the model's own
sequences (CAPP-GPT: its plans for drawn parts) in pairs, cut to the length of the shorter (48 at most) and then further
until their most likely next tokens a and b differ; pairs in which they never do are left out.

Amended before MGM was run, for want of processor time: 36 pairs and 16 tokens at most for MGM.

Outcomes, per pair: Spearman's rank correlation of estimates with exact effects over nodes, and the relative error
sum |estimate - exact| / sum |exact|. Primary contrasts: the rank correlation of `linearized` minus `standard` for
`heads` and for `positions` in the three models (six tests, Holm), CIs over pairs. Hypothesis: linearizing raises it.
Equivalence margin: 0.02 (the 90 % CI within it). Relative errors and paths are exploratory.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import plans
import torch
from measure import CASES, HERE, SOURCES, load
from scipy import stats  # type: ignore[import-untyped]
from torch import Tensor

from ln_probe.analyses.probes.statistics import holm, infer_mean
from ln_probe.hooks import linearized
from ln_probe.hooks.model import blocks, by_head, head_count, hooks_on, run, vocabulary_size

TABLES = HERE / "tables"
NAMES = ("lm-layernorm", "mgm", "capp-gpt")
PAIRS, LONGEST, REPEATED, SEED = 48, 48, 24, 0
ROWS = 64  # patched runs that share a forward pass
MARGIN = 0.02
KINDS = ("heads", "positions", "paths")
PRIMARY = ("heads", "positions")
ESTIMATES = ("standard", "linearized")


@dataclass(frozen=True, eq=False)
class Pair:
    """Token ids [pos] of both prompts, and the tokens whose logits are compared."""

    clean: Tensor
    corrupt: Tensor
    a: int
    b: int

    def metric(self, logits: Tensor) -> Tensor:
        """The difference of logits at the last position [batch]."""
        return logits[:, -1, self.a] - logits[:, -1, self.b]


def induction(model: Any) -> list[Pair]:
    """A random sequence repeated; in the corrupt prompt its first copy ends with another token."""
    generator = torch.Generator().manual_seed(SEED)
    found = []
    for _ in range(PAIRS):
        drawn = 1 + torch.randperm(vocabulary_size(model) - 1, generator=generator)[: REPEATED + 1]  # (0: the boundary)
        row, other = drawn[:-1], int(drawn[-1])
        clean = torch.cat([torch.tensor([0]), row, row[:-1]])
        corrupt = clean.clone()
        corrupt[REPEATED] = other
        found.append(Pair(clean, corrupt, int(row[-1]), other))
    return found


@torch.no_grad()
def paired(model: Any, rows: Sequence[Sequence[int]], longest: int = LONGEST, pairs: int = PAIRS) -> list[Pair]:
    """Neighbours among prompts, cut until the model expects different tokens after them."""
    found = []
    for one, other in zip(rows[::2], rows[1::2], strict=False):
        for length in range(min(len(one), len(other), longest), 2, -1):
            clean, corrupt = torch.tensor(one[:length]), torch.tensor(other[:length])
            a, b = (int(run(model, row[None], return_type="logits")[0, -1].argmax()) for row in (clean, corrupt))
            if a != b:
                found.append(Pair(clean, corrupt, a, b))
                break
    return found[:pairs]


def _mgm(model: Any) -> list[Pair]:
    rows = SOURCES["own"](model, 128) + SOURCES["own"](model, 128, others=True)
    return paired(model, rows, 16, 36)


def _capp_gpt(model: Any) -> list[Pair]:
    return paired(model, plans.draw(model, 4 * PAIRS, SEED))


SOURCE: Mapping[str, tuple[str, Callable[[Any], list[Pair]]]] = {
    "lm-layernorm": ("lm-layernorm-books", induction),
    "mgm": ("mgm", _mgm),
    "capp-gpt": ("capp-gpt-own", _capp_gpt),
}


class Points:
    """The hook points of a model, by kind and layer."""

    def __init__(self, model: Any) -> None:
        layers = range(len(blocks(model)))
        name = {"z": "attn.hook_z", "mlp": "hook_mlp_out", "resid": "hook_resid_pre"}
        self.of = {(kind, i): model.hook_dict[f"blocks.{i}.{leaf}"] for kind, leaf in name.items() for i in layers}
        self.layers = len(layers)
        self.heads = {i: head_count(model, i) for i in layers}

    def hooks(self, kind: str, hook: Callable[[int, Tensor], Tensor | None]) -> list[tuple[Any, Any]]:
        """`hook` of a layer and an activation, at all points of a kind; z by head."""

        def called(layer: int, _m: Any, _args: Any, _kwargs: Any, x: Tensor) -> Tensor | None:
            found = hook(layer, by_head(x, self.heads[layer]) if kind == "z" else x)
            return None if found is None else found.reshape(x.shape)

        return [(self.of[kind, i], partial(called, i)) for i in range(self.layers)]


@torch.no_grad()
def activations(model: Any, points: Points, tokens: Tensor) -> tuple[dict[tuple[str, int], Tensor], Tensor]:
    """Every activation of a run [pos …] by kind and layer, and its logits."""
    kept: dict[tuple[str, int], Tensor] = {}

    def keep(kind: str, layer: int, x: Tensor) -> None:
        kept[kind, layer] = x[0].clone()

    with hooks_on([h for kind in ("z", "mlp", "resid") for h in points.hooks(kind, partial(keep, kind))]):
        logits = run(model, tokens[None], return_type="logits")
    return kept, logits


def gradients(model: Any, points: Points, pair: Pair, *, hold: bool) -> dict[tuple[str, int], Tensor]:
    """Of the metric in the corrupt run, at every z and residual stream; with `hold` with every norm linearized."""
    shifts: dict[tuple[str, int], Tensor] = {}

    def shifted(kind: str, layer: int, x: Tensor) -> Tensor:
        shifts[kind, layer] = torch.zeros_like(x, requires_grad=True)
        return x + shifts[kind, layer]

    with linearized(model) if hold else nullcontext(), torch.enable_grad():
        with hooks_on([h for kind in ("z", "resid") for h in points.hooks(kind, partial(shifted, kind))]):
            value = pair.metric(model(pair.corrupt[None], return_type="logits"))[0]
        found = torch.autograd.grad(value, list(shifts.values()))
    return {key: g[0] for key, g in zip(shifts, found, strict=True)}


@torch.no_grad()
def patched(model: Any, points: Points, pair: Pair, nodes: Sequence[tuple[str, int, int, Tensor]]) -> list[float]:
    """The metric of the corrupt run with one node replaced, for each (kind, layer, head or position, activation)."""
    found: list[float] = []
    for first in range(0, len(nodes), ROWS):
        some = nodes[first : first + ROWS]

        def put(kind: str, layer: int, x: Tensor, some: Any = some) -> Tensor:
            x = x.clone()
            for row, (node, at, index, value) in enumerate(some):
                if (node, at) == (kind, layer):
                    x[(row, slice(None), index) if kind == "z" else (row, index)] = value
            return x

        with hooks_on([h for kind in ("z", "resid") for h in points.hooks(kind, partial(put, kind))]):
            logits = run(model, pair.corrupt.expand(len(some), -1), return_type="logits")
        found += pair.metric(logits).tolist()
    return found


def path_gradients(
    model: Any, points: Points, pair: Pair, receiver: tuple[int, int], weight: Tensor, *, hold: bool
) -> dict[int, Tensor]:
    """Of weight · (the receiver's z) in the corrupt run, at every earlier z; MLPs and other heads are held."""
    shifts: dict[int, Tensor] = {}
    received: list[Tensor] = []

    def held(layer: int, z: Tensor) -> Tensor:
        if layer == receiver[0]:
            received.append((z[0, :, receiver[1]] * weight).sum())
        shifts[layer] = torch.zeros_like(z, requires_grad=True)
        return z.detach() + shifts[layer]

    with linearized(model) if hold else nullcontext(), torch.enable_grad():
        with hooks_on([*points.hooks("z", held), *points.hooks("mlp", lambda _layer, x: x.detach())]):
            model(pair.corrupt[None], return_type="logits")
        earlier = [layer for layer in shifts if layer < receiver[0]]
        found = torch.autograd.grad(received[0], [shifts[layer] for layer in earlier])
    return {layer: g[0] for layer, g in zip(earlier, found, strict=True)}


@torch.no_grad()
def received(
    model: Any, points: Points, pair: Pair, corrupt: Mapping[Any, Tensor], receiver: tuple[int, int],
    sources: Sequence[tuple[int, int, Tensor]],
) -> list[Tensor]:  # fmt: skip
    """The receiver's z [pos d_head] with one earlier head's z replaced, all else held, for each (layer, head, z)."""
    seen: list[Tensor] = []
    for first in range(0, len(sources), ROWS):
        some = sources[first : first + ROWS]

        def hold(layer: int, z: Tensor, some: Any = some) -> Tensor:
            if layer == receiver[0]:
                seen.extend(z[:, :, receiver[1]].clone())
            z = corrupt["z", layer].expand(len(some), *corrupt["z", layer].shape).clone()
            for row, (at, head, value) in enumerate(some):
                if at == layer:
                    z[row, :, head] = value
            return z

        def mlp(layer: int, x: Tensor) -> Tensor:
            return corrupt["mlp", layer].expand_as(x)

        with hooks_on([*points.hooks("z", hold), *points.hooks("mlp", mlp)]):
            run(model, pair.corrupt.expand(len(some), -1), return_type="logits")
    return seen


def effects(model: Any, points: Points, pair: Pair) -> pd.DataFrame:
    """A row per node: `kind, layer, index, exact, standard, linearized`."""
    clean, _ = activations(model, points, pair.clean)
    corrupt, logits = activations(model, points, pair.corrupt)
    base = float(pair.metric(logits))
    nodes = []
    for (kind, layer), x in clean.items():
        if kind in ("z", "resid"):
            for index in range(x.shape[1] if kind == "z" else len(x)):
                mine = (slice(None), index) if kind == "z" else (index,)
                if not torch.equal(x[mine], corrupt[kind, layer][mine]):
                    nodes.append((kind, layer, index, x[mine], x[mine] - corrupt[kind, layer][mine], mine))
    exact = [value - base for value in patched(model, points, pair, [n[:4] for n in nodes])]
    slopes = {name: gradients(model, points, pair, hold=name == "linearized") for name in ESTIMATES}
    rows = [
        {"kind": "heads" if kind == "z" else "positions", "layer": layer, "index": index, "exact": value}
        | {name: float((g[kind, layer][mine] * change).sum()) for name, g in slopes.items()}
        for (kind, layer, index, _, change, mine), value in zip(nodes, exact, strict=True)
    ]
    table = pd.DataFrame(rows)
    last = table[(table["kind"] == "heads") & (table["layer"] == points.layers - 1)]
    receiver = (points.layers - 1, int(last["index"].iloc[int(last["exact"].abs().argmax())]))
    return pd.concat([table, paths(model, points, pair, clean, corrupt, base, receiver, slopes)], ignore_index=True)


def paths(
    model: Any, points: Points, pair: Pair, clean: Mapping[Any, Tensor], corrupt: Mapping[Any, Tensor], base: float,
    receiver: tuple[int, int], slopes: Mapping[str, Mapping[Any, Tensor]],
) -> pd.DataFrame:  # fmt: skip
    """The same of the paths from every earlier head through the receiver."""
    layer, head = receiver
    sources = [
        (at, index, clean["z", at][:, index])
        for at in range(layer)
        for index in range(clean["z", at].shape[1])
        if not torch.equal(clean["z", at][:, index], corrupt["z", at][:, index])
    ]
    made = received(model, points, pair, corrupt, receiver, sources)
    exact = [v - base for v in patched(model, points, pair, [("z", layer, head, z) for z in made])]
    found = {}
    for name, g in slopes.items():
        weight = g["z", layer][:, head]
        found[name] = path_gradients(model, points, pair, receiver, weight, hold=name == "linearized")
    return pd.DataFrame([
        {"kind": "paths", "layer": at, "index": index, "exact": value}
        | {name: float((g[at][:, index] * (z - corrupt["z", at][:, index])).sum()) for name, g in found.items()}
        for (at, index, z), value in zip(sources, exact, strict=True)
    ])  # fmt: skip


def agreement(nodes: pd.DataFrame) -> Iterator[dict[str, Any]]:
    """Of one pair, per kind of node: rank correlation and error of both estimates."""
    for kind, rows in nodes.groupby("kind", sort=False):
        size = rows["exact"].abs().sum()
        row: dict[str, Any] = {"kind": kind, "nodes": len(rows), "size": size}
        for name in ESTIMATES:
            row[f"rank_{name}"] = float(stats.spearmanr(rows["exact"], rows[name]).statistic)
            row[f"error_{name}"] = float((rows[name] - rows["exact"]).abs().sum() / size)
        yield row


def measured(name: str) -> pd.DataFrame:
    """A row per pair and kind of node."""
    case, source = SOURCE[name]
    model = load(CASES[case])
    points, rows, pairs = Points(model), [], source(model)
    (TABLES / "tokens").mkdir(exist_ok=True)  # (for `second_way.py`)
    held = [[p.clean.tolist(), p.corrupt.tolist(), p.a, p.b] for p in pairs]
    (TABLES / "tokens" / f"patching-{name}.json").write_text(json.dumps(held) + "\n")
    for number, pair in enumerate(pairs):
        both = [float(pair.metric(activations(model, points, x)[1])) for x in (pair.clean, pair.corrupt)]
        about = {"pair": number, "tokens": len(pair.clean), "clean": both[0], "corrupt": both[1]}
        rows += [about | row for row in agreement(effects(model, points, pair))]
    return pd.DataFrame(rows)


def summarize() -> pd.DataFrame:
    """Means over pairs, and `linearized` minus `standard`, with CIs over pairs."""
    rows = []
    for name in NAMES:
        if not (path := TABLES / f"patching-{name}.csv").is_file():
            continue
        for kind, pairs in pd.read_csv(path).groupby("kind", sort=False):
            one = np.ones(len(pairs))
            for outcome in ("rank", "error"):
                standard, held = (pairs[f"{outcome}_{e}"].to_numpy(float) for e in ESTIMATES)
                found = infer_mean(held - standard, one)
                primary = outcome == "rank" and kind in PRIMARY
                rows.append({
                    "model": name, "kind": kind, "outcome": outcome, "family": "primary" if primary else "exploratory",
                    "pairs": len(pairs), "nodes": pairs["nodes"].mean(), "standard": standard.mean(),
                    "linearized": held.mean(), "change": (held - standard).mean(), "low": found.low,
                    "high": found.high, "p": found.p, "bound": found.bound,
                    "equivalent": outcome == "rank" and found.bound < MARGIN,
                    "pairs_better": int(((held > standard) if outcome == "rank" else (held < standard)).sum()),
                })  # fmt: skip
    table = pd.DataFrame(rows)
    table["p_holm"] = np.nan
    primary = table["family"] == "primary"
    table.loc[primary, "p_holm"] = holm(table.loc[primary, "p"].to_numpy(float))
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(NAMES))
    parser.add_argument("--summary", action="store_true", help="only make the summary again")
    args = parser.parse_args()
    if unknown := set(args.names) - set(NAMES):
        parser.error(f"no model called {', '.join(sorted(unknown))}; there are {', '.join(NAMES)}")
    torch.set_num_threads(1)
    for name in args.names:
        measured(name).to_csv(TABLES / f"patching-{name}.csv", index=False, float_format="%.6g")
    table = summarize()
    table.to_csv(TABLES / "patching-summary.csv", index=False, float_format="%.6g")
    print(table.to_string())


if __name__ == "__main__":
    main()
