"""Who is in memory: each test drives the threads' work by hand, one piece at a time, and audits the books in between.

The loader, the residents and the executor are real implementations of their interfaces; only *when* a thread would
have finished is the test's choice, so that every interleaving can be had and none depends on luck.
"""

import asyncio
import contextlib
import functools
import gc
import time
import weakref
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model_handlers.base import Footprint
from model_handlers.errors import Kind, MmeError
from serve.cache.entry import Entry, State
from serve.cache.eviction import Policy, Rules
from serve.cache.model_cache import ModelCache
from serve.loading.measuring import Scales
from serve.statistics import TargetStats
from tests.serve.cache.listed import Listed
from tests.serve.inside import books_of, give_loads, residents_of
from tests.serve.integrity import check_integrity
from tests.waiting import until


def mb(number):
    """A footprint in megabytes."""
    return Footprint(number * 10**6)


OF_40 = dict.fromkeys("abc", (mb(40), mb(40)))  # models of which there is room for two


class Desk(Executor):
    """Threads' work, done when the test says so."""

    def __init__(self):
        self.work = []
        self.deserted = False

    def submit(self, function, /, *args):
        """Lay it on the pile."""
        future = Future()
        future.set_running_or_notify_cancel()  # a thread has it: it can't be cancelled any more
        self.work.append((future, _piece(function, args), function, args))
        if self.deserted:
            self.do()
        return future

    def desert(self):
        """The test failed: nobody will do the work, so that it must not be waited for."""
        self.deserted = True
        while self.work:
            self.do()

    @property
    def pending(self):
        """What lies there: 'prepare a', 'load a', 'close a'."""
        return [piece for _, piece, _, _ in self.work]

    def do(self, what=0):
        """One piece, by its place or by its name."""
        index = self.pending.index(what) if isinstance(what, str) else what
        future, _, function, args = self.work.pop(index)
        try:
            result = function(*args)
        except BaseException as error:  # noqa: BLE001 - as executors do
            future.set_exception(error)
        else:
            future.set_result(result)
        finally:
            del future  # whose error knows this frame


def _piece(function, args):
    """What it is, and of which model."""
    if isinstance(function, functools.partial):
        function, args = function.func, function.args
    subject = function.__self__ if isinstance(function.__self__, Held) else args[0]
    return f"{function.__name__} {getattr(subject, 'name', subject)}"


@dataclass
class Artifact:
    """See `model_cache.Prepared`."""

    name: str
    estimate: Footprint
    download_ns: int = 0
    pinned: bool = False
    equipped: bool = True
    tried_first: bool = False
    needs_exclusive_load: bool = False
    content: object = field(default_factory=object)
    steps: tuple = ()
    released: int = 0

    def release(self):
        """The loader would let its files go."""
        self.released += 1


class Held:
    """A resident that takes memory from the moment it is made until it is closed.

    Attributes:
        memory_only: whether that is all it holds.
    """

    memory_only = False
    steps = ()

    def __init__(self, press, name, footprint):
        self.press = press
        self.name = name
        self.footprint = footprint
        self.started = self.closed = self.refused = 0
        self.down = False
        self.told = asyncio.Event()
        press.in_memory += footprint

    def start(self):
        """Once, before anybody uses it."""
        self.press.fail("start", self.name)
        self.started += 1

    def is_down(self):
        """As the test has it."""
        return self.down

    def refuse_waiting(self):
        """Whoever queues would be told."""
        self.refused += 1
        self.told.set()

    def is_memory_only(self):
        """As the test has it."""
        return self.memory_only

    def close(self):
        """Give the memory back."""
        self.closed += 1
        self.press.in_memory -= self.footprint
        self.press.fail("close", self.name)


class Press:
    """A loader of models whose sizes and failures the test sets.

    Attributes:
        sizes: name → (estimate, what it really takes); 60 MB each if not named.
        pinned, alone: names of models whose authors want them to stay, and of those that must be loaded alone.
        bare: names of models that are yet to be equipped.
        delicate: names of models whose files may have to be tried.
        failures: (step, name) → errors that it raises next, in order.
        prepared, made: everything ever fetched, and loaded.
        in_memory: bytes that are really taken.
    """

    def __init__(self):
        self.sizes = {}
        self.pinned = set()
        self.alone = set()
        self.measured = {}  # a loader remembers
        self.bare = set()
        self.delicate = set()
        self.scales = Scales()
        self.prepared = []
        self.deaf = False  # to whoever cancels a fetch
        self.failures = {}
        self.made = []
        self.in_memory = Footprint()
        self.sources = []
        self.tokens = []

    def fail(self, step, name):
        """Raise what the test wants raised."""
        errors = self.failures.get((step, name))
        if errors:
            raise errors.pop(0)

    def prepare(self, name, source, token):
        """See `Loader`."""
        self.sources.append(source)
        self.tokens.append(token)
        if token.cancelled and not self.deaf:
            raise MmeError(Kind.CANCELLED, f"the fetch of '{name}' was cancelled")
        self.fail("prepare", name)
        estimate, _ = self.sizes.get(name, (mb(60), mb(60)))
        self.prepared.append(
            Artifact(
                name,
                self.measured.get(name, estimate),
                pinned=name in self.pinned,
                equipped=name not in self.bare,
                tried_first=name in self.delicate,
                needs_exclusive_load=name in self.alone,
            )
        )
        return self.prepared[-1]

    def equip(self, prepared, token):
        """See `Loader`."""
        if token.cancelled:
            raise MmeError(Kind.CANCELLED, f"the equipment of '{prepared.name}' was cancelled")
        self.fail("equip", prepared.name)
        prepared.equipped = True
        return prepared

    def try_files(self, prepared, token):  # noqa: ARG002 - a trial is short
        """See `Loader`."""
        self.fail("try_files", prepared.name)

    def load(self, prepared, token, more):  # noqa: ARG002 - a framework that loads does not look
        """See `Loader`."""
        self.fail("load", prepared.name)
        _, footprint = self.sizes.get(prepared.name, (mb(60), mb(60)))
        self.measured[prepared.name] = footprint
        self.made.append(Held(self, prepared.name, footprint))
        return self.made[-1], footprint


class World:
    """A cache of 100 MB over a press and a desk."""

    def __init__(self, **options):
        self.press = Press()
        self.press.sizes.update(options.pop("sizes", {}))
        self.desk = Desk()
        self.policy = options["rules"].policy if "rules" in options else Policy.LRU
        self.cache = ModelCache(self.press, options.pop("budget", mb(100)), self.desk, **options)

    def entry(self, name):
        """A model that the cache knows."""
        return self.cache.entries.setdefault(name, Entry(name, f"source of {name}", TargetStats()))

    def audit(self):
        """The books agree with themselves and with what really is in memory."""
        cache = self.cache
        check_integrity(cache)
        now, books = time.monotonic(), books_of(cache)
        listed = Listed(lambda: residents_of(cache), cache.room.budget, self.policy)
        in_order = [listed.place(each) for each in listed.candidates(now)]
        assert [listed.place(each) for each in books.candidates(now)] == in_order
        residents = list(cache.residents.own)
        assert sum((each.footprint for each in residents), cache.room.reserved) == cache.room.used()
        for each in residents:
            assert each.target.started == 1
            assert each.footprint == each.target.footprint + Footprint(cache.residents.shared.charge(each))
            assert not (each.leases and each.target.closed)
        assert all(held.closed <= 1 for held in self.press.made)
        needed = [each.prepared for each in residents]
        assert all(artifact.released == 0 for artifact in needed)

    async def turn(self):
        """Let the loop do all it can without threads; audit."""
        for _ in range(10):
            await asyncio.sleep(0)
        self.audit()

    async def do(self, *pieces):
        """Pieces of work by name, each followed by what the loop makes of it."""
        for piece in pieces:
            self.desk.do(piece)
            await self.turn()

    async def do_all(self):
        """All work there is, and all that follows from it, first come first."""
        await self.turn()
        while self.desk.work:
            await self.do(0)

    async def begin(self, name, what="acquire"):
        """A task that acquires, loads, reloads or unloads, as far as it gets on its own."""
        task = asyncio.create_task(self.task(name, what))
        await self.turn()
        return task

    async def task(self, name, what, source=None):
        """Do it; a load comes from the source that there is, a reload may come from another. What the load cost."""
        entry = self.entry(name)
        if what == "acquire":
            return (await self.cache.acquire(entry))[1]
        if what in {"load", "reload"}:
            return await self.cache.reload(entry, source or entry.source)
        return await getattr(self.cache, what)(entry)

    def release(self, name):
        """End a lease on what serves under a name."""
        self.entry(name).residency.release()

    def cut(self, name):
        """End a load of that name, if one is under way, as its time being over does."""
        if load := self.entry(name).load:
            load.task.cancel()

    async def resident(self, *names):
        """Models in memory, unleased, least recently used first."""
        for name in names:
            task = await self.begin(name, "load")
            await self.do_all()
            await task

    async def gone(self):
        """Unload everything; nothing is left anywhere."""
        closing = asyncio.create_task(self.cache.close())
        await self.do_all()
        await closing
        assert self.cache.room.used() == Footprint()
        assert self.press.in_memory == Footprint()
        assert all(held.closed == 1 for held in self.press.made)
        assert all(artifact.released == 1 for artifact in self.press.prepared)
        assert {entry.state.shown for entry in self.cache.entries.values()} <= {"UNAVAILABLE"}


@contextlib.asynccontextmanager
async def world_of(**options):
    """A world, closed afterwards and looked through for what is left."""
    world = World(**options)
    try:
        yield world
        await world.gone()
    finally:
        world.desk.desert()


