"""The engine over real ONNX models on disk: names, loads, evictions, unloads, and requests through all of it."""

import asyncio
import contextlib
import gzip
import os
import shutil
import threading
from pathlib import Path

import pytest

from model_handlers.base import Footprint
from model_handlers.errors import Kind, MmeError
from model_handlers.model_calls import Override
from model_handlers.onnx import OnnxHandler
from model_handlers.system.threads import NEVER
from serve.cache.entry import Failure
from serve.cache.eviction import Rules
from serve.options import Control
from serve.threads import STARTER
from tests.serve import growing
from tests.serve.engines import PLENTY, answered, ask, engine_of, resident_models
from tests.serve.inside import (
    admits_nothing,
    artifacts_of,
    evict,
    give_clients,
    give_loads,
    lanes_of,
    loader_of,
    loads_of,
    users_of,
)
from tests.serve.integrity import check_integrity
from tests.waiting import until

HEAVY = Footprint(100_000_000)
ROOM_FOR_ONE = Footprint(150_000_000)
# A request waits this long for company: long enough for a test to do something while it is in flight.
PATIENT = "dynamic_batching { preferred_batch_size: [ 4 ] max_queue_delay_microseconds: 100000 } max_batch_size: 4"


@pytest.fixture
def unpacked(tmp_path, write_repository_model):
    """What the platform unpacks: folders that hold a model each."""
    return {name: str(write_repository_model(tmp_path / "opt" / name / "model" / name).parent) for name in "ab"}


def failure(caught):
    """The kind of a raised error."""
    return caught.value.kind


def may_be_tried(engine, name):
    """The time is over for which requests leave it alone."""
    entry = engine.cache.entries[name]
    assert entry.failure.until
    entry.failure = Failure(*entry.failure[:-1], until=0.0)


@contextlib.contextmanager
def held_loads(engine):
    """No load gets further than its files while this lasts."""
    loader, go = loader_of(engine.cache), threading.Event()
    load = loader.load

    def held(*args, **kwargs):
        assert go.wait(60)
        return load(*args, **kwargs)

    loader.load = held
    try:
        yield
    finally:
        del loader.load
        go.set()


def loading(engine, name="a"):
    """Whether a load of that name is under way."""
    return name in engine.cache.entries and engine.cache.entries[name].state.shown == "LOADING"


# -- requests ----------------------------------------------------------------------------------------------------------


async def test_a_request_loads_the_model_that_it_names(toys, tmp_path, repository):
    """Not in memory, nothing happens; then the model is loaded, answers, and is in memory for the next."""
    async with engine_of(tmp_path, repository=repository) as engine:
        call = toys.Call(3)
        assert engine.submit("a", None, call.request) is False
        assert call.answers == []
        report = await engine.submit_cold("a", None, call.request)
        assert report.load > 0
        await call.answer()
        assert call.kind is None
        again = toys.Call(4)
        assert engine.submit("a", None, again.request) is True
        await again.answer()
        assert again.kind is None
        assert engine.cache.entries["a"].leases == 0
        assert engine.stats["a", 1].success.count == 2
        assert repr(engine).startswith("<Engine <ModelCache 1 ready of 1 known")


async def test_a_version_that_is_not_served_is_unknown_and_holds_no_lease(toys, tmp_path, write_repository_model):
    """Requests and leases for an unknown version fail, cold and warm, and leave the model free to go."""
    write_repository_model(tmp_path / "models" / "a", "version_policy { all {} }", versions=(1, 2))
    async with engine_of(tmp_path, repository=tmp_path / "models") as engine:
        for _ in ("cold", "warm"):
            with pytest.raises(MmeError, match="served versions are 1, 2") as caught:
                await ask(engine, toys.Call(1), version=7)
            assert failure(caught) is Kind.UNKNOWN_VERSION
        with pytest.raises(MmeError):
            async with engine.leased("a", 7):
                raise AssertionError
        assert engine.cache.entries["a"].leases == 0
        assert [await answered(engine, toys, version=version) for version in (None, 1, 2)] == [3, 2, 3]
        assert engine.index.versions("a") == [1, 2]
        assert [engine.index.is_ready("a", version) for version in (None, 1, 2, 7)] == [True, True, True, False]


async def test_a_request_that_is_refused_holds_no_lease(toys, tmp_path, repository):
    """A request that does not fit, or whose making fails, leaves the model free to go."""
    (repository / "a" / "config.pbtxt").write_text("max_batch_size: 4")
    async with engine_of(tmp_path, repository=repository) as engine:
        await answered(engine, toys)
        with pytest.raises(MmeError, match="batch-size must be <= 4"):
            await ask(engine, toys.Call(*range(5)))

        def make(config):
            raise MmeError(Kind.INVALID_ARGUMENT, f"not for {config.name}")

        with pytest.raises(MmeError, match="not for a"):
            await engine.submit_made("a", None, make)
        assert engine.cache.entries["a"].leases == 0


async def test_a_request_whose_client_left_before_it_was_made_is_refused(toys, tmp_path, repository):
    """It is counted, and never queued: there it might wait for its turn behind whole sequences."""
    async with engine_of(tmp_path, repository=repository) as engine:
        call = toys.Call(1)
        call.request.cancel()
        with pytest.raises(MmeError) as caught:
            await engine.submit_made("a", None, lambda _config: call.request)
        assert failure(caught) is Kind.CANCELLED
        assert (engine.stats["a", 1].failures["CANCELED"], call.answers) == (1, [])
        assert engine.cache.entries["a"].leases == 0


async def test_a_client_that_leaves_while_its_model_loads_leaks_nothing(toys, tmp_path, repository):
    """Cancelled in the middle of a load, a request is not submitted, and the model serves the next."""
    async with engine_of(tmp_path, repository=repository) as engine:
        call = toys.Call(1)
        with held_loads(engine):
            task = asyncio.create_task(ask(engine, call))
            await until(lambda: loading(engine))
            task.cancel()
            await asyncio.wait([task])
        assert await answered(engine, toys) == 2
        assert call.answers == []
        assert engine.cache.entries["a"].leases == 0
        assert engine.registry.stats["a"].loads == 1


