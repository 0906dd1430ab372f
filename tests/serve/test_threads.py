"""Pools of threads that grow with the work there is at the moment."""

import asyncio
import gc
import threading
import weakref
from queue import SimpleQueue

import pytest

from model_handlers.errors import Kind, MmeError
from serve.threads import ThreadPool, _Starter, on_daemon
from tests.waiting import PATIENCE, eventually


def per_task(name, *args, **options):
    """A pool that has a thread for each piece of work."""
    return ThreadPool(name, *args, idle_seconds=0, **options)


def refused(_thread):
    """In the place of `Thread.start` on a system that is full."""
    raise RuntimeError("can't start new thread")


def name():
    """That of the thread it is called on."""
    return threading.current_thread().name


def named(prefix):
    """The threads of a pool."""
    return [thread for thread in threading.enumerate() if thread.name.startswith(prefix)]


@pytest.fixture
def pool():
    """A pool that is shut down in the end."""
    pool = ThreadPool("pool")
    yield pool
    pool.shutdown()


# -- growing, and going ------------------------------------------------------------------------------------------------


def test_work_one_after_another_has_one_thread(pool):
    """However much there is of it."""
    done = SimpleQueue()
    for _ in range(100):
        pool.run(lambda: done.put(name()))
        assert done.get(timeout=PATIENCE) == "pool_0"
        eventually(lambda: not pool.works(), "the thread to be idle")
    assert [pool.submit(name).result(PATIENCE) for _ in range(3)] == ["pool_0"] * 3


def test_there_are_as_many_threads_as_there_is_work(pool):
    """Each piece begins at once; the next one goes to the thread that became idle last."""
    gates = [threading.Event() for _ in range(3)]
    began, ended = SimpleQueue(), []

    def work(gate):
        began.put(name())
        gate.wait(PATIENCE)
        return name()

    futures = [pool.submit(work, gate) for gate in gates]
    assert {began.get(timeout=PATIENCE) for _ in gates} == {"pool_0", "pool_1", "pool_2"}
    for number in (1, 0, 2):
        gates[number].set()
        ended.append(futures[number].result(PATIENCE))
        eventually(lambda: f"{len(ended)} idle" in repr(pool), "the thread to be idle")
    assert [pool.submit(name).result(PATIENCE)] == ended[-1:]


def test_a_thread_without_work_ends():
    """After its time, and work that comes later has another; the one that is kept stays."""
    with ThreadPool("going", idle_seconds=0.01) as going, ThreadPool("kept", idle_seconds=0.01, keeps_one=True) as kept:
        for pool in (going, kept):
            gate = threading.Barrier(2)
            for each in [pool.submit(gate.wait, PATIENCE) for _ in range(2)]:
                each.result(PATIENCE)
        eventually(lambda: not named("going"), "idle threads to end")
        eventually(lambda: len(named("kept")) == 1, "all idle threads but one to end")
        assert going.submit(name).result(PATIENCE) == "going_2"
        assert kept.submit(name).result(PATIENCE) in {"kept_0", "kept_1"}
    assert named("kept") == []


def test_what_comes_while_threads_go_is_done():
    """None of it is lost between a thread that looks for work and one that is just given some."""
    with ThreadPool("brief", idle_seconds=0.0001, most=2) as brief:
        for number in range(2000):
            assert brief.submit(lambda number=number: number).result(PATIENCE) == number


def test_no_more_threads_than_there_may_be():
    """The rest of the work waits for them, in its order."""
    begun = []
    with ThreadPool("few", most=1) as few:
        for future in [few.submit(begun.append, number) for number in range(50)]:
            future.result(PATIENCE)
        assert begun == list(range(50))
        assert len(named("few")) == 1


def test_a_thread_survives_what_its_work_raises(pool, caplog):
    """It is logged, and the next piece of work has the same thread."""

    def fail():
        raise ValueError("no")

    pool.run(fail)
    eventually(lambda: "1 idle" in repr(pool), "the thread to be idle")
    assert pool.submit(name).result(PATIENCE) == "pool_0"
    assert "work on a thread of 'pool' failed" in caplog.text


# -- a thread for each -------------------------------------------------------------------------------------------------


