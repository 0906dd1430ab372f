"""Frames cross a socket whole, however the stream is cut, and nothing that is none of them is taken for one."""

import contextlib
import errno
import fcntl
import gc
import os
import resource
import socket
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model_handlers.errors import Kind, MmeError
from model_handlers.worker.memory import INLINE, Frame, FrameReader
from model_handlers.worker.wire import MAX_MESSAGE, Packing, ProtocolError, encode_message, unpack


def framed(number, size):
    """A frame with a tensor of `size` bytes, None for one without tensors."""
    if size is None:
        return Frame({"n": number})
    packing = Packing()
    place = packing.add(np.full(size, number % 256, np.uint8), "it")
    return Frame({"n": number, "place": place}, packing)


def taken(reader):
    """(number, size, contents) of each whole frame; the size is None where there is no tensor."""
    found = []
    while (frame := reader.next()) is not None:
        message, shared = frame
        if "place" not in message:
            assert shared.size == 0
            found.append((message["n"], None, True))
            continue
        array = unpack(shared, message["place"], "it", "m")
        found.append((message["n"], array.size, bool((array == message["n"] % 256).all())))
    return found


@pytest.fixture
def pair():
    """Two ends."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


def descriptors():
    """How many this process has."""
    gc.collect()
    return len(list(Path("/proc/self/fd").iterdir()))


SIZES = st.one_of(st.none(), st.integers(0, 200), st.integers(INLINE - 1, INLINE + 1), st.integers(0, 300_000))


@settings(max_examples=60, deadline=None)
@given(sizes=st.lists(SIZES, max_size=5), cuts=st.lists(st.integers(1, 5000), min_size=1, max_size=40))
def test_frames_survive_any_cut(sizes, cuts):
    """Whatever the pieces in which the stream arrives, the same frames come out, each when its last byte is there."""
    before = descriptors()
    frames = [framed(number, size) for number, size in enumerate(sizes)]
    reader, found = FrameReader(), []
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.setblocking(False)
        turn = 0
        for frame in frames:
            fds = [frame.fd] if frame.fd >= 0 else []
            while frame.data:
                piece = frame.data[: cuts[turn] if turn < len(cuts) else None]
                frame.data = frame.data[socket.send_fds(ours, [piece], fds) :]
                fds, turn = [], turn + 1
                with contextlib.suppress(BlockingIOError):
                    while reader.receive(theirs):
                        found += taken(reader)
            frame.close()
            assert len(found) == frames.index(frame) + 1
        ours.close()
        assert not reader.receive(theirs)

    assert found == [(number, size or (None if size is None else 0), True) for number, size in enumerate(sizes)]
    assert descriptors() <= before  # others may go meanwhile


@pytest.mark.parametrize("size", [1, INLINE, INLINE + 1, 5 << 20])
def test_a_tensor_crosses_in_the_frame_or_in_memory_of_its_own(pair, size):
    """Up to INLINE bytes in the frame; more in a file of memory that is closed here, and goes with the last view."""
    ours, theirs = pair
    before = descriptors()
    frame = framed(7, size)
    assert (frame.fd >= 0) == (size > INLINE)
    socket.send_fds(ours, [frame.data], [frame.fd] if frame.fd >= 0 else [])
    frame.close()
    frame.close()
    reader = FrameReader()
    while not (found := taken(reader)):
        assert reader.receive(theirs)

    assert found == [(7, size, True)]
    assert descriptors() <= before  # others may go meanwhile
    assert "mme-" not in Path("/proc/self/maps").read_text()


def test_what_came_cannot_be_written_by_anybody(pair):
    """Neither here nor by whoever sent it: what was looked at is still so when it is used."""
    ours, theirs = pair
    frame = framed(7, 1 << 20)
    socket.send_fds(ours, [frame.data], [frame.fd])
    reader = FrameReader()
    reader.receive(theirs)
    _, shared = reader.next()

    with pytest.raises(ValueError, match="read-only"):
        shared[0] = 1
    with pytest.raises(PermissionError):
        os.pwrite(frame.fd, b"x", 0)
    with pytest.raises(PermissionError):
        os.ftruncate(frame.fd, 0)
    with pytest.raises(PermissionError):
        os.ftruncate(frame.fd, 2 << 20)
    frame.close()


FROZEN = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE

GARBAGE = {
    "a payload that is no number": ({"payload": "x"}, None, "a payload of x bytes"),
    "a payload below nothing": ({"payload": -1}, None, "a payload of -1 bytes"),
    "a payload too large": ({"payload": INLINE + 1}, None, f"a payload of {INLINE + 1} bytes"),
    "no descriptor": ({"segment": 8}, None, "without the descriptor"),
    "a descriptor of something else": ({"segment": 8}, "/dev/null", "can't be mapped"),
    "a file": ({"segment": 8}, "file", "can't be mapped"),
    "memory that may shrink": ({"segment": 8}, 0, "could still change"),
    "memory that may be written": ({"segment": 8}, fcntl.F_SEAL_SHRINK, "could still change"),
    "more than there is": ({"segment": 1 << 40}, FROZEN, "can't be mapped"),
    "a size below nothing": ({"segment": -1}, FROZEN, "can't be mapped"),
    "a size that is none": ({"segment": "x"}, FROZEN, "can't be mapped"),
}


@pytest.mark.parametrize("case", GARBAGE)
def test_frames_that_are_none(pair, tmp_path, case):
    """Are errors that say what was wrong, and their descriptors are closed."""
    message, source, words = GARBAGE[case]
    ours, theirs = pair
    before = descriptors()
    fds = []
    if isinstance(source, int):
        fds = [os.memfd_create("test", os.MFD_ALLOW_SEALING)]
        os.ftruncate(fds[0], 4096)
        fcntl.fcntl(fds[0], fcntl.F_ADD_SEALS, source)
    elif source is not None:
        path = tmp_path / source
        path.parent.mkdir(exist_ok=True, parents=True)
        if source == "file":
            path.write_bytes(bytes(100))
        fds = [os.open(path, os.O_RDONLY)]
    socket.send_fds(ours, [encode_message(message)], fds)
    for fd in fds:
        os.close(fd)
    reader = FrameReader()
    reader.receive(theirs)
    with pytest.raises(ProtocolError, match=words):
        reader.next()
    reader.close()

    assert descriptors() <= before  # others may go meanwhile


@given(st.binary(min_size=1, max_size=200))
def test_bytes_of_any_kind(data):
    """Are frames, wait for more, or are a ProtocolError: never another exception."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(data)
        reader = FrameReader()
        reader.receive(theirs)
        try:
            while reader.next() is not None:
                pass
        except ProtocolError:
            pass


