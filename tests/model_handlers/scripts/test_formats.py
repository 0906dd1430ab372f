"""The forms of a body that the default functions read and write."""

import io
import json
import math
import tracemalloc
import zipfile

import numpy as np
import pytest
from scipy import sparse

from model_handlers.scripts.content_types import (
    CSV,
    JSON,
    JSON_LINES,
    NPY,
    NPZ,
    MalformedBodyError,
    UnsupportedFormatError,
    decode,
    encode,
)

MATRIX = [[1, 2.5, 3], [4, 5, 6]]


def npy(array, **how):
    """An array as bytes of its format."""
    stream = io.BytesIO()
    np.save(stream, array, **how)
    return stream.getvalue()


def npz(matrix):
    """A sparse matrix as bytes."""
    stream = io.BytesIO()
    sparse.save_npz(stream, matrix)
    return stream.getvalue()


def zipped(content):
    """An archive of arrays, each of which is that."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in ("format", "shape", "data", "indices", "indptr"):
            archive.writestr(f"{name}.npy", content)
    return stream.getvalue()


def npy_header(shape, descr="<f8"):
    """The head of a file that claims an array of that shape, without its elements."""
    stream = io.BytesIO()
    np.lib.format.write_array_header_1_0(stream, {"descr": descr, "fortran_order": False, "shape": shape})
    return stream.getvalue()


@pytest.mark.parametrize(
    ("body", "content_type", "expected"),
    [
        ("[[1, 2.5, 3], [4, 5, 6]]", JSON, np.array(MATRIX)),
        (b"[[1, 2.5, 3], [4, 5, 6]]", JSON, np.array(MATRIX)),
        ("[1, 2]", "application/JSON; charset=utf-8", np.array([1, 2])),
        ("7", JSON, np.array(7)),
        ('["a", "b"]', JSON, np.array(["a", "b"])),
        ("1,2.5,3\n4,5,6\n", CSV, np.array(MATRIX)),
        (b"1,2.5,3\r\n4,5,6", "text/csv; header=absent", np.array(MATRIX)),
        ("1, 2, 3", CSV, np.array([[1.0, 2, 3]])),
        ("1\n2\n3\n", CSV, np.array([[1.0], [2], [3]])),
        ("\ufeff\r\n8\n\n", CSV, np.array([[8.0]])),
        ("-1e3,inf", CSV, np.array([[-1000.0, math.inf]])),
        ("5,,1", CSV, np.array([[5, math.nan, 1]])),
        ("5,3,1\n6,,2\n", CSV, np.array([[5, 3, 1], [6, math.nan, 2]])),
        ("5.5,3,1\n6, ,2\n", CSV, np.array([[5.5, 3, 1], [6, math.nan, 2]])),
        ('5\n""\n1', CSV, np.array([[5], [math.nan], [1]])),
        ('"1","2"', CSV, np.array([[1.0, 2]])),
        ("[[5, null, 1]]", JSON, np.array([[5, math.nan, 1]])),
        ("[null]", JSON, np.array([math.nan])),
        ("[1]\n[2]\n", JSON_LINES, np.array([[1], [2]])),
        (b"1\n2\r\n\n", JSON_LINES, np.array([[1], [2]])),
        ("[1, null]", JSON_LINES, np.array([[1, math.nan]])),
        (npy(np.array(MATRIX, np.float32)), NPY, np.array(MATRIX, np.float32)),
        (npy(np.asfortranarray(MATRIX)), NPY, np.array(MATRIX)),
        (npy(np.array(3, np.int8)), NPY, np.array(3, np.int8)),
        (npy(np.zeros((0, 4))), NPY, np.zeros((0, 4))),
    ],
)
def test_a_body_becomes_an_array(body, content_type, expected):
    """JSON and numpy's format as Amazon's toolkits make them, CSV as rows of floats, whatever is in how many of them."""
    array = decode(body, content_type)

    np.testing.assert_array_equal(array, expected)
    assert (array.shape, array.dtype) == (expected.shape, expected.dtype)
    assert array.flags.writeable


def test_a_json_object_stays_one():
    """An object is handed over as it is: Hugging Face's `inputs` and `parameters`."""
    assert decode('{"inputs": ["a"], "parameters": {"k": 1}}', JSON) == {"inputs": ["a"], "parameters": {"k": 1}}


