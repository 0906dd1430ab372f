"""What every form of request says beside its tensors, in JSON or in messages: the id, and parameters. PURE."""

from __future__ import annotations

import codecs
import json
import math
from typing import TYPE_CHECKING, Any

import orjson

from container.codec.described import NoInputsError, check_number
from container.codec.framing import BINARY_TYPE
from model_handlers.errors import Kind, MmeError, invalid_argument
from model_handlers.requests import FLAG_SEQUENCE_END, FLAG_SEQUENCE_START
from serve.request import InferenceRequest

if TYPE_CHECKING:
    from collections.abc import Mapping

    from model_handlers.tensor import Array
    from serve.request import Completion, Layout

FORM_OF_INFER = "a JSON object with 'inputs'"
FORM_OF_GENERATE = "a JSON object"
OF_SEQUENCES = frozenset({"sequence_id", "sequence_start", "sequence_end"})
RESERVED = frozenset({"priority", "timeout", "binary_data_output"}) | OF_SEQUENCES
_NONFINITE = (b"NaN", b"Infinity")  # and -Infinity: as Triton's parser and Python's write and read them
_LONGEST_SEQUENCE_ID = 128  # bytes, as Triton has it
_LONGEST_HEADER = 1 << 16  # bytes in which the end of JSON is looked for, where nobody said where it is


class RequestFields:
    """What a request says beside its tensors.

    Args:
        request_id: the client's id of it, or "".
        parameters: by name.
        reserved: the names that mean something here.

    Attributes:
        id: the client's id of it, or "".
        binary: whether outputs are binary by default, None where it says nothing.
        timeout_us, priority, correlation_id, flags: as in `InferenceRequest`.
        parameters: the others, which are the client's own.

    Raises:
        MmeError: INVALID_ARGUMENT naming the parameter that is reserved, or of another type; UNSUPPORTED for a text
            that is too long to name a sequence.
    """

    def __init__(self, request_id: str, parameters: Mapping[str, Any], reserved: frozenset[str] = RESERVED) -> None:
        check_number(parameters, "parameters")
        for key, value in parameters.items():
            if key.startswith("triton_"):
                raise invalid_argument(
                    "parameter keys starting with 'triton_' are reserved for Triton usage and should not be specified."
                )
            if not isinstance(value, str | int | bool | float):
                raise invalid_argument(f"parameter '{key}' must be a string, a number or a boolean")
            if isinstance(value, float) and not math.isfinite(value):  # which messages to models' processes can't carry
                raise invalid_argument(f"parameter '{key}' must be a finite number, got {value}")
        self.id = request_id
        self.parameters = {key: value for key, value in parameters.items() if key not in reserved}
        meant = parameters if reserved is RESERVED else {key: parameters[key] for key in reserved if key in parameters}
        self.timeout_us = _natural(meant, "timeout", "a number of microseconds")
        self.priority = _natural(meant, "priority", "a priority level")
        self.binary = boolean_field(meant, "binary_data_output", "the request")
        self.correlation_id = _correlation_id(meant)
        self.flags = FLAG_SEQUENCE_START * bool(boolean_field(meant, "sequence_start", "the request"))
        self.flags |= FLAG_SEQUENCE_END * bool(boolean_field(meant, "sequence_end", "the request"))

    def request(
        self, layout: Layout, inputs: list[Array], on_complete: Completion, request_id: str = ""
    ) -> InferenceRequest:
        """The request of these tensors; `request_id` is the client's id of it, where these fields have none."""
        request = InferenceRequest(layout, inputs, on_complete, self.id or request_id, self.parameters, self.timeout_us)
        request.priority = self.priority
        request.correlation_id, request.flags = self.correlation_id, self.flags
        return request


def json_object(text: bytes, form: str) -> dict[str, Any]:
    """The object that a request's JSON is, NaN and infinities allowed; `form` says which, for the message.

    Raises:
        MmeError: INVALID_ARGUMENT when it is no JSON, or no object.
    """
    try:
        document = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        if not goes_beyond(text):
            raise _not_json(error, text) from None
        try:
            document = beyond_json(text)
        except (ValueError, TypeError, RecursionError):
            raise _not_json(error, text) from None
    if not isinstance(document, dict):
        raise NoInputsError if form == FORM_OF_INFER else invalid_argument(f"the request must be {form}")
    return document


