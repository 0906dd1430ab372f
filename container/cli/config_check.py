"""What `mme config check` finds at a path, and how it looks: as text for people, or as values for JSON.

A path is a model's directory, a repository of several, or an archive, which is unpacked into a temporary folder as the
server would unpack it. Problems whose own sentence does not say what to do are told by the field they are about.
"""

from __future__ import annotations

import contextlib
import re
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from model_handlers.config.convert import config_json
from model_handlers.config.findings import Finding
from model_handlers.config.pbtxt import config_text
from model_handlers.errors import MmeError, invalid_argument
from model_handlers.registry import served_backends
from serve.loading.check import Examined, examine, examine_ensembles
from serve.sources.archive import extract
from serve.sources.layout import advice, candidates_in, models_in
from serve.sources.store import ARCHIVE_SUFFIX

if TYPE_CHECKING:
    from collections.abc import Iterator

    from model_handlers.config.model_config import ModelConfig
    from serve.loading.check import Located
    from serve.sources.scripts import Scripts

# The style of a line on a terminal, by what it says.
PROBLEM, MEND, NOTE, HEAD, PLAIN, GOOD = "bold red", "yellow", "cyan", "bold", "", "green"

Line = tuple[str, str]  # the style, and the text

_TENSOR = (
    "name it as the model does, with data_type (TYPE_FP32, …) and dims: the shape without the batch dimension, -1 "
    "where it varies"
)
_ENSEMBLE = (
    "every tensor that a step reads is an input of the ensemble or another step's output, and all that is written is "
    "read or is an output"
)
_MENDS = (
    (r"max_batch_size", "0 for a model whose tensors have no batch dimension, else the largest batch it takes"),
    (r"(input|output)\[\d+\]\.label_filename", "put the file beside config.pbtxt, one label a line"),
    (r"(input|output)(\[\d+\].*)?", _TENSOR),
    (
        r"data_type",
        "one of TYPE_BOOL, TYPE_UINT8 … TYPE_INT64, TYPE_FP16, TYPE_FP32, TYPE_FP64, TYPE_BF16, TYPE_STRING",
    ),
    (r"instance_group.*", "a count of 1 or more; gpus only with KIND_GPU or KIND_AUTO"),
    (r"dynamic_batching.*", "sizes between 1 and max_batch_size, priorities between 1 and priority_levels"),
    (r"sequence_batching.*", "direct or oldest, controls with false and true values, states as the model names them"),
    (
        r"version_policy.*",
        "latest { num_versions: 1 }, all { } or specific { versions: [ 1 ] }, of directories that exist",
    ),
    (r"default_model_filename", "the name of the model file in each version directory"),
    (r"model_warmup.*", "each input with data_type, dims without -1, and zero_data, random_data or input_data_file"),
    (r"(batch_input|batch_output).*", "one source_input of the model's inputs, and targets that the model has"),
    (r"ensemble_scheduling.*", _ENSEMBLE),
    (r"(backend|platform)", f"name one of: {', '.join(dict.fromkeys(served_backends()))}"),
    (r"response_cache", "only for models that answer every request once, and by its inputs alone"),
)


@dataclass(slots=True)
class Report:
    """What is to be said of one path."""

    source: str
    kind: str  # model, repository or archive
    models: list[tuple[str, Examined]] = field(
        default_factory=list
    )  # role: model; of an archive of several entry, member
    files: list[list[tuple[str, int]]] = field(default_factory=list)  # of each model: path below its directory, bytes
    problems: list[Finding] = field(default_factory=list)  # of the whole

    @property
    def ok(self) -> bool:
        """Whether all of it would be served."""
        return not self.problems and not any(model.problems for _, model in self.models)


def check(source: str, scripts: Scripts) -> Report:
    path = Path(source)
    if path.is_dir():
        return _check_directory(source, path.resolve(), scripts)
    if not path.is_file():
        raise invalid_argument(f"'{source}' does not exist: name a model directory, a repository or an archive")
    if not source.endswith(ARCHIVE_SUFFIX):
        raise invalid_argument(f"'{source}' is neither a directory nor an archive that ends in {ARCHIVE_SUFFIX}")
    report = Report(source, "archive")
    try:
        with _unpacked(path) as folder:
            _check_archive(report, folder, path.name, scripts)
    except MmeError as error:
        report.problems.append(Finding("", error.message))
    return report


def _check_directory(source: str, path: Path, scripts: Scripts) -> Report:
    found = candidates_in(path, scripts)
    alone = found == [path]
    report = Report(source, "model" if alone else "repository")
    if not found:
        report.problems.append(_nothing(path))
    models = [examine(each, each.name, scripts, strict_name=True) for each in found]
    if alone and models[0].config is not None and models[0].config.ensemble:
        beside = [each for each in candidates_in(path.parent, scripts) if each != path]
        examine_ensembles([*models, *(examine(each, each.name, scripts, strict_name=True) for each in beside)])
    else:
        examine_ensembles(models)
    _take(report, [("model", model) for model in models])
    return report


