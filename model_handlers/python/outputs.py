"""What `execute` returned, checked: each request's outputs as the protocol carries them, or its own error.

Tensors cross here between the shapes that clients see and those that the model sees, where the configuration has a
`reshape`. A request is answered by its response sender, on any thread, or by what `execute` returned for it. A sender
belongs to the model's code: when that lets go of it, the request has had its last response.
"""

from __future__ import annotations

import functools
import logging
import threading
from typing import TYPE_CHECKING, Any

import numpy as np

from model_handlers.config.model_config import ModelConfig, hidden_outputs
from model_handlers.errors import Kind, MmeError
from model_handlers.python.author_code import failed_batch, failed_execution, printable
from model_handlers.python.pb_requests import InferenceResponseSender
from model_handlers.python.pb_responses import KINDS, InferenceResponse, Tensor, TritonError, TritonModelException
from model_handlers.requests import PUT_BACK, ModelRequest, ModelResponse, Responder
from model_handlers.tensor import BF16, BYTES, UINT16, Array, DataType, TensorSpec, refitted, shape_matches

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


_log = logging.getLogger("mme.model")
_MISSHAPEN: set[tuple[str, str]] = set()  # outputs, by their models, of which it was said
_fits = functools.lru_cache(maxsize=1024)(shape_matches)


def answers(
    config: ModelConfig, lane: str, requests: Sequence[ModelRequest], responses: Sequence[ResponseState], returned: Any
) -> list[ModelResponse | MmeError | None]:
    """One answer a request, None for one that its response sender answers. Raises EXECUTION_FAILED for the batch."""
    if returned is None and any(each.sender_taken or each.rescheduled for each in responses):
        returned = [None] * len(requests)  # senders answer them all
    if not isinstance(returned, list):
        raise failed_batch(f"Expected a list in the execute return, found type '{type(returned)}'.", lane)
    if len(returned) != len(requests):
        raise failed_batch(
            "Number of InferenceResponse objects do not match the number of InferenceRequest objects. "
            f"InferenceRequest(s) size is:{len(requests)}, and InferenceResponse(s) size is:{len(returned)}",
            lane,
        )
    strange = next((item for item in returned if item is not None and not isinstance(item, InferenceResponse)), None)
    if strange is not None:
        raise failed_batch(_expected_response(strange), lane)
    return [_answer(config, lane, *slot) for slot in zip(requests, responses, returned, strict=True)]


def inside(spec: TensorSpec, array: Array, *, batches: bool) -> Array:
    """An input as the model sees it."""
    return array if spec.reshape is None else _refitted(array, spec.dims, spec.reshape, batches=batches)


def _answer(
    config: ModelConfig, lane: str, request: ModelRequest, responses: ResponseState, response: InferenceResponse | None
) -> ModelResponse | MmeError | None:
    if responses.executed():
        if response is None:
            return PUT_BACK
        what = "Expected a None object in the execute function return list for reschduled request, found type "
        return failed_batch(f"{what}'{type(response)}'.", lane)
    if response is None and responses.sender_taken:
        return responses.deferred()
    if not responses.finished():
        _log.error(
            "%s",
            failed_batch("execute returned a response to a request that its response sender had answered.", lane),
            extra={"target_model": config.name},
        )
        return None
    return answer_of(config, lane, request, response)


def answer_of(
    config: ModelConfig, lane: str, request: ModelRequest, response: InferenceResponse | None
) -> ModelResponse | MmeError:
    """One response as the protocol carries it, or the error that it is."""
    if response is None:  # only a model that has taken the sender may leave one out
        return failed_batch(_expected_response(response), lane)
    error = response.error()
    if error is not None:
        return _own_error(error)
    try:
        return ModelResponse(_outputs(config, request, response), response.sent_parameters())
    except MmeError as failure:
        return failure
    except Exception as failure:  # noqa: BLE001 - a tensor on a GPU is copied by its framework, which may raise anything
        return failed_execution(failure, lane)


