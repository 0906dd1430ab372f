"""JSON elements: what a datatype takes, what it refuses, what an output becomes."""

import json
import sys
import threading

import numpy as np
import orjson
import pytest

from container.codec import json_data
from container.codec.json_data import array_from_json, array_to_json, flat_array_from_json
from model_handlers.errors import Kind
from model_handlers.tensor import BY_NAME

JSON_TYPES = [name for name, data_type in BY_NAME.items() if data_type.json]
INTEGERS = [name for name in JSON_TYPES if "INT" in name]


def read(datatype, data, shape):
    """The array of parsed JSON text."""
    return array_from_json(orjson.loads(json.dumps(data)), BY_NAME[datatype], shape, "X")


@pytest.mark.parametrize("datatype", JSON_TYPES)
def test_extreme_values_keep_their_value_and_get_the_dtype(datatype, arrays):
    """Every datatype that JSON can carry reads its smallest and largest element exactly, in its own dtype."""
    expected = np.array([b"", "\0 é模".encode()], dtype=np.object_) if datatype == "BYTES" else arrays[datatype]
    data = [element.decode() if isinstance(element, bytes) else element for element in expected.tolist()]

    array = read(datatype, data, (2,))

    assert array.dtype == BY_NAME[datatype].dtype
    assert array.tolist() == expected.tolist()


@pytest.mark.parametrize("datatype", INTEGERS)
def test_an_integer_beyond_the_datatype_is_refused(datatype, refusal):
    """One more than the largest integer of a datatype is refused, and one less than the smallest, by input name."""
    limits = np.iinfo(BY_NAME[datatype].dtype)
    for value in (limits.max + 1, limits.min - 1):
        if -(1 << 63) <= value < 1 << 64:
            assert f"'X' holds elements that are not {datatype}" in refusal(read, datatype, [value, 1], (2,))


@pytest.mark.parametrize(
    ("datatype", "data"),
    [
        ("INT32", [1.5]),
        ("INT32", [1.0]),
        ("INT32", [1, 2.0]),
        ("INT64", [18446744073709551616]),
        ("FP32", ["1"]),
        ("FP32", [1.0, "1"]),
        ("INT8", [True]),
        ("INT8", [1, True]),
        ("FP32", [True, 1.5]),
        ("FP64", [[0.5], [False]]),
        ("UINT8", [300]),
        ("UINT8", [-1]),
        ("FP32", [1e39]),
        ("FP32", [-1e39, 0]),
        ("FP32", [{}]),
        ("INT64", [1, None]),
        ("FP32", [[1], [{}]]),
        ("BOOL", [1]),
        ("BOOL", [True, 0]),
        ("BOOL", ["true"]),
        ("BOOL", [None]),
        ("BYTES", [1]),
        ("BYTES", ["a", None]),
        ("BYTES", [["a"], [True]]),
    ],
)
def test_an_element_of_another_type_is_refused(datatype, data, refusal):
    """No number becomes another one in silence: fractions, strings, booleans, null and objects are refused."""
    shape = np.shape(np.array(data, dtype=object))
    assert refusal(read, datatype, data, shape).startswith(
        f"'data' of input 'X' holds elements that are not {datatype}"
    )


@pytest.mark.parametrize("datatype", ["FP16", "BF16"])
def test_halves_have_no_json_form(datatype, refusal):
    """FP16 and BF16 are refused as JSON, both ways, with the way out."""
    assert "binary data format for input 'X'" in refusal(read, datatype, [1], (1,))
    array = np.zeros(1, BY_NAME[datatype].dtype)
    sentence = refusal(array_to_json, array, BY_NAME[datatype], "Y", literal=False)
    assert "binary data format for output 'Y'" in sentence


@pytest.mark.parametrize("data", [[1, 2, 3, 4], [[1, 2], [3, 4]], [[1], [2], [3], [4]], [[[1, 2, 3, 4]]]])
@pytest.mark.parametrize("datatype", ["INT32", "FP32"])
def test_nested_and_flat_data_mean_the_same(datatype, data):
    """Elements are taken row-major, however they are nested."""
    assert read(datatype, data, (2, 2)).tolist() == [[1, 2], [3, 4]]


def test_nested_strings_are_taken_row_major():
    """Strings nest like numbers do."""
    assert read("BYTES", [["a", "b"], ["c", "d"]], (4,)).tolist() == [b"a", b"b", b"c", b"d"]


@pytest.mark.parametrize("datatype", ["FP32", "INT8", "BYTES"])
@pytest.mark.parametrize("form", ["[[{0}], [{0}, {0}]]", "[[{0}], {0}]", "[{0}, [{0}]]", "[[[{0}]], [{0}]]"])
def test_rows_of_different_length_are_refused(datatype, form, refusal):
    """Ragged data are refused as such, even where the number of elements would fit."""
    data = json.loads(form.format('"a"' if datatype == "BYTES" else "1"))
    count = form.count("{0}")
    assert refusal(read, datatype, data, (count,)).startswith("'data' of input 'X' is nested unevenly")


@pytest.mark.parametrize("datatype", JSON_TYPES)
@pytest.mark.parametrize(("data", "shape"), [([], (0,)), ([[], []], (2, 0)), ([], (0, 5))])
def test_nothing_is_a_tensor_too(datatype, data, shape):
    """A tensor without elements is read in its shape and dtype."""
    array = read(datatype, data, shape)
    assert array.shape == shape
    assert array.dtype == BY_NAME[datatype].dtype


