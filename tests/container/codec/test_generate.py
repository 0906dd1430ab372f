"""The generate extension: which key becomes what, which shape elements get, and answers as flat objects."""

import json
import math

import numpy as np
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from container.codec.decode import Decoder
from container.codec.generate import decode_generate, encode_generate, error_event
from container.codec.request import Layouts
from model_handlers.config.model_config import ModelConfig
from model_handlers.errors import Kind, MmeError
from model_handlers.requests import FLAG_SEQUENCE_END, FLAG_SEQUENCE_START
from model_handlers.tensor import BY_NAME, TensorSpec, shape_matches
from serve.model.layout_check import check_layout
from serve.request import InferenceResponse

JSON_TYPES = [name for name, data_type in BY_NAME.items() if data_type.json]


def ignore(*_):
    """A completion."""


def model(*inputs, batch=0):
    """A model's configuration: inputs as (name, datatype, dims)."""
    specs = tuple(TensorSpec(name, BY_NAME[datatype], tuple(dims)) for name, datatype, dims in inputs)
    return ModelConfig("m", inputs=specs, max_batch_size=batch)


def read(document, config, layouts=None):
    """The request that a document is, as any client writes it."""
    body = document if isinstance(document, bytes) else json.dumps(document).encode()
    return decode_generate(body, config, Layouts() if layouts is None else layouts, ignore)


def tensors(request):
    """The inputs by name, each as it is nested."""
    return {name: array.tolist() for (name, _, _), array in zip(request.layout.inputs, request.inputs, strict=True)}


TEXT = model(("text_input", "BYTES", [1]), batch=4)
TWO = model(("A", "FP32", [-1]), ("B", "INT32", [1]))


# -- what a key is ---------------------------------------------------------------------------------------------------


def test_a_key_that_is_an_input_is_a_tensor_and_others_are_parameters():
    """The request of Triton's documentation, and a key beside `parameters` that is none of the model's inputs."""
    document = {"text_input": "client input", "parameters": {"stream": False, "temperature": 0}, "max_tokens": 16}
    request = read(document, TEXT)
    assert tensors(request) == {"text_input": [[b"client input"]]}
    assert request.layout.inputs == (("text_input", BY_NAME["BYTES"], (1, 1)),)
    assert request.layout.outputs == ()
    assert request.parameters == {"stream": False, "temperature": 0, "max_tokens": 16}
    assert (request.id, request.timeout_us) == ("", 0)
    assert request.on_complete is ignore


def test_an_input_may_lie_among_the_parameters():
    """What `parameters` holds counts as if it stood beside it."""
    request = read({"A": [1, 2], "parameters": {"B": 7, "k": "v"}}, TWO)
    assert tensors(request) == {"A": [1, 2], "B": [7]}
    assert request.parameters == {"k": "v"}


def test_an_id_is_the_requests_own():
    """It is not handed to the model as a parameter; one among the parameters is."""
    request = read({"id": "42", "A": 1, "B": 1, "parameters": {"id": "mine"}}, TWO)
    assert request.id == "42"
    assert request.parameters == {"id": "mine"}


@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize(
    "parameters",
    [
        {"timeout": 1500, "priority": 2, "binary_data_output": True},
        {"timeout": 2.5, "priority": "high"},
        {"timeout": -1},
    ],
)
def test_what_infer_reserves_is_the_models_own(parameters, nested):
    """A time limit, a priority and the form of the answer are no words of generate: the model may mean what it likes."""
    request = read({"A": 1, "B": 1} | ({"parameters": parameters} if nested else parameters), TWO)
    assert request.parameters == parameters
    assert (request.timeout_us, request.priority) == (0, 0)