def _outputs(config: ModelConfig, request: ModelRequest, response: InferenceResponse) -> dict[str, Array]:
    # As in Triton, a model may leave outputs out; what its configuration does not have goes nowhere.
    tensors = {tensor.name(): tensor for tensor in response.output_tensors()}
    specs = {spec.name: spec for spec in config.outputs}
    outputs, expected = {}, 0
    rows = _rows(config, request)
    if rows is not None and config.decoupled:
        rows = -1  # each response has as many as the model likes
    for name, tensor in tensors.items():
        if name in specs:
            expected += 1
            if name in request.outputs:
                outputs[name] = array = _outside(config, specs[name], tensor, whole_numbers=True)
                expected_shape = specs[name].dims if rows is None else (rows, *specs[name].dims)
                if not _fits(array.shape, expected_shape):
                    _warn_of_shape(config.name, name, array.shape, expected_shape)
    for spec in hidden_outputs(config.sequence_batching):
        returned = tensors.get(spec.name)
        if returned is not None:
            expected += spec.name not in specs
            outputs[spec.name] = _outside(config, spec, returned)
            _check_rows(config, request, spec.name, returned)
    if expected < len(tensors):
        _name_unexpected(config, tensors, some=expected > 0)
    return outputs


def _name_unexpected(config: ModelConfig, tensors: Iterable[str], *, some: bool) -> None:
    # Said once; beside none that there are they are an error.
    unexpected = next(name for name in tensors if config.output(name) is None)
    names = ", ".join(spec.name for spec in config.outputs)
    what = f"returned unexpected inference output '{unexpected}', its outputs are: {names}"
    if not some:
        raise _wrong(config, what)
    _warn_once(config.name, what)


def _warn_of_shape(model: str, output: str, shape: tuple[int, ...], expected: tuple[int, ...]) -> None:
    # Said of an output once, whatever other shapes come; as in Triton it is handed on.
    if (model, output) not in _MISSHAPEN:
        _MISSHAPEN.add((model, output))
        _warn_once(model, f"returned output '{output}' with shape {list(shape)}, expected {list(expected)}")


@functools.lru_cache(maxsize=256)
def _warn_once(model: str, what: str) -> None:
    _log.warning("model '%s' %s", model, printable(what), extra={"target_model": model})


def _outside(config: ModelConfig, spec: TensorSpec, tensor: Tensor, *, whole_numbers: bool = False) -> Array:
    # Where floats were declared, whole numbers may stay what they are.
    data_type, array = tensor.carried()
    if data_type is not spec.data_type and (data_type, spec.data_type) != (UINT16, BF16):
        what = f"returned output '{spec.name}' as {data_type.name}, expected {spec.data_type.name}"
        kept = whole_numbers and data_type.dtype.kind in "biu" and spec.data_type.dtype.kind == "f"
        cast = array if kept else _cast(array, data_type, spec.data_type)
        if cast is None:
            raise _wrong(config, what)
        _warn_once(config.name, what)
        array = cast
    if spec.reshape is None:
        return array
    batches = config.max_batch_size > 0
    try:
        return _refitted(array, spec.reshape, spec.dims, batches=batches)
    except ValueError:
        raise _wrong(
            config,
            f"returned output '{spec.name}' with shape {list(array.shape)}, expected {list(spec.reshape)}"
            + (" behind the batch dimension" if batches else ""),
        ) from None


def _check_rows(config: ModelConfig, request: ModelRequest, name: str, tensor: Tensor) -> None:
    # A state comes back with the next request, and so has to have as many rows as this one.
    shape, rows = tensor.shape(), _rows(config, request)
    if rows is not None and shape[:1] != [rows]:
        raise _wrong(
            config,
            f"returned output '{name}' with shape {shape} for a request of batch size {rows}, expected {rows} as its "
            "first dimension",
        )


def _rows(config: ModelConfig, request: ModelRequest) -> int | None:
    if config.max_batch_size == 0:
        return None
    for array in request.inputs.values():
        return int(array.shape[0])
    return 1


