"""What is traced at the moment, in the words of Triton's trace extension: of the server, and of models apart. PURE.

    trace_level    ["TIMESTAMPS"] or ["OFF"]; TENSORS is without effect
    trace_rate     one request of so many, of those whose client does not say; 0 for none of them
    trace_count    so many more requests, -1 for all

Values are texts, as Triton has them; null means what the server was started with, or of a model what the server has,
and no level at all the one there is. Where traces are written to a file, as Triton does, `log_frequency` says how many
at a time. File and mode stay; a file can't be cleared either.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from model_handlers.errors import Kind, MmeError, invalid_argument

if TYPE_CHECKING:
    from collections.abc import Mapping

_log = logging.getLogger("mme.trace")
TIMESTAMPS, TENSORS, OFF = "TIMESTAMPS", "TENSORS", "OFF"
_FIELDS = {"trace_level": "on", "trace_rate": "rate", "trace_count": "count", "log_frequency": "frequency"}
_TO_FILES = "triton"
_MOST = 2**31 - 1
_SHOWN = 100  # characters of a value in a sentence


@dataclass(frozen=True, slots=True)
class TraceSettings:
    """What is traced, of the server or of one model."""

    on: bool = False
    rate: int = 1000  # one request of so many; 0 for none but those whose client says so
    count: int = -1  # so many more requests; -1 for all
    mode: str = "opentelemetry"  # they are sent, or `triton`: written
    file: str = ""
    frequency: int = 0  # traces that are written at a time; 0 for all of them at the end

    def as_document(self) -> dict[str, Any]:
        return {
            "trace_level": [TIMESTAMPS if self.on else OFF],
            "trace_rate": str(self.rate),
            "trace_count": str(self.count),
            "log_frequency": str(self.frequency),
            **self._fixed(),
        }

    def _fixed(self) -> dict[str, str]:
        return {"trace_file": self.file, "trace_mode": self.mode}

    def changed(self, wanted: Mapping[str, Any], first: TraceSettings) -> TraceSettings:
        """These with what a client wants otherwise, by name: a text, or null for what it was at `first`."""
        new, fixed = self, self._fixed()
        for name, value in wanted.items():
            field = _FIELDS.get(name)
            if field is not None:
                given: Any = getattr(first, field) if value is None else self._given(name, value)
                if name == "log_frequency" and given and self.mode != _TO_FILES:
                    raise _not_here(name, "0", value)
                new = replace(new, **{field: given})
            elif name not in fixed:
                known = ", ".join(self.as_document())
                raise invalid_argument(f"trace setting '{name}' is none of {known}")
            elif value != fixed[name] and (value is not None or name == "trace_file"):
                raise _not_here(name, fixed[name], value)
        return new

    def _given(self, name: str, value: Any) -> int:
        if name != "trace_level":
            return _number(name, value, -1 if name == "trace_count" else 0)
        levels = set(map(str, value)) if isinstance(value, list) else {str(value)}
        if levels == {OFF}:
            return False
        if not levels <= {TIMESTAMPS, TENSORS}:
            if levels <= {TIMESTAMPS, TENSORS, OFF}:
                raise invalid_argument(f"Expect only one trace level '{OFF}' is specified")
            raise invalid_argument(f"trace_level must be {TIMESTAMPS}, {TENSORS}, both or {OFF}, got {value!r:.100}")
        if TENSORS in levels:
            _log.warning(
                "trace_level TENSORS is without effect: tensors are not traced, and 0.3 refuses it; leave it out"
            )
        return self.on or TIMESTAMPS in levels


class TraceControl:
    """Decides which requests are traced; `sends` tells whether traces go anywhere."""

    def __init__(self, first: TraceSettings, *, sends: bool) -> None:
        self.server = self._first = first
        self._sends = sends
        self._models: dict[str, dict[str, Any]] = {}  # field → value, of those that differ from the server's
        self._untraced: dict[str, int] = {}

    def of(self, model: str) -> TraceSettings:
        """What counts for a model, or with "" for the server."""
        return replace(self.server, **self._models.get(model, {}))

    @property
    def on(self) -> bool:
        return self.server.on or any(own.get("on") for own in self._models.values())

    @property
    def by_model(self) -> bool:
        return bool(self._models)

    def change(self, model: str, wanted: Mapping[str, Any]) -> None:
        """Trace something else from now on, of a model or with "" of the server."""
        first = self.server if model else self._first
        new = self.of(model).changed(wanted, first)
        if new.on and not self._sends:
            raise MmeError(Kind.UNSUPPORTED, "traces go nowhere: start the server with MME_TRACE_URL or MME_TRACE_FILE")
        if not model:
            self.server = new
            return
        own = self._models.pop(model, {})
        for name in _FIELDS.keys() & wanted.keys():
            own[_FIELDS[name]] = None if wanted[name] is None else getattr(new, _FIELDS[name])
        if own := {field: value for field, value in own.items() if value is not None}:
            self._models[model] = own

    def traces(self, model: str, sampled: bool | None) -> bool:  # noqa: FBT001 - None says nothing
        """Whether a request is traced, and count it: what its client says counts, else the rate. "" is no model's."""
        settings, own = self.of(model), self._models.get(model, {})
        if not settings.on or not settings.count:
            return False
        if not (self._is_next(model if own else "", settings.rate) if sampled is None else sampled):
            return False
        if settings.count > 0:
            if "count" in own:
                own["count"] = settings.count - 1
            else:
                self.server = replace(self.server, count=settings.count - 1)
        return True

    def _is_next(self, whose: str, rate: int) -> bool:
        if not rate:
            return False
        untraced = self._untraced.get(whose, 0) + 1
        self._untraced[whose] = 0 if untraced >= rate else untraced
        return untraced >= rate


def _number(name: str, value: Any, least: int) -> int:
    try:
        number = int(value)
    except (ValueError, TypeError, OverflowError):  # the latter of infinity, which JSON of clients may hold
        raise invalid_argument(f"Unable to parse '{name}', got: {str(value)[:_SHOWN]}") from None
    if number < least < 0:
        raise invalid_argument(f"Unable to parse '{name}'. Expecting value >= {least}, got:{str(value)[:_SHOWN]}")
    if not least <= number <= _MOST:
        raise invalid_argument(f"Unable to parse '{name}', got: {str(value)[:_SHOWN]}, value is out of range")
    return number


def _not_here(name: str, here: str, value: Any) -> MmeError:
    if name == "trace_file":
        return MmeError(Kind.UNSUPPORTED, "trace file location can not be updated through network protocol")
    return MmeError(Kind.UNSUPPORTED, f"{name} is '{here}' here, by the way that the server was started; got {value!r}")