@pytest.mark.parametrize("nested", [True, False])
def test_a_sequence_is_the_requests_own(nested):
    """Its id and its ends, beside `parameters` or in it, are no parameters either."""
    sequence = {"sequence_id": "s", "sequence_start": True, "sequence_end": True}
    request = read({"A": 1} | ({"parameters": sequence} if nested else sequence), TWO)
    assert (request.correlation_id, request.flags) == ("s", FLAG_SEQUENCE_START | FLAG_SEQUENCE_END)
    assert request.parameters == {}
    request = read({"A": 1, "sequence_end": True}, TWO)
    assert (request.correlation_id, request.flags) == (0, FLAG_SEQUENCE_END)


@pytest.mark.parametrize("parameters", [{}, None])
def test_no_parameters_are_none(parameters):
    """An empty object, and null, hold none."""
    assert read({"A": 1, "parameters": parameters}, TWO).parameters == {}


def test_inputs_come_in_the_models_order_however_they_are_sent():
    """Requests with the same tensors share one layout, among themselves and with other forms of request."""
    decoder = Decoder()
    first = read({"A": [1, 2], "B": 3}, TWO, decoder.layouts)
    second = read({"B": 4, "k": 1, "A": [5, 6]}, TWO, decoder.layouts)
    inputs = [
        {"name": "A", "shape": [2], "datatype": "FP32", "data": [1, 2]},
        {"name": "B", "shape": [1], "datatype": "INT32", "data": [1]},
    ]
    third, _ = decoder.decode(json.dumps({"inputs": inputs}).encode(), None, "m", ignore)
    assert tensors(second) == {"A": [5, 6], "B": [4]}
    assert first.layout is second.layout
    assert first.layout is third.layout
    assert read({"A": [1], "B": 3}, TWO, decoder.layouts).layout is not first.layout


def test_a_missing_input_is_left_to_the_check_of_the_layout(refusal):
    """Which says so in Triton's words; optional inputs may be left out."""
    request = read({"A": 1, "C": 2}, TWO)
    assert refusal(check_layout, request.layout, TWO) == (
        "expected 2 inputs but got 1 inputs for model 'm'. Got input(s) ['A'], but missing required input(s) ['B']. "
        "Please provide all required input(s)."
    )
    optional = ModelConfig("m", inputs=(TWO.inputs[0], TensorSpec("B", BY_NAME["INT32"], (1,), optional=True)))
    assert check_layout(read({"A": 1}, optional).layout, optional).order == (0, -1)


# -- keys that collide -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", ["req", "é"])
def test_a_text_for_an_input_called_id_is_the_id_too(value):
    """The key is the model's input; as a text it names the request as well, as with Triton."""
    config = model(("id", "BYTES", [1]))
    request = read({"id": value}, config)
    assert tensors(request) == {"id": [value.encode()]}
    assert request.id == value
    assert request.parameters == {}


def test_other_values_for_an_input_called_id_are_the_input_alone():
    """A number, or a list, is no id."""
    assert read({"id": 7}, model(("id", "INT32", [1]))).id == ""
    request = read({"id": ["a", "b"]}, model(("id", "BYTES", [-1])))
    assert (request.id, tensors(request)) == ("", {"id": [b"a", b"b"]})
    request = read({"parameters": {"id": 7}}, model(("id", "INT32", [1])))
    assert (request.id, tensors(request)) == ("", {"id": [7]})
    assert read({}, model(("id", "INT32", [1]))).id == ""


@pytest.mark.parametrize("value", [{}, {"parameters": 1}, 1, None])
def test_an_input_called_parameters_cannot_be_sent(value, refusal):
    """The key can't be both: it is refused in Triton's words, with the way out."""
    config = model(("parameters", "INT32", [1]), ("A", "INT32", [1]))
    sentence = refusal(read, {"A": 1, "parameters": value}, config)
    assert sentence.startswith("Keyword 'parameters' for nested schema also given as input tensor name: model 'm'")
    assert "infer route" in sentence
    assert "missing required input(s) ['parameters']" in refusal(check_layout, read({"A": 1}, config).layout, config)


