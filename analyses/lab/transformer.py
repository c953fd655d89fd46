"""One small transformer for every experiment of the laboratory, with TransformerLens's names and hook points.

A `HookedRootModule`, so `run_with_hooks`, `run_with_cache` and `ln_probe.analyze` work on it, on TransformerLens 3.9
and 4.x alike. Only the norm at each place is meant to differ between two runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from ln_probe.analyses.lab.norms import NORM_KINDS, Norm
from ln_probe.analyses.lab.points import HookedRootModule, HookPoint

INIT_STD = 0.02  # GPT-2's; output projections are divided by sqrt(2 n_layers), as there
# Ten times GPT-2's: a norm without scaling divides by what it sees first; from 0.02 such a loss became NaN.
EMBED_STD = 0.2
ROTARY_BASE = 10000.0  # as in RoFormer and GPT-NeoX; sinusoidal positions have the same base

_CHOICES: dict[str, tuple[str | None, ...]] = {
    **dict.fromkeys(("norm", "norm_mlp", "norm_final"), (*NORM_KINDS, None)),
    "positions": ("learned", "none", "sinusoidal", "rotary", "alibi"),
    "act_fn": ("gelu", "gelu_new", "relu"),
    "norm_order": ("pre", "post"),
    "init": ("gpt2", "torch"),
}


@dataclass(frozen=True)
class LabConfig:
    """Shape of a lab model. Field names are TransformerLens's where it has one.

    Attributes:
        d_mlp: None means 4 d_model. d_head: None means d_model / n_heads.
        norm: kind of `ln1`, which experiments vary; None leaves it out. With `norm_order` "pre" it comes
            before attention, with "post" after attention is added to the stream.
        norm_mlp, norm_final: kinds of `ln2` and `ln_final`; None leaves them out.
        radius, divisor: of `ln1` (see `Norm`); None: sqrt(d_model), and measured at initialization.
        affine, affine_others: gain and bias of `ln1`; of the other norms.
        bias_qkv, bias_out, bias_mlp, bias_unembed: which biases there are.
        tied: the unembedding is the embedding's transpose.
        init: "gpt2" (normal; `embed_std` for embeddings), or "torch": as nn.Embedding and
            nn.TransformerEncoderLayer start.

    Raises (on construction):
        ValueError: a size below 1, d_model not divisible by n_heads, an odd
            d_head with rotary positions, an unknown norm or choice, a radius or divisor that `Norm` would refuse.
    """

    n_layers: int
    d_model: int
    n_heads: int
    d_vocab: int
    n_ctx: int
    d_mlp: int | None = None
    d_head: int | None = None
    norm: str | None = "layernorm"
    norm_mlp: str | None = "layernorm"
    norm_final: str | None = "layernorm"
    radius: float | None = None
    eps: float = 1e-5
    positions: Literal["learned", "none", "sinusoidal", "rotary", "alibi"] = "learned"
    causal: bool = True
    tied: bool = True
    act_fn: Literal["gelu", "gelu_new", "relu"] = "gelu"
    norm_order: Literal["pre", "post"] = "pre"
    divisor: float | None = None
    affine: bool = True
    affine_others: bool = True
    bias_qkv: bool = True
    bias_out: bool = True
    bias_mlp: bool = True
    bias_unembed: bool = True
    init: Literal["gpt2", "torch"] = "gpt2"
    embed_std: float = EMBED_STD

    def __post_init__(self) -> None:
        for name in ("n_layers", "d_model", "n_heads", "d_vocab", "n_ctx", "d_mlp", "d_head"):
            size = getattr(self, name)
            if size is not None and not (isinstance(size, int) and size >= 1):
                raise ValueError(f"{name} must be a whole number, at least 1, got {size!r}")
        if self.d_head is None:
            if self.d_model % self.n_heads:
                raise ValueError(f"d_model={self.d_model} is not divisible by n_heads={self.n_heads}: give d_head")
            object.__setattr__(self, "d_head", self.d_model // self.n_heads)
        if self.d_mlp is None:
            object.__setattr__(self, "d_mlp", 4 * self.d_model)
        for name, known in _CHOICES.items():
            if (choice := getattr(self, name)) not in known:
                raise ValueError(f"unknown {name} {choice!r}: known choices are {', '.join(map(str, known))}")
        if self.positions == "rotary" and self.d_head % 2:  # type: ignore[operator]
            raise ValueError(f"rotary positions turn pairs of coordinates: d_head={self.d_head} is odd")
        if self.norm is not None:
            with torch.device("meta"):
                Norm(self.norm, self.d_model, eps=self.eps, radius=self.radius, divisor=self.divisor)  # raises

    # What code written for TransformerLens configs asks for.
    @property
    def attn_scale(self) -> float:
        """What scores are divided by: sqrt(d_head)."""
        assert self.d_head is not None
        return math.sqrt(self.d_head)

    @property
    def positional_embedding_type(self) -> str:
        """How TransformerLens calls `positions`."""
        return self.positions if self.positions in ("rotary", "alibi") else "standard"

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def build(self) -> LabTransformer:
        """A random model of this shape (torch's global generator)."""
        return LabTransformer(self)


def sinusoidal_table(n_ctx: int, d_model: int) -> Float[Tensor, "pos d_model"]:
    """sin and cos of position / 10000^(2i/d) side by side (Vaswani et al. 2017, section 3.5)."""
    angle = torch.arange(n_ctx)[:, None] * ROTARY_BASE ** (-torch.arange(0, d_model, 2) / d_model)
    return torch.stack([angle.sin(), angle.cos()], dim=-1).flatten(1)[:, :d_model]


def alibi_slopes(n_heads: int) -> Float[Tensor, " head"]:
    """2^(-8 h / n_heads) for h = 1…n_heads (Press et al. 2022; theirs for powers of two)."""
    return 2.0 ** (-8.0 * torch.arange(1, n_heads + 1) / n_heads)


class Attention(nn.Module):
    """Multi-head attention; W_Q, W_K, W_V [head d_model d_head], W_O [head d_head d_model], as in TransformerLens."""

    def __init__(self, cfg: LabConfig) -> None:
        super().__init__()
        assert cfg.d_head is not None
        self.cfg = cfg
        shape = (cfg.n_heads, cfg.d_model, cfg.d_head)
        self.W_Q, self.W_K, self.W_V = (nn.Parameter(torch.empty(shape)) for _ in range(3))
        self.W_O = nn.Parameter(torch.empty(cfg.n_heads, cfg.d_head, cfg.d_model))
        self.b_Q, self.b_K, self.b_V = (
            nn.Parameter(torch.zeros(cfg.n_heads, cfg.d_head)) if cfg.bias_qkv else None for _ in range(3)
        )
        self.b_O = nn.Parameter(torch.zeros(cfg.d_model)) if cfg.bias_out else None
        self.hook_q, self.hook_k, self.hook_v = HookPoint(), HookPoint(), HookPoint()
        self.hook_attn_scores, self.hook_pattern, self.hook_z = HookPoint(), HookPoint(), HookPoint()
        if cfg.positions == "rotary":
            half = torch.arange(cfg.n_ctx)[:, None] * ROTARY_BASE ** (-torch.arange(0, cfg.d_head, 2) / cfg.d_head)
            angle = torch.cat([half, half], dim=-1)
            self.register_buffer("rotary_cos", angle.cos(), persistent=False)
            self.register_buffer("rotary_sin", angle.sin(), persistent=False)
            self.hook_rot_q, self.hook_rot_k = HookPoint(), HookPoint()

    def _project(self, x: Tensor, W: Tensor, b: Tensor | None) -> Float[Tensor, "batch pos head d_head"]:
        heads, d_model, d_head = W.shape
        flat = F.linear(x, W.transpose(1, 2).reshape(heads * d_head, d_model), None if b is None else b.reshape(-1))
        return flat.view(*x.shape[:-1], heads, d_head)

    def _turn(self, x: Float[Tensor, "batch pos head d_head"]) -> Float[Tensor, "batch pos head d_head"]:
        cos, sin = (cast("Tensor", t)[: x.shape[1], None].to(x) for t in (self.rotary_cos, self.rotary_sin))
        left, right = x.chunk(2, dim=-1)
        return x * cos + torch.cat([-right, left], dim=-1) * sin

    def _bias(self, length: int, like: Tensor) -> Tensor | None:
        """What is added to the scores, as [head query key] or [query key]; None if nothing is."""
        place = torch.arange(length, device=like.device)
        hidden = place[:, None] < place
        if self.cfg.positions == "alibi":
            slopes = alibi_slopes(self.cfg.n_heads).to(like)
            bias = -slopes[:, None, None] * (place[:, None] - place).abs()
            return bias.masked_fill(hidden, -math.inf) if self.cfg.causal else bias
        if not self.cfg.causal:
            return None
        return torch.zeros(length, length).to(like).masked_fill(hidden, -math.inf)

    def forward(self, x: Float[Tensor, "batch pos d_model"]) -> Float[Tensor, "batch pos d_model"]:
        q = self.hook_q(self._project(x, self.W_Q, self.b_Q))
        k = self.hook_k(self._project(x, self.W_K, self.b_K))
        v = self.hook_v(self._project(x, self.W_V, self.b_V))
        if self.cfg.positions == "rotary":
            q, k = self.hook_rot_q(self._turn(q)), self.hook_rot_k(self._turn(k))
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        if self.hook_attn_scores._forward_hooks or self.hook_pattern._forward_hooks:
            scores = q @ k.transpose(-1, -2) / self.cfg.attn_scale
            bias = self._bias(x.shape[1], scores)
            scores = scores if bias is None else scores + bias
            pattern = self.hook_pattern(self.hook_attn_scores(scores).softmax(-1))
            z = pattern @ v
        elif self.cfg.positions == "alibi":
            z = F.scaled_dot_product_attention(q, k, v, attn_mask=self._bias(x.shape[1], q))
        else:  # the same, fused: no hook reads the scores
            z = F.scaled_dot_product_attention(q, k, v, is_causal=self.cfg.causal)
        z = self.hook_z(z.transpose(1, 2))
        out: Tensor = F.linear(z.flatten(-2), self.W_O.flatten(0, 1).T, self.b_O)
        return out


_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_new": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
}


