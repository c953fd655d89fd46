"""Every probe on the CPU and on the stand-in for a GPU, in a process of its own: python on_stand_in.py ARCH FOLDER

torch counts its devices when it first differentiates, so one that comes later cannot be differentiated on.
"""

import importlib.util
import pickle
import sys
from pathlib import Path
from typing import Any

import stand_in
import torch

stand_in.device()
spec = importlib.util.spec_from_file_location("shared_fixtures", Path(__file__).parent.parent / "conftest.py")
fixtures = importlib.util.module_from_spec(spec)
spec.loader.exec_module(fixtures)

import architectures  # noqa: E402

import ln_probe  # noqa: E402  (the fixtures have its shapes checked as it is imported)
from ln_probe.analyses.probes import DEFAULT  # noqa: E402

TOKENS = torch.randint(0, 50, (2, 12), generator=torch.Generator().manual_seed(5))


def bridge(arch: str) -> torch.nn.Module:
    bridged: torch.nn.Module = architectures.bridge_of(architectures.hugging_face(arch))
    return bridged


def main(arch: str, folder: str) -> None:
    model = bridge(arch)
    how: dict[str, Any] = {"probes": DEFAULT, "progress": False, "heads": [0, 3]}
    here = ln_probe.analyze(bridge(arch), TOKENS, **how)
    with stand_in.stand_in() as there:
        stand_in.move(model)
        report = ln_probe.analyze(model, TOKENS, **how)
        assert next(model.parameters()).device == there
    for one in (here, report):
        assert not one.failures, one.failures
    Path(folder, "tables.pickle").write_bytes(pickle.dumps([dict(r.tables) for r in (here, report)]))


if __name__ == "__main__":
    main(*sys.argv[1:])
