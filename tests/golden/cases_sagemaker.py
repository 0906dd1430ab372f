"""Requests in SageMaker's contract and its Runtime API, over HTTP/1.1, to three servers; each in this order."""

from __future__ import annotations

import io
import json
from typing import Any

import numpy as np

from tests.contract.models import ONE
from tests.golden.cases_kserve import FLOATS, inputs, raw, sized, tensor
from tests.golden.wire import Http

_TARGET = "X-Amzn-SageMaker-Target-Model"
_SESSION = "X-Amzn-SageMaker-Session-Id"
_BINARY = "application/vnd.sagemaker-triton.binary+json"
_ADMIN = {"admin-key": "secret"}
_NUMBER = inputs(tensor(shape=[1, 1], data=[1]))
_TEXT = {"name": "text_input", "shape": [1], "datatype": "BYTES"}


def _binary(document: dict, *tensors: bytes) -> tuple[bytes, dict[str, str]]:
    head = json.dumps(document).encode()
    return head + b"".join(tensors), {"Content-Type": f"{_BINARY};json-header-size={len(head)}"}


def _npy(array: Any) -> bytes:
    out = io.BytesIO()
    np.save(out, array)
    return out.getvalue()


def _load(name: str, url: str = "", **more: Any) -> dict[str, Any]:
    return {"model_name": name, "url": url or f"HERE/{name}/model", **more}


def _invoke(what: str, name: str, body: Any, **headers: str) -> Http:
    return Http(
        what, f"POST /models/{name}/invoke", body, {key.replace("_", "-"): text for key, text in headers.items()}
    )


def _target(what: str, name: str, body: Any, target: str = "POST /invocations", **headers: str) -> Http:
    given = {key.replace("_", "-"): text for key, text in headers.items()}
    return Http(what, target, body, {_TARGET: name, **given})


_BODY, _SIZE = _binary(inputs(sized(16)), FLOATS)
_ROWS = np.array([[1.0, 2.0], [3.0, 4.0]])

