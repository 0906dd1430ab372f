"""Models that go wrong in every way: each batch gets one clear error, and the process's end leaves nothing."""

import logging
import math
import os
import resource
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
from isolated_models import (
    CloseHangs,
    CloseRaises,
    Echo,
    LoadDies,
    LoadEndsAll,
    LoadExits,
    LoadHangs,
    LoadIsKilled,
    LoadRaises,
    LoadRefuses,
    LoadsOnce,
    Misbehaves,
    Preloaded,
    PreloadEnds,
    PreloadTakesLong,
    RequestsPreloadEnds,
)

from model_handlers.config.model_config import ModelConfig
from model_handlers.errors import Kind, MmeError
from model_handlers.system import memory
from model_handlers.worker import fork_client, process
from model_handlers.worker.fork_client import ForkClient, forks_with
from model_handlers.worker.limits import Deadlines, LoadQuota, allowing
from model_handlers.worker.policies import LIMIT
from model_handlers.worker.process import OOM_KILLS
from model_handlers.worker.start import verify_file
from tests.cgroups import few_tasks
from tests.processes import ends_with_all_it_started, is_over
from tests.waiting import PATIENCE, eventually

X = np.arange(4, dtype="f4")


def do(handler, deed):
    """Have the misbehaving model do one thing."""
    (result,) = handler.execute({"do": np.array([deed.encode()], object), "x": X}, ["y"])
    return result


def fails(handler, deed):
    """The error of doing so."""
    with pytest.raises(MmeError) as raised:
        do(handler, deed)
    return raised.value


@pytest.mark.parametrize(
    ("deed", "kind", "words"),
    [
        ("segfault", Kind.EXECUTION_FAILED, ["was killed by SIGSEGV", "Fatal Python error: Segmentation fault"]),
        ("os._exit", Kind.EXECUTION_FAILED, ["ended with exit code 3", "first words | last words"]),
        ("exit 137", Kind.OUT_OF_MEMORY, ["ended with exit code 137"]),
        ("sigkill", Kind.EXECUTION_FAILED, ["was killed by SIGKILL"]),
        ("nonsense", Kind.EXECUTION_FAILED, ["a message of 2147483647 bytes"]),
    ],
)
def test_death_fails_the_batch(start, deed, kind, words):
    """A process that dies of a batch fails it at once, with what happened; the next batch finds a new process."""
    handler = start(Misbehaves)
    first = handler.child.pid
    error = fails(handler, deed)

    assert error.kind is kind
    for word in ["model 'm'", "'m_0_0'", "while it executed a batch", *words]:
        assert word in error.message
    assert np.array_equal(do(handler, "nothing"), X)
    assert handler.child.pid != first


@pytest.mark.parametrize(
    ("deed", "kind", "words"),
    [
        ("sys.exit", Kind.EXECUTION_FAILED, "called sys.exit('enough')"),
        ("raise", Kind.INTERNAL, "ZeroDivisionError: of a strange kind"),
        ("memory", Kind.OUT_OF_MEMORY, "no more room"),
        ("typed", Kind.OUT_OF_MEMORY, "the card is full"),
        ("complex", Kind.EXECUTION_FAILED, "complex128"),
        ("list", Kind.EXECUTION_FAILED, "output 'y' of model 'm' is list"),
        ("none", Kind.EXECUTION_FAILED, "did not return one array for each of y"),
        ("no result", Kind.EXECUTION_FAILED, "did not return one array for each of y"),
    ],
)
def test_exceptions_cross(start, deed, kind, words):
    """What a model raises, or returns that is no answer, is the batch's error, and its process lives on."""
    handler = start(Misbehaves)
    first = handler.child.pid
    error = fails(handler, deed)

    assert error.kind is kind
    assert words in error.message
    assert np.array_equal(do(handler, "nothing"), X)
    assert handler.child.pid == first


@pytest.mark.parametrize("deed", ["hang", "spin"])
def test_hang_is_ended(start, deed):
    """A batch that takes longer than MME_EXECUTION_TIMEOUT is ended with its process, in native code too."""
    handler = start(Misbehaves, MME_EXECUTION_TIMEOUT="0.2")
    first = handler.child.pid
    error = fails(handler, deed)

    assert error.kind is Kind.TIMED_OUT
    assert "gave no answer within 0.2 s" in error.message
    assert not psutil.pid_exists(first)
    handler.process.deadlines = Deadlines()  # what does not hang may take its time on a busy machine
    assert np.array_equal(do(handler, "nothing"), X)


