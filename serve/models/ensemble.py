"""One version of an ensemble in memory: requests that go through the models of its steps. On the event loop.

To the engine it is a model like any other; it has no lanes, for its steps run on those of their models, each of which
batches what comes from wherever it comes. Tensors pass from step to step by reference. Which step runs when is decided
by `scheduling/ensemble.py`.
"""

from __future__ import annotations

import functools
import time
from typing import TYPE_CHECKING

from model_handlers.base import Footprint
from model_handlers.errors import Kind, MmeError
from serve.decoupled_error import DecoupledError
from serve.models.batch_dimension import fitted
from serve.models.cached_responses import cached_responses
from serve.models.execution import failure
from serve.models.layout_check import KNOWN_LAYOUTS, CheckedLayouts
from serve.models.readiness import JointReadiness
from serve.models.straight_journey import Journey, Route, StraightJourney
from serve.models.turnstile import Turnstile, Turnstiles
from serve.request import InferenceRequest, InferenceResponse, layout_of
from serve.scheduling.ensemble import Graph, Progress, Ready, Run
from serve.scheduling.ensemble_sequence import belonging, overridden
from serve.scheduling.straight import Plan

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Sequence

    from model_handlers.config import EnsembleStep, ModelConfig
    from model_handlers.tensor import Array, DataType
    from serve.models.model import Model
    from serve.scheduling.ensemble_sequence import Belongs
    from serve.scheduling.response_cache import ResponseCache
    from serve.stats import ModelStats

    # Its type, its elements, whether the first dimension is the batch's, and which sequence who reads it belongs to.
    Passed = tuple[DataType, Array, bool, Belongs]

_now = time.perf_counter_ns


class EnsembleModel:
    """One version of an ensemble, ready to be asked.

    Attributes:
        config, stats, outstanding, queued, readiness: see `serve.models.model.Model`.
        parts: its steps; graph: how they hang together.
        batches, kinds, version_text: whether it has a batch dimension, the type of each output, and what responses say.

    Args:
        name, version: what responses carry.
        config: the ensemble's, checked against its models'.
        members: for each step the model that runs it.
        stats: where to count.
        loop: the event loop.
        responses: see `serve.models.model.Model`.
    """

    def __init__(
        self,
        name: str,
        version: int,
        config: ModelConfig,
        members: Sequence[Model | EnsembleModel],
        stats: ModelStats,
        loop: asyncio.AbstractEventLoop,
        responses: ResponseCache[InferenceResponse] | None = None,
    ) -> None:
        self.name = name
        self.version = version
        self.config = config
        self.stats = stats
        self.outstanding = 0
        self.readiness: JointReadiness = JointReadiness(member.readiness for member in members)
        decoupled = [member.config.decoupled for member in members]
        self.graph = Graph(config.own(name), config.ensemble, decoupled)
        self.parts = [Part(*pair) for pair in zip(config.ensemble, members, strict=True)]
        self._turnstiles = Turnstiles(config.max_inflight) if config.max_inflight else None
        if self._turnstiles is not None:
            for part in self.parts:
                part.submit = Turnstile(self._turnstiles, part.model).submit
        self.batches = config.max_batch_size > 0
        self.kinds = {spec.name: spec.data_type for spec in config.outputs}
        self.version_text = str(version)
        self._routes: dict[tuple[str, ...], Route] = {}
        self._journey = _Journey if config.decoupled else StraightJourney
        self._checked = CheckedLayouts(config, stats)
        stats.keep_first_responses(config)
        self._cached = cached_responses(config, responses, stats, loop, reads_parameters=True)

    def __repr__(self) -> str:
        return f"<EnsembleModel {self.name}/{self.version}: {self.outstanding} under way>"

    @property
    def queued(self) -> int:
        """Requests of its steps that may not be asked yet; all others wait with the models of the steps."""
        return 0 if self._turnstiles is None else self._turnstiles.waiting

    def route(self, outputs: tuple[str, ...]) -> Route:
        """The way to these outputs, () for all, through steps that each answer once."""
        route = self._routes.get(outputs)
        if route is None:
            wanted = [spec.name for spec in self.config.outputs if not outputs or spec.name in outputs]
            plan = Plan(self.graph, [spec.name for spec in self.config.inputs], wanted)
            if len(self._routes) >= KNOWN_LAYOUTS:
                self._routes.clear()
            route = self._routes[outputs] = Route(plan, self.parts, self.config)
        return route

    def submit(self, request: InferenceRequest) -> None:
        """Accept a request, which from now on gets exactly one answer.

        Raises:
            MmeError: INVALID_ARGUMENT when it does not fit the ensemble. Then it was not accepted.
        """
        if self.config.decoupled and request.on_response is None:
            raise DecoupledError(f"ensemble '{self.name}'")
        checked = self._checked[request.layout]
        request.batch_size = checked.batch_size
        request.order = checked.order
        request.arrival_ns = _now()
        if self._cached is not None:
            if self._cached.takes_long(request):
                self.outstanding += 1
                self._cached.look_up(request, self._looked_up)
                return
            if self._cached.answered(request):
                return
        self.outstanding += 1
        self._begin(request)

    def _begin(self, request: InferenceRequest) -> None:
        journey = self._journey(self, request)
        if self._turnstiles is None:
            journey.begin()
        else:
            self._turnstiles.begin(journey.begin)

    def _looked_up(self, request: InferenceRequest, response: InferenceResponse | None) -> None:
        if response is None:
            self._begin(request)
        else:
            self.outstanding -= 1
            request.resolve(response)

    def end_sequence(self, correlation_id: int | str) -> None:
        """The models of its steps have sequences; see there."""

    def refuse_waiting(self) -> None:
        """Tell those of its steps that may not be asked yet; all others wait with the models of the steps."""
        if self._turnstiles is not None:
            self._turnstiles.refuse_waiting(
                MmeError(Kind.UNAVAILABLE, f"model '{self.name}' is being unloaded; try again")
            )

    apart = False  # whatever its models are

    def memory(self) -> Footprint:
        """Nothing beside its models."""
        return Footprint()

    def give_back(self, *, idle: bool) -> bool:  # noqa: ARG002 - as models do
        """It has nothing."""
        return True

    def close(self) -> None:
        """Drop the responses that were kept."""
        if self._cached is not None:
            self._cached.close()


