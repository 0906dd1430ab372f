"""What a program is left with that has used a server: nothing, however it ends."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.mme.models import write_adding, write_doubling

ROOT = Path(__file__).parents[2]
_BEFORE = """
import logging, os, signal, sys, threading, time
signals = [signal.getsignal(number) for number in signal.valid_signals()]
import numpy as np
import mme
x = np.arange(3, dtype=np.float32)
"""
_LEFT = """
import time
import psutil
ends = time.monotonic() + 20
while time.monotonic() < ends and (len(threading.enumerate()) > 1 or psutil.Process().children()):
    time.sleep(0.05)
assert threading.enumerate() == [threading.main_thread()], threading.enumerate()
assert psutil.Process().children() == [], psutil.Process().children()
assert signals == [signal.getsignal(number) for number in signal.valid_signals()]
assert not logging.getLogger().handlers
assert not {"container", "flask", "gunicorn", "werkzeug"} & set(sys.modules)
"""


@pytest.fixture
def run(tmp_path):
    """Run a program beside a repository of two models; what it prints."""
    write_doubling(tmp_path / "models", "doubles")
    write_adding(tmp_path / "models", "adds")
    (tmp_path / "tmp").mkdir()
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path / "tmp")}

    def ran(text, after=""):
        program = _BEFORE + textwrap.dedent(text) + after
        done = subprocess.run(
            [sys.executable, "-c", program],
            check=False,
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        assert done.stderr == ""
        assert list((tmp_path / "tmp").iterdir()) == []
        return done.stdout

    return ran


def test_a_server_that_is_closed_leaves_nothing(run):
    """No thread, no process, no file, no handler of signals or logs; and nothing of the container was imported."""
    printed = run(
        """
        with mme.Server("models") as server:
            print(*(server.model(name).infer({"x": x})["y"].tolist() for name in ("doubles", "adds")))
        """,
        _LEFT,
    )
    assert printed == "[0.0, 2.0, 4.0] [1.0, 2.0, 3.0]\n"


def test_a_server_on_the_loop_of_a_program_leaves_nothing(run):
    """As it is."""
    run(
        """
        import asyncio

        async def main():
            async with mme.Server("models") as server:
                await asyncio.gather(*(server.model(name).infer_async({"x": x}) for name in ("doubles", "adds")))

        asyncio.run(main())
        """,
        _LEFT,
    )


@pytest.mark.parametrize(
    "end",
    ["", pytest.param("sys.exit(0)", marks=pytest.mark.long), pytest.param("asks.cancel()", marks=pytest.mark.long)],
)
def test_a_program_that_ends_without_closing_leaves_nothing(run, end):
    """The interpreter ends the server, and what it has under way."""
    run(
        f"""
        server = mme.Server("models").start()
        server.model("adds").infer({{"x": x}})
        asks = server.model("doubles").submit({{"x": x}})
        {end}
        """
    )


def test_a_forked_process_leaves_the_server_alone(run):
    """It is told so, begins none of its own, and its end takes nothing from the server."""
    printed = run(
        """
        with mme.Server("models") as server:
            adds = server.model("adds")
            adds.infer({"x": x})
            if not (child := os.fork()):
                signal.alarm(20)
                for ask in (lambda: adds.infer({"x": x}), server.index, mme.Server("models").start):
                    try:
                        ask()
                    except mme.Error as error:
                        print(error.kind.name, flush=True)
                sys.exit()
            os.waitpid(child, 0)
            print(len(os.listdir(os.environ["TMPDIR"])), adds.infer({"x": x})["y"].tolist())
        """
    )
    assert printed == "UNAVAILABLE\n" * 3 + "1 [1.0, 2.0, 3.0]\n"


def test_an_interrupt_of_the_end_costs_no_answer(run):
    """The end goes on, and what executes is answered."""
    printed = run(
        """
        from pathlib import Path
        from tests.mme.models import write_python

        answer = 'open("begun", "w").close(); time.sleep(float(x[0])); return pb_utils.InferenceResponse([pb_utils.Tensor("y", x)])'
        write_python(Path("models"), "sleeps", answer)
        server = mme.Server("models").start()
        sleeps = server.model("sleeps")
        asks = sleeps.submit({"x": np.float32([2])})
        while not Path("begun").exists():
            time.sleep(0.02)
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background has it ignored
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        try:
            server.close()
        except KeyboardInterrupt:
            print("interrupted", asks.result(20)["y"].tolist())
        """
    )
    assert printed == "interrupted [2.0]\n"