@pytest.mark.parametrize(("key", "what"), [("A", "input"), ("k", "parameter"), ("timeout", "parameter")])
def test_a_key_may_stand_beside_the_parameters_or_in_them(key, what, refusal):
    """Both is refused, even with the same value: one of them would be lost."""
    sentence = refusal(read, {key: 1, "B": 1, "parameters": {key: 1}}, TWO)
    assert sentence.startswith(f"{what} '{key}' already exists in request for model 'm'")


# -- shapes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dims", "batch", "value", "shape"),
    [
        ([1], 0, 5, (1,)),
        ([1], 8, 5, (1, 1)),
        ([-1], 0, 5, (1,)),
        ([-1], 8, 5, (1, 1)),
        ([], 0, 5, ()),
        ([], 8, 5, (1,)),
        ([1, 1], 8, 5, (1, 1, 1)),
        ([-1, -1], 0, 5, (1, 1)),
        ([3], 0, [1, 2, 3], (3,)),
        ([3], 8, [1, 2, 3], (1, 3)),
        ([3], 8, [1, 2, 3, 4, 5, 6], (2, 3)),
        ([1], 8, [1, 2], (2, 1)),
        ([-1], 0, [1, 2], (2,)),
        ([-1], 8, [1, 2], (1, 2)),
        ([2, 2], 0, [1, 2, 3, 4], (2, 2)),
        ([-1, 2], 0, [1, 2, 3, 4], (2, 2)),
        ([2, -1], 0, [1, 2, 3, 4, 5, 6], (2, 3)),
        ([-1, 2, -1], 0, [1, 2, 3, 4], (1, 2, 2)),
        ([-1, 2], 8, [1, 2, 3, 4], (1, 2, 2)),
        ([-1], 0, [], (0,)),
        ([-1], 8, [], (1, 0)),
        ([3], 8, [], (0, 3)),
    ],
)
def test_elements_fill_the_shape_of_the_input(dims, batch, value, shape):
    """One element or a flat list: the innermost variable dimension takes what the fixed ones leave, others are 1."""
    request = read({"X": value}, model(("X", "INT32", dims), batch=batch))
    assert request.layout.inputs == (("X", BY_NAME["INT32"], shape),)
    assert request.inputs[0].shape == shape
    assert request.inputs[0].ravel().tolist() == (value if isinstance(value, list) else [value])


@pytest.mark.parametrize(
    ("dims", "batch", "value"),
    [
        ([3], 0, 5),
        ([3], 0, [1, 2]),
        ([3], 0, [1] * 6),
        ([3], 8, [1] * 4),
        ([1], 0, []),
        ([], 0, [1, 2]),
        ([-1, 2], 0, 1),
    ],
)
def test_elements_that_do_not_fill_the_shape_are_refused(dims, batch, value, refusal):
    """By name of the input, with the shape and the number of elements."""
    config = model(("X", "INT32", dims), batch=batch)
    sentence = refusal(read, {"X": value}, config)
    assert sentence == (
        "The schema can not convert input 'X' to tensor with proper shape: model 'm' expects "
        f"{list(config.inputs[0].shape(batch))}, which {len(value) if isinstance(value, list) else 1} elements do not fill"
    )


def test_a_batch_that_is_too_large_is_left_to_the_check_of_the_layout(refusal):
    """More rows than the model takes, and inputs whose rows differ, are refused there."""
    config = model(("A", "INT32", [1]), ("B", "INT32", [1]), batch=2)
    assert "batch-size must be <= 2" in refusal(
        check_layout, read({"A": [1, 2, 3], "B": [1, 2, 3]}, config).layout, config
    )
    assert "batch size does not match" in refusal(check_layout, read({"A": [1, 2], "B": 1}, config).layout, config)


DIMS = st.lists(st.sampled_from([-1, -1, 1, 2, 3]), max_size=4)


