"""Calls over gRPC: each of KServe v2 with Triton's extensions, good and bad, to a repository's server. In this order."""

from __future__ import annotations

import json
from typing import Any

import grpc
from tritonclient.grpc import service_pb2 as pb

from tests.contract import models
from tests.golden.cases_kserve import FLOATS, KEY
from tests.golden.wire import Grpc

_ADMIN = {"triton-grpc-protocol-admin-key": "secret"}


def value(given: Any) -> pb.InferParameter:
    """A parameter."""
    field = {bool: "bool_param", int: "int64_param", str: "string_param", float: "double_param"}[type(given)]
    return pb.InferParameter(**{field: given})


def tensor(name: str = "X", shape: Any = (1, 4), datatype: str = "FP32", parameters: Any = (), **contents: Any) -> Any:
    """An input."""
    return pb.ModelInferRequest.InferInputTensor(
        name=name,
        shape=shape,
        datatype=datatype,
        contents=pb.InferTensorContents(**contents) if contents else None,
        parameters={key: value(given) for key, given in dict(parameters).items()},
    )


def output(name: str = "Y", **parameters: Any) -> Any:
    """A wanted output."""
    given = {key: value(each) for key, each in parameters.items()}
    return pb.ModelInferRequest.InferRequestedOutputTensor(name=name, parameters=given)


def infer(
    model: str = "plus", *tensors: Any, raw: Any = (), outputs: Any = (), parameters: Any = (), **more: Any
) -> Any:
    """A request; of X = 1, 2, 3, 4 in raw contents if nothing is said."""
    if not tensors and not raw:
        tensors, raw = (tensor(),), (FLOATS,)
    return pb.ModelInferRequest(
        model_name=model,
        inputs=tensors,
        raw_input_contents=raw,
        outputs=outputs,
        parameters={key: value(given) for key, given in dict(parameters).items()},
        **more,
    )


def _infer(what: str, *given: Any, **more: Any) -> Grpc:
    return Grpc(what, "ModelInfer", [infer(*given, **more)])


def _typed(what: str, *tensors: Any, model: str = "plus", **more: Any) -> Grpc:
    return Grpc(what, "ModelInfer", [infer(model, *tensors, **more)])


def _stream(what: str, *requests: Any) -> Grpc:
    return Grpc(what, "ModelStreamInfer", requests)


def _text(text: str) -> Any:
    return tensor("text_input", [1], "BYTES", bytes_contents=[text.encode()])


def _load(what: str, name: str = "bare", **parameters: Any) -> Grpc:
    given = {
        key: pb.ModelRepositoryParameter(**{_FIELDS[type(each)]: each})
        for key, each in ((key.replace("__", ":").replace("DOT", "."), each) for key, each in parameters.items())
    }
    return Grpc(what, "RepositoryModelLoad", [pb.RepositoryModelLoadRequest(model_name=name, parameters=given)])


_FIELDS = {bool: "bool_param", int: "int64_param", str: "string_param", bytes: "bytes_param"}


def _unload(what: str, name: str = "bare", **parameters: bool) -> Grpc:
    given = {key: pb.ModelRepositoryParameter(bool_param=each) for key, each in parameters.items()}
    return Grpc(what, "RepositoryModelUnload", [pb.RepositoryModelUnloadRequest(model_name=name, parameters=given)])


def _trace(what: str, model: str = "", **settings: Any) -> Grpc:
    given = {key: pb.TraceSettingRequest.SettingValue(value=each) for key, each in settings.items()}
    return Grpc(what, "TraceSetting", [pb.TraceSettingRequest(model_name=model, settings=given)])


def _log(what: str, **settings: Any) -> Grpc:
    fields = {bool: "bool_param", int: "uint32_param", str: "string_param"}
    given = {key: pb.LogSettingsRequest.SettingValue(**{fields[type(each)]: each}) for key, each in settings.items()}
    return Grpc(what, "LogSettings", [pb.LogSettingsRequest(settings=given)])


