"""Settings: what an environment says, and what refuses to start."""

from __future__ import annotations

import dataclasses
import importlib
import os
import re
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from container.control.routes import InferenceType
from container.settings import (
    GrpcCompression,
    LogFormat,
    Mode,
    PingMode,
    RateLimit,
    Settings,
    SettingsError,
    choose_single_model,
    read_settings,
    settings_table,
)
from container.settings.parsers import to_text
from container.settings.places import check_places
from container.settings.schema import BY_NAME, VARIABLES
from model_handlers.config.model_config import ModelConfig
from model_handlers.scripts.default_script import SELECTED
from serve.control import Control
from serve.sizes import Share, memory_budget
from serve.sources.scripts import Scripts

MIB = 1024 * 1024


def problems(**environ):
    """The sentences with which an environment refuses to start."""
    with pytest.raises(SettingsError) as raised:
        read_settings(environ)
    return raised.value.problems


def test_an_empty_environment_serves_one_model_as_sagemaker_does():
    """With nothing set, the server listens where SageMaker calls and serves /opt/ml/model."""
    settings = read_settings({})

    assert settings.mode is Mode.SINGLE
    assert (settings.host, settings.port, str(settings.model_dir)) == ("127.0.0.1", 8080, "/opt/ml/model")
    assert settings.ping_mode is PingMode.READY
    assert settings.max_body_bytes == 64 * MIB
    assert settings == Settings()


@pytest.mark.parametrize(
    ("environ", "mode", "ping"),
    [
        ({"SAGEMAKER_MULTI_MODEL": "true"}, Mode.PLATFORM, PingMode.LIVE),
        ({"SAGEMAKER_MULTI_MODEL": "false"}, Mode.SINGLE, PingMode.READY),
        ({"MME_MODEL_DIR": "/srv/model"}, Mode.SINGLE, PingMode.READY),
        ({"MME_MODEL_STORE": "s3://bucket/prefix"}, Mode.STORE, PingMode.LIVE),
        ({"MME_MODEL_REPOSITORY": "/srv/models"}, Mode.REPOSITORY, PingMode.LIVE),
    ],
)
def test_mode_follows_from_what_is_given(environ, mode, ping):
    """Each source of models has its mode, and only a single model makes /ping wait for it."""
    settings = read_settings(environ)

    assert (settings.mode, settings.ping_mode) == (mode, ping)


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


@pytest.mark.parametrize("name", ["MME_MODEL_STORE", "MME_MODEL_DIR", "MME_MODEL_REPOSITORY"])
def test_what_is_named_wins_over_azures_model_folder(tmp_path, name):
    """Whoever names a source of models means it."""
    asked = {name: str(tmp_path / "mine")}
    assert read_settings({"AZUREML_MODEL_DIR": str(tmp_path), **asked}) == read_settings(asked)


def test_azures_model_folder_that_is_not_there_is_named(tmp_path):
    """Nobody who never heard of /opt/ml/model is sent there."""
    (sentence,) = problems(AZUREML_MODEL_DIR=str(tmp_path / "gone"))
    assert sentence.startswith(f"AZUREML_MODEL_DIR='{tmp_path}/gone': there is no such folder")


def test_conflicting_modes_are_named():
    """Two sources of models refuse to start, and both variables are in the sentence."""
    (sentence,) = problems(SAGEMAKER_MULTI_MODEL="true", MME_MODEL_STORE="s3://bucket/prefix")

    assert "SAGEMAKER_MULTI_MODEL" in sentence
    assert "MME_MODEL_STORE" in sentence
    assert "keep one of them" in sentence


def test_platform_mode_refuses_models_to_load():
    """Where SageMaker decides what is loaded, a list of models to load is refused."""
    (sentence,) = problems(SAGEMAKER_MULTI_MODEL="true", MME_LOAD_MODEL="bert")

    assert "MME_LOAD_MODEL" in sentence


def test_a_platform_gives_up_after_360_seconds():
    """A load may take longer only where nobody else waits for it."""
    (sentence,) = problems(SAGEMAKER_MULTI_MODEL="true", MME_LOAD_TIMEOUT="360")
    assert "SageMaker gives up" in sentence

    assert read_settings({"SAGEMAKER_MULTI_MODEL": "true", "MME_LOAD_TIMEOUT": "359"}).load_timeout == 359
    assert read_settings({"MME_MODEL_STORE": "s3://bucket/p", "MME_LOAD_TIMEOUT": "3600"}).load_timeout == 3600


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"MME_MODEL_CONTROL_MODE": "poll"}, "only a repository has control mode poll"),
        (
            {"MME_MODEL_STORE": "s3://bucket/p", "MME_MODEL_CONTROL_MODE": "none"},
            "only a repository has control mode none",
        ),
        (
            {"SAGEMAKER_TRITON_ADDITIONAL_ARGS": "--model-control-mode=poll --repository-poll-secs 3"},
            "SAGEMAKER_TRITON_ADDITIONAL_ARGS (--model-control-mode): only a repository has control mode poll",
        ),
        (
            {"MME_MODEL_REPOSITORY": "/r", "MME_MODEL_CONTROL_MODE": "poll", "MME_LOAD_MODEL": "a"},
            "in mode poll every model is loaded",
        ),
        (
            {"MME_MODEL_REPOSITORY": "/r", "MME_MODEL_CONTROL_MODE": "none", "MME_LOAD_MODEL": "a"},
            "in mode none every model is loaded",
        ),
        ({"MME_MODEL_REPOSITORY": "/r", "MME_LOAD_MODEL": "*,a"}, "must be the only one that is named"),
        ({"MME_MODEL_REPOSITORY": "/r/m,/s/m", "MME_MODEL_NAMESPACING": "true"}, "two folders are called 'm'"),
    ],
)
def test_a_control_mode_that_makes_no_sense_is_refused(environ, words):
    """Each by one sentence."""
    (sentence,) = problems(**environ)
    assert words in sentence


@pytest.mark.parametrize(
    "source", [{}, {"MME_MODEL_STORE": "s3://bucket/p"}, {"SAGEMAKER_MULTI_MODEL": "true"}, {"MME_MODEL_DIR": "/m"}]
)
def test_models_may_be_loaded_by_hand_alone_wherever_they_come_from(source):
    """As Triton's container for SageMaker is started; its own flag says so too."""
    environ = {**source, "SAGEMAKER_TRITON_ADDITIONAL_ARGS": "--model-control-mode explicit"}
    assert read_settings(environ).model_control_mode is Control.EXPLICIT


@pytest.mark.parametrize("mode", list(Control))
def test_control_modes_of_a_repository(mode):
    """By Triton's names, and the one that nobody has to name; several repositories; all of it can be written back."""
    environ = {
        "MME_MODEL_REPOSITORY": "/r/a, /r/b,/r/a",
        "MME_MODEL_CONTROL_MODE": mode.value.upper(),
        "MME_REPOSITORY_POLL_SECS": "0.5",
        "MME_MODEL_NAMESPACING": "true",
        "MME_MODEL_CONFIG_NAME": "h200",
    }
    settings = read_settings(environ)
    assert (settings.model_control_mode, settings.poll_seconds) == (mode, 0.5)
    assert (settings.model_repository, settings.more_repositories) == (Path("/r/a"), (Path("/r/b"),))
    assert (settings.model_namespacing, settings.scripts.config_name) == (True, "h200")


def test_every_problem_is_told_at_once():
    """Three mistakes make three sentences, each with the variable's name and what it may be."""
    found = problems(MME_PORT="http", MME_MEMORY_BUDGET="lots", SAGEMAKER_TRITON_THREAD_COUNT="0")

    assert len(found) == 3
    assert any("MME_PORT='http': expected a whole number from 0 to 65535" in sentence for sentence in found)
    assert any("MME_MEMORY_BUDGET" in sentence and "350MB" in sentence for sentence in found)
    assert any("SAGEMAKER_TRITON_THREAD_COUNT" in sentence for sentence in found)


