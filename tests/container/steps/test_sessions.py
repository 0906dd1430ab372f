"""Which stateful sessions there are, and until when."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from container.steps import sessions
from container.steps.sessions import Sessions
from model_handlers.errors import Kind, MmeError


def table(seconds=10.0):
    """Sessions whose ids count."""
    return Sessions(seconds, itertools.count(1).__next__)


def refused(table, *args):
    """Why there is no such session."""
    with pytest.raises(MmeError) as caught:
        table.use(*args)
    assert caught.value.kind is Kind.INVALID_ARGUMENT
    return caught.value.message


def test_a_session_is_its_models_alone():
    """An id is good for the model that it was created for."""
    known = table()
    session = known.begin("m", 0)

    assert known.use(session.id, "m", 1) is session
    assert refused(known, session.id, "n", 1).startswith("session '1' of model 'n' is not there")
    assert (session.correlation_id(text=True), session.correlation_id(text=False)) == ("1", 1)


def test_a_session_that_lies_unused_is_over():
    """From its last use on; not while somebody waits for an answer."""
    known = table(10)
    one, two = known.begin("m", 0), known.begin("m", 0)
    known.leave(one, 1)
    assert known.next_expiry() == 10
    assert known.expire(10.5) == []
    assert known.next_expiry() == 11
    known.use(one.id, "m", 10.9)
    known.leave(one, 10.9)
    assert known.expire(20.8) == []
    assert known.expire(20.9) == [one]
    known.leave(two, 25)
    assert known.expire(35) == [two]
    assert known.next_expiry() is None
    assert len(known) == 0


def test_sessions_end_with_their_model():
    """Those that it knows of; others stay."""
    known = table()
    one, two, new = known.begin("m", 0), known.begin("n", 0), known.begin("m", 0)
    one.begun = two.begun = True
    known.end_begun("m")

    refused(known, one.id, "m", 0)
    with pytest.raises(MmeError, match="session '1' of model 'm' is not there"):
        known.check(one)
    known.check(new)
    assert known.use(two.id, "n", 0) is two
    known.leave(one, 0)  # its answer comes later
    known.end(one)


def test_there_are_not_any_number_of_sessions(monkeypatch):
    """Whoever creates without end is told to close some."""
    monkeypatch.setattr(sessions, "MOST", 2)
    known = table()
    first = known.begin("m", 0)
    known.begin("m", 0)
    with pytest.raises(MmeError) as caught:
        known.begin("m", 0)
    assert caught.value.kind is Kind.UNAVAILABLE
    known.end(first)
    known.begin("m", 0)


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("begin")),
            st.tuples(st.sampled_from(["use", "leave", "end"]), st.integers(1, 6)),
            st.tuples(st.just("wait"), st.integers(1, 12)),
        )
    )
)
def test_whatever_is_done_a_session_lives_while_it_is_used(actions):
    """Against a table that looks at every session each time."""
    known, now, model = table(10), 0, {}
    for name, *rest in actions:
        number = rest[0] if rest else 0
        if name == "begin":
            session = known.begin("m", now)
            model[session.id] = [session, now, 1]
        elif name == "wait":
            now += number
            over = {each[0] for each in model.values() if not each[2] and each[1] + 10 <= now}
            for each in model.values():
                if each[2] and each[1] + 10 <= now:
                    each[1] = now
            assert set(known.expire(now)) == over
            model = {key: each for key, each in model.items() if each[0] not in over}
        elif str(number) in model:
            entry = model[str(number)]
            if name == "use":
                assert known.use(str(number), "m", now) is entry[0]
                entry[1:] = [now, entry[2] + 1]
            elif name == "leave" and entry[2]:
                known.leave(entry[0], now)
                entry[1:] = [now, entry[2] - 1]
            elif name == "end":
                known.end(entry[0])
                del model[str(number)]
        else:
            assert name in {"leave", "end"} or refused(known, str(number), "m", now)
    assert len(known) == len(model)
