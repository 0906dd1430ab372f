"""Anonymous files, as interpreters have them that know their names and those that do not."""

import errno
import os

import pytest

from model_handlers.worker import memory


@pytest.fixture(params=["named", "unnamed"], autouse=True)
def interpreter(request, monkeypatch):
    """Either kind of interpreter."""
    if request.param == "unnamed":
        monkeypatch.delattr(os, "memfd_create")


def test_a_sealed_file_grows_and_never_shrinks():
    """Whoever maps it can rely on its size; nobody who executes another program inherits it."""
    fd = memory.new_memfd("test")
    try:
        os.ftruncate(fd, 8192)
        memory.seal(fd)
        os.ftruncate(fd, 16384)
        with pytest.raises(PermissionError):
            os.ftruncate(fd, 4096)
        assert not os.get_inheritable(fd)
    finally:
        os.close(fd)


def test_what_the_system_refuses_is_an_error():
    """With its number, as of any other call."""
    with pytest.raises(OSError, match="Invalid argument") as raised:
        memory.new_memfd("x" * 300)

    assert raised.value.errno == errno.EINVAL


def test_a_file_of_another_kind_is_no_such_file(tmp_path):
    """A descriptor that comes from a child may be anything."""
    with (tmp_path / "file").open("wb") as file, pytest.raises(OSError, match="Invalid argument"):
        memory.is_frozen(file.fileno())


def test_a_frozen_file_stays_as_it_is():
    """Nobody can write it, shrink it or make it longer; one that is only sealed is not frozen."""
    fd = memory.new_memfd("test")
    try:
        os.pwrite(fd, b"contents", 0)
        assert not memory.is_frozen(fd)
        memory.freeze(fd)
        assert memory.is_frozen(fd)
        for size in (0, 8192):
            with pytest.raises(PermissionError):
                os.ftruncate(fd, size)
        with pytest.raises(PermissionError):
            os.pwrite(fd, b"x", 0)
        assert os.pread(fd, 100, 0) == b"contents"
    finally:
        os.close(fd)


def test_a_sealed_file_is_not_frozen():
    """It may still be written."""
    fd = memory.new_memfd("test")
    try:
        memory.seal(fd)
        assert not memory.is_frozen(fd)
        with pytest.raises(PermissionError):
            memory.freeze(fd)
    finally:
        os.close(fd)
