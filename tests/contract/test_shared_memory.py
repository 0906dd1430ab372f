"""Memory shared with a server, by Triton's own client: `tritonclient.utils.shared_memory` from PyPI, unchanged.

plus, types, pick   as in `test_kserve`
counter             a decoupled Python model of N responses
burst               the same, every second of which takes a thread long to write
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from contextlib import ExitStack
from multiprocessing import resource_tracker

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from tritonclient.utils import InferenceServerException, serialize_byte_tensor
from tritonclient.utils import shared_memory as shm

from tests.contract import models
from tests.contract.server import PATIENCE, Server, eventually
from tests.docs.sentences import ROOT
from tests.shared_objects import OBJECTS, PREFIX, new_key

COUNTING = """
backend: "python"
input { name: "N" data_type: TYPE_INT32 dims: [ 1 ] }
output { name: "I" data_type: TYPE_INT32 dims: [ 1 ] }
model_transaction_policy { decoupled: true }
"""
COUNTER = """
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            pb_utils.Logger.log_verbose("counts now")
            sender = request.get_response_sender()
            for i in range(int(pb_utils.get_input_tensor_by_name(request, "N").as_numpy()[0])):
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("I", np.array([i + 7], np.int32))]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
LONG = 400_000  # elements of INT32: more than the event loop copies itself
BURST = """
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            for i in range(int(pb_utils.get_input_tensor_by_name(request, "N").as_numpy()[0])):
                size = LONG if i % 2 == 0 else 1
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("I", np.full(size, i + 7, np.int32))]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
BURSTING = COUNTING.replace('"I" data_type: TYPE_INT32 dims: [ 1 ]', '"I" data_type: TYPE_INT32 dims: [ -1 ]')
UNBATCHED = """
input { name: "I" data_type: TYPE_INT64 dims: [ -1 ] }
output { name: "O" data_type: TYPE_FP32 dims: [ -1 ] }
"""
X = np.arange(4, dtype=np.float32).reshape(1, 4)
SIZE = 4096


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A server that lets clients share memory, all of whose models are ready."""
    resource_tracker.ensure_running()  # Python's watch over what the client makes: it stays, whichever test begins
    folder = tmp_path_factory.mktemp("shared")
    repository = folder / "repository"
    models.lay_out(repository / "plus", models.plus(1), "max_batch_size: 8\n")
    models.lay_out(repository / "types", models.every_type(), "max_batch_size: 8\n")
    models.lay_out(repository / "pick", models.pick(), UNBATCHED)
    models.lay_out(repository / "counter", COUNTER, COUNTING)
    models.lay_out(repository / "burst", BURST.replace("LONG", str(LONG)), BURSTING)
    environ = {
        "MME_MODEL_REPOSITORY": str(repository),
        "MME_PING_MODE": "ready",
        "MME_GRPC_PORT": "0",
        "MME_ALLOW_CLIENT_SHM": "true",
    }
    with Server(folder / "server", environ) as server:
        yield server


@pytest.fixture(scope="module", params=["http", "grpc"])
def triton(request):
    """Triton's client, of each protocol."""
    return {"http": tritonclient.http, "grpc": tritonclient.grpc}[request.param]


@pytest.fixture(scope="module")
def client(triton, server):
    """One for the server."""
    address = server.address if triton is tritonclient.http else server.grpc_address
    with triton.InferenceServerClient(address) as client:
        yield client


@pytest.fixture
def key():
    """A key that nobody else has."""
    return new_key()


@pytest.fixture
def region(client, key):
    """A region that is registered as "r"; afterwards nothing is."""
    with ExitStack() as ends:
        handle = shm.create_shared_memory_region("r", key, SIZE)
        ends.callback(shm.destroy_shared_memory_region, handle)
        client.register_system_shared_memory("r", key, SIZE)
        ends.callback(client.unregister_system_shared_memory)
        yield handle


def input_(triton, size, offset=0, name="X", shape=(1, 4), datatype="FP32", region="r"):
    """An input that lies in a region."""
    return triton.InferInput(name, list(shape), datatype).set_shared_memory(region, size, offset)


