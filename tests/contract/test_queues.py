"""How a server queues, batches and answers requests by what configurations ask for, seen from outside.

One server has a model for each; what was executed together is read from statistics.
"""

from __future__ import annotations

import json
import os
import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import numpy as np
import pytest

from tests.contract import models
from tests.contract.server import PATIENCE, Server, eventually

LEVELS = """
max_batch_size: 8
dynamic_batching {
  preferred_batch_size: 3 max_queue_delay_microseconds: 600000000
  priority_levels: 2 default_priority_level: 2
  priority_queue_policy { key: 1 value { default_timeout_microseconds: 600000000 allow_timeout_override: true } }
  priority_queue_policy { key: 2 value { max_queue_size: 1 } }
}
"""


WARM = """
backend: "python"
max_batch_size: 4
input { name: "X" data_type: TYPE_FP32 dims: 4 }
output { name: "Y" data_type: TYPE_FP32 dims: 4 }
instance_group { count: 2 kind: KIND_CPU }
model_warmup { name: "recorded" batch_size: 3 count: 2
  inputs { key: "X" value { data_type: TYPE_FP32 dims: 4 input_data_file: "x" } } }
"""

HISTOGRAM = """
model_metrics { metric_control { metric_identifier { family: "nv_inference_first_response_histogram_ms" }
  histogram_options { buckets: [ 0.5, 60000 ] } } }
"""

CACHED = """
backend: "python"
input { name: "X" data_type: TYPE_FP32 dims: [ -1, 4 ] }
output { name: "Y" data_type: TYPE_FP32 dims: [ -1, 4 ] }
instance_group { kind: KIND_CPU }
response_cache { enable: true }
"""

RAGGED = """
max_batch_size: 8
input { name: "X" data_type: TYPE_FP32 dims: -1 allow_ragged_batch: true }
output [ { name: "DOUBLE" data_type: TYPE_FP32 dims: -1 }, { name: "COUNT" data_type: TYPE_FP32 dims: 1 },
  { name: "SUM" data_type: TYPE_FP32 dims: 1 }, { name: "START" data_type: TYPE_FP32 dims: 1 },
  { name: "LARGEST" data_type: TYPE_FP32 dims: 1 }, { name: "SHAPE" data_type: TYPE_FP32 dims: 1 } ]
batch_input [
  { kind: BATCH_ELEMENT_COUNT target_name: "count" data_type: TYPE_FP32 source_input: "X" },
  { kind: BATCH_ACCUMULATED_ELEMENT_COUNT target_name: "sum" data_type: TYPE_FP32 source_input: "X" },
  { kind: BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO target_name: "starts" data_type: TYPE_FP32 source_input: "X" },
  { kind: BATCH_MAX_ELEMENT_COUNT_AS_SHAPE target_name: "largest" data_type: TYPE_FP32 source_input: "X" },
  { kind: BATCH_ITEM_SHAPE target_name: "shape" data_type: TYPE_FP32 source_input: "X" },
  { kind: BATCH_ITEM_SHAPE_FLATTEN target_name: "flat_shape" data_type: TYPE_FP32 source_input: "X" } ]
batch_output { target_name: "DOUBLE" kind: BATCH_SCATTER_WITH_INPUT_SHAPE source_input: "X" }
dynamic_batching { preferred_batch_size: 2 max_queue_delay_microseconds: 600000000 }
"""

