"""Rates of approximation, the dot product's factor, and relative positions on inputs longer than fitted to."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from lab_runs import ran

from ln_probe.analyses.lab.approximation import longer_inputs
from ln_probe.analyses.lab.approximation.approximation import EXACT, ApproximationTask, optimum_table
from ln_probe.analyses.lab.approximation.approximation_targets import (
    LENGTH,
    T5_LARGEST,
    RelativeConfig,
    affine,
    error,
    lag_features,
    lag_weights,
    linear_optimum,
    sampling_error,
    variance,
)
from ln_probe.analyses.lab.approximation.longer_inputs import Cell, solved_errors
from ln_probe.analyses.lab.approximation.rates import (
    APART,
    FOLLOWS,
    LAID_OUT,
    NO_RATE,
    SEARCHED_FOR,
    attainable_laws,
    constant_tail_floor,
    dot_product_factors,
    product_sentences,
    sentences,
    trained_exponents,
)
from ln_probe.analyses.lab.results import folder, table_at
from ln_probe.analyses.lab.train import TrainConfig

PLAIN = {"target": "4a", "kernel": "linear", "width": 0, "lr": 0.01, "norm": "none", "norm_order": "pre"}


def errors(values: dict[tuple[int, int], float], dot_product: bool = False, **about: object) -> pd.DataFrame:
    rows = [{**PLAIN, "heads": h, "seed": s, "value": v} | about for (h, s), v in values.items()]
    return pd.DataFrame(rows).assign(measure="mse", dot_product=dot_product)


def test_trained_exponents_by_hand() -> None:
    slopes = {0: 1.0, 1: 2.0, 2: 3.0}
    table = errors({(h, s): 5.0 * h**-a for s, a in slopes.items() for h in (1, 4, 16, 64)})
    two = errors({(h, s): 1.0 / h for s in slopes for h in (1, 4)}, target="4b")  # a line through two points is no fit
    found = trained_exponents(pd.concat([table, two, table.assign(norm="layernorm")]))
    row = found.iloc[0]
    assert len(found) == 1
    half = 4.302652729911275 * 1.0 / np.sqrt(3)  # Student's t with 2 degrees of freedom, 97.5 %
    assert row[["mean", "ci_low", "ci_high"]].tolist() == pytest.approx([2, 2 - half, 2 + half])
    assert row["heads"] == "1, 4, 16, 64"
    assert row["residual"] == pytest.approx(0, abs=1e-12)


def optima(target: str, kernel: str, relative: dict[int, float], found: str = SEARCHED_FOR) -> pd.DataFrame:
    limit = constant_tail_floor(target) if kernel == "t5" else 0.0
    rows = [(target, kernel, h, found, e * variance(target), e * variance(target) - limit) for h, e in relative.items()]
    return pd.DataFrame(rows, columns=["target", "kernel", "heads", "found", "mse_extended", "excess"])


@pytest.mark.parametrize(("law", "of"), [
    ("H^-c", lambda h: h**-3.0), ("exp(-c sqrt H)", lambda h: np.exp(-3 * h**0.5)),
    ("exp(-c H)", lambda h: np.exp(-3.0 * h)),
])  # fmt: skip
def test_laws_are_told_apart(law: str, of: object) -> None:
    assert callable(of)
    heads = (1, 2, 4, 8, 16)
    wobble = dict(zip(heads, (1.02, 0.98, 1.01, 0.99, 1.0), strict=True))
    row = attainable_laws(optima("4a", "linear", {h: float(of(float(h))) * wobble[h] for h in heads})).iloc[0]
    assert row["law"] == law
    assert row["c_low"] < 3 < row["c_high"]
    assert (row["points"], row["heads"], row["told"]) == (5, "1, 2, 4, 8, 16", True)
    assert row["residual"] < row["residual_second"] / APART


def test_a_law_is_laid_through_points_of_one_kind() -> None:
    """Searched slopes fall by one law and laid-out ones by another: no line goes through both."""
    searched = optima("4a", "linear", {h: 10.0**-h for h in (1, 2, 4)})
    laid_out = optima("4a", "linear", {h: 1e-4 * 10.0 ** (-h / 2) for h in (8, 16, 32, 64)}, LAID_OUT)
    found = attainable_laws(pd.concat([searched, laid_out])).set_index("found")
    assert found["heads"].tolist() == ["1, 2, 4", "8, 16, 32, 64"]
    assert found["c"].tolist() == pytest.approx([np.log(10), np.log(10) / 2])
    assert found["told"].tolist() == [False, True], "three points tell nothing, however near"
    near = attainable_laws(optima("4a", "t5", {8: 0.15, 16: 0.1, 32: 0.06, 64: 0.04}, LAID_OUT)).iloc[0]
    assert near["residual"] < FOLLOWS
    assert not near["told"], "another law lies as near"


def test_what_follows_no_law() -> None:
    worse = {1: 1e-3, 2: 1e-5, 4: 1e-4, 8: 1e-7, 16: 1e-9, 32: 1e-30}  # at 4 heads worse than at 2, at 32 rounded away
    assert attainable_laws(optima("4a", "linear", worse)).iloc[0]["points"] == 4
    stalls = attainable_laws(optima("2b", "log", {1: 0.99, 4: 0.98, 16: 0.97}))
    solved = optima("4b", "linear", {1: 1e-34, 4: 1e-32})
    beyond = optima("4b", "linear", {8: 1e-19, 16: 1e-40, 32: 1e-60, 64: 1e-80}, LAID_OUT)
    exact = attainable_laws(pd.concat([solved, beyond]))
    assert stalls["law"].tolist() == [NO_RATE]
    assert exact["law"].tolist() == [NO_RATE] * 2, "beyond a solution that is exact nothing is better"
    nothing = trained_exponents(errors({(1, 0): 1.0}))
    said = list(sentences(nothing, pd.concat([stalls, exact])))
    assert said[0] == (
        "Attainable rate, 2b, log positions: slopes searched, H = 1, 4, 16: no rate, for the error stalls (0.99 to "
        "0.97 of the best constant's)."
    )
    assert said[1] == "Attainable rate, 4b, linear positions: one head is exact to rounding: no rate to fit."
    assert said[2] == "Trained rates: exponents that differ from 0 after Holm's adjustment: 0 of 0."
    noise = {1: 1e-2, 2: 1e-8, 4: 9e-9, 8: 8e-9}
    (near, _) = sentences(nothing, attainable_laws(optima("4a", "linear", noise)))
    assert "these points tell no law (nearest is" in near


@pytest.mark.parametrize("target", ["4a", "4b", "2b"])
def test_t5s_limit(target: str) -> None:
    """Least squares with every lag below 128 free and one column for all others; no kept optimum lies below."""
    columns = np.zeros((LENGTH, T5_LARGEST + 1))
    columns[:T5_LARGEST, :T5_LARGEST] = np.eye(T5_LARGEST)
    columns[T5_LARGEST:, -1] = 1
    weights = lag_weights(target)
    assert weights is not None
    left = weights - columns @ np.linalg.lstsq(columns, weights, rcond=None)[0]
    limit = constant_tail_floor(target)
    assert limit == pytest.approx(float(left @ left), rel=1e-9, abs=1e-25)
    kept = pd.read_csv(folder("approximation") / "optima.csv")
    kept = kept[(kept["target"] == target) & (kept["kernel"] == "t5")]
    assert (kept["mse"] >= limit * (1 - 1e-5)).all()  # six digits are kept
    assert (kept["excess"] > 0).all(), "in extended precision the limit is never crossed"
    assert kept["mse"].min() == pytest.approx(limit, rel=0.03, abs=1e-20)
    with pytest.raises(ValueError, match="target '1b' is not linear: it has no weight per lag"):
        constant_tail_floor("1b")


def test_the_dot_products_factor() -> None:
    ratios = {0: 2.0, 1: 8.0}
    without = errors({(4, s): 1e-3 for s in ratios}, target="1b", width=32)
    table = pd.concat([without, errors({(4, s): 1e-3 * r for s, r in ratios.items()}, True, target="1b", width=32)])
    found = dot_product_factors(table)
    assert found["factor"].tolist() == pytest.approx([4.0])
    half = 12.706204736432095 * np.log(2)  # Student's t with 1 degree of freedom; sd sqrt 2 log 2, over sqrt 2
    assert found["low"].tolist() == pytest.approx([4 * np.exp(-half)])
    (said,) = product_sentences(found)
    assert said.startswith("3a, dot product on 1b, linear, 4 heads, FFN of 32: 4 [")
    assert said.endswith("times the error without it (2 seeds): not significant after Holm's correction.")


@pytest.mark.parametrize("kernel", longer_inputs.KERNELS)
def test_a_model_is_affine_on_inputs_of_any_length(kernel: str) -> None:
    torch.manual_seed(1)
    for length in (LENGTH, 1700):
        model = RelativeConfig(length, 3, 0, kernel).build().double()
        model.phi = lag_features(kernel, length)
        with torch.no_grad():
            model.out.bias.fill_(0.3)
            x = 2.0 * torch.randint(2, (20, length)).double() - 1
            constant, weights = affine(replace_length(model), length)
            said = constant + x.flip(1).numpy() @ weights
            np.testing.assert_allclose(said, model(x).numpy(), atol=1e-11)


def replace_length(model: torch.nn.Module) -> torch.nn.Module:
    """The same weights in a model for LENGTH inputs."""
    other = replace(model.cfg, length=LENGTH).build().double()
    other.load_state_dict({k: v for k, v in model.state_dict().items() if k != "phi"}, strict=False)
    return other


def test_solved_errors_by_formula() -> None:
    table = solved_errors([Cell("4a", "log", 1), Cell("4b", "linear", 1), Cell("4a", "linear", 1)])
    table = table.set_index(["target", "kernel", "measure", "length"])["value"].sort_index()
    whole = {n: (np.arange(1, n) ** -0.5).sum() for n in longer_inputs.LENGTHS}
    for n in (1250, 8000):  # the same shape, divided by a larger sum
        scaled = (1 - whole[LENGTH] / whole[n]) ** 2
        assert table["4a", "log", "relative_mse", n] == pytest.approx(scaled, rel=1e-6)
    assert table["4b", "linear", "mse"].max() < 1e-25
    assert table["4a", "linear", "mse", LENGTH] == pytest.approx(linear_optimum("4a", "linear", 1).mse)


@pytest.mark.parametrize(("call", "said"), [
    (lambda: affine(RelativeConfig(20, 1, 4, "log").build(), 30), "not affine in its inputs"),
    (lambda: affine(RelativeConfig(20, 1, 0, "log", dot_product=True).build(), 30), "not affine in its inputs"),
    (lambda: affine(RelativeConfig(20, 1, 0, "table").build(), 30), "a table of 20 positions says nothing of longer"),
    (lambda: error("2b", 0.0, np.zeros(2000)), "target '2b' has no longer inputs: known are 4a, 4b"),
])  # fmt: skip
def test_bad_input(call: object, said: str) -> None:
    assert callable(call)
    with pytest.raises(ValueError, match=said):
        call()


def test_a_run_from_end_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        longer_inputs, "training", lambda quick, seed: TrainConfig(2, 4, seed=seed, evaluate_every=2, state_every=2)
    )
    monkeypatch.setattr(longer_inputs, "grid", lambda quick: (Cell("4a", "t5", 1), Cell("4b", "log", 1)))
    results = ran("longer_inputs", out := tmp_path / "longer")
    assert len(results.summary) == 2 * 2 * len(longer_inputs.LENGTHS)
    table = results.tables["errors"]
    # the trainer measures such a model by the same sum
    metrics = pd.read_json(out / "runs" / "4a-t5-1-seed0" / "metrics.jsonl", lines=True)
    ours = table[(table["target"] == "4a") & (table["length"] == LENGTH) & (table["measure"] == "mse")]
    assert ours["value"].iloc[0] == pytest.approx(metrics["mse"].iloc[-1], rel=1e-5)
    assert metrics["evaluated_on"].iloc[-1] == EXACT
    assert len(results.conclusions) == 2
    assert (
        "4a, t5 positions, 1 head, error relative to the best constant: solved 0.064 at 1000 inputs and 0.51 at 4000"
        in (results.conclusions[0])
    )
    assert results.conclusions[0].endswith(", 2 seeds.")
    again = ran("longer_inputs", out)  # finished runs are read, not refused
    pd.testing.assert_frame_equal(again.summary, results.summary)


def test_what_is_kept_says_what_the_page_says() -> None:
    laws = table_at(folder("approximation"), "rates_attainable").set_index(["target", "kernel", "found"]).sort_index()
    assert laws.loc[("4a", "linear", LAID_OUT), "law"] == "exp(-c H)"
    assert (
        laws.loc[("4a", "linear", LAID_OUT), "residual"] < laws.loc[("4a", "linear", LAID_OUT), "residual_second"] / 4
    )
    assert set(laws.loc["2b", "law"]) == {NO_RATE}
    assert not laws.loc[("4a", "t5"), "told"].any(), "a power of H was told of searched and laid-out points in float64"
    kept = pd.read_csv(folder("approximation") / "optima.csv")
    assert kept["mse_extended"].notna().all(), "from 16 heads on no float64 error is quoted"
    assert (kept["mse_extended"] <= kept["mse"] * (1 + 1e-5) + 1e-30).all()
    summary = table_at(folder("approximation"), "summary")
    many = summary[(summary["kernel"] == "t5") & (summary["heads"] == 16) & (summary["measure"] == "mse")]
    assert many.set_index("target").loc["4a", "optimum"] == pytest.approx(0.16823, rel=1e-4)


def test_what_a_sample_of_a_squared_error_is_off_by() -> None:
    rng = np.random.default_rng(0)
    for left in (np.array([1.0, 0, 0]), np.array([1.0, 0.5, 0.1]), rng.normal(size=50)):
        sampled = ((rng.choice([-1.0, 1.0], (40_000, len(left))) @ left) ** 2).reshape(400, 100).mean(1) / (left @ left)
        assert sampling_error(left, 100) == pytest.approx(sampled.std(), rel=0.12, abs=1e-12)
    assert sampling_error(1e-200 * np.ones(1000), 4096) == pytest.approx(np.sqrt(2 / 4096), rel=1e-3)
    assert np.isnan(sampling_error(np.zeros(3), 100))


def test_errors_of_affine_models_are_not_sampled() -> None:
    torch.manual_seed(2)
    task = ApproximationTask("4a")
    model = RelativeConfig(LENGTH, 2, 0, "t5").build()
    with torch.no_grad():
        told = task.evaluate(model)
        sampled = float(task.loss(model, task.batch(0, 4096, 10_000)))
    assert told["evaluated_on"] == EXACT
    assert told["mse"] == pytest.approx(error("4a", *affine(model, LENGTH))[0])
    assert 1e-6 < abs(sampled / told["mse"] - 1) < 5 * np.sqrt(2 / 4096)
    for other in (RelativeConfig(LENGTH, 2, 4, "t5"), RelativeConfig(LENGTH, 2, 0, "table")):
        assert (
            ApproximationTask("2b" if other.kernel == "table" else "4a").evaluate(other.build())["evaluated_on"] == 4096
        )


def test_a_kept_optimum_says_how_it_was_found() -> None:
    found = optimum_table([("4a", "t5", 1), ("4a", "t5", 8)]).set_index("heads")
    kept = pd.read_csv(folder("approximation") / "optima.csv")
    kept = kept[(kept["target"] == "4a") & (kept["kernel"] == "t5")].set_index("heads")
    assert found["found"].tolist() == [SEARCHED_FOR, LAID_OUT]
    for column in ("mse_extended", "mse_sampled", "sampling_error"):
        assert found[column].tolist() == pytest.approx(kept.loc[[1, 8], column].tolist(), rel=1e-4)
    off = found["mse_sampled"] / found["mse_extended"] - 1
    assert (off.abs() < 4 * found["sampling_error"]).all()
    assert found.loc[1, "mse_sampled"] < 0.47 < found.loc[1, "mse_extended"], "below the optimum, by its sample alone"
