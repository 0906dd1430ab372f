"""The graph of an ensemble, one request's way through it, and whether its members fit. PURE.

A tensor of the ensemble comes with the request or from one step. A step runs once, as soon as all its tensors exist.
Decoupled steps answer any number of times: each response begins a *scope* of its own, in which the steps behind it run
again, seeing its tensors and all of the scopes around it:

    root: IN, b ──────────────┬─────────────────────┐        a is decoupled and answered twice:
                              │ a's 1st response    │ 2nd    c, which needs a's tensor and b's, runs in each scope
                              ▼                     ▼
                         scope: x, c's y       scope: x, c's y

Which scope a step runs in is told by its *ancestry*, the decoupled steps above it: one behind the other, since a step
behind two unrelated ones is refused. A response of the ensemble is due whenever a scope has all outputs of its
ancestry; a request is over when nothing runs and no decoupled step will answer again. What a step did not return is
*absent*: an optional input may be, then the step runs without it.

A *plan* for each set of wanted outputs is made once; in it tensors are places in a list. What is left for a request is
to fill the list of each scope, and to count for each step how many tensors of other steps it still lacks there.
"""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from model_handlers.errors import Kind, MmeError, invalid_model
from model_handlers.requests import FLAG_SEQUENCE_END, FLAG_SEQUENCE_START

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from model_handlers.config.model_config import EnsembleStep, ModelConfig
    from model_handlers.tensor import DataType, TensorSpec

    Belongs = tuple[int | str, int]  # the correlation id, and where in the sequence: its flags


_FLAGS = {"sequence_start": FLAG_SEQUENCE_START, "sequence_end": FLAG_SEQUENCE_END}


def overridden(belongs: Belongs, parameters: Mapping[str, Any] | None) -> Belongs:
    """What the steps behind one belong to, which belongs to `belongs` itself and answered with these parameters.

    Raises:
        MmeError: EXECUTION_FAILED for a parameter of another type.
    """
    if not parameters:
        return belongs
    correlation_id, flags = belongs
    given = parameters.get("sequence_id", correlation_id)
    if isinstance(given, bool) or not isinstance(given, int | str):
        raise _wrong("sequence_id", "INT or TRITONSERVER_PARAMETER_STRING", given)
    for name, flag in _FLAGS.items():
        value = parameters.get(name, bool(flags & flag))
        if not isinstance(value, bool):
            raise _wrong(name, "BOOL", value)
        flags = flags | flag if value else flags & ~flag
    return given, flags


def belonging(own: Belongs, sources: Iterable[Belongs]) -> Belongs:
    """What a step belongs to whose tensors come from steps of these: whatever differs from the request's `own`."""
    return next((belongs for belongs in sources if belongs != own), own)


def _wrong(name: str, expected: str, value: object) -> MmeError:
    return MmeError(
        Kind.EXECUTION_FAILED, f"expect parameter '{name}' to be TRITONSERVER_PARAMETER_{expected}, got {value!r}"
    )


T = TypeVar("T", bound="tuple[Any, ...]")
Ancestry = tuple[int, ...]
Placed = tuple[str, int]  # a tensor's name, and its place


class Absent:
    """The value of a tensor that will not come."""


ABSENT: Final = Absent()


