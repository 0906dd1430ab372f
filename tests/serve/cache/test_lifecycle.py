"""The states of a target model."""

from itertools import product

import pytest

from serve.cache.entry import TRANSITIONS, Event, State, transition

WAYS = {
    (State.UNAVAILABLE, Event.LOAD): State.LOADING,
    (State.LOADING, Event.LOADED): State.READY,
    (State.LOADING, Event.FAILED): State.UNAVAILABLE,
    (State.READY, Event.UNLOAD): State.UNLOADING,
    (State.UNLOADING, Event.UNLOADED): State.UNAVAILABLE,
}


@pytest.mark.parametrize(("state", "event"), list(product(State, Event)), ids=lambda value: value.value)
def test_every_state_answers_every_event(state, event):
    """Five ways lead from state to state; any other event is a bug, which names the state and the event."""
    if (state, event) in WAYS:
        assert transition(state, event) is WAYS[state, event]
    else:
        with pytest.raises(ValueError, match=f"a model that is {state.value} can't be told '{event.value}'"):
            transition(state, event)


def test_no_state_is_a_dead_end():
    """From each state every other can be reached, so a model that failed or left can come back."""
    for begin in State:
        reached, seen = [begin], {begin}
        for state in reached:
            follow = {after for (before, _), after in TRANSITIONS.items() if before is state} - seen
            reached += follow
            seen |= follow
        assert seen == set(State)


def test_states_carry_the_names_of_the_repository_index():
    """The index shows them as they are."""
    assert {state.value for state in State} == {"UNAVAILABLE", "LOADING", "READY", "UNLOADING"}
