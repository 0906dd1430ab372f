"""What the cache asks of whoever fetches and loads models for it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from serve.cache.cache_entry import Resident

if TYPE_CHECKING:
    from collections.abc import Callable

    from model_handlers.base import Footprint

T = TypeVar("T", bound=Resident)
T_co = TypeVar("T_co", bound=Resident, covariant=True)


class Prepared(Protocol):
    """An artifact on disk, ready to be loaded.

    Attributes:
        estimate: what it is expected to take in memory.
        content: what it is loaded from, and as what: equal as long as none of that changes.
        download_ns: what fetching took, 0 when it was on disk.
        pinned: whether its author wants it never to be evicted.
        equipped: whether nothing is left to be done that takes long and needs no memory. See `Loader.equip`.
        tried_first: whether it may have to be tried before it is loaded. See `Loader.try_files`.
        alone: whether it is measured by what the whole process or a device takes more, so that no other such model may
            be loaded at the same time.
    """

    @property
    def estimate(self) -> Footprint: ...  # noqa: D102 - see the class
    @property
    def content(self) -> object: ...  # noqa: D102
    @property
    def download_ns(self) -> int: ...  # noqa: D102
    @property
    def pinned(self) -> bool: ...  # noqa: D102
    @property
    def equipped(self) -> bool: ...  # noqa: D102
    @property
    def tried_first(self) -> bool: ...  # noqa: D102
    @property
    def alone(self) -> bool: ...  # noqa: D102

    def release(self) -> None:
        """Its files are not needed any more: it was not loaded, or what was loaded is closed. On the event loop."""


P = TypeVar("P", bound=Prepared)


class Loader(Protocol[P, T_co]):
    """Turns a name into something resident. All methods run on a load thread.

    `cancelled` is to be polled: nobody wants what is being made any more.
    """

    def prepare(self, name: str, source: Any, cancelled: Callable[[], bool]) -> P:
        """Fetch and open the model's artifact; no memory to speak of is taken."""

    def equip(self, prepared: P, cancelled: Callable[[], bool]) -> P:
        """Make what the model brings and needs around it, where it is not equipped; that may take minutes."""

    def try_files(self, prepared: P, cancelled: Callable[[], bool]) -> None:
        """Have its files loaded, where this is not known to go well, by processes that may die of them."""

    def load(self, prepared: P, cancelled: Callable[[], bool], more: Callable[[int], int]) -> tuple[T_co, Footprint]:
        """Load it; return what was loaded and what it takes, measured.

        `more` may be called while it goes on, with the bytes of the host that have to be promised to it by now: see
        `Allowance`.
        """

    def overrule(self) -> None:
        """A load was given up and may never end, or waits for another: that need not wait for it to be measured.

        On the event loop.
        """
