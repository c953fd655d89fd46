"""Recurrent taggers: LSTM, GRU, tanh- and ReLU-RNN, QRNN and QRNN+, with a LayerNorm term inside the cell.

Where the norm stands (`norm_site`): on W_ih x and W_hh h before the gates' nonlinearities ("gates"; Ba, Kiros & Hinton
2016, equations 20-22), on the LSTM's cell state as the output sees it ("readout"), or on the recurrent state, which is
replaced by its norm at every step ("state"). Inside a recurrence nothing may shrink or grow the state a little at each
step, so `projection_only` divides by 1, and a norm on the state has no gain or bias.

Torch's fused recurrences have no place for a norm, and step by step autograd is five to ten times slower than compiled
loops. So all steps of a batch run in one loop, in float64, with the derivatives written out; a test compares them with
autograd (`unfused`). Arrays are [step, row, example], so that the innermost loops run over the examples.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, cast

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from ln_probe.analyses.geometry.compiled import compiled
from ln_probe.analyses.lab.norms import SCALES, Norm

LSTM, GRU, TANH, RELU = range(4)
CELL_NUMBERS = {"lstm": LSTM, "gru": GRU, "rnn_tanh": TANH, "rnn_relu": RELU}
GATES, READOUT, STATE, NOWHERE = range(4)
SITE_NUMBERS = {"gates": GATES, "readout": READOUT, "state": STATE}


class NormSwitch(NamedTuple):
    """A norm as the loops see it: project or not, scale each vector (with eps) or all by `constant`."""

    site: int
    projects: bool
    scales: bool
    eps: float
    constant: float


NO_NORM = NormSwitch(NOWHERE, projects=False, scales=False, eps=0.0, constant=1.0)


def pooled(
    keep: Float[Tensor, "batch pos hidden"], added: Float[Tensor, "batch pos hidden"]
) -> Float[Tensor, "batch pos hidden"]:
    """c_t = keep_t c_(t-1) + added_t from c_0 = 0 (a QRNN's pooling)."""
    states = [added[:, 0]]
    for k, new in zip(keep.unbind(1)[1:], added.unbind(1)[1:], strict=True):
        states.append(k * states[-1] + new)
    return torch.stack(states, dim=1)


class _Recurrence(torch.autograd.Function):
    """Hidden states h_1 … h_T [batch pos hidden] from h_0 = c_0 = 0, differentiable once in every tensor.

    The tensors: W_ih x (normed, if its norm stands before the gates) + b_ih [batch pos gate]; W_hh and b_hh in torch's
    order of the gates; gain and bias of the norm (ones and zeros where it has none), as long as what is normed.
    """

    @staticmethod
    def forward(ctx: Any, cell: int, norm: NormSwitch, *tensors: Tensor) -> Tensor:
        inputs, w_hh, b_hh, gain, bias = (t.detach().double().numpy() for t in tensors)
        x = np.ascontiguousarray(inputs.transpose(1, 2, 0))
        weights = tuple(np.ascontiguousarray(w) for w in (w_hh, b_hh, gain, bias))
        kept = _forward(cell, norm, x, *weights)
        ctx.cell, ctx.norm, ctx.weights, ctx.kept, ctx.dtype = cell, norm, weights, kept, tensors[0].dtype
        return torch.from_numpy(np.ascontiguousarray(kept[0][1:].transpose(2, 0, 1))).to(tensors[0].dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        norm = ctx.norm
        d_out = np.ascontiguousarray(upstream.double().numpy().transpose(1, 2, 0))
        w_hh, _, gain, _ = ctx.weights
        hidden, _, _, _, _, normalized, _ = ctx.kept
        d_inputs, d_linear, d_gained = _backward(ctx.cell, norm, w_hh, gain, ctx.kept, d_out)
        d_w = np.tensordot(d_linear, hidden[:-1], axes=((0, 2), (0, 2)))
        d_bias = d_gained.sum(axis=(0, 2))
        d_b = d_bias if norm.site == GATES else d_linear.sum(axis=(0, 2))
        d_gain = (d_gained * normalized).sum(axis=(0, 2))
        gradients = (d_inputs.transpose(2, 0, 1), d_w, d_b, d_gain, d_bias)
        return (None, None, *(torch.from_numpy(np.ascontiguousarray(g)).to(ctx.dtype) for g in gradients))


@compiled
def _sigmoid(x: float) -> float:
    return 1.0 / (1.0 + np.exp(-x))  # type: ignore[no-any-return]


@compiled
def _normalize(x: Any, factor: Any, norm: NormSwitch) -> None:
    """x [row, example] becomes its norm; `factor` [example] is u."""
    rows, examples = x.shape
    for i in range(examples):
        mean = 0.0
        if norm.projects:
            for j in range(rows):
                mean += x[j, i]
            mean /= rows
        square = 0.0
        for j in range(rows):
            x[j, i] -= mean
            square += x[j, i] * x[j, i]
        factor[i] = 1.0 / np.sqrt(square / rows + norm.eps) if norm.scales else norm.constant
        for j in range(rows):
            x[j, i] *= factor[i]


@compiled
def _normalize_back(d: Any, normalized: Any, factor: Any, norm: NormSwitch) -> None:
    """The gradient by the norm's output becomes that by its input."""
    rows, examples = d.shape
    for i in range(examples):
        along = 0.0
        if norm.scales:
            for j in range(rows):
                along += d[j, i] * normalized[j, i]
            along /= rows
        mean = 0.0
        for j in range(rows):
            d[j, i] = factor[i] * (d[j, i] - normalized[j, i] * along)
            mean += d[j, i]
        if norm.projects:
            mean /= rows
            for j in range(rows):
                d[j, i] -= mean


@compiled
def _add_product(out: Any, W: Any, x: Any) -> None:
    """out[j] += Σ_k W[j, k] x[k], example by example."""
    for j in range(W.shape[0]):
        for k in range(W.shape[1]):
            for i in range(x.shape[1]):
                out[j, i] += W[j, k] * x[k, i]


@compiled
def _forward(cell: int, norm: NormSwitch, x: Any, W: Any, b: Any, gain: Any, bias: Any) -> Any:
    """All steps; returns what the way back needs: h and c [step + 1, …], then per step the activated gates, what the
    recurrence gave them, tanh of the LSTM's state as it is read, the norm's output and its factor."""
    steps, gates, examples = x.shape
    H = W.shape[1]
    hidden = np.zeros((steps + 1, H, examples))
    state = np.zeros((steps + 1, H, examples))
    active = np.empty((steps, gates, examples))
    recurrent = np.zeros((steps, gates, examples))
    squashed = np.empty((steps, H, examples))
    normalized = np.zeros((steps, gain.shape[0], examples))
    factor = np.empty((steps, examples))
    for t in range(steps):
        r, a, h = recurrent[t], active[t], hidden[t + 1]
        _add_product(r, W, hidden[t])
        if norm.site == GATES:
            _normalize(r, factor[t], norm)
            normalized[t] = r
            for j in range(gates):
                r[j] = r[j] * gain[j] + bias[j]
        for j in range(gates):
            r[j] += b[j]
        if cell == LSTM:
            c, seen = state[t + 1], squashed[t]
            for j in range(H):
                for i in range(examples):
                    a[j, i] = _sigmoid(x[t, j, i] + r[j, i])
                    a[H + j, i] = _sigmoid(x[t, H + j, i] + r[H + j, i])
                    a[2 * H + j, i] = np.tanh(x[t, 2 * H + j, i] + r[2 * H + j, i])
                    a[3 * H + j, i] = _sigmoid(x[t, 3 * H + j, i] + r[3 * H + j, i])
                    c[j, i] = a[H + j, i] * state[t, j, i] + a[j, i] * a[2 * H + j, i]
            if norm.site == STATE:
                _normalize(c, factor[t], norm)
                normalized[t] = c
            seen[:] = c
            if norm.site == READOUT:
                _normalize(seen, factor[t], norm)
                normalized[t] = seen
                for j in range(H):
                    seen[j] = seen[j] * gain[j] + bias[j]
            for j in range(H):
                for i in range(examples):
                    seen[j, i] = np.tanh(seen[j, i])
                    h[j, i] = a[3 * H + j, i] * seen[j, i]
            continue
        if cell == GRU:
            for j in range(H):
                for i in range(examples):
                    a[j, i] = _sigmoid(x[t, j, i] + r[j, i])
                    a[H + j, i] = _sigmoid(x[t, H + j, i] + r[H + j, i])
                    a[2 * H + j, i] = np.tanh(x[t, 2 * H + j, i] + a[j, i] * r[2 * H + j, i])
                    h[j, i] = a[H + j, i] * hidden[t, j, i] + (1.0 - a[H + j, i]) * a[2 * H + j, i]
        else:
            for j in range(H):
                for i in range(examples):
                    total = x[t, j, i] + r[j, i]
                    a[j, i] = np.tanh(total) if cell == TANH else max(total, 0.0)
                    h[j, i] = a[j, i]
        if norm.site == STATE:
            _normalize(h, factor[t], norm)
            normalized[t] = h
    return hidden, state, active, recurrent, squashed, normalized, factor


@compiled
def _backward(cell: int, norm: NormSwitch, W: Any, gain: Any, kept: Any, d_out: Any) -> Any:
    """Gradients by the inputs, by W h before any norm, and by the norm's output after gain and bias."""
    hidden, state, active, recurrent, squashed, normalized, factor = kept
    steps, gates, examples = active.shape
    H = W.shape[1]
    W_transposed = W.T.copy()
    d_inputs = np.empty((steps, gates, examples))
    d_linear = np.empty((steps, gates, examples))
    d_gained = np.zeros(normalized.shape)
    d_h, d_c, d_seen = np.zeros((H, examples)), np.zeros((H, examples)), np.empty((H, examples))
    for t in range(steps - 1, -1, -1):
        a, d_x, d_r = active[t], d_inputs[t], d_linear[t]
        d_h += d_out[t]
        if cell == LSTM:
            for j in range(H):
                for i in range(examples):
                    o, s = a[3 * H + j, i], squashed[t, j, i]
                    d_x[3 * H + j, i] = d_h[j, i] * s * o * (1.0 - o)
                    d_seen[j, i] = d_h[j, i] * o * (1.0 - s * s)
            if norm.site == READOUT:
                d_gained[t] = d_seen
                for j in range(H):
                    d_seen[j] *= gain[j]
                _normalize_back(d_seen, normalized[t], factor[t], norm)
            d_c += d_seen
            if norm.site == STATE:
                _normalize_back(d_c, normalized[t], factor[t], norm)
            for j in range(H):
                for i in range(examples):
                    put, keep, new = a[j, i], a[H + j, i], a[2 * H + j, i]
                    d_x[j, i] = d_c[j, i] * new * put * (1.0 - put)
                    d_x[H + j, i] = d_c[j, i] * state[t, j, i] * keep * (1.0 - keep)
                    d_x[2 * H + j, i] = d_c[j, i] * put * (1.0 - new * new)
                    d_c[j, i] *= keep
            d_r[:] = d_x
            d_h[:] = 0.0
        else:
            if norm.site == STATE:
                _normalize_back(d_h, normalized[t], factor[t], norm)
            for j in range(H):
                for i in range(examples):
                    if cell == GRU:
                        reset, keep, new = a[j, i], a[H + j, i], a[2 * H + j, i]
                        d_new = d_h[j, i] * (1.0 - keep) * (1.0 - new * new)
                        d_x[j, i] = d_new * recurrent[t, 2 * H + j, i] * reset * (1.0 - reset)
                        d_x[H + j, i] = d_h[j, i] * (hidden[t, j, i] - new) * keep * (1.0 - keep)
                        d_x[2 * H + j, i] = d_new
                        d_r[j, i], d_r[H + j, i], d_r[2 * H + j, i] = d_x[j, i], d_x[H + j, i], d_new * reset
                        d_h[j, i] *= keep
                    else:
                        slope = 1.0 if a[j, i] > 0.0 else 0.0
                        if cell == TANH:
                            slope = 1.0 - a[j, i] * a[j, i]
                        d_x[j, i] = d_r[j, i] = d_h[j, i] * slope
                        d_h[j, i] = 0.0
        if norm.site == GATES:
            d_gained[t] = d_r
            for j in range(gates):
                d_r[j] *= gain[j]
            _normalize_back(d_r, normalized[t], factor[t], norm)
        _add_product(d_h, W_transposed, d_r)
    return d_inputs, d_linear, d_gained


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
        return out * pooled(keep, added)

    def terms(self, window: Float[Tensor, "*place inputs"]) -> tuple[Tensor, Tensor, Tensor]:
        """f, i z and o of the inputs of a window, one after the other, the last first."""
        z, f, *others = self.gates(window).chunk(len(self.pooling) + 1, dim=-1)
        f = torch.sigmoid(f)
        put = torch.sigmoid(others[1]) if self.pooling == "ifo" else 1 - f
        return f, put * torch.tanh(z), torch.sigmoid(others[0]) if others else torch.ones_like(f)


_FUSED: dict[str, Callable[..., nn.RNNBase]] = {
    "lstm": nn.LSTM,
    "gru": nn.GRU,
    "rnn_tanh": nn.RNN,
    "rnn_relu": lambda *sizes, **options: nn.RNN(*sizes, nonlinearity="relu", **options),
}


class NormedLayer(nn.Module):
    """One LSTM, GRU or Elman layer with torch's weights.

    Torch runs the LSTM without a norm, compiled loops all else on the CPU: 16 words of 64 letters
    there and back take an LSTM 0.6 ms in torch's kernel and 0.9 in the loops, a GRU 4.9 and 1.5, with a norm 1.5 to 2.4
    where step by step takes 7 to 8 (`bench/recurrence.py`). Step by step (`unfused`) runs what is on another device, or
    whose norm is hooked.
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
        out: Tensor
        if norm is None and (self.cfg.cell == "lstm" or x.device.type != "cpu"):
            out = self.weights(x)[0]
            return out
        if x.device.type != "cpu" or (norm is not None and norm.hooked):
            return self.unfused(x)
        _, w_hh, _, b_hh = self._tensors()
        size = self.cfg.hidden if norm is None else norm.d_model
        gain = x.new_ones(size) if norm is None or norm.w is None else norm.w
        bias = x.new_zeros(size) if norm is None or norm.b is None else norm.b
        switch = NO_NORM
        if norm is not None:
            constant = 1.0 if norm.divisor is None else 1 / float(norm.divisor)
            switch = NormSwitch(SITE_NUMBERS[self.cfg.norm_site], norm.projects, norm.scales, norm.eps, constant)
        tensors = (self.inputs(x), w_hh, b_hh, gain, bias)
        out = _Recurrence.apply(CELL_NUMBERS[self.cfg.cell], switch, *tensors)  # type: ignore[no-untyped-call]
        return out

    def unfused(self, x: Float[Tensor, "batch pos width"]) -> Float[Tensor, "batch pos hidden"]:
        """The same recurrence, step by step, with the norm in its place."""
        h = c = x.new_zeros(x.shape[0], self.cfg.hidden)
        outputs = []
        for i in self.inputs(x).unbind(1):
            h, c = self.step(i, h, c)
            outputs.append(h)
        return torch.stack(outputs, dim=1)

    def step(
        self, i: Float[Tensor, "batch gate"], h: Float[Tensor, "batch hidden"], c: Float[Tensor, "batch hidden"]
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
        """What the inputs give to the gates: W_ih x, normed if that is the norm's site, and b_ih."""
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
