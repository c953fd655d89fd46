"""While files come from the hub, and when they are here: how many bytes there are, whether they are what was promised,
and in words what went wrong."""

from __future__ import annotations

import hashlib
import json
import math
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ln_probe.analyses.machinery.pulse import tell

_LOOK = 0.5  # seconds between two looks at what has come
_READ = 2**22  # bytes hashed at a time


class DamagedDownloadError(ConnectionError):
    """A file is not what the hub says it is."""


@contextmanager
def telling(repository: str, folder: Path, sizes: Mapping[str, int]) -> Iterator[None]:
    """Say how many bytes have come meanwhile.

    Args:
        repository: whose files.
        folder: of the repository in the cache, whether it is there yet or not.
        sizes: of the files that are wanted, in bytes.
    """
    total = float(sum(sizes.values())) or math.nan
    stage, over = f"{repository}: downloading", threading.Event()

    def look() -> None:
        while not over.wait(_LOOK):
            tell(stage, _bytes(folder), total, "B")

    tell(stage, _bytes(folder), total, "B")
    thread = threading.Thread(target=look, daemon=True, name="ln-probe download")
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        tell("")


def _bytes(folder: Path) -> int:
    """What there is of a repository's files, unfinished ones included."""
    total = 0
    try:
        for path in (folder / "blobs").iterdir():
            total += path.stat().st_size
    except OSError:  # not there yet, or renamed under our eyes
        pass
    return total


def check(repository: str, folder: Path) -> None:
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


def chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error and what it came from."""
    seen: list[BaseException] = []
    while error is not None and not any(error is e for e in seen):
        seen.append(error)
        yield error
        error = error.__cause__ or error.__context__


def status_of(error: BaseException) -> int | None:
    """The HTTP status that an error is about."""
    response: Any = getattr(error, "response", None)
    found = getattr(response, "status_code", None)
    return found if isinstance(found, int) else None


def is_a_page(error: BaseException) -> bool:
    """Whether the answer was a web page where data was expected: the login page of a network, or of a proxy."""
    from huggingface_hub.errors import FileMetadataError

    for each in chain(error):
        if isinstance(each, (json.JSONDecodeError, FileMetadataError)):
            return True
        response: Any = getattr(each, "response", None)
        kind = str(getattr(response, "headers", {}).get("content-type", "")) if response is not None else ""
        if kind.startswith("text/html") and (status_of(each) or 200) < 400:
            return True
    return False


def portal(repository: str, endpoint: str) -> str:
    """What to say then."""
    return (
        f"{endpoint} answered a request for {repository} with a web page instead of data: a network's login page or a "
        "proxy stands in between. Open that address in a browser, log in there, and try again."
    )


def gated(repository: str) -> str:
    """What to say where a repository asks for an agreement."""
    return (
        f"{repository} asks for an agreement before it can be downloaded: accept it on the model's page, "
        "log in (hf auth login, or set HF_TOKEN), and try again."
    )


def stopped(repository: str, error: Exception, endpoint: str) -> Exception:
    """What to raise when the download of a repository's files ended with this error."""
    from huggingface_hub.errors import EntryNotFoundError, GatedRepoError, LocalEntryNotFoundError

    causes = list(chain(error))
    codes = [code for e in causes if (code := status_of(e)) is not None]
    if any(isinstance(e, GatedRepoError) for e in causes) or {401, 403} & set(codes):
        return ValueError(gated(repository))
    if is_a_page(error):
        return ConnectionError(portal(repository, endpoint))
    if any(isinstance(e, EntryNotFoundError) and not isinstance(e, LocalEntryNotFoundError) for e in causes):
        return ConnectionError(
            f"{repository} lists a file that {endpoint} does not have ({_short(error)}): try again later, or choose "
            "another revision."
        )
    again = "Try again: what is already here is not downloaded again."
    if any("Timeout" in type(e).__name__ for e in causes):
        return ConnectionError(f"the download of {repository} stopped: {endpoint} sent nothing any more. {again}")
    if server := next((code for code in codes if code >= 500), None):
        return ConnectionError(
            f"the download of {repository} stopped: {endpoint} failed with status {server}. Try again in a while: what "
            "is already here is not downloaded again."
        )
    return ConnectionError(f"the download of {repository} stopped ({type(error).__name__}: {error}). {again}")


def _short(error: Exception) -> str:
    return str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
