"""Threads that load stand back where their priority can be given back, and nowhere else."""

import subprocess
import sys

ASK = """
import os, threading
from model_handlers.priority import lower_priority, may_raise_priority, usual_priority

def here():
    return os.getpriority(os.PRIO_PROCESS, 0)

def on_a_thread(*deeds):
    seen = []
    thread = threading.Thread(target=lambda: seen.extend([deed() or here() for deed in deeds]))
    thread.start()
    thread.join()
    return seen

print(may_raise_priority())
print(on_a_thread(lower_priority, lambda: on_a_thread(lambda: None, usual_priority)))
print(here())
"""
WITHOUT_THE_RIGHT = ("setpriv", "--bounding-set", "-sys_nice", "--inh-caps", "-sys_nice")


def told(*before):
    """What a process says of its threads."""
    command = [*before, sys.executable, "-c", ASK]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=100)
    return done.stdout.splitlines()


def test_loads_stand_back_and_what_they_start_need_not():
    """A thread inherits what its parent has, and may have the usual priority again; nobody else has another."""
    assert told() == ["True", "[10, [10, 0]]", "0"]


def test_nobody_stands_back_who_could_not_be_recalled():
    """As root in a container: frameworks' threads, and models' processes, would execute at that priority for good."""
    assert told(*WITHOUT_THE_RIGHT) == ["False", "[0, [0, 0]]", "0"]
