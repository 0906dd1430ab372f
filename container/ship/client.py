"""How every command asks a server over HTTP, and what it makes of the answer.

The server's own sentence is what one reads when it refuses.
"""

from __future__ import annotations

import http.client
import ipaddress
import json
import re
import ssl
import urllib.error
import urllib.request
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

from container.ship.flags import DEFAULT_URL
from model_handlers.errors import Kind, MmeError, invalid_argument

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping
    from pathlib import Path

_JSON = "application/json"
_MOST_KEY = 4096  # bytes of a file with a key
_KEY = re.compile(r"[!-~]+")
LOCAL_NAME = "local"  # of an endpoint that answers to any


@dataclass(frozen=True, slots=True)
class Answer:
    """What a server said: headers under lower-case names, and the body."""

    headers: Mapping[str, str]
    body: bytes


class Identity:
    """How a server is known, and we to it; false where nothing was said of that.

    Args:
        ca: a file of certificates that vouch for the server; None for those that the system trusts.
        key: what the server wants to know of us, "" for nothing.

    Attributes:
        ca, key: the same.
    """

    def __init__(self, ca: Path | None = None, key: str = "") -> None:
        self.ca = ca
        self.key = key

    def __bool__(self) -> bool:
        return self.ca is not None or bool(self.key)

    @cached_property
    def context(self) -> ssl.SSLContext:
        """For connections by TLS.

        Raises:
            MmeError: INVALID_ARGUMENT when the file holds no certificates.
        """
        try:
            return ssl.create_default_context(cafile=self.ca)
        except OSError as error:
            raise invalid_argument(f"--ca '{self.ca}' holds no certificates in PEM: {error}") from error

    @property
    def authorization(self) -> str:
        """What a request says under that name, "" for nothing."""
        return f"Bearer {self.key}" if self.key else ""


NO_IDENTITY = Identity()


def identity_of(arguments: argparse.Namespace) -> Identity:
    """What `--ca` and `--key-file` say.

    Raises:
        MmeError: INVALID_ARGUMENT when the latter is no file with a key alone.
    """
    path: Path | None = arguments.key_file
    if path is None:
        return Identity(arguments.ca)
    with path.open("rb") as file:
        key = file.read(_MOST_KEY).decode("latin-1").strip()
    if not _KEY.fullmatch(key) or key.startswith("sha256:"):
        raise invalid_argument(f"--key-file '{path}': it has to hold a key and nothing else, as `mme key` prints it")
    return Identity(arguments.ca, key)


class LocalEndpoint(NamedTuple):
    """An endpoint of `mme local`: a name that it answers to, and the URL of the container behind it."""

    name: str
    container: str


def post(
    url: str, body: bytes | None, headers: Mapping[str, str], timeout: float, identity: Identity = NO_IDENTITY
) -> Answer:
    """The answer to a POST, or to a GET where there is no body.

    Raises:
        MmeError: UNAVAILABLE when the server cannot be reached, or its own sentence.
    """
    request = urllib.request.Request(url, data=body, headers=dict(headers))  # noqa: S310 - checked_url has seen it
    if identity.key:
        request.add_unredirected_header("Authorization", identity.authorization)
    opener = _opener(url, identity)
    try:
        with opener.open(request, timeout=timeout) as response:
            return Answer({name.lower(): value for name, value in response.headers.items()}, response.read())
    except urllib.error.HTTPError as error:
        with error:
            raise MmeError(Kind.UNAVAILABLE, f"{error.code} {error.reason}: {sentence_of(error.read())}") from error
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", None) or error
        if isinstance(reason, ssl.SSLCertVerificationError):
            what = (
                f"{url} shows a certificate that nothing vouches for ({reason.verify_message}): name who does by --ca"
            )
            raise MmeError(Kind.UNAVAILABLE, what) from error
        what = f"{url} does not answer{_by_proxy(url)}: {reason or type(reason).__name__}; is the server up?"
        raise MmeError(Kind.UNAVAILABLE, what) from error


def _opener(url: str, identity: Identity) -> urllib.request.OpenerDirector:
    """What asks a server: one of this machine without a proxy, which can't reach it, others as the environment says."""
    handlers: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({})] if _is_here(url) else []
    if url.startswith("https:"):
        handlers.append(urllib.request.HTTPSHandler(context=identity.context))
    return urllib.request.build_opener(*handlers)


def _is_here(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name
        return False


def _by_proxy(url: str) -> str:
    """The part of a sentence that says by which proxy a server was asked, "" for none."""
    parts = urlsplit(url)
    proxy = urllib.request.getproxies().get(parts.scheme)
    if not proxy or _is_here(url) or urllib.request.proxy_bypass(parts.netloc):
        return ""
    return f" by the proxy {urlsplit(proxy).hostname or 'of the environment'} (NO_PROXY lists hosts that need none)"


def ask(
    url: str, body: bytes | None, timeout: float, identity: Identity = NO_IDENTITY
) -> tuple[Any, Mapping[str, str]]:
    """The JSON that a server answers, and its headers under lower-case names.

    Raises:
        MmeError: it cannot be reached, its own sentence, or it answers something else.
    """
    answer = post(url, body, {"Content-Type": _JSON}, timeout, identity)
    try:
        return json.loads(answer.body), answer.headers
    except ValueError as error:
        raise MmeError(Kind.UNAVAILABLE, f"{url} answers no JSON: is it a server of models?") from error


def local_endpoint(url: str, timeout: float, identity: Identity = NO_IDENTITY) -> LocalEndpoint | None:
    """What `mme local` says of itself at a URL; None where there is another server, or none."""
    try:
        told, _ = ask(f"{url}/", None, timeout, identity)
    except MmeError:  # no server answers that, and one that does not answer at all is told of by the first request
        return None
    if not isinstance(told, dict) or not {"endpoint", "container", "loaded"} <= told.keys():
        return None
    return LocalEndpoint(str(told["endpoint"] or LOCAL_NAME), str(told["container"]))


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


def checked_url(url: str, flag: str = "--url") -> str:
    """A server's address without a slash at its end; `flag` gave it.

    Raises:
        MmeError: INVALID_ARGUMENT when it is none.
    """
    if not re.match(r"https?://[^/]", url):
        raise invalid_argument(f"{flag} '{url}' is not an address such as {DEFAULT_URL}")
    return url.rstrip("/")
