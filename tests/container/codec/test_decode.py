"""Requests: what a header means, what it may not say, and that a header met before means the same again."""

import codecs
import json
import struct
import tracemalloc

import numpy as np
import pytest

from container.codec import decode as module
from container.codec.decode import Decoder
from model_handlers.config.model_config import ModelConfig
from model_handlers.errors import Kind, MmeError
from model_handlers.requests import FLAG_SEQUENCE_END, FLAG_SEQUENCE_START
from model_handlers.tensor import BY_NAME, TensorSpec, encode_bytes_elements

F4 = np.array([1.5, -2], dtype="<f4")


def binary(name="X", shape=(2,), datatype="FP32", size=8, **parameters):
    """An input whose data lie behind the header."""
    parameters = {"binary_data_size": size} | parameters
    return {"name": name, "shape": list(shape), "datatype": datatype, "parameters": parameters}


def raw(array, datatype):
    """The bytes of a tensor on the wire."""
    return encode_bytes_elements(array) if datatype == "BYTES" else array.tobytes()


# -- tensors ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("datatype", BY_NAME)
def test_every_datatype_is_read_from_binary_data(datatype, arrays, decode):
    """All fourteen datatypes arrive with name, type, shape and every bit of their extreme values."""
    array = arrays[datatype]
    data = raw(array, datatype)

    request, _ = decode({"inputs": [binary(shape=(1, 2), datatype=datatype, size=len(data))]}, data)

    assert request.layout.inputs == (("X", BY_NAME[datatype], (1, 2)),)
    assert request.inputs[0].shape == (1, 2)
    assert request.inputs[0].dtype == BY_NAME[datatype].dtype
    assert raw(request.inputs[0], datatype) == data


def test_binary_tensors_are_views_into_the_body(decoder):
    """No tensor of fixed-size elements is copied, and none can be written to."""
    header = json.dumps({"inputs": [binary()]}).encode()
    body = header + F4.tobytes()
    request, _ = decoder.decode(body, len(header), "m", lambda *_: None)
    assert np.shares_memory(request.inputs[0], np.frombuffer(body, np.uint8))
    assert not request.inputs[0].flags.writeable


def test_tensors_lie_behind_one_another_in_the_order_of_the_inputs(decode):
    """Binary data are assigned by the order of the inputs; JSON inputs between them take none."""
    strings = encode_bytes_elements(np.array([b"a", b"bc"], dtype=np.object_))
    request, _ = decode(
        {
            "inputs": [
                binary("A", size=8),
                {"name": "J", "shape": [1], "datatype": "INT64", "data": [7]},
                binary("S", datatype="BYTES", size=len(strings)),
                binary("B", (3,), "UINT8", 3),
            ]
        },
        F4.tobytes(),
        strings,
        b"\x01\x02\x03",
    )
    assert [array.tolist() for array in request.inputs] == [[1.5, -2], [7], [b"a", b"bc"], [1, 2, 3]]
    assert [name for name, _, _ in request.layout.inputs] == ["A", "J", "S", "B"]


@pytest.mark.parametrize("datatype", BY_NAME)
@pytest.mark.parametrize("shape", [(0,), (0, 4), (2, 0)])
def test_a_tensor_without_elements_needs_no_bytes(datatype, shape, decode):
    """Zero-size tensors of every datatype are tensors, as the last thing in the body or before others."""
    request, _ = decode(
        {"inputs": [binary("E", shape, datatype, 0), binary(), binary("F", shape, datatype, 0)]}, F4.tobytes()
    )
    assert [array.shape for array in request.inputs] == [shape, (2,), shape]
    assert request.inputs[1].tolist() == [1.5, -2]


# -- sizes that lie --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "sentence"),
    [
        ([0, 7, 9, 16, 1 << 60], "input byte size mismatch for input 'X'. Expected 8 for shape [2] of FP32, got {!r}"),
        (
            [-1, -8, 8.0, "8", None, True, [8], {}],
            "'binary_data_size' of input 'X' must be a number of bytes, got {!r}",
        ),
    ],
)
def test_a_binary_size_that_does_not_fit_the_shape_is_refused(sizes, sentence, decode, refusal):
    """Too small, too large, absurd, negative or no number: by input name, with the size that shape and type need."""
    for size in sizes:
        assert refusal(decode, {"inputs": [binary(size=size)]}, F4.tobytes()) == sentence.format(size)