def _register(what: str, name: str = "g", key: str = KEY, size: int = 32, offset: int = 0) -> Grpc:
    message = pb.SystemSharedMemoryRegisterRequest(name=name, key=key, byte_size=size, offset=offset)
    return Grpc(what, "SystemSharedMemoryRegister", [message])


def _sum(number: float, **parameters: Any) -> Any:
    return infer("sums", tensor(shape=[1, 1], fp32_contents=[number]), parameters=parameters)


_REGION = {"shared_memory_region": "g", "shared_memory_byte_size": 16}
_SETTINGS = {"x": 1, "y": "text", "z": True, "w": 0.5}

SERVER = (
    Grpc("live", "ServerLive", [pb.ServerLiveRequest()]),
    Grpc("ready", "ServerReady", [pb.ServerReadyRequest()]),
    Grpc("server metadata", "ServerMetadata", [pb.ServerMetadataRequest()]),
    Grpc("model ready", "ModelReady", [pb.ModelReadyRequest(name="plus")]),
    Grpc("version ready", "ModelReady", [pb.ModelReadyRequest(name="versions", version="3")]),
    Grpc("version not ready", "ModelReady", [pb.ModelReadyRequest(name="versions", version="2")]),
    Grpc("version that is none", "ModelReady", [pb.ModelReadyRequest(name="versions", version="x")]),
    Grpc("unknown model ready", "ModelReady", [pb.ModelReadyRequest(name="nobody")]),
    Grpc("no model ready", "ModelReady", [pb.ModelReadyRequest()]),
    Grpc("model metadata", "ModelMetadata", [pb.ModelMetadataRequest(name="types")]),
    Grpc("model metadata, version", "ModelMetadata", [pb.ModelMetadataRequest(name="versions", version="1")]),
    Grpc("model metadata, version not served", "ModelMetadata", [pb.ModelMetadataRequest(name="versions", version="2")]),
    Grpc("model metadata, unknown", "ModelMetadata", [pb.ModelMetadataRequest(name="nobody")]),
    Grpc("model metadata, broken", "ModelMetadata", [pb.ModelMetadataRequest(name="broken")]),
    Grpc("config", "ModelConfig", [pb.ModelConfigRequest(name="plus")]),
    Grpc("config of a sequence's model", "ModelConfig", [pb.ModelConfigRequest(name="sums")]),
    Grpc("config, unknown", "ModelConfig", [pb.ModelConfigRequest(name="nobody")]),
    Grpc("index", "RepositoryIndex", [pb.RepositoryIndexRequest()]),
    Grpc("index of what is ready", "RepositoryIndex", [pb.RepositoryIndexRequest(ready=True)]),
    Grpc("index of one repository", "RepositoryIndex", [pb.RepositoryIndexRequest(repository_name="one")]),
    Grpc("statistics of a version", "ModelStatistics", [pb.ModelStatisticsRequest(name="versions", version="1")]),
    Grpc("statistics, unknown", "ModelStatistics", [pb.ModelStatisticsRequest(name="nobody")]),
    Grpc("unknown method", "Nothing", [b""]),
    Grpc("unknown service", "/nothing.Service/Nothing", [b""]),
    Grpc("no message", "ServerLive", [b"\xff\xff"]),
    Grpc("health", "/grpc.health.v1.Health/Check", [b""]),
    _trace("trace"),
    _trace("trace of a model", "plus"),
    _trace("trace, unknown model", "nobody"),
    _trace("trace, another rate", trace_rate=["5"]),
    _trace("trace, no number", trace_rate=["x"]),
    _trace("trace, unknown", nothing=["1"]),
    _trace("trace, unknown level", trace_level=["X"]),
    _trace("trace, as at the start", trace_rate=[]),
    _log("log"),
    _log("log, a level", log_warning=True),
    _log("log, another kind", log_warning="x"),
    _log("log, unknown", nothing=True),
    _log("log, unknown format", log_format="x"),
)  # fmt: skip

