"""A script's model between its load and its end: one request at a time, through the script's functions or the defaults.

A generator that writes the answer is run by us, and its pieces are sent as they come: the model is a decoupled one.
What its functions print or log goes to standard output and standard error, as in Amazon's containers; where the model
has a process of its own, that ends up in the server's log. Runs on whatever thread loads, executes or closes.
"""

from __future__ import annotations

import functools
import logging
import sys
import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from model_handlers.body import (
    ACCEPT,
    BODY,
    CONTENT_TYPE,
    CUSTOM_ATTRIBUTES,
    DEFAULT_ACCEPT,
    DEFAULT_TYPE,
    SESSION_ID,
)
from model_handlers.errors import MmeError, invalid_argument
from model_handlers.python.failures import failed_load
from model_handlers.python.script.accept import ANY
from model_handlers.python.script.completion import with_body
from model_handlers.python.script.context import Context, request_headers
from model_handlers.python.script.defaults import Defaults
from model_handlers.python.script.failures import failed_call
from model_handlers.python.script.formats import TEXT, MalformedBodyError
from model_handlers.python.script.functions import ScriptFunctions
from model_handlers.python.script.returned import Returned
from model_handlers.python.script.saved_models import SavedModels
from model_handlers.python.script.serving_handlers import ServingHandlers, handlers_of

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from model_handlers.base import Device
    from model_handlers.config import ModelConfig
    from model_handlers.python.script.script_file import ScriptFile
    from model_handlers.requests import ModelRequest, ModelResponse, Responder

_LONGEST_WORD = 8192  # characters of a content type, an accept header or custom attributes


class ScriptHost:
    """One script and what its `model_fn` returned.

    Attributes:
        config: the configuration, completed.

    Raises:
        MmeError: INVALID_MODEL when the script fails, OUT_OF_MEMORY when it finds no room.
    """

    def __init__(self, config: ModelConfig, file: ScriptFile, device: Device) -> None:
        self._name = config.name
        self._default_accept = config.parameters.get(DEFAULT_ACCEPT, DEFAULT_TYPE)
        self._one_at_a_time = threading.Lock()
        gpu = device.index if device.kind == "gpu" else None
        self._context = Context(config.name, str(file.model_directory), gpu, config.parameters)
        self._defaults = Defaults(config.name, file.path, device, self._default_accept, self._context)
        # INFO and more, as Amazon's containers have it; no effect in a process that keeps a log of its own.
        logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(levelname)s: %(name)s: %(message)s")
        self._script = file.imported(config.name)
        try:
            self._functions = ScriptFunctions(self._script.module, file.path, config.name, self._context)
            self.config = with_body(replace(config, decoupled=self._functions.streams or config.decoupled))
            self._model = self._loaded(str(file.model_directory))
            self._transform = self._functions.get("transform_fn")
            self._handlers: ServingHandlers | None = None
            if isinstance(self._model, SavedModels) and self._transform is None:
                self._handlers = handlers_of(self._script.module, file.path, config.name, self._model, self._context)
                self._transform = self._handlers
            own = "predict_fn" in self._functions
            read = functools.partial(self._defaults.input_fn, self._model, for_script=own)
            self._input = self._functions.get("input_fn") or read
            self._predict = self._functions.get("predict_fn") or self._defaults.predict_fn
            self._output = self._functions.get("output_fn") or self._defaults.output_fn
        except BaseException:
            self._script.forget()
            raise

    def answer(self, request: ModelRequest) -> ModelResponse | MmeError | None:
        """Have the script answer one request, None when it has. Threads that call at a time wait for one another."""
        with self._one_at_a_time:
            try:
                returned = self._returned(request)
                if returned.pieces is None or request.responder is None or not self.config.decoupled:
                    return returned.whole()
                return self._streamed(returned, returned.pieces, request.responder)
            except BaseException as error:  # noqa: BLE001 - what a script raises is an answer, see failures.py
                return self._failed(error)

    def close(self) -> None:
        """Forget the model."""
        with self._one_at_a_time:
            if self._handlers is not None:
                self._handlers.close()
            self._script.forget()
            del self._script, self._functions, self._model
            del self._transform, self._input, self._predict, self._output

    def _loaded(self, model_dir: str) -> Any:
        """What `model_fn` returns, with what the script wants done before and after."""
        functions = self._functions
        self._load_call("pre_model_fn", functions.get("pre_model_fn"), model_dir)
        model = self._load_call("model_fn", functions.get("model_fn") or self._defaults.model_fn, model_dir)
        if "predict_fn" not in functions and "transform_fn" not in functions:
            self._defaults.check(model)
        self._load_call("model_warmup_fn", functions.get("model_warmup_fn"), model_dir, model)
        return model

    def _load_call(self, name: str, function: Callable[..., Any] | None, *arguments: Any) -> Any:
        try:
            return None if function is None else function(*arguments)
        except MmeError:
            raise
        except BaseException as error:
            raise failed_load(f"{name} ran", error, self._name) from error

    def _streamed(
        self, returned: Returned, pieces: Generator[Any, Any, Any], responder: Responder
    ) -> ModelResponse | None:
        """Send the pieces; what goes wrong before the first is raised, and no piece at all is an empty body."""
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
        """Why the function that writes answers failed, or one before it."""
        return failed_call("transform_fn" if self._transform is not None else "output_fn", error, self._name)

    def _returned(self, request: ModelRequest) -> Returned:
        content_type = self._word(request, CONTENT_TYPE) or DEFAULT_TYPE
        accept = self._word(request, ACCEPT)
        if not accept or accept == ANY:
            accept = self._default_accept
        headers = request_headers(
            content_type, accept, self._word(request, CUSTOM_ATTRIBUTES), self._word(request, SESSION_ID)
        )
        self._context.begin(request.id, headers)
        body = self._body(request, content_type)
        returned = self._transformed(body, content_type, accept)
        return Returned(returned, accept, self._default_accept, self._context, self._name)

    def _transformed(self, body: bytes | str, content_type: str, accept: str) -> Any:
        """What the script returns, by its one function or by its three."""
        if self._transform is not None:
            return self._transform(self._model, body, content_type, accept)
        data = self._call("input_fn", self._input, body, content_type)
        prediction = self._call("predict_fn", self._predict, data, self._model)
        return self._output(prediction, accept)

    def _call(self, name: str, function: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return function(*arguments)
        except BaseException as error:
            raise failed_call(name, error, self._name) from error

    def _body(self, request: ModelRequest, content_type: str) -> bytes | str:
        """The body as functions get it: JSON and CSV as text, everything else as bytes."""
        raw = request.inputs[BODY].tobytes()
        if content_type not in TEXT:
            return raw
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            raise failed_call("input_fn", MalformedBodyError(f"the body is not UTF-8: {error}"), self._name) from None

    def _word(self, request: ModelRequest, name: str) -> str:
        value = request.parameters.get(name, "")
        if not isinstance(value, str) or len(value) > _LONGEST_WORD:
            raise invalid_argument(
                f"model '{self._name}': parameter '{name}' must be text of at most {_LONGEST_WORD} characters"
            )
        return value