@pytest.mark.parametrize(("missing", "tensors"), [(8, [b"", b""]), (1, [F4.tobytes()[:7]]), (4, [F4.tobytes()[:4]])])
def test_a_body_shorter_than_its_header_says_is_refused(missing, tensors, decode, refusal):
    """The sentence says how many bytes are missing."""
    sentence = refusal(decode, {"inputs": [binary()]}, *tensors)
    assert f"expecting {missing} additional bytes for model 'm'" in sentence


def test_a_body_longer_than_its_header_says_is_refused(decode, refusal):
    """Bytes that no input claims are refused, and so are binary data that JSON alone announces."""
    assert "unexpected additional input data for model 'm'" in refusal(
        decode, {"inputs": [binary()]}, F4.tobytes(), b"x"
    )
    assert "expecting 8 additional bytes" in refusal(decode, {"inputs": [binary()]})


def test_a_header_length_that_lies_is_refused_by_what_it_cuts(decoder, refusal):
    """A header cut short is no JSON; one that reaches into the data is none either."""
    header = json.dumps({"inputs": [binary()]}).encode()
    for length in (1, len(header) - 1, len(header) + 1, len(header) + 8):
        sentence = refusal(decoder.decode, header + F4.tobytes(), length, "m", None)
        assert sentence.startswith("failed to parse the request JSON buffer")


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"\x01", "expecting 4 bytes but only 1 bytes available"),
        (struct.pack("<I", 5) + b"abc", "expecting string of length 5 but only 3 bytes available"),
        (struct.pack("<I", 0xFFFFFFFF), "expecting string of length 4294967295 but only 0 bytes available"),
        (struct.pack("<I", 1) + b"a", "expected 2 string elements for inference input 'X' for model 'm', got 1"),
        (struct.pack("<I", 0) * 3, "expected 2 string elements for inference input 'X' for model 'm', got more"),
        (b"", "expected 2 string elements for inference input 'X' for model 'm', got 0"),
    ],
)
def test_string_lengths_that_lie_are_refused(data, words, decode, refusal):
    """Elements of BYTES must fill their bytes exactly and be as many as the shape says."""
    assert words in refusal(decode, {"inputs": [binary(datatype="BYTES", size=len(data))]}, data)


# -- shapes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "shape",
    [
        [1 << 40, 2],
        [1 << 62, 1 << 62, 1 << 62],
        [0, 1 << 62, 1 << 62],
        [1 << 62, 1 << 62, 0],
        [18446744073709551615],
        [1 << 32, 1 << 32],
    ],
)
@pytest.mark.parametrize("datatype", ["FP32", "BYTES"])
def test_a_huge_shape_is_refused_before_anything_is_allocated(shape, datatype, decode, refusal, input_):
    """Shapes whose product overflows, zero or not, are refused by name, with data in JSON or behind it."""
    tracemalloc.start()
    try:
        for tensor in (input_(shape=shape, datatype=datatype, data=[]), binary(shape=shape, datatype=datatype, size=0)):
            sentence = refusal(decode, {"inputs": [tensor]}, length=None)
            assert sentence.startswith("'shape' of input 'X' has too many elements")
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_a_large_shape_without_its_data_allocates_nothing(decode, refusal, input_):
    """A shape that is merely large fails on the size of its data."""
    tracemalloc.start()
    try:
        assert "Shape does not match" in refusal(decode, {"inputs": [input_(shape=[1 << 40], data=[1])]})
        assert "byte size mismatch" in refusal(decode, {"inputs": [binary(shape=[1 << 40], size=8)]}, F4.tobytes())
        big = binary(shape=[1 << 40], size=1 << 42)
        assert "additional bytes" in refusal(decode, {"inputs": [big]}, F4.tobytes())
        strings = binary(shape=[1 << 40], datatype="BYTES", size=4)
        assert "string elements" in refusal(decode, {"inputs": [strings]}, bytes(4))
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("dim", [-1, 1.0, "2", None, True, [2], 1.5])
def test_a_dimension_must_be_a_number_of_elements(dim, decode, refusal, input_):
    """Negative and other dimensions are refused by input name."""
    sentence = refusal(decode, {"inputs": [input_(shape=[2, dim], data=[1, 2])]})
    assert sentence == f"'shape' of input 'X' must hold integers of 0 or more, got {dim!r}"


