"""Messages of inference, to requests of the engine and back, without a server."""

import numpy as np
import pytest
from tritonclient.grpc import service_pb2 as published

from container.grpc import codec as decode_module
from container.grpc import grpc_service_pb2 as pb
from container.grpc.codec import PLAIN, Encoder, GrpcDecoder, error_in_stream, final_response, in_stream
from model_handlers.errors import Kind, MmeError
from model_handlers.tensor import BY_NAME
from serve.request import InferenceResponse
from tests.shared_objects import registered, shared_object

Tensor = pb.ModelInferRequest.InferInputTensor
Contents = pb.InferTensorContents
Output = pb.ModelInferRequest.InferRequestedOutputTensor
TEXT = pb.InferParameter(string_param="a")


def decode(*inputs, raw=(), **fields):
    """A request out of a message."""
    message = pb.ModelInferRequest(model_name="m", inputs=inputs, raw_input_contents=raw, **fields)
    return GrpcDecoder().decode(message, lambda *_: None)


def x(datatype="FP32", shape=(2,), **contents):
    """An input X with typed contents, or none."""
    return Tensor(name="X", datatype=datatype, shape=shape, contents=Contents(**contents) if contents else None)


@pytest.mark.parametrize(
    ("datatype", "field", "values"),
    [
        ("BOOL", "bool_contents", [True, False]),
        ("INT8", "int_contents", [-128, 127]),
        ("INT16", "int_contents", [-(2**15), 2**15 - 1]),
        ("INT32", "int_contents", [-(2**31), 2**31 - 1]),
        ("INT64", "int64_contents", [-(2**63), 2**63 - 1]),
        ("UINT8", "uint_contents", [0, 255]),
        ("UINT16", "uint_contents", [0, 65535]),
        ("UINT32", "uint_contents", [0, 2**32 - 1]),
        ("UINT64", "uint64_contents", [0, 2**64 - 1]),
        ("FP32", "fp32_contents", [0.5, -3]),
        ("FP64", "fp64_contents", [0.1, -1e308]),
        ("BYTES", "bytes_contents", [b"\xff", b""]),
    ],
)
def test_typed_contents_of_every_type(datatype, field, values):
    """Each type's elements lie in its field, and make an array of its dtype."""
    request, _ = decode(x(datatype, **{field: values}))

    (array,) = request.inputs
    assert array.dtype == BY_NAME[datatype].dtype
    assert array.tolist() == values


@pytest.mark.parametrize("datatype", ["FP16", "BF16"])
def test_halves_come_raw_alone(datatype):
    """They have no typed contents; their bytes are an array as they lie."""
    request, _ = decode(x(datatype), raw=[b"\x01\x02\x03\x04"])
    assert request.inputs[0].tobytes() == b"\x01\x02\x03\x04"

    with pytest.raises(MmeError, match=f"'FP32', expected datatype '{datatype}', whose elements belong into raw_input"):
        decode(x(datatype, fp32_contents=[1, 2]))
    with pytest.raises(MmeError, match="unable to find data for input tensor 'X' for model 'm' in request"):
        decode(x(datatype))


