"""Settings become a running engine: its options, its start-up models, its health."""

import asyncio
import json
import logging
import os
import shutil
import sys
import tarfile
from pathlib import Path
from unittest.mock import Mock

import pynvml
import pytest

from container.process.service import Service, engine_options
from container.settings import Mode, PingMode, Settings, SettingsError
from model_handlers.base import Footprint
from model_handlers.errors import Kind, MmeError
from model_handlers.worker.limits import Deadlines
from serve.cache.eviction import Policy, Rules
from serve.engine import Engine
from serve.options import Control
from serve.sources.catalog import ModelCatalog
from tests.fake_nvml import FakeNvml
from tests.waiting import eventually


def infer(running, path, json_inputs):
    """The first output for X = 1, 2, 3, 4, or the status."""
    reply = running.http("POST", path, {}, json.dumps({"inputs": json_inputs(X=[1, 2, 3, 4])}).encode())
    return reply.json["outputs"][0]["data"] if reply.status == 200 else reply.status


@pytest.mark.parametrize(
    ("mode", "evicts", "store", "repository"),
    [
        (Mode.PLATFORM, False, "", None),
        (Mode.STORE, True, "s3://bucket/models", None),
        (Mode.REPOSITORY, True, "", "/repository"),
        (Mode.SINGLE, True, "", "/model"),
    ],
)
def test_each_mode_has_its_source_of_models(mode, evicts, store, repository, tmp_path):
    """Only the platform chooses its victims itself; settings of another mode have no effect."""
    settings = Settings(
        mode=mode,
        model_store="s3://bucket/models",
        model_repository=Path("/repository"),
        model_dir=Path("/model"),
        cache_dir=tmp_path,
        memory_budget=7,
        eviction=Policy.LFU,
        pins=("a", "b*"),
        min_residency=8.0,
        load_threads=3,
        load_timeout=4.0,
        drain_seconds=5.0,
        inline_microseconds=6,
        require_gpu=True,
    )
    options = engine_options(settings)
    assert (options.evicts, options.store, str(options.repository or "")) == (evicts, store, repository or "")
    assert options.budget.host == 7
    assert options.eviction == Rules(Policy.LFU, ("a", "b*"), 8.0)
    assert (options.load_threads, options.load_patience, options.drain_patience) == (3, 4.0, 5.0)
    assert (options.inline_ns, options.require_gpu, options.cache_directory) == (6000, True, tmp_path)


def test_a_repository_is_loaded_as_a_whole(start, tmp_path, put, json_inputs, caplog):
    """All its models at start; one that does not load is logged by name and keeps no other from serving."""
    put["multiple"](tmp_path, "twice", 2.0)
    put["multiple"](tmp_path, "thrice", 3.0)
    (tmp_path / "bad" / "1").mkdir(parents=True)
    (tmp_path / "bad" / "1" / "model.onnx").write_bytes(b"no model")
    with caplog.at_level(logging.INFO):
        running = start(mode=Mode.REPOSITORY, model_repository=tmp_path, ping_mode=PingMode.READY)
    assert sorted(name for name, _ in running.engine.index.registered()) == ["thrice", "twice"]
    assert infer(running, "/models/thrice/invoke", json_inputs) == [3, 6, 9, 12]
    assert running.http("GET", "/ping").status == 503
    assert running.http("GET", "/v2/health/ready").status == 400
    assert "start-up model 'bad' did not load" in caplog.text
    assert "serving in repository mode" in caplog.text


def test_ping_in_live_mode_does_not_wait_for_models(start, repository):
    """A server whose models come and go is healthy when it can answer."""
    running = start(mode=Mode.REPOSITORY, model_repository=repository, load_models=("broken",))
    assert running.http("GET", "/ping").status == 200
    assert running.service.ready


