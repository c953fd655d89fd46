"""Recurrent taggers: LSTM, GRU, tanh- and ReLU-RNN, QRNN and QRNN+, with a LayerNorm term inside the cell.

Where the norm stands (`norm_site`):

    gates     on W_ih x and on W_hh h, before the gates' nonlinearities (Ba, Kiros & Hinton 2016, equations 20-22)
    readout   on the LSTM's cell state as the output sees it, h = o tanh(Norm(c)); the state itself stays (ibid.)
    state     on the recurrent state, which is replaced by its norm at every step

`norm="none"` is the plain cell. Inside a recurrence nothing may shrink or grow the state a little at each step, so
`projection_only` divides by 1 here and not by a calibrated constant, and a norm on the state has no gain or bias.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from ln_probe.analyses.lab.counting.recurrent_steps import CELL_NUMBERS, NO_NORM, pooled, recurrence, switch_of
from ln_probe.analyses.lab.norms import NORM_KINDS, SCALES, Norm

CELLS = ("lstm", "gru", "rnn_tanh", "rnn_relu", "qrnn", "qrnn+")
NORM_SITES = ("gates", "readout", "state")
QRNN_WINDOW = 2  # of the first layer, 1 above: the default of the library that the published QRNNs came from


@dataclass(frozen=True)
class RecurrentConfig:
    """Shape of a recurrent tagger.

    Raises (on construction):
        ValueError: a size below 1; an unknown cell, norm or norm_site; a norm that this cell has no place for.
    """

    cell: str
    d_vocab: int
    d_out: int
    d_embed: int = 4
    hidden: int = 10
    n_layers: int = 1
    norm: str = "none"
    norm_site: str = "gates"
    eps: float = 1e-5

    def __post_init__(self) -> None:
        for name in ("d_vocab", "d_out", "d_embed", "hidden", "n_layers"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name, known in (("cell", CELLS), ("norm", NORM_KINDS), ("norm_site", NORM_SITES)):
            if getattr(self, name) not in known:
                raise ValueError(f"unknown {name} {getattr(self, name)!r}: known are {', '.join(known)}")
        if self.norm != "none":
            if self.cell.startswith("qrnn"):
                raise ValueError(f"a {self.cell} has no recurrent product to normalize: use norm='none'")
            if self.norm_site == "readout" and self.cell != "lstm":
                raise ValueError(f"a {self.cell} has no readout of its state: norm_site must be 'gates' or 'state'")

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
        """Logits at every position."""
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        if self.plus is not None:
            x = torch.sigmoid(self.plus(x))
        logits: Tensor = self.out(x)
        return logits


class QRNNLayer(nn.Module):
    """A quasi-recurrent layer with fo-pooling (Bradbury et al. 2017): c = f c + (1 - f) z, h = o c.

    z, f and o are convolutions over the last `window` inputs, so the state never enters a gate: a weighted average of
    its inputs, which is why it is rationally recurrent (Merrill et al. 2020).
    """

    def __init__(self, cfg: RecurrentConfig, width: int, window: int) -> None:
        super().__init__()
        self.window = window
        self.gates = nn.Linear(width * window, 3 * cfg.hidden)

    def forward(self, x: Float[Tensor, "batch pos width"]) -> Float[Tensor, "batch pos hidden"]:
        shifted = [F.pad(x, (0, 0, back, 0))[:, : x.shape[1]] for back in range(self.window)]
        z, f, o = self.gates(torch.cat(shifted, dim=-1)).chunk(3, dim=-1)
        f = torch.sigmoid(f)
        added = (1 - f) * torch.tanh(z)
        return torch.sigmoid(o) * (pooled(f, added) if x.device.type == "cpu" else step_by_step(f, added))


def step_by_step(keep: Float[Tensor, "batch pos hidden"], added: Float[Tensor, "batch pos hidden"]) -> Tensor:
    """c_t = keep_t c_(t-1) + added_t in torch's operations; [batch pos hidden]."""
    state = torch.zeros_like(added[:, 0])
    states = []
    for k, new in zip(keep.unbind(1), added.unbind(1), strict=True):
        state = k * state + new
        states.append(state)
    return torch.stack(states, dim=1)


_FUSED: dict[str, Callable[..., nn.RNNBase]] = {
    "lstm": nn.LSTM,
    "gru": nn.GRU,
    "rnn_tanh": nn.RNN,
    "rnn_relu": lambda *sizes, **options: nn.RNN(*sizes, nonlinearity="relu", **options),
}


