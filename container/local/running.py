"""`mme local`: puts container, platform and front together, on one event loop, and waits for the end.

`mme local s3://bucket/prefix` or a folder is a multi-model endpoint, `mme local model.tar.gz` one of a single model, as
ModelDataUrl means it. The container is this installation's `serve`, or what --emulate-platform names. SageMaker starts
one with `serve`, tells it by variables what it is, waits for a healthy /ping, and ends it by SIGTERM, with thirty
seconds of grace.
"""

# ruff: noqa: T201 - a command talks to people
from __future__ import annotations

import asyncio
import contextlib
import os
import random
import re
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import boto3

from container.cli import pairs
from container.cli.serve import SERVE
from container.local.async_invocations import AsyncInvocations
from container.local.container import Container
from container.local.front import ANY_NAME, Endpoint, Front, Throttle
from container.local.platform import Platform, Timeouts
from container.process.sockets import authority
from container.settings.schema import ASYNCHRONOUS
from container.ship.aws import aws_errors
from container.ship.client import identity_of
from model_handlers.errors import Kind, MmeError, invalid_argument
from serve.sources.archive import extract
from serve.sources.store import ARCHIVE_SUFFIX, open_store

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Mapping, Sequence
    from subprocess import Popen

    from serve.sources.store import Store

_LOOK_SECONDS, _HEALTH_SECONDS = 0.2, 5.0
_URL = re.compile(r"https?://[^/]")
_PORTS = range(20_000, 32_768)  # below those that Linux chooses from
_LOOK_AGAIN = 0.05  # seconds
_GRACE = 30.0
_STDERR = 2  # the descriptor


def run(arguments: argparse.Namespace) -> int:
    asyncio.run(_serve(arguments))
    return 0


async def _serve(arguments: argparse.Namespace) -> None:
    ended = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    async with AsyncExitStack() as stack:
        models = stack.enter_context(_models_folder(arguments.unpack_to))
        single = await asyncio.to_thread(_single_model, arguments, models)
        store = open_store(arguments.source) if single is None else None
        container, process = _container(stack, arguments, models, single)
        patience = arguments.startup_seconds
        await wait_until_healthy(container, process, ended, multi_model=single is None, patience=patience)
        if ended.is_set():
            return
        endpoint = _endpoint(arguments, container, models, store)
        if endpoint.platform:
            stack.push_async_callback(endpoint.platform.close)
        background = _background(arguments, endpoint)
        if background:
            stack.push_async_callback(background.close)
        front = Front(endpoint, Throttle(arguments.throttle, time.monotonic()), background)
        listening = front.listening(arguments.host, arguments.port, arguments.allowed_hosts)
        port = await stack.enter_async_context(listening)
        _introduce(arguments, port, container)
        if store is not None:
            await asyncio.to_thread(_look_at, store)
        await _watch(ended, container, process, multi_model=single is None)


def _look_at(store: Store) -> None:
    """Report at once what the first client would be told: as on SageMaker, archives may come later."""
    try:
        if next(store.list(), None) is None:
            report(f"there is no archive (*.tar.gz) in {store.uri}: check its name, or put archives there")
    except MmeError as error:
        report(f"no model can be loaded for now: {error}")


async def _watch(
    ended: asyncio.Event, container: Container, process: Popen[bytes] | None, *, multi_model: bool
) -> None:
    """Wait for the end; ask for health as often as SageMaker does meanwhile, and report when it changes."""
    looked, before = time.monotonic(), ""
    while not ended.is_set():
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(ended.wait(), _LOOK_SECONDS)
        if process is not None and process.poll() is not None and not ended.is_set():
            raise MmeError(Kind.UNAVAILABLE, f"the container ended with exit code {process.returncode}")
        if time.monotonic() - looked < _HEALTH_SECONDS:
            continue
        reason, looked = await container.healthy(multi_model=multi_model), time.monotonic()
        if reason != before:
            report(f"SageMaker would replace this instance: {reason}" if reason else "the container is healthy again")
        before = reason


def report(sentence: str) -> None:
    print(f"local: {sentence}", file=sys.stderr, flush=True)


@contextmanager
def _models_folder(given: Path | None) -> Iterator[Path]:
    """Where archives are unpacked: a folder that stays where one was given, else a temporary one."""
    if given is not None:
        given.mkdir(parents=True, exist_ok=True)
        yield given.resolve()
        return
    with tempfile.TemporaryDirectory(prefix="mme-local-") as folder:
        models = Path(folder) / "opt/ml/models"
        models.mkdir(parents=True)
        yield models


