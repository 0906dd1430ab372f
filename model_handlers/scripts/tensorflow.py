"""TensorFlow's SavedModels as SageMaker's TensorFlow container takes them, and scripts with its handlers around them.

An archive holds folders called by a number, each with a SavedModel: the versions of one model, or of several in a
folder each. Clients ask for the newest, or name another by `tfs-` words among their custom attributes. The library is
imported when the first model is loaded, by the process that it is in.

A script's `input_handler` makes a client's body into TensorFlow Serving's JSON, its `output_handler` an answer of what
that says. They know a request by a context of their own, and TensorFlow Serving's answer as an HTTP response. A
`handler` does both, and asks in between at an address: there is a server for it on a thread of its own.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import http.server
import io
import json
import re
import threading
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import quote, unquote

import numpy as np

from model_handlers.config.model_config import ModelConfig
from model_handlers.errors import Kind, MmeError, invalid_argument, invalid_model
from model_handlers.scripts.content_types import (
    ATTRIBUTES_HEADER,
    CSV,
    JSON,
    JSON_LINES,
    cells_of,
    json_lines,
    preferred,
    read,
    text_of,
    to_json,
    value_of,
)
from model_handlers.scripts.default_script import DEFAULT, saved_models_in
from model_handlers.tensor import BF16, BYTES, Array, TensorSpec, shape_matches
from model_handlers.tensorflow import DEFAULT_SIGNATURE, SIGNATURE, SavedModelHandler

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path
    from types import ModuleType

    from model_handlers.base import Device, Handler
    from model_handlers.scripts.content_types import Reader
    from model_handlers.scripts.host import Context


_BINARY = "b64"
_OF_BYTES = "_bytes"  # how the name of an output ends whose strings are no text


class Cells(list[Any]):
    """Rows of CSV as `instances`: what each cell means alone, and in `words` how it was written, for text."""

    def __init__(self, words: list[list[str]]) -> None:
        super().__init__([_value(row[0]) if len(row) == 1 else list(map(_value, row)) for row in words])
        self.words = words

    def array(self, spec: TensorSpec, *, batches: bool) -> Array:
        """The array of the one input: a column, unless that has no dimension but that of rows. Raises ValueError."""
        rank = len(spec.model_dims) + batches
        alone = len(self.words[0]) == 1
        values: list[Any] = self
        if spec.data_type is BYTES:
            values = [row[0] for row in self.words] if alone else self.words
        else:
            self._check_numbers()
        return _array([[value] for value in values] if alone and rank > 1 else values, spec)

    def _check_numbers(self) -> None:
        for at, row in enumerate(self, 1):
            cells = row if isinstance(row, list) else [row]
            wrong = [column for column, cell in enumerate(cells, 1) if isinstance(cell, str)]
            if wrong:
                raise ValueError(f"row {at}, column {wrong[0]}: {cells[wrong[0] - 1]!r:.80} is no number")


def rows_of(instances: Any, specs: Sequence[TensorSpec], *, batches: bool = False) -> dict[str, Array]:
    """Each input's array, from rows: values of the one input, or objects of all inputs. Raises ValueError or TypeError.

    With `batches` the inputs' dimensions leave out that of rows.
    """
    if not isinstance(instances, list) or not instances:
        raise ValueError("'instances' has to be a list of rows, and not an empty one")
    if isinstance(instances, Cells):
        spec = _only(specs)
        return {spec.name: instances.array(spec, batches=batches)}
    named = isinstance(instances[0], dict) and set(instances[0]) != {_BINARY}
    if not named:
        return {_only(specs).name: _array(instances, _only(specs))}
    names = {spec.name for spec in specs}
    for row in instances:
        if not isinstance(row, dict) or set(row) != names:
            raise ValueError(f"each of 'instances' has to be an object of {', '.join(sorted(names))}")
    return {spec.name: _array([row[spec.name] for row in instances], spec) for spec in specs}


def columns_of(inputs: Any, specs: Sequence[TensorSpec]) -> dict[str, Array]:
    """Each input's array, from one whole tensor of the one input, or an object of one of each."""
    if not isinstance(inputs, dict) or set(inputs) == {_BINARY}:
        return {_only(specs).name: _array(inputs, _only(specs))}
    names = {spec.name for spec in specs}
    if set(inputs) != names:
        raise ValueError(f"'inputs' has to be an object of {', '.join(sorted(names))}")
    return {spec.name: _array(inputs[spec.name], spec) for spec in specs}


