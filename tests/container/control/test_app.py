"""The Flask application: the whole contract on any WSGI server, answered as our own server answers it."""

import contextlib
import http.client
import json
import os
import socket
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from container.codec.framing import BINARY_TYPE
from container.settings import Mode
from tests.contract import models

ANY = {"date", "server", "connection", "server-timing", "x-amzn-requestid"}  # differ by server or by request
X = np.array([1, 2, 3, 4], dtype="<f4")
TARGET = {"X-Amzn-SageMaker-Target-Model": "twice"}


def json_request(**more):
    """What the models of one X take."""
    tensor = {"name": "X", "shape": [4], "datatype": "FP32", "data": [1, 2, 3, 4]}
    return json.dumps({"inputs": [tensor]} | more).encode()


def binary_request():
    """The same with X behind a header, and the header's length."""
    tensor = {"name": "X", "shape": [4], "datatype": "FP32", "parameters": {"binary_data_size": 16}}
    header = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
    return header + X.tobytes(), str(len(header))


BINARY, LENGTH = binary_request()
MODELLED = "mod%C3%A8le-%E6%A8%A1%E5%9E%8B"
REQUESTS = [
    ("GET", "/ping", {}, b""),
    ("POST", "/ping", {}, b"anything"),
    ("HEAD", "/ping", {}, b""),
    ("GET", "/ping/", {}, b""),
    ("GET", "/ping?x=1", {}, b""),
    ("DELETE", "/ping", {}, b""),
    ("POST", "/invocations", TARGET, json_request()),
    ("POST", "/invocations?a=b%20c", TARGET, json_request()),
    ("POST", "/invocations", {}, json_request()),
    ("GET", "/invocations", {}, b""),
    ("POST", "/models/twice/invoke", {}, json_request(id="7")),
    ("POST", "/models/twice/invoke/", {}, json_request()),
    ("POST", "/v2/models/twice/infer/", {}, json_request()),
    ("POST", "/invocations/", TARGET, json_request()),
    ("POST", "/endpoints/e/invocations/", TARGET, json_request()),
    ("OPTIONS", "/ping", {}, b""),
    ("OPTIONS", "/models/twice/invoke", {}, b""),
    ("GET", "/models/", {}, b""),
    ("POST", "/models/twice/invoke", {"X-Amzn-SageMaker-Custom-Attributes": "a=1;\x85\xe9"}, json_request()),
    ("POST", "/models/twice/invoke", {"X-Amzn-SageMaker-Custom-Attributes": "a=1;\x85\xe9"}, b"no json"),
    ("POST", "/models/twice/invoke", {"Content-Type": BINARY_TYPE.decode() + LENGTH}, BINARY),
    ("POST", "/models/twice/invoke", {"Content-Type": BINARY_TYPE.decode() + "-1"}, BINARY),
    ("POST", "/models/twice/invoke", {"Content-Encoding": "br"}, json_request()),
    ("POST", "/models/twice/invoke", {"Accept": "application/vnd.sagemaker-triton.binary+json"}, json_request()),
    ("POST", "/models/twice/invoke", {"X-Amzn-SageMaker-Target-Model": "thrice"}, json_request()),
    ("POST", "/models/nobody/invoke", {}, json_request()),
    ("POST", "/models/broken/invoke", {}, json_request()),
    ("POST", "/models/fails/invoke", {}, json_request()),
    ("POST", f"/models/{MODELLED}/invoke", {}, json_request()),
    ("POST", f"/v2/models/{MODELLED}/infer", {}, json_request()),
    ("POST", "/v2/models/twice%20as%20integers/versions/1/infer", {}, json_request()),
    ("POST", "/v2/models/twice/infer", {"Inference-Header-Content-Length": LENGTH}, BINARY),
    ("POST", "/v2/models/echo-FP32/infer", {"Inference-Header-Content-Length": "0"}, X.tobytes()),
    ("POST", "/v2/models/twice/versions/x/infer", {}, json_request()),
    ("POST", "/v2/models/twice/versions/9/infer", {}, json_request()),
    ("POST", "/v2/models/nobody/infer", {}, json_request()),
    ("GET", "/v2/models/twice/infer", {}, b""),
    ("POST", "/endpoints/e/invocations", TARGET, json_request()),
    ("POST", "/endpoints/e/invocations", {}, json_request()),
    ("POST", "/endpoints/e/invocations", {"X-Amzn-SageMaker-Target-Model": "nobody"}, json_request()),
    ("POST", "/endpoints/e/invocations", TARGET, b"no json"),
    ("GET", "/endpoints/e/invocations", {}, b""),
    ("POST", "/endpoints/e/async-invocations", {}, b""),
    ("POST", "/endpoints/e/invocations-response-stream", {}, b""),
    ("GET", "/models", {}, b""),
    ("GET", "/models?next_page_token=%C3%A9", {}, b""),
    ("POST", "/models", {}, b"no json"),
    ("POST", "/models", {}, b""),
    ("GET", "/models/twice", {}, b""),
    ("GET", "/models/nobody", {}, b""),
    ("DELETE", "/models/nobody", {}, b""),
    ("PUT", "/models/twice", {}, b""),
    ("GET", "/execution-parameters", {}, b""),
    ("GET", "/v2", {}, b""),
    ("GET", "/v2/health/live", {}, b""),
    ("GET", "/v2/health/ready", {}, b""),
    ("GET", f"/v2/models/{MODELLED}", {}, b""),
    ("GET", f"/v2/models/{MODELLED}/config", {}, b""),
    ("GET", "/v2/models/nobody", {}, b""),
    ("GET", "/v2/models/twice/ready", {}, b""),
    ("GET", "/v2/models/nobody/ready", {}, b""),
    ("GET", "/v2/models/nobody/stats", {}, b""),
    ("GET", "/v2/repository/index", {}, b""),
    ("POST", "/v2/repository/index", {}, b""),
    ("POST", "/v2/repository/index", {}, b'{"ready": 1}'),
    ("POST", "/v2/repository/models/nobody/load", {}, b""),
    ("POST", "/v2/repository/models/nobody/unload", {}, b""),
    ("GET", "/no/such/route", {}, b""),
    ("POST", "/", {}, b""),
    ("PATCH", "/v2", {}, b""),
]


