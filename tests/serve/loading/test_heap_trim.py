"""Freed memory of models that have left goes back to the system, without a trim for each of them."""

from serve.loading.measuring import HeapTrim
from serve.threads import ThreadPool
from tests.waiting import eventually


def test_one_trim_for_all_models_that_left_since():
    """The first is trimmed for at once, those behind it share one; so do those that leave later."""
    trims = []
    with ThreadPool("trim", idle_seconds=0) as threads:
        trim = HeapTrim(threads, lambda: trims.append(1), seconds=0.2)
        trim.left()
        assert trims == [1]
        for _ in range(100):
            trim.left()
        eventually(lambda: len(trims) > 1, "the trim that they share")
        assert trims == [1, 1]


def test_a_trim_that_is_due_is_given_up_at_the_end():
    """Memory goes with the process then, whose end waits for none."""
    trims = []
    with ThreadPool("trim", idle_seconds=0) as threads:
        trim = HeapTrim(threads, lambda: trims.append(1), seconds=1000)
        trim.left()
        trim.left()
        trim.close()
    assert trims == [1]
