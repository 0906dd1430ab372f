"""How a method's error ends its call."""

import asyncio
import gc

import grpc
import pytest

from container.grpc.rpc import Calls, Method, Rpc
from container.http2.connection import Connection, Keepalive, drain
from container.inference.request_memory import RequestMemory
from container.inference.turn_budget import Turns
from container.process.resources import ConnectionCap
from model_handlers.errors import Kind, MmeError
from tests.container.http2.conftest import OPENING, Life
from tests.waiting import until


def test_what_is_refused_is_gone_at_once():
    """Nothing of a call waits for the collector of garbage, its message least of all."""

    async def refuses(_data, _context):
        raise MmeError(Kind.UNKNOWN_MODEL, "no such model")

    methods = {b"/service/Method": Method(unary=refuses)}

    async def run():
        loop, open_, calls = asyncio.get_running_loop(), set(), Calls(methods, 1 << 20, "", RequestMemory(1 << 30))
        keepalive, turns, cap = Keepalive(loop), Turns(loop.call_soon), ConnectionCap(100)

        def connection():
            return Connection(loop, calls.begin, open_, keepalive, turns, cap)

        server = await loop.create_server(connection, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            for _ in range(3):
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await channel.unary_unary("/service/Method")(b"")
                assert (refused.value.code(), refused.value.details()) == (grpc.StatusCode.NOT_FOUND, "no such model")
            assert not [each for each in gc.get_objects() if type(each) is Rpc]
        server.close()
        while open_:
            for each in list(open_):
                each.abort()
            await asyncio.sleep(0.001)

    gc.collect()
    gc.disable()
    try:
        asyncio.run(run())
    finally:
        gc.enable()


async def test_a_drain_meets_connections_that_were_being_made():
    """They end, and it does."""
    loop = asyncio.get_running_loop()
    early, late = Life(loop, notice=0.0), Life(loop, notice=0.0)
    draining = asyncio.ensure_future(drain(early.all, 60))
    await early.sent()
    late.send(OPENING)
    early.all.add(late.connection)
    early.connection.connection_lost(None)
    await until(lambda: late.wire.closed)
    late.connection.connection_lost(None)
    early.all.discard(late.connection)
    await draining
    assert not late.wire.aborted