@pytest.mark.parametrize(
    ("inputs", "fields", "sentence"),
    [
        ([x()], {}, "unable to find data for input tensor 'X' for model 'm' in request"),
        ([x(fp32_contents=[1])], {}, r"holds 1 elements; its shape \[2\] is 2"),
        (
            [x(fp64_contents=[1, 2])],
            {},
            "unexpected explicit tensor data for input tensor 'X' for model 'm' of type 'FP64', expected datatype 'FP32'",
        ),
        ([x("INT8", int_contents=[1, 128])], {}, "not in the range of INT8"),
        ([x("FP31", fp32_contents=[1, 2])], {}, "datatype 'FP31'; the protocol knows"),
        ([x(shape=(-1,), fp32_contents=[1, 2])], {}, "'shape' of input 'X' must hold integers of 0 or more, got -1"),
        ([Tensor(datatype="FP32")], {}, "every input must have a 'name'"),
        (
            [x(fp32_contents=[1, 2])],
            {"raw": [b"12345678"]},
            "contents field must not be specified when using raw_input",
        ),
        ([x()], {"raw": [b"1234567"]}, "input byte size mismatch for input 'X'. Expected 8"),
        ([x(), x()], {"raw": [b"12345678"]}, "unable to find data for input tensor 'X' for model 'm' in request"),
        ([x("BYTES")], {"raw": [b"\x01\x00\x00\x00a"]}, "expected 2 string elements for inference input 'X' for model"),
        ([x()], {"raw": [b"12345678"], "outputs": [Output()]}, "every requested output must have a 'name'"),
        ([x()], {"raw": [b"12345678"], "parameters": {"triton_x": TEXT}}, "starting with 'triton_' are reserved"),
        (
            [x()],
            {"raw": [b"12345678"], "parameters": {"sequence_start": TEXT}},
            "'sequence_start' parameter, expected bool_param",
        ),
        (
            [x()],
            {"raw": [b"12345678"], "parameters": {"priority": TEXT}},
            "'priority' parameter, expected int64_param or",
        ),
        ([x()], {"raw": [b"12345678"], "parameters": {"p": pb.InferParameter()}}, "parameter 'p' holds no value"),
        (
            [x()],
            {"raw": [b"12345678"], "parameters": {"triton_enable_empty_final_response": TEXT}},
            "invalid value type for 'triton_enable_empty_final_response' parameter, expected bool_param",
        ),
        (
            [x()],
            {"raw": [b"12345678"], "outputs": [Output(name="Y", parameters={"classification": TEXT})]},
            "invalid value type for 'classification' parameter, expected int64_param",
        ),
    ],
)
def test_what_is_wrong_has_one_sentence(inputs, fields, sentence):
    """It names the field, the input and the value."""
    with pytest.raises(MmeError, match=sentence) as raised:
        decode(*inputs, **fields)
    assert raised.value.kind is Kind.INVALID_ARGUMENT


# -- shared memory ---------------------------------------------------------------------------------------------------


@pytest.fixture
def shared():
    """An object that a client has made."""
    with shared_object(64) as made:
        yield made


@pytest.fixture
def regions(shared):
    """All of it as the region "r"."""
    return registered("r", shared)


def there(offset=0, size=8):
    """The parameters of a tensor that lies in the region."""
    told = {"shared_memory_byte_size": size} | ({"shared_memory_offset": offset} if offset else {})
    region = {"shared_memory_region": pb.InferParameter(string_param="r")}
    return region | {name: pb.InferParameter(int64_param=number) for name, number in told.items()}


@pytest.mark.parametrize("where", ["input", "output"])
def test_regions_are_refused_where_no_memory_is_shared(where):
    """By the tensor that names one, also where the form of the request is known."""
    decoder = GrpcDecoder()
    plain = pb.ModelInferRequest(model_name="m", inputs=[x(fp32_contents=[1, 2])])
    decoder.decode(plain, lambda *_: None)
    if where == "input":
        plain.inputs[0].ClearField("contents")
        plain.inputs[0].parameters["shared_memory_region"].string_param = "a"
    else:
        plain.outputs.append(Output(name="Y", parameters=there()))

    with pytest.raises(MmeError, match=f"{where} '[XY]' names a shared memory region") as raised:
        decoder.decode(plain, lambda *_: None)
    assert raised.value.kind is Kind.UNSUPPORTED


@pytest.mark.parametrize("raw", [True, False])
def test_inputs_in_a_region_beside_others(raw, regions, shared):
    """Contents are those of the other inputs, in their order."""
    shared.buf[8:16] = np.array([5, 6], np.float32).tobytes()
    inputs = [
        Tensor(name="A", datatype="INT32", shape=[1]),
        Tensor(name="X", datatype="FP32", shape=[2], parameters=there(8)),
        Tensor(name="B", datatype="INT32", shape=[1]),
    ]
    message = pb.ModelInferRequest(model_name="m", inputs=inputs)
    for place, number in ((0, 1), (2, 2)):
        if raw:
            message.raw_input_contents.append(number.to_bytes(4, "little"))
        else:
            message.inputs[place].contents.int_contents.append(number)

    request, wanted = GrpcDecoder(regions).decode(message, lambda *_: None)

    assert [array.tolist() for array in request.inputs] == [[1], [5, 6], [2]]
    assert wanted is PLAIN

    message.inputs[1].contents.fp32_contents.extend([1, 2])
    with pytest.raises(MmeError, match="unexpected 'contents' of input 'X' for model 'm', which lies in shared memory"):
        GrpcDecoder(regions).decode(message, lambda *_: None)
    message.inputs[1].ClearField("contents")
    del message.inputs[2]
    assert len(GrpcDecoder(regions).decode(message, lambda *_: None)[0].inputs) == 2


