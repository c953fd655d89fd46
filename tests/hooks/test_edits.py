"""A term of a norm switched off in a running model: what is proved first, and what is left afterwards."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from architectures import bridge_of, hugging_face, make_bridge, make_hooked
from compose import distance as difference
from small_models import lab
from torch import Tensor, nn

from ln_probe.hooks import InterventionError, LostEditError, edit_hooks, find_norms, linearized, without
from ln_probe.hooks.norm import UnknownNormError

TOKENS = torch.arange(1, 21).view(2, 10)


pytestmark = pytest.mark.filterwarnings("ignore::ln_probe.hooks.edits.NoOpWarning")


def hook_counts(model: Any) -> dict[str, tuple[int, int]]:
    return {n: (len(m._forward_hooks), len(m._forward_pre_hooks)) for n, m in model.named_modules()}


@pytest.mark.parametrize("only", [None, "keys"])
def test_the_model_is_left_as_it_was(only: str | None, worlds: list[tuple[str, Any]]) -> None:
    for name, model in worlds:
        with torch.no_grad():
            intact = model(TOKENS)
            before = hook_counts(model)
            modes = {n: m.training for n, m in model.named_modules()}
            with without(model, "scaling", scale=3.0, only=only):
                assert difference(model(TOKENS), intact) > 1e-4, name
            assert torch.equal(model(TOKENS), intact)
            with pytest.raises(KeyError, match="mine"), without(model, "both", scale=3.0, only=only):
                raise KeyError("mine")
            assert torch.equal(model(TOKENS), intact)
            assert hook_counts(model) == before
            assert {n: m.training for n, m in model.named_modules()} == modes


def test_a_norm_that_a_hook_calls_on_the_last_vector(worlds: list[tuple[str, Any]]) -> None:
    """That vector is not at position 0, though it is the first of what the norm is given."""
    for name, model in worlds:
        final = next(norm for norm in find_norms(model) if norm.reads == "unembed")
        x, outputs = torch.randn(2, 10, final.d), list[Tensor]()

        def call(*_: Any, norm: Any = final.module, x: Tensor = x, outputs: list[Tensor] = outputs) -> None:
            outputs.extend([norm(x), norm(x[:, -1:])])

        handle = model.blocks[1].register_forward_pre_hook(call)
        with without(model, "scaling", sites="all", tokens=TOKENS[:1]), torch.no_grad():
            outputs.clear()
            model(TOKENS)
        handle.remove()
        assert torch.equal(outputs[1], outputs[0][:, -1:]), name


def test_passes_through_some_layers(worlds: list[tuple[str, Any]]) -> None:
    """A pass that ends before an edited norm is no lost edit; one that begins later has no position 0."""
    for name, model in worlds:
        if name == "lab":
            continue
        scale = {"blocks.1.ln1": {"first": 5.0, "rest": 0.7}}
        with torch.no_grad():
            intact, cache = model.run_with_cache(TOKENS)
            with without(model, "scaling", sites=["blocks.1.ln1"], scale=scale):
                half = model(TOKENS, stop_at_layer=1)
                whole = model(TOKENS)
                again = model(half, start_at_layer=1) if name == "hooked" else intact
        torch.testing.assert_close(half, cache["blocks.1.hook_resid_pre"])
        assert difference(whole, intact) > 1e-4
        assert difference(again, whole) > 1e-4


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


def test_an_intervention_inside_an_intervention_on_the_same_site() -> None:
    model = make_bridge("gpt2")
    with torch.no_grad():
        intact = model(TOKENS)
        with without(model, "scaling", scale=2.0):
            outer = model(TOKENS)
            for only in (None, "queries", "keys", "values"):
                with (
                    pytest.raises(InterventionError, match=r"blocks\.1\.ln1"),
                    without(model, "projection", sites=["blocks.1.ln1"], only=only),
                ):
                    pass
            assert torch.equal(model(TOKENS), outer)
        assert torch.equal(model(TOKENS), intact)


@pytest.mark.parametrize("options", [{}, {"only": "keys"}, {"heads": [(0, 1)]}])
@pytest.mark.parametrize("flag", ["use_split_qkv_input", "use_attn_in"])
def test_an_edit_that_a_bridge_would_lose_is_refused(options: Any, flag: str) -> None:
    """With split inputs a bridge's attention normalizes by itself: an edit of `ln1` would change nothing, silently."""
    model = make_bridge("gpt2")
    with torch.no_grad():
        intact = model(TOKENS)
        with without(model, "scaling", scale=2.0, **options):
            getattr(model, f"set_{flag}")(True)
            with pytest.raises(LostEditError, match=flag):
                model(TOKENS)
        if options:  # columns of queries, keys and values are replaced all the same
            with without(model, "scaling", scale=2.0, **options):
                with_flag = model(TOKENS)
            getattr(model, f"set_{flag}")(False)
            with without(model, "scaling", scale=2.0, **options):
                assert difference(with_flag, model(TOKENS)) < 1e-5
        else:
            with pytest.raises(LostEditError, match=r"blocks\.0\.ln1"), without(model, "scaling", scale=2.0):
                pytest.fail("an edit without effect was believed")
            getattr(model, f"set_{flag}")(False)
        assert torch.equal(model(TOKENS), intact)


