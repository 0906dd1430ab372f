"""Azure Machine Learning's variable, and the rule for it: a registered model is a model repository.

A deployment mounts what was registered and names the place in AZUREML_MODEL_DIR. Registering `./repository` makes a
folder of that name in there, which is the one that is meant; so this looks for models on the way down, the only rule
that looks at the disk.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from container.settings import values as v
from container.settings.kinds import Mode, PingMode, Variable

if TYPE_CHECKING:
    from container.settings.reading import Reading

_NAME = "AZUREML_MODEL_DIR"

AZUREML_VARIABLES = (
    Variable(
        _NAME,
        "",
        v.directory,
        "Set by Azure ML: a folder that is served as a Triton model repository, or the one in it that holds models, "
        "unless another variable says where models come from.",
        default="unset",
    ),
)


def choose_azureml(reading: Reading) -> None:
    """Serve the folder as a repository where nothing else says where models come from."""
    if _NAME not in reading.parsed or reading.fields["mode"] is not Mode.SINGLE or "MME_MODEL_DIR" in reading.parsed:
        return
    folder = reading.parsed[_NAME]
    if not folder.is_dir():
        reading.problems.append(
            f"{_NAME}='{folder}': there is no such folder; give the deployment a model, or name one of --model-store, "
            "--model-repository and --model-dir"
        )
        return
    reading.fields["mode"] = Mode.REPOSITORY
    reading.fields["model_repository"] = (repository_in(folder),)
    reading.fields.setdefault("ping_mode", PingMode.READY)  # its readiness route asks, and traffic waits for the models


def repository_in(folder: Path) -> Path:
    """The folder itself if it holds models, else the one down the only way that does, else the folder."""
    from serve.sources.layout import list_models  # noqa: PLC0415 - NumPy comes with it, which a start elsewhere waits for

    inner = folder
    while not list_models(inner):
        below = [Path(entry) for entry in os.scandir(inner) if entry.is_dir() and not entry.name.startswith(".")]
        if len(below) != 1:
            return folder
        inner = below[0]
    return inner