class Graph:
    """What an ensemble's configuration says, worked out once.

    Args:
        steps: every input of each that is not optional is mapped.
        decoupled: for each step, whether its model answers any number of times.

    Raises:
        MmeError: INVALID_MODEL when tensors go in a circle, or a step is behind two unrelated decoupled ones.
    """

    def __init__(self, name: str, steps: Sequence[EnsembleStep], decoupled: Sequence[bool]) -> None:
        self.name = name
        self.steps = tuple(steps)
        self.decoupled = tuple(decoupled)
        self.producers = {tensor: index for index, step in enumerate(steps) for tensor in step.output_map.values()}
        self._needed: dict[frozenset[str], frozenset[int]] = {}
        order = self._order()
        self.ancestries: list[Ancestry] = [()] * len(steps)
        for index in order:
            self.ancestries[index] = self._ancestry(index)

    def ancestry_of(self, tensor: str) -> Ancestry:
        """The decoupled steps that a tensor comes from, the outermost first."""
        index = self.producers.get(tensor)
        if index is None:
            return ()
        return (*self.ancestries[index], index) if self.decoupled[index] else self.ancestries[index]

    def needed(self, outputs: Iterable[str]) -> frozenset[int]:
        """The steps that these tensors come from; the others need not run."""
        wanted = frozenset(outputs)
        known = self._needed.get(wanted)
        if known is None:
            known = self._needed[wanted] = frozenset(self._ancestors(wanted))
        return known

    def _ancestors(self, tensors: Iterable[str]) -> set[int]:
        found: set[int] = set()
        waiting = list(tensors)
        while waiting:
            index = self.producers.get(waiting.pop())
            if index is not None and index not in found:
                found.add(index)
                waiting += self.steps[index].input_map.values()
        return found

    def _order(self) -> list[int]:
        order: list[int] = []
        left = dict(enumerate(self.steps))
        while left:
            ready = [
                index
                for index, step in left.items()
                if not any(self.producers.get(tensor) in left for tensor in step.input_map.values())
            ]
            if not ready:
                names = ", ".join(step.model_name for step in left.values())
                raise invalid_model(f"in ensemble '{self.name}', the tensors of its steps go in a circle: {names}")
            order += ready
            for index in ready:
                del left[index]
        return order

    def _ancestry(self, index: int) -> Ancestry:
        longest: Ancestry = ()
        for tensor in self.steps[index].input_map.values():
            ancestry = self.ancestry_of(tensor)
            shorter, longer = sorted((longest, ancestry), key=len)
            if longer[: len(shorter)] != shorter:
                raise invalid_model(
                    f"in ensemble '{self.name}', step of model '{self.steps[index].model_name}' receives inputs "
                    "originated from different decoupled models"
                )
            longest = longer
        return longest


class PlannedStep:
    """A step of a plan, or a response of the ensemble, which is due when a step with its inputs would run."""

    def __init__(
        self, index: int, depth: int, inputs: tuple[Placed, ...], *, decoupled: bool = False, responds: bool = False
    ) -> None:
        self.index = index  # which one of the ensemble it is; responses have numbers behind those of the steps
        self.depth = depth  # how many decoupled steps are above it
        self.inputs = inputs  # (input of its model, place of the tensor); of a response its outputs
        self.decoupled = decoupled
        self.responds = responds
        # output of its model → (place of the tensor, the steps that wait for it)
        self.outputs: dict[str, tuple[int, list[PlannedStep]]] = {}

    def __repr__(self) -> str:
        return f"<PlannedStep {self.index}>"


class EnsemblePlan:
    """What runs for some outputs, and what of it waits for what: known before a request comes."""

    def __init__(self, graph: Graph, inputs: Sequence[str], wanted: Sequence[str]) -> None:
        needed = sorted(graph.needed(wanted))
        made = [tensor for index in needed for tensor in graph.steps[index].output_map.values()]
        # tensor → its place in a list
        self.places = {tensor: place for place, tensor in enumerate(dict.fromkeys((*inputs, *made)))}
        self.wanted = tuple((name, self.places[name]) for name in wanted)  # the outputs, and their places
        ancestries = {name: graph.ancestry_of(name) for name in wanted}
        ends = {one for one in ancestries.values() if not any(_is_prefix(one, other) for other in ancestries.values())}
        # whether no wanted output is behind a decoupled step: the one response is due once nothing runs
        self.responds_once = ends == {()}
        steps = []
        for index in needed:
            placed = tuple((name, self.places[tensor]) for name, tensor in graph.steps[index].input_map.items())
            steps.append(PlannedStep(index, len(graph.ancestries[index]), placed, decoupled=graph.decoupled[index]))
        responses: list[PlannedStep] = []
        for end in () if self.responds_once else ends:
            seen = tuple(
                (name, place) for name, place in self.wanted if end[: len(ancestries[name])] == ancestries[name]
            )
            responses.append(PlannedStep(len(graph.steps) + len(responses), len(end), seen, responds=True))
        # ancestry → how many steps and responses each scope of it sees
        self.within = Counter([*(graph.ancestries[index] for index in needed), *ends])
        # for each step and each response, how many tensors of other steps it waits for
        self.lacking = [0] * (len(graph.steps) + len(responses))
        for step in steps:
            for name, tensor in graph.steps[step.index].output_map.items():
                place = self.places[tensor]
                waiting = [other for other in (*steps, *responses) if place in dict(other.inputs).values()]
                step.outputs[name] = place, waiting
                for other in waiting:
                    self.lacking[other.index] += 1
        self.first = [step for step in steps if not self.lacking[step.index]]  # the steps that wait for no other