@pytest.mark.parametrize(
    ("name", "nearest"),
    [("MME_PROT", "MME_PORT"), ("SAGEMAKER_TRITON_PINGMODE", "SAGEMAKER_TRITON_PING_MODE")],
)
def test_unknown_variable_is_refused_with_the_nearest_name(name, nearest):
    """A mistyped variable does not start, and the message knows what was meant."""
    assert problems(**{name: "1"}) == (f"{name}: there is no such variable; did you mean {nearest}?",)


@pytest.mark.parametrize("name", ["SAGEMAKER_TRITON_BATCH_SIZE", "SAGEMAKER_TRITON_QUEUE_DELAY", "MME_X"])
def test_unknown_variable_that_is_like_no_other_is_to_go(name):
    """That it begins as others do makes it like none of them."""
    expected = f"{name}: there is no such variable; remove it; `mme settings` lists those there are"
    assert problems(**{name: "1"}) == (expected,)


def test_unknown_variable_of_the_platform_is_let_through():
    """SageMaker adds variables as it likes; those do not stop the server."""
    assert read_settings({"SAGEMAKER_REGION": "eu-west-1", "SAGEMAKER_NEW_THING": "1"}) == Settings()


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("SAGEMAKER_MODEL_SERVER_WORKER", "SAGEMAKER_MODEL_SERVER_WORKERS"),
        ("SAGEMAKER_MULTI_MODE", "SAGEMAKER_MULTI_MODEL"),
    ],
)
def test_a_mistyped_variable_of_the_platform_is_said(name, nearest):
    """It starts, since SageMaker may know more of them, and the log has what was likely meant."""
    settings = read_settings({name: "3"})

    assert settings.notices == (f"{name} means nothing to the server; did you mean {nearest}?",)


def test_empty_variable_counts_as_unset():
    """An empty value means the same as no variable, also where a value would be refused."""
    assert read_settings({"MME_PORT": "", "SAGEMAKER_PROGRAM": " "}) == Settings()


def test_kubernetes_service_links_are_not_settings():
    """A Kubernetes Service called mme puts MME_ variables into every container; they are passed over."""
    links = {
        "MME_PORT": "tcp://10.0.0.1:8080",
        "MME_SERVICE_HOST": "10.0.0.1",
        "MME_SERVICE_PORT": "8080",
        "MME_SERVICE_PORT_HTTP": "8080",
        "MME_PORT_8080_TCP": "tcp://10.0.0.1:8080",
        "MME_PORT_8080_TCP_PROTO": "tcp",
        "MME_CANARY_PORT": "tcp://10.0.0.2:8080",
        "MME_CANARY_PORT_8080_TCP_ADDR": "10.0.0.2",
    }

    assert read_settings(links) == Settings()


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("350MB", 350_000_000),
        ("2GiB", 2 * 1024 * MIB),
        ("2Gi", 2 * 1024 * MIB),  # as Kubernetes writes it
        ("1.5 gib", 1536 * MIB),
        ("67108864", 67108864),
        ("80%", 0.8),
        ("0.25", 0.25),
        ("100%", 1.0),
        ("95%-2GiB", Share(0.95, 2 * 1024 * MIB)),
        ("0.5 - 100MB", Share(0.5, 100_000_000)),
    ],
)
def test_memory_budget_is_bytes_or_a_share(text, value):
    """A budget is a number of bytes with or without a unit, or a share of what there is, less a reserve."""
    settings = read_settings({"MME_MEMORY_BUDGET": text, "MME_GPU_MEMORY_BUDGET": text})

    assert settings.memory_budget == value
    assert settings.gpu_memory_budget == value
    assert type(settings.memory_budget) is type(value)


BAD_VALUES = [
    ("MME_MEMORY_BUDGET", "0"),
    ("MME_MEMORY_BUDGET", "101%"),
    ("MME_MEMORY_BUDGET", "0%"),
    ("MME_MEMORY_BUDGET", "1.2"),
    ("MME_MEMORY_BUDGET", "-1GB"),
    ("MME_MEMORY_BUDGET", "5 parsecs"),
    ("MME_MEMORY_BUDGET", "95%-"),
    ("MME_MEMORY_BUDGET", "95%-5%"),
    ("MME_MEMORY_BUDGET", "2GiB-1GiB"),
    ("MME_MEMORY_BUDGET", "120%-1GiB"),
    ("MME_RESPONSE_CACHE", "redis,host=cache"),
    ("MME_RESPONSE_CACHE", "-1"),
    ("MME_MAX_BODY", "80%"),
    ("MME_PORT", "65536"),
    ("MME_PORT", "8\u066080"),
    ("MME_HOST", "0.0.0.0/8"),
    ("MME_HOST", "[::1"),
    ("MME_HOST", "[127.0.0.1]"),
    ("MME_HOST", "::1::"),
    ("MME_HOST", "[::1]:8080"),
    ("MME_REQUIRE_GPU", "maybe"),
    ("MME_WEIGHTS", "sometimes"),
    ("MME_LOAD_MODEL", "a,,b"),
    ("MME_EVICTION", "fifo"),
    ("MME_PIN", "a,,b"),
    ("MME_DISK_BUDGET", "much"),
    ("MME_MIN_RESIDENCY", "3601"),
    ("MME_LOAD_THREADS", "0"),
    ("MME_LOAD_TIMEOUT", "86401"),
    ("MME_IDLE_TIMEOUT", "nan"),
    ("MME_DRAIN_SECONDS", "-1"),
    ("MME_INLINE_MICROSECONDS", "-1"),
    ("MME_PING_MODE", "alive"),
    ("MME_LOG_LEVEL", "loud"),
    ("MME_LOG_FORMAT", "xml"),
    ("MME_MODEL_STORE", "gs://bucket/prefix"),
    ("MME_MODEL_STORE", "s3://"),
    ("MME_MODEL_STORE", "s3://Bad_Bucket/prefix"),
    ("SAGEMAKER_MULTI_MODEL", "2"),
    ("SAGEMAKER_BIND_TO_PORT", "0"),
    ("SAGEMAKER_SAFE_PORT_RANGE", "21999-21000"),
    ("MME_EMF_NAMESPACE", "AWS/SageMaker"),
    ("MME_EMF_NAMESPACE", "my metrics"),
    ("MME_ENDPOINT_NAME", "modèle"),
    ("MME_VARIANT_NAME", "x" * 1025),
    ("SAGEMAKER_BATCH_STRATEGY", "BOTH"),
    ("SAGEMAKER_DEFAULT_INVOCATIONS_ACCEPT", "text"),
    ("SAGEMAKER_DEFAULT_INVOCATIONS_ACCEPT", "text/*"),
    ("SAGEMAKER_DEFAULT_INVOCATIONS_ACCEPT", "text/csv, application/json"),
    ("SAGEMAKER_MODEL_SERVER_WORKERS", "0"),
    ("SAGEMAKER_MODEL_SERVER_WORKERS", "65"),
    ("SAGEMAKER_PROGRAM", "code/inference.py"),
    ("SAGEMAKER_PROGRAM", "..py"),
    ("HF_TASK", "text classification"),
    ("SAGEMAKER_TFS_DEFAULT_MODEL_NAME", "export/b"),
    ("SAGEMAKER_SUBMIT_DIRECTORY", "https://bucket/sourcedir.tar.gz"),
    ("SAGEMAKER_SUBMIT_DIRECTORY", "s3://bucket/sourcedir"),
    ("SAGEMAKER_SUBMIT_DIRECTORY", "s3://sourcedir.tar.gz"),
    ("SAGEMAKER_ENABLE_STATEFUL_SESSIONS", "perhaps"),
    ("SAGEMAKER_SESSIONS_EXPIRATION", "0"),
    ("SAGEMAKER_TRITON_ALLOW_GRPC", "perhaps"),
    ("MME_GRPC_PORT", "65536"),
    ("SAGEMAKER_TRITON_MODEL_LOAD_GPU_LIMIT", "1.5"),
    ("SAGEMAKER_TRITON_DEFAULT_MODEL_NAME", "../model"),
    ("SAGEMAKER_TRITON_TENSORFLOW_VERSION", "3"),
    ("SAGEMAKER_TRITON_LOG_INFO", "perhaps"),
    ("SAGEMAKER_TRITON_INFERENCE_TYPE", "Generate"),
    ("SAGEMAKER_TRITON_ADDITIONAL_ARGS", "--rate-limit=often"),
    ("MME_RATE_LIMIT_RESOURCE", "R"),
    ("MME_RATE_LIMIT_RESOURCE", "R:1:gpu"),
    ("MME_RATE_LIMIT_RESOURCE", "R:-1"),
    ("SAGEMAKER_TRITON_ADDITIONAL_ARGS", "--load-model 'a"),
]