class MLP(nn.Module):
    def __init__(self, cfg: LabConfig) -> None:
        super().__init__()
        assert cfg.d_mlp is not None

        def bias(size: int) -> nn.Parameter | None:
            return nn.Parameter(torch.zeros(size)) if cfg.bias_mlp else None

        self.W_in, self.b_in = nn.Parameter(torch.empty(cfg.d_model, cfg.d_mlp)), bias(cfg.d_mlp)
        self.W_out, self.b_out = nn.Parameter(torch.empty(cfg.d_mlp, cfg.d_model)), bias(cfg.d_model)
        self.act = _ACTIVATIONS[cfg.act_fn]
        self.hook_pre, self.hook_post = HookPoint(), HookPoint()

    def forward(self, x: Float[Tensor, "batch pos d_model"]) -> Float[Tensor, "batch pos d_model"]:
        hidden = self.hook_post(self.act(self.hook_pre(F.linear(x, self.W_in.T, self.b_in))))
        return F.linear(hidden, self.W_out.T, self.b_out)


def norm_or_nothing(cfg: LabConfig, kind: str | None, affine: bool, **size: float | None) -> nn.Module:
    """A norm of a model's width and eps, with gain and bias or without; None leaves it out."""
    return nn.Identity() if kind is None else Norm(kind, cfg.d_model, eps=cfg.eps, gain=affine, bias=affine, **size)


