"""What one side writes the other reads: with tritonclient's own encoders, and with anything that hypothesis thinks of."""

import json
import warnings

import ml_dtypes
import numpy as np
import pytest
import tritonclient.http as triton
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as numpy_strategies

from container.codec.decode import Decoder
from container.codec.encode import encode
from container.codec.request import OutputOptions
from model_handlers.errors import MmeError
from model_handlers.tensor import BY_NAME, encode_bytes_elements
from serve.request import InferenceResponse

WITHOUT_BF16 = [name for name in BY_NAME if name != "BF16"]
SHAPES = numpy_strategies.array_shapes(min_dims=1, max_dims=3, min_side=0, max_side=4)


def ignore(*_):
    """A completion."""


def echo(body, length, decoder=None):
    """Decode a request and answer it with its own inputs under the names of the requested outputs."""
    request, reply = (decoder or Decoder()).decode(body, length, "m", ignore)
    names = request.layout.outputs or [name for name, _, _ in request.layout.inputs]
    rows = [
        (name, data_type, array)
        for name, (_, data_type, _), array in zip(names, request.layout.inputs, request.inputs, strict=True)
    ]
    parts, header_length = encode(InferenceResponse("m", "1", rows, request.id), reply)
    return b"".join(parts), header_length


def triton_echo(arrays, *, binary_in, binary_out, request_id=""):
    """The same through tritonclient: it writes the request and reads the response."""
    inputs, outputs = [], []
    for name, (datatype, array) in arrays.items():
        tensor = triton.InferInput(name, list(array.shape), datatype)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of tritonclient about numpy
            tensor.set_data_from_numpy(array, binary_data=binary_in)
        inputs.append(tensor)
        outputs.append(triton.InferRequestedOutput(name, binary_data=binary_out))
    body, length = triton.InferenceServerClient.generate_request_body(inputs, outputs=outputs, request_id=request_id)
    answer, header_length = echo(body, length)
    return triton.InferenceServerClient.parse_response_body(answer, header_length=header_length)


def equal(left, right):
    """Bit for bit, NaN included."""
    if left.dtype == np.object_:
        return left.shape == right.shape and left.tolist() == right.tolist()
    return left.shape == right.shape and left.dtype == right.dtype and left.tobytes() == right.tobytes()


@pytest.mark.parametrize("binary_out", [True, False])
@pytest.mark.parametrize("binary_in", [True, False])
def test_tritonclient_reads_what_we_write_and_we_read_what_it_writes(binary_in, binary_out, arrays):
    """All datatypes that tritonclient knows by numpy, in one request, in every mix of forms."""
    sent = {}
    for name in WITHOUT_BF16:
        array = arrays[name]
        if not (binary_in and binary_out):
            if not BY_NAME[name].json:
                continue
            if name == "BYTES":
                array = np.array([b"", "é模".encode()], dtype=np.object_)
        sent[name] = (name, array)

    result = triton_echo(sent, binary_in=binary_in, binary_out=binary_out, request_id="r7")

    assert result.get_response()["id"] == "r7"
    for name, (_, array) in sent.items():
        received = result.as_numpy(name)
        if name == "BYTES" and not binary_out:
            received = np.array([str(element).encode() for element in received], dtype=np.object_)
        assert equal(received, array), name


def test_tritonclient_reads_back_its_bf16():
    """BF16 goes through as the bits that it is."""
    values = np.array([1.0, -2.5, 0.0], dtype=ml_dtypes.bfloat16)
    received = triton_echo({"B": ("BF16", values)}, binary_in=True, binary_out=True).as_numpy("B")
    assert received.astype(np.float32).tolist() == [1.0, -2.5, 0.0]


@pytest.mark.parametrize("binary_out", [True, False])
def test_tritonclient_reads_tensors_without_elements(binary_out):
    """Zero-size outputs among others, in both forms."""
    sent = {"E": ("FP32", np.empty((0, 3), np.float32)), "Y": ("INT32", np.array([5], np.int32))}
    result = triton_echo(sent, binary_in=True, binary_out=binary_out)
    assert result.as_numpy("E").shape == (0, 3)
    assert result.as_numpy("Y").tolist() == [5]


@pytest.mark.parametrize("binary", [True, False])
def test_tritonclient_reads_a_responses_parameters(binary):
    """They are in the response that tritonclient hands out, beside the outputs."""
    parameters = {"text": "é", "count": 3, "share": 0.5, "done": True}
    array = np.array([1.5], np.float32)
    response = InferenceResponse("m", "1", [("Y", BY_NAME["FP32"], array)], "r7", parameters=parameters)

    parts, length = encode(response, OutputOptions(binary=binary, remember=True))
    result = triton.InferenceServerClient.parse_response_body(b"".join(parts), header_length=length)

    assert result.get_response()["parameters"] == parameters
    assert result.as_numpy("Y").tolist() == [1.5]


