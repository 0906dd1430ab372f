"""Servers that listen to IPv6: HTTP, gRPC, and the port for metrics."""

from __future__ import annotations

import http.client
import re
import socket

import pytest
import tritonclient.grpc

from tests.contract.server import PATIENCE, Server, eventually


def _has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


pytestmark = pytest.mark.skipif(not _has_ipv6(), reason="this machine has no IPv6")


def reached(address: str, port: int, path: str) -> bool:
    """Whether a GET is answered there."""
    connection = http.client.HTTPConnection(address, port, timeout=PATIENCE)
    try:
        connection.request("GET", path)
        return connection.getresponse().status == 200
    except ConnectionRefusedError:
        return False
    finally:
        connection.close()


def port(server: Server, name: str) -> int:
    """Where it listens beside HTTP, once it says so."""
    said = re.compile(rf"{name} listening at port ([0-9]+)")
    return int(eventually(lambda: said.search(server.log), f"the port of {name}")[1])


@pytest.mark.parametrize(("host", "too"), [("[::]", True), ("ipv6:[::1]", False)])
def test_every_port_listens_to_ipv6(host, too, tmp_path):
    """All of them alike: at `::` to IPv4 too, as everywhere; at `::1` to that alone."""
    repository = tmp_path / "repository"
    repository.mkdir()
    flags = ("--http-address", host, "--http-port=0", "--grpc-port=0", "--metrics-port=0")
    environ = {"MME_MODEL_REPOSITORY": str(repository)}
    with Server(tmp_path / "server", environ, command=("serve", *flags), host="::1") as server:
        grpc_port, metrics_port = port(server, "gRPC"), port(server, "metrics")
        for address in ("::1", "127.0.0.1"):
            expected = too or address == "::1"
            assert reached(address, server.port, "/ping") is expected
            assert reached(address, metrics_port, "/metrics") is expected
        for address in ("[::1]", "127.0.0.1") if too else ("[::1]",):
            with tritonclient.grpc.InferenceServerClient(f"{address}:{grpc_port}") as client:
                assert client.is_server_live(client_timeout=PATIENCE)
