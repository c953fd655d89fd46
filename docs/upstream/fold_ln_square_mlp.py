"""Folding norms changes a model whose MLP is as wide as its residual stream. This fails while it does."""

import torch
from transformer_lens.model_bridge.sources import build_bridge_from_module
from transformers import GPT2Config, GPT2LMHeadModel

torch.manual_seed(0)
config = GPT2Config(n_layer=2, n_embd=32, n_inner=32, n_head=4, vocab_size=50, n_positions=32)
original = GPT2LMHeadModel(config).eval()
with torch.no_grad():
    for parameter in original.parameters():  # gains and biases of norms too: those of a new model are 1 and 0
        parameter.normal_(std=0.2)
model = build_bridge_from_module(original, "GPT2LMHeadModel", hf_config=config, tokenizer=None)
tokens = torch.arange(10)[None]
with torch.no_grad():
    raw = model(tokens).log_softmax(-1)
    model.enable_compatibility_mode(no_processing=False)
    folded = model(tokens).log_softmax(-1)
moved = (folded - raw).abs().max().item()
print(f"folding moves log-probabilities by {moved:.3f}")
assert moved < 1e-3, "the folded model is another model"
