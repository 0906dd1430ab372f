"""What models took when they were measured, kept over restarts: the estimate for their next load, and for others'.

Remembered by what was loaded and how, never by a name. Models take a multiple of their files, learned as it differs by
framework and machine, and something that no file tells, which hides what a small one's weights take: a larger one is
expected to take more by the handler's own idea. Too small an estimate costs a second load; too large a one costs others
their place, or has a model refused that would fit. Thread-safe: load threads ask and tell, the event loop snapshots.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from dataclasses import replace
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, NamedTuple

from model_handlers.base import Footprint
from serve.state_file import rows_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from serve.state_file import Change

FORM = "mme footprints 2"
REMEMBERED = 32  # models of a handler, the latest
SMALLEST = 1 << 20  # bytes on disk; below it what a session takes by itself hides what its weights take
_GROWN_PART = 4
_ARTIFACTS = 10_000  # one more forgets the one unused for longest
_FEW = 3
_QUANTILE = 0.9
_BOUNDS = (0.05, 20.0)  # of bytes in memory per byte on disk


class Seen(NamedTuple):
    """A model that was measured: bytes of its files, which are `SMALLEST` at least, and of memory."""

    on_disk: int
    taken: int


def expected(seen: Sequence[Seen], on_disk: int, factor: float) -> int:
    """Bytes of memory that a model with so many bytes on disk is going to take.

    While few models have been seen it is the most that they and the handler let expect; later, what nine of ten of them
    did not exceed, so that one strange model does not make all others look large. `factor` is the handler's own idea of
    bytes in memory per byte on disk.
    """
    ranked = sorted(_expected_by(one, on_disk, factor) for one in seen)
    if len(ranked) < _FEW:
        return int(max([factor * on_disk, *ranked]))
    return int(ranked[math.ceil(_QUANTILE * len(ranked)) - 1])


def _expected_by(one: Seen, on_disk: int, factor: float) -> float:
    low, high = _BOUNDS
    ratio = min(max(one.taken / one.on_disk, low), high)
    alike = min(on_disk, one.on_disk)
    return ratio * alike + min(ratio, factor) * (on_disk - alike)


class Footprints:
    """The memory of all measurements, from a `document` that `snapshot` made; what makes no sense in it is left out."""

    def __init__(self, document: Mapping[str, Any] | None = None, budget: Footprint | None = None) -> None:
        self._budget = budget or Footprint()
        self._lock = threading.Lock()
        self._seen: dict[str, Footprint] = {}  # the one unused for longest first; a snapshot takes it at one stroke
        self._models: dict[str, deque[Seen]] = {}
        self._changed: dict[tuple[str, str], None] = {}  # section and key
        document = document or {}
        for identity, row in rows_of(document, "seen"):
            footprint = _footprint(row)
            if footprint is not None:
                self._remember(identity, footprint)
        for key, rows in rows_of(document, "models"):
            if isinstance(rows, list) and all(map(_is_seen, rows)):
                self._models[key] = deque((Seen(*row) for row in rows), REMEMBERED)
        self._changed.clear()

    def __repr__(self) -> str:
        return f"<Footprints of {len(self._seen)} artifacts, by {len(self._models)} kinds of handlers>"

    def expected(
        self, identity: str, backend: str, on_disk: Footprint, factor: float, *, watched: bool = False
    ) -> Footprint:
        """What an artifact is going to take: what is to be loaded, and how, and by whose handler.

        `on_disk` are bytes of its files, as often as each kind of memory is to hold them. A load that is `watched` is
        stopped where it takes too much of the host, as one is of a device by its driver: then a guess is no more than a
        whole budget that the files fit.
        """
        with self._lock:
            seen = self._seen.get(identity)
            if seen is not None:
                self._remember(identity, seen)
                return seen
            on_host, on_device = (self._models.get(f"{backend} {kind}", ()) for kind in ("host", "device"))
            host = expected(on_host, on_disk.host, factor)
            devices = [expected(on_device, size, factor) for size in on_disk.devices]
        there = self._budget.devices[: len(devices)]
        return Footprint(
            _tried(host, on_disk.host, self._budget.host) if watched else host,
            tuple(_tried(*each) for each in zip_longest(devices, on_disk.devices, there, fillvalue=0)),
        )

    def known(self, identity: str) -> Footprint | None:
        """What an artifact was measured to take, if it was."""
        with self._lock:
            return self._seen.get(identity)

    def measured(self, identity: str, backend: str, on_disk: Footprint, taken: Footprint) -> None:
        with self._lock:
            self._remember(identity, taken)
            self._learn(f"{backend} host", on_disk.host, taken.host)
            for size, bytes_taken in zip_longest(on_disk.devices, taken.devices, fillvalue=0):
                self._learn(f"{backend} device", size, bytes_taken)

    def _learn(self, key: str, on_disk: int, taken: int) -> None:
        if on_disk >= SMALLEST:
            self._models.setdefault(key, deque(maxlen=REMEMBERED)).append(Seen(on_disk, taken))
            self._changed["models", key] = None

    def takes_at_least(self, identity: str, taken: Footprint) -> None:
        with self._lock:
            before = self._seen.get(identity, taken)
            self._remember(identity, replace(before.most(taken), shared=before.shared))

    def grew(self, identity: str, at_load: Footprint, now: Footprint) -> None:
        """Remember what an artifact took at its load, and by now that it executes: the next load reserves that much.

        Of what its executions took that is no more than a part of the budget: code that keeps everything would have
        all others leave for its next load.
        """
        most = at_load + self._budget.scaled(1 / _GROWN_PART)
        with self._lock:
            if identity in self._seen:
                self._remember(identity, replace(now.within(most).most(at_load), shared=self._seen[identity].shared))

    def _remember(self, identity: str, footprint: Footprint) -> None:
        self._seen.pop(identity, None)
        self._seen[identity] = footprint
        self._note(identity)
        if len(self._seen) > _ARTIFACTS:
            forgotten = next(iter(self._seen))
            del self._seen[forgotten]
            self._note(forgotten)

    def _note(self, identity: str) -> None:
        self._changed.pop(("seen", identity), None)  # to the end: they are in the order of use
        self._changed["seen", identity] = None

    def changes(self) -> list[Change]:
        with self._lock:
            changed, self._changed = self._changed, {}
            return [(section, key, self._value(section, key)) for section, key in changed]

    def _value(self, section: str, key: str) -> Any:
        if section == "models":
            return [list(one) for one in self._models[key]]
        return _row(self._seen[key]) if key in self._seen else None

    def snapshot(self) -> dict[str, Any]:
        """See `serve.state_file.Source`; the artifact unused for longest is first."""
        with self._lock:
            seen = list(self._seen.items())
            models = {key: [list(one) for one in models] for key, models in self._models.items()}
        return {"seen": {identity: _row(footprint) for identity, footprint in seen}, "models": models}


def _tried(guess: int, files: int, whole: int) -> int:
    return min(guess, whole) if files <= whole else guess


def _is_seen(row: Any) -> bool:
    return (
        isinstance(row, list)
        and len(row) == len(Seen._fields)
        and all(isinstance(number, int) for number in row)
        and row[0] >= SMALLEST
        and row[1] >= 0
    )


def _row(footprint: Footprint) -> dict[str, Any]:
    row: dict[str, Any] = {"host": footprint.host, "devices": footprint.devices}
    return row | {"shared": dict(footprint.shared)} if footprint.shared else row


def _footprint(row: Any) -> Footprint | None:
    """A footprint out of a file that may be of a later version, or damaged."""
    if not isinstance(row, dict):
        return None
    host, devices, shared = row.get("host", 0), row.get("devices", ()), row.get("shared", {})
    if not isinstance(devices, list | tuple) or not isinstance(shared, dict):
        return None
    if not all(isinstance(n, int) and n >= 0 for n in (host, *devices, *shared.values())):
        return None
    return Footprint(host, tuple(devices), shared)