def test_ping_in_ready_mode_waits_for_the_start_up_models(start, repository):
    """And is healthy once they are there."""
    running = start(
        mode=Mode.REPOSITORY, model_repository=repository, load_models=("twice", "thrice"), ping_mode=PingMode.READY
    )
    assert running.http("GET", "/ping").status == 200
    assert sorted(name for name, _ in running.engine.index.registered()) == ["thrice", "twice"]


@pytest.mark.parametrize("mode", [Control.NONE, Control.EXPLICIT, Control.POLL])
async def test_a_server_that_serves_what_it_loaded_is_ready_when_that_is_over(mode, tmp_path, put):
    """Also where a model did not load; before that it knows none of them."""
    put["multiple"](tmp_path / "models", "twice", 2.0)
    (tmp_path / "models" / "bad" / "1").mkdir(parents=True)
    (tmp_path / "models" / "bad" / "1" / "model.onnx").write_bytes(b"no model")
    settings = Settings(
        mode=Mode.REPOSITORY,
        model_repository=tmp_path / "models",
        model_control_mode=mode,
        ping_mode=PingMode.LIVE,
        cache_dir=tmp_path / "cache",
        memory_budget=1 << 30,
    )
    service = Service(settings, asyncio.get_running_loop())
    try:
        assert not service.ready
        await service.start()
        assert service.ready
    finally:
        await service.close()


@pytest.mark.parametrize("broken", [0, pynvml.NVML_ERROR_UNKNOWN])
def test_a_driver_that_does_not_answer_is_told_at_the_start(broken, start, tmp_path, monkeypatch, caplog):
    """Models that name no device run on the CPU without a word, and nobody would know why."""
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(broken=broken))
    with caplog.at_level(logging.WARNING, "mme.service"):
        start(mode=Mode.REPOSITORY, model_repository=tmp_path)

    told = ["no GPU is used: NVIDIA's driver says 'Unknown Error'"]
    messages = [record.getMessage() for record in caplog.records]
    assert [message for message in messages if "GPU" in message] == (told if broken else [])


@pytest.mark.parametrize(("switch", "sends"), [("true", False), (" TRUE", False), ("false", True), ("", True)])
def test_the_switch_of_opentelemetry_turns_traces_off(switch, sends, start, tmp_path, monkeypatch, caplog):
    """As its specification says: `true` in any case, and no other word. The log tells where a URL is set."""
    monkeypatch.setenv("OTEL_SDK_DISABLED", switch)
    running = start(mode=Mode.REPOSITORY, model_repository=tmp_path, trace_url="http://127.0.0.1:9/v1/traces")
    assert (running.service.tracer is not None) is sends
    assert ("OTEL_SDK_DISABLED is true" in caplog.text) is not sends


@pytest.mark.parametrize("named", ["", "one"])
def test_the_single_model_is_the_default_one(named, start, tmp_path, put, json_inputs):
    """Found when there is only one, or by its name."""
    put["multiple"](tmp_path, "one", 2.0)
    if named:
        put["multiple"](tmp_path, "two", 3.0)
    running = start(mode=Mode.SINGLE, model_dir=tmp_path, default_model_name=named, ping_mode=PingMode.READY)
    assert running.http("GET", "/ping").status == 200
    assert infer(running, "/invocations", json_inputs) == [2, 4, 6, 8]
    assert running.http("GET", "/models").json["models"][0]["modelName"] == "one"
    assert running.engine.cache.entries["one"].pinned


@pytest.mark.parametrize(("named", "expected"), [("", 400), ("one", [2, 4, 6, 8]), ("nobody", 404)])
def test_a_model_of_a_repository_may_be_the_default_one(named, expected, start, tmp_path, put, json_inputs):
    """Of requests that name none; any other is asked for by its name, as where there is no default."""
    put["multiple"](tmp_path, "one", 2.0)
    put["multiple"](tmp_path, "two", 3.0)
    running = start(mode=Mode.REPOSITORY, model_repository=tmp_path, default_model_name=named, ping_mode=PingMode.READY)
    assert infer(running, "/invocations", json_inputs) == expected
    body = json.dumps({"inputs": json_inputs(X=[1, 2, 3, 4])}).encode()
    reply = running.http("POST", "/invocations", {"X-Amzn-SageMaker-Target-Model": "two"}, body)
    assert reply.json["outputs"][0]["data"] == [3, 6, 9, 12]


