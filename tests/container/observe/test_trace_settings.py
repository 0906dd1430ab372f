"""What is traced, as Triton's clients change it."""

from __future__ import annotations

import pytest

from container.observe.trace_settings import TraceControl, TraceSettings
from model_handlers.errors import Kind, MmeError

FIRST = TraceSettings(on=True, rate=50, count=-1)


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        ({}, TraceSettings(on=True, rate=7, count=3)),
        ({"trace_level": ["OFF"]}, TraceSettings(on=False, rate=7, count=3)),
        ({"trace_level": "OFF"}, TraceSettings(on=False, rate=7, count=3)),
        ({"trace_level": []}, TraceSettings(on=True, rate=7, count=3)),
        ({"trace_level": None, "trace_rate": None, "trace_count": None}, FIRST),
        ({"trace_rate": "1", "trace_count": 0}, TraceSettings(on=True, rate=1, count=0)),
        ({"trace_mode": "opentelemetry", "log_frequency": "0", "trace_file": ""}, TraceSettings(True, 7, 3)),
    ],
)
def test_what_is_wanted_is_changed_and_the_rest_stays(wanted, expected):
    """Texts and numbers alike; null is what there was at first."""
    assert TraceSettings(on=True, rate=7, count=3).changed(wanted, FIRST) == expected


@pytest.mark.parametrize(
    ("wanted", "kind", "words"),
    [
        ({"trace_rate": "x"}, Kind.INVALID_ARGUMENT, "Unable to parse 'trace_rate', got: x"),
        ({"trace_rate": "-1"}, Kind.INVALID_ARGUMENT, "value is out of range"),
        ({"trace_count": "-2"}, Kind.INVALID_ARGUMENT, "Unable to parse 'trace_count'. Expecting value >= -1, got:-2"),
        ({"trace_count": str(2**31)}, Kind.INVALID_ARGUMENT, "value is out of range"),
        ({"trace_count": []}, Kind.INVALID_ARGUMENT, "Unable to parse 'trace_count'"),
        ({"trace_level": [{}]}, Kind.INVALID_ARGUMENT, "must be TIMESTAMPS, TENSORS, both or OFF, got [{}]"),
        (
            {"trace_level": ["OFF", "TIMESTAMPS"]},
            Kind.INVALID_ARGUMENT,
            "Expect only one trace level 'OFF' is specified",
        ),
        ({"trace_file": "/x"}, Kind.UNSUPPORTED, "trace file location can not be updated through network protocol"),
        ({"trace_file": None}, Kind.UNSUPPORTED, "trace file location can not be updated through network protocol"),
        ({"log_frequency": "x"}, Kind.INVALID_ARGUMENT, "Unable to parse 'log_frequency', got: x"),
        ({"log_frequency": "5"}, Kind.UNSUPPORTED, "log_frequency is '0' here"),
        ({"trace_mode": "triton"}, Kind.UNSUPPORTED, "trace_mode is 'opentelemetry' here"),
        ({"rate": "1"}, Kind.INVALID_ARGUMENT, "trace setting 'rate' is none of trace_level, trace_rate"),
    ],
)
def test_what_can_not_be_is_refused_in_tritons_words(wanted, kind, words):
    """Where it has any."""
    with pytest.raises(MmeError) as raised:
        FIRST.changed(wanted, FIRST)
    assert raised.value.kind is kind
    assert words in raised.value.message


def test_traces_in_files_are_written_as_often_as_clients_want():
    """And are told with their file; neither it nor the mode can be changed."""
    first = TraceSettings(on=True, mode="triton", file="/t.json", frequency=5)
    told = first.changed({"log_frequency": "7", "trace_mode": "triton", "trace_file": "/t.json"}, first).as_document()
    assert (told["log_frequency"], told["trace_mode"], told["trace_file"]) == ("7", "triton", "/t.json")
    assert first.changed({"log_frequency": None}, first).frequency == 5
    with pytest.raises(MmeError, match="trace_mode is 'triton' here"):
        first.changed({"trace_mode": "opentelemetry"}, first)


