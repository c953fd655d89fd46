"""Names on the model hub, the files of one revision, and the errors of their download."""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import re
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from ln_probe.analyses.files import FileError, read_json, temporary_folder
from ln_probe.analyses.processes import follow_parent
from ln_probe.analyses.progress import tell, write_to
from ln_probe.analyses.text import step_named
from ln_probe.loading.folder import PICKLE_WARNING, PICKLES, SAFETENSORS

HUB_TIMEOUT_S = 10.0  # for the one request that decides whether the hub is there; downloads have their own

# Repositories in TransformerLens's own older format: pickled state dicts without a Hugging Face model.
LEGACY_PREFIXES = ("NeelNanda/", "ArthurConmy/", "Baidicoot/")

_HTTP_LIBRARIES = ("httpcore", "httpcore2", "httpx", "httpx2", "requests", "urllib3")

# Errors of a file system without room for a file: it is full, or a quota or a limit of file sizes is reached.
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

_downloads: ContextVar[Path | None] = ContextVar("_downloads", default=None)

_SMALL_FILES = re.compile(r"(.*\.json|.*\.txt|.*\.model|.*\.tiktoken|.*\.jinja)")


@dataclass(frozen=True)
class HubSnapshot:
    """A revision of a repository on this disk, spelled as on the hub (None: the main branch); notes for the reader."""

    folder: Path
    revision: str | None
    commit: str | None
    notes: tuple[str, ...]


def known_hub_names() -> dict[str, str]:
    """Map every name that TransformerLens knows (short and official, lower case) to its official name."""
    from transformer_lens.supported_models import MODEL_ALIASES, OFFICIAL_MODEL_NAMES

    names: dict[str, str] = {}
    for official in OFFICIAL_MODEL_NAMES:
        names[official.lower()] = official
        for alias in MODEL_ALIASES.get(official, ()):
            names[alias.lower()] = official
    return names


def official_name(name: str, *, also: tuple[str, ...] = ()) -> str:
    """Return the repository of a name or alias of TransformerLens, or of any ``owner/model``.

    Raises:
        ValueError: an unknown bare name; the nearest known names, those in `also` among them, are suggested.
    """
    known = known_hub_names()
    official = known.get(name.lower())
    if official is not None:
        return official
    if re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        return name
    raise ValueError(_unknown(name, also=also))


def hub_revision(repository: str, revision: str | None) -> str | None:
    """Return the hub's spelling of a revision: a bare step number of Pythia or Stanford CRFM becomes a branch."""
    if revision is not None and revision.isdigit():
        if repository.startswith("EleutherAI/pythia"):
            return f"step{revision}"
        if repository.startswith("stanford-crfm/"):
            return f"checkpoint-{revision}"
    return revision


@contextmanager
def downloads_in(folder: Path | None) -> Iterator[None]:
    """Download to a separate cache, while this lasts, what the user's cache does not hold; None: to that one."""
    token = _downloads.set(folder)
    try:
        yield
    finally:
        _downloads.reset(token)


def _cache_for(repository: str, commit: str, files: Iterable[str]) -> Path:
    """The cache to read these files from, or to download them to."""
    from huggingface_hub import constants

    own = _downloads.get()
    return Path(constants.HF_HUB_CACHE) if own is None or _is_here(repository, commit, files) else own


def _is_here(repository: str, commit: str, files: Iterable[str]) -> bool:
    """Whether the user's cache holds all these files of a commit."""
    from huggingface_hub import constants, try_to_load_from_cache

    cache = constants.HF_HUB_CACHE
    return all(isinstance(try_to_load_from_cache(repository, f, cache, commit), str) for f in files)


def fetch(repository: str, *, revision: str | None, allow_pickle: bool) -> HubSnapshot:
    """Download a branch, tag or commit of a repository (or find it in the local cache) and return its folder.

    Raises:
        ValueError: no such repository or revision, no access to it, or weights only as a pickle.
        ConnectionError: the hub cannot be reached and there is no local copy, or the download stopped.
        OSError: the disk is full (`FULL`).
    """
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.file_download import repo_folder_name

    revision = hub_revision(repository, revision)
    tell(f"{repository}: asking {constants.ENDPOINT}")
    info = _info(repository, revision)
    if isinstance(info, HubSnapshot):
        return info
    sizes = _wanted(repository, info, allow_pickle=allow_pickle)
    cache = _cache_for(repository, info.sha, sizes)
    home = cache / repo_folder_name(repo_id=repository, repo_type="model")
    try:
        with _download_progress(repository, home, sum(sizes.values())):
            folder = snapshot_download(
                repository,
                revision=revision,
                allow_patterns=list(sizes),
                etag_timeout=HUB_TIMEOUT_S,
                cache_dir=cache,
            )
    except Exception as error:
        raise _download_error(repository, error, constants.ENDPOINT) from error
    _check_hashes(repository, Path(folder))
    return HubSnapshot(Path(folder), revision, info.sha, ())


