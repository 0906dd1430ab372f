"""The demo's own parts: what it asks for, the two wire forms, and what it reads from an answer."""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from pathlib import Path

import boto3
import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))  # examples are run from the root, never installed

from examples import demo_client
from examples.build_models import MODELS
from examples.demo import Samples, plan
from examples.demo_servers import CREDENTIALS, asked_directly, s3_server

TENSORS = {"a": np.array([[1, -2]], np.int64), "b": np.array([[0.5, 1.5, 2.5]], np.float32)}


def test_a_proxy_of_the_environment_is_not_asked(monkeypatch):
    """Neither for the S3 server nor for the container, both of this machine; other hosts keep what they had."""
    for name in ("HTTP_PROXY", "http_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.setenv("NO_PROXY", "example.org")
    monkeypatch.delenv("no_proxy", raising=False)
    with asked_directly(), s3_server() as url:
        answer = boto3.client("s3", endpoint_url=url, **CREDENTIALS).list_buckets()
        assert answer["ResponseMetadata"]["HTTPStatusCode"] == 200
        assert os.environ["no_proxy"].startswith("example.org,")

    assert (os.environ["NO_PROXY"], os.environ.get("no_proxy")) == ("example.org", None)


def test_every_round_calls_every_model_in_json_and_in_binary():
    """Two rounds call each model twice in turn, once in each form, before the favourites come."""
    requests = list(plan(2))[: 2 * len(MODELS)]
    assert Counter(requests) == Counter((model, binary) for model in MODELS for binary in (True, False))


def test_favourites_are_asked_for_most():
    """After the rounds, the first model is called more often than the last, so that the cache has hits."""
    favourites = Counter(model for model, _ in list(plan(0)))
    assert favourites[MODELS[0]] > favourites[MODELS[-1]]


def test_every_model_has_a_sample_of_one():
    """Whatever the index, each model gets a batch of one."""
    samples = Samples()
    for model in MODELS:
        assert {tensor.shape[0] for tensor in samples.tensors(model, 10_000).values()} == {1}


def test_a_binary_body_is_a_header_and_the_tensors_one_after_the_other():
    """The content type's size ends the header exactly, and each tensor has the size that it announces."""
    content_type, body = demo_client.encode_binary(TENSORS)
    size = int(content_type.removeprefix(demo_client.BINARY_TYPE))
    header = json.loads(body[:size])
    assert [tensor["parameters"]["binary_data_size"] for tensor in header["inputs"]] == [16, 12]
    assert body[size:] == TENSORS["a"].tobytes() + TENSORS["b"].tobytes()


@pytest.mark.parametrize("encode", [demo_client.encode_json, demo_client.encode_binary])
def test_decode_reads_both_forms(encode):
    """Outputs come back with their names, types, shapes and values, from JSON and from binary alike."""
    content_type, body = encode(TENSORS)
    size = int(content_type.partition("json-header-size=")[2] or len(body))
    header = json.loads(body[:size])
    response = json.dumps({"outputs": header["inputs"]}).encode()
    content_type = content_type.replace(str(size), str(len(response)))
    outputs = demo_client.decode(content_type, response + body[size:])
    assert list(outputs) == ["a", "b"]
    for name, tensor in TENSORS.items():
        np.testing.assert_array_equal(outputs[name], tensor)
        assert outputs[name].dtype == tensor.dtype


def test_a_miss_is_read_with_its_phases_and_its_victims():
    """Every victim is named, and only what took time is a phase."""
    header = (
        'cache;desc=miss, download;dur=12.3, load;dur=88, infer;dur=5.2, evict;desc="a.tar.gz", evict;desc="b.tar.gz"'
    )
    hit, evicted, milliseconds = demo_client.read_timing(header)
    assert not hit
    assert evicted == ("a.tar.gz", "b.tar.gz")
    assert milliseconds == {"download": 12.3, "load": 88.0, "infer": 5.2}


def test_a_hit_is_read_as_one():
    """A hit has neither download nor load nor victims."""
    assert demo_client.read_timing("cache;desc=hit, queue;dur=0.1, infer;dur=5.2") == (
        True,
        (),
        {"queue": 0.1, "infer": 5.2},
    )
