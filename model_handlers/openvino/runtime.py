"""OpenVINO itself: the one module that imports it, how a file becomes a model, and what its exceptions say.

A file is given to the reader of its own format: OpenVINO's own search asks the readers of all formats, which write
their opinion of a bad file to standard error. Called on load threads; `translated` on any.
"""

from __future__ import annotations

import functools
import re
from typing import TYPE_CHECKING, Any

from model_handlers.errors import Kind, MmeError, invalid_model
from model_handlers.framework_errors import OPENVINO
from model_handlers.system.importing import import_without

if TYPE_CHECKING:
    from pathlib import Path

_READERS = {".xml": "ir", ".onnx": "onnx", ".tflite": "tflite", ".pdmodel": "paddle"}
_TENSORFLOW = "tf"  # a SavedModel is a folder, of any name
_IR_VERSIONS = (10, 11)
_IR_VERSION = re.compile(rb"<net\b[^>]*\bversion=\"(\d+)\"")
_HEAD = 4096
_NOISE = re.compile(r"^(Exception from |Check '.*' failed at |FrontEnd API failed|While validating )")
_MOST_WORDS = 300


@functools.cache
def openvino() -> Any:
    """The framework, imported when the first model needs it.

    Raises:
        MmeError: UNSUPPORTED where it is not installed.
    """
    try:
        # With it importing OpenVINO reports to its maker, and leaves files in the home directory.
        return import_without("openvino", "openvino_telemetry")
    except ImportError as error:
        raise MmeError(
            Kind.UNSUPPORTED,
            "this model needs OpenVINO, which is not installed; run `pip install 'mme[openvino]'`",
        ) from error


@functools.cache
def core() -> Any:
    """What knows the devices and compiles for them: one for all models."""
    made = openvino().Core()
    made.get_property("CPU", "FULL_DEVICE_NAME")  # which loads the device's library
    return made


def read_model(path: Path, model: str) -> Any:
    """The graph in a file, its weights mapped.

    Raises:
        MmeError: INVALID_MODEL when it is none, or of a version that is not read here.
    """
    framework = openvino()
    if path.suffix == ".xml":
        _check_version(path, model, framework.__version__.partition("-")[0])
    reader = _TENSORFLOW if path.is_dir() else _READERS.get(path.suffix.lower(), _TENSORFLOW)
    try:
        frontend = framework.frontend.FrontEndManager().load_by_framework(reader)
        graph = frontend.convert(frontend.load(str(path)))
    except Exception as error:  # plain RuntimeError, and the readers' own
        raise translated(error, model, loading=True) from error
    if not graph.inputs or not graph.outputs:
        raise invalid_model(f"model '{model}': '{path.name}' has no inputs or no outputs: there is nothing to compute")
    return graph


def _check_version(path: Path, model: str, ours: str) -> None:
    with path.open("rb") as file:
        found = _IR_VERSION.search(file.read(_HEAD))
    if found and int(found[1]) not in _IR_VERSIONS:
        raise invalid_model(
            f"model '{model}': '{path.name}' is in version {int(found[1])} of OpenVINO's format, and OpenVINO {ours}, "
            f"which is installed here, reads {' and '.join(map(str, _IR_VERSIONS))}: convert the model anew"
        )


def translated(error: Exception, model: str, *, loading: bool) -> MmeError:
    """OpenVINO's exceptions have no kinds, but for memory that the C++ library does not get."""
    lines = [line.strip() for line in str(error).splitlines()]
    words = " ".join(line for line in lines if line and not _NOISE.match(line)) or " ".join(lines)
    return OPENVINO.error(error, model, words[:_MOST_WORDS], loading=loading)
