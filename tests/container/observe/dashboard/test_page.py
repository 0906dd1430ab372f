"""The frame of the page and its data, without a browser."""

import json
import re
from concurrent.futures import ThreadPoolExecutor

import pytest

from container.observe.dashboard import BARS, ROWS
from container.settings import Mode
from model_handlers.errors import Kind
from serve.cache.entry import Failure


def data(running, query=""):
    """The page's data."""
    reply = running.http("GET", f"/dashboard/data{query}")
    assert reply.status == 200
    return reply.json


def test_the_data_tell_memory_models_and_what_happened(served, ask):
    """Budgets with their bars, rows, loads, events and seconds, in bytes and seconds."""
    running = served({"big": 100, "small": 30, "next": 80}, "big", "small", device_budget=1000)
    ask(running, "small")
    ask(running, "next")

    found = data(running)

    host, device = found["memory"]
    assert (host["kind"], host["budget"], host["held"], host["reserved"]) == ("host", 200_000_000, 110_000_000, 0)
    assert [(bar["name"], bar["bytes"]) for bar in host["bars"]] == [("next", 80_000_000), ("small", 30_000_000)]
    assert (device["kind"], device["budget"], device["bars"]) == ("gpu0", 1000, [])
    assert found["counts"] == {"known": 3, "resident": 2, "matching": 3, "loading": 0, "failed": 0}
    rows = {row["name"]: row for row in found["models"]}
    assert list(rows) == ["next", "small", "big"]
    assert (rows["small"]["hits"], rows["small"]["misses"], rows["small"]["versions"]) == (1, 0, [1])
    assert (rows["next"]["hits"], rows["next"]["misses"]) == (0, 1)
    assert (rows["big"]["state"], rows["big"]["reason"]) == ("UNAVAILABLE", "evicted for 'next'")
    assert 0 <= rows["next"]["idle"] <= rows["small"]["idle"] <= rows["big"]["idle"] < 60
    assert [(event["deed"], event["name"]) for event in found["events"]][:2] == [("loaded", "next"), ("evicted", "big")]
    assert set(map(len, found["history"].values())) == {len(found["history"]["hits"])}
    assert "repository" in found["source"]


def test_a_load_under_way_is_in_the_data(served, ask, until):
    """With its time and those who wait for it."""
    running = served({"a": 10, "b": 90}, "a")
    with ThreadPoolExecutor(1) as pool, running.loads_held_up():
        answer = pool.submit(ask, running, "b")
        [load] = until(lambda: data(running)["loading"], "the load")
        assert (load["name"], load["waiting"]) == ("b", 1)
        assert 0 <= load["seconds"] < 60
        row = until(
            lambda: next(
                (row for row in data(running)["models"] if (row["name"], row["state"]) == ("b", "LOADING")), None
            ),
            "the state",
        )
        assert row["waiting"] == 1
    assert answer.result().status == 200
    until(lambda: not data(running)["loading"], "the end of the load")


def test_a_model_in_use_was_used_now(served):
    """However long ago its lease began."""
    running = served({"a": 10}, "a")
    lease = running.on_loop.call(running.engine.cache.ready.lease, "a")
    lease.entry.last_used -= 3600
    running.on_loop.run(running.service.watcher.sample())
    row = data(running)["models"][0]
    running.on_loop.call(lease.release)
    assert (row["idle"], row["leases"]) == (0, 1)


@pytest.mark.long
def test_many_models_are_bars_and_rows_up_to_a_number_and_a_sum(served):
    """The largest have their own; the rest are counted and summed, and a filter finds them."""
    sizes = {f"m{number:03d}": 200 - number for number in range(BARS + 5)}
    running = served(sizes, *sizes, budget=1 << 40)

    found = data(running)

    [memory] = found["memory"]
    assert [bar["name"] for bar in memory["bars"]] == [f"m{number:03d}" for number in range(BARS)]
    assert memory["rest"] == {"models": 5, "bytes": sum(200 - number for number in range(BARS, BARS + 5)) * 1_000_000}
    assert sum(bar["bytes"] for bar in memory["bars"]) + memory["rest"]["bytes"] == memory["held"]
    assert len(found["models"]) == ROWS
    assert found["rest"]["models"] == BARS + 5 - ROWS
    assert sum(row["held"]["host"] for row in found["models"]) + found["rest"]["host"] == memory["held"]
    last = f"m{BARS + 4:03d}"
    filtered = data(running, f"?filter={last.upper()}")
    assert ([row["name"] for row in filtered["models"]], filtered["counts"]["matching"]) == ([last], 1)
    assert filtered["rest"] == {"models": 0, "host": 0, "device": 0}
    assert len(filtered["memory"][0]["bars"]) == BARS, "bars are of all models, whatever the filter"
    assert len(running.http("GET", "/dashboard/data").body) < 100_000


