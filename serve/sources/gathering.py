"""A model of a repository in S3 together with the models that it consists of, which are told by its own files.

Used by one load thread until the model is there; afterwards it holds the files on disk until it is released.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from model_handlers.errors import Kind, MmeError

if TYPE_CHECKING:
    from pathlib import Path

    from model_handlers.cancel_token import CancelToken
    from serve.sources.artifacts import Artifact
    from serve.sources.directories import Directories


class Gathering:
    """What is fetched for one load, each model once."""

    def __init__(self, directories: Directories, token: CancelToken) -> None:
        self._directories = directories
        self._token = token
        self._fetched: dict[str, Artifact] = {}

    def __repr__(self) -> str:
        return f"<Gathering of {', '.join(self._fetched)}>"

    def fetch(self, name: str) -> Path:
        """A model's directory, on disk.

        Raises:
            MmeError: as `Artifacts.fetch`.
        """
        if name not in self._fetched:
            self._fetched[name] = self._directories.fetch(name, self._token)
        return self._fetched[name].path / name

    def fetch_known(self, name: str) -> Path | None:
        """The same; None for a model that there is not, or that has a name of none: who consists of it says so.

        Raises:
            MmeError: as `Artifacts.fetch`.
        """
        try:
            return self.fetch(name)
        except MmeError as error:
            if error.kind not in {Kind.UNKNOWN_MODEL, Kind.INVALID_ARGUMENT}:
                raise
            return None

    @property
    def identity(self) -> str:
        """A name for the content of all."""
        return "+".join(artifact.identity for _, artifact in sorted(self._fetched.items()))

    @property
    def seconds(self) -> float:
        """That the downloads took."""
        return sum(artifact.seconds for artifact in self._fetched.values())

    def release(self) -> None:
        """The files may go."""
        for artifact in self._fetched.values():
            artifact.hold.release()
