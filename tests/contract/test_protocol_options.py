"""What operators of Triton set of its protocols, by its own flags, against a server: secrets, headers, metrics.

said     a Python model that answers with the parameters of its request
zeros    X [N, 4] → Y = X
"""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import socket
import threading

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from tritonclient.utils import InferenceServerException

from tests.contract import models
from tests.contract.server import PATIENCE, Server

SAID_CONFIG = """
backend: "python"
input { name: "X" data_type: TYPE_INT32 dims: [ 1 ] }
output { name: "PARAMETERS" data_type: TYPE_STRING dims: [ 1 ] }
"""
ZEROS = """
input { name: "X" data_type: TYPE_FP32 dims: [ -1, 4 ] }
output { name: "Y" data_type: TYPE_FP32 dims: [ -1, 4 ] }
"""
SAID = """
import json
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        texts = [json.dumps(json.loads(request.parameters() or "{}"), sort_keys=True) for request in requests]
        return [
            pb_utils.InferenceResponse([pb_utils.Tensor("PARAMETERS", np.array([text.encode()], np.object_))])
            for text in texts
        ]
"""
FLAGS = """
--id=triton --allow-grpc=true --grpc-port=0 --allow-metrics=true --metrics-port=0 --metrics-address=127.0.0.2 --grpc-address=127.0.0.3 --pinned-memory-pool-byte-size=1024
--http-restricted-api=model-repository,trace:admin-key=secret
--grpc-restricted-protocol=model-repository,trace:admin-key=secret
--http-header-forward-pattern=x-tenant-.* --grpc-header-forward-pattern=x-tenant-.*
--grpc-keepalive-time=60000 --grpc-keepalive-timeout 5000
--metrics-config=summary_latencies=true --metrics-config=summary_quantiles=0.5:0.05,0.99:0.001
--metrics-config=histogram_latencies=true
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A server with all of it."""
    folder = tmp_path_factory.mktemp("options")
    models.lay_out(folder / "models" / "zeros", models.plus(0), ZEROS)
    models.lay_out(folder / "models" / "said", SAID, SAID_CONFIG)
    environ = {
        "MME_MODEL_REPOSITORY": str(folder / "models"),
        "MME_PING_MODE": "ready",
        "SAGEMAKER_TRITON_ADDITIONAL_ARGS": FLAGS.replace("\n", " "),
    }
    with Server(folder / "server", environ) as server:
        yield server


@pytest.fixture(scope="module")
def client(server):
    """Triton's client of gRPC."""
    with tritonclient.grpc.InferenceServerClient(f"127.0.0.3:{server.grpc_port}") as client:
        yield client


def asked(module):
    """What `said` is asked."""
    x = module.InferInput("X", [1], "INT32")
    x.set_data_from_numpy(np.array([1], np.int32))
    return [x]


def said(result):
    """The parameters that it was sent."""
    return json.loads(result.as_numpy("PARAMETERS")[0])


def test_the_server_is_called_as_its_flag_says(server, client):
    """By HTTP and gRPC; and a flag without an effect is in the log."""
    with tritonclient.http.InferenceServerClient(server.address) as over_http:
        assert over_http.get_server_metadata()["name"] == "triton"
    assert client.get_server_metadata().name == "triton"
    assert "(--pinned-memory-pool-byte-size) has no effect: tensors are handed over where they lie" in server.log


def test_headers_and_metadata_become_parameters(server, client):
    """As they were sent, beside those of the body; others do not."""
    with tritonclient.http.InferenceServerClient(server.address) as over_http:
        sent = {"X-Tenant-Name": "a", "Other": "b"}
        result = over_http.infer("said", asked(tritonclient.http), headers=sent, parameters={"own": 1})
        assert said(result) == {"X-Tenant-Name": "a", "own": 1}
    body = {"X": [1], "own": 2}
    answer = server.ask("POST", "/v2/models/said/generate", body, X_Tenant_Name="Zürich".encode())
    assert json.loads(answer.json["PARAMETERS"]) == {"X-Tenant-Name": "Zürich", "own": 2}

    result = client.infer("said", asked(tritonclient.grpc), headers={"x-tenant-name": "d"}, parameters={"own": 3})
    assert said(result) == {"x-tenant-name": "d", "own": 3}
    sent = {"x-tenant-bin": "Zürich".encode(), "other-bin": b"b"}
    assert said(client.infer("said", asked(tritonclient.grpc), headers=sent)) == {"x-tenant-bin": "Zürich"}


