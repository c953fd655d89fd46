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
from jaxtyping import Float64

from ln_probe.analyses.geometry.attainable import attainable, into_ball
from ln_probe.analyses.geometry.certificates import Checker
from ln_probe.analyses.geometry.judged import Judged, judged
from ln_probe.analyses.geometry.key_coordinates import TAU, coordinates
from ln_probe.analyses.geometry.margins import RELATIVE_GAP
from ln_probe.analyses.geometry.proofs import prove_attention, prove_margins, prove_verdicts
from ln_probe.analyses.geometry.query_sets import QuerySet
from ln_probe.analyses.geometry.verdicts import DUPLICATE, NAMES, UNDECIDED, UNSELECTABLE, decide
from ln_probe.analyses.probes.protocol import DESCRIBED, Cost, Finding, Observer, Piece, Probe, Shape, View
from ln_probe.analyses.tables import UNEMBEDDING
from ln_probe.analyses.wording import percent, visible
from ln_probe.hooks.model import read_unembedding
from ln_probe.hooks.sites import Site

# Tokens shown beside those that no residual vector predicts: the ones that get the least probability from the vector
# that points at them.
HARDEST = 40
_BLOCK = 2_000_000  # scores computed at once: 16 MB
# Floating-point operations to spend on tokens that no white query selects, the hardest first: an active set of up to
# d_model tokens, each found by a product with all. About two minutes; enough for every such token of MGM (9669 × 256),
# for 35 of 5000 × 768 with lognormal lengths, where all of them would take hours.
_BUDGET = 3e11


_SECONDS = 5.0  # of one core, of an ordinary vocabulary


class Unembedding(Probe):
    name = "unembedding"
    summary = "which tokens can be predicted at all"
    tables = (UNEMBEDDING,)

    def start(self, view: View) -> Observer:
        return _OfWeights(view)

    def findings(self, tables: Mapping[str, pd.DataFrame], provenance: Mapping[str, Any]) -> list[Finding]:
        return [Finding(text, "table-unembedding", DESCRIBED) for text in _hardest(tables[UNEMBEDDING.name])]

    def cost(self, shape: Shape) -> Cost:
        return Cost(_SECONDS)


class _OfWeights(Observer):
    def __init__(self, view: View) -> None:
        self.view = view

    def piece(self) -> Piece:
        view = self.view
        if not view.sites:
            return Piece()
        final = [s for s in view.sites if s.reads == "unembed"]
        weights = read_unembedding(view.model)
        if not final or weights is None:
            return Piece(notes=("the unembedding was not measured: the model shows no W_U behind a final norm",))
        found, undecided = measure(*weights, final[0], view.name_of)
        note = (
            f"{undecided} of {len(weights[0])} tokens of the unembedding are undecided: solving for all would cost "
            "too much, so the hardest were solved for, and the easy ones decided by a query that selects them"
        )
        return Piece(tables={UNEMBEDDING.name: found}, notes=(note,) * bool(undecided))


def final_queries(site: Site) -> QuerySet | None:
    """What the final norm can put out: center and axes of gain·x̂ + bias; None if it does not scale (unbounded)."""
    found = site.reachable()
    return None if found is None else QuerySet(found[0].numpy(), found[1].numpy())


def measure(
    rows: Float64[np.ndarray, "token d_model"],
    bias: Float64[np.ndarray, " token"] | None,
    site: Site,
    name: Callable[[int], str],
    *,
    hardest: int = HARDEST,
) -> tuple[pd.DataFrame, int]:
    """The `unembedding` table: every token that cannot be predicted, and the hardest of the others.

    Large vocabularies of heavy-tailed rows cost too much to decide to the last token: the hardest are solved for (at
    least HARDEST, more if they are cheap), and the easy ones decided by white queries; what is left is undecided.

    Args:
        rows: the unembedding, a row per token.
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
    rows = np.ascontiguousarray(rows, np.float64)
    queries = final_queries(site)
    where = judged(rows, lift, queries)
    sets = coordinates(where.rows, where.lift)
    checker = Checker(rows, lift, queries, TAU)
    ease = _pointed_at(where)
    by_hardness = np.argsort(ease, kind="stable")
    found = decide(sets, threads=None, only=by_hardness[: _affordable(*rows.shape)])
    verdicts = prove_verdicts(checker, sets, found, seek=False).verdicts
    stuck = np.isin(verdicts.code, (UNSELECTABLE, DUPLICATE))
    shown = int(stuck.sum()) + min(hardest, int((~stuck).sum()))
    chosen = np.argsort(np.where(stuck, -np.inf, ease), kind="stable")[:shown]
    nothing = np.full(shown, math.nan)
    columns = {"margin_lower": nothing, "margin_upper": nothing, "attainable": nothing, "attainable_upper": nothing}
    if queries is not None:
        bracket = prove_margins(checker, sets, where, verdicts, True, RELATIVE_GAP, only=chosen)
        reach = prove_attention(checker, attainable(where, only=chosen), only=chosen)
        columns = {
            "margin_lower": bracket.lower, "margin_upper": bracket.upper,
            "attainable": reach.weight, "attainable_upper": reach.upper,
        }  # fmt: skip
    names = [name(int(i)) for i in chosen]
    made = pd.DataFrame(
        {"token_id": chosen, "token": names, "verdict": NAMES[verdicts.code[chosen]], **columns},
        columns=UNEMBEDDING.names,
    )
    if queries is not None:
        made = made.sort_values("attainable", kind="stable", ignore_index=True)
    return made, int((verdicts.code == UNDECIDED).sum())


def _affordable(tokens: int, d_model: int) -> int:
    """How many tokens may be solved for exactly, hardest first."""
    return max(HARDEST, int(_BUDGET / (2.0 * d_model * d_model * (tokens + 3 * d_model))))


def _pointed_at(where: Judged) -> Float64[np.ndarray, " token"]:
    """log of the probability each token gets from the output that points at it: a cheap order of hardness."""
    rows = where.rows
    found = np.empty(len(rows))
    step = max(1, _BLOCK // len(rows))
    for first in range(0, len(rows), step):
        block = slice(first, first + step)
        scores = into_ball(rows[block]) @ rows.T
        if where.offset is not None:
            scores += where.offset
        scores -= scores.max(axis=1, keepdims=True)
        own = scores[np.arange(len(scores)), np.arange(first, first + len(scores))]
        found[block] = own - np.log(np.exp(scores, out=scores).sum(axis=1))
    return found


def _hardest(tokens: pd.DataFrame) -> list[str]:
    if not len(tokens):
        return []
    stuck = int((tokens["verdict"] != "selectable").sum())
    text = f"{stuck} tokens can never be the most likely one" if stuck else "Every token can be the most likely one"
    if not tokens["attainable"].isna().all():
        low = tokens.iloc[int(np.nanargmin(tokens["attainable"].to_numpy(float)))]
        hardest = f"the hardest of those looked at ({visible(low['token'])})"
        if low["attainable"] > 0.5:
            text += f", and even {hardest} can get {percent(low['attainable'])} of the probability"
        else:
            text += (
                f"; {hardest} can get at most {percent(low['attainable_upper'])} of the probability, from any "
                "residual vector"
            )
    return [text + "."]
