r"""Requests as bytes to a server, and its answers as text in which each byte can be told.

A body's printable ASCII stands for itself, a backslash for two, a line's end is written and made, all else is `\xNN`.
"""

from __future__ import annotations

import hashlib
import json
import re
import socket
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import grpc
from google.protobuf import text_format
from tritonclient.grpc import service_pb2 as pb

from tests.waiting import PATIENCE

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from io import BufferedReader

    from google.protobuf.message import Message

    from tests.contract.server import Server
    from tests.golden.masks import Masks

_SERVICE = "/inference.GRPCInferenceService/"
_STREAM = "ModelStreamInfer"


@dataclass(frozen=True)
class Http:
    """A request over HTTP/1.1.

    Attributes:
        target: method and target.
        body: bytes, or what JSON is made of; None for none, and then no Content-Length.
        headers: besides Host and Content-Length.
        raw: all of it, in place of the above; parts of it are sent once the answer to those before, a 1xx, is there.
        answers: how many come.
    """

    name: str
    target: str = ""
    body: Any = None
    headers: Mapping[str, str] = field(default_factory=dict)
    raw: Sequence[bytes] = ()
    answers: int = 1

    def parts(self, words: Mapping[str, str]) -> list[bytes]:
        """What is sent, with words that only this run has in place of theirs."""
        if self.raw:
            return list(self.raw)
        content = self.body if isinstance(self.body, bytes | None) else json.dumps(self.body).encode()
        for word, meant in words.items():
            content = content and content.replace(word.encode(), meant.encode())
        lines = [
            f"{self.target} HTTP/1.1",
            "Host: localhost",
            *(f"{name}: {text}" for name, text in self.headers.items()),
        ]
        if content is not None and "Content-Length" not in self.headers:
            lines.append(f"Content-Length: {len(content)}")
        return ["\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + (content or b"")]


@dataclass(frozen=True)
class Grpc:
    """A call over gRPC.

    Attributes:
        method: of the service, or the whole path of another's.
        requests: messages, or their bytes; a stream may have several.
    """

    name: str
    method: str
    requests: Sequence[Message | bytes]
    metadata: Mapping[str, str] = field(default_factory=dict)
    compression: grpc.Compression | None = None


class Recorder:
    """Asks one server.

    Args:
        words: in requests, and what stands for them in this run.
    """

    def __init__(self, server: Server, masked: Masks, words: Mapping[str, str]) -> None:
        self._server = server
        self._masked = masked
        self._words = words

    def http(self, cases: Iterable[Http]) -> str:
        """The answers, each behind the first line of its request."""
        return "\n".join(self._masked_case(case, self._answers(case)) for case in cases)

    def _answers(self, case: Http) -> list[tuple[str, bytes]]:
        parts = case.parts(self._words)
        with socket.create_connection(("127.0.0.1", self._server.port), PATIENCE) as connection:
            reader = connection.makefile("rb")
            bodiless = parts[0].startswith(b"HEAD ")
            found = []
            for part in parts[:-1]:
                connection.sendall(part)
                found.append(_answer(reader, bodiless=True))
            connection.sendall(parts[-1])
            found += [_answer(reader, bodiless=bodiless) for _ in range(case.answers)]
            if "connection: close" in found[-1][0].lower():
                assert reader.read() == b"", "bytes behind the last answer"
            return found

    def _masked_case(self, case: Http, answers: list[tuple[str, bytes]]) -> str:
        asked = case.target or shown(case.raw[0].partition(b"\r\n")[0])
        lines = [f"## {case.name}", f"> {self._masked(asked[:200])}"]
        for head, body in answers:
            text = shown(body)
            masked = self._masked(text)
            length = r"\1<n>" if masked != text else r"\g<0>"
            told = re.sub(r"(?i)(content-length: )\d+", length, self._masked(head))
            lines += [told.rstrip("\n"), "", *([masked] if masked else [])]
        return "\n".join(lines).rstrip("\n") + "\n"

    def grpc(self, cases: Iterable[Grpc]) -> str:
        """The messages, the status and the metadata of each call."""
        with grpc.insecure_channel(self._server.grpc_address) as channel:
            return "\n".join("\n".join(_called(channel, case, self._masked, self._words)) for case in cases)


def _answer(reader: BufferedReader, *, bodiless: bool) -> tuple[str, bytes]:
    """Head and body; of a body in chunks what is in them, since how many they are is for the moment to say."""
    lines = []
    while (line := reader.readline()) not in {b"\r\n", b""}:
        lines.append(line.decode("latin-1").replace("\r\n", "\n"))
    assert lines, "the connection closed without an answer"
    head = "".join(lines)
    if bodiless or " 204 " in lines[0]:
        return head, b""
    if "transfer-encoding: chunked" in head.lower():
        body = b""
        while size := int(reader.readline(), 16):
            body += reader.read(size + 2)[:-2]
        assert reader.readline() == b"\r\n"
        return head, body
    length = re.search(r"(?i)content-length: (\d+)", head)
    return head, reader.read(int(length[1])) if length else reader.read()


def shown(data: bytes) -> str:
    """Bytes as text; see the module."""
    pieces = re.split(rb"(\n)", data.replace(b"\\", b"\\\\"))
    text = "".join("\\n\n" if piece == b"\n" else piece.decode("latin-1") for piece in pieces)
    return "".join(letter if letter == "\n" or " " <= letter <= "~" else f"\\x{ord(letter):02x}" for letter in text)


def _called(channel: grpc.Channel, case: Grpc, masked: Masks, words: Mapping[str, str]) -> list[str]:
    path = case.method if case.method.startswith("/") else f"{_SERVICE}{case.method}"
    requests = [each if isinstance(each, bytes) else each.SerializeToString() for each in case.requests]
    for word, meant in words.items():  # as long as the word, or no message would be left
        requests = [
            each.replace(word.encode(), meant.encode()) for each in requests if len(word) == len(meant)
        ] or requests
    options = {"metadata": tuple(case.metadata.items()), "compression": case.compression, "timeout": PATIENCE}
    lines = [f"## {case.name}", f"> {case.method}"]
    if case.method == _STREAM:
        call = channel.stream_stream(path)(iter(requests), **options)
    else:
        call = channel.unary_stream(path)(requests[0], **options)
    with suppress(grpc.RpcError):  # its status is told below
        for message in call:
            lines += _message(case.method, message, masked)
    metadata = [f"{name}: {value!r}" for name, value in (*call.initial_metadata(), *call.trailing_metadata())]
    return [*lines, masked("\n".join([f"{call.code().name} {call.details()}".rstrip(), *metadata])), ""]


def _message(method: str, data: bytes, masked: Masks) -> list[str]:
    """What a message says; and of its bytes what protobuf's own library would have written otherwise."""
    if method.startswith("/"):
        return [f"< {shown(data)}"]
    message = getattr(pb, f"{method}Response")()
    message.ParseFromString(data)
    text = text_format.MessageToString(message, use_short_repeated_primitives=True).rstrip("\n")
    if (told := masked(text)) != text:
        return [f"< {method}Response", told]
    has_map = re.search(r"^\s*key: ", text, re.MULTILINE)  # whose entries come in any order
    own = has_map or message.SerializeToString(deterministic=True) == data
    return [f"< {method}Response, {len(data)} bytes{'' if own else f' {hashlib.sha256(data).hexdigest()[:12]}'}", text]
