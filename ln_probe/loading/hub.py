"""Names on the model hub: which are known, whether the hub can be reached, and the files of one revision."""

from __future__ import annotations

import re
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from ln_probe.analyses.checkpoint_names import step_named
from ln_probe.analyses.machinery.files import FileError, read_json
from ln_probe.analyses.machinery.pulse import tell
from ln_probe.loading.downloads import check, gated, is_a_page, portal, status_of, stopped, telling
from ln_probe.loading.folder import PICKLE_WARNING, PICKLES, SAFETENSORS

HUB_TIMEOUT_S = 10.0  # for the one request that decides whether the hub is there; downloads have their own

# Repositories in TransformerLens's own older format: pickled state dicts, no Hugging Face model beside them.
LEGACY_PREFIXES = ("NeelNanda/", "ArthurConmy/", "Baidicoot/")

_HTTP_LIBRARIES = ("httpcore", "httpcore2", "httpx", "httpx2", "requests", "urllib3")

_SMALL_FILES = re.compile(r"(.*\.json|.*\.txt|.*\.model|.*\.tiktoken|.*\.jinja)")


@dataclass(frozen=True)
class HubSnapshot:
    """One revision of a repository, on this disk.

    Attributes:
        repository: the official name.
        folder: the local copy.
        revision: the revision asked for, in the hub's own spelling, or None for the main branch.
        commit: the commit it stands for.
        notes: what the reader of the results should know.
    """

    repository: str
    folder: Path
    revision: str | None
    commit: str | None
    notes: tuple[str, ...]


def known_hub_names() -> dict[str, str]:
    """Every short name and official name that TransformerLens knows (lower case), and its official name."""
    from transformer_lens.supported_models import MODEL_ALIASES, OFFICIAL_MODEL_NAMES

    names: dict[str, str] = {}
    for official in OFFICIAL_MODEL_NAMES:
        names[official.lower()] = official
        for alias in MODEL_ALIASES.get(official, ()):
            names[alias.lower()] = official
    return names


def official_name(name: str, *, also: tuple[str, ...] = ()) -> str:
    """The repository that `name` stands for: a name or alias of TransformerLens, or any ``owner/model``.

    Args:
        name: as the user gave it.
        also: other names (bundled models) to suggest from.

    Raises:
        ValueError: a bare name that nobody knows; the nearest known names are suggested.
    """
    known = known_hub_names()
    official = known.get(name.lower())
    if official is not None:
        return official
    if re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        return name
    raise ValueError(_unknown(name, also=also))


def hub_revision(repository: str, revision: str | None) -> str | None:
    """The hub's spelling of a revision: a bare step number of Pythia or of Stanford CRFM becomes a branch."""
    if revision is not None and revision.isdigit():
        if repository.startswith("EleutherAI/pythia"):
            return f"step{revision}"
        if repository.startswith("stanford-crfm/"):
            return f"checkpoint-{revision}"
    return revision


def fetch(repository: str, *, revision: str | None, allow_pickle: bool) -> HubSnapshot:
    """Download one revision of a repository (or find it in the local cache) and return its folder.

    Args:
        repository: the official name.
        revision: branch, tag or commit, or None for the main branch.
        allow_pickle: whether weights may come as a pickle.

    Raises:
        ValueError: no such repository or revision, no access to it, or weights only as a pickle.
        ConnectionError: the hub cannot be reached and there is no local copy, or the download stopped.
    """
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.file_download import repo_folder_name

    revision = hub_revision(repository, revision)
    tell(f"{repository}: asking {constants.ENDPOINT}")
    try:
        info = _info(repository, revision)
    except _UnreachableError as error:
        return _cached(repository, revision, error.reason)
    sizes = {file.rfilename: getattr(file, "size", None) or 0 for file in info.siblings or ()}
    files = _wanted(repository, list(sizes), allow_pickle=allow_pickle)
    home = Path(constants.HF_HUB_CACHE, repo_folder_name(repo_id=repository, repo_type="model"))
    try:
        with telling(repository, home, {name: sizes[name] for name in files}):
            folder = Path(
                snapshot_download(repository, revision=revision, allow_patterns=files, etag_timeout=HUB_TIMEOUT_S)
            )
    except Exception as error:
        raise stopped(repository, error, constants.ENDPOINT) from error
    check(repository, folder)
    return HubSnapshot(repository, folder, revision, info.sha, ())


