"""CloudWatch metrics as a log group gets them: lines on the standard output of a real server."""

from __future__ import annotations

import json

import pytest

from tests.contract import models
from tests.contract.server import eventually

INVOKE = "/invocations"


@pytest.fixture
def store(tmp_path):
    """A folder with one archive."""
    models.pack(models.lay_out(tmp_path / "plus", models.plus(1)), tmp_path / "store" / "plus.tar.gz")
    return tmp_path / "store"


def documents(server):
    """What the server has printed for CloudWatch so far; lines of the log have no `_aws`."""
    return [line for line in server.lines if "_aws" in line]


def test_a_document_a_period_and_the_rest_at_the_end(serve, store):
    """Each is one line of its own; together they tell of every request once, the last after SIGTERM."""
    environ = {"MME_EMF": "true", "MME_EMF_PERIOD": "1", "MME_ENDPOINT_NAME": "ep", "MME_EMF_TOP_MODELS": "1"}
    server = serve({"MME_MODEL_STORE": str(store), **environ})
    for _ in range(3):
        assert server.ask("POST", INVOKE, models.ONE, X_Amzn_SageMaker_Target_Model="plus").status == 200
    eventually(lambda: len([d for d in documents(server) if "TargetModel" not in d]) >= 2, "two periods")
    for _ in range(2):
        assert server.ask("POST", INVOKE, models.ONE, X_Amzn_SageMaker_Target_Model="plus").status == 200
    assert server.stop() == 0

    found = documents(server)
    assert all((d["EndpointName"], d["VariantName"]) == ("ep", "AllTraffic") for d in found)
    of_endpoint = [d for d in found if "TargetModel" not in d]
    of_model = [d for d in found if "TargetModel" in d]
    assert {d["TargetModel"] for d in of_model} == {"plus.tar.gz"}
    for told in (of_endpoint, of_model):
        assert sorted(value for d in told for value in d.get("ModelCacheHit", [])) == [0, 1, 1, 1, 1]
        assert sum(len(d.get("ModelDownloadingTime", [])) for d in told) == 1
    stamps = [d["_aws"]["Timestamp"] for d in of_endpoint]
    assert stamps == sorted(set(stamps))
    assert of_endpoint[-1]["LoadedModelCount"] == [1]


def test_nothing_is_printed_where_it_is_switched_off(serve, store):
    """Though it runs inside SageMaker; outside it is off anyway, which the settings decide."""
    off = {"MME_EMF": "false", "SAGEMAKER_SAFE_PORT_RANGE": "0-65535"}
    server = serve({"MME_MODEL_STORE": str(store), **off})
    assert server.ask("POST", INVOKE, models.ONE, X_Amzn_SageMaker_Target_Model="plus").status == 200
    assert server.stop() == 0

    assert documents(server) == []


def test_inside_sagemaker_metrics_are_printed_by_themselves(serve, tmp_path):
    """A container that has SageMaker's range of ports prints them, and says that it does not know its endpoint."""
    server = serve({"SAGEMAKER_MULTI_MODEL": "true", "SAGEMAKER_SAFE_PORT_RANGE": "0-65535"})
    assert server.stop() == 0

    [document] = documents(server)
    assert json.dumps(document["_aws"]["CloudWatchMetrics"]) == json.dumps(
        [
            {
                "Namespace": "mme",
                "Dimensions": [["EndpointName", "VariantName"]],
                "Metrics": [{"Name": "LoadedModelCount", "Unit": "None"}, {"Name": "MemoryUsed", "Unit": "Bytes"}],
            }
        ]
    )
    assert (document["EndpointName"], document["LoadedModelCount"]) == ("unknown", [0])
    assert "MME_ENDPOINT_NAME" in server.log
