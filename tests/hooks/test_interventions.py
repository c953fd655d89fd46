"""A term of a norm switched off in a running model: what is proved first, and what is left afterwards."""

from __future__ import annotations

import copy
import io
import math
import pickle
import re
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from architectures import bridge_of, hugging_face, make_bridge, make_hooked, make_twins
from compose import distance as difference
from small_models import lab
from torch import Tensor, nn

import ln_probe
from ln_probe.hooks import find_sites, interventions, linearized, without
from ln_probe.hooks.edits import InterventionError, LostEditError
from ln_probe.seal import SealError

TOKENS = torch.arange(1, 21).view(2, 10)


pytestmark = pytest.mark.filterwarnings("ignore::ln_probe.hooks.interventions.NoOpWarning")


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
                    pytest.raises(
                        InterventionError,
                        match=r"blocks\.1\.ln1 is already under an intervention \(without 'scaling'\): leave that",
                    ),
                    without(model, "projection", sites=["blocks.1.ln1"], only=only),
                ):
                    pass
            assert torch.equal(model(TOKENS), outer)
            with pytest.raises(SealError, match=r"ln1 is under an intervention \(without 'scaling'\): analyze edits"):
                ln_probe.analyze(model, TOKENS, progress=False)
        assert torch.equal(model(TOKENS), intact)


@pytest.mark.parametrize(("options", "said"), [
    ({}, r"blocks\.0\.ln1: .*moves no logit(.|\n)*\(and at 1 more sites\)"),
    ({"only": "keys"}, r"blocks\.0\.ln1: .*no projection of keys read(.|\n)*\(and at 1 more sites\)"),
    ({"heads": [(0, 1)]}, r"blocks\.0\.ln1: the edit was lost(.|\n)*moves no logit"),
])  # fmt: skip
def test_an_edit_that_a_bridge_would_lose_is_refused(options: Any, said: str) -> None:
    """With split inputs a bridge's attention normalizes by itself: an edit of `ln1` would change nothing, silently."""
    model = make_bridge("gpt2")
    model.cfg.use_split_qkv_input = True
    with pytest.raises(LostEditError, match=said), without(model, "scaling", scale=2.0, **options):
        pytest.fail("an edit without effect was believed")
    assert not any(hook_counts(model)[n][0] for n in ("blocks.0.ln1", "blocks.1.ln1") if n in hook_counts(model))


@pytest.mark.parametrize(("options", "said"), [
    ({"only": "keys"}, r"blocks\.0\.ln1: the edit for keys alone was lost"),
    ({"heads": [(0, 1)]}, r"blocks\.0\.ln1: the edit of single heads was lost, because the attention of block 0 did"),
])  # fmt: skip
def test_an_edit_that_is_lost_later_is_an_error(options: Any, said: str) -> None:
    model = make_bridge("gpt2")
    with torch.no_grad(), without(model, "scaling", scale=2.0, **options):
        model(TOKENS)
        if "heads" in options:
            model.blocks[0].ln1.register_forward_hook(lambda _m, _a, y: 2 * y)
        else:
            model.cfg.use_split_qkv_input = True
        with pytest.raises(LostEditError, match=said):
            model(TOKENS)


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
            return type(self.inner).forward(self.inner, x)  # type: ignore[no-any-return]

    model = lab()
    model.blocks[0].ln1 = Bypassed(model.blocks[0].ln1)  # type: ignore[assignment]
    model.setup()
    with (
        pytest.raises(LostEditError, match=r"blocks\.0\.ln1\.inner: .*does not call this module"),
        without(model, "scaling", sites=["blocks.0.ln1.inner"], scale=2.0),
    ):
        pass


def test_training_mode_is_reported() -> None:
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


ONE = torch.arange(1, 9)[None]


BOTH: dict[str, Any] = {"blocks.0.ln1": 2.0, "blocks.1.ln1": 2.0}


