"""A real engine on real small ONNX models, behind our own HTTP server, on one loop."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import tempfile
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import uvloop
from onnx import TensorProto, helper

from container.control.app import ControlPlane
from container.http1 import Http1Server, Limits
from container.inference.errors import too_large
from container.process.service import Service
from container.settings import Mode, PingMode, Settings
from model_handlers.worker.limits import Deadlines
from serve.threads import ThreadPool
from tests.onnx_types import ONNX_TYPES
from tests.waiting import PATIENCE, eventually

# -- models ----------------------------------------------------------------------------------------------------------


def tensor(name, datatype, *dims):
    """A graph's input or output."""
    return helper.make_tensor_value_info(name, ONNX_TYPES[datatype], list(dims))


def put_model(repository, name, nodes, inputs, outputs, config="", initializers=()):
    """A model directory with one version."""
    graph = helper.make_graph(nodes, "g", inputs, outputs, list(initializers))
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.checker.check_model(model)
    directory = repository / name / "1"
    directory.mkdir(parents=True)
    onnx.save(model, directory / "model.onnx")
    if config:
        (repository / name / "config.pbtxt").write_text(config)
    return repository / name


def put_echo(repository, name, datatype):
    """OUT is IN, any length, no batch dimension."""
    kind = "TYPE_STRING" if datatype == "BYTES" else f"TYPE_{datatype}"
    put_model(
        repository,
        name,
        [helper.make_node("Identity", ["IN"], ["OUT"])],
        [tensor("IN", datatype, "n")],
        [tensor("OUT", datatype, "n")],
        f'input {{ name: "IN" data_type: {kind} dims: -1 }} output {{ name: "OUT" data_type: {kind} dims: -1 }}',
    )


def put_arithmetic(repository, name):
    """SUM and DIFF of A and B, [batch, 4] FP32; batches up to 8."""
    put_model(
        repository,
        name,
        [helper.make_node("Add", ["A", "B"], ["SUM"]), helper.make_node("Sub", ["A", "B"], ["DIFF"])],
        [tensor("A", "FP32", "b", 4), tensor("B", "FP32", "b", 4)],
        [tensor("SUM", "FP32", "b", 4), tensor("DIFF", "FP32", "b", 4)],
        "max_batch_size: 8 dynamic_batching { }",
    )


def put_multiple(repository, name, factor, datatype="FP32"):
    """Y is `factor` times X, both [4]; Y as `datatype`."""
    return put_model(
        repository,
        name,
        [
            helper.make_node("Mul", ["X", "F"], ["M"]),
            helper.make_node("Cast", ["M"], ["Y"], to=ONNX_TYPES[datatype]),
        ],
        [tensor("X", "FP32", 4)],
        [tensor("Y", datatype, 4)],
        initializers=[helper.make_tensor("F", TensorProto.FLOAT, [1], [factor])],
    )


def fill(repository):
    """The models that the tests of the routes use."""
    for datatype in ONNX_TYPES:
        put_echo(repository, f"echo-{datatype}", datatype)
    put_arithmetic(repository, "arithmetic")
    put_multiple(repository, "twice", 2.0)
    put_multiple(repository, "thrice", 3.0)
    put_multiple(repository, "twice as integers", 2.0, "INT32")
    put_multiple(repository, "modèle-模型", 5.0)
    put_model(
        repository,
        "quotient",
        [helper.make_node("Div", ["X", "X"], ["Y"])],
        [tensor("X", "FP32", 4)],
        [tensor("Y", "FP32", 4)],
    )
    put_model(
        repository,
        "fails",
        [helper.make_node("Reshape", ["X", "S"], ["Y"])],
        [tensor("X", "FP32", "n")],
        [tensor("Y", "FP32", "m")],
        'input { name: "X" data_type: TYPE_FP32 dims: -1 } output { name: "Y" data_type: TYPE_FP32 dims: 7 }',
        [helper.make_tensor("S", TensorProto.INT64, [1], [7])],
    )
    broken = repository / "broken" / "1"
    broken.mkdir(parents=True)
    (broken / "model.onnx").write_bytes(b"no model")


# -- the server ------------------------------------------------------------------------------------------------------


