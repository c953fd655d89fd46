"""Relative positions: by definition, targets by hand, least squares twice, rates, on text, adaptive memory."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import mpmath
import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lab_runs import by_definition, ran

from ln_probe.analyses.lab.approximation import adaptive_memory, approximation, approximation_text, longer_inputs
from ln_probe.analyses.lab.approximation import approximation_targets as targets
from ln_probe.analyses.lab.approximation.approximation import EXACT, ApproximationTask
from ln_probe.analyses.lab.approximation.approximation_text import RelativeTextConfig
from ln_probe.analyses.lab.approximation.longer_inputs import Cell, solved_errors
from ln_probe.analyses.lab.approximation.rates import constant_tail_floor
from ln_probe.analyses.lab.experiments import Request, claim, run
from ln_probe.analyses.lab.norms import NORM_KINDS, calibrate
from ln_probe.analyses.lab.results import folder
from ln_probe.analyses.lab.train import TrainConfig, train_all


def random_inputs(size: int, length: int = targets.LENGTH, seed: int = 0) -> torch.Tensor:
    return 2.0 * torch.randint(2, (size, length), generator=torch.Generator().manual_seed(seed)).double() - 1


@settings(max_examples=40, deadline=None)
@given(
    kernel=st.sampled_from(targets.KERNELS),
    dot_product=st.booleans(),
    norm=st.sampled_from(NORM_KINDS),
    order=st.sampled_from(targets.NORM_ORDERS),
    heads=st.integers(1, 4),
    width=st.integers(0, 5),
    seed=st.integers(0, 99),
)
def test_the_model_is_its_definition(
    kernel: str, dot_product: bool, norm: str, order: str, heads: int, width: int, seed: int
) -> None:
    torch.manual_seed(seed)
    model = targets.RelativeConfig(20, heads, width, kernel, dot_product, norm, order).build().double()
    if kernel == "table":
        torch.nn.init.normal_(model.bias)
    x = random_inputs(6, 20, seed)
    with calibrate(model):
        model(x)
    torch.testing.assert_close(model(x), by_definition(model, x), rtol=1e-10, atol=1e-10)


def test_targets_by_hand() -> None:
    x = random_inputs(3)
    s = np.arange(1, targets.LENGTH + 1)
    rows = x.numpy()
    with np.errstate(divide="ignore"):
        power = np.where(s < 1000, (1000.0 - s) ** -0.5, 0)
    np.testing.assert_allclose(targets.evaluate("4a", x), rows @ power, atol=1e-12)
    np.testing.assert_allclose(targets.evaluate("4b", x), rows @ np.exp(-5.0 * (1000 - s)), atol=1e-12)
    np.testing.assert_allclose(targets.evaluate("2b", x), rows[:, 47] + rows[:, 55] + rows[:, 98], atol=1e-12)
    only = x.clone()
    only[:, 98] *= -1
    assert not torch.equal(targets.evaluate("2a", x), targets.evaluate("2a", only))
    only[:, 98] *= -1
    only[:, 99] *= -1
    for target in ("1b", "2a", "2b"):
        assert torch.equal(targets.evaluate(target, x), targets.evaluate(target, only))


@pytest.mark.parametrize("target", ["1b", "2a", "2b", "4a", "4b"])
def test_variance_is_that_of_samples(target: str) -> None:
    sampled = targets.evaluate(target, random_inputs(4000)).numpy()
    assert sampled.var() == pytest.approx(targets.variance(target), rel=0.1)  # 4.5 standard deviations of 4000 samples


def exact_error(target: str, kernel: str, slopes: tuple[float, ...]) -> mpmath.mpf:
    """Least squares by normal equations in 60 digits, sharing nothing with the numpy code."""
    with mpmath.workdps(60):
        lags = range(targets.LENGTH)
        wanted = {
            "4a": [mpmath.mpf(0), *(mpmath.mpf(z) ** mpmath.mpf(-0.5) for z in range(1, targets.LENGTH))],
            "4b": [mpmath.exp(-5 * z) for z in lags],
            "2b": [mpmath.mpf(1) if targets.LENGTH - z in (48, 56, 99) else mpmath.mpf(0) for z in lags],
        }[target]
        columns = [[mpmath.mpf(1)] + [mpmath.mpf(0)] * (targets.LENGTH - 1)]
        for p in slopes:
            raw = (
                [mpmath.exp(-p * z) for z in lags]
                if kernel == "linear"
                else ([mpmath.mpf(0), *(mpmath.mpf(z) ** -mpmath.mpf(p) for z in range(1, targets.LENGTH))])
            )
            total = mpmath.fsum(raw)
            columns.append([x / total for x in raw])
        gram = mpmath.matrix([[mpmath.fdot(a, b) for b in columns] for a in columns])
        right = mpmath.matrix([mpmath.fdot(a, wanted) for a in columns])
        return mpmath.fdot(wanted, wanted) - mpmath.fdot(list(mpmath.lu_solve(gram, right)), list(right))


def test_extended_precision_where_float64_no_longer_solves_it() -> None:
    """Two slopes 1e-9 apart: dependent to float64, and the best coefficients are huge; small ones leave more."""
    slopes = (0.5, 0.5 + 1e-9, 0.02)
    found = targets.fit("4a", "linear", slopes)
    held, solved = (targets.extended_solution("4a", "linear", slopes, some) for some in (found.coefficients, None))
    assert held.mse == pytest.approx(found.mse, rel=1e-6)
    assert solved.mse < held.mse
    assert solved.mse == pytest.approx(float(exact_error("4a", "linear", slopes)), rel=1e-7)
    assert solved.largest > 1e6 > max(map(abs, found.coefficients[2:]))


@pytest.mark.parametrize(("target", "kernel", "heads"), [
    ("4a", "linear", 2), ("4b", "log", 1), ("2b", "linear", 1),
])  # fmt: skip
def test_least_squares_in_sixty_digits(target: str, kernel: str, heads: int) -> None:
    found = targets.linear_optimum(target, kernel, heads)
    assert found.mse == pytest.approx(float(exact_error(target, kernel, found.slopes)), rel=1e-7)


def test_t5s_positions_are_linear_then_logarithmic_then_constant() -> None:
    phi = targets.lag_features("t5", 400)
    assert phi[:17].tolist() == [-float(z) for z in range(17)]
    steps = phi[16:128].diff() * torch.arange(16.5, 127.5)  # -16 log(z) / log 8 has the slope -16 / (z log 8)
    torch.testing.assert_close(steps, torch.full_like(steps, -16 / np.log(8)), rtol=1e-3, atol=0)
    assert phi[128:].tolist() == pytest.approx([-32.0] * 272)  # T5 has 32 buckets


def test_the_optimum_is_the_models_own() -> None:
    """Slopes and coefficients of the optimum, put into the model as weights, have its error."""
    found = targets.linear_optimum("4a", "linear", 4)
    model = targets.RelativeConfig(targets.LENGTH, 4, 0, "linear").build().double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.phi = targets.lag_features("linear", targets.LENGTH)  # in float64
        model.embed[0, 0], model.embed[1, 0] = -1.0, 1.0
        model.log_slope.copy_(torch.tensor(found.slopes, dtype=torch.float64).log())
        model.W_V[:, 0, 0] = 1.0
        model.W_O[:, 0, 1] = torch.tensor(found.coefficients[:-1], dtype=torch.float64)
        model.out.weight[0, 0], model.out.weight[0, 1] = found.coefficients[-1], 1.0
        x = random_inputs(3000)
        error = float((model(x) - targets.evaluate("4a", x)).pow(2).mean())
    assert error == pytest.approx(found.mse, rel=0.15, abs=1e-20)


def test_table_optima() -> None:
    assert targets.table_optimum("2b", 1, 1) == 0
    assert targets.table_optimum("2a", 1, 1) < 1e-25
    for heads, relus in ((1, 6), (3, 3)):  # as many as it takes, and one fewer
        assert targets.table_optimum("1b", heads, relus) < 1e-25
        assert targets.table_optimum("1b", heads, relus - 1) > 1e-6
    assert targets.table_optimum("1b", 1, 2) < targets.table_optimum("1b", 1, 1) < targets.variance("1b")


@pytest.mark.parametrize(("call", "said"), [
    (lambda: targets.evaluate("9z", random_inputs(1)), "unknown target '9z': known ones are 1b, 2a, 2b, 4a, 4b"),
    (lambda: targets.evaluate("4a", random_inputs(1, 10)), "inputs must have 1000 positions, got 10"),
    (lambda: targets.linear_optimum("1b", "log", 1), "target '1b' is not linear"),
    (lambda: targets.linear_optimum("4a", "table", 1), "kernel 'table' has no slopes to search over: known are log"),
    (lambda: targets.linear_optimum("4a", "log", 0), "heads must be at least 1, got 0"),
    (lambda: targets.RelativeConfig(1000, 0, 1, "log"), "heads must be at least 1, got 0"),
    (lambda: targets.RelativeConfig(1000, 1, 1, "cubic"), "unknown kernel 'cubic': known are log, linear, t5, table"),
    (lambda: targets.RelativeConfig(1000, 1, 1, "log", norm="batch"), "unknown norm 'batch'"),
])  # fmt: skip
def test_bad_input(call: object, said: str) -> None:
    assert callable(call)
    with pytest.raises(ValueError, match=said):
        call()


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
    assert table.loc[("4b", "linear", "none", "mse"), "published"] == 1e-7
    assert table["evaluated_on"].unstack("measure").loc["4b"].to_numpy().tolist() == [[approximation.EXACT] * 2] * 2
    normed_or_wide = results.summary[results.summary["target"] == "4a"]
    assert set(normed_or_wide["evaluated_on"]) == {approximation.EVALUATION_INPUTS}
    assert np.isnan(table.loc[("4a", "log", "none", "mse"), "published"]), "published without an FFN"
    assert np.isnan(table.loc[("4a", "log", "layernorm", "mse"), "optimum"])

    assert {"heads.png", "norm_factors.csv"} <= {p.name for p in out.iterdir()}
    pd.testing.assert_frame_equal(ran("approximation", out, collect=True).summary, results.summary)


@pytest.mark.slow
def test_what_there_is_is_collected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    request = Request(out=tmp_path / "approximation", seeds=(0,), collect=True)
    with pytest.raises(ValueError, match=r"holds none of these 137 runs: leave out --collect"):
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


@pytest.mark.parametrize("dot_product", [True, False])
def test_attention_is_its_definition(dot_product: bool) -> None:
    torch.manual_seed(0)
    model = RelativeTextConfig(2, 4, 50, 12, d_model=16, dot_product=dot_product).build().double()
    attention = model.blocks[1].attn
    with torch.no_grad():
        attention.log_slope.normal_()
        if dot_product:
            attention.W_Q.normal_()
            attention.W_K.normal_()
    tokens = torch.randint(50, (3, 12))
    logits, cache = model.run_with_cache(tokens)
    torch.testing.assert_close(model(tokens), logits, rtol=1e-10, atol=1e-10)  # the fused path
    q, k = cache["blocks.1.attn.hook_q"], cache["blocks.1.attn.hook_k"]
    scores = torch.full((3, 4, 12, 12), -math.inf, dtype=torch.float64)
    for head in range(4):
        for t in range(12):
            for s in range(t + 1):
                dot = (q[:, t, head] * k[:, s, head]).sum(-1) / 2 if dot_product else 0.0
                scores[:, head, t, s] = dot - attention.log_slope[head].exp().item() * math.log(1 + t - s)
    torch.testing.assert_close(cache["blocks.1.attn.hook_pattern"], scores.softmax(-1), rtol=1e-9, atol=1e-12)
    trained = {name.rsplit(".", 1)[-1] for name, _ in model.named_parameters()}
    assert ({"W_Q", "W_K", "b_Q", "b_K"} & trained != set()) == dot_product


def test_a_run_on_text(prose: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(approximation_text, "D_VOCAB", 300)
    monkeypatch.setattr(approximation_text, "N_CTX", 16)
    monkeypatch.setattr(
        approximation_text,
        "training",
        lambda quick, seed: TrainConfig(steps=4, batch=2, seed=seed, evaluate_every=4, state_every=2),
    )
    results = ran("approximation_text", out := tmp_path / "out", texts=(prose,))
    assert len(results.summary) == len(approximation_text.grid(quick=True))
    assert (results.summary["seeds"] == 2).all()

    assert (out / "dot_product.csv").exists()


def test_the_target_reads_where_the_last_input_says() -> None:
    x = -torch.ones(4, 1000)
    x[0, [98, 999]] = x[1, 999] = x[2, 47] = 1.0
    assert adaptive_memory.adaptive(x).tolist() == [1.0, -1.0, 1.0, -1.0]
    with pytest.raises(ValueError, match="inputs must have 1000 positions, got 10"):
        adaptive_memory.adaptive(x[:, :10])


def test_models_without_ffn_and_dot_product_are_affine() -> None:
    torch.manual_seed(0)
    model = adaptive_memory.Cell(3, 0, False).spec().build().double()
    torch.nn.init.normal_(model.bias)
    x = random_inputs(64, seed=3)
    flipped = x.clone()
    flipped[:, [5, 98]] *= -1
    single = [x.clone() for _ in range(2)]
    single[0][:, 5] *= -1
    single[1][:, 98] *= -1
    both, one, other, none = (model(z) for z in (flipped, *single, x))
    torch.testing.assert_close(both - none, (one - none) + (other - none), rtol=0, atol=1e-12)


def test_the_bound_holds_on_what_is_measured_on() -> None:
    """The best affine function has exactly the bound's error on these inputs."""
    x = adaptive_memory.balanced()
    a, b = x[:, 98], x[:, 47]
    assert float(((a + b) / 2 - adaptive_memory.adaptive(x)).pow(2).mean()) == adaptive_memory.AFFINE
    assert float(x[:, [999, 98, 47]].sum()) == 0


