"""Which model files turned out to batch, and which not: see `serve/model/batch_proof.py`. Kept over restarts.

A verdict is of a file's content and of what executes it, so that a copy under another name is known. A content is read
only where a verdict of a file of that size is known, or is to be kept; a file whose status was seen is not read again.

Thread-safety: asked on load threads, told on any; files are read and written on a thread of the pool.
"""

from __future__ import annotations

import hashlib
import logging
import threading
from typing import TYPE_CHECKING, Any

from cachetools import LRUCache

from model_handlers.system.digests import file_digest
from model_handlers.system.disk import state_of
from serve.control import BatchGuess
from serve.model.batch_proof import Batching, BatchProof

if TYPE_CHECKING:
    from collections.abc import Iterator
    from concurrent.futures import Executor
    from pathlib import Path

    from model_handlers.base import Handler
    from model_handlers.config.model_config import ModelConfig
    from serve.state_file import StateFile

FORM = "mme batching 1"
_MOST = 10_000  # one more forgets the one unused for longest
_KEPT = {state.value: state for state in (Batching.PROVEN, Batching.REFUTED)}
_log = logging.getLogger("mme.model")


class BatchVerdicts:
    """All verdicts, and the files that they are of.

    Args:
        file: where they are kept; None for nowhere.
        pool: a thread that reads and writes files; None for the caller's.
        guess: what is done about models that are guessed to batch.
    """

    def __init__(
        self, file: StateFile | None = None, pool: Executor | None = None, guess: BatchGuess = BatchGuess.PROVE
    ) -> None:
        self._file = file
        self._pool = pool
        self._guesses = guess is BatchGuess.PROVE
        self._lock = threading.Lock()
        self._verdicts: LRUCache[str, Batching] = LRUCache(_MOST)
        self._sizes: LRUCache[str, bool] = LRUCache(_MOST)  # of the files that they are of
        self._keys: LRUCache[str, str] = LRUCache(_MOST)  # of files by their status
        document = file.read() if file is not None else {}
        for key, verdict in _items(document.get("verdicts")):
            if verdict in _KEPT:
                self._verdicts[key] = _KEPT[verdict]
                self._sizes[_size_in(key)] = True
        self._keys.update({status: key for status, key in _items(document.get("files")) if isinstance(key, str)})

    def __repr__(self) -> str:
        return f"<BatchVerdicts on {len(self._verdicts)} files>"

    def proof(self, handler: type[Handler], config: ModelConfig, model_file: Path) -> BatchProof:
        """What is known of a model that is loaded from a file, and the means to learn more, which is kept."""
        reader = handler.reader(config, model_file)
        try:
            status = _status(model_file, reader)
            known = self._find(status, model_file, reader) if self._guesses else None
        except OSError:  # it left while it was loaded: what is learnt of it is of no file
            return BatchProof(config, guesses=self._guesses)
        proof = BatchProof(config, known, guesses=self._guesses)
        proof.listen(lambda state: self._later(state, status, model_file, reader))
        return proof

    def _find(self, status: str, model_file: Path, reader: str) -> Batching | None:
        with self._lock:
            key = self._keys.get(status)
            if key is None and str(_size(model_file)) not in self._sizes:
                return None
        key = key or _key(model_file, reader)
        with self._lock:
            self._keys[status] = key
            verdict: Batching | None = self._verdicts.get(key)
            return verdict

    def _later(self, state: Batching, status: str, model_file: Path, reader: str) -> None:
        if state.value not in _KEPT:
            return
        if self._pool is None:
            self._keep(state, status, model_file, reader)
            return
        try:
            self._pool.submit(self._keep, state, status, model_file, reader)
        except RuntimeError:  # the server ends
            _log.debug("not kept: whether %s batches", model_file)

    def _keep(self, state: Batching, status: str, model_file: Path, reader: str) -> None:
        with self._lock:
            key = self._keys.get(status)
        try:
            key = key or _key(model_file, reader)
            if _status(model_file, reader) != status:
                return  # it was written since the model was loaded
        except OSError:
            return
        with self._lock:
            self._keys[status] = key
            self._verdicts[key] = state
            self._sizes[_size_in(key)] = True
            if self._file is not None:
                self._file.keep([("verdicts", key, state.value), ("files", status, key)], self._document)

    def _document(self) -> dict[str, Any]:
        verdicts = {known: verdict.value for known, verdict in self._verdicts.items()}
        return {"verdicts": verdicts, "files": dict(self._keys)}


def _items(document: Any) -> list[tuple[str, Any]]:
    return list(document.items()) if isinstance(document, dict) else []


def _files(model_file: Path) -> Iterator[Path]:
    """The files of a model, which may be a folder, as a SavedModel is."""
    if model_file.is_dir():
        yield from sorted(file for file in model_file.rglob("*") if file.is_file())
    else:
        yield model_file


def _size(model_file: Path) -> int:
    return sum(file.stat().st_size for file in _files(model_file))


def _status(model_file: Path, reader: str) -> str:
    """Changes with the files, as far as their status tells."""
    status = hashlib.sha256(reader.encode())
    for file in _files(model_file):
        status.update(f"{file.name} {state_of(file.stat())} ".encode())
    return status.hexdigest()


def _key(model_file: Path, reader: str) -> str:
    """What is in the files, and what executes it."""
    content = hashlib.sha256()
    for file in _files(model_file):
        content.update(f"{file.name if model_file.is_dir() else ''} ".encode() + file_digest(file))
    return f"{_size(model_file)} {content.hexdigest()} {reader}"


def _size_in(key: str) -> str:
    return key.partition(" ")[0]
