"""The states of a target model and the only ways between them, as one literal table. PURE.

The states carry Triton's names, since the repository index shows them. *Registered* is not a state but a place in the
engine's table: a registered model that was evicted is UNAVAILABLE and comes back with its next request.
"""

from __future__ import annotations

from enum import Enum


class State(Enum):
    """Where a target model stands."""

    UNAVAILABLE = "UNAVAILABLE"
    LOADING = "LOADING"
    READY = "READY"
    UNLOADING = "UNLOADING"


class Event(Enum):
    """What can happen to a target model."""

    LOAD = "load"
    LOADED = "loaded"
    FAILED = "failed"
    UNLOAD = "unload"
    UNLOADED = "unloaded"


TRANSITIONS: dict[tuple[State, Event], State] = {
    (State.UNAVAILABLE, Event.LOAD): State.LOADING,
    (State.LOADING, Event.LOADED): State.READY,
    (State.LOADING, Event.FAILED): State.UNAVAILABLE,
    (State.READY, Event.UNLOAD): State.UNLOADING,
    (State.UNLOADING, Event.UNLOADED): State.UNAVAILABLE,
}


def step(state: State, event: Event) -> State:
    """The state after `event`.

    Raises:
        ValueError: the event can't happen in that state, which is a bug of the caller.
    """
    try:
        return TRANSITIONS[state, event]
    except KeyError:
        raise ValueError(f"a model that is {state.value} can't be told '{event.value}'") from None
