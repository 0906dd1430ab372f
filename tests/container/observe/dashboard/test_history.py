"""The ring of the last minutes: what a second is, and what is kept of it."""

from container.observe.dashboard import COLUMNS, SECONDS, History, Totals, difference

MS = 1_000_000


def test_a_sample_is_the_difference_of_two_readings():
    """Counts are subtracted, times are means over the second's requests, the rest is how things stand."""
    before = Totals(
        hits=10, misses=2, succeeded=12, failed=1, total_ns=120 * MS, queue_ns=20 * MS, evictions=1, loads=3
    )
    after = Totals(15, 3, 16, 3, 140 * MS, 24 * MS, 2, 5, queued=7, cold=1, resident=4, host=400, device=40)

    assert difference(before, after) == {
        "hits": 5,
        "misses": 1,
        "succeeded": 4,
        "failed": 2,
        "queue_ms": 1.0,
        "compute_ms": 4.0,
        "evictions": 1,
        "loads": 2,
        "queued": 7,
        "cold": 1,
        "resident": 4,
        "host": 400,
        "device": 40,
    }


def test_a_second_without_requests_has_no_latency():
    """None is not 0 ms."""
    sample = difference(Totals(succeeded=5, total_ns=MS), Totals(succeeded=5, total_ns=MS))
    assert (sample["queue_ms"], sample["compute_ms"]) == (None, None)


def test_a_model_that_was_forgotten_is_no_negative_count():
    """Its counters are gone from the sums."""
    sample = difference(Totals(hits=9, misses=9, succeeded=9, failed=9, total_ns=9), Totals(misses=1))
    assert [sample[name] for name in COLUMNS[:6]] == [0, 0, 0, 0, None, None]


def test_the_oldest_seconds_are_forgotten():
    """However long it runs, SECONDS samples are kept; the first reading only begins."""
    history = History()
    assert set(map(len, history.columns().values())) == {0}
    for number in range(SECONDS + 5):
        history.add(Totals(hits=number * number))

    columns = history.columns()
    assert set(columns) == set(COLUMNS)
    assert set(map(len, columns.values())) == {SECONDS}
    assert columns["hits"] == [2 * number + 1 for number in range(4, SECONDS + 4)]