def test_two_heads_with_the_dot_product_do_it_by_hand() -> None:
    model, x = adaptive_memory.by_hand(), random_inputs(4096, seed=3)
    with torch.no_grad():
        assert float((model(x) - adaptive_memory.adaptive(x)).pow(2).mean()) < 1e-10
        torch.testing.assert_close(model(x[:16]), by_definition(model, x[:16]), rtol=0, atol=1e-10)
        assert 1e-10 < float((adaptive_memory.by_hand(1e-2)(x) - adaptive_memory.adaptive(x)).pow(2).mean()) < 1e-2


def test_a_run_of_adaptive_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    short = adaptive_memory.training(True, 0)
    monkeypatch.setattr(
        adaptive_memory,
        "training",
        lambda quick, seed: type(short)(**(vars(short) | {"steps": 4, "evaluate_every": 4, "warmup": 1, "seed": seed})),
    )
    results = ran("adaptive_memory", tmp_path / "adaptive")
    assert len(results.summary) == 4
    assert adaptive_memory.AdaptiveTask().identity["places"] == (99, 48)


@pytest.mark.parametrize("target", ["4a", "4b", "2b"])
def test_t5s_limit(target: str) -> None:
    """Least squares with every lag below 128 free and one column for all others; no kept optimum lies below."""
    columns = np.zeros((targets.LENGTH, targets.T5_LARGEST + 1))
    columns[: targets.T5_LARGEST, : targets.T5_LARGEST] = np.eye(targets.T5_LARGEST)
    columns[targets.T5_LARGEST :, -1] = 1
    weights = targets.lag_weights(target)
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


