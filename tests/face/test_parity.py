"""One model, one report: whichever TransformerLens world it is loaded into, raw or folded, and whichever version.

The worlds of the environment are compared with each other: HookedTransformer and the bridge in TransformerLens 3.9.
With LN_PROBE_PARITY set to a folder, tables are kept there as parquet and compared with those that another environment
left (`.ci/run`: the suite in TransformerLens 3.9, then in 4.3, which has only the bridge).
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from architectures import folded_in_place, hugging_face
from same_findings import TABLES, assert_same_findings

import ln_probe
from ln_probe.loading.convert import World, has_hooked_transformer

pytestmark = pytest.mark.lens
SLOW = (pytest.mark.slow, pytest.mark.release)

TOKENS = torch.randint(0, 50, (2, 28), generator=torch.Generator().manual_seed(5))


@dataclass(frozen=True)
class Case:
    arch: str
    processed: bool
    dtype: str

    def __str__(self) -> str:
        return f"{self.arch}-{'folded' if self.processed else 'raw'}-{self.dtype}"

    def tolerance(self, *names: str) -> float:
        """For two of the reports, named as their folders are."""
        if self.dtype == "float32":
            return 1e-4
        # Rotary tables, and the norms of Hugging Face's Llama, are float32 in float64 models too. And TransformerLens
        # rounds float64 weights to float32 to fold them, differently in its two worlds (`process_weights`).
        folds_alike = len({n.split("-")[0] for n in names}) == 1
        return 1e-9 if self.arch == "gpt2" and (folds_alike or not self.processed) else 1e-6

    def load(self, folder: Path, world: World) -> Any:
        """Return the model in a class; folded, and centred too where the norm projects, if the case is of that."""
        model = ln_probe.load_model(folder, world=world, dtype=self.dtype, device="cpu")
        return folded_in_place(model, centre=self.arch != "llama") if self.processed else model


CASES = [Case(a, p, t) for a in ("gpt2", "neox", "llama") for p in (False, True) for t in ("float32", "float64")]


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where tables of this and other environments lie."""
    given = os.environ.get("LN_PROBE_PARITY")
    return Path(given) if given else tmp_path_factory.mktemp("parity")


def worlds() -> list[World]:
    return ["hooked", "bridge"] if has_hooked_transformer() else ["bridge"]


def report_in(world: World, folder: Path, case: Case) -> Any:
    return ln_probe.analyze(case.load(folder, world), TOKENS, progress=False)


@pytest.mark.parametrize(
    "case",
    [pytest.param(c, id=str(c), marks=[] if str(c) == "gpt2-raw-float32" else SLOW) for c in CASES],
)
def test_worlds_agree(case: Case, kept: Path, tmp_path: Path) -> None:
    hugging_face(case.arch, torch.float64).save_pretrained(tmp_path / "model")
    here = kept / str(case)
    for world in worlds():
        report = report_in(world, tmp_path / "model", case)
        out = here / f"{world}-{version('transformer-lens')}"
        out.mkdir(parents=True, exist_ok=True)
        assert {"selectable", "unselectable"} <= set(report.keys["verdict"])
        assert len(report.causal)
        for table in TABLES:
            getattr(report, table).to_parquet(out / f"{table}.parquet")
    found = sorted(here.iterdir())
    if len(found) == 1:
        why = f"only {found[0].name} is there: run this with TransformerLens 3.9 first, and the same LN_PROBE_PARITY"
        assert "LN_PROBE_PARITY" not in os.environ, why
        pytest.skip(why)
    for other in found[1:]:
        assert_same_findings(
            read(found[0]), read(other), case.tolerance(found[0].name, other.name), f"{found[0].name} and {other.name}"
        )


def read(folder: Path) -> dict[str, pd.DataFrame]:
    return {t: pd.read_parquet(folder / f"{t}.parquet") for t in TABLES}
