"""A compiled program in the folder of a lab run, to be loaded and measured like a trained model."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from ln_probe.analyses.lab.arithmetic import Arithmetic
from ln_probe.analyses.lab.compiler.crasp_compiler import CompiledProgram
from ln_probe.analyses.lab.norms import SCALES
from ln_probe.analyses.lab.run_folder import MODEL_FILE, claim, hashes_beside
from ln_probe.analyses.lab.training import save_model

PROGRAM_FILE = "program.crasp"


def save_compiled(compiled: CompiledProgram, out: Path) -> Path:
    """Write a compiled program's weights, shape and source into a folder that `load_model` takes.

    What is loaded from it computes as the program was compiled: in float64 and, of the construction "rounding", in
    fixed precision (see `fixed_precision.install`).

    Raises:
        FileExistsError: the folder holds another program's model, or something else.
        ValueError: compiled for rounding with an eps that its norms lose only where they round.
    """
    grid, cfg = compiled.precision, compiled.model.cfg
    if grid is not None and cfg.norm in SCALES and not grid.absorbs(cfg.eps):
        raise ValueError(
            f"eps {cfg.eps:g} is lost only where norms round, and in a loaded model they do not (analyses take them by "
            "their formula): compile without eps"
        )
    identity = {
        "task": "compiled",
        "model": compiled.model.cfg.to_dict(),
        "program": compiled.program.source,
        "construction": compiled.construction,
        "alphabet": list(compiled.alphabet),
        **Arithmetic(torch.float64, True, grid).described,
    }
    claim(out, json.loads(json.dumps(identity)))
    (out / PROGRAM_FILE).write_text(compiled.program.source, encoding="utf-8")
    save_model(compiled.model, out / MODEL_FILE, torch.float64, about={"beside": hashes_beside(out)})
    return out
