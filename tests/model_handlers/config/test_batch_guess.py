"""The names of first dimensions say whether they are a batch, or leave it open."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from model_handlers.config.autocomplete import guess
from model_handlers.config.model_config import Guess


@pytest.mark.parametrize(
    ("names", "found"),
    [
        (["batch", "batch"], Guess.BATCH),
        (["batch_size", "batch_size", "batch_size"], Guess.BATCH),
        (["Batch", "batch_size"], Guess.BATCH),
        (["N", "N"], Guess.BATCH),
        (["B", "B"], Guess.BATCH),
        (["bs", "bs"], Guess.BATCH),
        (["T", "T"], Guess.OTHER),
        (["sequence", "sequence"], Guess.OTHER),
        (["seq_len", ""], Guess.OTHER),
        (["time", "time"], Guess.OTHER),
        (["timesteps", "timesteps"], Guess.OTHER),
        (["length", ""], Guess.OTHER),
        (["batch", "time"], Guess.OTHER),
        (["batch", "N"], Guess.OTHER),
        (["N", "B"], Guess.OTHER),
        (["rows", "columns"], Guess.OTHER),
        (["", ""], Guess.UNKNOWN),
        (["batch", ""], Guess.UNKNOWN),
        (["rows", "rows"], Guess.UNKNOWN),
        (["n", "n"], Guess.UNKNOWN),
        (["unk__1", "unk__2"], Guess.UNKNOWN),
        (["DynamicDimension.0", "p2o.DynamicDimension.1"], Guess.UNKNOWN),
        (["batch", "Add_dim_0"], Guess.UNKNOWN),
        (["batchnorm", "batchnorm"], Guess.UNKNOWN),
        ([], Guess.UNKNOWN),
    ],
)
def test_names_decide_where_there_are_any(names, found):
    """One name of a batch in all first places is a batch; time, or two names, are none; the rest is open."""
    assert guess(names) is found


@given(st.lists(st.sampled_from(["", "batch", "N", "T", "seq", "rows", "unk__3"]), max_size=6))
def test_a_batch_is_called_so_everywhere(names):
    """No order of the names changes what they say, and any that is missing or differs leaves no batch."""
    found = guess(names)
    assert found is guess(names[::-1])
    if found is Guess.BATCH:
        assert set(names) in ({"batch"}, {"N"})
    if {"T", "seq"} & set(names):
        assert found is Guess.OTHER
