"""Where clients need keys, no request does anything without one that is for it: every route and method is asked.

Real servers; requests are bytes on the wire. A key of each category and one of all others tell what a route wants.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import itertools
import json
import re
from unittest import mock

import grpc
import pytest
from tritonclient.grpc import InferenceServerClient, service_pb2
from tritonclient.utils import InferenceServerException

from container.control.routes import CATEGORIES, GRPC_ROUTES, HTTP_ROUTES
from container.http1 import Http1Server, Limits
from container.steps.access import Keys, digest_of, parse_keys
from model_handlers.errors import MmeError
from tests.contract import models
from tests.contract.server import Connection, Server, post
from tests.waiting import eventually

OPEN_ROUTES = {"/ping", "/v2/health/live", "/v2/health/ready", "/dashboard", "/dashboard/static/<path:filename>"}
OPEN_METHODS = {"ServerLive", "ServerReady", "Check", "Watch"}
SERVICE, HEALTH = "inference.GRPCInferenceService", "grpc.health.v1.Health"
ADMIN = "s3cr3t-admin"
INFER = "/v2/models/plus/infer"
INVOKE = "/models/plus/invoke"
ONE = json.dumps(models.ONE).encode()
DENIED = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED)


def lines(**keys):
    """A file of keys; a name's `_` is a `-`."""
    return "".join(f"sha256:{digest_of(key.replace('_', '-'))} {roles}\n" for key, roles in keys.items())


ONLY = {f"s3cr3t_only_{each}".replace("-", "_"): each for each in CATEGORIES}
OTHERS = {
    f"s3cr3t_not_{each}".replace("-", "_"): ",".join(one for one in CATEGORIES if one != each) for each in CATEGORIES
}
FILE = "# everybody's\n\n" + lines(s3cr3t_admin="*", **ONLY, **OTHERS)


def only(role):
    """A key for this alone."""
    return f"s3cr3t-only-{role}"


def all_but(role):
    """A key for everything else."""
    return f"s3cr3t-not-{role}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A repository and a file of keys."""
    folder = tmp_path_factory.mktemp("keys")
    models.lay_out(folder / "repository" / "plus", models.plus(1), "max_batch_size: 8\n")
    (folder / "keys").write_text(FILE)
    return folder


@pytest.fixture(scope="module")
def start(tmp_path_factory, folder):
    """A function that gives a server which wants keys, with gRPC and a port for metrics."""

    def server(keys=folder / "keys", **environ):
        given = {
            "MME_MODEL_REPOSITORY": str(folder / "repository"),
            "MME_PING_MODE": "ready",
            "MME_GRPC_PORT": "0",
            "MME_METRICS_PORT": "0",
            "MME_KEY_FILE": str(keys),
            "SAGEMAKER_TRITON_LOG_VERBOSE": "1",
        }
        return Server(tmp_path_factory.mktemp("server"), given | environ)

    return server


@pytest.fixture(scope="module")
def server(start):
    """One of them; no key is in its log in the end, whatever was sent."""
    with start() as server:
        yield server
        assert "s3cr3t" not in server.log


def requests():
    """Every method of every route: the method, a path, the route's rule and what a key is for."""
    for route in HTTP_ROUTES:
        for rule in route.rules:
            for method in route.methods.split():
                yield method, re.sub(r"<[^>]+>", "x", rule), rule, route.key_role


def bearer(key):
    """The header of a key, none of None."""
    return {} if key is None else {"Authorization": f"Bearer {key}"}


def test_every_route_wants_a_key_that_is_for_it(server):
    """But health, and the dashboard's page without anything in it; whoever answers, a key for all else is not enough."""
    seen = set()
    for method, path, rule, role in requests():
        seen.add(rule)
        if role is None:
            assert rule in OPEN_ROUTES
            continue
        assert role in CATEGORIES, rule
        body = None if method == "GET" else b"{}"
        for key, status in ((None, 401), ("s3cr3t-other", 401), (all_but(role), 403)):
            answer = server.ask(method, path, body, **bearer(key))
            assert (answer.status, answer.error.count(".")) == (status, 0), (method, path, key)
            assert answer.headers.get("www-authenticate") == ("Bearer" if status == 401 else None)
        for key in (only(role), ADMIN):
            answer = server.ask(method, path, body, **bearer(key))
            assert answer.status not in {401, 403} or "key" not in answer.error, (method, path, key)
    assert seen >= OPEN_ROUTES


