"""Loads with another configuration, or with other files, for once."""

import asyncio
import gc
import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from model_handlers.base import Footprint
from model_handlers.errors import Kind, MmeError
from model_handlers.model_calls import Override
from serve.sources.override import Overrides, check_override, forget_overrides, inner_path
from serve.sources.source import InRepository
from serve.state_file import life_of
from tests.serve.engines import answered, engine_of


@pytest.mark.parametrize(
    ("key", "path"),
    [
        ("file:1/model.onnx", "1/model.onnx"),
        ("file:labels.txt", "labels.txt"),
        ("file:./1//model.onnx", "1/model.onnx"),
        ("file:1/../2/model.onnx", "2/model.onnx"),
        ("file:1/..model", "1/..model"),
    ],
)
def test_paths_inside_the_model_are_normalised(key, path):
    """Whatever way leads there."""
    assert inner_path(key) == path


@pytest.mark.parametrize(
    ("key", "normalised"),
    [
        ("file:../model.onnx", "../model.onnx"),
        ("file:1/../../model.onnx", "../model.onnx"),
        ("file:/etc/passwd", "/etc/passwd"),
        ("file://etc/passwd", "//etc/passwd"),
        ("file:..", ".."),
        ("file:", "."),
        ("file:1/", "1"),
        ("file:a\0b", "a\0b"),
    ],
)
def test_nothing_leads_out_of_the_model(key, normalised):
    """Refused in Triton's words, with the path as it was understood."""
    with pytest.raises(MmeError) as caught:
        inner_path(key)
    assert caught.value.kind is Kind.INVALID_ARGUMENT
    assert caught.value.message == (
        f"Invalid file parameter '{key}' with normalized path '{normalised}' must stay within model directory."
    )


@pytest.mark.parametrize("path", ["a" * 256, "1/" + "é" * 128, "/".join(["a" * 200] * 6)])
def test_a_path_that_no_disk_has_room_for_is_refused(path):
    """By what is wrong with it, before anything is written; one that is just short enough is none."""
    with pytest.raises(MmeError, match=f"^Invalid file path '{path[:100]}") as caught:
        inner_path(f"file:{path}")
    assert caught.value.kind is Kind.INVALID_ARGUMENT
    assert len(caught.value.message) < 400
    assert inner_path("file:1/" + "a" * 255) == "1/" + "a" * 255


@given(st.lists(st.sampled_from(["..", ".", "a", "b", "", "c.d", "/"]), max_size=8))
def test_no_path_escapes(tmp_path_factory, parts):
    """Whatever is made of dots and slashes lies inside the folder, or is refused."""
    folder = tmp_path_factory.getbasetemp() / "model"
    try:
        path = inner_path("file:" + "/".join(parts))
    except MmeError:
        return
    assert (folder / path).resolve().is_relative_to(folder)
    assert (folder / path).resolve() != folder


@pytest.mark.parametrize(
    ("override", "words"),
    [
        (
            Override("", {"file:1/model.onnx": b""}),
            "Load parameter 'config' must be specified for model file override",
        ),
        (Override("{}", {"1/model.onnx": b""}), "Unrecognized load parameter '1/model.onnx' with type 'BYTES'"),
        (Override("{}", {"file:1": b"", "file:1/model.onnx": b""}), "name '1' as a file, and as the folder"),
    ],
)
def test_overrides_that_make_no_sense_are_refused(override, words):
    """Before anything is written."""
    with pytest.raises(MmeError) as caught:
        check_override(override)
    assert words in caught.value.message


def test_folders_go_with_those_who_refer_to_them(tmp_path):
    """A folder of files is there as long as its source is; those of processes that ended go at the next start."""
    left = tmp_path / "overrides" / "0-1-2~gone"
    left.mkdir(parents=True)
    overrides = Overrides(tmp_path / "overrides")
    assert not left.exists()
    source = overrides.source("m", None, Override("{}", {"file:1/model.onnx": b"model"}))
    path = source.folder.path
    assert (path / "1" / "model.onnx").read_bytes() == b"model"
    assert source.base == InRepository(path)
    Overrides(tmp_path / "overrides")
    assert path.exists(), "it is that of a process that lives"
    del source
    gc.collect()
    assert not path.exists()


