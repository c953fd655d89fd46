"""Direct logit attribution on a raw model, all positions (TransformerLens issue 523): it adds up without folding."""

import ln_probe

model = ln_probe.load_model("lm-layernorm")
text = "The lamp was lit before the ships came home."
found = ln_probe.attribute_logits(model, text, components="layers").check()  # raises unless the sums are the logits
print(found.top(6).round(3).to_string())
print(f"largest error, of the largest logit: {found.error:.1e}")
