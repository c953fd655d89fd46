"""Recurrent taggers: LSTM, GRU, tanh- and ReLU-RNN, QRNN and QRNN+, with a LayerNorm term inside the cell.

Where the norm stands (`norm_site`):

    gates     on W_ih x and W_hh h before the nonlinearities (Ba, Kiros & Hinton 2016, equations 20-22)
    readout   on the LSTM's cell state as the output sees it
    state     on the recurrent state, which is replaced by its norm at every step

Inside a recurrence nothing may shrink or grow the state a little at each step, so `projection_only` divides by 1, and a
norm on the state has no gain or bias.

Torch's kernels have no place for a norm, so a layer with one goes step by step, and
so does a GRU, whose kernel is slow (`_differentiable`). An update with 16 words of 64 letters takes 2 to 5 ms. Cells
compiled with numba, with gradients by hand in 490 lines, took 1.7 to 2.9 times less.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from ln_probe.analyses.lab.norms import SCALES, Norm

QRNN_WINDOW = 2  # of the first layer, 1 above: the default of the library that the published QRNNs came from


@dataclass(frozen=True)
class RecurrentConfig:
    """Shape of a recurrent tagger; `cell` is of _KERNELS, or "qrnn", "qrnn f", "qrnn ifo" or "qrnn+"."""

    cell: str
    d_vocab: int
    d_out: int
    d_embed: int = 4
    hidden: int = 10
    n_layers: int = 1
    norm: str = "none"
    norm_site: str = "gates"
    eps: float = 1e-5

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def build(self) -> RecurrentTagger:
        """A random model of this shape (torch's global generator)."""
        return RecurrentTagger(self)


class RecurrentTagger(nn.Module):
    """Embedding, recurrent layers, a linear output at every position.

    Weights start as torch's own recurrent layers do, from torch's global generator.
    """

    def __init__(self, cfg: RecurrentConfig) -> None:
        super().__init__()
        self.cfg = cfg
        self.embed = nn.Embedding(cfg.d_vocab, cfg.d_embed)
        widths = [cfg.d_embed] + [cfg.hidden] * (cfg.n_layers - 1)
        layer = QRNNLayer if cfg.cell.startswith("qrnn") else NormedLayer
        self.layers = nn.ModuleList(layer(cfg, width, QRNN_WINDOW if i == 0 else 1) for i, width in enumerate(widths))
        self.plus = nn.Linear(cfg.hidden, cfg.hidden) if cfg.cell == "qrnn+" else None
        self.out = nn.Linear(cfg.hidden, cfg.d_out)

    def forward(self, tokens: Int[Tensor, "batch pos"]) -> Float[Tensor, "batch pos d_out"]:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        if self.plus is not None:
            x = torch.sigmoid(self.plus(x))
        logits: Tensor = self.out(x)
        return logits


class QRNNLayer(nn.Module):
    """A quasi-recurrent layer (Bradbury et al. 2017): c = f c + i z, h = o c.

    z, f, o and i are convolutions over the last `window` inputs, so the state never enters a gate: a weighted sum of
    its inputs, which is why it is rationally recurrent (Merrill et al. 2020). Pooling "fo" has i = 1 - f, "f" also
    o = 1; with "ifo" the input has a separate gate, so that f = i = 1 can count.
    """

    def __init__(self, cfg: RecurrentConfig, width: int, window: int) -> None:
        super().__init__()
        self.window = window
        self.pooling = {"qrnn f": "f", "qrnn ifo": "ifo"}.get(cfg.cell, "fo")
        self.gates = nn.Linear(width * window, (len(self.pooling) + 1) * cfg.hidden)

    def forward(self, x: Float[Tensor, "batch pos width"]) -> Float[Tensor, "batch pos hidden"]:
        shifted = [F.pad(x, (0, 0, back, 0))[:, : x.shape[1]] for back in range(self.window)]
        keep, added, out = self.terms(torch.cat(shifted, dim=-1))
        states = [added[:, 0]]
        for k, new in zip(keep.unbind(1)[1:], added.unbind(1)[1:], strict=True):
            states.append(k * states[-1] + new)
        return out * torch.stack(states, dim=1)

    def terms(self, window: Float[Tensor, "*place inputs"]) -> tuple[Tensor, Tensor, Tensor]:
        """f, i z and o of the inputs of a window, one after the other, the last first."""
        z, f, *others = self.gates(window).chunk(len(self.pooling) + 1, dim=-1)
        f = torch.sigmoid(f)
        put = torch.sigmoid(others[1]) if self.pooling == "ifo" else 1 - f
        return f, put * torch.tanh(z), torch.sigmoid(others[0]) if others else torch.ones_like(f)


_KERNELS: dict[str, Callable[..., nn.RNNBase]] = {
    "lstm": nn.LSTM,
    "gru": nn.GRU,
    "rnn_tanh": nn.RNN,
    "rnn_relu": lambda *sizes, **options: nn.RNN(*sizes, nonlinearity="relu", **options),
}
Step = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]  # gates' input, h, c -> h, c


