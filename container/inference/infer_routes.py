"""The routes that carry inference, and /ping (see `targets`): answered on the event loop, from bytes to bytes.

A request for a model in memory is decoded, queued and, when its batch is done, encoded and sent, without a task or a
lock of its own. A request for any other model becomes a task that waits for the load. What a SageMaker body means is
for the model to say: tensors as a rule, and whatever it likes to an inference script. Everything here runs on the
loop, but for the reading of a large body that is compressed, JSON, or holds strings; Flask reaches it through the same
`dispatch`.
"""

from __future__ import annotations

import asyncio
import functools
from typing import TYPE_CHECKING

from container.codec.body import body_request
from container.codec.compression import inflate, inflate_quickly
from container.codec.decode import Decoder
from container.codec.described import NoInputsError
from container.codec.framing import accepts_binary, explained, header_length
from container.codec.generate import decode_generate
from container.codec.json_pieces import LARGE, read_generate, read_infer
from container.control.targets import Flavor, InferenceType, Route, parse_target, path_version
from container.inference import errors
from container.inference.call import Call
from container.inference.errors import known
from container.inference.headers import CUSTOM_ATTRIBUTES, TARGET_MODEL, name_of
from container.inference.read_ahead import JsonReading, by_thread, read_ahead
from container.inference.request_memory import Inflating, RequestMemory, out_of_request_memory
from container.steps.sessions import SESSION_ID, SessionCalls
from container.steps.shared_memory import AT_ONCE, Regions, Unread
from container.traces.traced import follow
from model_handlers.errors import Kind, MmeError
from model_handlers.scripts.default_script import takes_raw_body
from serve.request import LoadReport

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from container.codec.encode import Reply
    from container.inference.exchange import Exchange
    from container.inference.read_ahead import Reads
    from container.inference.request_limit import RequestLimit
    from container.steps.restrictions import Forwarding, Restrictions
    from container.steps.sessions import Make, Visit
    from container.steps.shared_memory import Place
    from container.traces.traced import Tracing
    from model_handlers.config.model_config import ModelConfig
    from serve.engine import Engine
    from serve.request import InferenceRequest

_MAX_ROUTES = 4096  # targets remembered
_LONGEST = 512  # bytes of one that is
_MEMORY_IN_BODIES = 4  # of the largest size, where no memory of requests is given
_QUICK_BYTES = 1 << 14  # of a compressed body: those of more are inflated by a thread

_ACCEPT = "accept"
_STRINGS = b'"BYTES"'  # in the header of a request that sends some
_STREAM_ACCEPT = "x-amzn-sagemaker-accept"  # boto3's, for event streams


