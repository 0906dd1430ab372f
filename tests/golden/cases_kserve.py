"""Requests over HTTP/1.1 to a repository's server: HTTP itself, and KServe v2 with Triton's extensions. In this order."""

from __future__ import annotations

import base64
import gzip
import json
import struct
import zlib
from typing import TYPE_CHECKING, Any

from tests.contract import models
from tests.golden.wire import Http

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

Y = 'name: "Y" data_type: TYPE_FP32 dims: [ 4 ]'
FLOATS = struct.pack("<4f", 1, 2, 3, 4)
KEY = "golden-0000000"  # of a region of shared memory, which has another number in each run
_LARGE = 70_000  # bytes, more than the server takes
PLUS = "POST /v2/models/plus/infer"
_LENGTH = "Inference-Header-Content-Length"


def tensor(name: str = "X", shape: Any = (1, 4), datatype: Any = "FP32", data: Any = (1, 2, 3, 4), **more: Any) -> dict:
    """An input in JSON; what is None is left out."""
    made = {"name": name, "shape": shape, "datatype": datatype, "data": data, **more}
    return {key: value for key, value in made.items() if value is not None}


def inputs(*tensors: Any, **more: Any) -> dict:
    """A request."""
    return {"inputs": list(tensors) or [tensor()], **more}


def wanting(*outputs: Any, **more: Any) -> dict:
    """A request that says which outputs it wants."""
    return inputs(outputs=list(outputs), **more)


def binary(name: str, document: Any, *tensors: bytes, target: str = PLUS, **headers: str) -> Http:
    """A request with binary tensors behind its JSON."""
    head = document if isinstance(document, bytes) else json.dumps(document).encode()
    given = {_LENGTH: str(len(head)), **{key.replace("_", "-"): text for key, text in headers.items()}}
    return Http(name, target, head + b"".join(tensors), given)


def sized(size: int, **more: Any) -> dict:
    """An input whose elements come behind the JSON."""
    return tensor(data=None, parameters={"binary_data_size": size}, **more)


ONE = inputs()
_BODY = json.dumps(ONE).encode()


def raw(*lines: str, body: bytes = b"") -> bytes:
    """A request as it is."""
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body


def chunked(*parts: bytes) -> bytes:
    """A body in chunks."""
    return b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"


_POST = (f"{PLUS} HTTP/1.1", "Host: localhost")
_LENGTH_OF_BODY = f"Content-Length: {len(_BODY)}"
_PING = raw("GET /ping HTTP/1.1", "Host: localhost")

