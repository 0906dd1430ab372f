"""TensorFlow itself: the one module that imports it, and its exceptions as ours.

Called on load threads and in fork servers; `translated` on any. The serving process asks `installed` and
`built_for_cuda`, which import nothing.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from model_handlers.errors import Kind, MmeError, invalid_model, out_of_memory

if TYPE_CHECKING:
    from collections.abc import Iterator

PRELOAD = "model_handlers.tensorflow.runtime:preload"
_LOG_LEVEL = "TF_CPP_MIN_LOG_LEVEL"
_KERAS, _KERAS_HOME = "keras", "KERAS_HOME"
_WORDS = 600  # characters of an exception, behind which it shows the graph


def installed(module: str = "tensorflow") -> bool:
    """Whether a framework is there."""
    return importlib.util.find_spec(module) is not None


@functools.cache
def built_for_cuda() -> bool:
    """Whether the installed TensorFlow was built for CUDA; False where there is none."""
    found = importlib.util.find_spec("tensorflow")
    if found is None or found.origin is None:
        return False
    facts = Path(found.origin).parent / "python" / "platform" / "build_info.py"
    return facts.is_file() and "('is_cuda_build', True)" in facts.read_text("utf-8")


@functools.cache
def tensorflow() -> Any:
    """The framework, imported when the first model needs it.

    Raises:
        MmeError: UNSUPPORTED where it is not installed.
    """
    os.environ.setdefault(_LOG_LEVEL, "3")  # errors come as exceptions, and warnings fill CloudWatch
    try:
        with _without_keras():
            import tensorflow as tf  # noqa: PLC0415 - optional, and seconds of import
    except ImportError as error:
        raise MmeError(
            Kind.UNSUPPORTED,
            "TensorFlow's models need TensorFlow, which is not installed; run `pip install 'mme[tensorflow]'`, or "
            "`pip install 'mme[openvino]'`, which reads most of them",
        ) from error
    tf.get_logger().setLevel("ERROR")
    return tf


@contextmanager
def _without_keras() -> Iterator[None]:
    """Keras is half of the time and memory of the import, and writes into the home directory; models need none of it.

    Whoever imports it later gets it.
    """
    known, home = sys.modules.get(_KERAS), os.environ.get(_KERAS_HOME)
    if known is None:
        sys.modules[_KERAS] = None  # type: ignore[assignment] # which makes an import of it fail
    os.environ[_KERAS_HOME] = os.devnull  # TensorFlow has an older one inside, which can't be left out
    try:
        yield
    finally:
        if known is None:
            del sys.modules[_KERAS]
        if home is None:
            del os.environ[_KERAS_HOME]
        else:
            os.environ[_KERAS_HOME] = home


def preload() -> None:
    """Import the framework where nobody else writes to standard error: it says there what it was built with."""
    ours = os.dup(2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        tensorflow()
    finally:
        os.dup2(ours, 2)
        os.close(ours)
        os.close(nowhere)


def translated(error: Exception, model: str, *, loading: bool) -> MmeError:
    """TensorFlow's errors have codes; what else it raises is Python's."""
    words = " ".join((getattr(error, "message", "") or str(error)).split())[:_WORDS]
    if isinstance(error, (MemoryError, tensorflow().errors.ResourceExhaustedError)):
        return out_of_memory(f"model '{model}' ran out of memory: {words}")
    if loading:
        return invalid_model(f"TensorFlow can't load model '{model}': {words}")
    return MmeError(Kind.EXECUTION_FAILED, f"TensorFlow failed while running model '{model}': {words}")
