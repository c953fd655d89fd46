"""Hugging Face models from the hub, a folder or a .gguf file, without code that comes with a model."""

from __future__ import annotations

import contextlib
import io
import logging
import re
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ln_probe.analyses.text import read_json, step_named

if TYPE_CHECKING:
    import torch
    from torch import nn

# Repositories in TransformerLens's own older format: pickled state dicts without a Hugging Face model.
LEGACY_PREFIXES = ("NeelNanda/", "ArthurConmy/", "Baidicoot/")
SAFETENSORS = ("model.safetensors", "model.safetensors.index.json")
PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json")
PICKLE_WARNING = (
    "A pickle (pytorch_model.bin) can run code: it is read, with weights_only=True, if you pass allow_pickle=True "
    "(--allow-pickle)."
)
_CONFIG_AND_TOKENIZER = ("*.json", "*.txt", "*.model", "*.tiktoken", "*.jinja")
_SUBFOLDERS = "*/*"  # copies in other formats

# Any one of these is a whole tokenizer, or (pairs) its two halves.
_TOKENIZERS = (
    ("tokenizer.json",),
    ("vocab.json", "merges.txt"),
    ("vocab.txt",),
    ("tokenizer.model",),
    ("spiece.model",),
    ("sentencepiece.bpe.model",),
)
NO_HEAD = "the folder holds no language-model head"
# Classes whose head is for another task than predicting tokens: GPT2ForSequenceClassification and the like.
_OTHER_TASK = re.compile(r"For(?!CausalLM|MaskedLM|PreTraining|ConditionalGeneration)[A-Z]\w*$")


# ---------------------------------------------------------------------- the hub


@cache
def known_hub_names() -> dict[str, str]:
    """Map every name that TransformerLens knows (short and official, lower case) to its official name.

    The module that lists them is read by itself: importing TransformerLens takes seconds.
    """
    package: Any = find_spec("transformer_lens")
    spec: Any = spec_from_file_location("supported_models", Path(package.origin).with_name("supported_models.py"))
    lists: Any = module_from_spec(spec)
    spec.loader.exec_module(lists)
    officials = lists.OFFICIAL_MODEL_NAMES
    aliases = {alias.lower(): name for name in officials for alias in lists.MODEL_ALIASES.get(name, ())}
    return {name.lower(): name for name in officials} | aliases


def official_name(name: str, *, also: Iterable[str] = ()) -> str:
    """Return the repository of a name or alias of TransformerLens, or of any ``owner/model``.

    Raises:
        ValueError: an unknown bare name; the nearest known names, those in `also` among them, are suggested.
    """
    official = known_hub_names().get(name.lower())
    if official is None and not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        raise _unknown(name, also)
    return official or name


def hub_revision(repository: str, revision: str | None) -> str | None:
    """Return the hub's spelling of a revision: a bare step number of Pythia or Stanford CRFM becomes a branch."""
    prefixes = {"EleutherAI/pythia": "step", "stanford-crfm/": "checkpoint-"}
    if revision is None or not revision.isdigit():
        return revision
    return next((p for start, p in prefixes.items() if repository.startswith(start)), "") + revision


def fetch(repository: str, *, revision: str | None, allow_pickle: bool) -> Path:
    """Download a branch, tag or commit of a repository, or find it in the local cache.

    Returns:
        The folder of the commit; its name is the commit's hash.

    Raises:
        ValueError: no such repository or revision, no access to it, or no weights that may be read.
        ConnectionError: it is neither in the cache nor can it be downloaded.
    """
    for pattern, names in (("model*.safetensors*", SAFETENSORS), ("pytorch_model*.bin*", PICKLES)):
        if names is PICKLES and not allow_pickle:
            raise ValueError(f"{repository} holds no {SAFETENSORS[0]}. {PICKLE_WARNING}")
        folder = _download(repository, revision, pattern)
        if any((folder / name).is_file() for name in names):
            return folder
    raise ValueError(f"{repository} holds neither {SAFETENSORS[0]} nor {PICKLES[0]}.")


