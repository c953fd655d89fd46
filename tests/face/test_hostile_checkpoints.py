"""More than 400 damaged and hostile checkpoints: refused in words within seconds, or loaded as what they are."""

from __future__ import annotations

import json
import pickle
import random
import shutil
import struct
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from faulty import lab_model
from safetensors.torch import load_file

import ln_probe
from ln_probe.loading.provenance import hashes, sha256_of_hashes
from ln_probe.models import source_of

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_network")]

SECONDS = 10  # of the processor, for one refusal
Case = tuple[str, Callable[[Path], Path]]  # what it is, and what makes it of a sound folder: the model's path


class Payload:
    def __init__(self, marker: str) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (self.marker, "w")


def bytes_changed(name: str, seed: int) -> Callable[[Path], Path]:
    """Some bytes of a file, most near its beginning, are other ones; or it ends early, or goes on."""

    def change(folder: Path) -> Path:
        generator = random.Random(seed)
        content = bytearray((folder / name).read_bytes())
        way = seed % 5
        if way == 0:
            content = content[: generator.randrange(len(content))]
        elif way == 1:
            content += generator.randbytes(generator.randrange(1, 400))
        else:
            for _ in range(way):
                near = min(len(content), 2500) if generator.random() < 0.8 else len(content)
                content[generator.randrange(near)] = generator.randrange(256)
        (folder / name).write_bytes(content)
        return folder

    return change


VALUES: list[Any] = [
    None, True, -1, 0, 3, 2**31, 10**9, 4 * 10**9, 10**400, 1.5, 1e308, "", "x" * 100_000, "__import__('os')", [], [[]],
    {}, {"a": {"b": 1}}, [1] * 1000, "../../../etc/passwd", "\ud800", "\x00",
]  # fmt: skip


def value_changed(key: str, value: Any) -> Callable[[Path], Path]:
    """A value of config.json is something else."""

    def change(folder: Path) -> Path:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
        return folder

    return change


def header_changed(seed: int) -> Callable[[Path], Path]:
    """A safetensors header that says other offsets, shapes and types than there are."""

    def change(folder: Path) -> Path:
        generator = random.Random(seed)
        path = folder / "model.safetensors"
        content = path.read_bytes()
        length = struct.unpack("<Q", content[:8])[0]
        header = json.loads(content[8 : 8 + length])
        name = generator.choice([n for n in header if n != "__metadata__"])
        entry = header[name]
        odd = generator.choice([-1, 0, 2**31, 2**62, 10**30])
        what = seed % 5
        if what == 0:
            entry["data_offsets"][generator.randrange(2)] = odd
        elif what == 1:
            entry["shape"] = [odd] * generator.randrange(1, 9)
        elif what == 2:
            entry["dtype"] = generator.choice(["F64", "I8", "BOOL", "F8_E4M3", "XX"])
        elif what == 3:
            header[name + "\ud800"[: seed % 2] + "'" * 100] = header.pop(name)
        else:
            header["__metadata__"] = {"format": generator.choice(["tf", "flax", "", "x" * 10_000])}
        made = json.dumps(header).encode()
        path.write_bytes(struct.pack("<Q", len(made)) + made + content[8 + length :])
        return folder

    return change


def pickled(seed: int, marker: Path) -> Callable[[Path], Path]:
    """Pickles that hold, or begin with, or end in something that runs."""

    def change(folder: Path) -> Path:
        state: dict[str, Any] = load_file(folder / "model.safetensors")
        (folder / "model.safetensors").unlink()
        path = folder / "pytorch_model.bin"
        way = seed % 4
        if way == 0:
            path.write_bytes(pickle.dumps(Payload(str(marker)), protocol=seed % 5))
        elif way == 1:
            torch.save({**state, "more": Payload(str(marker))}, path)
        elif way == 2:
            torch.save(state, path)
            content = bytearray(path.read_bytes())
            content[random.Random(seed).randrange(len(content))] ^= 0xFF
            path.write_bytes(content)
        else:
            torch.save(state, path, _use_new_zipfile_serialization=False)
            path.write_bytes(pickle.dumps(Payload(str(marker))) + path.read_bytes())
        return folder

    return change


