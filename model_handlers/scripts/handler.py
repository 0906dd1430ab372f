"""Models of backend "sagemaker": a script with `model_fn` behind the Handler interface.

The script runs in `load` and `execute_requests`, by default in a process of the instance's own. `autocomplete` only
reads, because a configuration may be asked for where code of strangers must not run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from model_handlers.base import Handler, Placement, Traits
from model_handlers.config.validate import normalise
from model_handlers.python.author_code import ANY_RUNTIME, check_syntax
from model_handlers.scripts.default_script import BACKEND
from model_handlers.scripts.host import ScriptFile, ScriptHost, with_body

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from model_handlers.base import Device
    from model_handlers.config.model_config import ModelConfig
    from model_handlers.errors import MmeError
    from model_handlers.requests import ModelRequest, ModelResponse


class ScriptHandler(Handler):
    """One script, and the model that it loaded."""

    backend: ClassVar[str] = BACKEND
    default_filename: ClassVar[str] = "code/inference.py"

    def __init__(self, host: ScriptHost) -> None:
        super().__init__(host.config)
        self._host = host

    @classmethod
    def traits(cls, config: ModelConfig, model_file: Path) -> Traits:
        code = ScriptFile(config, model_file)
        return Traits(placement=Placement.PROCESS, sees_requests=True, runtime=ANY_RUNTIME, code=code)

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