def output(triton, size, offset=0, name="Y", region="r"):
    """A requested output that is to be in a region."""
    wanted = triton.InferRequestedOutput(name)
    wanted.set_shared_memory(region, size, offset)
    return wanted


def refused(client, triton, inputs, outputs=None, model="plus"):
    """The sentence and the status of a request that is refused."""
    with pytest.raises(InferenceServerException) as raised:
        client.infer(model, inputs, outputs=outputs)
    return raised.value.message(), raised.value.status().removeprefix("StatusCode.")


def rows_of(told):
    """The regions that a status tells of, whatever the protocol."""
    if isinstance(told, list):
        return told
    return [
        {field.name: getattr(each, field.name) for field in each.DESCRIPTOR.fields} for each in told.regions.values()
    ]


def described(result, name):
    """Type, shape and parameters of an output, whatever the protocol; whether its bytes are in the answer."""
    told = result.get_output(name)
    if isinstance(told, dict):
        return told["datatype"], told["shape"], told.get("parameters", {}), "data" in told
    parameters = {key: getattr(value, value.WhichOneof("parameter_choice")) for key, value in told.parameters.items()}
    place = [each.name for each in result.get_response().outputs].index(name)
    return told.datatype, list(told.shape), parameters, bool(result.get_response().raw_output_contents[place])


def test_tensors_in_and_out(client, triton, region):
    """The input is read where it lies, the output written where it is wanted, as often as one likes."""
    inputs, outputs = [input_(triton, 16, 64)], [output(triton, 32, 128)]
    for factor in (1, 2):
        shm.set_shared_memory_region(region, [factor * X], offset=64)
        result = client.infer("plus", inputs, outputs=outputs)
        there = shm.get_contents_as_numpy(region, np.float32, [1, 4], offset=128)
        assert there.tolist() == (factor * X + 1).tolist()
        del there  # or the memory can not be closed
    # No parameters: Triton's C++ client gives a response up whose outputs have others than binary_data_size.
    assert described(result, "Y") == ("FP32", [1, 4], {}, False)


def test_every_type_beside_tensors_that_are_sent(client, triton, region):
    """Some lie in the region, BYTES among them, others come and go in the message."""
    inputs, outputs, places, offset = [], [], {}, 0
    for place, (name, values) in enumerate(models.VALUES.items()):
        sent = triton.InferInput(f"IN_{name}", [2, 2], name)
        if place % 2 == 0 or name == "BYTES":
            data = serialize_byte_tensor(values).item() if name == "BYTES" else values.tobytes()
            shm.set_shared_memory_region(region, [np.frombuffer(data, np.uint8)], offset=offset)
            inputs.append(sent.set_shared_memory("r", len(data), offset))
            outputs.append(output(triton, len(data), 2048 + offset, f"OUT_{name}"))
            places[name] = 2048 + offset
            offset += len(data) + 3
        else:
            inputs.append(sent.set_data_from_numpy(values))
            outputs.append(triton.InferRequestedOutput(f"OUT_{name}"))

    result = client.infer("types", inputs, outputs=outputs)

    for name, values in models.VALUES.items():
        if name in places:
            kind = np.object_ if name == "BYTES" else values.dtype
            found = shm.get_contents_as_numpy(region, kind, [2, 2], offset=places[name])
        else:
            found = result.as_numpy(f"OUT_{name}")
        expected = [[str(text).encode() for text in row] for row in values] if name == "BYTES" else values.tolist()
        assert found.tolist() == expected, name
        del found


