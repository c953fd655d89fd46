"""The Hugging Face model itself, from a checked folder or a .gguf file: no network, no remote code."""

from __future__ import annotations

import contextlib
import io
import logging
import re
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ln_probe.hooks.default_tokens import check_contained
from ln_probe.hooks.in_memory import complete_biases, complete_token_ids
from ln_probe.loading.folder import PICKLE_WARNING, Checkpoint, check_header, check_tokenizer, has_tokenizer, some

if TYPE_CHECKING:
    import torch
    from torch import nn

# Loaded and compared with Hugging Face in the tests, in every world that takes them.
TESTED_ARCHITECTURES = (
    "BertForMaskedLM",
    "BloomForCausalLM",
    "GPT2LMHeadModel",
    "GPTJForCausalLM",
    "GPTNeoForCausalLM",
    "GPTNeoXForCausalLM",
    "Gemma2ForCausalLM",
    "Gemma3ForCausalLM",
    "GemmaForCausalLM",
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "MptForCausalLM",
    "OPTForCausalLM",
    "Olmo2ForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
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
        missing_head: why its logits mean nothing, where its head was not in the checkpoint; empty if it was.
        deviations: those notes that say that something else than the folder's whole model was loaded.
    """

    model: nn.Module
    architecture: str
    tokenizer: Any
    notes: tuple[str, ...]
    missing_head: str = ""
    deviations: tuple[str, ...] = ()

    @property
    def config(self) -> Any:
        """The Hugging Face config."""
        return self.model.config


def from_folder(checkpoint: Checkpoint, *, dtype: torch.dtype, device: torch.device) -> Pretrained:
    """Build the Hugging Face model of a checked folder.

    Raises:
        ValueError: an architecture that is unknown, needs custom code or is not a language model; a
            config that does not fit the weights; NaN or infinite weights (the tensor is named); a pickle
            that holds more than tensors.
    """
    from transformers import AutoConfig

    folder = checkpoint.folder
    model_class, notes = _model_class(checkpoint)
    state = _read_pickles(checkpoint.weights) if checkpoint.pickled else None
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        complete_token_ids(config)
        config.transformers_weights = None  # would name another weight file than the one that was checked
        model, info = model_class.from_pretrained(
            None if checkpoint.pickled else folder,
            config=config,
            state_dict=state,
            use_safetensors=None if checkpoint.pickled else True,
            dtype=dtype,
            attn_implementation="eager",  # the other kernels give no attention pattern to hook
            output_loading_info=True,
            local_files_only=True,
        )
    except Exception as error:  # any error of the config or the file has the same answer
        raise ValueError(
            f"{folder}: config.json and the weights do not make a {model_class.__name__}: "
            f"{type(error).__name__}: {_first_lines(error)}"
        ) from error
    missing_head, more = _check_loading_info(folder, checkpoint, model, info)
    notes += more + complete_biases(model)
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data = tensor.data.clone()  # safetensors gives views of the file, which change when it is written to
    model = _ready(model, device, folder)
    tokenizer, more = _tokenizer(folder, vocabulary=checkpoint.config.get("vocab_size"))
    deviations = _layers_left_over(info["unexpected_keys"], model.config)
    if tokenizer is None and has_tokenizer(folder):
        deviations += more
    every = tuple(dict.fromkeys((*notes, *more, *deviations)))
    return Pretrained(model, model_class.__name__, tokenizer, every, missing_head, deviations)


def from_gguf(file: Path, *, dtype: torch.dtype, device: torch.device) -> Pretrained:
    """Unpack an existing .gguf file into a Hugging Face model (quantized weights become floats of `dtype`).

    Raises:
        ImportError: the package `gguf` is not installed.
        ValueError: not a GGUF file, truncated, or of an architecture that transformers cannot unpack.
    """
    from transformers import AutoModelForCausalLM

    check_header(file)
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
        raise ValueError(f"{file} could not be unpacked: {type(error).__name__}: {_first_lines(error)}") from error
    if info["missing_keys"]:
        raise ValueError(f"{file} lacks weights: {some(info['missing_keys'])}.")
    # The weights are plain floats from here on; left in place, this would mark the model as quantized.
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    architecture = type(model).__name__
    model.config.architectures = [architecture]
    complete_token_ids(model.config)
    model = _ready(model, device, file)
    tokenizer, deviations = _tokenizer(file.parent, gguf_file=file.name)
    notes = ("weights unpacked from GGUF: as exact as the file's own quantization", *deviations)
    return Pretrained(model, architecture, tokenizer, notes, deviations=deviations)


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


def _model_class(checkpoint: Checkpoint) -> tuple[Any, tuple[str, ...]]:
    """The transformers class to build, and a note if the folder names a model without a language head."""
    import transformers
    from transformers import CONFIG_MAPPING
    from transformers.models.auto import modeling_auto

    config, folder = checkpoint.config, checkpoint.folder
    model_type = config.get("model_type")
    named = config.get("architectures") or []
    if not isinstance(named, list) or not all(isinstance(name, str) for name in named):
        raise ValueError(f"{folder}: architectures in config.json must be a list of class names, got {named!r:.60}")
    architecture = named[0] if named else None
    known = isinstance(model_type, str) and model_type in CONFIG_MAPPING
    if not known and config.get("auto_map"):
        raise ValueError(
            f"{folder} needs custom Python code to run (auto_map in config.json, model_type {model_type!r}), and "
            "ln_probe does not run code that comes with a model. Load it yourself with TransformerLens and pass the "
            "model object."
        )
    supported = supported_architectures()
    by_type = (modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES, modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    heads = (architecture, *(names.get(str(model_type)) for names in by_type)) if known else ()
    with_head = next((head for head in heads if head in supported), None)
    if with_head is None:
        what = f"architecture {architecture or model_type!r}" if known else f"model_type {model_type!r}"
        others = set(supported).difference(TESTED_ARCHITECTURES)
        raise ValueError(
            f"{folder}: {what} is not supported. Tested: {', '.join(TESTED_ARCHITECTURES)}. TransformerLens holds "
            f"{len(others)} more: ln_probe.loading.pretrained.supported_architectures()."
        )
    note = f"config.json names {architecture or 'no architecture'}; loaded as {with_head}"
    return getattr(transformers, with_head), () if with_head == architecture else (note,)


def _read_pickles(files: tuple[Path, ...]) -> dict[str, torch.Tensor]:
    import torch

    state: dict[str, torch.Tensor] = {}
    for file in files:
        try:
            part = torch.load(file, map_location="cpu", weights_only=True)
        except Exception as error:
            raise ValueError(
                f"{file} was not read: it is corrupt, or holds more than tensors "
                f"({type(error).__name__}: {_first_lines(error)}). {PICKLE_WARNING}"
            ) from error
        if isinstance(part, dict) and isinstance(part.get("state_dict"), dict):
            part = part["state_dict"]
        if not isinstance(part, dict) or not all(isinstance(value, torch.Tensor) for value in part.values()):
            raise ValueError(
                f"{file} holds a {type(part).__name__}, expected a state dict (tensor names to tensors). "
                "Save model.state_dict(), or better save_pretrained."
            )
        state.update(part)
    return state


def _check_loading_info(
    folder: Path, checkpoint: Checkpoint, model: Any, info: dict[str, Any]
) -> tuple[str, tuple[str, ...]]:
    """Return why the model has no head of its own (empty if it has one), and notes about the weights.

    Raises:
        ValueError: weights of the body are missing, which transformers would draw at random, or weights of the head
            although the config names the very class that was built.
    """
    architecture, body = type(model).__name__, f"{model.base_model_prefix}."
    missing, unused = sorted(info["missing_keys"]), sorted(info["unexpected_keys"])
    head = [name for name in missing if not name.startswith(body)]
    named = checkpoint.config.get("architectures") or []
    if missing and (len(head) < len(missing) or architecture in named):
        raise ValueError(
            f"{folder} lacks {len(missing)} weights of a {architecture}: {some(missing)} "
            f"(files: {', '.join(file.name for file in checkpoint.weights)}). The config and the weights do "
            "not belong together, or a file is missing."
        )
    reason = ""
    if head:
        reason = f"{NO_HEAD}: {some(head)} drawn at random (seed 0)"
    elif other := next((name for name in named if _OTHER_TASK.search(name)), ""):
        its = f" ({some(unused)})" if unused else ""
        reason = f"{NO_HEAD}: the head of a {other}{its} predicts no tokens, and the embedding is used as one"
    if reason:
        reason += ", so logits and losses of this model are meaningless; what happens inside its blocks is not affected"
    notes: tuple[str, ...] = (reason,) if reason else ()
    if unused:
        notes += (f"weights in the file that a {architecture} has no place for: {some(unused)}",)
    return reason, notes


# The number of a block in the name of one of its weights.
_BLOCK = re.compile(r"(?:^|\.)(?:h|layers?|blocks?)\.(\d+)\.")


def _layers_left_over(unexpected: Iterable[str], config: Any) -> tuple[str, ...]:
    """A note if the weights hold blocks beyond those of the configuration: another model was saved than is built."""
    layers = getattr(config, "num_hidden_layers", None)
    numbers = {int(found[1]) for name in unexpected if (found := _BLOCK.search(name))}
    beyond = sorted(n for n in numbers if isinstance(layers, int) and n >= layers)
    if not beyond:
        return ()
    return (
        f"config.json says {layers} layers, and the weights hold {beyond[-1] + 1}: the model was built without layers "
        f"{beyond[0]} to {beyond[-1]}",
    )


def _ready(model: Any, device: torch.device, where: Path) -> Any:
    """The model on a device, in eval mode; ValueError if it has weights that are not finite (names one)."""
    model = model.to(device).eval()
    for name, parameter in model.named_parameters():
        finite = parameter.isfinite()
        if bool(finite.all()):
            continue
        count = int((~finite).sum())
        kind = "NaN" if bool(parameter.isnan().any()) else "infinite"
        dtype = str(parameter.dtype).removeprefix("torch.")
        hint = " (float16 ends at 65504: try float32 or bfloat16)" if dtype == "float16" else ""
        raise ValueError(
            f"{where}: weight {name} of shape {tuple(parameter.shape)} holds {count} {kind} "
            f"{'entry' if count == 1 else 'entries'} in {dtype}{hint}. The file is damaged or the training diverged; "
            "nothing can be measured on it."
        )
    return model


def _tokenizer(folder: Path, *, vocabulary: object = None, **file: str) -> tuple[Any, tuple[str, ...]]:
    """The tokenizer of a folder, or of one of its files (None if it cannot be had), and a note about it."""
    from transformers import AutoTokenizer

    if not file and not has_tokenizer(folder):
        return None, ("no tokenizer: the folder holds no tokenizer files; prompts must be token ids",)
    try:
        if (folder / "tokenizer.json").is_file() and not file:
            check_tokenizer(folder / "tokenizer.json")
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False, **file)
        if len(tokenizer) == 0:
            raise ValueError("it has no entries")
    except BaseException as error:
        check_contained(error)
        which = next((f"the one in {name}" for name in file.values()), "the folder's")
        return None, (f"no tokenizer: {which} could not be read ({_first_lines(error)}); prompts must be token ids",)
    if isinstance(vocabulary, int) and len(tokenizer) > vocabulary:
        return tokenizer, (
            f"the tokenizer knows {len(tokenizer)} tokens, the model {vocabulary}: some texts give ids out of range",
        )
    return tokenizer, ()


def _first_lines(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return text if len(text) <= 400 else text[:400] + " …"


@contextlib.contextmanager
def isolated() -> Iterator[None]:
    """Build a model quietly, without a network, and without touching the caller's random numbers.

    transformers and huggingface_hub ask one constant at each request whether they are offline; the environment variable
    of the same meaning is read only at import. Building a model draws random numbers, and so do weights that a folder
    lacks (a headless model's head): they come from seed 0.
    """
    import torch
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE
    with quiet(), torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        constants.HF_HUB_OFFLINE = True
        try:
            yield
        finally:
            constants.HF_HUB_OFFLINE = before


@contextlib.contextmanager
def quiet(*, progress: bool = False) -> Iterator[None]:
    """Keep the libraries' prints, warnings, log lines and (but for `progress`) progress bars away from the console.

    TransformerLens prints on loading, logs on the root logger (which may install a handler there), and both
    libraries set log levels when imported. All of it is undone on the way out.
    """
    from transformers.utils import logging as transformers_logging

    root, library = logging.getLogger(), logging.getLogger("transformers")
    handlers, level = list(root.handlers), library.level
    had_bar = transformers_logging.is_progress_bar_enabled()

    def is_of_others(record: logging.LogRecord) -> bool:
        return "transformer_lens" not in record.pathname

    root.addFilter(is_of_others)
    library.setLevel(logging.ERROR)
    if not progress:
        transformers_logging.disable_progress_bar()
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")
            stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
            if not progress:  # some bars are drawn by tqdm itself, past transformers' own switch
                stack.enter_context(contextlib.redirect_stderr(io.StringIO()))
            yield
    finally:
        root.removeFilter(is_of_others)
        root.handlers[:] = handlers
        library.setLevel(level)
        if had_bar and not progress:
            transformers_logging.enable_progress_bar()
