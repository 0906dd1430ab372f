"""Damaged models of trees: each is one sentence, and the server goes on serving the others from the same process."""

from __future__ import annotations

import json
import subprocess
from concurrent.futures import ThreadPoolExecutor
from threading import Event

import numpy as np
import pytest

from tests.contract import models
from tests.contract.rows import ROWS
from tests.contract.server import SCRIPTS, Server, clean_environment
from tests.frameworks import framework_later

xgboost = framework_later("xgboost")
lightgbm = framework_later("lightgbm")
treelite = framework_later("treelite")

CONFIG = 'backend: "fil" parameters { key: "model_type" value { string_value: "%s" } }'
FILES = {
    "xgboost_ubj": "xgboost.ubj",
    "xgboost_json": "xgboost.json",
    "lightgbm": "model.txt",
    "treelite_checkpoint": "checkpoint.tl",
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A file of each kind."""
    folder = tmp_path_factory.mktemp("whole")
    options = {"objective": "reg:squarederror", "max_depth": 3, "nthread": 1}
    booster = xgboost.train(options, xgboost.DMatrix(ROWS, ROWS.sum(axis=1)), 5)
    booster.save_model(folder / "xgboost.ubj")
    booster.save_model(folder / "xgboost.json")
    treelite.frontend.from_xgboost(booster).serialize(folder / "checkpoint.tl")
    options = {"objective": "regression", "min_data_in_leaf": 1, "verbose": -1, "num_threads": 1}
    light = lightgbm.train(options, lightgbm.Dataset(ROWS, ROWS.sum(axis=1)), 5)
    light.save_model(folder / "model.txt")
    return {kind: (folder / file).read_bytes() for kind, file in FILES.items()}


def cut(share):
    """A file cut short."""
    return lambda data: data[: int(len(data) * share)]


def flipped(seed):
    """A file with a bit flipped in each of a few places."""

    def flip(data):
        damaged = bytearray(data)
        for at in np.random.default_rng(seed).integers(0, len(data), 12):
            damaged[at] ^= 1 << (at % 8)
        return bytes(damaged)

    return flip


def replaced(old, new):
    """A file that says something else."""

    def replace(data):
        assert old in data
        return data.replace(old, new, 1)

    return replace


def astray(data):
    """XGBoost's UBJSON whose first tree has a child a million nodes away: it is read, and lost with the first row."""
    at = data.index(b"left_children[$l#L") + 26
    return data[:at] + (1_000_000).to_bytes(4, "big") + data[at + 4 :]


def around(data):
    """XGBoost's JSON whose first tree has its root for a child: a row would go round for ever."""
    document = json.loads(data)
    tree = document["learner"]["gradient_booster"]["model"]["trees"][0]
    tree["left_children"][tree["left_children"].index(-1) - 1] = 0
    return json.dumps(document).encode()


DAMAGES = {
    "ubj cut to nine tenths": ("xgboost_ubj", lambda data: data[: len(data) * 9 // 10] + data[-64:]),
    "ubj astray": ("xgboost_ubj", astray),
    "json cut": ("xgboost_json", cut(0.7)),
    "json around": ("xgboost_json", around),
    "text cut": ("lightgbm", cut(0.6)),
    "text without leaves": ("lightgbm", replaced(b"leaf_value=", b"leaf_valor=")),
    "text astray": ("lightgbm", replaced(b"left_child=", b"left_child=99999")),
    "text of a feature that is not there": ("lightgbm", replaced(b"split_feature=", b"split_feature=77777")),
    "checkpoint cut": ("treelite_checkpoint", cut(0.5)),
    **{f"ubj flipped {seed}": ("xgboost_ubj", flipped(seed)) for seed in range(6)},
    **{f"text flipped {seed}": ("lightgbm", flipped(seed)) for seed in range(4)},
    **{f"checkpoint flipped {seed}": ("treelite_checkpoint", flipped(seed)) for seed in range(4)},
}
NOT_FLIPPED = [name for name in DAMAGES if "flipped" not in name]


@pytest.fixture(scope="module")
def server(tmp_path_factory, whole):
    """A server of a model that has nothing to do with trees, of whole trees, and of all the damaged ones."""
    folder = tmp_path_factory.mktemp("repository")
    models.lay_out(folder / "plus", models.plus(1))
    everything = {f"whole {kind}": (kind, data) for kind, data in whole.items()}
    everything |= {name: (kind, damage(whole[kind])) for name, (kind, damage) in DAMAGES.items()}
    for name, (kind, data) in everything.items():
        models.lay_out(folder / name.replace(" ", "-"), data, CONFIG % kind, file=FILES[kind])
    environ = {
        "MME_MODEL_REPOSITORY": str(folder),
        "MME_MODEL_CONTROL_MODE": "explicit",
        "MME_LOAD_MODEL": "plus,whole-xgboost_ubj",  # whose process of trials is the server's then, not a test's
        "MME_PING_MODE": "ready",
    }
    with Server(tmp_path_factory.mktemp("server"), environ) as server:
        yield server


def load(server, name):
    """Load a model."""
    return server.ask("POST", f"/v2/repository/models/{name.replace(' ', '-')}/load")


@pytest.mark.parametrize("kind", FILES)
def test_whole_models_are_tried_and_served(server, kind):
    """A trial costs them nothing but its time; a second load has no trial."""
    for _ in range(2):
        answer = load(server, f"whole {kind}")
        assert answer.status == 200, answer.body
    tensor = {"name": "input__0", "shape": [1, 3], "datatype": "FP32", "data": [0.0, 0.0, 0.0]}
    assert server.ask("POST", f"/v2/models/whole-{kind}/infer", {"inputs": [tensor]}).status == 200


def test_damaged_models_are_refused_beside_one_that_serves(server):
    """Each of them by one sentence, or served where the damage harms nobody; all the while another model answers.

    The process that serves is the one that it was.
    """
    worker, over, told = server.worker.pid, Event(), []

    def ask():
        while not over.is_set():
            told.append(server.ask("POST", "/v2/models/plus/infer", models.ONE).status)

    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(ask)
        try:
            answers = {name: load(server, name) for name in DAMAGES}
        finally:
            over.set()
            asking.result()

    for name, answer in answers.items():
        assert answer.status in ({400} if name in NOT_FLIPPED else {200, 400}), (name, answer.body)
        if answer.status == 400:
            assert "\n" not in answer.error
    assert set(told) == {200}
    assert server.worker.pid == worker


def test_rows_go_through_whatever_was_let_in(server):
    """Rows of all kinds, through each model whose damage was not found: nothing of it ends the server."""
    worker = server.worker.pid
    rows = np.concatenate([np.random.default_rng(1).normal(size=(500, 3)) * scale for scale in (1, 1e6)])
    data = rows.astype(np.float32).ravel().tolist()
    tensor = {"name": "input__0", "shape": list(rows.shape), "datatype": "FP32", "data": data}
    ready = [name.replace(" ", "-") for name in DAMAGES]
    ready = [name for name in ready if server.ask("GET", f"/v2/models/{name}/ready").status == 200]
    for name in ready:
        server.ask("POST", f"/v2/models/{name}/infer", {"inputs": [tensor]})

    assert server.ask("POST", "/v2/models/plus/infer", models.ONE).status == 200
    assert server.worker.pid == worker


def test_a_check_of_a_damaged_model_tells_of_it(tmp_path, whole):
    """`mme config check` outlives what the library dies of, and has its sentence among the others."""
    damaged = DAMAGES["text without leaves"][1](whole["lightgbm"])
    models.lay_out(tmp_path / "model", damaged, CONFIG % "lightgbm", file="model.txt")
    command = [str(SCRIPTS / "mme"), "config", "check", str(tmp_path / "model")]
    said = subprocess.run(command, env=clean_environment(tmp_path), capture_output=True, text=True, check=False)

    assert said.returncode == 1, said
    assert "which was never loaded before: the file is damaged" in said.stdout + said.stderr
