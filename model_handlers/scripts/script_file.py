"""Where a script and its model are. PURE, but for the import itself, which runs on the thread that loads.

The script is imported under its own name, `inference` as a rule, since what was pickled in training may name classes of
that module; only where another model of the process has that name it gets a number behind it.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from model_handlers.errors import invalid_model
from model_handlers.python.author_code import ImportedFile, free_name, version_directory
from model_handlers.scripts import toolkits
from model_handlers.scripts.body import BACKEND, BODY, SUBMIT_DIRECTORY
from model_handlers.tensor import UINT8, TensorSpec

if TYPE_CHECKING:
    from model_handlers.config.model_config import ModelConfig


_SPECS = (TensorSpec(BODY, UINT8, (-1,)),)


def with_body(config: ModelConfig) -> ModelConfig:
    """A configuration with those two tensors, which it may name itself or leave out.

    Raises:
        MmeError: INVALID_MODEL when it says that the model looks otherwise.
    """
    for what, specs in (("input", config.inputs), ("output", config.outputs)):
        if specs not in {(), _SPECS}:
            raise invalid_model(
                f"model '{config.name}': a model of backend '{BACKEND}' has one {what}, {BODY} of TYPE_UINT8 and dims "
                f"[ -1 ]; leave '{what}' out of its configuration"
            )
    if config.max_batch_size:
        raise invalid_model(
            f"model '{config.name}': a model of backend '{BACKEND}' gets one request at a time; leave 'max_batch_size' "
            "out of its configuration"
        )
    return replace(config, inputs=_SPECS, outputs=_SPECS)


_LIBRARY = "lib"  # beside the script: packages that an archive brings unpacked


class ScriptFile:
    """The places of one model.

    Attributes:
        path: the script.
        model_directory: what `model_fn` is given.

    Args:
        config: names the script inside of the model's directory, and perhaps a folder outside of it.
        model_file: the script as it would lie in the model's directory.
    """

    def __init__(self, config: ModelConfig, model_file: Path) -> None:
        outside = config.parameters.get(SUBMIT_DIRECTORY)
        self.model_directory = version_directory(config, model_file)
        self.path = Path(outside) / model_file.name if outside else model_file

    def imported(self, model: str) -> ImportedFile:
        """The script, imported.

        Raises:
            MmeError: INVALID_MODEL, OUT_OF_MEMORY.
        """
        toolkits.install()
        code = self.path.parent
        places = (code, *(each for each in (code / _LIBRARY,) if each.is_dir()), self.model_directory)
        directories = list(dict.fromkeys(map(str, places)))
        root = self.model_directory if self.path.is_relative_to(self.model_directory) else code
        return ImportedFile(model, self.path, free_name(self.path.stem), directories, root)
