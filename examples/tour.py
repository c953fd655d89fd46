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
# # Tour: what does LayerNorm do for this model's attention?
#
# A small language model comes with the package, so nothing has to be downloaded. Open this file as a notebook
# (`jupyter lab` with jupytext installed shows it as one), or run it as a script.

# %%
import ln_probe
from ln_probe.page import figures

model = ln_probe.load_model("lm-layernorm")  # or "gpt2", a Hugging Face folder, a .gguf, a lab run
report = ln_probe.analyze(model, progress=False)

# %% [markdown]
# The report in a cell: findings in sentences, the median head of each variant, one picture. Everything is computed
# from tables, which are pandas DataFrames.

# %%
report

# %% [markdown]
# ## Every norm, term by term
#
#     LN(x) = gain · (Px) / sigma + bias
#
# Projection (P) removes the component along the all-ones direction; scaling (1/sigma) puts the rest onto a sphere.
# How large that component is, and how much lengths differ before scaling:

# %%
report.layernorms[["site", "reads", "projected_share", "angle_to_ones_deg", "input_norm", "sigma_cv"]]

# %% [markdown]
# The same as a picture, over depth:

# %%
figures.norms_over_depth(report)

# %% [markdown]
# ## Which keys can a query select?
#
# A key is *unselectable* if it lies in the convex hull of the others: no query gives it the highest score. Each head
# is measured intact (`intact`) and with one term removed at a time.

# %%
measures = ["unselectable", "margin_median", "attainable_median", "entropy_ratio"]
report.heads.groupby(["layer", "variant"], sort=False)[measures].median()

# %% [markdown]
# Pictures are matplotlib figures, to be restyled as you like.

# %%
figure = figures.keys_over_depth(report)
figure.suptitle("attention that a key can receive", fontsize=11)
figure

# %% [markdown]
# Which tokens lose? Position 0 and attention sinks stand apart; a negative change means that the token can get less
# attention once scaling is gone.

# %%
tokens = report.tokens()
tokens[tokens["place"] == "elsewhere"].head(8)

# %% [markdown]
# ## Attention, intact and with scaling frozen
#
# circuitsvis draws the patterns of one head; choose another in the map.

# %%
report.attention(layer=1)

# %% [markdown]
# ## One key, with its certificate
#
# A verdict is not a solver's word: an unselectable key comes with the convex weights that reproduce it, a selectable
# one with a query that selects it. `certify` checks them all again with code that shares nothing with the solver.

# %%
import numpy as np

keys = np.random.default_rng(0).normal(size=(60, 4))
found = ln_probe.key_geometry(keys)
inside = int(np.flatnonzero(found.verdict == "unselectable")[0])
weights = found.weights(inside)
print(
    f"key {inside} = a mixture of {(weights > 0).sum()} others, off by {abs(weights @ keys - keys[inside]).max():.1e}"
)
found.certify()

# %% [markdown]
# ## Keep it, open it, compare it
#
# `save` writes parquet tables, `report.json` with where everything came from, and `report.html`: one file that opens
# offline. Here another bundled model, which was trained without scaling before attention, is compared with the first.

# %%
import tempfile
from pathlib import Path

folder = report.save(Path(tempfile.mkdtemp()) / "lm-layernorm")
print(sorted(p.name for p in folder.iterdir()))
report = ln_probe.load_report(folder)

# %%
other = ln_probe.analyze(ln_probe.load_model("lm-projection_only"), progress=False)
both = ln_probe.compare([report, other])
both.summary.T

# %%
both.heads["unselectable"].groupby("variant", sort=False).median()
