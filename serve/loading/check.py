"""Everything that is wrong with a model's directory, and not only the first of it: for commands, not for the server.

A load stops at the first rule that is broken; the author of a configuration wants all of them at once. So values that
no enum names and the first field that does not exist are named, and the rest is judged without them. What follows from
another problem alone may be missing until that one is fixed. `understand` reads a config.pbtxt; `examine` does what a
load does up to the point where memory is taken, with every problem told where it is. Neither runs code of models.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from google.protobuf import text_format

from model_handlers.config.bounds import excesses
from model_handlers.config.model_config import Guess, ModelConfig, warn_once
from model_handlers.config.pbtxt import (
    Support,
    check_escapes,
    field_error,
    gaps,
    hint_for,
    is_named_only,
    place_of,
    read_text,
    set_fields,
    syntax_error,
    translated,
)
from model_handlers.config.validate import PLATFORM, broken_rules, check_named, normalise
from model_handlers.environment import Prebuilt
from model_handlers.errors import Kind, MmeError, RefusedError
from model_handlers.registry import find_backend, handler_for
from model_handlers.tensor import BY_NUMBER
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

    from google.protobuf.message import Message

    from model_handlers.base import Handler, Traits
    from model_handlers.environment import Wanted
    from model_handlers.proto import model_config_pb2 as pb
    from serve.sources.scripts import Scripts


_MOST_VALUES = 50
_NAME = re.compile(r"[A-Za-z_]\w*")
# What stands before the value of an enum: the field, and maybe other values.
_ENUM_VALUE = re.compile(r"(\w+)\s*:\s*\[?(?:[^\[\]{}<>:]*,)?\s*$")
_FP32 = 11


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong, or worth a word."""

    field: str  # its path, "" for none
    sentence: str
    mend: str = ""  # what to do
    file: str = ""  # the file that it is about, relative to the model's directory; "" for the whole


@dataclass(frozen=True, slots=True)
class Understood:
    """What a text says."""

    # the configuration, defaults filled in where nothing is wrong; None where the text can't be read at all
    config: ModelConfig | None
    problems: tuple[Finding, ...] = ()  # what keeps the model from being loaded
    notes: tuple[Finding, ...] = ()  # fields that change nothing here


def understand(text: str, *, model: str, strict_name: bool = False) -> Understood:
    """Read a config.pbtxt as far as it can be read. Arguments are those of `pbtxt.parse_config`."""
    problems: list[Finding] = []
    message = _parsed(text, model, problems)
    if message is None:
        return Understood(None, tuple(problems))
    _take_out_excesses(message, problems)
    notes = _judge_fields(message, model, problems)
    if strict_name and message.name and message.name != model:
        sentence = (
            f"unexpected directory name '{model}' for model '{message.name}', directory name must equal model name"
        )
        problems.append(Finding("name", sentence, f'write name: "{model}", or leave the field out'))
    _complete_tensors(message, model, problems)
    config = _translated(message, model, problems)
    problems += [Finding(place, error.message) for place, error in broken_rules(config)]
    return Understood(config if problems else normalise(config), tuple(problems), notes)


def _parsed(text: str, model: str, problems: list[Finding]) -> pb.ModelConfig | None:
    try:
        check_escapes(text, model)
    except MmeError as error:
        problems.append(Finding("", _bare(error, model)))
        return None
    skips_fields, place = False, -1
    for _ in range(_MOST_VALUES):
        try:
            return read_text(text, allow_unknown_field=skips_fields)
        except text_format.ParseError as error:
            last, place = place, place_of(text, error)
            if place == last:  # nothing that can be skipped or replaced
                return None
            name, enum = _word_at(text, place)
            problems.append(Finding(enum or name, _bare(syntax_error(error, model), model), hint_for(text, error)))
            if enum:
                stand_in = str(_FP32) if enum == "data_type" else "0"  # as long: later errors keep their place
                text = text[:place] + stand_in.ljust(len(name)) + text[place + len(name) :]
            else:
                skips_fields = True
    return None


def _word_at(text: str, place: int) -> tuple[str, str]:
    """The name at a place, and the field whose enum it is a value of; "" for none."""
    name = _NAME.match(text, place)
    before = _ENUM_VALUE.search(text, 0, place) if name else None
    return name[0] if name else "", before[1] if before else ""


def _bare(error: MmeError, model: str) -> str:
    # Without the model and the file: where it is shown, those stand beside it.
    return error.message.removeprefix(f"model '{model}': config.pbtxt ")


