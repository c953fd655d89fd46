"""Hub names: through a server on this machine that speaks as the hub does, from the cache, and with the network cut."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from architectures import cases
from faulty import word_tokenizer
from hub_standin import Hub, reached, serving
from huggingface_hub import constants
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, GPTNeoXConfig, GPTNeoXForCausalLM
from typer.testing import CliRunner

from ln_probe.analyses import progress
from ln_probe.batch.suite import suite
from ln_probe.cli import app
from ln_probe.loading import hub as hub_names
from ln_probe.loading.convert import has_hooked_transformer
from ln_probe.models import load_model, source_of

DEFAULT_WORLD = "HookedTransformer" if has_hooked_transformer() else "TransformerBridge"
PYTHIA = "EleutherAI/pythia-70m"
TOKENS = torch.arange(3, 30)[None]
USED = "the model hub could not be reached: the local copy was used"


def gpt2() -> Any:
    # n_ctx stands in the real gpt2's config.json; newer versions of transformers do not write it.
    return GPT2LMHeadModel(
        GPT2Config(n_embd=32, n_head=4, n_layer=2, n_positions=64, vocab_size=50, n_ctx=64, bos_token_id=1)
    )


def pythia() -> Any:
    shape = {"hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 2, "intermediate_size": 128,
             "vocab_size": 50, "max_position_embeddings": 64, "rotary_pct": 0.25}  # fmt: skip
    return GPTNeoXForCausalLM(GPTNeoXConfig(**shape, bos_token_id=1, eos_token_id=2))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A repository's files for each model: weights, config, a tokenizer of five words; `pickled`: weights of old."""
    home = tmp_path_factory.mktemp("repositories")
    torch.manual_seed(0)
    for name, made in {"gpt2": gpt2(), "main": pythia(), "step1000": pythia(), "pickled": gpt2()}.items():
        made.save_pretrained(home / name)
        word_tokenizer(["?", "<s>", "</s>", "the", "norm"]).save_pretrained(home / name)
        if name == "pickled":
            (home / name / "model.safetensors").unlink()
            torch.save(made.state_dict(), home / name / "pytorch_model.bin")
    return {path.name: path for path in home.iterdir()}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty download cache."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def hub(folders: dict[str, Path], cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with reached(cache, monkeypatch) as served:
        served.add("gpt2", {"main": folders["gpt2"]})
        served.add(PYTHIA, {"main": folders["main"], "step1000": folders["step1000"]})
        monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 0.5)
        yield served


