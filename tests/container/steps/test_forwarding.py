"""Headers that become parameters of requests."""

from __future__ import annotations

import pytest

from container.http1.rules import joined
from container.steps.access import Forwarding, forwarding
from model_handlers.errors import Kind, MmeError
from serve.request import InferenceRequest, Layout

SENT = [(b"Host", b"h"), (b"X-Tenant", b"a "), (b"x-user", b"b"), (b"Other", b"c")]


def added(pattern, headers, parameters=None):
    """The parameters of a request that came with such headers."""
    request = InferenceRequest(Layout((), ()), [], lambda *_: None, parameters=parameters)
    Forwarding(pattern).add(request, headers)
    return request.parameters


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("x-.*", {"X-Tenant": "a", "x-user": "b"}),
        ("TENANT", {"X-Tenant": "a"}),
        ("(?-i)x-.*", {"x-user": "b"}),
        ("(?-i)X-.*", {"X-Tenant": "a"}),
        ("^user$", None),
    ],
)
def test_names_that_match_are_handed_on_as_they_were_sent(pattern, expected):
    """Anywhere in the name, whatever the case of its letters unless the pattern says that it counts."""
    assert added(pattern, joined(SENT)) == expected


@pytest.mark.parametrize("encoding", ["utf-8", "latin-1"])
def test_values_are_texts_of_any_language(encoding):
    """In UTF-8, or in what it was before."""
    assert added("x-city", joined([(b"x-city", "Zürich".encode(encoding))])) == {"x-city": "Zürich"}


def test_headers_win_over_the_body_and_leave_its_parameters_alone():
    """What a proxy says is not for clients to say; the parameters of another request of the same form stay."""
    own = {"x-user": "me", "kept": 1}
    assert added("x-user", joined(SENT), own) == {"x-user": "b", "kept": 1}
    assert own == {"x-user": "me", "kept": 1}
    assert added("x-user", {"x-user": "b"}) == {"x-user": "b"}


@pytest.mark.parametrize("name", ["sequence_id", "Priority", "timeout", "headers", "binary_data_output", "triton_x"])
def test_a_header_called_as_what_has_a_meaning_is_refused(name):
    """In Triton's words."""
    with pytest.raises(MmeError) as raised:
        added(".*", joined([(name.encode(), b"1")]))
    assert raised.value.kind is Kind.INVALID_ARGUMENT
    assert raised.value.message == f"Header '{name}' is reserved for Triton usage and cannot be forwarded."


def test_no_pattern_hands_on_nothing():
    """And costs nothing."""
    assert forwarding("") is None
