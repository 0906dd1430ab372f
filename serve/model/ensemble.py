"""One version of an ensemble in memory: requests that go through the models of its steps. On the event loop.

To the engine it is a model like any other; it has no instances, for its steps run on those of their models, each of
which batches its requests wherever they come from. There is as little as possible to do between two steps: tensors pass
by reference, and what can be known before a request comes is known. Which step runs when is `ensemble_plan`'s to say.

The models of an archive's ensemble are its own, in memory as long as it is. Those of any other are the models that are
served under their names: a request holds a lease on each, and is run by those that it holds. What is known of a set of
models is its *wiring*, worked out again when a request comes with another set, since one was evicted or reloaded.

`max_inflight_requests`: a step's request waits until another one of that step is over. One that is over keeps its slot
until those that follow from it have theirs: else a fast step would run ahead of a slow one without end, and all that it
made would wait between the two. A request of which nothing follows, or whose followers have slots, gives its own up at
once; tensors go in no circle, so that one always does. That holds within one request of the ensemble: another one sent
because of its answer follows from none of its steps, and would close the circle if it did.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol, TypeVar

from model_handlers.config.validate import normalise
from model_handlers.errors import Kind, MmeError, invalid_model
from model_handlers.executor import Executors
from serve.model.ensemble_plan import (
    ABSENT,
    Absent,
    EnsemblePlan,
    Graph,
    ResponseScope,
    belonging,
    check_members,
    overridden,
)
from serve.model.layout_check import KNOWN_LAYOUTS, ValidatedLayouts
from serve.model.replies import failure
from serve.request import DecoupledError, InferenceRequest, InferenceResponse, Step, Timings, layout_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from model_handlers.config.model_config import EnsembleStep, ModelConfig
    from model_handlers.tensor import Array, DataType, TensorSpec
    from serve.model.ensemble_plan import Belongs, PlannedStep
    from serve.model.model import Model
    from serve.model.response_cache import CachedResponses, ResponseCache
    from serve.request import Completion, Layout
    from serve.statistics import ModelStats

    Tensor = tuple[str, DataType, Array]  # as a response has it


_now = time.perf_counter_ns


class StepTarget(Protocol):
    """The loaded versions of a step's model."""

    steps: tuple[str, ...]  # names of the served models that it consists of itself

    def version(self, number: int | None) -> Model | EnsembleModel:
        """One version, the latest if none is named."""


class ServedSteps:
    """Steps that are models which are served: what each is called, and how to find those in memory."""

    def __init__(self, names: tuple[str, ...], told: ModelConfig, resident: Callable[[str], StepTarget | None]) -> None:
        self.names = names  # one a step
        self.told = told  # the ensemble's configuration, before it was held against any models
        self._resident = resident

    def models(self) -> Iterator[Model | EnsembleModel]:
        """Those that are in memory now."""
        for name, step in zip(self.names, self.told.ensemble, strict=True):
            target = self._resident(name)
            if target is not None:
                with contextlib.suppress(MmeError):  # it has another version by now
                    yield target.version(step.version)


