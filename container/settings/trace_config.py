"""tritonserver's --trace-config as variables of ours. PURE.

    level=TIMESTAMPS          what is traced here
    mode=opentelemetry        how
    rate=100                  MME_TRACE_RATE
    count=-1                  all of them
    opentelemetry,url=…       MME_TRACE_URL; Triton's has no scheme

Everything else, Triton's own format and its files above all, is refused.
"""

from __future__ import annotations

_UNDERSTOOD = "level=TIMESTAMPS, mode=opentelemetry, rate=N, count=-1, opentelemetry,url=URL"
_AS_HERE = ("level=TIMESTAMPS", "mode=opentelemetry", "count=-1")


def trace_variable(text: str) -> tuple[str, str] | None:
    """The variable and value that one --trace-config stands for, None where it says what is so anyway.

    Raises:
        ValueError: with what is understood, worded to follow "expected".
    """
    if text in _AS_HERE:
        return None
    key, _, value = text.partition("=")
    if value and key == "rate":
        return "MME_TRACE_RATE", value
    if value and key == "opentelemetry,url":
        return "MME_TRACE_URL", value if "://" in value else f"http://{value}"
    msg = f"one of {_UNDERSTOOD}"
    raise ValueError(msg)
