"""Shards of the prompts as token ids, on disk: made by whoever needs one first, once for each tokenizer."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from ln_probe.batch import store
from ln_probe.batch.plan import Run
from ln_probe.batch.suite import Target
from ln_probe.hooks.default_tokens import bundled_prompts, tokenizer_of
from ln_probe.hooks.model import HookedModel, context_length, vocabulary_size
from ln_probe.prompting.prompts import Prompts, make_prompts, of_entries
from ln_probe.prompting.shards import DEFAULT, read_shard
from ln_probe.prompting.sources import SAMPLED
from ln_probe.prompting.token_forms import Sampled


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
        self._firsts = [0]  # of each shard that has been looked at, and of the one behind
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
            stored = store.Stored(path, key)
        except (FileNotFoundError, store.DamagedError):
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
        elif texts := read_shard(self.run.corpus_folder, self.run.corpus, shard):
            try:
                made = of_entries(model, texts, source, max_tokens=settings.max_tokens)
            except ValueError as error:
                raise ValueError(f"among prompts {first} to {first + size - 1}, counted from there: {error}") from error
            rows, given = made.tokens, made.given
            skipped = [(first + number, why) for number, why in made.skipped]
        if made is not None:
            names = {i: made.name_of(i) for i in sorted({i for row in rows for i in row.tolist()})}
        result = store.Result(
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
        with store.storing(self.run.out):
            sha256 = store.write(path, key, result)
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
