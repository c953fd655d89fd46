# ---
# jupyter:
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
import pandas as pd
import torch

import ln_probe
from ln_probe import hooks
from ln_probe.prompts import make_prompts

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
# A negative number in the column *sigma* of the key means that scaling works against the sink: with the median sigma
# of the other tokens at every key, the score would be that much higher. In models with real sinks (load "gpt2") the
# vector at position 0 is many times longer than the others, and the norm takes nearly all of that away again:

# %%
sigma = hooks.linearized.sigmas(model, ids)[f"blocks.{layer}.ln1"][0]
print(f"sigma at position 0: {float(sigma[0] / sigma[1:].median()):.1f} × the median of the others")
