"""What `mme config check` finds at a path, and how it looks: as text for people, or as values for JSON.

A path is a model's directory, a repository of several, or an archive, which is unpacked into a temporary folder as the
server would unpack it. Problems whose own sentence does not say what to do are told by the field they are about.
"""

from __future__ import annotations

import re
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from model_handlers.config.convert import config_json
from model_handlers.config.pbtxt import config_text
from model_handlers.errors import MmeError, invalid_argument
from model_handlers.registry import served_backends
from serve.loading.check import Examined, Finding, examine, examine_ensembles
from serve.sources.archive import extract
from serve.sources.layout import advice, candidates_in, models_in
from serve.sources.store import ARCHIVE_SUFFIX

if TYPE_CHECKING:
    from collections.abc import Iterator

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
    models: list[ModelReport] = field(default_factory=list)
    problems: list[Finding] = field(default_factory=list)  # of the whole

    @property
    def count(self) -> int:
        """How many problems there are: with none all of it would be served."""
        return len(self.problems) + sum(len(checked.model.problems) for checked in self.models)


class ModelReport(NamedTuple):
    """A model of a report: its role is `model`, or `entry` or `member` of an archive of several."""

    role: str
    model: Examined
    files: dict[str, int]  # bytes by path below its directory

    @classmethod
    def of(cls, role: str, model: Examined) -> ModelReport:
        files = sorted(file for file in model.path.rglob("*") if file.is_file())
        return cls(role, model, {file.relative_to(model.path).as_posix(): file.stat().st_size for file in files})


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
        with tempfile.TemporaryDirectory(prefix="mme-check-") as base:
            folder = Path(base) / "archive"
            extract(path.open("rb"), folder, name=path.name)
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
    beside: list[Path] = []
    if alone and models[0].config is not None and models[0].config.ensemble:
        beside = [each for each in candidates_in(path.parent, scripts) if each != path]
    examine_ensembles([*models, *(examine(each, each.name, scripts, strict_name=True) for each in beside)])
    report.models = [ModelReport.of("model", model) for model in models]
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
    report.models = list(map(ModelReport.of, roles, models))


def _nothing(path: Path) -> Finding:
    inside = sorted(each.name for each in path.iterdir())
    usual = "a model is a directory with config.pbtxt and numbered versions, or with code/inference.py"
    mend = advice(path).removeprefix("; ") or usual
    if any(name.endswith(ARCHIVE_SUFFIX) for name in inside):
        mend = f"archives are checked by their own names: mme config check {path}/*{ARCHIVE_SUFFIX}"
    return Finding("", f"no model found in {path}, which holds {', '.join(inside[:10]) or 'nothing'}", mend)


def lines(report: Report, *, quiet: bool = False) -> Iterator[Line]:
    yield HEAD, f"{report.source}: {_counted(report)}"
    for finding in report.problems:
        yield from _problem_lines(finding)
    for checked in report.models:
        if not quiet:
            yield PLAIN, ""
        yield from _model_lines(checked, quiet=quiet)


def _counted(report: Report) -> str:
    models = "1 model" if len(report.models) == 1 else f"{len(report.models)} models"
    problems = {0: "no problem", 1: "1 problem"}.get(report.count, f"{report.count} problems")
    return f"{report.kind} of {models}, {problems}" if report.kind != "model" else f"a model, {problems}"


def _model_lines(checked: ModelReport, *, quiet: bool) -> Iterator[Line]:
    role, model, files = checked
    what = f", {role} of the archive" if role in {"entry", "member"} else ""
    if model.problems or not quiet:
        yield (PROBLEM if model.problems else GOOD), f"{model.name}{what}: {_summary(model)}"
    for finding in model.problems:
        yield from _problem_lines(finding)
    if quiet:
        return
    for finding in model.notes:
        yield NOTE, f"  note: {_sentence(finding)}"
    yield PLAIN, "  files"
    width = max(map(len, files), default=0)
    for name, size in files.items():
        yield PLAIN, f"    {name:{width}}  {size:>12,} B"
    if model.config is not None:
        yield PLAIN, f"  configuration{', as far as it is understood' if model.problems else ' in effect'}"
        for line in config_text(model.config).rstrip().splitlines():
            yield PLAIN, f"    {line}"


def _summary(model: Examined) -> str:
    config = model.config
    if config is None:
        return "its configuration can't be read"
    kind = config.backend or config.platform or "no backend"
    if config.ensemble:
        kind = f"ensemble of {', '.join(dict.fromkeys(step.model_name for step in config.ensemble))}"
    return f"{kind}, versions {', '.join(map(str, model.versions)) or 'none'}"


def _problem_lines(finding: Finding) -> Iterator[Line]:
    yield PROBLEM, f"  {_sentence(finding)}"
    if mend := finding.mend or mend_for(finding.field):
        yield MEND, f"      → {mend}"


def _sentence(finding: Finding) -> str:
    return ": ".join(filter(None, (finding.file, finding.field, finding.sentence)))


def document(report: Report) -> dict[str, Any]:
    return {
        "source": report.source,
        "kind": report.kind,
        "ok": not report.count,
        "problems": [_finding(finding) for finding in report.problems],
        "models": [
            {
                "name": model.name,
                "role": role,
                "ok": not model.problems,
                "versions": [str(version) for version in model.versions],
                "problems": [_finding(finding) for finding in model.problems],
                "notes": [_finding(finding) for finding in model.notes],
                "files": files,
                "config": None if model.config is None else config_json(model.config),
            }
            for role, model, files in report.models
        ],
    }


def _finding(finding: Finding) -> dict[str, str]:
    mend = finding.mend or mend_for(finding.field)
    return {"file": finding.file, "field": finding.field, "problem": finding.sentence, "mend": mend}


def mend_for(field: str) -> str:
    """What to do about that field, "" where that is unknown."""
    return next((text for pattern, text in _MENDS if re.fullmatch(pattern, field)), "")
