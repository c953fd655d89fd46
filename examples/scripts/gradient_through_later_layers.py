"""Attribute a logit to every head through all later layers, to first order, with the scale of every norm held."""

import torch

import ln_probe
from ln_probe.hooks import linearized

model, tokens = ln_probe.load_model("lm-layernorm"), torch.arange(1, 33)[None]
answer, outputs = 7, []


def record(value, hook):
    """Record the outputs of a layer's heads, with their gradient."""
    outputs.append(value)
    value.retain_grad()
    return value


hooks = [(f"blocks.{layer}.attn.hook_z", record) for layer in range(len(model.blocks))]
with linearized(model):  # in the gradient, every norm divides by its own sigma as by a constant
    logit = model.run_with_hooks(tokens, fwd_hooks=hooks)[0, -1, answer]
    logit.backward()
heads = model.cfg.n_heads
effects = torch.stack([(z.grad * z).detach().sum((0, 1, 3)) for z in outputs])
print(f"logit {logit.item():.3f}; heads through all later layers, to first order:")
for place in effects.abs().flatten().argsort(descending=True)[:6].tolist():
    layer, head = divmod(place, heads)
    print(f"L{layer}H{head} {effects[layer, head]:+.4f}")
