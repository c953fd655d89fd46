"""Data and scripts inside a page: nothing in them can end the element they stand in, and they arrive as they left."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import zlib
from typing import Any

import numpy as np
import pytest

from ln_probe import page as payload
from ln_probe.page import attention, circuitsvis_script, own_script, packed, policy


def unpacked(text: str) -> Any:
    """What unpack.js does, written again."""
    raw = zlib.decompress(base64.b64decode(text))
    length = int.from_bytes(raw[:4], "little")
    kinds = {"Uint8Array": np.uint8, "Uint16Array": np.uint16, "Int32Array": np.int32, "Float32Array": np.float32}

    def array(value: dict[str, Any]) -> Any:
        if "$" not in value:
            return value
        start = 4 + length + value["at"]
        kind = np.dtype(kinds[value["$"]])
        assert start % kind.itemsize == 0
        return np.frombuffer(raw, kind, value["n"], start)

    return json.loads(raw[4 : 4 + length], object_hook=array)


def test_what_is_packed_arrives(hostile: list[str]) -> None:
    sent = {
        "text": hostile,
        "none": None,
        "yes": True,
        "nan": float("nan"),
        "n": np.int64(3),
        "x": np.float32(0.5),
        "u": np.arange(5, dtype=np.uint8),
        "h": np.array([0.5, np.nan], np.float16),
        "i": np.arange(3),
        "f": np.array([[1.5, -2.0]]),
        "nested": [{"a": (1, 2)}, np.arange(7, dtype=np.uint8)],
    }
    found = unpacked(packed(sent))
    assert found["text"] == hostile
    assert (found["none"], found["yes"], found["nan"], found["n"], found["x"]) == (None, True, None, 3, 0.5)
    assert found["u"].tolist() == [0, 1, 2, 3, 4]
    assert found["h"].view(np.float16)[0] == 0.5
    assert np.isnan(found["h"].view(np.float16)[1])
    assert found["i"].tolist() == [0, 1, 2]
    assert found["f"].tolist() == [1.5, -2.0]
    assert found["nested"][0] == {"a": [1, 2]}
    assert found["nested"][1].tolist() == list(range(7))


def test_nothing_that_is_packed_can_leave_its_place(hostile: list[str]) -> None:
    assert re.fullmatch(r"[A-Za-z0-9+/=]+", packed(hostile))


def test_what_cannot_be_sent_is_named() -> None:
    with pytest.raises(TypeError, match="cannot send set to a page"):
        packed({"a": {1}})
    with pytest.raises(TypeError, match="cannot send an array of <U1 to a page"):
        packed(np.array(["a"]))


def test_scripts_cannot_end_their_element() -> None:
    for script in (circuitsvis_script(), own_script("unpack.js", "attention.js"), own_script("unpack.js", "page.js")):
        assert not re.search(r"</script|<script|<!--", script, re.IGNORECASE)
    assert "CircuitsVis" in circuitsvis_script()
    assert len(circuitsvis_script()) > 1_000_000


def test_a_policy_names_scripts_by_hash_and_lets_nothing_be_fetched() -> None:
    script = "let a = 1;"
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}';" in policy(script)
    assert policy().startswith("default-src 'none'; script-src 'none';")
    assert "unsafe-inline" not in policy(script).split("style-src")[0]
    assert "http" not in policy(script)


def test_a_circuitsvis_without_its_bundle_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    circuitsvis_script.cache_clear()
    monkeypatch.setattr(payload, "find_spec", lambda _name: None)
    with pytest.raises(FileNotFoundError, match=r"circuitsvis has no dist/cdn/iife\.js.*pip install 'circuitsvis"):
        circuitsvis_script()


def test_hard_keys_are_the_hardest_that_nobody_can_give_the_greater_part(long_report: Any) -> None:
    shown = long_report.exhibits.of_prompt(0)
    marks = attention.marks(shown)
    value = shown.attainable.astype(float)
    for place in np.ndindex(*marks.shape[:2]):
        hard = marks[place] == attention.MARKS.index(attention.HARD)
        assert (value[place][hard] < attention.HARD_BELOW).all()
        assert hard.sum() <= np.ceil(attention.HARDEST_SHARE * marks.shape[-1])
        stuck = np.isin(shown.verdict[place], [1, 2])
        assert (marks[place][stuck] == attention.MARKS.index("unselectable")).all()
    assert (marks == 1).any()
