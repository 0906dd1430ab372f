"""A part of a TensorFlow graph as a function of arrays, computed by the thread that calls it.

TensorFlow 2 hands each call to a thread of its own and waits. A session whose graph runs in the thread that calls
spares both wake-ups and most of the Python on the way: half a millisecond of each call, a tenth of what a model of five
takes. It reads an array where it lies, if that is at a multiple of 64 bytes, and its results are TensorFlow's memory.

Made on load threads, called on the threads that execute.
"""

from __future__ import annotations

import ctypes
import functools
import platform
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from model_handlers.tensorflow.runtime import tensorflow

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from model_handlers.tensor import Array


_WORDS = 16  # 32 bits each, more than the environment of any of these has
# The word of the environment that controls vectors, and the bits that say so: of results, on x86 of operands too.
_FLUSHING = {"x86_64": (7, 0x8040), "aarch64": (0, 1 << 24)}
_Environment = ctypes.c_uint32 * _WORDS


@contextmanager
def flushed_denormals() -> Iterator[None]:
    """Count them as zero meanwhile, in this thread. On a processor that we don't know all stays as it is."""
    known = _FLUSHING.get(platform.machine())
    if known is None:
        yield
        return
    before, library = _Environment(), _library()
    library.fegetenv(before)
    word, bits = known
    flushing = _Environment(*before)
    flushing[word] |= bits
    library.fesetenv(flushing)
    try:
        yield
    finally:
        library.fesetenv(before)


@functools.cache
def _library() -> Any:
    return ctypes.PyDLL("libm.so.6")


class Function:
    """From tensors that are given to tensors that are wanted.

    Args:
        session: where the graph's variables are; it belongs to the function.
        feeds: what is given: the name of each, and that of its tensor in the graph.
        fetches: what is wanted, likewise.
    """

    def __init__(self, session: Any, feeds: Mapping[str, str], fetches: Mapping[str, str]) -> None:
        tf = tensorflow()
        with session.graph.as_default():
            # What is a tensor twice, or one that is given, can't be fetched as such.
            results = [tf.identity(session.graph.get_tensor_by_name(tensor)).name for tensor in fetches.values()]
        self._session = session
        self._feeds = tuple(feeds)
        self._fetches = tuple(fetches)
        # The public `run` does the same, and looks all names up at each call: a quarter of a millisecond.
        self._call = session._make_callable_from_options(_options(list(feeds.values()), results))  # noqa: SLF001

    def __call__(self, given: Mapping[str, Array]) -> dict[str, Any]:
        """Compute; strings are bytes, and a result without dimensions is a number.

        Raises:
            tf.errors.OpError: it fails. KeyError: something was not given.
        """
        values = [given[name] for name in self._feeds]
        with flushed_denormals():
            results = self._call(*values)
        return dict(zip(self._fetches, results, strict=True))

    def close(self) -> None:
        """Drop the graph's variables."""
        self._session.close()


def _options(feeds: list[str], fetches: list[str]) -> Any:
    from tensorflow.core.protobuf import config_pb2  # noqa: PLC0415 - a part of the framework

    return config_pb2.CallableOptions(feed=feeds, fetch=fetches)
