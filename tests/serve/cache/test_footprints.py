"""Footprints are remembered by what was loaded, and teach what to expect of others."""

import json
import tempfile
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from model_handlers.base import Footprint
from serve.cache import footprints
from serve.cache.footprints import SMALLEST, Footprints
from serve.state_file import StateFile

MB = 1_000_000
DISK = Footprint(100 * MB, (50 * MB,))


def test_the_same_bytes_take_what_they_took(tmp_path):
    """A measured artifact is expected to take the same again, also after a restart, whatever others taught."""
    known = Footprints()
    assert known.expected("a", "onnx", DISK, 1.5) == Footprint(150 * MB, (75 * MB,))
    known.measured("a", "onnx", DISK, Footprint(123, (45,)))
    for number in range(5):
        known.measured(f"other {number}", "onnx", DISK, Footprint(500 * MB, (500 * MB,)))
    restarted = Footprints(json.loads(json.dumps(known.snapshot())))

    for memory in (known, restarted):
        assert memory.expected("a", "onnx", DISK, 1.5) == Footprint(123, (45,))
    assert repr(restarted) == "<Footprints of 6 artifacts, by 2 kinds of handlers>"


def test_what_a_model_shares_is_remembered_by_name():
    """It is to be there once for all who take it, of whom each takes its own."""
    known = Footprints()
    known.measured("a", "python", DISK, Footprint(5 * MB, shared={"fork server of f": 90 * MB}))
    known.takes_at_least("a", Footprint(7 * MB))
    restarted = Footprints(json.loads(json.dumps(known.snapshot())))

    for memory in (known, restarted):
        expected = memory.expected("a", "python", DISK, 1.5)
        assert (expected.host, expected.shared) == (7 * MB, {"fork server of f": 90 * MB})


def test_each_handler_and_each_kind_of_memory_has_a_factor_of_its_own():
    """What one framework's models take on the host says nothing of another's, nor of a device."""
    known = Footprints()
    for number in range(3):
        known.measured(f"a{number}", "onnx", DISK, Footprint(200 * MB, (200 * MB,)))
    restarted = Footprints(known.snapshot())

    for memory in (known, restarted):
        assert memory.expected("new", "onnx", DISK, 1.5) == Footprint(200 * MB, (200 * MB,))
        assert memory.expected("new", "onnx", Footprint(10 * MB), 1.5) == Footprint(20 * MB)
        assert memory.expected("new", "python", DISK, 1.5) == Footprint(150 * MB, (75 * MB,))


def test_a_guess_is_no_more_than_a_budget_that_the_files_fit():
    """Of devices, and of the host where somebody looks what it takes; what was seen to take more is known to."""
    known = Footprints(None, Footprint(120 * MB, (60 * MB, 40 * MB)))
    for files, expected in ((90 * MB, 120 * MB), (70 * MB, 105 * MB), (121 * MB, 181_500_000)):
        assert known.expected("a", "onnx", Footprint(files), 1.5, watched=True) == Footprint(expected)
    for disk, expected in (((50 * MB,), (60 * MB,)), ((30 * MB, 50 * MB), (45 * MB, 75 * MB)), ((0, 0, 9), (0, 0, 13))):
        assert known.expected("a", "onnx", Footprint(100 * MB, disk), 1.5) == Footprint(150 * MB, expected)
    known.takes_at_least("a", Footprint(1, (70 * MB,)))
    assert known.expected("a", "onnx", DISK, 1.5) == Footprint(1, (70 * MB,))


def test_small_models_teach_nothing():
    """What a framework takes for itself says nothing about weights."""
    known = Footprints()
    known.measured("small", "onnx", Footprint(SMALLEST - 1), Footprint(10 * MB))
    assert known.expected("next", "onnx", DISK, 1.5) == Footprint(150 * MB, (75 * MB,))

    known.measured("larger", "onnx", Footprint(SMALLEST), Footprint(3 * SMALLEST))
    assert known.expected("next", "onnx", Footprint(SMALLEST), 1.5).host == 3 * SMALLEST


