"""What every norm reads is a sum of parts: of which, found by what a pass shows, in every kind of block."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from architectures import make_bridge
from small_models import lab
from torch import Tensor

from ln_probe.hooks import find_norms
from ln_probe.hooks.components import END, Expression, Split, SplitError, find_wiring, outside_attention, record

TOKENS = torch.arange(1, 11)
ROWS = [0, 4, 9]
# architecture: what the second norm of the second block reads, in our words
KINDS = {
    "gpt2": "embed + pos_embed + blocks.0.attn + blocks.0.mlp + blocks.1.attn",
    "neox": "embed + blocks.0.attn + blocks.0.mlp",  # attention and MLP side by side
    "qwen3": "embed + blocks.0.attn + blocks.0.mlp + blocks.1.attn",
    "gemma": "embed + blocks.0.attn + blocks.0.mlp + blocks.1.attn",
    "gemma2": "embed + blocks.0.ln1_post + blocks.0.ln2_post + blocks.1.ln1_post",  # norms of what is written
    "bloom": "embed_ln + blocks.0.attn + blocks.0.mlp + blocks.1.attn",
    "olmo2": "blocks.1.mlp",  # no norm but behind the writers
    "bert": "blocks.1.ln1 + blocks.1.mlp",  # norms in the stream itself
}


def words(expression: Expression) -> dict[str, float]:
    """The factor of each source, by its name."""
    names = {s: f"blocks.{s.layer}.{s.kind}" if s.layer >= 0 else s.kind for s in expression}
    return {s.norm.name if s.norm else names[s]: factor for s, factor in expression.items()}


def split_of(model: Any, tokens: Tensor = TOKENS, rows: list[int] = ROWS) -> Split:
    sites = find_norms(model)
    wiring = find_wiring(model, sites)
    return Split(wiring, record(model, tokens, rows, sites))


@pytest.mark.parametrize("arch", KINDS)
def test_every_norm_reads_its_parts(arch: str) -> None:
    split = split_of(make_bridge(arch))
    expression = split.wiring.at("blocks.1.ln2" if "blocks.1.ln2" in split.wiring.reads else "blocks.1.ln2_post")
    assert set(expression.values()) == {1.0}
    assert " + ".join(sorted(words(expression))) == " + ".join(sorted(KINDS[arch].split(" + ")))
    f = torch.randn(len(ROWS), 5, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for site in outside_attention(split.wiring.norms):
        if arch == "bert" and site.name == "ln_final":  # behind the head's own map and activation
            with pytest.raises(
                SplitError, match=r"written after blocks.1.ln2(_post)?, the last place where the sum closes"
            ):
                split.read("ln_final", f)
            continue
        assert split.check(site.name) <= 5e-7
        whole = torch.einsum("rd,rfd->rf", split.input(site.name), f)
        summed = torch.stack(list(split.read(site.name, f).values())).sum(0)
        assert float((summed - whole).abs().max()) <= 2e-6 * float(whole.abs().max())


def test_scaled_embeddings_come_out_with_their_factor() -> None:
    model = lab()
    model.blocks[0].register_forward_pre_hook(lambda _m, args: (5.5 * args[0],))
    expression = split_of(model).wiring.at("ln_final")
    assert {name: round(factor, 5) for name, factor in words(expression).items()} == {
        "embed": 5.5, "pos_embed": 5.5, "blocks.0.attn": 1.0, "blocks.0.mlp": 1.0, "blocks.1.attn": 1.0,
        "blocks.1.mlp": 1.0,
    }  # fmt: skip


def test_an_unknown_writer_is_missed_and_placed() -> None:
    model = lab()
    extra = torch.nn.Linear(32, 32)
    model.blocks[0].register_forward_hook(lambda _m, _args, out: out + extra(out).tanh().detach())
    sites = find_norms(model)
    wiring = find_wiring(model, sites)
    assert set(wiring.reads) == {"blocks.0", "blocks.0.ln1", "blocks.0.ln2", END}  # (the end: what the last norm wrote)
    said = r"at ln_final is not the sum .*e-0[12] of its size is left over .*written after blocks.0.ln2, the last place"
    with pytest.raises(SplitError, match=said):
        wiring.at("ln_final")


def test_an_edit_that_was_active_is_noticed() -> None:
    model = lab()
    sites = find_norms(model)
    wiring = find_wiring(model, sites)
    model.blocks[1].register_forward_pre_hook(lambda _m, args: (args[0] + 0.01,))
    split = Split(wiring, record(model, TOKENS, ROWS, sites))
    assert split.check("blocks.0.ln2") < 1e-6
    with pytest.raises(SplitError, match=r"read at blocks.1.ln1"):
        split.check("blocks.1.ln1")


def test_a_stream_without_norms_ends_somewhere_too() -> None:
    split = split_of(lab(norm=None, norm_mlp=None, norm_final=None))
    assert split.wiring.norms == []
    assert split.check(END) <= 5e-7
    with pytest.raises(SplitError, match=r"ln_final"):
        split.check("ln_final")
