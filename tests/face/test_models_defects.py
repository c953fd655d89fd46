"""Known faults of loading and measuring models, each as the test that failed while it was there."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import ln_probe
from ln_probe.analyses.probes.columns import BUILT_IN
from ln_probe.hooks import find_sites, without
from ln_probe.hooks.model import device_obstacle
from ln_probe.loading import verify
from ln_probe.loading.convert import has_hooked_transformer

SMALL = {
    "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 80, "vocab_size": 97,
    "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip


def write_folder(folder: Path, config_class: str, options: dict[str, Any], std: float = 0.3) -> Any:
    """A Hugging Face folder with random weights, biases and gains; the model itself."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    config = getattr(transformers, config_class)(**options)
    torch.manual_seed(0)
    model = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config).eval()
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, std=std)
        if parameter.dim() == 1 and name.endswith("weight"):
            parameter.data += 1
    model.save_pretrained(folder)
    return model


TOKENS = torch.randint(3, 50, (2, 20), generator=torch.Generator().manual_seed(3))


def test_b04_a_difference_that_the_original_rounds_itself_is_no_other_model(tmp_path: Path) -> None:
    """Large scores: the loaded model is further from the original than ports of ordinary models, and no further than
    the original is from itself in float64."""
    shape = SMALL | {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 6}
    original: Any = write_folder(tmp_path, "GPTNeoXConfig", shape, std=0.3)
    with torch.no_grad():
        for name, parameter in original.named_parameters():
            if "query_key_value" in name:
                parameter.mul_(5)
    original.save_pretrained(tmp_path)
    tokens = verify.probe_tokens(original.config, torch.device("cpu"))
    logits = verify.logits_of(lambda ids: original(ids).logits, tokens)
    own = verify.own_rounding(original, "float32", tokens, logits)
    assert verify.OWN_ROUNDINGS * own > verify.CONVERSION_BOUND["float32"], "the case must be a case"
    source = ln_probe.source_of(ln_probe.load_model(tmp_path, device="cpu"))
    assert source.world == ("HookedTransformer" if has_hooked_transformer() else "TransformerBridge")
    assert source.logits_max_difference is not None
    assert source.logits_max_difference <= verify.OWN_ROUNDINGS * own


def test_b04_beyond_its_own_rounding_a_model_is_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = verify.to_bridge

    def wrong(*args: Any, **options: Any) -> Any:
        model: Any = right(*args, **options)
        model.ln_final.weight.data *= 1.0001
        return model

    monkeypatch.setattr(verify, "to_bridge", wrong)
    write_folder(tmp_path, "GPTNeoXConfig", SMALL)
    with pytest.raises(ValueError, match=r"could not be loaded faithfully as TransformerBridge .* off the original's"):
        ln_probe.load_model(tmp_path, device="cpu", world="bridge")


@pytest.mark.parametrize("world", ["hooked", "bridge"] if has_hooked_transformer() else ["bridge"])
def test_b05_several_end_tokens(world: Any, tmp_path: Path) -> None:
    """Llama 3 Instruct: eos_token_id is a list."""
    write_folder(tmp_path, "LlamaConfig", SMALL | {"eos_token_id": [2, 5, 9]})
    source = ln_probe.source_of(ln_probe.load_model(tmp_path, device="cpu", world=world))
    assert source.logits_max_difference is not None
    assert source.logits_max_difference < 1e-5
    tokens = verify.probe_tokens(transformers.LlamaConfig(**(SMALL | {"eos_token_id": [2, 5, 9]})), torch.device("cpu"))
    assert not {0, 1, 2, 5, 9} & set(tokens[0].tolist())


def test_b06_mps_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    write_folder(tmp_path, "GPT2Config", {"n_embd": 32, "n_head": 4, "n_layer": 1, "n_positions": 16, "vocab_size": 50})
    with pytest.raises(
        ValueError, match=r"device 'mps' cannot be used: Apple's MPS computes no float64, .* Use device='cpu'"
    ):
        ln_probe.load_model(tmp_path, device="mps")
    assert device_obstacle(torch.device("mps"))
    assert not device_obstacle(torch.device("cpu"))


def tables(report: ln_probe.Report) -> dict[str, Any]:
    return {t.name: report.tables[t.name] for t in BUILT_IN}


def in_threads(*works: Callable[[], Any]) -> list[Any]:
    """Results of works begun together; an exception in any of them is raised."""
    results: list[Any] = [None] * len(works)
    start = threading.Barrier(len(works))

    def run(i: int) -> None:
        start.wait()
        try:
            results[i] = works[i]()
        except Exception as error:
            results[i] = error

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for found in results:
        if isinstance(found, Exception):
            raise found
    return results


@pytest.mark.slow
def test_b07_two_analyses_in_threads_give_the_tables_of_each_alone(make_bridge: Callable[..., Any]) -> None:
    model = make_bridge("gpt2")
    how: dict[str, Any] = {
        "progress": False,
        "probes": ("decomposition", "selectability", "uniformity"),
        "heads": [0, 1],
    }
    alone = [ln_probe.analyze(model, TOKENS[[i]], **how) for i in range(2)]
    together = in_threads(*(lambda i=i: ln_probe.analyze(model, TOKENS[[i]], **how) for i in range(2)))  # type: ignore[misc]
    for one, two in zip(alone, together, strict=True):
        for name, table in tables(one).items():
            assert table.equals(tables(two)[name]), name


def test_b07_interventions_in_threads_wait_for_each_other(make_bridge: Callable[..., Any]) -> None:
    model = make_bridge("gpt2")
    site = find_sites(model)[0].name

    def loss(scale: float) -> torch.Tensor:
        with torch.no_grad(), without(model, "scaling", sites=[site], scale=scale):
            return model(TOKENS, return_type="logits")

    alone = [loss(s) for s in (1.0, 3.0)]
    for _ in range(3):
        together = in_threads(lambda: loss(1.0), lambda: loss(3.0))
        assert all(torch.equal(a, b) for a, b in zip(alone, together, strict=True))


def test_b07_an_analysis_waits_for_an_intervention_in_another_thread(make_bridge: Callable[..., Any]) -> None:
    model = make_bridge("gpt2")
    how: dict[str, Any] = {"progress": False, "probes": ("decomposition",)}
    alone = ln_probe.analyze(model, TOKENS, **how)
    inside, leave = threading.Event(), threading.Event()

    def edit() -> None:
        with without(model, "scaling", scale=2.0):
            inside.set()
            leave.wait(30)

    def look() -> ln_probe.Report:
        inside.wait(30)
        threading.Timer(0.2, leave.set).start()
        return ln_probe.analyze(model, TOKENS, **how)

    _, report = in_threads(edit, look)
    assert report.layernorms.equals(alone.layernorms)