def test_strings_of_a_megabyte_that_are_sent(client, triton):
    """Threads read and write them, whatever the other inputs are; the answer is the same, and so is an error."""
    words = np.array([["short", "x" * (1 << 20)], ["", "é"]], dtype=np.object_)
    inputs, outputs = [], [triton.InferRequestedOutput("OUT_BYTES")]
    for name, values in models.VALUES.items():
        sent = triton.InferInput(f"IN_{name}", [2, 2], name)
        inputs.append(sent.set_data_from_numpy(words if name == "BYTES" else values))
    expected = [[word.encode() for word in row] for row in words]
    assert client.infer("types", inputs, outputs=outputs).as_numpy("OUT_BYTES").tolist() == expected
    next(sent for sent in inputs if sent.name() == "IN_BYTES").set_shape([2, 3])
    assert "expected 6 string elements" in refused(client, triton, inputs, outputs, "types")[0]
    if triton is tritonclient.grpc:
        found: list = []
        client.start_stream(lambda result, error: found.append(str(error or result.get_response().id)))
        client.async_stream_infer("types", inputs, outputs=outputs, request_id="wrong")
        next(sent for sent in inputs if sent.name() == "IN_BYTES").set_shape([2, 2])
        client.async_stream_infer("types", inputs, outputs=outputs, request_id="right")
        eventually(lambda: len(found) == 2, "two responses")
        client.stop_stream()
        assert "expected 6 string elements" in found[0]
        assert found[1] == "right"


def test_large_tensors(client, triton, key):
    """Threads read and write them; the answer is the same, and requests of a stream keep their order."""
    places = np.arange(300_000, dtype=np.int64) % 3
    handle = shm.create_shared_memory_region("big", key, 3 * places.nbytes)
    found: list = []
    try:
        shm.set_shared_memory_region(handle, [places])
        client.register_system_shared_memory("big", key, 3 * places.nbytes)
        large = [input_(triton, places.nbytes, 0, "I", places.shape, "INT64", "big")]
        outputs = [output(triton, 2 * places.nbytes, places.nbytes, "O", "big")]
        client.infer("pick", large, outputs=outputs)
        there = shm.get_contents_as_numpy(handle, np.float32, places.shape, offset=places.nbytes)
        assert np.array_equal(there, 10.0 * (places + 1))
        del there
        shm.set_shared_memory_region(handle, [places + 3])
        sentence, _ = refused(client, triton, large, outputs, "pick")
        assert "out of" in sentence
        if triton is tritonclient.grpc:
            shm.set_shared_memory_region(handle, [places])
            small = [triton.InferInput("I", [1], "INT64").set_data_from_numpy(np.array([1], np.int64))]
            client.start_stream(lambda result, error: found.append(error or result.get_response().id))
            client.async_stream_infer("pick", large, outputs=outputs, request_id="large")
            client.async_stream_infer("pick", small, request_id="small")
            eventually(lambda: len(found) == 2, "two responses")
            client.stop_stream()
            assert found == ["large", "small"]
        client.unregister_system_shared_memory()
    finally:
        shm.destroy_shared_memory_region(handle)


def test_regions_are_told_and_forgotten(client, triton, key):
    """By name or all together; one is registered once, and what is not there is not."""
    handle = shm.create_shared_memory_region("r", key, SIZE)
    try:
        client.register_system_shared_memory("r", key, 64, offset=16)
        client.register_system_shared_memory("a", key, SIZE)
        if triton is tritonclient.http:  # gRPC has a map
            assert [each["name"] for each in client.get_system_shared_memory_status()] == ["a", "r"]
        told = client.get_system_shared_memory_status("r")
        assert rows_of(told) == [{"name": "r", "key": key, "offset": 16, "byte_size": 64}]
        for arguments, sentence in (
            (("r", key, 8), "shared memory region 'r' already in manager"),
            (("t", key, SIZE + 1), "failed to register shared memory region 't': invalid args"),
            (("t", "/mme-test-nobody", 8), "Unable to open shared memory region: '/mme-test-nobody'"),
            (("t", "/../etc/passwd", 8), "Unable to open shared memory region: '/../etc/passwd'"),
        ):
            with pytest.raises(InferenceServerException) as raised:
                client.register_system_shared_memory(*arguments)
            assert sentence in raised.value.message()
        client.unregister_system_shared_memory("r")
        client.unregister_system_shared_memory("r")
        with pytest.raises(InferenceServerException, match="Unable to find system shared memory region: 'r'"):
            client.get_system_shared_memory_status("r")
        client.unregister_system_shared_memory()
        assert rows_of(client.get_system_shared_memory_status()) == []
    finally:
        shm.destroy_shared_memory_region(handle)


