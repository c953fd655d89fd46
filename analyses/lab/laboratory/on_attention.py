"""The page of the laboratory on what attention can select: majority, random keys, language models, an encoder."""

from __future__ import annotations

from collections.abc import Iterator

import pandas as pd

from ln_probe.analyses.lab.encoder.encoder_findings import LEFT_OUT
from ln_probe.analyses.lab.encoder.encoder_findings import LOSS as MASKED_LOSS
from ln_probe.analyses.lab.laboratory.reading import (
    change,
    fewer_seeds,
    kept_about,
    kept_table,
    markdown,
    only_row,
    prose,
    rows_where,
    sentences,
    with_interval,
)
from ln_probe.analyses.lab.language_model.bundled_seeds import ALL_LAYERS, COSTS, FRACTION, FROZEN, LOSS, over_layers
from ln_probe.analyses.lab.language_model.published_language_model import BEFORE, HEAD
from ln_probe.analyses.lab.majority.majority_findings import WITH, WITHOUT

DIFFERENCES = {  # of the bundled models: in words, the factor to the unit that is printed, digits
    LOSS: ("held-out loss, nats", 1, 3),
    COSTS["scaling"]: ("cost of leaving out all scaling, nats", 1, 3),
    COSTS["projection"]: ("cost of leaving out all projection, nats", 1, 4),
    FRACTION: ("unselectable keys, points", 100, 1),
    FROZEN: ("… without scaling, points", 100, 1),
}


def majority() -> Iterator[str]:
    summary, contrasts = kept_table("majority"), kept_table("majority", "contrasts")
    yield from prose("majority 1")
    steps = [s for s in (1000, 2000, 5000, 17000) if s in set(summary["step"])]
    rows = []
    for norm, radius in dict.fromkeys(zip(summary["norm"], summary["radius"], strict=True)):
        cell = summary[(summary["norm"] == norm) & (summary["radius"] == radius)]
        loss = cell[cell["measure"] == "train_loss"].set_index("step")
        angle = cell[cell["measure"] == "angle_deg"].set_index("step")
        told, usual = loss["published"].dropna(), int(loss["seeds"].max())
        ends = [s for s in steps if s >= 5000 and s in angle.index]
        rows.append(
            (
                f"`{norm}`, {radius}",
                *(
                    with_interval(loss.loc[s], digits=2) + fewer_seeds(loss.loc[s], usual) if s in loss.index else "–"
                    for s in steps
                ),
                " / ".join(f"{x:g}" for x in told) if len(told) else "–",
                "; ".join(f"{with_interval(angle.loc[s])}° at {s}{fewer_seeds(angle.loc[s], usual)}" for s in ends),
                " / ".join(f"{x:g}°" for x in angle["published"].dropna()) or "–",
            )
        )
    header = (
        "norm, radius",
        *(f"step {s}" for s in steps),
        "published, steps 1000 / 2000 / 5000",
        "angle of queries to the ones-vector",
        "published, before / step 17,000",
    )
    yield from markdown(header, rows)
    yield from prose("majority 2")
    shown = contrasts[contrasts["measure"] == "train_loss"]
    usual = int(shown["seeds"].max())
    rows = []
    for name in dict.fromkeys(shown["contrast"]):
        part = shown[shown["contrast"] == name].set_index("step")
        cells = [
            change(part.loc[s], digits=2) + fewer_seeds(part.loc[s], usual) if s in part.index else "–" for s in steps
        ]
        rows.append((name, *cells))
    yield from markdown(("contrast", *(f"step {s}" for s in steps)), rows)
    yield from _accuracy_and_angle(summary, contrasts, steps)
    yield from sentences("majority", "To a training loss")
    yield from prose("majority 3")


def _accuracy_and_angle(summary: pd.DataFrame, contrasts: pd.DataFrame, steps: list[int]) -> Iterator[str]:
    """What else figure 2 shows: test accuracy of the published pair, and how far apart its angles are."""
    accuracy, angle = summary[summary["measure"] == "test_accuracy"], contrasts[contrasts["measure"] == "angle_deg"]
    rows = []
    for norm, radius in (WITH, WITHOUT):
        part = rows_where(accuracy, norm=norm, radius=radius)
        cells = []
        for s in steps:
            row = only_row(part, step=s)
            told = with_interval(row, 100, 1) + fewer_seeds(row, int(part["seeds"].max()))
            cells.append(told + ("" if pd.isna(row["published"]) else f"; published {100 * row['published']:.0f}"))
        rows.append((f"test accuracy, %: `{norm}`, {radius}", *cells))
    gap = angle[angle["contrast"] == "the published gap"]
    most = int(gap["seeds"].max())
    apart = [only_row(gap, step=s) for s in steps if s in set(gap["step"])]
    degrees = (f"{with_interval(row, sign=True)}°{fewer_seeds(row, most)}" for row in apart)
    rows.append(("angle of queries, published pair: difference", *degrees))
    yield ""
    yield from markdown(("", *(f"step {s}" for s in steps)), rows)


