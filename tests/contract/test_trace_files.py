"""Traces in Triton's own format, as its flags ask for them, from a server that has ended."""

from __future__ import annotations

import json
import os
import re
import signal

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http

from tests.contract import models
from tests.contract.server import Server, alive, eventually, kill, post
from tests.processes import is_over

X = {"inputs": [{"name": "X", "shape": [1, 4], "datatype": "FP32", "data": [0] * 4}]}
BATCHED = "max_batch_size: 4\n"
INSIDE = ["REQUEST_START", "QUEUE_START", "COMPUTE_START", "COMPUTE_INPUT_END", "COMPUTE_OUTPUT_START", "COMPUTE_END"]


INLINE = 'parameters { key: "MME_PLACEMENT" value { string_value: "inline" } }\n'
STUCK = """
import pathlib
import threading


class TritonPythonModel:
    def execute(self, requests):
        pathlib.Path("{began}").touch()
        threading.Event().wait()
"""


FAILS = """
class TritonPythonModel:
    def execute(self, requests):
        raise ValueError("no")
"""
FAILS_CONFIG = f"""
backend: "python"
max_batch_size: 4
input {{ name: "X" data_type: TYPE_FP32 dims: [ 4 ] }}
output {{ name: "Y" data_type: TYPE_FP32 dims: [ 4 ] }}
{INLINE}
"""


def around(protocol):
    """The names of a request's timestamps, in their order."""
    head, tail = [f"{protocol}_RECV_START", f"{protocol}_RECV_END"], [f"{protocol}_SEND_START", f"{protocol}_SEND_END"]
    return [*head, *INSIDE, "INFER_RESPONSE_COMPLETE", "REQUEST_END", *tail]


def read(path):
    """Traces of a file: what they say of themselves, and their timestamps by name."""
    about, times = {}, {}
    for entry in json.loads(path.read_bytes()):
        if "timestamps" in entry:
            times[entry["id"]] = {stamp["name"]: stamp["ns"] for stamp in entry["timestamps"]}
        else:
            about[entry["id"]] = entry
    assert about.keys() == times.keys()
    return about, times


@pytest.fixture
def repository(tmp_path):
    """A model, and an ensemble that asks it twice."""
    models.lay_out(tmp_path / "models" / "plus", models.plus(1), BATCHED)
    (tmp_path / "models" / "twice" / "1").mkdir(parents=True)
    (tmp_path / "models" / "twice" / "config.pbtxt").write_text(models.one_behind_the_other("plus", "plus"))
    return tmp_path / "models"


def serve(tmp_path, repository, flags, level="TIMESTAMPS", **environ):
    """A server with these of Triton's flags, and in this environment."""
    levels = [f"level={level}"] if level else []
    arguments = " ".join(f"--trace-config={flag}" for flag in ("mode=triton", "rate=1", *levels, *flags))
    environ = {
        "MME_MODEL_REPOSITORY": str(repository),
        "MME_PING_MODE": "ready",
        "MME_GRPC_PORT": "0",
        "SAGEMAKER_TRITON_ADDITIONAL_ARGS": arguments,
        **environ,
    }
    return Server(tmp_path / "server", environ)