class ResponseScope(Generic[T]):
    """The tensors of one response of a decoupled step, or of the request.

    Args:
        tensors: those that came with the request, in the order of the plan's inputs, or all of the scope around it.
    """

    def __init__(
        self,
        plan: EnsemblePlan,
        tensors: Sequence[T | Absent],
        ancestry: Ancestry = (),
        outer: ResponseScope[T] | None = None,
    ) -> None:
        # those that exist, in their places; `ABSENT` where one does not, or not yet
        self.tensors: list[T | Absent] = [*tensors, *[ABSENT] * (len(plan.places) - len(tensors))]
        # what the steps that read a place belong to, where a step said that
        self.overrides: dict[int, Belongs] = {} if outer is None else outer.overrides.copy()
        self._plan = plan
        self._lacking: list[int] = (plan.lacking if outer is None else outer._lacking).copy()  # noqa: SLF001 - of its class
        self._ancestry = ancestry
        self._depth = len(ancestry)
        # outer, inner: the scope around it, and those in it that are not over
        self.outer = outer
        self.inner: list[ResponseScope[T]] = []
        self._left = plan.within[ancestry]  # steps and responses that are not due yet,
        self._running = 0  # and those that are, and not over

    def descendants(self, step: PlannedStep) -> list[ResponseScope[T]]:
        """Where a response of one of its steps belongs: in a new scope, or in it and in those inside."""
        if step.decoupled:
            self.inner.append(ResponseScope(self._plan, self.tensors, (*self._ancestry, step.index), self))
            return self.inner[-1:]
        if not self.inner:
            return [self]
        found = [self]
        for scope in found:  # which grows
            found += scope.inner
        return found

    def deliver(self, step: PlannedStep, outputs: Sequence[T]) -> list[PlannedStep]:
        """A step has answered: the steps that can run now, without what it did not return, and responses that are due.

        Each output begins with the name that its model has for it.
        """
        ready: list[PlannedStep] = []
        tensors, lacking = self.tensors, self._lacking
        for tensor in outputs:
            target = step.outputs.get(tensor[0])
            if target is not None:
                tensors[target[0]] = tensor
        for _, waiting in step.outputs.values():
            for consumer in waiting:
                index = consumer.index
                lacking[index] -= 1
                if not lacking[index] and consumer.depth == self._depth:  # else it ran in a scope around this one
                    ready.append(consumer)
        if ready:
            self._left -= len(ready)
            self._running += len(ready)
        return ready

    def ended(self) -> None:
        """One of its steps or responses is over. Scopes in which nothing will happen any more are forgotten."""
        self._running -= 1
        scope = self
        while scope.outer is not None and not (scope._left or scope._running or scope.inner):
            scope.outer.inner.remove(scope)
            scope = scope.outer


def _is_prefix(one: Ancestry, other: Ancestry) -> bool:
    return len(one) < len(other) and other[: len(one)] == one


@dataclass(frozen=True, slots=True)
class _Side:
    model: str
    data_type: DataType
    dims: tuple[int, ...]
    batches: bool


def check_members(config: ModelConfig, members: Sequence[ModelConfig]) -> None:
    """Check every mapping against the model of its step, and every tensor against all that read and write it.

    Raises:
        MmeError: INVALID_MODEL, naming ensemble, tensor and models, in Triton's words.
    """
    for _, error in member_problems(config, members):
        raise error


def member_problems(config: ModelConfig, members: Sequence[ModelConfig | None]) -> Iterator[tuple[str, MmeError]]:
    """All that such a check finds: the field of the ensemble's configuration, and the error.

    Of a step whose model is None nothing is known.
    """
    tensors: dict[str, _Side] = {}
    for spec in (*config.inputs, *config.outputs):
        tensors[spec.name] = _side(config.name, config, spec)
    for index, (step, member) in enumerate(zip(config.ensemble, members, strict=True)):
        if member is not None:
            for field, error in _step_problems(config, step, member, tensors):
                yield f"ensemble_scheduling.step[{index}]{field}", error