def majority_in_space() -> Iterator[str]:
    summary, contrasts = kept_table("majority_in_space"), kept_table("majority_in_space", "contrasts")
    yield from prose("majority_in_space 1")
    angle, right = summary[summary["measure"] == "angle_deg"], summary[summary["measure"] == "test_accuracy"]
    rows = []
    for norm, radius in dict.fromkeys(zip(angle["norm"], angle["radius"], strict=True)):
        one = angle[(angle["norm"] == norm) & (angle["radius"] == radius)].sort_values("step")
        compared = contrasts[(contrasts["norm"] == norm) & (contrasts["radius"] == radius)].set_index("measure")
        cells = [
            change(compared.loc[m], scale, digits) if m in compared.index else "–"
            for m, scale, digits in (("angle_deg", 1, 0), ("test_accuracy", 100, 1))
        ]
        rows.append(
            (
                f"`{norm}`, {radius}",
                f"{with_interval(one.iloc[0])}°",
                f"{with_interval(one.iloc[-1])}°",
                cells[0],
                with_interval(only_row(right, norm=norm, radius=radius), 100, 1),
                cells[1],
            )
        )
    header = ("norm, radius", "angle, start", "after training", "− LayerNorm", "test accuracy, %", "− LayerNorm")
    yield from markdown(header, rows)
    yield from prose("majority_in_space 2")


def random_keys() -> Iterator[str]:
    summary = kept_table("random_keys")
    yield from prose("random_keys 1")
    drawn = summary[summary["space"] == "keys as drawn"]
    rows = []
    for d in dict.fromkeys(drawn["d"]):
        part = drawn[drawn["d"] == d].set_index("measure")
        rows.append(
            (
                str(d),
                with_interval(part.loc["any_unselectable"], 100),
                f"about {100 * part.loc['any_unselectable', 'published']:.0f}",
                with_interval(part.loc["unselectable_fraction"], 100, 1),
            )
        )
    yield from markdown(("d", "draws with any", "published, of 100 draws", "keys"), rows)
    yield from sentences("random_keys", "After LayerNorm")
    heads = summary[(summary["space"] == "a head") & (summary["measure"] == "unselectable_fraction")]
    yield from prose("random_keys 2")
    shown = [
        (f"{r['d_model']} / {r['d']}", str(r["n"]), with_interval(pd.Series(r), 100, 1))
        for r in heads.to_dict("records")
    ]
    yield from markdown(("d_model / d_head", "keys", "unselectable"), shown)


def language_model() -> Iterator[str]:
    yield from prose("language_model 1")
    for experiment in ("language_model_full", "language_model"):
        summary, about = kept_table(experiment), kept_about(experiment)["settings"]
        training, data = about["training"], about["data"]
        yield (
            f"Vocabulary {data['d_vocab']}, windows of {data['n_ctx']}, {training['steps']} steps of "
            f"{training['batch']} windows, seeds: {len(about['seeds'])}:"
        )
        yield ""
        last = summary[(summary["step"] == training["steps"]) & (summary["measure"] == "unselectable_fraction")]
        rows = []
        for (norm, divisor, space), part in last.groupby(["norm", "divisor", "space"], sort=False):
            ordered = part.sort_values("layer")
            published = ordered["published"].dropna()
            name = f"`{norm}`" + ("" if divisor == "-" else f", divisor {divisor}")
            rows.append(
                (
                    name,
                    str(space),
                    *(with_interval(row, 100) for _, row in ordered.iterrows()),
                    " / ".join(f"{100 * x:.0f}" for x in published) if len(published) else "–",
                )
            )
        yield from markdown(("trained", "keys", "layer 1", "2", "3", "4", "published"), rows)
        losses = summary[(summary["step"] == training["steps"]) & (summary["measure"] == "valid_loss")]
        said = [
            f"{r['norm']}{'' if r['divisor'] == '-' else ', divisor ' + r['divisor']}: "
            + with_interval(pd.Series(r), digits=2)
            for r in losses.to_dict("records")
        ]
        yield f"Held-out loss: {'; '.join(said)}."
        yield ""
    yield from prose("language_model 2")