PLATFORM = (
    Http("ping", "GET /ping"),
    Http("ping by POST", "POST /ping", b""),
    Http("list of none", "GET /models"),
    Http("execution parameters", "GET /execution-parameters"),
    Http("unknown model", "GET /models/plus"),
    Http("unload, unknown model", "DELETE /models/plus"),
    _invoke("invoke, unknown model", "plus", ONE),
    Http("load, nothing", "POST /models", b""),
    Http("load, no JSON", "POST /models", b"{"),
    Http("load, a list", "POST /models", []),
    Http("load, no name", "POST /models", {"url": "HERE/plus/model"}),
    Http("load, no url", "POST /models", {"model_name": "plus"}),
    Http("load, name of another kind", "POST /models", {"model_name": 1, "url": "x"}),
    Http("load, no such folder", "POST /models", _load("plus", "HERE/nothing")),
    Http("load, a relative folder", "POST /models", _load("plus", "plus/model")),
    Http("load, a URL", "POST /models", _load("plus", "s3://bucket/plus.tar.gz")),
    Http("load, an empty folder", "POST /models", _load("empty")),
    Http("load, a broken file", "POST /models", _load("broken")),
    Http("load, a wrong configuration", "POST /models", _load("wrong")),
    Http("load, a script that fails", "POST /models", _load("failing")),
    Http("load, no memory", "POST /models", _load("heavy")),
    Http("load", "POST /models", _load("plus")),
    Http("load again", "POST /models", _load("plus")),
    Http("load, one folder inside", "POST /models", _load("nested")),
    Http("load under the client's name", "POST /models", _load("0123456789abcdef", "HERE/pick/model"), {_TARGET: "pick.tar.gz"}),
    Http("load, text", "POST /models", _load("text")),
    Http("list", "GET /models"),
    Http("list of a page", "GET /models?next_page_token=bmVzdGVk"),
    Http("list of a page that is none", "GET /models?next_page_token=x"),
    Http("model", "GET /models/plus"),
    Http("model by the client's name", "GET /models/pick.tar.gz"),
    Http("model by SageMaker's name", "GET /models/0123456789abcdef"),
    Http("model by PUT", "PUT /models/plus", b""),
    Http("models by DELETE", "DELETE /models"),
    Http("no name", "GET /models/"),
    _invoke("invoke", "plus", ONE),
    _invoke("invoke with attributes", "plus", ONE, X_Amzn_SageMaker_Custom_Attributes="trace=1", X_Amzn_SageMaker_Inference_Id="id-1"),
    _invoke("invoke, the other", "nested", ONE),
    _invoke("invoke, fails", "0123456789abcdef", inputs(tensor("I", [1, 1], "INT64", [99]))),
    _invoke("invoke, by the client's name", "pick.tar.gz", inputs(tensor("I", [1, 1], "INT64", [1]))),
    _invoke("invoke, no JSON", "plus", b"{"),
    _invoke("invoke, nothing", "plus", b""),
    _invoke("invoke, wrong input", "plus", inputs(tensor("Z"))),
    _invoke("invoke, CSV to tensors", "plus", b"1,2,3,4", Content_Type="text/csv"),
    _invoke("invoke, form to tensors", "plus", json.dumps(ONE).encode(), Content_Type="application/x-www-form-urlencoded"),
    _invoke("invoke, octets", "plus", json.dumps(ONE).encode(), Content_Type="application/octet-stream"),
    Http("invoke, binary", "POST /models/plus/invoke", _BODY, _SIZE),
    Http("invoke, binary both ways", "POST /models/plus/invoke", _BODY, {**_SIZE, "Accept": _BINARY}),
    Http("invoke, JSON with a binary answer", "POST /models/plus/invoke", ONE, {"Accept": _BINARY}),
    Http("invoke, binary, no size", "POST /models/plus/invoke", _BODY, {"Content-Type": _BINARY}),
    Http("invoke, binary, size of a word", "POST /models/plus/invoke", _BODY, {"Content-Type": f"{_BINARY};json-header-size=x"}),
    Http("invoke, binary, size too large", "POST /models/plus/invoke", _BODY, {"Content-Type": f"{_BINARY};json-header-size=9999"}),
    Http("invoke, raw", "POST /models/nested/invoke", FLOATS, {"Content-Type": f"{_BINARY};json-header-size=0"}),
    _invoke("invoke, Accept of another type", "plus", ONE, Accept="text/csv"),
    _invoke("invoke, Accept of anything", "plus", ONE, Accept="*/*"),
    _invoke("invoke, texts", "text", inputs(tensor("IN", [2], "BYTES", ["a", "\u2603"]))),
    Http("invoke, chunked", raw=[raw("POST /models/plus/invoke HTTP/1.1", "Host: localhost", "Transfer-Encoding: chunked", body=b"%x\r\n%b\r\n0\r\n\r\n" % (len(json.dumps(ONE)), json.dumps(ONE).encode()))]),
    _invoke("session of a model without sequences", "plus", {"requestType": "NEW_SESSION"}, X_Amzn_SageMaker_Session_Id="NEW_SESSION"),
    _target("invocations", "plus", ONE),
    Http("invocations of no model", "POST /invocations", ONE),
    Http("KServe of a model", "POST /v2/models/plus/infer", ONE),
    Http("KServe's load", "POST /v2/repository/models/plus/load", {}),
    Http("KServe's index", "POST /v2/repository/index", {}),
    Http("load a script", "POST /models", _load("script")),
    _invoke("script, JSON", "script", [[1, 2], [3, 4]], Content_Type="application/json"),
    _invoke("script, JSON with attributes", "script", [1], Content_Type="application/json", X_Amzn_SageMaker_Custom_Attributes="a=b"),
    _invoke("script, CSV", "script", b"1,2\n3,4\n", Content_Type="text/csv"),
    _invoke("script, CSV there and back", "script", b"1,2\n3,4\n", Content_Type="text/csv", Accept="text/csv"),
    _invoke("script, npy there and back", "script", _npy(_ROWS), Content_Type="application/x-npy", Accept="application/x-npy"),
    _invoke("script, npy that is none", "script", b"npy", Content_Type="application/x-npy"),
    _invoke("script, CSV that is none", "script", b"a,b", Content_Type="text/csv"),
    _invoke("script, unknown type", "script", b"x", Content_Type="image/png"),
    _invoke("script, unknown Accept", "script", [1], Content_Type="application/json", Accept="image/png"),
    _invoke("script, no type", "script", [1]),
    _invoke("script, nothing", "script", b""),
    _invoke("script, its own status", "script", b"422", Content_Type="text/x-fail"),
    _invoke("script, raises", "script", b"", Content_Type="text/x-raise"),
    Http("script, metadata", "GET /v2/models/script"),
    Http("script, configuration", "GET /v2/models/script/config"),
    Http("load a script that streams", "POST /models", _load("pieces")),
    _invoke("pieces", "pieces", b"3", Content_Type="application/json"),
    _invoke("pieces, none", "pieces", b"0", Content_Type="application/json"),
    _invoke("pieces, fails at once", "pieces", b"x", Content_Type="application/json"),
    Http("unload", "DELETE /models/plus"),
    Http("unload again", "DELETE /models/plus"),
    Http("unload by the client's name", "DELETE /models/pick.tar.gz"),
    _invoke("invoke, unloaded", "plus", ONE),
    Http("list in the end", "GET /models"),
    Http("unknown route", "GET /nothing"),
)  # fmt: skip

