"""A worker that is killed costs the requests in flight and nothing else: what was registered answers again."""

from __future__ import annotations

import base64
import json
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from http.client import HTTPException

import psutil
import pytest

from tests.contract import models
from tests.contract.server import PATIENCE, alive, eventually, kill
from tests.processes import is_over

TARGET = "X_Amzn_SageMaker_Target_Model"


@contextmanager
def load(server, paths):
    """Clients that never stop asking these models; yields what they were told: statuses, and errors of connections."""
    over, told = threading.Event(), []

    def ask(path):
        while not over.is_set():
            try:
                told.append(server.ask("POST", path, models.ONE).status)
            except (OSError, HTTPException) as error:
                told.append(type(error).__name__)

    with ThreadPoolExecutor(len(paths)) as pool:
        asking = [pool.submit(ask, path) for path in paths]
        try:
            yield told
        finally:
            over.set()
            for each in asking:
                each.result(PATIENCE)


def listed(server):
    """The registered models, by GET /models."""
    return {row["modelName"]: row["modelUrl"] for row in server.ask("GET", "/models").json["models"]}


def wait_for(told, status):
    """Until somebody was told this after now."""
    before = len(told)
    eventually(lambda: status in told[before:], f"a {status}")


def test_a_platforms_models_survive_their_worker(serve, tmp_path):
    """Killed twice under load: every model that was posted answers without another POST, by both of its names.

    Requests get an answer or an error of their connection; what was unloaded stays unloaded; a new server knows nothing.
    """
    environ = {"SAGEMAKER_MULTI_MODEL": "true", "MME_CACHE_DIR": str(tmp_path / "cache")}
    server = serve(environ)
    urls = {}
    for number in range(1, 5):
        urls[f"hash-{number}"] = url = str(models.lay_out(tmp_path / f"m{number}/model", models.plus(number)))
        body = {"model_name": f"hash-{number}", "url": url}
        assert server.ask("POST", "/models", body, **{TARGET: f"m{number}.tar.gz"}).status == 200
    assert server.ask("DELETE", "/models/hash-4").status == 200
    del urls["hash-4"]

    for _ in range(2):
        with load(server, [f"/models/hash-{number}/invoke" for number in (1, 2)]) as told:
            wait_for(told, 200)
            kill(server)
            wait_for(told, 200)
        assert {each for each in told if isinstance(each, int)} == {200}
        assert listed(server) == urls
        for number in (1, 2, 3):
            answer = server.ask("POST", f"/models/hash-{number}/invoke", models.ONE)
            assert models.y(answer.json) == [1 + number, 2 + number, 3 + number, 4 + number]
            answer = server.ask("POST", "/invocations", models.ONE, **{TARGET: f"m{number}.tar.gz"})
            assert models.y(answer.json) == [1 + number, 2 + number, 3 + number, 4 + number]
        assert server.ask("POST", "/models/hash-4/invoke", models.ONE).status == 404
        assert server.ask("POST", "/models", {"model_name": "hash-1", "url": urls["hash-1"]}).status == 409
    assert server.stop() == 0

    anew = serve(environ)
    assert listed(anew) == {}
    assert anew.ask("POST", "/models/hash-1/invoke", models.ONE).status == 404
    assert len(list((tmp_path / "cache").glob("journal-*"))) <= 1


@pytest.mark.long
def test_what_is_answered_is_kept(serve, tmp_path):
    """A worker killed the moment that a load or an unload was answered has done it for good."""
    server = serve({"SAGEMAKER_MULTI_MODEL": "true"})
    for number in range(1, 4):
        url = str(models.lay_out(tmp_path / f"m{number}/model", models.plus(number)))
        assert server.ask("POST", "/models", {"model_name": f"m{number}", "url": url}).status == 200
        kill(server)
        assert list(listed(server)) == [f"m{each}" for each in range(1, number + 1)]
    assert server.ask("DELETE", "/models/m2").status == 200
    kill(server)
    assert list(listed(server)) == ["m1", "m3"]