def bundled_models() -> Iterator[str]:
    summary = kept_table("language_model_bundled")
    summary = summary[summary["layer"] == ALL_LAYERS]
    yield from prose("bundled_models 1")
    norms = list(dict.fromkeys(summary["norm"]))

    def cells(measure: str, factor: float, digits: int, sign: bool = False) -> Iterator[str]:
        rows = summary[summary["measure"] == measure]
        for norm in norms:
            found = rows["norm"].eq(norm).any()
            yield with_interval(only_row(rows, norm=norm), factor, digits, sign) if found else "does not scale"

    yield from markdown(
        ("", *(f"`lm-{norm}`" for norm in norms)),
        [
            ("held-out loss", *cells(LOSS, 1, 3)),
            ("every norm without scaling", *cells(COSTS["scaling"], 1, 3, True)),
            ("every norm without projection", *cells(COSTS["projection"], 1, 4, True)),
            ("unselectable keys, %", *cells(FRACTION, 100, 1)),
            ("… without scaling before attention, %", *cells(FROZEN, 100, 1)),
        ],
    )
    yield from prose("bundled_models 2")
    yield _of_every_seed(kept_table("language_model_bundled", "seeds"))
    yield ""
    contrasts = kept_table("language_model_bundled", "contrasts")
    names = list(dict.fromkeys(contrasts["contrast"]))
    rows = []
    for measure, (said, scale, digits) in DIFFERENCES.items():
        of = {r["contrast"]: r for r in rows_where(contrasts, measure=measure).to_dict("records")}
        rows.append((said, *(change(pd.Series(of[n]), scale, digits) if n in of else "–" for n in names)))
    yield from markdown(
        ("what changes it", *(f"{n.split(',')[0]} before attention,{n.split(',')[1]}" for n in names)), rows
    )


def _of_every_seed(seeds: pd.DataFrame) -> str:
    """What the single seeds of the bundled models say, in words.

    Raises:
        ValueError: it is no longer so.
    """
    whole = over_layers(seeds).pipe(lambda means: pd.concat([seeds[seeds["layer"] == ALL_LAYERS], means]))
    wide = whole.pivot(index=["measure", "seed"], columns="norm", values="value")
    with_scaling = pd.concat([wide["layernorm"] - wide["projection_only"], wide["scaling_only"] - wide["none"]])
    loss, keys = with_scaling.xs(LOSS), with_scaling.xs(FRACTION)
    needed = whole.loc[whole["measure"] == COSTS["scaling"], "value"]
    if not (needed.min() > 0 and loss.min() > 0 and keys.max() < 0):
        raise ValueError("the seeds of the bundled models no longer go one way: write what they say")
    projection = wide["none"].xs(COSTS["projection"])
    return (
        f"Every model of the {len(projection)} seeds loses by scaling left out; what `lm-none` loses without "
        f"projection differs by seed ({', '.join(f'{x:.3f}' for x in projection)}): what the one that ships loses is "
        "not what such models lose. Differences of the same seed: none of them is told after Holm's adjustment over "
        f"{len(kept_table('language_model_bundled', 'contrasts'))}. With scaling in the norm before attention, beside "
        f"the same without, the loss is higher in each of these seeds, by {loss.min():.2f} to {loss.max():.2f}, and "
        "unselectable keys are fewer, which so few seeds may show by chance:"
    )


def encoder() -> Iterator[str]:
    summary, about = kept_table("encoder"), kept_about("encoder")["settings"]
    yield from prose("encoder 1")
    last = summary[summary["step"] == about["training"]["steps"]]
    shares = last[(last["measure"] == "unselectable_fraction") & (last["shape"] == "narrow")]
    rows = [
        (f"`{norm}`", str(space), *(with_interval(row, 100, 1) for _, row in part.sort_values("layer").iterrows()))
        for (norm, space), part in shares.groupby(["norm", "space"], sort=False)
    ]
    yield from markdown(("trained (narrow)", "keys", "layer 1", "2", "3", "4"), rows)
    wide = last[(last["measure"] == "unselectable_fraction") & (last["shape"] == "wide")]
    yield (
        f"Wide (d 64, four heads of 16): at most {100 * wide['mean'].max():.2g} % in any layer and space, under any "
        "norm tried."
    )
    yield ""
    yield from sentences("encoder", "with LayerNorm")
    yield "What leaving out a term changes (shares: mean over layers; passages: below):"
    yield ""
    found, passages = kept_table("encoder", "effects"), kept_table("encoder_passages", "effects")
    rows = []
    for shape, norm in dict.fromkeys(zip(found["shape"], found["norm"], strict=True)):
        of = rows_where(found, shape=shape, norm=norm)
        right = rows_where(passages, shape=shape, norm=norm)
        rows.append(
            (
                f"{shape}, {LEFT_OUT[norm]}",
                *(change(only_row(of, measure="unselectable_fraction", space=s), 100, 1) for s in (BEFORE, HEAD)),
                change(only_row(of, measure=MASKED_LOSS), digits=3),
                change(right.iloc[0], 100, 1) if len(right) else "–",
            )
        )
    header = ("left out", "unselectable before the norm, points", "… as heads see them", "masked loss, nats")
    yield from markdown((*header, "passages told right, points"), rows)
    yield from prose("encoder_passages 1")
    yield from sentences("encoder_passages", ", LayerNorm")


def remove_norm() -> Iterator[str]:
    yield from prose("remove_norm 1")
    yield from sentences("remove_norm")
