"""Settings: what no row of the frozen answers says of them (`tests/golden/cases_settings.py`, the group `refusals`).

Those meet every variable with a hundred values, and name what is refused, in which words, and what the others become.
"""

from __future__ import annotations

import dataclasses
import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from container.settings import (
    Mode,
    PingMode,
    Settings,
    SettingsError,
    choose_single_model,
    read_settings,
    settings_table,
)
from container.settings.parsers import keepalive, keepalive_rules, to_text
from container.settings.places import check_places
from container.settings.schema import VARIABLES
from model_handlers.config.model_config import ModelConfig
from model_handlers.scripts.default_script import SELECTED
from serve.options import Share, memory_budget
from serve.sources.scripts import Scripts

MIB = 1024 * 1024


def test_an_empty_environment_serves_one_model_as_sagemaker_does():
    """With nothing set, the server listens where SageMaker calls and serves /opt/ml/model."""
    settings = read_settings({})

    assert settings.mode is Mode.SINGLE
    assert (settings.host, settings.port, str(settings.model_dir)) == ("127.0.0.1", 8080, "/opt/ml/model")
    assert settings.ping_mode is PingMode.READY
    assert settings.max_body_bytes == 64 * MIB
    assert settings == Settings()


@pytest.mark.parametrize("inner", ["", "repository", "registered/repository"])
def test_azures_model_folder_is_a_repository(tmp_path, inner):
    """Itself, or the folder in it that was registered; and models are waited for."""
    (tmp_path / inner / "bert" / "1").mkdir(parents=True)
    settings = read_settings({"AZUREML_MODEL_DIR": str(tmp_path)})

    assert (settings.mode, settings.model_repository) == (Mode.REPOSITORY, tmp_path / inner)
    assert settings.ping_mode is PingMode.READY


@pytest.mark.parametrize("inside", [[], ["a", "b"], [".hidden"]])
def test_azures_model_folder_without_a_model_stays_what_was_named(tmp_path, inside):
    """So that what is said about it names the folder that people know."""
    for name in inside:
        (tmp_path / name).mkdir()
    assert read_settings({"AZUREML_MODEL_DIR": str(tmp_path)}).model_repository == tmp_path


@pytest.mark.parametrize(
    ("environ", "scripts"),
    [
        ({}, Scripts("inference.py", "", 1, "application/json")),
        ({"SAGEMAKER_PROGRAM": "serve_it"}, Scripts("serve_it.py")),
        ({"SAGEMAKER_SUBMIT_DIRECTORY": "file:///opt/ml/model/code"}, Scripts()),
        ({"SAGEMAKER_SUBMIT_DIRECTORY": "file:///opt/shared"}, Scripts(shared="/opt/shared")),
        ({"SAGEMAKER_SUBMIT_DIRECTORY": "/opt/user_code.tar.gz"}, Scripts(shared="file:///opt/user_code.tar.gz")),
        ({"SAGEMAKER_MODEL_SERVER_WORKERS": "4"}, Scripts(workers=4)),
        ({"SAGEMAKER_DEFAULT_INVOCATIONS_ACCEPT": "text/csv"}, Scripts(default_accept="text/csv")),
        ({"SAGEMAKER_DEFAULT_INVOCATIONS_ACCEPT": "application/json"}, Scripts(booster_accept="application/json")),
        ({"SAGEMAKER_MULTI_MODEL": "true"}, Scripts(booster_accept="application/json", allow_pickle=True)),
        ({"SAGEMAKER_BATCH": "true"}, Scripts(lines=True)),
        ({"HF_TASK": "text-classification"}, Scripts(task="text-classification")),
        ({"SAGEMAKER_TFS_DEFAULT_MODEL_NAME": "b"}, Scripts(saved_model="b")),
        ({"MME_MODEL_CONFIG_NAME": "h200"}, Scripts(config_name="h200")),
    ],
)
def test_scripts_are_told_by_the_variables_of_amazons_containers(environ, scripts):
    """Program, directory, workers and accepted type; what names the place inside of a model names nothing else."""
    assert read_settings(environ).scripts == scripts


