"""HTTP/1.1 on the real worker: what clients send over one connection, and what becomes of it.

What HTTP itself asks of any server is proven in `tests/container/http1`.
"""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.contract import models
from tests.contract.server import Connection, Server, eventually, post

MAX_BODY = 64 * 1024
INVOKE = "/v2/models/plus/infer"
PING = b"GET /ping HTTP/1.1\r\nHost: localhost\r\n\r\n"
# Executes when four wait, and for longer than any test only then.
FOURS = "max_batch_size: 4\ndynamic_batching { preferred_batch_size: [4] max_queue_delay_microseconds: 600000000 }\n"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A server with a small limit for bodies."""
    repository = tmp_path_factory.mktemp("repository")
    models.lay_out(repository / "plus", models.plus(1), "max_batch_size: 8\n")
    models.lay_out(repository / "pick", models.pick())
    for name in ("reset", "closed"):
        models.lay_out(repository / name, models.plus(1), FOURS)
    environ = {"MME_MODEL_REPOSITORY": str(repository), "MME_PING_MODE": "ready", "MME_MAX_BODY": str(MAX_BODY)}
    with Server(tmp_path_factory.mktemp("wire"), environ) as server:
        yield server


@pytest.fixture
def connection(server):
    """A connection."""
    with server.connect() as connection:
        yield connection


@pytest.fixture(scope="module")
def impatient(tmp_path_factory):
    """A server with little patience with slow clients, for those alone: on a busy machine everybody is slow."""
    repository = tmp_path_factory.mktemp("repository")
    models.lay_out(repository / "plus", models.plus(1))
    environ = {"MME_MODEL_REPOSITORY": str(repository), "MME_HEADER_TIMEOUT": "0.5", "MME_BODY_TIMEOUT": "0.5"}
    with Server(tmp_path_factory.mktemp("impatient"), environ) as server:
        yield server


def still_serves(server):
    """Whether the next request of somebody else is answered."""
    return models.y(server.ask("POST", INVOKE, models.ONE).json) == [2, 3, 4, 5]


def test_a_connection_serves_many_requests(connection):
    """Hot routes and those that Flask answers take turns on one connection, which stays open."""
    for _ in range(3):
        assert models.y(connection.send(post(INVOKE, models.ONE)).answer().json) == [2, 3, 4, 5]
        assert connection.send(PING).answer().status == 200
        assert connection.send(b"GET /models HTTP/1.1\r\nHost: localhost\r\n\r\n").answer().status == 200
        assert connection.send(post("/nowhere", b"")).answer().status == 404


def test_pipelined_requests_are_answered_in_order(connection):
    """Answers come in the order of the requests, though some take a thread, an execution or nothing at all."""
    numbers = list(range(8))
    connection.send(
        b"".join(
            post(INVOKE, models.x([n, n, n, n])) + PING + b"GET /v2/models/plus HTTP/1.1\r\nHost: localhost\r\n\r\n"
            for n in numbers
        )
    )

    for n in numbers:
        assert models.y(connection.answer().json) == [n + 1] * 4
        assert connection.answer().body == b""
        assert connection.answer().json["name"] == "plus"


@pytest.mark.parametrize("path", ["/ping", "/models", "/v2/models/plus", "/v2/health/live"])
def test_head_is_get_without_the_body(connection, path):
    """HEAD has the status, type and length of GET, and no body; the connection goes on."""
    get = connection.send(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()).answer()
    head = connection.send(f"HEAD {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()).answer(head_only=True)

    assert head.status == get.status == 200
    assert head.headers.get("content-length") == get.headers.get("content-length") == str(len(get.body))
    assert head.headers.get("content-type") == get.headers.get("content-type")
    assert connection.send(PING).answer().status == 200


@pytest.mark.parametrize(
    ("path", "status"), [(INVOKE, 400), ("/invocations", 413), ("/models", 413), ("/nowhere", 413)]
)
def test_a_body_over_the_limit_is_refused_before_it_is_read(server, connection, path, status):
    """A Content-Length over MME_MAX_BODY is refused at once, by KServe's routes as Triton does; the limit is not."""
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {MAX_BODY + 1}\r\n\r\n".encode()

    answer = connection.send(head).answer()

    assert answer.status == status
    assert str(MAX_BODY) in answer.error
    assert answer.headers["connection"] == "close"
    assert connection.ended()
    assert still_serves(server)
    exactly = json.dumps(models.ONE).encode().ljust(MAX_BODY)
    assert server.ask("POST", INVOKE, exactly).status == 200


def test_a_chunked_body_over_the_limit_is_refused(server, connection):
    """A body whose length nobody tells is refused as soon as it is over the limit."""
    head = f"POST {INVOKE} HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
    connection.send(head, b"%x\r\n" % (MAX_BODY + 1) + bytes(MAX_BODY + 1))

    assert connection.answer().status == 400
    assert still_serves(server)


@pytest.mark.parametrize("front", ["/", "http://localhost", "http://localhost/", "/v2/%6Dodels/plus/infer?x=/"])
def test_a_target_may_be_written_in_other_ways(connection, front):
    """With several slashes in front, as clients add a path to an address that ends in one; whole; with quoted letters."""
    target = front if "infer" in front else front + INVOKE
    assert models.y(connection.send(post(target, models.ONE)).answer().json) == [2, 3, 4, 5]


