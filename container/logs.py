"""How log lines look: text for a person at a terminal, one JSON object a line for everything else.

Everybody logs with the standard library (`logging.getLogger("mme.…")`, facts in `extra=`), gunicorn and botocore too;
all of it goes through one handler on the root logger, where structlog renders it. A traceback is one field of its line,
so that a log group never sees it cut into pieces. There is no access log: a line for every ping costs money and says
nothing.

`configure` is called once in each process, before threads start; the handler locks by itself.
"""

from __future__ import annotations

import json
import logging.config
import sys
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import orjson
import structlog

from container.settings.values import LogFormat

if TYPE_CHECKING:
    from typing import TextIO

    from structlog.typing import EventDict, Processor, WrappedLogger

# They tell of every request and every header at debug level, credentials among them; never below info.
_TALKATIVE = ("boto3", "botocore", "s3transfer", "urllib3", "asyncio")


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
    terminal = stream.isatty()
    as_text = format is LogFormat.TEXT or (format is LogFormat.AUTO and terminal)
    quiet = logging.getLevelName(max(logging.getLevelNamesMapping()[level.upper()], logging.INFO))
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"line": {"()": _formatter, "colours": terminal, "as_text": as_text}},
        "handlers": {"stream": {"class": "logging.StreamHandler", "formatter": "line", "stream": stream}},
        "root": {"level": level.upper(), "handlers": ["stream"]},
        "loggers": {
            "gunicorn.error": {"level": level.upper(), "handlers": [], "propagate": True},
            "gunicorn.access": {"level": "CRITICAL", "handlers": [], "propagate": False},
            **{name: {"level": quiet} for name in _TALKATIVE},
        },
    }


def _shared_processors() -> list[Processor]:
    """What happens to a line whoever wrote it."""
    return [
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.ExtraAdder(),
        structlog.stdlib.PositionalArgumentsFormatter(),
    ]


def _formatter(*, colours: bool, as_text: bool) -> logging.Formatter:
    last: list[Processor] = [_json_lines()] if not as_text else [_text_lines(colours=colours)]
    before: list[Processor] = [] if as_text else [structlog.processors.format_exc_info, _message_first]
    return structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=_shared_processors(),
        processors=[_timestamp, structlog.stdlib.ProcessorFormatter.remove_processors_meta, *before, *last],
    )


def _timestamp(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    """When the line was written (not when it was rendered): ISO 8601, UTC, milliseconds."""
    written = datetime.fromtimestamp(event["_record"].created, UTC)
    event["timestamp"] = written.isoformat(timespec="milliseconds").replace("+00:00", "Z")
    return event


def _message_first(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    """The fields that every line has in front, the sentence under the name that log viewers look for."""
    front = {key: event.pop(key, None) for key in ("timestamp", "level", "logger")}
    return {**front, "message": event.pop("event"), **event}


def _json_lines() -> Processor:
    return structlog.processors.JSONRenderer(serializer=_json)


def _json(event: EventDict, **_: object) -> str:
    try:
        return orjson.dumps(event, default=repr, option=orjson.OPT_NON_STR_KEYS).decode()
    except TypeError:  # a lone surrogate out of a file name, an integer over 64 bits
        return json.dumps(event, default=repr, skipkeys=True)


def _text_lines(*, colours: bool) -> Processor:
    # plain_traceback: with rich installed, structlog would print the values of local variables, tensors among them
    return structlog.dev.ConsoleRenderer(colors=colours, exception_formatter=structlog.dev.plain_traceback)
