# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Your own checkpoint: raw against folded
#
# `load_model` takes a local Hugging Face folder (config.json and weights; a tokenizer if there is one) without asking
# a hub for anything. Put the path of yours here. So that this notebook runs everywhere, it writes a small GPT-2 with
# random weights first.

# %%
import tempfile
from pathlib import Path

import torch
import transformers

import ln_probe

transformers.utils.logging.disable_progress_bar()
folder = Path(tempfile.mkdtemp()) / "my-gpt2"  # your own: Path("~/checkpoints/my-gpt2").expanduser()
torch.manual_seed(0)
config = transformers.GPT2Config(
    n_embd=48, n_head=4, n_layer=3, n_positions=64, vocab_size=97, bos_token_id=None, eos_token_id=None
)
written = transformers.GPT2LMHeadModel(config)
with torch.no_grad():
    for parameter in written.parameters():  # away from the initial values: gains are not all 1
        parameter.add_(0.2 * torch.randn(parameter.shape))
written.save_pretrained(folder)

# %% [markdown]
# ## Raw: the weights as they were trained
#
# After loading, logits are compared with the Hugging Face model's once; the report says how closely they agreed,
# which class of TransformerLens holds the model, and the hash of the weights. Without a tokenizer, give token ids.

# %%
raw = ln_probe.load_model(folder)
tokens = torch.randint(97, (2, 48), generator=torch.Generator().manual_seed(1))
of_raw = ln_probe.analyze(raw, tokens, progress=False)
{k: of_raw.provenance["model"][k] for k in ("world", "architecture", "logits_max_difference")}

# %%
of_raw.layernorms[["site", "projected_share", "reconstruction_error"]]

# %% [markdown]
# ## Folded: what TransformerLens does on request
#
# `fold_ln` moves gain and bias into the weights that follow; `center_writing_weights` makes everything that writes to
# the residual stream sum to zero. The model computes the same function, but its norms do less: projection has nothing
# left to take off *by construction*: `projected_share`, the share of a vector's squared length that it removes, is 0 to
# rounding.

# %%
folded = ln_probe.load_model(folder, world="bridge")
folded.enable_compatibility_mode(center_unembed=False, fold_value_biases=False, disable_warnings=True)
of_folded = ln_probe.analyze(folded, tokens, progress=False)
of_folded.layernorms[["site", "projected_share", "reconstruction_error"]]

# %% [markdown]
# ## The same model, so the same heads
#
# What a head can select does not depend on how its weights are written down: verdicts are equal, and margins, which
# are measured in nats over everything the head's queries can reach, agree to rounding.

# %%
both = ln_probe.compare([of_raw, of_folded], names=["raw", "folded"])
heads = both.by_head
largest = (heads["margin"]["raw"] - heads["margin"]["folded"]).abs().max()
print(f"largest difference between median margins: {largest:.1e} nats")
assert (heads["unselectable"]["raw"] == heads["unselectable"]["folded"]).all()
assert largest < 1e-3
heads[["unselectable", "margin", "entropy_ratio"]].head(8)

# %% [markdown]
# On the command line the same is `ln-probe report path/to/my-gpt2 --prompts tokens.jsonl`.
