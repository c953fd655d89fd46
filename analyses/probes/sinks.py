"""The probe `sinks`: where attention falls, which tokens and dimensions are outliers, where they come from.

Sink rate: share of (head, query) that give a position over 0.3 of their attention (Gu et al. 2025, "When attention sink
emerges in language models"). Outliers: `ln_probe.analyses.probes.outliers`. What a token would get if its key alone
were not scaled: with k' made of Px / c, c the mean sigma of tokens that are not at position 0,

    w' = w e^Δ / (1 - w + w e^Δ),    Δ = q·(k' - k) / divisor
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ln_probe.analyses.probes.attention_layer import AttentionLayer
from ln_probe.analyses.probes.base import (
    DESCRIBED,
    Context,
    Cost,
    Finding,
    Needs,
    Observer,
    Piece,
    Probe,
    ProbeResults,
    Shape,
    View,
    among_heads,
    in_layers,
)
from ln_probe.analyses.probes.columns import OUTLIER_DIMENSIONS, SINK_HEADS, SINKS, TOKEN_SIZES
from ln_probe.analyses.probes.outliers import LEAST_TOKENS, OUTLIER_RATIO, PromptOutliers
from ln_probe.analyses.text import counted, percent, visible
from ln_probe.hooks.attention import Heads
from ln_probe.hooks.capture import visible_keys
from ln_probe.hooks.model import at_least_float32
from ln_probe.hooks.norm import Site

MUCH = 0.3  # of a query's attention: Gu et al.'s epsilon
# Of (head, query) of a layer that give it MUCH: a layer of heads that look elsewhere has under a tenth.
SINK_SHARE = 0.3
LEAST_QUERIES = 10  # that see a position: the few that see the last tokens often have nothing better
_NAMED = 3  # tokens named in a finding


_SIZES = ("sigma", "before", "after")


def _starts(length: int) -> list[int]:
    """Where the groups of positions begin whose sizes are summed: 0, 1, 2-3, 4-7, 8-15, …"""
    starts = [0]
    while (after := max(1, 2 * starts[-1])) < length:
        starts.append(after)
    return starts


@dataclass
class _Received:
    """Attention to every position, by layer: [head key] each, over queries after position 0."""

    much: dict[int, Float[Tensor, "head key"]] = field(default_factory=dict)
    total: dict[int, Float[Tensor, "head key"]] = field(default_factory=dict)
    causal: bool = True
    windows: dict[int, int | None] = field(default_factory=dict)

    def sees(self, layer: int, length: int) -> Bool[Tensor, "query key"]:
        """Which queries see which positions; of a causal layer only queries after position 0 count."""
        mask = visible_keys(length, length, causal=self.causal, window=self.windows.get(layer))
        return mask[1 if self.causal else 0 :]

    def queries(self, layer: int, length: int) -> Float[Tensor, " key"]:
        """How many queries after position 0 see each position (all of them, if attention is not causal)."""
        return self.sees(layer, length).double().sum(0)

    def uniform(self, layer: int, length: int) -> Float[Tensor, " key"]:
        """What these queries together give each position if each gives every key that it sees the same."""
        seen = self.sees(layer, length).double()
        return (seen / seen.sum(1, keepdim=True)).sum(0)


@dataclass
class _Alone:
    """Attention to one token, as it is and with its own key unscaled, summed over heads and queries."""

    there: float = 0.0
    without: float = 0.0
    count: float = 0.0


class _Prompt:
    """One prompt under way."""

    def __init__(self, number: int, sites: Sequence[Site]) -> None:
        self.number, self.length = number, 0
        self.outliers = PromptOutliers(sites)
        self.received = _Received()
        self.alone: dict[int, _Alone] = {}
        self.sizes: list[dict[str, Any]] = []

    def norm(self, site: Site, x: Float[Tensor, "pos d"], y: Float[Tensor, "pos d"]) -> None:
        sizes = self.outliers.add(site, x, y)
        if sizes is None:
            return
        self.length = len(x)
        starts = _starts(len(x))
        stacked = torch.stack([sizes.outlier.double(), *(getattr(sizes, n).double() for n in _SIZES)])
        sums = np.add.reduceat(stacked.cpu().numpy(), starts, axis=1)
        for column, first in enumerate(starts):
            self.sizes.append(
                {
                    "prompt": self.number,
                    "site": site.name,
                    "layer": site.layer,
                    "first": first,
                    "tokens": ([*starts, len(x)])[column + 1] - first,
                    "outliers": int(sums[0, column]),
                    **{n: float(sums[i, column]) for i, n in enumerate(_SIZES, start=1)},
                }
            )

    def attention(self, attended: AttentionLayer) -> None:
        pattern, layer = attended.seen.pattern, attended.layer
        every = range(len(pattern))
        chosen = list(every) if attended.wanted is None else [h for h in attended.wanted if h in every]
        pattern = pattern[chosen] if len(chosen) < len(pattern) else pattern
        self.length = pattern.shape[-1]
        if self.length < 2 or not chosen:
            return
        self.received.causal = attended.seen.causal
        self.received.windows[layer] = attended.seen.window
        rows = at_least_float32(pattern[:, 1 if self.received.causal else 0 :])
        # (a sum of booleans takes four times as long)
        self.received.much[layer] = (rows > MUCH).view(torch.uint8).sum(1, dtype=torch.int32).double().cpu()
        self.received.total[layer] = rows.sum(1, dtype=torch.float32).double().cpu()
        sinks = self._rates(layer) > SINK_SHARE
        wanted = sorted({*self.outliers.found, *sinks.nonzero().flatten().tolist()})
        if wanted and attended.site.scales and attended.heads is not None:
            self._alone(attended, chosen, rows, wanted)

    def _rates(self, layer: int) -> Float[Tensor, " key"]:
        """Share of (head, query) that give each position over MUCH; NaN where too few see it."""
        queries = self.received.queries(layer, self.length)
        rates = self.received.much[layer].sum(0) / (len(self.received.much[layer]) * queries.clamp_min(1))
        return rates.where(queries >= LEAST_QUERIES, math.nan)

    def _alone(
        self,
        attended: AttentionLayer,
        chosen: Sequence[int],
        rows: Float[Tensor, "head query key"],
        wanted: Sequence[int],
    ) -> None:
        heads, site, seen = attended.heads, attended.site, attended.seen
        assert heads is not None
        constant = attended.constant.rest  # the other tokens', at position 0 too
        positions = torch.tensor(wanted, device=seen.x.device)
        unscaled = site.affine(site.project(seen.x[positions].double()) / constant)
        change = heads.keys(unscaled, positions) - heads.keys(seen.y[positions].double(), positions)
        delta = _scores(heads, seen.y[len(seen.y) - rows.shape[1] :], change, chosen, len(seen.y))
        weight = rows[..., positions].double()
        rest = torch.ones(self.length, len(wanted), dtype=rows.dtype, device=rows.device)
        rest[positions, torch.arange(len(wanted), device=rows.device)] = 0.0
        # Summed without the weight: the remainder next to 0.9999 is exact too.
        others = torch.matmul(rows, rest).double()
        # e^Δ over- and underflows: both sides are divided by the larger of them.
        top = delta.clamp_min(0.0)
        lifted = weight * (delta - top).exp()
        without = lifted / (others * (-top).exp() + lifted).clamp_min(1e-300)
        visible = self.received.sees(attended.layer, self.length).to(rows.device)
        for column, at in enumerate(wanted):
            sees = visible[:, at]
            sums = self.alone.setdefault(at, _Alone())
            sums.there += float(weight[:, sees, column].sum())
            sums.without += float(without[:, sees, column].sum())
            sums.count += float(sees.sum()) * len(chosen)

    def rows(self) -> dict[str, list[dict[str, Any]]]:
        """The record of the prompt."""
        layers = sorted(self.received.much)
        rates = {layer: self._rates(layer) for layer in layers}
        best = torch.stack([rates[i].nan_to_num(-1.0) for i in layers]) if layers else torch.zeros(0, self.length)
        sinks = (best > SINK_SHARE).any(0) if layers else torch.zeros(self.length, dtype=torch.bool)
        marked = sorted({*self.outliers.found, *sinks.nonzero().flatten().tolist()})
        queries = {i: self.received.queries(i, self.length) for i in layers}
        uniform = {i: self.received.uniform(i, self.length) for i in layers}
        found = []
        for at in marked:
            row: dict[str, Any] = {"prompt": self.number, "position": at} | self._about(at)
            row |= {"sink": bool(sinks[at]), "sink_layer": math.nan, "sink_rate": math.nan, "received": math.nan}
            if layers and bool((best[:, at] >= 0).any()):
                top = int(best[:, at].argmax())
                row |= {"sink_layer": layers[top], "sink_rate": float(best[top, at])}
            row["uniform"] = math.nan
            if pairs := sum(len(self.received.total[i]) * float(queries[i][at]) for i in layers):  # of head and query
                row["received"] = sum(float(self.received.total[i][:, at].sum()) for i in layers) / pairs
                row["uniform"] = sum(len(self.received.total[i]) * float(uniform[i][at]) for i in layers) / pairs
            alone = self.alone.get(at, _Alone())
            row["received_no_scaling"] = alone.without / alone.count if alone.count else math.nan
            row["received_there"] = alone.there / alone.count if alone.count else math.nan
            found.append(row)
        return {"sinks": found, "heads": self._heads(marked), "sizes": self.sizes, "dimensions": self._dimensions()}

    def _about(self, at: int) -> dict[str, Any]:
        outlier, longest, massive = self.outliers.found.get(at), self.outliers.longest, self.outliers.massive
        assert longest is not None
        assert massive is not None
        return {
            "outlier": outlier is not None,
            "massive": bool(massive[at]),
            "emerges_at": outlier.emerges.name if outlier else "",
            "emerges_in": float(outlier.emerges.layer) if outlier else math.nan,
            "writer": outlier.writer if outlier else "",
            "writer_share": outlier.writer_share if outlier else math.nan,
            "longest_at": longest.site[at],
            "length_ratio": float(longest.ratio[at]),
            "sigma": float(longest.sigma[at]),
            "length_before": float(longest.before[at]),
            "length_after": float(longest.after[at]),
            "dimensions": outlier.dimensions if outlier else "",
        }

    def _heads(self, marked: Sequence[int]) -> list[dict[str, Any]]:
        rows = []
        for layer in sorted(self.received.much):
            sees, uniform = self.received.sees(layer, self.length), self.received.uniform(layer, self.length)
            later = float(sees[:, 0].sum()) if self.length > 1 else 0.0
            seeing = float(sees[:, marked].any(1).sum()) if marked else 0.0  # queries that see one of them
            much, total = self.received.much[layer], self.received.total[layer]
            for head in range(len(much)):
                rows.append(
                    {
                        "prompt": self.number,
                        "layer": layer,
                        "row": head,
                        "queries": seeing,
                        "much": float(much[head, marked].sum()) if marked else 0.0,
                        "attention": float(total[head, marked].sum()) if marked else 0.0,
                        "uniform": float(uniform[marked].sum()) if marked else 0.0,
                        "later": later,
                        "seen_by": float(sees.sum(0).max()),
                        "first_uniform": float(uniform[0]),
                        "first_much": float(much[head, 0]),
                        "first_attention": float(total[head, 0]),
                    }
                )
        return rows

    def _dimensions(self) -> list[dict[str, Any]]:
        found = self.outliers.dimensions.items()
        return [{"prompt": self.number, "site": s, "dimension": d, "ratio": ratio} for (s, d), ratio in found]


def _scores(
    heads: Heads,
    y: Float[Tensor, "query d_model"],
    change: Float[Tensor, "key head d_head"],
    chosen: Sequence[int],
    length: int,
) -> Float[Tensor, "chosen query key"]:
    """What the last queries of a prompt, which read y, score vectors that are no keys but differences of keys."""
    if heads.rotary is None and heads.q_norm is None:  # the few vectors through W_Q, not the many queries
        back = torch.einsum("hdk,nhk->hdn", heads.W_Q[chosen], change[:, chosen])
        lift = torch.einsum("hk,nhk->hn", heads.b_Q[chosen], change[:, chosen])
        return (torch.matmul(y.double(), back) + lift[:, None]) / heads.divisor
    q = heads.queries(y, torch.arange(length - len(y), length, device=y.device))
    return torch.einsum("qhd,khd->hqk", q[:, chosen], change[:, chosen]) / heads.divisor


class Sinks(Probe):
    name = "sinks"
    summary = "where attention falls, which tokens are outliers, and where they come from"
    tables = (SINKS, SINK_HEADS, TOKEN_SIZES, OUTLIER_DIMENSIONS)
    needs = Needs(norms=True, attention=True, calibration=True)
    interleaved = True
    thresholds = {  # noqa: RUF012 - constants
        "sink_attention": MUCH,
        "sink_share": SINK_SHARE,
        "sink_least_queries": LEAST_QUERIES,
        "outlier_ratio": OUTLIER_RATIO,
        "outlier_least_tokens": LEAST_TOKENS,
    }
    absent = "attention sinks and outlier tokens"

    def start(self, view: View) -> Observer:
        return _Watching(view)

    def finish(self, pieces: Sequence[Piece], context: Context) -> ProbeResults:
        frames = {
            name: pd.concat([p.tables[name] for p in pieces if name in p.tables], ignore_index=True)
            for name in dict.fromkeys(n for p in pieces for n in p.tables)
        }
        made = {t.name: t.empty() for t in (SINKS, SINK_HEADS, TOKEN_SIZES, OUTLIER_DIMENSIONS)}
        if "sinks" in frames:
            sinks = frames["sinks"].sort_values(["prompt", "position"])
            sinks["token"] = [context.token(int(p), int(i)) for p, i in sinks[["prompt", "position"]].to_numpy()]
            for column in ("emerges_in", "sink_layer"):
                if sinks[column].notna().all():
                    sinks[column] = sinks[column].astype(np.int64)
            made["sinks"] = sinks[SINKS.names].reset_index(drop=True)
        if "heads" in frames:
            made["sink_heads"] = _by_head(frames["heads"])
        if "sizes" in frames:
            made["token_sizes"] = _by_position(frames["sizes"])
        if "dimensions" in frames:
            layers = frames["sizes"].drop_duplicates("site").set_index("site")["layer"]
            grouped = frames["dimensions"].sort_values("prompt").groupby(["site", "dimension"], sort=False)["ratio"]
            table = grouped.agg(ratio="mean", prompts="size").reset_index()
            table["layer"] = table["site"].map(layers)
            made["outlier_dimensions"] = table[OUTLIER_DIMENSIONS.names]
        short = sum(int(p.info.get("short", 0)) for p in pieces)
        note = f"sinks: {short} prompts of fewer than {LEAST_TOKENS} tokens were not searched for outlier tokens"
        few = sum(int(p.info.get("few", 0)) for p in pieces)
        unseen = (
            f"sinks: in {counted(few, 'prompt')} no token is seen by {LEAST_QUERIES} queries that see another one: no "
            "sink can be detected there"
        )
        return ProbeResults(made, (note,) * (short > 0) + (unseen,) * (few > 0))

    def findings(self, tables: Mapping[str, pd.DataFrame], provenance: Mapping[str, Any]) -> list[Finding]:
        sizes = tables.get("token_sizes")
        if sizes is None or not len(sizes):
            return []
        longest = int(provenance.get("prompts", {}).get("longest", LEAST_TOKENS))
        heads = tables.get("sink_heads", SINK_HEADS.empty())
        seen = len(heads) == 0 or not bool((heads["seen_by"] < LEAST_QUERIES).all())
        where = (in_layers(provenance), among_heads(provenance))
        said = _sentences(tables["sinks"], tables["outlier_dimensions"], longest, seen, where)
        return [Finding(text, "by-head", DESCRIBED) for text in said]

    def cost(self, shape: Shape) -> Cost:
        return Cost(passes=1.3)


class _Watching(Observer):
    def __init__(self, view: View) -> None:
        self.sites = view.sites
        self.kept: dict[str, list[dict[str, Any]]] = {}
        self.heads = view.heads
        self.short, self.few = 0, 0
        self.under_way: dict[int, _Prompt] = {}

    def _of(self, number: int) -> _Prompt:
        if number not in self.under_way:
            self.under_way[number] = _Prompt(number, self.sites)
        return self.under_way[number]

    def end(self, prompt: int) -> None:
        seen = self.under_way.pop(prompt, None)
        if seen is not None and seen.outliers.longest is not None:
            self.short += seen.length < LEAST_TOKENS
            made = seen.rows()
            self.few += bool(made["heads"]) and all(row["seen_by"] < LEAST_QUERIES for row in made["heads"])
            for name, rows in made.items():
                self.kept.setdefault(name, []).extend(rows)

    def norm(self, prompt: int, site: Site, x: Float[Tensor, "pos d"], y: Float[Tensor, "pos d"]) -> None:
        self._of(prompt).norm(site, x, y)

    def attention(self, prompt: int, attended: AttentionLayer) -> None:
        self._of(prompt).attention(attended)

    def piece(self) -> Piece:
        frames = {name: pd.DataFrame(rows) for name, rows in self.kept.items() if rows}
        if "heads" in frames:  # a row of the pattern is the head itself, unless some were chosen
            row = frames["heads"].pop("row")
            frames["heads"]["head"] = row if self.heads is None else row.map(dict(enumerate(sorted(set(self.heads)))))
        return Piece(tables=frames, info={"short": self.short, "few": self.few})


def _by_head(rows: pd.DataFrame) -> pd.DataFrame:
    sums = rows.sort_values("prompt", kind="stable").groupby(["layer", "head"])
    names = ["queries", "much", "attention", "uniform", "later", "first_much", "first_attention", "first_uniform"]
    total = sums[names].sum().assign(seen_by=sums["seen_by"].max()).reset_index()
    seen, later = total["queries"].where(total["queries"] > 0), total["later"].where(total["later"] > 0)
    made = pd.DataFrame(
        {
            "layer": total["layer"],
            "head": total["head"],
            "queries": total["queries"].astype(np.int64),
            "sink_rate": total["much"] / seen,
            "attention": total["attention"] / seen,
            "uniform": total["uniform"] / seen,
            "first_rate": total["first_much"] / later,
            "first_attention": total["first_attention"] / later,
            "first_uniform": total["first_uniform"] / later,
            "seen_by": total["seen_by"].astype(np.int64),
        }
    )
    return made[SINK_HEADS.names]


def _by_position(rows: pd.DataFrame) -> pd.DataFrame:
    order = {site: i for i, site in enumerate(dict.fromkeys(rows["site"]))}
    rows = rows.sort_values("prompt", kind="stable")
    names = ["tokens", "outliers", "sigma", "before", "after"]
    total = rows.groupby(["site", "layer", "first"])[names].sum().reset_index()
    total = total.iloc[np.lexsort((total["first"], total["site"].map(order)))].reset_index(drop=True)
    made = pd.DataFrame(
        {
            "site": total["site"],
            "layer": total["layer"],
            "first": total["first"],
            "last": np.maximum(2 * total["first"], 1) - 1,
            "tokens": total["tokens"],
            "sigma_mean": total["sigma"] / total["tokens"],
            "length_before_mean": total["before"] / total["tokens"],
            "length_after_mean": total["after"] / total["tokens"],
            "outliers": total["outliers"],
        }
    )
    return made[TOKEN_SIZES.names]


# --------------------------------------------------------------------------------------------------------- findings


def _sentences(
    sinks: pd.DataFrame, dimensions: pd.DataFrame, longest: int, seen: bool, where: tuple[str, str] = ("", "")
) -> list[str]:
    """`where`: the layers and heads asked for, as `base.in_layers` and `base.among_heads` put them."""
    if not len(sinks):
        no_sink = f"Attention has no sink here{''.join(where)}"
        if not seen:
            no_sink = f"Whether attention has a sink cannot be decided where no token is seen by {LEAST_QUERIES} others"
        said = [f"{no_sink}, and no token is an outlier at any norm."]
        if longest < LEAST_TOKENS:
            said = ["Sinks and outlier tokens were not looked for: the prompts are too short."]
    else:
        said = []
        at_first = sinks[sinks["position"] == 0]
        if len(at_first) and bool(at_first["sink"].any() | at_first["outlier"].any()):
            said.append(_about("Position 0", at_first, *where))
        rest = sinks[sinks["position"] != 0]
        if len(rest):
            common = rest["token"].value_counts()
            names = ", ".join(repr(visible(t)) for t in common.index[:_NAMED])
            said.append(
                _about(f"Tokens behind position 0 ({names}{', …' if len(common) > _NAMED else ''})", rest, *where)
            )
    if len(dimensions):
        worst = dimensions.iloc[int(dimensions["ratio"].argmax())]
        said.append(
            f"{dimensions['dimension'].nunique()} dimensions are over {OUTLIER_RATIO:g} times the median dimension for "
            f"the median token at some norm; most, dimension {int(worst['dimension'])}, {worst['ratio']:.0f} times at "
            f"{worst['site']}."
        )
    return said


def _about(who: str, rows: pd.DataFrame, layers: str, heads: str) -> str:
    sink, outlier = rows[rows["sink"]], rows[rows["outlier"]]
    parts = []
    if len(sink):
        layer = int(sink["sink_layer"].mode().iloc[0])
        rate = percent(float(sink.loc[sink["sink_layer"] == layer, "sink_rate"].median()))
        got, even = (percent(float(sink[column].mean())) for column in ("received", "uniform"))
        parts.append(
            f"in {counted(sink['prompt'].nunique(), 'prompt')} an attention sink (in layer {layer} {rate} of heads and "
            f"queries{heads} give it over {MUCH:g}; over {layers.removeprefix(' in ') or 'all layers'} it gets {got}, "
            f"uniform attention would give {even})"
        )
    if len(outlier):
        where, wrote = outlier["emerges_at"].mode().iloc[0], outlier["writer"].mode().iloc[0]
        share = float(outlier["writer_share"].median())
        parts.append(
            f"in {counted(outlier['prompt'].nunique(), 'prompt')} up to {outlier['length_ratio'].max():.0f} times "
            f"longer than the median token (from {where} on"
            + (f", written by {wrote}, {percent(share)} of its squared length" if wrote else "")
            + f"; largest dimensions {outlier['dimensions'].mode().iloc[0]})"
        )
    else:
        parts.append(f"not an outlier: at most {rows['length_ratio'].max():.1f} times longer than the median token")
    known = rows[rows["received_no_scaling"].notna()]
    if len(known):
        parts.append(
            f"with its own key unscaled it would get {percent(float(known['received_no_scaling'].mean()))} instead of "
            f"{percent(float(known['received_there'].mean()))} in those layers"
        )
    return f"{who}: {'; '.join(parts)}."
