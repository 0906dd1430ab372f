"""Parts of the API that are for those alone who know a secret, over HTTP; gRPC's are in the contract tests."""

from __future__ import annotations

import pytest
from tritonclient.grpc import service_pb2

from container.control.routes import CATEGORIES, GRPC_ROUTES, HTTP_ROUTES
from container.settings import Mode
from container.steps.access import Restriction, Restrictions
from model_handlers.errors import Kind, MmeError

FREE = {"/metrics", "/execution-parameters"}
CATEGORY_OF = {
    "/ping": "health",
    "/v2/health/live": "health",
    "/v2/models/<path:name>/ready": "health",
    "/v2": "metadata",
    "/v2/models/<path:name>": "metadata",
    "/v2/models/<path:name>/versions/<version>": "metadata",
    "/invocations": "inference",
    "/models/<path:name>/invoke": "inference",
    "/endpoints/<endpoint>/invocations": "inference",
    "/v2/models/<path:name>/versions/<version>/infer": "inference",
    "/v2/models/<path:name>/generate_stream": "inference",
    "/v2/models/<path:name>/config": "model-config",
    "/v2/repository/index": "model-repository",
    "/v2/repository/models/<path:name>/load": "model-repository",
    "/models": "model-repository",
    "/models/<path:name>": "model-repository",
    "/v2/models/stats": "statistics",
    "/v2/models/<path:name>/versions/<version>/stats": "statistics",
    "/dashboard": "statistics",
    "/v2/trace/setting": "trace",
    "/v2/models/<path:name>/trace/setting": "trace",
    "/v2/systemsharedmemory/status": "shared-memory",
    "/v2/logging": "logging",
    "/metrics": "",
}


@pytest.mark.parametrize(("rule", "category"), CATEGORY_OF.items())
def test_a_route_is_in_one_category(rule, category):
    """By its rule, in which names of models are places and not what a client wrote."""
    assert {route.category for route in HTTP_ROUTES if rule in route.rules} == {category}


def test_every_route_is_in_a_category():
    """But for the two that are free."""
    assert {route.pattern for route in HTTP_ROUTES if not route.category} == FREE


def test_every_method_of_grpc_is_in_a_category():
    """Health's own too."""
    service = service_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"]
    named = {route.pattern.rpartition("/")[2]: route.category for route in GRPC_ROUTES}
    assert set(named) == {method.name for method in service.methods} | {"Check", "Watch"}
    assert set(named.values()) == set(CATEGORIES)


@pytest.mark.parametrize("headers", [{}, {"admin-key": ""}, {"admin-key": "secreT"}, {"other": "secret"}])
def test_who_does_not_know_the_secret_is_refused(headers):
    """In Triton's words, which name the header and not the secret."""
    restrictions = Restrictions([Restriction(("trace", "logging"), "Admin-Key", "secret")])
    with pytest.raises(MmeError) as raised:
        restrictions.check("trace", headers)
    assert raised.value.kind is Kind.RESTRICTED
    assert raised.value.message == "This API is restricted, expecting header 'Admin-Key'"
    restrictions.check("health", headers)
    restrictions.check("logging", {"admin-key": "secret"})


def test_restricted_routes_want_their_header(start, repository, json_inputs):
    """Inference and health on the loop, the others behind it; what is in no group is free, and so are metrics."""
    groups = (Restriction(("inference", "model-repository"), "key", "a"), Restriction(("health",), "Other", "b"))
    running = start(mode=Mode.REPOSITORY, model_repository=repository, load_models=("twice",), http_restrictions=groups)
    body = json_inputs(X=[1, 2, 3, 4])

    def infer(**headers):
        return running.infer("twice", {"inputs": body}, **headers)

    assert (infer().status, infer().error) == (403, "This API is restricted, expecting header 'key'")
    assert infer(Key="b").status == 403
    assert infer(Key="a").status == 200
    for method, path in (("POST", "/v2/repository/index"), ("GET", "/models"), ("POST", "/invocations")):
        assert running.http(method, path).status == 403, path
    assert running.http("GET", "/models", {"KEY": "a"}).status == 200
    assert running.http("GET", "/ping").error == "This API is restricted, expecting header 'Other'"
    assert running.http("GET", "/ping", {"other": "b"}).status == 200
    assert running.http("GET", "/v2/health/live").status == 403
    assert running.http("GET", "/v2/models/twice/ready", {"Other": "b"}).status == 200
    for path in ("/v2", "/metrics", "/v2/models/twice", "/v2/models/stats", "/v2/models/twice/config"):
        assert running.http("GET", path).status == 200, path