@pytest.mark.parametrize("shape", [None, 2, "2", {}, [1] * 33])
def test_a_shape_must_be_an_array_of_few_dimensions(shape, decode, refusal):
    """A shape that is none, or has more dimensions than any framework takes, is refused by input name."""
    tensor = {"name": "X", "datatype": "FP32", "shape": shape, "data": [1]}
    assert refusal(decode, {"inputs": [tensor]}).startswith("input 'X' must have a 'shape'")


# -- documents -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("word", ["NaN", "Infinity", "-Infinity"])
@pytest.mark.parametrize("datatype", ["FP32", "FP64"])
def test_nan_and_infinities_are_numbers(word, datatype, decode, refusal):
    """As Triton's parser reads them; but of a tensor alone."""
    tensor = f'{{"name": "NaN", "shape": [2], "datatype": "{datatype}", "data": [0.5, {word}]}}'
    request, _ = decode(f'{{"inputs": [{tensor}]}}'.encode())
    assert np.array_equal(request.inputs[0], [0.5, float(word)], equal_nan=True)
    body = f'{{"inputs": [], "parameters": {{"bound": {word}}}}}'.encode()
    assert refusal(decode, body).startswith("parameter 'bound' must be a finite number, got ")


def test_a_byte_order_mark_is_no_matter(decode, refusal):
    """As editors write it before JSON; once, and before nothing else."""
    tensor = '{"name": "é", "shape": [1], "datatype": "FP32", "data": [1]}'
    body = f'{{"inputs": [{tensor}]}}'.encode()
    request, _ = decode(codecs.BOM_UTF8 + body)
    assert request.layout.inputs[0][0] == "é"
    for wrong in (2 * codecs.BOM_UTF8 + body, body + codecs.BOM_UTF8, codecs.BOM_UTF8, codecs.BOM_UTF8 + b"\xff"):
        assert refusal(decode, wrong).startswith("failed to parse the request JSON buffer: ")


@pytest.mark.parametrize("datatype", ["FP32", "FP64"])
@pytest.mark.parametrize(("data", "shape"), [("[null, 0.5]", [2]), ("[[5, null]]", [1, 2]), ("[null]", [1])])
def test_null_is_nan_among_numbers_of_a_floating_type(data, shape, datatype, decode):
    """As answers say it."""
    tensor = f'{{"name": "X", "shape": {shape}, "datatype": "{datatype}", "data": {data}}}'
    request, _ = decode(f'{{"inputs": [{tensor}]}}'.encode())
    expected = np.array(json.loads(data), float)
    np.testing.assert_array_equal(request.inputs[0], expected)


@pytest.mark.parametrize("word", ["NaN", "null"])
def test_nan_is_no_integer(word, decode, refusal):
    """The sentence names the input."""
    body = b'{"inputs": [{"name": "X", "shape": [1], "datatype": "INT32", "data": [%b]}]}' % word.encode()
    assert refusal(decode, body).startswith("'data' of input 'X' holds elements that are not INT32")


@pytest.mark.parametrize("body", [b"", b"{", b"\xff\xfe", b'{"inputs": [nan]}', b"[" * 5000, b'{"a": 1e999}'])
@pytest.mark.parametrize("beside", [b"", b" NaN"])
def test_what_is_no_json_is_refused(body, beside, decode, refusal):
    """Broken, too deep and non-standard JSON is refused; deep JSON does not end the stack."""
    assert refusal(decode, body + beside).startswith(
        ("failed to parse the request JSON buffer: ", "the request must have 'inputs'")
    )


@pytest.mark.parametrize("odd", ['"\\ud800"', str(2**64), "1" * 5000, "[" * 500 + "]" * 500])
def test_nan_lets_nothing_else_through(odd, decode, refusal):
    """Half a character, a number of more than 64 bits and deep nesting are refused beside it."""
    body = f'{{"inputs": [], "parameters": {{"a": NaN, "b": {odd}}}}}'.encode()
    assert refusal(decode, body).startswith("failed to parse the request JSON buffer: ")


