"""How a server queues, batches and answers requests by what configurations ask for, seen from outside.

One server has a model for each; what was executed together is read from statistics.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.contract import models
from tests.contract.server import Server, eventually

LEVELS = """
max_batch_size: 8
dynamic_batching {
  preferred_batch_size: 3 max_queue_delay_microseconds: 600000000
  priority_levels: 2 default_priority_level: 2
  priority_queue_policy { key: 1 value { default_timeout_microseconds: 600000000 allow_timeout_override: true } }
  priority_queue_policy { key: 2 value { max_queue_size: 1 } }
}
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A server with all models of this file."""
    root = tmp_path_factory.mktemp("queues")
    repository = root / "repository"
    models.lay_out(repository / "levels", models.plus(1), LEVELS)
    with Server(root / "server", {"MME_MODEL_REPOSITORY": str(repository), "MME_PING_MODE": "ready"}) as running:
        yield running


def ask(server, model, body=models.ONE, **parameters):
    """The answer to a request with these parameters."""
    return server.ask("POST", f"/v2/models/{model}/infer", {**body, "parameters": parameters})


def statistics(server, model):
    """The statistics of a model's only version."""
    (row,) = server.ask("GET", f"/v2/models/{model}/stats").json["model_stats"]
    return row


def sizes(server, model):
    """Batch size → executions."""
    return {row["batch_size"]: row["compute_infer"]["count"] for row in statistics(server, model)["batch_stats"]}


def queued(server, model):
    """How many requests wait."""
    return server.metric("nv_inference_pending_request_count", model=model)


def test_priority_levels(server):
    """Each level has its own limits, a request its own level and timeout, and a batch is of all levels."""
    with ThreadPoolExecutor(3) as pool:
        first = pool.submit(ask, server, "levels")
        eventually(lambda: queued(server, "levels") == 1, "a request to be queued")
        full = ask(server, "levels", priority=2)
        late = ask(server, "levels", priority=1, timeout=1000)
        others = [pool.submit(ask, server, "levels", priority=1) for _ in range(2)]
        answers = [future.result() for future in (first, *others)]

    assert (full.status, late.status) == (503, 503)
    assert full.error.startswith("Exceeds maximum queue size: model 'levels' has 1 requests waiting")
    assert late.error.startswith("Request timeout expired")
    assert [models.y(answer.json) for answer in answers] == [[2, 3, 4, 5]] * 3
    assert sizes(server, "levels") == {3: 1}
