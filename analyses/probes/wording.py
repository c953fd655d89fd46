"""What a report says in sentences: five questions, each answered from the tables or named as not measured.

`print(report)`, the notebook, the page and `report.findings()` show the same findings in this order. A change is called
significant where its CI excludes 0 and its Holm-adjusted p is below 0.05.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import pandas as pd

from ln_probe.analyses.probes.base import Finding
from ln_probe.analyses.probes.sinks import MUCH, OUTLIER_RATIO
from ln_probe.analyses.probes.statistics import SIGNIFICANCE
from ln_probe.analyses.text import counted, number, percent, signed, visible, with_interval
from ln_probe.hooks.norm import EDITS, INTACT, SCALING_FROZEN, Variant

NATS = "nats/token"
# The smallest change of a loss in nats that is called an effect: 1 % of perplexity.
LEAST_CHANGE = 0.01
PRIMARY = "primary"
PLACES = {"all": "every norm", "attention": "the norms that attention reads"}
_MOST_STRATA, _COUNTS = 6, {2: "two", 3: "three"}  # books whose means a sentence lists
_HEADS_NAMED, _OUTLIERS_NAMED = 3, 2  # in a sentence

# By question: what was not measured.
QUESTIONS = {
    "loss": "how the loss changes without scaling or projection",
    "heads": "which heads depend on scaling",
    "keys": "which keys no query selects",
    "sinks": "how much attention position 0 receives",
    "uniform": "how uniformly heads attend",
}

CHANGE = "{edit} {moves} the loss by {size} {unit}{share} ({interval}){small}{optimal}."
NO_CHANGE = "{edit} does not significantly change the loss: {size} {unit} ({interval}){equivalent}."
UNTESTED = "{edit} changes the loss by {size} {unit}: not tested ({prompts})."
NOTHING = "{edit} changes nothing in this model: {reason}."
STRATA = "The CI is over windows of these {count} books ({means}), and does not say how other texts differ."
HEADS = (
    "Freezing scaling for one head at a time significantly raises the loss for {count} of {heads}{lower} ({prompts}); "
    "largest: {which}."
)
KEYS = (
    "{share} of keys are unselectable: no query scores them highest "
    "({frozen}{prompts}, {keys} in {d} dimensions a head{random})."
)
SINKS = (
    "Heads with over {least} of attention on position 0 in most prompts: {heads}; "
    "mean {received} (uniform: {uniform}{frozen}), largest {most}."
)
OUTLIERS = "Vectors over {ratio:g} times as long as the median token's: {which}."
UNIFORM = (
    "The median head has {entropy} of the entropy of uniform attention ({edited}{prompts}); heads: {least} to {most}."
)
NOT_MEASURED = "Not measured: {what}."
NO_NORM = "it has no normalization"


def findings(tables: Mapping[str, pd.DataFrame], provenance: Mapping[str, Any]) -> list[Finding]:
    """Return the answers to the five questions, in their order; a question without an answer is not measured."""
    answers = {
        "loss": _loss(tables, provenance),
        "heads": _heads(tables["head_effects"], provenance),
        "keys": _keys(tables["heads"], provenance.get("selectability", {})),
        "sinks": _sinks(tables["sinks"], tables["sink_heads"]),
        "uniform": _uniform(tables["heads"], provenance.get("uniformity", {}).get("prompts", 0)),
    }
    return [
        Finding(question, text)
        for question, what in QUESTIONS.items()
        for text in list(answers[question]) or [NOT_MEASURED.format(what=what)]
    ]


def unit_of(provenance: Mapping[str, Any]) -> str:
    """Return the unit of the report's loss."""
    return str(provenance.get("loss", {}).get("unit", NATS))


def in_layers(provenance: Mapping[str, Any]) -> str:
    """Return where norms were edited, to stand behind "every norm": " in layers 0, 1"; nothing if all were asked."""
    asked = provenance.get("arguments", {}).get("layers")
    if asked is None:
        return ""
    return f" in layer{'' if len(set(asked)) == 1 else 's'} {', '.join(map(str, sorted(set(asked))))}"


