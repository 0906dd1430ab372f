"""What is logged at the moment and how, in the words of Triton's logging extension. PURE.

    log_info, log_warning, log_error    whether lines of that severity are written
    log_verbose_level                   0, or how much more is; here everything at any number above
    log_format                          text or json, as the server was started; default or ISO8601 for Triton's lines
    log_file                            none: lines go to standard error

null leaves a setting as it is. Each switch is one of its own, as in Triton: warnings can be off, and information on.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from container.settings.kinds import LogFormat
from model_handlers.errors import Kind, MmeError, invalid_argument

if TYPE_CHECKING:
    from collections.abc import Mapping

_SWITCHES = {"log_info": "info", "log_warning": "warning", "log_error": "error"}
_AS_DOCUMENTED = {"log_warnings": "log_warning", "log_errors": "log_error"}  # Triton's pages call them otherwise
_FORMATS = {each.value: each for each in LogFormat if each is not LogFormat.AUTO}
_MOST = 2**32 - 1


@dataclass(frozen=True, slots=True)
class LogSettings:
    """What is logged.

    Attributes:
        info, warning, error: whether lines of that severity are.
        verbose: above 0, lines of no severity are as well.
        format: how a line looks; never AUTO.
    """

    info: bool = True
    warning: bool = True
    error: bool = True
    verbose: int = 0
    format: LogFormat = LogFormat.JSON

    @classmethod
    def of_level(cls, level: str, format: LogFormat) -> LogSettings:  # noqa: A002 - the setting's name
        """Those that a level by name stands for."""
        least = logging.getLevelNamesMapping()[level.upper()]
        return cls(
            info=least <= logging.INFO,
            warning=least <= logging.WARNING,
            error=least <= logging.ERROR,
            verbose=int(least <= logging.DEBUG),
            format=format,
        )

    def lets_through(self, level: int) -> bool:
        """Whether a line of a level, as Python's logging numbers them, is written; one that is critical always is."""
        if level < logging.INFO:
            return self.verbose > 0
        if level < logging.WARNING:
            return self.info
        if level < logging.ERROR:
            return self.warning
        return self.error or level >= logging.CRITICAL

    @property
    def level(self) -> int:
        """The least level of which a line is written."""
        levels = (logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR, logging.CRITICAL)
        return next(level for level in levels if self.lets_through(level))

    def as_document(self) -> dict[str, Any]:
        """As a client reads them."""
        return {
            "log_file": "",
            "log_info": self.info,
            "log_warning": self.warning,
            "log_error": self.error,
            "log_verbose_level": self.verbose,
            "log_format": self.format.value,
        }

    def changed(self, wanted: Mapping[str, Any]) -> LogSettings:
        """These with what a client wants otherwise.

        Args:
            wanted: setting → value, or null.

        Raises:
            MmeError: INVALID_ARGUMENT; UNSUPPORTED for a file, UNAVAILABLE for a format; then nothing is changed.
        """
        new, known = self, self.as_document()
        for given, value in wanted.items():
            name = _AS_DOCUMENTED.get(given, given)
            if name not in known:
                raise invalid_argument(f"log setting '{given}' is none of {', '.join(known)}")
            if value is None:
                continue
            if name in _SWITCHES:
                switch: dict[str, Any] = {_SWITCHES[name]: _switch(given, value)}
                new = replace(new, **switch)
            elif name == "log_verbose_level":
                new = replace(new, verbose=_verbosity(value))
            elif name == "log_format":
                new = replace(new, format=_format(value))
            elif value:
                raise MmeError(Kind.UNSUPPORTED, "log file location can not be updated through network protocol")
        return new


def _switch(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise invalid_argument(f"log setting '{name}' must be true or false, got {value!r}")
    return value


def _verbosity(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _MOST:
        raise invalid_argument(f"log setting 'log_verbose_level' must be a number, 0 or more, got {value!r}")
    return value


def _format(value: Any) -> LogFormat:
    if not isinstance(value, str):
        raise invalid_argument(f"log setting 'log_format' must be a text, got {value!r}")
    found = _FORMATS.get(value)
    if found is None:
        raise MmeError(
            Kind.UNAVAILABLE, f"invalid argument for --log_format, got: {value}; there are {', '.join(_FORMATS)}"
        )
    return found
