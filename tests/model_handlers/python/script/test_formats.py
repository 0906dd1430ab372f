"""The forms of a body that the default functions read and write."""

import io
import json
import math
import tracemalloc
import zipfile

import numpy as np
import pytest
from scipy import sparse

from model_handlers.python.script.formats import (
    CSV,
    JSON,
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
        ("1, 2, 3", CSV, np.array([1, 2, 3])),
        ("1\n2\n3\n", CSV, np.array([1, 2, 3])),
        ("8", CSV, np.array(8)),
        ("9007199254740993,1", CSV, np.array([9007199254740993, 1])),
        ("-1e3,inf", CSV, np.array([-1000.0, math.inf])),
        (npy(np.array(MATRIX, np.float32)), NPY, np.array(MATRIX, np.float32)),
        (npy(np.asfortranarray(MATRIX)), NPY, np.array(MATRIX)),
        (npy(np.array(3, np.int8)), NPY, np.array(3, np.int8)),
        (npy(np.zeros((0, 4))), NPY, np.zeros((0, 4))),
    ],
)
def test_a_body_becomes_an_array(body, content_type, expected):
    """JSON, CSV and numpy's format come as arrays of the shape and type that Amazon's toolkits make of them."""
    array = decode(body, content_type)

    np.testing.assert_array_equal(array, expected)
    assert (array.shape, array.dtype) == (expected.shape, expected.dtype)
    assert array.flags.writeable


def test_a_json_object_stays_one():
    """An object is handed over as it is: Hugging Face's `inputs` and `parameters`."""
    assert decode('{"inputs": ["a"], "parameters": {"k": 1}}', JSON) == {"inputs": ["a"], "parameters": {"k": 1}}


def test_csv_with_words_has_a_type_for_each_column():
    """A column of words is text, one of numbers beside it stays numbers."""
    array = decode("1,red\n2,green\n", CSV)

    assert [tuple(row) for row in array.tolist()] == [(1, "red"), (2, "green")]


def test_csv_with_a_gap_is_read():
    """What is missing among numbers is no number."""
    array = decode("1.5,,3.5\n4.5,5.5,6.5", CSV)

    assert math.isnan(array.tolist()[0][1])


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
    monkeypatch.setattr("model_handlers.python.script.formats.MOST_UNPACKED", 4 << 20)
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
    ],
)
def test_predictions_become_csv(prediction, expected):
    """A row a line; what has one dimension is a column."""
    assert encode(prediction, CSV) == expected


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
    ],
)
def test_what_cannot_be_written_raises(prediction, content_type):
    """What a format has no form for is an error, and is neither pickled nor written as Python would."""
    with pytest.raises((TypeError, ValueError)):
        encode(prediction, content_type)
