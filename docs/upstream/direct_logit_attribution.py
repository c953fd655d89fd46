"""Direct logit attribution on a raw model leaves out the final norm's gain and bias. This fails while it does."""

import torch
from transformer_lens.model_bridge.sources import build_bridge_from_module
from transformers import GPT2Config, GPT2LMHeadModel


@torch.no_grad()
def drawn(module):
    for parameter in module.parameters():  # gains and biases of norms too: those of a new model are 1 and 0
        parameter.normal_(std=0.2)
    return module.eval()


torch.manual_seed(0)
original = drawn(GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=32, n_head=4, vocab_size=50)))
models = {"bridge": build_bridge_from_module(original, "GPT2LMHeadModel", hf_config=original.config, tokenizer=None)}
try:  # until TransformerLens 3.9
    from transformer_lens import HookedTransformer, HookedTransformerConfig

    config = dict(n_layers=2, d_model=32, d_head=8, n_ctx=32, d_vocab=50, act_fn="gelu", seed=0)  # noqa: C408
    models["HookedTransformer"] = drawn(HookedTransformer(HookedTransformerConfig(**config)))
except ImportError:
    pass

errors = []
tokens, target = torch.arange(10)[None], 7
for name, model in models.items():
    with torch.no_grad():
        logits, cache = model.run_with_cache(tokens)
        parts = cache.logit_attrs(cache.decompose_resid(pos_slice=-1), tokens=target, pos_slice=-1)
        expected = (logits[0, -1, target] - model.b_U[target]).item()
    print(f"{name}: components sum to {parts.sum():.3f}, the logit without the unembedding's bias is {expected:.3f}")
    errors.append(abs(parts.sum().item() - expected))
assert max(errors) < 1e-3, "the sum of the attributions is not the logit"
