"""How long requests leave a model alone that fails to load again and again. PURE.

Whoever asks for a model that is not in memory has it loaded. Of one that can't be loaded each of its clients would have
the store asked, a process started and a line logged, as often as they ask. So the next try waits, longer each time, and
requests that come meanwhile are told what the last one was told. A single failure may have been an accident, after
which nobody waits; neither does a load by name.
"""

from __future__ import annotations

_MOST_SECONDS = 30.0  # somebody may have mended it
_MOST_DOUBLINGS = 5


def pause(failures: int, seconds: float) -> float:
    """Seconds until a request may have it loaded again.

    Args:
        failures: loads that failed since one succeeded, one after the other.
        seconds: that the last of them took: a model that fails late shall not hold a load thread all the time.
    """
    if failures < 2:
        return 0.0
    doubled: float = 2.0 ** min(failures - 2, _MOST_DOUBLINGS)
    return min(max(doubled, seconds), _MOST_SECONDS)
