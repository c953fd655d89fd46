"""The approximation experiment: the model against its definition, targets by hand, least squares checked twice."""

from __future__ import annotations

from pathlib import Path

import mpmath
import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lab_runs import by_definition, ran

from ln_probe.analyses.lab.approximation import approximation
from ln_probe.analyses.lab.approximation.approximation_targets import (
    KERNELS,
    LENGTH,
    NORM_ORDERS,
    SLOPE_RANGE,
    RelativeConfig,
    RelativeTransformer,
    design,
    evaluate,
    extended_solution,
    fit,
    lag_features,
    lag_weights,
    linear_optimum,
    table_optimum,
    variance,
)
from ln_probe.analyses.lab.experiments import Request, claim, run
from ln_probe.analyses.lab.norms import NORM_KINDS, calibrate
from ln_probe.analyses.lab.train import TrainConfig, train_all


def random_inputs(size: int, length: int = LENGTH, seed: int = 0) -> torch.Tensor:
    return 2.0 * torch.randint(2, (size, length), generator=torch.Generator().manual_seed(seed)).double() - 1


@settings(max_examples=40, deadline=None)
@given(
    kernel=st.sampled_from(KERNELS),
    dot_product=st.booleans(),
    norm=st.sampled_from(NORM_KINDS),
    order=st.sampled_from(NORM_ORDERS),
    heads=st.integers(1, 4),
    width=st.integers(0, 5),
    seed=st.integers(0, 99),
)
def test_the_model_is_its_definition(
    kernel: str, dot_product: bool, norm: str, order: str, heads: int, width: int, seed: int
) -> None:
    torch.manual_seed(seed)
    model = RelativeConfig(20, heads, width, kernel, dot_product, norm, order).build().double()
    if kernel == "table":
        torch.nn.init.normal_(model.bias)
    x = random_inputs(6, 20, seed)
    with calibrate(model):
        model(x)
    torch.testing.assert_close(model(x), by_definition(model, x), rtol=1e-10, atol=1e-10)


def test_every_parameter_gets_a_gradient() -> None:
    for kernel in KERNELS:
        torch.manual_seed(0)  # with four hidden units, a draw can leave all of them dead
        model = RelativeConfig(20, 2, 4, kernel, dot_product=True).build()
        model(random_inputs(8, 20).float()).pow(2).sum().backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None, name
            assert bool(parameter.grad.isfinite().all()), name
            assert float(parameter.grad.abs().sum()) > 0, name


def test_targets_by_hand() -> None:
    x = random_inputs(3)
    s = np.arange(1, LENGTH + 1)
    rows = x.numpy()
    with np.errstate(divide="ignore"):
        power = np.where(s < 1000, (1000.0 - s) ** -0.5, 0)
    np.testing.assert_allclose(evaluate("4a", x), rows @ power, atol=1e-12)
    np.testing.assert_allclose(evaluate("4b", x), rows @ np.exp(-5.0 * (1000 - s)), atol=1e-12)
    np.testing.assert_allclose(evaluate("2b", x), rows[:, 47] + rows[:, 55] + rows[:, 98], atol=1e-12)
    only = x.clone()
    only[:, 98] *= -1
    assert not torch.equal(evaluate("2a", x), evaluate("2a", only))
    only[:, 98] *= -1
    only[:, 99] *= -1
    for target in ("1b", "2a", "2b"):
        assert torch.equal(evaluate(target, x), evaluate(target, only))


@pytest.mark.parametrize("target", ["1b", "2a", "2b", "4a", "4b"])
def test_variance_is_that_of_samples(target: str) -> None:
    sampled = evaluate(target, random_inputs(4000)).numpy()
    assert sampled.var() == pytest.approx(variance(target), rel=0.1)  # 4.5 standard deviations of 4000 samples


