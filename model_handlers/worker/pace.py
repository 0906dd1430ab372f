"""How many requests may cross to a model's process together, of those that it executes one by one. PURE.

Their answers come back together as well: the first of them waits for the last. So they are as many as take about a
millisecond, by the mean of the executions of late; one that took far longer counts in full, so that only many quick
ones after it win back trust. After a death each request crosses alone for a while: whichever of them it was that the
process died of, those that were executed just before it went down with it.

Times are nanoseconds of one monotonic clock.
"""

from __future__ import annotations

_MOST = 32
_TOGETHER_NS = 1_000_000
_FAR_TOO_LONG_NS = 10_000_000  # it was no accident; and what a model is expected to take at first
_WEIGHT = 1 / 16  # of the newest
_ALONE_NS = 60_000_000_000  # after a death
_BYTES = 64 << 10  # of all inputs together, or all outputs: more is copied by another thread, and company saves little


class Pace:
    """Of one process."""

    def __init__(self) -> None:
        self._mean = float(_FAR_TOO_LONG_NS)
        self._bytes = 1
        self._alone_until = 0

    def __repr__(self) -> str:
        return f"<Pace: {self._mean / 1000:.0f} us, {self._bytes} bytes>"

    def together(self, now: int) -> int:
        """How many requests may cross together next."""
        most = min(_MOST, int(_TOGETHER_NS / max(self._mean, 1.0)), _BYTES // self._bytes)
        return 1 if most < 2 or now < self._alone_until else most

    def learn(self, took: int, requests: int, size: int) -> None:
        """So many requests were executed in so long all together; each had so many bytes of inputs, or of outputs."""
        self._bytes = max(size, 1)
        if took > _FAR_TOO_LONG_NS:
            self._mean = float(took)
        else:
            self._mean += (took / requests - self._mean) * _WEIGHT

    def died(self, now: int) -> None:
        """The process died."""
        self._mean = float(_FAR_TOO_LONG_NS)
        self._alone_until = now + _ALONE_NS
