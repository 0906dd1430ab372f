"""The two ways to write JSON: what either writes, both read, and what JSON has no form for neither writes."""

import json
import math

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from model_handlers.worker.wire import dumps, loads, plain_dumps, plain_loads

NUMBERS = st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False, allow_infinity=False)
TEXT = st.text(st.characters(exclude_categories=["Cs"]))
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXT,
    lambda inside: st.lists(inside, max_size=4) | st.dictionaries(TEXT, inside, max_size=4),
    max_leaves=20,
)


@given(VALUES)
def test_each_reads_what_the_other_writes(value):
    """A value is the same whichever side had which."""
    assert loads(plain_dumps(value)) == value
    assert plain_loads(memoryview(dumps(value))) == value


@pytest.mark.parametrize("value", [object(), b"x", "\ud800", {"k": {1, 2}}], ids=["object", "bytes", "half", "set"])
def test_neither_writes_what_json_has_no_form_for(value):
    """The sender is told; nothing is sent that the other side would take for nonsense."""
    for write in (dumps, plain_dumps):
        with pytest.raises((TypeError, ValueError)):
            write([value])


@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_the_standard_librarys_own_words_for_numbers_are_not_written(number):
    """NaN and Infinity are no JSON, and orjson would refuse the whole message."""
    with pytest.raises(ValueError, match="not JSON compliant"):
        plain_dumps([number])
    with pytest.raises(orjson.JSONDecodeError):
        orjson.loads(json.dumps([number]))