SENDING = """
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            x = request.inputs()[0].as_numpy()
            for number in range(int(x[0, 0])):
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("Y", x)]))
            if x[0, 1]:
                error = pb_utils.TritonError("no more")
                sender.send(pb_utils.InferenceResponse(error=error))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
DECOUPLED = """
backend: "python"
input { name: "X" data_type: TYPE_FP32 dims: [ -1, 4 ] }
output { name: "Y" data_type: TYPE_FP32 dims: [ -1, 4 ] }
instance_group { kind: KIND_CPU }
model_transaction_policy { decoupled: true }
"""

SOURCE = """
backend: "python"
max_batch_size: 8
input { name: "X" data_type: TYPE_FP32 dims: 4 }
output { name: "Y" data_type: TYPE_FP32 dims: 4 }
instance_group { kind: KIND_CPU }
model_transaction_policy { decoupled: true }
"""
# Waits a moment for others to join, which never come through an ensemble that lets in one.
PATIENT = "max_batch_size: 8\ndynamic_batching { max_queue_delay_microseconds: 20000 }\n"
ENSEMBLE = """
platform: "ensemble"
max_batch_size: 8
input {{ name: "X" data_type: TYPE_FP32 dims: 4 }}
output {{ name: "Y" data_type: TYPE_FP32 dims: 4 }}
ensemble_scheduling {{ {steps} }}
"""
STEP = """
step {{ model_name: "{model}" input_map {{ key: "X" value: "{x}" }} output_map {{ key: "Y" value: "{y}" }} }}
"""

LIMITED = "instance_group { count: 2 kind: KIND_CPU rate_limiter { resources { name: 'R' count: %d } priority: 2 } }"

COUNTING = """
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    seen = 0

    def execute(self, requests):
        answers = []
        for request in requests:
            x = request.inputs()[0].as_numpy()
            if x[0, 0] == 13:
                raise ValueError("thirteen")
            self.seen += x[0, 0]
            answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("Y", np.full_like(x, self.seen))]))
        return answers
"""
SLOW = "import time" + COUNTING.replace("answers = []", "answers = time.sleep(0.1) or []")


def lay_out_python(folder, config, warmup=0, code=COUNTING):
    """Code, by default a model that adds up the first numbers that it was ever sent, and refuses 13; and its recorded data."""
    models.lay_out(folder, code, config)
    (folder / "warmup").mkdir()
    (folder / "warmup" / "x").write_bytes(np.array([warmup] * 4, "<f4").tobytes())


def lay_out_chain(folder, *chain, most=0):
    """An ensemble of models one behind the other, each of which has `most` requests at a time, 0 for any number."""
    between = ["X", *(f"behind_{place}" for place in range(1, len(chain))), "Y"]
    steps = [STEP.format(model=model, x=between[place], y=between[place + 1]) for place, model in enumerate(chain)]
    limit = f"max_inflight_requests: {most}" if most else ""
    models.lay_out(folder, None, ENSEMBLE.format(steps=limit + "".join(steps)))


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    """Where the models of this file lie."""
    return tmp_path_factory.mktemp("queues") / "repository"


@pytest.fixture(scope="module")
def server(repository):
    """A server with all models of this file."""
    root = repository.parent
    models.lay_out(repository / "levels", models.plus(1), LEVELS)
    models.lay_out(repository / "ragged", models.ragged(), RAGGED)
    models.lay_out(repository / "limited", models.plus(1), LIMITED % 2)
    models.lay_out(repository / "greedy", models.plus(1), LIMITED % 3)
    lay_out_python(repository / "warm", WARM, 1)
    lay_out_python(repository / "source", SOURCE + HISTOGRAM, code=SENDING)
    models.lay_out(repository / "one", models.plus(1), f"max_batch_size: 8 dynamic_batching {{ }} {HISTOGRAM}")
    models.lay_out(repository / "patient", models.plus(1), PATIENT)
    models.lay_out(repository / "calm", models.plus(1), PATIENT)
    lay_out_chain(repository / "flow", "source", "one", most=1)
    lay_out_chain(repository / "narrow", "patient", most=1)
    lay_out_chain(repository / "pair", "calm", "calm", most=1)
    lay_out_chain(repository / "twice", "pair", "pair")
    lay_out_python(repository / "sending", DECOUPLED, code=SENDING)
    lay_out_python(repository / "hot", WARM, 13)
    lay_out_python(repository / "slow", WARM, 1, SLOW)
    lay_out_python(repository / "cached", CACHED, 1)
    told = 'batch_input { target_name: "N" data_type: TYPE_INT32 source_input: "X" }'
    lay_out_python(repository / "told", f"{CACHED} {told}", 1)
    environ = {
        "MME_MODEL_REPOSITORY": str(repository),
        "MME_ALLOW_LOAD_OVERRIDES": "true",
        "MME_LOAD_MODEL": "levels,warm,cached,ragged,sending,flow,narrow,pair,twice",
        "MME_PING_MODE": "ready",
        "MME_RATE_LIMIT": "execution_count",
        "MME_RATE_LIMIT_RESOURCE": "r:2",
    }
    with Server(root / "server", environ) as running:
        yield running


def ask(server, model, body=models.ONE, **parameters):
    """The answer to a request with these parameters."""
    return server.ask("POST", f"/v2/models/{model}/infer", {**body, "parameters": parameters})


def statistics(server, model):
    """The statistics of a model's only version."""
    (row,) = server.ask("GET", f"/v2/models/{model}/stats").json["model_stats"]
    return row


