"""The graph of an ensemble, and one request's way through it. PURE: tensors in, steps to run and responses out.

Theory of operation. A tensor of the ensemble comes with the request or from one step. A step runs as soon as all its
tensors exist, once. That is all, but for decoupled steps, which answer any number of times: each response begins a
*scope* of its own, in which the steps behind it run anew, seeing its tensors and all of the scopes around it:

    root: IN, b ──────────────┬─────────────────────┐        a is decoupled and answered twice:
                              │ a's 1st response    │ 2nd    c, which needs a's tensor and b's, runs in each scope
                              ▼                     ▼
                         scope: x, c's y       scope: x, c's y

Which scope a step runs in is told by its *lineage*, the decoupled steps above it: one behind the other, since a step
behind two that know nothing of one another is refused. A response of the ensemble is due whenever a scope has all
outputs of its lineage; a request is over when nothing runs and no decoupled step will answer again.

What a step did not return is *absent*: an optional input may be, then the step runs without it.

Where no step is decoupled there is one scope, and less to keep in mind: see `straight`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Generic, TypeVar

from model_handlers.errors import Kind, MmeError, invalid_model

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from model_handlers.config import EnsembleStep

T = TypeVar("T")
Lineage = tuple[int, ...]


class Absent:
    """The value of a tensor that will not come."""


ABSENT: Final = Absent()


class Graph:
    """What an ensemble's configuration says, worked out once.

    Args:
        name: the ensemble's, for messages.
        steps: its steps; every input of each that is not optional is mapped.
        decoupled: for each step, whether its model answers any number of times.

    Raises:
        MmeError: INVALID_MODEL when tensors go in a circle, or a step is behind two unrelated decoupled ones.
    """

    def __init__(self, name: str, steps: Sequence[EnsembleStep], decoupled: Sequence[bool]) -> None:
        self.name = name
        self.steps = tuple(steps)
        self.decoupled = tuple(decoupled)
        self.producers = {tensor: index for index, step in enumerate(steps) for tensor in step.outputs.values()}
        self._needed: dict[frozenset[str], frozenset[int]] = {}
        order = self._order()
        self.lineages: list[Lineage] = [()] * len(steps)
        for index in order:
            self.lineages[index] = self._lineage(index)

    def lineage_of(self, tensor: str) -> Lineage:
        """The decoupled steps that a tensor comes from, the outermost first."""
        index = self.producers.get(tensor)
        if index is None:
            return ()
        return (*self.lineages[index], index) if self.decoupled[index] else self.lineages[index]

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
                waiting += self.steps[index].inputs.values()
        return found

    def _order(self) -> list[int]:
        """The steps, each behind those that it needs."""
        order: list[int] = []
        left = dict(enumerate(self.steps))
        while left:
            ready = [
                index
                for index, step in left.items()
                if not any(self.producers.get(tensor) in left for tensor in step.inputs.values())
            ]
            if not ready:
                names = ", ".join(step.model for step in left.values())
                raise invalid_model(f"in ensemble '{self.name}', the tensors of its steps go in a circle: {names}")
            order += ready
            for index in ready:
                del left[index]
        return order

    def _lineage(self, index: int) -> Lineage:
        longest: Lineage = ()
        for tensor in self.steps[index].inputs.values():
            lineage = self.lineage_of(tensor)
            shorter, longer = sorted((longest, lineage), key=len)
            if longer[: len(shorter)] != shorter:
                raise invalid_model(
                    f"in ensemble '{self.name}', step of model '{self.steps[index].model}' receives inputs originated "
                    "from different decoupled models"
                )
            longest = longer
        return longest


class Scope(Generic[T]):
    """The tensors of one response of a decoupled step, or of the request: see above."""

    def __init__(self, parent: Scope[T] | None, lineage: Lineage, tensors: dict[str, T | Absent]) -> None:
        self.parent = parent
        self.lineage = lineage
        self.tensors = tensors
        self.started: set[int] = set()
        self.running = 0  # steps, in it and in the scopes inside
        self.responded = False

    def find(self, tensor: str) -> T | Absent | None:
        """A tensor of this scope or of one around it, None while it does not exist."""
        scope: Scope[T] | None = self
        while scope is not None:
            found = scope.tensors.get(tensor)
            if found is not None:
                return found
            scope = scope.parent
        return None


@dataclass(slots=True, eq=False)
class Ready(Generic[T]):
    """A step that can run now.

    Attributes:
        step: its index.
        inputs: input of its model → tensor; those that are absent are left out.
        scope: where its outputs belong.
    """

    step: int
    inputs: dict[str, T]
    scope: Scope[T]


@dataclass(slots=True)
class Progress(Generic[T]):
    """What follows from a step: further steps, and responses of the ensemble, each a tensor an output."""

    ready: list[Ready[T]]
    responses: list[dict[str, T]]


class Run(Generic[T]):
    """One request on its way through a graph.

    Args:
        graph: the ensemble's.
        tensors: those that came with the request; the ensemble's other inputs are absent.
        wanted: the outputs that the client asked for.
    """

    def __init__(self, graph: Graph, tensors: Mapping[str, T], absent: Iterable[str], wanted: Sequence[str]) -> None:
        self._graph = graph
        self._needed = graph.needed(wanted)
        self._root: Scope[T] = Scope(None, (), {**tensors, **dict.fromkeys(absent, ABSENT)})
        self._scopes = [self._root]
        lineages = {name: graph.lineage_of(name) for name in wanted}
        ends = {one for one in lineages.values() if not any(_is_prefix(one, other) for other in lineages.values())}
        self._groups = {end: [name for name in wanted if end[: len(lineages[name])] == lineages[name]] for end in ends}
        self._answered = False

    @property
    def over(self) -> bool:
        """Whether nothing runs any more."""
        return self._root.running == 0

    def begin(self) -> Progress[T]:
        """The first steps."""
        return self._advance(self._scopes)

    def came(self, ready: Ready[T], outputs: Mapping[str, T]) -> Progress[T]:
        """A response of a step: output of its model → tensor. What it lacks is absent."""
        step = self._graph.steps[ready.step]
        tensors = {tensor: outputs.get(name, ABSENT) for name, tensor in step.outputs.items()}
        if self._graph.decoupled[ready.step]:
            scope = Scope(ready.scope, (*ready.scope.lineage, ready.step), tensors)
            self._scopes.append(scope)
            return self._advance([scope])
        ready.scope.tensors.update(tensors)
        return self._advance([scope for scope in self._scopes if _inside(scope, ready.scope)])

    def ended(self, ready: Ready[T]) -> Progress[T]:
        """A step will not answer any more."""
        _count(ready.scope, -1)
        if any(self._done(scope) for scope in self._scopes):
            self._scopes = [scope for scope in self._scopes if not self._done(scope)]
        return Progress([], [])

    def check_answered(self) -> None:
        """Once it is over: was everything said that was asked for?

        Raises:
            MmeError: EXECUTION_FAILED when not.
        """
        if not self._answered and () in self._groups:  # whoever is decoupled may have nothing to say
            raise deadlock(self._graph)

    def _advance(self, scopes: Sequence[Scope[T]]) -> Progress[T]:
        progress: Progress[T] = Progress([], [])
        for scope in scopes:
            for index in self._needed - scope.started:
                if self._graph.lineages[index] == scope.lineage:
                    inputs = self._inputs(index, scope)
                    if inputs is not None:
                        scope.started.add(index)
                        _count(scope, 1)
                        progress.ready.append(Ready(index, inputs, scope))
            self._respond(scope, progress)
        return progress

    def _done(self, scope: Scope[T]) -> bool:
        """Whether nothing more will happen in a scope: it can be forgotten, with its tensors."""
        if scope.running or scope.parent is None or not (scope.responded or scope.lineage not in self._groups):
            return False
        return all(self._graph.lineages[index] != scope.lineage for index in self._needed - scope.started)

    def _inputs(self, index: int, scope: Scope[T]) -> dict[str, T] | None:
        """The inputs of a step, None while one of them does not exist."""
        inputs: dict[str, T] = {}
        for name, tensor in self._graph.steps[index].inputs.items():
            found = scope.find(tensor)
            if found is None:
                return None
            if not isinstance(found, Absent):
                inputs[name] = found
        return inputs

    def _respond(self, scope: Scope[T], progress: Progress[T]) -> None:
        names = self._groups.get(scope.lineage)
        if names is None or scope.responded:
            return
        found = {name: scope.find(name) for name in names}
        if any(tensor is None for tensor in found.values()):
            return
        scope.responded = True
        self._answered = True
        present = {name: tensor for name, tensor in found.items() if tensor is not None}
        progress.responses.append({name: tensor for name, tensor in present.items() if not isinstance(tensor, Absent)})


def deadlock(graph: Graph) -> MmeError:
    """An output never came, though nothing runs."""
    return MmeError(
        Kind.EXECUTION_FAILED,
        f"in ensemble '{graph.name}', unexpected deadlock, at least one output is not set while no more ensemble steps "
        "can be made",
    )


def _is_prefix(one: Lineage, other: Lineage) -> bool:
    return len(one) < len(other) and other[: len(one)] == one


def _count(scope: Scope[T], change: int) -> None:
    at: Scope[T] | None = scope
    while at is not None:
        at.running += change
        at = at.parent


def _inside(scope: Scope[T], outer: Scope[T]) -> bool:
    """Whether a scope is `outer` or lies in it."""
    at: Scope[T] | None = scope
    while at is not None:
        if at is outer:
            return True
        at = at.parent
    return False