_ENDPOINT = "POST /endpoints/e/invocations"
_EVENTS = "POST /endpoints/e/invocations-response-stream"
STORE = (
    Http("ping", "GET /ping"),
    Http("index", "POST /v2/repository/index", {}),
    Http("index with the key", "POST /v2/repository/index", {}, _ADMIN),
    Http("index with another key", "POST /v2/repository/index", {}, {"admin-key": "guess"}),
    Http("trace", "GET /v2/trace/setting"),
    Http("logging", "GET /v2/logging"),
    Http("logging with the key", "GET /v2/logging", headers=_ADMIN),
    Http("SageMaker's list", "GET /models"),
    Http("SageMaker's list with the key", "GET /models", headers=_ADMIN),
    Http("load", "POST /v2/repository/models/plus/load", {}),
    Http("load with the key", "POST /v2/repository/models/plus/load", {}, _ADMIN),
    Http("load, a broken archive", "POST /v2/repository/models/broken-0.tar.gz/load", {}, _ADMIN),
    Http("load, no such archive", "POST /v2/repository/models/nobody/load", {}, _ADMIN),
    Http("SageMaker's load", "POST /models", _load("m", "HERE/plus.tar.gz"), _ADMIN),
    Http("server metadata", "GET /v2"),
    Http("model metadata", "GET /v2/models/plus"),
    Http("model metadata by the archive's name", "GET /v2/models/plus.tar.gz"),
    _target("target", "plus.tar.gz", ONE),
    _target("target without .tar.gz", "plus", ONE),
    _target("target, no such archive", "nobody.tar.gz", ONE),
    _target("target, a path outside", "../plus.tar.gz", ONE),
    _target("target, absolute", "/etc/passwd", ONE),
    _target("target, empty", "", ONE),
    _target("target, a broken archive", "broken-1.tar.gz", ONE),
    Http("no target", "POST /invocations", ONE),
    _target("target with a variant", "plus.tar.gz", ONE, X_Amzn_SageMaker_Target_Variant="v"),
    _target("target, fails", "pick.tar.gz", inputs(tensor("I", [1, 1], "INT64", [99]))),
    _target("target, several answers", "repeat.tar.gz", inputs(tensor("IN", [2], "INT32", [5, 6]), tensor("DELAY", [2], "UINT32", [0, 0]), tensor("WAIT", [1], "UINT32", [0]))),
    _target("target, several answers, fails", "repeat.tar.gz", inputs(tensor("IN", [2], "INT32", [5, 6]))),
    _target("forwarded headers", "says.tar.gz", inputs({**_TEXT, "data": ["hello"]}), X_Tenant_Name="t", X_Other="o"),
    _target("Runtime API", "plus.tar.gz", ONE, _ENDPOINT, Content_Type="application/json"),
    _target("Runtime API with attributes", "plus.tar.gz", ONE, _ENDPOINT, X_Amzn_SageMaker_Custom_Attributes="a=b", X_Amzn_SageMaker_Inference_Id="i"),
    _target("Runtime API, no such archive", "nobody.tar.gz", ONE, _ENDPOINT),
    _target("Runtime API, a broken archive", "broken-2.tar.gz", ONE, _ENDPOINT),
    _target("Runtime API, fails", "pick.tar.gz", inputs(tensor("I", [1, 1], "INT64", [99])), _ENDPOINT),
    _target("Runtime API, no JSON", "plus.tar.gz", b"{", _ENDPOINT),
    _target("Runtime API, wrong input", "plus.tar.gz", inputs(tensor("Z")), _ENDPOINT),
    Http("Runtime API, no target", _ENDPOINT, ONE),
    Http("Runtime API by GET", "GET /endpoints/e/invocations"),
    Http("Runtime API, asynchronous", "POST /endpoints/e/async-invocations", b""),
    Http("Runtime API, unknown operation", "POST /endpoints/e/nothing", b""),
    _target("event stream", "plus.tar.gz", ONE, _EVENTS),
    _target("event stream of several answers", "repeat.tar.gz", inputs(tensor("IN", [2], "INT32", [5, 6]), tensor("DELAY", [2], "UINT32", [0, 0]), tensor("WAIT", [1], "UINT32", [0])), _EVENTS),
    _target("event stream, no such archive", "nobody.tar.gz", ONE, _EVENTS),
    _target("event stream, fails", "pick.tar.gz", inputs(tensor("I", [1, 1], "INT64", [99])), _EVENTS),
    _target("event stream of a script", "pieces.tar.gz", b"3", _EVENTS, Content_Type="application/json"),
    _target("event stream, an error in it", "streams.tar.gz", inputs({**_TEXT, "data": ["one fail three"]}), _EVENTS),
    _target("several answers, an error in them", "streams.tar.gz", inputs({**_TEXT, "data": ["one fail three"]})),
    _target("script", "script.tar.gz", b"1,2", Content_Type="text/csv"),
    _target("script by the Runtime API", "script.tar.gz", b"1,2", _ENDPOINT, Content_Type="text/csv", Accept="text/csv"),
    _target("script by the Runtime API, its own status", "script.tar.gz", b"422", _ENDPOINT, Content_Type="text/x-fail"),
    _target("script by the Runtime API, raises", "script.tar.gz", b"", _ENDPOINT, Content_Type="text/x-raise"),
    _target("session, unknown", "sums.tar.gz", _NUMBER, X_Amzn_SageMaker_Session_Id="nothing"),
    _target("session, close of an unknown one", "sums.tar.gz", {"requestType": "CLOSE"}, X_Amzn_SageMaker_Session_Id="nothing"),
    _target("session, empty", "sums.tar.gz", _NUMBER, X_Amzn_SageMaker_Session_Id=""),
    _target("session, new", "sums.tar.gz", _NUMBER, X_Amzn_SageMaker_Session_Id="NEW_SESSION"),
    _target("session, new, by its word", "sums.tar.gz", {"requestType": "NEW_SESSION"}, X_Amzn_SageMaker_Session_Id="NEW_SESSION"),
    _target("session, new, wrong request", "sums.tar.gz", inputs(tensor("Z")), X_Amzn_SageMaker_Session_Id="NEW_SESSION"),
    _target("session, new, no such archive", "nobody.tar.gz", _NUMBER, X_Amzn_SageMaker_Session_Id="NEW_SESSION"),
    _target("session, of an event stream", "sums.tar.gz", _NUMBER, _EVENTS, X_Amzn_SageMaker_Session_Id="NEW_SESSION"),
    _target("session by the Runtime API, unknown", "sums.tar.gz", _NUMBER, _ENDPOINT, X_Amzn_SageMaker_Session_Id="nothing"),
    Http("statistics", "GET /v2/models/plus.tar.gz/stats"),
    Http("unload with the key", "POST /v2/repository/models/plus/unload", {}, _ADMIN),
    Http("shared memory", "GET /v2/systemsharedmemory/status"),
    Http("shared memory, register", "POST /v2/systemsharedmemory/region/r/register", {"key": "x", "byte_size": 1}),
    Http("infer from shared memory", "POST /v2/models/plus/infer", inputs({"name": "X", "shape": [1, 4], "datatype": "FP32", "parameters": {"shared_memory_region": "r", "shared_memory_byte_size": 16}})),
)  # fmt: skip

