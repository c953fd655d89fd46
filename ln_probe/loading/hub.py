"""Names on the model hub, the files of one revision, and the errors of their download."""

from __future__ import annotations

import errno
import hashlib
import json
import math
import re
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any

from ln_probe.analyses.progress import tell
from ln_probe.analyses.text import step_named
from ln_probe.loading.folder import PICKLE_WARNING, PICKLES, SAFETENSORS

HUB_TIMEOUT_S = 10.0  # for the one request that decides whether the hub is there; downloads have their own

# Repositories in TransformerLens's own older format: pickled state dicts without a Hugging Face model.
LEGACY_PREFIXES = ("NeelNanda/", "ArthurConmy/", "Baidicoot/")

# Errors of a file system without room for a file: it is full, or a quota or a limit of file sizes is reached.
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


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


def fetch(repository: str, *, revision: str | None, allow_pickle: bool) -> HubSnapshot:
    """Download a branch, tag or commit of a repository (or find it in the local cache) and return its folder.

    Raises:
        ValueError: no such repository or revision, no access to it, or weights only as a pickle.
        ConnectionError: the hub cannot be reached and there is no local copy, or the download stopped.
        OSError: the disk is full (`FULL`).
    """
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    revision = hub_revision(repository, revision)
    tell(f"{repository}: asking {constants.ENDPOINT}")
    info = _info(repository, revision)
    if isinstance(info, HubSnapshot):
        return info
    sizes = _wanted(repository, info, allow_pickle=allow_pickle)
    cache = Path(constants.HF_HUB_CACHE)
    home = cache / repo_folder_name(repo_id=repository, repo_type="model")
    with _download_progress(repository, home, sum(sizes.values())):
        folder = _download(repository, revision, sizes, cache)
    _check_hashes(repository, folder)
    return HubSnapshot(folder, revision, info.sha, ())


def _download(repository: str, revision: str | None, files: Iterable[str], cache: str | Path) -> Path:
    """The folder of a revision in a cache, with these files in it.

    Raises:
        ValueError, ConnectionError, OSError: as `fetch`.
    """
    from huggingface_hub import snapshot_download

    how: dict[str, Any] = {"allow_patterns": list(files), "etag_timeout": HUB_TIMEOUT_S, "cache_dir": cache}
    try:
        return Path(snapshot_download(repository, revision=revision, **how))
    except Exception as error:
        raise _download_error(repository, error) from error


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
    from huggingface_hub import HfApi
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    try:
        return HfApi().model_info(repository, revision=revision, timeout=HUB_TIMEOUT_S, files_metadata=True)
    except RevisionNotFoundError as error:
        hint = "Give a branch, a tag or a commit of that repository."
        if repository.startswith("EleutherAI/pythia"):
            hint = "Pythia's training checkpoints are step0, step1, step2, …, step512, step1000, …, step143000."
        raise ValueError(f"{repository} has no revision {revision!r}. {hint}") from error
    except Exception as error:
        if isinstance(error, RepositoryNotFoundError) and not isinstance(error, GatedRepoError):
            raise _unknown(repository) from error
        known = _known_error(repository, error)
        if isinstance(known, ValueError):
            raise known from error
        if known is None and (_status(error) or 500) < 500:  # an answer, not an error on the way or of the server
            raise ConnectionError(f"the model hub refused {repository}: {error}. Check HF_TOKEN.") from error
        return _cached(repository, revision, error, known)


def _wanted(repository: str, info: Any, *, allow_pickle: bool) -> dict[str, int]:
    """Return the files to fetch with their sizes in bytes: config, tokenizer and one form of the weights."""
    sizes = {file.rfilename: getattr(file, "size", None) or 0 for file in info.siblings or ()}
    top = [file for file in sizes if "/" not in file]
    small = [
        file
        for file in top
        if file.endswith((".json", ".txt", ".model", ".tiktoken", ".jinja")) and ".index." not in file
    ]
    tensors = [file for file in top if re.fullmatch(r"model.*\.safetensors(\.index\.json)?", file)]
    pickles = [file for file in top if re.fullmatch(r"pytorch_model.*\.bin(\.index\.json)?", file)]
    if any(name in tensors for name in SAFETENSORS):
        return {file: sizes[file] for file in small + tensors}
    if any(name in pickles for name in PICKLES):
        if not allow_pickle:
            raise ValueError(f"{repository} holds its weights only as a pickle. {PICKLE_WARNING}")
        return {file: sizes[file] for file in small + pickles}
    raise ValueError(
        f"{repository} has no weights that can be read here: looked for {', '.join((*SAFETENSORS, *PICKLES))}, found "
        f"{', '.join(top[:12]) or 'no files'}."
    )