def base_loss(row: Any) -> float:
    """Return the loss of the intact model."""
    return float(row["loss"] - row["delta_loss"])


def is_significant(row: Any) -> bool:
    """Return whether the row's CI excludes 0 and its Holm-adjusted p is below 0.05."""
    low, high = float(row["delta_loss_low"]), float(row["delta_loss_high"])
    return (low > 0 or high < 0) and float(row["p"]) < SIGNIFICANCE


def is_effect(row: Any, unit: str = NATS) -> bool:
    """Return whether a row is an effect: significant, and large enough if the loss is in nats."""
    return is_significant(row) and (unit != NATS or round(abs(row["delta_loss"]), 4) >= LEAST_CHANGE)  # as printed


def loss_change(row: Any, unit: str, edit: str) -> str:
    """Return a sentence about a row of the table `causal`; `edit`: what was done, "Freezing scaling at every norm"."""
    delta, low, high = (float(row[c]) for c in ("delta_loss", "delta_loss_low", "delta_loss_high"))
    if math.isnan(low):
        return UNTESTED.format(edit=edit, size=signed(delta), unit=unit, prompts=counted(row["n"], "prompt"))
    size, ends = with_interval(delta, low, high)
    p = float(row["p"])
    tested = "not tested" if math.isnan(p) else f"Holm-adjusted p {'< 0.001' if p < 0.001 else f'= {p:.2g}'}"
    interval = f"95 % CI {ends}; {tested}"
    if not is_significant(row):
        bound, equivalent = float(row["equivalence_bound"]), ""
        if unit == NATS and bound < LEAST_CHANGE:
            equivalent = f", equivalent to 0 within ±{number(bound)}"
        return NO_CHANGE.format(edit=edit, size=size, unit=unit, interval=interval, equivalent=equivalent)
    effect, loss, share = is_effect(row, unit), base_loss(row), ""
    optimal = float(row.get("delta_loss_optimal", math.nan))
    if effect and abs(delta) <= loss:  # a share above 100 % says nothing
        share = f", {percent(abs(delta) / loss)} of the intact {number(loss)}"
    return CHANGE.format(
        edit=edit,
        moves="raises" if delta > 0 else "lowers",
        size=size[1:],
        unit=unit,
        share=share,
        interval=interval,
        small="" if effect else f", which is significant but below {LEAST_CHANGE:g} {unit}",
        optimal="" if math.isnan(optimal) else f"; with loss-optimal constants {signed(optimal)}",
    )


def _loss(tables: Mapping[str, pd.DataFrame], provenance: Mapping[str, Any]) -> list[str]:
    """Return each term's effect at every norm, scaling's also at attention's, a decrease of the loss first."""
    if provenance.get("model", {}).get("norms") == {}:
        return [NOTHING.format(edit="Freezing scaling or removing projection", reason=NO_NORM)]
    unit, no_op = unit_of(provenance), provenance.get("causal", {}).get("no_op", {})
    texts: list[tuple[bool, str]] = []
    for variant in (variant for variant in EDITS if variant.primary):
        if variant.name in no_op:
            texts.append((True, NOTHING.format(edit=variant.wording, reason=no_op[variant.name])))
            continue
        rows = tables["causal"]
        rows = rows[(rows["variant"] == variant.name) & rows["sites"].isin(["all", "attention"])]
        known = rows[rows["delta_loss"].notna()].sort_values("sites")  # no number where logits overflow
        for place, row in enumerate(known.head(2 if variant is SCALING_FROZEN else 1).to_dict("records")):
            where = f"{PLACES[row['sites']]}{in_layers(provenance)}"
            text = loss_change(row, unit, f"{variant.wording} at {where}")
            if variant is SCALING_FROZEN and place == 0 and not math.isnan(row["delta_loss_low"]):
                text = f"{text} {strata_sentence(strata_means(tables['causal_prompts'], row['sites'], variant))}"
            texts.append((row["delta_loss"] >= 0, text.strip()))
    return [text for _, text in sorted(texts, key=lambda pair: pair[0])]


