"""What is not inference over HTTP: errors of HTTP itself, bugs, and what waits without a thread."""

import asyncio
import itertools
import json
import threading

import pytest

from container.control.app import call_application, make_environ
from container.control.http import HttpOperations
from container.control.routes import GRPC_ROUTES, HOT, HTTP_ROUTES, parse_target
from container.settings import Mode
from serve.statistics import ModelStats
from tests.exchanges import WaitingExchange

THREADS = 8  # of the pool


def json_request():
    """What the models of one X take."""
    return json.dumps({"inputs": [{"name": "X", "shape": [4], "datatype": "FP32", "data": [1, 2, 3, 4]}]}).encode()


def test_errors_of_http_itself_are_json_sentences(server):
    """404 and 405 name the route and, where there is one, the methods that it knows."""
    missing = server.http("GET", "/nowhere")
    assert (missing.status, missing.error) == (404, "Not Found: GET /nowhere is not a route of this server")
    root = server.http("GET", "/")
    assert (root.status, root.error.partition("; ")[2]) == (404, "/dashboard shows what it does")
    wrong = server.http("GET", "/invocations")
    assert wrong.status == 405
    assert wrong.error == "Method Not Allowed: GET /invocations is not a route of this server; it takes POST"
    for path in ("/v1/models/m:predict", "/predictions/m", "/v2/models/m/predict"):
        asked = server.http("POST", path, {}, b"{}")
        assert asked.error.endswith(
            f"POST {path} is not a route of this server; models are asked by POST at /invocations or /v2/models/NAME/infer"
        )
    assert set(wrong.headers["allow"].split(", ")) == {"POST", "OPTIONS"}


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("OPTIONS", "/ping", 200),
        ("OPTIONS", "/models", 200),
        ("HEAD", "/models", 200),
        ("GET", "/models/", 200),
        ("DELETE", "/ping", 405),
        ("PATCH", "/v2", 405),
        ("GET", "/v2/models/twice/infer", 405),
        ("POST", "/v2/models/twice/infer/", 405),
        ("POST", "/models/twice/invoke/", 405),
        ("GET", "/endpoints/e/invocations", 405),
        ("GET", "/v2%2Fmodels/twice", 404),
    ],
)
def test_forms_of_requests_that_few_send(method, path, status, server):
    """Other methods of a route, slashes behind it, and quoted slashes that separate nothing."""
    assert server.http(method, path).status == status


def test_a_body_over_the_limit_is_refused(start, repository):
    """In JSON, with the setting that raises it; KServe's routes have Triton's status and words."""
    running = start(mode=Mode.REPOSITORY, model_repository=repository, load_models=("twice",), max_body_bytes=1000)
    for path, status in (("/invocations", 413), ("/v2/models/twice/infer", 400), ("/models", 413)):
        reply = running.http("POST", path, {}, bytes(1001))
        assert reply.status == status, path
        assert "size of 1001 bytes exceeds the maximum allowed input size of 1000 bytes" in reply.error
        assert "MME_MAX_BODY" in reply.error
    assert running.http("POST", "/models/twice/invoke", {}, json_request()).status == 200


def test_a_bug_is_a_500_that_points_to_the_log(start, repository, monkeypatch, caplog):
    """And says nothing of its traceback to the client."""
    running = start(mode=Mode.REPOSITORY, model_repository=repository, load_models=("nobody",))
    monkeypatch.setattr(running.engine.index, "registered", lambda: 1 / 0)
    reply = running.http("GET", "/models")
    assert (reply.status, reply.error) == (500, "the server failed to answer GET /models; its log says why")
    assert "ZeroDivisionError" in caplog.text


def test_no_thread_is_held_by_what_waits(start, repository):
    """300 loads and 300 questions whether a model is ready, none of which comes to an end, and others are answered."""
    running = start(mode=Mode.REPOSITORY, model_repository=repository, load_models=("nobody",))
    held = running.on_loop.call(_Held)

    async def says_ready(*_):
        await held.over.wait()
        return True

    async def reload(*_):
        await held.over.wait()

    running.engine.index.says_ready, running.engine.reload = says_ready, reload
    waiting = [
        WaitingExchange(method, target % number, {}, b"")
        for method, target in (("GET", b"/v2/models/m%d/ready"), ("POST", b"/v2/repository/models/m%d/load"))
        for number in range(300)
    ]
    for each in waiting:
        running.on_loop.call(running.control.handle, each)

    assert running.http("GET", "/models").status == 200
    assert running.http("GET", "/metrics").status == 200
    assert sum(thread.name.startswith("flask") for thread in threading.enumerate()) <= THREADS
    assert not any(each.answered for each in waiting)
    running.on_loop.call(held.over.set)
    assert {each.wait()[0] for each in waiting} == {200}