class EnsembleModel:
    """One version of an ensemble, ready to be asked; see `Model`."""

    def __init__(
        self,
        name: str,
        version: int,
        config: ModelConfig,  # the ensemble's, checked against its models'
        members: Sequence[Model | EnsembleModel],  # for each step the model that runs it
        stats: ModelStats,
        loop: asyncio.AbstractEventLoop,
        responses: ResponseCache | None = None,
        served: ServedSteps | None = None,  # None: its members are its own
    ) -> None:
        self.name = name
        self.version = version
        self.config = config
        self.stats = stats
        self.outstanding = 0
        self.executors = Executors()  # its steps have them
        self.served = served
        limit = config.max_inflight_requests
        self._limiters = InflightLimiters(limit, len(config.ensemble)) if limit else None
        wiring = Wiring(name, config, members, self._limiters)
        self._wiring: Wiring | None = wiring if served is None else None  # that of others is a request's to bring
        # batches, kinds, version_text: whether it has a batch dimension, the type of each output, what responses say
        self.batches = config.max_batch_size > 0
        self.kinds = {spec.name: spec.data_type for spec in config.outputs}
        self.version_text = str(version)
        self._checked = ValidatedLayouts(config, stats)
        stats.keep_first_responses(config)
        self._responses, self._loop = responses, loop
        self._cached = self._cache()

    def __repr__(self) -> str:
        return f"<EnsembleModel {self.name}/{self.version}: {self.outstanding} under way>"

    @property
    def queued(self) -> int:
        """Requests of its steps that may not be asked yet; all others wait with the models of the steps."""
        return 0 if self._limiters is None else self._limiters.waiting

    def models(self) -> Iterable[Model | EnsembleModel]:
        """Those of its steps, as far as they are in memory."""
        if self.served is not None:
            return self.served.models()
        return [] if self._wiring is None else [part.model for part in self._wiring.parts]

    def is_down(self) -> bool:
        """Whether a model of its steps that is in memory is."""
        return any(model.is_down() for model in self.models())

    async def ask_ready(self) -> bool:
        """Whether the models of its steps are ready, as far as they are in memory."""
        each = dict.fromkeys(self.models())  # several steps may have the same one
        return all(await asyncio.gather(*(model.ask_ready() for model in each)))

    def submit(self, request: InferenceRequest, _at_once: bool = False) -> None:  # noqa: FBT001, FBT002 - as of a model
        """Accept a request, which from now on gets exactly one answer.

        Raises:
            MmeError: INVALID_ARGUMENT when it does not fit the ensemble, or one of its steps waits for it;
                INVALID_MODEL when a step changed and does not fit any more. Then it was not accepted.
        """
        wiring = self._wired(request.steps)
        if self.config.decoupled and request.on_response is None:
            raise DecoupledError(f"ensemble '{self.name}'")
        if request.callers:
            wiring.check_callers(request.callers)
        checked = self._checked[request.layout]
        request.batch_size = checked.batch_size
        request.order = checked.order
        request.arrival_ns = _now()
        if self._cached is not None and self._cached.answered(request):
            return
        self.outstanding += 1
        run = EnsembleRun(self, wiring, request)
        if self._limiters is None:
            run.begin()
        else:
            self._limiters.begin(run.begin)

    def _wired(self, steps: Mapping[str, StepTarget] | None) -> Wiring:
        wiring, served = self._wiring, self.served
        if served is None:
            assert wiring is not None  # noqa: S101 - models of its own do not change
            return wiring
        if wiring is not None and wiring.leased is steps:
            return wiring
        if steps is None:
            raise MmeError(Kind.INTERNAL, f"ensemble '{self.name}' is used without leases on its steps")
        targets = [steps[name] for name in served.names]
        for target in targets:  # which grows by the steps of ensembles: they make the answers
            for name in target.steps:
                if steps[name] not in targets:
                    targets.append(steps[name])
        if wiring is None or wiring.targets != targets:
            members = step_models(served.told, targets[: len(served.names)])
            config = checked_config(served.told, members)
            wiring = self._wiring = Wiring(self.name, config, members, self._limiters, targets)
            self.config = config
            if self._cached is not None:  # what other models have answered
                self._cached.close()
                self._cached = self._cache()
        wiring.leased = steps
        return wiring

    def _cache(self) -> CachedResponses | None:
        if self._responses is None or not self.config.response_cache:
            return None
        return self._responses.of_model(self.config, self.stats, self._loop, reads_parameters=True)

    def unwire(self) -> None:
        """A step has left memory, or a step of one, which a wiring must not keep."""
        if self.served is not None:
            self._wiring = None

    def end_sequence(self, correlation_id: int | str) -> None:
        """End it with the models of its steps; members of an archive are told themselves."""
        for model in () if self.served is None else self.served.models():
            model.end_sequence(correlation_id)

    def refuse_waiting(self) -> None:
        """Refuse the requests of its steps that may not be asked yet."""
        if self._limiters is not None:
            self._limiters.refuse_waiting(
                MmeError(Kind.UNAVAILABLE, f"model '{self.name}' is being unloaded; try again")
            )

    def close(self) -> None:
        if self._cached is not None:
            self._cached.close()


def step_models(config: ModelConfig, targets: Sequence[StepTarget]) -> list[Model | EnsembleModel]:
    """For each step of an ensemble the model that runs it; INVALID_MODEL where its version is not loaded."""
    models = []
    for step, target in zip(config.ensemble, targets, strict=True):
        try:
            models.append(target.version(step.version))
        except MmeError as error:
            raise invalid_model(
                f"ensemble '{config.name}' depends on '{step.model_name}' whose required version {step.version} is "
                "not loaded"
            ) from error
    return models


