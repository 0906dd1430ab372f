"""The time limit of requests: who is told, and when its clock rests."""

import asyncio

from container.inference.limits import RequestLimit
from container.settings import Mode
from model_handlers.errors import Kind


class Request:
    """One under way."""

    def __init__(self):
        self.told = asyncio.get_running_loop().create_future()

    def expire(self, error):
        """As promised."""
        self.told.set_result(error)


async def test_those_are_told_that_are_neither_answered_nor_renewed_in_time():
    """One that is over is never told, and one with a response has the whole time again."""
    limit = RequestLimit(0.1, asyncio.get_running_loop())
    waits, over, streams = Request(), Request(), Request()
    for request in (waits, over, streams):
        limit.begin(request)
    limit.under_way.pop(over)
    while not waits.told.done():
        limit.renew(streams)
        await asyncio.sleep(0.005)
    error = waits.told.result()
    assert error.kind is Kind.TIMED_OUT
    assert "within 0.1 s" in error.message
    assert not streams.told.done()
    await streams.told
    limit.renew(streams)  # whose response was on its way
    assert "0 under way" in repr(limit)
    assert not over.told.done()


def test_a_request_whose_model_takes_too_long_to_load_is_a_504(start, repository):
    """The load goes on, and the next request finds the model."""
    server = start(mode=Mode.REPOSITORY, model_repository=repository, load_models=("arithmetic",), request_timeout=0.2)
    ones = [{"name": "IN", "shape": [1], "datatype": "FP32", "data": [1]}]
    with server.loads_held_up():
        late = server.infer("echo-FP32", {"inputs": ones})
    assert late.status == 504
    assert "server's limit of a request (MME_REQUEST_TIMEOUT)" in late.error
