"""What tests of the face share: reports, of which some hold text that tries to act, and a browser."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from architectures import make_bridge

import ln_probe
from ln_probe.analyses.probes.tables import CAUSAL
from ln_probe.report import Report

sys.path.insert(0, str(Path(__file__).parent))  # helper modules of this folder, wherever the tests are run from


@pytest.fixture(scope="session")
def report() -> Report:
    """A real report of a tiny model: 2 layers, 4 heads, one prompt of 24 tokens."""
    return ln_probe.analyze(make_bridge("gpt2"), torch.arange(1, 25)[None], progress=False)


@pytest.fixture(scope="session")
def long_model() -> Any:
    """A lab model of 3 layers and 2 heads with attention that is not uniform."""
    from ln_probe.analyses.lab.transformer import LabConfig, LabTransformer

    torch.manual_seed(0)
    model = LabTransformer(LabConfig(n_layers=3, d_model=16, n_heads=2, d_vocab=60, n_ctx=160))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape))
    return model


@pytest.fixture(scope="session")
def long_prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(60, (n,), generator=generator).tolist() for n in (150, 90, 5)]


@pytest.fixture(scope="session")
def long_report(long_model: Any, long_prompts: list[list[int]], tmp_path_factory: pytest.TempPathFactory) -> Report:
    """A real report whose patterns are pooled, with every key in its table."""
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    path.write_text("".join(json.dumps({"tokens": row}) + "\n" for row in long_prompts))
    probes = ("decomposition", "selectability", "uniformity")
    return ln_probe.analyze(long_model, path, probes=probes, progress=False)


@pytest.fixture(scope="session")
def causal() -> pd.DataFrame:
    """A made-up table of interventions: three groups of norms, three variants."""
    changes = {"intact": 0.0, "no_scaling": 0.3, "no_projection": -0.01, "both_removed": 0.31}
    return CAUSAL.frame([
        {
            "sites": sites, "variant": variant, "loss": 4.0 + d, "n": 33, "prompts_worse": 30,
            "family": "primary" if sites != "blocks.0.ln1" and variant != "both_removed" else "exploratory",
            "delta_loss": d, "delta_loss_low": d - 0.02, "delta_loss_high": d + 0.03, "delta_loss_uniform": d,
            "p": 0.001 if abs(d) > 0.03 else 0.5, "equivalence_bound": abs(d) + 0.02,
        }
        for sites in ("attention", "all", "blocks.0.ln1") for variant, d in changes.items()
    ])  # fmt: skip


REQUIRED = os.environ.get("LN_PROBE_NEEDS_BROWSER") == "1"  # set by .ci/run: there, a missing browser is a failure


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    def missing(what: str) -> None:
        (pytest.fail if REQUIRED else pytest.skip)(what)

    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        missing("browser tests need playwright: pip install playwright (its own browsers are not needed)")
    path = next((p for n in ("chromium", "chromium-browser", "google-chrome") if (p := shutil.which(n))), None)
    if path is None:
        missing("browser tests need Chromium on the PATH: apt-get install chromium")
    with sync_playwright() as playwright:
        # No sandbox of Chromium's own: it cannot be set up by root in a container.
        started = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield started
        started.close()


class Visit:
    """A page that was opened: `events` lists everything it asked for or complained about."""

    def __init__(self, browser: Any, path: Path) -> None:
        self.events: list[str] = []
        self.context = browser.new_context(offline=True, accept_downloads=True)
        self.context.set_default_timeout(300_000)  # a busy machine takes its time
        self.context.add_init_script("window.fired = () => { window.hasFired = true; };")
        self.page = self.context.new_page()
        self.page.on("console", lambda m: self.events.append(f"{m.type}: {m.text}"))
        self.page.on("pageerror", lambda e: self.events.append(f"error: {e}"))
        self.page.on("dialog", lambda d: (self.events.append(f"dialog: {d.message}"), d.dismiss()))
        self.page.on("request", lambda r: self.events.append(r.url) if r.url.split("#")[0] != path.as_uri() else None)
        self.page.goto(path.as_uri())

    def until(self, expression: str) -> None:
        """Wait until it is true (Playwright's own waiting evaluates strings, which the page's policy forbids)."""
        for _ in range(1200):
            if self.page.evaluate(expression):
                return
            self.page.wait_for_timeout(50)
        raise AssertionError(f"never became true: {expression}")

    def quiet(self) -> None:
        """Nothing was fetched, nothing was reported, nothing that came with the data ran."""
        self.page.wait_for_timeout(50)
        assert self.events == []
        assert not any(f.evaluate("window.hasFired === true") for f in self.page.frames)


@pytest.fixture
def visit(browser: Any, tmp_path: Path) -> Iterator[Callable[[str], Visit]]:
    """Open a page, given its HTML."""
    opened: list[Visit] = []

    def open_page(html: str) -> Visit:
        path = tmp_path / f"{len(opened)}.html"
        path.write_text(html, encoding="utf-8")
        opened.append(Visit(browser, path))
        return opened[-1]

    yield open_page
    for view in opened:
        view.context.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A sound GPT-2 folder, to be damaged."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    path = tmp_path / "model"
    shape = {"n_embd": 32, "n_head": 4, "n_layer": 1, "n_positions": 32, "vocab_size": 50}
    tokens = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    GPT2LMHeadModel(GPT2Config(**shape, **tokens)).save_pretrained(path)
    return path


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a local model asked for the network")

    monkeypatch.setattr("socket.socket.connect", refuse)
    monkeypatch.setattr("socket.getaddrinfo", refuse)
