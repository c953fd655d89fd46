"""Entropy and pattern columns of every kind of attention, against the attention that Hugging Face's own model pays.

What a query sees is written down here from each config: local and sliding windows, ALiBi, interleaved rotary positions,
norms that do not scale, no norms at all.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from architectures import cases, hugging_face, make_hooked, norm_free
from small_models import DyT

import ln_probe
from ln_probe.hooks.norm import UnknownNormError
from ln_probe.loading.convert import has_hooked_transformer

pytestmark = pytest.mark.lens

LENGTH = 23
TOKENS = torch.randint(3, 50, (1, LENGTH), generator=torch.Generator().manual_seed(11))
GEOMETRY = ("selectability", "uniformity")
BOUND = 1e-6  # in float64, where no model rounds

# name: (architecture in conftest, further options, window of each layer, worlds besides the bridge)
CASES: dict[str, tuple[str, dict[str, Any], list[int | None], bool]] = {
    "gpt_neo_local": ("neo", {"window_size": 8}, [None, 8], True),
    "mistral": ("mistral", {"sliding_window": 8}, [8, 8], True),
    "gemma3": ("gemma3", {"sliding_window": 8}, [8, None], False),
    "gptj": ("gptj", {}, [None, None], False),
    "mpt": ("mpt", {}, [None, None], False),
    "mpt_6_heads": ("mpt", {"d_model": 48, "n_heads": 6}, [None, None], False),
    "bloom": ("bloom", {}, [None, None], False),
    "bloom_6_heads": ("bloom", {"hidden_size": 48, "n_head": 6}, [None, None], False),
    "gpt2_norm_free": ("gpt2", {}, [None, None], True),
    "gpt2": ("gpt2", {}, [None, None], True),
    "neox": ("neox", {}, [None, None], True),
    "opt": ("opt", {}, [None, None], True),
    "llama": ("llama", {}, [None, None], True),
    "gemma": ("gemma", {}, [None, None], False),
    "qwen3": ("qwen3", {}, [None, None], True),
    "olmo2": ("olmo2", {}, [None, None], False),
    "bert": ("bert", {}, [None, None], False),
}
WORLDS = ["bridge", "hooked"] if has_hooked_transformer() else ["bridge"]


def attentions(model: Any, tokens: torch.Tensor = TOKENS) -> list[np.ndarray]:
    """The pattern of every layer [head query key], by Hugging Face alone."""
    with torch.no_grad():
        return [a[0].double().numpy() for a in model(tokens, output_attentions=True).attentions]


def expected(pattern: np.ndarray, window: int | None, causal: bool) -> tuple[np.ndarray, np.ndarray]:
    """Entropy ratio of each head and largest weight of each key, by definition."""
    entropies, queries = np.zeros(len(pattern)), range(1 if causal else 0, pattern.shape[1])
    for t in queries:
        first, last = max(0, t - (window or LENGTH) + 1), t if causal else LENGTH - 1
        seen = pattern[:, t, first : last + 1]
        np.testing.assert_allclose(seen.sum(-1), 1, atol=1e-5, err_msg="the window in this test is wrong")
        logs = np.log(np.where(seen > 0, seen, 1.0))
        entropies += -(seen * logs).sum(-1) / np.log(last - first + 1)
    return entropies / len(queries), pattern[:, list(queries)].max(1)


def wrong_columns(
    report: ln_probe.Report, patterns: list[np.ndarray], windows: list[int | None], causal: bool = True
) -> list[tuple[str, int]]:
    """Return the columns, with the layer, that are not what the patterns define."""
    wrong = []
    for layer, (pattern, window) in enumerate(zip(patterns, windows, strict=True)):
        entropy, most = expected(pattern, window, causal)
        place = f"layer == {layer} and variant == 'intact'"
        rows = report.heads.query(place).sort_values("head")
        if not np.allclose(rows["entropy_ratio"], entropy, atol=BOUND, rtol=0):
            wrong.append(("entropy_ratio", layer))
        keys = report.keys.query(place).sort_values(["head", "position"])
        if not np.allclose(keys["pattern_max"].to_numpy().reshape(most.shape), most, atol=BOUND, rtol=0):
            wrong.append(("pattern_max", layer))
        if (keys["n"] > (window or LENGTH)).any():
            wrong.append(("n", layer))
    return wrong


EVERY = [(case, world) for case, (*_, hooked) in CASES.items() for world in (WORLDS if hooked else ["bridge"])]
QUICK = [(case, "bridge") for case in ("mistral", "gemma3", "gptj", "bloom_6_heads", "bert")]
QUICK += [(case, WORLDS[-1]) for case in ("gpt_neo_local", "gpt2_norm_free", "llama")]


@pytest.mark.parametrize(("case", "world"), cases(*QUICK, slow=[pair for pair in EVERY if pair not in QUICK]))
def test_columns_are_those_of_hugging_face(case: str, world: str, tmp_path: Path) -> None:
    arch, options, windows, _ = CASES[case]
    free = case == "gpt2_norm_free"
    original = norm_free(torch.float64) if free else hugging_face(arch, torch.float64, **options)
    original.save_pretrained(tmp_path)
    model = ln_probe.load_model(tmp_path, dtype="float64", device="cpu", world=world)  # type: ignore[arg-type]
    report = ln_probe.analyze(model, TOKENS, progress=False, probes=GEOMETRY)
    assert not [n for n in report.notes if "head space" in n]
    assert not wrong_columns(report, attentions(original), windows, causal=arch != "bert")


def test_norms_of_another_formula_are_refused() -> None:
    """A norm of another formula is named, and nothing is measured."""
    model = hugging_face("neox", torch.float64)
    for block in model.gpt_neox.layers:
        block.input_layernorm = DyT(block.input_layernorm, 0.6)
        block.post_attention_layernorm = DyT(block.post_attention_layernorm, 0.6)
    model.gpt_neox.final_layer_norm = DyT(model.gpt_neox.final_layer_norm, 0.6)
    with pytest.raises(UnknownNormError, match=r"blocks\.0\.ln1"):
        ln_probe.analyze(model, TOKENS, progress=False, probes=["decomposition"])


@pytest.mark.skipif(not has_hooked_transformer(), reason="this TransformerLens has no HookedTransformer")
@pytest.mark.parametrize("options", [
    {"use_local_attn": True, "window_size": 6, "attn_types": ["global", "local"]},
    {"positional_embedding_type": "alibi"},
    {"positional_embedding_type": "rotary", "rotary_dim": 8, "rotary_adjacent_pairs": True},
    {"normalization_type": None},
    {"normalization_type": "LNPre", "use_attn_scale": False},
    {"use_qk_norm": True, "normalization_type": "RMS", "n_key_value_heads": 2},
], ids=str)  # fmt: skip
def test_columns_are_those_of_hooked_transformers(options: dict[str, Any]) -> None:
    model = make_hooked(**options, dtype=torch.float64)
    _, cache = model.run_with_cache(TOKENS)
    patterns = [cache[f"blocks.{i}.attn.hook_pattern"][0].double().numpy() for i in range(2)]
    report = ln_probe.analyze(model, TOKENS, progress=False, probes=GEOMETRY)
    assert not wrong_columns(report, patterns, [None, 6] if "window_size" in options else [None, None])
