"""The servers whose answers are recorded: each with its models, its settings and what it is asked, in this order."""

from __future__ import annotations

import os
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from tests.contract import models, scripts, sequence_models
from tests.contract.server import Server, eventually
from tests.golden import cases_grpc, cases_kserve, cases_sagemaker, wire
from tests.golden.masks import Masks
from tests.metric_text import families_of

if TYPE_CHECKING:
    from collections.abc import Iterator

_WITHIN = ("le", "quantile")  # labels of parts of a sample
_ANY = ("model", "version")  # labels whose values are whatever models there are
_BATCHED = "max_batch_size: 8\n"
_IDENTITY = 'backend: "identity" input {{ name: "IN" data_type: TYPE_{0} dims: {1} }} output {{ name: "OUT" data_type: TYPE_{0} dims: {1} }}'
_ONE_INSTANCE = "instance_group { count: 1 kind: KIND_CPU }\n"
_SUMS = (
    f"max_batch_size: 4\n{_ONE_INSTANCE}sequence_batching {{ {sequence_models.CONTROLS % 'TYPE_UINT64'} "
    f"{sequence_models.IMPLICIT % ''} max_sequence_idle_microseconds: 600000000 }}\n"
)
_TEXT = """
backend: "python"
input { name: "text_input" data_type: TYPE_STRING dims: [ 1 ] }
input { name: "number" data_type: TYPE_INT32 dims: [ 1 ] optional: true }
output { name: "text_output" data_type: TYPE_STRING dims: [ 1 ] }
"""
_STREAMS = f"{_TEXT}model_transaction_policy {{ decoupled: true }}\n"
# Answers with what it was asked, of "fail CODE" with that error; a metric counts.
_SAYS = """
import json
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        family = pb_utils.MetricFamily("golden_asked_total", "Requests that were asked", pb_utils.MetricFamily.COUNTER)
        self.asked = family.Metric({"model": args["model_name"]})
        self.decoupled = "decoupled" in json.loads(args["model_config"]).get("model_transaction_policy", {})

    def execute(self, requests):
        answers = [self.answer(request) for request in requests]
        return None if self.decoupled else answers

    def answer(self, request):
        self.asked.increment(1)
        text = pb_utils.get_input_tensor_by_name(request, "text_input").as_numpy().reshape(-1)[0].decode()
        word, _, rest = text.partition(" ")
        if self.decoupled:
            sender = request.get_response_sender()
            for part in text.split():
                sender.send(self.failed(3) if part == "fail" else self.said(part))
            return sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        if word == "fail":
            return self.failed(int(rest))
        if word == "raise":
            raise ValueError(rest)
        said = json.dumps([text, json.loads(request.parameters() or "{}")], sort_keys=True)
        return self.said(said)

    def failed(self, code):
        return pb_utils.InferenceResponse(error=pb_utils.TritonError("so be it", code))

    def said(self, text):
        tensor = pb_utils.Tensor("text_output", np.array([text.encode()], np.object_))
        return pb_utils.InferenceResponse([tensor], parameters={"length": len(text)})
"""
_SCRIPT = """
import json
import numpy as np
from sagemaker_inference import content_types, decoder, encoder
from sagemaker_inference.errors import GenericInferenceToolkitError

def model_fn(model_dir):
    return 2.0

def input_fn(body, content_type):
    if content_type == "text/x-fail":
        raise GenericInferenceToolkitError(int(body), "the script says so")
    if content_type == "text/x-raise":
        raise ValueError("the body says so")
    return decoder.decode(body, content_type)

def predict_fn(data, model):
    return data * model

def output_fn(prediction, accept):
    return encoder.encode(prediction, accept)
"""
_PIECES = """
def model_fn(model_dir):
    return 1

def transform_fn(model, body, content_type, accept, context):
    context.set_response_content_type(0, "text/x-pieces")
    for number in range(int(body)):
        if number == 3:
            raise ValueError("in the middle")
        yield f"piece {number};"
"""


