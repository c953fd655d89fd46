"""The prompts of a run: read once into a file of the run's own, and divided into shards."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from ln_probe.analyses.files import read_json, replacing, sha256_of_file, verify, with_checksum, write_atomically
from ln_probe.hooks.default_tokens import MEASURED, SAMPLED_SEQUENCES, bundled_prompts, bundled_texts, tokenizer_of
from ln_probe.hooks.model import HookedModel
from ln_probe.prompt_sources import BUNDLED, SAMPLED, Entry, Sampled, entries, is_dataset
from ln_probe.prompts import Prompts, make_prompts, of_entries
from ln_probe.settings import Settings

# Prompts in a shard, unless the user says otherwise: what is lost when a worker dies. On 2 cores, 4 prompts of 128
# tokens through the bundled models take about 10 seconds, 4 of 512 through GPT-2 small's shape 10 minutes.
PER_SHARD = 4
# Into so many shards few prompts are divided as well, so that all workers have something to do.
SHARDS = 8
# The bundled prompts, a bundled model's own windows, or sampled prompts for a model without a tokenizer.
DEFAULT = "default"
WINDOWS = 64  # of a bundled model's own; shards beyond a model's prompts are empty


class AlteredError(ValueError):
    """The prompts on disk are not what was read when the run began."""


@dataclass(frozen=True)
class ShardedCorpus:
    """What the prompts of a run are.

    Attributes:
        given: "default", "sampled", or the file or data set.
        source: what reports call it.
        count: number of prompts (of sampled ones: at least this; the last shard takes what there is more).
        sha256: hash of all of them, however they are divided; empty for prompts that come from the model.
        per_shard: prompts in a shard.
        file_sha256: of the file they were read from, to notice that it has changed; empty for a data set.
        name: of the file that the run keeps them in; empty for prompts that come from the model.
        most: of sampled prompts, no more than so many; None: all that are drawn.
    """

    given: str
    source: str
    count: int
    sha256: str
    per_shard: int
    file_sha256: str = ""
    name: str = ""
    most: int | None = None

    @property
    def shards(self) -> int:
        return max(1, -(-self.count // self.per_shard))

    def numbers(self, shard: int, count: int) -> range:
        """The numbers of the prompts of a shard, of `count` that a model has: the last shard takes the rest."""
        first = shard * self.per_shard
        return range(first, count if shard == self.shards - 1 else min(first + self.per_shard, count))


def divide(given: str | None, home: Path, per_shard: int | None = None, limit: int | None = None) -> ShardedCorpus:
    """Read the prompts, one after another, into a file under `home`; prompts that are in it are not read again.

    Args:
        given: file or data set; "sampled"; None for the bundled prompts.
        per_shard: prompts in each shard; None: PER_SHARD, and fewer of a file that has not enough for SHARDS of them.
        limit: no more than so many prompts.

    Raises:
        FileNotFoundError, ValueError, ConnectionError: as `prompt_sources.entries`; there are no prompts.
        OSError: the folder cannot be written.
    """
    file = home / f"{hashlib.sha256(json.dumps([given, per_shard, limit]).encode()).hexdigest()[:16]}.jsonl"
    sampled, usual = SAMPLED_SEQUENCES[MEASURED], per_shard or PER_SHARD
    sampled = sampled if limit is None else min(sampled, limit)
    if given == SAMPLED:
        return ShardedCorpus(SAMPLED, SAMPLED, sampled, "", usual, most=limit)
    if given is None:
        texts = bundled_texts()[:limit]
        _, digest = _write(texts, file)
        count = max(len(texts), sampled, WINDOWS if limit is None else min(WINDOWS, limit))
        return ShardedCorpus(DEFAULT, BUNDLED, count, digest, usual, name=file.name, most=limit)
    file_sha256 = _sha256(given)
    held = _held(file, file_sha256)
    if held is not None:
        return held
    count, digest = _write(islice(entries(given), limit), file)
    if _sha256(given) != file_sha256:
        raise ValueError(f"{given} changed while it was being read: wait until it is complete, and try again")
    source = given if is_dataset(given) else Path(given).name
    size = per_shard or min(PER_SHARD, -(-count // SHARDS))
    corpus = ShardedCorpus(given, source, count, digest, size, file_sha256, file.name)
    write_atomically(file.with_suffix(".json"), with_checksum(vars(corpus)))
    return corpus


def _sha256(given: str) -> str:
    """Of a file; empty for a data set, and for a path that does not exist."""
    return "" if is_dataset(given) or not Path(given).is_file() else sha256_of_file(Path(given))


def _held(file: Path, file_sha256: str) -> ShardedCorpus | None:
    """What an earlier command read, if it is whole and its source has not changed."""
    try:
        corpus = ShardedCorpus(**verify(read_json(file.with_suffix(".json")), str(file)))
        whole = corpus.file_sha256 == file_sha256 and sha256_of_file(file) == corpus.sha256
    except (OSError, ValueError, TypeError):
        return None
    return corpus if whole else None


def _write(found: Iterable[Entry], file: Path) -> tuple[int, str]:
    """Write a prompt a line; their number, and the hash of the file."""
    digest, count = hashlib.sha256(), 0
    with replacing(file) as aside, aside.open("wb") as lines:
        for entry in found:
            line = json.dumps({"text": entry} if isinstance(entry, str) else {"tokens": entry}).encode() + b"\n"
            lines.write(line)
            digest.update(line)
            count += 1
    return count, digest.hexdigest()


def read_corpus(file: Path, corpus: ShardedCorpus) -> Iterator[Entry]:
    """Return the prompts as they were when the run began.

    Raises:
        AlteredError: the file is damaged, missing or another corpus's.
    """
    try:
        content, why = file.read_bytes(), "its content is not what was written"
    except OSError as error:
        content, why = b"", error.strerror or str(error)
    if hashlib.sha256(content).hexdigest() != corpus.sha256:
        raise AlteredError(
            f"{file} is not what was read from {corpus.source} when the run began ({why}): run the same command again, "
            "which reads the prompts anew"
        )
    found = map(json.loads, content.splitlines())
    return (entry["text"] if "text" in entry else entry["tokens"] for entry in found)


def prompts_of(model: HookedModel, corpus: ShardedCorpus, file: Path, settings: Settings) -> Prompts:
    """Return the prompts of one model: those of the corpus in `file`, or those that the model brings or samples."""
    own = bundled_prompts(model) is not None or tokenizer_of(model) is None
    if corpus.given == SAMPLED or (corpus.given == DEFAULT and own):
        how = None if corpus.given == DEFAULT else Sampled()
        return make_prompts(model, how, max_tokens=settings.max_tokens, seed=settings.seed, most=corpus.most)
    return of_entries(model, read_corpus(file, corpus), corpus.source, max_tokens=settings.max_tokens)
