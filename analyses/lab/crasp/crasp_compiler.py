"""A compiler from C-RASP to the weights of the laboratory's transformer, for every program that the interpreter runs.

One head attends uniformly, over BOS and the word so far, so at position t it brings (sum of counts)/(t + 1), and
1/(t + 1) from BOS alone. The sign of such a mean is all that a comparison asks, and it shrinks as the word grows. Three
constructions make a truth value of it that can be counted again:

    scaling    the MLP clips it to ±1/(t + 1), as long as everything else; the norm then makes all of it 1 (Yang &
               Chiang 2024, "Counting Like Transformers"). For any length, in real arithmetic, with a norm that scales
               and a negligible eps.
    clip       two ReLUs as steep as the longest word is long: exact up to that length, with any norm or none.
    rounding   the mean is rounded down, which keeps its sign, to a whole step of a fixed-precision grid: at most one
               layer per level of counting, for any length, with any norm or none (Yang, Cadilhac & Chiang 2025).

The MLPs have no biases, so a block does not mind by which factor a norm scaled its input. An output that is a count
comes as the ratio of two logits; fixed precision has no room for it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import cast, get_args

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ln_probe.analyses.lab.arithmetic import Precision, Rounding, fixed_precision
from ln_probe.analyses.lab.crasp.crasp import Program
from ln_probe.analyses.lab.crasp.crasp_blocks import BlockWeights, BlockWriter, stream_for
from ln_probe.analyses.lab.crasp.lowering import Construction, Lowered, Step, lower, plan
from ln_probe.analyses.lab.norms import SCALES
from ln_probe.analyses.lab.run_folder import MODEL_FILE, claim, hashes_beside, save_model
from ln_probe.analyses.lab.transformer import LabConfig, LabTransformer

CONSTRUCTIONS: tuple[Construction, ...] = get_args(Construction)
BOS = 0  # its token; the alphabet's symbols follow
MOST_LAYERS = 256
# Entries of the stream, and hidden units of one MLP: about 1 GB of weights in float64 for a layer that is as wide.
MOST_WIDTH = 8192
# What a truth value and a mean of n numbers up to 1 may be off by in float64: a few roundings of 2^-53.
FLOAT_ERROR = 2.0**-51
# An eps that changes no norm here: below the last bit of any mean square up to a million positions (float64); with
# rounding times the least mean square on the grid. It is there for a vector of zeros, which no word gives; probes may.
TINY_EPS = 1e-30
MARGIN = 0.25  # a sum of counts is odd halves, so 1/2 away from 0; half of that may be lost to rounding
TOKENS_AT_ONCE = 2**12  # of the forward passes in `run`: 2 MB of stream at 64 entries, which stays in the cache

Answers = Bool[np.ndarray, "word letter"] | Int[np.ndarray, "word letter"]


@dataclass(frozen=True)
class CompiledProgram:
    """A program as a transformer. Made by `compile_program`.

    Attributes:
        model: an ordinary model of the laboratory, in float64; token 0 is BOS, then the alphabet. Logit 1 is above
            logit 0 where the program's output holds; an output that is a count is logit 1 over logit 0.
        construction, alphabet: as compiled.
        depth: levels of counting in the program; `attending`: layers whose attention does something.
        precision: the grid that "rounding" computes on; None: real arithmetic (float64).
    """

    program: Program
    construction: Construction
    model: LabTransformer
    alphabet: tuple[str, ...]
    depth: int
    attending: int
    precision: Precision | None

    @property
    def layers(self) -> int:
        return self.model.cfg.n_layers

    def tokens(self, words: Sequence[Sequence[str]]) -> Int[Tensor, "word pos"]:
        """BOS, then the words, which have to be equally long.

        Raises:
            ValueError: no words, words of different lengths, or a symbol that is not of the alphabet.
        """
        if len({len(word) for word in words}) != 1:
            raise ValueError("words of different lengths (or none) cannot be run at once")
        number = {symbol: i for i, symbol in enumerate(self.alphabet, start=BOS + 1)}
        try:
            return torch.tensor([[BOS, *(number[symbol] for symbol in word)] for word in words])
        except KeyError as error:
            raise ValueError(f"{error.args[0]!r} is no symbol of the alphabet {', '.join(self.alphabet)}") from None

    def logits(
        self, tokens: Int[Tensor, "word pos"], rounding: Rounding | None = "down"
    ) -> Float[Tensor, "word pos d_vocab"]:
        """The model's answers; of the construction "rounding" in fixed precision, unless `rounding` is None."""
        grid = self.precision if rounding is not None else None
        with torch.no_grad(), nullcontext() if grid is None else fixed_precision(self.model, grid, rounding or "down"):
            rows = max(1, TOKENS_AT_ONCE // tokens.shape[1])
            return torch.cat([self.model(part) for part in tokens.split(rows)])

    def run(self, words: Sequence[Sequence[str]], rounding: Rounding | None = "down") -> Answers:
        """What the transformer says at every letter of some words, [word letter]: bool, or int64 for counts.

        Raises:
            ValueError: as `tokens`, or the words are longer than the model's context.
        """
        said = self.logits(self.tokens(words), rounding)[:, 1:]
        if self.program.output.kind == "Boolean":
            return (said[..., 1] > said[..., 0]).numpy()
        return (said[..., 1] / said[..., 0]).nan_to_num(0.0).round().long().numpy()


def compile_program(
    program: Program,
    construction: Construction = "scaling",
    norm: str = "layernorm",
    *,
    alphabet: Sequence[str] | None = None,
    n_ctx: int = 512,
    clip_to: int | None = None,
    eps: float | None = None,
    max_layers: int = MOST_LAYERS,
    max_width: int = MOST_WIDTH,
) -> CompiledProgram:
    """Compile a C-RASP program.

    Args:
        program: parsed.
        construction: how a comparison becomes a truth value, see this module.
        norm: kind of every norm; those that do not scale divide by a constant. Whether it suffices is for the caller to
            see: "scaling" is compiled under any norm, and right under those that scale.
        alphabet: the symbols that words can have; None: those that the program names, in that order.
        n_ctx: longest input, BOS included.
        clip_to: the positions that a clip is built for (of "clip", and where a count has cases); None: n_ctx. Beyond
            them comparisons of nearly equal counts are blunt.
        eps: of the norms; None: one that changes nothing. With "scaling", LayerNorm's usual 1e-5 blunts comparisons on
            long words.
        max_layers, max_width: largest model to make: layers; entries of the stream, hidden units and head size.

    Returns:
        The model, with at most `depth` layers for "rounding" (1 if nothing is counted; fewer than `depth` where a
        formula is simpler than it looks). Otherwise with as many layers that attend; a level whose formulas combine
        comparisons (or a count with cases) has one more, its attention off.

    Raises:
        CRaspError: too deep, too wide, factors too large for float64 at this length, or an output that is a count in
            fixed precision; says the line and the column.
        ValueError: unknown construction or norm, n_ctx or clip_to below 2, eps negative, a limit below 1, an alphabet
            that is empty or has a symbol twice.
    """
    _check(construction, min(n_ctx, clip_to or n_ctx), max_layers, max_width)
    named = (e.value for d in program.definitions.values() for e in d.walk() if e.operation == "symbol")
    letters = tuple(dict.fromkeys(named) if alphabet is None else alphabet)
    if not letters:
        none, give = (
            ("the program names no symbol", "an alphabet") if alphabet is None else ("the alphabet is empty", "one")
        )
        raise ValueError(f"{none}, and words are made of symbols: give {give}")
    if alphabet is not None and len(set(letters)) < len(alphabet):
        raise ValueError(f"the alphabet has a symbol twice: {', '.join(alphabet)}")
    output = program.output
    if construction == "rounding" and output.kind == "count":
        raise program.error(
            output,
            "unsupported: the output is a count",
            "a Boolean, since fixed precision has no room for counts, or another construction",
        )
    lowered = lower(program, letters, max_layers)
    steps = plan(lowered, construction)
    _check_size(lowered, steps, n_ctx, max_layers)
    stream = stream_for(steps, construction == "rounding")
    writer = BlockWriter(lowered, construction, stream, clip_to or n_ctx, max_width)
    blocks = [writer.block(step) for step in steps]
    eps = TINY_EPS * (writer.step**2 if writer.rounded else 1) if eps is None else eps
    model = _assemble(writer, steps, blocks, letters, norm, n_ctx, eps)
    attending = sum(step.attends for step in steps)
    return CompiledProgram(program, construction, model, letters, program.depth, attending, writer.precision(model))


def _check(construction: str, n_ctx: int, max_layers: int, max_width: int) -> None:
    if construction not in CONSTRUCTIONS:
        raise ValueError(f"unknown construction {construction!r}: known ones are {', '.join(CONSTRUCTIONS)}")
    if n_ctx < 2:
        raise ValueError(f"{n_ctx} positions have no room for BOS and a letter: at least 2")
    for name, limit in (("max_layers", max_layers), ("max_width", max_width)):
        if limit < 1:
            raise ValueError(f"{name} must be at least 1, got {limit}")


def _check_size(lowered: Lowered, steps: Sequence[Step], n_ctx: int, max_layers: int) -> None:
    """Raise CRaspError if there are too many blocks, or numbers of which float64 does not tell the signs."""
    output = lowered.program.output
    if len(steps) > max_layers:
        raise lowered.program.error(
            output,
            f"too deep: this takes {len(steps)} layers",
            f"at most {max_layers} (max_layers)",
        )
    off = 0.0  # what truth values may be off by, so far
    for step in steps:
        sizes = [(lowered.size(lowered.sum_of(v)), lowered.places[v]) for v in step.asked]
        sizes += [(n_ctx * lowered.size(total), output) for total in step.sums]
        for size, place in sizes:
            if n_ctx * size * (FLOAT_ERROR + off) > MARGIN:
                problem = f"too wide: a sum of up to {size} per letter, which float64 does not tell from 0"
                expected = f"smaller factors, or fewer than {n_ctx} positions (n_ctx)"
                raise lowered.program.error(place, problem, expected)
        off = max([off, *(FLOAT_ERROR * n_ctx * size for size, _ in sizes)])


def _assemble(
    writer: BlockWriter,
    steps: Sequence[Step],
    blocks: Sequence[BlockWeights],
    letters: Sequence[str],
    norm: str,
    n_ctx: int,
    eps: float,
) -> LabTransformer:
    """A lab model with these weights; its norms' gains bring truth values to the length that the next part reads."""
    d, rounded = writer.stream.d_model, writer.rounded
    # Entries of one length on a quarter of the places: a norm that scales makes them 2, for any length they had.
    divisors = (writer.step if rounded else 0.5, 0.5)
    gains = (1.0 if rounded else 0.5, writer.step if rounded else 0.5)
    cfg = LabConfig(
        n_layers=len(steps),
        d_model=d,
        n_heads=1,
        d_head=max(1, *(block.W_V.shape[1] for block in blocks)),
        d_mlp=max(1, *(block.W_in.shape[1] for block in blocks)),
        d_vocab=len(letters) + 1,
        n_ctx=n_ctx,
        norm=norm,
        norm_mlp=norm,
        eps=eps,
        norm_final=None,
        norm_order="post",
        divisor=None if norm in SCALES else divisors[0],
        positions="none",
        tied=False,
        act_fn="relu",
        bias_qkv=False,
        bias_out=rounded,
        bias_mlp=False,
        bias_unembed=False,
    )
    model = LabTransformer(cfg).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.embed.W_E.copy_(torch.from_numpy(writer.embedding(steps[0].before, letters)))
        assert model.unembed.untied is not None
        for logit, place in enumerate(writer.unembedding(steps[-1].after)):
            model.unembed.untied[place, logit] = 1.0
        for made, weights in zip(model.blocks, blocks, strict=True):
            for ln, gain, divisor in zip((made.ln1, made.ln2), gains, divisors, strict=True):
                cast("Tensor", ln.w).fill_(gain)
                if ln.divisor is not None:
                    cast("Tensor", ln.divisor).fill_(divisor)
            heads, units = weights.W_V.shape[1], weights.W_in.shape[1]
            made.attn.W_V[0, :, :heads] = torch.from_numpy(weights.W_V)
            made.attn.W_O[0, :heads] = torch.from_numpy(weights.W_O)
            if made.attn.b_O is not None:
                made.attn.b_O.copy_(torch.from_numpy(weights.b_O))
            made.mlp.W_in[:, :units] = torch.from_numpy(weights.W_in.copy())
            made.mlp.W_out[:units] = torch.from_numpy(weights.W_out)
    return model.eval()


PROGRAM_FILE = "program.crasp"


def save_compiled(compiled: CompiledProgram, out: Path) -> Path:
    """Write a compiled program's weights, shape and source into a folder that `load_model` takes.

    What is loaded from it computes as the program was compiled: in float64 and, of the construction "rounding", in
    fixed precision (see `fixed_precision.install`).

    Raises:
        FileExistsError: the folder holds another program's model, or something else.
        ValueError: compiled for rounding with an eps that its norms lose only where they round.
    """
    grid, cfg = compiled.precision, compiled.model.cfg
    if grid is not None and cfg.norm in SCALES and not grid.absorbs(cfg.eps):
        raise ValueError(
            f"eps {cfg.eps:g} is lost only where norms round, and in a loaded model they do not (analyses take them by "
            "their formula): compile without eps"
        )
    identity = {
        "task": "compiled",
        "model": compiled.model.cfg.to_dict(),
        "program": compiled.program.source,
        "construction": compiled.construction,
        "alphabet": list(compiled.alphabet),
        "dtype": "float64",
        "precision": None if grid is None else asdict(grid),
    }
    claim(out, json.loads(json.dumps(identity)))
    (out / PROGRAM_FILE).write_text(compiled.program.source, encoding="utf-8")
    save_model(compiled.model, out / MODEL_FILE, torch.float64, about={"beside": hashes_beside(out)})
    return out