def test_work_that_hangs_is_in_nobodys_way():
    """However many hang, the next one runs; each on a thread that was prepared, and that ends with it."""
    prepared = []
    threads = per_task("load", lambda: prepared.append(name()))
    go = threading.Event()
    stuck = [threads.submit(go.wait, 60) for _ in range(50)]

    assert threads.submit(lambda a, b: (a + b, name()), 1, b=2).result() == (3, "load_50")
    assert not any(future.done() for future in stuck)
    go.set()
    assert [future.result() for future in stuck] == [True] * 50
    threads.shutdown()
    assert sorted(prepared) == sorted(f"load_{number}" for number in range(51))
    assert not threads.works()


def test_nobody_waits_at_the_end_for_who_never_answers():
    """The loop ends though a thread still asks; a result and an error come as they are."""
    go, came = threading.Event(), threading.Event()

    def ask():
        came.set()
        go.wait(PATIENCE)

    def refuse():
        raise ValueError("no")

    async def main():
        assert await on_daemon("quick", lambda: threading.current_thread().daemon)
        with pytest.raises(ValueError, match="no"):
            await on_daemon("quick", refuse)
        asking = asyncio.get_running_loop().create_task(on_daemon("slow", ask))
        await asyncio.sleep(0)
        assert await on_daemon("quick", lambda: came.wait(PATIENCE))
        asking.cancel()

    asyncio.run(main())
    (slow,) = named("slow")
    go.set()
    slow.join(PATIENCE)


def test_what_is_raised_is_the_futures():
    """An exception of the work, whatever it is, is its result."""
    threads = per_task("load")
    for error in (ValueError("no"), KeyboardInterrupt()):

        def fail(error=error):
            raise error

        assert threads.submit(fail).exception() is error
    threads.shutdown()


def test_what_failed_is_gone_with_its_future():
    """Its arguments, which may be large, do not wait for the collector of garbage."""

    class Large:
        pass

    def fail(_large):
        raise ValueError("no")

    threads, large = per_task("load"), Large()
    seen = weakref.ref(large)
    gc.disable()
    try:
        assert type(threads.submit(fail, large).exception()) is ValueError
        threads.shutdown()
        del large
        eventually(lambda: seen() is None, "the thread to let go of it, too")
    finally:
        gc.enable()


def test_a_shutdown_waits_for_what_runs_and_takes_nothing_on():
    """With everything done it returns; unless it need not wait."""
    threads = per_task("load")
    go = threading.Event()
    running = threads.submit(go.wait, 60)
    threads.shutdown(wait=False)
    with pytest.raises(RuntimeError, match="after the shutdown"):
        threads.submit(int)
    assert not running.done()
    threading.Timer(0.01, go.set).start()
    threads.shutdown()
    assert running.done()


def test_a_shutdown_may_drop_what_was_not_begun():
    """Whoever waits for it is told at once."""
    few, go = ThreadPool("few", most=1), threading.Event()
    running, waiting = few.submit(go.wait, PATIENCE), few.submit(int)
    eventually(running.running, "the first to begin")
    few.shutdown(wait=False, cancel_futures=True)
    assert waiting.cancelled()
    go.set()
    assert running.result(PATIENCE)
    few.shutdown()


def test_a_shutdown_waits_for_threads_that_have_yet_to_start():
    """What was taken on is done, though its thread was still on its way."""
    for _ in range(50):
        executor, done = per_task("t"), []
        for number in range(4):
            executor.submit(done.append, number)
        executor.shutdown()
        assert sorted(done) == [0, 1, 2, 3]


def test_it_tells_whether_anything_is_under_way() -> None:
    """Until that has ended, however it ended."""
    threads = per_task("load")
    go = threading.Event()
    work = threads.submit(go.wait, 60)
    assert threads.works()
    go.set()
    assert work.result()
    threads.shutdown()
    assert not threads.works()


# -- a full system -----------------------------------------------------------------------------------------------------


def test_where_there_is_no_room_for_a_thread_it_is_tried_again(monkeypatch, caplog):
    """The work is done as soon as there is room, and that of others as well; the log tells once."""
    tries, ran, start = [], SimpleQueue(), threading.Thread.start

    def full_at_first(thread):
        tries.append(thread.name)
        if len(tries) < 3:
            raise RuntimeError("can't start new thread")
        start(thread)

    pools = [ThreadPool(name) for name in ("one", "other")]
    monkeypatch.setattr(threading.Thread, "start", full_at_first)
    for pool in pools:
        pool.run(lambda: ran.put(name()))
    assert {ran.get(timeout=PATIENCE)[:3] for _ in pools} == {"one", "oth"}
    for pool in pools:
        pool.shutdown()
    (told,) = caplog.messages
    assert told.startswith("thread 'one_0' can't be started: raise the limit of processes and threads")


