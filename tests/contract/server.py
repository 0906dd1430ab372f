"""The server as SageMaker and people start it: a process with an environment, a port, a log and an end by SIGTERM.

Knows how to start, ask, look at and stop a server from outside; nothing of what is asked.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
import struct
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import psutil

from tests.metric_text import families_of
from tests.processes import below, children, is_over, still_there
from tests.waiting import PATIENCE, eventually

if TYPE_CHECKING:
    import ssl

    from tests.contract.forked import Forked, Forker

SCRIPTS = Path(sys.executable).parent
_LISTENING = re.compile(r"Listening at: https?://[^ ]+:(\d+)")
_GRPC_LISTENING = re.compile(r"gRPC listening at port (\d+)")
_ARCHIVE = re.compile(r"[0-9a-f]{24}-[0-9a-f]{16}")
_INHERITED = ("PATH", "LANG", "LD_LIBRARY_PATH", "PYTHONPATH", "TMPDIR", "VIRTUAL_ENV")


def clean_environment(home: Path, **environ: str) -> dict[str, str]:
    """An environment in which nothing configures the server but `environ`."""
    inherited = {name: os.environ[name] for name in _INHERITED if name in os.environ}
    return {**inherited, "HOME": str(home), **environ}


@dataclass
class Answer:
    """What came back over HTTP; header names in lower case."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        """The JSON document in the body."""
        return json.loads(self.body)

    @property
    def error(self) -> str:
        """The one sentence of an error, which is the whole document."""
        assert self.headers["content-type"] == "application/json"
        assert list(self.json) == ["error"]
        return self.json["error"]


class Server:
    """One server process with its worker. A context manager: entering starts it, leaving stops it.

    Args:
        folder: a new folder for its home, its cache and its log.
        environ: variables of the server.
        command: the console script and its arguments.
        ready: whether entering waits for a healthy ping, or only for an answer of any kind.
        exit_code: what the process has to end with.
        host: the address at which it is asked.
        tls: how it is asked by TLS, None where it is asked plainly.
    """

    forker: Forker | None = None  # who begins servers, unless they are begun by their command

    def __init__(
        self,
        folder: Path,
        environ: dict[str, str],
        *,
        command=("serve",),
        ready: bool = True,
        exit_code: int = 0,
        host: str = "127.0.0.1",
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.home = folder / "home"
        self.home.mkdir(parents=True)
        self.cache = folder / "cache"
        self._log_path = folder / "server.log"
        self._command = [str(SCRIPTS / command[0]), *command[1:]]
        self._environ = clean_environment(
            self.home, **{"MME_HOST": "127.0.0.1", "MME_PORT": "0", "MME_CACHE_DIR": str(self.cache), **environ}
        )
        self._ready = ready
        self._exit_code = exit_code
        self._host = host
        self._tls = tls
        self.port = 0
        self._own = environ
        self.process: subprocess.Popen[bytes] | Forked | None = None

    def __enter__(self) -> Self:
        self.process = self._begun()
        try:
            self.port = int(eventually(self._listening, "the line that says where the server listens"))
            if self._ready:
                eventually(lambda: self.ask("GET", "/ping").status == 200, "a healthy ping")
            else:
                eventually(lambda: self.ask("GET", "/ping").status, "an answer to a ping")
        except BaseException:
            self.kill()
            print(self.log)  # noqa: T201 - pytest shows it beside the failure
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            code = self.stop()
        finally:
            print(self.log)  # noqa: T201
        if kind is None:
            assert code == self._exit_code
            assert "Traceback" not in self.log, "the server logged a traceback"
            assert self.staging() == []
            assert self.shown_home() == [], "the server wrote into the home directory"

    def _begun(self) -> subprocess.Popen[bytes] | Forked:
        if self.forker and "PYTHONPATH" not in self._own:
            return self.forker.start(self._command, self._environ, self._log_path)
        with self._log_path.open("wb") as log:
            return subprocess.Popen(
                self._command, env=self._environ, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )

    def stop(self) -> int:
        """Ask it to end, as SageMaker does; return its exit code."""
        if self.process.poll() is None:
            self.process.terminate()
        try:
            return self.process.wait(30)  # what SageMaker grants
        except subprocess.TimeoutExpired:
            self.kill()
            raise

    def kill(self) -> None:
        """End the server and all of its session."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def _listening(self) -> str:
        code = self.process.poll()
        assert code is None, f"the server ended at once with exit code {code}"
        found = _LISTENING.search(self.log)
        return found[1] if found else ""

    # asking

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"{'http' if self._tls is None else 'https'}://127.0.0.1:{self.port}"

    @property
    def address(self) -> str:
        """Where it listens, as Triton's client wants it."""
        return f"127.0.0.1:{self.port}"

    @property
    def grpc_port(self) -> int:
        """Where it listens to gRPC, if it does."""
        return int(_GRPC_LISTENING.search(self.log)[1])

    @property
    def grpc_address(self) -> str:
        """The same, as Triton's client wants it."""
        return f"127.0.0.1:{self.grpc_port}"

    def ask(self, method: str, path: str, body: bytes | dict | None = None, **headers: str) -> Answer:
        """One request on a connection of its own; `_` in a header's name stands for `-`."""
        if self._tls is None:
            connection = http.client.HTTPConnection(self._host, self.port, timeout=PATIENCE)
        else:
            connection = http.client.HTTPSConnection(self._host, self.port, timeout=PATIENCE, context=self._tls)
        try:
            data = json.dumps(body).encode() if isinstance(body, dict) else body
            connection.request(method, path, data, {name.replace("_", "-"): text for name, text in headers.items()})
            response = connection.getresponse()
            return Answer(response.status, {k.lower(): v for k, v in response.getheaders()}, response.read())
        finally:
            connection.close()

    def connect(self) -> Connection:
        """A bare connection."""
        return Connection(self.port)

    # looking

    @property
    def log(self) -> str:
        """Everything it has logged so far."""
        return self._log_path.read_text(errors="replace")

    @property
    def lines(self) -> list[dict[str, Any]]:
        """The log's lines as JSON, but for one that is being written."""
        return [json.loads(line) for line in self.log.splitlines(keepends=True) if line.endswith("\n")]

    @property
    def worker(self) -> psutil.Process:
        """The process that serves; one before it that has ended may wait to be buried."""
        workers = [each for each in map(psutil.Process, children(self.process.pid)) if not is_over(each)]
        assert len(workers) == 1, workers
        return workers[0]

    @property
    def processes(self) -> dict[psutil.Process, str]:
        """The processes below the worker that live, its fork server's too, with their names."""
        names = {}
        for process in still_there(below(self.worker.pid)):
            with suppress(psutil.NoSuchProcess):  # it ends while we look
                if process.status() != psutil.STATUS_ZOMBIE:
                    names[process] = process.name()
        return names

    def metric(self, name: str, **labels: str) -> float:
        """The value of a sample, 0 if there is none."""
        samples = (
            sample for family in families_of(self.ask("GET", "/metrics").body.decode()) for sample in family.samples
        )
        return next((s.value for s in samples if s.name == name and labels.items() <= s.labels.items()), 0.0)

    def staging(self) -> list[Path]:
        """Folders that somebody began to fill and did not finish."""
        return list(self.cache.rglob(".staging-*"))

    def unpacked(self) -> list[str]:
        """The archives that the cache folder holds."""
        return sorted(path.name for path in self.cache.glob("*") if _ARCHIVE.fullmatch(path.name))

    def shown_home(self) -> list[str]:
        """What lies in its home directory."""
        return sorted(path.name for path in self.home.iterdir())

    def open_files(self) -> list[str]:
        """The files that the worker has open."""
        return sorted(target for target in self._descriptors() if target.startswith("/"))

    def sockets(self) -> set[str]:
        """The sockets that the worker has open, those too whose connection the system has already given up."""
        return {target for target in self._descriptors() if target.startswith("socket:")}

    def _descriptors(self) -> list[str]:
        targets = []
        for entry in Path(f"/proc/{self.worker.pid}/fd").iterdir():
            with suppress(FileNotFoundError):
                targets.append(str(entry.readlink()))
        return targets

    def other_end(self, connection: Connection) -> str:
        """The worker's socket of a connection, by the name that `sockets` knows it by."""
        (fd,) = (c.fd for c in self.worker.net_connections("tcp") if c.raddr and c.raddr.port == connection.port)
        return str(Path(f"/proc/{self.worker.pid}/fd/{fd}").readlink())


