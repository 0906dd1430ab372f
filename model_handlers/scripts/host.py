"""Models of backend "sagemaker": a script with `model_fn` behind the Handler interface, one request at a time.

The script runs in `load` and `execute_requests`; `autocomplete` only reads, because a configuration may be asked for
where code of strangers must not run. It is imported under its own name, `inference` as a rule, since what was pickled
in training may name classes of that module; only where another model of the process has that name it gets a number
behind it. A generator that writes the answer is run by us, and its pieces are sent as they come: the model is a
decoupled one. What its functions print or log goes to the server's log.
"""

from __future__ import annotations

import functools
import inspect
import logging
import sys
import threading
from dataclasses import replace
from pathlib import Path
from types import GeneratorType, MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from model_handlers.base import Device, Handler, Placement, Traits
from model_handlers.config.model_config import SCRIPTS
from model_handlers.config.validate import normalise
from model_handlers.errors import Kind, MmeError, invalid_argument, invalid_model
from model_handlers.python.author_code import (
    ANY_RUNTIME,
    AuthorFiles,
    ImportedFile,
    check_syntax,
    failed_load,
    free_name,
    version_directory,
)
from model_handlers.python.preload import SAVED_MODEL as SAVED_MODELS
from model_handlers.requests import ModelRequest, ModelResponse, Responder
from model_handlers.scripts import toolkits
from model_handlers.scripts.content_types import (
    ANY,
    ATTRIBUTES_HEADER,
    JSON,
    TEXT,
    MalformedBodyError,
    encode,
    failed_call,
    presumed,
    with_status,
)
from model_handlers.scripts.default_script import (
    ACCEPT,
    BODY,
    BOOSTER,
    CONTENT_TYPE,
    CUSTOM_ATTRIBUTES,
    DEFAULT_ACCEPT,
    DEFAULT_TYPE,
    FOLDER,
    LITERAL,
    NONFINITE,
    PIPELINE,
    SAVED_MODEL,
    SESSION_ID,
    SUBMIT_DIRECTORY,
    default_script,
)
from model_handlers.scripts.defaults import Defaults
from model_handlers.scripts.tensorflow import SavedModels, ServingHandlers, handlers_of
from model_handlers.tensor import UINT8, TensorSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping, Sequence
    from types import ModuleType

    from model_handlers.config.model_config import ModelConfig


_PARAMETERS = {ATTRIBUTES_HEADER: CUSTOM_ATTRIBUTES, "X-Amzn-SageMaker-Session-Id": SESSION_ID}  # of headers
_NONE: Mapping[str, str] = MappingProxyType({})


class Context:
    """The `context` that a script's functions may take: what they are told of model, device and request.

    One object a model, about one request at a time. Of the client's headers it knows those that reach a model: content
    type, accept, custom attributes and the id of its session.

    Attributes:
        manifest: a description of the archive, which ours do not have: its model's name alone.
        system_properties: `model_dir`, `gpu_id` (None without one), `batch_size` and `server_name`.
        request_processor: a list of the one request's properties.
        literal: whether JSON says NaN and Infinity in place of null.
        metrics: takes what a function wants to be measured, to no effect.
    """

    def __init__(self, model: str, model_dir: str, gpu_id: int | None, parameters: Mapping[str, str] = _NONE) -> None:
        self.model_name = model
        self.parameters = parameters
        self.literal = parameters.get(NONFINITE) == LITERAL
        self.manifest: dict[str, Any] = {"model": {"modelName": model}}
        self.system_properties: dict[str, Any] = {
            "model_dir": model_dir,
            "gpu_id": gpu_id,
            "batch_size": 1,
            "server_name": "mme",
        }
        self.metrics = ContextMetrics()
        self.begin("", {})

    def begin(self, request_id: str, headers: dict[str, str]) -> None:
        self.request_ids = {0: request_id}
        self.request_processor = [RequestProperties(headers)]
        self._status = 200
        self._phrase = ""
        self._headers: dict[str, str] = {}

    def get_request_id(self, idx: int = 0) -> str:
        return self.request_ids[idx]

    def get_request_header(self, idx: int, key: str) -> str | None:
        return self.request_processor[idx].get_request_property(key)

    def get_all_request_header(self, idx: int) -> dict[str, str]:
        return self.request_processor[idx].get_request_properties()

    def set_response_content_type(self, idx: int, value: str) -> None:  # noqa: ARG002 - its interface
        self._headers["content-type"] = value

    def get_response_content_type(self, idx: int) -> str | None:  # noqa: ARG002
        return self._headers.get("content-type")

    def set_response_status(self, code: int = 200, phrase: str = "", idx: int = 0) -> None:  # noqa: ARG002
        self._status, self._phrase = code, phrase

    def get_response_status(self, idx: int) -> tuple[int, str]:  # noqa: ARG002
        return self._status, self._phrase

    def set_response_header(self, idx: int, key: str, value: str) -> None:  # noqa: ARG002
        self._headers[key.lower()] = value

    def get_response_headers(self, idx: int) -> dict[str, str]:  # noqa: ARG002
        return dict(self._headers)