class Part:
    """A step, as every request of it needs to know it.

    Attributes:
        step: as the configuration has it; model, config: what runs it.
        batches, decoupled: what that is.
        outputs: those of the model that the ensemble has names for, () where that is all of them.
        submit: takes a request of it, as the model does.
    """

    def __init__(self, step: EnsembleStep, model: Model | EnsembleModel) -> None:
        self.model = model
        self.config = model.config
        self.batches = model.config.max_batch_size > 0
        self.decoupled = model.config.decoupled
        self.step = step
        self.submit = model.submit
        everything = step.outputs.keys() >= {spec.name for spec in model.config.outputs}
        self.outputs = () if everything else tuple(step.outputs)


class _Journey(Journey):
    """One request on its way through steps some of which answer any number of times."""

    def __init__(self, ensemble: EnsembleModel, request: InferenceRequest) -> None:
        super().__init__(ensemble, request)
        self._batches = ensemble.config.max_batch_size > 0
        wanted = request.layout.outputs or tuple(spec.name for spec in ensemble.config.outputs)
        tensors, absent = self._received()
        self._run: Run[Passed] = Run(ensemble.graph, tensors, absent, wanted)
        self._has_answered = False

    def begin(self) -> None:
        """Run the first steps."""
        self._request.on_cancel = self._cancel
        self._go_on(self._run.begin())
        self._finish_if_over()

    def _received(self) -> tuple[dict[str, Passed], list[str]]:
        request = self._request
        tensors: dict[str, Passed] = {}
        absent = []
        for spec, position in zip(self._ensemble.config.inputs, request.order, strict=True):
            if position < 0:
                absent.append(spec.name)
            else:
                tensors[spec.name] = (spec.data_type, request.inputs[position], self._batches, self._belongs)
        return tensors, absent

    def _go_on(self, progress: Progress[Passed]) -> None:
        last = len(progress.responses) - 1 if self._run.over else -1
        for place, response in enumerate(progress.responses):
            self._respond(response, final=place == last)
        for ready in progress.ready:
            if self._error is None:
                self._submit(ready)
            else:
                self._run.ended(ready)

    def _submit(self, ready: Ready[Passed]) -> None:
        part = self._ensemble.parts[ready.step]
        step: InferenceRequest | None = None
        try:
            step = self._made(ready, part)
            self._running.add(step)
            part.submit(step)
        except Exception as error:  # noqa: BLE001 - as in `StraightJourney`
            if step is not None:
                self._running.discard(step)
            self._ended(ready, failure(part.model.name, error))

    def _made(self, ready: Ready[Passed], part: Part) -> InferenceRequest:
        """The request of a step whose tensors are there."""
        request = self._request
        arrays, tensors = [], []
        for name, (kind, array, batched, _) in ready.inputs.items():
            if batched is not part.batches:
                array = fitted(part.config.input(name), array, batches=part.batches)  # noqa: PLW2901 - as the model takes it
            arrays.append(array)
            tensors.append((name, kind, array.shape))
        belongs = belonging(self._belongs, (tensor[3] for tensor in ready.inputs.values()))
        complete = functools.partial(self._complete, ready, belongs)
        layout = layout_of(tuple(tensors), part.outputs)
        step = InferenceRequest(layout, arrays, complete, request.id, request.parameters, request.timeout_us)
        step.priority = request.priority
        step.correlation_id, step.flags = belongs
        step.callers, step.trace, step.watch = self._callers, request.trace, request.watch
        if part.decoupled:
            step.on_response = functools.partial(self._came, ready, belongs)
        return step

    def _complete(
        self,
        ready: Ready[Passed],
        belongs: Belongs,
        step: InferenceRequest,
        result: InferenceResponse | MmeError | None,
    ) -> None:
        self._running.discard(step)
        if isinstance(result, InferenceResponse):
            self._came(ready, belongs, step, result, ends=True)
            self._finish_if_over()
        else:
            self._ended(ready, result)

    def _ended(self, ready: Ready[Passed], error: MmeError | None) -> None:
        """A step will not answer any more, or could not be asked."""
        if error is not None:
            self._fail(error)
        self._go_on(self._run.ended(ready))
        self._finish_if_over()

    def _came(
        self,
        ready: Ready[Passed],
        belongs: Belongs,
        step: InferenceRequest,
        response: InferenceResponse,
        *,
        ends: bool = False,
    ) -> None:
        """A step has answered; `ends`: and will not any more."""
        self._note_step(self._ensemble.parts[ready.step], step, response)
        progress: Progress[Passed] = Progress([], [])
        if self._error is None:
            batched = self._ensemble.parts[ready.step].batches
            progress = self._run.came(ready, self._passed(belongs, response, batched=batched))
        if ends:
            more = self._run.ended(ready)
            progress.ready += more.ready
            progress.responses += more.responses
        self._go_on(progress)

    def _passed(self, belongs: Belongs, response: InferenceResponse, *, batched: bool) -> dict[str, Passed]:
        """What a response of a step gives to those behind it; nothing, if it is wrong."""
        try:
            belongs = overridden(belongs, response.parameters)
        except MmeError as error:
            self._fail(error)
            return {}
        return {name: (kind, array, batched, belongs) for name, kind, array in response.outputs}

    def _respond(self, tensors: dict[str, Passed], *, final: bool) -> None:
        try:
            response = self._made_response(tensors)
        except Exception as error:  # noqa: BLE001 - as in `StraightJourney`
            self._fail(failure(self._ensemble.name, error))
            return
        if not self._has_answered:
            self._has_answered = True
            self._ensemble.stats.began_to_answer(_now() - self._request.arrival_ns)
        response.final = final
        self._request.respond(response)

    def _made_response(self, tensors: dict[str, Passed]) -> InferenceResponse:
        config, batches = self._ensemble.config, self._batches
        outputs = [
            (spec.name, spec.data_type, array if batched is batches else fitted(spec, array, batches=batches))
            for spec, (_, array, batched, _) in (
                (spec, tensors[spec.name]) for spec in config.outputs if spec.name in tensors
            )
        ]
        return InferenceResponse(
            self._ensemble.name, str(self._ensemble.version), outputs, self._request.id, self._timings
        )

    def _finish_if_over(self) -> None:
        if not self._run.over or self._request.answered:
            return
        if self._error is None:
            try:
                self._run.check_answered()
            except MmeError as error:
                self._error = error
        self._end(self._error)
