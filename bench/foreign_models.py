"""Four small models of kinds that are not distributed with weights: their training and their prompts.

    python bench/foreign_models.py FOLDER [NAME …]    # one to four minutes each on one idle core

`char-gpt2-shakespeare` and `char-gpt2-moby` are Hugging Face GPT-2 language models of characters without a tokenizer.
Every window that they are trained and measured on begins with a line break, and nothing declares that token.
`book-classifier` is a HookedTransformer that tells which of three books 64 characters come from. `char-bert` is a
masked language model of characters. Texts are those of `examples/checkpoints/measure.py`: a model sees the first 95 %
of a book, and its prompts come from the rest. Weights depend on the seed, the versions and the processor alone.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.nn.functional as F
import typer
from jaxtyping import Float, Int
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "checkpoints"))
from measure import BOOKS, HELD_OUT, corpus

SEED = 0
BATCH = 32  # windows
CLASSIFIED, MASKED = 64, 32  # characters of a window of the classifier and of the masked model
MASK_EVERY = 4  # one character of so many is masked
MASK_AT = 2  # the first that is masked in a prompt
REPORT_EVERY = 100  # steps

Windows = Int[Tensor, "window pos"]


@dataclass(frozen=True)
class Language:
    """A GPT-2 of characters: its book, its shape and its training."""

    book: str
    layers: int
    d_model: int
    steps: int
    tokens: int = 128  # of a window
    heads: int = 4
    rate: float = 2e-3


LANGUAGE = {
    "char-gpt2-shakespeare": Language("shakespeare_complete_gut.txt", layers=4, d_model=128, steps=900),
    "char-gpt2-moby": Language("moby_dick.txt", layers=2, d_model=64, steps=2400),
}
NAMES = (*LANGUAGE, "book-classifier", "char-bert")


# Text


@cache
def alphabet() -> list[str]:
    """Every character of the three books; a token's id is its place in this list, and the mask's is its length."""
    return sorted(set("".join(corpus(name) for name in BOOKS)))


@cache
def parts(book: str) -> tuple[Int[Tensor, " pos"], Int[Tensor, " pos"]]:
    """The token ids of a book's beginning, for training, and of its end, for prompts."""
    ids = {character: i for i, character in enumerate(alphabet())}
    tokens = torch.tensor([ids[character] for character in corpus(book)])
    cut = int(len(tokens) * (1 - HELD_OUT))
    return tokens[:cut], tokens[cut:]


def line_starts(text: Int[Tensor, " pos"], length: int) -> Int[Tensor, " window"]:
    """Positions of the line breaks that a whole window of this length begins with."""
    starts = (text == alphabet().index("\n")).nonzero()[:, 0]
    return starts[starts <= len(text) - length]


def spread(starts: Int[Tensor, " start"], count: int, length: int) -> Int[Tensor, " window"]:
    """So many of these starts, evenly spread, whose windows do not overlap.

    Raises:
        SystemExit: there are too few.
    """
    apart = [int(starts[0])]
    for start in starts.tolist():
        if start >= apart[-1] + length:
            apart.append(start)
    if len(apart) < count:
        raise SystemExit(f"{len(apart)} windows of {length} characters do not overlap, and {count} are needed")
    return torch.tensor(apart)[torch.linspace(0, len(apart) - 1, count).long()]


def cut(text: Int[Tensor, " pos"], starts: Int[Tensor, " window"], length: int) -> Windows:
    return text[starts[:, None] + torch.arange(length)]


# Training


