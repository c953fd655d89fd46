"""Edits that share a pass give what each gives alone: with the model's attention and logits, and with our own."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from architectures import cases, make_bridge, make_hooked
from small_models import lab

from ln_probe.analyses.probes import edited_passes
from ln_probe.analyses.probes.edited_passes import EditedPasses, PlainAttention, Unembedding, is_affordable, largest
from ln_probe.analyses.probes.edited_passes import merged as merge
from ln_probe.hooks.constants import Constant, mean_sigmas
from ln_probe.hooks.edits import without
from ln_probe.hooks.norm import EDITS
from ln_probe.hooks.norm_edits import NormEdit
from ln_probe.hooks.norms import find_norms
from ln_probe.hooks.stream import ActivationError
from ln_probe.hooks.task import Objective
from ln_probe.loading.convert import has_hooked_transformer

TOKENS = torch.tensor([5, 7, 7, 3, 11, 2, 19, 23])
TERM = {"no_scaling": "scaling", "no_projection": "projection", "both_removed": "both"}


def every_edit(model: Any) -> list[tuple[str, str, list[NormEdit]]]:
    """Return edits of every norm alone and of all together: names of sites and variant, and the edits."""
    norms = find_norms(model)
    constants = mean_sigmas(model, norms, [TOKENS])
    edits = []
    for variant in EDITS:
        for sites, some in [*((norm.name, [norm]) for norm in norms), ("all", norms)]:
            together = [NormEdit.of(n, variant.name, constants[n.name].pair) for n in some if variant.effect(n)]
            if together:
                edits.append((sites, variant.name, together))
    return edits


def losses(model: Any, *, plain: bool = False) -> np.ndarray:
    attention = PlainAttention.of(model, TOKENS) if plain else None
    assert (attention is not None) == plain
    with torch.no_grad(), attention.replaced() if attention else nullcontext():
        return np.array(EditedPasses(model, Objective(), TOKENS).losses([each for *_, each in every_edit(model)]))


@pytest.mark.parametrize("arch", cases("gpt2", "qwen3", "gemma2", slow=["neox", "opt"]))
def test_together_as_with_without(arch: str) -> None:
    model = make_bridge(arch, torch.float64)
    constants: dict[str, Constant] = mean_sigmas(model, find_norms(model), [TOKENS])
    for (sites, variant, _), loss in list(zip(every_edit(model), losses(model), strict=True))[::3]:
        with torch.no_grad(), without(model, TERM[variant], sites=sites, scale=constants):
            alone = float(Objective().sums(model(TOKENS[None], return_type="logits"), TOKENS[None])[0])
        assert loss == pytest.approx(alone, rel=1e-6)  # float32 inside some norms


def test_rows_of_a_pass_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_bridge("gpt2", torch.float64)
    together = losses(model)
    monkeypatch.setattr(edited_passes, "TOKENS_AT_ONCE", 1)
    np.testing.assert_allclose(losses(model), together, rtol=1e-9)


def test_edits_that_begin_at_different_blocks_share_passes_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    by_start = {(1, True): [4], (0, False): [0, 3], (1, False): [1, 2], (2, False): [5, 6]}
    assert merge(by_start, 3) == [((0, False), [0, 3, 1, 2]), ((1, True), [4, 5, 6])]
    assert merge(by_start, 1) == sorted(by_start.items())
    model = make_bridge("gpt2", torch.float64)
    apart = losses(model)
    monkeypatch.setattr(edited_passes, "merged", lambda by_start, _: merge(by_start, 5))
    np.testing.assert_allclose(losses(model), apart, rtol=1e-9)


@pytest.mark.parametrize("world", ["bridge", *(["hooked"] if has_hooked_transformer() else [])])
def test_plain_attention_gives_the_same_losses(world: str) -> None:
    model = make_bridge("gpt2", torch.float64) if world == "bridge" else make_hooked(dtype=torch.float64)
    np.testing.assert_allclose(losses(model, plain=True), losses(model), rtol=1e-9)
    long = torch.arange(2, 50).repeat(2)[: int(model.cfg.n_ctx)]  # several blocks of queries
    plain = PlainAttention.of(model, long)
    with torch.no_grad(), plain.replaced():
        logits = model(long[None], return_type="logits")
    with torch.no_grad():
        torch.testing.assert_close(logits, model(long[None], return_type="logits"))


@pytest.mark.parametrize("arch", ["neox", "llama", "gemma2", "bert"])
def test_plain_attention_is_refused_where_it_is_another(arch: str) -> None:
    """Rotary positions, shared keys, a soft cap, every key seen."""
    assert PlainAttention.of(make_bridge(arch, torch.float64), TOKENS) is None


def test_plain_attention_is_refused_beside_hooks_and_in_16_bits() -> None:
    model: Any = make_bridge("gpt2", torch.float64)
    model.blocks[0].attn.hook_pattern.add_hook(lambda pattern, hook: pattern)
    assert PlainAttention.of(model, TOKENS) is None
    assert PlainAttention.of(make_bridge("gpt2", torch.bfloat16), TOKENS) is None


@pytest.mark.parametrize("arch", ["gpt2", "llama", "gemma2"])
def test_logits_made_here_are_the_models(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A few columns of the vocabulary at a time, against whole logits; Gemma 2 caps its own, so those are taken."""
    model = make_bridge(arch, torch.float64)
    monkeypatch.setattr(edited_passes, "_NARROWEST", 7)
    monkeypatch.setattr(edited_passes, "_LOGITS", 1)
    assert (EditedPasses(model, Objective(), TOKENS)._unembedding is not None) == (arch != "gemma2")
    ours = losses(model)
    monkeypatch.setattr(Unembedding, "of", classmethod(lambda *_: None))
    np.testing.assert_allclose(ours, losses(model), rtol=1e-9)


