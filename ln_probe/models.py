"""Load a model by name or path, and check that its logits are those of the original."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from ln_probe.analyses.text import check_flags, received, step_named, whole_number
from ln_probe.loading.source import ModelSource, source_of

if TYPE_CHECKING:
    import torch
    from torch import nn

    from ln_probe.hooks.task import BundledPrompts

__all__ = ["DTYPES", "ModelSource", "bundled_models", "load_model", "source_of"]

DTYPES = ("float32", "float64", "bfloat16", "float16")

# The checkpoints in `data/checkpoints`, which come with the package: each a trained model of 4 layers and 16 heads.
BUNDLED = {
    "lm-layernorm": "LayerNorm before attention, the MLPs and the end",
    "lm-layernorm-removed": "lm-layernorm, fine-tuned until constants could replace every norm's sigma",
    "lm-none": "as lm-layernorm, but trained without any norm before attention",
    "lm-projection_only": "as lm-layernorm, but the norms before attention project and do not scale",
    "lm-scaling_only": "as lm-layernorm, but the norms before attention scale and do not project (RMSNorm)",
}
_LAB_FILE = "lab.json"  # what makes a folder a lab run's


def load_model(
    name: str | Path,
    *,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    revision: str | int | None = None,
    allow_pickle: bool = False,
    world: Literal["hooked", "bridge", "lab"] | None = None,
) -> nn.Module:
    """Load a model with its weights as trained, and check once that its logits are those of the original.

    `ln_probe.models.source_of(model)` has the source, and the difference of the logits.

    Args:
        name: a name on the model hub (``gpt2``, ``pythia-70m``, ``owner/model``), a local Hugging Face
            folder, a ``.gguf`` file, a lab run's folder, or a bundled name; a path goes before a name.
            ``name@revision`` is short for `revision`.
        device: ``cpu``, ``cuda``, ``cuda:1``, ``mps``, or a `torch.device`; by default CUDA where there is a GPU, else
            the CPU.
        dtype: format of the weights: ``float32``, ``float64``, ``bfloat16`` or ``float16``, or that `torch.dtype`; by
            default float32.
        revision: branch, tag or commit on the hub (``step1000`` for Pythia), or the step of a lab run.
        allow_pickle: read weights from ``pytorch_model.bin`` where there are no safetensors, with
            ``weights_only=True``.
        world: ``hooked`` (HookedTransformer, TransformerLens 3 only), ``bridge`` (TransformerBridge) or ``lab`` (a lab
            or bundled model as it was trained); by default HookedTransformer where it exists and reproduces the
            original, else the bridge; lab models are bridges by default.

    Returns:
        A HookedTransformer or TransformerBridge in eval mode; of a lab run whose model neither can hold (post-norm, not
        causal, rotary positions, …), the `LabTransformer` itself.

    Raises:
        FileNotFoundError: the path does not exist, or the folder lacks config.json or weights.
        ConnectionError: a hub name that is neither in the local cache nor can be downloaded.
        ValueError: an unknown name, revision, option, device or architecture; damaged, quantized or non-finite weights;
            a pickle without `allow_pickle`; or logits that are not those of the original.
        TypeError: a name that is no text or path, or `allow_pickle` neither True nor False.

    Example:
        >>> model = ln_probe.load_model("lm-layernorm")
        >>> model.generate("The ships", max_new_tokens=3, verbose=False)
    """
    if not isinstance(name, str | os.PathLike):
        raise TypeError(f"name must be a model's name or path, got {received(name)}")
    check_flags(allow_pickle=allow_pickle)
    torch_dtype = dtype_named(DTYPES[0] if dtype is None else dtype)
    torch_device = device_named(device)
    if world not in (None, "hooked", "bridge", "lab"):
        raise ValueError(f"world must be 'hooked', 'bridge', 'lab' or None, got {world!r}.")
    given, in_name = split_revision(str(name))
    if revision is not None and in_name is not None:
        raise ValueError(f"{name} names a revision, and revision={revision!r} another: give one.")
    revision = in_name if revision is None else str(revision)  # a step may come as a number
    path = Path(given).expanduser()
    kind = kind_of(given, path)
    if kind in ("lab", "bundled"):
        folder = path if kind == "lab" else bundled_folder(given)
        return _load_run(given, kind, folder, torch_device, torch_dtype, revision, world)
    if world == "lab":
        raise ValueError(f"world='lab' is for lab runs and bundled models, and {given} is none.")
    if kind in ("folder", "gguf") and revision is not None:
        raise ValueError(f"{given} is a local {kind}, which has no revisions: leave revision={revision!r} out.")
    return _load_checkpoint(given, kind, path, torch_device, torch_dtype, revision, allow_pickle, world)


def load_as_trained(name: str, **options: Any) -> nn.Module:
    """Load a model as `load_model` does, but a lab or bundled one as it was trained.

    That needs no TransformerLens, which takes seconds to import, and half the time of a bridge's pass.
    """
    if kind_of(name, Path(name).expanduser()) not in ("bundled", "lab"):
        return load_model(name, **options)
    from ln_probe.analyses.lab.points import leave_out_transformer_lens

    leave_out_transformer_lens()
    return load_model(name, world="lab", **options)


def split_revision(name: str) -> tuple[str, str | None]:
    """Return the model and the revision of ``name@revision``; None without one, or where a path of that name exists."""
    model, _, revision = name.rpartition("@")
    if not model or not revision or os.path.exists(os.path.expanduser(name)):
        return name, None
    return model, revision


def bundled_models() -> list[str]:
    """Return the names of the checkpoints that come with the package, in alphabetical order.

    Example:
        >>> ln_probe.bundled_models()
        ['lm-layernorm', 'lm-layernorm-removed', 'lm-none', 'lm-projection_only', 'lm-scaling_only']
    """
    return sorted(BUNDLED)


def bundled_folder(name: str) -> Path:
    """Return the folder of a bundled checkpoint."""
    return _data_folder() / "checkpoints" / name


def _data_folder() -> Path:
    return Path(__file__).parent / "data"


def held_out_windows() -> BundledPrompts:
    """Return the default prompts of the bundled models: 64 windows of 128 tokens of the held-out ends of their three
    books, and 16 windows apart for calibration alone (`bench/windows.py` makes the file)."""
    import torch

    from ln_probe.hooks.task import BundledPrompts

    content = json.loads((_data_folder() / "windows.json").read_text(encoding="utf-8"))
    measured = tuple(map(torch.tensor, content["measured"]))
    calibration = tuple(map(torch.tensor, content["calibration"]))
    return BundledPrompts(measured, calibration, content["source"], tuple(content["books"]))


def shipped_constants(folder: Path) -> dict[str, Any] | None:
    """Return the loss-optimal constants in a checkpoint's folder, as `bench/optimal.py` writes them, or None.

    They are of the groups of norms "attention" and "all": under "every" fitted on all default prompts, under "halves"
    on every other one, with the SHA-256 of the weights and of the prompts that they were fitted to.
    """
    from ln_probe.hooks.constants import Constant

    path = folder / "optimal.json"
    if not path.is_file():
        return None
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))

    def constants(pairs: Mapping[str, Sequence[float]]) -> dict[str, Constant]:
        return {name: Constant(*pair) for name, pair in pairs.items()}

    every = {group: constants(pairs) for group, pairs in content["every"].items()}
    halves = {group: tuple(map(constants, both)) for group, both in content["halves"].items()}
    return {**content, "every": every, "halves": halves}


def kind_of(given: str, path: Path) -> Literal["hub", "folder", "gguf", "lab", "bundled"]:
    """Return what `given` names. A path goes before a name, unless it is a folder without a model by a bundled name.

    Raises:
        FileNotFoundError: a path that does not exist.
        ValueError: an empty name, or a file that is no model.
    """
    if not given.strip():
        raise ValueError("the model's name is empty: give a hub name, a path or a bundled name.")
    # os.path answers False where pathlib raises (a name too long, or not a possible path at all).
    if os.path.isfile(path):
        if path.suffix == ".gguf":
            return "gguf"
        raise ValueError(f"{given} is a file, and only a .gguf file is a whole model: give the folder that holds it.")
    if os.path.isdir(path):
        if (path / _LAB_FILE).is_file():
            return "lab"
        if (path / "config.json").is_file() or given not in BUNDLED:
            return "folder"
    if given in BUNDLED:
        return "bundled"
    if re.match(r"[./~\\]|[A-Za-z]:[\\/]", given) or given.endswith((".gguf", "/")) or given.count("/") > 1:
        raise FileNotFoundError(f"{given} does not exist (full path {path.absolute()}). Check the path.")
    return "hub"


def layers_of(given: str, path: Path) -> int:
    """Return how many layers the model of a lab run or a bundled name has; imports nothing heavy.

    Raises ValueError where the run's lab.json describes no model.
    """
    folder = path if (path / _LAB_FILE).is_file() else bundled_folder(given)
    try:
        return int(json.loads((folder / _LAB_FILE).read_text(encoding="utf-8"))["model"]["n_layers"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{folder / _LAB_FILE} describes no model ({error!r}): copy the run's folder again") from error


def dtype_named(name: str | torch.dtype) -> torch.dtype:
    """Return the format of this name, or a format itself; ValueError if there is none or weights cannot be in it."""
    import torch

    plain = str(name).removeprefix("torch.") if isinstance(name, torch.dtype) else name
    if plain not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {plain!r}.")
    return cast("torch.dtype", getattr(torch, plain))


def device_named(name: str | torch.device | None) -> torch.device:
    """Return the device of this name, or a device itself, by default CUDA if there is a GPU, else the CPU;
    ValueError if it is not there."""
    import torch

    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"device must be 'cpu', 'cuda', 'cuda:0', 'mps', …, got {name!r}.") from error
    counts = {"cpu": 1, "cuda": torch.cuda.device_count(), "mps": int(torch.backends.mps.is_available())}
    if (device.index or 0) >= counts.get(device.type, 0):
        raise ValueError(f"device {name!r} is not there, as torch {torch.__version__} sees it: use device='cpu'.")
    return device


def _load_checkpoint(
    given: str,
    kind: str,
    path: Path,
    device: torch.device,
    dtype: torch.dtype,
    revision: str | None,
    allow_pickle: bool,
    world: Literal["hooked", "bridge"] | None,
) -> nn.Module:
    """Load a Hugging Face model from the hub, a folder or a .gguf file."""
    from ln_probe.loading import pretrained as hugging_face
    from ln_probe.loading.convert import into_transformer_lens
    from ln_probe.loading.source import sha256_of_files

    repository = commit = None
    if kind == "hub":
        repository = hugging_face.official_name(given, also=bundled_models())
        if repository.startswith(hugging_face.LEGACY_PREFIXES):
            raise ValueError(
                f"{given} ({repository}) is in TransformerLens's own older format, without a Hugging Face model to "
                "compare with: load it with TransformerLens and pass the model."
            )
        revision = hugging_face.hub_revision(repository, revision)
        path = hugging_face.fetch(repository, revision=revision, allow_pickle=allow_pickle)
        commit = path.name
    with hugging_face.isolated():  # every file is on the disk now
        if kind == "gguf":
            pretrained = hugging_face.from_gguf(path, dtype=dtype, device=device)
        else:
            pretrained = hugging_face.from_folder(path, allow_pickle=allow_pickle, dtype=dtype, device=device)
        source = ModelSource(
            name=given,
            kind=kind,
            revision=revision,
            commit=commit,
            weights_sha256=sha256_of_files(pretrained.weights),
            architecture=pretrained.architecture,
            dtype=str(dtype).removeprefix("torch."),
            notes=pretrained.notes,
        )
        return into_transformer_lens(pretrained, source, world, hub_name=repository)


def _load_run(
    given: str,
    kind: str,
    folder: Path,
    device: torch.device,
    dtype: torch.dtype,
    revision: str | None,
    world: Literal["hooked", "bridge", "lab"] | None,
) -> nn.Module:
    """Load the model of a lab run; a bundled one brings its prompts and its loss-optimal constants."""
    from ln_probe.analyses.lab.train import load_run, weights_of
    from ln_probe.hooks.constants import weights_sample
    from ln_probe.loading.source import remember, sha256_of_files, sha256_of_state

    step = None if revision is None else _step(revision)
    trained = load_run(folder, step).to(device=device, dtype=dtype).eval()
    source = ModelSource(
        name=given,
        kind=kind,
        revision=None if step is None else f"step{step}",
        weights_sha256=sha256_of_state(trained),
        architecture=type(trained).__name__,
        world="lab",
        dtype=str(dtype).removeprefix("torch."),
    )
    if world == "lab":
        model: nn.Module = trained
        remember(model, source)
    else:
        from ln_probe.loading.convert import lab_model

        model = lab_model(trained, source, world)
    if kind == "bundled":
        model.__dict__["bundled_prompts"] = held_out_windows()
        shipped = shipped_constants(folder)
        if shipped and shipped["weights_sha256"] == sha256_of_files([weights_of(folder, step)]):
            model.__dict__["shipped_constants"] = {**shipped, "sample": weights_sample(model.parameters())}
    return model


def _step(revision: str) -> int:
    """Return the training step that a lab run's revision names."""
    step = whole_number(revision, 18)
    step = step_named(revision) if step is None else step
    if step is None:
        raise ValueError(f"revision of a lab run is a training step (1000 or step1000), got {revision!r}.")
    return step
