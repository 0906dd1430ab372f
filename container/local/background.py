"""Asynchronous invocations: the request out of S3, the answer into S3, by a few workers behind a queue.

An invocation is accepted with 202 before anything of it is read. Its answer, or its error, is an object under the
endpoint's output or failure path. Threads of the front come in by `accept`.
"""

from __future__ import annotations

import json
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from botocore.exceptions import BotoCoreError, ClientError
from werkzeug.datastructures import Headers

from container.local.faults import RuntimeApiError
from container.ship.aws import split_uri

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from container.local.endpoint import Endpoint

_PREFIX = "X-Amzn-SageMaker-"
_TIME_TO_LIVE = 6 * 3600.0
_PATIENCE = 900.0


@dataclass(frozen=True, slots=True)
class Accepted:
    """Where the answer of an accepted invocation will be."""

    inference_id: str
    output: str
    failure: str


class Background:
    """The queue of an endpoint.

    Args:
        endpoint: that answers.
        s3: boto3's client.
        output, failure: URIs of the folders for answers and errors.
        workers: invocations at a time: MaxConcurrentInvocationsPerInstance.
        tell: called with a sentence when one has ended.
    """

    def __init__(
        self, endpoint: Endpoint, s3: Any, output: str, failure: str, workers: int, tell: Callable[[str], None]
    ) -> None:
        self._endpoint = endpoint
        self._s3 = s3
        self._output = output.rstrip("/")
        self._failure = (failure or output).rstrip("/")
        self._pool = ThreadPoolExecutor(workers, "async")
        self._tell = tell

    def accept(self, target: str, headers: Headers) -> Accepted:
        """Queue an invocation.

        Raises:
            RuntimeApiError: it names no input in S3.
        """
        source = headers.get(f"{_PREFIX}InputLocation", "")
        if not source.startswith("s3://"):
            raise RuntimeApiError("ValidationError", f"InputLocation '{source}' is not an s3:// URI")
        file = str(uuid.uuid4())
        extension = headers.get(f"{_PREFIX}S3OutputPathExtension", "").strip("/")
        folder = f"{self._output}/{extension}" if extension else self._output
        name = headers.get(f"{_PREFIX}Filename") or f"{file}.out"
        accepted = Accepted(
            headers.get(f"{_PREFIX}Inference-Id") or file, f"{folder}/{name}", f"{self._failure}/{file}-error.out"
        )
        self._pool.submit(self._run, target, source, Headers(list(headers)), accepted, time.monotonic())
        return accepted

    def close(self) -> None:
        """End what has begun; what has not is dropped."""
        self._pool.shutdown(cancel_futures=True)

    def _run(self, target: str, source: str, headers: Headers, accepted: Accepted, came: float) -> None:
        """One invocation; every end of it is an object in S3."""
        try:
            self._check_age(headers, came)
            body = self._read(source)
            patience = float(headers.get(f"{_PREFIX}InvocationTimeoutSeconds", _PATIENCE))
            answer = self._endpoint.invoke(target, body, _passed_on(headers), patience)
            self._write(accepted.output, answer.body, answer.headers.get("content-type", "application/octet-stream"))
            self._tell(f"async {accepted.inference_id}: answer in {accepted.output}")
        except RuntimeApiError as fault:
            self._fail(accepted, str(fault.facts.get("OriginalMessage") or fault.message))
        except (ClientError, BotoCoreError) as error:
            self._fail(accepted, f"S3: {error}")

    def _check_age(self, headers: Headers, came: float) -> None:
        most = float(headers.get(f"{_PREFIX}RequestTTLSeconds", _TIME_TO_LIVE))
        if time.monotonic() - came > most:
            raise RuntimeApiError("ValidationError", f"The request expired: it waited longer than {most:.0f} seconds.")

    def _fail(self, accepted: Accepted, reason: str) -> None:
        self._tell(f"async {accepted.inference_id}: failed, {reason}")
        try:
            self._write(accepted.failure, json.dumps({"error": reason}).encode(), "application/json")
        except (ClientError, BotoCoreError) as error:
            self._tell(f"async {accepted.inference_id}: {accepted.failure} cannot be written: {error}")

    def _read(self, uri: str) -> bytes:
        bucket, key = split_uri(uri)
        content: bytes = self._s3.get_object(Bucket=bucket, Key=key)["Body"].read()
        return content

    def _write(self, uri: str, body: bytes, content_type: str) -> None:
        bucket, key = split_uri(uri)
        self._s3.put_object(Bucket=bucket, Key=key, Body=body, ContentType=content_type)


def _passed_on(headers: Headers) -> dict[str, str]:
    """The headers that the container sees: content type and accept have names of their own in this operation."""
    names = {
        f"{_PREFIX}Content-Type": "Content-Type",
        f"{_PREFIX}Accept": "Accept",
        f"{_PREFIX}Custom-Attributes": f"{_PREFIX}Custom-Attributes",
        f"{_PREFIX}Inference-Id": f"{_PREFIX}Inference-Id",
    }
    return {ours: headers[theirs] for theirs, ours in names.items() if theirs in headers}
