"""Which requests are let in by the host that they ask, and by the page that sends them.

A browser sends requests for any page that it shows, and reaches servers that nothing else from outside reaches. Its
headers tell:

    Host, :authority          whom it believes to ask. A page whose own name leads to 127.0.0.1 (DNS rebinding) says
                              that name, so a server on loopback answers to none but local ones.
    Origin, Sec-Fetch-Site    which page asks. A page of another site may not change anything: load, unload or infer,
                              which loads a model that is not in memory.

Clients that are no browsers send neither Origin nor Sec-Fetch-Site. HTTP/1.0 may leave Host out, which no browser does.
"""

from __future__ import annotations

import re
from ipaddress import ip_address
from typing import TYPE_CHECKING

from container.control.targets import only_reads, parse_target
from container.http1 import Refusal

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

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


class Access:
    """Decides by a request's headers whether it is let in.

    Args:
        allowed: hosts that count as the server's own besides local ones, `*.example.com` for all below a domain.
        local: whether the server listens on loopback, and so answers to no other host.
    """

    def __init__(self, allowed: Sequence[str] = (), *, local: bool) -> None:
        self._names = frozenset(name for name in allowed if not name.startswith("*"))
        self._suffixes = tuple(name[1:] for name in allowed if name.startswith("*"))
        self._local = local
        self._answered: str | None = None  # the last host that was not refused, as clients repeat theirs

    def refusal(self, method: str, target: bytes, headers: Mapping[str, str], host: str | None) -> Refusal | None:
        """Return what is answered to a request that is not let in; None for one that is.

        Args:
            method: the request's.
            target: its path and query.
            headers: by lower-case name.
            host: that it asks, with the port; None where it does not say.
        """
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
