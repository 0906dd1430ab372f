"""How log lines look: text for a person at a terminal, one JSON object a line for everything else, or as Triton's.

Everybody logs with the standard library (`logging.getLogger("mme.…")`, facts in `extra=`), gunicorn and botocore too;
all of it goes through one handler on the root logger, where structlog renders it, and which waits for no reader. A
traceback is one field of its line, so that a log group never sees it cut into pieces. There is no access log: a line
for every ping costs money and says nothing.

`configure` is called once in each process, before threads start; the handler locks by itself. A `LogControl` changes
later what is logged, and how, in the process that serves.
"""

from __future__ import annotations

import functools
import json
import logging.config
import sys
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import orjson

from container.log_pipe import PipeHandler
from container.log_settings import LogSettings
from container.settings.kinds import LogFormat
from model_handlers.importing import import_without

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import TextIO

    import structlog
    from structlog.typing import EventDict, Processor, WrappedLogger
else:
    structlog = import_without("structlog", "rich")  # 80 modules, for tracebacks that we do not want

# Libraries log every request and header at debug level, credentials among them: below info, only ours are heard.
_OURS = ("mme", "gunicorn.error")
_HANDLER = "stream"  # by which it is found again
_NO_FACTS = ("_record", "_from_structlog", "event", "level", "logger")


def configure(level: str, format: LogFormat, stream: TextIO | None = None) -> None:  # noqa: A002 - the setting's name
    """Send every logger of this process through one handler.

    Args:
        level: `debug`, `info`, `warning`, `error` or `critical`.
        format: AUTO is text where `stream` is a terminal, JSON elsewhere.
        stream: where lines go; standard error by default.
    """
    logging.config.dictConfig(logging_config(level, format, stream))
    logging.captureWarnings(True)
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.stdlib.filter_by_level,
            *_shared_processors(),
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )


def logging_config(level: str, format: LogFormat, stream: TextIO | None = None) -> dict[str, Any]:  # noqa: A002
    """The same as a dictionary for `logging.config.dictConfig`; gunicorn is given this one."""
    stream = stream or sys.stderr
    quiet, lines = _quiet(logging.getLevelNamesMapping()[level.upper()]), _chosen(format, stream)
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"line": {"()": _formatter, "colours": stream.isatty(), "lines": lines}},
        "handlers": {_HANDLER: {"()": PipeHandler, "formatter": "line", "stream": stream}},
        "root": {"level": quiet, "handlers": [_HANDLER]},
        "loggers": {
            **{name: {"level": level.upper(), "handlers": [], "propagate": True} for name in _OURS},
            "gunicorn.access": {"level": "CRITICAL", "handlers": [], "propagate": False},
        },
    }


class LogControl:
    """What this process logs at the moment, and how: read and changed by clients. On the event loop.

    Args:
        level, format: as `configure` had them.
    """

    def __init__(self, level: str, format: LogFormat) -> None:  # noqa: A002 - the setting's name
        self._now = LogSettings.of_level(level, _chosen(format, sys.stderr))

    @property
    def dropped(self) -> int:
        """Lines that nothing read and that were dropped."""
        return sum(handler.dropped for handler in logging.getLogger().handlers if isinstance(handler, PipeHandler))

    def document(self) -> dict[str, Any]:
        """As a client reads it."""
        return self._now.as_document()

    def change(self, wanted: Mapping[str, Any]) -> None:
        """Log something else from now on, or otherwise.

        Raises:
            MmeError: see `LogSettings.changed`.
        """
        self._now = now = self._now.changed(wanted)
        for name in _OURS:
            logging.getLogger(name).setLevel(now.level)
        logging.getLogger().setLevel(_quiet(now.level))
        for handler in logging.getLogger().handlers:
            if handler.name == _HANDLER and isinstance(handler, PipeHandler):
                handler.filters = [lambda record: now.lets_through(record.levelno)]
                handler.setFormatter(_formatter(colours=handler.stream.isatty(), lines=now.format))


def _chosen(format: LogFormat, stream: TextIO) -> LogFormat:  # noqa: A002 - the setting's name
    if format is not LogFormat.AUTO:
        return format
    return LogFormat.TEXT if stream.isatty() else LogFormat.JSON


def _quiet(level: int) -> int:
    return max(level, logging.INFO)


def _shared_processors() -> list[Processor]:
    """What happens to a line whoever wrote it."""
    return [
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.ExtraAdder(),
        structlog.stdlib.PositionalArgumentsFormatter(),
    ]


def _formatter(*, colours: bool, lines: LogFormat) -> logging.Formatter:
    formatter, traceback = structlog.stdlib.ProcessorFormatter, structlog.processors.format_exc_info
    chains: dict[LogFormat, list[Processor]] = {
        LogFormat.TEXT: [
            _timestamp,
            formatter.remove_processors_meta,
            *([] if colours else [_in_one_line]),
            _text_lines(colours=colours),
        ],
        LogFormat.JSON: [_timestamp, formatter.remove_processors_meta, traceback, _message_first, _json_lines()],
        LogFormat.TRITON: [traceback, functools.partial(_triton_line, "{severity}{written:%m%d %H:%M:%S.%f}")],
        LogFormat.ISO8601: [traceback, functools.partial(_triton_line, "{written:%Y-%m-%dT%H:%M:%SZ} {severity}")],
    }
    return formatter(foreign_pre_chain=_shared_processors(), processors=chains[lines])


def _timestamp(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    """When the line was written (not when it was rendered): ISO 8601, UTC, milliseconds."""
    written = datetime.fromtimestamp(event["_record"].created, UTC)
    event["timestamp"] = written.isoformat(timespec="milliseconds").replace("+00:00", "Z")
    return event


def _in_one_line(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    """In a file a sentence of several lines, as a model's error is, would leave its model's name on the last one."""
    lines = str(event["event"]).splitlines()
    if len(lines) > 1:
        event["event"] = " | ".join(line for line in map(str.strip, lines) if line)
    return event


def _message_first(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    """The fields that every line has in front, the sentence under the name that log viewers look for."""
    front = {key: event.pop(key, None) for key in ("timestamp", "level", "logger")}
    return {**front, "message": event.pop("event"), **event}


def _json_lines() -> Processor:
    return structlog.processors.JSONRenderer(serializer=_json)


def _triton_line(begin: str, _logger: WrappedLogger, _method: str, event: EventDict) -> str:
    """`I1114 22:13:20.250000 17 engine.py:33] "loaded"`, and facts behind it; quoted, so that a line is one line."""
    record: logging.LogRecord = event["_record"]
    severity = "E" if record.levelno >= logging.ERROR else "W" if record.levelno >= logging.WARNING else "I"
    written = datetime.fromtimestamp(record.created, UTC)
    facts = [f" {name}={_json(fact)}" for name, fact in event.items() if name not in _NO_FACTS]
    place = f"{record.process} {record.filename}:{record.lineno}]"
    return f"{begin.format(severity=severity, written=written)} {place} {_json(event['event'])}{''.join(facts)}"


def _json(event: Any, **_: object) -> str:
    try:
        return orjson.dumps(event, default=repr, option=orjson.OPT_NON_STR_KEYS).decode()
    except TypeError:  # a lone surrogate out of a file name, an integer over 64 bits
        return json.dumps(event, default=repr, skipkeys=True)


def _text_lines(*, colours: bool) -> Processor:
    # plain_traceback: with rich installed, structlog would print the values of local variables, tensors among them
    return structlog.dev.ConsoleRenderer(colors=colours, exception_formatter=structlog.dev.plain_traceback)
