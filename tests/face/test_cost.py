"""What a plan says of memory and time: by the format that weights are loaded in, whatever they have on disk."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import hugging_face
from faulty import command, ends, lab_model
from safetensors.torch import load_file

from ln_probe.batch import cost
from ln_probe.batch.run import Run
from ln_probe.batch.shards import ShardedCorpus
from ln_probe.batch.suite import Target, suite
from ln_probe.loading.hub import Description
from ln_probe.settings import Settings


def planned(model: object, *options: object) -> dict[str, Any]:
    printed, _ = ends(0, command, "plan", model, "--json", "--quiet", *options)
    found: dict[str, Any] = json.loads(printed)["models"][0]
    return found


def weights_of(row: dict[str, Any], folder: Path) -> float:
    """Bytes of the weights in memory, by which a small model's differs from that of no weights at all; W_U stands in
    the file once for both ends."""
    words = json.loads((folder / "config.json").read_text())["vocab_size"]
    found: float = row["memory_bytes"] - cost._WORKER_BYTES - cost._MEASURING_BYTES - 8 * cost.TOKENS_AT_ONCE * words
    return found


def test_a14_a_bfloat16_folder_is_loaded_in_float32(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    hugging_face("gpt2").to(torch.bfloat16).save_pretrained(folder)
    numbers = sum(t.numel() for t in load_file(folder / "model.safetensors").values())
    assert abs((folder / "model.safetensors").stat().st_size - 2 * numbers) < 20_000  # its header
    config = json.loads((folder / "config.json").read_text())
    held = numbers + config["vocab_size"] * config["n_embd"]
    by_default = planned(folder)
    assert weights_of(by_default, folder) == 4 * held
    for dtype, size in (("float32", 4), ("bfloat16", 2), ("float64", 8)):
        assert weights_of(planned(folder, "--dtype", dtype), folder) == size * held
    hugging_face("gpt2").save_pretrained(tmp_path / "wide")
    for what in ("memory_bytes", "seconds"):
        assert planned(tmp_path / "wide")[what] == pytest.approx(by_default[what]), "the same model, in another format"


def test_a14_every_kind_of_folder_is_counted(tmp_path: Path) -> None:
    model = hugging_face("gpt2")
    model.save_pretrained(tmp_path / "parts", max_shard_size="40KB")
    assert (tmp_path / "parts" / "model.safetensors.index.json").exists()
    files = sorted((tmp_path / "parts").glob("*.safetensors"))
    numbers = sum(t.numel() for file in files for t in load_file(file).values())
    (parts,) = suite([str(tmp_path / "parts")])
    assert parts.parameters == numbers
    pickled = tmp_path / "pickled"
    pickled.mkdir()
    shutil.copy(tmp_path / "parts" / "config.json", pickled)
    torch.save({k: v.clone() for k, v in model.state_dict().items()}, pickled / "pytorch_model.bin")
    (target,) = suite([str(pickled)], allow_pickle=True)
    assert numbers < target.parameters < 2 * numbers + 20_000  # a pickle keeps tied weights, and a header of its own
    (lab,) = suite([str(lab_model(tmp_path / "lab"))])
    assert lab.parameters == sum(t.numel() for t in load_file(tmp_path / "lab" / "model.safetensors").values())


@pytest.mark.parametrize(("dtype", "gigabytes"), [(None, 32), ("bfloat16", 16), ("float64", 64)])
def test_a14_a_model_on_the_hub(dtype: str | None, gigabytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Llama-3-8B is 16 GB on the hub; loaded in float32 it is twice as much, and so many workers fewer have room."""
    about = Description({"torch_dtype": "bfloat16", "num_hidden_layers": 32}, 16 * 10**9)
    monkeypatch.setattr(cost, "hub_info", lambda target: about)
    target = Target("meta-llama/Meta-Llama-3-8B", None, "llama", "repository@commit")
    corpus = ShardedCorpus("p.jsonl", "p.jsonl", 64, "0" * 64, 1)
    run = Run(Path("out"), Settings(probes=("uniformity",)), corpus, dtype=dtype)
    found = cost.cost(run, target, [10.0])
    copies = cost._COPIES[gigabytes // 8]
    assert found.memory_bytes == pytest.approx(cost._WORKER_BYTES + copies * gigabytes * 10**9)
    monkeypatch.setattr(cost, "_room", lambda: 200e9)
    monkeypatch.setattr("ln_probe.analyses.geometry.compiled.available", lambda: 64)
    workers = cost.default_workers(run, [target])
    assert workers == {32: 2, 16: 3, 64: 1}[gigabytes]
    assert workers * found.memory_bytes <= 200e9


def test_workers_of_a_container_have_its_memory(tmp_path: Path) -> None:
    whole = cost._room(tmp_path / "there is none")
    for limit, room in (("max", whole), (str(3 * 2**30), 2.0 * 2**30)):
        (tmp_path / "memory.max").write_text(f"{limit}\n")
        (tmp_path / "memory.current").write_text(f"{2**30}\n")
        assert cost._room(tmp_path) == pytest.approx(room, rel=0.2)


def test_one_worker_calibrates_and_reports() -> None:
    """Of one checkpoint two workers take only the rest in turn; of two, everything."""
    one = cost.Cost(1, 1.0, seconds=100.0, serial_seconds=40.0, memory_bytes=0.0, disk_bytes=0.0)
    assert cost._wall([one], 1) == 100
    assert cost._wall([one], 2) == 70
    assert cost._wall([one, one], 2) == 100


def test_a14_what_nobody_knows() -> None:
    corpus = ShardedCorpus("p.jsonl", "p.jsonl", 2, "0" * 64, 1)
    run = Run(Path("out"), Settings(probes=("decomposition",)), corpus)
    found = cost.cost(run, Target("./nowhere", None, "nowhere", error="it is not there"), [10.0])
    assert found.memory_bytes != found.memory_bytes  # NaN