@pytest.mark.parametrize("body", [b'{"inputs": []} \0\0\0\0', b"\xcd\xcc\xac\x40", b"5,1"])
def test_the_refusal_of_what_is_no_json_says_what_is_taken(body, decode, refusal):
    """Tensors behind JSON whose length is not told, bytes of a tensor alone, or another form of text."""
    message = refusal(decode, body)

    assert message.endswith(
        "send a JSON object with 'inputs', or binary data behind one whose length the request tells"
    )


@pytest.mark.parametrize("shape", [None, "[1, 4]", 4, {"0": 1}])
def test_a_shape_that_is_no_array_is_shown_one(shape, decode, refusal):
    """And so is one that lacks."""
    tensor = {"name": "X", "datatype": "FP32", "data": [1, 2, 3, 4], **({} if shape is None else {"shape": shape})}
    expected = "input 'X' must have a 'shape', an array of integers such as [1, 4]"
    assert refusal(decode, {"inputs": [tensor]}) == expected


@pytest.mark.parametrize("body", [b'{"inputs": [', b'{"other": 1}abc', b"[1]abc", b"[" * 70_000])
def test_what_holds_no_tensors_is_told_no_length(body, decode, refusal):
    """Nor what has no end."""
    assert "json-header-size" not in refusal(decode, body)


@pytest.mark.parametrize("document", [[], "text", 1, None, True])
def test_a_request_must_be_an_object(document, decode, refusal):
    """JSON that is no object is refused."""
    assert refusal(decode, document).startswith("the request must have 'inputs': an array of objects with name, shape")


@pytest.mark.parametrize("document", [{}, {"inputs": None}, {"inputs": {}}, {"inputs": [1]}, {"inputs": "X"}])
def test_inputs_must_be_an_array_of_objects(document, decode, refusal):
    """Anything else is refused."""
    assert (
        refusal(decode, document)
        == "the request must have 'inputs': an array of objects with name, shape, datatype and data"
    )


@pytest.mark.parametrize("name", [None, "", 1, ["X"]])
def test_every_tensor_has_a_name(name, decode, refusal, input_):
    """Inputs and requested outputs without a name, or with one that is no text, are refused."""
    assert refusal(decode, {"inputs": [input_(name=name, data=[1, 2])]}) == "every input must have a 'name'"
    document = {"inputs": [input_(data=[1, 2])], "outputs": [{"name": name}]}
    assert refusal(decode, document) == "every requested output must have a 'name'"


def test_a_missing_datatype_is_called_so(decode, refusal, input_):
    """With those that there are."""
    tensor = input_(data=[1, 2])
    for missing in ({**tensor, "datatype": None}, {key: tensor[key] for key in tensor if key != "datatype"}):
        sentence = refusal(decode, {"inputs": [missing]})
        assert sentence.startswith("input 'X' has no 'datatype': give one of BOOL, UINT8")


@pytest.mark.parametrize("datatype", ["", "FP31", "fp32", "TYPE_FP32", "STRING", 1, {}, []])
def test_an_unknown_datatype_is_refused_with_the_known_ones(datatype, decode, refusal, input_):
    """The sentence names the input, what it said, and what there is."""
    sentence = refusal(decode, {"inputs": [input_(datatype=datatype, data=[1, 2])]})
    assert sentence.startswith(f"input 'X' has datatype {datatype!r}; the protocol knows BOOL, UINT8")


def test_exactly_one_source_of_data_is_allowed(decode, refusal, input_):
    """No data, and data from two places, are refused by input name."""
    assert refusal(decode, {"inputs": [input_()]}).endswith("But no field is set for input 'X'")
    both = input_(data=[1, 2], parameters={"binary_data_size": 8})
    assert "But set 'data', 'binary_data_size' in 'parameters' for input 'X'" in refusal(decode, {"inputs": [both]})


@pytest.mark.parametrize("where", ["request", "input", "output"])
@pytest.mark.parametrize("parameters", [[], "x", 1, True])
def test_parameters_must_be_an_object(where, parameters, decode, refusal, input_):
    """Wherever they stand."""
    tensor, output, document = input_(data=[1, 2]), {"name": "Y"}, {}
    target = {"request": document, "input": tensor, "output": output}[where]
    target["parameters"] = parameters
    sentence = refusal(decode, document | {"inputs": [tensor], "outputs": [output]})
    assert sentence.startswith("'parameters' of ")
    assert sentence.endswith("must be an object")


