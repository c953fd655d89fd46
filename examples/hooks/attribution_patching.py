"""TransformerLens's attribution patching with frozen norms: as on a model edited by hand (4.3: edges too)."""

import torch
from transformer_lens.tools.analysis.attribution_patching import EdgeAttributionConfig, attribution_patch

from ln_probe import hooks, load_model

model, pair = load_model("lm-layernorm"), (torch.arange(1, 9)[None], torch.arange(9, 17)[None])
config = EdgeAttributionConfig(granularity=globals().get("granularity", "node"))
with model.hooks(fwd_hooks=hooks.edit_hooks(model, "scaling", sites="all", scale=0.5)):
    scores = attribution_patch(model, *pair, lambda logits: logits[0, -1, 7], config)
for norm in hooks.find_norms(model):
    norm.module.register_forward_hook(lambda _, x, y, norm=norm: norm.affine(norm.project(x[0]) / 0.5))
by_hand = attribution_patch(model, *pair, lambda logits: logits[0, -1, 7], config)
print(*(f"largest score {max(s.node_scores.values()):.5f}" for s in (scores, by_hand)))
