"""Models that are code of a module and perhaps its weights, `model.py` and `model.pt`, as Triton's backend has them.

The class is the first by name, of those that the file defines, as in Triton; the weights are a `state_dict`. Nothing is
compiled. Loaded on load threads, called on the threads that execute.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from model_handlers.errors import invalid_model
from model_handlers.python.imports import ImportedFile, free_name
from model_handlers.pytorch.archive import source_of, weights_of
from model_handlers.pytorch.runtime import pytorch

if TYPE_CHECKING:
    from model_handlers.config import ModelConfig


class Code:
    """A module made by its author's code. Its arguments are the configuration's inputs, in their order.

    Raises:
        MmeError: INVALID_MODEL for code without such a class, or that fails; OUT_OF_MEMORY.
    """

    arguments = None
    results = None
    tensors = None

    def __init__(self, path: str, device: Any, model: str) -> None:
        torch, source = pytorch(), source_of(Path(path))
        self._imported = ImportedFile(model, source, free_name(source.stem), [str(source.parent)], source.parent)
        try:
            module = _class_of(self._imported, torch.nn.Module, model)()
            weights = weights_of(Path(path))
            if weights is not None:
                module.load_state_dict(torch.load(weights, map_location=device or "cpu", weights_only=True))
            self._module = module.to(device or "cpu").eval()
        except BaseException:
            self.forget()
            raise

    def call(self, values: dict[str, Any]) -> list[Any] | dict[str, Any]:
        """See `Program`."""
        result = self._module(*values.values())
        if isinstance(result, dict):
            return {str(name): value for name, value in result.items()}
        return list(result) if isinstance(result, (tuple, list)) else [result]

    def forget(self) -> None:
        """Forget the code."""
        self._imported.forget()


def check_declared(config: ModelConfig) -> None:
    """Code tells nothing of inputs and outputs, and is not run to learn more.

    Raises:
        MmeError: INVALID_MODEL where the configuration does not, either.
    """
    if not (config.inputs and config.outputs):
        raise invalid_model(
            f"model '{config.name}' is code, which tells neither inputs nor outputs: declare both in config.pbtxt, in "
            "the order of forward's arguments and results"
        )


def _class_of(imported: ImportedFile, base: type, model: str) -> Any:
    module = imported.module
    own = [
        each
        for _, each in sorted(vars(module).items())
        if isinstance(each, type) and issubclass(each, base) and each.__module__ == module.__name__
    ]
    if not own:
        raise invalid_model(f"model '{model}': Cannot find a subclass of torch.nn.Module in {module.__file__}")
    return own[0]
