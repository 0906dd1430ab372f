"""Who waits for the load of whom, so that no two loads wait for each other. PURE.

A model's code may have other models loaded and unloaded, while it executes and while it is loaded itself, and calls of
models that are not in memory wait for their loads. Whoever waits for a load must not be what that load waits for.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


class LoadWaits:
    """Chains of models that wait: each for the next, the last for the load of another, or for its end."""

    def __init__(self) -> None:
        self._chains: dict[str, list[tuple[str, ...]]] = {}  # by what their last one waits for

    def __repr__(self) -> str:
        return f"<LoadWaits {self._chains}>"

    @contextmanager
    def waiting(self, chain: tuple[str, ...], name: str) -> Iterator[None]:
        """Inside, these wait for the model of that name to be loaded, or to be gone."""
        self._chains.setdefault(name, []).append(chain)
        try:
            yield
        finally:
            chains = self._chains[name]
            chains.remove(chain)
            if not chains:
                del self._chains[name]

    def behind(self, name: str) -> tuple[str, ...]:
        """Those who wait for the load of a model, or for who does; the outermost first."""
        found = [name]
        for each in found:  # which grows meanwhile
            links = dict.fromkeys(link for chain in self._chains.get(each, ()) for link in reversed(chain))
            found += [link for link in links if link not in found]
        return tuple(reversed(found[1:]))
