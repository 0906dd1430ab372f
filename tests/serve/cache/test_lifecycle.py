"""The states of a name: one table, which docs/cache.md draws."""

import re
from itertools import product
from pathlib import Path

import pytest

from serve.cache.entry import TRANSITIONS, Event, State, transition

DRAWN = re.compile(r"^ +(\w+) --> (\w+): (.+)$", re.MULTILINE)


def drawn():
    """The ways of the drawing, as the table has them."""
    text = Path("docs/cache.md").read_text().partition("stateDiagram")[2].partition("```")[0]
    return [((State(before), Event(event)), State(after)) for before, after, event in DRAWN.findall(text)]


def test_the_drawing_of_the_states_is_the_table():
    """Each way is drawn once, and no other."""
    assert len(drawn()) == len(TRANSITIONS)
    assert dict(drawn()) == TRANSITIONS


@pytest.mark.parametrize(("state", "event"), sorted(set(product(State, Event)) - TRANSITIONS.keys(), key=str))
def test_what_can_not_happen_is_refused(state, event):
    """An event that is in no way of the table is a bug, which names the state and the event."""
    with pytest.raises(ValueError, match=f"a model that is {state.value} can't be told '{event.value}'"):
        transition(state, event)


def test_any_state_can_be_told_to_unload():
    """And whatever is on its way out then is unloaded in the end, and comes back with no request."""
    for state in State:
        assert transition(state, Event.UNLOAD) in {State.UNLOADING, State.UNLOADED}
    assert transition(State.UNLOADING, Event.CLOSE) is State.UNLOADED


def test_no_state_is_a_dead_end():
    """From each state every other can be reached but the first, so a model that failed or left can come back."""
    for begin in State:
        reached, seen = [begin], {begin}
        for state in reached:
            follow = {after for (before, _), after in TRANSITIONS.items() if before is state} - seen
            reached += follow
            seen |= follow
        assert seen >= set(State) - {State.ABSENT}


def test_states_are_shown_under_the_names_of_the_repository_index():
    """Triton's, which say whether a model answers, and not whether it comes back."""
    shown = {name: {state for state in State if state.shown == name} for name in {state.shown for state in State}}
    assert shown["READY"] == {state for state in State if state.serves} == {State.READY, State.RELOADING}
    assert shown["LOADING"] == {State.LOADING, State.RETURNING}
    assert shown["UNLOADING"] == {State.UNLOADING, State.EVICTING}
    assert shown["UNAVAILABLE"] == {State.ABSENT, State.EVICTED, State.UNLOADED, State.FAILED}
