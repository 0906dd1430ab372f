"""HTTP by TLS, and gRPC by the same certificates: the clients that people use, certificates that change, and mistakes."""

from __future__ import annotations

import json
import socket
import ssl

import boto3
import numpy as np
import pytest
import requests
import tritonclient.grpc
import tritonclient.http
from botocore import UNSIGNED
from botocore.config import Config
from cryptography import x509

from container.cli.main import main
from container.health import is_healthy
from container.steps.access import digest_of
from tests.contract import models
from tests.contract.certificates import Authority
from tests.contract.server import PATIENCE, Server, post
from tests.waiting import eventually

KEY = "s3cr3t"
BEARER = {"Authorization": f"Bearer {KEY}"}
INFER = "/v2/models/plus/infer"


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    """Who vouches for the server and its clients."""
    return Authority(tmp_path_factory.mktemp("certificates"), "authority")


@pytest.fixture(scope="module")
def start(tmp_path_factory, authority):
    """A function that gives a server by TLS, of the files in a folder of its own, and that folder."""
    repository = tmp_path_factory.mktemp("repository")
    models.lay_out(repository / "plus", models.plus(1), "max_batch_size: 8\n")

    def server(*, pair=None, **environ):
        folder = tmp_path_factory.mktemp("server")
        place(folder, *authority.vouch("server"))
        given = {
            "MME_MODEL_REPOSITORY": str(repository),
            "MME_PING_MODE": "ready",
            "MME_GRPC_PORT": "0",
            "MME_METRICS_PORT": "0",
            "MME_TLS_CERT": str(folder / "tls.crt"),
            "MME_TLS_KEY": str(folder / "tls.key"),
        }
        return Server(folder / "run", given | environ, tls=trusting(authority, pair)), folder

    return server


@pytest.fixture(scope="module")
def keyed(start, tmp_path_factory):
    """One that wants keys as well; neither a traceback nor a key is in its log in the end."""
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text(f"sha256:{digest_of(KEY)} *\n")
    server, _ = start(MME_KEY_FILE=str(keys))
    with server:
        yield server
        assert KEY not in server.log


@pytest.fixture
def key_file(tmp_path):
    """The file of a client with its key."""
    (tmp_path / "client.key").write_text(f"{KEY}\n")
    return tmp_path / "client.key"


def place(folder, certificate, key):
    """Put a certificate and its key where a server looks for them, as tools do that renew them."""
    for source, name in ((key, "tls.key"), (certificate, "tls.crt")):
        (folder / f".{name}").write_bytes(source.read_bytes())
        (folder / f".{name}").rename(folder / name)


def trusting(authority, pair=None):
    """A client's context; `pair` is what it shows of itself."""
    context = ssl.create_default_context(cafile=authority.certificate)
    if pair is not None:
        context.load_cert_chain(*pair)
    return context


def connect(port, context):
    """A connection by TLS."""
    plain = socket.create_connection(("127.0.0.1", port), PATIENCE)
    return context.wrap_socket(plain, server_hostname="localhost")


def serial(connection):
    """Of the certificate that the server showed."""
    return x509.load_der_x509_certificate(connection.getpeercert(binary_form=True)).serial_number


