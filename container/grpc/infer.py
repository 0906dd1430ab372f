"""ModelInfer: one request, one response, from bytes to bytes. On the event loop.

A request for a model in memory is decoded, queued and awaited by its own handler; no other task or thread takes part.
One for any other model waits for the load first.
"""

from __future__ import annotations

import asyncio
import functools
from typing import TYPE_CHECKING, Any

from container.codec.classification import classified
from container.codec.effort import takes_long
from container.failures import known
from container.grpc import grpc_service_pb2 as pb
from container.grpc.decode import PLAIN, Decoder, holds_many_strings
from container.grpc.encode import Encoder, placed
from container.grpc.messages import parsed
from container.grpc.traces import follow, headers_of
from container.in_turn import InTurn
from container.read_ahead import by_thread, read_ahead
from container.shared_memory import Regions, Unread
from container.targets import parse_version
from model_handlers.errors import Kind, MmeError

if TYPE_CHECKING:
    from collections.abc import Callable

    from container.forwarding import Forwarding
    from container.grpc.decode import Wanted
    from container.shared_memory import Place
    from container.traced import Following, Tracing
    from model_handlers.config import ModelConfig
    from serve.engine import Engine
    from serve.models.labels import Labels
    from serve.request import Completion, InferenceRequest, InferenceResponse, LoadReport

    Headers = Callable[[], dict[str, str]]


class Codec:
    """The engine's requests and responses as messages, for the methods that carry inference.

    Args:
        engine: who knows what models and their classes are called.
        forwarding: which metadata models see, None for none.
        regions: of shared memory, in which tensors may lie; None for none.
    """

    def __init__(self, engine: Engine, forwarding: Forwarding | None = None, regions: Regions | None = None) -> None:
        self._engine = engine
        self._forwarding = forwarding
        self._regions = Regions() if regions is None else regions
        self._decoder = Decoder(self._regions)
        self._encoder = Encoder()

    def target(self, message: pb.ModelInferRequest) -> tuple[str, int | None]:
        """The registered name of the model, and its version or None.

        Raises:
            MmeError: INVALID_ARGUMENT for a version that is none.
        """
        return self._engine.canonical(message.model_name), parse_version(message.model_version)

    async def decode_later(
        self, message: pb.ModelInferRequest, on_complete: Completion, headers: Headers, place: Place
    ) -> tuple[InferenceRequest, Wanted]:
        """See `decode`; when its large tensors have been read out of shared memory, the first of which lies there."""
        return await read_ahead(self._regions, place, functools.partial(self.decode, message, on_complete, headers))

    async def decode_aside(
        self, message: pb.ModelInferRequest, on_complete: Completion, headers: Headers
    ) -> tuple[InferenceRequest, Wanted]:
        """See `decode`; by a thread, for a message that `holds_many_strings`."""
        regions = self._regions.held(at_once=True)
        return await by_thread(self.decode, message, on_complete, headers, regions)

    def decode(
        self, message: pb.ModelInferRequest, on_complete: Completion, headers: Headers, regions: Regions | None = None
    ) -> tuple[InferenceRequest, Wanted]:
        """See `Decoder.decode`; with the metadata that models see, of those that `headers` gives."""
        request, wanted = self._decoder.decode(message, on_complete, regions)
        if self._forwarding is not None:
            self._forwarding.add(request, headers())
        return request, wanted

    def encode(self, response: InferenceResponse, wanted: Wanted, final: bool | None = None) -> bytes:  # noqa: FBT001 - see Encoder
        """See `Encoder.encode`; with classes in place of tensors, or tensors in shared memory, where that is wanted."""
        if wanted is PLAIN:
            return self._encoder.encode(response, final)
        return self.encoding(response, wanted, final)()

    def encoding(
        self,
        response: InferenceResponse,
        wanted: Wanted,
        final: bool | None = None,  # noqa: FBT001 - see Encoder
    ) -> Callable[[], bytes]:
        """`encode`, to be called on any thread, and after the request is over too."""
        names = self._engine.class_names(response.model_name, response.model_version) if wanted.classes else None
        return functools.partial(self._encode, response, wanted.kept(), names, final)

    def _encode(
        self,
        response: InferenceResponse,
        wanted: Wanted,
        names: tuple[bool, Labels] | None,
        final: bool | None,  # noqa: FBT001 - see Encoder
    ) -> bytes:
        if names is not None:
            batches, labels = names
            response = classified(response, wanted.classes, labels, batches=batches)
        if wanted.places:
            return placed(response, wanted.places, final)
        return self._encoder.encode(response, final)