@settings(deadline=None)
@given(DIMS, st.sampled_from([0, 4]), st.integers(0, 40))
def test_elements_are_taken_whenever_a_shape_could_hold_them(dims, batch, count):
    """Any dims and any number of elements: refused exactly if no shape fits, else row-major in one that does."""
    config = model(("X", "INT32", dims), batch=batch)
    expected = config.inputs[0].shape(batch)
    fixed = math.prod(dim for dim in expected if dim != -1)
    fits = count % fixed == 0 if -1 in expected else count == fixed
    try:
        request = read({"X": list(range(count))}, config)
    except MmeError:
        assert not fits
        return
    assert fits
    assert shape_matches(request.inputs[0].shape, expected)
    assert request.inputs[0].ravel().tolist() == list(range(count))
    assert request.layout.inputs[0][2] == request.inputs[0].shape


# -- values ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("datatype", JSON_TYPES)
def test_every_datatype_that_json_can_carry_is_read(datatype, arrays):
    """Extreme values are exact, and get the dtype of the model's own datatype."""
    expected = np.array([b"", "\0 é模".encode()], dtype=np.object_) if datatype == "BYTES" else arrays[datatype]
    values = [element.decode() if isinstance(element, bytes) else element for element in expected.tolist()]
    config = model(("X", datatype, [-1]))
    request = read({"X": values}, config)
    assert request.inputs[0].dtype == BY_NAME[datatype].dtype
    assert request.inputs[0].tolist() == expected.tolist()
    assert read({"X": values[0]}, config).inputs[0].tolist() == expected.tolist()[:1]


@pytest.mark.parametrize("datatype", ["FP16", "BF16"])
def test_halves_have_no_json_form(datatype, refusal):
    """FP16 and BF16 inputs are refused by name, with the way out."""
    sentence = refusal(read, {"X": 1}, model(("X", datatype, [1])))
    assert sentence == (
        f"receiving {datatype} data via JSON is not supported. Please use the binary data format for input 'X'"
    )


@pytest.mark.parametrize(
    ("datatype", "value"),
    [
        ("INT32", "1"),
        ("INT32", 1.5),
        ("INT32", 1 << 31),
        ("INT64", 1 << 64),
        ("INT64", 1 << 63),
        ("UINT8", -1),
        ("INT8", True),
        ("FP32", 1e39),
        ("FP32", "1"),
        ("FP32", [1, "1"]),
        ("FP64", {}),
        ("FP64", [1, {}]),
        ("BOOL", 1),
        ("BOOL", "true"),
        ("BYTES", 1),
        ("BYTES", None),
        ("BYTES", ["a", None]),
        ("BYTES", {"a": "b"}),
    ],
)
def test_a_value_of_another_type_is_refused(datatype, value, refusal):
    """No value becomes another one in silence: the sentence names the input and its datatype."""
    sentence = refusal(read, {"X": value}, model(("X", datatype, [-1])))
    assert sentence.startswith(f"input 'X' holds elements that are not {datatype}; send ")


@pytest.mark.parametrize("value", [[[1], [2]], [1, [[2]]], [[[1]], 2]])
def test_a_list_of_one_element_is_that_element(value):
    """However deep it lies: there are as many elements as the outer list is long."""
    assert tensors(read({"X": value}, model(("X", "INT32", [-1])))) == {"X": [1, 2]}


@pytest.mark.parametrize("value", [[[]], [1, [[]]], [[1, 2]], [[1, 2], [3, 4]], [[1], [2, 3]]])
def test_nested_lists_are_refused(value, refusal):
    """An input is one element or a flat list of them, whatever its rank."""
    sentence = refusal(read, {"X": value}, model(("X", "INT32", [-1, -1])))
    assert sentence == "input 'X' is nested; send one element, or a flat list of them, row-major"


# -- documents -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"\xff\xfe", b'{"A": nan}', b'{"A": 1e999}', b'{"A": NaN, "B": "\\ud800"}', b'{"A": ' + b"[" * 5000],
)
def test_what_is_no_json_is_refused(body, refusal):
    """Broken, too deep and non-standard JSON."""
    assert refusal(read, body, TWO).startswith("failed to parse the request JSON buffer: ")


@pytest.mark.parametrize("document", [[], "text", 1, None, True])
def test_a_request_is_an_object(document, refusal):
    """JSON that is no object is refused."""
    assert refusal(read, document, TWO) == "the request must be a JSON object"


