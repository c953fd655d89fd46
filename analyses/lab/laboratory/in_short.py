"""The first table of the laboratory's page: a row per experiment, what its seeds tell and what they do not."""

from __future__ import annotations

from collections.abc import Iterator

import pandas as pd

from ln_probe.analyses.lab.intervals import SIGNIFICANT
from ln_probe.analyses.lab.laboratory.reading import (
    kept_table,
    markdown,
    only_row,
    prose,
    rows_where,
    short_power,
    with_interval,
)
from ln_probe.analyses.lab.language_model.bundled_seeds import ALL_LAYERS, COSTS


def in_short() -> Iterator[str]:
    yield from prose("in_short 1")
    rows = (_majority, _random_keys, _language_model, _bundled, _encoder, _remove_norm, _depth, _deep, _programs,
            _approximation, _dot_product, _adaptive, _counting, _traces)  # fmt: skip
    yield from markdown(("", "seeds", "what they tell"), [row() for row in rows])


def _link(words: str, anchor: str) -> str:
    return f"[{words}](#{anchor})"


def _said(row: pd.Series, unit: str, scale: float = 1.0, digits: int = 2, by: pd.Series | None = None) -> str:
    """A difference with its interval, or that none is told (`by`: the row of fresh seeds, which then decides)."""
    interval = f"{with_interval(row, scale, digits, sign=True)} {unit}".rstrip()
    told = float((row if by is None else by)["p_holm"]) < SIGNIFICANT
    return interval if told else f"nothing that can be told ({interval})"


def _most(table: pd.DataFrame) -> str:
    return str(int(table["seeds"].max()))


def _majority() -> tuple[str, ...]:
    contrasts = rows_where(kept_table("majority", "contrasts"), measure="train_loss")

    def at(contrast: str, step: int) -> str:
        return _said(only_row(contrasts, contrast=contrast, step=step), "nats")

    return (
        _link("Majority", "majority"),
        _most(contrasts),
        f"Vectors of length 1/√d in place of √d raise the loss by {at('size 1/sqrt(d), with projection', 1000)} at "
        f"step 1000, and that is the values' length: values alone {at('size 1/sqrt(d) of values alone', 1000)}, "
        f"queries and keys alone {at('size 1/sqrt(d) of queries and keys alone', 1000)}. Leaving out projection at one "
        f"length: {at('no projection, at radius sqrt(d)', 1000)} at step 1000, "
        f"{at('no projection, at radius sqrt(d)', 17000)} at 17,000.",
    )


def _random_keys() -> tuple[str, ...]:
    summary = kept_table("random_keys")
    heads = rows_where(summary, space="a head", measure="unselectable_fraction")

    def keys(d_model: int, d: int, n: int) -> str:
        return f"{with_interval(only_row(heads, d_model=d_model, d=d, n=n), 100)} %"

    return (
        _link("Random keys", "random-keys"),
        _most(heads),
        "After LayerNorm every key is selectable, by theorem; as a head sees them, through a random W_K, "
        f"{keys(8, 2, 128)} of 128 keys are not where heads have 2 dimensions, {keys(64, 8, 128)} where they have 8.",
    )


def _language_model() -> tuple[str, ...]:
    summary = rows_where(kept_table("language_model"), measure="unselectable_fraction", space="head")
    last = summary[summary["step"] == summary["step"].max()]
    least, most = (f"{100 * x:.0f}" for x in (last["mean"].min(), last["mean"].max()))
    return (
        _link("Language models, published shape", "language-models-of-the-published-shape"),
        _most(last),
        f"As heads of 2 dimensions see them, {least} to {most} % of the keys are unselectable, with scaling before "
        "attention and without. Not compared by a test.",
    )


def _bundled() -> tuple[str, ...]:
    summary = rows_where(kept_table("language_model_bundled"), layer=ALL_LAYERS, norm="layernorm")
    contrasts = kept_table("language_model_bundled", "contrasts")
    costs = {t: with_interval(only_row(summary, measure=m), digits=3, sign=True) for t, m in COSTS.items()}
    return (
        _link("Bundled models", "the-bundled-models-with-three-seeds"),
        _most(contrasts),
        f"Without scaling in any norm `lm-layernorm` loses {costs['scaling']} nats per token, without projection "
        f"{costs['projection']}. Between models that were trained with other norms {_told_of(contrasts)}.",
    )


def _told_of(contrasts: pd.DataFrame) -> str:
    told, of = int((contrasts["p_holm"] < SIGNIFICANT).sum()), int(contrasts["p_holm"].count())
    return f"{told or 'none'} of {of} differences can be told"


def _encoder() -> tuple[str, ...]:
    effects = kept_table("encoder", "effects")
    passages = kept_table("encoder_passages", "effects")
    return (
        _link("Encoders", "encoders"),
        _most(effects),
        f"Masked text: {_told_of(effects)}. Fine-tuned: {_told_of(passages)}.",
    )


def _remove_norm() -> tuple[str, ...]:
    effects = rows_where(kept_table("remove_norm", "effects"), difference="removed - kept")
    loss, keys = only_row(effects, measure="valid_loss"), only_row(effects, measure="unselectable_head")
    return (
        _link("Norms removed", "a-language-model-whose-norms-are-removed"),
        _most(effects),
        "Fine-tuned until its norms were constants, beside the same training with norms: loss "
        f"{_said(loss, 'nats', 1, 3)}, unselectable keys {_said(keys, 'points', 100, 1)}.",
    )


