# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Where does this logit come from?
#
# LayerNorm stands between every part of a model and its logits. At a token's own sigma it is a linear map, so a logit
# is a sum over parts: embeddings, heads, MLPs, biases. The sum is exact, in a model as it was trained: nothing has to
# be folded first, and so what projection takes off can be seen.

# %%
import pandas as pd
import torch

import ln_probe
from ln_probe.analyses.attribution import Features
from ln_probe.hooks import linearized, without
from ln_probe.prompts import make_prompts

model = ln_probe.load_model("lm-layernorm")
text = "The lamp was lit before the ships came home, and the"
found = ln_probe.attribute_logits(model, text, -1)  # the model's own first choice at the last position
found.check()  # itself; raises if the parts do not add up to the model's own logit

# %% [markdown]
# A contribution is `w·gain·P x_p / sigma` of a part p, and `without_projection` what it would be if the norm did not
# project. The column `projection` adds up to what taking projection away from the final norm does to the logit:

# %%
tokens = make_prompts(model, [text]).tokens[0][None]
target = int(model(tokens)[0, -1].argmax())
with torch.no_grad(), without(model, "projection", sites=["ln_final"]):
    edited = float(model(tokens)[0, -1, target])
assert abs(found.table["projection"].sum() - (found.own - edited)) < found.bound * found.scale
pd.Series(
    {"column `projection`, summed": found.table["projection"].sum(), "the running model": found.own - edited}
).to_frame("change of the logit")

# %% [markdown]
# ## A choice between two tokens
#
# Softmax sees differences only. Against the second choice, or against the mean logit (`against="mean"`):

# %%
second = int(model(tokens)[0, -1].topk(2).indices[1])
ln_probe.attribute_logits(model, text, -1, target=target, against=second).check()

# %% [markdown]
# Neurons are features that an MLP writes, as those of a sparse autoencoder or transcoder are:

# %%
_, cache = model.run_with_cache(tokens)
neurons = Features("blocks.1.hook_mlp_out", model.W_out[1], cache["blocks.1.mlp.hook_post"], bias=model.b_out[1])
ln_probe.attribute_logits(model, tokens, -1, target=target, against=second, features=neurons).check().top(6)

# %% [markdown]
# ## Attribution patching, with and without linearized norms
#
# What would change if one head's output came from another prompt? Running every patch is exact; a gradient times the
# difference estimates all of them in one pass. A norm's own gradient lets sigma answer to the patch; linearized, it
# is held.

# %%
other = make_prompts(model, [text.replace("lamp", "door").replace("ships", "men")]).tokens[0][None]
length = min(tokens.shape[1], other.shape[1])
clean, corrupt = tokens[:, -length:], other[:, -length:]
names = [f"blocks.{layer}.attn.hook_z" for layer in range(model.cfg.n_layers)]


def asked(ids: torch.Tensor) -> torch.Tensor:
    logits = model(ids)[0, -1]
    return logits[target] - logits[second]


with torch.no_grad():
    _, from_clean = model.run_with_cache(clean, names_filter=names)
    start = float(asked(corrupt))


def patched(name: str, head: int) -> float:
    def patch(z: torch.Tensor, hook: object) -> torch.Tensor:
        z = z.clone()
        z[:, :, head] = from_clean[name][:, :, head]
        return z

    with torch.no_grad(), model.hooks(fwd_hooks=[(name, patch)]):
        return float(asked(corrupt)) - start


def estimated() -> dict[tuple[str, int], float]:
    kept: dict[str, torch.Tensor] = {}

    def keep(z: torch.Tensor, hook: object) -> torch.Tensor:
        z.retain_grad()
        kept[hook.name] = z
        return z  # a bridge shows hooks its own view of z: what is returned is what the model goes on with

    with model.hooks(fwd_hooks=[(n, keep) for n in names]):
        asked(corrupt).backward()
    model.zero_grad()
    each = {n: (z.grad * (from_clean[n] - z.detach())).sum((0, 1, 3)) for n, z in kept.items()}
    return {(n, h): float(v) for n, values in each.items() for h, v in enumerate(values)}


plain = estimated()
with linearized(model):
    held = estimated()
table = pd.DataFrame(
    [
        {"head": f"L{n.split('.')[1]}H{h}", "patched": patched(n, h), "gradient": plain[n, h], "linearized": held[n, h]}
        for n, h in plain
    ]
).set_index("head")
errors = table[["gradient", "linearized"]].sub(table["patched"], axis=0).abs()
print("mean error, nats:", errors.mean().round(4).to_dict())
table.reindex(table["patched"].abs().sort_values(ascending=False).index).head(6).round(4)

# %% [markdown]
# Both are estimates: which is nearer depends on how far a patch moves sigma. Held, the gradient times a part is exactly
# what the part gives through each norm, and that is what adds up.
