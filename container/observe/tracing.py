"""Traces of requests: to which trace one belongs, which are traced, and the span that tells how one went. On the loop.

The trace that a request belongs to is told by its headers:

    traceparent                            W3C's header, from clients that reach this server themselves
    X-Amzn-SageMaker-Custom-Attributes     SageMaker hands on no other header of a client's; anywhere in it one of
                                           00-<trace id>-<span id>-01                       a traceparent
                                           Root=1-<time>-<id>;Parent=<span id>;Sampled=1    what AWS X-Ray says
                                           trace_id=<trace id>                              32 hexadecimal digits
    X-Amzn-Trace-Id                        X-Ray's header, from load balancers

What it went through is one span, with those below it that its way had; times are those of the statistics:

    infer          from its last byte read to its answer's last byte written
      load           until its model was in memory, where it had to wait for that
      queue          until an instance took it
      batch          its batch is put together
      compute        the model executes
      scatter        outputs are given to the requests of the batch

Of an ensemble's request each step is a span, called as its model, with the last four of these below it. So is each call
that a model makes of another one, below its `compute`; where a batch of several requests was executed each of them has
it. `otel` sends spans. A `FileTracer` writes them in Triton's own format, a file of JSON: each step of an
ensemble, and each model that another one called, is a trace of its own with a `parent_id`. All are written when the
server ends; with a frequency so many at a time, into the file with `.0`, `.1`, … behind its name. A worker that takes
the place of another one goes on behind what that one has written.
"""

from __future__ import annotations

import itertools
import logging
import re
import stat
import time
from abc import ABC, abstractmethod
from concurrent.futures import wait
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import orjson

from container.control.routes import shown
from container.inference.errors import INFERENCE_ID, TARGET_MODEL, name_of
from container.inference.limits import THREADS
from container.observe.trace_settings import TraceControl, TraceSettings
from container.steps import CallStep
from serve.request import InferenceResponse

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from concurrent.futures import Future

    from container.http1 import HttpRequest
    from container.inference.call import Call
    from model_handlers.config.model_config import ModelConfig
    from model_handlers.errors import MmeError
    from serve.request import Called, InferenceRequest, LoadReport, Timings


_now = time.perf_counter_ns


class Trace(CallStep):
    """A traced request: what is remembered of it until it has been answered. Its tracer hears of that once."""

    def __init__(self, tracer: Tracing, origin: Origin | None, *, decided: bool) -> None:
        self._tracer: Tracing | None = tracer
        self.origin = origin
        self.decided = decided  # whether it is traced for certain; else its model decides, once it is known
        self.came: dict[str, Any] = {}  # by which way
        self.began = _now()
        self.request: InferenceRequest | None = None
        self.model = ("", 0)  # name and version of the one that was asked, once it is over
        self.last: InferenceResponse | None = None
        self.responses = 0
        self.timings: Timings | None = None  # of the last, or of an ensemble's steps until it failed, once it is over
        self.report: LoadReport | None = None  # of the load that it had to wait for
        self.ids = (0, 0)  # of the trace and of the request's span in it, where models were told of them

    def made(self, call: Call, request: InferenceRequest, config: ModelConfig) -> None:  # noqa: ARG002
        if self._tracer is not None:
            self.request = request
            request.trace = self._tracer.handed_on(self)

    def responded(self, call: Call, response: InferenceResponse) -> None:  # noqa: ARG002
        if self._tracer is not None:
            self.responses += 1
            self.last = response

    def completed(self, call: Call, result: InferenceResponse | MmeError | None) -> None:
        if isinstance(result, InferenceResponse):
            self.responded(call, result)

    def over(self, call: Call, error: MmeError | None) -> None:
        tracer, self._tracer = self._tracer, None
        if tracer is None:
            return
        if call.report is not None and call.report.load:
            self.report = call.report
        request = self.request
        if request is not None and request.asked is not None:
            self.model = request.asked.name, request.asked.version
            self.timings = request.came_to if self.last is None else self.last.timings
        tracer.end(self, error)
        self.request = self.last = None  # which know us


