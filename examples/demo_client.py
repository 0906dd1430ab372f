"""The demo's client: plain boto3, as for an endpoint on AWS, and what the server says about each answer.

A body is either KServe v2 JSON or the binary form of it, a JSON header followed by the tensors' bytes:

    application/json                                                   {"inputs": [{"name", "shape", "datatype", …}]}
    application/vnd.sagemaker-triton.binary+json;json-header-size=N    N bytes of such a header, then raw tensors

The times come from the response's `Server-Timing` header. Knows the wire and nothing of models.
"""

from __future__ import annotations

import json
import re
import time
import urllib.request
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import boto3
import numpy as np
from botocore.config import Config

from examples.demo_servers import CREDENTIALS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    Tensors = Mapping[str, NDArray[Any]]

JSON_TYPE = "application/json"
BINARY_TYPE = "application/vnd.sagemaker-triton.binary+json;json-header-size="
ENDPOINT_NAME = "demo"  # the server has one endpoint; any name will do

DATATYPES: dict[str, np.dtype[Any]] = {"INT64": np.dtype(np.int64), "FP32": np.dtype(np.float32)}
NAMES = {dtype: name for name, dtype in DATATYPES.items()}

_TIMING = re.compile(r'(\w+);(?:dur|desc)=("[^"]*"|[^,;\s]*)')


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back for one request.

    Attributes:
        milliseconds: `download`, `load`, `queue` and `infer` as far as they took place.
        evicted: archives of the models that had to leave memory for this one.
        round_trip: milliseconds from call to answer, boto3 included.
    """

    target: str
    wire: str
    outputs: dict[str, NDArray[Any]]
    hit: bool
    milliseconds: dict[str, float]
    evicted: tuple[str, ...]
    round_trip: float


class Endpoint:
    """An endpoint that answers at `url`. `runtime` is boto3's client of it."""

    def __init__(self, url: str) -> None:
        self.url = url
        # One try: a failure should be seen, not repeated.
        once = Config(retries={"total_max_attempts": 1}, read_timeout=120)
        self.runtime = boto3.client("sagemaker-runtime", endpoint_url=url, config=once, **CREDENTIALS)

    def invoke(self, model: str, tensors: Tensors, *, binary: bool) -> Answer:
        """Ask the model for all of its outputs. The first dimension of every tensor is the batch."""
        content_type, body = encode_binary(tensors) if binary else encode_json(tensors)
        target, began = f"{model}.tar.gz", time.perf_counter()
        response = self.runtime.invoke_endpoint(
            EndpointName=ENDPOINT_NAME, TargetModel=target, ContentType=content_type, Body=body
        )
        outputs = decode(response["ContentType"], response["Body"].read())
        round_trip = (time.perf_counter() - began) * 1000
        hit, evicted, milliseconds = read_timing(response["ResponseMetadata"]["HTTPHeaders"]["server-timing"])
        wire = "binary" if binary else "JSON"
        return Answer(target, wire, outputs, hit, milliseconds, evicted, round_trip)

    def loaded_models(self) -> int:
        """How many models are in memory: LoadedModelCount on CloudWatch, a gauge on the server's /metrics."""
        return int(self._metric("mme_loaded_models"))

    def executions(self, model: str) -> int:
        """How many batches that model has executed. A model inside of an archive is `archive.tar.gz:model`."""
        return int(self._metric(f'nv_inference_exec_count{{model="{model}",version="1"}}'))

    def _metric(self, name: str) -> float:
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=10) as response:
            found = re.search(rf"^{re.escape(name)} (\S+)$", response.read().decode(), re.MULTILINE)
        if found is None:
            raise ValueError(f"{self.url}/metrics has no {name}")
        return float(found[1])


def read_timing(header: str) -> tuple[bool, tuple[str, ...], dict[str, float]]:
    """Whether the model was in memory, who had to leave it, and the milliseconds of each phase.

    As in `cache;desc=miss, download;dur=12.3, load;dur=88.1, infer;dur=5.2, evict;desc="bert-1.tar.gz"`.
    """
    entries = [(name, value.strip('"')) for name, value in _TIMING.findall(header)]
    evicted = tuple(value for name, value in entries if name == "evict")
    milliseconds = {name: float(value) for name, value in entries if name not in ("cache", "evict")}
    return ("cache", "hit") in entries, evicted, milliseconds


def encode_json(tensors: Tensors) -> tuple[str, bytes]:
    """Content type and body, tensors spelled out as numbers."""
    inputs = [_describe(name, tensor) | {"data": tensor.ravel().tolist()} for name, tensor in tensors.items()]
    return JSON_TYPE, json.dumps({"inputs": inputs}).encode()


def encode_binary(tensors: Tensors) -> tuple[str, bytes]:
    """Content type and body, tensors as little-endian bytes behind the header; asks for the same in return."""
    inputs = [
        _describe(name, tensor) | {"parameters": {"binary_data_size": tensor.nbytes}}
        for name, tensor in tensors.items()
    ]
    header = json.dumps({"inputs": inputs, "parameters": {"binary_data_output": True}}).encode()
    return f"{BINARY_TYPE}{len(header)}", header + b"".join(tensor.tobytes() for tensor in tensors.values())


def decode(content_type: str, body: bytes) -> dict[str, NDArray[Any]]:
    """Output tensors by name, from either form."""
    _, is_binary, size = content_type.partition("json-header-size=")
    header_size = int(size) if is_binary else len(body)
    tensors, offset = {}, header_size
    for output in json.loads(body[:header_size])["outputs"]:
        dtype = DATATYPES[output["datatype"]]
        if "data" in output:
            values = np.array(output["data"], dtype)
        else:
            byte_size = output["parameters"]["binary_data_size"]
            values = np.frombuffer(body[offset : offset + byte_size], dtype)
            offset += byte_size
        tensors[output["name"]] = values.reshape(output["shape"])
    return tensors


def _describe(name: str, tensor: NDArray[Any]) -> dict[str, Any]:
    return {"name": name, "shape": list(tensor.shape), "datatype": NAMES[tensor.dtype]}
