"""The table from kinds of errors to gRPC's codes."""

from container.grpc.status import CODES, Status
from container.inference.status import STATUSES
from model_handlers.errors import Kind


def test_every_kind_has_a_code():
    """No error can leave the engine without one, and none of them is good news."""
    assert set(CODES) == set(Kind)
    assert Status.OK not in CODES.values()


def test_codes_and_http_statuses_agree_on_whose_fault_it_is():
    """What HTTP calls the client's, gRPC does not call the server's, and the other way round; but for secrets, as Triton."""
    ours = {Status.INTERNAL, Status.UNAVAILABLE, Status.UNIMPLEMENTED, Status.DEADLINE_EXCEEDED}
    for kind in Kind:
        if kind not in {Kind.OUT_OF_MEMORY, Kind.RESTRICTED}:
            assert (STATUSES[kind].kserve >= 500) == (CODES[kind] in ours), kind
