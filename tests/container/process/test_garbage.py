"""When all garbage is collected: in a process of its own each, since a process has one collector.

The clocks are the test's: on a machine that others use, a process that does all it can is given little of a second.
"""

import subprocess
import sys

import pytest

PROGRAM = """
import gc, time, types, weakref
from container.process import resources

class Circle:
    def __init__(self):
        self.itself = self

collector = resources.QuietCollector()
held = Circle()
circle = weakref.ref(held)
for _ in range({young}):
    gc.collect(1)
del held  # it has grown old meanwhile
now, used = time.monotonic() + 1.0, time.process_time() + {used}
resources.time = types.SimpleNamespace(monotonic=lambda: now, process_time=lambda: used)
collector.look()
print("there" if circle() else "gone", gc.get_freeze_count() > 0)
"""


@pytest.mark.parametrize(
    ("young", "used", "found"),
    [(9, 0.05, "there"), (10, 0.05, "gone"), (999, 0.5, "there"), (1000, 0.5, "gone")],
    ids=["little and quiet", "quiet", "busy", "overdue"],
)
def test_all_garbage_is_collected_when_it_is_quiet(young, used, found):
    """As soon as Python would do it itself, if the process has nothing else to do; else much later; never by itself."""
    program = PROGRAM.format(young=young, used=used)
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True, timeout=100)

    assert done.stdout.split() == [found, "True"]