def test_all_traces_are_written_when_the_server_ends(tmp_path, repository):
    """Of HTTP, gRPC and an ensemble with its steps; times are in their order. What no model took is none, or is switched off."""
    path = tmp_path / "traces.json"
    with serve(tmp_path, repository, [f"triton,file={path}"]) as server:
        assert server.ask("POST", "/v2/models/plus/infer", {**X, "id": "a"}).status == 200
        assert server.ask("POST", "/v2/models/plus/infer", {"inputs": []}).status == 400
        assert server.ask("POST", "/v2/models/twice/infer", {**X, "id": "c"}).status == 200
        with tritonclient.http.InferenceServerClient(server.address) as client:
            settings = client.get_trace_settings()
            assert (settings["trace_mode"], settings["trace_file"]) == ("triton", str(path))
            names = ("trace_level", "trace_rate", "trace_count", "log_frequency", "trace_file", "trace_mode")
            assert tuple(settings) == names, "in Triton's order"
            client.update_trace_settings("twice", {"trace_level": ["OFF"]})
        assert server.ask("POST", "/v2/models/twice/infer", X).status == 200
        port = re.search(r"gRPC listening at port ([0-9]+)", server.log)[1]
        with tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{port}") as client:
            x = tritonclient.grpc.InferInput("X", [1, 4], "FP32")
            x.set_data_from_numpy(np.zeros((1, 4), np.float32))
            client.infer("plus", [x], request_id="b")
        assert not path.exists()

    about, times = read(path)
    (first,) = [number for number, entry in about.items() if entry.get("request_id") == "a"]
    assert about[first] == {"id": first, "model_name": "plus", "model_version": 1, "request_id": "a"}
    assert list(times[first]) == around("HTTP")
    (over_grpc,) = [number for number, entry in about.items() if entry.get("request_id") == "b"]
    assert list(times[over_grpc]) == around("GRPC")
    (whole,) = [number for number, entry in about.items() if entry["model_name"] == "twice"]
    steps = [number for number, entry in about.items() if entry.get("parent_id") == whole]
    own = {"model_name": "plus", "model_version": 1, "request_id": "c", "parent_id": whole}
    assert [about[step] for step in steps] == [{"id": step, **own} for step in steps], "as the ensemble calls them"
    assert list(times[whole]) == [name for name in around("HTTP") if not name.startswith("COMPUTE")]
    assert len(about) == 5
    for step in (first, over_grpc, *steps):
        inside = [times[step][name] for name in INSIDE]
        assert inside == sorted(inside)
    for number in (first, over_grpc, whole):
        assert (
            times[number][next(iter(times[number]))] <= times[number]["REQUEST_START"] <= times[number]["REQUEST_END"]
        )


def test_traces_are_written_though_a_model_never_ends(tmp_path, repository):
    """The server ends without it, not without what it has traced."""
    path = tmp_path / "traces.json"
    config = models.REPEAT.replace('"repeat"', '"python"') + INLINE
    (repository / "stuck" / "1").mkdir(parents=True)
    (repository / "stuck" / "config.pbtxt").write_text(config)
    (repository / "stuck" / "1" / "model.py").write_text(STUCK.format(began=tmp_path / "began"))
    with serve(tmp_path, repository, [f"triton,file={path}"], MME_DRAIN_SECONDS="0.2") as server:
        assert server.ask("POST", "/v2/models/plus/infer", X).status == 200
        with server.connect() as connection:
            connection.send(post("/v2/models/stuck/generate_stream", {"IN": [7], "DELAY": [0], "WAIT": 0}))
            eventually((tmp_path / "began").exists, "the model to be stuck")
            assert server.stop() == 0

    assert "models still execute; ending without them" in server.log
    assert "plus" in [each["model_name"] for each in read(path)[0].values()]


def test_what_fails_is_traced_too(tmp_path, repository):
    """How long that took, and what an ensemble's steps did before; a model may be traced apart."""
    path = tmp_path / "traces.json"
    (repository / "fails" / "1").mkdir(parents=True)
    (repository / "fails" / "config.pbtxt").write_text(FAILS_CONFIG)
    (repository / "fails" / "1" / "model.py").write_text(FAILS)
    (repository / "half" / "1").mkdir(parents=True)
    (repository / "half" / "config.pbtxt").write_text(models.one_behind_the_other("plus", "fails"))
    with serve(tmp_path, repository, [f"triton,file={path}"], level="") as server:
        for model in ("fails", "half"):
            answer = server.ask("POST", f"/v2/models/{model}/trace/setting", {"trace_level": ["TIMESTAMPS"]})
            assert answer.json["trace_level"] == ["TIMESTAMPS"]
            assert server.ask("POST", f"/v2/models/{model}/infer", {**X, "id": model}).status == 500
        assert server.ask("POST", "/v2/models/plus/infer", X).status == 200

    about, times = read(path)
    fails, half, plus = about
    own = {"model_version": 1, "request_id": "half"}
    assert about[fails] == {"id": fails, "model_name": "fails", "model_version": 1, "request_id": "fails"}
    assert about[half] == {"id": half, "model_name": "half", **own}
    assert about[plus] == {"id": plus, "model_name": "plus", **own, "parent_id": half}
    assert list(times[fails]) == [name for name in around("HTTP") if not name.startswith("COMPUTE")]


