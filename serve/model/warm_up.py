"""The first execution of a model, with made-up data, so that the first request finds buffers allocated."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import numpy as np

from model_handlers.config.model_config import all_inputs
from model_handlers.errors import MmeError
from model_handlers.tensor import BYTES, element_count
from serve.model.ragged import batch_input, flat

if TYPE_CHECKING:
    from model_handlers.base import Handler
    from model_handlers.config.model_config import ModelConfig
    from model_handlers.tensor import Array, TensorSpec

_MOST_BYTES = 256 << 20  # of zeros: a configuration may declare more than there is memory for
_log = logging.getLogger("mme.load")


def warm_up(handler: Handler) -> bool:
    """Execute once with zeros; whether the model took them.

    It may refuse them; that is no reason to refuse the model. One that fails in any other way is closed.
    """
    if not (handler.inline or handler.warms):  # code of the model's author: it is not ours to call with made-up data
        return True
    config = handler.config
    size = sum(_bytes(spec) for spec in all_inputs(config))
    if size > _MOST_BYTES:
        _log.debug("no warm-up: zeros for it would take %d bytes", size, extra={"target_model": config.name})
        return False
    try:
        handler.execute(zeros(config), [spec.name for spec in config.outputs])
    except MmeError as error:
        _log.debug("warm-up with zeros failed: %s", error, extra={"target_model": config.name})
        return False
    except BaseException:
        handler.close()
        raise
    return True


def _bytes(spec: TensorSpec) -> int:
    return element_count(max(dim, 1) for dim in spec.dims) * spec.data_type.dtype.itemsize


def zeros(config: ModelConfig) -> dict[str, Array]:
    """One element of every input, variable dimensions at 1."""
    made = {}
    shapes = {}
    for spec in all_inputs(config):
        shape = [max(dim, 1) for dim in spec.model_dims]
        array = np.zeros([1, *shape] if config.max_batch_size > 0 else shape, dtype=spec.data_type.dtype)
        shapes[spec.name] = array.shape
        array = flat([array]) if spec.allow_ragged_batch else array
        if spec.data_type is BYTES:
            array.fill(b"")
        made[spec.name] = array
    for given in config.batch_input:
        told = batch_input(
            given.kind, [shapes[given.source_input[0]]], given.data_type.dtype, batches=config.max_batch_size > 0
        )
        made |= dict.fromkeys(given.target_name, told)
    return made
