"""Selectability, attainable attention, uniform attention and sinks of real checkpoints, per head and per model.

    python examples/checkpoints/geometry.py NAME…        # tables/geometry/NAME.csv (a row per head, space and variant)
    python examples/checkpoints/geometry.py --summary    # tables/geometry-summary.csv (means over heads; CIs)

NAME is a checkpoint and its prompts, of CASES. Eight prompts each, spread evenly over those of `measure.py`, of 64
tokens at most. CIs are over prompt groups (Student's t; the prompts differ, so each is a group), of every head and of
the mean over heads: they concern these texts, not other checkpoints. Entropy, angle and sinks of a prompt are measured
with the constants of the other prompts, as in the whole. Not applicable is left empty: angles without projection,
margins and attention of the norm's output, the loss of MiniLM, which has no head.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import plans
import torch
from measure import CASES as MEASURED
from measure import HERE, SOURCES, books, load, wikitext
from scipy import stats  # type: ignore[import-untyped]
from uniform_direction import directions

import ln_probe
from ln_probe.analyses.probes.selectability import Selectability

TABLES = HERE / "tables"
PROMPTS, TOKENS = 8, 64
HUB_TOKENS = 128  # of checkpoints of the hub: up to 65 keys in heads of 64 dimensions are selectable by theorem
LIMITS = {"margin": (None, None), "uniform_angle_deg": (0, 90)}  # of the measures that are not shares
CLOSER = 5.0  # degrees: heads whose queries are that much closer to 1 than random ones are counted
HEADS = ["unselectable_fraction", "unreachable_fraction", "margin_median", "attainable_median",
         "attainable_reachable_median", "entropy_ratio", "uniform_angle_deg", "score_spread"]  # fmt: skip
ABOUT = ["layer", "head", "space", "variant"]
# Of one key: whether it is unselectable, whether out of reach, its margin, its attainable attention.
MEASURES: dict[str, Callable[[pd.DataFrame], pd.Series]] = {
    "unselectable": lambda t: (t["verdict"] == "unselectable").astype(float),
    "unreachable": lambda t: 1.0 - t["reachable"].astype("float64"),
    "margin": lambda t: t["margin_lower"],
    "attainable": lambda t: t["attainable"],
}
MEDIANS = ("margin", "attainable")
OF_QUERIES = ["entropy_ratio", "uniform_angle_deg", "first_rate"]  # of one head on one prompt, as means over queries


def _case(name: str) -> Callable[[], tuple[Any, list[list[int]]]]:
    def made() -> tuple[Any, list[list[int]]]:
        case = MEASURED[name]
        model = load(case)
        return model, SOURCES[case.prompts](model, min(case.tokens, 128))

    return made


def _smollm2_books() -> tuple[Any, list[list[int]]]:
    model = load(MEASURED["smollm2-135m"])
    return model, books(model, 32)


def _plans() -> tuple[Any, list[list[int]]]:
    model = load(MEASURED["capp-gpt-own"])
    return model, plans.draw(model, 64, 0)


def _minilm(source: Callable[..., list[list[int]]]) -> Callable[[], tuple[Any, list[list[int]]]]:
    def made() -> tuple[Any, list[list[int]]]:
        model = ln_probe.load_model(os.environ["LN_PROBE_MINILM"])
        return model, source(model, TOKENS)

    return made


CASES: dict[str, Callable[[], tuple[Any, list[list[int]]]]] = {
    **{name: _case(name) for name in MEASURED if name.startswith(("lm-", "mgm", "capp", "smollm2"))},
    "capp-gpt-plans": _plans,
    "smollm2-135m-books": _smollm2_books,
    "minilm-wikitext": _minilm(wikitext),
    "minilm-books": _minilm(books),
}


def random_angles(model: Any) -> dict[int, np.ndarray]:
    """By layer: the median angle to 1 of queries drawn evenly in each head's key space, in degrees.

    The cosine of such a query is that of the head's least angle times a coordinate of a random point on a sphere, whose
    square has the beta distribution with 1/2 and (d_head - 1)/2.
    """
    found = {}
    for layer, of in directions(model).items():
        median = float(stats.beta.median(0.5, (of.uniform.shape[-1] - 1) / 2)) ** 0.5
        found[layer] = np.degrees(np.arccos(np.cos(np.radians(of.least_angle.numpy())) * median))
    return found


def measured(name: str, model: Any = None) -> tuple[pd.DataFrame, pd.DataFrame]:
    """A row per head, space and variant; and per prompt, space and variant (means over heads).

    Args:
        name: of CASES, or of one of `measure.py` that is on the hub.
        model: of a hub case, loaded.
    """
    if model is None:
        model, prompts = CASES[name]()
        limit = TOKENS
    else:
        prompts, limit = SOURCES[MEASURED[name].prompts](model, HUB_TOKENS), HUB_TOKENS
    chosen = [prompts[i][:limit] for i in np.linspace(0, len(prompts) - 1, PROMPTS).astype(int)]
    if len({tuple(row) for row in chosen}) < len(chosen):
        raise SystemExit(f"{name}: equal prompts form one group, and intervals would be too narrow")
    (TABLES / "tokens" / f"geometry-{name}.json").write_text(json.dumps([list(map(int, row)) for row in chosen]))
    probes = [Selectability(every_key=True), "uniformity", "sinks"]
    report = ln_probe.analyze(model, chosen, probes=probes, progress=False)
    heads = _with_sinks(report)[[*ABOUT, *HEADS, "by_theorem", "no_op", "first_rate"]]
    of_head = zip(heads["layer"], heads["head"], strict=True)
    angles = {} if heads["uniform_angle_deg"].isna().all() else random_angles(model)
    heads["random_angle_deg"] = [angles[a][b] if a in angles and b >= 0 else np.nan for a, b in of_head]
    keys = report.tables["keys"]
    keys = keys[[*ABOUT, "prompt"]].assign(**{measure: of(keys) for measure, of in MEASURES.items()})
    grouped = keys.groupby([*ABOUT, "prompt"])
    each = pd.DataFrame({m: grouped[m].median() if m in MEDIANS else grouped[m].mean() for m in MEASURES})
    each = each.join(_of_queries(model, chosen))
    each["queries"] = [len(chosen[prompt]) - 1 for prompt in each.index.get_level_values("prompt")]
    ends = [
        dict(zip(ABOUT, about, strict=True)) | {f"{m}_half_width": _mean(some, m)[1] for m in (*MEASURES, *OF_QUERIES)}
        for about, some in each.groupby(ABOUT)
    ]
    heads = heads.merge(pd.DataFrame(ends), how="left", on=ABOUT)
    by_prompt = each.groupby(["space", "variant", "prompt"]).mean().reset_index()
    return heads, by_prompt


def _of_queries(model: Any, chosen: list[list[int]]) -> pd.DataFrame:
    """Entropy, angle and sink rate of every head on every prompt, with constants of the other prompts."""
    found = []
    for number, row in enumerate(chosen):
        others = chosen[:number] + chosen[number + 1 :]
        report = ln_probe.analyze(model, [row], probes=["uniformity", "sinks"], calibration=others, progress=False)
        found.append(_with_sinks(report)[[*ABOUT, *OF_QUERIES]].assign(prompt=number))
    return pd.concat(found).set_index([*ABOUT, "prompt"])


def _with_sinks(report: Any) -> pd.DataFrame:
    """The table `heads`, with the share of each head's queries that give position 0 over 0.3 of their attention."""
    sinks = report.tables["sink_heads"].set_index(["layer", "head"])["first_rate"]
    return report.heads.assign(
        first_rate=[sinks.get(key, np.nan) for key in zip(report.heads["layer"], report.heads["head"], strict=True)]
    )


