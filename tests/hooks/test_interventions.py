"""A term of a norm switched off in a running model: what comes out, what is proved first, what is left afterwards."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import ln_probe
from ln_probe.analyses.lab.model import LabConfig, LabTransformer
from ln_probe.analyses.lab.norms import NORM_KINDS, calibrate
from ln_probe.hooks import without
from ln_probe.hooks.capture import stream
from ln_probe.hooks.default_tokens import default_tokens
from ln_probe.hooks.frozen_scale import mean_sigmas
from ln_probe.hooks.interventions import InterventionError, LostEditError, NoOpWarning
from ln_probe.hooks.model import evaluating
from ln_probe.hooks.sites import SiteError, find_sites
from ln_probe.hooks.variants import VARIANT_WITHOUT, VARIANTS, changed_output, normalized

TOKENS = torch.arange(1, 21).view(2, 10)
TERMS = tuple(VARIANT_WITHOUT)
BOTH_PRECISIONS = [(torch.float32, 1e-5), (torch.float64, 1e-12)]
Norm = Callable[[Tensor, nn.Module], Tensor]


def lab(**options: Any) -> LabTransformer:
    """A small model with streams that are not centred, gains that are not 1 and attention that is not uniform."""
    torch.manual_seed(0)
    model = LabTransformer(
        LabConfig(**({"n_layers": 2, "d_model": 32, "n_heads": 4, "d_vocab": 50, "n_ctx": 32} | options))
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith((".w", ".b")):
                parameter.add_(0.3 * torch.randn_like(parameter))
            elif parameter.ndim > 1:
                parameter.copy_(0.3 * torch.randn_like(parameter) + 0.05)
    with calibrate(model):
        model(TOKENS)
    return model.eval()


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """NoOpWarnings are looked for where they matter; any other warning of ours is a failure."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*training mode.*")
        warnings.filterwarnings("ignore", category=NoOpWarning)
        yield


def by_hand(what: str, scale: float) -> Norm:
    """A LayerNorm module's output without a term, written out once more."""

    def norm(x: Tensor, module: nn.Module) -> Tensor:
        weight, bias, eps = module.weight, module.bias, module.eps
        mean = x.sum(-1, keepdim=True) / x.shape[-1]
        centred = x - mean
        sigma = torch.sqrt((centred * centred).sum(-1, keepdim=True) / x.shape[-1] + eps)
        top = centred if what == "scaling" else x
        bottom = sigma if what == "projection" else scale
        return weight * (top / bottom) + bias  # type: ignore[operator, no-any-return]

    return norm


def gpt2_by_hand(hf: Any, tokens: Tensor, norms: dict[str, Norm]) -> Tensor:
    """GPT-2 in plain torch; `norms` says which norms are computed by something else than layer_norm."""

    def norm(name: str, x: Tensor, module: Any) -> Tensor:
        if name in norms:
            return norms[name](x, module)
        return F.layer_norm(x, x.shape[-1:], module.weight, module.bias, module.eps)

    body, heads = hf.transformer, hf.config.n_head
    x = body.wte.weight[tokens] + body.wpe.weight[: tokens.shape[1]]
    hidden = torch.ones(tokens.shape[1], tokens.shape[1], dtype=torch.bool).triu(1)
    for layer, block in enumerate(body.h):
        y = norm(f"blocks.{layer}.ln1", x, block.ln_1)
        q, k, v = (y @ block.attn.c_attn.weight + block.attn.c_attn.bias).chunk(3, dim=-1)
        q, k, v = (t.unflatten(-1, (heads, -1)).transpose(1, 2) for t in (q, k, v))
        scores = (q @ k.transpose(-1, -2)) / math.sqrt(q.shape[-1])
        z = scores.masked_fill(hidden, -math.inf).softmax(-1) @ v
        x = x + z.transpose(1, 2).flatten(-2) @ block.attn.c_proj.weight + block.attn.c_proj.bias
        y = norm(f"blocks.{layer}.ln2", x, block.ln_2)
        y = F.gelu(y @ block.mlp.c_fc.weight + block.mlp.c_fc.bias, approximate="tanh")
        x = x + y @ block.mlp.c_proj.weight + block.mlp.c_proj.bias
    return norm("ln_final", x, body.ln_f) @ hf.lm_head.weight.T  # type: ignore[no-any-return]


