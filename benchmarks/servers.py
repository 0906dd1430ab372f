"""Servers that benchmarks start: ours by its own command, and the peer.

Each gets a free port and is ended with its block.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from benchmarks import load

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from contextlib import AbstractContextManager

    from benchmarks.fetch_triton import Triton


COMMANDS = Path(sys.executable).parent  # where the commands of this checkout are


@dataclass(frozen=True, slots=True)
class Server:
    """A running server. `grpc` is where it takes gRPC, as host:port; "" where it does not."""

    url: str
    pid: int
    grpc: str = ""

    @property
    def address(self) -> str:
        """host:port."""
        return self.url.removeprefix("http://")

    def metric(self, model: str) -> tuple[int, int]:
        """(inferences, executions) of a model so far."""
        row = load.statistics_of(self.address, model)
        return row["inference_count"], row["execution_count"]

    def post(self, request: load.Request) -> float:
        """Seconds until a request is answered with 200."""
        return self.ask("POST", request.path, request.body, request.headers)[0]

    def ask(
        self, method: str, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None
    ) -> tuple[float, bytes]:
        """Send any request on a connection of its own; see `load.ask`."""
        with load.connect(self.address) as connection:
            return load.ask(connection, method, path, body, headers)

    def private_memory(self) -> int:
        """Bytes that all its processes have to themselves."""
        process = psutil.Process(self.pid)
        return sum(_private(each.pid) for each in (process, *process.children(recursive=True)))

    def proportional_memory(self) -> int:
        """Bytes that its processes have in memory, those that several of them share counted once."""
        process = psutil.Process(self.pid)
        return sum(_kilobytes(each.pid, "Pss:") << 10 for each in (process, *process.children(recursive=True)))


def _kilobytes(pid: int, row: str) -> int:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(row))


def _private(pid: int) -> int:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Private_"))


@contextlib.contextmanager
def mme(
    repository: Path, environment: Mapping[str, str] | None = None, *, grpc: bool = False, commands: Path = COMMANDS
) -> Iterator[Server]:
    """Ours, serving a model repository; `grpc`: by gRPC, too; `commands`: those of another checkout."""
    words = ["--grpc-port", "{grpc}"] if grpc else []
    with _ours(["--model-repository", str(repository), *words], environment or {}, commands) as server:
        yield server


@contextlib.contextmanager
def mme_store(
    store: str, environment: Mapping[str, str], cache: Path | None = None, *, commands: Path = COMMANDS
) -> Iterator[Server]:
    """Ours, serving a store of archives; of it on disk is what `cache` holds, nothing without."""
    with contextlib.ExitStack() as stack:
        folder = str(cache) if cache is not None else stack.enter_context(tempfile.TemporaryDirectory())
        words = ["--model-store", store]
        yield stack.enter_context(_ours(words, {**environment, "MME_CACHE_DIR": folder}, commands))


def _ours(words: list[str], environment: Mapping[str, str], commands: Path) -> AbstractContextManager[Server]:
    command = [str(commands / "mme"), "serve", "--host", "127.0.0.1", "--port", "{port}"]
    return _running([*command, *words], environment)


@contextlib.contextmanager
def managed_mme(environment: Mapping[str, str] | None = None, *, commands: Path = COMMANDS) -> Iterator[Server]:
    """Ours as SageMaker starts it: without a model, until POST /models brings one."""
    command = [str(commands / "serve"), "--host", "127.0.0.1", "--port", "{port}"]
    with _running(command, {**(environment or {}), "SAGEMAKER_MULTI_MODEL": "true"}) as server:
        yield server


@contextlib.contextmanager
def triton(peer: Triton, repository: Path, *, explicit: bool = False, grpc: bool = False) -> Iterator[Server]:
    """The peer, serving a model repository; `explicit`: without a model, until it is told to load one."""
    command = [*peer.command, "--model-repository", str(repository), "--http-address", "127.0.0.1"]
    command += ["--http-port", "{port}", "--allow-metrics=false"]
    command += ["--grpc-address", "127.0.0.1", "--grpc-port", "{grpc}"] if grpc else ["--allow-grpc=false"]
    if explicit:
        command.append("--model-control-mode=explicit")
    with _running(command, peer.environment) as server:
        yield server


@contextlib.contextmanager
def _running(command: list[str], environment: Mapping[str, str]) -> Iterator[Server]:
    port, grpc = _free_port(), _free_port()
    process = subprocess.Popen(
        [part.format(port=port, grpc=grpc) for part in command],
        env={**own_environment(), **environment},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        load.wait_until_ready(f"http://127.0.0.1:{port}", process)
        takes_grpc = "{grpc}" in command
        yield Server(f"http://127.0.0.1:{port}", process.pid, f"127.0.0.1:{grpc}" if takes_grpc else "")
    finally:
        process.terminate()
        process.wait(40)


def own_environment() -> dict[str, str]:
    """The variables of this process, but for the one that would have a server import another checkout's modules."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port