def seen(reply):
    """What must be the same by whatever server."""
    body = reply.body
    if "x-amzn-errortype" not in reply.headers and reply.headers.get("content-type") == "application/json":
        body = json.loads(body)
    headers = {name: value for name, value in reply.headers.items() if name not in ANY}
    headers["allow"] = sorted(headers.get("allow", "").split(", "))
    return reply.status, headers, body, sorted(name for name in reply.headers if name.startswith("x-amzn-"))


@pytest.fixture(autouse=True)
def _impatient(monkeypatch):
    """No answer tells how often the broken model was asked for before."""
    monkeypatch.setattr("serve.cache.model_cache.retry_pause", lambda *_: 0.0)


@pytest.fixture(scope="module")
def warm(server):
    """The server with all models in memory that the requests ask for, so that no answer tells of a load."""
    for model in ("twice", "fails", MODELLED, "twice%20as%20integers", "echo-FP32"):
        server.http("POST", f"/v2/models/{model}/infer", {}, json_request())
    return server


@pytest.mark.parametrize(
    ("method", "path", "headers", "body"), REQUESTS, ids=lambda value: value[:60] if isinstance(value, str) else None
)
def test_flask_answers_what_our_own_server_answers(method, path, headers, body, warm):
    """Status, headers and body of every route and every kind of error are the same both ways."""
    assert seen(warm.flask(method, path, headers, body)) == seen(warm.http(method, path, headers, body))


@pytest.mark.parametrize("kind", ["werkzeug", "wsgiref"])
def test_any_wsgi_server_can_run_it(kind, warm, wsgi_server, raw_http):
    """All of it again over real sockets, through a threaded server and through one that tells no raw target."""
    port = wsgi_server(warm.app, kind)
    made_up = (
        {"Content-Type": "application/json"} if kind == "wsgiref" else {}
    )  # it has one of its own for who says none
    for method, path, headers, body in REQUESTS:
        request = method, path, made_up | headers, body
        mine, theirs = seen(warm.http(*request)), seen(raw_http(port, *request))
        assert theirs == mine, request


