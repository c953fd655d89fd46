"""Hub names through a server on this machine that speaks as the hub does: loading, every way it can refuse, and the
README's line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hub_standin import Hub, serving
from huggingface_hub import constants

from ln_probe.analyses import progress
from ln_probe.loading import hub as hub_names
from ln_probe.models import load_model, source_of

WORDS = ["?", "<s>", "</s>", "the", "norm"]


def write(folder: Path, model: Any) -> Path:
    """A repository's files: weights, config, a tokenizer of five words."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    model.save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="?", bos_token="<s>", eos_token="</s>"
    ).save_pretrained(folder)
    return folder


def gpt2(**more: Any) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    shape = {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 64, "vocab_size": 50} | more
    return GPT2LMHeadModel(GPT2Config(**shape, bos_token_id=1, eos_token_id=2))


def pythia(seed: int, **more: Any) -> Any:
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    torch.manual_seed(seed)
    shape = {"hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 2, "intermediate_size": 128,
             "vocab_size": 50, "max_position_embeddings": 64, "rotary_pct": 0.25} | more  # fmt: skip
    return GPTNeoXForCausalLM(GPTNeoXConfig(**shape, bos_token_id=1, eos_token_id=2))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    home = tmp_path_factory.mktemp("repositories")
    made = {"gpt2": gpt2(), "main": pythia(0), "step1000": pythia(1)}
    return {name: write(home / name, model) for name, model in made.items()}


@pytest.fixture
def hub(folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with serving() as served:
        served.add("gpt2", {"main": folders["gpt2"]})
        served.add("EleutherAI/pythia-70m", {"main": folders["main"], "step1000": folders["step1000"]})
        monkeypatch.setattr(constants, "ENDPOINT", served.endpoint)
        template = served.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 0.5)
        yield served


def test_a_name_is_downloaded_once_and_is_the_model(hub: Hub, folders: dict[str, Path]) -> None:
    from transformers import GPT2LMHeadModel

    model: Any = load_model("gpt2", device="cpu")
    source = source_of(model)
    assert (source.kind, source.commit) == ("hub", hub.commit("gpt2", "main"))
    tokens = torch.arange(3, 30)[None]
    with torch.no_grad():
        original = GPT2LMHeadModel.from_pretrained(folders["gpt2"]).eval()(tokens).logits
        assert float((model(tokens, return_type="logits") - original).abs().max()) < 1e-5
    fetched = {line.rsplit("/", 1)[1] for line in hub.asked if line.startswith("GET /gpt2/resolve")}
    assert "model.safetensors" in fetched
    assert not fetched & {"README.md", "decoder_model.onnx", ".gitattributes"}
    before = len(hub.asked)
    load_model("gpt2", device="cpu")
    assert not [line for line in hub.asked[before:] if line.startswith("GET /gpt2/resolve")]


def test_a_training_step_is_its_own_revision(hub: Hub) -> None:
    commit = hub.commit("EleutherAI/pythia-70m", "step1000")
    late, early, same = (load_model("pythia-70m", device="cpu", revision=r) for r in (None, "1000", commit))
    assert source_of(early).commit == source_of(same).commit == commit
    assert source_of(same).weights_sha256 == source_of(early).weights_sha256
    assert source_of(late).weights_sha256 != source_of(early).weights_sha256
    assert hub_names.checkpoints("EleutherAI/pythia-70m") == ["step1000"]


GATED = (
    r"^gpt2 asks for an agreement before it can be downloaded: accept it on the model's page, log in \(hf auth login"
)
PAGE = r"^http://127.* answered a request for gpt2 with a web page instead of data: .* Open that address in a browser"


@pytest.mark.parametrize(
    ("fault", "error", "message"),
    [
        ("gated", ValueError, GATED),
        ("gated file", ValueError, GATED),
        (
            "500",
            ConnectionError,
            r"^gpt2 is not on this machine, and the model hub \(http://127.*\) cannot be reached \(.*500",
        ),
        pytest.param(
            "500 file",
            ConnectionError,
            r"^the download of gpt2 stopped: http://127.* failed with status 500\. Try again in",
            marks=pytest.mark.slow,  # it is tried again for twenty seconds
        ),
        ("portal", ConnectionError, PAGE),
        ("portal file", ConnectionError, PAGE),
        pytest.param(
            "stall",
            ConnectionError,
            r"^the download of gpt2 stopped: http://127.* sent nothing any more\. Try again",
            marks=pytest.mark.slow,
        ),
        ("lost", ConnectionError, r"^gpt2 lists a file that http://127.* does not have .*: try again later, or choose"),
        (
            "corrupt",
            ConnectionError,
            r"^model\.safetensors of gpt2 was damaged on its way: its SHA-256 is .* deleted: try",
        ),
    ],
)
def test_b08_what_can_go_wrong_is_said_in_a_sentence(
    hub: Hub, fault: str, error: type[Exception], message: str
) -> None:
    hub.fault["gpt2"] = fault
    started = time.monotonic()
    with pytest.raises(error, match=message):
        hub_names.fetch("gpt2", revision=None, allow_pickle=False)
    assert time.monotonic() - started < 60, "a fault of the hub must not look like a hang"


