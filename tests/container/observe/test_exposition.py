"""The text of a scrape is what Prometheus's own client writes, and writing it leaves room for others."""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import generate_latest
from prometheus_client.core import GaugeMetricFamily, HistogramMetricFamily

from container.observe.exposition import Exposition, labels_of

LABELS = st.dictionaries(st.sampled_from(["model", "version", "_tag"]), st.text(), max_size=3)


def written(write):
    """The text of what is written into an exposition."""
    out = Exposition(rest=lambda _: None)
    write(out)
    return b"".join(out.text())


def by_library(*families):
    """The same, as the library writes it."""
    return generate_latest(SimpleNamespace(collect=lambda: families))


@given(LABELS, st.floats() | st.integers(0, 1 << 60), st.text())
def test_a_sample_is_written_as_by_the_library(labels, value, text):
    """Escapes, numbers and the order of labels."""
    family = GaugeMetricFamily("a_gauge", text)
    family.add_sample("a_gauge", labels, value)

    def write(out):
        out.family("a_gauge", text, "gauge")
        out.sample("a_gauge", labels_of(labels), value)

    assert written(write) == by_library(family)


@pytest.mark.parametrize("labels", [{}, {"a": "b"}])
def test_a_histogram_is_written_as_by_the_library(labels):
    """Buckets are cumulative, and the last one has all."""
    family = HistogramMetricFamily("sizes", "Sizes", labels=list(labels))
    family.add_metric(list(labels.values()), [("1.0", 2), ("2.5", 2), ("1e+06", 5), ("+Inf", 9)], 12.5)

    def write(out):
        out.family("sizes", "Sizes", "histogram")
        out.histogram("sizes", labels_of(labels), (1, 2.5, 1e6), (2, 0, 3, 4), 12.5)

    assert written(write) == by_library(family)


def test_a_long_text_is_written_with_rests():
    """One after each half of a millisecond, which is five looks at this clock."""
    now, rests = 0.0, []

    def clock():
        nonlocal now
        now += 2**-13
        return now

    out = Exposition(clock, rests.append)
    for number in range(60):
        out.sample("m", "", number)

    assert rests == [0.0005] * (60 // 5)
    assert len(b"".join(out.text()).splitlines()) == 60
