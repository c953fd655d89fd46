"""A small stand-in for the model hub on this machine: its addresses, headers and faults, over files that a test writes.

    with serving() as hub:
        hub.add("gpt2", {"main": folder})
        hub.fault["gpt2"] = "gated file"

Faults: "gated" (403 at the API), "gated file" (403 at files), "500", "500 file", "stall" (a file stops in the middle),
"portal" (every answer is a login page), "portal file", "corrupt" (one bit of the weights, at the right length), "lost"
(listed, but 404).
"""

from __future__ import annotations

import hashlib
import json
import mmap
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
from huggingface_hub import constants

LFS = (".safetensors", ".bin", ".h5", ".msgpack", ".onnx")
# What stands beside the files that are wanted, in the repositories gpt2 and EleutherAI/pythia-70m.
BYSTANDERS = {
    "README.md": b"# a model\n",
    ".gitattributes": b"*.bin filter=lfs\n",
    "onnx/decoder_model.onnx": b"\0" * 64,
}


@dataclass
class Hub:
    """What the server holds; repository → revision → files."""

    endpoint: str = ""
    held: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)
    fault: dict[str, str] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)  # "HEAD /gpt2/resolve/main/config.json"
    over: threading.Event = field(default_factory=threading.Event)

    def add(self, repository: str, revisions: dict[str, Path]) -> None:
        """The files of folders, one for each branch."""
        self.held[repository] = {
            branch: BYSTANDERS | {p.name: _content(p) for p in sorted(folder.iterdir()) if p.is_file()}
            for branch, folder in revisions.items()
        }

    def commit(self, repository: str, branch: str) -> str:
        files = sorted(self.held[repository][branch].items())
        return hashlib.sha1("".join(f"{name} {_etag(name, data)}\n" for name, data in files).encode()).hexdigest()

    def branch(self, repository: str, revision: str) -> str | None:
        """The branch that a branch or commit stands for."""
        known = self.held[repository]
        return next((b for b in known if revision in (b, self.commit(repository, b))), None)


def _content(path: Path) -> bytes | mmap.mmap:
    """Of a file; large ones stay on the disk."""
    if path.stat().st_size < 2**20:
        return path.read_bytes()
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


_known: dict[int, tuple[Any, str]] = {}  # hashes of large files, which are kept so that no other has their id


def _etag(name: str, data: Any) -> str:
    if isinstance(data, mmap.mmap):
        if id(data) not in _known:
            _known[id(data)] = data, hashlib.sha256(data).hexdigest()
        return _known[id(data)][1]
    if name.endswith(LFS):
        return hashlib.sha256(data).hexdigest()
    return hashlib.sha1(f"blob {len(data)}\0".encode() + data).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.asked.append(f"{self.command} {path}")
        try:
            if path.startswith("/api/models/"):
                self._api(path.removeprefix("/api/models/"))
            else:
                repository, _, rest = path[1:].partition("/resolve/")
                revision, _, name = rest.partition("/")
                self._file(repository, revision, name)
        except (BrokenPipeError, ConnectionResetError):
            pass

    def _answer(self, status: int, body: bytes, kind: str, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in ({"Content-Type": kind, "Content-Length": str(len(body))} | (headers or {})).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _refuse(self, status: int, code: str = "", text: str = "") -> None:
        headers = {"X-Error-Code": code, "X-Error-Message": text} if code else {}
        self._answer(status, json.dumps({"error": text or code}).encode(), "application/json", headers)

    def _portal(self) -> None:
        self._answer(200, b"<html><title>Hotel</title><form>room number</form></html>", "text/html; charset=utf-8")

    def _api(self, rest: str) -> None:
        repository = next((r for r in sorted(self.hub.held, key=len)[::-1] if rest.split("?")[0].startswith(r)), None)
        asked_for = repository or "/".join(rest.split("/")[:2])
        fault = self.hub.fault.get(asked_for, self.hub.fault.get("*", ""))
        if fault == "portal":
            return self._portal()
        if fault == "500":
            return self._refuse(500)
        if repository is None:
            return self._refuse(404, "RepoNotFound", "Repository not found")
        if fault == "gated":
            return self._refuse(403, "GatedRepo", "Access to this model is restricted")
        what, _, revision = rest.removeprefix(repository).lstrip("/").partition("/")
        if what == "refs":
            refs = [
                {"name": b, "ref": f"refs/heads/{b}", "targetCommit": self.hub.commit(repository, b)}
                for b in self.hub.held[repository]
            ]
            return self._json({"branches": refs, "converts": [], "tags": []})
        branch = self.hub.branch(repository, revision or "main")
        if branch is None:
            return self._refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        files = self.hub.held[repository][branch]
        if what == "tree":
            return self._json([_entry(name, data, "path") for name, data in files.items()])
        return self._json(
            {
                "id": repository,
                "modelId": repository,
                "sha": self.hub.commit(repository, branch),
                "private": False,
                "gated": False,
                "tags": [],
                "siblings": [_entry(name, data, "rfilename") for name, data in files.items()],
            }
        )

    def _json(self, content: Any) -> None:
        self._answer(200, json.dumps(content).encode(), "application/json")

    def _file(self, repository: str, revision: str, name: str) -> None:
        fault = self.hub.fault.get(repository, "")
        if repository not in self.hub.held:
            return self._refuse(404, "RepoNotFound", "Repository not found")
        branch = self.hub.branch(repository, revision)
        if branch is None:
            return self._refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        data = self.hub.held[repository][branch].get(name)
        if data is None or (fault == "lost" and name.endswith(LFS)):
            return self._refuse(404, "EntryNotFound", "Entry not found")
        if fault == "gated file":
            return self._refuse(403, "GatedRepo", "Access to this model is restricted")
        if fault == "500 file" and name.endswith(LFS):
            return self._refuse(500)
        if fault == "portal file":
            return self._portal()
        headers = {"ETag": f'"{_etag(name, data)}"', "X-Repo-Commit": self.hub.commit(repository, branch)}
        headers["Accept-Ranges"] = "bytes"
        if name.endswith(LFS):
            headers |= {"X-Linked-Etag": headers["ETag"], "X-Linked-Size": str(len(data))}
            if fault == "corrupt":
                data = data[:-5] + bytes([data[-5] ^ 1]) + data[-4:]
            if fault == "stall" and self.command == "GET":
                self.send_response(200)
                for key, value in (headers | {"Content-Length": str(len(data))}).items():
                    self.send_header(key, value)
                self.end_headers()
                self.wfile.write(data[: len(data) // 2])
                self.wfile.flush()
                self.hub.over.wait(60)
                self.close_connection = True
                return None
        return self._answer(200, data, "application/octet-stream", headers)


def _entry(name: str, data: Any, key: str) -> dict[str, Any]:
    digest = _etag(name, data)
    oid = hashlib.sha1(digest.encode()).hexdigest() if name.endswith(LFS) else digest  # of the pointer
    found: dict[str, Any] = {key: name, "size": len(data), "oid": oid, "blobId": oid, "type": "file"}
    if name.endswith(LFS):
        found["lfs"] = {"oid": digest, "sha256": digest, "size": len(data), "pointerSize": 134}
    return found


@contextmanager
def serving() -> Iterator[Hub]:
    """The server, while it lasts; `Hub.endpoint` is its address."""
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    server.daemon_threads = True
    hub.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.over.set()
        server.shutdown()
        server.server_close()
        thread.join()


@contextmanager
def reached(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """The server as the hub of this process, with its downloads in `cache`."""
    with serving() as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.endpoint)
        template = hub.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
        yield hub