def test_health_is_open(server):
    """To whoever looks after the server, over HTTP and gRPC."""
    for path in ("/ping", "/v2/health/live", "/v2/health/ready"):
        assert server.ask("GET", path).status == 200
    with InferenceServerClient(server.grpc_address) as client:
        assert client.is_server_live()
        assert client.is_server_ready()


def test_every_method_of_grpc_wants_a_key_that_is_for_it(server):
    """Before its message is read: these calls send none that could be."""
    service = service_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"]
    paths = [f"/{SERVICE}/{method.name}" for method in service.methods] + [f"/{HEALTH}/Check", f"/{HEALTH}/Watch"]
    with grpc.insecure_channel(server.grpc_address) as channel:

        def status(path, key):
            metadata = tuple((name.lower(), value) for name, value in bearer(key).items())
            call = channel.stream_stream(path)(iter([b"\xff"]), metadata=metadata, timeout=60)
            with contextlib.suppress(grpc.RpcError):
                list(call)
            return call.code()

        opened, roles = set(), {f"/{route.pattern}": route.key_role for route in GRPC_ROUTES}
        for path in paths:
            name, role = path.rpartition("/")[2], roles[path]
            if role is None:
                opened.add(name)
                continue
            assert role in CATEGORIES, name
            assert status(path, None) is grpc.StatusCode.UNAUTHENTICATED
            assert status(path, "s3cr3t-other") is grpc.StatusCode.UNAUTHENTICATED
            assert status(path, all_but(role)) is grpc.StatusCode.PERMISSION_DENIED, name
            assert status(path, only(role)) not in DENIED, name
        assert opened == OPEN_METHODS
        assert status("/no.Service/Method", None) is grpc.StatusCode.UNAUTHENTICATED


@pytest.mark.parametrize(
    "text",
    [
        ADMIN,
        f"Basic {ADMIN}",
        f"Token {ADMIN}",
        "Bearer",
        "Bearer ",
        f"Bearer{ADMIN}",
        f"Bearer {ADMIN[:-1]}",
        f"Bearer {ADMIN}x",
        f"Bearer {ADMIN} x",
        f"Bearer {ADMIN},",
        f"Bearer {ADMIN.upper()}",
        f"Bearer {digest_of(ADMIN)}",
        f"Bearer sha256:{digest_of(ADMIN)}",
        "Bearer *",
        f"Bearer {ADMIN}\r\nAuthorization: Bearer {ADMIN}",
        f"Bearer \xe9{ADMIN}",
        "Bearer " + 5000 * "x",
    ],
)
def test_a_key_is_sent_in_one_way(server, text):
    """Another scheme, a part of a key, its hash, two of them, and anything else are no key."""
    head = f"GET /v2 HTTP/1.1\r\nHost: localhost\r\nAuthorization: {text}\r\n\r\n"
    with Connection(server.port) as connection:
        assert connection.send(head.encode("latin-1")).answer().status == 401


@pytest.mark.parametrize("place", [f"/v2?key={ADMIN}", f"/v2?Authorization=Bearer%20{ADMIN}", f"//{ADMIN}@x/v2"])
def test_a_key_in_a_target_is_none(server, place):
    """Targets are logged by what is in between."""
    assert server.ask("GET", place, Cookie=f"key={ADMIN}", X_Api_Key=ADMIN).status == 401


def test_the_scheme_is_written_in_any_case(server):
    """As RFC 9110 has it."""
    assert server.ask("GET", "/v2", Authorization=f"bearer  {ADMIN}").status == 200


def test_no_other_spelling_of_a_route_wants_less(server):
    """What routes take of them is what a key has to be for; HEAD wants what GET does."""
    for path in (
        "//v2",
        "/v2/",
        "/%76%32",
        "http://localhost/v2",
        "/v2?x=/ping",
        "/v2#/ping",
        "/ping/../v2",
        "/ping%2Fx",
    ):
        with Connection(server.port) as connection:
            head = f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n"
            assert connection.send(head.encode()).answer().status == 401, path
    with Connection(server.port) as connection:
        head = f"HEAD /v2 HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {only('inference')}\r\n\r\n"
        assert connection.send(head.encode()).answer(head_only=True).status == 403