@pytest.mark.parametrize(
    ("data", "shape"), [([], (1,)), ([1], (2,)), ([1, 2, 3], (2,)), ([1], (0,)), ([1], (1 << 40,))]
)
def test_another_number_of_elements_is_refused(data, shape, refusal):
    """Shape and data must agree; the sentence names both numbers."""
    sentence = refusal(read, "FP32", data, shape)
    assert sentence.startswith("Shape does not match true shape of 'data' field: input 'X'")
    assert f"holds {len(data)}" in sentence


@pytest.mark.parametrize("data", [None, {}, "text", 1, True])
def test_data_must_be_an_array(data, refusal):
    """`data` that is no array is refused."""
    assert refusal(read, "FP32", data, (1,)) == "'data' of input 'X' must be an array"


@pytest.mark.parametrize(("datatype", "element"), [("FP32", "1"), ("BYTES", '"a"')])
def test_deep_nesting_is_refused_before_the_stack_ends(datatype, element, refusal):
    """JSON as deep as the parser takes it costs a sentence, not a RecursionError, on a small stack as well."""
    data = orjson.loads("[" * 1000 + element + "]" * 1000)

    def deep():
        assert "JSON nesting depth exceeds maximum allowed limit (64)" in refusal(
            array_from_json, data, BY_NAME[datatype], (1,), "X"
        )

    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(300)
    try:
        thread = threading.Thread(target=deep)  # the runner's own stack is deep already
        thread.start()
        thread.join()
    finally:
        sys.setrecursionlimit(limit)
    deep()


@pytest.mark.parametrize("datatype", JSON_TYPES)
def test_flat_elements_are_an_array_of_one_dimension(datatype, arrays):
    """Elements that come without a shape are read exactly, in the dtype of their datatype; none of them too."""
    expected = np.array([b"", "é模".encode()], dtype=np.object_) if datatype == "BYTES" else arrays[datatype]
    data = [element.decode() if isinstance(element, bytes) else element for element in expected.tolist()]

    for count in (2, 1, 0):
        array = flat_array_from_json(data[:count], BY_NAME[datatype], "X")

        assert array.dtype == BY_NAME[datatype].dtype
        assert array.shape == (count,)
        assert array.tolist() == expected.tolist()[:count]


@pytest.mark.parametrize("data", [[[]], [1, [[]]], [[1, 2]], [[1, 2], [3, 4]]])
@pytest.mark.parametrize("datatype", ["FP32", "BYTES", "BOOL"])
def test_flat_elements_are_not_nested(datatype, data, refusal):
    """Without a shape nested elements would be guesswork."""
    sentence = refusal(flat_array_from_json, data, BY_NAME[datatype], "X")
    assert sentence.startswith("input 'X' is nested; send one element, or a flat list of them")


def test_one_long_string_among_many_costs_no_more_than_itself(refusal):
    """Strings are not padded to the longest of them."""
    data = ["x" * 1_000_000] + ["y"] * 20_000  # as fixed-width text: 80 GB
    assert read("BYTES", data, (20_001,))[-1] == b"y"


def test_bytes_that_are_not_text_are_refused_as_json(refusal):
    """An output with bytes that are no UTF-8 asks the client for the binary format."""
    array = np.array([b"fine", b"\xff"], dtype=np.object_)
    sentence = refusal(array_to_json, array, BY_NAME["BYTES"], "Y", literal=False, kind=Kind.UNSUPPORTED)
    assert "output 'Y' holds bytes that are not UTF-8 text" in sentence


def test_outputs_are_written_flat_and_row_major():
    """A strided, two-dimensional output is written in the order of its indices."""
    array = np.arange(6, dtype="<f4").reshape(2, 3).T
    data = array_to_json(array, BY_NAME["FP32"], "Y", literal=False)
    assert orjson.loads(orjson.dumps(data, option=orjson.OPT_SERIALIZE_NUMPY)) == [0, 3, 1, 4, 2, 5]


@pytest.mark.parametrize("datatype", ["FP32", "INT64", "BYTES", "BOOL"])
def test_others_have_their_turn_while_a_large_output_is_written(datatype, monkeypatch):
    """Between pieces of it; compiled code would not let them otherwise."""
    turns = []
    monkeypatch.setattr(json_data, "turn", lambda: turns.append(1))
    count = 3 * json_data._PIECE + 5
    array = np.arange(count) % 7
    array = (
        array.astype(str).astype("S").astype(np.object_)
        if datatype == "BYTES"
        else array.astype(BY_NAME[datatype].dtype)
    )

    data = array_to_json(array, BY_NAME[datatype], "Y", literal=False)

    expected = [each.decode() if isinstance(each, bytes) else each for each in array.tolist()]
    assert orjson.loads(orjson.dumps(data, option=orjson.OPT_SERIALIZE_NUMPY)) == expected
    assert len(turns) == 4


def test_single_precision_is_written_in_the_fewest_digits():
    """Enough to read the same FP32 numbers again, not the doubles that those are."""
    array = np.array([0.1, 2**31, 2**24 + 2], dtype="<f4")
    text = orjson.dumps(array_to_json(array, BY_NAME["FP32"], "Y", literal=False), option=orjson.OPT_SERIALIZE_NUMPY)
    assert text == b"[0.1,2147483600.0,16777218.0]"
    assert np.array(orjson.loads(text), dtype="<f4").tolist() == array.tolist()