@pytest.mark.parametrize("kernel", longer_inputs.KERNELS)
def test_a_model_is_affine_on_inputs_of_any_length(kernel: str) -> None:
    torch.manual_seed(1)
    for length in (targets.LENGTH, 1700):
        model = targets.RelativeConfig(length, 3, 0, kernel).build().double()
        model.phi = targets.lag_features(kernel, length)
        with torch.no_grad():
            model.out.bias.fill_(0.3)
            x = 2.0 * torch.randint(2, (20, length)).double() - 1
            constant, weights = targets.affine(replace_length(model), length)
            said = constant + x.flip(1).numpy() @ weights
            np.testing.assert_allclose(said, model(x).numpy(), atol=1e-11)


def replace_length(model: torch.nn.Module) -> torch.nn.Module:
    """The same weights in a model for LENGTH inputs."""
    other = replace(model.cfg, length=targets.LENGTH).build().double()
    other.load_state_dict({k: v for k, v in model.state_dict().items() if k != "phi"}, strict=False)
    return other


def test_solved_errors_by_formula() -> None:
    table = solved_errors([Cell("4a", "log", 1), Cell("4b", "linear", 1), Cell("4a", "linear", 1)])
    table = table.set_index(["target", "kernel", "measure", "length"])["value"].sort_index()
    whole = {n: (np.arange(1, n) ** -0.5).sum() for n in longer_inputs.LENGTHS}
    for n in (1250, 8000):  # the same shape, divided by a larger sum
        scaled = (1 - whole[targets.LENGTH] / whole[n]) ** 2
        assert table["4a", "log", "relative_mse", n] == pytest.approx(scaled, rel=1e-6)
    assert table["4b", "linear", "mse"].max() < 1e-25
    assert table["4a", "linear", "mse", targets.LENGTH] == pytest.approx(targets.linear_optimum("4a", "linear", 1).mse)