def test_it_is_refused_before_its_body_comes(server):
    """Which never does."""
    with Connection(server.port) as connection:
        head = f"POST {INFER} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 60000000\r\n\r\n"
        assert connection.send(head.encode()).answer().status == 401


def test_a_head_that_was_let_in_lets_no_other_in(server):
    """On one connection, with the same fields and the same body: another target, another method."""
    for path, method, other in (
        (INFER, "POST", "/v2/repository/index"),
        (INFER, "POST", "/v2/repository/models/plus/unload"),
        (INVOKE, "DELETE", INVOKE),
    ):
        with Connection(server.port) as connection:
            good = post(path, ONE, **bearer(only("inference")))
            for _ in range(4):
                assert connection.send(good).answer().status == 200
            line, rest = good.split(b"\r\n", 1)
            wrong = line.replace(b"POST", method.encode()).replace(path.encode(), other.encode()) + b"\r\n" + rest
            assert connection.send(wrong).answer().status == 403
    assert server.ask("GET", "/v2/models/plus/ready", **bearer(only("health"))).status == 200


def test_a_repeated_head_is_checked_twice():
    """However often it comes, until heads are forgotten, since keys have changed."""
    handled, asked = [], []

    def handle(exchange):
        handled.append(exchange)
        exchange.respond(200, b"", ())

    async def talk():
        http = Http1Server(
            handle,
            Limits(),
            asyncio.get_running_loop(),
            gate=lambda *request: asked.append(request),
        )
        listener = await asyncio.get_running_loop().create_server(http.protocol_factory, "127.0.0.1", 0)
        reader, writer = await asyncio.open_connection(*listener.sockets[0].getsockname())
        for count in (1, 2):
            for _ in range(10):
                writer.write(post(INFER, ONE, **bearer(ADMIN)))
                await reader.readuntil(b"\r\n\r\n")
            assert (len(handled), len(asked)) == (10 * count, 2 * count)
            http.forget_heads()
        writer.close()
        listener.close()
        await http.wait_closed(60)

    asyncio.run(talk())


def test_a_key_that_is_taken_back_is_good_for_nothing(start, tmp_path):
    """On a connection that is kept and repeats its head, in calls of gRPC, and in a stream that is open."""
    file = tmp_path / "keys"
    file.write_text(lines(old="*", new="*"))
    old = {"authorization": "Bearer old"}
    with start(keys=file) as server, server.connect() as kept, InferenceServerClient(server.grpc_address) as client:
        answers = []
        for _ in range(4):
            assert kept.send(post(INFER, ONE, **bearer("old"))).answer().status == 200
        client.start_stream(lambda result, error: answers.append(error or result), headers=old)
        assert client.get_server_metadata(headers=old).name == "mme"

        file.write_text(lines(new="*"))
        eventually(lambda: server.ask("GET", "/v2", **bearer("old")).status == 401, "the key to be unknown")
        answer = kept.send(post(INFER, ONE, **bearer("old"))).answer()
        assert (answer.status, "does not know this key" in answer.error) == (401, True)
        with pytest.raises(InferenceServerException, match="UNAUTHENTICATED"):
            client.get_server_metadata(headers=old)
        eventually(lambda: answers, "the end of the stream")
        assert "UNAUTHENTICATED" in str(answers[0])
        client.stop_stream()
        assert server.ask("GET", "/v2", **bearer("new")).status == 200


def test_a_broken_file_changes_nothing_and_is_told_once(start, tmp_path):
    """By the number of its line, and not by what stands there: that may be a key."""
    file = tmp_path / "keys"
    file.write_text(lines(old="inference,metadata"))
    with start(keys=file) as server:
        file.write_text("# new\nold *\n")
        told = "line 2 is not `sha256:HASH CATEGORY,…`"
        eventually(lambda: told in server.log, "a line of it")
        assert server.ask("GET", "/v2", **bearer("old")).status == 200
        file.unlink()
        eventually(lambda: "No such file" in server.log, "another")
        assert server.ask("GET", "/v2", **bearer("old")).status == 200
        assert server.log.count(told) == 1
        file.write_text(lines(old="inference"))
        eventually(lambda: server.ask("GET", "/v2", **bearer("old")).status == 403, "the new file")