@pytest.mark.parametrize(("name", "text"), BAD_VALUES)
def test_bad_value_is_refused_by_name(name, text):
    """A value that cannot be honoured makes exactly one sentence, which starts with the variable."""
    (sentence,) = problems(**{name: text})

    assert name in sentence.split(":")[0]
    assert "\n" not in sentence


@pytest.mark.parametrize(("name", "text"), [("MME_LOAD_TIMEOUT", "359"), ("MME_PORT", "65535"), ("MME_PORT", "0")])
def test_limits_are_inclusive(name, text):
    """The largest and smallest allowed values are allowed."""
    read_settings({name: text})


@pytest.mark.parametrize(
    ("environ", "scripts"),
    [
        ({}, Scripts("inference.py", "", 1, "application/json")),
        ({"SAGEMAKER_PROGRAM": "serve_it.py"}, Scripts("serve_it.py")),
        ({"SAGEMAKER_PROGRAM": "serve_it"}, Scripts("serve_it.py")),
        ({"SAGEMAKER_SUBMIT_DIRECTORY": "/opt/ml/model/code"}, Scripts()),
        ({"SAGEMAKER_SUBMIT_DIRECTORY": "/opt/ml/model/code/"}, Scripts()),
        ({"SAGEMAKER_SUBMIT_DIRECTORY": "file:///opt/ml/model/code"}, Scripts()),
        ({"SAGEMAKER_SUBMIT_DIRECTORY": "/opt/shared"}, Scripts(shared="/opt/shared")),
        ({"SAGEMAKER_SUBMIT_DIRECTORY": "file:///opt/shared"}, Scripts(shared="/opt/shared")),
        ({"SAGEMAKER_SUBMIT_DIRECTORY": "/opt/user_code.tar.gz"}, Scripts(shared="file:///opt/user_code.tar.gz")),
        ({"SAGEMAKER_SUBMIT_DIRECTORY": "file:///opt/a.tar.gz"}, Scripts(shared="file:///opt/a.tar.gz")),
        (
            {"SAGEMAKER_SUBMIT_DIRECTORY": "s3://bucket/a/sourcedir.tar.gz"},
            Scripts(shared="s3://bucket/a/sourcedir.tar.gz"),
        ),
        ({"SAGEMAKER_MODEL_SERVER_WORKERS": "4"}, Scripts(workers=4)),
        ({"SAGEMAKER_DEFAULT_INVOCATIONS_ACCEPT": "text/csv"}, Scripts(default_accept="text/csv")),
        ({"SAGEMAKER_DEFAULT_INVOCATIONS_ACCEPT": "*/*"}, Scripts()),
        ({"SAGEMAKER_DEFAULT_INVOCATIONS_ACCEPT": "application/json"}, Scripts(booster_accept="application/json")),
        ({"SAGEMAKER_MULTI_MODEL": "true"}, Scripts(booster_accept="application/json", allow_pickle=True)),
        ({"MME_MODEL_STORE": "/archives"}, Scripts(booster_accept="application/json")),
        ({"MME_ALLOW_PICKLE": "true"}, Scripts(allow_pickle=True)),
        ({"SAGEMAKER_SAFE_PORT_RANGE": "21000-21999"}, Scripts(allow_pickle=True)),
        ({"SAGEMAKER_SAFE_PORT_RANGE": "21000-21999", "MME_ALLOW_PICKLE": "false"}, Scripts()),
        (
            {"SAGEMAKER_MULTI_MODEL": "true", "SAGEMAKER_DEFAULT_INVOCATIONS_ACCEPT": "text/csv"},
            Scripts(default_accept="text/csv", allow_pickle=True),
        ),
        ({"SAGEMAKER_BATCH": "true"}, Scripts(lines=True)),
        ({"HF_TASK": "text-classification"}, Scripts(task="text-classification")),
        ({"SAGEMAKER_TFS_DEFAULT_MODEL_NAME": "b"}, Scripts(saved_model="b")),
    ],
)
def test_scripts_are_told_by_the_variables_of_amazons_containers(environ, scripts):
    """Program, directory, workers and accepted type; what names the place inside of a model names nothing else."""
    assert read_settings(environ).scripts == scripts


def test_a_shared_script_that_is_not_there_refuses_to_start(tmp_path):
    """The folder and the file are named."""
    settings = read_settings({"SAGEMAKER_SUBMIT_DIRECTORY": str(tmp_path)})
    with pytest.raises(SettingsError, match=r"SAGEMAKER_SUBMIT_DIRECTORY=.*there is no inference\.py in it"):
        check_places(settings)

    (tmp_path / "inference.py").touch()
    check_places(settings)


def test_an_archive_of_the_shared_script_that_is_not_there_refuses_to_start(tmp_path):
    """What is in it shows with the first model that needs it."""
    archive = tmp_path / "user_code.tar.gz"
    settings = read_settings({"SAGEMAKER_SUBMIT_DIRECTORY": str(archive)})
    with pytest.raises(
        SettingsError, match=r"SAGEMAKER_SUBMIT_DIRECTORY='/.*user_code\.tar\.gz': there is no such archive"
    ):
        check_places(settings)

    archive.touch()
    check_places(settings)


@pytest.mark.parametrize("inference_type", InferenceType)
def test_inference_types_are_tritons_three(inference_type):
    """Anything else gets Triton's own words."""
    (garbage,) = problems(SAGEMAKER_TRITON_INFERENCE_TYPE="chat")
    settings = read_settings({"SAGEMAKER_TRITON_INFERENCE_TYPE": inference_type.value})

    assert "ERROR: Invalid SAGEMAKER_TRITON_INFERENCE_TYPE 'chat'" in garbage
    assert "infer, generate, generate_stream" in garbage
    assert settings == Settings(inference_type=inference_type)


SAFE = {"SAGEMAKER_SAFE_PORT_RANGE": "21000-21999"}


def test_sagemakers_own_port_is_not_held_against_the_safe_range():
    """8080 and SAGEMAKER_BIND_TO_PORT lie outside the range as a rule, and are SageMaker's choice."""
    assert read_settings(SAFE).port == 8080
    assert read_settings({**SAFE, "MME_PORT": "8080"}).port == 8080
    assert read_settings({**SAFE, "SAGEMAKER_BIND_TO_PORT": "9000"}).port == 9000


def test_a_port_of_ones_own_must_lie_in_the_safe_range():
    """Any other port outside the range is refused in Triton's words; its two ends belong to it."""
    (sentence,) = problems(**SAFE, MME_PORT="9000")

    assert "The server cannot listen to HTTP requests at port 9000, allowed port range is [21000, 21999]" in sentence
    assert read_settings({**SAFE, "MME_PORT": "21000"}).port == 21000
    assert read_settings({**SAFE, "MME_PORT": "21999"}).port == 21999


