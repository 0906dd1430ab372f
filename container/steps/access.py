"""Which requests are let in by their head: by host and page, by key, by an operator's secret. And headers for models.

A browser sends requests for any page that it shows, and reaches servers that nothing else from outside reaches. Its
headers tell:

    Host, :authority          which host it asks. A page whose own name leads to 127.0.0.1 (DNS rebinding) says
                              that name, so a server on loopback answers to none but local ones.
    Origin, Sec-Fetch-Site    which page asks. A page of another site may not change anything: load, unload or infer,
                              which loads a model that is not in memory.

Clients that are no browsers send neither Origin nor Sec-Fetch-Site. HTTP/1.0 may leave Host out, which no browser does.

Keys stand in a file by their hashes (`sha256:<64 hexadecimal digits> inference,health     # a comment`), each with the
categories that it is for, or `*`. A client sends `Authorization: Bearer KEY`, over gRPC as metadata. A request of no
category wants a key all the same. Keys are long and drawn by chance, so that a plain hash of one can't be reversed.

Parts of the protocols may want a secret. Over HTTP it is the route that belongs to a category, never what a client
wrote. What is in no category is free: /metrics above all.

    --http-restricted-api=model-repository,trace:admin-key=secret        a header of that name with that value
    --grpc-restricted-protocol=model-repository,trace:admin-key=secret   metadata, named triton-grpc-protocol-admin-key

Headers whose names match the operator's pattern become parameters of the request, as tritonserver's flags have it: the
pattern is looked for anywhere in a name, letter case does not count unless it begins with (?-i), and a header wins over
a parameter of that name in the body: what a proxy adds is not for clients to say.
"""

from __future__ import annotations

import hmac
import re
import socket
from dataclasses import dataclass
from hashlib import sha256
from ipaddress import ip_address
from typing import TYPE_CHECKING, NamedTuple

from container.codec.request import RESERVED
from container.control.routes import CATEGORIES, only_reads, parse_target
from container.http1 import Refusal
from container.http1.rules import Headers, text_of
from container.process.resources import Followed
from model_handlers.errors import Kind, MmeError, invalid_argument

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from serve.request import InferenceRequest


_AUTHORITY = re.compile(r"(\[[0-9a-f:.]+\]|[^:@/\[\]\s]+)(?::[0-9]*)?")
_LOCAL = re.compile(r"localhost|127(?:\.[0-9]{1,3}){3}|\[::1\]")
_SHOWN = 100  # characters of a client's text in a message
_SIMPLE = ("text/plain", "application/x-www-form-urlencoded", "multipart/")  # what a form can send
_SETTING = "--allowed-hosts/MME_ALLOWED_HOSTS"


def is_local(address: str) -> bool:
    """Whether an address that a server listens on is reached from its own machine alone."""
    try:
        return ip_address(address).is_loopback
    except ValueError:
        return address.lower() == "localhost"


def host_of(authority: str) -> str:
    """Return the host of `host:port` in lower case, an IPv6 address in brackets; "" where it is malformed."""
    found = _AUTHORITY.fullmatch(authority.strip().lower())
    return found[1].removesuffix(".") if found else ""


def access_of(sockets: Iterable[socket.socket], allowed: Sequence[str]) -> Access:
    internet = [each for each in sockets if each.family in {socket.AF_INET, socket.AF_INET6}]
    return Access(allowed, local=bool(internet) and all(is_local(each.getsockname()[0]) for each in internet))


