"""The tables from kinds of errors to what each protocol calls them."""

import pytest
from botocore.session import get_session

from container.inference.errors import RUNTIME_STATUSES, STATUSES, Status
from model_handlers.errors import Kind


def test_every_kind_has_a_row():
    """No error can leave the engine without a status."""
    assert set(STATUSES) == set(Kind)


def test_507_stands_for_memory_and_nothing_else():
    """SageMaker unloads other people's models when it sees a 507."""
    for kind, row in STATUSES.items():
        assert (507 in row) is (kind is Kind.OUT_OF_MEMORY), kind
    assert 507 not in RUNTIME_STATUSES.values()


@pytest.mark.parametrize("kind", Kind)
def test_every_status_is_an_error_that_its_protocol_knows(kind):
    """SageMaker's contract and KServe know these statuses; the Runtime API has a name for each error."""
    row = STATUSES[kind]
    assert row.sagemaker in {400, 403, 404, 406, 409, 413, 415, 500, 503, 504, 507}
    assert row.kserve in {400, 403, 404, 406, 413, 415, 500, 501, 503, 504, 507}
    assert row.runtime in RUNTIME_STATUSES


def test_what_the_client_did_wrong_is_never_a_server_error():
    """A bad request must not look like a broken container."""
    for kind in (
        Kind.INVALID_ARGUMENT,
        Kind.UNKNOWN_MODEL,
        Kind.UNKNOWN_VERSION,
        Kind.ALREADY_EXISTS,
        Kind.TOO_LARGE,
        Kind.UNSUPPORTED_MEDIA_TYPE,
        Kind.NOT_ACCEPTABLE,
    ):
        assert STATUSES[kind].sagemaker < 500
        assert STATUSES[kind].kserve < 500


def test_the_runtime_errors_are_those_that_botocore_models():
    """Every name is a shape of the service, with the same HTTP status."""
    shapes = get_session().get_service_model("sagemaker-runtime").error_shapes
    modelled = {shape.name: shape.metadata["error"]["httpStatusCode"] for shape in shapes if "error" in shape.metadata}
    for name, status in RUNTIME_STATUSES.items():
        assert modelled[name] == status


def test_no_kind_is_ok_over_grpc():
    """No error is good news over gRPC."""
    assert Status.OK not in {row.grpc for row in STATUSES.values()}


def test_codes_and_http_statuses_agree_on_whose_fault_it_is():
    """What HTTP calls the client's, gRPC does not call the server's, and the other way round; but for secrets, as Triton."""
    ours = {Status.INTERNAL, Status.UNAVAILABLE, Status.UNIMPLEMENTED, Status.DEADLINE_EXCEEDED}
    for kind in Kind:
        if kind not in {Kind.OUT_OF_MEMORY, Kind.RESTRICTED}:
            assert (STATUSES[kind].kserve >= 500) == (STATUSES[kind].grpc in ours), kind
