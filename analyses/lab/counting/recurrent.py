"""Recurrent taggers: LSTM, GRU, tanh- and ReLU-RNN, QRNN and QRNN+, with a LayerNorm term inside the cell.

Where the norm stands (`norm_site`): on W_ih x and W_hh h before the gates' nonlinearities ("gates"; Ba, Kiros & Hinton
2016, equations 20-22), on the LSTM's cell state as the output sees it ("readout"), or on the recurrent state, which is
replaced by its norm at every step ("state"). Inside a recurrence nothing may shrink or grow the state a little at each
step, so `projection_only` divides by 1, and a norm on the state has no gain or bias.

Torch's kernels run layers without a norm. They have no place for one, so a layer with a norm goes step by step, in as
few operations as possible: an update with 16 words of 64 letters takes 3 to 10 ms. Cells compiled with numba and
gradients by hand, in 490 lines, took 2.2 to 3.0 times less for LSTMs and ReLU-RNNs, and 2.8 to 3.8 for GRUs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from ln_probe.analyses.lab.norms import SCALES, Norm

CELLS = ("lstm", "gru", "rnn_tanh", "rnn_relu", "qrnn", "qrnn f", "qrnn ifo", "qrnn+")
QRNN_WINDOW = 2  # of the first layer, 1 above: the default of the library that the published QRNNs came from


@dataclass(frozen=True)
class RecurrentConfig:
    """Shape of a recurrent tagger."""

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
        """A model of this shape, initialized from torch's global generator."""
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
        if self.cfg.norm == "none":
            out: Tensor = self.weights(x)[0]
            return out
        return self.unfused(x)

    def unfused(self, x: Float[Tensor, "batch pos width"]) -> Float[Tensor, "batch pos hidden"]:
        """The recurrence step by step, with the norm in its place."""
        step = self.step()
        h = c = x.new_zeros(x.shape[0], self.cfg.hidden)
        outputs = []
        for i in self.inputs(x).unbind(1):
            h, c = step(i, h, c)
            outputs.append(h)
        return torch.stack(outputs, dim=1)

    def inputs(self, x: Float[Tensor, "batch pos width"]) -> Float[Tensor, "batch pos gate"]:
        """What the inputs and biases give to the gates: W_ih x, normed if that is the norm's site, and b."""
        W, _, b, b_hh = self._tensors()
        gates = _normed_product(self.norm_input, W)(x.flatten(0, 1)) + b
        if self.cfg.cell != "gru":  # whose reset gate scales W_hh h + b_hh
            gates = (gates + b_hh) * self._slopes()
        return gates.view(*x.shape[:-1], -1)

    def _tensors(self) -> list[Tensor]:
        """W_ih, W_hh, b_ih, b_hh."""
        return list(self.weights.parameters())

    def _slopes(self) -> Float[Tensor, " gate"]:
        """Ones, but 2 for an LSTM's new content: tanh(x) = 2 sigmoid(2x) - 1, so one sigmoid serves all its gates."""
        like = self._tensors()[1]
        slopes = [1, 1, 2, 1] if self.cfg.cell == "lstm" else [1] * (len(like) // self.cfg.hidden)
        return torch.tensor(slopes, dtype=like.dtype, device=like.device).repeat_interleave(self.cfg.hidden)

    def step(self) -> Step:
        """Return what makes h and c (an LSTM's; others leave it alone) of one more letter, given what it adds."""
        H, (_, W_hh, _, b) = self.cfg.hidden, self._tensors()
        norm, slopes = self.norm_recurrent, self._slopes()
        W, product = W_hh.T * slopes, _normed_product(norm, W_hh)
        state = (lambda h: h) if self.norm_state is None else _normed_product(self.norm_state, torch.eye(H).to(W))
        on_state, activation = self.cfg.norm_site == "state", torch.tanh if self.cfg.cell == "rnn_tanh" else torch.relu

        def total(i: Tensor, h: Tensor) -> Tensor:
            return torch.addmm(i, h, W) if norm is None else torch.addcmul(i, product(h), slopes)

        def lstm(i: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
            put, keep, new, show = torch.unsafe_chunk(torch.sigmoid(total(i, h)), 4, dim=-1)
            c = torch.addcmul(keep * c - put, put, new, value=2)
            seen = state(c)
            return show * torch.tanh(seen), seen if on_state else c

        def gru(i: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
            both, new = torch.unsafe_split_with_sizes(total(b, h), [2 * H, H], dim=-1)
            i_both, i_new = torch.unsafe_split_with_sizes(i, [2 * H, H], dim=-1)
            reset, update = torch.unsafe_chunk(torch.sigmoid(i_both + both), 2, dim=-1)
            new = torch.tanh(torch.addcmul(i_new, reset, new))
            return state(torch.lerp(new, h, update)), c

        def elman(i: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
            return state(activation(total(i, h))), c

        return {"lstm": lstm, "gru": gru}.get(self.cfg.cell, elman)


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
    # The mean of (x, -x) is 0, so its LayerNorm, one compiled operation, scales x and projects nothing.
    mirrored = torch.cat([W.T, -W.T], dim=1)
    w, b = (None if v is None else F.pad(v, (0, size)) for v in (gain, bias))
    return lambda h: torch.unsafe_chunk(F.layer_norm(h @ mirrored, (2 * size,), w, b, eps), 2, dim=-1)[0]
