"""A target model in memory: what one archive or one repository folder turned into, all its served versions."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from model_handlers.base import Footprint, total
from model_handlers.errors import Kind, MmeError
from model_handlers.system import heap
from serve.model.ensemble import EnsembleModel
from serve.model.model import Model

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from serve.model.warmup import Labels
    from serve.weights.forms import TargetForms

AnyModel = Model | EnsembleModel


class Target:
    """The loaded versions of one target model.

    Attributes:
        name: the name it is served under.
        versions: version number → model.
        members: the other models of its archive, by the names that it calls them by.
        forms: what it was loaded from; None where that is the models' files.
        footprint: what it takes, without its members; of one in processes of its own, growth included.
        at_load: that, when it was loaded.
        grown: what the executions of it and its members took beyond that of the serving process and of GPUs.
        closed: whether all of that was given back.
        labels: output → the names of its classes, where there are any.

    Args:
        started: told when it serves.
        left: told when it was closed, so that freed memory goes back to the system.
    """

    def __init__(
        self,
        name: str,
        versions: dict[int, AnyModel],
        members: dict[str, Target] | None = None,
        *,
        forms: TargetForms | None = None,
        footprint: Footprint | None = None,
        labels: Labels | None = None,
        started: Callable[[Target], None] | None = None,
        left: Callable[[], None] = heap.trim,
    ) -> None:
        self.name = name
        self.labels = labels or {}
        self.versions = versions
        self.members = members or {}
        self.latest = versions[max(versions)]
        self.forms = forms
        self.footprint = self.at_load = footprint or Footprint()
        self.grown = Footprint()
        self.closed = False
        self._started = started
        self._left = left

    def __repr__(self) -> str:
        return f"<Target {self.name}: versions {sorted(self.versions)}>"

    def version(self, number: int | None) -> AnyModel:
        """One version, the latest if none is named.

        Raises:
            MmeError: UNKNOWN_VERSION.
        """
        if number is None:
            return self.latest
        model = self.versions.get(number)
        if model is None:
            raise MmeError(
                Kind.UNKNOWN_VERSION,
                f"Request for unknown model: '{self.name}' version {number} is not found; "
                f"served versions are {', '.join(map(str, sorted(self.versions)))}",
            )
        return model

    def start(self) -> None:
        """Tell whoever wants to know that it serves."""
        if self._started is not None:
            self._started(self)

    @property
    def apart(self) -> bool:
        """Whether it lives in processes of its own, without its members."""
        return any(model.apart for model in self.versions.values())

    def is_memory_only(self) -> bool:
        """Whether it and its members hold memory and nothing else, which goes with the process."""
        return all(model.memory_only for model in self.models())

    @property
    def executes_here(self) -> bool:
        """Whether it, or a member, executes in the serving process."""
        return any(not part.apart for part in self.parts())

    def known(self) -> Footprint:
        """What it takes with its members without `grown`: of the host, in the serving process alone."""
        return total(
            [Footprint(0 if part.apart else part.footprint.host, part.footprint.devices) for part in self.parts()]
        )

    def growth(self) -> Footprint:
        """What it takes with its members beyond what they took when they were loaded."""
        own = sum(max(part.footprint.host - part.at_load.host, 0) for part in self.parts() if part.apart)
        return self.grown + Footprint(own)

    def memory(self) -> Footprint:
        """What its processes take now, without its members."""
        return sum((model.memory() for model in self.versions.values()), Footprint())

    def is_down(self) -> bool:
        """Whether any version, or a member, will execute nothing for a while."""
        return any(model.readiness.is_down() for model in self.models())

    def refuse_waiting(self) -> None:
        """Tell everybody who waits for any version."""
        for model in self.models():
            model.refuse_waiting()

    def parts(self) -> Iterator[Target]:
        """Itself, and its members."""
        yield self
        for member in self.members.values():
            yield from member.parts()

    def models(self) -> Iterator[AnyModel]:
        """Every version of it and of its members."""
        for part in self.parts():
            yield from part.versions.values()

    def takes(self) -> Footprint:
        """What it takes with its members."""
        return sum((part.footprint for part in self.parts()), self.grown)

    def close(self) -> None:
        """Give all memory back to the system."""
        with contextlib.ExitStack() as versions:  # each is closed, though another raises
            versions.callback(self._left)
            for model in self.models():
                versions.callback(model.close)
        self.closed = True
