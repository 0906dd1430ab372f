"""Which of the forms that can be written a client would like best, by its Accept header. PURE."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

ANY = "*/*"


def preferred(accept: str, written: Sequence[str], otherwise: str) -> str | None:
    """The media type that the client likes best of those that can be `written`, None where it likes none of them.

    Args:
        accept: media ranges between commas, perhaps with q-values; of equal ones the first is liked best.
        written: media types.
        otherwise: the one to take where the client likes all of them alike.
    """
    for wanted in _by_quality(accept):
        if wanted in written:
            return wanted
        if wanted == ANY:
            return otherwise if otherwise in written else written[0]
        if wanted.endswith("/*"):
            matches = [each for each in written if each.startswith(wanted[:-1])]
            if matches:
                return otherwise if otherwise in matches else matches[0]
    return None


def presumed(accept: str, otherwise: str) -> str:
    """The media type of an answer that was written for this header and does not say what it is."""
    if "," not in accept and "*" not in accept:
        return accept
    return next((wanted for wanted in _by_quality(accept) if "*" not in wanted), otherwise)


def _by_quality(accept: str) -> list[str]:
    ranges = [_range(part) for part in accept.split(",")]
    return [wanted for wanted, quality in sorted(ranges, key=lambda each: -each[1]) if wanted and quality > 0]


def _range(part: str) -> tuple[str, float]:
    media, *parameters = (piece.strip().lower() for piece in part.split(";"))
    quality = next((text[2:] for text in parameters if text.startswith("q=")), "1")
    try:
        return media, float(quality)
    except ValueError:
        return media, 0.0
