"""How every command asks a server over HTTP, and what it makes of the answer.

The server's own sentence is what one reads when it refuses.
"""

from __future__ import annotations

import http.client
import json
import re
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from container.ship.flags import DEFAULT_URL
from model_handlers.errors import Kind, MmeError, invalid_argument

if TYPE_CHECKING:
    from collections.abc import Mapping

_JSON = "application/json"


@dataclass(frozen=True, slots=True)
class Answer:
    """What a server said: headers under lower-case names, and the body."""

    headers: Mapping[str, str]
    body: bytes


def post(url: str, body: bytes | None, headers: Mapping[str, str], timeout: float) -> Answer:
    """The answer to a POST, or to a GET where there is no body.

    Raises:
        MmeError: UNAVAILABLE when the server cannot be reached, or its own sentence.
    """
    request = urllib.request.Request(url, data=body, headers=dict(headers))  # noqa: S310 - checked_url has seen it
    try:
        with urllib.request.urlopen(request, timeout=timeout) as response:  # noqa: S310
            return Answer({name.lower(): value for name, value in response.headers.items()}, response.read())
    except urllib.error.HTTPError as error:
        with error:
            raise MmeError(Kind.UNAVAILABLE, f"{error.code} {error.reason}: {sentence_of(error.read())}") from error
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", None) or error
        what = f"{url} does not answer: {reason or type(reason).__name__}; is the server up?"
        raise MmeError(Kind.UNAVAILABLE, what) from error


def ask(url: str, body: bytes | None, timeout: float) -> tuple[Any, Mapping[str, str]]:
    """The JSON that a server answers, and its headers under lower-case names.

    Raises:
        MmeError: it cannot be reached, its own sentence, or it answers something else.
    """
    answer = post(url, body, {"Content-Type": _JSON}, timeout)
    try:
        return json.loads(answer.body), answer.headers
    except ValueError as error:
        raise MmeError(Kind.UNAVAILABLE, f"{url} answers no JSON: is it a server of models?") from error


def sentence_of(body: bytes) -> str:
    """What an error body says: its `error` or `message`, else the beginning of the text."""
    text = body.decode("utf-8", "replace")
    try:
        parsed = json.loads(text)
    except ValueError:
        return text[:500]
    if isinstance(parsed, dict):
        return str(next((parsed[key] for key in ("error", "message", "Message") if key in parsed), parsed))
    return text[:500]


def checked_url(url: str) -> str:
    """A server's address without a slash at its end.

    Raises:
        MmeError: INVALID_ARGUMENT when it is none.
    """
    if not re.match(r"https?://[^/]", url):
        raise invalid_argument(f"--url '{url}' is not an address such as {DEFAULT_URL}")
    return url.rstrip("/")
