"""What load and unload requests may ask for: parameters in, an override or an error's sentence out."""

import base64

import pytest

from container.control.operations import check_name, load_error, load_override, unload_dependents
from model_handlers.errors import Kind, MmeError
from model_handlers.model_calls import Override


def b64(content):
    """As a client sends a file."""
    return base64.b64encode(content).decode()


@pytest.mark.parametrize(
    ("parameters", "override"),
    [
        ({}, None),
        ({"config": "{}"}, Override("{}")),
        (
            {"config": "{}", "file:1/model.onnx": b64(b"model"), "file:labels.txt": b64(b"")},
            Override("{}", {"file:1/model.onnx": b"model", "file:labels.txt": b""}),
        ),
        ({"file:1/model.onnx": b64(b"model")}, Override("", {"file:1/model.onnx": b"model"})),
    ],
)
def test_overrides_are_understood(parameters, override):
    """The configuration as text, files as bytes by their parameter's name."""
    assert load_override(parameters, allowed=True) == override


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"other": "x"}, "Unrecognized load parameter 'other' with type 'STRING'"),
        ({"other": 1}, "Unrecognized load parameter 'other' with type 'INT'"),
        ({"other": True}, "Unrecognized load parameter 'other' with type 'BOOL'"),
        ({"other": 1.5}, "Unrecognized load parameter 'other' with type 'DOUBLE'"),
        ({"config": ""}, "load parameter 'config' is empty: leave it out for the model's own configuration"),
        ({"config": {"max_batch_size": 1}}, "Unrecognized load parameter 'config' with type 'dict'"),
        ({"file:1/model.onnx": "not base64!"}, "file parameter 'file:1/model.onnx' must be the file in base64"),
        ({"file:1/model.onnx": 3}, "file parameter 'file:1/model.onnx' must be the file in base64"),
    ],
)
def test_what_is_no_parameter_is_refused(parameters, words):
    """By its name and type, in Triton's words where it has any."""
    with pytest.raises(MmeError) as caught:
        load_override(parameters, allowed=True)
    assert (caught.value.kind, caught.value.message) == (Kind.INVALID_ARGUMENT, words)


@pytest.mark.parametrize(
    ("parameters", "named"),
    [
        ({"config": "{}"}, "config"),
        ({"config": ""}, "config"),
        ({"file:1/model.py": b64(b"import os")}, "file:1/model.py"),
        ({"other": 1, "file:1/model.py": "not base64!"}, "file:1/model.py"),
    ],
)
def test_overrides_need_a_setting(parameters, named):
    """Without it they are refused before anything of them is read, and the sentence says which setting it is."""
    with pytest.raises(MmeError) as caught:
        load_override(parameters, allowed=False)
    assert caught.value.kind is Kind.FORBIDDEN
    assert caught.value.message.startswith(f"load parameter '{named}' is not allowed")
    assert "MME_ALLOW_LOAD_OVERRIDES=true" in caught.value.message


def test_a_load_without_overrides_needs_no_setting():
    """Which is what nearly all loads are."""
    assert load_override({}, allowed=False) is None


@pytest.mark.parametrize("name", ["", "..", "../m", "a/../m", "/m", "m/", "a//m", ".", "m\0"])
def test_a_name_that_leads_elsewhere_is_refused(name):
    """Before anybody looks for it; slashes themselves are right, archives have them in their names."""
    check_name("prefix/m.tar.gz")
    with pytest.raises(MmeError, match="Model name cannot be empty") as caught:
        check_name(name)
    assert caught.value.kind is Kind.INVALID_ARGUMENT


def test_dependents_are_a_truth_value():
    """Nothing else is taken for one."""
    assert unload_dependents({}) is False
    assert unload_dependents({"unload_dependents": True}) is True
    for wrong in ({"unload_dependents": "true"}, {"dependents": True}):
        with pytest.raises(MmeError, match="Unable to parse '"):
            unload_dependents(wrong)


@pytest.mark.parametrize(
    ("kind", "told", "sentence"),
    [
        (Kind.INVALID_MODEL, Kind.INVALID_MODEL, "load failed for model 'm': bad"),
        (Kind.UNSUPPORTED, Kind.INVALID_MODEL, "load failed for model 'm': bad"),
        (Kind.UNKNOWN_MODEL, Kind.INTERNAL, "failed to load 'm', failed to poll from model repository"),
        (Kind.OUT_OF_MEMORY, Kind.OUT_OF_MEMORY, "bad"),
        (Kind.INVALID_ARGUMENT, Kind.INVALID_ARGUMENT, "bad"),
        (Kind.UNAVAILABLE, Kind.UNAVAILABLE, "bad"),
    ],
)
def test_a_failed_load_reads_as_in_triton(kind, told, sentence):
    """But for what is not the model's fault: memory, the request, the moment."""
    error = load_error("m", MmeError(kind, "bad"))
    assert (error.kind, error.message) == (told, sentence)


@pytest.mark.parametrize(("kind", "code"), [(Kind.INVALID_MODEL, "Internal"), (Kind.UNSUPPORTED, "Unsupported")])
def test_a_version_that_does_not_load_is_named(kind, code):
    """With what Triton calls the error."""
    wrong = MmeError(kind, "bad")
    wrong.version = 7
    assert (
        load_error("m", wrong).message == f"load failed for model 'm': version 7 is at UNAVAILABLE state: {code}: bad;"
    )
