"""Make an edit of norms permanent: a Hugging Face model whose own norms compute the edited form.

A norm without scaling computes gain·Px / c. No checkpoint format has such a norm, but every norm with an eps has it as
a limit: with eps = E far above the mean square of any vector, sigma is √E for all of them, and a gain of gain·√E / c
gives gain·Px / c. Released norm-free GPT-2s are stored so (Heimersheim 2024; Baroni et al. 2025).
"""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ln_probe.hooks.edits import InterventionError, quiet
from ln_probe.hooks.in_memory import in_original, same_weights
from ln_probe.hooks.interventions import Rows, without
from ln_probe.hooks.model import HookedModel, OneLine, check_model, evaluating, plain_path, probe_tokens, run, world
from ln_probe.hooks.norm import Site
from ln_probe.hooks.scales import UNIFORM, Constant
from ln_probe.hooks.sites import facts_of, find_sites
from ln_probe.hooks.variants import VARIANTS

# Mean squares of residual streams reach about 1e6 (massive activations), which is 1e-6 of this.
EPS = 1e12
# Names under which Hugging Face configs keep the eps of their norms.
_EPS_NAMES = ("layer_norm_epsilon", "layer_norm_eps", "layernorm_epsilon", "rms_norm_eps", "norm_epsilon", "norm_eps")
# Largest difference of logits, relative to the largest logit, between the saved form and the edited model.
_SAME = 1e-5
_LENGTH = 16  # tokens that both are compared on


@dataclass(frozen=True, repr=False)
class PermanentEdit(OneLine):
    """A Hugging Face model with an edit of its norms made permanent.

    Attributes:
        model: the edited copy, a `PreTrainedModel`; the model it was made of is unchanged.
        variant: the edit, "no_scaling", "no_projection" or "both_removed".
        sites: names of the norms that were edited.
        divisors: what each of them divides by.
        difference: largest difference of its logits from those under `without`, relative to the largest logit.
        tokenizer: the model's; None if it has none.

    Example:
        >>> permanent = ln_probe.hooks.make_permanent(model, "scaling")
        >>> permanent.model, permanent.divisors
    """

    model: Any
    variant: str
    sites: tuple[str, ...]
    divisors: Mapping[str, Constant]
    difference: float
    tokenizer: Any = None

    def save(self, folder: str | Path) -> Path:
        """Write a Hugging Face folder, and return its path.

        `AutoModelForCausalLM.from_pretrained` and `ln_probe.load_model` open it.

        Raises:
            OSError: the folder cannot be written.
            TypeError, ValueError: no folder is named.
        """
        if not isinstance(folder, str | os.PathLike) or not str(folder):
            raise (ValueError if folder == "" else TypeError)(f"give a folder to write to, got {folder!r}")
        if Path(folder).is_file():  # transformers would write nothing, and log it
            raise FileExistsError(f"{folder} is a file: give a folder")
        self.model.save_pretrained(folder)
        if callable(getattr(self.tokenizer, "save_pretrained", None)):
            self.tokenizer.save_pretrained(folder)
        return Path(folder)


def make_permanent(
    model: object,
    what: str,
    *,
    sites: str | Sequence[str] = "all",
    scale: str | float | Mapping[str, object] = UNIFORM,
    tokens: Rows | None = None,
) -> PermanentEdit:
    """Return a new Hugging Face model whose norms compute what the model's norms compute under `without`.

    A checkpoint holds one eps for all norms and a gain per norm, so an edit has a standard form if it freezes the
    scaling of every norm that scales, with one constant per norm, and leaves projection as it is. Anything else is
    refused; `without` has no such limits.

    Args:
        model: TransformerBridge, a Hugging Face model in memory, or a lab model that has the shape of a GPT-2. A
            HookedTransformer holds no Hugging Face model: load it with `world="bridge"`.
        what: "scaling"; "both" or "projection" where norms do not project.
        sites: as of `without`; every norm that scales must be among them.
        scale: "uniform", a number, or constants by site that are the same at position 0 as elsewhere.
        tokens: as of `without`.

    Raises:
        TypeError: not a TransformerLens model.
        InterventionError: as `without`; the edit has no standard form (says why).

    Example:
        >>> model = ln_probe.load_model("lm-layernorm")  # or "gpt2", world="bridge"
        >>> ln_probe.hooks.make_permanent(model, "scaling").save("norm-free")
    """
    hooked = check_model(model)
    made = _hugging_face(hooked)
    with without(hooked, what, sites=sites, scale=scale, tokens=tokens) as edit:
        probe = probe_tokens(hooked, _LENGTH)[None]
        with evaluating(hooked), quiet(hooked):
            wanted: Tensor = run(hooked, probe, return_type="logits").detach().cpu()
    every = facts_of(hooked).norms()
    chosen = [s for s in every if s.name in edit.sites]
    _refuse(every, chosen, edit.variant, edit.divisors)
    frozen = {s.name: edit.divisors[s.name] for s in chosen if s.scales}
    if frozen:
        _freeze(made, frozen)
        weights = {k: v.detach() for k, v in made.state_dict().items()}
        made = type(made)(copy.deepcopy(made.config))  # as config and weights alone make it, which a checkpoint holds
        _load(made, weights)
    with torch.no_grad():
        found = made(probe.to(next(made.parameters()).device)).logits.detach().cpu()
    difference = float((found - wanted).abs().max() / wanted.abs().max().clamp_min(1e-12))
    if not difference <= _SAME:
        raise InterventionError(
            f"the edit has no standard form here: the logits of {type(made).__name__} with these gains and eps differ "
            f"by {difference:.1e} of the largest from those of the edited model (norms that take their eps from "
            "elsewhere than the config, processed weights, or a format of 16 bits)"
        )
    tokenizer = getattr(hooked, "tokenizer", None)
    return PermanentEdit(made, edit.variant, edit.sites, edit.divisors, difference, tokenizer)


