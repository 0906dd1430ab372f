"""How many requests a second an endpoint takes before SageMaker throttles it. PURE: a bucket of tokens."""

from __future__ import annotations


class Throttle:
    """Takes `rate` requests a second on average, and as many at once; a rate of 0 takes all."""

    def __init__(self, rate: float, now: float) -> None:
        self._rate = rate
        self._tokens = max(rate, 1.0)
        self._seen = now

    def admits(self, now: float) -> bool:
        """Whether a request that comes now is taken; one that is counts."""
        if not self._rate:
            return True
        self._tokens = min(self._tokens + (now - self._seen) * self._rate, max(self._rate, 1.0))
        self._seen = now
        if self._tokens < 1.0:
            return False
        self._tokens -= 1.0
        return True
