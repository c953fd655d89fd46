"""The live widget: what it runs, what it shows in a browser, and what it says without anywidget; texts of one's own."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from architectures import hugging_face, make_bridge
from made_up import HOSTILE

import ln_probe
from ln_probe.exhibits import to_weights
from ln_probe.hooks import without
from ln_probe.notebook import LiveModel, _widget_class, next_tokens
from ln_probe.page import own_script

IDS = torch.arange(1, 13)


@pytest.fixture(scope="module")
def live() -> LiveModel:
    return LiveModel(make_bridge("gpt2"))


@pytest.mark.parametrize(
    ("scaling", "projection", "what"), [(True, False, "scaling"), (False, True, "projection"), (True, True, "both")]
)
def test_all_switches_are_the_model_without_a_term(scaling: bool, projection: bool, what: str, live: LiveModel) -> None:
    everything = list(live.groups)
    assert everything == ["layer 0", "layer 1", "final norm"]
    found, _ = live.run(IDS, everything if scaling else (), everything if projection else ())
    with without(live.model, what, sites="all"):
        expected = live.model(IDS[None], return_type="loss").item()
    assert found.loss == pytest.approx(expected, abs=1e-5)
    intact, notes = live.run(IDS)
    assert notes == {}
    assert intact.loss == pytest.approx(live.model(IDS[None], return_type="loss").item(), abs=1e-5)
    assert found.loss != intact.loss


def test_a_switch_of_one_layer_changes_it_and_what_follows(live: LiveModel) -> None:
    intact, _ = live.run(IDS)
    edited, _ = live.run(IDS, ["layer 1"])
    assert (edited.patterns[0] == intact.patterns[0]).all()
    assert (edited.patterns[1] != intact.patterns[1]).any()
    assert to_weights(intact.patterns).sum(-1) == pytest.approx(np.ones((2, 4, 12)), abs=0.02)
    rows = next_tokens(intact, edited, -1, str)
    best = int(intact.log_probs[-1].argmax())
    assert (str(best), pytest.approx(float(intact.log_probs[-1, best].exp()))) in [(n, p) for n, p, _ in rows]


def test_without_anywidget_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, live: LiveModel) -> None:
    monkeypatch.setitem(sys.modules, "anywidget", None)
    _widget_class.cache_clear()
    with pytest.raises(TypeError, match="text must be a text, got 3"):
        ln_probe.explore(live.model, 3)  # type: ignore[arg-type]
    with pytest.raises(ImportError, match=r"needs anywidget.*pip install 'ln-probe\[notebook\]'"):
        ln_probe.explore(live.model)
    _widget_class.cache_clear()


@pytest.mark.slow
def test_a_bundled_model_in_a_widget() -> None:
    model = ln_probe.load_model("lm-layernorm")
    widget = ln_probe.explore(model, "In the beginning")
    assert widget.intact["loss"] == widget.edited["loss"]
    before = widget.following
    widget.scaling = ["layer 0", "final norm"]
    assert widget.edited["loss"] != widget.intact["loss"]
    assert next(row[0] for row in before) in [row[0] for row in widget.following]
    assert before != widget.following
    widget.scaling = ["layer 9"]
    assert widget.problem.startswith("no norms are called 'layer 9': there are layer 0, ")
    widget.scaling = []
    widget.position = 99
    assert widget.problem.startswith("position 99 is not in a text of ")
    widget.position = 0
    assert widget.problem == ""
    widget.text = ""
    assert "an empty prompt" in widget.problem
    widget.text = "the king"
    assert widget.problem == ""
    assert len(widget.intact["patterns"]) == 4 * 16 * len(widget.intact["tokens"]) ** 2
    with pytest.raises(ValueError, match="an empty prompt"):
        ln_probe.explore(model, "")


# A page with the widget's script and a stand-in for the notebook's side, which keeps what was set.
PAGE = """<!DOCTYPE html><html lang="en"><meta charset="utf-8"><title>widget</title><style>%s</style><body><main></main>
<script type="module">%s
const held = %s, heard = {};
held.intact.patterns = new DataView(new Uint8Array(held.intact.patterns).buffer);
held.edited.patterns = new DataView(new Uint8Array(held.edited.patterns).buffer);
window.held = held;
render({ el: document.querySelector("main"), model: {
  get: (name) => held[name],
  set: (name, value) => { held[name] = value; heard[name]?.(); },
  save_changes: () => {}, on: (name, act) => { heard[name.slice(7)] = act; }, off: () => {} } });
