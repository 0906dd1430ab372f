"""`pb_utils.Tensor`: a name and an array, on its way into a model or out of it. Runs on the model's threads.

A tensor that came with a request looks into memory that it shares with others: it is copied when the model could see
the difference (it may write to what `as_numpy` gives it), not before, and not at all where it is large and that memory
is the model's to write to. A tensor that another framework left on a GPU stays there until the host sends it.
"""

from __future__ import annotations

import ctypes
import sys
from typing import TYPE_CHECKING, Any

import numpy as np

from model_handlers.python.pb_errors import TritonModelException
from model_handlers.python.pb_text import text
from model_handlers.tensor import BF16, BY_DTYPE, BY_DTYPE_NAME, BYTES, UINT16

if TYPE_CHECKING:
    from model_handlers.tensor import Array, DataType

_LARGE = 64 << 10  # bytes from which a tensor is read where it lies
_CPU, _CUDA, _CUDA_HOST = 1, 2, 3  # DLDeviceType
_UNSIGNED, _BFLOAT = 1, 4  # DLDataTypeCode
_DEVICE_TYPE, _TYPE_CODE, _TYPE_BITS = 8, 20, 21  # offsets in a DLManagedTensor

_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.restype = ctypes.c_void_p
_capsule_pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]


class Tensor:
    """A named tensor.

    Args:
        name: the name of an input or an output in the model's configuration.
        numpy_array: its elements, full shape; strings as an object array of `bytes` or `str`.

    Raises:
        TypeError: for a name that is no text, and for elements that are no numpy array.
        TritonModelException: for an empty name or a dtype that the protocol does not have.
    """

    __slots__ = ("_array", "_data_type", "_name")

    def __init__(self, name: str, numpy_array: Array) -> None:
        self._name = _checked(name)
        self._data_type, self._array = _carried(name, numpy_array)

    def __repr__(self) -> str:
        return f"<Tensor {self._name}: {self._data_type.name}{self.shape()}>"

    def name(self) -> str:
        """Its name."""
        return self._name

    def triton_dtype(self) -> int:
        """The number of its data type in the ModelConfig message."""
        return self._data_type.number

    def shape(self) -> list[int]:
        """Its full shape."""
        return list(self._array.shape)

    def is_cpu(self) -> bool:
        """Whether its elements lie in the host's memory."""
        return True

    def as_numpy(self) -> Array:
        """Its elements, the model's own to read and to write; strings that came with a request are `bytes`.

        Raises:
            TritonModelException: when numpy has no such type, or the elements lie on a GPU.
        """
        if self._data_type is BF16:
            raise TritonModelException(
                "Tensor dtype is BF16 and cannot be converted to NumPy. Use to_dlpack() and from_dlpack() instead."
            )
        return self._elements()

    def to_dlpack(self) -> Any:
        """Its elements as a DLPack capsule, which can be taken once.

        Raises:
            TritonModelException: for strings, which DLPack does not have.
        """
        return self.__dlpack__()

    @staticmethod
    def from_dlpack(name: str, tensor: Any) -> Tensor:
        """A tensor around the memory of another framework's: an object that speaks DLPack, or a capsule.

        Raises:
            TritonModelException: when the elements are not C-contiguous, lie elsewhere than on the host or on a GPU of
                CUDA's, or are of a type that the protocol does not have.
        """
        name = _checked(name)
        if hasattr(tensor, "__dlpack_device__"):
            if tensor.__dlpack_device__()[0] == _CUDA:
                return _GpuTensor(name, tensor)
            tensor = tensor.__dlpack__()
        try:
            address = _capsule_pointer(tensor, b"dltensor")
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
        """See `to_dlpack`."""
        if self._data_type is BYTES:
            raise TritonModelException("DLPack does not have support for string tensors.")
        array = self._elements()
        if not array.flags.writeable:  # DLPack knows no read-only memory
            array = array.copy()
        capsule = array.__dlpack__()
        if self._data_type is BF16:
            _retyped(_capsule_pointer(capsule, b"dltensor"), _UNSIGNED, _BFLOAT)
        return capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        """Where its elements lie, in DLPack's numbers."""
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
            # Small ones always, since whoever keeps one keeps all of the memory that it lies in.
            if self._array.nbytes < _LARGE or not (flags.writeable and flags.aligned):
                self._array = self._array.copy()
            self._own = True
        return self._array


class _DlpackTensor(Tensor):
    """A tensor around a capsule's memory, which numpy reads as UINT16 where it is BF16."""

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
        self._array = _writable(self._array)


class _GpuTensor(Tensor):
    """A tensor that stays where another framework made it."""

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
    """A capsule as an object that numpy's DLPack reader accepts."""

    def __init__(self, capsule: Any) -> None:
        self._capsule = capsule

    def __dlpack__(self, **_: Any) -> Any:
        return self._capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return (_CPU, 0)


class _Memory:
    """An array's memory as the array interface tells of it, to be written to."""

    def __init__(self, array: Array) -> None:
        self._array = array  # which keeps the memory
        self.__array_interface__ = {**array.__array_interface__, "data": (array.ctypes.data, False)}


def _writable(array: Array) -> Array:
    """The array around the same memory: numpy writes to none that it has from DLPack."""
    return array if array.flags.writeable else np.asarray(_Memory(array))


def _checked(name: str) -> str:
    name = text("name of a Tensor", name)
    if not name:
        raise TritonModelException("Tensor name cannot be an empty string.")
    return name


def _carried(name: str, array: Any) -> tuple[DataType, Array]:
    """The protocol's type for an array, and the array in the dtype that carries it."""
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
    """The protocol's type for another framework's name of a dtype."""
    data_type = BY_DTYPE_NAME.get(dtype)
    if data_type is None:
        raise TritonModelException(f"tensor '{name}' has dtype {dtype}, which no data type of the protocol carries")
    return data_type


def _retyped(address: int, old: int, new: int) -> bool:
    """Give 16-bit elements another type code: numpy has no BF16, so it reads and writes them as UINT16."""
    code, bits = ctypes.c_uint8.from_address(address + _TYPE_CODE), ctypes.c_uint8.from_address(address + _TYPE_BITS)
    if code.value != old or bits.value != UINT16.itemsize * 8:
        return False
    code.value = new
    return True


def _taken_from_gpu(capsule: Any) -> Any:
    """A capsule of GPU memory as a tensor of the framework that the model has imported."""
    for framework in ("torch", "cupy"):
        if framework in sys.modules:
            return sys.modules[framework].from_dlpack(capsule)
    raise TritonModelException("a DLPack capsule on a GPU can be taken where torch or cupy is imported")
