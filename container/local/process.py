"""The container that `mme local` starts by itself: a command, its environment, its health, its end.

SageMaker starts a container with `serve`, tells it by variables what it is, waits for a healthy /ping, and ends it by
SIGTERM with thirty seconds of grace.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import shlex
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from model_handlers.errors import Kind, MmeError, invalid_argument

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from container.local.container import Container

_ROOT = str(Path(__file__).parents[2])
_SERVE = (
    f"import sys; sys.path.insert(0, {_ROOT!r}); from container.cli.main import serve_command as s; sys.exit(s([]))"
)
OURS = (sys.executable, "-P", "-c", _SERVE)  # this very code, whatever lies in the working directory
_PORTS = range(20_000, 32_768)  # below those that Linux chooses from
_LOOK_AGAIN = 0.05  # seconds
_GRACE = 30.0
_STDERR = 2  # the descriptor


def command_words(text: str, port: int, models: Path) -> list[str]:
    """A command as a person wrote it, with `{port}` and `{models}` filled in.

    Raises:
        MmeError: INVALID_ARGUMENT when its quotes do not match.
    """
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise invalid_argument(f"--emulate-platform '{text}' is no command: {error}") from error
    return [word.replace("{port}", str(port)).replace("{models}", str(models)) for word in words]


def free_port() -> int:
    """A port that is free and stays so: none of those that the system gives out itself.

    Raises:
        MmeError: UNAVAILABLE when there is none.
    """
    for port in random.sample(_PORTS, len(_PORTS)):
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise MmeError(Kind.UNAVAILABLE, "there is no free port for the container: say which by --container-port")


@contextmanager
def started(
    command: Sequence[str], port: int, environ: Mapping[str, str], usual: Mapping[str, str]
) -> Iterator[subprocess.Popen[bytes]]:
    """The process, until the block ends. It writes where we write errors.

    Args:
        command: its words.
        port: where it is to listen.
        environ: its variables beside our own.
        usual: what counts of those that neither has.

    Raises:
        MmeError: INVALID_ARGUMENT when there is no such command.
    """
    variables = {**usual, **os.environ, "SAGEMAKER_BIND_TO_PORT": str(port), **environ}
    try:
        process = subprocess.Popen(list(command), env=variables, stdout=_STDERR, start_new_session=True)
    except OSError as error:
        raise invalid_argument(f"'{command[0]}' cannot be started: {error.strerror}; is it installed?") from error
    try:
        yield process
    finally:
        _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """SIGTERM, and SIGKILL for the whole session where that was not enough."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(_GRACE)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


async def wait_until_healthy(
    container: Container,
    process: subprocess.Popen[bytes] | None,
    ended: asyncio.Event,
    *,
    multi_model: bool,
    patience: float,
) -> None:
    """Return when SageMaker would send requests, or when `ended` is set.

    Raises:
        MmeError: UNAVAILABLE when it would not within `patience` seconds, or the process ended.
    """
    deadline = time.monotonic() + patience
    while (reason := await container.healthy(multi_model=multi_model)) and not ended.is_set():
        if process is not None and process.poll() is not None:
            raise MmeError(
                Kind.UNAVAILABLE, f"the container ended with exit code {process.returncode} before it was healthy"
            )
        if time.monotonic() > deadline:
            raise MmeError(
                Kind.UNAVAILABLE,
                f"the container is not healthy after {patience:.0f} s, so that SageMaker would give it up: {reason}",
            )
        await asyncio.sleep(_LOOK_AGAIN)