INFER = (
    _infer("raw contents"),
    _infer("id and parameters", id="seven", parameters=_SETTINGS),
    _typed("typed contents", tensor(fp32_contents=[1, 2, 3, 4])),
    _infer("version", "versions", model_version="1"),
    _infer("version not served", "versions", model_version="2"),
    _infer("version that is none", "versions", model_version="x"),
    _infer("unknown model", "nobody"),
    _infer("no model", ""),
    _infer("broken model", "broken"),
    _infer("ensemble", "pair"),
    _infer("cached", "cached"),
    _typed("fails", tensor("I", [1, 1], "INT64", int64_contents=[99]), model="pick"),
    Grpc("no inputs", "ModelInfer", [pb.ModelInferRequest(model_name="plus")]),
    Grpc("no message", "ModelInfer", [b"\xff"]),
    Grpc("nothing", "ModelInfer", [b""]),
    Grpc("a message cut", "ModelInfer", [infer().SerializeToString()[:-3]]),
    _infer("wrong name", "plus", tensor("Z"), raw=(FLOATS,)),
    _infer("input twice", "plus", tensor(), tensor(), raw=(FLOATS, FLOATS)),
    _infer("wrong datatype", "plus", tensor(datatype="INT32"), raw=(FLOATS,)),
    _infer("unknown datatype", "plus", tensor(datatype="FP8"), raw=(FLOATS,)),
    _infer("no datatype", "plus", tensor(datatype=""), raw=(FLOATS,)),
    _infer("wrong shape", "plus", tensor(shape=[1, 5]), raw=(FLOATS,)),
    _infer("rank", "plus", tensor(shape=[4]), raw=(FLOATS,)),
    _infer("shape below zero", "plus", tensor(shape=[-1, 4]), raw=(FLOATS,)),
    _infer("shape too large", "plus", tensor(shape=[2**62, 4]), raw=(FLOATS,)),
    _infer("batch too large", "plus", tensor(shape=[9, 4]), raw=(FLOATS * 9,)),
    _infer("too few bytes", "plus", tensor(), raw=(FLOATS[:8],)),
    _infer("too many bytes", "plus", tensor(), raw=(FLOATS * 2,)),
    _infer("no contents", "plus", tensor()),
    _infer("contents too many", "plus", tensor(), raw=(FLOATS, FLOATS)),
    _infer("raw and typed", "plus", tensor(fp32_contents=[1, 2, 3, 4]), raw=(FLOATS,)),
    _typed("too few elements", tensor(fp32_contents=[1, 2])),
    _typed("elements of another type", tensor(int_contents=[1, 2, 3, 4])),
    _typed("FP16 typed", tensor("IN", [1], "FP16", fp32_contents=[1]), model="half"),
    _infer("FP16", "half", tensor("IN", [2], "FP16"), raw=(b"\0\x3c\0\xbc",)),
    _infer("BF16", "brain", tensor("IN", [2], "BF16"), raw=(b"\x80\x3f\x80\xbf",)),
    _typed("texts", tensor("IN", [2], "BYTES", bytes_contents=[b"a", b"\xff"]), model="text"),
    _infer("texts, raw", "text", tensor("IN", [1], "BYTES"), raw=(b"\x01\0\0\0a",)),
    _infer("texts, cut", "text", tensor("IN", [1], "BYTES"), raw=(b"\x09\0\0\0a",)),
    _typed("INT64", tensor("IN", [2], "INT64", int64_contents=[-1, 2]), model="whole"),
    _typed("FP64", tensor("IN", [1, 2], "FP64", fp64_contents=[0.1, -1e308]), model="double"),
    Grpc(
        "every type",
        "ModelInfer",
        [
            infer(
                "types",
                *(tensor(f"IN_{name}", [2, 2], name) for name in models.VALUES),
                raw=[
                    each.tobytes() if name != "BYTES" else b"\x01\0\0\0a" * 4 for name, each in models.VALUES.items()
                ],
            )
        ],
    ),
    _infer("output", outputs=[output()]),
    _infer("wrong output", outputs=[output("Z")]),
    _infer("output twice", outputs=[output(), output()]),
    _infer("classes", "labelled", outputs=[output(classification=2)]),
    _infer("classes, another kind", outputs=[output(classification="x")]),
    _infer("priority", parameters={"priority": 1}),
    _infer("priority, another kind", parameters={"priority": "x"}),
    _infer("time limit below zero", parameters={"timeout": -1}),
    _infer("reserved parameter", parameters={"triton_x": 1}),
    Grpc("gzip", "ModelInfer", [infer()], compression=grpc.Compression.Gzip),
    Grpc("deflate", "ModelInfer", [infer()], compression=grpc.Compression.Deflate),
    Grpc("metadata", "ModelInfer", [infer()], {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}),
    Grpc("too large", "ModelInfer", [infer("whole", tensor("IN", [10_000], "INT64"), raw=(bytes(80_000),))]),
    Grpc("sequence begins", "ModelInfer", [_sum(1, sequence_id=8, sequence_start=True)]),
    Grpc("sequence goes on", "ModelInfer", [_sum(2, sequence_id=8)]),
    Grpc("sequence ends", "ModelInfer", [_sum(3, sequence_id=8, sequence_end=True)]),
    Grpc("sequence that has ended", "ModelInfer", [_sum(4, sequence_id=8)]),
    Grpc("sequence without an id", "ModelInfer", [_sum(4)]),
    Grpc("sequence start of another kind", "ModelInfer", [_sum(4, sequence_id=8, sequence_start="x")]),
    *(_typed(f"Python fails with {code}", _text(f"fail {code}"), model="says") for code in range(8)),
    _typed("Python raises", _text("raise no such thing"), model="says"),
    _typed("Python answers", _text("hello"), model="says", parameters=_SETTINGS),
    _typed("decoupled", _text("one"), model="streams"),
)  # fmt: skip

