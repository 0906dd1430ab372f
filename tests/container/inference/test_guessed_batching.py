"""What clients and operators see of a model that does not say whether it batches."""

import concurrent.futures
import json
import threading

import numpy as np
import pytest

from container.settings import Mode
from model_handlers.errors import MmeError
from model_handlers.tensor import FP32
from serve.request import InferenceRequest, layout_of
from tests.guessed_models import cumulative_sum, dense, scaled
from tests.metric_text import families_of
from tests.waiting import PATIENCE


@pytest.fixture
def running(start, tmp_path):
    """A server of its own of three models without a configuration."""
    for write in (cumulative_sum, dense, scaled):
        write(tmp_path / "models" / write.__name__)
    return start(mode=Mode.REPOSITORY, model_repository=tmp_path / "models", load_models=("*",))


def ask(running, model, **inputs):
    """The first output of a request in JSON."""
    kinds = {"f": "FP32", "i": "INT64"}
    tensors = [
        {"name": name, "shape": array.shape, "datatype": kinds[array.dtype.kind], "data": array.ravel().tolist()}
        for name, array in inputs.items()
    ]
    reply = running.infer(model, {"inputs": tensors})
    assert reply.status == 200, reply.body
    (output,) = json.loads(reply.body)["outputs"]
    return np.reshape(output["data"], output["shape"])


def known(running):
    """Model → what /metrics says of its batch dimension."""
    families = {family.name: family for family in families_of(running.http("GET", "/metrics").body.decode())}
    samples = families["mme_guessed_batching"].samples
    return {sample.labels["model"]: sample.labels["state"] for sample in samples if sample.value == 1}


def clients(running, check, count=16, turns=25):
    """Have so many clients ask at once, and raise what any of them finds wrong."""
    failures = []

    def client(number):
        rng = np.random.default_rng(number)
        try:
            for _ in range(turns):
                check(running, rng.standard_normal((rng.integers(1, 7), 4)).astype("f4"))
        except BaseException as error:  # noqa: BLE001 - told to the test
            failures.append(error)

    threads = [threading.Thread(target=client, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def together(running, model, *rows):
    """Ask for several in one turn of the loop, so that they wait together; returns when all are answered."""
    answers = [concurrent.futures.Future() for _ in rows]

    def submit():
        for x, answer in zip(rows, answers, strict=True):
            layout = layout_of((("x", FP32, x.shape),), ())
            request = InferenceRequest(layout, [x], lambda _, result, answer=answer: answer.set_result(result))
            assert running.engine.submit(model, None, request)

    running.on_loop.call(submit)
    for answer in answers:
        assert not isinstance(answer.result(PATIENCE), MmeError)


def check_sums(running, x):
    """Each answer is the sum of its own rows."""
    np.testing.assert_allclose(ask(running, "cumulative_sum", x=x), np.cumsum(x, axis=0), rtol=1e-5, atol=1e-5)


def test_clients_get_their_own_numbers_and_the_operator_is_told(running):
    """In /metrics and on the page; what clients are shown of the model stays as it was."""
    shown = [running.http("GET", f"/v2/models/cumulative_sum{path}").body for path in ("", "/config")]
    rng = np.random.default_rng(0)
    assert known(running) == {"cumulative_sum": "unproven", "dense": "unproven"}
    together(running, "cumulative_sum", *[rng.standard_normal((2, 4)).astype("f4") for _ in range(3)])
    clients(running, check_sums)
    assert known(running) == {"cumulative_sum": "refuted", "dense": "unproven"}
    rows = {row["name"]: row for row in json.loads(running.http("GET", "/dashboard/data").body)["models"]}
    assert rows["cumulative_sum"]["reason"].startswith("does not batch: requests are executed one by one")
    assert rows["dense"]["reason"] == ""
    assert shown == [running.http("GET", f"/v2/models/cumulative_sum{path}").body for path in ("", "/config")]
    assert json.loads(shown[1])["max_batch_size"] == 4
    assert json.loads(shown[0])["inputs"][0]["shape"] == [-1, 4]


@pytest.mark.parametrize("shape", [(), (1,)])
def test_a_scalar_may_be_sent_as_it_is(running, shape):
    """`"shape": []` is what the model declares."""
    assert ask(running, "scaled", x=np.array([1, 2], "f4"), times=np.full(shape, 3)).tolist() == [3, 6]