class Block(nn.Module):
    """Attention and MLP with a norm each, before the sublayer ("pre") or after it is added to the stream ("post")."""

    def __init__(self, cfg: LabConfig) -> None:
        super().__init__()
        self.ln1 = norm_or_nothing(cfg, cfg.norm, cfg.affine, radius=cfg.radius, divisor=cfg.divisor)
        self.attn = Attention(cfg)
        self.ln2 = norm_or_nothing(cfg, cfg.norm_mlp, cfg.affine_others)
        self.mlp = MLP(cfg)
        self.post = cfg.norm_order == "post"
        self.hook_resid_pre, self.hook_resid_mid, self.hook_resid_post = HookPoint(), HookPoint(), HookPoint()
        self.hook_attn_out, self.hook_mlp_out = HookPoint(), HookPoint()

    def forward(self, resid: Float[Tensor, "batch pos d_model"]) -> Float[Tensor, "batch pos d_model"]:
        resid = self.hook_resid_pre(resid)
        if self.post:
            resid = self.ln1(self.hook_resid_mid(resid + self.hook_attn_out(self.attn(resid))))
            post: Tensor = self.ln2(self.hook_resid_post(resid + self.hook_mlp_out(self.mlp(resid))))
            return post
        resid = self.hook_resid_mid(resid + self.hook_attn_out(self.attn(self.ln1(resid))))
        out: Tensor = self.hook_resid_post(resid + self.hook_mlp_out(self.mlp(self.ln2(resid))))
        return out


