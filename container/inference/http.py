"""Inference over HTTP, and /ping: from a request's bytes to its answer's. On the event loop.

What a SageMaker body means is for the model to say: tensors as a rule, and whatever it likes to an inference script.

A model answers a request once, and a decoupled model any number of times. One response is one answer, of known length.
Several are a streamed answer, each written as it comes:

    infer              one JSON document a line (`application/jsonlines`)
    infer, of a script the pieces of its body, with the content type of the first
    generate           refused unless there is exactly one
    generate_stream    server-sent events, for any model
    an event stream    whatever it would be otherwise, in the frames of AWS

What goes wrong after a streamed answer began is its last line, event or frame; a body is cut off. An error that a
decoupled model sends without saying that it is the last response is a line or an event like others: more may follow.
"""

from __future__ import annotations

import asyncio
import functools
from typing import TYPE_CHECKING, Any

from container.codec import NeedsThread, bodies
from container.codec.bodies import ENCODINGS, compress, inflate, inflate_quickly, wanted_encoding
from container.codec.bodies import event as sse_event
from container.codec.decode import Decoder
from container.codec.encode import classified, encode, encode_line, takes_long
from container.codec.generate import decode_generate, encode_generate, error_event
from container.codec.request import (
    BINARY_TYPE,
    LARGE,
    NoInputsError,
    OutputOptions,
    accepts_binary,
    body_of,
    body_request,
    content_type_of,
    header_length,
)
from container.control.routes import Flavor, HotTarget, InferenceType, parse_target, path_version
from container.inference import errors
from container.inference.call import LAST, PART, Body, Call, Reply
from container.inference.errors import CUSTOM_ATTRIBUTES, TARGET_MODEL, TARGET_VARIANT, log_failure, name_of
from container.inference.limits import Inflating, out_of_request_memory
from container.inference.limits import by_thread as on_thread
from container.observe.tracing import follow
from container.steps.access import Restrictions, forwarding
from container.steps.sessions import SESSION_ID, SessionCalls
from model_handlers.errors import Kind, MmeError, invalid_argument, known

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Mapping, Sequence

    from container.http1 import HttpRequest
    from container.inference.limits import RequestLimit, RequestMemory
    from container.observe.tracing import Tracing
    from container.settings import Settings
    from container.steps.sessions import SessionRequest
    from container.steps.shared_memory import Regions
    from model_handlers.config.model_config import ModelConfig
    from serve.engine import Engine
    from serve.request import InferenceRequest, InferenceResponse

    Parts = Sequence[bytes | memoryview]
    Names = tuple[bool, Mapping[str, Sequence[str]]]

_MAX_ROUTES = 4096  # targets remembered
_LONGEST = 512  # bytes of one that is
_QUICK_BODY = 1 << 14  # bytes of a compressed body: those of more are inflated by a thread
_QUICK_ANSWER = 1 << 18  # bytes that take less than a millisecond to be compressed
_READ_AT_ONCE = 2  # large bodies of JSON: their elements take memory, where others are no more than bodies

_ACCEPT = "accept"
_STREAM_ACCEPT = "x-amzn-sagemaker-accept"  # boto3's, for event streams
_JSON = b"application/json"
_LINES = b"application/jsonlines"
_EVENTS = b"text/event-stream; charset=utf-8"
_EVENT_STREAM = b"Content-Type: application/vnd.amazon.eventstream\r\n"
_INNER_TYPE = b"X-Amzn-SageMaker-Content-Type: "
_ENCODINGS = f"Accept-Encoding: {', '.join(ENCODINGS)}\r\n".encode()
_AS_JSON = OutputOptions(binary=False)


