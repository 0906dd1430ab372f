"""Traces in Triton's own format: a file of JSON, `--trace-config triton,file=…`. On the event loop; a thread writes.

    [{"id": 1, "model_name": "plus", "model_version": 1, "request_id": "a"},
     {"id": 1, "timestamps": [{"name": "HTTP_RECV_START", "ns": …}, …]}, …]

Each step of an ensemble, and each model that another one called, is a trace of its own with a `parent_id`. All are
written when the server ends; with a frequency so many at a time, into the file with `.0`, `.1`, … behind its name.
"""

from __future__ import annotations

import itertools
import logging
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from container.trace_settings import TraceSettings
from container.traced import Tracing
from serve.threads import ThreadPerTask

if TYPE_CHECKING:
    from collections.abc import Sequence

    from container.traced import Trace
    from model_handlers.errors import MmeError
    from serve.request import InferenceRequest, Timings

_log = logging.getLogger("mme.trace")
_MOST = 10_000  # traces that are kept in memory, whatever the frequency


class FileTracer(Tracing):
    """Keeps traces and writes them.

    Args:
        path: of the file.
        rate: one request of so many is traced, of those whose client does not say.
        frequency: traces that are written at a time, 0 for all of them at the end.
        count: how many requests are traced, -1 for all.
    """

    def __init__(self, path: str, rate: int, frequency: int, count: int = -1) -> None:
        super().__init__(TraceSettings(on=True, rate=rate, count=count, mode="triton", file=path, frequency=frequency))
        self._path = path
        self._ids = itertools.count(1)
        self._files = itertools.count()
        self._entries: list[dict[str, Any]] = []
        self._traces = 0
        self._writers = ThreadPerTask("traces")

    def end(self, trace: Trace, came: dict[str, Any], request: InferenceRequest | None, error: MmeError | None) -> None:  # noqa: ARG002 - Triton's format has no errors
        """Keep what is known of a request that was executed."""
        last = trace.last
        if last is None or request is None or not self.is_traced(trace):
            return
        done = time.perf_counter_ns()
        epoch = time.time_ns() - done
        protocol = "GRPC" if came.get("rpc.system") == "grpc" else "HTTP"
        number = next(self._ids)
        about: dict[str, Any] = {"model_name": last.model_name, "model_version": int(last.model_version)}
        if request.id:
            about["request_id"] = request.id
        inside = [] if last.timings is None or last.timings.steps is not None else _execution(last.timings)
        times = [
            (f"{protocol}_RECV_START", trace.began),
            (f"{protocol}_RECV_END", trace.began),
            ("REQUEST_START", request.arrival_ns),
            ("QUEUE_START", request.arrival_ns),
            *inside,
            ("INFER_RESPONSE_COMPLETE", inside[-1][1] if inside else done),
            ("REQUEST_END", done),
            (f"{protocol}_SEND_START", inside[-1][1] if inside else done),
            (f"{protocol}_SEND_END", done),
        ]
        self._add(number, about, times, epoch)
        if last.timings is not None:
            self._below(number, last.timings, epoch)
        self._traces += 1
        frequency = self.control.server.frequency
        if self._traces >= (frequency or _MOST):
            self._flush(f"{self._path}.{next(self._files)}")

    def _below(self, parent: int, timings: Timings, epoch: int) -> None:
        """The steps of an ensemble, and the models that were called."""
        called = [(call.model, call.arrival or call.began, call.timings) for call in timings.calls or ()]
        for model, arrival, took in (*(timings.steps or ()), *called):
            if took is None:
                continue
            number = next(self._ids)
            inside = _execution(took)
            shown = inside if took.steps is None else []
            times = [("REQUEST_START", arrival), ("QUEUE_START", arrival), *shown, ("REQUEST_END", inside[-1][1])]
            self._add(number, {"model_name": model, "parent_id": parent}, times, epoch)
            self._below(number, took, epoch)

    def _add(self, number: int, about: dict[str, Any], times: Sequence[tuple[str, int]], epoch: int) -> None:
        stamps = [{"name": name, "ns": epoch + ns} for name, ns in times]
        self._entries += ({"id": number, **about}, {"id": number, "timestamps": stamps})

    def _flush(self, path: str) -> None:
        entries, self._entries, self._traces = self._entries, [], 0
        self._writers.submit(_write, path, entries)

    def close(self) -> None:
        """Write what is left."""
        if self._entries or not next(self._files):
            self._flush(self._path)
        self._writers.shutdown()


def _execution(timings: Timings) -> list[tuple[str, int]]:
    begun = timings.start
    put_in = begun + timings.compute_input
    computed = put_in + timings.compute_infer
    return [
        ("COMPUTE_START", begun),
        ("COMPUTE_INPUT_END", put_in),
        ("COMPUTE_OUTPUT_START", computed),
        ("COMPUTE_END", computed + timings.compute_output),
    ]


def _write(path: str, entries: list[dict[str, Any]]) -> None:
    try:
        Path(path).write_bytes(orjson.dumps(entries))
    except OSError as error:
        _log.error("traces can't be written to %s: %s", path, error.strerror)
