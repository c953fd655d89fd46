"""Encoders: BERT's forward pass, masks, unselectable keys by linear programs, and passages of books."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from lab_models import is_interior, write_words

from ln_probe.analyses.lab.experiments import Request, find
from ln_probe.analyses.lab.language_model import encoder, encoder_passages
from ln_probe.analyses.lab.language_model.encoder import (
    Encoder,
    EncoderConfig,
    Size,
    effects_of_terms,
    encoder_config,
    key_places,
)
from ln_probe.analyses.lab.language_model.encoder_passages import (
    ClassifierSpec,
    PassagesTask,
    Tuning,
    costs,
    plain_words,
)
from ln_probe.analyses.lab.language_model.published_language_model import (
    BEFORE,
    FRACTION,
    HEAD,
    LOSS,
    NORMALIZED,
    unselectable_keys,
)
from ln_probe.analyses.lab.norms import calibrate
from ln_probe.analyses.lab.run_folder import save_model
from ln_probe.analyses.lab.text_task import MaskedTextTask, TextTask, masked
from ln_probe.analyses.lab.train import TrainConfig, train

SIZE = Size(d_vocab=280, n_ctx=20, batch=2, steps=4, valid_windows=4, contexts=2)
TUNING = Tuning(length=8, batch=4, steps=2, held_out=6)


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


# ------------------------------------------------------------------------------------------------------- the encoder


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


def test_only_what_attention_reads_differs() -> None:
    made = {norm: shaken(norm) for norm in encoder.NORMS}
    for norm, model in made.items():
        norms = [model.ln_embed, *(block.ln2 for block in model.blocks), *(block.ln1 for block in model.blocks)]
        read, others = encoder.NORMS[norm]
        assert [getattr(site, "kind", None) for site in norms] == [read] * 4 + [others] * 5
        assert getattr(model.ln_embed, "w", None) is None
        for name, weight in made["layernorm"].named_parameters() if read else ():
            torch.testing.assert_close(dict(model.named_parameters())[name], weight, rtol=0, atol=0)
    places = key_places()
    assert places[2, BEFORE] == "blocks.1.hook_resid_post"
    _, cache = made["layernorm"].run_with_cache(torch.arange(SIZE.n_ctx)[None])
    for layer, normed in enumerate(("ln_embed", *(f"blocks.{i}.ln2" for i in range(3)))):
        torch.testing.assert_close(cache[places[layer, NORMALIZED]], cache[f"{normed}.hook_normalized"])
    good = encoder_config("wide", "layernorm", SIZE)
    with pytest.raises(ValueError, match="an encoder has causal=False, got True"):
        replace(good, causal=True)
    with pytest.raises(ValueError, match="unknown norm_read 'rms': known norms are layernorm"):
        replace(good, norm_read="rms")
    assert EncoderConfig(**good.to_dict()) == good


def test_unselectable_keys_by_linear_programs() -> None:
    size = replace(SIZE, n_ctx=18)
    model = shaken("projection_only", size)
    tokens = torch.randint(SIZE.d_vocab, (1, 18), generator=torch.Generator().manual_seed(2))
    found = {(layer, space): value for layer, space, value in unselectable_keys(model, tokens, key_places())}
    _, cache = model.run_with_cache(tokens)
    heads = cache["blocks.1.attn.hook_k"][0].transpose(0, 1).numpy()
    share = np.mean([is_interior(keys, i) for keys in heads for i in range(18)])
    assert found[1, HEAD] == pytest.approx(share)
    assert 0.3 < share < 1
    before = cache["blocks.0.hook_resid_post"][0].numpy()
    assert found[1, BEFORE] == pytest.approx(np.mean([is_interior(before, i) for i in range(18)]))
    on_sphere = unselectable_keys(shaken("layernorm", size), tokens, key_places())
    scaled = {(layer, space): value for layer, space, value in on_sphere}
    assert [scaled[layer, NORMALIZED] for layer in range(4)] == [0.0] * 4  # on a sphere


# ------------------------------------------------------------------------------------------------------------- masks


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


def test_the_masked_loss_by_hand(text: TextTask) -> None:
    task, model = MaskedTextTask(text), shaken("layernorm")
    batch = task.batch(3, 4, seed=7)
    assert torch.equal(task.batch(3, 4, seed=7).tokens, batch.tokens)
    assert not torch.equal(task.batch(3, 4, seed=8).places, batch.places)
    logs = model(batch.tokens).log_softmax(-1).detach()
    losses = [-float(logs[i, p, t]) for i in range(4) for p, t in zip(batch.places[i], batch.targets[i], strict=True)]
    assert float(task.loss(model, batch).detach()) == pytest.approx(np.mean(losses), rel=1e-9)
    assert task.evaluate(model) == task.evaluate(model)
    counts = {t: text.train_tokens.tolist().count(t) + 1 for t in range(SIZE.d_vocab)}
    held = task.held_out(6).targets.flatten().tolist()
    assert task.unigram_loss() == pytest.approx(-np.mean([np.log(counts[t] / sum(counts.values())) for t in held]))


def test_effects_are_paired_by_seed_and_averaged_over_layers() -> None:
    norms, seeds = ("layernorm", "projection_only"), (0, 1, 2)
    rows = [("wide", norm, 9, -1, "-", LOSS, seed, 5.0) for norm in norms for seed in seeds]
    for norm, effect in zip(norms, (0.0, 0.2), strict=True):
        for layer in (0, 1):
            for seed in seeds:
                share = 0.1 * layer + 0.05 * seed + (effect + 0.01 * seed if effect else 0)
                rows.append(("wide", norm, 9, layer, HEAD, FRACTION, seed, share))
    values = pd.DataFrame(rows, columns=["shape", "norm", "step", "layer", "space", "measure", "seed", "value"])
    found = effects_of_terms(values, 9).set_index("measure")
    assert found.loc[FRACTION, ["mean", "sd", "seeds"]].tolist() == pytest.approx([0.21, 0.01, 3])
    assert found.loc[LOSS, "mean"] == 0
    assert found.loc[LOSS, "p_holm"] == 1
    assert effects_of_terms(values, 8).empty


# ---------------------------------------------------------------------------------------------------------- passages


def test_words_that_are_left() -> None:
    assert plain_words("1. In the Beginning [was]—\nFIRST LORD.\nI’ll go; 2.") == "in the beginning was i'll go"


def test_passages_come_from_their_books(books: tuple[Path, Path], text: TextTask, tmp_path: Path) -> None:
    task = PassagesTask(books, text, TUNING.length, TUNING.held_out)
    batch, held = task.batch(1, 6, seed=0), task.held_out()
    assert batch.books.tolist() == [0, 1] * 3
    assert held.tokens.shape == (12, 9)
    for tokens, book in zip((*batch.tokens, *held.tokens), (*batch.books, *held.books), strict=True):
        assert int(tokens[0]) == text.boundary
        said, own = (text.tokenizer.decode(tokens[1:].tolist()), plain_words(books[int(book)].read_text()))
        assert said in own
    assert task.counted_accuracy() == 1, "no token of one book is in the other"
    with pytest.raises(ValueError, match="give at least 2 texts, not 1"):
        PassagesTask(books[:1], text, 8, 4)
    (tmp_path / "short.txt").write_text("few words")
    with pytest.raises(ValueError, match=r"short\.txt is too short: \d+ tokens in a part, a passage has 8"):
        PassagesTask((books[0], tmp_path / "short.txt"), text, 8, 4)


def test_a_classifier_starts_as_its_encoder(books: tuple[Path, Path], text: TextTask, tmp_path: Path) -> None:
    """Constants included: they are not measured again on the passages."""
    trained = shaken("projection_only").float()
    save_model(trained, tmp_path / "model.safetensors")
    spec = ClassifierSpec(encoder_config("narrow", "projection_only", SIZE), tmp_path / "model.safetensors", 2)
    task = PassagesTask(books, text, TUNING.length, TUNING.held_out)
    tokens = task.held_out().tokens
    torch.testing.assert_close(spec.build().encoder.stream(tokens), trained.stream(tokens))
    tuned = train(task, spec, TrainConfig(steps=30, batch=8, lr=1e-2, warmup=0), tmp_path / "run", progress=False)
    assert float(tuned.encoder.ln_embed.divisor) == float(trained.ln_embed.divisor)
    assert not torch.equal(tuned.encoder.embed.W_E, trained.embed.W_E), "all of it is fine-tuned"
    assert task.evaluate(tuned)["valid_accuracy"] > 0.9
    with torch.no_grad():
        trained.embed.W_E.add_(1)
    before = spec.to_dict()["start"]
    save_model(trained, tmp_path / "model.safetensors")
    assert spec.to_dict()["start"] != before


def test_costs_are_paired_by_seed() -> None:
    rows = [
        ("wide", norm, 9, "valid_accuracy", s, 0.8 + 0.01 * s - 0.1 * (norm != "layernorm"))
        for norm in (encoder.WHOLE, *encoder.LEFT_OUT)
        for s in (0, 1)
    ]
    found = costs(pd.DataFrame(rows, columns=["shape", "norm", "step", "measure", "seed", "value"]))
    assert found["mean"].tolist() == pytest.approx([-0.1] * 4)
    assert found["seeds"].tolist() == [2] * 4


@pytest.mark.slow
def test_both_experiments(books: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoder, "CELLS", (("narrow", "layernorm"), ("narrow", "projection_only")))
    request = Request(tmp_path / "a", (0, 1), quick=True, texts=books, progress=False)
    with pytest.raises(ValueError, match=r"holds none of these [0-9]+ runs: leave out --collect"):
        encoder.run(replace(request, collect=True), SIZE)
    found = encoder.run(request, SIZE)
    told = found.summary.set_index(["norm", "step", "layer", "space"])
    assert set(told["seeds"]) == {2}
    assert set(found.summary["step"]) == {0, 1, 4}
    assert told.loc[("layernorm", 4, 3, NORMALIZED), "mean"] == 0
    tuned = encoder_passages.run(request, SIZE, TUNING)  # in the same folder: the encoders are there
    assert {p.name for p in (request.out / "passages").iterdir()} == {p.name for p in (request.out / "runs").iterdir()}
    assert set(tuned.tables["effects"]["norm"]) == {"projection_only"}
    with pytest.raises(ValueError, match="give at least 2 texts, not 1"):
        encoder_passages.run(replace(request, texts=books[:1]), SIZE, TUNING)
    assert find("encoder").needs_text
    assert find("encoder_passages").needs_text
