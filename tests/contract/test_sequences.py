"""Sequences behind the real server: ONNX models that accumulate in an implicit state, and Python models.

sums, full   direct, rows of 4: X → Y, the sum of what its sequence has sent since START; `full` waits for three rows
apart        oldest, in a process of its own
brief        oldest: the same, with one candidate that may be silent for 0.3 s
states       oldest: the same, two candidates; the sums begin at 100, from a file
python       oldest: a Python model that keeps a sum per id
completes    oldest: the same, whose size of a batch config.pbtxt does not tell
passed_on    an ensemble of `sums`; `renamed` has another model before it, which names another sequence
loop, decoupled  Python models that count down from X, one iteration each
"""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import tritonclient.http
from tritonclient.utils import InferenceServerException

from tests.contract.models import lay_out
from tests.contract.sequence_models import (
    COMPLETES,
    CONTROLS,
    ENSEMBLE,
    FIRST,
    IMPLICIT,
    ITERATIVE,
    NAMING,
    ONE,
    PYTHON,
    TENSORS,
    accumulator,
)
from tests.contract.server import Server, eventually, post

STARTLESS = (
    "inference request for sequence {} to model 'sums' must specify the START flag on the first request of the sequence"
)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A server of the models above."""
    repository = tmp_path_factory.mktemp("repository")
    onnx = accumulator()
    controls = CONTROLS % "TYPE_UINT64"
    one = "instance_group { count: 1 kind: KIND_CPU }\n"
    direct = "direct { max_queue_delay_microseconds: 600000000 minimum_slot_utilization: 0.75 }"
    patient = "max_sequence_idle_microseconds: 60000000"  # clients on a busy machine are silent for a while
    lay_out(
        repository / "sums",
        onnx,
        f"max_batch_size: 4\n{one}{TENSORS}sequence_batching {{ {controls} {IMPLICIT % ''} {patient} }}",
    )
    lay_out(
        repository / "apart",
        onnx,
        f"max_batch_size: 4\n{one}sequence_batching {{ oldest {{ }} {controls} {IMPLICIT % ''} {patient} }}\n"
        'parameters { key: "MME_PLACEMENT" value { string_value: "process" } }',
    )
    lay_out(
        repository / "full",
        onnx,
        f"max_batch_size: 4\n{one}sequence_batching {{ {direct} {controls} {IMPLICIT % ''} {patient} }}",
    )
    lay_out(
        repository / "brief",
        onnx,
        f"{one}sequence_batching {{ oldest {{ max_candidate_sequences: 1 }} {controls} {IMPLICIT % ''} "
        "max_sequence_idle_microseconds: 300000 }\n"
        'model_warmup { name: "one" batch_size: 1 '
        'inputs { key: "X" value { data_type: TYPE_FP32 dims: [ 1 ] zero_data: true } } '
        'inputs { key: "START" value { data_type: TYPE_FP32 dims: [ 1 ] random_data: true } } }',
    )
    lay_out(
        repository / "states",
        onnx,
        f"max_batch_size: 4\n{one}{TENSORS}"
        'output { name: "SUM_OUT" data_type: TYPE_FP32 dims: [ 1 ] }'
        f"sequence_batching {{ oldest {{ max_candidate_sequences: 2 }} {controls} {patient} "
        + IMPLICIT % 'initial_state { name: "hundred" data_type: TYPE_FP32 dims: [ 1 ] data_file: "hundred" }'
        + "}",
    )
    (repository / "states" / "initial_state").mkdir()
    (repository / "states" / "initial_state" / "hundred").write_bytes(np.float32(100).tobytes())
    lay_out(
        repository / "python",
        PYTHON,
        f'backend: "python"\nmax_batch_size: 4\n{TENSORS}instance_group {{ count: 2 kind: KIND_CPU }}\n'
        f"sequence_batching {{ oldest {{ max_candidate_sequences: 8 }} {CONTROLS % 'TYPE_STRING'} {patient} }}",
    )
    lay_out(
        repository / "completes",
        COMPLETES,
        f'backend: "python"\n{one}sequence_batching {{ oldest {{ }} {CONTROLS % "TYPE_STRING"} {patient} }}',
    )
    for name, more in (("loop", ""), ("decoupled", "model_transaction_policy { decoupled: true }\n")):
        lay_out(
            repository / name,
            ITERATIVE,
            f'backend: "python"\nmax_batch_size: 4\n{TENSORS}{one}{more}'
            f"sequence_batching {{ iterative_sequence: true {patient} }}",
        )
    lay_out(
        repository / "naming",
        NAMING,
        f'backend: "python"\nmax_batch_size: 1\n{ONE}{one}',
    )
    for name, config in (("passed_on", {"first": "", "x": "X"}), ("renamed", {"first": FIRST, "x": "named"})):
        lay_out(repository / name, None, ENSEMBLE.format(**config))
    environ = {"MME_MODEL_REPOSITORY": str(repository), "MME_MEMORY_BUDGET": "2GiB", "MME_PING_MODE": "ready"}
    environ["MME_DRAIN_SECONDS"] = "2"  # for those who wait for a slot that nobody gives back
    with Server(tmp_path_factory.mktemp("server"), environ) as server:
        yield server


@pytest.fixture(scope="module")
def client(server):
    """Triton's own client."""
    with tritonclient.http.InferenceServerClient(server.address, concurrency=16) as client:
        yield client