def outcome(results: Mapping[str, Array], given: Mapping[str, Array], *, rows: bool) -> dict[str, Any]:
    """The document of an answer: `predictions` row by row, or whole `outputs`; without names where there is one."""
    plain = {name: _plain(array, name) for name, array in results.items()}
    if not rows:
        return {"outputs": next(iter(plain.values())) if len(plain) == 1 else plain}
    count = len(next(iter(given.values())))
    wrong = [name for name, array in results.items() if array.ndim == 0 or len(array) != count]
    if wrong:
        raise ValueError(f"output '{wrong[0]}' is not of {count} rows, as the instances are: ask with 'inputs' instead")
    if len(plain) == 1:
        return {"predictions": next(iter(plain.values()))}
    return {"predictions": [{name: values[row] for name, values in plain.items()} for row in range(count)]}


def _only(specs: Sequence[TensorSpec]) -> TensorSpec:
    if len(specs) != 1:
        raise ValueError(f"the model has several inputs: name each, {', '.join(spec.name for spec in specs)}")
    return specs[0]


def _array(values: Any, spec: TensorSpec) -> Array:
    if spec.data_type is BYTES:
        return np.array(_as_bytes(values), np.object_)
    array = np.array(values)
    if array.dtype.kind == "O" and spec.data_type.dtype.kind == "f":
        array = _with_gaps(array)
    if array.dtype.kind not in "biuf" or (array.dtype.kind == "f" and spec.data_type.dtype.kind in "biu"):
        raise ValueError(f"input '{spec.name}' is of {spec.data_type}, and not all that came is such a number")
    if array.dtype.kind in "iu" and spec.data_type.dtype.kind in "iu":
        bounds = np.iinfo(spec.data_type.dtype)
        if array.size and not bounds.min <= array.min() <= array.max() <= bounds.max:
            raise ValueError(f"input '{spec.name}' is of {spec.data_type}, which can't hold all that came")
    with np.errstate(over="ignore"):
        return array.astype(spec.data_type.dtype)


def _with_gaps(array: Array) -> Array:
    kinds = set(map(type, array.ravel().tolist()))
    return array.astype(np.float64) if kinds <= {int, float, type(None)} else array


def _value(cell: str) -> Any:
    # As JSON has it: a whole number, another one, null where it is empty, or text.
    value = value_of(cell)
    if isinstance(value, str):
        return value
    if np.isnan(value) and not cell.strip():
        return None
    word = cell.strip()
    return int(word) if word.lstrip("+-").isdecimal() else value


def _as_bytes(value: Any) -> Any:
    if isinstance(value, list):
        return [_as_bytes(each) for each in value]
    if isinstance(value, dict) and set(value) == {_BINARY}:
        return base64.b64decode(value[_BINARY], validate=True)
    if not isinstance(value, str):
        raise TypeError(f'a string, or {{"{_BINARY}": …}}, is expected in the place of {value!r:.80}')
    return value.encode()


def _plain(array: Array, name: str) -> Any:
    if array.dtype.kind != "O":
        return np.ascontiguousarray(array) if array.ndim else array[()]
    return _text(array.tolist(), binary=name.endswith(_OF_BYTES))


def _text(value: Any, *, binary: bool) -> Any:
    if isinstance(value, list):
        return [_text(each, binary=binary) for each in value]
    if not binary:
        try:
            return value.decode()
        except UnicodeDecodeError:  # TensorFlow Serving would write what no parser reads
            pass
    return {_BINARY: base64.b64encode(value).decode()}