@pytest.mark.parametrize("kind", ["werkzeug", "wsgiref"])
def test_errors_of_http_itself_are_json_sentences(kind, warm, wsgi_server, raw_http):
    """404 and 405 name the route and, where there is one, the methods that it knows."""
    port = wsgi_server(warm.app, kind)
    missing = raw_http(port, "GET", "/nowhere")
    assert (missing.status, missing.error) == (404, "Not Found: GET /nowhere is not a route of this server")
    root = raw_http(port, "GET", "/")
    assert (root.status, root.error.partition("; ")[2]) == (404, "/dashboard shows what it does")
    wrong = raw_http(port, "GET", "/invocations")
    assert wrong.status == 405
    assert wrong.error == "Method Not Allowed: GET /invocations is not a route of this server; it takes POST"
    for path in ("/v1/models/m:predict", "/predictions/m", "/v2/models/m/predict"):
        asked = raw_http(port, "POST", path, {}, b"{}")
        assert asked.error.endswith(
            f"POST {path} is not a route of this server; models are asked by POST at /invocations or /v2/models/NAME/infer"
        )
    assert set(wrong.headers["allow"].split(", ")) == {"POST", "OPTIONS"}


def test_a_body_over_the_limit_is_refused(start, repository, wsgi_server, raw_http):
    """By whatever server, in JSON, with the setting that raises it; KServe's routes have Triton's status and words."""
    running = start(mode=Mode.REPOSITORY, model_repository=repository, load_models=("twice",), max_body_bytes=1000)
    port = wsgi_server(running.app)
    for path, status in (("/invocations", 413), ("/v2/models/twice/infer", 400), ("/models", 413)):
        for reply in (raw_http(port, "POST", path, {}, bytes(1001)), running.http("POST", path, {}, bytes(1001))):
            assert reply.status == status, path
            assert "size of 1001 bytes exceeds the maximum allowed input size of 1000 bytes" in reply.error
            assert "MME_MAX_BODY" in reply.error
    assert raw_http(port, "POST", "/models/twice/invoke", {}, json_request()).status == 200


def test_a_bug_is_a_500_that_points_to_the_log(start, repository, monkeypatch, caplog):
    """And says nothing of its traceback to the client."""
    running = start(mode=Mode.REPOSITORY, model_repository=repository, load_models=("nobody",))
    monkeypatch.setattr(running.engine.index, "registered", lambda: 1 / 0)
    reply = running.flask("GET", "/models")
    assert (reply.status, reply.error) == (500, "the server failed to answer GET /models; its log says why")
    assert "ZeroDivisionError" in caplog.text


class Streaming:
    """Takes a hot request of a running service and leaves its answer to the test."""

    def __init__(self, running, monkeypatch):
        self.call = running.on_loop.call
        self.begun = threading.Event()
        self.left = threading.Event()
        monkeypatch.setattr(running.service.routes, "dispatch", self.dispatch)

    def dispatch(self, exchange):
        """As InferRoutes."""
        self.exchange = exchange
        exchange.on_disconnect = self.left.set
        exchange.begin(201, b"Content-Type: text/event-stream\r\nX-One: 1\r\n")
        self.begun.set()
        return True

    def write(self, data):
        """One part, from the test's thread."""
        assert self.begun.wait(60)
        self.call(self.exchange.write, data)


@pytest.fixture
def streaming(start, repository, monkeypatch):
    """A service whose hot routes stream, and the application over it."""
    running = start(mode=Mode.REPOSITORY, model_repository=repository)
    return Streaming(running, monkeypatch), running.app


def asked(port):
    """A client that has asked a hot route."""
    client = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    client.request("POST", "/invocations", b"{}")
    return client


@pytest.mark.parametrize("kind", ["werkzeug", "wsgiref"])
def test_a_streamed_answer_leaves_part_by_part(kind, streaming, wsgi_server):
    """A client of any WSGI server reads each part before the next one is made."""
    stream, app = streaming
    with contextlib.closing(asked(wsgi_server(app, kind))) as client:
        stream.write(b"part 0")
        answer = client.getresponse()
        assert (answer.status, answer.headers["Content-Type"], answer.headers["X-One"]) == (
            201,
            "text/event-stream",
            "1",
        )
        assert answer.headers["Content-Length"] is None
        assert answer.read1() == b"part 0"
        for number in range(1, 4):
            stream.write(b"part %d" % number)
            assert answer.read1() == b"part %d" % number
        stream.call(stream.exchange.end)
        assert answer.read() == b""
    assert not stream.left.is_set()