def infer(server, model, value, sequence_id, **flags):
    """One request of a sequence, by a client of its own, as Triton's belong to one thread."""
    x = tritonclient.http.InferInput("X", [1, 1], "FP32")
    x.set_data_from_numpy(np.array([[value]], np.float32))
    with tritonclient.http.InferenceServerClient(server.address) as client:
        return client.infer(model, [x], sequence_id=sequence_id, **flags)


def step(server, model, value, sequence_id, **flags):
    """The same: (Y, TOLD)."""
    answer = infer(server, model, value, sequence_id, **flags)
    return float(answer.as_numpy("Y")[0, 0]), answer.as_numpy("TOLD")[0].tolist()


def run(server, model, values, sequence_id):
    """A whole sequence: all Ys."""
    last = len(values) - 1
    return [
        step(server, model, value, sequence_id, sequence_start=index == 0, sequence_end=index == last)[0]
        for index, value in enumerate(values)
    ]


def refused(server, *args, **flags):
    """Why a step is not taken."""
    with pytest.raises(InferenceServerException) as caught:
        step(server, *args, **flags)
    return caught.value.status(), caught.value.message()


@pytest.mark.parametrize("model", ["sums", "apart"])
def test_a_sequence_adds_up(server, model):
    """What the model keeps comes back with the next request, and is forgotten with the next START."""
    assert run(server, model, [1, 2, 3], 7) == [1, 3, 6]
    assert run(server, model, [5, 5], 7) == [5, 10]


def test_a_model_is_told_of_start_end_and_id(server):
    """Each control in its own type and values; READY where the row is somebody's."""
    one = step(server, "sums", 1, 2**63 - 1, sequence_start=True)
    two = step(server, "sums", 1, 2**63 - 1)
    three = step(server, "sums", 1, 2**63 - 1, sequence_end=True)

    assert [told for _, told in (one, two, three)] == [
        [1, 1, 0, 2**63 - 1],
        [0, 1, 0, 2**63 - 1],
        [0, 1, 1, 2**63 - 1],
    ]


def test_sequences_do_not_mix(server):
    """Many at a time, more than there are slots."""
    values = {number: [number * 10 + k for k in range(5)] for number in range(1, 13)}
    with ThreadPoolExecutor(12) as clients:
        sums = dict(zip(values, clients.map(lambda n: run(server, "sums", values[n], n), values), strict=True))

    assert sums == {number: np.cumsum(each).tolist() for number, each in values.items()}


def test_the_direct_strategy_fills_up_with_rows_of_nobody(server, client):
    """One of four slots is silent: the other three make a batch of four rows, and three answers."""
    start, end = {"sequence_start": True}, {"sequence_end": True}

    def together(*steps):
        with ThreadPoolExecutor(3) as clients:
            told = [clients.submit(step, server, "full", value, number, **flags) for value, number, flags in steps]
            return [each.result() for each in told]

    assert [y for y, _ in together((1, 1, start), (2, 2, start), (3, 3, start))] == [1, 2, 3]
    before = client.get_inference_statistics("full")["model_stats"][0]
    assert [y for y, _ in together((1, 1, {}), (1, 3, {}), (4, 4, start))] == [2, 4, 4]
    after = client.get_inference_statistics("full")["model_stats"][0]

    assert after["execution_count"] - before["execution_count"] == 1
    assert after["inference_count"] - before["inference_count"] == 3
    assert [row["batch_size"] for row in after["batch_stats"]] == [3, 4]
    assert together((1, 1, end), (1, 2, end), (1, 4, end))[1] == (3, [0, 1, 1, 2])


def test_a_completed_configuration_has_only_what_clients_send(client):
    """Neither controls nor states are among the inputs and outputs that the graph gives."""
    metadata = client.get_model_metadata("full")

    assert [tensor["name"] for tensor in metadata["inputs"]] == ["X"]
    assert [tensor["name"] for tensor in metadata["outputs"]] == ["Y", "TOLD"]
    assert "dynamic_batching" not in client.get_model_config("full")


