"""Which test executes which line of the product: recorded in every process that the tests start.

`site` calls `start` in each Python process of the virtual environment that `benchmarks.mutants` makes for it, and
pytest loads this module as a plugin. Lines of pytest's process belong to the test that runs; those of a process that a
test starts (a server, a model's process) belong to the file of tests that ran when it began.

PYTEST_DONT_REWRITE: it is imported before pytest is.
"""

from __future__ import annotations

import atexit
import json
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import coverage

_FOLDER = Path()
_TREE = ""
_RECORDING: coverage.Coverage | None = None


def start(folder: str, tree: str) -> None:
    """Record what this process and those that it forks execute of that tree, into files of their own in that folder."""
    global _FOLDER, _TREE
    if _RECORDING:  # `site` reads its folder a second time
        return
    _FOLDER, _TREE = Path(folder), tree
    _begin()
    os.register_at_fork(after_in_child=_begin)
    leave = os._exit

    def saved_exit(code: int) -> NoReturn:
        _save()
        leave(code)

    os._exit = saved_exit  # a process that a fork server began ends so
    atexit.register(_save)


def _begin() -> None:
    global _RECORDING  # noqa: PLW0603
    if _RECORDING:  # the parent's
        _RECORDING.stop()
    _RECORDING = coverage.Coverage(
        data_file=str(_FOLDER / "lines"), data_suffix=f"{os.getpid()}.{time.monotonic_ns()}", config_file=False,
        include=[f"{_TREE}/{storey}/*" for storey in ("container", "serve", "model_handlers")], context=_test_file(),
    )  # fmt: skip
    _RECORDING.set_option("run:disable_warnings", ["no-data-collected", "module-not-measured", "no-ctracer"])
    _RECORDING.start()


def _save() -> None:
    if _RECORDING:
        with suppress(Exception):
            _RECORDING.stop()
            _RECORDING.save()


def _test_file() -> str:
    """What the nearest process above, that runs tests, says that it runs."""
    process = os.getpid()
    while process > 1:
        with suppress(OSError):
            return (_FOLDER / f"runs.{process}").read_text()
        try:
            process = int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            break
    return ""


def pytest_runtest_logstart(nodeid: str) -> None:
    """Name the test to which lines belong from here."""
    if _RECORDING:
        (_FOLDER / f"runs.{os.getpid()}").write_text(nodeid.partition("::")[0])
        _RECORDING.switch_context(nodeid)


def pytest_runtest_logfinish() -> None:
    """Lines belong to no test from here."""
    if _RECORDING:
        _RECORDING.switch_context("")


def pytest_runtest_logreport(report: Any) -> None:
    """Note how long each took, and where and when, in the process that hears of all."""
    if worker := getattr(report, "node", None):
        row = [report.nodeid, report.when, report.start, report.duration, report.outcome, worker.gateway.id]
        with (_FOLDER / "times").open("a") as times:
            times.write(json.dumps(row) + "\n")
