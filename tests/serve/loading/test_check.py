"""Everything that is wrong with a model's directory: real directories with real ONNX models, and what is said of them."""

import sys

import pytest

from model_handlers import tensorflow
from serve.loading.check import examine, examine_ensembles
from serve.loading.prepare import PARAMETERS
from serve.sources.scripts import DEFAULT_SCRIPTS, Scripts
from tests.contract import models

ENSEMBLE = """
platform: "ensemble" max_batch_size: 8
input {{ name: "x" data_type: {kind} dims: [ 2 ] }} output {{ name: "y" data_type: TYPE_FP32 dims: [ 2 ] }}
ensemble_scheduling {{
  step {{ model_name: "{first}" {version} input_map {{ key: "x" value: "x" }} output_map {{ key: "y" value: "h" }} }}
  step {{ model_name: "{second}" input_map {{ key: "x" value: "h" }} output_map {{ key: "y" value: "y" }} }}
}}
"""
WARM = "data_type: TYPE_FP32 dims: [ 2 ] input_data_file: 'gone'"


def looked_at(path, scripts=DEFAULT_SCRIPTS, *, strict_name=True):
    """What is found of one model."""
    return examine(path, path.name, scripts, strict_name=strict_name)


def said(model):
    """(file, field) of every problem."""
    return [(each.file, each.field) for each in model.problems]


def sentences(model):
    """All that is said of problems, in one text."""
    return " | ".join(each.sentence for each in model.problems)


def test_a_good_model_is_completed_from_its_file(tmp_path, write_repository_model):
    """With or without a configuration; nothing is said but that there is none."""
    model = looked_at(write_repository_model(tmp_path / "m", "max_batch_size: 8", versions=(1, 3)))
    assert (model.problems, model.notes, sorted(model.versions)) == ([], [], [3])
    assert [spec.name for spec in model.config.inputs] == ["x"]
    bare = looked_at(write_repository_model(tmp_path / "bare"))
    assert bare.problems == []
    assert [each.sentence for each in bare.notes] == ["there is none: all is taken from the model's files"]
    assert bare.config.backend == "onnxruntime"


@pytest.mark.parametrize(
    ("config", "places", "words"),
    [
        ('backend: "abacus"', [("config.pbtxt", "backend")], "unable to find backend library for backend 'abacus'"),
        ('backend: "tensorflow"', [("config.pbtxt", "default_model_filename")], "no file 'model.savedmodel'"),
        (
            "version_policy { specific { versions: 9 } } max_batch_size: -1",
            [("config.pbtxt", "max_batch_size"), ("config.pbtxt", "version_policy")],
            "at least one version must be available",
        ),
        (
            'default_model_filename: "other.onnx"',
            [("config.pbtxt", "default_model_filename")],
            "no file 'other.onnx' in version 1",
        ),
        (
            'output { name: "y" data_type: TYPE_FP32 dims: [ 2 ] label_filename: "labels.txt" }',
            [("config.pbtxt", "output[0].label_filename")],
            "no file 'labels.txt'",
        ),
        (
            'max_batch_size: 8 input { name: "x" data_type: TYPE_INT32 dims: [ 2 ] }',
            [("1/model.onnx", "")],
            "configuration expects datatype TYPE_INT32 for input 'x', model provides TYPE_FP32",
        ),
        (
            f"max_batch_size: 8 model_warmup {{ name: 'w' batch_size: 1 inputs {{ key: 'x' value {{ {WARM} }} }} }}",
            [("config.pbtxt", "model_warmup[0]")],
            "gone",
        ),
        ("max_batch_size: [", [("config.pbtxt", "")], "line 1"),
        (
            "parameters { key: 'intra_op_thread_count' value { string_value: 'two' } }",
            [("1/model.onnx", "")],
            "parameter 'intra_op_thread_count' must be an integer from 0 to 1024, got 'two'",
        ),
        (
            "".join(
                f"parameters {{ key: '{name}' value {{ string_value: 'x' }} }}"
                for name in ("MME_PIN", "MME_WEIGHTS", "MME_PLACEMENT", "MME_LOAD_TIMEOUT")
            ),
            [
                ("config.pbtxt", "parameters['MME_PIN']"),
                ("config.pbtxt", "parameters['MME_WEIGHTS']"),
                ("config.pbtxt", "parameters['MME_PLACEMENT']"),
                ("config.pbtxt", "parameters"),
            ],
            "parameter 'MME_LOAD_TIMEOUT' must be a positive number of seconds, got 'x'",
        ),
    ],
)
def test_each_problem_is_told_where_it_is(tmp_path, write_repository_model, config, places, words):
    """By file and field, with what a load would say."""
    model = looked_at(write_repository_model(tmp_path / "m", config))
    assert said(model) == places, model.problems
    assert words in sentences(model)


