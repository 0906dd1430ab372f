"""tritonserver's --trace-config as variables of ours. PURE.

    level=TIMESTAMPS          what is traced here
    mode=…                    how, which url or file say as well
    rate=100                  MME_TRACE_RATE
    count=-1                  all of them
    opentelemetry,url=…       MME_TRACE_URL; Triton's has no scheme
    triton,file=…             MME_TRACE_FILE
    triton,log-frequency=…    MME_TRACE_LOG_FREQUENCY

Everything else, tensors above all, is refused.
"""

from __future__ import annotations

_VARIABLES = {
    "rate": "MME_TRACE_RATE",
    "triton,file": "MME_TRACE_FILE",
    "triton,log-frequency": "MME_TRACE_LOG_FREQUENCY",
}
_UNDERSTOOD = (
    "level=TIMESTAMPS, mode=opentelemetry, mode=triton, rate=N, count=-1, opentelemetry,url=URL, triton,file=PATH, "
    "triton,log-frequency=N"
)
_AS_HERE = ("level=TIMESTAMPS", "mode=opentelemetry", "mode=triton", "count=-1")


def trace_variable(text: str) -> tuple[str, str] | None:
    """The variable and value that one --trace-config stands for, None where it says what is so anyway.

    Raises:
        ValueError: with what is understood, worded to follow "expected".
    """
    if text in _AS_HERE:
        return None
    key, _, value = text.partition("=")
    if value and key in _VARIABLES:
        return _VARIABLES[key], value
    if value and key == "opentelemetry,url":
        return "MME_TRACE_URL", value if "://" in value else f"http://{value}"
    msg = f"one of {_UNDERSTOOD}"
    raise ValueError(msg)