def record_repository(folder: Path) -> dict[str, str]:
    """KServe over HTTP and gRPC of a repository, and afterwards the metrics."""
    root = folder / "repository"
    models.lay_out(root / "plus", models.plus(1), _BATCHED)
    models.lay_out(root / "bare", models.plus(2))
    models.lay_out(root / "types", models.every_type(), _BATCHED)
    models.lay_out(root / "pick", models.pick())
    for name, datatype, dims in (
        ("text", "STRING", "[ -1 ]"),
        ("whole", "INT64", "[ -1 ]"),
        ("half", "FP16", "[ -1 ]"),
        ("brain", "BF16", "[ -1 ]"),
        ("double", "FP64", "[ -1, 2 ]"),
    ):
        models.lay_out(root / name, None, _IDENTITY.format(datatype, dims))
    labelled = models.lay_out(
        root / "labelled", models.plus(1), f'{_BATCHED}output {{ {cases_kserve.Y} label_filename: "labels.txt" }}'
    )
    (labelled / "labels.txt").write_text("ant\nbee\ncat\n")
    models.lay_out(root / "versions", models.plus(1), "version_policy { specific { versions: [1, 3] } }\n")
    models.lay_out(root / "versions", models.plus(3), version=3)
    models.lay_out(root / "sums", sequence_models.accumulator(), _SUMS)
    models.lay_out(root / "pair", None, models.one_behind_the_other("plus", "labelled"))
    models.lay_out(root / "repeat", None, models.REPEAT)
    models.lay_out(root / "cached", models.plus(1), f"{_BATCHED}response_cache {{ enable: true }}\n")
    models.lay_out(root / "broken", b"no model")
    models.lay_out(root / "says", _SAYS, _TEXT)
    models.lay_out(root / "streams", _SAYS, _STREAMS)
    environ = {
        "MME_MODEL_REPOSITORY": str(root),
        "MME_GRPC_PORT": "0",
        "MME_MAX_BODY": "64KiB",
        "MME_ALLOW_CLIENT_SHM": "true",
        "MME_ALLOW_LOAD_OVERRIDES": "true",
        "MME_METRICS_CONFIG": "summary_latencies=true,histogram_latencies=true",
    }
    with _shared_memory() as key, Server(folder / "server", environ) as server:
        eventually(lambda: server.ask("GET", "/v2/health/ready").status == 200, "the models")
        masked = Masks({str(folder): "folder", key: "key"})
        recorder = wire.Recorder(server, masked, {"HERE": str(folder), cases_kserve.KEY: key})
        return {
            "http-kserve.txt": recorder.http(cases_kserve.CASES),
            "grpc.txt": recorder.grpc(cases_grpc.CASES),
            "metrics.txt": masked(_metrics(server)),
        }


def record_platform(folder: Path) -> dict[str, str]:
    """SageMaker's contract where SageMaker loads, scripts too; with memory for little."""
    root = folder / "models"
    models.lay_out(root / "plus/model", models.plus(1), _BATCHED)
    models.lay_out(root / "nested/model/inner", models.plus(2))
    models.lay_out(root / "pick/model", models.pick())
    models.lay_out(root / "broken/model", b"no model")
    models.lay_out(root / "wrong/model", models.plus(1), "max_batchsize: 1")
    models.lay_out(root / "heavy/model", models.plus(1, megabytes=100))
    models.lay_out(root / "text/model", None, _IDENTITY.format("STRING", "[ -1 ]"))
    (root / "empty/model").mkdir(parents=True)
    scripts.lay_out(root / "script/model", _SCRIPT)
    scripts.lay_out(root / "pieces/model", _PIECES)
    scripts.lay_out(root / "failing/model", "def model_fn(model_dir): raise OSError('no weights here')")
    environ = {
        "SAGEMAKER_MULTI_MODEL": "true",
        "MME_MEMORY_BUDGET": "60MB",
        "MME_WEIGHTS": "plain",
    }
    with Server(folder / "server", environ) as server:
        recorder = wire.Recorder(server, Masks({str(folder): "folder"}), {"HERE": str(root)})
        return {"http-platform.txt": recorder.http(cases_sagemaker.PLATFORM)}


