"""What the author's code raised, as an error of the model. PURE.

Anything that it raises is the model's failure and nobody else's: `sys.exit` and KeyboardInterrupt too, which would
otherwise end the process that hosts it.
"""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import TYPE_CHECKING

from model_handlers.errors import Kind, MmeError, invalid_model, out_of_memory

if TYPE_CHECKING:
    from types import FrameType

_OURS = str(Path(__file__).parent)
_LONGEST = 128 << 10  # characters of what an author has to say; Triton sends any number


def failed_load(doing: str, error: BaseException, model: str) -> MmeError:
    """Why a model cannot be loaded: its code failed while `doing`."""
    if is_memory(error):
        return out_of_memory(f"model '{model}' ran out of memory while {doing}: {told(error)}")
    if isinstance(error, SyntaxError):
        where = f"{error.filename} line {error.lineno}"
        return invalid_model(printable(f"model '{model}': {where}: {type(error).__name__}: {error.msg}"))
    return invalid_model(f"model '{model}' failed while {doing}: {told(error)}{_packages(error)}")


def _packages(error: BaseException) -> str:
    """How a model comes by a package that is not there."""
    if not isinstance(error, ModuleNotFoundError):
        return ""
    return "\nInstall it into the image, or let the model bring it: by a requirements.txt, or EXECUTION_ENV_PATH"


def failed_execution(error: BaseException, lane: str) -> MmeError:
    """Why a batch failed: `execute` raised."""
    if is_memory(error):
        return out_of_memory(f"model instance '{lane}' ran out of memory: {told(error)}")
    return failed_batch(told(error), lane)


def failed_batch(message: str, lane: str) -> MmeError:
    """Why a batch failed, in Triton's words around `message`."""
    return MmeError(Kind.EXECUTION_FAILED, f"Failed to process the request(s) for model '{lane}', message: {message}")


def printable(text: str) -> str:
    """What a response can carry of an author's text: bounded, and without halves of characters."""
    return text[:_LONGEST].encode(errors="replace").decode()


def is_memory(error: BaseException) -> bool:
    """Whether memory ran out: for Python, for numpy, or on a GPU, as torch and cupy call it."""
    return isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"


def told(error: BaseException) -> str:
    """`<Type>: <message>` and where, innermost frame first, without the frames that called the author's code."""
    frames = [(frame, line) for frame, line in traceback.walk_tb(error.__traceback__) if not _is_ours(frame)]
    places = "".join(
        f"  {frame.f_code.co_filename}({line}): {frame.f_code.co_name}\n" for frame, line in reversed(frames)
    )
    text = printable(f"{type(error).__name__}: {_text(error)}")
    return f"{text}\n\nAt:\n{printable(places)}" if places else text


def _text(error: BaseException) -> str:
    try:
        return str(error) or "<EMPTY MESSAGE>"
    except Exception:  # noqa: BLE001 - the author's __str__ may raise as well as anything else of theirs
        return "an exception that cannot be printed"


def _is_ours(frame: FrameType) -> bool:
    file = frame.f_code.co_filename
    return file.startswith((_OURS, "<frozen importlib"))
