"""A model's author's object between `initialize` and `finalize`. Whatever it raises is caught.

Its methods are called one at a time, but for `is_ready`, which is called at any time. Whether what it returns is right
is judged by `outputs`.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import logging
import sys
import sysconfig
import threading
from typing import TYPE_CHECKING, Any

from model_handlers.config.convert import config_json
from model_handlers.config.model_config import InstanceKind, ModelConfig, all_inputs
from model_handlers.errors import Kind, MmeError
from model_handlers.metrics import METRICS
from model_handlers.python import pb_utils
from model_handlers.python.author_code import ModelFile, ModelModule, failed_execution, failed_load, told
from model_handlers.python.autocomplete import complete
from model_handlers.python.outputs import ResponseState, answers, inside
from model_handlers.python.pb_calls import LoopThread, ModelContext, Running
from model_handlers.python.pb_requests import ReceivedRequest
from model_handlers.python.pb_responses import ReceivedTensor, Tensor
from model_handlers.requests import PUT_BACK, ModelRequest, ModelResponse

if TYPE_CHECKING:
    from collections.abc import Sequence

    from model_handlers.base import Device
    from model_handlers.model_calls import Outside

_log = logging.getLogger("mme.model")


class PythonHost:
    """One initialized `TritonPythonModel`.

    `device` is told to the model, which does as it likes; `outside` is what it may ask of the server while it is
    initialized. Raises INVALID_MODEL when the author's code fails, OUT_OF_MEMORY when it finds no room.
    """

    __deletable__ = ("_module", "author")  # which compiled classes have to say

    def __init__(
        self, config: ModelConfig, file: ModelFile, device: Device, lane: str, outside: Outside | None = None
    ) -> None:
        self._context = ModelContext(config.name, file.path.parent, callers=(config.name,))
        self._lane = config.local_name(lane)
        self._one_at_a_time = threading.Lock()
        self._loop: LoopThread | None = None
        self._loop_lock = threading.Lock()  # both `execute` and `is_ready` may be the first to need it
        with Running(self._context), contextlib.ExitStack() as failed:
            failed.callback(METRICS.release, self._context)
            pb_utils.install()
            self._module = ModelModule(config.name, file, _library())
            failed.callback(self._module.unload)
            self.config = complete(config, self._module.author_class)
            failed.callback(setattr, self._context, "outside", None)
            self._context.outside = outside
            self.author = self._initialized(file, device)
            failed.pop_all()
            self._context.initialized = True
        self.tells_ready = callable(getattr(self.author, "is_ready", None))
        self._batches = self.config.max_batch_size > 0
        sequences = self.config.sequence_batching
        self._inputs = all_inputs(self.config)
        self._iterative = (
            sequences is not None and sequences.iterative_sequence
        )  # then requests are put back when execute ends

    def execute(
        self, requests: Sequence[ModelRequest], outside: Outside | None
    ) -> list[ModelResponse | MmeError | None]:
        responses = [ResponseState(self.config, self._lane, request) for request in requests]
        with self._one_at_a_time, Running(self._context):
            self._context.outside = outside
            callers = dict.fromkeys(caller for request in requests for caller in request.callers)
            self._context.callers = (*callers, self.config.name)
            self._context.waiting = tuple(each.responder for each in requests if each.responder is not None)
            received = list(map(self._received, requests, responses))
            try:
                returned = self._returned(received, responses)
            except BaseException as error:
                raise _fail(responses, failed_execution(error, self._lane)) from error
            if self.config.decoupled:
                if returned is not None:
                    raise self._must_return_none(received, responses)
                return [PUT_BACK if each.executed() else None for each in responses]
            del received  # what the model has not kept by now, it has dropped
            return answers(self.config, self._lane, requests, responses, returned)

    def is_ready(self) -> bool:
        """What the author's `is_ready` says, or its coroutine; False where it fails, or says neither True nor False."""
        try:
            with Running(self._context):
                said = self.author.is_ready()
                if inspect.iscoroutine(said):
                    said = self._event_loop().run(said)
            if isinstance(said, bool):
                return said
            why = f"returned {type(said)}, expected True or False"
        except BaseException as error:  # noqa: BLE001 - see `author_code`
            why = f"failed: {told(error)}"
        model = self._context.name
        _log.error("model '%s': is_ready %s", model, why, extra={"target_model": model})
        return False

    def close(self) -> None:
        """Call `finalize`, if there is one, and forget the model. What `finalize` raises is logged."""
        with self._one_at_a_time, Running(self._context):
            self._context.outside = None
            try:
                if hasattr(self.author, "finalize"):
                    self.author.finalize()
            except BaseException:  # noqa: BLE001 - see `author_code`; the model goes in any case
                _log.exception(
                    "model '%s' failed in finalize", self._context.name, extra={"target_model": self._context.name}
                )
            finally:
                if self._loop is not None:
                    self._loop.close()
                self._module.unload()
                METRICS.release(self._context)
                del self.author, self._module

    def _initialized(self, file: ModelFile, device: Device) -> Any:
        model = self._context.name
        try:
            author = self._module.author_class()
            if hasattr(author, "initialize"):
                author.initialize(self._arguments(file, device))
        except BaseException as error:
            raise failed_load("initialize ran", error, model) from error
        return author

    def _arguments(self, file: ModelFile, device: Device) -> dict[str, str]:
        return {
            "model_config": json.dumps(config_json(self.config.author_view())),
            "model_instance_kind": self._kind(device),
            "model_instance_name": self._lane,
            "model_instance_device_id": str(device.index),
            "model_repository": str(file.model_directory),
            "model_version": file.version,
            "model_name": self.config.local_name(self.config.name),
        }

    def _kind(self, device: Device) -> str:
        # KIND_MODEL as the configuration has it: such a model places itself. Else where it is.
        group = self._lane.rpartition("_")[0]
        places_itself = any(g.kind is InstanceKind.MODEL and g.name == group for g in self.config.instance_group)
        return InstanceKind.MODEL.name if places_itself else device.kind.upper()

    def _returned(self, received: list[ReceivedRequest], responses: list[ResponseState]) -> Any:
        # Only their list holds the requests: the senders of those that it takes out go when it lets go of them, and all
        # others when it is known that it returned what it may.
        returned = self.author.execute(received)
        if not inspect.iscoroutine(returned):
            return returned
        loop = self._event_loop()
        if not self.config.decoupled or self._iterative:
            return loop.run(returned)
        loop.start(returned, functools.partial(self._ended, received, responses))
        return None

    def _event_loop(self) -> LoopThread:
        with self._loop_lock:
            if self._loop is None:
                self._loop = LoopThread(self._lane)
            return self._loop

    def _ended(
        self, held: list[ReceivedRequest], responses: list[ResponseState], returned: Any, error: BaseException | None
    ) -> None:
        if error is not None:
            _fail(responses, failed_execution(error, self._lane))
        elif returned is not None:
            self._must_return_none(held, responses)

    def _must_return_none(self, _held: list[ReceivedRequest], responses: list[ResponseState]) -> MmeError:
        # The argument keeps the requests meanwhile, in compiled code as well.
        what = f"Python model '{self._lane}' is using the decoupled mode and the execute function must return None."
        return _fail(responses, MmeError(Kind.EXECUTION_FAILED, what))

    def _received(self, request: ModelRequest, responses: ResponseState) -> ReceivedRequest:
        inputs: list[Tensor] = []
        for spec in self._inputs:
            array = request.inputs.get(spec.name)
            if array is not None:
                if spec.reshape is not None:
                    array = inside(spec, array, batches=self._batches)
                inputs.append(ReceivedTensor(spec.name, array, spec.data_type))
        received = ReceivedRequest(request, inputs, responses)
        if self.config.decoupled:  # when the model lets go of request and sender, that was the last response
            received.get_response_sender()
        return received


def _fail(responses: list[ResponseState], error: MmeError) -> MmeError:
    # The error is returned, not raised: a frame that raised it would be kept by it.
    for each in responses:
        each.fail(error)
    return error


def _library() -> list[str]:
    # Where Python's own library is, of what is looked through.
    pure, platform = sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")
    return [place for place in (pure, platform, f"{platform}/lib-dynload") if place in sys.path]