@pytest.mark.parametrize(
    ("levels", "told"),
    [(["TIMESTAMPS"], "TIMESTAMPS"), (["TENSORS"], "OFF"), (["TIMESTAMPS", "TENSORS"], "TIMESTAMPS"), (["OFF"], "OFF")],
)
def test_the_level_of_tensors_is_without_effect(levels, told, caplog):
    """Of the server or a model alone, wherever traces go; the log says so, and null gives back what there was."""
    control = TraceControl(TraceSettings(on=False), sends=True)
    for model in ("m", ""):
        control.change(model, {"trace_level": levels})
        assert control.of(model).as_document()["trace_level"] == [told]
        control.change(model, {"trace_level": None})
        assert control.of(model).as_document()["trace_level"] == ["OFF"]
    assert caplog.text.count("TENSORS is without effect") == 2 * ("TENSORS" in levels)
    assert not control.by_model


def test_a_model_has_what_the_server_has_but_for_what_it_has_itself():
    """Also when the server's changes later; null gives it back."""
    control = TraceControl(FIRST, sends=True)
    control.change("m", {"trace_rate": "2", "trace_mode": "opentelemetry"})
    control.change("", {"trace_count": "9"})
    assert control.of("m") == TraceSettings(on=True, rate=2, count=9)
    assert control.of("other") == control.of("") == TraceSettings(on=True, rate=50, count=9)
    control.change("m", {"trace_level": ["OFF"], "trace_rate": None})
    assert control.of("m") == TraceSettings(on=False, rate=50, count=9)
    assert control.by_model
    control.change("m", {"trace_level": None})
    assert not control.by_model
    control.change("", {"trace_count": None})
    assert control.of("m") == FIRST


def test_a_change_that_is_refused_changes_nothing():
    """Of a model as of the server."""
    control = TraceControl(FIRST, sends=True)
    control.change("m", {"trace_rate": "2"})
    for model in ("", "m"):
        before = control.of(model)
        with pytest.raises(MmeError):
            control.change(model, {"trace_count": "1", "trace_rate": "x"})
        assert control.of(model) == before


def test_rates_and_counts_are_of_whoever_has_them():
    """A model's own requests do not count with the server's; what the client says goes before a rate."""
    control = TraceControl(TraceSettings(on=True, rate=2, count=-1), sends=True)
    control.change("m", {"trace_rate": "3", "trace_count": "2"})
    assert [control.traces("m", None) for _ in range(12)] == [False, False, True, False, False, True] + [False] * 6
    assert control.of("m").count == 0
    assert not control.traces("m", True)
    assert [control.traces("other", None) for _ in range(4)] == [False, True, False, True]
    assert control.traces("other", True)
    assert not control.traces("", False)
    control.change("", {"trace_level": "OFF"})
    assert control.on is False or control.of("m").on is False
    control.change("m", {"trace_level": "TIMESTAMPS", "trace_count": None, "trace_rate": "1"})
    assert control.on
    assert control.traces("m", None)
    assert not control.traces("other", True)


def test_a_rate_of_nothing_leaves_those_whose_clients_say_so():
    """As Triton's has it for those that bring a context."""
    control = TraceControl(TraceSettings(on=True, rate=2, count=-1), sends=True)
    control.change("", {"trace_rate": "0"})
    assert control.server.as_document()["trace_rate"] == "0"
    assert [control.traces("", None) for _ in range(3)] == [False] * 3
    assert control.traces("", True)
    assert not control.traces("", False)


def test_a_server_that_sends_no_traces_refuses_to_trace():
    """What does not trace may be changed all the same, as Triton lets its clients."""
    control = TraceControl(TraceSettings(), sends=False)
    control.change("", {"trace_rate": "5"})
    control.change("m", {"trace_level": ["OFF"]})
    assert control.of("m").rate == 5
    for model in ("", "m"):
        with pytest.raises(MmeError, match="MME_TRACE_URL") as raised:
            control.change(model, {"trace_level": ["TIMESTAMPS"]})
        assert raised.value.kind is Kind.UNSUPPORTED


def test_a_server_that_traces_nothing_says_so(server):
    """Triton's clients read it; what would trace is refused with what is missing."""
    unknown = server.http("GET", "/v2/models/unheard/trace/setting")
    assert (unknown.status, unknown.error) == (400, "Request for unknown model : unheard")
    assert server.http("GET", "/v2/trace/setting").json["trace_level"] == ["OFF"]
    assert server.http("GET", "/v2/models/twice/trace/setting").json["trace_level"] == ["OFF"]
    reply = server.http("POST", "/v2/trace/setting", {}, b'{"trace_level": ["TIMESTAMPS"]}')
    assert (reply.status, "MME_TRACE_URL" in reply.json["error"]) == (501, True)
