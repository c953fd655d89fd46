"""The map of heads, and the attention of a chosen head, which circuitsvis draws.

Report pages and notebooks show the same elements: circuitsvis's bundle, data in base64, and a content security policy
that forbids fetching and other scripts. circuitsvis's Python side is not used: it writes tokens into a script
unescaped and needs 64 MB for a layer at 512 tokens.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from jaxtyping import Float
from markupsafe import Markup, escape

from ln_probe.analyses.attribution.shared import Prompts, place, token_name
from ln_probe.analyses.geometry.key_geometry import key_geometry
from ln_probe.analyses.probes.statistics import SIGNIFICANCE
from ln_probe.analyses.probes.wording import NATS, heads_unchanged, unit_of
from ln_probe.analyses.text import disarmed, shortened, visible, write_text
from ln_probe.exhibits import TOKENS_SHOWN, PromptAttention, to_bytes
from ln_probe.hooks.attention import UnsupportedAttentionError, read_heads
from ln_probe.hooks.edits import without
from ln_probe.hooks.model import check_model, evaluating
from ln_probe.hooks.norm import INTACT, SCALING_FROZEN, VARIANTS
from ln_probe.hooks.norms import structure_of
from ln_probe.hooks.stream import AttentionInput, stream
from ln_probe.page import circuitsvis_script, compressed, own_script, packed, render
from ln_probe.page.figures import interval

if TYPE_CHECKING:
    from ln_probe.report import Report

# Where a colour of every map begins, in nats/token. Of a loss in another unit the last begins at the largest change.
STEPS: tuple[float, ...] = (0.001, 0.003, 0.01, 0.03, 0.1)
TOP = 6  # heads in the list beside the map
TOKEN_LENGTH = 14  # characters of a token on an axis
LARGE = 40  # a picture of more tokens fills its column, which is kept free for it
FRAME_HEIGHT = 1000  # pixels of a notebook's frame
_HEAD = re.compile(r"\bL(\d{1,5})H(\d{1,5})\b")
# circuitsvis sets tokens as HTML in some of its elements. These look alike and mean nothing in HTML.
_LOOKALIKES = str.maketrans({"<": "\u2039", ">": "\u203a"})


@dataclass(frozen=True)
class HeadCell:
    """One head of the map.

    Attributes:
        layer, head: which.
        change, certainty: its measurement as text.
        value: change of the loss (NaN: not measured).
        step: how many of the scale's steps it reaches, negative where the loss falls.
        estimate: whether it is a first-order estimate; tested: whether it has a p; significant: whether that passes.
        shown: whether its attention can be shown.
    """

    layer: int
    head: int
    change: str
    certainty: str = ""
    value: float = math.nan
    step: int = 0
    estimate: bool = False
    tested: bool = False
    significant: bool = False
    shown: bool = False

    @property
    def name(self) -> str:
        return f"L{self.layer}H{self.head}"

    @property
    def what(self) -> str:
        """The head and its measurement."""
        certainty = f"; {self.certainty}" if self.certainty else ""
        return f"Layer {self.layer}, head {self.head} (q, k, v): {self.change}{certainty}"

    @property
    def classes(self) -> str:
        """The classes of its element."""
        if math.isnan(self.value):
            return "unknown"
        sign = "less" if self.step < 0 else "more"
        mark = "significant" if self.significant else "pale"
        names = [f"{sign}{abs(self.step)}", mark, "estimate" if self.estimate else ""]
        return " ".join(filter(None, names))


@dataclass(frozen=True)
class HeadMap:
    """The change of the loss with scaling frozen for one head at a time.

    Attributes:
        rows: of cells, the last layer first, so that layer 0 is at the bottom.
        legend: (class, text) of each colour and mark that occurs.
        unit: of the loss.
        unchanged: why freezing scaling changes no head; empty if it may.
    """

    rows: tuple[tuple[HeadCell, ...], ...] = ()
    legend: tuple[tuple[str, str], ...] = ()
    unit: str = ""
    unchanged: str = ""

    @property
    def cells(self) -> list[HeadCell]:
        return [cell for row in self.rows for cell in row]

    @property
    def candidates(self) -> list[HeadCell]:
        """The heads with a significant change, the largest first; without any, all that were measured."""
        measured = [cell for cell in self.cells if not math.isnan(cell.value)]
        significant = [cell for cell in measured if cell.significant]
        return sorted(significant or measured, key=lambda cell: -abs(cell.value))

    @property
    def top(self) -> list[HeadCell]:
        """Those of them that are listed beside the map."""
        return self.candidates[:TOP]

    @property
    def first(self) -> HeadCell | None:
        """The head whose attention is shown first."""
        in_order = sorted(self.cells, key=lambda cell: (cell.layer, cell.head))
        return next((cell for cell in (*self.top, *in_order) if cell.shown), None)


def head_map(report: Report) -> HeadMap:
    """Return the map of a report's heads; without rows if the report has nothing by head."""
    effects = report.tables["head_effects"]
    effects = effects[effects["variant"] == SCALING_FROZEN.name]
    shown = _shown(report.exhibits.attention)
    rows = {(int(row["layer"]), int(row["head"])): row for row in effects.to_dict("records")}
    pairs = rows.keys() | shown
    layers, heads = (range(1 + max((pair[axis] for pair in pairs), default=-1)) for axis in (0, 1))
    unit, steps = unit_of(report.provenance), STEPS
    if unit != NATS:
        largest = max((abs(v) for row in rows.values() if math.isfinite(v := _value(row))), default=1.0)
        steps = tuple(largest * (step / STEPS[-1]) for step in STEPS)
    unchanged = heads_unchanged(report.provenance)
    unmeasured = "no change" if unchanged else "not measured"
    grid = tuple(
        tuple(_cell((layer, head), rows.get((layer, head)), shown, steps, unit, unmeasured) for head in heads)
        for layer in reversed(layers)
    )
    return HeadMap(grid, tuple(_legend(grid, steps, unit)), unit, unchanged)