@pytest.mark.parametrize("by_point", [True, False])
@pytest.mark.parametrize("options", [{}, {"only": "keys"}, {"heads": [(0, 1)]}])
def test_hooks_that_are_removed_inside(options: Any, by_point: bool, worlds: list[tuple[str, Any]]) -> None:
    """`reset_hooks` leaves the edit; what removes permanent hooks makes the next pass raise, and never the leaving."""
    for name, model in worlds:
        with torch.no_grad():
            intact = model(TOKENS)
            with without(model, "scaling", scale=2.0, **options):
                edited = model(TOKENS)
                reset = getattr(model, "reset_hooks", None)
                if reset is not None:
                    reset()
                    assert torch.equal(model(TOKENS), edited), name
                if by_point or reset is None:
                    for point in model.hook_dict.values():
                        point.remove_hooks(including_permanent=True)
                else:
                    reset(including_permanent=True)
                with pytest.raises(LostEditError, match=r"blocks\.0"):
                    model(TOKENS)
            assert torch.equal(model(TOKENS), intact), name


def test_blocks_left_out_of_order(worlds: list[tuple[str, Any]]) -> None:
    for _, model in worlds:
        with torch.no_grad():
            intact = model(TOKENS)
            first = without(model, "scaling", sites=["blocks.0.ln1"], scale=2.0)
            second = without(model, "both", sites=["blocks.1.ln1"], scale=2.0)
            third = linearized(model)
            for context in (first, second, third):
                context.__enter__()
            first.__exit__(None, None, None)
            with without(model, "both", sites=["blocks.1.ln2"], scale=2.0):
                model(TOKENS)
            second.__exit__(None, None, None)
            assert difference(model(TOKENS), intact) <= 5e-6
            third.__exit__(None, None, None)
            assert torch.equal(model(TOKENS), intact)


def test_a_norm_that_is_called_on_a_slice_outside_a_pass(worlds: list[tuple[str, Any]]) -> None:
    """As the logit lens does: row 0 of the slice is not position 0."""
    for name, model in worlds:
        scale = {n.name: {"first": 5.0, "rest": 2.0} for n in find_norms(model)}
        last = find_norms(model)[-1].module
        seen: list[Tensor] = []
        with torch.no_grad(), without(model, "scaling", sites="all", scale=scale):
            handle = last.register_forward_hook(lambda _m, args, y, seen=seen: seen.extend((args[0], y)))
            model(TOKENS)
            handle.remove()
            x, y = seen
            torch.testing.assert_close(last(x[:, -1:]), y[:, -1:], msg=name)
            torch.testing.assert_close(last(x[:, 3:5]), y[:, 3:5], msg=name)


