"""Numbers that models count: one metric a name and its labels, whoever counts, from wherever."""

import gc
import json
import threading

import pytest

from model_handlers.errors import Kind, MmeError
from model_handlers.metrics import MetricKind, ModelMetrics
from model_handlers.worker import events
from model_handlers.worker.channel import MetricReceiver
from model_handlers.worker.wire import encode_message
from tests.calls import calls_of

COUNTER, GAUGE, HISTOGRAM = MetricKind.COUNTER, MetricKind.GAUGE, MetricKind.HISTOGRAM


def counter(metrics, name="hits", **labels):
    """A counter of that name."""
    return metrics.metric(metrics.family(name, "so many", COUNTER), labels)


def gauge(metrics, name="level", owner=None, **labels):
    """A gauge of that name."""
    return metrics.metric(metrics.family(name, "so high", GAUGE), labels, owner=owner)


def histogram(metrics, name="sizes", buckets=(1.0, 10.0), **labels):
    """A histogram of that name."""
    return metrics.metric(metrics.family(name, "so large", HISTOGRAM), labels, buckets)


def standing(metrics):
    """Where everything stands."""
    return {
        (family.name, *sorted(reading.labels.items())): reading.value
        if family.kind is not HISTOGRAM
        else (list(reading.counts), reading.value)
        for family, readings in metrics.read()
        for reading in readings
    }


def refused(action, *arguments, **keywords):
    """The sentence that refuses this."""
    with pytest.raises(MmeError) as raised:
        action(*arguments, **keywords)
    assert raised.value.kind is Kind.INVALID_ARGUMENT
    return raised.value.message


# -- one process -------------------------------------------------------------------------------------------------------


def test_equal_names_and_labels_are_one_metric():
    """Whatever the order of the labels, and whoever asks."""
    metrics = ModelMetrics()
    counter(metrics, a="1", b="2").add(2)
    counter(metrics, b="2", a="1").add(0.5)
    counter(metrics).add(7)
    gauge(metrics).set(3)
    gauge(metrics).add(-1)
    for value in (0.5, 1, 5, 50):
        histogram(metrics, model="m").observe(value)

    assert standing(metrics) == {
        ("hits",): 7,
        ("hits", ("a", "1"), ("b", "2")): 2.5,
        ("level",): 2,
        ("sizes", ("model", "m")): ([2, 1, 1], 56.5),
    }


BAD_NAMES = ["", "1st", "a-b", "a b", "ä", "a\n", None, 3, "x" * 1001, "\ud800"]


@pytest.mark.parametrize("name", BAD_NAMES, ids=ascii)
def test_names_that_prometheus_cannot_read_are_refused(name):
    """Of families and of labels alike."""
    metrics = ModelMetrics()
    assert refused(metrics.family, name, "", COUNTER)
    family = metrics.family("fine", "", COUNTER)
    assert refused(metrics.metric, family, {name: "x"})
    assert standing(metrics) == {}


@pytest.mark.parametrize("value", [None, 3, "x" * 1001, "\ud800"], ids=ascii)
def test_values_of_labels_are_texts(value):
    """Of characters that everybody can be told of."""
    metrics = ModelMetrics()
    assert "must be texts" in refused(counter, metrics, a=value)


@pytest.mark.parametrize(
    "name", ["mme_hits", "nv_inference_count", "nv_gpu_utilization", "nv_cache_num_hits_per_model"]
)
def test_the_servers_own_names_are_refused(name):
    """So that a model can neither hide nor forge what the server tells."""
    assert "are the server's own" in refused(ModelMetrics().family, name, "", COUNTER)


