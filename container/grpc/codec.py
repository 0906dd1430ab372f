"""Messages of inference: a ModelInferRequest as a request of the engine, its responses as bytes. PURE.

What inputs are called, and their types and shapes, are checked once for all requests that look alike. The bytes that
say so, all but the id and the tensors, are remembered: requests that begin with them need no protobuf. Clients write
fields in the order of their numbers; a message in which anything else is the case is read by protobuf.

    model_name, model_version, id, parameters, inputs, outputs      the head, less the id
    raw_input_contents …                                            the tensors

What a response says of its outputs is written once as a message and kept, too. Bytes of messages that stand one behind
the other are one message with the fields of all: the id and the tensors are put behind those bytes, without another
copy. A `GrpcDecoder` belongs to the event loop, see `codec.decode` for the threads that decode for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from google.protobuf.message import DecodeError

from container.codec.encode import raw
from container.codec.json_data import parameters_to_json
from container.codec.request import (
    Layouts,
    OutputOptions,
    RequestFields,
    RequestPlan,
    check_number,
    check_size,
    described,
    names_region,
    shared_input,
    view,
    write_output,
)
from container.grpc import grpc_service_pb2 as pb
from container.steps.shared_memory import AT_ONCE, Regions
from model_handlers.errors import invalid_argument
from model_handlers.tensor import BYTES, element_count, encode_bytes_elements
from serve.request import Bounded, InferenceRequest, Layout

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from google.protobuf.message import Message

    from container.grpc.grpc_service_pb2 import (
        InferParameter,
        InferTensorContents,
        ModelInferRequest,
        ModelRepositoryParameter,
    )
    from model_handlers.errors import MmeError
    from model_handlers.tensor import Array, DataType
    from serve.request import Completion, InferenceResponse

    Description = tuple[str, DataType, tuple[int, ...]]

_LONGEST = 4096  # bytes of a head


def _tag(message: type[Any], field: str) -> bytes:
    """What stands before the length of a field of bytes; fields up to number 15 have one byte."""
    return bytes([message.DESCRIPTOR.fields_by_name[field].number << 3 | 2])


_ID_TAG = _tag(pb.ModelInferRequest, "id")[0]
_RAW_TAG = _tag(pb.ModelInferRequest, "raw_input_contents")[0]


def split(data: bytes) -> tuple[bytes, str, int] | None:
    """The head, the id, and where the raw contents begin; None of a message that has no such parts."""
    at, has = 0, len(data)
    id_at = id_end = text_at = 0
    while at < has and data[at] != _RAW_TAG:
        tag = data[at]
        if tag & 7 != 2 or tag > 127:
            return None
        start, end = _field(data, at)
        if end > has or end > _LONGEST:
            return None
        if tag == _ID_TAG:
            if id_end:
                return None
            id_at, text_at, id_end = at, start, end
        at = end
    if at >= has:
        return None
    if not id_end:
        return data[:at], "", at
    try:
        return data[:id_at] + data[id_end:at], data[text_at:id_end].decode(), at
    except UnicodeDecodeError:
        return None  # protobuf says what is wrong with it


def contents(data: bytes, at: int) -> list[tuple[int, int]] | None:
    """Where each of the raw contents lies, which are all that follows; None where something else follows, too."""
    found = []
    has = len(data)
    while at < has:
        if data[at] != _RAW_TAG:
            return None
        start, end = _field(data, at)
        if end > has:
            return None
        found.append((start, end))
        at = end
    return found


def _field(data: bytes, at: int) -> tuple[int, int]:
    """Where the bytes of the field that begins here lie; behind the message, where it ends too early."""
    has = len(data)
    size = shift = 0
    while True:
        at += 1
        if at >= has or shift > 28:
            return has, has + 1
        byte = data[at]
        size |= (byte & 127) << shift
        if byte < 128:
            break
        shift += 7
    start = at + 1
    return start, start + size


M = TypeVar("M", bound="Message")


def parsed(kind: type[M], data: bytes) -> M:
    """The message that a client sent.

    Raises:
        MmeError: INVALID_ARGUMENT when the bytes are none.
    """
    try:
        return kind.FromString(data)
    except DecodeError as error:
        raise invalid_argument(f"the request is no {kind.__name__} message: {error}") from None


def values(parameters: Mapping[str, InferParameter] | Mapping[str, ModelRepositoryParameter]) -> dict[str, Any]:
    """Name → value of parameters.

    Raises:
        MmeError: INVALID_ARGUMENT naming one that holds nothing.
    """
    found = {}
    for key, parameter in parameters.items():
        choice = parameter.WhichOneof("parameter_choice")
        if choice is None:
            raise invalid_argument(f"parameter '{key}' holds no value")
        found[key] = getattr(parameter, choice)
    return found


_MAX_FORMS = 4096  # remembered; then all are forgotten, which costs each one check
_MAX_BYTES = 16 << 20  # that they may take
_HEAD_BYTES = 200  # that one takes beside its own
_EMPTY_FINAL = "triton_enable_empty_final_response"
_RAW = "raw_input_contents"
# Where typed elements lie, by data type; FP16 and BF16 have no such field, and lie in _RAW.
_FIELDS = {
    **dict.fromkeys(("INT8", "INT16", "INT32"), "int_contents"),
    **dict.fromkeys(("UINT8", "UINT16", "UINT32"), "uint_contents"),
    **{kind: f"{kind.lower()}_contents" for kind in ("BOOL", "INT64", "UINT64", "FP32", "FP64", "BYTES")},
}
# What the type of a field is called.
_HELD = {field: kind for kind, field in _FIELDS.items()}


# What parameters with a meaning of their own may hold.
_TYPES: dict[str, tuple[tuple[type, ...], str]] = {
    "sequence_id": ((int, str), "int64_param or string_param"),
    "sequence_start": ((bool,), "bool_param"),
    "sequence_end": ((bool,), "bool_param"),
    "priority": ((int,), "int64_param or uint64_param"),
    "timeout": ((int,), "int64_param"),
}
_UNSIGNED = ("sequence_id", "timeout")  # of 64 bits; a negative int64_param is their bits, as in Triton


PLAIN = OutputOptions(binary=True)


class GrpcDecoder:
    """Decodes requests, and remembers the forms that it has seen.

    Args:
        regions: of shared memory, in which tensors may lie.
    """

    def __init__(self, regions: Regions | None = None) -> None:
        self._regions = Regions() if regions is None else regions
        self._layouts = Layouts()
        self._forms = Bounded(_MAX_FORMS, _MAX_BYTES)
        self._plans = Bounded(_MAX_FORMS, _MAX_BYTES)

    def __len__(self) -> int:
        """How many forms of requests it remembers."""
        return len(self._forms)

    def remembered(self, data: bytes, on_complete: Completion) -> tuple[RequestPlan, InferenceRequest] | None:
        """A request whose head was remembered, and its plan; no tensor of it lies in shared memory.

        None for any other, and where something is wrong: read the message, then, and `decode` it.
        """
        parts = split(data)
        if parts is None:
            return None
        head, request_id, at = parts
        plan: RequestPlan | None = self._plans.get(head)
        if plan is None:
            return None
        raw, form = contents(data, at), plan.layout.inputs
        if raw is None or len(raw) < len(form):
            return None
        arrays = []
        for (start, end), (name, data_type, shape) in zip(raw, form, strict=False):
            if data_type is BYTES:
                if len(data) > AT_ONCE:
                    return None
            elif end - start != element_count(shape) * data_type.itemsize:
                return None
            arrays.append(view(data, start, end, name, data_type, shape, plan.target[0]))
        return plan, InferenceRequest(plan.layout, arrays, on_complete, request_id)

    def decode(
        self, message: ModelInferRequest, on_complete: Completion, regions: Regions | None = None, data: bytes = b""
    ) -> tuple[InferenceRequest, OutputOptions]:
        """A request from its message; by `data`, its bytes, requests like it are `remembered`.

        Raises:
            MmeError: INVALID_ARGUMENT naming the field or tensor that is wrong; see also `shared_input`.
            NeedsThread: a tensor is to be read first; then decode it again.
        """
        regions = regions or self._regions
        check_number(message.inputs, "inputs")
        form = self._form(message)
        names, options = self._options(message, regions)
        layout = self._layouts.intern(form, names)
        inputs = _inputs(message, form, regions)
        plan = RequestPlan(layout, options, _fields(message))
        plan.target = (message.model_name, message.model_version)
        if data and plan.lasts and plan.fields is None:
            self._remember(data, message, plan)
        return plan.request(inputs, on_complete, message.id), options

    def _options(self, message: ModelInferRequest, regions: Regions) -> tuple[tuple[str, ...], OutputOptions]:
        """The requested outputs, and how the client wants its answer."""
        empty_final = _empty_final(message)
        if not message.outputs and not empty_final:
            return (), PLAIN
        check_number(message.outputs, "outputs")
        options = OutputOptions(binary=True)
        options.empty_final = empty_final
        names = tuple([options.add(output.name, _parameters_of(output), regions) for output in message.outputs])
        options.outputs.clear()  # none is JSON, whatever the request names
        return names, options if empty_final or options.classes or options.places else PLAIN

    def _remember(self, data: bytes, message: ModelInferRequest, plan: RequestPlan) -> None:
        """Keep the plan if the head says all of the message but the tensors."""
        if any(tensor.parameters or tensor.HasField("contents") for tensor in message.inputs):
            return
        parts = split(data)
        if parts is not None:
            head = parts[0]
            self._plans.keep(head, plan, _HEAD_BYTES + len(head) + plan.layout.weight())

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
    """The tensors: in shared memory, or in raw contents, which are those of all others in their order, or typed."""
    arrays, model = [], message.model_name
    raw = None
    if message.raw_input_contents:
        sent = [
            each.name for each in message.inputs if not (each.parameters and names_region(each.parameters, each.name))
        ]
        if len(message.raw_input_contents) < len(sent):
            raise _no_data(sent[len(message.raw_input_contents)], model)
        raw = iter(message.raw_input_contents)  # Triton ignores those without an input
    for tensor, description in zip(message.inputs, form, strict=True):
        name, data_type, shape = description
        has_contents = tensor.HasField("contents")
        if tensor.parameters and names_region(tensor.parameters, name):
            if has_contents:
                raise invalid_argument(
                    f"unexpected 'contents' of input '{name}' for model '{model}', which lies in shared memory"
                )
            arrays.append(shared_input(regions, values(tensor.parameters), name, data_type, shape, model))
        elif raw is None:
            if not has_contents:
                raise _no_data(name, model)
            arrays.append(_elements(tensor.contents, description, model))
        else:
            if has_contents:
                raise invalid_argument(
                    f"contents field must not be specified when using raw_input_contents for '{name}' for model "
                    f"'{model}'"
                )
            data = next(raw)
            check_size(len(data), name, data_type, shape)
            arrays.append(view(data, 0, len(data), name, data_type, shape, model))
    return arrays


def _parameters_of(output: ModelInferRequest.InferRequestedOutputTensor) -> dict[str, Any]:
    parameters = values(output.parameters) if output.parameters else {}
    if type(parameters.get("classification", 0)) is not int:
        raise invalid_argument("invalid value type for 'classification' parameter, expected int64_param.")
    return parameters


def _fields(message: ModelInferRequest) -> RequestFields | None:
    """What the message says beside; None for nothing but whether there is an empty final response."""
    if not message.parameters or len(message.parameters) <= (_EMPTY_FINAL in message.parameters):
        return None
    check_number(message.parameters, "parameters")
    parameters = values(message.parameters)
    parameters.pop(_EMPTY_FINAL, None)
    for key in parameters.keys() & _TYPES.keys():  # those with a meaning of their own, in Triton's words
        kinds, expected = _TYPES[key]
        if type(parameters[key]) not in kinds:
            raise invalid_argument(f"invalid value type for '{key}' parameter, expected {expected}.")
    for key in _UNSIGNED:
        value = parameters.get(key)
        if isinstance(value, int):
            parameters[key] = value % 2**64
    return RequestFields(parameters)


def _empty_final(message: ModelInferRequest) -> bool:
    """The one reserved parameter that a client may set."""
    if not message.parameters or _EMPTY_FINAL not in message.parameters:
        return False
    parameter = message.parameters[_EMPTY_FINAL]
    if parameter.WhichOneof("parameter_choice") != "bool_param":
        raise invalid_argument(f"invalid value type for '{_EMPTY_FINAL}' parameter, expected bool_param.")
    return parameter.bool_param


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


_MAX_HEADS = 1024  # remembered; then all are forgotten, which costs each one message
_MAX_INT64 = 2**63 - 1


_RESPONSE_ID = _tag(pb.ModelInferResponse, "id")
_RAW_OUTPUT = _tag(pb.ModelInferResponse, "raw_output_contents")
_RESPONSE = _tag(pb.ModelStreamInferResponse, "infer_response")


class Encoder:
    """Encodes responses, and remembers what it said of outputs. Long ones are encoded by threads."""

    def __init__(self) -> None:
        self._heads: dict[Any, bytes] = {}

    def encode(
        self,
        response: InferenceResponse,
        final: bool | None = None,  # noqa: FBT001 - None says nothing
        options: OutputOptions = PLAIN,
    ) -> bytes:
        """The bytes of a ModelInferResponse.

        Args:
            response: the engine's.
            final: whether it says that it is the last, or that it is not; None for neither.
            options: has outputs that are written into shared memory: of their bytes there are none.

        Raises:
            MmeError: UNSUPPORTED for a parameter that can't be told; see also `write_output`.
        """
        key = (
            response.model_name,
            response.model_version,
            *[(name, data_type, array.shape) for name, data_type, array in response.outputs],
        )
        head = self._heads.get(key)
        if head is None:
            if len(self._heads) >= _MAX_HEADS:
                self._heads.clear()
            head = self._heads[key] = _head(response)
        parts: list[bytes | memoryview] = [head]
        if response.id:
            text = response.id.encode()
            parts += (_RESPONSE_ID, _varint(len(text)), text)
        if response.parameters:
            parts.append(_parameters(parameters_to_json(response.parameters, response.model_name)))
        if final is not None:
            parts.append(_FINAL[final])
        for name, data_type, array in response.outputs:
            data = encode_bytes_elements(array) if data_type is BYTES else raw(array, data_type)
            if name in options.places:
                write_output(options.places[name], name, data)
                data = b""
            parts += (_RAW_OUTPUT, _varint(len(data)), data)
        return b"".join(parts)


def in_stream(response: bytes) -> bytes:
    """The bytes of a ModelStreamInferResponse around those of a ModelInferResponse."""
    return b"".join((_RESPONSE, _varint(len(response)), response))


def error_in_stream(
    message: str,
    request_id: str,
    model: tuple[str, str] = ("", ""),
    final: bool | None = None,  # noqa: FBT001 - as in Encoder.encode
) -> bytes:
    """The bytes of a ModelStreamInferResponse that tells of an error of one request.

    `model` is the name and version that answers; `final` says whether it is the last response, None if there is none.
    """
    response = pb.ModelInferResponse(model_name=model[0], model_version=model[1], id=request_id).SerializeToString()
    response += b"" if final is None else _FINAL[final]
    return pb.ModelStreamInferResponse(error_message=message).SerializeToString() + in_stream(response)


def final_response(model: str, version: str, request_id: str) -> bytes:
    """The bytes of a ModelInferResponse that only says that there is none any more."""
    message = pb.ModelInferResponse(model_name=model, model_version=version, id=request_id)
    return message.SerializeToString() + _FINAL[True]


def _head(response: InferenceResponse) -> bytes:
    outputs = [
        pb.ModelInferResponse.InferOutputTensor(name=name, datatype=data_type.name, shape=array.shape)
        for name, data_type, array in response.outputs
    ]
    return pb.ModelInferResponse(
        model_name=response.model_name, model_version=response.model_version, outputs=outputs
    ).SerializeToString()


def _parameters(given: Mapping[str, Any]) -> bytes:
    return pb.ModelInferResponse(
        parameters={key: _parameter(value) for key, value in given.items()}
    ).SerializeToString()


def _parameter(value: Any) -> pb.InferParameter:
    if isinstance(value, bool):
        return pb.InferParameter(bool_param=value)
    if isinstance(value, int):
        return pb.InferParameter(uint64_param=value) if value > _MAX_INT64 else pb.InferParameter(int64_param=value)
    if isinstance(value, float):
        return pb.InferParameter(double_param=value)
    return pb.InferParameter(string_param=value)


_FINAL = {final: _parameters({"triton_final_response": final}) for final in (False, True)}


def _varint(number: int) -> bytes:
    if number < 128:
        return bytes((number,))
    found = bytearray()
    while number > 127:
        found.append(number & 127 | 128)
        number >>= 7
    found.append(number)
    return bytes(found)
