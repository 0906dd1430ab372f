"""`pb_utils.Tensor`, `InferenceResponse` and `TritonError`: what models answer, to clients and to one another.

A tensor that came with a request looks into memory that it shares with others: it is copied when the model could see
the difference (it may write to what `as_numpy` gives it), not before, and not at all where it is large and that memory
is the model's to write to. A tensor that another framework left on a GPU stays there until the host sends it.
"""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Mapping
from enum import IntEnum
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from model_handlers.errors import Kind
from model_handlers.tensor import BF16, BY_DTYPE, BY_DTYPE_NAME, BYTES, UINT16, Array, DataType

if TYPE_CHECKING:
    from collections.abc import Iterable


class TritonModelException(Exception):  # noqa: N818 - the name that models know
    """What the calls of `pb_utils` raise."""


def text(what: str, value: Any) -> str:
    """The text that a value is: `str`, or `bytes`, which tensors of strings hold. Raises TypeError."""
    if isinstance(value, str):
        return value
    if not isinstance(value, bytes | bytearray):
        raise TypeError(f"{what} must be text, got {type(value)}")
    try:
        return value.decode()
    except UnicodeDecodeError:
        raise TypeError(f"{what} must be text, and these bytes are no UTF-8: {bytes(value[:100])!r}") from None


_LARGE = 64 << 10  # bytes from which a tensor is read where it lies
_CPU, _CUDA, _CUDA_HOST = 1, 2, 3  # DLDeviceType
_UNSIGNED, _BFLOAT = 1, 4  # DLDataTypeCode
_DEVICE_TYPE, _TYPE_CODE, _TYPE_BITS = 8, 20, 21  # offsets in a DLManagedTensor

capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
capsule_pointer.restype = ctypes.c_void_p
capsule_pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]


class Tensor:
    """A named tensor around a numpy array of full shape; strings as an object array of `bytes` or `str`."""

    __slots__ = ("_array", "_data_type", "_name")

    def __init__(self, name: str, numpy_array: Array) -> None:
        self._name = _checked(name)
        self._data_type, self._array = _carried(name, numpy_array)

    def __repr__(self) -> str:
        return f"<Tensor {self._name}: {self._data_type.name}{self.shape()}>"

    def name(self) -> str:
        return self._name

    def triton_dtype(self) -> int:
        return self._data_type.number

    def shape(self) -> list[int]:
        return list(self._array.shape)

    def is_cpu(self) -> bool:
        return True

    def as_numpy(self) -> Array:
        if self._data_type is BF16:
            raise TritonModelException(
                "Tensor dtype is BF16 and cannot be converted to NumPy. Use to_dlpack() and from_dlpack() instead."
            )
        return self._elements()

    def to_dlpack(self) -> Any:
        return self.__dlpack__()

    @staticmethod
    def from_dlpack(name: str, tensor: Any) -> Tensor:
        """A tensor around the memory of another framework's: an object that speaks DLPack, or a capsule.

        Raises TritonModelException where it is not C-contiguous, or of a device or type that can't be carried.
        """
        name = _checked(name)
        if hasattr(tensor, "__dlpack_device__"):
            if tensor.__dlpack_device__()[0] == _CUDA:
                return _GpuTensor(name, tensor)
            tensor = tensor.__dlpack__()
        try:
            address = capsule_pointer(tensor, b"dltensor")
        except ValueError:
            raise TritonModelException(
                "Provided tensor is not supported. Tensor must be a DLPack capsule or have `__dlpack__` and "
                f"`__dlpack_device__` attributes, and a capsule can be taken once: tensor '{name}' is made from "
                f"{type(tensor)}"
            ) from None
        device = ctypes.c_int32.from_address(address + _DEVICE_TYPE).value
        if device == _CUDA:
            return _GpuTensor(name, _taken_from_gpu(tensor))
        if device not in (_CPU, _CUDA_HOST):
            raise TritonModelException(f"DLDevice type {device} is not support by Python backend.")
        return _DlpackTensor(name, tensor, is_bf16=_retyped(address, _BFLOAT, _UNSIGNED))

    def __dlpack__(self, stream: Any = None) -> Any:
        if self._data_type is BYTES:
            raise TritonModelException("DLPack does not have support for string tensors.")
        array = self._elements()
        if not array.flags.writeable:  # DLPack knows no read-only memory
            array = array.copy()
        capsule = array.__dlpack__()
        if self._data_type is BF16:
            _retyped(capsule_pointer(capsule, b"dltensor"), _UNSIGNED, _BFLOAT)
        return capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return (_CPU, 0)

    def carried(self) -> tuple[DataType, Array]:
        """What the host sends: the type, and the elements as the protocol carries them, in the host's memory."""
        return self._data_type, self._array

    def _elements(self) -> Array:
        if not self._array.flags.c_contiguous:  # frameworks that take it over refuse steps backwards
            self._array = self._array.copy(order="C")
        return self._array


