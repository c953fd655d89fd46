"""The prompts of a run on disk, as texts and, in shards, as token ids: read once, tokenized once for each tokenizer."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from ln_probe.analyses.files import read_json, replacing, sha256_of_file, verify, with_checksum, write_atomically
from ln_probe.batch import results
from ln_probe.hooks.default_tokens import MEASURED, SAMPLED_SEQUENCES, bundled_prompts, bundled_texts, tokenizer_of
from ln_probe.hooks.model import HookedModel, context_length, vocabulary_size
from ln_probe.prompt_sources import BUNDLED, SAMPLED, Entry, Sampled, entries, is_dataset
from ln_probe.prompts import Prompts, make_prompts, of_entries

if TYPE_CHECKING:
    from ln_probe.batch.run import Run
    from ln_probe.batch.suite import Target

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


def divide(given: str | None, home: Path, per_shard: int | None = None, limit: int | None = None) -> ShardedCorpus:
    """Read the prompts, one after another, into a file under `home`; prompts that are in it are not read again.

    Args:
        given: file or data set; "sampled"; None for the bundled prompts.
        home: folder of the file, which is named by what is asked for.
        per_shard: prompts in each shard; None: PER_SHARD, and fewer of a file that has not enough for SHARDS of them.
        limit: no more than so many prompts.

    Raises:
        FileNotFoundError, ValueError, ConnectionError: as `sources.entries`; there are no prompts.
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
    file_sha256 = "" if is_dataset(given) else _sha256(Path(given))
    held = _held(file, file_sha256)
    if held is not None:
        return held
    count, digest = _write(islice(entries(given), limit), file)
    if not count:
        raise ValueError(f"no prompts ({given} is empty): give at least one")
    if not is_dataset(given) and _sha256(Path(given)) != file_sha256:
        raise ValueError(f"{given} changed while it was being read: wait until it is complete, and try again")
    source = given if is_dataset(given) else Path(given).name
    size = per_shard or min(PER_SHARD, -(-count // SHARDS))
    corpus = ShardedCorpus(given, source, count, digest, size, file_sha256, file.name)
    write_atomically(file.with_suffix(".json"), with_checksum(vars(corpus)))
    return corpus


def _sha256(path: Path) -> str:
    return sha256_of_file(path) if path.is_file() else ""


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


def read_shard(file: Path, corpus: ShardedCorpus, shard: int) -> list[Entry]:
    """The prompts of one shard, as they were when the run began; none of one that has no texts.

    Raises:
        AlteredError: the file is damaged, missing or another corpus's.
    """
    try:
        places = _places(file, corpus)
        if shard >= len(places):  # the models without a tokenizer have sampled prompts there
            return []
        start, size, digest = places[shard]
        with file.open("rb") as lines:
            lines.seek(start)
            content = lines.read(size)
    except OSError as error:
        raise _altered(file, corpus, error.strerror or str(error)) from error
    if hashlib.sha256(content).hexdigest() != digest:
        raise _altered(file, corpus, "its content is not what was written")
    return [entry["text"] if "text" in entry else entry["tokens"] for entry in map(json.loads, content.splitlines())]


@lru_cache(maxsize=4)  # read once, not once for every shard
def _places(file: Path, corpus: ShardedCorpus) -> list[tuple[int, int, str]]:
    """Where each shard begins in the file, its size in bytes and its hash."""
    places, start, digest = [], 0, hashlib.sha256()
    with file.open("rb") as lines:
        while content := b"".join(islice(lines, corpus.per_shard)):
            digest.update(content)
            places.append((start, len(content), hashlib.sha256(content).hexdigest()))
            start += len(content)
    if digest.hexdigest() != corpus.sha256:
        raise _altered(file, corpus, "its content is not what was written")
    return places


def _altered(file: Path, corpus: ShardedCorpus, why: str) -> AlteredError:
    return AlteredError(
        f"{file} is not what was read from {corpus.source} when the run began ({why}): run the same command again, "
        "which reads the prompts anew"
    )


@dataclass(frozen=True, eq=False)
class TokenShard:
    """Some of the prompts: token ids of each, how long it was before it was cut, and the strings of all ids.

    Attributes:
        first: number of the first of them among all prompts that can be used.
        skipped: the others, by their number among all, and why they cannot be used.
    """

    first: int
    rows: tuple[Int[Tensor, " _"], ...]
    given: tuple[int, ...]
    names: Mapping[int, str]
    source: str
    notes: tuple[str, ...]
    sha256: str  # of the file that holds them
    skipped: tuple[tuple[int, str], ...] = ()

    def numbered(self) -> list[tuple[int, Int[Tensor, " _"]]]:
        return list(enumerate(self.rows, start=self.first))


class TokenShards:
    """The prompts of one checkpoint, shard by shard.

    Args:
        run, target: whose they are.
        key: of a set made before (its maker's `key`); then no model is needed.
        model: to make them with.
    """

    def __init__(self, run: Run, target: Target, *, key: str | None = None, model: HookedModel | None = None) -> None:
        self.run, self.target, self.model = run, target, model
        given = run.corpus.given
        own = model is not None and (bundled_prompts(model) is not None or tokenizer_of(model) is None)
        self._of_model = given == SAMPLED or (given == DEFAULT and own)  # prompts that the model brings or samples
        self._made: Prompts | None = None
        self._firsts = [0]  # of each shard that has been read, and of the next one
        if key is None:
            assert model is not None
            key = run.key(target) if self._of_model else self._tokenizer_key(model)
        self.key = key

    def skipped(self) -> list[tuple[int, str]]:
        """The prompts that this model cannot use, by number, and why."""
        return [pair for shard in range(self.run.corpus.shards) for pair in self[shard].skipped]

    def __getitem__(self, shard: int) -> TokenShard:
        for earlier in range(len(self._firsts) - 1, shard):
            self._firsts.append(self._firsts[earlier] + len(self._read(earlier).rows))
        return replace(self._read(shard), first=self._firsts[shard])

    def _read(self, shard: int) -> TokenShard:
        path = self.run.work / "tokens" / self.key[:20] / f"{shard:05d}.safetensors"
        key = f"{self.key} {shard}"
        try:
            stored = results.Stored(path, key)
        except (FileNotFoundError, results.DamagedError):
            if self.model is None:
                raise
            return self._make(path, key, shard, self.model)
        arrays = stored.arrays("")
        ends = np.cumsum(arrays["lengths"])[:-1]
        ids = torch.from_numpy(arrays["ids"].astype(np.int64))
        return TokenShard(
            0,
            tuple(ids.tensor_split(ends.tolist())) if len(arrays["lengths"]) else (),
            tuple(arrays["given"].tolist()),
            {int(i): s for i, s in stored.info["names"].items()},
            stored.info["source"],
            tuple(stored.info["notes"]),
            stored.sha256,
            tuple((int(number), str(why)) for number, why in stored.info.get("skipped", ())),
        )

    def _make(self, path: Path, key: str, shard: int, model: HookedModel) -> TokenShard:
        size, first = self.run.corpus.per_shard, shard * self.run.corpus.per_shard
        settings = self.run.settings
        rows: tuple[Tensor, ...] = ()
        given: tuple[int, ...] = ()
        source, notes, names = self.run.corpus.source, tuple[str, ...](), {}
        made = None
        skipped: list[tuple[int, str]] = []
        if self._of_model:
            if self._made is None:
                how = None if self.run.corpus.given == DEFAULT else Sampled()
                most, tokens = self.run.corpus.most, settings.max_tokens
                self._made = make_prompts(model, how, max_tokens=tokens, seed=settings.seed, most=most)
            made = self._made
            source, notes = made.source, made.notes
            # More were drawn where sequences are short: the last shard takes the rest.
            end = None if shard == self.run.corpus.shards - 1 else first + size
            rows, given = made.tokens[first:end], made.given[first:end]
        elif texts := read_shard(self.run.corpus_file, self.run.corpus, shard):
            try:
                made = of_entries(model, texts, source, max_tokens=settings.max_tokens)
            except ValueError as error:
                raise ValueError(f"among prompts {first} to {first + size - 1}, counted from there: {error}") from error
            rows, given = made.tokens, made.given
            skipped = [(first + number, why) for number, why in made.skipped]
        if made is not None:
            names = {i: made.name_of(i) for i in sorted({i for row in rows for i in row.tolist()})}
        result = results.Result(
            arrays={
                "ids": torch.cat(rows).numpy().astype(np.int32) if rows else np.empty(0, np.int32),
                "lengths": np.array([len(r) for r in rows], np.int64),
                "given": np.array(given, np.int64),
            },
            info={
                "names": {str(i): s for i, s in names.items()},
                "source": source,
                "notes": list(notes),
                "skipped": skipped,
            },
        )
        with results.storing(self.run.out):
            sha256 = results.write(path, key, result)
        return TokenShard(0, rows, given, names, source, notes, sha256, tuple(skipped))

    def _tokenizer_key(self, model: HookedModel) -> str:
        """Hash of everything that turns the texts into ids: models that share a tokenizer share the ids."""
        tokenizer = tokenizer_of(model)
        fast = getattr(tokenizer, "backend_tokenizer", None)
        if tokenizer is None:
            rules = ""
        else:
            rules = fast.to_str() if fast is not None else json.dumps(sorted(tokenizer.get_vocab().items()))
        content = {
            "rules": rules,
            "class": type(tokenizer).__name__,
            "bos": getattr(tokenizer, "bos_token_id", None),
            "prepend_bos": bool(getattr(model.cfg, "default_prepend_bos", True)),
            "tokens": [self.run.settings.max_tokens, context_length(model), vocabulary_size(model)],
            "prompts": [self.run.corpus.sha256, self.run.corpus.per_shard, self.run.corpus.source],
        }
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