def follow(tracer: Tracing, exchange: HttpRequest) -> Trace | None:
    headers = exchange.headers
    trace = tracer.begin(headers)
    if trace is not None:
        trace.came |= {"http.request.method": exchange.method, "url.path": shown(exchange.target)}
        if TARGET_MODEL in headers:
            trace.came["aws.sagemaker.target_model"] = name_of(headers[TARGET_MODEL])
        if INFERENCE_ID in headers:
            trace.came["aws.sagemaker.inference_id"] = headers[INFERENCE_ID]
    return trace


def follow_rpc(tracer: Tracing, metadata: Mapping[str, str], method: str) -> Trace | None:
    trace = tracer.begin(metadata)
    if trace is not None:
        trace.came |= {"rpc.system": "grpc", "rpc.service": "inference.GRPCInferenceService", "rpc.method": method}
    return trace


class Tracing(ABC):
    """Decides which requests are traced, by its `control`, and hears how they went."""

    def __init__(self, first: TraceSettings) -> None:
        self.control = TraceControl(first, sends=True)

    def begin(self, headers: Mapping[str, str]) -> Trace | None:
        """A trace of the request, None where it is not traced: what its client says counts, else the rate."""
        control = self.control
        if not control.on:
            return None
        found = origin(headers)
        decided = not control.by_model
        if decided and not control.traces("", None if found is None else found.sampled):
            return None
        return Trace(self, found, decided=decided)

    def handed_on(self, trace: Trace) -> str:  # noqa: ARG002 - for tracers that send spans
        """What models are told of it, see `ModelRequest`."""
        return ""

    def end(self, trace: Trace, error: MmeError | None) -> None:
        sampled = None if trace.origin is None else trace.origin.sampled
        if trace.decided or self.control.traces(trace.model[0], sampled):
            done = _now()
            self.write(trace, request_span(trace, done), time.time_ns() - done, error)

    def write(self, trace: Trace, root: Phase, epoch: int, error: MmeError | None) -> None:  # noqa: B027 - `end` may do it
        """Tell of a request by its span; `epoch` is what its times lack to those of `time.time_ns()`."""

    @abstractmethod
    def close(self) -> None:
        """Nothing more comes. May block: not for the loop."""


_HEADERS = ("traceparent", "x-amzn-sagemaker-custom-attributes", "x-amzn-trace-id")
_SAMPLED = 1  # the bit of W3C's flags

_W3C = re.compile(r"(?<![0-9a-f-])(?!ff)[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(?![0-9a-f])")
_ROOT = re.compile(r"\bRoot=1-([0-9a-f]{8})-([0-9a-f]{24})\b")
_PARENT = re.compile(r"\bParent=([0-9a-f]{16})\b")
_NOT_SAMPLED = re.compile(r"\bSampled=0\b")
_TRACE_ID = re.compile(r"\btrace[-_]?id\"?\s*[=:]\s*\"?([0-9a-f]{32})\b", re.IGNORECASE)


class Origin(NamedTuple):
    """What a request says of its trace."""

    trace_id: int
    span_id: int  # that it was made in; 0 where it names none
    sampled: bool  # whether that trace is recorded


def origin(headers: Mapping[str, str]) -> Origin | None:
    """The trace that a request belongs to, None where no header tells; ids of zeros only are none."""
    for name in _HEADERS:
        text = headers.get(name)
        found = _origin_in(text) if text else None
        if found is not None and found.trace_id:
            return found
    return None


def _origin_in(text: str) -> Origin | None:
    if match := _W3C.search(text):
        return Origin(int(match[1], 16), int(match[2], 16), bool(int(match[3], 16) & _SAMPLED))
    if match := _ROOT.search(text):
        parent = _PARENT.search(text)
        return Origin(int(match[1] + match[2], 16), int(parent[1], 16) if parent else 0, not _NOT_SAMPLED.search(text))
    if match := _TRACE_ID.search(text):
        return Origin(int(match[1], 16), 0, sampled=True)
    return None


