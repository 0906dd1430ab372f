"""Models of backend "python": Triton's TritonPythonModel behind the Handler interface.

The author's code runs in `load`, `execute_requests`, `ask_ready` and `close`, by default in a process of the instance's
own. `autocomplete` only reads, because a configuration may be asked for where code of strangers must not run.
"""

from __future__ import annotations

import _thread
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from model_handlers.base import Handler, Placement
from model_handlers.config.validate import normalise
from model_handlers.errors import MmeError, unsupported
from model_handlers.model_calls import offered
from model_handlers.python.author_code import ModelFile, check_class, check_syntax, wanted
from model_handlers.python.host import Host
from model_handlers.python.preload import preload_for

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from model_handlers.base import Device
    from model_handlers.config.model_config import ModelConfig
    from model_handlers.environments.wanted import Wanted
    from model_handlers.requests import ModelRequest, ModelResponse


class PythonHandler(Handler):
    """One `TritonPythonModel`, initialized."""

    backend: ClassVar[str] = "python"
    default_filename: ClassVar[str] = "model.py"
    inline: ClassVar[bool] = False
    sees_requests: ClassVar[bool] = True
    placement: ClassVar[Placement] = Placement.PROCESS

    def __init__(self, host: Host) -> None:
        super().__init__(host.config)
        self._host = host
        self.tells_ready = host.tells_ready

    @classmethod
    def gpu_capable(cls) -> bool:
        """Models choose their framework themselves; they are told which GPU is theirs."""
        return True

    @classmethod
    def preloads(cls, config: ModelConfig, model_file: Path, *, on_gpu: bool) -> str:
        """The framework that its code imports; none on a GPU, which what imports might touch before the fork."""
        if on_gpu:
            return ""
        file = ModelFile(config, model_file)
        return preload_for(file.path, map(Path, file.directories()))

    @classmethod
    def environment(cls, config: ModelConfig, model_file: Path) -> Wanted | None:
        """What its parameter names, or what its requirements.txt does."""
        file = ModelFile(config, model_file)
        return wanted(config, file.model_directory, map(Path, file.directories()))

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
        return cls(Host(config, ModelFile(config, model_file), device, lane, offered()))

    def execute_requests(self, requests: Sequence[ModelRequest]) -> list[ModelResponse | MmeError | None]:
        """Call the author's `execute` once. Several threads that call at a time wait for one another."""
        return self._host.execute(requests, self.outside)

    def ask_ready(self, done: Callable[[bool], None]) -> None:
        """Call `is_ready` on a thread of its own: it neither waits for `execute` nor has it wait."""
        # An event loop may ask, and Thread.start would have it wait until the thread runs.
        _thread.start_new_thread(lambda: done(self._host.is_ready()), ())

    def close(self) -> None:
        self._host.close()
