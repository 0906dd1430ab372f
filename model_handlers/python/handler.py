"""Models of backend "python": Triton's TritonPythonModel behind the Handler interface.

The author's code runs in `load`, `execute_requests`, `ask_ready` and `close`, by default in a process of the instance's
own. `autocomplete` only reads, because a configuration may be asked for where code of strangers must not run.
"""

from __future__ import annotations

import _thread
from typing import TYPE_CHECKING, ClassVar

from model_handlers.base import Device, Handler, Placement, Traits, offered
from model_handlers.config.validate import normalise
from model_handlers.errors import MmeError, unsupported
from model_handlers.python.author_code import ANY_RUNTIME, ModelFile, check_class, check_syntax
from model_handlers.python.host import PythonHost

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from model_handlers.config.model_config import ModelConfig
    from model_handlers.requests import ModelRequest, ModelResponse


class PythonHandler(Handler):
    """One `TritonPythonModel`, which is initialized."""

    backend: ClassVar[str] = "python"
    default_filename: ClassVar[str] = "model.py"

    def __init__(self, host: PythonHost) -> None:
        super().__init__(host.config)
        self.host = host
        self.tells_ready = host.tells_ready

    @classmethod
    def traits(cls, config: ModelConfig, model_file: Path) -> Traits:
        code = ModelFile(config, model_file)
        return Traits(placement=Placement.PROCESS, sees_requests=True, runtime=ANY_RUNTIME, code=code)

    @classmethod
    def autocomplete(cls, config: ModelConfig, model_file: Path) -> ModelConfig:
        """Check the file; raises UNSUPPORTED where only `auto_complete_config` knows the tensors."""
        file = ModelFile(config, model_file)
        check_class(config.name, file, check_syntax(config.name, file.path))
        named = bool(config.inputs) + bool(config.outputs)  # a model may do without either
        completes = named < 2 and b"auto_complete_config" in file.path.read_bytes()
        if named == 0 or completes or config.named_inputs or config.named_outputs:
            raise unsupported(
                f"model '{config.name}' names its inputs and outputs in auto_complete_config, which only a load runs"
            )
        return normalise(config)

    @classmethod
    def load(cls, config: ModelConfig, model_file: Path, device: Device, lane: str) -> PythonHandler:
        return cls(PythonHost(config, ModelFile(config, model_file), device, lane, offered()))

    def execute_requests(self, requests: Sequence[ModelRequest]) -> list[ModelResponse | MmeError | None]:
        """Call the author's `execute` once. Several threads that call at a time wait for one another."""
        return self.host.execute(requests, self.outside)

    def ask_ready(self, done: Callable[[bool], None]) -> None:
        """Call `is_ready` on a thread of its own: it neither waits for `execute` nor has it wait."""
        # An event loop may ask, and Thread.start would have it wait until the thread runs.
        _thread.start_new_thread(lambda: done(self.host.is_ready()), ())

    def close(self) -> None:
        self.host.close()