async def test_patience_with_a_load_ends_and_the_load_goes_on(toys, tmp_path, repository, monkeypatch):
    """A load that waited for its turn has its time still before it: whoever asked for it may ask again."""
    monkeypatch.setattr("serve.load_api._GRACE_SECONDS", 0.0)
    async with engine_of(tmp_path, repository=repository, load_patience=0.05, load_threads=1) as engine:
        give_loads(engine.cache, 350.0)
        with held_loads(engine):
            first = asyncio.create_task(ask(engine, toys.Call(1), "a"))
            second = asyncio.create_task(ask(engine, toys.Call(1), "b"))
            for task in (first, second):
                with pytest.raises(MmeError, match="its load goes on"):
                    await task
        await until(lambda: engine.index.is_ready("a") and engine.index.is_ready("b"))
        assert await answered(engine, toys, "b") == 2


async def test_a_slow_load_is_in_nobodys_way(toys, tmp_path, repository):
    """While a model loads for as long as it likes, another in memory answers, and a third one's status is told."""
    async with engine_of(tmp_path, repository=repository) as engine:
        await answered(engine, toys, "a")
        with held_loads(engine):
            slow = asyncio.create_task(answered(engine, toys, "b"))
            await until(lambda: loading(engine, "b"))
            for _ in range(20):
                assert await answered(engine, toys, "a") == 2
            assert not engine.index.is_ready("b")
            await engine.unload("a")
        assert await slow == 2


# -- memory ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def heavy(tmp_path, write_repository_model):
    """A repository of the models a and b, of 100 MB each.

    Nearly all of it is a hole in a file beside the model: no model takes less than its files, so that what it takes is
    known exactly.
    """
    for name in "ab":
        folder = write_repository_model(tmp_path / "models" / name)
        size = (folder / "1" / "model.onnx").stat().st_size
        with (folder / "1" / "hole").open("wb") as file:
            file.truncate(HEAVY.host - size)
    return tmp_path / "models"


async def test_two_models_that_fit_one_at_a_time_take_turns(toys, tmp_path, heavy):
    """Both hammered at once, each request is answered by its own model, and memory never holds both."""
    async with engine_of(tmp_path, ROOM_FOR_ONE, repository=heavy) as engine:

        async def client(name):
            for _ in range(3):
                assert await answered(engine, toys, name) == 2
                check_integrity(engine.cache)
                assert engine.cache.room.used().fits(ROOM_FOR_ONE)
                assert len(list(resident_models(engine))) <= 1

        await asyncio.gather(*(client(name) for name in "ab" for _ in range(4)))
        assert sum(engine.registry.stats[name].evictions.total() for name in "ab") >= 1
        assert engine.index.registered() == [(name, str(heavy / name)) for name in "ab"]


async def test_an_evicted_model_stays_registered_and_comes_back(toys, tmp_path, heavy):
    """Put out of memory for another, a model is still listed and ready, and while it comes back still registered."""
    async with engine_of(tmp_path, ROOM_FOR_ONE, repository=heavy) as engine:
        await answered(engine, toys, "a")
        await answered(engine, toys, "b")
        assert engine.index.versions("a") == []
        both = [(name, str(heavy / name)) for name in "ab"]
        assert engine.index.registered() == both
        assert engine.index.is_ready("a")
        (row,) = [row for row in engine.index.rows() if row["name"] == "a"]
        assert {"state": "UNAVAILABLE", "reason": "evicted for 'b'"}.items() <= row.items()
        with held_loads(engine):
            back = asyncio.create_task(answered(engine, toys, "a"))
            await until(lambda: loading(engine))
            assert engine.index.registered() == both
            assert engine.index.url("a") == both[0][1]
            assert not engine.index.is_ready("a")
        assert await back == 2
        assert engine.index.is_ready("a", 1)


async def test_a_restart_does_not_forget_what_models_take(toys, tmp_path, store):
    """The next engine over the same cache directory expects of an archive what was measured in the life before."""
    name = "a.tar.gz"
    async with engine_of(tmp_path, store=str(store)) as engine:
        await answered(engine, toys, name)
        measured = engine.cache.entries[name].footprint
    async with engine_of(tmp_path, store=str(store)) as engine:
        prepared = loader_of(engine.cache).prepare(name, engine.origins.find(name), NEVER)
        assert prepared.estimate == measured


@pytest.mark.parametrize("pin", ["a", "a.tar.gz", "[a]*"])
async def test_pins_name_archives_with_and_without_the_suffix(toys, tmp_path, store, pin):
    """A pinned archive stays in memory, whatever is loaded after it."""
    rules = Rules(pins=(pin,))
    async with engine_of(tmp_path, store=str(store), eviction=rules) as engine:
        await answered(engine, toys, "a.tar.gz")
        await answered(engine, toys, "b.tar.gz")
        pinned = {entry.name: entry.pinned for entry in engine.cache.entries.values()}
        assert pinned == {"a.tar.gz": True, "b.tar.gz": False}


# -- names -------------------------------------------------------------------------------------------------------------


async def test_a_store_is_asked_with_and_without_the_suffix(toys, tmp_path, store):
    """`a` and `a.tar.gz` are one model, registered by the archive's name; the store's names are found."""
    async with engine_of(tmp_path, store=str(store)) as engine:
        assert [engine.registry.canonical(name) for name in ("a", "a.tar.gz")] == ["a.tar.gz"] * 2
        assert await answered(engine, toys, engine.registry.canonical("a")) == 2
        assert engine.index.registered() == [("a.tar.gz", f"{engine.origins.artifacts.store.uri.rstrip('/')}/a.tar.gz")]
        assert engine.origins.find_all() == ["a.tar.gz", "b.tar.gz"]


async def test_a_repository_is_asked_by_its_names(tmp_path, repository):
    """A repository's names have no suffix; an engine with neither store nor repository offers nothing."""
    async with engine_of(tmp_path, repository=repository) as engine:
        assert engine.registry.canonical("a") == "a"
        assert engine.origins.find_all() == ["a", "b", "c"]
    async with engine_of(tmp_path) as engine:
        assert engine.origins.find_all() == []