HTTP = (
    Http("ping", "GET /ping"),
    Http("ping by POST", "POST /ping", b""),
    Http("ping by HEAD", "HEAD /ping"),
    Http("ping by PUT", "PUT /ping", b""),
    Http("ping by OPTIONS", "OPTIONS /ping"),
    Http("ping with a query", "GET /ping?x=1"),
    Http("unknown route", "GET /no/such/route"),
    Http("unknown route by POST", "POST /no/such/route", {}),
    Http("the root", "GET /"),
    Http("all by OPTIONS", "OPTIONS *"),
    Http("health by HEAD", "HEAD /v2/health/live"),
    Http("metadata by DELETE", "DELETE /v2"),
    Http("infer by GET", "GET /v2/models/plus/infer"),
    Http("infer by HEAD", "HEAD /v2/models/plus/infer"),
    Http("infer by OPTIONS", "OPTIONS /v2/models/plus/infer"),
    Http("invocations by GET", "GET /invocations"),
    Http("invoke by GET", "GET /models/plus/invoke"),
    Http("unknown method", "BREW /ping"),
    Http("TRACE", "TRACE /ping"),
    Http("CONNECT", raw=[raw("CONNECT localhost:80 HTTP/1.1", "Host: localhost")]),
    Http("HTTP/1.0", raw=[raw("GET /ping HTTP/1.0")]),
    Http("HTTP/1.0 that stays", raw=[raw("GET /ping HTTP/1.0", "Connection: keep-alive")]),
    Http("HTTP/1.0 with a body", raw=[raw(f"{PLUS} HTTP/1.0", _LENGTH_OF_BODY, body=_BODY)]),
    Http("HTTP/1.0 in parts", raw=[raw("POST /v2/models/repeat/generate_stream HTTP/1.0", "Content-Length: 2", body=b"{}")]),
    Http("HTTP/2.0", raw=[raw("GET /ping HTTP/2.0", "Host: localhost")]),
    Http("HTTP/0.9", raw=[b"GET /ping\r\n\r\n"]),
    Http("no HTTP", raw=[b"\x16\x03\x01\x02\x00\x01\r\n\r\n"]),
    Http("no Host", raw=[raw("GET /ping HTTP/1.1")]),
    Http("two Hosts", raw=[raw("GET /ping HTTP/1.1", "Host: a", "Host: b")]),
    Http("another Host", raw=[raw("GET /ping HTTP/1.1", "Host: elsewhere.example")]),
    Http("another Host's model", raw=[raw(f"{PLUS} HTTP/1.1", "Host: elsewhere.example", _LENGTH_OF_BODY, body=_BODY)]),
    Http("another page", PLUS, _BODY, {"Origin": "http://elsewhere.example"}),
    Http("Connection: close", "GET /ping", headers={"Connection": "close"}),
    Http("Upgrade", "GET /ping", headers={"Connection": "Upgrade", "Upgrade": "websocket"}),
    Http("slashes in front", "GET ///ping"),
    Http("absolute target", "GET http://localhost/ping"),
    Http("percent-encoded letters", "POST /v2%2Fmodels/pl%75s/infer", ONE),
    Http("percent-encoded nonsense", "GET /v2/models/%zz"),
    Http("percent-encoded byte", "GET /v2/models/%ff"),
    Http("encoded slash in a name", "GET /v2/models/a%2Fb/ready"),
    Http("dots", "GET /v2/../ping"),
    Http("fragment", raw=[raw("GET /ping#x HTTP/1.1", "Host: localhost")]),
    Http("space in the target", raw=[raw("GET /pi ng HTTP/1.1", "Host: localhost")]),
    Http("byte in the target", raw=[raw("GET /pi\xe9ng HTTP/1.1", "Host: localhost")]),
    Http("control byte in a header", raw=[raw("GET /ping HTTP/1.1", "Host: localhost", "X: a\x01b")]),
    Http("space before the colon", raw=[raw("GET /ping HTTP/1.1", "Host : localhost")]),
    Http("folded header", raw=[raw("GET /ping HTTP/1.1", "Host: localhost", "X: a", " b")]),
    Http("header without a colon", raw=[raw("GET /ping HTTP/1.1", "Host: localhost", "nothing")]),
    Http("line feeds alone", raw=[b"GET /ping HTTP/1.1\nHost: localhost\n\n"]),
    Http("target too long", raw=[raw(f"GET /{'x' * 9000} HTTP/1.1", "Host: localhost")]),
    Http("headers too large", raw=[raw("GET /ping HTTP/1.1", "Host: localhost", f"X: {'x' * 66_000}")]),
    Http("headers too many", raw=[raw("GET /ping HTTP/1.1", "Host: localhost", *["X: 1"] * 120)]),
    Http("pipelined", raw=[_PING + raw(*_POST, _LENGTH_OF_BODY, body=_BODY) + raw("GET /v2/models/plus/ready HTTP/1.1", "Host: localhost") + _PING], answers=4),
    Http("pipelined, the second is wrong", raw=[_PING + raw("GET /ping HTTP/1.1") + _PING], answers=2),
    Http("pipelined, the first closes", raw=[raw("GET /ping HTTP/1.1", "Host: localhost", "Connection: close") + _PING]),
    Http("chunked", raw=[raw(*_POST, "Transfer-Encoding: chunked", body=chunked(_BODY[:20], _BODY[20:]))]),
    Http("chunked with a trailer", raw=[raw(*_POST, "Transfer-Encoding: chunked", body=chunked(_BODY)[:-2] + b"X: y\r\n\r\n")]),
    Http("chunked with an extension", raw=[raw(*_POST, "Transfer-Encoding: chunked", body=b"%x;a=b\r\n%b\r\n0\r\n\r\n" % (len(_BODY), _BODY))]),
    Http("chunked, no size", raw=[raw(*_POST, "Transfer-Encoding: chunked", body=b"zz\r\n\r\n")]),
    Http("chunked, too large", raw=[raw(*_POST, "Transfer-Encoding: chunked", body=b"%x\r\n" % _LARGE + bytes(_LARGE))]),
    Http("chunked and a length", raw=[raw(*_POST, "Transfer-Encoding: chunked", "Content-Length: 3", body=chunked(_BODY))]),
    Http("unknown transfer encoding", raw=[raw(*_POST, "Transfer-Encoding: gzip", body=b"")]),
    Http("gzip, chunked", raw=[raw(*_POST, "Transfer-Encoding: gzip, chunked", body=chunked(_BODY))]),
    Http("no length", raw=[raw(*_POST)]),
    Http("no length for SageMaker", raw=[raw("POST /invocations HTTP/1.1", "Host: localhost")]),
    Http("two lengths", raw=[raw(*_POST, "Content-Length: 3", "Content-Length: 4", body=b"abcd")]),
    Http("length below zero", raw=[raw(*_POST, "Content-Length: -1")]),
    Http("length that is none", raw=[raw(*_POST, "Content-Length: x")]),
    Http("length too large for KServe", raw=[raw(*_POST, f"Content-Length: {_LARGE}")]),
    Http("length too large for SageMaker", raw=[raw("POST /invocations HTTP/1.1", "Host: localhost", f"Content-Length: {_LARGE}")]),
    Http("length too large for a load", raw=[raw("POST /v2/repository/models/plus/load HTTP/1.1", "Host: localhost", f"Content-Length: {_LARGE}")]),
    Http("expects to be told to go on", raw=[raw(*_POST, _LENGTH_OF_BODY, "Expect: 100-continue"), _BODY]),
    Http("expects, and is too large", raw=[raw(*_POST, f"Content-Length: {_LARGE}", "Expect: 100-continue")]),
    Http("expects something else", raw=[raw(*_POST, _LENGTH_OF_BODY, "Expect: tea", body=_BODY)]),
    Http("a body that nothing asks for", "GET /v2/models/plus/ready", b"body"),
    Http("favicon", "GET /favicon.ico"),
)  # fmt: skip