class HttpReply(Reply):
    """The answer to one request over HTTP."""

    def __init__(self, server: InferRoutes, exchange: HttpRequest, route: HotTarget, kind: InferenceType) -> None:
        self.exchange = exchange
        self.kind = kind  # `infer`, whatever the route says, once a model takes the body as it came
        self.wanted: OutputOptions | None = None  # for tensors, once the request is decoded
        self.kserve_form = False  # a binary answer tells the length of its header as KServe has it
        self.session = b""  # header lines that tell of the session that the request is of
        attributes = exchange.headers.get(CUSTOM_ATTRIBUTES)  # the client's, which every answer hands back
        self._attributes = b"" if attributes is None else errors.custom_attributes(attributes)
        self._server = server
        self._flavor = route.flavor or Flavor.SAGEMAKER
        self._is_kserve = route.flavor is Flavor.KSERVE
        self._framed = route.event_stream
        self._begun = False
        self._first: InferenceResponse | None = None  # of `generate`

    # -- one response --------------------------------------------------------------------------------------------

    def is_expensive(self, response: InferenceResponse, event: int) -> bool:
        """Return whether it is long JSON, or long and to be compressed, or lies in shared memory or strings."""
        wanted = self.wanted
        if wanted is None:
            return self.kind is not InferenceType.INFER and takes_long(response, _AS_JSON)
        if takes_long(response, wanted):
            return True
        if not self._is_kserve or event != LAST or "accept-encoding" not in self.exchange.headers:
            return False
        return _size(response) > _QUICK_ANSWER and bool(self._content_encoding())

    def encoder(self, response: InferenceResponse, event: int) -> Callable[[], Any]:
        """Return what makes content type, further header lines and the parts of the body."""
        names = None if self.wanted is None or not self.wanted.classes else self._names(response)
        return functools.partial(self.encode, response, event, names)

    def _names(self, response: InferenceResponse) -> Names:
        """What has to be known of a model for its classes. On the loop."""
        return self._server.engine.index.class_names(response.model_name, response.model_version)

    def encode(self, response: InferenceResponse, event: int, names: Names | None = None) -> tuple[bytes, bytes, Parts]:
        """Return the response as `send` takes it; on a thread with the names that its classes need."""
        literal, wanted = self._server.literal_json, self.wanted
        if self.kind is InferenceType.GENERATE_STREAM:
            return _EVENTS, b"", (sse_event(encode_generate(response, literal=literal)),)
        if self.kind is InferenceType.GENERATE:
            return _JSON, b"", (encode_generate(response, literal=literal),) if event == LAST else ()
        if wanted is None:
            return content_type_of(response), b"", (body_of(response),)
        if wanted.classes:
            batches, labels = names or self._names(response)
            response = classified(response, wanted.classes, labels, batches=batches)
        if event == PART:
            return _LINES, b"", (encode_line(response, wanted.places, literal=literal),)
        parts, length = encode(response, wanted, literal=literal)
        content_type, lines = _JSON, b""
        if length is not None and self.kserve_form:
            content_type, lines = b"application/octet-stream", b"Inference-Header-Content-Length: %d\r\n" % length
        elif length is not None:
            content_type = b"%b%d" % (BINARY_TYPE, length)
        if self._is_kserve and "accept-encoding" in self.exchange.headers and (encoding := self._content_encoding()):
            lines += b"Content-Encoding: %b\r\nVary: Accept-Encoding\r\n" % encoding.encode()
            return content_type, lines, (compress(parts, encoding),)
        return content_type, lines, parts

    def _content_encoding(self) -> str:
        """What the answer is compressed by, "" for nothing."""
        accepted = self.exchange.headers.get("accept-encoding")
        return wanted_encoding(accepted) if accepted and self.kind is InferenceType.INFER else ""

    # -- to the client -------------------------------------------------------------------------------------------

    def send(self, call: Call, response: InferenceResponse, encoded: tuple[bytes, bytes, Parts], event: int) -> None:
        """Send the answer, or begin one of several responses and go on with it."""
        content_type, lines, parts = encoded
        if self.kind is InferenceType.GENERATE and event == PART:
            if self._first is not None:
                raise _one_response_error()
            self._first = response
        elif event == PART or self.kind is InferenceType.GENERATE_STREAM:
            self._begin_once(call, content_type)
            for part in parts:
                self._write(part)
            if event == LAST:
                self.exchange.end()
        elif self._framed:
            self._respond(content_type, lines + self._headers(call, response), parts)
        else:
            headers = self._attributes + self.session
            if call.report is not None or self._flavor is Flavor.RUNTIME:
                headers = self._headers(call, response)
            self.exchange.respond(200, b"Content-Type: %b\r\n%b%b" % (content_type, lines, headers), parts)

    def _respond(self, content_type: bytes, headers: bytes, parts: Parts) -> None:
        if not self._framed:
            self.exchange.respond(200, b"Content-Type: %b\r\n%b" % (content_type, headers), parts)
            return
        self._begin(content_type, headers, 200)
        for part in parts:
            self._write(part)
        self.exchange.end()

    def _begin(self, content_type: bytes, headers: bytes, status: int) -> None:
        self._begun = True
        if self._framed:
            headers = b"%b%b%b\r\n%b" % (_EVENT_STREAM, _INNER_TYPE, content_type, headers)
        else:
            headers = b"Content-Type: %b\r\n%b" % (content_type, headers)
        self.exchange.begin(status, headers)

    def _begin_once(self, call: Call, content_type: bytes, status: int = 200) -> None:
        if not self._begun:
            self._begin(content_type, self._headers(call, None), status)

    def _write(self, data: bytes | memoryview) -> None:
        self.exchange.write(bodies.payload_part(data) if self._framed else data)

    def acknowledge(self, call: Call, body: bytes) -> None:
        """Answer a request that was not for the model, if the client waits for it."""
        if not call.over:
            self._respond(_JSON, self._headers(call, None), (body,))
            call.finish(None)

    def end(self, call: Call) -> None:
        """Send the end of several responses, or the one of `generate`."""
        if self.kind is InferenceType.GENERATE:
            if self._first is None:
                raise _one_response_error()
            content_type, lines, parts = self.encode(self._first, LAST)
            self._respond(content_type, lines + self._headers(call, self._first), parts)
            return
        self._begin_once(call, _EVENTS if self.kind is InferenceType.GENERATE_STREAM else _LINES)
        self.exchange.end()

    def _headers(self, call: Call, response: InferenceResponse | None) -> bytes:
        headers = self._attributes + self.session
        if self._flavor is Flavor.RUNTIME:
            headers += errors.runtime_headers(self.exchange.headers.get(TARGET_VARIANT, ""))
        if call.report is not None or self._flavor is Flavor.RUNTIME:
            headers += errors.server_timing(None if response is None else response.timings, call.report)
        return headers

    # -- errors --------------------------------------------------------------------------------------------------

    def send_error(self, call: Call, error: MmeError) -> bool:
        """Send an error as a line or an event; nothing follows one in a body, or in the frames of an event stream."""
        if self._framed:
            return False
        if self.kind is InferenceType.GENERATE_STREAM:
            if not self._begun:
                if self._flavor is Flavor.RUNTIME:  # whose errors are documents of their own
                    return False
                self._begin_once(call, _EVENTS, errors.error(error, self._flavor.value)[0])
        elif not self._begun or self.wanted is None:
            return False
        log_failure(error, self.exchange)
        self.exchange.write(self._error(error))
        return True

    def _error(self, error: MmeError) -> bytes:
        if self.kind is InferenceType.GENERATE_STREAM:
            return error_event(error.message)
        return errors.error_body(error.message) + b"\n"

    def fail(self, call: Call, error: MmeError, *, final: bool) -> None:  # noqa: ARG002 - HTTP tells no difference
        """Answer with an error, or end with it what has begun."""
        log_failure(error, self.exchange)
        if not self._begun:
            status, headers, body = errors.error(error, self._flavor.value)
            if error.kind is Kind.UNSUPPORTED and "content-encoding" in self.exchange.headers:
                headers += _ENCODINGS
            if error.kind is Kind.UNAVAILABLE and isinstance(error, StillLoadingError):
                status, headers, body = errors.runtime_error("ModelNotReadyException", error.told)
            self.exchange.respond(status, headers + self._attributes, (body,))
        elif self._framed:
            self.exchange.write(bodies.exception(error.message))
            self.exchange.end()
        elif self.wanted is None and self.kind is not InferenceType.GENERATE_STREAM:
            self.exchange.cut()  # an error would be taken for a piece of the body
        else:
            self.exchange.write(self._error(error))
            self.exchange.end()

    def timeout_error(self, call: Call) -> MmeError:
        return StillLoadingError(call.name)

    def close(self, call: Call) -> None:  # noqa: ARG002 - it is the same whatever the call
        self.exchange.on_disconnect = None
        self._first = None
        if self.wanted is not None:
            self.wanted.places.clear()