async def test_an_alias_means_the_model_it_was_loaded_with_until_that_goes(toys, tmp_path, unpacked):
    """SageMaker loads by a hash and invokes by target model: both names mean the model, no other one does."""
    async with engine_of(tmp_path, evicts=False) as engine:
        await engine.load("hash", unpacked["a"], "a.tar.gz")
        assert [engine.registry.canonical(name) for name in ("hash", "a.tar.gz", "b.tar.gz")] == [
            "hash",
            "hash",
            "b.tar.gz",
        ]
        engine.registry.check_alias("hash", "a.tar.gz")
        engine.registry.check_alias("hash", "hash")
        with pytest.raises(MmeError, match=r"'b\.tar\.gz', which is not the target model") as caught:
            engine.registry.check_alias("hash", "b.tar.gz")
        assert failure(caught) is Kind.INVALID_ARGUMENT
        await engine.unload("hash")
        assert engine.registry.canonical("a.tar.gz") == "a.tar.gz"
        with pytest.raises(MmeError):
            await engine.load("hash", str(tmp_path), "a.tar.gz")  # no model there
        assert engine.registry.canonical("a.tar.gz") == "a.tar.gz"


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("models/a", "must be an absolute path"),
        ("/opt/ml/../../etc", "without '..'"),
        ("/dev/pts", "system folder"),
        ("/proc/self", "system folder"),
        ("//proc/self", "system folder"),
        ("/sys", "system folder"),
        ("/no/such/folder", "not a folder"),
        ("/etc/passwd", "not a folder"),
        ("s3://bucket/a.tar.gz", "--model-store"),
        ("/opt/\0", "must be an absolute path"),
        ("/" + "x" * 5000, "not a folder"),
        (" ", "must be an absolute path"),
    ],
)
async def test_a_url_that_can_be_no_model_is_refused_and_nothing_is_registered(tmp_path, url, words):
    """A load from where no platform unpacks is an invalid argument that says where models live."""
    async with engine_of(tmp_path) as engine:
        with pytest.raises(MmeError, match=words) as caught:
            await engine.load("a", url, "alias")
        assert failure(caught) is Kind.INVALID_ARGUMENT
        assert engine.cache.entries == {}
        assert engine.registry.canonical("alias") == "alias"


async def test_a_url_that_leads_into_a_system_folder_by_a_link_is_refused(tmp_path):
    """Links are followed before folders are judged."""
    (tmp_path / "link").symlink_to("/dev")
    async with engine_of(tmp_path) as engine:
        with pytest.raises(MmeError, match="system folder"):
            await engine.load("a", str(tmp_path / "link" / "shm"))


BAD_NAMES = ["zzz", "", ".", "..", "../a", "a/../a", "/a", "a/1", "a\0", "x" * 300, "y" * 10_000, "a\\b", "ü" * 200]


@pytest.mark.parametrize("source", ["repository", "store", "neither"])
async def test_names_that_nobody_has_are_refused_and_do_not_pile_up(toys, tmp_path, repository, store, source):
    """Whatever a client calls a model, it gets one sentence, and no trace of the name stays behind."""
    options = {"repository": {"repository": repository}, "store": {"store": str(store)}, "neither": {}}[source]
    async with engine_of(tmp_path, **options) as engine:
        for name in BAD_NAMES:
            with pytest.raises(MmeError) as caught:
                await ask(engine, toys.Call(1), engine.registry.canonical(name))
            assert failure(caught) in {Kind.UNKNOWN_MODEL, Kind.INVALID_ARGUMENT}
            assert (engine.cache.entries, engine.registry.stats) == ({}, {})
            with pytest.raises(MmeError):
                await engine.load(engine.registry.canonical(name))
            with pytest.raises(MmeError):
                await engine.reload(engine.registry.canonical(name))
        assert (engine.cache.entries, engine.registry.stats) == ({}, {})
        assert engine.index.rows() == []


async def test_a_client_that_asks_for_what_nobody_has_fills_no_log(toys, tmp_path, store, caplog):
    """It is told; who loads it by name has a line in the log, which says where it was looked for."""
    caplog.set_level("INFO", "mme.cache")
    async with engine_of(tmp_path, store=str(store)) as engine:
        for _ in range(3):
            with pytest.raises(MmeError, match="is not in the store"):
                await ask(engine, toys.Call(1), "nobody.tar.gz")
        assert caplog.records == []
        with pytest.raises(MmeError):
            await engine.reload("nobody.tar.gz")
        [line] = caplog.records
        assert "is not in the store" in line.getMessage()


async def test_names_that_a_store_says_nothing_of_do_not_pile_up(toys, tmp_path, store):
    """While it can't be asked clients may name anything; what was in memory once stays known."""
    async with engine_of(tmp_path, store=str(store)) as engine:
        assert await answered(engine, toys, "a.tar.gz") == 2
        store.rename(tmp_path / "away")
        for number in range(3):
            with pytest.raises(MmeError) as caught:
                await ask(engine, toys.Call(1), f"no-{number}.tar.gz")
            assert failure(caught) is Kind.UNAVAILABLE
            for change in (engine.load, engine.reload):
                with pytest.raises(MmeError):
                    await change(f"no-{number}.tar.gz")
        assert list(engine.cache.entries) == list(engine.registry.stats) == ["a.tar.gz"]
        assert engine.registry.body_takers == set()
        (tmp_path / "away").rename(store)
        assert await answered(engine, toys, "a.tar.gz") == 2


# -- load, reload, unload ----------------------------------------------------------------------------------------------


async def test_loading_what_is_loaded_or_being_loaded_is_refused(toys, tmp_path, unpacked):
    """A second load is ALREADY_EXISTS, at the very same moment, while the first goes on, and after it; one wins."""
    async with engine_of(tmp_path, evicts=False) as engine:
        first = asyncio.create_task(engine.load("a", unpacked["a"]))
        second = asyncio.create_task(engine.load("a", unpacked["b"]))
        await asyncio.wait([first, second])
        assert first.exception() is None
        assert second.exception().kind is Kind.ALREADY_EXISTS
        assert engine.index.registered() == [("a", unpacked["a"])]
        with pytest.raises(MmeError, match="already loaded") as caught:
            await engine.load("a", unpacked["a"])
        assert failure(caught) is Kind.ALREADY_EXISTS
        with held_loads(engine):
            slow = asyncio.create_task(engine.load("b", unpacked["b"]))
            await until(lambda: loading(engine, "b"))
            with pytest.raises(MmeError) as caught:
                await engine.load("b", unpacked["b"])
            assert failure(caught) is Kind.ALREADY_EXISTS
            assert engine.index.registered() == [("a", unpacked["a"])]
        await slow
        assert engine.index.registered() == [("a", unpacked["a"]), ("b", unpacked["b"])]
        assert [engine.index.url(name) for name in "ab"] == [unpacked["a"], unpacked["b"]]