def test_b08_after_damage_the_next_try_downloads_again(hub: Hub) -> None:
    hub.fault["gpt2"] = "corrupt"
    with pytest.raises(ConnectionError, match="was damaged on its way"):
        hub_names.fetch("gpt2", revision=None, allow_pickle=False)
    del hub.fault["gpt2"]
    snapshot = hub_names.fetch("gpt2", revision=None, allow_pickle=False)
    assert (snapshot.folder / "model.safetensors").read_bytes() == hub.held["gpt2"]["main"]["model.safetensors"]


def test_an_unknown_repository_and_an_unknown_revision(hub: Hub) -> None:
    with pytest.raises(ValueError, match="No model is called 'owner/nothing'"):
        hub_names.fetch("owner/nothing", revision=None, allow_pickle=False)
    with pytest.raises(ValueError, match=r"gpt2 has no revision 'v9'\. Give a branch, a tag or a commit"):
        hub_names.fetch("gpt2", revision="v9", allow_pickle=False)


def test_a_copy_that_is_here_is_used_when_the_hub_fails(hub: Hub) -> None:
    first = hub_names.fetch("gpt2", revision=None, allow_pickle=False)
    for fault in ("500", "portal"):
        hub.fault["gpt2"] = fault
        again = hub_names.fetch("gpt2", revision=None, allow_pickle=False)
        assert again.folder == first.folder
        assert again.notes == ("the model hub could not be reached: the local copy was used",)


def test_bytes_are_told_while_they_come(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[progress.Progress] = []
    monkeypatch.setattr(hub_names, "tell", lambda *args: told.append(progress.Progress(*args)))
    hub_names.fetch("gpt2", revision=None, allow_pickle=False)
    total = sum(len(d) for n, d in hub.held["gpt2"]["main"].items() if n.endswith((".json", ".safetensors", ".txt")))
    assert told[0].what.startswith("gpt2: asking ")
    assert str(told[1]) == f"gpt2: downloading: 0 MB of {total / 1e6:.0f} MB"


def test_a_model_is_described_from_its_config_alone(hub: Hub) -> None:
    found = hub_names.describe("gpt2", revision=None)
    assert found.config["n_layer"] == 2
    assert found.weight_bytes == len(hub.held["gpt2"]["main"]["model.safetensors"])
    assert not [line for line in hub.asked if line.endswith(".safetensors")]


def test_c11_plan_knows_a_model_on_the_hub(hub: Hub, tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from ln_probe.cli import app

    done = CliRunner().invoke(app, ["plan", "gpt2", "--json", "--max-tokens", "16", "--out", str(tmp_path / "o")])
    assert done.exit_code == 0, done.output
    (row,) = json.loads(done.stdout)["models"]
    weights = len(hub.held["gpt2"]["main"]["model.safetensors"])
    assert row["seconds"] > 0
    assert row["memory_bytes"] > 3 * weights
    assert not [line for line in hub.asked if line.endswith(".safetensors")]


@pytest.mark.slow
def test_the_readmes_line(folders: dict[str, Path], tmp_path: Path) -> None:
    """`ln-probe report gpt2 pythia-70m` as a process of its own, without a terminal: signs of life, and two reports."""
    with serving() as served:
        served.add("gpt2", {"main": folders["gpt2"]})
        served.add("EleutherAI/pythia-70m", {"main": folders["main"]})
        environment = os.environ | {
            "HF_ENDPOINT": served.endpoint,
            "HF_HOME": str(tmp_path / "home"),
            "HF_HUB_OFFLINE": "0",
        }
        environment.pop("HF_HUB_CACHE", None)
        begun = time.monotonic()
        process = subprocess.Popen(
            [
                sys.executable,
                "-c",
                "from ln_probe.cli import app; app()",
                "report",
                "gpt2",
                "pythia-70m",
                "--out",
                str(tmp_path / "reports"),
                "--max-tokens",
                "32",
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
        )
        assert process.stdout is not None
        lines = [(time.monotonic() - begun, line) for line in process.stdout]
        assert process.wait() == 0, lines
    assert "looking for gpt2, pythia-70m" in lines[0][1]
    assert lines[-1][1].strip().endswith("index.html: 2 of 2 models")
    for name in ("gpt2", "pythia-70m"):
        provenance = json.loads((tmp_path / "reports" / name / "report.json").read_text())["provenance"]
        assert provenance["model"]["kind"] == "hub"
