"""The container over HTTP, as SageMaker asks it: health, LOAD, LIST, UNLOAD, invocations.

One connection a request. What the container says is handed on as it is; only that it says nothing, or not in time,
is an error here. Thread-safe, blocking.
"""

from __future__ import annotations

import http.client
import json
import time
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import quote, urlsplit

from container.ship.client import NO_IDENTITY

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from container.ship.client import Identity

TARGET_MODEL = "X-Amzn-SageMaker-Target-Model"
_JSON = "application/json"
_PING_SECONDS = 2.0  # what SageMaker grants
_PIECE = 1 << 16


@dataclass(frozen=True, slots=True)
class Answer:
    """What the container said: headers under lower-case names."""

    status: int
    headers: Mapping[str, str]
    body: bytes = b""


class SilentError(Exception):
    """The container did not answer, or not in time."""


class Container:
    """A container.

    Args:
        url: where it listens.
        identity: how it is known, and we to it.
    """

    def __init__(self, url: str, identity: Identity = NO_IDENTITY) -> None:
        self.url = url.rstrip("/")
        parts = urlsplit(self.url)
        self._address = parts.netloc
        self._context = identity.context if parts.scheme == "https" else None
        self._authorization = {"Authorization": identity.authorization} if identity.key else {}

    def healthy(self, *, multi_model: bool) -> str:
        """Why SageMaker would not send this container requests yet; "" when it would."""
        paths = ("/ping", "/models") if multi_model else ("/ping",)
        for path in paths:
            try:
                status = self.ask("GET", path, b"", {}, _PING_SECONDS).status
            except SilentError as error:
                return f"GET {path}: {error}"
            if status != 200:
                return f"GET {path} answers {status} where SageMaker waits for 200"
        return ""

    def load(self, name: str, url: str, target: str, timeout: float) -> Answer:
        """LOAD: `POST /models`."""
        body = json.dumps({"model_name": name, "url": url}).encode()
        headers = {"Content-Type": _JSON, "Accept": _JSON, TARGET_MODEL: target}
        return self.ask("POST", "/models", body, headers, timeout)

    def unload(self, name: str, target: str, timeout: float) -> Answer:
        """UNLOAD: `DELETE /models/{name}`."""
        return self.ask("DELETE", f"/models/{quote(name)}", b"", {TARGET_MODEL: target}, timeout)

    def ask(self, method: str, path: str, body: bytes, headers: Mapping[str, str], timeout: float) -> Answer:
        """One request and its whole answer.

        Raises:
            SilentError: there is none.
        """
        deadline = time.monotonic() + timeout
        with closing(self._connected(timeout)) as connection:
            response = self._asked(connection, method, path, body, headers, timeout)
            whole = b"".join(self._pieces(connection, response, deadline, timeout))
            return Answer(response.status, _headers(response), whole)

    @contextmanager
    def stream(
        self, path: str, body: bytes, headers: Mapping[str, str], timeout: float
    ) -> Iterator[tuple[Answer, Iterator[bytes]]]:
        """A POST whose answer is read as it comes: status and headers, and the pieces of its body.

        Raises:
            SilentError: there is none, or it breaks off; also while the pieces are read.
        """
        deadline = time.monotonic() + timeout
        with closing(self._connected(timeout)) as connection:
            response = self._asked(connection, "POST", path, body, headers, timeout)
            pieces = self._pieces(connection, response, deadline, timeout)
            yield Answer(response.status, _headers(response)), pieces

    def _asked(
        self,
        connection: http.client.HTTPConnection,
        method: str,
        path: str,
        body: bytes,
        headers: Mapping[str, str],
        timeout: float,
    ) -> http.client.HTTPResponse:
        with self._silence(timeout):
            sent: dict[str, str | bytes] = {**headers, **self._authorization}
            if TARGET_MODEL in headers:
                sent[TARGET_MODEL] = headers[TARGET_MODEL].encode()  # UTF-8, as boto3 sends it
            connection.request(method, path, body or None, sent)
            return connection.getresponse()

    def _pieces(
        self,
        connection: http.client.HTTPConnection,
        response: http.client.HTTPResponse,
        deadline: float,
        timeout: float,
    ) -> Iterator[bytes]:
        """The body as it comes; the time is for all of it, however often something comes."""
        while True:
            with self._silence(timeout):
                if connection.sock is not None:  # not any more where the last piece has come
                    connection.sock.settimeout(max(deadline - time.monotonic(), 0.001))
                piece = response.read1(_PIECE)
            if not piece:
                return
            yield piece

    def _connected(self, timeout: float) -> http.client.HTTPConnection:
        patience = max(timeout, 0.001)
        if self._context is None:
            return http.client.HTTPConnection(self._address, timeout=patience)
        return http.client.HTTPSConnection(self._address, timeout=patience, context=self._context)

    @contextmanager
    def _silence(self, timeout: float) -> Iterator[None]:
        try:
            yield
        except TimeoutError as error:
            raise SilentError(f"no answer within {timeout:.0f} s") from error
        except (OSError, http.client.HTTPException) as error:
            what = str(error) or type(error).__name__
            raise SilentError(f"the container at {self.url} does not answer: {what}") from error


def _headers(response: http.client.HTTPResponse) -> dict[str, str]:
    return {name.lower(): value for name, value in response.getheaders()}
