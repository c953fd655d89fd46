"""What the tests of commands share: tiny models, tokenizers and prompts on disk, the command line in this process and
in one of its own, and the tables that it wrote."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from typer.testing import CliRunner

from ln_probe.cli import app

ROWS = [[1, 5, 7, 3], [2, 2, 9, 11, 4], [8, 1, 6, 13, 0, 12]]


def command(*args: object) -> tuple[int, str, str]:
    """Exit status, output and errors; what a user would see as a traceback is raised."""
    result = CliRunner().invoke(app, list(map(str, args)))
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


def ends(status: int, *args: object) -> tuple[str, str]:
    """Output and errors of a command, which has to end with this status."""
    code, printed, said = command(*args)
    assert code == status, said or printed
    return printed, said


def word_tokenizer(words: list[str], *, marks: bool = True, pattern: str = "") -> Any:
    """A tokenizer of whole words: the first stands for all others, and the next two, as `marks`, begin and end a text.

    `pattern`: what a text is split at first.
    """
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=words[0]))
    parts: list[Any] = [pre_tokenizers.Split(Regex(pattern), "isolated")] if pattern else []
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*parts, pre_tokenizers.Whitespace()])
    known = {"unk_token": words[0], "bos_token": words[1], "eos_token": words[2]} if marks else {}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **known)


def started(*args: object, **environment: str) -> subprocess.Popen[str]:
    """The command as a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "ln_probe", *map(str, args)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
    )


def ended(process: subprocess.Popen[str], status: int | None = None) -> tuple[int, str]:
    """Exit status, which is the one that is given, and what was said."""
    said, _ = process.communicate(timeout=3000)
    assert status in (None, process.returncode), said
    return process.returncode, said


def write_prompts(path: Path, prompts: Sequence[str | list[Any]] = ROWS) -> Path:
    """Texts and lists of token ids, a line each."""
    lines = [json.dumps({"text" if isinstance(prompt, str) else "tokens": prompt}) for prompt in prompts]
    path.write_text("".join(line + "\n" for line in lines))
    return path


def lab_model(folder: Path, seed: int = 0, d_vocab: int = 20) -> Path:
    """A lab run's folder with a model that was never trained."""
    from ln_probe.analyses.lab.train import save_model
    from ln_probe.analyses.lab.transformer import LabConfig, LabTransformer

    torch.manual_seed(seed)
    config = LabConfig(n_layers=1, d_model=8, n_heads=2, d_vocab=d_vocab, n_ctx=12)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "lab.json").write_text(json.dumps({"model": config.to_dict()}))
    save_model(LabTransformer(config), folder / "model.safetensors")
    return folder


def tables(out: Path) -> dict[str, bytes]:
    """The tables and what is kept for pictures of every report in a folder."""
    found = [*out.glob("*/*.parquet"), *out.glob("*/exhibits.npz")]
    return {str(p.relative_to(out)): p.read_bytes() for p in sorted(found)}


def without_pages(monkeypatch: Any) -> None:
    """Reports without their pages, which cost ten times what the tables of a tiny model do."""
    monkeypatch.setattr("ln_probe.page.page.report_page", lambda *_: "a page")
    monkeypatch.setattr(
        "ln_probe.page.index.index_page", lambda entries, *_: "\n".join(e.name + e.error for e in entries)
    )