def checked_config(config: ModelConfig, members: Sequence[Model | EnsembleModel]) -> ModelConfig:
    """An ensemble's configuration, held against those of its steps' models; INVALID_MODEL where they do not fit."""
    check_members(config, [member.config for member in members])
    return normalise(replace(config, decoupled=any(member.config.decoupled for member in members)))


class Wiring:
    """The models of an ensemble's steps, and what is known of requests that these run."""

    def __init__(
        self,
        name: str,
        config: ModelConfig,
        members: Sequence[Model | EnsembleModel],
        limiters: InflightLimiters | None,
        targets: Sequence[StepTarget] = (),
    ) -> None:
        # of which the models are a version, and those that they consist of; () where they are an archive's
        self.targets = targets
        self.leased: Mapping[str, StepTarget] | None = None  # what the last request had leased
        self.config = config
        decoupled = [bool(member.config.decoupled) for member in members]
        # its steps; graph: how they hang together
        self.graph = Graph(config.local_name(name), config.ensemble, decoupled)
        self.parts = [Part(*pair) for pair in zip(config.ensemble, members, strict=True)]
        for part, limiter in zip(self.parts, limiters.steps if limiters is not None else (), strict=False):
            part.submit = functools.partial(limiter.submit, part.model)
        self._routes: dict[tuple[str, ...], EnsembleRoute] = {}

    def __repr__(self) -> str:
        return f"<Wiring of {self.graph.name}: {', '.join(part.model.name for part in self.parts)}>"

    def check_callers(self, callers: tuple[str, ...]) -> None:
        """Refuse a call of a model that waits for the answer and is a step: its instance is busy until then."""
        for part in self.parts:
            if part.model.name in callers:
                chain = " → ".join((*dict.fromkeys(callers), self.config.name, part.model.name))
                raise MmeError(
                    Kind.INVALID_ARGUMENT,
                    f"model '{callers[-1]}' can't call '{self.config.name}', which waits for it: {chain}",
                )

    def route(self, outputs: tuple[str, ...]) -> EnsembleRoute:
        route = self._routes.get(outputs)
        if route is None:
            wanted = [spec.name for spec in self.config.outputs if not outputs or spec.name in outputs]
            plan = EnsemblePlan(self.graph, [spec.name for spec in self.config.inputs], wanted)
            if len(self._routes) >= KNOWN_LAYOUTS:
                self._routes.clear()
            route = self._routes[outputs] = EnsembleRoute(plan, self.parts, self.config)
        return route


class Part:
    """A step, as every request of it needs to know it."""

    def __init__(self, step: EnsembleStep, model: Model | EnsembleModel) -> None:
        self.model = model
        self.config = model.config
        self.batches = model.config.max_batch_size > 0  # whether its model has a batch dimension
        self.step = step
        self.submit = model.submit  # takes a request of it, as the model does
        everything = step.output_map.keys() >= {spec.name for spec in model.config.outputs}
        # those of the model that the ensemble has names for, () where that is all of them
        self.outputs = () if everything else tuple(step.output_map)


class EnsembleRoute:
    """A plan, and for each place whether the first dimension of its tensor is the batch's."""

    def __init__(self, plan: EnsemblePlan, parts: Sequence[Part], config: ModelConfig) -> None:
        self.plan = plan
        self.batched = [config.max_batch_size > 0] * len(plan.places)
        for part in parts:
            for tensor in part.step.output_map.values():
                if tensor in plan.places:
                    self.batched[plan.places[tensor]] = part.batches
        self._layouts: dict[tuple[int, tuple[tuple[int, ...], ...]], Layout] = {}
        self._usual: dict[int, tuple[tuple[int, ...], Layout]] = {}  # of steps with one input: its last shape

    def layout(self, step: PlannedStep, part: Part, held: Sequence[Tensor | Absent], arrays: list[Array]) -> Layout:
        """The layout of a request of a step; the same for the same shapes, where no input is absent."""
        usual = self._usual.get(step.index)
        if usual is not None and arrays and usual[0] == arrays[0].shape:
            return usual[1]
        shapes = tuple([array.shape for array in arrays])
        layout = self._layouts.get((step.index, shapes))
        if layout is None:
            there = [(name, held[place]) for name, place in step.inputs]
            kinds = [(name, tensor[1]) for name, tensor in there if not isinstance(tensor, Absent)]
            layout = layout_of(
                tuple((name, kind, shape) for (name, kind), shape in zip(kinds, shapes, strict=True)), part.outputs
            )
            if len(arrays) == len(step.inputs):
                if len(self._layouts) >= KNOWN_LAYOUTS:
                    self._layouts.clear()
                self._layouts[step.index, shapes] = layout
        if len(arrays) == len(step.inputs) == 1:
            self._usual[step.index] = shapes[0], layout
        return layout