def test_request_id_parameters_and_timeout_arrive(decode, input_):
    """The id, the queue timeout in microseconds, and the parameters that are the client's own."""
    request, reply = decode(
        {
            "id": "42",
            "parameters": {"timeout": 1500, "binary_data_output": True, "s": "x", "i": 1, "f": 0.5, "b": False},
            "inputs": [input_(data=[1, 2])],
        }
    )
    assert (request.id, request.timeout_us) == ("42", 1500)
    assert request.parameters == {"s": "x", "i": 1, "f": 0.5, "b": False}
    assert reply.binary is True


def test_outputs_that_are_named_are_binary_if_they_say_so_themselves(decode, input_):
    """As Triton has it: binary_data_output is of requests that name none; an Accept header does not come into it."""
    outputs = [{"name": "Y"}, {"name": "Z", "parameters": {"binary_data": True}}]
    named = {"inputs": [input_(data=[1, 2])], "outputs": outputs}
    for parameters in ({"binary_data_output": True}, {"binary_data_output": False}):
        _, reply = decode(named | {"parameters": parameters})
        assert [reply.accepting_binary().outputs.get(name, reply.binary) for name in "YZ"] == [False, True]
    assert decode(named)[1].accepting_binary().outputs == {"Z": True}


@pytest.mark.parametrize("sequence_id", [7, "seven"])
def test_a_sequence_is_the_requests_own(sequence_id, decode, input_):
    """Its id and its ends are no parameters, in a header that is parsed and in one that was met before."""
    parameters = {"sequence_id": sequence_id, "sequence_start": True, "sequence_end": False, "k": 1}
    for _ in range(2):
        request, _ = decode({"parameters": parameters, "inputs": [binary()]}, F4.tobytes())
        assert (request.correlation_id, request.flags) == (sequence_id, FLAG_SEQUENCE_START)
        assert request.parameters == {"k": 1}
    request, _ = decode({"parameters": {"sequence_end": True}, "inputs": [input_(data=[1, 2])]})
    assert (request.correlation_id, request.flags) == (0, FLAG_SEQUENCE_END)
    request, _ = decode({"parameters": {"sequence_id": 1, "sequence_end": True}, "inputs": [input_(data=[1, 2])]})
    assert (request.correlation_id, request.flags) == (1, FLAG_SEQUENCE_END)


@pytest.mark.parametrize("sequence_id", ["s" * 129, "ß" * 65])
def test_a_sequence_has_a_short_id(sequence_id, decode, input_):
    """Of 128 bytes at most, as in Triton: it is kept and told to the model with each request."""
    longest = sequence_id.encode()[:128].decode()
    request, _ = decode({"parameters": {"sequence_id": longest}, "inputs": [input_(data=[1, 2])]})
    assert request.correlation_id == longest
    with pytest.raises(MmeError, match="string correlation ID cannot be longer than 128 characters") as caught:
        decode({"parameters": {"sequence_id": sequence_id}, "inputs": [input_(data=[1, 2])]})
    assert caught.value.kind is Kind.UNSUPPORTED


SCALAR = "must be a string, a number or a boolean"


@pytest.mark.parametrize(
    ("field", "values", "sentence"),
    [
        ("id", [1, None, ["x"], {}, True], "'id' must be a string"),
        ("outputs", [None, {}, "Y", [1], ["Y"]], "the request must have 'outputs': an array of objects with a name"),
        ("timeout", [-1, 1.5, "1000", True], "parameter 'timeout' must be a number of microseconds, 0 or more"),
        ("timeout", [None], f"parameter 'timeout' {SCALAR}"),
        ("priority", [-1, 1.5, "1", True], "parameter 'priority' must be a priority level, 0 or more"),
        ("mine", [None, [], {}, [1]], f"parameter 'mine' {SCALAR}"),
        (
            "triton_x",
            [1],
            "parameter keys starting with 'triton_' are reserved for Triton usage and should not be specified.",
        ),
    ],
)
def test_a_field_of_another_form_is_refused(field, values, sentence, decode, refusal, input_):
    """By its name, of the request or of its parameters; which levels of priority there are the model knows."""
    for value in values:
        given = {field: value} if field in {"id", "outputs"} else {"parameters": {field: value}}
        assert refusal(decode, {"inputs": [input_(data=[1, 2])], **given}) == sentence, value