def test_a_norm_that_nobody_calls_or_reads() -> None:
    model = lab()
    with torch.no_grad():
        model.blocks[1].attn.W_O.zero_()
    with pytest.raises(LostEditError, match=r"^blocks\.1\.ln1: "), without(model, "scaling", sites="all", scale=2.0):
        pass

    class Bypassed(nn.Module):
        def __init__(self, inner: Any) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Tensor:
            return type(self.inner).forward(self.inner, x)  # type: ignore[no-any-return]

    model = lab()
    norm = model.blocks[0].ln1
    model.blocks[0].ln1 = Bypassed(norm)  # type: ignore[assignment]
    model.setup()
    with pytest.raises(UnknownNormError, match=r"blocks\.0"):
        find_norms(model)
    model = lab()
    with torch.no_grad(), without(model, "scaling", scale=2.0):
        model(TOKENS)
        model.blocks[0].ln1 = lab().blocks[0].ln1
        with pytest.raises(LostEditError, match=r"blocks\.0\.ln1"):
            model(TOKENS)


def test_a_norm_that_sees_heads_flattened_knows_position_0() -> None:
    model = make_hooked(use_qk_norm=True, dtype=torch.float64)
    norm, seen = model.blocks[0].attn.q_norm, list[tuple[torch.Tensor, torch.Tensor]]()
    with torch.no_grad(), without(model, "scaling", sites=["blocks.0.attn.q_norm"], scale=(3.0, 0.7)):
        norm.register_forward_hook(lambda _norm, args, y: seen.append((args[0], y)))
        model(TOKENS)
    ((x, y),) = seen
    assert x.ndim == 2
    first = (torch.arange(TOKENS.shape[1]) == 0)[None, :, None].expand(*TOKENS.shape, model.cfg.n_heads).reshape(-1, 1)
    assert torch.allclose(y, x / torch.where(first, 3.0, 0.7) * norm.w)


def test_training_mode_is_reported() -> None:
    model = make_bridge("gpt2")
    model.train()
    model.blocks[0].eval()
    with pytest.warns(UserWarning, match="dropout"), without(model, "scaling", tokens=TOKENS):
        assert model.training
    assert model.training
    assert not model.blocks[0].training  # each module keeps its own mode


ONE = torch.arange(1, 9)[None]


BOTH: dict[str, Any] = {"blocks.0.ln1": 2.0, "blocks.1.ln1": 2.0}


@pytest.mark.parametrize(("what", "options", "word"), [
    ("scale", {}, "unknown term"), (["scaling"], {}, "unknown term"), ({}, {}, "unknown term"),
    ("scaling", {"sites": ["blocks.0.ln_1"]}, "blocks.0.ln1"), ("scaling", {"sites": "atention"}, "attention"),
    ("scaling", {"sites": 0}, "got 0"), ("scaling", {"sites": None}, "got None"), ("scaling", {"sites": []}, "got"),
    ("scaling", {"sites": [["ln_final"]]}, "no norm"),
    ("scaling", {"sites": ["attention", "ln_final"]}, "group"),
    ("scaling", {"scale": "mean"}, "got 'mean'"), ("scaling", {"scale": "resampled"}, "got 'resampled'"),
    ("scaling", {"scale": 0.0}, "positive"),
    ("scaling", {"scale": torch.tensor(-1.0)}, "positive"), ("scaling", {"scale": torch.ones(2)}, "constant"),
    ("scaling", {"scale": math.nan}, "got nan"), ("scaling", {"scale": {"blocks.0.ln1": 2.0}}, r"blocks\.1\.ln1"),
    ("scaling", {"scale": {"blocks.0.ln1": 2.0, "blocks.1.ln1": -1}}, "got -1"),
    ("scaling", {"scale": BOTH | {"nope": 2.0}}, "nope"), ("scaling", {"scale": BOTH | {"blocks.1.ln1": "x"}}, "'x'"),
    ("scaling", {"tokens": ONE.float()}, "whole numbers"),
    ("scaling", {"tokens": ONE[:, :1]}, "position"), ("scaling", {"tokens": ONE + 45}, "vocabulary"),
    ("scaling", {"tokens": torch.zeros(1, 33, dtype=torch.long)}, "context"),
    ("scaling", {"tokens": [1, 2, 3]}, "list of rows"), ("scaling", {"tokens": [[1, 2, 10**30]]}, "whole numbers"),
    ("scaling", {"sites": "all", "only": "keys"}, r"blocks\.0\.ln2"), ("scaling", {"only": "scores"}, "queries"),
])  # fmt: skip
def test_bad_arguments(what: Any, options: dict[str, Any], word: str) -> None:
    model = make_bridge("gpt2")
    model(TOKENS)  # a bridge puts hooks of its own in its first pass
    before = hook_counts(model)
    with pytest.raises(ValueError, match=word), without(model, what, **options):
        pytest.fail("a bad argument was accepted")
    assert hook_counts(model) == before


