"""Batches that are begun before the last has ended: each gets its own answer, whatever becomes of the others."""

import numpy as np
import pytest
from isolated_models import Echo, Misbehaves

from model_handlers.errors import Kind, MmeError
from tests.waiting import eventually

MIB = 1 << 20


def asked(deed, x):
    """The inputs that have the misbehaving model do one thing."""
    return {"do": np.array([deed.encode()], object), "x": x}


def numbered(count, size=4):
    """Arrays that can be told apart."""
    return [np.full(size, number, "f4") for number in range(count)]


@pytest.mark.parametrize("size", [4, 10 * MIB // 4], ids=["small", "10 MiB"])
def test_each_gets_its_own(start, size):
    """Three that are on their way at once, in memory that none shares with another; results stay what they were."""
    handler = start(Echo)
    results = []
    for first in range(0, 6, 3):
        arrays = numbered(6, size)[first : first + 3]
        begun = [handler.begin({"x": array}, ["y", "copy"]) for array in arrays]
        results += [handler.finish(each) for each in begun]

    for number, (y, copy) in enumerate(results):
        assert (y == number).all()
        assert (copy == number).all()


def test_a_model_error_is_one_batchs(start):
    """Those behind it are executed by the same process."""
    handler = start(Misbehaves)
    x, y, z = numbered(3)
    begun = [
        handler.begin(asked(deed, each), ["y"])
        for deed, each in zip(["nothing", "raise", "nothing"], (x, y, z), strict=True)
    ]
    first = handler.child.pid

    assert (handler.finish(begun[0])[0] == x).all()
    with pytest.raises(MmeError):
        handler.finish(begun[1])
    assert (handler.finish(begun[2])[0] == z).all()
    assert handler.child.pid == first


@pytest.mark.parametrize("deed", ["sigkill", "nonsense", "os._exit"])
def test_a_death_is_told_to_the_batch_that_died_of_it(start, deed):
    """Those before it have their answers, and those behind it are executed by the next process."""
    handler = start(Misbehaves)
    x, y, z = numbered(3)
    before, dies, behind = (
        handler.begin(asked(name, each), ["y"]) for name, each in (("nothing", x), (deed, y), ("nothing", z))
    )
    first = handler.child.pid

    assert (handler.finish(before)[0] == x).all()
    with pytest.raises(MmeError) as caught:
        handler.finish(dies)
    assert caught.value.kind is Kind.EXECUTION_FAILED
    last = handler.begin(asked("nothing", x), ["y"])
    assert (handler.finish(behind)[0] == z).all()
    assert (handler.finish(last)[0] == x).all()
    assert handler.child.pid != first


def test_a_death_that_the_loop_has_heard_of_is_told_to_the_batch_that_died_of_it(start):
    """While nothing waits for an answer, it is left to what waits for the first: each is answered as above."""
    handler = start(Misbehaves)
    x, y, z = numbered(3)
    before, dies, behind = (
        handler.begin(asked(name, each), ["y"]) for name, each in (("nothing", x), ("sigkill", y), ("nothing", z))
    )
    eventually(lambda: handler.opened.is_lost)
    last = handler.begin(asked("nothing", x), ["y"])

    assert last.segment is None
    assert (handler.finish(before)[0] == x).all()
    with pytest.raises(MmeError, match="SIGKILL while it executed a batch"):
        handler.finish(dies)
    assert (handler.finish(behind)[0] == z).all()
    assert (handler.finish(last)[0] == x).all()


def test_a_batch_that_cannot_be_sent_ahead_is_sent_in_its_turn(start, monkeypatch):
    """And none overtakes it."""
    handler = start(Misbehaves)
    x, y, z = numbered(3)
    first = handler.begin(asked("nothing", x), ["y"])
    monkeypatch.setattr("model_handlers.worker.process._AT_ONCE", 0)
    second = handler.begin(asked("nothing", y), ["y"])
    monkeypatch.undo()
    third = handler.begin(asked("nothing", z), ["y"])

    assert second.segment is None
    for begun, expected in ((first, x), (second, y), (third, z)):
        assert (handler.finish(begun)[0] == expected).all()


def test_each_has_its_own_time(start):
    """A batch that waits for another has its whole time left when that has ended; what hangs is ended."""
    handler = start(Misbehaves, MME_EXECUTION_TIMEOUT="2")
    x, y, z = numbered(3)
    hangs, behind = (handler.begin(asked(deed, each), ["y"]) for deed, each in (("hang", x), ("nothing", y)))

    with pytest.raises(MmeError, match="gave no answer within 2 s"):
        handler.finish(hangs)
    assert (handler.finish(behind)[0] == y).all()
    assert (handler.execute(asked("nothing", z), ["y"])[0] == z).all()