MODEL, VERSION, REQUEST_ID = "triton.model_name", "triton.model_version", "triton.request_id"


class Phase(NamedTuple):
    """One span: name, begin and end by `perf_counter_ns()`, attributes, and what is below it."""

    name: str
    begin: int
    end: int
    attributes: dict[str, Any]
    below: Sequence[Phase] = ()
    arrival: int = 0  # of a request to a model, when that accepted it


def request_span(trace: Trace, done: int) -> Phase:
    request, attributes = trace.request, dict(trace.came)
    if trace.model[0]:
        attributes |= {MODEL: trace.model[0], VERSION: str(trace.model[1])}
    if trace.last is not None:
        attributes["mme.responses"] = trace.responses
    if request is None:
        return Phase("infer", trace.began, done, attributes)
    if request.id:
        attributes[REQUEST_ID] = request.id
    return Phase("infer", trace.began, done, attributes, tuple(_phases(trace, request, done)), request.arrival_ns)


def _phases(trace: Trace, request: InferenceRequest, done: int) -> Iterator[Phase]:
    """What a request went through: name, begin and end, attributes."""
    if trace.report is not None:
        yield _load(trace.report, trace.began, request.arrival_ns or done)
    if trace.timings is not None:
        yield from _execution(request.arrival_ns, trace.timings)
    elif request.arrival_ns:  # it never got further, or was answered from the cache of responses
        yield Phase("queue", request.arrival_ns, done, {})


def _load(report: LoadReport, began: int, ended: int) -> Phase:
    cost: dict[str, Any] = {
        "mme.download_ms": report.download / 1e6,
        "mme.load_ms": report.load / 1e6,
        "mme.evicted": list(report.evicted),
    }
    return Phase("load", began, ended, cost)


def _execution(arrival: int, timings: Timings) -> Iterator[Phase]:
    """Queue, batch, compute and scatter; of an ensemble each step, and those of it."""
    for step in timings.steps or ():
        below = tuple(_execution(step.arrival, step.timings))
        about: dict[str, Any] = {MODEL: step.model, VERSION: step.version}
        end = max((phase.end for phase in below), default=step.arrival)
        yield Phase(step.model, step.arrival, end, about, below, step.arrival)
    if timings.steps is not None:
        return
    yield Phase("queue", arrival, timings.start, {})
    at = timings.start
    batch: dict[str, Any] = {"mme.batch_size": timings.size} if timings.size else {}
    for name, took_ns in (
        ("batch", timings.compute_input),
        ("compute", timings.compute_infer),
        ("scatter", timings.compute_output),
    ):
        below = tuple(map(_call, timings.calls or ())) if name == "compute" else ()
        yield Phase(name, at, at + took_ns, batch, below)
        at += took_ns


def _call(called: Called) -> Phase:
    """A call of another model, with the load that it waited for, and what became of it then."""
    attributes: dict[str, Any] = {MODEL: called.model}
    if called.version:
        attributes[VERSION] = called.version
    if called.id:
        attributes[REQUEST_ID] = called.id
    if called.error:
        attributes["error.type"] = called.error
    arrived = called.arrival or called.ended
    below = [_load(called.report, called.began, arrived)] if called.report is not None else []
    if called.timings is not None:
        below += _execution(arrived, called.timings)
    return Phase(called.model, called.began, called.ended, attributes, below, called.arrival or called.began)


_log = logging.getLogger("mme.trace")
_MOST = 10_000  # traces that are kept in memory, whatever the frequency