@pytest.fixture
def world():
    """One without options."""
    return world_of()


@pytest.fixture
def narrow():
    """One whose models take 40 MB: there is room for two."""
    return world_of(sizes=OF_40)


def failure(task):
    """The kind of error that a task ended with."""
    assert task.done()
    assert isinstance(task.exception(), MmeError), task
    return task.exception().kind


# -- coming ------------------------------------------------------------------------------------------------------------


async def test_a_cold_model_is_loaded_and_leased(world):
    """`acquire` prepares, loads, starts and leases; then `lease` finds it, until nobody holds it and it is unloaded."""
    assert world.cache.ready.lease("a") is None
    task = await world.begin("a")
    assert world.entry("a").state is State.LOADING
    assert world.desk.pending == ["prepare a"]
    assert world.cache.room.reserved == Footprint()
    await world.do("prepare a")
    assert world.cache.room.reserved == mb(60)
    await world.do("load a")
    report = await task
    entry = world.cache.ready.lease("a")
    assert (entry.leases, entry.entry.state, entry.footprint) == (2, State.READY, mb(60))
    assert entry.target is world.press.made[0]
    assert report.evicted == ()
    assert (entry.stats.hits, entry.stats.misses, entry.stats.loads) == (1, 1, 1)
    entry.release()
    entry.release()


async def test_fifty_at_once_load_once(world):
    """Everybody who asks for a cold model waits for one load, and holds a lease of his own after it."""
    tasks = [await world.begin("a") for _ in range(50)]
    await world.do_all()
    reports = [await task for task in tasks]
    assert len(world.press.made) == 1
    assert all(report is reports[0] for report in reports)
    entry = world.entry("a")
    assert (entry.leases, entry.stats.misses, entry.stats.loads) == (50, 50, 1)
    for _ in tasks:
        world.release("a")


@pytest.mark.parametrize("step", ["prepare", "equip", "load", "start"])
@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (MmeError(Kind.INVALID_MODEL, "no such graph"), Kind.INVALID_MODEL),
        (OSError("no such disk"), Kind.INTERNAL),
        (MemoryError("no such room"), Kind.OUT_OF_MEMORY),
    ],
    ids=["ours", "foreign", "memory"],
)
async def test_a_failed_load_reaches_everybody_who_waits_and_the_next_tries_again(world, step, error, kind):
    """One failure, one error for each waiter, one of ours whatever the loader raised; the next request loads anew."""
    world.press.bare = {"a"}
    world.press.failures[step, "a"] = [error]
    tasks = [await world.begin("a") for _ in range(3)]
    loader = await world.begin("a", "load")
    await world.do_all()
    assert [failure(task) for task in [*tasks, loader]] == [kind] * 4
    assert "no such" in str(tasks[0].exception())
    entry = world.entry("a")
    assert (entry.state, entry.leases, entry.load) == (State.FAILED, 0, None)
    assert "no such" in entry.reason
    assert (entry.stats.load_failures, entry.stats.loads) == (1, 0)
    assert world.cache.room.used() == Footprint()
    assert world.press.in_memory == Footprint()
    again = await world.begin("a")
    await world.do_all()
    await again
    assert (entry.reason, entry.state) == ("", State.READY)
    world.release("a")


@pytest.mark.parametrize("what", ["load", "reload"])
async def test_what_a_failed_load_made_is_not_kept(world, what):
    """Of a model that could not be loaded, or loaded anew, the sentence is remembered and nothing that was made for it.

    It is gone when that is known, not when the collector of garbage comes: others may need its memory.
    """
    made = []

    def load(press, prepared, _token, **_more):
        weights = Held(press, prepared.name, mb(0))  # as a framework's loader holds a file's bytes
        made.append(weakref.ref(weights))
        raise MmeError(Kind.INVALID_MODEL, "no such graph")

    gc.disable()
    try:
        if what == "reload":
            first = await world.begin("a", "load")
            await world.do_all()
            await first
        world.press.load = load.__get__(world.press)
        task = await world.begin("a", what)
        await world.do_all()
        assert failure(task) is Kind.INVALID_MODEL
        del task
        assert [each() for each in made] == [None]
        assert world.entry("a").failure == ("no such graph", None, Kind.INVALID_MODEL, 0.0)
    finally:
        gc.enable()


def on_gpu(number):
    """A footprint in megabytes of a device, and 1 MB of the host."""
    return Footprint(10**6, (number * 10**6,))


FULL = "CUDA out of memory"
DEVICES = Footprint(100 * 10**6, (100 * 10**6,))


@pytest.mark.parametrize("evicts", [True, False])
async def test_a_device_that_is_full_though_the_budget_is_not_is_given_room_once(evicts):
    """Executions take memory that no budget counts: the least used on the device leave, and the load begins again."""
    async with world_of(budget=DEVICES, evicts=evicts) as world:
        for name in ("old", "host", "young"):
            world.press.sizes[name] = (mb(20), mb(20)) if name == "host" else (on_gpu(30), on_gpu(30))
        world.press.sizes["new"] = (on_gpu(25), on_gpu(25))
        world.press.failures["load", "new"] = [MmeError(Kind.OUT_OF_MEMORY, FULL)]
        await world.resident("old", "host", "young")
        task = await world.begin("new", "load")
        await world.do_all()

        there = [name for name in ("old", "host", "young", "new") if world.entry(name).state is State.READY]
        if evicts:
            assert task.result().evicted == ("old",)
            assert there == ["host", "young", "new"]
        else:
            assert (failure(task), str(task.exception())) == (Kind.OUT_OF_MEMORY, FULL)
            assert there == ["old", "host", "young"]


@pytest.mark.parametrize(
    ("size", "failures", "left"),
    [
        (on_gpu(25), [MmeError(Kind.OUT_OF_MEMORY, FULL)] * 2, ["host"]),
        (mb(25), [MmeError(Kind.OUT_OF_MEMORY, FULL)], ["gpu", "host"]),
        (on_gpu(25), [MmeError(Kind.INVALID_MODEL, FULL)], ["gpu", "host"]),
    ],
    ids=["again", "of the host", "something else"],
)
async def test_nobody_leaves_a_device_twice_or_for_anything_else(size, failures, left):
    """A load that fails for want of a device's memory a second time is out of memory, and who is on the host stays."""
    async with world_of(budget=DEVICES) as world:
        world.press.sizes |= {"gpu": (on_gpu(30), on_gpu(30)), "host": (mb(20), mb(20)), "new": (size, size)}
        world.press.failures["load", "new"] = list(failures)
        await world.resident("gpu", "host")
        task = await world.begin("new", "load")
        await world.do_all()
        assert (failure(task), str(task.exception())) == (failures[0].kind, FULL)
        assert [name for name in ("gpu", "host") if world.entry(name).state is State.READY] == left


async def test_a_slow_load_is_in_nobodys_way(world):
    """While one model loads, waits for room or unloads, another is leased and released at once."""
    world.press.sizes = {"hot": (mb(10), mb(10))}
    await world.resident("hot", "old")
    entry = world.cache.ready.lease("hot")
    slow = await world.begin("slow")
    for piece in ("prepare slow", "close old", "load slow"):
        assert piece in world.desk.pending
        assert world.cache.ready.lease("hot") is entry
        entry.release()
        await world.do(piece)
    entry.release()
    await slow
    world.release("slow")


async def test_a_measured_footprint_is_the_next_estimate(world):
    """The same bytes loaded again reserve what they took the first time."""
    world.press.sizes["a"] = (mb(90), mb(20))
    await world.resident("a")
    assert world.cache.room.used() == mb(20)
    unload = await world.begin("a", "unload")
    await world.do_all()
    await unload
    again = await world.begin("a")
    await world.do("prepare a")
    assert world.cache.room.reserved == mb(20)
    await world.do_all()
    await again
    world.release("a")


async def test_the_first_load_comes_to_its_end_before_others_begin():
    """Of many models asked for at once eight are fetched, and as many loaded as there are turns; the first goes first."""
    async with world_of(turns=2) as world:
        world.press.sizes = {name: (mb(10), mb(10)) for name in "abcdefghij"}
        tasks = [await world.begin(name) for name in "abcdefghij"]
        assert world.desk.pending == [f"prepare {name}" for name in "abcdefgh"]
        await world.do("prepare a")
        assert world.desk.pending == [*(f"prepare {name}" for name in "bcdefgh"), "load a", "prepare i"]
        await world.do("load a")
        assert tasks[0].done()
        assert world.desk.pending == [f"prepare {name}" for name in "bcdefghi"]
        unload = await world.begin("j", "unload")  # of one that waits for its turn
        await world.do_all()
        await unload
        assert failure(tasks[9]) is Kind.UNAVAILABLE
        assert [held.name for held in world.press.made] == list("abcdefghi")
        for name in "abcdefghi":
            world.release(name)


async def test_models_that_are_measured_together_load_one_after_the_other():
    """Those that must be alone wait for each other, and meanwhile hold up nobody who need not be."""
    async with world_of(turns=2) as world:
        world.press.sizes = {name: (mb(20), mb(20)) for name in "abcd"}
        world.press.alone = {"a", "b"}
        tasks = [await world.begin(name) for name in "abcd"]
        await world.do("prepare a", "prepare b", "prepare c", "prepare d")
        assert world.desk.pending == ["load a", "load c"]
        await world.do("load c")
        assert world.desk.pending == ["load a", "load d"]
        await world.do("load a", "load b")
        await world.do_all()
        for task, name in zip(tasks, "abcd", strict=True):
            await task
            world.release(name)


