"""`mme invoke`: a client for people, over plain HTTP or boto3.

Sends what any client would send and shows what came back; the request is not checked here, so that the server's own
sentence is what one reads. Times come from the response's `Server-Timing` header.
"""

# ruff: noqa: T201 - a command talks to people
from __future__ import annotations

import json
import re
import sys
import time
from typing import TYPE_CHECKING

import numpy as np

from container.ship.requests import JSON, JSON_LINES, arrays_of, request_of
from container.ship.senders import sender_of
from model_handlers.errors import invalid_argument

if TYPE_CHECKING:
    import argparse
    from pathlib import Path

    from container.ship.client import Answer

_TIMING = re.compile(r'([\w-]+)((?:\s*;\s*\w+=(?:"[^"]*"|[^;,"]*))*)')
_PARAMETER = re.compile(r';\s*(\w+)=(?:"([^"]*)"|([^;,"]*))')


def run(arguments: argparse.Namespace) -> int:
    """Send one inference request; the answer goes to standard output, times to standard error.

    Raises:
        MmeError: the arguments are wrong, the server cannot be reached, or its own sentence.
    """
    request = request_of(arguments)
    send = sender_of(arguments)
    began = time.perf_counter()
    answer = send(request, arguments.target or "", arguments.inference_id or "")
    took = (time.perf_counter() - began) * 1000
    _show(answer, arguments.output)
    timings = [f"{what} {value}" for what, value in server_timing(answer.headers.get("server-timing", ""))]
    print(" · ".join([*timings, f"round trip {took:.1f} ms"]), file=sys.stderr)
    return 0


def server_timing(header: str) -> list[tuple[str, str]]:
    """The entries of a Server-Timing header, in order: the metric, and its description or milliseconds as text."""
    found = []
    for name, parameters in _TIMING.findall(header):
        values = {key.lower(): quoted or plain for key, quoted, plain in _PARAMETER.findall(parameters)}
        value = values.get("desc", "")
        if "dur" in values:
            value = f"{value} {values['dur']} ms".strip()
        found.append((name, value))
    return found


def _show(answer: Answer, output: Path | None) -> None:
    """The answer in a file, as it came or as arrays, or on standard output, each document of JSON indented."""
    if output and output.suffix == ".npz":
        np.savez(output, **arrays_of(answer.headers.get("content-type", ""), answer.body))
        return
    if output:
        output.write_bytes(answer.body)
        return
    media_type = answer.headers.get("content-type", "").partition(";")[0].strip()
    if media_type in {JSON, JSON_LINES}:
        for document in answer.body.splitlines() if media_type == JSON_LINES else (answer.body,):
            print(json.dumps(json.loads(document), indent=2, ensure_ascii=False))
        return
    if sys.stdout.isatty():
        content_type = answer.headers.get("content-type", "no content type")
        raise invalid_argument(f"the answer is {len(answer.body)} bytes of {content_type}: give --output FILE")
    sys.stdout.buffer.write(answer.body)