NAME, VERSION, METHOD = "tfs-model-name", "tfs-model-version", "tfs-method"
PREDICT = "predict"
_ATTRIBUTE = re.compile(r"(tfs-[a-z-]+)=([^,]+)")
_FORMS = ("instances", "inputs", "examples")  # one of which each request to TensorFlow Serving has
_quickly: Callable[[Any], bytes] | None = None
with contextlib.suppress(ImportError):  # a model's own environment may lack it
    import orjson

    _quickly = functools.partial(orjson.dumps, option=orjson.OPT_SERIALIZE_NUMPY)


def tfs_attributes(context: Context) -> dict[str, str]:
    """What a request's custom attributes say to TensorFlow's container: `tfs-model-name=a,tfs-model-version=2`."""
    text = context.get_request_header(0, ATTRIBUTES_HEADER) or ""
    return {key: value.strip() for key, value in _ATTRIBUTE.findall(text)}


class SavedModels:
    """The SavedModels of one archive. The newest of each is loaded at once, whatever else clients name when they do.

    A client that names no model gets the `default` one, as in Amazon's container: the first unless it is named.
    """

    def __init__(self, model: str, directory: Path, device: Device, default: str = "") -> None:
        self._model = model
        self._device = device
        self._versions: dict[str, dict[int, Path]] = {}
        for folder in saved_models_in(directory):
            self._versions.setdefault(folder.parent.name, {})[int(folder.name)] = folder
        self.default = default if default and len(self._versions) > 1 else next(iter(self._versions))
        if self.default not in self._versions:
            raise invalid_model(
                f"model '{model}': {DEFAULT} is '{default}', but its models are {', '.join(self._versions)}"
            )
        self._loaded: dict[tuple[Path, str], Handler] = {}
        for versions in self._versions.values():
            self._function(versions[max(versions)], DEFAULT_SIGNATURE)

    def predict(self, document: Mapping[str, Any], said: Mapping[str, str] | None = None) -> dict[str, Any]:
        """What TensorFlow Serving answers to a request's document, with arrays in it; `said`: see `tfs_attributes`."""
        said = said or {}
        if said.get(METHOD, PREDICT) != PREDICT or "examples" in document:
            raise self._refused(f"{METHOD} is to be '{PREDICT}', with instances or inputs: nothing else is served")
        function = self._function(self._folder(said), str(document.get("signature_name") or DEFAULT_SIGNATURE))
        try:
            rows = "instances" in document
            specs = function.config.inputs
            if rows:
                given = rows_of(document["instances"], specs, batches=function.config.max_batch_size > 0)
            else:
                given = columns_of(document["inputs"], specs)
        except KeyError:
            raise self._refused("the document has neither 'instances' nor 'inputs'") from None
        except (ValueError, TypeError, OverflowError) as error:
            raise self._refused(str(error)) from error
        self._check_shapes(given, function.config)
        names = [spec.name for spec in function.config.outputs]
        results = dict(zip(names, function.execute(given, names), strict=True))
        try:
            return outcome(results, given, rows=rows)
        except ValueError as error:
            raise self._refused(str(error)) from error

    def _folder(self, said: Mapping[str, str]) -> Path:
        # The newest of the default model if none is named; an archive's only model is taken for any name, since its own
        # is whatever its folder was called.
        name = said.get(NAME, self.default) if len(self._versions) > 1 else self.default
        by_number = {str(number): folder for number, folder in sorted(self._versions.get(name, {}).items())}
        wanted = said.get(VERSION, next(reversed(by_number), ""))
        if not by_number:
            raise self._refused(f"{NAME} is '{name}', but its models are {', '.join(self._versions)}")
        if wanted not in by_number:
            raise self._refused(f"{VERSION} is '{wanted}', but its versions are {', '.join(by_number)}")
        return by_number[wanted]

    def _function(self, folder: Path, signature: str) -> Handler:
        known = self._loaded.get((folder, signature))
        if known is not None:
            return known
        parameters = {} if signature == DEFAULT_SIGNATURE else {SIGNATURE: signature}
        config = ModelConfig(
            name=self._model,
            backend=SavedModelHandler.backend,
            platform="tensorflow_savedmodel",
            default_model_filename=folder.name,
            parameters=parameters,
        )
        try:
            function = SavedModelHandler.load(config, folder, self._device)
        except MmeError as error:
            if parameters and error.kind is Kind.INVALID_MODEL:  # it is the client that named the signature
                raise invalid_argument(error.message) from error
            raise
        if any(spec.data_type is BF16 for spec in (*function.config.inputs, *function.config.outputs)):
            raise invalid_model(f"model '{self._model}': JSON has no BF16: cast to FP32 in the signature '{signature}'")
        self._loaded[folder, signature] = function
        return function

    def _check_shapes(self, given: Mapping[str, Any], config: ModelConfig) -> None:
        for spec in config.inputs:
            full = spec.model_shape(config.max_batch_size)
            shape = given[spec.name].shape
            if not shape_matches(shape, full):
                raise self._refused(f"input '{spec.name}' has shape {list(shape)}, but {list(full)} is expected")

    def _refused(self, sentence: str) -> MmeError:
        return invalid_argument(f"model '{self._model}': {sentence}")