@pytest.mark.parametrize("value", [1, None, ["x"], {}, True])
def test_an_id_is_text(value, refusal):
    """Other types are refused, where no input is called so."""
    assert refusal(read, {"id": value, "A": 1, "B": 1}, TWO) == "'id' must be a string"


@pytest.mark.parametrize("value", [[], "x", 1, True])
def test_parameters_are_an_object(value, refusal):
    """Anything else is refused."""
    assert refusal(read, {"parameters": value}, TWO) == "'parameters' of the request must be an object"


@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("k", None, "parameter 'k' must be a string, a number or a boolean"),
        ("k", [1], "parameter 'k' must be a string, a number or a boolean"),
        ("k", {}, "parameter 'k' must be a string, a number or a boolean"),
        ("triton_k", 1, "parameter keys starting with 'triton_' are reserved"),
        ("timeout", None, "parameter 'timeout' must be a string, a number or a boolean"),
        ("sequence_id", -1, "parameter 'sequence_id' must be a string or a number, 0 or more"),
        ("sequence_id", True, "parameter 'sequence_id' must be a string or a number, 0 or more"),
        ("sequence_start", 1, "parameter 'sequence_start' of the request must be true or false"),
        ("sequence_end", "x", "parameter 'sequence_end' of the request must be true or false"),
    ],
)
def test_a_parameter_that_cannot_be_is_refused(key, value, words, nested, refusal):
    """Composite values, reserved names and bad sequences, beside `parameters` or in it."""
    assert words in refusal(read, {"parameters": {key: value}} if nested else {key: value}, TWO)


# -- answers ---------------------------------------------------------------------------------------------------------


def test_an_output_of_one_element_is_a_scalar_and_others_are_flat_lists(respond):
    """Whatever their rank; an output without elements is an empty list."""
    response = respond(
        ("text_output", "BYTES", np.array([["modèle".encode()]], dtype=np.object_)),
        ("rows", "FP32", np.array([[0.1, 2], [3, 4]], "<f4")),
        ("none", "INT64", np.empty((0, 3), "<i8")),
        ("no_text", "BYTES", np.empty((0,), np.object_)),
        ("scalar", "FP32", np.array(0.1, "<f4")),
        ("flag", "BOOL", np.array([[[True]]])),
        ("strided", "INT8", np.arange(6, dtype="i1").reshape(2, 3).T),
    )
    assert json.loads(encode_generate(response)) == {
        "model_name": "m",
        "model_version": "1",
        "text_output": "modèle",
        "rows": [0.1, 2, 3, 4],
        "none": [],
        "no_text": [],
        "scalar": 0.1,
        "flag": True,
        "strided": [0, 3, 1, 4, 2, 5],
    }


def test_id_and_parameters_of_a_response_are_keys(respond):
    """Parameters lie beside the outputs; without an id there is no key for it."""
    answer = json.loads(
        encode_generate(respond(request_id="42", parameters={"finish": "stop", "tokens": 3, "last": True}))
    )
    assert answer == {
        "id": "42", "model_name": "m", "model_version": "1", "finish": "stop", "tokens": 3, "last": True
    }  # fmt: skip
    assert set(json.loads(encode_generate(respond()))) == {"model_name", "model_version"}


@pytest.mark.parametrize("datatype", JSON_TYPES)
def test_every_datatype_is_written_exactly_alone_and_in_a_list(datatype, arrays, respond):
    """Extreme values of every datatype are read back as they were, of FP32 with no more digits than it has."""
    array = np.array([b"", "\0 é模".encode()], dtype=np.object_) if datatype == "BYTES" else arrays[datatype]
    answer = orjson.loads(encode_generate(respond(("all", datatype, array), ("one", datatype, array[1:]))))
    back = [element.encode() for element in answer["all"]] if datatype == "BYTES" else answer["all"]
    assert np.array(back, BY_NAME[datatype].dtype).tolist() == array.tolist()
    assert answer["one"] == answer["all"][1]


