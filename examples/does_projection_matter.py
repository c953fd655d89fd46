# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Does projection matter?
#
# LayerNorm subtracts the mean of a vector before it scales it. Brody, Alon & Yahav (2023) argue that this helps
# attention: every key is then orthogonal to the all-ones direction, and a query along it attends uniformly to any keys.
# Two ways to ask: remove projection from a model that was trained with it, and train a model without it.

# %%
import pandas as pd
import torch
import torch.nn.functional as F

import ln_probe
from ln_probe import hooks

# %% [markdown]
# ## 1. Remove it
#
# `freezing_cost` measures the primary contrasts of every report: scaling frozen (each norm divides by its mean sigmas
# over the other prompts) and projection removed (the mean stays in), at every norm and at the norms that attention
# reads. The prompts are 64 held-out windows of the model's training books.

# %%
model = ln_probe.load_model("lm-layernorm")
cost = ln_probe.freezing_cost(model)
print(cost)
changes = cost.table.pivot(index="variant", columns="sites", values="delta_loss")
changes

# %% [markdown]
# `without` edits the running model in the same way. With the constants of a prompt it reproduces that prompt's number.

# %%
first = model.bundled_prompts.measured[0][None]
with torch.no_grad():
    intact = float(model(first, return_type="loss"))
    with hooks.without(model, "scaling", sites="all", scale=cost.constants.of(0)):
        frozen = float(model(first, return_type="loss"))
print(f"prompt 0: {intact:.3f} nats/token, with scaling frozen {frozen:.3f}")

# %% [markdown]
# In this model the mean is nearly zero: projection removes less than one percent of a vector's squared length.

# %%
report = ln_probe.analyze(model, max_tokens=96, probes=("decomposition",), progress=False)
report.layernorms[["site", "projected_share", "angle_to_ones_deg"]]

# %% [markdown]
# ## 2. Train without it
#
# A task that asks for uniform attention: after every token, name the one that has been most frequent so far. One layer,
# one head; only the norm before attention differs, and both norms scale to the same length √d. (In the paper's
# experiment they do not: there, vectors without projection are d times shorter, and scores d² times smaller.)

# %%
from ln_probe.analyses.lab.transformer import LabConfig, LabTransformer

CLASSES, LENGTH, STEPS, BATCH = 8, 40, 300, 128


def examples(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Return token sequences, and after each token the most frequent one so far (of equals the smaller)."""
    odds = torch.rand(BATCH, CLASSES, generator=generator) ** 2
    tokens = torch.multinomial(odds, LENGTH, replacement=True, generator=generator)
    return tokens, F.one_hot(tokens, CLASSES).cumsum(1).argmax(-1)


def train(norm: str, seed: int) -> list[float]:
    """Return the loss of each step of one training run."""
    torch.manual_seed(seed)
    shape = {"n_layers": 1, "n_heads": 1, "d_model": 16, "d_mlp": 32, "d_vocab": CLASSES, "n_ctx": LENGTH}
    small = LabTransformer(LabConfig(**shape, norm=norm, positions="none", eps=1e-5))
    optimizer = torch.optim.Adam(small.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(seed)
    losses = []
    for _ in range(STEPS):
        tokens, labels = examples(generator)
        loss = F.cross_entropy(small(tokens).flatten(0, 1), labels.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


losses = pd.DataFrame({(norm, seed): train(norm, seed) for norm in ("layernorm", "scaling_only") for seed in range(3)})
losses.rolling(20).mean().iloc[[19, 49, 99, 199, 299]].round(3)

# %% [markdown]
# Three seeds of a small model prove little; `ln-probe lab run majority` runs the published design with more.

# %%
losses.tail(20).mean().groupby(level=0).agg(["mean", "min", "max"]).round(3)
