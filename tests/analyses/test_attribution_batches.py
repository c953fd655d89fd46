"""Attribution at many positions of many prompts equals attribution at one; features replace what they reconstruct."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pandas as pd
import pytest
import torch
from architectures import make_bridge
from torch import Tensor

from ln_probe.analyses.attribution import Features, attribute_logits, attribute_scores
from ln_probe.analyses.attribution.shared import AttributionError
from ln_probe.hooks import find_norms

TOKENS = torch.arange(1, 11)
pytestmark = [pytest.mark.lens, pytest.mark.filterwarnings("ignore::ln_probe.hooks.edits.NoOpWarning")]


class Dictionary:
    """An untrained sparse autoencoder, of 128 features."""

    def __init__(self, hook_name: str, dtype: torch.dtype = torch.float64) -> None:
        generator = torch.Generator().manual_seed(3)
        self.cfg = SimpleNamespace(hook_name=hook_name, metadata=SimpleNamespace(hook_name=""))
        self.W_dec = torch.randn(128, 32, generator=generator, dtype=torch.float64).to(dtype)
        self.b_dec = torch.randn(32, generator=generator, dtype=torch.float64).to(dtype)

    def encode(self, x: Tensor) -> Tensor:
        return ((x - self.b_dec) @ self.W_dec.T).relu()

    def decode(self, active: Tensor) -> Tensor:
        return active @ self.W_dec + self.b_dec


def test_positions_targets_and_components() -> None:
    model = make_bridge("gpt2")
    batch = TOKENS.repeat(2, 1)
    every = attribute_logits(model, batch, target=3).check()
    assert [(p.layer, p.index) for p in every.components if p.kind in ("embedding", "position")] == [(-1, -1)] * 2
    for positions in (slice(2, 9, 3), [2, 5, -2], torch.tensor([2, 5, 8])):
        some = attribute_logits(model, batch, positions, target=3)
        assert some.at.tolist() == [[2, 5, 8]] * 2
        assert torch.allclose(some.values, every.values[:, :, [2, 5, 8]], atol=1e-6)
    following = attribute_logits(model, batch, slice(0, 9))
    given = attribute_logits(model, batch, slice(0, 9), target=batch[:, 1:])
    assert torch.equal(following.values, given.values)
    assert [a.label for a in (following, given)] == ["logit of the next token", "logit of the tokens given"]
    one_each = attribute_logits(model, batch, -1, target=[7, 8])
    alone = [attribute_logits(model, TOKENS, -1, i).total for i in (7, 8)]
    assert one_each.total[:, 0].tolist() == pytest.approx(alone, abs=1e-5)
    sets = attribute_logits(model, TOKENS, [1, 2], target=torch.tensor([[[3, 4], [3, 4]]]))
    assert sets.total[0, 0] == pytest.approx(attribute_logits(model, TOKENS, 1, [3, 4]).total, abs=1e-9)
    layers = attribute_logits(model, batch, target=3, components="layers").check()
    assert {p.name for p in layers.components} == {
        "embed", "pos_embed", "L0 attn", "L0 mlp", "L1 attn", "L1 mlp", "ln_final bias", "b_U"
    }  # fmt: skip
    assert torch.allclose(layers.total, every.total, atol=1e-9)
    assert "2 x 10 positions" in repr(every)
    assert every.components[0].name in every._repr_html_()
    _, cache = model.run_with_cache(batch)
    assert torch.allclose(attribute_logits(model, cache, target=3).check().values, every.values, atol=2e-6)


class OfNormalizedInputs(Dictionary):
    """Encodes normalized activations, and gives the mean and the size of each token back."""

    def encode(self, x: Tensor) -> Tensor:
        self.mean, self.size = x.mean(-1, keepdim=True), x.std(-1, keepdim=True)
        return super().encode((x - self.mean) / self.size)

    def decode(self, active: Tensor) -> Tensor:
        return super().decode(active) * self.size + self.mean


class OfScaledRows(Dictionary):
    """Activations are in units of the decoder's rows, which `decode` divides by."""

    def decode(self, active: Tensor) -> Tensor:
        return super().decode(active / self.W_dec.norm(dim=1))


