"""The registered outcomes once more, from the weights, without a line of ln_probe or TransformerLens: float64, numpy.

    python registered/second_way.py RUNS TEXTS    # items 3 and 4: held-out losses; item 5: one model's edits

The transformer, its held-out windows, the directions and the edits are written down again here. Printed is the largest
difference from `results/item-N.csv`.
"""

from __future__ import annotations

import csv
import json
import re
import sys
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import load_file
from scipy.special import erf, log_softmax
from tokenizers import Tokenizer

RUNS, TEXTS = map(Path, sys.argv[1:3])
RESULTS = Path(__file__).parent / "results"
BOOKS = [(TEXTS / name).read_bytes().decode() for name in ("kjv.txt", "shakespeare_complete_gut.txt", "moby_dick.txt")]


def norm(x, config, weights, name, kind):
    y = x - x.mean(-1, keepdims=True) if kind in ("layernorm", "projection_only") else x
    if kind in ("layernorm", "scaling_only"):
        y = y / np.sqrt((y**2).mean(-1, keepdims=True) + config["eps"])
    else:
        y = y / weights[f"{name}.divisor"]
    return y * weights.get(f"{name}.w", 1.0) + weights.get(f"{name}.b", 0.0)


def act(x, kind):
    if kind == "gelu":
        return x * 0.5 * (1 + erf(x / 2**0.5))
    return 0.5 * x * (1 + np.tanh((2 / np.pi) ** 0.5 * (x + 0.044715 * x**3)))


def forward(ids, config, weights, edit=None):
    """Log-probabilities of the next tokens of one window [pos, token]; with `edit`, of queries that it changes."""
    x = weights["embed.W_E"][ids] + weights["pos_embed.W_pos"][: len(ids)]
    for layer in range(config["n_layers"]):
        of = {k.removeprefix(f"blocks.{layer}."): v for k, v in weights.items() if k.startswith(f"blocks.{layer}.")}
        y = norm(x, config, of, "ln1", config["norm"])
        q, k, v = (
            np.einsum("pm,hmd->hpd", y, of[f"attn.W_{n}"]) + of.get(f"attn.b_{n}", np.zeros((1, 1)))[:, None] for n in "QKV"
        )
        if edit is not None:
            q = edit(layer, q, k)
        scores = q @ k.transpose(0, 2, 1) / q.shape[-1] ** 0.5
        scores = np.where(np.tri(len(ids), dtype=bool), scores, -np.inf)
        pattern = np.exp(scores - scores.max(-1, keepdims=True))
        z = pattern / pattern.sum(-1, keepdims=True) @ v
        x = x + np.einsum("hpd,hdm->pm", z, of["attn.W_O"]) + of.get("attn.b_O", 0.0)
        hidden = act(norm(x, config, of, "ln2", config["norm_mlp"]) @ of["mlp.W_in"] + of["mlp.b_in"], config["act_fn"])
        x = x + hidden @ of["mlp.W_out"] + of["mlp.b_out"]
    x = norm(x, config, weights, "ln_final", config["norm_final"])
    return x @ weights["embed.W_E"].T + weights.get("unembed.b_U", 0.0)


def losses(ids, logits):
    return -np.take_along_axis(log_softmax(logits[:-1], -1), ids[1:, None], 1)[:, 0]


def model(folder):
    config = json.loads((folder / "lab.json").read_text())["model"]
    return config, {k: v.astype(np.float64) for k, v in load_file(folder / "model.safetensors").items()}


def committed(item):
    return {
        (r["cell"], int(r["seed"]), int(r["step"]), r["measure"]): float(r["value"])
        for r in csv.DictReader((RESULTS / f"item-{item}.csv").open())
    }


def held_out_losses(item, tokenizer, windows, step):
    """The largest difference of the losses at the last step of every run of an item."""
    known, worst, count = committed(item), 0.0, 0
    tokens = [i for book in BOOKS for i in tokenizer.encode(book[int(len(book) * 0.95) :]).ids]
    boundary = tokenizer.token_to_id("<|endoftext|>")
    for (cell, seed, at, measure), value in known.items():
        if at == step and measure == "valid_loss":
            config, weights = model(RUNS / f"item-{item}" / f"{cell.replace(', ', '-').replace(' ', '_')}-seed{seed}")
            starts = torch.linspace(0, len(tokens) - config["n_ctx"], windows).long().tolist()
            rows = [np.array([boundary, *tokens[s : s + config["n_ctx"] - 1]]) for s in starts]
            mine = np.mean([losses(ids, forward(ids, config, weights)).mean() for ids in rows])
            worst, count = max(worst, abs(mine - value)), count + 1
    print(f"item {item}: {count} held-out losses, largest difference {worst:.1e}", flush=True)


