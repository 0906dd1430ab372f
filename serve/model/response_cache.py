"""Responses kept for requests that come again: least recently used first out, bounded in bytes, one for all models.

A request with the same tensors in the same order and the same outputs asked for is answered before it is queued. Only
successful responses are kept, as copies: the originals may lie in memory that is the model's.

On the event loop, but for `CachedResponses.close`. Large tensors are compared and copied by threads; a request that
waits for that is accepted meanwhile.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import logging
import time
from collections import OrderedDict
from contextlib import suppress
from typing import TYPE_CHECKING, Generic, TypeVar

import numpy as np

from model_handlers.tensor import encode_bytes_elements
from serve.request import InferenceResponse
from serve.threads import ThreadPool

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable

    from model_handlers.config.model_config import ModelConfig
    from model_handlers.errors import MmeError
    from model_handlers.tensor import Array
    from serve.request import Completion, InferenceRequest
    from serve.statistics import ModelStats


T = TypeVar("T")


class ResponseCache(Generic[T]):
    """What was answered, by owner and key; an owner's responses go with the owner.

    Attributes:
        budget: bytes that all of it may take together; 0 keeps nothing.
        used: bytes that it takes.
    """

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.used = 0
        self._kept: OrderedDict[tuple[Hashable, Hashable], tuple[T, int]] = OrderedDict()
        self._keys: dict[Hashable, set[Hashable]] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def __repr__(self) -> str:
        return f"<ResponseCache: {len(self)} responses of {len(self._keys)} models, {self.used} of {self.budget} bytes>"

    def find(self, owner: Hashable, key: Hashable) -> T | None:
        found = self._kept.get((owner, key))
        if found is None:
            return None
        self._kept.move_to_end((owner, key))
        return found[0]

    def keep(self, owner: Hashable, key: Hashable, value: T, size: int) -> None:
        """Keep a value of so many bytes, in the place of those that were not used for longest."""
        self._drop(owner, key)
        if size > self.budget:
            return
        while self.used + size > self.budget:
            self._drop(*next(iter(self._kept)))
        self._kept[owner, key] = value, size
        self._keys.setdefault(owner, set()).add(key)
        self.used += size

    def forget(self, owner: Hashable) -> None:
        for key in list(self._keys.get(owner, ())):
            self._drop(owner, key)

    def _drop(self, owner: Hashable, key: Hashable) -> None:
        found = self._kept.pop((owner, key), None)
        if found is None:
            return
        self.used -= found[1]
        keys = self._keys[owner]
        keys.discard(key)
        if not keys:
            del self._keys[owner]


_log = logging.getLogger("mme.model")
_now = time.perf_counter_ns
_OVERHEAD = 1024  # bytes of a response's objects and of its key, about
_ELEMENT_OVERHEAD = 41  # bytes of a text beside its letters, and of the place that holds it
_AT_ONCE = 1 << 20  # bytes that are compared or copied on the loop, in a millisecond
_STRING = 256  # bytes, as which a text counts there
_THREADS = ThreadPool("response cache", idle_seconds=0)


class CachedResponses:
    """One model version's part of the cache.

    Args:
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
        """Whether the request is answered with what was kept, in the next turn of the loop; else its answer is kept.

        Not for one that `takes_long`.
        """
        if isinstance(request.on_complete, _Keeping):  # it was taken back, and is submitted again
            return False
        began = _now()
        response = self._found(request, self._key(request), began)
        if response is None:
            return False
        self._loop.call_soon(request.resolve, response)
        return True

    def takes_long(self, request: InferenceRequest) -> bool:
        """Whether to look it up would keep others waiting."""
        return _takes_long(request.inputs) and not isinstance(request.on_complete, _Keeping)

    def look_up(
        self, request: InferenceRequest, go_on: Callable[[InferenceRequest, InferenceResponse | None], None]
    ) -> None:
        """Look up one that takes long; `go_on` is told what was kept, or None: then its answer is kept."""
        began = _now()

        def looked_up(key: asyncio.Future[Hashable]) -> None:
            failed = key.exception() is not None  # there was no memory for it: it is neither found nor kept
            go_on(request, None if failed else self._found(request, key.result(), began))

        asyncio.wrap_future(_THREADS.submit(self._key, request), loop=self._loop).add_done_callback(looked_up)

    def _found(self, request: InferenceRequest, key: Hashable, began: int) -> InferenceResponse | None:
        kept = self._cache.find(self, key)
        if kept is None:
            request.on_complete = _Keeping(self, key, request.on_complete, _now() - began)
            return None
        self._stats.hit(_now() - began)
        return InferenceResponse(
            kept.model_name, kept.model_version, kept.outputs, request.id, parameters=kept.parameters
        )

    def keep(self, key: Hashable, response: InferenceResponse, lookup_ns: int) -> None:
        """Keep what the model answered to a request that was not found."""
        began = _now()
        if self._open and _takes_long(array for _, _, array in response.outputs):
            copying = asyncio.wrap_future(_THREADS.submit(_copied, response), loop=self._loop)
            copying.add_done_callback(functools.partial(self._copied, key, lookup_ns, began))
            return
        if self._open:
            self._cache.keep(self, key, *_copied(response))
        self._stats.missed(lookup_ns + _now() - began)

    def _copied(
        self, key: Hashable, lookup_ns: int, began: int, copied: asyncio.Future[tuple[InferenceResponse, int]]
    ) -> None:
        if self._open and copied.exception() is None:
            self._cache.keep(self, key, *copied.result())
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
    parameters = sorted((key, type(value).__name__, value) for key, value in (request.parameters or {}).items())
    return request.correlation_id, request.flags, *parameters


def _takes_long(arrays: Iterable[Array]) -> bool:
    return sum([array.size * _STRING if array.dtype.hasobject else array.nbytes for array in arrays]) > _AT_ONCE


def _copied(response: InferenceResponse) -> tuple[InferenceResponse, int]:
    outputs = [(name, kind, _copy(array)) for name, kind, array in response.outputs]
    kept = InferenceResponse(response.model_name, response.model_version, outputs, parameters=response.parameters)
    return kept, _OVERHEAD + sum(_size(array) for _, _, array in outputs)


def _copy(array: Array) -> Array:
    copy = np.array(array)
    copy.flags.writeable = False
    return copy


def _size(array: Array) -> int:
    if array.dtype.kind != "O":
        return array.nbytes
    return sum(len(element) + _ELEMENT_OVERHEAD for element in array.flat)
