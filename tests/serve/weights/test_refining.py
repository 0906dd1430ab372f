"""The process that refines comes after everybody else."""

import subprocess
import sys

ASK = """
import os
from serve.weights.refining import _subordinate
_subordinate(os.getppid())
print(os.getpriority(os.PRIO_PROCESS, 0))
"""
WITHOUT_THE_RIGHT = ("setpriv", "--bounding-set", "-sys_nice", "--inh-caps", "-sys_nice")


def test_it_stays_behind_a_server_that_comes_late_itself():
    """Where that may not be recalled from there, it refines all the same."""
    command = ["nice", "-n", "15", *WITHOUT_THE_RIGHT, sys.executable, "-c", ASK]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=100)
    assert done.stdout.strip() == "15"
