"""Messages and places of tensors: what is sent comes out, and what nobody sends is refused."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model_handlers.errors import Kind, MmeError
from model_handlers.worker.wire import (
    MAX_ERROR,
    MAX_MESSAGE,
    MessageSplitter,
    Packing,
    ProtocolError,
    encode_message,
    error_fields,
    error_from,
    unpack,
)


def packed(*arrays, start=0):
    """The bytes that hold the arrays, and their places."""
    packing = Packing(start)
    places = [packing.add(array, "tensor") for array in arrays]
    memory = bytearray(packing.end)
    packing.write(memoryview(memory))
    return np.frombuffer(bytes(memory), np.uint8), places


@settings(deadline=None)
@given(st.lists(st.dictionaries(st.text(max_size=5), st.integers(-5, 5)), max_size=5), st.data())
def test_messages_survive_any_cut(messages, data):
    """However a stream is cut into pieces, the same messages come out in the same order."""
    stream = b"".join(map(encode_message, messages))
    reader, got = MessageSplitter(), []
    while stream:
        cut = data.draw(st.integers(1, len(stream)))
        reader.feed(stream[:cut])
        stream = stream[cut:]
        while (message := reader.next()) is not None:
            got.append(message)

    assert got == messages


def test_a_piece_is_read_where_it_lies():
    """A piece of hundreds of messages is not copied for each; what is left of it is, once more of its last one comes."""
    piece = b"".join(encode_message({"n": number}) for number in range(100))
    reader = MessageSplitter()
    reader.feed(piece[:-1])
    for number in range(99):
        assert reader.next() == {"n": number}
        assert len(reader._buffer) == len(piece) - 1
    assert reader.next() is None
    reader.feed(piece[-1:] + b"rest")

    assert reader.next() == {"n": 99}
    assert reader.take(4) == b"rest"
    assert reader.take(1) is None


def test_large_messages_are_told_before_they_are_read():
    """Once they are there."""
    message = encode_message({"text": "x" * 1000})
    reader = MessageSplitter()
    reader.feed(message[:-1])
    assert not reader.has_over(100)
    reader.feed(message[-1:] + message)
    assert reader.has_over(100)
    assert not reader.has_over(len(message))
    assert reader.next() == reader.next() == {"text": "x" * 1000}
    assert not reader.has_over(0)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"\xff\xff\xff\xff", "4294967295 bytes"),
        (b"GET / HTTP/1.1", "bytes, at most"),
        (b"\x03\0\0\0abc", "not JSON"),
        (b"\x02\0\0\0[]", "not an object"),
        (b"\0\0\0\0", "not JSON"),
    ],
)
def test_garbage_is_refused(data, words):
    """Bytes that are no message are an error that says what is wrong with them, before more is read."""
    reader = MessageSplitter()
    reader.feed(data)
    with pytest.raises(ProtocolError, match=words):
        reader.next()


def test_messages_are_bounded():
    """A message beyond the bound, or with a value that JSON has no form for, is not sent."""
    with pytest.raises(MmeError, match="at most") as raised:
        encode_message({"a": "x" * MAX_MESSAGE})
    assert raised.value.kind is Kind.TOO_LARGE
    with pytest.raises(MmeError, match="can't be handed") as raised:
        encode_message({"a": object()})
    assert raised.value.kind is Kind.INVALID_ARGUMENT


@pytest.mark.parametrize("kind", Kind)
def test_errors_cross_by_name(kind):
    """An error of any kind is the same on the other side; a long one is cut."""
    crossed = error_from(error_fields(MmeError(kind, "x" * (MAX_ERROR + 1))))

    assert crossed.kind is kind
    assert crossed.message == "x" * MAX_ERROR + " …"
    assert [error_from(error_fields(MmeError(kind, "", said))).said for said in (0, 422)] == [0, 422]


def test_an_error_of_any_words_crosses():
    """Halves of characters, which no message can carry, are escapes."""
    message = encode_message(error_fields(MmeError(Kind.INTERNAL, "no \ud800 luck")))

    assert rb'"no \\ud800 luck"' in message


@pytest.mark.parametrize(
    "fields",
    [
        {},
        None,
        [],
        {"kind": "NONE", "message": "m"},
        {"kind": [], "message": "m"},
        {"kind": "INTERNAL", "message": "m", "said": "no"},
    ],
)
def test_no_error_is_refused(fields):
    """What is no error does not become one."""
    with pytest.raises(ProtocolError, match="error"):
        error_from(fields)


def test_places_are_aligned_and_apart():
    """Each array lies at a multiple of 64 bytes, behind the one before, behind the start."""
    arrays = [np.ones(n, "u1") for n in (1, 64, 0, 65)]
    _, places = packed(*arrays, start=3)

    assert [offset for _, offset, _, _ in places] == [64, 128, 192, 192]


def test_an_array_that_is_there_is_not_written_again():
    """A view of the shared bytes has its place already; what differs from them in any way is copied."""
    shared = np.arange(1024, dtype="u1")
    x = shared[64:192].view("f4").reshape(4, 8)
    packing = Packing(1024, shared)

    assert packing.add(x, "x") == ["FP32", 64, 128, [4, 8]]
    assert packing.add(x[1:3], "x") == ["FP32", 96, 64, [2, 8]]
    assert packing.end == 1024
    assert packing.add(x.T, "x")[1] == 1024
    assert packing.add(shared[65:73].view("f4"), "x")[1] == 1152
    assert packing.add(x.view(">f4"), "x")[1] == 1216


@pytest.mark.parametrize(
    "place",
    [
        None,
        [],
        ["FP32", 0, 8],
        ["FP99", 0, 8, [2]],
        ["FP32", -4, 8, [2]],
        ["FP32", 60, 8, [2]],
        ["FP32", 0, 8, [3]],
        ["FP32", 0, 8, [-1, -2]],
        ["FP32", 0, 8, [2.0]],
        ["FP32", 0, 8, "2"],
        ["FP32", 2, 8, [2]],
        ["FP32", 0, 2**70, [2**68]],
        ["FP32", True, 8, [2]],
        ["FP32", 0, 4, [1] * 65],
        ["BYTES", 0, 8, [1]],
        ["BYTES", 0, 4, [2]],
        [[], 0, 4, [1]],
    ],
    ids=str,
)
def test_places_outside_are_refused(place):
    """A place that no array can have is an error that shows it."""
    shared = np.zeros(64, "u1")
    shared[:4] = (9, 0, 0, 0)
    with pytest.raises(ProtocolError):
        unpack(shared, place, "y", "m")


@pytest.mark.parametrize("width", [3, 5000], ids=["few bytes", "many"])
@pytest.mark.parametrize("dtype", ["<f4", ">f4", "?", "<i8"])
@pytest.mark.parametrize("form", ["rows", "columns", "every other"])
def test_joined_arrays_lie_behind_one_another(form, dtype, width):
    """However they lie in memory, and in whichever order their bytes are; nothing else is written."""
    forms = {"rows": (2, width), "columns": (width, 2), "every other": (2, 2 * width)}
    base = np.arange(math.prod(forms[form])).reshape(forms[form]).astype(dtype)
    array = {"rows": base, "columns": base.T, "every other": base[:, ::2]}[form]
    arrays = [array, array[:1], array[1:]]
    packing = Packing(8)
    place = packing.add_joined(arrays, "x")
    alone = packing.add(array, "x")
    memory = bytearray(b"\xaa" * (packing.end + 8))
    packing.write(memoryview(memory))
    shared = np.frombuffer(memory, np.uint8)

    assert np.array_equal(unpack(shared, place, "x", "m"), np.concatenate(arrays))
    assert np.array_equal(unpack(shared, alone, "x", "m"), array)
    assert set(memory[: place[1]] + memory[place[1] + place[2] : alone[1]] + memory[packing.end :]) == {0xAA}


@pytest.mark.parametrize("width", [3, 5000], ids=["few bytes", "many"])
def test_a_masked_array_is_what_lies_under_its_mask(width):
    """As numpy copies it."""
    array = np.ma.masked_array(np.arange(width, dtype="f4"), np.arange(width) % 2 == 0)
    shared, (place,) = packed(array)

    assert unpack(shared, place, "x", "m").tolist() == array.data.tolist()


def test_views_stand_on_the_shared_bytes():
    """What is unpacked is no copy, and keeps the shared array alive."""
    shared, (place,) = packed(np.arange(6, dtype="f8").reshape(2, 3))
    x = unpack(shared, place, "x", "m")

    assert x.base is shared
    assert x[1:].T.base is shared
    assert x.tolist() == [[0, 1, 2], [3, 4, 5]]


def test_what_is_no_tensor_is_named():
    """Something that is no array, or of a type that the protocol lacks, is an error that names it."""
    with pytest.raises(MmeError, match="output 'y' is list, not a numpy array"):
        Packing().add([1], "output 'y'")
    with pytest.raises(MmeError, match="output 'y' has dtype complex64"):
        Packing().add(np.zeros(1, "c8"), "output 'y'")


class Wordless:
    """Says nothing about itself."""

    def __str__(self):
        raise RuntimeError("no words")


@pytest.mark.parametrize(("element", "words"), [("a\ud800", "surrogates not allowed"), (Wordless(), "no words")])
def test_what_is_no_text_is_named(element, words):
    """An element that has no form as a string is an error of its tensor, wherever it lies."""
    array = np.array([b"a", element], object)
    for add in (Packing().add, lambda *args: Packing().add_joined([array, array], args[1])):
        with pytest.raises(MmeError, match=f"output 'y' has an element that is no text: .*{words}") as caught:
            add(array, "output 'y'")
        assert caught.value.kind is Kind.EXECUTION_FAILED