def _refuse(every: Sequence[Site], chosen: Sequence[Site], variant: str, divisors: Mapping[str, Constant]) -> None:
    """Raise InterventionError if an edit has no standard form."""
    keeps = [s.name for s in chosen if VARIANTS[variant].takes_projection(s) and "centred" not in s.state]
    if keeps:
        raise InterventionError(
            f"{keeps[0]} has no standard form without projection: a LayerNorm always subtracts the mean, and an "
            'RMSNorm divides by another sigma. Use what="scaling", or `without`'
        )
    names = {s.name for s in chosen}
    left = [s.name for s in every if s.scales and s.name not in names]
    if divisors and left:
        raise InterventionError(
            f"{left[0]} would still scale: a config holds one eps for all norms, so a standard form freezes the "
            'scaling of all of them. Use sites="all", or `without`'
        )
    if apart := [name for name, c in divisors.items() if c.first != c.rest]:
        raise InterventionError(
            f"{apart[0]} has a separate constant at position 0, and no standard norm distinguishes positions. Use "
            'scale="uniform", or `without`'
        )


def _hugging_face(model: HookedModel) -> Any:
    """A separate Hugging Face model with the weights of a hooked one.

    Raises:
        InterventionError: there is none.
    """
    if callable(convert := getattr(model, "to_hugging_face", None)):
        try:
            return convert()
        except ValueError as error:
            raise InterventionError(f"the model has no standard form: {error}") from None
    original: Any = getattr(model, "original_model", None)
    if world(model) != "TransformerBridge" or original is None:
        raise InterventionError(
            f"a {type(model).__name__} holds no Hugging Face model to edit: load the model as a bridge, "
            'ln_probe.load_model(…, world="bridge")'
        )
    made = type(original)(copy.deepcopy(original.config))
    wrapped = {plain_path(k): v for k, v in original.state_dict().items()}
    bias = wrapped.get("lm_head.bias")
    if bias is not None and "lm_head.bias" not in made.state_dict() and bool(bias.any()):
        raise InterventionError(f"the model has no standard form: a {type(made).__name__} has no unembedding bias")
    _load(made, {k: wrapped[k] for k in made.state_dict() if k in wrapped})
    return made


def _load(made: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Load weights in their own format; buffers may be missing.

    Raises:
        InterventionError: a parameter is missing.
    """
    if missing := [n for n, _ in made.named_parameters() if n not in weights]:
        raise InterventionError(f"the bridge does not show {missing[0]} of the model that it wraps")
    made.to(next(iter(weights.values())).dtype)
    made.load_state_dict(dict(weights), strict=False)
    made.eval()


def _freeze(made: Any, constants: Mapping[str, Constant]) -> None:
    """Set eps and gains so that the norms of a Hugging Face model divide by constants."""
    from transformer_lens.model_bridge.sources import build_bridge_from_module

    wrapped = same_weights(made)
    bridge = build_bridge_from_module(
        wrapped, type(made).__name__, hf_config=wrapped.config, tokenizer=None, model_name="local"
    )
    for site in (s for s in find_sites(bridge) if s.name in constants):
        weight: Any = getattr(in_original(made, wrapped, site.module), "weight", None)
        if site.gain is None or not isinstance(weight, Tensor):
            raise InterventionError(f"{site.name} has no gain that could take its constant in")
        with torch.no_grad():
            factor = math.sqrt(EPS) / constants[site.name].rest
            weight.copy_((weight.double() + site.gain_offset) * factor - site.gain_offset)
    for name in _EPS_NAMES:
        if hasattr(made.config, name):
            setattr(made.config, name, EPS)
