"""A SAELens model with frozen norms and an SAE spliced in: as on a model edited by hand."""

import torch
from sae_lens import HookedSAETransformer, StandardSAE, StandardSAEConfig

from ln_probe import hooks

shape = {"n_layers": 2, "d_model": 32, "n_ctx": 16, "d_head": 8, "d_vocab": 50, "act_fn": "gelu"}
model, sae, tokens = HookedSAETransformer(shape), StandardSAE(StandardSAEConfig(32, 64)), torch.arange(1, 13)[None]
sae.cfg.metadata.hook_name = "blocks.1.hook_resid_pre"
model.add_sae(sae)
edited = model.run_with_hooks(tokens, fwd_hooks=hooks.edit_hooks(model, "scaling", sites="all", scale=2.0))
for norm in hooks.find_norms(model):
    norm.module.register_forward_hook(lambda _, x, y, norm=norm: norm.affine(norm.project(x[0]) / 2.0))
print(f"largest logit {edited.max().item():.5f}, by hand {model(tokens).max().item():.5f}")