def _download(repository: str, revision: str | None, weights: str) -> Path:
    """Return the folder of a revision that holds its config, tokenizer and the weights of this pattern."""
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    try:
        return Path(
            snapshot_download(
                repository,
                revision=revision,
                allow_patterns=[*_CONFIG_AND_TOKENIZER, weights],
                ignore_patterns=[_SUBFOLDERS],
                cache_dir=constants.HF_HUB_CACHE,
            )
        )
    except RevisionNotFoundError as error:
        raise ValueError(f"{repository} has no revision {revision!r}: give a branch, a tag or a commit.") from error
    except GatedRepoError as error:
        raise ValueError(
            f"{repository} is gated: accept its terms on the model's page, then log in (hf auth login, or HF_TOKEN)."
        ) from error
    except RepositoryNotFoundError as error:
        raise _unknown(repository) from error
    except Exception as error:  # no network, a server's error, a full disk
        reason = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else one_line(error)
        raise ConnectionError(
            f"{repository} is not on this machine and cannot be downloaded ({reason}): give a local folder, or a "
            "bundled model (ln-probe models)."
        ) from error


def checkpoints(repository: str) -> list[str]:
    """Return the branches of a repository that are training steps (step1000, checkpoint-1000), in order of step.

    Raises:
        ConnectionError: the hub cannot be reached.
    """
    from huggingface_hub import HfApi

    try:
        refs = HfApi().list_repo_refs(repository)
    except Exception as error:
        raise ConnectionError(
            f"the training checkpoints of {repository} cannot be listed ({type(error).__name__}): give their steps"
        ) from error
    steps = {branch.name: step for branch in refs.branches if (step := step_named(branch.name)) is not None}
    return sorted(steps, key=lambda name: steps[name])


def _unknown(name: str, also: Iterable[str] = ()) -> ValueError:
    near = get_close_matches(name.lower(), [*also, *known_hub_names()], n=3)
    advice = (
        f"did you mean {' or '.join(near)}?" if near else "give an owner/name, a folder, a .gguf file, a known name"
    )
    return ValueError(f"there is no model {name!r:.80}: {advice} (ln-probe models lists them)")


# ------------------------------------------------------------ folders and files


@dataclass(frozen=True)
class Pretrained:
    """A Hugging Face model, ready to be wrapped or converted.

    Attributes:
        model: the model, in eval mode, with eager attention, on its device and in its dtype.
        weights: the files of its weights.
        missing_head: why its logits mean nothing, where its head was not in the checkpoint; empty if it was.
    """

    model: nn.Module
    architecture: str
    tokenizer: Any
    notes: tuple[str, ...]
    weights: tuple[Path, ...]
    missing_head: str = ""

    @property
    def config(self) -> Any:
        """The Hugging Face config."""
        return self.model.config


def from_folder(folder: Path, *, allow_pickle: bool, dtype: torch.dtype, device: torch.device) -> Pretrained:
    """Load the Hugging Face model of a folder.

    Raises:
        FileNotFoundError: no config.json, or no weights.
        ValueError: config.json is no JSON; quantized weights, an adapter, custom code, or an architecture that is not
            supported; a pickle without `allow_pickle`; a config that does not fit the weights; NaN or infinite weights.
    """
    from transformers import AutoConfig

    from ln_probe.hooks.model import complete_token_ids

    written = read_config(folder)
    model_class, notes = _model_class(written, folder)
    weights = weight_files(folder, allow_pickle=allow_pickle)
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        complete_token_ids(config)
        model, info = model_class.from_pretrained(
            folder,
            config=config,
            use_safetensors=weights[0].suffix == ".safetensors",
            weights_only=True,
            dtype=dtype,
            attn_implementation="eager",  # the other kernels give no attention pattern to hook
            output_loading_info=True,
            local_files_only=True,
        )
    except Exception as error:  # any error of the config or the file has the same answer
        raise ValueError(
            f"{folder}: config.json and the weights do not make a {model_class.__name__}: {one_line(error)}"
        ) from error
    missing_head, more = _check_loading_info(folder, written.get("architectures") or [], model, info)
    model = _ready(model, device, folder)
    tokenizer, on_tokenizer = _tokenizer(folder)
    notes = (*notes, *more, *on_tokenizer)
    return Pretrained(model, model_class.__name__, tokenizer, notes, weights, missing_head)


