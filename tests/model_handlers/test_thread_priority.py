"""Threads that load stand back where their priority can be given back, and nowhere else."""

import platform
import subprocess
import sys
from pathlib import Path

import pytest

STAND_BACK = """
import os, subprocess, threading
from model_handlers.system.threads import found_family
from model_handlers.system.threads import low_priority

def has(*begun):
    return [os.getpriority(os.PRIO_PROCESS, each) for each in (0, *begun)]

done = threading.Event()
found_family()  # as models' processes do
with low_priority():
    thread = threading.Thread(target=done.wait)
    thread.start()
    shell = subprocess.Popen(["sh", "-c", "sleep 60 & echo $!; nice -n 2 sleep 60 & echo $!; wait"], stdout=subprocess.PIPE)
    sleeps = [int(shell.stdout.readline()) for _ in range(2)]
    orphan = subprocess.run(["sh", "-c", "sleep 60 >&2 & echo $!"], stdout=subprocess.PIPE).stdout
    sleeps.append(int(orphan))
    begun = thread.native_id, shell.pid, sleeps[0], sleeps[2]
    while has(sleeps[1])[1] != 12:
        pass
    print(has(*begun))
print(has(*begun), has(sleeps[1])[1])
done.set()
subprocess.run(["kill", *map(str, sleeps)])
"""
LOOK = """
import subprocess, sys
from pathlib import Path
from model_handlers.system.threads import low_priority

looked, listing = [], Path.iterdir
Path.iterdir = lambda path: looked.append(str(path)) or listing(path)

def looks():
    seen = [path for path in looked if path == "/proc"]
    looked.clear()
    return len(seen)

with low_priority():
    pass
print(looks())
with low_priority():
    subprocess.run(["true"])
print(looks())
"""
ASK = """
import os, pathlib, re, threading
from model_handlers.system.threads import lower_priority, may_raise_priority, usual_priority

def turn():
    told = pathlib.Path("/proc/thread-self/sched")
    found = re.search(r"se.slice +: +([0-9]+)", told.read_text()) if told.exists() else None
    return int(found[1]) if found else 0

usual = turn()

def here():
    return os.getpriority(os.PRIO_PROCESS, 0), "long" if turn() > usual else "usual"

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


def told(*before, program=ASK):
    """What a process says of its threads."""
    command = [*before, sys.executable, "-c", program]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=100)
    return done.stdout.splitlines()


def longest_turn():
    """How the kernel calls the turns of a thread that stands back: before Linux 6.12 all turns are alike."""
    version = tuple(int(number) for number in platform.release().split(".")[:2])
    return "long" if version >= (6, 12) and Path("/proc/self/sched").exists() else "usual"


@pytest.mark.parametrize(("share", "without", "able"), [(10, (), True), (0, WITHOUT_THE_RIGHT, False)])
def test_loads_stand_back_and_what_they_start_need_not(share, without, able):
    """A thread inherits what its parent has, and may have the usual priority again; no other thread has another.

    Nor has one who could not be recalled a smaller share, as root in a container: frameworks' threads, and models'
    processes, would execute at that priority for good.
    """
    low, usual = (share, longest_turn()), (0, "usual")
    assert told(*without) == [str(able), str([low, [low, usual]]), str(usual)]


def test_what_a_load_leaves_behind_does_not_stand_back():
    """Its threads and processes, and theirs, have the usual priority; but for those who chose another themselves.

    Orphans too, which are below another process by then.
    """
    during, after = told(program=STAND_BACK)
    assert during == "[10, 10, 10, 10, 10]"
    assert after == "[0, 0, 0, 0, 0] 12"


def test_a_load_that_starts_no_process_looks_for_none():
    """However many there are on the machine; one that does looks for what is left of them, once."""
    assert told(program=LOOK) == ["0", "1"]
