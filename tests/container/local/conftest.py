"""A container of somebody else's that speaks the multi-model contract, and endpoints of `mme local` before it."""

from __future__ import annotations

import asyncio
import json
import os
import tarfile
import threading
import time
from contextlib import ExitStack, suppress
from io import BytesIO
from pathlib import Path

import boto3
import pytest
from botocore.config import Config
from moto.moto_server.threaded_moto_server import ThreadedMotoServer

from container.local.container import Container
from container.local.front import Endpoint, Front, Throttle
from container.local.platform import Platform, Timeouts
from serve.sources.store import open_store
from tests.http_server import Handler, answering
from tests.waiting import PATIENCE


class Contract(Handler):
    """A model is a file called `says`, which is what it answers; the server has room for `room` of them."""

    def do_GET(self):
        """Health, and one model."""
        if self.path in {"/ping", "/models"}:
            self._answer(200, {"models": []})
        else:
            self._answer(200 if self.path.rpartition("/")[2] in self.server.loaded else 404, {})

    def do_POST(self):
        """LOAD and INVOKE."""
        body = self.body()
        target = self.headers.get("X-Amzn-SageMaker-Target-Model", "")
        self.server.seen.append((self.path, dict(self.headers)))
        if self.path == "/models":
            self._load(target, json.loads(body))
        elif self.path == "/invocations":
            self._single(body)
        else:
            self._invoke(self.path.split("/")[2], body)

    def _load(self, target, document):
        self.server.load_orders.append(target)
        self.server.gates.get(target, threading.Event()).wait(self.server.slow.get(target, 0))
        says = (Path(document["url"]) / "says").read_text()
        if says == "never":
            self._answer(507, {"error": "no memory for this one"})
        elif says == "broken":
            self._answer(400, {"error": "this model is broken"})
        elif len(self.server.loaded) >= self.server.room:
            self._answer(507, {"error": "no memory"})
        else:
            self.server.loaded[document["model_name"]] = says
            self.server.admitted.append(says)
            self._answer(200, {})

    def _invoke(self, name, body):
        if name not in self.server.loaded:
            self._answer(404, {"error": "no such model"})
        elif body == b"hungry" and len(self.server.loaded) > 1:
            self._answer(507, {"error": "no memory to run"})
        elif body == b"fail":
            self._answer(400, {"error": "input X is missing"})
        elif body == b"trickle":
            self._trickle()
        elif body == b"nap":
            time.sleep(0.2)
            self._answer(200, {"says": self.server.loaded[name]})
        elif body == b"sleep":
            time.sleep(1)
            self._answer(200, {})
        else:
            self._answer(200, {"says": self.server.loaded[name]})

    def _trickle(self):
        self.send_response(200)
        self.send_header("Content-Length", "100")
        self.end_headers()
        with suppress(BrokenPipeError, ConnectionResetError):
            for _ in range(100):
                self.wfile.write(b"x")
                time.sleep(0.02)

    def _single(self, body):
        if body == b"fail":
            self._answer(500, {"error": "it broke"})
            return
        self.send_response(200)
        self.send_header("Content-Type", "application/jsonlines")
        if self.headers.get("X-Amzn-SageMaker-Session-Id") == "NEW_SESSION":
            self.send_header("X-Amzn-SageMaker-New-Session-Id", "7; Expires=2030-01-01T00:00:00Z")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for line in (b'{"n": 1}\n', b'{"n": 2}\n'):
            self.wfile.write(b"%x\r\n%s\r\n" % (len(line), line))
        if body == b"break":
            self.close_connection = True
            return
        self.wfile.write(b"0\r\n\r\n")

    def do_DELETE(self):
        """UNLOAD."""
        self.server.loaded.pop(self.path.rpartition("/")[2], None)
        self._answer(200, {})

    def _answer(self, status, document):
        self.answer(status, document, X_Amzn_SageMaker_Custom_Attributes="mine")


@pytest.fixture
def contract():
    """The container; `url` is where it listens."""
    with answering(Contract, loaded={}, admitted=[], room=2, seen=[], load_orders=[], gates={}, slow={}) as server:
        yield server


def put_archive(folder, name, says):
    """An archive whose model says something."""
    folder.mkdir(exist_ok=True)
    with tarfile.open(folder / name, "w:gz") as tar:
        member = tarfile.TarInfo("says")
        member.size = len(says)
        tar.addfile(member, BytesIO(says.encode()))


@pytest.fixture
def archives(tmp_path):
    """A folder of archives a to d; one that is never loaded, and a broken one."""
    for name in "abcd":
        put_archive(tmp_path / "archives", f"{name}.tar.gz", name)
    put_archive(tmp_path / "archives", "never.tar.gz", "never")
    put_archive(tmp_path / "archives", "never-2.tar.gz", "never")
    put_archive(tmp_path / "archives", "broken.tar.gz", "broken")
    (tmp_path / "archives" / "text.tar.gz").write_text("no archive")
    return tmp_path / "archives"


def runtime_client(url, **options):
    """Plain boto3, with one attempt."""
    return boto3.client(
        "sagemaker-runtime",
        endpoint_url=url,
        region_name="us-east-1",
        aws_access_key_id="any",
        aws_secret_access_key="any",
        config=Config(retries={"total_max_attempts": 1}, **options),
    )


@pytest.fixture
def loop():
    """An event loop on a thread of its own, beside the thread of the test."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield loop
    asyncio.run_coroutine_threadsafe(loop.shutdown_default_executor(), loop).result(PATIENCE)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


@pytest.fixture
def start(contract, archives, tmp_path, loop):
    """A function that starts an endpoint and gives boto3's client for it; `platform` is its attribute."""
    with ExitStack() as stack:

        def run(work):
            return asyncio.run_coroutine_threadsafe(work, loop).result(PATIENCE)

        async def made(name, limits, background, *, multi, keep):
            container = Container(contract.url)
            platform = None
            if multi:
                models = tmp_path / "instance"
                models.mkdir(exist_ok=True)
                store = open_store(str(archives))
                platform = Platform(name or "local", store, models, str(models), container, limits, keep=keep)
            endpoint = Endpoint(name, container, platform, limits)
            return endpoint, background(endpoint)

        def started(*, name="", multi=True, rate=0.0, background=lambda _endpoint: None, keep=True, **limits):
            endpoint, worker = run(made(name, Timeouts(**limits), background, multi=multi, keep=keep))
            for each in filter(None, (endpoint.platform, worker)):
                stack.callback(lambda each=each: run(each.close()))
            listening = Front(endpoint, Throttle(rate, time.monotonic()), worker).listening("127.0.0.1", 0)
            port = run(listening.__aenter__())
            stack.callback(lambda: run(listening.__aexit__(None, None, None)))
            client = runtime_client(f"http://127.0.0.1:{port}")
            stack.callback(client.close)
            client.platform = endpoint.platform
            return client

        yield started


@pytest.fixture
def s3(monkeypatch, tmp_path):
    """A client of an S3 server with a bucket called models, which the environment names too."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    for name, value in {
        "AWS_ENDPOINT_URL_S3": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    client = boto3.session.Session().client("s3")
    with suppress(client.exceptions.BucketAlreadyOwnedByYou):  # other tests' servers keep theirs here, too
        client.create_bucket(Bucket="models")
    yield client
    client.close()
    server.stop()
