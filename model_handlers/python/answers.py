"""What `execute` returned, checked: each request's outputs as the protocol carries them, or its own error.

Tensors cross here between the shapes that clients see and those that the model sees, where the configuration has a
`reshape`.
"""

from __future__ import annotations

import functools
import logging
from typing import TYPE_CHECKING, Any

import numpy as np

from model_handlers.config.model_config import hidden_outputs
from model_handlers.errors import Kind, MmeError
from model_handlers.python.failures import failed_batch, failed_execution, printable
from model_handlers.python.pb_responses import KINDS, InferenceResponse, TritonError
from model_handlers.requests import PUT_BACK, ModelResponse
from model_handlers.tensor import BF16, BYTES, UINT16, shape_matches

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from model_handlers.config.model_config import ModelConfig
    from model_handlers.python.pb_tensor import Tensor
    from model_handlers.python.responses import Responses
    from model_handlers.requests import ModelRequest
    from model_handlers.tensor import Array, DataType, TensorSpec

_log = logging.getLogger("mme.model")
_MISSHAPEN: set[tuple[str, str]] = set()  # outputs, by their models, of which it was said
_fits = functools.lru_cache(maxsize=1024)(shape_matches)


def answers(
    config: ModelConfig, lane: str, requests: Sequence[ModelRequest], responses: Sequence[Responses], returned: Any
) -> list[ModelResponse | MmeError | None]:
    """One answer a request, None for one that its response sender answers.

    Raises:
        MmeError: EXECUTION_FAILED for the whole batch, when what was returned is no list of its responses.
    """
    if returned is None and any(each.taken or each.again for each in responses):
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
    return array if spec.reshape is None else array.reshape(_refitted(array.shape, spec.dims, spec.reshape, batches))


def _answer(
    config: ModelConfig, lane: str, request: ModelRequest, responses: Responses, response: InferenceResponse | None
) -> ModelResponse | MmeError | None:
    if responses.executed():
        if response is None:
            return PUT_BACK
        what = "Expected a None object in the execute function return list for reschduled request, found type "
        return failed_batch(f"{what}'{type(response)}'.", lane)
    if response is None and responses.taken:
        return responses.leave()
    if not responses.settle():
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
    if response is None:  # only who sends responses of their own accord may leave one out
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
    """The outputs that the client asked for, in the model's order, and states.

    As in Triton, a model may leave outputs out; what its configuration does not have goes nowhere.
    """
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
    """Say once that a model returns outputs that there are not; beside none that there are they are an error."""
    unexpected = next(name for name in tensors if config.output(name) is None)
    names = ", ".join(spec.name for spec in config.outputs)
    what = f"returned unexpected inference output '{unexpected}', its outputs are: {names}"
    if not some:
        raise _wrong(config, what)
    _warn_once(config.name, what)


def _warn_of_shape(model: str, output: str, shape: tuple[int, ...], expected: tuple[int, ...]) -> None:
    """Say of an output once that it is not as declared, whatever other shapes come; as in Triton it is handed on."""
    if (model, output) not in _MISSHAPEN:
        _MISSHAPEN.add((model, output))
        _warn_once(model, f"returned output '{output}' with shape {list(shape)}, expected {list(expected)}")


@functools.lru_cache(maxsize=256)
def _warn_once(model: str, what: str) -> None:
    _log.warning("model '%s' %s", model, printable(what), extra={"target_model": model})


def _outside(config: ModelConfig, spec: TensorSpec, tensor: Tensor, *, whole_numbers: bool = False) -> Array:
    """An output as the client sees it: where floats were declared, whole numbers may stay what they are."""
    data_type, array = tensor.carried()
    if data_type is not spec.data_type and not _same_bits(data_type, spec.data_type):
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
        return array.reshape(_refitted(array.shape, spec.reshape, spec.dims, batches))
    except ValueError:
        raise _wrong(
            config,
            f"returned output '{spec.name}' with shape {list(array.shape)}, expected {list(spec.reshape)}"
            + (" behind the batch dimension" if batches else ""),
        ) from None


def _check_rows(config: ModelConfig, request: ModelRequest, name: str, tensor: Tensor) -> None:
    """A state comes back with the next request, and so has to have as many rows as this one."""
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


def _refitted(
    shape: tuple[int, ...],
    outer: tuple[int, ...],
    inner: tuple[int, ...],
    batches: bool,  # noqa: FBT001 - both callers name it
) -> tuple[int, ...]:
    """`inner` with the sizes that `shape`, which fits `outer`, has in its variable dimensions: they keep their order.

    Raises:
        ValueError: when `shape` does not fit `outer`.
    """
    batch, rest = (shape[:1], shape[1:]) if batches else ((), shape)
    if any(want not in (-1, have) for want, have in zip(outer, rest, strict=True)):
        raise ValueError(shape)
    variable = iter([have for want, have in zip(outer, rest, strict=True) if want == -1])
    return (*batch, *(next(variable) if dim == -1 else dim for dim in inner))


def _same_bits(returned: DataType, expected: DataType) -> bool:
    """Bit patterns of BF16, which numpy does not have, come as UINT16."""
    return returned is UINT16 and expected is BF16


def _cast(array: Array, returned: DataType, expected: DataType) -> Array | None:
    """Numbers as another type of their kind has them, FP64 as FP32; None where they would be others."""
    if not {returned, expected}.isdisjoint((BF16, BYTES)) or not np.can_cast(array.dtype, expected.dtype, "same_kind"):
        return None
    cast = array.astype(expected.dtype)
    return cast if expected.dtype.kind == "f" or np.array_equal(cast, array) else None


def _own_error(error: TritonError) -> MmeError:
    # That the model calls itself unavailable says nothing of the server, whose clients would try again.
    said = 503 if error.code() == TritonError.UNAVAILABLE else 0
    return MmeError(KINDS[error.code()], printable(error.message()), said)


def _expected_response(item: object) -> str:
    return f"Expected an 'InferenceResponse' object in the execute function return list, found type '{type(item)}'."


def _wrong(config: ModelConfig, what: str) -> MmeError:
    return MmeError(Kind.EXECUTION_FAILED, printable(f"model '{config.name}' {what}"))
