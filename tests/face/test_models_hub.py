"""Hub names without a hub: a cache that the test writes, and a network that is cut or played."""

from __future__ import annotations

import shutil
import socket
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
import torch
from huggingface_hub import constants
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from ln_probe.loading.hub import hub_revision, known_hub_names, official_name
from ln_probe.models import load_model, source_of

try:
    from transformer_lens import HookedTransformer  # noqa: F401

    DEFAULT_WORLD = "HookedTransformer"
except ImportError:
    DEFAULT_WORLD = "TransformerBridge"

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def tiny_gpt2(**more: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    config = GPT2Config(n_embd=32, n_head=4, n_layer=1, n_positions=32, vocab_size=50, **more)
    config.update({"bos_token_id": 1, "eos_token_id": 2})
    return GPT2LMHeadModel(config)


def tiny_pythia() -> PreTrainedModel:
    torch.manual_seed(0)
    return GPTNeoXForCausalLM(
        GPTNeoXConfig(
            hidden_size=32,
            num_attention_heads=2,
            num_hidden_layers=1,
            intermediate_size=128,
            vocab_size=50,
            max_position_embeddings=32,
            rotary_pct=0.25,
            bos_token_id=1,
            eos_token_id=2,
        )
    )


def write_repository(folder: Path, model: PreTrainedModel, *, pickled: bool = False) -> None:
    model.save_pretrained(folder)
    if pickled:
        (folder / "model.safetensors").unlink()
        torch.save(model.state_dict(), folder / "pytorch_model.bin")
    words = {word: i for i, word in enumerate(["?", "<s>", "</s>", "the", "norm"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="?", bos_token="<s>", eos_token="</s>"
    ).save_pretrained(folder)


def put_in_cache(cache: Path, repository: str, folder: Path, revision: str = "main", files: Any = None) -> Path:
    """What a download leaves behind: snapshots/COMMIT and a ref that points to it."""
    home = cache / f"models--{repository.replace('/', '--')}"
    snapshot = home / "snapshots" / COMMIT
    snapshot.mkdir(parents=True, exist_ok=True)
    for file in folder.iterdir():
        if files is None or file.name in files:
            shutil.copy(file, snapshot / file.name)
    (home / "refs").mkdir(exist_ok=True)
    (home / "refs" / revision).write_text(COMMIT)
    return snapshot


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty download cache, and no way out of this machine."""
    path = tmp_path / "hub"
    path.mkdir()
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(path))

    def no_route(*_: object, **__: object) -> None:
        raise socket.gaierror(-3, "Temporary failure in name resolution")

    monkeypatch.setattr(socket, "getaddrinfo", no_route)
    monkeypatch.setattr(socket.socket, "connect", no_route)
    return path


@pytest.fixture
def hub(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    """A hub that holds what is put into this dictionary: "repository@revision" to a folder."""
    held: dict[str, Path] = {}

    def model_info(
        _: object, repository: str, *, revision: str | None = None, timeout: float, files_metadata: bool
    ) -> Any:
        folder = held[f"{repository}@{revision or 'main'}"]
        files = [SimpleNamespace(rfilename=file.name) for file in folder.iterdir()]
        return SimpleNamespace(sha=COMMIT, siblings=[*files, SimpleNamespace(rfilename="onnx/model.onnx")])

    def snapshot_download(
        repository: str, *, revision: str | None, allow_patterns: list[str], etag_timeout: float
    ) -> str:
        revision = revision or "main"
        folder = held[f"{repository}@{revision}"]
        assert "onnx/model.onnx" not in allow_patterns
        return str(put_in_cache(cache, repository, folder, revision, allow_patterns))

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", model_info)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    return held


def test_no_network_and_no_copy_says_so_quickly(cache: Path) -> None:
    started = time.monotonic()
    expected = (
        r"gpt2 is not on this machine, and the model hub \(https://huggingface\.co\) cannot be reached "
        r"\(.*\)\. Give the path of a local folder"
    )
    with pytest.raises(ConnectionError, match=expected):
        load_model("gpt2", device="cpu")
    assert time.monotonic() - started < 10  # TransformerLens alone retries for 23 s


def test_offline_mode_is_named(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ConnectionError, match=r"pythia-70m at revision 'step1000' .* \(offline mode is on\)"):
        load_model("pythia-70m", revision="1000", device="cpu")
    assert constants.HF_HUB_OFFLINE is True


# n_ctx stands in the real gpt2's config.json; newer versions of transformers do not write it.
@pytest.mark.parametrize(("name", "more"), [("gpt2", {"n_ctx": 32}), ("GPT2-small", {})])
def test_the_local_copy_is_used_without_a_network(name: str, more: dict[str, Any], cache: Path, tmp_path: Path) -> None:
    write_repository(tmp_path / "gpt2", tiny_gpt2(**more))
    put_in_cache(cache, "gpt2", tmp_path / "gpt2")
    model: Any = load_model(name, device="cpu")
    source = source_of(model)
    assert (source.name, source.kind, source.world) == (name, "hub", DEFAULT_WORLD)
    assert (source.revision, source.commit) == (None, COMMIT)
    assert source.logits_max_difference is not None
    assert source.logits_max_difference < 1e-5
    assert "the model hub could not be reached: the local copy was used" in source.notes
    assert model.to_tokens("the norm", prepend_bos=False).tolist()[0][-2:] == [3, 4]


@pytest.mark.parametrize("world", [None, "bridge"])
def test_a_training_checkpoint_of_pythia(world: Any, hub: dict[str, Path], tmp_path: Path) -> None:
    late, early = tiny_pythia(), tiny_pythia()
    with torch.no_grad():
        for parameter in early.parameters():
            parameter.mul_(0.5)
    write_repository(tmp_path / "late", late)
    write_repository(tmp_path / "early", early)
    hub["EleutherAI/pythia-70m@step1000"] = tmp_path / "early"

    model: Any = load_model("pythia-70m", revision="step1000", device="cpu", world=world)
    source = source_of(model)
    assert (source.revision, source.commit) == ("step1000", COMMIT)
    assert source.world == ("TransformerBridge" if world else DEFAULT_WORLD)
    tokens = torch.arange(3, 30)[None]
    with torch.no_grad():
        difference = (model(tokens, return_type="logits") - early.eval()(tokens).logits).abs().max()
    assert float(difference) < 1e-5


def test_a_repository_that_transformer_lens_does_not_list(hub: dict[str, Path], tmp_path: Path) -> None:
    write_repository(tmp_path / "own", tiny_gpt2())
    hub["someone/their-gpt2@main"] = tmp_path / "own"
    source = source_of(load_model("someone/their-gpt2", device="cpu"))
    assert (source.world, source.architecture) == (DEFAULT_WORLD, "GPT2LMHeadModel")


def test_a_repository_with_pickles_only(hub: dict[str, Path], tmp_path: Path) -> None:
    write_repository(tmp_path / "old", tiny_gpt2(), pickled=True)
    hub["facebook/opt-125m@main"] = tmp_path / "old"
    with pytest.raises(
        ValueError, match=r"facebook/opt-125m holds its weights only as a pickle\. .* allow_pickle=True"
    ):
        load_model("opt-125m", device="cpu")
    source = source_of(load_model("opt-125m", device="cpu", allow_pickle=True, world="bridge"))
    assert source.weights_sha256 is not None


def test_a_repository_without_weights(hub: dict[str, Path], tmp_path: Path) -> None:
    write_repository(tmp_path / "empty", tiny_gpt2())
    (tmp_path / "empty" / "model.safetensors").unlink()
    hub["gpt2@main"] = tmp_path / "empty"
    with pytest.raises(ValueError, match=r"gpt2 has no weights that can be read here: looked for .*, found .*config"):
        load_model("gpt2", device="cpu")


@pytest.mark.parametrize(
    ("failure", "message"),
    [
        (RepositoryNotFoundError, r"No model is called 'EleutherAI/pythia-70m'"),
        (
            RevisionNotFoundError,
            r"no revision 'nope'\. Pythia's training checkpoints are step0, .*step143000",
        ),
        (GatedRepoError, r"asks for an agreement before it can be downloaded: .*hf auth login"),
    ],
)
def test_what_the_hub_refuses(failure: Any, message: str, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise failure("refused", response=SimpleNamespace(headers={}, request=None, status_code=404))

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", refuse)
    with pytest.raises(ValueError, match=message):
        load_model("pythia-70m", revision="nope", device="cpu")


def test_a_download_that_stops(hub: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: object, **__: object) -> None:
        raise OSError("connection reset")

    write_repository(tmp_path / "gpt2", tiny_gpt2())
    hub["gpt2@main"] = tmp_path / "gpt2"
    monkeypatch.setattr(huggingface_hub, "snapshot_download", stop)
    with pytest.raises(ConnectionError, match=r"the download of gpt2 stopped \(OSError: connection reset\)\. Try"):
        load_model("gpt2", device="cpu")


def test_an_unknown_name_suggests_the_nearest(cache: Path) -> None:
    with pytest.raises(ValueError, match=r"No model is called 'pythia-70n'\. Nearest known names: .*pythia-70m"):
        load_model("pythia-70n")
    with pytest.raises(ValueError, match=r"No model is called 'qqqqqqqq'\. A model is a name on the model hub"):
        load_model("qqqqqqqq")


def test_transformer_lens_own_older_format_is_refused(cache: Path) -> None:
    with pytest.raises(ValueError, match=r"gelu-1l \(NeelNanda/.*\) is stored in TransformerLens's own older format"):
        load_model("gelu-1l")


def test_a_folder_of_a_known_name_counts_only_if_it_holds_a_model(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gpt2").mkdir()
    with pytest.raises(ConnectionError):
        load_model("gpt2", device="cpu")
    tiny_gpt2().save_pretrained(tmp_path / "gpt2")
    assert source_of(load_model("gpt2", device="cpu")).kind == "folder"


def test_names_and_revisions() -> None:
    assert known_hub_names()["pythia-70m"] == "EleutherAI/pythia-70m"
    assert official_name("PYTHIA-70M") == "EleutherAI/pythia-70m"
    assert official_name("owner/model.v2") == "owner/model.v2"
    assert hub_revision("EleutherAI/pythia-70m", "1000") == "step1000"
    assert hub_revision("stanford-crfm/alias-gpt2-small-x21", "400") == "checkpoint-400"
    assert hub_revision("gpt2", "1000") == "1000"
    assert hub_revision("EleutherAI/pythia-70m", None) is None


def test_suites_of_training_checkpoints(hub: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`--checkpoints` on hub names: steps become revisions, 'all' asks the hub, and a report is made of each."""
    from typer.testing import CliRunner

    from ln_probe.batch.suite import suite
    from ln_probe.cli import app

    write_repository(tmp_path / "model", tiny_pythia())
    hub["EleutherAI/pythia-70m@step1000"] = tmp_path / "model"
    (found,) = suite(["pythia-70m"], "1000")
    assert (found.name, found.revision, found.error) == ("pythia-70m", "step1000", "")
    assert found.identity == f"EleutherAI/pythia-70m@{COMMIT}"

    names = ["main", "step1000", "step16", "step0", "experiment-7b"]
    refs = SimpleNamespace(branches=[SimpleNamespace(name=n) for n in names])
    monkeypatch.setattr(huggingface_hub.HfApi, "list_repo_refs", lambda *_: refs)
    for step in ("step0", "step16"):
        hub[f"EleutherAI/pythia-70m@{step}"] = tmp_path / "model"
    assert [t.revision for t in suite(["pythia-70m"], "all")] == ["step0", "step16", "step1000"]

    options = ["--checkpoints", "1000", "--max-tokens", "6", "--probes", "decomposition", "--workers", "0"]
    (tmp_path / "ids.jsonl").write_text('{"tokens": [3, 4, 3]}\n')
    line = ["report", "pythia-70m", *options, "--prompts", str(tmp_path / "ids.jsonl"), "--out", str(tmp_path / "out")]
    result = CliRunner().invoke(app, line)
    assert result.exit_code == 0, result.output
    assert (tmp_path / "out" / "pythia-70m-step1000" / "report.html").is_file()


def test_a_suite_without_a_network(cache: Path, tmp_path: Path) -> None:
    from ln_probe.batch.suite import suite

    write_repository(tmp_path / "model", tiny_pythia())
    put_in_cache(cache, "EleutherAI/pythia-70m", tmp_path / "model", "step1000")
    here, missing = suite(["pythia-70m"], "1000,2000")
    assert here.identity == f"EleutherAI/pythia-70m@{COMMIT}"
    assert "pythia-70m at revision 'step2000' is not on this machine, and the model hub" in missing.error
    (unlisted,) = suite(["pythia-70m"], "all")
    assert "cannot be listed" in unlisted.error
    assert "give them as --checkpoints 0,1000" in unlisted.error
