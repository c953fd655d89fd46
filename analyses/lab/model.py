"""One small transformer for every experiment of the laboratory, with TransformerLens's names and hook points.

A `HookedRootModule`, so `run_with_hooks`, `run_with_cache` and `ln_probe.analyze` work on it, on TransformerLens 3.9
and 4.x alike. Only the norm at each place is meant to differ between two runs.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, Literal, overload

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformer_lens.hook_points import HookPoint
from transformer_lens.HookedRootModule import HookedRootModule

from ln_probe.analyses.lab.norms import NORM_KINDS, Norm

INIT_STD = 0.02  # GPT-2's; output projections are divided by sqrt(2 n_layers), as there
# Embeddings start ten times larger than GPT-2's: what a norm without scaling divides by is measured at initialization,
# and from 0.02 the stream grows so far past it that such a model's loss was NaN within 751 steps (lr 2e-3).
EMBED_STD = 0.2


@dataclass(frozen=True)
class LabConfig:
    """Shape of a lab model. Field names are TransformerLens's where it has one.

    Raises (on construction):
        ValueError: a size below 1, d_model not n_heads·d_head, an unknown norm or choice.
    """

    n_layers: int
    d_model: int
    n_heads: int
    d_vocab: int
    n_ctx: int
    d_mlp: int | None = None  # None: 4 d_model
    d_head: int | None = None  # None: d_model / n_heads
    norm: str = "layernorm"  # before attention (`ln1`): the one that experiments vary
    norm_mlp: str = "layernorm"
    norm_final: str = "layernorm"
    radius: float | None = None  # of `ln1`; None: sqrt(d_model)
    eps: float = 1e-5
    positions: Literal["learned", "none"] = "learned"
    causal: bool = True
    tied: bool = True
    act_fn: Literal["gelu", "relu"] = "gelu"

    def __post_init__(self) -> None:
        for name in ("n_layers", "d_model", "n_heads", "d_vocab", "n_ctx"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.d_head is None:
            if self.d_model % self.n_heads:
                raise ValueError(
                    f"d_model={self.d_model} is not divisible by n_heads={self.n_heads}: give d_head as well"
                )
            object.__setattr__(self, "d_head", self.d_model // self.n_heads)
        if self.d_mlp is None:
            object.__setattr__(self, "d_mlp", 4 * self.d_model)
        for name in ("norm", "norm_mlp", "norm_final"):
            if getattr(self, name) not in NORM_KINDS:
                raise ValueError(f"unknown {name} {getattr(self, name)!r}: known norms are {', '.join(NORM_KINDS)}")
        for name, known in (("positions", ("learned", "none")), ("act_fn", ("gelu", "relu"))):
            if getattr(self, name) not in known:
                raise ValueError(f"unknown {name} {getattr(self, name)!r}: known choices are {', '.join(known)}")

    # What code written for TransformerLens configs asks for.
    @property
    def attn_scale(self) -> float:
        """What scores are divided by: sqrt(d_head)."""
        assert self.d_head is not None
        return math.sqrt(self.d_head)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class Attention(nn.Module):
    """Multi-head attention; W_Q, W_K, W_V [head d_model d_head], W_O [head d_head d_model], as in TransformerLens."""

    def __init__(self, cfg: LabConfig) -> None:
        super().__init__()
        assert cfg.d_head is not None
        self.cfg = cfg
        shape = (cfg.n_heads, cfg.d_model, cfg.d_head)
        self.W_Q, self.W_K, self.W_V = (nn.Parameter(torch.empty(shape)) for _ in range(3))
        self.W_O = nn.Parameter(torch.empty(cfg.n_heads, cfg.d_head, cfg.d_model))
        self.b_Q, self.b_K, self.b_V = (nn.Parameter(torch.zeros(cfg.n_heads, cfg.d_head)) for _ in range(3))
        self.b_O = nn.Parameter(torch.zeros(cfg.d_model))
        self.hook_q, self.hook_k, self.hook_v = HookPoint(), HookPoint(), HookPoint()
        self.hook_attn_scores, self.hook_pattern, self.hook_z = HookPoint(), HookPoint(), HookPoint()

    def _project(self, x: Tensor, W: Tensor, b: Tensor) -> Float[Tensor, "batch pos head d_head"]:
        heads, d_model, d_head = W.shape
        flat = F.linear(x, W.transpose(1, 2).reshape(heads * d_head, d_model), b.reshape(-1))
        return flat.view(*x.shape[:-1], heads, d_head)

    def forward(
        self, x: Float[Tensor, "batch pos d_model"], key_input: Float[Tensor, "batch pos d_model"] | None = None
    ) -> Float[Tensor, "batch pos d_model"]:
        q = self.hook_q(self._project(x, self.W_Q, self.b_Q))
        k = self.hook_k(self._project(x if key_input is None else key_input, self.W_K, self.b_K))
        v = self.hook_v(self._project(x, self.W_V, self.b_V))
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        if self.hook_attn_scores._forward_hooks or self.hook_pattern._forward_hooks:
            scores = q @ k.transpose(-1, -2) / self.cfg.attn_scale
            if self.cfg.causal:
                length = x.shape[1]
                hidden = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
                scores = scores.masked_fill(hidden, float("-inf"))
            pattern = self.hook_pattern(self.hook_attn_scores(scores).softmax(-1))
            z = pattern @ v
        else:  # the same, fused: nobody looks at the scores
            z = F.scaled_dot_product_attention(q, k, v, is_causal=self.cfg.causal)
        z = self.hook_z(z.transpose(1, 2))
        out: Tensor = F.linear(z.flatten(-2), self.W_O.flatten(0, 1).T, self.b_O)
        return out


class MLP(nn.Module):
    def __init__(self, cfg: LabConfig) -> None:
        super().__init__()
        assert cfg.d_mlp is not None
        self.W_in, self.b_in = (
            nn.Parameter(torch.empty(cfg.d_model, cfg.d_mlp)),
            nn.Parameter(torch.zeros(cfg.d_mlp)),
        )
        self.W_out, self.b_out = (
            nn.Parameter(torch.empty(cfg.d_mlp, cfg.d_model)),
            nn.Parameter(torch.zeros(cfg.d_model)),
        )
        self.act = F.gelu if cfg.act_fn == "gelu" else F.relu
        self.hook_pre, self.hook_post = HookPoint(), HookPoint()

    def forward(self, x: Float[Tensor, "batch pos d_model"]) -> Float[Tensor, "batch pos d_model"]:
        hidden = self.hook_post(self.act(self.hook_pre(F.linear(x, self.W_in.T, self.b_in))))
        return F.linear(hidden, self.W_out.T, self.b_out)


class Block(nn.Module):
    def __init__(self, cfg: LabConfig) -> None:
        super().__init__()
        self.ln1 = Norm(cfg.norm, cfg.d_model, eps=cfg.eps, radius=cfg.radius)
        self.attn = Attention(cfg)
        self.ln2 = Norm(cfg.norm_mlp, cfg.d_model, eps=cfg.eps)
        self.mlp = MLP(cfg)
        self.hook_resid_pre, self.hook_resid_mid, self.hook_resid_post = (
            HookPoint(),
            HookPoint(),
            HookPoint(),
        )
        self.hook_attn_out, self.hook_mlp_out = HookPoint(), HookPoint()

    def forward(self, resid: Float[Tensor, "batch pos d_model"]) -> Float[Tensor, "batch pos d_model"]:
        resid = self.hook_resid_pre(resid)
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
        self.b_U = nn.Parameter(torch.zeros(cfg.d_vocab))
        self._embed = [embed]  # in a list: not a second owner of the weights

    @property
    def W_U(self) -> Float[Tensor, "d_model d_vocab"]:
        return self._embed[0].W_E.T if self.untied is None else self.untied

    def forward(self, resid: Float[Tensor, "batch pos d_model"]) -> Float[Tensor, "batch pos d_vocab"]:
        return F.linear(resid, self.W_U.T, self.b_U)


class LabTransformer(HookedRootModule):
    """A pre-norm transformer whose norms are `Norm`s; weights in TransformerLens's layout and names.

    Initialized as GPT-2 (normal, std 0.02; embeddings 0.2) from torch's global generator: seed it first. Norms that do
    not scale must be calibrated before the first use (`norms.calibrate`).
    """

    def __init__(self, cfg: LabConfig, tokenizer: Any = None) -> None:
        super().__init__()
        self.cfg = cfg
        self.tokenizer = tokenizer
        self.embed = Embed(cfg.d_vocab, cfg.d_model, "W_E")
        self.pos_embed = Embed(cfg.n_ctx, cfg.d_model, "W_pos") if cfg.positions == "learned" else None
        self.blocks = nn.ModuleList(Block(cfg) for _ in range(cfg.n_layers))
        self.ln_final = Norm(cfg.norm_final, cfg.d_model, eps=cfg.eps)
        self.unembed = Unembed(cfg, self.embed)
        self.hook_embed, self.hook_pos_embed = HookPoint(), HookPoint()
        for name, parameter in self.named_parameters():
            leaf = name.rsplit(".", 1)[-1]
            if leaf.startswith("W_") or leaf == "untied":
                std = INIT_STD / math.sqrt(2 * cfg.n_layers) if leaf in {"W_O", "W_out"} else INIT_STD
                std = EMBED_STD if leaf == "W_E" else std
                nn.init.normal_(parameter, std=std)
        self.setup()  # type: ignore[no-untyped-call]

    @property
    def W_U(self) -> Float[Tensor, "d_model d_vocab"]:
        return self.unembed.W_U

    @property
    def b_U(self) -> Float[Tensor, d_vocab]:
        return self.unembed.b_U

    def _check(self, tokens: Tensor) -> None:
        if tokens.ndim != 2:
            raise ValueError(f"tokens must be [batch pos], got shape {tuple(tokens.shape)}")
        if tokens.shape[1] > self.cfg.n_ctx:
            raise ValueError(f"{tokens.shape[1]} tokens are more than the context of {self.cfg.n_ctx}: cut the prompt")

    @overload
    def forward(
        self, tokens: Tensor, return_type: Literal["logits", "loss"] = ..., loss_per_token: bool = ...
    ) -> Tensor: ...
    @overload
    def forward(self, tokens: Tensor, return_type: None, loss_per_token: bool = ...) -> None: ...
    def forward(
        self,
        tokens: Int[Tensor, "batch pos"],
        return_type: Literal["logits", "loss"] | None = "logits",
        loss_per_token: bool = False,
    ) -> Tensor | None:
        """Logits [batch pos d_vocab], or the mean next-token loss in nats ([batch pos-1] with `loss_per_token`).

        Raises:
            ValueError: tokens not [batch pos], longer than the context, or an unknown return_type.
        """
        if return_type not in ("logits", "loss", None):
            raise ValueError(f"unknown return_type {return_type!r}: 'logits', 'loss' or None")
        self._check(tokens)
        resid = self.hook_embed(F.embedding(tokens, self.embed.W_E))
        if self.pos_embed is not None:
            resid = resid + self.hook_pos_embed(self.pos_embed.W_pos[: tokens.shape[1]].expand_as(resid))
        for block in self.blocks:
            resid = block(resid)
        logits: Tensor = self.unembed(self.ln_final(resid))
        if return_type is None:
            return None
        if return_type == "logits":
            return logits
        losses = F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
        return losses.view(tokens.shape[0], -1) if loss_per_token else losses.mean()
