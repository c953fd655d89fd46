"""What the tests of faults share: a tiny model on disk, a report of it, and disturbances between two work units."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from ln_probe.batch.worker import Worker
from ln_probe.cli import app

PROBES = "decomposition,uniformity"
ROWS = [[1, 5, 7, 3], [2, 2, 9, 11, 4], [8, 1, 6, 13, 0, 12]]


def command(*args: object) -> tuple[int, str, str]:
    """Exit status, output and errors; what a user would see as a traceback is raised."""
    result = CliRunner().invoke(app, list(map(str, args)))
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


def report(*args: object) -> tuple[int, str, str]:
    return command("report", "--workers", 0, "--quiet", "--probes", PROBES, *args)


def write_prompts(path: Path, rows: list[list[int]] = ROWS) -> Path:
    path.write_text("".join(json.dumps({"tokens": row}) + "\n" for row in rows))
    return path


def lab_model(folder: Path, seed: int = 0) -> Path:
    """A lab run's folder with a model that was never trained."""
    from ln_probe.analyses.lab.run_folder import hashes_beside, save_model
    from ln_probe.analyses.lab.transformer import LabConfig, LabTransformer

    torch.manual_seed(seed)
    config = LabConfig(n_layers=1, d_model=8, n_heads=2, d_vocab=20, n_ctx=12)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "lab.json").write_text(json.dumps({"model": config.to_dict()}))
    save_model(LabTransformer(config), folder / "model.safetensors", about={"beside": hashes_beside(folder)})
    return folder


def plain_model(folder: Path, seed: int = 0) -> Path:
    """The same without any checksum inside: every change of its weights is another model, not damage."""
    from ln_probe.analyses.lab.run_folder import load_tensors

    tensors, _ = load_tensors(lab_model(folder, seed) / "model.safetensors")
    save_file(tensors, folder / "model.safetensors")
    return folder


def tables(out: Path) -> dict[str, bytes]:
    """The tables and what is kept for pictures of every report in a folder."""
    found = [*out.glob("*/*.parquet"), *out.glob("*/exhibits.npz")]
    return {str(p.relative_to(out)): p.read_bytes() for p in sorted(found)}


def hash_in(report: Path) -> str:
    """The model that a report says was measured."""
    return str(json.loads((report / "report.json").read_text())["provenance"]["model"]["inputs_sha256"])


def disturb(monkeypatch: Any, after: int, act: Callable[[Worker], None]) -> None:
    """Have `act` happen when `after` units have been done; it gets the worker, which it may make forget its model."""
    done = 0
    original = Worker.do

    def do(self: Worker, *job: Any) -> Any:
        nonlocal done
        outcome = original(self, *job)
        done += 1
        if done == after:
            act(self)
        return outcome

    monkeypatch.setattr(Worker, "do", do)


def without_pages(monkeypatch: Any) -> None:
    """Reports without their pages, which cost ten times what the tables of a tiny model do."""
    monkeypatch.setattr("ln_probe.page.page.report_page", lambda *_: "a page")
    monkeypatch.setattr(
        "ln_probe.page.index.index_page", lambda entries, *_: "\n".join(e.name + e.error for e in entries)
    )
