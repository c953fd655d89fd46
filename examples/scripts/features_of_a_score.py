"""Which features of the query meet which features of the key (circuit-tracer issue 53): a score as a sum over pairs."""

import torch

import ln_probe
from ln_probe.analyses.attribution import Features
from ln_probe.prompts import make_prompts

model = ln_probe.load_model("lm-layernorm")
tokens = make_prompts(model, ["The lamp was lit before the ships came home."]).tokens[0]
_, cache = model.run_with_cache(tokens[None])
x = cache["blocks.1.hook_resid_pre"]
directions = torch.linalg.svd(x[0] - x[0].mean(0), full_matrices=False)[2]  # in place of a trained SAE's decoder
features = Features("blocks.1.hook_resid_pre", directions, x @ directions.T)
found = ln_probe.attribute_scores(model, tokens, 1, 0, -1, 2, "mean", features).check()
print(found.top(6).round(3).to_string())