@pytest.mark.parametrize(
    ("parameters", "priority"), [({}, 0), ({"priority": 0}, 0), ({"priority": 2**64 - 1}, 2**64 - 1)]
)
def test_a_request_has_its_priority(parameters, priority, decode, input_):
    """It is a field of its own, and no parameter of the client's."""
    request, _ = decode({"parameters": {**parameters, "mine": 1}, "inputs": [input_(data=[1, 2])]})
    assert (request.priority, request.parameters) == (priority, {"mine": 1})


@pytest.mark.parametrize("value", [0, 1, "true", None, []])
def test_binary_flags_must_be_booleans(value, decode, refusal, input_):
    """binary_data_output and binary_data, by name and place."""
    inputs = [input_(data=[1, 2])]
    sentence = refusal(decode, {"parameters": {"binary_data_output": value}, "inputs": inputs})
    assert "'binary_data_output'" in sentence
    output = {"name": "Y", "parameters": {"binary_data": value}}
    sentence = refusal(decode, {"inputs": inputs, "outputs": [output]})
    assert sentence == "parameter 'binary_data' of output 'Y' must be true or false"


def test_classes_in_place_of_an_output(decode, refusal, input_):
    """A number of them; 0 asks for the tensor, and anything else is refused by the output's name."""
    inputs = [input_(data=[1, 2])]

    def asking_for(count):
        return {"inputs": inputs, "outputs": [{"name": "Y", "parameters": {"classification": count}}]}

    for count, classes in ((3, {"Y": 3}), (0, {})):
        request, reply = decode(asking_for(count))
        assert request.layout.outputs == ("Y",)
        assert reply.classes == reply.accepting_binary().classes == classes
    for count in (True, "3", -1, 1.5, None):
        assert refusal(decode, asking_for(count)).startswith(
            "'classification' of output 'Y' must be a number of classes"
        )


def test_requested_outputs_keep_their_order_and_their_form(decode, input_):
    """The layout lists them as asked; the reply knows which of them said something about their form."""
    outputs = [
        {"name": "B", "parameters": {"binary_data": True}},
        {"name": "A", "parameters": {"binary_data": False}},
        {"name": "C"},
    ]
    request, reply = decode({"inputs": [input_(data=[1, 2])], "outputs": outputs})
    assert request.layout.outputs == ("B", "A", "C")
    assert reply.outputs == {"B": True, "A": False}
    assert reply.binary is None


# -- plans -----------------------------------------------------------------------------------------------------------


def mixed_header(**more):
    """A header with a tensor in JSON and one behind it."""
    inputs = [{"name": "J", "shape": [2], "datatype": "INT64", "data": [3, 4]}, binary()]
    return {"inputs": inputs, "outputs": [{"name": "Y", "parameters": {"binary_data": True}}]} | more


def everything(request, reply):
    """All that a decoded request says."""
    tensors = [(array.dtype, array.shape, array.tolist()) for array in request.inputs]
    layout = (request.layout.inputs, request.layout.outputs)
    return tensors, layout, request.id, request.parameters, request.timeout_us, reply.binary, reply.outputs


@pytest.mark.parametrize("more", [{}, {"id": "7"}, {"parameters": {"timeout": 5, "binary_data_output": True, "k": 1}}])
def test_a_header_met_before_means_what_a_new_one_means(more, decode):
    """The plan of a header gives the very result of parsing it, with the data of each body."""
    header = mixed_header(**more)
    first = decode(header, F4.tobytes())
    again = decode(header, F4.tobytes())
    other = decode(header, np.array([8, 9], dtype="<f4").tobytes())

    assert everything(*again) == everything(*first)
    assert other[0].inputs[1].tolist() == [8, 9]
    assert other[0].inputs[0].tolist() == [3, 4]
    assert again[0].layout is first[0].layout
    assert again[1] is first[1]


def test_a_header_met_before_is_not_parsed_again(decode, monkeypatch):
    """The second request of a form needs no JSON parser."""
    decode(mixed_header(), F4.tobytes())
    monkeypatch.setattr(module, "json_object", None)
    assert decode(mixed_header(), F4.tobytes())[0].inputs[1].tolist() == [1.5, -2]