@pytest.mark.parametrize(("name", "what"), [("METRICS", "metrics"), ("GRPC", "gRPC")])
def test_second_ports_must_lie_in_the_safe_range(name, what):
    """One that SageMaker forbids is refused, also where it is not opened; and then it is said that it is not."""
    (sentence,) = problems(**SAFE, **{f"SAGEMAKER_TRITON_{name}_PORT": "8002"})

    assert f"The server cannot listen to {what} requests at port 8002" in sentence
    settings = read_settings({**SAFE, f"SAGEMAKER_TRITON_{name}_PORT": "21001"})
    assert any("has no effect" in notice for notice in settings.notices)
    assert settings.grpc_port is None


@pytest.mark.parametrize(
    ("environ", "port"),
    [
        ({}, None),
        ({"SAGEMAKER_TRITON_ALLOW_METRICS": "true"}, None),
        ({"SAGEMAKER_TRITON_METRICS_PORT": "9002"}, None),
        ({"SAGEMAKER_TRITON_ALLOW_METRICS": "true", "SAGEMAKER_TRITON_METRICS_PORT": "9002"}, 9002),
        ({"SAGEMAKER_TRITON_ADDITIONAL_ARGS": "--allow-metrics=true --metrics-port=9002"}, 9002),
        ({"MME_METRICS_PORT": "9003", "SAGEMAKER_TRITON_METRICS_PORT": "9002"}, 9003),
        ({"MME_METRICS_PORT": "0"}, 0),
    ],
)
def test_who_opens_a_port_for_metrics(environ, port):
    """Ours, or Triton's beside its switch."""
    settings = read_settings(environ)
    assert settings.metrics_port == port


@pytest.mark.parametrize(
    ("text", "host"),
    [
        ("::1", "::1"),
        ("[::1]", "::1"),
        ("ipv6:[::1]", "::1"),
        ("[::]", "::"),
        ("0.0.0.0", "0.0.0.0"),
        ("a-b.c", "a-b.c"),
    ],
)
def test_an_ipv6_address_may_come_in_brackets(text, host):
    """As URLs and gRPC have it."""
    settings = read_settings(SAFE | {"MME_HOST": text})
    assert settings.host == host


@pytest.mark.parametrize("other", [{}, {"MME_PORT": "9001"}, {"MME_GRPC_PORT": "9001"}])
def test_the_port_for_metrics_is_of_its_own(other):
    """Not HTTP's, and not gRPC's."""
    port = "9001" if other else "8080"
    (problem,) = problems(MME_METRICS_PORT=port, **other)
    assert problem == f"port {port} is to serve more than metrics; choose another for those with MME_METRICS_PORT"


@pytest.mark.parametrize(
    ("environ", "port"),
    [
        ({}, None),
        ({"SAGEMAKER_TRITON_ALLOW_GRPC": "true"}, 8001),
        ({"SAGEMAKER_TRITON_ALLOW_GRPC": "true", "SAGEMAKER_TRITON_GRPC_PORT": "9001"}, 9001),
        ({"SAGEMAKER_TRITON_ALLOW_GRPC": "false", "SAGEMAKER_TRITON_GRPC_PORT": "9001"}, None),
        ({"SAGEMAKER_TRITON_ADDITIONAL_ARGS": "--allow-grpc --grpc-port=9001"}, 9001),
        ({"MME_GRPC_PORT": "9002"}, 9002),
        ({"MME_GRPC_PORT": "0", "SAGEMAKER_TRITON_ALLOW_GRPC": "true"}, 0),
    ],
)
def test_who_switches_grpc_on(environ, port):
    """Our port by itself, or Triton's switch, at Triton's port unless there is another; nobody by default."""
    settings = read_settings(environ)

    assert settings.grpc_port == port


@pytest.mark.parametrize(
    ("environ", "sentence"),
    [
        (SAFE | {"SAGEMAKER_TRITON_ALLOW_GRPC": "true"}, "SAGEMAKER_TRITON_ALLOW_GRPC: .* gRPC requests at port 8001"),
        (SAFE | {"MME_GRPC_PORT": "8001"}, "--grpc-port/MME_GRPC_PORT: .* gRPC requests at port 8001"),
        ({"MME_GRPC_PORT": "8080"}, "port 8080 is HTTP's and gRPC's at once; choose another"),
        ({"MME_PORT": "9001", "MME_GRPC_PORT": "9001"}, "port 9001 is HTTP's and gRPC's at once"),
    ],
)
def test_where_grpc_can_not_listen(environ, sentence):
    """Outside the range that SageMaker leaves to containers, and where HTTP listens."""
    (problem,) = problems(**environ)

    assert re.search(sentence, problem)


@pytest.mark.parametrize("nothing", [lambda _: None, lambda name: importlib.import_module(f"{name}.gone")])
def test_grpc_without_the_library_refuses_to_start(monkeypatch, nothing):
    """With what to install; without gRPC nobody misses it."""
    monkeypatch.setattr(importlib.util, "find_spec", nothing)
    check_places(Settings())
    with pytest.raises(SettingsError, match=r"MME_GRPC_PORT=8001: .*pip install 'mme\[grpc\]'"):
        check_places(Settings(grpc_port=8001))


TLS = {"MME_GRPC_PORT": "8001", "MME_GRPC_SERVER_CERT": "/c", "MME_GRPC_SERVER_KEY": "/k"}


def test_tls_of_grpc_is_tritons_flags():
    """Under their names, by variables, and where tritonserver is given them; who has clients show something has TLS."""
    flags = "--grpc-use-ssl-mutual --grpc-server-cert=/c --grpc-server-key /k --grpc-root-cert=/r"
    flags += " --grpc-infer-response-compression-level=high"
    settings = read_settings({"SAGEMAKER_TRITON_ADDITIONAL_ARGS": f"--allow-grpc {flags}"})

    assert (settings.grpc_use_ssl, settings.grpc_use_ssl_mutual) == (True, True)
    files = (settings.grpc_server_cert, settings.grpc_server_key, settings.grpc_root_cert)
    assert files == (Path("/c"), Path("/k"), Path("/r"))
    assert settings.grpc_compression is GrpcCompression.HIGH
    by_variable = read_settings({**TLS, "MME_GRPC_USE_SSL": "true"})
    assert (by_variable.grpc_use_ssl, by_variable.grpc_use_ssl_mutual) == (True, False)


@pytest.mark.parametrize(
    ("environ", "missing"),
    [
        ({"MME_GRPC_USE_SSL": "true"}, ["MME_GRPC_SERVER_CERT", "MME_GRPC_SERVER_KEY"]),
        ({**TLS, "MME_GRPC_USE_SSL_MUTUAL": "true"}, ["MME_GRPC_ROOT_CERT"]),
    ],
)
def test_tls_needs_its_files(environ, missing):
    """A sentence for each that is not named."""
    found = problems(**environ)

    assert [re.search(r"TLS needs --[a-z-]+/(\w+) as well", problem)[1] for problem in found] == missing


def test_files_of_tls_without_tls_are_told_of():
    """Nobody reads them."""
    notices = read_settings(TLS).notices

    assert len(notices) == 2
    assert all("has no effect: --grpc-use-ssl/MME_GRPC_USE_SSL switches TLS on" in notice for notice in notices)


