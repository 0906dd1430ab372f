"""What inference scripts import of Amazon's packages, for where those are not installed.

`sagemaker_inference`, `sagemaker_containers`, `sagemaker_xgboost_container`, `sagemaker_huggingface_inference_toolkit`
and `mms.service` come with Amazon's containers, and scripts written for them use a few of their names: constants,
encoders, errors, a response. A package that is installed is left alone.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from model_handlers.scripts import content_types, defaults, xgboost


class Response:
    """An answer of a script, as `sagemaker_containers` has it: a body, its media type and a status."""

    def __init__(
        self,
        response: str | bytes | None = None,
        accept: str | None = None,
        status: int = 200,
        headers: Any = None,
        mimetype: str | None = None,
        direct_passthrough: bool = False,  # noqa: ARG002, FBT001, FBT002 - its interface
    ) -> None:
        self.response = response
        self.status_code = status
        self.headers = dict(headers or {})
        self.mimetype = self.content_type = mimetype or accept or content_types.JSON

    def get_data(self) -> str | bytes:
        return b"" if self.response is None else self.response


class BaseInferenceToolkitError(Exception):
    """A failure that a script gives a status."""

    def __init__(self, status_code: int, message: str, phrase: str) -> None:
        super().__init__(status_code, message, phrase)
        self.status_code = status_code
        self.message = message
        self.phrase = phrase


class GenericInferenceToolkitError(BaseInferenceToolkitError):
    """The same, with a message and a phrase that may be left out."""

    def __init__(self, status_code: int, message: str | None = None, phrase: str | None = None) -> None:
        message = message or "Invalid Request"
        super().__init__(status_code, message, phrase or message)


class PredictionException(Exception):  # noqa: N818 - scripts know it by this name
    """A failure that a script gives a status, as the Hugging Face container has it."""

    def __init__(self, message: str, error_code: int = 500) -> None:
        super().__init__(f"message : error_code = {message} : {error_code}")
        self.message = message
        self.error_code = error_code


class DefaultInferenceHandler:
    """What a script does not define, as `sagemaker_inference` has it; scripts import it, and hardly one uses it."""

    def default_model_fn(self, model_dir: str, context: Any = None) -> Any:
        raise NotImplementedError("Please provide a model_fn implementation.")

    def default_input_fn(self, input_data: Any, content_type: str, context: Any = None) -> Any:  # noqa: ARG002
        return content_types.decode(input_data, content_type)

    def default_predict_fn(self, data: Any, model: Any, context: Any = None) -> Any:
        raise NotImplementedError("Please provide a predict_fn implementation.")

    def default_output_fn(self, prediction: Any, accept: str, context: Any = None) -> Any:  # noqa: ARG002
        return content_types.encode(prediction, accept), accept


def read_file(path: str, mode: str = "r") -> Any:
    with Path(path).open(mode) as file:
        return file.read()


def write_file(path: str, data: Any, mode: str = "w") -> None:
    with Path(path).open(mode) as file:
        file.write(data)


def retrieve_content_type_header(request_property: dict[str, str]) -> str | None:
    """The content type among the headers of a request, however it is spelt there."""
    names = {name.lower().replace("-", ""): name for name in request_property}
    return request_property.get(names.get("contenttype", ""))


def parse_accept(accept: str) -> list[str]:
    return accept.replace(" ", "").split(",")


def get_dmatrix(*_arguments: Any, **_keywords: Any) -> Any:
    """Imported by scripts that train, too."""
    raise NotImplementedError("get_dmatrix reads a training job's data, which a server does not have")


_CONTENT_TYPES = {
    "JSON": content_types.JSON,
    "CSV": content_types.CSV,
    "NPY": content_types.NPY,
    "NPZ": content_types.NPZ,
    "OCTET_STREAM": "application/octet-stream",
    "ANY": "*/*",
    "UTF8_TYPES": list(content_types.TEXT),
}
_ERRORS = {
    "UnsupportedFormatError": content_types.UnsupportedFormatError,
    "BaseInferenceToolkitError": BaseInferenceToolkitError,
    "GenericInferenceToolkitError": GenericInferenceToolkitError,
}
_VISION = {name: f"image/{name.lower()}" for name in ("JPEG", "PNG", "TIFF", "BMP", "GIF", "WEBP")}
_AUDIO = {
    "FLAC": "audio/x-flac",
    "MP3": "audio/mpeg",
    "WAV": "audio/wave",
    "OGG": "audio/ogg",
    "X_AUDIO": "audio/x-audio",
}
_MEDIA = {
    **_VISION,
    **_AUDIO,
    "X_IMAGE": "image/x-image",
    "VISION_TYPES": list(_VISION.values()),
    "AUDIO_TYPES": list(_AUDIO.values()),
}
_WORKER = {"Response": Response}
_UTILS = {each.__name__: each for each in (read_file, write_file, retrieve_content_type_header, parse_accept)}
_BOOSTERS = {
    "csv_to_dmatrix": xgboost.csv_to_dmatrix,
    "libsvm_to_dmatrix": xgboost.libsvm_to_dmatrix,
    "decode": xgboost.matrix,
}
_ENCODERS = {"encode": content_types.encode, "decode": content_types.decode}

# Module to what is in it. Scripts import the empty ones and use nothing of them.
_MODULES: dict[str, dict[str, Any]] = {
    "sagemaker_inference": {},
    "sagemaker_inference.content_types": _CONTENT_TYPES,
    "sagemaker_inference.decoder": {"decode": content_types.decode},
    "sagemaker_inference.encoder": {
        "encode": content_types.encode,
        "SUPPORTED_CONTENT_TYPES": set(content_types.WRITES),
    },
    "sagemaker_inference.errors": _ERRORS,
    "sagemaker_inference.utils": _UTILS,
    "sagemaker_inference.default_inference_handler": {"DefaultInferenceHandler": DefaultInferenceHandler},
    "sagemaker_containers": {},
    "sagemaker_containers.entry_point": {},
    "sagemaker_containers.beta": {},
    "sagemaker_containers.beta.framework": {},
    "sagemaker_containers.beta.framework.content_types": _CONTENT_TYPES,
    "sagemaker_containers.beta.framework.encoders": _ENCODERS,
    "sagemaker_containers.beta.framework.errors": _ERRORS,
    "sagemaker_containers.beta.framework.worker": _WORKER,
    "sagemaker_containers.beta.framework.env": {},
    "sagemaker_containers.beta.framework.modules": {},
    "sagemaker_containers.beta.framework.transformer": {},
    "sagemaker_xgboost_container": {},
    "sagemaker_xgboost_container.data_utils": {"get_dmatrix": get_dmatrix},
    "sagemaker_xgboost_container.distributed": {},
    "sagemaker_xgboost_container.encoder": _BOOSTERS,
    "sagemaker_huggingface_inference_toolkit": {},
    "sagemaker_huggingface_inference_toolkit.content_types": {**_CONTENT_TYPES, **_MEDIA},
    "sagemaker_huggingface_inference_toolkit.decoder_encoder": {"decode": defaults.decoded, "encode": defaults.encoded},
    "mms": {},
    "mms.service": {"PredictionException": PredictionException},
}


def install() -> None:
    packages = {name.partition(".")[0] for name in _MODULES}
    missing = {name for name in packages if name not in sys.modules and importlib.util.find_spec(name) is None}
    for name, content in _MODULES.items():
        if name.partition(".")[0] in missing:
            module = ModuleType(name, "A stand-in for Amazon's, with what inference scripts use of it.")
            module.__path__ = []
            vars(module).update(content)
            parent, _, own = name.rpartition(".")
            if parent:
                setattr(sys.modules[parent], own, module)
            sys.modules[name] = module