def sizes(server, model):
    """Batch size → executions."""
    return {row["batch_size"]: row["compute_infer"]["count"] for row in statistics(server, model)["batch_stats"]}


def queued(server, model):
    """How many requests wait."""
    return server.metric("nv_inference_pending_request_count", model=model)


def test_priority_levels(server):
    """Each level has its own limits, a request its own level and timeout, and a batch is of all levels."""
    with ThreadPoolExecutor(3) as pool:
        first = pool.submit(ask, server, "levels")
        eventually(lambda: queued(server, "levels") == 1, "a request to be queued")
        full = ask(server, "levels", priority=2)
        late = ask(server, "levels", priority=1, timeout=1000)
        others = [pool.submit(ask, server, "levels", priority=1) for _ in range(2)]
        answers = [future.result() for future in (first, *others)]

    assert (full.status, late.status) == (503, 503)
    assert full.error.startswith("Exceeds maximum queue size: model 'levels' has 1 requests waiting")
    assert late.error.startswith("Request timeout expired")
    assert [models.y(answer.json) for answer in answers] == [[2, 3, 4, 5]] * 3
    assert sizes(server, "levels") == {3: 1}


def test_a_model_is_warmed_up_before_it_is_ready(server):
    """Every instance executes the samples, batched, before its first request; nothing of it is counted."""
    with ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(lambda _: ask(server, "warm"), range(2)))

    assert {models.y(answer.json)[0] for answer in answers} <= {7, 8}
    assert (statistics(server, "warm")["inference_count"], sizes(server, "warm")) == (2, {1: 2})
    assert server.log.count("is running warmup sample 'recorded'") == 2


def test_a_warm_up_that_fails_fails_the_load(server):
    """The error names model, instance and sample, and the model is not served."""
    answer = server.ask("POST", "/v2/repository/models/hot/load")

    assert answer.status == 400
    assert "model 'hot' instance hot_0_0: failed to run warmup sample 'recorded': " in answer.error
    assert "thirteen" in answer.error
    assert server.ask("GET", "/v2/models/hot/ready").status == 400


def test_a_slow_model_executes_every_request_of_its_warm_up_once(server):
    """Those behind the first are given back by its process, which takes long; the model adds up what it is sent."""
    answer = server.ask("POST", "/v2/repository/models/slow/load")

    assert answer.status == 200, answer.body
    assert models.y(ask(server, "slow").json)[0] == 2 * 3 + 1
    assert server.ask("POST", "/v2/repository/models/slow/unload").status == 200


