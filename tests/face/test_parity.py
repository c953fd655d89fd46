"""One model, one report: whichever TransformerLens world it is loaded into, raw or folded, and whichever version.

The worlds of the environment are compared with each other: HookedTransformer and the bridge in TransformerLens 3.9.
With LN_PROBE_PARITY set to a folder, tables are kept there as parquet and compared with those that another environment
left (`.ci/run`: the suite in TransformerLens 3.9, then in 4.3, which has only the bridge).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import ln_probe
from ln_probe.analyses.geometry.attainable import WEIGHT_GAP
from ln_probe.analyses.geometry.key_coordinates import TAU
from ln_probe.analyses.tables import CAUSAL, HEADS, INTERVALS, KEYS, LAYERNORMS
from ln_probe.loading.worlds import World, has_hooked_transformer

TABLES = ("layernorms", "heads", "keys", "causal", "unembedding")
# Must be the same in both, letter by letter and number by number.
SAME = {
    "layernorms": ["site", "layer", "kind", "reads", "state", "tokens"],
    "heads": ["layer", "head", "space", "variant", "keys", "unselectable", "duplicate", "undecided", "by_theorem",
              "no_op", "unselectable_fraction", "queries", "keys_all"],
    "keys": ["layer", "head", "space", "variant", "prompt", "position", "token", "judged_at"],
    # (Not `prompts_worse`: where nothing changes but rounding, a loss may rise in one world and fall in the other.)
    "causal": ["sites", "variant", "prompts", "matched", "no_op", "top1_agreement"],
    "unembedding": [],
}  # fmt: skip
# Formulas of activations and weights: as near as the arithmetic allows.
CLOSED_FORM = {
    "layernorms": [c for c in LAYERNORMS.names if c not in (*SAME["layernorms"], "reconstruction_error", "evidence")],
    "heads": ["pattern_max_median", "query_radius", "entropy_ratio", "uniform_angle_deg", "score_spread",
              "score_spread_floor"],
    "keys": ["pattern_max"],
    "causal": [c for c in CAUSAL.names if c not in (*SAME["causal"], "prompts_worse", "p_adjusted")],
    "unembedding": [],
}  # fmt: skip
# Found by search to a stated gap: both ends are lower bounds of the same number, at most this far below it.
BRACKETED = {
    "heads": ["attainable_median", "attainable_p05", "attainable_reachable_median"],
    "keys": ["attainable", "attainable_upper", "attainable_reachable"],
    "unembedding": ["attainable"],
}
# What a projection removes from a centred stream is rounding, by construction: nothing to agree about.
ROUNDING_IF_CENTRED = ("mean_share", "mean_share_tail")

# Differences of losses or entropies in nats: relative to the loss, not to what cancels.
CHANGES = (
    "delta_loss",
    "delta_loss_low",
    "delta_loss_high",
    "delta_loss_uniform",
    "delta_loss_resampled",
    "kl",
    "entropy_change",
)
# Entropy of attention that is one-hot to float64's precision (3e-160 without scaling, in SmolLM2): zero.
ONE_HOT = 1e-15
# Exponentials of scores: a part of the scores' size in nats is their relative error.
SOFTMAX_WEIGHTS = ("pattern_max", "pattern_max_median")

TOKENS = torch.randint(0, 50, (2, 28), generator=torch.Generator().manual_seed(5))


@dataclass(frozen=True)
class Case:
    arch: str
    processed: bool
    dtype: str

    def __str__(self) -> str:
        return f"{self.arch}-{'folded' if self.processed else 'raw'}-{self.dtype}"

    def tolerance(self, *names: str) -> float:
        """For two of the reports, named as their folders are."""
        if self.dtype == "float32":
            return 1e-4
        # Rotary tables, and the norms of Hugging Face's Llama, are float32 in float64 models too. And TransformerLens
        # rounds float64 weights to float32 to fold them, differently in its two worlds (`process_weights`).
        folds_alike = len({n.split("-")[0] for n in names}) == 1
        return 1e-9 if self.arch == "gpt2" and (folds_alike or not self.processed) else 1e-6

    @property
    def processing(self) -> dict[str, bool]:
        """Folded, and centred too where the norm projects."""
        return {"fold_ln": True, "center_writing_weights": self.arch != "llama"} if self.processed else {}


CASES = [Case(a, p, t) for a in ("gpt2", "neox", "llama") for p in (False, True) for t in ("float32", "float64")]


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where tables of this and other environments lie."""
    given = os.environ.get("LN_PROBE_PARITY")
    return Path(given) if given else tmp_path_factory.mktemp("parity")


