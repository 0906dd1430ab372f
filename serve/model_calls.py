"""Calls of models by the code of a model (BLS): see `model_handlers.model_calls`.

A model's code asks on threads and in processes of its own; everything here goes to the event loop at once, where the
engine is, and is answered from there.

A model that waits for another one keeps its instance busy, and its lease. If that one called it in turn, both would
wait for ever: a call of a model that waits for the caller is refused, and so is having it unloaded or loaded again. One
that is being loaded may have others loaded and unloaded, but none that waits for its load.
"""

from __future__ import annotations

import contextlib
import functools
import time
from typing import TYPE_CHECKING, Any

from model_handlers.errors import Kind, MmeError, known
from model_handlers.requests import FLAGS_TOLD, ModelResponse
from model_handlers.system.threads import NEVER
from model_handlers.tensor import BF16
from serve.model.replies import DecoupledRequest
from serve.request import Called, DecoupledError, InferenceRequest, InferenceResponse, layout_of
from serve.threads import Progress

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Coroutine, Iterator

    from model_handlers.model_calls import Done, ModelCall, Override
    from model_handlers.requests import Responder
    from model_handlers.system.threads import CancelToken
    from serve.engine import Engine
    from serve.load_api import WaitGraph
    from serve.request import LoadReport, Timings

_CALL = "a call between models"


