"""Models that bring environments of their own, from their folder to an answer, by the loader that the engine has."""

import asyncio
import re

import numpy as np
import pytest

from model_handlers.base import CPU, ModelRequest
from model_handlers.errors import Kind, MmeError
from model_handlers.isolation.fork_client import FORKS
from serve.source import InRepository
from serve.target import ModelLoader
from tests.environments import facts_of, venv, write_model

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def fork_server():
    """It lives as long as the process that serves."""
    FORKS.ensure_running()
    yield
    FORKS.stop()


@pytest.fixture(scope="module")
def prefix(tmp_path_factory):
    """An environment with nothing but numpy."""
    return venv(tmp_path_factory.mktemp("environment") / "env")


@pytest.fixture
def loader():
    """The loader of an engine."""
    loop = asyncio.new_event_loop()
    yield ModelLoader(loop, {})
    loop.close()


def prepared(loader, folder):
    """A model's files, found and understood."""
    return loader.prepare(folder.name, InRepository(folder), lambda: False)


def refused(loader, folder):
    """The error of a model that can't be loaded."""
    with pytest.raises(MmeError) as raised:
        prepared(loader, folder)
    return raised.value


def facts(target, version=1):
    """What a version of the model tells about its process."""
    file = target.directory.model_file(version)
    handler = target.start(target.directory.config, file, CPU, "m_0_0")
    try:
        [answer] = handler.execute_requests([ModelRequest({"A": np.ones((1, 2), np.float32)}, ("FACTS",))])
        return facts_of(answer.outputs["FACTS"])
    finally:
        handler.close()


def at(path):
    """The parameter that names an environment."""
    return {"EXECUTION_ENV_PATH": str(path)}


def test_a_model_runs_in_the_folder_that_it_names(loader, tmp_path, prefix):
    """An absolute path, for every version of the model."""
    folder = write_model(tmp_path / "m", parameters=at(prefix))
    (folder / "2").mkdir()
    (folder / "2/model.py").write_bytes((folder / "1/model.py").read_bytes())
    (folder / "config.pbtxt").write_text((folder / "config.pbtxt").read_text() + "version_policy { all {} }")
    target = prepared(loader, folder)

    assert [facts(target, version)["prefix"] for version in (1, 2)] == [str(prefix)] * 2


def test_the_models_directory_may_begin_the_path(loader, tmp_path):
    """Triton's name for it is replaced."""
    folder = write_model(tmp_path / "m", parameters=at("$$TRITON_MODEL_DIRECTORY/env"))
    venv(folder / "env")

    assert facts(prepared(loader, folder))["prefix"] == str(folder / "env")


def test_a_model_without_an_environment_runs_in_ours(loader, tmp_path):
    """Its process is a fork, with the packages of the server."""
    import sys  # noqa: PLC0415 - beside what it is compared with

    folder = write_model(tmp_path / "m", "import orjson\nreturn sys.prefix")

    assert facts(prepared(loader, folder)) == sys.prefix


def link_away(path):
    """An environment whose interpreter was left where it was made."""
    (path / "bin").mkdir(parents=True)
    (path / "bin/python").symlink_to("/nowhere/python3.9")


def no_right(path):
    """An interpreter that nobody may execute."""
    (path / "bin").mkdir(parents=True)
    (path / "bin/python").write_text("#!/bin/sh\n")


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda _: None, "is not there"),
        (lambda path: path.mkdir(), "has no bin/python that can be executed: an environment as conda or venv makes"),
        (link_away, "leads with bin/python to /nowhere/python3.9, which this machine does not have: pack it together"),
        (no_right, "has no bin/python that can be executed"),
    ],
    ids=["missing", "empty", "elsewhere", "not executable"],
)
def test_a_folder_that_is_no_environment_is_refused(loader, tmp_path, make, words):
    """The sentence names model, path and what is wrong with it."""
    make(tmp_path / "env")
    error = refused(loader, write_model(tmp_path / "m", parameters=at(tmp_path / "env")))

    assert error.kind is Kind.INVALID_MODEL
    assert error.message.startswith(f"model 'm': its environment {tmp_path / 'env'} {words}")


def test_a_path_has_to_say_where_it_begins(loader, tmp_path):
    """A relative one would depend on where the server was started."""
    error = refused(loader, write_model(tmp_path / "m", parameters=at("env")))

    assert error.kind is Kind.INVALID_MODEL
    assert error.message == (
        "model 'm': parameter 'EXECUTION_ENV_PATH' is 'env'; "
        "it must be an absolute path or begin with $$TRITON_MODEL_DIRECTORY"
    )


def test_an_environment_needs_a_process(loader, tmp_path, prefix):
    """A model that is told to execute inline can't have one."""
    error = refused(loader, write_model(tmp_path / "m", parameters={**at(prefix), "MME_PLACEMENT": "inline"}))

    assert error.kind is Kind.INVALID_MODEL
    assert re.search("only a process of its own can have: remove its parameter 'MME_PLACEMENT'", error.message)