def test_what_does_not_go_together_is_refused():
    """Another kind, other buckets, names that would show the same series, labels that histograms have themselves."""
    metrics = ModelMetrics()
    counter(metrics)
    histogram(metrics)
    assert "is a counter already" in refused(metrics.family, "hits", "", GAUGE)
    assert "has buckets [1.0, 10.0] already" in refused(histogram, metrics, buckets=(1.0, 2.0))
    assert "would show 'sizes_sum', which family 'sizes' has" in refused(metrics.family, "sizes_sum", "", COUNTER)
    metrics.family("times_count", "", GAUGE)
    assert "would show 'times_count'" in refused(metrics.family, "times", "", HISTOGRAM)
    assert "'le' is that of" in refused(histogram, metrics, le="1")
    assert "begin with a digit or '__'" in refused(counter, metrics, __name__="x")
    assert "at most 32" in refused(counter, metrics, **{f"l{n}": "" for n in range(33)})


@pytest.mark.parametrize(
    ("buckets", "words"),
    [
        ((), "histograms need buckets"),
        ((2.0, 1.0), "must ascend"),
        ((1.0, 1.0), "must ascend"),
        ((1.0, float("inf")), "must ascend"),
        ((float("nan"),), "must ascend"),
        (tuple(map(float, range(201))), "at most 200"),
    ],
    ids=str,
)
def test_buckets_that_are_none(buckets, words):
    """Bounds are finite and ascend; the last bucket is everybody's."""
    assert words in refused(histogram, ModelMetrics(), buckets=buckets)
    assert "others have none" in refused(ModelMetrics().metric, ModelMetrics().family("x", "", COUNTER), {}, (1.0,))


def test_there_is_room_for_so_many():
    """A label of ever new values does not grow without end; those that there are go on counting."""
    metrics = ModelMetrics()
    for number in range(9999):
        counter(metrics, n=str(number)).add(1)
    assert "labels are for a few values" in refused(counter, metrics, n="x")
    assert "labels are for a few values" in refused(counter, metrics, "another")
    first = counter(metrics, n="0")
    first.add(1)

    assert first.value == 2
    assert len(standing(metrics)) == 9999


def test_threads_count_together():
    """Nothing is lost."""
    metrics = ModelMetrics()

    def count():
        for number in range(5000):
            counter(metrics).add(1)
            gauge(metrics).add(-1)
            histogram(metrics).observe(number % 20)

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    told = standing(metrics)
    assert told[("hits",)] == 20_000
    assert told[("level",)] == -20_000
    assert sum(told[("sizes",)][0]) == 20_000


def test_metrics_are_read_one_by_one():
    """Thousands of them are written by an event loop, which does other things in between; models count meanwhile."""
    metrics = ModelMetrics()
    first, second = (counter(metrics, n=n) for n in "ab")
    ((_, readings),) = metrics.read()
    assert next(readings).value == 0
    first.add(1)
    second.add(2)
    counter(metrics, n="c")

    assert [reading.value for reading in readings] == [2]


def test_code_that_counts_when_it_is_collected_waits_for_nothing():
    """A collection may come in the middle of counting."""
    metrics = ModelMetrics()

    class Counts:
        def __init__(self):
            self.cycle = self

        def __del__(self):
            counter(metrics, "collected").add(1)

    before = gc.get_threshold()
    gc.set_threshold(1)
    try:
        for number in range(2000):
            Counts()
            counter(metrics, n=str(number % 7)).add(1)
            metrics.changes()
    finally:
        gc.set_threshold(*before)
    gc.collect()

    assert standing(metrics)[("collected",)] == 2000


# -- several processes -------------------------------------------------------------------------------------------------


class Process:
    """A process of a model, and what the server knows of it."""

    def __init__(self, server, model="m"):
        self.metrics = ModelMetrics()
        self.counted = MetricReceiver(server, model)

    def tell(self):
        """Its changes arrive."""
        self.counted.take(self.metrics.changes())


def test_counts_of_processes_add_up():
    """Counters and histograms of several instances, told now and then."""
    server = ModelMetrics()
    processes = [Process(server) for _ in range(3)]
    for round_ in range(4):
        for number, process in enumerate(processes):
            counter(process.metrics, model="m").add(number + 0.5)
            histogram(process.metrics).observe(number * 7)
            if round_ % 2:
                process.tell()

    assert standing(server) == {("hits", ("model", "m")): 4 * 4.5, ("sizes",): ([4, 4, 4], 4 * 21)}
    assert [process.metrics.changes() for process in processes] == [[]] * 3