def rows_of(name: str, heads: pd.DataFrame, prompts: pd.DataFrame) -> pd.DataFrame:
    """A row per space and variant of one case, from what `measured` gives."""
    rows = []
    for (space, variant), some in prompts.groupby(["space", "variant"], sort=False):
        mine = heads[(heads["space"] == space) & (heads["variant"] == variant)]
        row: dict[str, Any] = {"checkpoint": name, "space": space, "variant": variant, "prompts": len(some)}
        for measure in (*MEASURES, *OF_QUERIES):
            if measure not in some:  # a table from before intervals of queries
                row[measure] = mine[measure].mean()
                continue
            center, half = _mean(some, measure)
            ends = np.clip((center, center - half, center + half), *LIMITS.get(measure, (0, 1)))
            row |= dict(zip((measure, f"{measure}_low", f"{measure}_high"), ends, strict=True))
        row |= {column: mine[column].mean() for column in ("random_angle_deg", "attainable_reachable_median")}
        angled = mine[mine["random_angle_deg"].notna()]
        below = angled["random_angle_deg"] - angled["uniform_angle_deg"]
        row["closer_than_random"] = (below > CLOSER).mean() if len(angled) else np.nan
        if "uniform_angle_deg_half_width" in angled and len(angled):  # heads of which that holds of the whole interval
            row["closer_surely"] = (below - angled["uniform_angle_deg_half_width"] > CLOSER).mean()
        row |= {"heads": len(mine), "by_theorem": bool(mine["by_theorem"].fillna("").ne("").all())}
        rows.append(row | {"no_op": ", ".join(mine["no_op"].dropna().unique())})
    return pd.DataFrame(rows)


def summarize() -> pd.DataFrame:
    """A row per checkpoint and prompts, space and variant."""
    tables = [
        rows_of(name, pd.read_csv(path), pd.read_csv(path.with_name(f"{name}-prompts.csv")))
        for name in CASES
        if (path := TABLES / "geometry" / f"{name}.csv").is_file()
    ]
    return pd.concat(tables, ignore_index=True)


def _mean(prompts: pd.DataFrame, measure: str) -> tuple[float, float]:
    """The mean over prompts, those of queries weighted by their number, and half the width of its 95 % interval."""
    known = prompts[prompts[measure].notna()]
    values = known[measure].to_numpy(float)
    weight = known["queries"].to_numpy(float) if measure in OF_QUERIES else np.ones(len(known))
    if len(known) < 2:
        return float(values.sum()) if len(known) else np.nan, np.nan
    center = float(weight @ values / weight.sum())
    spread = np.square(weight * (values - center)).sum() * len(known) / (len(known) - 1)  # of a ratio (Cochran 1977)
    return center, float(stats.t.ppf(0.975, len(known) - 1) * spread**0.5 / weight.sum())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(CASES))
    parser.add_argument("--summary", action="store_true", help="only make the summary again")
    args = parser.parse_args()
    if unknown := set(args.names) - set(CASES):
        parser.error(f"no checkpoint called {', '.join(sorted(unknown))}; there are {', '.join(CASES)}")
    torch.set_num_threads(1)
    out = Path(TABLES / "geometry")
    out.mkdir(exist_ok=True)
    for name in args.names:
        heads, prompts = measured(name)
        heads.to_csv(out / f"{name}.csv", index=False, float_format="%.5g")
        prompts.to_csv(out / f"{name}-prompts.csv", index=False, float_format="%.6g")
        summarize().to_csv(TABLES / "geometry-summary.csv", index=False, float_format="%.5g")
        print(name, flush=True)
    table = summarize()
    table.to_csv(TABLES / "geometry-summary.csv", index=False, float_format="%.5g")
    print(table.to_string())


if __name__ == "__main__":
    main()
