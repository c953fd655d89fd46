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
# Attention sinks: heads that look at the first token whatever it is. A score is bilinear in the parts of query and key
# once both sigmas are held, so the question has an exact answer: which part of the query meets which part of the key,
# and what gain, bias, projection and the sigmas of LayerNorm do to it.

# %%
import os

import pandas as pd
import torch

import ln_probe

SHOWN = 4  # heads in the tables


def sinks(model: torch.nn.Module, ids: torch.Tensor, layer: int) -> pd.Series:
    """Mean attention that each head of a layer pays to position 0, over queries that see at least ten keys."""
    seen: list[torch.Tensor] = []
    point = model.blocks[layer].attn.hook_pattern
    handle = point.register_forward_hook(lambda _m, _args, pattern: seen.append(pattern.detach()[0]))
    with torch.no_grad():
        model(ids[None])
    handle.remove()
    paid = seen[0][:, 10:, 0].mean(1)
    return pd.Series(paid.tolist(), name="attention to position 0").rename_axis("head")


# %% [markdown]
# ## The bundled model

# %%
model = ln_probe.load_model("lm-layernorm")
text = (
    "The lamp was lit before the ships came home, and the men of the harbour went down to the water with their ropes."
)
ids = torch.tensor(model.tokenizer(text)["input_ids"])
paid = pd.DataFrame({layer: sinks(model, ids, layer) for layer in range(model.cfg.n_layers)}).rename_axis(
    columns="layer"
)
paid.round(2)

# %% [markdown]
# The head that looks at position 0 most, and its score there against the mean over the keys that the query sees
# (softmax depends on differences only):

# %%
layer = int(paid.max().idxmax())
head = int(paid[layer].idxmax())
why = ln_probe.attribute_scores(model, ids, layer, head, query=-1, key=0, against="mean").check()
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
    for head, share in sinks(model, ids, layer).nlargest(SHOWN).items():
        found = ln_probe.attribute_scores(model, ids, layer, head, query=-1, key=0, against="mean").check()
        terms = found.terms.set_index(["side", "term"])["contribution"]
        keys = found.table[found.table["side"] == "key"].set_index("part")["contribution"]
        rows.append(
            {
                "head": head, "attention": share, "score − mean": found.total, "key's sigma": terms["key", "sigma"],
                "key's gain": terms["key", "gain"], "key's bias": terms["key", "bias"],
                "key's projection": terms["key", "projection"], "largest part of the key": keys.abs().idxmax(),
                "which gives": keys[keys.abs().idxmax()],
            }
        )  # fmt: skip
    return pd.DataFrame(rows).set_index("head").round(3)


if os.environ.get("LN_PROBE_MGM"):
    mgm = ln_probe.load_model(os.environ["LN_PROBE_MGM"], allow_pickle=True)
    genera = torch.cat([torch.tensor([2]), torch.arange(100, 140), torch.tensor([3])])
    shown = explained(mgm, genera, 2)
else:
    shown = explained(model, ids, layer)
shown

# %%
if os.environ.get("LN_PROBE_GGUF"):
    smollm2 = ln_probe.load_model(os.environ["LN_PROBE_GGUF"])
    shown = explained(smollm2, torch.tensor(smollm2.tokenizer(text)["input_ids"]), 16)
shown
