"""A logit as a sum of components, with the final norm's scale frozen at the run's own."""

import torch

import ln_probe
from ln_probe.hooks import linearized

model, tokens = ln_probe.load_model("lm-layernorm"), torch.arange(1, 33)[None]
stream = []
record = ("blocks.3.hook_resid_post", lambda value, hook: stream.append(value.requires_grad_()) or value)
with linearized(model):
    logit = model.run_with_hooks(tokens, fwd_hooks=[record])[0, -1, 7]
(direction,) = torch.autograd.grad(logit, stream[0])
print(f"of the logit {logit.item():.3f} the residual stream gives {float((direction * stream[0]).detach().sum()):.3f}")
