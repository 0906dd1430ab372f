"""What one request has been answered: by its response sender, on any thread, or by what `execute` returned for it.

A sender belongs to the model's code. When that lets go of it, the request has had its last response: the model can't
send another one.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from model_handlers.errors import Kind, MmeError
from model_handlers.python.answers import answer_of
from model_handlers.python.pb_errors import TritonModelException
from model_handlers.python.pb_messages import InferenceResponseSender
from model_handlers.python.pb_responses import InferenceResponse

if TYPE_CHECKING:
    from model_handlers.config.model_config import ModelConfig
    from model_handlers.requests import ModelRequest, Responder

_FINAL = 1  # TRITONSERVER_RESPONSE_COMPLETE_FINAL


class Responses:
    """The responses to one request.

    Whoever takes them takes what comes first as the last one, be it a response, an error or the end of the sender: so
    the ways in which a request may end here need not wait for one another. Only `send` keeps an order among threads.

    Attributes:
        taken: whether the model asked for a sender.
        again: whether the request is to be executed once more: then what sends its last response is another sender.

    Args:
        config: the model's.
        lane: the instance's name.
        request: what is answered.
    """

    def __init__(self, config: ModelConfig, lane: str, request: ModelRequest) -> None:
        self._config = config
        self._lane = lane
        self._request = request
        self._lock = threading.Lock()  # whoever holds it holds the sender, so that no collection comes to `let_go`
        self._sent = 0
        self._closed = False
        self._gone = False  # the sender
        self._left = False  # to the sender, by `execute`
        self._executed = False
        self.again = False
        self.taken = False

    def sender(self) -> InferenceResponseSender:
        """A new sender, of which there may be one."""
        self.taken = True
        return InferenceResponseSender(self)

    def send(self, response: InferenceResponse | None, flags: int) -> None:
        """`InferenceResponseSender.send`.

        Raises:
            TypeError: this is no response.
            TritonModelException: there is nothing to send, or no more may be sent.
        """
        if response is not None and not isinstance(response, InferenceResponse):
            raise TypeError(f"Unable to send response. Expected an InferenceResponse, got {type(response)}.")
        if flags not in (0, _FINAL):
            raise TritonModelException(
                f"Unable to send response. Unsupported flag provided. Got {flags!r}, expected 0 or "
                "TRITONSERVER_RESPONSE_COMPLETE_FINAL."
            )
        if response is None and flags == 0:
            raise TritonModelException(
                "Inference Response object must be provided when the response flags is set to zero."
            )
        final = flags == _FINAL
        with self._lock:
            self._check(response)
            self._closed = final
            if response is not None:
                self._sent += 1
                answer = answer_of(self._config, self._lane, self._request, response)
                self._responder().send(answer, final=final or not self._config.decoupled)
            elif self._config.decoupled:
                self._responder().send(None, final=True)

    def is_cancelled(self) -> bool:
        """Whether the client has left."""
        responder = self._request.responder
        return responder is not None and responder.is_cancelled()

    def release(self, *, again: bool) -> None:
        """`InferenceRequest.set_release_flags`.

        Raises:
            TritonModelException: the request can't be executed once more.
        """
        batching = self._config.sequence_batching
        if again and (batching is None or not batching.iterative_sequence):
            raise TritonModelException(
                "rescheduling a request needs 'sequence_batching { iterative_sequence: true }' in config.pbtxt"
            )
        if again and self._executed:
            raise TritonModelException("rescheduling a request must be asked for before execute returns")
        self.again = again

    def executed(self) -> bool:
        """`execute` has returned. Whether the request is to be executed once more."""
        self._executed = True
        if self.again:
            self._closed = True
        return self.again

    def let_go(self) -> None:
        """The model has no sender any more. In a collection of garbage, maybe, in the middle of anything."""
        self._gone = True
        if self._closed or self.again:
            return
        if self._config.decoupled:
            self._closed = True
            self._responder().send(None, final=True)
        elif self._left and not self._sent:
            self._closed = True
            self._responder().send(self._forgotten(), final=True)

    def fail(self, error: MmeError) -> None:
        """`execute` raised: whoever still waits is told."""
        if not self._closed:
            self._closed = True
            if self.taken:
                self._responder().send(error, final=True)

    def settle(self) -> bool:
        """`execute` returned a response: the sender is good for nothing more. False if it was used."""
        self._closed = True
        self._sent += 1
        return self._sent == 1

    def leave(self) -> MmeError | None:
        """`execute` returned nothing: the sender answers, or has answered. An error if it can't any more."""
        self._left = True
        return self._forgotten() if self._gone and not self._sent else None

    def _forgotten(self) -> MmeError:
        what = "the response sender was dropped before it sent a response"
        return MmeError(Kind.EXECUTION_FAILED, f"model '{self._config.name}': {what}")

    def _check(self, response: InferenceResponse | None) -> None:
        if not self._config.decoupled and response is not None and self._sent:
            raise TritonModelException(
                "Unable to send response. Non-decoupled model cannot send more than one response."
            )
        if not self._config.decoupled and response is None and not self._sent:
            raise TritonModelException(
                "Unable to send response. Non-decoupled model cannot send complete final before sending a response."
            )
        if self._closed:
            raise TritonModelException("Unable to send response. Response sender has been closed.")

    def _responder(self) -> Responder:
        responder = self._request.responder
        if responder is None:
            raise TritonModelException("Unable to send response. Nobody takes responses to this request.")
        return responder