def test_what_is_wrong_is_said_in_tritons_words(client, triton, region):
    """With its status."""
    shm.set_shared_memory_region(region, [X])
    here = input_(triton, 16)
    bad, missing, internal = (
        ("400", "404", "500") if triton is tritonclient.http else ("INVALID_ARGUMENT", "NOT_FOUND", "INTERNAL")
    )
    for inputs, outputs, sentence, status in (
        ([input_(triton, 16, region="s")], None, "Unable to find shared memory region: 's'", missing),
        ([here], [output(triton, 16, region="s")], "Unable to find shared memory region: 's'", missing),
        ([input_(triton, 16, SIZE)], None, "Invalid offset for shared memory region: 'r'", bad),
        ([input_(triton, 16, SIZE - 8)], None, "Invalid offset + byte size for shared memory region: 'r'", bad),
        ([input_(triton, 8)], None, "input byte size mismatch for input 'X'", bad),
        (
            [here],
            [output(triton, 8)],
            "for output 'Y' (8 bytes) should be at least 16 bytes to hold the results",
            internal,
        ),
    ):
        found = refused(client, triton, inputs, outputs)
        assert sentence in found[0]
        assert found[1] == status


def test_a_place_without_a_region_is_refused(client, triton, region):
    """Half of what shared memory takes is a mistake: the client would read what an earlier answer has left there."""
    here = triton.InferInput("X", [1, 4], "FP32").set_data_from_numpy(X)
    for field in ("shared_memory_byte_size", "shared_memory_offset"):
        sent = triton.InferInput("X", [1, 4], "FP32").set_data_from_numpy(X)
        wanted = triton.InferRequestedOutput("Y")
        for tensor in (sent, wanted):
            if triton is tritonclient.http:
                tensor._parameters[field] = 16
            else:
                tensor._get_tensor().parameters[field].int64_param = 16
        for name, inputs, outputs in (("X", [sent], None), ("Y", [here], [wanted])):
            sentence, _ = refused(client, triton, inputs, outputs)
            assert f"'{field}' can not be specified without 'shared_memory_region' parameter" in sentence
            assert f"for tensor '{name}'" in sentence


def test_memory_that_is_cut_short_ends_a_request_and_not_the_server(client, triton, region, key):
    """Its owner made it shorter, while the server had it: neither read nor write is deadly."""
    before = client.infer("plus", [input_(triton, 16)])
    assert before.as_numpy("Y").shape == (1, 4)
    os.truncate(OBJECTS / key[1:], 0)
    sent = triton.InferInput("X", [1, 4], "FP32").set_data_from_numpy(X)

    for inputs, outputs in (([input_(triton, 16)], None), ([sent], [output(triton, 16)])):
        sentence, _ = refused(client, triton, inputs, outputs)
        assert "Invalid offset + byte size for shared memory region: 'r'" in sentence
    assert (OBJECTS / key[1:]).stat().st_size == 0
    assert client.infer("plus", [sent]).as_numpy("Y").tolist() == (X + 1).tolist()


def test_memory_of_devices_is_told_to_be_none(client, triton):
    """Clients that forget all regions at their begin go on; one can't be registered."""
    assert rows_of(client.get_cuda_shared_memory_status()) == []
    client.unregister_cuda_shared_memory()
    client.unregister_cuda_shared_memory("r")
    with pytest.raises(InferenceServerException, match="CUDA shared memory is not served: region 'r'"):
        client.register_cuda_shared_memory("r", "aGFuZGxl", 0, 8)
    with pytest.raises(InferenceServerException, match="Unable to find cuda shared memory region: 'r'"):
        client.get_cuda_shared_memory_status("r")