@pytest.mark.parametrize(
    ("cert", "key", "sentence"),
    [
        ("gone", "key", "MME_GRPC_SERVER_CERT='.*gone': there is no such file"),
        ("text", "key", "are no certificate in PEM and its key without a password"),
        ("text", "gone", "MME_GRPC_SERVER_KEY='.*gone': there is no such file"),
    ],
)
def test_certificates_that_are_none_refuse_to_start(tmp_path, cert, key, sentence):
    """By the variable and the file; without gRPC nobody looks."""
    for name in ("text", "key"):
        (tmp_path / name).write_text("no certificate")
    wrong = {"grpc_use_ssl": True, "grpc_server_cert": tmp_path / cert, "grpc_server_key": tmp_path / key}
    check_places(Settings(**wrong))
    with pytest.raises(SettingsError, match=sentence):
        check_places(Settings(grpc_port=8001, **wrong))


def test_cloudwatch_metrics_are_on_where_sagemaker_runs_the_container():
    """Elsewhere they are off, and MME_EMF decides in either case; without the endpoint's name that is mentioned."""
    assert not read_settings({"SAGEMAKER_MULTI_MODEL": "true"}).emf
    assert read_settings({"MME_EMF": "true"}).emf
    assert not read_settings({**SAFE, "MME_EMF": "false"}).emf
    assert not read_settings({**SAFE, "MME_EMF": "false"}).notices
    settings = read_settings(SAFE)
    assert settings.emf
    assert any("MME_ENDPOINT_NAME" in notice for notice in settings.notices)
    named = read_settings({**SAFE, "MME_ENDPOINT_NAME": "ep", "MME_VARIANT_NAME": "blue"})
    assert (named.endpoint_name, named.variant_name, named.notices) == ("ep", "blue", ())


def test_bind_to_port_wins_and_says_so():
    """SageMaker calls the port it named; another one that was asked for is mentioned, not used."""
    settings = read_settings({"SAGEMAKER_BIND_TO_PORT": "9000", "MME_PORT": "9001"})

    assert settings.port == 9000
    assert any("MME_PORT=9001 is not used" in notice for notice in settings.notices)


@pytest.mark.parametrize(
    ("environ", "mode"),
    [
        ({"SAGEMAKER_TRITON_PING_MODE": "live"}, PingMode.LIVE),
        ({"SAGEMAKER_TRITON_PING_MODE": "live", "SAGEMAKER_TRITON_OVERRIDE_PING_MODE": "ready"}, PingMode.READY),
        ({"SAGEMAKER_TRITON_OVERRIDE_PING_MODE": "LIVE"}, PingMode.LIVE),
        ({"SAGEMAKER_MULTI_MODEL": "true", "SAGEMAKER_TRITON_PING_MODE": "ready"}, PingMode.READY),
    ],
)
def test_ping_mode_override_wins(environ, mode):
    """Triton's override beats its ping mode, and both beat the mode's default."""
    assert read_settings(environ).ping_mode is mode


@pytest.mark.parametrize(
    ("environ", "level"),
    [
        ({}, "info"),
        ({"MME_LOG_LEVEL": "WARN"}, "warning"),
        ({"SAGEMAKER_CONTAINER_LOG_LEVEL": "10"}, "debug"),
        ({"SAGEMAKER_CONTAINER_LOG_LEVEL": "35"}, "warning"),
        ({"SAGEMAKER_CONTAINER_LOG_LEVEL": "error"}, "error"),
        ({"SAGEMAKER_TRITON_LOG_VERBOSE": "true"}, "debug"),
        ({"SAGEMAKER_TRITON_LOG_VERBOSE": "2"}, "debug"),
        ({"SAGEMAKER_TRITON_LOG_VERBOSE": "0"}, "info"),
        ({"SAGEMAKER_TRITON_LOG_INFO": "false"}, "warning"),
        ({"SAGEMAKER_TRITON_LOG_INFO": "false", "SAGEMAKER_TRITON_LOG_WARNING": "false"}, "error"),
        ({f"SAGEMAKER_TRITON_LOG_{name}": "false" for name in ("INFO", "WARNING", "ERROR")}, "critical"),
        ({"SAGEMAKER_TRITON_LOG_VERBOSE": "true", "SAGEMAKER_CONTAINER_LOG_LEVEL": "40"}, "debug"),
        ({"SAGEMAKER_TRITON_LOG_VERBOSE": "true", "MME_LOG_LEVEL": "error"}, "error"),
    ],
)
def test_log_level_from_three_families(environ, level):
    """Ours beats Triton's switches, which beat SageMaker's number."""
    assert read_settings(environ).log_level == level


def test_payload_of_a_batch_job_raises_the_body_limit_and_never_lowers_it():
    """SAGEMAKER_MAX_PAYLOAD_IN_MB counts where it is the larger one."""
    assert read_settings({"SAGEMAKER_MAX_PAYLOAD_IN_MB": "100"}).max_body_bytes == 100 * MIB
    assert read_settings({"SAGEMAKER_MAX_PAYLOAD_IN_MB": "6"}).max_body_bytes == 64 * MIB
    small = read_settings({"SAGEMAKER_MAX_PAYLOAD_IN_MB": "2", "MME_MAX_BODY": "1MiB"})
    assert (small.max_body_bytes, small.max_payload_in_mb) == (2 * MIB, 2)


def test_a_batch_job_decides_how_long_a_request_may_take():
    """An hour is the most that one can ask for; a time that was set holds there as well."""
    assert read_settings({}).request_timeout == 60
    assert read_settings({"SAGEMAKER_BATCH": "true"}).request_timeout == 3600
    assert read_settings({"SAGEMAKER_BATCH": "true", "MME_REQUEST_TIMEOUT": "90"}).request_timeout == 90


def test_batch_transform_variables_reach_the_settings():
    """What a transform job sets is what /execution-parameters answers."""
    settings = read_settings(
        {
            "SAGEMAKER_BATCH": "true",
            "SAGEMAKER_BATCH_STRATEGY": "MULTI_RECORD",
            "SAGEMAKER_MAX_CONCURRENT_TRANSFORMS": "3",
            "SAGEMAKER_MAX_PAYLOAD_IN_MB": "20",
        }
    )

    assert settings.batch_transform
    assert settings.batch_strategy == "MULTI_RECORD"
    assert (settings.max_concurrent_transforms, settings.max_payload_in_mb) == (3, 20)


def test_request_timeout_in_seconds_beats_the_older_name():
    """Both of AWS's names mean seconds; the newer wins, ours before both."""
    aws = {"SAGEMAKER_MODEL_SERVER_TIMEOUT": "30", "SAGEMAKER_MODEL_SERVER_TIMEOUT_SECONDS": "40"}

    assert read_settings({"SAGEMAKER_MODEL_SERVER_TIMEOUT": "30"}).request_timeout == 30
    assert read_settings(aws).request_timeout == 40
    assert read_settings({**aws, "MME_REQUEST_TIMEOUT": "50"}).request_timeout == 50


def test_gpu_load_limit_is_a_share_of_each_gpu():
    """Triton's limit for loading becomes the budget of the GPU, unless ours is set."""
    limit = {"SAGEMAKER_TRITON_MODEL_LOAD_GPU_LIMIT": "0.7"}

    assert read_settings(limit).gpu_memory_budget == 0.7
    assert read_settings({**limit, "MME_GPU_MEMORY_BUDGET": "1GB"}).gpu_memory_budget == 10**9


@pytest.mark.parametrize("name", [row.name for row in VARIABLES if row.has_notice])
def test_variables_without_effect_are_accepted_and_logged_once(name):
    """A variable that changes nothing starts the server, and one notice names it and the reason."""
    settings = read_settings({name: TOLD.get(name, "2")})

    (notice,) = settings.notices
    assert notice.startswith(f"{name} has no effect: ")
    assert settings == Settings()