@dataclass
class Connection:
    """A socket that can read answers."""

    server_port: int
    socket: socket.socket = field(init=False)

    def __post_init__(self) -> None:
        self.socket = socket.create_connection(("127.0.0.1", self.server_port), timeout=PATIENCE)
        self._reader = self.socket.makefile("rb")
        self.port = self.socket.getsockname()[1]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def send(self, *parts: bytes) -> Self:
        """Send all of it, each part in a segment of its own."""
        for part in parts:
            self.socket.sendall(part)
        return self

    def answer(self, *, head_only: bool = False) -> Answer:
        """Read one answer."""
        status_line = self._reader.readline()
        assert status_line, "the connection closed without an answer"
        headers = {}
        while (line := self._reader.readline()) not in {b"\r\n", b""}:
            name, _, value = line.decode("latin-1").partition(":")
            headers[name.lower()] = value.strip()
        length = 0 if head_only else int(headers.get("content-length", 0))
        return Answer(int(status_line.split()[1]), headers, self._reader.read(length))

    def ended(self) -> bool:
        """Whether the server closed in an orderly way, with nothing left to read."""
        return self._reader.read(1) == b""

    def reset(self) -> None:
        """Leave without a good-bye."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close()

    def close(self) -> None:
        """Leave."""
        self._reader.close()
        self.socket.close()


def post(path: str, body: bytes | dict, **headers: str) -> bytes:
    """A POST as bytes on the wire."""
    data = json.dumps(body).encode() if isinstance(body, dict) else body
    lines = [f"POST {path} HTTP/1.1", "Host: localhost", f"Content-Length: {len(data)}"]
    lines += [f"{name.replace('_', '-')}: {text}" for name, text in headers.items()]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + data


def kill(server: Server) -> None:
    """SIGKILL the worker; return when the next one answers."""
    dead = server.worker
    dead.send_signal(signal.SIGKILL)
    eventually(lambda: is_over(dead), "its end")
    eventually(lambda: alive(server), "another worker")
    assert server.worker.pid != dead.pid


def alive(server: Server) -> bool:
    """Whether a ping is answered."""
    try:
        return server.ask("GET", "/ping").status == 200
    except (OSError, http.client.HTTPException):
        return False
