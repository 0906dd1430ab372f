"""tritonserver's --trace-config as variables of ours. PURE.

    level=TIMESTAMPS          MME_TRACE_LEVEL, as do level=TENSORS and level=OFF, which is what a destination without a
                              level means
    mode=…                    how, which url or file say as well; without one OpenTelemetry's is on this machine
    rate=100                  MME_TRACE_RATE
    count=100                 MME_TRACE_COUNT
    opentelemetry,url=…       MME_TRACE_URL; Triton's has no scheme
    triton,file=…             MME_TRACE_FILE
    triton,log-frequency=…    MME_TRACE_LOG_FREQUENCY

and of the flags that this one replaced, which Triton still knows. Everything else is refused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

COLLECTOR = "http://localhost:4318/v1/traces"  # Triton's default
_VARIABLES = {
    "rate": "MME_TRACE_RATE",
    "count": "MME_TRACE_COUNT",
    "triton,file": "MME_TRACE_FILE",
    "triton,log-frequency": "MME_TRACE_LOG_FREQUENCY",
}
_UNDERSTOOD = (
    "level=TIMESTAMPS, level=TENSORS, level=OFF, mode=opentelemetry, mode=triton, rate=N, count=N, "
    "opentelemetry,url=URL, triton,file=PATH, triton,log-frequency=N; of OpenTelemetry's library the variables "
    "OTEL_RESOURCE_ATTRIBUTES and OTEL_BSP_… say more"
)
_AS_HERE = ("mode=opentelemetry", "mode=triton")
_LEVELS = ("level=TIMESTAMPS", "level=TENSORS", "level=OFF")


def trace_variable(text: str) -> tuple[str, str] | None:
    """The variable and value that one --trace-config stands for, None where it says what is so anyway.

    Raises:
        ValueError: with what is understood, worded to follow "expected".
    """
    if text in _AS_HERE:
        return None
    key, _, value = text.partition("=")
    if text in _LEVELS:
        return "MME_TRACE_LEVEL", value
    if value and key in _VARIABLES:
        return _VARIABLES[key], value
    if value and key == "opentelemetry,url":
        return "MME_TRACE_URL", value if "://" in value else f"http://{value}"
    raise ValueError(f"one of {_UNDERSTOOD}")


def sends_traces(words: Collection[str]) -> bool:
    """Whether a command line has traces sent, wherever that is."""
    said = {word.removeprefix("--trace-config=") for word in words}
    return "mode=opentelemetry" in said and bool(said & {"level=TIMESTAMPS", "--trace-level=TIMESTAMPS"})


def _as_setting(setting: str) -> Callable[[str], tuple[str, str] | None]:
    return lambda text: trace_variable(f"{setting}={text}")


FLAGS = {
    "--trace-config": trace_variable,
    "--trace-file": _as_setting("triton,file"),
    "--trace-level": _as_setting("level"),
    "--trace-rate": _as_setting("rate"),
    "--trace-count": _as_setting("count"),
    "--trace-log-frequency": _as_setting("triton,log-frequency"),
}