class Inference:
    """The method over an engine.

    Args:
        engine: who answers.
        codec: who reads and writes messages.
        tracer: what traces requests, None where traces go nowhere.
    """

    def __init__(self, engine: Engine, codec: Codec, tracer: Tracing | None) -> None:
        self._engine = engine
        self._codec = codec
        self._tracer = tracer

    async def infer(self, data: bytes, context: Any) -> bytes:
        """One request; a client that leaves, or whose deadline has come, cancels it.

        Raises:
            MmeError: why there is no response.
        """
        following = None if self._tracer is None else follow(self._tracer, headers_of(context), "ModelInfer")
        if following is None:
            return await self._answer(data, context, None)
        try:
            answer = await self._answer(data, context, following)
        except asyncio.CancelledError:
            following.over(MmeError(Kind.CANCELLED, "the client left"))
            raise
        except MmeError as error:
            following.over(error)
            raise
        following.over(None)
        return answer

    async def _answer(self, data: bytes, context: Any, following: Following | None) -> bytes:
        message = parsed(pb.ModelInferRequest, data)
        name, version = self._codec.target(message)
        call = _UnaryCall(self._codec)
        headers = functools.partial(headers_of, context)
        try:
            if holds_many_strings(message, len(data)):
                request, call.wanted = await self._codec.decode_aside(message, call.complete, headers)
            else:
                request, call.wanted = self._codec.decode(message, call.complete, headers)
        except Unread as unread:
            request, call.wanted = await self._codec.decode_later(message, call.complete, headers, unread.place)
        if following is not None:
            following.follow(request)
        try:
            report = await self._submit(name, version, request)
            if report is not None and following is not None:
                following.loaded(report)
            return await call.answer
        except asyncio.CancelledError:
            request.cancel()
            raise

    async def _submit(self, name: str, version: int | None, request: InferenceRequest) -> LoadReport | None:
        def make(config: ModelConfig) -> InferenceRequest:
            _refuse_decoupled(config)
            return request

        try:
            if self._engine.submit(name, version, request):
                return None
        except MmeError as error:
            if error.kind is Kind.INVALID_ARGUMENT:
                async with self._engine.leased(name, version) as model:
                    _refuse_decoupled(model.config)
            raise
        return await self._engine.submit_made(name, version, make)


class _UnaryCall:
    """What becomes of one request.

    Attributes:
        answer: its bytes or its error.
        wanted: how the client wants them. Set once the request is decoded.
    """

    __slots__ = ("_codec", "answer", "wanted")

    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        self.answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self.wanted: Wanted

    def complete(self, _request: InferenceRequest, result: InferenceResponse | MmeError | None) -> None:
        """Take the response or the error, unless nobody waits for it any more."""
        if self.answer.done():
            return
        if result is None or isinstance(result, MmeError):
            self.answer.set_exception(result or MmeError(Kind.EXECUTION_FAILED, "the model sent no response"))
            return
        try:
            if takes_long(result, self.wanted.places, self.wanted.classes):
                InTurn().work_out(self._codec.encoding(result, self.wanted), self._encoded)
            else:
                self.answer.set_result(self._codec.encode(result, self.wanted))
        except Exception as error:  # noqa: BLE001 - an answer that can't be written must not keep its batch from theirs
            self.answer.set_exception(known(error))

    def _encoded(self, written: asyncio.Future[bytes]) -> None:
        """A thread has written the answer, or could not."""
        error = written.exception()
        if self.answer.done():
            return
        if error is None:
            self.answer.set_result(written.result())
        else:
            self.answer.set_exception(known(error) if isinstance(error, Exception) else error)


def _refuse_decoupled(config: ModelConfig) -> None:
    if config.decoupled:
        raise MmeError(Kind.UNSUPPORTED, "ModelInfer RPC doesn't support models with decoupled transaction policy")
