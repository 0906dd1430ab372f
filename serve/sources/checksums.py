"""Files that a model's configuration knows by their digests: what Triton's repository agent `checksum` does.

    model_repository_agents { agents { name: "checksum" parameters { key: "MD5:1/model.onnx" value: "…" } } }

Runs on load threads, before anything is read of the files but their bytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from model_handlers.digests import file_digest
from model_handlers.disk import disk_errors
from model_handlers.errors import invalid_model

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from model_handlers.config import ModelConfig
    from model_handlers.errors import MmeError


def checksum_errors(config: ModelConfig, directory: Path) -> Iterator[MmeError]:
    """An error for each file of the model's directory that is not what its digest says.

    Raises:
        MmeError: INTERNAL when a file can't be read.
    """
    for agent in config.agents:
        for key, expected in agent.parameters.items():
            name = key.removeprefix("MD5:")
            file = directory / name
            whose = f"checksum of '{name}' of model '{config.name}'"
            if not file.is_file():
                yield invalid_model(f"{whose}: there is no such file in the model's directory")
                continue
            with disk_errors(whose):
                actual = file_digest(file, "md5").hex()
            if actual != expected.strip().lower():
                yield invalid_model(f"{whose}: mismatched MD5 hash, expected {expected.strip()}, got {actual}")