def worlds() -> list[World]:
    return ["hooked", "bridge"] if has_hooked_transformer() else ["bridge"]


def report_in(world: World, folder: Path, case: Case) -> Any:
    model = ln_probe.load_model(folder, world=world, dtype=case.dtype, device="cpu", **case.processing)  # type: ignore[arg-type]
    return ln_probe.analyze(model, TOKENS, progress=False, keys="all")


@pytest.mark.parametrize(
    "case",
    [pytest.param(c, id=str(c), marks=[] if str(c) == "gpt2-raw-float32" else [pytest.mark.slow]) for c in CASES],
)
def test_worlds_agree(case: Case, kept: Path, tmp_path: Path, make_hugging_face: Callable[..., Any]) -> None:
    make_hugging_face(case.arch, torch.float64).save_pretrained(tmp_path / "model")
    here = kept / str(case)
    for world in worlds():
        report = report_in(world, tmp_path / "model", case)
        assert set(report.layernorms["state"]) == (
            {"raw"} if not case.processed else {"folded"} if case.arch == "llama" else {"folded+centred"}
        )
        out = here / f"{world}-{version('transformer-lens')}"
        out.mkdir(parents=True, exist_ok=True)
        assert {"selectable", "unselectable"} <= set(report.keys["verdict"])
        assert len(report.causal)
        assert len(report.unembedding)
        for table in TABLES:
            getattr(report, table).to_parquet(out / f"{table}.parquet")
    found = sorted(here.iterdir())
    if len(found) == 1:
        why = f"only {found[0].name} is there: run this with TransformerLens 3.9 first, and the same LN_PROBE_PARITY"
        assert "LN_PROBE_PARITY" not in os.environ, why
        pytest.skip(why)
    for other in found[1:]:
        assert_same_findings(
            read(found[0]), read(other), case.tolerance(found[0].name, other.name), f"{found[0].name} and {other.name}"
        )


def read(folder: Path) -> dict[str, pd.DataFrame]:
    return {t: pd.read_parquet(folder / f"{t}.parquet") for t in TABLES}


def assert_same_findings(
    one: dict[str, pd.DataFrame], two: dict[str, pd.DataFrame], tolerance: float, which: str = ""
) -> None:
    """Closed-form columns within `tolerance` relative; sites, kinds, states, counts and NaN masks identical; clear
    verdicts identical; brackets overlapping. What differs is named, all of it."""
    wrong = [f"{which}: {text}" for text in differences(one, two, tolerance)]
    assert not wrong, "\n".join(wrong)