async def test_a_load_that_fails_registers_nothing(toys, tmp_path, unpacked):
    """A folder with a broken model is refused with the framework's words; once it is mended, it loads."""
    async with engine_of(tmp_path, evicts=False) as engine:
        model = next((tmp_path / "opt" / "a").rglob("model.onnx"))
        content = model.read_bytes()
        model.write_bytes(b"broken")
        with pytest.raises(MmeError, match="ONNX Runtime can't load model 'a'") as caught:
            await engine.load("a", unpacked["a"])
        assert failure(caught) is Kind.INVALID_MODEL
        assert (engine.index.registered(), engine.cache.entries) == ([], {})
        with pytest.raises(MmeError) as caught:
            await engine.unload("a")
        assert failure(caught) is Kind.UNKNOWN_MODEL
        model.write_bytes(content)
        await engine.load("a", unpacked["a"])
        assert await answered(engine, toys) == 2


async def test_a_request_whose_model_does_not_load_says_why_and_the_next_tries_again(toys, tmp_path, repository):
    """Everybody who waits for a broken model is told; the index says why; mended, the next request is answered."""
    async with engine_of(tmp_path, repository=repository) as engine:
        (repository / "a" / "1" / "model.onnx").write_bytes(b"broken")
        results = await asyncio.gather(*(ask(engine, toys.Call(1)) for _ in range(5)), return_exceptions=True)
        assert [error.kind for error in results] == [Kind.INVALID_MODEL] * 5
        [row] = engine.index.rows()
        assert (row["name"], row["state"]) == ("a", "UNAVAILABLE")
        assert "ONNX Runtime can't load model 'a'" in row["reason"]
        assert (engine.index.is_ready("a"), engine.index.registered()) == (False, [])
        shutil.copy(repository / "b" / "1" / "model.onnx", repository / "a" / "1" / "model.onnx")
        assert await answered(engine, toys) == 2
        [row] = engine.index.rows()
        assert (row["name"], row["version"], row["state"]) == ("a", "1", "READY")
        assert "reason" not in row


async def test_requests_leave_a_model_alone_that_keeps_failing(toys, tmp_path, repository):
    """From the second failure on they are told the same for a while, and counted; a load by name tries at once."""
    async with engine_of(tmp_path, repository=repository) as engine:
        model = repository / "a" / "1" / "model.onnx"
        model.write_bytes(b"broken")
        sentences = []
        for _ in range(6):
            with pytest.raises(MmeError) as caught:
                await ask(engine, toys.Call(1))
            assert failure(caught) is Kind.INVALID_MODEL
            sentences.append(caught.value.message)
        stats = engine.registry.stats["a"]
        assert (stats.load_failures, stats.refused, stats.misses) == (2, 6, 6)
        assert sentences[0] == sentences[1]
        assert sentences[2].startswith(sentences[0])
        assert "it is loaded again in 1 s" in sentences[2]
        may_be_tried(engine, "a")
        with pytest.raises(MmeError):
            await ask(engine, toys.Call(1))
        assert stats.load_failures == 3
        shutil.copy(repository / "b" / "1" / "model.onnx", model)
        with pytest.raises(MmeError, match="it is loaded again in 2 s"):
            await ask(engine, toys.Call(1))
        await engine.reload("a")
        assert await answered(engine, toys) == 2
        assert engine.cache.entries["a"].failures == 0


async def test_a_platform_that_makes_room_is_not_made_to_wait(toys, tmp_path, heavy):
    """A full memory is no failure of the model's: each request after one that was refused looks for room again."""
    async with engine_of(tmp_path, ROOM_FOR_ONE, repository=heavy, evicts=False) as engine:
        await answered(engine, toys, "a")
        for _ in range(3):
            with pytest.raises(MmeError) as caught:
                await ask(engine, toys.Call(1), "b")
            assert failure(caught) is Kind.OUT_OF_MEMORY
        await engine.unload("a")
        await answered(engine, toys, "b")


async def test_an_unloaded_model_is_unknown_to_a_platform_and_loads_again_from_a_repository(
    toys, tmp_path, unpacked, repository
):
    """What the platform unloaded only the platform loads again; a repository's model comes with its next request."""
    async with engine_of(tmp_path, evicts=False) as engine:
        await engine.load("a", unpacked["a"])
        await engine.unload("a")
        for attempt in (ask(engine, toys.Call(1)), engine.unload("a"), engine.reload("a")):
            with pytest.raises(MmeError) as caught:
                await attempt
            assert failure(caught) is Kind.UNKNOWN_MODEL
        with pytest.raises(MmeError):
            engine.index.url("a")
        await engine.load("a", unpacked["a"])
        assert await answered(engine, toys) == 2
    async with engine_of(tmp_path, repository=repository) as engine:
        await engine.load("a")
        await engine.unload("a")
        assert engine.index.registered() == []
        assert await answered(engine, toys) == 2


def patient(tmp_path, write_repository_model):
    """A platform's model whose requests stay in flight for a while."""
    return str(write_repository_model(tmp_path / "patient" / "model", PATIENT))


async def test_requests_in_flight_are_answered_before_their_model_goes(toys, tmp_path, write_repository_model):
    """An unload waits for them; a second unload, and requests that come meanwhile, are told that it is gone."""
    async with engine_of(tmp_path, evicts=False) as engine:
        await engine.load("a", patient(tmp_path, write_repository_model))
        call = toys.Call(1)
        await ask(engine, call)
        unloading = asyncio.create_task(engine.unload("a"))
        await asyncio.sleep(0)
        assert (engine.index.is_ready("a"), engine.index.registered()) == (False, [])
        for attempt in (engine.unload("a"), ask(engine, toys.Call(1))):
            with pytest.raises(MmeError) as caught:
                await attempt
            assert failure(caught) is Kind.UNKNOWN_MODEL
        assert call.answers == []
        await unloading
        assert call.kind is None


async def test_a_request_that_comes_during_an_unload_does_not_bring_the_model_back(
    toys, tmp_path, write_repository_model
):
    """Where only what somebody loaded may be asked; a load that comes meanwhile does."""
    write_repository_model(tmp_path / "r" / "a", PATIENT)
    async with engine_of(tmp_path, repository=tmp_path / "r", control=Control.EXPLICIT) as engine:
        for loads_again in (False, True):
            await engine.reload("a")
            call = toys.Call(1)
            await ask(engine, call)
            unloading = asyncio.create_task(engine.unload("a"))
            await asyncio.sleep(0)
            with pytest.raises(MmeError) as caught:
                await ask(engine, toys.Call(1))
            assert failure(caught) is Kind.UNKNOWN_VERSION
            if loads_again:
                await engine.reload("a")
            await unloading
            assert call.kind is None
            assert engine.index.is_ready("a") == loads_again