KSERVE = (
    Http("server metadata", "GET /v2"),
    Http("server metadata with a slash", "GET /v2/"),
    Http("live", "GET /v2/health/live"),
    Http("ready", "GET /v2/health/ready"),
    Http("unknown health", "GET /v2/health/other"),
    Http("model metadata", "GET /v2/models/plus"),
    Http("model metadata of a version", "GET /v2/models/versions/versions/3"),
    Http("metadata of a version that is not served", "GET /v2/models/versions/versions/2"),
    Http("metadata of a version that is none", "GET /v2/models/versions/versions/x"),
    Http("metadata of every type", "GET /v2/models/types"),
    Http("metadata of an ensemble", "GET /v2/models/pair"),
    Http("metadata of an unknown model", "GET /v2/models/nobody"),
    Http("metadata of a broken model", "GET /v2/models/broken"),
    Http("config", "GET /v2/models/plus/config"),
    Http("config of a version", "GET /v2/models/versions/versions/1/config"),
    Http("config of a sequence's model", "GET /v2/models/sums/config"),
    Http("config of an ensemble", "GET /v2/models/pair/config"),
    Http("config of a Python model", "GET /v2/models/streams/config"),
    Http("config of a model with labels", "GET /v2/models/labelled/config"),
    Http("config of an unknown model", "GET /v2/models/nobody/config"),
    Http("model ready", "GET /v2/models/plus/ready"),
    Http("version ready", "GET /v2/models/versions/versions/3/ready"),
    Http("version not ready", "GET /v2/models/versions/versions/2/ready"),
    Http("unknown model ready", "GET /v2/models/nobody/ready"),
    Http("broken model ready", "GET /v2/models/broken/ready"),
    Http("index", "POST /v2/repository/index", b""),
    Http("index of what is ready", "POST /v2/repository/index", {"ready": True}),
    Http("index by GET", "GET /v2/repository/index?ready=true"),
    Http("index of what is no boolean", "POST /v2/repository/index", {"ready": "yes"}),
    Http("index of no JSON", "POST /v2/repository/index", b"{"),
    Http("index of a list", "POST /v2/repository/index", []),
    Http("index of one repository", "POST /v2/repository/one/index", {}),
    Http("logging", "GET /v2/logging"),
    Http("logging, another level", "POST /v2/logging", {"log_warning": True, "log_verbose_level": 0}),
    Http("logging, another format", "POST /v2/logging", {"log_format": "ISO8601"}),
    Http("logging, the format again", "POST /v2/logging", {"log_format": "default"}),
    Http("logging, a file", "POST /v2/logging", {"log_file": "x"}),
    Http("logging, unknown", "POST /v2/logging", {"nothing": 1}),
    Http("logging, no boolean", "POST /v2/logging", {"log_info": "x"}),
    Http("logging, unknown format", "POST /v2/logging", {"log_format": "x"}),
    Http("logging, a list", "POST /v2/logging", [1]),
    Http("trace", "GET /v2/trace/setting"),
    Http("trace of a model", "GET /v2/models/plus/trace/setting"),
    Http("trace of an unknown model", "GET /v2/models/nobody/trace/setting"),
    Http("trace, another rate", "POST /v2/trace/setting", {"trace_rate": "5"}),
    Http("trace of a model, another rate", "POST /v2/models/plus/trace/setting", {"trace_rate": 7}),
    Http("trace of a model, as the server's", "POST /v2/models/plus/trace/setting", {"trace_rate": None}),
    Http("trace, no number", "POST /v2/trace/setting", {"trace_rate": "x"}),
    Http("trace, a level without a place", "POST /v2/trace/setting", {"trace_level": ["TIMESTAMPS"]}),
    Http("trace, unknown level", "POST /v2/trace/setting", {"trace_level": ["X"]}),
    Http("trace, a file", "POST /v2/trace/setting", {"trace_file": "x"}),
    Http("trace, a count", "POST /v2/trace/setting", {"trace_count": "-2"}),
    Http("trace, a mode", "POST /v2/trace/setting", {"trace_mode": "opentelemetry"}),
    Http("trace, unknown", "POST /v2/trace/setting", {"nothing": "1"}),
    Http("trace, as at the start", "POST /v2/trace/setting", {"trace_rate": None}),
)  # fmt: skip


_TYPES = "POST /v2/models/types/infer"


def _every_type() -> Iterator[Http]:
    """Each type of tensor by itself, in JSON and in binary, there and back."""
    for name, values in models.VALUES.items():
        # FP16, which has no JSON form, comes first of what is binary
        zeros = b"" if name == "FP16" else bytes(8)
        elements = values.tolist()
        encoded = values.tobytes()
        if name == "BYTES":
            elements = [["gr\u00fc\u00dfe", ""], ["b", "\u2603"]]
            texts = [text.encode() for row in elements for text in row]
            encoded = b"".join(struct.pack("<I", len(text)) + text for text in texts)
        given = tensor(f"IN_{name}", [2, 2], name, elements)
        out = {"name": f"OUT_{name}"}
        yield binary(f"{name} in JSON", inputs(*_zeros(name), given, outputs=[out]), zeros, target=_TYPES)
        given = sized(len(encoded), name=f"IN_{name}", shape=[2, 2], datatype=name)
        out["parameters"] = {"binary_data": True}
        yield binary(f"{name} in binary", inputs(*_zeros(name), given, outputs=[out]), zeros, encoded, target=_TYPES)


def _zeros(but: str) -> Iterator[dict]:
    """All other inputs of the model."""
    for name in models.VALUES:
        if name == "FP16" != but:
            yield sized(8, name="IN_FP16", shape=[2, 2], datatype="FP16")
        elif name != but:
            yield tensor(f"IN_{name}", [2, 2], name, [{"BYTES": "", "BOOL": False}.get(name, 0)] * 4)


