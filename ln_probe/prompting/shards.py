"""The prompts of a run in shards, and the same as token ids: read once, tokenized once for each tokenizer."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from ln_probe.analyses.machinery.files import write_atomically
from ln_probe.prompting.sources import BUNDLED, SAMPLED, Entry, entries, is_dataset

# Prompts in a shard, unless the user says otherwise: what is lost when a worker dies. On 2 cores, 4 prompts of 128
# tokens through the bundled models take about 10 seconds, 4 of 512 through GPT-2 small's shape 10 minutes.
PER_SHARD = 4
DEFAULT = "default"  # the bundled prompts, or sampled ones for a model without a tokenizer


@dataclass(frozen=True)
class ShardedCorpus:
    """What the prompts of a run are.

    Attributes:
        given: "default", "sampled", or the file or data set.
        source: what reports call it.
        count: number of prompts (of sampled ones: at most this).
        sha256: hash of all of them, however they are divided; empty for prompts that come from the model.
        per_shard: prompts in a shard.
        file_sha256: of the file they were read from, to notice that it has changed; empty for a data set.
    """

    given: str
    source: str
    count: int
    sha256: str
    per_shard: int
    file_sha256: str = ""
    folder: str = ""  # of the shards, among those of the run

    @property
    def shards(self) -> int:
        return max(1, -(-self.count // self.per_shard))


def divide(given: str | None, home: Path, per_shard: int, limit: int | None = None) -> ShardedCorpus:
    """Read the prompts, one after another, into shards under `home`; what is there already is not read again.

    Args:
        given: file or data set; "sampled"; None for the bundled prompts.
        home: folder of the shards; they go into one below it, named by what is asked for.
        per_shard: prompts in each.
        limit: no more than so many prompts.

    Raises:
        FileNotFoundError, ValueError, ConnectionError: as `sources.entries`; there are no prompts.
        OSError: the folder cannot be written.
    """
    from ln_probe.hooks.default_tokens import MEASURED, SAMPLED_ROUNDS, SAMPLED_SEQUENCES, bundled_texts

    name = hashlib.sha256(json.dumps([given, per_shard, limit]).encode()).hexdigest()[:16]
    folder = home / name
    sampled = SAMPLED_ROUNDS * SAMPLED_SEQUENCES[MEASURED]
    if given == SAMPLED:
        return ShardedCorpus(SAMPLED, SAMPLED, sampled, "", per_shard)
    if given is None:
        texts = bundled_texts()[:limit]
        made = _write(texts, folder, per_shard)
        return ShardedCorpus(DEFAULT, BUNDLED, max(len(texts), sampled), made[1], per_shard, folder=name)
    found: Iterable[Entry] = entries(given) if limit is None else islice(entries(given), limit)
    file_sha256 = "" if is_dataset(given) else _sha256(Path(given))
    held = _held(folder, file_sha256)
    if held is not None:
        return held
    count, digest = _write(found, folder, per_shard)
    if not count:
        raise ValueError(f"no prompts ({given} is empty): give at least one")
    source = given if is_dataset(given) else Path(given).name
    corpus = ShardedCorpus(given, source, count, digest, per_shard, file_sha256, name)
    write_atomically(folder / "corpus.json", json.dumps(vars(corpus)).encode())
    return corpus


def _sha256(path: Path) -> str:
    from ln_probe.loading.provenance import sha256_of_file

    return sha256_of_file(path) if path.is_file() else ""


def _held(folder: Path, file_sha256: str) -> ShardedCorpus | None:
    """What an earlier command read, if it is whole and its file has not changed."""
    try:
        corpus = ShardedCorpus(**json.loads((folder / "corpus.json").read_text(encoding="utf-8")))
        same = corpus.file_sha256 == file_sha256 and _digest(folder, corpus.shards) == corpus.sha256
    except (OSError, ValueError, TypeError):
        return None
    return corpus if same else None


def _digest(folder: Path, shards: int) -> str:
    digest = hashlib.sha256()
    for shard in range(shards):
        digest.update(shard_file(folder, shard).read_bytes())
    return digest.hexdigest()


def _write(found: Iterable[Entry], folder: Path, per_shard: int) -> tuple[int, str]:
    digest, total = hashlib.sha256(), 0
    iterator = iter(found)
    shard = 0
    while part := list(islice(iterator, per_shard)):
        lines = [json.dumps({"text": e} if isinstance(e, str) else {"tokens": e}) for e in part]
        content = "".join(f"{line}\n" for line in lines).encode()
        write_atomically(shard_file(folder, shard), content)
        digest.update(content)
        total += len(part)
        shard += 1
    return total, digest.hexdigest()


def shard_file(folder: Path, shard: int) -> Path:
    return folder / f"{shard:05d}.jsonl"
