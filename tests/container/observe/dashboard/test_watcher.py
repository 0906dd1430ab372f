"""What is remembered of a server at work: seconds, and what the cache did."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import count

from container.observe import dashboard
from container.settings import Mode
from serve.request import Timings
from serve.statistics import CacheEvent, Duration, EventType, ModelStats
from serve.threads import Slices


def columns(running):
    """The seconds so far."""
    return running.on_loop.call(running.service.watcher.history.columns)


def happened(running):
    """What is remembered, newest first."""
    return [(h.event.type, h.event.name, h.times) for h in running.service.watcher.happenings]


def test_a_second_holds_what_happened_in_it(served, ask, until):
    """Hits, misses, answers, failures and memory add up over the samples, which come by themselves."""
    running = served({"a": 50, "b": 60}, "a")
    for name, status in (("a", 200), ("a", 200), ("b", 200), ("b", 200), ("nobody", 404)):
        assert ask(running, name).status == status
    assert running.infer("a", {"inputs": []}).status == 400
    until(lambda: sum(columns(running)["succeeded"]) == 4, "the second to be over")

    found = columns(running)
    sums = {name: sum(found[name]) for name in ("hits", "misses", "succeeded", "failed", "loads", "evictions")}
    assert sums == {"hits": 4, "misses": 1, "succeeded": 4, "failed": 1, "loads": 2, "evictions": 0}
    assert (found["resident"][-1], found["host"][-1], found["device"][-1]) == (2, 110_000_000, 0)
    assert all(value > 0 for value in found["compute_ms"] if value is not None)
    before = len(found["hits"])
    until(lambda: len(columns(running)["hits"]) > before, "the next second")


def test_requests_that_wait_for_their_model_are_counted(served, ask, until):
    """While its load lasts, and not after."""
    running = served({"a": 50, "b": 50}, "a")
    with ThreadPoolExecutor(2) as pool, running.loads_held_up():
        waiting = [pool.submit(ask, running, "b") for _ in range(2)]
        until(lambda: columns(running)["cold"][-1:] == [2], "both to wait")
    assert [answer.result().status for answer in waiting] == [200, 200]
    until(lambda: columns(running)["cold"][-1:] == [0], "the second after")


def test_requests_that_wait_for_a_lane_are_counted(start, tmp_path, put, json_inputs, until):
    """While its model collects a batch."""
    put["arithmetic"](tmp_path, "patient")
    (tmp_path / "patient" / "config.pbtxt").write_text(
        "max_batch_size: 8 dynamic_batching { preferred_batch_size: [8] max_queue_delay_microseconds: 600000000 }"
    )
    running = start(mode=Mode.REPOSITORY, model_repository=tmp_path, load_models=("patient",))
    rows = [[1, 2, 3, 4]]
    document = {"inputs": json_inputs(A=rows, B=rows)}
    with ThreadPoolExecutor(8) as pool:
        waiting = [pool.submit(running.infer, "patient", document) for _ in range(3)]
        until(lambda: columns(running)["queued"][-1:] == [3], "three to wait")
        waiting += [pool.submit(running.infer, "patient", document) for _ in range(5)]
        assert [answer.result().status for answer in waiting] == [200] * 8


def test_steps_inside_an_archive_are_no_requests(served, ask, until):
    """What a target's members execute is not counted beside the target's own requests."""
    running = served({"a": 10}, "a")
    member = ModelStats()
    member.succeeded(1000, 1000, 1, 1, Timings(0, 0, 0, 0))
    running.on_loop.call(running.engine.stats.__setitem__, ("a:member", 1), member)
    ask(running, "a")
    until(lambda: sum(columns(running)["succeeded"]), "the second to be over")
    assert sum(columns(running)["succeeded"]) == 1


def test_an_eviction_is_remembered_once(served, ask, until):
    """Whom it was for and how much it freed; the unload that follows from it is not told again."""
    running = served({"a": 120, "b": 110}, "a")
    ask(running, "b")
    running.http("POST", "/v2/repository/models/b/unload")

    until(lambda: len(happened(running)) == 4, "the unload")
    assert happened(running) == [
        (EventType.UNLOADED, "b", 1),
        (EventType.LOADED, "b", 1),
        (EventType.EVICTED, "a", 1),
        (EventType.LOADED, "a", 1),
    ]
    (evicted,) = [h.event for h in running.service.watcher.happenings if h.event.type is EventType.EVICTED]
    assert (evicted.why, evicted.footprint.host) == ("b", 120_000_000)


def test_a_load_that_fails_again_and_again_is_one_line(served, tmp_path, ask):
    """With how often, at the time of the last; another model's, or another reason, is another line."""
    running = served({"a": 10}, "a")
    for name in ("bad", "worse"):
        (tmp_path / "repository" / name / "1").mkdir(parents=True)
        (tmp_path / "repository" / name / "1" / "model.onnx").write_bytes(b"no model")
    for name in ("bad", "worse", "bad"):
        ask(running, name)

    assert happened(running) == [
        (EventType.FAILED, "bad", 2),
        (EventType.FAILED, "worse", 1),
        (EventType.LOADED, "a", 1),
    ]
    (bad, *_) = running.service.watcher.happenings
    assert bad.since < bad.event.at


def test_requests_whose_model_does_not_load_are_failed_ones(served, tmp_path, ask, until):
    """However many of them had it tried."""
    running = served({"a": 10}, "a")
    (tmp_path / "repository" / "bad" / "1").mkdir(parents=True)
    (tmp_path / "repository" / "bad" / "1" / "model.onnx").write_bytes(b"no model")
    for _ in range(5):
        assert ask(running, "bad").status == 400

    until(lambda: sum(columns(running)["failed"]) == 5, "the second to be over")


def test_only_the_last_events_are_kept(served):
    """However much happens."""
    running = served({"a": 10}, "a")
    for number in range(100):
        running.on_loop.call(running.engine.cache.events.tell, CacheEvent(EventType.LOADED, f"m{number}"))
    assert [name for _, name, _ in happened(running)] == [f"m{number}" for number in range(99, 39, -1)]


def test_a_model_that_loads_while_a_second_is_taken_costs_no_second(served, ask, until):
    """Loads begin to count on threads of their own, in the middle of anything."""
    running = served({"a": 10}, "a")

    class Loading(ModelStats):
        @property
        def success(self):
            running.engine.stats["late", 1] = ModelStats()
            return Duration()

        success = success.setter(lambda *_: None)

    running.on_loop.call(running.engine.stats.__setitem__, ("a", 2), Loading())
    until(lambda: ("late", 1) in running.engine.stats, "a second to be taken")
    before = len(columns(running)["hits"])
    until(lambda: len(columns(running)["hits"]) > before + 1, "the seconds after")


def test_requests_that_end_while_a_second_is_taken_have_times_of_their_own(served, monkeypatch):
    """A mean is made of counters of each model that are read together, however long it takes to read all models."""
    running = served({"a": 10}, "a")
    monkeypatch.setattr(dashboard, "Slices", partial(Slices, count().__next__))  # each is over when it begins

    async def sampled():
        watcher, (stats,) = dashboard.Watcher(running.engine), running.engine.stats.values()
        for _ in range(2):
            sample = asyncio.ensure_future(watcher.sample())
            while not sample.done():
                stats.success.add(3_000_000)
                stats.queue.add(1_000_000)
                await asyncio.sleep(0.0002)
        return watcher.history.columns()

    found = running.on_loop.run(sampled())
    assert found["succeeded"][0] > 0
    assert (found["queue_ms"], found["compute_ms"]) == ([1.0], [2.0])