def _refitted(array: Array, outer: tuple[int, ...], inner: tuple[int, ...], *, batches: bool) -> Array:
    if not shape_matches(array.shape[batches:], outer):
        raise ValueError(array.shape)
    return refitted(array, outer, inner, batches=batches)


def _cast(array: Array, returned: DataType, expected: DataType) -> Array | None:
    # Numbers as another type of their kind has them, FP64 as FP32; None where they would be others.
    if not {returned, expected}.isdisjoint((BF16, BYTES)) or not np.can_cast(array.dtype, expected.dtype, "same_kind"):
        return None
    with np.errstate(over="ignore"):
        cast = array.astype(expected.dtype)
    if expected.dtype.kind == "f":  # rounded, but never to an infinity
        return cast if np.array_equal(np.isinf(cast), np.isinf(array)) else None
    return cast if np.array_equal(cast, array) else None


def _own_error(error: TritonError) -> MmeError:
    # That the model calls itself unavailable says nothing of the server, whose clients would try again.
    said = 503 if error.code() == TritonError.UNAVAILABLE else 0
    return MmeError(KINDS[error.code()], printable(error.message()), said)


def _expected_response(item: object) -> str:
    return f"Expected an 'InferenceResponse' object in the execute function return list, found type '{type(item)}'."


def _wrong(config: ModelConfig, what: str) -> MmeError:
    return MmeError(Kind.EXECUTION_FAILED, printable(f"model '{config.name}' {what}"))


_FINAL = 1  # TRITONSERVER_RESPONSE_COMPLETE_FINAL


class ResponseState:
    """The responses to one request.

    What comes first as the last one is taken, be it a response, an error or the end of the sender: so the ways in which
    a request may end here need not wait for one another. Only `send` keeps an order among threads. Where the request is
    `rescheduled`, another sender sends its last response.
    """

    def __init__(self, config: ModelConfig, lane: str, request: ModelRequest) -> None:
        self._config = config
        self._lane = lane
        self._request = request
        self._lock = threading.Lock()  # its holder holds the sender: no collection comes to `sender_dropped`
        self._sent = 0
        self._closed = False
        self._gone = False  # the sender
        self._left = False  # to the sender, by `execute`
        self._executed = False
        self.rescheduled = False
        self.sender_taken = False

    def sender(self) -> InferenceResponseSender:
        self.sender_taken = True
        return InferenceResponseSender(self)

    def send(self, response: InferenceResponse | None, flags: int) -> None:
        """`InferenceResponseSender.send`. Raises TypeError, or TritonModelException where no more may be sent."""
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
        responder = self._request.responder
        return responder is not None and responder.is_cancelled()

    def release(self, *, again: bool) -> None:
        batching = self._config.sequence_batching
        if again and (batching is None or not batching.iterative_sequence):
            raise TritonModelException(
                "rescheduling a request needs 'sequence_batching { iterative_sequence: true }' in config.pbtxt"
            )
        if again and self._executed:
            raise TritonModelException("rescheduling a request must be asked for before execute returns")
        self.rescheduled = again

    def executed(self) -> bool:
        """`execute` has returned. Whether the request is to be executed once more."""
        self._executed = True
        if self.rescheduled:
            self._closed = True
        return self.rescheduled

    def sender_dropped(self) -> None:
        """The model has no sender any more. In a collection of garbage, maybe, in the middle of anything."""
        self._gone = True
        if self._closed or self.rescheduled:
            return
        if self._config.decoupled:
            self._closed = True
            self._responder().send(None, final=True)
        elif self._left and not self._sent:
            self._closed = True
            self._responder().send(self._forgotten(), final=True)

    def fail(self, error: MmeError) -> None:
        """`execute` raised: what still waits is told."""
        if not self._closed:
            self._closed = True
            if self.sender_taken:
                self._responder().send(error, final=True)

    def finished(self) -> bool:
        """`execute` returned a response: the sender is good for nothing more. False if it was used."""
        self._closed = True
        self._sent += 1
        return self._sent == 1

    def deferred(self) -> MmeError | None:
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
