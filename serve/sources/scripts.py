"""Models that are an inference script with its files, as SageMaker's own containers take them, and no config.pbtxt.

    model.joblib  code/inference.py           the script in `code/`, or beside the model
    model.joblib                              a script for all models, in a folder outside of their archives

Looks at names alone, on load threads; says what a configuration would have said.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING

from model_handlers.body import BACKEND, DEFAULT_ACCEPT, DEFAULT_TYPE, SUBMIT_DIRECTORY
from model_handlers.config import InstanceGroup

if TYPE_CHECKING:
    from pathlib import Path

    from model_handlers.config import ModelConfig


@dataclass(frozen=True, slots=True)
class Scripts:
    """What is the same for all scripts of a server, and for the configurations of its other models.

    Attributes:
        program: the file name of a script.
        shared: where the script is for all models that bring none, "" for nowhere. See `shared_script`.
        workers: instances of a model whose configuration does not say.
        default_accept: the type of an answer to a client that does not say what it accepts.
        config_name: of models with configurations: the one in `configs/` that counts in place of config.pbtxt, if the
            model has one of that name; "" for none.
        strict: whether a configuration has to say everything itself.
        batch_sizes: (backend, "" for all others; what its models get that do not say how much they batch).
    """

    program: str = "inference.py"
    shared: str = ""
    workers: int = 1
    default_accept: str = DEFAULT_TYPE
    config_name: str = ""
    strict: bool = False
    batch_sizes: tuple[tuple[str, int], ...] = ()

    def own(self, path: Path) -> str:
        """The script that a model's directory holds, relative to it; "" for none."""
        places = (f"code/{self.program}", self.program)
        return next((place for place in places if (path / place).is_file()), "")

    def serves(self, path: Path) -> bool:
        """Whether the directory can be a model, by the script that it holds or by the shared one."""
        return bool(self.shared) or bool(self.own(path))

    def completed(self, config: ModelConfig, path: Path) -> ModelConfig:
        """What the configuration of the model in that directory leaves out."""
        own = self.own(path)
        said = {} if self.default_accept == DEFAULT_TYPE else {DEFAULT_ACCEPT: self.default_accept}
        if not own and self.shared:
            said[SUBMIT_DIRECTORY] = self.shared
        return replace(
            config,
            backend=BACKEND,
            default_model_filename=config.default_model_filename or own or self.program,
            instance_groups=config.instance_groups or (InstanceGroup(config.name, count=self.workers),),
            parameters=MappingProxyType({**said, **config.parameters}),
        )

    def ruled(self, config: ModelConfig) -> ModelConfig:
        """A configuration whose backend is known, with what the server says about how it is to be completed."""
        sizes = dict(self.batch_sizes)
        size = sizes.get(config.backend, sizes.get("", 0))
        return replace(config, strict=self.strict, default_max_batch_size=size)


DEFAULT_SCRIPTS = Scripts()
