"""Attention patterns drawn by circuitsvis, with every key marked by how hard it is to select.

Report pages and notebooks show the same document in a sandboxed frame: circuitsvis's bundle, data in base64, and a
content security policy that forbids fetching and other scripts. circuitsvis's Python side is not used, because it
writes tokens into a script unescaped and needs 64 MB for a layer at 512 tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup

from ln_probe.analyses.files import to_be_written, write_text
from ln_probe.analyses.text import shortened, visible
from ln_probe.exhibits import VERDICTS, Exhibits, PromptAttention
from ln_probe.page import circuitsvis_script, compressed, own_script, packed, policy, render
from ln_probe.page.heads import HeadMap

# A key is hard to select if it is in this share of its head's keys with the least attainable attention …
HARDEST_SHARE = 0.05
# … and no query of the observed set gives it at least this much attention.
HARD_BELOW = 0.5
HARD = "hard to select"
_CODES = {"selectable": 0, "unselectable": 2, "duplicate": 2, "undecided": 3, "not measured": 3}
MARKS = ("selectable", HARD, "unselectable", "no data")
FRAME_HEIGHT = 1040  # pixels, until the document reports its height
TALLEST = 6000  # pixels that a document may ask a notebook for
# In a notebook the frame follows the height of its content through an attribute, because notebooks remove scripts from
# outputs. Where they remove attributes too, the frame keeps its height and scrolls.
_FITS = (
    "if(!this.fits){this.fits=1;window.addEventListener('message',e=>{const h=e.data&&e.data.lnProbeHeight;"
    f"if(e.source===this.contentWindow&&h>0&&h<{TALLEST})this.style.height=Math.ceil(h)+'px'}})}}"
)


@dataclass(frozen=True, eq=False)
class AttentionView:
    """The result of `Report.attention`: an interactive picture in a notebook; `to_html` writes it to a file.

    Raises (on construction):
        ValueError: no attention was kept for that layer, head or prompt.
    """

    exhibits: Exhibits = field(repr=False)
    layer: int | None = None
    head: int | None = None
    prompt: int = 0
    heads: HeadMap = field(default_factory=HeadMap, repr=False)

    def __post_init__(self) -> None:
        shown = self.exhibits.of_prompt(self.prompt)
        if self.head is not None and self.head not in shown.heads:
            kept = ", ".join(map(str, shown.heads))
            raise ValueError(f"no attention was kept of head {self.head!r}: there is some of heads {kept}")
        if self.layer is not None and self.layer not in shown.layers:
            kept = ", ".join(map(str, shown.layers))
            raise ValueError(f"no attention was kept of layer {self.layer!r}: there is some of layers {kept}")

    def __repr__(self) -> str:
        chosen = {"layer": self.layer, "head": self.head, "prompt": self.prompt}
        said = ", ".join(f"{name}={value}" for name, value in chosen.items() if value is not None)
        kept = self.exhibits.of_prompt(self.prompt)
        return f"AttentionView({said}: {len(kept.layers)} layers of {len(kept.heads)} heads, {len(kept.tokens)} tokens)"

    def document(self) -> str:
        """Return the picture as a whole HTML document that opens offline."""
        return attention_document(self.exhibits, self.heads, self.layer, self.head, self.prompt)

    def _repr_html_(self) -> str:
        return frame(self.document(), height=FRAME_HEIGHT, fits=True)

    def to_html(self, path: str | Path) -> Path:
        """Write the picture as one self-contained page and return its path."""
        path = to_be_written(path)
        write_text(path, self.document())
        return path


def scripts() -> tuple[str, str]:
    """Return the scripts that run inside the frame: our own and circuitsvis's bundle."""
    return own_script("unpack.js", "shades.js", "explorer.js", "attention.js"), circuitsvis_script()


def frame(document: str, *, height: int, fits: bool = False) -> Markup:
    """Wrap a document in a sandboxed frame, without access to the surrounding page, forms or links out.

    With `fits` it follows the heights that the document reports (a report's page does so in its own script).
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
    head: int | None = None,
    prompt: int | None = None,
) -> str:
    """Return the whole document: a map of heads, and the attention of one head.

    Args:
        heads: measures of the map; None: no map.
        layer, head, prompt: shown first; None: the most affected head, the first prompt.

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
    return render(
        "attention.html",
        policy=policy(own, bundle),
        script=Markup(own),
        bundle=_compressed(bundle),
        data=packed(content),
        hardest=f"{100 * HARDEST_SHARE:.0f} %",
        below=f"{100 * HARD_BELOW:.0f} %",
    )


@cache  # takes half a second, and is the same in every page
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
    same = ("prompt", "layers", "heads", "edges", "causal", "cells", "margin", "attainable", "received")
    return {name: getattr(shown, name) for name in same} | {
        "tokens": [shortened(visible(t)) for t in shown.tokens],
        "marks": marks(shown),
        "frozen": shown.attainable_frozen,
        "frozenCells": shown.cells_frozen,
        "full": {f"{layer}.{head}": pattern for (layer, head), pattern in shown.full.items()},
    }