class FileTracer(Tracing):
    """Keeps traces and writes them; `since` is when the server began: a file from before may be overwritten."""

    def __init__(self, path: str, first: TraceSettings, since: float) -> None:
        super().__init__(replace(first, mode="triton", file=path))
        self._path = path
        self._since = since
        self._ids = itertools.count(1)
        self._files = itertools.count()
        self._entries: list[dict[str, Any]] = []
        self._traces = 0
        self._writing: list[Future[None]] = []

    def end(self, trace: Trace, error: MmeError | None) -> None:
        if trace.request is not None and trace.request.arrival_ns:
            super().end(trace, error)

    def write(self, _trace: Trace, root: Phase, epoch: int, _error: MmeError | None) -> None:
        """Keep the entries of a request; of one that failed, how long that took. Triton's format has no errors."""
        self._add(root, epoch, "GRPC" if root.attributes.get("rpc.system") == "grpc" else "HTTP")
        self._traces += 1
        if self._traces >= (self.control.server.frequency or _MOST):
            self._flush()

    def _add(self, phase: Phase, epoch: int, protocol: str = "", parent: int = 0, request_id: str = "") -> None:
        """The entries of a request to a model, then of those that it has made; of "" for a protocol within another."""
        number, told = next(self._ids), phase.attributes
        request_id = told.get(REQUEST_ID, request_id)
        about = {"id": number, "model_name": told.get(MODEL, ""), "model_version": int(told.get(VERSION, 0))}
        self._entries.append(
            about | ({"request_id": request_id} if request_id else {}) | ({"parent_id": parent} if parent else {})
        )
        parts = {each.name: each for each in phase.below if MODEL not in each.attributes}
        inside: list[tuple[str, int]] = []
        if "batch" in parts:
            batch, compute, scatter = parts["batch"], parts["compute"], parts["scatter"]
            inside = [("COMPUTE_START", batch.begin), ("COMPUTE_INPUT_END", batch.end)]
            inside += [("COMPUTE_OUTPUT_START", compute.end), ("COMPUTE_END", scatter.end)]
        done = inside[-1][1] if inside else phase.end
        times = [("REQUEST_START", phase.arrival), ("QUEUE_START", phase.arrival), *inside, ("REQUEST_END", done)]
        if protocol:
            times[-1:] = [("INFER_RESPONSE_COMPLETE", done), ("REQUEST_END", phase.end)]
            times = [(f"{protocol}_RECV_START", phase.begin), (f"{protocol}_RECV_END", phase.begin), *times]
            times += [(f"{protocol}_SEND_START", done), (f"{protocol}_SEND_END", phase.end)]
        self._entries.append({"id": number, "timestamps": [{"name": name, "ns": epoch + ns} for name, ns in times]})
        for each in (*phase.below, *(parts["compute"].below if inside else ())):
            if VERSION in each.attributes and any(part.name != "load" for part in each.below):
                self._add(each, epoch, parent=number, request_id=request_id if each in phase.below else "")

    def _flush(self, *, whole: bool = False) -> None:
        """Have a thread write what there is into the next file with a number that no other worker has written."""
        paths = (f"{self._path}.{number}" for number in self._files)
        path = self._path if whole else next(path for path in paths if not _written_since(self._since, path))
        self._writing = [each for each in self._writing if not each.done()]
        self._writing.append(THREADS.submit(_write, path, self._entries))
        self._entries, self._traces = [], 0

    def close(self) -> None:
        """Write what is left: where so many are written at a time, behind the others of these."""
        is_taken = _written_since(self._since, self._path)
        if self._entries and (self.control.server.frequency or is_taken):
            self._flush()
        elif not is_taken and (self._entries or not next(self._files)):
            self._flush(whole=True)
        wait(self._writing)


def _written_since(since: float, path: str) -> bool:
    try:
        status = Path(path).stat()
        return stat.S_ISREG(status.st_mode) and status.st_mtime >= since
    except OSError:  # there is none, or its writer tells
        return False


def _write(path: str, entries: list[dict[str, Any]]) -> None:
    try:
        Path(path).write_bytes(orjson.dumps(entries))
    except (OSError, TypeError) as error:  # the latter of an id with half a character
        _log.error("traces can't be written to %s: %s", path, getattr(error, "strerror", None) or error)
