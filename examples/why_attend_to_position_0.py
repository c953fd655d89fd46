# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Why does this head attend to position 0?
#
# Attention sinks are heads that attend to the first token regardless of its content. A score is bilinear in the
# components of query and key once both sigmas are held, so the question has an exact answer: which component of the
# query meets which component of the key, and what gain, bias, projection and the sigmas of LayerNorm do to it.

# %%
import os

import pandas as pd
import torch

import ln_probe
from ln_probe import hooks
from ln_probe.prompts import make_prompts

SHOWN = 4  # heads in the tables
FIRST = 10  # the first query that is analyzed


def to_position_0(model: torch.nn.Module, ids: torch.Tensor, layer: int) -> torch.Tensor:
    """Attention that each head of a layer pays to position 0, [head query], of queries that see more than ten keys."""
    seen: list[torch.Tensor] = []
    point = model.blocks[layer].attn.hook_pattern
    handle = point.register_forward_hook(lambda _m, _args, pattern: seen.append(pattern.detach()[0]))
    with torch.no_grad():
        model(ids[None])
    handle.remove()
    return seen[0][:, FIRST:, 0]


# %% [markdown]
# ## The bundled model

# %%
model = ln_probe.load_model("lm-layernorm")
text = (
    "The lamp was lit before the ships came home, and the men of the harbour went down to the water with their ropes."
)
ids = make_prompts(model, [text]).tokens[0]
paid = pd.DataFrame({i: to_position_0(model, ids, i).mean(1) for i in range(model.cfg.n_layers)}).astype(float)
paid.rename_axis("head").rename_axis(columns="layer").round(2)

# %% [markdown]
# The head that looks at position 0 most, the query from which it does most, and its score there against the mean over
# the keys that the query sees (softmax depends on differences only):

# %%
layer = int(paid.max().idxmax())
head = int(paid[layer].idxmax())
query = FIRST + int(to_position_0(model, ids, layer)[head].argmax())
why = ln_probe.attribute_scores(model, ids, layer, head, query, key=0, against="mean").check()
why

# %%
why.terms.round(3)

# %% [markdown]
# By part of the key alone, all of the query's parts summed: what is at position 0 that this head looks for?

# %%
keys = why.table[why.table["side"] == "key"]
keys.reindex(keys["contribution"].abs().sort_values(ascending=False).index).head(6)

# %% [markdown]
# ## Checkpoints of others
#
# MGM (bacterial genera; layer 2 has sinks) and SmolLM2-135M (layer 16) are used if they are there: set `LN_PROBE_MGM`
# and `LN_PROBE_GGUF` as CONTRIBUTING.md says.


# %%
def explained(model: torch.nn.Module, ids: torch.Tensor, layer: int) -> pd.DataFrame:
    """Of the heads that look at position 0 most: the score against the mean, its terms, and the key's largest part."""
    rows = []
    paid = to_position_0(model, ids, layer)
    for head in paid.mean(1).topk(SHOWN).indices.tolist():
        query = FIRST + int(paid[head].argmax())
        found = ln_probe.attribute_scores(model, ids, layer, head, query, key=0, against="mean").check()
        terms = found.terms.set_index(["side", "term"])["contribution"]
        keys = found.table[found.table["side"] == "key"].set_index("part")["contribution"]
        row = {"head": head, "query": query, "attention": found.weight, "score − mean": found.total}
        row |= {f"key's {term}": terms["key", term] for term in ("sigma", "gain", "bias", "projection")}
        rows.append(row | {"largest part of the key": keys.abs().idxmax(), "it gives": keys[keys.abs().idxmax()]})
    sigma = hooks.linearized.sigmas(model, ids)[f"blocks.{layer}.ln1"][0]
    print(f"sigma at position 0: {float(sigma[0] / sigma[1:].median()):.1f} × the median of the others")
    return pd.DataFrame(rows).set_index("head").round(3)


explained(model, ids, layer)

# %%
said = "LN_PROBE_MGM is not set: MGM is left out"
if path := os.environ.get("LN_PROBE_MGM"):
    genera = torch.cat([torch.tensor([2]), torch.arange(100, 140), torch.tensor([3])])
    said = explained(ln_probe.load_model(path, allow_pickle=True), genera, 2)
said

# %%
said = "LN_PROBE_GGUF is not set: SmolLM2 is left out"
if path := os.environ.get("LN_PROBE_GGUF"):
    smollm2 = ln_probe.load_model(path)
    said = explained(smollm2, make_prompts(smollm2, [text]).tokens[0], 16)
said

# %% [markdown]
# A negative number under *key's sigma* means that scaling works against the sink: with the median sigma of the other
# tokens at every key the score would be that much higher. Where the vector at position 0 is many times longer than the
# others (the first line), the norm takes nearly all of that away again.