def _cached(repository: str, revision: str | None, error: Exception, known: Exception | None) -> HubSnapshot:
    """The local copy of a revision; where there is none, what is `known` of the error, or that the hub is away."""
    from huggingface_hub import constants, try_to_load_from_cache

    # Not by snapshot_download, for which a copy is whole only with the files that are never fetched here.
    config = try_to_load_from_cache(repository, "config.json", revision=revision)
    folder = Path(config).parent if isinstance(config, str) else None
    if folder is not None and any((folder / name).is_file() for name in (*SAFETENSORS, *PICKLES)):
        note = "the model hub could not be reached: the local copy was used"
        return HubSnapshot(folder, revision, folder.name, (note,))
    if known is not None:
        raise known from error
    at = "" if revision is None else f" at revision {revision!r}"
    reason = "offline mode is on" if constants.HF_HUB_OFFLINE else f"{type(error).__name__}: {error}"
    raise ConnectionError(
        f"{repository}{at} is not on this machine, and the model hub ({constants.ENDPOINT}) cannot be reached "
        f"({reason}). Give the path of a local folder that holds its config.json and model.safetensors instead, or run "
        "this where there is a network; bundled models (ln-probe models) need none."
    ) from error


def _unknown(name: str, also: Sequence[str] = ()) -> ValueError:
    near = get_close_matches(name.lower(), [*known_hub_names(), *also], n=4, cutoff=0.5)
    suggestion = f" Nearest known names: {', '.join(near)}." if near else ""
    plain, _, revision = name.partition("@")
    if revision:
        suggestion += f" In Python a revision is given apart: load_model({plain!r}, revision={revision!r})."
    return ValueError(
        f"No model is called {name!r}.{suggestion} A model is a name on the model hub (gpt2, pythia-70m, owner/model), "
        "a local Hugging Face folder, a .gguf file, a lab run's folder, or a bundled name (ln-probe models)."
    )


@contextmanager
def _download_progress(repository: str, folder: Path, total: int) -> Iterator[None]:
    """Report twice a second how many of `total` bytes are in `folder`, the repository's folder in the cache."""
    stage, over = f"{repository}: downloading", threading.Event()

    def report() -> None:
        while True:
            here = 0
            with suppress(OSError):  # not there yet, or renamed since
                here = sum(path.stat().st_size for path in (folder / "blobs").iterdir())
            tell(stage, here, total or math.nan, "B")
            if over.wait(0.5):
                return

    thread = threading.Thread(target=report, daemon=True, name="ln-probe download")
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        tell("")


def _check_hashes(repository: str, folder: Path) -> None:
    """Compare each file of a snapshot with the hash that the hub gave it (its name among the blobs of the cache).

    Raises:
        ConnectionError: a file differs; it is removed, so that the next try downloads it again.
    """
    for path in sorted(folder.iterdir()):
        blob = path.resolve()
        if not path.is_symlink() or not blob.is_file() or not re.fullmatch(r"[0-9a-f]{40}|[0-9a-f]{64}", blob.name):
            continue
        kind, start = "SHA-256", hashlib.sha256
        if len(blob.name) == 40:  # as git names small files
            header = f"blob {blob.stat().st_size}\0".encode()
            kind, start = "git SHA-1", partial(hashlib.sha1, header, usedforsecurity=False)
        with blob.open("rb") as file:
            digest = hashlib.file_digest(file, start).hexdigest()
        if digest != blob.name:
            blob.unlink()
            path.unlink()
            raise ConnectionError(
                f"{path.name} of {repository} was damaged on its way: its {kind} is {digest[:12]}…, and the hub says "
                f"{blob.name[:12]}…. It was deleted: try again; if that comes damaged too, ask whoever runs the "
                "network or the mirror in between."
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


def _known_error(repository: str, error: Exception) -> Exception | None:
    """What to raise where a request ended because of the hub's conditions, or a network's login page."""
    from huggingface_hub import constants
    from huggingface_hub.errors import GatedRepoError

    if any(isinstance(e, GatedRepoError) or _status(e) in (401, 403) for e in causes(error)):
        return ValueError(
            f"{repository} asks for an agreement before it can be downloaded: accept it on the model's page, log in "
            "(hf auth login, or set HF_TOKEN), and try again."
        )
    if _is_web_page(error):
        return ConnectionError(
            f"{constants.ENDPOINT} answered a request for {repository} with a web page instead of data: a network's "
            "login page or a proxy stands in between. Open that address in a browser, log in there, and try again."
        )
    return None


def _download_error(repository: str, error: Exception) -> Exception:
    """Return the exception to raise when the download of a repository's files ended with `error`."""
    from huggingface_hub import constants
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    if (known := _known_error(repository, error)) is not None:
        return known
    chain, endpoint = list(causes(error)), constants.ENDPOINT
    if any(isinstance(e, EntryNotFoundError) and not isinstance(e, LocalEntryNotFoundError) for e in chain):
        said = next(iter(str(error).strip().splitlines()), type(error).__name__)[:200]
        return ConnectionError(
            f"{repository} lists a file that {endpoint} does not have ({said}): try again later, or choose another "
            "revision."
        )
    if full := next((e for e in chain if isinstance(e, OSError) and e.errno in FULL), None):
        return OSError(full.errno, f"there is no room for the download of {repository} ({full.strerror})")
    why, again = f" ({type(error).__name__}: {error})", "Try again"
    if any("Timeout" in type(e).__name__ for e in chain):
        why = f": {endpoint} sent nothing any more"
    elif server := next((code for e in chain if (code := _status(e) or 0) >= 500), None):
        why, again = f": {endpoint} failed with status {server}", "Try again in a while"
    return ConnectionError(
        f"the download of {repository} stopped{why}. {again}: what is already here is not downloaded again."
    )
