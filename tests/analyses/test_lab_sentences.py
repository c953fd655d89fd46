"""Models of tables 3 and 4 read on sentences: which sentences, which models, what is compared, and a run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
import torch
from torch import nn

from ln_probe.analyses.lab.experiments import Request
from ln_probe.analyses.lab.language_model import encoder, published_language_model, sentences
from ln_probe.analyses.lab.language_model.published_language_model import FRACTION, HEAD, LOSS, NORMALIZED
from ln_probe.analyses.lab.norms import Norm
from ln_probe.analyses.lab.text_task import TextTask

SPOKEN = "The ships came home , 3.5 days late . Who saw them ? No one @-@ or so they say !\n\n = A heading = \n\n"


@pytest.fixture(scope="module")
def prose_in_sentences(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("text") / "sentences.txt"
    file.write_text(SPOKEN * 400)
    return file


def test_sentences_are_whole_short_and_of_the_held_out_text(prose_in_sentences: Path) -> None:
    text = TextTask([prose_in_sentences], 280, 20, valid_windows=2)
    found = sentences.sentences(text, 9)
    said = {text.tokenizer.decode(one[1:].tolist()) for one in found}
    assert said == {"The ships came home , 3.5 days late .", "Who saw them ?", "No one @-@ or so they say !"}
    assert all(int(one[0]) == text.boundary for one in found)
    with pytest.raises(ValueError, match=r"the held-out text has \d+ sentences and 900 are read: give more text"):
        sentences.sentences(text, 900)
    prose_in_sentences.with_name("long.txt").write_text("and on " * 4000 + ". " + "and on " * 500 + "." + SPOKEN * 9)
    long = TextTask([prose_in_sentences.with_name("long.txt")], 257, 20, valid_windows=2)
    assert max(map(len, sentences.sentences(long, 9))) <= sentences.LONGEST


def test_the_models_of_both_tables(prose_in_sentences: Path, tmp_path: Path) -> None:
    runs = sentences.make_runs(Request(tmp_path, (0,), quick=True, texts=(prose_in_sentences,)))
    models = {(run.keys["shape"], run.keys["norm"]): run.spec.build() for run in runs}
    bare = models["encoder", "identity"]
    assert not any(isinstance(part, Norm | nn.LayerNorm) for part in bare.modules())
    assert bare.blocks[0].mlp.W_in.shape == (8, 3072)
    assert bare.blocks[3].attn.W_K.shape == (4, 8, 2)
    norms = [part for part in models["encoder", "layernorm"].modules() if isinstance(part, Norm)]
    assert len(norms) == 9
    unscaled = models["decoder", "projection_only"]
    assert [block.ln1.kind for block in unscaled.blocks] == ["projection_only"] * 4
    assert {float(block.ln1.divisor) for block in unscaled.blocks} == {1.0}
    weights = [models["encoder", norm].blocks[2].attn.W_Q for norm in ("identity", "layernorm")]
    assert weights[0].shape == weights[1].shape
    tokens = torch.arange(12)[None]
    _, cache = bare.run_with_cache(tokens)
    places = encoder.key_places()
    for layer in range(4):  # nothing stands between the stream and what attention reads
        torch.testing.assert_close(cache[places[layer, "before the norm"]], cache[places[layer, NORMALIZED]])


def test_what_is_compared() -> None:
    shares = {  # shape, norm, space: of two layers
        ("decoder", "projection_only", NORMALIZED): (0.1, 0.2), ("decoder", "projection_only", HEAD): (0.8, 0.9),
        ("decoder", "projection_only", sentences.LONG): (0.3, 0.5), ("decoder", "layernorm", HEAD): (0.7, 0.9),
        ("encoder", "identity", HEAD): (0.6, 0.6), ("encoder", "layernorm", HEAD): (0.5, 0.5),
    }  # fmt: skip
    rows = [
        (shape, norm, 9, layer, space, FRACTION, seed, share[layer] + 0.01 * seed)
        for (shape, norm, space), share in shares.items() for layer in (0, 1) for seed in (0, 1)
    ]  # fmt: skip
    rows += [
        ("encoder", norm, 9, -1, "-", LOSS, s, 5 + (norm == "identity"))
        for norm in ("identity", "layernorm")
        for s in (0, 1)
    ]
    values = pd.DataFrame(rows, columns=[*sentences.KEYS, "seed", "value"])
    found = sentences.findings(values, {})
    table = found.tables["effects"].set_index(["shape", "space"])
    assert table["mean"].to_dict() == pytest.approx(
        {("decoder", HEAD): 0.05, ("decoder", NORMALIZED): -0.25, ("encoder", HEAD): 0.1, ("encoder", "-"): 1.0}
    )
    assert table.loc[("decoder", NORMALIZED), "minus"] == sentences.LONG


@pytest.mark.slow
def test_a_run_of_the_experiment(prose_in_sentences: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = {"d_vocab": 300, "n_ctx": 24, "batch": 2, "steps": 5, "valid_windows": 4}
    monkeypatch.setattr(published_language_model, "TINY", replace(published_language_model.TINY, **small))
    monkeypatch.setattr(encoder, "TINY", replace(encoder.TINY, **small))
    monkeypatch.setattr(sentences, "LONGEST", 20)
    request = Request(tmp_path, (0, 1), quick=True, texts=(prose_in_sentences,), progress=False)
    found = sentences.run(request)
    assert set(found.summary["seeds"]) == {2}
    rows = found.summary.set_index(["shape", "norm", "layer", "space"])
    assert {
        rows.loc[(shape, "layernorm", layer, NORMALIZED), "mean"]
        for shape in ("decoder", "encoder")
        for layer in range(4)
    } == {0.0}
    assert len(found.tables["effects"]) == 5
    sentences.run(replace(request, collect=True))