def prompts(tokenizer, boundary, limit=128):
    """The 64 windows of the books, in the order of examples/checkpoints/measure.py of 985dae6."""
    rows = []
    for number, book in enumerate(BOOKS):
        held_out = book[int(len(book) * 0.95) :]
        starts = np.linspace(0, len(held_out) - 8 * limit, 64 // 3 + (number < 64 % 3)).astype(int)
        for start in starts:
            text = re.sub(r"^\S*\s+", "", held_out[start : start + 8 * limit])
            rows.append(np.array([boundary, *tokenizer.encode(text).ids][:limit]))
    return rows


def uniform_direction(seed=30):
    known = {k[2:]: v for k, v in committed(5).items() if k[0] == "layernorm" and k[1] == seed}
    folder = RUNS / "item-5" / f"layernorm-seed{seed}"
    config, weights = model(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    generator, of = torch.Generator().manual_seed(0), {}
    for layer in range(config["n_layers"]):
        W = weights[f"blocks.{layer}.ln1.w"][:, None] * weights[f"blocks.{layer}.attn.W_K"]
        metric, ones = W.transpose(0, 2, 1) @ W, W.sum(1)
        u = np.linalg.solve(metric, ones[..., None])[..., 0]
        vectors = [np.linalg.eigh(m) for m in metric]
        drawn = torch.randn(4, 2, *u.shape, generator=generator, dtype=torch.float64).numpy()
        # torch's eigenvectors could differ in sign from numpy's; metric^(-1/2) does not
        root = np.stack([v / np.sqrt(e) @ v.T for e, v in vectors])
        unit = lambda a: a / np.sqrt(np.einsum("...hi,hij,...hj->...h", a, metric, a))[..., None]  # noqa: B023, E731
        of[layer] = metric, unit(u), unit(np.einsum("hij,cphj->cphi", root, drawn))
    worst = {}
    for edit in ("intact", "away", "away_random", "towards", "towards_random"):
        for number, ids in enumerate(prompts(tokenizer, tokenizer.token_to_id("<|endoftext|>"))):
            totals = []
            for draw in range(1 if edit == "intact" else 4):
                entropies = []

                def change(layer, q, k):
                    metric, u, random = of[layer]  # noqa: B023
                    one, other = random[draw]  # noqa: B023
                    along = lambda d: np.einsum("hpi,hij,hj->hp", q, metric, d)[..., None]  # noqa: E731
                    start, goal = {"away": (u, other), "away_random": (one, other), "towards": (one, u),
                                   "towards_random": (one, other), "intact": (u, u)}[edit]  # fmt: skip  # noqa: B023
                    taken, length = along(start), np.abs(along(start))
                    if edit == "away_random":  # as long as the component along u  # noqa: B023
                        length = np.abs(along(u))
                        taken = length * np.sign(along(one))
                    sign = np.sign(along(u)) if edit in ("towards", "intact") else 1.0  # noqa: B023
                    q = q - taken * start[:, None] + length * sign * goal[:, None]
                    scores = np.where(np.tri(q.shape[1], dtype=bool), q @ k.transpose(0, 2, 1) / q.shape[2] ** 0.5, -np.inf)
                    p = np.exp(log_softmax(scores, -1))
                    entropy = -np.where(p > 0, p * np.log(np.where(p > 0, p, 1)), 0).sum(-1)
                    entropies.append((entropy[:, 1:] / np.log(np.arange(2, q.shape[1] + 1))).mean(1))  # noqa: B023
                    return q

                loss = losses(ids, forward(ids, config, weights, change)).sum()
                totals.append((loss, np.mean(entropies) * (len(ids) - 1)))
            for name, value in zip(("loss", "entropy"), np.mean(totals, axis=0), strict=True):
                difference = abs(value - known[number, f"{name}_{edit}"]) / (len(ids) - 1)
                worst[name] = max(worst.get(name, 0.0), difference)
    print(f"item 5, seed {seed}: 64 prompts x 5 edits, largest difference a token {worst}", flush=True)


if __name__ == "__main__":
    uniform_direction()
    for item, windows, step in ((3, 64, 1500), (4, 8, 3000)):
        file = RUNS / f"item-{item}" / "layernorm-seed10" / "tokenizer.json"
        held_out_losses(item, Tokenizer.from_file(str(file)), windows, step)
