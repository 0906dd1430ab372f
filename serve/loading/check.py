"""Everything that is wrong with a model's directory, and not only the first of it: for commands, not for the server.

What a load does up to the point where memory is taken, with every problem told where it is. It runs no code of models.
"""

from __future__ import annotations

import contextlib
import logging
import os
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from model_handlers.config.findings import Finding, Understood, understand
from model_handlers.config.model_config import Guess, ModelConfig, warn_once
from model_handlers.config.validate import PLATFORM, check_named
from model_handlers.environment import Prebuilt
from model_handlers.errors import Kind, MmeError
from model_handlers.registry import find_backend, handler_for
from model_handlers.worker.start import verify_file
from serve.loading.prepare import asked_checks, asks, unknown_parameters
from serve.model.ensemble_plan import check_circle, member_problems, not_available
from serve.model.warmup import Warmup, initial_states
from serve.sources.layout import CONFIG_NAME, config_file, config_text, ignored_versions, misnamed_config, versions_in
from serve.sources.repository import (
    ModelDirectory,
    absent_versions,
    checksum_errors,
    decided,
    missing_files,
    namespace_errors,
    selected_versions,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from model_handlers.base import Handler, Traits
    from model_handlers.environment import Wanted
    from serve.sources.scripts import Scripts


_GUESSED = {
    Guess.OTHER: "is not written, and the names of the first dimensions are none of a batch: requests are executed one "
    "by one. Write 0 and whole shapes to say so, or a number to have them batched",
    Guess.UNKNOWN: "is not written, and nothing says whether the first dimension is the batch: requests are executed "
    "one by one until batches have given the same answers. Write a number to have them batched from the start, or 0",
}


@dataclass(frozen=True, slots=True)
class Located:
    """A finding, and the file that it is about, relative to the model's directory."""

    file: str
    finding: Finding


@dataclass(slots=True)
class Examined:
    """A model's directory and what is to be said of it."""

    path: Path
    name: str
    # as far as it could be understood; completed from the model file where nothing is wrong
    config: ModelConfig | None = None
    versions: dict[int, Path] = field(default_factory=dict)  # those that would be served
    problems: list[Located] = field(default_factory=list)  # what keeps it from being loaded; notes: the rest
    notes: list[Located] = field(default_factory=list)

    def attempt(self, file: str, field: str, action: Callable[[], object]) -> bool:
        try:
            action()
        except MmeError as error:
            self.problems.append(Located(file, Finding(field, error.message)))
            return False
        return True


def examine(path: Path, name: str, scripts: Scripts, *, strict_name: bool) -> Examined:
    """Look at one model. With `strict_name` its configuration may call it nothing else, as in a repository."""
    found = Examined(path, name)
    file = config_file(path, scripts)
    found.attempt(file.name, "", lambda: _understand(found, file, strict_name=strict_name))
    if found.config is None:
        return found
    _note_versions(found, found.config)
    if not found.attempt(file.name, "backend", partial(_select, found, found.config, scripts)):
        return found
    is_ensemble = found.config.platform == PLATFORM
    backend, traits = ("", None) if is_ensemble else _backend(found, found.config)
    for field_name, check in asked_checks(found.config, backend, traits):
        found.attempt(file.name, field_name, check)
    for parameter, sentence in unknown_parameters(found.config):
        found.notes.append(Located(file.name, Finding(f"parameters['{parameter}']", sentence)))
    if is_ensemble:
        for error in namespace_errors(found.config) if not strict_name else ():
            found.problems.append(Located(file.name, Finding("ensemble_scheduling.step", error.message)))
        return found
    found.attempt(file.name, "", partial(check_named, found.config))
    for error in missing_files(ModelDirectory(name, path, found.config, found.versions)):
        found.problems.append(Located(file.name, Finding("default_model_filename", error.message)))
    _look_for_labels(found, found.config)
    found.problems += [
        Located(file.name, Finding("model_repository_agents", error.message))
        for error in checksum_errors(found.config, path)
    ]
    if not found.problems:
        _look_for_environments(found, found.config)
    if not found.problems:
        _hold_against_files(found, found.config)
    return found


def _understand(found: Examined, file: Path, *, strict_name: bool) -> None:
    understood = Understood(ModelConfig(name=found.name))
    if file.is_file():
        understood = understand(config_text(file, found.name), model=found.name, strict_name=strict_name)
    else:
        misnamed = misnamed_config(found.path)
        renamed = f"; {misnamed} is not read: rename it" if misnamed else ""
        sentence = f"there is none: all is taken from the model's files{renamed}"
        found.notes.append(Located(CONFIG_NAME, Finding("", sentence)))
    found.config = understood.config
    found.problems += [Located(file.name, finding) for finding in understood.problems]
    found.notes += [Located(file.name, finding) for finding in understood.notes]


def _select(found: Examined, config: ModelConfig, scripts: Scripts) -> None:
    config, available = decided(found.path, config, scripts)
    if config.platform != PLATFORM:
        handler_for(find_backend(config.backend, config.platform, found.name, next(iter(available.values()), None)))
    found.config = config

    def select() -> None:
        found.versions = selected_versions(config, available, found.name, found.path)

    found.attempt(CONFIG_NAME, "version_policy", select)


def _note_versions(found: Examined, config: ModelConfig) -> None:
    for name in ignored_versions(found.path):
        why = "a version is a number without leading zeros"
        found.notes.append(Located(f"{name}/", Finding("", f"is not served: {why}")))
    for version in absent_versions(config, versions_in(found.path)):
        sentence = f"names version {version}, whose directory is not there"
        found.notes.append(Located(CONFIG_NAME, Finding("version_policy", sentence)))


def _look_for_labels(found: Examined, config: ModelConfig) -> None:
    for index, spec in enumerate(config.outputs):
        if spec.label_filename and not (found.path / spec.label_filename).is_file():
            sentence = (
                f"there is no file '{spec.label_filename}' in the model's directory, which output '{spec.name}' names"
            )
            found.problems.append(Located(CONFIG_NAME, Finding(f"output[{index}].label_filename", sentence)))


def _look_for_environments(found: Examined, config: ModelConfig) -> None:
    # What a model brings has to be there; what is put where it looks may come later.
    handler = _handler(found, config)
    directory = ModelDirectory(found.name, found.path, config, found.versions)
    asked: set[Wanted | None] = set()

    def ask() -> None:
        asked.update(asks(handler, config, directory.model_file(version)) for version in found.versions)

    found.attempt(CONFIG_NAME, "parameters", ask)
    for wanted in asked:
        if isinstance(wanted, Prebuilt) and not os.path.exists(wanted.path):  # noqa: PTH110 - too long a name is no error
            sentence = f"{wanted.subject} is not there"
            (found.problems if wanted.brought else found.notes).append(
                Located(CONFIG_NAME, Finding("parameters", sentence, wanted.remedy))
            )


def _hold_against_files(found: Examined, config: ModelConfig) -> None:
    handler = _handler(found, config)
    directory = ModelDirectory(found.name, found.path, config, found.versions)
    completed = config
    warn_once.cache_clear()  # another model of that name may have said the same
    for version in found.versions:
        model_file = directory.model_file(version)
        shown = _relative(model_file, found.path)
        try:
            # the command would die of it, and tell nothing of the rest
            if handler.traits(config, model_file).verify_first:
                verify_file(handler, config, model_file)
            with _heard() as warnings:
                completed = handler.autocomplete(config, model_file)
            found.notes += [Located(CONFIG_NAME, Finding("", sentence)) for sentence in warnings]
        except MmeError as error:
            is_unknown = error.kind is Kind.UNSUPPORTED  # without the framework, or without running the model's code
            findings = found.notes if is_unknown else found.problems
            findings.append(Located(shown, Finding("", f"{'not checked: ' if is_unknown else ''}{error.message}")))
    found.config = completed
    if completed.guess in _GUESSED:
        found.notes.append(Located(CONFIG_NAME, Finding("max_batch_size", _GUESSED[completed.guess])))
    for index, sample in enumerate(completed.model_warmup):
        alone = replace(completed, model_warmup=(sample,))
        found.attempt(CONFIG_NAME, f"model_warmup[{index}]", partial(Warmup, alone, found.path))
    found.attempt(CONFIG_NAME, "sequence_batching.state", partial(initial_states, completed, found.path))


class _Listener(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.sentences: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.sentences.append(record.getMessage())


@contextlib.contextmanager
def _heard() -> Iterator[list[str]]:
    """What a server's log would warn of meanwhile, which is not logged."""
    logger, listener = logging.getLogger("mme"), _Listener()
    disabled, propagates = logger.manager.disable, logger.propagate
    logging.disable(logging.NOTSET)
    logger.propagate = False
    logger.addHandler(listener)
    try:
        yield listener.sentences
    finally:
        logger.removeHandler(listener)
        logger.propagate = propagates
        logging.disable(disabled)


def _handler(found: Examined, config: ModelConfig) -> type[Handler]:
    first = next(iter(found.versions.values()), None)
    return handler_for(find_backend(config.backend, config.platform, found.name, first))


def _backend(found: Examined, config: ModelConfig) -> tuple[str, Traits]:
    handler, first = _handler(found, config), next(iter(found.versions.values()), found.path / "1")
    return handler.backend or config.backend, handler.traits(config, first / config.default_model_filename)


def _relative(file: Path, directory: Path) -> str:
    return file.relative_to(directory).as_posix() if file.is_relative_to(directory) else str(file)


def examine_ensembles(models: Sequence[Examined]) -> None:
    """Hold the ensembles among models that lie beside one another against the others."""
    by_name = {model.path.name: model for model in models}
    steps = {
        name: [step.model_name for step in model.config.ensemble] for name, model in by_name.items() if model.config
    }
    for model in models:
        if model.config is None or not model.config.ensemble:
            continue
        members: list[ModelConfig | None] = []
        for index, step in enumerate(model.config.ensemble):
            if step.model_namespace not in {"", model.path.parent.name, str(model.path.parent)}:
                where = f"ensemble_scheduling.step[{index}].model_namespace"
                model.notes.append(Located(CONFIG_NAME, Finding(where, "not checked: it is another repository")))
                members.append(None)
                continue
            part = by_name.get(step.model_name)
            if part is None:
                _add(
                    model,
                    f"step[{index}].model_name",
                    not_available(model.name, [step.model_name]).message,
                    f"put {step.model_name}/ beside it",
                )
            elif step.version is not None and step.version not in part.versions:
                which = (
                    f"ensemble '{model.name}' depends on '{step.model_name}' whose required version {step.version} is"
                )
                _add(model, f"step[{index}].model_version", f"{which} not loaded", "see its version_policy")
            sound = part is not None and not part.problems and part.config is not None and part.config.outputs
            members.append(part.config if part is not None and sound else None)
        for field_name, error in member_problems(model.config, members):
            model.problems.append(Located(CONFIG_NAME, Finding(field_name, error.message)))
        model.attempt(CONFIG_NAME, "ensemble_scheduling.step", partial(check_circle, model.path.name, steps))


def _add(model: Examined, where: str, sentence: str, mend: str = "") -> None:
    model.problems.append(Located(CONFIG_NAME, Finding(f"ensemble_scheduling.{where}", sentence, mend)))