STREAMS = (
    _stream("stream", infer()),
    _stream("stream of a decoupled model", infer("streams", _text("one two"), id="seven")),
    _stream("stream, with the last one told", infer("streams", _text("one two"), parameters={"triton_enable_empty_final_response": True})),
    _stream("stream, of one answer, with the last one told", infer("plus", parameters={"triton_enable_empty_final_response": True})),
    _stream("stream, an error in it", infer("streams", _text("one fail three"))),
    _stream("stream, unknown model", infer("nobody")),
    _stream("stream, wrong input", infer("plus", tensor("Z"), raw=(FLOATS,))),
    _stream("stream, an error and another request", infer("plus", tensor("Z"), raw=(FLOATS,)), infer(id="after")),
    _stream("stream, no message", b"\xff"),
    _stream("stream of nothing"),
    _stream("stream of a sequence", _sum(1, sequence_id=9, sequence_start=True), _sum(2, sequence_id=9), _sum(3, sequence_id=9, sequence_end=True)),
    _stream("stream of texts' sequence", _sum(1, sequence_id="a", sequence_start=True, sequence_end=True)),
)  # fmt: skip

CONTROL = (
    _register("register"),
    _register("register again"),
    _register("register, no such key", "h", "golden-nothing"),
    _register("register, too large", "h", size=64),
    Grpc("regions", "SystemSharedMemoryStatus", [pb.SystemSharedMemoryStatusRequest()]),
    Grpc("region", "SystemSharedMemoryStatus", [pb.SystemSharedMemoryStatusRequest(name="g")]),
    Grpc("unknown region", "SystemSharedMemoryStatus", [pb.SystemSharedMemoryStatusRequest(name="h")]),
    _infer("input from it", "plus", tensor(parameters=_REGION)),
    _infer("input from it, too far", "plus", tensor(parameters={**_REGION, "shared_memory_offset": 20})),
    _infer("input from an unknown region", "plus", tensor(parameters={**_REGION, "shared_memory_region": "h"})),
    _infer("output into it", outputs=[output(**_REGION, shared_memory_offset=16)]),
    _infer("output into too little", outputs=[output(shared_memory_region="g", shared_memory_byte_size=8)]),
    Grpc("unregister", "SystemSharedMemoryUnregister", [pb.SystemSharedMemoryUnregisterRequest(name="g")]),
    Grpc("unregister all", "SystemSharedMemoryUnregister", [pb.SystemSharedMemoryUnregisterRequest()]),
    Grpc("CUDA regions", "CudaSharedMemoryStatus", [pb.CudaSharedMemoryStatusRequest()]),
    Grpc("register of CUDA", "CudaSharedMemoryRegister", [pb.CudaSharedMemoryRegisterRequest(name="g", byte_size=16)]),
    Grpc("unregister of CUDA", "CudaSharedMemoryUnregister", [pb.CudaSharedMemoryUnregisterRequest(name="g")]),
    _load("load"),
    _load("load, configuration", config=json.dumps({"max_batch_size": 2})),
    _load("load, configuration that is no JSON", config="{"),
    _load("load, configuration of another kind", config=1),
    _load("load, unknown parameter", nothing=1),
    _load("load, a file", config="{}", file__1_model=models.plus(5)),
    _load("load, a file without a configuration", **{"file:1/model.onnx": models.plus(5)}),
    _load("load, a file with one", **{"config": "{}", "file:1/model.onnx": models.plus(5)}),
    _infer("its answer", "bare"),
    _load("load, unknown model", "nobody"),
    _load("load, broken model", "broken"),
    Grpc("load of one repository", "RepositoryModelLoad", [pb.RepositoryModelLoadRequest(repository_name="one", model_name="bare")]),
    Grpc("statistics", "ModelStatistics", [pb.ModelStatisticsRequest(name="bare")]),
    _unload("unload"),
    _unload("unload again"),
    _unload("unload, dependents", unload_dependents=True),
    _unload("unload, unknown model", "nobody"),
    Grpc("ready when unloaded", "ModelReady", [pb.ModelReadyRequest(name="bare")]),
)  # fmt: skip