@dataclass
class Reply:
    """An HTTP answer: header names in lower case."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        """The body."""
        assert self.headers["content-type"] == "application/json", self
        return json.loads(self.body)

    @property
    def error(self) -> str:
        """The sentence of an error answer, which is all that its body holds."""
        document = self.json
        assert list(document) == ["error"], document
        sentence = document["error"]
        assert isinstance(sentence, str)
        assert sentence
        assert "\n" not in sentence
        return sentence


def raw_http(port: int, method: str, path: str, headers: dict[str, str] | None = None, body: bytes = b"") -> Reply:
    """One request on a connection of its own, its target and headers sent as they are."""
    lines = [f"{method} {path} HTTP/1.1", "Host: test", "Connection: close", f"Content-Length: {len(body)}"]
    lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
    with socket.create_connection(("127.0.0.1", port), PATIENCE) as connection:
        connection.sendall("\r\n".join([*lines, "", ""]).encode("latin-1") + body)
        with connection.makefile("rb") as reader:
            return _read_reply(reader, method)


def _read_reply(reader, method):
    status = int(reader.readline().split(b" ")[1])
    headers: dict[str, str] = {}
    while (line := reader.readline().strip()) != b"":
        name, _, value = line.decode("latin-1").partition(": ")
        headers[name.lower()] = value
    body = b"" if method == "HEAD" else reader.read()
    return Reply(status, headers, body)


@dataclass
class Running:
    """A service at work, and the ways to it."""

    service: Service
    on_loop: OnLoop
    control: ControlPlane
    port: int
    ports: dict[str, int] = field(default_factory=dict)

    def http(self, method: str, path: str, headers: dict[str, str] | None = None, body: bytes = b"") -> Reply:
        """Over a socket through our own HTTP server, hot routes on the loop and Flask for the rest."""
        return raw_http(self.port, method, path, headers, body)

    def infer(self, model: str, document: Any, **headers: str) -> Reply:
        """A JSON inference request of KServe's over a socket."""
        body = document if isinstance(document, bytes) else json.dumps(document).encode()
        return self.http("POST", f"/v2/models/{model}/infer", headers, body)

    @contextlib.contextmanager
    def loads_held_up(self):
        """While it lasts, no load and no unload begins: threads for loads wait, all those for unloads are busy."""
        over, loads = threading.Event(), self.engine.pools.loads
        eventually(lambda: not loads._count, "threads of earlier loads to end")
        pools = [pool for pool in vars(self.engine).values() if isinstance(pool, ThreadPool) and pool.most < 1000]
        busy = [pool.submit(over.wait, PATIENCE) for pool in pools for _ in range(pool.most)]
        begin = loads._initializer
        loads._initializer = lambda: over.wait(PATIENCE) and begin()
        try:
            yield
        finally:
            loads._initializer = begin
            over.set()
            assert all(each.result(PATIENCE) for each in busy)

    @property
    def engine(self):
        """The engine; to be touched on its loop."""
        return self.service.engine


class OnLoop:
    """Runs functions and coroutines on a loop for the test's thread."""

    def __init__(self, loop):
        self._loop = loop

    def run(self, work):
        """The result of a coroutine."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def call(self, function, *args, **kwargs):
        """The result of a function."""

        async def on_loop():
            return function(*args, **kwargs)

        return self.run(on_loop())


class _Loop:
    def __init__(self) -> None:
        self.loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="test loop")
        self._thread.start()

    def stop(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(PATIENCE)
        self.loop.close()


def start_service(**settings):
    """A service on a loop of its own, our HTTP server over it; and a function that ends it all."""
    own = _Loop()
    on_loop = OnLoop(own.loop)
    usual = Deadlines.usual_execution
    cache = tempfile.TemporaryDirectory()
    options = {"host": "127.0.0.1", "ping_mode": PingMode.LIVE, "memory_budget": 1 << 30, "cache_dir": Path(cache.name)}
    options |= settings
    try:
        service = on_loop.call(Service, Settings(**options), own.loop)
    except BaseException:
        own.stop()
        cache.cleanup()
        raise
    control = on_loop.call(ControlPlane, service, own.loop)

    async def listen():
        http = Http1Server(control.handle, Limits(body=service.settings.max_body_bytes), own.loop, too_large)
        listener = await own.loop.create_server(http.protocol_factory, "127.0.0.1", 0)
        if service.keys is not None:
            http.gate = control.gate(listener.sockets)
        return http, listener

    http, listener = on_loop.run(listen())
    loads = on_loop.call(service.start)
    on_loop.run(asyncio.wait_for(asyncio.shield(loads), PATIENCE))
    running = Running(service, on_loop, control, listener.sockets[0].getsockname()[1])

    def stop():
        on_loop.call(listener.close)
        on_loop.call(http.abort)
        on_loop.run(service.close())
        control.close()
        own.stop()
        cache.cleanup()
        Deadlines.usual_execution = usual

    return running, stop


@pytest.fixture(scope="session")
def repository(tmp_path_factory):
    """A repository with a model for every need; read only."""
    path = tmp_path_factory.mktemp("repository")
    fill(path)
    return path


@pytest.fixture(scope="module")
def server(repository):
    """A repository server; no model is loaded until somebody asks for it, but `arithmetic`."""
    running, stop = start_service(mode=Mode.REPOSITORY, model_repository=repository, load_models=("arithmetic",))
    yield running
    stop()


@pytest.fixture
def start():
    """A function that starts a service with settings of its own."""
    stops = []

    def started(**settings):
        running, stop = start_service(**settings)
        stops.append(stop)
        return running

    yield started
    for stop in stops:
        stop()


# -- requests --------------------------------------------------------------------------------------------------------


def json_inputs(**arrays):
    """`inputs` of FP32 arrays as JSON."""
    return [
        {"name": name, "shape": list(np.shape(value)), "datatype": "FP32", "data": np.ravel(value).tolist()}
        for name, value in arrays.items()
    ]


def binary_body(document, *tensors: bytes):
    """A JSON header with binary data behind it, and the header's length."""
    header = json.dumps(document).encode()
    return header + b"".join(tensors), len(header)


@pytest.fixture(name="json_inputs", scope="session")
def _json_inputs():
    return json_inputs


@pytest.fixture(name="binary_body", scope="session")
def _binary_body():
    return binary_body


@pytest.fixture(scope="session")
def put():
    """The functions that write models into a repository."""
    return {"echo": put_echo, "arithmetic": put_arithmetic, "multiple": put_multiple, "model": put_model}


@pytest.fixture(name="raw_http", scope="session")
def _raw_http():
    return raw_http
