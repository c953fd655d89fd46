"""In what state weights are: raw, folded, centred or both, with the evidence.

*Folded*: the norm's gain and bias were moved into the weights that read it (TransformerLens `fold_ln`), so it has none,
or a gain of exactly 1. *Centred*: every weight that writes to the residual stream before the norm has mean 0 over
d_model (`center_writing_weights`), so that its projection is a no-op by construction. Neither is taken from a class or
a config alone, which a bridge in compatibility mode keeps as they were: weights and the stream itself must show it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ln_probe.hooks.model import HookedModel, blocks, world

STATES = ("raw", "folded", "centred", "folded+centred")

# |mean| / RMS of a vector below which centring it is a no-op. Rounding of weights centred in float32 leaves 1e-8 to
# 1e-7, in float64 models too where they were centred before the cast; a trained stream that was not centred is above
# 1e-3 (MGM, SmolLM2, CAPP-GPT), rows of its weights above 1e-2.
CENTRED = 1e-5
CENTRED_HALF = 5e-3  # 16-bit formats: their own rounding, 2^-9 per entry at most
_ROWS = 1024  # vectors looked at at once: 6 MB in float64 at d 768

# What the bridge raises where an architecture has no such weight.
_ABSENT = (AttributeError, KeyError, NotImplementedError, RuntimeError, TypeError, ValueError)


def centred_bound(dtype: torch.dtype) -> float:
    """CENTRED, or what the format itself rounds."""
    return CENTRED if dtype in (torch.float32, torch.float64) else CENTRED_HALF


@dataclass(frozen=True)
class Weight:
    """One weight that writes to the residual stream, or reads from a norm.

    Attributes:
        name: as in TransformerLens, "blocks.0.attn.W_O".
        layer: its block; -1 for the embeddings.
        part: "embed", "attention", "mlp" or "unembed".
        off_centre: the largest |mean over d_model| over the RMS of its entries; NaN where the model does not show it.
        bound: what rounding explains (`centred_bound`).
    """

    name: str
    layer: int
    part: str
    off_centre: float
    bound: float

    @property
    def centred(self) -> bool:
        return self.off_centre <= self.bound


def off_centre(weight: Float[Tensor, "*shape"], dim: int = -1) -> float:
    """The largest |mean along `dim`| over the RMS of all entries; 0 for a weight of zeros."""
    rows = weight.detach().movedim(dim, -1)
    rows = rows.reshape(-1, rows.shape[-1])
    largest = square = 0.0
    for part in rows.split(_ROWS):  # (summed in float64 without a copy of the weights in it)
        largest = max(largest, float(part.mean(-1, dtype=torch.float64).abs().max()))
        square += float(torch.linalg.vector_norm(part, dtype=torch.float64)) ** 2
    return largest / math.sqrt(square / rows.numel()) if square else 0.0


def _read(owner: object, name: str) -> Tensor | None:
    try:
        value = getattr(owner, name, None)
    except _ABSENT:
        return None
    return value if isinstance(value, Tensor) else None


def _weight(owner: object, path: str, layer: int, part: str, *, dim: int = -1) -> Weight | None:
    value = _read(owner, path.rsplit(".", 1)[-1])
    if value is None:
        return None
    return Weight(path, layer, part, off_centre(value, dim), centred_bound(value.dtype))


def _embeddings(model: HookedModel) -> Iterable[Weight]:
    d_model = int(model.cfg.d_model)
    for child, name in (("embed", "W_E"), ("pos_embed", "W_pos"), ("token_type_embed", "token_type_embed")):
        module = getattr(model, child, None)
        for value in module.parameters() if isinstance(module, nn.Module) else ():
            if value.ndim == 2 and value.shape[-1] == d_model:
                # a position table can have rows before the first position (OPT: 2): they are centred with the others
                yield Weight(name, -1, "embed", off_centre(value), centred_bound(value.dtype))


def writing_weights(model: HookedModel) -> list[Weight]:
    """Every weight and bias that writes to the residual stream, in the order of the forward pass.

    A block part whose output weight the model does not show (a mixture of experts) is listed with `off_centre` NaN.
    """
    found = list(_embeddings(model))
    for layer, block in enumerate(blocks(model)):
        for part, child, names in (("attention", "attn", ("W_O", "b_O")), ("mlp", "mlp", ("W_out", "b_out"))):
            owner = getattr(block, child, None)
            if owner is None:
                continue
            shown = [_weight(owner, f"blocks.{layer}.{child}.{n}", layer, part) for n in names]
            if shown[0] is None:
                shown[0] = Weight(f"blocks.{layer}.{child}.{names[0]}", layer, part, math.nan, 0.0)
            found += [w for w in shown if w is not None]
    return found


def reading_weights(model: HookedModel, reads: str, layers: Sequence[int]) -> list[Weight]:
    """The weights that take a norm's output, measured along d_model.

    Args:
        model: any hooked model.
        reads: who takes the output (`Site.reads`).
        layers: the blocks that take it.
    """
    found: list[Weight | None] = []
    parts = reads.split("+")
    for layer in layers:
        block = blocks(model)[layer]
        if "attention" in parts:
            attn = getattr(block, "attn", None)
            found += [_weight(attn, f"blocks.{layer}.attn.{n}", layer, "attention", dim=-2) for n in _READ_BY_ATTENTION]
        if "mlp" in parts:
            mlp = getattr(block, "mlp", None)
            found += [_weight(mlp, f"blocks.{layer}.mlp.{n}", layer, "mlp", dim=0) for n in ("W_in", "W_gate")]
    if "unembed" in parts:
        found.append(_weight(model, "W_U", len(blocks(model)), "unembed", dim=0))
    return [w for w in found if w is not None]


_READ_BY_ATTENTION = ("W_Q", "W_K", "W_V")


def _before(layer: int, reads: str, writing: Sequence[Weight], parallel: bool) -> list[Weight]:
    """Those that write before a norm of block `layer`: its own attention too, unless that reads the norm or runs beside
    the MLP."""
    found = [w for w in writing if w.layer < layer]
    if not parallel and "attention" not in reads.split("+"):
        found += [w for w in writing if w.layer == layer and w.part == "attention"]
    return found


def _folded(
    model: HookedModel, projects: bool, gain: Tensor | None, bias: Tensor | None, readers: Sequence[Weight]
) -> tuple[bool, str]:
    if (gain is not None and not bool((gain == 1).all())) or (bias is not None and not bool((bias == 0).all())):
        return False, ""
    unit = "gain is exactly 1" + (" and bias 0" if bias is not None else "")
    if gain is None:
        found, reason = True, "no gain or bias of its own"
    elif getattr(model, "compatibility_mode", False) is True:
        found, reason = True, f"{unit}, in a {world(model)} in compatibility mode"
    elif projects and readers and all(w.centred for w in readers):
        found, reason = True, f"{unit}, and what reads it is centred as folding leaves it"
    else:
        return False, f"{unit}, but nothing shows that they were folded away: untrained or frozen?"
    if projects and (wrong := [w for w in readers if not w.centred]) and len(wrong) < len(readers):
        reason += f"; {wrong[0].name} is not centred as the others that read it are"
    return found, reason


def state_of(
    model: HookedModel,
    *,
    layer: int,
    reads: str,
    reading_layers: Sequence[int],
    projects: bool,
    gain: Float[Tensor, " d"] | None,
    bias: Float[Tensor, " d"] | None,
    x: Float[Tensor, "*batch d"] | None,
    writing: Sequence[Weight],
) -> tuple[str, str]:
    """One of STATES for a norm, and the evidence in words.

    Args:
        model: any hooked model.
        layer: the norm's block.
        reads: who takes its output.
        reading_layers: the blocks that do.
        projects: whether it centres.
        gain, bias: its affine part as it acts, or None.
        x: some of its inputs; None if it never ran.
        writing: `writing_weights(model)`.
    """
    plain = gain is None or bool((gain == 1).all())  # else the weights that read it are not worth looking at
    readers = reading_weights(model, reads, reading_layers) if projects and plain else []
    folded, reason = _folded(model, projects, gain, bias, readers)
    reasons = [reason] if reason else []
    centred = False
    inside = reads in ("query", "key") or (x is not None and x.shape[-1] != int(model.cfg.d_model))
    if x is not None:
        stream = x.double()
        share = float(stream.mean(-1).abs().max() / stream.pow(2).mean().sqrt().clamp_min(1e-300))
        centred = share <= centred_bound(x.dtype)
        reasons.append(f"|mean| of its input is at most {share:.1e} of its RMS")
    if not inside:
        before = _before(layer, reads, writing, bool(getattr(model.cfg, "parallel_attn_mlp", False)))
        hidden = [w for w in before if math.isnan(w.off_centre)]
        wrong = [w for w in before if w.off_centre > w.bound]
        if wrong:
            worst = max(wrong, key=lambda w: w.off_centre)
            reasons.append(f"{worst.name}, which writes to it, is not centred (|mean| {worst.off_centre:.1e} of RMS)")
            centred = False
        elif hidden:
            reasons.append(f"{hidden[0].name} is not shown by this model: told from the stream alone")
        elif before:
            largest = max(w.off_centre for w in before)
            reasons.append(f"every writing weight before it is centred (|mean| at most {largest:.1e} of RMS)")
    return STATES[folded + 2 * centred], "; ".join(reasons)