def test_sites_by_their_hook_points() -> None:
    sites = ["ln_final", "blocks.1.ln1.hook_scale"]
    with without(make_bridge("gpt2"), "scaling", sites=sites, tokens=ONE[:, :2]) as done:
        assert list(done.sites) == ["blocks.1.ln1", "ln_final"]


@pytest.mark.parametrize(("heads", "word"), [
    ([], "empty"), ([(2, 0)], "layer"), ([(-1, 0)], "layer"), ([(0, 4)], "no head"), ([(1, -1)], "no head"),
])  # fmt: skip
def test_heads_that_are_not_there(heads: Any, word: str) -> None:
    with pytest.raises(InterventionError, match=word), without(make_bridge("gpt2"), "scaling", heads=heads, scale=2.0):
        pass


def test_what_does_not_go_together() -> None:
    hooked, heads = make_hooked(), [(0, 1)]
    shortformer = make_hooked(positional_embedding_type="shortformer")
    cases: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
        (make_hooked(normalization_type=None), {}, InterventionError, "no normalization"),
        (make_hooked(attn_only=True), {"sites": "mlp"}, InterventionError, "mlp"),
        ("gpt2", {}, TypeError, "load it first"),
        (hooked, {"heads": heads, "sites": "all"}, InterventionError, "sites"),
        (hooked, {"heads": heads, "only": "keys"}, InterventionError, "only"),
        (hooked, {"only": "keys", "scale": "optimal"}, InterventionError, "optimal"),
        (hugging_face("gpt2"), {"only": "keys"}, InterventionError, "Hugging Face"),
        (shortformer, {"only": "keys"}, InterventionError, "more than one"),
        (shortformer, {"heads": heads}, InterventionError, "more than one"),
        (lab(norm=None), {"heads": heads}, InterventionError, "no norm"),
        (make_bridge("llama"), {"heads": heads}, InterventionError, "share"),
    ]
    for model, options, error, word in cases:
        with pytest.raises(error, match=word), without(model, "scaling", **({"scale": 2.0} | options)):
            pass


# Single heads; all together they are the whole norm (of one head and by hand: test_compose.py).

C = 0.7  # what is divided by where scaling goes


