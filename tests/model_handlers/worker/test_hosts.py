"""Several models in one process: what they share, and what each of them has for itself."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest
from isolated_models import Echo, Misbehaves, Refuses, RefusesForGood

from model_handlers.base import CPU, Device
from model_handlers.config.model_config import ModelConfig
from model_handlers.errors import Kind, MmeError
from model_handlers.worker import process, start
from model_handlers.worker.executor import Worker
from model_handlers.worker.fork_client import FORKS, forks_with
from model_handlers.worker.limits import Deadlines
from model_handlers.worker.process import OOM_KILLS
from tests.waiting import eventually

X = np.arange(6, dtype="f4")


def processes():
    """Those that models are in."""
    return psutil.Process(FORKS.pid).children() if FORKS.pid else []


@pytest.fixture(autouse=True)
def no_host_left(nothing_held):
    """The last guest takes the host along."""
    yield
    assert not processes()


@pytest.fixture
def guest(start, tmp_path):
    """Starts models that share a process, each with a folder of its own."""

    def guest(handler_class=Echo, name="a", **fields):
        (tmp_path / name).mkdir(exist_ok=True)
        return start(handler_class, model_file=tmp_path / name / "model.txt", shared=True, **fields)

    return guest


def echo(handler):
    """What it returns for X."""
    (result,) = handler.execute({"x": X}, ["y"])
    return result.tolist()


def do(handler, deed):
    """Have a misbehaving model do one thing."""
    return handler.execute({"do": np.array([deed.encode()], object), "x": X}, ["y"])


def pid(handler):
    """Of the process that it is in."""
    return handler.child.pid


def test_guests_share_a_process(guest, start):
    """One process for all of them, and another for a model that shares none; each answers for itself."""
    one, two, alone = guest(), guest(name="b"), start(Echo)

    assert pid(one) == pid(two) != pid(alone)
    assert echo(one) == echo(two) == echo(alone) == X.tolist()


def test_a_guest_that_leaves_is_closed_and_the_others_stay(guest, tmp_path):
    """Its `close` is called; the process goes with the last one."""
    one, two = guest(), guest(name="b")
    process = psutil.Process(pid(one))
    one.close()

    assert (tmp_path / "a" / "closed").exists()
    assert not (tmp_path / "b" / "closed").exists()
    assert echo(two) == X.tolist()
    two.close()
    assert not process.is_running()


def test_a_guest_leaves_nothing_behind(guest):
    """Neither a descriptor nor a thread nor shared memory stays in the process that goes on."""
    stays = guest()
    echo(stays)
    process = psutil.Process(pid(stays))

    def held():
        maps = [line for line in Path(f"/proc/{process.pid}/maps").read_text().splitlines() if "mme-segment" in line]
        return process.num_fds(), process.num_threads(), len(maps)

    def nothing_came_of_one():
        before = held()
        leaves = guest(name="b")
        echo(leaves)
        leaves.close()
        return held() == before

    # the thread of one ends right behind its last word; a leak is there after each
    eventually(nothing_came_of_one, "a guest that leaves nothing")


def test_guests_execute_at_the_same_time(guest, tmp_path):
    """One that takes its time keeps nobody else waiting, neither from executing nor from being loaded."""
    slow, quick = guest(Misbehaves), guest(name="b")
    thread = threading.Thread(target=lambda: do(slow, "wait"), daemon=True)
    thread.start()

    assert echo(quick) == X.tolist()
    late = guest(name="c")
    assert echo(late) == X.tolist()
    assert thread.is_alive()
    (tmp_path / "a" / "go").touch()
    thread.join(60)
    assert not thread.is_alive()


def test_a_host_that_starts_keeps_only_its_own_guests_waiting(guest, tmp_path, monkeypatch):
    """Who asks for another one, or leaves another one, does not wait for it; who asks for the same one does, and shares it."""
    made, preload = [], "isolated_models:wait_at_the_gate"
    monkeypatch.setenv("PRELOAD_GATE", str(tmp_path))
    leaves = guest()
    threads = [threading.Thread(target=lambda: made.append(process.admit("slow", preload))) for _ in range(2)]
    try:
        for thread in threads:
            thread.start()
        eventually((tmp_path / "waits").exists, "the host's preload")
        leaves.close()
        process.leave(process.admit("other", ""))
        assert made == []
        (tmp_path / "open").touch()
        for thread in threads:
            thread.join(60)

        one, two = made
        assert one is two
        assert one.guests == 2
        process.leave(one)
        process.leave(two)
    finally:
        (tmp_path / "open").touch()
        forks_with(preload).stop()


def test_a_guest_that_can_t_be_loaded_is_nobody_else_s_business(guest):
    """The refusal is its own, and the process goes on; alone, it leaves no process behind."""
    with pytest.raises(MmeError, match="no such model"):
        guest(Refuses)
    assert not processes()

    one = guest()
    with pytest.raises(MmeError, match="no such model"):
        guest(Refuses, name="b")
    assert echo(one) == X.tolist()


def test_who_crashes_takes_the_others_along_and_all_come_back(guest):
    """Each batch under way fails with the reason; the next ones start one new process for all."""
    bad, good = guest(Misbehaves), guest(name="b")
    before = pid(bad)
    with pytest.raises(MmeError, match="was killed by SIGSEGV") as caught:
        do(bad, "segfault")

    assert caught.value.kind is Kind.EXECUTION_FAILED
    assert echo(good) == X.tolist()
    assert do(bad, "nothing")[0].tolist() == X.tolist()
    assert pid(good) == pid(bad) != before


def test_models_that_leave_a_process_that_crashed_leave_the_next_one_to_those_in_it(guest):
    """What is loaded then shares it, as long as any model is in it."""
    first, second = guest(Misbehaves), guest(Misbehaves, name="b")
    with pytest.raises(MmeError, match="SIGSEGV"):
        do(first, "segfault")
    third = guest(name="c")
    second.close()
    first.close()
    fourth = guest(name="d")

    assert pid(fourth) == pid(third)
    assert echo(third) == echo(fourth) == X.tolist()


def test_who_finds_the_process_of_no_use_ends_it_and_all_come_back(guest):
    """As after a kernel that went wrong on a GPU: the batch is told why, and the next ones start one new process."""
    bad, good = guest(Misbehaves), guest(name="b")
    before = pid(bad)
    with pytest.raises(
        MmeError, match=r"ended with exit code 1 while it executed a batch; .*the GPU has gone"
    ) as caught:
        do(bad, "lose")

    assert caught.value.kind is Kind.EXECUTION_FAILED
    assert echo(good) == X.tolist()
    assert do(bad, "nothing")[0].tolist() == X.tolist()
    assert pid(good) == pid(bad) != before


def test_a_load_that_finds_the_process_of_no_use_ends_it_as_well(guest):
    """It is refused in its own words, and who was there before comes back in another process."""
    good = guest()
    before = psutil.Process(pid(good))
    with pytest.raises(MmeError, match=r"^the GPU has gone$") as caught:
        guest(RefusesForGood, name="b")

    assert caught.value.kind is Kind.UNAVAILABLE
    assert before.wait(60) is None or not before.is_running()
    assert echo(good) == X.tolist()
    assert pid(good) != before.pid


def test_who_hangs_is_ended_with_the_others_and_all_come_back(guest):
    """A thread can't be ended alone: its time is over, and everybody begins anew."""
    bad, good = guest(Misbehaves, MME_EXECUTION_TIMEOUT="0.2"), guest(name="b")
    with pytest.raises(MmeError, match=r"gave no answer within 0\.2 s"):
        do(bad, "spin")

    bad.process.deadlines = Deadlines()  # what does not hang may take its time on a busy machine
    assert echo(good) == X.tolist()
    assert do(bad, "nothing")[0].tolist() == X.tolist()
    assert pid(good) == pid(bad)