def test_only_the_latest_count():
    """A framework that was updated is soon known for what it takes now."""
    known = Footprints()
    for number in range(40):
        known.measured(f"old {number}", "onnx", DISK, Footprint(900 * MB, ()))
    for number in range(32):
        known.measured(f"new {number}", "onnx", DISK, Footprint(100 * MB, ()))

    assert known.expected("next", "onnx", DISK, 1.5).host == 100 * MB
    assert len(known.snapshot()["models"]["onnx host"]) == 32


def test_the_artifact_unused_for_longest_is_forgotten(monkeypatch):
    """There is room for so many; a restart does not change who is next."""
    monkeypatch.setattr(footprints, "_ARTIFACTS", 3)
    known = Footprints()
    for name in "abc":
        known.measured(name, "onnx", DISK, Footprint(ord(name)))
    known.expected("a", "onnx", DISK, 1.5)
    restarted = Footprints(known.snapshot())
    for memory in (known, restarted):
        memory.measured("d", "onnx", DISK, Footprint(1))
        assert list(memory.snapshot()["seen"]) == ["c", "a", "d"]


@pytest.mark.parametrize(
    "document",
    [
        {"seen": [], "models": None},
        {
            "seen": {
                "a": None,
                "b": [1, 2],
                "c": {"host": "much"},
                "d": {"host": -1},
                "e": {"host": 1.5},
                "f": {"devices": 7},
                "g": {"host": 1, "shared": ["weights"]},
                "h": {"host": 1, "shared": {"weights": -1}},
            }
        },
        {"ratios": {"onnx host": [1.5, 1.6]}},
        {"models": {"onnx host": "high", "onnx device": [1, None], "python host": [[1, 2, 3]]}},
        {"models": {"a host": [[0, 1]], "b host": [[1 << 20, -1]], "c host": [[1 << 20, "2"]], "d host": [[1 << 20]]}},
        {"something": "else"},
    ],
)
def test_what_makes_no_sense_is_left_out(document):
    """A file of another version may hold anything; what can't be a footprint is none."""
    assert Footprints(document).snapshot() == {"seen": {}, "models": {}}


def test_fields_of_another_version_do_no_harm():
    """A row may know more than we do, or less."""
    rows = {"more": {"host": 1, "devices": [2], "elsewhere": 3}, "less": {"host": 4}}
    known = Footprints({"seen": rows})

    assert known.expected("more", "onnx", DISK, 1.5) == Footprint(1, (2,))
    assert known.expected("less", "onnx", DISK, 1.5) == Footprint(4)


def test_threads_do_not_get_into_each_others_way():
    """Load threads measure while snapshots are taken."""
    known = Footprints()
    problems = []

    def work(name):
        try:
            for number in range(300):
                known.measured(f"{name}{number}", "onnx", DISK, Footprint(number * MB))
                known.expected(f"{name}{number // 2}", "onnx", DISK, 1.5)
                known.snapshot()
        except Exception as error:  # noqa: BLE001 - whatever it is
            problems.append(error)

    threads = [threading.Thread(target=work, args=(name,)) for name in "abc"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []


@given(st.lists(st.tuples(st.sampled_from("mteg"), st.sampled_from("abcdef"), st.integers(1, 3)), max_size=30))
def test_a_file_that_is_told_the_changes_has_all(steps):
    """Whatever is measured, expected and forgotten: lines of changes and the whole document say the same."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patched:
        patched.setattr(footprints, "_ARTIFACTS", 3)
        known, file = Footprints(), StateFile(Path(folder) / "footprints.json", footprints.FORM)
        for deed, identity, size in steps:
            taken = Footprint(size * MB, (0, size), {"file": size} if size > 1 else {})
            if deed == "m":
                known.measured(identity, "onnx", Footprint(size << 20, (size << 21,)), taken)
            elif deed == "t":
                known.takes_at_least(identity, taken)
            elif deed == "e":
                known.expected(identity, "onnx", Footprint(size), 1.3)
            else:
                known.grew(identity, taken, taken)
            file.keep(known.changes(), known.snapshot)
            again = Footprints(file.read())
            assert list(again.snapshot()["seen"].items()) == list(known.snapshot()["seen"].items())
            assert again.snapshot() == known.snapshot()
