"""What something costs, counted in calls: the same on any machine."""

from __future__ import annotations

import sys
from collections import Counter


def calls_of(deed) -> Counter:
    """How many functions `deed` calls on this thread and how often generators go on, by the profiler's events."""
    calls: Counter[str] = Counter()
    sys.setprofile(lambda _frame, event, _called: calls.update([event]))
    try:
        deed()
    finally:
        sys.setprofile(None)
    return calls