def difference(a: Tensor, b: Tensor) -> float:
    """Relative to the larger of 1 and the size of b."""
    return float((a - b).abs().max() / b.abs().max().clamp_min(1.0))


@pytest.mark.parametrize(("dtype", "tolerance"), BOTH_PRECISIONS)
@pytest.mark.parametrize("what", TERMS)
@pytest.mark.parametrize(("sites", "names"), [
    (["blocks.0.ln1"], ["blocks.0.ln1"]),
    ("attention", ["blocks.0.ln1", "blocks.1.ln1"]),
    ("mlp", ["blocks.0.ln2", "blocks.1.ln2"]),
    ("final", ["ln_final"]),
    ("all", ["blocks.0.ln1", "blocks.0.ln2", "blocks.1.ln1", "blocks.1.ln2", "ln_final"]),
])  # fmt: skip
def test_gpt2_is_the_block_recomputed_in_plain_torch(
    dtype: torch.dtype, tolerance: float, what: str, sites: Any, names: list[str], make_twins: Callable[..., Any]
) -> None:
    hf, model, _ = make_twins("gpt2", dtype)
    with torch.no_grad():
        assert difference(model(TOKENS), gpt2_by_hand(hf, TOKENS, {})) < tolerance
        expected = gpt2_by_hand(hf, TOKENS, dict.fromkeys(names, by_hand(what, 1.0)))
        with without(model, what, sites=sites, scale=1.0) as done:
            found = model(TOKENS)
    assert list(done.sites) == names
    assert difference(found, expected) < tolerance
    assert done.matched == (what == "projection")  # a number is not the sites' own size
    assert dict(done.divisors) == ({} if what == "projection" else dict.fromkeys(names, 1.0))


@pytest.mark.parametrize(("dtype", "tolerance"), BOTH_PRECISIONS)
def test_a_frozen_scale_is_the_mean_sigma_without_position_0(
    dtype: torch.dtype, tolerance: float, make_twins: Callable[..., Any]
) -> None:
    hf, model, _ = make_twins("gpt2", dtype)
    seen: list[Tensor] = []

    def keep(x: Tensor, module: nn.Module) -> Tensor:
        seen.append(x)
        return F.layer_norm(x, x.shape[-1:], module.weight, module.bias, module.eps)  # type: ignore[arg-type]

    with torch.no_grad():
        gpt2_by_hand(hf, TOKENS, {"blocks.1.ln1": keep})
        c = float((seen[0].double().var(-1, correction=0) + 1e-5).sqrt()[:, 1:].mean())
        with without(model, "scaling", sites=["blocks.1.ln1"], tokens=TOKENS) as done:
            found = model(TOKENS)
        expected = gpt2_by_hand(hf, TOKENS, {"blocks.1.ln1": by_hand("scaling", c)})
    assert done.divisors["blocks.1.ln1"] == pytest.approx(c, rel=1e-6 if dtype == torch.float32 else 1e-12)
    assert done.matched
    assert difference(found, expected) < tolerance


@pytest.mark.parametrize("arch", ["neox", "opt", "neo", "llama", "gemma", "qwen3"])
@pytest.mark.parametrize("what", TERMS)
def test_the_same_edit_made_in_the_hugging_face_model(arch: str, what: str, make_twins: Callable[..., Any]) -> None:
    """Every norm of the original model replaced by our own formula, without TransformerLens."""
    original, model, paths = make_twins(arch, torch.float64)
    modules = {s.name: original.get_submodule(paths[id(s.module.original_component)]) for s in find_sites(model)}
    offset = 1.0 if arch == "gemma" else 0.0

    def replace(module: Any, scale: float) -> None:
        def forward(x: Tensor) -> Tensor:
            if "RMSNorm" not in type(module).__name__:
                return by_hand(what, scale)(x, module)
            sigma = (x.square().mean(-1, keepdim=True) + getattr(module, "variance_epsilon", 1e-6)).sqrt()
            return (offset + module.weight) * x / (sigma if what == "projection" else scale)  # type: ignore[no-any-return]

        module.forward = forward

    for module in modules.values():
        replace(module, 2.5)
    # Hugging Face keeps NeoX's rotary tables in float32 and computes RMSNorm in float32, where that is left standing.
    tolerance = 1e-6 if arch == "neox" or (what == "projection" and arch in ("llama", "gemma", "qwen3")) else 1e-12
    with torch.no_grad(), without(model, what, sites="all", scale=2.5) as done:
        assert set(done.sites) == set(modules)
        assert difference(model(TOKENS), original(TOKENS).logits) < tolerance