def request(body: bytes | str, content_type: object) -> dict[str, Any]:
    """The document for TensorFlow Serving that a body is, or is made into as Amazon's container does it.

    JSON that is none of TensorFlow Serving's becomes one instance, or several where it is a list of lists; lines of
    JSON and rows of CSV become instances.
    """
    document: dict[str, Any] = read(body, content_type, _READERS)
    return document


def answer(document: Mapping[str, Any], accept: str, *, literal: bool = False) -> tuple[bytes, str]:
    """The body of an answer and its content type: JSON, which is one line, whatever else a client would like better."""
    return written(document, literal=literal), preferred(accept, (JSON, JSON_LINES), JSON) or JSON


def written(document: Mapping[str, Any], *, literal: bool = False) -> bytes:
    if _quickly is not None and not literal:
        return _quickly(document)
    return to_json(document, literal=literal).encode()


def _document(body: bytes | str) -> dict[str, Any]:
    document = json.loads(text_of(body))
    if isinstance(document, dict) and any(form in document for form in _FORMS):
        return document
    several = isinstance(document, list) and document and isinstance(document[0], list)
    return {"instances": document if several else [document]}


def _of_lines(body: bytes | str) -> dict[str, Any]:
    lines = json_lines(body)
    alone = lines[0]
    if len(lines) == 1 and isinstance(alone, dict) and any(form in alone for form in _FORMS):
        return alone
    return {"instances": lines}


_READERS: dict[str, Reader] = {
    JSON: _document,
    CSV: lambda body: {"instances": Cells(cells_of(body))},
    JSON_LINES: _of_lines,
    "application/jsons": _of_lines,
}


HANDLERS = ("handler", "input_handler", "output_handler")
_PATH = re.compile(r"/v1/models/([^/:]+)(?:/versions/(\d+))?:([a-z]+)")
_STATUSES = {Kind.INVALID_ARGUMENT: HTTPStatus.BAD_REQUEST, Kind.OUT_OF_MEMORY: HTTPStatus.SERVICE_UNAVAILABLE}


class ServingContext(NamedTuple):
    """What a handler is told of a request."""

    model_name: str
    model_version: str | None
    method: str
    rest_uri: str
    grpc_port: str
    channel: Any
    custom_attributes: str | None
    request_content_type: str
    accept_header: str
    content_length: int


class ServingResponse:
    """TensorFlow Serving's answer, as `requests` would have brought it."""

    encoding = "utf-8"

    def __init__(self, status_code: int, content: bytes) -> None:
        self.status_code = status_code
        self.content = content
        self.headers = {"Content-Type": JSON, "Content-Length": str(len(content))}

    @property
    def ok(self) -> bool:
        return self.status_code < HTTPStatus.BAD_REQUEST

    @property
    def reason(self) -> str:
        return HTTPStatus(self.status_code).phrase

    @property
    def text(self) -> str:
        return self.content.decode()

    def json(self, **options: Any) -> Any:
        return json.loads(self.content, **options)

    def raise_for_status(self) -> None:
        if not self.ok:
            raise RuntimeError(f"{self.status_code} {self.reason}: {self.text}")


