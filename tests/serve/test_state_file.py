"""What a worker knows is there for the next one, whole or not at all, and never in the way."""

import asyncio
import contextlib
import json
import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from serve.state_file import LazyFile, StateFile
from tests.waiting import until

_NO_PROCESS = 1 << 22  # the kernel gives no number as large


@pytest.fixture
def file(tmp_path):
    """A state file that is not there yet, nor is its directory."""
    return StateFile(tmp_path / "cache" / "known.json", "known 1")


def test_what_is_written_is_read(file, tmp_path):
    """Nothing at first; then always what was written last, by whoever reads."""
    assert file.read() == {}
    file.write({"models": {"ü": [1, 2.5]}})
    file.write({"models": {}, "more": "yes"})

    assert (
        file.read() == StateFile(tmp_path / "cache" / "known.json", "known 1").read() == {"models": {}, "more": "yes"}
    )
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["known.json"]


def test_a_change_costs_what_changed(file, tmp_path):
    """The document is written once, then a line for each change; it is whole again when the lines are as long."""
    rows = {f"m{number}": "x" * 100 for number in range(1000)}
    path, wholes = tmp_path / "cache" / "known.json", []

    def snapshot():
        wholes.append(path.stat().st_size if path.exists() else 0)
        return {"models": rows}

    for number in range(3000):
        rows[f"m{number % 1000}"] = f"{number:100}"
        file.keep([("models", f"m{number % 1000}", f"{number:100}")], snapshot)
        if number % 500 == 0:
            assert file.read() == {"models": rows}

    assert len(wholes) == 3
    assert max(wholes) < 2 * 1000 * 110 + (1 << 16) + 100


@pytest.mark.parametrize("torn", [b"", b"[", b'["models", "c"', b"null\n", b"7\n", b'["models"]\n', b"\xff\n"])
def test_changes_are_read_up_to_one_that_is_torn(file, tmp_path, torn):
    """In the order in which keys changed last; null is a key that went."""
    path = tmp_path / "cache" / "known.json"
    for change in (
        ("models", "a", 1),
        ("models", "b", 2),
        ("models", "a", 3),
        ("models", "b", None),
        ("more", "b", []),
    ):
        file.keep([change], lambda: {"models": {"a": 0, "z": 9}})
    with path.open("ab") as appended:
        appended.write(torn)

    assert file.read() == {"models": {"z": 9, "a": 3}, "more": {"b": []}}
    assert list(file.read()["models"]) == ["z", "a"]
    again = StateFile(path, "known 1")
    again.keep([], lambda: {"models": {"whole": 1}})
    assert again.read() == {"models": {"whole": 1}}


@pytest.mark.parametrize(
    "content",
    [b"", b'{"form": "known 1", "mod', b"\x00\xff", b"[]", b"{}", b'{"form": "known 2"}', b'{"form": 1}'],
    ids=["empty", "torn", "binary", "a list", "nobody's", "of a later version", "of another kind"],
)
def test_a_file_that_is_torn_or_somebody_elses_is_ignored(file, tmp_path, content, caplog):
    """It counts as none, with one warning that names it; the next write mends it."""
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "known.json").write_bytes(content)

    assert file.read() == {}
    assert len(caplog.records) == 1
    assert "known.json is ignored" in caplog.text
    file.write({"a": 1})
    assert file.read() == {"a": 1}


def test_what_a_dead_worker_was_writing_goes(file, tmp_path):
    """A file half written beside its place is removed at the next start, and never taken for the file.

    What another server is writing stays.
    """
    file.write({"a": 1})
    (tmp_path / "cache" / f".known.json.{_NO_PROCESS}").write_bytes(b'{"form": "kn')
    (tmp_path / "cache" / f".known.json.{os.getppid()}").write_bytes(b'{"form": "kn')

    assert file.read() == {"a": 1}
    assert {path.name for path in (tmp_path / "cache").iterdir()} == {"known.json", f".known.json.{os.getppid()}"}


def test_a_write_that_fails_leaves_nothing_beside_its_place(file, tmp_path, caplog):
    """What was written of it would take room on a disk that is full."""
    (tmp_path / "cache" / "known.json" / "in the way").mkdir(parents=True)
    file.write({"a": 1})
    assert "known.json can't be written" in caplog.text
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["known.json"]