def test_a_plan_does_not_spare_a_body_its_check(decode, refusal):
    """A header that was fine before is refused with a body of another size, and fine again after."""
    decode(mixed_header(), F4.tobytes())
    assert "additional bytes" in refusal(decode, mixed_header(), F4.tobytes()[:4])
    assert "unexpected additional input data" in refusal(decode, mixed_header(), F4.tobytes(), b"x")
    decode(mixed_header(), F4.tobytes())


def test_a_header_that_is_refused_is_refused_again(decode, refusal, decoder):
    """Nothing of it is remembered."""
    for _ in range(2):
        assert "byte size mismatch" in refusal(decode, {"inputs": [binary(size=7)]}, bytes(7))
    assert len(decoder) == 0


def test_tensors_of_a_plan_cannot_be_written_to(decode):
    """A tensor in the header is shared by all requests of its form, so no handler may change it."""
    request, _ = decode(mixed_header(), F4.tobytes())
    with pytest.raises(ValueError, match="read-only"):
        request.inputs[0][0] = 9


def test_requests_with_ids_share_a_layout(decode):
    """An id makes another header but not another layout, so that a model checks it once."""
    first, _ = decode(mixed_header(id="1"), F4.tobytes())
    second, _ = decode(mixed_header(id="2"), F4.tobytes())
    assert (first.id, second.id) == ("1", "2")
    assert first.layout is second.layout


def test_layouts_differ_by_type_shape_and_requested_outputs(decode, input_):
    """Whatever a model checks makes a layout its own; JSON and binary data of one form share it."""
    same = [
        decode({"inputs": [input_(data=[1, 2])]})[0].layout,
        decode({"inputs": [binary()]}, F4.tobytes())[0].layout,
    ]
    others = [
        decode({"inputs": [input_(data=[1, 2], datatype="INT32")]})[0].layout,
        decode({"inputs": [input_(data=[1, 2], shape=[1, 2])]})[0].layout,
        decode({"inputs": [input_(data=[1, 2], name="Z")]})[0].layout,
        decode({"inputs": [input_(data=[1, 2])], "outputs": [{"name": "Y"}]})[0].layout,
    ]
    assert same[0] is same[1]
    assert len({id(layout) for layout in [same[0], *others]}) == 5


def test_the_memory_of_headers_and_layouts_is_bounded(decode, decoder):
    """Ever new headers and shapes do not grow the decoder, long headers are not kept, and all still decode."""
    for number in range(4200):
        request, _ = decode({"id": "1", "inputs": [binary(name=f"X{number}")]}, F4.tobytes())
        assert request.id == "1"
        assert len(decoder) <= 1024
        assert len(decoder.layouts) <= 4096
    before = len(decoder)
    decode({"id": "x" * (8 << 10), "inputs": [binary()]}, F4.tobytes())
    assert len(decoder) == before


def test_json_bodies_are_not_remembered(decode, decoder, input_):
    """Their data differ each time."""
    decode({"inputs": [input_(data=[1, 2])]})
    assert len(decoder) == 0


# -- raw requests ----------------------------------------------------------------------------------------------------


def config(*dims, datatype="FP32", max_batch_size=0, inputs=1):
    """A model with inputs of one kind."""
    specs = tuple(TensorSpec(f"X{index}", BY_NAME[datatype], dims) for index in range(inputs))
    return ModelConfig("m", inputs=specs, max_batch_size=max_batch_size)


def read_raw(body, model_config):
    """A raw request's only tensor, in its shape."""
    request, reply = Decoder().decode_raw(body, model_config, lambda *_: None)
    assert reply.binary is True
    assert request.layout.inputs[0][2] == request.inputs[0].shape
    assert request.layout.outputs == ()
    return request.inputs[0]


def test_a_raw_request_is_the_models_only_input():
    """The shape comes from the configuration; one variable dimension is deduced, the batch is 1."""
    data = np.arange(12, dtype="<f4")
    assert read_raw(data.tobytes(), config(3, 4)).tolist() == data.reshape(3, 4).tolist()
    assert read_raw(data.tobytes(), config(3, -1)).shape == (3, 4)
    assert read_raw(data.tobytes(), config(-1, max_batch_size=8)).shape == (1, 12)
    assert read_raw(b"", config(-1)).shape == (0,)