@pytest.mark.parametrize("what", TERMS)
@pytest.mark.parametrize(
    "options", [{}, {"parallel_attn_mlp": True}, {"normalization_type": "LNPre"}, {"normalization_type": "RMS"}]
)
def test_both_worlds_alike_on_hooked_transformer(
    what: str, options: dict[str, Any], make_hooked: Callable[..., Any]
) -> None:
    """HookedTransformer calls `ln1` three times; replacing the module's whole forward is the second way."""
    model = make_hooked(**options)
    sites = {s.name: s for s in find_sites(model)}
    with torch.no_grad():
        with without(model, what, sites="attention", scale=1.5):
            found = model(TOKENS)
        for block in model.blocks:
            site = sites[block.ln1.hook_scale.name.removesuffix(".hook_scale")]

            def forward(x: Tensor, module: Any = block.ln1, site: Any = site) -> Tensor:
                centred = x - x.mean(-1, keepdim=True) if site.projects else x
                sigma = (centred.square().mean(-1, keepdim=True) + module.eps).sqrt()
                top = centred if what == "scaling" else x
                out = top / (sigma if what == "projection" else 1.5)
                out = out * module.w if hasattr(module, "w") else out
                return out + module.b if hasattr(module, "b") else out  # type: ignore[no-any-return]

            block.ln1.forward = forward
        assert difference(found, model(TOKENS)) < 1e-5


@pytest.mark.parametrize("kind", NORM_KINDS)
@pytest.mark.parametrize("what", TERMS)
def test_lab_norms(kind: str, what: str) -> None:
    model = lab(norm=kind)
    site = find_sites(model)[0]
    with torch.no_grad():
        intact = model(TOKENS)
        with without(model, what, sites=["blocks.0.ln1"], scale=2.0) as done:
            changed = model(TOKENS)
    acts = (what != "scaling" and site.projects) or (what != "projection" and site.scales)
    assert bool(done.no_ops) == (not acts)
    assert (difference(changed, intact) > 1e-3) == acts


@settings(max_examples=60, deadline=None)
@given(
    kind=st.sampled_from(NORM_KINDS), variant=st.sampled_from(VARIANTS), seed=st.integers(0, 10**6),
    shift=st.floats(-5, 5), constant=st.floats(0.01, 100),
)  # fmt: skip
def test_a_changed_output_is_gain_times_the_variant_plus_bias(
    kind: str, variant: str, seed: int, shift: float, constant: float
) -> None:
    site = _SITES[kind]
    x = torch.randn(3, 4, 32, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) + shift
    y = site.affine((x - x.mean(-1, keepdim=True) if site.projects else x) / site.sigma(x))
    expected = site.affine(normalized(site, variant, x, constant))
    torch.testing.assert_close(changed_output(site, variant, x, y, constant), expected, rtol=1e-12, atol=1e-12)
    assert changed_output(site, variant, x.bfloat16(), y.bfloat16(), constant).dtype == torch.bfloat16


_SITES = {kind: find_sites(lab(norm=kind))[0] for kind in NORM_KINDS}