def test_logits_that_are_not_finite_are_an_error() -> None:
    model: Any = lab()
    with torch.no_grad():
        model.unembed.W_U[0, 0] = float("nan")
    with pytest.raises(ActivationError, match="position 0"):
        EditedPasses(model, Objective(), TOKENS)
    logits = torch.zeros(4, 5)
    logits[2, 3] = torch.inf
    with pytest.raises(ActivationError, match="position 2"):
        edited_passes.check_logits(logits)


def test_what_is_affordable_grows_with_parts_and_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    model = lab()
    weights = sum(p.numel() for block in model.blocks for p in block.parameters()) / 2
    work = 2 * (weights + model.cfg.d_model * model.cfg.d_vocab) * len(TOKENS)
    monkeypatch.setattr(edited_passes, "EXACT_WORK", 6 * work)
    assert is_affordable(model, 6, [TOKENS])
    assert is_affordable(model, 3, [TOKENS, TOKENS])
    assert not is_affordable(model, 7, [TOKENS])
    monkeypatch.setattr(edited_passes, "device_of", lambda _: torch.device("cuda"))
    most = int(6 * edited_passes.GPU_FACTOR)
    assert [is_affordable(model, parts, [TOKENS]) for parts in (most, most + 1)] == [True, False]


def test_the_largest_sums_of_sizes_are_chosen() -> None:
    """Terms of one kind add up over prompts, those of two kinds do not cancel."""
    one = {"a": (1.0, 1.0), "b": (-2.0, 1.5), "c": (4.0, 0.0)}
    two = {"a": (1.0, 1.0), "c": (-4.0, 0.0)}
    assert largest([one, two], 2) == ["a", "b"]
    assert largest([], 2) == []
    assert len(largest([{str(i): (float(i),) for i in range(20)}])) == 8  # as docs/statistics.md says


def test_every_tensor_of_a_blocks_output_is_changed() -> None:
    one, two = torch.ones(2), torch.zeros(2)
    doubled = edited_passes.mapped(lambda x: x * 2 + 1, (one, None, 7, [two]))
    assert str(doubled) == str((one * 3, None, 7, [two + 1]))