INFER = (
    Http("JSON", PLUS, ONE),
    Http("JSON with an id and parameters", PLUS, inputs(id="seven", parameters={"a": 1, "b": "c", "d": True, "e": 0.5})),
    Http("JSON, two rows, nested", PLUS, inputs(tensor(shape=[2, 4], data=[[1, 2, 3, 4], [5, 6, 7, 8]]))),
    Http("JSON, numbers of all kinds", PLUS, inputs(tensor(data=[1, -0.0, 1e38, 1.5e-40]))),
    Http("JSON, NaN", PLUS, b'{"inputs":[{"name":"X","shape":[1,4],"datatype":"FP32","data":[NaN,Infinity,-Infinity,1]}]}'),
    Http("JSON, integers as FP32", PLUS, inputs(tensor(data=[16777217, 2, 3, 4]))),
    Http("of a version", "POST /v2/models/versions/versions/1/infer", ONE),
    Http("of the latest version", "POST /v2/models/versions/infer", ONE),
    Http("of a version that is not served", "POST /v2/models/versions/versions/2/infer", ONE),
    Http("of a version that is none", "POST /v2/models/versions/versions/x/infer", ONE),
    Http("of a version below zero", "POST /v2/models/versions/versions/-1/infer", ONE),
    Http("without batching", "POST /v2/models/bare/infer", ONE),
    Http("of an ensemble", "POST /v2/models/pair/infer", ONE),
    Http("of an unknown model", "POST /v2/models/nobody/infer", ONE),
    Http("of a broken model", "POST /v2/models/broken/infer", ONE),
    Http("that fails", "POST /v2/models/pick/infer", inputs(tensor("I", [1, 1], "INT64", [99]))),
    Http("that does not", "POST /v2/models/pick/infer", inputs(tensor("I", [2, 1], "INT64", [0, 2]))),
    Http("empty tensor", "POST /v2/models/whole/infer", inputs(tensor("IN", [0], "INT64", []))),
    Http("no body", PLUS, b""),
    Http("no JSON", PLUS, b"{"),
    Http("no UTF-8", PLUS, b'{"id": "\xff"}'),
    Http("a byte order mark", PLUS, b"\xef\xbb\xbf" + _BODY),
    Http("a list", PLUS, []),
    Http("a number", PLUS, b"1"),
    Http("no object", PLUS, b"null"),
    Http("nesting", PLUS, b"[" * 2000),
    Http("no inputs", PLUS, {}),
    Http("inputs of another kind", PLUS, {"inputs": {}}),
    Http("empty inputs", PLUS, {"inputs": []}),
    Http("an input of another kind", PLUS, inputs(1)),
    Http("no name", PLUS, inputs(tensor(name=None))),
    Http("name of another kind", PLUS, inputs(tensor(name=1))),
    Http("wrong name", PLUS, inputs(tensor("Z"))),
    Http("input twice", PLUS, inputs(tensor(), tensor())),
    Http("input too many", PLUS, inputs(tensor(), tensor("Z"))),
    Http("no shape", PLUS, inputs(tensor(shape=None))),
    Http("shape of another kind", PLUS, inputs(tensor(shape="1,4"))),
    Http("shape of words", PLUS, inputs(tensor(shape=["1", "4"]))),
    Http("shape of fractions", PLUS, inputs(tensor(shape=[1.0, 4.5]))),
    Http("shape below zero", PLUS, inputs(tensor(shape=[-1, 4]))),
    Http("shape too large", PLUS, inputs(tensor(shape=[2**62, 2**62]))),
    Http("shape beyond 64 bits", PLUS, inputs(tensor(shape=[2**70]))),
    Http("rank", PLUS, inputs(tensor(shape=[4]))),
    Http("dimension", PLUS, inputs(tensor(shape=[1, 5], data=[1, 2, 3, 4, 5]))),
    Http("batch too large", PLUS, inputs(tensor(shape=[9, 4], data=[0] * 36))),
    Http("batch of none", PLUS, inputs(tensor(shape=[0, 4], data=[]))),
    Http("no datatype", PLUS, inputs(tensor(datatype=None))),
    Http("datatype of another kind", PLUS, inputs(tensor(datatype=32))),
    Http("unknown datatype", PLUS, inputs(tensor(datatype="FP8"))),
    Http("wrong datatype", PLUS, inputs(tensor(datatype="INT32"))),
    Http("no data", PLUS, inputs(tensor(data=None))),
    Http("data of another kind", PLUS, inputs(tensor(data="1234"))),
    Http("data too short", PLUS, inputs(tensor(data=[1, 2, 3]))),
    Http("data too long", PLUS, inputs(tensor(data=[1, 2, 3, 4, 5]))),
    Http("data of words", PLUS, inputs(tensor(data=["1", "2", "3", "4"]))),
    Http("data with null", PLUS, inputs(tensor(data=[1, None, 3, 4]))),
    Http("data with true", PLUS, inputs(tensor(data=[1, True, 3, 4]))),
    Http("data of objects", PLUS, inputs(tensor(data=[{}, 2, 3, 4]))),
    Http("data nested unevenly", PLUS, inputs(tensor(data=[[1, 2], 3, 4]))),
    Http("fractions as integers", "POST /v2/models/whole/infer", inputs(tensor("IN", [1], "INT64", [1.5]))),
    Http("integer out of range", "POST /v2/models/whole/infer", inputs(tensor("IN", [1], "INT64", [2**63]))),
    Http("integer beyond 64 bits", "POST /v2/models/whole/infer", b'{"inputs":[{"name":"IN","shape":[1],"datatype":"INT64","data":[1' + b"0" * 30 + b"]}]}"),
    Http("numbers as texts", "POST /v2/models/text/infer", inputs(tensor("IN", [1], "BYTES", [1]))),
    Http("FP16 in JSON", "POST /v2/models/half/infer", inputs(tensor("IN", [1], "FP16", [1.0]))),
    Http("BF16 in JSON", "POST /v2/models/brain/infer", inputs(tensor("IN", [1], "BF16", [1.0]))),
    Http("texts", "POST /v2/models/text/infer", inputs(tensor("IN", [3], "BYTES", ["", 'a"b\\\n', "\u2603\U0001f600"]))),
    Http("texts with a lone surrogate", "POST /v2/models/text/infer", b'{"inputs":[{"name":"IN","shape":[1],"datatype":"BYTES","data":["\\ud800"]}]}'),
    Http("parameters of another kind", PLUS, inputs(parameters=[])),
    Http("a parameter of another kind", PLUS, inputs(parameters={"a": []})),
    Http("id of another kind", PLUS, inputs(id=7)),
    Http("reserved parameter", PLUS, inputs(parameters={"triton_x": 1})),
    Http("priority", PLUS, inputs(parameters={"priority": 1})),
    Http("priority of another kind", PLUS, inputs(parameters={"priority": "x"})),
    Http("priority below zero", PLUS, inputs(parameters={"priority": -1})),
    Http("time limit", PLUS, inputs(parameters={"timeout": 60000000})),
    Http("time limit of another kind", PLUS, inputs(parameters={"timeout": "x"})),
    Http("unknown field", PLUS, inputs(nothing=1)),
    Http("outputs", PLUS, wanting({"name": "Y"})),
    Http("outputs of another kind", PLUS, inputs(outputs={})),
    Http("no outputs", PLUS, wanting()),
    Http("an output of another kind", PLUS, wanting("Y")),
    Http("output without a name", PLUS, wanting({})),
    Http("wrong output", PLUS, wanting({"name": "Z"})),
    Http("output twice", PLUS, wanting({"name": "Y"}, {"name": "Y"})),
    Http("output in binary", PLUS, wanting({"name": "Y", "parameters": {"binary_data": True}})),
    Http("output in binary, a word", PLUS, wanting({"name": "Y", "parameters": {"binary_data": "yes"}})),
    Http("all outputs in binary", PLUS, inputs(parameters={"binary_data_output": True})),
    Http("classes", "POST /v2/models/labelled/infer", wanting({"name": "Y", "parameters": {"classification": 2}})),
    Http("classes in binary", "POST /v2/models/labelled/infer", wanting({"name": "Y", "parameters": {"classification": 9, "binary_data": True}})),
    Http("classes without labels", PLUS, wanting({"name": "Y", "parameters": {"classification": 1}})),
    Http("no classes", PLUS, wanting({"name": "Y", "parameters": {"classification": 0}})),
    Http("classes of another kind", PLUS, wanting({"name": "Y", "parameters": {"classification": "x"}})),
    Http("classes of texts", "POST /v2/models/text/infer", inputs(tensor("IN", [1], "BYTES", ["a"]), outputs=[{"name": "OUT", "parameters": {"classification": 1}}])),
    Http("parameters of an output of another kind", PLUS, wanting({"name": "Y", "parameters": 1})),
    binary("binary", inputs(sized(16)), FLOATS),
    binary("binary, answer in JSON", wanting({"name": "Y"}, **inputs(sized(16))), FLOATS),
    binary("binary, no tensors", inputs()),
    binary("binary, too few bytes", inputs(sized(16)), FLOATS[:8]),
    binary("binary, too many bytes", inputs(sized(16)), FLOATS, b"more"),
    binary("binary, wrong size", inputs(sized(12)), FLOATS[:12]),
    binary("binary, size below zero", inputs(sized(-1)), FLOATS),
    binary("binary, size of another kind", inputs(tensor(data=None, parameters={"binary_data_size": "16"})), FLOATS),
    binary("binary and data", inputs(tensor(parameters={"binary_data_size": 16})), FLOATS),
    binary("binary, no JSON", b"{", FLOATS),
    Http("header length too large", PLUS, _BODY, {_LENGTH: "9999"}),
    Http("header length below zero", PLUS, _BODY, {_LENGTH: "-1"}),
    Http("header length of a word", PLUS, _BODY, {_LENGTH: "x"}),
    Http("header length that cuts", PLUS, _BODY, {_LENGTH: "10"}),
    Http("media type with a header length", PLUS, _BODY, {"Content-Type": f"application/vnd.sagemaker-triton.binary+json;json-header-size={len(_BODY)}"}),
    Http("raw binary", "POST /v2/models/bare/infer", FLOATS, {_LENGTH: "0"}),
    Http("raw binary, batches", PLUS, FLOATS, {_LENGTH: "0"}),
    Http("raw binary, too few bytes", PLUS, FLOATS[:8], {_LENGTH: "0"}),
    Http("raw binary, nothing", PLUS, b"", {_LENGTH: "0"}),
    Http("raw binary of several inputs", "POST /v2/models/types/infer", FLOATS, {_LENGTH: "0"}),
    Http("raw binary of texts", "POST /v2/models/text/infer", b"\x01\0\0\0a", {_LENGTH: "0"}),
    Http("raw binary of an unknown model", "POST /v2/models/nobody/infer", FLOATS, {_LENGTH: "0"}),
    binary("FP16", inputs(sized(4, name="IN", shape=[2], datatype="FP16")), b"\0\x3c\0\xbc", target="POST /v2/models/half/infer"),
    binary("FP16, answer in JSON", inputs(sized(4, name="IN", shape=[2], datatype="FP16"), outputs=[{"name": "OUT", "parameters": {"binary_data": False}}]), b"\0\x3c\0\xbc", target="POST /v2/models/half/infer"),
    binary("BF16", inputs(sized(4, name="IN", shape=[2], datatype="BF16")), b"\x80\x3f\x80\xbf", target="POST /v2/models/brain/infer"),
    binary("BF16, an odd byte", inputs(sized(3, name="IN", shape=[2], datatype="BF16")), b"\x80\x3f\x80", target="POST /v2/models/brain/infer"),
    binary("texts in binary", inputs(sized(9, name="IN", shape=[2], datatype="BYTES")), b"\x01\0\0\0a\0\0\0\0", target="POST /v2/models/text/infer"),
    binary("texts in binary, cut", inputs(sized(6, name="IN", shape=[1], datatype="BYTES")), b"\x05\0\0\0ab", target="POST /v2/models/text/infer"),
    binary("texts in binary, too few", inputs(sized(5, name="IN", shape=[2], datatype="BYTES")), b"\x01\0\0\0a", target="POST /v2/models/text/infer"),
    binary("texts in binary, too many", inputs(sized(9, name="IN", shape=[1], datatype="BYTES")), b"\x01\0\0\0a\0\0\0\0", target="POST /v2/models/text/infer"),
    binary("texts that are no UTF-8, in JSON", inputs(sized(5, name="IN", shape=[1], datatype="BYTES"), outputs=[{"name": "OUT", "parameters": {"binary_data": False}}]), b"\x01\0\0\0\xff", target="POST /v2/models/text/infer"),
    Http("gzip", PLUS, gzip.compress(_BODY, mtime=0), {"Content-Encoding": "gzip"}),
    Http("deflate", PLUS, zlib.compress(_BODY), {"Content-Encoding": "deflate"}),
    Http("identity", PLUS, _BODY, {"Content-Encoding": "identity"}),
    Http("unknown compression", PLUS, _BODY, {"Content-Encoding": "br"}),
    Http("gzip that is none", PLUS, _BODY, {"Content-Encoding": "gzip"}),
    Http("gzip that is cut", PLUS, gzip.compress(_BODY, mtime=0)[:-6], {"Content-Encoding": "gzip"}),
    Http("gzip that grows too large", PLUS, gzip.compress(bytes(_LARGE), mtime=0), {"Content-Encoding": "gzip"}),
    Http("gzip with a header length", PLUS, gzip.compress(_BODY, mtime=0), {"Content-Encoding": "gzip", _LENGTH: str(len(_BODY))}),
    Http("gzip wanted", PLUS, ONE, {"Accept-Encoding": "gzip"}),
    Http("deflate wanted", PLUS, ONE, {"Accept-Encoding": "deflate"}),
    Http("gzip refused", PLUS, ONE, {"Accept-Encoding": "gzip;q=0"}),
    Http("any compression wanted", PLUS, ONE, {"Accept-Encoding": "*"}),
    Http("unknown compression wanted", PLUS, ONE, {"Accept-Encoding": "br"}),
    Http("another media type", PLUS, _BODY, {"Content-Type": "text/csv"}),
    Http("Accept of another type", PLUS, ONE, {"Accept": "text/csv"}),
    Http("a traced request", PLUS, ONE, {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}),
    Http("sequence begins", "POST /v2/models/sums/infer", inputs(tensor(shape=[1, 1], data=[1]), parameters={"sequence_id": 7, "sequence_start": True})),
    Http("sequence goes on", "POST /v2/models/sums/infer", inputs(tensor(shape=[1, 1], data=[2]), parameters={"sequence_id": 7})),
    Http("sequence ends", "POST /v2/models/sums/infer", inputs(tensor(shape=[1, 1], data=[3]), parameters={"sequence_id": 7, "sequence_end": True})),
    Http("sequence that has ended", "POST /v2/models/sums/infer", inputs(tensor(shape=[1, 1], data=[4]), parameters={"sequence_id": 7})),
    Http("sequence without an id", "POST /v2/models/sums/infer", inputs(tensor(shape=[1, 1], data=[1]))),
    Http("sequence of a text", "POST /v2/models/sums/infer", inputs(tensor(shape=[1, 1], data=[1]), parameters={"sequence_id": "a", "sequence_start": True})),
    Http("sequence id of another kind", "POST /v2/models/sums/infer", inputs(tensor(shape=[1, 1], data=[1]), parameters={"sequence_id": [], "sequence_start": True})),
    Http("sequence start of another kind", "POST /v2/models/sums/infer", inputs(tensor(shape=[1, 1], data=[1]), parameters={"sequence_id": 9, "sequence_start": 1})),
    Http("cached, first", "POST /v2/models/cached/infer", ONE),
    Http("cached, again", "POST /v2/models/cached/infer", ONE),
    Http("decoupled", "POST /v2/models/repeat/infer", inputs(tensor("IN", [1], "INT32", [1]), tensor("DELAY", [1], "UINT32", [0]), tensor("WAIT", [1], "UINT32", [0]))),
    *(
        Http(f"Python fails with {code}", "POST /v2/models/says/infer", inputs(tensor("text_input", [1], "BYTES", [f"fail {code}"])))
        for code in range(8)
    ),
    Http("Python raises", "POST /v2/models/says/infer", inputs(tensor("text_input", [1], "BYTES", ["raise no such thing"]))),
    Http("Python answers, with parameters", "POST /v2/models/says/infer", inputs(tensor("text_input", [1], "BYTES", ["hello"]), parameters={"a": 1, "b": "c"})),
    Http("Python lacks an input", "POST /v2/models/says/infer", inputs(tensor("number", [1], "INT32", [1]))),
)  # fmt: skip

