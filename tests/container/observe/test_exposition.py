"""The text of a scrape is what Prometheus's own client writes."""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import generate_latest
from prometheus_client.core import GaugeMetricFamily, HistogramMetricFamily

from container.observe.exposition import family_head, histogram, labels_of, sample

LABELS = st.dictionaries(st.sampled_from(["model", "version", "_tag"]), st.text(), max_size=3)


def by_library(*families):
    """A text as the library writes it."""
    return generate_latest(SimpleNamespace(collect=lambda: families)).decode()


@given(LABELS, st.floats() | st.integers(0, 1 << 60), st.text())
def test_a_sample_is_written_as_by_the_library(labels, value, text):
    """Escapes, numbers and the order of labels."""
    family = GaugeMetricFamily("a_gauge", text)
    family.add_sample("a_gauge", labels, value)

    head = family_head("a_gauge", text, "gauge")

    assert head + sample("a_gauge", labels_of(labels), value) == by_library(family)


@pytest.mark.parametrize("labels", [{}, {"a": "b"}])
def test_a_histogram_is_written_as_by_the_library(labels):
    """Buckets are cumulative, and the last one has all."""
    family = HistogramMetricFamily("sizes", "Sizes", labels=list(labels))
    family.add_metric(list(labels.values()), [("1.0", 2), ("2.5", 2), ("1e+06", 5), ("+Inf", 9)], 12.5)

    head = family_head("sizes", "Sizes", "histogram")

    assert head + histogram("sizes", labels_of(labels), ((1, 2.5, 1e6), (2, 0, 3, 4), 12.5)) == by_library(family)