@pytest.mark.parametrize("kind", [np.longlong, np.ulonglong, np.int64, np.uint64])
def test_a_whole_number_is_written_whatever_c_calls_its_type(kind, respond):
    """ONNX Runtime's are numpy's `longlong`, which is no int64 to everybody."""
    datatype = "INT64" if np.dtype(kind).kind == "i" else "UINT64"
    assert orjson.loads(encode_generate(respond(("Y", datatype, np.array([[7]], kind)))))["Y"] == 7


def test_a_long_output_is_a_flat_list_too(respond):
    """One that is written in pieces."""
    array = np.arange(100_000, dtype=np.int64).reshape(2, -1)
    assert orjson.loads(encode_generate(respond(("Y", "INT64", array))))["Y"] == array.ravel().tolist()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("count", [1, 2, 40_000])
@pytest.mark.parametrize("datatype", ["FP32", "FP64"])
def test_nan_and_infinities_come_and_go(value, count, datatype, respond):
    """As null, alone or in a list, which is NaN; as Triton's and Python's words where those are asked for."""
    array = np.array([value] * count, dtype=BY_NAME[datatype].dtype)
    response = respond(("fine", "FP32", np.zeros(1, "<f4")), ("Y", datatype, array))
    answer = orjson.loads(encode_generate(response))
    assert answer["Y"] == (None if count == 1 else [None] * count)
    (read_again,) = read({"Y": answer["Y"]}, model(("Y", datatype, [-1]))).inputs
    assert np.isnan(read_again).all()
    answer = json.loads(encode_generate(response, literal=True))
    assert np.array_equal(answer["Y"], value if count == 1 else array, equal_nan=True)
    (read_again,) = read({"Y": answer["Y"]}, model(("Y", datatype, [-1]))).inputs
    assert np.array_equal(read_again, array, equal_nan=True)


def test_a_text_with_null_in_it_is_a_text(respond):
    """The look for null is not fooled."""
    response = respond(("null", "BYTES", np.array([b"null"], object)), ("Y", "FP32", np.ones(1, "<f4")))
    assert json.loads(encode_generate(response))["null"] == "null"


def test_what_has_no_json_form_is_refused(respond, refusal):
    """Halves, bytes that are no text, and parameters that the protocol does not have."""
    half = respond(("Y", "FP16", np.zeros(1, "<f2")))
    noise = respond(("Y", "BYTES", np.array([b"\xff"], object)))
    odd = respond(parameters={"k": math.nan})
    assert "sending FP16 data via JSON" in refusal(encode_generate, half)
    assert "output 'Y' holds bytes that are not UTF-8" in refusal(encode_generate, noise, kind=Kind.UNSUPPORTED)
    assert "response parameter 'k' of model 'm' is nan" in refusal(encode_generate, odd, kind=Kind.UNSUPPORTED)


@pytest.mark.parametrize("taken", ["model_name", "model_version", "id", "p"])
def test_an_output_whose_name_is_taken_is_refused(taken, respond, refusal):
    """Nothing of an answer is left out for something else of the same name."""
    response = respond((taken, "FP32", np.ones(1, "<f4")), request_id="7", parameters={"p": 1})
    sentence = refusal(encode_generate, response, kind=Kind.UNSUPPORTED)
    assert sentence.startswith(f"output '{taken}' of model 'm' has the name of another field of the answer")


@pytest.mark.parametrize("taken", ["model_name", "model_version", "id"])
def test_a_parameter_whose_name_is_taken_is_refused(taken, respond, refusal):
    """The same for a response's parameters."""
    response = respond(request_id="7", parameters={"p": 1, taken: 2})
    assert f"response parameter '{taken}'" in refusal(encode_generate, response, kind=Kind.UNSUPPORTED)


def test_an_output_called_id_is_written_where_there_is_no_id(respond):
    """The name is free then."""
    assert json.loads(encode_generate(respond(("id", "INT32", np.array([3], "<i4")))))["id"] == 3


