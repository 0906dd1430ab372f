"""Data types, shapes and the wire form of string elements."""

import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model_handlers import tensor
from model_handlers.errors import Kind, MmeError
from model_handlers.proto import model_config_pb2 as pb
from model_handlers.tensor import (
    BF16,
    BYTES,
    DATA_TYPES,
    TensorSpec,
    decode_bytes_elements,
    element_count,
    encode_bytes_elements,
    estimated_size,
    shape_matches,
    size_of,
)

ELEMENTS = st.lists(st.binary(max_size=20), max_size=10)


def objects(elements, shape=None):
    """An object array of elements."""
    array = np.empty(len(elements), dtype=np.object_)
    array[:] = elements
    return array if shape is None else array.reshape(shape)


def test_the_table_is_the_message_enum():
    """Each data type has the number and the name that config.pbtxt gives it, and none is missing."""
    expected = dict(pb.DataType.items())
    expected.pop("TYPE_INVALID")

    assert {row.config_name: row.number for row in DATA_TYPES} == expected


@pytest.mark.parametrize("row", DATA_TYPES, ids=repr)
def test_a_row_is_found_by_name_and_number(row):
    """The look-ups of the table agree with its rows, and each constant is the row of its name."""
    assert tensor.BY_NAME[row.name] is row
    assert tensor.BY_NUMBER[row.number] is row
    assert getattr(tensor, row.name) is row


@pytest.mark.parametrize("row", [row for row in DATA_TYPES if row is not BF16], ids=repr)
def test_an_array_tells_its_data_type(row):
    """A dtype leads back to its row, BF16 apart, whose bit patterns look like UINT16."""
    assert tensor.BY_DTYPE[row.dtype] is row


@pytest.mark.parametrize(
    ("name", "size"), [("BOOL", 1), ("INT8", 1), ("FP16", 2), ("BF16", 2), ("FP64", 8), ("BYTES", 0)]
)
def test_an_element_has_its_size_on_the_wire(name, size):
    """The size of an element is the protocol's, and 0 where elements differ in size."""
    assert tensor.BY_NAME[name].itemsize == size


def test_half_precision_has_no_json_form():
    """The protocol sends FP16 and BF16 in binary only."""
    assert [row.name for row in DATA_TYPES if not row.json] == ["FP16", "BF16"]


@pytest.mark.parametrize(("max_batch_size", "shape"), [(0, (3, -1)), (1, (-1, 3, -1)), (8, (-1, 3, -1))])
def test_a_client_sees_the_batch_dimension_in_front(max_batch_size, shape):
    """The shape that metadata tells has one dimension more than `dims` where the model batches."""
    assert TensorSpec("I", BYTES, (3, -1)).shape(max_batch_size) == shape


@pytest.mark.parametrize(
    ("shape", "expected", "fits"),
    [
        ((2, 3), (2, 3), True),
        ((2, 3), (-1, 3), True),
        ((0, 3), (-1, 3), True),
        ((), (), True),
        ((2, 4), (-1, 3), False),
        ((2,), (2, 3), False),
        ((2, 3, 1), (2, 3), False),
        ((2, 3), (2, 3, -1), False),
    ],
)
def test_a_shape_fits_where_each_dimension_does(shape, expected, fits):
    """-1 takes any size, another dimension only its own, and the number of dimensions must agree."""
    assert shape_matches(shape, expected) is fits


@pytest.mark.parametrize(("shape", "count"), [((), 1), ((0, 5), 0), ((2, 3), 6)])
def test_elements_are_the_product_of_the_shape(shape, count):
    """A scalar is one element, and a dimension of 0 leaves none."""
    assert element_count(shape) == count


@settings(deadline=None)
@given(ELEMENTS)
def test_string_elements_survive_the_round_trip(elements):
    """What is encoded is decoded, empty elements and arbitrary bytes included."""
    array = decode_bytes_elements(encode_bytes_elements(objects(elements)), len(elements), "I", "bert")

    assert array.dtype == np.object_
    assert array.shape == (len(elements),)
    assert array.tolist() == elements


