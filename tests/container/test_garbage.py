"""When all garbage is collected: in a process of its own each, since a process has one collector."""

import subprocess
import sys

import pytest

PROGRAM = """
import gc, time, weakref
from container.garbage import QuietCollector

class Circle:
    def __init__(self):
        self.itself = self

collector = QuietCollector()
held = Circle()
circle = weakref.ref(held)
for _ in range({young}):
    gc.collect(1)
del held  # it has grown old meanwhile
if {busy}:
    until = time.process_time() + 0.3
    while time.process_time() < until:
        pass
else:
    time.sleep(0.5)
collector.look()
print("there" if circle() else "gone", gc.get_freeze_count() > 0)
"""


@pytest.mark.parametrize(
    ("young", "busy", "found"),
    [(9, False, "there"), (10, False, "gone"), (99, True, "there"), (100, True, "gone")],
    ids=["little and quiet", "quiet", "busy", "overdue"],
)
def test_all_garbage_is_collected_when_it_is_quiet(young, busy, found):
    """As soon as Python would do it itself, if the process has nothing else to do; else much later; never by itself."""
    program = PROGRAM.format(young=young, busy=busy)
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True, timeout=100)

    assert done.stdout.split() == [found, "True"]
