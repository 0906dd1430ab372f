"""Which parts of the protocols only those may use who know a secret, as tritonserver's two flags say it. PURE.

    --http-restricted-api=model-repository,trace:admin-key=secret        a header of that name with that value
    --grpc-restricted-protocol=model-repository,trace:admin-key=secret   metadata, named triton-grpc-protocol-admin-key

Over HTTP it is the rule of a route that belongs to a category, never what a client wrote, so that there is no other way
to write it. What is in no category is free: /metrics above all.
"""

from __future__ import annotations

import hmac
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from model_handlers.errors import Kind, MmeError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

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