def record_store(folder: Path) -> dict[str, str]:
    """Archives that clients name, by the Runtime API too; sessions, and an API of which parts are restricted."""
    base, store = folder / "unpacked", folder / "store"
    models.lay_out(base / "plus", models.plus(1), _BATCHED)
    models.lay_out(base / "pick", models.pick())
    models.lay_out(base / "sums", sequence_models.accumulator(), _SUMS)
    models.lay_out(base / "repeat", None, models.REPEAT)
    models.lay_out(base / "says", _SAYS, _TEXT)
    models.lay_out(base / "streams", _SAYS, _STREAMS)
    scripts.lay_out(base / "script", _SCRIPT)
    scripts.lay_out(base / "pieces", _PIECES)
    for model in base.iterdir():
        models.pack(model, store / f"{model.name}.tar.gz")
    for number in range(4):  # each is asked once: what comes later depends on how much later
        (store / f"broken-{number}.tar.gz").write_bytes(b"no archive %d" % number)
    environ = {
        "MME_MODEL_STORE": str(store),
        "MME_GRPC_PORT": "0",
        "MME_SERVER_ID": "golden",
        "MME_HTTP_RESTRICTED_API": "model-repository,trace,logging:admin-key=secret",
        "MME_GRPC_RESTRICTED_PROTOCOL": "model-repository,statistics:admin-key=secret",
        "MME_HTTP_HEADER_FORWARD_PATTERN": "x-tenant-.*",
        "MME_GRPC_HEADER_FORWARD_PATTERN": "x-tenant-.*",
    }
    with Server(folder / "server", environ) as server:
        recorder = wire.Recorder(server, Masks({str(folder): "folder"}), {"HERE": str(store)})
        return {
            "http-store.txt": recorder.http(cases_sagemaker.STORE),
            "grpc-restricted.txt": recorder.grpc(cases_grpc.RESTRICTED),
        }


def record_single(folder: Path) -> dict[str, str]:
    """One model, of a batch transform job, whose bodies are Triton's flat JSON; without sessions."""
    models.lay_out(folder / "model/says", _SAYS, _TEXT)
    environ = {
        "MME_MODEL_DIR": str(folder / "model"),
        "SAGEMAKER_TRITON_INFERENCE_TYPE": "generate",
        "SAGEMAKER_BATCH": "true",
        "SAGEMAKER_BATCH_STRATEGY": "MULTI_RECORD",
        "SAGEMAKER_MAX_CONCURRENT_TRANSFORMS": "3",
        "SAGEMAKER_ENABLE_STATEFUL_SESSIONS": "false",
        "MME_DASHBOARD": "false",
    }
    with Server(folder / "server", environ) as server:
        recorder = wire.Recorder(server, Masks({str(folder): "folder"}), {})
        return {"http-single.txt": recorder.http(cases_sagemaker.SINGLE)}


@contextmanager
def _shared_memory() -> Iterator[str]:
    """The key of a region that holds 1, 2, 3, 4 as FP32, and as much room behind."""
    path = Path("/dev/shm") / f"golden-{os.getpid():07}"  # noqa: S108 - POSIX shared memory
    path.write_bytes(cases_kserve.FLOATS + bytes(16))
    try:
        yield path.name
    finally:
        path.unlink()


def _metrics(server: Server) -> str:
    """Names, types, help and labels of all there is, without values, and without the models that each has."""
    lines = []
    for family in families_of(server.ask("GET", "/metrics").body.decode()):
        lines.append(f"{family.name} ({family.type}): {family.documentation}")
        samples: dict[str, set[str]] = {}
        for sample in family.samples:
            labels = {key: "*" if key in _ANY else text for key, text in sorted(sample.labels.items())}
            within = " ".join(text for key, text in labels.items() if key in _WITHIN)
            told = " ".join(f"{key}={text}" for key, text in labels.items() if key not in _WITHIN)
            samples.setdefault(f"  {sample.name} {told}".rstrip(), set()).add(within)
        lines += [f"{sample} {' '.join(sorted(within))}".rstrip() for sample, within in sorted(samples.items())]
    return "\n".join(lines) + "\n"
