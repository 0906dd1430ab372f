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
from pathlib import Path
from typing import TYPE_CHECKING

from container.cli.command import DEFAULT_URL, Command, add_identity, add_region, seconds
from model_handlers.errors import invalid_argument

if TYPE_CHECKING:
    import argparse

    from container.ship.client import HttpResponse

_EXAMPLES = """\
examples:
  mme invoke my-endpoint --target bert-0.tar.gz --json request.json      boto3, on AWS
  mme invoke --local http://localhost:8080 --target bert-0.tar.gz --json -      boto3, against `mme local`
  mme invoke --target iris.tar.gz --json '{"inputs":[{"name":"X","shape":[1,4],"datatype":"FP32","data":[5,3,1,0]}]}'
  mme invoke --url http://localhost:9000 --target resnet.tar.gz --npy input=image.npy --output scores.npz
  mme invoke --target pipeline.tar.gz --text TEXT=sentences.txt     a line is an element of a tensor [lines, 1]
  mme invoke --target script.tar.gz --body rows.csv                  the content type is what its name tells
"""
_JSON = "application/json"
_JSON_LINES = "application/jsonlines"  # the answer of a decoupled model: a document each response
_TIMING = re.compile(r'([\w-]+)((?:\s*;\s*\w+=(?:"[^"]*"|[^;,"]*))*)')
_PARAMETER = re.compile(r';\s*(\w+)=(?:"([^"]*)"|([^;,"]*))')


def _add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", metavar="ENDPOINT", help="call this SageMaker endpoint through boto3")
    add_sender(parser)
    parser.add_argument("--endpoint", metavar="NAME", help="the same as ENDPOINT")
    parser.add_argument("--target", metavar="NAME", help="the model: TargetModel, such as bert-0.tar.gz")
    add_request(parser)
    parser.add_argument("--inference-id", metavar="ID", help="an id that the server logs")
    text = "write the answer here, as it came; its tensors as arrays where the name ends in .npz"
    parser.add_argument("--output", type=Path, metavar="FILE", help=text)


def add_sender(parser: argparse.ArgumentParser) -> None:
    text = f"a server over plain HTTP, or `mme local`, which is asked through boto3; default {DEFAULT_URL}"
    parser.add_argument("--url", help=text)
    parser.add_argument("--local", metavar="URL", help="boto3 against this server, whatever it is")
    parser.add_argument("--timeout", type=seconds, default=70.0, metavar="SECONDS", help="default 70")
    add_identity(parser)
    add_region(parser)


def add_request(parser: argparse.ArgumentParser) -> None:
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--json", metavar="FILE", help="a KServe v2 request: a file, - for standard input, or the JSON")
    text = "an input tensor out of a .npy file; may be repeated"
    what.add_argument("--npy", metavar="INPUT=FILE", action="append", help=text)
    text = "an input tensor of a text's lines, or without INPUT= the text as it is; may be repeated"
    what.add_argument("--text", metavar="[INPUT=]FILE", action="append", help=text)
    what.add_argument("--body", metavar="FILE", help="any body, for models that read them: CSV, images, ...")
    parser.add_argument("--content-type", metavar="TYPE", help="of --body and --text; else by the name of --body")
    parser.add_argument("--accept", metavar="TYPE", help="the content type that is wanted back")


def run(arguments: argparse.Namespace) -> int:
    from container.ship.client import sender_of  # noqa: PLC0415 - heavy
    from container.ship.requests import request_of  # noqa: PLC0415 - numpy

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


def _show(answer: HttpResponse, output: Path | None) -> None:
    """The answer in a file, as it came or as arrays, or on standard output, each document of JSON indented."""
    if output and output.suffix == ".npz":
        from container.ship.requests import write_arrays  # noqa: PLC0415 - numpy

        write_arrays(output, answer)
        return
    if output:
        output.write_bytes(answer.body)
        return
    media_type = answer.headers.get("content-type", "").partition(";")[0].strip()
    if media_type in {_JSON, _JSON_LINES}:
        for document in answer.body.splitlines() if media_type == _JSON_LINES else (answer.body,):
            print(json.dumps(json.loads(document), indent=2, ensure_ascii=False))
        return
    if sys.stdout.isatty():
        content_type = answer.headers.get("content-type", "no content type")
        raise invalid_argument(f"the answer is {len(answer.body)} bytes of {content_type}: give --output FILE")
    sys.stdout.buffer.write(answer.body)


COMMAND = Command("invoke", "send one request and print the answer", _EXAMPLES, _add_flags, run)