def test_projection_of_a_centred_stream_changes_nothing_and_says_why(make_hooked: Callable[..., Any]) -> None:
    model = make_hooked()
    model.load_and_process_state_dict(
        model.state_dict(), fold_ln=False, center_writing_weights=True, center_unembed=False, fold_value_biases=False
    )
    with torch.no_grad():
        intact, loss = model(TOKENS), model(TOKENS, return_type="loss")
        said = r"changes nothing at every site, by construction \(layernorm: its input is already centred\)"
        with pytest.warns(NoOpWarning, match=rf"without 'projection' {said}"), without(model, "projection") as done:
            pass
        with without(model, "projection", sites="all") as done:
            assert difference(model(TOKENS), intact) < 1e-6
            assert abs(float(model(TOKENS, return_type="loss") - loss)) < 1e-6
        assert set(done.no_ops) == set(done.sites)
        with warnings.catch_warnings():
            warnings.simplefilter("error", NoOpWarning)  # scaling goes: that is no no-op
            with without(model, "both", sites="all", scale=1.0):
                assert difference(model(TOKENS), intact) > 1e-2


def test_projection_of_a_folded_model_changes_nothing_and_says_why(make_bridge: Callable[..., Any]) -> None:
    """`fold_ln` centres the weights that read a norm, so that they do not see the mean."""
    model = make_bridge("gpt2")
    model.enable_compatibility_mode(
        disable_warnings=True, fold_ln=True, center_writing_weights=False, center_unembed=False,
        fold_value_biases=False,
    )  # fmt: skip
    with torch.no_grad():
        intact = model(TOKENS)
        with (
            pytest.warns(NoOpWarning, match=r"\(layernorm: what reads it ignores the mean \(its weights are centred"),
            without(model, "projection", sites="all"),
        ):
            assert difference(model(TOKENS), intact) < 1e-5


def test_projection_of_an_rms_norm_changes_nothing_at_all(make_bridge: Callable[..., Any]) -> None:
    model = make_bridge("llama")
    with torch.no_grad():
        intact = model(TOKENS)
        with (
            pytest.warns(NoOpWarning, match=r"by construction \(rmsnorm: it has no projection\)"),
            without(model, "projection", sites="attention"),
        ):
            assert torch.equal(model(TOKENS), intact)


@pytest.fixture
def worlds(request: pytest.FixtureRequest, make_bridge: Callable[..., Any]) -> list[tuple[str, Any]]:
    """A model of each world that the installed TransformerLens has."""
    found = [("lab", lab()), ("bridge", make_bridge("gpt2"))]
    try:
        from transformer_lens import HookedTransformer  # noqa: F401
    except ImportError:
        return found
    return [*found, ("hooked", request.getfixturevalue("make_hooked")())]


def hook_counts(model: Any) -> dict[str, tuple[int, int]]:
    return {n: (len(m._forward_hooks), len(m._forward_pre_hooks)) for n, m in model.named_modules()}


@pytest.mark.parametrize("only_keys", [False, True])
def test_the_model_is_left_as_it_was(only_keys: bool, worlds: list[tuple[str, Any]]) -> None:
    for name, model in worlds:
        with torch.no_grad():
            intact = model(TOKENS)
            before = hook_counts(model)
            modes = {n: m.training for n, m in model.named_modules()}
            with without(model, "scaling", scale=3.0, only_keys=only_keys):
                assert difference(model(TOKENS), intact) > 1e-4, name
            assert torch.equal(model(TOKENS), intact)
            with pytest.raises(KeyError, match="mine"), without(model, "both", scale=3.0, only_keys=only_keys):
                raise KeyError("mine")
            assert torch.equal(model(TOKENS), intact)
            assert hook_counts(model) == before
            assert {n: m.training for n, m in model.named_modules()} == modes


def test_nested_contexts_amount_to_one(worlds: list[tuple[str, Any]]) -> None:
    """In either order: constants are those of the unedited model, inside another intervention too."""
    first, second = ["blocks.0.ln1", "blocks.1.ln2"], ["blocks.1.ln1"]
    for _, model in worlds:
        with torch.no_grad():
            intact = model(TOKENS)
            with without(model, "scaling", sites=first + second, tokens=TOKENS) as joint:
                together = model(TOKENS)
            for outer, inner in ((first, second), (second, first)):
                with without(model, "scaling", sites=outer, tokens=TOKENS) as one:
                    alone = model(TOKENS)
                    with without(model, "scaling", sites=inner, tokens=TOKENS) as two:
                        assert torch.equal(model(TOKENS), together)
                    assert torch.equal(model(TOKENS), alone)
                assert {**one.divisors, **two.divisors} == dict(joint.divisors)
            assert torch.equal(model(TOKENS), intact)