class NormedLayer(nn.Module):
    """One LSTM, GRU or Elman layer with torch's weights."""

    def __init__(self, cfg: RecurrentConfig, width: int, window: int) -> None:
        super().__init__()
        self.cfg = cfg
        self.weights = _KERNELS[cfg.cell](width, cfg.hidden, batch_first=True)
        self.norm_input = self.norm_recurrent = self.norm_state = None
        if cfg.norm != "none" and cfg.norm_site == "gates":
            rows = len(self._tensors()[1])
            self.norm_input, self.norm_recurrent = _inside(cfg, rows), _inside(cfg, rows)
        elif cfg.norm != "none":
            self.norm_state = _inside(cfg, cfg.hidden, affine=cfg.norm_site == "readout")

    def forward(self, x: Float[Tensor, "batch pos width"]) -> Float[Tensor, "batch pos hidden"]:
        if self.cfg.norm == "none" and (self.cfg.cell != "gru" or not torch.is_grad_enabled()):
            out: Tensor = self.weights(x)[0]
            return out
        return self.unfused(x)

    def unfused(self, x: Float[Tensor, "batch pos width"]) -> Float[Tensor, "batch pos hidden"]:
        """The recurrence step by step, with the norm in its place."""
        step, inputs = self.step(), self.inputs(x)
        start = h = c = self.start(len(x))
        with_jacobians = self.cfg.cell == "gru" and torch.is_grad_enabled()
        states = []
        with torch.no_grad() if with_jacobians else nullcontext():
            for i in inputs.unbind(1):
                h, c = step(i, h, c)
                states.append(h)
        if with_jacobians:
            return _differentiable(step, inputs, torch.stack([start, *states[:-1]], dim=1))
        return torch.stack(states, dim=1)[..., : self.cfg.hidden]

    def start(self, batch: int) -> Float[Tensor, "batch memory"]:
        """h and c before the first letter."""
        width = (1 + self._mirrored) * self.cfg.hidden
        return self._tensors()[1].new_zeros(batch, width)

    def inputs(self, x: Float[Tensor, "batch pos width"]) -> Float[Tensor, "batch pos gate"]:
        """What the inputs and biases give to the gates: W_ih x, normed if that is the norm's site, and b."""
        W, _, b, b_hh = self._tensors()
        (columns, of_state), letters = self._columns(), x.flatten(0, 1)
        bias = b @ columns + b_hh @ of_state
        if self.norm_input is None:
            gates = torch.addmm(bias, letters, W.T @ columns)
        else:
            gates = torch.addmm(bias, _normed_product(self.norm_input, W)(letters), columns)
        return gates.view(*x.shape[:-1], -1)

    def step(self) -> Step:
        """Return what makes h and c (an LSTM's; others leave it alone) of one more letter, given what it adds."""
        H = self.cfg.hidden
        M = (1 + self._mirrored) * H  # numbers in h and c
        W_hh, (_, columns) = self._tensors()[1], self._columns()
        W = F.pad(W_hh.T @ columns, (0, 0, 0, M - H))
        product = _normed_product(self.norm_recurrent, W_hh)
        eye = torch.eye(H).to(W_hh)
        half = eye.new_full((H,), 0.5)
        twice = 2 * torch.cat([eye, -eye][: M // H], dim=1)  # tanh = 2 (new - 1/2)
        state: Callable[[Tensor], Tensor] = lambda h: h  # noqa: E731
        if self.norm_state is not None:
            state = _scaled_pair(self.norm_state) if self._mirrored else _normed_product(self.norm_state, eye)
        on_state = self.cfg.norm_site == "state"
        activation = torch.tanh if self.cfg.cell == "rnn_tanh" else torch.relu

        def total(i: Tensor, h: Tensor) -> Tensor:
            if self.norm_recurrent is None:
                return torch.addmm(i, h, W)
            return torch.addmm(i, product(h), columns)

        def lstm(i: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
            gates = torch.sigmoid(total(i, h))
            put, keep, new, show = torch.unsafe_split_with_sizes(gates, [H, M, H, M], dim=-1)
            c = torch.addmm(keep * c, put * (new - half), twice)
            seen = state(c)
            return show * torch.tanh(seen), seen if on_state else c

        def gru(i: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
            gates, old, new = torch.unsafe_split_with_sizes(total(i, h), [2 * H, H, H], dim=-1)
            reset, update = torch.unsafe_chunk(torch.sigmoid(gates), 2, dim=-1)
            new = torch.tanh(torch.addcmul(new, reset, old))
            return state(torch.lerp(new, h, update)), c

        def elman(i: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
            return state(activation(total(i, h))), c

        return {"lstm": lstm, "gru": gru}.get(self.cfg.cell, elman)

    @property
    def _mirrored(self) -> bool:
        """Whether it carries (h, -h) and (c, -c): an LSTM whose c is scaled but not projected."""
        norm = self.norm_state
        return self.cfg.cell == "lstm" and norm is not None and norm.kind == "scaling_only"

    def _columns(self) -> tuple[Float[Tensor, "gate column"], Float[Tensor, "gate column"]]:
        """Map the gates, as the inputs and as the state give them, to the columns that a step adds up.

        An LSTM's new content is doubled: tanh(x) = 2 sigmoid(2x) - 1, so one sigmoid serves all its gates. What
        multiplies a mirrored c stands twice. A GRU's reset gate scales what the state gives to new content.
        """
        H, W_hh = self.cfg.hidden, self._tensors()[1]
        eye = torch.eye(H).to(W_hh)
        if self.cfg.cell == "gru":
            apart = torch.eye(4 * H).to(W_hh)
            return torch.cat([apart[: 2 * H], apart[3 * H :]]), apart[: 3 * H]
        if self.cfg.cell == "lstm":
            copies = eye.repeat(1, 1 + self._mirrored)
            eye = torch.block_diag(eye, copies, 2 * eye, copies)
        return eye, eye

    def _tensors(self) -> list[Tensor]:
        """W_ih, W_hh, b_ih, b_hh."""
        return list(self.weights.parameters())


def _differentiable(
    step: Step, inputs: Float[Tensor, "batch pos gate"], before: Float[Tensor, "batch pos hidden"]
) -> Float[Tensor, "batch pos hidden"]:
    """Take all steps of a GRU at once, from the states before them; gradients go back through time, once.

    The gradient by a state is the direct one plus that by the next state times the Jacobian of the step between. So it
    is a recurrence, too, and as many backward passes as a state has numbers give the Jacobians of all letters.
    """
    batch, pos, hidden = before.shape
    h = before.flatten(0, 1).requires_grad_()
    after, _ = step(inputs.flatten(0, 1), h, h)
    rows: list[Tensor] = []
    for unit in torch.eye(hidden).to(h):
        rows += torch.autograd.grad(after, h, unit.expand_as(h), retain_graph=True)
    jacobians = torch.stack(rows, dim=1).view(batch, pos, hidden, hidden).unbind(1)

    def through_time(gradient: Tensor) -> Tensor:
        total = list(gradient.view(batch, pos, 1, hidden).unbind(1))
        for t in range(pos - 1, 0, -1):
            total[t - 1] = torch.baddbmm(total[t - 1], total[t], jacobians[t])
        return torch.stack(total, dim=1).view_as(gradient)

    after.register_hook(through_time)
    return after.view_as(before)


def _inside(cfg: RecurrentConfig, size: int, affine: bool = True) -> Norm:
    divisor = None if cfg.norm in SCALES else 1.0
    return Norm(cfg.norm, size, eps=cfg.eps, divisor=divisor, gain=affine, bias=affine)


def _normed_product(norm: Norm | None, W: Float[Tensor, "out in"]) -> Callable[[Tensor], Tensor]:
    """Return a function that computes norm(W h) in few operations."""
    if norm is None:
        return lambda h: h @ W.T
    size, eps, gain, bias = norm.d_model, norm.eps, norm.w, norm.b
    if norm.kind == "layernorm":
        return lambda h: F.layer_norm(h @ W.T, (size,), gain, bias, eps)
    if norm.kind == "projection_only":
        projected = W.T - W.T.mean(1, keepdim=True)
        product = projected if gain is None else projected * gain
        return lambda h: h @ product if bias is None else torch.addmm(bias, h, product)
    mirrored, scaled = torch.cat([W.T, -W.T], dim=1), _scaled_pair(norm)
    return lambda h: torch.unsafe_chunk(scaled(h @ mirrored), 2, dim=-1)[0]


def _scaled_pair(norm: Norm) -> Callable[[Tensor], Tensor]:
    """Return a function that scales (x, -x): the mean of the pair is 0, so LayerNorm projects nothing."""
    gain = None if norm.w is None else torch.cat([norm.w, norm.w])
    bias = None if norm.b is None else torch.cat([norm.b, -norm.b])
    return lambda pair: F.layer_norm(pair, pair.shape[1:], gain, bias, norm.eps)
