"""TensorFlow's SavedModels as SageMaker's TensorFlow container takes them: their folders, and what clients send.

An archive holds folders called by a number, each with a SavedModel: the versions of one model, or of several in a
folder each. Clients ask for the newest, or name another by `tfs-` words among their custom attributes. The library is
imported when the first model is loaded, by the process that it is in.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import json
import re
from typing import TYPE_CHECKING, Any

import numpy as np

from model_handlers.config.model_config import ModelConfig
from model_handlers.errors import Kind, MmeError, invalid_argument, invalid_model
from model_handlers.scripts.accept import preferred
from model_handlers.scripts.context import CUSTOM_ATTRIBUTES
from model_handlers.scripts.csv_text import cells_of, text_of, value_of
from model_handlers.scripts.formats import (
    CSV,
    JSON,
    JSON_LINES,
    MalformedBodyError,
    UnsupportedFormatError,
    json_lines,
    media_type,
    to_json,
)
from model_handlers.scripts.no_script import DEFAULT, saved_models_in
from model_handlers.tensor import BF16, BYTES
from model_handlers.tensorflow import SavedModelHandler
from model_handlers.tensorflow.graphs import DEFAULT_SIGNATURE, SIGNATURE

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from model_handlers.base import Device, Handler
    from model_handlers.scripts.context import Context
    from model_handlers.tensor import Array, TensorSpec


_BINARY = "b64"
_OF_BYTES = "_bytes"  # how the name of an output ends whose strings are no text


class Cells(list[Any]):
    """Rows of CSV as `instances`: what each cell means alone, and how it was written, for inputs that are text.

    Attributes:
        words: the cells as they came.
    """

    def __init__(self, words: list[list[str]]) -> None:
        super().__init__([_value(row[0]) if len(row) == 1 else list(map(_value, row)) for row in words])
        self.words = words

    def array(self, spec: TensorSpec, *, batches: bool) -> Array:
        """The array of the one input: a column, unless that has no dimension but that of rows.

        Raises:
            ValueError: with the row and the column of what is no such number.
        """
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
    """Each input's array, from rows: values of the one input, or objects of all inputs.

    Args:
        instances: the rows.
        specs: of the inputs.
        batches: whether their dimensions leave out that of rows.

    Raises:
        ValueError, TypeError: they are not rows of these inputs.
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
    """Each input's array, from one whole tensor of the one input, or an object of one of each.

    Raises:
        ValueError, TypeError: they are not these inputs.
    """
    if not isinstance(inputs, dict) or set(inputs) == {_BINARY}:
        return {_only(specs).name: _array(inputs, _only(specs))}
    names = {spec.name for spec in specs}
    if set(inputs) != names:
        raise ValueError(f"'inputs' has to be an object of {', '.join(sorted(names))}")
    return {spec.name: _array(inputs[spec.name], spec) for spec in specs}


def outcome(results: Mapping[str, Array], given: Mapping[str, Array], *, rows: bool) -> dict[str, Any]:
    """The document of an answer: `predictions` row by row, or whole `outputs`; without names where there is one.

    Raises:
        ValueError: an output has not as many rows as the inputs.
    """
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
    """Numbers with null among them, which is NaN; anything else as it is."""
    kinds = set(map(type, array.ravel().tolist()))
    return array.astype(np.float64) if kinds <= {int, float, type(None)} else array


def _value(cell: str) -> Any:
    """A cell as JSON has it: a whole number, another one, null where it is empty, or text."""
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
    """An array of numbers as it is, one of strings as lists."""
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
_READS = (JSON, CSV, JSON_LINES, "application/jsons")
_ATTRIBUTE = re.compile(r"(tfs-[a-z-]+)=([^,]+)")
_FORMS = ("instances", "inputs", "examples")  # one of which each request to TensorFlow Serving has
_quickly: Callable[[Any], bytes] | None = None
with contextlib.suppress(ImportError):  # a model's own environment may lack it
    import orjson

    _quickly = functools.partial(orjson.dumps, option=orjson.OPT_SERIALIZE_NUMPY)