@pytest.mark.parametrize(("width", "kernel", "more", "said"), [
    (4, "log", {}, "not affine in its inputs"), (0, "log", {"dot_product": True}, "not affine in its inputs"),
    (0, "table", {}, "a table of 20 positions says nothing of longer"),
])  # fmt: skip
def test_what_has_no_error_on_longer_inputs(width: int, kernel: str, more: dict[str, bool], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        targets.affine(targets.RelativeConfig(20, 1, width, kernel, **more).build(), 30)
    with pytest.raises(ValueError, match="target '2b' has no longer inputs: known are 4a, 4b"):
        targets.error("2b", 0.0, np.zeros(2000))


def test_a_run_on_longer_inputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        longer_inputs, "training", lambda quick, seed: TrainConfig(2, 4, seed=seed, evaluate_every=2, state_every=2)
    )
    monkeypatch.setattr(longer_inputs, "grid", lambda quick: (Cell("4a", "t5", 1), Cell("4b", "log", 1)))
    results = ran("longer_inputs", out := tmp_path / "longer")
    assert len(results.summary) == 2 * 2 * len(longer_inputs.LENGTHS)
    table = results.tables["errors"]
    # the trainer measures such a model by the same sum
    metrics = pd.read_json(out / "runs" / "4a-t5-1-seed0" / "metrics.jsonl", lines=True)
    ours = table[(table["target"] == "4a") & (table["length"] == targets.LENGTH) & (table["measure"] == "mse")]
    assert ours["value"].iloc[0] == pytest.approx(metrics["mse"].iloc[-1], rel=1e-5)
    assert metrics["evaluated_on"].iloc[-1] == EXACT
    again = ran("longer_inputs", out)  # finished runs are read, not refused
    pd.testing.assert_frame_equal(again.summary, results.summary)


