"""Metrics of Python models in the server's /metrics."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from tests.contract import models
from tests.contract.server import eventually
from tests.metric_text import families_of

CONFIG = """
backend: "python"
input { name: "N" data_type: TYPE_INT32 dims: [ 1 ] }
output { name: "OUT" data_type: TYPE_INT32 dims: [ 1 ] }
instance_group { count: 2 kind: KIND_CPU }
"""
MODEL = """
import os
import threading
import time

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        labels = {"model": args["model_name"]}
        Family = pb_utils.MetricFamily
        self.requests = Family("custom_requests_total", "Requests seen", Family.COUNTER).Metric(labels)
        self.plain = Family("custom_sum", "Sum of what was asked", Family.COUNTER).Metric(labels)
        self.sizes = Family("custom_sizes", "Sizes", Family.HISTOGRAM).Metric(labels, buckets=[1, 10, 100])
        self.level = Family("custom_level", "", Family.GAUGE).Metric(labels)
        self.level.increment(1)
        self.refused = ""
        try:
            Family("nv_inference_count", "forged", Family.COUNTER)
        except pb_utils.TritonModelException as error:
            self.refused = str(error)
        print("refused:", self.refused)

    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        number = int(request.inputs()[0].as_numpy()[0])
        self.requests.increment(1)
        self.plain.increment(number)
        self.sizes.observe(number)
        if number == 5:
            time.sleep(0.2)  # so that the other instance has something to do
        if number == 77:
            threading.Timer(0.1, self.plain.increment, [1000]).start()
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([os.getpid()], np.int32))])

    def finalize(self):
        self.plain.increment(1)
"""


@pytest.fixture
def server(serve, tmp_path):
    """A server whose repository has the models a and b, of two instances each, and one in the server's process."""
    for name, more in {"a": "", "b": "", "inline": INLINE}.items():
        models.lay_out(tmp_path / "models" / name, MODEL, CONFIG + more)
    return serve({"MME_MODEL_REPOSITORY": str(tmp_path / "models")})


INLINE = 'parameters { key: "MME_PLACEMENT" value { string_value: "inline" } }\n'


def ask(server, model, number):
    """The process that answered."""
    document = {"inputs": [{"name": "N", "shape": [1], "datatype": "INT32", "data": [number]}]}
    answer = server.ask("POST", f"/v2/models/{model}/infer", document)
    assert answer.status == 200, answer.body
    return answer.json["outputs"][0]["data"][0]


def samples(server):
    """Every sample of the models' own families, and the families' types."""
    families = families_of(server.ask("GET", "/metrics").body.decode())
    mine = [family for family in families if family.name.startswith("custom")]
    return (
        {(s.name, *sorted(s.labels.items())): s.value for family in mine for s in family.samples},
        {family.name: (family.type, family.documentation) for family in mine},
    )


def shows(server, name, *values, **labels):
    """Wait until a sample has one of these values: processes tell what they count five times a second."""
    eventually(lambda: server.metric(name, **labels) in values, f"{name} to be one of {values}")


def test_what_models_count_is_shown_and_instances_add_up(server):
    """Of whichever instance; each model under its own labels, with its families' kinds."""
    asked = 0
    with ThreadPoolExecutor(2) as clients:
        while len(set(clients.map(lambda _: ask(server, "a", 5), range(2)))) < 2:
            asked += 2
    asked += 2
    ask(server, "a", 50)
    ask(server, "a", 500)
    ask(server, "b", 1)
    ask(server, "inline", 10)
    shows(server, "custom_sizes_count", asked + 2, model="a")
    shows(server, "custom_requests_total", 1, model="b")
    shows(server, "custom_level", 2, model="a")
    told, kinds = samples(server)

    assert kinds == {
        "custom_requests": ("counter", "Requests seen"),
        "custom_sum": ("unknown", "Sum of what was asked"),
        "custom_sizes": ("histogram", "Sizes"),
        "custom_level": ("gauge", "A gauge of a model"),
    }
    a = ("model", "a")
    assert told[("custom_requests_total", a)] == asked + 2
    assert told[("custom_sum", a)] == 5 * asked + 550
    assert [told[("custom_sizes_bucket", ("le", le), a)] for le in ("1.0", "10.0", "100.0", "+Inf")] == [
        0,
        asked,
        asked + 1,
        asked + 2,
    ]
    assert (told[("custom_sizes_count", a)], told[("custom_sizes_sum", a)]) == (asked + 2, 5 * asked + 550)
    assert told[("custom_level", a)] == 2
    assert told[("custom_requests_total", ("model", "b"))] == 1
    assert told[("custom_sum", ("model", "inline"))] == 10
    assert told[("custom_level", ("model", "inline"))] in {1, 2}  # one object for both lanes


def test_the_servers_names_are_refused_in_the_model(server):
    """It reads why, and the server's count is its own."""
    ask(server, "a", 1)

    eventually(lambda: "names that begin with mme_, nv_inference_" in server.log, "what the model printed")
    assert server.metric("nv_inference_count", model="a") == 1


def test_what_is_counted_between_batches_is_shown_soon(server):
    """By a thread of the model, when nobody asks it anything any more."""
    ask(server, "a", 77)

    shows(server, "custom_sum", 1077, model="a")


def test_counts_outlive_deaths_and_unloads_and_gauges_do_not(server):
    """The counters go on from where they stood; what is counted in finalize counts."""
    pid = ask(server, "a", 3)
    shows(server, "custom_level", 2, model="a")
    shows(server, "custom_sum", 3, model="a")
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: not psutil.pid_exists(pid), "the end of the process")
    assert pid not in {ask(server, "a", 3), ask(server, "a", 3)}
    shows(server, "custom_requests_total", 3, model="a")
    shows(server, "custom_sum", 9, model="a")
    shows(server, "custom_level", 1, 2, model="a")  # the dead one may not be back yet

    assert server.ask("POST", "/v2/repository/models/a/unload").status == 200
    told, _ = samples(server)
    assert told[("custom_requests_total", ("model", "a"))] == 3
    assert told[("custom_sum", ("model", "a"))] in {9 + 1, 9 + 2}
    assert ("custom_level", ("model", "a")) not in told
    ask(server, "a", 3)
    shows(server, "custom_requests_total", 4, model="a")
