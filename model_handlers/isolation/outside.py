"""Calls that a model in a process of its own makes of the server: both ends of them.

`OutsideInChild` is what the model asks; it makes each call a frame of the channel. `Questions`, in the serving
process, asks the real one and sends the answers back. The two know a call by its number.
"""

from __future__ import annotations

import itertools
import threading
from typing import TYPE_CHECKING

from model_handlers.base import ModelResponse
from model_handlers.errors import Kind, MmeError
from model_handlers.isolation.channel import Frame
from model_handlers.isolation.framing import Packing, error_fields, error_from, unpack
from model_handlers.outside import ModelCall
from model_handlers.tensor import BY_NAME

if TYPE_CHECKING:
    from collections.abc import Callable

    from model_handlers.base import Responder
    from model_handlers.isolation.events import Events
    from model_handlers.isolation.framing import Message
    from model_handlers.isolation.listener import Channel
    from model_handlers.outside import Done, Outside
    from model_handlers.tensor import Array


class OutsideInChild:
    """See `model_handlers.outside.Outside`."""

    def __init__(self, events: Events) -> None:
        self._events = events
        self._numbers = itertools.count(1)

    def infer(self, call: ModelCall, responder: Responder) -> None:
        """Have a model called."""
        number = next(self._numbers)
        packing = Packing()
        message: Message = {
            "call": number,
            "model": call.model,
            "version": call.version,
            "inputs": [[name, kind.name, packing.add(array, f"input '{name}'")] for name, kind, array in call.inputs],
            "outputs": call.outputs,
            "decoupled": call.decoupled,
            "id": call.id,
            "parameters": call.parameters,
            "timeout_us": call.timeout_us,
            "correlation_id": call.correlation_id,
            "flags": call.flags,
        }

        def take(reply: Message, shared: Array) -> None:
            responder.send(_response_in(reply, shared, call.model), final=reply["final"])

        self._events.expect(number, take)
        responder.when_cancelled(lambda: self._events.send({"drop": number}))
        self._events.send(message, packing)

    def load(self, model: str, done: Done) -> None:
        """Load a model."""
        self._ask({"what": "load", "model": model}, done)

    def unload(self, model: str, done: Done) -> None:
        """Unload a model."""
        self._ask({"what": "unload", "model": model}, done)

    def is_ready(self, model: str, version: int | None, done: Done) -> None:
        """Ask whether a model would answer."""
        self._ask({"what": "ready", "model": model, "version": version}, done)

    def _ask(self, question: Message, done: Done) -> None:
        number = next(self._numbers)
        self._events.expect(
            number,
            lambda reply, _: done(error_from(reply["error"]) if "error" in reply else bool(reply["value"])),
        )
        self._events.send({"ask": number, **question})


class Questions:
    """What one child has asked and is not answered yet. `take` is called on the listening thread."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._lock = threading.Lock()
        self._calls: dict[int, _Replier] = {}

    def take(
        self, message: Message, shared: Array, outside: Outside | None, callers: tuple[str, ...], channel: Channel
    ) -> None:
        """One question, or the news that nobody waits for the answer to one."""
        if "drop" in message:
            self._drop(message["drop"])
        elif outside is None:
            number = message["call"] if "call" in message else message["ask"]
            error = MmeError(Kind.UNSUPPORTED, f"model '{self._model}' is served where it can call no other model")
            channel.post(Frame({"reply": number, "final": True, "error": error_fields(error)}))
        elif "call" in message:
            replier = _Replier(message["call"], channel, self._forget)
            with self._lock:
                self._calls[replier.number] = replier
            outside.infer(_call_in(message, shared, callers), replier)
        else:
            _put(message, outside, channel)

    def drop_all(self) -> None:
        """Whoever asked is gone."""
        for number in list(self._calls):
            self._drop(number)

    def _drop(self, number: int) -> None:
        with self._lock:
            replier = self._calls.pop(number, None)
        if replier is not None:
            replier.cancel()

    def _forget(self, number: int) -> None:
        with self._lock:
            self._calls.pop(number, None)


class _Replier:
    """See `model_handlers.base.Responder`: sends what a called model answers to the child that called it."""

    def __init__(self, number: int, channel: Channel, ended: Callable[[int], None]) -> None:
        self.number = number
        self._channel = channel
        self._ended = ended
        self._cancelled = False
        self._tell: list[Callable[[], None]] = []

    def send(self, response: ModelResponse | MmeError | None, *, final: bool) -> None:
        if final:
            self._ended(self.number)
        if self._cancelled:
            return
        try:
            frame = self._frame(response, final=final)
        except MmeError as error:  # it takes more memory than there is
            frame = self._frame(error, final=True)
        self._channel.post(frame)

    def is_cancelled(self) -> bool:
        return self._cancelled

    def when_cancelled(self, tell: Callable[[], None]) -> None:
        self._tell.append(tell)
        if self._cancelled:
            tell()

    def cancel(self) -> None:
        """Nobody waits any more."""
        self._cancelled = True
        for tell in self._tell:
            tell()

    def _frame(self, response: ModelResponse | MmeError | None, *, final: bool) -> Frame:
        message: Message = {"reply": self.number, "final": final}
        if isinstance(response, MmeError):
            return Frame(message | {"final": True, "error": error_fields(response)})
        if response is None:
            return Frame(message)
        packing = Packing()
        message["outputs"] = {name: packing.add(array, f"output '{name}'") for name, array in response.outputs.items()}
        message["types"] = {name: kind.name for name, kind in response.data_types.items()}
        message["parameters"] = dict(response.parameters)
        return Frame(message, packing)


def _put(message: Message, outside: Outside, channel: Channel) -> None:
    number, what, model = message["ask"], message["what"], str(message["model"])

    def done(answer: bool | MmeError) -> None:  # noqa: FBT001 - see Done
        reply = {"error": error_fields(answer)} if isinstance(answer, MmeError) else {"value": answer}
        channel.post(Frame({"reply": number, "final": True, **reply}))

    if what == "load":
        outside.load(model, done)
    elif what == "unload":
        outside.unload(model, done)
    else:
        outside.is_ready(model, message["version"], done)


def _call_in(message: Message, shared: Array, callers: tuple[str, ...]) -> ModelCall:
    model = str(message["model"])
    version = message["version"]
    return ModelCall(
        model,
        None if version is None else int(version),
        tuple(
            (str(name), BY_NAME[kind], unpack(shared, place, name, model)) for name, kind, place in message["inputs"]
        ),
        tuple(map(str, message["outputs"])),
        bool(message["decoupled"]),
        callers,
        str(message["id"]),
        dict(message["parameters"]),
        int(message["timeout_us"]),
        message["correlation_id"],
        int(message["flags"]),
    )


def _response_in(reply: Message, shared: Array, model: str) -> ModelResponse | MmeError | None:
    if "error" in reply:
        return error_from(reply["error"])
    if "outputs" not in reply:
        return None
    outputs = {name: unpack(shared, place, name, model) for name, place in reply["outputs"].items()}
    types = {name: BY_NAME[kind] for name, kind in reply["types"].items()}
    return ModelResponse(outputs, reply["parameters"], types)