@pytest.mark.parametrize(("what", "options", "said"), [
    ("scale", {}, "unknown term 'scale': choose from 'scaling', 'projection', 'both'"),
    ("scaling", {"sites": ["blocks.0.ln_1"]}, r"no norm called 'blocks.0.ln_1'; the nearest names are 'blocks.0.ln1'"),
    ("scaling", {"sites": "atention"}, "no norm called 'atention'; the nearest names are 'attention'"),
    ("scaling", {"sites": 0}, "sites must be one of attention, mlp, final, all or names of norms, got 0"),
    ("scaling", {"sites": None}, "sites must be one of attention, mlp, final, all or names of norms, got None"),
    ("scaling", {"sites": []}, "an empty list of sites leaves nothing to edit: give names, or one of attention, mlp"),
    ("scaling", {"sites": ["ln_final", "ln_final"]}, "'ln_final' is given twice"),
    ("scaling", {"scale": "mean"}, "'optimal', a positive number or a mapping, got 'mean'"),
    ("scaling", {"scale": True}, "'optimal', a positive number or a mapping, got True"),
    ("scaling", {"scale": 0.0}, "scale must be a positive finite number, got 0.0"),
    ("scaling", {"scale": torch.tensor(-1.0)}, "scale must be a positive finite number, got -1.0"),
    ("scaling", {"scale": torch.ones(2)}, "a positive number or a mapping, got tensor"),
    ("scaling", {"scale": math.nan}, "scale must be a positive finite number, got nan"),
    ("scaling", {"scale": {"blocks.0.ln1": 2.0}}, r"scale has no entry for blocks\.1\.ln1"),
    ("scaling", {"scale": {"blocks.0.ln1": 2.0, "blocks.1.ln1": -1}}, r"blocks\.1\.ln1: its divisor must be a posi"),
    ("scaling", {"scale": 1.0, "tokens": ONE}, "tokens are for scale='frozen', 'uniform', 'optimal'"),
    ("scaling", {"tokens": ONE.float()}, r"tokens must be whole numbers \[batch pos\], got float32 \[1, 8\]"),
    ("scaling", {"tokens": ONE[:, :1]}, r"tokens \[1, 1\] hold no position besides 0"),
    ("scaling", {"tokens": ONE + 45}, r"token id 50 is outside the vocabulary of 50 \(0 … 49\)"),
    ("scaling", {"tokens": torch.zeros(1, 33, dtype=torch.long)}, "33 tokens are more than the context of 32"),
    (["scaling"], {}, r"unknown term \['scaling'\]: choose from"),
    ({}, {}, r"unknown term \{\}: choose from"),
    ("scaling", {"sites": ["attention", "ln_final"]}, "'attention' is a group of norms: give it alone, sites='attent"),
    ("scaling", {"sites": [["ln_final"]]}, r"no norm called \['ln_final'\]"),
    ("scaling", {"scale": "resampled"}, "scale must be one of"),
    ("scaling", {"scale": BOTH | {"nope": 2.0}}, "scale is given for 'nope', which is no norm of this model: blocks.0"),
    ("scaling", {"scale": BOTH | {"blocks.1.ln1": "x"}}, r"blocks\.1\.ln1: a constant is a number or .*, got 'x'"),
    ("scaling", {"tokens": [1, 2, 3]}, r"got one row of 3: write \[\[…\]\]"),
    ("scaling", {"tokens": [[1, 2, 10**30]]}, "token id 10{30} is outside any vocabulary"),
    ("scaling", {"sites": "all", "only": "keys"},
     r"only='keys' needs norms that attention reads, and blocks\.0\.ln2 is read by: mlp"),
])  # fmt: skip
def test_bad_arguments(what: Any, options: dict[str, Any], said: str) -> None:
    model = make_bridge("gpt2")
    model(TOKENS)  # a bridge puts hooks of its own in its first pass
    before = hook_counts(model)
    with pytest.raises(ValueError, match=said), without(model, what, **options):
        pytest.fail("a bad argument was taken")
    assert hook_counts(model) == before


@pytest.mark.parametrize(("heads", "said"), [
    (3, r"heads must be a list of \(layer, head\) pairs, got 3"),
    ([], "an empty list of heads leaves nothing to edit"),
    ([(2, 0)], "there is no layer 2; this model has layers 0 to 1"),
    ([(-1, 0)], "there is no layer -1"),
    ([(0, 4)], "layer 0 has no head 4; it has heads 0 to 3"),
    ([(1, -1)], "layer 1 has no head -1; it has heads 0 to 3"),
    ([(0, 1), (0, 1)], r"\(0, 1\) is given twice"),
    ([3], r"must be \(layer, head\) pairs of whole numbers, got 3"),
    ([(True, False)], r"must be \(layer, head\) pairs of whole numbers, got \(True, False\)"),
    ([(0, 1.5)], r"must be \(layer, head\) pairs of whole numbers, got \(0, 1\.5\)"),
])  # fmt: skip
def test_heads_that_are_not_there(heads: Any, said: str) -> None:
    with pytest.raises(InterventionError, match=said), without(make_bridge("gpt2"), "scaling", heads=heads, scale=2.0):
        pass


