"""Measure which keys no query of a head can select, in contexts as long as the model takes them.

    python examples/checkpoints/keys_at_length.py NAME…     # adds the rows of each to tables/keys-at-length.csv
    python examples/checkpoints/keys_at_length.py NAME=RUN  # the same for the folder of a trained model

Eight contexts for each model; n is their first n tokens. A key is unselectable if it is no vertex of the convex hull of
the keys of its head and context. Variants: intact, and the scaling of the norm that the layer's attention reads frozen
at the mean sigma over the other contexts (position 0 apart). For comparison, 20 draws of n normal keys in d_head
dimensions. Hypotheses and this script were committed before the run (6402db8).
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch
from measure import BOOKS, FOLDERS, HELD_OUT, HERE, WIKITEXT, corpus, own
from transformer_lens import HookedTransformer

import ln_probe

TABLE = HERE / "tables" / "keys-at-length.csv"
CONTEXTS, DRAWS = 8, 20
LENGTHS = (16, 32, 64, 128, 256, 512, 1024)
DIMENSIONS = (2, 8, 16, 32, 64)
EVERY = {"SmolLM2-135M": 5}  # layers: every fifth, cut after the registration for want of processor time


def windows(model: Any, texts: Sequence[str], length: int, first: Sequence[int] = (), last: Sequence[int] = ()) -> Any:
    """Return CONTEXTS windows of `length` tokens, spread evenly over the texts, with `first` and `last` around each."""
    ids = [i for text in texts for i in model.tokenizer(text, add_special_tokens=False)["input_ids"]]
    body = length - len(first) - len(last)
    starts = np.linspace(0, len(ids) - body, CONTEXTS).astype(int)
    return [[*first, *ids[start : start + body], *last] for start in starts]


def longest(name: str) -> list[list[int]]:
    """Return the CONTEXTS longest of the sequences that the model itself has drawn, cut to one length."""
    rows = sorted(own(name, None, LENGTHS[-1]), key=len, reverse=True)[:CONTEXTS]
    return [row[: len(rows[-1])] for row in rows]


def model_and_contexts(name: str) -> tuple[Any, list[list[int]]]:
    """Return the model of a name, or of NAME=FOLDER, with its contexts."""
    name, _, folder = name.partition("=")
    model = ln_probe.load_model(folder or FOLDERS.get(name.lower()) or name, allow_pickle=True)
    if name in ("MGM", "CAPP-GPT"):
        return model, longest({"MGM": "mgm-long", "CAPP-GPT": "capp-gpt-own"}[name])
    if name.lower() in FOLDERS:
        ends = ([model.tokenizer.cls_token_id], [model.tokenizer.sep_token_id]) if name == "MiniLM-L6" else ((), ())
        return model, windows(model, [corpus(WIKITEXT)], 512, *ends)
    books = [corpus(name) for name in BOOKS]
    held_out = [book[int(len(book) * (1 - HELD_OUT)) :] for book in books]
    return model, windows(model, held_out, model.cfg.n_ctx, first=[0])


@torch.no_grad()
def keys_of(model: Any, contexts: list[list[int]], layer: int) -> dict[str, torch.Tensor]:
    """Return the keys of a layer [context, position, head, d_head] by variant."""
    names = model.hook_dict
    key = next(n for n in (f"blocks.{layer}.attn.hook_rot_k", f"blocks.{layer}.attn.hook_k") if n in names)
    scale = f"blocks.{layer}.ln1.hook_scale"
    if "embed_ln.hook_scale" in names:  # post-norm: attention reads the norm at the end of the block before
        scale = f"blocks.{layer - 1}.ln2.hook_scale" if layer else "embed_ln.hook_scale"
    tokens = torch.tensor(contexts)
    stop = {"stop_at_layer": layer + 1} if isinstance(model, HookedTransformer) else {}
    _, cache = model.run_with_cache(tokens, names_filter=lambda name: name in (key, scale), **stop)
    sigma, frozen = cache[scale], torch.empty_like(cache[scale])
    others = 1 - torch.eye(len(tokens)).to(sigma)
    mean = (others @ sigma.flatten(1)) / (len(tokens) - 1)  # leave one out [context, position]
    frozen[:, 0], frozen[:, 1:] = mean[:, :1], mean[:, 1:].mean(1, keepdim=True)[..., None]
    keys = {"intact": cache[key]}

    def record(value: torch.Tensor, hook: Any) -> None:
        keys["no_scaling"] = value.detach()

    model.run_with_hooks(tokens, fwd_hooks=[(scale, lambda value, hook: frozen), (key, record)], **stop)
    return keys


def counts(keys: np.ndarray) -> tuple[int, int]:
    """Return how many keys [set, key, d] are unselectable, and how many undecided."""
    verdict = ln_probe.key_geometry(keys, margins=False).verdict
    return int((verdict == "unselectable").sum()), int((verdict == "undecided").sum())


def rows_of(name: str) -> list[dict[str, Any]]:
    """Return a row for each layer, head, variant and n of a model."""
    model, contexts = model_and_contexts(name)
    causal = "embed_ln.hook_scale" not in model.hook_dict  # a prefix is a context, too
    longest_context = len(contexts[0])
    lengths = {n for n in LENGTHS if n < longest_context} if causal and longest_context >= 256 else set()
    rows = []
    for layer in range(0, model.cfg.n_layers, EVERY.get(name, 1)):
        for variant, keys in keys_of(model, contexts, layer).items():
            if variant == "no_scaling" and name.startswith(("lm-none", "lm-projection_only", "projection")):
                continue  # this norm does not scale
            for head in range(keys.shape[2]):
                own = keys[:, :, head].double().numpy()
                unselectable = undecided = -1
                for n in sorted({n for n in lengths if n >= 64} | {longest_context}, reverse=True):
                    if unselectable or undecided:  # else every key of the longer prefix is a vertex, so of this one
                        unselectable, undecided = counts(own[:, :n])
                    about = {"model": name.partition("=")[0], "d_head": own.shape[2], "layer": layer, "head": head}
                    measured = {"contexts": len(own), "unselectable": unselectable, "undecided": undecided}
                    rows.append(about | {"variant": variant, "n": n} | measured)
    return rows


def random_rows() -> list[dict[str, Any]]:
    """Return a row for each n and d of DRAWS sets of normal keys."""
    rng = np.random.default_rng(0)
    rows = []
    for d in DIMENSIONS:
        for n in LENGTHS:
            unselectable, undecided = counts(rng.standard_normal((DRAWS, n, d)))
            about = {"model": "random", "d_head": d, "layer": -1, "head": -1, "variant": "normal", "n": n}
            rows.append(about | {"contexts": DRAWS, "unselectable": unselectable, "undecided": undecided})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="+", metavar="NAME", help="a model, NAME=RUN, or random")
    torch.set_num_threads(1)
    for name in parser.parse_args().names:
        table = pd.DataFrame(random_rows() if name == "random" else rows_of(name))
        if TABLE.exists():
            kept = pd.read_csv(TABLE)
            table = pd.concat([kept[~kept["model"].isin(table["model"])], table])
        table.to_csv(TABLE, index=False)


if __name__ == "__main__":
    main()
