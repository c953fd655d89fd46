"""A user's hook at a norm's hook points is never lost inside `without` and `linearized` (`tests/compose.py`)."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import compose
import pytest
import torch
from architectures import cases, make_hooked

import ln_probe
from ln_probe.hooks import find_norms, linearized, linearized_hooks, without

FAST = {
    "hooked": ("scaling", "linearized", "linearized, given", "linearized in scaling"),
    "lab": ("scaling, heads", "linearized in scaling"),
    "lab-hooked": ("scaling, keys",),
    "gpt2": ("projection, heads", "scaling, keys", "linearized, given"),
    "neox": ("projection in linearized", "linearized in projection"),
    "llama": ("scaling, heads",),  # two heads to a key
}
ALL = ("opt", "neo", "gemma", "qwen3", "gemma2", "bloom", "mistral", "gptj")


def model_of(name: str) -> Any:
    ours = {"hooked": compose.hooked, "lab": compose.lab, "lab-hooked": partial(compose.lab, "hooked")}
    model = ours[name]() if name in ours else compose.bridge(name)
    if model is None:
        pytest.skip("this TransformerLens has no HookedTransformer")
    return model


@pytest.mark.parametrize("name", cases(*FAST, slow=ALL))
def test_hooks_at_a_norm_compose_with_its_edits(name: str) -> None:
    model = model_of(name)
    every = find_norms(model)
    site = next(s for s in every if compose.LAYER in s.attention_layers)
    for number, case in enumerate(compose.cases(site)):
        left_out = name in FAST and (case[0] not in FAST[name] or number % 3)
        if not left_out:
            assert compose.outcome(model, site, every, *case, compose.tolerance(name)) in ("equal", "allowed"), case


@pytest.mark.parametrize("readers", [{"only": "keys"}, {"heads": [(1, 2), (1, 0)]}])
def test_with_some_readers_the_norm_shows_the_intact_norm_and_q_k_v_z_what_is_combined(readers: Any) -> None:
    model = model_of("gpt2")
    shown = [f"blocks.1.ln1.{p}" for p in ("hook_scale", "hook_normalized", "hook_out")]
    combined = [f"blocks.1.attn.hook_{letter}" for letter in "qkvz"]
    sites = {} if "heads" in readers else {"sites": ["blocks.1.ln1"]}
    calls: list[str] = []

    def count(value: Any, hook: Any) -> None:
        calls.append(hook.name)

    with torch.no_grad():
        _, intact = model.run_with_cache(compose.TOKENS)
        with without(model, "scaling", sites=["blocks.1.ln1"], scale=2.0):
            _, whole = model.run_with_cache(compose.TOKENS)
        with without(model, "scaling", scale=2.0, **sites, **readers):
            plain = model(compose.TOKENS)
            _, some = model.run_with_cache(compose.TOKENS)
            seen = model.run_with_hooks(compose.TOKENS, fwd_hooks=[(p, count) for p in (*shown, *combined)])
            for point in combined[:3]:  # an edit there reaches the output
                moved = model.run_with_hooks(compose.TOKENS, fwd_hooks=[(point, lambda v, hook: 2 * v + 1)])
                assert float((moved - plain).abs().max()) > 1e-6, point
    assert sorted(calls) == sorted({*calls})
    assert float((seen - plain).abs().max()) <= 1e-12 * float(plain.abs().max())
    for point in shown:
        torch.testing.assert_close(some[point], intact[point], rtol=1e-10, atol=1e-10)
    for point in combined[:3]:
        own, new, all_new = (c[point].reshape(2, 7, 4, 8) for c in (intact, some, whole))
        heads = [h for _, h in readers.get("heads", ())] if "heads" in readers else range(4 * point.endswith("k"))
        for head in range(4):
            expected = all_new if head in heads else own
            torch.testing.assert_close(new[:, :, head], expected[:, :, head], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("name", "norm", "shape"), [("qwen3", "attn.k_norm", (2, 7, 2)), ("hooked", "ln1", (2, 7, 4))])
def test_sigmas_that_were_recorded_can_be_held_where_heads_are_normalized(
    name: str, norm: str, shape: tuple[int, ...]
) -> None:
    """Queries and keys, or what each head reads (`use_split_qkv_input`)."""
    model = make_hooked(use_qk_norm=True, use_split_qkv_input=True) if name == "hooked" else model_of(name)
    with torch.no_grad():
        intact, sigmas = model(compose.TOKENS), linearized.sigmas(model, compose.TOKENS)
        assert sigmas[f"blocks.0.{norm}"].shape == shape
        with linearized(model, sigma=sigmas):
            assert compose.distance(model(compose.TOKENS), intact) < 1e-6


def under_autocast(model: Any) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return compose.logits(model).float()


LAST = "blocks.1.hook_resid_post"
RUNS: dict[str, compose.Run] = {
    "run_with_cache": lambda m: m.run_with_cache(compose.TOKENS)[0],
    "names_filter": lambda m: m.run_with_cache(compose.TOKENS, names_filter=LAST)[1][LAST],
    "stop_at_layer": lambda m: m(compose.TOKENS, stop_at_layer=2),
    "generate": lambda m: m.generate(
        compose.TOKENS[:1], max_new_tokens=4, do_sample=False, stop_at_eos=False, use_past_kv_cache=True, verbose=False
    ),
    "autocast": under_autocast,
}


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize(("name", "edit"), cases(
    ("hooked", "scaling"), ("lab", "linearized"), ("gpt2", "projection"), ("neox", "scaling"),
    slow=itertools.product(["lab-hooked", "llama"], ["scaling", "linearized"]),
))  # fmt: skip
def test_however_the_model_is_run(name: str, edit: str, run: str) -> None:
    model = model_of(name)
    if run == "autocast":
        model = model.to(torch.float32)
    every = find_norms(model)
    site = next(s for s in every if compose.LAYER in s.attention_layers)
    place, ones = f"{site.name}.hook_normalized", torch.ones(1)
    with torch.no_grad():
        expected = compose.by_hand(model, site, compose.EDITS[edit], ones, "hook_normalized", "edit", every, RUNS[run])
        unedited = compose.by_hand(model, site, compose.EDITS[edit], ones, "hook_normalized", "read", every, RUNS[run])
        with compose.edited(model, edit, site.name, {}):
            model.add_hook(place, lambda value, hook: compose.change(value))
            got = RUNS[run](model)
            model.reset_hooks()
            again = RUNS[run](model)
    same = 5e-2 if run == "autocast" else compose.tolerance(name)
    for mine, theirs in ((got, expected.logits), (again, unedited.logits)):
        assert compose.close(mine.double(), theirs.double(), same)
    assert run == "generate" or compose.distance(expected.logits, unedited.logits) > 2 * same


@pytest.mark.parametrize("name", ["hooked", "gpt2"])
def test_short_passes_over_tokens_of_ours_run_without_hooks_of_the_user(name: str) -> None:
    """Only the user's own prompt is seen by what the user put on the model, and all of that stays where it was."""
    model, tokens, point = model_of(name), torch.arange(1, 13), "blocks.0.hook_resid_pre"
    seen: list[int] = []

    def patch(value: Any, hook: Any) -> Any:
        value[:, 10] = 0.5  # there is no such position in a shorter pass
        seen.append(value.shape[1])
        return value

    for call, passes in (
        (find_norms, 0),
        (lambda m: ln_probe.attribute_logits(m, tokens, -1, 7).check(), 1),
        (lambda m: ln_probe.attribute_scores(m, tokens, 1, 0, -1, 0).check(), 1),
        (lambda m: linearized.sigmas(m, tokens), 1),
        (linearized_hooks, 0),
    ):
        with torch.no_grad():
            next(model.parameters()).mul_(0.99)  # what is known of a model is kept until its weights change
        model.add_hook(point, patch)
        model.add_hook("blocks.1.ln1.hook_scale", lambda value, hook: seen.append(value.shape[1]))
        seen.clear()
        before = [(h.hook.id, h.user_hook) for h in model.hook_dict[point].fwd_hooks]
        call(model)
        calls = 3 if name == "hooked" else 1  # HookedTransformer calls a norm for queries, keys and values
        assert seen == passes * [12] * (1 + calls), call
        assert [(h.hook.id, h.user_hook) for h in model.hook_dict[point].fwd_hooks] == before
        model.reset_hooks()
        assert find_norms(model)[0].name == "blocks.0.ln1"
