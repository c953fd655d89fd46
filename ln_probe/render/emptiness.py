"""Pictures on which nothing would be seen become a sentence: which, and what it says."""

from __future__ import annotations

from collections.abc import Callable

from ln_probe.render.figures import by_variant
from ln_probe.reporting.contents import Contents

# The share of squared length along the ones-vector that rounding leaves of none (float32: 1e-7 of the length, squared).
_NO_SHARE = 1e-12


def nothing_to_see(report: Contents, picture: str) -> str:
    """What stands in for a picture; empty if it shows something."""
    return _SAID[picture](report) if picture in _SAID else ""


def _projection(report: Contents) -> str:
    share = report.layernorms["mean_share"]
    if not (share.fillna(0) <= _NO_SHARE).all():
        return ""
    return (
        f"Nothing of what the {len(share)} norms read lies along the ones-vector (share of squared length 0, angle "
        "90°): projection has nothing to take away."
    )


def _unselectable(report: Contents) -> str:
    rows = [r for _, r in by_variant(report)]
    if any((r["unselectable_fraction"].fillna(0) > 0).any() for r in rows):
        return ""
    return (
        f"Every key can be selected by some query: none of the {len(rows[0])} heads has one that cannot, under any "
        "variant."
    )


def _angle(report: Contents) -> str:
    angles = dict(by_variant(report)).get("intact")
    if angles is None or not (angles["uniform_angle_deg"].dropna().round() == 90).all():
        return ""
    return (
        f"In all {len(angles)} heads queries are at 90° to the direction that attends uniformly: they have nothing "
        "to do with it."
    )


def _causal(report: Contents) -> str:
    rows = report.causal[report.causal["variant"] != "intact"]
    if (rows["delta_loss"].notna() & (rows["no_op"].fillna("") == "")).any():
        return ""
    return "Nothing is left to take away: at every norm both terms change nothing by construction."


_SAID: dict[str, Callable[[Contents], str]] = {
    "projection": _projection,
    "unselectable": _unselectable,
    "angle": _angle,
    "causal": _causal,
}