def test_outputs_in_a_region_beside_others(regions, shared):
    """Each has its place in the raw contents, that of one in a region being empty."""
    outputs = [Output(name="Y", parameters=there(16)), Output(name="Z")]
    message = pb.ModelInferRequest(model_name="m", inputs=[x(fp32_contents=[1, 2])], outputs=outputs)
    _, wanted = GrpcDecoder(regions).decode(message, lambda *_: None)
    numbers, texts = np.array([7, 8], np.float32), np.array([b"ab"], object)
    given = response(("Y", "FP32", numbers), ("Z", "BYTES", texts), id="i", parameters={"own": 1})

    read = published.ModelInferResponse.FromString(Encoder().encode(given, True, wanted))

    assert bytes(shared.buf[16:24]) == numbers.tobytes()
    assert list(read.raw_output_contents) == [b"", b"\x02\x00\x00\x00ab"]
    assert [(each.name, each.datatype, list(each.shape)) for each in read.outputs] == [
        ("Y", "FP32", [2]),
        ("Z", "BYTES", [1]),
    ]
    assert not read.outputs[0].parameters
    assert (read.id, read.model_version, read.parameters["own"].int64_param) == ("i", "1", 1)
    assert read.parameters["triton_final_response"].bool_param

    classes = there(16) | {"classification": pb.InferParameter(int64_param=1)}
    message.outputs[0].CopyFrom(Output(name="Y", parameters=classes))
    with pytest.raises(MmeError, match="output 'Y' can not be in a shared memory region and have 'classification'"):
        GrpcDecoder(regions).decode(message, lambda *_: None)


# -- the rest --------------------------------------------------------------------------------------------------------


def test_the_fields_of_a_request():
    """Id, sequence, priority, timeout, what is wanted and the client's own parameters; requests alike share a layout."""
    parameters = {
        "sequence_id": pb.InferParameter(string_param="s"),
        "sequence_start": pb.InferParameter(bool_param=True),
        "sequence_end": pb.InferParameter(bool_param=True),
        "priority": pb.InferParameter(uint64_param=2),
        "timeout": pb.InferParameter(int64_param=5),
        "own": pb.InferParameter(double_param=0.5),
        "triton_enable_empty_final_response": pb.InferParameter(bool_param=True),
    }
    classes = {"classification": pb.InferParameter(int64_param=3)}
    message = pb.ModelInferRequest(
        model_name="m",
        id="i",
        inputs=[x(fp32_contents=[1, 2])],
        outputs=[Output(name="Y", parameters=classes), Output(name="Z")],
        parameters=parameters,
    )
    decoder = GrpcDecoder()

    request, wanted = decoder.decode(message, lambda *_: None)

    assert (request.id, request.correlation_id, request.flags, request.priority, request.timeout_us) == (
        "i",
        "s",
        3,
        2,
        5,
    )
    assert request.parameters == {"own": 0.5}
    assert (wanted.classes, wanted.empty_final, request.layout.outputs) == ({"Y": 3}, True, ("Y", "Z"))
    assert (wanted.binary, wanted.outputs) == (True, {}), "none is written as JSON"
    assert decoder.decode(message, lambda *_: None)[0].layout is request.layout


def test_numbers_below_zero_are_read_as_unsigned_ones():
    """A sequence is known by the bits of its name, and a time limit of -1 never comes."""
    parameters = {name: pb.InferParameter(int64_param=-1) for name in ("sequence_id", "timeout", "own")}

    request, _ = decode(x(fp32_contents=[1, 2]), parameters=parameters)

    assert (request.correlation_id, request.timeout_us, request.parameters) == (2**64 - 1, 2**64 - 1, {"own": -1})


def response(*outputs, **fields):
    """A response of the engine."""
    return InferenceResponse("m", "1", [(name, BY_NAME[kind], array) for name, kind, array in outputs], **fields)