def gguf_of(seed: int) -> Callable[[Path], Path]:
    """A GGUF header of random counts, types and values."""

    def change(folder: Path) -> Path:
        generator = random.Random(seed)
        count = generator.choice([0, 1, 2, 5, 2**40, 2**63])
        made = b"GGUF" + struct.pack(
            "<IQQ", generator.choice([1, 2, 3, 3, 3, 9]), generator.choice([0, 1, 2**40]), count
        )
        for _ in range(min(count, 5)):
            name = generator.choice(["general.architecture", "llama.block_count", "llama.embedding_length", "x"])
            made += struct.pack("<Q", len(name)) + name.encode() + struct.pack("<I", generator.randrange(14))
            made += generator.randbytes(generator.randrange(1, 40))
        (folder / "m.gguf").write_bytes(made)
        return folder / "m.gguf"

    return change


def cases(marker: Path) -> Iterator[Case]:
    for seed in range(110):
        yield "bytes of model.safetensors", bytes_changed("model.safetensors", seed)
    for seed in range(60):
        yield "safetensors header", header_changed(seed)
    for seed in range(40):
        yield "bytes of config.json", bytes_changed("config.json", seed)
    keys = (
        "n_layer",
        "n_head",
        "n_embd",
        "vocab_size",
        "architectures",
        "model_type",
        "eos_token_id",
        "activation_function",
    )
    for number, value in enumerate(VALUES):
        for key in keys[number % 2 :: 2]:
            yield f"config.json: {key}", value_changed(key, value)
    for key in ("auto_map", "transformers_weights", "quantization_config", "torch_dtype", "num_labels", "id2label"):
        for value in VALUES[5:16:2]:
            yield f"config.json: {key}", value_changed(key, value)
    for seed in range(40):
        yield "pickle", pickled(seed, marker)
    for seed in range(60):
        yield "gguf", gguf_of(seed)


def attempt(make: Callable[[Path], Path], folder: Path) -> str:
    """Load it; "loaded", "refused", or what went wrong."""
    path = make(folder)
    start = time.process_time()
    try:
        model = ln_probe.load_model(path, device="cpu", allow_pickle=True)
    except (ValueError, FileNotFoundError) as error:
        outcome = "refused" if len(str(error)) > 20 else f"refused with {str(error)!r}"
    except Exception as error:
        outcome = f"{type(error).__name__}: {error}"
    else:
        weights = [p for p in (folder / "model.safetensors", folder / "pytorch_model.bin") if p.is_file()]
        outcome = (
            "loaded" if source_of(model).weights_sha256 == sha256_of_hashes(hashes(weights)) else "of another hash"
        )
    took = time.process_time() - start
    return outcome if took < SECONDS else f"{outcome} after {took:.0f} s"


def test_hostile_checkpoints(folder: Path, tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    counted: dict[str, Counter[str]] = {}
    wrong, number = [], 0
    for number, (what, make) in enumerate(cases(marker), start=1):
        case = Path(shutil.copytree(folder, tmp_path / "case"))
        outcome = attempt(make, case)
        shutil.rmtree(case)
        counted.setdefault(what.partition(":")[0], Counter())[
            outcome if outcome in ("loaded", "refused") else "wrong"
        ] += 1
        if outcome not in ("loaded", "refused") or marker.exists():
            wrong.append(f"{number} {what}: {outcome}{', and something ran' if marker.exists() else ''}")
            marker.unlink(missing_ok=True)
    print(f"\n{number} checkpoints: { ({k: dict(v) for k, v in counted.items()}) }")
    assert wrong == []
    assert number >= 400
    assert sum(c["refused"] for c in counted.values()) > number / 2


def test_hostile_lab_runs(tmp_path: Path) -> None:
    run = lab_model(tmp_path / "run")
    config = json.loads((run / "lab.json").read_text())["model"]
    wrong = []
    for key in config:
        for value in VALUES:
            (run / "lab.json").write_text(json.dumps({"model": config | {key: value}}))
            for sealed in (True, False):
                if not sealed:
                    shutil.copy(run / "model.safetensors", tmp_path / "kept")
                    from safetensors.torch import save_file

                    save_file(load_file(run / "model.safetensors"), run / "model.safetensors")
                start = time.process_time()
                try:
                    ln_probe.load_model(run)
                except ValueError:
                    pass
                except Exception as error:
                    wrong.append(f"{key} = {str(value)[:30]!r}: {type(error).__name__}: {error}")
                else:
                    if sealed and config[key] != value:
                        wrong.append(f"{key} = {str(value)[:30]!r} is taken for what was trained")
                if time.process_time() - start > SECONDS:
                    wrong.append(f"{key} = {str(value)[:30]!r} takes too long")
            shutil.copy(tmp_path / "kept", run / "model.safetensors")
    assert wrong == []