def test_no_single_model_refuses_to_start(start, tmp_path):
    """With a sentence about the folder."""
    with pytest.raises(SettingsError, match="model"):
        start(mode=Mode.SINGLE, model_dir=tmp_path)


@pytest.mark.parametrize(("request_timeout", "seconds"), [(3600.0, 3600.0), (5.0, 5.0)])
def test_an_execution_in_a_process_may_take_as_long_as_a_request(start, monkeypatch, request_timeout, seconds):
    """A transform job waits for an hour, and a limit below a minute is kept too."""
    monkeypatch.setattr(Deadlines, "usual_execution", 0.0)
    start(mode=Mode.PLATFORM, request_timeout=request_timeout)

    assert Deadlines.usual_execution == seconds


def test_the_platform_starts_with_nothing_and_is_healthy(start):
    """Also in ready mode: there is nothing to wait for."""
    running = start(mode=Mode.PLATFORM, ping_mode=PingMode.READY)
    assert running.http("GET", "/ping").status == 200
    assert running.http("GET", "/models").json == {"models": []}


def test_a_store_serves_archives_by_their_names(start, tmp_path, put, json_inputs):
    """A folder of archives: with or without suffix, loaded on the first request, at start if named."""
    store = tmp_path / "store"
    store.mkdir()
    for name, factor in (("a", 2.0), ("b", 3.0)):
        directory = put["multiple"](tmp_path / "built", name, factor)
        with tarfile.open(store / f"{name}.tar.gz", "w:gz") as archive:
            archive.add(directory, arcname=name)
    running = start(mode=Mode.STORE, model_store=str(store), cache_dir=tmp_path / "cache", load_models=("a",))
    assert [name for name, _ in running.engine.index.registered()] == ["a.tar.gz"]
    assert infer(running, "/models/b.tar.gz/invoke", json_inputs) == [3, 6, 9, 12]
    assert infer(running, "/v2/models/a/infer", json_inputs) == [2, 4, 6, 8]
    assert infer(running, "/models/c.tar.gz/invoke", json_inputs) == 404


def test_a_store_without_archives_is_told_at_the_start(start, tmp_path, caplog):
    """A wrong prefix as a rule, which else the first client would learn of. The server serves what comes."""
    (tmp_path / "store").mkdir()
    start(mode=Mode.STORE, model_store=str(tmp_path / "store"), cache_dir=tmp_path / "cache")
    eventually(lambda: f"there is no archive (*.tar.gz) in the store {tmp_path / 'store'}" in caplog.text)


@pytest.mark.parametrize(
    ("mode", "below", "words"),
    [
        (Mode.REPOSITORY, "archives", ", which holds archives: --model-store serves those"),
        (Mode.REPOSITORY, "models/m", ", which is a model's own directory: name the folder above it"),
        (Mode.REPOSITORY, "empty", ": check its name, or put directories of models there"),
        (Mode.STORE, "models", ": it holds models that are not packed; --model-repository serves a folder of those"),
        (Mode.STORE, "models/m", ": it holds models that are not packed; --model-repository serves a folder of those"),
    ],
)
def test_another_folder_than_was_meant_is_told_at_the_start(start, tmp_path, put, caplog, mode, below, words):
    """A folder of archives for a repository, a model for a folder of them, and the other way round."""
    put["multiple"](tmp_path / "models", "m", 2.0)
    for folder in ("archives", "empty"):
        (tmp_path / folder).mkdir()
    (tmp_path / "archives" / "m.tar.gz").write_bytes(b"")
    source = tmp_path / below
    setting = {"model_repository": source} if mode is Mode.REPOSITORY else {"model_store": str(source)}
    start(mode=mode, cache_dir=tmp_path / "cache", **setting)
    eventually(lambda: f"{source}{words}" in caplog.text)