def test_an_intervention_inside_an_intervention_on_the_same_site(make_bridge: Callable[..., Any]) -> None:
    model = make_bridge("gpt2")
    with torch.no_grad():
        intact = model(TOKENS)
        with without(model, "scaling", scale=2.0):
            outer = model(TOKENS)
            for only_keys in (False, True):
                with (
                    pytest.raises(
                        InterventionError,
                        match=r"blocks\.1\.ln1 is already under an intervention \(without 'scaling'\): leave that",
                    ),
                    without(model, "projection", sites=["blocks.1.ln1"], only_keys=only_keys),
                ):
                    pass
            assert torch.equal(model(TOKENS), outer)
            with pytest.raises(SiteError, match=r"blocks\.0\.ln1 is under an intervention \(without 'scaling'\)"):
                ln_probe.analyze(model, TOKENS, progress=False)
        assert torch.equal(model(TOKENS), intact)


def test_inside_run_with_cache_and_run_with_hooks(worlds: list[tuple[str, Any]]) -> None:
    for name, model in worlds:
        with torch.no_grad(), without(model, "scaling", scale=2.0):
            logits = model(TOKENS)
            cached, cache = model.run_with_cache(TOKENS)
            assert difference(cached, logits) < 1e-6, name  # a lab model's attention is fused if nobody looks
            scores = model.run_with_hooks(TOKENS, fwd_hooks=[("blocks.0.hook_resid_pre", lambda x, hook: x)])
            assert difference(scores, logits) < 1e-6, name
            y = changed_output(
                find_sites_of(model)["blocks.0.ln1"], "no_scaling", cache["blocks.0.hook_resid_pre"], logits, 2.0
            )
            attn = model.blocks[0].attn
            keys = torch.einsum("bpd,hdk->bphk", y, attn.W_K) + attn.b_K
            torch.testing.assert_close(cache["blocks.0.attn.hook_k"].view_as(keys), keys, rtol=1e-4, atol=1e-5)
            by_token = model(TOKENS, return_type="loss")
            expected = F.cross_entropy(logits[:, :-1].flatten(0, 1), TOKENS[:, 1:].flatten())
            assert float(by_token) == pytest.approx(float(expected), rel=1e-5)


def find_sites_of(model: Any) -> dict[str, Any]:
    from ln_probe.hooks.edits import suspended

    with suspended(model):
        return {s.name: s for s in find_sites(model)}


def test_generation_is_greedy_on_the_edited_model(worlds: list[tuple[str, Any]]) -> None:
    for name, model in worlds:
        if name == "lab":  # has no generate
            continue
        start = TOKENS[:1, :4]
        options = {"max_new_tokens": 8, "do_sample": False, "stop_at_eos": False, "use_past_kv_cache": False,
                   "verbose": False, "return_type": "tokens"}  # fmt: skip
        made = {}
        for edited in (False, True):
            with torch.no_grad(), without(model, "both", sites="all", scale=2.0) if edited else nullcontext():
                rows = start
                for _ in range(8):
                    rows = torch.cat([rows, model(rows)[:, -1:].argmax(-1)], dim=1)
                made[edited] = model.generate(start, **options)
            assert torch.equal(made[edited], rows), name
        assert not torch.equal(made[False], made[True])