def test_what_does_not_go_together() -> None:
    hooked, heads = make_hooked(), [(0, 1)]
    nothing = r"no norm of this model belongs to sites='mlp' \(its norms are read by: attention, unembed\)"
    cases: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
        (make_hooked(normalization_type=None), {}, InterventionError, "no normalization: there is no projection or s"),
        (make_hooked(attn_only=True), {"sites": "mlp"}, InterventionError, nothing),
        ("gpt2", {}, TypeError, "load it first"),
        (hooked, {"heads": heads, "sites": "all"}, InterventionError, "leave out sites='all'"),
        (hooked, {"heads": heads, "only": "keys"}, InterventionError, "leave out only='keys'"),
        (
            make_hooked(positional_embedding_type="shortformer"),
            {"only": "keys"},
            LostEditError,
            r"keys are made of more than this norm's output \(positional_embedding_type='shortformer' adds",
        ),
        (lab(norm=None), {"heads": heads}, InterventionError, "the attention of layer 0 reads no norm"),
    ]
    for model, options, error, said in cases:
        with pytest.raises(error, match=said), without(model, "scaling", scale=2.0, **options):
            pass


# Single heads; all together they are the whole norm (see `laws.py`).

C = 0.7  # what is divided by where scaling goes


def heads_by_hand(attn: Any, y: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """z [batch head pos d_head] of Llama's attention reading y, with loops where it would be a broadcast."""

    def turned(x: Tensor) -> Tensor:
        left, right = x.chunk(2, dim=-1)
        return x * cos[:, None] + torch.cat([-right, left], dim=-1) * sin[:, None]

    maps = (attn.q_proj, attn.k_proj, attn.v_proj)
    q, k, v = ((y @ m.weight.T).unflatten(-1, (-1, attn.head_dim)).transpose(1, 2) for m in maps)
    q, k = turned(q), turned(k)
    made = []
    for head in range(q.shape[1]):
        shared = head // attn.num_key_value_groups
        scores = q[:, head] @ k[:, shared].transpose(-1, -2) / math.sqrt(attn.head_dim)
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -math.inf)
        made.append(scores.softmax(-1) @ v[:, shared])
    return torch.stack(made, dim=1)


def edit_by_hand(block: Any, chosen: list[int]) -> None:
    """Replace the attention of a Llama block by a hand-written one, in which some heads read x / C for the norm."""
    attn, norm = block.self_attn, block.input_layernorm
    seen: list[Tensor] = []
    norm.register_forward_pre_hook(lambda _m, args: seen.append(args[0]))

    def forward(hidden_states: Tensor, *_: Any, **options: Any) -> tuple[Tensor, None]:
        z = heads_by_hand(attn, hidden_states, *options["position_embeddings"])
        edited = heads_by_hand(attn, norm.weight * seen[-1] / C, *options["position_embeddings"])
        z[:, chosen] = edited[:, chosen]
        return z.transpose(1, 2).flatten(-2) @ attn.o_proj.weight.T, None

    attn.forward = forward


@pytest.mark.parametrize("heads", [[(0, 1)], [(1, 3), (0, 0), (1, 2)]])
def test_heads_edited_in_hugging_face_by_hand(heads: list[tuple[int, int]]) -> None:
    """Of two heads that share their keys one alone, or both."""
    original, model, _ = make_twins("llama", torch.float64)
    with torch.no_grad():
        intact = original(TOKENS).logits
        for block in original.model.layers:
            edit_by_hand(block, [])
        assert difference(original(TOKENS).logits, intact) < 1e-6  # rotary tables are float32
        for layer, block in enumerate(original.model.layers):
            edit_by_hand(block, [head for of, head in heads if of == layer])
        with without(model, "scaling", heads=heads, scale=C) as done:
            found = model(TOKENS)
        assert done.heads == tuple(heads)
        assert difference(found, original(TOKENS).logits) < 1e-6
        assert difference(found, intact) > 1e-3


def test_every_world(worlds: list[tuple[str, Any]]) -> None:
    for name, model in worlds:
        with torch.no_grad():
            intact = model(TOKENS)
            with without(model, "scaling", scale=C):
                whole = model(TOKENS)
            with without(model, "scaling", heads=[(i, h) for i in range(2) for h in range(4)], scale=C):
                assert difference(model(TOKENS), whole) < 1e-5, name
            z: list[Tensor] = []
            hook = ("blocks.1.attn.hook_z", lambda t, hook, z=z: z.append(t.flatten(2).clone()))
            model.run_with_hooks(TOKENS, fwd_hooks=[hook])
            with without(model, "scaling", heads=[(1, 2)], scale=C):
                model.run_with_hooks(TOKENS, fwd_hooks=[hook])
            changed = (z[-1] - z[0]).unflatten(-1, (4, -1)).abs().amax((0, 1, 3))
            assert changed[2] > 1e-3, "users' hooks see the edited z"
            assert float(changed[[0, 1, 3]].max()) == 0.0, name
            assert torch.equal(model(TOKENS), intact)