class EnsembleRun:
    """One request on its way through the models of an ensemble."""

    def __init__(self, ensemble: EnsembleModel, wiring: Wiring, request: InferenceRequest) -> None:
        self._ensemble = ensemble
        self._wiring = wiring
        self._request = request
        self._callers = (*request.callers, ensemble.name)
        self._running: set[InferenceRequest] = set()
        self._error: MmeError | None = None
        self._timings = Timings.of_steps()
        self._belongs: Belongs = request.correlation_id, request.flags
        self._has_answered = False
        self._route = wiring.route(request.layout.outputs)
        self._root: ResponseScope[Tensor] = ResponseScope(
            self._route.plan,
            [
                ABSENT if position < 0 else (spec.name, spec.data_type, request.inputs[position])
                for spec, position in zip(ensemble.config.inputs, request.order, strict=True)
            ],
        )

    def begin(self) -> None:
        """Run the first steps."""
        self._request.on_cancel = self._cancel
        for step in self._route.plan.first:
            if self._error is None:
                self._submit(self._root, step)
        if not self._running and not self._request.answered:
            self._finish()

    def _submit(self, scope: ResponseScope[Tensor], step: PlannedStep) -> None:
        part = self._wiring.parts[step.index]
        sent: InferenceRequest | None = None
        try:
            sent = self._made(scope, step, part)
            self._running.add(sent)
            part.submit(sent)
        except Exception as error:  # noqa: BLE001 - whatever a step's model raises is the request's error
            if sent is not None:
                self._running.discard(sent)
            self._fail(failure(part.model.name, error))

    def _made(self, scope: ResponseScope[Tensor], step: PlannedStep, part: Part) -> InferenceRequest:
        request = self._request
        if request.cancelled and not request.correlation_id:  # the end of a sequence frees its slot
            raise MmeError(Kind.CANCELLED, f"the client of model '{part.model.name}' left")
        held, batched = scope.tensors, self._route.batched
        arrays = []
        for name, place in step.inputs:
            tensor = held[place]
            if not isinstance(tensor, Absent):
                array = tensor[2]
                if batched[place] is not part.batches:
                    array = fitted(part.config.input(name), array, batches=part.batches)
                arrays.append(array)
        sent = InferenceRequest(
            self._route.layout(step, part, held, arrays),
            arrays,
            functools.partial(self._complete, scope, step),
            request.id,
            request.parameters,
            request.timeout_us,
        )
        sent.priority = request.priority
        sent.correlation_id, sent.flags = self._belonging(scope, step) if scope.overrides else self._belongs
        sent.callers, sent.trace = self._callers, request.trace
        sent.steps = request.steps
        if step.decoupled:
            sent.on_response = functools.partial(self._came, scope, step)
        return sent

    def _complete(
        self,
        scope: ResponseScope[Tensor],
        step: PlannedStep,
        sent: InferenceRequest,
        result: InferenceResponse | MmeError | None,
    ) -> None:
        self._running.discard(sent)
        if isinstance(result, InferenceResponse):
            self._came(scope, step, sent, result)
        elif result is not None:
            self._fail(result)
        if scope.outer is not None:
            scope.ended()
        if not self._running and not self._request.answered:
            self._finish()

    def _came(
        self, scope: ResponseScope[Tensor], step: PlannedStep, sent: InferenceRequest, response: InferenceResponse
    ) -> None:
        if response.timings is not None:
            model = self._wiring.parts[step.index].step.model_name
            self._timings.add(Step(model, response.model_version, sent.arrival_ns, response.timings))
        if self._error is not None:
            return
        scopes = scope.descendants(step)
        if response.parameters or scope.overrides:
            self._note_sequence(scopes, step, sent, response)
        responses = []
        for each in scopes:
            for ready in each.deliver(step, response.outputs):
                if ready.responds:
                    responses.append((each, ready.inputs))
                elif self._error is None:
                    self._submit(each, ready)
        for due in responses:
            self._respond(self._response(*due), final=not self._running and due is responses[-1])
            due[0].ended()

    def _note_sequence(
        self,
        scopes: list[ResponseScope[Tensor]],
        step: PlannedStep,
        sent: InferenceRequest,
        response: InferenceResponse,
    ) -> None:
        try:
            belongs = overridden((sent.correlation_id, sent.flags), response.parameters)
        except MmeError as error:
            self._fail(error)
            return
        if belongs != self._belongs:
            for scope in scopes:
                scope.overrides |= dict.fromkeys((place for place, _ in step.outputs.values()), belongs)

    def _belonging(self, scope: ResponseScope[Tensor], step: PlannedStep) -> Belongs:
        own = self._belongs
        there = (place for _, place in step.inputs if not isinstance(scope.tensors[place], Absent))
        return belonging(own, (scope.overrides.get(place, own) for place in there))

    def _response(
        self, scope: ResponseScope[Tensor], wanted: Sequence[tuple[str, int]]
    ) -> InferenceResponse | MmeError:
        ensemble, tensors, batched = self._ensemble, scope.tensors, self._route.batched
        outputs = []
        try:
            for name, place in wanted:
                tensor = tensors[place]
                if not isinstance(tensor, Absent):
                    array = tensor[2]
                    if batched[place] is not ensemble.batches:
                        array = fitted(ensemble.config.output(name), array, batches=ensemble.batches)
                    outputs.append((name, ensemble.kinds[name], array))
        except Exception as error:  # noqa: BLE001 - as in `_submit`
            return failure(ensemble.name, error)
        return InferenceResponse(ensemble.name, ensemble.version_text, outputs, self._request.id, self._timings)

    def _respond(self, response: InferenceResponse | MmeError, *, final: bool) -> None:
        if self._error is not None:
            return
        if isinstance(response, MmeError):
            self._fail(response)
            return
        if not self._has_answered:
            self._has_answered = True
            self._ensemble.stats.began_to_answer(_now() - self._request.arrival_ns)
        response.final = final
        self._request.respond(response)

    def _fail(self, error: MmeError) -> None:
        """The first error is the request's; what runs is not waited for longer than it takes to notice."""
        if self._error is None:
            self._error = MmeError(error.kind, f"in ensemble '{self._wiring.graph.name}', {error.message}")
            self._cancel()

    def _cancel(self) -> None:
        for sent in list(self._running):
            sent.cancel()

    def _finish(self) -> None:
        ensemble, request = self._ensemble, self._request
        result: InferenceResponse | MmeError | None = self._error
        if result is None and self._route.plan.responds_once:
            result = self._response(self._root, self._route.plan.wanted)
            if self._wiring.config.decoupled:
                self._respond(result, final=True)
                result = self._error
        ensemble.outstanding -= 1
        total = _now() - request.arrival_ns
        if isinstance(result, MmeError):
            ensemble.stats.failed(result.kind, total)
            request.came_to = self._timings if self._timings.steps else None
        else:
            ensemble.stats.executed(request.batch_size, self._timings)
            waited = self._timings.waited_since(request.arrival_ns)
            ensemble.stats.succeeded(1, request.batch_size, waited, total, self._timings)
            if result is not None:
                ensemble.stats.began_to_answer(total)
        request.resolve(result)


