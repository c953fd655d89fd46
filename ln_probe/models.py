"""Loading a model by name or path, with proof that what was loaded is the model that was named."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast

from ln_probe.analyses.arguments import check_flags, received
from ln_probe.analyses.text import quoted, step_named
from ln_probe.loading.provenance import ModelSource, source_of

if TYPE_CHECKING:
    import torch
    from torch import nn

    from ln_probe.hooks.default_tokens import BundledPrompts
    from ln_probe.hooks.optimal_constants import Shipped
    from ln_probe.loading.convert import Processing, World

__all__ = ["DTYPES", "ModelSource", "bundled_models", "load_model", "source_of"]

DTYPES = ("float32", "float64", "bfloat16", "float16")

LONGEST_PATH, LONGEST_NAME = 4096, 255  # characters of a path, and bytes of each of its parts, that file systems take

_LAB_FILE = "lab.json"  # what makes a folder a lab run's


def load_model(
    name: str | Path,
    *,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    revision: str | int | None = None,
    allow_pickle: bool = False,
    world: Literal["hooked", "bridge"] | None = None,
    fold_ln: bool = False,
    center_writing_weights: bool = False,
    center_unembed: bool = False,
    fold_value_biases: bool = False,
) -> nn.Module:
    """Load a model, and check once that its logits are those of the original.

    Weights stay as trained unless one of the last four flags is set; a processed model is compared with the
    unprocessed one. `ln_probe.source_of(model)` has the source, and the difference of the logits.

    Args:
        name: a name on the model hub (``gpt2``, ``pythia-70m``, ``owner/model``), a local Hugging Face
            folder, a ``.gguf`` file, a lab run's folder, or a bundled name. A path goes before a name.
        device: ``cpu``, ``cuda``, ``cuda:1``, or a `torch.device`; by default CUDA where there is a GPU, else the CPU
            (``mps`` is refused: it has no float64).
        dtype: format of the weights: ``float32``, ``float64``, ``bfloat16`` or ``float16``, or that `torch.dtype`; by
            default float32.
        revision: branch, tag or commit on the hub (``step1000`` for Pythia), or the step of a lab run.
        allow_pickle: read weights from a pickle (``.bin``, ``.pt``) where there are no safetensors; then with
            ``weights_only=True``.
        world: ``hooked`` (HookedTransformer, TransformerLens 3 only) or ``bridge`` (TransformerBridge); by
            default HookedTransformer where it exists and reproduces the original, else the bridge; lab models are
            bridges by default.
        fold_ln: fold the norms' gains and biases into the weights that read them.
        center_writing_weights: centre the weights that write to the residual stream (LayerNorm models only).
        center_unembed: centre the unembedding over the vocabulary (shifts all logits of a position by one number).
        fold_value_biases: fold the value biases into the attention's output bias.

    Returns:
        A HookedTransformer or TransformerBridge in eval mode; of a lab run whose model neither can hold (post-norm, not
        causal, rotary positions, …), the `LabTransformer` itself.

    Raises:
        FileNotFoundError: the path does not exist, or the folder lacks config.json or weights.
        ConnectionError: a hub name that is not in the local cache, and no network.
        ValueError: an unknown name, option, device or architecture; damaged, quantized or non-finite weights; files
            that change while they are read; pickles without `allow_pickle`; or logits that are not those of the
            original.
        TypeError: a name that is no text or path, or a flag that is neither True nor False.
        ImportError: a ``.gguf`` file without the package ``gguf``.

    Example:
        >>> model = ln_probe.load_model("lm-layernorm")
        >>> model.generate("The ships", max_new_tokens=3, verbose=False)
    """
    from ln_probe.loading.convert import Processing

    if not isinstance(name, str | os.PathLike):
        raise TypeError(f"name must be a model's name or path, got {received(name)}")
    check_flags(
        allow_pickle=allow_pickle,
        fold_ln=fold_ln,
        center_writing_weights=center_writing_weights,
        center_unembed=center_unembed,
        fold_value_biases=fold_value_biases,
    )
    torch_dtype, torch_device = dtype_named(DTYPES[0] if dtype is None else dtype), device_named(device)
    if world not in (None, "hooked", "bridge"):
        raise ValueError(f"world must be 'hooked', 'bridge' or None, got {world!r}.")
    processing = Processing(fold_ln, center_writing_weights, center_unembed, fold_value_biases)
    given = str(name)
    revision = None if revision is None else str(revision)  # a step may come as a number
    check_name(given)
    path = Path(os.path.expanduser(given))
    kind = kind_of(given, path)
    if kind in ("lab", "bundled"):
        folder = path if kind == "lab" else bundled_folder(given)
        own = None if dtype is None else torch_dtype
        return _load_run(given, kind, folder, torch_device, own, revision, world, processing)
    if kind in ("folder", "gguf") and revision is not None:
        raise ValueError(
            f"revision={revision!r} was given for {given}, which is a local {kind}: it holds one version. "
            "Leave revision out, or give the folder of that version."
        )
    return _load_checkpoint(given, kind, path, torch_device, torch_dtype, revision, allow_pickle, world, processing)


def check_name(given: str) -> None:
    """Raise ValueError for what can be the name of no model: an empty text, or one that no file system takes."""
    if not given.strip():
        raise ValueError("the model's name is empty: give a hub name, a path or a bundled name.")
    if len(given) > LONGEST_PATH or any(len(os.fsencode(part)) > LONGEST_NAME for part in given.split("/")):
        raise ValueError(
            f"{quoted(given)} is no model's name: give a hub name, a path or a bundled name of at most {LONGEST_NAME} "
            "bytes between slashes."
        )


def bundled_models() -> list[str]:
    """Names of the checkpoints that come with the package, in alphabetical order.

    Example:
        >>> ln_probe.bundled_models()
        ['lm-layernorm', 'lm-layernorm-removed', 'lm-none', 'lm-projection_only', 'lm-scaling_only']
    """
    return sorted(file.parent.name for file in _bundled_home().glob(f"*/{_LAB_FILE}"))


def held_out_windows() -> BundledPrompts:
    """The default prompts of the bundled models: 64 windows of 128 tokens of the held-out ends of their three books,
    and 16 windows apart for calibration alone (`bench/windows.py` makes the file)."""
    import torch

    from ln_probe.hooks.default_tokens import BundledPrompts

    content = json.loads((_bundled_home().parent / "windows.json").read_text())
    measured, calibration = (tuple(torch.tensor(row) for row in content[part]) for part in ("measured", "calibration"))
    return BundledPrompts(measured, calibration, content["source"])


def shipped_constants(folder: Path) -> Shipped | None:
    """The loss-optimal constants in a checkpoint's folder, as `bench/optimal.py` writes them; None: no such file.

    Raises:
        ValueError: the file is damaged.
    """
    from ln_probe.analyses.files import read_json
    from ln_probe.hooks.optimal_constants import Shipped

    path = folder / "optimal.json"
    return Shipped.of_json(read_json(path)) if path.is_file() else None


def bundled_folder(name: str) -> Path:
    """The folder of a bundled checkpoint."""
    return _bundled_home() / name


def _bundled_home() -> Path:
    from importlib.resources import files

    return Path(str(files("ln_probe"))) / "data" / "checkpoints"


def kind_of(given: str, path: Path) -> Literal["hub", "folder", "gguf", "lab", "bundled"]:
    """What `given` names. A path wins over a name, unless it is a folder without a model by a known name."""
    from ln_probe.loading.hub import known_hub_names

    bundled = bundled_models()
    # os.path answers False where pathlib raises (a name too long, or not a possible path at all).
    if os.path.isfile(path):
        if path.suffix == ".gguf":
            return "gguf"
        raise ValueError(
            f"{given} is a file, and only a .gguf file is a whole model. Give the folder that holds it, with "
            "config.json and the weights."
        )
    if os.path.isdir(path):
        if (path / _LAB_FILE).is_file():
            return "lab"
        if (path / "config.json").is_file() or not (given in bundled or given.lower() in known_hub_names()):
            return "folder"
    if given in bundled:
        return "bundled"
    if re.match(r"[./~\\]|[A-Za-z]:[\\/]", given) or given.endswith((".gguf", "/")) or given.count("/") > 1:
        raise FileNotFoundError(f"{given} does not exist (full path {path.absolute()}). Check the path.")
    return "hub"


def dtype_named(name: str | torch.dtype) -> torch.dtype:
    """The format of this name, or a format itself; ValueError if there is none or weights cannot be in it."""
    import torch

    plain = str(name).removeprefix("torch.") if isinstance(name, torch.dtype) else name
    if plain not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {plain!r}.")
    return cast("torch.dtype", getattr(torch, plain))


def device_named(name: str | torch.device | None) -> torch.device:
    """The device of this name, or a device itself, by default CUDA where there is a GPU, else the CPU; ValueError if it
    is not there."""
    import torch

    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"device must be 'cpu', 'cuda', 'cuda:0', …, got {name!r}.") from error
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(
            f"device {name!r} is not there: this machine shows {torch.cuda.device_count()} CUDA devices to torch "
            f"{torch.__version__}. Use device='cpu'."
        )
    from ln_probe.hooks.model import device_obstacle

    if obstacle := device_obstacle(device):
        raise ValueError(f"device {name!r} cannot be used: {obstacle}. Use device='cpu'.")
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device must be 'cpu' or 'cuda', got {name!r}.")
    return device


def _load_checkpoint(
    given: str,
    kind: str,
    path: Path,
    device: torch.device,
    dtype: torch.dtype,
    revision: str | None,
    allow_pickle: bool,
    world: World | None,
    processing: Processing,
) -> nn.Module:
    """Load a Hugging Face model from the hub, a folder or a .gguf file."""
    from ln_probe.loading.folder import inspect_folder
    from ln_probe.loading.hub import LEGACY_PREFIXES, fetch, official_name
    from ln_probe.loading.pretrained import from_folder, from_gguf, isolated, quiet
    from ln_probe.loading.provenance import combined, files_of_checkpoint, sha256_of_hashes, unchanged
    from ln_probe.loading.verify import into_world

    repository = commit = None
    notes: tuple[str, ...] = ()
    if kind == "hub":
        with quiet(progress=True):
            repository = official_name(given, also=bundled_models())
            if repository.startswith(LEGACY_PREFIXES):
                raise ValueError(
                    f"{given} ({repository}) is stored in TransformerLens's own older format, a pickle without a "
                    "Hugging Face model to compare with. Load it with TransformerLens and pass the model object."
                )
            snapshot = fetch(repository, revision=revision, allow_pickle=allow_pickle)
        path, revision, commit, notes = snapshot.folder, snapshot.revision, snapshot.commit, snapshot.notes
    with isolated():  # every file is on the disk now
        if kind == "gguf":
            weights: tuple[Path, ...] = (path,)
            with unchanged(weights) as hashes:
                pretrained = from_gguf(path, dtype=dtype, device=device)
        else:
            checkpoint = inspect_folder(path, allow_pickle=allow_pickle)
            weights = checkpoint.weights
            with unchanged(files_of_checkpoint(checkpoint)) as hashes:
                pretrained = from_folder(checkpoint, dtype=dtype, device=device)
        source = ModelSource(
            name=given,
            kind=kind,
            revision=revision,
            commit=commit,
            weights_sha256=sha256_of_hashes({file: hashes[file] for file in weights}),
            inputs_sha256=combined(hashes),
            architecture=pretrained.architecture,
            dtype=str(dtype).removeprefix("torch."),
            notes=(*notes, *pretrained.notes),
            deviations=pretrained.deviations,
        )
        return into_world(pretrained, source, world, processing, hub_name=repository)


def lab_step(revision: str) -> int:
    """The training step that a lab run's revision names."""
    step = step_named(revision)
    if step is None:
        raise ValueError(f"revision of a lab run is a training step (1000 or step1000), got {revision!r}.")
    return step


