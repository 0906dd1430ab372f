"""Large JSON read slice by slice: it means what it means as a whole, and is refused in the same words."""

from __future__ import annotations

import contextlib
import json
import math

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from container.codec import decode as decode_module
from container.codec import json_numbers
from container.codec import request as request_module
from container.codec.decode import Decoder
from container.codec.generate import decode_generate
from container.codec.json_data import array_from_json, flat_array_from_json
from container.codec.json_numbers import MOST_VALUES, MOST_WHOLE, NotNumbers, Numbers, with_numbers
from container.codec.request import LARGE, Layouts, find
from container.steps.shared_memory import Regions
from model_handlers.config.model_config import ModelConfig
from model_handlers.errors import Kind, MmeError
from model_handlers.tensor import BY_NAME, TensorSpec

MODEL = ModelConfig("m", inputs=(TensorSpec("Z", BY_NAME["BYTES"], (-1,)),))


def ignore(*_):
    """A completion."""


@contextlib.contextmanager
def slices_of(size):
    """Texts of any length are large, and their arrays are cut at the first comma behind so many bytes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode_module, "LARGE", 0)
        patch.setattr(json_numbers, "_ARRAY", 0)
        patch.setattr(json_numbers, "_PIECE", size)
        yield


# -- both ways -------------------------------------------------------------------------------------------------------


def told(function, *arguments):
    """What a function returns, or the error that it raises, such that two of them can be compared."""
    try:
        return function(*arguments)
    except MmeError as error:
        return error.kind, error.message


def seen(request):
    """All that a model sees of a request."""
    arrays = [
        (array.shape, array.dtype.str, array.tolist() if array.dtype == np.object_ else array.tobytes())
        for array in request.inputs
    ]
    own = request.id, request.parameters, request.timeout_us, request.priority, request.correlation_id, request.flags
    return request.layout.inputs, request.layout.outputs, arrays, own


def decoded(body, length, *, long=False):
    """A request, and how its answer is to be."""
    decoder, regions = Decoder(1 << 20), Regions().held()
    decode = decoder.decode_long if long else decoder.decode
    request, reply = decode(body, length, "m", ignore, regions)
    return seen(request), reply.binary, reply.outputs, reply.classes


def check_same(body, length=None):
    """The two ways agree on a body."""
    assert told(lambda: decoded(body, length, long=True)) == told(decoded, body, length)


def in_slices(body):
    """How many inputs of a body are read in slices."""
    try:
        return sum(isinstance(item["data"], Numbers) for item in with_numbers(body)["inputs"])
    except NotNumbers:
        return 0


# -- generated bodies ------------------------------------------------------------------------------------------------

INTEGERS = st.one_of(
    st.integers(-130, 300),
    st.integers(-(2**70), 2**70),
    st.sampled_from([2**31, 2**53 + 1, 2**63 - 1, 2**63, 2**64 - 1, 2**64, -(2**63), -(2**63) - 1]),
    # halfway between two numbers of FP32, but for what FP64 loses
    st.integers(-2, 2).map(lambda off: (1 << 62) + (1 << 38) + off),
).map(str)
FLOATS = st.one_of(
    st.floats(allow_nan=False, allow_infinity=False).map(repr),
    st.sampled_from(["1e39", "3.4028235677973366e38", "1e-46", "-0.0", "-0", "0e0", "1E+5", "1e400", "2.5", "1.0"]),
)
STRINGS = st.one_of(
    st.sampled_from(
        ['""', '"]"', '","', '"[1,"', '"\\\\"', '"\\""', '"\\\\\\","', '"é"', '"{:}"', '"NaN"', '"\\ud800"']
    ),
    st.text(max_size=5).map(json.dumps),
)
OTHERS = st.sampled_from(
    ["null", "{}", '{"data":[1]}', "[]", "[[]]", "NaN", "-Infinity", "Infinity", "01", "+1", "", "1 2"]
)
BOOLEANS = st.sampled_from(["true", "false"])
DIGITS = st.integers(0, 9).map(str)
KINDS = {
    "BOOL": BOOLEANS,
    "UINT8": DIGITS,
    "INT8": DIGITS,
    "INT32": st.one_of(DIGITS, DIGITS, INTEGERS),
    "UINT64": st.one_of(DIGITS, st.integers(0, 2**64 - 1).map(str)),
    "INT64": st.one_of(DIGITS, st.integers(-(2**63), 2**63 - 1).map(str)),
    "FP32": st.one_of(
        DIGITS, st.just("null"), st.floats(width=32, allow_nan=False, allow_infinity=False).map(repr), INTEGERS, FLOATS
    ),
    "FP64": st.one_of(INTEGERS, FLOATS, st.just("null")),
    "BYTES": STRINGS,
}
SIZES = st.sampled_from([1, 7, 40])
DAMAGE = (b"", b"[]", *(bytes([each]) for each in b',[]"\\{}: 1e-N\xff\xe9'))
SPACE = st.sampled_from(["", "", "", " ", "\n ", "\t"])


@st.composite
def arrays(draw, kind=None):
    """The text of an array: mostly even and of one type."""
    kind = KINDS[draw(st.sampled_from(sorted(KINDS)))] if kind is None else kind
    odd = draw(st.integers(0, 9)) == 0
    element = st.one_of(kind, kind, kind, OTHERS, STRINGS, INTEGERS) if odd else kind
    dims = draw(st.lists(st.integers(0, 4), min_size=1, max_size=3))
    if draw(st.integers(0, 3)) == 0:
        dims = [draw(st.integers(0, 30))]
    ragged = draw(st.integers(0, 9)) == 0

    def text(level):
        if level == len(dims) or (ragged and level and draw(st.integers(0, 9)) == 0):
            return draw(element)
        count = draw(st.integers(0, 3)) if ragged and draw(st.integers(0, 3)) == 0 else dims[level]
        gap = draw(SPACE)
        return "[" + gap + ("," + gap).join(text(level + 1) for _ in range(count)) + draw(SPACE) + "]"

    return text(0), dims


@st.composite
def inputs(draw):
    """An input, its fields in any order."""
    datatype = draw(st.sampled_from([*KINDS, *KINDS, "FP16", "FP31"]))
    data, dims = draw(arrays(KINDS.get(datatype) if draw(st.integers(0, 5)) else None))
    if draw(st.booleans()):
        dims = [math.prod(dims)]
    if draw(st.integers(0, 9)) == 0:
        dims = [*dims, 2]
    fields = [
        f'"name":{json.dumps(draw(st.sampled_from(["X", "Y", "X", "é]", ""])))}',
        f'"datatype":"{datatype}"',
        f'"shape":{json.dumps(dims)}',
        f'"data"{draw(SPACE)}:{draw(SPACE)}{data}',
    ]
    more = ['"data":[1,2,3]', '"x":[1,2]', '"parameters":{}', '"name":[1,2]', '"shape":[3]']
    fields += draw(st.lists(st.sampled_from(more), max_size=1)) if draw(st.integers(0, 4)) == 0 else []
    return "{" + ",".join(draw(st.permutations(fields))) + "}"


@st.composite
def bodies(draw):
    """The text of a request, which may not be one."""
    more = [
        '"id":"r"',
        '"id":"r\\"]"',
        '"id":[1,2]',
        '"outputs":[{"name":"O"}]',
        '"outputs":[1]',
        '"parameters":{"a":[1,2]}',
        '"inputs":[]',
        '"parameters":{"priority":1}',
        '"x":{"data":[1,2,3]}',
        '"data":[1,2,3]',
        '"X":[1,2]',
        '"parameters":{"Z":["a","b"]}',
    ]
    fields = [
        '"inputs":[' + ",".join(draw(st.lists(inputs(), max_size=3))) + "]",
        *(draw(st.lists(st.sampled_from(more), max_size=2)) if draw(st.integers(0, 3)) == 0 else ()),
    ]
    body = "{" + ",".join(draw(st.permutations(fields))) + "}"
    return (draw(st.sampled_from(["", "", "", "", "\ufeff", " "])) + body + draw(SPACE)).encode()


@st.composite
def damaged(draw):
    """A request of which a few bytes are others."""
    body = bytearray(draw(bodies()))
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(body)))
        new = draw(st.sampled_from([*DAMAGE]))
        body[at : at + draw(st.integers(0, 2))] = new
    return bytes(body)


@given(body=bodies(), size=SIZES)
@example(body=b'{"inputs":[{"name":"X","datatype":"FP32","shape":[2],"data":[1,2,]}]}', size=1)
@example(body=b'{"inputs":[{"name":"X","datatype":"FP32","shape":[2],"data":[,1,2]}]}', size=1)
@example(body=b'{"inputs":[{"name":"X","datatype":"FP32","shape":[2],"data":[[1],2]}]}', size=1)
@example(body=b'{"inputs":[{"name":"X","datatype":"FP32","shape":[1],"data":[1,[]]}]}', size=1)
@example(body=b'{"inputs":[{"name":"X","datatype":"FP32","shape":[2],"data":[[1],[2]]]}]}', size=1)
@example(body=b'{"inputs":[{"name":"X","datatype":"FP32","shape":[2],"data":[1],[2]}]}', size=1)
@example(body=b'{"inputs":[{"name":"X","datatype":"FP32","shape":[3],"data":[[1,2],[]]}]}', size=1)
@example(body=b'{"inputs":[{"name":"X","datatype":"INT64","shape":[2],"data":[-1,9223372036854775808]}]}', size=1)
@example(body=b'{"inputs":[{"name":"X","datatype":"FP32","shape":[2],"data":[NaN,18446744073709551616]}]}', size=1)
@example(body=b'{"inputs":[{"name":"X","datatype":"FP32","shape":[2],"data":[18446744073709551616,1]}]}', size=1)
@example(body=b'{"inputs":[{"name":"X","datatype":"FP32","shape":[1],"data":[4611686293305294849]}]}', size=1)
@example(body=b'{"inputs":[{"name":"X","datatype":"FP32","shape":[1],"data":[2],"data":[3]}]}', size=1)
def test_a_request_of_infer_means_the_same(body, size):
    """Whatever it holds: the same tensors bit for bit, or the same sentence of what is wrong."""
    with slices_of(size):
        check_same(body)


@given(body=damaged(), size=SIZES)
def test_what_is_no_request_is_refused_in_the_same_words(body, size):
    """Wherever it is broken."""
    with slices_of(size):
        check_same(body)


# -- what is read in slices ------------------------------------------------------------------------------------------


def infer_body(data, datatype="FP32", shape=(4,)):
    """A request of one input, its data as text."""
    head = f'{{"id":"r","inputs":[{{"name":"X","datatype":"{datatype}","shape":{json.dumps(shape)},"data":'
    return f"{head}{data}}}]}}".encode()


@pytest.mark.parametrize(
    ("data", "datatype"),
    [
        ("[1,2,3,4]", "FP32"),
        ("[1, 2.5, 3, 4e0]", "FP64"),
        ("[[1,2],[3,4]]", "INT8"),
        ("[ [[1] , [2]],\n[[3],[4]] ]", "UINT64"),
        ("[null,2.5,1,null]", "FP32"),
        ("[[null,3],[9007199254740993,4]]", "FP64"),
        ("[true,false,true,true]", "BOOL"),
    ],
)
def test_arrays_are_found(data, datatype):
    """Flat and nested, of numbers, booleans and null."""
    with slices_of(1):
        body = infer_body(data, datatype)
        assert in_slices(body) == 1
        check_same(body)
        check_same(body.replace(b"1", b"NaN"))


@pytest.mark.parametrize(
    "data",
    [
        '["1",2,3,4]',
        "[[1,2],[3],[4]]",
        "[[1,2],3,4]",
        "[[1,2,3,4],[]]",
        "[[[1,2]],[[3],[4]]]",
        "[1,2[],3,4]",
        "[[1][2],[3][4]]",
        "[[1,2],[3,4]",
        "[1,2,3,4]]",
        "[1,2,3,4,]",
        "[]",
    ],
)
def test_what_is_no_even_array_of_numbers_is_read_as_a_whole(data):
    """Which says what is wrong with it, or finds nothing."""
    for size in (1, 1000):
        with slices_of(size):
            check_same(infer_body(data))
            check_same(infer_body(data, "BYTES"))


@pytest.mark.parametrize("sizes", [(1, 2), (3,)])
def test_binary_data_may_lie_behind(sizes):
    """Of other inputs; what is too much or too little of it is refused as ever."""
    array = np.arange(3, dtype="<i4")
    inputs = [
        {"name": "J", "datatype": "INT64", "shape": [4], "data": [1, 2, 3, 4]},
        {"name": "B", "datatype": "INT32", "shape": [3], "parameters": {"binary_data_size": array.nbytes}},
    ]
    for size in sizes:
        with slices_of(size):
            for fields in ({}, {"id": "r"}, {"id": 'r"'}):
                header = json.dumps({**fields, "inputs": inputs}).encode()
                for data in (array.tobytes(), array.tobytes()[1:], array.tobytes() + b"x"):
                    check_same(header + data, len(header))
            twice = b'{"id":"a",' + header[1:-1] + b',"id":""}'
            check_same(twice + array.tobytes(), len(twice))


@pytest.mark.parametrize("depth", [63, 64, 65, 300])
def test_what_is_nested_too_deep_is_refused_in_the_same_words(depth):
    """Wherever it is cut."""
    for size in (1, 1000):
        with slices_of(size):
            check_same(infer_body("[" * depth + "1,2,3,4" + "]" * depth))
            check_same(infer_body("[[1],[2],[3]," + "[" * depth + "4" + "]" * depth + "]"))


def test_slices_are_small(monkeypatch):
    """Of a body as large as they are: nothing that is read at a time is."""
    sizes = []

    def loads(text):
        sizes.append(len(text))
        return json.loads(text)

    numbers = np.random.default_rng(0).random(8 * LARGE // 20)
    body = infer_body(json.dumps(numbers.tolist()), "FP64", numbers.shape)
    expected = decoded(body, None)
    monkeypatch.setattr(json_numbers.orjson, "loads", loads)
    found = decoded(body, None, long=True)
    monkeypatch.undo()

    assert len(body) > 4 * LARGE
    assert max(sizes) < LARGE
    assert found == expected


def test_other_threads_have_their_turn_between_slices(monkeypatch):
    turns = []
    monkeypatch.setattr(request_module.time, "sleep", turns.append)
    numbers = np.random.default_rng(0).random(4 * LARGE // 20)

    decoded(infer_body(json.dumps(numbers.tolist()), "FP64", numbers.shape), None, long=True)

    assert len(turns) >= 8
    assert all(0 < seconds < 0.001 for seconds in turns)  # 0 would be over before a thread that waits wakes up


def test_other_threads_have_their_turn_between_pieces_of_long_lists(monkeypatch):
    turns = []
    monkeypatch.setattr(request_module.time, "sleep", turns.append)
    texts = [str(number) for number in range(200_000)]

    array = flat_array_from_json(texts, BY_NAME["BYTES"], "X")

    assert [element.decode() for element in array.tolist()] == texts
    assert len(turns) >= 3


@pytest.mark.parametrize("wrong", [[1], 1])
def test_a_long_list_whose_end_is_nested_is_refused(wrong):
    texts = [*["a"] * 100_000, wrong]

    with pytest.raises(MmeError, match=r"nested|not BYTES"):
        array_from_json(texts, BY_NAME["BYTES"], (len(texts),), "X")


@pytest.mark.parametrize("nested", [1, 1 << 15])
@pytest.mark.parametrize(("data_type", "element"), [("BYTES", "a"), ("FP64", 1.0), ("INT32", 1)])
def test_a_piece_of_nested_elements_alone_is_refused_as_uneven(data_type, element, nested):
    elements = [element] * (1 << 15) + [[element]] * nested

    with pytest.raises(MmeError, match="nested unevenly"):
        array_from_json(elements, BY_NAME[data_type], (len(elements),), "X")


def test_the_event_loop_does_not_sleep_between_pieces(monkeypatch):
    """It reads up to LARGE bytes itself, which may be a hundred thousand elements."""
    turns = []
    monkeypatch.setattr(request_module.time, "sleep", turns.append)

    body = infer_body(json.dumps([1] * 130_000, separators=(",", ":")), "INT32", [130_000])

    decoded(body, None, long=False)

    assert len(body) > LARGE - 4096
    assert turns == []


@pytest.mark.parametrize("at", [0, 1, LARGE - 3, LARGE - 2, LARGE - 1, LARGE, LARGE + 1, 3 * LARGE - 2, 4 * LARGE - 3])
def test_words_are_found_wherever_they_are(at):
    text = bytearray(b"-" * 4 * LARGE)
    text[at : at + 3] = b"NaN"

    assert find(bytes(text), b"NaN") == at
    assert find(bytes(text), b"NaN", at) == at
    assert find(bytes(text), b"NaN", at + 1) == -1


def refused(body):
    """The error of a large body."""
    kind, message = told(lambda: decoded(body, None, long=True))
    return kind, message


@pytest.mark.parametrize(
    ("data", "datatype"),
    [
        ("[" + '"a",' * MOST_VALUES + '"a"]', "BYTES"),
        ('["' + "a" * MOST_WHOLE + '"]', "BYTES"),
        ("[" + "[1]," * MOST_VALUES + "[1,2]]", "FP32"),
        ("[[1]" + " " * MOST_WHOLE + ",[2]]", "FP32"),
        ("[[0." + "1" * MOST_WHOLE + "]]", "FP32"),
    ],
    ids=["many strings", "a long string", "uneven", "blanks", "a long number"],
)
def test_what_would_keep_others_waiting_is_refused(data, datatype):
    """Strings of which there are too many or too much, what is nested unevenly, and one number that is too long."""
    kind, message = refused(infer_body(data, datatype))
    assert (kind, "send tensors as binary data" in message) == (Kind.TOO_LARGE, True)


def test_what_is_wrong_with_many_numbers_is_told():
    """Where they were found, and are not of their type."""
    kind, message = refused(infer_body("[" + "1," * MOST_VALUES + "2.5]", "INT32", (MOST_VALUES + 1,)))
    assert (kind, "holds elements that are not INT32" in message) == (Kind.INVALID_ARGUMENT, True)


def test_generate_takes_so_much_and_no_more():
    """Its types are known to the model alone, so that it is read as a whole."""
    text = '{"Z": [' + '"a",' * (MOST_VALUES // 2) + '"a"]}'
    request = decode_generate(text.encode(), MODEL, Layouts(), ignore)
    assert request.inputs[0].size == MOST_VALUES // 2 + 1
    with pytest.raises(MmeError, match="send tensors as binary data") as raised:
        decode_generate(text.replace("]", ',"a"' * MOST_VALUES + "]").encode(), MODEL, Layouts(), ignore)
    assert raised.value.kind is Kind.TOO_LARGE
