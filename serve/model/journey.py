"""One request on its way through the models of an ensemble. On the event loop.

There is as little as possible to do between two steps: tensors pass by reference, and what can be known before a
request comes is known. Which step runs when is decided by `ensemble_plan.py`.
"""

from __future__ import annotations

import functools
import time
from typing import TYPE_CHECKING

from model_handlers.errors import MmeError
from serve.model.ensemble_plan import ABSENT, Absent, Scope, belonging, overridden
from serve.model.execution import failure
from serve.model.layout_check import KNOWN_LAYOUTS
from serve.request import InferenceRequest, InferenceResponse, Step, Timings, layout_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from model_handlers.config.model_config import ModelConfig
    from model_handlers.tensor import Array, DataType, TensorSpec
    from serve.model.ensemble import EnsembleModel, Part
    from serve.model.ensemble_plan import Belongs, Plan, PlannedStep
    from serve.request import Layout

    Tensor = tuple[str, DataType, Array]  # as a response has it

_now = time.perf_counter_ns


class Route:
    """A plan, and the form of its tensors.

    Attributes:
        plan: what runs.
        batched: for each place, whether the first dimension of its tensor is the batch's.
    """

    def __init__(self, plan: Plan, parts: Sequence[Part], config: ModelConfig) -> None:
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


class Journey:
    """One request. See `ensemble`."""

    def __init__(self, ensemble: EnsembleModel, request: InferenceRequest) -> None:
        self._ensemble = ensemble
        self._request = request
        self._callers = (*request.callers, ensemble.name)
        self._running: set[InferenceRequest] = set()
        self._error: MmeError | None = None
        self._timings = Timings.of_steps(request.arrival_ns)
        self._waited = 0
        self._belongs: Belongs = request.correlation_id, request.flags
        self._has_answered = False
        self._route = ensemble.route(request.layout.outputs)
        self._root: Scope[Tensor] = Scope(
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

    def _submit(self, scope: Scope[Tensor], step: PlannedStep) -> None:
        part = self._ensemble.parts[step.index]
        sent: InferenceRequest | None = None
        try:
            sent = self._made(scope, step, part)
            self._running.add(sent)
            part.submit(sent)
        except Exception as error:  # noqa: BLE001 - whoever takes the answer of a step that is none must say so himself
            if sent is not None:
                self._running.discard(sent)
            self._fail(failure(part.model.name, error))

    def _made(self, scope: Scope[Tensor], step: PlannedStep, part: Part) -> InferenceRequest:
        """The request of a step whose tensors are there."""
        request = self._request
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
        sent.correlation_id, sent.flags = self._belonging(scope, step) if scope.told else self._belongs
        sent.callers, sent.trace, sent.watch = self._callers, request.trace, request.watch
        if step.decoupled:
            sent.on_response = functools.partial(self._came, scope, step)
        return sent

    def _complete(
        self,
        scope: Scope[Tensor],
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
        self, scope: Scope[Tensor], step: PlannedStep, sent: InferenceRequest, response: InferenceResponse
    ) -> None:
        """A step has answered."""
        if response.timings is not None:
            watch, model = self._request.watch, self._ensemble.parts[step.index].step.model_name
            seen = None if watch is None else watch(sent, response)
            told = Step(model, response.model_version, sent.arrival_ns, response.timings, seen)
            self._waited += self._timings.add(told)
        if self._error is not None:
            return
        scopes = scope.reached(step)
        if response.parameters or scope.told:
            self._note_sequence(scopes, step, sent, response)
        responses = []
        for each in scopes:
            for ready in each.came(step, response.outputs):
                if ready.responds:
                    responses.append((each, ready.inputs))
                elif self._error is None:
                    self._submit(each, ready)
        for due in responses:
            self._respond(self._response(*due), final=not self._running and due is responses[-1])
            due[0].ended()

    def _note_sequence(
        self, scopes: list[Scope[Tensor]], step: PlannedStep, sent: InferenceRequest, response: InferenceResponse
    ) -> None:
        """What the steps behind one belong to, if not to the request's own sequence."""
        try:
            belongs = overridden((sent.correlation_id, sent.flags), response.parameters)
        except MmeError as error:
            self._fail(error)
            return
        if belongs != self._belongs:
            for scope in scopes:
                scope.told |= dict.fromkeys((place for place, _ in step.outputs.values()), belongs)

    def _belonging(self, scope: Scope[Tensor], step: PlannedStep) -> Belongs:
        own = self._belongs
        there = (place for _, place in step.inputs if not isinstance(scope.tensors[place], Absent))
        return belonging(own, (scope.told.get(place, own) for place in there))

    def _response(self, scope: Scope[Tensor], wanted: Sequence[tuple[str, int]]) -> InferenceResponse | MmeError:
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
        """One response of several."""
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
            self._error = MmeError(error.kind, f"in ensemble '{self._ensemble.graph.name}', {error.message}")
            self._cancel()

    def _cancel(self) -> None:
        for sent in list(self._running):
            sent.cancel()

    def _finish(self) -> None:
        """Count the request, and give it its last answer, None where it has had all of them."""
        ensemble, request = self._ensemble, self._request
        result: InferenceResponse | MmeError | None = self._error
        if result is None and self._route.plan.responds_once:
            result = self._response(self._root, self._route.plan.wanted)
            if ensemble.config.decoupled:
                self._respond(result, final=True)
                result = self._error
        ensemble.outstanding -= 1
        total = _now() - request.arrival_ns
        if isinstance(result, MmeError):
            ensemble.stats.failed(result.kind, total)
            request.came_to = self._timings if self._timings.steps else None
        else:
            ensemble.stats.executed(request.batch_size, self._timings)
            ensemble.stats.succeeded(1, request.batch_size, self._waited, total, self._timings)
            if result is not None:
                ensemble.stats.began_to_answer(total)
        request.resolve(result)


def fitted(spec: TensorSpec | None, array: Array, *, batches: bool) -> Array:
    """A tensor as its reader takes it, who knows it as `spec`, and `batches` or does not: a batch of 1 comes or goes.

    A model without batching may as well read or write what is a batch to another one: of a tensor that has as many
    dimensions as its reader takes, the first is the batch.
    One that the reader does not know, or that fits neither way, is left as it is: its reader tells what is wrong.
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
