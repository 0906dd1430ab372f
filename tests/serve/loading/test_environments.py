"""Models that bring environments of their own, from their folder to an answer, by the loader that the engine has."""

import asyncio
import gzip
import re
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from model_handlers.base import CPU
from model_handlers.config.pbtxt import parse_config
from model_handlers.environment_cache import Environments
from model_handlers.errors import Kind, MmeError
from model_handlers.python.handler import PythonHandler
from model_handlers.requests import ModelRequest
from model_handlers.system.threads import NEVER
from serve.loading.loader import ModelLoader
from serve.loading.prepare import Preparer
from serve.sources.source import InRepository
from tests.environments import (
    another_interpreter,
    facts_of,
    forget_installed,
    pack,
    too_old,
    venv,
    version_of,
    write_model,
    write_wheel,
)

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("fork_server")]


@pytest.fixture(scope="module")
def prefix(tmp_path_factory):
    """An environment with nothing but numpy."""
    return venv(tmp_path_factory.mktemp("environment") / "env")


@pytest.fixture(scope="module")
def archive(tmp_path_factory):
    """A packed environment that has all that it needs."""
    folder = tmp_path_factory.mktemp("packed")
    return pack(venv(folder / "env", whole=True), folder / "env.tar.gz")


@pytest.fixture
def kept(tmp_path):
    """Where environments are kept."""
    return tmp_path / "cache/environments"


@pytest.fixture
def loader(kept, home):
    """The loader of an engine."""
    loop = asyncio.new_event_loop()
    yield ModelLoader(loop, {}, Preparer(environments=Environments(kept)))
    loop.close()


def prepared(loader, folder):
    """A model's files, found and understood, and what it brings made."""
    target = loader.prepare(folder.name, InRepository(folder), NEVER)
    return target if target.equipped else loader.equip(target, NEVER)


def refused(loader, folder):
    """The error of a model that can't be loaded."""
    with pytest.raises(MmeError) as raised:
        prepared(loader, folder)
    return raised.value


def facts(target, version=1):
    """What a version of the model tells about its process."""
    handler = target.start(version, target.directory.config, CPU, "m_0_0")
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
    folder = write_model(tmp_path / "m", "import orjson\nreturn sys.prefix")

    assert facts(prepared(loader, folder)) == sys.prefix


def test_a_model_runs_in_ours_that_requires_what_is_there(loader, tmp_path, kept):
    """Nothing is made, and wheels that it brings none the less count for nothing."""
    files = {"1/requirements.txt": "orjson\nnumpy>=1.20\n", "1/wheels/large.whl": bytes(1 << 20)}
    folder = write_model(tmp_path / "m", "import orjson\nreturn sys.prefix", files=files)
    target = loader.prepare("m", InRepository(folder), NEVER)

    assert target.equipped
    assert facts(target) == sys.prefix
    assert target.on_disk.host < 1 << 20
    assert not kept.exists()


def test_another_image_is_asked_anew_what_it_has(loader, tmp_path, monkeypatch):
    """What the model took when it shared the server's packages is not expected of it where it can't."""
    folder = write_model(tmp_path / "m", files={"requirements.txt": "greeting\n"})
    with zipfile.ZipFile(write_wheel(tmp_path / "wheels", "greeting")) as wheel:
        wheel.extractall(tmp_path / "packages")
    forget_installed()
    with monkeypatch.context() as image:
        image.syspath_prepend(tmp_path / "packages")
        with_it = loader.prepare("m", InRepository(folder), NEVER)
    forget_installed()
    without = loader.prepare("m", InRepository(folder), NEVER)

    assert (with_it.equipped, without.equipped) == (True, False)
    assert with_it.identity != without.identity


def link_away(path):
    """An environment whose interpreter was left where it was made."""
    (path / "bin").mkdir(parents=True)
    (path / "bin/python").symlink_to("/nowhere/python3.9")


def no_right(path):
    """An interpreter that nobody may execute."""
    (path / "bin").mkdir(parents=True)
    (path / "bin/python").write_text("#!/bin/sh\n")


def of_another_processor(path):
    """An interpreter for a processor that this machine does not have."""
    header = bytearray(Path(sys.executable).read_bytes()[:64])
    header[18] ^= 0xFF
    executable(path, bytes(header))


def of_another_system(path):
    """An interpreter for macOS."""
    executable(path, b"\xcf\xfa\xed\xfe" + bytes(60))


def executable(path, content):
    """An interpreter of that content."""
    (path / "bin").mkdir(parents=True)
    (path / "bin/python").write_bytes(content)
    (path / "bin/python").chmod(0o755)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda _: None, "is not there"),
        (lambda path: path.mkdir(), "has no bin/python that can be executed: an environment as conda or venv makes"),
        (link_away, "leads with bin/python to /nowhere/python3.9, which this machine does not have: pack it together"),
        (no_right, "has no bin/python that can be executed"),
        (of_another_processor, "was made for another platform: make it anew on Linux with a processor of the kind of"),
        (of_another_system, "was made for another platform: make it anew on Linux"),
    ],
    ids=["missing", "empty", "elsewhere", "not executable", "another processor", "another system"],
)
def test_a_folder_that_is_no_environment_is_refused(loader, tmp_path, make, words):
    """The sentence names model, path and what is wrong with it."""
    make(tmp_path / "env")
    error = refused(loader, write_model(tmp_path / "m", parameters=at(tmp_path / "env")))

    assert error.kind is Kind.INVALID_MODEL
    assert error.message.startswith(f"model 'm': its environment {tmp_path / 'env'} {words}")


