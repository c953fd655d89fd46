"""The checkpoints that come with the package and the examples are what their recipes say, in every model class."""

from __future__ import annotations

import json
import math
from collections import Counter
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import cases
from small_models import lab as small_lab
from torch import Tensor

import ln_probe
from ln_probe.analyses.lab.gpt2 import as_gpt2
from ln_probe.analyses.lab.norms import NORM_KINDS
from ln_probe.analyses.lab.points import PlainTokenizer
from ln_probe.analyses.lab.train import load_run
from ln_probe.hooks import find_norms
from ln_probe.hooks.task import bundled_texts
from ln_probe.loading.convert import has_hooked_transformer
from ln_probe.models import bundled_folder, held_out_windows, source_of
from ln_probe.prompts import make_prompts

pytestmark = pytest.mark.lens

NAMES = ln_probe.bundled_models()
REMOVED = "lm-layernorm-removed"  # fine-tuned until its norms were constants
TRAINED = [n for n in NAMES if n != REMOVED]


def test_there_is_one_of_every_norm_with_a_recipe() -> None:
    """Small, and alike but for the norm before attention."""
    assert set(NAMES) == {f"lm-{kind}" for kind in NORM_KINDS} | {REMOVED}
    assert sum(f.stat().st_size for n in NAMES for f in bundled_folder(n).iterdir()) < 10_000_000
    labs = {}
    for name in NAMES:
        folder = bundled_folder(name)
        assert (folder / "model.safetensors").stat().st_size < 2_000_000
        recipe = json.loads((folder / "recipe.json").read_text())
        labs[name] = json.loads((folder / "lab.json").read_text())
        assert labs[name]["training"]["steps"] == (500 if name == REMOVED else 2000)
        assert ("remove_norm" if name == REMOVED else f"--norm {name.removeprefix('lm-')}") in recipe["command"]
    for name in TRAINED:
        assert labs[name]["model"].pop("norm") == name.removeprefix("lm-")
        assert labs[name] == labs[TRAINED[0]]


def test_the_one_without_norms_is_as_good_and_scales_nowhere() -> None:
    """Its norms are Px times a constant: told by their answers; its held-out loss is within 0.01 of the one it was."""
    recipes = [json.loads((bundled_folder(n) / "recipe.json").read_text()) for n in (REMOVED, "lm-layernorm")]
    assert abs(recipes[0]["valid_loss"] - recipes[1]["valid_loss"]) < 0.01
    tokens = torch.arange(1, 40)[None]
    report = ln_probe.analyze(ln_probe.load_model(REMOVED), tokens, probes=("decomposition",), progress=False)
    assert set(report.provenance["model"]["norms"].values()) == {"projection_only"}


TOKENS = torch.arange(3, 27).view(2, 12)
WORLDS = ("hooked", "bridge") if has_hooked_transformer() else ("bridge",)
# One model in each world, the others in one of them.
QUICK = [*(("lm-layernorm", w) for w in WORLDS), *((n, WORLDS[i % len(WORLDS)]) for i, n in enumerate(NAMES[1:]))]


def distance(a: Tensor, b: Tensor) -> float:
    """The largest difference, relative to the largest of b."""
    return float((a - b).abs().max() / b.abs().max())


@pytest.fixture(scope="module")
def lab() -> Any:
    return load_run(bundled_folder("lm-layernorm"))