def test_a_store_that_can_not_be_read_is_told_at_the_start(start, tmp_path, caplog, monkeypatch):
    """With what to do."""
    (tmp_path / "store").mkdir()
    reason = MmeError(Kind.UNAVAILABLE, "S3 denies access to it: allow s3:ListBucket")
    monkeypatch.setattr(ModelCatalog, "is_bare", Mock(side_effect=reason))
    start(mode=Mode.STORE, model_store=str(tmp_path / "store"), cache_dir=tmp_path / "cache")
    eventually(lambda: "no model can be loaded for now: S3 denies access to it" in caplog.text)


# -- model control -----------------------------------------------------------------------------------------------------

REFUSED = "explicit model load / unload is not allowed if polling is enabled"


def load(running, name, action="load"):
    """A KServe load or unload."""
    return running.http("POST", f"/v2/repository/models/{name}/{action}", {}, b"")


def states(running):
    """The index: name → state and reason."""
    rows = running.http("POST", "/v2/repository/index", {}, b"").json
    return {row["name"]: (row.get("state"), row.get("reason")) for row in rows}


def status(running, json_inputs, name):
    """What a request for a model is answered with."""
    document = {"inputs": json_inputs(X=[1, 2, 3, 4])}
    return running.http("POST", f"/v2/models/{name}/infer", {}, json.dumps(document).encode()).status


def test_mode_none_serves_what_was_there_at_the_start(start, tmp_path, put, json_inputs):
    """All of it, and nothing else ever; nobody may load or unload, but a model that left memory comes back."""
    for name in ("one", "two"):
        put["multiple"](tmp_path, name, 2.0)
    running = start(mode=Mode.REPOSITORY, model_repository=tmp_path, model_control_mode=Control.NONE)
    eventually(lambda: [name for name, _ in running.engine.index.registered()] == ["one", "two"])
    put["multiple"](tmp_path, "late", 2.0)
    assert status(running, json_inputs, "late") == 404
    for action in ("load", "unload"):
        reply = load(running, "one", action)
        assert (reply.status, reply.error) == (503, REFUSED)
    running.on_loop.run(running.engine.cache.relieve("late", Footprint(1), "execution"))
    assert [status(running, json_inputs, name) for name in ("one", "two")] == [200, 200]


@pytest.mark.parametrize("named", [(), ("one",), ("*",)])
def test_mode_explicit_serves_what_was_asked_for(start, tmp_path, put, json_inputs, named):
    """What is named at start, and what somebody loads until somebody unloads it; a request loads nothing."""
    for name in ("one", "two"):
        put["multiple"](tmp_path, name, 2.0)
    (tmp_path / "bad" / "1").mkdir(parents=True)
    explicit = Control.EXPLICIT
    running = start(mode=Mode.REPOSITORY, model_repository=tmp_path, model_control_mode=explicit, load_models=named)
    expected = {(): [], ("one",): ["one"], ("*",): ["one", "two"]}[named]
    eventually(lambda: [name for name, _ in running.engine.index.registered()] == expected)
    assert status(running, json_inputs, "two") == (200 if "two" in expected else 404)
    assert load(running, "two").status == 200
    assert status(running, json_inputs, "two") == 200
    assert load(running, "two", "unload").status == 200
    assert status(running, json_inputs, "two") == 404
    assert states(running)["two"] == ("UNAVAILABLE", "unloaded")
    assert load(running, "bad").status == 400
    assert status(running, json_inputs, "bad") == 404
    assert status(running, json_inputs, "nobody") == 404