def fitted(spec: TensorSpec | None, array: Array, *, batches: bool) -> Array:
    """A tensor as its reader takes it, with or without a batch dimension: a batch of 1 comes or goes.

    A model without batching may as well read or write what is a batch to another one: of a tensor that has as many
    dimensions as its reader takes, the first is the batch. One that the reader does not know, or that fits neither way,
    is left as it is: its reader tells what is wrong.
    """
    if spec is None:
        return array
    dims = len(spec.dims)
    if batches and array.ndim == dims:
        return array[None]
    if not batches and array.ndim == dims + 1 and array.shape[0] == 1:
        row: Array = array[0]
        return row
    return array


T = TypeVar("T")


_Waiting = tuple["InferenceRequest", "Model | EnsembleModel", "_Slot | None"]  # and the slot that it follows from


class _Slot:
    """A request's at its step; kept while `followers` of it wait for theirs."""

    def __init__(self, limiter: InflightLimiter) -> None:
        self.limiter = limiter
        self.followers = 0
        self.is_over = False

    def end(self) -> None:
        self.is_over = True
        self.give_up_if_unused()

    def give_up_if_unused(self) -> None:
        if self.is_over and not self.followers:
            self.limiter.leave()


class InflightLimiters:
    """Those of the steps of one ensemble; `answering` is the slot of the request whose answer is told now."""

    def __init__(self, most: int, steps: int) -> None:
        self.most = most
        self.steps = [InflightLimiter(self) for _ in range(steps)]
        self.answering: _Slot | None = None

    @property
    def waiting(self) -> int:
        return sum(step.waiting for step in self.steps)

    def begin(self, first_steps: Callable[[], None]) -> None:
        """Submit the first steps of a request of the ensemble: they follow from none whose answer is told now."""
        outer, self.answering = self.answering, None
        try:
            first_steps()
        finally:
            self.answering = outer

    def refuse_waiting(self, error: MmeError) -> None:
        for step in self.steps:
            step.refuse_waiting(error)