def test_the_next_worker_restores_what_is_named_and_removes_the_rest(tmp_path):
    """Of the folders that a worker of the same server left: those that are restored stay, of the others none."""
    directory = tmp_path / "overrides"
    life, dead = life_of(os.getppid()), "0-1-2"
    for name in ("named", "forgotten"):
        (directory / f"{life}~{dead}~{name}" / "1").mkdir(parents=True)
    (directory / f"{life}~{life}~other").mkdir()
    overrides = Overrides(directory, life)
    source = overrides.restored("m", None, "{}", f"{life}~{dead}~named")
    assert source.base == InRepository(source.folder.path)
    overrides.sweep()
    assert sorted(path.name.rpartition("~")[2] for path in directory.iterdir()) == ["named", "other"]

    made = overrides.source("m", None, Override("{}", {"file:1/model.onnx": b"model"}))
    made.folder.leave()
    del made, source
    gc.collect()
    assert sorted(path.name.split("~")[1] for path in directory.iterdir()) == sorted([life, life_of(os.getpid())])
    with pytest.raises(MmeError, match="files of a client's that are gone"):
        overrides.restored("m", None, "{}", f"{life}~{dead}~named")
    forget_overrides(tmp_path, life)
    assert list(directory.iterdir()) == []


def test_files_that_are_there_are_not_looked_at_for_room(tmp_path, monkeypatch):
    """Their bytes are known, also of what the worker before left; a folder that goes gives its own back."""
    overrides = Overrides(tmp_path / "overrides", budget=1000)
    left = tmp_path / "overrides" / "left"
    left.mkdir(parents=True)
    (left / "m").write_bytes(bytes(90))
    made = [overrides.source(f"m{number}", None, Override("{}", {"file:1/m": bytes(90)})) for number in range(9)]
    made.append(overrides.restored("again", None, "{}", "left"))
    looks = []
    monkeypatch.setattr(os, "walk", lambda path: looks.append(path) or iter(()))
    with pytest.raises(MmeError, match="those of other models hold 900 of 1000 bytes"):
        overrides.source("one more", None, Override("{}", {"file:1/m": bytes(101)}))
    del made
    gc.collect()
    overrides.source("one more", None, Override("{}", {"file:1/m": bytes(1000)}))
    assert looks == []


def test_files_of_all_models_together_have_a_budget(tmp_path):
    """Beyond it a load finds no room on disk, until another model's files are gone."""
    overrides = Overrides(tmp_path / "overrides", budget=1000)
    first = overrides.source("a", None, Override("{}", {"file:1/model.onnx": bytes(600)}))
    with pytest.raises(MmeError, match="hold 600 of 1000 bytes") as caught:
        overrides.source("b", None, Override("{}", {"file:1/model.onnx": bytes(600)}))
    assert caught.value.kind is Kind.OUT_OF_MEMORY
    del first
    gc.collect()
    overrides.source("b", None, Override("{}", {"file:1/model.onnx": bytes(600)}))


# -- through the engine ------------------------------------------------------------------------------------------------


@pytest.fixture
def engine(tmp_path, write_repository_model):
    """An engine over a repository that holds `a`, which doubles."""
    write_repository_model(tmp_path / "models" / "a")
    return engine_of(tmp_path, repository=tmp_path / "models")


async def config_of(engine, name="a"):
    """The configuration that it is served with."""
    async with engine.leased(name) as model:
        return model.config


async def test_a_configuration_holds_for_one_load(engine, toys):
    """The next plain load is of the model's own again; evicted and back, it is still the overridden one."""
    await engine.reload("a", Override('{"max_batch_size": 16, "instance_group": [{"kind": "kind_cpu", "count": 3}]}'))
    config = await config_of(engine)
    assert (config.max_batch_size, config.instance_group[0].count) == (16, 3)
    assert await answered(engine, toys) == 2
    await engine.cache.relieve("other", Footprint(1), "execution")
    assert not engine.index.is_resident("a")
    assert (await config_of(engine)).max_batch_size == 16
    await engine.reload("a")
    assert (await config_of(engine)).max_batch_size != 16
    await engine.reload("a", Override('{"max_batch_size": 16}'))
    await engine.unload("a")
    assert (await config_of(engine)).max_batch_size != 16


