"""Models of tables 3 and 4 read on sentences: which sentences, which models, what is compared, and a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from ln_probe.analyses.lab.language_model import sentences
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