def test_a_place_that_can_not_hold_it_is_told_of_once(file, tmp_path, caplog):
    """A server whose cache directory can't be written goes on without; it says so when that begins."""
    (tmp_path / "cache").touch()
    for _ in range(3):
        file.write({"a": 1})
    assert len(caplog.records) == 1
    assert "known.json can't be written" in caplog.text

    (tmp_path / "cache").unlink()
    file.write({"a": 2})
    assert file.read() == {"a": 2}
    (tmp_path / "cache").rename(tmp_path / "away")
    (tmp_path / "cache").touch()
    file.write({"a": 3})
    assert len(caplog.records) == 2


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory to somebody else")
def test_a_directory_of_another_user_is_not_believed(file, tmp_path, caplog):
    """In a folder that everybody may write to, somebody else's file says nothing, and nothing is written there."""
    tmp_path.chmod(0o1777)
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "known.json").write_text('{"form": "known 1", "a": 1}')
    os.chown(tmp_path / "cache", 12345, 12345)

    assert file.read() == {}
    file.write({"a": 2})
    assert json.loads((tmp_path / "cache" / "known.json").read_text())["a"] == 1
    assert ["another user" in record.getMessage() for record in caplog.records] == [True, True]


# -- lazily ------------------------------------------------------------------------------------------------------------


class Noted(StateFile):
    """One that notes what is kept, and may hold that back."""

    def __init__(self, path):
        super().__init__(path, "known 1")
        self.written = []
        self.before = lambda: None

    def keep(self, changes, snapshot):
        """As the real one."""
        self.before()
        self.written.append(snapshot()["number"]["now"])
        super().keep(changes, snapshot)


class Known:
    """A document with one number."""

    def __init__(self):
        self.number = 0

    def snapshot(self):
        """See `Source`."""
        return {"number": {"now": self.number}}

    def changes(self):
        """See `Source`."""
        return [("number", "now", self.number)]


@contextlib.contextmanager
def lazily(folder, delay):
    """A lazy file of a number, the file, and the number."""
    file, known = Noted(folder / "known.json"), Known()
    with ThreadPoolExecutor(1) as pool:
        yield LazyFile(file, known, pool, delay=delay), file, known


async def test_many_changes_are_one_write(tmp_path):
    """Changes that come together are written together, some time after the first."""
    with lazily(tmp_path, delay=0.01) as (lazy, file, known):
        for number in range(1, 100):
            known.number = number
            lazy.changed()
        await until(lambda: file.written)
        await lazy.flush()
        assert file.written == [99]


async def test_a_flush_waits_for_what_has_changed_and_for_nothing_else(tmp_path):
    """Unchanged, it returns at once; changed, when that is in the file, though the delay be an hour."""
    with lazily(tmp_path, delay=3600.0) as (lazy, file, known):
        await lazy.flush()
        assert file.written == []
        known.number = 1
        lazy.changed()
        await asyncio.gather(lazy.flush(), lazy.flush())
        assert (file.written, file.read()["number"]["now"]) == ([1], 1)
        await lazy.flush()
        assert file.written == [1]


async def test_a_change_during_a_write_is_written_after_it(tmp_path):
    """Nothing that changes while a write is under way is lost, and who flushes then waits for the second write."""
    with lazily(tmp_path, delay=3600.0) as (lazy, file, known):
        loop = asyncio.get_running_loop()

        def change():
            known.number += 1
            loop.call_soon_threadsafe(lazy.changed)

        file.before = change
        lazy.changed()
        await lazy.flush()
        file.before = lambda: None
        await lazy.flush()
        assert file.written[-1] == known.number
        assert file.read()["number"]["now"] == known.number


async def test_a_closed_file_is_not_written_any_more(tmp_path):
    """What is being written is waited for; changes that are not written by then never are."""
    with lazily(tmp_path, delay=0.0) as (lazy, file, known):
        known.number = 1
        lazy.changed()
        writing = asyncio.create_task(lazy.flush())
        await asyncio.sleep(0)
        await lazy.close()
        await writing
        known.number = 2
        lazy.changed()
        await asyncio.sleep(0.01)
        assert (file.written, file.read()["number"]["now"]) == ([1], 1)
