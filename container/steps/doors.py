"""Which requests a port lets in by their head: by the host and the page that they come from, then by their key."""

from __future__ import annotations

from typing import TYPE_CHECKING

from container.http1 import Refusal

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from container.steps.access import Access
    from container.steps.keys import Denial, Keys

    RoleOf = Callable[[str, bytes], str | None]


class Doors:
    """The gate of an HTTP server.

    Args:
        access: who is let in by host and page.
        keys: that there are, None where none is needed.
        role_of: what a key has to be for, by method and target: see `restrictions.role_of_route`.
    """

    def __init__(self, access: Access, keys: Keys | None, role_of: RoleOf) -> None:
        self._access = access
        self._keys = keys
        self._role_of = role_of

    def refusal(self, method: str, target: bytes, headers: Mapping[str, str], host: str | None) -> Refusal | None:
        """Return what is answered to a request that is not let in; see `Access.refusal`."""
        refusal = self._access.refusal(method, target, headers, host)
        if refusal is not None or self._keys is None:
            return refusal
        role = self._role_of(method, target)
        denial = None if role is None else self._keys.denial(role, headers.get("authorization"))
        return None if denial is None else refused(denial)


def refused(denial: Denial) -> Refusal:
    """What is answered over HTTP where a key is missing, unknown, or not for this."""
    if denial.known:
        return Refusal(403, denial.sentence)
    return Refusal(401, denial.sentence, b"WWW-Authenticate: Bearer\r\n")
