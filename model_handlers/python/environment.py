"""Which environment of its own a model in Python asks for. Reads nothing but requirements.txt.

Triton's parameter names an environment that is there, packed or not, and is complete: a requirements.txt beside it is
then how that was made. Without it requirements.txt says what is to be installed, out of a folder `wheels` if there is
one. Runs wherever models are opened.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from model_handlers.environments.wanted import Given, Requirements, Wanted
from model_handlers.errors import invalid_model

if TYPE_CHECKING:
    from collections.abc import Iterable

    from model_handlers.config.model_config import ModelConfig

PARAMETER = "EXECUTION_ENV_PATH"
_MODEL_DIRECTORY = "$$TRITON_MODEL_DIRECTORY"


def wanted(config: ModelConfig, model_directory: Path, folders: Iterable[Path]) -> Wanted | None:
    """The environment that a model asks for, None where it is content with ours.

    Args:
        config: its configuration.
        model_directory: its directory.
        folders: where requirements.txt and wheels may lie; the first that has one counts.

    Raises:
        MmeError: INVALID_MODEL for a path that does not say where it begins.
    """
    text = config.parameters.get(PARAMETER, "")
    if text:
        return Given(_path(text, config.name, model_directory), brought=_MODEL_DIRECTORY in text)
    places = list(folders)
    requirements = next((path for folder in places if (path := folder / "requirements.txt").is_file()), None)
    if requirements is None or not _asks(requirements):
        return None
    wheels = next((path for folder in places if (path := folder / "wheels").is_dir()), None)
    return Requirements(requirements, wheels)


def _asks(requirements: Path) -> bool:
    """Whether there is anything but comments in it."""
    lines = requirements.read_text(errors="replace").splitlines()
    return any(line.strip() and not line.strip().startswith("#") for line in lines)


def _path(text: str, model: str, model_directory: Path) -> Path:
    path = Path(text.replace(_MODEL_DIRECTORY, str(model_directory)))
    if not path.is_absolute():
        raise invalid_model(
            f"model '{model}': parameter '{PARAMETER}' is '{text}'; it must be an absolute path or begin with "
            f"{_MODEL_DIRECTORY}"
        )
    return path