@pytest.mark.parametrize(
    ("body", "content_type", "expected"),
    [
        ("1,red\n2,green\n", CSV, [[1.0, "red"], [2.0, "green"]]),
        ("ticket #12 is late\n#1 in town\n", CSV, [["ticket #12 is late"], ["#1 in town"]]),
        ('"Hello, world"\n"she said ""no"""\n', CSV, [["Hello, world"], ['she said "no"']]),
        ('a,"two\nlines"\r\n', CSV, [["a", "two\nlines"]]),
        ("#ff0000", CSV, [["#ff0000"]]),
        ("True,1_000,٣,1e999,0x10", CSV, [["True", "1_000", "٣", "1e999", "0x10"]]),
        ('[[1, "red"], [2.5, "green"]]', JSON, [[1, "red"], [2.5, "green"]]),
        ('"a"\n"b"', JSON_LINES, [["a"], ["b"]]),
        ('{"x": 1}\n{"x": 2}', JSON_LINES, [{"x": 1}, {"x": 2}]),
    ],
)
def test_text_stays_text_and_numbers_beside_it_numbers(body, content_type, expected):
    """`#` is a character, quotes quote, and a word is a number or text whatever lies beside it."""
    assert decode(body, content_type).tolist() == expected


@pytest.mark.parametrize(
    ("row", "value"), [("5,,1", [5, math.nan, 1]), ("7,8,9", [7, 8, 9]), ("007,-0,1e3", [7, 0, 1000])]
)
@pytest.mark.parametrize("beside", ["1,2,3", ",,", "0.5,1e300,nan", "red,#1,3", '"a, b",,""'])
def test_a_row_means_the_same_whatever_its_neighbours_are(row, value, beside):
    """Alone, in front of another and behind it: the same numbers, and the same type of them."""
    alone = decode(row, CSV).tolist()
    behind, before = decode(f"{beside}\n{row}", CSV).tolist(), decode(f"{row}\n{beside}\n", CSV).tolist()

    np.testing.assert_array_equal(alone, [value])
    np.testing.assert_array_equal([behind[1], before[0]], [value, value])
    assert {type(cell) for read in (*alone, behind[1], before[0]) for cell in read} == {float}


def test_a_sparse_matrix_is_read():
    """The format of scipy comes as a sparse matrix."""
    matrix = decode(npz(sparse.csr_matrix([[0, 1], [2, 0]])), NPZ)

    np.testing.assert_array_equal(matrix.toarray(), [[0, 1], [2, 0]])


@pytest.mark.parametrize("content_type", ["text/xml", "application/octet-stream", "", None, "json", "image/png"])
def test_other_types_are_not_supported(content_type):
    """What is neither read nor written says so, by its name."""
    with pytest.raises(UnsupportedFormatError, match=f"Content type {content_type} is not supported"):
        decode(b"", content_type)
    with pytest.raises(UnsupportedFormatError, match=f"Content type {content_type} is not supported"):
        encode([1], content_type)


@pytest.mark.parametrize(
    ("body", "content_type"),
    [
        ("{", JSON),
        ("", JSON),
        ("[[1, 2], [3]]", JSON),
        ("[" * 100_000, JSON),
        (b"\xff\xfe", JSON),
        ("", CSV),
        (" \n", CSV),
        ("1,2\n3\n", CSV),
        ("1\n\n2\n", CSV),
        ('"1', CSV),
        ('"1"2,3', CSV),
        ("1\0,2", CSV),
        ("", JSON_LINES),
        ("[1]\n[2, 3]", JSON_LINES),
        ("[1]\n\n[2]", JSON_LINES),
        ("[1, 2]\n1,2", JSON_LINES),
        ("1,2", JSON_LINES),
        ("1,2", JSON),
        ("[1]\n[2]", JSON),
        (b"\xff,1", CSV),
        (b"", NPY),
        (b"\x93NUMPY", NPY),
        (b"\x93NUMPY\x09\x00v\x00", NPY),
        ("text", NPY),
        (npy(np.ones(4))[:-1], NPY),
        (npy(np.ones(4)) + b"\0", NPY),
        (npy_header((1 << 40,)), NPY),
        (npy_header((-1,)), NPY),
        (npy_header((2, 2)).replace(b"(", b"((").replace(b", }", b", "), NPY),
        (npy(np.array([{"a": 1}], object), allow_pickle=True), NPY),
        (b"PK no zip", NPZ),
        (npz(sparse.csr_matrix([[1]]))[:-40], NPZ),
        (npy(np.ones(4)), NPZ),
        (zipped(npy_header((1 << 32,))), NPZ),
        (zipped(bytes(1000)), NPZ),
    ],
)
def test_a_body_that_is_not_what_it_says_is_malformed(body, content_type):
    """Whatever is wrong with a body is one kind of error, which names its type; no pickle is opened for it."""
    with pytest.raises(MalformedBodyError, match=content_type):
        decode(body, content_type)