@pytest.mark.parametrize("what", TERMS)
def test_only_keys_leaves_queries_and_values(
    what: str, worlds: list[tuple[str, Any]], make_bridge: Callable[..., Any]
) -> None:
    models = [
        *worlds,
        *((a, make_bridge(a)) for a in ("neox", "opt", "neo", "llama", "qwen3")),
    ]
    for name, model in models:
        site = find_sites(model)[0]
        seen: list[Tensor] = []
        stream(model, TOKENS[0], [site], on_norm=lambda s, x, y, seen=seen: seen.extend((x, y)))
        x, y = seen
        changed = changed_output(site, VARIANT_WITHOUT[what], x, y, 2.0)
        attn, places = model.blocks[0].attn, [f"blocks.0.attn.hook_{n}" for n in "qkv"]
        W_K, b_K = attn.W_K, getattr(attn, "b_K", None) if name not in ("llama", "qwen3", "neo") else None
        expected = torch.einsum("pd,hdk->phk", changed, W_K)
        expected = expected if b_K is None else expected + b_K.view(W_K.shape[0], -1)
        with torch.no_grad():
            intact, before = model.run_with_cache(TOKENS[:1])
            with without(model, what, sites=[site.name], scale=2.0, only_keys=True) as done:
                logits, after = model.run_with_cache(TOKENS[:1])
                assert difference(model(TOKENS[:1]), logits) < 1e-6, name
        assert done.only_keys
        assert torch.equal(before[places[0]], after[places[0]]), name
        assert torch.equal(before[places[2]], after[places[2]]), name
        keys = after[places[1]].reshape(len(x), -1)
        torch.testing.assert_close(keys, expected.detach().reshape(len(x), -1), rtol=1e-4, atol=1e-4, msg=name)
        least = 1e-6 if name == "qwen3" else 1e-4  # its keys are normalized once more, which undoes most of it
        assert (difference(logits, intact) > least) != bool(done.no_ops), name


def test_a_shared_norm_can_be_edited_for_its_keys_alone(make_hooked: Callable[..., Any]) -> None:
    """GPT-J: one norm feeds attention and the MLP; the MLP must see the intact one."""
    model = make_hooked(parallel_attn_mlp=True)
    for block in model.blocks:
        block.ln2 = block.ln1
    model.setup()
    assert find_sites(model)[0].reads == "attention+mlp"
    with torch.no_grad():
        _, before = model.run_with_cache(TOKENS)
        with without(model, "scaling", sites="mlp", scale=2.0, only_keys=True):
            _, after = model.run_with_cache(TOKENS)
    for place, same in (("mlp.hook_pre", True), ("attn.hook_v", True), ("attn.hook_k", False)):
        assert torch.equal(before[f"blocks.0.{place}"], after[f"blocks.0.{place}"]) == same


def test_split_inputs_of_hooked_transformer(make_hooked: Callable[..., Any]) -> None:
    """With one input per head for queries, keys and values, the keys' is still found, also where a hook changes it."""
    model = make_hooked()
    model.set_use_split_qkv_input(True)
    hooks = [("blocks.0.hook_k_input", lambda x, hook: 2 * x + 1)]
    with torch.no_grad():
        _, before = model.run_with_cache(TOKENS)
        with model.hooks(fwd_hooks=hooks), without(model, "scaling", sites=["blocks.0.ln1"], scale=2.0, only_keys=True):
            _, after = model.run_with_cache(TOKENS)
        site = find_sites(model)[0]
        x = 2 * before["blocks.0.hook_resid_pre"] + 1
        keys = torch.einsum("bpd,hdk->bphk", changed_output(site, "no_scaling", x, x, 2.0), model.W_K[0]) + model.b_K[0]
    torch.testing.assert_close(after["blocks.0.attn.hook_k"], keys, rtol=1e-4, atol=1e-4)
    assert torch.equal(before["blocks.0.attn.hook_v"], after["blocks.0.attn.hook_v"])


@pytest.mark.parametrize("only_keys", [False, True])
def test_an_edit_that_a_bridge_would_lose_is_refused(only_keys: bool, make_bridge: Callable[..., Any]) -> None:
    """With split inputs a bridge's attention normalizes by itself: an edit of `ln1` would change nothing, silently."""
    model = make_bridge("gpt2")
    model.cfg.use_split_qkv_input = True
    said = "no key projection read" if only_keys else "moves no logit"
    with (
        pytest.raises(LostEditError, match=rf"blocks\.0\.ln1: .*{said}(.|\n)*\(and at 1 more sites\)"),
        without(model, "scaling", scale=2.0, only_keys=only_keys),
    ):
        pytest.fail("an edit without effect was believed")
    assert not any(hook_counts(model)[n][0] for n in ("blocks.0.ln1", "blocks.1.ln1") if n in hook_counts(model))


