"""Models that are an inference script with its files, as SageMaker's own containers take them, and no config.pbtxt.

model.joblib  code/inference.py           the script in `code/`, or beside the model
model.joblib                              a script for all models, in a folder outside of their archives
xgboost-model                             no script: one of those that are built in
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING

from model_handlers.config.model_config import SCRIPTS, InstanceGroup
from model_handlers.errors import invalid_model
from model_handlers.scripts.default_script import (
    BOOSTER,
    DEFAULT,
    DEFAULT_ACCEPT,
    DEFAULT_TYPE,
    FOLDER,
    LINES,
    LITERAL,
    NONFINITE,
    SELECTED,
    SUBMIT_DIRECTORY,
    TASK,
    boosters_in,
    default_script,
    is_pickle,
)
from serve.sources.artifacts import Artifacts
from serve.sources.store import open_store

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from model_handlers.config.model_config import ModelConfig


_CACHE = "scripts"  # a folder of its own, since archives of models come and go by themselves


def fetched(scripts: Scripts, cache_directory: Path) -> Callable[[], Scripts]:
    """What is the same for all scripts, with the shared one on this machine: one in S3 is fetched by the first call."""
    return SharedScript(scripts, cache_directory) if "://" in scripts.shared else lambda: scripts


class SharedScript:
    """The scripts as they were set, but for the shared one, which is fetched once."""

    def __init__(self, scripts: Scripts, cache_directory: Path) -> None:
        self._lock = threading.Lock()
        store, _, self._name = scripts.shared.rpartition("/")
        self._artifacts = Artifacts(open_store(store), cache_directory / _CACHE)
        self._scripts = scripts
        self._fetched: Scripts | None = None

    def __call__(self) -> Scripts:
        with self._lock:
            if self._fetched is None:
                self._fetched = replace(self._scripts, shared=str(self._artifacts.fetch(self._name).path))
            return self._fetched


@dataclass(frozen=True, slots=True)
class Scripts:
    """What is the same for all scripts of a server, and for the configurations of its other models.

    Attributes:
        program: the file name of a script.
        shared: where the script is for all models that bring none, "" for nowhere.
        workers: instances of a model whose configuration does not say.
        default_accept: the type of an answer to a client that does not say what it accepts.
        config_name: the configuration in `configs/` that counts in place of config.pbtxt, if a model has it.
        strict: whether a configuration has to say everything itself.
        batch_sizes: (backend, "" for all others; what its models get that do not say how much they batch).
        booster_accept: the same as `default_accept` of models that are a booster and no script.
        lines: whether their answers are put together line by line.
        task: what models of Hugging Face are for that bring no script, "" for what each is made for.
        saved_model: which of several SavedModels is meant where a client names none, "" for the first.
        allow_pickle: whether boosters that are pickles are loaded, which may run any code of their author's.
        literal_json: whether JSON says NaN and Infinity in place of null.
        output: what an answer of a booster without a script holds for each row, () for its prediction.
    """

    program: str = "inference.py"
    shared: str = ""
    workers: int = 1
    default_accept: str = DEFAULT_TYPE
    config_name: str = ""
    strict: bool = False
    batch_sizes: tuple[tuple[str, int], ...] = ()
    booster_accept: str = "text/csv"
    lines: bool = False
    task: str = ""
    saved_model: str = ""
    allow_pickle: bool = False
    literal_json: bool = False
    output: tuple[str, ...] = ()

    def own(self, path: Path) -> str:
        """The script that a model's directory holds, relative to it; "" for none."""
        places = (f"code/{self.program}", self.program)
        return next((place for place in places if (path / place).is_file()), "")

    def serves(self, path: Path) -> bool:
        """Whether the directory can be a model, by the script that it holds, by the shared one or a built-in one."""
        return bool(self.shared) or bool(self.own(path)) or bool(default_script(path))

    def completed(self, config: ModelConfig, path: Path) -> ModelConfig:
        """What the configuration of the model in that directory leaves out; refuses a pickle that may not be loaded."""
        own = self.own(path)
        if not own and not self.allow_pickle:
            _refuse_pickles(config.name, path)
        built_in = "" if own or self.shared else default_script(path)
        accept = self.booster_accept if built_in == BOOSTER else self.default_accept
        said = {} if accept == DEFAULT_TYPE else {DEFAULT_ACCEPT: accept}
        said |= {LINES: "true"} if self.lines and built_in == BOOSTER else {}
        said |= {SELECTED: ",".join(self.output)} if self.output and built_in == BOOSTER else {}
        said |= {NONFINITE: LITERAL} if self.literal_json else {}
        said |= {name: text for name, text in ((TASK, self.task), (DEFAULT, self.saved_model)) if text}
        if not own and (self.shared or built_in):
            said[SUBMIT_DIRECTORY] = self.shared or str(FOLDER)
        return replace(
            config,
            backend=SCRIPTS,
            default_model_filename=config.default_model_filename or own or built_in or self.program,
            instance_group=config.instance_group or (InstanceGroup(config.name, count=self.workers),),
            parameters=MappingProxyType({**said, **config.parameters}),
        )


def _refuse_pickles(model: str, path: Path) -> None:
    for file in boosters_in(path):
        if is_pickle(file):
            raise invalid_model(
                f"model '{model}': {file.name} is a pickle, which may run any code when it is loaded: save it with "
                "Booster.save_model, or start the server with MME_ALLOW_PICKLE=true where all authors are trusted"
            )


DEFAULT_SCRIPTS = Scripts()