def test_closed_connection(start):
    """A process that closes every descriptor, and so can't be spoken to, is ended."""
    error = fails(start(Misbehaves), "close all")

    assert "closed its connection" in error.message


def test_fork_in_execute(start):
    """The copy of a process that forks and carries on as if it were the model does not answer in its place."""
    handler = start(Misbehaves)
    for _ in range(5):
        assert do(handler, "fork").tolist() == [handler.child.pid]


@pytest.mark.parametrize("deed", ["leave behind", "daemon"])
@pytest.mark.parametrize("end", ["close", "kill"])
def test_processes_left_by_a_model(start, tmp_path, deed, end):
    """Processes that a model started go with it, though they have sessions of their own and hold its descriptors."""
    handler = start(Misbehaves)
    do(handler, deed)
    left = int((tmp_path / "left").read_text())
    assert psutil.pid_exists(left)
    if end == "kill":
        assert "SIGKILL" in fails(handler, "sigkill").message
    handler.close()

    assert not psutil.pid_exists(left)


def test_processes_of_a_living_model(start, tmp_path):
    """The end of one model does not end what another one started, orphans included."""
    handler, other = start(Misbehaves), start(Echo)
    do(handler, "daemon")
    left = int((tmp_path / "left").read_text())
    other.close()

    assert psutil.pid_exists(left)
    handler.close()
    assert not psutil.pid_exists(left)


def test_a_model_holds_no_other_ones_leash(start):
    """Whoever has one would keep its model from ending with whatever ends the serving process."""

    def sockets(pid):
        links = [str(fd.readlink()) for fd in Path(f"/proc/{pid}/fd").iterdir()]
        return {link for link in links if link.startswith("socket:")}

    handlers = [start(Echo) for _ in range(4)]
    handlers.pop(1).close()
    handlers.append(start(Echo))
    held, forks = [sockets(handler.child.pid) for handler in handlers], sockets(process.FORKS.pid)

    assert [len(each) for each in held] == [2] * 4
    assert len(set().union(*held, forks)) == 8 + len(forks)


def test_orphans_that_end_leave_nothing(start, tmp_path):
    """What a model orphans, and what ends while the model lives, does not stay in the table of processes."""
    handler = start(Misbehaves)
    do(handler, "daemons")
    left = [int(pid) for pid in (tmp_path / "left").read_text().split()]

    assert len(left) == 5
    eventually(lambda: not any(map(psutil.pid_exists, left)), "their end")
    assert np.array_equal(do(handler, "nothing"), X)


def test_death_between_batches(start):
    """A process that was killed while it had nothing to do costs no batch; it is heard of at once."""
    handler = start(Misbehaves)
    first = handler.child.pid
    os.kill(first, signal.SIGKILL)
    eventually(lambda: handler.process.is_marked_dead, "news of the death")

    assert np.array_equal(do(handler, "nothing"), X)
    assert handler.child.pid != first


def test_death_between_batches_that_is_told_late(start, monkeypatch):
    """The fork server may not yet have told of the death when the next batch comes: that one waits for the news."""
    forks = ForkClient()  # not the one of the other tests
    monkeypatch.setattr(process, "FORKS", forks)
    handler = start(Misbehaves)
    child = psutil.Process(handler.child.pid)
    os.kill(forks.pid, signal.SIGSTOP)
    child.kill()
    eventually(lambda: is_over(child), "its end")
    going_on = threading.Timer(0.2, os.kill, (forks.pid, signal.SIGCONT))
    going_on.start()

    assert np.array_equal(do(handler, "nothing"), X)
    going_on.join()
    handler.close()
    forks.stop()


def test_death_of_the_fork_server(start, monkeypatch):
    """The fork server's death takes its children along; the next batch starts both anew."""
    forks = ForkClient()  # not the one of the other tests
    monkeypatch.setattr(process, "FORKS", forks)
    handler = start(Misbehaves)
    child = psutil.Process(handler.child.pid)
    os.kill(forks.pid, signal.SIGKILL)

    eventually(lambda: is_over(child), "its end")
    assert np.array_equal(do(handler, "nothing"), X)
    handler.close()
    forks.stop()


def test_interrupt_is_ignored(start):
    """Ctrl-C is not for a model's process."""
    assert np.array_equal(do(start(Misbehaves), "interrupt"), X)