def _step_problems(
    config: ModelConfig, step: EnsembleStep, member: ModelConfig, tensors: dict[str, _Side]
) -> Iterator[tuple[str, MmeError]]:
    if config.max_batch_size > member.max_batch_size > 0:
        sentence = (
            f"ensemble {config.name} allows maximum batch size {config.max_batch_size}, but it contains model "
            f"{step.model_name} which only allows maximum batch size to be {member.max_batch_size}"
        )
        yield "", invalid_model(sentence)
    for spec in member.inputs:
        if spec.name not in step.input_map and not spec.optional:
            sentence = (
                f"in ensemble {config.name}, input {spec.name} in model {step.model_name} is not mapped to any "
                "ensemble tensors"
            )
            yield ".input_map", invalid_model(sentence)
    for field, name, tensor, found in _mapped(step, member):
        if found is None:
            way = "mapping to non-existing input" if field == ".input_map" else "mapped from non-existing output"
            sentence = f"in ensemble {config.name}, ensemble tensor {tensor} is {way} {name} in model {step.model_name}"
            yield field, invalid_model(sentence)
            continue
        side = _side(step.model_name, member, found)
        error = _difference(config.name, tensor, tensors.setdefault(tensor, side), side)
        if error is not None:
            yield field, error


def _mapped(step: EnsembleStep, member: ModelConfig) -> Iterator[tuple[str, str, str, TensorSpec | None]]:
    for name, tensor in step.input_map.items():
        yield ".input_map", name, tensor, member.input(name)
    for name, tensor in step.output_map.items():
        yield ".output_map", name, tensor, member.output(name)


def _side(model: str, config: ModelConfig, spec: TensorSpec) -> _Side:
    return _Side(model, spec.data_type, spec.dims, config.max_batch_size > 0)


def _difference(ensemble: str, tensor: str, one: _Side, other: _Side) -> MmeError | None:
    if one.data_type is not other.data_type:
        return invalid_model(
            f"in ensemble {ensemble}, ensemble tensor {tensor}: inconsistent data type: {one.data_type.config_name} is "
            f"inferred from model {one.model} while {other.data_type.config_name} is inferred from model {other.model}"
        )
    if not _same_shape(one, other):
        return invalid_model(
            f"in ensemble {ensemble}, ensemble tensor {tensor}: inconsistent shape: {_shape(one)} is inferred from "
            f"model {one.model} while {_shape(other)} is inferred from model {other.model}"
        )
    return None


def _same_shape(one: _Side, other: _Side) -> bool:
    """Whether both can mean one tensor, whose batch dimension may come and go where only one of them batches."""
    forms = [(one.dims, other.dims)]
    if one.batches != other.batches:
        batched, plain = (one, other) if one.batches else (other, one)
        forms = [((-1, *batched.dims), plain.dims), (batched.dims, plain.dims)]
    return any(_fit(a, b) for a, b in forms)


def _fit(one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    return len(one) == len(other) and all(a == b or -1 in (a, b) for a, b in zip(one, other, strict=True))


def _shape(side: _Side) -> str:
    return "[" + ",".join(map(str, (-1, *side.dims) if side.batches else side.dims)) + "]"


def not_available(ensemble: str, models: Iterable[str], there: str = "") -> MmeError:
    """Triton's words for steps whose models are nowhere, and what there is."""
    names = ", ".join(models)
    return invalid_model(f"ensemble {ensemble} contains models that are not available or ambiguous: {names}{there}")


@contextmanager
def blaming(ensemble: str, model: str) -> Iterator[None]:
    """What is wrong with the model of a step keeps its ensemble from loading, which says so, in Triton's words."""
    try:
        yield
    except MmeError as error:
        if error.kind is not Kind.INVALID_MODEL:
            raise
        raise invalid_model(
            f"ensemble '{ensemble}' depends on '{model}' which has no loaded version. Model '{model}' loading failed "
            f"with error: {error.message}"
        ) from error


def check_circle(start: str, steps: Mapping[str, Sequence[str]]) -> None:
    """Refuse an ensemble that is a step of its own steps, however far behind: `steps` has each model's, its own too.

    Raises:
        MmeError: INVALID_MODEL, with the way back to it.
    """
    waiting = [[start]]
    seen: set[str] = set()
    while waiting:
        way = waiting.pop()
        for step in steps.get(way[-1], ()):
            if step == start:
                raise invalid_model(f"circular dependency between ensembles: {' -> '.join([*way, start])}")
            if step not in seen:
                seen.add(step)
                waiting.append([*way, step])