def _depth() -> tuple[str, ...]:
    terms = rows_where(kept_table("depth", "terms"), depth="all", outcome="reach", side="beyond")
    fresh = kept_table("depth", "terms_fresh")

    def reach(order: str, term: str) -> str:
        later = rows_where(fresh, norm_order=order, term=term)
        by = later.iloc[0] if len(later) else None
        return f"{order}-norm {_said(only_row(terms, norm_order=order, term=term), 'points', 100, 1, by)}"

    return (
        _link("Depth", "depth"),
        _most(terms),
        "Beyond the theory's reach scaling changes the share of longer words that are labelled right by "
        f"{reach('post', 'scaling')}, {reach('pre', 'scaling')}; projection by {reach('post', 'projection')}, "
        f"{reach('pre', 'projection')}. Fresh seeds decide.",
    )


def _deep() -> tuple[str, ...]:
    contrasts = kept_table("depth_deep", "contrasts")
    told = contrasts[contrasts["p_holm"] < SIGNIFICANT]
    said = "; ".join(f"{r['contrast']} {_said(pd.Series(r), 'points', 100, 1)}" for r in told.to_dict("records"))
    return (
        _link("Depths 4 to 6", "depth"),
        _most(contrasts),
        f"Of one block more, one layer more, rotary or ALiBi positions, {_told_of(contrasts)}"
        + (f": {said}." if said else "."),
    )


def _programs() -> tuple[str, ...]:
    agreement = kept_table("compiler", "agreement")
    programs = agreement.pivot_table("value", ["construction", "norm", "program"], aggfunc="min").reset_index()

    def right(construction: str, norm: str) -> str:
        part = rows_where(programs, construction=construction, norm=norm)
        return f"{int((part['value'] == 1).sum())} of {len(part)}"

    return (
        _link("C-RASP as weights", "c-rasp-compiled-to-weights"),
        "–",
        f"Where comparing is scaling's work, {right('scaling', 'scaling_only')} programs are right on every word with "
        f"scaling and {right('scaling', 'none')} with no norm; where two ReLUs clip, {right('clip', 'none')} with no "
        "norm. No operation needs projection.",
    )


def _approximation() -> tuple[str, ...]:
    factors = kept_table("approximation", "norm_factors")
    told = factors[factors["p_holm"] < SIGNIFICANT].to_dict("records")
    said = "; ".join(f"{r['norm']}, {r['norm_order']}, {r['target']}: {r['factor']:.2g} times" for r in told)
    return (
        _link("Approximation", "approximation"),
        _most(kept_table("approximation")),
        f"What a norm does to the squared error: {_told_of(factors)}" + (f" ({said})." if said else "."),
    )


def _dot_product() -> tuple[str, ...]:
    contrasts = kept_table("dot_product_text", "dot_product")
    told = contrasts[contrasts["p_holm"] < SIGNIFICANT].to_dict("records")
    said = "; ".join(f"{r['layers']} layers {_said(pd.Series(r), 'nats', 1, 3)}" for r in told)
    return (
        _link("Dot product on text", "approximation"),
        _most(contrasts),
        f"Of three sizes, {_told_of(contrasts)}" + (f": {said} with the dot product." if said else "."),
    )


def _adaptive() -> tuple[str, ...]:
    summary = kept_table("adaptive_memory")

    def error(width: int, product: bool) -> str:
        row = only_row(summary, heads=2, width=width, dot_product=product)
        return f"{short_power(row['mean'])} [{short_power(row['ci_low'])}, {short_power(row['ci_high'])}]"

    return (
        _link("Adaptive memory", "approximation"),
        _most(summary),
        "With neither an FFN nor the dot product no number of heads can have less than half the target's variance; "
        f"with the dot product two heads can have none of it, by hand. Trained, they have {error(0, False)} without "
        f"it and {error(0, True)} with it: training does not find it. With an FFN {error(32, False)} and "
        f"{error(32, True)}.",
    )


def _counting() -> tuple[str, ...]:
    every, fresh = (
        rows_where(kept_table("counting", name), task="L5", measure="accuracy_1024")
        for name in ("effects", "effects_fresh")
    )

    def change(model: str, site: str, norm: str) -> str:
        row, by = (only_row(table, model=model, norm_site=site, norm=norm) for table in (every, fresh))
        return _said(row, "points", 100, 1, by)

    return (
        _link("Counting", "counting"),
        _most(every),
        "L5, accuracy at 16 times the trained length: scaling on an LSTM's state changes it by "
        f"{change('lstm', 'state', 'scaling_only')}, in a transformer by "
        f"{change('transformer', 'blocks', 'scaling_only')}; projection by "
        f"{change('lstm', 'state', 'projection_only')} and {change('transformer', 'blocks', 'projection_only')}. Fresh "
        "seeds decide.",
    )


def _traces() -> tuple[str, ...]:
    networks = rows_where(kept_table("counting_traces", "networks"), task="anbn", model="lstm")

    def of(part: pd.DataFrame) -> str:
        """In how many seeds all these networks count; the unit is the seed, whose networks read the same words."""
        by = part.groupby("seed")["counts"].min()
        return f"{int(by.sum())} of {len(by)} seeds"

    state = rows_where(networks, norm_site="state")
    none = state[state["norm"] != "projection_only"].assign(counts=lambda t: 1 - t["counts"])
    return (
        _link("How a network counts", "how-a-network-counts"),
        str(networks["seed"].nunique()),
        f"One dimension of an LSTM counts in {of(rows_where(networks, norm='none'))} without a norm, under every norm "
        f"on the gates in {of(rows_where(networks, norm_site='gates'))}; with scaling on the state none does in "
        f"{of(none)}.",
    )