def test_cache_directory_is_the_users_own():
    """Without a setting, archives are unpacked below XDG_CACHE_HOME or in a folder named for the user."""
    assert str(read_settings({"XDG_CACHE_HOME": "/x"}).cache_dir) == "/x/mme"
    assert read_settings({"TMPDIR": "/t"}).cache_dir.parent.as_posix() == "/t"
    assert str(read_settings({"MME_CACHE_DIR": "/c", "XDG_CACHE_HOME": "/x"}).cache_dir) == "/c"


def test_every_field_has_a_variable_and_every_variable_a_field():
    """The table and the dataclass agree, but for what follows from several variables."""
    fields = {field.name for field in dataclasses.fields(Settings)}
    named = {row.field for row in VARIABLES if row.field}

    assert named <= fields
    assert fields - named == {"booster_accept", "mode", "more_repositories", "notices", "repository_urls"}


def test_the_table_for_people_is_complete():
    """Every row says its name, default, what is allowed and what it does; names are unique."""
    rows = settings_table()

    assert len({row[0] for row in rows}) == len(rows) == len(VARIABLES)
    assert all(row[3] and row[4].endswith(".") for row in rows)
    by_name = {row[0]: row for row in rows}
    assert by_name["MME_PORT"][1:3] == ("--port", "8080")
    assert (by_name["MME_LOAD_TIMEOUT"][2], by_name["SAGEMAKER_TRITON_PING_MODE"][2]) == ("350", "")
    assert by_name["MME_LOG_FORMAT"][2:4] == ("auto", "auto, text, json, default or ISO8601")


@pytest.mark.parametrize("flag", [row.flag for row in VARIABLES if row.flag])
def test_a_flag_is_its_variable_in_other_letters(flag):
    """Whoever knows a flag knows its variable."""
    assert f"MME_{flag.removeprefix('--').replace('-', '_').upper()}" in {row.name for row in VARIABLES}


def test_the_only_directory_is_the_single_model_with_a_warning(tmp_path):
    """One directory needs no name; hidden folders and files beside it do not count."""
    (tmp_path / "resnet" / "1").mkdir(parents=True)
    (tmp_path / ".ipynb_checkpoints").mkdir()
    (tmp_path / "README").touch()

    name, folder, warning = choose_single_model(tmp_path, "")
    assert name == "resnet"
    assert folder == tmp_path / "resnet"
    assert warning.startswith("WARNING: No SAGEMAKER_TRITON_DEFAULT_MODEL_NAME provided")


@pytest.mark.parametrize(
    ("tree", "scripts"),
    [
        (["code/", "code/inference.py", "model.joblib"], Scripts()),
        (["inference.py", "1_Pooling/"], Scripts()),
        (["code/", "code/serve_it.py", "a/", "b/"], Scripts("serve_it.py")),
        (["model.joblib"], Scripts(shared="/opt/shared")),
        (["code/", "code/inference.py", "config.pbtxt"], Scripts()),
    ],
)
@pytest.mark.parametrize(("name", "served"), [("", "model"), ("bert", "bert")])
def test_a_folder_with_a_script_is_the_single_model(tmp_path, tree, scripts, name, served):
    """The whole folder is the model, called as in Amazon's containers unless a name is given."""
    for entry in tree:
        (tmp_path / entry).mkdir() if entry.endswith("/") else (tmp_path / entry).touch()

    assert choose_single_model(tmp_path, name, scripts) == (served, tmp_path, "")


