"""Have a model count, and print each number when it comes.

    python -m examples.call_counter [URL]

Twice: by boto3's invoke_endpoint_with_response_stream, and by generate_stream over plain HTTP.
"""

from __future__ import annotations

import json
import sys
import urllib.request
from typing import TYPE_CHECKING, Any

import boto3

if TYPE_CHECKING:
    from collections.abc import Iterator

TARGET = "counter.tar.gz"


def main() -> None:
    """Count to five in either way."""
    url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8080"
    for name, numbers in {
        "invoke_endpoint_with_response_stream": count_by_boto3(streaming_client(url, TARGET), 5, 0.5),
        "generate_stream": count_by_http(url, 5, 0.5),
    }.items():
        print(name)
        for number in numbers:
            print(f"  {number}", flush=True)


def streaming_client(url: str, target: str) -> Any:
    """A client of boto3 whose streams come from that model.

    invoke_endpoint_with_response_stream takes no TargetModel, because SageMaker itself streams from endpoints of one
    model only. A server of many models reads the name from the header that TargetModel becomes in other calls; where
    the server has one model, leave the hook out.
    """
    # boto3 wants a region and credentials; on a server of one's own nobody checks them.
    anybody = {"region_name": "us-east-1", "aws_access_key_id": "any", "aws_secret_access_key": "any"}
    runtime = boto3.client("sagemaker-runtime", endpoint_url=url, **anybody)

    def name_target(params: dict[str, Any], **_: Any) -> None:
        params["headers"]["X-Amzn-SageMaker-Target-Model"] = target

    runtime.meta.events.register("before-call.sagemaker-runtime.InvokeEndpointWithResponseStream", name_target)
    return runtime


def count_by_boto3(runtime: Any, count: int, pause: float) -> Iterator[int]:
    """The numbers as they come, each after `pause` seconds.

    Raises:
        botocore.exceptions.EventStreamError: the model failed after the first number.
    """
    inputs = [
        {"name": "COUNT", "shape": [1], "datatype": "INT32", "data": [count]},
        {"name": "PAUSE", "shape": [1], "datatype": "FP32", "data": [pause]},
    ]
    answer = runtime.invoke_endpoint_with_response_stream(
        EndpointName="any", ContentType="application/json", Body=json.dumps({"inputs": inputs})
    )
    for event in answer["Body"]:
        (number,) = json.loads(event["PayloadPart"]["Bytes"])["outputs"]
        yield number["data"][0]


def count_by_http(url: str, count: int, pause: float) -> Iterator[int]:
    """The numbers as they come: each is a server-sent event, `data: {"NUMBER": 1, …}` and an empty line."""
    request = json.dumps({"COUNT": count, "PAUSE": pause}).encode()
    with urllib.request.urlopen(f"{url}/v2/models/{TARGET}/generate_stream", request) as events:
        for line in events:
            if line.startswith(b"data: "):
                event = json.loads(line.removeprefix(b"data: "))
                if "error" in event:
                    raise RuntimeError(event["error"])
                yield event["NUMBER"]


if __name__ == "__main__":
    main()
