"""Outputs as their highest values: arrays and labels in, texts out."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from container.codec.encode import classified
from model_handlers.errors import Kind, MmeError
from model_handlers.tensor import BF16, BOOL, BYTES, FP32, INT32, INT64, UINT8, UINT64
from serve.request import InferenceResponse


def of(array, count, *, kind=FP32, batches=True, labels=()):
    """The classes of an output Y."""
    response = InferenceResponse("m", "1", [("Y", kind, array), ("Z", FP32, array)], "id", parameters={"p": 1})
    response.final = True
    shown = classified(response, {"Y": count}, {"Y": labels}, batches=batches)
    assert (shown.model_name, shown.model_version, shown.id, shown.parameters) == ("m", "1", "id", {"p": 1})
    assert shown.final
    (_, data_type, classes), other = shown.outputs
    assert data_type is BYTES
    assert other == ("Z", FP32, array)
    return classes


@pytest.mark.parametrize(
    ("array", "count", "options", "texts"),
    [
        ([[0.1, 0.7, 0.2]], 1, {}, [["0.700000:1"]]),
        ([[0.1, 0.7, 0.2]], 2, {"labels": ("cat", "dog", "bird")}, [["0.700000:1:dog", "0.200000:2:bird"]]),
        ([[0.1, 0.7, 0.2]], 9, {"labels": ("cat",)}, [["0.700000:1", "0.200000:2", "0.100000:0:cat"]]),
        ([[0.1, 0.7]], 2, {"labels": ("cat", "")}, [["0.700000:1", "0.100000:0:cat"]]),
        ([[1, 2], [4, 3]], 1, {"kind": INT32}, [["2:1"], ["4:0"]]),
        ([[5, 5, 5]], 2, {"kind": UINT8}, [["5:0", "5:1"]]),
        ([[2**64 - 2, 2**64 - 1, 0]], 2, {"kind": UINT64}, [[f"{2**64 - 1}:1", f"{2**64 - 2}:0"]]),
        (
            [[2**62 + 1, -(2**63), 2**62 + 2]],
            3,
            {"kind": INT64},
            [[f"{2**62 + 2}:2", f"{2**62 + 1}:0", f"{-(2**63)}:1"]],
        ),
        ([1.0, 3.0, 2.0], 2, {"batches": False}, ["3.000000:1", "2.000000:2"]),
        ([[1.0, 3.0], [2.0, 4.0]], 2, {"batches": False}, ["4.000000:3", "3.000000:1"]),
        ([[[1.0], [3.0]], [[4.0], [2.0]]], 1, {}, [["3.000000:1"], ["4.000000:0"]]),
    ],
)
def test_the_highest_come_first(array, count, options, texts):
    """Whole, or with six decimals, their place, and their name where there is one; all of them if more are wanted than there are."""
    kind = options.get("kind", FP32)
    classes = of(np.array(array, kind.dtype), count, **options)
    assert np.vectorize(bytes.decode)(classes).tolist() == texts


@given(st.lists(st.lists(st.integers(-100, 100), min_size=5, max_size=5), min_size=1, max_size=4), st.integers(1, 7))
def test_classes_are_the_sorted_values(rows, count):
    """Each row by itself, and each place names its value."""
    array = np.array(rows, np.int32)
    for row, texts in zip(rows, of(array, count, kind=INT32), strict=True):
        values = [float(text.split(b":")[0]) for text in texts]
        places = [int(text.split(b":")[1]) for text in texts]
        assert values == sorted(row, reverse=True)[:count]
        assert [row[place] for place in places] == values
        assert len(set(places)) == len(places)


@pytest.mark.parametrize(
    ("array", "kind", "error", "words"),
    [
        (
            np.array([[True]]),
            BOOL,
            Kind.INVALID_ARGUMENT,
            "class result not available for output 'Y' due to unsupported",
        ),
        (np.array([[b"x"]], object), BYTES, Kind.INVALID_ARGUMENT, "unsupported type 'BYTES'"),
        (np.array([[1]], np.uint16), BF16, Kind.INVALID_ARGUMENT, "unsupported type 'BF16'"),
        (np.zeros((1, 1_000_001), np.uint8), UINT8, Kind.INVALID_ARGUMENT, "classification output tensor too large"),
    ],
)
def test_what_has_no_classes_is_refused(array, kind, error, words):
    """By the output's name."""
    with pytest.raises(MmeError) as caught:
        of(array, 1, kind=kind)
    assert (caught.value.kind, words in caught.value.message) == (error, True)
