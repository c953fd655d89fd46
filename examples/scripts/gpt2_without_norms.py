"""Save a Hugging Face GPT-2 whose norms divide by constants (Heimersheim 2024; Baroni et al. 2025).

No checkpoint format has such a norm. But where eps = E is far above every mean square, sigma is √E for all vectors,
and a gain of gain·√E / c gives gain·Px / c.
"""

import tempfile
from functools import partial

import torch
from torch import nn
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

EPS = 1e12  # the mean squares of residual streams reach about 1e6


def layer_norms(model):
    """Return every LayerNorm of a model by its name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, nn.LayerNorm)}


def mean_sigmas(model, tokens):
    """Return the mean sigma of every norm over some tokens."""
    sigmas = {}

    def record(name, norm, args):
        sigmas[name] = float((args[0].var(-1, unbiased=False) + norm.eps).sqrt().mean())

    hooks = [norm.register_forward_pre_hook(partial(record, name)) for name, norm in layer_norms(model).items()]
    with torch.no_grad():
        model(tokens)
    for hook in hooks:
        hook.remove()
    return sigmas


def freeze(model, constants):
    """Set eps and gains so that every norm divides by its constant."""
    for name, norm in layer_norms(model).items():
        norm.eps = EPS
        norm.weight.data *= EPS**0.5 / constants[name]
    model.config.layer_norm_epsilon = EPS


torch.manual_seed(0)
config = GPT2Config(n_layer=2, n_head=2, n_embd=32, vocab_size=100, bos_token_id=0, eos_token_id=0)
model = GPT2LMHeadModel(config).eval()  # yours: GPT2LMHeadModel.from_pretrained("gpt2")
tokens = torch.randint(100, (4, 32))  # yours: tokens of the text that the constants are to fit
constants = mean_sigmas(model, tokens)
with torch.no_grad():
    intact = model(tokens).logits
freeze(model, constants)
with tempfile.TemporaryDirectory() as folder:
    model.save_pretrained(folder)
    loaded = AutoModelForCausalLM.from_pretrained(folder)
with torch.no_grad():
    logits = loaded(tokens).logits
print(f"logits move by up to {float((logits - intact).abs().max()):.2f} without scaling")