class StillLoadingError(MmeError):
    """The model has not been loaded in time."""

    def __init__(self, name: str) -> None:
        super().__init__(Kind.UNAVAILABLE, f"model '{name}' still loads")
        self.told = f"Model '{name}' is still being downloaded or loaded; try again"


class HttpBody(Body):
    """What one request over HTTP has sent: its body, and what its headers say of it."""

    def __init__(self, server: InferRoutes, exchange: HttpRequest, route: HotTarget, reply: HttpReply) -> None:
        self._server = server
        self._exchange = exchange
        self._route = route
        self._reply = reply
        self._is_kserve = route.flavor is Flavor.KSERVE
        self._body: bytes | None = None if "content-encoding" in exchange.headers else exchange.body
        self._decoded: InferenceRequest | MmeError | None = None  # before its model is known

    def _raw_request(self, call: Call) -> InferenceRequest:
        """Return the request of a model that takes the body as it came."""
        headers = self._exchange.headers
        accept = headers.get(_STREAM_ACCEPT if self._route.event_stream else _ACCEPT, "")
        attributes = headers.get(CUSTOM_ATTRIBUTES, "")
        self._reply.wanted, self._reply.kind = None, InferenceType.INFER
        body = self._inflated()
        request = body_request(body, headers.get("content-type", ""), accept, attributes, call.complete)
        request.on_response, request.on_error = call.respond, call.respond_error
        return request

    def _with_callbacks(self, call: Call, request: InferenceRequest, *, takes_several: bool) -> InferenceRequest:
        if takes_several:
            request.on_response, request.on_error = call.respond, call.respond_error
        if self._server.forwarding is not None:
            self._server.forwarding.add(request, self._exchange.headers)
        return request

    def peek(self) -> bytes:
        """Return the body, b"" of one that a thread has to inflate first."""
        try:
            return self._inflated()
        except NeedsThread:
            return b""

    # -- compressed bodies ---------------------------------------------------------------------------------------

    def _inflated(self) -> bytes:
        """Return the body as it was before it was compressed."""
        if self._body is None:
            sent = self._exchange.body
            if len(sent) > _QUICK_BODY:
                raise NeedsThread
            encoding = self._exchange.headers["content-encoding"]
            body = inflate_quickly(sent, encoding, self._server.settings.max_body_bytes)
            if body is None:
                raise NeedsThread
            self._hold(body)
        return self._body or b""

    async def _inflate(self) -> None:
        if self._body is not None:
            return
        encoding, most = self._exchange.headers["content-encoding"], self._server.settings.max_body_bytes
        with Inflating(self._server.memory) as inflating:
            body = await on_thread(inflate, self._exchange.body, encoding, most, inflating.take)
        self._hold(body)

    def _hold(self, body: bytes) -> None:
        if not self._exchange.hold(len(body)):
            raise out_of_request_memory(self._server.memory)
        self._body = body