async def test_a_load_that_comes_during_an_unload_comes_after_it(toys, tmp_path, unpacked, write_repository_model):
    """DELETE and POST at once: what was in flight is answered by the old model, what comes then by the new one."""
    async with engine_of(tmp_path, evicts=False) as engine:
        await engine.load("a", patient(tmp_path, write_repository_model), "alias")
        call = toys.Call(1)
        await ask(engine, call)
        unloading = asyncio.create_task(engine.unload("a"))
        await asyncio.sleep(0)
        loading_again = asyncio.create_task(engine.load("a", unpacked["b"], "other"))
        await asyncio.gather(unloading, loading_again)
        assert call.kind is None
        assert engine.index.registered() == [("a", unpacked["b"])]
        assert engine.registry.canonical("other") == "a"
        assert await answered(engine, toys) == 2


async def test_an_unload_during_a_load_ends_it(toys, tmp_path, unpacked):
    """Who loads and who waits is told to load again; the name is free afterwards."""
    async with engine_of(tmp_path, evicts=False) as engine:
        with held_loads(engine):
            first = asyncio.create_task(engine.load("a", unpacked["a"], "alias"))
            await until(lambda: loading(engine))
            waiting = asyncio.create_task(ask(engine, toys.Call(1)))
            await asyncio.sleep(0)
            unloading = asyncio.create_task(engine.unload("a"))
            await asyncio.sleep(0)
        await asyncio.wait([first, waiting, unloading])
        assert unloading.exception() is None
        assert [task.exception().kind for task in (first, waiting)] == [Kind.UNAVAILABLE] * 2
        assert (engine.cache.entries, engine.registry.canonical("alias")) == ({}, "alias")
        await engine.load("a", unpacked["a"])
        assert await answered(engine, toys) == 2


async def test_a_reload_serves_what_is_on_disk_now(toys, tmp_path, repository, write_onnx):
    """Reloading a model picks up its new file; reloading one that is not in memory loads it."""
    async with engine_of(tmp_path, repository=repository) as engine:
        await engine.reload("a")
        assert await answered(engine, toys) == 2
        write_onnx(repository / "a" / "1" / "model.onnx", 7.0)
        await engine.reload("a")
        assert await answered(engine, toys) == 7


async def test_a_reload_of_what_did_not_change_does_nothing(toys, tmp_path, repository, write_onnx):
    """Nor where its configuration was written again in the same words, nor once a broken file is as it was before."""
    (repository / "a" / "config.pbtxt").write_text("max_batch_size: 4")
    file = repository / "a" / "1" / "model.onnx"
    async with engine_of(tmp_path, repository=repository) as engine:

        async def loads(override=None):
            await engine.reload("a", override)
            return engine.registry.stats["a"].loads

        assert [await loads(), await loads()] == [1, 1]
        (repository / "a" / "config.pbtxt").write_text("max_batch_size: 4")
        assert await loads() == 1
        file.rename(tmp_path / "aside")
        with pytest.raises(MmeError):
            await loads()
        (tmp_path / "aside").rename(file)
        assert await loads() == 1
        assert [row.get("reason") for row in engine.index.rows() if row["name"] == "a"] == [None]
        sent = Override('{"max_batch_size": 2}', {"file:1/model.onnx": file.read_bytes()})
        assert [await loads(sent), await loads(sent)] == [2, 2]
        configured = Override('{"max_batch_size": 2}')
        assert [await loads(configured), await loads(configured)] == [3, 3]
        assert [await loads(), await loads()] == [4, 4]
        assert (await loads(Override('{"max_batch_size": 4}')), engine.index.is_overridden("a")) == (5, True)
        assert (await loads(), engine.index.is_overridden("a")) == (6, False)  # what it goes by is another one
        os.utime(file)
        assert [await loads(), await loads()] == [7, 7]
        await engine.unload("a")
        assert await loads() == 8
        assert await answered(engine, toys) == 2


async def test_a_reload_under_traffic_costs_no_request(toys, tmp_path, unpacked):
    """Clients that never stop are all answered while their model is loaded anew, and none waits for a load."""
    (file,) = Path(unpacked["a"]).rglob("*.onnx")
    async with engine_of(tmp_path, evicts=False) as engine:
        await engine.load("a", unpacked["a"], "alias")
        done = False

        async def client():
            answers = 0
            while not done:
                assert engine.index.is_resident("a")
                assert await answered(engine, toys) == 2
                assert engine.index.registered() == [("a", unpacked["a"])]
                answers += 1
            return answers

        clients = [asyncio.create_task(client()) for _ in range(4)]
        await until(lambda: engine.stats["a", 1].success.count > 4)
        for _ in range(3):
            os.utime(file)
            await engine.reload("a")
        os.utime(file)
        await asyncio.gather(engine.reload("a"), engine.reload("a"))
        done = True
        assert min(await asyncio.gather(*clients)) > 0
        assert engine.registry.canonical("alias") == "a"
        assert engine.registry.stats["a"].loads >= 4


async def test_a_reload_that_fails_says_why_and_the_old_one_serves(toys, tmp_path, repository, write_onnx):
    """The error is the new file's; what was in memory goes on until a reload succeeds."""
    async with engine_of(tmp_path, repository=repository) as engine:
        await engine.reload("a")
        (repository / "a" / "1" / "model.onnx").write_bytes(b"broken")
        with pytest.raises(MmeError) as caught:
            await engine.reload("a")
        assert failure(caught) is Kind.INVALID_MODEL
        assert [name for name, _ in engine.index.registered()] == ["a"]
        assert await answered(engine, toys) == 2
        [row] = [row for row in engine.index.rows() if row["name"] == "a"]
        assert row["state"] == "READY"
        write_onnx(repository / "a" / "1" / "model.onnx", 7.0)
        await engine.reload("a")
        assert await answered(engine, toys) == 7


@pytest.mark.parametrize("serving", [False, True])
async def test_a_model_that_left_the_repository_is_not_loaded_anew(toys, tmp_path, repository, serving):
    """It is unknown; where it is in memory it goes on."""
    async with engine_of(tmp_path, repository=repository) as engine:
        if serving:
            await engine.reload("a")
        shutil.rmtree(repository / "a")
        with pytest.raises(MmeError) as caught:
            await engine.reload("a")
        assert failure(caught) is Kind.UNKNOWN_MODEL
        assert (await answered(engine, toys) == 2) if serving else not engine.cache.entries