def test_a_path_that_no_disk_has_is_not_there(loader, tmp_path):
    """However strange."""
    error = refused(loader, write_model(tmp_path / "m", parameters=at(f"/{'x' * 300}")))

    assert error.kind is Kind.INVALID_MODEL
    assert "x is not there: " in error.message


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


# -- packed ------------------------------------------------------------------------------------------------------------


def test_a_model_runs_in_the_environment_that_it_brings_packed(loader, kept, tmp_path, archive):
    """It is unpacked before the load, once; the next load finds it there."""
    files = {"env.tar.gz": archive.read_bytes()}
    folder = write_model(tmp_path / "m", parameters=at("$$TRITON_MODEL_DIRECTORY/env.tar.gz"), files=files)
    first = loader.prepare("m", InRepository(folder), NEVER)
    assert not first.equipped
    assert not kept.exists()
    first = loader.equip(first, NEVER)
    assert first.equipped
    second = loader.prepare("m", InRepository(folder), NEVER)
    assert second.equipped

    [prefix] = {facts(target)["prefix"] for target in (first, second)}
    assert prefix.startswith(f"{kept}/packed-")


@pytest.mark.long
def test_models_of_equal_environments_share_one(loader, kept, tmp_path, archive):
    """Each brings its own file; what is in it counts."""
    files = {"env.tar.gz": archive.read_bytes()}
    where = at("$$TRITON_MODEL_DIRECTORY/env.tar.gz")
    folders = [write_model(tmp_path / name, parameters=where, files=files) for name in ("one", "two")]
    with ThreadPoolExecutor(2) as pool:
        targets = list(pool.map(prepared, [loader] * 2, folders))

    prefixes = {facts(target)["prefix"] for target in targets}
    assert len(prefixes) == 1
    assert len([path for path in kept.iterdir() if path.is_dir()]) == 1


@pytest.mark.long
def test_another_version_of_python_may_be_packed(loader, tmp_path):
    """The model runs on that version, and is served all the same."""
    python = another_interpreter("newest")
    archive = pack(venv(tmp_path / "other", python, whole=True), tmp_path / "other.tar.gz")
    folder = write_model(tmp_path / "m", "return sys.version_info[:3]", parameters=at(archive))

    assert tuple(facts(prepared(loader, folder))) == version_of(python)


def test_a_packed_environment_is_no_part_of_what_a_model_takes(loader, tmp_path, archive):
    """Its bytes stay on the disk, wherever it lies, and room for them must not be made in memory."""
    plain = prepared(loader, write_model(tmp_path / "plain"))
    files = {"1/env.tar.gz": archive.read_bytes()}
    where = at("$$TRITON_MODEL_DIRECTORY/1/env.tar.gz")
    target = prepared(loader, write_model(tmp_path / "with", parameters=where, files=files))

    assert target.estimate == plain.estimate


def fails_to_load(loader, folder):
    """The error of a model whose environment is there and does not serve."""
    target = prepared(loader, folder)
    with pytest.raises(MmeError) as raised:
        facts(target)
    return raised.value


def test_an_environment_that_does_not_serve_fails_the_load(loader, tmp_path):
    """Too old a Python, or no numpy: packed as well as unpacked."""
    bare = pack(venv(tmp_path / "bare", numpy=False), tmp_path / "bare.tar.gz")
    error = fails_to_load(loader, write_model(tmp_path / "one", parameters=at(bare)))
    assert error.kind is Kind.INVALID_MODEL
    assert "model 'one': its environment" in error.message
    assert "has no numpy, which models get their tensors in: install it there" in error.message

    old = pack(too_old(tmp_path / "old"), tmp_path / "old.tar.gz")
    error = fails_to_load(loader, write_model(tmp_path / "two", parameters=at(old)))
    assert error.kind is Kind.INVALID_MODEL
    assert re.search(
        r"has Python 3\.\d+\.\d+; models run on Python 3\.10 or newer, and this server on 3\.", error.message
    )


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda data: data[:-5000], "is truncated: "),
        (gzip.decompress, "is a tar file that is not compressed: gzip it"),
    ],
    ids=["cut", "not packed"],
)
def test_a_broken_archive_fails_the_load_and_leaves_nothing(loader, kept, tmp_path, archive, spoil, words):
    """The sentence names model and file."""
    files = {"env.tar.gz": spoil(archive.read_bytes())}
    folder = write_model(tmp_path / "m", parameters=at("$$TRITON_MODEL_DIRECTORY/env.tar.gz"), files=files)
    error = refused(loader, folder)

    assert error.kind is Kind.INVALID_MODEL
    assert error.message.startswith(f"model 'm': its environment {folder}/env.tar.gz {words}")
    assert list(kept.iterdir()) == []


def test_a_link_that_leaves_fails_the_load_and_leaves_nothing(loader, kept, tmp_path):
    """As does everything else that would reach beyond the environment's folder."""
    (venv(tmp_path / "env", numpy=False) / "etc").symlink_to("/etc")
    archive = pack(tmp_path / "env", tmp_path / "env.tar.gz")
    error = refused(loader, write_model(tmp_path / "m", parameters=at(archive)))

    assert error.kind is Kind.INVALID_MODEL
    assert error.message == f"model 'm': its environment {archive} has a link 'etc' to '/etc', which leads out of it"
    assert list(kept.iterdir()) == []


def test_nothing_is_made_for_who_only_asks(tmp_path, kept, archive):
    """A configuration is completed without the environment, where code of strangers must not run."""
    folder = write_model(tmp_path / "m", parameters=at(archive))
    config = parse_config((folder / "config.pbtxt").read_text(), model="m")
    PythonHandler.autocomplete(config, folder / "1/model.py")

    assert not kept.exists()