class TensorBody(HttpBody):
    """A request of `infer`: tensors, in JSON or behind it, or alone."""

    def decode(self, call: Call, config: ModelConfig) -> InferenceRequest:
        if not self._is_kserve and config.takes_raw_body:
            return self._raw_request(call)
        found, self._decoded = self._decoded, None
        if found is None:
            body = self._body
            if body is None:
                body = self._inflated()
            try:
                length, self._reply.kserve_form = header_length(
                    self._exchange.headers, len(body), kserve=self._is_kserve
                )
                if length == 0:
                    return self._decode_raw_tensor(call, body, config)
                found = self._accept(call, *self._server.decoder.decode(body, length, call.name, call.complete))
            except NoInputsError as error:
                raise error.of(config) from None
        if isinstance(found, MmeError):
            raise found.of(config) if isinstance(found, NoInputsError) else found
        if self._is_kserve and config.decoupled:
            raise _decoupled_error()
        return found

    async def prepare(self, call: Call, *, by_thread: bool) -> None:
        """Of what may be for a script, an error waits for the model."""
        by_thread = by_thread and self._body is not None  # else it was for inflating it
        await self._inflate()
        body = self._inflated()
        try:
            length, self._reply.kserve_form = header_length(self._exchange.headers, len(body), kserve=self._is_kserve)
            if length == 0:
                return
            if not by_thread:
                try:
                    decoded = self._server.decoder.decode(body, length, call.name, call.complete)
                    self._decoded = self._accept(call, *decoded)
                except NeedsThread:
                    by_thread = True
            if by_thread:
                regions, decode = self._server.regions.held(), self._server.decoder.decode_long
                async with self._server.reading:
                    if not call.over:
                        decoded = await on_thread(decode, body, length, call.name, call.complete, regions)
                        self._decoded = self._accept(call, *decoded)
        except MmeError as error:
            if self._is_kserve and not (isinstance(error, NoInputsError) and call.is_resident):
                raise
            self._decoded = error.bare()

    def _decode_raw_tensor(self, call: Call, body: bytes, config: ModelConfig) -> InferenceRequest:
        """Return the request of a body without a header: what it means depends on the model's configuration."""
        if self._is_kserve and config.decoupled:
            raise _decoupled_error()
        request, self._reply.wanted = self._server.decoder.decode_raw(body, config, call.complete)
        return self._with_callbacks(call, request, takes_several=not self._is_kserve)

    def _accept(self, call: Call, request: InferenceRequest, wanted: OutputOptions) -> InferenceRequest:
        """Return what is submitted of what was decoded."""
        if not self._is_kserve:
            name = _STREAM_ACCEPT if self._route.event_stream else _ACCEPT
            if accepts_binary(self._exchange.headers.get(name, self._server.settings.default_accept)):
                wanted = wanted.accepting_binary()
        self._reply.wanted = wanted
        if self._is_kserve and self._server.forwarding is None:
            return request
        return self._with_callbacks(call, request, takes_several=not self._is_kserve)


