"""How long answers take to write: a short one is written where it came, a long one by a thread. PURE.

Bytes that are sent from where they lie cost nothing. What is copied into shared memory, split into strings, or written
as JSON, costs by its size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from container.steps.shared_memory import AT_ONCE
from model_handlers.tensor import BYTES

if TYPE_CHECKING:
    from collections.abc import Container

    from container.codec.encode import Reply
    from model_handlers.tensor import Array
    from serve.request import InferenceResponse

_FEW = 64  # strings, whose lengths are looked at
_STRING = 256  # bytes that could be copied while a string is written
_NUMBER = 32  # and while a number is written as text, or takes its place among the classes


def takes_long(
    response: InferenceResponse, places: Container[str], classes: Container[str], reply: Reply | None = None
) -> bool:
    """Whether writing a response would keep others waiting.

    Args:
        response: what the model answered.
        places: the outputs that are written into shared memory.
        classes: those that become classes.
        reply: says which of the others are JSON; None where none is.
    """
    effort = 0
    for name, data_type, array in response.outputs:
        if data_type is BYTES:
            effort += _strings(array)
        elif name in places:
            effort += array.nbytes
        elif name in classes or not (reply is None or reply.outputs.get(name, reply.binary)):
            effort += array.size * _NUMBER
    return effort > AT_ONCE


def _strings(array: Array) -> int:
    count: int = array.size
    if count > _FEW:
        return count * _STRING
    return count * _STRING + sum(len(element) for element in array.flat if isinstance(element, bytes | str))
