"""Errors and informational headers as bytes."""

import json
import re

import pytest

from container.inference import errors
from container.inference.errors import RUNTIME_STATUSES, STATUSES
from model_handlers.errors import Kind, MmeError
from serve.request import LoadReport, Timings


def fields(lines):
    """Header lines as a dict in lower case; every line ends in CR LF."""
    assert lines.endswith(b"\r\n")
    return dict(line.lower().split(": ", 1) for line in lines.decode("latin-1").split("\r\n") if line)


@pytest.mark.parametrize("flavor", ["sagemaker", "kserve"])
@pytest.mark.parametrize("kind", Kind)
def test_an_error_is_one_sentence_in_json(kind, flavor):
    """Status by the table, and a body with `error` alone."""
    status, headers, body = errors.error(MmeError(kind, "model 'é' is wrong"), flavor)
    assert status == getattr(STATUSES[kind], flavor)
    assert fields(headers) == {"content-type": "application/json"}
    assert json.loads(body) == {"error": "model 'é' is wrong"}


@pytest.mark.parametrize("kind", Kind)
def test_a_runtime_error_is_one_that_boto3_knows(kind):
    """Its name in the header, its status by the name, its sentence in the body."""
    status, headers, body = errors.error(MmeError(kind, "a sentence"), "runtime")
    name = STATUSES[kind].runtime
    assert status == RUNTIME_STATUSES[name]
    assert b"x-amzn-errortype: %s\r\n" % name.encode() in headers
    assert re.fullmatch(r"[0-9a-f-]{36}", fields(headers)["x-amzn-requestid"])
    assert "a sentence" in json.loads(body)["Message"]


@pytest.mark.parametrize(
    ("kind", "status", "code", "words"),
    [
        (Kind.INVALID_ARGUMENT, 400, "CLIENT_ERROR_FROM_MODEL", "Received client error (400) from model"),
        (Kind.OUT_OF_MEMORY, 507, "INTERNAL_FAILURE_FROM_MODEL", "Received server error (507) from model"),
        (Kind.EXECUTION_FAILED, 500, "INTERNAL_FAILURE_FROM_MODEL", "Received server error (500) from model"),
        (Kind.QUEUE_FULL, 503, "INTERNAL_FAILURE_FROM_MODEL", "Received server error (503) from model"),
    ],
)
def test_a_model_error_tells_what_the_container_answered(kind, status, code, words):
    """OriginalStatusCode and OriginalMessage are SageMaker's container contract's."""
    _, _, body = errors.error(MmeError(kind, "what went wrong"), "runtime")
    document = json.loads(body)
    assert document["OriginalStatusCode"] == status
    assert json.loads(document["OriginalMessage"]) == {"error": "what went wrong"}
    assert document["ErrorCode"] == code
    assert document["Message"].startswith(words)
    assert document["LogStreamArn"] == ""


@pytest.mark.parametrize("flavor", ["sagemaker", "runtime"])
def test_long_sentences_are_cut_where_sagemaker_cuts_them(flavor):
    """Useful text comes first; nothing in a body is longer than the 2048 characters that SageMaker keeps."""
    _, _, body = errors.error(MmeError(Kind.INTERNAL, "useful first " + "x" * 10_000), flavor)
    text = json.loads(body)["error" if flavor == "sagemaker" else "Message"]
    assert len(text) <= 2048
    assert len(json.loads(body).get("OriginalMessage", "")) <= 2048 + len('{"error":""}')
    assert "useful first" in text


@pytest.mark.parametrize(
    ("timings", "report", "expected"),
    [
        (None, None, "cache;desc=hit"),
        (Timings(0, 0, 1_234_567, 0), None, "cache;desc=hit, infer;dur=1.235"),
        (None, LoadReport(2_500_000, 1_000_000), "cache;desc=miss, download;dur=2.50, load;dur=1.00"),
        (
            Timings(0, 0, 1000, 0),
            LoadReport(0, 1, ("a.tar.gz", 'q"u\\o\nte', "模")),
            'cache;desc=miss, download;dur=0.00, load;dur=0.00, evict;desc="a.tar.gz", evict;desc="quote", evict;desc="?", infer;dur=0.001',
        ),
    ],
)
def test_server_timing_has_the_standard_form(timings, report, expected):
    """Hit or miss, milliseconds of each part, who had to go; names can't break out of the header."""
    line = errors.server_timing(timings, report).decode("latin-1")
    assert line == f"Server-Timing: {expected}\r\n"
    entry = r"[a-z]+(;(desc|dur)=([a-z0-9.]+|\"[^\"\\]*\"))*"
    assert re.fullmatch(rf"Server-Timing: {entry}(, {entry})*\r\n", line)


@pytest.mark.parametrize("value", ["plain", "", 'c000b4f9-df62;k="v"', "\xe9\x85\xa0"])
def test_header_lines_become_pairs_whatever_their_values(value):
    """Custom attributes come back as they are, also where a character of theirs is a line end to Python."""
    lines = b"Content-Type: application/json\r\n" + errors.custom_attributes(value)
    assert errors.header_pairs(lines) == [
        ("Content-Type", "application/json"),
        ("X-Amzn-SageMaker-Custom-Attributes", value),
    ]
    assert errors.header_pairs(b"") == []