def test_a_directory_that_is_no_model(tmp_path):
    """And one whose model file is none."""
    (tmp_path / "empty" / "1").mkdir(parents=True)
    assert "no model found in 'empty'" in sentences(looked_at(tmp_path / "empty"))
    (tmp_path / "bad" / "1").mkdir(parents=True)
    (tmp_path / "bad" / "1" / "model.onnx").write_bytes(b"no model")
    assert said(looked_at(tmp_path / "bad")) == [("1/model.onnx", "")]


def test_a_pointer_of_git_lfs_is_told(tmp_path, write_repository_model):
    """What a clone without LFS has in place of a model's file."""
    path = write_repository_model(tmp_path / "m")
    (path / "1" / "model.onnx").write_text(
        "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 90405214\n"
    )
    assert "1/model.onnx is a pointer of Git LFS in place of the file: `git lfs pull`" in sentences(looked_at(path))


def test_a_configuration_from_windows_is_read(tmp_path, write_repository_model):
    """With a byte order mark in front, and with carriage returns."""
    path = write_repository_model(tmp_path / "m")
    (path / "config.pbtxt").write_bytes(b"\xef\xbb\xbfmax_batch_size: 8\r\ndynamic_batching { }\r\n")
    model = looked_at(path)
    assert (model.problems, model.notes, model.config.max_batch_size) == ([], [], 8)


def test_versions_that_are_none_are_told(tmp_path, write_repository_model):
    """Directories that are called almost as versions are, and versions that are named and not there."""
    path = write_repository_model(tmp_path / "m", "version_policy { specific { versions: [ 1, 4 ] } }")
    for name in ("02", "3_old", "warmup", "docs"):
        (path / name).mkdir()
    model = looked_at(path)
    assert model.problems == []
    assert [(each.file, each.field) for each in model.notes] == [
        ("02/", ""),
        ("3_old/", ""),
        ("config.pbtxt", "version_policy"),
    ]


def test_a_mistyped_parameter_of_the_server_is_told(tmp_path, write_repository_model):
    """It is not refused, since a model may call its own as it likes."""
    names = ("MME_PINN", "MME_X", "MME_PIN")
    config = "".join(f"parameters {{ key: '{name}' value {{ string_value: 'true' }} }}" for name in names)
    model = looked_at(write_repository_model(tmp_path / "m", config))
    assert model.problems == []
    assert [each.sentence for each in model.notes] == [
        "parameter 'MME_PINN' means nothing to the server; did you mean MME_PIN?",
        f"parameter 'MME_X' means nothing to the server; there are {', '.join(PARAMETERS)}",
    ]


def test_a_parameter_without_effect_is_told(tmp_path, write_repository_model, caplog):
    """As a server's log tells it; of each model, and nowhere else."""
    config = "parameters { key: 'intra_op_threads' value { string_value: '2' } }"
    all_versions = " version_policy { all { } }"
    for folder in "ab":
        model = looked_at(write_repository_model(tmp_path / folder / "m", config + all_versions, versions=(1, 2)))
        assert model.problems == []
        assert [each.sentence for each in model.notes] == [
            "parameters without effect on ONNX models: 'intra_op_threads'"
        ]
    assert caplog.records == []


@pytest.mark.parametrize("name", ["config.pbtxt.txt", "Config.pbtxt", "config.txt"])
def test_a_configuration_that_is_called_otherwise_is_told(tmp_path, write_repository_model, name):
    """Nothing that it says counts, which nobody would see of a model that is completed from its file."""
    path = write_repository_model(tmp_path / "m")
    (path / name).write_text("max_batch_size: 8")
    (path / "config.json").write_text("{}")
    assert [each.sentence for each in looked_at(path).notes] == [
        f"there is none: all is taken from the model's files; {name} is not read: rename it"
    ]


def test_names_count_in_repositories_alone(tmp_path, write_repository_model):
    """An archive's model may be called anything."""
    path = write_repository_model(tmp_path / "m", 'name: "other"')
    assert said(looked_at(path)) == [("config.pbtxt", "name")]
    assert said(looked_at(path, strict_name=False)) == []


def test_a_script_and_a_python_model_are_not_run(tmp_path):
    """What only their code knows is a note."""
    (tmp_path / "s" / "code").mkdir(parents=True)
    (tmp_path / "s" / "code" / "inference.py").write_text("raise SystemExit('it was run')")
    script = looked_at(tmp_path / "s", Scripts())
    assert (script.problems, script.config.backend, list(script.versions)) == ([], "sagemaker", [1])
    (tmp_path / "p" / "1").mkdir(parents=True)
    (tmp_path / "p" / "1" / "model.py").write_text("raise SystemExit('it was run')\nfrom base import TritonPythonModel")
    python = looked_at(tmp_path / "p")
    assert python.problems == []
    assert "not checked" in python.notes[-1].sentence


