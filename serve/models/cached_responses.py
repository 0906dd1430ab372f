"""The responses of one version of a model that asks to have them cached: who is answered without it, what is kept.

A request that was answered before, with the same tensors in the same order and the same outputs asked for, is answered
before it is queued. Successful responses alone are kept, as copies: the originals may lie in memory that is the
model's. What a cache may do is Triton's to say: no model that sends any number of responses, none of sequences.

Everything here runs on the event loop, but for `close`.
"""

from __future__ import annotations

import hashlib
import logging
import time
from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np

from model_handlers.tensor import encode_bytes_elements
from serve.request import InferenceResponse

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Hashable

    from model_handlers.config import ModelConfig
    from model_handlers.errors import MmeError
    from model_handlers.tensor import Array
    from serve.request import Completion, InferenceRequest
    from serve.scheduling.response_cache import ResponseCache
    from serve.stats import ModelStats

_log = logging.getLogger("mme.model")
_now = time.perf_counter_ns
_OVERHEAD = 1024  # bytes of a response's objects and of its key, about
_ELEMENT_OVERHEAD = 41  # bytes of a text beside its letters, and of the place that holds it


class CachedResponses:
    """One model version's part of the cache.

    Args:
        cache: that of all models.
        stats: where to count.
        loop: the event loop.
        reads_parameters: whether what a client says beside tensors may change the answer.
    """

    def __init__(
        self,
        cache: ResponseCache[InferenceResponse],
        stats: ModelStats,
        loop: asyncio.AbstractEventLoop,
        *,
        reads_parameters: bool,
    ) -> None:
        self._cache = cache
        self._stats = stats
        self._loop = loop
        self._reads_parameters = reads_parameters
        self._open = True
        stats.cached = True

    def answered(self, request: InferenceRequest) -> bool:
        """Whether the request is answered with what was kept, in the next turn of the loop; else its answer is kept."""
        if isinstance(request.on_complete, _Keeping):  # it was taken back, and is submitted again
            return False
        began = _now()
        key = self._key(request)
        kept = self._cache.find(self, key)
        if kept is None:
            request.on_complete = _Keeping(self, key, request.on_complete, _now() - began)
            return False
        response = InferenceResponse(
            kept.model_name, kept.model_version, kept.outputs, request.id, parameters=kept.parameters
        )
        self._stats.hit(_now() - began)
        self._loop.call_soon(request.resolve, response)
        return True

    def keep(self, key: Hashable, response: InferenceResponse, lookup_ns: int) -> None:
        """Keep what the model answered to a request that was looked up in vain."""
        began = _now()
        if self._open:
            outputs = [(name, kind, _copy(array)) for name, kind, array in response.outputs]
            size = _OVERHEAD + sum(_size(array) for _, _, array in outputs)
            kept = InferenceResponse(
                response.model_name, response.model_version, outputs, parameters=response.parameters
            )
            self._cache.keep(self, key, kept, size)
        self._stats.missed(lookup_ns + _now() - began)

    def close(self) -> None:
        """Keep nothing any more. On any thread."""
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._forget)

    def _forget(self) -> None:
        self._open = False
        self._cache.forget(self)

    def _key(self, request: InferenceRequest) -> Hashable:
        digest = hashlib.blake2b(digest_size=32)
        for array in request.inputs:
            digest.update(
                encode_bytes_elements(array)
                if array.dtype.kind == "O"
                else np.ascontiguousarray(array).ravel().view(np.uint8).data
            )
        said = _said(request) if self._reads_parameters else ()
        return request.layout.inputs, request.layout.outputs, said, digest.digest()


def cached_responses(
    config: ModelConfig,
    cache: ResponseCache[InferenceResponse] | None,
    stats: ModelStats,
    loop: asyncio.AbstractEventLoop,
    *,
    reads_parameters: bool,
) -> CachedResponses | None:
    """A model's part of the cache; None where it asks for none, or there is none."""
    if not config.response_cache:
        return None
    if cache is None or not cache.budget:
        _log.warning(
            "its responses are not cached: the response cache is switched off", extra={"target_model": config.name}
        )
        return None
    return CachedResponses(cache, stats, loop, reads_parameters=reads_parameters)


class _Keeping:
    """A request's completion that also has the response kept, once the client has it."""

    __slots__ = ("_complete", "_key", "_lookup_ns", "_responses")

    def __init__(self, responses: CachedResponses, key: Hashable, complete: Completion, lookup_ns: int) -> None:
        self._responses = responses
        self._key = key
        self._complete = complete
        self._lookup_ns = lookup_ns

    def __call__(self, request: InferenceRequest, result: InferenceResponse | MmeError | None) -> None:
        self._complete(request, result)
        if isinstance(result, InferenceResponse):
            self._responses.keep(self._key, result, self._lookup_ns)


def _said(request: InferenceRequest) -> Hashable:
    """What a client says beside tensors, whose types count: 1 is not true."""
    parameters = sorted((key, type(value).__name__, value) for key, value in (request.parameters or {}).items())
    return request.correlation_id, request.flags, *parameters


def _copy(array: Array) -> Array:
    copy = np.array(array)
    copy.flags.writeable = False
    return copy


def _size(array: Array) -> int:
    if array.dtype.kind != "O":
        return array.nbytes
    return sum(len(element) + _ELEMENT_OVERHEAD for element in array.flat)