@pytest.fixture
def kernel(tmp_path, monkeypatch):
    """The file in which the kernel counts its kills: three so far."""
    counter = tmp_path / "memory.events"
    counter.write_text("oom_kill 3\n")
    monkeypatch.setattr(OOM_KILLS, "_paths", [counter])
    return counter


def test_a_kill_for_want_of_memory_is_told_to_all(guest, kernel):
    """The system kills one process: the batches of all models in it ran out of memory."""
    handlers = [guest(name=name) for name in "abc"]
    kernel.write_text("oom_kill 4\n")
    psutil.Process(pid(handlers[0])).kill()
    eventually(lambda: all(handler.process.is_marked_dead for handler in handlers))
    deaths = [handler.child.death("meanwhile") for handler in handlers]

    assert [death.kind for death in deaths] == [Kind.OUT_OF_MEMORY] * 3


def test_who_is_ended_with_one_that_hangs_did_not_run_out_of_memory(guest, kernel):
    """Though the system has killed others since their process began: this kill was ours."""
    bad, good = guest(Misbehaves, MME_EXECUTION_TIMEOUT="0.2"), guest(name="b")
    kernel.write_text("oom_kill 4\n")
    with pytest.raises(MmeError, match="gave no answer"):
        do(bad, "spin")
    eventually(lambda: good.process.is_marked_dead)
    death = good.child.death("meanwhile")

    assert "was killed by SIGKILL" in death.message
    assert death.kind is Kind.EXECUTION_FAILED


def test_memory_is_what_a_guest_added(guest):
    """The process's memory is counted once, by what each of its models made it grow."""
    one, two = guest(), guest(name="b")

    assert one.child.private_memory() is None
    assert 0 <= two.memory().host < 8 << 20
    assert one.child.host.private_memory() > 0


WHERE = {
    "a GPU": (Device("gpu", 1), {}, True, "test on gpu:1"),
    "a GPU, and a process asked for": (Device("gpu", 1), {"MME_PLACEMENT": "process"}, True, ""),
    "a GPU, of another framework": (Device("gpu", 1), {}, False, ""),
    "a GPU, and a model that would change it": (Device("gpu", 1), {"ALONE": "true"}, True, ""),
    "the CPU": (CPU, {}, True, ""),
}


@pytest.mark.parametrize("case", WHERE)
def test_models_share_where_their_framework_wants_it(case, monkeypatch, tmp_path, home):
    """On one GPU, unless the configuration asks for a process, or for what would change it."""
    device, parameters, shares, host = WHERE[case]
    told = {}

    class Told(Worker):
        def __init__(self, _config, _process, _home, *, sees_requests, uses_gpu):
            assert not sees_requests
            assert uses_gpu is (device.kind == "gpu")

    def told_process(*asked):
        told["host"] = asked[-1]

    class Shares(Echo):
        @classmethod
        def traits(cls, config, model_file):
            shared = shares and "ALONE" not in config.parameters
            return replace(super().traits(config, model_file), gpu_shared=shared)

    monkeypatch.setattr(start, "Worker", Told)
    monkeypatch.setattr(start, "InstanceProcess", told_process)
    start.start_isolated(Shares, ModelConfig("m", parameters=parameters), tmp_path, device, "m_0")

    assert told["host"] == host