</script></body></html>"""


def test_the_widget_in_a_browser(visit: Any) -> None:
    tokens = [t[:30] for t in HOSTILE if t.strip()][:12]
    n = len(tokens)
    causal = np.tril(np.ones((2, 2, n, n), np.uint8) * 90)
    causal[1, 1, 3, 2] = 200
    sent = {"layers": [0, 1], "heads": 2, "patterns": causal.ravel().tolist(), "loss": 4.0}
    state = {
        "text": tokens[0], "groups": ["layer 0", tokens[1]], "scaling": [], "projection": [], "layer": 0, "head": 0,
        "position": -1, "intact": {**sent, "tokens": tokens}, "problem": tokens[2],
        "edited": {**sent, "loss": 4.5, "notes": tokens[3], "milliseconds": 9},
        "following": [[t, 0.5, 0.25] for t in tokens],
    }  # fmt: skip
    content = json.dumps(state).replace("<", "\\u003c")
    script = own_script("shades.js", "panel.js", "widget.js")
    opened = visit(PAGE % (own_script("widget.css"), script, content))
    page = opened.page
    assert page.locator("img, svg, iframe, script:not([type])").count() == 0
    assert page.locator(".ln-loss").inner_text() == "Loss: intact 4.000, edited 4.500 nats/token (+0.500)"
    page.get_by_label("Scaling frozen, layer 0").check()
    assert page.evaluate("held.scaling") == ["layer 0"]
    page.get_by_label("Projection removed, all").check()
    assert page.evaluate("held.projection") == ["layer 0", tokens[1]]
    page.locator("select").nth(0).select_option("1")
    page.locator("select").nth(1).select_option("1")
    for key in ("ArrowDown", "ArrowDown", "ArrowDown", "ArrowRight", "ArrowRight"):
        page.locator("canvas").first.press(key)
    assert "intact 61.5 %, edited 61.5 %" in page.locator(".ln-soft").last.inner_text()
    page.locator(".ln-tokens button").nth(1).press("Enter")
    assert page.evaluate("held.position") == 1
    page.locator("textarea").fill("the king")
    page.locator("textarea").press("Enter")
    assert page.evaluate("held.text") == "the king"
    opened.quiet()


# ---------------------------------------------------------------------------------------------- a report, another text


def test_attention_on_another_text_needs_the_model(report: Any, long_report: Any) -> None:
    with pytest.raises(ValueError, match=r"in memory, which cannot be loaded again: give the model: report\.attention"):
        report.attention(text="the king")
    with pytest.raises(ValueError, match="model is what text is run on: give text as well"):
        report.attention(model=object())
    gone = replace(report, provenance={**report.provenance, "model": {"name": "/no/such/folder", "kind": "folder"}})
    with pytest.raises(ValueError, match=r"'/no/such/folder' of this report cannot be loaded again \("):
        gone.attention(text="the king")


@pytest.mark.slow
def test_attention_on_another_text() -> None:
    report = ln_probe.analyze(
        ln_probe.load_model("lm-layernorm"), "The ships came home.", probes=("uniformity",), progress=False
    )
    view = report.attention(layer=1, head=3, text="the king of Israel")
    assert "".join(view.exhibits.attention[0].tokens).endswith("the king of Israel")
    assert (view.layer, view.head) == (1, 3)
    about = {**report.provenance["model"], "weights_sha256": "0" * 64}
    other = replace(report, provenance={**report.provenance, "model": about})
    with pytest.raises(ValueError, match="'lm-layernorm' holds other weights than this report is of"):
        other.attention(text="the king")


def test_a_hugging_face_model_in_memory() -> None:
    pytest.importorskip("anywidget")
    tokenizer = ln_probe.load_model("lm-layernorm").tokenizer
    model = hugging_face("gpt2")
    if model.config.vocab_size < len(tokenizer):
        model.resize_token_embeddings(len(tokenizer))
    widget = ln_probe.explore(model, "In the beginning", tokenizer=tokenizer)
    widget.scaling = ["layer 0"]
    assert widget.edited["loss"] != widget.intact["loss"]