CASES = (*SERVER, *INFER, *STREAMS, *CONTROL)
RESTRICTED = (
    Grpc("server metadata", "ServerMetadata", [pb.ServerMetadataRequest()]),
    Grpc("index", "RepositoryIndex", [pb.RepositoryIndexRequest()]),
    Grpc("index with the key", "RepositoryIndex", [pb.RepositoryIndexRequest(ready=True)], _ADMIN),
    Grpc("index with another key", "RepositoryIndex", [pb.RepositoryIndexRequest()], {"triton-grpc-protocol-admin-key": "x"}),
    Grpc("load", "RepositoryModelLoad", [pb.RepositoryModelLoadRequest(model_name="plus")]),
    Grpc("load with the key", "RepositoryModelLoad", [pb.RepositoryModelLoadRequest(model_name="plus")], _ADMIN),
    Grpc("statistics", "ModelStatistics", [pb.ModelStatisticsRequest(name="plus")]),
    Grpc("statistics with the key", "ModelStatistics", [pb.ModelStatisticsRequest(name="pick")], _ADMIN),
    Grpc("forwarded metadata", "ModelInfer", [infer("says", _text("hello"))], {"x-tenant-name": "t", "x-other": "o"}),
    _register("shared memory"),
    _infer("infer from shared memory", "plus", tensor(parameters=_REGION)),
    _infer("unknown archive", "nobody"),
    _infer("broken archive", "broken-3"),
)  # fmt: skip
