"""A ModelInferRequest as a request of the engine: raw contents as they lie, typed contents as arrays, regions read.

What inputs are called, and their types and shapes, are checked once for all requests that look alike; the bytes that
say so are remembered, and requests that begin with them need no protobuf. A `Decoder` belongs to the event loop, see
`codec.decode` for the threads that decode for it.
"""

from __future__ import annotations

from collections.abc import Mapping  # noqa: TC003 - a compiled NamedTuple looks at its types
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from container.codec.described import (
    check_number,
    check_size,
    described,
    output_name,
    view,
    wanted_classes,
)
from container.codec.fields import RequestFields
from container.codec.layouts import Layouts
from container.codec.shared import NO_PLACES, names_region, shared_input, shared_output
from container.grpc.heads import contents, split
from container.grpc.messages import values
from container.steps.shared_memory import AT_ONCE, Place, Regions
from model_handlers.errors import invalid_argument
from model_handlers.tensor import BYTES, element_count
from serve.request import Bounded, InferenceRequest, Layout

if TYPE_CHECKING:
    from collections.abc import Sequence

    from container.grpc.grpc_service_pb2 import InferTensorContents, ModelInferRequest
    from model_handlers.errors import MmeError
    from model_handlers.tensor import Array, DataType
    from serve.request import Completion

    Description = tuple[str, DataType, tuple[int, ...]]
    Input = ModelInferRequest.InferInputTensor

_MAX_FORMS = 4096  # remembered; then all are forgotten, which costs each one check
_MAX_BYTES = 16 << 20  # that they may take
_HEAD_BYTES = 200  # that one takes beside its own
_EMPTY_FINAL = "triton_enable_empty_final_response"
_RAW = "raw_input_contents"
# Where typed elements lie, by data type; FP16 and BF16 have no such field, and lie in _RAW.
_FIELDS = {
    "BOOL": "bool_contents",
    "INT8": "int_contents",
    "INT16": "int_contents",
    "INT32": "int_contents",
    "INT64": "int64_contents",
    "UINT8": "uint_contents",
    "UINT16": "uint_contents",
    "UINT32": "uint_contents",
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    "BYTES": "bytes_contents",
}
# What the type of a field is called.
_HELD = {_FIELDS[kind]: kind for kind in ("BOOL", "INT32", "INT64", "UINT32", "UINT64", "FP32", "FP64", "BYTES")}


# What parameters with a meaning of their own may hold.
_TYPES: dict[str, tuple[tuple[type, ...], str]] = {
    "sequence_id": ((int, str), "int64_param or string_param"),
    "sequence_start": ((bool,), "bool_param"),
    "sequence_end": ((bool,), "bool_param"),
    "priority": ((int,), "int64_param or uint64_param"),
    "timeout": ((int,), "int64_param"),
}
_UNSIGNED = ("sequence_id", "timeout")  # of 64 bits; a negative int64_param is their bits, as in Triton


class Wanted(NamedTuple):
    """How a client wants its answer.

    Attributes:
        classes: output → how many classes are wanted in place of it. See `codec.classification`.
        empty_final: whether the end of several responses is told by an empty one, where none was said to be the last.
        places: output → where in shared memory it is to be written. Cleared when the request is over.
    """

    classes: Mapping[str, int]
    empty_final: bool
    places: dict[str, Place] = NO_PLACES

    def kept(self) -> Wanted:
        """The same for a thread that writes the answer: its places outlast the request."""
        return self._replace(places=dict(self.places)) if self.places else self


PLAIN = Wanted({}, empty_final=False)


class Remembered(NamedTuple):
    """What all requests with the same head are.

    Attributes:
        model, version: that they name.
        layout: theirs.
        wanted: how their clients want their answers.
    """

    model: str
    version: str
    layout: Layout
    wanted: Wanted


