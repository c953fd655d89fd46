"""A Ray cluster of two nodes: the same tables as the local engine's, also when a node is lost on the way."""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from faulty import ended, started, tables, write_prompts

pytest.importorskip("ray", reason="pip install 'ln-probe[ray]'")

# slow: two nodes take some ten seconds to start
pytestmark = pytest.mark.slow
TOKENS = [[1, 7, 30, 4, 22, 9, 41, 13, 2, 38], [5, 5, 17, 46, 3, 28, 11], [44, 8, 19, 6, 33, 25, 12, 40]]


class Cluster:
    """`ray start --head`, and a second `ray start`; one processor each."""

    def __init__(self) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.folder = tempfile.mkdtemp(prefix="ray", dir="/tmp" if os.path.isdir("/tmp") else None)  # sockets: short
        self.address = f"127.0.0.1:{port}"
        head = ["--head", f"--port={port}", f"--temp-dir={self.folder}", "--include-dashboard=false"]
        # Ray checks a token of its own between nodes and drivers; this cluster has one for itself.
        self.token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        self.nodes = [self._start(*head)]
        time.sleep(5)
        self.nodes.append(self._start(f"--address={self.address}"))

    def _start(self, *options: str) -> psutil.Process:
        about = "--num-cpus=1 --node-ip-address=127.0.0.1 --disable-usage-stats --object-store-memory=100000000"
        node = subprocess.Popen(
            [str(Path(sys.executable).with_name("ray")), "start", "--block", *about.split(), *options],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=os.environ | self.token,
        )
        return psutil.Process(node.pid)

    def workers(self, node: int) -> list[psutil.Process]:
        """Processes of our actors on a node."""
        try:
            return [p for p in self.nodes[node].children(recursive=True) if "_Actor" in " ".join(p.cmdline())]
        except psutil.NoSuchProcess:
            return []

    def kill(self, node: int) -> None:
        try:
            for process in [*self.nodes[node].children(recursive=True), self.nodes[node]]:
                process.kill()
        except psutil.NoSuchProcess:
            pass

    def close(self) -> None:
        for node in range(len(self.nodes)):
            self.kill(node)
        shutil.rmtree(self.folder, ignore_errors=True)


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    found = Cluster()
    try:
        yield found
    finally:
        found.close()


@pytest.fixture
def line(lab_suite: list[Path], tmp_path: Path) -> list[object]:
    prompts = write_prompts(tmp_path / "tokens.jsonl", TOKENS)
    return ["report", *lab_suite, "--checkpoints", "all", "--prompts", prompts, "--shard", 1, "--max-tokens", 10]


def test_a_node_is_lost(line: list[object], cluster: Cluster, tmp_path: Path) -> None:
    line += ["--workers", 2, "--out"]
    on_ray = started(*line, tmp_path / "ray", "--engine", "ray", "--address", cluster.address, **cluster.token)
    end = time.monotonic() + 240
    units = tmp_path / "ray" / ".ln_probe" / "units"
    while time.monotonic() < end and on_ray.poll() is None:
        if cluster.workers(1) and len(list(units.rglob("prompts-*.safetensors"))) > 1:
            break
        time.sleep(0.05)
    assert on_ray.poll() is None, on_ray.communicate()[0]
    assert cluster.workers(0), "the first node has no worker"
    assert cluster.workers(1), "the second node has no worker"
    cluster.kill(1)
    code, said = ended(on_ray)
    assert code == 0, said
    assert "the worker was lost" in said
    code, said = ended(started(*line, tmp_path / "local"))
    assert code == 0, said
    assert tables(tmp_path / "ray") == tables(tmp_path / "local")
    assert len(list((tmp_path / "local").glob("*/report.json"))) == 8


def test_no_cluster(line: list[object], tmp_path: Path) -> None:
    code, said = ended(started(*line, "--engine", "ray", "--address", "127.0.0.1:1", "--out", tmp_path / "out"))
    assert code == 2, said
    assert "no Ray cluster at '127.0.0.1:1'" in said
