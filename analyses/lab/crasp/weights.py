"""C-RASP programs as the weights of the laboratory's transformer: post-norm, one head, uniform attention, no positions.

At position t (BOS is 0) uniform attention brings (sum of counts)/(t + 1), and 1/(t + 1) from BOS alone. A comparison
asks for the sign of such a mean, which shrinks as the word grows, but a truth value that is counted again needs one
size at every position. As in Yang & Chiang (2024, "Counting Like Transformers"), the MLP clips the mean to ±1/(t + 1),
makes everything else in the stream as small, and the norm's scaling makes all of it 1. Sums are made odd first, so no
comparison is tied. Exact at any length in real arithmetic with a norm that scales and a negligible eps.

The stream holds a truth value p as (-p, p, -q, q) with q = 1 - p, and fillers: its mean is 0 at every norm, so that
projection changes nothing, and as many entries are not 0 for every word. MLPs have no biases, so a block does not
depend on the factor by which a norm scales its input.

Each level of counting has one block that attends; a Boolean formula over several comparisons takes more blocks whose
attention is off. `read_back` is the other direction.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ln_probe.analyses.lab.crasp.crasp import Program
from ln_probe.analyses.lab.crasp.temporal import Formula, formula_of
from ln_probe.analyses.lab.norms import SCALES
from ln_probe.analyses.lab.transformer import LabConfig, LabTransformer

BOS = 0  # its token; the alphabet's symbols follow
MOST_LAYERS = 256
# Entries of the stream, and hidden units of an MLP: a layer of that width has about 1 GB of float64 weights.
MOST_WIDTH = 8192
FLOAT_ERROR = 2.0**-51  # a few roundings of float64, of a truth value or of a mean of numbers up to 1
MARGIN = 0.25  # an odd sum of counts is at least 1; a quarter of it may be lost to rounding
# Changes no norm: below the last bit of any mean square up to a million positions.
TINY_EPS = 1e-30
TOKENS_AT_ONCE = 2**12  # of the forward passes in `run`: 2 MB of stream at 64 entries, which stays in the cache

P, Q = 1, 3  # entries of a truth value that hold it and its negation; the entry before each holds minus that

Vector = Float[np.ndarray, " d_model"]
Value = Mapping[bytes, float]  # a weighted sum of an MLP's hidden units
Literal = tuple[Formula, bool]  # a formula, and whether it is meant as it is or negated


@dataclass(frozen=True)
class CompiledProgram:
    """A program as a transformer, made by `compile_program`.

    Attributes:
        model: an ordinary model of the laboratory, in float64; token 0 is BOS, then the alphabet. Logit 1 is above
            logit 0 where the program's output holds.
        attending: layers whose attention does something: at most the program's depth.
    """

    program: Program
    model: LabTransformer
    alphabet: tuple[str, ...]
    attending: int

    def tokens(self, words: Sequence[Sequence[str]]) -> Int[Tensor, "word pos"]:
        """Return BOS and the words, which have to be equally long, as tokens.

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

    @torch.no_grad()
    def run(self, words: Sequence[Sequence[str]]) -> Bool[np.ndarray, "word letter"]:
        """Return the transformer's answer at every letter of some words.

        Raises:
            ValueError: as `tokens`, or the words are longer than the model's context.
        """
        tokens = self.tokens(words)
        rows = max(1, TOKENS_AT_ONCE // tokens.shape[1])
        logits = torch.cat([self.model(part)[:, 1:] for part in tokens.split(rows)])
        return (logits[..., 1] > logits[..., 0]).numpy()


def compile_program(
    program: Program,
    norm: str = "layernorm",
    *,
    alphabet: Sequence[str] | None = None,
    n_ctx: int = 512,
    eps: float = TINY_EPS,
) -> CompiledProgram:
    """Compile a C-RASP program whose output is a Boolean.

    Args:
        program: parsed.
        norm: kind of every norm. Those that scale suffice; under the others, which divide by a constant, the same
            weights are another function wherever a comparison is counted again.
        alphabet: the symbols that words can have; None: those that the program names, in that order.
        n_ctx: longest input, BOS included.
        eps: of the norms. LayerNorm's usual 1e-5 blunts comparisons on long words.

    Raises:
        CRaspError: the output is a count, or the program is too deep, too wide, or has factors too large for float64
            at this length; says the line and the column.
        ValueError: an unknown norm, n_ctx below 2, eps negative, an alphabet that is empty or has a symbol twice.
    """
    if n_ctx < 2 or eps < 0:
        raise ValueError(f"n_ctx must be at least 2, for BOS and a letter, and eps at least 0; got {n_ctx} and {eps:g}")
    named = [e.value for d in program.definitions.values() for e in d.walk() if e.operation == "symbol"]
    letters = tuple(dict.fromkeys(named)) if alphabet is None else tuple(alphabet)
    if not letters or len(set(letters)) < len(letters):
        raise ValueError(f"an alphabet has one symbol or more, each once, got {', '.join(letters) or 'none'}")
    plan = _Plan(formula_of(program))
    if len(plan.held) - 1 > MOST_LAYERS:
        raise program.error(program.output, f"too deep: {len(plan.held) - 1} layers", f"at most {MOST_LAYERS}")
    _check_factors(program, plan, n_ctx)
    stream = _Stream.for_plan(plan)
    if stream.d_model > MOST_WIDTH:
        raise program.error(program.output, f"too wide: {stream.d_model} entries", f"at most {MOST_WIDTH}")
    model = _assemble(plan, stream, letters, norm, n_ctx, eps)
    return CompiledProgram(program, model, letters, sum(bool(sums) for sums in plan.sums))


def _base(formula: Formula, positive: bool = True) -> Literal:
    """A formula without its negations, which cost nothing, and its sign."""
    while formula.operation == "not":
        formula, positive = formula.parts[0], not positive
    return formula, positive


def _literals(node: Formula) -> list[Literal]:
    """The literals of which an "and" is the conjunction, or the negation of an "or" (each once, nested ones opened)."""
    opened: dict[Literal, None] = {}
    waiting = [_base(node, node.operation == "and")]
    literals: dict[Literal, None] = {}
    while waiting:
        here = waiting.pop()
        if here in opened:
            continue
        opened[here] = None
        formula, positive = here
        if formula.depth and formula.operation == ("and" if positive else "or"):
            waiting += [_base(part, positive) for part in reversed(formula.parts)]
        else:
            literals[here] = None
    return list(literals)


def _at_bos(formula: Formula) -> bool:
    """A formula's value at BOS, where no symbol holds and nothing is counted."""
    known: dict[Formula, bool] = {}
    for node in formula.nodes():
        parts = [known[part] for part in node.parts]
        match node.operation:
            case "not":
                known[node] = not parts[0]
            case "and" | "or":
                known[node] = all(parts) if node.operation == "and" else any(parts)
            case "below":
                known[node] = node.constant < 0
            case _:
                known[node] = node.value == "true" and node.operation == "constant"
    return known[formula]


class _Plan:
    """Which truth values the stream holds after each block, and which comparisons each block's attention brings.

    A formula of letters alone is in the embedding. All comparisons of one level of counting are brought by one block;
    a conjunction is made by the first block after its parts. Attributes: `root`, the output without negations, and
    `negated`; `held[j]`, what the stream holds after block j (0: the embedding); `sums[j]`, what block j + 1 brings.
    """

    def __init__(self, output: Formula) -> None:
        self.root, positive = _base(output)
        self.negated = not positive
        stages, uses = self._stages()
        layers = max(1, stages[self.root])
        uses[self.root] = layers + 1
        order = sorted(stages, key=lambda node: node.number)
        self.held = [[n for n in order if stages[n] <= j < uses[n]] for j in range(layers + 1)]
        self.sums = [[n for n in order if n.operation == "below" and stages[n] == j + 1] for j in range(layers)]

    def _stages(self) -> tuple[dict[Formula, int], dict[Formula, int]]:
        """After which block each formula that is needed stands in the stream, and which block needs it last."""
        parts: dict[Formula, list[Formula]] = {}
        waiting = [self.root]
        while waiting:
            node = waiting.pop()
            if node in parts:
                continue
            inner = [_base(p)[0] for p in node.parts] if node.operation == "below" else [f for f, _ in _literals(node)]
            parts[node] = inner if node.depth else []
            waiting += parts[node]
        stages: dict[Formula, int] = {}
        attends = 0
        for depth in range(max(node.depth for node in parts) + 1):
            level = sorted((n for n in parts if n.depth == depth), key=lambda node: node.number)
            compared = [n for n in level if n.operation == "below"]
            if compared:
                attends = 1 + max(attends, *(stages[p] for n in compared for p in parts[n]))
            stages |= dict.fromkeys(compared, attends)
            for node in level:
                if node not in stages:
                    stages[node] = 1 + max(stages[p] for p in parts[node]) if parts[node] else 0
        uses: dict[Formula, int] = {}
        for node, inner in parts.items():
            for part in inner:
                uses[part] = max(uses.get(part, 0), stages[node])
        return stages, uses


def _terms(node: Formula) -> tuple[list[tuple[Literal, int]], int]:
    """A comparison's terms, made odd, and what BOS adds: the constant less what BOS adds to the counts."""
    terms = [(_base(part), 2 * factor) for part, factor in zip(node.parts, node.factors, strict=True)]
    at_bos = sum(n for (formula, positive), n in terms if _at_bos(formula) == positive)
    return terms, 2 * node.constant + 1 - at_bos


def _check_factors(program: Program, plan: _Plan, n_ctx: int) -> None:
    """Raise CRaspError if there are sums of which float64 does not tell the sign."""
    off = 0.0  # what truth values may be off by, so far
    for sums in plan.sums:
        sizes = []
        for node in sums:
            terms, at_bos = _terms(node)
            sizes.append(max(sum(abs(n) for _, n in terms), abs(at_bos)))
            if n_ctx * sizes[-1] * (FLOAT_ERROR + off) > MARGIN:
                problem = f"too wide: a sum of up to {sizes[-1]} per letter, which float64 does not tell from 0"
                raise program.error(program.output, problem, f"smaller factors, or fewer than {n_ctx} positions")
        off = max([off, *(FLOAT_ERROR * n_ctx * size for size in sizes)])


@dataclass(frozen=True)
class _Stream:
    """Where things lie: BOS and other truth values, pairs (-x, x) of what attention brings, fillers.

    Attributes:
        features: truth values that there is room for. arrivals: what attention brings, 1/(t + 1) last.
        live: entries that are not 0 at the second norm of a block, a power of two, so that means over them are exact.
    """

    features: int
    arrivals: int
    live: int

    @classmethod
    def for_plan(cls, plan: _Plan) -> _Stream:
        features = 1 + max(len(held) for held in plan.held)
        arrivals = 1 + max(len(sums) for sums in plan.sums)
        live = 2
        while live < 2 * features or 4 * live < 4 * features + 2 * arrivals + live - 4:
            live *= 2
        return cls(features, arrivals, live)

    @property
    def d_model(self) -> int:
        return 4 * self.live

    @property
    def unit(self) -> int:
        """The entry of 1/(t + 1)."""
        return self.arrival(self.arrivals - 1) + 1

    def arrival(self, number: int) -> int:
        """The first entry of a pair that attention brings."""
        return 4 * self.features + 2 * number

    def filled(self, features: int) -> Vector:
        """Fillers beside so many truth values."""
        entries = np.zeros(self.d_model)
        first, number = self.arrival(self.arrivals), self.live - 2 * features
        entries[first : first + number] = [1, -1] * (number // 2)
        return entries

    def entry(self, place: int, weight: float = 1.0) -> Vector:
        """Return what reads one entry."""
        read = np.zeros(self.d_model)
        read[place] = weight
        return read

    def pair(self, place: int) -> Vector:
        """The entries (-1, 1) that begin at a place."""
        return np.asarray(self.entry(place + 1) - self.entry(place))


class _Units:
    """The hidden units of an MLP without biases, `relu(read · x)` each; those that read the same are one."""

    def __init__(self, stream: _Stream) -> None:
        self.stream = stream
        self.writes: dict[bytes, Vector] = {}

    def relu(self, read: Vector, weight: float = 1.0) -> dict[bytes, float]:
        """Return `weight` times a unit, by what it reads."""
        key = (read + 0.0).tobytes()  # + 0.0: -0 is 0
        self.writes.setdefault(key, np.zeros(self.stream.d_model))
        return {key: weight}

    def least(self, read: Vector, most: Vector | None) -> dict[bytes, float]:
        """Return relu(read), or the smaller of it and `most` where that is given."""
        return self.relu(read) if most is None else self.relu(read) | self.relu(read - most, -1.0)

    def add(self, vector: Vector, value: Value) -> None:
        """Write a value along a vector."""
        for key, weight in value.items():
            self.writes[key] += weight * vector

    def put(self, place: int, value: Value) -> None:
        """Write a value as the pair (-x, x) that begins at a place."""
        self.add(self.stream.pair(place), value)

    def matrices(self) -> tuple[Float[np.ndarray, "d_model unit"], Float[np.ndarray, "unit d_model"]]:
        """W_in and W_out."""
        reads = [np.frombuffer(key) for key in self.writes]
        return np.stack(reads, axis=1), np.stack(list(self.writes.values()))


def _reads(stream: _Stream, held: Sequence[Formula]) -> dict[Literal, Vector]:
    """What reads the value (0 or 1) of every truth value that the stream holds, and of its negation."""
    reads = {}
    for number, formula in enumerate(held, start=1):  # BOS is the first
        reads[formula, True] = stream.entry(4 * number + P)
        reads[formula, False] = stream.entry(4 * number + Q)
    return reads


def _attention(stream: _Stream, held: Sequence[Formula], sums: Sequence[Formula]) -> tuple[np.ndarray, np.ndarray]:
    """W_V and W_O of a block's head: a column and a row for each comparison's sum, then for 1/(t + 1)."""
    reads, is_bos = _reads(stream, held), stream.entry(P)
    columns, rows = [], []
    for number, node in enumerate(sums):
        terms, at_bos = _terms(node)
        columns.append(np.sum([n * reads[literal] for literal, n in terms], axis=0) + at_bos * is_bos)
        rows.append(stream.pair(stream.arrival(number)))
    return np.stack([*columns, is_bos], axis=1), np.stack([*rows, stream.pair(stream.unit - 1)])


def _mlp(
    stream: _Stream, held: Sequence[Formula], sums: Sequence[Formula], after: Sequence[Formula]
) -> tuple[np.ndarray, np.ndarray]:
    """W_in and W_out of a block: what the stream holds and what arrived is taken away, `after` is written.

    Where something arrived, all that is written is as small as 1/(t + 1), the size of a clipped comparison.
    """
    units, reads = _Units(stream), _reads(stream, held)
    whole = stream.entry(P) + stream.entry(Q)  # reads 1: BOS or not
    size = stream.entry(stream.unit) if sums else None
    one = whole if size is None else size
    for number in range(len(held) + 1):
        for place in (4 * number + P, 4 * number + Q):
            units.put(place - 1, units.relu(stream.entry(place), -1.0))
    units.add(stream.filled(len(held) + 1), units.relu(whole, -1.0))
    for first in [stream.arrival(number) for number in range(len(sums))] + [stream.unit - 1] * bool(sums):
        units.put(first, units.relu(stream.entry(first + 1), -1.0) | units.relu(stream.entry(first + 1, -1.0), 1.0))
    for place in (P, Q):  # BOS stays
        units.put(place - 1, units.least(stream.entry(place), size))
    for number, node in enumerate(after, start=1):
        for place, value in zip((P, Q), _truth(units, reads, sums, node, size, one, whole), strict=True):
            for part in value:
                units.put(4 * number + place - 1, part)
    units.add(stream.filled(len(after) + 1), units.relu(one))
    return units.matrices()


def _truth(
    units: _Units,
    reads: Mapping[Literal, Vector],
    sums: Sequence[Formula],
    node: Formula,
    size: Vector | None,
    one: Vector,
    whole: Vector,
) -> tuple[list[dict[bytes, float]], list[dict[bytes, float]]]:
    """A formula and its negation as sums of units: kept, a clipped comparison, or a conjunction of what is held."""
    if (node, True) in reads:
        positive, negative = (units.least(reads[node, sign], size) for sign in (True, False))
        return [positive], [negative]
    if node in sums:
        mean = units.stream.entry(units.stream.arrival(sums.index(node)) + 1)
        below, above = ([units.relu(sign * mean + one, 0.5), units.relu(sign * mean - one, -0.5)] for sign in (-1, 1))
        return below, above
    literals = [reads[literal] for literal in _literals(node)]
    all_hold = units.least(np.sum(literals, axis=0) - (len(literals) - 1) * whole, size)
    rest = [units.relu(one), {key: -weight for key, weight in all_hold.items()}]
    return ([all_hold], rest) if node.operation == "and" else (rest, [all_hold])


def _embedding(stream: _Stream, held: Sequence[Formula], letters: Sequence[str]) -> Float[np.ndarray, "token d_model"]:
    """The vectors of BOS and of the letters."""
    rows = []
    for symbol in (None, *letters):
        row = stream.filled(len(held) + 1) + stream.pair((P if symbol is None else Q) - 1)
        for number, formula in enumerate(held, start=1):
            holds = _at_bos(formula) if symbol is None else formula.values([symbol])[0]
            row += stream.pair(4 * number + (P if holds else Q) - 1)
        rows.append(row)
    return np.stack(rows)


def _assemble(
    plan: _Plan, stream: _Stream, letters: Sequence[str], norm: str, n_ctx: int, eps: float
) -> LabTransformer:
    """A lab model with these weights. A quarter of the entries are as long as each other, so a norm that scales makes
    them 2, and its gain of 1/2 makes them 1; the others divide by 1/2."""
    blocks = []
    for held, sums, after in zip(plan.held, plan.sums, plan.held[1:], strict=False):
        W_V, W_O = _attention(stream, held, sums)
        blocks.append((*((W_V, W_O) if sums else (W_V[:, :0], W_O[:0])), *_mlp(stream, held, sums, after)))
    cfg = LabConfig(
        n_layers=len(blocks), d_model=stream.d_model, n_heads=1, d_head=max(1, *(W_V.shape[1] for W_V, *_ in blocks)),
        d_mlp=max(W_in.shape[1] for *_, W_in, _ in blocks), d_vocab=len(letters) + 1, n_ctx=n_ctx, norm=norm,
        norm_mlp=norm, eps=eps, norm_final=None, norm_order="post", divisor=None if norm in SCALES else 0.5,
        positions="none", tied=False, act_fn="relu", bias_qkv=False, bias_out=False, bias_mlp=False, bias_unembed=False,
    )  # fmt: skip
    model = LabTransformer(cfg).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.embed.W_E.copy_(torch.from_numpy(_embedding(stream, plan.held[0], letters)))
        assert model.unembed.untied is not None
        for logit, place in enumerate((P, Q) if plan.negated else (Q, P)):
            model.unembed.untied[4 + place, logit] = 1.0
        for block, (W_V, W_O, W_in, W_out) in zip(model.blocks, blocks, strict=True):
            for ln in (block.ln1, block.ln2):
                cast("Tensor", ln.w).fill_(0.5)
                if ln.divisor is not None:
                    cast("Tensor", ln.divisor).fill_(0.5)
            block.attn.W_V[0, :, : W_V.shape[1]] = torch.from_numpy(W_V)
            block.attn.W_O[0, : len(W_O)] = torch.from_numpy(W_O)
            block.mlp.W_in[:, : W_in.shape[1]] = torch.from_numpy(W_in.copy())
            block.mlp.W_out[: len(W_out)] = torch.from_numpy(W_out)
    return cast("LabTransformer", model.eval())