@pytest.mark.parametrize(
    "body",
    [npy_header((1 << 32,), "<U2"), zipped(npy_header((1 << 32,))), zipped(npy(np.zeros(8 << 20, np.int8)))],
)
def test_an_archive_takes_no_more_memory_than_bodies_do(body, monkeypatch):
    """Neither for what its headers claim, nor for what it is unpacked to."""
    monkeypatch.setattr("model_handlers.scripts.content_types.MOST_UNPACKED", 4 << 20)
    decode(npz(sparse.csr_matrix([[1]])), NPZ)
    tracemalloc.start()
    with pytest.raises(MalformedBodyError):
        decode(body, NPZ)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 4 << 20


def test_pickles_are_refused_by_name():
    """Who sends objects of Python is told why they are not read."""
    with pytest.raises(MalformedBodyError, match="Python objects are not unpickled"):
        decode(npy(np.array([{"a": 1}], object), allow_pickle=True), NPY)


class Tensor:
    """Something with `tolist`, as tensors of any framework have it."""

    def tolist(self):
        """As a list."""
        return [1.5, 2]


@pytest.mark.parametrize(
    ("prediction", "expected"),
    [
        (np.array(MATRIX, np.float32), MATRIX),
        ([np.float32(0.5), np.int64(3)], [0.5, 3]),
        ({"label": np.array([1]), "text": "ä"}, {"label": [1], "text": "ä"}),
        (Tensor(), [1.5, 2]),
        (np.int64(4), 4),
        ("word", "word"),
        (None, None),
    ],
)
def test_predictions_become_json(prediction, expected):
    """Arrays, numbers of numpy, and what knows itself as a list, anywhere in lists and dictionaries."""
    assert json.loads(encode(prediction, JSON)) == expected


@pytest.mark.parametrize(
    ("prediction", "expected"),
    [
        (np.array([[1, 2], [3, 4]]), "1,2\n3,4\n"),
        (np.array([[0.1, 2]], np.float32), "0.1,2.0\n"),
        ([1, 2], "1\n2\n"),
        (7, "7\n"),
        (["a", "b"], "a\nb\n"),
        ([["a, b", 'say "no"', "two\nlines", "#1"]], '"a, b","say ""no""","two\nlines",#1\n'),
        ([[1, None]], "1,\n"),
    ],
)
def test_predictions_become_csv(prediction, expected):
    """A row a line; what has one dimension is a column."""
    assert encode(prediction, CSV) == expected


@pytest.mark.parametrize(
    ("prediction", "lines"),
    [
        (np.array([[1, np.nan], [np.inf, 4]], np.float32), "[1.0, null]\n[null, 4.0]\n"),
        ([{"a": 1}, {"a": math.nan}], '{"a": 1}\n{"a": null}\n'),
        ({"a": [1]}, '{"a": [1]}\n'),
        (7, "7\n"),
    ],
)
def test_predictions_become_lines_of_json(prediction, lines):
    """A row a line; what is no list is one."""
    assert encode(prediction, JSON_LINES) == lines


@pytest.mark.parametrize(
    "prediction",
    [
        np.array([[0.5, math.nan, math.inf, -math.inf]]),
        [[0.5, math.nan, math.inf, -math.inf]],
        [(0.5, *[math.nan] * 3)],
    ],
)
def test_json_holds_null_where_there_is_no_number(prediction):
    """Every parser reads the answer, and null goes back in as NaN; a word asks for Python's and Triton's form."""
    assert encode(prediction, JSON) == "[[0.5, null, null, null]]"
    np.testing.assert_array_equal(decode(encode(prediction, JSON), JSON), [[0.5, math.nan, math.nan, math.nan]])
    assert "NaN" in encode(prediction, JSON, literal=True)


@pytest.mark.parametrize("prediction", [np.arange(6).reshape(2, 3), [1.5, 2], 3])
def test_predictions_become_npy(prediction):
    """An array of numpy reads back as it was."""
    array = np.load(io.BytesIO(encode(prediction, NPY)))

    np.testing.assert_array_equal(array, prediction)


@pytest.mark.parametrize(
    ("prediction", "content_type"),
    [
        (object(), JSON),
        ({1, 2}, JSON),
        ([object()], NPY),
        ({"score": 1.0}, CSV),
        (b"bytes", CSV),
        (None, CSV),
        (object(), CSV),
        (np.zeros((2, 2, 2)), CSV),
    ],
)
def test_what_cannot_be_written_raises(prediction, content_type):
    """What a format has no form for is an error, and is neither pickled nor written as Python would."""
    with pytest.raises((TypeError, ValueError)):
        encode(prediction, content_type)