class _Held:
    """Until it is over."""

    def __init__(self):
        self.over = asyncio.Event()


def test_a_client_that_reads_nothing_is_looked_at_ever_less_often(start, repository, monkeypatch):
    """A long answer waits for it, for twice as long each time; what comes in the end is whole."""
    running = start(mode=Mode.REPOSITORY, model_repository=repository, load_models=("nobody",))
    running.on_loop.call(running.engine.stats.update, {(f"m{number}", 1): ModelStats() for number in range(300)})
    reader = _SlowReader()
    sleep = asyncio.sleep

    async def sleeping(seconds):
        if reader.was_looked_at:
            reader.was_looked_at = False
            reader.pauses.append(seconds)
        await sleep(seconds)

    monkeypatch.setattr(asyncio, "sleep", sleeping)
    running.on_loop.call(running.control.handle, reader)
    status, _, body = reader.wait()
    assert (status, body.count(b'model="m299"') > 1, len(body) > 1 << 18) == (200, True, True)
    assert len(reader.pauses) == 4
    assert all(later == 2 * before for before, later in itertools.pairwise(reader.pauses))


class _SlowReader(WaitingExchange):
    """Asks for the metrics, and leaves all of them unread the first four times that it is looked at."""

    def __init__(self):
        self.pauses = []
        self.was_looked_at = False
        super().__init__("GET", b"/metrics", {}, b"")

    @property
    def unsent(self):
        """All that it has not read."""
        self.was_looked_at = len(self.pauses) < 4
        return (1 << 30) * self.was_looked_at

    @unsent.setter
    def unsent(self, _):
        """Say nothing of it."""


def test_every_route_has_its_operation(server):
    """And is named by one row alone; what a model may be loaded for waits without a thread."""
    operations = {route.operation for route in HTTP_ROUTES if route not in HOT}
    assert operations == set(HttpOperations(server.service, None).by_name())
    rows = [(method, rule) for route in HTTP_ROUTES for method in route.methods.split() for rule in route.rules]
    assert len(rows) == len(set(rows))
    waits = {route.operation for route in (*HTTP_ROUTES, *GRPC_ROUTES) if route.waits}
    assert waits == {
        *("load_model", "unload_model", "load", "unload", "model_metadata", "model_config", "model_ready"),
    }


@pytest.mark.parametrize("route", HOT, ids=lambda route: route.pattern)
def test_hot_routes_are_those_that_the_loop_knows(route):
    """Each rule of theirs is a target, with the names of its path."""
    for rule in route.rules:
        path = rule.replace("<path:name>", "a/b").replace("<version>", "3").replace("<endpoint>", "e")
        found = parse_target(path.encode())
        assert found.flavor is route.flavor
        assert (found.model, found.version) == ("a/b" * ("<path" in rule), "3" * ("<version" in rule))


def test_the_environment_says_what_was_asked():
    """Path decoded as PEP 3333 wants it but for slashes in names, query as sent, headers by their CGI names."""
    environ = make_environ(
        WaitingExchange(
            "POST",
            b"/v2/models/mod%C3%A8le%2Fx/load?a=%20b&c",
            {
                "content-type": "application/json",
                "x-a-b": "1, 2",
                "content-length": "9",
                "transfer-encoding": "chunked",
            },
            b"{}",
        )
    )
    assert environ["REQUEST_METHOD"] == "POST"
    assert environ["PATH_INFO"].encode("latin-1").decode() == "/v2/models/modèle%2Fx/load"
    assert environ["QUERY_STRING"] == "a=%20b&c"
    assert environ["CONTENT_TYPE"] == "application/json"
    assert environ["HTTP_X_A_B"] == "1, 2"
    assert environ["CONTENT_LENGTH"] == "2"
    assert not {"HTTP_CONTENT_LENGTH", "HTTP_CONTENT_TYPE", "HTTP_TRANSFER_ENCODING"} & set(environ)


def test_an_application_that_fails_is_answered_for(caplog):
    """Its client gets a JSON 500, its traceback the log."""

    def application(_environ, _start_response):
        raise ZeroDivisionError

    status, headers, body = call_application(application, make_environ(WaitingExchange("GET", b"/broken", {}, b"")))
    assert (status, headers) == (500, b"Content-Type: application/json\r\n")
    assert b"".join(body) == b'{"error":"the server failed to answer this request; its log says why"}'
    assert "GET /broken failed" in caplog.text
    assert "ZeroDivisionError" in caplog.text
