"""Text to train language models on: byte-level BPE, random windows, the end of every file held out.

Masked language modelling: some tokens of a window are hidden, and the encoder says which they were.

After Devlin et al. 2019, section 3.1: 15 % of the tokens are chosen; of these 80 % become a mask, 10 % another token
drawn at random, 10 % stay. The boundary at the beginning of a window (BERT's [CLS]) is never chosen.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ln_probe.analyses.lab.train import TEXT_BOUNDARY, Task, step_generator
from ln_probe.analyses.lab.transformer import LabTransformer
from ln_probe.analyses.text import write_atomically

VALID_SHARE = 0.05  # the end of every text is held out
# From this size on, logits are made piece by piece: those of 1024 tokens of GPT-2 are 206 MB.
LARGE_VOCABULARY, PIECE = 16_384, 64


class TextTask:
    """Windows of text: a boundary token, then `n_ctx - 1` tokens from a random place of the training part.

    Args:
        files: text files (UTF-8); the last 5 % of each is held out.
        d_vocab: size of the byte-level BPE, trained on the training parts; or of the tokenizer given.
        n_ctx: length of a window in tokens.
        tokenizer: a folder with another tokenizer (GPT-2's, say), with `<|endoftext|>` in its vocabulary.
        valid_windows: windows that the held-out loss is measured on, spread evenly.
    """

    name = "language_model"

    def __init__(
        self,
        files: Sequence[str | Path],
        d_vocab: int,
        n_ctx: int,
        *,
        tokenizer: Path | None = None,
        valid_windows: int = 64,
    ) -> None:
        self.n_ctx, self.d_vocab, self.valid_windows = n_ctx, d_vocab, valid_windows
        texts = []
        self._files = []
        for file in map(Path, files):
            raw = file.read_bytes()
            try:
                texts.append(raw.decode("utf-8"))
            except UnicodeDecodeError as error:
                raise ValueError(f"{file} is not UTF-8 text ({error}): convert it first, e.g. with iconv") from error
            self._files.append({"name": file.name, "sha256": hashlib.sha256(raw).hexdigest(), "bytes": len(raw)})
        cuts = [int(len(t) * (1 - VALID_SHARE)) for t in texts]
        if tokenizer is None:
            self.tokenizer = train_tokenizer([t[:c] for t, c in zip(texts, cuts, strict=True)], d_vocab)
        else:
            self.tokenizer = read_tokenizer(tokenizer, d_vocab)
        self.train_tokens = self._encode([t[:c] for t, c in zip(texts, cuts, strict=True)])
        self.valid_tokens = self._encode([t[c:] for t, c in zip(texts, cuts, strict=True)])
        if min(len(self.train_tokens), len(self.valid_tokens)) < n_ctx:
            sizes = f"{len(self.train_tokens)} training and {len(self.valid_tokens)} held-out tokens"
            raise ValueError(f"the text is too short: {sizes}, but a window needs {n_ctx}: give more text")
        self.boundary = self.tokenizer.get_vocab()[TEXT_BOUNDARY]

    def _encode(self, texts: Sequence[str]) -> Int[Tensor, " tokens"]:
        ids = [np.asarray(self.tokenizer.encode(t).ids, dtype=np.int64) for t in texts]
        return torch.from_numpy(np.concatenate(ids))

    @property
    def identity(self) -> dict[str, Any]:
        return {
            "files": self._files, "d_vocab": self.d_vocab, "n_ctx": self.n_ctx, "train_tokens": len(self.train_tokens),
            "valid_tokens": len(self.valid_tokens),
            "tokenizer_sha256": hashlib.sha256(self.tokenizer.to_str().encode()).hexdigest(),
        }  # fmt: skip

    def windows(
        self, tokens: Int[Tensor, " tokens"], starts: Int[Tensor, " batch"], length: int
    ) -> Int[Tensor, "batch pos"]:
        """A boundary token and `length` tokens from each of the starts."""
        body = tokens[starts[:, None] + torch.arange(length)]
        return torch.cat([torch.full_like(body[:, :1], self.boundary), body], dim=1)

    def batch(self, step: int, size: int, seed: int) -> Int[Tensor, "batch pos"]:
        last = len(self.train_tokens) - self.n_ctx + 1
        starts = torch.randint(last, (size,), generator=step_generator(seed, step))
        return self.windows(self.train_tokens, starts, self.n_ctx - 1)

    def held_out(self, count: int) -> Int[Tensor, "batch pos"]:
        """Windows of the held-out text, spread evenly."""
        last = len(self.valid_tokens) - self.n_ctx + 1
        return self.windows(self.valid_tokens, torch.linspace(0, last - 1, count).long(), self.n_ctx - 1)

    def loss(self, model: nn.Module, batch: Tensor) -> Float[Tensor, ""]:
        if self.d_vocab >= LARGE_VOCABULARY:
            return piecewise_loss(cast("LabTransformer", model), batch)
        loss: Tensor = model(batch, return_type="loss")
        return loss

    @torch.no_grad()
    def evaluate(self, model: nn.Module) -> dict[str, float]:
        windows = self.held_out(self.valid_windows)
        losses = [float(self.loss(model, part)) * len(part) for part in windows.split(16)]
        return {"valid_loss": sum(losses) / len(windows)}

    def write_files(self, out: Path) -> None:
        write_atomically(out / "tokenizer.json", self.tokenizer.to_str().encode())


LONGEST = 128  # tokens of a sentence, the boundary before it among them: published
ENDS = re.compile(r"(?<=[.?!])\s+|\n\s*\n")


def sentences(text: TextTask, count: int) -> list[Int[Tensor, " pos"]]:
    """Return the first sentences of a text's held-out part, a boundary token and at most LONGEST - 1 tokens each.

    What does not end in a full stop, a question mark or an exclamation mark is left out.
    """
    parts = [part.strip() for part in ENDS.split(text.tokenizer.decode(text.valid_tokens.tolist()))]
    whole = [part for part in parts[1:] if part.endswith((".", "?", "!"))]
    if len(whole) < count:
        raise ValueError(f"the held-out text has {len(whole)} sentences and {count} are read: give more text")
    ids = [torch.tensor(text.tokenizer.encode(part).ids[: LONGEST - 1]) for part in whole[:count]]
    return [torch.cat([torch.tensor([text.boundary]), one]) for one in ids]


def piecewise_loss(model: LabTransformer, tokens: Int[Tensor, "batch pos"]) -> Float[Tensor, ""]:
    """The mean next-token loss in nats, with the logits of PIECE positions in memory at a time."""

    def summed(x: Tensor, wanted: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(x, model.W_U.T, model.b_U), wanted, reduction="sum")

    x, wanted = model.stream(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()
    pieces = zip(x.split(PIECE), wanted.split(PIECE), strict=True)
    return torch.stack([checkpoint(summed, *piece, use_reentrant=False) for piece in pieces]).sum() / len(x)


def read_tokenizer(folder: Path, d_vocab: int) -> Tokenizer:
    """The fast tokenizer of a Hugging Face folder."""
    from transformers import AutoTokenizer

    if not Path(folder).is_dir():
        raise FileNotFoundError(f"no tokenizer folder {folder}")
    try:
        tokenizer: Tokenizer = AutoTokenizer.from_pretrained(str(folder)).backend_tokenizer
    except Exception as error:  # of a damaged file, of any class
        raise ValueError(f"{folder} holds no fast tokenizer of Hugging Face that can be read ({error})") from error
    size = tokenizer.get_vocab_size()
    if size != d_vocab or tokenizer.token_to_id(TEXT_BOUNDARY) is None:
        raise ValueError(f"{folder}: a vocabulary of {size} tokens; {d_vocab} are needed, {TEXT_BOUNDARY} among them")
    return tokenizer


def train_tokenizer(texts: Sequence[str], d_vocab: int) -> Tokenizer:
    """A byte-level BPE with the text boundary as token 0; the same texts give the same tokenizer."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=d_vocab,
        special_tokens=[TEXT_BOUNDARY],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


CHOSEN, MASKED, REPLACED = 0.15, 0.8, 0.1  # published
MASKS = 1_000_003  # added to a seed: masks are drawn apart from windows
HELD_OUT_MASKS = -1  # the step whose generator draws the masks of held-out windows


class Masked(NamedTuple):
    """Windows with some tokens hidden.

    Attributes:
        tokens: what the encoder sees.
        places: which positions were chosen, as many in every window.
        targets: the tokens that stood there.
    """

    tokens: Int[Tensor, "batch pos"]
    places: Int[Tensor, "batch chosen"]
    targets: Int[Tensor, "batch chosen"]


def masked(windows: Int[Tensor, "batch pos"], mask: int, generator: torch.Generator) -> Masked:
    """Hide tokens of windows (all below `mask`, the token that hides); the first of each is never chosen."""
    count, length = windows.shape
    chosen = max(1, round(CHOSEN * (length - 1)))
    places = 1 + torch.rand((count, length - 1), generator=generator).topk(chosen, dim=1).indices
    targets = windows.gather(1, places)
    fate = torch.rand(places.shape, generator=generator)
    drawn = torch.randint(mask, places.shape, generator=generator)
    seen = torch.where(fate < MASKED, mask, torch.where(fate < MASKED + REPLACED, drawn, targets))
    return Masked(windows.scatter(1, places, seen), places, targets)


class TaskOnText(Task):
    """A task made of the windows, the tokenizer or the files of a `TextTask`, which is its `text`."""

    def __init__(self, text: TextTask) -> None:
        self.text = text

    def write_files(self, out: Path) -> None:
        self.text.write_files(out)


class MaskedTextTask(TaskOnText):
    """Masked windows of text; the vocabulary is the text's and a mask, which is its last token."""

    name = "masked_language_model"

    @property
    def mask(self) -> int:
        return self.text.d_vocab

    @property
    def identity(self) -> dict[str, Any]:
        return {**self.text.identity, "chosen": CHOSEN, "masked": MASKED, "replaced": REPLACED}

    def batch(self, step: int, size: int, seed: int) -> Masked:
        return masked(self.text.batch(step, size, seed), self.mask, step_generator(MASKS + seed, step))

    def held_out(self, count: int) -> Masked:
        """Windows of the held-out text, with the same masks every time."""
        return masked(self.text.held_out(count), self.mask, step_generator(MASKS, HELD_OUT_MASKS))

    def logits(self, model: nn.Module, batch: Masked) -> Float[Tensor, "batch chosen d_vocab"]:
        """Of the chosen positions alone."""
        lab = cast("LabTransformer", model)
        stream = lab.stream(batch.tokens)
        at = stream.gather(1, batch.places[..., None].expand(-1, -1, stream.shape[-1]))
        found: Tensor = lab.unembed(at)
        return found

    def loss(self, model: nn.Module, batch: Masked) -> Float[Tensor, ""]:
        """Mean cross-entropy of the chosen tokens, in nats."""
        return F.cross_entropy(self.logits(model, batch).flatten(0, 1), batch.targets.flatten())

    @torch.no_grad()
    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Loss and accuracy on the chosen tokens of held-out windows."""
        held = self.held_out(self.text.valid_windows)
        logits, targets = self.logits(model, held).flatten(0, 1), held.targets.flatten()
        right = float((logits.argmax(-1) == targets).double().mean())
        return {"valid_loss": float(F.cross_entropy(logits, targets)), "valid_accuracy": right}

    def unigram_loss(self) -> float:
        """What the training text's token frequencies (each counted once more) give on these held-out tokens."""
        counts = 1.0 + torch.bincount(self.text.train_tokens, minlength=self.text.d_vocab).double()
        targets = self.held_out(self.text.valid_windows).targets.flatten()
        return float(-(counts / counts.sum()).log()[targets].mean())


NOT_WORDS = re.compile(r"[^a-z'’]+")  # of text in lower case
SPEAKERS = re.compile(r"^[A-Z][A-Z ]+\.$", re.MULTILINE)  # a separate line in plays: "FIRST LORD."


def plain_words(text: str) -> str:
    """Words in lower case with a space between; names of speakers, digits and punctuation are left out."""
    return NOT_WORDS.sub(" ", SPEAKERS.sub(" ", text).lower()).replace("’", "'").strip()


class PassagesTask(TaskOnText):
    """Passages of a boundary token and `length` tokens of one book; held out is the end of every book (`TextTask`).

    Args:
        files: a book each (UTF-8).
        text: whose tokenizer is used.
        length: tokens of a passage, besides the boundary.
        held_out: passages that are held out, of each book, spread evenly.
    """

    name = "passages"

    def __init__(self, files: Sequence[Path], text: TextTask, length: int, held_out: int) -> None:
        if len(files) < 2:
            raise ValueError(f"passages are classified by their book: give at least 2 texts, not {len(files)}")
        super().__init__(text)
        self.files, self.length, self.count = files, length, held_out
        self.train_tokens: list[Int[Tensor, " tokens"]] = []
        self.valid_tokens: list[Int[Tensor, " tokens"]] = []
        for file in files:
            raw = file.read_text(encoding="utf-8")
            cut = int(len(raw) * (1 - VALID_SHARE))
            for part, into in ((raw[:cut], self.train_tokens), (raw[cut:], self.valid_tokens)):
                into.append(torch.tensor(text.tokenizer.encode(plain_words(part)).ids, dtype=torch.int64))
                if len(into[-1]) < length:
                    raise ValueError(f"{file} is too short: {len(into[-1])} tokens in a part, a passage has {length}")

    @property
    def identity(self) -> dict[str, Any]:
        books = [file.name for file in self.files]
        return {**self.text.identity, "books": books, "length": self.length, "held_out": self.count}

    def batch(self, step: int, size: int, seed: int) -> tuple[Int[Tensor, "batch pos"], Int[Tensor, " batch"]]:
        """As many passages of every book, to one, and the numbers of their books."""
        generator = step_generator(seed, step)
        books, drawn = torch.arange(size) % len(self.files), []
        for tokens in self.train_tokens:
            starts = torch.randint(len(tokens) - self.length + 1, (size,), generator=generator)
            drawn.append(self.text.windows(tokens, starts, self.length))
        return torch.stack(drawn)[books, torch.arange(size)], books

    def held_out(self) -> tuple[Int[Tensor, "batch pos"], Int[Tensor, " batch"]]:
        """The held-out passages, as many of every book, and the numbers of their books."""
        parts = []
        for tokens in self.valid_tokens:
            starts = torch.linspace(0, len(tokens) - self.length, self.count).long()
            parts.append(self.text.windows(tokens, starts, self.length))
        return torch.cat(parts), torch.arange(len(parts)).repeat_interleave(self.count)

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Float[Tensor, ""]:
        return F.cross_entropy(model(batch[0]), batch[1])

    @torch.no_grad()
    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Loss and accuracy on held-out passages."""
        tokens, books = self.held_out()
        logits = cast("Tensor", model(tokens))
        right = float((logits.argmax(-1) == books).double().mean())
        return {"valid_loss": float(F.cross_entropy(logits, books)), "valid_accuracy": right}
