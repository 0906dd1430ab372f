"""What is asked of disks: sizes, locks, and staging, which is removed whatever ends in the middle."""

import fcntl
import os
import resource
import threading

import pytest

from model_handlers.system.disk import directory_size, locked, remove_staging, staging_directory
from model_handlers.system.threads import NEVER

pytestmark = pytest.mark.usefixtures("no_leaks")


def test_what_leaves_while_it_is_counted_counts_nothing(tmp_path, monkeypatch):
    """Another server may evict what this one finds at its start; links count as what they lead to, if anything."""
    walk = os.walk
    (tmp_path / "stays").write_bytes(bytes(5))
    (tmp_path / "leaves").write_bytes(bytes(10))
    for name, target in {"link": "stays", "nowhere": "gone", "loop": "loop", "folder": "."}.items():
        (tmp_path / name).symlink_to(target)
    monkeypatch.setattr(os, "walk", lambda path: ((tmp_path / "leaves").unlink() or each for each in walk(path)))

    assert directory_size(tmp_path) == 10


def test_the_lock_is_held_by_one_at_a_time(tmp_path):
    """Among threads, though its file comes and goes; in the end there is none."""
    inside, most = [], []

    def enter():
        for _ in range(20):
            with locked(tmp_path / "lock", NEVER):
                inside.append(1)
                most.append(len(inside))
                inside.pop()

    threads = [threading.Thread(target=enter) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert max(most) == 1
    assert len(most) == 80
    assert list(tmp_path.iterdir()) == []


def test_staging_of_the_dead_is_removed(tmp_path):
    """What a killed process left is removed; what a live one unpacks is not, nor anything else."""
    left, live, other = tmp_path / ".staging-left", tmp_path / ".staging-live", tmp_path / "model"
    for path in (left, live, other):
        path.mkdir()
        (path / "weights").touch()
    fd = os.open(live, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)
    remove_staging(tmp_path)
    remaining = sorted(path.name for path in tmp_path.iterdir())
    os.close(fd)
    remove_staging(tmp_path)

    assert remaining == [".staging-live", "model"]
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize("opened", [False, True], ids=["before it is opened", "before it is locked"])
def test_staging_that_another_run_took_for_the_deads_is_made_anew(tmp_path, monkeypatch, opened):
    """A run that begins in the very moment in which a directory is made costs no archive."""
    module, name = (fcntl, "flock") if opened else (os, "open")
    goes_on = getattr(module, name)

    def late(*arguments):
        monkeypatch.undo()
        remove_staging(tmp_path)
        return goes_on(*arguments)

    monkeypatch.setattr(module, name, late)
    with staging_directory(tmp_path) as folder:
        assert folder.is_dir()
        remove_staging(tmp_path)
        assert [path.name for path in tmp_path.iterdir()] == [folder.name]
    assert list(tmp_path.iterdir()) == []


def test_staging_that_could_not_be_removed_is_removed_by_the_next(tmp_path):
    """That takes descriptors: while there are none nothing new is left, and what is left goes as soon as there are some."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with staging_directory(tmp_path) as left:
        (left / "model").write_bytes(b"x")
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        with pytest.raises(OSError, match="Too many open files"), staging_directory(tmp_path):
            pass
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert list(tmp_path.iterdir()) == [left]

    with staging_directory(tmp_path) as staging:
        assert list(tmp_path.iterdir()) == [staging]
