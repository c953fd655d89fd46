"""Published figures of two experiments and of the geometry, computed a second way that shares no code with ln_probe.

    python examples/checkpoints/second_way.py uniform MODEL…     # tables/uniform-*.csv
    python examples/checkpoints/second_way.py patching MODEL…    # tables/patching-*.csv
    python examples/checkpoints/second_way.py geometry CASE…     # tables/geometry/CASE.csv

PyTorch, NumPy and SciPy alone, and a GPT-2 written down here: weights are read from the checkpoint's own file, tokens
from tables/tokens, which the measuring scripts leave there. MODEL: mgm, capp-gpt, a bundled model, or a run of
`lab run fresh_seeds` as fresh/RUN=FOLDER. CASE: of `geometry.py`; MiniLM and SmolLM2 are Hugging Face's own models.
Prints the largest difference from the committed tables and appends it to tables/second-way-experiments.csv.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from scipy.optimize import linprog  # type: ignore[import-untyped]
from scipy.stats import spearmanr  # type: ignore[import-untyped]
from torch import Tensor

TABLES = Path(__file__).parent / "tables"
SHARED = Path(os.environ.get("LN_PROBE_SHARED", Path(__file__).parents[3] / "shared"))

Edit = Callable[[str, int, Tensor], Tensor]


class Gpt2:
    """Weights in float64, and a forward pass in which every q, z and residual stream may be replaced."""

    def __init__(self, folder: Path) -> None:
        config = json.loads((folder / ("lab.json" if (folder / "lab.json").exists() else "config.json")).read_text())
        if "model" in config:
            from safetensors.torch import load_file

            w = {k: v.double() for k, v in load_file(str(folder / "model.safetensors")).items()}
            self.embed, self.positions = w["embed.W_E"], w["pos_embed.W_pos"]
            self.final = w["ln_final.w"], w["ln_final.b"]
            self.out, self.b_out = w.get("unembed.W_U", self.embed.T), w.get("unembed.b_U")
            self.kind, self.tanh = config["model"]["norm"], "none"
            self.layers = []
            for i in range(config["model"]["n_layers"]):
                b = {k.removeprefix(f"blocks.{i}."): v for k, v in w.items() if k.startswith(f"blocks.{i}.")}
                heads = {x: (b[f"attn.W_{x}"], b[f"attn.b_{x}"]) for x in "QKV"}
                self.layers.append({
                    "ln1": (b["ln1.w"], b["ln1.b"], b.get("ln1.divisor")), "ln2": (b["ln2.w"], b["ln2.b"]), **heads,
                    "O": (b["attn.W_O"], b["attn.b_O"]), "in": (b["mlp.W_in"], b["mlp.b_in"]),
                    "out": (b["mlp.W_out"], b["mlp.b_out"]),
                })  # fmt: skip
            return
        if (folder / "model.safetensors").exists():
            from safetensors.torch import load_file

            w = load_file(str(folder / "model.safetensors"))
        else:
            w = torch.load(folder / "pytorch_model.bin", map_location="cpu", weights_only=True)
        w = {k.removeprefix("transformer."): v.double() for k, v in w.items() if v.is_floating_point()}
        self.embed, self.positions, self.out, self.b_out = w["wte.weight"], w["wpe.weight"], w["wte.weight"].T, None
        if "lm_head.weight" in w:
            self.out = w["lm_head.weight"].T
        self.final, self.kind, self.tanh = (w["ln_f.weight"], w["ln_f.bias"]), "layernorm", "tanh"
        d, n = config["n_embd"], config["n_head"]
        self.layers = []
        for i in range(config["n_layer"]):
            b = {k.removeprefix(f"h.{i}."): v for k, v in w.items() if k.startswith(f"h.{i}.")}
            qkv, bias = b["attn.c_attn.weight"].split(d, 1), b["attn.c_attn.bias"].split(d)
            heads = {
                x: (weight.view(d, n, -1).transpose(0, 1), c.view(n, -1))
                for x, weight, c in zip("QKV", qkv, bias, strict=True)
            }
            self.layers.append({
                "ln1": (b["ln_1.weight"], b["ln_1.bias"]), "ln2": (b["ln_2.weight"], b["ln_2.bias"]), **heads,
                "O": (b["attn.c_proj.weight"].view(n, -1, d), b["attn.c_proj.bias"]),
                "in": (b["mlp.c_fc.weight"], b["mlp.c_fc.bias"]),
                "out": (b["mlp.c_proj.weight"], b["mlp.c_proj.bias"]),
            })  # fmt: skip

    @staticmethod
    def norm(x: Tensor, affine: tuple[Tensor, ...], kind: str, held: bool) -> Tensor:
        if kind in ("layernorm", "projection_only"):
            x = x - x.mean(-1, keepdim=True)
        sigma = (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()
        if kind not in ("layernorm", "scaling_only"):
            return x / affine[2] * affine[0] + affine[1]
        return x / (sigma.detach() if held else sigma) * affine[0] + affine[1]

    def __call__(self, tokens: list[int], edit: Edit = lambda name, layer, x: x, held: bool = False) -> Tensor:
        x = self.embed[torch.tensor(tokens)] + self.positions[: len(tokens)]
        mask = torch.full((len(tokens),) * 2, -math.inf, dtype=torch.float64).triu(1)
        for i, of in enumerate(self.layers):
            x = edit("resid", i, x)
            y = self.norm(x, of["ln1"], self.kind, held)
            q, k, v = (torch.einsum("td,hdk->htk", y, of[n][0]) + of[n][1][:, None] for n in "QKV")
            q, k = edit("q", i, q), edit("k", i, k)
            pattern = edit("pattern", i, (q @ k.mT / math.sqrt(q.shape[-1]) + mask).softmax(-1))
            z = edit("z", i, pattern @ v)
            x = x + torch.einsum("htk,hkd->td", z, of["O"][0]) + of["O"][1]
            y = self.norm(x, of["ln2"], "layernorm", held)
            hidden = F.gelu(y @ of["in"][0] + of["in"][1], approximate=self.tanh)
            x = x + hidden @ of["out"][0] + of["out"][1]
        logits = self.norm(x, self.final, "layernorm", held) @ self.out
        return logits if self.b_out is None else logits + self.b_out


def tokens_of(name: str) -> list:
    found: list = json.loads((TABLES / "tokens" / f"{name}.json").read_text())
    return found


def column(table: str, **wanted: str) -> list[dict[str, str]]:
    with (TABLES / table).open() as file:
        return [row for row in csv.DictReader(file) if all(row[k] == v for k, v in wanted.items())]


# The uniform direction


def uniform(model: Gpt2, prompts: list[list[int]]) -> np.ndarray:
    """Per prompt: loss and mean normalized entropy, intact and with the component along u taken out of all queries."""
    planes = []
    for of in model.layers:
        W = of["ln1"][0][:, None] * of["K"][0]
        # the column space's vector nearest to 1, and the linear form q -> 1'Wq that must become 0
        u = torch.stack([torch.linalg.lstsq(w, torch.ones(len(w), 1, dtype=w.dtype)).solution[:, 0] for w in W])
        planes.append((u, W.sum(1)))
    rows = []
    with torch.no_grad():
        for row in prompts:
            cells = []
            for remove in (False, True):
                entropies: list[float] = []

                def edit(name: str, layer: int, x: Tensor, remove: bool = remove, into: list = entropies) -> Tensor:
                    if name == "q" and remove:
                        u, form = planes[layer]
                        part = torch.einsum("htk,hk->ht", x, form) / (u * form).sum(-1)[:, None]
                        return x - part[..., None] * u[:, None]
                    if name == "pattern":
                        p = x[:, 1:]
                        entropy = -torch.where(p > 0, p * p.log(), 0.0).sum(-1)
                        into.append(float((entropy / torch.arange(2, x.shape[1] + 1).log()).mean()))
                    return x

                logits = model(row, edit)
                loss = float(F.cross_entropy(logits[:-1], torch.tensor(row[1:]), reduction="sum"))
                cells += [loss / (len(row) - 1), float(np.mean(entropies))]
            rows.append(cells)
    return np.array(rows)


def compare_uniform(name: str, model: Gpt2, prompts: list[list[int]]) -> float:
    found = uniform(model, prompts)
    names = ("loss_intact", "entropy_intact", "loss_removed", "entropy_removed")
    kept = np.array([[float(r[c]) / float(r["predicted"]) for c in names] for r in column(f"uniform-{name}.csv")])
    weight = np.array([len(row) - 1 for row in prompts], float)
    change = weight @ (found[:, 2:] - found[:, :2]) / weight.sum()
    print(f"{name}: removed minus intact, loss {change[0]:+.5f} nats/token, entropy {change[1]:+.5f}")
    return float(np.abs(found - kept).max())


# Attribution patching


def effects(model: Gpt2, clean: list[int], corrupt: list[int], a: int, b: int) -> dict[str, np.ndarray]:
    """Of heads and of positions: rows of (exact, standard, linearized) over nodes that differ."""

    def metric(logits: Tensor) -> Tensor:
        return logits[-1, a] - logits[-1, b]

    kept: dict[tuple[str, int], Tensor] = {}

    def keep(name: str, layer: int, x: Tensor) -> Tensor:
        if name in ("z", "resid"):
            kept[name, layer] = x.detach()
        return x

    with torch.no_grad():
        model(clean, keep)
        of_clean = dict(kept)
        base = float(metric(model(corrupt, keep)))
        of_corrupt = dict(kept)
    slopes = []
    for held in (False, True):
        leaves: dict[tuple[str, int], Tensor] = {}

        def leaf(name: str, layer: int, x: Tensor, into: dict = leaves) -> Tensor:
            if name not in ("z", "resid"):
                return x
            into[name, layer] = torch.zeros_like(x, requires_grad=True)
            return x + into[name, layer]

        value = metric(model(corrupt, leaf, held))
        slopes.append(dict(zip(leaves, torch.autograd.grad(value, list(leaves.values())), strict=True)))
    found: dict[str, list[list[float]]] = {"heads": [], "positions": []}
    for (name, layer), new in of_clean.items():
        for index in range(len(new)):  # z: [head pos d_head]; resid: [pos d_model]
            change = new[index] - of_corrupt[name, layer][index]
            if not change.any():
                continue

            def put(at: str, i: int, x: Tensor, where=(name, layer), n: int = index, value=new[index]) -> Tensor:
                if (at, i) == where:
                    x = x.clone()
                    x[n] = value
                return x

            with torch.no_grad():
                exact = float(metric(model(corrupt, put))) - base
            found["heads" if name == "z" else "positions"].append(
                [exact, *(float((slope[name, layer][index] * change).sum()) for slope in slopes)]
            )
    return {kind: np.array(rows) for kind, rows in found.items()}


def compare_patching(name: str, model: Gpt2) -> float:
    worst = 0.0
    for number, (clean, corrupt, a, b) in enumerate(tokens_of(f"patching-{name}")):
        for kind, rows in effects(model, clean, corrupt, a, b).items():
            (kept,) = column(f"patching-{name}.csv", pair=str(number), kind=kind)
            ranks = [float(spearmanr(rows[:, 0], rows[:, i]).statistic) for i in (1, 2)]
            worst = max(
                worst,
                *(abs(r - float(kept[f"rank_{e}"])) for r, e in zip(ranks, ("standard", "linearized"), strict=True)),
            )
    return worst


# Geometry

HEADS = 16  # whose keys are judged by linear programs, evenly spread over the model
MUCH = 0.3  # of a query's attention: a sink

# Of one layer and prompt: gain times W_K [head d d_head] or None, q and k [head pos d_head], pattern [head query key].
Layer = tuple[Tensor | None, Tensor, Tensor, Tensor]


def in_hull(keys: np.ndarray) -> np.ndarray:
    """Which rows are a convex combination of the others, each by a linear program (HiGHS)."""
    keys = (keys - keys.mean(0)) / np.abs(keys - keys.mean(0)).max()
    found = []
    for i in range(len(keys)):
        others = np.delete(keys, i, 0)
        system = np.vstack([others.T, np.ones(len(others))])
        solved = linprog(np.zeros(len(others)), A_eq=system, b_eq=[*keys[i], 1.0], bounds=(0, None), method="highs")
        found.append(solved.status == 0)
    return np.array(found)


def of_gpt2(model: Gpt2, row: list[int]) -> list[Layer]:
    kept: dict[tuple[str, int], Tensor] = {}

    def keep(name: str, layer: int, x: Tensor) -> Tensor:
        kept[name, layer] = x
        return x

    model(row, keep)
    return [
        (of["ln1"][0][:, None] * of["K"][0], *(kept[name, i] for name in ("q", "k", "pattern")))
        for i, of in enumerate(model.layers)
    ]


def of_bert(model: Any, row: list[int]) -> list[Layer]:
    """Of a BERT: the norm that attention reads is the embeddings', or the output's of the layer before."""
    kept: dict[str, Tensor] = {}
    handles = [
        getattr(layer.attention.self, name).register_forward_hook(
            lambda _m, _a, out, key=f"{name} {i}": kept.__setitem__(key, out)
        )
        for i, layer in enumerate(model.encoder.layer)
        for name in ("query", "key")
    ]
    patterns = model(torch.tensor([row]), output_attentions=True).attentions
    for handle in handles:
        handle.remove()
    norms = [model.embeddings.LayerNorm, *(layer.output.LayerNorm for layer in model.encoder.layer)]
    found = []
    for i, (norm, layer, pattern) in enumerate(zip(norms, model.encoder.layer, patterns, strict=False)):
        heads = pattern.shape[1]
        W = layer.attention.self.key.weight.T * norm.weight[:, None]
        q, k = (kept[f"{name} {i}"][0].view(len(row), heads, -1).transpose(0, 1) for name in ("query", "key"))
        found.append((W.view(len(W), heads, -1).transpose(0, 1), q, k, pattern[0]))
    return found


def of_llama(model: Any, row: list[int]) -> list[Layer]:
    """Patterns alone: with an RMSNorm there is no angle, and as many dimensions as keys make all selectable."""
    nothing = torch.empty(0)
    return [(None, nothing, nothing, p[0]) for p in model(torch.tensor([row]), output_attentions=True).attentions]


@torch.no_grad()
def geometry(read: Callable[[list[int]], list[Layer]], rows: list[list[int]], *, causal: bool) -> dict[str, np.ndarray]:
    """By column of the table: a value for every (layer, head); NaN where it is not computed."""
    first = int(causal)  # (a causal query at position 0 has no choice)
    sums: dict[str, Any] = {"entropy_ratio": 0.0, "uniform_angle_deg": 0.0, "first_rate": 0.0}
    chosen, hulls = None, []
    queries = 0
    for row in rows:
        layers = read(row)
        pattern = torch.stack([layer[3] for layer in layers]).double()[:, :, first:]  # [layer head query key]
        count = torch.arange(2, len(row) + 1) if causal else torch.tensor([len(row)])
        entropy = torch.special.entr(pattern).sum(-1) / count.log()
        sums["entropy_ratio"] += entropy.sum(-1)
        sums["first_rate"] += (pattern[..., 0] > MUCH).double().sum(-1)
        queries += pattern.shape[2]
        angles, keys = [], []
        for W, q, k, _ in layers:
            if W is None:
                continue
            back = torch.einsum("hdk,htk->htd", W.double(), q[:, first:].double())
            cosine = back.sum(-1).abs() / back.norm(dim=-1) / back.shape[-1] ** 0.5
            angles.append(torch.rad2deg(cosine.clamp(max=1).acos()).sum(-1))
            keys += list(k.double().numpy())
        if angles:
            sums["uniform_angle_deg"] += torch.stack(angles)
            chosen = np.linspace(0, len(keys) - 1, min(HEADS, len(keys))).astype(int)
            hulls.append([in_hull(keys[i]) for i in chosen])
    found = {name: np.asarray(total / queries).ravel() for name, total in sums.items() if not isinstance(total, float)}
    if chosen is not None:
        share = np.full(len(found["entropy_ratio"]), np.nan)
        share[chosen] = [np.concatenate(of_head).mean() for of_head in zip(*hulls, strict=True)]
        found["unselectable_fraction"] = share
    return found


def compare_geometry(case: str) -> float:
    """The largest difference, angles in degrees among shares; each column's is printed."""
    name = next(n for n in ("minilm", "smollm2", "mgm", "capp-gpt", case.rpartition("-")[0]) if case.startswith(n))
    read: Callable[[list[int]], list[Layer]]
    if name == "minilm":
        from transformers import BertModel

        bert = BertModel.from_pretrained(os.environ["LN_PROBE_MINILM"], attn_implementation="eager").eval()
        read = partial(of_bert, bert)
    elif name == "smollm2":
        from transformers import AutoModelForCausalLM

        file = Path(os.environ["LN_PROBE_GGUF"])
        options = {"gguf_file": file.name, "attn_implementation": "eager", "dtype": torch.float32}
        llama = AutoModelForCausalLM.from_pretrained(file.parent, **options).eval()
        read = partial(of_llama, llama)
    else:
        read = partial(of_gpt2, Gpt2(FOLDERS.get(name, BUNDLED / name)))
    found = geometry(read, tokens_of(f"geometry-{case}"), causal=name != "minilm")
    kept = [r for r in column(f"geometry/{case}.csv", space="head", variant="intact") if r["head"] != "-1"]
    kept.sort(key=lambda row: (int(row["layer"]), int(row["head"])))
    worst = 0.0
    for measure, values in found.items():
        table = np.array([float(row[measure] or "nan") for row in kept])
        known = ~np.isnan(values)
        off = float(np.abs(values - table)[known].max())
        print(
            f"{case}: {measure} of {known.sum()} heads, largest difference {off:.2g}; mean {values[known].mean():.5g}"
        )
        worst = max(worst, off)
    return worst


