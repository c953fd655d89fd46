"""The probes `writers` and `attribution`: against reruns of the norm without a part, and single positions."""

from __future__ import annotations

from typing import Any

import pandas as pd
import pytest
import torch
from architectures import cases, make_bridge, make_hooked
from small_models import lab
from torch import Tensor

import ln_probe
from ln_probe.analyses.attribution import attribute_logits
from ln_probe.hooks.capture import record
from ln_probe.hooks.components import Split, find_wiring, outside_attention
from ln_probe.hooks.sites import find_sites

TOKENS = torch.arange(1, 11)


def scales(model: Any, site: Any, less: Tensor | None = None) -> Tensor:
    """What a norm of the running model divides by, with something taken off its input alone."""
    seen: list[Tensor] = []

    def take(_m: Any, args: Any) -> Any:
        return args if less is None else (args[0] - less.to(args[0]).reshape(args[0].shape), *args[1:])

    handles = [
        site.module.register_forward_pre_hook(take),
        site.module.hook_scale.register_forward_hook(lambda _m, _a, out: seen.append(out.detach().double().flatten())),
    ]
    with torch.no_grad():
        model(TOKENS[None])
    for handle in handles:
        handle.remove()
    return seen[0]


# bert: norms in the stream, of parts with biases
@pytest.mark.parametrize("arch", cases("gpt2", "bert", slow=["llama", "gemma2"]))
def test_shares_and_changes_of_sigma(arch: str) -> None:
    model = make_bridge(arch)
    report = ln_probe.analyze(model, TOKENS[None], probes=["writers"], progress=False)
    assert not report.failures
    writers = report.tables["writers"]
    sites = [s for s in outside_attention(find_sites(model)) if not (arch == "bert" and s.name == "ln_final")]
    assert set(writers["site"]) == {s.name for s in sites}
    assert writers.groupby("site")["share"].sum().sub(1).abs().max() <= 1e-6
    assert writers.groupby("site")["mu_share"].sum().sub(1).abs().max() <= 1e-9
    rows = list(range(len(TOKENS)))
    split = Split(find_wiring(model, find_sites(model)), record(model, TOKENS, rows, sites))
    basis = torch.eye(32, dtype=torch.float64).expand(len(rows), -1, -1)
    for site in (sites[1], sites[-1]):
        intact = scales(model, site)
        mine = writers[writers["site"] == site.name].set_index("part")
        parts = {p.name: v for p, v in split.read(site.name, basis).items()}
        assert set(parts) == set(mine.index)
        for name in list(parts)[-3:]:
            change = scales(model, site, parts[name]) / intact - 1
            assert mine.loc[name, "sigma_change"] == pytest.approx(float(change.mean()), abs=1e-6)
            assert mine.loc[name, "sigma_change_tail"] == pytest.approx(float(change[1:].mean()), abs=1e-6)
            assert mine.loc[name, "mu"] == pytest.approx(float(parts[name].mean()), abs=1e-7)
            x = site.project(split.input(site.name))
            share = (site.project(parts[name]) * x).sum(-1) / x.pow(2).sum(-1)
            assert mine.loc[name, "share"] == pytest.approx(float(share.mean()), abs=1e-6)
    if arch == "bert":
        assert "the writers of ln_final were not measured: what is read at ln_final is not the sum" in report.notes[-1]


def test_prompts_add_up_and_layers_are_chosen() -> None:
    model, other = lab(), TOKENS.flip(0) + 20

    def writers(prompts: Tensor) -> pd.DataFrame:
        report = ln_probe.analyze(model, prompts, probes=["writers"], layers=[1], progress=False)
        return report.tables["writers"].set_index(["site", "part"])

    one, two, both = writers(TOKENS[None]), writers(other[None]), writers(torch.stack([TOKENS, other]))
    assert set(one.index.get_level_values("site")) == {"blocks.1.ln1", "blocks.1.ln2"}
    assert (both["tokens"] == 20).all()
    for column in ("share", "share_tail", "sigma_change", "mu", "mu_share_tail"):
        assert (both[column] - (one[column] + two[column]) / 2).abs().max() <= 1e-9
        assert (one[column] - two[column]).abs().max() > 1e-6


def test_a_norm_that_is_called_three_times_counts_once() -> None:
    """HookedTransformer does so, for queries, keys and values."""
    report = ln_probe.analyze(make_hooked(), TOKENS[None], probes=["writers"], progress=False)
    writers = report.tables["writers"]
    assert writers.groupby("site")["share"].sum().sub(1).abs().max() <= 1e-6
    assert writers.groupby("site")["mu_share"].sum().sub(1).abs().max() <= 1e-9
    assert (writers["tokens"] == 10).all()


def test_a_norm_that_does_not_scale_has_no_change_of_sigma() -> None:
    model = lab(norm="projection_only", norm_mlp="none")
    report = ln_probe.analyze(model, TOKENS[None], probes=["writers"], progress=False)
    by_site = report.tables["writers"].groupby("site")
    assert by_site["share"].sum().sub(1).abs().max() <= 1e-6
    assert by_site["sigma_change"].apply(lambda c: c.isna().all()).to_dict() == {
        "blocks.0.ln1": True, "blocks.0.ln2": True, "blocks.1.ln1": True, "blocks.1.ln2": True, "ln_final": False,
    }  # fmt: skip


@pytest.mark.parametrize("arch", ["gpt2", "granite"])
def test_direct_attribution_is_the_mean_over_positions(arch: str) -> None:
    """Also where the model multiplies W_U's logits (Granite)."""
    model = make_bridge(arch)
    report = ln_probe.analyze(model, TOKENS[None], probes=["attribution"], progress=False)
    assert not report.failures
    found = report.tables["attribution"].set_index("part")
    each = [attribute_logits(model, TOKENS, i, int(TOKENS[i + 1]), "mean").table.set_index("part") for i in range(9)]
    for column in ("contribution", "without_projection", "projection"):
        mean = sum(e[column] for e in each) / 9
        assert (found[column] - mean).abs().max() <= 1e-9
    magnitude = sum(e["contribution"].abs() for e in each) / 9
    assert (found["magnitude"] - magnitude).abs().max() <= 1e-9