def test_what_no_server_takes_is_a_problem(tmp_path):
    """A type that the protocol can't carry is no want of a framework: the model would be refused wherever it is loaded."""
    (tmp_path / "m" / "1").mkdir(parents=True)
    (tmp_path / "m" / "1" / "model.onnx").write_bytes(models.sequence())

    model = looked_at(tmp_path / "m")

    assert said(model) == [("1/model.onnx", "")]
    assert "tensor 'Y' has ONNX type seq(tensor(float)), which can't be sent over the protocol" in sentences(model)


def test_an_environment_that_a_model_brings_has_to_be_there(tmp_path):
    """One that somebody else puts where it looks may come later."""
    for name, path in (("brings", "$$TRITON_MODEL_DIRECTORY/env.tar.gz"), ("shares", str(tmp_path / "env.tar.gz"))):
        (tmp_path / name / "1").mkdir(parents=True)
        (tmp_path / name / "1" / "model.py").write_text(
            "raise SystemExit('it was run')\nfrom base import TritonPythonModel"
        )
        parameter = f'parameters {{ key: "EXECUTION_ENV_PATH" value {{ string_value: "{path}" }} }}'
        (tmp_path / name / "config.pbtxt").write_text(f'backend: "python" {parameter}')

    brings, shares = looked_at(tmp_path / "brings"), looked_at(tmp_path / "shares")

    assert said(brings) == [("config.pbtxt", "parameters")]
    assert "env.tar.gz is not there" in sentences(brings)
    assert said(shares) == []
    assert "env.tar.gz is not there" in shares.notes[0].sentence


def test_a_saved_model_without_its_framework_is_a_note(tmp_path, monkeypatch):
    """What only the framework can read is not checked."""
    monkeypatch.setitem(sys.modules, "tensorflow", None)
    monkeypatch.setattr(tensorflow, "is_installed", lambda _: False)
    tensorflow.tensorflow.cache_clear()
    (tmp_path / "m" / "1" / "model.savedmodel").mkdir(parents=True)
    (tmp_path / "m" / "1" / "model.savedmodel" / "saved_model.pb").write_bytes(b"")
    (tmp_path / "m" / "config.pbtxt").write_text('platform: "tensorflow_savedmodel"')

    model = looked_at(tmp_path / "m")

    assert model.problems == []
    assert "TensorFlow, which is not installed" in model.notes[-1].sentence


@pytest.mark.parametrize(
    ("change", "places", "words"),
    [
        ({}, [], ""),
        ({"second": "nobody"}, ["step[1].model_name"], "not available or ambiguous: nobody"),
        ({"version": "model_version: 4"}, ["step[0].model_version"], "whose required version 4 is not loaded"),
        ({"kind": "TYPE_INT32"}, ["step[0].input_map"], "inconsistent data type"),
        ({"version": 'model_namespace: "elsewhere"'}, [], ""),
        ({"second": "e"}, ["step"], "circular dependency between ensembles: e -> e"),
        ({"first": "circle"}, ["step"], "circular dependency between ensembles: e -> circle -> e"),
        ({"kind": "TYPE_INT32", "second": "nobody"}, ["step[1].model_name", "step[0].input_map"], "nobody"),
    ],
)
def test_ensembles_are_held_against_the_models_beside_them(tmp_path, write_repository_model, change, places, words):
    """Members that are missing, other versions and types, and circles; several at once."""
    for name in "ab":
        write_repository_model(tmp_path / name, "max_batch_size: 8")
    steps = {"kind": "TYPE_FP32", "first": "a", "second": "b", "version": ""}
    for name, chosen in (("e", steps | change), ("circle", steps | {"first": "e"})):
        (tmp_path / name / "1").mkdir(parents=True)
        (tmp_path / name / "config.pbtxt").write_text(ENSEMBLE.format(**chosen))
    models = [looked_at(tmp_path / name) for name in ("a", "b", "circle", "e")]
    examine_ensembles(models)
    assert [field for _, field in said(models[3])] == [f"ensemble_scheduling.{place}" for place in places]
    assert words in sentences(models[3])
    assert models[0].problems == models[1].problems == []


def test_backends_of_others(tmp_path):
    """A model that is a configuration alone is whole; a handler of the archive is read, and not run."""
    (tmp_path / "same").mkdir()
    tensors = 'input { name: "INPUT0" data_type: TYPE_FP32 dims: [ 1 ] } output { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ 1 ] }'
    (tmp_path / "same" / "config.pbtxt").write_text(f'backend: "identity" {tensors}')
    (tmp_path / "own" / "1").mkdir(parents=True)
    (tmp_path / "own" / "config.pbtxt").write_text(f'backend: "own" {tensors}')
    (tmp_path / "own" / "1" / "handler.py").write_text("raise SystemExit")

    assert looked_at(tmp_path / "same").problems == []
    assert looked_at(tmp_path / "own").problems == []