class Decoder:
    """Decodes requests, and remembers the forms that it has seen.

    Args:
        regions: of shared memory, in which tensors may lie.
    """

    def __init__(self, regions: Regions | None = None) -> None:
        self._regions = Regions() if regions is None else regions
        self._layouts = Layouts()
        self._forms = Bounded(_MAX_FORMS, _MAX_BYTES)
        self._heads = Bounded(_MAX_FORMS, _MAX_BYTES)

    def __len__(self) -> int:
        """How many forms of requests it remembers."""
        return len(self._forms)

    def remembered(self, data: bytes, on_complete: Completion) -> tuple[Remembered, InferenceRequest] | None:
        """A request whose like was remembered, and what they are; no tensor of it lies in shared memory.

        None for any other, and where something is wrong: read the message, then, and `decode` it.
        """
        parts = split(data)
        if parts is None:
            return None
        head, request_id, at = parts
        known: Remembered | None = self._heads.get(head)
        if known is None:
            return None
        raw, form = contents(data, at), known.layout.inputs
        if raw is None or len(raw) < len(form):
            return None
        arrays = []
        for (start, end), (name, data_type, shape) in zip(raw, form, strict=False):
            if data_type is BYTES:
                if len(data) > AT_ONCE:
                    return None
            elif end - start != element_count(shape) * data_type.itemsize:
                return None
            arrays.append(view(data, start, end, name, data_type, shape, known.model))
        return known, InferenceRequest(known.layout, arrays, on_complete, request_id)

    def remember(self, data: bytes, message: ModelInferRequest, layout: Layout, wanted: Wanted) -> None:
        """Have requests like this one be `remembered`, if its head says all of it but the tensors."""
        if wanted.places or len(message.parameters) > (_EMPTY_FINAL in message.parameters):
            return
        if any(tensor.parameters or tensor.HasField("contents") for tensor in message.inputs):
            return
        parts = split(data)
        if parts is not None:
            head = parts[0]
            known = Remembered(message.model_name, message.model_version, layout, wanted)
            self._heads.keep(head, known, _HEAD_BYTES + len(head) + layout.weight())

    def decode(
        self, message: ModelInferRequest, on_complete: Completion, regions: Regions | None = None
    ) -> tuple[InferenceRequest, Wanted]:
        """A request from its message; `regions` in place of the decoder's.

        Raises:
            MmeError: INVALID_ARGUMENT naming the field or tensor that is wrong; see also `codec.shared`.
            Unread: a tensor is to be read first; then decode it again.
        """
        regions = regions or self._regions
        check_number(message.inputs, "inputs")
        form = self._form(message)
        names, classes, places = _requested(message, regions) if message.outputs else ((), {}, NO_PLACES)
        layout = self._layouts.intern(form, names)
        inputs = _inputs(message, form, regions)
        if not message.parameters:
            request = InferenceRequest(layout, inputs, on_complete, message.id)
            return request, Wanted(classes, empty_final=False, places=places) if classes or places else PLAIN
        check_number(message.parameters, "parameters")
        parameters = values(message.parameters)
        empty_final = _empty_final(parameters)
        _check_types(parameters)
        _read_unsigned(parameters)
        request = RequestFields(message.id, parameters).request(layout, inputs, on_complete)
        return request, Wanted(classes, empty_final, places)

    def _form(self, message: ModelInferRequest) -> tuple[Description, ...]:
        key = tuple([(tensor.name, tensor.datatype, tuple(tensor.shape)) for tensor in message.inputs])
        form: tuple[Description, ...] | None = self._forms.get(key)
        if form is None:
            form = tuple([described(name, datatype, list(shape)) for name, datatype, shape in key])
            self._forms.keep(key, form, Layout(form, ()).weight())
        return form


def holds_many_strings(message: ModelInferRequest, size: int) -> bool:
    """Whether a message of so many bytes takes long to decode."""
    return size > AT_ONCE and any(tensor.datatype == BYTES.name for tensor in message.inputs)


def _inputs(message: ModelInferRequest, form: tuple[Description, ...], regions: Regions) -> list[Array]:
    for tensor in message.inputs:
        if tensor.parameters and names_region(tensor.parameters, tensor.name):
            return _shared(message, form, regions)
    return _sent(message, message.inputs, form)


def _shared(message: ModelInferRequest, form: tuple[Description, ...], regions: Regions) -> list[Array]:
    """The inputs of a request of which some lie in shared memory; raw contents are those of the others."""
    pairs = list(zip(message.inputs, form, strict=True))
    others = [pair for pair in pairs if not names_region(pair[0].parameters, pair[0].name)]
    sent = iter(_sent(message, [tensor for tensor, _ in others], [each for _, each in others]))
    arrays = []
    for tensor, description in pairs:
        if not names_region(tensor.parameters, tensor.name):
            arrays.append(next(sent))
            continue
        if tensor.HasField("contents"):
            raise invalid_argument(
                f"unexpected 'contents' of input '{tensor.name}' for model '{message.model_name}', which lies in "
                "shared memory"
            )
        arrays.append(shared_input(regions, values(tensor.parameters), *description, message.model_name))
    return arrays


