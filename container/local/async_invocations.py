"""Asynchronous invocations: the request out of S3, the answer into S3, a few at a time.

An invocation is accepted with 202 before anything of it is read. Its answer, or its error, is an object under the
endpoint's output or failure path. On the event loop; S3 is read and written on threads.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING

from botocore.exceptions import BotoCoreError, ClientError

from container.local.container import RuntimeApiError, invalid
from container.ship.aws import split_uri
from model_handlers.errors import MmeError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

    from container.local.front import Endpoint

_PREFIX = "x-amzn-sagemaker-"  # headers have names in lower case
_TIME_TO_LIVE = 6 * 3600.0
_PATIENCE = 900.0


@dataclass(frozen=True, slots=True)
class Accepted:
    """An invocation that waits for its turn; times are seconds, `came` by `time.monotonic()`."""

    target: str
    source: str
    headers: Mapping[str, str]
    inference_id: str
    output: str
    failure: str
    came: float
    time_to_live: float
    patience: float


class AsyncInvocations:
    """The queue of an endpoint, `workers` invocations at a time; `report` is told when one has ended."""

    def __init__(
        self, endpoint: Endpoint, s3: Any, output: str, failure: str, workers: int, report: Callable[[str], None]
    ) -> None:
        self._endpoint = endpoint
        self._s3 = s3
        self._output = output.rstrip("/")
        self._failure = (failure or output).rstrip("/")
        self._turns = asyncio.Semaphore(workers)
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False
        self._report = report

    def accept(self, target: str, headers: Mapping[str, str]) -> Accepted:
        source = headers.get(f"{_PREFIX}inputlocation", "")
        try:
            split_uri(source)
        except MmeError:
            raise invalid(f"InputLocation '{source}' is not an s3:// URI") from None
        file = str(uuid.uuid4())
        extension = headers.get(f"{_PREFIX}s3outputpathextension", "").strip("/")
        folder = f"{self._output}/{extension}" if extension else self._output
        accepted = Accepted(
            target,
            source,
            _passed_on(headers),
            headers.get(f"{_PREFIX}inference-id") or file,
            f"{folder}/{headers.get(f'{_PREFIX}filename') or f'{file}.out'}",
            f"{self._failure}/{file}-error.out",
            time.monotonic(),
            _seconds(headers, "RequestTTLSeconds", _TIME_TO_LIVE),
            _seconds(headers, "InvocationTimeoutSeconds", _PATIENCE),
        )
        task = asyncio.create_task(self._run_in_turn(accepted))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return accepted

    async def close(self) -> None:
        """End what has begun; what has not is dropped."""
        self._closed = True
        await asyncio.gather(*self._tasks)

    async def _run_in_turn(self, accepted: Accepted) -> None:
        async with self._turns:
            if not self._closed:
                await self._run(accepted)

    async def _run(self, accepted: Accepted) -> None:
        """One invocation; every end of it is an object in S3."""
        try:
            if time.monotonic() - accepted.came > accepted.time_to_live:
                raise invalid(f"The request expired: it waited longer than {accepted.time_to_live:.0f} seconds.")
            body = await asyncio.to_thread(self._read, accepted.source)
            answer = await self._endpoint.invoke(accepted.target, body, accepted.headers, accepted.patience)
            content_type = answer.headers.get("content-type", "application/octet-stream")
            await asyncio.to_thread(self._write, accepted.output, answer.body, content_type)
            self._report(f"async {accepted.inference_id}: answer in {accepted.output}")
        except RuntimeApiError as fault:
            await self._fail(accepted, str(fault.facts.get("OriginalMessage") or fault.message))
        except (ClientError, BotoCoreError) as error:
            await self._fail(accepted, f"S3: {error}")
        except MmeError as error:
            await self._fail(accepted, str(error))

    async def _fail(self, accepted: Accepted, reason: str) -> None:
        self._report(f"async {accepted.inference_id}: failed, {reason}")
        try:
            await asyncio.to_thread(
                self._write, accepted.failure, json.dumps({"error": reason}).encode(), "application/json"
            )
        except (ClientError, BotoCoreError, MmeError) as error:
            self._report(f"async {accepted.inference_id}: {accepted.failure} cannot be written: {error}")

    def _read(self, uri: str) -> bytes:
        bucket, key = split_uri(uri)
        content: bytes = self._s3.get_object(Bucket=bucket, Key=key)["Body"].read()
        return content

    def _write(self, uri: str, body: bytes, content_type: str) -> None:
        bucket, key = split_uri(uri)
        self._s3.put_object(Bucket=bucket, Key=key, Body=body, ContentType=content_type)


def _seconds(headers: Mapping[str, str], name: str, default: float) -> float:
    text = headers.get(f"{_PREFIX}{name.lower()}", "")
    try:
        seconds = float(text) if text else default
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise invalid(f"{name} '{text}' is not a number of seconds")
    return seconds


def _passed_on(headers: Mapping[str, str]) -> dict[str, str]:
    """The headers that the container sees: content type and accept have names of their own in this operation."""
    names = {
        f"{_PREFIX}content-type": "Content-Type",
        f"{_PREFIX}accept": "Accept",
        f"{_PREFIX}custom-attributes": "X-Amzn-SageMaker-Custom-Attributes",
        f"{_PREFIX}inference-id": "X-Amzn-SageMaker-Inference-Id",
    }
    return {ours: headers[theirs] for theirs, ours in names.items() if theirs in headers}
