"""Language models and encoders: texts, logits in pieces, BERT's forward pass, masks, passages, norms taken out."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from lab_models import write_words

from ln_probe.analyses.lab import text_task
from ln_probe.analyses.lab.language_model import encoder, remove_norm
from ln_probe.analyses.lab.language_model.encoder import Encoder, encoder_config
from ln_probe.analyses.lab.language_model.published import Size, published_model
from ln_probe.analyses.lab.norms import Norm, calibrate
from ln_probe.analyses.lab.text_task import (
    LARGE_VOCABULARY,
    LONGEST,
    PassagesTask,
    TextTask,
    masked,
    piecewise_loss,
    plain_words,
    sentences,
)
from ln_probe.analyses.lab.transformer import LabConfig

SIZE = Size(d_vocab=300, n_ctx=24, batch=2, steps=4, valid_windows=4)


@pytest.mark.parametrize("bias", [True, False])
def test_logits_in_pieces(bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_task, "PIECE", 7)
    torch.manual_seed(0)
    model = replace(published_model("layernorm", None, SIZE), bias_unembed=bias).build().double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    tokens = torch.randint(300, (3, 24))
    whole, parts = model(tokens, return_type="loss"), piecewise_loss(model, tokens)
    of_task = TextTask.loss(cast("TextTask", SimpleNamespace(d_vocab=LARGE_VOCABULARY)), model, tokens)
    assert parts.item() == of_task.item() == pytest.approx(whole.item(), rel=1e-12)
    wanted, got = (torch.autograd.grad(loss, list(model.parameters())) for loss in (whole, parts))
    for a, b in zip(wanted, got, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


def test_the_end_of_every_text_is_held_out(prose: Path, tmp_path: Path) -> None:
    (tmp_path / "other.txt").write_text("Another “text”, 4000 letters long. " * 120)
    files = [prose, tmp_path / "other.txt"]
    text = text_task.TextTask(files, 300, 16)
    cut = [int(0.95 * len(file.read_text())) for file in files]
    parts = [(file.read_text()[:at], file.read_text()[at:]) for file, at in zip(files, cut, strict=True)]
    for number, tokens in enumerate((text.train_tokens, text.valid_tokens)):
        assert text.tokenizer.decode(tokens.tolist()) == "".join(part[number] for part in parts)
    assert text.boundary == 0
    assert text.tokenizer.get_vocab_size() == 300
    batch = text.batch(3, 50, 1)
    assert batch.shape == (50, 16)
    assert (batch[:, 0] == 0).all()
    windows = text.train_tokens.unfold(0, 15, 1)
    assert all(bool((windows == row).all(1).any()) for row in batch[:, 1:])
    assert torch.equal(text.batch(3, 50, 1), batch)
    assert not torch.equal(text.batch(4, 50, 1), batch)
    assert not torch.equal(text.batch(3, 50, 2), batch)


TINY = encoder.Size(d_vocab=280, n_ctx=20, batch=2, steps=4, valid_windows=4, contexts=2, sentences=4)


def shaken(norm: str, size: encoder.Size = TINY, shape: str = "narrow") -> Encoder:
    """An encoder whose every weight counts."""
    torch.manual_seed(0)
    model = encoder_config(shape, norm, size).build().double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    with calibrate(model):
        model(torch.arange(size.n_ctx)[None], return_type=None)
    return model


@pytest.fixture(scope="module")
def books(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two books without a word in common."""
    folder = tmp_path_factory.mktemp("books")
    return (
        write_words(folder / "sea.txt", ("the ships", "came home", "in fog"), 1500),
        write_words(folder / "bread.txt", ("oven; 12", "DOUGH", "warm crust"), 1500),
    )


@pytest.fixture(scope="module")
def text(books: tuple[Path, Path]) -> TextTask:
    return TextTask(books, TINY.d_vocab, TINY.n_ctx, valid_windows=6)