def fetch_ahead(repository: str, revision: str | None, allow_pickle: bool, folder: Path, sign: Path) -> None:
    """Fetch into `folder`; run in a separate process, which writes its progress to `sign`.

    (Here and not beside its caller, so that it starts without torch.) If it fails, loading the model says why.
    """
    follow_parent()
    write_to(sign)
    os.environ |= {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_VERBOSITY": "error"}  # read when it is imported
    with downloads_in(folder), suppress(OSError, ValueError):
        fetch(repository, revision=revision, allow_pickle=allow_pickle)


@dataclass(frozen=True)
class Description:
    """What the hub knows of a model before its weights are fetched.

    Attributes:
        config: its config.json.
        weight_bytes: of the weights that would be fetched; 0 if the hub does not say.
        download_bytes: of all files that would be fetched; 0 if the user's cache holds them.
    """

    config: dict[str, Any]
    weight_bytes: int
    download_bytes: int = 0


def describe(repository: str, *, revision: str | None) -> Description:
    """Return a model's config.json and the size of its weights; fetches nothing else.

    Raises:
        ValueError, ConnectionError: as `fetch`.
    """
    from huggingface_hub import constants, hf_hub_download

    revision = hub_revision(repository, revision)
    info = _info(repository, revision)
    if isinstance(info, HubSnapshot):
        weights = [p for p in info.folder.iterdir() if p.suffix in (".safetensors", ".bin")]
        return Description(_config(info.folder / "config.json"), sum(p.stat().st_size for p in weights))
    sizes = _wanted(repository, info, allow_pickle=True)
    here = _is_here(repository, info.sha, sizes)
    with temporary_folder() as aside:
        try:
            path = hf_hub_download(
                repository,
                "config.json",
                revision=revision,
                etag_timeout=HUB_TIMEOUT_S,
                cache_dir=constants.HF_HUB_CACHE if here else aside,
            )
        except Exception as error:
            raise _download_error(repository, error, constants.ENDPOINT) from error
        config = _config(Path(path))
    of_weights = sum(n for f, n in sizes.items() if f.endswith((".safetensors", ".bin")))
    return Description(config, of_weights, 0 if here else sum(sizes.values()))


def _config(path: Path) -> dict[str, Any]:
    try:
        held = read_json(path)
    except (OSError, FileError):
        return {}
    return held if isinstance(held, dict) else {}


def commit(repository: str, *, revision: str | None) -> str | None:
    """Return the commit of a revision on the hub or (without a network) in the local cache; fetches nothing.

    Raises:
        ValueError, ConnectionError: as `fetch`.
    """
    info = _info(repository, hub_revision(repository, revision))
    return info.commit if isinstance(info, HubSnapshot) else str(info.sha)


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
            f"the training checkpoints of {repository} cannot be listed ({type(error).__name__}: {error}): give "
            "them as --checkpoints 0,1000,…"
        ) from error
    found = {branch.name: step for branch in refs.branches if (step := step_named(branch.name)) is not None}
    return sorted(found, key=lambda name: found[name])


def _info(repository: str, revision: str | None) -> Any:
    """What the hub knows of one revision; the copy on this disk (a HubSnapshot) if it does not answer.

    Raises:
        ValueError, ConnectionError: as `fetch`.
    """
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    try:
        return HfApi().model_info(repository, revision=revision, timeout=HUB_TIMEOUT_S, files_metadata=True)
    except GatedRepoError as error:
        raise ValueError(_gated_message(repository)) from error
    except RevisionNotFoundError as error:
        hint = "Give a branch, a tag or a commit of that repository."
        if repository.startswith("EleutherAI/pythia"):
            hint = "Pythia's training checkpoints are step0, step1, step2, …, step512, step1000, …, step143000."
        raise ValueError(f"{repository} has no revision {revision!r}. {hint}") from error
    except RepositoryNotFoundError as error:
        raise ValueError(_unknown(repository)) from error
    except Exception as error:
        if _is_web_page(error):
            return _cached(repository, revision, ConnectionError(_web_page_message(repository, constants.ENDPOINT)))
        if _status(error) in (401, 403):
            raise ValueError(_gated_message(repository)) from error
        if not _is_network_failure(error):
            raise ConnectionError(f"the model hub refused {repository}: {error}. Check HF_TOKEN.") from error
        return _cached(repository, revision, error)