@pytest.mark.parametrize("count", [0, 1, 31, 32, 5000])
def test_a_client_reads_what_is_written(count):
    """The published message has every field, however long the tensors are, and again from memory."""
    encoder = Encoder()
    numbers, texts = np.arange(count, dtype=np.float32), np.array([b"\xff" * n for n in range(2)], object)
    given = response(("N", "FP32", numbers), ("T", "BYTES", texts), id="ü" * 100, parameters={"a": 1, "b": 2**64 - 1})

    for _ in range(2):
        read = published.ModelInferResponse.FromString(encoder.encode(given, final=True))

        assert (read.model_name, read.model_version, read.id) == ("m", "1", "ü" * 100)
        assert [(each.name, each.datatype, list(each.shape)) for each in read.outputs] == [
            ("N", "FP32", [count]),
            ("T", "BYTES", [2]),
        ]
        assert list(read.raw_output_contents) == [numbers.tobytes(), b"\x00\x00\x00\x00\x01\x00\x00\x00\xff"]
        assert (read.parameters["a"].int64_param, read.parameters["b"].uint64_param) == (1, 2**64 - 1)
        assert read.parameters["triton_final_response"].bool_param


def test_another_form_under_the_same_name_is_not_taken_for_the_first():
    """A model may come back with other outputs."""
    encoder = Encoder()
    for kind, array in (
        ("FP32", np.zeros(2, np.float32)),
        ("INT32", np.zeros(2, np.int32)),
        ("FP32", np.zeros(3, "f4")),
    ):
        read = published.ModelInferResponse.FromString(encoder.encode(response(("Y", kind, array))))
        assert [(each.datatype, list(each.shape)) for each in read.outputs] == [(kind, list(array.shape))]
        assert "triton_final_response" not in read.parameters


def test_a_parameter_that_can_not_be_told_is_refused():
    """By its name."""
    with pytest.raises(MmeError, match="response parameter 'a' of model 'm'"):
        Encoder().encode(response(parameters={"a": [1]}))


def test_messages_of_a_stream():
    """A response, an error with the id of its request, and the news that there is no more."""
    read = published.ModelStreamInferResponse.FromString
    wrapped = read(in_stream(Encoder().encode(response(("Y", "FP32", np.zeros(200, np.float32))), final=False)))
    assert len(wrapped.infer_response.raw_output_contents[0]) == 800
    assert not wrapped.infer_response.parameters["triton_final_response"].bool_param
    failed = read(error_in_stream("no", "i"))
    assert (failed.error_message, failed.infer_response.id) == ("no", "i")
    last = read(in_stream(final_response("m", "2", "i"))).infer_response
    assert (last.model_name, last.model_version, last.id, len(last.outputs)) == ("m", "2", "i", 0)
    assert last.parameters["triton_final_response"].bool_param


@pytest.mark.parametrize("many", ["inputs", "outputs", "parameters"])
def test_what_nobody_sends_so_many_of_is_refused_before_it_is_looked_at(many):
    """As over HTTP."""
    message = pb.ModelInferRequest(model_name="m", inputs=[x(fp32_contents=[1, 2])])
    names = [f"N{number}" for number in range(4097)]
    if many == "inputs":
        message.inputs.extend(x() for _ in names)
    elif many == "outputs":
        message.outputs.extend(Output(name=name) for name in names)
    else:
        for name in names:
            message.parameters[name].CopyFrom(TEXT)

    with pytest.raises(MmeError, match=f"a request may have at most 4096 {many}, got ") as caught:
        GrpcDecoder().decode(message, lambda *_: None)
    assert caught.value.kind is Kind.INVALID_ARGUMENT


def test_forms_of_long_names_are_not_remembered(monkeypatch):
    """Clients choose names: only forms that take little memory are checked once for all."""
    monkeypatch.setattr(decode_module, "_MAX_BYTES", 5000)
    decoder = GrpcDecoder()
    for number in range(20):
        name = "X" * (1000 if number else 6000) + str(number)
        message = pb.ModelInferRequest(inputs=[Tensor(name=name, datatype="FP32", shape=[1])])
        message.inputs[0].contents.fp32_contents.append(1)
        decoder.decode(message, lambda *_: None)
        assert len(decoder) <= min(number, 4)
