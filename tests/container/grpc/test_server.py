"""How a method's error ends its call."""

import asyncio
import gc

import grpc
import pytest

from container.grpc.server import _told
from model_handlers.errors import Kind, MmeError


def test_what_is_refused_is_gone_at_once():
    """Nothing of a call waits for the collector of garbage, its message least of all."""

    async def refuses(_data, _context):
        raise MmeError(Kind.UNKNOWN_MODEL, "no such model")

    async def run():
        server = grpc.aio.server()
        method = grpc.unary_unary_rpc_method_handler(_told(refuses))
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("service", {"Method": method}),))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            for _ in range(3):
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await channel.unary_unary("/service/Method")(b"")
                assert (refused.value.code(), refused.value.details()) == (grpc.StatusCode.NOT_FOUND, "no such model")
        await server.stop(None)

    gc.collect()
    gc.disable()
    try:
        asyncio.run(run())
        assert not [each for each in gc.get_objects() if type(each).__name__ == "_ServicerContext"]
    finally:
        gc.enable()
