"""When a request to S3 is sent again: in place of botocore's rules, which know no `Retry-After` and no end of a load.

A pause doubles with each try, and half of it is chance, so that servers that met the same fault do not come back at
once; it is as long as the service asks for, and one that asks for more than half a minute is left alone. The thread
that waits looks up whenever its load may have been given up.
"""

from __future__ import annotations

import random
import threading
import time
from contextlib import contextmanager
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any

from botocore.exceptions import ConnectionError as NoConnectionError
from botocore.exceptions import HTTPClientError, SSLError

from model_handlers.cancel_token import NEVER

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from model_handlers.cancel_token import CancelToken

    _Response = tuple[Any, Mapping[str, Any]]  # as it came, and as it was read

BUSY = (429, *range(500, 600))  # statuses that say nothing about what was asked for
_FIRST_SECONDS = 0.4
_MOST_SECONDS = 30.0  # that a service may ask for
_HURRIED_ATTEMPTS = 2
_PASSING = ("RequestTimeout", "RequestTimeoutException")  # codes of a 400 that may come right


def pause(attempt: int) -> float:
    """Seconds to wait behind a try, counted from 1."""
    return _FIRST_SECONDS * 2.0 ** (attempt - 1) * random.uniform(0.5, 1.0)  # noqa: S311 - nothing is kept secret


def asked_pause(headers: Mapping[str, str]) -> float:
    """The seconds that an answer asks to be left alone for, by its headers in lower case; 0 for none."""
    text = headers.get("retry-after", "").strip()
    if text.isascii() and text.isdigit():
        return float(text[:9])
    try:
        return max(parsedate_to_datetime(text).timestamp() - time.time(), 0.0) if text else 0.0
    except (ValueError, OverflowError):
        return 0.0


class Retries:
    """Asked by a client of botocore after each try, on the thread that asks S3.

    Args:
        attempts: of each request, before its error counts.
    """

    def __init__(self, attempts: int) -> None:
        self._attempts = attempts
        self._here = threading.local()

    def __repr__(self) -> str:
        return f"<Retries, {self._attempts} attempts>"

    @contextmanager
    def for_load(self, token: CancelToken, *, hurried: bool = False) -> Iterator[None]:
        """What this thread asks in there it asks as long as that is not given up; in a hurry, twice."""
        self._here.token, self._here.hurried = token, hurried
        try:
            yield
        finally:
            del self._here.token, self._here.hurried

    def __call__(
        self,
        response: _Response | None,
        caught_exception: Exception | None,
        attempts: int,
        **_: object,
    ) -> int | None:
        """Wait, and have the request sent again by 0; None where its answer, or its error, is what there is."""
        most = _HURRIED_ATTEMPTS if getattr(self._here, "hurried", False) else self._attempts
        if attempts >= min(most, self._attempts) or not _may_come_right(response, caught_exception):
            return None
        asked = asked_pause(_headers(response))
        if asked > _MOST_SECONDS:
            return None
        return 0 if self._waited(max(pause(attempts), asked)) else None

    def _waited(self, seconds: float) -> bool:
        """Whether so much time has gone by and the answer is still wanted."""
        token: CancelToken = getattr(self._here, "token", NEVER)
        return token.sleep(seconds)


def _may_come_right(response: _Response | None, error: Exception | None) -> bool:
    if response is None:
        return isinstance(error, (NoConnectionError, HTTPClientError)) and not isinstance(error, SSLError)
    answer, parsed = response
    return answer.status_code in BUSY or parsed.get("Error", {}).get("Code") in _PASSING


def _headers(response: _Response | None) -> dict[str, str]:
    return {} if response is None else {str(name).lower(): str(text) for name, text in response[0].headers.items()}