def test_what_a_sample_of_a_squared_error_is_off_by() -> None:
    rng = np.random.default_rng(0)
    for left in (np.array([1.0, 0, 0]), np.array([1.0, 0.5, 0.1]), rng.normal(size=50)):
        sampled = ((rng.choice([-1.0, 1.0], (40_000, len(left))) @ left) ** 2).reshape(400, 100).mean(1) / (left @ left)
        assert targets.sampling_error(left, 100) == pytest.approx(sampled.std(), rel=0.12, abs=1e-12)
    assert targets.sampling_error(1e-200 * np.ones(1000), 4096) == pytest.approx(np.sqrt(2 / 4096), rel=1e-3)
    assert np.isnan(targets.sampling_error(np.zeros(3), 100))


def test_errors_of_affine_models_are_not_sampled() -> None:
    torch.manual_seed(2)
    task = ApproximationTask("4a")
    model = targets.RelativeConfig(targets.LENGTH, 2, 0, "t5").build()
    with torch.no_grad():
        told = task.evaluate(model)
        sampled = float(task.loss(model, task.batch(0, 4096, 10_000)))
    assert told["evaluated_on"] == EXACT
    assert told["mse"] == pytest.approx(targets.error("4a", *targets.affine(model, targets.LENGTH))[0])
    assert 1e-6 < abs(sampled / told["mse"] - 1) < 5 * np.sqrt(2 / 4096)
    for other in (
        targets.RelativeConfig(targets.LENGTH, 2, 4, "t5"),
        targets.RelativeConfig(targets.LENGTH, 2, 0, "table"),
    ):
        assert (
            ApproximationTask("2b" if other.kernel == "table" else "4a").evaluate(other.build())["evaluated_on"] == 4096
        )
