"""What a language model does with its norms or without them: loss, sinks, entropy, selectability of keys, sigma."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ln_probe.analyses.geometry.api import key_geometry
from ln_probe.analyses.geometry.decide import NAMES, UNSELECTABLE
from ln_probe.analyses.lab.text_task import TextTask
from ln_probe.analyses.lab.transformer import LabTransformer
from ln_probe.analyses.probes.uniformity import entropy_ratio

LOSS = "valid_loss"
SINK = 0.3  # more attention than this on one position makes a (head, query) a sink's (Gu et al. 2025)
KEY_CONTEXTS = 2  # held-out windows whose keys are decided: 64 heads of 256 keys each, some ten seconds a window


@torch.no_grad()
def measures(model: LabTransformer, text: TextTask, contexts: int) -> Iterator[tuple[str, float]]:
    """Measure and value, means over layers, heads, held-out windows and their positions.

    valid_loss; attention_on_first, sink_rate: attention that queries after position 0 pay to it, and the share of them
    that pay over SINK; entropy_ratio: of attention over its largest possible; sigma_ratio: sigma at position 0 over
    the mean elsewhere, of norm inputs; unselectable_head, unselectable_normalized: shares of keys.
    """
    yield LOSS, text.evaluate(model)[LOSS]
    layers = range(model.cfg.n_layers)
    windows = text.held_out(contexts)
    names = [f"blocks.{i}.{n}" for i in layers for n in ("hook_resid_pre", "attn.hook_pattern")]
    first, sinks, entropy, sigma = [], [], [], []
    for part in windows.split(4):
        _, cache = model.run_with_cache(part, names_filter=names, return_type=None)
        for layer in layers:
            pattern = cache[f"blocks.{layer}.attn.hook_pattern"][:, :, 1:]
            first.append(pattern[..., 0].mean())
            sinks.append((pattern[..., 0] > SINK).float().mean())
            whole = cache[f"blocks.{layer}.attn.hook_pattern"]
            entropy += [entropy_ratio(one.double())[:, 1:].mean() for one in whole]
            spread = cache[f"blocks.{layer}.hook_resid_pre"].std(-1, correction=0)
            sigma.append((spread[:, 0] / spread[:, 1:].mean(1)).mean())
    for name, found in (
        ("attention_on_first", first),
        ("sink_rate", sinks),
        ("entropy_ratio", entropy),
        ("sigma_ratio", sigma),
    ):
        yield name, float(torch.stack([f.double() for f in found]).mean())
    names = [f"blocks.{i}.{n}" for i in layers for n in ("ln1.hook_normalized", "attn.hook_k")]
    _, cache = model.run_with_cache(windows[:KEY_CONTEXTS], names_filter=names, return_type=None)
    for space, leaf in (("normalized", "ln1.hook_normalized"), ("head", "attn.hook_k")):
        shares = []
        for layer in layers:
            keys = cache[f"blocks.{layer}.{leaf}"]
            keys = keys.transpose(1, 2).flatten(0, 1) if space == "head" else keys
            verdict = key_geometry(keys.double().numpy(), margins=False).verdict
            shares.append(float((verdict == NAMES[UNSELECTABLE]).mean()))
        yield f"unselectable_{space}", sum(shares) / len(shares)
