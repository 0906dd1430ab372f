"""Which sequence the steps of an ensemble belong to."""

import pytest

from model_handlers.errors import Kind, MmeError
from model_handlers.requests import FLAG_SEQUENCE_END as END
from model_handlers.requests import FLAG_SEQUENCE_START as START
from serve.model.ensemble_plan import belonging, overridden


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        (None, (7, START)),
        ({"other": 1}, (7, START)),
        ({"sequence_id": 8}, (8, START)),
        ({"sequence_id": "eight", "sequence_end": True}, ("eight", START | END)),
        ({"sequence_start": False}, (7, 0)),
        ({"sequence_start": True, "sequence_end": False}, (7, START)),
    ],
)
def test_a_response_may_say_what_is_behind_it(parameters, expected):
    """Whatever it does not say stays as it was."""
    assert overridden((7, START), parameters) == expected


@pytest.mark.parametrize(
    ("parameters", "sentence"),
    [
        ({"sequence_id": 1.5}, "expect parameter 'sequence_id' to be TRITONSERVER_PARAMETER_INT or"),
        ({"sequence_id": True}, "expect parameter 'sequence_id' to be TRITONSERVER_PARAMETER_INT or"),
        ({"sequence_start": 1}, "expect parameter 'sequence_start' to be TRITONSERVER_PARAMETER_BOOL"),
        ({"sequence_end": "x"}, "expect parameter 'sequence_end' to be TRITONSERVER_PARAMETER_BOOL"),
    ],
)
def test_another_type_is_the_models_fault(parameters, sentence):
    """Triton's sentence names the parameter."""
    with pytest.raises(MmeError) as caught:
        overridden((7, 0), parameters)
    assert caught.value.kind is Kind.EXECUTION_FAILED
    assert caught.value.message.startswith(sentence)


def test_a_step_belongs_where_one_of_its_sources_says():
    """What a step said comes before what the request says."""
    assert belonging((7, 0), []) == (7, 0)
    assert belonging((7, 0), [(7, 0), (8, 0), (7, 0)]) == (8, 0)
