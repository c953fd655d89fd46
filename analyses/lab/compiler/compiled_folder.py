"""A compiled program in the folder of a lab run, to be loaded and measured like a trained model."""

from __future__ import annotations

import json
from pathlib import Path

from ln_probe.analyses.lab.compiler.crasp_compiler import CompiledProgram
from ln_probe.analyses.lab.run_folder import LAB_FILE, MODEL_FILE, claim
from ln_probe.analyses.lab.training import save_model

PROGRAM_FILE = "program.crasp"


def save_compiled(compiled: CompiledProgram, out: Path) -> Path:
    """Write a compiled program's weights, shape and source into a folder that `load_model` takes.

    What is loaded from it computes in float32, and in no fixed precision: it is there to be measured. For exact answers
    compile the program again.

    Raises:
        FileExistsError: the folder holds another program's model, or something else.
    """
    grid = compiled.precision
    identity = {
        "task": "compiled",
        "model": compiled.model.cfg.to_dict(),
        "program": compiled.program.source,
        "construction": compiled.construction,
        "alphabet": list(compiled.alphabet),
        "precision": None if grid is None else {"bits": grid.bits, "fraction": grid.fraction},
    }
    claim(out, json.loads(json.dumps(identity)))
    (out / PROGRAM_FILE).write_text(compiled.program.source, encoding="utf-8")
    save_model(compiled.model, out / MODEL_FILE)
    assert (out / LAB_FILE).exists()
    return out
