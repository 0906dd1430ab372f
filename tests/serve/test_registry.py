"""A worker that dies loses no registration: engines of one life after another, over the same directory."""

import asyncio
import os
import shutil
import time

import pytest

from model_handlers.errors import Kind, MmeError
from serve.cache.entry import State
from serve.state_file import life_of
from tests.serve.engines import answered, engine_of
from tests.serve.inside import artifacts_of, evict, journal_of, next_look, noted_use
from tests.waiting import until


def worker(tmp_path, **options):
    """The engine of a worker, and of the next if there was one before."""
    return engine_of(tmp_path, **{"life": life_of(os.getpid())} | options)


@pytest.fixture
def unpacked(tmp_path, write_repository_model):
    """What a platform unpacks: folders that hold a model each."""
    return {name: str(write_repository_model(tmp_path / "opt" / name / "model" / name).parent) for name in "abc"}


async def test_what_was_posted_answers_without_another_post(toys, tmp_path, unpacked):
    """The next worker lists the models, calls them ready and by their other names, and loads each when it is asked."""
    async with worker(tmp_path, evicts=False) as before:
        await before.load("hash-a", unpacked["a"], "a.tar.gz")
        await before.load("b", unpacked["b"])
        await before.load("c", unpacked["c"], "other")
        await before.unload("c")
        listed = before.index.registered()
        async with worker(tmp_path, evicts=False) as after:
            assert after.index.registered() == listed == [("b", unpacked["b"]), ("hash-a", unpacked["a"])]
            assert after.index.is_ready("b")
            assert (after.registry.canonical("a.tar.gz"), after.registry.canonical("other")) == ("hash-a", "other")
            assert after.index.url("hash-a") == unpacked["a"]
            assert [entry.state for entry in after.cache.entries.values()] == [State.EVICTED] * 2
            assert {row["reason"] for row in after.index.rows()} == {"not loaded since the worker was replaced"}
            assert await answered(after, toys, "hash-a") == 2
            assert await answered(after, toys, "b") == 2
            with pytest.raises(MmeError) as caught:
                await answered(after, toys, "c")
            assert caught.value.kind is Kind.UNKNOWN_MODEL
            await after.unload("b")
            await after.load("b", unpacked["c"])
            async with worker(tmp_path, evicts=False) as third:
                assert third.index.registered() == [("b", unpacked["c"]), ("hash-a", unpacked["a"])]


async def test_another_master_starts_with_nothing(toys, tmp_path, unpacked):
    """A container that is started anew is told again what to serve; without a life nothing is kept."""
    parent = life_of(os.getppid())
    async with worker(tmp_path, life=parent, evicts=False) as before:
        await before.load("a", unpacked["a"])
    for life in (life_of(os.getpid()), ""):
        async with worker(tmp_path, life=life, evicts=False) as engine:
            assert engine.index.registered() == []
            await engine.load("b", unpacked["b"])


async def test_models_of_a_store_are_registered_again_too(toys, tmp_path, store):
    """Those that requests loaded and those that were loaded by name; their archives were used when they were used."""
    async with worker(tmp_path, store=str(store)) as before:
        await answered(before, toys, "a.tar.gz")
        await before.reload("b.tar.gz")
        await asyncio.sleep(0)
        before.cache.entries["a.tar.gz"].last_used = time.monotonic() + 1000
        await journal_of(before.registry).flush()
        journal_of(before.registry).changed("models", "a.tar.gz")
        await journal_of(before.registry).flush()
        async with worker(tmp_path, store=str(store)) as after:
            assert [name for name, _ in after.index.registered()] == ["a.tar.gz", "b.tar.gz"]
            (copy,) = artifacts_of(after).copies("a.tar.gz")
            assert copy.stat().st_mtime == pytest.approx(time.time() + 1000, abs=60)
            assert await answered(after, toys, "b.tar.gz") == 2
            assert after.registry.stats["b.tar.gz"].download.count == 0


async def test_what_was_unloaded_by_hand_is_known(toys, tmp_path, repository):
    """A model of a repository that somebody unloaded is none of those that a start-up list brings back."""
    async with worker(tmp_path, repository=repository) as before:
        for name in "abc":
            await before.load(name)
        await before.unload("a")
        await before.unload("b")
        await before.load("b")
        async with worker(tmp_path, repository=repository) as after:
            assert after.registry.unloaded == {"a"}
            assert [name for name, _ in after.index.registered()] == ["b", "c"]
            assert await answered(after, toys, "a") == 2
            assert after.registry.unloaded == frozenset()


async def test_a_model_whose_folder_is_gone_is_not_registered(toys, tmp_path, unpacked, caplog):
    """What can't be served again is told of, and costs the others nothing."""
    async with worker(tmp_path, evicts=False) as before:
        await before.load("a", unpacked["a"], "alias")
        await before.load("b", unpacked["b"])
        shutil.rmtree(unpacked["a"])
        async with worker(tmp_path, evicts=False) as after:
            assert after.index.registered() == [("b", unpacked["b"])]
            assert "model 'a' is not registered any more" in caplog.text
            assert after.registry.canonical("alias") == "alias"
            assert await answered(after, toys, "b") == 2


async def test_a_model_that_left_the_store_is_not_in_the_journal(toys, tmp_path, store):
    """Its next request finds it gone, and so does the next worker."""
    async with worker(tmp_path, store=str(store)) as before:
        await answered(before, toys, "b.tar.gz")
        await answered(before, toys, "a.tar.gz")
        await evict(before.cache, "a.tar.gz")
        (store / "a.tar.gz").unlink()
        with pytest.raises(MmeError) as caught:
            await answered(before, toys, "a.tar.gz")
        assert caught.value.kind is Kind.UNKNOWN_MODEL
        await journal_of(before.registry).flush()
        async with worker(tmp_path, store=str(store)) as after:
            assert [name for name, _ in after.index.registered()] == ["b.tar.gz"]


async def test_a_load_that_fails_is_not_in_the_journal(toys, tmp_path, unpacked):
    """Neither one that never worked, nor a reload that took away what was there."""
    async with worker(tmp_path, evicts=False) as before:
        await before.load("a", unpacked["a"])
        shutil.rmtree(unpacked["a"])
        with pytest.raises(MmeError):
            await before.reload("a")
        with pytest.raises(MmeError):
            await before.load("none", str(tmp_path))
        async with worker(tmp_path, evicts=False) as after:
            assert after.index.registered() == []


async def test_last_uses_are_written_once_in_a_while(toys, tmp_path, repository, monkeypatch):
    """Requests write nothing; now and then the journal takes down when models were used."""
    monkeypatch.setattr("serve.registry._USE_SECONDS", 0.01)
    monkeypatch.setattr("serve.state_file._JOURNAL_SECONDS", 0.0)
    async with worker(tmp_path, repository=repository) as engine:
        register, journal, writes = engine.registry, journal_of(engine.registry), []

        async def look():
            await until(next_look(register))

        async def noted():
            await answered(engine, toys, "a")
            entry = engine.cache.entries["a"]
            while entry.leases or noted_use(register) < entry.last_used:  # it may look in the middle of a use
                await look()

        await noted()
        await journal.flush()
        changed = journal.changed
        journal.changed = lambda *what: writes.append(changed(*what))
        await look()
        assert not writes
        await noted()
        assert writes
        settled = len(writes)
        await look()
        assert len(writes) == settled