class Access:
    """Decides by a request's headers whether it is let in.

    Hosts that are allowed count as the server's own besides local ones, `*.example.com` for all below a domain. A
    server that is `local` listens on loopback, and answers to no other host.
    """

    def __init__(self, allowed: Sequence[str] = (), *, local: bool) -> None:
        self._names = frozenset(name for name in allowed if not name.startswith("*"))
        self._suffixes = tuple(name[1:] for name in allowed if name.startswith("*"))
        self._local = local
        self._answered: str | None = None  # the last host that was not refused, as clients repeat theirs

    def refusal(self, method: str, target: bytes, headers: Mapping[str, str], host: str | None) -> Refusal | None:
        """Return what is answered to a request that is not let in; None for one that is (`host`: None if not said)."""
        if host is not None and (why := self.unknown_host(host)):
            return Refusal(403, why)
        if "origin" not in headers and "sec-fetch-site" not in headers:
            return None
        if only_reads(method, target):
            return None
        return self._refused_page(target, headers, host or "")

    def unknown_host(self, host: str) -> str:
        """Return why a host is not answered to, "" where it is."""
        if not self._local or host == self._answered:
            return ""
        name = host_of(host)
        if _LOCAL.fullmatch(name) or self._is_allowed(name):
            self._answered = host
            return ""
        return (
            f"Host '{host[:_SHOWN]}' is not answered: the server listens on this machine alone, and answers to "
            f"localhost, 127.0.0.1, [::1] and what {_SETTING} lists"
        )

    def _is_allowed(self, name: str) -> bool:
        return name in self._names or (name.endswith(self._suffixes) and not name.startswith("."))

    def _refused_page(self, target: bytes, headers: Mapping[str, str], host: str) -> Refusal | None:
        origin = headers.get("origin")
        if self._is_foreign(origin, headers.get("sec-fetch-site", ""), host):
            page = "a page of another site" if origin is None else f"a page of '{origin[:_SHOWN]}'"
            why = f"{page} may not send what may change something here; list its host in {_SETTING} to let it"
            return Refusal(403, why)
        kind = headers.get("content-type", "").strip().lower()
        if (
            origin is not None and kind.startswith(_SIMPLE) and parse_target(target) is None
        ):  # models read what they like
            return Refusal(415, f"a browser's body of type '{kind[:_SHOWN]}' is not read here: send application/json")
        return None

    def _is_foreign(self, origin: str | None, site: str, host: str) -> bool:
        """Whether a page is none of the server's own: of what it says is its origin, and of what its browser says."""
        if origin is not None:
            authority = origin.partition("://")[2].lower()
            if authority and self._is_allowed(host_of(authority)):
                return False
            if authority != host.lower():
                return True
        return site in {"cross-site", "same-site"}


ALL = "*"
MOST_KEYS = 1000
_MOST_BYTES = 1 << 20
_LINE = re.compile(r"sha256:([0-9A-Fa-f]{64})[ \t]+(\S+)")
_BEARER = re.compile(r"bearer +([!-~]+)", re.IGNORECASE)
_NONE = "this needs a key: send it as `Authorization: Bearer KEY`"
_UNKNOWN = "the server does not know this key: send one of its key file's as `Authorization: Bearer KEY`"


class ApiKey(NamedTuple):
    """A key: the hexadecimal digits of its SHA-256, and the categories that it is for."""

    digest: str
    roles: frozenset[str]


def digest_of(key: str) -> str:
    return sha256(key.encode()).hexdigest()


def parse_roles(text: str) -> frozenset[str]:
    """Categories between commas, or `*`."""
    roles = frozenset(text.split(","))
    if roles != {ALL} and not roles <= set(CATEGORIES):
        raise ValueError(f"{ALL}, or some of {', '.join(CATEGORIES)} between commas, without spaces")
    return roles


def parse_keys(text: str) -> tuple[ApiKey, ...]:
    """The keys of a file. What is wrong is named by its line: what stands there may be a key itself."""
    found: dict[str, ApiKey] = {}
    for number, whole in enumerate(text.splitlines(), 1):
        line = whole.partition("#")[0].strip()
        if not line:
            continue
        match = _LINE.fullmatch(line)
        if match is None:
            raise ValueError(f"line {number} is not `sha256:HASH CATEGORY,…`, as `mme key` prints it")
        digest = match[1].lower()
        if digest in found:
            raise ValueError(f"line {number} repeats a key: give it its categories in one line")
        try:
            found[digest] = ApiKey(digest, parse_roles(match[2]))
        except ValueError as error:
            raise ValueError(f"line {number}: a key is for {error}") from None
        if len(found) > MOST_KEYS:
            raise ValueError(f"more than {MOST_KEYS} keys")
    return tuple(found.values())


