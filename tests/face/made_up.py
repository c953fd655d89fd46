"""What tests put into pages, text that tries to act and a made-up experiment, and readers of what comes out."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pandas as pd

from ln_probe.analyses.lab.results import Results, summarize, write_results
from ln_probe.page.lab import write_lab_page

# In the browser `fired()` records a call; whatever calls it has escaped.
HOSTILE = [
    "</script><img src=x onerror=fired()>",
    '"><svg onload=fired()>',
    "</style><script>fired()</script>",
    "\u2028",
    "\x00",
    "\u202eevil",
    "\u2066isolated\u2069",
    "\u200b",
    "<|endoftext|>",
    "a" * 5000,
    "👩‍👩‍👧‍👦",
    "e\u0301\u0301\u0301\u0301",
    "{{ 7 * 7 }}",
    "${fired()}",
    "<!--<script>",
    "-->",
    "<![CDATA[<script>fired()</script>]]>",
    "' onmouseover='fired()",
    '" onfocus="fired()" autofocus="',
    "<iframe srcdoc='<script>parent.fired()</script>'>",
    "<math><mtext></form><form><mglyph><style></math><img src onerror=fired()>",
    "<a href=javascript:fired()>x</a>",
    "javascript:fired()",
    "data:text/html,<script>fired()</script>",
    "<base href=//evil.example/>",
    "<meta http-equiv=refresh content=0>",
    "<object data=x>",
    "<form action=//evil.example><button>",
    "<plaintext>",
    "</textarea></title></template></noscript></iframe><script>fired()</script>",
    "&lt;b&gt;",
    "\\u003cscript\\u003e",
    '\\"',
    "\r\n",
    "",
    " ",
    "=cmd|'/C calc'!A0",
    "$\\frac{",
    "../../etc/passwd",
    "__proto__",
    "toString",
    "NaN",
    "undefined",
    "\ud7ff",
    "%3Cscript%3E",
    "\x1b[31mred",
    "\x85",
    "#findings",
    "ﷺ",
    "<" * 200,
]

UNSEEN = "\x00\u202e\u202d\u2028\u2029\u2066\x1b\x85\x7f\x08"  # characters that no page may hold


class Page(HTMLParser):
    """Elements and visible text of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.silent = False  # inside a script or a style
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self.silent = tag in ("script", "style")

    def handle_endtag(self, tag: str) -> None:
        self.silent = False

    def handle_data(self, data: str) -> None:
        if not self.silent:
            self.text += data

    def acts(self) -> list[str]:
        """What could do something that ours does not."""
        found = [name for _, a in self.tags for name in a if name.startswith("on")]
        strange = ("img", "object", "embed", "base", "link", "form", "textarea", "plaintext")
        found += [tag for tag, _ in self.tags if tag in strange]
        links = [a.get("href") or "" for tag, a in self.tags if tag == "a"]
        return found + [h for h in links if not h.startswith("https://arxiv.org/") and (":" in h or h.startswith("//"))]


def lab_page(out: Path, norms: dict[str, float], **more: Any) -> str:
    """The page of an experiment that gave these means; more of its results are options of Results."""
    values = pd.DataFrame({"norm": list(norms), "seed": 0, "value": list(norms.values())})
    results = Results({"summary": summarize(values, ["norm"])}, settings={"steps": 7}, **more)
    write_results(results, out, experiment="toy", command="ln-probe lab run toy", ln_probe_version="0", seconds=1)
    return write_lab_page(out).read_text()
