"""One request's way through an ensemble whose steps each answer once. PURE; `ensemble` goes every other way.

What runs after what is then known before a request comes: a *plan* for each set of wanted outputs, made once, in which
tensors are places in a list. What is left for a request is to fill the list, and to count for each step how many
tensors of other steps it still lacks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, TypeVar

from serve.scheduling.ensemble import ABSENT, Absent

if TYPE_CHECKING:
    from collections.abc import Sequence

    from serve.scheduling.ensemble import Graph

T = TypeVar("T", bound="tuple[Any, ...]")


class PlannedStep:
    """A step of a plan.

    Attributes:
        index: which one of the ensemble it is.
        inputs: (input of its model, place of the tensor).
        outputs: output of its model → (place of the tensor, the steps that wait for it).
    """

    def __init__(self, index: int, inputs: tuple[tuple[str, int], ...]) -> None:
        self.index = index
        self.inputs = inputs
        self.outputs: dict[str, tuple[int, list[PlannedStep]]] = {}

    def __repr__(self) -> str:
        return f"<PlannedStep {self.index}>"


class Plan:
    """What runs for some outputs, and what of it waits for what.

    Attributes:
        places: tensor → its place.
        wanted: the outputs, and their places.
        first: the steps that wait for no other.
        lacking: for each step of the ensemble, how many tensors of others it waits for.
    """

    def __init__(self, graph: Graph, inputs: Sequence[str], wanted: Sequence[str]) -> None:
        needed = sorted(graph.needed(wanted))
        made = [tensor for index in needed for tensor in graph.steps[index].outputs.values()]
        self.places = {tensor: place for place, tensor in enumerate(dict.fromkeys((*inputs, *made)))}
        self.wanted = tuple((name, self.places[name]) for name in wanted)
        self.lacking = [0] * len(graph.steps)
        steps = {index: self._step(graph, index) for index in needed}
        for index in needed:
            for name, tensor in graph.steps[index].outputs.items():
                waiting = [steps[other] for other in needed if tensor in graph.steps[other].inputs.values()]
                steps[index].outputs[name] = self.places[tensor], waiting
                for step in waiting:
                    self.lacking[step.index] += 1
        self.first = [steps[index] for index in needed if not self.lacking[index]]

    def _step(self, graph: Graph, index: int) -> PlannedStep:
        return PlannedStep(index, tuple((name, self.places[t]) for name, t in graph.steps[index].inputs.items()))


class Course(Generic[T]):
    """One request on its way.

    Attributes:
        tensors: those that exist, in their places; `ABSENT` where one does not, or not yet.

    Args:
        plan: the way.
        given: the tensors that came with the request, in the order of the plan's inputs; `ABSENT` for one left out.
    """

    def __init__(self, plan: Plan, given: Sequence[T | Absent]) -> None:
        self.tensors: list[T | Absent] = [*given, *[ABSENT] * (len(plan.places) - len(given))]
        self._lacking = plan.lacking.copy()

    def came(self, step: PlannedStep, outputs: Sequence[T]) -> list[PlannedStep]:
        """A step has answered: the steps that can run now, without what it did not return.

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
                if not lacking[index]:
                    ready.append(consumer)
        return ready