class Embed(nn.Module):
    W_E: nn.Parameter
    W_pos: nn.Parameter

    def __init__(self, count: int, d_model: int, name: str) -> None:
        super().__init__()
        self.register_parameter(name, nn.Parameter(torch.empty(count, d_model)))


class Unembed(nn.Module):
    def __init__(self, cfg: LabConfig, embed: Embed) -> None:
        super().__init__()
        self.untied = None if cfg.tied else nn.Parameter(torch.empty(cfg.d_model, cfg.d_vocab))
        self.b_U = nn.Parameter(torch.zeros(cfg.d_vocab)) if cfg.bias_unembed else None
        self._embed = [embed]  # in a list: not a second owner of the weights

    @property
    def W_U(self) -> Float[Tensor, "d_model d_vocab"]:
        return self._embed[0].W_E.T if self.untied is None else self.untied

    def forward(self, resid: Float[Tensor, "batch pos d_model"]) -> Float[Tensor, "batch pos d_vocab"]:
        return F.linear(resid, self.W_U.T, self.b_U)


class LabTransformer(HookedRootModule):  # type: ignore[misc]
    """A transformer whose norms are `Norm`s; weights in TransformerLens's layout and names.

    Initialized from torch's global generator: seed it first. Norms whose divisor is measured must be calibrated before
    the first use (`norms.calibrate`).
    """

    positions: Tensor | None
    blocks: Sequence[Block]

    def __init__(self, cfg: LabConfig, tokenizer: Any = None) -> None:
        super().__init__()
        self.cfg = cfg
        self.tokenizer = tokenizer
        self.embed = Embed(cfg.d_vocab, cfg.d_model, "W_E")
        self.pos_embed = Embed(cfg.n_ctx, cfg.d_model, "W_pos") if cfg.positions == "learned" else None
        table = sinusoidal_table(cfg.n_ctx, cfg.d_model) if cfg.positions == "sinusoidal" else None
        self.register_buffer("positions", table, persistent=False)
        self.blocks = cast("Sequence[Block]", nn.ModuleList(Block(cfg) for _ in range(cfg.n_layers)))
        self.ln_final = norm_or_nothing(cfg, cfg.norm_final, cfg.affine_others)
        self.unembed = Unembed(cfg, self.embed)
        self.hook_embed, self.hook_pos_embed = HookPoint(), HookPoint()
        _INITIALIZERS[cfg.init](self)
        self.setup()

    @property
    def W_U(self) -> Float[Tensor, "d_model d_vocab"]:
        return self.unembed.W_U

    @property
    def b_U(self) -> Float[Tensor, " d_vocab"] | None:
        return self.unembed.b_U

    def _check(self, tokens: Tensor) -> None:
        if tokens.ndim != 2:
            raise ValueError(f"tokens must be [batch pos], got shape {tuple(tokens.shape)}")
        if tokens.shape[1] > self.cfg.n_ctx:
            raise ValueError(f"{tokens.shape[1]} tokens are more than the context of {self.cfg.n_ctx}: cut the prompt")

    def embedded(self, tokens: Int[Tensor, "batch pos"]) -> Float[Tensor, "batch pos d_model"]:
        """What the first block reads: embeddings, and positions where they are added."""
        resid: Tensor = self.hook_embed(F.embedding(tokens, self.embed.W_E))
        table = self.positions if self.pos_embed is None else self.pos_embed.W_pos
        if table is not None:
            resid = resid + self.hook_pos_embed(table[: tokens.shape[1]].expand_as(resid))
        return resid

    def stream(self, tokens: Int[Tensor, "batch pos"]) -> Float[Tensor, "batch pos d_model"]:
        """What the unembedding reads: the stream after the final norm.

        Raises:
            ValueError: tokens not [batch pos], or longer than the context.
        """
        self._check(tokens)
        resid = self.embedded(tokens)
        for block in self.blocks:
            resid = block(resid)
        normalized: Tensor = self.ln_final(resid)
        return normalized

    def forward(
        self,
        tokens: Int[Tensor, "batch pos"],
        return_type: Literal["logits", "loss"] | None = "logits",
        loss_per_token: bool = False,
    ) -> Any:
        """Logits [batch pos d_vocab], or the mean next-token loss in nats ([batch pos-1] with `loss_per_token`).

        Raises:
            ValueError: tokens not [batch pos], longer than the context, or an unknown return_type.
        """
        if return_type not in ("logits", "loss", None):
            raise ValueError(f"unknown return_type {return_type!r}: 'logits', 'loss' or None")
        logits: Tensor = self.unembed(self.stream(tokens))
        if return_type is None:
            return None
        if return_type == "logits":
            return logits
        losses = F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
        return losses.view(tokens.shape[0], -1) if loss_per_token else losses.mean()