def test_resources_are_given_as_tritonserver_is_given_them():
    """By name, count and device, together or one by one; the last word on a resource wins."""
    flags = "--rate-limit=execution_count --rate-limit-resource=R1:10 --rate-limit-resource r2:5:0 --log-info=1"
    flagged = read_settings({"SAGEMAKER_TRITON_ADDITIONAL_ARGS": flags})
    own = read_settings({"MME_RATE_LIMIT": "execution_count", "MME_RATE_LIMIT_RESOURCE": "r1:1,r2:5:0,R1:10"})

    assert flagged.rate_limit is own.rate_limit is RateLimit.EXECUTION_COUNT
    assert {str(limit) for limit in flagged.rate_limit_resources} == {"R1:10", "r2:5:0"}
    assert flagged.rate_limit_resources == own.rate_limit_resources
    assert read_settings({}).rate_limit is RateLimit.OFF


@pytest.mark.parametrize(
    ("text", "size"),
    [("0", 0), ("16MiB", 16 * MIB), ("local,size=1048576", MIB), ("local,size=0", 0)],
)
def test_the_response_cache_has_a_size(text, size):
    """In bytes or as tritonserver's flag says it, given either way."""
    flagged = {"SAGEMAKER_TRITON_ADDITIONAL_ARGS": f"--cache-config {text} --log-verbose=1"}
    assert read_settings({"MME_RESPONSE_CACHE": text}).response_cache_bytes == size
    assert read_settings(flagged).response_cache_bytes == size


@pytest.mark.parametrize(
    ("flag", "allowed"),
    [("--allow-client-shm", True), ("--allow-client-shm=true", True), ("--allow-client-shm=false", False)],
)
def test_clients_share_memory_only_where_it_is_said(flag, allowed):
    """By our variable, or by the flag that Triton's sentence names."""
    assert not read_settings({}).allow_client_shm
    assert read_settings({"MME_ALLOW_CLIENT_SHM": "true"}).allow_client_shm
    assert read_settings({"SAGEMAKER_TRITON_ADDITIONAL_ARGS": flag}).allow_client_shm is allowed


def test_additional_args_translate_the_flags_that_mean_something():
    """Flags of tritonserver set the same fields as our variables, with = or a space between flag and value."""
    settings = read_settings(
        {
            "SAGEMAKER_TRITON_ADDITIONAL_ARGS": "--load-model=encoder --load-model 'my decoder' --log-verbose 1 "
            "--http-max-input-size=1048576 --model-load-thread-count=4 --exit-timeout-secs=20",
        }
    )

    assert settings.load_models == ("encoder", "my decoder")
    assert settings.log_level == "debug"
    assert (settings.max_body_bytes, settings.load_threads, settings.drain_seconds) == (MIB, 4, 20)


def test_a_repository_is_no_prefix_of_a_store():
    """Somebody else's scheme is not taken for a folder of that name."""
    for uri in ("gs://bucket", "/r, as://account/container", "s3://bucket/models,/r", "gs://b,s3://bucket/b"):
        (sentence,) = problems(MME_MODEL_REPOSITORY=uri)
        assert "expected folders of this machine, or s3://bucket/prefix, not both" in sentence
    for uri in (
        "s3://",
        "s3://B_d/x",
        "s3://https://bucket/x",
        "s3://ftp://host:9000/bucket/x",
        "s3://host:port/bucket",
    ):
        (sentence,) = problems(MME_MODEL_REPOSITORY=uri)
        assert "expected s3://bucket/prefix, or s3://https://host:port/bucket/prefix" in sentence


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("s3://bucket/a/b/", "s3://bucket/a/b"),
        (" s3://bucket ", "s3://bucket"),
        ("s3://minio.local:9000/bucket//a/", "s3://minio.local:9000/bucket/a"),
        ("s3://https://[::1]:9000/bucket", "s3://https://[::1]:9000/bucket"),
        ("s3://bucket/a, s3://bucket/b/,s3://bucket/a/", "s3://bucket/a,s3://bucket/b"),
    ],
)
def test_a_repository_in_s3(text, url, tmp_path):
    """Its URL stands in place of folders, without needless slashes."""
    settings = read_settings({"MME_MODEL_REPOSITORY": text, "MME_CACHE_DIR": str(tmp_path / "cache")})
    assert (settings.mode, settings.repositories) == (Mode.REPOSITORY, tuple(url.split(",")))
    assert settings.model_repository is None
    check_places(settings)


def test_only_folders_are_namespaces():
    """Of several repositories in S3, names have to differ."""
    urls = "s3://bucket/a,s3://bucket/b"
    (sentence,) = problems(MME_MODEL_REPOSITORY=urls, MME_MODEL_NAMESPACING="true")
    assert "MME_MODEL_NAMESPACING: only folders are namespaces; rename models that two prefixes in S3 have" in sentence


def test_a_repository_in_s3_needs_a_folder_to_be_downloaded_to(tmp_path):
    """One that cannot be written is refused at start."""
    (tmp_path / "file").touch()
    environ = {"MME_MODEL_REPOSITORY": "s3://bucket/a", "MME_CACHE_DIR": str(tmp_path / "file" / "cache")}
    with pytest.raises(SettingsError, match="models are unpacked there, and it can't be written"):
        check_places(read_settings(environ))


def test_tritons_way_to_ask_for_traces_is_understood():
    """To OpenTelemetry, so many at a rate; a URL without a scheme, as Triton's is; what is so anyway changes nothing."""
    flags = "mode=opentelemetry level=TIMESTAMPS rate=0 opentelemetry,url=collector:4318/v1/traces count=7"
    arguments = " ".join(f"--trace-config={flag}" for flag in flags.split())
    settings = read_settings({"SAGEMAKER_TRITON_ADDITIONAL_ARGS": arguments})
    traces = (settings.trace_url, settings.trace_rate, settings.trace_count)
    assert traces == ("http://collector:4318/v1/traces", 0, 7)
    for flags, url in (
        ("--trace-config mode=opentelemetry --trace-config=level=TIMESTAMPS", "http://localhost:4318/v1/traces"),
        ("--trace-config mode=opentelemetry", ""),
        ("--trace-config=level=TIMESTAMPS", ""),
    ):
        assert read_settings({"SAGEMAKER_TRITON_ADDITIONAL_ARGS": flags}).trace_url == url


def test_tritons_own_traces_are_understood():
    """A file, and how many traces are written to it at a time; not beside a collector."""
    flags = "mode=triton level=TIMESTAMPS rate=1 triton,file=/t/t.json triton,log-frequency=5 count=-1"
    arguments = " ".join(f"--trace-config={flag}" for flag in flags.split())
    older = "--trace-level TIMESTAMPS --trace-rate=1 --trace-file /t/t.json --trace-log-frequency=5 --trace-count=-1"
    for each in (arguments, older):
        settings = read_settings({"SAGEMAKER_TRITON_ADDITIONAL_ARGS": each})
        assert (settings.trace_file, settings.trace_rate, settings.trace_log_frequency) == (Path("/t/t.json"), 1, 5)
        assert (settings.trace_count, settings.trace_level) == (-1, ("TIMESTAMPS",))
    (sentence,) = problems(MME_TRACE_FILE="/t", MME_TRACE_URL="http://localhost:4318")
    assert "traces are sent or written, not both" in sentence


def test_tensors_are_a_level_without_effect():
    """Beside times, or alone; also where traces go to a collector. The log says so."""
    for flags, levels in (
        ("--trace-config level=TIMESTAMPS --trace-config level=TENSORS", ("TIMESTAMPS",)),
        ("--trace-level TENSORS", ("OFF",)),
    ):
        for place in ({"MME_TRACE_FILE": "/t"}, {"MME_TRACE_URL": "http://localhost:4318"}):
            settings = read_settings({**place, "SAGEMAKER_TRITON_ADDITIONAL_ARGS": flags})
            assert settings.trace_level == levels
            assert "TENSORS is without effect" in settings.notices[0]
    (sentence,) = problems(MME_TRACE_LEVEL="MAX")
    assert "expected TIMESTAMPS, TENSORS or both between commas, or OFF" in sentence


