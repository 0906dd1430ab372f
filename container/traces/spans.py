"""What a traced request went through: one span, with those below it that its way had. PURE.

    infer          from its last byte read to its answer's last byte written
      load           until its model was in memory, where it had to wait for that
      queue          until an instance took it
      batch          its batch is put together
      compute        the model executes
      scatter        outputs are given to the requests of the batch

Of an ensemble's request each step is a span, called as its model, with the last four of these below it. So is each call
that a model makes of another one, below its `compute`; where a batch of several requests was executed each of them has
it. Times are those of the statistics.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from container.traces.traced import Trace
    from serve.request import Called, InferenceRequest, LoadReport, Timings

MODEL, VERSION, REQUEST_ID = "triton.model_name", "triton.model_version", "triton.request_id"


class Phase(NamedTuple):
    """One span: name, begin and end by `perf_counter_ns()`, attributes, and what is below it.

    Attributes:
        arrival: of a request to a model, when that accepted it.
    """

    name: str
    begin: int
    end: int
    attributes: dict[str, Any]
    below: Sequence[Phase] = ()
    arrival: int = 0


def request_span(trace: Trace, came: dict[str, Any], request: InferenceRequest | None, done: int) -> Phase:
    """The span of a request that is over; `came` tells by which way it came."""
    attributes = came | dict(_attributes(trace, request))
    if request is None:
        return Phase("infer", trace.began, done, attributes)
    return Phase("infer", trace.began, done, attributes, tuple(_phases(trace, request, done)), request.arrival_ns)


def _attributes(trace: Trace, request: InferenceRequest | None) -> Iterator[tuple[str, Any]]:
    """What is known of a request, under Triton's names."""
    name, version = trace.model
    if name:
        yield MODEL, name
        yield VERSION, str(version)
    if trace.last is not None:
        yield "mme.responses", trace.responses
    if request is not None and request.id:
        yield REQUEST_ID, request.id


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
