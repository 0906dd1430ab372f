"""Headers that models see: those whose names match the operator's pattern become parameters of the request. PURE.

As tritonserver's two flags have it: the pattern is looked for anywhere in a name, letter case does not count unless it
begins with (?-i), and a parameter is called as its header was sent. A header wins over a parameter of that name in the
body: what a proxy adds is not for clients to say.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from container.codec.fields import RESERVED
from container.http1.head import Headers
from container.inference.headers import text_of
from model_handlers.errors import invalid_argument

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from serve.request import InferenceRequest

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
