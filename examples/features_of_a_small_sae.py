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
# # Features of a small SAE
#
# A sparse autoencoder (SAE) writes an activation as a sum of a few *features*, a decoder bias and a reconstruction
# error. What does each of them do to a logit, or to an attention score, through the model's own LayerNorm? This
# notebook trains two small SAEs on the residual stream of a bundled model and attributes both, exactly. A trained SAE
# of SAELens is used in the same way: `Features.of(sae, cache)`.

# %%
import torch
from torch import Tensor, nn

import ln_probe
from ln_probe.analyses.attribution import Features
from ln_probe.hooks import linearized
from ln_probe.prompts import make_prompts

model = ln_probe.load_model("lm-layernorm")
tokens = torch.stack(list(make_prompts(model).tokens))  # 64 held-out windows of 128 tokens
AFTER, BEFORE = "blocks.3.hook_resid_post", "blocks.3.hook_resid_pre"  # what the final norm reads; what layer 3 reads
with torch.no_grad():
    _, cache = model.run_with_cache(tokens, names_filter=[AFTER, BEFORE])

# %% [markdown]
# ## Training
#
# 512 latents, of which the 32 largest are kept at each token (TopK: Gao et al. 2024). 60 windows train, 4 are held out.


# %%
class SAE(nn.Module):
    def __init__(self, x: Tensor, latents: int = 512, kept: int = 32) -> None:
        super().__init__()
        self.kept = kept
        directions = nn.functional.normalize(torch.randn(latents, x.shape[1]), dim=1)
        self.W_dec, self.W_enc, self.b_dec = map(nn.Parameter, (directions, directions.T.clone(), x.mean(0)))

    def encode(self, x: Tensor) -> Tensor:
        found = (x - self.b_dec) @ self.W_enc
        largest = found.topk(self.kept, dim=-1)
        return torch.zeros_like(found).scatter(-1, largest.indices, largest.values.relu())

    def decode(self, active: Tensor) -> Tensor:
        return active @ self.W_dec + self.b_dec


def train(hook_name: str, steps: int = 600) -> SAE:
    torch.manual_seed(0)
    x, held_out = cache[hook_name][:60].flatten(0, 1), cache[hook_name][60:].flatten(0, 1)
    sae = SAE(x)

    def unexplained(some: Tensor) -> Tensor:
        return (sae.decode(sae.encode(some)) - some).square().mean() / (some - x.mean(0)).square().mean()

    optimizer = torch.optim.Adam(sae.parameters(), lr=2e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        unexplained(x[torch.randint(len(x), (512,))]).backward()
        optimizer.step()
    print(f"{hook_name}: {1 - float(unexplained(held_out).detach()):.0%} of the variance of held-out windows")
    return sae


after, before = train(AFTER), train(BEFORE)

# %% [markdown]
# ## A logit
#
# The model's first choice after a held-out window, minus the mean logit. The residual stream before the final norm is
# replaced by features, decoder bias and reconstruction error. `.check()` raises unless the rows add up to the logit.

# %%
prompt = tokens[60]
_, cache_of_prompt = model.run_with_cache(prompt[None])
features = Features.of(after, cache_of_prompt, AFTER)
logit = ln_probe.attribute_logits(model, prompt, -1, against="mean", features=features).check()
logit

# %% [markdown]
# Features go through the raw norm: at the token's own sigma LayerNorm is linear, so taking a feature away changes the
# logit by minus its value. For every named feature, against the running model with sigmas held (`linearized`):

# %%
target = int(model(prompt[None])[0, -1].argmax())
sigmas = linearized.sigmas(model, prompt)


def write(i: int, where: Features, at: list[int]) -> Tensor:
    """What a feature writes at some positions [pos d_model]."""
    written = torch.zeros(len(prompt), model.cfg.d_model)
    written[at] = where.activations[0, at, i, None] * where.directions[i]
    return written


rows = logit.table.query("kind == 'feature' and index >= 0")
for i, contribution in zip(rows["index"], rows["contribution"], strict=True):
    edit = write(i, features, [-1])
    with torch.no_grad(), linearized(model, sigma=sigmas):
        edited = model.run_with_hooks(prompt[None], fwd_hooks=[(AFTER, lambda x, hook, edit=edit: x - edit)])[0, -1]
    change = float(edited[target] - edited.mean()) - logit.own
    assert abs(change + contribution) < 1e-5 * logit.scale
print(f"{len(rows)} features taken away one by one; the last changes the logit by {change:+.4f}")

# %% [markdown]
# ## An attention score
#
# Why does head 6 of layer 3 attend to this key rather than to the token before it? Features stand on both sides, so the
# score is a sum over pairs: a feature of the query meets a feature of the key.

# %%
layer, head, query = 3, 6, 64
weights = cache_of_prompt[f"blocks.{layer}.attn.hook_pattern"][0, head, query]
key = int(weights[1:query].argmax()) + 1
other = key - 1
features = Features.of(before, cache_of_prompt, BEFORE)
score = ln_probe.attribute_scores(model, prompt, layer, head, query, key, against=other, features=features).check()
score

# %% [markdown]
# By features of the key alone, and the same check: each feature is taken away at both keys.

# %%
rows = score.table.query("side == 'key' and kind == 'feature' and index >= 0")
for i, contribution in zip(rows["index"], rows["contribution"], strict=True):
    edit, seen = write(i, features, [key, other]), []
    hooks = [
        (BEFORE, lambda x, hook, edit=edit: x - edit),
        (f"blocks.{layer}.attn.hook_attn_scores", lambda x, hook, seen=seen: seen.append(x[0, head, query].double())),
    ]
    with torch.no_grad(), linearized(model, sigma=sigmas):
        model.run_with_hooks(prompt[None], fwd_hooks=hooks)
    change = float(seen[0][key] - seen[0][other]) - score.own
    assert abs(change + contribution) < 1e-5 * score.scale
rows.reindex(rows["contribution"].abs().sort_values(ascending=False).index)[["part", "contribution"]].head(6).round(3)