def from_gguf(file: Path, *, dtype: torch.dtype, device: torch.device) -> Pretrained:
    """Unpack an existing .gguf file into a Hugging Face model (quantized weights become floats of `dtype`).

    Raises:
        ValueError: not a GGUF file, truncated, of an architecture that transformers cannot unpack, or no `gguf`.
    """
    from transformers import AutoModelForCausalLM

    from ln_probe.hooks.model import complete_token_ids

    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            file.parent,
            gguf_file=file.name,
            dtype=dtype,
            attn_implementation="eager",
            output_loading_info=True,
            local_files_only=True,
            trust_remote_code=False,
        )
        model, info = loaded  # the stubs do not know of output_loading_info
    except Exception as error:
        raise ValueError(f"{file} could not be unpacked: {one_line(error).replace(str(file), file.name)}") from error
    if info["missing_keys"]:
        raise ValueError(f"{file} lacks weights: {_some(info['missing_keys'])}.")
    # The weights are plain floats from here on; left in place, this would mark the model as quantized.
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    architecture = type(model).__name__
    model.config.architectures = [architecture]
    complete_token_ids(model.config)
    model = _ready(model, device, file)
    tokenizer, more = _tokenizer(file.parent, gguf_file=file.name)
    notes = ("weights unpacked from GGUF: as exact as the file's own quantization", *more)
    return Pretrained(model, architecture, tokenizer, notes, (file,))


def supported_architectures() -> list[str]:
    """Return the class names of the language models that TransformerLens can hold and transformers can build."""
    from transformer_lens.factories.architecture_adapter_factory import SUPPORTED_ARCHITECTURES
    from transformers.models.auto import modeling_auto

    # Names only: asking transformers for each class would import every one of their modules.
    by_type = (modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES)
    language_models = {name for names in by_type for name in names.values() if isinstance(name, str)}
    heads = ("ForCausalLM", "LMHeadModel", "ForMaskedLM")
    return sorted(name for name in language_models.intersection(SUPPORTED_ARCHITECTURES) if name.endswith(heads))


def weight_files(folder: Path, *, allow_pickle: bool) -> tuple[Path, ...]:
    """Return the files of a folder's weights: safetensors, otherwise pickles if they may be read.

    Raises:
        FileNotFoundError: there are none, or one that the index names is missing.
        ValueError: pickles without `allow_pickle`.
    """
    file = next((folder / name for name in (*SAFETENSORS, *PICKLES) if (folder / name).is_file()), None)
    if file is None:
        raise FileNotFoundError(f"{folder} holds no weights: expected {SAFETENSORS[0]} or {PICKLES[0]}.")
    if file.name in PICKLES and not allow_pickle:
        raise ValueError(f"{folder} holds its weights as a pickle. {PICKLE_WARNING}")
    if file.suffix != ".json":
        return (file,)
    files = tuple(folder / name for name in sorted(set(read_json(file)["weight_map"].values())))
    if absent := [path.name for path in files if not path.is_file()]:
        raise FileNotFoundError(f"{folder} lacks weight files that {file.name} names: {_some(absent)}.")
    return files


def read_config(folder: Path) -> dict[str, Any]:
    """Return config.json of a folder that holds a whole model with plain weights.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it is no JSON, or the folder holds an adapter or quantized weights.
    """
    if (folder / "adapter_config.json").is_file():  # which transformers would follow to another model
        raise ValueError(
            f"{folder} holds a PEFT adapter: merge it into its base model (merge_and_unload) and save that."
        )
    path = folder / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{folder} has no config.json: give a folder that save_pretrained wrote.")
    config: dict[str, Any] = read_json(path)
    if config.get("quantization_config"):
        raise ValueError(f"{folder} holds quantized weights: give plain float weights, or a .gguf file.")
    return config