def goes_beyond(text: bytes) -> bool:
    """Whether text that is no JSON may be JSON but for NaN, infinities and a byte order mark."""
    return text.startswith(codecs.BOM_UTF8) or any(word in text for word in _NONFINITE)


def beyond_json(text: bytes) -> Any:
    """What text means that is JSON but for that. Triton's parser reads these as well.

    Raises:
        ValueError, TypeError, RecursionError: it is other text.
    """
    document = json.loads(text.decode("utf-8-sig"))
    orjson.dumps(document)  # refuses what orjson would not have read: larger numbers, half characters, deep nesting
    return document


def _not_json(error: orjson.JSONDecodeError, text: bytes) -> MmeError:
    hint = _tensors_behind(text) or _bytes_alone(text)
    return invalid_argument(f"failed to parse the request JSON buffer: {error}{hint}")


def _tensors_behind(text: bytes) -> str:
    """What to do about tensors behind JSON whose length nobody told."""
    begin = bytes(text[:_LONGEST_HEADER]).decode("latin-1")  # of which each character is a byte
    try:
        document, end = json.JSONDecoder().raw_decode(begin)
    except (ValueError, RecursionError):
        return ""
    if not isinstance(document, dict) or "inputs" not in document or not text[end:].strip():
        return ""
    return f"; tensors lie behind its {end} bytes: say so by the content type {BINARY_TYPE.decode()}{end}"


def _bytes_alone(text: bytes) -> str:
    """What to do about the bytes of a tensor, or of another file, without anything in front of them."""
    begin = bytes(text[:_LONGEST_HEADER])
    try:
        codecs.getincrementaldecoder("utf-8")().decode(begin)
    except UnicodeDecodeError:
        is_text = False
    else:
        is_text = b"\0" not in begin
    if is_text or begin.lstrip()[:1] in {b"{", b"["}:
        return ""
    return "; the bytes of a tensor do not say which one it is: send JSON, or a JSON header in front of them"


def client_id(document: Mapping[str, Any]) -> str:
    """The client's id of a request, or "".

    Raises:
        MmeError: INVALID_ARGUMENT when it is no string.
    """
    value = document.get("id", "")
    if not isinstance(value, str):
        raise invalid_argument("'id' must be a string")
    return value


def parameters_of(document: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The object in the field `parameters`, {} where there is none.

    Raises:
        MmeError: INVALID_ARGUMENT when something else is there.
    """
    value = document.get("parameters")
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise invalid_argument(f"'parameters' of {where} must be an object")
    return value


def boolean_field(parameters: Mapping[str, Any], key: str, where: str) -> bool | None:
    """The boolean in a parameter, None where there is none.

    Raises:
        MmeError: INVALID_ARGUMENT when something else is there.
    """
    if key not in parameters:
        return None
    value = parameters[key]
    if not isinstance(value, bool):
        raise invalid_argument(f"parameter '{key}' of {where} must be true or false")
    return value


def _natural(parameters: Mapping[str, Any], key: str, what: str) -> int:
    value = parameters.get(key, 0)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise invalid_argument(f"parameter '{key}' must be {what}, 0 or more")
    return value


def _correlation_id(parameters: Mapping[str, Any]) -> int | str:
    value = parameters.get("sequence_id", 0)
    if isinstance(value, bool) or not isinstance(value, int | str) or (isinstance(value, int) and value < 0):
        raise invalid_argument("parameter 'sequence_id' must be a string or a number, 0 or more")
    if isinstance(value, str) and len(value.encode()) > _LONGEST_SEQUENCE_ID:
        raise MmeError(
            Kind.UNSUPPORTED, f"string correlation ID cannot be longer than {_LONGEST_SEQUENCE_ID} characters"
        )
    return value
