"""Which answers take long to write: what is copied or written as text, and there is much of it."""

from __future__ import annotations

import numpy as np
import pytest

from container.codec.encode import takes_long
from container.codec.request import OutputOptions

MANY = np.zeros((1 << 20) + 1, np.uint8)
NUMBERS = np.zeros((1 << 15) + 1, np.float32)
WORDS = np.array([b"word"] * 5000, dtype=np.object_)
FILE = np.array([bytes(1 << 20)], dtype=np.object_)
FEW_WORDS = np.array(["word"] * 64, dtype=np.object_)


@pytest.mark.parametrize(
    ("datatype", "array", "how", "long"),
    [
        ("UINT8", MANY, "binary", False),
        ("UINT8", MANY, "place", True),
        ("UINT8", MANY[1:], "place", False),
        ("FP32", NUMBERS, "json", True),
        ("FP32", NUMBERS[1:], "json", False),
        ("FP32", NUMBERS, "classes", True),
        ("FP32", NUMBERS, "place", False),
        ("BYTES", WORDS, "binary", True),
        ("BYTES", FILE, "binary", True),
        ("BYTES", FEW_WORDS, "json", False),
        ("BYTES", np.array([5, None], dtype=np.object_), "json", False),  # which is for who writes it to refuse
    ],
)
def test_what_takes_long(datatype, array, how, long, respond):
    """Bytes that are sent from where they lie never do."""
    options = OutputOptions({"Y": how == "binary"})
    if how == "place":
        options.places["Y"] = None
    if how == "classes":
        options.classes["Y"] = 1
    assert takes_long(respond(("Y", datatype, array)), options) is long


def test_the_efforts_of_outputs_add_up(respond):
    """Two that are short make one that is long."""
    half = ("FP32", NUMBERS[: len(NUMBERS) // 2 + 1])
    options = OutputOptions(binary=False)
    assert not takes_long(respond(("Y", *half)), options)
    assert takes_long(respond(("Y", *half), ("Z", *half)), options)