@dataclass(frozen=True)
class Description:
    """What the hub says of a model before its weights are fetched.

    Attributes:
        config: its config.json.
        weight_bytes: of the weights that would be fetched; 0 if the hub does not say.
    """

    config: dict[str, Any]
    weight_bytes: int


def describe(repository: str, *, revision: str | None, allow_pickle: bool = True) -> Description:
    """A model's config.json, and how large its weights are; nothing else is fetched.

    Raises:
        ValueError, ConnectionError: as `fetch`.
    """
    from huggingface_hub import constants, hf_hub_download

    revision = hub_revision(repository, revision)
    try:
        info = _info(repository, revision)
    except _UnreachableError as error:
        folder = _cached(repository, revision, error.reason).folder
        weights = [p for p in folder.iterdir() if p.suffix in (".safetensors", ".bin")]
        return Description(_config(folder / "config.json"), sum(p.stat().st_size for p in weights))
    sizes = {file.rfilename: getattr(file, "size", None) or 0 for file in info.siblings or ()}
    files = _wanted(repository, list(sizes), allow_pickle=allow_pickle)
    try:
        path = hf_hub_download(repository, "config.json", revision=revision, etag_timeout=HUB_TIMEOUT_S)
    except Exception as error:
        raise stopped(repository, error, constants.ENDPOINT) from error
    return Description(_config(Path(path)), sum(sizes[f] for f in files if f.endswith((".safetensors", ".bin"))))


def _config(path: Path) -> dict[str, Any]:
    try:
        held = read_json(path)
    except (OSError, FileError):
        return {}
    return held if isinstance(held, dict) else {}


def commit(repository: str, *, revision: str | None) -> str | None:
    """The commit that a revision stands for, on the hub or (without a network) in the local cache; nothing is fetched.

    Raises:
        ValueError, ConnectionError: as `fetch`.
    """
    revision = hub_revision(repository, revision)
    try:
        return str(_info(repository, revision).sha)
    except _UnreachableError as error:
        return _cached(repository, revision, error.reason).commit


def checkpoints(repository: str) -> list[str]:
    """The branches of a repository that are training steps (step1000, checkpoint-1000), in order of step.

    Raises:
        ConnectionError: the hub cannot be reached.
    """
    from huggingface_hub import HfApi

    try:
        refs = HfApi().list_repo_refs(repository)
    except Exception as error:
        raise ConnectionError(
            f"the training checkpoints of {repository} cannot be listed ({type(error).__name__}: {error}): give "
            "them as --checkpoints 0,1000,…"
        ) from error
    found = {branch.name: step for branch in refs.branches if (step := step_named(branch.name)) is not None}
    return sorted(found, key=lambda name: found[name])


class _UnreachableError(Exception):
    """The hub did not answer."""

    def __init__(self, reason: Exception) -> None:
        super().__init__(str(reason))
        self.reason = reason


def _info(repository: str, revision: str | None) -> Any:
    """What the hub knows of one revision.

    Raises:
        _UnreachableError: no network.
        ValueError, ConnectionError: as `fetch`.
    """
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    try:
        return HfApi().model_info(repository, revision=revision, timeout=HUB_TIMEOUT_S, files_metadata=True)
    except GatedRepoError as error:
        raise ValueError(gated(repository)) from error
    except RevisionNotFoundError as error:
        raise ValueError(f"{repository} has no revision {revision!r}.{_revision_hint(repository)}") from error
    except RepositoryNotFoundError as error:
        raise ValueError(_unknown(repository)) from error
    except Exception as error:
        if is_a_page(error):
            raise _UnreachableError(ConnectionError(portal(repository, constants.ENDPOINT))) from error
        if status_of(error) in (401, 403):
            raise ValueError(gated(repository)) from error
        if not _is_network_failure(error):
            raise ConnectionError(f"the model hub refused {repository}: {error}. Check HF_TOKEN.") from error
        raise _UnreachableError(error) from error