def test_a_raw_string_is_one_element():
    """BYTES in a raw request is the one string, without a length: an image, say, or nothing."""
    assert read_raw(b"\xff\xd8 abc", config(1, datatype="BYTES")).tolist() == [b"\xff\xd8 abc"]
    assert read_raw(b"", config(1, datatype="BYTES", max_batch_size=4)).tolist() == [[b""]]


@pytest.mark.parametrize(
    ("model_config", "body", "words"),
    [
        (
            config(2, inputs=2),
            b"",
            "Raw request must only have 1 input (found 1) to be deduced but got 2 inputs in 'm'",
        ),
        (config(-1, -1), bytes(8), "The shape of the raw input 'X0' can not be deduced"),
        (config(3), bytes(8), "input byte size mismatch for input 'X0' for model 'm'. Expected 12, got 8"),
        (config(3), b"", "Expected 12, got 0"),
        (config(3, -1), bytes(8), "Expected a multiple of 12, got 8"),
        (config(-1), bytes(7), "Expected a multiple of 4, got 7"),
        (config(2, datatype="BYTES"), b"abc", "For BYTE datatype raw input 'X0', the model must have input shape [1]"),
        (config(-1, datatype="BYTES"), b"abc", "the model must have input shape [1]"),
    ],
)
def test_a_raw_request_that_cannot_be_deduced_is_refused(model_config, body, words, refusal):
    """Several inputs, several variable dimensions and sizes that do not fit, by name."""
    assert words in refusal(read_raw, body, model_config)


def sent(decoder, header):
    """The request of a binary header of two FP32 elements, and the layout's identity."""
    request, reply = decoder.decode(header + bytes(8), len(header), "m", lambda *_: None)
    return request, reply


@pytest.mark.parametrize("request_id", ["7", "", "a b", "x" * 300, "é", 'q"uote', "back\\slash", "line\nbreak"])
def test_requests_that_differ_in_their_id_share_a_plan(request_id, decoder):
    """Ids are their requests' own, whatever is in them; layout and reply are shared where the id comes first."""
    rest = json.dumps({"inputs": [binary()]})[1:]
    first, first_reply = sent(decoder, b'{"id":"one",' + rest.encode())
    header = f'{{"id":{json.dumps(request_id, ensure_ascii=False)},{rest}'.encode()

    for _ in range(2):
        other, reply = sent(decoder, header)

        assert (first.id, other.id) == ("one", request_id)
        assert other.layout is first.layout
        plain = request_id.isascii() and request_id.isprintable() and not set(request_id) & {'"', "\\"}
        assert (reply is first_reply) is plain


def test_the_last_of_two_ids_counts_by_any_way_of_reading(decoder):
    """A header with two ids means the second, as to any JSON reader, also when its rest was seen before."""
    rest = json.dumps({"inputs": [binary()]})[1:].encode()
    twice = b'{"id":"first","id":"second",' + rest

    assert [sent(decoder, twice)[0].id for _ in range(3)] == ["second"] * 3
    assert sent(decoder, b'{"id":"first",' + rest)[0].id == "first"


def test_a_header_with_a_broken_id_is_refused(decoder):
    """An id that JSON does not allow is refused, though the rest of the header was seen before."""
    rest = json.dumps({"inputs": [binary()]})[1:].encode()
    sent(decoder, b'{"id":"good",' + rest)

    for broken in (b'{"id":"ta\tb",', b'{"id":"\xff",', b'{"id":"\\x",', b'{"id":"open,'):
        with pytest.raises(MmeError, match="failed to parse the request JSON buffer"):
            sent(decoder, broken + rest)


@pytest.mark.parametrize("many", ["inputs", "outputs", "parameters"])
def test_what_nobody_sends_so_many_of_is_refused_before_it_is_looked_at(many, decode):
    """The event loop looks at each, and a body has room for a million of them."""
    names = [f"N{number}" for number in range(4097)]
    lists = {"inputs": [{"name": name} for name in names], "outputs": [{"name": name} for name in names]}
    document = {"inputs": [binary()], many: lists.get(many, dict.fromkeys(names, 1))}

    with pytest.raises(MmeError, match=f"a request may have at most 4096 {many}, got 4097") as caught:
        decode(document, F4.tobytes())
    assert caught.value.kind is Kind.INVALID_ARGUMENT