def differences(one: dict[str, pd.DataFrame], two: dict[str, pd.DataFrame], tolerance: float) -> Iterator[str]:
    for table in TABLES:
        a, b = one[table], two[table]
        if not len(a) and not len(b) and table in ("causal", "unembedding"):  # not asked for
            continue
        if list(a.columns) != list(b.columns) or len(a) != len(b) or not len(a):
            yield f"{table}: {len(a)} rows of {list(a.columns)} and {len(b)} of {list(b.columns)}"
            continue
        for column in SAME[table]:
            if not (unlike := a[column].astype(str) != b[column].astype(str)).any():
                continue
            row = int(np.argmax(unlike))
            yield f"{table}.{column}: {int(unlike.sum())} rows differ, first {a[column][row]!r} and {b[column][row]!r}"
        for column in a.select_dtypes("number").columns:
            x, y = (t[column].to_numpy(float) for t in (a, b))
            if (np.isnan(x) != np.isnan(y)).any():
                yield f"{table}.{column}: NaN in other rows"
        for column in CLOSED_FORM[table]:
            x, y = (t[column].to_numpy(float) for t in (a, b))
            compared = ~np.isnan(x)
            if column in ROUNDING_IF_CENTRED:
                rounding = a["state"].str.contains("centred").to_numpy()
                compared &= ~rounding
                if max(np.max(x[rounding], initial=0), np.max(y[rounding], initial=0)) > 1e-12:  # (16 eps of float32)²
                    yield f"{table}.{column}: more than rounding in a centred stream"
            scale = np.maximum(np.maximum(np.abs(x), np.abs(y)), 1e-300)
            if column == "entropy_ratio":
                compared &= ~((x < ONE_HOT) & (y < ONE_HOT))
            if column in CHANGES:
                scale = np.maximum(scale, a["loss"].to_numpy(float))
            if column in SOFTMAX_WEIGHTS:
                scale = scale * (1 + _largest(table, a, np.log(scale)))
            error = np.abs(x - y) / scale
            worst = np.max(error[compared & (x != y)], initial=0.0)
            if worst > tolerance:
                row = int(np.argmax(np.where(compared & (x != y), error, -1)))
                yield f"{table}.{column}: {worst:.1e} relative (row {row}: {x[row]:.6g}, {y[row]:.6g})"
        for column in BRACKETED.get(table, []):
            x, y = (t[column].to_numpy(float) for t in (a, b))
            worst = np.nanmax(np.abs(x - y), initial=0.0)
            if worst > WEIGHT_GAP + tolerance:
                yield f"{table}.{column}: {worst:.1e} apart, gap {WEIGHT_GAP}"
        if "verdict" in a:
            # margin_lower of a clear verdict is above 10 tau; unselectable ones have none, and must be so in both
            lower = np.fmax(*(t["margin_lower"].to_numpy(float) for t in (a, b)))
            clear = ~(lower <= 10 * TAU) | (a["verdict"] == "unselectable") | (b["verdict"] == "unselectable")
            if (unlike := clear & (a["verdict"] != b["verdict"])).any():
                yield f"{table}.verdict: {int(unlike.sum())} clear ones differ"
            slack = tolerance * _largest(table, a, a["margin_upper"])
            for low, high in ((a, b), (b, a)):
                if (low["margin_lower"].to_numpy(float) > high["margin_upper"].to_numpy(float) + slack).any():
                    yield f"{table}: margins whose brackets do not overlap"
        if table == "keys":
            x, y = (t["first_unselectable_at"].to_numpy(float) for t in (a, b))
            if (unlike := ~np.isnan(x) & (x != y)).any():
                yield f"{table}.first_unselectable_at: {int(unlike.sum())} differ"


def _largest(table: str, rows: pd.DataFrame, values: Any) -> np.ndarray:
    """The largest absolute value in the same set of keys: moving all keys by a part of their size moves any score or
    margin by that part of the largest."""
    size = pd.Series(np.abs(np.asarray(values, float)), index=rows.index)
    if table == "keys":
        return (
            size.groupby([rows[c] for c in ("layer", "head", "space", "variant", "prompt")]).transform("max").to_numpy()
        )
    return size.to_numpy() if table == "heads" else np.full(len(rows), size.max())


@pytest.mark.skipif(not has_hooked_transformer(), reason="this TransformerLens has one world")
@pytest.mark.slow
def test_the_same_folded_weights_agree_in_float64(make_hugging_face: Callable[..., Any], tmp_path: Path) -> None:
    """What sets folded GPT-2 apart in float64 is the rounding of the fold alone: with one world's weights, 1e-9."""
    case = Case("gpt2", processed=True, dtype="float64")
    make_hugging_face("gpt2", torch.float64).save_pretrained(tmp_path)
    bridge: Any = ln_probe.load_model(tmp_path, world="bridge", dtype="float64", device="cpu", **case.processing)
    hooked: Any = ln_probe.load_model(tmp_path, world="hooked", dtype="float64", device="cpu", **case.processing)
    with torch.no_grad():
        hooked.embed.W_E.copy_(bridge.W_E)
        hooked.pos_embed.W_pos.copy_(bridge.pos_embed.weight)
        hooked.unembed.W_U.copy_(bridge.W_U)
        hooked.unembed.b_U.copy_(bridge.b_U)
        for ours, theirs in zip(hooked.blocks, bridge.blocks, strict=True):
            for part, names in (("attn", "W_Q W_K W_V W_O b_Q b_K b_V b_O"), ("mlp", "W_in W_out b_in b_out")):
                for name in names.split():
                    value = getattr(getattr(theirs, part), name)
                    getattr(getattr(ours, part), name).copy_(value.reshape(getattr(getattr(ours, part), name).shape))
    reports = [ln_probe.analyze(m, TOKENS, progress=False, keys="all") for m in (hooked, bridge)]
    assert_same_findings(*({t: getattr(r, t) for t in TABLES} for r in reports), 1e-9)


