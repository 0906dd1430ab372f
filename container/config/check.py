"""From a path to a report: which models lie there, and what is to be said of each.

A path is a model's directory, a repository of several, or an archive, which is unpacked into a temporary folder as the
server would unpack it. Knows files and models; `report` says how it looks.
"""

from __future__ import annotations

import contextlib
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from model_handlers.config.findings import Finding
from model_handlers.errors import MmeError, invalid_argument
from serve.loading.check import Examined, examine, examine_ensembles
from serve.sources.archive import extract
from serve.sources.layout import advice, candidates_in, models_in
from serve.sources.store import ARCHIVE_SUFFIX

if TYPE_CHECKING:
    from collections.abc import Iterator

    from serve.sources.scripts import Scripts


@dataclass(slots=True)
class Report:
    """What is to be said of one path.

    Attributes:
        source: the path, as it was given.
        kind: "model", "repository" or "archive".
        models: each with its role: "model", or in an archive of several "entry" or "member".
        files: of each model, (path below its directory, bytes).
        problems: of the whole.
    """

    source: str
    kind: str
    models: list[tuple[str, Examined]] = field(default_factory=list)
    files: list[list[tuple[str, int]]] = field(default_factory=list)
    problems: list[Finding] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether all of it would be served."""
        return not self.problems and not any(model.problems for _, model in self.models)


def check(source: str, scripts: Scripts) -> Report:
    """Look at one path.

    Raises:
        MmeError: INVALID_ARGUMENT when there is nothing that could hold a model.
    """
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