@pytest.mark.parametrize("mode", ["store", pytest.param("repository", marks=pytest.mark.long)])
def test_self_managed_models_survive_their_worker(serve, tmp_path, mode):
    """What requests and KServe's repository API loaded is registered and ready; what they unloaded is not loaded again."""
    for number in (1, 2, 3):
        folder = models.lay_out(tmp_path / "models" / f"m{number}", models.plus(number))
        models.pack(folder, tmp_path / "archives" / f"m{number}.tar.gz")
    environ = {"MME_MODEL_REPOSITORY": str(tmp_path / "models"), "MME_PING_MODE": "ready"}
    if mode == "store":
        environ = {"MME_MODEL_STORE": str(tmp_path / "archives"), "MME_LOAD_MODEL": "m1,m3", "MME_PING_MODE": "ready"}
    server = serve(environ)
    for name in ("m1", "m2"):
        assert server.ask("POST", f"/v2/repository/models/{name}/load").status == 200
    assert server.ask("POST", "/v2/repository/models/m3/unload").status == 200
    before = listed(server)
    assert len(before) == 2

    with load(server, ["/v2/models/m1/infer"]) as told:
        wait_for(told, 200)
        kill(server)
        wait_for(told, 200)
    assert {each for each in told if isinstance(each, int)} == {200}
    assert listed(server) == before
    for number in (1, 2):
        assert server.ask("GET", f"/v2/models/m{number}/ready").status == 200
        assert models.y(server.ask("POST", f"/v2/models/m{number}/infer", models.ONE).json)[0] == 1 + number
    states = {
        row["name"].partition(".")[0]: row.get("state") for row in server.ask("POST", "/v2/repository/index").json
    }
    assert states["m3"] != "READY"
    assert models.y(server.ask("POST", "/v2/models/m3/infer", models.ONE).json)[0] == 4


def test_a_journal_that_can_not_be_written_costs_nothing_else(serve, tmp_path):
    """A server whose cache directory is no directory serves, and says once that the next worker will know nothing."""
    (tmp_path / "cache").touch()
    server = serve({"SAGEMAKER_MULTI_MODEL": "true", "MME_CACHE_DIR": str(tmp_path / "cache")})
    for number in (1, 2):
        url = str(models.lay_out(tmp_path / f"m{number}/model", models.plus(number)))
        assert server.ask("POST", "/models", {"model_name": f"m{number}", "url": url}).status == 200
    assert models.y(server.ask("POST", "/models/m1/invoke", models.ONE).json) == [2, 3, 4, 5]
    assert server.log.count("won't know what this one knows") <= 2  # the journal, and the footprints


def test_a_reload_of_the_master_keeps_what_is_registered(serve, tmp_path):
    """SIGHUP starts another worker beside the old one: it knows every model, and what a client loaded it with."""
    server = serve({"SAGEMAKER_MULTI_MODEL": "true", "MME_ALLOW_LOAD_OVERRIDES": "true"})
    url = str(models.lay_out(tmp_path / "m/model", models.plus(1)))
    assert server.ask("POST", "/models", {"model_name": "m", "url": url}).status == 200
    files = {"config": "{}", "file:1/model.onnx": base64.b64encode(models.plus(7)).decode()}
    assert server.ask("POST", "/v2/repository/models/new/load", {"parameters": files}).status == 200
    old = server.worker
    server.process.send_signal(signal.SIGHUP)
    eventually(lambda: is_over(old), "the old worker to end")
    eventually(lambda: alive(server), "another worker")

    assert listed(server).pop("m") == url
    assert models.y(server.ask("POST", "/models/m/invoke", models.ONE).json) == [2, 3, 4, 5]
    assert models.y(server.ask("POST", "/models/new/invoke", models.ONE).json) == [8, 9, 10, 11]


def test_a_reload_of_the_master_fails_no_ping(serve):
    """Nor one on a connection that the old worker keeps: the server lives all the while."""
    server = serve({"SAGEMAKER_MULTI_MODEL": "true"})
    ping = b"GET /ping HTTP/1.1\r\nHost: localhost\r\n\r\n"
    kept = [server.connect() for _ in range(200)]
    assert {each.send(ping).answer().status for each in kept} == {200}
    old, told = server.worker, set()
    server.process.send_signal(signal.SIGHUP)
    while kept and not is_over(old):
        with kept.pop() as connection, suppress(OSError, AssertionError):  # it has been closed
            told.add(connection.send(ping).answer().status)
        time.sleep(0.02)
    for connection in kept:
        connection.close()

    assert told == {200}
    eventually(lambda: alive(server), "another worker")


