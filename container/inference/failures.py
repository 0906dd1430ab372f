"""What went wrong with a request: as an error of ours, and in the log, where it says which request it was."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from container.control.targets import shown
from container.inference.headers import INFERENCE_ID, TARGET_MODEL, name_of
from model_handlers.errors import Kind, MmeError

if TYPE_CHECKING:
    from container.inference.exchange import Exchange

_log = logging.getLogger("mme.infer")

_OURS = frozenset({Kind.INTERNAL, Kind.EXECUTION_FAILED, Kind.OUT_OF_MEMORY, Kind.TIMED_OUT})


def known(error: Exception) -> MmeError:
    """The error as one of ours; anything else is a bug, and its traceback belongs into the log."""
    if isinstance(error, MmeError):
        return error.bare()  # nobody who keeps it keeps the request
    _log.error("answering a request failed", exc_info=error)
    return MmeError(Kind.INTERNAL, f"the server failed on this request: {type(error).__name__}: {error}")


def log_failure(error: MmeError, exchange: Exchange) -> None:
    """Our failures are errors; a client's, and what the log has, are of interest to whoever asked for details."""
    level = logging.ERROR if error.kind in _OURS and not error.logged else logging.DEBUG
    if _log.isEnabledFor(level):
        headers = exchange.headers
        context = {
            "path": shown(exchange.target),
            "target_model": name_of(headers.get(TARGET_MODEL, "")),
            "inference_id": headers.get(INFERENCE_ID, ""),
        }
        _log.log(level, "%s", error, extra={key: value for key, value in context.items() if value})
