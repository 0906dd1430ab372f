"""A control group of the real system with little memory or few tasks, where this process may make one."""

import contextlib
import time
import uuid
from pathlib import Path

import pytest

_MOUNT = Path("/sys/fs/cgroup")
_PATIENCE = 10.0  # seconds for its processes to be gone


def small_group(limit):
    """The folder of a new group whose processes may take so many bytes together; skips the test where none can be made.

    A process joins by writing its id into `cgroup.procs`. All of them have to end before the group does.
    """
    return _group("memory", "memory.max", "memory.limit_in_bytes", limit)


def few_tasks(limit):
    """The same of a group that may have so many processes and threads."""
    return _group("pids", "pids.max", "pids.max", limit)


def little_time(limit):
    """The same of a group that may have so many microseconds of processor time in a tenth of a second."""
    return _group("cpu", "cpu.max", "cpu.cfs_quota_us", limit)


@contextlib.contextmanager
def _group(controller, setting, first_setting, limit):
    is_first = (_MOUNT / controller).is_dir()
    folder = _MOUNT / (controller if is_first else "") / f"mme-test-{uuid.uuid4().hex[:8]}"
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error}")
    try:
        try:
            (folder / (first_setting if is_first else setting)).write_text(str(limit))
        except OSError as error:
            pytest.skip(f"a control group can't be given a limit here: {error}")
        yield folder
    finally:
        _remove(folder)


def _remove(folder):
    until = time.monotonic() + _PATIENCE
    while True:
        try:
            folder.rmdir()
        except OSError:
            if time.monotonic() > until:
                raise
            time.sleep(0.02)
        else:
            return