def said_by(context: Context) -> dict[str, str]:
    """What a request's custom attributes say to TensorFlow's container: `tfs-model-name=a,tfs-model-version=2`."""
    text = context.get_request_header(0, CUSTOM_ATTRIBUTES) or ""
    return {key: value.strip() for key, value in _ATTRIBUTE.findall(text)}


class SavedModels:
    """The SavedModels of one archive. The newest of each is loaded at once, whatever else clients name when they do.

    Who names no model means the default one, as in Amazon's container.

    Attributes:
        default: the folder of that one.

    Args:
        model: the name under which they are served, for messages.
        directory: the archive's.
        device: where they compute.
        default: the name of the default one of several, "" for the first.

    Raises:
        MmeError: INVALID_MODEL, UNSUPPORTED without TensorFlow, OUT_OF_MEMORY.
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
        """What TensorFlow Serving answers to a request's document, with arrays in it.

        Args:
            document: `instances` (one or several rows) or `inputs` (whole tensors), and perhaps `signature_name`.
            said: see `said_by`.

        Raises:
            MmeError: INVALID_ARGUMENT for what the client got wrong; EXECUTION_FAILED, OUT_OF_MEMORY.
        """
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
        """The version that a client names, the newest of the first model if it names none.

        The name of an archive's only model is whatever its folder was called, so any is taken for it.
        """
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
            platform=SavedModelHandler.platform,
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
            array = given[spec.name]
            fits = array.ndim == len(full) and all(
                want in (-1, has) for want, has in zip(full, array.shape, strict=True)
            )
            if not fits:
                raise self._refused(f"input '{spec.name}' has shape {list(array.shape)}, but {list(full)} is expected")

    def _refused(self, sentence: str) -> MmeError:
        return invalid_argument(f"model '{self._model}': {sentence}")


def request(body: bytes | str, content_type: object) -> dict[str, Any]:
    """The document for TensorFlow Serving that a body is, or is made into as Amazon's container does it.

    JSON that is none of TensorFlow Serving's becomes one instance, or several where it is a list of lists; lines of
    JSON and rows of CSV become instances.

    Raises:
        UnsupportedFormatError: no such content type is read.
        MalformedBodyError: it can't be read as that.
    """
    kind = media_type(content_type)
    if kind not in _READS:
        raise UnsupportedFormatError(content_type, _READS)
    try:
        if kind == CSV:
            return {"instances": Cells(cells_of(body))}
        return _document(json.loads(text_of(body))) if kind == JSON else _of_lines(json_lines(body))
    except (ValueError, RecursionError) as error:
        raise MalformedBodyError(f"the body is not {content_type}: {error}") from error


def answer(document: Mapping[str, Any], accept: str, *, literal: bool = False) -> tuple[bytes, str]:
    """The body of an answer and its content type: JSON, which is one line, whatever else a client would like better."""
    return written(document, literal=literal), preferred(accept, (JSON, JSON_LINES), JSON) or JSON


def written(document: Mapping[str, Any], *, literal: bool = False) -> bytes:
    """A document with arrays as JSON, in which numbers that are none are null, or NaN and Infinity if `literal`."""
    if _quickly is not None and not literal:
        return _quickly(document)
    return to_json(document, literal=literal).encode()


def _document(document: Any) -> dict[str, Any]:
    if isinstance(document, dict) and any(form in document for form in _FORMS):
        return document
    several = isinstance(document, list) and document and isinstance(document[0], list)
    return {"instances": document if several else [document]}


def _of_lines(lines: list[Any]) -> dict[str, Any]:
    """Each line an instance, but for a whole document on the only one."""
    alone = lines[0]
    if len(lines) == 1 and isinstance(alone, dict) and any(form in alone for form in _FORMS):
        return alone
    return {"instances": lines}
