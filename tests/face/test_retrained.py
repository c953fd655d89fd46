"""The retrained lm-layernorm as a GPT-2: in transformers and under TransformerLens in every model class."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import ln_probe
from ln_probe.loading.convert import has_hooked_transformer

RETRAINED = Path(__file__).parents[2] / "examples" / "retrained" / "lm-layernorm-seed0"
TOKENS = torch.arange(3, 27).view(2, 12)
WORLDS = ("hooked", "bridge")


def distance(a: Tensor, b: Tensor) -> float:
    """The largest difference, relative to the largest of b."""
    return float((a - b).abs().max() / b.abs().max())


@pytest.fixture(scope="module")
def lab() -> Any:
    return ln_probe.load_model(RETRAINED)


@pytest.fixture(scope="module")
def folder(lab: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    where: Path = tmp_path_factory.mktemp("gpt2")
    lab.to_hugging_face().save_pretrained(where)
    lab.tokenizer.save_pretrained(where)
    return where


def loaded(folder: Path, world: Any, **more: Any) -> Any:
    if world == "hooked" and not has_hooked_transformer():
        pytest.skip("this TransformerLens has no HookedTransformer")
    return ln_probe.load_model(folder, world=world, **more)


def test_it_opens_in_transformers(lab: Any, folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        assert distance(model(TOKENS).logits, lab(TOKENS)) < 1e-5
    text = "And the king said"
    assert AutoTokenizer.from_pretrained(folder)(text).input_ids == lab.tokenizer(text).input_ids


@pytest.mark.parametrize("world", WORLDS)
def test_the_logit_lens_and_the_results_of_heads(lab: Any, folder: Path, world: str) -> None:
    model = loaded(folder, world)
    with torch.no_grad():
        logits, cache = model.run_with_cache(TOKENS)
        assert distance(logits, lab(TOKENS)) < 1e-5
        stream, labels = cache.accumulated_resid(layer=-1, incl_mid=True, apply_ln=True, return_labels=True)
        assert labels[-1] == "final_post"
        lens = model.ln_final(cache["resid_post", 3]) @ model.W_U + model.b_U
        assert distance(stream[-1] @ model.W_U + model.b_U, lens) < 1e-4
        assert distance(lens, logits) < 1e-4
        heads = cache.stack_head_results(layer=1)
        biases = model.blocks[0].attn.b_O
        assert distance(heads.sum(0) + biases, cache["attn_out", 0]) < 1e-4


@pytest.mark.parametrize("world", WORLDS)
def test_direct_logit_attribution_of_a_folded_copy_adds_up(folder: Path, world: str) -> None:
    model = loaded(folder, world, fold_ln=True, center_writing_weights=True, center_unembed=True)
    with torch.no_grad():
        logits, cache = model.run_with_cache(TOKENS)
        every = cache.decompose_resid(layer=-1)
        assert distance(every.sum(0), cache["resid_post", 3]) < 1e-4
        attributed = cache.logit_attrs(every, tokens=TOKENS).sum(0)
        wanted = (logits - model.b_U).gather(-1, TOKENS[..., None])[..., 0]
        assert distance(attributed, wanted) < 1e-4


@pytest.mark.parametrize("world", WORLDS)
def test_it_generates(lab: Any, folder: Path, world: str) -> None:
    model = loaded(folder, world)
    greedy = TOKENS[:1]
    with torch.no_grad():
        for _ in range(3):
            greedy = torch.cat([greedy, lab(greedy)[:, -1:].argmax(-1)], dim=1)
    made = model.generate(TOKENS[:1], max_new_tokens=3, do_sample=False, stop_at_eos=False, verbose=False)
    assert made.tolist() == greedy.tolist()
