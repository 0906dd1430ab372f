"""A response of the engine as the bytes of a ModelInferResponse, or of a ModelStreamInferResponse. PURE.

What a response says of its outputs is the same again and again, so it is written once as a message and kept. Bytes of
messages that stand one behind the other are one message with the fields of all: the id and the tensors are put behind
those bytes, without protobuf and without another copy of the tensors.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from container.codec.encode import raw, tensor_bytes
from container.codec.json_data import parameters_to_json
from container.codec.shared import write_output
from container.grpc import grpc_service_pb2 as pb
from model_handlers.tensor import BYTES, encode_bytes_elements

if TYPE_CHECKING:
    from collections.abc import Mapping

    from container.steps.shared_memory import Place
    from serve.request import InferenceResponse

_MAX_HEADS = 1024  # remembered; then all are forgotten, which costs each one message
_MAX_INT64 = 2**63 - 1


def _tag(message: type[Any], field: str) -> bytes:
    """What stands before the length of a field of bytes; fields up to number 15 have one byte."""
    return bytes([message.DESCRIPTOR.fields_by_name[field].number << 3 | 2])


_ID = _tag(pb.ModelInferResponse, "id")
_RAW = _tag(pb.ModelInferResponse, "raw_output_contents")
_RESPONSE = _tag(pb.ModelStreamInferResponse, "infer_response")


class Encoder:
    """Encodes responses, and remembers what it said of outputs. Long ones are encoded by threads."""

    def __init__(self) -> None:
        self._heads: dict[Any, bytes] = {}

    def encode(self, response: InferenceResponse, final: bool | None = None) -> bytes:  # noqa: FBT001 - None says nothing
        """The bytes of a ModelInferResponse.

        Args:
            response: the engine's.
            final: whether it says that it is the last, or that it is not; None for neither.

        Raises:
            MmeError: UNSUPPORTED for a parameter that can't be told.
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
            parts += (_ID, _varint(len(text)), text)
        if response.parameters:
            parts.append(_parameters(parameters_to_json(response.parameters, response.model_name)))
        if final is not None:
            parts.append(_FINAL[final])
        for _, data_type, array in response.outputs:
            data = encode_bytes_elements(array) if data_type is BYTES else raw(array, data_type)
            parts += (_RAW, _varint(len(data)), data)
        return b"".join(parts)


def placed(
    response: InferenceResponse,
    places: Mapping[str, Place],
    final: bool | None = None,  # noqa: FBT001 - as in Encoder.encode
) -> bytes:
    """As `Encoder.encode`, of outputs some of which are written into shared memory: of their bytes there are none.

    Raises:
        MmeError: as `Encoder.encode`, and see `shared.write_output`.
    """
    model, version = response.model_name, response.model_version
    message = pb.ModelInferResponse(model_name=model, model_version=version, id=response.id)
    for name, data_type, array in response.outputs:
        data = tensor_bytes(array, data_type)
        if name in places:
            write_output(places[name], name, data)
            data = b""
        message.outputs.add(name=name, datatype=data_type.name, shape=array.shape)
        message.raw_output_contents.append(bytes(data))
    said = response.parameters
    beside = _parameters(parameters_to_json(said, model)) if said else b""
    return message.SerializeToString() + beside + (b"" if final is None else _FINAL[final])


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

    Args:
        message: the error.
        request_id: the request's id.
        model: name and version of the model whose response it is.
        final: whether it is the last response; None of a request that no model was given.
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