SAYS, STREAMS = "POST /v2/models/says/generate", "POST /v2/models/streams/generate_stream"
GENERATE = (
    Http("generate", SAYS, {"text_input": "hello"}),
    Http("generate with an id", SAYS, {"id": "seven", "text_input": "hello", "number": 3}),
    Http("generate with parameters", SAYS, {"text_input": "hello", "parameters": {"a": 1, "b": "c"}}),
    Http("generate with what is no input", SAYS, {"text_input": "hello", "temperature": 0.5}),
    Http("generate by version", "POST /v2/models/says/versions/1/generate", {"text_input": "hello"}),
    Http("generate, wrong type", SAYS, {"text_input": 5}),
    Http("generate, wrong number", SAYS, {"text_input": "a", "number": "x"}),
    Http("generate, a list", SAYS, {"text_input": ["hello"]}),
    Http("generate, a list too long", SAYS, {"text_input": ["a", "b"]}),
    Http("generate, an object", SAYS, {"text_input": {}}),
    Http("generate, null", SAYS, {"text_input": None}),
    Http("generate, no input", SAYS, {}),
    Http("generate, no JSON", SAYS, b"{"),
    Http("generate, no object", SAYS, []),
    Http("generate, nothing", SAYS, b""),
    Http("generate, fails", SAYS, {"text_input": "fail 3"}),
    Http("generate, unknown model", "POST /v2/models/nobody/generate", {"text_input": "a"}),
    Http("generate by GET", "GET /v2/models/says/generate"),
    Http("generate of a decoupled model", "POST /v2/models/streams/generate", {"text_input": "one"}),
    Http("generate of a decoupled model, several", "POST /v2/models/streams/generate", {"text_input": "one two"}),
    Http("generate of tensors", "POST /v2/models/whole/generate", {"IN": [1, 2, 3]}),
    Http("stream", STREAMS, {"text_input": "one two three"}),
    Http("stream, an error in it", STREAMS, {"text_input": "one fail three"}),
    Http("stream, an error at once", STREAMS, {"text_input": "fail"}),
    Http("stream, nothing", STREAMS, {"text_input": ""}),
    Http("stream of one answer", "POST /v2/models/says/generate_stream", {"text_input": "hello"}),
    Http("stream that fails", "POST /v2/models/says/generate_stream", {"text_input": "fail 3"}),
    Http("stream of an unknown model", "POST /v2/models/nobody/generate_stream", {"text_input": "a"}),
    Http("stream, wrong type", STREAMS, {"text_input": 5}),
    Http("stream by GET", "GET /v2/models/streams/generate_stream"),
    Http("stream by HTTP/1.0", raw=[raw(f"{STREAMS} HTTP/1.0", "Content-Length: 25", body=b'{"text_input": "one two"}')]),
    Http("stream of numbers", "POST /v2/models/repeat/generate_stream", {"IN": [5, 6], "DELAY": [0, 0], "WAIT": 0}),
)  # fmt: skip

