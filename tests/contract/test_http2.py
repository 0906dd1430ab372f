"""The port for gRPC as clients of HTTP/2 find it, frame by frame: what they may do, and what they are told.

plus    answers at once
"""

from __future__ import annotations

import http.client
import socket
from urllib.parse import unquote

import numpy as np
import pytest
from hpack import Decoder
from tritonclient.grpc import service_pb2 as pb

from container.http2 import frames
from container.http2.frames import ErrorCode
from tests.contract import models
from tests.contract.server import Server
from tests.waiting import PATIENCE

INFER = b"/inference.GRPCInferenceService/ModelInfer"
WATCH = b"/grpc.health.v1.Health/Watch"
BOTH = frames.END_HEADERS | frames.END_STREAM


def block(path=INFER, kind=b"application/grpc", *more, method=b"POST"):
    """The headers of a call."""
    return frames.header_block(
        [(b":method", method), (b":scheme", b"http"), (b":path", path), (b"content-type", kind), *more]
    )


def message(rows=1):
    """A request for so many rows, as it is in frames of data."""
    x = np.zeros((rows, 4), np.float32)
    tensor = pb.ModelInferRequest.InferInputTensor(name="X", datatype="FP32", shape=x.shape)
    request = pb.ModelInferRequest(model_name="plus", inputs=[tensor], raw_input_contents=[x.tobytes()])
    data = request.SerializeToString()
    return b"\0" + len(data).to_bytes(4, "big") + data


class Client:
    """A connection.

    Attributes:
        answers: of each stream its headers, data, trailers, or the code of its end.
        last: the highest stream that the server says it serves, once it says that.
    """

    def __init__(self, port):
        self._socket = socket.create_connection(("127.0.0.1", port), PATIENCE)
        self._decoder = Decoder()
        self._buffer = b""
        self.answers, self.last = {}, None
        self.send(frames.PREFACE, frames.settings({frames.INITIAL_WINDOW_SIZE: 1 << 24}))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def close(self):
        """End the connection."""
        self._socket.close()

    def send(self, *parts):
        """Frames, or whatever else."""
        self._socket.sendall(b"".join(parts))

    def ask(self, number, head=None, data=None):
        """A whole call."""
        data = message() if data is None else data
        self.send(
            frames.frame(frames.HEADERS, frames.END_HEADERS, number, head or block()),
            *(frames.frame(frames.DATA, 0, number, data[at : at + (1 << 16)]) for at in range(0, len(data), 1 << 16)),
            frames.frame(frames.DATA, frames.END_STREAM, number),
        )

    def answer(self, number):
        """What came of a call: headers and trailers in one, and the data; or the code of its end."""
        while not (found := self.answers.get(number, {})).get("ended"):
            assert self.look(), f"no answer to {number} but {self.answers}"
        return found.get("reset") or (found["fields"], found["data"])

    def look(self):
        """Take a frame; False at the end of the connection."""
        while len(self._buffer) < 9 or len(self._buffer) < 9 + int.from_bytes(self._buffer[:3], "big"):
            piece = self._socket.recv(1 << 16)
            if not piece:
                return False
            self._buffer += piece
        end = 9 + int.from_bytes(self._buffer[:3], "big")
        kind, flags, number = self._buffer[3], self._buffer[4], int.from_bytes(self._buffer[5:9], "big")
        payload, self._buffer = self._buffer[9:end], self._buffer[end:]
        self._take(kind, flags, number, payload)
        return True

    def _take(self, kind, flags, number, payload):
        if kind == frames.GOAWAY:
            self.last = int.from_bytes(payload[:4], "big")
            assert int.from_bytes(payload[4:8], "big") == ErrorCode.NO_ERROR
        elif kind == frames.PING and not flags:
            self.send(frames.frame(frames.PING, frames.ACK, 0, payload))
        elif number and kind != frames.WINDOW_UPDATE:
            found = self.answers.setdefault(number, {"fields": {}, "data": b"", "ended": False})
            assert not found["ended"] or kind == frames.RST_STREAM
            if kind == frames.HEADERS:
                found["fields"] |= dict(self._decoder.decode(payload))
            elif kind == frames.DATA:
                found["data"] += payload
                self.send(frames.window_update(0, max(len(payload), 1)))
            elif not found["ended"]:
                found["reset"] = ErrorCode(int.from_bytes(payload, "big"))
            found["ended"] = "reset" in found or bool(kind != frames.RST_STREAM and flags & frames.END_STREAM)


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """Starts a server; gives it and its port of gRPC."""
    folder = tmp_path_factory.mktemp("repository")
    models.lay_out(folder / "plus", models.plus(1), "max_batch_size: 1000000")

    def start():
        environ = {"MME_MODEL_REPOSITORY": str(folder), "MME_PING_MODE": "ready", "MME_GRPC_PORT": "0"}
        return Server(tmp_path_factory.mktemp("server"), environ)

    return start


@pytest.fixture(scope="module")
def port(start):
    """Where a server listens to gRPC."""
    with start() as server:
        yield server.grpc_port