def test_metrics_want_a_key_at_both_ports(server):
    """That is for statistics; Prometheus sends one."""
    (line,) = [line for line in server.lines if "metrics listening at port" in line["message"]]
    for port in (server.port, int(line["message"].rpartition(" ")[2])):
        for key, status in ((None, 401), (only("inference"), 403), (only("statistics"), 200)):
            with Connection(port) as connection:
                fields = "".join(f"{name}: {value}\r\n" for name, value in bearer(key).items())
                answer = connection.send(f"GET /metrics HTTP/1.1\r\nHost: localhost\r\n{fields}\r\n".encode()).answer()
                assert answer.status == status


def test_the_dashboard_holds_nothing_before_it_has_a_key(server):
    """A frame that asks for one; its data want one for statistics."""
    asks = server.ask("GET", "/dashboard")
    assert (asks.status, b'type="password"' in asks.body, b"plus" in asks.body) == (200, True, False)
    assert server.ask("GET", "/dashboard/static/dashboard.js").status == 200
    assert server.ask("GET", "/dashboard/data").status == 401
    assert server.ask("GET", "/dashboard/data", **bearer(only("inference"))).status == 403
    shows = server.ask("GET", "/dashboard/data", **bearer(only("statistics")))
    assert (shows.status, b"plus" in shows.body) == (200, True)


def test_keys_are_compared_in_constant_time(tmp_path):
    """By hmac.compare_digest, with every key of the file, whether one before it was the right one or not."""
    file = tmp_path / "keys"
    file.write_text(lines(a="*", b="inference", c="health"))
    keys = Keys(file)
    with mock.patch("hmac.compare_digest", side_effect=hmac.compare_digest) as compare:
        for key, known in (("a", True), ("c", True), ("d", False), ("", False)):
            compare.reset_mock()
            denial = keys.denial("health", f"Bearer {key}")
            assert (denial is None) == known
            assert compare.call_count == (3 if key else 0)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("s3cr3t *", "line 1 is not"),
        (f"sha256:{64 * 'g'} *", "line 1 is not"),
        (f"sha256:{63 * 'a'} *", "line 1 is not"),
        (f"sha256:{64 * 'a'}", "line 1 is not"),
        (f"md5:{64 * 'a'} *", "line 1 is not"),
        (f"#\nsha256:{64 * 'a'} inference health", "line 2 is not"),
        (f"sha256:{64 * 'a'} inferenze", "line 1: a key is for \\*, or some of health,"),
        (f"sha256:{64 * 'a'} *,health", "line 1: a key is for"),
        (f"sha256:{64 * 'a'} *\nsha256:{64 * 'A'} health", "line 2 repeats a key"),
        ("\n".join(f"sha256:{number:064x} *" for number in range(1001)), "more than 1000 keys"),
    ],
)
def test_a_line_that_is_no_keys_is_named(text, why):
    """By its number, and without what it says."""
    with pytest.raises(ValueError, match=why) as raised:
        parse_keys(text)
    assert not re.search("s3cr3t|aaaa|gggg", str(raised.value))


@pytest.mark.parametrize("content", [None, b"\xff\xfe", b"#" * (1 << 20) + b"\n"])
def test_a_file_that_is_none_is_refused(tmp_path, content):
    """One that is not there, no text, or larger than all keys that there may be."""
    file = tmp_path / "keys"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(MmeError, match="--key-file/MME_KEY_FILE='"):
        Keys(file)


def test_a_file_without_keys_lets_nobody_in(tmp_path):
    """Comments and empty lines are no keys."""
    file = tmp_path / "keys"
    file.write_text("# none\n\n")
    for role, key in itertools.product((*CATEGORIES, ""), (None, "Bearer x", "Bearer *")):
        assert Keys(file).denial(role, key) is not None
