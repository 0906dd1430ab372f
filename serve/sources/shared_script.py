"""The script that models share which bring none: in a folder, or in an archive in S3 that is fetched when it is needed.

The SageMaker SDK keeps the scripts of some frameworks in an archive of their own (`sourcedir.tar.gz`), beside that of
the model. It is fetched once a process: what runs does not change underneath. Called on load threads.
"""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import TYPE_CHECKING

from serve.sources.artifacts import Artifacts
from serve.sources.store import open_store

if TYPE_CHECKING:
    from pathlib import Path

    from serve.sources.scripts import Scripts

_CACHE = "scripts"  # a folder of its own, since archives of models come and go by themselves


class SharedScript:
    """Scripts, with the shared one on this machine.

    Args:
        scripts: as they were set.
        cache_directory: where archives are unpacked.
    """

    def __init__(self, scripts: Scripts, cache_directory: Path) -> None:
        self._scripts = scripts
        self._lock = threading.Lock()
        self._fetched = "://" not in scripts.shared
        if not self._fetched:
            store, _, self._name = scripts.shared.rpartition("/")
            self._artifacts = Artifacts(open_store(store), cache_directory / _CACHE)

    def scripts(self) -> Scripts:
        """What is the same for all scripts; the first call fetches what is in S3.

        Raises:
            MmeError: what the store, the archive or the disk have to say.
        """
        with self._lock:
            if not self._fetched:
                folder = self._artifacts.fetch(self._name).path
                self._scripts = replace(self._scripts, shared=str(folder))
                self._fetched = True
            return self._scripts
