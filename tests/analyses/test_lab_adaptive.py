"""Adaptive memory: its target by hand, the bound of what is affine, two heads that reach 0, a run from end to end."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from lab_runs import by_definition, ran

from ln_probe.analyses.lab.approximation import adaptive_memory
from ln_probe.analyses.lab.approximation.adaptive_memory import (
    AFFINE,
    AdaptiveTask,
    Cell,
    adaptive,
    balanced,
    by_hand,
    findings,
)


def inputs(count: int = 4096, seed: int = 3) -> torch.Tensor:
    return 2.0 * torch.randint(2, (count, 1000), generator=torch.Generator().manual_seed(seed)).double() - 1


def test_the_target_reads_where_the_last_input_says() -> None:
    x = -torch.ones(4, 1000)
    x[0, [98, 999]] = x[1, 999] = x[2, 47] = 1.0
    assert adaptive(x).tolist() == [1.0, -1.0, 1.0, -1.0]
    with pytest.raises(ValueError, match="inputs must have 1000 positions, got 10"):
        adaptive(x[:, :10])


def test_what_is_affine_leaves_half() -> None:
    """Least squares over all inputs that matter, each alike often: e, a, b."""
    e, a, b = np.array(np.meshgrid([-1, 1], [-1, 1], [-1, 1])).reshape(3, -1)
    y = np.where(e > 0, a, b)
    columns = np.column_stack([np.ones(8), e, a, b])
    error = y - columns @ np.linalg.lstsq(columns, y, rcond=None)[0]
    assert (error**2).mean() == pytest.approx(AFFINE)
    assert Cell(4, 0, False).attainable == AFFINE


def test_models_without_ffn_and_dot_product_are_affine() -> None:
    torch.manual_seed(0)
    model = Cell(3, 0, False).spec().build().double()
    torch.nn.init.normal_(model.bias)
    x = inputs(64)
    flipped = x.clone()
    flipped[:, [5, 98]] *= -1
    single = [x.clone() for _ in range(2)]
    single[0][:, 5] *= -1
    single[1][:, 98] *= -1
    both, one, other, none = (model(z) for z in (flipped, *single, x))
    torch.testing.assert_close(both - none, (one - none) + (other - none), rtol=0, atol=1e-12)


def test_the_bound_holds_on_what_is_measured_on() -> None:
    """The best affine function has exactly the bound's error on these inputs."""
    x = balanced()
    a, b = x[:, 98], x[:, 47]
    assert float(((a + b) / 2 - adaptive(x)).pow(2).mean()) == AFFINE
    assert float(x[:, [999, 98, 47]].sum()) == 0


def test_two_heads_with_the_dot_product_do_it_by_hand() -> None:
    model, x = by_hand(), inputs()
    with torch.no_grad():
        assert float((model(x) - adaptive(x)).pow(2).mean()) < 1e-10
        torch.testing.assert_close(model(x[:16]), by_definition(model, x[:16]), rtol=0, atol=1e-10)
        assert 1e-10 < float((by_hand(1e-2)(x) - adaptive(x)).pow(2).mean()) < 1e-2


def test_findings_by_hand() -> None:
    rows = [
        {"heads": 2, "width": 0, "dot_product": product, "seed": seed, "measure": "mse", "value": value}
        for product, values in ((False, (0.5, 0.5, 0.5)), (True, (5e-3, 5e-4, 5e-5)))
        for seed, value in enumerate(values)
    ]
    found = findings(pd.DataFrame(rows))
    factor = found.tables["dot_product"].iloc[0]
    assert factor["factor"] == pytest.approx(1e-3)
    assert found.summary.set_index("dot_product").loc[False, "attainable"] == 0.5
    first, second, third = found.conclusions
    assert first.startswith("Neither FFN nor dot product: trained errors of 0.5 to 0.5 over 2 to 2 heads; 0.5 is the")
    assert second == "The dot product and no FFN: trained errors of 0.0005 to 0.0005 over 2 to 2 heads."
    assert third.startswith("The dot product, 2 heads, no FFN: 0.001 [")


def test_a_run_from_end_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    short = adaptive_memory.training(True, 0)
    monkeypatch.setattr(
        adaptive_memory,
        "training",
        lambda quick, seed: type(short)(**(vars(short) | {"steps": 4, "evaluate_every": 4, "warmup": 1, "seed": seed})),
    )
    results = ran("adaptive_memory", tmp_path / "adaptive")
    assert len(results.summary) == 4
    assert AdaptiveTask().identity["places"] == (99, 48)