class ServingHandlers:
    """A script's handlers as one function from a body to an answer. Raises INVALID_MODEL for one of two alone."""

    def __init__(self, module: ModuleType, path: Path, model: str, models: SavedModels, context: Context) -> None:
        functions: list[Any] = [getattr(module, name, None) for name in HANDLERS]
        self._whole, self._reads, self._writes = functions
        if not callable(self._whole) and not (callable(self._reads) and callable(self._writes)):
            raise invalid_model(f"model '{model}': {path} needs both {HANDLERS[1]} and {HANDLERS[2]}")
        self._model = model
        self._models = models
        self._context = context
        self._address = ServingAddress(models) if callable(self._whole) else None

    def __call__(self, models: SavedModels, body: bytes | str, content_type: str, accept: str) -> Any:
        data = body.encode() if isinstance(body, str) else body
        told = self._told(content_type, accept, len(data))
        if callable(self._whole):  # which comes before the others, as in Amazon's container
            return self._whole(io.BytesIO(data), told)
        return self._writes(asked(models, self._reads(io.BytesIO(data), told), tfs_attributes(self._context)), told)

    def close(self) -> None:
        if self._address is not None:
            self._address.close()

    def _told(self, content_type: str, accept: str, length: int) -> ServingContext:
        said = tfs_attributes(self._context)
        version, method = said.get(VERSION), said.get(METHOD, PREDICT)
        return ServingContext(
            model_name=said.get(NAME, self._model),
            model_version=version,
            method=method,
            rest_uri="" if self._address is None else self._address.uri(said.get(NAME), version, method),
            grpc_port="",
            channel=None,
            custom_attributes=self._context.get_request_header(0, ATTRIBUTES_HEADER),
            request_content_type=content_type,
            accept_header=accept,
            content_length=length,
        )


def handlers_of(
    module: ModuleType, path: Path, model: str, models: SavedModels, context: Context
) -> ServingHandlers | None:
    if not any(callable(getattr(module, name, None)) for name in HANDLERS):
        return None
    return ServingHandlers(module, path, model, models, context)


class ServingAddress:
    """TensorFlow Serving's REST address, for a script that asks there itself: on this machine's loopback alone."""

    def __init__(self, models: SavedModels) -> None:
        self._default = models.default
        self._server = _server(models)
        self._thread = threading.Thread(target=self._server.serve_forever, name="saved-models", daemon=True)
        self._thread.start()

    def uri(self, name: str | None, version: str | None, method: str) -> str:
        asked = quote(name or self._default) + (f"/versions/{version}" if version else "")
        return f"http://127.0.0.1:{self._server.server_port}/v1/models/{asked}:{method}"

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def _server(models: SavedModels) -> http.server.ThreadingHTTPServer:
    class Answers(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            path = _PATH.fullmatch(self.path)
            if path is None:
                response = ServingResponse(
                    HTTPStatus.NOT_FOUND, b'{"error": "there is POST /v1/models/NAME:predict alone"}'
                )
            else:
                said = {NAME: unquote(path[1]), METHOD: path[3], **({VERSION: path[2]} if path[2] else {})}
                response = asked(models, body, said)
            self.send_response(response.status_code)
            for name, value in response.headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(response.content)

        def log_message(self, *_: Any) -> None:
            # The server logs requests.
            pass

    return http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answers)


def asked(models: SavedModels, document: Any, said: Mapping[str, str]) -> ServingResponse:
    text = document if isinstance(document, str | bytes) else json.dumps(document)
    try:
        return ServingResponse(HTTPStatus.OK, written(models.predict(request(text, JSON), said)))
    except (MmeError, ValueError) as error:
        kind = error.kind if isinstance(error, MmeError) else Kind.INVALID_ARGUMENT
        status = _STATUSES.get(kind, HTTPStatus.INTERNAL_SERVER_ERROR)
        return ServingResponse(status, json.dumps({"error": str(error)}).encode())
