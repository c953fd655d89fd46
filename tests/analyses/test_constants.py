"""The constants that replace sigma: means over the other prompts, and what intervals make of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from architectures import make_bridge

import ln_probe
from ln_probe.analyses.constants import Constants, group_numbers, halves_of
from ln_probe.hooks import find_norms, without
from ln_probe.hooks.constants import Constant, mean_sigmas

TOKENS = [torch.arange(1, 13), torch.arange(20, 29), torch.tensor([7, 7, 3, 7]), torch.arange(1, 13), torch.tensor([5])]
ALONE = ["decomposition"]


def analyzed(model: Any, prompts: Any = TOKENS, probes: Any = ALONE, **options: Any) -> ln_probe.Report:
    return ln_probe.analyze(model, prompts, probes=probes, progress=False, **options)


@pytest.mark.parametrize("arch", ["gpt2", "qwen3"])
def test_the_constants_of_a_prompt_are_means_over_the_other_groups(arch: str) -> None:
    """Computed once more from the sigmas of the prompts that are not equal to it."""
    model = make_bridge(arch)
    constants, sites = analyzed(model).constants, find_norms(model)
    assert constants.groups.tolist() == [0, 1, 2, 0, 3]
    for prompt, row in enumerate(TOKENS):
        others = [other for other in TOKENS if not torch.equal(other, row)]
        expected = mean_sigmas(model, sites, others)
        for name, constant in constants.of(prompt).items():
            assert constant.first == pytest.approx(expected[name].first, rel=1e-6)
            assert constant.rest == pytest.approx(expected[name].rest, rel=1e-6)
    pooled = mean_sigmas(model, sites, TOKENS)
    assert set(constants.pooled) == {s.name for s in sites}
    for name, constant in constants.pooled.items():
        assert constant.rest == pytest.approx(pooled[name].rest, rel=1e-6)
        assert constants.observed.loc[name, "first"] == pytest.approx(pooled[name].first, rel=1e-6)


def test_constants_are_saved_with_the_report(tmp_path: Path) -> None:
    report = analyzed(make_bridge("gpt2"))
    read = ln_probe.load_report(report.save(tmp_path / "r")).constants
    assert read.of(1) == report.constants.of(1)
    assert read.source == report.constants.source
    with pytest.raises(IndexError, match="prompt 5"):
        read.of(5)


def test_labels_and_calibration_text_are_checked_before_the_first_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_bridge("gpt2")
    monkeypatch.setattr("ln_probe.passes.streaming", None)
    with pytest.raises(ValueError, match="2 labels"):
        analyzed(model, groups=["a", "b"])
    with pytest.raises(ValueError, match="calibration"):
        analyzed(model, calibration=TOKENS)


def test_calibration_text_gives_every_prompt_the_same_constants() -> None:
    model = make_bridge("gpt2")
    other = torch.arange(30, 42)[None]
    report = analyzed(model, calibration=other)
    expected = mean_sigmas(model, find_norms(model), list(other))
    assert report.constants.of(0) == report.constants.of(4) == report.constants.pooled == expected
    assert "calibration" in report.provenance["calibration"]["constants"]
    assert report.provenance["calibration"]["count"] == 1
    assert not any("in the calibration text too" in note for note in report.notes)


def test_constants_far_from_what_is_observed_are_noted() -> None:
    model = make_bridge("gpt2")
    constants = analyzed(model, TOKENS[:3]).constants
    assert constants.notes() == ()
    far = {name: Constant(1.07 * c.first, 1.04 * c.rest) for name, c in constants.pooled.items()}
    (note,) = Constants(constants.sites, constants.groups, constants.sums, constants.counts, "", far).notes()
    assert "5 of 5 norms" in note
    assert "by 7%" in note
    near = {name: Constant(c.first, 1.04 * c.rest) for name, c in constants.pooled.items()}
    assert not Constants(constants.sites, constants.groups, constants.sums, constants.counts, "", near).notes()


def test_unusable_calibration_text_is_refused() -> None:
    model = make_bridge("gpt2")
    with pytest.raises(ValueError, match="outside"):
        analyzed(model, calibration=[[50]])
    with pytest.raises(ValueError, match="one token"):
        analyzed(model, calibration=[[3], [4]])
    report = analyzed(model, calibration=[TOKENS[1], torch.arange(30, 42)])
    assert any("1 prompt in the calibration text too" in note for note in report.notes)


def test_one_group_of_prompts_has_constants_from_elsewhere() -> None:
    model = make_bridge("gpt2")
    report = analyzed(model, torch.stack([TOKENS[0]] * 3))
    expected = mean_sigmas(model, find_norms(model), [TOKENS[0]])
    assert report.constants.of(2)["ln_final"].rest == pytest.approx(expected["ln_final"].rest, rel=1e-6)
    assert "own" in report.constants.source
    assert any("one group" in note for note in report.notes)
    bundled = ln_probe.load_model("lm-layernorm")
    report = analyzed(bundled, torch.arange(1, 30)[None])
    own = report.constants
    windows = bundled.bundled_prompts.calibration  # type: ignore[union-attr]
    assert own.of(0) == mean_sigmas(bundled, find_norms(bundled), list(windows))  # type: ignore[arg-type]
    assert "calibration" in own.source
    assert any("one group" in note for note in report.notes)


def test_default_constants_of_without_are_pooled_over_the_default_prompts() -> None:
    """`without` and `analyze` took theirs from different text where prompts lacked the first token of the model."""
    model: Any = ln_probe.load_model("lm-layernorm")
    pooled = ln_probe.norm_constants(model).pooled
    with without(model, "scaling", sites="final") as done:
        assert done.divisors["ln_final"].first == pytest.approx(pooled["ln_final"].first, rel=1e-6)
        assert done.divisors["ln_final"].rest == pytest.approx(pooled["ln_final"].rest, rel=1e-6)


def test_sums_of_others_lose_nothing_beside_a_huge_sigma() -> None:
    """A sink's sigma of 1e9 in one prompt must not cost the others digits, as subtracting from the total would."""
    sums = np.array([[[1e17, 1.0]], [[0.1, 0.3]], [[0.2, 0.4]]])
    constants = Constants(("a",), np.arange(3), sums, np.ones_like(sums))
    assert constants.of(0)["a"] == Constant((0.1 + 0.2) / 2, (0.3 + 0.4) / 2)


