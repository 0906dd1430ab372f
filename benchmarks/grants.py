"""Microseconds that the rate limiter takes for a grant, over so many instances: `python -P grants.py COUNT …`, as JSON.

A script of its own, which `benchmarks.growth` runs with the Python of the checkout that is measured. Imports
`serve.model.rate_limiter.RateLimiter` and calls `join`, `ask`, `holds` and `done`.
"""

from __future__ import annotations

import json
import statistics
import sys
import time

from serve.model.rate_limiter import RateLimiter

_POOL = ("slots", "")  # one of the server's, of which there are four
_LIMIT, _NEEDED = 4, 1
_TURNS, _REPEATS = 100, 7


def grant_microseconds(instances: int) -> float:
    """What an instance's ask and return take together while the others are idle; the median of a few measurements."""
    limiter: RateLimiter[int] = RateLimiter({_POOL: _LIMIT})
    for instance in range(instances):
        limiter.join(instance, {_POOL: _NEEDED})
    took = []
    for _ in range(_REPEATS):
        began = time.process_time()
        for instance in range(_TURNS):
            limiter.ask(instance % instances)
            limiter.done(instance % instances)
        took.append((time.process_time() - began) / _TURNS)
    limiter.ask(0)
    if not limiter.holds(0):
        raise RuntimeError("an instance that is alone in asking was granted nothing")
    return statistics.median(took) * 1e6


if __name__ == "__main__":
    print(json.dumps({count: grant_microseconds(int(count)) for count in sys.argv[1:]}))