def test_generate_with_a_cache(worlds: list[tuple[str, Any]]) -> None:
    """Greedy tokens with a key-value cache are those of whole passes, which know where position 0 is."""
    for name, model in worlds:
        if name == "lab":
            continue
        scale = {n.name: {"first": 5.0, "rest": 0.7} for n in find_norms(model)}
        steps = 1 if name == "hooked" else 4  # (its later steps are others than whole passes, unedited too)
        options = {"max_new_tokens": steps, "do_sample": False, "stop_at_eos": False, "verbose": False}
        for readers in ({"sites": "all"}, {"heads": [(0, 1), (1, 2)]}, {"only": "keys"}):
            with torch.no_grad(), without(model, "scaling", scale=scale, **readers):
                tokens = TOKENS[:1, :4]
                for _ in range(steps):
                    tokens = torch.cat([tokens, model(tokens)[:, -1:].argmax(-1)], dim=1)
                made = model.generate(TOKENS[:1, :4], return_type="tokens", use_past_kv_cache=True, **options)
            assert torch.equal(made, tokens), (name, readers)


@pytest.mark.parametrize("edit", [lambda m: without(m, "scaling", scale=2.0), linearized])
def test_a_copy_inside_is_refused(edit: Callable[[Any], Any], worlds: list[tuple[str, Any]]) -> None:
    """Nothing would end the edit in it."""
    for _, model in worlds:
        with edit(model):
            state = model.state_dict()
            with pytest.raises(InterventionError, match="copy"):
                copy.deepcopy(model)
        after = copy.deepcopy(model)
        assert torch.equal(after(TOKENS), model(TOKENS))
        assert find_norms(after)
        model.load_state_dict(state)


def test_a_hugging_face_model_whose_bridge_ran_with_a_hook() -> None:
    """Of a pass with a hook a bridge leaves the attention pattern on the module, with its graph."""
    original = hugging_face("gpt2")
    bridge_of(original).run_with_hooks(TOKENS, fwd_hooks=[("blocks.0.hook_resid_pre", lambda v, hook: 1.0 * v)])
    intact = original(TOKENS).logits
    scale = {norm.name: {"first": 2.0, "rest": 3.0} for norm in find_norms(original) if norm.reads == "attention"}
    with without(original, "scaling", scale=scale):
        edited = original(TOKENS).logits
        assert difference(edited, intact) > 1e-4
        with linearized(original):
            assert torch.equal(original(TOKENS).logits, edited)
        headless = original.transformer(TOKENS)[0]
        assert torch.equal(original.lm_head(headless), edited), "a call of the inner model begins a pass, too"
    assert torch.equal(original(TOKENS).logits, intact)


@pytest.mark.parametrize("what", ["scaling", "projection", "both"])
def test_edit_hooks_are_the_edit(what: str) -> None:
    """The constants differ at position 0, so that an edit in another layout is seen."""
    qwen3 = make_bridge("qwen3")
    with pytest.raises(InterventionError, match="inside attention"):
        edit_hooks(qwen3, "scaling", sites=["blocks.0.attn.q_norm"], scale=2.0)
    for name, model in (("lab", lab()), ("gpt2", make_bridge("gpt2")), ("qwen3", qwen3)):
        sites = [norm.name for norm in find_norms(model) if norm.reads not in ("query", "key")]
        scale = {site: {"first": 0.5, "rest": 2.0} for site in sites}
        with torch.no_grad():
            edited = model.run_with_hooks(TOKENS, fwd_hooks=edit_hooks(model, what, sites=sites, scale=scale))
            with without(model, what, sites=sites, scale=scale):
                assert difference(edited, model(TOKENS)) < 1e-5, (name, what)


def test_an_edit_that_zero_weights_ignored_arrives_when_they_are_trained() -> None:
    model: Any = lab()
    with torch.no_grad():
        weights = {name: p.clone() for name, p in model.named_parameters() if "W_O" in name}
        for name, parameter in model.named_parameters():
            if name in weights:
                parameter.zero_()
        with pytest.raises(LostEditError), without(model, "scaling", scale=2.0):
            pass
        for name, weight in weights.items():
            model.get_parameter(name).copy_(weight)
        intact = model(TOKENS)
        with without(model, "scaling", scale=2.0):
            assert difference(model(TOKENS), intact) > 1e-4