class RequestProperties:
    """The headers of one request."""

    def __init__(self, headers: dict[str, str]) -> None:
        self._headers = headers

    def get_request_properties(self) -> dict[str, str]:
        return dict(self._headers)

    def get_request_property(self, key: str) -> str | None:
        return next((value for name, value in self._headers.items() if name.lower() == key.lower()), None)


class ContextMetrics:
    """Takes anything that is to be measured, and measures nothing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("add_"):
            return lambda *_args, **_kwargs: None
        raise AttributeError(f"no metric is made by '{name}'")


_SPECS = (TensorSpec(BODY, UINT8, (-1,)),)


def with_body(config: ModelConfig) -> ModelConfig:
    """A configuration with those two tensors, which it may name itself or leave out."""
    for what, specs in (("input", config.inputs), ("output", config.outputs)):
        if specs not in {(), _SPECS}:
            raise invalid_model(
                f"model '{config.name}': a model of backend '{SCRIPTS}' has one {what}, {BODY} of TYPE_UINT8 and dims "
                f"[ -1 ]; leave '{what}' out of its configuration"
            )
    if config.max_batch_size:
        raise invalid_model(
            f"model '{config.name}': a model of backend '{SCRIPTS}' gets one request at a time; leave 'max_batch_size' "
            "out of its configuration"
        )
    return replace(config, inputs=_SPECS, outputs=_SPECS)


_LIBRARY = "lib"  # beside the script: packages that an archive brings unpacked


_IMPORTS = {PIPELINE: "transformers", BOOSTER: "xgboost", SAVED_MODEL: SAVED_MODELS}


class ScriptFile(AuthorFiles):
    """Where a script and its model are; the configuration may name a folder outside of the model's directory."""

    def __init__(self, config: ModelConfig, model_file: Path) -> None:
        outside = config.parameters.get(SUBMIT_DIRECTORY)
        path = Path(outside) / model_file.name if outside else model_file
        model_directory = version_directory(config, model_file)
        places = (model_directory,) if path.parent == FOLDER else (path.parent, model_directory)
        super().__init__(config, path, model_directory, places)

    def imports(self) -> str:
        """What a script of ours does; SavedModels are loaded for a script without a model_fn, too."""
        if self.path.parent == FOLDER:
            return _IMPORTS[self.path.name]
        return SAVED_MODELS if default_script(self.model_directory) == SAVED_MODEL else ""

    def imported(self, model: str) -> ImportedFile:
        toolkits.install()
        code = self.path.parent
        places = (code, *(each for each in (code / _LIBRARY,) if each.is_dir()), self.model_directory)
        directories = list(dict.fromkeys(map(str, places)))
        root = self.model_directory if self.path.is_relative_to(self.model_directory) else code
        return ImportedFile(model, self.path, free_name(self.path.stem), directories, root)


