"""What the cache tells of itself: every load, eviction, unload and wait, once and in order, with its numbers."""

import asyncio
import contextlib
from itertools import pairwise

import pytest

from model_handlers.base import Footprint
from model_handlers.errors import MmeError
from serve.statistics import CacheEvent, CacheTimes, EventType
from tests.serve.engines import answered, ask, engine_of

HEAVY = 100_000_000


@pytest.fixture
def heavy(tmp_path, write_repository_model):
    """A repository of the models a and b, of 100 MB each by a hole in a file, and `bad`, which is none."""
    for name in "ab":
        folder = write_repository_model(tmp_path / "models" / name)
        size = (folder / "1" / "model.onnx").stat().st_size
        with (folder / "1" / "hole").open("wb") as file:
            file.truncate(HEAVY - size)
    (tmp_path / "models" / "bad" / "1").mkdir(parents=True)
    (tmp_path / "models" / "bad" / "1" / "model.onnx").write_bytes(b"no model")
    return tmp_path / "models"


@pytest.fixture
@contextlib.asynccontextmanager
async def told(tmp_path, heavy):
    """An engine with room for one model, and what it tells."""
    async with engine_of(tmp_path, Footprint(150_000_000), repository=heavy) as engine:
        heard = []
        engine.cache.events.listen(heard.append)
        yield engine, heard


async def test_a_load_that_evicts_is_told_from_both_sides(told, toys):
    """Loaded, waited, then who was evicted for whom, unloaded, and the other loaded; bytes and times with each."""
    engine, heard = told
    for name in "aab":
        await answered(engine, toys, name)

    assert [(event.type, event.name) for event in heard[:6]] == [
        (EventType.LOADED, "a"),
        (EventType.WAITED, "a"),
        (EventType.EVICTED, "a"),
        (EventType.UNLOADED, "a"),
        (EventType.LOADED, "b"),
        (EventType.WAITED, "b"),
    ]
    loaded, waited, evicted, unloaded = heard[:4]
    assert loaded.footprint == evicted.footprint == unloaded.footprint == Footprint(HEAVY)
    assert (evicted.why, unloaded.why) == ("b", "evicted for 'b'")
    assert 0 < loaded.ns <= waited.ns
    assert unloaded.ns > 0
    assert all(earlier.at <= later.at for earlier, later in pairwise(heard))


async def test_what_is_told_is_what_is_counted(told, toys):
    """Times of events, of histograms and of each model's counters are the same."""
    engine, heard = told
    await asyncio.gather(*(answered(engine, toys, "a") for _ in range(3)))
    await answered(engine, toys, "b")
    await engine.close()

    stats = engine.registry.stats
    for deed, of_model, in_all in (
        (EventType.WAITED, "wait", engine.times.wait),
        (EventType.LOADED, "load", engine.times.load),
        (EventType.UNLOADED, "unload", engine.times.unload),
    ):
        times = [event.ns for event in heard if event.type is deed]
        durations = [getattr(stats[name], of_model) for name in "ab"]
        assert sum(duration.ns for duration in durations) == sum(times) == in_all.total.ns
        assert sum(duration.count for duration in durations) == len(times) == in_all.total.count == sum(in_all.counts)
    assert stats["a"].wait.count == 3, "each of those who waited for one load"
    assert engine.times.download.total.count == 0


async def test_a_load_that_fails_is_told_with_its_reason(told, toys):
    """The error's sentence; whoever waited in vain is no wait for a model."""
    engine, heard = told
    with pytest.raises(MmeError):
        await ask(engine, toys.Call(1), "bad")

    [failed] = heard
    assert (failed.type, failed.name) == (EventType.FAILED, "bad")
    assert "can't load model 'bad'" in failed.why


async def test_a_request_for_a_model_in_memory_is_not_told(told, toys):
    """However many there are: they are counted elsewhere."""
    engine, heard = told
    await answered(engine, toys)
    heard.clear()
    for _ in range(10):
        await answered(engine, toys)
    async with engine.leased("a"):
        pass
    assert heard == []


@pytest.mark.parametrize(("ns", "bucket"), [(1, 0), (5_000_000, 0), (5_000_001, 1), (360 * 10**9, 14), (10**13, 15)])
def test_a_time_falls_into_the_bucket_of_its_upper_bound(ns, bucket):
    """A bound belongs to the bucket below it; what is over all bounds has one of its own."""
    times = CacheTimes()
    times.hear(CacheEvent(EventType.LOADED, "a", ns, download_ns=ns))

    for histogram in (times.load, times.download):
        assert histogram.counts.index(1) == bucket
        assert (histogram.total.count, histogram.total.ns) == (1, ns)
