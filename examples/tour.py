# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Tour: what does LayerNorm do for attention?
#
# Nothing has to be downloaded. The first part is geometry with six points; the second measures a small language model
# that comes with the package.
#
# ## Six keys in three dimensions
#
# A query selects the key with the highest score, query · key. The last of these keys is short: it lies among the
# others.

# %%
import numpy as np
import torch

import ln_probe

keys = np.array([[4, 0, 0], [0, 4, 0], [0, 0, 4], [-2, -1, -1], [3, 3, -2], [0.5, 0.6, 0.9]])
geometry = ln_probe.key_geometry(keys)
geometry.verdict

# %% [markdown]
# *Unselectable* means that it is in the convex hull of the others: it is a mixture of them, so its score is a mixture
# of theirs and never the highest one. The weights of that mixture prove it:

# %%
weights = geometry.weights(5)
print(weights.round(3), abs(weights @ keys - keys[5]).max())

# %% [markdown]
# LayerNorm subtracts the mean of each vector and divides by its length. All keys are then on a circle, and each is a
# corner. This query selects the last one:

# %%
normalized = torch.nn.functional.layer_norm(torch.tensor(keys), (3,)).numpy()
geometry = ln_probe.key_geometry(normalized)
print(geometry.verdict)
print("scores:", (normalized @ geometry.witness(5)).round(2))

# %% [markdown]
# ## A language model
#
# Does that happen in a trained model, and what does the model lose without it? One call measures every norm and head.
# It also takes your own `HookedTransformer` or bridge, and `load_model("gpt2")`, a Hugging Face folder or a .gguf.

# %%
model = ln_probe.load_model("lm-layernorm")
report = ln_probe.analyze(model, progress=False)
report

# %% [markdown]
# The sentences are computed from tables, which are pandas DataFrames. What each norm removes (projection), and the
# lengths it equalizes (scaling):

# %%
report.layernorms[["site", "reads", "projected_share", "angle_to_ones_deg", "sigma_mean", "sigma_cv"]]

# %% [markdown]
# How much the loss rises when each term is removed, at every norm and at the norms that attention reads:

# %%
primary = report.causal[report.causal["family"] == "primary"]
primary[["sites", "variant", "delta_loss", "delta_loss_low", "delta_loss_high", "p"]]

# %% [markdown]
# The heads, intact and with one term removed: keys that no query can select, the attention that a key can receive, and
# how uniform attention is (1: uniform).

# %%
measures = ["unselectable", "attainable_median", "entropy_ratio"]
report.heads.groupby(["layer", "variant"], sort=False)[measures].median()

# %% [markdown]
# ## Attention, head by head
#
# circuitsvis draws the pattern.

# %%
report.attention(layer=1)

# %% [markdown]
# ## Save it, load it, compare it
#
# `save` writes parquet tables, `report.json` (where everything came from) and `report.html`, a page that opens offline.
# Here a second bundled model, trained without scaling before attention, is compared with the first.

# %%
import tempfile
from pathlib import Path

folder = report.save(Path(tempfile.mkdtemp()) / "lm-layernorm")
report = ln_probe.load_report(folder)
other = ln_probe.analyze(ln_probe.load_model("lm-projection_only"), progress=False)
ln_probe.compare([report, other]).summary.T