FOLDERS = {"capp-gpt": SHARED / "checkpoints" / "capp_gpt", "mgm": Path(os.environ.get("LN_PROBE_MGM", ""))}
BUNDLED = Path(__file__).parents[2] / "ln_probe" / "data" / "checkpoints"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experiment", choices=("uniform", "patching", "geometry"))
    parser.add_argument("models", nargs="+", metavar="MODEL")
    args = parser.parse_args()
    torch.set_num_threads(1)
    for given in args.models:
        name, _, folder = given.partition("=")
        if args.experiment == "geometry":
            record("geometry", name, compare_geometry(name))
            continue
        model = Gpt2(Path(folder) if folder else FOLDERS.get(name, BUNDLED / name))
        if args.experiment == "uniform":
            lab = bool(folder) or name not in FOLDERS
            table = {"capp-gpt": "capp-gpt-own"}.get(name, f"{name}-books" if lab and not folder else name)
            off = compare_uniform(table, model, tokens_of("books" if lab else table))
        else:
            off = compare_patching(name, model)
        record(args.experiment, name, off)


def record(experiment: str, name: str, off: float) -> None:
    """Print a difference and put it into the table."""
    print(f"{experiment}, {name}: largest difference from the committed table {off:.2g}", flush=True)
    path = TABLES / "second-way-experiments.csv"
    rows = [] if not path.exists() else list(csv.reader(path.open()))[1:]
    rows = [r for r in rows if r[:2] != [experiment, name]] + [[experiment, name, f"{off:.3g}"]]
    with path.open("w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([["experiment", "model", "largest_difference"], *rows])


if __name__ == "__main__":
    main()
