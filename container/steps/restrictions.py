"""What headers decide: which parts of the protocols want a secret, and which headers models see. PURE.

    --http-restricted-api=model-repository,trace:admin-key=secret        a header of that name with that value
    --grpc-restricted-protocol=model-repository,trace:admin-key=secret   metadata, named triton-grpc-protocol-admin-key

Over HTTP it is the route that belongs to a category, never what a client wrote. What is in no category is free:
/metrics above all. Headers whose names match the operator's pattern become parameters of the request, as tritonserver's
flags have it: the pattern is looked for anywhere in a name, letter case does not count unless it begins with (?-i), and
a header wins over a parameter of that name in the body: what a proxy adds is not for clients to say.
"""

from __future__ import annotations

import hmac
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from container.codec.fields import RESERVED
from container.http1.head import Headers
from container.inference.headers import text_of
from model_handlers.errors import Kind, MmeError, invalid_argument

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from serve.request import InferenceRequest


CATEGORIES = (
    "health",
    "metadata",
    "inference",
    "shared-memory",
    "model-config",
    "model-repository",
    "statistics",
    "trace",
    "logging",
)
GRPC_PREFIX = "triton-grpc-protocol-"

# Rules of routes, by their form: the first that matches.
_ROUTES = (
    (re.compile(r"/ping|/v2/health/.*|/v2/models/.*/ready"), "health"),
    (
        re.compile(r"/invocations|/models/.*/invoke|/endpoints/.*|/v2/models/.*/(infer|generate|generate_stream)"),
        "inference",
    ),
    (re.compile(r"/v2/(system|cuda)sharedmemory.*"), "shared-memory"),
    (re.compile(r"/v2/models/.*/config"), "model-config"),
    (re.compile(r"/v2/repository/.*|/models.*"), "model-repository"),
    (re.compile(r"/v2/models/(.*/)?stats|/dashboard.*"), "statistics"),
    (re.compile(r"/v2/(.*/)?trace/setting"), "trace"),
    (re.compile(r"/v2/logging"), "logging"),
    (re.compile(r"/v2|/v2/models/.*"), "metadata"),
)
_METHODS = {
    **dict.fromkeys(("ServerLive", "ServerReady", "ModelReady", "Check", "Watch"), "health"),
    **dict.fromkeys(("ServerMetadata", "ModelMetadata"), "metadata"),
    **dict.fromkeys(("ModelInfer", "ModelStreamInfer"), "inference"),
    "ModelConfig": "model-config",
    **dict.fromkeys(("RepositoryIndex", "RepositoryModelLoad", "RepositoryModelUnload"), "model-repository"),
    "ModelStatistics": "statistics",
    "TraceSetting": "trace",
    "LogSettings": "logging",
}

# What needs no key: health, for probes of the platform, and a page that holds nothing before it has one.
_OPEN_ROUTES = ("/ping", "/v2/health/live", "/v2/health/ready", "/dashboard", "/dashboard/static/<path:filename>")
_OPEN_METHODS = ("ServerLive", "ServerReady", "Check", "Watch")
_FREE_ROUTES = {"/metrics": "statistics", "/execution-parameters": "metadata"}


@dataclass(frozen=True, slots=True)
class Restriction:
    """Categories that want a header.

    Attributes:
        categories: of `CATEGORIES`.
        header, value: which, and what it has to say.
    """

    categories: tuple[str, ...]
    header: str
    value: str

    def __str__(self) -> str:
        return f"{','.join(self.categories)}:{self.header}={self.value}"


class Restrictions:
    """What requests have to bring, by category.

    Args:
        given: the operator's.
        prefix: what stands before the names of headers.
        what: how a sentence calls what is restricted.
    """

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
        """Check that a request brings what its category wants.

        Args:
            category: "" for none.
            headers: the request's, by lower-case name.

        Raises:
            MmeError: RESTRICTED.
        """
        if category not in self._wanted:
            return
        header, value = self._wanted[category]
        if not hmac.compare_digest(headers.get(header.lower(), "").encode("utf-8", "replace"), value.encode()):
            raise MmeError(Kind.RESTRICTED, f"This {self._what} is restricted, expecting header '{header}'")


def category_of_route(rule: str) -> str:
    """The category of a route by its rule, "" for none."""
    return next((category for form, category in _ROUTES if form.fullmatch(rule)), "")


def category_of_method(method: str) -> str:
    """The category of a gRPC method by its name."""
    return _METHODS.get(method, "shared-memory" if "SharedMemory" in method else "")


def role_of_route(rule: str) -> str | None:
    """What a key has to be for by a route's rule: a category, "" for any key, None where none is needed."""
    return None if rule in _OPEN_ROUTES else category_of_route(rule) or _FREE_ROUTES.get(rule, "")


def role_of_method(method: str) -> str | None:
    """The same of a gRPC method by its name."""
    return None if method in _OPEN_METHODS else category_of_method(method)


_CASE_COUNTS = "(?-i)"
_NEVER = RESERVED | {"headers"}


class Forwarding:
    """What is handed to models.

    Args:
        pattern: of the names of headers.

    Raises:
        re.error: it is none.
    """

    def __init__(self, pattern: str) -> None:
        bare = pattern.removeprefix(_CASE_COUNTS)
        self._wanted = re.compile(bare, 0 if bare != pattern else re.IGNORECASE)

    def add(self, request: InferenceRequest, headers: Mapping[str, str]) -> None:
        """Add the parameters to a request that came with such headers.

        Raises:
            MmeError: INVALID_ARGUMENT for a header that is called as a parameter with a meaning of its own.
        """
        found = {name: value for name, value in _as_sent(headers) if self._wanted.search(name)}
        for name in found:
            if name.lower() in _NEVER or name.lower().startswith("triton_"):
                raise invalid_argument(f"Header '{name}' is reserved for Triton usage and cannot be forwarded.")
        if found:
            request.parameters = {**(request.parameters or {}), **found}


def forwarding(pattern: str) -> Forwarding | None:
    """What a pattern has handed to models, None for ""."""
    return Forwarding(pattern) if pattern else None


def _as_sent(headers: Mapping[str, str]) -> Iterable[tuple[str, str]]:
    if not isinstance(headers, Headers):
        return headers.items()
    return ((text_of(name), text_of(value.rstrip())) for name, value in headers.fields)