class InflightLimiter:
    """Requests of one step that are under way, for all requests of the ensemble together."""

    def __init__(self, all_of_them: InflightLimiters) -> None:
        self._all = all_of_them
        self._under_way = 0
        self._waiting: deque[_Waiting] = deque()
        self._is_letting_in = False

    def __repr__(self) -> str:
        return f"<InflightLimiter {self._under_way} of {self._all.most}, {self.waiting} waiting>"

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def submit(self, model: Model | EnsembleModel, request: InferenceRequest) -> None:
        """Submit a request, now or when it is its turn; what the model refuses by then is its answer."""
        if self._under_way < self._all.most and not self._waiting:
            self._enter(model, request)
            return
        before = self._all.answering
        if before is not None:
            before.followers += 1
        waits = request, model, before
        self._waiting.append(waits)
        request.on_cancel = functools.partial(self._leave_the_queue, waits)

    def leave(self) -> None:
        self._under_way -= 1
        if self._is_letting_in:
            return  # the loop below is already at it
        self._is_letting_in = True
        while self._waiting and self._under_way < self._all.most:
            request, model, before = self._waiting.popleft()
            request.on_cancel = None
            try:
                self._enter(model, request)
            except Exception as error:  # noqa: BLE001 - its submission is long over
                request.resolve(failure(model.name, error))
            _follower_entered(before)
        self._is_letting_in = False

    def _enter(self, model: Model | EnsembleModel, request: InferenceRequest) -> None:
        slot = _Slot(self)
        on_complete, on_response = request.on_complete, request.on_response
        request.on_complete = functools.partial(self._complete, slot, on_complete)
        if on_response is not None:
            request.on_response = functools.partial(self._tell, slot, on_response)
        self._under_way += 1
        try:
            model.submit(request)
        except BaseException:
            request.on_complete, request.on_response = on_complete, on_response
            slot.end()
            raise

    def _complete(
        self,
        slot: _Slot,
        on_complete: Completion,
        request: InferenceRequest,
        result: InferenceResponse | MmeError | None,
    ) -> None:
        try:
            self._tell(slot, on_complete, request, result)
        finally:
            slot.end()

    def _tell(
        self, slot: _Slot, tell: Callable[[InferenceRequest, T], None], request: InferenceRequest, what: T
    ) -> None:
        outer, self._all.answering = self._all.answering, slot
        try:
            tell(request, what)
        finally:
            self._all.answering = outer

    def refuse_waiting(self, error: MmeError) -> None:
        while self._waiting:
            self._turn_away(self._waiting.popleft(), error)

    def _leave_the_queue(self, waits: _Waiting) -> None:
        self._waiting.remove(waits)
        self._turn_away(waits, MmeError(Kind.CANCELLED, f"the client of model '{waits[1].name}' left"))

    def _turn_away(self, waits: _Waiting, error: MmeError) -> None:
        request, _, before = waits
        request.resolve(error)
        _follower_entered(before)


def _follower_entered(before: _Slot | None) -> None:
    if before is not None:
        before.followers -= 1
        before.give_up_if_unused()