def _shown(attention: PromptAttention | None) -> set[tuple[int, int]]:
    return set() if attention is None else {(layer, head) for layer in attention.layers for head in attention.heads}


def _value(row: Mapping[Any, Any]) -> float:
    """Return the change as run, or else as estimated."""
    return float(row["estimate"] if math.isnan(row["delta_loss"]) else row["delta_loss"])


def _cell(
    pair: tuple[int, int],
    row: Mapping[Any, Any] | None,
    shown: set[tuple[int, int]],
    steps: tuple[float, ...],
    unit: str,
    unmeasured: str,
) -> HeadCell:
    if row is None or math.isnan(value := _value(row)):
        return HeadCell(*pair, unmeasured, shown=pair in shown)
    estimate, tested = math.isnan(row["delta_loss"]), math.isfinite(row["p"])
    ends = (math.nan, math.nan) if estimate else (row["delta_loss_low"], row["delta_loss_high"])
    if tested:
        certainty = "p < 0.001" if row["p"] < 0.001 else f"p = {row['p']:.2g}"
    else:
        certainty = "first-order estimate" if estimate else f"not tested, {row['n']:.0f} prompts"
    step = sum(abs(value) >= least for least in steps) * (-1 if value < 0 else 1)
    change = interval((value, *ends), unit)
    return HeadCell(*pair, change, certainty, value, step, estimate, tested, row["p"] < SIGNIFICANCE, pair in shown)


