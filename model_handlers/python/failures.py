"""What the author's code raised, as an error of the model. PURE, but for a look at whether a file is there.

Anything that it raises is the model's failure: `sys.exit` and KeyboardInterrupt too, which would otherwise end the
process that hosts it.
"""

from __future__ import annotations

import itertools
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

from model_handlers.errors import Kind, MmeError, invalid_model, out_of_memory

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from types import FrameType

_OURS = tuple(str(Path(__file__).parents[1] / folder) for folder in ("python", "scripts"))
_MOST_ALIKE = 3  # frames
_LONGEST = 128 << 10  # characters of what an author has to say; Triton sends any number


def failed_load(doing: str, error: BaseException, model: str) -> MmeError:
    if is_memory(error):
        return out_of_memory(f"model '{model}' ran out of memory while {doing}: {told(error)}")
    if isinstance(error, SyntaxError):
        where = f"{error.filename} line {error.lineno}"
        return invalid_model(printable(f"model '{model}': {where}: {type(error).__name__}: {error.msg}"))
    return invalid_model(f"model '{model}' failed while {doing}: {told(error)}")


def failed_execution(error: BaseException, lane: str) -> MmeError:
    if is_memory(error):
        return out_of_memory(f"model instance '{lane}' ran out of memory: {told(error)}")
    return failed_batch(told(error), lane)


def failed_batch(message: str, lane: str) -> MmeError:
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
    text = printable(f"{type(error).__name__}: {_text(error)}")
    if frames:
        text += f"\n\nAt:\n{printable(''.join(_places(reversed(frames))))}"
    advice = _advice(error, [Path(frame.f_code.co_filename) for frame, _ in frames])
    return f"{text}\n{printable(advice)}" if advice else text


def _places(frames: Iterable[tuple[FrameType, int]]) -> Iterator[str]:
    # A line a frame; of one that comes again and again, as a recursion's does, few.
    lines = (f"  {frame.f_code.co_filename}({line}): {frame.f_code.co_name}\n" for frame, line in frames)
    for place, same in itertools.groupby(lines):
        times = sum(1 for _ in same)
        yield from [place] * min(times, _MOST_ALIKE)
        if times > _MOST_ALIKE:
            yield f"  (the same {times - _MOST_ALIKE} times more)\n"


def _advice(error: BaseException, files: list[Path]) -> str:
    if isinstance(error, ModuleNotFoundError):
        return "Install it into the image, or let the model bring it: by a requirements.txt, or EXECUTION_ENV_PATH"
    if isinstance(error, AttributeError) and error.obj is None and error.name == "as_numpy":
        return "get_input_tensor_by_name gives None for an input that the request does not have; names are exact"
    if (
        isinstance(error, FileNotFoundError)
        and isinstance(error.filename, str)
        and not Path(error.filename).is_absolute()
    ):
        return _where_it_lies(error.filename, files)
    return ""


def _where_it_lies(name: str, files: list[Path]) -> str:
    for file in reversed(files):
        for up, directory in enumerate(file.parents[:2]):
            if (directory / name).exists():
                begin = "Path(__file__).parent" if up == 0 else f"Path(__file__).parents[{up}]"
                return f"It lies in {directory}, and was looked for where the server runs: write {begin} / '{name}'"
    return (
        "A relative path begins where the server runs: begin it with Path(__file__).parent, or with the directory that "
        "initialize and model_fn are given"
    )


def _text(error: BaseException) -> str:
    try:
        return str(error) or "<EMPTY MESSAGE>"
    except Exception:  # noqa: BLE001 - the author's __str__ may raise as well as anything else of theirs
        return "an exception that cannot be printed"


def _is_ours(frame: FrameType) -> bool:
    file = frame.f_code.co_filename
    return file.startswith((*_OURS, "<frozen importlib"))