@pytest.mark.parametrize(
    ("target", "status"),
    [
        ("/v2%2Fmodels/plus/infer", 404),
        ("/v2/models%2Fplus/infer", 404),
        ("/v2%2fhealth/ready", 404),
        ("/v2/models/plus%2Finfer", 405),  # the metadata of a model of that name
    ],
)
def test_a_quoted_slash_separates_nothing(connection, target, status):
    """It is a character of a name: a proxy that allows some paths and ours agree about which one this is."""
    assert connection.send(post(target, models.ONE)).answer().status == status


def test_headers_that_take_too_long(impatient):
    """A client that does not finish its headers is told 408 and let go."""
    with impatient.connect() as connection:
        answer = connection.send(b"GET /ping HTTP/1.1\r\nHost:").answer()

        assert answer.status == 408
        assert connection.ended()
    assert impatient.ask("GET", "/ping").status == 200


def test_a_body_that_stops_arriving(impatient):
    """A client that stops in the middle of a body is told 408; nobody ever sees that request."""
    with impatient.connect() as connection:
        answer = connection.send(post(INVOKE, models.ONE)[:-10]).answer()

        assert answer.status == 408
        assert connection.ended()
    assert impatient.metric("nv_inference_request_success", model="plus") == 0


def test_a_connection_on_which_nothing_comes_is_closed_in_silence(impatient):
    """A connection that sends nothing at all is closed without a word."""
    with impatient.connect() as connection:
        assert connection.ended()


@pytest.mark.parametrize("name", ["reset", "closed"])
def test_a_client_that_leaves_is_not_executed(server, name):
    """A queued request whose client hung up, by a reset or by closing, is dropped and counted; others are served."""
    leaving = server.connect().send(post(f"/v2/models/{name}/infer", models.ONE))
    eventually(lambda: server.metric("nv_inference_pending_request_count", model=name) == 1, "it to wait")
    end = server.other_end(leaving)
    leaving.reset() if name == "reset" else leaving.close()
    eventually(lambda: end not in server.sockets(), "the server to notice")

    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda _: server.ask("POST", f"/v2/models/{name}/infer", models.ONE), range(4)))

    assert [models.y(answer.json) for answer in answers] == [[2, 3, 4, 5]] * 4
    assert server.metric("nv_inference_request_failure", model=name, reason="CANCELED") == 1
    assert server.metric("nv_inference_request_success", model=name) == 4
    assert server.metric("nv_inference_count", model=name) == 4
    assert server.metric("nv_inference_exec_count", model=name) == 1


def test_connections_leave_nothing_behind(server):
    """After a crowd of clients came and went, some in the middle of a request, no connection is left."""
    crowd = [server.connect() for _ in range(50)]
    for number, connection in enumerate(crowd):
        connection.send(post(INVOKE, models.ONE)[: None if number % 2 else 60])
    ends = set()
    for number, connection in enumerate(crowd):
        if number % 2:
            assert connection.answer().status == 200
            ends.add(server.other_end(connection))
        connection.reset() if number % 3 else connection.close()

    eventually(lambda: not ends & server.sockets(), "all to be gone")
    assert server.metric("nv_inference_pending_request_count", model="plus") == 0
    assert still_serves(server)


def test_methods_that_a_route_does_not_know(server):
    """A method that a route does not offer is 405 with what it offers; a route that is none is 404; both in JSON."""
    wrong = server.ask("PUT", "/ping")
    assert wrong.status == 405
    assert "GET" in wrong.headers["allow"]
    assert server.ask("GET", "/invocations").status == 405
    missing = server.ask("GET", "/no/such/route")
    assert (missing.status, "/no/such/route" in missing.error) == (404, True)


def test_an_error_of_ours_names_target_and_inference_id_in_the_log(server):
    """A failed execution is one error line that carries the target model and the inference id; its client gets 500."""
    answer = server.ask(
        "POST",
        "/invocations",
        {"inputs": [{"name": "I", "shape": [1, 1], "datatype": "INT64", "data": [99]}]},
        X_Amzn_SageMaker_Target_Model="pick",
        X_Amzn_SageMaker_Inference_Id="id-4711",
    )

    assert answer.status == 500
    (line,) = [line for line in server.lines if line.get("inference_id") == "id-4711"]
    assert (line["level"], line["target_model"]) == ("error", "pick")
    assert line["message"] == answer.error


def test_pings_are_not_logged(server):
    """A ping leaves no line in the log, whoever answers it."""
    before = len(server.lines)
    for _ in range(20):
        assert server.ask("GET", "/ping").status == 200
    assert not [line for line in server.lines[before:] if "ping" in json.dumps(line)]  # others' may come meanwhile


def test_a_connection_is_no_more_than_a_socket(server):
    """A hundred idle connections take descriptors and no threads of their own; pings are answered meanwhile."""
    assert server.ask("GET", "/models").status == 200
    threads = server.worker.num_threads()
    idle = [Connection(server.port).send(PING) for _ in range(100)]
    assert [connection.answer().status for connection in idle] == [200] * 100
    assert server.worker.num_threads() < threads + 10  # one that writes or cleans up may have come
    for connection in idle:
        connection.close()
