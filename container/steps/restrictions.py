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

from container.codec.request import RESERVED
from container.http1.rules import Headers
from container.inference.headers import text_of
from model_handlers.errors import Kind, MmeError, invalid_argument

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from serve.request import InferenceRequest


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