@pytest.mark.parametrize("ran_before", [False, True])
def test_an_edit_for_keys_that_is_lost_later_is_an_error(ran_before: bool, make_bridge: Callable[..., Any]) -> None:
    model = make_bridge("gpt2")

    def lose() -> None:
        with torch.no_grad(), without(model, "scaling", scale=2.0, only_keys=True):
            if ran_before:
                model(TOKENS)
            model.cfg.use_split_qkv_input = True
            model(TOKENS)

    with pytest.raises(LostEditError, match=r"blocks\.0\.ln1: the edit for keys alone was lost"):
        lose()


def test_a_norm_that_nobody_calls_or_heeds() -> None:
    model = lab()
    with torch.no_grad():
        model.blocks[1].attn.W_O.zero_()
    with (
        pytest.raises(
            LostEditError, match=r"^blocks\.1\.ln1: .* moves no logit \(by 0 at most; .* \(weights that are zero\)$"
        ),
        without(model, "scaling", sites="all", scale=2.0),
    ):
        pass

    class Bypassed(nn.Module):
        def __init__(self, inner: Any) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Tensor:
            return self.inner.forward(x)  # type: ignore[no-any-return]

    model = lab()
    model.blocks[0].ln1 = Bypassed(model.blocks[0].ln1)  # type: ignore[assignment]
    model.setup()
    with (
        pytest.raises(LostEditError, match=r"blocks\.0\.ln1\.inner: .*does not call this module"),
        without(model, "scaling", sites=["blocks.0.ln1.inner"], scale=2.0),
    ):
        pass


def test_default_calibration_is_the_one_of_analyze(make_bridge: Callable[..., Any]) -> None:
    for model in (make_bridge("gpt2"), ln_probe.load_model("lm-layernorm")):
        constants = ln_probe.analyze(model, progress=False, probes=("decomposition",)).provenance["constants"]
        with without(model, "scaling", sites="all") as done:
            pass
        assert dict(done.divisors) == pytest.approx(constants, rel=1e-12)
        with without(model, "both", sites="attention", scale=constants) as again:
            assert again.matched
            assert again.divisors["blocks.0.ln1"] == constants["blocks.0.ln1"]


@pytest.mark.parametrize("length", [7, 4, 2])  # 4 and 2 are numbers of its heads as well
def test_position_0_of_every_head_is_left_out(length: int, make_bridge: Callable[..., Any]) -> None:
    """Norms of queries and keys inside a bridge's attention see heads before positions."""
    model = make_bridge("qwen3", torch.float64)
    sites = find_sites_of(model)
    seen: dict[str, Tensor] = {}
    names = ("blocks.0.attn.q_norm", "blocks.0.attn.k_norm")
    for name in names:
        sites[name].module.register_forward_hook(lambda _m, args, _y, name=name: seen.update({name: args[0]}))
    found = mean_sigmas(model, [*sites.values()], [TOKENS[0, :length]])
    for name in names:
        assert seen[name].shape[1:] == ((4 if "q_norm" in name else 2), length, 8)
        sigma = (seen[name].square().mean(-1) + 1e-6).sqrt()
        assert found[name] == pytest.approx(float(sigma[:, :, 1:].mean()), rel=1e-6)


def test_a_single_position_is_better_than_none() -> None:
    model = lab()
    sites = find_sites(model)
    with evaluating(model):
        assert mean_sigmas(model, sites, [torch.tensor([3])])["ln_final"] > 0
    assert all(len(row) == 32 for row in default_tokens(model))  # its context


def test_bfloat16(make_bridge: Callable[..., Any]) -> None:
    model = make_bridge("gpt2", torch.bfloat16)
    exact = make_bridge("gpt2", torch.float64)
    with torch.no_grad():
        with without(model, "scaling", sites="all", tokens=TOKENS):
            found = model(TOKENS)
        with without(exact, "scaling", sites="all", tokens=TOKENS):
            expected = exact(TOKENS)
    assert found.dtype == torch.bfloat16
    assert difference(found.double(), expected) < 0.1  # weights were rounded too