def _single_model(arguments: argparse.Namespace, models: Path) -> Path | None:
    """The unpacked model of an endpoint of one; None where there are many."""
    if not arguments.source.endswith(ARCHIVE_SUFFIX):
        return None
    folder, _, name = arguments.source.rpartition("/")
    store = open_store(folder or ("/" if arguments.source.startswith("/") else "."))
    directory = models / "model"
    if not directory.exists():
        extract(store.open(store.stat(name)), directory, name=name)
    return directory


def _container(
    stack: AsyncExitStack, arguments: argparse.Namespace, models: Path, single: Path | None
) -> tuple[Container, Popen[bytes] | None]:
    """The container, and its process where it is ours."""
    emulated: str | None = arguments.emulate_platform
    identity = identity_of(arguments)
    if emulated and _URL.match(emulated):
        return Container(emulated, identity), None
    if identity:
        raise invalid_argument("--ca and --key-file are for a container that --emulate-platform names by its URL")
    port = arguments.container_port or free_port()
    environ = pairs("--env", arguments.env)
    environ |= {"SAGEMAKER_MULTI_MODEL": "true"} if single is None else {}
    if emulated:
        command = command_words(emulated, port, models)
    else:
        command = list(SERVE)
        environ |= {"MME_HOST": "127.0.0.1"}
        environ |= {"MME_MODEL_DIR": str(single)} if single else {}
    usual = ASYNCHRONOUS if arguments.async_output else {}
    process = stack.enter_context(started(command, port, environ, usual))
    return Container(f"http://127.0.0.1:{port}"), process


def _endpoint(arguments: argparse.Namespace, container: Container, models: Path, store: Store | None) -> Endpoint:
    limits = Timeouts(invocation=arguments.invocation_seconds, load=arguments.load_seconds)
    name = arguments.endpoint or ""
    if store is None:
        return Endpoint(name, container, None, limits)
    mounted = (arguments.mounted_at or str(models)).rstrip("/")
    keep = not arguments.no_model_cache
    platform = Platform(name or ANY_NAME, store, models, mounted, container, limits, report, keep=keep)
    return Endpoint(name, container, platform, limits)


def _background(arguments: argparse.Namespace, endpoint: Endpoint) -> AsyncInvocations | None:
    if not arguments.async_output:
        return None
    with aws_errors("an asynchronous endpoint"):
        client: Any = boto3.session.Session().client("s3")
    output, failure = arguments.async_output, arguments.async_failure or ""
    return AsyncInvocations(endpoint, client, output, failure, arguments.async_workers, report)


def _introduce(arguments: argparse.Namespace, port: int, container: Container) -> None:
    url = f"http://{authority(arguments.host, port)}"
    report(f"endpoint '{arguments.endpoint or 'any name'}' over {arguments.source}, container at {container.url}")
    report(f"Listening at: {url}")
    report(
        f'boto3.client("sagemaker-runtime", endpoint_url="{url}", region_name="us-east-1", '
        'aws_access_key_id="any", aws_secret_access_key="any")'
    )


def command_words(text: str, port: int, models: Path) -> list[str]:
    """A command as a person wrote it, with `{port}` and `{models}` filled in."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise invalid_argument(f"--emulate-platform '{text}' is no command: {error}") from error
    return [word.replace("{port}", str(port)).replace("{models}", str(models)) for word in words]


def free_port() -> int:
    """A port that is free and stays so: none of those that the system gives out itself."""
    for port in random.sample(_PORTS, len(_PORTS)):
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise MmeError(Kind.UNAVAILABLE, "there is no free port for the container: say which by --container-port")


@contextmanager
def started(
    command: Sequence[str], port: int, environ: Mapping[str, str], usual: Mapping[str, str]
) -> Iterator[Popen[bytes]]:
    """The process, until the block ends. It writes where we write errors."""
    variables = {**usual, **os.environ, "SAGEMAKER_BIND_TO_PORT": str(port), **environ}
    try:
        process = subprocess.Popen(list(command), env=variables, stdout=_STDERR, start_new_session=True)
    except OSError as error:
        raise invalid_argument(f"'{command[0]}' cannot be started: {error.strerror}; is it installed?") from error
    try:
        yield process
    finally:
        _end(process)


def _end(process: Popen[bytes]) -> None:
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
    process: Popen[bytes] | None,
    ended: asyncio.Event,
    *,
    multi_model: bool,
    patience: float,
) -> None:
    """Return when SageMaker would send requests, or when `ended` is set."""
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