def _legend(rows: tuple[tuple[HeadCell, ...], ...], steps: tuple[float, ...], unit: str) -> Iterator[tuple[str, str]]:
    """Yield what the colours mean: every step of the scale, and the marks that occur."""
    cells = [cell for row in rows for cell in row]
    known = [cell for cell in cells if not math.isnan(cell.value)]
    if not known:
        yield from {("unknown", cell.change) for cell in cells}
        return
    yield from ((f"less{i}", f"−{steps[i - 1]:.2g}") for i in range(len(steps), 0, -1))
    yield "more0", "0"
    yield from ((f"more{i + 1}", f"+{step:.2g}") for i, step in enumerate(steps))
    if any(cell.significant for cell in known):
        yield "more4 significant", "outlined: significant"
    pale = [cell for cell in known if not cell.significant and not cell.estimate]
    why = sorted({"not significant" if cell.tested else cell.certainty for cell in pale})
    yield from [("more4 pale", f"pale: {' or '.join(why)}")] * bool(why)
    if any(cell.estimate for cell in known):
        yield "more4 pale estimate", "hatched: first-order estimate, not tested"
    if len(known) < len(cells):
        yield "unknown", "grey: not measured"


# ---------------------------------------------------- the attention of one head


class Picture:
    """An interactive picture in a notebook; `to_html` writes it to a file."""

    def document(self) -> str:
        """Return the picture as a whole HTML document that opens offline."""
        raise NotImplementedError

    def _repr_html_(self) -> str:
        return Markup(
            '<iframe title="Attention" sandbox="allow-scripts" style="width:100%;height:{}px;border:0" srcdoc="{}">'
            "</iframe>"
        ).format(FRAME_HEIGHT, self.document())

    def to_html(self, path: str | Path) -> Path:
        """Write the picture as one self-contained page and return its path."""
        write_text(Path(path), self.document())
        return Path(path)


@dataclass(frozen=True, eq=False)
class AttentionView(Picture):
    """The result of `Report.attention`.

    Raises (on construction):
        ValueError: the report has no attention of that layer or head.
    """

    report: Report = field(repr=False)
    layer: int | None = None
    head: int | None = None

    def __post_init__(self) -> None:
        shown = self.report.exhibits.attention
        if shown is None:
            raise ValueError("this report has no attention: analyze with the probe 'selectability' or 'uniformity'")
        for what, number, known in (("layer", self.layer, shown.layers), ("head", self.head, shown.heads)):
            if number is not None and number not in known:
                raise ValueError(f"{what} {number!r} has no attention here: there are {', '.join(map(str, known))}")

    def document(self) -> str:
        heads = head_map(self.report)
        first = heads.first
        if self.layer is not None or self.head is not None:
            cells = [c for c in (*heads.top, *heads.cells) if self.layer in (None, c.layer) and c.shown]
            first = next((c for c in cells if self.head in (None, c.head)), first)
        own = own_script("page.js", "heads.js")
        values = {"name": self.report.name, "heads": heads, "first": first}
        return render("attention.html", own, circuitsvis_script(), **values, **attention_data(self.report))


def attention_data(report: Report) -> dict[str, Any]:
    """Return what the template `heads.html` needs to show attention: the data, the bundle, and what is shown."""
    shown = report.exhibits.attention
    if shown is None:
        return {"attention": None}
    count = len(shown.tokens)
    what = f"Prompt {shown.prompt}, {'all' if count == shown.length else f'the first {count} of'} {shown.length} tokens"
    size = "large" if count > LARGE else ""
    return {"attention": what, "size": size, "data": _data(shown), "bundle": _compressed_bundle()}


def token_data(report: Report) -> dict[str, Any]:
    """Return what the template `report.html` needs to colour the first prompt by its tokens' loss changes."""
    losses = report.exhibits.token_losses
    if losses is None or losses["no_scaling"].isna().all():
        return {"colored": None}
    first = losses[losses["prompt"] == losses["prompt"].min()][:TOKENS_SHOWN]
    full = float(first["no_scaling"].abs().quantile(0.98)) or 1.0
    tokens = [visible(token).translate(_LOOKALIKES) for token in first["token"]]
    content = {"tokens": tokens, "values": first["no_scaling"].round(4).tolist(), "full": full}
    of = "" if len(first) < TOKENS_SHOWN else f"the first {TOKENS_SHOWN} tokens of "
    about = f"{of}prompt {first['prompt'].iloc[0]}, after its first token; colours are full at ±{full:.2g} nats"
    return {"colored": packed(content), "colored_about": about, "bundle": _compressed_bundle()}