def status(connection, request):
    """Of the answer to one request."""
    connection.sendall(request)
    head = b""
    while b"\r\n\r\n" not in head:
        byte = connection.recv(1)
        if not byte:
            raise ConnectionError("the connection closed without an answer")
        head += byte
    size = next(
        (int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length")), 0
    )
    while size:
        size -= len(connection.recv(size))
    return int(head.split()[1])


def test_clients_ask_over_https(keyed, authority, key_file):
    """requests, boto3 and Triton's two, with the certificate of who vouches for the server, and a key."""
    ca = str(authority.certificate)
    assert requests.get(f"{keyed.url}/ping", verify=ca, timeout=PATIENCE).status_code == 200
    assert requests.get(f"{keyed.url}/v2", verify=ca, timeout=PATIENCE).status_code == 401
    answer = requests.post(f"{keyed.url}{INFER}", json=models.ONE, headers=BEARER, verify=ca, timeout=PATIENCE)
    assert models.y(answer.json()) == [2, 3, 4, 5]
    with pytest.raises(requests.exceptions.SSLError):
        requests.get(f"{keyed.url}/ping", timeout=PATIENCE)

    client = boto3.client(
        "sagemaker-runtime",
        endpoint_url=keyed.url,
        region_name="us-east-1",
        verify=ca,
        config=Config(signature_version=UNSIGNED),
    )
    client.meta.events.register("before-send.sagemaker-runtime", lambda request, **_: request.headers.update(BEARER))
    said = client.invoke_endpoint(
        EndpointName="any", TargetModel="plus", ContentType="application/json", Body=json.dumps(models.ONE)
    )
    assert models.y(json.load(said["Body"])) == [2, 3, 4, 5]

    x = np.array([[1, 2, 3, 4]], np.float32)
    with tritonclient.http.InferenceServerClient(
        f"localhost:{keyed.port}", ssl=True, ssl_context_factory=lambda: trusting(authority)
    ) as over_http:
        tensor = tritonclient.http.InferInput("X", x.shape, "FP32").set_data_from_numpy(x)
        assert (over_http.infer("plus", [tensor], headers=dict(BEARER)).as_numpy("Y") == x + 1).all()
    with tritonclient.grpc.InferenceServerClient(
        f"localhost:{keyed.grpc_port}", ssl=True, root_certificates=ca
    ) as over_grpc:
        tensor = tritonclient.grpc.InferInput("X", x.shape, "FP32").set_data_from_numpy(x)
        headers = {"authorization": BEARER["Authorization"]}
        assert (over_grpc.infer("plus", [tensor], headers=headers).as_numpy("Y") == x + 1).all()


def test_commands_ask_over_https(keyed, authority, key_file, capsys, tmp_path):
    """With --ca and --key-file; without them their error says which is missing."""
    known = ["--ca", str(authority.certificate), "--key-file", str(key_file)]
    request = json.dumps(models.ONE)
    assert main(["models", "--url", keyed.url, "--stats", *known]) == 0
    assert "plus" in capsys.readouterr().out
    for place in (["--url", keyed.url], ["--local", keyed.url]):
        assert main(["invoke", *place, *known, "--target", "plus", "--json", request]) == 0
        assert models.y(json.loads(capsys.readouterr().out)) == [2, 3, 4, 5]
    bench = [
        "bench",
        keyed.url,
        *known,
        "--target",
        "plus",
        "--json",
        request,
        "--concurrency",
        "1",
        "--seconds",
        "0.2",
    ]
    assert main(bench) == 0
    capsys.readouterr()

    assert main(["models", "--url", keyed.url, "--ca", str(authority.certificate)]) == 1
    assert "this needs a key" in capsys.readouterr().err
    assert main(["models", "--url", keyed.url, "--key-file", str(key_file)]) == 1
    assert "name who does by --ca" in capsys.readouterr().err
    assert main(["invoke", "endpoint", "--key-file", str(key_file), "--json", request]) == 2
    assert "AWS knows you by credentials" in capsys.readouterr().err
    (tmp_path / "line").write_text(f"sha256:{digest_of(KEY)} *\n")
    assert main(["models", "--url", keyed.url, "--key-file", str(tmp_path / "line")]) == 2
    assert "hold a key and nothing else" in capsys.readouterr().err


def test_a_certificate_is_renewed_while_connections_last(start, authority):
    """A connection goes on; the next one is shown the new certificate. Files that are broken change nothing."""
    server, folder = start()
    with server, connect(server.port, trusting(authority)) as kept:
        first = serial(kept)
        request = post(INFER, models.ONE)
        assert status(kept, request) == 200

        place(folder, *authority.vouch("renewed"))

        def shown():
            with connect(server.port, trusting(authority)) as fresh:
                return serial(fresh)

        eventually(lambda: shown() != first, "the new certificate")
        assert status(kept, request) == 200
        second = shown()

        told = "certificates of HTTP: what was read before stays in force"
        before = server.log.count(told)
        for count, broken in enumerate(("no certificate", ""), before + 1):  # each is told once
            (folder / "broken").write_text(broken)
            (folder / "broken").rename(folder / "tls.crt")
            eventually(lambda count=count: server.log.count(told) == count, "a line")
            assert shown() == second
        (folder / "tls.key").unlink()
        eventually(lambda: "tls.key': there is no such file" in server.log, "another")
        assert shown() == second
        assert status(kept, request) == 200


def test_clients_show_certificates_where_they_have_to(start, authority, tmp_path):
    """One that is vouched for, by HTTP and at the port for metrics; when somebody else vouches, it is not any more."""
    pair = authority.vouch("client")
    other = Authority(tmp_path, "other")
    ca = tmp_path / "ca.pem"
    ca.write_bytes(authority.certificate.read_bytes())
    server, _ = start(pair=pair, MME_TLS_CLIENT_CA=str(ca))

    def served(pair, port=None):
        try:
            with connect(port or server.port, trusting(authority, pair)) as connection:
                return status(connection, b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n") == 200
        except (ssl.SSLError, ConnectionError):
            return False

    with server:
        (line,) = [line["message"] for line in server.lines if "metrics listening" in line["message"]]
        for port in (server.port, int(line.rpartition(" ")[2])):
            assert served(pair, port)
            assert not served(None, port)
            assert not served(other.vouch("client"), port)
        assert "a client showed no certificate, which this port wants" in server.log
        port = {"MME_PORT": str(server.port), "MME_TLS_CERT": "x"}
        assert is_healthy({**port, "MME_TLS_CLIENT_CA": "x"})
        assert not is_healthy(port)
        ca.write_bytes(other.certificate.read_bytes())
        eventually(lambda: served(other.vouch("client")), "the other authority")
        assert not served(pair)


def test_an_engine_of_containers_asks_for_health(keyed):
    """By the variables of the server; a port that nobody listens at is not healthy, nor one that is asked plainly."""
    assert is_healthy({"MME_PORT": "1", "SAGEMAKER_BIND_TO_PORT": str(keyed.port), "MME_TLS_CERT": "x"})
    assert not is_healthy({"MME_PORT": str(keyed.port)})
    assert not is_healthy({"MME_PORT": "1", "MME_TLS_CERT": "x"})


def test_plain_http_to_a_port_of_tls_is_told_once(keyed):
    """By a line that says what to do, however often it is tried, and without a traceback."""
    for _ in range(3):
        with socket.create_connection(("127.0.0.1", keyed.port), PATIENCE) as plain:
            plain.sendall(b"GET /ping HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert plain.recv(100) in {b"", plain.recv(100)}
    told = "HTTP by TLS: a client spoke plain HTTP: its URL has to begin with https://"
    assert eventually(lambda: keyed.log.count(told)) == 1
    for junk in (b"\x16\x03\x01\xff\xff" + 100 * b"x", b"\0" * 600, b"\x80"):
        with socket.create_connection(("127.0.0.1", keyed.port), PATIENCE) as plain:
            plain.sendall(junk)
    assert keyed.ask("GET", "/ping").status == 200
    assert "Traceback" not in keyed.log


def test_answers_that_end_a_connection_arrive_whole(keyed, authority):
    """A refusal while the client still sends a body, `Connection: close`, and a client that closes its direction."""
    with connect(keyed.port, trusting(authority)) as connection:
        connection.sendall(b"POST /invocations HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000\r\n\r\n")
        connection.sendall(500_000 * b"x")
        assert status(connection, 400_000 * b"x") == 401
        assert connection.recv(1) == b""
    with connect(keyed.port, trusting(authority)) as connection:
        request = post(INFER, models.ONE, Connection="close", **BEARER)
        assert status(connection, request) == 200
        assert connection.recv(1) == b""
    with connect(keyed.port, trusting(authority)) as connection:
        assert status(connection, b"GET /ping HTTP/1.1\r\nHost: localhost\r\n\r\n") == 200
        assert connection.unwrap().recv(1) == b""
    assert "no effect when using ssl" not in keyed.log