def test_gunicorns_own_variable_is_told_to_be_without_effect():
    """The server's settings say all that there is to configure."""
    (notice,) = read_settings({"GUNICORN_CMD_ARGS": "--workers 2"}).notices
    assert notice.startswith("GUNICORN_CMD_ARGS has no effect: ")


def test_tritons_flags_trace_nothing_without_a_level():
    """They say where traces go, and clients may ask for some later; a variable or a flag of ours means that there are some."""
    to_a_file, timestamps = "--trace-config triton,file=/t --trace-config=rate=1", ("TIMESTAMPS",)
    for flags, own, levels in (
        (to_a_file, {}, ("OFF",)),
        ("--trace-file /t", {}, ("OFF",)),
        (f"{to_a_file} --trace-config level=OFF", {}, ("OFF",)),
        (f"{to_a_file} --trace-config level=TIMESTAMPS", {}, timestamps),
        (to_a_file, {"MME_TRACE_LEVEL": "TIMESTAMPS"}, timestamps),
        ("--trace-config rate=1", {"MME_TRACE_FILE": "/t"}, timestamps),
        ("", {"MME_TRACE_FILE": "/t"}, timestamps),
    ):
        settings = read_settings({**own, "SAGEMAKER_TRITON_ADDITIONAL_ARGS": flags})
        assert (settings.trace_level, settings.trace_file) == (levels, Path("/t"))


@pytest.mark.parametrize("flag", ["triton,file=", "mode=both", "level=MAX", "rate=", "opentelemetry,x=1"])
def test_other_ways_to_trace_are_refused(flag):
    """With those that are understood."""
    (sentence,) = problems(SAGEMAKER_TRITON_ADDITIONAL_ARGS=f"--trace-config {flag}")
    assert f"(--trace-config)='{flag}': expected one of level=TIMESTAMPS" in sentence


def test_additional_args_yield_to_our_variables_and_beat_tritons():
    """A flag loses against MME_, wins over the SAGEMAKER_TRITON_ variable it overrides, and model lists add up."""
    settings = read_settings(
        {
            "MME_LOAD_THREADS": "3",
            "MME_LOAD_MODEL": "a,b",
            "SAGEMAKER_TRITON_LOG_VERBOSE": "true",
            "SAGEMAKER_TRITON_ADDITIONAL_ARGS": "--model-load-thread-count=4 --load-model=b --load-model=c "
            "--log-verbose=false",
        }
    )

    assert settings.load_threads == 3
    assert settings.load_models == ("a", "b", "c")
    assert settings.log_level == "info"


def test_additional_args_refuse_other_flags_and_bad_values_by_name():
    """A flag we do not understand, and a value that does not parse, are each named with their origin."""
    found = problems(SAGEMAKER_TRITON_ADDITIONAL_ARGS="--model-control=1 --log-info=maybe loose")

    assert any(
        "'--model-control' is not understood; of tritonserver's flags only --id, --load" in sentence
        for sentence in found
    )
    assert any("(--log-info)='maybe'" in sentence for sentence in found)
    assert any("'loose' is not understood" in sentence for sentence in found)


def test_flags_behind_a_log_variable_are_understood():
    """The known trick of loading a second model through a log variable works as on Triton."""
    settings = read_settings({"SAGEMAKER_TRITON_LOG_INFO": "false --load-model=encoder"})

    assert settings.log_level == "warning"
    assert settings.load_models == ("encoder",)


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("http://collector:4318", "http://collector:4318/v1/traces"),
        ("https://collector/", "https://collector/v1/traces"),
        ("https://collector/otlp?key=1", "https://collector/otlp?key=1"),
    ],
)
def test_traces_go_where_collectors_take_them(text, url):
    """To the protocol's own path, unless another is named."""
    assert read_settings({"MME_TRACE_URL": text}).trace_url == url


@pytest.mark.parametrize("nothing", [lambda _: None, lambda name: importlib.import_module(f"{name}.gone")])
def test_traces_without_the_library_refuse_to_start(monkeypatch, nothing):
    """With what to install; without traces nobody misses it."""
    monkeypatch.setattr(importlib.util, "find_spec", nothing)
    check_places(Settings())
    with pytest.raises(SettingsError, match=r"MME_TRACE_URL='http://c/v1/traces': .*pip install 'mme\[otel\]'"):
        check_places(read_settings({"MME_TRACE_URL": "http://c"}))


def test_relative_paths_are_made_absolute(tmp_path, monkeypatch):
    """The server runs in another working directory, so that folders are resolved when they are read."""
    monkeypatch.chdir(tmp_path)

    assert read_settings({"MME_MODEL_STORE": "archives"}).model_store == str(tmp_path / "archives")
    assert read_settings({"MME_MODEL_STORE": f"file://{tmp_path}/a"}).model_store == f"{tmp_path}/a"
    assert read_settings({"MME_MODEL_DIR": "m"}).model_dir == tmp_path / "m"


@pytest.mark.parametrize("url", ["s3://bucket/a/b/", "s3://bucket/a/b", "s3://bucket//a/b"])
def test_store_prefix_is_written_one_way(url):
    """Slashes around a prefix do not matter."""
    assert read_settings({"MME_MODEL_STORE": url}).model_store == "s3://bucket/a/b"


def test_cache_directory_is_the_users_own():
    """Without a setting, archives are unpacked below XDG_CACHE_HOME or in a folder named for the user."""
    assert str(read_settings({"XDG_CACHE_HOME": "/x"}).cache_dir) == "/x/mme"
    assert read_settings({"TMPDIR": "/t"}).cache_dir.parent.as_posix() == "/t"
    assert str(read_settings({"MME_CACHE_DIR": "/c", "XDG_CACHE_HOME": "/x"}).cache_dir) == "/c"


def test_a_long_drain_is_mentioned():
    """A drain longer than SageMaker's patience is allowed elsewhere, and mentioned."""
    assert read_settings({}).notices == ()
    assert any("SageMaker" in n for n in read_settings({"MME_DRAIN_SECONDS": "60"}).notices)


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


def test_paths_are_checked_by_name(tmp_path):
    """A folder that is not there refuses to start, naming variable and folder."""
    for name in ("MME_MODEL_STORE", "MME_MODEL_REPOSITORY"):
        with pytest.raises(SettingsError, match=rf"{name}='{tmp_path}/none'"):
            check_places(read_settings({name: f"{tmp_path}/none"}))
        check_places(read_settings({name: str(tmp_path)}))
    check_places(read_settings({"MME_MODEL_STORE": "s3://bucket/p"}))


def test_the_only_directory_is_the_single_model_with_a_warning(tmp_path):
    """One directory needs no name; hidden folders and files beside it do not count."""
    (tmp_path / "resnet" / "1").mkdir(parents=True)
    (tmp_path / ".ipynb_checkpoints").mkdir()
    (tmp_path / "README").touch()

    name, folder, warning = choose_single_model(tmp_path, "")
    assert name == "resnet"
    assert folder == tmp_path / "resnet"
    assert warning.startswith("WARNING: No SAGEMAKER_TRITON_DEFAULT_MODEL_NAME provided")