@cache  # takes half a second, and is the same in every page
def _compressed_bundle() -> str:
    return compressed(circuitsvis_script().encode())


def _data(shown: PromptAttention) -> str:
    """Pack every weight of every head; a causal pattern's weights above the diagonal are left out."""
    count = len(shown.tokens)
    rows, columns = np.tril_indices(count) if shown.causal else np.indices((count, count)).reshape(2, -1)
    intact = shown.intact[..., rows, columns]
    # As differences in 8 bits, most of which are small, so that they compress.
    change = shown.frozen[..., rows, columns] - intact
    tokens = [axis_label(token) for token in shown.tokens]
    same = {"layers": shown.layers, "heads": shown.heads, "causal": shown.causal}
    return packed({"tokens": tokens, "intact": intact, "change": change, **same})


def axis_label(token: str) -> str:
    """Return a token as circuitsvis may show it."""
    return shortened(visible(token), TOKEN_LENGTH).partition("… (")[0].translate(_LOOKALIKES)


# ---------------------------------------- the attention of all heads of a layer


@dataclass(frozen=True, eq=False, repr=False)
class LayerAttention(Picture):
    """Attention of a layer's heads on one text, intact and edited.

    Attributes:
        layer, heads: which.
        tokens: token strings.
        patterns: attention weights by what the model is: "intact", and the edit's label.
        verdicts: a row per head and key: `head`, `position`, `token`, and the verdict of `key_geometry` on the keys of
            the text, a column per pattern; empty where keys cannot be read.
        causal: whether no query sees later keys.
    """

    layer: int
    heads: tuple[int, ...]
    tokens: tuple[str, ...]
    patterns: Mapping[str, Float[np.ndarray, "head query key"]]
    verdicts: pd.DataFrame
    causal: bool

    def __repr__(self) -> str:
        what = f"layer {self.layer}, heads {', '.join(map(str, self.heads))}, {len(self.tokens)} tokens"
        return f"LayerAttention({shortened(what, 80)}; {', '.join(self.patterns)})"

    def document(self) -> str:
        panels, titles, weights = [], [], np.stack(list(self.patterns.values()))
        for label, pattern in self.patterns.items():
            stuck = np.zeros(pattern.shape[::2], bool)
            if len(self.verdicts):
                stuck = self.verdicts[label].isin(["unselectable", "duplicate"]).to_numpy().reshape(stuck.shape)
            counts = [f"H{head} {n}" for head, n in zip(self.heads, stuck.sum(1), strict=True) if n]
            titles.append(label.capitalize() + (f". ⊘ by head: {', '.join(counts)}" if counts else ""))
            marks = ["" if not n else "⊘" if n == len(stuck) else f"⊘{n}" for n in stuck.sum(0)]
            tokens = [axis_label(token) + mark for token, mark in zip(self.tokens, marks, strict=True)]
            panels.append({"weights": to_bytes(pattern), "tokens": tokens, "names": [f"H{h}" for h in self.heads]})
        full = float(np.quantile(weights[weights > 0], 0.995)) if (weights > 0).any() else 1.0
        least = full / 20 if len(self.tokens) > LARGE else 0.0
        data = {"count": len(self.tokens), "panels": panels, "full": full, "least": least}
        scale = f"Colours are full at {full:.2%}." + (f" Weights below {least:.2%} are left out." if least else "")
        mark = "⊘ marks a key that no query can select, with the number of these heads (none: all)."
        values: dict[str, Any] = {
            "name": f"Attention of layer {self.layer}",
            "about": f"{len(self.tokens)} tokens, {len(self.heads)} heads. {scale}",
            "titles": titles,
            "marks": mark if len(self.verdicts) else "Keys of this layer could not be read.",
        }
        content = {"data": packed({**data, "causal": self.causal}), "bundle": _compressed_bundle()}
        return render("layer.html", own_script("page.js", "layer.js"), circuitsvis_script(), **values, **content)