class GenerateBody(HttpBody):
    """A request of `generate`: tensors as the keys of a flat JSON object; which they are is for the model to say."""

    def __init__(self, server: InferRoutes, exchange: HttpRequest, route: HotTarget, reply: HttpReply) -> None:
        super().__init__(server, exchange, route, reply)
        self._config: ModelConfig | None = None  # for which it was decoded

    def decode(self, call: Call, config: ModelConfig) -> InferenceRequest:
        if not self._is_kserve and config.takes_raw_body:
            return self._raw_request(call)
        found, self._decoded = self._decoded, None
        if found is None or self._config is not config:
            body = self._inflated()
            if len(body) > LARGE:
                raise NeedsThread
            found = decode_generate(body, config, self._server.decoder.layouts, call.complete)
        if isinstance(found, MmeError):
            raise found
        return self._with_callbacks(call, found, takes_several=True)

    async def prepare(self, call: Call, *, by_thread: bool) -> None:  # noqa: ARG002 - its size says enough
        """Nothing else is read before the model is known."""
        await self._inflate()
        body, layouts = self._inflated(), self._server.decoder.layouts
        self._config = config = self._server.engine.index.config(call.name, call.version)
        if config is None or len(body) <= LARGE:
            return
        async with self._server.reading:
            if call.over:
                return
            try:
                self._decoded = await on_thread(decode_generate, body, config, layouts, call.complete)
            except MmeError as error:
                self._decoded = error.bare()


