"""The names of a model's classes: of each output, one a line of the file that its configuration names.

Read on load threads, with the model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from model_handlers.errors import invalid_model
from model_handlers.system.disk import disk_errors

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from model_handlers.config.model_config import ModelConfig

    Labels = Mapping[str, tuple[str, ...]]


def read_labels(config: ModelConfig, directory: Path) -> dict[str, tuple[str, ...]]:
    """Output → its labels, of those outputs that have a file of them in the model's directory.

    Raises:
        MmeError: INVALID_MODEL for a file that is not there, or no text.
    """
    labels = {}
    for spec in config.outputs:
        if not spec.label_filename:
            continue
        file = directory / spec.label_filename
        whose = f"label_filename '{spec.label_filename}' of output '{spec.name}' of model '{config.name}'"
        if not file.is_file():
            raise invalid_model(f"{whose}: there is no such file in the model's directory")
        try:
            with disk_errors(whose):
                labels[spec.name] = tuple(line.strip() for line in file.read_text("utf-8").splitlines())
        except UnicodeDecodeError as error:
            raise invalid_model(f"{whose} is not UTF-8 text: {error}") from error
    return labels


def ensemble_labels(config: ModelConfig, own: Labels, members: Mapping[str, Labels]) -> Labels:
    """Those of an ensemble: its own, else those of the models that write its outputs."""
    labels = dict(own)
    for step in config.ensemble:
        for output, tensor in step.output_map.items():
            if config.output(tensor) is not None and output in members[step.model_name]:
                labels.setdefault(tensor, members[step.model_name][output])
    return labels