def test_a_named_model_is_chosen_among_several(tmp_path):
    """SAGEMAKER_TRITON_DEFAULT_MODEL_NAME names the ensemble among its parts, and needs no warning."""
    for name in ("encoder", "ensemble"):
        (tmp_path / name).mkdir()

    assert choose_single_model(tmp_path, "ensemble") == ("ensemble", tmp_path / "ensemble", "")


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
    ("tree", "name", "message"),
    [
        ([], "", "ERROR: No model found in model repository"),
        (["a/", "b/"], "", "ERROR: More than 1 model directory found in model repository."),
        (["config.pbtxt", "1/"], "", "ERROR: Incorrect directory structure."),
        (["1/", "1/model.onnx"], "", "ERROR: Incorrect directory structure."),
        (
            ["a/"],
            "b",
            "ERROR: Directory with provided SAGEMAKER_TRITON_DEFAULT_MODEL_NAME b does not exist",
        ),
    ],
)
def test_single_model_trees_that_cannot_start_keep_tritons_words(tmp_path, tree, name, message):
    """Each refusal begins with the text that Triton's users search for."""
    for entry in tree:
        (tmp_path / entry).mkdir() if entry.endswith("/") else (tmp_path / entry).touch()

    with pytest.raises(SettingsError) as raised:
        choose_single_model(tmp_path, name)
    assert raised.value.message.startswith(message)


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


def test_a_missing_model_directory_says_what_to_give(tmp_path):
    """Started with nothing, the message leads to the flags."""
    with pytest.raises(SettingsError, match="--model-store"):
        choose_single_model(tmp_path / "none", "")


@given(st.floats(1e-9, 1.0), st.integers(1, 2**50))
def test_shares_are_written_without_loss(value, reserve):
    """Any share of memory survives being written as text, and so does one less a reserve."""
    assert memory_budget(to_text(value)) == value
    assert memory_budget(to_text(Share(value, reserve))) == Share(value, reserve)


def test_log_format_is_a_word():
    """The format of the log is read regardless of case."""
    assert read_settings({"MME_LOG_FORMAT": "JSON"}).log_format is LogFormat.JSON
    for name, said in (("default", LogFormat.TRITON), ("ISO8601", LogFormat.ISO8601)):
        assert read_settings({"SAGEMAKER_TRITON_ADDITIONAL_ARGS": f"--log-format={name}"}).log_format is said


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


def test_archives_that_can_be_unpacked_nowhere_refuse_to_start(tmp_path):
    """A folder that can't be made or written is named before a worker dies of it, again and again."""
    (tmp_path / "file").touch()
    where = {"MME_MODEL_STORE": str(tmp_path), "MME_CACHE_DIR": str(tmp_path / "file" / "cache")}

    with pytest.raises(SettingsError, match=r"MME_CACHE_DIR='.*/file/cache': models are unpacked there, and it can't"):
        check_places(read_settings(where))
    check_places(read_settings({**where, "MME_CACHE_DIR": str(tmp_path / "cache")}))


# -- variables of Amazon's containers ----------------------------------------------------------------------------------

HONOURED = {
    "SAGEMAKER_INFERENCE_OUTPUT": (
        "predicted_label, Probabilities",
        "script_output",
        ("predicted_label", "probabilities"),
    ),
    "MAX_CONTENT_LENGTH": ("20000000", "max_body_bytes", 20_000_000),
    "SAGEMAKER_MAX_REQUEST_SIZE": ("6291456", "max_body_bytes", 6_291_456),
    "TS_MAX_REQUEST_SIZE": ("655350000", "max_body_bytes", 655_350_000),
    "MMS_MAX_REQUEST_SIZE": ("655350000", "max_body_bytes", 655_350_000),
    "SAGEMAKER_NUM_MODEL_WORKERS": ("3", "script_workers", 3),
    "SAGEMAKER_TS_MIN_WORKERS": ("3", "script_workers", 3),
    "TS_DEFAULT_WORKERS_PER_MODEL": ("3", "script_workers", 3),
    "MMS_DEFAULT_WORKERS_PER_MODEL": ("3", "script_workers", 3),
    "SAGEMAKER_TS_RESPONSE_TIMEOUT": ("90", "request_timeout", 90.0),
    "TS_DEFAULT_RESPONSE_TIMEOUT": ("90", "request_timeout", 90.0),
    "MMS_DEFAULT_RESPONSE_TIMEOUT": ("90", "request_timeout", 90.0),
    "SAGEMAKER_GUNICORN_TIMEOUT_SECONDS": ("90", "request_timeout", 90.0),
    "SAGEMAKER_NGINX_PROXY_READ_TIMEOUT_SECONDS": ("90", "request_timeout", 90.0),
}
TOLD = {  # a value that changes nothing, where "2" is none
    "SAGEMAKER_TRITON_DISABLE_MODEL_NAMESPACING": "true",
    "SAGEMAKER_HANDLER": "sagemaker_pytorch_serving_container.handler_service",
    "SAGEMAKER_BASE_DIR": "/opt/ml",
    "SAGEMAKER_MODEL_PATH": "/opt/ml/model/",
    "SM_MODEL_DIR": "/opt/ml/model",
}
REFUSED = {
    "SAGEMAKER_INFERENCE_OUTPUT": ("probability,explanation", "one or several of predicted_label, labels,"),
    "SAGEMAKER_HANDLER": ("my_service:handle", "put what this one does into code/inference.py"),
    "SAGEMAKER_BASE_DIR": ("/data", "name their place by MME_MODEL_DIR"),
    "SAGEMAKER_MODEL_PATH": ("/data/model", "name their place by MME_MODEL_DIR"),
    "SM_MODEL_DIR": ("/data/model", "name their place by MME_MODEL_DIR"),
    "SAGEMAKER_MULTI_MODEL_UNIVERSAL_BUCKET": ("b", "name their archive by SAGEMAKER_SUBMIT_DIRECTORY"),
    "SAGEMAKER_MULTI_MODEL_UNIVERSAL_PREFIX": ("code/", "name their archive by SAGEMAKER_SUBMIT_DIRECTORY"),
}


@pytest.mark.parametrize("name", sorted({*HONOURED, *REFUSED, *(row.name for row in VARIABLES if row.has_notice)}))
def test_no_variable_of_amazons_containers_is_ignored_in_silence(name):
    """Each is done as there, said to have no effect, or refused."""
    if name in HONOURED:
        text, field, value = HONOURED[name]
        assert getattr(read_settings({name: text}), field) == value
        assert getattr(Settings(), field) != value
    else:
        assert name in REFUSED or BY_NAME[name].has_notice
    if name in REFUSED:
        text, words = REFUSED[name]
        with pytest.raises(SettingsError, match=re.escape(words)):
            read_settings({name: text})


def test_our_own_variables_count_before_those_of_amazons_containers():
    """And SageMaker's toolkits' before those of model servers."""
    both = {"MME_REQUEST_TIMEOUT": "5", "SAGEMAKER_TS_RESPONSE_TIMEOUT": "90"}
    assert read_settings(both).request_timeout == 5
    both = {"SAGEMAKER_MODEL_SERVER_TIMEOUT": "5", "TS_DEFAULT_RESPONSE_TIMEOUT": "90"}
    assert read_settings(both).request_timeout == 5


@pytest.mark.parametrize("name", ["MMS_NUMBER_OF_NETTY_THREADS", "TS_JOB_QUEUE_SIZE", "SAGEMAKER_TFS_NOVELTY"])
def test_a_setting_of_a_model_server_that_has_no_row_is_told(name):
    """Whatever a model server would make of it."""
    (notice,) = read_settings({name: "7"}).notices
    assert notice == f"{name} has no effect: it is of a model server of Amazon's containers"


def test_what_answers_hold_is_said_to_boosters_without_a_script(tmp_path):
    """By a parameter of the model, and to no other."""
    scripts = read_settings({"SAGEMAKER_INFERENCE_OUTPUT": "labels,probability"}).scripts
    (tmp_path / "xgboost-model").touch()
    assert scripts.completed(ModelConfig("m"), tmp_path).parameters[SELECTED] == "labels,probability"
    (tmp_path / "inference.py").touch()
    assert SELECTED not in scripts.completed(ModelConfig("m"), tmp_path).parameters
