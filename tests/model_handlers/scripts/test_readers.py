"""Readers of bodies against those that others have: Python's csv and json, numpy, and scikit-learn's of LIBSVM.

`MME_READER_EXAMPLES` is how many bodies each gets, thrice as many as other properties without.
"""

import csv
import io
import json
import math
import os
import re
import struct

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from sklearn.datasets import load_svmlight_file

from model_handlers.scripts.content_types import CSV, JSON, JSON_LINES, NPY, MalformedBodyError, cells_of, decode
from model_handlers.scripts.xgboost import matrix, recordio_rows
from tests.frameworks import framework
from tests.model_handlers.scripts.records import record

xgboost = framework("xgboost")
many = settings(
    deadline=None,
    max_examples=int(os.environ.get("MME_READER_EXAMPLES", settings.default.max_examples * 3)),
    suppress_health_check=list(HealthCheck),
)

WORDS = st.sampled_from(
    [
        "1",
        "-2.5",
        "1e3",
        "",
        " ",
        "#",
        "#1",
        '"',
        '""',
        "a",
        "nan",
        "inf",
        "-",
        "1_0",
        "٣",
        "1e999",
        ",",
        "\n",
        "\r\n",
        "\r",
    ]
) | st.text(max_size=4)
SIGNS = st.sampled_from(list('0123456789.,-+eE:# \n\r\t"[]{}nulNaIfity')) | st.characters()
PYTHONS = re.compile(r"[0-9]_|[^\x00-\x7f]")  # what float() takes, and no other language


def refused(read, *arguments):
    """Whether a reader refuses the body: with the one error that is the client's fault."""
    try:
        read(*arguments)
    except MalformedBodyError:
        return True
    return False


def of_csv(text):
    """The rows by Python's reader; None where it refuses them, or they are no table."""
    try:
        rows = list(csv.reader(io.StringIO(text.removeprefix("\ufeff").strip("\r\n"), newline=""), strict=True))
    except csv.Error:
        return None
    even = len({len(row) for row in rows}) == 1 and all(rows)
    return rows if even and "\0" not in text and text.removeprefix("\ufeff").strip() else None


@example(text="1\x1f")
@example(text="1\xa0")
@many
@given(text=st.lists(WORDS, max_size=12).map("".join) | st.lists(WORDS, max_size=8).map(",".join) | st.text(SIGNS))
def test_csv_is_what_pythons_reader_says(text):
    """Cell by cell; a cell is the float that Python reads of it, but for Python's own ways to write one."""
    expected = of_csv(text)
    if expected is None:
        assert refused(decode, text, CSV)
        return
    assert cells_of(text) == expected
    array = decode(text.encode(errors="surrogatepass"), CSV) if text.isascii() else decode(text, CSV)
    assert array.shape == (len(expected), len(expected[0]))
    for cell, value in zip(leaves(expected), array.ravel().tolist(), strict=True):
        try:
            number = float(cell) if cell.strip() else math.nan
        except ValueError:
            number = None
        if number is None or PYTHONS.search(cell.strip()) or (math.isinf(number) and "n" not in cell.lower()):
            assert value == cell
        else:
            assert value == number or (math.isnan(value) and math.isnan(number))


@many
@given(rows=st.lists(st.lists(WORDS, min_size=2, max_size=2), min_size=1, max_size=4))
def test_what_pythons_writer_writes_is_read(rows):
    """Whatever is in the cells, but NUL and what no UTF-8 has."""
    text = io.StringIO()
    csv.writer(text).writerows(rows)
    if "\0" not in text.getvalue() and not text.getvalue().startswith("\ufeff"):
        assert cells_of(text.getvalue()) == rows


PAIRS = st.builds(
    "{}:{}".format, st.sampled_from([0, 1, 2, 7, "", -1, "a"]), st.sampled_from([1, -0.5, "1e3", "", "a"])
)
LABELS = st.sampled_from(["1", "-2.5", "0", "a", "1,2", ""])
LINES = st.builds(
    lambda label, pairs, end: " ".join([label, *pairs]) + end,
    LABELS,
    st.lists(PAIRS, max_size=4),
    st.sampled_from(["", " ", "\r", " # 3:4"]),
)


@many
@given(lines=st.lists(LINES, max_size=4), text=st.text(SIGNS, max_size=30), noise=st.booleans())
def test_libsvm_is_what_scikit_learns_reader_says(lines, text, noise):
    """Where that reads all lines, and each column of a row once and in order; what it refuses is refused."""
    body = text if noise else "\n".join(lines)
    try:
        rows, labels = load_svmlight_file(io.BytesIO(body.encode()), zero_based=True)
    except (ValueError, OverflowError, UnicodeEncodeError):
        rows = None
    try:
        mine = matrix(body, "text/libsvm")
    except MalformedBodyError:
        # Ours: empty lines between rows, no pair at all, numbers that are none to XGBoost. Never a body of plain pairs.
        plain = all(re.fullmatch(r"-?[0-9.]+( [0-9]:-?[0-9.]+)+", line) for line in body.split("\n"))
        assert rows is None or not plain
        return
    if rows is not None and len(labels) == mine.num_row():
        theirs = xgboost.DMatrix(rows)
        assert mine.num_col() == theirs.num_col()
        given_rows, expected = mine.get_data().toarray(), theirs.get_data().toarray()
        np.testing.assert_array_equal(given_rows, expected)