@pytest.mark.parametrize("kind", ["werkzeug", "wsgiref"])
def test_a_client_that_leaves_a_streamed_answer_is_noticed(kind, streaming, wsgi_server, capfd):
    """By the parts that its server can't send; the route is told once."""
    stream, app = streaming
    with contextlib.closing(asked(wsgi_server(app, kind))) as client:
        stream.write(b"part 0")
        assert client.getresponse().read1() == b"part 0"
    deadline = time.monotonic() + 60
    while not stream.left.is_set():
        assert time.monotonic() < deadline
        stream.write(bytes(1_000_000))
    stream.call(stream.exchange.end)


def test_a_streamed_answer_that_is_cut_is_seen_to_be(streaming, wsgi_server, caplog):
    """By the client of a server that speaks HTTP/1.1; its log says what happened."""
    stream, app = streaming
    with contextlib.closing(asked(wsgi_server(app, "werkzeug"))) as client:
        stream.write(b"part 0")
        answer = client.getresponse()
        stream.call(stream.exchange.cut)
        with pytest.raises(http.client.IncompleteRead) as caught:
            answer.read()
    assert caught.value.partial == b"part 0"
    assert "the answer to POST /invocations can't be finished and was cut" in caplog.text


SERVER = """
import sys, threading
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer
from container.control.app import create_app
class Quiet(WSGIRequestHandler):
    def log_message(self, *_): pass
server = WSGIServer(("127.0.0.1", 0), Quiet)
server.set_app(create_app())
thread = threading.Thread(target=server.serve_forever)
thread.start()
print(server.server_address[1], flush=True)
sys.stdin.read()
server.shutdown()
thread.join()
server.server_close()
"""


@pytest.fixture
def foreign_server(tmp_path_factory):
    """Starts a foreign server that loads models of a repository, configured by its environment alone.

    What one that ends while it loads was in the middle of writing is for its next start to remove.
    """
    cache = tmp_path_factory.mktemp("foreign")

    def start(repository, model):
        environ = {name: value for name, value in os.environ.items() if not name.startswith(("MME_", "SAGEMAKER_"))}
        environ |= {
            "MME_MODEL_REPOSITORY": str(repository),
            "MME_LOAD_MODEL": model,
            "MME_CACHE_DIR": str(cache),
        }
        return subprocess.Popen(
            [sys.executable, "-W", "error", "-c", SERVER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environ,
        )

    return start


@pytest.mark.parametrize(
    "seconds", [0.05, pytest.param(0, marks=pytest.mark.long), pytest.param(0.2, marks=pytest.mark.long)]
)
def test_a_process_that_ends_while_models_load_ends_in_order(foreign_server, tmp_path, seconds):
    """No thread is left in a framework when the interpreter goes, and nobody asks for what is gone."""
    for number in range(4):
        models.lay_out(tmp_path / "large" / f"m{number}", models.plus(number, megabytes=20))
    with foreign_server(tmp_path / "large", "*") as process:
        assert process.stdout.readline()
        time.sleep(seconds)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert "Traceback" not in errors
    assert "Warning" not in errors


def test_create_app_brings_its_own_engine_and_takes_it_away(foreign_server, repository, raw_http):
    """Under a foreign server, from the environment alone: it serves, but no page's, and its process ends in order."""
    with foreign_server(repository, "twice") as process:
        port = int(process.stdout.readline() or process.stderr.read())
        reply = raw_http(port, "POST", "/models/thrice/invoke", {}, json_request())
        assert reply.json["outputs"][0]["data"] == [3, 6, 9, 12]
        assert raw_http(port, "GET", "/ping").status == 200
        assert raw_http(port, "POST", "/models/thrice/invoke", {"Origin": "http://evil.example"}, b"").status == 403
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert "Traceback" not in errors
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", port)) != 0
