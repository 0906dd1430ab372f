"""What one worker had registered is there for the next of the same master, and for nobody else."""

import contextlib
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from serve.state_file import Journal, Row, goes_on, life_of
from tests.waiting import until

OWN = life_of(os.getpid())


# -- lives -------------------------------------------------------------------------------------------------------------


def test_a_life_has_one_name_as_long_as_it_lasts():
    """The name of a process is always the same, goes on while it lives, and ends with it."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        life = life_of(process.pid)
        assert life == life_of(process.pid) != OWN
        assert goes_on(life)
        assert str(process.pid) in life
    finally:
        process.communicate()
    assert not goes_on(life)
    assert life_of(process.pid) == ""


@pytest.mark.parametrize(
    "other",
    [
        "",
        "nonsense",
        "a-b-c",
        OWN + "1",
        OWN.replace(OWN.split("-", maxsplit=1)[0], "00000000"),
        f"{OWN.split('-', maxsplit=1)[0]}-0-1",
        "--",
    ],
    ids=[
        "none",
        "nonsense",
        "no numbers",
        "same number, started later",
        "before the system started",
        "nobody",
        "dashes",
    ],
)
def test_another_life_under_the_same_number_is_not_this_one(other):
    """Numbers of processes come again; start and system tell them apart."""
    assert not goes_on(other)


def test_a_program_may_be_called_anything(tmp_path):
    """Brackets and spaces in a program's name do not confuse who reads its start."""
    program = tmp_path / "a) 1 2 (b"
    program.symlink_to(sys.executable)
    process = subprocess.Popen([program, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        start = life_of(process.pid).rpartition("-")[2]
        assert int(start) >= int(OWN.rpartition("-")[2])
    finally:
        process.communicate()


# -- journals ----------------------------------------------------------------------------------------------------------


class Used:
    """An entry, as far as a journal looks at it."""

    def __init__(self, last_used):
        self.last_used = last_used


@pytest.fixture
@contextlib.asynccontextmanager
async def opened(tmp_path):
    """Opens journals in one directory."""
    with ThreadPoolExecutor(1) as pool:

        def opened(life=OWN, entries=None):
            return Journal(tmp_path, life, entries if entries is not None else {}, pool)

        yield opened


async def test_the_next_worker_knows_what_this_one_knew(opened, tmp_path):
    """Rows, other names, what was unloaded by hand, and when each model was used last."""
    entries = {"a": Used(0.0), "b": Used(5.0)}
    journal = opened(entries=entries)
    journal.rows = {
        "a": Row("a", "/models/a", body=True, used=7.0, config="{}", folder="f", steps=("b", "c")),
        "b": Row("b"),
    }
    journal.aliases["other"] = "a"
    journal.unloaded.add("c")
    journal.changed("models", "a")
    await journal.flush()

    again = opened()
    assert again.rows["a"] == journal.rows["a"]
    assert again.rows["b"].used > 1e9
    assert (list(again.rows), again.aliases, again.unloaded) == (["a", "b"], {"other": "a"}, {"c"})
    assert repr(again) == "<Journal of 2 models, 1 aliases>"
    assert [path.name for path in tmp_path.iterdir()] == [f"journal-{OWN}.json"]


async def test_a_server_started_anew_knows_nothing(opened, tmp_path):
    """Journals of lives that are over are removed, those of servers that live stay; a journal of nobody is not kept."""
    (tmp_path / f"journal-{OWN}1.json").write_text("{}")
    (tmp_path / "journal-.json").write_text("{}")
    (tmp_path / f".journal-{OWN}1.json.4711").write_text("{")
    parent = life_of(os.getppid())
    (tmp_path / f"journal-{parent}.json").write_text('{"form": "mme journal 2", "models": {"a": {"name": "a"}}}')
    assert opened().rows == {}
    assert [path.name for path in tmp_path.iterdir()] == [f"journal-{parent}.json"]
    assert list(opened(parent).rows) == ["a"]
    nobodys = opened("")
    nobodys.changed("models", "a")
    await nobodys.flush()
    assert [path.name for path in tmp_path.iterdir()] == [f"journal-{parent}.json"]


@pytest.mark.parametrize(
    "document",
    [
        {"models": {"a": {"name": "a", "colour": "red"}}},
        {"models": {"a": {"url": "/a"}}},
        {"models": 7},
        {"models": [7]},
        {"models": {"a": 7}},
        {"models": {"a": {"name": "a"}}, "aliases": [1]},
        {"models": {"a": {"name": 5}}},
        {"models": {"a": {"name": "a", "used": "today"}}},
        {"models": {"a": {"name": "a", "url": None}}},
        {"models": {"a": {"name": "a", "steps": 7}}},
        {"models": {"a": {"name": "a", "steps": [7]}}},
    ],
)
async def test_a_journal_that_makes_no_sense_is_ignored(opened, tmp_path, document, caplog):
    """With a warning; the worker starts without it."""
    (tmp_path / f"journal-{OWN}.json").write_text(json.dumps({"form": "mme journal 2", **document}))
    journal = opened()
    assert (journal.rows, journal.aliases, journal.unloaded) == ({}, {}, set())
    assert "is ignored" in caplog.text
    journal.rows["b"] = Row("b")
    journal.changed("models", "b")
    await journal.flush()
    assert list(opened().rows) == ["b"]


async def test_changes_that_nobody_waits_for_are_written_as_well(opened, tmp_path, monkeypatch):
    """Before long, and together."""
    monkeypatch.setattr("serve.state_file._JOURNAL_SECONDS", 0.01)
    journal = opened()
    for name in "abc":
        journal.rows[name] = Row(name)
        journal.changed("models", name)
    await until(lambda: Path(tmp_path / f"journal-{OWN}.json").exists())
    assert list(opened().rows) == ["a", "b", "c"]


async def test_a_change_is_written_and_not_all_that_is_registered(opened, tmp_path):
    """Beside a thousand models as beside none: what one of them costs is its row; what was deleted is gone."""
    path, journal = tmp_path / f"journal-{OWN}.json", opened()
    journal.rows = {f"m{number}": Row(f"m{number}") for number in range(1000)}
    journal.unloaded.add("gone")
    journal.changed("models", "m0")
    await journal.flush()
    whole = path.stat().st_size
    journal.rows["new"] = Row("new", "/models/new")
    journal.aliases["other"] = "new"
    del journal.rows["m5"]
    journal.unloaded.discard("gone")
    for change in (("models", "new"), ("aliases", "other"), ("models", "m5"), ("unloaded", "gone")):
        journal.changed(*change)
    await journal.flush()

    assert whole > 50_000
    assert path.stat().st_size - whole < 300
    again = opened()
    assert (again.rows, again.aliases, again.unloaded) == (journal.rows, {"other": "new"}, set())
