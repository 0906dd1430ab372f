"""What a program sees of the server's environment variables, and orders as packets."""

import errno

import pytest

from model_handlers.worker.fork_server import MAX_ORDER, ForkOrder, Program


@pytest.mark.parametrize(
    ("inherited", "seen"),
    [
        ({}, {"PATH": "/e/bin", "SET": "new"}),
        ({"PATH": ""}, {"PATH": "/e/bin", "SET": "new"}),
        ({"PATH": "/a:/b", "HOME": "/h"}, {"PATH": "/e/bin:/a:/b", "HOME": "/h", "SET": "new"}),
        ({"SET": "old", "GONE": "x"}, {"PATH": "/e/bin", "SET": "new"}),
    ],
)
def test_variables(inherited, seen):
    """Some are taken away, some are set, and search paths get a first place to look at; all others stay."""
    program = Program(("x",), variables={"SET": "new"}, removed=("GONE",), in_front={"PATH": "/e/bin"})

    assert program.environ(inherited) == seen


@pytest.mark.parametrize(
    "order",
    [
        ForkOrder("m_0_0", 4),
        ForkOrder("größe", 5, Program(("a", "b"), "/d", {"k": "v"}, ("r",), {"PATH": "/b"}, 10, speaks=True)),
    ],
)
def test_an_order_crosses(order):
    """What the fork server reads is what was ordered."""
    crossed = ForkOrder.of(order.packet())

    assert (crossed.name, crossed.fds) == (order.name, order.fds)
    assert bool(crossed.program) == bool(order.program)
    if order.program:
        assert crossed.program.environ({"r": "x"}) == order.program.environ({"r": "x"})
        assert list(crossed.program.arguments) == ["a", "b"]
        assert (crossed.program.directory, crossed.program.niceness, crossed.program.speaks) == ("/d", 10, True)


def test_an_order_is_bounded():
    """What does not go into one packet is not sent."""
    with pytest.raises(OSError, match="what it takes to start 'm'") as raised:
        ForkOrder("m", 4, Program(("x" * MAX_ORDER,))).packet()

    assert raised.value.errno == errno.E2BIG
