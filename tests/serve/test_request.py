"""A request, its one answer and the end of its lease."""

import numpy as np
import pytest

from model_handlers.errors import Kind, MmeError
from model_handlers.tensor import BYTES, FP32
from serve.request import InferenceRequest, InferenceResponse, Layout

LAYOUT = Layout((("x", FP32, (2, 3)), ("names", BYTES, (1,))), ("y",))


class Told:
    """Remembers what happened, in order; may fail when told the answer."""

    def __init__(self, *, fails=False):
        self.events = []
        self._fails = fails

    def complete(self, request, result):
        """The request's completion."""
        self.events.append(("answer", request, result))
        if self._fails:
            raise RuntimeError("nobody listens")

    def release(self):
        """The lease's end."""
        self.events.append("released")


def request_for(told, **fields):
    """A request that reports to `told` and holds its lease."""
    request = InferenceRequest(LAYOUT, [np.zeros((2, 3), "f4")], told.complete, **fields)
    request.lease = told
    return request


@pytest.mark.parametrize(
    "result", [InferenceResponse("m", "1", []), MmeError(Kind.INTERNAL, "no")], ids=["response", "error"]
)
def test_the_answer_comes_before_the_lease_ends(result):
    """The answer may look into the model's memory, so the model stays until the answer was handed over."""
    told = Told()
    request = request_for(told)
    request.resolve(result)

    assert told.events == [("answer", request, result), "released"]
    assert request.lease is None


def test_a_failing_completion_still_ends_the_lease(caplog):
    """An answer that can't be handed over is logged with its reason; the model does not stay in memory for it."""
    told = Told(fails=True)
    request_for(told, id="7").resolve(InferenceResponse("m", "1", []))

    assert told.events[1:] == ["released"]
    [record] = caplog.records
    assert "'7'" in record.getMessage()
    assert str(record.exc_info[1]) == "nobody listens"


def test_a_request_without_a_lease_is_answered():
    """Not everything that is executed was leased: warm-up and tests are not."""
    told = Told()
    request = request_for(told)
    request.lease = None
    request.resolve(InferenceResponse("m", "1", []))

    assert len(told.events) == 1


def test_a_new_request_is_nobodys_yet():
    """Before a model accepts it a request has a batch size of one, no time limit, and nobody left."""
    request = InferenceRequest(LAYOUT, [], Told().complete)

    assert (request.id, request.parameters, request.timeout_us) == ("", None, 0)
    assert (request.cancelled, request.lease, request.batch_size, request.deadline_ns) == (False, None, 1, 0)


def test_a_request_shows_its_layout_and_no_data():
    """Its `repr` is fit for a log line: names, types and shapes."""
    assert repr(request_for(Told(), id="7")) == "<InferenceRequest 7 <Layout x:FP32[2, 3], names:BYTES[1] -> y>>"
    assert repr(Layout((), ())) == "<Layout  -> all>"


def test_layouts_are_told_apart_by_identity():
    """A model remembers a layout it has checked by the object, so that looking one up costs no comparison."""
    assert Layout((), ()) != Layout((), ())
    assert len({LAYOUT, LAYOUT}) == 1