def test_a_cache_of_keys() -> None:
    model = make_hooked()
    options = {"max_new_tokens": 3, "do_sample": False, "stop_at_eos": False, "verbose": False}
    with torch.no_grad(), without(model, "scaling", heads=[(0, 1)], scale=C):
        with pytest.raises(InterventionError, match="single heads cannot be edited while attention goes on from keys"):
            model.generate(TOKENS[:1, :4], use_past_kv_cache=True, return_type="tokens", **options)
        made = model.generate(TOKENS[:1, :4], use_past_kv_cache=False, return_type="tokens", **options)
        assert int(made[0, 4]) == int(model(TOKENS[:1, :4])[0, -1].argmax())


def test_split_inputs_of_hooked_transformer() -> None:
    """Each of queries, keys and values has its own input there, which a hook can change."""
    model = make_hooked()
    hooks = [("blocks.0.hook_k_input", lambda x, hook: 2 * x + 1)]
    every = [(0, h) for h in range(4)]
    with torch.no_grad():
        with without(model, "scaling", heads=[(0, 1)], scale=C):
            joint = model(TOKENS)
        model.set_use_split_qkv_input(True)
        with without(model, "scaling", heads=[(0, 1)], scale=C):
            assert difference(model(TOKENS), joint) < 1e-5
        with model.hooks(fwd_hooks=hooks):
            with without(model, "scaling", heads=every, scale=C):
                found = model(TOKENS)
            with without(model, "scaling", sites=["blocks.0.ln1"], scale=C):
                assert difference(model(TOKENS), found) < 1e-5


def test_heads_that_read_more_than_the_norm() -> None:
    """Shortformer's queries and keys read the norm's output plus position embeddings, its values the output alone."""
    model = make_hooked(positional_embedding_type="shortformer")
    said = (
        r"single heads of block 0 cannot be edited: the norm's output is not what its queries and keys are made of "
        r"\(positional_embedding_type='shortformer' adds position embeddings to it\)\. Edit the whole norm with "
        "heads=None"
    )
    every = [(layer, head) for layer in range(2) for head in range(4)]
    with pytest.raises(LostEditError, match=said), without(model, "scaling", heads=every, scale=C):
        pass
    with torch.no_grad(), without(model, "scaling", scale=C):
        model(TOKENS)
    report = ln_probe.analyze(model, TOKENS, probes=("head_effects",), progress=False)
    assert not len(report.tables["head_effects"])
    assert any(re.search(f"head_effects: nothing was measured: {said}", note) for note in report.notes)


def test_a_number_without_axes_is_a_number() -> None:
    model, two = make_bridge("gpt2"), torch.tensor(2.0)
    for scale in (two, {"blocks.0.ln1": two, "blocks.1.ln1": [two, 2.0]}):
        with without(model, "scaling", scale=scale) as done:
            assert {c.plain["first"] for c in done.divisors.values()} == {2.0}


@pytest.mark.parametrize(("seconds", "terminal", "said"), [
    (0.8, "1", "ln_probe: measuring the constants of norms\n"), (0.0, "1", ""), (0.8, "", ""),
])  # fmt: skip
def test_a_terminal_is_told_what_takes_long(
    seconds: float, terminal: str, said: str, monkeypatch: Any, capsys: Any
) -> None:
    measure = interventions.mean_sigmas
    monkeypatch.setattr(interventions, "mean_sigmas", lambda *given: (time.sleep(seconds), measure(*given))[1])
    monkeypatch.setenv("FORCE_COLOR", terminal)
    with without(make_bridge("gpt2"), "scaling", tokens=TOKENS):
        assert capsys.readouterr().err == said


@pytest.mark.parametrize("edit", [lambda m: without(m, "scaling", scale=2.0), linearized])
def test_a_copy_inside_is_refused(edit: Callable[[Any], Any], worlds: list[tuple[str, Any]]) -> None:
    """Nothing would end the edit in it."""
    for name, model in worlds:
        with edit(model):
            state = model.state_dict()
            pickles = (pickle.dumps, lambda m: torch.save(m, io.BytesIO())) if name == "lab" else ()
            for make in (copy.deepcopy, *pickles):  # (hooks of TransformerLens's models cannot be pickled)
                with pytest.raises(InterventionError, match=r"a copy of the model would stay under it for good: copy"):
                    make(model)
        after = copy.deepcopy(model)
        assert torch.equal(after(TOKENS), model(TOKENS))
        assert find_sites(after)
        model.load_state_dict(state)


def test_a_hugging_face_model_whose_bridge_ran_with_a_hook() -> None:
    """Of a pass with a hook a bridge leaves the attention pattern on the module, with its graph."""
    original = hugging_face("gpt2")
    bridge_of(original).run_with_hooks(TOKENS, fwd_hooks=[("blocks.0.hook_resid_pre", lambda v, hook: 1.0 * v)])
    intact = original(TOKENS).logits
    with without(original, "scaling", scale=2.0):
        assert difference(original(TOKENS).logits, intact) > 1e-4
    assert torch.equal(original(TOKENS).logits, intact)
