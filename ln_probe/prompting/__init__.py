"""What a model is run on: every source of prompts, for `analyze` and for batch reports alike.

`sources` reads texts and ids from where they lie, `prompts` makes token ids of them for a model, `shards` divides what
was read for a batch, `token_shards` keeps the ids of each part on disk. The texts that ship, encoding and sampling are
in `ln_probe.hooks.default_tokens`, for `without` calibrates on the same tokens.
"""