async def test_a_reload_serves_other_versions_and_instances(toys, tmp_path, repository, write_onnx):
    """Versions that were added and removed, under a new policy, and another number of lanes."""
    folder = repository / "a"
    async with engine_of(tmp_path, repository=repository) as engine:
        await engine.reload("a")
        write_onnx(folder / "3" / "model.onnx", 3.0)
        write_onnx(folder / "2" / "model.onnx", 9.0)
        (folder / "config.pbtxt").write_text("version_policy { all {} } instance_group { count: 3 kind: KIND_CPU }")
        await engine.reload("a")
        assert engine.index.versions("a") == [1, 2, 3]
        assert await answered(engine, toys) == 3
        assert await answered(engine, toys, version=2) == 9
        async with engine.leased("a") as model:
            assert len(lanes_of(model)) == 3
        shutil.rmtree(folder / "3")
        await engine.reload("a")
        assert engine.index.versions("a") == [1, 2]


# -- what hangs ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def stuck(monkeypatch):
    """A framework that hangs while it loads the model `a`, until the test lets it go on: an event for each side."""
    load = OnnxHandler.load

    class Stuck:
        begun, go = threading.Event(), threading.Event()

    def hang(config, *args):
        if config.name == "a":
            Stuck.begun.set()
            assert Stuck.go.wait(60)
        return load(config, *args)

    monkeypatch.setattr(OnnxHandler, "load", staticmethod(hang))
    yield Stuck
    Stuck.go.set()


@contextlib.asynccontextmanager
async def let_go(stuck):
    """Whatever becomes of the test, an engine that is closed must not wait for what it holds up."""
    try:
        yield
    finally:
        stuck.go.set()


@pytest.fixture
def timers(monkeypatch):
    """Of all that has been awaited with a limit of time, in order: a test may move one's end."""
    timeout, made = asyncio.timeout, []

    def timed(seconds):
        made.append(timeout(seconds))
        return made[-1]

    monkeypatch.setattr(asyncio, "timeout", timed)
    return made


async def test_a_load_that_hangs_keeps_no_other_from_loading(toys, tmp_path, repository, stuck, timers):
    """Its time over, whoever waits is told, and others load, though only one may be measured at a time.

    Until it comes back it is not begun again, and what it may hold stays reserved.
    """
    async with (
        engine_of(tmp_path, repository=repository, load_patience=350.0, load_threads=1) as engine,
        let_go(stuck),
    ):
        hanging = asyncio.create_task(ask(engine, toys.Call(1), "a"))
        await until(stuck.begun.is_set)
        limit = timers[-1]
        waiting = asyncio.create_task(ask(engine, toys.Call(1), "b"))
        await until(lambda: loading(engine, "b"))
        limit.reschedule(0.0)
        with pytest.raises(MmeError, match="did not load within") as caught:
            await hanging
        assert failure(caught) is Kind.UNAVAILABLE
        await waiting
        assert await answered(engine, toys, "c") == 2
        with pytest.raises(MmeError, match="was given up has not ended"):
            await ask(engine, toys.Call(1), "a")
        assert engine.cache.room.reserved != Footprint()
        stuck.go.set()
        await until(lambda: engine.cache.entries["a"].orphan is None)
        assert engine.cache.room.reserved == Footprint()
        assert await answered(engine, toys, "a") == 2


async def test_an_explicit_load_that_takes_too_long_registers_nothing(toys, tmp_path, unpacked, stuck, monkeypatch):
    """A platform that asks for a load is answered in time; then the model is unknown, as after any failed load."""
    monkeypatch.setattr("serve.load_api._GRACE_SECONDS", 0.0)
    async with engine_of(tmp_path, evicts=False, load_patience=0.05) as engine, let_go(stuck):
        give_loads(engine.cache, 350.0)
        with pytest.raises(MmeError, match="did not load within") as caught:
            await engine.load("a", unpacked["a"])
        assert failure(caught) is Kind.UNAVAILABLE
        assert engine.index.registered() == []
        stuck.go.set()
        await until(lambda: "a" not in engine.cache.entries)
        give_clients(engine, load_patience=350.0)
        await engine.load("a", unpacked["a"])
        assert await answered(engine, toys) == 2


async def test_an_unload_during_a_load_stops_it_at_its_next_step(
    toys, tmp_path, unpacked, write_repository_model, stuck
):
    """Of a model with two versions, the second is not loaded any more once somebody unloads it."""
    write_repository_model(tmp_path / "many" / "a", "version_policy { all {} }", versions=(1, 2))
    async with engine_of(tmp_path, repository=tmp_path / "many") as engine, let_go(stuck):
        loading = asyncio.create_task(engine.load("a"))
        await until(stuck.begun.is_set)
        unloading = asyncio.create_task(engine.unload("a"))
        await asyncio.sleep(0)
        stuck.begun.clear()
        stuck.go.set()
        with pytest.raises(MmeError, match="was unloaded while it was loading"):
            await loading
        await unloading
        assert not stuck.begun.is_set()


async def test_an_unload_waits_no_longer_than_it_may(toys, tmp_path, repository, monkeypatch):
    """While an execution hangs, an unload is answered in time; others unload; the memory comes back with the end."""
    execute, begun, go = OnnxHandler.execute, threading.Event(), threading.Event()

    def hang(self, inputs, outputs):
        if self.config.name == "a" and inputs["x"].any():
            begun.set()
            assert go.wait(60)
        return execute(self, inputs, outputs)

    monkeypatch.setattr(OnnxHandler, "execute", hang)
    async with engine_of(tmp_path, repository=repository, unload_patience=0.05, drain_patience=0.01) as engine:
        call = toys.Call(1)
        await answered(engine, toys, "b")
        await ask(engine, call, "a")
        await until(begun.is_set)
        with pytest.raises(MmeError, match="still executes or loads") as caught:
            await engine.unload("a")
        assert failure(caught) is Kind.UNAVAILABLE
        assert not engine.index.is_ready("a")
        assert [name for name, _ in engine.index.registered()] == ["b"]
        give_clients(engine, unload_patience=350.0)
        await engine.unload("b")
        assert engine.cache.room.used() != Footprint()
        go.set()
        await until(lambda: engine.cache.room.used() == Footprint() and admits_nothing(engine))
        assert call.kind is None
        assert await answered(engine, toys, "a") == 2


