"""Names on the model hub, and the download of a repository's config, tokenizer and weights."""

from __future__ import annotations

import re
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path

from ln_probe.analyses.text import step_named

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


def known_hub_names() -> dict[str, str]:
    """Map every name that TransformerLens knows (short and official, lower case) to its official name."""
    from transformer_lens.supported_models import MODEL_ALIASES, OFFICIAL_MODEL_NAMES

    names: dict[str, str] = {}
    for official in OFFICIAL_MODEL_NAMES:
        names[official.lower()] = official
        for alias in MODEL_ALIASES.get(official, ()):
            names[alias.lower()] = official
    return names


def official_name(name: str, *, also: Sequence[str] = ()) -> str:
    """Return the repository of a name or alias of TransformerLens, or of any ``owner/model``.

    Raises:
        ValueError: an unknown bare name; the nearest known names, those in `also` among them, are suggested.
    """
    official = known_hub_names().get(name.lower())
    if official is not None:
        return official
    if re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        return name
    raise _unknown(name, also)


def hub_revision(repository: str, revision: str | None) -> str | None:
    """Return the hub's spelling of a revision: a bare step number of Pythia or Stanford CRFM becomes a branch."""
    if revision is not None and revision.isdigit():
        if repository.startswith("EleutherAI/pythia"):
            return f"step{revision}"
        if repository.startswith("stanford-crfm/"):
            return f"checkpoint-{revision}"
    return revision


def fetch(repository: str, *, revision: str | None, allow_pickle: bool) -> Path:
    """Download a branch, tag or commit of a repository, or find it in the local cache.

    Returns:
        The folder of the commit; its name is the commit's hash.

    Raises:
        ValueError: no such repository or revision, no access to it, or no weights that may be read.
        ConnectionError: it is neither in the cache nor can it be downloaded.
    """
    folder = _download(repository, revision, "model*.safetensors*")
    if _holds(folder, SAFETENSORS):
        return folder
    if allow_pickle:
        folder = _download(repository, revision, "pytorch_model*.bin*")
        if _holds(folder, PICKLES):
            return folder
        raise ValueError(f"{repository} holds neither {SAFETENSORS[0]} nor {PICKLES[0]}.")
    raise ValueError(f"{repository} holds no {SAFETENSORS[0]}. {PICKLE_WARNING}")


def _holds(folder: Path, names: Sequence[str]) -> bool:
    return any((folder / name).is_file() for name in names)


def _download(repository: str, revision: str | None, weights: str) -> Path:
    """Return the folder of a revision that holds its config, tokenizer and the weights of this pattern."""
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    patterns = [*_CONFIG_AND_TOKENIZER, weights]
    try:
        return Path(
            snapshot_download(
                repository,
                revision=revision,
                allow_patterns=patterns,
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
    except Exception as error:  # no network, a server's error, a full disk, an incomplete copy in the cache
        at = "" if revision is None else f" at revision {revision!r}"
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        if constants.HF_HUB_OFFLINE:
            reason = "HF_HUB_OFFLINE is set"
        raise ConnectionError(
            f"{repository}{at} is not on this machine and cannot be downloaded ({reason}): give a local folder, or a "
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


def _unknown(name: str, also: Sequence[str] = ()) -> ValueError:
    near = get_close_matches(name.lower(), [*known_hub_names(), *also], n=4, cutoff=0.5)
    suggestion = f" Nearest known names: {', '.join(near)}." if near else ""
    return ValueError(
        f"No model is called {name!r}.{suggestion} Give a name on the model hub (gpt2, owner/model), a Hugging Face "
        "folder, a .gguf file, a lab run's folder, or a bundled name (ln-probe models)."
    )