def test_kernel_kill_is_out_of_memory(start, tmp_path, monkeypatch):
    """A SIGKILL while the kernel's count of its own grew is out of memory; the next one, by a person, is not."""
    counter = tmp_path / "memory.events"
    counter.write_text("low 0\noom 3\noom_kill 3\n")
    monkeypatch.setattr(OOM_KILLS, "_paths", [counter])
    handler = start(Misbehaves)
    counter.write_text("low 0\noom 4\noom_kill 4\n")
    killed = fails(handler, "sigkill")

    assert killed.kind is Kind.OUT_OF_MEMORY
    assert "ran out of memory" in killed.message
    assert fails(handler, "sigkill").kind is Kind.EXECUTION_FAILED


def test_restarts_have_a_budget(start):
    """After five restarts in a minute there are no more, and the error says why and how long."""
    handler = start(Misbehaves)
    for _ in range(LIMIT + 1):
        assert "exit code 3" in fails(handler, "os._exit").message
    refused = fails(handler, "nothing")

    assert refused.kind is Kind.UNAVAILABLE
    assert "died too often" in refused.message
    assert "5 restarts" in refused.message
    assert "exit code 3" in refused.message


def test_restarts_for_the_time_that_batches_took_have_a_budget_of_their_own(start):
    """Five in ten minutes, one at once after another; they leave that of deaths as it is."""
    handler = start(Misbehaves, MME_EXECUTION_TIMEOUT="0.05")
    for _ in range(LIMIT + 1):
        assert fails(handler, "hang").kind is Kind.TIMED_OUT
    refused = fails(handler, "nothing")

    assert handler.is_down()
    assert refused.kind is Kind.UNAVAILABLE
    assert "took longer than MME_EXECUTION_TIMEOUT or the limit of a request too often" in refused.message
    assert "5 restarts within 600 s" in refused.message


def test_a_warm_up_has_the_time_of_a_load(start):
    """What it executes is part of the load, and may take longer than a batch."""
    handler = start(Misbehaves, MME_EXECUTION_TIMEOUT="0.05", MME_LOAD_TIMEOUT="60")
    handler.warm(begins=True)
    assert np.array_equal(do(handler, "nap"), X)


def test_restart_that_fails(start):
    """A model that can't be loaded again is unavailable, with the reason of the load."""
    handler = start(LoadsOnce)
    with pytest.raises(MmeError, match="exit code 1"):
        handler.execute({"x": X}, ["y"])
    with pytest.raises(MmeError, match="the weights went away") as raised:
        handler.execute({"x": X}, ["y"])

    assert raised.value.kind is Kind.UNAVAILABLE


@pytest.mark.parametrize(
    ("handler_class", "kind", "words"),
    [
        (LoadRaises, Kind.INVALID_MODEL, "RuntimeError: no such weights"),
        (LoadRefuses, Kind.UNSUPPORTED, "not this kind of model"),
        (LoadExits, Kind.INVALID_MODEL, "called sys.exit(4) while it was loaded"),
        (LoadDies, Kind.INVALID_MODEL, "was killed by SIGSEGV while it loaded the model"),
        (LoadIsKilled, Kind.EXECUTION_FAILED, "was killed by SIGKILL while it loaded the model; load it again"),
        (LoadHangs, Kind.INVALID_MODEL, "gave no answer within 0.2 s"),
    ],
)
def test_loads_that_fail(start, handler_class, kind, words):
    """A load that raises, refuses, exits, dies or hangs is one error that says so, and leaves no process.

    One that somebody killed says nothing of the model: what others do is no reason to throw its archive away.
    """
    with pytest.raises(MmeError) as raised:
        start(handler_class, MME_LOAD_TIMEOUT="0.2" if handler_class is LoadHangs else "60")

    assert raised.value.kind is kind
    assert words in raised.value.message


def test_a_load_that_the_fork_servers_death_ended_says_nothing_of_the_model(start, monkeypatch):
    """It is not called invalid, for which its archive would be refused for a while, and the next load begins anew."""
    forks = ForkClient()
    monkeypatch.setattr(process, "FORKS", forks)
    try:
        with pytest.raises(
            MmeError, match=r"ended together with the process that it was forked from.*load it again"
        ) as raised:
            start(LoadEndsAll)

        assert raised.value.kind is Kind.UNAVAILABLE
        start(LoadEndsAll).close()
    finally:
        forks.stop()


@pytest.mark.parametrize(
    ("handler_class", "shared"),
    [(PreloadEnds, False), (RequestsPreloadEnds, False), pytest.param(PreloadEnds, True, marks=pytest.mark.long)],
)
def test_a_preload_that_ends_its_process_is_left_out(start, handler_class, shared, monkeypatch):
    """Models are loaded without it, from the first on: what is wrong with it they tell themselves."""
    forks = ForkClient(handler_class.preload)
    monkeypatch.setitem(fork_client._WITH, handler_class.preload, forks)
    try:
        start(handler_class, shared=shared).close()
    finally:
        forks.stop()


