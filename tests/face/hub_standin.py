"""A small stand-in for the model hub on this machine: its addresses and headers over files that a test writes.

with reached(cache, monkeypatch) as hub:
    hub.add("gpt2", {"main": folder})
    hub.gated.add("gpt2")
"""

from __future__ import annotations

import hashlib
import json
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

LARGE = (".safetensors", ".bin", ".onnx")
# What stands beside the files that are wanted, in the repositories gpt2 and EleutherAI/pythia-70m.
BYSTANDERS = {"README.md": b"# a model\n", "onnx/config.json": b"{}", "onnx/decoder_model.onnx": b"\0" * 64}


@dataclass
class Hub:
    """What the server holds: repository, revision, file name, content."""

    repositories: dict[str, dict[str, dict[str, bytes]]] = field(default_factory=dict)
    gated: set[str] = field(default_factory=set)
    failing: bool = False  # every answer is status 500
    requests: list[str] = field(default_factory=list)  # "GET /gpt2/resolve/main/config.json"

    def add(self, repository: str, revisions: dict[str, Path]) -> None:
        """Add the files of folders, one for each branch."""
        self.repositories[repository] = {
            branch: BYSTANDERS | {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file()}
            for branch, folder in revisions.items()
        }

    def commit(self, repository: str, branch: str) -> str:
        files = sorted(self.repositories[repository][branch].items())
        return hashlib.sha1("".join(f"{name} {_digest(name, data)}\n" for name, data in files).encode()).hexdigest()

    def branch(self, repository: str, revision: str) -> str | None:
        """The branch that a branch or commit stands for."""
        known = self.repositories[repository]
        return next((b for b in known if revision in (b, self.commit(repository, b))), None)


def _digest(name: str, data: bytes) -> str:
    if name.endswith(LARGE):
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
        self.hub.requests.append(f"{self.command} {path}")
        if self.hub.failing:
            self._answer(500, b"{}")
        elif path.startswith("/api/models/"):
            self._api(path.removeprefix("/api/models/"))
        else:
            repository, _, rest = path[1:].partition("/resolve/")
            revision, _, name = rest.partition("/")
            self._file(repository, revision, name)

    def _answer(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(body))} | headers).items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _refuse(self, status: int, code: str) -> None:
        self._answer(status, json.dumps({"error": code}).encode(), X_Error_Code=code, X_Error_Message=code)

    def _api(self, rest: str) -> None:
        hub = self.hub
        repository = next((r for r in sorted(hub.repositories, key=len)[::-1] if rest.startswith(r)), None)
        if repository is None:
            return self._refuse(404, "RepoNotFound")
        if repository in hub.gated:
            return self._refuse(403, "GatedRepo")
        what, _, revision = rest.removeprefix(repository).lstrip("/").partition("/")
        if what == "refs":
            refs = [{"name": branch, "ref": f"refs/heads/{branch}", "targetCommit": hub.commit(repository, branch)}
                    for branch in hub.repositories[repository]]  # fmt: skip
            return self._answer(200, json.dumps({"branches": refs, "converts": [], "tags": []}).encode())
        branch = hub.branch(repository, revision or "main")
        if branch is None:
            return self._refuse(404, "RevisionNotFound")
        content: Any = [_entry(name, data) for name, data in hub.repositories[repository][branch].items()]
        if what != "tree":
            about = {"id": repository, "sha": hub.commit(repository, branch), "private": False, "gated": False}
            content = about | {"tags": [], "siblings": [entry | {"rfilename": entry["path"]} for entry in content]}
        return self._answer(200, json.dumps(content).encode())

    def _file(self, repository: str, revision: str, name: str) -> None:
        branch = self.hub.branch(repository, revision) if repository in self.hub.repositories else None
        data = None if branch is None else self.hub.repositories[repository][branch].get(name)
        if branch is None or data is None:
            return self._refuse(404, "EntryNotFound")
        tag = f'"{_digest(name, data)}"'
        headers = {"ETag": tag, "X_Repo_Commit": self.hub.commit(repository, branch), "Accept_Ranges": "bytes"}
        if name.endswith(LARGE):
            headers |= {"X_Linked_Etag": tag, "X_Linked_Size": str(len(data))}
        return self._answer(200, data, **headers)


def _entry(name: str, data: bytes) -> dict[str, Any]:
    digest = _digest(name, data)
    entry: dict[str, Any] = {"path": name, "size": len(data), "oid": digest, "blobId": digest, "type": "file"}
    if name.endswith(LARGE):
        entry["lfs"] = {"oid": digest, "sha256": digest, "size": len(data), "pointerSize": 134}
    return entry


@contextmanager
def reached(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """The server as the hub of this process, with its downloads in `cache`."""
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    server.daemon_threads = True
    endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", endpoint + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