def test_the_last_word_about_a_gauge_counts_and_what_raises_it_adds_up():
    """As if there were one gauge for all processes."""
    server = ModelMetrics()
    first, second = Process(server), Process(server)
    for process in (first, second):
        gauge(process.metrics).add(2)
        process.tell()
    assert standing(server) == {("level",): 4}
    gauge(first.metrics).set(10)
    gauge(first.metrics).add(1)
    first.tell()
    gauge(second.metrics).add(-3)
    second.tell()
    assert standing(server) == {("level",): 8}
    gauge(second.metrics).set(float("nan"))
    second.tell()
    assert standing(server)[("level",)] != standing(server)[("level",)]
    gauge(first.metrics).set(float("-inf"))
    first.tell()

    assert standing(server) == {("level",): float("-inf")}


def test_what_is_told_again_counts_once():
    """A process tells where its metrics stand, and the server adds what they grew by."""
    server = ModelMetrics()
    process = Process(server)
    for _ in range(2):
        counter(process.metrics).add(0)
        gauge(process.metrics).add(0)
        histogram(process.metrics).observe(0)
        process.tell()
    counter(process.metrics).add(2)
    gauge(process.metrics).set(3)
    histogram(process.metrics).observe(7)
    told = process.metrics.changes()
    for _ in range(3):
        process.counted.take(told)

    assert standing(server) == {("hits",): 2, ("level",): 3, ("sizes",): ([2, 1, 0], 7)}


def test_metrics_of_any_length_cross_in_frames_that_may_cross(monkeypatch):
    """As many as a process may have, each as long as it may be, are more than one message holds."""
    process, server = ModelMetrics(), ModelMetrics()
    monkeypatch.setattr(events, "METRICS", process)
    labels = {f"{number:02}".rjust(1000, "l"): "\x01" * 1000 for number in range(31)}
    for number in range(100):
        histogram(process, "h" * 990, tuple(range(200)), **labels, n=str(number)).observe(7)
    counted, frames = MetricReceiver(server, "m"), []

    class Channel:
        def send(self, message):
            frames.append(encode_message(message))
            counted.take(json.loads(frames[-1][4:])["metrics"])

    sender = events.MetricSender(Channel())
    assert len(frames) == 2
    histogram(process, "h" * 990, tuple(range(200)), **labels, n="0").observe(1)
    sender.tell()

    assert sorted(sum(counts) for counts, _ in standing(server).values()) == [1] * 99 + [2]


def test_what_a_process_counted_outlives_it_and_its_gauges_do_not():
    """Unless another one tells about the same gauge."""
    server = ModelMetrics()
    first, second = Process(server), Process(server)
    for process in (first, second):
        gauge(process.metrics, "both").set(1)
        counter(process.metrics).add(1)
        process.tell()
    gauge(first.metrics, "alone").set(1)
    first.tell()
    gauge(second.metrics, "both").add(10)
    second.tell()
    gauge(first.metrics, "both").add(100)
    first.tell()
    assert standing(server) == {("both",): 111, ("alone",): 1, ("hits",): 2}
    first.counted.close()  # and what it raised the other one by goes with it
    assert standing(server) == {("both",): 11, ("hits",): 2}
    second.counted.close()
    assert standing(server) == {("hits",): 2}

    third = Process(server)
    gauge(third.metrics, "both").add(5)
    counter(third.metrics).add(1)
    third.tell()
    assert standing(server) == {("both",): 5, ("hits",): 3}


