"""The probe `sinks`: where attention falls, which tokens and dimensions are outliers, where they come from.

Sink rate: share of (head, query) that give a position over 0.3 of their attention (Gu et al. 2025, "When attention sink
emerges in language models"). Outliers: `ln_probe.analyses.probes.outliers`. What a token would get if its key alone
were not scaled: with k' made of Px / c, c the mean sigma of tokens that are not at position 0,

    w' = w e^Δ / (1 - w + w e^Δ),    Δ = q·(k' - k) / divisor
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Float, Float64
from torch import Tensor

from ln_probe.analyses.probes.attention_layer import AttentionLayer
from ln_probe.analyses.probes.base import (
    DESCRIBED,
    Finding,
    Needs,
    Observer,
    Probe,
    ProbeResults,
    Run,
    among_heads,
    in_layers,
)
from ln_probe.analyses.probes.columns import OUTLIER_DIMENSIONS, SINK_HEADS, SINKS
from ln_probe.analyses.probes.outliers import LEAST_TOKENS, OUTLIER_RATIO, Outlier, PromptOutliers
from ln_probe.analyses.text import counted, percent, visible
from ln_probe.hooks.attention import Heads
from ln_probe.hooks.model import at_least_float32
from ln_probe.hooks.norm import Norm
from ln_probe.hooks.stream import visible_keys

MUCH = 0.3  # of a query's attention: Gu et al.'s epsilon
# Of (head, query) of a layer that give it MUCH: a layer of heads that look elsewhere has under a tenth.
SINK_SHARE = 0.3
LEAST_QUERIES = 10  # that see a position: the few that see the last tokens often have nothing better
_NAMED = 3  # tokens named in a finding


def counting_queries(length: int, *, causal: bool, window: int | None = None) -> Bool[Tensor, "query key"]:
    """Which queries see which positions; of a causal layer only queries after position 0 count."""
    return visible_keys(length, length, causal=causal, window=window)[1 if causal else 0 :]


@dataclass(frozen=True)
class _Layer:
    """Attention of the measured heads of one layer to every position, over the queries that count.

    Attributes:
        heads: the measured ones.
        seen: which of these queries see which positions.
        much: how many of them give a position over MUCH; total: what they give it together.
    """

    heads: list[int]
    seen: Bool[Tensor, "query key"]
    much: Float[Tensor, "head key"]
    total: Float[Tensor, "head key"]

    @cached_property
    def queries(self) -> Float[Tensor, " key"]:
        """How many queries see each position."""
        return self.seen.double().sum(0)

    @cached_property
    def uniform(self) -> Float[Tensor, " key"]:
        """What these queries together give each position if each gives every key that it sees the same."""
        seen = self.seen.double()
        return (seen / seen.sum(1, keepdim=True)).sum(0)

    @cached_property
    def rates(self) -> Float[Tensor, " key"]:
        """Share of (head, query) that give each position over MUCH; NaN where too few see it."""
        rates = self.much.sum(0) / (len(self.much) * self.queries.clamp_min(1))
        return rates.where(self.queries >= LEAST_QUERIES, math.nan)


class _Prompt:
    """One prompt under way."""

    def __init__(self, number: int, sites: Sequence[Norm]) -> None:
        self.number, self.length = number, 0
        self.outliers = PromptOutliers(sites)
        self.layers: dict[int, _Layer] = {}
        # Attention to one token, as it is and with its own key unscaled, summed over heads and queries; their number.
        self.alone: dict[int, Float64[np.ndarray, " sum"]] = {}

    def norm(self, site: Norm, x: Float[Tensor, "pos d"], y: Float[Tensor, "pos d"]) -> None:
        if self.outliers.add(site, x, y) is not None:
            self.length = len(x)

    def attention(self, attended: AttentionLayer) -> None:
        pattern, seen = attended.seen.pattern, attended.seen
        chosen = attended.measured
        self.length = pattern.shape[-1]
        if self.length < 2 or not chosen:
            return
        pattern = pattern[chosen] if len(chosen) < len(pattern) else pattern
        rows = at_least_float32(pattern[:, 1 if seen.causal else 0 :])
        self.layers[attended.layer] = layer = _Layer(
            chosen,
            counting_queries(self.length, causal=seen.causal, window=seen.window),
            # (a sum of booleans takes four times as long)
            (rows > MUCH).view(torch.uint8).sum(1, dtype=torch.int32).double().cpu(),
            rows.sum(1, dtype=torch.float32).double().cpu(),
        )
        wanted = self._marked(layer.rates > SINK_SHARE)
        if wanted and attended.site.scales and attended.heads is not None:
            self._leave_alone(attended, layer, rows, wanted)

    def _marked(self, sinks: Bool[Tensor, " key"]) -> list[int]:
        """Positions of sinks and outliers."""
        return sorted({*self.outliers.found, *sinks.nonzero().flatten().tolist()})

    def _leave_alone(
        self, attended: AttentionLayer, layer: _Layer, rows: Float[Tensor, "head query key"], wanted: Sequence[int]
    ) -> None:
        """Add to `alone` what these tokens get in a layer, as it is and if their own key alone were not scaled."""
        heads, site, seen = attended.maps, attended.site, attended.seen
        assert attended.constant is not None
        constant = attended.constant.rest  # the other tokens', at position 0 too
        positions = torch.tensor(wanted, device=seen.x.device)
        unscaled = site.affine(site.project(seen.x[positions].double()) / constant)
        change = heads.keys(unscaled, positions) - heads.keys(seen.y[positions].double(), positions)
        delta = _scores(heads, seen.y[len(seen.y) - rows.shape[1] :], change, layer.heads, len(seen.y))
        weight = rows[..., positions].double()
        rest = torch.ones(self.length, len(wanted), dtype=rows.dtype, device=rows.device)
        rest[positions, torch.arange(len(wanted), device=rows.device)] = 0.0
        # Summed without the weight: the remainder next to 0.9999 is exact too.
        others = torch.matmul(rows, rest).double()
        # e^Δ over- and underflows: both sides are divided by the larger of them.
        top = delta.clamp_min(0.0)
        lifted = weight * (delta - top).exp()
        without = lifted / (others * (-top).exp() + lifted).clamp_min(1e-300)
        visible = layer.seen.to(rows.device)
        for column, at in enumerate(wanted):
            sees = visible[:, at]
            sums = [float(weights[:, sees, column].sum()) for weights in (weight, without)]
            sums.append(float(sees.sum()) * len(layer.heads))
            self.alone[at] = self.alone.get(at, np.zeros(3)) + np.array(sums)

    def rows(self) -> dict[str, list[dict[str, Any]]]:
        """The record of the prompt."""
        layers = dict(sorted(self.layers.items()))
        every = [layer.rates.nan_to_num(-1.0) for layer in layers.values()]
        best = torch.stack(every) if every else torch.zeros(0, self.length)
        sinks = (best > SINK_SHARE).any(0)
        found = []
        for at in (marked := self._marked(sinks)):
            row: dict[str, Any] = {"prompt": self.number, "position": at} | self._about(at)
            row |= {"sink": bool(sinks[at]), "sink_layer": math.nan, "sink_rate": math.nan}
            if bool((best[:, at] >= 0).any()):
                top = int(best[:, at].argmax())
                row |= {"sink_layer": list(layers)[top], "sink_rate": float(best[top, at])}
            pairs = sum(len(each.heads) * float(each.queries[at]) for each in layers.values())  # of head and query
            given = sum(float(each.total[:, at].sum()) for each in layers.values())
            uniform = sum(len(each.heads) * float(each.uniform[at]) for each in layers.values())
            there, without, count = self.alone.get(at, np.zeros(3)).tolist()
            found.append(
                row
                | {
                    "received": given / pairs if pairs else math.nan,
                    "uniform": uniform / pairs if pairs else math.nan,
                    "received_there": there / count if count else math.nan,
                    "received_no_scaling": without / count if count else math.nan,
                }
            )
        dimensions = [
            {"prompt": self.number, "site": site, "dimension": dimension, "ratio": ratio}
            for (site, dimension), ratio in self.outliers.dimensions.items()
        ]
        heads = [row for number, layer in layers.items() for row in self._heads(number, layer, marked)]
        return {"sinks": found, "heads": heads, "dimensions": dimensions}

    def _about(self, at: int) -> dict[str, Any]:
        longest, massive = self.outliers.longest, self.outliers.massive
        assert longest is not None
        assert massive is not None
        return asdict(self.outliers.found.get(at, Outlier())) | {
            "outlier": at in self.outliers.found,
            "massive": bool(massive[at]),
            "longest_at": longest.site[at],
            "length_ratio": float(longest.ratio[at]),
            "sigma": float(longest.sigma[at]),
            "length_before": float(longest.before[at]),
            "length_after": float(longest.after[at]),
        }

    def _heads(self, number: int, layer: _Layer, marked: Sequence[int]) -> Iterator[dict[str, Any]]:
        """Sums over the queries of one layer, for each of its heads: what they give the marked positions, and the
        first one."""
        at, seen = torch.tensor(marked, dtype=torch.long), layer.seen
        alike = {
            "prompt": self.number,
            "layer": number,
            "queries": float(seen[:, at].any(1).sum()),  # that see one of them
            "uniform": float(layer.uniform[at].sum()),
            "later": float(seen[:, 0].sum()),
            "seen_by": float(seen.sum(0).max()),
            "first_uniform": float(layer.uniform[0]),
        }
        for head, much, total in zip(layer.heads, layer.much, layer.total, strict=True):
            yield alike | {
                "head": head,
                "much": float(much[at].sum()),
                "attention": float(total[at].sum()),
                "first_much": float(much[0]),
                "first_attention": float(total[0]),
            }


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
    tables = (SINKS, SINK_HEADS, OUTLIER_DIMENSIONS)
    needs = Needs(norms=True, attention=True)
    interleaved = True
    thresholds = {  # noqa: RUF012 - constants
        "sink_attention": MUCH,
        "sink_share": SINK_SHARE,
        "sink_least_queries": LEAST_QUERIES,
        "outlier_ratio": OUTLIER_RATIO,
        "outlier_least_tokens": LEAST_TOKENS,
    }
    absent = "attention sinks and outlier tokens"

    def start(self, run: Run) -> Observer:
        return _Watching(run)

    def findings(self, tables: Mapping[str, pd.DataFrame], provenance: Mapping[str, Any]) -> list[Finding]:
        heads = tables["sink_heads"]
        if not len(heads) and not len(tables["sinks"]):
            return []
        longest = int(provenance.get("prompts", {}).get("longest", LEAST_TOKENS))
        seen = len(heads) == 0 or not bool((heads["seen_by"] < LEAST_QUERIES).all())
        where = (in_layers(provenance), among_heads(provenance))
        said = _sentences(tables["sinks"], tables["outlier_dimensions"], longest, seen, where)
        return [Finding(text, "by-head", DESCRIBED) for text in said]


class _Watching(Observer):
    def __init__(self, run: Run) -> None:
        self.run = run
        self.rows: dict[str, list[dict[str, Any]]] = defaultdict(list)
        self.short, self.few = 0, 0
        self.under_way: dict[int, _Prompt] = {}

    def _of(self, number: int) -> _Prompt:
        if number not in self.under_way:
            self.under_way[number] = _Prompt(number, self.run.norms)
        return self.under_way[number]

    def norm(self, prompt: int, site: Norm, x: Float[Tensor, "pos d"], y: Float[Tensor, "pos d"]) -> None:
        self._of(prompt).norm(site, x, y)

    def attention(self, prompt: int, attended: AttentionLayer) -> None:
        self._of(prompt).attention(attended)

    def end(self, prompt: int) -> None:
        seen = self.under_way.pop(prompt, None)
        if seen is not None and seen.outliers.longest is not None:
            self.short += seen.length < LEAST_TOKENS
            of_prompt = seen.rows()
            self.few += bool(of_prompt["heads"]) and all(row["seen_by"] < LEAST_QUERIES for row in of_prompt["heads"])
            for name, rows in of_prompt.items():
                self.rows[name] += rows

    def finish(self) -> ProbeResults:
        frames = {name: pd.DataFrame(rows) for name, rows in self.rows.items() if rows}
        tables = {}
        if "sinks" in frames:
            sinks = frames["sinks"].sort_values(["prompt", "position"])
            sinks["token"] = [self.run.strings[int(p)][int(i)] for p, i in sinks[["prompt", "position"]].to_numpy()]
            for column in ("emerges_in", "sink_layer"):
                if sinks[column].notna().all():
                    sinks[column] = sinks[column].astype(np.int64)
            tables["sinks"] = sinks[SINKS.names].reset_index(drop=True)
        if "heads" in frames:
            tables["sink_heads"] = _by_head(frames["heads"])
        if "dimensions" in frames:
            layers = {site.name: site.layer for site in self.run.norms}
            grouped = frames["dimensions"].sort_values("prompt").groupby(["site", "dimension"], sort=False)["ratio"]
            table = grouped.agg(ratio="mean", prompts="size").reset_index()
            tables["outlier_dimensions"] = table.assign(layer=table["site"].map(layers))[OUTLIER_DIMENSIONS.names]
        notes = []
        if self.short:
            notes.append(
                f"sinks: {self.short} prompts of fewer than {LEAST_TOKENS} tokens were not searched for outlier tokens"
            )
        if self.few:
            notes.append(
                f"sinks: in {counted(self.few, 'prompt')} no token is seen by {LEAST_QUERIES} queries that see another "
                "one: no sink can be detected there"
            )
        return ProbeResults(tables, notes)


def _by_head(rows: pd.DataFrame) -> pd.DataFrame:
    sums = rows.sort_values("prompt", kind="stable").groupby(["layer", "head"])
    names = ["queries", "much", "attention", "uniform", "later", "first_much", "first_attention", "first_uniform"]
    total = sums[names].sum().assign(seen_by=sums["seen_by"].max()).reset_index()
    seen, later = (total[count].where(total[count] > 0) for count in ("queries", "later"))
    made = total.assign(
        sink_rate=total["much"] / seen,
        attention=total["attention"] / seen,
        uniform=total["uniform"] / seen,
        first_rate=total["first_much"] / later,
        first_attention=total["first_attention"] / later,
        first_uniform=total["first_uniform"] / later,
    )
    return made.astype({"queries": np.int64, "seen_by": np.int64})[SINK_HEADS.names]


# --------------------------------------------------------------------------------------------------------- findings


def _sentences(
    sinks: pd.DataFrame, dimensions: pd.DataFrame, longest: int, seen: bool, where: tuple[str, str] = ("", "")
) -> list[str]:
    """`where`: the layers and heads asked for, as `base.in_layers` and `base.among_heads` put them."""
    said = []
    if not len(sinks) and longest < LEAST_TOKENS:
        said.append("Sinks and outlier tokens were not looked for: the prompts are too short.")
    elif not len(sinks):
        no_sink = f"Attention has no sink here{''.join(where)}"
        if not seen:
            no_sink = f"Whether attention has a sink cannot be decided where no token is seen by {LEAST_QUERIES} others"
        said.append(f"{no_sink}, and no token is an outlier at any norm.")
    at_first = sinks["position"] == 0 if len(sinks) else pd.Series(dtype=bool)
    if len(first := sinks[at_first]) and bool(first["sink"].any() | first["outlier"].any()):
        said.append(_about("Position 0", first, *where))
    if len(rest := sinks[~at_first]):
        common = rest["token"].value_counts()
        names = ", ".join(repr(visible(t)) for t in common.index[:_NAMED])
        more = ", …" if len(common) > _NAMED else ""
        said.append(_about(f"Tokens behind position 0 ({names}{more})", rest, *where))
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
