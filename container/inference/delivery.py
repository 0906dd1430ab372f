"""How the bytes of an answer leave: as they are, or in the frames of an AWS event stream. On the event loop."""

from __future__ import annotations

from typing import TYPE_CHECKING

from container.codec import event_stream

if TYPE_CHECKING:
    from collections.abc import Sequence

    from container.inference.exchange import Exchange

_EVENT_STREAM = b"Content-Type: application/vnd.amazon.eventstream\r\n"
_INNER_TYPE = b"X-Amzn-SageMaker-Content-Type: "


class Delivery:
    """One answer as it is: `send`, or `begin`, `write` … and then `end`, `break_off` or `cut`.

    Args:
        exchange: whose answer it is.
    """

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange

    @property
    def outlives_errors(self) -> bool:
        """Whether something may follow an error."""
        return True

    def send(self, content_type: bytes, headers: bytes, parts: Sequence[bytes | memoryview]) -> None:
        """All of it at once. `headers` holds whole lines."""
        self._exchange.respond(200, b"Content-Type: %b\r\n%b" % (content_type, headers), parts)

    def begin(self, content_type: bytes, headers: bytes, status: int) -> None:
        """Begin one whose length nobody knows yet."""
        self._exchange.begin(status, b"Content-Type: %b\r\n%b" % (content_type, headers))

    def write(self, data: bytes | memoryview) -> None:
        """A part of it."""
        self._exchange.write(data)

    def end(self) -> None:
        """It is whole."""
        self._exchange.end()

    def break_off(self, message: str, last: bytes | None) -> None:
        """Something went wrong: `last` says so to the client; None where it would be taken for a piece of the body."""
        del message
        if last is None:
            self._exchange.cut()
        else:
            self._exchange.write(last)
            self._exchange.end()


class FramedDelivery(Delivery):
    """One answer in frames, the last of which may be an exception."""

    @property
    def outlives_errors(self) -> bool:
        """An exception is the last frame."""
        return False

    def send(self, content_type: bytes, headers: bytes, parts: Sequence[bytes | memoryview]) -> None:
        """A frame a part."""
        self.begin(content_type, headers, 200)
        for part in parts:
            self.write(part)
        self.end()

    def begin(self, content_type: bytes, headers: bytes, status: int) -> None:
        """Of the type of frames; another header tells what is in them."""
        self._exchange.begin(status, b"%b%b%b\r\n%b" % (_EVENT_STREAM, _INNER_TYPE, content_type, headers))

    def write(self, data: bytes | memoryview) -> None:
        """A frame."""
        self._exchange.write(event_stream.payload_part(data))

    def break_off(self, message: str, last: bytes | None) -> None:
        """The exception says what went wrong, in any case."""
        del last
        self._exchange.write(event_stream.exception(message))
        self._exchange.end()