def strata_means(prompts: pd.DataFrame, sites: str, variant: Variant) -> dict[str, float]:
    """Return the mean loss change on the prompts of each book, from the table `causal_prompts`.

    Empty for prompts that are not of a few books.
    """
    rows = prompts[(prompts["sites"] == sites) & (prompts["variant"] == variant.name)]
    changes = rows["delta_loss"].mul(rows["n"]).groupby(rows["stratum"], sort=False).sum()
    means = changes / rows["n"].groupby(rows["stratum"], sort=False).sum()
    is_book = 2 <= len(means) <= _MOST_STRATA and len(rows) > len(means)
    return {str(name): float(mean) for name, mean in means.items()} if is_book else {}


def strata_sentence(means: Mapping[str, float]) -> str:
    """Return what a CI over prompts of some books is over, with the books' means; nothing without books."""
    texts = ", ".join(f"{name} {mean:+.3f}" for name, mean in means.items())
    return STRATA.format(count=_COUNTS.get(len(means), len(means)), means=texts) if means else ""


def significant_heads(effects: pd.DataFrame) -> pd.DataFrame:
    """Return the heads whose frozen scaling significantly raises the loss, the largest effect first."""
    rows = effects[(effects["variant"] == SCALING_FROZEN.name) & (effects["p"] < SIGNIFICANCE)]
    return rows[rows["delta_loss"] > 0].sort_values("delta_loss", ascending=False)


def heads_unchanged(provenance: Mapping[str, Any]) -> str:
    """Return why freezing scaling changes no head of the model; empty if it may."""
    if provenance.get("model", {}).get("norms") == {}:
        return NO_NORM
    is_no_op = SCALING_FROZEN.name in provenance.get("head_effects", {}).get("no_op", {})
    return "the norms that attention reads do not scale" if is_no_op else ""


def _heads(effects: pd.DataFrame, provenance: Mapping[str, Any]) -> Iterator[str]:
    if reason := heads_unchanged(provenance):
        yield NOTHING.format(edit="Freezing scaling for one head at a time", reason=reason)
    unit = unit_of(provenance)
    frozen = effects[effects["variant"] == SCALING_FROZEN.name]
    rows = frozen[frozen["delta_loss"].notna()]
    if not len(rows):
        return
    heads = counted(len(rows), "head")
    if len(rows) < len(frozen):
        heads = f"the {heads} run (of {len(frozen)}; the others are only estimated)"
    lowering = int(((rows["p"] < SIGNIFICANCE) & (rows["delta_loss"] < 0)).sum())
    lower = f" and lowers it for {lowering}" if lowering else ""
    top = rows.sort_values("delta_loss").iloc[-1]
    prompts = counted(top["n"], "prompt")
    if rows["p"].isna().all():
        edit = f"Freezing scaling for head {head_name(top)} alone, the largest of {heads},"
        yield UNTESTED.format(edit=edit, size=signed(float(top["delta_loss"])), unit=unit, prompts=prompts)
    else:
        raising = significant_heads(effects)
        named = (raising if len(raising) else rows.loc[[top.name]]).head(_HEADS_NAMED)
        which = ", ".join(f"{head_name(row)} {row['delta_loss']:+.2g}" for _, row in named.iterrows())
        which += f"{', …' if len(raising) > _HEADS_NAMED else ''} {unit}"
        yield HEADS.format(count=len(raising) or "none", heads=heads, lower=lower, prompts=prompts, which=which)


def head_name(row: Any) -> str:
    """Return a head as text: L1H6."""
    return f"L{int(row['layer'])}H{int(row['head'])}"


