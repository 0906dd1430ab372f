"""How log lines look: text for a person at a terminal, one JSON object a line for everything else, or as Triton's.

Everybody logs with the standard library (`logging.getLogger("mme.…")`, facts in `extra=`), gunicorn and botocore too;
all of it goes through one handler on the root logger, which waits for no reader. A
traceback is one field of its line, so that a log group never sees it cut into pieces. There is no access log: a line
for every ping costs money and says nothing.

`configure` is called once in each process, before threads start; the handler locks by itself. A `LogControl` changes
later what is logged, and how, in the process that serves.
"""

from __future__ import annotations

import json
import logging.config
import sys
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any

import orjson

from container.observe.log_pipe import PipeHandler
from container.observe.log_settings import LogSettings
from container.settings.kinds import LogFormat

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import TextIO

# Libraries log every request and header at debug level, credentials among them: below info, only ours are heard.
_OURS = ("mme", "gunicorn.error")
_HANDLER = "stream"  # by which it is found again
_NO_FACTS = frozenset((*logging.makeLogRecord({}).__dict__, "message", "asctime"))  # but what a record has by itself
_COLOURS = {logging.DEBUG: 32, logging.INFO: 32, logging.WARNING: 33, logging.ERROR: 31, logging.CRITICAL: 31}
_QUOTED = frozenset(" \t\r\n=\"'")


def configure(level: str, format: LogFormat, stream: TextIO | None = None) -> None:  # noqa: A002 - the setting's name
    """Send every logger of this process through one handler.

    Args:
        level: `debug`, `info`, `warning`, `error` or `critical`.
        format: AUTO is text where `stream` is a terminal, JSON elsewhere.
        stream: where lines go; standard error by default.
    """
    logging.config.dictConfig(logging_config(level, format, stream))
    logging.captureWarnings(True)


def logging_config(level: str, format: LogFormat, stream: TextIO | None = None) -> dict[str, Any]:  # noqa: A002
    """The same as a dictionary for `logging.config.dictConfig`; gunicorn is given this one."""
    stream = stream or sys.stderr
    quiet, lines = _quiet(logging.getLevelNamesMapping()[level.upper()]), _chosen(format, stream)
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"line": {"()": Lines, "form": lines, "colours": stream.isatty()}},
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
                handler.setFormatter(Lines(now.format, colours=handler.stream.isatty()))


def _chosen(format: LogFormat, stream: TextIO) -> LogFormat:  # noqa: A002 - the setting's name
    if format is not LogFormat.AUTO:
        return format
    return LogFormat.TEXT if stream.isatty() else LogFormat.JSON


def _quiet(level: int) -> int:
    return max(level, logging.INFO)


class Lines(logging.Formatter):
    """Records → lines of one form, with their facts and a traceback.

    Args:
        form: any but AUTO.
        colours: of text; a terminal shows a sentence of several lines as it is, too.
    """

    def __init__(self, form: LogFormat, *, colours: bool) -> None:
        super().__init__()
        self._colours = colours
        forms: dict[LogFormat, Callable[[logging.LogRecord, dict[str, Any], str], str]] = {
            LogFormat.TEXT: self._text,
            LogFormat.JSON: self._object,
            LogFormat.TRITON: partial(self._triton, "{severity}{written:%m%d %H:%M:%S.%f}"),
            LogFormat.ISO8601: partial(self._triton, "{written:%Y-%m-%dT%H:%M:%SZ} {severity}"),
        }
        self._form = forms[form]

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        facts = {name: fact for name, fact in record.__dict__.items() if name not in _NO_FACTS}
        return self._form(record, facts, self.formatException(record.exc_info) if record.exc_info else "")

    def _object(self, record: logging.LogRecord, facts: dict[str, Any], traceback: str) -> str:
        """What every line has in front, the sentence under the name that log viewers look for."""
        return _json(
            {
                "timestamp": _timestamp(record),
                "level": record.levelname.lower(),
                "logger": record.name,
                "message": record.getMessage(),
                **facts,
                **({"exception": traceback} if traceback else {}),
            }
        )

    def _triton(self, begin: str, record: logging.LogRecord, facts: dict[str, Any], traceback: str) -> str:
        """`I1114 22:13:20.250000 17 engine.py:33] "loaded"`, and facts behind it; quoted: a line is one line."""
        severity = "E" if record.levelno >= logging.ERROR else "W" if record.levelno >= logging.WARNING else "I"
        begin = begin.format(severity=severity, written=_written(record))
        facts |= {"exception": traceback} if traceback else {}
        told = "".join([f" {name}={_json(fact)}" for name, fact in facts.items()])
        return f"{begin} {record.process} {record.filename}:{record.lineno}] {_json(record.getMessage())}{told}"

    def _text(self, record: logging.LogRecord, facts: dict[str, Any], traceback: str) -> str:
        """For people. In a file a sentence of several lines would leave its model's name on the last one."""
        sentence = record.getMessage()
        if not self._colours and "\n" in sentence:
            sentence = " | ".join([line for line in map(str.strip, sentence.splitlines()) if line])
        level = self._coloured(f"{record.levelname.lower():9}", _COLOURS.get(record.levelno, 1))
        front = f"{self._coloured(_timestamp(record), 2)} [{level}] {self._coloured(f'{sentence:30}', 1)}"
        told = [f"[{self._coloured(record.name, 34)}]"]
        told += [
            f"{self._coloured(name, 36)}={self._coloured(_shown(fact), 35)}" for name, fact in sorted(facts.items())
        ]
        return f"{front} {' '.join(told)}" + (f"\n{traceback}" if traceback else "")

    def _coloured(self, text: str, colour: int) -> str:
        return f"\x1b[{colour}m{text}\x1b[0m" if self._colours else text


def _written(record: logging.LogRecord) -> datetime:
    return datetime.fromtimestamp(record.created, UTC)


def _timestamp(record: logging.LogRecord) -> str:
    """When the line was written (not when it was rendered): ISO 8601, UTC, milliseconds."""
    return _written(record).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _shown(fact: Any) -> str:
    return repr(fact) if not isinstance(fact, str) or _QUOTED & set(fact) else fact


def _json(value: Any) -> str:
    try:
        return orjson.dumps(value, default=repr, option=orjson.OPT_NON_STR_KEYS).decode()
    except TypeError:  # a lone surrogate out of a file name, an integer over 64 bits
        return json.dumps(value, default=repr, skipkeys=True)
