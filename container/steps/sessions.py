"""SageMaker's stateful sessions: which there are, of which model, and until when. PURE.

A session is created on a client's request, routed to its model, and ends when the client closes it or lets it lie. Its
id is a number in digits: what a model is told of the sequence that its requests make is a number or a text, as the
model has it.

Times are seconds of one monotonic clock.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

from model_handlers.errors import Kind, MmeError, invalid_argument

if TYPE_CHECKING:
    from collections.abc import Callable

MOST = 65_536  # sessions at a time


class Session:
    """One session.

    Attributes:
        id: what the client calls it by.
        model: the registered name of its model.
        last: when it was used last.
        busy: its requests that are not answered yet.
        begun: whether a request has begun the sequence that it is to its model.
    """

    def __init__(self, session_id: str, model: str, now: float) -> None:
        self.id = session_id
        self.model = model
        self.last = now
        self.busy = 0
        self.begun = False

    def __repr__(self) -> str:
        return f"<Session {self.id} of {self.model}>"

    def correlation_id(self, *, text: bool) -> int | str:
        """What its model knows it by."""
        return self.id if text else int(self.id)


class Sessions:
    """All sessions.

    Args:
        seconds: how long one may lie unused.
        make_id: a number that nobody can guess.
    """

    def __init__(self, seconds: float, make_id: Callable[[], int]) -> None:
        self.seconds = seconds
        self._make_id = make_id
        self._sessions: OrderedDict[str, Session] = OrderedDict()  # by their last use

    def __len__(self) -> int:
        return len(self._sessions)

    def begin(self, model: str, now: float) -> Session:
        """A new session, in use.

        Raises:
            MmeError: UNAVAILABLE when there are too many.
        """
        if len(self._sessions) >= MOST:
            raise MmeError(Kind.UNAVAILABLE, f"there are {MOST} sessions already; close some, or try again later")
        session = Session(str(self._make_id()), model, now)
        self._sessions[session.id] = session
        session.busy = 1
        return session

    def use(self, session_id: str, model: str, now: float) -> Session:
        """A session of a model, in use until it is left.

        Raises:
            MmeError: INVALID_ARGUMENT when there is no such session.
        """
        session = self._sessions.get(session_id)
        if session is None or session.model != model:
            raise self.unknown(session_id, model)
        session.busy += 1
        self._touch(session, now)
        return session

    def unknown(self, session_id: str, model: str) -> MmeError:
        """There is no such session."""
        return invalid_argument(
            f"session '{session_id[:64]}' of model '{model}' is not there: it was closed, was not used for "
            f"{self.seconds:g} s, or left memory with its model; begin another with NEW_SESSION"
        )

    def check(self, session: Session) -> None:
        """Its model is there: is it still?

        Raises:
            MmeError: INVALID_ARGUMENT when it is over.
        """
        if session.id not in self._sessions:
            raise self.unknown(session.id, session.model)

    def leave(self, session: Session, now: float) -> None:
        """A request of it was answered."""
        session.busy -= 1
        if session.id in self._sessions:
            self._touch(session, now)

    def end(self, session: Session) -> None:
        """It is over; nothing if it was."""
        self._sessions.pop(session.id, None)

    def end_begun(self, model: str) -> None:
        """The model has left memory, and with it what it knew of its sessions; of some it knew nothing yet."""
        for session in [session for session in self._sessions.values() if session.model == model and session.begun]:
            self.end(session)

    def expire(self, now: float) -> list[Session]:
        """Take out those that were not used for too long. Who waits for an answer uses his."""
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
