"""SageMaker's stateful sessions: each is a sequence to its model, and ends when it is closed or left unused.

NEW_SESSION in the header creates a session, with or without a request for its model in the body; an id routes to it;
a body `{"requestType": "CLOSE"}` ends it, and so does a request that says `sequence_end`. Everything here runs on the
event loop. `Sessions` is pure: its times are seconds of one monotonic clock.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import OrderedDict
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import orjson

from container.steps import CallStep
from model_handlers.config.model_config import ControlKind
from model_handlers.errors import Kind, MmeError, invalid_argument
from model_handlers.requests import FLAG_SEQUENCE_END, FLAG_SEQUENCE_KEPT, FLAG_SEQUENCE_START
from model_handlers.scripts.default_script import SESSION_ID as BODY_SESSION_ID
from model_handlers.tensor import BYTES
from serve.statistics import CacheEvent, EventType

if TYPE_CHECKING:
    from collections.abc import Callable

    from container.inference.call import Call
    from container.inference.http import HttpReply
    from model_handlers.config.model_config import ModelConfig
    from serve.engine import Engine
    from serve.request import InferenceRequest, InferenceResponse


MOST = 65_536  # sessions at a time


class Session:
    """One client's session with one model."""

    def __init__(self, session_id: str, model: str, now: float) -> None:
        self.id = session_id
        self.model = model
        self.last = now
        self.busy = 0  # requests that are not answered yet
        self.begun = False  # whether a request has begun the sequence that it is to its model

    def __repr__(self) -> str:
        return f"<Session {self.id} of {self.model}>"

    def correlation_id(self, *, text: bool) -> int | str:
        return self.id if text else int(self.id)


class Sessions:
    """All sessions, each of which may lie unused for some seconds; `make_id` makes a number that can't be guessed."""

    def __init__(self, seconds: float, make_id: Callable[[], int]) -> None:
        self.seconds = seconds
        self._make_id = make_id
        self._sessions: OrderedDict[str, Session] = OrderedDict()  # by their last use

    def __len__(self) -> int:
        return len(self._sessions)

    def begin(self, model: str, now: float) -> Session:
        if len(self._sessions) >= MOST:
            raise MmeError(Kind.UNAVAILABLE, f"there are {MOST} sessions already; close some, or try again later")
        session = Session(str(self._make_id()), model, now)
        self._sessions[session.id] = session
        session.busy = 1
        return session

    def use(self, session_id: str, model: str, now: float) -> Session:
        session = self._sessions.get(session_id)
        if session is None or session.model != model:
            raise self.unknown(session_id, model)
        session.busy += 1
        self._touch(session, now)
        return session

    def unknown(self, session_id: str, model: str) -> MmeError:
        return invalid_argument(
            f"session '{session_id[:64]}' of model '{model}' is not there: it was closed, was not used for "
            f"{self.seconds:g} s, or left memory with its model; begin another with NEW_SESSION"
        )

    def check(self, session: Session) -> None:
        if session.id not in self._sessions:
            raise self.unknown(session.id, session.model)

    def leave(self, session: Session, now: float) -> None:
        session.busy -= 1
        if session.id in self._sessions:
            self._touch(session, now)

    def end(self, session: Session) -> None:
        self._sessions.pop(session.id, None)

    def end_begun(self, model: str) -> list[Session]:
        """The model has left memory, and with it what it knew of its sessions; of some it knew nothing yet."""
        over = [session for session in self._sessions.values() if session.model == model and session.begun]
        for session in over:
            self.end(session)
        return over

    def expire(self, now: float) -> list[Session]:
        """Take out those that were not used for too long. One that waits for an answer is used."""
        over = []
        while self._sessions:
            session = next(iter(self._sessions.values()))
            if session.last + self.seconds > now:
                break
            if session.busy:
                self._touch(session, now)
            else:
                self.end(session)
                over.append(session)
        return over

    def next_expiry(self) -> float | None:
        """When the next one may be over, None without sessions."""
        first = next(iter(self._sessions.values()), None)
        return None if first is None else first.last + self.seconds

    def _touch(self, session: Session, now: float) -> None:
        session.last = now
        self._sessions.move_to_end(session.id)


SESSION_ID = "x-amzn-sagemaker-session-id"
NEW = "NEW_SESSION"
CLOSE = "CLOSE"
_WORD = b"requestType"
_MAX_WORD = 1024  # bytes of a body that says nothing but what becomes of a session
_ID_BITS = 62  # fits into whatever control tensor a model has for it, but those of 32 bits, which get the lower part
_now = time.monotonic