def _check_archive(report: Report, folder: Path, name: str, scripts: Scripts) -> None:
    found = candidates_in(folder, scripts)
    try:
        found = models_in(folder, name, scripts)
        roles = ["entry" if len(found) > 1 else "model", *["member"] * (len(found) - 1)]
    except MmeError as error:  # of a configuration that can't be read, which is told below, or of the whole
        roles = ["model"] * len(found)
        unreadable = [examine(each, each.name, scripts, strict_name=False) for each in found]
        if not any(model.problems for model in unreadable):
            report.problems.append(Finding("", error.message))
    called = name.removesuffix(ARCHIVE_SUFFIX)
    models = [examine(each, called if each == folder else each.name, scripts, strict_name=False) for each in found]
    examine_ensembles(models)
    _take(report, list(zip(roles, models, strict=True)))


def _take(report: Report, models: list[tuple[str, Examined]]) -> None:
    report.models = models
    report.files = [_files(model.path) for _, model in models]


def _files(path: Path) -> list[tuple[str, int]]:
    files = sorted(file for file in path.rglob("*") if file.is_file())
    return [(file.relative_to(path).as_posix(), file.stat().st_size) for file in files]


def _nothing(path: Path) -> Finding:
    inside = sorted(each.name for each in path.iterdir())
    usual = "a model is a directory with config.pbtxt and numbered versions, or with code/inference.py"
    mend = advice(path).removeprefix("; ") or usual
    if any(name.endswith(ARCHIVE_SUFFIX) for name in inside):
        mend = f"archives are checked by their own names: mme config check {path}/*{ARCHIVE_SUFFIX}"
    return Finding("", f"no model found in {path}, which holds {', '.join(inside[:10]) or 'nothing'}", mend)


@contextlib.contextmanager
def _unpacked(archive: Path) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="mme-check-") as base:
        folder = Path(base) / "archive"
        extract(archive.open("rb"), folder, name=archive.name)
        yield folder


def lines(report: Report, *, quiet: bool = False) -> Iterator[Line]:
    yield HEAD, f"{report.source}: {_counted(report)}"
    for finding in report.problems:
        yield from _finding_lines("", finding)
    for (role, model), files in zip(report.models, report.files, strict=True):
        if not quiet:
            yield PLAIN, ""
        yield from _model_lines(role, model, files, quiet=quiet)


def _counted(report: Report) -> str:
    count = len(report.problems) + sum(len(model.problems) for _, model in report.models)
    models = "1 model" if len(report.models) == 1 else f"{len(report.models)} models"
    problems = "no problem" if not count else "1 problem" if count == 1 else f"{count} problems"
    return f"{report.kind} of {models}, {problems}" if report.kind != "model" else f"a model, {problems}"


def _model_lines(role: str, model: Examined, files: list[tuple[str, int]], *, quiet: bool) -> Iterator[Line]:
    what = f", {role} of the archive" if role in {"entry", "member"} else ""
    if model.problems or not quiet:
        yield (PROBLEM if model.problems else GOOD), f"{model.name}{what}: {_summary(model)}"
    for located in model.problems:
        yield from _finding_lines(located.file, located.finding)
    if quiet:
        return
    for located in model.notes:
        yield NOTE, f"  note: {_place(located)}{located.finding.sentence}"
    yield PLAIN, "  files"
    width = max((len(name) for name, _ in files), default=0)
    for name, size in files:
        yield PLAIN, f"    {name:{width}}  {size:>12,} B"
    if model.config is not None:
        yield (
            PLAIN,
            "  configuration in effect" if not model.problems else "  configuration, as far as it is understood",
        )
        for line in config_text(model.config).rstrip().splitlines():
            yield PLAIN, f"    {line}"


def _summary(model: Examined) -> str:
    if model.config is None:
        return "its configuration can't be read"
    versions = ", ".join(map(str, model.versions)) or "none"
    return f"{_kind(model.config)}, versions {versions}"


def _kind(config: ModelConfig) -> str:
    if config.ensemble:
        return f"ensemble of {', '.join(dict.fromkeys(step.model_name for step in config.ensemble))}"
    return config.backend or config.platform or "no backend"


def _finding_lines(file: str, finding: Finding) -> Iterator[Line]:
    place = ": ".join(part for part in (file, finding.field) if part)
    yield PROBLEM, f"  {place}: {finding.sentence}" if place else f"  {finding.sentence}"
    mend = finding.mend or mend_for(finding.field)
    if mend:
        yield MEND, f"      → {mend}"


def _place(located: Located) -> str:
    place = ": ".join(part for part in (located.file, located.finding.field) if part)
    return f"{place}: " if place else ""


def document(report: Report) -> dict[str, Any]:
    return {
        "source": report.source,
        "kind": report.kind,
        "ok": report.ok,
        "problems": [_finding("", finding) for finding in report.problems],
        "models": [
            {
                "name": model.name,
                "role": role,
                "ok": not model.problems,
                "versions": [str(version) for version in model.versions],
                "problems": [_finding(located.file, located.finding) for located in model.problems],
                "notes": [_finding(located.file, located.finding) for located in model.notes],
                "files": dict(files),
                "config": None if model.config is None else config_json(model.config),
            }
            for (role, model), files in zip(report.models, report.files, strict=True)
        ],
    }


def _finding(file: str, finding: Finding) -> dict[str, str]:
    mend = finding.mend or mend_for(finding.field)
    return {"file": file, "field": finding.field, "problem": finding.sentence, "mend": mend}


def mend_for(field: str) -> str:
    """What to do about that field, "" where that is unknown."""
    return next((text for pattern, text in _MENDS if re.fullmatch(pattern, field)), "")
