"""SAE latents through the final norm of a raw model: any object with encode, decode and W_dec, as SAELens's."""

from types import SimpleNamespace

import torch

import ln_probe
from ln_probe.analyses.attribution import Features
from ln_probe.prompts import make_prompts

model = ln_probe.load_model("lm-layernorm")
tokens = make_prompts(model, ["The lamp was lit before the ships came home."]).tokens[0][None]
W = torch.nn.functional.normalize(torch.randn(512, 128, generator=torch.Generator().manual_seed(0)), dim=1)
sae = SimpleNamespace(encode=lambda x: (x @ W.T - 1).relu(), decode=lambda a: a @ W, W_dec=W)  # SAE.from_pretrained(…)
hook_name = f"blocks.{model.cfg.n_layers - 1}.hook_resid_post"
features = Features.of(sae, model.run_with_cache(tokens)[1], hook_name)
print(ln_probe.attribute_logits(model, tokens, -1, features=features).check().top(8).round(3).to_string())