# -- archives ----------------------------------------------------------------------------------------------------------


def copies(tmp_path):
    """The unpacked archives on disk."""
    return [path for path in (tmp_path / "cache").iterdir() if path.is_dir() and not path.name.startswith(".")]


async def test_an_unloaded_archive_leaves_the_disk_and_an_evicted_one_does_not(toys, tmp_path, store):
    """Unpacked files stay while a model may come back, and go when it is unloaded for good."""
    async with engine_of(tmp_path, store=str(store)) as engine:
        await answered(engine, toys, "a.tar.gz")
        await answered(engine, toys, "b.tar.gz")
        assert len(copies(tmp_path)) == 2
        evict(engine.cache, "b.tar.gz")
        await until(lambda: not engine.cache.entries["b.tar.gz"].busy)
        assert len(copies(tmp_path)) == 2
        await engine.unload("a.tar.gz")
        assert len(copies(tmp_path)) == 1
        assert await answered(engine, toys, "b.tar.gz") == 2
        assert engine.registry.stats["b.tar.gz"].download.count == 1
        assert await answered(engine, toys, "a.tar.gz") == 2
        assert engine.registry.stats["a.tar.gz"].download.count == 2


async def test_a_load_waits_until_the_files_of_the_unload_before_it_are_gone(toys, tmp_path, store):
    """An unload returns when the files are removed; a request that comes meanwhile fetches them anew."""
    async with engine_of(tmp_path, store=str(store)) as engine:
        await answered(engine, toys, "a.tar.gz")
        artifacts, begun, go = artifacts_of(engine), threading.Event(), threading.Event()
        discard = artifacts.discard

        def slow(name):
            begun.set()
            assert go.wait(60)
            discard(name)

        artifacts.discard = slow
        unloading = asyncio.create_task(engine.unload("a.tar.gz"))
        await until(begun.is_set)
        request = asyncio.create_task(answered(engine, toys, "a.tar.gz"))
        await asyncio.sleep(0.01)
        assert not unloading.done()
        go.set()
        await unloading
        assert await request == 2
        assert engine.registry.stats["a.tar.gz"].download.count == 2


async def test_requests_during_the_unload_of_an_archive_are_answered(toys, tmp_path, store):
    """However requests and unloads of one archive fall together, each request is answered or told to try again."""
    async with engine_of(tmp_path, store=str(store)) as engine:
        told = []

        async def client():
            answers = 0
            while answers < 6:
                try:
                    assert await answered(engine, toys, "a.tar.gz") == 2
                    answers += 1
                except MmeError as error:
                    told.append(error.kind)

        async def unloader():
            while not all(task.done() for task in clients):
                with contextlib.suppress(MmeError):
                    await engine.unload("a.tar.gz")
                await until(lambda: engine.index.is_ready("a.tar.gz") or all(task.done() for task in clients))

        clients = [asyncio.create_task(client()) for _ in range(4)]
        await asyncio.gather(*clients, unloader())
        assert set(told) <= {Kind.UNAVAILABLE}
        check_integrity(engine.cache)


@pytest.mark.parametrize("content", [b"no tar at all", b""], ids=["no archive", "no model"])
async def test_what_is_good_for_nothing_is_downloaded_once_in_a_while(toys, tmp_path, store, targz_bytes, content):
    """Refused while it is unpacked or while it is opened: the next requests get the same error without a download."""
    bad = gzip.compress(content) if content else targz_bytes(("1/model.onnx", b"no model"))
    (store / "bad.tar.gz").write_bytes(bad)
    async with engine_of(tmp_path, store=str(store)) as engine:
        sentences = []
        for _ in range(3):
            with pytest.raises(MmeError) as caught:
                await ask(engine, toys.Call(1), "bad.tar.gz")
            assert failure(caught) is Kind.INVALID_MODEL
            sentences.append(caught.value.message)
        assert ["last 60 s" in sentence for sentence in sentences] == [False, True, True]
        assert sentences[1].startswith(sentences[0])
        assert copies(tmp_path) == []
        os.utime(store / "bad.tar.gz", (1, 1))  # another etag
        may_be_tried(engine, "bad.tar.gz")
        with pytest.raises(MmeError) as caught:
            await ask(engine, toys.Call(1), "bad.tar.gz")
        assert "last 60 s" not in caught.value.message
        assert await answered(engine, toys, "a.tar.gz") == 2


async def test_a_broken_successor_does_not_condemn_what_was_good(toys, tmp_path, store, targz_bytes):
    """An archive replaced by a broken one is refused; put back as it was, it is served at once, from disk."""
    good = (store / "a.tar.gz").read_bytes()
    status = (store / "a.tar.gz").stat()
    async with engine_of(tmp_path, store=str(store)) as engine:
        await answered(engine, toys, "a.tar.gz")
        (store / "a.tar.gz").write_bytes(targz_bytes(("1/model.onnx", b"no model")))
        with pytest.raises(MmeError):
            await engine.reload("a.tar.gz")
        (store / "a.tar.gz").write_bytes(good)
        os.utime(store / "a.tar.gz", ns=(status.st_atime_ns, status.st_mtime_ns))
        assert await answered(engine, toys, "a.tar.gz") == 2
        assert engine.registry.stats["a.tar.gz"].download.count == 1