def test_a_state_begins_with_its_file_and_may_be_seen(server):
    """A state that is an output, too, is sent to who asks for it."""
    assert run(server, "states", [1, 2], 9) == [101, 103]
    wanted = [tritonclient.http.InferRequestedOutput("SUM_OUT")]
    answer = infer(server, "states", 4, 9, outputs=wanted, sequence_start=True, sequence_end=True)

    assert answer.as_numpy("SUM_OUT").tolist() == [[104.0]]
    assert [output["name"] for output in answer.get_response()["outputs"]] == ["SUM_OUT"]


def test_a_python_model_is_told_as_well(server):
    """Controls are inputs beside the client's; ids may be texts; each sequence stays with its instance."""
    names = [f"customer-{number}" for number in range(6)]
    with ThreadPoolExecutor(6) as clients:
        sums = list(clients.map(lambda name: run(server, "python", [1, 2, 3], name), names))

    assert sums == [[1, 3, 6]] * 6


def test_candidates_are_as_many_as_the_model_says_that_it_batches(server):
    """Where nothing else is said: the second sequence does not wait for the end of the first."""
    assert [step(server, "completes", value, name, sequence_start=True)[0] for name, value in (("a", 1), ("b", 2))] == [
        1,
        2,
    ]

    assert [step(server, "completes", 3, name, sequence_end=True)[0] for name in "ab"] == [4, 5]


def test_a_python_model_has_a_request_executed_until_it_is_done(server, client):
    """One response, after as many executions as the model asked for; no id, no END, and the slot is free again."""
    before = client.get_inference_statistics("loop")["model_stats"][0]
    for _ in range(5):  # more than there are slots
        y, told = step(server, "loop", 3, 0)
        assert (y, told[:3]) == (0, [0, 0, 1])
    after = client.get_inference_statistics("loop")["model_stats"][0]

    assert after["execution_count"] - before["execution_count"] == 15
    assert after["inference_count"] - before["inference_count"] == 15
    counted = {
        what: d["count"] - before["inference_stats"][what]["count"] for what, d in after["inference_stats"].items()
    }
    assert (counted["success"], counted["queue"], counted["compute_infer"]) == (5, 15, 15)


def test_a_sequence_of_iterations_leaves_its_slot_when_it_has_its_answer(server):
    """Though it has an id, never says that it ends, and is not idle for long: others have their turn at once."""
    for name in range(20, 30):  # more than there are slots
        assert step(server, "loop", 2, name, sequence_start=True)[0] == 0

    assert refused(server, "loop", 2, 20)[1] == STARTLESS.format(20).replace("sums", "loop")


def test_a_decoupled_model_answers_in_every_iteration(server):
    """As language models do: a response each time, and others get their turns in between."""

    def ask(number):
        body = {"inputs": [{"name": "X", "datatype": "FP32", "shape": [1, 1], "data": [number]}]}
        answer = server.ask("POST", "/models/decoupled/invoke", body, Content_Type="application/json")
        lines = [json.loads(line) for line in answer.body.decode().splitlines()]
        return [line["outputs"][0]["data"][0] for line in lines]

    with ThreadPoolExecutor(4) as clients:
        assert list(clients.map(ask, [4, 3, 2, 1])) == [[3, 2, 1, 0], [2, 1, 0], [1, 0], [0]]
    (row,) = server.ask("GET", "/v2/models/decoupled/stats").json["model_stats"]
    places = {place: each["success"]["count"] for place, each in row["response_stats"].items()}
    assert places == {"0": 4, "1": 3, "2": 2, "3": 1}
    events = server.ask("POST", "/v2/models/decoupled/generate_stream", {"X": 3}).body.decode().split("\n\n")
    assert [json.loads(event.removeprefix("data: "))["Y"] for event in events if event] == [2, 1, 0]


def test_a_sequence_may_be_generated(server):
    """The flat form of a request has its parameters beside the tensors."""
    answers = [
        server.ask("POST", "/v2/models/sums/generate", {"X": value, "sequence_id": 70, flag: True})
        for value, flag in ((1, "sequence_start"), (2, "sequence_end"))
    ]
    assert [answer.json["Y"] for answer in answers] == [1, 3]


def test_an_ensemble_passes_the_sequence_on(server):
    """Its steps are steps of the client's sequence, and their errors the client's."""
    assert run(server, "passed_on", [1, 2, 3], 7) == [1, 3, 6]
    status, message = refused(server, "passed_on", 1, 7)
    assert (status, message.startswith("in ensemble 'passed_on', ")) == ("400", True)
    assert "must specify the START flag" in message


def test_a_sequence_may_go_from_an_ensemble_to_the_model_of_its_step(server):
    """And back: it is one model, which knows the sequence by its id."""
    assert step(server, "sums", 1, 9, sequence_start=True)[0] == 1
    assert step(server, "passed_on", 2, 9)[0] == 3
    assert step(server, "sums", 3, 9, sequence_end=True)[0] == 6


