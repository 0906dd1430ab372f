"""TensorFlow itself: the one module that imports it, and its exceptions as ours.

Called on load threads and in fork servers; `translated` on any. The serving process asks `installed` and
`built_for_cuda`, which import nothing.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from pathlib import Path
from typing import Any

from model_handlers.errors import Kind, MmeError
from model_handlers.framework_errors import TENSORFLOW
from model_handlers.system.importing import import_without

PRELOAD = "model_handlers.tensorflow.runtime:preload"
_LOG_LEVEL = "TF_CPP_MIN_LOG_LEVEL"
_KERAS_HOME = "KERAS_HOME"
_WORDS = 600  # characters of an exception, behind which it shows the graph


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
    home = os.environ.get(_KERAS_HOME)
    os.environ[_KERAS_HOME] = os.devnull  # TensorFlow has an older one inside, which can't be left out
    try:
        # Keras is half of the import's time and memory, and writes into the home directory; models need none of it.
        tf = import_without("tensorflow", "keras")
    except ImportError as error:
        raise MmeError(
            Kind.UNSUPPORTED,
            "TensorFlow's models need TensorFlow, which is not installed; run `pip install 'mme[tensorflow]'`, or "
            "`pip install 'mme[openvino]'`, which reads most of them",
        ) from error
    finally:
        if home is None:
            del os.environ[_KERAS_HOME]
        else:
            os.environ[_KERAS_HOME] = home
    tf.get_logger().setLevel("ERROR")
    return tf


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
    is_full = isinstance(error, tensorflow().errors.ResourceExhaustedError)
    return TENSORFLOW.error(error, model, words, loading=loading, is_full=is_full)