class InferRoutes:
    """Dispatches hot requests to the engine.

    Args:
        engine: who answers.
        default_model: the model of /invocations without a target model header, "" for none.
        starting: whether /ping has to wait until somebody sets `starting` to False.
        max_body: bytes that a compressed body may have once it is inflated.
        patience: seconds after which the Runtime API answers that a model still loads.
        session_seconds: how long a stateful session may lie unused.
        sessions: whether there are stateful sessions.
        default_accept: media type of SageMaker's answers to requests without an Accept header.
        inference_type: what SageMaker's bodies mean.
        literal_json: whether answers say NaN and Infinity in place of null.
        restrictions: what requests have to bring, None for nothing.
        forwarding: which headers models see, None for none.
        regions: of shared memory, in which tensors may lie; None for none.
        tracer: what traces requests, None where traces go nowhere.
        memory: of requests on the way.
        limit: of the time that a request may take; None for none.

    Attributes:
        draining: set when the server goes, and no other is there: /ping says so, everything else is still answered.
        broken: set when the instance should be replaced: likewise.
        on_healthy: called whenever /ping is answered 200.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        default_model: str = "",
        starting: bool = False,
        max_body: int = 64 << 20,
        patience: float = 60.0,
        session_seconds: float = 1200.0,
        sessions: bool = True,
        default_accept: str = "application/json",
        inference_type: InferenceType = InferenceType.INFER,
        literal_json: bool = False,
        restrictions: Restrictions | None = None,
        forwarding: Forwarding | None = None,
        regions: Regions | None = None,
        tracer: Tracing | None = None,
        memory: RequestMemory | None = None,
        limit: RequestLimit | None = None,
    ) -> None:
        self.engine = engine
        self._memory = RequestMemory(_MEMORY_IN_BODIES * max_body) if memory is None else memory
        self.default_model = default_model
        self.draining = False
        self.broken = False
        self.on_healthy: Callable[[], None] | None = None
        self.starting = starting
        self._max_body = max_body
        self._patience = patience
        self._default_accept = default_accept
        self._inference_type = inference_type
        self._literal = literal_json
        self._limit = limit
        self._restrictions = restrictions
        self._forwarding = forwarding
        self._tracer = tracer
        self._regions = Regions() if regions is None else regions
        self._decoder = Decoder(max_body, self._regions)
        self._routes: dict[bytes, Route | None] = {}
        self._body_takers = engine.registry.body_takers
        self._decoupled = engine.registry.decoupled
        self._tasks: set[asyncio.Task[None]] = set()
        self._json = JsonReading()
        self._sessions = SessionCalls(engine, session_seconds, enabled=sessions)

    def dispatch(self, exchange: Exchange) -> bool:
        """Take the exchange if its route is a hot one; False leaves it to others."""
        target = exchange.target
        try:
            route = self._routes[target]
        except KeyError:
            route = self._learn(target)
        if route is None:
            return False
        if route.flavor is None:
            return self._ping(exchange)
        if exchange.method != "POST":
            return False
        inference_type = route.inference_type or self._inference_type
        following = None if self._tracer is None else follow(self._tracer, exchange)
        call = Call(
            exchange,
            route.flavor,
            inference_type,
            event_stream=route.event_stream,
            literal_json=self._literal,
            limit=self._limit,
            following=following,
        )
        exchange.on_disconnect = call.abandon
        try:
            if self._restrictions is not None:
                self._restrictions.check("inference", exchange.headers)
            if inference_type is InferenceType.INFER:
                self._infer(call, route)
            else:
                self._generate(call, route)
        except MmeError as error:
            call.fail(error)
        return True

    def _learn(self, target: bytes) -> Route | None:
        route = parse_target(target)
        if len(target) <= _LONGEST:
            if len(self._routes) >= _MAX_ROUTES:
                self._routes.clear()
            self._routes[target] = route
        return route

    def _ping(self, exchange: Exchange) -> bool:
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

    def _infer(self, call: Call, route: Route) -> None:
        headers = call.exchange.headers
        name = self._model_name(route, name_of(headers.get(TARGET_MODEL, "")))
        version = path_version(route.version) if route.version else None
        if "content-encoding" in headers:
            self._inflated(call, name, functools.partial(self._infer_body, call, route, name, version))
        else:
            self._infer_body(call, route, name, version, call.exchange.body)

    def _infer_body(self, call: Call, route: Route, name: str, version: int | None, body: bytes) -> None:
        headers = call.exchange.headers
        if len(body) > LARGE and (large := self._large_json(call, route, name, body)):
            go_on = functools.partial(self._infer_body, call, route, name, version, body)
            self._aside(call, name, self._read_aside(call, read_infer, body, large, go_on))
            return
        if SESSION_ID in headers and route.flavor is not Flavor.KSERVE:
            self._in_session(call, route, name, body, functools.partial(self._made_infer, call, route, name, body))
            return
        if name in self._body_takers and self._took_body(call, route, name, body):
            return
        try:
            length, call.kserve_form = header_length(headers, len(body), kserve=route.flavor is Flavor.KSERVE)
            if length == 0:
                make = functools.partial(self._made_raw, call, route, body)
                self._aside(call, name, self.engine.submit_made(name, version, make))
                return
            if length is not None and len(body) - length > AT_ONCE and _STRINGS in body[:length]:
                self._aside(call, name, self._decoded_aside(call, route, name, version, body, length))
                return
            request = self._decoded(call, route, name, body, length)
        except Unread as unread:
            self._aside(call, name, self._read_first(call, route, name, body, length, unread.place))
            return
        except MmeError as wrong:
            content_type = headers.get("content-type", "")
            resident = self.engine.index.is_resident(name)
            names_inputs = resident and isinstance(wrong, NoInputsError)  # for which the configuration is needed
            if not names_inputs and (resident or route.flavor is Flavor.KSERVE):
                # a local of that name would be the error's own, by its traceback: both, and the body, would stay
                raise explained(wrong, content_type, body) from None
            read = explained(wrong, content_type, body).bare()  # whose frames hold this one
            make = functools.partial(self._made_cold, call, route, body, read)
            self._aside(call, name, self.engine.submit_made(name, version, make))
            return
        if route.flavor is Flavor.KSERVE and name in self._decoupled and self.engine.index.is_resident(name):
            raise _several()
        if not self.engine.submit(name, version, request):
            make = functools.partial(self._made_cold, call, route, body, request)
            self._aside(call, name, self.engine.submit_made(name, version, make))

    async def _read_first(
        self, call: Call, route: Route, name: str, body: bytes, length: int | None, place: Place
    ) -> LoadReport:
        """Submit a request once its large tensors have been read out of shared memory."""
        decode = functools.partial(self._decoded, call, route, name, body, length)
        request = await read_ahead(self._regions, place, decode)
        version = path_version(route.version) if route.version else None
        return await self.engine.submit_made(
            name, version, functools.partial(self._made_cold, call, route, body, request)
        )

    async def _decoded_aside(
        self, call: Call, route: Route, name: str, version: int | None, body: bytes, length: int
    ) -> LoadReport:
        """Submit a request once a thread has made texts of what it sends."""
        regions = self._regions.held(at_once=True)
        read: InferenceRequest | MmeError
        try:
            decode = functools.partial(self._decoder.decode, body, length, name, call.complete, regions, call.read)
            read = self._asked(call, route, *await by_thread(decode))
        except MmeError as wrong:
            content_type = call.exchange.headers.get("content-type", "")
            if route.flavor is Flavor.KSERVE:
                raise explained(wrong, content_type, body) from None
            read = explained(wrong, content_type, body)
        return await self.engine.submit_made(name, version, functools.partial(self._made_cold, call, route, body, read))

    def _decoded(
        self, call: Call, route: Route, name: str, body: bytes, length: int | None, regions: Regions | None = None
    ) -> InferenceRequest:
        return self._asked(call, route, *self._decoder.decode(body, length, name, call.complete, regions, call.read))

    def _asked(self, call: Call, route: Route, request: InferenceRequest, reply: Reply) -> InferenceRequest:
        """What is submitted of what was decoded."""
        call.reply = reply
        if call.reply.classes:
            call.class_names = self.engine.index.class_names
        if route.flavor is not Flavor.KSERVE:
            accept = call.exchange.headers.get(_STREAM_ACCEPT if route.event_stream else _ACCEPT, self._default_accept)
            if accepts_binary(accept):
                call.reply = call.reply.accepting_binary()
            request.on_response, request.on_error = call.respond, call.respond_error
        return self._taken(call, request)

    def _taken(self, call: Call, request: InferenceRequest) -> InferenceRequest:
        """What is submitted for a call, with the headers that models see."""
        if self._forwarding is not None:
            self._forwarding.add(request, call.exchange.headers)
        return call.take(request)

    def _made_infer(self, call: Call, route: Route, name: str, body: bytes, config: ModelConfig) -> InferenceRequest:
        """A request of a session, for which its model is looked up first."""
        if takes_raw_body(config):
            return self._body_request(call, route, body)
        length, call.kserve_form = header_length(call.exchange.headers, len(body), kserve=False)
        if length == 0:
            return self._made_raw(call, route, body, config)
        return self._decoded(call, route, name, body, length, self._regions.held(at_once=True))

    def _in_session(self, call: Call, route: Route, name: str, body: bytes, make: Make) -> None:
        visit = self._sessions.visit(name, call.exchange.headers[SESSION_ID], body, creates=not route.event_stream)
        call.session = visit.headers()
        if visit.word:
            self._aside(call, name, self._acknowledged(call, name, visit))
        else:
            made = functools.partial(visit.made, call, make)
            self._aside(call, name, visit.submitted(self.engine.submit_made(name, None, made)))

    async def _acknowledged(self, call: Call, name: str, visit: Visit) -> LoadReport:
        """A session is created or closed, and its model asked for nothing; but for a new one it has to be there."""
        try:
            if visit.new:
                async with self.engine.leased(name):
                    pass
        except BaseException:
            visit.over(failed=True)
            raise
        visit.over(failed=visit.new and call.over)  # a session whose id nobody hears is none
        call.acknowledge(b'{"sessionId":"%b"}' % visit.session.id.encode())
        return LoadReport()

    def _made_cold(
        self, call: Call, route: Route, body: bytes, read: InferenceRequest | MmeError, config: ModelConfig
    ) -> InferenceRequest:
        """What was `read` of a body while nobody knew the model, or why it could not be, counts if it takes tensors."""
        if takes_raw_body(config) and route.flavor is not Flavor.KSERVE:
            return self._body_request(call, route, body)
        if isinstance(read, MmeError):
            raise read.of(config) if isinstance(read, NoInputsError) else read
        if config.decoupled and route.flavor is Flavor.KSERVE:
            raise _several()
        return read

    def _made_raw(self, call: Call, route: Route, body: bytes, config: ModelConfig) -> InferenceRequest:
        """What a request without a header means depends on the model's configuration."""
        if takes_raw_body(config) and route.flavor is not Flavor.KSERVE:
            return self._body_request(call, route, body)
        if config.decoupled and route.flavor is Flavor.KSERVE:
            raise _several()
        request, call.reply = self._decoder.decode_raw(body, config, call.complete)
        if call.flavor is not Flavor.KSERVE:
            request.on_response, request.on_error = call.respond, call.respond_error
        return self._taken(call, request)

    def _takes_body(self, route: Route, name: str) -> bool:
        """Whether the model, if it is in memory, wants the body as it is. KServe's are tensors for any model."""
        return name in self._body_takers and route.flavor is not Flavor.KSERVE

    def _took_body(self, call: Call, route: Route, name: str, body: bytes) -> bool:
        """Submit the body as it is, for a model in memory that wants it so."""
        if not self._takes_body(route, name):
            return False
        return self.engine.submit(name, None, self._body_request(call, route, body))

    def _body_request(self, call: Call, route: Route, body: bytes) -> InferenceRequest:
        headers = call.exchange.headers
        accept = headers.get(_STREAM_ACCEPT if route.event_stream else _ACCEPT, "")
        attributes = headers.get(CUSTOM_ATTRIBUTES, "")
        call.reply = None
        request = body_request(body, headers.get("content-type", ""), accept, attributes, call.complete)
        request.on_response, request.on_error = call.respond, call.respond_error
        return call.take(request)

    def _generate(self, call: Call, route: Route) -> None:
        name = self._model_name(route, name_of(call.exchange.headers.get(TARGET_MODEL, "")))
        self._inflated(call, name, functools.partial(self._generate_body, call, route, name))

    def _generate_body(self, call: Call, route: Route, name: str, body: bytes) -> None:
        version = path_version(route.version)
        config = self.engine.index.config(name, version)
        if len(body) > LARGE and call.read is None and not self._takes_body(route, name):
            go_on = functools.partial(self._generate_body, call, route, name, body)
            types = {} if config is None else {spec.name: spec.data_type for spec in config.inputs}
            read = functools.partial(read_generate, types)
            self._aside(call, name, self._read_aside(call, read, body, len(body), go_on))
            return
        make = functools.partial(self._made_generate, call, route, body)
        if SESSION_ID in call.exchange.headers and route.flavor is not Flavor.KSERVE:
            self._in_session(call, route, name, body, make)
            return
        if (
            config is None
            or not self.engine.index.is_resident(name)
            or not self.engine.submit(name, version, make(config))
        ):
            self._aside(call, name, self.engine.submit_made(name, version, make))

    def _made_generate(self, call: Call, route: Route, body: bytes, config: ModelConfig) -> InferenceRequest:
        """Which keys are tensors depends on the model's configuration."""
        if takes_raw_body(config) and route.flavor is not Flavor.KSERVE:
            call.kind = InferenceType.INFER
            return self._body_request(call, route, body)
        request = decode_generate(body, config, self._decoder.layouts, call.complete, call.read)
        request.on_response, request.on_error = call.respond, call.respond_error
        return self._taken(call, request)

    def _inflated(self, call: Call, name: str, go_on: Callable[[bytes], None]) -> None:
        """Go on with the body as it was before it was compressed, if it was."""
        exchange = call.exchange
        encoding = exchange.headers.get("content-encoding")
        if encoding is None:
            go_on(exchange.body)
            return
        body = inflate_quickly(exchange.body, encoding, self._max_body) if len(exchange.body) <= _QUICK_BYTES else None
        if body is None:
            self._aside(call, name, self._inflated_aside(exchange, encoding, go_on))
        else:
            self._hold(exchange, body)
            go_on(body)

    async def _inflated_aside(self, exchange: Exchange, encoding: str, go_on: Callable[[bytes], None]) -> LoadReport:
        with Inflating(self._memory) as inflating:
            body = await by_thread(inflate, exchange.body, encoding, self._max_body, inflating.take)
        self._hold(exchange, body)
        go_on(body)
        return LoadReport()

    def _hold(self, exchange: Exchange, body: bytes) -> None:
        """Count what a body is once inflated."""
        if not exchange.hold(len(body)):
            raise out_of_request_memory(self._memory)

    def _large_json(self, call: Call, route: Route, name: str, body: bytes) -> int:
        """How much JSON there is in a large body, 0 where it is little, is read already, or nobody wants to know."""
        if call.read is not None or self._takes_body(route, name):
            return 0
        try:
            said, _ = header_length(call.exchange.headers, len(body), kserve=route.flavor is Flavor.KSERVE)
        except MmeError:  # which is raised in its turn
            return 0
        length = len(body) if said is None else said
        return length if length > LARGE else 0

    async def _read_aside(
        self, call: Call, read: Reads, body: bytes, length: int, go_on: Callable[[], None]
    ) -> LoadReport:
        """Go on with a body once a thread has read its JSON."""
        found = await self._json.read(read, body, length, call)
        if found is not None and not call.over:
            call.read = found
            go_on()
        return LoadReport()

    def _model_name(self, route: Route, header: str) -> str:
        name = route.model or header or self.default_model
        if not name:
            raise MmeError(  # which boto3 knows as a ValidationError, not as an error of some model
                Kind.UNKNOWN_MODEL if route.flavor is Flavor.RUNTIME else Kind.INVALID_ARGUMENT,
                "this endpoint serves many models: name one in the header X-Amzn-SageMaker-Target-Model "
                "(TargetModel in boto3)",
            )
        if route.model and header and route.flavor is Flavor.SAGEMAKER:
            self.engine.registry.check_alias(name, header)
        return self.engine.registry.canonical(name)

    def _aside(self, call: Call, name: str, submission: Coroutine[None, None, LoadReport]) -> None:
        task = asyncio.get_running_loop().create_task(self._submit_aside(call, name, submission))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _submit_aside(self, call: Call, name: str, submission: Coroutine[None, None, LoadReport]) -> None:
        """Submit what may have to wait for a load; whatever goes wrong is answered."""
        try:
            async with asyncio.timeout(self._patience if call.flavor is Flavor.RUNTIME else None):
                report = await submission
        except TimeoutError:
            call.not_ready(name)
        except Exception as error:  # noqa: BLE001 - nobody awaits this task: what is not answered here never is
            call.fail(known(error))
        else:
            if report.load:
                call.report = report


def _several() -> MmeError:
    return MmeError(
        Kind.UNSUPPORTED,
        "HTTP end point doesn't support models with decoupled transaction policy: use generate_stream, /invocations, "
        "or ModelStreamInfer over gRPC",
    )