def exact_error(target: str, kernel: str, slopes: tuple[float, ...]) -> mpmath.mpf:
    """Least squares by normal equations in 60 digits, sharing nothing with the numpy code."""
    with mpmath.workdps(60):
        lags = range(LENGTH)
        wanted = {
            "4a": [mpmath.mpf(0), *(mpmath.mpf(z) ** mpmath.mpf(-0.5) for z in range(1, LENGTH))],
            "4b": [mpmath.exp(-5 * z) for z in lags],
            "2b": [mpmath.mpf(1) if LENGTH - z in (48, 56, 99) else mpmath.mpf(0) for z in lags],
        }[target]
        columns = [[mpmath.mpf(1)] + [mpmath.mpf(0)] * (LENGTH - 1)]
        for p in slopes:
            raw = (
                [mpmath.exp(-p * z) for z in lags]
                if kernel == "linear"
                else ([mpmath.mpf(0), *(mpmath.mpf(z) ** -mpmath.mpf(p) for z in range(1, LENGTH))])
            )
            total = mpmath.fsum(raw)
            columns.append([x / total for x in raw])
        gram = mpmath.matrix([[mpmath.fdot(a, b) for b in columns] for a in columns])
        right = mpmath.matrix([mpmath.fdot(a, wanted) for a in columns])
        return mpmath.fdot(wanted, wanted) - mpmath.fdot(list(mpmath.lu_solve(gram, right)), list(right))


def test_extended_precision_where_float64_no_longer_solves_it() -> None:
    """Two slopes 1e-9 apart: dependent to float64, and the best coefficients are huge; small ones leave more."""
    slopes = (0.5, 0.5 + 1e-9, 0.02)
    found = fit("4a", "linear", slopes)
    held, solved = (extended_solution("4a", "linear", slopes, some) for some in (found.coefficients, None))
    assert held.mse == pytest.approx(found.mse, rel=1e-6)
    assert solved.mse < held.mse
    assert solved.mse == pytest.approx(float(exact_error("4a", "linear", slopes)), rel=1e-7)
    assert solved.largest > 1e6 > max(map(abs, found.coefficients[2:]))


@pytest.mark.parametrize(("target", "kernel", "heads"), [
    ("4a", "linear", 1), ("4a", "linear", 2), ("4a", "linear", 4), ("4b", "log", 1), ("2b", "log", 1),
    ("2b", "linear", 1),
])  # fmt: skip
def test_least_squares_in_sixty_digits(target: str, kernel: str, heads: int) -> None:
    found = linear_optimum(target, kernel, heads)
    assert found.mse == pytest.approx(float(exact_error(target, kernel, found.slopes)), rel=1e-7)


def test_known_optima() -> None:
    # 4a is one logarithmic head of slope 1/2, 4b one linear head of slope 5: exact, to rounding.
    assert linear_optimum("4a", "log", 1).mse < 1e-25
    assert linear_optimum("4a", "log", 1).slopes == pytest.approx((0.5,))
    assert linear_optimum("4b", "linear", 1).mse < 1e-25
    assert linear_optimum("4b", "linear", 1).slopes == pytest.approx((5.0,))
    # What was reported as a failure can be expressed: sixteen exponentials fit a power law, one log head 4b.
    assert linear_optimum("4a", "linear", 16).mse < 2e-10
    assert linear_optimum("4b", "log", 1).mse < 6e-11
    # Three far positions cannot be reached by a slope, however many heads.
    for kernel in ("log", "linear"):
        assert 2.7 < linear_optimum("2b", kernel, 64).mse < 3.0


@settings(max_examples=30, deadline=None)
@given(data=st.data(), target=st.sampled_from(["4a", "4b", "2b"]), kernel=st.sampled_from(sorted(SLOPE_RANGE)))
def test_no_slopes_beat_the_optimum(data: st.DataObject, target: str, kernel: str) -> None:
    low, high = np.log(SLOPE_RANGE[kernel])
    heads = data.draw(st.integers(1, 2))
    slopes = np.exp(data.draw(st.lists(st.floats(low, high), min_size=heads, max_size=heads)))
    # Where the optimum is 0 to rounding, nothing can lie below it.
    assert fit(target, kernel, slopes).mse >= linear_optimum(target, kernel, heads).mse * (1 - 1e-6) - 1e-25