def polling(folder):
    """The settings of a server that serves what is in a folder, and looks often."""
    return {
        "mode": Mode.REPOSITORY,
        "model_repository": folder,
        "model_control_mode": Control.POLL,
        "poll_seconds": 0.02,
        "ping_mode": PingMode.READY,
    }


def test_mode_poll_serves_what_the_folder_holds(start, tmp_path, put, json_inputs):
    """What is added, changed and removed is noticed; what fails leaves the old one serving; nobody else may load."""
    put["multiple"](tmp_path / "r", "one", 2.0)
    running = start(**polling(tmp_path / "r"))
    eventually(lambda: running.http("GET", "/ping").status == 200)
    assert infer(running, "/models/one/invoke", json_inputs) == [2, 4, 6, 8]

    put["multiple"](tmp_path / "new", "one", 5.0)
    put["multiple"](tmp_path / "new", "two", 3.0)
    (tmp_path / "new" / "two").rename(tmp_path / "r" / "two")
    (tmp_path / "new" / "one" / "1").rename(tmp_path / "r" / "one" / "2")
    eventually(lambda: states(running).get("two", ("",))[0] == "READY")
    eventually(lambda: infer(running, "/models/one/invoke", json_inputs) == [5, 10, 15, 20])
    assert load(running, "one").error == REFUSED

    (tmp_path / "r" / "one" / "config.pbtxt").write_text("max_batch_size: -1")
    eventually(lambda: running.engine.registry.stats["one"].load_failures == 1)
    assert infer(running, "/models/one/invoke", json_inputs) == [5, 10, 15, 20]

    shutil.rmtree(tmp_path / "r" / "two" / "1")  # the folder goes a moment later, or never
    eventually(lambda: "two" not in states(running))
    assert status(running, json_inputs, "two") == 404


def test_a_server_that_polls_is_healthy_when_what_was_broken_is_mended(start, tmp_path, put):
    """And not before, however often it has looked in between."""
    put["multiple"](tmp_path / "r", "one", 2.0)
    (tmp_path / "r" / "one" / "config.pbtxt").write_text("max_batch_size: -1")
    running = start(**polling(tmp_path / "r"))
    put["multiple"](tmp_path / "new", "two", 3.0)
    (tmp_path / "new" / "two").rename(tmp_path / "r" / "two")
    eventually(lambda: states(running).get("two", ("",))[0] == "READY")
    assert running.http("GET", "/ping").status == 503

    (tmp_path / "r" / "one" / "config.pbtxt").write_text("")
    eventually(lambda: running.http("GET", "/ping").status == 200)


def test_several_repositories(start, tmp_path, put, json_inputs):
    """Are one, but for names that two of them have: those are refused, and the index says why."""
    for folder, name, factor in (("r1", "one", 2.0), ("r2", "two", 3.0), ("r1", "both", 4.0), ("r2", "both", 5.0)):
        put["multiple"](tmp_path / folder, name, factor)
    folders = {"model_repository": tmp_path / "r1", "more_repositories": (tmp_path / "r2",)}
    running = start(mode=Mode.REPOSITORY, **folders)
    eventually(lambda: [name for name, _ in running.engine.index.registered()] == ["one", "two"])
    assert infer(running, "/models/two/invoke", json_inputs) == [3, 6, 9, 12]
    assert status(running, json_inputs, "both") == 400
    state, reason = states(running)["both"]
    assert state == "UNAVAILABLE"
    assert f"{tmp_path / 'r1'} and {tmp_path / 'r2'}" in reason

    running = start(mode=Mode.REPOSITORY, model_namespacing=True, **folders)
    eventually(lambda: len(running.engine.index.registered()) == 4)
    assert infer(running, "/models/r1/both/invoke", json_inputs) == [4, 8, 12, 16]
    assert infer(running, "/models/r2/both/invoke", json_inputs) == [5, 10, 15, 20]
    assert infer(running, "/models/r2/two/invoke", json_inputs) == [3, 6, 9, 12]
    assert status(running, json_inputs, "both") == 400
    assert load(running, "r1/both").status == 200