async def test_a_load_that_waits_for_another_steps_aside():
    """By its token, once, and of all its turns: the other is loaded, and measured, beside it; a third waits."""
    async with world_of(turns=1, sizes=dict.fromkeys("abc", (mb(30), mb(30)))) as world:
        world.press.alone = set("abc")
        loads = [await world.begin(name, "load") for name in "abc"]
        await world.do("prepare a", "prepare b", "prepare c")
        assert world.desk.pending == ["load a"]
        for _ in range(2):
            world.press.tokens[0].step_aside()
            await world.turn()
            assert world.desk.pending == ["load a", "load b"]
        await world.do("load a")
        assert world.desk.pending == ["load b"]
        await world.do("load b", "load c")
        await asyncio.gather(*loads)
        assert repr(world.press.scales.turns) == "<FairSemaphore: 1 free, 0 waiting>"


# -- room --------------------------------------------------------------------------------------------------------------


async def test_the_least_recently_used_goes(world):
    """A load evicts who was used longest ago, is told whom, and the evicted one comes back with its next request."""
    world.press.sizes = {name: (mb(40), mb(40)) for name in "abc"}
    await world.resident("a", "b")
    world.cache.ready.lease("a").release()
    task = await world.begin("c")
    await world.do("prepare c")
    assert world.desk.pending == ["close b"]
    assert world.entry("b").state is State.EVICTING
    assert world.cache.ready.lease("b") is None
    await world.do_all()
    assert (await task).evicted == ("b",)
    entry = world.entry("b")
    assert (entry.state, entry.reason) == (State.EVICTED, "evicted for 'c'")
    assert entry.stats.evictions == {"load": 1}
    world.release("c")
    back = await world.begin("b")
    await world.do_all()
    await back
    assert entry.state is State.READY
    world.release("b")


async def test_each_eviction_is_one_line_and_one_count(world, caplog):
    """Who went, why, with how many bytes, and for whom: in the log, and in the model's statistics."""
    with caplog.at_level("INFO", "mme.cache"):
        await world.resident("a")
        await world.resident("b")
        assert world.entry("a").stats.evictions == {"load": 1}
        assert world.entry("a").stats.evicted == mb(60)
        (line,) = [record for record in caplog.records if record.message.startswith("evicted")]
        assert line.message == "evicted for 'b' (load), least recently used, 60.0 MB"
        assert (line.target_model, line.beneficiary, line.reason) == ("a", "b", "load")
        assert (line.host_bytes, line.device_bytes) == (60_000_000, 0)


@pytest.mark.parametrize(("policy", "victim"), [(Policy.LRU, "often"), (Policy.LFU, "rarely"), (Policy.GDSF, "rarely")])
async def test_the_policy_chooses(policy, victim):
    """A model used often and long ago goes under LRU, one used once and lately under the others."""
    async with world_of(rules=Rules(policy)) as world:
        world.press.sizes = {name: (mb(50), mb(50)) for name in ("often", "rarely", "new")}
        await world.resident("often", "rarely")
        for _ in range(5):
            world.cache.ready.lease("often").release()
        world.cache.ready.lease("rarely").release()
        for name in ("often", "rarely"):
            world.entry(name).reload_ns = 10**9
        task = await world.begin("new")
        await world.do("prepare new")
        assert world.desk.pending == [f"close {victim}"]
        await world.do_all()
        await task
        world.release("new")


async def test_uses_count_from_the_last_load(world):
    """A model that was out of memory begins anew, with those who waited for its load."""
    await world.resident("a")
    entry = world.entry("a")
    assert entry.residency.uses == 0
    for _ in range(3):
        world.cache.ready.lease("a").release()
    assert entry.residency.uses == 3
    lease = world.cache.ready.lease("a")
    unload = await world.begin("a", "unload")
    waiting = [await world.begin("a") for _ in range(2)]
    lease.release()
    await world.do_all()
    await unload
    await asyncio.gather(*waiting)
    assert entry.residency.uses == 2
    world.release("a")
    world.release("a")


async def test_the_age_at_the_last_use_is_that_of_the_textbook():
    """GDSF ranks a model by the age that the cache had when the model was used last."""
    async with world_of(rules=Rules(Policy.GDSF)) as world:
        world.press.sizes = {name: (mb(25), mb(25)) for name in "abcdef"}
        ages = {}

        def ask(name):
            lease = world.cache.ready.lease(name)
            lease.entry.reload_ns = 10**9 * (ord(name) - ord("a") + 1)
            lease.release()
            ages[name] = books_of(world.cache).age

        await world.resident("a", "b", "c", "d")
        for turn in range(40):
            for name in "abcdef"[turn % 3 :: 2]:
                if world.cache.ready.lease(name) is None:
                    await world.resident(name)
                    ages[name] = books_of(world.cache).age
                else:
                    world.release(name)
                ask(name)
                residents = residents_of(world.cache)
                assert {r.name: r.age for r in residents} == {r.name: ages.get(r.name, 0.0) for r in residents}
        assert books_of(world.cache).age > 0


@pytest.mark.parametrize("policy", Policy)
async def test_an_eviction_looks_at_those_in_front(policy):
    """However many are in memory: at who was used since it last looked, and at who goes, not at all of them."""
    async with world_of(rules=Rules(policy)) as world:
        names = [f"m{number}" for number in range(100)]
        world.press.sizes = {name: (mb(1), mb(1)) for name in [*names, "x", "y", "z"]}
        await world.resident(*names)
        for name in names[3:20]:
            world.cache.ready.lease(name).release()
        looks = books_of(world.cache).order.looks
        for name in "xyz":
            task = asyncio.create_task(world.cache.reload(entry := world.entry(name), entry.source))
            while not task.done():
                await asyncio.sleep(0)
                while world.desk.pending:
                    world.desk.do()
        assert [name for name in names if world.entry(name).state is State.EVICTED] == names[:3]
        assert books_of(world.cache).order.looks - looks < 40


@pytest.mark.parametrize("by", ["name", "pattern", "author"])
async def test_a_pinned_model_is_never_evicted(by):
    """By the operator's name or pattern, or by its author's wish, it stays; unloaded by hand, it goes."""
    async with world_of(rules=Rules(pins={"name": ("keep",), "pattern": ("k*p",), "author": ()}[by])) as world:
        if by == "author":
            world.press.pinned = {"keep"}
        world.press.sizes = {name: (mb(40), mb(40)) for name in ("keep", "b", "c")}
        await world.resident("keep", "b", "c")
        assert [entry.state for entry in map(world.entry, ("keep", "b", "c"))] == [
            State.READY,
            State.EVICTED,
            State.READY,
        ]
        world.press.sizes["big"] = (mb(61), mb(61))
        big = await world.begin("big")
        await world.do_all()
        assert failure(big) is Kind.OUT_OF_MEMORY
        assert world.entry("c").state is State.READY
        unload = await world.begin("keep", "unload")
        await world.do_all()
        await unload
        await world.resident("big")


@pytest.mark.parametrize("seconds", [0.02, 3600.0])
async def test_a_model_stays_for_its_minimum(seconds):
    """Who needs the room waits until the model has been there for long enough, or for as long as its patience."""
    async with world_of(rules=Rules(min_residency=seconds), memory_patience=10.0 if seconds < 1 else 0.005) as world:
        await world.resident("a")
        task = await world.begin("b")
        await world.do("prepare b")
        if seconds < 1:
            await until(lambda: world.desk.work)
            assert time.monotonic() - world.entry("a").residency.loaded_at >= seconds
            await world.do_all()
            await task
            world.release("b")
        else:
            with contextlib.suppress(MmeError):
                await task
            assert failure(task) is Kind.UNAVAILABLE
            assert world.entry("a").state is State.READY


async def test_a_model_nobody_used_yet_is_as_recent_as_its_load(world):
    """Of two models loaded and never used, the one loaded first goes, whichever was known first."""
    world.press.sizes = {name: (mb(40), mb(40)) for name in "abc"}
    world.entry("a")
    await world.resident("b", "a", "c")
    assert world.entry("b").state is State.EVICTED
    assert world.entry("a").state is State.READY


# -- being loaded anew --------------------------------------------------------------------------------------------------


async def test_a_model_loaded_anew_serves_until_the_new_one_does(narrow):
    """Leases are had all the time; the old one closes after the last of its own, though the new one is in use."""
    await narrow.resident("a")
    old = narrow.cache.ready.lease("a")
    reload = await narrow.begin("a", "reload")
    await narrow.do("prepare a")
    assert narrow.cache.ready.lease("a") is old
    await narrow.do("load a")
    await reload
    new = narrow.cache.ready.lease("a")
    assert new is not old
    assert (old.leaving, new.leaving, new.entry.state) == (True, False, State.READY)
    assert narrow.cache.room.used() == mb(80)
    old.release()
    await narrow.turn()
    assert narrow.desk.pending == []
    old.release()
    await narrow.turn()
    await narrow.do("close a")
    assert [held.closed for held in narrow.press.made] == [1, 0]
    assert narrow.cache.room.used() == mb(40)
    new.release()


async def test_requests_of_a_model_that_was_replaced_have_all_the_time_they_need():
    """Nobody who is queued there is refused, unless the name is unloaded: then he has as long as at any unload."""
    async with world_of(sizes=OF_40, drain_patience=0.01) as world:
        await world.resident("a")
        old = world.cache.ready.lease("a")
        reload = await world.begin("a", "reload")
        await world.do("prepare a", "load a")
        await reload
        retired, _ = world.press.made
        await asyncio.sleep(0.05)
        assert retired.refused == 0
        unload = await world.begin("a", "unload")
        await world.do("close a")
        await retired.told.wait()
        assert (retired.refused, unload.done()) == (1, False)
        old.release()
        await world.turn()
        await world.do("close a")
        await unload


