"""Models in the places that they have in an archive: a directory of links beside them, which goes when it was packed.

Files are hard links where the disk allows, so that gigabytes are not copied. An error that names a staged file names
the place it comes from.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from container.ship.model_files import is_version, recognised
from model_handlers.errors import MmeError, invalid_argument

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from container.ship.model_files import ModelFile

CONFIG = "config.pbtxt"


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a model comes from.

    Attributes:
        path: its directory, or the file or folder of a framework's.
        file: what that is; None for a model directory.
        config: a config.pbtxt that was written for it, None for none.
    """

    path: Path
    file: ModelFile | None = None
    config: Path | None = None

    @classmethod
    def of(cls, path: Path, config: Path | None) -> Origin:
        """What a path is.

        Raises:
            MmeError: INVALID_ARGUMENT when it is no model, or has a configuration already.
        """
        file = recognised(path)
        if config is not None and not config.is_file():
            raise invalid_argument(f"--config '{config}' does not exist")
        if config is not None and file is None and (path / CONFIG).exists():
            raise invalid_argument(f"--config '{config}': '{path}' has a {CONFIG} of its own")
        return cls(path, file, config)

    @property
    def stem(self) -> str:
        """A name for the model."""
        name = self.path.resolve().name
        is_file = self.file is not None and self.path.is_file()
        return name.rpartition(".")[0] if is_file and not name.startswith(".") else name

    @property
    def bare(self) -> bool:
        """Whether it comes without a configuration that somebody wrote."""
        return self.config is None and (self.file is not None or is_version(self.path))

    def stage(self, destination: Path) -> None:
        """Put the model into the new directory `destination`."""
        if self.file is not None:
            _stage_file(self.path, self.file, destination)
        elif is_version(self.path):
            _stage_directory(self.path, destination / "1")
        else:
            _stage_directory(self.path, destination)
        if self.config is not None:
            shutil.copyfile(self.config, destination / CONFIG)


@contextmanager
def staged(origins: Mapping[str, Origin]) -> Iterator[Path]:
    """A directory that holds the models' directories in their places, by name, and nothing else."""
    first = next(iter(origins.values())).path
    with tempfile.TemporaryDirectory(prefix=".mme-pack-", dir=_link_parent(first)) as folder:
        staging = Path(folder)
        for name, origin in origins.items():
            origin.stage(staging / name)
        try:
            yield staging
        except MmeError as error:  # the sentence names files, and its reader knows them by the place they come from
            message = error.message
            for name, origin in origins.items():
                place = origin.path if origin.file is None else origin.path.parent
                message = message.replace(str(staging / name), str(place))
            raise MmeError(error.kind, message) from error


def link_or_copy(origin: Path, destination: Path) -> None:
    """The same file under another name."""
    try:
        os.link(origin, destination, follow_symlinks=False)
    except OSError:  # another disk, or one without links
        shutil.copy2(origin, destination, follow_symlinks=False)


def _link_parent(origin: Path) -> Path | None:
    """Where links to `origin` can be made: beside it; None for the temporary directory, where files are copied."""
    parent = origin.resolve().parent
    return parent if os.access(parent, os.W_OK) else None


def _stage_file(path: Path, file: ModelFile, destination: Path) -> None:
    place = destination / file.place if file.is_script else destination / "1" / file.place
    place.parent.mkdir(parents=True)
    if path.is_dir():
        _stage_directory(path, place)
    else:
        link_or_copy(path.resolve(), place)
    for each, name in file.beside:
        link_or_copy(each.resolve(), place.with_name(name))
    if file.config:
        (destination / CONFIG).write_text(file.config)


def _stage_directory(origin: Path, destination: Path) -> None:
    """The same files under new directories. Links stay links, for `pack` to refuse."""
    destination.mkdir(parents=True, exist_ok=True)
    for entry in os.scandir(origin):
        if entry.is_dir(follow_symlinks=False):
            _stage_directory(Path(entry.path), destination / entry.name)
        else:
            link_or_copy(Path(entry.path), destination / entry.name)
