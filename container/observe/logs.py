"""How log lines look, what is logged at the moment, and how lines leave without waiting for a reader.

All loggers (`mme.…`, gunicorn's, botocore's) go through one handler on the root logger; facts come in `extra=`, and a
traceback is one field of its line. There is no access log. `configure` is called once in each process, before threads
start; a `LogControl` changes later what is logged, and how, in the words of Triton's logging extension:

    log_info, log_warning, log_error    whether lines of that severity are written
    log_verbose_level                   0, or how much more is; here everything at any number above
    log_format                          text or json, as the server was started; default or ISO8601 for Triton's lines
    log_file                            none: lines go to standard error

What collects a container's output may stand still as long as its disk does. A line is written at once where the pipe
has room, else kept, up to a bound, for a thread; lines beyond the bound are dropped, counted, and told.
"""

from __future__ import annotations

import contextlib
import json
import logging
import logging.config
import os
import select
import stat
import sys
import threading
import weakref
from collections import deque
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any

import orjson

from container.settings.parsers import LogFormat
from model_handlers.errors import Kind, MmeError, invalid_argument
from model_handlers.system.threads import start_thread, usual_priority

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
    """Send every logger of this process through one handler; AUTO is text where `stream` is a terminal, else JSON."""
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
    """What this process logs at the moment, and how: read and changed by clients. On the event loop."""

    def __init__(self, level: str, format: LogFormat) -> None:  # noqa: A002 - the setting's name
        self._now = LogSettings.of_level(level, _chosen(format, sys.stderr))

    @property
    def dropped(self) -> int:
        """Lines that nothing read and that were dropped."""
        return sum(handler.dropped for handler in logging.getLogger().handlers if isinstance(handler, PipeHandler))

    def document(self) -> dict[str, Any]:
        return self._now.as_document()

    def change(self, wanted: Mapping[str, Any]) -> None:
        """Log something else from now on, or otherwise."""
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
    """Records → lines of one form but AUTO, with their facts and a traceback; colours are for text on a terminal."""

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


_SWITCHES = {"log_info": logging.INFO, "log_warning": logging.WARNING, "log_error": logging.ERROR}
_AS_DOCUMENTED = {"log_warnings": "log_warning", "log_errors": "log_error"}  # Triton's pages call them otherwise
_FORMATS = [each.value for each in LogFormat if each is not LogFormat.AUTO]
_MOST = 2**32 - 1


class LogSettings:
    """What is logged, and how, under the names that clients know.

    Args:
        document: all of them, as `as_document` gives it.
    """

    def __init__(self, document: Mapping[str, Any]) -> None:
        self._document = document

    @classmethod
    def of_level(cls, level: str, format: LogFormat) -> LogSettings:  # noqa: A002 - the setting's name
        """Those that a level by name stands for."""
        least = logging.getLevelNamesMapping()[level.upper()]
        switches = {name: least <= severity for name, severity in _SWITCHES.items()}
        verbose = int(least <= logging.DEBUG)
        return cls({"log_file": "", **switches, "log_verbose_level": verbose, "log_format": format.value})

    def as_document(self) -> dict[str, Any]:
        return dict(self._document)

    def lets_through(self, level: int) -> bool:
        """Whether a line of a level, as Python's logging numbers them, is written; one that is critical always is."""
        if level >= logging.CRITICAL:
            return True
        name = next((name for name, least in reversed(_SWITCHES.items()) if level >= least), "log_verbose_level")
        return bool(self._document[name])

    @property
    def level(self) -> int:
        """The least level of which a line is written."""
        return next(
            level for level in (logging.DEBUG, *_SWITCHES.values(), logging.CRITICAL) if self.lets_through(level)
        )

    @property
    def format(self) -> LogFormat:
        """How a line looks; never AUTO."""
        return LogFormat(self._document["log_format"])

    def changed(self, wanted: Mapping[str, Any]) -> LogSettings:
        """These with what a client wants otherwise, by setting; null leaves one as it is."""
        new = self.as_document()
        for given, value in wanted.items():
            name = _AS_DOCUMENTED.get(given, given)
            if name not in new:
                raise invalid_argument(f"log setting '{given}' is none of {', '.join(new)}")
            if value is not None:
                _check(name, given, value)
                new[name] = value
        return LogSettings(new)


def _check(name: str, given: str, value: Any) -> None:
    if name == "log_file" and value:
        raise MmeError(Kind.UNSUPPORTED, "log file location can not be updated through network protocol")
    if name == "log_format" and isinstance(value, str) and value not in _FORMATS:
        known = ", ".join(_FORMATS)
        raise MmeError(Kind.UNAVAILABLE, f"invalid argument for --log_format, got: {value}; there are {known}")
    if name in _SWITCHES:
        fits, expected = isinstance(value, bool), "true or false"
    elif name == "log_verbose_level":
        fits, expected = type(value) is int and 0 <= value <= _MOST, "a number, 0 or more"
    else:
        fits, expected = isinstance(value, str), "a text"
    if not fits:
        raise invalid_argument(f"log setting '{given}' must be {expected}, got {value!r}")