@pytest.mark.parametrize("step", ["prepare", "load", "start"])
async def test_a_successor_that_fails_leaves_the_old_one_serving(narrow, step):
    """Whoever asked for it is told; nobody else notices, and the next try may succeed."""
    await narrow.resident("a")
    old = narrow.entry("a").residency
    narrow.press.failures[step, "a"] = [MmeError(Kind.INVALID_MODEL, "bad")]
    reload = await narrow.begin("a", "reload")
    await narrow.do_all()
    assert failure(reload) is Kind.INVALID_MODEL
    entry = narrow.entry("a")
    assert entry.residency is old
    assert (entry.state, entry.registered, entry.reason) == (State.READY, True, "")
    again = await narrow.begin("a", "reload")
    await narrow.do_all()
    await again
    assert entry.residency is not old


@pytest.mark.parametrize("evicts", [True, False])
async def test_where_memory_has_no_room_for_both_the_old_one_goes_first(evicts):
    """Who asks meanwhile waits for the new one, and the model counts as registered all the time."""
    async with world_of(evicts=evicts) as world:
        await world.resident("a")
        old = world.cache.ready.lease("a")
        reload = await world.begin("a", "reload")
        await world.do("prepare a")
        assert (old.leaving, world.entry("a").state) == (True, State.RETURNING)
        waiting = await world.begin("a")
        assert (waiting.done(), world.entry("a").registered) == (False, True)
        old.release()
        await world.turn()
        await world.do("close a", "load a")
        await reload
        await waiting
        assert [held.closed for held in world.press.made] == [1, 0]
        world.release("a")


async def test_the_old_one_goes_after_all_when_what_its_successor_waits_for_is_pinned():
    """There was to be room for both, but for a model that was being loaded then and is never evicted now."""
    async with world_of(rules=Rules(pins=("keep",))) as world:
        world.press.sizes = {"b": (mb(45), mb(45)), "keep": (mb(20), mb(20))}
        await world.resident("b")
        old = world.entry("b").residency
        keep = await world.begin("keep", "load")
        await world.do("prepare keep")
        reload = await world.begin("b", "reload")
        await world.do("prepare b")
        assert not old.leaving
        await world.do("load keep")
        await keep
        assert (old.leaving, world.desk.pending) == (True, ["close b"])
        await world.do("close b", "load b")
        await reload
        assert world.cache.room.used() == mb(65)


async def test_a_pinned_model_goes_for_its_successor_when_another_is_pinned_meanwhile():
    """It is in nobody's way but that one's, so that nothing is out of memory."""
    async with world_of(rules=Rules(pins=("b", "keep"))) as world:
        world.press.sizes = {"b": (mb(45), mb(45)), "keep": (mb(20), mb(20))}
        await world.resident("b")
        keep = await world.begin("keep", "load")
        await world.do("prepare keep")
        reload = await world.begin("b", "reload")
        await world.do("prepare b", "load keep")
        await keep
        await world.do("close b", "load b")
        await reload


async def test_the_old_one_goes_after_all_when_a_platform_loads_what_leaves_no_room_for_both():
    """A load that waits for a model that is being unloaded is overtaken by a small one, and is not out of memory."""
    async with world_of(evicts=False) as world:
        world.press.sizes = {"a": (mb(40), mb(40)), "b": (mb(50), mb(50)), "c": (mb(10), mb(10))}
        await world.resident("a", "b")
        lease = world.cache.ready.lease("b")
        unload = await world.begin("b", "unload")
        world.press.measured["a"] = mb(60)
        reload = await world.begin("a", "reload")
        await world.do("prepare a")
        assert world.entry("a").state is State.RELOADING
        small = await world.begin("c", "load")
        await world.do("prepare c", "load c")
        await small
        assert (world.desk.pending, reload.done()) == (["close a"], False)
        lease.release()
        await world.do_all()
        await asyncio.gather(unload, reload)


async def test_the_bytes_of_an_old_one_that_went_first_are_its_successors_on_a_platform():
    """What comes meanwhile finds memory full, and does not take the place of a model that serves no more for it."""
    async with world_of(evicts=False) as world:
        world.press.sizes = {"a": (mb(50), mb(50)), "small": (mb(40), mb(40))}
        await world.resident("a")
        world.press.measured["a"] = mb(70)
        lease = world.cache.ready.lease("a")
        reload = await world.begin("a", "reload")
        await world.do("prepare a")
        small = await world.begin("small", "load")
        await world.do("prepare small")
        assert failure(small) is Kind.OUT_OF_MEMORY
        lease.release()
        await world.do_all()
        await reload


async def test_no_old_one_goes_for_bytes_that_another_waits_for_on_a_platform():
    """It would be out of memory, and its successor could not be loaded all the same."""
    async with world_of(evicts=False) as world:
        world.press.sizes = {"a": (mb(30), mb(30)), "b": (mb(60), mb(60)), "early": (mb(40), mb(40))}
        await world.resident("a", "b")
        lease = world.cache.ready.lease("b")
        unload = await world.begin("b", "unload")
        early = await world.begin("early", "load")
        await world.do("prepare early")
        world.press.measured["a"] = mb(90)
        reload = await world.begin("a", "reload")
        await world.do("prepare a")
        assert failure(reload) is Kind.OUT_OF_MEMORY
        assert world.entry("a").state is State.READY
        lease.release()
        await world.do_all()
        await asyncio.gather(unload, early)


async def test_a_successor_larger_than_estimated_takes_the_place_of_the_old_one_on_a_platform():
    """It was loaded beside the old one, and there is no room for what it takes more: the old one leaves after all."""
    async with world_of(evicts=False) as world:
        world.press.sizes = {"a": (mb(40), mb(40)), "b": (mb(40), mb(40))}
        await world.resident("a", "b")
        world.press.measured["a"] = mb(20)
        world.press.sizes["a"] = (mb(20), mb(50))
        reload = await world.begin("a", "reload")
        await world.do_all()
        await reload
        assert world.cache.room.used() == mb(90)