def _wanted(repository: str, files: list[str], *, allow_pickle: bool) -> list[str]:
    """Of a repository's files, the config, the tokenizer and one form of the weights."""
    top = [file for file in files if "/" not in file]
    small = [file for file in top if _SMALL_FILES.fullmatch(file) and ".index." not in file]
    tensors = [file for file in top if re.fullmatch(r"model.*\.safetensors(\.index\.json)?", file)]
    pickles = [file for file in top if re.fullmatch(r"pytorch_model.*\.bin(\.index\.json)?", file)]
    if any(name in tensors for name in SAFETENSORS):
        return small + tensors
    if any(name in pickles for name in PICKLES):
        if not allow_pickle:
            raise ValueError(f"{repository} holds its weights only as a pickle. {PICKLE_WARNING}")
        return small + pickles
    raise ValueError(
        f"{repository} has no weights that can be read here: looked for "
        f"{', '.join((*SAFETENSORS, *PICKLES))}, "
        f"found {', '.join(top[:12]) or 'no files'}."
    )


def _cached(repository: str, revision: str | None, error: Exception) -> HubSnapshot:
    from huggingface_hub import constants, try_to_load_from_cache

    at = "" if revision is None else f" at revision {revision!r}"
    # Not by snapshot_download, for which a copy is whole only with the files that are never fetched here.
    config = try_to_load_from_cache(repository, "config.json", revision=revision, cache_dir=constants.HF_HUB_CACHE)
    folder = Path(config).parent if isinstance(config, str) else None
    if folder is None or not any((folder / name).is_file() for name in (*SAFETENSORS, *PICKLES)):
        if "with a web page instead of data" in str(error):
            raise error from None
        reason = "offline mode is on" if constants.HF_HUB_OFFLINE else f"{type(error).__name__}: {error}"
        raise ConnectionError(
            f"{repository}{at} is not on this machine, and the model hub ({constants.ENDPOINT}) cannot "
            "be reached "
            f"({reason}). Give the path of a local folder that holds its config.json and model.safetensors "
            "instead, or run this where there is a network; bundled models (ln-probe models --bundled) "
            "need none."
        ) from error
    note = "the model hub could not be reached: the local copy was used"
    return HubSnapshot(repository, folder, revision, folder.name, (note,))


def _is_network_failure(error: Exception) -> bool:
    """Whether the request failed on the way (no route, timeout, offline mode, a failing server)."""
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    if isinstance(error, HfHubHTTPError):
        status: Any = getattr(getattr(error, "response", None), "status_code", None)
        return status is None or status >= 500
    # Which HTTP library huggingface_hub is built on has changed three times.
    library = type(error).__module__.partition(".")[0]
    return isinstance(error, (OfflineModeIsEnabled, OSError)) or library in _HTTP_LIBRARIES


def _revision_hint(repository: str) -> str:
    if repository.startswith("EleutherAI/pythia"):
        return " Pythia's training checkpoints are step0, step1, step2, …, step512, step1000, …, step143000."
    return " Give a branch, a tag or a commit of that repository."


def _unknown(name: str, *, also: tuple[str, ...] = ()) -> str:
    known = known_hub_names()
    near = get_close_matches(name.lower(), [*known, *(other.lower() for other in also)], n=4, cutoff=0.5)
    suggestion = f" Nearest known names: {', '.join(near)}." if near else ""
    return (
        f"No model is called {name!r}.{suggestion} A model is a name on the model hub (gpt2, pythia-70m, "
        "owner/model), a local Hugging Face folder, a .gguf file, a lab run's folder, or a bundled name "
        "(ln-probe models)."
    )