@pytest.mark.parametrize("kind", [b"application/grpc", b"application/grpc+proto", b"application/grpc;charset=utf-8"])
def test_what_calls_say_they_are(port, kind):
    """All of these are calls of gRPC."""
    with Client(port) as client:
        client.ask(1, block(INFER, kind))
        fields, data = client.answer(1)
        assert (fields[":status"], fields["grpc-status"], data[:1]) == ("200", "0", b"\0")


@pytest.mark.parametrize(
    ("head", "status", "words"),
    [
        (block(INFER, b"application/json"), "415", "application/grpc"),
        (block(INFER, b"application/grpc-web+proto"), "415", "application/grpc"),
        (block(INFER, b""), "415", "application/grpc"),
        (block(b"/v2/health/ready", b"", method=b"GET"), "405", "POST"),
    ],
)
def test_what_is_no_call_is_told_so(port, head, status, words):
    """In a sentence that says what is."""
    with Client(port) as client:
        client.ask(1, head)
        fields, data = client.answer(1)
        assert (fields[":status"], data) == (status, b"")
        assert words in unquote(fields["grpc-message"])


def test_http1_is_told_what_is_spoken(port):
    """Also who sends much."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    for body in (None, bytes(100_000)):
        connection.request("GET" if body is None else "POST", "/v2/health/ready", body)
        answer = connection.getresponse()
        assert answer.status == 505
        assert b"HTTP/2" in answer.read()
        connection.close()


def test_headers_in_all_their_shapes(port):
    """Padding, priorities and continuations, and data in small pieces, some empty."""
    with Client(port) as client:
        head, data = block(), message()
        client.send(
            frames.frame(frames.PRIORITY, 0, 7, bytes(5)),
            frames.frame(frames.HEADERS, frames.PADDED | frames.WITH_PRIORITY, 1, b"\2" + bytes(5) + head[:7] + b"--"),
            frames.frame(frames.CONTINUATION, 0, 1),
            frames.frame(frames.CONTINUATION, 0, 1, head[7:9]),
            frames.frame(frames.CONTINUATION, frames.END_HEADERS, 1, head[9:]),
            *(
                frames.frame(frames.DATA, frames.PADDED, 1, b"\3" + data[at : at + 5] + b"---")
                for at in range(0, 20, 5)
            ),
            frames.frame(frames.DATA, 0, 1),
            frames.frame(frames.DATA, 0, 1, data[20:]),
            frames.frame(frames.HEADERS, BOTH, 1, frames.header_block([(b"trailer", b"v")])),
        )
        assert client.answer(1)[0]["grpc-status"] == "0"


def test_headers_that_are_too_large_or_against_the_rules_cost_their_call(port):
    """And no other on the connection."""
    large = [(b"name-%d" % number, b"v" * 1000) for number in range(100)]
    with Client(port) as client:
        client.send(frames.frame(frames.HEADERS, frames.END_HEADERS, 1, block()))
        client.ask(3, block(INFER, b"application/grpc", *large))
        client.ask(5, block(INFER, b"application/grpc", (b"connection", b"close")))
        assert client.answer(3)[0]["grpc-status"] == "8"
        assert (
            client.answer(3)[0]["grpc-message"]
            == "the metadata are more than 64 KiB or 100 fields: send fewer or shorter ones"
        )
        assert client.answer(5) is ErrorCode.PROTOCOL_ERROR
        client.send(frames.frame(frames.DATA, frames.END_STREAM, 1, message()))
        assert client.answer(1)[0]["grpc-status"] == "0"


def test_a_deadline_that_is_none_is_refused(port):
    """Its client waits for so long, whatever it meant; other calls are answered."""
    with Client(port) as client:
        client.ask(1, block(INFER, b"application/grpc", (b"grpc-timeout", b"soon")))
        client.ask(3, block(INFER, b"application/grpc", (b"grpc-timeout", b"1M")))
        assert client.answer(1)[0]["grpc-status"] == "13"
        assert client.answer(1)[0]["grpc-message"].startswith("the grpc-timeout 'soon' is none")
        assert client.answer(3)[0]["grpc-status"] == "0"


def test_a_server_that_goes_answers_all_that_it_says_it_serves(start):
    """Also what was asked before its client had heard of it; what is asked later is refused."""
    rows = 300_000
    with start() as server, Client(server.grpc_port) as client:
        client.send(frames.frame(frames.HEADERS, BOTH, 1, block(WATCH)))
        client.look()
        client.ask(3, data=message(rows))
        server.process.terminate()
        number, answer = 5, None
        while answer is not ErrorCode.REFUSED_STREAM:
            client.ask(number)
            answer = client.answer(number)
            number += 2
        served = range(3, client.last + 1, 2)
        assert all(client.answer(each)[0]["grpc-status"] == "0" for each in served)
        assert len(client.answer(3)[1]) > rows * 16
        client.close()
        assert server.process.wait(PATIENCE) == 0