def test_what_no_number_can_undo_goes_with_the_process_that_said_it():
    """Infinity that is raised cannot be taken off again."""
    server = ModelMetrics()
    first, second = Process(server), Process(server)
    gauge(first.metrics).set(2)
    gauge(first.metrics).add(0.1)
    first.tell()
    for value in (1e30, float("inf")):
        gauge(second.metrics).add(value)
        second.tell()
    assert standing(server) == {("level",): float("inf")}
    second.counted.close()

    assert standing(server) == {("level",): 2.1}


def test_gauges_that_are_gone_are_kept_nowhere():
    """However often a process comes and goes."""
    server = ModelMetrics()
    for number in range(3):
        process = Process(server)
        gauge(process.metrics, n=str(number)).set(1)
        counter(process.metrics).add(1)
        process.tell()
        process.counted.close()

    assert standing(server) == {("hits",): 3}
    assert len(server.changes()) == 1


def test_the_end_of_a_process_costs_the_same_however_many_others_have_gauges():
    """Only its own gauges are looked at."""

    def calls(processes):
        server = ModelMetrics()
        for number in range(processes):
            gauge(server, owner=number, n=str(number)).set(1)
        gauge(server, owner="last", n="last").set(1)
        return calls_of(lambda: server.release("last"))

    assert calls(300) == calls(3)


def test_metrics_that_the_server_refuses_are_not_shown(caplog):
    """Another model's name of another kind, and the thousandth label; a few lines of the log tell, and all else counts."""
    server = ModelMetrics()
    first, second = Process(server, "first"), Process(server, "second")
    counter(first.metrics, "mine").add(1)
    first.tell()
    gauge(second.metrics, "mine").set(5)
    counter(second.metrics).add(1)
    second.tell()
    assert standing(server) == {("mine",): 1, ("hits",): 1}
    assert [(record.target_model, "is a counter already" in record.message) for record in caplog.records] == [
        ("second", True)
    ]
    for number in range(2000):
        counter(second.metrics, "many", n=str(number)).add(1)
    second.tell()

    assert len(standing(server)) == 1000
    assert len(caplog.records) == 10


def new(kind, value=0.0, more=0, *, name="a", labels=None, buckets=()):
    """A process's first word on its metric 1."""
    return [1, value, more, [name, "", kind, {} if labels is None else labels, list(buckets)]]


NONSENSE = [
    3,
    None,
    [1],
    "x",
    [[1]],
    [[1, 1.0, 0]],
    [[[], 1.0, 0]],
    [[1, 1.0, 0, []]],
    [[1, 1.0, 0, 7]],
    [new("meter")],
    [new("counter", labels=3)],
    [new("histogram", buckets=["x"])],
    [new("counter", -1)],
    [new("counter", "x")],
    [new("counter", "inf")],
    [new("counter", "nan")],
    [new("counter", 10**400)],
    [new("counter", 2), [1, 1, 0]],
    [new("histogram", buckets=[1])],
    [new("histogram", 1, [1], buckets=[1])],
    [new("histogram", 1, [1, -1], buckets=[1])],
    [new("histogram", 1, [1, 0.5], buckets=[1])],
    [new("histogram", 1, ["1", "2"], buckets=[1])],
    [new("histogram", 1, [3, 4], buckets=[1]), [1, 1, [3, 3]]],
]


@pytest.mark.parametrize("telling", NONSENSE, ids=lambda telling: str(telling)[:60])
def test_nonsense_is_an_error_of_who_tells_it(telling):
    """One of those that end a process; what stood before stands."""
    server = ModelMetrics()
    counter(server).add(1)
    with pytest.raises((LookupError, TypeError, ValueError, OverflowError)):
        MetricReceiver(server, "m").take(telling)

    assert standing(server)[("hits",)] == 1


def test_a_process_cannot_make_the_server_grow_by_numbers():
    """However many metrics it makes up."""
    counted = MetricReceiver(ModelMetrics(), "m")
    described = ["-", "", "counter", {}, []]
    counted.take([[number, 0, 0, described] for number in range(20_000)])
    with pytest.raises(ValueError, match="more than 20000 metrics"):
        counted.take([[20_000, 0, 0, described]])