# What each is given; a context may follow.
_ARGUMENTS = {
    "pre_model_fn": ("model_dir",),
    "model_fn": ("model_dir",),
    "model_warmup_fn": ("model_dir", "model"),
    "input_fn": ("request_body", "content_type"),
    "predict_fn": ("data", "model"),
    "output_fn": ("prediction", "accept"),
    "transform_fn": ("model", "request_body", "content_type", "accept"),
}
_REPLACED = ("input_fn", "predict_fn", "output_fn")  # by transform_fn
_WRITERS = ("transform_fn", "output_fn")
_BY_POSITION = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def functions_of(module: ModuleType, path: Path, model: str, context: Context) -> dict[str, Callable[..., Any]]:
    """The functions that a script defines; one that takes an argument more than it must gets the context."""
    functions: dict[str, Callable[..., Any]] = {}
    for name, arguments in _ARGUMENTS.items():
        function = getattr(module, name, None)
        if function is not None:
            where = f"model '{model}': {name} in {path}"
            functions[name] = _bound(function, where, f"{name}({', '.join(arguments)})", context)
    if "transform_fn" in functions and not functions.keys().isdisjoint(_REPLACED):
        raise invalid_model(
            "Cannot use transform_fn implementation in conjunction with input_fn, predict_fn, and/or output_fn "
            f"implementation: model '{model}' has both in {path}"
        )
    return functions


def streams(module: ModuleType) -> bool:
    """Whether the function that writes answers is a generator: its pieces are sent as they come."""
    return any(inspect.isgeneratorfunction(getattr(module, name, None)) for name in _WRITERS)


def _bound(function: Any, where: str, form: str, context: Context) -> Callable[..., Any]:
    # To be called as its `form` says.
    if not callable(function):
        raise invalid_model(f"{where} is no function but a {type(function).__name__}")
    try:
        kinds = [parameter.kind for parameter in inspect.signature(function).parameters.values()]
    except (TypeError, ValueError) as error:  # a callable of native code may have none
        raise invalid_model(f"{where} does not tell what it takes: {error}") from error
    given, takes = form.count(",") + 1, sum(kind in _BY_POSITION for kind in kinds)
    if takes == given + 1:
        return lambda *arguments: function(*arguments, context)
    if takes != given and inspect.Parameter.VAR_POSITIONAL not in kinds:
        raise invalid_model(
            f"{where} takes {takes} arguments but {given} were given: write {form}, and a context behind if need be"
        )
    bound: Callable[..., Any] = function
    return bound


class ScriptResponse:
    """What a script returned for one request.

    `accept` is what the script was told, for an answer that does not say what it is; `pieces` those of a body that
    comes piece by piece, None for one that is whole.
    """

    def __init__(self, returned: Any, accept: str, default_accept: str, context: Context, model: str) -> None:
        self._content_type = ""
        self._status = 0
        if isinstance(returned, tuple) and len(returned) == 2:
            returned, said = returned
            self._content_type = said if isinstance(said, str) else ""
        elif callable(getattr(returned, "get_data", None)):
            self._status = getattr(returned, "status_code", 0)
            self._content_type = getattr(returned, "content_type", None) or ""
            returned = returned.get_data()
        self._body = returned
        self._presumed = presumed(accept, default_accept)
        self._context = context
        self._model = model
        self.pieces: Generator[Any, Any, Any] | None = returned if isinstance(returned, GeneratorType) else None

    def whole(self) -> ModelResponse:
        """The answer. Raises the status that the script gave it, TypeError or ValueError for what JSON can't say."""
        if self._body is None:
            raise MmeError(Kind.EXECUTION_FAILED, f"model '{self._model}' returned None for an answer: return a body")
        body = self._as_bytes(self._body)
        status, phrase = self._context.get_response_status(0)
        status = self._status or status
        if status >= 400:
            raise with_status(status, f"model '{self._model}': {bytes(body).decode(errors='replace') or phrase}")
        return self._response(body)

    def piece(self, piece: Any) -> ModelResponse:
        return self._response(self._as_bytes(piece))

    def _response(self, body: bytes | bytearray | memoryview) -> ModelResponse:
        # Asked for late: a generator says what it is when it begins to run.
        content_type = self._content_type or self._context.get_response_content_type(0) or self._presumed
        return ModelResponse({BODY: np.frombuffer(body, np.uint8)}, {CONTENT_TYPE: content_type})

    def _as_bytes(self, body: Any) -> bytes | bytearray | memoryview:
        if isinstance(body, str):
            return body.encode()
        if isinstance(body, bytes | bytearray):
            return body
        if isinstance(body, memoryview):
            return body.cast("B") if body.contiguous else bytes(body)
        if isinstance(body, GeneratorType):
            return b"".join(self._as_bytes(piece) for piece in body)
        return self._as_bytes(encode(body, JSON, literal=self._context.literal))


