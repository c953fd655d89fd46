"""The logit lens: plain torch on the stream before each layer, and the model's own logits at its end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from architectures import make_bridge, make_hooked
from small_models import lab
from torch import Tensor

import ln_probe
from ln_probe.analyses.attribution import attribute_logits, logit_lens
from ln_probe.analyses.attribution.shared import AttributionError
from ln_probe.hooks import find_norms, without

pytestmark = [pytest.mark.lens, pytest.mark.filterwarnings("ignore::ln_probe.hooks.edits.NoOpWarning")]
TOKENS = torch.arange(1, 11)
D, LAYERS = 32, 2


def layer_norm(module: Any, x: Tensor) -> Tensor:
    gain, bias = (module.w, module.b) if hasattr(module, "w") else (module.weight, module.bias)
    return F.layer_norm(x, (D,), gain, bias, 1e-5)


def rms_norm(module: Any, x: Tensor, offset: float = 0.0, eps: float = 1e-6) -> Tensor:
    gain = (module.w if hasattr(module, "w") else module.weight) + offset
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * gain


def nothing(module: Any, x: Tensor) -> Tensor:
    return x


Form = tuple[Callable[[torch.dtype], Any], Callable[[Any, Tensor], Tensor]]
FORMS: dict[str, Form] = {
    "hooked": (lambda dtype: make_hooked(dtype=dtype), layer_norm),
    "hooked parallel": (lambda dtype: make_hooked(parallel_attn_mlp=True, dtype=dtype), layer_norm),
    "hooked rms": (
        lambda dtype: make_hooked(normalization_type="RMS", final_rms=True, dtype=dtype),
        lambda module, x: rms_norm(module, x, eps=1e-5),
    ),
    "hooked without norms": (lambda dtype: make_hooked(normalization_type=None, dtype=dtype), nothing),
    "gpt2": (lambda dtype: make_bridge("gpt2", dtype), layer_norm),
    "neox": (lambda dtype: make_bridge("neox", dtype), layer_norm),
    "llama": (lambda dtype: make_bridge("llama", dtype), rms_norm),
    "gemma2": (lambda dtype: make_bridge("gemma2", dtype), lambda module, x: rms_norm(module, x, 1.0)),
    "lab": (lambda dtype: lab().to(dtype), layer_norm),
    "lab post-norm": (lambda dtype: lab(norm_order="post", norm_final=None).to(dtype), nothing),
}


def streams_of(model: Any) -> Tensor:
    """The stream before each layer, and at the end, [layer pos d]."""
    points = [f"blocks.{layer}.hook_resid_pre" for layer in range(LAYERS)] + [f"blocks.{LAYERS - 1}.hook_resid_post"]
    seen: dict[str, Tensor] = {}
    with torch.no_grad():
        hooks = [(point, lambda x, hook, point=point: seen.update({point: x[0].detach()})) for point in points]
        model.run_with_hooks(TOKENS[None], fwd_hooks=hooks)
    return torch.stack([seen[point] for point in points])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", FORMS)
def test_the_lens_is_plain_torch(name: str, dtype: torch.dtype) -> None:
    make, normalize = FORMS[name]
    model = make(dtype)
    with torch.no_grad():
        own = model(TOKENS[None])[0]
        final = getattr(model, "ln_final", None)
        expected = normalize(final, streams_of(model)) @ model.W_U + model.b_U
        if name == "lab post-norm":  # its last block's norm comes after hook_resid_post
            expected[-1] = own
        if name == "gemma2":
            expected = 30.0 * (expected / 30.0).tanh()
    lens = logit_lens(model, TOKENS).check()
    single = name in ("llama", "gemma2")  # Hugging Face's RMSNorms compute in float32
    bound = 1e-5 if dtype == torch.float32 or single else 1e-10
    scale = float(expected.abs().max())
    assert float((lens.values[:, 0] - expected).abs().max()) <= bound * scale
    assert float((lens.values[-1, 0] - own).abs().max()) <= bound * scale
    assert lens.error <= bound
    _, cache = model.run_with_cache(TOKENS[None])
    from_cache = logit_lens(model, cache, [-1, 3]).check()
    assert from_cache.at.tolist() == [[9, 3]]
    assert torch.allclose(from_cache.values, lens.values[:, :, [9, 3]], atol=2e-5 * scale)


def test_the_final_scale() -> None:
    """All layers at the last one's sigma: what is read is linear in the stream, and direct logit attribution's sums."""
    model = make_bridge("gpt2", torch.float64)
    lens = logit_lens(model, TOKENS, -1, target=3, scale="final").check()
    parts = attribute_logits(model, TOKENS, -1, target=3).table
    embedded = parts[parts["kind"].isin(["embedding", "position", "norm bias", "unembedding bias"])]
    assert lens.table["logit"].iloc[0] == pytest.approx(embedded["contribution"].sum(), abs=1e-9)
    assert lens.table["logit"].iloc[-1] == pytest.approx(parts["contribution"].sum(), abs=1e-9)


def test_the_table_and_the_picture() -> None:
    model = ln_probe.load_model("lm-layernorm")
    text = "The ships came <b>home."
    lenses = [logit_lens(model, [text, "The lamp"], -1, target=t).values for t in (",", model.to_single_token(","))]
    assert lenses[0].equal(lenses[1])
    lens = logit_lens(model, [text, "The lamp"], slice(0, None), target=5, against="mean")
    assert lens.label.endswith("minus the mean logit")
    table = lens.check().table
    row = table.query("layer == 2 and batch == 1 and position == 1").iloc[0]
    logits = lens.values[2, 1, 1]
    assert row["logit"] == pytest.approx(float(logits[5] - logits.mean()), abs=1e-5)
    assert row["entropy"] == pytest.approx(float(torch.distributions.Categorical(logits=logits).entropy()), abs=1e-4)
    with torch.no_grad():
        last = model(text)[0, -1]
    assert logit_lens(model, text, pos=-1).table["logit"].iloc[-1] == pytest.approx(float(last.max()), abs=1e-4)
    html = lens._repr_html_()
    assert html.count("<tr>") == model.cfg.n_layers + 2
    assert "<b>" not in html


@pytest.mark.parametrize("what", ["scaling", "projection", "both"])
def test_the_lens_of_an_edited_model(what: str) -> None:
    for model in (make_bridge("gpt2"), make_hooked()):
        with without(model, what, sites="all", scale=2.0):
            assert logit_lens(model, TOKENS).check().error < 1e-5
        constants = {norm.name: {"first": 1.5, "rest": 3.0} for norm in find_norms(model)}
        with without(model, what, sites="all", scale=constants):
            assert logit_lens(model, TOKENS).check().error < 1e-5


def test_names_of_transformer_lens() -> None:
    model = make_bridge("gpt2")
    lens = logit_lens(model, TOKENS, [2, 3], target=3, against=4)
    other = logit_lens(model, TOKENS, pos_slice=(2, 4), answer_tokens=3, incorrect_tokens=4)
    assert torch.equal(lens.values, other.values)
    assert lens.table.equals(other.table)
    logits = attribute_logits(model, TOKENS, -1, 3, 4)
    assert attribute_logits(model, TOKENS, pos=-1, answer_tokens=3, incorrect_tokens=4).total == logits.total
    for options, word in (({"scale": "mine"}, "scale"), ({"pos": 1, "positions": 1}, "pos"), ({"pos": 99}, "99")):
        with pytest.raises(AttributionError, match=word):
            logit_lens(model, TOKENS, **options)
