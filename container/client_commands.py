"""`mme invoke`: a client for people, over plain HTTP or boto3; and how every command asks a server over HTTP.

Sends what any client would send and shows what came back; the request is not checked here, so that the server's own
sentence is what one reads. Times come from the response's `Server-Timing` header.
"""

# ruff: noqa: T201 - a command talks to people
from __future__ import annotations

import http.client
import json
import re
import sys
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from model_handlers.errors import Kind, MmeError, invalid_argument

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping, Sequence

_DEFAULT_URL = "http://127.0.0.1:8080"
_JSON = "application/json"
_BINARY = "application/vnd.sagemaker-triton.binary+json;json-header-size="
_TIMING = re.compile(r'([\w-]+)((?:\s*;\s*\w+=(?:"[^"]*"|[^;,"]*))*)')
_PARAMETER = re.compile(r';\s*(\w+)=(?:"([^"]*)"|([^;,"]*))')


@dataclass(frozen=True, slots=True)
class Answer:
    """What a server said: headers under lower-case names, and the body."""

    headers: Mapping[str, str]
    body: bytes


def run_invoke(arguments: argparse.Namespace) -> int:
    """Send one inference request; the answer goes to standard output, times to standard error.

    Raises:
        MmeError: the arguments are wrong, the server cannot be reached, or its own sentence.
    """
    content_type, body = _tensors(arguments.npy) if arguments.npy else (_JSON, _json_text(arguments.json))
    began = time.perf_counter()
    send = _invoke_endpoint if arguments.endpoint else _invoke_url
    answer = send(arguments, content_type, body)
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


def _json_text(source: str) -> bytes:
    """The request's JSON: given itself, on standard input (`-`), or in a file."""
    if source == "-":
        return sys.stdin.buffer.read()
    return source.encode() if source.lstrip().startswith("{") else Path(source).read_bytes()


def _tensors(specs: Sequence[str]) -> tuple[str, bytes]:
    """Content type and body of a binary request with one input for each `INPUT=FILE`; the answer is to be JSON."""
    import numpy as np  # noqa: PLC0415 - heavy, and only this needs it

    from model_handlers.tensor import BY_DTYPE, BYTES, encode_bytes_elements  # noqa: PLC0415

    inputs, data = [], []
    for spec in specs:
        name, equals, file = spec.partition("=")
        if not (name and equals and file):
            raise invalid_argument(f"--npy '{spec}' is not INPUT=FILE")
        try:
            array = np.load(file, allow_pickle=False)
        except ValueError as error:
            raise invalid_argument(f"--npy '{spec}': {file} is no .npy file of plain numbers or strings") from error
        array = array.astype(array.dtype.newbyteorder("<"), copy=False)
        data_type = BYTES if array.dtype.kind in "SU" else BY_DTYPE.get(array.dtype)
        if data_type is None:
            raise invalid_argument(f"--npy '{spec}': the protocol has no data type for {array.dtype}")
        raw = encode_bytes_elements(array) if data_type is BYTES else array.tobytes()
        entry = {"name": name, "shape": list(array.shape), "datatype": data_type.name}
        inputs.append({**entry, "parameters": {"binary_data_size": len(raw)}})
        data.append(raw)
    header = json.dumps({"inputs": inputs}).encode()
    return f"{_BINARY}{len(header)}", b"".join((header, *data))


def _invoke_url(arguments: argparse.Namespace, content_type: str, body: bytes) -> Answer:
    headers = {"Content-Type": content_type, "Accept": _JSON}
    if arguments.target:
        headers["X-Amzn-SageMaker-Target-Model"] = arguments.target
    if arguments.inference_id:
        headers["X-Amzn-SageMaker-Inference-Id"] = arguments.inference_id
    url = checked_url(arguments.url or _DEFAULT_URL)
    return _http(f"{url}/invocations", body, headers, arguments.timeout)


