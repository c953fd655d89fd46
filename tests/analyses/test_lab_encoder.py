"""Encoders: BERT's forward pass, masks, unselectable keys by linear programs, passages of books, and sentences."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from lab_models import write_words

from ln_probe.analyses.lab.language_model.encoder import Encoder, Size, encoder_config
from ln_probe.analyses.lab.norms import calibrate
from ln_probe.analyses.lab.text_task import LONGEST, PassagesTask, TextTask, masked, plain_words, sentences

SIZE = Size(d_vocab=280, n_ctx=20, batch=2, steps=4, valid_windows=4, contexts=2, sentences=4)


def shaken(norm: str, size: Size = SIZE, shape: str = "narrow") -> Encoder:
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
    return TextTask(books, SIZE.d_vocab, SIZE.n_ctx, valid_windows=6)


def test_the_encoder_is_bert() -> None:
    """The same weights in transformers' BertModel give the same stream."""
    from transformers import BertConfig, BertModel

    model = shaken("layernorm")
    theirs = BertModel(
        BertConfig(
            vocab_size=SIZE.d_vocab + 1, hidden_size=8, num_hidden_layers=4, num_attention_heads=4,
            intermediate_size=32, max_position_embeddings=SIZE.n_ctx, layer_norm_eps=1e-5,
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
    tokens = torch.randint(SIZE.d_vocab, (3, SIZE.n_ctx), generator=torch.Generator().manual_seed(1))
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
