"""Norms taken out of a trained model, at each stage and end to end; the registered 2 x 2 on fresh seeds, end to end."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ln_probe.analyses.lab.language_model import remove_norm
from ln_probe.analyses.lab.norms import Norm
from ln_probe.analyses.lab.text_task import TextTask
from ln_probe.analyses.lab.train import TrainConfig, train
from ln_probe.analyses.lab.transformer import LabConfig

SIZE = remove_norm.Size(
    steps=14, batch=2, schedule=remove_norm.Schedule(2, 1, 1), valid_windows=2, contexts=2
)  # 5 norms: over at step 12


@pytest.fixture(scope="module")
def start(prose: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained model of two layers."""
    out = tmp_path_factory.mktemp("start") / "lm-tiny"
    config = LabConfig(n_layers=2, d_model=16, n_heads=4, d_vocab=280, n_ctx=24)
    train(TextTask([prose], 280, 24), config, TrainConfig(steps=30, batch=4), out, progress=False)
    return out


def test_each_stage_by_its_formula() -> None:
    torch.manual_seed(0)
    norm = Norm("layernorm", 8)
    assert norm.w is not None
    assert norm.b is not None
    torch.nn.init.normal_(norm.w)
    torch.nn.init.normal_(norm.b)
    made = remove_norm.ReplaceableNorm(norm)
    batches = [torch.randn(3, 5, 8) * torch.tensor([9.0, 1, 1, 1, 1])[:, None] for _ in range(3)]
    for x in batches:
        torch.testing.assert_close(made(x), norm(x))
    # The running means, by hand: the first three batches count alike, for their weights 1, 1/2, 1/3 are over MEMORY.
    sigma = torch.stack([(x.var(-1, correction=0) + 1e-5).sqrt() for x in batches])
    torch.testing.assert_close(made.first, sigma[..., 0].mean())
    torch.testing.assert_close(made.rest, sigma[..., 1:].mean())
    x = batches[0]
    projected = x - x.mean(-1, keepdim=True)
    made.stage.fill_(remove_norm.ONE_CONSTANT)
    torch.testing.assert_close(made(x), projected / made.rest * norm.w + norm.b)
    made.stage.fill_(remove_norm.TWO_CONSTANTS)
    divisor = torch.stack([made.first, *[made.rest] * 4])[:, None]
    torch.testing.assert_close(made(x), projected / divisor * norm.w + norm.b)
    batches_before = int(made.batches)
    made(x)
    assert int(made.batches) == batches_before, "a constant is no longer followed"


def test_a_plain_model_computes_the_same(start: Path) -> None:
    model = remove_norm.Start(start).build()
    tokens = torch.randint(280, (2, 24), generator=torch.Generator().manual_seed(1))
    model(tokens)
    norms = remove_norm.replaceable_norms(model)
    for norm in norms:
        norm.stage.fill_(remove_norm.ONE_CONSTANT)
    made = remove_norm.plain(model.eval())
    torch.testing.assert_close(made(tokens), model(tokens))
    assert {made.cfg.norm, made.cfg.norm_mlp, made.cfg.norm_final} == {"projection_only"}
    norms[0].stage.fill_(remove_norm.TWO_CONSTANTS)
    with pytest.raises(ValueError, match=r"\[1, 2\]"):
        remove_norm.plain(model)
