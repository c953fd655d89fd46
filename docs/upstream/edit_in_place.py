"""An edit in place at a norm's hook points is lost where the bridge calls the original norm. This fails while it is."""

import torch
from transformer_lens.model_bridge.sources import build_bridge_from_module
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

torch.manual_seed(0)
config = GPTNeoXConfig(
    num_hidden_layers=2,
    hidden_size=32,
    intermediate_size=64,
    num_attention_heads=4,
    vocab_size=50,
    tie_word_embeddings=False,
)
original = GPTNeoXForCausalLM(config).eval()
with torch.no_grad():
    for parameter in original.parameters():
        parameter.normal_(std=0.2)
model = build_bridge_from_module(original, "GPTNeoXForCausalLM", hf_config=config, tokenizer=None)
tokens, name = torch.arange(10)[None], "blocks.1.ln1.hook_normalized"


def doubled(value, hook):
    return 2 * value


def double_in_place(value, hook):
    value.mul_(2)


with torch.no_grad():
    intact = model(tokens)
    returned = model.run_with_hooks(tokens, fwd_hooks=[(name, doubled)])
    in_place = model.run_with_hooks(tokens, fwd_hooks=[(name, double_in_place)])
moved = [(logits - intact).abs().max().item() for logits in (returned, in_place)]
print(f"logits move by {moved[0]:.3f} if the hook returns the edit, by {moved[1]:.3f} if it edits in place")
assert abs(moved[0] - moved[1]) < 1e-5, "the edit in place is lost"
