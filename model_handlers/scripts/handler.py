"""Models of backend "sagemaker": a script with `model_fn` behind the Handler interface.

The script runs in `load` and `execute_requests`, by default in a process of the instance's own. `autocomplete` only
reads, because a configuration may be asked for where code of strangers must not run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from model_handlers.base import Handler, Placement
from model_handlers.config.validate import normalise
from model_handlers.python import preload
from model_handlers.python.author_code import check_syntax, wanted
from model_handlers.scripts.default_script import BACKEND, BOOSTER, FOLDER, PIPELINE, SAVED_MODEL, default_script
from model_handlers.scripts.host import ScriptFile, ScriptHost, with_body

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from model_handlers.base import Device
    from model_handlers.config.model_config import ModelConfig
    from model_handlers.environments.wanted import Wanted
    from model_handlers.errors import MmeError
    from model_handlers.requests import ModelRequest, ModelResponse

_IMPORTS = {PIPELINE: "transformers", BOOSTER: "xgboost", SAVED_MODEL: preload.SAVED_MODEL}


class ScriptHandler(Handler):
    """One script, and the model that it loaded."""

    backend: ClassVar[str] = BACKEND
    default_filename: ClassVar[str] = "code/inference.py"
    inline: ClassVar[bool] = False
    sees_requests: ClassVar[bool] = True
    placement: ClassVar[Placement] = Placement.PROCESS

    def __init__(self, host: ScriptHost) -> None:
        super().__init__(host.config)
        self._host = host

    @classmethod
    def gpu_capable(cls) -> bool:
        """Scripts choose their framework themselves; they are told which GPU is theirs."""
        return True

    @classmethod
    def preloads(cls, config: ModelConfig, model_file: Path, *, on_gpu: bool) -> str:
        """The framework that the script imports; none on a GPU, which what imports might touch before the fork."""
        if on_gpu:
            return ""
        file = ScriptFile(config, model_file)
        if file.path.parent == FOLDER:
            return preload.preload_for(file.path, (file.model_directory,), _IMPORTS[file.path.name])
        # SavedModels are loaded for a script without a model_fn
        imports = preload.SAVED_MODEL if default_script(file.model_directory) == SAVED_MODEL else ""
        return preload.preload_for(file.path, (file.path.parent, file.model_directory), imports)

    @classmethod
    def environment(cls, config: ModelConfig, model_file: Path) -> Wanted | None:
        """What its parameter names, or what the requirements.txt beside the script does."""
        file = ScriptFile(config, model_file)
        return wanted(config, file.model_directory, (file.path.parent, file.model_directory))

    @classmethod
    def autocomplete(cls, config: ModelConfig, model_file: Path) -> ModelConfig:
        check_syntax(config.name, ScriptFile(config, model_file).path)
        return normalise(with_body(config))

    @classmethod
    def load(cls, config: ModelConfig, model_file: Path, device: Device, lane: str) -> ScriptHandler:  # noqa: ARG003 - no script is told
        """Import the script and call `model_fn`."""
        return cls(ScriptHost(config, ScriptFile(config, model_file), device))

    def execute_requests(self, requests: Sequence[ModelRequest]) -> list[ModelResponse | MmeError | None]:
        return [self._host.answer(request) for request in requests]

    def close(self) -> None:
        self._host.close()