def _model_class(config: dict[str, Any], folder: Path) -> tuple[Any, tuple[str, ...]]:
    """Return the transformers class to build, and a note if the folder names a model without a language head."""
    import transformers
    from transformers.models.auto import modeling_auto

    model_type, named = config.get("model_type"), config.get("architectures") or [None]
    architecture = named[0] if isinstance(named, list) else None
    known = isinstance(model_type, str) and model_type in transformers.CONFIG_MAPPING
    if not known and config.get("auto_map"):
        raise ValueError(
            f"{folder} needs custom Python code (auto_map in config.json), which ln_probe does not run: load it with "
            "TransformerLens and pass the model."
        )
    by_type = (modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES, modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    heads = (architecture, *(names.get(str(model_type)) for names in by_type)) if known else ()
    supported = supported_architectures()
    with_head = next((head for head in heads if head in supported), None)
    if with_head is None:
        what = f"architecture {architecture or model_type!r}" if known else f"model_type {model_type!r}"
        raise ValueError(
            f"{folder}: {what} is not supported. ln_probe.loading.pretrained.supported_architectures() lists those "
            "that are."
        )
    note = f"config.json names {architecture or 'no architecture'}; loaded as {with_head}"
    return getattr(transformers, with_head), () if with_head == architecture else (note,)


def _check_loading_info(
    folder: Path, named: list[str], model: Any, info: dict[str, Any]
) -> tuple[str, tuple[str, ...]]:
    """Return why the model has no head of its own (empty if it has one), and notes about the weights.

    Args:
        named: the architectures that config.json names.

    Raises:
        ValueError: weights of the body are missing, which transformers would draw at random, or weights of the head
            although the config names the very class that was built.
    """
    architecture, body = type(model).__name__, f"{model.base_model_prefix}."
    missing, unused = sorted(info["missing_keys"]), sorted(info["unexpected_keys"])
    head = [name for name in missing if not name.startswith(body)]
    if missing and (len(head) < len(missing) or architecture in named):
        raise ValueError(f"{folder} lacks {len(missing)} weights of a {architecture}: {_some(missing)}.")
    reason = ""
    if head:
        reason = f"{NO_HEAD}: {_some(head)} drawn at random (seed 0)"
    elif other := next((name for name in named if _OTHER_TASK.search(name)), ""):
        its = f" ({_some(unused)})" if unused else ""
        reason = f"{NO_HEAD}: the head of a {other}{its} predicts no tokens, and the embedding is used as one"
    if reason:
        reason += ", so logits and losses of this model are meaningless; what happens inside its blocks is not affected"
    notes: tuple[str, ...] = (reason,) if reason else ()
    if unused:
        notes += (f"weights in the file that a {architecture} has no place for: {_some(unused)}",)
    return reason, notes


def _ready(model: Any, device: torch.device, where: Path) -> Any:
    """Return the model on a device, in eval mode; ValueError if it has weights that are not finite (names one)."""
    model = model.to(device).eval()
    for name, parameter in model.named_parameters():
        if not (finite := parameter.isfinite()).all():
            raise ValueError(
                f"{where}: weight {name} has {int((~finite).sum())} NaN or infinite entries in {parameter.dtype}: try "
                "float32, or another checkpoint."
            )
    return model


def _tokenizer(folder: Path, **file: str) -> tuple[Any, tuple[str, ...]]:
    """Return the tokenizer of a folder, or of one of its files (None if it cannot be had), and a note about it."""
    from transformers import AutoTokenizer

    # Without the files transformers invents an empty tokenizer.
    if not file and not any(all((folder / name).is_file() for name in names) for names in _TOKENIZERS):
        return None, ("no tokenizer: the folder holds no tokenizer files; prompts must be token ids",)
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False, **file)
        if len(tokenizer) == 0:
            raise ValueError("it has no entries")
    except Exception as error:
        which = next((f"the one in {name}" for name in file.values()), "the folder's")
        return None, (f"no tokenizer: {which} could not be read ({one_line(error)}); prompts must be token ids",)
    return tokenizer, ()


def one_line(error: Exception) -> str:
    """Return an error's type and the beginning of its message."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def _some(names: Iterable[str], most: int = 4) -> str:
    """Return the first names in alphabetical order, and how many more there are."""
    ordered = sorted(names)
    return ", ".join(ordered[:most]) + (f" and {len(ordered) - most} more" if len(ordered) > most else "")


@contextlib.contextmanager
def isolated() -> Iterator[None]:
    """Build a model without a network, without output, and without touching the caller's random numbers.

    Weights that a folder lacks (a headless model's head) are drawn from seed 0. TransformerLens prints on loading and
    logs on the root logger, which may install a handler there.
    """
    import torch
    from huggingface_hub import constants

    root = logging.getLogger()
    before = constants.HF_HUB_OFFLINE, logging.root.manager.disable, list(root.handlers)
    with (
        torch.random.fork_rng(devices=[]),
        warnings.catch_warnings(),
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
    ):
        torch.default_generator.manual_seed(0)
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        constants.HF_HUB_OFFLINE = True  # the environment variable is read at import only
        try:
            yield
        finally:
            constants.HF_HUB_OFFLINE, disabled, root.handlers[:] = before
            logging.disable(disabled)