def elements(datatype):
    """Arrays of any shape and any bits."""
    data_type = BY_NAME[datatype]
    if datatype == "BYTES":
        return SHAPES.flatmap(
            lambda shape: st.lists(
                st.binary(max_size=9), min_size=int(np.prod(shape)), max_size=int(np.prod(shape))
            ).map(lambda items: _objects(items, shape))
        )
    return numpy_strategies.arrays(data_type.dtype, SHAPES)


def _objects(items, shape):
    array = np.empty(len(items), dtype=np.object_)
    array[:] = items
    return array.reshape(shape)


TENSORS = st.lists(
    st.sampled_from(list(BY_NAME)).flatmap(lambda datatype: st.tuples(st.just(datatype), elements(datatype))),
    min_size=1,
    max_size=4,
)


def request_of(tensors, binary, request_id=""):
    """Our own encoding of a request, written independently of the code under test."""
    inputs, data = [], b""
    for number, ((datatype, array), in_binary) in enumerate(zip(tensors, binary, strict=False)):
        item = {"name": f"T{number}", "shape": list(array.shape), "datatype": datatype}
        if in_binary:
            part = encode_bytes_elements(array) if datatype == "BYTES" else array.tobytes()
            item["parameters"] = {"binary_data_size": len(part)}
            data += part
        else:
            item["data"] = array.tolist()
        inputs.append(item)
    header = json.dumps({"id": request_id, "parameters": {"binary_data_output": True}, "inputs": inputs}).encode()
    return header + data, len(header)


def tensors_of(body, length):
    """A binary response, read independently of the code under test."""
    offset, found = length, []
    for item in json.loads(body[:length])["outputs"]:
        size = item["parameters"]["binary_data_size"]
        found.append((item["datatype"], item["shape"], body[offset : offset + size]))
        offset += size
    assert offset == len(body)
    return found


def expected_of(tensors):
    """What an echo of them holds."""
    return [
        (datatype, list(array.shape), encode_bytes_elements(array) if datatype == "BYTES" else array.tobytes())
        for datatype, array in tensors
    ]


DECODER = Decoder()


@given(TENSORS, st.text(max_size=3))
def test_any_tensors_come_back_bit_for_bit(tensors, request_id):
    """Any mix of datatypes, shapes and bits survives the way in and out, by a new header and by one met before."""
    body, length = request_of(tensors, [True] * 4, request_id)
    expected = expected_of(tensors)
    answer, header_length = echo(body, length)
    assert tensors_of(answer, header_length) == expected
    assert json.loads(answer[:header_length]).get("id", "") == request_id
    for _ in range(2):
        assert echo(body, length, DECODER) == (answer, header_length)


JSON_TENSORS = st.lists(
    st.sampled_from([name for name in BY_NAME if BY_NAME[name].json and name != "BYTES"]).flatmap(
        lambda datatype: st.tuples(
            st.just(datatype),
            numpy_strategies.arrays(
                BY_NAME[datatype].dtype,
                SHAPES,
                elements=numpy_strategies.from_dtype(BY_NAME[datatype].dtype, allow_nan=False, allow_infinity=False),
            ),
        )
    ),
    min_size=1,
    max_size=3,
)


@given(JSON_TENSORS, st.lists(st.booleans(), min_size=3, max_size=3))
def test_json_and_binary_inputs_mean_the_same(tensors, binary):
    """Any mix of JSON and binary inputs gives the tensors that were meant, twice."""
    body, length = request_of(tensors, binary)
    for _ in range(2):
        answer, header_length = echo(body, length, DECODER)
        assert tensors_of(answer, header_length) == expected_of(tensors)


@given(st.binary(max_size=60), st.integers(-3, 70))
def test_no_bytes_do_anything_but_be_refused(body, length):
    """Noise, with any header length, ends in an error of ours and in no other."""
    with pytest.raises(MmeError):
        DECODER.decode(body, min(max(length, 1), len(body)), "m", ignore)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(["", "FP32", "BYTES", "X", "8"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                [
                    "inputs",
                    "outputs",
                    "name",
                    "shape",
                    "datatype",
                    "data",
                    "parameters",
                    "binary_data_size",
                    "id",
                    "timeout",
                ]
            ),
            inner,
            max_size=5,
        )
    ),
    max_leaves=15,
)


@given(
    JSON,
    st.dictionaries(st.sampled_from(["name", "shape", "datatype", "data", "parameters"]), JSON),
    st.binary(max_size=8),
)
def test_no_document_does_anything_but_be_decoded_or_refused(document, tensor, data):
    """Documents made of the protocol's words end in a request or in an error of ours."""
    complete = {"name": "X", "shape": [2], "datatype": "FP32", "data": [1, 2]} | tensor
    for candidate in (document, {"inputs": [complete]}, {"inputs": [complete], "parameters": document}):
        header = json.dumps(candidate).encode()
        try:
            request, _ = DECODER.decode(header + data, len(header), "m", ignore)
        except MmeError:
            continue
        assert len(request.inputs) == len(request.layout.inputs)
        assert all(
            array.shape == shape for array, (_, _, shape) in zip(request.inputs, request.layout.inputs, strict=True)
        )
