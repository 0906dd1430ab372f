"""One anonymous request, a page in a browser on this machine, and a name that leads here: none of them changes anything.

Real servers; requests are bytes on the wire, so that no client tidies them up.

closed    as `mme serve` starts it, in each mode: its model writes down that its code ran
open      with overrides allowed, for what has to be refused even then
"""

from __future__ import annotations

import base64
import json
import os

import grpc
import pytest
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from container.settings.reader import listening_address
from tests.contract import models
from tests.contract.server import Connection, Server

pytestmark = pytest.mark.slow

LOAD = "/v2/repository/models/plus/load"
EVIL = "evil.example"
CODE = "import pathlib\npathlib.Path({marker!r}).touch()\n"
TENSORS = 'input { name: "X" data_type: TYPE_FP32 dims: 1 } output { name: "Y" data_type: TYPE_FP32 dims: 1 }'
CONFIG = {"backend": "python", "input": [{"name": "X", "data_type": "TYPE_FP32", "dims": [1]}]}
CONFIG["output"] = [{"name": "Y", "data_type": "TYPE_FP32", "dims": [1]}]


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    """One model."""
    folder = tmp_path_factory.mktemp("repository")
    models.lay_out(folder / "plus", models.plus(1), "max_batch_size: 8\n")
    return folder


@pytest.fixture(scope="module")
def start(tmp_path_factory, repository):
    """A function that gives a server of it, with gRPC and a port for metrics."""

    def server(**environ):
        given = {"MME_MODEL_REPOSITORY": str(repository), "MME_PING_MODE": "ready", "MME_GRPC_PORT": "0"}
        return Server(tmp_path_factory.mktemp("server"), given | {"MME_METRICS_PORT": "0"} | environ)

    return server


@pytest.fixture(scope="module", params=["demand", "explicit"])
def closed(request, start):
    """A server as it starts."""
    with start(MME_MODEL_CONTROL_MODE=request.param, MME_LOAD_MODEL="plus") as server:
        yield server


@pytest.fixture(scope="module")
def open_(start):
    """A server that takes what clients send with a load."""
    with start(MME_ALLOW_LOAD_OVERRIDES="true", MME_ALLOWED_HOSTS="mme.example.com,*.internal") as server:
        yield server


def request(method, path, body=b"", *, host="127.0.0.1", version="1.1", **headers):
    """A request as bytes; without a Host where `host` is None."""
    lines = [f"{method} {path} HTTP/{version}", f"Content-Length: {len(body)}"]
    lines += [] if host is None else [f"Host: {host}"]
    lines += [f"{name.replace('_', '-')}: {text}" for name, text in headers.items()]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def ask(port, *parts, **headers):
    """The one answer to a request on a connection of its own."""
    with Connection(port) as connection:
        return connection.send(request(*parts, **headers)).answer()


def override(marker):
    """The body of a load that brings code along."""
    code = base64.b64encode(CODE.format(marker=str(marker)).encode()).decode()
    return json.dumps({"parameters": {"config": json.dumps(CONFIG), "file:1/model.py": code}}).encode()


def metrics_port(server):
    """Where it tells of metrics alone."""
    (line,) = [line for line in server.lines if "metrics listening at port" in line["message"]]
    return int(line["message"].rpartition(" ")[2])


@pytest.mark.parametrize(
    "headers",
    [
        {"Content_Type": "application/json"},
        {"Content_Type": "text/plain", "Origin": f"http://{EVIL}"},
        {"Content_Type": "application/x-www-form-urlencoded"},
        {},
    ],
    ids=str,
)
def test_a_load_brings_no_code(closed, tmp_path, headers):
    """In the modes demand and explicit, from any client, the model of another name too; the model serves on as it was."""
    for path in (LOAD, "/v2/repository/models/other/load"):
        answer = ask(closed.port, "POST", path, override(tmp_path / "ran"), **headers)
        assert answer.status == 403
        assert "Origin" in headers or "MME_ALLOW_LOAD_OVERRIDES=true" in answer.error

    assert not (tmp_path / "ran").exists()
    assert models.y(closed.ask("POST", "/v2/models/plus/infer", models.ONE).json) == [2, 3, 4, 5]
    assert not (closed.cache / "overrides").exists()


