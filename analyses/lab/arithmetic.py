"""In which numbers a lab model computes, as the lab.json beside its weights says: float32 unless it says otherwise.

A compiled program is right in float64 alone (`"dtype": "float64"`), and one that is compiled for fixed precision
only where its activations are rounded (`"precision": {"bits": …, "fraction": …}`).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformer_lens.HookedRootModule import HookedRootModule

from ln_probe.analyses.files import read_json
from ln_probe.analyses.lab.fixed_precision import Precision, install
from ln_probe.analyses.lab.run_folder import LAB_FILE

_DTYPES = {"float32": torch.float32, "float64": torch.float64}


@dataclass(frozen=True)
class Arithmetic:
    """The numbers of a lab model.

    Attributes:
        dtype: of its weights and activations.
        bound: it computes something else in any other format.
        precision: the grid that its activations are rounded to; None: real arithmetic, as far as `dtype` goes.
    """

    dtype: torch.dtype = torch.float32
    bound: bool = False
    precision: Precision | None = None

    @property
    def described(self) -> dict[str, Any]:
        """What lab.json is to say of it, as plain JSON."""
        grid = self.precision
        return {
            "dtype": str(self.dtype).removeprefix("torch."),
            "precision": None if grid is None else {"bits": grid.bits, "fraction": grid.fraction},
        }

    def give(self, model: HookedRootModule) -> None:
        """Make a model compute so, once it has its weights.

        Raises:
            ValueError: a weight is no number of the grid.
        """
        assert isinstance(model, nn.Module)
        model.to(self.dtype)
        if self.precision is not None:
            install(model, self.precision)


def arithmetic_of(folder: Path) -> Arithmetic:
    """What the lab.json of a folder says.

    Raises:
        ValueError: it is damaged, or of a program that an earlier version compiled and saved in float32.
    """
    path = folder / LAB_FILE
    held = read_json(path)
    if not isinstance(held, dict):
        raise ValueError(f"{path} does not describe a lab model (it holds no object)")
    if "dtype" not in held:
        if held.get("task") == "compiled":
            raise ValueError(
                f"{path} is of a program compiled by an earlier version of ln_probe, which saved it in float32: there "
                "it does not do what the program does. Compile it again"
            )
        return Arithmetic()
    try:
        dtype, grid = _DTYPES[held["dtype"]], held["precision"]
        return Arithmetic(dtype, True, None if grid is None else Precision(**grid))
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} does not say in which numbers its model computes ({error!r})") from error