def test_descriptors_without_frames(pair):
    """A few may come before their frames are whole; many are an error, and all of them are closed."""
    ours, theirs = pair
    before = descriptors()
    reader = FrameReader()
    with open(os.devnull) as null:  # noqa: PTH123 - a descriptor of no use
        for _ in range(16):
            socket.send_fds(ours, [b"\x01"], [null.fileno()])
            reader.receive(theirs)
        socket.send_fds(ours, [b"\x01"], [null.fileno()])
        with pytest.raises(ProtocolError, match="17 descriptors of which no frame speaks"):
            reader.receive(theirs)
        reader.close()
        socket.send_fds(ours, [b"\x01"], [null.fileno()] * 30)
        with pytest.raises(ProtocolError, match="could not be taken"):
            reader.receive(theirs)
        reader.close()

    assert descriptors() <= before  # others may go meanwhile


def test_a_descriptor_that_this_process_has_no_room_for(pair):
    """Is an error that says so, not a frame without its tensor."""
    ours, theirs = pair
    frame = framed(1, INLINE + 1)
    socket.send_fds(ours, [frame.data], [frame.fd])
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    reader = FrameReader()
    full = max(int(fd.name) for fd in Path("/proc/self/fd").iterdir())
    fillers = [os.dup(frame.fd) for _ in range(full + 1 - descriptors())]
    resource.setrlimit(resource.RLIMIT_NOFILE, (max([frame.fd, *fillers]) + 1, hard))
    try:
        with pytest.raises(ProtocolError, match="could not be taken"):
            reader.receive(theirs)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for fd in fillers:
            os.close(fd)
        frame.close()


def test_what_cannot_be_a_frame():
    """Values without a form, and messages too large, are errors of whoever sends them; nothing stays behind."""
    before = descriptors()
    with pytest.raises(MmeError) as raised:
        Frame({"value": object()})
    assert raised.value.kind is Kind.INVALID_ARGUMENT
    with pytest.raises(MmeError) as raised:
        Frame({"value": "x" * MAX_MESSAGE})
    assert raised.value.kind is Kind.TOO_LARGE

    assert descriptors() <= before  # others may go meanwhile


def test_no_memory_for_a_frame(monkeypatch):
    """Is unavailable, and says how much was wanted."""

    def refuse(*_):
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(os, "memfd_create", refuse)
    with pytest.raises(MmeError, match=f"{INLINE + 1} bytes of shared memory can't be had") as raised:
        framed(1, INLINE + 1)

    assert raised.value.kind is Kind.UNAVAILABLE


def test_the_end_of_the_stream(pair):
    """Frames that came before it are whole; a part of one is nothing."""
    ours, theirs = pair
    ours.sendall(encode_message({"n": 1}) + b"\x09\x00")
    ours.close()
    reader = FrameReader()

    assert reader.receive(theirs)
    assert not reader.receive(theirs)
    assert reader.next()[0] == {"n": 1}
    assert reader.next() is None