def unselectable_share(heads: pd.DataFrame, variant: str) -> float:
    """Return the share of all keys that no query selects under a variant; NaN where it is not known."""
    rows = heads[(heads["variant"] == variant) & heads["unselectable"].notna()]
    return float((rows["unselectable"] * rows["n"]).sum() / rows["n"].sum()) if len(rows) else math.nan


def _keys(heads: pd.DataFrame, about: Mapping[str, Any]) -> Iterator[str]:
    intact, frozen = (unselectable_share(heads, v) for v in (INTACT.name, SCALING_FROZEN.name))
    if math.isnan(intact) or not about:
        return
    by_chance = f"; random keys: {one_decimal(about['random_unselectable'])}"
    random = "; so few keys are always selectable" if about["by_theorem"] else by_chance
    yield KEYS.format(
        share=one_decimal(intact),
        frozen="" if math.isnan(frozen) else f"{one_decimal(frozen)} with scaling frozen; ",
        prompts=counted(about["prompts"], "prompt"),
        keys=counted(about["keys_per_prompt"], "key"),
        d=about["d_head"],
        random=random,
    )


def one_decimal(share: float) -> str:
    """Return a share in % with one decimal."""
    return f"{100 * share:.1f} %"


def _sinks(sinks: pd.DataFrame, heads: pd.DataFrame) -> Iterator[str]:
    known = heads.dropna(subset=["first_attention"]).sort_values("first_attention")
    if not len(known):
        return
    first = sinks[(sinks["position"] == 0) & (sinks["n"] > 0)]
    uniform = float((first["uniform"] * first["n"]).sum() / first["n"].sum())
    frozen, most = float(heads["first_attention_no_scaling"].mean()), known.iloc[-1]
    count, prompts = int((heads["sink_rate"] > 0.5).sum()), counted(heads["n"].max(), "prompt")
    text = SINKS.format(
        least=percent(MUCH),
        heads=f"{count or 'none'} of {len(heads)}",
        received=percent(float(known["first_attention"].mean())),
        uniform=percent(uniform),
        frozen="" if math.isnan(frozen) else f"; scaling frozen: {percent(frozen)}",
        most=f"{one_decimal(float(most['first_attention']))} ({head_name(most)})",
    )
    which = _outliers(sinks[sinks["kind"].str.contains("outlier")], prompts)
    is_known = sinks["length_ratio"].notna().any()  # not in a model without norms
    yield f"{text} {OUTLIERS.format(ratio=OUTLIER_RATIO, which=which)}" if is_known else text


def _outliers(rows: pd.DataFrame, prompts: str) -> str:
    """Return the commonest outlier tokens, in how many prompts each is one, and how long it is."""
    names = rows["token"].where(rows["position"] > 0, "position 0")
    parts: list[str] = []
    for name in names.value_counts().index[:_OUTLIERS_NAMED]:
        same = rows[names == name]
        of_prompts = f"{same['prompt'].nunique()}{'' if parts else f' of {prompts}'}"
        shown = name if name == "position 0" else repr(visible(name))
        parts.append(f"{shown} ({of_prompts}, up to {same['length_ratio'].max():.0f} times)")
    return ", ".join(parts) or f"none in {prompts}"


def _uniform(heads: pd.DataFrame, prompts: int) -> Iterator[str]:
    medians = heads.groupby("variant")["entropy_ratio"].median().dropna()
    if INTACT.name not in medians:
        return
    edited = [f"{one_decimal(medians[v.name])} with {v.label}" for v in EDITS if v.primary and v.name in medians]
    ordered = heads[heads["variant"] == INTACT.name].dropna(subset=["entropy_ratio"]).sort_values("entropy_ratio")
    ends = (ordered.iloc[place] for place in (0, -1))
    least, most = (f"{one_decimal(float(head['entropy_ratio']))} ({head_name(head)})" for head in ends)
    entropy, edits = one_decimal(medians[INTACT.name]), f"{', '.join(edited)}; " if edited else ""
    yield UNIFORM.format(entropy=entropy, edited=edits, prompts=counted(prompts, "prompt"), least=least, most=most)
