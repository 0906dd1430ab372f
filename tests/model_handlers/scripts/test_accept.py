"""Which content type an answer gets."""

import pytest

from model_handlers.scripts.content_types import preferred, presumed

WRITTEN = ("application/json", "text/csv", "application/x-npy")


@pytest.mark.parametrize(
    ("accept", "expected"),
    [
        ("application/json", "application/json"),
        ("text/csv", "text/csv"),
        ("TEXT/CSV; charset=utf-8", "text/csv"),
        ("image/png, text/csv", "text/csv"),
        ("text/csv,application/json", "text/csv"),
        ("text/csv;q=0.1, application/json;q=0.9", "application/json"),
        ("text/csv;q=0.5,application/x-npy;q=0.5", "text/csv"),
        ("*/*", "application/x-npy"),
        ("text/html, */*;q=0.1", "application/x-npy"),
        ("text/*", "text/csv"),
        ("application/*", "application/x-npy"),
        ("image/png", None),
        ("application/json;q=0", None),
        ("application/json;q=much", None),
        (",", None),
    ],
)
def test_the_first_of_the_best_liked_types_that_can_be_written(accept, expected):
    """Lists, q-values and wildcards decide; what is left open is decided by the default."""
    assert preferred(accept, WRITTEN, "application/x-npy") == expected


def test_a_default_that_cannot_be_written_is_not_taken():
    """A client that likes all alike gets the first that can be written."""
    assert preferred("*/*", WRITTEN, "image/png") == "application/json"
    assert preferred("text/*", WRITTEN, "image/png") == "text/csv"


@pytest.mark.parametrize(
    ("accept", "expected"),
    [
        ("application/json; charset=utf-8", "application/json; charset=utf-8"),
        ("image/png", "image/png"),
        ("image/png;q=0.5, text/plain", "text/plain"),
        ("*/*;q=0.5, text/plain;q=0.1", "text/plain"),
        ("*/*;q=0.8", "text/csv"),
        ("image/*", "text/csv"),
    ],
)
def test_an_answer_that_does_not_say_what_it_is_is_what_was_asked_for(accept, expected):
    """The one type of the header as it stands, of several the best liked, the default where there is none."""
    assert presumed(accept, "text/csv") == expected
