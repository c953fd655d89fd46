"""The measures of the probe `selectability` for a sample of keys, each among all that its query sees."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from jaxtyping import Float64, Int8, Int64, Shaped

from ln_probe.analyses.attended import Attended
from ln_probe.analyses.geometry.any_position import attainable_anywhere
from ln_probe.analyses.geometry.query_sets import QuerySet
from ln_probe.analyses.geometry.some_keys import SomeKeys, some_attention, some_keys
from ln_probe.analyses.geometry.witnesses import GivenSet
from ln_probe.analyses.machinery.parallel import in_threads

Measures = dict[str, Shaped[np.ndarray, " drawn"]]


def over_nothing(
    attended: Attended, rows: Float64[np.ndarray, "key d"], drawn: Int64[np.ndarray, " drawn"]
) -> Measures:
    """Keys at the norm's output: no set of queries, so relative margins and no attention."""
    return _joined(
        _as_measures(some_keys(here, None, None, only, causal=attended.grows), start, only, last)
        for here, start, only, last in _sets(attended, rows, drawn)
    )


def sampled_heads(attended: Attended, variant: str, prompt: int) -> dict[str, Shaped[np.ndarray, "head drawn"]]:
    """Keys as attention sees them, of the chosen heads."""
    keys = attended.keys(variant).permute(1, 0, 2)[attended.chosen].cpu().numpy()
    _, most = attended.spread(variant)

    def one(place: int) -> Measures:
        head = attended.chosen[place]
        drawn = attended.drawn(prompt, head)
        assert drawn is not None
        found = _joined(
            _of_set(attended, place, np.ascontiguousarray(here), start, only, last)
            for here, start, only, last in _sets(attended, keys[place], drawn)
        )
        received = most[head, found["position"]]
        least = np.fmax(received, found["attainable_last"])
        weight, upper = at_any_position(attended, place, keys[place], least, found["position"].astype(np.int64))
        return found | {"pattern_max": received, "attainable": weight, "attainable_upper": upper}

    return stacked(in_threads(one, range(len(attended.chosen))))


def at_any_position(
    attended: Attended,
    row: int,
    keys: Float64[np.ndarray, "key d"],
    least: Float64[np.ndarray, " some"],
    only: Int64[np.ndarray, " some"],
) -> tuple[Float64[np.ndarray, " some"], Float64[np.ndarray, " some"]]:
    """Bounds of the largest weight that keys of a head can receive at any position that sees them and another key.

    From queries of the observed set, and from those that occurred: one in twenty lies outside of it.

    Args:
        row: place of the head among the chosen ones.
        keys: all keys of the prompt.
        least: weights that each of the keys asked for really received, or that a query of the set is known to give.
        only: which keys are asked for.
    """
    queries = attended.observed(row)
    if queries is None:
        nothing = np.full(len(only), np.nan)
        return nothing, nothing
    assert attended.heads is not None
    bias = attended.key_bias
    weight, upper = attainable_anywhere(
        keys,
        None if bias is None else bias[row],
        queries,
        rotary=attended.heads.rotary is not None,
        causal=attended.heads.causal,
        window=attended.heads.window,
        only=only,
    )
    return np.fmax(weight, least), np.fmax(upper, least)


def _of_set(
    attended: Attended,
    place: int,
    keys: Float64[np.ndarray, "key d"],
    start: int,
    only: Int64[np.ndarray, " some"],
    last: int,
) -> Measures:
    bias = attended.key_bias
    lift = None if bias is None else bias[place, start : start + len(keys)]
    reachable = attended.reachable(last)
    if reachable is None:
        return _of_unbounded(attended, place, keys, lift, start, only, last)
    full = QuerySet(reachable[0][place], reachable[1][place]).compact()
    geometry = some_keys(keys, lift, full, only, causal=attended.grows)
    found = _as_measures(geometry, start, only, last)
    radii = attended.calibration.radii
    if attended.layer in radii:
        rho = float(radii[attended.layer][attended.chosen[place]])
        smaller = QuerySet(full.center, full.axes * rho, full.slack, None if full.given is None else full.given * rho)
        weight, above = some_attention(keys, lift, smaller, only, geometry.attainable_at)
        most = np.fmax(geometry.attainable, weight)
        found |= {"attainable_last": weight, "attainable_last_upper": above, "attainable_reachable": most}
    return found


def _of_unbounded(
    attended: Attended,
    place: int,
    keys: Float64[np.ndarray, "key d"],
    bias: Float64[np.ndarray, " key"] | None,
    start: int,
    only: Int64[np.ndarray, " some"],
    last: int,
) -> Measures:
    center, axes = attended.directions(last)
    own = GivenSet(keys, bias, QuerySet(center[place], axes[place]).compact()).own
    verdicts = some_keys(own.points, own.lift, None, only, causal=attended.grows, margins=False)
    found = _as_measures(verdicts, start, only, last)
    occurred = attended.empirical(last)
    if occurred is None:
        return found
    queries = QuerySet(occurred[0][place], np.ascontiguousarray(occurred[1][place])).compact()
    geometry = some_keys(keys, bias, queries, only)
    return found | {
        "margin_lower": geometry.margin_lower,
        "margin_upper": geometry.margin_upper,
        "reachable": _as_code(geometry),
        "attainable_last": geometry.attainable,
        "attainable_last_upper": geometry.attainable_upper,
    }


def _sets(
    attended: Attended, keys: Float64[np.ndarray, "key d"], drawn: Int64[np.ndarray, " drawn"]
) -> Iterator[tuple[Float64[np.ndarray, "seen d"], int, Int64[np.ndarray, " some"], int]]:
    """Of every set of keys that are judged together, if keys of it were drawn: them, its first key, the places of those
    drawn in it, and the position of its query."""
    for seen in attended.key_sets:
        only = drawn[(drawn >= seen.start) & (drawn < seen.stop)] - seen.start
        if len(only):
            yield np.ascontiguousarray(keys[seen]), seen.start, only, seen.stop - 1


def _as_measures(found: SomeKeys, start: int, only: Int64[np.ndarray, " some"], last: int) -> Measures:
    nothing, at = np.full(len(only), np.nan), found.first_unselectable_at
    return {
        "verdict": found.verdict.astype(np.int8),
        "margin_lower": found.margin_lower,
        "margin_upper": found.margin_upper,
        "reachable": _as_code(found),
        "attainable": nothing,
        "attainable_upper": nothing,
        "attainable_last": nothing,
        "attainable_last_upper": nothing,
        "attainable_reachable": found.attainable,
        "pattern_max": nothing,
        "first_unselectable_at": at if np.isnan(at).any() else at.astype(np.int64),
        "judged_at": np.full(len(only), last, np.int32),
        "position": (only + start).astype(np.int32),
    }


def _as_code(found: SomeKeys) -> Int8[np.ndarray, " some"]:
    """`reachable` as 1, 0, and -1 where there is no set of queries."""
    return np.full(len(found.verdict), -1, np.int8) if found.reachable is None else found.reachable.astype(np.int8)


def _joined(parts: Iterator[Measures]) -> Measures:
    """Of all sets of keys, key after key."""
    listed = list(parts)
    return {m: np.concatenate([p[m] for p in listed]) for m in listed[0]}


def stacked(heads: Sequence[Mapping[str, np.ndarray]]) -> dict[str, Shaped[np.ndarray, "head drawn"]]:
    """Of all heads, a row each."""
    return {m: np.stack([h[m] for h in heads]) for m in heads[0]}
