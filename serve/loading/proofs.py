"""Which model files were loaded here before: any other is tried in a process of its own first. Kept over restarts.

Some frameworks die of a damaged file (see `worker/start.py`), and models of theirs execute in the serving process
none the less, where they are quickest. What stands between is a proof: this content was read by that version of that
library, with those parameters, and nobody died. A proof is by content, not by name or time, since a copy has the times
of what it is a copy of. Without one the file is tried; that costs a load once more and a process for its time, and no
memory beyond what was reserved for the model, since the process is gone before the model is loaded. A file of 400 KB
takes 20 ms more than the 13 that its load takes, and the first one half a second: until there is a process that has the
libraries, which keeps 44 MiB for as long as the server lives.

What is simpler is not safe: a look at the file from outside knows less than what reads it, and a process for each model
for as long as it lives costs every request more than its trees do. A reload pays for a look at the file's status: one
that this process knows by its place, its times and its size was not written since.

Thread-safety: called on load threads.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from cachetools import LRUCache

from model_handlers.errors import MmeError, invalid_model
from model_handlers.system.digests import file_digest, text_digest
from model_handlers.system.disk import disk_errors, state_of
from model_handlers.worker.start import try_file

if TYPE_CHECKING:
    from pathlib import Path

    from model_handlers.base import Handler
    from model_handlers.config.model_config import ModelConfig
    from model_handlers.system.disk import FileIdentity
    from serve.state_file import StateFile

FORM = "mme proofs 1"
_MOST = 10_000  # one more forgets the one unused for longest


class Proofs:
    """All proofs, and the files that they are of.

    Args:
        file: where they are kept; None for nowhere.
    """

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
        """See to it that there is a proof of a file: try it if there is none.

        Raises:
            MmeError: as `trial.try_file`; INVALID_MODEL for a file that is written meanwhile.
        """
        with disk_errors(f"model '{config.name}' cannot be read from {model_file}"):
            reader = _reader(handler, config, model_file)
            status = state_of(model_file.stat())
            if self._is_seen(model_file, reader, status):
                return
            proof = f"{file_digest(model_file).hex()} {reader}"
            if not self._has(proof):
                try_file(handler, config, model_file)
            if state_of(model_file.stat()) != status:
                raise _written(config, model_file)
        self._keep(proof, model_file, reader, status)

    def check(self, handler: type[Handler], config: ModelConfig, model_file: Path) -> None:
        """Refuse a file that was written since there was a proof of it: for the moment before it is loaded.

        Raises:
            MmeError: INVALID_MODEL.
        """
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
    """What reads the file, and how it is told to: the file's name and the parameters say of what kind it is."""
    told = repr((model_file.name, sorted(config.parameters.items())))
    return f"{handler.reader(config, model_file)} {text_digest(told, 16)}"


def _written(config: ModelConfig, model_file: Path) -> MmeError:
    return invalid_model(
        f"model '{config.name}': '{model_file.name}' was written while it was loaded; load it again once it is whole"
    )
