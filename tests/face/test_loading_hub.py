"""Hub names: through a server on this machine that speaks as the hub does, from the cache, and without a network."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import hugging_face
from faulty import word_tokenizer
from hub_standin import Hub, reached
from huggingface_hub import constants
from transformers import AutoModelForCausalLM

from ln_probe.loading import pretrained as hub_names
from ln_probe.loading.convert import has_hooked_transformer
from ln_probe.models import load_model, source_of

pytestmark = pytest.mark.lens

DEFAULT_WORLD = "HookedTransformer" if has_hooked_transformer() else "TransformerBridge"
PYTHIA = "EleutherAI/pythia-70m"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A repository's files for each model: weights, config, a tokenizer of five words; `pickled`: weights of old."""
    home = tmp_path_factory.mktemp("repositories")
    for name, architecture in (("gpt2", "gpt2"), ("main", "neox"), ("step1000", "neox"), ("pickled", "gpt2")):
        model = hugging_face(architecture)
        if name == "step1000":
            model.get_input_embeddings().weight.data.neg_()
        model.save_pretrained(home / name)
        word_tokenizer(["?", "<s>", "</s>", "the", "norm"]).save_pretrained(home / name)
        if name == "pickled":
            (home / name / "model.safetensors").unlink()
            torch.save(model.state_dict(), home / name / "pytorch_model.bin")
    return {path.name: path for path in home.iterdir()}


@pytest.fixture
def hub(folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with reached(tmp_path / "cache", monkeypatch) as served:
        served.add("gpt2", {"main": folders["gpt2"]})
        served.add(PYTHIA, {"main": folders["main"], "step1000": folders["step1000"]})
        served.add("facebook/opt-125m", {"main": folders["pickled"]})
        yield served


def test_a_name_is_downloaded_once_and_is_the_model(hub: Hub) -> None:
    model: Any = load_model("gpt2", device="cpu")
    source = source_of(model)
    assert (source.name, source.kind, source.world) == ("gpt2", "hub", DEFAULT_WORLD)
    assert (source.revision, source.commit) == (None, hub.commit("gpt2", "main"))
    assert model.to_tokens("the norm", prepend_bos=False).tolist()[0][-2:] == [3, 4]
    files = {line.rsplit("/resolve/", 1)[1].partition("/")[2] for line in hub.requests if line.startswith("GET /gpt2/")}
    assert "model.safetensors" in files
    assert not files & {"README.md", "onnx/config.json", "onnx/decoder_model.onnx"}
    before = len(hub.requests)
    load_model("GPT2-small", device="cpu")
    assert not [line for line in hub.requests[before:] if line.startswith("GET /gpt2/resolve")]


def test_a_training_step_is_its_own_revision(hub: Hub, folders: dict[str, Path]) -> None:
    commit = hub.commit(PYTHIA, "step1000")
    late, early, same = (load_model(f"pythia-70m{at}", device="cpu") for at in ("", "@1000", f"@{commit}"))
    source = source_of(early)
    assert (source.name, source.revision, source.commit) == ("pythia-70m", "step1000", commit)
    assert source_of(late).commit != commit
    assert source_of(same).weights_sha256 == source.weights_sha256 != source_of(late).weights_sha256
    embedding = AutoModelForCausalLM.from_pretrained(folders["step1000"]).get_input_embeddings().weight
    assert torch.equal(next(early.parameters()), embedding)
    hub.add(PYTHIA, dict.fromkeys(["main", "step1000", "step16", "experiment-7b"], folders["step1000"]))
    assert hub_names.checkpoints(PYTHIA) == ["step16", "step1000"]


@pytest.mark.parametrize(("name", "error", "word"), [
    ("owner/nothing", ValueError, "owner/nothing"),
    ("gpt2@v9", ValueError, "'v9'"),
    (PYTHIA, ValueError, "gated"),
    ("opt-125m", ValueError, "allow_pickle"),
    ("pythia-70n", ValueError, "pythia-70m"),  # the nearest known name
    ("qqqqqqqq", ValueError, "no model"),
    ("gelu-1l", ValueError, "older format"),
])  # fmt: skip
def test_what_the_hub_does_not_give_is_one_line(hub: Hub, name: str, error: type[Exception], word: str) -> None:
    hub.gated.add(PYTHIA)
    with pytest.raises(error, match=word) as raised:
        load_model(name, device="cpu")
    assert "\n" not in str(raised.value)
    assert not [line for line in hub.requests if line.endswith((".bin", ".safetensors"))]


def test_a_repository_with_a_pickle(hub: Hub) -> None:
    assert source_of(load_model("opt-125m", device="cpu", allow_pickle=True)).weights_sha256
    del hub.repositories["facebook/opt-125m"]["main"]["pytorch_model.bin"]
    with pytest.raises(ValueError, match="neither"):
        load_model("opt-125m", device="cpu", allow_pickle=True)


def test_a_copy_that_is_here_is_used_when_the_hub_fails(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    first = source_of(load_model("gpt2", device="cpu"))
    hub.failing = True
    for offline, word in ((False, "pythia-70m"), (True, "HF_HUB_OFFLINE")):
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
        before = len(hub.requests)
        assert source_of(load_model("gpt2", device="cpu")).commit == first.commit
        with pytest.raises(ConnectionError, match=word) as raised:
            load_model("pythia-70m", revision=1000, device="cpu")
        assert "\n" not in str(raised.value)
        assert constants.HF_HUB_OFFLINE is offline
        assert (len(hub.requests) == before) == offline


def test_names_and_revisions() -> None:
    assert hub_names.known_hub_names()["pythia-70m"] == hub_names.official_name("PYTHIA-70M") == PYTHIA
    assert hub_names.official_name("owner/model.v2") == "owner/model.v2"
    for repository, revision, expected in (
        (PYTHIA, "1000", "step1000"),
        ("stanford-crfm/alias-gpt2-small-x21", "400", "checkpoint-400"),
        ("gpt2", "1000", "1000"),
        (PYTHIA, None, None),
    ):
        assert hub_names.hub_revision(repository, revision) == expected
