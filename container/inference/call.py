"""One inference request between its bytes: what becomes of its responses, or of its error. On the event loop.

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
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from container.codec.body import body_of, content_type_of
from container.codec.classification import classified
from container.codec.compression import ENCODINGS, compress, wanted_encoding
from container.codec.effort import takes_long
from container.codec.encode import encode, encode_line
from container.codec.framing import BINARY_TYPE
from container.codec.generate import encode_generate, error_event
from container.codec.shared import NO_PLACES
from container.codec.sse import event
from container.control.targets import Flavor, InferenceType
from container.inference import errors
from container.inference.delivery import Delivery, FramedDelivery
from container.inference.errors import known, log_failure
from container.inference.headers import CUSTOM_ATTRIBUTES, TARGET_VARIANT
from container.inference.in_turn import InTurn
from container.steps.shared_memory import Place  # noqa: TC001 - compiled, the types of fields are looked up
from model_handlers.errors import Kind, MmeError, invalid_argument
from serve.request import InferenceResponse
from serve.threads import ThreadPool

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from container.codec.encode import Reply
    from container.codec.fields import Read
    from container.inference.exchange import Exchange
    from container.inference.request_limit import RequestLimit
    from container.traces.traced import Following
    from serve.request import InferenceRequest, LoadReport

    Parts = Sequence[bytes | memoryview]
    Names = tuple[bool, Mapping[str, Sequence[str]]]
    ClassNames = Callable[[str, str], Names]

T = TypeVar("T")

_JSON = b"application/json"
_ENCODINGS = f"Accept-Encoding: {', '.join(ENCODINGS)}\r\n".encode()
_COMPRESSORS = ThreadPool("compress", idle_seconds=0)
_QUICK_BYTES = 1 << 18  # which take less than a millisecond to be compressed; more of them are for another thread


class Wire(NamedTuple):
    """How the responses of a streamed answer are written.

    Attributes:
        content_type: of the whole.
        response: one of them as bytes, but for the outputs that have a place in shared memory; and whether it says NaN
            and Infinity in place of null.
        error: the sentence that ends it.
    """

    content_type: bytes
    response: Callable[[InferenceResponse, dict[str, Place], bool], bytes]
    error: Callable[[str], bytes]


LINES = Wire(
    b"application/jsonlines",
    lambda response, places, literal: encode_line(response, places, literal=literal),
    lambda message: errors.error_body(message) + b"\n",
)
EVENTS = Wire(
    b"text/event-stream; charset=utf-8",
    lambda response, _, literal: event(encode_generate(response, literal=literal)),
    error_event,
)


class Call:
    """One request.

    Args:
        exchange: where it came from and where its answer goes.
        flavor: the protocol that it came by.
        kind: what its body means and how its answers are written.
        event_stream: whether its answer travels in frames of an AWS event stream.
        literal_json: whether its answer says NaN and Infinity in place of null.
        limit: of the time that it may take; None for none.
        following: who follows it for a trace.

    Attributes:
        exchange, flavor, kind: as given; what its body is may be for its model to say, and then it is of type `infer`.
        kserve_form: whether a binary answer tells the length of its header as KServe has it.
        reply: how the client wants tensors. Set once the request is decoded; None where the answer is a body.
        read: what a thread has read of its body's JSON, or why it could not; None until it is decoded, and again then.
        request: what was submitted, None once it is over.
        report: what its load cost, if it had to wait for one.
        class_names: tells of a model and version whether it batches, and what its classes are called. Set where the
            client wants classes.
        session: header lines that tell of the session it is of.
        over: whether nobody waits for an answer any more.
    """

    def __init__(
        self,
        exchange: Exchange,
        flavor: Flavor,
        kind: InferenceType = InferenceType.INFER,
        *,
        event_stream: bool = False,
        literal_json: bool = False,
        limit: RequestLimit | None = None,
        following: Following | None = None,
    ) -> None:
        self.exchange = exchange
        self.flavor = flavor
        self.kind = kind
        self.kserve_form = False
        self.reply: Reply | None = None
        self.read: Read = None
        self.report: LoadReport | None = None
        self.request: InferenceRequest | None = None
        self.class_names: ClassNames | None = None
        self.session = b""
        self.over = False
        self._delivery = FramedDelivery(exchange) if event_stream else Delivery(exchange)
        self._literal = literal_json
        self._following = following
        self._begun = False
        self._first: InferenceResponse | None = None  # of a call of type `generate`
        self._turn: InTurn | None = None  # once a thread has had to write for it
        self._limit = limit
        if limit is not None:
            limit.begin(self)

    def take(self, request: InferenceRequest) -> InferenceRequest:
        """What is submitted for it; cancelled, if the client has left before it could be made."""
        self.read = None
        if self._following is not None:
            self._following.follow(request)
        if self.over:
            request.cancel()
        else:
            self.request = request
        return request

    # -- what the engine tells -----------------------------------------------------------------------------------

    def complete(self, request: InferenceRequest, result: InferenceResponse | MmeError | None) -> None:
        """The one response, the error, or the end of several responses."""
        if self.over or (
            self._turn is not None and self._turn.waits(functools.partial(self.complete, request, result))
        ):
            return
        if self.kind is InferenceType.GENERATE:
            result = result or self._first or _not_one()
        elif self.kind is InferenceType.GENERATE_STREAM and isinstance(result, InferenceResponse):
            self.respond(request, result)  # the only response is an event as well
            self.complete(request, None)
            return
        if isinstance(result, InferenceResponse):
            self._answer(result)
        elif isinstance(result, MmeError):
            self.fail(result)
        else:
            self._begin_once(self._wire.content_type)
            self._delivery.end()
            self._finish(None)

    def respond(self, request: InferenceRequest, response: InferenceResponse) -> None:
        """One response of several."""
        if self.over or (
            self._turn is not None and self._turn.waits(functools.partial(self.respond, request, response))
        ):
            return
        if self.kind is InferenceType.GENERATE:
            self._keep(request, response)
            return
        if self._limit is not None:
            self._limit.renew(self)
        try:
            if (slow := self._slow_reply(response)) is not None:
                self._work_out(self._line, response, slow, functools.partial(self._responded, request))
                return
            content_type, data = self._part(response)
        except Exception as error:  # noqa: BLE001 - a response that can't be written ends this stream and no other
            self.fail(known(error))
            request.cancel()
            return
        self._begin_once(content_type)
        self._delivery.write(data)

    def _keep(self, request: InferenceRequest, response: InferenceResponse) -> None:
        """The first of type `generate` is its answer; a second one is too many."""
        if self._first is None:
            self._first = response
        else:
            self.fail(_not_one())
            request.cancel()

    def _responded(self, request: InferenceRequest, line: asyncio.Future[bytes]) -> None:
        """A thread has written one response of several."""
        if self.over:
            return
        try:
            data = line.result()
        except Exception as error:  # noqa: BLE001 - as above
            self.fail(known(error))
            request.cancel()
            return
        self._begin_once(self._wire.content_type)
        self._delivery.write(data)

    def respond_error(self, request: InferenceRequest, error: MmeError) -> None:
        """An error of the model that others may follow; where the answer has no room for them it is the last."""
        if self.over or (
            self._turn is not None and self._turn.waits(functools.partial(self.respond_error, request, error))
        ):
            return
        if self._goes_on_behind(error):
            log_failure(error, self.exchange)
            self._delivery.write(self._wire.error(error.message))
        else:
            self.fail(error)
            request.cancel()

    def fail(self, error: MmeError) -> None:
        """Answer with an error, or end what has begun with it."""
        if self.over:
            return
        log_failure(error, self.exchange)
        if self._begun:
            is_body = self.reply is None and self.kind is not InferenceType.GENERATE_STREAM
            self._delivery.break_off(error.message, None if is_body else self._wire.error(error.message))
            self._finish(error)
            return
        status, headers, body = errors.error(error, self.flavor.value)
        if error.kind is Kind.UNSUPPORTED and "content-encoding" in self.exchange.headers:
            headers += _ENCODINGS
        self._refuse(status, headers, body)
        self._finish(error)

    def acknowledge(self, body: bytes) -> None:
        """Answer a request that was not for the model, if anybody waits for it."""
        if not self.over:
            self._send(_JSON, self._headers(None), (body,))

    def not_ready(self, name: str) -> None:
        """The model still loads; the Runtime API answers so that the client may try again."""
        if self.over:
            return
        self._refuse(
            *errors.runtime_error(
                "ModelNotReadyException", f"Model '{name}' is still being downloaded or loaded; try again"
            )
        )
        self._finish(MmeError(Kind.UNAVAILABLE, f"model '{name}' still loads"))

    def expire(self, error: MmeError) -> None:
        """It takes too long: its client is told, and a queued request need not run."""
        request = self.request
        self.fail(error)
        if request is not None:
            request.cancel()

    def abandon(self) -> None:
        """The client left: a queued request need not run."""
        if self.request is not None:
            self.request.cancel()
        self._finish(MmeError(Kind.CANCELLED, "the client left"))

    def _finish(self, error: MmeError | None) -> None:
        """Nobody waits any more: all is said, or the client has left.

        Who knew each other until now would stay until the collector comes, and with them bodies of any size.
        """
        self.over = True
        if self._limit is not None:
            self._limit.over(self)
        self.request = self.read = self.exchange.on_disconnect = None
        if self._turn is not None and self.reply is not None:
            self.reply.places.clear()
        if self._following is not None:
            if self.report is not None:
                self._following.loaded(self.report)
            self._following.over(error)

    # -- one response --------------------------------------------------------------------------------------------

    def _answer(self, response: InferenceResponse) -> None:
        try:
            if (slow := self._slow_reply(response)) is not None:
                self._work_out(self._whole, response, slow, functools.partial(self._answered, response))
                return
            encoded = self._encoded(response)
        except Exception as error:  # noqa: BLE001 - an answer that can't be written must not keep its batch from theirs
            self.fail(known(error))
            return
        self._send_encoded(response, encoded)

    def _answered(self, response: InferenceResponse, written: asyncio.Future[tuple[Parts, int | None]]) -> None:
        """A thread has written the one answer."""
        if self.over:
            return
        try:
            encoded = self._told(*written.result())
        except Exception as error:  # noqa: BLE001 - whatever it is, the client is told
            self.fail(known(error))
        else:
            self._send_encoded(response, encoded)

    def _slow_reply(self, response: InferenceResponse) -> Reply | None:
        """How the client wants its answer, kept for a thread, if writing the response takes long."""
        reply = self.reply
        if reply is None or not takes_long(response, reply.places, reply.classes, reply):
            return None
        return reply.kept()

    def _work_out(
        self,
        write: Callable[[InferenceResponse, Reply], T],
        response: InferenceResponse,
        reply: Reply,
        done: Callable[[asyncio.Future[T]], None],
    ) -> None:
        """Have a thread write a response; what happens to the request meanwhile waits for it."""
        self.reply = reply.kept()  # for the responses behind it: by their turn the request may be over
        self._turn = self._turn or InTurn()
        self._turn.work_out(functools.partial(_written, write, response, reply, self._names(response)), done)

    def _whole(self, response: InferenceResponse, reply: Reply) -> tuple[Parts, int | None]:
        return encode(response, reply, literal=self._literal)

    def _line(self, response: InferenceResponse, reply: Reply) -> bytes:
        return self._wire.response(response, reply.places, self._literal)

    def _send_encoded(self, response: InferenceResponse, encoded: tuple[bytes, bytes, Parts]) -> None:
        content_type, lines, parts = encoded
        try:
            headers = lines + self._headers(response)
        except Exception as error:  # noqa: BLE001 - as above
            self.fail(known(error))
            return
        accepted = self.exchange.headers.get("accept-encoding")
        encoding = None
        if accepted and self.flavor is Flavor.KSERVE and self.kind is InferenceType.INFER:
            encoding = wanted_encoding(accepted)
        if encoding:
            self._send_compressed(content_type, headers, parts, encoding)
        else:
            self._send(content_type, headers, parts)

    def _encoded(self, response: InferenceResponse) -> tuple[bytes, bytes, Parts]:
        """Content type, further header lines, and body."""
        if self.kind is InferenceType.GENERATE:
            return _JSON, b"", (encode_generate(response, literal=self._literal),)
        if self.reply is None:
            return content_type_of(response), b"", (body_of(response),)
        return self._told(*self._whole(self._shown(response), self.reply))

    def _told(self, parts: Parts, length: int | None) -> tuple[bytes, bytes, Parts]:
        """See `_encoded`, of what `encode` returned."""
        if length is None:
            return _JSON, b"", parts
        if self.kserve_form:
            return b"application/octet-stream", b"Inference-Header-Content-Length: %d\r\n" % length, parts
        return b"%b%d" % (BINARY_TYPE, length), b"", parts

    def _headers(self, response: InferenceResponse | None) -> bytes:
        headers = self._attributes() + self.session
        if self.flavor is Flavor.RUNTIME:
            headers += errors.runtime_headers(self.exchange.headers.get(TARGET_VARIANT, ""))
        if self.report is not None or self.flavor is Flavor.RUNTIME:
            headers += errors.server_timing(None if response is None else response.timings, self.report)
        return headers

    def _attributes(self) -> bytes:
        """The client's custom attributes, which every answer hands back."""
        attributes = self.exchange.headers.get(CUSTOM_ATTRIBUTES)
        return b"" if attributes is None else errors.custom_attributes(attributes)

    def _refuse(self, status: int, headers: bytes, body: bytes) -> None:
        if self.reply is not None:  # of a request that may not have been accepted
            self.reply.places.clear()
        self.exchange.respond(status, headers + self._attributes(), (body,))

    def _part(self, response: InferenceResponse) -> tuple[bytes, bytes | memoryview]:
        """Content type of the whole, if this is the first of several responses, and its bytes."""
        wire = self._wire
        if self.kind is InferenceType.GENERATE_STREAM:
            return wire.content_type, wire.response(response, NO_PLACES, self._literal)
        if self.reply is None:
            return content_type_of(response), body_of(response)
        return wire.content_type, wire.response(self._shown(response), self.reply.places, self._literal)

    def _shown(self, response: InferenceResponse) -> InferenceResponse:
        """With classes in place of tensors, where the client wants them."""
        return response if self.reply is None else _shown(response, self.reply, self._names(response))

    def _names(self, response: InferenceResponse) -> Names | None:
        """What has to be known of a model for its classes, None where the client wants none."""
        return None if self.class_names is None else self.class_names(response.model_name, response.model_version)

    # -- to the client -------------------------------------------------------------------------------------------

    def _send_compressed(self, content_type: bytes, headers: bytes, parts: Parts, encoding: str) -> None:
        headers += b"Content-Encoding: %b\r\nVary: Accept-Encoding\r\n" % encoding.encode()
        if sum(len(part) for part in parts) <= _QUICK_BYTES:
            self._send(content_type, headers, (compress(parts, encoding),))
            return
        work = asyncio.wrap_future(_COMPRESSORS.submit(compress, parts, encoding))
        work.add_done_callback(functools.partial(self._send_worked_out, content_type, headers))

    def _send_worked_out(self, content_type: bytes, headers: bytes, body: asyncio.Future[bytes]) -> None:
        if self.over:
            return
        try:
            parts = (body.result(),)
        except Exception as error:  # noqa: BLE001 - whatever it is, the client is told
            self.fail(known(error))
        else:
            self._send(content_type, headers, parts)

    def _send(self, content_type: bytes, headers: bytes, parts: Parts) -> None:
        self._delivery.send(content_type, headers, parts)
        self._finish(None)

    def _begin_once(self, content_type: bytes, status: int = 200) -> None:
        if not self._begun:
            self._begun = True
            self._delivery.begin(content_type, self._headers(None), status)

    @property
    def _wire(self) -> Wire:
        return EVENTS if self.kind is InferenceType.GENERATE_STREAM else LINES

    def _goes_on_behind(self, error: MmeError) -> bool:
        """Whether anything may follow an error of the model: not in a body, where it would be taken for a piece."""
        if not self._delivery.outlives_errors:
            return False
        if self.kind is not InferenceType.GENERATE_STREAM:
            return self._begun and self.reply is not None
        if not self._begun:
            if self.flavor is Flavor.RUNTIME:  # whose errors are documents of their own
                return False
            status, _, _ = errors.error(error, self.flavor.value)
            self._begin_once(self._wire.content_type, status)
        return True


def _shown(response: InferenceResponse, reply: Reply, names: Names | None) -> InferenceResponse:
    if names is None:
        return response
    batches, labels = names
    return classified(response, reply.classes, labels, batches=batches)


def _written(
    write: Callable[[InferenceResponse, Reply], T], response: InferenceResponse, reply: Reply, names: Names | None
) -> T:
    """A response as bytes. On any thread."""
    return write(_shown(response, reply, names), reply)


def _not_one() -> MmeError:
    return invalid_argument(
        "generate expects model to produce exactly 1 response, use generate stream for model that generates various "
        "number of responses"
    )