def test_so_many_traces_are_written_at_a_time(tmp_path, repository):
    """Into files with numbers, what is left into the next of them; a client may change how many. Of the last there is none.

    Without a level nothing is traced until a client asks for it.
    """
    path = tmp_path / "traces.json"
    flags = [f"triton,file={path}", "triton,log-frequency=2", "count=8"]
    with serve(tmp_path, repository, flags, level="") as server:
        assert server.ask("POST", "/v2/models/plus/infer", X).status == 200
        assert server.ask("GET", "/v2/trace/setting").json["trace_level"] == ["OFF"]
        answer = server.ask("POST", "/v2/trace/setting", {"trace_level": ["TIMESTAMPS"]})
        assert answer.json["trace_level"] == ["TIMESTAMPS"]
        for _ in range(4):
            assert server.ask("POST", "/v2/models/plus/infer", X).status == 200
        with tritonclient.http.InferenceServerClient(server.address) as client:
            assert client.update_trace_settings(settings={"log_frequency": "3"})["log_frequency"] == "3"
        for _ in range(5):
            assert server.ask("POST", "/v2/models/plus/infer", X).status == 200

    assert [len(read(path.with_name(f"traces.json.{end}"))[0]) for end in range(4)] == [2, 2, 3, 1]
    assert not path.exists()


def test_a_worker_goes_on_behind_what_the_one_before_it_has_written(tmp_path, repository):
    """It was killed: its files stay, and so does what they hold. Those of another server are written over."""
    path = tmp_path / "traces.json"
    for number in range(5):
        path.with_name(f"traces.json.{number}").write_text("stale")
        os.utime(path.with_name(f"traces.json.{number}"), (0, 0))
    with serve(tmp_path, repository, [f"triton,file={path}", "triton,log-frequency=2"]) as server:
        for worker in range(2):
            for number in range(4):
                x = {**X, "id": f"{worker}-{number}"}
                assert server.ask("POST", "/v2/models/plus/infer", x).status == 200
            if not worker:
                eventually(lambda: path.with_name("traces.json.1").read_text().endswith("]"), "what it writes")
                kill(server)

    told = [[each["request_id"] for each in read(path.with_name(f"traces.json.{end}"))[0].values()] for end in range(4)]
    assert told == [["0-0", "0-1"], ["0-2", "0-3"], ["1-0", "1-1"], ["1-2", "1-3"]]
    assert path.with_name("traces.json.4").read_text() == "stale"


def test_workers_that_follow_each_other_write_files_of_their_own(tmp_path, repository):
    """After SIGHUP: each writes all of its traces at its end. One that has none leaves the file as it is."""
    path = tmp_path / "traces.json"
    with serve(tmp_path, repository, [f"triton,file={path}"]) as server:
        for worker in range(3):
            if worker < 2:
                assert server.ask("POST", "/v2/models/plus/infer", {**X, "id": str(worker)}).status == 200
                old = server.worker
                server.process.send_signal(signal.SIGHUP)
                eventually(lambda old=old: is_over(old), "the old worker to end")
                eventually(lambda: alive(server), "another worker")

    told = [[each["request_id"] for each in read(each)[0].values()] for each in sorted(tmp_path.glob("traces.json*"))]
    assert told == [["0"], ["1"]]


def test_tensors_are_accepted_as_a_level_without_effect(tmp_path, repository):
    """Times are traced beside it; the log says what has become of it."""
    path = tmp_path / "traces.json"
    with serve(tmp_path, repository, [f"triton,file={path}", "level=TENSORS"]) as server:
        with tritonclient.http.InferenceServerClient(server.address) as client:
            told = client.update_trace_settings("plus", {"trace_level": ["TENSORS"]})
        assert told["trace_level"] == ["TIMESTAMPS"]
        assert server.ask("POST", "/v2/models/plus/infer", X).status == 200
    assert server.log.count("TENSORS is without effect: tensors are not traced, and 0.3 refuses it") == 2
    assert not any("tensor" in each for each in json.loads(path.read_bytes()))
    assert len(read(path)[0]) == 1


def test_a_file_that_can_not_be_written_is_told(tmp_path, repository):
    """The server ends as ever."""
    with serve(tmp_path, repository, [f"triton,file={tmp_path}/none/traces.json"]) as server:
        assert server.ask("POST", "/v2/models/plus/infer", X).status == 200
    assert "none/traces.json: No such file or directory" in server.log
