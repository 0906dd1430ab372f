"""The port of a container that `mme local` starts."""

from __future__ import annotations

import socket
from contextlib import ExitStack

import pytest

from container.local import running
from model_handlers.errors import Kind, MmeError


def test_a_port_that_somebody_listens_on_is_not_free(monkeypatch):
    """Another one is found while there is one, and then a sentence says what to do."""
    with ExitStack() as listeners:
        first = running.free_port()
        listeners.enter_context(socket.create_server(("127.0.0.1", first)))
        other = running.free_port()
        assert other != first
        monkeypatch.setattr(running, "_PORTS", [first, other])
        assert running.free_port() == other
        listeners.enter_context(socket.create_server(("127.0.0.1", other)))
        with pytest.raises(MmeError, match="say which by --container-port") as caught:
            running.free_port()
    assert caught.value.kind is Kind.UNAVAILABLE