def attention(
    model: object,
    text: object,
    layer: int,
    heads: int | Sequence[int] | None = None,
    *,
    edit: str | None = "scaling",
    sites: str | Sequence[str] | None = None,
    scale: Any = "frozen",
) -> LayerAttention:
    """Return an interactive picture of a layer's attention on one text, intact beside an edit; circuitsvis draws it.

    Args:
        model: any hooked model.
        text: a text, or token ids.
        layer, heads: which; negative from the end. `heads` None: all of the layer.
        edit: what is removed in the second picture, as for `hooks.without`; None: no second picture.
        sites: from which norms; None: the one that this layer's attention reads.
        scale: the constants, as for `hooks.without`.

    Raises:
        TypeError, ValueError: not a hooked model, no such layer or head, a text that cannot be run.
        InterventionError: as `hooks.without`.

    Example:
        >>> picture = ln_probe.attention(model, "The ships came home.", layer=1)
        >>> picture.verdicts.query("intact == 'unselectable'")
    """
    hooked = check_model(model)
    rows = Prompts(hooked, text).rows
    if len(rows) != 1:
        raise ValueError("attention is shown of one text: give a text or the token ids of one prompt")
    layer, norms = place(layer, len(hooked.blocks), "layer", "the model"), structure_of(hooked).attention_inputs

    def look() -> AttentionInput:
        seen = list[AttentionInput]()
        with evaluating(hooked):
            stream(hooked, rows[0], norms, on_attention=seen.append, layers=[layer])
        if not seen:
            raise ValueError(f"attention of layer {layer} shows no pattern, or reads nothing that ln_probe knows")
        return seen[0]

    seen = {INTACT.label: look()}
    if edit is not None:
        names = [seen[INTACT.label].norm.name] if sites is None else sites
        with without(hooked, edit, sites=names, scale=scale) as done:
            seen[VARIANTS[done.variant].label] = look()
    count = len(seen[INTACT.label].pattern)
    given = range(count) if heads is None else [heads] if isinstance(heads, int) else heads
    chosen = [place(head, count, "head", f"layer {layer}") for head in given]
    tokens = tuple(token_name(hooked, int(i), quoted=False) for i in rows[0])
    table = pd.MultiIndex.from_product([chosen, range(len(tokens))], names=["head", "position"]).to_frame(index=False)
    verdicts = table.assign(token=[tokens[i] for i in table["position"]])
    try:
        for label, one in seen.items():
            keys = read_heads(one, norms).keys(one.y)[:, chosen].transpose(0, 1).cpu().numpy()
            verdicts[label] = key_geometry(keys).verdict.reshape(-1)
    except UnsupportedAttentionError:
        verdicts = verdicts[:0]
    patterns = {label: one.pattern[chosen].float().cpu().numpy() for label, one in seen.items()}
    return LayerAttention(layer, tuple(chosen), tokens, patterns, verdicts, seen[INTACT.label].causal)


def linked(text: str, report: Report) -> Markup:
    """Escape a sentence and link the heads in it (L2H3) whose attention is shown."""
    shown, parts, end = _shown(report.exhibits.attention), Markup(), 0
    for match in _HEAD.finditer(text):
        if (int(match[1]), int(match[2])) in shown:
            parts += escape(disarmed(text[end : match.start()]))
            parts += Markup('<a href="#{0}">{0}</a>').format(match[0])
            end = match.end()
    # No line ends between a number and its unit.
    html = str(parts + escape(disarmed(text[end:])))
    return Markup(re.sub(r" (?=%)|(?<=\bp) (?=[=&])|(?<=\bp =) |(?<=\bp &lt;) ", "&nbsp;", html))