def test_a_load_names_no_folder(closed, tmp_path):
    """As SageMaker does, where there is no SageMaker: what somebody has put into /tmp is not run."""
    models.lay_out(tmp_path / "m", CODE.format(marker=str(tmp_path / "ran")), TENSORS)
    answer = closed.ask("POST", "/models", {"model_name": "m", "url": str(tmp_path / "m")})

    assert (answer.status, "MME_ALLOW_LOAD_OVERRIDES=true" in answer.error) == (403, True)
    assert not (tmp_path / "ran").exists()


def test_a_load_over_grpc_brings_no_code(closed, tmp_path):
    """Whether it is a file or a configuration, which has a model's file mean something else."""
    code = CODE.format(marker=str(tmp_path / "ran")).encode()
    file, config = pb.ModelRepositoryParameter(bytes_param=code), pb.ModelRepositoryParameter(string_param="{}")
    with grpc.insecure_channel(closed.grpc_address) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        for parameters in ({"file:1/model.py": file, "config": config}, {"config": config}, {"file:1/model.py": file}):
            with pytest.raises(grpc.RpcError) as raised:
                stub.RepositoryModelLoad(pb.RepositoryModelLoadRequest(model_name="plus", parameters=parameters))
            assert raised.value.code() is grpc.StatusCode.PERMISSION_DENIED
            assert "MME_ALLOW_LOAD_OVERRIDES=true" in raised.value.details()
        stub.RepositoryModelLoad(pb.RepositoryModelLoadRequest(model_name="plus"))

    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": f"http://{EVIL}", "Content_Type": "text/plain"},
        {"Origin": f"http://{EVIL}", "Content_Type": "application/x-www-form-urlencoded"},
        {"Origin": f"http://{EVIL}", "Content_Type": "multipart/form-data; boundary=x"},
        {"Origin": f"http://{EVIL}"},
        {"Origin": "null", "Content_Type": "text/plain"},
        {"Origin": "http://127.0.0.1:3000", "Content_Type": "text/plain"},
        {"Sec_Fetch_Site": "cross-site"},
    ],
    ids=str,
)
@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", LOAD, b"{}"),
        ("POST", "/v2/repository/models/plus/unload", b"{}"),
        ("POST", "/models", b'{"model_name": "m", "url": "/tmp"}'),
        ("DELETE", "/models/plus", b""),
        ("POST", "/v2/logging", b'{"log_info": false}'),
        ("POST", "/v2/trace/setting", b'{"trace_level": ["TENSORS"]}'),
        ("POST", "/v2/systemsharedmemory/region/r/register", b'{"key": "/r", "byte_size": 8}'),
        ("POST", "/v2/models/plus/infer", json.dumps(models.ONE).encode()),
        ("POST", "/models/plus/invoke", json.dumps(models.ONE).encode()),
        ("GET", "/v2/models/plus/config", b""),
    ],
)
def test_a_page_of_another_site_changes_nothing(open_, method, path, body, headers):
    """By a form or a script in the browser of somebody on this machine: refused before the body is looked at."""
    answer = ask(open_.port, method, path, body, **headers)

    assert (answer.status, "MME_ALLOWED_HOSTS" in answer.error) == (403, True)
    assert open_.ask("GET", "/v2/models/plus/ready").status == 200


def test_code_that_clients_may_send_is_not_taken_from_a_page(open_, tmp_path):
    """Also where overrides are allowed; nor from an own page as a form would send it."""
    for origin, status in ((f"http://{EVIL}", 403), (f"http://127.0.0.1:{open_.port}", 415)):
        host = f"127.0.0.1:{open_.port}"
        answer = ask(
            open_.port, "POST", LOAD, override(tmp_path / "ran"), host=host, Origin=origin, Content_Type="text/plain"
        )
        assert answer.status == status

    assert not (tmp_path / "ran").exists()


def test_clients_that_are_no_browsers_go_on(open_):
    """As `curl -d` and `curl -H 'Content-Type: text/plain' -d` send a load."""
    config = json.dumps({"parameters": {"config": '{"max_batch_size": 4}'}}).encode()
    for kind in ("application/x-www-form-urlencoded", "text/plain", "application/json"):
        assert ask(open_.port, "POST", LOAD, config, Content_Type=kind).status == 200
    assert ask(open_.port, "POST", LOAD, b"", Origin="https://mme.example.com:8443").status == 200