@pytest.mark.parametrize(
    ("config", "kind", "words"),
    [
        (
            "{",
            Kind.INVALID_ARGUMENT,
            "failed to load 'a', failed to poll from model repository: Invalid config override: ",
        ),
        ("[]", Kind.INVALID_ARGUMENT, "Invalid config override: it must be a JSON object"),
        ('{"no_field": 1}', Kind.INVALID_ARGUMENT, 'Invalid config override: Message type "ModelConfig" has no field'),
        ('{"max_batch_size": "many"}', Kind.INVALID_ARGUMENT, "Invalid config override: "),
        ('{"max_batch_size": -1}', Kind.INVALID_MODEL, "'max_batch_size' must be non-negative value for a"),
        ('{"name": "b"}', Kind.INVALID_MODEL, "unexpected directory name 'a' for model 'b'"),
        ('{"input": [{"name": "z", "data_type": "TYPE_FP32", "dims": [2]}]}', Kind.INVALID_MODEL, "'z'"),
    ],
)
async def test_a_configuration_that_can_not_be_costs_nobody_the_model(engine, toys, config, kind, words):
    """It says what is wrong; the model serves as it did."""
    await engine.reload("a")
    with pytest.raises(MmeError) as caught:
        await engine.reload("a", Override(config))
    assert (caught.value.kind, words in caught.value.message) == (kind, True), caught.value
    assert "\n" not in caught.value.message
    assert await answered(engine, toys) == 2


async def test_files_stand_for_all_of_the_models_own(engine, toys, tmp_path, write_onnx):
    """They are served from a folder of their own; the repository is as it was, and serves again after a plain load."""
    write_onnx(tmp_path / "new.onnx", 7.0)
    override = Override("{}", {"file:1/model.onnx": (tmp_path / "new.onnx").read_bytes()})
    before = {path: path.read_bytes() for path in (tmp_path / "models").rglob("*") if path.is_file()}
    await engine.reload("a", override)
    assert await answered(engine, toys) == 7
    await engine.cache.relieve("other", Footprint(1), "execution")
    assert await answered(engine, toys) == 7
    await engine.reload("a")
    assert await answered(engine, toys) == 2
    assert {path: path.read_bytes() for path in (tmp_path / "models").rglob("*") if path.is_file()} == before
    folder = tmp_path / "cache" / "overrides"
    while list(folder.iterdir()):  # the one that it belongs to closes on a thread
        await asyncio.sleep(0.001)
        gc.collect()


async def test_files_can_be_a_model_that_is_nowhere_else(engine, toys, tmp_path, write_onnx):
    """It is registered by its name, and unknown once it is unloaded; without files it can't be loaded at all."""
    write_onnx(tmp_path / "new.onnx", 5.0)
    with pytest.raises(MmeError) as caught:
        await engine.reload("new", Override("{}"))
    assert caught.value.kind is Kind.UNKNOWN_MODEL
    await engine.reload("new", Override("{}", {"file:1/model.onnx": (tmp_path / "new.onnx").read_bytes()}))
    assert await answered(engine, toys, "new") == 5
    with pytest.raises(MmeError):
        await engine.reload("new")
    assert await answered(engine, toys, "new") == 5
    await engine.unload("new")
    with pytest.raises(MmeError) as caught:
        await answered(engine, toys, "new")
    assert caught.value.kind is Kind.UNKNOWN_MODEL


def test_two_at_once_do_not_take_more_than_there_is(tmp_path):
    """Of loads that come together, those find room that fit beside the ones before them."""
    overrides = Overrides(tmp_path / "overrides", budget=10_000_000)
    together = threading.Barrier(16)

    def load(number):
        together.wait(60)
        try:
            return overrides.source(f"m{number}", None, Override("{}", {"file:1/model.onnx": bytes(6_000_000)}))
        except MmeError as error:
            return error

    with ThreadPoolExecutor(16) as pool:
        made = list(pool.map(load, range(16)))
    errors = [each for each in made if isinstance(each, MmeError)]
    assert len(errors) == 15
    assert {error.kind for error in errors} == {Kind.OUT_OF_MEMORY}
