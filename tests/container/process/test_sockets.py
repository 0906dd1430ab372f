"""Where a server listens beside HTTP."""

import socket

import pytest

from container.process.sockets import listening
from model_handlers.errors import Kind, MmeError

ABSENT = "203.0.113.9"  # for documentation: no machine has it


@pytest.fixture
def resolves(monkeypatch):
    """Sets the IPv4 addresses of any name, as a file of hosts would."""

    def resolves(*addresses):
        rows = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0)) for address in addresses]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: rows)

    return resolves


def test_a_name_may_have_an_address_that_this_machine_lacks(resolves):
    """As localhost has where IPv6 is off: what there is of it is listened to."""
    resolves(ABSENT, "127.0.0.1")
    (only,) = listening("localhost", 0, "gRPC", "port")
    with only:
        socket.create_connection(only.getsockname()).close()


def test_why_nothing_listens_is_told(resolves):
    """That the port is taken, or the address somebody else's, and which setting names it."""
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(MmeError) as caught:
        listening("127.0.0.1", taken.getsockname()[1], "gRPC", "port")
    assert caught.value.kind is Kind.INVALID_ARGUMENT
    assert "requests at 127.0.0.1:" in str(caught.value)
    assert str(caught.value).endswith(": Address already in use; choose another port")

    resolves(ABSENT)
    with pytest.raises(MmeError, match="at there:80: Cannot assign requested address; choose another port"):
        listening("there", 80, "gRPC", "port")


def test_a_port_that_is_about_to_be_left_is_waited_for(monkeypatch):
    """By the server before this one, or another; not for ever."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setattr("time.sleep", lambda _: taken.close())
        (only,) = listening("127.0.0.1", port, "metrics", "port", seconds=60)
    with only:
        assert only.getsockname()[1] == port