class InferRoutes:
    """Answers the hot requests."""

    def __init__(
        self,
        engine: Engine,
        settings: Settings,
        memory: RequestMemory,
        regions: Regions,
        default_model: str = "",
        tracer: Tracing | None = None,
        limit: RequestLimit | None = None,
    ) -> None:
        self.engine = engine
        self.settings = settings
        self.memory = memory
        self.starting = False  # start-up models are still waited for; /ping fails then
        self.draining = False  # the server goes, and no other is there: /ping alone says so
        self.broken = False  # the instance should be replaced; /ping fails then
        self.on_healthy: Callable[[], None] | None = None  # called whenever /ping is answered 200
        self.literal_json = settings.literal_json  # whether answers say NaN and Infinity in place of null
        self.forwarding = forwarding(settings.http_header_pattern)
        self.regions = regions
        self.decoder = Decoder(settings.max_body_bytes, regions)
        self.reading = asyncio.Semaphore(_READ_AT_ONCE)
        self._default_model = default_model  # of /invocations without a target model header, "" for none
        self._limit = limit
        self._restrictions = Restrictions(settings.http_restrictions) if settings.http_restrictions else None
        self._tracer = tracer
        self._routes: dict[bytes, HotTarget | None] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._sessions = SessionCalls(engine, settings.session_seconds, enabled=settings.sessions)

    def dispatch(self, exchange: HttpRequest, otherwise: Callable[[HttpRequest], None]) -> None:
        """Answer a request whose route is a hot one; `otherwise` is given any other."""
        target = exchange.target
        try:
            route = self._routes[target]
        except KeyError:
            route = self._learn(target)
        if route is None or exchange.method != "POST" or route.flavor is None:
            if route is None or route.flavor is not None or not self._ping(exchange):
                otherwise(exchange)
            return
        kind = route.inference_type or self.settings.inference_type
        reply = HttpReply(self, exchange, route, kind)
        body: HttpBody
        if kind is InferenceType.INFER:
            body = TensorBody(self, exchange, route, reply)
        else:
            body = GenerateBody(self, exchange, route, reply)
        call = Call(self.engine, self._limit, body, reply)
        exchange.on_disconnect = call.abandon
        if self._tracer is not None and (following := follow(self._tracer, exchange)) is not None:
            call.steps = (following,)
        headers = exchange.headers
        try:
            if self._restrictions is not None:
                self._restrictions.check("inference", headers)
            named_by_path = route.model and TARGET_MODEL not in headers
            name = route.model if named_by_path else self._model_name(route, name_of(headers.get(TARGET_MODEL, "")))
            call.name = self.engine.registry.canonical(name)
            if route.version:
                call.version = path_version(route.version)
            if route.flavor is Flavor.RUNTIME:
                call.patience = self.settings.request_timeout
            if SESSION_ID in headers and route.flavor is not Flavor.KSERVE:
                rest = self._start_in_session(call, route, headers[SESSION_ID], body, reply)
            else:
                rest = call.start()
        except MmeError as error:
            call.fail(error)
            return
        if rest is not None:
            task = asyncio.get_running_loop().create_task(rest)
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def _start_in_session(
        self, call: Call, route: HotTarget, session_id: str, body: HttpBody, reply: HttpReply
    ) -> Coroutine[Any, Any, None] | None:
        """Submit a request of a session, as `Call.start` does one without."""
        visit = self._sessions.visit(call.name, session_id, body.peek(), reply, creates=not route.event_stream)
        if visit.command:
            return self._acknowledge(call, reply, visit)
        call.steps = (visit, *call.steps)
        return call.start()

    async def _acknowledge(self, call: Call, reply: HttpReply, visit: SessionRequest) -> None:
        """A session is created or closed, and its model asked for nothing; but for a new one it has to be there."""
        try:
            if visit.new:
                async with asyncio.timeout(call.patience), self.engine.leased(call.name):
                    pass
        except Exception as error:  # noqa: BLE001 - whatever it is, the client is told
            visit.leave(failed=True)
            call.fail(reply.timeout_error(call) if isinstance(error, TimeoutError) else known(error))
            return
        visit.leave(failed=visit.new and call.over)  # a session whose id is never told is none
        reply.acknowledge(call, b'{"sessionId":"%b"}' % visit.session.id.encode())

    def _learn(self, target: bytes) -> HotTarget | None:
        route = parse_target(target)
        if len(target) <= _LONGEST:
            if len(self._routes) >= _MAX_ROUTES:
                self._routes.clear()
            self._routes[target] = route
        return route

    def _ping(self, exchange: HttpRequest) -> bool:
        if exchange.method not in {"GET", "POST", "HEAD"}:
            return False
        if self._restrictions is not None:
            try:
                self._restrictions.check("health", exchange.headers)
            except MmeError as error:
                status, headers, body = errors.error(error, Flavor.SAGEMAKER.value)
                exchange.respond(status, headers, (body,))
                return True
        if self.draining or self.starting or self.broken:
            exchange.respond(503, b"", ())
        else:
            if self.on_healthy is not None:
                self.on_healthy()
            exchange.respond(200, b"", ())
        return True

    def _model_name(self, route: HotTarget, header: str) -> str:
        name = route.model or header or self._default_model
        if not name:
            raise MmeError(  # which boto3 knows as a ValidationError, not as an error of some model
                Kind.UNKNOWN_MODEL if route.flavor is Flavor.RUNTIME else Kind.INVALID_ARGUMENT,
                "this endpoint serves many models: name one in the header X-Amzn-SageMaker-Target-Model "
                "(TargetModel in boto3)",
            )
        if route.model and header and route.flavor is Flavor.SAGEMAKER:
            self.engine.registry.check_alias(name, header)
        return name


def _size(response: InferenceResponse) -> int:
    return sum([array.nbytes for _, _, array in response.outputs])


def _decoupled_error() -> MmeError:
    return MmeError(
        Kind.UNSUPPORTED,
        "HTTP end point doesn't support models with decoupled transaction policy: use generate_stream, /invocations, "
        "or ModelStreamInfer over gRPC",
    )


def _one_response_error() -> MmeError:
    return invalid_argument(
        "generate expects model to produce exactly 1 response, use generate stream for model that generates various "
        "number of responses"
    )