def _load_run(
    given: str,
    kind: str,
    folder: Path,
    device: torch.device,
    dtype: torch.dtype | None,
    revision: str | None,
    world: World | None,
    processing: Processing,
) -> nn.Module:
    """The model of a lab run; a bundled one brings its prompts and its loss-optimal constants."""
    from ln_probe.analyses.lab.run_folder import load_run
    from ln_probe.loading.lab_models import into_transformer_lens
    from ln_probe.loading.provenance import combined, files_of_lab_run, sha256_of_state, unchanged

    step = None if revision is None else lab_step(revision)
    with unchanged(files_of_lab_run(folder, step)) as read:
        trained = load_run(folder, step)
        trained = trained.to(device=device, dtype=dtype).eval()
    source = ModelSource(
        name=given,
        kind=kind,
        revision=None if step is None else f"step{step}",
        weights_sha256=sha256_of_state(trained),
        inputs_sha256=combined(read),
        architecture=type(trained).__name__,
        world="lab",
        dtype=str(dtype or "float32").removeprefix("torch."),
    )
    model = into_transformer_lens(trained, source, world, processing)
    if kind == "bundled":
        model.__dict__["bundled_prompts"] = held_out_windows()
        if (shipped := shipped_constants(folder)) and shipped.weights_sha256 in read.values():
            model.__dict__["shipped_constants"] = shipped
            model.__dict__["optimal_constants"] = {group: fit.constants for group, fit in shipped.every.items()}
    return model
