"""Requests to arrays and back, for one model version: what is joined into a batch, and who gets which rows of it.

PURE: everything here touches nothing but its arguments.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from model_handlers.errors import Kind, MmeError
from model_handlers.requests import FLAGS_TOLD, ModelRequest, ModelResponse
from model_handlers.tensor import BY_DTYPE
from serve.model import ragged
from serve.model.open_request import OpenRequest
from serve.request import InferenceRequest, InferenceResponse

if TYPE_CHECKING:
    from collections.abc import Collection

    from model_handlers.config.model_config import ModelConfig
    from model_handlers.tensor import Array, DataType, TensorSpec
    from serve.model.batch_proof import BatchProof
    from serve.model.open_request import Post

Batch: TypeAlias = list[InferenceRequest]


class Signature:
    """What every execution of a model version has to know, worked out once from its configuration.

    Attributes:
        name, version: who answers, as the response says it.
        inputs, outputs: the model's specs.
        output_names: the names of all outputs.
        one_by_one: whether the requests of a batch are executed one by one.
        told: inputs that are worked out of each batch, and the index of the input that they are about.
        split: outputs that are split by the shapes of an input, and its index.
        proof: of a model whose batch dimension is guessed, what is known of it; None for any other.
    """

    def __init__(self, name: str, version: int, config: ModelConfig) -> None:
        self.name = name
        self.version = str(version)
        self.batches = config.max_batch_size > 0
        self.one_by_one = config.one_by_one
        self.inputs = config.inputs
        self.outputs = {spec.name: spec for spec in config.outputs}
        self.output_names = tuple(self.outputs)
        places = {spec.name: index for index, spec in enumerate(config.inputs)}
        self.told = [(given, places[given.source_input[0]]) for given in config.batch_input]
        self.split = {
            target: places[given.source_input[0]] for given in config.batch_output for target in given.target_name
        }
        self.proof: BatchProof | None = None

    def rows(self, batch: Batch) -> int:
        """How many rows a batch is executed with: the sum of its requests' batch dimensions."""
        size = 0
        for request in batch:
            size += request.batch_size
        return size

    def whole(self, batch: Batch) -> bool:  # noqa: ARG002 - its interface
        """Whether every row is a request's."""
        return True

    def gather(self, batch: Batch) -> tuple[dict[str, Array], tuple[str, ...]]:
        """What a handler is given for a batch: an array an input, and the names of the outputs."""
        return collate(self, batch), wanted(self, batch)

    def hand_out(self, batch: Batch, names: tuple[str, ...], arrays: list[Array], rows: int) -> list[InferenceResponse]:
        """Each request's share of what it returned. See `scatter`."""
        return scatter(self, batch, names, arrays, rows)

    def present(self, batch: Batch, post: Post | None) -> list[ModelRequest]:
        """What a handler that sees requests is given for a batch."""
        return present(self, batch, post)

    def collect(
        self, batch: Batch, answers: list[ModelResponse | MmeError | None]
    ) -> list[InferenceResponse | MmeError | None]:
        """What it answered to each request."""
        return collect(self, batch, answers)

    def put_back(self, batch: Batch) -> Collection[InferenceRequest]:  # noqa: ARG002 - its interface
        """The requests of a batch that are queued once more, and so are owed an answer by nobody now."""
        return ()

    def response(self, request: InferenceRequest, answer: ModelResponse) -> InferenceResponse:
        """What a handler that sees requests answered to one of them, in its order."""
        outputs = [
            (name, *_told(self.outputs[name], array, request))
            for name, array in answer.outputs.items()
            if name in self.outputs
        ]
        return InferenceResponse(self.name, self.version, outputs, request.id, parameters=answer.parameters or None)


def _told(spec: TensorSpec, array: Array, request: InferenceRequest) -> tuple[DataType, Array]:
    """An output and its type: the declared one, but that a client is told of whole numbers where floats were declared.

    A model that asks gets what was declared: it may be an ensemble, whose next step takes nothing else.
    """
    declared = spec.data_type
    if array.dtype == declared.dtype or array.dtype.kind not in "biu" or declared.dtype.kind != "f":
        return declared, array
    return (declared, array.astype(declared.dtype)) if request.callers else (BY_DTYPE[array.dtype], array)


def wanted(signature: Signature, batch: Batch) -> tuple[str, ...]:
    """The outputs that anybody in the batch asked for, in the model's order."""
    first = batch[0].layout.outputs
    if not first:
        return signature.output_names
    wanted = set(first)
    for request in batch[1:]:
        if not request.layout.outputs:
            return signature.output_names
        wanted.update(request.layout.outputs)
    return tuple(name for name in signature.output_names if name in wanted)