class OfBoth(OfNormalizedInputs):
    def decode(self, active: Tensor) -> Tensor:
        return super().decode(active * torch.linspace(0.5, 2.0, 128).double())


class WithSkip(Dictionary):
    def __call__(self, x: Tensor) -> Tensor:
        return self.decode(self.encode(x)) + x @ self.W_skip.T

    W_skip = torch.randn(32, 32, generator=torch.Generator().manual_seed(4), dtype=torch.float64)


class WithErrorTerm(WithSkip):
    use_error_term = True

    def __call__(self, x: Tensor) -> Tensor:
        return x


@pytest.mark.parametrize("kind", [Dictionary, OfNormalizedInputs, OfScaledRows, OfBoth, WithSkip, WithErrorTerm])
def test_features_write_what_their_dictionary_decodes(kind: type[Dictionary]) -> None:
    model, name = make_bridge("gpt2", torch.float64), "blocks.1.hook_resid_post"
    _, cache = model.run_with_cache(TOKENS[None])
    sae, final, x = kind(name), find_norms(model)[-1], cache[name]
    found = attribute_logits(model, TOKENS, -1, 3, features=replace(Features.of(sae, cache), top=50)).check()
    active = sae.encode(x)

    def read(written: Tensor) -> float:
        through = final.project(written[0, -1].double()) / final.sigma(x[0, -1].double())
        return float((through * final.gain) @ model.W_U[:, 3].double())

    shown = found.table[(found.table["kind"] == "feature") & (found.table["index"] >= 0)]
    assert len(shown) == 50
    for row in shown.to_dict("records"):
        other = active.clone()
        other[..., row["index"]] = 0
        assert row["contribution"] == pytest.approx(read(sae.decode(active) - sae.decode(other)), abs=1e-9)
    rows = found.table.set_index("kind")["contribution"]
    output = WithSkip.__call__(sae, x) if isinstance(sae, WithSkip) else sae.decode(active)
    assert rows["error"] == pytest.approx(read(x - output), abs=1e-9)
    assert rows["decoder bias"] == pytest.approx(read(sae.decode(torch.zeros_like(active))), abs=1e-9)
    assert ("skip" in rows) == isinstance(sae, WithSkip)


def test_dictionaries_of_another_form() -> None:
    """A decoder that mixes features, and an output that is not what is decoded."""
    model = make_bridge("gpt2", torch.float64)
    _, cache = model.run_with_cache(TOKENS[None])
    mixed, other = (Dictionary("blocks.1.hook_resid_pre") for _ in range(2))
    mixed.decode = lambda active: active.flip(-1) @ mixed.W_dec  # type: ignore[method-assign]
    with pytest.raises(AttributionError, match="decode"):
        Features.of(mixed, cache)
    other.__class__ = type("Twice", (Dictionary,), {"__call__": lambda self, x: 2 * self.decode(self.encode(x))})
    with pytest.raises(AttributionError, match="no skip connection"):
        Features.of(other, cache)


def test_features_of_several_hook_points() -> None:
    """Later hook points replace the features of earlier ones; those of one block's attention and MLP stay apart."""
    model = make_bridge("gpt2", torch.float64)
    _, cache = model.run_with_cache(TOKENS[None])
    plain = attribute_logits(model, TOKENS, -1, 3)
    points = ("hook_resid_pre", "hook_attn_out", "hook_mlp_out")
    three = [Features.of(Dictionary(f"blocks.1.{point}"), cache) for point in points]
    found = attribute_logits(model, TOKENS, -1, 3, features=three).check()
    assert found.total == pytest.approx(plain.total, abs=1e-10)
    assert set(found.table["kind"]) == {"feature", "decoder bias", "error", "norm bias", "unembedding bias"}
    first = Features.of(Dictionary("blocks.0.hook_resid_pre"), cache)
    assert "embedding" not in set(attribute_logits(model, TOKENS, -1, 3, features=first).check().table["kind"])
    last = Features.of(Dictionary("blocks.1.hook_resid_post"), cache)
    alone, after = (attribute_logits(model, TOKENS, -1, 3, features=f).check() for f in (last, [first, *three, last]))
    assert list(after.table["part"]) == list(alone.table["part"])
    layers = attribute_logits(model, TOKENS, -1, 3, features=last, components="layers").check().table
    assert list(layers["kind"]) == list(alone.table["kind"])