@pytest.mark.parametrize("port", ["GRPC", pytest.param("METRICS", marks=pytest.mark.long)])
def test_a_reload_of_the_master_waits_for_the_ports_of_a_busy_worker(serve, port):
    """One that is told to end and does not get round to it keeps its ports: the next one has to be patient."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        number = free.getsockname()[1]
    server = serve({"SAGEMAKER_MULTI_MODEL": "true", f"MME_{port}_PORT": str(number)})
    old = server.worker
    old.suspend()
    server.process.send_signal(signal.SIGHUP)
    eventually(lambda: len(psutil.Process(server.process.pid).children()) == 2, "another worker")
    time.sleep(1)  # enough for it to want the port
    old.resume()
    eventually(lambda: is_over(old), "the old worker to end")
    eventually(lambda: alive(server), "an answer of the new one")

    assert server.log.count(f"listening at port {number}") == 2


def test_a_server_gives_way_to_another_one_that_it_starts(serve, tmp_path, monkeypatch):
    """SIGUSR2, as after an upgrade: a new server begins on the same port, and goes on when the old one has ended.

    It is started as the old one was, by the same flags and in the same folder.
    """
    (tmp_path / "archives").mkdir()
    monkeypatch.chdir(tmp_path)
    server = serve({}, command=("serve", "--model-store", "archives"))
    old, worker = psutil.Process(server.process.pid), server.worker
    old.send_signal(signal.SIGUSR2)
    (new,) = eventually(lambda: [each for each in old.children() if each != worker], "another server")
    try:
        eventually(new.children, "its worker")
        eventually(lambda: server.log.count("serving in store mode") == 2, "its start")
        assert server.stop() == 0
        eventually(lambda: alive(server), "an answer of the new one")
    finally:
        with suppress(psutil.NoSuchProcess):
            new.terminate()
        eventually(lambda: is_over(new), "its end")


def test_what_a_client_loaded_a_model_with_survives_the_worker(serve, tmp_path):
    """Another configuration, and other files, also of a model that is nowhere else: as it was loaded, killed twice.

    Files are gone with the unload, and with the server.
    """
    for name in ("configured", "replaced", "plain"):
        models.lay_out(tmp_path / "models" / name, models.plus(1), "max_batch_size: 4")
    environ = {
        "MME_MODEL_REPOSITORY": str(tmp_path / "models"),
        "MME_PING_MODE": "ready",
        "MME_ALLOW_LOAD_OVERRIDES": "true",
    }
    server = serve(environ)
    other = {"config": json.dumps({"max_batch_size": 16})}
    files = other | {"file:1/model.onnx": base64.b64encode(models.plus(7)).decode()}
    for name, parameters in {"configured": other, "replaced": files, "new": files, "plain": other}.items():
        answer = server.ask("POST", f"/v2/repository/models/{name}/load", {"parameters": parameters})
        assert answer.status == 200, answer.body
    assert server.ask("POST", "/v2/repository/models/plain/load").status == 200
    folders = server.cache / "overrides"
    assert len(list(folders.iterdir())) == 2

    for _ in range(2):
        kill(server)
        for name, (size, number) in {
            "configured": (16, 1),
            "replaced": (16, 7),
            "new": (16, 7),
            "plain": (4, 1),
        }.items():
            answer = server.ask("POST", f"/v2/models/{name}/infer", models.ONE)
            assert answer.status == 200, answer.body
            assert models.y(answer.json)[0] == 1 + number
            assert server.ask("GET", f"/v2/models/{name}/config").json["max_batch_size"] == size
        assert len(list(folders.iterdir())) == 2

    assert server.ask("POST", "/v2/repository/models/new/unload").status == 200
    kill(server)
    assert server.ask("POST", "/v2/models/new/infer", models.ONE).status == 404
    assert len(list(folders.iterdir())) == 1
    assert server.ask("POST", "/v2/repository/models/replaced/load").status == 200
    assert models.y(server.ask("POST", "/v2/models/replaced/infer", models.ONE).json)[0] == 2
    eventually(lambda: not list(folders.iterdir()), "the end of the files")
    assert server.ask("POST", "/v2/repository/models/new/load", {"parameters": files}).status == 200
    assert server.stop() == 0
    assert not list(folders.iterdir())
