"""`mme bench` and what `mme invoke` shares with it: figures, requests of every kind, arrays that come back."""

from __future__ import annotations

import json
from argparse import Namespace
from collections import Counter

import numpy as np
import pytest

from container.ship import invoke
from container.ship.requests import arrays_of, request_of
from model_handlers.errors import MmeError
from tests.http_server import Handler, answering

BINARY = "application/vnd.sagemaker-triton.binary+json;json-header-size="


class Model(Handler):
    """Answers what it was asked; the first request for a model is a miss, and the model called gone is not there."""

    def do_POST(self):
        """An inference over plain HTTP or the Runtime API."""
        body, kind = self.body(), self.headers.get("Content-Type")
        target = self.headers.get("X-Amzn-SageMaker-Target-Model", "")
        self.server.asked[target] += 1
        self.server.seen = (self.path, kind, self.headers.get("Accept"), body)
        found = "miss" if self.server.asked[target] == 1 else "hit"
        status = 404 if target == "gone" else 200
        self.answer(status, body, Content_Type=kind or "text/plain", Server_Timing=f"cache;desc={found}")


@pytest.fixture
def server():
    """A listening server: `url`, `asked` by model, and `seen` of the last request."""
    with answering(Model, asked=Counter(), seen=None) as server:
        yield server


def test_a_sweep_is_a_table_and_a_report(mme, server, tmp_path):
    """A level for each number of clients; every model is asked for, the first of them most."""
    said = mme("bench", server.url, "--target", "bert-{0..4}.tar.gz", "--zipf", "1.5", "--json", "{}",
               "--concurrency", "1,2", "--seconds", "0.3", "--report", tmp_path / "a.json",
               "--png", tmp_path / "a.png")  # fmt: skip

    assert said.code == 0, said.err
    report = json.loads((tmp_path / "a.json").read_text())
    assert [level["clients"] for level in report] == [1, 2]
    assert all(level["answers"] > 5 and level["errors"] == 0 and level["p50"] <= level["p99"] for level in report)
    assert set(server.asked) == {f"bert-{number}.tar.gz" for number in range(5)}
    assert server.asked.most_common(1)[0][0] == "bert-0.tar.gz"
    assert "answers/s" in said.out
    assert "--png is without effect" in said.err
    assert not (tmp_path / "a.png").exists()