class ReceivedTensor(Tensor):
    """An input as the host hands it over: checked already, in memory that belongs to the request."""

    __slots__ = ("_own",)

    def __init__(self, name: str, array: Array, data_type: DataType) -> None:
        self._name = name
        self._array = array
        self._data_type = data_type
        self._own = False

    def _elements(self) -> Array:
        if not self._own:
            flags = self._array.flags
            # Small ones always, since keeping one keeps all of the memory that it lies in.
            if self._array.nbytes < _LARGE or not (flags.writeable and flags.aligned):
                self._array = self._array.copy()
            self._own = True
        return self._array


class _DlpackTensor(Tensor):
    # numpy reads a capsule's memory as UINT16 where it is BF16.
    __slots__ = ()

    def __init__(self, name: str, capsule: Any, *, is_bf16: bool) -> None:
        try:
            array: Array = np.from_dlpack(_Once(capsule))
        except (RuntimeError, BufferError) as error:
            raise TritonModelException(f"tensor '{name}' cannot be taken from DLPack: {error}") from None
        if not array.flags.c_contiguous:
            raise TritonModelException(
                "DLPack tensor is not contiguous. Only contiguous DLPack tensors that are stored in C-Order are "
                "supported."
            )
        super().__init__(name, array)
        if is_bf16:
            self._data_type = BF16
        if not self._array.flags.writeable:  # numpy writes to no memory that it has from DLPack
            self._array = np.asarray(_Memory(self._array))


class _GpuTensor(Tensor):
    __slots__ = ("_tensor",)

    def __init__(self, name: str, tensor: Any) -> None:
        self._name = _checked(name)
        self._tensor = tensor
        self._data_type = _data_type_of(name, str(tensor.dtype).rpartition(".")[2])

    def shape(self) -> list[int]:
        return list(self._tensor.shape)

    def is_cpu(self) -> bool:
        return False

    def as_numpy(self) -> Array:
        raise TritonModelException("Tensor is stored in GPU and cannot be converted to NumPy.")

    def __dlpack__(self, stream: Any = None) -> Any:
        return self._tensor.__dlpack__(stream=stream)

    def __dlpack_device__(self) -> tuple[int, int]:
        kind, index = self._tensor.__dlpack_device__()
        return (int(kind), int(index))

    def carried(self) -> tuple[DataType, Array]:
        if hasattr(self._tensor, "cpu"):  # torch
            return Tensor.from_dlpack(self._name, self._tensor.detach().cpu().contiguous()).carried()
        if hasattr(self._tensor, "get"):  # cupy
            return Tensor(self._name, self._tensor.get()).carried()
        raise TritonModelException(
            f"tensor '{self._name}' on a GPU is of {type(self._tensor)}: return torch's or cupy's"
        )


class _Once:
    def __init__(self, capsule: Any) -> None:
        self._capsule = capsule

    def __dlpack__(self, **_: Any) -> Any:
        return self._capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return (_CPU, 0)


class _Memory:
    # An array's memory as the array interface tells of it, to be written to.
    def __init__(self, array: Array) -> None:
        self._array = array  # which keeps the memory
        self.__array_interface__ = {**array.__array_interface__, "data": (array.ctypes.data, False)}


def _checked(name: str) -> str:
    name = text("name of a Tensor", name)
    if not name:
        raise TritonModelException("Tensor name cannot be an empty string.")
    return name


def _carried(name: str, array: Any) -> tuple[DataType, Array]:
    if not isinstance(array, np.ndarray):
        raise TypeError(f"tensor '{name}' must be made from a numpy array, got {type(array)}")
    data_type = BY_DTYPE.get(array.dtype)
    if data_type is not None:
        return data_type, array
    if array.dtype.kind in "SU":
        return BYTES, array.astype(np.object_)
    data_type = BY_DTYPE.get(array.dtype.newbyteorder("<"))
    if data_type is None:
        raise TritonModelException(f"NumPy dtype is not supported. Tensor '{name}' has dtype {array.dtype}")
    return data_type, array.astype(data_type.dtype)


def _data_type_of(name: str, dtype: str) -> DataType:
    data_type = BY_DTYPE_NAME.get(dtype)
    if data_type is None:
        raise TritonModelException(f"tensor '{name}' has dtype {dtype}, which no data type of the protocol carries")
    return data_type


def _retyped(address: int, old: int, new: int) -> bool:
    # Another type code for 16-bit elements: numpy has no BF16, so it reads and writes them as UINT16.
    code, bits = ctypes.c_uint8.from_address(address + _TYPE_CODE), ctypes.c_uint8.from_address(address + _TYPE_BITS)
    if code.value != old or bits.value != UINT16.itemsize * 8:
        return False
    code.value = new
    return True


