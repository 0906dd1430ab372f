"""A model's own `parameters`, read as what a backend expects them to be. PURE, but for the log.

Values are text in config.pbtxt. One that is not what it should be is an error of the model's that names the parameter;
a name that the backend does not know is logged once and changes nothing. Names that begin with MME_ are for whoever
serves the model.
"""

from __future__ import annotations

import functools
import logging
import math
from typing import TYPE_CHECKING

from model_handlers.errors import invalid_model

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from model_handlers.config.model_config import ModelConfig
    from model_handlers.errors import MmeError

OURS = "MME_"
_SWITCH = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}


def integer(config: ModelConfig, key: str, default: int, allowed: range) -> int:
    """A whole number within bounds.

    Raises:
        MmeError: INVALID_MODEL for anything else, as all of these.
    """
    text = config.parameters.get(key)
    if text is None:
        return default
    try:
        value = int(text)
    except ValueError:
        value = allowed.stop
    if value not in allowed:
        raise _wrong(config, key, f"an integer from {allowed.start} to {allowed[-1]}")
    return value


def number(
    config: ModelConfig,
    key: str,
    default: float,
    *,
    allowed: Callable[[float], bool] = math.isfinite,
    expected: str = "a number",
) -> float:
    """A number, a finite one unless something else is allowed."""
    text = config.parameters.get(key)
    if text is None:
        return default
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not allowed(value):
        raise _wrong(config, key, expected)
    return value


def switch(config: ModelConfig, key: str, *, default: bool) -> bool:
    """Yes or no, in any of the ways in which backends write it."""
    text = config.parameters.get(key)
    if text is None:
        return default
    value = _SWITCH.get(text.strip().lower())
    if value is None:
        raise _wrong(config, key, "'true' or 'false'")
    return value


def choice(config: ModelConfig, key: str, default: str, allowed: Sequence[str]) -> str:
    """One of a few words."""
    text = config.parameters.get(key, default).strip()
    if text not in allowed:
        raise _wrong(config, key, f"one of {', '.join(allowed)}")
    return text


def warn_of_unknown(
    config: ModelConfig, known: Collection[str], kind: str, logger: str, harmless: Mapping[str, str] | None = None
) -> None:
    """Log the parameters that change nothing, once a model: those that nobody knows, and those with a reason."""
    for key, reason in (harmless or {}).items():
        if key in config.parameters:
            warn_once(logger, f"parameter '{key}' changes nothing: {reason}", config.name)
    reasons = harmless or {}
    unknown = [
        f"'{key}'" for key in config.parameters if key not in known and key not in reasons and not key.startswith(OURS)
    ]
    if unknown:
        warn_once(logger, f"parameters without effect on {kind}: {', '.join(unknown)}", config.name)


@functools.lru_cache(maxsize=1024)
def warn_once(logger: str, sentence: str, model: str) -> None:
    """Log what changes nothing, once: a model is loaded several times in its life."""
    logging.getLogger(logger).warning("%s", sentence, extra={"target_model": model})


def _wrong(config: ModelConfig, key: str, expected: str) -> MmeError:
    return invalid_model(f"model '{config.name}': parameter '{key}' must be {expected}, got '{config.parameters[key]}'")
