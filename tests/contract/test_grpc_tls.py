"""gRPC by TLS, with and without certificates of clients, and answers that are compressed; by Triton's client."""

from __future__ import annotations

import select
import socket
import threading
from contextlib import contextmanager

import numpy as np
import pytest
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

from tests.contract import models
from tests.contract.certificates import Authority
from tests.contract.server import Server

ROWS = 20_000
SIZE = ROWS * 4 * 4  # bytes


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    """Who vouches for the server and its clients."""
    return Authority(tmp_path_factory.mktemp("certificates"), "authority")


@pytest.fixture(scope="module")
def start(tmp_path_factory, authority):
    """Starts a server of `plus` with more settings; gives it and its port of gRPC."""
    folder = tmp_path_factory.mktemp("repository")
    models.lay_out(folder / "plus", models.plus(1), "max_batch_size: 100000")
    certificate, key = authority.vouch("server")
    files = {"MME_GRPC_SERVER_CERT": str(certificate), "MME_GRPC_SERVER_KEY": str(key)}

    @contextmanager
    def started(**environ):
        plain = {"MME_MODEL_REPOSITORY": str(folder), "MME_PING_MODE": "ready", "MME_GRPC_PORT": "0"}
        secure = files if any(name.startswith("MME_GRPC_USE_SSL") for name in environ) else {}
        with Server(tmp_path_factory.mktemp("server"), {**plain, **secure, **environ}) as server:
            yield server.grpc_port

    return started


@contextmanager
def client(port, root=None, pair=(None, None)):
    """Triton's client, by TLS where it is given who vouches for the server."""
    certificate, key = pair
    with triton.InferenceServerClient(
        f"localhost:{port}",
        ssl=root is not None,
        root_certificates=root and str(root),
        private_key=key and str(key),
        certificate_chain=certificate and str(certificate),
    ) as made:
        yield made


def ask(made, rows=1):
    """Rows of zeros and one, after which they are one more."""
    x = np.zeros((rows, 4), np.float32)
    answer = made.infer("plus", [triton.InferInput("X", x.shape, "FP32").set_data_from_numpy(x)], client_timeout=60)
    return answer.as_numpy("Y")


def refused(made):
    """Whether it gets no connection that it takes."""
    with pytest.raises(InferenceServerException, match="UNAVAILABLE"):
        made.is_server_live(client_timeout=60)
    return True


class Counter:
    """Hands one connection through to a port, and counts the bytes that come back."""

    def __init__(self, port):
        self.came = 0
        self._port = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._run)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._listener.close()
        self._thread.join()

    def _run(self):
        near, _ = self._listener.accept()
        with near, socket.create_connection(("127.0.0.1", self._port)) as far:
            others = {near: far, far: near}
            while True:
                for ready in select.select(list(others), [], [])[0]:
                    data = ready.recv(1 << 16)
                    if not data:
                        return
                    self.came += len(data) if ready is far else 0
                    others[ready].sendall(data)


def test_clients_that_know_who_vouches_for_the_server_are_served(start, authority, tmp_path):
    """By TLS alone: neither who trusts somebody else, nor who speaks plainly.

    Answers are compressed where that is asked for: numbers that are all alike take a fraction of their bytes, and are
    what they were.
    """
    with start(MME_GRPC_USE_SSL="true", MME_GRPC_INFER_RESPONSE_COMPRESSION_LEVEL="low") as port:
        with Counter(port) as between, client(between.port, authority.certificate) as made:
            assert (ask(made, ROWS) == 1).all()
            assert between.came < SIZE / 10
        with client(port, Authority(tmp_path, "stranger").certificate) as made:
            assert refused(made)
        with client(port) as made:
            assert refused(made)


def test_clients_show_certificates_where_they_have_to(start, authority, tmp_path):
    """One that the root vouches for is served; none, or a stranger's, is not. Nothing is compressed unless asked for."""
    with start(MME_GRPC_USE_SSL_MUTUAL="true", MME_GRPC_ROOT_CERT=str(authority.certificate)) as port:
        with Counter(port) as between, client(between.port, authority.certificate, authority.vouch("client")) as made:
            assert (ask(made, ROWS) == 1).all()
            assert between.came > SIZE
        with client(port, authority.certificate) as made:
            assert refused(made)
        with client(port, authority.certificate, Authority(tmp_path, "stranger").vouch("impostor")) as made:
            assert refused(made)
