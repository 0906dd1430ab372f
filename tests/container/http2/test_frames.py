"""Frames as bytes."""

import pytest
from hpack import Decoder
from hypothesis import given
from hypothesis import strategies as st

from container.http2 import frames


@given(st.integers(0, 2**24 - 1), st.integers(0, 255), st.integers(0, 255), st.integers(0, 2**31 - 1))
def test_a_head_says_what_follows(length, kind, flags, stream):
    """Nine bytes."""
    head = frames.frame_head(length, kind, flags, stream)
    assert head == length.to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big")


@given(st.lists(st.tuples(st.binary(min_size=1, max_size=300), st.binary(max_size=20_000)), max_size=4))
def test_every_reader_reads_our_headers(fields):
    """Of any length, and nothing of them is to be remembered."""
    decoder = Decoder(1 << 20)
    found = decoder.decode(frames.header_block(fields), raw=True)
    assert [(bytes(name), bytes(value)) for name, value in found] == fields
    assert not decoder.header_table.dynamic_entries


@pytest.mark.parametrize("size", [0, 126, 127, 128, 254, 255, 16_510, 16_511, 3_000_000])
def test_lengths_at_their_edges(size):
    """Where a length takes one more byte."""
    fields = [(b"n", b"v" * size)]
    assert [tuple(each) for each in Decoder(1 << 23).decode(frames.header_block(fields), raw=True)] == fields


def test_settings():
    """What one side writes the other reads; of one that is told twice the last."""
    wanted = {frames.INITIAL_WINDOW_SIZE: 5, frames.MAX_FRAME_SIZE: 1 << 14, 99: 2**32 - 1}
    payload = frames.settings(wanted)[frames.HEAD :]
    assert frames.settings_of(payload) == wanted
    assert frames.settings_of(payload + frames.settings({99: 1})[frames.HEAD :])[99] == 1