_REGION = "/v2/systemsharedmemory/region"
_FROM = {"name": "X", "shape": [1, 4], "datatype": "FP32"}


def _shared(**parameters: Any) -> dict:
    return inputs({**_FROM, "parameters": parameters})


SHARED_MEMORY = (
    Http("no regions", "GET /v2/systemsharedmemory/status"),
    Http("register", f"POST {_REGION}/r/register", {"key": KEY, "offset": 0, "byte_size": 32}),
    Http("register again", f"POST {_REGION}/r/register", {"key": KEY, "byte_size": 32}),
    Http("register, no such key", f"POST {_REGION}/s/register", {"key": "golden-nothing", "byte_size": 32}),
    Http("register, a path", f"POST {_REGION}/s/register", {"key": "../etc/passwd", "byte_size": 32}),
    Http("register, no key", f"POST {_REGION}/s/register", {"byte_size": 32}),
    Http("register, no size", f"POST {_REGION}/s/register", {"key": KEY}),
    Http("register, size of another kind", f"POST {_REGION}/s/register", {"key": KEY, "byte_size": "32"}),
    Http("register, too large", f"POST {_REGION}/s/register", {"key": KEY, "byte_size": 64}),
    Http("register, offset too large", f"POST {_REGION}/s/register", {"key": KEY, "offset": 16, "byte_size": 32}),
    Http("register, no JSON", f"POST {_REGION}/s/register", b"{"),
    Http("register without a name", "POST /v2/systemsharedmemory/register", {"key": KEY, "byte_size": 32}),
    Http("regions", "GET /v2/systemsharedmemory/status"),
    Http("region", f"GET {_REGION}/r/status"),
    Http("unknown region", f"GET {_REGION}/s/status"),
    Http("input from it", PLUS, _shared(shared_memory_region="r", shared_memory_byte_size=16)),
    Http("input from it, offset", PLUS, _shared(shared_memory_region="r", shared_memory_byte_size=16, shared_memory_offset=16)),
    Http("input from it, too far", PLUS, _shared(shared_memory_region="r", shared_memory_byte_size=16, shared_memory_offset=20)),
    Http("input from it, wrong size", PLUS, _shared(shared_memory_region="r", shared_memory_byte_size=12)),
    Http("input from it, no size", PLUS, _shared(shared_memory_region="r")),
    Http("input from an unknown region", PLUS, _shared(shared_memory_region="s", shared_memory_byte_size=16)),
    Http("input from it and data", PLUS, inputs(tensor(parameters={"shared_memory_region": "r", "shared_memory_byte_size": 16}))),
    Http("output into it", PLUS, wanting({"name": "Y", "parameters": {"shared_memory_region": "r", "shared_memory_byte_size": 16, "shared_memory_offset": 16}})),
    Http("what it wrote", PLUS, _shared(shared_memory_region="r", shared_memory_byte_size=16, shared_memory_offset=16)),
    Http("output into too little", PLUS, wanting({"name": "Y", "parameters": {"shared_memory_region": "r", "shared_memory_byte_size": 8}})),
    Http("output into an unknown region", PLUS, wanting({"name": "Y", "parameters": {"shared_memory_region": "s", "shared_memory_byte_size": 16}})),
    Http("unregister", f"POST {_REGION}/r/unregister", b""),
    Http("unregister again", f"POST {_REGION}/r/unregister", b""),
    Http("unregister all", "POST /v2/systemsharedmemory/unregister", b""),
    Http("CUDA regions", "GET /v2/cudasharedmemory/status"),
    Http("CUDA region", "GET /v2/cudasharedmemory/region/r/status"),
    Http("register of CUDA", "POST /v2/cudasharedmemory/region/r/register", {"raw_handle": {"b64": "AAAA"}, "device_id": 0, "byte_size": 16}),
    Http("unregister all of CUDA", "POST /v2/cudasharedmemory/unregister", b""),
)  # fmt: skip

