"""Which components of the residual stream set a norm's sigma: sigma² = eps + the sum of mean(Px_p · Px) over them."""

import torch

import ln_probe
from ln_probe.hooks import find_norms

model, tokens = ln_probe.load_model("lm-layernorm"), torch.arange(1, 33)[None]
norm = next(s for s in find_norms(model) if s.name == "ln_final")
names = ["hook_embed", "hook_pos_embed"]
names += [f"blocks.{layer}.hook_{part}_out" for layer in range(len(model.blocks)) for part in ("attn", "mlp")]
components = {}


def record(value, hook):
    """Record what a component writes."""
    components[hook.name] = value.detach()


with torch.no_grad():
    model.run_with_hooks(tokens, fwd_hooks=[(name, record) for name in names], return_type=None)
x = sum(components.values())
squares = norm.decompose(x).sigma[..., 0] ** 2  # at every token
shares = {name: (norm.project(v.double()) * norm.project(x.double())).mean(-1) for name, v in components.items()}
print(f"mean sigma² of {norm.name}: {float(squares.mean()):.3f}, of which")
for name, share in shares.items():
    print(f"{name:24} {float((share / squares).mean()):+.3f}")