def test_requests_that_come_again_are_answered_from_the_cache(server):
    """The model adds up what it is sent, so its answers tell what reached it; what else a client says counts too."""
    answers = [ask(server, "cached", id=1), ask(server, "cached", id=1), ask(server, "cached", id=2)]
    answers.append(ask(server, "cached", models.x([13, 0, 0, 0]), id=1))
    answers.append(ask(server, "cached", models.x([13, 0, 0, 0]), id=1))

    assert [models.y(answer.json)[0] for answer in answers[:3]] == [1, 1, 2]
    assert [answer.status for answer in answers[3:]] == [500, 500]
    row = statistics(server, "cached")
    counts = {what: duration["count"] for what, duration in row["inference_stats"].items()}
    assert (counts["cache_hit"], counts["cache_miss"]) == (1, 2)
    assert (counts["success"], counts["queue"], counts["compute_infer"], counts["fail"]) == (3, 3, 2, 2)
    assert (row["inference_count"], row["execution_count"]) == (2, 4)  # those that fail are executed as well
    for what in ("num_hits", "num_misses", "hit_duration", "miss_duration"):
        assert server.metric(f"nv_cache_{what}_per_model", model="cached") > 0
        assert f'nv_cache_{what}_per_model{{model="levels"' not in server.ask("GET", "/metrics").body.decode()
    assert server.metric("mme_response_cache_used_bytes") > 0


def test_a_reload_forgets_what_was_cached(server, repository):
    """The model may be another one now."""
    before = ask(server, "cached", models.x([5, 0, 0, 0]))
    os.utime(repository / "cached" / "config.pbtxt")  # which says the same
    assert server.ask("POST", "/v2/repository/models/cached/load").status == 200
    assert models.y(ask(server, "cached", models.x([5, 0, 0, 0])).json) == models.y(before.json)
    os.utime(repository / "cached" / "1" / "model.py")
    assert server.ask("POST", "/v2/repository/models/cached/load").status == 200
    after = ask(server, "cached", models.x([5, 0, 0, 0]))

    assert models.y(before.json)[0] > models.y(after.json)[0] == 5
    assert server.ask("POST", "/v2/repository/models/cached/unload").status == 200


def test_requests_of_different_shapes_share_a_ragged_batch(server):
    """Their elements are one row to the model, which is told how they lie in it; each gets its own back."""

    def row(*numbers):
        tensor = {"name": "X", "shape": [1, len(numbers)], "datatype": "FP32", "data": numbers}
        return {"inputs": [tensor]}

    def outputs(answer):
        assert answer.status == 200, answer.body
        return {output["name"]: (output["shape"], output["data"]) for output in answer.json["outputs"]}

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(ask, server, "ragged", row(1, 2, 3))
        eventually(lambda: queued(server, "ragged") == 1, "a request to be queued")
        second = pool.submit(ask, server, "ragged", row(4, 5))
        three, two = outputs(first.result()), outputs(second.result())

    assert sizes(server, "ragged") == {2: 1}
    assert (three["DOUBLE"], two["DOUBLE"]) == (([1, 3], [2, 4, 6]), ([1, 2], [8, 10]))
    for name, of_three, of_two in (("COUNT", 3, 2), ("SUM", 3, 5), ("START", 0, 3), ("LARGEST", 3, 3), ("SHAPE", 6, 4)):
        assert (three[name], two[name]) == (([1, 1], [of_three]), ([1, 1], [of_two])), name


def test_a_python_model_is_told_nothing_of_batches(server):
    """It gets its requests one by one, so that a configuration that wants to tell it something is refused."""
    answer = server.ask("POST", "/v2/repository/models/told/load")

    assert "config.pbtxt field 'batch_input' is not honoured" in answer.error


@pytest.mark.parametrize(
    ("field", "said"),
    [
        ("batch_output", {"batch_output": [{"target_name": ["Y"], "source_input": ["X"]}]}),
        (
            "optimization.execution_accelerators",
            {"optimization": {"execution_accelerators": {"cpu_execution_accelerator": [{"name": "openvino"}]}}},
        ),
        ("model_operations.op_library_filename", {"model_operations": {"op_library_filename": ["x.so"]}}),
    ],
)
def test_what_a_python_model_makes_nothing_of_is_refused_by_name(server, field, said):
    """Triton overlooks it."""
    tensors = {
        way: [{"name": name, "data_type": "TYPE_FP32", "dims": [4]}] for way, name in (("input", "X"), ("output", "Y"))
    }
    config = json.dumps({"backend": "python", **tensors, **said})

    answer = server.ask("POST", "/v2/repository/models/told/load", {"parameters": {"config": config}})

    assert f"config.pbtxt field '{field}' is not honoured" in answer.error