class Keys(Followed):
    """The keys of a file, as it is now."""

    def __init__(self, path: Path) -> None:
        super().__init__(f"keys of '{path}'", [path])
        self._path = path
        self._entries: tuple[ApiKey, ...] = ()
        self.read()

    def read(self) -> None:
        label = f"--key-file/MME_KEY_FILE='{self._path}'"
        try:
            with self._path.open("rb") as file:
                data = file.read(_MOST_BYTES + 1)
        except OSError as error:
            raise invalid_argument(f"{label}: {error.strerror}") from error
        if len(data) > _MOST_BYTES:
            raise invalid_argument(f"{label}: the file has more than {_MOST_BYTES} bytes")
        try:
            self._entries = parse_keys(data.decode())
        except UnicodeDecodeError as error:
            raise invalid_argument(f"{label}: the file is no text") from error
        except ValueError as error:
            raise invalid_argument(f"{label}: {error}") from None

    def denial(self, role: str, authorization: str | None) -> Refusal | None:
        """None for a key that is for `role`, a category or ""; 401 for one that is not known, 403 for any other."""
        match = _BEARER.fullmatch((authorization or "").strip())
        entry = self._entry(match[1]) if match is not None else None
        if entry is None:
            why = _NONE if authorization is None else _UNKNOWN
            return Refusal(401, why, b"WWW-Authenticate: Bearer\r\n")
        if not role or role in entry.roles or ALL in entry.roles:
            return None
        return Refusal(403, f"the key is not for {role}: it is for {', '.join(sorted(entry.roles))}")

    def _entry(self, key: str) -> ApiKey | None:
        """The key's entry. All are looked at, each in constant time: how long it takes tells nothing."""
        digest = digest_of(key)
        found = None
        for entry in self._entries:
            if hmac.compare_digest(entry.digest, digest):
                found = entry
        return found


GRPC_PREFIX = "triton-grpc-protocol-"


@dataclass(frozen=True, slots=True)
class Restriction:
    """Categories of the route table that want a header of that value."""

    categories: tuple[str, ...]
    header: str
    value: str

    def __str__(self) -> str:
        return f"{','.join(self.categories)}:{self.header}={self.value}"


class Restrictions:
    """What requests have to bring, by category; `what` is how a sentence calls what is restricted."""

    def __init__(self, given: Iterable[Restriction], prefix: str = "", what: str = "API") -> None:
        self._wanted = {
            category: (f"{prefix}{restriction.header}", restriction.value)
            for restriction in given
            for category in restriction.categories
        }
        self._what = what

    def __bool__(self) -> bool:
        return bool(self._wanted)

    def check(self, category: str, headers: Mapping[str, str]) -> None:
        """Check that a request brings what its category wants; "" for none, headers by lower-case name."""
        if category not in self._wanted:
            return
        header, value = self._wanted[category]
        if not hmac.compare_digest(headers.get(header.lower(), "").encode("utf-8", "replace"), value.encode()):
            raise MmeError(Kind.RESTRICTED, f"This {self._what} is restricted, expecting header '{header}'")


_CASE_COUNTS = "(?-i)"
_NEVER = RESERVED | {"headers"}


class Forwarding:
    """What is handed to models of headers, by a pattern of their names."""

    def __init__(self, pattern: str) -> None:
        bare = pattern.removeprefix(_CASE_COUNTS)
        self._wanted = re.compile(bare, 0 if bare != pattern else re.IGNORECASE)

    def add(self, request: InferenceRequest, headers: Mapping[str, str]) -> None:
        found = {name: value for name, value in _as_sent(headers) if self._wanted.search(name)}
        for name in found:
            if name.lower() in _NEVER or name.lower().startswith("triton_"):
                raise invalid_argument(f"Header '{name}' is reserved for Triton usage and cannot be forwarded.")
        if found:
            request.parameters = {**(request.parameters or {}), **found}


def forwarding(pattern: str) -> Forwarding | None:
    return Forwarding(pattern) if pattern else None


def _as_sent(headers: Mapping[str, str]) -> Iterable[tuple[str, str]]:
    if not isinstance(headers, Headers):
        return headers.items()
    return ((text_of(name), text_of(value.rstrip())) for name, value in headers.fields)