def test_t5s_positions_are_linear_then_logarithmic_then_constant() -> None:
    phi = lag_features("t5", 400)
    assert phi[:17].tolist() == [-float(z) for z in range(17)]
    steps = phi[16:128].diff() * torch.arange(16.5, 127.5)  # -16 log(z) / log 8 has the slope -16 / (z log 8)
    torch.testing.assert_close(steps, torch.full_like(steps, -16 / np.log(8)), rtol=1e-3, atol=0)
    assert phi[128:].tolist() == pytest.approx([-32.0] * 272)  # T5 has 32 buckets


def test_attention_columns_are_attention() -> None:
    for kernel in ("log", "linear", "t5"):
        columns = design(kernel, [0.3, 2.0])
        np.testing.assert_allclose(columns.sum(0), 1)
        torch.manual_seed(0)
        model = RelativeConfig(LENGTH, 2, 0, kernel).build().double()
        with torch.no_grad():
            model.log_slope.copy_(torch.tensor([0.3, 2.0]).log())
        np.testing.assert_allclose(columns[:, :2], model.lag_bias().softmax(-1).detach().numpy().T, atol=1e-7)


@pytest.mark.parametrize(("target", "kernel", "heads"), [("4a", "log", 1), ("4a", "linear", 4), ("4b", "log", 1)])
def test_the_optimum_is_the_models_own(target: str, kernel: str, heads: int) -> None:
    """Slopes and coefficients of the optimum, put into the model as weights, have its error."""
    found = linear_optimum(target, kernel, heads)
    model = by_hand(kernel, found.slopes, found.coefficients)
    with torch.no_grad():
        x = random_inputs(3000)
        error = float((model(x) - evaluate(target, x)).pow(2).mean())
    assert error == pytest.approx(found.mse, rel=0.15, abs=1e-20)


def by_hand(kernel: str, slopes: tuple[float, ...], coefficients: tuple[float, ...]) -> RelativeTransformer:
    model = RelativeConfig(LENGTH, len(slopes), 0, kernel).build().double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.phi = lag_features(kernel, LENGTH)  # in float64
        model.embed[0, 0], model.embed[1, 0] = -1.0, 1.0
        model.log_slope.copy_(torch.tensor(slopes, dtype=torch.float64).log())
        model.W_V[:, 0, 0] = 1.0
        model.W_O[:, 0, 1] = torch.tensor(coefficients[:-1], dtype=torch.float64)
        model.out.weight[0, 0], model.out.weight[0, 1] = coefficients[-1], 1.0
    return model


def test_table_optima() -> None:
    assert table_optimum("2b", 1, 1) == 0
    assert table_optimum("2a", 1, 1) < 1e-25
    for heads, relus in ((1, 6), (3, 3)):  # as many as it takes, and one fewer
        assert table_optimum("1b", heads, relus) < 1e-25
        assert table_optimum("1b", heads, relus - 1) > 1e-6
    assert table_optimum("1b", 1, 2) < table_optimum("1b", 1, 1) < variance("1b")


@pytest.mark.parametrize(("call", "said"), [
    (lambda: evaluate("9z", random_inputs(1)), "unknown target '9z': known ones are 1b, 2a, 2b, 4a, 4b"),
    (lambda: evaluate("4a", random_inputs(1, 10)), "inputs must have 1000 positions, got 10"),
    (lambda: linear_optimum("1b", "log", 1), "target '1b' is not linear"),
    (lambda: linear_optimum("4a", "table", 1), "kernel 'table' has no slopes to search over: known are log, linear"),
    (lambda: linear_optimum("4a", "log", 0), "heads must be at least 1, got 0"),
    (lambda: RelativeConfig(1000, 0, 1, "log"), "heads must be at least 1, got 0"),
    (lambda: RelativeConfig(1000, 1, 1, "cubic"), "unknown kernel 'cubic': known are log, linear, t5, table"),
    (lambda: RelativeConfig(1000, 1, 1, "log", norm="batch"), "unknown norm 'batch'"),
])  # fmt: skip
def test_bad_input(call: object, said: str) -> None:
    assert callable(call)
    with pytest.raises(ValueError, match=said):
        call()


