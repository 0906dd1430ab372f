"""What this process has lost for good: a GPU that answers nothing but errors. Told on any thread.

A process of models alone ends with the error. The serving process is asked for the reason by who can end it.
"""

from __future__ import annotations

from model_handlers.errors import Kind, LostProcessError, MmeError

_reasons: list[str] = []


def lost_process(failure: MmeError, words: str = "") -> LostProcessError:
    """What went wrong, where the GPU answers nothing but errors because of it; `words` are the driver's."""
    kind = Kind.UNAVAILABLE if failure.kind is Kind.INVALID_MODEL else failure.kind  # the file may be as good as any
    because = f" ({words})" if words else ""
    sentence = f"{failure.message}; in this process the GPU answers nothing but errors now{because}"
    if not _reasons:
        _reasons.append(sentence)
    return LostProcessError(kind, sentence)


def first_reason() -> str:
    """The sentence of the first such failure, "" while there was none."""
    return _reasons[0] if _reasons else ""