def collate(signature: Signature, batch: Batch) -> dict[str, Array]:
    """One array an input, the requests' batch dimensions behind one another."""
    first = batch[0]
    inputs: dict[str, Array] = {}
    for index, spec in enumerate(signature.inputs):
        position = first.order[index]
        if position < 0:
            continue
        if spec.allow_ragged_batch:
            inputs[spec.name] = ragged.flat([request.inputs[request.order[index]] for request in batch])
            continue
        if len(batch) == 1:
            array = first.inputs[position]
            if not array.flags.aligned:  # a view into a body starts where the JSON header happened to end
                array = array.copy()
        else:
            array = np.concatenate([request.inputs[request.order[index]] for request in batch])
        inputs[spec.name] = array if spec.reshape is None else _reshaped(signature, array, spec.dims, spec.reshape)
    for given, index in signature.told:
        shapes = _shapes(batch, index)
        told = ragged.batch_input(given.kind, shapes, given.data_type.dtype, batches=signature.batches)
        inputs |= dict.fromkeys(given.target_name, told)
    return inputs


def _shapes(batch: Batch, index: int) -> list[tuple[int, ...]]:
    """The shape that each request sent for an input; one without elements where it was left out."""
    positions = ((request, request.order[index]) for request in batch)
    return [request.layout.inputs[position][2] if position >= 0 else (0,) for request, position in positions]


def _reshaped(signature: Signature, array: Array, source: tuple[int, ...], target: tuple[int, ...]) -> Array:
    """The array in the shape `target`; the variable dimensions of `source` and `target` are the same, in order."""
    batch = array.shape[:1] if signature.batches else ()
    if not array.shape and not target:  # a scalar, which clients may send as it is
        return array
    sizes = zip(array.shape[len(batch) :], source, strict=True)
    variable = iter([size for size, dim in sizes if dim == -1])
    return array.reshape((*batch, *[next(variable) if dim == -1 else dim for dim in target]))


def _as_declared(signature: Signature, spec: TensorSpec, array: Array) -> Array:
    """An output in the shape that clients see."""
    if spec.reshape is None:
        return array
    try:
        return _reshaped(signature, array, spec.reshape, spec.dims)
    except ValueError:
        inner = [-1, *spec.reshape] if signature.batches else list(spec.reshape)
        raise MmeError(
            Kind.EXECUTION_FAILED,
            f"model '{signature.name}' returned output '{spec.name}' with shape {list(array.shape)}, not {inner}",
        ) from None


def scatter(
    signature: Signature, batch: Batch, names: tuple[str, ...], arrays: list[Array], size: int
) -> list[InferenceResponse]:
    """Give each request its own rows of each output it asked for.

    Raises:
        MmeError: EXECUTION_FAILED when the model returned another number of rows than it was given, or an output that
            can't be reshaped as its configuration says.
    """
    checked = signature.batches and (signature.proof is None or len(batch) > 1)  # else it may be no batch
    columns: list[tuple[TensorSpec, Array | list[Array]]] = []
    for name, array in zip(names, arrays, strict=True):
        spec = signature.outputs[name]
        if name in signature.split:
            columns.append((spec, _pieces(signature, batch, name, array)))
            continue
        if checked and (not array.shape or array.shape[0] != size):
            raise MmeError(
                Kind.EXECUTION_FAILED,
                f"model '{signature.name}' returned output '{name}' with shape {list(array.shape)} "
                f"for a batch of {size}: its first dimension must be the batch",
            )
        columns.append((spec, array if spec.reshape is None else _as_declared(signature, spec, array)))
    responses = []
    offset = 0
    for number, request in enumerate(batch):
        end = offset + request.batch_size
        outputs = [
            (
                spec.name,
                spec.data_type,
                column[number] if isinstance(column, list) else column if len(batch) == 1 else column[offset:end],
            )
            for spec, column in columns
            if not request.layout.outputs or spec.name in request.layout.outputs
        ]
        responses.append(InferenceResponse(signature.name, signature.version, outputs, request.id))
        offset = end
    return responses


def _pieces(signature: Signature, batch: Batch, name: str, array: Array) -> list[Array]:
    """An output of a ragged batch, in the shapes that the requests have."""
    shapes = _shapes(batch, signature.split[name])
    pieces = ragged.split(array, shapes)
    if pieces is None:
        raise MmeError(
            Kind.EXECUTION_FAILED,
            f"model '{signature.name}' returned output '{name}' with {array.size} elements for requests of the shapes "
            f"{', '.join(str(list(shape)) for shape in shapes)}, which it is to be split into",
        )
    return pieces


def present(signature: Signature, batch: Batch, post: Post | None) -> list[ModelRequest]:
    """The batch as requests, for a handler that wants to see them; what it answers unasked is posted."""
    return [
        ModelRequest(
            {
                spec.name: request.inputs[position]
                for spec, position in zip(signature.inputs, request.order, strict=True)
                if position >= 0
            },
            tuple(name for name in signature.output_names if name in request.layout.outputs)
            if request.layout.outputs
            else signature.output_names,
            request.id,
            request.parameters or {},
            request.timeout_us,
            request.correlation_id,
            request.flags & FLAGS_TOLD,
            request.callers,
            None if post is None else OpenRequest(request, post),
            request.trace,
        )
        for request in batch
    ]


def collect(
    signature: Signature, batch: Batch, answers: list[ModelResponse | MmeError | None]
) -> list[InferenceResponse | MmeError | None]:
    """The responses of such a batch: each request's own, its own error, or None for one that is answered unasked."""
    return [
        signature.response(request, answer) if isinstance(answer, ModelResponse) else answer
        for request, answer in zip(batch, answers, strict=True)
    ]