def _wanted(repository: str, info: Any, *, allow_pickle: bool) -> dict[str, int]:
    """Return the files to fetch with their sizes in bytes: config, tokenizer and one form of the weights."""
    sizes = {file.rfilename: getattr(file, "size", None) or 0 for file in info.siblings or ()}
    top = [file for file in sizes if "/" not in file]
    small = [file for file in top if _SMALL_FILES.fullmatch(file) and ".index." not in file]
    tensors = [file for file in top if re.fullmatch(r"model.*\.safetensors(\.index\.json)?", file)]
    pickles = [file for file in top if re.fullmatch(r"pytorch_model.*\.bin(\.index\.json)?", file)]
    if any(name in tensors for name in SAFETENSORS):
        return {file: sizes[file] for file in small + tensors}
    if any(name in pickles for name in PICKLES):
        if not allow_pickle:
            raise ValueError(f"{repository} holds its weights only as a pickle. {PICKLE_WARNING}")
        return {file: sizes[file] for file in small + pickles}
    raise ValueError(
        f"{repository} has no weights that can be read here: looked for "
        f"{', '.join((*SAFETENSORS, *PICKLES))}, "
        f"found {', '.join(top[:12]) or 'no files'}."
    )


def _cached(repository: str, revision: str | None, error: Exception) -> HubSnapshot:
    from huggingface_hub import constants, try_to_load_from_cache

    at = "" if revision is None else f" at revision {revision!r}"
    # Not by snapshot_download, for which a copy is whole only with the files that are never fetched here.
    caches = [c for c in (constants.HF_HUB_CACHE, _downloads.get()) if c is not None]
    configs = [try_to_load_from_cache(repository, "config.json", revision=revision, cache_dir=c) for c in caches]
    folders = [Path(config).parent for config in configs if isinstance(config, str)]
    whole = (f for f in folders if any((f / name).is_file() for name in (*SAFETENSORS, *PICKLES)))
    folder = next(whole, None)
    if folder is None:
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
    return HubSnapshot(folder, revision, folder.name, (note,))


def _is_network_failure(error: Exception) -> bool:
    """Whether the request failed on the way (no route, timeout, offline mode, a failing server)."""
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    if isinstance(error, HfHubHTTPError):
        return (_status(error) or 500) >= 500
    # Which HTTP library huggingface_hub is built on has changed three times.
    library = type(error).__module__.partition(".")[0]
    return isinstance(error, (OfflineModeIsEnabled, OSError)) or library in _HTTP_LIBRARIES


def _unknown(name: str, *, also: tuple[str, ...] = ()) -> str:
    known = known_hub_names()
    near = get_close_matches(name.lower(), [*known, *(other.lower() for other in also)], n=4, cutoff=0.5)
    suggestion = f" Nearest known names: {', '.join(near)}." if near else ""
    plain, _, revision = name.partition("@")
    if revision:
        suggestion += f" In Python a revision is given apart: load_model({plain!r}, revision={revision!r})."
    return (
        f"No model is called {name!r}.{suggestion} A model is a name on the model hub (gpt2, pythia-70m, "
        "owner/model), a local Hugging Face folder, a .gguf file, a lab run's folder, or a bundled name "
        "(ln-probe models)."
    )


_LOOK = 0.5  # seconds between two progress reports
_READ = 2**22  # bytes hashed at a time


class DamagedDownloadError(ConnectionError):
    """A file is not what the hub says it is."""


@contextmanager
def _download_progress(repository: str, folder: Path, total: int) -> Iterator[None]:
    """Report how many of `total` bytes have arrived in `folder`, the repository's folder in the cache."""
    stage, over = f"{repository}: downloading", threading.Event()

    def report() -> None:
        while True:
            tell(stage, _bytes(folder), total or math.nan, "B")
            if over.wait(_LOOK):
                return

    thread = threading.Thread(target=report, daemon=True, name="ln-probe download")
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        tell("")


def _bytes(folder: Path) -> int:
    """Return the size of a repository's files, unfinished ones included."""
    try:
        return sum(path.stat().st_size for path in (folder / "blobs").iterdir())
    except OSError:  # not there yet, or renamed since
        return 0


