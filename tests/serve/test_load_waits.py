"""Who waits for the load of whom: everybody is found, and nobody is kept."""

import pytest

from serve.load_api import WaitGraph

CHAINS = {
    "nobody": ([], ()),
    "one": ([(("a",), "m")], ("a",)),
    "a chain": ([(("a", "b"), "m")], ("a", "b")),
    "over loads": ([(("a", "b"), "c"), (("c",), "m")], ("a", "b", "c")),
    "several": ([(("a",), "m"), (("b",), "m")], ("b", "a")),
    "some twice": ([(("a", "a"), "m"), (("a",), "m")], ("a",)),
    "of others": ([(("a",), "b"), (("b",), "c")], ()),
}


@pytest.mark.parametrize("case", CHAINS)
def test_who_waits_is_found(case):
    """For the load, or for one whose load waits for it; the outermost first."""
    chains, behind = CHAINS[case]
    waits = WaitGraph()
    contexts = [waits.waiting(chain, name) for chain, name in chains]
    for context in contexts:
        context.__enter__()
    assert waits.behind("m") == behind
    for context in contexts:
        context.__exit__(None, None, None)
    assert waits.behind("m") == ()
    assert repr(waits) == "<WaitGraph {}>"