@pytest.mark.parametrize(
    ("file", "moves"),
    [
        ("model.onnx", {"model.onnx": "bert/1/model.onnx"}),
        ("1/model.onnx", {"1": "bert/1"}),
        ("saved_model.pb", {"saved_model.pb": "bert/1/model.savedmodel/saved_model.pb"}),
    ],
)
def test_who_does_as_a_refusal_says_has_a_single_model(tmp_path, file, moves):
    """The places that it names, with a name for the model's directory in place of the one in brackets, are right."""
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).touch()
    with pytest.raises(SettingsError) as raised:
        choose_single_model(tmp_path, "")
    said = raised.value.message.replace("<model name>", "bert").replace(f"{tmp_path}/", "")

    for here, there in moves.items():
        assert f"move {here} " in said
        assert there.rpartition("/")[0] in said.partition(" to ")[2] + said.partition(" into ")[2]
        (tmp_path / there).parent.mkdir(parents=True)
        (tmp_path / here).rename(tmp_path / there)
    assert choose_single_model(tmp_path, "")[:2] == ("bert", tmp_path / "bert")


def test_a_model_may_be_called_by_a_number(tmp_path):
    """Its versions are directories in it."""
    (tmp_path / "2024/1").mkdir(parents=True)
    (tmp_path / "2024/1/model.onnx").touch()

    assert choose_single_model(tmp_path, "").name == "2024"


@given(st.floats(1e-9, 1.0), st.integers(1, 2**50))
def test_shares_are_written_without_loss(value, reserve):
    """Any share of memory survives being written as text, and so does one less a reserve."""
    assert memory_budget(to_text(value)) == value
    assert memory_budget(to_text(Share(value, reserve))) == Share(value, reserve)


def test_a_machine_that_may_write_nothing_has_settings_all_the_same(monkeypatch):
    """A container with read-only files and no /tmp: the place of the cache is a name, and can be said."""

    def nowhere():
        raise FileNotFoundError

    monkeypatch.setattr(tempfile, "gettempdir", nowhere)
    assert read_settings({}).cache_dir == Path(f"/tmp/mme-{os.getuid()}")  # noqa: S108
    assert read_settings({"MME_CACHE_DIR": "/cache"}).cache_dir == Path("/cache")
    assert settings_table()


@pytest.fixture
def closed(tmp_path):
    """A folder below one that we may not enter, whoever we are."""
    folder = tmp_path / "closed" / "folder"
    folder.mkdir(parents=True)
    folder.parent.chmod(0)
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    yield folder
    os.seteuid(user)
    folder.parent.chmod(0o700)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("MME_MODEL_STORE", "as whom the server runs, may not read it"),
        ("MME_MODEL_REPOSITORY", "as whom the server runs, may not read it"),
        ("MME_CACHE_DIR", "models are unpacked there, and it can't be written"),
    ],
)
def test_folders_that_may_not_be_entered_are_named(closed, name, sentence):
    """With the setting that names them, as a container's user finds them that was never thought of."""
    store = {"MME_MODEL_STORE": "s3://bucket/a"} if name == "MME_CACHE_DIR" else {}
    settings = read_settings({**store, name: str(closed)})
    with pytest.raises(SettingsError, match=sentence) as caught:
        check_places(settings)
    assert f"{name}='{closed}'" in str(caught.value)


def test_what_answers_hold_is_said_to_boosters_without_a_script(tmp_path):
    """By a parameter of the model, and to no other."""
    scripts = read_settings({"SAGEMAKER_INFERENCE_OUTPUT": "labels,probability"}).scripts
    (tmp_path / "xgboost-model").touch()
    assert scripts.completed(ModelConfig("m"), tmp_path).parameters[SELECTED] == "labels,probability"
    (tmp_path / "inference.py").touch()
    assert SELECTED not in scripts.completed(ModelConfig("m"), tmp_path).parameters


def test_keepalive_is_seconds_for_connections():
    """What the setting says in milliseconds; counts are counts."""
    rules = keepalive_rules(keepalive("time=1500,max-ping-strikes=5,permit-without-calls=1"))
    assert rules == {"time": 1.5, "max_ping_strikes": 5, "permit_without_calls": True}
    assert rules["permit_without_calls"] is True