def _invoke_endpoint(arguments: argparse.Namespace, content_type: str, body: bytes) -> Answer:
    """Through boto3: on AWS, or at --url, which then needs no credentials and no region."""
    import boto3  # noqa: PLC0415 - half a second, and only this needs it
    from botocore import UNSIGNED  # noqa: PLC0415
    from botocore.config import Config  # noqa: PLC0415
    from botocore.exceptions import BotoCoreError, ClientError  # noqa: PLC0415

    session = boto3.Session()
    config = Config(read_timeout=arguments.timeout, retries={"total_max_attempts": 1})
    local: dict[str, Any] = {}
    if arguments.url:
        local = {"endpoint_url": checked_url(arguments.url), "region_name": session.region_name or "us-east-1"}
        if session.get_credentials() is None:
            config = config.merge(Config(signature_version=UNSIGNED))
    request = {"TargetModel": arguments.target, "InferenceId": arguments.inference_id}
    try:
        response = session.client("sagemaker-runtime", config=config, **local).invoke_endpoint(
            EndpointName=arguments.endpoint,
            ContentType=content_type,
            Accept=_JSON,
            Body=body,
            **{key: value for key, value in request.items() if value},
        )
        return Answer(response["ResponseMetadata"]["HTTPHeaders"], response["Body"].read())
    except ClientError as error:
        raise MmeError(Kind.UNAVAILABLE, _client_error(error.response)) from error
    except BotoCoreError as error:
        raise MmeError(Kind.UNAVAILABLE, str(error)) from error


def _client_error(response: Mapping[str, Any]) -> str:
    """The model's own sentence where there is one, else what SageMaker says."""
    error = response.get("Error", {})
    original = response.get("OriginalMessage")
    return f"{error.get('Code')}: {_sentence(original.encode()) if original else error.get('Message')}"


def _http(url: str, body: bytes | None, headers: Mapping[str, str], timeout: float) -> Answer:
    request = urllib.request.Request(url, data=body, headers=dict(headers))  # noqa: S310 - checked_url has seen it
    try:
        with urllib.request.urlopen(request, timeout=timeout) as response:  # noqa: S310
            return Answer({name.lower(): value for name, value in response.headers.items()}, response.read())
    except urllib.error.HTTPError as error:
        with error:
            raise MmeError(Kind.UNAVAILABLE, f"{error.code} {error.reason}: {_sentence(error.read())}") from error
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", None) or error
        what = f"{url} does not answer: {reason or type(reason).__name__}; is the server up?"
        raise MmeError(Kind.UNAVAILABLE, what) from error


def ask(url: str, body: bytes | None, timeout: float) -> tuple[Any, Mapping[str, str]]:
    """The JSON that a server answers, and its headers under lower-case names.

    Raises:
        MmeError: it cannot be reached, its own sentence, or it answers something else.
    """
    answer = _http(url, body, {"Content-Type": _JSON}, timeout)
    try:
        return json.loads(answer.body), answer.headers
    except ValueError as error:
        raise MmeError(Kind.UNAVAILABLE, f"{url} answers no JSON: is it a server of models?") from error


def _sentence(body: bytes) -> str:
    """What an error body says: its `error` or `message`, else the beginning of the text."""
    text = body.decode("utf-8", "replace")
    try:
        parsed = json.loads(text)
    except ValueError:
        return text[:500]
    if isinstance(parsed, dict):
        return str(next((parsed[key] for key in ("error", "message", "Message") if key in parsed), parsed))
    return text[:500]


def checked_url(url: str) -> str:
    """A server's address without a slash at its end.

    Raises:
        MmeError: INVALID_ARGUMENT when it is none.
    """
    if not re.match(r"https?://[^/]", url):
        raise invalid_argument(f"--url '{url}' is not an address such as {_DEFAULT_URL}")
    return url.rstrip("/")


def _show(answer: Answer, output: Path | None) -> None:
    """The answer in a file as it came, or on standard output, JSON indented."""
    if output:
        output.write_bytes(answer.body)
        return
    if answer.headers.get("content-type", "").startswith(_JSON):
        print(json.dumps(json.loads(answer.body), indent=2, ensure_ascii=False))
        return
    if sys.stdout.isatty():
        content_type = answer.headers.get("content-type", "no content type")
        raise invalid_argument(f"the answer is {len(answer.body)} bytes of {content_type}: give --output FILE")
    sys.stdout.buffer.write(answer.body)