def _requested(
    message: ModelInferRequest, regions: Regions
) -> tuple[tuple[str, ...], dict[str, int], dict[str, Place]]:
    """The requested outputs, who of them wants classes, and who lies in shared memory."""
    names: list[str] = []
    classes: dict[str, int] = {}
    places: dict[str, Place] = {}
    check_number(message.outputs, "outputs")
    for output in message.outputs:
        name = output_name(output.name)
        names.append(name)
        if not output.parameters:
            continue
        parameters = values(output.parameters)
        if names_region(parameters, name):
            places[name] = shared_output(regions, parameters, name)
        count = parameters.get("classification", 0)
        if type(count) is not int:
            raise invalid_argument("invalid value type for 'classification' parameter, expected int64_param.")
        classes |= wanted_classes(count, name)
    return tuple(names), classes, places


def _sent(message: ModelInferRequest, inputs: Sequence[Input], form: Sequence[Description]) -> list[Array]:
    return _raw(message, inputs, form) if message.raw_input_contents else _typed(message, inputs, form)


def _raw(message: ModelInferRequest, inputs: Sequence[Input], form: Sequence[Description]) -> list[Array]:
    raw, model = message.raw_input_contents, message.model_name
    for tensor in inputs:
        if tensor.HasField("contents"):
            raise invalid_argument(
                "contents field must not be specified when using raw_input_contents for "
                f"'{tensor.name}' for model '{model}'"
            )
    if len(raw) < len(form):
        raise _no_data(form[len(raw)][0], model)
    arrays = []
    for data, (name, data_type, shape) in zip(raw, form, strict=False):  # Triton ignores those without an input
        check_size(len(data), name, data_type, shape)
        arrays.append(view(data, 0, len(data), name, data_type, shape, model))
    return arrays


def _typed(message: ModelInferRequest, inputs: Sequence[Input], form: Sequence[Description]) -> list[Array]:
    arrays = []
    for tensor, description in zip(inputs, form, strict=True):
        if not tensor.HasField("contents"):
            raise _no_data(tensor.name, message.model_name)
        arrays.append(_elements(tensor.contents, description, message.model_name))
    return arrays


def _no_data(name: str, model: str) -> MmeError:
    return invalid_argument(f"unable to find data for input tensor '{name}' for model '{model}' in request.")


def _elements(contents: InferTensorContents, description: Description, model: str) -> Array:
    name, data_type, shape = description
    field = _FIELDS.get(data_type.name, _RAW)
    for descriptor, _ in contents.ListFields():
        if descriptor.name != field:
            raise invalid_argument(
                f"unexpected explicit tensor data for input tensor '{name}' for model '{model}' of type "
                f"'{_HELD[descriptor.name]}', expected datatype '{data_type.name}', whose elements belong into {field}"
            )
    elements, count = getattr(contents, field, ()), element_count(shape)
    if len(elements) != count:
        raise invalid_argument(
            f"{field} of input '{name}' for model '{model}' holds {len(elements)} elements; its shape {list(shape)} "
            f"is {count}"
        )
    return _array(elements, data_type, name).reshape(shape)


def _array(elements: Sequence[Any], data_type: DataType, name: str) -> Array:
    if data_type is BYTES:
        array = np.empty(len(elements), dtype=np.object_)
        array[:] = list(elements)
        return array
    try:
        return np.array(list(elements), data_type.dtype)
    except OverflowError:
        raise invalid_argument(f"input '{name}' holds elements that are not in the range of {data_type.name}") from None


def _check_types(parameters: dict[str, Any]) -> None:
    """Check the parameters that have a meaning of their own, in Triton's words."""
    for key in parameters.keys() & _TYPES.keys():
        kinds, expected = _TYPES[key]
        if type(parameters[key]) not in kinds:
            raise invalid_argument(f"invalid value type for '{key}' parameter, expected {expected}.")


def _read_unsigned(parameters: dict[str, Any]) -> None:
    for key in _UNSIGNED:
        value = parameters.get(key)
        if isinstance(value, int):
            parameters[key] = value % 2**64


def _empty_final(parameters: dict[str, Any]) -> bool:
    """Take the one reserved parameter that a client may set out of the others."""
    wanted = parameters.pop(_EMPTY_FINAL, False)
    if not isinstance(wanted, bool):
        raise invalid_argument(f"invalid value type for '{_EMPTY_FINAL}' parameter, expected bool_param.")
    return wanted