def test_on_a_full_system_the_work_is_done_by_the_threads_there_are(pool, monkeypatch):
    """The next one that becomes idle takes what waits for a thread that can't be started."""
    go, busy = threading.Event(), threading.Event()

    def work():
        busy.set()
        go.wait(PATIENCE)
        return name()

    first = pool.submit(work)
    assert busy.wait(PATIENCE)
    with monkeypatch.context() as full:
        full.setattr(threading.Thread, "start", refused)
        waits = [pool.submit(name) for _ in range(5)]
        go.set()
        assert [each.result(PATIENCE) for each in (first, *waits)] == ["pool_0"] * 6
    assert len(named("pool")) == 1


def test_work_that_finds_no_room_for_its_thread_is_refused_in_time(monkeypatch):
    """A load would wait for as long as one may take, and then be told of its time; nobody waits for it at the end."""
    hurried, patient = per_task("load", patience=0.2), per_task("write")
    with monkeypatch.context() as full:
        full.setattr(threading.Thread, "start", refused)
        waits = patient.submit(int)
        with pytest.raises(MmeError, match="thread 'load_0' can't be started: raise the limit") as raised:
            hurried.submit(int).result(PATIENCE)
        assert raised.value.kind is Kind.UNAVAILABLE
        assert not waits.done()
    assert waits.result(PATIENCE) == hurried.submit(int).result(PATIENCE) == 0
    hurried.shutdown()
    patient.shutdown()


def test_one_thread_starts_all_others():
    """However many there are."""
    pools = [per_task("begun") for _ in range(3)]
    for future in [pool.submit(int) for pool in pools]:
        future.result(PATIENCE)
    assert len(named("starter")) == 1
    for pool in pools:
        pool.shutdown()


def test_a_pool_does_its_work_though_the_system_has_no_room_for_threads(monkeypatch):
    """By the thread that it has had from the beginning; without one it can't be made."""
    prepared, done = [], []
    pool = ThreadPool("unload", lambda: prepared.append(1), most=3, keeps_one=True)

    with monkeypatch.context() as full:
        full.setattr(threading.Thread, "start", refused)
        for future in [pool.submit(done.append, number) for number in range(5)]:
            future.result(PATIENCE)
        with pytest.raises(MmeError, match="thread 'unload_0' can't be started"):
            ThreadPool("unload", keeps_one=True)
    assert done == [0, 1, 2, 3, 4]
    gate = threading.Barrier(3)
    for future in [pool.submit(gate.wait, PATIENCE) for _ in range(3)]:
        future.result(PATIENCE)
    pool.shutdown()
    assert len(prepared) == 3


# -- the thread that starts them ---------------------------------------------------------------------------------------


class Pool:
    """Tells when it is to start a thread, and starts none before it may."""

    def __init__(self, *, full=False):
        self.asked, self.may, self.full, self.started = threading.Event(), threading.Event(), full, False

    def start_thread(self):
        """Once it may; on a system that is full, at the second try."""
        self.asked.set()
        self.may.wait(PATIENCE)
        if self.full:
            self.full = False
            raise MmeError(Kind.UNAVAILABLE, "full")
        self.started = True


def ended(starter):
    """A thread that ends a starter; that has been told when this returns."""
    ending = threading.Thread(target=starter.end, daemon=True)
    ending.start()
    eventually(lambda: starter._thread is None, "the starter to be told")
    return ending


def test_what_was_asked_for_is_started_before_the_end():
    """Also where it has to be tried again."""
    starter, pool = _Starter(), Pool(full=True)
    starter.start(pool, float("inf"))
    assert pool.asked.wait(PATIENCE)
    ending = ended(starter)
    pool.may.set()
    ending.join(PATIENCE)
    assert not ending.is_alive()
    assert pool.started


def test_an_end_ends_no_thread_that_was_begun_since():
    """A server that begins while another one ends has its own, and the end waits for the first one alone."""
    starter, before, behind = _Starter(), Pool(), Pool()
    starter.start(before, float("inf"))
    assert before.asked.wait(PATIENCE)
    ending = ended(starter)
    behind.may.set()
    starter.start(behind, float("inf"))
    eventually(lambda: behind.started, "its own thread to start it")
    before.may.set()
    ending.join(PATIENCE)
    assert not ending.is_alive()
    starter.end()