def _init_gpt2(model: LabTransformer) -> None:
    """Normal with std 0.02 (embeddings `embed_std`), output projections smaller by sqrt(2 n_layers)."""
    cfg = model.cfg
    for name, parameter in model.named_parameters():
        leaf = name.rsplit(".", 1)[-1]
        if leaf.startswith("W_") or leaf == "untied":
            std = INIT_STD / math.sqrt(2 * cfg.n_layers) if leaf in {"W_O", "W_out"} else INIT_STD
            nn.init.normal_(parameter, std=cfg.embed_std if leaf == "W_E" else std)


def _init_torch(model: LabTransformer) -> None:
    """The distributions, not the random numbers, of nn.Embedding, nn.MultiheadAttention and nn.Linear."""
    nn.init.normal_(model.embed.W_E)
    if model.pos_embed is not None:
        nn.init.normal_(model.pos_embed.W_pos)
    for block in model.blocks:
        cfg = model.cfg
        assert cfg.d_head is not None
        width = cfg.n_heads * cfg.d_head
        bound = math.sqrt(6 / (cfg.d_model + 3 * width))  # Xavier over the stacked Q, K, V matrix
        for parameter in (block.attn.W_Q, block.attn.W_K, block.attn.W_V):
            nn.init.uniform_(parameter, -bound, bound)
        nn.init.uniform_(block.attn.W_O, -1 / math.sqrt(width), 1 / math.sqrt(width))
        for weight, bias in ((block.mlp.W_in, block.mlp.b_in), (block.mlp.W_out, block.mlp.b_out)):
            bound = 1 / math.sqrt(weight.shape[0])
            nn.init.uniform_(weight, -bound, bound)
            if bias is not None:
                nn.init.uniform_(bias, -bound, bound)
    if model.unembed.untied is not None:
        bound = 1 / math.sqrt(model.cfg.d_model)
        nn.init.uniform_(model.unembed.untied, -bound, bound)
        if model.b_U is not None:
            nn.init.uniform_(model.b_U, -bound, bound)


_INITIALIZERS = {"gpt2": _init_gpt2, "torch": _init_torch}
