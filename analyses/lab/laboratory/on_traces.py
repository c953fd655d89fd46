"""What the traced networks show, told from the kept tables: a table, a sweep of thresholds, sentences by seed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pandas as pd

from ln_probe.analyses.lab.counting.cell_traces import MOVED, READABLE, STRAIGHT
from ln_probe.analyses.lab.intervals import SIGNIFICANT, binomial_interval, interval
from ln_probe.analyses.lab.laboratory.reading import kept_table, markdown, rows_where

CELL = ["task", "model", "norm", "norm_site", "phase"]
# How many times further a dimension goes per letter in one phase than in the other, if it is to belong to that one
# alone: those of kept pairs do so hundreds of times.
ALONE = 100


def trace_table(networks: pd.DataFrame) -> Iterator[str]:
    """A row per network and letter, values seed by seed."""
    rows = []
    for key, part in networks.groupby(CELL, sort=False):
        low, high = binomial_interval(int(part["counts"].sum()), len(part))
        mean, least, most = interval(part["exact_to"].to_numpy(float))
        exact = f"{_each(part, 'exact_to')}: {mean:.0f}"
        if len(part) > 1:
            exact += f" [{max(least, 0):.0f}, {min(most, part['tested_n'].iloc[0]):.0f}]"
        rows.append(
            (
                _title(*map(str, key)),
                f"{', '.join(part['counts'].map({1: 'yes', 0: 'no'}))} [{low:.0%}, {high:.0%}]",
                _pairs(part, "slope_before", "slope_in", "+.3f"),
                ", ".join(f"{r2:.4f}" for r2 in part[["r2_before", "r2_in"]].min(axis=1)),
                _pairs(part, "off_before", "off_in", ".2f"),
                _pairs(part, "holds_to", "holds_to_in", ".0f"),
                _each(part, "reads_to"),
                exact,
                _each(part, "reads_last_as"),
                _each(part, "carried", digits=2),
            )
        )
    header = (
        "network", "counts", "slopes before / in", "least R²", "letters off its lines", "straight to, longest word",
        "reads right to", "exact to", "takes the longest for", "moved by 1",
    )  # fmt: skip
    yield from markdown(header, rows)


def threshold_table() -> Iterator[str]:
    """In how many networks of each kind the best dimension would pass, by one criterion alone."""
    table = kept_table("counting_traces", "thresholds")
    tried = list(dict.fromkeys(zip(table["criterion"], table["threshold"], strict=True)))
    rows = []
    for key, part in table.groupby(CELL, sort=False):
        by = part.set_index(["criterion", "threshold"])["networks"]
        rows.append((_title(*map(str, key)), *(str(by[one]) for one in tried)))
    of = sorted(set(table["of"]))
    names = [f"R² ≥ {threshold:g}" if criterion == "r2" else f"off ≤ {threshold:g}" for criterion, threshold in tried]
    yield from markdown((f"of {' or '.join(map(str, of))} networks", *names), rows)


def what_networks_show(networks: pd.DataFrame) -> Iterator[str]:
    """The findings, place of the norm by place, then what all networks of a seed do."""
    words = rows_where(networks, task="anbn")
    lstm = rows_where(words, model="lstm")
    yield from (f"- {said}" for said in (
        _without(lstm, words[words["model"] != "lstm"]), _on_state(rows_where(lstm, norm_site="state")),
        _on_readout(rows_where(lstm, norm_site="readout")), _on_gates(rows_where(lstm, norm_site="gates")),
        _three_letters(rows_where(networks, task="anbncn")),
    ))  # fmt: skip
    yield ""
    yield _by_seed(lstm)
    yield ""


def _without(lstm: pd.DataFrame, others: pd.DataFrame) -> str:
    plain = rows_where(lstm, norm="none")
    err = plain[plain["exact_to"] < plain["tested_n"]]
    straight = len(err) > 0 and bool((err[["holds_to", "holds_to_in"]].min(axis=1) >= err["tested_n"]).all())
    return (
        f"**No norm.** One dimension of an LSTM counts in {_of(plain)} seeds: {_range(plain, _slopes, '.2f')} per "
        f"letter up and down, {_range(plain, _off, '.2f')} letters off its lines to the trained n, straight to "
        f"{_range(plain, ('holds_to', 'holds_to_in'), '.0f')} of {plain['tested_n'].iloc[0]} letters. {_moved(plain)} "
        f"Exact to {_each(plain, 'exact_to')}"
        + (
            "; where networks err, the trace is still straight. Steps up and down are not quite of one size; whether "
            "that is why they err was not tested."
            if straight
            else "."
        )
        + f" In {_of(rows_where(others, model='gru'))} GRUs and {_of(rows_where(others, model='rnn_relu'))} ReLU-RNNs "
        f"a dimension counts; their best ones leave a line after {_range(others, ('holds_to',), '.0f')} a's. That a "
        "ReLU-RNN can count is a claim of capability; these did not learn it."
    )


def _on_state(state: pd.DataFrame) -> str:
    scaled, projected = state[state["norm"] != "projection_only"], state[state["norm"] == "projection_only"]
    swept = rows_where(kept_table("counting_traces", "thresholds"), norm="projection_only", norm_site="state")
    swept = rows_where(swept, criterion="r2")
    by_r2 = ", ".join(f"{r['networks']} at {r['threshold']:g}" for r in swept.to_dict("records"))
    return (
        f"**On the state** (the norm's output is the next state): with LayerNorm a dimension counts in "
        f"{_of(rows_where(scaled, norm='layernorm'))} seeds, with scaling alone in "
        f"{_of(rows_where(scaled, norm='scaling_only'))}; the best one is straight for "
        f"{_range(scaled, ('holds_to',), '.0f')} a's. They still tell n apart up to the trained n "
        f"({scaled['trained_n'].iloc[0]}) and hardly beyond it (right to {_range(scaled, ('reads_to',), '.0f')}); "
        f"{scaled['tested_n'].iloc[0]} a's are taken for {_each(scaled, 'reads_last_as')}. With projection alone a "
        f"dimension counts in {_of(projected)} seeds: it is {_pairs(projected, 'off_before', 'off_in', '.1f')} letters "
        "off its lines (up / down) within the trained n, and by R² alone the number that count would be a matter of "
        f"the threshold ({by_r2}). {_moved(projected)} Right answers end at {_each(projected, 'exact_to')}."
    )


def _on_readout(readout: pd.DataFrame) -> str:
    norms = {"layernorm": "LayerNorm", "scaling_only": "scaling alone", "projection_only": "projection alone"}
    told = [
        f"with {words} in {_of(part)} seeds{_at_a_letter(norm)} (lines off by {_each(part, *_off, digits=2)} letters, "
        f"straight to {_each(part, 'holds_to')} a's, right answers to {_each(part, 'exact_to')})"
        for norm, words in norms.items()
        if len(part := rows_where(readout, norm=norm))
    ]
    pairs = " ".join(_pair(row) for _, row in readout.iterrows() if _pair(row))
    return (
        "**On the readout** (the state is not touched, but what is read goes into the next gates): the state counts "
        f"{'; '.join(told)}.{' ' + pairs if pairs else ''}"
    )


def _at_a_letter(norm: str) -> str:
    """How many would count if they might be a whole letter off, where that is another number."""
    swept = rows_where(kept_table("counting_traces", "thresholds"), norm=norm, norm_site="readout", criterion="off")
    at = swept.set_index("threshold")["networks"]
    return "" if at[READABLE] == at[1.0] else f", in {at[1.0]} if a whole letter off would do"


def _pair(row: pd.Series) -> str:
    """The dimensions of a network that move in one phase alone, one for the a's and one for the b's, if there are "
    "both."""
    table = rows_where(kept_table("counting_traces", "dimensions"), **{k: row[k] for k in (*CELL[:4], "seed")})
    wide = table.pivot(index="dimension", columns="phase", values=["slope", "r2"])
    slopes = {phase: wide["slope"][phase].abs() for phase in "ab"}
    found = []
    for here, there in ("ab", "ba"):
        alone = slopes[here][(slopes[here] > ALONE * slopes[there]) & (wide["r2"][here] >= STRAIGHT)]
        if alone.empty:
            return ""
        found.append(f"dimension {alone.idxmax()} by {wide['slope'][here][alone.idxmax()]:+.2f} for every {here}")
    return (
        f"With {row['norm']}, seed {row['seed']} has a pair: {found[0]} and {found[1]}, each hardly in the other "
        "letters; all dimensions that turn, moved by the worth of k letters, move the end by "
        f"{row['carried_by_turning']:.2f} k."
    )


