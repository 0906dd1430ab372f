"""Regions of shared memory: which can be registered, what is read and written there, and how long they last."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import pytest

from container.steps.shared_memory import DISABLED, Regions
from model_handlers.errors import Kind, MmeError
from tests.shared_objects import OBJECTS, new_key, shared_object

SIZE = 64


@pytest.fixture
def shared():
    """An object that a client has made; its bytes count from 0."""
    with shared_object(SIZE) as made:
        made.buf[:] = bytes(range(SIZE))
        yield made


@pytest.fixture
def regions():
    """Where clients may share memory."""
    return Regions(allowed=True)


def descriptors(shared):
    """How many of this process are of the object; its client has one."""
    found = []
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):
            found.append(entry.readlink())
    return found.count(shared.path)


def refused(kind, function, *arguments):
    """The sentence of the error that a call must raise."""
    with pytest.raises(MmeError) as raised:
        function(*arguments)
    assert raised.value.kind is kind
    return raised.value.message


@pytest.mark.parametrize("slash", ["", "/"])
def test_a_region_is_a_part_of_an_object(shared, regions, slash):
    """Its offset and its own places add up; the key may begin with a slash or not."""
    key = slash + shared.key.removeprefix("/")
    regions.register("r", {"key": key, "offset": 8, "byte_size": 16})

    assert regions.rows() == regions.rows("r") == [{"name": "r", "key": key, "offset": 8, "byte_size": 16}]
    region, offset, size = regions.place("r", 4, 12)
    assert region.read(offset, size) == bytes(range(12, 24))
    region.write(14, b"ab")
    assert bytes(shared.buf[21:25]) == b"\x15ab\x18"


def test_nothing_is_registered_where_it_is_not_allowed(shared):
    """Neither kind, nor unregistered; what there is, nothing, is told."""
    for regions in (Regions(), Regions("cuda")):
        assert refused(Kind.UNSUPPORTED, regions.register, "r", {"key": shared.key, "byte_size": 8}) == DISABLED
        assert refused(Kind.UNSUPPORTED, regions.unregister) == DISABLED
        assert refused(Kind.UNSUPPORTED, regions.unregister, "r") == DISABLED
        assert regions.rows() == []


def test_memory_of_devices_is_not_shared():
    """No region of it can be registered; there is nothing to tell of, or to forget."""
    regions = Regions("cuda", allowed=True)
    assert "CUDA shared memory is not served" in refused(Kind.UNSUPPORTED, regions.register, "r", {})
    assert refused(Kind.NOT_FOUND, regions.rows, "r") == "Unable to find cuda shared memory region: 'r'"
    assert "necessary to register cuda shared memory" in refused(Kind.INVALID_ARGUMENT, regions.register, "", {})
    regions.unregister("r")
    assert regions.rows() == []


@pytest.mark.parametrize(
    ("wanted", "sentence"),
    [
        ({"byte_size": 8}, "Shared memory register request has no 'key' field"),
        ({"key": "x"}, "Shared memory register request has no 'byte_size' field"),
        ({"key": 1, "byte_size": 8}, "'key' of shared memory region 'r' must be a string, got 1"),
        ({"key": "x", "byte_size": -1}, "'byte_size' of shared memory region 'r' must be a number of bytes, got -1"),
        ({"key": "x", "byte_size": True}, "must be a number of bytes, got True"),
        ({"key": "x", "byte_size": 8, "offset": "0"}, "'offset' of shared memory region 'r' must be a number of bytes"),
        ({"key": "x", "byte_size": 2**64}, "must be a number of bytes, got 18446744073709551616"),
        ({"key": "triton_python_backend_shm_region_1", "byte_size": 8}, "'triton_python_backend_shm_region_' are res"),
        *(
            ({"key": key, "byte_size": 8}, "a key is the name of a shared memory object, not a path")
            for key in ("", "/", ".", "/..", "../x", "/a/b", "//x", "a/../b", "x\0y")
        ),
    ],
)
def test_what_can_not_be_a_region_has_one_sentence(regions, wanted, sentence):
    """It names the field, or why the key is none."""
    assert sentence in refused(Kind.INVALID_ARGUMENT, regions.register, "r", wanted)
    assert regions.rows() == []


@pytest.mark.parametrize(("offset", "size"), [(0, SIZE + 1), (SIZE, 1), (1, SIZE), (0, 0), (2**63 - 1, 2**63 - 1)])
def test_a_region_lies_within_its_object(shared, regions, offset, size):
    """One that does not is refused, and its object is not kept open."""
    wanted = {"key": shared.key, "offset": offset, "byte_size": size}
    sentence = refused(Kind.INVALID_ARGUMENT, regions.register, "r", wanted)
    assert sentence.startswith("failed to register shared memory region 'r': invalid args")
    assert descriptors(shared) == 1


def test_only_objects_are_opened(regions, tmp_path):
    """Nothing is made, no link followed, no pipe waited for."""
    name = new_key()
    path = OBJECTS / name[1:]
    wanted = {"key": name, "byte_size": 1}
    assert f"Unable to open shared memory region: '{name}'" in refused(Kind.INTERNAL, regions.register, "r", wanted)
    assert not path.exists()
    (tmp_path / "secret").write_bytes(b"secret")
    path.symlink_to(tmp_path / "secret")
    try:
        assert "Unable to open shared memory region" in refused(Kind.INTERNAL, regions.register, "r", wanted)
        path.unlink()
        os.mkfifo(path)
        assert "invalid args" in refused(Kind.INVALID_ARGUMENT, regions.register, "r", wanted)
    finally:
        path.unlink()


def test_a_name_has_one_region(shared, regions):
    """Until it is unregistered, once or again."""
    wanted = {"key": shared.key, "byte_size": SIZE}
    regions.register("r", wanted)
    assert refused(Kind.CONFLICT, regions.register, "r", wanted).endswith("'r' already in manager")
    assert "'region name' is necessary" in refused(Kind.INVALID_ARGUMENT, regions.register, "", wanted)
    regions.register("s", wanted)
    regions.unregister("r")
    regions.unregister("r")
    assert [row["name"] for row in regions.rows()] == ["s"]
    assert refused(Kind.NOT_FOUND, regions.rows, "r") == "Unable to find system shared memory region: 'r'"
    regions.register("r", wanted)
    regions.unregister()
    assert regions.rows() == []


@pytest.mark.parametrize(
    ("offset", "size", "sentence"),
    [
        (16, 0, "Invalid offset for shared memory region: 'r'"),
        (2**70, 1, "Invalid offset for shared memory region: 'r'"),
        (0, 17, "Invalid offset + byte size for shared memory region: 'r'"),
        (8, 2**63, "Invalid offset + byte size for shared memory region: 'r'"),
    ],
)
def test_a_tensor_lies_within_its_region(shared, regions, offset, size, sentence):
    """Not in what else its object holds."""
    regions.register("r", {"key": shared.key, "offset": 8, "byte_size": 16})
    assert refused(Kind.INVALID_ARGUMENT, regions.place, "r", offset, size) == sentence
    assert refused(Kind.NOT_FOUND, regions.place, "s", 0, 1) == "Unable to find shared memory region: 's'"


def test_an_object_that_is_cut_short_is_an_error(shared, regions):
    """Where a mapping would end the process; nothing is written that would make it longer again."""
    regions.register("r", {"key": shared.key, "byte_size": SIZE})
    region, _, _ = regions.place("r", 0, SIZE)
    os.truncate(shared.path, 8)

    assert region.read(0, 8) == bytes(range(8))
    for use in (lambda: region.read(0, 9), lambda: region.write(0, bytes(9))):
        sentence = refused(Kind.INVALID_ARGUMENT, use)
        assert sentence.startswith("Invalid offset + byte size for shared memory region: 'r'")
    assert shared.path.stat().st_size == 8


def test_who_has_found_a_region_keeps_it(shared, regions):
    """Unregistering takes its name at once, and closes it with the last who uses it."""
    regions.register("r", {"key": shared.key, "byte_size": SIZE})
    place = regions.place("r", 0, 4)
    regions.unregister("r")
    refused(Kind.NOT_FOUND, regions.place, "r", 0, 4)

    place.region.write(0, b"late")
    assert bytes(shared.buf[:4]) == b"late"
    assert descriptors(shared) == 2
    del place
    assert descriptors(shared) == 1
