"""Norms taken out of a trained model, at each stage and end to end; the registered 2 x 2 on fresh seeds, end to end."""

from __future__ import annotations

import torch

from ln_probe.analyses.lab.language_model import remove_norm
from ln_probe.analyses.lab.norms import Norm
from ln_probe.analyses.lab.transformer import LabConfig

SIZE = remove_norm.Size(
    steps=14, batch=2, schedule=remove_norm.Schedule(2, 1, 1), valid_windows=2, contexts=2
)  # 5 norms: over at step 12


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


def test_norms_go_one_by_one() -> None:
    """Norms of MLPs first, then attention's, then the final one; their first positions join after all are gone."""
    model = LabConfig(n_layers=2, d_model=8, n_heads=2, d_vocab=9, n_ctx=4).build()
    for block in model.blocks:
        block.ln1, block.ln2 = remove_norm.ReplaceableNorm(block.ln1), remove_norm.ReplaceableNorm(block.ln2)
    model.ln_final = remove_norm.ReplaceableNorm(model.ln_final)
    one, two = model.blocks
    norms, schedule = remove_norm.replaceable_norms(model), remove_norm.Schedule(3, 4, 2)
    assert norms == [one.ln2, two.ln2, one.ln1, two.ln1, model.ln_final]
    assert schedule.replaced(5) == 23
    for step in range(36):
        schedule.set_stages(norms, step)
        expected = [(step >= 3 + 4 * i) + (step >= 23 + 2 * i) for i in range(5)]
        assert [int(norm.stage) for norm in norms] == expected, step
