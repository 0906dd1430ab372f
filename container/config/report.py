"""What a report looks like: as text for people, or as values for JSON. PURE."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from container.config.mend import mend_for
from model_handlers.config_json import config_json
from model_handlers.pbtxt import config_text

if TYPE_CHECKING:
    from collections.abc import Iterator

    from container.config.check import Report
    from model_handlers.config import ModelConfig
    from model_handlers.pbtxt.problems import Finding
    from serve.targets.model_check import Examined, Located

# The style of a line on a terminal, by what it says.
PROBLEM, MEND, NOTE, HEAD, PLAIN, GOOD = "bold red", "yellow", "cyan", "bold", "", "green"

Line = tuple[str, str]  # the style, and the text


def lines(report: Report, *, quiet: bool = False) -> Iterator[Line]:
    """The report, line by line."""
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
        return f"ensemble of {', '.join(dict.fromkeys(step.model for step in config.ensemble))}"
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
    """The report as values for JSON."""
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