def test_a_step_may_name_another_sequence(server):
    """By parameters of its response; one of another type is told by Triton's sentence."""
    assert step(server, "renamed", 5, 7) == (5, [1, 1, 1, 1007])
    assert refused(server, "renamed", -1, 7)[1].startswith(
        "in ensemble 'renamed', expect parameter 'sequence_end' to be TRITONSERVER_PARAMETER_BOOL"
    )


def test_a_warm_up_brings_what_clients_can_not(server):
    """A sample may say what a control is; what it leaves out is zeros."""
    assert "is running warmup sample 'one'" in server.log


def test_who_does_not_begin_is_refused(server):
    """Triton's sentences, as a 400."""
    assert refused(server, "sums", 1, 77) == (
        "400",
        STARTLESS.format(77),
    )
    run(server, "sums", [1, 2], 77)
    assert "must specify the START flag" in refused(server, "sums", 1, 77)[1]
    assert refused(server, "sums", 1, 0) == (
        "400",
        "inference request to model 'sums' must specify a non-zero or non-empty correlation ID",
    )


def test_an_id_is_of_the_type_that_the_model_is_told(server):
    """A text for a number, and the other way round."""
    assert refused(server, "sums", 1, "seven", sequence_start=True) == (
        "400",
        "sequence batching control 'ID' data-type is 'BYTES', but model 'sums' expects 'UINT64'",
    )
    assert refused(server, "python", 1, 7, sequence_start=True) == (
        "400",
        "sequence batching control 'ID' data-type is 'UINT64', but model 'python' expects 'BYTES'",
    )


def test_a_step_is_one_element(server):
    """A batch of two is no step of one sequence."""
    body = {
        "inputs": [{"name": "X", "datatype": "FP32", "shape": [2, 1], "data": [1, 2]}],
        "parameters": {"sequence_id": 1, "sequence_start": True},
    }
    answer = server.ask("POST", "/v2/models/sums/infer", body)

    assert (answer.status, answer.error) == (
        400,
        "inference request to model 'sums' must specify batch-size 1 due to requirements of sequence batcher",
    )


def test_a_sequence_waits_in_the_backlog_as_long_as_it_says(server):
    """Two candidates are all; a third with a timeout is turned away with a 503, and one with time gets its turn."""
    step(server, "states", 1, 1, sequence_start=True)
    step(server, "states", 1, 2, sequence_start=True)
    status, message = refused(server, "states", 1, 3, sequence_start=True, timeout=1000)
    assert status == "503"
    assert message.startswith("timeout of the corresponding sequence has been expired")
    with ThreadPoolExecutor(1) as waiting:
        fourth = waiting.submit(run, server, "states", [1], 4)
        step(server, "states", 1, 1, sequence_end=True)
        assert fourth.result() == [101]
    step(server, "states", 1, 2, sequence_end=True)


def test_a_client_that_leaves_the_backlog_is_not_waited_for(server):
    """What it sent does not lie there until a slot is free."""
    step(server, "states", 1, 1, sequence_start=True)
    step(server, "states", 1, 2, sequence_start=True)
    inputs = [{"name": "X", "datatype": "FP32", "shape": [1, 1], "data": [1]}]
    body = {"inputs": inputs, "parameters": {"sequence_id": 3, "sequence_start": True}}
    connection = server.connect().send(post("/v2/models/states/infer", body))
    eventually(lambda: server.metric("nv_inference_pending_request_count", model="states") == 1, "a request that waits")
    connection.reset()
    eventually(lambda: server.metric("nv_inference_pending_request_count", model="states") == 0, "its end")
    for number in (1, 2):
        step(server, "states", 1, number, sequence_end=True)


def test_an_idle_sequence_makes_room(server):
    """After its time of silence the slot is another's, and the id begins nothing."""
    assert run(server, "brief", [1], 5) == [1]
    assert step(server, "brief", 1, 5, sequence_start=True)[0] == 1
    assert run(server, "brief", [1], 6) == [1]
    assert "must specify the START flag" in refused(server, "brief", 1, 5)[1]


def test_a_model_that_leaves_sends_away_who_waits_for_a_slot(server, client):
    """Nobody hangs: the backlog is told, and sequences begin anew when the model is back."""
    step(server, "states", 1, 1, sequence_start=True)
    step(server, "states", 1, 2, sequence_start=True)
    with ThreadPoolExecutor(1) as waiting:
        third = waiting.submit(refused, server, "states", 1, 3, sequence_start=True)
        eventually(lambda: server.metric("nv_inference_pending_request_count", model="states"), "a request that waits")
        client.unload_model("states")
        assert third.result()[0] == "503"
    client.load_model("states")
    assert "must specify the START flag" in refused(server, "states", 1, 1)[1]
    assert run(server, "states", [1], 1) == [101]
