"""Calls that a model in a process of its own makes of the server: the model's end, see `questions` for the other.

Each call is a frame of the channel; what is answered to it comes back by its number.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import numpy as np

from model_handlers.errors import MmeError
from model_handlers.requests import ModelResponse
from model_handlers.tensor import BY_NAME
from model_handlers.worker.wire import Packing, error_from, unpack

if TYPE_CHECKING:
    from model_handlers.outside import Done, ModelCall, Override
    from model_handlers.requests import Responder
    from model_handlers.tensor import Array
    from model_handlers.worker.events import Events
    from model_handlers.worker.wire import Message


class OutsideInChild:
    """See `model_handlers.outside.Outside`."""

    def __init__(self, events: Events) -> None:
        self._events = events
        self._numbers = itertools.count(1)

    def infer(self, call: ModelCall, responder: Responder) -> None:
        """Have a model called."""
        number = next(self._numbers)

        def take(reply: Message, shared: Array) -> None:
            responder.send(_response_in(reply, shared, call.model), final=reply["final"])

        def drop() -> None:
            if self._events.expect_no_more(number):
                self._events.send({"drop": number})

        try:
            self._events.expect(number, take)
            self._events.send(*_message_of(call, number))
        except MmeError as error:  # what can't be sent
            self._events.expect_no_more(number)
            responder.send(error, final=True)
        else:
            responder.when_cancelled(drop)

    def load(self, model: str, override: Override | None, callers: tuple[str, ...], done: Done) -> None:  # noqa: ARG002 - the other end knows
        """Load a model."""
        question: Message = {"what": "load", "model": model}
        packing = Packing()
        if override is not None:
            question["config"] = override.config
            question["files"] = {
                key: packing.add(np.frombuffer(content, np.uint8), key) for key, content in override.files.items()
            }
        self._ask(question, done, packing)

    def unload(self, model: str, dependents: bool, callers: tuple[str, ...], done: Done) -> None:  # noqa: ARG002, FBT001 - as above
        """Unload a model."""
        self._ask({"what": "unload", "model": model, "dependents": dependents}, done)

    def is_ready(self, model: str, version: int | None, done: Done) -> None:
        """Ask whether a model would answer."""
        self._ask({"what": "ready", "model": model, "version": version}, done)

    def _ask(self, question: Message, done: Done, packing: Packing | None = None) -> None:
        number = next(self._numbers)

        def take(reply: Message, _: Array) -> None:
            done(error_from(reply["error"]) if "error" in reply else bool(reply["value"]))

        try:
            self._events.expect(number, take)
            self._events.send({"ask": number, **question}, packing)
        except MmeError as error:
            self._events.expect_no_more(number)
            done(error)


def _message_of(call: ModelCall, number: int) -> tuple[Message, Packing]:
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
        "trace": call.trace,
    }
    return message, packing


def _response_in(reply: Message, shared: Array, model: str) -> ModelResponse | MmeError | None:
    if "error" in reply:
        return error_from(reply["error"])
    if "outputs" not in reply:
        return None
    outputs = {name: unpack(shared, place, name, model) for name, place in reply["outputs"].items()}
    types = {name: BY_NAME[kind] for name, kind in reply["types"].items()}
    return ModelResponse(outputs, reply["parameters"], types)