def test_training_mode_is_reported(make_bridge: Callable[..., Any]) -> None:
    model = make_bridge("gpt2")
    model.train()
    model.blocks[0].eval()
    with (
        pytest.warns(UserWarning, match=r"the model is in training mode: dropout \(at .*\) makes every pass differ"),
        without(model, "scaling", tokens=TOKENS),
    ):
        assert model.training
    assert model.training
    assert not model.blocks[0].training  # each module keeps its own mode


def test_gradients_flow_through_an_edit(make_bridge: Callable[..., Any]) -> None:
    model = make_bridge("gpt2")
    with without(model, "scaling", tokens=TOKENS):
        model(TOKENS, return_type="loss").backward()
    assert float(model.embed.original_component.weight.grad.abs().max()) > 0


ONE = torch.arange(1, 9)[None]


@pytest.mark.parametrize(("what", "options", "said"), [
    ("scale", {}, "unknown term 'scale': choose from 'scaling', 'projection', 'both'"),
    ("scaling", {"sites": ["blocks.0.ln_1"]}, r"no norm called 'blocks.0.ln_1'; the nearest names are 'blocks.0.ln1'"),
    ("scaling", {"sites": "atention"}, "no norm called 'atention'; the nearest names are 'attention'"),
    ("scaling", {"sites": []}, "an empty list of sites leaves nothing to edit: give names, or one of attention, mlp"),
    ("scaling", {"sites": ["ln_final", "ln_final"]}, "'ln_final' is given twice"),
    ("scaling", {"scale": "mean"}, "scale must be 'frozen', a positive number or a mapping, got 'mean'"),
    ("scaling", {"scale": True}, "scale must be 'frozen', a positive number or a mapping, got True"),
    ("scaling", {"scale": 0.0}, "scale must be a positive finite number, got 0.0"),
    ("scaling", {"scale": math.nan}, "scale must be a positive finite number, got nan"),
    ("scaling", {"scale": {"blocks.0.ln1": 2.0}}, r"scale has no entry for blocks\.1\.ln1"),
    ("scaling", {"scale": {"blocks.0.ln1": 2.0, "blocks.1.ln1": -1}}, r"blocks\.1\.ln1: its divisor must be a posi"),
    ("scaling", {"scale": 1.0, "tokens": ONE}, "tokens are for scale='frozen'"),
    ("scaling", {"tokens": ONE.float()}, r"tokens must be whole numbers \[batch pos\], got float32 \[1, 8\]"),
    ("scaling", {"tokens": ONE[:, :1]}, r"tokens \[1, 1\] hold no position besides 0"),
    ("scaling", {"tokens": ONE + 45}, r"token id 50 is outside the vocabulary of 50 \(0 … 49\)"),
    ("scaling", {"tokens": torch.zeros(1, 33, dtype=torch.long)}, "33 tokens are more than the context of 32"),
    ("scaling", {"sites": "all", "only_keys": True},
     r"only_keys=True needs norms that attention reads, and blocks\.0\.ln2 is read by: mlp"),
])  # fmt: skip
def test_bad_arguments(what: str, options: dict[str, Any], said: str, make_bridge: Callable[..., Any]) -> None:
    model = make_bridge("gpt2")
    model(TOKENS)  # a bridge puts hooks of its own in its first pass
    before = hook_counts(model)
    with pytest.raises(ValueError, match=said), without(model, what, **options):
        pytest.fail("a bad argument was taken")
    assert hook_counts(model) == before


def test_what_has_nothing_to_take_away(make_hooked: Callable[..., Any]) -> None:
    with (
        pytest.raises(InterventionError, match="the model has no normalization: there is no projection or scaling"),
        without(make_hooked(normalization_type=None), "scaling"),
    ):
        pass
    with (
        pytest.raises(
            InterventionError,
            match=r"no norm of this model belongs to sites='mlp' \(its norms are read by: attention, unembed\)",
        ),
        without(make_hooked(attn_only=True), "scaling", sites="mlp"),
    ):
        pass
    with pytest.raises(TypeError, match="load it first"), without("gpt2", "scaling"):
        pass
