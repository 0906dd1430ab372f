"""Traces in Triton's own format: a file of JSON, `--trace-config triton,file=…`. On the event loop; a thread writes.

    [{"id": 1, "model_name": "plus", "model_version": 1, "request_id": "a"},
     {"id": 1, "timestamps": [{"name": "HTTP_RECV_START", "ns": …}, …]}, …]

Each step of an ensemble, and each model that another one called, is a trace of its own with a `parent_id`. All are
written when the server ends; with a frequency so many at a time, into the file with `.0`, `.1`, … behind its name. A
worker that takes the place of another one goes on behind what that one has written. Of the tensors of requests a copy
is kept until then, which the thread writes as text.
"""

from __future__ import annotations

import itertools
import logging
import stat
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from container.traces.traced import Tracing
from model_handlers.tensor import BF16, BYTES, size_of
from serve.request import MOST_STEPS
from serve.threads import ThreadPool

if TYPE_CHECKING:
    from collections.abc import Sequence

    from container.traces.settings import TraceSettings
    from container.traces.traced import Trace
    from model_handlers.errors import MmeError
    from model_handlers.tensor import Array, DataType
    from serve.request import InferenceRequest, InferenceResponse, Timings

_log = logging.getLogger("mme.trace")
_MOST = 10_000  # traces that are kept in memory, whatever the frequency
_MOST_BYTES = 64 << 20  # of tensors that are


class _Kept:
    """A tensor of a request, as it was.

    Args:
        activity: what Triton calls this moment of it.
        name, data_type, array: what it is.

    Attributes:
        size: bytes of its elements.
    """

    def __init__(self, activity: str, name: str, data_type: DataType, array: Array) -> None:
        self.activity = activity
        self.name = name
        self.data_type = data_type
        self.array = array.copy()
        self.size = size_of(array)

    def as_document(self) -> dict[str, str]:
        """As Triton writes it: elements and dimensions between commas."""
        return {
            "name": self.name,
            "data": ",".join(_elements(self.array, self.data_type)),
            "shape": ",".join(map(str, self.array.shape)),
            "dtype": self.data_type.name,
        }


