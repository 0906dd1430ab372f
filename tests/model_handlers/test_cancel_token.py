"""One token tells every wait of a load whether it is still wanted."""

import threading

import pytest

from model_handlers.errors import Kind, MmeError
from model_handlers.system.threads import NEVER, CancelToken


def test_a_wait_ends_with_what_it_waits_for():
    """It is asked again as long as it has nothing."""
    answers = iter([None, None, "lock"])

    assert NEVER.wait(lambda _: next(answers)) == "lock"


def test_a_wait_ends_when_its_load_is_cancelled():
    """Whatever it waits for never comes; the sentence names what was loaded."""
    taken, cancelled = threading.Lock(), threading.Event()
    token = CancelToken("model 'm'", cancelled.is_set)

    def held(seconds):
        cancelled.set()
        return taken.acquire(timeout=seconds) or None

    with taken, pytest.raises(MmeError, match="the load of model 'm' was cancelled") as raised:
        token.wait(held)
    assert raised.value.kind is Kind.CANCELLED


def test_a_pause_tells_whether_the_load_goes_on():
    """It lasts its time, or ends with the load."""
    assert NEVER.sleep(0.001)
    assert not CancelToken(cancelled=lambda: True).sleep(600)
