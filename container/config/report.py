"""What a report looks like: as text for people, or as values for JSON. PURE.

Problems whose own sentence does not say what to do, as those in Triton's words, are told by the field they are about.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from model_handlers.config.convert import config_json
from model_handlers.config.pbtxt import config_text
from model_handlers.registry import served_backends

if TYPE_CHECKING:
    from collections.abc import Iterator

    from container.config.check import Report
    from model_handlers.config.findings import Finding
    from model_handlers.config.model_config import ModelConfig
    from serve.loading.check import Examined, Located

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


def mend_for(field: str) -> str:
    """What to do about that field, "" where nobody knows."""
    return next((text for pattern, text in _MENDS if re.fullmatch(pattern, field)), "")