HOSTS = [
    EVIL,
    f"{EVIL}:8080",
    "localhost.evil.example",
    "127.0.0.1.evil.example",
    "10.0.0.1",
    "",
    "localhost@evil.example",
]


@pytest.mark.parametrize("host", HOSTS)
def test_a_name_that_leads_here_is_not_answered(open_, host):
    """DNS rebinding: the page's own name has become 127.0.0.1, and its browser sees one site. On every port."""
    for port, path in ((open_.port, "/ping"), (open_.port, "/v2"), (metrics_port(open_), "/metrics")):
        answer = ask(port, "GET", path, host=host)
        assert (answer.status, "MME_ALLOWED_HOSTS" in answer.error) == (403, True)
    assert ask(open_.port, "POST", LOAD, b"{}", host=host, Origin=f"http://{host}").status == 403


@pytest.mark.parametrize(
    "host",
    ["localhost", "LOCALHOST:8080", "127.0.0.1", "127.1.2.3:99", "[::1]:8080", "mme.example.com", "a.internal:1"],
)
def test_local_names_and_those_that_are_listed_are_answered(open_, host):
    """With whatever port, since a tunnel has another one."""
    assert ask(open_.port, "GET", "/ping", host=host).status == 200
    assert ask(metrics_port(open_), "GET", "/metrics", host=host).status == 200


def test_a_host_in_the_target_counts(open_):
    """RFC 9112 has it count in place of the header; both ways round."""
    assert ask(open_.port, "GET", f"http://{EVIL}/ping").status == 403
    assert ask(open_.port, "GET", f"http://{EVIL}?localhost/").status == 403
    assert ask(open_.port, "GET", "http://localhost:1/ping", host=EVIL).status == 200


def test_http_10_without_a_host_is_answered(open_):
    """Health checks of old load balancers send none, and every browser does; with one, it counts."""
    assert ask(open_.port, "GET", "/ping", host=None, version="1.0").status == 200
    assert ask(open_.port, "GET", "/ping", host=EVIL, version="1.0").status == 403


def test_each_request_of_a_connection_is_checked(open_):
    """Heads that the connection knows by heart as well, and one with the same length."""
    good = request("POST", "/v2/models/plus/infer", json.dumps(models.ONE).encode(), host="localhost")
    with Connection(open_.port) as connection:
        for _ in range(4):
            assert connection.send(good).answer().status == 200
        assert connection.send(good.replace(b"localhost", b"evil.test")).answer().status == 403


@pytest.mark.parametrize("host", [EVIL, f"{EVIL}:8001", "10.0.0.1"])
def test_an_authority_that_leads_here_is_not_answered(open_, host):
    """The same over gRPC, whose `:authority` it is."""
    with grpc.insecure_channel(open_.grpc_address, [("grpc.default_authority", host)]) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        for _ in range(2):
            with pytest.raises(grpc.RpcError) as raised:
                stub.ServerLive(pb.ServerLiveRequest())
            assert raised.value.code() is grpc.StatusCode.PERMISSION_DENIED
            assert "MME_ALLOWED_HOSTS" in raised.value.details()


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1:99", "[::1]", "mme.example.com"])
def test_local_authorities_are_answered(open_, host):
    """And those that are listed."""
    with grpc.insecure_channel(open_.grpc_address, [("grpc.default_authority", host)]) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        assert stub.ServerLive(pb.ServerLiveRequest()).live


def test_the_first_line_of_the_log_says_where_and_why(start):
    """Whatever this machine is: as the pure decision has it of the server's own environment."""
    with start(MME_HOST="") as server:
        expected = listening_address({}, os.path.exists, server.process.pid)
        assert server.lines[0]["message"] == f"listening on {expected.host}: {expected.reason}"
        answered = ask(server.port, "GET", "/ping", host="mme.internal.example").status
        assert answered == (403 if expected.host == "127.0.0.1" else 200)

    with start(SAGEMAKER_TRITON_LOG_INFO="true", MME_HOST="") as server:
        assert "0.0.0.0: all interfaces, since " in server.lines[0]["message"]
        assert ask(server.port, "GET", "/ping", host="model.internal").status == 200