def test_features_that_do_not_fit() -> None:
    model = make_bridge("gpt2", torch.float64)
    _, cache = model.run_with_cache(TOKENS[None])
    name = "blocks.1.hook_resid_pre"
    features = Features.of(Dictionary(name), cache)
    vectors, active = features.directions, features.activations
    narrow = replace(features)
    object.__setattr__(narrow, "bias", torch.zeros(8))  # (the tests' type checker would refuse it before)
    for given, word in (
        (Features(name, vectors[:, :8], active), "directions"),
        (Features(name, vectors, active[:, :4]), "activations"),
        (Features("blocks.1.attn.hook_z", vectors, active), "hook_z"),
        (Features("blocks.7.hook_resid_pre", vectors, active), "2 layers"),
        (narrow, "bias"),
        (Features(name, vectors, active * torch.nan), "finite"),
        (Dictionary(name), "Dictionary"),
        ([features, features], "two dictionaries"),
        ([features, replace(features, hook_name="blocks.0.hook_mlp_out")], "components"),
    ):
        for attribute in (attribute_logits, partial(attribute_scores, layer=1, head=2, query=7, key=3)):
            with pytest.raises(AttributionError, match=word):
                attribute(model, TOKENS, features=given)
    with pytest.raises(AttributionError, match="encode"):
        Features.of(SimpleNamespace(), cache)
    with pytest.raises(AttributionError, match=r"blocks\.5\.hook_resid_pre"):
        Features.of(Dictionary("blocks.5.hook_resid_pre"), cache)
    with pytest.raises(AttributionError, match=r"blocks\.1\.hook_mlp_out"):
        attribute_scores(model, TOKENS, 1, 2, 7, 3, features=Features("blocks.1.hook_mlp_out", vectors, active))


def test_features_of_the_scores_of_several_prompts() -> None:
    model, batch = make_bridge("gpt2", torch.float64), torch.stack([TOKENS, TOKENS.flip(0)])
    dictionary = Dictionary("blocks.1.hook_resid_pre")

    def sums(tokens: Tensor) -> pd.Series:
        features = Features.of(dictionary, model.run_with_cache(tokens)[1])
        table = attribute_scores(model, tokens, 1, 2, 7, 3, features=features).check().table
        of_keys = table[table["side"] == "key"].assign(batch=table.get("batch", 0))
        return of_keys.groupby(["batch", "kind"])["contribution"].sum()

    both = sums(batch)
    for i, row in enumerate(batch):
        pd.testing.assert_series_equal(both[i], sums(row[None])[0], rtol=1e-9)


def test_features_of_one_score_are_the_largest_at_its_query_and_key() -> None:
    model, dictionary = make_bridge("gpt2", torch.float64), Dictionary("blocks.1.hook_resid_pre")
    cache = model.run_with_cache(TOKENS[None])[1]
    features = replace(Features.of(dictionary, cache), top=5)
    table = attribute_scores(model, TOKENS, 1, 2, 7, 3, features=features).table
    active = dictionary.encode(cache["blocks.1.hook_resid_pre"])[0, [3, 7]].amax(0)
    largest = (active * dictionary.W_dec.norm(dim=1)).topk(5).indices
    assert set(table.loc[table["kind"] == "feature", "index"]) - {-1} == set(largest.tolist())
