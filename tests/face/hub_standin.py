"""A small stand-in for the model hub on this machine: its addresses and headers over files that a test writes."""

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

# Files of every repository that loading does not need.
OTHER_FILES = {"README.md": b"# a model\n", "onnx/config.json": b"{}", "onnx/decoder_model.onnx": b"\0" * 64}


@dataclass
class Hub:
    """What the server holds: repository, branch, file name, content."""

    repositories: dict[str, dict[str, dict[str, bytes]]] = field(default_factory=dict)
    gated: set[str] = field(default_factory=set)
    failing: bool = False  # every answer is status 500
    requests: list[str] = field(default_factory=list)  # "GET /gpt2/resolve/main/config.json"

    def add(self, repository: str, branches: dict[str, Path]) -> None:
        """Add the files of folders, one for each branch."""
        self.repositories[repository] = {
            branch: OTHER_FILES | {path.name: path.read_bytes() for path in folder.iterdir()}
            for branch, folder in branches.items()
        }

    def commit(self, repository: str, branch: str) -> str:
        """Return the hash of a branch's files."""
        files = sorted(self.repositories[repository][branch].items())
        return hashlib.sha1(repr([(name, hashlib.sha1(data).digest()) for name, data in files]).encode()).hexdigest()

    def answer(self, path: str) -> tuple[int, bytes, dict[str, str]]:
        """Return the status, content and headers of an address."""
        if self.failing:
            return 500, b"{}", {}
        of_api = path.startswith("/api/models/")
        path = path.removeprefix("/api/models").lstrip("/")
        repository = next((r for r in sorted(self.repositories, key=len)[::-1] if path.startswith(r)), "")
        if not repository or repository in self.gated:
            return _refusal("GatedRepo" if repository else "RepoNotFound")
        what, _, rest = path.removeprefix(f"{repository}/").partition("/")
        branches = {branch: self.commit(repository, branch) for branch in self.repositories[repository]}
        if what == "refs":
            refs = [{"name": b, "ref": f"refs/heads/{b}", "targetCommit": c} for b, c in branches.items()]
            return 200, json.dumps({"branches": refs, "converts": [], "tags": []}).encode(), {}
        revision, _, name = rest.partition("/")
        branch = next((b for b, commit in branches.items() if revision in (b, commit)), None)
        if branch is None:
            return _refusal("RevisionNotFound")
        files = self.repositories[repository][branch]
        if of_api:
            siblings = [{"rfilename": other} for other in files]
            about = {"id": repository, "sha": branches[branch], "private": False, "tags": [], "siblings": siblings}
            tree = [{"type": "file", "path": n, "size": len(data), "oid": n} for n, data in files.items()]
            return 200, json.dumps(tree if what == "tree" else about).encode(), {}
        if name not in files:
            return _refusal("EntryNotFound")
        tag = f'"{hashlib.sha256(files[name]).hexdigest()}"'
        return 200, files[name], {"ETag": tag, "X-Repo-Commit": branches[branch]}


def _refusal(code: str) -> tuple[int, bytes, dict[str, str]]:
    return 403 if code == "GatedRepo" else 404, b"{}", {"X-Error-Code": code, "X-Error-Message": code}


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append(f"{self.command} {path}")
        status, content, headers = self.hub.answer(path)
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(content))} | headers).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    do_HEAD = do_GET


@contextmanager
def reached(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """The server as the hub of this process, with its downloads in `cache`."""
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    server.daemon_threads = True
    endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
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