_MOST_BYTES = 1 << 20  # kept, some thousands of lines
_FLUSH_SECONDS = 1.0  # that the end of the process waits for a pipe that is full
_LOGGER = "mme.log"


class LinePipe:
    """One descriptor. Thread-safe; a fork leaves the child one without lines.

    Attributes:
        dropped: lines, so far.

    Args:
        told: makes the line that says how many were dropped; b"" for none.
    """

    def __init__(self, fd: int, told: Callable[[int], bytes], *, most_bytes: int = _MOST_BYTES) -> None:
        self.dropped = 0
        self._fd = self._of_our_own(fd)
        self._told = told
        self._most_bytes = most_bytes
        # A pipe that is ready takes so many bytes without a wait. A file takes any number, and a line is one write.
        self._ready_bytes = most_bytes if stat.S_ISREG(os.fstat(fd).st_mode) else select.PIPE_BUF
        self._poll = select.poll()
        self._poll.register(self._fd, select.POLLOUT)
        self._begin()
        forked = weakref.WeakMethod(self._begin)
        os.register_at_fork(after_in_child=lambda: (begin := forked()) and begin())

    def __repr__(self) -> str:
        return f"<LinePipe {self._fd}, {self._bytes} bytes kept, {self.dropped} lines dropped>"

    def _begin(self) -> None:
        self._changed = threading.Condition()  # guards all of these
        self._kept: deque[bytes] = deque()
        self._bytes = 0
        self._untold = 0  # lines dropped behind the last one that is kept
        self._thread: threading.Thread | None = None

    def _of_our_own(self, fd: int) -> int:
        """The same pipe, opened so that no write to it waits; other processes that write to it may want to."""
        if stat.S_ISFIFO(os.fstat(fd).st_mode):
            with contextlib.suppress(OSError):  # it may be another user's
                own = os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
                weakref.finalize(self, os.close, own).atexit = False  # the end of the process has lines, too
                return own
        return fd

    def write(self, line: bytes) -> None:
        """Write a line, or keep it, or drop it. Waits for nothing."""
        with self._changed:
            rest = line if self._thread or self._kept else self._written(line)
            if rest:
                self._keep(rest, begun=rest is not line)

    def flush(self) -> None:
        """Wait for what is kept, but no longer than a second."""
        with self._changed:
            self._changed.wait_for(lambda: self._thread is None, _FLUSH_SECONDS)

    def _written(self, line: bytes) -> bytes:
        """Write what the pipe takes at once; the rest."""
        with contextlib.suppress(BlockingIOError):
            while line and self._poll.poll(0):
                line = line[os.write(self._fd, line[: self._ready_bytes]) :]
        return line

    def _keep(self, line: bytes, *, begun: bool) -> None:
        """For the thread; a line that is begun is ended in any case."""
        if self._bytes + len(line) > self._most_bytes and not begun:
            self.dropped += 1
            self._untold += 1
            return
        self._tell()
        self._append(line)
        if self._thread is None:
            self._thread = threading.Thread(target=self._drain, name="log", daemon=True)
            try:
                start_thread(self._thread)
            except MmeError:  # the next line tries again
                self._thread = None

    def _append(self, line: bytes) -> None:
        self._kept.append(line)
        self._bytes += len(line)

    def _tell(self) -> None:
        if self._untold:
            self._append(self._told(self._untold))
            self._untold = 0

    def _drain(self) -> None:
        """The thread: write what is kept, and end."""
        usual_priority()
        while True:
            with self._changed:
                if not self._kept:
                    self._tell()
                if not self._kept:
                    self._thread = None
                    self._changed.notify_all()
                    return
                line = self._kept.popleft()
                self._bytes -= len(line)
            with contextlib.suppress(OSError):  # the next line finds out
                while line:
                    self._poll.poll()
                    line = self._written(line)


class PipeHandler(logging.StreamHandler["TextIO"]):
    """A stream whose lines go through a `LinePipe`, where there is a descriptor behind it."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self._pipe: LinePipe | None = None
        with contextlib.suppress(OSError, ValueError):  # as a stream in memory says
            self._pipe = LinePipe(stream.fileno(), self._line_of_dropped)

    @property
    def dropped(self) -> int:
        """Lines that were dropped."""
        return self._pipe.dropped if self._pipe else 0

    def emit(self, record: logging.LogRecord) -> None:
        if self._pipe is None:
            super().emit(record)
            return
        try:
            self._pipe.write(self._line(record))
        except Exception:  # noqa: BLE001 - as any handler of logging's
            self.handleError(record)

    def flush(self) -> None:
        """Write what is left, as far as it is read."""
        if self._pipe is None:
            super().flush()
        else:
            self._pipe.flush()

    def _line(self, record: logging.LogRecord) -> bytes:
        return (self.format(record) + self.terminator).encode(errors="backslashreplace")

    def _line_of_dropped(self, count: int) -> bytes:
        says = "%d lines of the log were dropped here, since nothing read it"
        return self._line(logging.LogRecord(_LOGGER, logging.WARNING, __file__, 0, says, (count,), None))