def fit(model: nn.Module, loss: Callable[[torch.Generator], Float[Tensor, ""]], steps: int, rate: float) -> None:
    """AdamW with a linear warm-up over the first 5 % of the steps and a linear way down to a tenth of the rate."""
    generator = torch.Generator().manual_seed(SEED)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.01)
    warm = max(1, steps // 20)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda at: min((at + 1) / warm, 1 - 0.9 * at / steps))
    model.train()
    for step in range(steps):
        value = loss(generator)
        optimizer.zero_grad()
        value.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % REPORT_EVERY == 0 or step == steps - 1:
            print(f"  step {step}: {value.item():.3f}", flush=True)
    model.eval()


def language_model(name: str) -> nn.Module:
    """A GPT-2 trained on windows that begin with a line break."""
    from transformers import GPT2Config, GPT2LMHeadModel

    spec = LANGUAGE[name]
    text, _ = parts(spec.book)
    starts = line_starts(text, spec.tokens)
    config = GPT2Config(
        vocab_size=len(alphabet()),
        n_positions=spec.tokens,
        n_embd=spec.d_model,
        n_layer=spec.layers,
        n_head=spec.heads,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = GPT2LMHeadModel(config)

    def loss(generator: torch.Generator) -> Tensor:
        windows = cut(text, starts[torch.randint(len(starts), (BATCH,), generator=generator)], spec.tokens)
        return F.cross_entropy(model(windows).logits[:, :-1].flatten(0, 1), windows[:, 1:].flatten())

    fit(model, loss, spec.steps, spec.rate)
    return model


def classifier(steps: int = 3000, rate: float = 1e-3) -> nn.Module:
    """A causal transformer whose output at the last position tells the book."""
    model = untrained_classifier()
    texts = [parts(book)[0] for book in BOOKS]

    def loss(generator: torch.Generator) -> Tensor:
        labels = torch.randint(len(texts), (BATCH,), generator=generator)
        places = torch.rand(BATCH, generator=generator)
        windows = torch.stack([_window(texts[label], place) for label, place in zip(labels, places, strict=True)])
        return F.cross_entropy(model(windows)[:, -1], labels)

    fit(model, loss, steps, rate)
    return model


def _window(text: Int[Tensor, " pos"], place: Float[Tensor, ""]) -> Int[Tensor, " window"]:
    start = int(place * (len(text) - CLASSIFIED))
    return text[start : start + CLASSIFIED]


def untrained_classifier() -> Any:
    from transformer_lens import HookedTransformer, HookedTransformerConfig

    config = HookedTransformerConfig(
        n_layers=2,
        d_model=64,
        n_heads=4,
        d_head=16,
        d_mlp=256,
        n_ctx=CLASSIFIED,
        d_vocab=len(alphabet()),
        d_vocab_out=len(BOOKS),
        act_fn="gelu_new",
        normalization_type="LN",
        seed=SEED,
        device="cpu",
    )
    return HookedTransformer(config)


def masked_model(steps: int = 4000, rate: float = 3e-3) -> nn.Module:
    """A BERT of the King James Bible's characters; which of every MASK_EVERY is masked differs between windows."""
    from transformers import BertConfig, BertForMaskedLM

    text, _ = parts(BOOKS[0])
    config = BertConfig(
        vocab_size=len(alphabet()) + 1,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=256,
        max_position_embeddings=MASKED,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        initializer_range=0.05,  # of the usual 0.02 it learns nothing but frequencies for thousands of steps
    )
    model = BertForMaskedLM(config)

    def loss(generator: torch.Generator) -> Tensor:
        windows = cut(text, torch.randint(len(text) - MASKED, (BATCH,), generator=generator), MASKED)
        first = torch.randint(MASK_EVERY, (BATCH, 1), generator=generator)
        hidden = torch.arange(MASKED) % MASK_EVERY == first
        logits = model(windows.masked_fill(hidden, len(alphabet()))).logits
        return F.cross_entropy(logits[hidden], windows[hidden])

    fit(model, loss, steps, rate)
    return model


def train(name: str) -> nn.Module:
    torch.manual_seed(SEED)
    if name in LANGUAGE:
        return language_model(name)
    return classifier() if name == "book-classifier" else masked_model()


def save(model: Any, folder: Path) -> None:
    """A Hugging Face folder; of the classifier its weights alone."""
    if hasattr(model, "save_pretrained"):
        model.save_pretrained(folder)
        return
    folder.mkdir(parents=True, exist_ok=True)
    save_file({k: v.contiguous() for k, v in model.state_dict().items()}, str(folder / "model.safetensors"))


# What is measured


def load(folder: Path, name: str) -> nn.Module:
    """One of the models, as a TransformerLens model.

    Raises:
        SystemExit: it has not been trained.
    """
    import ln_probe
    from ln_probe.loading.verify import bridged

    path = folder / name
    if not (path / "model.safetensors").is_file():
        raise SystemExit(f"there is no {path}: run python bench/foreign_models.py {folder} {name}")
    if name in LANGUAGE:
        return ln_probe.load_model(path)
    if name == "book-classifier":
        model: nn.Module = untrained_classifier().eval()
        model.load_state_dict(load_file(str(path / "model.safetensors")))
        return model
    from transformers import BertForMaskedLM

    return bridged(BertForMaskedLM.from_pretrained(path).eval())


@dataclass(frozen=True)
class Measured:
    """Two sets of prompts of the same kind, no window of one overlapping one of the other.

    Attributes:
        prompts: those that are measured.
        others: those that constants are taken from.
        loss: of a model's output and the token ids [batch pos], the mean of each prompt; None: the next-token loss.
    """

    prompts: list[list[int]]
    others: list[list[int]]
    loss: Callable[[Any, Tensor], Tensor] | None = None


def measured(name: str, count: int) -> Measured:
    """The prompts of a model from the end of its books: `count` that are measured, alternating with as many others."""
    if name in LANGUAGE:
        spec = LANGUAGE[name]
        _, text = parts(spec.book)
        rows = cut(text, spread(line_starts(text, spec.tokens), 2 * count, spec.tokens), spec.tokens).tolist()
        return Measured(rows[::2], rows[1::2])
    if name == "book-classifier":
        labelled = list(_labelled(2 * count))
        labels = {tuple(row): label for row, label in labelled}
        rows = [row for row, _ in labelled]

        def of_last(output: Tensor, tokens: Tensor) -> Tensor:
            books = torch.tensor([labels[tuple(row)] for row in tokens.tolist()], device=output.device)
            return F.cross_entropy(output[:, -1].float(), books, reduction="none")

        return Measured(rows[::2], rows[1::2], of_last)
    _, text = parts(BOOKS[0])
    windows = cut(text, spread(torch.arange(len(text) - MASKED), 2 * count, MASKED), MASKED)
    hidden = torch.arange(MASKED) % MASK_EVERY == MASK_AT
    masked = windows.masked_fill(hidden, len(alphabet()))
    originals = {tuple(row): window for row, window in zip(masked.tolist(), windows, strict=True)}

    def of_masked(output: Tensor, tokens: Tensor) -> Tensor:
        wanted = torch.stack([originals[tuple(row)] for row in tokens.tolist()]).to(output.device)
        losses = F.cross_entropy(output[:, hidden].float().transpose(1, 2), wanted[:, hidden], reduction="none")
        return losses.mean(1)

    return Measured(masked.tolist()[::2], masked.tolist()[1::2], of_masked)


def _labelled(count: int) -> Iterator[tuple[list[int], int]]:
    """Windows of the three books in turn, and which book each is from; two neighbours go to the two sets of prompts."""
    of_book = []
    for book in BOOKS:
        _, text = parts(book)
        starts = spread(torch.arange(len(text) - CLASSIFIED), -(-count // len(BOOKS)) + 1, CLASSIFIED)
        of_book.append(cut(text, starts, CLASSIFIED).tolist())
    for number in range(count):
        pair, second = divmod(number, 2)
        label = pair % len(BOOKS)
        yield of_book[label][2 * (pair // len(BOOKS)) + second], label


def main(folder: Path, names: Annotated[list[str] | None, typer.Argument(help=", ".join(NAMES))] = None) -> None:
    if unknown := set(names or ()) - set(NAMES):
        raise SystemExit(f"no model called {', '.join(sorted(unknown))}; there are {', '.join(NAMES)}")
    torch.set_num_threads(1)
    for name in names or NAMES:
        print(name, flush=True)
        save(train(name), folder / name)


if __name__ == "__main__":
    typer.run(main)