def test_the_grid_has_what_must_be_shown() -> None:
    cells = approximation.grid(quick=False)
    assert len(cells) == len(set(cells))
    shown = {(c.target, c.kernel, c.heads) for c in cells if c.norm == "none"}
    assert {(t, k, h) for t in ("4a", "4b") for k in ("log", "linear") for h in (1, 4, 16, 64)} <= shown
    assert {c.width for c in cells if c.target == "1b"} >= {4, 32, 256}
    assert {c.norm for c in cells} == set(NORM_KINDS)
    for cell in cells:
        if cell.norm_order == "post":
            assert np.isnan(cell.optima()).all()
    assert lag_weights("1b") is None


def test_a_run_from_end_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cells = [approximation.Cell("4a", kernel, 1) for kernel in ("log", "linear")]
    cells += [approximation.Cell("4b", kernel, 1, approximation.FFN_FREE) for kernel in ("log", "linear")]
    cells += [approximation.Cell("4a", "log", 1, norm="layernorm", norm_order="post")]
    monkeypatch.setattr(approximation, "grid", lambda quick: tuple(cells))
    monkeypatch.setattr(
        approximation, "training", lambda quick, seed, lr: TrainConfig(steps=3, batch=4, lr=lr, seed=seed)
    )
    results = ran("approximation", out := tmp_path / "approximation")
    table = results.summary.set_index(["target", "kernel", "norm", "measure"])
    assert table.loc[("4a", "linear", "none", "mse"), "optimum"] == pytest.approx(1.8683739662, rel=5e-6)
    relative = table.loc[("4a", "linear", "none", "relative_mse"), "optimum"]
    assert relative == pytest.approx(1.8683739662 / variance("4a"), rel=5e-6)
    assert table.loc[("4b", "linear", "none", "mse"), "published"] == 1e-7
    assert table["evaluated_on"].unstack("measure").loc["4b"].to_numpy().tolist() == [[approximation.EXACT] * 2] * 2
    normed_or_wide = results.summary[results.summary["target"] == "4a"]
    assert set(normed_or_wide["evaluated_on"]) == {approximation.EVALUATION_INPUTS}
    assert np.isnan(table.loc[("4a", "log", "none", "mse"), "published"]), "published without an FFN"
    assert np.isnan(table.loc[("4a", "log", "layernorm", "mse"), "optimum"])
    assert any("layernorm in post-norm order" in sentence for sentence in results.conclusions)
    errors = results.tables["errors"]
    errors = errors[(errors["target"] == "4a") & (errors["kernel"] == "log") & (errors["measure"] == "mse")]
    plain, normed = (errors[errors["norm"] == norm].sort_values("seed")["value"] for norm in ("none", "layernorm"))
    ratios = normed.to_numpy() / plain.to_numpy()
    assert results.tables["norm_factors"]["factor"].tolist() == pytest.approx([np.sqrt(ratios.prod())])
    assert {"heads.png", "norm_factors.csv"} <= {p.name for p in out.iterdir()}
    pd.testing.assert_frame_equal(ran("approximation", out, collect=True).summary, results.summary)


@pytest.mark.slow
def test_what_there_is_is_collected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    request = Request(out=tmp_path / "approximation", seeds=(0,), collect=True)
    with pytest.raises(ValueError, match=r"holds none of these 134 runs: leave out --collect"):
        run("approximation", request, command="", ln_probe_version="0")
    monkeypatch.setattr(
        approximation, "training", lambda quick, seed, lr: TrainConfig(steps=1, batch=2, seed=seed, lr=lr)
    )
    claim("approximation", request)  # as the machines that trained these runs did
    runs = approximation.make_runs(request)
    for part in ([r for r in runs if r.keys["target"] == "1b"][:4], [runs[0]], [runs[40]]):
        train_all(part, progress=False)
        results = run("approximation", request, command="", ln_probe_version="0")
    assert len(results.summary) == 2 * 6
    assert sorted(results.figures) == ["heads", "table"]


@pytest.mark.slow
def test_quick_separates_optimization_from_expressivity(tmp_path: Path) -> None:
    table = ran("approximation", tmp_path / "approximation", (0,)).summary
    table = table.set_index([*approximation.KEYS, "measure"])["mean"]
    assert table.loc[("4a", "linear", 16, 32, False, "none", "pre", 1e-2, "mse")] < 0.19
    assert table.loc[("2b", "table", 4, 32, False, "none", "pre", 1e-2, "mse")] < 1e-3