DOCUMENTS = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3),
    max_leaves=8,
)


def leaves(document):
    """The elements of nested lists."""
    return [leaf for each in document for leaf in leaves(each)] if isinstance(document, list) else [document]


def even(document):
    """Whether lists are nested evenly, as arrays are."""
    try:
        np.array(document, np.float64 if not any(isinstance(each, str) for each in leaves(document)) else None)
    except (ValueError, TypeError):
        return False
    return True


@many
@given(document=DOCUMENTS, damage=st.text(SIGNS, max_size=2), at=st.integers(0, 60))
def test_json_is_what_pythons_reader_says(document, damage, at):
    """Element by element, null as NaN; damaged text is refused where Python refuses it."""
    text = json.dumps(document)
    text = text[:at] + damage + text[at:]
    try:
        expected = json.loads(text)
    except ValueError:
        assert refused(decode, text, JSON)
        return
    if isinstance(expected, dict) or any(isinstance(each, dict) for each in leaves(expected)):
        return
    if not even(expected):
        assert refused(decode, text, JSON)
        return
    for value, wanted in zip(decode(text, JSON).ravel().tolist(), leaves(expected), strict=True):
        wanted_number = math.nan if wanted is None else wanted
        assert value == wanted_number or value == pytest.approx(float(wanted_number), rel=1e-15, nan_ok=True)


@many
@given(
    rows=st.lists(st.lists(st.none() | st.floats(width=32), min_size=2, max_size=2), min_size=1, max_size=4),
    damage=st.text(SIGNS, max_size=1),
    at=st.integers(0, 60),
)
def test_lines_of_json_are_what_pythons_reader_says(rows, damage, at):
    """Line by line."""
    text = "\n".join(map(json.dumps, rows))
    text = text[:at] + damage + text[at:]
    try:
        expected = [json.loads(line) for line in text.removeprefix("\ufeff").rstrip().split("\n")]
        expected = [row if isinstance(row, list | dict) else [row] for row in expected]
    except ValueError:
        expected = None
    if expected is None or "\0" in text or not even(expected):
        assert refused(decode, text, JSON_LINES)
        return
    values = [math.nan if each is None else each for each in leaves(expected)]
    assert decode(text, JSON_LINES).ravel().tolist() == pytest.approx(values, nan_ok=True)


ARRAYS = st.builds(
    lambda dtype, shape, order: np.ones(shape, dtype, order),
    st.sampled_from(["<f4", ">f8", "<i8", "|b1", "<U3", "|S2", "<f2", "<c8"]),
    st.lists(st.integers(0, 3), max_size=3),
    st.sampled_from("CF"),
)


@many
@given(array=ARRAYS, cut=st.integers(0, 200), damage=st.binary(max_size=2), at=st.integers(0, 140))
def test_npy_is_what_numpys_reader_says(array, cut, damage, at):
    """Whole files as they were; others are read as numpy reads them, or refused."""
    stream = io.BytesIO()
    np.save(stream, array)
    whole = stream.getvalue()
    np.testing.assert_array_equal(decode(whole, NPY), array)
    body = whole[:at] + damage + whole[at + len(damage) :] if cut % 2 else whole[:cut]
    try:
        mine = decode(body, NPY)
    except MalformedBodyError:
        return
    np.testing.assert_array_equal(mine, np.load(io.BytesIO(body), allow_pickle=False))


@many
@given(
    rows=st.lists(st.lists(st.floats(width=32, allow_nan=False), min_size=3, max_size=3), min_size=1, max_size=3),
    columns=st.lists(st.integers(0, 2), unique=True, max_size=3),
    damage=st.binary(min_size=1, max_size=2),
    at=st.integers(0, 99),
)
def test_recordio_is_what_was_written(rows, columns, damage, at):
    """Dense rows, and rows that say their columns; a damaged body is read or refused, and nothing else."""
    dense = b"".join(record(struct.pack("<3f", *row)) for row in rows)
    np.testing.assert_array_equal(recordio_rows(dense), np.array(rows, np.float32))
    keys = sorted(columns)
    if keys:
        sparse = b"".join(record(struct.pack(f"<{len(keys)}f", *[row[k] for k in keys]), keys, (3,)) for row in rows)
        expected = np.zeros((len(rows), 3), np.float32)
        expected[:, keys] = np.array(rows, np.float32)[:, keys]
        np.testing.assert_array_equal(recordio_rows(sparse).toarray(), expected)
    broken = dense[:at] + damage + dense[at + len(damage) :]
    refused(matrix, broken, "application/x-recordio-protobuf", 3)
