"""Quantiles of what requests take, and what else of latencies is kept where somebody asks for it."""

from __future__ import annotations

import math

import pytest

from model_handlers.config.model_config import MetricControl, ModelConfig
from serve.options import DEFAULT_LATENCIES, Latencies
from serve.request import Timings
from serve.statistics import Summary, new_stats

TIMINGS = Timings(start=0, compute_input=10, compute_infer=200, compute_output=30)


def test_quantiles_are_those_of_the_last_minute():
    """Of a hundred values; count and sum are of all that ever were."""
    summary = Summary()
    for ns in range(100, 0, -1):
        summary.add(ns, now=0.0)
    assert summary.quantiles((0, 0.5, 0.99, 1), now=60.0) == [1, 51, 100, 100]
    summary.add(7, now=61.0)
    assert summary.quantiles((0.5,), now=61.0) == [7]
    assert all(map(math.isnan, summary.quantiles((0.5, 0.9), now=200.0)))
    assert (summary.count, summary.ns) == (101, 5057)
    assert not summary._recent, "they would add up, of hundreds of models"


def test_only_so_many_values_are_remembered():
    """The newest, however many there are in a minute."""
    summary = Summary()
    for ns in range(10_000):
        summary.add(ns, now=0.0)
    assert summary.quantiles((0,), now=0.0) == [10_000 - 4096]
    assert summary.count == 10_000


def test_nothing_is_kept_unless_it_is_asked_for():
    """As a server starts by default."""
    stats = new_stats(DEFAULT_LATENCIES)
    stats.keep_first_responses(ModelConfig("m"))
    assert (stats.summaries, stats.first_response) == (None, None)
    stats.succeeded(1, 1, 1, 2, TIMINGS)
    stats.summarise(1, 2, TIMINGS)
    stats.hit(5)
    stats.missed(5)
    assert (stats.cache_hit.count, stats.cache_miss.ns) == (1, 5)


def test_every_request_is_in_the_summaries_once():
    """One by one, or of a batch whose requests are told apart; a hit waits no time."""
    stats = new_stats(Latencies(summaries=True))
    stats.succeeded(1, 4, 5, 300, TIMINGS)
    stats.succeeded(2, 8, 10, 700, TIMINGS)
    for waited, total in ((4, 340), (6, 360)):
        stats.summarise(waited, total, TIMINGS)
    stats.hit(50)
    stats.missed(20)
    kept = stats.summaries
    assert (kept.request.count, kept.request.ns) == (4, 300 + 700 + 50)
    assert (kept.queue.count, kept.queue.ns) == (4, 15)
    assert [summary.ns for summary in (kept.compute_input, kept.compute_infer, kept.compute_output)] == [30, 600, 90]
    assert (kept.cache_hit.ns, kept.cache_miss.ns) == (50, 20)


@pytest.mark.parametrize(
    ("asks", "own", "bounds"),
    [
        (False, (), None),
        (False, (10.0,), (0.01,)),
        (True, (), (0.1, 0.5, 2.0, 5.0)),
        (True, (10.0,), (0.01,)),
    ],
)
def test_first_responses_have_tritons_buckets_or_the_models(asks, own, bounds):
    """The operator asks for them of every model, a configuration of its own."""
    stats = new_stats(Latencies(histograms=asks))
    histograms = {"nv_inference_first_response_histogram_ms": own} if own else {}
    stats.keep_first_responses(
        ModelConfig("m", metric_control=tuple(MetricControl(*each) for each in histograms.items()))
    )
    assert (stats.first_response.bounds if stats.first_response else None) == bounds
