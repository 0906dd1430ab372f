"""Work that may never come back has threads of its own."""

import asyncio
import gc
import threading
import weakref

import pytest

from model_handlers.errors import Kind, MmeError
from serve.threads import STARTER, SteadyPool, ThreadPerTask, on_daemon
from tests.waiting import PATIENCE, eventually


def test_work_that_hangs_is_in_nobodys_way():
    """However many hang, the next one runs; each on a thread that was prepared, and that ends with it."""
    prepared = []
    threads = ThreadPerTask("load", lambda: prepared.append(threading.current_thread().name))
    go = threading.Event()
    stuck = [threads.submit(go.wait, 60) for _ in range(50)]

    assert threads.submit(lambda a, b: (a + b, threading.current_thread().name), 1, b=2).result() == (3, "load_50")
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
    (slow,) = [thread for thread in threading.enumerate() if thread.name == "slow"]
    go.set()
    slow.join(PATIENCE)


def test_what_is_raised_is_the_futures():
    """An exception of the work, whatever it is, is its result."""
    threads = ThreadPerTask("load")
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

    threads, large = ThreadPerTask("load"), Large()
    seen = weakref.ref(large)
    gc.disable()
    try:
        assert type(threads.submit(fail, large).exception()) is ValueError
        threads.shutdown()
        del large
        eventually(lambda: seen() is None, "the thread that starts others to let go of it, too")
    finally:
        gc.enable()


def test_a_shutdown_waits_for_what_runs_and_takes_nothing_on():
    """With everything done it returns; unless it need not wait."""
    threads = ThreadPerTask("load")
    go = threading.Event()
    running = threads.submit(go.wait, 60)
    threads.shutdown(wait=False)
    with pytest.raises(RuntimeError, match="after the shutdown"):
        threads.submit(int)
    assert not running.done()
    threading.Timer(0.01, go.set).start()
    threads.shutdown()
    assert running.done()


def test_threads_are_started_one_after_another_for_those_who_cannot_wait():
    """Each runs, named as it was, and whoever asked went on at once."""
    gate, ran = threading.Event(), []
    threads = [threading.Thread(target=lambda: (gate.wait(PATIENCE), ran.append(1)), name=f"t{n}") for n in range(20)]
    for thread in threads:
        STARTER.start(thread)
    gate.set()
    eventually(lambda: len(ran) == len(threads), "all to run")
    for thread in threads:
        thread.join(PATIENCE)


def test_where_there_is_no_room_for_a_thread_it_is_tried_again(caplog):
    """Whoever is asked for after it is started meanwhile, and it is itself as soon as there is room."""
    ran = []

    class Refused(threading.Thread):
        tries = 0

        def start(self):
            self.tries += 1
            if self.tries < 2:
                raise RuntimeError("can't start new thread")
            super().start()

    threads = [cls(target=ran.append, args=(cls.__name__,), name=cls.__name__) for cls in (Refused, threading.Thread)]
    for thread in threads:
        STARTER.start(thread)
    eventually(lambda: len(ran) == 2, "both to run")
    assert sorted(ran) == ["Refused", "Thread"]
    (told,) = caplog.messages
    assert told.startswith("thread 'Refused' can't be started: raise the limit of processes and threads")
    for thread in threads:
        thread.join(PATIENCE)


def test_work_that_finds_no_room_for_its_thread_is_refused_in_time(monkeypatch):
    """A load would wait for as long as one may take, and then be told of its time; nobody waits for it at the end."""

    def refused(thread):
        raise RuntimeError("can't start new thread")

    hurried, patient = ThreadPerTask("load", patience=0.2), ThreadPerTask("write")
    STARTER.start(threading.Thread(target=int))  # which begins the thread that starts them
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
    begun = [threading.Thread(target=int) for _ in range(3)]
    for thread in begun:
        STARTER.start(thread)
    eventually(lambda: all(thread.ident for thread in begun))
    assert [thread.name for thread in threading.enumerate()].count("starter") == 1


def test_a_pool_does_its_work_though_the_system_has_no_room_for_threads(monkeypatch):
    """By the thread that it has had from the beginning; without one it can't be made."""
    prepared, done = [], []
    pool = SteadyPool(3, "unload", lambda: prepared.append(1))

    def refused(thread):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as full:
        full.setattr(threading.Thread, "start", refused)
        for future in [pool.submit(done.append, number) for number in range(5)]:
            future.result(PATIENCE)
        with pytest.raises(MmeError, match="thread 'unload_0' can't be started"):
            SteadyPool(3, "unload")
    assert done == [0, 1, 2, 3, 4]
    gate = threading.Barrier(3)
    for future in [pool.submit(gate.wait, PATIENCE) for _ in range(3)]:
        future.result(PATIENCE)
    pool.shutdown()
    assert len(prepared) == 3


def test_a_shutdown_waits_for_threads_that_have_yet_to_start():
    """What was taken on is done, though its thread was still on its way."""
    for _ in range(50):
        executor, done = ThreadPerTask("t"), []
        for number in range(4):
            executor.submit(done.append, number)
        executor.shutdown()
        assert sorted(done) == [0, 1, 2, 3]


def test_it_tells_whether_anything_is_under_way() -> None:
    """Until that has ended, however it ended."""
    threads = ThreadPerTask("load")
    go = threading.Event()
    work = threads.submit(go.wait, 60)
    assert threads.works()
    go.set()
    assert work.result()
    threads.shutdown()
    assert not threads.works()
