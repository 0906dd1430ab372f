"""The two servers of the demo: an S3 of its own on loopback, and the container's `serve` command as a process.

Both are context managers that leave nothing behind, however the block ends. Knows how to start and stop, not what is
asked of the servers in between. Everything here runs on the main thread; moto serves from a thread of its own.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Self

import boto3
from moto.server import ThreadedMotoServer
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import TracebackType

    from rich.console import Console

REGION = "eu-central-1"
CREDENTIALS = {"aws_access_key_id": "demo", "aws_secret_access_key": "demo", "region_name": REGION}
BUCKET, PREFIX = "models", "demo"
STORE = f"s3://{BUCKET}/{PREFIX}"

START_SECONDS = 60
STOP_SECONDS = 30  # the server drains for 25 at most
LOG_LINES_SHOWN = 40
_LISTENING = re.compile(r"Listening at: (http://[^ ]+:\d+)")


@contextmanager
def asked_directly() -> Iterator[None]:
    """Ask servers of this machine without the proxy of the environment, which can't reach them; children do so too."""
    before = {name: os.environ.get(name) for name in ("no_proxy", "NO_PROXY")}
    hosts = ",".join([*filter(None, [before["no_proxy"] or before["NO_PROXY"]]), "127.0.0.1", "localhost"])
    os.environ.update(dict.fromkeys(before, hosts))
    try:
        yield
    finally:
        for name, value in before.items():
            del os.environ[name]
            if value is not None:
                os.environ[name] = value


@contextmanager
def s3_server() -> Iterator[str]:
    """An empty S3 on a free port of the loopback interface; gives its URL."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # or it logs a line per request
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        yield f"http://{host}:{port}"
    finally:
        server.stop()


def upload(archives: Sequence[Path], s3_url: str, console: Console) -> None:
    """Put the archives below the demo's prefix, with a bar per byte."""
    s3 = boto3.client("s3", endpoint_url=s3_url, **CREDENTIALS)
    with suppress(s3.exceptions.BucketAlreadyOwnedByYou):  # servers of one process share what they hold
        s3.create_bucket(Bucket=BUCKET, CreateBucketConfiguration={"LocationConstraint": REGION})
    columns = (TextColumn("{task.description:24s}"), BarColumn(), DownloadColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("upload", total=sum(path.stat().st_size for path in archives))
        for path in archives:
            progress.update(task, description=f"upload {path.name}")
            s3.upload_file(
                str(path), BUCKET, f"{PREFIX}/{path.name}", Callback=lambda sent: progress.advance(task, sent)
            )
        progress.update(task, description=f"uploaded to {STORE}")


class DemoError(Exception):
    """The demo cannot go on; the message says why, and the server's log, which is shown, says more."""


class Container:
    """The `serve` command, self-managed: models come from the store when they are asked for.

    Entering starts it and waits until it answers pings; leaving stops it. When the block or the start fails, the end
    of its log is printed.
    """

    def __init__(self, *, s3_url: str, memory_budget: str, cache: Path, log: Path, console: Console) -> None:
        self.url = ""  # known once it listens
        self._console = console
        self._log_path = log
        self._environment = _clean_environment() | {
            "MME_MODEL_STORE": STORE,
            "MME_HOST": "127.0.0.1",
            "MME_PORT": "0",
            "MME_MEMORY_BUDGET": memory_budget,
            "MME_CACHE_DIR": str(cache.resolve()),
            "AWS_ENDPOINT_URL": s3_url,
            "AWS_ACCESS_KEY_ID": CREDENTIALS["aws_access_key_id"],
            "AWS_SECRET_ACCESS_KEY": CREDENTIALS["aws_secret_access_key"],
            "AWS_DEFAULT_REGION": REGION,
        }

    def __enter__(self) -> Self:
        command = Path(sys.executable).with_name("serve")
        with self._log_path.open("wb") as log:
            # A session of its own: Ctrl-C reaches the demo alone, which then stops the server in order.
            self._process = subprocess.Popen(
                [command], env=self._environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )
        try:
            self._await_ping()
        except BaseException:
            self.stop()
            self._show_log()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        if kind is not None and issubclass(kind, Exception):
            self._show_log()

    def stop(self) -> int:
        """Ask it to end, as SageMaker does; answers its exit code (a negative number: died of that signal)."""
        if self._process.poll() is None:
            self._process.terminate()
        try:
            return self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._console.print(f"the server did not end within {STOP_SECONDS} s of SIGTERM and is killed")
            os.killpg(self._process.pid, signal.SIGKILL)
            return self._process.wait()

    def wait(self) -> None:
        """Until the server ends."""
        self._process.wait()

    def _await_ping(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise DemoError(f"the server ended at once with exit code {self._process.returncode}")
            listens = _LISTENING.search(self._log_path.read_text(errors="replace"))
            if listens is not None and self._answers(listens[1]):
                self.url = listens[1]
                return
            time.sleep(0.05)
        raise DemoError(f"the server did not answer /ping with 200 within {START_SECONDS} s")

    def _answers(self, url: str) -> bool:
        try:
            with urllib.request.urlopen(f"{url}/ping", timeout=START_SECONDS):
                return True
        except (urllib.error.URLError, OSError):
            return False

    def _show_log(self) -> None:
        lines = self._log_path.read_text(errors="replace").splitlines()
        self._console.rule(f"the end of {self._log_path}")
        self._console.print("\n".join(lines[-LOG_LINES_SHOWN:]), markup=False, highlight=False)
        self._console.rule()


def _clean_environment() -> dict[str, str]:
    """Ours without whatever of it would configure the server or its AWS account behind the demo's back."""
    foreign = ("MME_", "SAGEMAKER_", "AWS_")
    return {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