@pytest.fixture
def no_route(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No way out of this machine, and nothing in the cache."""

    def fail(*_: object, **__: object) -> None:
        raise socket.gaierror(-3, "Temporary failure in name resolution")

    monkeypatch.setattr(socket, "getaddrinfo", fail)
    monkeypatch.setattr(socket.socket, "connect", fail)


def fetch(name: str = "gpt2", revision: str | None = None) -> hub_names.HubSnapshot:
    return hub_names.fetch(name, revision=revision, allow_pickle=False)


# ------------------------------------------------------------------------------------------------------- downloads


def test_a_name_is_downloaded_once_and_is_the_model(hub: Hub, folders: dict[str, Path]) -> None:
    model: Any = load_model("gpt2", device="cpu")
    source = source_of(model)
    assert (source.name, source.kind, source.world) == ("gpt2", "hub", DEFAULT_WORLD)
    assert (source.revision, source.commit) == (None, hub.commit("gpt2", "main"))
    assert source.logits_max_difference < 1e-5
    assert model.to_tokens("the norm", prepend_bos=False).tolist()[0][-2:] == [3, 4]
    fetched = {line.rsplit("/", 1)[1] for line in hub.asked if line.startswith("GET /gpt2/resolve")}
    assert "model.safetensors" in fetched
    assert not fetched & {"README.md", "decoder_model.onnx", ".gitattributes"}
    before = len(hub.asked)
    load_model("GPT2-small", device="cpu")
    assert not [line for line in hub.asked[before:] if line.startswith("GET /gpt2/resolve")]


@pytest.mark.parametrize("world", cases(None, slow=["bridge"]))
def test_a_training_step_is_its_own_revision(world: Any, hub: Hub, folders: dict[str, Path]) -> None:
    commit = hub.commit(PYTHIA, "step1000")
    late, early, same = (
        load_model("pythia-70m", device="cpu", world=world, revision=r) for r in (None, "1000", commit)
    )
    source = source_of(early)
    assert (source.revision, source.commit) == ("step1000", commit) != (None, source_of(late).commit)
    assert source.world == ("TransformerBridge" if world else DEFAULT_WORLD)
    assert source_of(same).weights_sha256 == source.weights_sha256 != source_of(late).weights_sha256
    with torch.no_grad():
        original = AutoModelForCausalLM.from_pretrained(folders["step1000"]).eval()(TOKENS).logits
        assert float((early(TOKENS, return_type="logits") - original).abs().max()) < 1e-5  # type: ignore[operator]
    assert hub_names.checkpoints(PYTHIA) == ["step1000"]


def test_a_repository_that_transformer_lens_does_not_list(hub: Hub, folders: dict[str, Path]) -> None:
    hub.add("someone/their-gpt2", {"main": folders["gpt2"]})
    source = source_of(load_model("someone/their-gpt2", device="cpu"))
    assert (source.world, source.architecture) == (DEFAULT_WORLD, "GPT2LMHeadModel")


def test_a_repository_with_pickles_or_without_weights(hub: Hub, folders: dict[str, Path]) -> None:
    hub.add("facebook/opt-125m", {"main": folders["pickled"]})
    expected = r"facebook/opt-125m holds its weights only as a pickle\. .* allow_pickle=True"
    with pytest.raises(ValueError, match=expected):
        load_model("opt-125m", device="cpu")
    assert source_of(load_model("opt-125m", device="cpu", allow_pickle=True, world="bridge")).weights_sha256
    del hub.held["facebook/opt-125m"]["main"]["pytorch_model.bin"]
    with pytest.raises(ValueError, match=r"opt-125m has no weights that can be read here: looked for .*, found .*conf"):
        load_model("opt-125m", device="cpu")


def test_bytes_are_told_while_they_come(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[progress.Progress] = []
    monkeypatch.setattr(hub_names, "tell", lambda *args: told.append(progress.Progress(*args)))
    fetch()
    total = sum(len(d) for n, d in hub.held["gpt2"]["main"].items() if n.endswith((".json", ".safetensors", ".txt")))
    assert told[0].what.startswith("gpt2: asking ")
    assert str(told[1]) == f"gpt2: downloading: 0 MB of {total / 1e6:.0f} MB"


def test_c11_a_model_is_planned_from_its_config_alone(hub: Hub, tmp_path: Path) -> None:
    found = hub_names.describe("gpt2", revision=None)
    assert found.config["n_layer"] == 2
    assert found.weight_bytes == len(hub.held["gpt2"]["main"]["model.safetensors"])
    done = CliRunner().invoke(app, ["plan", "gpt2", "--json", "--max-tokens", "16", "--out", str(tmp_path / "o")])
    assert done.exit_code == 0, done.output
    (row,) = json.loads(done.stdout)["models"]
    assert row["seconds"] > 0
    assert row["memory_bytes"] > 2 * found.weight_bytes
    assert not [line for line in hub.asked if line.endswith(".safetensors")]


# --------------------------------------------------------------------------------------------------- what goes wrong

GATED = (
    r"^gpt2 asks for an agreement before it can be downloaded: accept it on the model's page, log in \(hf auth login"
)
PAGE = r"^http://127.* answered a request for gpt2 with a web page instead of data: .* Open that address in a browser"
STOPPED = r"^the download of gpt2 stopped: http://127.* "
AWAY = r"^gpt2 is not on this machine, and the model hub \(http://127.*\) cannot be reached \(.*500"
SLOW = pytest.mark.slow  # it is tried again for twenty seconds


@pytest.mark.parametrize(("fault", "error", "message"), [
    ("gated", ValueError, GATED),
    ("gated file", ValueError, GATED),
    ("500", ConnectionError, AWAY),
    pytest.param("500 file", ConnectionError, STOPPED + r"failed with status 500\. Try again in", marks=SLOW),
    ("portal", ConnectionError, PAGE),
    ("portal file", ConnectionError, PAGE),
    pytest.param("stall", ConnectionError, STOPPED + r"sent nothing any more\. Try again", marks=SLOW),
    ("lost", ConnectionError, r"^gpt2 lists a file that http://127.* does not have .*: try again later, or choose"),
    ("corrupt", ConnectionError, r"^model\.safetensors of gpt2 was damaged on its way: its SHA-256 is .* deleted: try"),
])  # fmt: skip
def test_b08_what_can_go_wrong_is_said_in_a_sentence(
    hub: Hub, fault: str, error: type[Exception], message: str
) -> None:
    hub.fault["gpt2"] = fault
    started = time.monotonic()
    with pytest.raises(error, match=message):
        fetch()
    assert time.monotonic() - started < 60, "a fault of the hub must not look like a hang"
    del hub.fault["gpt2"]
    assert (fetch().folder / "model.safetensors").read_bytes() == hub.held["gpt2"]["main"]["model.safetensors"]


def test_a_download_that_breaks_off(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: object, **__: object) -> None:
        raise OSError("connection reset")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", stop)
    with pytest.raises(ConnectionError, match=r"the download of gpt2 stopped \(OSError: connection reset\)\. Try"):
        load_model("gpt2", device="cpu")


def test_an_unknown_repository_and_an_unknown_revision(hub: Hub) -> None:
    with pytest.raises(ValueError, match="No model is called 'owner/nothing'"):
        fetch("owner/nothing")
    with pytest.raises(ValueError, match=r"gpt2 has no revision 'v9'\. Give a branch, a tag or a commit"):
        fetch("gpt2", "v9")
    with pytest.raises(ValueError, match=r"no revision 'nope'\. Pythia's training checkpoints are step0, .*step143000"):
        fetch(PYTHIA, "nope")


def test_a_copy_that_is_here_is_used_when_the_hub_fails(hub: Hub) -> None:
    first = fetch()
    for fault in ("500", "portal"):
        hub.fault["gpt2"] = fault
        again = fetch()
        assert (again.folder, again.commit, again.notes) == (first.folder, first.commit, (USED,))
    assert USED in source_of(load_model("gpt2", device="cpu")).notes


def test_no_network_and_no_copy_says_so_quickly(no_route: None) -> None:
    started = time.monotonic()
    expected = (
        r"gpt2 is not on this machine, and the model hub \(https://huggingface\.co\) cannot be reached "
        r"\(.*\)\. Give the path of a local folder"
    )
    with pytest.raises(ConnectionError, match=expected):
        load_model("gpt2", device="cpu")
    assert time.monotonic() - started < 10  # TransformerLens alone retries for 23 s


def test_offline_mode_is_named(no_route: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ConnectionError, match=r"pythia-70m at revision 'step1000' .* \(offline mode is on\)"):
        load_model("pythia-70m", revision="1000", device="cpu")
    assert constants.HF_HUB_OFFLINE is True


@pytest.mark.parametrize(("name", "said"), [
    ("pythia-70n", r"No model is called 'pythia-70n'\. Nearest known names: .*pythia-70m"),
    ("qqqqqqqq", r"No model is called 'qqqqqqqq'\. A model is a name on the model hub"),
    ("gelu-1l", r"gelu-1l \(NeelNanda/.*\) is stored in TransformerLens's own older format"),
])  # fmt: skip
def test_names_that_cannot_be_loaded(name: str, said: str, no_route: None) -> None:
    with pytest.raises(ValueError, match=said):
        load_model(name)


def test_a_folder_of_a_known_name_counts_only_if_it_holds_a_model(
    no_route: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gpt2").mkdir()
    with pytest.raises(ConnectionError):
        load_model("gpt2", device="cpu")
    gpt2().save_pretrained(tmp_path / "gpt2")
    assert source_of(load_model("gpt2", device="cpu")).kind == "folder"


def test_names_and_revisions() -> None:
    assert hub_names.known_hub_names()["pythia-70m"] == hub_names.official_name("PYTHIA-70M") == PYTHIA
    assert hub_names.official_name("owner/model.v2") == "owner/model.v2"
    for repository, given, revision in (
        (PYTHIA, "1000", "step1000"),
        ("stanford-crfm/alias-gpt2-small-x21", "400", "checkpoint-400"),
        ("gpt2", "1000", "1000"),
        (PYTHIA, None, None),
    ):
        assert hub_names.hub_revision(repository, given) == revision


# --------------------------------------------------------------------------------------------------- several at once


def test_suites_of_training_checkpoints(hub: Hub, folders: dict[str, Path], tmp_path: Path) -> None:
    """`--checkpoints` on hub names: steps become revisions, 'all' asks the hub, and a report is made of each."""
    (found,) = suite(["pythia-70m"], "1000")
    assert (found.name, found.revision, found.error) == ("pythia-70m", "step1000", "")
    assert found.identity == f"{PYTHIA}@{hub.commit(PYTHIA, 'step1000')}"
    hub.add(PYTHIA, dict.fromkeys(["main", "step1000", "step16", "step0", "experiment-7b"], folders["step1000"]))
    assert [t.revision for t in suite(["pythia-70m"], "all")] == ["step0", "step16", "step1000"]
    options = ["--checkpoints", "1000", "--max-tokens", "6", "--probes", "decomposition", "--workers", "0"]
    (tmp_path / "ids.jsonl").write_text('{"tokens": [3, 4, 3]}\n')
    line = ["report", "pythia-70m", *options, "--prompts", str(tmp_path / "ids.jsonl"), "--out", str(tmp_path / "out")]
    result = CliRunner().invoke(app, line)
    assert result.exit_code == 0, result.output
    assert (tmp_path / "out" / "pythia-70m-step1000" / "report.html").is_file()


def test_a_suite_when_the_hub_fails(hub: Hub) -> None:
    fetch(PYTHIA, "step1000")
    hub.fault[PYTHIA] = "500"
    here, missing = suite(["pythia-70m"], "1000,2000")
    assert here.identity == f"{PYTHIA}@{hub.commit(PYTHIA, 'step1000')}"
    assert "pythia-70m at revision 'step2000' is not on this machine, and the model hub" in missing.error
    (unlisted,) = suite(["pythia-70m"], "all")
    assert "cannot be listed" in unlisted.error
    assert "give them as --checkpoints 0,1000" in unlisted.error


@pytest.mark.slow
def test_the_readmes_line(folders: dict[str, Path], tmp_path: Path) -> None:
    """`ln-probe report gpt2 pythia-70m` as a process of its own, without a terminal: signs of life, and two reports."""
    with serving() as served:
        served.add("gpt2", {"main": folders["gpt2"]})
        served.add(PYTHIA, {"main": folders["main"]})
        environment = os.environ | {"HF_ENDPOINT": served.endpoint, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0"}
        environment.pop("HF_HUB_CACHE", None)
        line = ["report", "gpt2", "pythia-70m", "--max-tokens", "32", "--out", str(tmp_path / "reports")]
        done = subprocess.run(
            [sys.executable, "-m", "ln_probe", *line],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
        )
    assert done.returncode == 0, done.stdout
    lines = done.stdout.splitlines()
    assert "looking for gpt2, pythia-70m" in lines[0]
    assert lines[-1].strip().endswith("index.html: 2 of 2 models")
    for name in ("gpt2", "pythia-70m"):
        provenance = json.loads((tmp_path / "reports" / name / "report.json").read_text())["provenance"]
        assert provenance["model"]["kind"] == "hub"