def test_instances_wait_for_what_they_share(server):
    """Two instances that need all there is answer everybody, one after the other; one that needs more is not loaded."""
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda _: ask(server, "limited"), range(20)))
    greedy = server.ask("POST", "/v2/repository/models/greedy/load")

    assert [models.y(answer.json) for answer in answers] == [[2, 3, 4, 5]] * 20
    assert 'Resource count for "r" is limited to 2' in greedy.error
    limiter = server.ask("GET", "/v2/models/limited/config").json["instance_group"][0]["rate_limiter"]
    assert limiter == {"resources": [{"name": "R", "global": False, "count": 2}], "priority": 2}


def test_responses_of_a_decoupled_model_are_counted_by_their_place(server):
    """Requests of two responses, of one and an error, and of none: each place has counts of its own."""
    for numbers in ([2, 0, 0, 0], [1, 1, 0, 0], [0, 0, 0, 0]):
        server.ask("POST", "/models/sending/invoke", models.x(numbers))
    row = statistics(server, "sending")
    counts = {
        place: {what: each["count"] for what, each in durations.items() if each["count"]}
        for place, durations in row["response_stats"].items()
    }

    assert counts == {
        "0": {"compute_infer": 2, "compute_output": 2, "success": 2, "empty_response": 1},
        "1": {"compute_infer": 2, "compute_output": 2, "success": 1, "fail": 1},
        "2": {"empty_response": 2},  # the last word of the first two, behind the error as well
    }
    assert row["inference_stats"]["success"]["count"] == 3  # an error that others may follow is one of its responses
    assert row["inference_stats"]["fail"]["count"] == 0


def test_an_ensemble_holds_back_what_is_too_much(server):
    """With one response on its way at a time all arrive, and the model behind them executes them one by one."""
    answer = server.ask("POST", "/models/flow/invoke", models.x([6, 0, 0, 0]))
    lines = [json.loads(line) for line in answer.body.splitlines()]

    assert [models.y(line) for line in lines] == [[7, 1, 1, 1]] * 6
    assert sizes(server, "one") == {1: 6}
    name = "nv_inference_first_response_histogram_ms"
    for model, requests in (("source", 1), ("one", 6)):
        assert server.metric(f"{name}_count", model=model) == requests
        assert server.metric(f"{name}_bucket", model=model, le="60000.0") == requests
    assert f'{name}_count{{model="levels"' not in server.ask("GET", "/metrics").body.decode()


def test_an_ensemble_lets_so_many_requests_into_a_step(server):
    """With one at a time all are answered, one after the other, though they come together and the model would batch them."""
    with ThreadPoolExecutor(6) as clients:
        answers = list(clients.map(lambda n: ask(server, "narrow", models.x([n, 0, 0, 0])), range(6)))

    assert [models.y(answer.json) for answer in answers] == [[n + 1, 1, 1, 1] for n in range(6)]
    assert sizes(server, "patient") == {1: 6}


def test_a_request_that_comes_of_an_answer_takes_nobodys_place_with_it(server):
    """One that its client sent behind it, or the next step of an ensemble around this one, is a request like any other."""
    body = json.dumps(models.x([0] * 4)).encode()
    head = f"POST /v2/models/pair/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    with ExitStack() as connections:
        clients = [
            connections.enter_context(socket.create_connection(("127.0.0.1", server.port), PATIENCE)) for _ in range(3)
        ]
        for client in clients:
            client.sendall((head + body) * 4)
        for client in clients:
            received = b""
            while received.count(b'"data":[2.0,2.0,2.0,2.0]') < 4:
                more = client.recv(1 << 16)
                assert more, received
                received += more
    with ThreadPoolExecutor(4) as clients:
        answers = list(clients.map(lambda n: ask(server, "twice", models.x([n] * 4)), range(8)))
    assert [models.y(answer.json) for answer in answers] == [[n + 4] * 4 for n in range(8)]