def test_extensions_are_told(client, triton):
    """The ones that are on: no memory of devices."""
    metadata = client.get_server_metadata()
    extensions = metadata["extensions"] if isinstance(metadata, dict) else metadata.extensions
    assert {"system_shared_memory", "logging"} <= set(extensions)
    assert "cuda_shared_memory" not in extensions


def test_several_responses_share_one_place(server, key):
    """Each of a decoupled model's is written when it comes: over gRPC's stream, and as JSON lines."""
    triton = tritonclient.grpc
    handle = shm.create_shared_memory_region("d", key, 8)
    shm.set_shared_memory_region(handle, [np.array([3], np.int32)])
    inputs = [input_(triton, 4, 0, "N", (1,), "INT32", "d")]
    found: list = []
    try:
        with triton.InferenceServerClient(server.grpc_address) as client:
            client.register_system_shared_memory("d", key, 8)
            client.start_stream(lambda result, error: found.append(error or result))
            client.async_stream_infer("counter", inputs, outputs=[output(triton, 4, 4, "I", "d")])
            eventually(lambda: len(found) == 3, "three responses")
            client.stop_stream()
            assert all(described(each, "I")[3] is False for each in found)
            assert shm.get_contents_as_numpy(handle, np.int32, [1], offset=4).tolist() == [9]

            found.clear()
            client.start_stream(lambda result, error: found.append(error or result))
            client.async_stream_infer("counter", inputs, outputs=[output(triton, 3, 4, "I", "d")])
            sent = triton.InferInput("N", [1], "INT32").set_data_from_numpy(np.array([1], np.int32))
            client.async_stream_infer("counter", [sent], request_id="next")
            eventually(lambda: not isinstance(found[-1], Exception) if found else False, "the next request's response")
            client.stop_stream()
            assert "should be at least 4 bytes to hold the results" in str(found[0])
            assert len(found) == 2  # one error, however many responses there were

            shm.set_shared_memory_region(handle, [np.array([2, 0], np.int32)])
            place = {"shared_memory_region": "d", "shared_memory_byte_size": 4}
            document = {
                "inputs": [{"name": "N", "shape": [1], "datatype": "INT32", "parameters": place}],
                "outputs": [{"name": "I", "parameters": {**place, "shared_memory_offset": 4}}],
            }
            answer = server.ask("POST", "/models/counter/invoke", document)
            assert (answer.status, answer.body.count(b"\n"), b'"data"' in answer.body) == (200, 2, False)
            assert shm.get_contents_as_numpy(handle, np.int32, [1], offset=4).tolist() == [8]
            client.unregister_system_shared_memory()
    finally:
        shm.destroy_shared_memory_region(handle)


@pytest.mark.parametrize("protocol", ["grpc", "lines"])
def test_several_long_responses_share_one_place(server, key, protocol):
    """Each is written there, though others and the end of the request come while a thread writes one."""
    triton, size = tritonclient.grpc, 4 * LONG
    handle = shm.create_shared_memory_region("b", key, size)
    found: list = []
    try:
        with triton.InferenceServerClient(server.grpc_address) as client:
            client.register_system_shared_memory("b", key, size)
            if protocol == "grpc":
                sent = triton.InferInput("N", [1], "INT32").set_data_from_numpy(np.array([6], np.int32))
                client.start_stream(lambda result, error: found.append(error or result))
                client.async_stream_infer("burst", [sent], outputs=[output(triton, size, 0, "I", "b")])
                eventually(lambda: len(found) == 6, "six responses")
                client.stop_stream()
                told = [(shape, inside) for _, shape, _, inside in (described(each, "I") for each in found)]
            else:
                place = {"shared_memory_region": "b", "shared_memory_byte_size": size}
                document = {
                    "inputs": [{"name": "N", "shape": [1], "datatype": "INT32", "data": [6]}],
                    "outputs": [{"name": "I", "parameters": place}],
                }
                lines = server.ask("POST", "/models/burst/invoke", document).body.splitlines()
                outputs = [json.loads(line)["outputs"][0] for line in lines]
                told = [(each["shape"], "data" in each) for each in outputs]
            assert told == [([LONG], False), ([1], False)] * 3
            assert shm.get_contents_as_numpy(handle, np.int32, [2]).tolist() == [12, 11]
    finally:
        server.ask("POST", "/v2/systemsharedmemory/unregister")
        shm.destroy_shared_memory_region(handle)
    eventually(lambda: not any(key in file for file in server.open_files()), "the object to be closed")


