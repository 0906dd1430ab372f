"""What a configuration asks of whoever serves the model: parameters that begin with MME_, and fields by its backend.

Rules that need the handler, or names that several rooms know; `model_handlers.config.validate` has all others. A load
stops at the first that is broken, `model_check` tells every one. PURE, but for the log.
"""

from __future__ import annotations

import difflib
from functools import partial
from typing import TYPE_CHECKING

from model_handlers.config.model_config import OURS
from model_handlers.config.pbtxt import refusal
from model_handlers.errors import invalid_model
from model_handlers.worker.parameters import EXECUTION_TIMEOUT, LOAD_TIMEOUT, PLACEMENT, Deadlines, placement_of
from serve.sources.layout import ENTRY
from serve.weights.mode import PARAMETER as WEIGHTS
from serve.weights.mode import Weights, weights_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from model_handlers.base import Handler
    from model_handlers.config.model_config import ModelConfig

    Check = tuple[str, Callable[[], object]]

PIN = "MME_PIN"  # the parameter by which a model's configuration asks never to be evicted
_ALIKE = 0.75  # what they begin with is alike already
PARAMETERS = (ENTRY, PIN, WEIGHTS, PLACEMENT, LOAD_TIMEOUT, EXECUTION_TIMEOUT)


def asked_checks(config: ModelConfig, handler: type[Handler] | None) -> Iterator[Check]:
    """Every rule by itself: the field that it is about, and a function that raises where it is broken.

    Without a handler, those of ensembles.
    """
    yield f"parameters['{PIN}']", partial(is_pinned, config)
    if handler is None:
        return
    yield f"parameters['{WEIGHTS}']", partial(weights_of, config, Weights.AUTO)
    yield f"parameters['{PLACEMENT}']", partial(placement_of, config, handler)
    yield "parameters", partial(Deadlines.of, config)
    if handler.sees_requests and (config.batch_input or config.batch_output):
        field = "batch_input" if config.batch_input else "batch_output"
        reason = f"models of backend '{handler.backend}' get each request as it came"
        yield field, partial(_refuse, field, reason, config.name)
    if config.op_libraries and not handler.custom_operations:
        field = "model_operations.op_library_filename"
        reason = f"backend '{handler.backend}' loads no libraries of operations"
        yield field, partial(_refuse, field, reason, config.name)


def unheard_of(config: ModelConfig) -> Iterator[tuple[str, str]]:
    """Parameters that begin as ours do and are none of them: their names, and a sentence about each.

    They are not refused: a model may read parameters of its own, whatever it calls them.
    """
    for name in sorted(config.parameters):
        if not name.startswith(OURS) or name in PARAMETERS:
            continue
        nearest = difflib.get_close_matches(name, PARAMETERS, 1, _ALIKE)
        hint = f"did you mean {nearest[0]}?" if nearest else f"there are {', '.join(PARAMETERS)}"
        yield name, f"parameter '{name}' means nothing to the server; {hint}"


def is_pinned(config: ModelConfig) -> bool:
    """Whether the model's own configuration wants it to stay in memory once it is there."""
    text = config.parameters.get(PIN, "false")
    try:
        return {"true": True, "false": False}[text.strip().lower()]
    except KeyError:
        raise invalid_model(
            f"model '{config.name}': parameter '{PIN}' must be 'true' or 'false', got '{text}'"
        ) from None


def _refuse(field: str, reason: str, model: str) -> None:
    raise refusal(field, reason, model)
