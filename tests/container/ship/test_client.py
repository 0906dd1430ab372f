"""Commands reach servers of the same machine whatever proxy the environment names, and others by it."""

from __future__ import annotations

import socket

import pytest

from container.ship.client import ask
from model_handlers.errors import MmeError
from tests.http_server import Handler, answering


class Says(Handler):
    """A server that answers every request with an empty list."""

    def do_GET(self):
        """Answer."""
        self.answer(200, [])


@pytest.fixture
def port():
    """The port of one on loopback."""
    with answering(Says) as server:
        yield server.server_port


@pytest.fixture
def nobody(monkeypatch):
    """A proxy in the environment, with a password, at which nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    monkeypatch.setenv("http_proxy", f"http://me:secret@127.0.0.1:{port}")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)


@pytest.mark.usefixtures("nobody")
@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_this_machine_is_asked_without_a_proxy(port, host):
    """No proxy could reach it."""
    assert ask(f"http://{host}:{port}/models", None, 10)[0] == []


@pytest.mark.usefixtures("nobody")
def test_a_proxy_that_does_not_answer_is_named():
    """By its host alone, and with the way around it."""
    with pytest.raises(MmeError) as raised:
        ask("http://models.invalid/models", None, 10)

    assert "does not answer by the proxy 127.0.0.1 (NO_PROXY lists" in raised.value.message
    assert "secret" not in raised.value.message


def test_a_server_asked_without_a_proxy_is_all_that_is_named(monkeypatch):
    """Of hosts that NO_PROXY lists too."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", "models.invalid")
    with pytest.raises(MmeError) as raised:
        ask("http://models.invalid/models", None, 10)

    assert raised.value.message.startswith("http://models.invalid/models does not answer: ")