def _check_hashes(repository: str, folder: Path) -> None:
    """Compare each file of a snapshot with the hash that the hub gave it (its name among the blobs of the cache).

    Raises:
        DamagedDownloadError: a file differs; it is removed, so that the next try downloads it again.
    """
    for path in sorted(folder.iterdir()):
        blob = path.resolve()
        if not path.is_symlink() or not blob.is_file():
            continue
        if re.fullmatch(r"[0-9a-f]{64}", blob.name):
            digest, kind = hashlib.sha256(), "SHA-256"
        elif re.fullmatch(r"[0-9a-f]{40}", blob.name):  # as git names small files
            digest, kind = hashlib.sha1(f"blob {blob.stat().st_size}\0".encode(), usedforsecurity=False), "git SHA-1"
        else:
            continue
        with blob.open("rb") as file:
            while part := file.read(_READ):
                digest.update(part)
        if digest.hexdigest() != blob.name:
            blob.unlink()
            path.unlink()
            raise DamagedDownloadError(
                f"{path.name} of {repository} was damaged on its way: its {kind} is {digest.hexdigest()[:12]}…, and "
                f"the hub says {blob.name[:12]}…. It was deleted: try again; if that comes damaged too, ask whoever "
                "runs the network or the mirror in between."
            )


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and the errors that caused it."""
    seen: list[BaseException] = []
    while error is not None and not any(error is e for e in seen):
        seen.append(error)
        yield error
        error = error.__cause__ or error.__context__


def _status(error: BaseException) -> int | None:
    """Return the HTTP status of the response that an error is about; None if there is none."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    return status if isinstance(status, int) else None


def _is_web_page(error: BaseException) -> bool:
    """Whether the answer was a web page where data was expected: the login page of a network, or of a proxy."""
    from huggingface_hub.errors import FileMetadataError

    for each in causes(error):
        if isinstance(each, (json.JSONDecodeError, FileMetadataError)):
            return True
        response: Any = getattr(each, "response", None)
        kind = str(getattr(response, "headers", {}).get("content-type", "")) if response is not None else ""
        if kind.startswith("text/html") and (_status(each) or 200) < 400:
            return True
    return False


def _web_page_message(repository: str, endpoint: str) -> str:
    """Describe that case for the user."""
    return (
        f"{endpoint} answered a request for {repository} with a web page instead of data: a network's login page or a "
        "proxy stands in between. Open that address in a browser, log in there, and try again."
    )


def _gated_message(repository: str) -> str:
    """Tell the user what a repository that asks for an agreement needs."""
    return (
        f"{repository} asks for an agreement before it can be downloaded: accept it on the model's page, "
        "log in (hf auth login, or set HF_TOKEN), and try again."
    )


def _download_error(repository: str, error: Exception, endpoint: str) -> Exception:
    """Return the exception to raise when the download of a repository's files ended with `error`."""
    from huggingface_hub.errors import EntryNotFoundError, GatedRepoError, LocalEntryNotFoundError

    chain = list(causes(error))
    codes = [code for e in chain if (code := _status(e)) is not None]
    if any(isinstance(e, GatedRepoError) for e in chain) or {401, 403} & set(codes):
        return ValueError(_gated_message(repository))
    if _is_web_page(error):
        return ConnectionError(_web_page_message(repository, endpoint))
    if any(isinstance(e, EntryNotFoundError) and not isinstance(e, LocalEntryNotFoundError) for e in chain):
        said = next(iter(str(error).strip().splitlines()), type(error).__name__)[:200]
        return ConnectionError(
            f"{repository} lists a file that {endpoint} does not have ({said}): try again later, or choose "
            "another revision."
        )
    if full := next((e for e in chain if isinstance(e, OSError) and e.errno in FULL), None):
        return OSError(full.errno, f"there is no room for the download of {repository} ({full.strerror})")
    again = "Try again: what is already here is not downloaded again."
    if any("Timeout" in type(e).__name__ for e in chain):
        return ConnectionError(f"the download of {repository} stopped: {endpoint} sent nothing any more. {again}")
    if server := next((code for code in codes if code >= 500), None):
        return ConnectionError(
            f"the download of {repository} stopped: {endpoint} failed with status {server}. Try again in a while: what "
            "is already here is not downloaded again."
        )
    return ConnectionError(f"the download of {repository} stopped ({type(error).__name__}: {error}). {again}")