def _take_out_excesses(message: pb.ModelConfig, problems: list[Finding]) -> None:
    for excess in tuple(excesses(message)):
        problems.append(Finding(excess.path, excess.sentence, "mme config bounds lists what each field may hold"))
        _clear(message, excess.path)


def _judge_fields(message: pb.ModelConfig, model: str, problems: list[Finding]) -> tuple[Finding, ...]:
    """Take out the fields that are not known, and return what to note of others."""
    unknown, notes = [], []
    for path, descriptor, value, rule in set_fields(message):
        error = field_error(path, descriptor, value, rule, model)
        if error is not None:
            problems.append(Finding(path, _bare(error, model), "remove it" if rule.support is Support.REFUSED else ""))
            if rule.support is not Support.REFUSED:
                unknown.append(path)
        elif rule.support is Support.HARMLESS:
            notes.append(Finding(path, f"is ignored: {rule.reason}"))
    for path in unknown:
        _clear(message, path)
    return tuple(notes)


def _complete_tensors(message: pb.ModelConfig, model: str, problems: list[Finding]) -> None:
    # Tensors without a name or a type get one, so that what else is wrong with them is told as well.
    for what in ("input", "output"):
        for index, tensor in enumerate(getattr(message, what)):
            if not tensor.name:
                problems.append(Finding(f"{what}[{index}].name", f"model {what} must specify 'name' for {model}"))
                tensor.name = f"{what}[{index}]"
            if tensor.data_type not in BY_NUMBER and not is_named_only(tensor, message):
                sentence = f"model {what} '{tensor.name}' must specify 'data_type' for {model}"
                problems.append(Finding(f"{what}[{index}].data_type", sentence))
                tensor.data_type = _FP32


def _translated(message: pb.ModelConfig, model: str, problems: list[Finding]) -> ModelConfig:
    for place, error in tuple(gaps(message, model)):
        problems.append(Finding(place, error.message))
        _clear(message, place)
    return translated(message, model)


def _clear(message: Message, path: str) -> None:
    # The field of the message that holds what is at a path.
    message.ClearField(re.split(r"[.\[]", path)[0])


_GUESSED = {
    Guess.OTHER: "is not written, and the names of the first dimensions are none of a batch: requests are executed one "
    "by one. Write 0 and whole shapes to say so, or a number to have them batched",
    Guess.UNKNOWN: "is not written, and nothing says whether the first dimension is the batch: requests are executed "
    "one by one until batches have given the same answers. Write a number to have them batched from the start, or 0",
}


@dataclass(slots=True)
class Examined:
    """A model's directory and what is to be said of it."""

    path: Path
    name: str
    # as far as it could be understood; completed from the model file where nothing is wrong
    config: ModelConfig | None = None
    versions: dict[int, Path] = field(default_factory=dict)  # those that would be served
    problems: list[Finding] = field(default_factory=list)  # what keeps it from being loaded; notes: the rest
    notes: list[Finding] = field(default_factory=list)

    def problem(self, field: str, sentence: str, mend: str = "", *, file: str = CONFIG_NAME) -> None:
        self.problems.append(Finding(field, sentence, mend, file))

    def note(self, field: str, sentence: str, mend: str = "", *, file: str = CONFIG_NAME) -> None:
        self.notes.append(Finding(field, sentence, mend, file))

    def attempt(self, field: str, action: Callable[[], object], *, file: str = CONFIG_NAME) -> bool:
        try:
            action()
        except MmeError as error:
            self.problem(field, error.message, file=file)
            return False
        return True


def examine(path: Path, name: str, scripts: Scripts, *, strict_name: bool) -> Examined:
    """Look at one model. With `strict_name` its configuration may call it nothing else, as in a repository."""
    found = Examined(path, name)
    file = config_file(path, scripts)
    found.attempt("", lambda: _read(found, file, strict_name=strict_name), file=file.name)
    if found.config is None:
        return found
    _note_versions(found, found.config)
    if not found.attempt("backend", partial(_select, found, found.config, scripts), file=file.name):
        return found
    is_ensemble = found.config.platform == PLATFORM
    backend, traits = ("", None) if is_ensemble else _backend(found, found.config)
    for field_name, check in asked_checks(found.config, backend, traits):
        found.attempt(field_name, check, file=file.name)
    for parameter, sentence in unknown_parameters(found.config):
        found.note(f"parameters['{parameter}']", sentence, file=file.name)
    if is_ensemble:
        for error in namespace_errors(found.config) if not strict_name else ():
            found.problem("ensemble_scheduling.step", error.message, file=file.name)
        return found
    found.attempt("", partial(check_named, found.config), file=file.name)
    for error in missing_files(ModelDirectory(name, path, found.config, found.versions)):
        found.problem("default_model_filename", error.message, file=file.name)
    _look_for_labels(found, found.config)
    for error in checksum_errors(found.config, path):
        found.problem("model_repository_agents", error.message, file=file.name)
    if not found.problems:
        _look_for_environments(found, found.config)
    if not found.problems:
        _hold_against_files(found, found.config)
    return found