def test_the_encoder_is_bert() -> None:
    """The same weights in transformers' BertModel give the same stream."""
    from transformers import BertConfig, BertModel

    model = shaken("layernorm")
    theirs = BertModel(
        BertConfig(
            vocab_size=TINY.d_vocab + 1, hidden_size=8, num_hidden_layers=4, num_attention_heads=4,
            intermediate_size=32, max_position_embeddings=TINY.n_ctx, layer_norm_eps=1e-5,
            hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        ),
        add_pooling_layer=False,
    ).double().eval()  # fmt: skip
    weights = {
        "embeddings.word_embeddings.weight": model.embed.W_E,
        "embeddings.position_embeddings.weight": model.pos_embed.W_pos,
    }
    for i, block in enumerate(model.blocks):
        at, attn = f"encoder.layer.{i}", block.attn
        for name, W, b in (("query", attn.W_Q, attn.b_Q), ("key", attn.W_K, attn.b_K), ("value", attn.W_V, attn.b_V)):
            weights[f"{at}.attention.self.{name}.weight"] = W.transpose(1, 2).reshape(8, 8)
            weights[f"{at}.attention.self.{name}.bias"] = b.flatten()
        weights |= {
            f"{at}.attention.output.dense.weight": attn.W_O.flatten(0, 1).T,
            f"{at}.attention.output.dense.bias": attn.b_O,
            f"{at}.intermediate.dense.weight": block.mlp.W_in.T, f"{at}.intermediate.dense.bias": block.mlp.b_in,
            f"{at}.output.dense.weight": block.mlp.W_out.T, f"{at}.output.dense.bias": block.mlp.b_out,
            f"{at}.attention.output.LayerNorm.weight": block.ln1.w,
            f"{at}.attention.output.LayerNorm.bias": block.ln1.b,
        }  # fmt: skip
    weights["encoder.layer.3.output.LayerNorm.weight"] = model.blocks[3].ln2.w
    weights["encoder.layer.3.output.LayerNorm.bias"] = model.blocks[3].ln2.b
    with torch.no_grad():
        theirs.embeddings.token_type_embeddings.weight.zero_()  # one segment
    found = theirs.load_state_dict(weights, strict=False)
    assert not found.unexpected_keys
    assert {name.rsplit(".", 2)[-2] for name in found.missing_keys} <= {
        "LayerNorm",
        "token_type_embeddings",
        "embeddings",
    }
    tokens = torch.randint(TINY.d_vocab, (3, TINY.n_ctx), generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(model.stream(tokens), theirs(tokens).last_hidden_state, rtol=1e-9, atol=1e-9)


def test_masks_hide_what_they_say() -> None:
    windows = torch.randint(500, (400, 101), generator=torch.Generator().manual_seed(0))
    made = masked(windows, 500, torch.Generator().manual_seed(1))
    assert made.places.shape == (400, 15)
    assert int(made.places.min()) >= 1, "the boundary is never chosen"
    assert all(len(set(row)) == 15 for row in made.places.tolist())
    chosen = torch.zeros_like(windows, dtype=torch.bool).scatter(1, made.places, True)
    assert torch.equal(made.tokens[~chosen], windows[~chosen])
    assert torch.equal(windows.gather(1, made.places), made.targets)
    seen = made.tokens.gather(1, made.places)
    shares = [float((seen == 500).double().mean()), float((seen == made.targets).double().mean())]
    assert shares == pytest.approx([0.8, 0.1 + 0.1 / 500], abs=5 * (0.8 * 0.2 / 6000) ** 0.5)
    again = masked(windows, 500, torch.Generator().manual_seed(1))
    assert torch.equal(again.tokens, made.tokens)


def test_passages_come_from_their_books(books: tuple[Path, Path], text: TextTask, tmp_path: Path) -> None:
    task = PassagesTask(books, text, 8, 6)
    (batch, of), (held, of_held) = task.batch(1, 6, seed=0), task.held_out()
    assert of.tolist() == [0, 1] * 3
    assert held.shape == (12, 9)
    for tokens, book in zip((*batch, *held), (*of, *of_held), strict=True):
        assert int(tokens[0]) == text.boundary
        said, own = (text.tokenizer.decode(tokens[1:].tolist()), plain_words(books[int(book)].read_text()))
        assert said in own
    task.train_tokens = [tokens[: task.length] for tokens in task.train_tokens]
    assert len(task.batch(1, 8, seed=0)[0].unique(dim=0)) == 2, "of a text that is one passage long, that one"
    with pytest.raises(ValueError, match="2 texts"):
        PassagesTask(books[:1], text, 8, 4)
    (tmp_path / "short.txt").write_text("few words")
    with pytest.raises(ValueError, match=r"short\.txt"):
        PassagesTask((books[0], tmp_path / "short.txt"), text, 8, 4)


SPOKEN = "The ships came home , 3.5 days late . Who saw them ? No one @-@ or so they say !\n\n = A heading = \n\n"


@pytest.fixture(scope="module")
def prose_in_sentences(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("text") / "sentences.txt"
    file.write_text(SPOKEN * 400)
    return file


def test_sentences_are_whole_short_and_of_the_held_out_text(prose_in_sentences: Path) -> None:
    text = TextTask([prose_in_sentences], 280, 20, valid_windows=2)
    found = sentences(text, 9)
    said = {text.tokenizer.decode(one[1:].tolist()) for one in found}
    assert said == {"The ships came home , 3.5 days late .", "Who saw them ?", "No one @-@ or so they say !"}
    assert all(int(one[0]) == text.boundary for one in found)
    with pytest.raises(ValueError, match="900"):
        sentences(text, 900)
    prose_in_sentences.with_name("long.txt").write_text("and on " * 4000 + ". " + "and on " * 500 + "." + SPOKEN * 9)
    long = TextTask([prose_in_sentences.with_name("long.txt")], 257, 20, valid_windows=2)
    assert max(map(len, sentences(long, 9))) <= LONGEST


def test_each_stage_by_its_formula() -> None:
    torch.manual_seed(0)
    norm = Norm("layernorm", 8)
    assert norm.w is not None
    assert norm.b is not None
    torch.nn.init.normal_(norm.w)
    torch.nn.init.normal_(norm.b)
    made = remove_norm.ReplaceableNorm(norm)
    batches = [torch.randn(3, 5, 8) * torch.tensor([9.0, 1, 1, 1, 1])[:, None] for _ in range(3)]
    for x in batches:
        torch.testing.assert_close(made(x), norm(x))
    # The running means, by hand: the first three batches count alike, for their weights 1, 1/2, 1/3 are over MEMORY.
    sigma = torch.stack([(x.var(-1, correction=0) + 1e-5).sqrt() for x in batches])
    torch.testing.assert_close(made.first, sigma[..., 0].mean())
    torch.testing.assert_close(made.rest, sigma[..., 1:].mean())
    x = batches[0]
    projected = x - x.mean(-1, keepdim=True)
    made.stage.fill_(remove_norm.ONE_CONSTANT)
    torch.testing.assert_close(made(x), projected / made.rest * norm.w + norm.b)
    made.stage.fill_(remove_norm.TWO_CONSTANTS)
    divisor = torch.stack([made.first, *[made.rest] * 4])[:, None]
    torch.testing.assert_close(made(x), projected / divisor * norm.w + norm.b)
    batches_before = int(made.batches)
    made(x)
    assert int(made.batches) == batches_before, "a constant is no longer followed"


def test_norms_go_one_by_one() -> None:
    """Norms of MLPs first, then attention's, then the final one; their first positions join after all are gone."""
    model = LabConfig(n_layers=2, d_model=8, n_heads=2, d_vocab=9, n_ctx=4).build()
    for block in model.blocks:
        block.ln1, block.ln2 = remove_norm.ReplaceableNorm(block.ln1), remove_norm.ReplaceableNorm(block.ln2)
    model.ln_final = remove_norm.ReplaceableNorm(model.ln_final)
    one, two = model.blocks
    norms, schedule = remove_norm.replaceable_norms(model), remove_norm.Schedule(3, 4, 2)
    assert norms == [one.ln2, two.ln2, one.ln1, two.ln1, model.ln_final]
    assert schedule.replaced(5) == 23
    for step in range(36):
        schedule.set_stages(norms, step)
        expected = [(step >= 3 + 4 * i) + (step >= 23 + 2 * i) for i in range(5)]
        assert [int(norm.stage) for norm in norms] == expected, step
