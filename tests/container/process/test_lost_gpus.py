"""Whether the serving process ends for a GPU that it has lost; what a server does then is in tests/contract."""

import os

import pytest

from container.process import master
from container.process.master import LostGpus
from serve.state_file import life_of


@pytest.fixture
def lost(monkeypatch):
    """Sets what this process has lost, and how many GPUs it sees."""

    def lost(reason, gpus=2):
        monkeypatch.setattr(master, "first_reason", lambda: reason)
        monkeypatch.setattr(master, "gpu_uuids", lambda: {number: f"GPU-{number}" for number in range(gpus)})

    return lost


def test_a_process_ends_for_a_gpu_that_is_lost(lost, tmp_path, caplog):
    """Not before. Its sentence is in the log, and the file of a server that is over is removed."""
    (tmp_path / "lost-gpus-0-1-2").touch()
    lost("")
    watch = LostGpus(tmp_path, life_of(os.getpid()))
    assert not watch.look()
    lost("the kernel failed")
    assert watch.look()

    assert not watch.are_broken
    assert [record.getMessage() for record in caplog.records] == [
        "the kernel failed; this process ends, and another one takes its place"
    ]
    assert [path.name for path in tmp_path.iterdir()] == [f"lost-gpus-{life_of(os.getpid())}"]


@pytest.mark.parametrize(("left", "broken"), [(2, False), (1, True), (0, True)])
def test_a_gpu_that_the_next_process_does_not_see_is_broken(lost, tmp_path, caplog, left, broken):
    """Its models would be put elsewhere, or on the CPU, and nobody would know."""
    life = life_of(os.getpid())
    lost("the kernel failed")
    assert LostGpus(tmp_path, life).look()
    caplog.clear()
    lost("", gpus=left)

    assert LostGpus(tmp_path, life).are_broken is broken
    assert any(f"of 2 GPUs {left} are left: a new process is no help" in text for text in caplog.messages) is broken


def test_after_some_processes_in_a_short_time_the_gpu_is_broken(lost, tmp_path, monkeypatch):
    """Three may end within ten minutes. The fourth goes on, and says so once."""
    now = [1000.0]
    monkeypatch.setattr(master.time, "time", lambda: now[0])
    lost("the kernel failed")
    life = life_of(os.getpid())
    for _ in range(3):
        assert LostGpus(tmp_path, life).look()

    fourth = LostGpus(tmp_path, life)
    assert not fourth.look()
    assert fourth.are_broken
    assert not fourth.look()
    now[0] += 601
    assert LostGpus(tmp_path, life).look()
