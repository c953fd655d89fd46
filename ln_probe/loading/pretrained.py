"""Hugging Face models from a folder or a .gguf file, without a network and without code that comes with a model."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import re
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ln_probe.hooks.model import complete_biases, complete_token_ids
from ln_probe.loading.hub import PICKLE_WARNING, PICKLES, SAFETENSORS

if TYPE_CHECKING:
    import torch
    from torch import nn

# Any one of these is a whole tokenizer, or (pairs) its two halves.
_TOKENIZERS = (
    ("tokenizer.json",),
    ("vocab.json", "merges.txt"),
    ("vocab.txt",),
    ("tokenizer.model",),
    ("spiece.model",),
    ("sentencepiece.bpe.model",),
)

# How the note begins that tells a model whose logits mean nothing.
NO_HEAD = "the folder holds no language-model head"
# Classes whose head is for another task than predicting tokens: GPT2ForSequenceClassification and the like.
_OTHER_TASK = re.compile(r"For(?!CausalLM|MaskedLM|PreTraining|ConditionalGeneration)[A-Z]\w*$")


@dataclass(frozen=True)
class Pretrained:
    """A Hugging Face model, ready to be wrapped or converted.

    Attributes:
        model: the model, in eval mode, with eager attention, on its device and in its dtype.
        weights: the files of its weights; empty for a model in memory.
        missing_head: why its logits mean nothing, where its head was not in the checkpoint; empty if it was.
    """

    model: nn.Module
    architecture: str
    tokenizer: Any
    notes: tuple[str, ...]
    weights: tuple[Path, ...] = ()
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

    written = _read_config(folder)
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
            f"{folder}: config.json and the weights do not make a {model_class.__name__}: {_one_line(error)}"
        ) from error
    missing_head, more = _check_loading_info(folder, written.get("architectures") or [], model, info)
    notes += more + complete_biases(model)
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data = tensor.data.clone()  # safetensors gives views of the file, which change when it is written to
    model = _ready(model, device, folder)
    tokenizer, more = _tokenizer(folder, vocabulary=written.get("vocab_size"))
    return Pretrained(model, model_class.__name__, tokenizer, (*notes, *more), weights, missing_head)


def from_gguf(file: Path, *, dtype: torch.dtype, device: torch.device) -> Pretrained:
    """Unpack an existing .gguf file into a Hugging Face model (quantized weights become floats of `dtype`).

    Raises:
        ImportError: the package `gguf` is not installed.
        ValueError: not a GGUF file, truncated, or of an architecture that transformers cannot unpack.
    """
    from transformers import AutoModelForCausalLM

    try:
        import gguf  # noqa: F401
    except ImportError as error:
        raise ImportError(f"Reading {file.name} needs the package gguf: pip install 'ln-probe[gguf]'.") from error
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
        raise ValueError(f"{file} could not be unpacked: {_one_line(error)}") from error
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
    """Class names of the language models that TransformerLens can hold and transformers can build."""
    from transformer_lens.factories.architecture_adapter_factory import SUPPORTED_ARCHITECTURES
    from transformers.models.auto import modeling_auto

    # Names only: asking transformers for each class would import every one of their modules.
    by_type = (modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES)
    language_models = {name for names in by_type for name in names.values() if isinstance(name, str)}
    return sorted(
        name
        for name in language_models.intersection(SUPPORTED_ARCHITECTURES)
        if name.endswith(("ForCausalLM", "LMHeadModel", "ForMaskedLM"))
    )


def weight_files(folder: Path, *, allow_pickle: bool) -> tuple[Path, ...]:
    """Return the files of a folder's weights: safetensors, otherwise pickles if they may be read.

    Raises:
        FileNotFoundError: there are none, or one that the index names is missing.
        ValueError: pickles without `allow_pickle`, or an index that is none.
    """
    present = [folder / name for name in (*SAFETENSORS, *PICKLES) if (folder / name).is_file()]
    if not present:
        raise FileNotFoundError(f"{folder} holds no weights: expected {SAFETENSORS[0]} or {PICKLES[0]}.")
    file = present[0]
    if file.name in PICKLES and not allow_pickle:
        raise ValueError(f"{folder} holds its weights as a pickle. {PICKLE_WARNING}")
    if file.suffix != ".json":
        return (file,)
    weight_map = _read_json(file).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{file} has no weight_map from tensor names to files.")
    files = tuple(folder / str(name) for name in sorted(set(weight_map.values())))
    if absent := [path.name for path in files if not path.is_file()]:
        raise FileNotFoundError(f"{folder} lacks weight files that {file.name} names: {_some(absent)}.")
    return files


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds a {type(content).__name__}, expected an object.")
    return content


def _read_config(folder: Path) -> dict[str, Any]:
    if (folder / "adapter_config.json").is_file():  # which transformers would follow to another model
        raise ValueError(
            f"{folder} holds a PEFT adapter: merge it into its base model (merge_and_unload) and save that."
        )
    path = folder / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{folder} has no config.json: give a folder that save_pretrained wrote.")
    config = _read_json(path)
    if config.get("quantization_config"):
        raise ValueError(f"{folder} holds quantized weights: give plain float weights, or a .gguf file.")
    return config


def _model_class(config: dict[str, Any], folder: Path) -> tuple[Any, tuple[str, ...]]:
    """Return the transformers class to build, and a note if the folder names a model without a language head."""
    import transformers
    from transformers import CONFIG_MAPPING
    from transformers.models.auto import modeling_auto

    model_type = config.get("model_type")
    named = config.get("architectures") or [None]
    architecture = named[0] if isinstance(named, list) else None
    known = isinstance(model_type, str) and model_type in CONFIG_MAPPING
    if not known and config.get("auto_map"):
        raise ValueError(
            f"{folder} needs custom Python code (auto_map in config.json), which ln_probe does not run: load it with "
            "TransformerLens and pass the model."
        )
    supported = supported_architectures()
    by_type = (modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES, modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    heads = (architecture, *(names.get(str(model_type)) for names in by_type)) if known else ()
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
        finite = parameter.isfinite()
        if bool(finite.all()):
            continue
        dtype = str(parameter.dtype).removeprefix("torch.")
        hint = " (float16 ends at 65504: try float32 or bfloat16)" if dtype == "float16" else ""
        raise ValueError(
            f"{where}: weight {name} has {int((~finite).sum())} NaN or infinite entries in {dtype}{hint}. The file is "
            "damaged or the training diverged."
        )
    return model


def has_tokenizer(folder: Path) -> bool:
    """Whether the folder holds the files of a tokenizer (transformers invents an empty one if not)."""
    return any(all((folder / name).is_file() for name in names) for names in _TOKENIZERS)


def _tokenizer(folder: Path, *, vocabulary: object = None, **file: str) -> tuple[Any, tuple[str, ...]]:
    """Return the tokenizer of a folder, or of one of its files (None if it cannot be had), and a note about it."""
    from transformers import AutoTokenizer

    if not file and not has_tokenizer(folder):
        return None, ("no tokenizer: the folder holds no tokenizer files; prompts must be token ids",)
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False, **file)
        if len(tokenizer) == 0:
            raise ValueError("it has no entries")
    except Exception as error:
        which = next((f"the one in {name}" for name in file.values()), "the folder's")
        return None, (f"no tokenizer: {which} could not be read ({_one_line(error)}); prompts must be token ids",)
    if isinstance(vocabulary, int) and len(tokenizer) > vocabulary:
        return tokenizer, (
            f"the tokenizer knows {len(tokenizer)} tokens, the model {vocabulary}: some texts give ids out of range",
        )
    return tokenizer, ()


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text if len(text) <= 300 else text[:300] + ' …'}"


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
        constants.HF_HUB_OFFLINE = True  # asked at each request; the environment variable is read at import only
        try:
            yield
        finally:
            constants.HF_HUB_OFFLINE, disabled, root.handlers[:] = before
            logging.disable(disabled)