def test_a_request_that_fails_always_is_told_before_anything_is_measured(mme, server):
    """By the server's sentence."""
    said = mme("bench", server.url, "--target", "gone", "--json", '{"error": "there is no model gone"}')

    assert (said.code, said.out) == (1, "")
    assert "there is no model gone" in said.err


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--concurrency", "1,x"), "is not a list of numbers"),
        (("--concurrency", "0"), "is not a list of numbers"),
        (("--seconds", "0"), "is not between"),
        (("--target", "a-{5..1}"), "is no range"),
        (("http://localhost:1", "--url", "http://localhost:2"), "two servers"),
        (("--local", "http://localhost:1", "--url", "http://localhost:2"), "give one of them"),
        (("--text", "X=none", "--text", "none"), "is not INPUT=FILE"),
    ],
)
def test_wrong_arguments_are_one_sentence(mme, tmp_path, monkeypatch, arguments, sentence):
    """With exit code 2, before anything is sent."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "none").touch()
    said = mme("bench", *arguments, *(() if "--text" in arguments else ("--json", "{}")))

    assert said.code == 2
    (line,) = said.err.splitlines()
    assert sentence in line


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ([], (0.0, 0, 0, None)),
        ([(0.001 * each, "hit") for each in range(1, 101)], (50.0, 100, 0, 0)),
        ([(0.002, "miss"), (0.001, "hit"), (9.0, "error")], (1.0, 2, 1, 1)),
        ([(0.001, "answer")], (1.0, 1, 0, None)),
    ],
)
def test_figures_of_a_level(found, expected):
    """Errors have no latency; loads are known where the server tells them."""
    level = invoke.level_of(4, found, 2.0)

    assert (level.p50, level.answers, level.errors, level.loads) == (pytest.approx(expected[0]), *expected[1:])
    assert level.rate == level.answers / 2.0


@pytest.mark.parametrize(("share", "value"), [(0.5, 2), (0.51, 3), (0.99, 4), (0.0, 1), (1.0, 4)])
def test_percentiles(share, value):
    """The smallest value that covers the share."""
    assert invoke.percentile([1, 2, 3, 4], share) == value


def test_models_by_zipfs_law():
    """The second of them half as often as the first; all alike without."""
    assert invoke.chosen(3, 1.0) == [1.0, 1 / 2, 1 / 3]
    assert invoke.chosen(2, 0.0) == [1.0, 1.0]
    assert invoke.expanded("a") == ["a"]
    assert invoke.expanded("a-{9..11}.x") == ["a-9.x", "a-10.x", "a-11.x"]


def request(**given):
    """The request that arguments make."""
    names = ("json", "npy", "text", "body", "content_type", "accept", "output")
    return request_of(Namespace(**{name: given.get(name) for name in names}))


def test_text_is_a_body_or_a_tensor_of_lines(tmp_path):
    """As it is, or an element for each line."""
    (tmp_path / "t").write_bytes(b"one\ntwo words\n")

    assert (request(text=[f"{tmp_path}/t"]).content_type, request(text=[f"{tmp_path}/t"]).body) == (
        "text/plain",
        b"one\ntwo words\n",
    )
    made = request(text=[f"TEXT={tmp_path}/t"])
    size = int(made.content_type.removeprefix(BINARY))
    assert json.loads(made.body[:size])["inputs"] == [
        {"name": "TEXT", "shape": [2, 1], "datatype": "BYTES", "parameters": {"binary_data_size": 20}}
    ]
    assert made.body[size:] == b"\3\0\0\0one\x09\0\0\0two words"


@pytest.mark.parametrize(
    ("name", "content_type"),
    [
        ("rows.csv", "text/csv"),
        ("rows.json", "application/json"),
        ("rows.npy", "application/x-npy"),
        ("cat.png", "image/png"),
        ("rows", "application/octet-stream"),
    ],
)
def test_a_body_is_of_the_type_that_its_name_tells(tmp_path, name, content_type):
    """Unless another one is given."""
    (tmp_path / name).write_bytes(b"")
    assert request(body=f"{tmp_path}/{name}").content_type == content_type
    assert request(body=f"{tmp_path}/{name}", content_type="text/x").content_type == "text/x"


def test_any_body_and_its_types(mme, server, tmp_path):
    """Sent as it is, under the content type that is given, asking for the one that is wanted."""
    (tmp_path / "rows.csv").write_text("1,2")
    said = mme("invoke", "--url", server.url, "--body", tmp_path / "rows.csv", "--content-type", "text/csv",
               "--accept", "text/csv", "--output", tmp_path / "answer")  # fmt: skip

    assert said.code == 0, said.err
    assert server.seen == ("/invocations", "text/csv", "text/csv", b"1,2")
    assert (tmp_path / "answer").read_bytes() == b"1,2"


def test_invoke_names_an_endpoint_and_a_local_server(mme, server):
    """Through boto3 in both cases; a local one needs no name, no region and no credentials."""
    assert mme("invoke", "--local", server.url, "--json", "{}").code == 0
    assert server.seen[0] == "/endpoints/local/invocations"
    assert mme("invoke", "mine", "--local", server.url, "--json", "{}").code == 0
    assert server.seen[0] == "/endpoints/mine/invocations"
    said = mme("invoke", "mine", "--endpoint", "other", "--json", "{}")
    assert (said.code, "two endpoints" in said.err) == (2, True)


def test_tensors_come_back_as_arrays(mme, server, tmp_path):
    """Binary ones and those in JSON, into a file of arrays."""
    header = json.dumps({"outputs": [
        {"name": "A", "datatype": "FP32", "shape": [2, 1], "parameters": {"binary_data_size": 8}},
        {"name": "S", "datatype": "BYTES", "shape": [2], "parameters": {"binary_data_size": 11}},
        {"name": "B", "datatype": "INT64", "shape": [2], "data": [5, 6]},
    ]}).encode()  # fmt: skip
    body = header + np.array([1, 2], "<f4").tobytes() + b"\2\0\0\0ab\1\0\0\0c"
    (tmp_path / "body").write_bytes(body)
    said = mme("invoke", "--url", server.url, "--body", tmp_path / "body", "--content-type", f"{BINARY}{len(header)}",
               "--output", tmp_path / "a.npz")  # fmt: skip

    assert said.code == 0, said.err
    with np.load(tmp_path / "a.npz") as arrays:
        assert {name: arrays[name].tolist() for name in arrays} == {
            "A": [[1.0], [2.0]], "S": [b"ab", b"c"], "B": [5, 6],
        }  # fmt: skip
    for content_type in ("text/csv", "application/jsonlines"):
        with pytest.raises(MmeError, match="and no tensors"):
            arrays_of(content_type, b"")
    with pytest.raises(MmeError, match="output 'S' has an element that ends in a zero"):
        arrays_of(f"{BINARY}{len(header)}", body[:-1] + b"\0")


def test_several_responses_are_shown_one_below_the_other(mme, server, tmp_path):
    """As a decoupled model answers: a line of JSON each."""
    (tmp_path / "lines").write_text('{"N": 1}\n{"N": 2}\n')
    said = mme("invoke", "--url", server.url, "--body", tmp_path / "lines", "--content-type", "application/jsonlines")

    assert (said.code, said.out) == (0, '{\n  "N": 1\n}\n{\n  "N": 2\n}\n'), said.err