def _on_gates(gates: pd.DataFrame) -> str:
    return (
        f"**On the gates** a dimension counts in {_of(gates)} networks ({gates['norm'].nunique()} norms, each in "
        f"{gates['seed'].nunique()} seeds), in the longest word straight to {_range(gates, ('holds_to',), '.0f')} a's "
        f"and {_range(gates, ('holds_to_in',), '.0f')} b's. {_moved(gates)} They are exact to "
        f"{gates['exact_to'].min():.0f} at least, and read {gates['tested_n'].iloc[0]} a's as "
        f"{_range(gates, ('reads_last_as',), '.0f')}."
    )


def _three_letters(words: pd.DataFrame) -> str:
    lstm = rows_where(words, model="lstm")
    b, c = (rows_where(lstm, phase=phase) for phase in "bc")
    others = words[words["model"] != "lstm"]
    trained, tested = lstm["trained_n"].iloc[0], lstm["tested_n"].iloc[0]
    return (
        f"**aⁿbⁿcⁿ** (trained to {trained}). An LSTM has a counter for the b's in {_of(b)} seeds and one for the c's "
        f"in {_of(c)}: {_range(lstm, _slopes, '.2f')} per letter, {_range(lstm, _off, '.2f')} letters off their lines. "
        f"{_moved(lstm)} They are exact to {_each(b, 'exact_to')} all the same. In the longest tested word the "
        f"b-counters are straight to {_each(b, 'holds_to')} a's, the c-counters, which rise in the b's, to "
        f"{_each(c, 'holds_to')} b's: those b's come after {tested} a's, from states that words of the trained n never "
        f"led to, and where that is fewer than {trained} the same counter is straight all through the longest trained "
        f"word. GRU and ReLU-RNN have a counter in {_of(others)} cases of a letter and a seed."
    )


