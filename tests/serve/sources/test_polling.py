"""A repository that is looked at again and again: tables of changes, and a poller over models that only remember."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from model_handlers.errors import Kind, MmeError
from serve.options import Control
from serve.sources import polling
from serve.sources.polling import Changes, Poller, changes
from tests.waiting import until

PRINTS = st.dictionaries(st.sampled_from("abc"), st.sampled_from("123"))


@pytest.mark.parametrize(
    ("before", "now", "found"),
    [
        ({}, {}, Changes()),
        ({}, {"b": "1", "a": "1"}, Changes(("a", "b"))),
        ({"a": "1", "b": "1"}, {"a": "1", "b": "2"}, Changes(("b",))),
        ({"a": "1", "b": "1"}, {}, Changes((), ("a", "b"))),
        ({"a": "1", "b": "1"}, {"a": "2", "c": "1"}, Changes(("a", "c"), ("b",))),
    ],
)
def test_what_has_become_of_a_repository(before, now, found):
    """Added and changed models, and those that are gone."""
    assert changes(before, now) == found


@given(PRINTS, PRINTS)
def test_changes_lead_from_one_to_the_other(before, now):
    """Nothing is named that is as it was, and whoever does what is named has what there is now."""
    found = changes(before, now)
    after = {name: text for name, text in before.items() if name not in found.removed}
    after |= {name: now[name] for name in found.present}
    assert after == now
    assert all(before.get(name) != now[name] for name in found.present)


class Folder:
    """A repository whose contents the test sets, and an engine that notes what it is asked for."""

    def __init__(self, **models):
        self.models = models
        self.done = []
        self.served = set()
        self.broken = set()
        self.fault = None
        self.unreadable = False

    def scan(self):
        """See `Poller`."""
        if self.unreadable:
            raise MmeError(Kind.INVALID_ARGUMENT, "model repository '/r' is not a directory")
        return dict(self.models)

    async def reload(self, name):
        """See `Models`."""
        self.done.append(f"load {name}")
        if name in self.broken:
            raise self.fault or MmeError(Kind.INVALID_MODEL, "bad")
        self.served.add(name)

    async def unload(self, name):
        """See `Models`."""
        self.done.append(f"unload {name}")
        self.served.discard(name)
        if name in self.broken:
            raise self.fault or MmeError(Kind.UNKNOWN_MODEL, "there is none")

    @property
    def index(self):
        return self

    def is_ready(self, name):
        """See `Models`."""
        return name in self.served

    def asked(self):
        """What it was asked for since this was asked last."""
        done, self.done = self.done, []
        return done


async def test_a_poller_keeps_up(caplog):
    """Each change is acted upon once; what does not load is tried again when it has changed, not before."""
    folder = Folder(a="1", b="1")
    folder.broken = {"b"}
    poller = Poller(folder, folder.scan, 3600)
    assert not await poller.look()
    assert sorted(folder.asked()) == ["load a", "load b"]
    assert not await poller.look()
    assert folder.asked() == []
    folder.models = {"a": "2", "b": "2", "c": "1"}
    assert not await poller.look()
    assert sorted(folder.asked()) == ["load a", "load b", "load c"]
    folder.served.add("b")  # as an ensemble is, with the last of its parts
    assert await poller.look()
    folder.models = {"c": "1"}
    assert await poller.look()
    assert folder.asked() == ["unload a", "unload b"]
    folder.unreadable = True
    assert not await poller.look()
    assert folder.asked() == []
    folder.unreadable = False
    assert await poller.look()
    assert folder.asked() == []
    assert "model 'b' did not load: bad" in caplog.text
    assert "everything stays as it is, the repository can't be read" in caplog.text


async def test_what_could_not_be_loaded_just_then_is_tried_again_at_the_next_look():
    """Though its files are the same: the store, or memory, was not available. Until it is there or left."""
    folder = Folder(a="1", b="1")
    folder.broken = {"a", "b"}
    folder.fault = MmeError(Kind.UNAVAILABLE, "the store can't be reached")
    poller = Poller(folder, folder.scan, 3600)
    for _ in range(2):
        assert not await poller.look()
        assert sorted(folder.asked()) == ["load a", "load b"]
    folder.broken = {"b"}
    del folder.models["b"]
    assert await poller.look()
    assert folder.asked() == ["unload b", "load a"]
    assert await poller.look()
    assert folder.asked() == []


async def test_what_left_while_nobody_looked_is_unloaded():
    """A worker may know models from the one before it that the repository has no more."""
    folder = Folder(a="1")
    poller = Poller(folder, folder.scan, 3600, ["a", "b"])
    assert await poller.look()
    assert folder.asked() == ["unload b", "load a"]


async def test_who_executes_without_end_keeps_nobody_waiting(monkeypatch):
    """A model that was removed and can't leave goes on leaving by itself: others are loaded, and the folder looked at."""
    monkeypatch.setattr(polling, "_LEAVE_SECONDS", 0.05)
    ended = asyncio.Event()

    class Stuck(Folder):
        async def unload(self, name):
            await super().unload(name)
            if name == "a":
                await ended.wait()
                self.done.append("gone a")

    folder = Stuck(a="1", b="1")
    poller = Poller(folder, folder.scan, 3600)
    assert await poller.look()
    folder.asked()
    folder.models = {"c": "1"}
    async with asyncio.timeout(60):
        assert await poller.look()
    assert folder.asked() == ["unload a", "unload b", "load c"]
    ended.set()
    await until(lambda: repr(poller) == "<Poller of 1 models, 0 leave>")
    assert folder.asked() == ["gone a"]


@pytest.mark.parametrize(("mode", "refuses"), [("demand", 0), ("none", 1), ("explicit", 0), ("poll", 1)])
def test_modes_that_leave_clients_no_say(mode, refuses):
    """Loads and unloads are refused in Triton's words."""
    if not refuses:
        Control(mode).check()
        return
    with pytest.raises(MmeError, match="explicit model load / unload is not allowed if polling is enabled") as caught:
        Control(mode).check()
    assert caught.value.kind is Kind.UNAVAILABLE


async def test_whatever_goes_wrong_the_folder_is_looked_at_again(caplog):
    """Also what nobody expects: a thread that the system has no room for, at a load, an unload or a look."""
    folder = Folder(a="1", b="1")
    scans = [folder.scan]
    poller = Poller(folder, lambda: scans[-1](), 0)  # noqa: PLW0108 - the last one by then
    folder.fault = RuntimeError("can't start new thread")
    folder.broken = {"a"}
    assert not await poller.look()
    assert sorted(folder.asked()) == ["load a", "load b"]
    folder.models = {"b": "2"}
    assert await poller.look()
    assert folder.asked() == ["unload a", "load b"]
    looks, seen = [], asyncio.Event()

    def fail_once():
        scans.pop()
        raise folder.fault

    scans.append(fail_once)
    task = asyncio.create_task(poller.run(lambda there: (looks.append(there), len(looks) == 2 and seen.set())))
    async with asyncio.timeout(60):
        await seen.wait()
    task.cancel()
    assert looks[:2] == [False, True]
    assert "model 'a' did not load: can't start new thread" in caplog.text
