"""What the tests of commands share: tiny models, tokenizers and prompts on disk, the command line in this process and
in one of its own, and the tables that it wrote."""

from __future__ import annotations

import json
import math
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
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


@contextmanager
def soon(megabytes: float = math.inf) -> Iterator[None]:
    """What happens inside takes less than ten seconds of the processor and so much memory; a read that waits is
    interrupted."""

    def late(*_: object) -> None:
        raise TimeoutError("it waits")

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    earlier = signal.signal(signal.SIGALRM, late)
    signal.alarm(120)  # of a busy machine; ten seconds of an idle one
    start = time.process_time()
    try:
        yield
        assert time.process_time() - start < 10
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < megabytes * 1024
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, earlier)


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


def started(*args: object, limit: int | None = None, **environment: str) -> subprocess.Popen[str]:
    """The command as a process of its own, the leader of its group; no file may grow beyond `limit` bytes."""

    def restrict() -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a job that a shell runs in the background ignores it
        if limit is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    return subprocess.Popen(
        [sys.executable, "-m", "ln_probe", *map(str, args)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        preexec_fn=restrict,
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


def lab_model(folder: Path, seed: int = 0) -> Path:
    """A lab run's folder with a model that was never trained."""
    from ln_probe.analyses.lab.train import hashes_beside, save_model
    from ln_probe.analyses.lab.transformer import LabConfig, LabTransformer

    torch.manual_seed(seed)
    config = LabConfig(n_layers=1, d_model=8, n_heads=2, d_vocab=20, n_ctx=12)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "lab.json").write_text(json.dumps({"model": config.to_dict()}))
    save_model(LabTransformer(config), folder / "model.safetensors", about={"beside": hashes_beside(folder)})
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
