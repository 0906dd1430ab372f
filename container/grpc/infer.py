"""ModelInfer: one request, one response, from bytes to bytes. On the event loop.

A request for a model in memory is decoded and queued in the same turn of the loop in which it came, and answered in the
one in which its batch ends; no task or thread takes part. One for any other model waits for the load first.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from container.codec.classification import classified
from container.codec.effort import takes_long
from container.control.targets import parse_version
from container.grpc import grpc_service_pb2 as pb
from container.grpc.decode import PLAIN, Decoder, holds_many_strings
from container.grpc.encode import Encoder, placed
from container.grpc.messages import parsed
from container.grpc.rpc import refuse
from container.grpc.traces import follow, headers_of
from container.inference.errors import known
from container.inference.in_turn import InTurn
from container.inference.read_ahead import by_thread, read_ahead
from container.steps.shared_memory import Regions, Unread
from model_handlers.errors import Kind, MmeError

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Awaitable, Callable, Coroutine

    from container.grpc.decode import Remembered, Wanted
    from container.grpc.rpc import Rpc
    from container.inference.request_limit import RequestLimit
    from container.steps.restrictions import Forwarding
    from container.traces.traced import Following, Tracing
    from model_handlers.config.model_config import ModelConfig
    from serve.engine import Engine
    from serve.model.warmup import Labels
    from serve.request import Completion, InferenceRequest, InferenceResponse, LoadReport

    Headers = Callable[[], dict[str, str]]
    Decoded = tuple[InferenceRequest, Wanted]


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

    def target(self, model: str, version: str) -> tuple[str, int | None]:
        """The registered name of a model that a client names, and its version or None.

        Raises:
            MmeError: INVALID_ARGUMENT for a version that is none.
        """
        return self._engine.registry.canonical(model), parse_version(version)

    def remembered(
        self, data: bytes, on_complete: Completion, headers: Headers
    ) -> tuple[Remembered, InferenceRequest] | None:
        """See `Decoder.remembered`; with the metadata that models see."""
        found = self._decoder.remembered(data, on_complete)
        if found is not None and self._forwarding is not None:
            self._forwarding.add(found[1], headers())
        return found

    def decode(
        self, data: bytes, message: pb.ModelInferRequest, on_complete: Completion, headers: Headers
    ) -> Decoded | Callable[[], Awaitable[Decoded]]:
        """See `Decoder.decode`; with the metadata that models see, of those that `headers` gives.

        Of a message that takes long to decode, what does so: many strings by a thread, and tensors once they have been
        read out of shared memory.
        """
        if holds_many_strings(message, len(data)):
            regions = self._regions.held(at_once=True)
            return functools.partial(by_thread, self._decode, message, on_complete, headers, regions)
        try:
            request, wanted = self._decode(message, on_complete, headers)
        except Unread as unread:
            decode = functools.partial(self._decode, message, on_complete, headers)
            return functools.partial(read_ahead, self._regions, unread.place, decode)
        self._decoder.remember(data, message, request.layout, wanted)
        return request, wanted

    def _decode(
        self, message: pb.ModelInferRequest, on_complete: Completion, headers: Headers, regions: Regions | None = None
    ) -> Decoded:
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
        names = self._engine.index.class_names(response.model_name, response.model_version) if wanted.classes else None
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
        limit: of the time that a request may take.
    """

    def __init__(self, engine: Engine, codec: Codec, tracer: Tracing | None, limit: RequestLimit) -> None:
        self._limit = limit
        self._engine = engine
        self._codec = codec
        self._tracer = tracer

    def infer(self, data: bytes, call: Rpc) -> Coroutine[Any, Any, None] | None:
        """One request, whose answer goes to the call; what has to be done before it is queued, None where it is.

        A client that leaves, or whose deadline has come, cancels it.
        """
        following = None if self._tracer is None else follow(self._tracer, headers_of(call), "ModelInfer")
        answer = _Answer(self._codec, call, self._limit, following)
        try:
            return self._begin(data, answer)
        except Exception as error:  # noqa: BLE001 - every error is a status, or its client reads nothing of it
            answer.fail(error)
            return None

    def _begin(self, data: bytes, answer: _Answer) -> Coroutine[Any, Any, None] | None:
        codec = self._codec
        found = codec.remembered(data, answer.complete, answer.headers)
        if found is not None:
            head, ready = found
            answer.wanted = head.wanted
            return self._submit(*codec.target(head.model, head.version), ready, answer)
        message = parsed(pb.ModelInferRequest, data)
        model, version = codec.target(message.model_name, message.model_version)
        decoded = codec.decode(data, message, answer.complete, answer.headers)
        if not isinstance(decoded, tuple):
            return self._submit_later(model, version, answer, decoded)
        request, answer.wanted = decoded
        return self._submit(model, version, request, answer)

    def _submit(
        self, name: str, version: int | None, request: InferenceRequest, answer: _Answer
    ) -> Coroutine[Any, Any, None] | None:
        answer.belongs_to(request)
        try:
            if self._engine.submit(name, version, request):
                return None
        except MmeError as error:
            if error.kind is Kind.INVALID_ARGUMENT:
                return self._explain(name, version, error, answer)
            raise
        return self._load(name, version, request, answer)

    async def _submit_later(
        self, name: str, version: int | None, answer: _Answer, decode: Callable[[], Awaitable[Decoded]]
    ) -> None:
        try:
            request, answer.wanted = await decode()
            rest = self._submit(name, version, request, answer)
        except Exception as error:  # noqa: BLE001 - as above
            answer.fail(error)
            return
        if rest is not None:
            await rest

    async def _load(self, name: str, version: int | None, request: InferenceRequest, answer: _Answer) -> None:
        def make(config: ModelConfig) -> InferenceRequest:
            _refuse_decoupled(config)
            return request

        try:
            answer.loaded(await self._engine.submit_made(name, version, make))
        except Exception as error:  # noqa: BLE001 - as above
            answer.fail(error)

    async def _explain(self, name: str, version: int | None, error: MmeError, answer: _Answer) -> None:
        """Tell a client that its request does not fit the model, unless it is the method that does not."""
        problem: Exception = error
        try:
            async with self._engine.leased(name, version) as model:
                _refuse_decoupled(model.config)
        except Exception as better:  # noqa: BLE001 - as above
            problem = better
        answer.fail(problem)


