"""What tests of the face share: reports, of which some hold text that tries to act, and a browser."""

from __future__ import annotations

import json
import os
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from architectures import make_bridge

import ln_probe
from ln_probe.analyses.probes.causal import family
from ln_probe.analyses.probes.tables import CAUSAL
from ln_probe.report import Report

sys.path.insert(0, str(Path(__file__).parent))  # helper modules of this folder, wherever the tests are run from

from made_up import HOSTILE


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
def page_of() -> Callable[[Report], str]:
    """`report_page`, drawn once per report of the session."""
    from ln_probe.page.page import report_page

    drawn: dict[int, tuple[Report, str]] = {}

    def made(report: Report) -> str:
        if id(report) not in drawn:
            drawn[id(report)] = report, report_page(report)
        return drawn[id(report)][1]

    return made


@pytest.fixture(scope="session")
def causal() -> pd.DataFrame:
    """A made-up table of interventions: three groups of norms, three variants."""
    changes = {"intact": 0.0, "no_scaling": 0.3, "no_projection": -0.01, "both_removed": 0.31}
    rows = [
        {
            "sites": sites,
            "variant": variant,
            "family": family(sites, variant),
            "loss": 4.0 + d,
            "delta_loss": d,
            "delta_loss_low": d - 0.02,
            "delta_loss_high": d + 0.03,
            "p": 0.001 if abs(d) > 0.03 else 0.5,
            "equivalence_bound": abs(d) + 0.02,
            "delta_loss_uniform": d,
            "prompts_worse": 30,
            "n": 33,
        }
        for sites in ("attention", "all", "blocks.0.ln1")
        for variant, d in changes.items()
    ]
    return CAUSAL.frame(rows)


PER_REPORT = 30  # strings in one report, a row of each table for each


@pytest.fixture(scope="session")
def dirty(report: Report, causal: pd.DataFrame) -> list[Report]:
    """Reports with every string in every place of which a page has many: tokens, norms, tables, notes."""
    found = []
    for start in range(0, len(HOSTILE), PER_REPORT):
        some = HOSTILE[start : start + PER_REPORT]

        def spread(count: int, some: list[str] = some) -> list[str]:
            return [some[i % len(some)] for i in range(count)]

        norms = pd.concat([report.layernorms] * 6, ignore_index=True)[:PER_REPORT]
        norms = norms.assign(**{c: spread(len(norms)) for c in ("site", "reads")})
        interventions = pd.concat([causal] * 3, ignore_index=True)
        shown = report.exhibits.attention
        assert shown is not None
        exhibits = replace(
            report.exhibits, attention=replace(shown, tokens=tuple(spread(len(shown.tokens)))), notes=tuple(some)
        )
        found.append(
            Report(
                {
                    "layernorms": norms,
                    "sinks": report.sinks.assign(token=spread(len(report.sinks)), kind=spread(len(report.sinks))),
                    "keys": report.keys.assign(token=spread(len(report.keys)), verdict=spread(len(report.keys))),
                    "causal": interventions.assign(sites=spread(len(interventions))),
                },
                {**report.provenance, **{f"{t}{i}": t for i, t in enumerate(some)}, "list": some},
                (*report.notes, *some),
                exhibits,
            )
        )
    return found


@pytest.fixture(scope="session")
def single(report: Report) -> list[Report]:
    """A small report per string, which stands in every place of which a page has one."""
    places = ("name", "architecture", "world", "dtype", "revision", "commit", "weights_sha256", "kind")
    return [
        Report(
            provenance={
                "model": dict.fromkeys(places, text), "command": text, "started": text, "ln_probe": text, text: text,
                "prompts": {"source": text, "count": text, "tokens": text, "sha256": text},
                "arguments": {"probes": [text]}, "versions": {text: text},
            },
        )
        for text in HOSTILE
    ]  # fmt: skip


# ---------------------------------------------------------------------------------------------------------- a browser