async def test_a_disk_that_models_in_memory_fill_has_them_leave(toys, tmp_path, store):
    """With room on disk for one archive, each next model has the one before leave memory and disk; all are answered."""
    async with engine_of(tmp_path, store=str(store)) as engine:
        await answered(engine, toys, "a.tar.gz")
        size = engine.origins.room.used
    async with engine_of(tmp_path, store=str(store), disk_budget=size * 3 // 2) as engine:
        for name in ("b.tar.gz", "a.tar.gz", "b.tar.gz"):
            assert await answered(engine, toys, name) == 2
            assert len(copies(tmp_path)) == 1
            assert engine.origins.room.used <= engine.origins.room.budget
        assert engine.registry.stats["b.tar.gz"].evictions == {"disk": 1}
        assert engine.registry.stats["a.tar.gz"].evictions == {"disk": 1}
        assert {name for name, _ in engine.index.registered()} == {"a.tar.gz", "b.tar.gz"}
    async with engine_of(tmp_path, store=str(store), disk_budget=size * 3 // 2, eviction=Rules(pins=("*",))) as engine:
        assert await answered(engine, toys, "b.tar.gz") == 2
        with pytest.raises(MmeError, match="finds no room on disk") as caught:
            await ask(engine, toys.Call(1), "a.tar.gz")
        assert failure(caught) is Kind.OUT_OF_MEMORY
        assert await answered(engine, toys, "b.tar.gz") == 2


@pytest.mark.parametrize("step", ["prepare", "reserve", "load"])
async def test_an_archive_whose_load_failed_is_not_held(toys, tmp_path, store, step, monkeypatch):
    """Wherever a load ends, its files may leave the disk afterwards."""
    budget = Footprint(1) if step == "reserve" else PLENTY
    async with engine_of(tmp_path, budget, store=str(store)) as engine:
        if step != "reserve":
            place = (
                "serve.loading.prepare.placement_of"
                if step == "prepare"
                else "serve.loading.loader.ModelLoader._load_version"
            )

            def fail(*_):
                raise MmeError(Kind.UNAVAILABLE, "not now")

            monkeypatch.setattr(place, fail)
        with pytest.raises(MmeError):
            await ask(engine, toys.Call(1), "a.tar.gz")
        assert len(copies(tmp_path)) == 1
        assert users_of(engine) == {}
        monkeypatch.undo()


async def test_a_broken_archive_is_refused_and_leaves_nothing(toys, tmp_path, store):
    """Neither memory nor files nor a registered name stay of it, and the next archive is served."""
    (store / "bad.tar.gz").write_bytes(gzip.compress(b"no tar at all"))
    async with engine_of(tmp_path, store=str(store)) as engine:
        with pytest.raises(MmeError) as caught:
            await ask(engine, toys.Call(1), "bad.tar.gz")
        assert failure(caught) is Kind.INVALID_MODEL
        assert copies(tmp_path) == []
        assert engine.index.registered() == []
        assert await answered(engine, toys, "a.tar.gz") == 2


# -- the end -----------------------------------------------------------------------------------------------------------


async def test_an_engine_that_is_closed_twice_ends_nothing_of_another_one(tmp_path):
    """Engines of a process share a thread and fork servers, which go with the last engine."""
    (tmp_path / "models").mkdir()
    async with engine_of(tmp_path, repository=tmp_path / "models"):
        async with engine_of(tmp_path, repository=tmp_path / "models") as closed:
            await closed.close()
        assert not STARTER.end()


async def test_closing_with_everything_in_flight(toys, tmp_path, repository, write_repository_model):
    """Requests queued, a load under way, requests that wait for it: all are answered, and no thread is left."""
    write_repository_model(repository / "patient", PATIENT)
    before = set(threading.enumerate())
    async with engine_of(tmp_path, repository=repository) as engine:
        await engine.load("patient")
        await engine.load("a")
        queued = [toys.Call(number) for number in range(3)]
        for call in queued:
            await ask(engine, call, "patient")
        with held_loads(engine):
            waiting = [asyncio.create_task(ask(engine, toys.Call(1), "b")) for _ in range(3)]
            await until(lambda: loading(engine, "b"))
            closing = asyncio.create_task(engine.close())
            await asyncio.sleep(0)
            late = [asyncio.create_task(ask(engine, toys.Call(1), name)) for name in "bc"]
            await asyncio.sleep(0)
        await closing
        assert [call.kind for call in queued] == [None] * 3
        await asyncio.wait(waiting + late)
        assert [task.exception().kind for task in waiting + late] == [Kind.UNAVAILABLE] * 5
        for thread in set(threading.enumerate()) - before:
            thread.join(60)
            assert not thread.is_alive(), thread.name
        with pytest.raises(MmeError) as caught:
            await ask(engine, toys.Call(1), "a")
        assert failure(caught) is Kind.UNAVAILABLE


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may raise a priority again")
async def test_loaders_yield_to_lanes(toys, tmp_path, repository):
    """Load and unload threads run at a lower priority than the lanes that execute."""
    async with engine_of(tmp_path, repository=repository) as engine:
        await answered(engine, toys)
        await answered(engine, toys, "b")
        await engine.unload("b")
        nice = {}
        for thread in threading.enumerate():
            with contextlib.suppress(ProcessLookupError, TypeError):  # it ends while we look, or only just begins
                nice[thread.name.partition("_")[0]] = os.getpriority(os.PRIO_PROCESS, thread.native_id)
        load = loads_of(engine).submit(lambda: os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        own = os.getpriority(os.PRIO_PROCESS, 0)
        assert (load.result(), nice["unload"], nice["instance"]) == (10, 10, own)


async def test_models_that_execute_nothing_have_no_threads(toys, tmp_path, repository):
    """However many were asked: instances share the threads of those that execute at a time."""
    async with engine_of(tmp_path, repository=repository) as engine:
        before = {thread.name for thread in threading.enumerate()}
        for name in "abc":
            await answered(engine, toys, name)
        begun = {thread.name.rstrip("0123456789") for thread in threading.enumerate() if thread.name not in before}
        assert begun <= {"instance_", "load_", "weights_", "refine_", "meter_", "starter"}


# -- control -----------------------------------------------------------------------------------------------------------


async def test_of_a_store_too_only_what_was_loaded_may_be_served(toys, tmp_path, store):
    """Where loads are explicit a request loads nothing, whatever the store has."""
    async with engine_of(tmp_path, store=str(store), control=Control.EXPLICIT) as engine:
        with pytest.raises(MmeError) as caught:
            await answered(engine, toys, "a.tar.gz")
        assert failure(caught) is Kind.UNKNOWN_MODEL
        await engine.load("a.tar.gz")
        assert await answered(engine, toys, "a.tar.gz") == 2
        await engine.cache.relieve("b.tar.gz", Footprint(1), "execution")
        assert await answered(engine, toys, "a.tar.gz") == 2
        await engine.unload("a.tar.gz")
        with pytest.raises(MmeError):
            await answered(engine, toys, "a.tar.gz")


async def test_a_load_that_asks_for_too_many_threads_is_refused_at_once(tmp_path):
    """503, and nobody is evicted; once another model has gone, its threads are free."""
    for name in "ab":
        growing.write_growing(tmp_path / "models", name, threads=4)
    async with growing.engine_of(tmp_path, 700, framework_threads=5) as engine:
        await engine.load("a")
        with pytest.raises(MmeError, match="MME_FRAMEWORK_THREADS") as caught:
            await engine.load("b")
        assert failure(caught) is Kind.UNAVAILABLE
        await growing.ask(engine, "a", 40)
        await engine.unload("a")
        await growing.ask(engine, "b", 40)
