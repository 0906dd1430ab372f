"""Responses kept for requests that come again: least recently used first out, bounded in bytes, one for all models.

A request with the same tensors in the same order and the same outputs asked for is answered before it is queued. Only
successful responses are kept, as copies: the originals may lie in memory that is the model's. Requests and responses of
more than 1 MiB are not cached: to compare or copy them would keep the event loop, which all of this runs on.
"""

from __future__ import annotations

import hashlib
import logging
import time
from contextlib import suppress
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import numpy as np
from cachetools import LRUCache

from model_handlers.tensor import encode_bytes_elements, estimated_size, size_of
from serve.request import InferenceResponse

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Hashable, Iterable

    from model_handlers.config.model_config import ModelConfig
    from model_handlers.errors import MmeError
    from model_handlers.tensor import Array
    from serve.request import Completion, InferenceRequest
    from serve.statistics import ModelStats

_log = logging.getLogger("mme.model")
_now = time.perf_counter_ns
_OVERHEAD = 1024  # bytes of a response's objects and of its key, about
_ELEMENT_OVERHEAD = 41  # bytes of a text beside its letters, and of the place that holds it
_MOST_BYTES = 1 << 20  # of tensors that are compared or copied: in a millisecond


class ResponseCache(LRUCache[Any, Any]):
    """What was answered, by owner and key, each with its bytes; an owner's responses go with the owner."""

    def __init__(self, budget: int) -> None:
        super().__init__(budget, getsizeof=itemgetter(1))
        self._keys: dict[Hashable, set[Hashable]] = {}

    def __repr__(self) -> str:
        return (
            f"<ResponseCache: {len(self)} responses of {len(self._keys)} models, "
            f"{self.currsize} of {self.maxsize} bytes>"
        )

    def find(self, owner: Hashable, key: Hashable) -> Any | None:
        found = self.get((owner, key))
        return None if found is None else found[0]

    def keep(self, owner: Hashable, key: Hashable, value: Any, size: int) -> None:
        """Keep a value of so many bytes, in the place of those that were not used for longest."""
        self.pop((owner, key), None)
        if size <= self.maxsize:
            self[owner, key] = value, size
            self._keys.setdefault(owner, set()).add(key)

    def __delitem__(self, place: tuple[Hashable, Hashable]) -> None:
        super().__delitem__(place)
        owner, key = place
        keys = self._keys[owner]
        keys.discard(key)
        if not keys:
            del self._keys[owner]

    def forget(self, owner: Hashable) -> None:
        for key in list(self._keys.get(owner, ())):
            del self[owner, key]

    def of_model(
        self, config: ModelConfig, stats: ModelStats, loop: asyncio.AbstractEventLoop, *, reads_parameters: bool
    ) -> CachedResponses | None:
        """The part of a model that asks for one; None where the cache is switched off."""
        if not self.maxsize:
            _log.warning(
                "its responses are not cached: the response cache is switched off", extra={"target_model": config.name}
            )
            return None
        in_order = config.dynamic_batching is not None and config.dynamic_batching.preserve_ordering
        return CachedResponses(self, stats, loop, reads_parameters=reads_parameters, in_order=in_order)


class CachedResponses:
    """One model version's part of the cache.

    Args:
        reads_parameters: whether what a client says beside tensors may change the answer.
        in_order: whether no answer may overtake those of requests that came before.
    """

    def __init__(
        self,
        cache: ResponseCache,
        stats: ModelStats,
        loop: asyncio.AbstractEventLoop,
        *,
        reads_parameters: bool,
        in_order: bool = False,
    ) -> None:
        self._cache = cache
        self._stats = stats
        self._loop = loop
        self._reads_parameters = reads_parameters
        self._in_order = in_order
        self._open = True
        stats.cached = True

    def answered(self, request: InferenceRequest, outstanding: int = 0) -> bool:
        """Whether the request is answered with what was kept, in the next turn of the loop; else its answer is kept.

        So many requests of the model are not answered yet.
        """
        if self._in_order and outstanding:
            return False
        if isinstance(request.on_complete, _Keeping):  # it was taken back, and is submitted again
            return False
        if _is_large(request.inputs):
            return False
        began = _now()
        key = self._key(request)
        kept = self._cache.find(self, key)
        if kept is None:
            request.on_complete = _Keeping(self, key, request.on_complete, _now() - began)
            return False
        self._stats.hit(_now() - began)
        response = InferenceResponse(
            kept.model_name, kept.model_version, kept.outputs, request.id, parameters=kept.parameters
        )
        self._loop.call_soon(request.resolve, response)
        return True

    def keep(self, key: Hashable, response: InferenceResponse, lookup_ns: int) -> None:
        """Keep what the model answered to a request that was not found."""
        began = _now()
        if self._open and not _is_large(array for _, _, array in response.outputs):
            self._cache.keep(self, key, *_copied(response))
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


class _Keeping:
    """A request's completion that has the response kept first: a client in this process may write into its arrays."""

    def __init__(self, responses: CachedResponses, key: Hashable, complete: Completion, lookup_ns: int) -> None:
        self._responses = responses
        self._key = key
        self._complete = complete
        self._lookup_ns = lookup_ns

    def __call__(self, request: InferenceRequest, result: InferenceResponse | MmeError | None) -> None:
        try:
            if isinstance(result, InferenceResponse):
                self._responses.keep(self._key, result, self._lookup_ns)
        finally:
            self._complete(request, result)


def _said(request: InferenceRequest) -> Hashable:
    # Types count: 1 is not true.
    parameters = sorted((key, type(value).__name__, value) for key, value in (request.parameters or {}).items())
    return request.correlation_id, request.flags, *parameters


def _is_large(arrays: Iterable[Array]) -> bool:
    return sum([estimated_size(array) for array in arrays]) > _MOST_BYTES


def _copied(response: InferenceResponse) -> tuple[InferenceResponse, int]:
    outputs = [(name, kind, _copy(array)) for name, kind, array in response.outputs]
    kept = InferenceResponse(response.model_name, response.model_version, outputs, parameters=response.parameters)
    return kept, _OVERHEAD + sum(_size(array) for _, _, array in outputs)


def _copy(array: Array) -> Array:
    copy = np.array(array)
    copy.flags.writeable = False
    return copy


def _size(array: Array) -> int:
    return size_of(array) + (array.size * _ELEMENT_OVERHEAD if array.dtype.hasobject else 0)