class SessionCalls:
    """The sessions of a server; where they are not enabled, requests with the header are refused."""

    def __init__(self, engine: Engine, seconds: float, *, enabled: bool) -> None:
        self._engine = engine
        self._enabled = enabled
        self.known = Sessions(seconds, lambda: secrets.randbits(_ID_BITS) + 1)
        self._timer: asyncio.TimerHandle | None = None
        self._listens = False  # whether it is told of loads and unloads: from the first session on

    def visit(self, model: str, asked: str, body: bytes, reply: HttpReply, *, creates: bool) -> SessionRequest:
        """What the header of a request asks for; `reply` tells of the session, which can be created if it `creates`."""
        if not self._enabled:
            raise invalid_argument(
                "stateful sessions are switched off here: leave SessionId out, or start the server with "
                "SAGEMAKER_ENABLE_STATEFUL_SESSIONS=true"
            )
        command = _command(body)
        if asked != NEW:
            command = command if command == CLOSE else ""
            return SessionRequest(self, self.known.use(asked, model, _now()), command, reply, new=False)
        if not creates:
            raise invalid_argument("a session can't be created on a streamed invocation: use invoke_endpoint")
        if command == CLOSE:
            raise invalid_argument("a session is closed by its id in SessionId, which is NEW_SESSION here")
        visit = SessionRequest(self, self.known.begin(model, _now()), command, reply, new=True)
        if not self._listens:
            self._listens = True
            self._engine.cache.events.listen(self._heard)
        self._set_timer()
        return visit

    def end(self, session: Session) -> None:
        """It is over, and so is its sequence, once what was sent of it has been executed."""
        self.known.end(session)
        for text in (False, True):
            self._engine.end_sequence(session.model, session.correlation_id(text=text))

    def created(self, session: Session) -> bytes:
        """The header lines that tell the client of a new session. Of Amazon's clients some read one, some the other."""
        until = datetime.fromtimestamp(time.time() + self.known.seconds, UTC)
        said = f"{session.id}; Expires={until:%Y-%m-%dT%H:%M:%SZ}\r\n"
        return f"X-Amzn-SageMaker-New-Session-Id: {said}X-Amzn-SageMaker-Session-Id: {said}".encode()

    def _heard(self, event: CacheEvent) -> None:
        """End the sessions whose sequences were lost: their model was loaded again, or unloaded without a successor.

        So are those of ensembles around it. Of one that was replaced the unloading is told when its successor serves.
        """
        gone = event.type is EventType.UNLOADED and not self._engine.index.is_resident(event.name)
        if gone or event.type is EventType.LOADED:
            for model in (event.name, *self._engine.wholes_of(event.name)):
                for session in self.known.end_begun(model):
                    self.end(session)  # the other models of an ensemble know of it still

    def _set_timer(self) -> None:
        at = self.known.next_expiry()
        if self._timer is None and at is not None:
            self._timer = asyncio.get_running_loop().call_later(max(at - _now(), 0), self._expire)

    def _expire(self) -> None:
        self._timer = None
        for session in self.known.expire(_now()):
            self.end(session)
        self._set_timer()


class SessionRequest(CallStep):
    """One request of a session.

    The session ends with it

        where it creates the session, and the client was never told the id
        where it closes the session or ends its sequence, and succeeded
        where it was cancelled, and its model kept a sequence, which has ended then

    Attributes:
        session: that of the request.
        command: what the body says instead of being a request for the model: NEW, CLOSE, or "" for such a request.
        new: whether the request creates the session.
    """

    def __init__(self, calls: SessionCalls, session: Session, command: str, reply: HttpReply, *, new: bool) -> None:
        self._calls = calls
        self.session = session
        self.command = command
        self.new = new
        self._reply = reply
        self._starts = False
        self._ends = command == CLOSE
        self._has_sequence = False
        self._set_reply_headers()

    def _set_reply_headers(self) -> None:
        lines = self._calls.created(self.session) if self.new else b""
        if self._ends:
            lines += b"X-Amzn-SageMaker-Closed-Session-Id: %s\r\n" % self.session.id.encode()
        self._reply.session = lines

    def made(self, call: Call, request: InferenceRequest, config: ModelConfig) -> None:  # noqa: ARG002
        """Make the request a step of the session's sequence; one that names a sequence itself is left alone."""
        self._calls.known.check(self.session)
        self._ends = bool(request.flags & FLAG_SEQUENCE_END)
        self._has_sequence = config.sequence_batching is not None or bool(config.ensemble)
        if not request.correlation_id:
            request.correlation_id = self.session.correlation_id(text=_wants_text(config))
            request.flags |= FLAG_SEQUENCE_KEPT
            if not self.session.begun:
                self._starts = self.session.begun = True
                request.flags |= FLAG_SEQUENCE_START
        if config.takes_raw_body:
            request.parameters = {**(request.parameters or {}), BODY_SESSION_ID: self.session.id}
        self._set_reply_headers()

    def refused(self, call: Call) -> None:  # noqa: ARG002
        """A request that is not accepted has begun nothing."""
        if self._starts:
            self.session.begun = False
        self.leave(failed=True)

    def completed(self, call: Call, result: InferenceResponse | MmeError | None) -> None:
        failed = isinstance(result, MmeError) or (self.new and call.over)  # whose id was never told
        if isinstance(result, MmeError) and result.kind is Kind.CANCELLED and self._has_sequence:
            self._ends, failed = True, False  # its sequence has ended with it
        self.leave(failed=failed)

    def leave(self, *, failed: bool) -> None:
        """Nothing more is done for the request in its session."""
        self._calls.known.leave(self.session, _now())
        if (self.new and failed) or (self._ends and not failed):
            self._calls.end(self.session)


def _command(body: bytes) -> str:
    """What a body says of its session that is nothing else: NEW, CLOSE or ""."""
    if len(body) > _MAX_WORD or _WORD not in body:
        return ""
    try:
        document = orjson.loads(body)
    except orjson.JSONDecodeError:
        return ""
    command = document.get("requestType") if isinstance(document, dict) else None
    return command if command in (NEW, CLOSE) else ""


def _wants_text(config: ModelConfig) -> bool:
    batching = config.sequence_batching
    return batching is not None and any(
        control.kind is ControlKind.CONTROL_SEQUENCE_CORRID and control.data_type is BYTES
        for _, control in batching.controls()
    )