def test_an_error_is_an_event_with_json():
    """As Triton sends it in a stream that has begun; a sentence over several lines stays one line of data."""
    assert error_event('it "broke"\n') == b'data: {"error":"it \\"broke\\"\\n"}\n\n'


# -- there and back --------------------------------------------------------------------------------------------------


ELEMENTS = {
    "BOOL": st.booleans(),
    "BYTES": st.text(max_size=8),
    "FP32": st.floats(width=32, allow_nan=False, allow_infinity=False),
    "FP64": st.floats(allow_nan=False, allow_infinity=False),
} | {
    name: st.integers(int(np.iinfo(BY_NAME[name].dtype).min), int(np.iinfo(BY_NAME[name].dtype).max))
    for name in JSON_TYPES
    if "INT" in name
}
VALUES = st.lists(
    st.sampled_from(JSON_TYPES).flatmap(
        lambda datatype: st.tuples(st.just(datatype), st.lists(ELEMENTS[datatype], max_size=5))
    ),
    max_size=4,
)


@settings(deadline=None)
@given(VALUES, st.sampled_from([0, 8]), st.text(max_size=3), st.dictionaries(st.text(max_size=3), st.integers(0, 9)))
def test_any_values_come_back_as_they_were_sent(values, batch, request_id, parameters):
    """A model that answers with its inputs and parameters answers with the document it was sent."""
    sent = {f"input {number}": elements for number, (_, elements) in enumerate(values)}
    sent |= {f"parameter {key}": value for key, value in parameters.items()}
    config = model(*((f"input {number}", datatype, [-1]) for number, (datatype, _) in enumerate(values)), batch=batch)

    request = decode_generate(orjson.dumps({"id": request_id, **sent}), config, Layouts(), ignore)
    rows = [
        (name, data_type, array)
        for (name, data_type, _), array in zip(request.layout.inputs, request.inputs, strict=True)
    ]
    answer = orjson.loads(encode_generate(InferenceResponse("m", "1", rows, request.id, parameters=request.parameters)))

    assert answer.pop("id", "") == request_id
    assert (answer.pop("model_name"), answer.pop("model_version")) == ("m", "1")
    for number, (datatype, elements) in enumerate(values):
        value = answer.pop(f"input {number}")
        assert isinstance(value, list) is (len(elements) != 1)
        back = value if isinstance(value, list) else [value]
        # Some text stands for a 32-bit float, not for the 64-bit one of the same value.
        assert (np.array(back, "<f4").tolist() if datatype == "FP32" else back) == elements
    assert answer == {f"parameter {key}": value for key, value in parameters.items()}


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["A", "B", "id", "parameters", "timeout", "triton_x", "k"]), inner, max_size=5
        )
    ),
    max_leaves=12,
)


@settings(deadline=None)
@given(JSON, JSON, st.sampled_from([TWO, TEXT, model(("id", "BYTES", [-1]), ("A", "BOOL", [2]), batch=2)]))
def test_no_document_does_anything_but_be_decoded_or_refused(document, value, config):
    """Documents made of the extension's words end in a request or in an error of ours."""
    named = {spec.name: value for spec in config.inputs}
    for candidate in (document, named, {"parameters": document, **named}):
        try:
            request = read(candidate, config)
        except MmeError as error:
            if error.kind is not Kind.INVALID_ARGUMENT:
                raise
            continue
        shapes = [(name, shape) for name, _, shape in request.layout.inputs]
        assert [array.shape for array in request.inputs] == [shape for _, shape in shapes]
        assert all(shape_matches(shape, config.input(name).shape(config.max_batch_size)) for name, shape in shapes)


@settings(deadline=None)
@given(st.binary(max_size=60))
def test_no_bytes_do_anything_but_be_refused_or_mean_something(body):
    """Noise ends in an error of ours and in no other."""
    try:
        read(body, TWO)
    except MmeError as error:
        if error.kind is not Kind.INVALID_ARGUMENT:
            raise