def test_nothing_is_kept_open(server):
    """When all regions are forgotten, no object of theirs is held."""
    assert server.ask("POST", "/v2/systemsharedmemory/unregister").status == 200
    eventually(lambda: not any(PREFIX in file for file in server.open_files()), "the objects to be closed")


def test_the_snippet_of_the_documents_works(server):
    """As it stands, but for the port and the key."""
    (snippet,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "beyond-sagemaker.md").read_text(), re.DOTALL)
    code = snippet.replace("localhost:8080", server.address).replace('"/tensors"', f'"{new_key()}"')
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert (done.stderr, done.stdout.strip()) == ("", "[[2. 2. 2. 2.]]")


# -- what is logged --------------------------------------------------------------------------------------------------


def log_settings(client, **wanted):
    """The settings after a change, as HTTP tells them."""
    if isinstance(client, tritonclient.http.InferenceServerClient):
        return client.update_log_settings(wanted) if wanted else client.get_log_settings()
    told = client.update_log_settings(wanted, as_json=True) if wanted else client.get_log_settings(as_json=True)
    return {name: next(iter(value.values())) for name, value in told["settings"].items()}


def test_what_is_logged_is_changed_by_clients(client, triton, server):
    """Level and format, while the server runs; what can't be is refused, with its status."""
    first = {
        "log_file": "",
        "log_info": True,
        "log_warning": True,
        "log_error": True,
        "log_verbose_level": 0,
        "log_format": "json",
    }
    assert log_settings(client) == first
    nobody = f"nobody-{'http' if triton is tritonclient.http else 'grpc'}"

    def failure(text):
        """A line of the log that tells of a request that failed by its client's fault; it is verbose."""
        server.ask("POST", f"/v2/models/{nobody}/infer", {"inputs": []})
        return eventually(lambda: [line for line in server.log.splitlines() if nobody in line and text in line], text)[
            -1
        ]

    changed = log_settings(client, log_verbose_level=1, log_format="default")
    assert changed == first | {"log_verbose_level": 1, "log_format": "default"}
    assert re.match(r"I\d{4} \d\d:\d\d:\d\d\.\d{6} \d+ errors\.py:\d+\] \"", failure("] "))
    said = server.log.count("counts now")
    one = {"inputs": [{"name": "N", "shape": [1], "datatype": "INT32", "data": [1]}]}
    assert server.ask("POST", "/models/counter/invoke", one).status == 200
    eventually(lambda: server.log.count("counts now") > said, "the verbose line of a model")
    assert log_settings(client, log_format="ISO8601")["log_format"] == "ISO8601"
    assert re.match(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ I \d+ errors\.py:\d+\] \"", failure("Z I "))
    assert log_settings(client, log_verbose_level=0, log_format="json") == first

    bad, unsupported, no_format = (
        ("400", "501", "503")
        if triton is tritonclient.http
        else ("INVALID_ARGUMENT", "UNIMPLEMENTED", "INVALID_ARGUMENT")
    )
    for wanted, sentence, status in (
        ({"log_format": "xml"}, "invalid argument for --log_format, got: xml", no_format),
        ({"log_file": "server.log"}, "log file location can not be updated through network protocol", unsupported),
        ({"log_level": True}, "log setting 'log_level' is none of log_file", bad),
        *([] if triton is tritonclient.http else [({"log_info": None}, "'log_info' must be true or false", bad)]),
    ):
        with pytest.raises(InferenceServerException) as raised:
            log_settings(client, **wanted)
        assert sentence in raised.value.message()
        assert raised.value.status().removeprefix("StatusCode.") == status
    assert log_settings(client) == first
