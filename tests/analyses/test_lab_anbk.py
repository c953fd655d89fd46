"""Words a^n b^2n and their tags as released, what is compared, and a run."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest
import torch
from lab_runs import ran

from ln_probe.analyses.lab.counting import anbk
from ln_probe.analyses.lab.counting.anbk import ABSOLUTE, TAGS, THRESHOLD, AnbkTask, findings, tagged_words
from ln_probe.analyses.lab.train import PAD


@pytest.mark.parametrize(
    ("n", "form", "word", "tags"),
    [
        (2, ABSOLUTE, "aabbbb", "000110"),
        (4, ABSOLUTE, "aaaabbbbbbbb", "000000111100"),
        (2, THRESHOLD, "aabbbb", "000111"),
        (4, THRESHOLD, "aaaabbbbbbbb", "000000111111"),
    ],
)
def test_words_and_tags(n: int, form: str, word: str, tags: str) -> None:
    tokens, labels = tagged_words(torch.tensor([n, 6]), form)
    there = labels[0] != PAD
    assert "".join("ab"[int(t)] for t in tokens[0, there]) == word
    assert "".join(str(int(t)) for t in labels[0, there]) == tags
    assert tokens.shape == (2, 18)
    ones = float((labels == 1).sum() / (labels != PAD).sum())
    assert 1 - ones == pytest.approx(anbk.CONSTANT[form])


def test_a_batch_has_words_of_neighboring_lengths() -> None:
    task = AnbkTask(ABSOLUTE)
    tokens, tags = task.batch(3, 16, seed=1)
    lengths = (tags != PAD).sum(1)
    assert lengths.diff().tolist() == [6] * 15
    assert torch.equal(task.batch(3, 16, seed=1)[0], tokens)
    constant = torch.nn.Module()
    constant.forward = lambda words: torch.tensor([1.0, 0.0]).expand(*words.shape, 2)
    assert task.evaluate(constant) == pytest.approx({TAGS: 2 / 3, anbk.TRAINED_TAGS: 2 / 3, anbk.WORDS: 0})


def test_findings_by_hand() -> None:
    rows = [
        (form, 0.01, seed, 9, TAGS, 0.7 + 0.2 * (form == THRESHOLD) + 0.01 * seed)
        for form in (ABSOLUTE, THRESHOLD)
        for seed in (0, 1, 2)
    ]
    found = findings(pd.DataFrame(rows, columns=["form", "lr", "seed", "step", "measure", "value"]))
    assert found.tables["contrasts"]["mean"].tolist() == pytest.approx([0.2])


def test_a_run_from_end_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(anbk, "QUICK_UPDATES", 5)
    monkeypatch.setattr(anbk, "TRAINED", torch.arange(2, 40, 2))
    monkeypatch.setattr(anbk, "TESTED", torch.arange(40, 44, 2))
    found = ran("anbk", tmp_path / "anbk")
    assert set(found.summary["seeds"]) == {2}
    assert len(found.summary) == 2 * 2 * 3
    assert (tmp_path / "anbk" / "contrasts.csv").exists()