class FileTracer(Tracing):
    """Keeps traces and writes them.

    Args:
        path: of the file.
        first: what is traced at first.
        since: when the server began, as `time.time()` counts; a file from before may be overwritten.
    """

    def __init__(self, path: str, first: TraceSettings, since: float) -> None:
        super().__init__(replace(first, mode="triton", file=path))
        self._path = path
        self._since = since
        self._ids = itertools.count(1)
        self._files = itertools.count()
        self._entries: list[dict[str, Any]] = []
        self._traces = self._bytes = 0
        self._writers = ThreadPool("traces", idle_seconds=0)

    def responded(self, trace: Trace, response: InferenceResponse) -> None:
        """Keep the tensors of a response, if any are traced; of endless ones those of the first."""
        if len(trace.tensors) < MOST_STEPS and self.control.of(response.model_name).tensors:
            trace.tensors += _outputs(response)

    @property
    def watches(self) -> bool:
        """Whether any tensors are traced, of whatever model."""
        return self.control.tensors

    def seen(self, sent: InferenceRequest, response: InferenceResponse) -> list[_Kept]:
        """The tensors of a step, in and out."""
        return [*_inputs(sent), *_outputs(response)]

    def end(self, trace: Trace, came: dict[str, Any], request: InferenceRequest | None, error: MmeError | None) -> None:  # noqa: ARG002 - Triton's format has no errors
        """Keep what is known of a request that a model has accepted; of one that failed, how long that took."""
        if request is None or not request.arrival_ns or not self.is_traced(trace):
            return
        name, version = trace.model
        timings = trace.timings
        done = time.perf_counter_ns()
        epoch = time.time_ns() - done
        settings = self.control.of(name)
        protocol = "GRPC" if came.get("rpc.system") == "grpc" else "HTTP"
        number = next(self._ids)
        about = _about(name, version, request.id)
        inside = [] if timings is None or timings.steps is not None else _execution(timings)
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
        self._add(number, about, times if settings.timestamps else (), epoch)
        if settings.tensors:
            self._keep(number, [*_inputs(request), *trace.tensors])
        if timings is not None:
            self._below(number, request.id, timings, epoch, settings)
        self._traces += 1
        if self._traces >= (self.control.server.frequency or _MOST) or self._bytes > _MOST_BYTES:
            self._flush_part()

    def _keep(self, number: int, tensors: Sequence[_Kept]) -> None:
        self._entries += [{"id": number, "activity": each.activity, "tensor": each} for each in tensors]
        self._bytes += sum(each.size for each in tensors)

    def _below(self, parent: int, request_id: str, timings: Timings, epoch: int, settings: TraceSettings) -> None:
        """The steps of an ensemble, whose requests have its id, and the models that were called."""
        for step in timings.steps or ():
            about = _about(step.model, step.version, request_id, parent)
            number = self._inner(about, step.arrival, step.timings, epoch, settings)
            if settings.tensors and isinstance(step.seen, list):
                self._keep(number, step.seen)
        for call in timings.calls or ():
            if call.timings is not None:
                about = _about(call.model, call.version, call.id, parent)
                self._inner(about, call.arrival or call.began, call.timings, epoch, settings)

    def _inner(self, about: dict[str, Any], arrival: int, timings: Timings, epoch: int, settings: TraceSettings) -> int:
        number, inside = next(self._ids), _execution(timings)
        shown = inside if timings.steps is None else []
        times = [("REQUEST_START", arrival), ("QUEUE_START", arrival), *shown, ("REQUEST_END", inside[-1][1])]
        self._add(number, about, times if settings.timestamps else (), epoch)
        self._below(number, about.get("request_id", ""), timings, epoch, settings)
        return number

    def _add(self, number: int, about: dict[str, Any], times: Sequence[tuple[str, int]], epoch: int) -> None:
        self._entries.append({"id": number, **about})
        if times:
            stamps = [{"name": name, "ns": epoch + ns} for name, ns in times]
            self._entries.append({"id": number, "timestamps": stamps})

    def _flush_part(self) -> None:
        self._flush(self._next())

    def _next(self) -> str:
        """The next file with a number that no other worker has written."""
        path = f"{self._path}.{next(self._files)}"
        while _written_since(self._since, path):
            path = f"{self._path}.{next(self._files)}"
        return path

    def _flush(self, path: str) -> None:
        entries, self._entries, self._traces, self._bytes = self._entries, [], 0, 0
        self._writers.submit(_write, path, entries)

    def close(self) -> None:
        """Write what is left: where so many are written at a time, behind the others of these."""
        is_taken = _written_since(self._since, self._path)
        if self._entries and (self.control.server.frequency or is_taken):
            self._flush_part()
        elif not is_taken and (self._entries or not next(self._files)):
            self._flush(self._path)
        self._writers.shutdown()


def _about(model: str, version: str | int, request_id: str, parent: int = 0) -> dict[str, Any]:
    """What a trace says of its request, as Triton does: an id and a parent only where there is one."""
    about: dict[str, Any] = {"model_name": model, "model_version": int(version)}
    if request_id:
        about["request_id"] = request_id
    if parent:
        about["parent_id"] = parent
    return about


def _inputs(request: InferenceRequest) -> list[_Kept]:
    return [
        _Kept("TENSOR_QUEUE_INPUT", name, data_type, array)
        for (name, data_type, _), array in zip(request.layout.inputs, request.inputs, strict=True)
    ]


def _outputs(response: InferenceResponse) -> list[_Kept]:
    return [_Kept("TENSOR_BACKEND_OUTPUT", *output) for output in response.outputs]


def _elements(array: Array, data_type: DataType) -> list[str]:
    """Each as C++ prints it, which Triton does; of BF16 there is nothing to see there either."""
    elements = array.ravel().tolist()
    if data_type is BF16:
        return []
    if data_type is BYTES or array.dtype.kind not in "biuf":
        return [f'"{_text(each)}"' for each in elements]
    return [f"{each:.6g}" for each in elements] if array.dtype.kind == "f" else [str(int(each)) for each in elements]


def _text(element: object) -> str:
    raw = element if isinstance(element, bytes) else str(element).encode(errors="replace")
    return raw.decode(errors="replace")


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


def _written_since(since: float, path: str) -> bool:
    try:
        status = Path(path).stat()
        return stat.S_ISREG(status.st_mode) and status.st_mtime >= since
    except OSError:  # there is none, or whoever writes it tells
        return False


def _write(path: str, entries: list[dict[str, Any]]) -> None:
    try:
        Path(path).write_bytes(orjson.dumps(entries, default=_Kept.as_document))
    except OSError as error:
        _log.error("traces can't be written to %s: %s", path, error.strerror)
    except Exception:  # noqa: BLE001 - nobody else hears of it
        _log.exception("traces can't be written to %s", path)