@pytest.fixture(scope="module")
def folder(lab: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    where: Path = tmp_path_factory.mktemp("gpt2")
    as_gpt2(lab).save_pretrained(where)
    lab.tokenizer.save_pretrained(where)
    return where


def test_it_opens_in_transformers(lab: Any, folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        assert distance(model(TOKENS).logits, lab(TOKENS)) < 1e-5
    text = "And the king said"
    expected = AutoTokenizer.from_pretrained(folder)(text).input_ids
    plain = PlainTokenizer(str(folder / "tokenizer.json"), "<|endoftext|>", "<|endoftext|>")  # of the first command
    assert expected == lab.tokenizer(text).input_ids == plain(text)["input_ids"]
    assert plain.decode(expected) == text
    bare = small_lab(affine=False, affine_others=False)
    assert distance(as_gpt2(bare)(TOKENS).logits, bare(TOKENS)) < 1e-5, "no gain is 1, no bias 0"


TEXT = "In the beginning God created the heaven and the earth."
# The passages nearest to three old books.
OLD = [text for text in bundled_texts() if text.startswith(("The old keeper", "And the king", "FIRST GUARD"))]


@pytest.mark.parametrize(("name", "world"), cases(*QUICK, slow=[c for c in product(NAMES, WORLDS) if c not in QUICK]))
def test_a_bundled_model_is_a_transformer_lens_model_that_can_read(name: str, world: Any) -> None:
    """On bundled prose, which is not from the training text: far better than chance and than its unigrams."""
    model = ln_probe.load_model(name, world=world)
    trained = load_run(bundled_folder(name))
    tokens = model.to_tokens(TEXT)
    torch.testing.assert_close(model(tokens), trained(tokens), atol=1e-4, rtol=0)
    assert source_of(model).world == {"hooked": "HookedTransformer", "bridge": "TransformerBridge"}[world]
    assert "".join(model.to_str_tokens(TEXT)) == "<|endoftext|>" + TEXT  # as it was trained
    assert model.W_Q.shape == (4, 16, 128, 8)
    _, cache = model.run_with_cache(tokens)
    assert cache["blocks.0.attn.hook_pattern"].shape == (1, 16, tokens.shape[1], tokens.shape[1])
    said = model.generate(tokens, max_new_tokens=4, do_sample=False, verbose=False)
    with torch.no_grad():
        expected = tokens
        for _ in range(4):
            expected = torch.cat([expected, trained(expected)[:, -1:].argmax(-1)], dim=1)
        losses = [float(model(row[None], return_type="loss")) for row in make_prompts(model, OLD).tokens]
    assert said.tolist() == expected.tolist()
    assert len(losses) == 3
    assert sum(losses) / 3 < 4.6 < math.log(1024) - 2
    kinds = {site.name: site.kind for site in find_norms(model)}
    assert kinds == {site.name: site.kind for site in find_norms(trained)}


@pytest.mark.parametrize(("name", "world"), [("lm-projection_only", WORLDS[0]), ("lm-none", WORLDS[-1])])
def test_a_norm_without_scaling_stays_one(name: str, world: Any) -> None:
    """A bridge's own component would divide by sigma, whatever it wraps; and folding leaves such a model alone."""
    model = ln_probe.load_model(name, world=world)
    norm = model.blocks[0].ln1
    x = torch.randn(1, 3, 128, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        zero = norm(torch.zeros_like(x))
        torch.testing.assert_close(norm(2 * x) - zero, 2 * (norm(x) - zero))  # linear but for its bias
        shift = norm(x + 1) - norm(x)
    assert bool((shift.abs() < 1e-5).all()) == (name == "lm-projection_only")
    tokens = model.to_tokens(TEXT)
    with torch.no_grad():
        before = model(tokens).log_softmax(-1)
        if world == "hooked":
            model.process_weights_()
        else:
            model.enable_compatibility_mode(disable_warnings=True)
        torch.testing.assert_close(model(tokens).log_softmax(-1), before, atol=1e-4, rtol=0)


def test_any_number_of_the_first_prompts_is_balanced_over_the_books() -> None:
    windows = held_out_windows()
    shares = {book: n / len(windows.strata) for book, n in Counter(windows.strata).items()}
    assert len(windows.measured) == len(windows.strata) == 64
    assert len(shares) == 3
    for n in range(1, 65):
        first = Counter(windows.strata[:n])
        assert all(abs(first[book] - n * share) < 1 for book, share in shares.items())
    halves = [Counter(windows.strata[start::2]) for start in (0, 1)]  # of loss-optimal constants
    assert all(abs(halves[0][book] - halves[1][book]) <= 1 for book in shares)
