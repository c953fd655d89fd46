"""A training step of the majority model at the published batch of 6000, three ways, and that they are the same model.

    plain      torch.nn.TransformerEncoderLayer on 6000 sequences of 50 tokens
    torch      one row per distinct token, in torch's own operations
    compiled   one row per distinct token, in the lab's compiled sweep (what `MajorityTask` does)

Forward, backward and Adam. The three alternate in every repeat, so that a busy machine slows all alike; processor time
is given next to the clock's. Then plain and compiled are trained from the same weights on the same batches, and the
largest relative difference of their losses is reported.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ln_probe.analyses.lab.majority.bags import Bags
from ln_probe.analyses.lab.majority.majority_task import BATCH, MajorityTask, majority_model, sequences, tables_of
from ln_probe.analyses.lab.transformer import LabTransformer

REPEATS, CURVE_STEPS = 9, 50


class Plain(nn.Module):
    """The published model as its authors build it: an embedding, torch's encoder layer, the embedding transposed."""

    def __init__(self, lab: LabTransformer) -> None:
        super().__init__()
        self.embedding = nn.Embedding(*lab.embed.W_E.shape)
        d = lab.cfg.d_model
        self.layer = nn.TransformerEncoderLayer(
            d, 1, lab.cfg.d_mlp, dropout=0.0, layer_norm_eps=0.0, batch_first=True, norm_first=True
        )
        self.layer.norm1 = nn.LayerNorm(d, eps=0.0, elementwise_affine=False)
        self.layer.self_attn.in_proj_bias = None
        block = lab.blocks[0]
        with torch.no_grad():
            self.embedding.weight.copy_(lab.embed.W_E)
            attention = block.attn
            self.layer.self_attn.in_proj_weight.copy_(
                torch.cat([W[0].T for W in (attention.W_Q, attention.W_K, attention.W_V)])
            )
            self.layer.self_attn.out_proj.weight.copy_(attention.W_O[0].T)
            self.layer.self_attn.out_proj.bias.copy_(attention.b_O)
            self.layer.norm2.weight.copy_(block.ln2.w)
            self.layer.norm2.bias.copy_(block.ln2.b)
            for linear, W, b in (
                (self.layer.linear1, block.mlp.W_in, block.mlp.b_in),
                (self.layer.linear2, block.mlp.W_out, block.mlp.b_out),
            ):
                linear.weight.copy_(W.T)
                linear.bias.copy_(b)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.layer(self.embedding(tokens)) @ self.embedding.weight.T


def plain_loss(model: nn.Module, bags: Bags) -> Tensor:
    tokens, labels = sequences(bags)
    return F.cross_entropy(model(tokens).flatten(0, 1), labels[:, None].expand_as(tokens).flatten())


def torch_loss(tables: tuple[Tensor, ...], rows: tuple[Tensor, ...]) -> Tensor:
    """Rows (example, distinct token) in torch's operations."""
    S, VO, base, gain, bias, W_in, b_in, W_out, b_out, U = tables
    token, weight, log_counts, label = rows
    x = base[token] + (S[token] + log_counts).softmax(-1) @ VO
    y = F.layer_norm(x, x.shape[-1:], gain, bias, 0.0)
    x = x + torch.relu(y @ W_in + b_in) @ W_out + b_out
    return (F.cross_entropy(x @ U.T, label, reduction="none") * weight).sum() / weight.sum()


def rows_of(bags: Bags) -> tuple[Tensor, ...]:
    counts = torch.from_numpy(bags.counts[bags.chosen].astype("float32"))
    example, token = counts.nonzero(as_tuple=True)
    label = torch.from_numpy(bags.label[bags.chosen].astype("int64"))
    return token, counts[example, token], counts.log()[example], label[example]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=REPEATS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    task = MajorityTask(0)
    torch.manual_seed(0)
    compiled, other = (majority_model("layernorm").build() for _ in range(2))
    plain = Plain(compiled)

    def stepper(loss: Callable[[Bags], Tensor], model: nn.Module) -> Callable[[int], None]:
        optimizer = torch.optim.Adam(model.parameters())

        def step(i: int) -> None:
            optimizer.zero_grad(set_to_none=True)
            loss(task.batch(i % 13, BATCH, 0)).backward()
            optimizer.step()

        return step

    ways: dict[str, Callable[[int], None]] = {
        "plain": stepper(lambda b: plain_loss(plain, b), plain),
        "torch": stepper(lambda b: torch_loss(tables_of(other).all(), rows_of(b)), other),
        "compiled": stepper(lambda b: task.loss(compiled, b), compiled),
    }
    clock: dict[str, list[float]] = {name: [] for name in ways}
    processor: dict[str, list[float]] = {name: [] for name in ways}
    for i in range(-1, args.repeats):
        for name, step in ways.items():
            began, used = time.perf_counter(), time.process_time()
            step(max(i, 0))
            if i >= 0:  # the first warms up
                clock[name].append(1e3 * (time.perf_counter() - began))
                processor[name].append(1e3 * (time.process_time() - used))
    first = statistics.median(clock["plain"]), statistics.median(processor["plain"])
    print(f"a training step at batch {BATCH}, ms per model, {args.threads} thread(s), medians of {args.repeats}")
    print(f"{'':10}{'clock':>9}{'times':>8}{'processor':>12}{'times':>8}")
    for name in ways:
        wall, cpu = statistics.median(clock[name]), statistics.median(processor[name])
        print(f"{name:10}{wall:9.1f}{first[0] / wall:8.1f}{cpu:12.1f}{first[1] / cpu:8.1f}")

    torch.manual_seed(1)
    compiled = majority_model("layernorm").build()
    plain = Plain(compiled)
    optimizers = [torch.optim.Adam(m.parameters()) for m in (plain, compiled)]
    worst = 0.0
    for i in range(CURVE_STEPS):
        batch = task.batch(i, 600, 0)
        losses = [plain_loss(plain, batch), task.loss(compiled, batch)]
        for optimizer, loss in zip(optimizers, losses, strict=True):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        worst = max(worst, abs(losses[0].item() / losses[1].item() - 1))
    print(f"loss curves of plain and compiled over {CURVE_STEPS} steps differ by at most {worst:.1e} (relative)")


if __name__ == "__main__":
    main()