def _read(found: Examined, file: Path, *, strict_name: bool) -> None:
    understood = Understood(ModelConfig(name=found.name))
    if file.is_file():
        understood = understand(config_text(file, found.name), model=found.name, strict_name=strict_name)
    else:
        misnamed = misnamed_config(found.path)
        renamed = f"; {misnamed} is not read: rename it" if misnamed else ""
        found.note("", f"there is none: all is taken from the model's files{renamed}")
    found.config = understood.config
    found.problems += [replace(finding, file=file.name) for finding in understood.problems]
    found.notes += [replace(finding, file=file.name) for finding in understood.notes]


def _select(found: Examined, config: ModelConfig, scripts: Scripts) -> None:
    config, available = decided(found.path, config, scripts)
    if config.platform != PLATFORM:
        handler_for(find_backend(config.backend, config.platform, found.name, next(iter(available.values()), None)))
    found.config = config

    def select() -> None:
        found.versions = selected_versions(config, available, found.name, found.path)

    found.attempt("version_policy", select)


def _note_versions(found: Examined, config: ModelConfig) -> None:
    for name in ignored_versions(found.path):
        found.note("", "is not served: a version is a number without leading zeros", file=f"{name}/")
    for version in absent_versions(config, versions_in(found.path)):
        found.note("version_policy", f"names version {version}, whose directory is not there")


def _look_for_labels(found: Examined, config: ModelConfig) -> None:
    for index, spec in enumerate(config.outputs):
        if spec.label_filename and not (found.path / spec.label_filename).is_file():
            sentence = (
                f"there is no file '{spec.label_filename}' in the model's directory, which output '{spec.name}' names"
            )
            found.problem(f"output[{index}].label_filename", sentence)


def _look_for_environments(found: Examined, config: ModelConfig) -> None:
    # What a model brings has to be there; what is put where it looks may come later.
    handler = _handler(found, config)
    directory = ModelDirectory(found.name, found.path, config, found.versions)
    asked: set[Wanted | None] = set()

    def ask() -> None:
        asked.update(asks(handler, config, directory.model_file(version)) for version in found.versions)

    found.attempt("parameters", ask)
    for wanted in asked:
        if isinstance(wanted, Prebuilt) and not os.path.exists(wanted.path):  # noqa: PTH110 - too long a name is no error
            tell = found.problem if wanted.brought else found.note
            tell("parameters", f"{wanted.subject} is not there", wanted.remedy)


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
            for sentence in warnings:
                found.note("", sentence)
        except MmeError as error:
            # without the framework, or without running the model's code
            if error.kind is Kind.UNSUPPORTED and not isinstance(error, RefusedError):
                found.note("", f"not checked: {error.message}", file=shown)
            else:
                found.problem("", error.message, file=shown)
    found.config = completed
    if completed.guess in _GUESSED:
        found.note("max_batch_size", _GUESSED[completed.guess])
    for index, sample in enumerate(completed.model_warmup):
        alone = replace(completed, model_warmup=(sample,))
        found.attempt(f"model_warmup[{index}]", partial(Warmup, alone, found.path))
    found.attempt("sequence_batching.state", partial(initial_states, completed, found.path))


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
            where = f"ensemble_scheduling.step[{index}]"
            if step.model_namespace not in {"", model.path.parent.name, str(model.path.parent)}:
                model.note(f"{where}.model_namespace", "not checked: it is another repository")
                members.append(None)
                continue
            part = by_name.get(step.model_name)
            if part is None:
                missing = not_available(model.name, [step.model_name])
                model.problem(f"{where}.model_name", missing.message, f"put {step.model_name}/ beside it")
            elif step.version is not None and step.version not in part.versions:
                which = (
                    f"ensemble '{model.name}' depends on '{step.model_name}' whose required version {step.version} is"
                )
                model.problem(f"{where}.model_version", f"{which} not loaded", "see its version_policy")
            sound = part is not None and not part.problems and part.config is not None and part.config.outputs
            members.append(part.config if part is not None and sound else None)
        for field_name, error in member_problems(model.config, members):
            model.problem(field_name, error.message)
        model.attempt("ensemble_scheduling.step", partial(check_circle, model.path.name, steps))