SINGLE = (
    Http("ping", "GET /ping"),
    Http("execution parameters", "GET /execution-parameters"),
    Http("invocations", "POST /invocations", {"text_input": "hello"}),
    Http("invocations, an input too many", "POST /invocations", {"text_input": "hello", "other": 1}),
    Http("invocations, fails", "POST /invocations", {"text_input": "fail 3"}),
    Http("invocations, no JSON", "POST /invocations", b"{"),
    Http("invocations, CSV", "POST /invocations", b"a,b", {"Content-Type": "text/csv"}),
    Http("invocations of another target", "POST /invocations", {"text_input": "hello"}, {_TARGET: "other"}),
    Http("invocations in a session", "POST /invocations", {"text_input": "hello"}, {_SESSION: "NEW_SESSION"}),
    Http("invocations with attributes", "POST /invocations", {"text_input": "hello"}, {"X-Amzn-SageMaker-Custom-Attributes": "a=b"}),
    Http("list", "GET /models"),
    Http("model", "GET /models/says"),
    Http("load", "POST /models", {"model_name": "m", "url": "/m"}),
    Http("unload", "DELETE /models/says"),
    Http("invoke", "POST /models/says/invoke", {"text_input": "hello"}),
    Http("invoke, unknown", "POST /models/other/invoke", {"text_input": "hello"}),
    Http("KServe", "POST /v2/models/says/infer", inputs({**_TEXT, "data": ["hello"]})),
    Http("KServe's load", "POST /v2/repository/models/says/load", {}),
    Http("KServe's load with a configuration", "POST /v2/repository/models/says/load", {"parameters": {"config": "{}"}}),
    Http("KServe's unload", "POST /v2/repository/models/says/unload", {}),
    Http("KServe's index", "POST /v2/repository/index", {}),
    Http("Runtime API", "POST /endpoints/e/invocations", {"text_input": "hello"}),
    Http("Runtime API, fails", "POST /endpoints/e/invocations", {"text_input": "fail 3"}),
    Http("the page that is switched off", "GET /dashboard"),
)  # fmt: skip
