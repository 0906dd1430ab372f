"""One version of an ensemble in memory: requests that go through the models of its steps. On the event loop.

To the engine it is a model like any other; it has no lanes, for its steps run on those of their models, each of which
batches what comes from wherever it comes. Each request's way is a `Journey`.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from model_handlers.base import Footprint
from model_handlers.errors import Kind, MmeError
from serve.decoupled_error import DecoupledError
from serve.model.cached_responses import cached_responses
from serve.model.ensemble_plan import Graph, Plan
from serve.model.journey import Journey, Route
from serve.model.layout_check import KNOWN_LAYOUTS, CheckedLayouts
from serve.model.readiness import JointReadiness
from serve.model.turnstile import Turnstile, Turnstiles

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Sequence

    from model_handlers.base import Handler
    from model_handlers.config.model_config import EnsembleStep, ModelConfig
    from serve.model.model import Model
    from serve.model.response_cache import ResponseCache
    from serve.request import InferenceRequest, InferenceResponse
    from serve.stats import ModelStats

_now = time.perf_counter_ns


class EnsembleModel:
    """One version of an ensemble, ready to be asked.

    Attributes:
        config, stats, outstanding, queued, readiness: see `serve.model.model.Model`.
        parts: its steps; graph: how they hang together.
        batches, kinds, version_text: whether it has a batch dimension, the type of each output, and what responses say.

    Args:
        name, version: what responses carry.
        config: the ensemble's, checked against its models'.
        members: for each step the model that runs it.
        stats: where to count.
        loop: the event loop.
        responses: see `serve.model.model.Model`.
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
        decoupled = [bool(member.config.decoupled) for member in members]
        self.graph = Graph(config.own(name), config.ensemble, decoupled)
        self.parts = [Part(*pair) for pair in zip(config.ensemble, members, strict=True)]
        self._turnstiles = Turnstiles(config.max_inflight_requests) if config.max_inflight_requests else None
        if self._turnstiles is not None:
            for part in self.parts:
                part.submit = Turnstile(self._turnstiles, part.model).submit
        self.batches = config.max_batch_size > 0
        self.kinds = {spec.name: spec.data_type for spec in config.outputs}
        self.version_text = str(version)
        self._routes: dict[tuple[str, ...], Route] = {}
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
        """The way to these outputs, () for all."""
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
        journey = Journey(self, request)
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
    input_bytes = 0  # which its models count

    def memory(self) -> Footprint:
        """Nothing beside its models."""
        return Footprint()

    def handlers(self) -> list[Handler]:
        """It has none."""
        return []

    @property
    def memory_only(self) -> bool:
        """It holds no more than what was kept of responses."""
        return True

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
        batches: whether that has a batch dimension.
        outputs: those of the model that the ensemble has names for, () where that is all of them.
        submit: takes a request of it, as the model does.
    """

    def __init__(self, step: EnsembleStep, model: Model | EnsembleModel) -> None:
        self.model = model
        self.config = model.config
        self.batches = model.config.max_batch_size > 0
        self.step = step
        self.submit = model.submit
        everything = step.output_map.keys() >= {spec.name for spec in model.config.outputs}
        self.outputs = () if everything else tuple(step.output_map)
