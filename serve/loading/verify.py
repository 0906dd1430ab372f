"""What is known of model files by their content, over restarts: which loaded here before, and which batch.

Some frameworks die of a damaged file (see `worker/start.py`), and models of theirs execute in the serving process none
the less, where they are quickest. What stands between is a proof: this content was read by that version of that
library, with those parameters, and the process lived. Without one the file is tried first, in a process of its own;
that costs a load once more, and no memory beyond what was reserved for the model. A file of 400 KB takes 20 ms more
than the 13 that its load takes, and the first one half a second.

A verdict on batching (see `serve/model/batch_proof.py`) is of a file's content and of what executes it. Contents are
read only where a verdict of a file of that size is known, or is to be kept.

Both are by content, since a copy has the times of what it is a copy of. A file whose status was seen is not read again.
Called on load threads, verdicts on any; those are written on a thread of the pool.
"""

from __future__ import annotations

import hashlib
import logging
import threading
from typing import TYPE_CHECKING, Any

from cachetools import LRUCache

from model_handlers.errors import MmeError, invalid_model
from model_handlers.system.disk import disk_errors, file_digest, state_of, text_digest
from model_handlers.worker.start import verify_file
from serve.model.batch_proof import Batching, BatchProof
from serve.options import BatchGuess
from serve.state_file import rows_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from concurrent.futures import Executor
    from pathlib import Path

    from model_handlers.base import Handler
    from model_handlers.config.model_config import ModelConfig
    from model_handlers.system.disk import FileIdentity
    from serve.state_file import StateFile


PROOFS_FORM = "mme proofs 1"
_MOST = 10_000  # one more forgets the one unused for longest


class Proofs:
    """Which files were loaded here before; kept in `file`."""

    def __init__(self, file: StateFile | None = None) -> None:
        self._file = file
        self._lock = threading.Lock()
        self._proven: LRUCache[str, bool] = LRUCache(_MOST)
        self._seen: LRUCache[tuple[Path, str], FileIdentity] = LRUCache(_MOST)
        proven = file.read().get("proven") if file is not None else None
        found = proven if isinstance(proven, dict | list) else ()  # a list: of a version before
        self._proven.update({proof: True for proof in found if isinstance(proof, str)})

    def __repr__(self) -> str:
        return f"<Proofs of {len(self._proven)} files>"

    def provide(self, handler: type[Handler], config: ModelConfig, model_file: Path) -> None:
        """Try a file of which there is no proof.

        Raises:
            MmeError: as `verify_file`; INVALID_MODEL for a file that is written meanwhile.
        """
        with disk_errors(f"model '{config.name}' cannot be read from {model_file}"):
            reader = _reader(handler, config, model_file)
            status = state_of(model_file.stat())
            if self._is_seen(model_file, reader, status):
                return
            proof = f"{file_digest(model_file).hex()} {reader}"
            if not self._has(proof):
                verify_file(handler, config, model_file)
            if state_of(model_file.stat()) != status:
                raise _written(config, model_file)
        self._keep(proof, model_file, reader, status)

    def check(self, handler: type[Handler], config: ModelConfig, model_file: Path) -> None:
        """Refuse a file that was written since there was a proof of it, as INVALID_MODEL: before it is loaded."""
        with disk_errors(f"model '{config.name}' cannot be read from {model_file}"):
            if not self._is_seen(model_file, _reader(handler, config, model_file), state_of(model_file.stat())):
                raise _written(config, model_file)

    def _is_seen(self, model_file: Path, reader: str, status: FileIdentity) -> bool:
        with self._lock:
            return self._seen.get((model_file, reader)) == status

    def _has(self, proof: str) -> bool:
        with self._lock:
            return proof in self._proven

    def _keep(self, proof: str, model_file: Path, reader: str, status: FileIdentity) -> None:
        with self._lock:
            self._seen[model_file, reader] = status
            new = self._proven.pop(proof, None) is None
            self._proven[proof] = True  # to the end: those in the file are in the order of use
            if new and self._file is not None:
                self._file.keep([("proven", proof, True)], lambda: {"proven": dict.fromkeys(self._proven, True)})


def _reader(handler: type[Handler], config: ModelConfig, model_file: Path) -> str:
    # The file's name and the parameters say of what kind it is.
    told = repr((model_file.name, sorted(config.parameters.items())))
    return f"{_executed_by(handler, config, model_file)} {text_digest(told, 16)}"


def _executed_by(handler: type[Handler], config: ModelConfig, model_file: Path) -> str:
    """What reads the file, and which version of it: what one has read another one may die of."""
    return f"{handler.__module__}:{handler.__qualname__} {handler.traits(config, model_file).runtime.versions()}"


def _written(config: ModelConfig, model_file: Path) -> MmeError:
    return invalid_model(
        f"model '{config.name}': '{model_file.name}' was written while it was loaded; load it again once it is whole"
    )


BATCHING_FORM = "mme batching 1"
_KEPT = {state.value: state for state in (Batching.PROVEN, Batching.REFUTED)}
_log = logging.getLogger("mme.model")


class BatchVerdicts:
    """Which files batch; kept in `file`, read and written on a thread of `pool`, or on the caller's."""

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
        for key, verdict in rows_of(document, "verdicts"):
            if verdict in _KEPT:
                self._verdicts[key] = _KEPT[verdict]
                self._sizes[_size_in(key)] = True
        self._keys.update({status: key for status, key in rows_of(document, "files") if isinstance(key, str)})

    def __repr__(self) -> str:
        return f"<BatchVerdicts on {len(self._verdicts)} files>"

    def proof(self, handler: type[Handler], config: ModelConfig, model_file: Path) -> BatchProof:
        """What is known of a model that is loaded from a file, and the means to learn more, which is kept."""
        reader = _executed_by(handler, config, model_file)
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


def _files(model_file: Path) -> Iterator[Path]:
    if model_file.is_dir():
        yield from sorted(file for file in model_file.rglob("*") if file.is_file())
    else:
        yield model_file


def _size(model_file: Path) -> int:
    return sum(file.stat().st_size for file in _files(model_file))


def _status(model_file: Path, reader: str) -> str:
    status = hashlib.sha256(reader.encode())
    for file in _files(model_file):
        status.update(f"{file.name} {state_of(file.stat())} ".encode())
    return status.hexdigest()


def _key(model_file: Path, reader: str) -> str:
    content = hashlib.sha256()
    for file in _files(model_file):
        content.update(f"{file.name if model_file.is_dir() else ''} ".encode() + file_digest(file))
    return f"{_size(model_file)} {content.hexdigest()} {reader}"


def _size_in(key: str) -> str:
    return key.partition(" ")[0]
