"""Threads that load stand back where their priority can be given back, and nowhere else."""

import subprocess
import sys

import pytest

ASK = """
import os, threading
from serve.priority import lower_priority, may_raise_priority

lower_priority()
inherited = []
thread = threading.Thread(target=lambda: inherited.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id())))
thread.start()
thread.join()
print(may_raise_priority(), inherited[0])
if inherited[0]:
    os.setpriority(os.PRIO_PROCESS, 0, 0)
"""
WITHOUT_THE_RIGHT = ("setpriv", "--bounding-set", "-sys_nice", "--inh-caps", "-sys_nice")


@pytest.mark.parametrize(
    ("before", "expected"), [((), "True 10"), (WITHOUT_THE_RIGHT, "False 0")], ids=["root", "root in a container"]
)
def test_loads_stand_back_where_that_can_be_undone(before, expected):
    """Else the threads that a framework starts for a model, and its processes, would execute at that priority for good."""
    command = [*before, sys.executable, "-c", ASK]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == expected.split()