REQUIRED = os.environ.get("LN_PROBE_NEEDS_BROWSER") == "1"  # set by .ci/run: there, a missing browser is a failure
WATCH = """window.fired = () => { window.hasFired = true; };
window.clicks = 0;
addEventListener("click", () => { window.clicks += 1; }, true);"""


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
    """A page that was opened: everything it asked for or complained about is kept."""

    def __init__(self, browser: Any, path: Path, at: str = "", **options: Any) -> None:
        self.said: list[str] = []
        self.path = path
        self.context = browser.new_context(offline=True, accept_downloads=True, **options)
        self.context.set_default_timeout(300_000)  # a busy machine takes its time
        self.context.set_default_navigation_timeout(300_000)
        self.context.add_init_script(WATCH)
        self.page = self.context.new_page()
        self.page.on("console", lambda m: self.said.append(f"{m.type}: {m.text}"))
        self.page.on("pageerror", lambda e: self.said.append(f"error: {e}"))
        self.page.on("dialog", lambda d: (self.said.append(f"dialog: {d.message}"), d.dismiss()))
        self.page.on(
            "request", lambda r: self.said.append(f"request: {r.url}") if r.url.split("#")[0] != path.as_uri() else None
        )
        self.page.goto(path.as_uri() + at)
        if options.get("java_script_enabled", True) and "html:not(.whole)" in path.read_text(encoding="utf-8"):
            self.page.locator("html.whole").wait_for()

    def again(self, at: str = "") -> None:
        """Open the page anew, at another address of it."""
        self.page.goto("about:blank")
        self.page.goto(self.path.as_uri() + at)
        self.page.locator("html.whole").wait_for()

    def look(self, width: int = 1440, height: int = 900, **media: str) -> None:
        """Change the window and what the user prefers: `color_scheme`, `media`."""
        self.page.set_viewport_size({"width": width, "height": height})
        self.page.emulate_media(**({"color_scheme": "light", "media": "screen"} | media))

    def attention(self) -> Any:
        frame = self.page.frame_locator("iframe.attention")
        self.page.locator("iframe.attention").scroll_into_view_if_needed()  # observers rest out of sight
        frame.locator("#pattern canvas").wait_for()
        return frame

    def until(self, expression: str) -> None:
        """Wait until it is true (Playwright's own waiting evaluates strings, which the page's policy forbids)."""
        for _ in range(6000):
            if self.page.evaluate(expression):
                return
            self.page.wait_for_timeout(50)
        raise AssertionError(f"never became true: {expression}")

    def quiet(self) -> None:
        """Nothing was fetched, nothing was said, nothing that came with the data ran."""
        self.page.wait_for_timeout(50)
        assert self.said == []
        assert not any(f.evaluate("window.hasFired === true") for f in self.page.frames)

    def download(self, button: Any) -> Any:
        """What the button downloads, pressed by the keyboard.

        In four runs of all tests no download followed a click of the mouse within minutes, and the one time that clicks
        were counted the page had seen none: above the button frames are still drawn, which may move it. A second press
        tells that from a page that downloads nothing, and what the page saw of the first is a warning.
        """
        from playwright.sync_api import TimeoutError as TookTooLong

        before = self.page.evaluate("window.clicks")
        try:
            with self.page.expect_download(timeout=60_000) as download:
                button.press("Enter")
        except TookTooLong:
            seen = self.page.evaluate("window.clicks") - before
            warnings.warn(f"no download in 60 s; presses that the page saw: {seen}", stacklevel=2)
            with self.page.expect_download() as download:
                button.press("Enter")
        return download.value

    def close(self) -> None:
        self.context.close()


def visits(browser: Any, folder: Path) -> Iterator[Callable[..., Visit]]:
    opened: list[Visit] = []

    def open_page(html: str, **options: Any) -> Visit:
        path = folder / f"{len(opened)}.html"
        path.write_text(html, encoding="utf-8")
        opened.append(Visit(browser, path, **options))
        return opened[-1]

    yield open_page
    for one in opened:
        one.close()


@pytest.fixture
def visit(browser: Any, tmp_path: Path) -> Iterator[Callable[..., Visit]]:
    yield from visits(browser, tmp_path)


@pytest.fixture(scope="module")
def visit_once(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Visit]]:
    """The same for pages that the tests of a module share."""
    yield from visits(browser, tmp_path_factory.mktemp("pages"))


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
