"""What a script's functions raised, as an error of the model. PURE.

A failure is the model's own (500, with its traceback), unless it says otherwise: no such content type (415, or 406 for
that of the answer), no memory (507), or a status that the script gave it by an error of Amazon's toolkits. That reaches
SageMaker's clients as it is, but for 404 and 409, which speak of models alone on its routes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from model_handlers.errors import Kind, MmeError, invalid_argument, out_of_memory
from model_handlers.python.failures import is_memory, printable, told
from model_handlers.scripts.formats import READS, WRITES, MalformedBodyError

if TYPE_CHECKING:
    from collections.abc import Sequence

# By name, since Amazon's own package may be the one that is installed.
_UNSUPPORTED = "UnsupportedFormatError"
_CURLS = "application/x-www-form-urlencoded"  # what curl -d calls a body
_WITH_STATUS = {"BaseInferenceToolkitError": "status_code", "PredictionException": "error_code"}
_KINDS = {
    406: Kind.NOT_ACCEPTABLE,
    413: Kind.TOO_LARGE,
    415: Kind.UNSUPPORTED_MEDIA_TYPE,
    503: Kind.UNAVAILABLE,
    507: Kind.OUT_OF_MEMORY,
}
_OF_MODELS = (404, 409)


def failed_call(function: str, error: BaseException, model: str) -> MmeError:
    """Why a request failed: the function raised."""
    if isinstance(error, MmeError):
        return error
    if is_memory(error):
        return out_of_memory(f"model '{model}' ran out of memory while {function} ran: {told(error)}")
    names = [each.__name__ for each in type(error).__mro__]
    if _UNSUPPORTED in names:
        refuse, types = (not_acceptable, WRITES) if function == "output_fn" else (unsupported_media_type, READS)
        return refuse(model, function, str(error).partition("\n")[0], getattr(error, "types", ()) or types)
    if isinstance(error, MalformedBodyError):
        return invalid_argument(printable(f"model '{model}': {error}"))
    status = next((getattr(error, field, None) for name, field in _WITH_STATUS.items() if name in names), None)
    if isinstance(status, int):
        return with_status(status, f"model '{model}': {getattr(error, 'message', error)}")
    return MmeError(Kind.EXECUTION_FAILED, f"model '{model}' failed while {function} ran: {told(error)}")


def with_status(status: int, sentence: str) -> MmeError:
    """The error of the kind that is nearest to an HTTP status, which it keeps."""
    kind = _KINDS.get(status, Kind.INVALID_ARGUMENT if status < 500 else Kind.EXECUTION_FAILED)
    said = status if 400 <= status < 600 and status not in _OF_MODELS else 0
    return MmeError(kind, printable(sentence), said)


def unsupported_media_type(model: str, function: str, reason: str, types: Sequence[str] = READS) -> MmeError:
    """The body is of a type that the function does not read."""
    sentence = _unsupported(model, function, reason, "input_fn reads", types)
    if _CURLS in reason:
        sentence += f". curl says so unless told otherwise: -H 'Content-Type: {types[0]}'"
    return MmeError(Kind.UNSUPPORTED_MEDIA_TYPE, sentence)


def not_acceptable(model: str, function: str, reason: str, types: Sequence[str] = WRITES) -> MmeError:
    """The client accepts no type that the function writes."""
    return MmeError(Kind.NOT_ACCEPTABLE, _unsupported(model, function, reason, "output_fn writes", types))


def _unsupported(model: str, function: str, reason: str, does: str, types: Sequence[str]) -> str:
    listed = f"{', '.join(types[:-1])} and {types[-1]}"
    name = does.partition(" ")[0]
    return printable(
        f"model '{model}': {reason} ({function}) The default {does} {listed}; implement {name} for other types"
    )
