"""Why a head attends where it does: LN terms are what goes with them (sums of pairs: test_attribution_forms.py)."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from architectures import make_bridge, make_hooked
from attribution_checks import HEAD, TOKENS, pattern_of
from small_models import lab

from ln_probe.analyses.attribution import attribute_scores
from ln_probe.analyses.attribution.shared import AttributionError
from ln_probe.hooks import find_norms, without
from ln_probe.hooks.components import SplitError

pytestmark = [pytest.mark.lens, pytest.mark.filterwarnings("ignore::ln_probe.hooks.edits.NoOpWarning")]


@pytest.mark.parametrize("arch", ["gpt2", "llama"])
def test_terms_are_what_goes_with_them(arch: str) -> None:
    """Each against an edit of the running model that takes the term from both sides at once."""
    model = make_bridge(arch)
    site = next(s for s in find_norms(model) if s.name == "blocks.1.ln1")
    found = attribute_scores(model, TOKENS, **HEAD, key=3, against=5).check()
    terms = found.terms.set_index(["side", "term"])["contribution"]
    assert set(found.terms["term"]) == {"projection", "gain", "bias", "sigma"}
    if arch == "llama":
        assert float(terms["key", "projection"]) == float(terms["query", "bias"]) == 0.0
    with without(model, "projection", sites=[site.name], only="keys"):
        log = pattern_of(model, 1)[2, 7].log()
    assert found.total - float(log[3] - log[5]) == pytest.approx(terms["key", "projection"], abs=1e-5)

    # the same with gain 1, bias 0 or another sigma on the key's side alone
    def edited(change: Callable[[torch.Tensor], torch.Tensor]) -> float:
        attn = model.blocks[1].attn
        handle = attn.k.register_forward_pre_hook(lambda _m, args: (change(args[0]), *args[1:]))
        log = pattern_of(model, 1)[2, 7].log()
        handle.remove()
        return found.total - float(log[3] - log[5])

    gain, bias = site.gain, site.bias if site.bias is not None else torch.zeros(32)
    seen: list[torch.Tensor] = []
    handle = site.module.register_forward_pre_hook(lambda _m, args: seen.append(args[0]))
    pattern_of(model, 1)
    handle.remove()
    sigma = site.sigma(seen[0])
    typical = sigma[0, :8].median()
    assert edited(lambda y: (y - bias) / gain + bias) == pytest.approx(terms["key", "gain"], abs=1e-5)
    assert edited(lambda y: y - bias) == pytest.approx(terms["key", "bias"], abs=1e-5)
    assert edited(lambda y: (y - bias) * sigma / typical + bias) == pytest.approx(terms["key", "sigma"], abs=1e-5)


def test_parts_are_exact_whatever_the_width() -> None:
    """1/d in float64: in float32 it is exact for powers of two alone."""
    model, tokens = make_hooked(d_model=24, n_heads=3, dtype=torch.float64), torch.arange(1, 21)
    found = attribute_scores(model, tokens, 1, 0, query=12, key=5).check()
    _, cache = model.run_with_cache(tokens[None])
    assert found.total == pytest.approx(float(cache["blocks.1.attn.hook_attn_scores"][0, 0, 12, 5]), rel=1e-12)
    every_key = attribute_scores(model, tokens, 1, 0, query=12)
    assert torch.allclose(found.values.flatten(), every_key.values[:, 0, 5], atol=1e-12), "by components of the key"


def test_what_cannot_be_attributed() -> None:
    model = make_bridge("gpt2")
    asked = {"tokens_or_cache": TOKENS, **HEAD, "key": 3}
    for change, word in (
        ({"layer": 2}, "layer 2 is out of range"),
        ({"head": 4}, "head 4 is out of range"),
        ({"query": 10}, "query 10 is out of range"),
        ({"key": 8}, "query 7 does not see key 8"),
        ({"against": 9}, "query 7 does not see key 9"),
        ({"against": "median"}, "against"),
        ({"query": 7.5}, "query"),
        ({"key": 10}, "key 10 is out of range"),
        ({"key": None, "against": 9}, "query 7 does not see key 9"),
        ({"tokens_or_cache": [TOKENS, TOKENS[:5]]}, "query 7 is out of range"),
        ({"pos": 7}, "query and pos"),
    ):
        with pytest.raises(AttributionError, match=word):
            attribute_scores(model, **(asked | change))


def test_alibi_is_a_pair_of_its_own() -> None:
    """−slope·distance of the third of four heads."""
    pairs = attribute_scores(make_bridge("bloom"), TOKENS, **HEAD, key=3, against=5).pairs
    assert pairs.loc["position bias", "position bias"] == pytest.approx(-(2**-6) * 2)
    assert (pairs.loc["position bias"].drop("position bias") == 0).all()


def test_scores_of_caches() -> None:
    for model in (make_bridge("llama"), make_hooked(), lab()):
        _, cache = model.run_with_cache(TOKENS[None])
        for key in (3, None):
            expected = attribute_scores(model, TOKENS, **HEAD, key=key, against="mean").check()
            found = attribute_scores(model, cache, **HEAD, key=key, against="mean").check()
            assert found.table.index.is_unique
            totals = (torch.as_tensor(one.total) for one in (found, expected))
            assert torch.allclose(*totals, atol=1e-5, equal_nan=True)
    raw = make_bridge("gpt2")
    _, cache = raw.run_with_cache(TOKENS[None], names_filter=lambda n: "hook_pattern" not in n)
    with pytest.raises(SplitError, match=r"blocks\.1\.attn\.hook_pattern"):
        attribute_scores(raw, cache, **HEAD)
    _, cache = make_bridge("gpt2").run_with_cache(TOKENS[None])
    with pytest.raises(SplitError, match="another model"):
        attribute_scores(raw, cache, **HEAD)