class NormedLayer(nn.Module):
    """One LSTM, GRU or Elman layer with torch's weights.

    Torch runs the LSTM without a norm, compiled loops (`recurrent_steps`) all else on the CPU: 16 words of 64 letters
    there and back take an LSTM 0.6 ms in torch's kernel and 0.9 in the loops, a GRU 4.9 and 1.5, with a norm 1.5 to 2.4
    where step by step takes 7 to 8 (`bench/recurrence.py`). Step by step (`unfused`) runs what is on another device, or
    whose norm somebody hooks.
    """

    def __init__(self, cfg: RecurrentConfig, width: int, window: int) -> None:
        super().__init__()
        self.cfg = cfg
        self.weights = _FUSED[cfg.cell](width, cfg.hidden, batch_first=True)
        self.norm_input = self.norm_recurrent = self.norm_state = None
        if cfg.norm != "none" and cfg.norm_site == "gates":
            rows = self._tensors()[1].shape[0]
            self.norm_input, self.norm_recurrent = _inside(cfg, rows), _inside(cfg, rows)
        elif cfg.norm != "none":
            self.norm_state = _inside(cfg, cfg.hidden, affine=cfg.norm_site == "readout")

    def forward(self, x: Float[Tensor, "batch pos width"]) -> Float[Tensor, "batch pos hidden"]:
        norm = self.norm_recurrent or self.norm_state
        if norm is None and (self.cfg.cell == "lstm" or x.device.type != "cpu"):
            out: Tensor = self.weights(x)[0]
            return out
        if x.device.type != "cpu" or (norm is not None and norm.hooked):
            return self.unfused(x)
        _, w_hh, _, b_hh = self._tensors()
        size = self.cfg.hidden if norm is None else norm.d_model
        gain = x.new_ones(size) if norm is None or norm.w is None else norm.w
        bias = x.new_zeros(size) if norm is None or norm.b is None else norm.b
        switch = NO_NORM if norm is None else switch_of(norm, self.cfg.norm_site)
        return recurrence(CELL_NUMBERS[self.cfg.cell], switch, self.inputs(x), w_hh, b_hh, gain, bias)

    def unfused(self, x: Float[Tensor, "batch pos width"]) -> Float[Tensor, "batch pos hidden"]:
        """The same recurrence, step by step, with the norm in its place."""
        h = c = x.new_zeros(x.shape[0], self.cfg.hidden)
        outputs = []
        for i in self.inputs(x).unbind(1):
            h, c = self.step(i, h, c)
            outputs.append(h)
        return torch.stack(outputs, dim=1)

    def step(
        self,
        i: Float[Tensor, "batch gate"],
        h: Float[Tensor, "batch hidden"],
        c: Float[Tensor, "batch hidden"],
    ) -> tuple[Float[Tensor, "batch hidden"], Float[Tensor, "batch hidden"]]:
        """h and c (an LSTM's; others leave it alone) after one more letter, of which the gates get `i`."""
        _, w_hh, _, b_hh = self._tensors()
        r = F.linear(h, w_hh)
        if self.norm_recurrent is not None:
            r = self.norm_recurrent(r)
        r = r + b_hh
        if self.cfg.cell == "lstm":
            return self._lstm(i + r, c)
        if self.cfg.cell == "gru":
            return self._state(_gru(i, r, h)), c
        return self._state(torch.tanh(i + r) if self.cfg.cell == "rnn_tanh" else torch.relu(i + r)), c

    def inputs(self, x: Float[Tensor, "batch pos width"]) -> Float[Tensor, "batch pos gate"]:
        """What the inputs give to the gates: W_ih x, normed if the norm stands there, and b_ih."""
        w_ih, _, b_ih, _ = self._tensors()
        inputs = F.linear(x, w_ih)
        if self.norm_input is not None:
            inputs = self.norm_input(inputs)
        return inputs + b_ih

    def _tensors(self) -> list[Tensor]:
        """W_ih, W_hh, b_ih, b_hh."""
        return list(self.weights.parameters())

    def _state(self, state: Tensor) -> Tensor:
        """The recurrent state as the next step gets it."""
        return state if self.norm_state is None else cast("Tensor", self.norm_state(state))

    def _lstm(self, gates: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        i, f, g, o = gates.chunk(4, dim=-1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        if self.cfg.norm_site == "state":
            c = self._state(c)
            return torch.sigmoid(o) * torch.tanh(c), c
        seen = self._state(c) if self.cfg.norm_site == "readout" else c
        return torch.sigmoid(o) * torch.tanh(seen), c


def _gru(i: Tensor, r: Tensor, h: Tensor) -> Tensor:
    """One step from the input's and the recurrent part of [reset, update, new] (torch.nn.GRU's order)."""
    (i_reset, i_update, i_new), (r_reset, r_update, r_new) = i.chunk(3, dim=-1), r.chunk(3, dim=-1)
    update = torch.sigmoid(i_update + r_update)
    return update * h + (1 - update) * torch.tanh(i_new + torch.sigmoid(i_reset + r_reset) * r_new)


def _inside(cfg: RecurrentConfig, size: int, affine: bool = True) -> Norm:
    divisor = None if cfg.norm in SCALES else 1.0
    return Norm(cfg.norm, size, eps=cfg.eps, divisor=divisor, gain=affine, bias=affine)