def test_parameters_of_generate_are_the_models(server):
    """Those too that mean something to infer: it is told of them, whatever they hold."""
    sent = {"timeout": 2.5, "priority": "high", "binary_data_output": True}
    answer = server.ask("POST", "/v2/models/said/generate", {"X": [1], **sent})
    assert json.loads(answer.json["PARAMETERS"]) == sent


def test_a_stream_s_metadata_become_parameters_of_each_request(client):
    """They come once, with the stream."""
    answers: list = []
    over = threading.Event()

    def take(result, error):
        answers.append(error or said(result))
        over.set()

    client.start_stream(take, headers={"x-tenant-name": "e"})
    client.async_stream_infer("said", asked(tritonclient.grpc))
    assert over.wait(PATIENCE)
    client.stop_stream()
    assert answers == [{"x-tenant-name": "e"}]


def test_restricted_parts_want_their_header(server, client):
    """Over both protocols, in Triton's words; other parts are free."""
    key = "triton-grpc-protocol-admin-key"
    with tritonclient.http.InferenceServerClient(server.address) as over_http:
        with pytest.raises(InferenceServerException, match="This API is restricted, expecting header 'admin-key'"):
            over_http.get_model_repository_index()
        assert len(over_http.get_model_repository_index(headers={"Admin-Key": "secret"})) == 2
        assert over_http.is_model_ready("zeros")
    with pytest.raises(InferenceServerException, match=f"protocol is restricted, expecting header '{key}'") as raised:
        client.get_model_repository_index()
    assert raised.value.status() == "StatusCode.UNAVAILABLE"
    assert len(client.get_model_repository_index(headers={key: "secret"}).models) == 2
    with pytest.raises(InferenceServerException, match="is restricted"):
        client.get_trace_settings(headers={key: "Secret"})
    assert client.get_inference_statistics("zeros").model_stats[0].name == "zeros"


def test_metrics_have_a_port_of_their_own(server):
    """At an address of their own, too, as gRPC is; it answers nothing else. The main port answers them as well."""
    port = int(re.search(r"metrics listening at port ([0-9]+)", server.log)[1])
    with contextlib.closing(http.client.HTTPConnection("127.0.0.2", port, timeout=PATIENCE)) as connection:
        for path, status in (("/metrics", 200), ("/metrics?x=1", 200), ("/ping", 404), ("/v2/models/zeros", 404)):
            connection.request("GET", path)
            answer = connection.getresponse()
            body = answer.read()
            assert answer.status == status, path
            assert (b'nv_inference_count{model="zeros"' in body) is (status == 200)
        connection.request("POST", "/metrics")
        assert connection.getresponse().status == 405
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))
    assert server.ask("GET", "/metrics").status == 200


def test_quantiles_and_first_responses_are_among_the_metrics(server):
    """Of those that the flags name; counters have their type, and a model's load its time."""
    document = {"inputs": [{"name": "X", "shape": [1, 4], "datatype": "FP32", "data": [0] * 4}]}
    for _ in range(3):
        assert server.ask("POST", "/v2/models/zeros/infer", document).status == 200
    text = server.ask("GET", "/metrics").body.decode()
    for part in ("request", "queue", "compute_input", "compute_infer", "compute_output"):
        name = f"nv_inference_{part}_summary_us"
        assert f"# TYPE {name} summary" in text
        values = {q: server.metric(name, model="zeros", quantile=q) for q in ("0.5", "0.99")}
        assert 0 <= values["0.5"] <= values["0.99"] < PATIENCE * 1e6, name
        assert server.metric(f"{name}_count", model="zeros") >= 3
    assert server.metric("nv_inference_first_response_histogram_ms_count", model="zeros") >= 3
    assert server.metric("nv_inference_first_response_histogram_ms_bucket", model="zeros", le="5000.0") >= 3
    assert 'nv_cache_hit_summary_per_model{model="zeros"' not in text
    assert "# TYPE nv_inference_request_success counter" in text
    assert " untyped" not in text
    assert server.metric("nv_model_load_duration_secs", model="zeros") > 0
    assert "nv_pinned_memory_pool_total_bytes 0.0" in text