class ModelCalls:
    """The engine, for the code of a target's models, from the beginning of a load on. Called on any thread.

    Args:
        waits: which models wait for the load of which.
        target: the name of the target, whose members are called before others of that name.
        token: that of its load, which steps aside while the target's code has another model loaded.
    """

    def __init__(
        self, engine: Engine, loop: asyncio.AbstractEventLoop, waits: WaitGraph, target: str, token: CancelToken = NEVER
    ) -> None:
        self._engine = engine
        self._loop = loop
        self._waits = waits
        self._target = target
        self._token = token
        self._loading = True
        self._tasks: set[asyncio.Task[None]] = set()

    def loaded(self) -> None:
        """No load waits any more for what the model does from now on."""
        self._loading = False

    def infer(self, call: ModelCall, responder: Responder) -> None:
        self._soon(self._infer, call, responder)

    def load(self, model: str, override: Override | None, callers: tuple[str, ...], done: Done) -> None:
        """Load a model, again if it is in memory, as the repository's own route does."""
        self._soon(self._ask, functools.partial(self._loaded, model, override, callers), done)

    def unload(self, model: str, dependents: bool, callers: tuple[str, ...], done: Done) -> None:  # noqa: FBT001 - see Outside
        self._soon(self._ask, functools.partial(self._unloaded, model, dependents, callers), done)

    def is_ready(self, model: str, version: int | None, done: Done) -> None:
        """Ask whether a model would answer."""
        self._soon(self._ask, functools.partial(self._says_ready, model, version), done)

    def _soon(self, function: Callable[..., None], *args: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: the server ends
            self._loop.call_soon_threadsafe(function, *args)

    def _infer(self, call: ModelCall, responder: Responder) -> None:
        answering = _Answering(call, responder)
        try:
            request = answering.request()
            responder.when_cancelled(functools.partial(self._soon, request.cancel))
            _check_circle(f"{self._target}:{call.model}", call.callers, f"call '{call.model}'")
            if self._engine.submit_to_member(self._target, call.model, call.version, request):
                return
            name = self._engine.registry.canonical(call.model)
            _check_circle(name, (*self._behind(), *call.callers), f"call '{call.model}'")
            if not self._engine.submit(name, call.version, request):
                self._aside(self._submit_cold(name, call.version, request, answering))
        except Exception as error:  # noqa: BLE001 - every call is answered
            answering.fail(_refusal(error, call))

    async def _submit_cold(
        self, name: str, version: int | None, request: InferenceRequest, answering: _Answering
    ) -> None:
        try:
            with self._waiting(answering.call.callers, name):
                answering.report = await self._engine.submit_cold(name, version, request)
        except Exception as error:  # noqa: BLE001 - as above
            answering.fail(_refusal(error, answering.call))

    async def _loaded(self, model: str, override: Override | None, callers: tuple[str, ...]) -> None:
        name = self._engine.registry.canonical(model)
        _check_circle(name, (*self._behind(), self._target, *callers), f"load '{model}'")
        self._engine.options.control.check()
        with self._waiting(callers, name):
            await self._engine.reload(name, override)

    async def _unloaded(self, model: str, dependents: bool, callers: tuple[str, ...]) -> None:  # noqa: FBT001
        name = self._engine.registry.canonical(model)
        _check_circle(name, (*self._behind(), self._target, *callers), f"unload '{model}'")
        self._engine.options.control.check()
        with self._waiting(callers, name):
            try:
                await self._engine.unload(name, dependents=dependents)
            except MmeError as error:
                if error.kind is not Kind.UNKNOWN_MODEL:  # Triton unloads what it does not know without a word
                    raise

    async def _says_ready(self, model: str, version: int | None) -> bool:
        return await self._engine.index.says_ready(self._engine.registry.canonical(model), version)

    def _behind(self) -> tuple[str, ...]:
        return self._waits.behind(self._target) if self._loading else ()

    @contextlib.contextmanager
    def _waiting(self, callers: tuple[str, ...], name: str) -> Iterator[None]:
        if isinstance(self._token, Progress):
            self._token.step_aside()
        with self._waits.waiting((self._target, *callers), name):
            yield

    def _ask(self, work: Callable[[], Coroutine[Any, Any, bool | None]], done: Done) -> None:
        async def answered() -> None:
            try:
                answer = await work()
            except Exception as error:  # noqa: BLE001 - as above
                done(known(error, _CALL))
            else:
                done(answer is not False)

        self._aside(answered())

    def _aside(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class _Answering:
    def __init__(self, call: ModelCall, responder: Responder) -> None:
        self.report: LoadReport | None = None
        self.call = call
        self._responder = responder
        self._began = time.perf_counter_ns()
        self._timings: Timings | None = None
        self._version = ""
        self._ended = False

    def request(self) -> InferenceRequest:
        call = self.call
        layout = layout_of(tuple((name, kind, array.shape) for name, kind, array in call.inputs), call.outputs)
        arrays = [array for _, _, array in call.inputs]
        request = InferenceRequest(layout, arrays, self._complete, call.id, call.parameters, call.timeout_us)
        request.correlation_id, request.flags = call.correlation_id, call.flags & FLAGS_TOLD
        request.callers, request.trace = call.callers, call.trace
        if call.decoupled:
            request.on_response, request.on_error = self._respond, self._respond_error
        return request

    def fail(self, error: MmeError) -> None:
        self._note(0, error)
        self._responder.send(error, final=True)

    def _respond(self, request: InferenceRequest, response: InferenceResponse) -> None:
        self._timings, self._version = response.timings, response.model_version
        self._ended = response.final
        if self._ended:
            self._note(request.arrival_ns, None)
        self._responder.send(_answer(response), final=self._ended)

    def _respond_error(self, _request: InferenceRequest, error: MmeError) -> None:
        self._responder.send(error, final=False)

    def _complete(self, request: InferenceRequest, result: InferenceResponse | MmeError | None) -> None:
        if self._ended:
            return
        if isinstance(result, InferenceResponse):
            self._timings, self._version = result.timings, result.model_version
        self._note(request.arrival_ns, result if isinstance(result, MmeError) else None)
        self._responder.send(_answer(result) if isinstance(result, InferenceResponse) else result, final=True)

    def _note(self, arrival: int, error: MmeError | None) -> None:
        """Note the call before the caller is answered: its own answer, which ends the note, can't come before."""
        report = self.report if self.report is not None and self.report.load else None
        kind = error.kind.name if error is not None else ""
        ended = time.perf_counter_ns()
        call = self.call
        called = Called(call.model, self._began, ended, self._version, call.id, arrival, self._timings, kind, report)
        for opened in call.waiting:
            if isinstance(opened, DecoupledRequest):
                opened.called(called)


def _answer(response: InferenceResponse) -> ModelResponse:
    return ModelResponse(
        {name: array for name, _, array in response.outputs},
        response.parameters or {},
        {name: kind for name, kind, _ in response.outputs if kind is BF16},
    )


def _check_circle(name: str, callers: tuple[str, ...], deed: str) -> None:
    if name in callers:
        chain = " → ".join((*dict.fromkeys(callers), name))
        what = f"model '{callers[-1]}' can't {deed}, which waits for it: {chain}"
        raise MmeError(Kind.INVALID_ARGUMENT, what)


def _refusal(error: Exception, call: ModelCall) -> MmeError:
    if isinstance(error, DecoupledError):
        return MmeError(
            error.kind,
            f"Model {call.model} is using the decoupled. The current BLS request call doesn't support models using the "
            "decoupled transaction policy. Please use 'decoupled=True' argument to the 'exec' or 'async_exec' calls "
            "for decoupled models.'",
        )
    return known(error, _CALL)