def test_prompts_of_one_token_have_the_constant_of_position_0() -> None:
    sums, counts = np.array([[[2.0, 0.0]], [[4.0, 0.0]]]), np.array([[[1.0, 0.0]], [[1.0, 0.0]]])
    assert Constants(("a",), np.arange(2), sums, counts).of(0)["a"] == Constant(4.0, 4.0)


@pytest.mark.parametrize("seed", range(3))
def test_constants_of_any_sums(seed: int) -> None:
    """Means over the other groups and over all, standard errors, observed sigmas and halves, against plain numpy."""
    generator = np.random.default_rng(seed)
    sums, counts = generator.random((5, 2, 2)), generator.integers(1, 9, (5, 2, 2)).astype(float)
    groups = [0, 1, 0, 2, 1]
    constants = Constants(("a", "b"), np.array(groups), sums, counts)
    total = sums.sum(0) / counts.sum(0)
    assert constants.group_count == 3
    for place, site in enumerate(("a", "b")):
        assert [*constants.pooled[site].plain.values()] == pytest.approx(total[place])
        assert constants.observed.loc[site].to_numpy() == pytest.approx(total[place])
        centred, count = constants.centered(site)
        assert centred == pytest.approx(sums[:, place] - total[place] * counts[:, place])
        assert count == pytest.approx(counts[:, place].sum(0))
        assert constants.standard_errors[site] == pytest.approx(np.sqrt((centred**2).sum(0)) / count)
        for prompt, group in enumerate(groups):
            others = [p for p in range(5) if groups[p] != group]
            mean = sums[others, place].sum(0) / counts[others, place].sum(0)
            assert [*constants.of(prompt)[site].plain.values()] == pytest.approx(mean)
    assert halves_of(["x", "y", "x", "z", "y", "w"]) == [0, 1, 0, 0, 1, 1]
    first, second = ({"a": Constant(float(n), float(n))} for n in (1, 2))
    fitted = replace(constants, optimal={"attention": (first, second)})
    assert [fitted.optimal_of("attention", p) for p in range(5)] == [second, first, second, second, first]
    assert fitted.optimal_of("all", 0) == {}
    for wrong in (-1, 5, 1.0, "1"):
        with pytest.raises(IndexError, match="no prompt"):
            constants.of(wrong)  # type: ignore[arg-type]
    loaded = Constants.of_arrays(constants.arrays(), "text", {"a": 2.0, "b": (1.0, 3.0)})
    assert loaded.of(3) == loaded.pooled == {"a": Constant(2.0, 2.0), "b": Constant(1.0, 3.0)}


def test_labels_of_groups() -> None:
    rows = [torch.tensor([1, 2]), torch.tensor([3]), torch.tensor([1, 2])]
    for labels, groups in ((None, [0, 1, 0]), ([5, 5, (1,)], [0, 0, 1]), (torch.tensor([9, 8, 7]), [0, 1, 2])):
        assert group_numbers(rows, labels).tolist() == groups
    for wrong in ("abc", {1, 2, 3}, {1: 1, 2: 2, 3: 3}, 3, [[1], [2], [3]], [torch.tensor(1)] * 3):
        with pytest.raises(TypeError, match="groups"):
            group_numbers(rows, wrong)
    with pytest.raises(ValueError, match="nan"):
        group_numbers(rows, [1, 2, float("nan")])
