"""Traces in Triton's own format: a file of JSON, `--trace-config triton,file=…`. On the event loop; a thread writes.

Each step of an ensemble, and each model that another one called, is a trace of its own with a `parent_id`. All are
written when the server ends; with a frequency so many at a time, into the file with `.0`, `.1`, … behind its name. A
worker that takes the place of another one goes on behind what that one has written.
"""

from __future__ import annotations

import itertools
import logging
import stat
from concurrent.futures import wait
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from container.inference.offload import THREADS
from container.traces.tracing import MODEL, REQUEST_ID, VERSION, Tracing

if TYPE_CHECKING:
    from concurrent.futures import Future

    from container.traces.settings import TraceSettings
    from container.traces.tracing import Phase, Trace
    from model_handlers.errors import MmeError

_log = logging.getLogger("mme.trace")
_MOST = 10_000  # traces that are kept in memory, whatever the frequency


class FileTracer(Tracing):
    """Keeps traces and writes them; `since` is when the server began: a file from before may be overwritten."""

    def __init__(self, path: str, first: TraceSettings, since: float) -> None:
        super().__init__(replace(first, mode="triton", file=path))
        self._path = path
        self._since = since
        self._ids = itertools.count(1)
        self._files = itertools.count()
        self._entries: list[dict[str, Any]] = []
        self._traces = 0
        self._writing: list[Future[None]] = []

    def end(self, trace: Trace, error: MmeError | None) -> None:
        """Keep what is known of a request that a model has accepted."""
        if trace.request is not None and trace.request.arrival_ns:
            super().end(trace, error)

    def write(self, _trace: Trace, root: Phase, epoch: int, _error: MmeError | None) -> None:
        """Keep the entries of a request; of one that failed, how long that took. Triton's format has no errors."""
        self._add(root, epoch, "GRPC" if root.attributes.get("rpc.system") == "grpc" else "HTTP")
        self._traces += 1
        if self._traces >= (self.control.server.frequency or _MOST):
            self._flush()

    def _add(self, phase: Phase, epoch: int, protocol: str = "", parent: int = 0, request_id: str = "") -> None:
        """The entries of a request to a model, then of those that it has made; of "" for a protocol within another."""
        number, told = next(self._ids), phase.attributes
        request_id = told.get(REQUEST_ID, request_id)
        about = {"id": number, "model_name": told.get(MODEL, ""), "model_version": int(told.get(VERSION, 0))}
        self._entries.append(
            about | ({"request_id": request_id} if request_id else {}) | ({"parent_id": parent} if parent else {})
        )
        parts = {each.name: each for each in phase.below if MODEL not in each.attributes}
        inside: list[tuple[str, int]] = []
        if "batch" in parts:
            batch, compute, scatter = parts["batch"], parts["compute"], parts["scatter"]
            inside = [("COMPUTE_START", batch.begin), ("COMPUTE_INPUT_END", batch.end)]
            inside += [("COMPUTE_OUTPUT_START", compute.end), ("COMPUTE_END", scatter.end)]
        done = inside[-1][1] if inside else phase.end
        times = [("REQUEST_START", phase.arrival), ("QUEUE_START", phase.arrival), *inside, ("REQUEST_END", done)]
        if protocol:
            times[-1:] = [("INFER_RESPONSE_COMPLETE", done), ("REQUEST_END", phase.end)]
            times = [(f"{protocol}_RECV_START", phase.begin), (f"{protocol}_RECV_END", phase.begin), *times]
            times += [(f"{protocol}_SEND_START", done), (f"{protocol}_SEND_END", phase.end)]
        self._entries.append({"id": number, "timestamps": [{"name": name, "ns": epoch + ns} for name, ns in times]})
        for each in (*phase.below, *(parts["compute"].below if inside else ())):
            if VERSION in each.attributes and any(part.name != "load" for part in each.below):
                self._add(each, epoch, parent=number, request_id=request_id if each in phase.below else "")

    def _flush(self, *, whole: bool = False) -> None:
        """Have a thread write what there is into the next file with a number that no other worker has written."""
        paths = (f"{self._path}.{number}" for number in self._files)
        path = self._path if whole else next(path for path in paths if not _written_since(self._since, path))
        self._writing = [each for each in self._writing if not each.done()]
        self._writing.append(THREADS.submit(_write, path, self._entries))
        self._entries, self._traces = [], 0

    def close(self) -> None:
        """Write what is left: where so many are written at a time, behind the others of these."""
        is_taken = _written_since(self._since, self._path)
        if self._entries and (self.control.server.frequency or is_taken):
            self._flush()
        elif not is_taken and (self._entries or not next(self._files)):
            self._flush(whole=True)
        wait(self._writing)


def _written_since(since: float, path: str) -> bool:
    try:
        status = Path(path).stat()
        return stat.S_ISREG(status.st_mode) and status.st_mtime >= since
    except OSError:  # there is none, or its writer tells
        return False


def _write(path: str, entries: list[dict[str, Any]]) -> None:
    try:
        Path(path).write_bytes(orjson.dumps(entries))
    except (OSError, TypeError) as error:  # the latter of an id with half a character
        _log.error("traces can't be written to %s: %s", path, getattr(error, "strerror", None) or error)
