"""Hook points of lab models: TransformerLens's, or plain ones for a process without TransformerLens.

Importing TransformerLens and transformers takes seconds. A command that measures only a lab model as it was trained
does without them (`leave_out_transformer_lens`): plain hook points take the same hooks.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from torch import nn


class PlainPoint(nn.Module):
    """An identity that hooks can be put on, as on TransformerLens's `HookPoint`."""

    def __init__(self) -> None:
        super().__init__()
        self.name = ""
        self.fwd_hooks: list[Any] = []

    def forward(self, x: Any) -> Any:
        return x

    def add_hook(self, hook: Callable[..., Any], is_permanent: bool = False, prepend: bool = False) -> None:
        """Call `hook(value, hook=self)` at each pass; what it returns, unless None, is used from there on."""
        handle = self.register_forward_hook(lambda _module, _inputs, output: hook(output, hook=self), prepend=prepend)
        added = SimpleNamespace(hook=handle, is_permanent=is_permanent, user_hook=hook)
        self.fwd_hooks.insert(0 if prepend else len(self.fwd_hooks), added)

    def remove_hooks(self) -> None:
        """Remove the hooks that are not permanent."""
        for added in [a for a in self.fwd_hooks if not a.is_permanent]:
            added.hook.remove()
            self.fwd_hooks.remove(added)


class PlainRoot(nn.Module):
    """A model with plain hook points, by name in `hook_dict`."""

    def setup(self) -> None:
        """Name the modules; call when all are there."""
        self.hook_dict = {}
        for name, module in self.named_modules():
            if isinstance(module, PlainPoint):
                module.name = name
                self.hook_dict[name] = module


class PlainTokenizer:
    """A tokenizer file as transformers' `PreTrainedTokenizerFast` reads it, as far as prompts need it."""

    pad_token_id = None

    def __init__(self, tokenizer_file: str, bos_token: str, eos_token: str) -> None:
        from tokenizers import Tokenizer

        self.own = Tokenizer.from_file(tokenizer_file)
        self.bos_token_id, self.eos_token_id = (self.own.token_to_id(mark) for mark in (bos_token, eos_token))

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": self.own.encode(text).ids}

    def decode(self, ids: list[int]) -> str:
        text: str = self.own.decode(ids, skip_special_tokens=False)
        return text


def leave_out_transformer_lens() -> None:
    """Give this process's lab models plain hook points; call before the first import of a lab model."""
    if "ln_probe.analyses.lab.transformer" not in sys.modules:
        PlainPoint.__name__ = "HookPoint"  # by which hook points are told from other modules
        globals().update(HookPoint=PlainPoint, HookedRootModule=PlainRoot, tokenizer_class=lambda: PlainTokenizer)


def tokenizer_class() -> Any:
    """Return the class that reads a tokenizer's file."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast


def __getattr__(name: str) -> Any:
    if name == "HookPoint":
        from transformer_lens.hook_points import HookPoint

        return HookPoint
    if name == "HookedRootModule":
        from transformer_lens.HookedRootModule import HookedRootModule

        return HookedRootModule
    raise AttributeError(name)