def test_string_elements_are_written_row_by_row_behind_their_length():
    """The wire form is a little-endian length and the bytes, in row-major order whatever the array's strides."""
    array = objects([b"a", b"bb", b"", "é"], (2, 2))

    assert encode_bytes_elements(array) == b"\1\0\0\0a\2\0\0\0bb\0\0\0\0\2\0\0\0\xc3\xa9"
    assert encode_bytes_elements(array.T) == b"\1\0\0\0a\0\0\0\0\2\0\0\0bb\2\0\0\0\xc3\xa9"


def test_a_view_into_a_body_is_decoded_without_its_surroundings():
    """The codec hands over a memoryview of the request body."""
    body = b"{}" + encode_bytes_elements(objects([b"x", b"yz"])) + b"rest"

    assert decode_bytes_elements(memoryview(body)[2:-4], 2, "I", "bert").tolist() == [b"x", b"yz"]


def refused(buffer, count):
    """The sentence with which a buffer is refused."""
    with pytest.raises(MmeError) as caught:
        decode_bytes_elements(buffer, count, "I", "bert")
    assert caught.value.kind is Kind.INVALID_ARGUMENT
    assert "for inference input 'I' for model 'bert'" in caught.value.message
    return caught.value.message


@pytest.mark.parametrize("left", [1, 2, 3])
def test_a_length_that_is_cut_off_is_refused(left):
    """A buffer that ends inside a length says how many bytes were left."""
    message = refused(struct.pack("<I", 1) + b"a" + b"\0" * left, 2)

    assert "incomplete string length indicator for inference input 'I'" in message
    assert f"expecting 4 bytes but only {left} bytes available" in message


@pytest.mark.parametrize(("length", "data"), [(3, b"ab"), (1, b""), (0xFFFFFFFF, b"abc")])
def test_an_element_that_is_cut_off_is_refused(length, data):
    """A length that lies, however large, is an error and never an allocation."""
    message = refused(struct.pack("<I", length) + data, 1)

    assert f"expecting string of length {length} but only {len(data)} bytes available" in message


@pytest.mark.parametrize(
    ("elements", "count", "got"), [([b"a"], 2, "got 1"), ([], 1, "got 0"), ([b"a"] * 9, 2, "got more")]
)
def test_another_number_of_elements_is_refused(elements, count, got):
    """The shape says how many elements there are; the buffer must hold exactly those."""
    message = refused(encode_bytes_elements(objects(elements)), count)

    assert message.startswith(f"expected {count} string elements")
    assert message.endswith(got)


def test_empty_elements_beyond_the_count_are_not_piled_up():
    """A body of zeros is a million empty elements; the first one too many ends the work."""
    assert refused(bytes(4_000_000), 1).endswith("got more")


@settings(deadline=None)
@given(st.binary(max_size=64), st.integers(0, 8))
def test_any_buffer_is_decoded_or_refused(buffer, count):
    """No bytes lead to anything but the right number of elements or an error of the request."""
    outcome = attempt(buffer, count)

    if isinstance(outcome, MmeError):
        assert outcome.kind is Kind.INVALID_ARGUMENT
    else:
        assert encode_bytes_elements(outcome) == buffer


def attempt(buffer, count):
    """The decoded elements, or the error of ours that says why there are none."""
    try:
        return decode_bytes_elements(buffer, count, "I", "bert")
    except MmeError as error:
        return error


def test_the_size_of_strings_is_that_of_their_bytes():
    """Not of eight bytes each, whatever they hold; an estimate looks at none of them."""
    strings = objects([b"", b"abc", b"x" * 1000, b"y"], (2, 2))
    assert (size_of(strings), estimated_size(strings)) == (1004, 4 * 256)
    numbers = np.zeros((3, 5), np.float32)
    assert size_of(numbers) == estimated_size(numbers) == 60