_LOAD, _UNLOAD = "POST /v2/repository/models/bare/load", "POST /v2/repository/models/bare/unload"
_FILE = base64.b64encode(models.plus(5)).decode()


def _parameters(**given: Any) -> Mapping[str, Any]:
    return {"parameters": given}


CONTROL = (
    Http("statistics", "GET /v2/models/bare/stats"),
    Http("statistics of a version", "GET /v2/models/versions/versions/1/stats"),
    Http("statistics of a version that is not served", "GET /v2/models/versions/versions/2/stats"),
    Http("statistics of an unknown model", "GET /v2/models/nobody/stats"),
    Http("statistics of a cached model", "GET /v2/models/cached/stats"),
    Http("load", _LOAD, b""),
    Http("load, JSON", _LOAD, {}),
    Http("load, no JSON", _LOAD, b"{"),
    Http("load, parameters of another kind", _LOAD, {"parameters": []}),
    Http("load, unknown parameter", _LOAD, _parameters(nothing=1)),
    Http("load, configuration", _LOAD, _parameters(config=json.dumps({"max_batch_size": 2}))),
    Http("what it is then", "GET /v2/models/bare/config"),
    Http("load, configuration of another kind", _LOAD, _parameters(config=1)),
    Http("load, configuration that is no JSON", _LOAD, _parameters(config="{")),
    Http("load, configuration with an unknown field", _LOAD, _parameters(config='{"max_batchsize": 2}')),
    Http("load, configuration that does not fit", _LOAD, _parameters(config='{"input": [{"name": "X", "data_type": "TYPE_INT32", "dims": [4]}]}')),
    Http("load, a file", _LOAD, _parameters(config="{}", **{"file:1/model.onnx": _FILE})),
    Http("its answer", "POST /v2/models/bare/infer", ONE),
    Http("load, a file without a configuration", _LOAD, _parameters(**{"file:1/model.onnx": _FILE})),
    Http("load, a file that is no base64", _LOAD, _parameters(config="{}", **{"file:1/model.onnx": "!"})),
    Http("load, a file outside", _LOAD, _parameters(config="{}", **{"file:../model.onnx": _FILE})),
    Http("load, an unknown model", "POST /v2/repository/models/nobody/load", {}),
    Http("load, a broken model", "POST /v2/repository/models/broken/load", {}),
    Http("load, a way to another directory", "POST /v2/repository/models/%2E%2E%2Fbare/load", b""),
    Http("load, a file with too long a name", _LOAD, _parameters(config="{}", **{f"file:{'A' * 256}": _FILE})),
    Http("load of one repository", "POST /v2/repository/one/models/bare/load", {}),
    Http("load by GET", "GET /v2/repository/models/bare/load"),
    Http("unload", _UNLOAD, b""),
    Http("unload again", _UNLOAD, {}),
    Http("unload, dependents", _UNLOAD, _parameters(unload_dependents=True)),
    Http("unload, dependents of another kind", _UNLOAD, _parameters(unload_dependents=1)),
    Http("unload, unknown parameter", _UNLOAD, _parameters(nothing=1)),
    Http("unload, an unknown model", "POST /v2/repository/models/nobody/unload", {}),
    Http("ready when unloaded", "GET /v2/models/bare/ready"),
    Http("asked when unloaded", "POST /v2/models/bare/infer", ONE),
    Http("SageMaker's list", "GET /models"),
    Http("SageMaker's list of a page", "GET /models?next_page_token=cGx1cw=="),
    Http("SageMaker's list of a page that is none", "GET /models?next_page_token=%21"),
    Http("SageMaker's load", "POST /models", {"model_name": "m", "url": "HERE/repository/bare"}),
    Http("SageMaker's model", "GET /models/plus"),
    Http("SageMaker's invocation by name", "POST /models/plus/invoke", ONE),
    Http("SageMaker's invocation of no model", "POST /invocations", ONE),
    Http("SageMaker's invocation of a target", "POST /invocations", ONE, {"X-Amzn-SageMaker-Target-Model": "plus"}),
    Http("SageMaker's unload", "DELETE /models/plus"),
    Http("SageMaker's unload of an unknown model", "DELETE /models/nobody"),
    Http("execution parameters", "GET /execution-parameters"),
)  # fmt: skip

CASES = (*HTTP, *KSERVE, *INFER, *_every_type(), *GENERATE, *SHARED_MEMORY, *CONTROL)
