"""The probe `unembedding`: which tokens can a model predict at all, and with how much probability?

The unembedding's rows are keys. A logit is `W_Uᵀ y + b_U` with y the final norm's output, so a token that lies in the
convex hull of the others (with at least its bias) is never the most likely one: unargmaxable (Demeter, Kimmel & Downey
2020; Grivas, Bogoychev & Lopez 2022). The final norm bounds y: gain·x̂ + bias with x̂ in a ball of radius √d, so the
largest probability that any residual vector can give a token is a concave problem over an ellipsoid, solved with a
certificate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Float, Float64

from ln_probe.analyses.geometry.decide import DUPLICATE, NAMES, UNDECIDED, UNSELECTABLE
from ln_probe.analyses.geometry.inputs import QuerySet
from ln_probe.analyses.geometry.large import (
    LargeChecker,
    attainable_large,
    decide_large,
    margins_large,
    pointed,
    pointed_at,
)
from ln_probe.analyses.geometry.prove import prove_attention
from ln_probe.analyses.probes.base import DESCRIBED, Cost, Finding, Observer, Piece, Probe, Shape, View
from ln_probe.analyses.probes.columns import UNEMBEDDING
from ln_probe.analyses.text import counted, percent, visible
from ln_probe.hooks.model import read_unembedding, transformed_logits
from ln_probe.hooks.norm import Site

# Tokens shown beside those that no residual vector predicts: the ones that get the least probability from the vector
# that points at them.
HARDEST = 40
# Floating-point operations to spend on tokens that no white query selects, the hardest first: an active set of up to
# d_model tokens, each found by a product with all. About two minutes; enough for every such token of MGM (9669 × 256),
# for 35 of 5000 × 768 with lognormal lengths, where all of them would take hours.
_BUDGET = 3e11
# Tokens that are computed again in double precision at most: those that single precision finds hardest. There are more
# only where nearly all probabilities are 1 to within rounding.
_AGAIN = 1024


# Of one core: multiply-adds a second of the screening, of which it needs half the matrix; then two exponentials and two
# comparisons an entry; and the margins of the tokens that are shown, seconds at d_model 768, which grow with a power of
# it. Measured: 36 s for 50,257 × 768, 26 s for 49,152 × 576, 313 s for 16,384 × 4096 (of which 14 s screening).
_PRODUCTS, _PER_SCORE, _SECONDS, _OF_WIDTH = 8e10, 2e-9, 7.0, 2.2
# Bytes of memory: for each number of the unembedding two copies in float64, and parts of them; of each of d_model².
_BYTES, _BYTES_OF_SQUARE = 28.0, 54.0


class Unembedding(Probe):
    name = "unembedding"
    summary = "which tokens can be predicted at all"
    tables = (UNEMBEDDING,)

    def start(self, view: View) -> Observer:
        return _OfWeights(view)

    def findings(self, tables: Mapping[str, pd.DataFrame], provenance: Mapping[str, Any]) -> list[Finding]:
        return [Finding(text, "table-unembedding", DESCRIBED) for text in _hardest(tables[UNEMBEDDING.name])]

    def cost(self, shape: Shape) -> Cost:
        if math.isnan(shape.vocabulary * shape.width):
            return Cost(_SECONDS)
        screening = shape.vocabulary**2 * (shape.width / _PRODUCTS + _PER_SCORE)
        memory = _BYTES * shape.vocabulary * shape.width + _BYTES_OF_SQUARE * shape.width**2
        return Cost(screening + _SECONDS * (shape.width / 768) ** _OF_WIDTH, memory_bytes=memory)


_OF_LOGITS = ("margin_lower", "margin_upper", "attainable", "attainable_upper")


class _OfWeights(Observer):
    def __init__(self, view: View) -> None:
        self.view = view

    def piece(self) -> Piece:
        view = self.view
        if not view.sites:
            return Piece()
        if view.meaningless:
            return Piece(notes=(f"the unembedding was not measured: {view.meaningless}",))
        final = [s for s in view.sites if s.reads == "unembed"]
        weights = read_unembedding(view.model)
        if not final or weights is None:
            return Piece(notes=("the unembedding was not measured: the model shows no W_U behind a final norm",))
        found, undecided = measure(*weights, final[0], view.name_of)
        changed = transformed_logits(view.model)
        if changed:
            found = found.assign(**dict.fromkeys(_OF_LOGITS, math.nan))
        lost = (
            f"unembedding: margins and probabilities are left out, for the model's logits are not W_U's ({changed}); "
            "verdicts hold, for the order is the same"
        )
        note = (
            f"{undecided} of {len(weights[0])} tokens of the unembedding are undecided: solving for all would cost "
            "too much, so the hardest were solved for, and the easy ones decided by a query that selects them"
        )
        return Piece(tables={UNEMBEDDING.name: found}, notes=(note,) * bool(undecided) + (lost,) * bool(changed))


def final_queries(site: Site) -> QuerySet | None:
    """What the final norm can put out: center and axes of gain·x̂ + bias; None if it does not scale (unbounded)."""
    found = site.reachable()
    return None if found is None else QuerySet(found[0].numpy(), found[1].numpy())


def measure(
    rows: Float[np.ndarray, "token d_model"],
    bias: Float64[np.ndarray, " token"] | None,
    site: Site,
    name: Callable[[int], str],
    *,
    hardest: int = HARDEST,
) -> tuple[pd.DataFrame, int]:
    """The `unembedding` table: every token that cannot be predicted, and the hardest of the others.

    The query that points at a token shows of nearly all that they can be predicted, and how easily (`screening`); what
    is left is decided by white queries, and the hardest of what these leave are solved for (at least HARDEST, more if
    they are cheap); the rest is undecided.

    Args:
        rows: the unembedding, a row per token; of any layout, it is not copied.
        bias: added to the logits; None or zeros mean none.
        site: the final norm.
        name: how a token is shown.
        hardest: number of predictable tokens shown.

    Returns:
        the table, and how many tokens of all stay undecided. Margins (nats: the largest lead over all other logits,
        negative if no output puts the token on top) and probabilities are over all outputs of the final norm (both NaN
        where it does not bound them).
    """
    lift = None if bias is None or not np.any(bias) else np.ascontiguousarray(bias, np.float64)
    queries = final_queries(site)
    checker = LargeChecker(rows, lift, queries)
    seen, offset = checker.measured.rows, checker.measured.offset
    if queries is None:  # a length has no meaning here: that of the tokens' rows themselves
        seen, offset = checker.judged.rows[:, : checker.plain] * (checker.size * checker.unit), None
    screened = pointed(seen, offset)
    # What the screening cannot distinguish from the hardest is computed again, so that the order is the exact one.
    ease, doubt = screened.log_weight.copy(), screened.doubt
    known = np.isfinite(doubt)
    around = np.where(known, doubt, 0.0)
    least, most = np.where(known, ease - around, -np.inf), np.where(known, ease + around, 0.0)
    code = decide_large(checker, checker.lead(screened.gap), np.argsort(least, kind="stable"), _affordable(*rows.shape))
    stuck = np.isin(code, (UNSELECTABLE, DUPLICATE))
    shown = min(hardest, int((~stuck).sum()))
    level = np.partition(most[~stuck], shown - 1)[shown - 1] if shown else -np.inf
    close = np.flatnonzero(~stuck & (least <= level))
    close = close[np.argsort(ease[close], kind="stable")[: max(_AGAIN, shown)]]
    ease[close] = pointed_at(seen, offset, close)
    others = close[np.argsort(ease[close], kind="stable")[:shown]]
    chosen = np.concatenate([np.flatnonzero(stuck), others])
    columns = dict.fromkeys(_OF_LOGITS, np.full(len(chosen), math.nan))
    if queries is not None:
        margins = margins_large(checker, chosen)
        reach = prove_attention(checker, attainable_large(checker, chosen), only=chosen)
        columns = dict(zip(_OF_LOGITS, (*margins, reach.weight, reach.upper), strict=True))
    names = [name(int(i)) for i in chosen]
    made = pd.DataFrame(
        {"token_id": chosen, "token": names, "verdict": NAMES[code[chosen]], **columns}, columns=UNEMBEDDING.names
    )
    if queries is not None:
        made = made.sort_values("attainable", kind="stable", ignore_index=True)
    return made, int((code == UNDECIDED).sum())


def _affordable(tokens: int, d_model: int) -> int:
    """How many tokens may be solved for exactly, hardest first."""
    return max(HARDEST, int(_BUDGET / (2.0 * d_model * d_model * (tokens + 3 * d_model))))


def _hardest(tokens: pd.DataFrame) -> list[str]:
    if not len(tokens):
        return []
    stuck = int(tokens["verdict"].isin(("unselectable", "duplicate")).sum())
    if stuck:
        text = f"{counted(stuck, 'token')} can never be the most likely one"
    elif (tokens["verdict"] == "undecided").any():
        text = "No token is known never to be the most likely one; some are undecided"
    else:
        text = "Every token can be the most likely one"
    if not tokens["attainable"].isna().all():
        low = tokens.iloc[int(np.nanargmin(tokens["attainable"].to_numpy(float)))]
        hardest = f"the hardest of those measured ({visible(low['token'])})"
        if low["attainable"] > 0.5:
            text += f", and even {hardest} can get {percent(low['attainable'])} of the probability"
        else:
            text += (
                f"; {hardest} can receive at most {percent(low['attainable_upper'])} of the probability, from any "
                "residual vector"
            )
    return [text + "."]