def test_every_column_is_compared() -> None:
    """A new column has to be put in one of the lists above."""
    searched = {"verdict", "margin_lower", "margin_upper", "first_unselectable_at", "margin_median", "margin_p05"}
    searched |= {f"{name}_{end}" for name in INTERVALS for end in ("low", "high")}  # of samples: NaN in both here
    for table, columns in (
        ("layernorms", LAYERNORMS.names),
        ("heads", HEADS.names),
        ("keys", KEYS.names),
        ("causal", CAUSAL.names),
    ):
        known = {*SAME[table], *CLOSED_FORM[table], *BRACKETED.get(table, []), *searched}
        # What is rounding itself, or a count of signs (rounding decides the sign of a change that is none).
        left = {"layernorms": {"reconstruction_error", "evidence"}, "causal": {"prompts_worse", "p_adjusted"}}
        assert set(columns) - known == left.get(table, set()), table


def test_the_comparison_sees_differences(make_bridge: Callable[..., Any]) -> None:
    report = ln_probe.analyze(make_bridge("gpt2"), TOKENS[:1], progress=False, keys="all")
    tables = {t: getattr(report, t) for t in TABLES}
    assert not list(differences(tables, tables, 1e-9))

    def changed(table: str, column: str, change: Callable[[Any], Any]) -> list[str]:
        other = tables[table].copy()
        other[column] = change(other[column])
        return [text.split(":")[0] for text in differences(tables, tables | {table: other}, 1e-4)]

    assert changed("layernorms", "scale_mean", lambda c: c * 1.001) == ["layernorms.scale_mean"]
    assert changed("layernorms", "scale_mean", lambda c: c * 1.00001) == []
    assert changed("layernorms", "state", lambda c: "centred") == ["layernorms.state"]
    assert changed("heads", "entropy_ratio", lambda c: c.mask(c.index == 20)) == ["heads.entropy_ratio"]
    assert changed("heads", "undecided", lambda c: c + (c.index == 3)) == ["heads.undecided"]
    assert changed("keys", "verdict", lambda c: c.where(c.index != 9, "unselectable")) == ["keys.verdict"]
    assert changed("keys", "margin_upper", lambda c: c * 0.5) == ["keys"]
    assert changed("keys", "attainable", lambda c: c - 0.1) == ["keys.attainable"]


@pytest.mark.skipif(not has_hooked_transformer(), reason="this TransformerLens has one world")
@pytest.mark.slow
def test_capp_gpt_in_both_worlds(capp: Path) -> None:
    tokens = torch.randint(0, 53, (2, 96), generator=torch.Generator().manual_seed(0))
    assert_real_checkpoint_agrees(capp, tokens, sites=9)


@pytest.mark.slow
@pytest.mark.skipif(not has_hooked_transformer(), reason="this TransformerLens has one world")
def test_mgm_in_both_worlds(mgm: Path) -> None:
    tokens = torch.randint(4, 9669, (1, 128), generator=torch.Generator().manual_seed(0))
    tokens[:, 0] = 2
    assert_real_checkpoint_agrees(mgm, tokens, sites=17, allow_pickle=True)


@pytest.mark.slow
@pytest.mark.skipif(not has_hooked_transformer(), reason="this TransformerLens has one world")
def test_smollm2_in_both_worlds(smollm2: Path) -> None:
    """RMSNorm, grouped queries, rotary keys, and a sink whose sigma is a hundred times the rest."""
    tokens = torch.randint(20, 40_000, (1, 48), generator=torch.Generator().manual_seed(0))
    probes = ("decomposition", "selectability", "uniformity")
    assert_real_checkpoint_agrees(smollm2, tokens, sites=6, layers=[0, 15, 29], probes=probes)


def assert_real_checkpoint_agrees(
    path: Path, tokens: torch.Tensor, sites: int, *, allow_pickle: bool = False, **how: Any
) -> None:
    reports = []
    for world in worlds():
        model = ln_probe.load_model(path, world=world, allow_pickle=allow_pickle, device="cpu")
        reports.append(ln_probe.analyze(model, tokens, progress=False, keys="all", **how))
        del model
    for report in reports:
        assert report.layernorms["reconstruction_error"].max() < 1e-5
        assert len(report.layernorms) == sites
        assert report.heads["undecided"].sum() == 0
    assert_same_findings(*({t: getattr(r, t) for t in TABLES} for r in reports), 1e-4)
