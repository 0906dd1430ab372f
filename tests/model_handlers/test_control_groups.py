"""What control groups leave of the machine's memory: by files as either version has them, and in a real group."""

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from model_handlers.system import memory, threads
from tests.cgroups import little_time, small_group

MIB = 1 << 20
TOTAL = psutil.virtual_memory().total


@pytest.fixture
def groups(monkeypatch, tmp_path):
    """Lays down the files of control groups, by their paths, and says which one the process is in."""

    def groups(membership, **files):
        for path, text in files.items():
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).write_text(text)
        (tmp_path / "membership").write_text(membership)
        monkeypatch.setattr(memory, "_MEMBERSHIP", tmp_path / "membership")
        monkeypatch.setattr(memory, "_MOUNT", tmp_path)

    return groups


@pytest.mark.parametrize(
    ("membership", "files", "expected"),
    [
        ("0::/", {"memory.max": "1073741824\n"}, 1 << 30),
        ("0::/a/b", {"a/b/memory.max": "max\n", "a/memory.max": "536870912\n", "memory.max": "max\n"}, 1 << 29),
        ("0::/a/b", {"a/b/memory.max": "536870912\n", "a/memory.max": "1073741824\n"}, 1 << 29),
        ("0::/not/seen", {"memory.max": "536870912\n"}, 1 << 29),
        ("0::/../a", {"memory.max": "536870912\n"}, 1 << 29),
        ("4:memory:/a\n0::/", {"memory/a/memory.limit_in_bytes": "1073741824\n"}, 1 << 30),
        ("4:memory:/a\n0::/", {"memory/memory.limit_in_bytes": "1073741824\n"}, 1 << 30),
        ("4:memory:/\n0::/", {"memory/memory.limit_in_bytes": "9223372036854771712\n"}, TOTAL),
        ("0::/", {}, TOTAL),
        ("", {}, TOTAL),
        ("0::/", {"memory.max": ""}, TOTAL),
        ("0::/", {"memory.max": f"{TOTAL * 2}\n"}, TOTAL),
        ("0::/", {"memory.max": "nonsense\n", "memory/memory.limit_in_bytes": "536870912\n"}, 1 << 29),
    ],
)
def test_the_lowest_limit_holds(groups, membership, files, expected):
    """Of the machine, the process's own group and all around it; no limit, no matter."""
    groups(membership, **files)

    assert memory.host_memory() == expected


@pytest.mark.parametrize(
    ("membership", "files", "expected"),
    [
        ("0::/", {"memory.max": f"{64 * MIB}", "memory.current": f"{40 * MIB}"}, 24 * MIB),
        (
            "0::/",
            {
                "memory.max": f"{64 * MIB}",
                "memory.current": f"{40 * MIB}",
                "memory.stat": f"anon {20 * MIB}\ninactive_file {8 * MIB}\n",
            },
            32 * MIB,
        ),
        (
            "4:memory:/a",
            {
                "memory/a/memory.limit_in_bytes": f"{64 * MIB}",
                "memory/a/memory.usage_in_bytes": f"{40 * MIB}",
                "memory/a/memory.stat": f"inactive_file 0\ntotal_inactive_file {8 * MIB}\n",
            },
            32 * MIB,
        ),
        (
            "0::/a",
            {
                "a/memory.max": f"{64 * MIB}",
                "a/memory.current": f"{10 * MIB}",
                "memory.max": f"{100 * MIB}",
                "memory.current": f"{90 * MIB}",
            },
            10 * MIB,
        ),
        ("0::/", {"memory.max": f"{64 * MIB}", "memory.current": f"{65 * MIB}"}, -MIB),
    ],
)
def test_the_least_that_is_free_is_free(groups, membership, files, expected):
    """Others of the same groups take from it as well; files that were only read are as good as free."""
    groups(membership, **files)

    assert memory.free_memory() == expected


def test_without_a_limit_all_is_free_that_the_machine_has(groups):
    """Or the group's limit is larger than that."""
    groups("0::/", **{"memory.max": "max", "memory.current": "4096"})
    assert memory.group_free() is None

    assert 0 < memory.free_memory() < TOTAL


@pytest.mark.parametrize(
    ("membership", "files", "expected"),
    [
        ("0::/", {"cpu.max": "150000 100000\n"}, 2),
        ("0::/", {"cpu.max": "20000 100000\n"}, 1),
        ("0::/", {"cpu.max": "max 100000\n"}, 8),
        ("0::/a/b", {"a/b/cpu.max": "max 100000\n", "a/cpu.max": "300000 100000\n"}, 3),
        ("0::/not/seen", {"cpu.max": "100000 50000\n"}, 2),
        ("2:cpu,cpuacct:/a", {"cpu/a/cpu.cfs_quota_us": "250000\n", "cpu/a/cpu.cfs_period_us": "100000\n"}, 3),
        ("2:cpu:/a", {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 8),
        ("0::/", {"cpu.max": "9900000 100000\n"}, 8),
        ("0::/", {"cpu.max": "nonsense\n"}, 8),
        ("0::/", {"cpu.max": "100000 0\n"}, 8),
        ("", {}, 8),
    ],
)
def test_no_more_threads_than_there_is_time_for(groups, monkeypatch, membership, files, expected):
    """Of eight processors as many are used as the groups grant, a part of one counts as one."""
    groups(membership, **files)
    monkeypatch.setattr(threads.os, "sched_getaffinity", lambda _pid: set(range(8)))

    assert threads.processors() == expected


COUNTS = """
import sys
from pathlib import Path
from model_handlers.system.memory import granted_processors

Path(sys.argv[1], "cgroup.procs").write_text("0")
print(granted_processors())
"""


@pytest.mark.parametrize(
    ("membership", "files", "expected"),
    [
        ("0::/", {}, None),
        ("0::/", {"pids.max": "max\n", "pids.current": "30\n"}, None),
        ("0::/a", {"a/pids.max": "400\n", "a/pids.current": "30\n", "pids.max": "500", "pids.current": "450\n"}, 50),
        ("4:pids:/a", {"pids/a/pids.max": "400\n", "pids/a/pids.current": "30\n"}, 370),
        ("0::/", {"pids.max": "20\n", "pids.current": "30\n"}, 0),
    ],
)
def test_the_least_tasks_that_are_free_are_free(groups, membership, files, expected):
    """Of all levels; None without a limit."""
    groups(membership, **files)
    assert memory.free_tasks() == expected


def test_a_real_group_tells_of_its_time():
    """As Kubernetes' `limits.cpu: 750m` makes it."""
    with little_time(75_000) as folder:
        command = [sys.executable, "-c", COUNTS, str(folder)]
        assert float(subprocess.check_output(command, text=True, timeout=100)) == 0.75


JOINS = """
import sys
from pathlib import Path
from model_handlers.system import memory

Path(sys.argv[1], "cgroup.procs").write_text("0")
before = memory.free_memory()
held = bytearray(b"x") * (64 << 20)
print(memory.host_memory(), before, memory.free_memory())
"""


def test_a_real_group_is_seen():
    """Its limit, and what a process in it takes of that."""
    with small_group(256 * MIB) as folder:
        command = [sys.executable, "-c", JOINS, str(folder)]
        limit, before, after = map(int, subprocess.check_output(command, text=True, timeout=100).split())

    assert limit == 256 * MIB
    assert before <= limit
    assert 60 * MIB < before - after < 80 * MIB
    assert not Path(folder).exists()
