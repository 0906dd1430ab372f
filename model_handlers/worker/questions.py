"""What the models in processes of their own ask of the server, and the answers: the server's end, see `outside`.

Questions come where channels are read, see `listener`, and are handed on at once. Answers come on whatever thread has
them, an event loop mostly: what takes long to write is left to a thread.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np

from model_handlers.errors import Kind, MmeError
from model_handlers.outside import Caller, ModelCall, Override
from model_handlers.requests import ModelResponse
from model_handlers.system.priority import usual_priority
from model_handlers.tensor import BY_NAME
from model_handlers.worker.memory import Frame
from model_handlers.worker.wire import Packing, ProtocolError, error_fields, unpack

if TYPE_CHECKING:
    from model_handlers.outside import Outside
    from model_handlers.requests import Responder
    from model_handlers.tensor import Array, DataType
    from model_handlers.worker.listener import Channel
    from model_handlers.worker.wire import Message

_LARGE = 1 << 20  # bytes: half a millisecond
_STRING = 256  # bytes


class Questions:
    """What one child has asked and is not answered yet. `take` is called where channels are read: it waits for nothing.

    Args:
        model: the child's.
        channel: where the answers go.
    """

    def __init__(self, model: str, channel: Channel) -> None:
        self._model = model
        self._channel = channel
        self._calls: dict[int, _Replier] = {}  # single operations of a dict need no lock

    def __len__(self) -> int:
        """How many calls are under way."""
        return len(self._calls)

    def take(
        self,
        message: Message,
        shared: Array,
        outside: Outside | None,
        callers: tuple[str, ...],
        waiting: tuple[Responder, ...] = (),
    ) -> None:
        """One question, or the news that nobody waits for the answer to one.

        Args:
            message: the frame.
            shared: the bytes in which its tensors lie.
            outside: what is asked; None where nothing can be.
            callers: the models that wait for what the child executes, itself the last.
            waiting: see `ModelCall`.

        Raises:
            ProtocolError, LookupError, TypeError, ValueError, OverflowError: no child of ours asks so.
        """
        if "drop" in message:
            self._drop(int(message["drop"]))
        elif outside is None:
            number = message["call"] if "call" in message else message["ask"]
            error = MmeError(Kind.UNSUPPORTED, f"model '{self._model}' is served where it can call no other model")
            self._channel.post(Frame({"reply": number, "final": True, "error": error_fields(error)}))
        elif "call" in message:
            call = _call_in(message, shared, callers, waiting)
            replier = _Replier(int(message["call"]), self._channel, self._calls)
            self._calls[replier.number] = replier
            outside.infer(call, replier)
        else:
            _put(message, shared, outside, callers, self._channel)

    def drop_all(self) -> None:
        """Whoever asked is gone."""
        for number in list(self._calls):
            self._drop(number)

    def _drop(self, number: int) -> None:
        replier = self._calls.pop(number, None)
        if replier is not None:
            replier.cancel()


class _Replier(Caller):
    """See `model_handlers.requests.Responder`: sends what a called model answers to the child that called it.

    Called by one thread at a time. A large answer is written by a thread of its own, and so is what comes behind it:
    the caller is an event loop.

    Args:
        number: what the child calls the call.
        channel: the child's.
        calls: those that are not answered yet, which it leaves when it is.
    """

    def __init__(self, number: int, channel: Channel, calls: dict[int, _Replier]) -> None:
        super().__init__()
        self.number = number
        self._channel = channel
        self._calls = calls
        self._left = self._written = 0  # answers left to the other thread, and those that it has written

    def send(self, response: ModelResponse | MmeError | None, *, final: bool) -> None:
        if final:
            self._calls.pop(self.number, None)
            self._ended()
        if self._left > self._written or _is_large(response):
            self._left += 1
            WRITER.submit(self._write, response, final=final)
        else:
            self._post(response, final=final)

    def _write(self, response: ModelResponse | MmeError | None, *, final: bool) -> None:
        try:
            self._post(response, final=final)
        except Exception:  # noqa: BLE001 - nobody else hears of it
            _log.exception("an answer could not be handed to the model that called")
        finally:
            self._written += 1

    def _post(self, response: ModelResponse | MmeError | None, *, final: bool) -> None:
        if self._cancelled:
            return
        try:
            frame = self._frame(response, final=final)
        except Exception as error:  # noqa: BLE001 - whoever called must be answered, whatever can't be sent
            frame = self._frame(_unsendable(error), final=True)
            self._calls.pop(self.number, None)
            self.cancel()
        self._channel.post(frame)

    def _frame(self, response: ModelResponse | MmeError | None, *, final: bool) -> Frame:
        message: Message = {"reply": self.number, "final": final}
        if isinstance(response, MmeError):
            return Frame(message | {"error": error_fields(response)})
        if response is None:
            return Frame(message)
        packing = Packing()
        message["outputs"] = {name: packing.add(array, f"output '{name}'") for name, array in response.outputs.items()}
        message["types"] = {name: kind.name for name, kind in response.data_types.items()}
        message["parameters"] = dict(response.parameters)
        return Frame(message, packing)


def _is_large(response: ModelResponse | MmeError | None) -> bool:
    return isinstance(response, ModelResponse) and sum(map(_size, response.outputs.values())) > _LARGE


def _size(array: Array) -> int:
    """How much there is to write; of strings, which may be of any length, as if they were not short."""
    return array.size * _STRING if array.dtype.hasobject else array.nbytes


WRITER = ThreadPoolExecutor(1, "model replies", usual_priority)  # not that of the load that was the first to need it


def _unsendable(error: Exception) -> MmeError:
    if isinstance(error, MmeError):
        return error
    return MmeError(Kind.UNAVAILABLE, f"a response can't be handed to the model that called: {error}")


def _put(message: Message, shared: Array, outside: Outside, callers: tuple[str, ...], channel: Channel) -> None:
    number, what, model = int(message["ask"]), message["what"], str(message["model"])

    def done(answer: bool | MmeError) -> None:  # noqa: FBT001 - see Done
        reply = {"error": error_fields(answer)} if isinstance(answer, MmeError) else {"value": answer}
        channel.post(Frame({"reply": number, "final": True, **reply}))

    if what == "load":
        outside.load(model, _override_in(message, shared, model), callers, done)
    elif what == "unload":
        outside.unload(model, bool(message.get("dependents")), callers, done)
    elif what == "ready":
        outside.is_ready(model, _version(message["version"]), done)
    else:
        raise ProtocolError(f"a question about nothing: {str(what)[:200]}")


def _override_in(message: Message, shared: Array, model: str) -> Override | None:
    if "config" not in message:
        return None
    files = {str(key): _bytes_in(shared, model, str(key), place) for key, place in dict(message["files"]).items()}
    return Override(str(message["config"]), files)


def _bytes_in(shared: Array, model: str, name: str, place: Any) -> bytes:
    array = unpack(shared, place, name, model)
    if array.dtype != np.uint8:
        raise ProtocolError(f"file '{name[:200]}' of model '{model[:200]}' in the form of {place[0]}")
    return array.tobytes()


def _version(version: Any) -> int | None:
    return None if version is None else int(version)


def _call_in(message: Message, shared: Array, callers: tuple[str, ...], waiting: tuple[Responder, ...]) -> ModelCall:
    model = str(message["model"])
    correlation_id = message["correlation_id"]
    return ModelCall(
        model,
        _version(message["version"]),
        tuple(_input_in(shared, model, *fields) for fields in message["inputs"]),
        tuple(map(str, message["outputs"])),
        bool(message["decoupled"]),
        callers,
        str(message["id"]),
        dict(message["parameters"]),
        int(message["timeout_us"]),
        correlation_id if isinstance(correlation_id, str) else int(correlation_id),
        int(message["flags"]),
        waiting,
        str(message["trace"]),
    )


def _input_in(shared: Array, model: str, name: Any, kind: Any, place: Any) -> tuple[str, DataType, Array]:
    data_type, array = BY_NAME[kind], unpack(shared, place, name, model)
    if array.dtype != data_type.dtype:  # it would be joined with other clients' inputs of that type
        raise ProtocolError(f"input '{str(name)[:200]}' of model '{model[:200]}' as {kind} in the form of {place[0]}")
    return str(name), data_type, array