class _Answer:
    """What becomes of one request: its call's answer, and the end of its trace.

    Attributes:
        wanted: how the client wants it. Set once the request is decoded.
    """

    def __init__(self, codec: Codec, call: Rpc, limit: RequestLimit, following: Following | None) -> None:
        self._limit = limit
        self._codec = codec
        self._call = call
        self._following = following
        self._request: InferenceRequest | None = None
        self.wanted = PLAIN
        call.on_cancel = self._left
        limit.begin(self)

    def headers(self) -> dict[str, str]:
        """The call's metadata."""
        return headers_of(self._call)

    def belongs_to(self, request: InferenceRequest) -> None:
        """The request is known."""
        self._request = request
        if self._following is not None:
            self._following.follow(request)

    def loaded(self, report: LoadReport) -> None:
        """Its model was loaded for it."""
        if self._following is not None:
            self._following.loaded(report)

    def complete(self, _request: InferenceRequest, result: InferenceResponse | MmeError | None) -> None:
        """Send the response or the error, unless nobody waits for it any more."""
        if self._call.over:
            return
        if result is None or isinstance(result, MmeError):
            self.fail(result or MmeError(Kind.EXECUTION_FAILED, "the model sent no response"))
            return
        try:
            if takes_long(result, self.wanted.places, self.wanted.classes):
                InTurn().work_out(self._codec.encoding(result, self.wanted), self._encoded)
            else:
                self._send(self._codec.encode(result, self.wanted))
        except Exception as error:  # noqa: BLE001 - an answer that can't be written must not keep its batch from theirs
            self.fail(error)

    def _encoded(self, written: asyncio.Future[bytes]) -> None:
        """A thread has written the answer, or could not."""
        error = written.exception()
        if self._call.over:
            return
        if error is None:
            self._send(written.result())
        else:
            self.fail(error if isinstance(error, Exception) else MmeError(Kind.CANCELLED, "the server is going"))

    def _send(self, message: bytes) -> None:
        self._limit.over(self)
        self._call.answer(message)
        if self._following is not None:
            self._following.over(None)

    def fail(self, error: Exception) -> None:
        """Send an error."""
        self._limit.over(self)
        self._call.on_cancel = None
        refuse(self._call, error)
        if self._following is not None:
            self._following.over(known(error))

    def expire(self, error: MmeError) -> None:
        """It takes too long: its client is told, and a queued request need not run."""
        self.fail(error)
        if self._request is not None:
            self._request.cancel()

    def _left(self) -> None:
        """The client has."""
        self._limit.over(self)
        if self._request is not None:
            self._request.cancel()
        if self._following is not None:
            self._following.over(MmeError(Kind.CANCELLED, "the client left"))


def _refuse_decoupled(config: ModelConfig) -> None:
    if config.decoupled:
        raise MmeError(Kind.UNSUPPORTED, "ModelInfer RPC doesn't support models with decoupled transaction policy")
