"""What is counted of a model's requests, and the form in which the statistics extension shows it."""

import time

import pytest

from model_handlers.config.model_config import MetricControl, ModelConfig
from model_handlers.errors import Kind
from serve.request import Timings
from serve.statistics import FAILURE_REASONS, FIRST_RESPONSES, Duration, ModelStats, Outcome, TargetStats

TIMINGS = Timings(start=0, compute_input=10, compute_infer=200, compute_output=30)


def test_a_duration_counts_and_sums():
    """Occurrences may be added one by one or several with their sum."""
    duration = Duration()
    duration.add(5)
    duration.add(30, 3)

    assert duration.as_dict() == {"count": 4, "ns": 35}


def test_a_new_model_has_counted_nothing():
    """Every field of the extension is there from the start, with zeros."""
    zero = {"count": 0, "ns": 0}
    fields = (
        "success",
        "fail",
        "queue",
        "compute_input",
        "compute_infer",
        "compute_output",
        "cache_hit",
        "cache_miss",
    )

    assert ModelStats().as_dict("m", "3") == {
        "name": "m",
        "version": "3",
        "last_inference": 0,
        "inference_count": 0,
        "execution_count": 0,
        "inference_stats": dict.fromkeys(fields, zero),
        "batch_stats": [],
        "memory_usage": [],
        "response_stats": {},
    }


def test_success_counts_requests_and_inferences_count_elements():
    """One execution of 3 requests with 7 elements: 3 successes, 7 inferences, 1 execution; each request saw all of it."""
    stats = ModelStats()
    before = time.time_ns() // 1_000_000
    stats.executed(7, TIMINGS)
    stats.succeeded(3, 7, waited_ns=60, total_ns=900, timings=TIMINGS)
    shown = stats.as_dict("m", "1")

    assert (shown["inference_count"], shown["execution_count"]) == (7, 1)
    assert before <= shown["last_inference"] <= time.time_ns() // 1_000_000
    assert shown["inference_stats"]["success"] == {"count": 3, "ns": 900}
    assert shown["inference_stats"]["queue"] == {"count": 3, "ns": 60}
    assert shown["inference_stats"]["compute_input"] == {"count": 3, "ns": 30}
    assert shown["inference_stats"]["compute_infer"] == {"count": 3, "ns": 600}
    assert shown["inference_stats"]["compute_output"] == {"count": 3, "ns": 90}
    assert shown["inference_stats"]["fail"]["count"] == 0


def test_an_execution_that_fails_is_the_last_one_too():
    """When a model was executed last is told whatever became of it."""
    stats = ModelStats()
    before = time.time_ns() // 1_000_000
    stats.executed(1, TIMINGS)
    stats.failed(Kind.EXECUTION_FAILED, 100)

    assert (stats.execution_count, stats.inference_count) == (1, 0)
    assert before <= stats.last_inference_ms <= time.time_ns() // 1_000_000


def test_batches_are_counted_by_their_size():
    """Each executed batch size has an entry of its own, in order, with the times of its executions."""
    stats = ModelStats()
    for size in (8, 2, 8):
        stats.executed(size, TIMINGS)

    assert stats.as_dict("m", "1")["batch_stats"] == [
        {
            "batch_size": size,
            "compute_input": {"count": count, "ns": 10 * count},
            "compute_infer": {"count": count, "ns": 200 * count},
            "compute_output": {"count": count, "ns": 30 * count},
        }
        for size, count in ((2, 1), (8, 2))
    ]


def test_responses_of_a_decoupled_model_are_counted_by_their_place():
    """What was computed for each, and what became of it; the news that there is no more costs time, and computes none."""
    stats = ModelStats()
    for place, outcome, infer, output in (
        (0, Outcome.SUCCESS, 10, 1),
        (0, Outcome.FAIL, 20, 0),
        (1, Outcome.EMPTY, 5, 0),
        (1, Outcome.CANCEL, 7, 0),
    ):
        stats.responded(place, outcome, infer, output)
    none, first, second = ({"count": 0, "ns": 0}, *stats.as_dict("m", "1")["response_stats"].values())

    assert first == {
        "compute_infer": {"count": 2, "ns": 30},
        "compute_output": {"count": 2, "ns": 1},
        "success": {"count": 1, "ns": 11},
        "fail": {"count": 1, "ns": 20},
        "empty_response": none,
        "cancel": none,
    }
    assert (second["empty_response"], second["cancel"]) == ({"count": 1, "ns": 5}, {"count": 1, "ns": 7})
    assert second["compute_infer"] == second["compute_output"] == second["success"] == second["fail"] == none


def test_a_model_that_sends_without_end_does_not_fill_the_memory():
    """The responses behind the thousandth are counted together with it."""
    stats = ModelStats()
    for place in range(2000):
        stats.responded(place, Outcome.SUCCESS, 1)

    assert len(stats.responses) == 1000
    assert stats.responses[999].outcomes[Outcome.SUCCESS].count == 1001


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (Kind.QUEUE_FULL, "REJECTED"),
        (Kind.QUEUE_TIMEOUT, "REJECTED"),
        (Kind.UNAVAILABLE, "REJECTED"),
        (Kind.CANCELLED, "CANCELED"),
        (Kind.EXECUTION_FAILED, "BACKEND"),
        (Kind.OUT_OF_MEMORY, "BACKEND"),
        (Kind.INVALID_ARGUMENT, "OTHER"),
        (Kind.INTERNAL, "OTHER"),
    ],
)
def test_a_failure_has_one_of_tritons_reasons(kind, reason):
    """A failed request counts once, with the time it took, under the reason of its kind."""
    stats = ModelStats()
    stats.failed(kind, 40)
    stats.failed(kind, 2)

    assert stats.as_dict("m", "1")["inference_stats"]["fail"] == {"count": 2, "ns": 42}
    assert stats.failures == {reason: 2}
    assert stats.inference_count == stats.last_inference_ms == 0


def test_every_kind_of_error_has_a_reason():
    """Whatever goes wrong is counted under one of the four names that the metrics show."""
    stats = ModelStats()
    for kind in Kind:
        stats.failed(kind, 0)

    assert set(stats.failures) == set(FAILURE_REASONS)
    assert stats.failures.total() == len(Kind)


def test_models_do_not_share_counters():
    """What is counted for one model or target is not counted for another."""
    ModelStats().executed(1, TIMINGS)
    ModelStats().failed(Kind.INTERNAL, 1)
    TargetStats().load.add(5)

    assert ModelStats() == ModelStats()
    assert ModelStats().as_dict("m", "1")["batch_stats"] == []
    assert TargetStats().load.count == 0


def test_first_responses_are_kept_as_the_configuration_says(caplog):
    """In the buckets of the metric that there is; a reload without changes keeps the counts, another metric is told."""
    stats = ModelStats()
    stats.began_to_answer(1)
    config = ModelConfig(
        "m", metric_control=(MetricControl(FIRST_RESPONSES, (1.0, 10.0)), MetricControl("other", (1.0,)))
    )
    stats.keep_first_responses(config)
    for ms in (0.5, 1, 5, 50):
        stats.began_to_answer(int(ms * 1e6))
    stats.keep_first_responses(config)

    assert (stats.first_response.bounds, stats.first_response.counts) == ((0.001, 0.01), [2, 1, 1])
    assert stats.first_response.total == Duration(4, 56_500_000)
    assert "model_metrics 'other' is no histogram that is kept" in caplog.text
    stats.keep_first_responses(ModelConfig("m"))
    assert stats.first_response is None
