"""The container over HTTP, as SageMaker asks it, and what boto3 is told where it does not answer. On an event loop.

One connection a request. What the container says is handed on as it is; only that it says nothing, or not in time, is
an error here. The sentences are SageMaker's where they are known, their form the server's own.
"""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import httptools

from container.inference.errors import model_error_body, runtime_answer
from container.ship.client import NO_IDENTITY, HttpResponse

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Mapping

    from container.ship.client import Identity

TARGET_MODEL = "X-Amzn-SageMaker-Target-Model"
ACCOUNT = "000000000000"
_PING_SECONDS = 2.0  # what SageMaker grants
_PIECE = 1 << 16


class RuntimeApiError(Exception):
    """An error of the Runtime API: its class in boto3's eyes, the sentence, and what else its body has."""

    def __init__(self, name: str, message: str, **facts: Any) -> None:
        super().__init__(message)
        self.name = name
        self.message = message
        self.facts = facts

    def answer(self) -> tuple[int, bytes, bytes]:
        return runtime_answer(self.name, {"Message": self.message, **self.facts})


def invalid(sentence: str, **facts: Any) -> RuntimeApiError:
    """What SageMaker calls a ValidationError."""
    return RuntimeApiError("ValidationError", sentence, **facts)


def model_error(status: int, original: str, endpoint: str) -> RuntimeApiError:
    """A container's error, wrapped as SageMaker wraps it; status 0 means that it said nothing in time."""
    logs = f"/aws/sagemaker/Endpoints/{endpoint}"
    advice = f"See the log of `mme local`, which on AWS is the log group {logs}, for more information."
    body = model_error_body(status, original, advice, f"arn:aws:logs:us-east-1:{ACCOUNT}:log-group:{logs}")
    return RuntimeApiError("ModelError", body.pop("Message"), **body)


class SilentError(Exception):
    """The container did not answer, or not in time."""

    def __init__(self, sentence: str, *, late: bool = False) -> None:
        super().__init__(sentence)
        self.late = late

    def of_invocation(self, endpoint: str) -> RuntimeApiError:
        """The same of a request to a model."""
        if not self.late:
            return model_error(502, str(self), endpoint)
        sentence = (
            "Your invocation timed out while waiting for a response from container model. Review the latency metrics "
            "for each container in Amazon CloudWatch, resolve the issue, and try again."
        )
        return model_error(0, sentence, endpoint)


class Container:
    """A container: where it listens, how it is known, and we to it."""

    def __init__(self, url: str, identity: Identity = NO_IDENTITY) -> None:
        self.url = url.rstrip("/")
        self._parts = urlsplit(self.url)
        self._context = identity.context if self._parts.scheme == "https" else None
        self._authorization = {"Authorization": identity.authorization} if identity.key else {}

    async def healthy(self, *, multi_model: bool) -> str:
        """Why SageMaker would not send this container requests yet; "" when it would."""
        for path in ("/ping", "/models") if multi_model else ("/ping",):
            try:
                status = (await self.ask("GET", path, b"", {}, _PING_SECONDS)).status
            except SilentError as error:
                return f"GET {path}: {error}"
            if status != 200:
                return f"GET {path} answers {status} where SageMaker waits for 200"
        return ""

    async def ask(
        self, method: str, path: str, body: bytes, headers: Mapping[str, str], patience: float
    ) -> HttpResponse:
        """One request and its whole answer."""
        async with self.stream(method, path, body, headers, patience) as (answer, pieces):
            return replace(answer, body=b"".join([piece async for piece in pieces]))

    @asynccontextmanager
    async def stream(
        self, method: str, path: str, body: bytes, headers: Mapping[str, str], patience: float
    ) -> AsyncIterator[tuple[HttpResponse, AsyncIterator[bytes]]]:
        """A request whose answer is read as it comes: status and headers, and the pieces of its body.

        The time is for all of it, however often something comes.
        """
        ends = asyncio.get_running_loop().time() + patience
        writer = None
        response = _Response()

        async def in_time(work: Awaitable[Any]) -> Any:
            try:
                async with asyncio.timeout_at(ends):
                    return await work
            except TimeoutError as error:
                raise SilentError(f"no answer within {patience:.0f} s", late=True) from error
            except (OSError, httptools.HttpParserError) as error:
                what = str(error) or type(error).__name__
                raise SilentError(f"the container at {self.url} does not answer: {what}") from error

        async def pieces() -> AsyncIterator[bytes]:
            while True:
                for piece in response.taken():
                    yield piece
                if response.complete:
                    return
                await in_time(response.read(reader))

        try:
            port = self._parts.port or (443 if self._context else 80)
            connecting = asyncio.open_connection(self._parts.hostname, port, ssl=self._context)
            reader, writer = await in_time(connecting)
            writer.write(self._head(method, path, body, headers))
            writer.write(body)
            while not response.begun:
                await in_time(response.read(reader))
            yield HttpResponse(response.status, response.headers), pieces()
        finally:
            if writer is not None:
                writer.close()

    def _head(self, method: str, path: str, body: bytes, headers: Mapping[str, str]) -> bytes:
        given = {"Host": self._parts.netloc, **headers, **self._authorization, "Connection": "close"}
        if body or method == "POST":
            given["Content-Length"] = str(len(body))
        # the target in UTF-8, as boto3 sends it; the rest as it has come
        lines = [(name, value.encode("utf-8" if name == TARGET_MODEL else "latin-1")) for name, value in given.items()]
        if any(b"\r" in value or b"\n" in value for _, value in lines):
            raise ValueError("a header of a request to the container has a line break")
        head = b"".join(b"%s: %s\r\n" % (name.encode(), value) for name, value in lines)
        return b"%s %s HTTP/1.1\r\n%s\r\n" % (method.encode(), path.encode(), head)


class _Response:
    """An answer as it comes in; httptools calls its `on_` methods."""

    def __init__(self) -> None:
        self.headers: dict[str, str] = {}
        self.begun = False
        self.complete = False
        self._pieces: list[bytes] = []
        self._parser = httptools.HttpResponseParser(self)

    @property
    def status(self) -> int:
        return int(self._parser.get_status_code())

    async def read(self, reader: asyncio.StreamReader) -> None:
        """Take what comes next; the end of the connection is that of a body which tells no length."""
        data = await reader.read(_PIECE)
        if data:
            self._parser.feed_data(data)
        elif self.begun and not self.headers.keys() & {"content-length", "transfer-encoding"}:
            self.complete = True
        else:
            raise ConnectionResetError("it closed the connection")

    def taken(self) -> list[bytes]:
        pieces, self._pieces = self._pieces, []
        return pieces

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self.begun = self.status >= 200
        if not self.begun:  # an interim answer
            self.headers.clear()

    def on_body(self, data: bytes) -> None:
        self._pieces.append(data)

    def on_message_complete(self) -> None:
        self.complete = self.begun