def test_models_that_can_not_serve_come_first(served, tmp_path, ask):
    """As failed, with why, and how many requests that cost: what did not load, and what dies whenever it executes."""
    running = served({"a": 10, "b": 20}, "a", "b")
    for name in ("worse", "bad"):
        (tmp_path / "repository" / name / "1").mkdir(parents=True)
        (tmp_path / "repository" / name / "1" / "model.onnx").write_bytes(b"no model")
        ask(running, name)
    ask(running, "bad")
    entries = running.engine.cache.entries
    entries["a"].resident.is_down = lambda: True
    entries["b"].failure = Failure("no such graph", 2, Kind.INVALID_MODEL, 0.0)

    found = data(running)

    assert found["counts"]["failed"] == 3
    rows = {row["name"]: row for row in found["models"]}
    assert list(rows) == ["a", "bad", "worse", "b"]
    assert [row["state"] for row in rows.values()] == ["FAILED", "FAILED", "FAILED", "READY"]
    assert [row["failed"] for row in rows.values()] == [0, 2, 1, 0]
    assert "ONNX Runtime can't load model 'bad'" in rows["bad"]["reason"]
    assert "died too often" in rows["a"]["reason"]
    assert rows["b"]["reason"] == "could not be loaded anew: no such graph"


def test_however_many_look_a_document_is_made_once_a_second(served):
    """Whoever asks in the same second with the same filter gets the same one."""
    running = served({"a": 10}, "a")
    running.on_loop.call(running.service.watcher.close)
    first = running.on_loop.call(running.service.dashboard.document)
    assert running.on_loop.call(running.service.dashboard.document) is first
    assert running.on_loop.call(running.service.dashboard.document, "x") is not first
    again = running.on_loop.call(running.service.dashboard.document)
    running.on_loop.run(running.service.watcher.sample())
    assert running.on_loop.call(running.service.dashboard.document) is not again


@pytest.mark.parametrize("path", ["/dashboard", "/dashboard/"])
def test_the_page_is_a_frame_without_data(served, path):
    """No model is in the HTML; its files are beside it, whatever a proxy puts before it."""
    running = served({"big": 100}, "big")

    reply = running.http("GET", f"{path}?filter=%3Cscript%3Ebig")

    page = reply.body.decode()
    assert reply.headers["content-type"] == "text/html; charset=utf-8"
    assert "big" not in page
    assert page.count("<script") == 1
    here = "" if path.endswith("/") else "dashboard/"
    files = re.findall(rf'(?:href|src)="{here}(static/dashboard\.(css|js))"', page)
    assert len(files) == 2
    for file, kind in [*files, ("static/draw.js", "js")]:
        answer = running.http("GET", f"/dashboard/{file}")
        assert answer.status == 200
        assert {"css": "text/css", "js": "javascript"}[kind] in answer.headers["content-type"]
    assert len(re.findall(r"https?://", page)) == 0, "nothing comes from anywhere else"


def test_the_policy_forbids_everything_that_is_not_ours(served):
    """No script, style, frame or request but to this server; nothing is cached, nothing is guessed."""
    running = served({"a": 10}, "a")
    for path in ("/dashboard", "/dashboard/data"):
        headers = running.http("GET", path).headers
        policy = dict(part.split(" ", 1) for part in headers["content-security-policy"].split("; "))
        assert policy["default-src"] == policy["base-uri"] == policy["frame-ancestors"] == "'none'"
        assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
        assert (headers["cache-control"], headers["x-content-type-options"]) == ("no-store", "nosniff")


def test_a_platforms_models_are_shown_as_clients_name_them(start, tmp_path, put):
    """By TargetModel, also in what happened, and the filter finds them by it."""
    running = start(mode=Mode.PLATFORM)
    put["multiple"](tmp_path / "0a1b", "model", 2.0)
    body = json.dumps({"model_name": "0a1b", "url": str(tmp_path / "0a1b")}).encode()
    header = {"X-Amzn-SageMaker-Target-Model": "tenant/bert.tar.gz"}
    assert running.http("POST", "/models", header, body).status == 200

    found = data(running, "?filter=bert")

    assert [row["name"] for row in found["models"]] == ["tenant/bert.tar.gz"]
    assert [event["name"] for event in found["events"]] == ["tenant/bert.tar.gz"]


def test_it_can_be_switched_off(served):
    """Then there is no page, no data, and nobody watches."""
    running = served({"a": 10}, "a", dashboard=False)
    for path in ("/dashboard", "/dashboard/data", "/dashboard/static/dashboard.js"):
        assert running.http("GET", path).status == 404
    assert running.service.watcher is None


def test_the_disk_is_in_the_data_where_archives_are_unpacked(served, served_from_store, ask):
    """Its budget, what archives take and what all takes; a repository is nobody's to remove from."""
    running = served_from_store("a", disk_budget=10**7)
    assert data(running)["disk"] == {"budget": 10**7, "used": 0, "archives": 0, "evictions": 0}
    assert ask(running, "a").status == 200
    disk = running.on_loop.call(lambda: running.engine.origins.room)
    assert disk.archives > 0
    assert data(served({"m": 10}, "m"))["disk"] is None
