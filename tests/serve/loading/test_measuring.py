"""Loads into one process take turns at being measured."""

import threading

import pytest

from model_handlers.base import Footprint
from model_handlers.errors import Kind, MmeError
from model_handlers.system.threads import CancelToken
from serve.loading.measuring import Scales


def test_what_a_load_takes_is_measured():
    """Bytes that are there after it and were not before; what it returns is handed on, what it raises too."""
    scales = Scales()
    block, taken = scales.weigh(lambda: bytearray(b"x" * 50_000_000))
    assert len(block) <= taken.host <= 2 * len(block)
    assert isinstance(taken, Footprint)
    with pytest.raises(ZeroDivisionError):
        scales.weigh(lambda: 1 // 0)
    assert scales.weigh(lambda: "next")[0] == "next"


def test_who_waits_for_a_turn_may_give_up():
    """A load that nobody wants any more does not wait until it is its turn."""
    scales, begun, go = Scales(), threading.Event(), threading.Event()
    first = threading.Thread(target=scales.weigh, args=(lambda: (begun.set(), go.wait(60)),))
    first.start()
    begun.wait(60)
    with pytest.raises(MmeError) as caught:
        scales.weigh(lambda: pytest.fail("it was not its turn"), CancelToken(cancelled=lambda: True))
    assert caught.value.kind is Kind.CANCELLED
    go.set()
    first.join()
