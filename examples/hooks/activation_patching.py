"""TransformerLens's activation patching with frozen norms: as on a model edited by hand."""

import torch
from transformer_lens.patching import get_act_patch_resid_pre

from ln_probe import hooks, load_model

model, (clean, corrupt) = load_model("lm-layernorm"), torch.arange(1, 17).view(2, 1, 8)
_, cache = model.run_with_cache(clean)
with model.hooks(fwd_hooks=hooks.edit_hooks(model, "scaling", sites="all", scale=2.0)), torch.no_grad():
    scores = get_act_patch_resid_pre(model, corrupt, cache, lambda logits: logits[0, -1, 7])
for norm in hooks.find_norms(model):
    norm.module.register_forward_hook(lambda _, x, y, norm=norm: norm.affine(norm.project(x[0]) / 2.0))
by_hand = get_act_patch_resid_pre(model, corrupt, cache, lambda logits: logits[0, -1, 7])
print(*(f"largest logit {float(s.max()):.5f}" for s in (scores, by_hand)))
