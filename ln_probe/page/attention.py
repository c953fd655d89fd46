"""Attention patterns as circuitsvis draws them, with every key marked by how hard it is to select.

One document for the report's page and for notebooks: circuitsvis's own bundle and component, data in base64, a content
security policy that lets nothing be fetched and nothing else run, shown in a sandboxed frame. circuitsvis's Python side
is not used: it puts tokens into a script as they are, and takes 64 MB for a layer at 512 tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup

from ln_probe.analyses.files import write_text
from ln_probe.analyses.probes.text import shortened, visible
from ln_probe.exhibits import VERDICTS, Exhibits, PromptAttention
from ln_probe.page import circuitsvis_script, compressed, environment, own_script, packed, policy
from ln_probe.page.heads import HeadMap

# A key is marked hard to select if it is among this share of its head's keys that can get the least attention …
HARDEST_SHARE = 0.05
# … and no query of the observed set gives it the greater part: keys that can be attended to are not hard, even where
# they are their head's hardest.
HARD_BELOW = 0.5
HARD = "hard to select"
_CODES = {"selectable": 0, "unselectable": 2, "duplicate": 2, "undecided": 3, "not measured": 3}
MARKS = ("selectable", HARD, "unselectable", "not known")
FRAME_HEIGHT = 1040  # pixels until the picture says how tall it is, or where nothing listens
TALLEST = 6000  # pixels that a picture may ask a notebook for
# In a notebook the frame follows its content, as on the report's page: an attribute, since scripts in outputs are taken
# out or do not run. Where attributes are taken out too, the frame keeps its height and scrolls.
_FITS = (
    "if(!this.fits){this.fits=1;window.addEventListener('message',e=>{const h=e.data&&e.data.lnProbeHeight;"
    f"if(e.source===this.contentWindow&&h>0&&h<{TALLEST})this.style.height=Math.ceil(h)+'px'}})}}"
)


@dataclass(frozen=True, eq=False)
class AttentionView:
    """What `Report.attention` returns: an interactive picture in a notebook, `to_html` for a file of its own.

    Raises (on construction):
        ValueError: nothing was kept of that layer, head or prompt.
    """

    exhibits: Exhibits = field(repr=False)
    layer: int | None = None
    prompt: int = 0
    head: int | None = None
    heads: HeadMap = field(default_factory=HeadMap, repr=False)
    _document: list[str] = field(default_factory=list, init=False, repr=False)

    def __post_init__(self) -> None:
        shown = self.exhibits.of_prompt(self.prompt)
        if self.head is not None and self.head not in shown.heads:
            kept = ", ".join(map(str, shown.heads))
            raise ValueError(f"no attention was kept of head {self.head}: there is some of heads {kept}")
        if self.layer is not None and self.layer not in shown.layers:
            kept = ", ".join(map(str, shown.layers))
            raise ValueError(f"no attention was kept of layer {self.layer}: there is some of layers {kept}")
        if self.head is not None and self.head not in shown.heads:
            kept = ", ".join(map(str, shown.heads))
            raise ValueError(f"no attention was kept of head {self.head}: there is some of heads {kept}")

    def __repr__(self) -> str:
        chosen = {"layer": self.layer, "head": self.head, "prompt": self.prompt}
        said = ", ".join(f"{name}={value}" for name, value in chosen.items() if value is not None)
        kept = self.exhibits.of_prompt(self.prompt)
        return f"AttentionView({said}: {len(kept.layers)} layers of {len(kept.heads)} heads, {len(kept.tokens)} tokens)"

    def document(self) -> str:
        """The picture as a whole HTML document, opening offline."""
        if not self._document:
            self._document.append(attention_document(self.exhibits, self.heads, self.layer, self.prompt, self.head))
        return self._document[0]

    def _repr_html_(self) -> str:
        return frame(self.document(), height=FRAME_HEIGHT, fits=True)

    def to_html(self, path: str | Path) -> Path:
        """Write the picture as one self-contained page; the path written."""
        path = Path(path)
        write_text(path, self.document())
        return path


def scripts() -> tuple[str, str]:
    """What runs inside the frame: its own script and circuitsvis's bundle."""
    return own_script("unpack.js", "explorer.js", "attention.js"), circuitsvis_script()


def frame(document: str, *, height: int, fits: bool = False) -> Markup:
    """The document in a sandboxed frame: no access to the page around it, no forms, no links out.

    Args:
        document: HTML that tells its height by messages.
        height: in pixels.
        fits: follow those messages (the report's page does that in its own script).
    """
    follow = Markup('onload="{}" ').format(_FITS) if fits else ""
    return Markup(
        '<iframe class="attention" title="Attention patterns" sandbox="allow-scripts" {}'
        'style="width:100%;height:{}px;border:0" srcdoc="{}"></iframe>'
    ).format(follow, height, document)


def attention_document(
    exhibits: Exhibits,
    heads: HeadMap | None = None,
    layer: int | None = None,
    prompt: int | None = None,
    head: int | None = None,
) -> str:
    """The whole document: a map of heads, and the attention of one.

    Args:
        heads: what the map shows; None: there is none.
        layer, prompt, head: chosen first; None: the first prompt kept, the head that is most affected.

    Raises:
        FileNotFoundError: circuitsvis comes without its bundle.
    """
    own, bundle = scripts()
    heads = heads or HeadMap()
    prompt = exhibits.attention[0].prompt if prompt is None else prompt
    first = heads.most_affected(exhibits, layer, prompt)
    if head is not None:
        first = (first[0] if layer is None else layer, head)
    content = {
        "prompts": [_prompt(a) for a in exhibits.attention],
        "marks": MARKS,
        "layer": first[0],
        "head": first[1],
        "prompt": prompt,
        "map": heads.plain(),
        "notes": exhibits.notes,
    }
    return (
        environment()
        .get_template("attention.html")
        .render(
            policy=policy(own, bundle),
            script=Markup(own),
            bundle=_compressed(bundle),
            data=packed(content),
            hardest=f"{100 * HARDEST_SHARE:.0f} %",
            below=f"{100 * HARD_BELOW:.0f} %",
        )
    )


@cache  # the same in every page, and half a second
def _compressed(bundle: str) -> str:
    return compressed(bundle.encode())


def marks(shown: PromptAttention) -> np.ndarray:
    """Index into MARKS for every key, [layer head key]."""
    codes = np.array([_CODES[v] for v in VERDICTS], np.uint8)[shown.verdict]
    value = shown.attainable.astype(np.float64)
    known = ~np.isnan(value)
    edge = np.quantile(np.where(known, value, np.inf), HARDEST_SHARE, axis=-1, keepdims=True, method="lower")
    hard = known & (codes == 0) & (value <= edge) & (value < HARD_BELOW)
    return np.where(hard, np.uint8(MARKS.index(HARD)), codes)


def _prompt(shown: PromptAttention) -> dict[str, Any]:
    return {
        "prompt": shown.prompt,
        "tokens": [shortened(visible(t)) for t in shown.tokens],
        "layers": shown.layers,
        "heads": shown.heads,
        "edges": shown.edges,
        "causal": shown.causal,
        "cells": shown.cells,
        "marks": marks(shown),
        "margin": shown.margin,
        "attainable": shown.attainable,
        "frozen": shown.attainable_frozen,
        "frozenCells": shown.cells_frozen,
        "received": shown.received,
        "full": {f"{layer}.{head}": pattern for (layer, head), pattern in shown.full.items()},
    }
