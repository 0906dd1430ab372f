"""Which environment of its own a Python model asks for. It looks at names alone; runs wherever models are opened.

Triton's parameter names one that is there, packed or not.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from model_handlers.environments.wanted import Folder, Wanted
from model_handlers.errors import Kind, MmeError, invalid_model

if TYPE_CHECKING:
    from model_handlers.config import ModelConfig
    from model_handlers.python.module import ModelFile

PARAMETER = "EXECUTION_ENV_PATH"
_MODEL_DIRECTORY = "$$TRITON_MODEL_DIRECTORY"
_REQUIREMENTS = "requirements.txt"


def wanted(config: ModelConfig, file: ModelFile) -> Wanted | None:
    """The environment that a model asks for, None where it is content with ours.

    Raises:
        MmeError: INVALID_MODEL for a path that does not say where it begins.
    """
    text = config.parameters.get(PARAMETER, "")
    if text:
        return Folder(_path(text, config.name, file))
    found = [directory / _REQUIREMENTS for directory in (file.version_directory, file.model_directory)]
    asks = next((str(path) for path in found if path.exists()), None)
    if asks is not None:
        raise MmeError(
            Kind.UNSUPPORTED,
            f"model '{config.name}': {asks} asks for an environment of its own, which Python models do not get yet; "
            "remove it and install the packages where the server runs",
        )
    return None


def _path(text: str, model: str, file: ModelFile) -> Path:
    path = Path(text.replace(_MODEL_DIRECTORY, str(file.model_directory)))
    if not path.is_absolute():
        raise invalid_model(
            f"model '{model}': parameter '{PARAMETER}' is '{text}'; it must be an absolute path or begin with "
            f"{_MODEL_DIRECTORY}"
        )
    return path
