"""How a script is imported, what is asked of it before it serves, and what its configuration looks like."""

import sys

import pytest

from model_handlers.config.model_config import ModelConfig
from model_handlers.errors import Kind, MmeError
from model_handlers.scripts.host import ScriptHandler


def test_a_model_fn_that_fails_says_why(scripts):
    """The error of the load has the exception and its lines."""
    error = scripts.refused("def model_fn(model_dir):\n    open(model_dir + '/model.joblib')\n")

    assert error.kind is Kind.INVALID_MODEL
    assert "model 'm' failed while model_fn ran: FileNotFoundError" in error.message
    assert "code/inference.py(2): model_fn" in error.message


def test_a_model_fn_without_memory_is_told_as_such(scripts):
    """A load that finds no memory makes room elsewhere."""
    assert scripts.refused("def model_fn(model_dir): raise MemoryError").kind is Kind.OUT_OF_MEMORY


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        ("def f(:\n", "line 1"),
        ("import nowhere_at_all\n", "ModuleNotFoundError"),
        ("import nowhere_at_all\n", "let the model bring it: by a requirements.txt, or EXECUTION_ENV_PATH"),
    ],
)
def test_a_script_that_cannot_be_imported_says_why(scripts, source, sentence):
    """Errors of syntax and of imports name the file."""
    error = scripts.refused(source)

    assert error.kind is Kind.INVALID_MODEL
    assert sentence in error.message
    assert "code/inference.py" in error.message


def test_a_script_without_model_fn_is_asked_for_one(scripts):
    """Where there is no TorchScript file either, the sentence is that of Amazon's toolkits, with the file's path."""
    error = scripts.refused("def predict_fn(data, model): return 1")

    assert error.kind is Kind.INVALID_MODEL
    assert f"Please provide a model_fn implementation in {scripts.root}/m/code/inference.py" in error.message
    assert "found no .pt or .pth file" in error.message


def test_several_torchscript_files_are_none(scripts):
    """Only one can be the model."""
    error = scripts.refused("", files={"a.pt": b"", "b.pth": b""})

    assert "found a.pt, b.pth" in error.message


def test_a_model_that_nobody_can_ask_is_refused(scripts):
    """The default predict_fn has to know how: by `predict`, or by calling the model."""
    error = scripts.refused(scripts.HEAD)

    assert error.kind is Kind.INVALID_MODEL
    assert "Please provide a predict_fn implementation" in error.message
    assert "model_fn returned a str" in error.message


def test_a_script_imports_what_lies_beside_it_and_its_model(scripts):
    """`code/` is on sys.path, and so is the model's directory; both are gone afterwards, with their modules."""
    files = {"code/beside.py": "A = 1", "above.py": "B = 2"}
    before = list(sys.path)
    loaded = scripts.load(
        scripts.tells("import beside, above\ndef transform_fn(m, b, c, a): return told(beside.A, above.B)"), files=files
    )

    assert loaded.told() == ["int:1", "int:2"]
    assert sys.modules["inference"].beside is sys.modules["beside"]
    scripts.close(loaded)
    assert sys.path == before
    assert {"inference", "beside", "above"}.isdisjoint(sys.modules)


def test_a_script_may_lie_at_the_root(scripts):
    """inference.py beside the model, instead of in `code/`."""
    loaded = scripts.load(
        scripts.tells("import beside\ndef transform_fn(m, b, c, a): return told(beside.A)"),
        script="inference.py",
        files={"beside.py": "A = 1"},
    )

    assert loaded.told() == ["int:1"]


def test_a_script_may_lie_outside(scripts, tmp_path):
    """A folder that a parameter names holds the script of models that bring none."""
    shared = tmp_path / "shared"
    shared.mkdir()
    source = (
        "import os\ndef model_fn(model_dir): return os.listdir(model_dir)\ndef predict_fn(data, model): return model"
    )
    (shared / "inference.py").write_text(source)
    outside = {"SAGEMAKER_SUBMIT_DIRECTORY": str(shared)}

    loaded = scripts.load("raise SystemExit('not this one')", script="inference.py", parameters=outside)

    assert loaded.told("1") == ["inference.py"]


def test_two_scripts_of_the_same_names_do_not_mix(scripts):
    """In one process, too, each has its own module `inference`, and so its own functions."""
    sources = {name: scripts.tells(f"def transform_fn(m, b, c, a): return told('{name}', __name__)") for name in "ab"}
    first, second = (scripts.load(source, name=name) for name, source in sources.items())

    assert first.told() == ["str:a", "str:inference"]
    assert second.told() == ["str:b", "str:inference_2"]


def complete(tmp_path, **fields):
    """The configuration as a load would complete it."""
    (tmp_path / "code").mkdir(exist_ok=True)
    (tmp_path / "code/inference.py").write_text("raise SystemExit('nobody runs this')")
    config = ModelConfig("m", "sagemaker", default_model_filename="code/inference.py", **fields)
    return ScriptHandler.autocomplete(config, tmp_path / "code/inference.py")


def test_the_configuration_is_a_tensor_of_bytes_on_both_sides(tmp_path):
    """Without running the script."""
    config = complete(tmp_path)

    for (spec,) in (config.inputs, config.outputs):
        assert (spec.name, spec.data_type.name, spec.dims) == ("BODY", "UINT8", (-1,))
    assert complete(tmp_path, inputs=config.inputs) == config


def test_a_script_of_broken_syntax_is_refused_unread(tmp_path):
    """`mme pack` says so before anybody serves it."""
    complete(tmp_path)
    (tmp_path / "code/inference.py").write_text("def f(:")
    with pytest.raises(MmeError, match="line 1"):
        ScriptHandler.autocomplete(ModelConfig("m", "sagemaker"), tmp_path / "code/inference.py")


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"max_batch_size": 4}, "max_batch_size"),
        ({"inputs": "other"}, "input"),
        ({"outputs": "other"}, "output"),
    ],
)
def test_a_configuration_that_says_otherwise_is_refused(tmp_path, fields, named):
    """A script gets one request at a time, as bytes; the field that contradicts is named."""
    (spec,) = complete(tmp_path).inputs
    other = (type(spec)("X", spec.data_type, (-1,)),)
    fields = {key: other if value == "other" else value for key, value in fields.items()}

    with pytest.raises(MmeError) as caught:
        complete(tmp_path, **fields)

    assert caught.value.kind is Kind.INVALID_MODEL
    assert f"leave '{named}' out" in caught.value.message
