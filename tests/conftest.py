"""What every test has: a temporary folder of its own, and a look for what it left behind.

Fixtures of a wider scope (a server of a module) are made before the look and may stay; what a test itself begins, it
has to end.
"""

from __future__ import annotations

import asyncio
import functools
import gc
import inspect
import os
import tempfile
import threading
import time
from typing import TYPE_CHECKING

import botocore.session
import psutil
import pytest
from hypothesis import HealthCheck, is_hypothesis_test, settings

from model_handlers.executor import at_home
from model_handlers.worker.fork_client import FORKS
from serve.threads import ThreadPool
from tests.event_loop import LoopThread, run_on_loop, with_entered
from tests.processes import children, read, still_there
from tests.waiting import PATIENCE, ends

if TYPE_CHECKING:
    from pathlib import Path

# The machine may be busy: how long an example takes says nothing. `make test-long` tries more of them.
settings.register_profile("untimed", deadline=None, max_examples=20, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("long", settings.get_profile("untimed"), max_examples=1000)
settings.load_profile("untimed")


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Tests and what they import are no garbage: a million objects that else are looked at again and again, to the end.

    Frameworks that tests import later are no garbage either, and half a million more: they are looked at rarely.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.set_threshold(10_000, 10, 10)
        gc.enable()


@pytest.hookimpl(trylast=True)  # when the marks are there
def pytest_collection_modifyitems(items):
    """Files with slow tests go first: whoever began one when nothing else is left would have the others wait for it."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    """Tests that are coroutines run on an event loop of their own, or of their fixture `loop_factory`."""
    test, loop_factory = pyfuncitem.obj, pyfuncitem.funcargs.get("loop_factory")

    def on_loop(**fixtures):
        run_on_loop(with_entered(test, **fixtures), loop_factory)

    if inspect.iscoroutinefunction(test):
        on_loop(**{name: pyfuncitem.funcargs[name] for name in inspect.signature(test).parameters})
        return True
    if is_hypothesis_test(test) and inspect.iscoroutinefunction(test.hypothesis.inner_test):
        test.hypothesis.inner_test, test = on_loop, test.hypothesis.inner_test  # for each example
    return None


@pytest.fixture(scope="session", autouse=True)
def private_temporary_folder(tmp_path_factory: pytest.TempPathFactory):
    """A temporary folder that no other process shares, for this process and its children: what lies in it is ours."""
    folder = tmp_path_factory.mktemp("tmp")
    patch = pytest.MonkeyPatch()
    patch.setenv("TMPDIR", str(folder))
    patch.setenv("ORT_DISABLE_TELEMETRY", "1")  # tests that import ONNX Runtime themselves report to nobody either
    patch.setattr(tempfile, "tempdir", str(folder))
    yield folder
    patch.undo()


@pytest.fixture(scope="session", autouse=True)
def read_once():
    """What AWS's services understand is read once, as clients of one session do: it is half of what a new one takes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(botocore.session, "create_loader", functools.cache(botocore.session.create_loader))
        yield


@pytest.fixture(scope="session", autouse=True)
def starter():
    """The thread that starts others is there for all tests."""
    (pool := ThreadPool("first")).submit(int)
    pool.shutdown()


@pytest.fixture(scope="session")
def loop_thread():
    """The loop of all tests that start workers themselves."""
    loop_thread = LoopThread(asyncio.new_event_loop())
    yield loop_thread
    loop_thread.close()


@pytest.fixture
def home(loop_thread):
    """Where the workers are heard that a test starts."""
    with at_home(loop_thread.home):
        yield loop_thread.home


@pytest.fixture(scope="module")
def fork_server():
    """The fork server of models' processes, which is no leak of a test.

    Of each module: the tests of others, which may run in between, stop it.
    """
    FORKS.ensure_running()
    yield FORKS
    FORKS.stop()


@pytest.fixture(autouse=True)
def nothing_left_behind(request: pytest.FixtureRequest, private_temporary_folder: Path):
    """Fails a test that leaves a thread, a child process, or a temporary or staging folder behind."""
    own = request.getfixturevalue("tmp_path") if "tmp_path" in request.fixturenames else None
    threads, files = set(_threads()), _names(private_temporary_folder)
    processes = _processes() | _processes()  # the end of one of them, while they are listed, may hide another
    yield
    left = [f"thread {thread.name}" for thread in _threads() if thread not in threads and not ends(thread)]
    begun = still_there(_processes() - processes)
    left += [f"process {process}" for process in psutil.wait_procs(begun, PATIENCE)[1]]
    names = _names(private_temporary_folder) - files
    left += [f"temporary {name}" for name in names if not _goes(private_temporary_folder / name)]
    left += [f"staging {path}" for path in (own.rglob(".staging-*") if own else ())]
    if left:
        pytest.fail(f"the test left behind: {', '.join(left)}", pytrace=False)


def _names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def _threads() -> list[threading.Thread]:
    """Threads that would keep the process from ending."""
    return [thread for thread in threading.enumerate() if not thread.daemon]


def _goes(path: Path) -> bool:
    until = time.monotonic() + PATIENCE
    while path.exists() and time.monotonic() < until:
        time.sleep(0.01)
    return not path.exists()


def _processes() -> set[int]:
    """Processes that we or ours started and that live, but for a browser's: it starts and ends them as it likes."""
    return _below(os.getpid())


def _below(process: int) -> set[int]:
    found = set()
    for child in children(process):
        found |= {child} if read(f"/proc/{child}/comm") == b"chromedriver\n" else {child, *_below(child)}
    return found