def _by_seed(lstm: pd.DataFrame) -> str:
    plain = rows_where(lstm, norm="none").set_index("seed")["exact_to"]
    sites = {site: rows_where(lstm, norm_site=site) for site in ("state", "readout", "gates")}
    scaled = sites["state"][sites["state"]["norm"] != "projection_only"]
    sooner = sites["readout"].assign(sooner=sites["readout"]["exact_to"] < sites["readout"]["seed"].map(plain))
    seeds = lstm["seed"].nunique()
    (all_low, _), (_, none_high) = binomial_interval(seeds, seeds), binomial_interval(0, seeds)
    effects = rows_where(kept_table("counting", "effects"), task="anbn", model="lstm", measure="exact_to")
    told = int((effects["p_holm"] < SIGNIFICANT).sum())
    return (
        "By seed, for the networks of a seed are trained on the same words: with a norm on the gates the count is "
        f"there in all of them in {_seeds(sites['gates'], 'counts')} seeds; with scaling on the state (LayerNorm or "
        f"alone) it is in none in {_seeds(scaled.assign(none=1 - scaled['counts']), 'none')}; with a norm on the "
        f"readout right answers end sooner than without a norm in all of them in {_seeds(sooner, 'sooner')} "
        f"(at {_range(sites['readout'], ('exact_to',), '.0f')}), though the state counts on in all of them in "
        f"{_seeds(sites['readout'], 'counts')}. {seeds} of {seeds} seeds is a share of [{all_low:.0%}, 100%], none of "
        f"{seeds} one of [0%, {none_high:.0%}], and no more can be had of so few. Of the paired tests of the largest "
        f"exact n, LSTM on aⁿbⁿ against no norm ([Counting](#counting)), {told or 'none'} of {len(effects)} "
        f"{'is' if told == 1 else 'are'} told after Holm's adjustment (least p {effects['p_holm'].min():.2g}). Norms "
        "are traced in the LSTM on aⁿbⁿ alone. More seeds would join by `keeping counting_traces --add DIR`."
    )


_slopes, _off = ("slope_before", "slope_in"), ("off_before", "off_in")


def _title(task: str, model: str, norm: str, site: str, phase: str) -> str:
    return f"{task}, {phase}'s: {model}" + ("" if norm == "none" else f", `{norm}` on its {site}")


def _of(part: pd.DataFrame) -> str:
    return f"{int(part['counts'].sum())} of {len(part)}"


def _seeds(part: pd.DataFrame, column: str) -> str:
    """In how many seeds something is so of all networks."""
    by = part.groupby("seed")[column].min()
    return f"{int(by.sum())} of {len(by)}"


def _each(part: pd.DataFrame, *columns: str, digits: int = 0) -> str:
    """A column seed by seed, or the largest of several."""
    return ", ".join(f"{value:.{digits}f}" for value in part[list(columns)].max(axis=1))


def _pairs(part: pd.DataFrame, first: str, second: str, form: str) -> str:
    return ", ".join(f"{a:{form}} / {b:{form}}" for a, b in zip(part[first], part[second], strict=True))


def _range(part: pd.DataFrame, columns: Sequence[str], form: str) -> str:
    """The least and the largest size, "0.99 to 1.00"; once, if they are the same."""
    sizes = np.abs(part[list(columns)].to_numpy(float))
    least, most = f"{sizes.min():{form}}", f"{sizes.max():{form}}"
    return least if least == most else f"{least} to {most}"


def _moved(part: pd.DataFrame) -> str:
    """How far the end goes with the dimension, and where that was measured: it says nothing of other n."""
    return (
        f"At n = {part['trained_n'].iloc[0] // 2}, moved by the worth of k letters, {MOVED} at most, that dimension "
        f"moves the end by {_range(part, ('carried',), '.2f')} k."
    )
