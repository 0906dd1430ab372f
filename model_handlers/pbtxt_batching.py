"""How requests are batched, out of a ModelConfig message. Translates alone; see `pbtxt`."""

from __future__ import annotations

import logging
from types import MappingProxyType
from typing import TYPE_CHECKING

from model_handlers.config import DynamicBatching, QueuePolicy, TimeoutAction

if TYPE_CHECKING:
    from model_handlers.proto import model_config_pb2 as pb

_log = logging.getLogger("mme.config")


def dynamic_batching(message: pb.ModelConfig, model: str) -> DynamicBatching | None:
    """The dynamic batcher's settings, None where none are given."""
    if not message.HasField("dynamic_batching"):
        return None
    batching = message.dynamic_batching
    if not batching.priority_levels and (batching.priority_queue_policy or batching.default_priority_level):
        _log.warning("model '%s': priorities change nothing, since dynamic_batching.priority_levels is 0", model)
    policies = {int(level): _queue_policy(policy) for level, policy in batching.priority_queue_policy.items()}
    return DynamicBatching(
        preferred_batch_sizes=tuple(batching.preferred_batch_size),
        max_queue_delay_us=batching.max_queue_delay_microseconds,
        preserve_ordering=batching.preserve_ordering,
        queue_policy=_queue_policy(batching.default_queue_policy),
        priority_levels=batching.priority_levels,
        default_priority_level=batching.default_priority_level,
        priority_policies=MappingProxyType(policies),
    )


def _queue_policy(policy: pb.ModelQueuePolicy) -> QueuePolicy:
    return QueuePolicy(
        timeout_action=TimeoutAction(policy.timeout_action),
        default_timeout_us=policy.default_timeout_microseconds,
        allow_timeout_override=policy.allow_timeout_override,
        max_queue_size=policy.max_queue_size,
    )