@pytest.mark.parametrize("mode", [Control.NONE, Control.EXPLICIT])
def test_a_name_that_two_repositories_have_is_refused_in_every_mode(start, tmp_path, put, mode):
    """With Triton's sentence, where namespaces tell them apart."""
    for folder in ("r1", "r2"):
        put["multiple"](tmp_path / folder, "both", 2.0)
    folders = {"model_repository": tmp_path / "r1", "more_repositories": (tmp_path / "r2",)}
    running = start(mode=Mode.REPOSITORY, model_namespacing=True, model_control_mode=mode, **folders)
    reply = running.http("POST", "/v2/models/both/infer", {}, b'{"inputs": []}')
    assert reply.status == 400
    assert reply.error.startswith("There are 2 identifiers of model 'both' in global map, model namespace must be")


def test_a_configuration_by_another_name(start, tmp_path, put):
    """Is read where the model has one of that name; else its config.pbtxt is."""
    for name in ("one", "two"):
        put["multiple"](tmp_path, name, 2.0)
        (tmp_path / name / "config.pbtxt").write_text('parameters { key: "which" value { string_value: "plain" } }')
    (tmp_path / "one" / "configs").mkdir()
    named = tmp_path / "one" / "configs" / "gpu.pbtxt"
    named.write_text('parameters { key: "which" value { string_value: "named" } }')
    running = start(mode=Mode.REPOSITORY, model_repository=tmp_path, model_config_name="gpu")
    which = {
        name: running.http("GET", f"/v2/models/{name}/config").json["parameters"]["which"]["string_value"]
        for name in ("one", "two")
    }
    assert which == {"one": "named", "two": "plain"}


def test_names_of_files_that_are_no_text_cost_nobody_an_answer(start, tmp_path, put, json_inputs):
    """Whoever asks for a model that lacks its file is told what is there instead; index and metrics are as ever."""
    put["multiple"](tmp_path, "twice", 2.0)
    (tmp_path / "broken" / "1").mkdir(parents=True)
    (tmp_path / "broken" / "config.pbtxt").write_text('backend: "onnxruntime"')
    Path(os.fsdecode(bytes(tmp_path / "broken" / "1") + b"/model-\xff.onnx")).touch()
    shutil.copytree(tmp_path / "twice", os.fsdecode(bytes(tmp_path) + b"/twice-\xff"))
    running = start(mode=Mode.REPOSITORY, model_repository=tmp_path, ping_mode=PingMode.READY)
    eventually(lambda: states(running).get("twice", ("",))[0] == "READY")
    for path in ("/models/broken/invoke", "/v2/models/broken/infer"):
        reply = running.http("POST", path, {}, json.dumps({"inputs": json_inputs(X=[1, 2, 3, 4])}).encode())
        assert reply.status >= 400
        assert "model-\\udcff.onnx" in reply.json["error"]
    assert sorted(states(running)) == ["broken", "twice"]
    assert running.http("GET", "/metrics").status == 200


def test_a_load_at_start_that_fails_in_a_way_nobody_knows_is_over(start, tmp_path, put, monkeypatch):
    """The others are loaded, and the server is ready where it waits for no more than the end of all of them."""
    load = Engine.load

    async def fail(engine, name):
        if name == "two":
            raise RuntimeError("can't start new thread")
        await load(engine, name)

    monkeypatch.setattr(Engine, "load", fail)
    for name in ("one", "two"):
        put["multiple"](tmp_path, name, 2.0)
    running = start(
        mode=Mode.REPOSITORY,
        model_repository=tmp_path,
        model_control_mode=Control.EXPLICIT,
        load_models=("two", "one"),
    )
    eventually(lambda: running.http("GET", "/v2/health/ready").status == 200)
    assert states(running)["one"][0] == "READY"
