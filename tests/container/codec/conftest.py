"""Requests and responses in memory: what the tests of the codec share."""

from __future__ import annotations

import json

import numpy as np
import pytest

from container.codec.decode import Decoder
from container.codec.encode import encode
from model_handlers.errors import Kind, MmeError
from model_handlers.tensor import BY_NAME
from serve.request import InferenceResponse


def ignore(_request, _result):
    """A completion."""


@pytest.fixture
def decoder():
    """A decoder that has seen nothing."""
    return Decoder()


@pytest.fixture
def decode(decoder):
    """Decodes a request given as a document and tensors, or as bytes; `length` overrides the header's."""

    def decoded(document, *tensors, length=..., model="m"):
        header = document if isinstance(document, bytes) else json.dumps(document).encode()
        if length is ...:
            length = len(header) if tensors else None
        return decoder.decode(header + b"".join(tensors), length, model, ignore)

    return decoded


@pytest.fixture
def refusal():
    """Runs a function that must raise an error of a kind (INVALID_ARGUMENT unless told); returns its one sentence."""

    def refused(function, *arguments, kind=Kind.INVALID_ARGUMENT, **options):
        with pytest.raises(MmeError) as caught:
            function(*arguments, **options)
        assert caught.value.kind is kind
        assert "\n" not in caught.value.message
        return caught.value.message

    return refused


@pytest.fixture
def input_():
    """An input's description."""

    def described(name="X", shape=(2,), datatype="FP32", **more):
        return {"name": name, "shape": list(shape), "datatype": datatype} | more

    return described


@pytest.fixture
def respond():
    """A response of (name, datatype, array) outputs."""

    def response(*outputs, model="m", version="1", request_id="", parameters=None):
        rows = [(name, BY_NAME[datatype], array) for name, datatype, array in outputs]
        return InferenceResponse(model, version, rows, request_id, parameters=parameters)

    return response


@pytest.fixture
def written():
    """Encodes a response: its JSON header, and the bytes behind it (None where the answer is JSON alone)."""

    def encoded(response, reply):
        parts, length = encode(response, reply)
        body = b"".join(parts)
        if length is None:
            return json.loads(body), None
        return json.loads(body[:length]), body[length:]

    return encoded


@pytest.fixture
def arrays():
    """One array a datatype with its extreme values, as the engine carries it."""
    fixed = {
        "BOOL": np.array([True, False]),
        "FP16": np.array([65504, -6e-8], dtype="<f2"),
        "FP32": np.array([3.4e38, 1e-45], dtype="<f4"),
        "FP64": np.array([1.7e308, 5e-324]),
        "BF16": np.array([0x3F80, 0xFF7F], dtype="<u2"),
        "BYTES": np.array([b"", b"\xff\x00 text"], dtype=np.object_),
    }
    for name, data_type in BY_NAME.items():
        if name not in fixed:
            limits = np.iinfo(data_type.dtype)
            fixed[name] = np.array([limits.min, limits.max], dtype=data_type.dtype)
    return fixed
