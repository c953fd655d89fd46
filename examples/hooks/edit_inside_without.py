"""Edits at a norm's hook points act inside `without` (some bridges ignored such edits until TransformerLens #1527)."""

import torch

import ln_probe
from ln_probe.hooks import without

model, tokens = ln_probe.load_model("lm-layernorm"), torch.arange(1, 33)[None]
double = ("blocks.1.ln1.hook_normalized", lambda value, hook: 2 * value)
with torch.no_grad(), without(model, "scaling", sites=["blocks.1.ln1"], scale=2.0):
    plain = model(tokens)
    edited = model.run_with_hooks(tokens, fwd_hooks=[double])
print(f"logits move by up to {float((edited - plain).abs().max()):.2f}")
