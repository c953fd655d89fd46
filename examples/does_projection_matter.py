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
# # Does projection matter?
#
# LayerNorm takes the mean off a vector before it scales it. Brody, Alon & Yahav (2023) argue that this helps
# attention: with every key orthogonal to the all-ones direction, a query along it attends uniformly, for any
# keys. Two ways to ask: remove projection from a model that was trained with it, and train a model without it.

# %%
import pandas as pd
import torch
import torch.nn.functional as F

import ln_probe
from ln_probe import hooks

# %% [markdown]
# ## 1. Remove it
#
# `freezing_cost` measures the primary contrasts of every report: scaling frozen (each norm divides by two constants,
# its mean sigmas over the other prompts at position 0 and elsewhere) and projection removed (the mean stays in), at
# every norm and at the norms that attention reads. The prompts are 64 held-out windows of the model's training books.

# %%
model = ln_probe.load_model("lm-layernorm")
cost = ln_probe.freezing_cost(model)
print(cost)
changes = cost.table.pivot(index="variant", columns="sites", values="delta_loss")
changes

# %% [markdown]
# `without` edits the running model in the same way. With the constants of a prompt it reproduces that prompt's number;
# afterwards the model is as it was.

# %%
first = model.bundled_prompts.measured[0][None]
with torch.no_grad():
    intact = float(model(first, return_type="loss"))
    with hooks.without(model, "scaling", sites="all", scale=cost.constants.of(0)):
        frozen = float(model(first, return_type="loss"))
    assert float(model(first, return_type="loss")) == intact
print(f"prompt 0: {intact:.3f} nats/token, with scaling frozen {frozen:.3f}")

# %% [markdown]
# In this model the mean is nearly nothing: projection removes a fraction of a percent of a vector's squared length,
# so it could hardly matter.

# %%
report = ln_probe.analyze(model, max_tokens=96, probes=("decomposition", "uniformity"), progress=False)
report.layernorms[["site", "projected_share", "angle_to_ones_deg"]]

# %% [markdown]
# ## 2. Train without it
#
# A task that asks for uniform attention: after every token, name the one that has been most frequent so far. One
# layer, one head; only the norm before attention differs, and both norms scale to the same length √d (in the paper's
# experiment they do not: there, vectors without projection are d times shorter, and scores d² times smaller).

# %%
from ln_probe.analyses.lab.transformer import LabConfig, LabTransformer

CLASSES, LENGTH, STEPS, BATCH = 8, 40, 300, 128


def examples(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Token sequences, and after each token the most frequent one so far (of equals the smaller)."""
    odds = torch.rand(BATCH, CLASSES, generator=generator) ** 2
    tokens = torch.multinomial(odds, LENGTH, replacement=True, generator=generator)
    return tokens, F.one_hot(tokens, CLASSES).cumsum(1).argmax(-1)


def train(norm: str, seed: int) -> tuple[LabTransformer, list[float]]:
    torch.manual_seed(seed)
    shape = {"n_layers": 1, "n_heads": 1, "d_model": 16, "d_mlp": 32, "d_vocab": CLASSES, "n_ctx": LENGTH}
    small = LabTransformer(LabConfig(**shape, norm=norm, positions="none", eps=1e-5))
    optimizer = torch.optim.Adam(small.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(seed)
    losses = []
    for _ in range(STEPS):
        tokens, labels = examples(generator)
        found = F.cross_entropy(small(tokens).flatten(0, 1), labels.flatten())
        optimizer.zero_grad()
        found.backward()
        optimizer.step()
        losses.append(float(found.detach()))
    return small.eval(), losses


trained = {(norm, seed): train(norm, seed) for norm in ("layernorm", "scaling_only") for seed in (0, 1, 2)}
curves = pd.DataFrame({f"{norm}, seed {seed}": losses for (norm, seed), (_, losses) in trained.items()})
curves.rolling(20).mean().iloc[[19, 49, 99, 199, 299]].round(3)

# %%
from ln_probe.page.figures import BLUE, ORANGE, Figure

figure = Figure(figsize=(5.2, 3.0), layout="constrained")
axes = figure.subplots()
for (norm, seed), (_, losses) in trained.items():
    axes.plot(
        pd.Series(losses).rolling(20).mean(),
        color=BLUE if norm == "layernorm" else ORANGE,
        label=norm if seed == 0 else None,
    )
axes.set(xlabel="step", ylabel="loss, nats (mean of 20 steps)")
axes.legend(frameon=False)
figure

# %% [markdown]
# How uniformly do their heads attend, and does the head that has projection use the direction the paper points at? 0°
# would attend uniformly for any keys; a random direction is near 90°.

# %%
tokens, _ = examples(torch.Generator().manual_seed(99))
rows = []
for (norm, seed), (small, losses) in trained.items():
    found = ln_probe.analyze(small, tokens[:8], probes=("uniformity",), progress=False)
    head = found.heads.query("variant == 'intact'").iloc[0]
    end = {"norm": norm, "seed": seed, "final loss": sum(losses[-20:]) / 20}
    rows.append(end | head[["entropy_ratio", "uniform_angle_deg"]].to_dict())
heads = pd.DataFrame(rows)
heads

# %% [markdown]
# ## What can be said
#
# The sentence is computed from this run. Three seeds of a small model are no proof; `ln-probe lab` runs the published
# design with more.

# %%
per_norm = heads.groupby("norm")["final loss"].agg(["mean", "min", "max"])
one, two = per_norm.loc["layernorm"], per_norm.loc["scaling_only"]
overlap = one["min"] <= two["max"] and two["min"] <= one["max"]
print(
    f"Removing projection changes the loss of lm-layernorm by {changes.loc['no_projection', 'all']:+.4f} nats/token, "
    f"freezing scaling by {changes.loc['no_scaling', 'all']:+.4f}. Trained from scratch at equal size, the loss ends "
    f"at {one['mean']:.3f} with projection and {two['mean']:.3f} without; the three seeds "
    f"{'overlap' if overlap else 'do not overlap'}."
)