_LONGEST_WORD = 8192  # characters of a content type, an accept header or custom attributes


class ScriptHandler(Handler):
    """One script, and what its `model_fn` returned."""

    backend: ClassVar[str] = SCRIPTS
    default_filename: ClassVar[str] = "code/inference.py"

    def __init__(self, config: ModelConfig, file: ScriptFile, device: Device) -> None:
        self._default_accept = config.parameters.get(DEFAULT_ACCEPT, DEFAULT_TYPE)
        self._one_at_a_time = threading.Lock()
        gpu = device.index if device.kind == "gpu" else None
        self._context = Context(config.name, str(file.model_directory), gpu, config.parameters)
        defaults = Defaults(config.name, file.path, device, self._default_accept, self._context)
        # INFO and more, as Amazon's containers have it; no effect in a process that keeps a log of its own.
        logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(levelname)s: %(name)s: %(message)s")
        self._script = file.imported(config.name)
        module = self._script.module
        try:
            functions = functions_of(module, file.path, config.name, self._context)
            super().__init__(with_body(replace(config, decoupled=streams(module) or config.decoupled)))
            self._model = _loaded_model(functions, defaults, str(file.model_directory), config.name)
            self._transform: Callable[..., Any] | None = functions.get("transform_fn")
            self._handlers: ServingHandlers | None = None
            if isinstance(self._model, SavedModels) and self._transform is None:
                self._handlers = handlers_of(module, file.path, config.name, self._model, self._context)
                self._transform = self._handlers
            own = "predict_fn" in functions
            read = functools.partial(defaults.input_fn, self._model, for_script=own)
            self._input = functions.get("input_fn", read)
            self._predict = functions.get("predict_fn", defaults.predict_fn)
            self._output: Callable[..., Any] = functions.get("output_fn", defaults.output_fn)
        except BaseException:
            self._script.forget()
            raise

    @classmethod
    def traits(cls, config: ModelConfig, model_file: Path) -> Traits:
        code = ScriptFile(config, model_file)
        return Traits(placement=Placement.PROCESS, sees_requests=True, runtime=ANY_RUNTIME, code=code)

    @classmethod
    def autocomplete(cls, config: ModelConfig, model_file: Path) -> ModelConfig:
        check_syntax(config.name, ScriptFile(config, model_file).path)
        return normalise(with_body(config))

    @classmethod
    def load(cls, config: ModelConfig, model_file: Path, device: Device, lane: str) -> ScriptHandler:  # noqa: ARG003 - no script is told
        return cls(config, ScriptFile(config, model_file), device)

    def execute_requests(self, requests: Sequence[ModelRequest]) -> list[ModelResponse | MmeError | None]:
        return [self._answer(request) for request in requests]

    def close(self) -> None:
        with self._one_at_a_time:
            if self._handlers is not None:
                self._handlers.close()
            self._script.forget()
            del self._script, self._model, self._transform, self._input, self._predict, self._output

    def _answer(self, request: ModelRequest) -> ModelResponse | MmeError | None:
        # None for a request that the script has answered. Threads that call at a time wait for one another.
        with self._one_at_a_time:
            try:
                returned = self._returned(request)
                if returned.pieces is None or request.responder is None or not self.config.decoupled:
                    return returned.whole()
                return self._streamed(returned, returned.pieces, request.responder)
            except BaseException as error:  # noqa: BLE001 - what a script raises is an answer, see content_types
                return self._failed(error)

    def _streamed(
        self, returned: ScriptResponse, pieces: Generator[Any, Any, Any], responder: Responder
    ) -> ModelResponse | None:
        # What goes wrong before the first piece is raised, and no piece at all is an empty body.
        begun = False
        try:
            for piece in pieces:
                if responder.is_cancelled():
                    pieces.close()
                    break
                responder.send(returned.piece(piece), final=False)
                begun = True
        except BaseException as error:
            if not begun:
                raise
            responder.send(self._failed(error), final=True)
            return None
        if not begun:
            return returned.piece(b"")
        responder.send(None, final=True)
        return None

    def _failed(self, error: BaseException) -> MmeError:
        return failed_call("transform_fn" if self._transform is not None else "output_fn", error, self.config.name)

    def _returned(self, request: ModelRequest) -> ScriptResponse:
        content_type = self._word(request, CONTENT_TYPE) or DEFAULT_TYPE
        accept = self._word(request, ACCEPT)
        if not accept or accept == ANY:
            accept = self._default_accept
        told = {name: self._word(request, parameter) for name, parameter in _PARAMETERS.items()}
        headers = {"Content-Type": content_type, "Accept": accept}
        self._context.begin(request.id, headers | {name: value for name, value in told.items() if value})
        body = self._body(request, content_type)
        returned = self._transformed(body, content_type, accept)
        return ScriptResponse(returned, accept, self._default_accept, self._context, self.config.name)

    def _transformed(self, body: bytes | str, content_type: str, accept: str) -> Any:
        if self._transform is not None:
            return self._transform(self._model, body, content_type, accept)
        data = self._call("input_fn", self._input, body, content_type)
        prediction = self._call("predict_fn", self._predict, data, self._model)
        return self._output(prediction, accept)

    def _call(self, name: str, function: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return function(*arguments)
        except BaseException as error:
            raise failed_call(name, error, self.config.name) from error

    def _body(self, request: ModelRequest, content_type: str) -> bytes | str:
        # JSON and CSV are text to functions, everything else bytes.
        raw = request.inputs[BODY].tobytes()
        if content_type not in TEXT:
            return raw
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            raise failed_call(
                "input_fn", MalformedBodyError(f"the body is not UTF-8: {error}"), self.config.name
            ) from None

    def _word(self, request: ModelRequest, name: str) -> str:
        value = request.parameters.get(name, "")
        if not isinstance(value, str) or len(value) > _LONGEST_WORD:
            raise invalid_argument(
                f"model '{self.config.name}': parameter '{name}' must be text of at most {_LONGEST_WORD} characters"
            )
        return value


def _loaded_model(functions: Mapping[str, Callable[..., Any]], defaults: Defaults, model_dir: str, name: str) -> Any:
    def call(function: str, *arguments: Any) -> Any:
        try:
            return own[function](*arguments) if function in own else None
        except MmeError:
            raise
        except BaseException as error:
            raise failed_load(f"{function} ran", error, name) from error

    own = {"model_fn": defaults.model_fn, **functions}
    call("pre_model_fn", model_dir)
    model = call("model_fn", model_dir)
    if "predict_fn" not in functions and "transform_fn" not in functions:
        defaults.check(model)
    call("model_warmup_fn", model_dir, model)
    return model