def _taken_from_gpu(capsule: Any) -> Any:
    for framework in ("torch", "cupy"):
        if framework in sys.modules:
            return sys.modules[framework].from_dlpack(capsule)
    raise TritonModelException("a DLPack capsule on a GPU can be taken where torch or cupy is imported")


class TritonErrorCode(IntEnum):
    """As TRITONSERVER_Error_Code names and numbers them; their texts, which models log, are Triton's."""

    UNKNOWN = 0
    INTERNAL = 1
    NOT_FOUND = 2
    INVALID_ARG = 3
    UNAVAILABLE = 4
    UNSUPPORTED = 5
    ALREADY_EXISTS = 6
    CANCELLED = 7

    def __str__(self) -> str:
        return f"__ErrorCode.{self.name}"

    def __format__(self, form: str) -> str:
        return format(int(self), form) if form else str(self)


class TritonError:
    """What went wrong with one request: `InferenceResponse(error=TritonError(message, code))`."""

    UNKNOWN: ClassVar[TritonErrorCode] = TritonErrorCode.UNKNOWN
    INTERNAL: ClassVar[TritonErrorCode] = TritonErrorCode.INTERNAL
    NOT_FOUND: ClassVar[TritonErrorCode] = TritonErrorCode.NOT_FOUND
    INVALID_ARG: ClassVar[TritonErrorCode] = TritonErrorCode.INVALID_ARG
    UNAVAILABLE: ClassVar[TritonErrorCode] = TritonErrorCode.UNAVAILABLE
    UNSUPPORTED: ClassVar[TritonErrorCode] = TritonErrorCode.UNSUPPORTED
    ALREADY_EXISTS: ClassVar[TritonErrorCode] = TritonErrorCode.ALREADY_EXISTS
    CANCELLED: ClassVar[TritonErrorCode] = TritonErrorCode.CANCELLED

    def __init__(self, message: str, code: int = INTERNAL) -> None:
        if code not in KINDS:
            raise TritonModelException(f"TritonError has no code {code!r}; use one of its constants")
        self._message = text("message of a TritonError", message) if isinstance(message, bytes) else str(message)
        self._code = TritonErrorCode(code)

    def __str__(self) -> str:
        return self._message

    def code(self) -> TritonErrorCode:
        return self._code

    def message(self) -> str:
        return self._message


# What a model did not find, or found twice, is its own: kinds that speak of models would tell SageMaker that this one
# is not loaded, or is loaded already.
KINDS: dict[int, Kind] = {
    TritonError.UNKNOWN: Kind.UNKNOWN,
    TritonError.INTERNAL: Kind.EXECUTION_FAILED,
    TritonError.NOT_FOUND: Kind.NOT_FOUND,
    TritonError.INVALID_ARG: Kind.INVALID_ARGUMENT,
    TritonError.UNAVAILABLE: Kind.UNAVAILABLE,
    TritonError.UNSUPPORTED: Kind.UNSUPPORTED,
    TritonError.ALREADY_EXISTS: Kind.CONFLICT,
    TritonError.CANCELLED: Kind.CANCELLED,
}


class InferenceResponse:
    """The answer to one request: its outputs, or what went wrong with it."""

    __slots__ = ("_error", "_output_tensors", "_parameters")

    def __init__(
        self,
        output_tensors: Iterable[Tensor] = (),
        error: TritonError | None = None,
        parameters: Mapping[str, Any] | None = None,
    ) -> None:
        if error is not None and not isinstance(error, TritonError):
            raise TypeError(f"error of an InferenceResponse must be a TritonError, got {type(error)}")
        self._output_tensors = list(output_tensors)
        for tensor in self._output_tensors:
            if not isinstance(tensor, Tensor):
                raise _no_output(tensor)
        self._error = error
        self._parameters = checked_parameters(parameters) if parameters is not None else {}

    def output_tensors(self) -> list[Tensor]:
        return list(self._output_tensors)

    def has_error(self) -> bool:
        return self._error is not None

    def error(self) -> TritonError | None:
        return self._error

    def parameters(self) -> str:
        return json.dumps(self._parameters)

    def sent_parameters(self) -> dict[str, Any]:
        return self._parameters


def checked_parameters(parameters: Any) -> dict[str, Any]:
    """The parameters that a model gives to a request or a response, if they can go with it."""
    if not isinstance(parameters, Mapping):
        raise TritonModelException(f"Expect dict, got {type(parameters)}")
    for name, value in parameters.items():
        if not isinstance(name, str):
            raise TritonModelException(f"Expect parameters keys to have type str, found type {type(name)}")
        if not isinstance(value, str | int | float):
            raise TritonModelException(
                f"Expect parameters values to have type bool/int/str, found type {type(value)} for '{name}'"
            )
    return dict(parameters)


def _no_output(tensor: object) -> Exception:
    if tensor is None:
        return TritonModelException("Output tensor for inference response should not be empty.")
    return TypeError(f"output_tensors of an InferenceResponse must be Tensors, got {type(tensor)}")