def test_what_processes_are_forked_from_counts_once_and_is_given_back(start, monkeypatch):
    """It is the same for all of them; when there are none for a while its memory goes back, and comes with the next."""
    monkeypatch.setattr(fork_client, "_IDLE_SECONDS", 0.5)
    forks = forks_with(Preloaded.preload)
    try:
        one, other = start(Preloaded), start(Preloaded)
        assert {*one.memory().shared, *other.memory().shared} == {f"fork server of {Preloaded.preload}"}
        assert sum((one.memory() + other.memory()).shared.values()) > 32 << 20
        assert one.memory().host + other.memory().host < 32 << 20

        one.close()
        time.sleep(1)
        assert memory.private_memory(forks.pid) > 32 << 20
        other.close()
        eventually(lambda: memory.private_memory(forks.pid) < 16 << 20, "the memory given back")
        for _ in range(2):
            again = start(Preloaded)
            assert sum(again.memory().shared.values()) > 32 << 20
            again.close()
    finally:
        forks.stop()


def test_what_nobody_uses_goes_at_once_where_memory_is_short():
    """It is in no model's count, and may be the rest of what the machine has."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    program = (
        "import socket; from model_handlers.system import memory; from model_handlers.worker import fork_server; "
        "memory.free_memory = lambda: 0; "
        f"print(fork_server._ForkServer(socket.socket(fileno={theirs.fileno()}), 3600.0).run())"
    )
    with ours, theirs:
        ended = subprocess.run(
            [sys.executable, "-c", program],
            pass_fds=[theirs.fileno()],
            timeout=PATIENCE,
            check=True,
            capture_output=True,
            text=True,
        )
    assert ended.stdout == "False\n"


def test_a_load_that_is_cancelled_waits_for_no_import(start, monkeypatch):
    """Its process is not there before its framework is, which takes seconds; whoever unloads it need not wait for that."""
    monkeypatch.setattr(fork_client, "_REAP_SECONDS", math.inf)  # no time for what waits
    monkeypatch.setattr(fork_client, "_STOP_SECONDS", 0.1)
    looks = iter(range(3))

    def must_go_on():
        if next(looks, None) is None:
            raise MmeError(Kind.CANCELLED, "nobody wants it any more")

    try:
        with pytest.raises(MmeError, match="nobody wants it"), allowing(LoadQuota(int, must_go_on)):
            start(PreloadTakesLong)
    finally:
        forks_with(PreloadTakesLong.preload).stop()


def test_files_where_fork_servers_run_hide_none_of_pythons(start, tmp_path, monkeypatch):
    """Models' code may lie there, and what was to be shared would be imported by each of them instead."""
    monkeypatch.chdir(tmp_path)
    for name in ("socket", "selectors"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('hidden')")
    forks = ForkClient(Preloaded.preload)
    monkeypatch.setitem(fork_client._WITH, Preloaded.preload, forks)
    try:
        handler = start(Preloaded)
        assert sum(handler.memory().shared.values()) > 32 << 20
        handler.close()
    finally:
        forks.stop()


def test_a_process_that_cannot_be_forked_names_the_limit(start, tmp_path, monkeypatch):
    """So does a file's trial: the model and its file may be as good as any."""
    forks = ForkClient(Preloaded.preload)
    monkeypatch.setitem(fork_client._WITH, Preloaded.preload, forks)
    try:
        with few_tasks(1) as group:
            start(Preloaded).close()
            (group / "cgroup.procs").write_text(str(forks.pid))
            limit = "Resource temporarily unavailable; raise the limit of processes and threads"
            with pytest.raises(MmeError, match=f"the process of .* can't be started: .*{limit}") as load:
                start(Preloaded)
            with pytest.raises(MmeError, match=f"can't be started: .*{limit}") as trial:
                verify_file(Preloaded, ModelConfig("m"), tmp_path)
            assert load.value.kind is trial.value.kind is Kind.UNAVAILABLE
            forks.stop()
    finally:
        forks.stop()


def test_a_fork_server_that_was_asked_for_nothing_ends_without_importing_anything(monkeypatch):
    """As one does that has given back what it imported."""
    started, begin = [], subprocess.Popen
    monkeypatch.setattr(
        subprocess, "Popen", lambda *args, **options: started.append(begin(*args, **options)) or started[-1]
    )
    forks = ForkClient("isolated_models:end_the_process")
    forks.ensure_running()
    forks.stop()
    (server,) = started
    assert server.returncode == 0


def test_close_lets_the_model_clean_up(start, tmp_path):
    """`close` has the model closed in its process, ends that, and may be called again."""
    handler = start(Echo)
    child = psutil.Process(handler.child.pid)
    handler.close()
    handler.close()

    assert (tmp_path / "closed").exists()
    assert not child.is_running()


@pytest.mark.parametrize("handler_class", [CloseHangs, CloseRaises])
def test_close_that_goes_wrong(start, handler_class):
    """A model that hangs or raises while it cleans up is gone all the same."""
    handler = start(handler_class)
    handler.process.deadlines = Deadlines(close=0.1)
    child = psutil.Process(handler.child.pid)
    handler.close()

    assert not child.is_running()


def test_close_with_a_thread_left(start):
    """A thread that a model leaves running does not keep its process from ending."""
    handler = start(Misbehaves)
    do(handler, "thread")
    handler.process.deadlines = Deadlines(close=60)
    began = time.monotonic()
    handler.close()

    assert time.monotonic() - began < 60  # the time it would have been given


def test_execute_after_close(start):
    """A closed handler starts no process."""
    handler = start(Echo)
    handler.close()
    with pytest.raises(MmeError, match="unloaded"):
        handler.execute({"x": X}, ["y"])


def test_output_is_logged(start, caplog):
    """Lines that a model prints are logged with its name and the stream, junk included."""
    handler = start(Misbehaves)
    with caplog.at_level(logging.INFO, "mme.model"):
        do(handler, "spam")
        do(handler, "junk")
        handler.close()
    lines = [
        (record.stream, record.target_model, record.getMessage())
        for record in caplog.records
        if record.name == "mme.model"
    ]

    assert ("stdout", "m", "line 19999") in lines
    assert any(text.startswith("xxxx") and text.endswith("(cut)") and len(text) < 9000 for _, _, text in lines)
    assert ("stderr", "m", "\\x1b[2J\ufffd\ufffd no end of line") in lines
    assert all(text.isprintable() or "\t" in text for _, _, text in lines)


PARENT = """
import asyncio, os, signal, sys, threading
sys.path.insert(0, sys.argv[1])
import numpy as np
from pathlib import Path
import isolated_models
from model_handlers.base import CPU
from model_handlers.config.model_config import ModelConfig
from model_handlers.executor import ExecutorLoop, at_home
from model_handlers.worker.start import start_isolated
from serve.threads import ThreadPool
loop = asyncio.new_event_loop()
threading.Thread(target=loop.run_forever, daemon=True).start()
with at_home(ExecutorLoop(loop, ThreadPool("work"))):
    handlers = [
        start_isolated(isolated_models.Misbehaves, ModelConfig("m"), Path(sys.argv[2]) / "x", CPU, f"m_0_{i}")
        for i in range(3)
    ]
def do(handler, deed):
    handler.execute({"do": np.array([deed], object), "x": np.zeros(1, "f4")}, ["y"])
do(handlers[2], b"leave behind")
threading.Thread(target=do, args=(handlers[1], b"spin"), daemon=True).start()
for number in (signal.SIGTERM, signal.SIGINT):  # whoever started the tests may have ignored them
    signal.signal(number, signal.SIG_DFL)
print("up", flush=True)
signal.pause()
"""


_RARE = [pytest.param(number, marks=pytest.mark.long) for number in (signal.SIGINT, signal.SIGSEGV)]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, *_RARE], ids=lambda n: n.name)
def test_death_of_the_serving_process(tmp_path, number):
    """However the serving process dies, its models' processes are gone within moments: idle, hanging, left behind."""
    (tmp_path / "parent.py").write_text(textwrap.dedent(PARENT))
    assert ends_with_all_it_started(number, tmp_path / "parent.py", Path(__file__).parent, tmp_path) == 1 + 3 + 1


def test_start_without_descriptors(start):
    """When the system gives no more descriptors, a start fails as unavailable and leaves none behind."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = max(int(fd.name) for fd in Path("/proc/self/fd").iterdir()) + 1
    for more in range(9):
        resource.setrlimit(resource.RLIMIT_NOFILE, (used + more, hard))
        try:
            with pytest.raises(MmeError) as raised:
                start(Echo)
        except pytest.fail.Exception:
            break
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert raised.value.kind is Kind.UNAVAILABLE