@pytest.mark.parametrize("names", ["ab", "abc"])
async def test_models_loaded_anew_at_once_do_not_wait_for_each_other(names):
    """Each has room beside its old one if another's goes, which waits for the same: the first to ask lets its own go."""
    async with world_of(turns=3) as world:
        world.press.sizes = dict.fromkeys(names, (mb(90 // len(names)),) * 2)
        await world.resident(*names)
        old = [world.entry(name).residency for name in names]
        reloads = [await world.begin(name, "reload") for name in names]
        await world.do(*(f"prepare {name}" for name in names))
        assert [each.leaving for each in old] == [True] + [False] * (len(names) - 1)
        await world.do_all()
        await asyncio.gather(*reloads)


async def test_a_model_loaded_anew_waits_for_another_that_will_make_room(world):
    """That one has room beside its old one once a request has ended: no model leaves before its successor is there."""
    world.press.sizes = {"a": (mb(45), mb(45)), "b": (mb(45), mb(45)), "c": (mb(10), mb(10))}
    await world.resident("a", "b", "c")
    old = [world.entry(name).residency for name in "ab"]
    lease = world.cache.ready.lease("c")
    world.press.sizes["b"] = (mb(10), mb(10))
    world.press.measured["b"] = mb(10)
    reloads = [await world.begin(name, "reload") for name in "ab"]
    await world.do("prepare a", "prepare b")
    assert not any(each.leaving for each in old)
    lease.release()
    await world.turn()
    await world.do("close c", "load b", "close b")
    assert not old[0].leaving
    await world.do_all()
    await asyncio.gather(*reloads)


async def test_others_leave_for_a_successor_before_the_one_that_it_replaces(narrow):
    """No request is lost for want of room as long as somebody idle can make it."""
    await narrow.resident("a", "b")
    old = narrow.cache.ready.lease("a")
    reload = await narrow.begin("a", "reload")
    await narrow.do("prepare a")
    assert (old.leaving, narrow.entry("b").state) == (False, State.EVICTING)
    await narrow.do("close b", "load a")
    await reload
    old.release()
    await narrow.do_all()


async def test_what_is_too_large_at_all_costs_nobody_his_place(world):
    """A successor larger than the budget is out of memory, and the old one serves."""
    await world.resident("a")
    world.press.measured["a"] = mb(101)
    reload = await world.begin("a", "reload")
    await world.do_all()
    assert failure(reload) is Kind.OUT_OF_MEMORY
    assert world.entry("a").state is State.READY


async def test_a_model_that_is_being_replaced_is_no_victim(narrow):
    """Another model's load waits until the successor is there, then the retiring one's room is its own."""
    await narrow.resident("a")
    reload = await narrow.begin("a", "reload")
    await narrow.do("prepare a")
    other = await narrow.begin("b")
    await narrow.do("prepare b")
    assert narrow.entry("a").state is State.RELOADING
    await narrow.do("load a")
    await reload
    await narrow.do("close a", "load b")
    await other
    narrow.release("b")


@pytest.mark.parametrize("fails", [False, True])
async def test_the_source_of_a_load_goes_with_it(narrow, fails):
    """It may hold a client's files, which are gone when it is; what models keep of their load, its token, holds none."""

    class Source:
        """Files."""

    source = Source()
    seen = weakref.ref(source)
    gc.disable()
    try:
        narrow.press.failures["load", "a"] = [MmeError(Kind.INVALID_MODEL, "bad")] if fails else []
        first = asyncio.create_task(narrow.task("a", "reload", source))
        await narrow.do_all()
        assert (first.exception() is not None) == fails
        del first, source
        narrow.press.sources.clear()
        again = asyncio.create_task(narrow.task("a", "reload", "elsewhere"))
        await narrow.do_all()
        await again
        assert seen() is None
        assert len(narrow.press.tokens) == 2
    finally:
        gc.enable()


async def test_reloads_of_one_source_share_a_load_and_one_of_another_comes_after_it(narrow):
    """What was asked for last is what serves in the end."""
    await narrow.resident("a")
    one = await narrow.begin("a", "reload")
    same = await narrow.begin("a", "reload")
    other = asyncio.create_task(narrow.task("a", "reload", "elsewhere"))
    await narrow.do_all()
    await asyncio.gather(one, same, other)
    assert narrow.press.sources == ["source of a", "source of a", "elsewhere"]
    assert narrow.entry("a").source == "elsewhere"


@pytest.mark.parametrize("stage", [[], ["prepare a"], ["prepare a", "load a"]])
async def test_unloading_what_is_being_loaded_anew_unloads_both(narrow, stage):
    """The successor is given up, or closed if it has come that far; whoever waits for it is told."""
    await narrow.resident("a")
    old = narrow.cache.ready.lease("a")
    reload = await narrow.begin("a", "reload")
    await narrow.do(*stage)
    unload = await narrow.begin("a", "unload")
    assert not narrow.entry("a").registered
    old.release()
    await narrow.do_all()
    await unload
    assert narrow.press.in_memory == Footprint()
    if len(stage) < 2:
        assert failure(reload) is Kind.UNAVAILABLE


@pytest.mark.parametrize("stage", [[], ["prepare a"]])
@pytest.mark.parametrize("anew", [False, True])
async def test_a_load_that_the_end_of_the_server_cuts_short_says_so(narrow, stage, anew, caplog):
    """Nobody unloaded the model, and nobody is told to load it again."""
    if anew:
        await narrow.resident("a")
    loading = await narrow.begin("a", "reload")
    await narrow.do(*stage)
    closing = asyncio.create_task(narrow.cache.close())
    await narrow.turn()
    await narrow.do_all()
    await closing
    assert failure(loading) is Kind.UNAVAILABLE
    assert loading.exception().message == "the load of model 'a' was cut short: this server is shutting down"
    assert "unloaded while it was loading" not in caplog.text


@pytest.mark.parametrize("stage", [[], ["prepare a"]])
async def test_who_waits_for_a_load_is_told_when_it_is_cut_short(world, stage):
    """At once, though its thread goes on; what that brings is let go, and nothing is loaded any more."""
    waiting = await world.begin("a")
    by_name = await world.begin("a", "load")
    await world.do(*stage)
    world.cache.cut_short()
    await asyncio.wait([waiting, by_name])
    for task in (waiting, by_name):
        assert failure(task) is Kind.UNAVAILABLE
        assert task.exception().message == "the load of model 'a' was cut short: this server is shutting down"
    assert failure(await world.begin("b")) is Kind.UNAVAILABLE
    closing = asyncio.create_task(world.cache.close())
    await world.do_all()
    await closing
    assert world.press.in_memory == Footprint()


async def test_what_is_not_in_memory_is_loaded_from_the_new_source(world):
    """A reload of a model that nobody has loaded is a load."""
    cold = await world.begin("a", "reload")
    assert not world.entry("a").registered
    await world.do_all()
    await cold
    assert world.entry("a").registered


async def test_a_leased_model_is_no_victim(world):
    """A load waits while everybody is in use, and goes on the moment that the last lease of one ends."""
    await world.resident("a")
    entry = world.cache.ready.lease("a")
    world.cache.ready.lease("a")
    task = await world.begin("b")
    await world.do("prepare b")
    entry.release()
    await world.turn()
    assert (world.desk.pending, entry.leaving) == ([], False)
    entry.release()
    await world.turn()
    assert (world.desk.pending, entry.leaving) == (["close a"], True)
    await world.do_all()
    assert (await task).evicted == ("a",)
    world.release("b")


async def test_the_platform_chooses_its_victims_itself():
    """With `evicts=False` a full cache is out of memory at once, and after an unload the same model loads."""
    async with world_of(evicts=False) as world:
        await world.resident("a")
        task = await world.begin("b")
        await world.do_all()
        assert failure(task) is Kind.OUT_OF_MEMORY
        assert (world.entry("a").state, world.entry("a").stats.evictions) == (State.READY, {})
        unload = await world.begin("a", "unload")
        retry = await world.begin("b")
        await world.do("prepare b")
        assert not retry.done()  # room is on its way
        await world.do_all()
        await unload
        await retry
        world.release("b")


async def test_an_estimate_too_small_is_corrected_by_evicting(world):
    """A model that turned out larger than estimated makes room for the rest before it is used."""
    world.press.sizes = {"a": (mb(40), mb(40)), "grown": (mb(50), mb(80))}
    await world.resident("a")
    task = await world.begin("grown")
    await world.do("prepare grown", "load grown")
    assert world.desk.pending == ["close a"]
    assert world.cache.ready.lease("grown") is None
    await world.do_all()
    assert (await task).evicted == ("a",)
    assert world.cache.room.used() == mb(80)
    world.release("grown")


@pytest.mark.parametrize("evicts", [True, False])
async def test_a_model_that_turns_out_too_large_is_given_up(evicts):
    """Measured larger than the budget, or than a platform's free room, it is closed again and out of memory."""
    async with world_of(evicts=evicts) as world:
        world.press.sizes = {"a": (mb(40), mb(40)), "grown": (mb(50), mb(101 if evicts else 61))}
        await world.resident("a")
        task = await world.begin("grown")
        await world.do("prepare grown", "load grown")
        assert world.desk.pending == ["close grown"]
        assert world.cache.room.reserved == mb(50)  # its bytes are not free before it is closed
        await world.do_all()
        assert failure(task) is Kind.OUT_OF_MEMORY
        assert world.press.made[-1].started == 0
        assert world.cache.room.used() == mb(40)
        assert world.entry("a").state is State.READY
        again = await world.begin("grown")  # now it is known before anything is loaded
        await world.do_all()
        assert failure(again) is Kind.OUT_OF_MEMORY
        assert len(world.press.made) == 2


async def test_two_loads_that_underestimate_do_not_wait_for_each_other(world):
    """Each holds half of the memory and needs a little more: both begin again with what they were measured to take."""
    world.press.sizes = {name: (mb(50), mb(51)) for name in "ab"}
    tasks = [await world.begin(name) for name in "ab"]
    await world.do("prepare a", "prepare b", "load a", "load b")
    assert world.desk.pending == ["close a", "close b"]
    await world.do("close a", "close b")
    assert (world.desk.pending, world.cache.room.reserved) == (["load a"], mb(51))
    await world.do("load a")
    assert (await tasks[0]).evicted == ()
    world.release("a")
    await world.do_all()
    assert (await tasks[1]).evicted == ("a",)
    world.release("b")


async def test_a_load_that_waits_for_room_holds_up_no_other():
    """Loads that wait for models in use leave their turn to those that fit."""
    async with world_of(turns=1) as world:
        world.press.sizes = {"big": (mb(60), mb(60)), "small": (mb(10), mb(10)), "held": (mb(80), mb(80))}
        await world.resident("held")
        held = world.cache.ready.lease("held")
        waiting = await world.begin("big")
        await world.do("prepare big")
        assert (world.desk.pending, waiting.done()) == ([], False)
        small = await world.begin("small")
        await world.do_all()
        assert small.done()
        world.release("small")
        held.release()
        await world.do_all()
        await waiting
        world.release("big")


async def test_a_model_that_is_yet_to_be_equipped_holds_up_no_other():
    """That may take minutes, and costs no memory: others that are equipped are fetched and loaded meanwhile."""
    async with world_of(turns=1) as world:
        world.press.bare = {"slow", "next"}
        slow, waiting = await world.begin("slow"), await world.begin("next")
        await world.do("prepare slow", "prepare next")
        assert world.desk.pending == ["equip slow"]  # one at a time
        assert world.cache.room.reserved == Footprint()
        quick = await world.begin("quick")
        await world.do("prepare quick", "load quick")
        await quick
        world.release("quick")
        await world.do("equip slow")
        assert world.desk.pending == ["equip next", "close quick"]
        await world.do_all()
        for task in (slow, waiting):
            world.release("slow" if task is slow else "next")
            await world.do_all()
            await task


async def test_a_file_on_trial_holds_up_no_other_load():
    """Within its reservation, and though it would be loaded alone: others are loaded meanwhile."""
    async with world_of(turns=1) as world:
        world.press.delicate = world.press.alone = {"slow"}
        world.press.sizes = {"quick": (mb(20), mb(20))}
        slow = await world.begin("slow", "load")
        await world.do("prepare slow")
        assert world.desk.pending == ["try_files slow"]
        assert world.cache.room.reserved == mb(60)
        quick = await world.begin("quick", "load")
        await world.do("prepare quick", "load quick")
        await quick
        await world.do("try_files slow", "load slow")
        await slow


async def test_a_file_that_does_not_stand_its_trial_is_not_loaded(world):
    """The error is what whoever waits gets, and what was reserved is free again."""
    world.press.delicate = {"bad"}
    world.press.failures = {("try_files", "bad"): [MmeError(Kind.INVALID_MODEL, "died")]}
    loading = await world.begin("bad", "load")
    await world.do_all()
    assert failure(loading) is Kind.INVALID_MODEL
    assert world.press.made == []
    assert world.cache.room.used() == Footprint()


async def test_an_estimate_too_large_gives_back_the_rest(world):
    """What was reserved and not needed is free once the model is there."""
    world.press.sizes = {"a": (mb(90), mb(10)), "b": (mb(90), mb(90))}
    await world.resident("a", "b")
    assert world.cache.room.used() == mb(100)


async def test_two_models_that_fit_one_at_a_time_take_turns(world):
    """Hammered by ten clients each, both are answered every time; neither is evicted before its waiters used it."""

    async def client(name):
        for _ in range(10):
            await world.cache.acquire(world.entry(name))
            assert world.entry(name).resident is not None
            world.audit()
            await asyncio.sleep(0)
            assert world.entry(name).resident.closed == 0
            world.release(name)

    async def threads():
        while True:
            if world.desk.work:
                world.desk.do()
            await asyncio.sleep(0)

    working = asyncio.create_task(threads())
    await asyncio.gather(*(client(name) for name in "ab" for _ in range(10)))
    working.cancel()
    assert world.press.in_memory.fits(mb(100))
    assert len(world.press.made) >= 2


# -- leaving -----------------------------------------------------------------------------------------------------------


async def test_an_unload_waits_for_requests_and_hands_out_no_more_leases(world):
    """A model being unloaded stays until the last lease ends; whoever asks meanwhile gets it loaded anew."""
    await world.resident("a")
    entry = world.cache.ready.lease("a")
    unload = await world.begin("a", "unload")
    assert (entry.entry.state, world.desk.pending) == (State.UNLOADING, [])
    assert world.cache.ready.lease("a") is None
    newcomer = await world.begin("a")
    assert not newcomer.done()
    entry.release()
    await world.turn()
    assert world.desk.pending == ["close a"]
    await world.do_all()
    await unload
    await newcomer
    assert [(held.started, held.closed) for held in world.press.made] == [(1, 1), (1, 0)]
    world.release("a")


async def test_an_unload_that_lost_patience_refuses_those_who_queue():
    """After `drain_patience` the queued are told, and the unload still waits for those who execute."""
    async with world_of(drain_patience=0.005) as world:
        await world.resident("a")
        entry = world.cache.ready.lease("a")
        unload = await world.begin("a", "unload")
        await world.press.made[0].told.wait()
        assert not unload.done()
        assert world.desk.pending == []
        entry.release()
        await world.do_all()
        await unload
        assert world.press.made[0].refused == 1


async def test_unloading_twice_closes_once(world):
    """Two unloads at the same time, or one after the other, both return when the memory is back."""
    await world.resident("a")
    first, second = await world.begin("a", "unload"), await world.begin("a", "unload")
    assert (first.done(), second.done()) == (False, False)
    await world.do_all()
    await first
    await second
    await world.cache.unload(world.entry("a"))
    assert world.press.made[0].closed == 1


@pytest.mark.parametrize("stage", ["not begun", "prepare", "equip", "load"])
async def test_unloading_what_is_being_loaded_tells_those_who_wait(world, stage):
    """A load under way is given up at its next step; its waiters are told, its memory is given back."""
    waiting = [asyncio.create_task(world.cache.acquire(world.entry("a"))) for _ in range(2)]
    if stage == "not begun":
        await asyncio.sleep(0)
    else:
        await world.turn()
    if stage == "equip":
        world.press.bare = {"a"}
    if stage in {"equip", "load"}:
        await world.do("prepare a")
    unload = await world.begin("a", "unload")
    await world.do_all()
    await unload
    assert [failure(task) for task in waiting] == [Kind.UNAVAILABLE] * 2
    assert (world.cache.room.used(), world.press.in_memory) == (Footprint(), Footprint())
    assert sum(held.started for held in world.press.made) == 0
    assert len(world.press.made) == (1 if stage == "load" else 0)


async def test_unloading_what_waits_to_be_equipped_ends_the_wait():
    """However long the one before it takes; the turn goes to the next in the line."""
    async with world_of(turns=1) as world:
        world.press.bare = {"slow", "a", "b"}
        slow, waiting, after = [await world.begin(name) for name in ("slow", "a", "b")]
        await world.do("prepare slow", "prepare a", "prepare b")
        unload = await world.begin("a", "unload")
        assert unload.done()
        assert failure(waiting) is Kind.UNAVAILABLE
        assert world.desk.pending == ["equip slow"]
        await world.do("equip slow")
        assert world.desk.pending == ["load slow", "equip b"]
        await world.do("load slow")
        await slow
        world.release("slow")
        await world.do_all()
        await after
        world.release("b")


async def test_unloading_what_waits_for_room_ends_the_wait(world):
    """A load that waits for leased models need not wait any longer once nobody wants it."""
    await world.resident("a")
    lease = world.cache.ready.lease("a")
    waiting = await world.begin("b")
    await world.do("prepare b")
    unload = await world.begin("b", "unload")
    await unload
    assert failure(waiting) is Kind.UNAVAILABLE
    lease.release()
    await world.turn()
    assert world.entry("a").state is State.READY


async def test_asking_for_what_is_being_given_up_is_answered(world):
    """A request that comes between the unload of a load and its end is told to try again, and then may."""
    first = await world.begin("a")
    await world.do("prepare a")
    unload = await world.begin("a", "unload")
    late = await world.begin("a")
    await world.do_all()
    await unload
    assert [failure(task) for task in (first, late)] == [Kind.UNAVAILABLE] * 2
    again = await world.begin("a")
    await world.do_all()
    await again
    world.release("a")


async def test_unloading_what_waits_to_be_loaded_anew(world):
    """Unload, request, unload again before the first is through: all return, nothing stays."""
    await world.resident("a")
    first = await world.begin("a", "unload")
    waiting = await world.begin("a")
    second = await world.begin("a", "unload")
    await world.do_all()
    await asyncio.gather(first, second)
    assert failure(waiting) is Kind.UNAVAILABLE
    assert world.press.in_memory == Footprint()


async def test_a_resident_that_fails_to_close_is_gone_all_the_same(world, caplog):
    """An error while closing is logged; the books are closed, and whoever waits for the room or the name is served."""
    world.press.failures["close", "a"] = [RuntimeError("driver stuck")] * 2
    await world.resident("a")
    other = await world.begin("b")
    await world.do("prepare b")  # evicts a
    again = await world.begin("a")  # waits for a to be gone
    await world.do("close a", "load b")
    await other
    world.release("b")
    await world.do_all()
    await again
    world.release("a")
    unload = await world.begin("a", "unload")
    await world.do_all()
    await unload
    assert world.entry("a").state is State.UNLOADED
    assert "driver stuck" in caplog.text


async def test_a_model_given_up_that_fails_to_close_is_still_out_of_memory(world, caplog):
    """The error of a failed close does not replace the reason for which the model was given up."""
    world.press.sizes["grown"] = (mb(50), mb(101))
    world.press.failures["close", "grown"] = [RuntimeError("driver stuck")]
    task = await world.begin("grown")
    await world.do_all()
    assert failure(task) is Kind.OUT_OF_MEMORY
    assert world.cache.room.used() == Footprint()
    assert "driver stuck" in caplog.text


# -- clients that leave ------------------------------------------------------------------------------------------------


async def test_a_client_that_leaves_while_it_waits_holds_no_lease(world):
    """Cancelled waiters get no lease; those who stay do; the load goes on though all leave."""
    tasks = [await world.begin("a") for _ in range(3)]
    tasks[0].cancel()
    tasks[1].cancel()
    await world.do("prepare a")
    tasks[2].cancel()
    stays = await world.begin("a")
    await world.do_all()
    await stays
    entry = world.entry("a")
    assert [task.cancelled() for task in tasks] == [True] * 3
    assert (entry.leases, entry.state) == (1, State.READY)
    world.release("a")


async def test_a_client_that_leaves_as_its_lease_comes_gives_it_back(world):
    """Cancelled after the load has resolved it and before it runs again, a waiter releases what it was given."""
    task = await world.begin("a")
    await world.do("prepare a")
    world.desk.do("load a")
    entry = world.entry("a")
    while not entry.leases:  # noqa: ASYNC110 - the very turn of the loop is the point
        await asyncio.sleep(0)
    assert not task.done()
    task.cancel()
    await world.turn()
    assert task.cancelled()
    assert entry.leases == 0


async def test_a_client_may_lose_patience_without_harm(world):
    """A time limit around `acquire` ends the wait, not the load."""
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.001):
            await world.cache.acquire(world.entry("a"))
    await world.do_all()
    entry = world.entry("a")
    assert (entry.leases, entry.state) == (0, State.READY)


@pytest.mark.parametrize("stage", ["prepare", "equip", "room", "load", "correction"])
async def test_a_cancelled_load_leaves_nothing_and_tells_those_who_wait(world, stage):
    """When the load's own task is cancelled, as a loop that ends does, waiters get an error and bytes come back."""
    world.press.sizes["b"] = (mb(30), mb(70)) if stage == "correction" else (mb(60), mb(60))
    await world.resident("a")
    lease = world.cache.ready.lease("a")
    waiting = await world.begin("b")
    world.press.bare = {"b"} if stage == "equip" else set()
    steps = {
        "prepare": [],
        "equip": ["prepare b"],
        "room": ["prepare b"],
        "correction": ["prepare b", "load b"],
        "load": ["prepare b"],
    }
    await world.do(*steps[stage])
    if stage == "load":
        lease.release()
        await world.turn()
        await world.do("close a")
        assert world.desk.pending == ["load b"]
    world.cut("b")
    await world.turn()
    assert failure(waiting) is Kind.UNAVAILABLE
    assert world.entry("b").state is State.FAILED
    if stage == "load":  # a thread can't be interrupted: what it may have taken stays reserved until it comes back
        assert world.cache.room.reserved == mb(60)
    await world.do_all()
    assert world.cache.room.reserved == Footprint()
    if stage != "load":
        lease.release()
    assert world.press.in_memory == world.cache.room.used()
    again = await world.begin("b")
    await world.do_all()
    await again
    world.release("b")


# -- what hangs ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("stage", "deaf"), [("prepare", False), ("prepare", True), ("load", False)])
async def test_a_load_whose_time_is_over_is_given_up(stage, deaf):
    """Whoever waits is told; others load; what it may hold stays taken, and nobody begins it anew, until it is back."""
    patience = 0.5 if stage == "load" else 0.01  # of which the stage before takes a part
    async with world_of(load_patience=patience, turns=1) as world:
        world.press.deaf = deaf
        waiting = [await world.begin("slow") for _ in range(2)]
        if stage == "load":
            await world.do("prepare slow")
        for task in waiting:
            with contextlib.suppress(MmeError):
                await task
        assert [failure(task) for task in waiting] == [Kind.UNAVAILABLE] * 2
        assert "did not load within" in str(waiting[0].exception())
        assert world.desk.pending == [f"{stage} slow"]
        assert repr(world.press.scales.turns) == "<FairSemaphore: 1 free, 0 waiting>"
        give_loads(world.cache, 3600.0)
        world.press.sizes["other"] = (mb(30), mb(30))
        other = await world.begin("other")
        await world.do("prepare other", "load other")
        await other
        world.release("other")
        if stage == "load":
            assert world.cache.room.used() == mb(90)
            again = await world.begin("slow")
            assert failure(again) is Kind.UNAVAILABLE
            assert "has not ended" in str(again.exception())
        await world.do(f"{stage} slow")
        assert world.desk.pending == (["close slow"] if stage == "load" else [])
        await world.do_all()
        assert world.cache.room.used() == mb(30)
        released = [artifact.released for artifact in world.press.prepared if artifact.name == "slow"]
        assert released == ([1] if deaf or stage == "load" else [])
        again = await world.begin("slow")
        await world.do_all()
        await again
        world.release("slow")


async def test_a_load_is_told_that_nobody_wants_it_any_more(world):
    """What runs on a load thread may ask; it is told when the model was unloaded, and when its time was over."""
    unwanted = []
    prepare, load = world.press.prepare, world.press.load

    def asking(step):
        def run(*args, **more):
            unwanted.append((step.__name__, args[-1].cancelled))
            return step(*args, **more)

        run.__name__, run.__self__ = step.__name__, world.press
        return run

    world.press.prepare, world.press.load = asking(prepare), asking(load)
    for _ in range(2):
        task = await world.begin("a")
        await world.do("prepare a")
        if len(unwanted) > 1:
            world.entry("a").load.cancel("not wanted")
        await world.do("load a")
        await world.do_all()
        await asyncio.wait([task])
        if not task.exception():
            world.release("a")
            unload = await world.begin("a", "unload")
            await world.do_all()
            await unload
    assert unwanted == [("prepare", False), ("load", False), ("prepare", False), ("load", True)]


@pytest.mark.parametrize("again", ["reload", "acquire"])
async def test_a_load_after_an_orphan_is_its_own(world, again):
    """A successor that was given up has come back: what fails then, anew or after an eviction, lets its files go."""
    world.press.sizes = {"a": (mb(30), mb(30)), "b": (mb(90), mb(90))}
    await world.resident("a")
    give_loads(world.cache, 0.01)
    task = await world.begin("a", "reload")
    await world.do("prepare a")
    with contextlib.suppress(MmeError):
        await task
    assert failure(task) is Kind.UNAVAILABLE
    give_loads(world.cache, 3600.0)
    await world.do_all()
    assert world.entry("a").orphan is None
    if again == "acquire":
        await world.resident("b")
    world.press.failures["load", "a"] = [OSError("no such file")]
    failing = await world.begin("a", again)
    await world.do_all()
    assert failure(failing) is Kind.INTERNAL
    assert world.press.prepared[-1].released == 1
    after = await world.begin("a", "reload")
    await world.do_all()
    await after


async def test_an_orphan_that_fails_is_the_end_of_it(caplog):
    """A load that was given up and then fails leaves nothing; its error is in the log."""
    async with world_of(load_patience=0.5) as world:  # of which the stage before takes a part
        world.press.failures["load", "slow"] = [ValueError("after an hour")]
        task = await world.begin("slow")
        await world.do("prepare slow")
        with contextlib.suppress(MmeError):
            await task
        await world.do("load slow")
        assert world.cache.room.used() == Footprint()
        assert world.entry("slow").orphan is None
    assert "after an hour" in caplog.text


# -- names -------------------------------------------------------------------------------------------------------------


async def test_what_is_in_memory_or_on_its_way_is_not_forgotten(world):
    """`forget` drops an entry only when nothing of it is anywhere: a load just asked for counts."""
    entry = world.entry("a")
    asked = asyncio.create_task(world.cache.acquire(entry))
    await asyncio.sleep(0)
    world.cache.forget(entry)  # its task exists, and has not run yet
    assert world.cache.entries["a"] is entry
    await world.do_all()
    await asked
    world.cache.forget(entry)
    assert world.cache.entries["a"] is entry
    world.release("a")
    unload = await world.begin("a", "unload")
    world.cache.forget(entry)
    assert world.cache.entries["a"] is entry
    await world.do_all()
    await unload
    world.cache.forget(entry)
    assert world.cache.entries == {}
    replacement = world.entry("a")
    world.cache.forget(entry)
    assert world.cache.entries["a"] is replacement


# -- the end -----------------------------------------------------------------------------------------------------------


async def test_closing_ends_everything_that_is_in_flight(world):
    """Close with a model leased, one loading, one waiting for room, one leaving: all end, and nothing comes after."""
    world.press.sizes = {name: (mb(30), mb(30)) for name in ("leased", "leaving", "loading")}
    await world.resident("leased", "leaving")
    lease = world.cache.ready.lease("leased")
    leaving = await world.begin("leaving", "unload")
    loading = await world.begin("loading")
    await world.do("prepare loading")
    starved = await world.begin("starved")
    await world.do("prepare starved")
    closing = asyncio.create_task(world.cache.close())
    await world.turn()
    late = [await world.begin("loading"), await world.begin("leased"), await world.begin("new", "load")]
    await world.do_all()
    assert not closing.done()
    lease.release()
    await world.do_all()
    await closing
    await leaving
    assert [failure(task) for task in (loading, starved, *late)] == [Kind.UNAVAILABLE] * 5
    assert failure(await world.begin("later")) is Kind.UNAVAILABLE
    assert world.desk.work == []


async def test_where_the_process_ends_idle_models_of_memory_alone_stay(world):
    """Those with requests are waited for, and those that hold something else are closed."""
    world.press.sizes = {name: (mb(20), mb(20)) for name in ("idle", "leased", "apart")}
    await world.resident("idle", "leased", "apart")
    residents = {name: world.entry(name).resident for name in ("idle", "leased", "apart")}
    residents["idle"].memory_only = residents["leased"].memory_only = True
    lease = world.cache.ready.lease("leased")
    closing = asyncio.create_task(world.cache.close(ends=True))
    await world.do_all()
    assert not closing.done()
    lease.release()
    await world.do_all()
    await closing
    assert {name: resident.closed for name, resident in residents.items()} == {"idle": 0, "leased": 1, "apart": 1}
    assert failure(await world.begin("later")) is Kind.UNAVAILABLE


async def test_repr_is_fit_for_logs(world):
    """A cache and its entries say what is where."""
    await world.resident("a")
    world.cache.ready.lease("a")
    assert repr(world.cache) == ("<ModelCache 1 ready of 1 known, <Room 60.0 MB of 100.0 MB taken, 0 claims waiting>>")
    assert repr(world.entry("a")) == "<Entry a: ready, 60.0 MB, 1 leases>"
    assert len(world.cache.ready.models) == 1
    world.release("a")


# -- everything at once ------------------------------------------------------------------------------------------------

NAMES = "abcd"
ACTIONS = st.one_of(
    st.tuples(
        st.sampled_from(["acquire", "acquire", "lease", "load", "reload", "anew", "unload", "cut"]),
        st.sampled_from(NAMES),
    ),
    st.tuples(st.sampled_from(["release", "release", "leave", "work", "work", "work", "turn"]), st.integers(0, 30)),
)
SIZES = st.sampled_from([(mb(20), mb(20)), (mb(45), mb(45)), (mb(60), mb(60)), (mb(100), mb(100)), (mb(101), mb(101))])
WRONG_SIZES = st.sampled_from([(mb(20), mb(70)), (mb(70), mb(20)), (mb(30), mb(101)), (mb(50), mb(51))])
STEPS = st.tuples(st.sampled_from(["prepare", "equip", "load", "start", "close"]), st.sampled_from(NAMES))


@settings(max_examples=120, deadline=None)
@given(
    actions=st.lists(ACTIONS, max_size=60),
    sizes=st.tuples(*[SIZES] * 4),
    wrong_sizes=st.dictionaries(st.sampled_from(NAMES), WRONG_SIZES, max_size=2),
    failures=st.lists(STEPS, max_size=4),
    evicts=st.booleans(),
    policy=st.sampled_from(list(Policy)),
    pins=st.sampled_from(["", "", "a", "ab"]),
    min_residency=st.sampled_from([0.0, 0.0, 0.002]),
    bare=st.sampled_from(["", "a", "bcd"]),
)
async def test_any_sequence_keeps_the_books(  # noqa: PLR0915 - one life
    actions, sizes, wrong_sizes, failures, evicts, policy, pins, min_residency, bare
):
    """Loads, unloads, leases, clients that leave, failures, loads given up, threads that finish in any order.

    At every step the books agree with what is in memory; no leased model is closed, and no pinned one evicted; with
    honest estimates the budget is never exceeded, in the books or really. In the end everybody was answered and
    nothing is left.
    """
    async with world_of(
        evicts=evicts, rules=Rules(policy, tuple(pins), min_residency), memory_patience=3600.0
    ) as world:
        world.press.sizes = {**dict(zip(NAMES, sizes, strict=True)), **wrong_sizes}
        world.press.bare = set(bare)
        for number, (step, name) in enumerate(failures):
            error = MmeError(Kind.INVALID_MODEL, "bad") if number % 2 else ValueError("worse")
            world.press.failures.setdefault((step, name), []).append(error)
        clients, held, ids, idle = {}, [], count(), count()

        async def client(number, name):
            lease, _ = await world.cache.acquire(world.entry(name))
            assert not lease.target.closed
            held.append(lease)

        def check():
            world.audit()
            assert not any(world.cache.entries[pin].stats.evictions for pin in pins if pin in world.cache.entries)
            if not wrong_sizes:
                assert world.cache.room.used().fits(mb(100))
                assert world.press.in_memory.fits(mb(100))

        def loading():
            return any(entry.load for entry in world.cache.entries.values())

        for action, argument in actions:
            if action == "acquire":
                number = next(ids)
                clients[number] = asyncio.create_task(client(number, argument))
            elif action in {"load", "unload", "reload"}:
                clients[next(ids)] = asyncio.create_task(world.task(argument, action))
            elif action == "anew":
                number = next(ids)
                clients[number] = asyncio.create_task(world.task(argument, "reload", f"source {number}"))
            elif action == "cut" and argument in world.cache.entries:
                world.cut(argument)
            elif action == "lease":
                entry = world.cache.ready.lease(argument)
                held += [entry] if entry is not None else []
            elif action == "release" and held:
                held.pop(argument % len(held)).release()
            elif action == "leave" and clients:
                clients[sorted(clients)[argument % len(clients)]].cancel()
            elif action == "work" and world.desk.work:
                world.desk.do(argument % len(world.desk.work))
            elif action == "turn":
                for _ in range(argument % 4):
                    await asyncio.sleep(0)
            check()
        while True:  # a load goes on when its clients have left: all is over only when the loop has nothing to add
            await world.turn()
            check()
            if world.desk.work:
                world.desk.do(0)
            elif held:
                held.pop().release()
            elif not loading() and all(task.done() for task in clients.values()):
                break
            else:
                assert next(idle) < 500, "loads wait for each other"
                await asyncio.sleep(0.001)
        for task in clients.values():
            if not task.cancelled():
                assert isinstance(task.exception(), MmeError | type(None))
        left = [entry for entry in world.cache.entries.values() if entry.leases or entry.load or entry.retiring]
        assert left == []
        assert not any(each.leaving for each in world.cache.residents.own)


async def test_a_reload_goes_ahead_of_a_claim_that_waits_for_the_model_it_replaces(world):
    """All memory is set aside for `a`, whose old model made room, while `c` stays until its own reload has a little."""
    world.press.sizes = {name: (mb(size), mb(size)) for name, size in (("a", 100), ("b", 45), ("c", 20))}
    leased = asyncio.create_task(world.cache.acquire(world.entry("a")))
    reloads = [
        asyncio.create_task(world.task(name, "reload", source))
        for name, source in (("a", "another"), ("c", None), ("c", "another"), ("b", None))
    ]
    await world.do_all()
    (await leased)[0].release()
    await world.do_all()
    assert [task.done() for task in reloads] == [True] * 4
    for task in reloads:
        await task


async def test_a_load_that_is_cancelled_before_it_begins_is_answered(world):
    """Whoever waits for it is told, and the next load is another one."""
    asked = [
        asyncio.create_task(world.task("a", "load")),
        asyncio.create_task(world.cache.acquire(world.entry("a"))),
    ]
    await asyncio.sleep(0)
    world.cut("a")
    await world.do_all()
    for task in asked:
        with pytest.raises((MmeError, asyncio.CancelledError)):
            await task
    assert world.entry("a").load is None
    await world.resident("a")


# -- files that several models map -------------------------------------------------------------------------------------


def mapping(own, **files):
    """So many megabytes of its own, and files of so many."""
    return Footprint(own * 10**6, shared={name: size * 10**6 for name, size in files.items()})


async def test_what_others_map_already_is_neither_claimed_nor_charged(world):
    """Three models of 60 MB, 50 of which they share, are in memory together within 100; who leaves leaves the charge."""
    for name in "abc":
        world.press.sizes[name] = (mapping(10, weights=50), mapping(10, weights=50))
    await world.resident("a", "b", "c")
    assert [world.entry(name).footprint for name in "abc"] == [mb(60), mb(10), mb(10)]
    assert world.cache.room.used() == mb(80)

    unload = await world.begin("a", "unload")
    await world.do_all()
    await unload
    assert [world.entry(name).footprint for name in "bc"] == [mb(60), mb(10)]


@pytest.mark.parametrize("order", ["ab", "ba"])
@pytest.mark.parametrize("fails", [False, True])
async def test_what_two_will_map_that_load_at_once_is_promised_once(fails, order):
    """Where nobody is evicted the second would be out of memory for want of room that it does not need.

    If the first does not load after all, the second needs the room itself. If it is there before the first, it counts
    with what they share, and nothing is promised for that any more.
    """
    async with world_of(evicts=False) as world:
        for name in "ab":
            world.press.sizes[name] = (mapping(10, weights=50), mapping(10, weights=50))
        if fails:
            world.press.failures["load", "a"] = [MmeError(Kind.INVALID_MODEL, "no")]
        loads = [await world.begin(name, "load") for name in "ab"]
        await world.do("prepare a", "prepare b")
        assert world.cache.room.reserved == mb(70)

        await world.do(f"load {order[0]}")
        assert world.cache.room.used() == (mb(10) if fails and order == "ab" else mb(70))
        await world.do(f"load {order[1]}")
        assert isinstance((await asyncio.gather(*loads, return_exceptions=True))[0], MmeError) == fails
        assert world.cache.room.used() == (mb(60) if fails else mb(70))
        assert world.entry("b").footprint == (mb(60) if fails or order == "ba" else mb(10))


@pytest.mark.parametrize("used", ["a", "b"])
async def test_nobody_leaves_in_vain_whose_bytes_an_heir_takes_over(world, used):
    """Who is charged for what one in use maps as well frees no more than its own: another one leaves, or nobody."""
    for name in "ab":
        world.press.sizes[name] = (mapping(10, weights=50), mapping(10, weights=50))
    world.press.sizes |= {"c": (mb(25), mb(25)), "new": (mb(25), mb(25)), "large": (mb(45), mb(45))}
    await world.resident("a", "b", "c")
    await (await world.begin(used))

    await world.resident("new")
    assert world.entry("c").state is State.EVICTED
    large = await world.begin("large", "load")
    await world.do_all()
    assert {world.entry(name).state for name in ("a", "b", "new")} == {State.READY}
    world.release(used)
    await world.do_all()
    await large


async def test_those_who_share_leave_together_when_their_files_are_in_the_way(world):
    """What one of them gives back is charged to the next, so that the cache goes on until there is room."""
    for name in "abc":
        world.press.sizes[name] = (mapping(10, weights=50), mapping(10, weights=50))
    await world.resident("a", "b", "c")

    await world.resident("big")

    assert world.cache.room.used() == mb(60)
    assert [world.entry(name).state for name in "abc"] == [State.EVICTED] * 3


async def test_files_that_went_meanwhile_are_claimed_after_all(world):
    """A model whose shared file leaves memory while it loads takes more than it claimed, and others leave for that."""
    for name in "ab":
        world.press.sizes[name] = (mapping(10, weights=50), mapping(10, weights=50))
    world.press.sizes["c"] = (mb(30), mb(30))
    await world.resident("a", "c")
    load = await world.begin("b", "load")
    await world.do("prepare b")
    assert world.cache.room.reserved == mb(10)

    unload = await world.begin("a", "unload")
    await world.do("close a", "load b")
    await world.do_all()
    await asyncio.gather(load, unload)

    assert world.entry("b").footprint == mb(60)
    assert world.cache.room.used() == mb(90)


@pytest.mark.parametrize(
    ("takes", "more", "expected"),
    [((30, {"other": 5}), 20, (35, 60)), ((15, {"weights": 50}), 5, (65, 10))],
    ids=["heirs are charged for what it gives up", "who keeps its files stays charged for them"],
)
async def test_a_model_that_takes_another_amount_is_counted_anew(world, takes, more, expected):
    """A resident that gives its files up, or takes more for itself, is charged for what it has now."""
    for name in "ab":
        world.press.sizes[name] = (mapping(10, weights=50), mapping(10, weights=50))
    await world.resident("a", "b")
    held = world.entry("a").resident

    world.press.in_memory += mb(more)
    held.footprint = mapping(takes[0], **takes[1])
    world.cache.remeasured(world.entry("a"), held.footprint)

    assert [world.entry(name).footprint for name in "ab"] == [mb(size) for size in expected]
    assert world.cache.room.used() == mb(sum(expected))
    world.audit()
