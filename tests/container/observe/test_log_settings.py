"""What is logged, as Triton's clients change it."""

from __future__ import annotations

import logging

import pytest

from container.observe.logs import LogSettings
from container.settings import LogFormat
from model_handlers.errors import Kind, MmeError

FIRST = LogSettings.of_level("info", LogFormat.JSON)
LEVELS = {name: logging.getLevelNamesMapping()[name.upper()] for name in ("debug", "info", "warning", "error")}


def written(settings):
    """The levels of which lines are written."""
    return [name for name, level in LEVELS.items() if settings.lets_through(level)]


@pytest.mark.parametrize("level", [*LEVELS, "critical"])
def test_a_level_is_a_row_of_switches(level):
    """Everything from there on is written; what is critical always is."""
    settings = LogSettings.of_level(level, LogFormat.TEXT)
    names = [*LEVELS, "critical"]
    assert written(settings) == [name for name in LEVELS if names.index(name) >= names.index(level)]
    assert settings.level == logging.getLevelNamesMapping()[level.upper()]
    assert settings.lets_through(logging.CRITICAL)


@pytest.mark.parametrize(
    ("wanted", "expected", "level"),
    [
        ({"log_info": False}, ["warning", "error"], logging.WARNING),
        ({"log_warning": False}, ["info", "error"], logging.INFO),
        ({"log_warnings": False, "log_errors": False}, ["info"], logging.INFO),
        ({"log_verbose_level": 2, "log_info": False}, ["debug", "warning", "error"], logging.DEBUG),
        ({"log_info": False, "log_warning": False, "log_error": False}, [], logging.CRITICAL),
        ({"log_file": "", "log_format": "json"}, ["info", "warning", "error"], logging.INFO),
    ],
)
def test_each_switch_is_one_of_its_own(wanted, expected, level):
    """Under Triton's names, and those that its pages have."""
    settings = FIRST.changed(wanted)
    assert written(settings) == expected
    assert settings.level == level


def test_what_is_told_can_be_told_back():
    """The document of some settings makes them again; null leaves them as they are, as Triton does."""
    document = {
        "log_file": "",
        "log_info": False,
        "log_warning": True,
        "log_error": False,
        "log_verbose_level": 3,
        "log_format": "ISO8601",
    }
    other = FIRST.changed(document)
    assert other.as_document() == document
    assert other.changed(dict.fromkeys(document)).as_document() == document


@pytest.mark.parametrize(
    ("wanted", "kind", "words"),
    [
        ({"log_format": "xml"}, Kind.UNAVAILABLE, "invalid argument for --log_format, got: xml"),
        ({"log_format": "auto"}, Kind.UNAVAILABLE, "there are text, json, default, ISO8601"),
        ({"log_format": ["json"]}, Kind.INVALID_ARGUMENT, "log setting 'log_format' must be a text, got ['json']"),
        ({"log_file": "/x"}, Kind.UNSUPPORTED, "log file location can not be updated through network protocol"),
        ({"log_info": 1}, Kind.INVALID_ARGUMENT, "log setting 'log_info' must be true or false, got 1"),
        ({"log_warnings": "no"}, Kind.INVALID_ARGUMENT, "log setting 'log_warnings' must be true or false, got 'no'"),
        ({"log_verbose_level": -1}, Kind.INVALID_ARGUMENT, "must be a number, 0 or more, got -1"),
        ({"log_verbose_level": True}, Kind.INVALID_ARGUMENT, "must be a number, 0 or more, got True"),
        ({"log_verbose_level": 2**32}, Kind.INVALID_ARGUMENT, "must be a number, 0 or more, got 4294967296"),
        ({"log_level": 1}, Kind.INVALID_ARGUMENT, "log setting 'log_level' is none of log_file, log_info, log_warning"),
    ],
)
def test_what_can_not_be_is_refused(wanted, kind, words):
    """In Triton's words where it has any, else by the setting's name."""
    with pytest.raises(MmeError) as raised:
        FIRST.changed({"log_info": False} | wanted)
    assert raised.value.kind is kind
    assert words in raised.value.message
