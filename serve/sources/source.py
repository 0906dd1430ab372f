"""Where a model comes from: an archive in a store, an unpacked folder, a repository, on disk or in S3."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from model_handlers.errors import invalid_argument

if TYPE_CHECKING:
    from serve.sources.artifacts import Artifacts
    from serve.sources.override import OverrideFolder
    from serve.sources.s3_repository import Directories

_FORBIDDEN_ROOTS = tuple(Path(root) for root in ("/dev", "/proc", "/sys"))
_SHOWN_URL = 200  # characters of a url in a message


@dataclass(frozen=True, slots=True)
class Archived:
    """A source: an archive in a store, by its name there."""

    posted: ClassVar[bool] = False

    artifacts: Artifacts
    name: str

    @property
    def url(self) -> str:
        return f"{self.artifacts.store.uri.rstrip('/')}/{self.name}"


@dataclass(frozen=True, slots=True)
class Unpacked:
    """A source: a folder that the platform unpacked. `url` is what it was posted as."""

    posted: ClassVar[bool] = True

    path: Path
    url: str


@dataclass(frozen=True, slots=True)
class InRepository:
    """A source: a model's folder in a repository; parts of an ensemble may lie in `others`."""

    posted: ClassVar[bool] = False

    path: Path
    others: tuple[Path, ...] = ()

    @property
    def url(self) -> str:
        return str(self.path)

    @property
    def repository(self) -> str:
        return str(self.path.parent)


@dataclass(frozen=True, slots=True)
class S3Model:
    """A source: a model's directory in a repository in S3, by its name there."""

    posted: ClassVar[bool] = False

    artifacts: Directories
    name: str

    @property
    def url(self) -> str:
        return f"{self.repository}{self.name}"

    @property
    def repository(self) -> str:
        return self.artifacts.place(self.name)


Origin = Archived | Unpacked | InRepository | S3Model


@dataclass(frozen=True, slots=True)
class Overridden:
    """A source under another configuration, as JSON, and under files in `folder` if it is not None; see `override`."""

    base: Origin
    config: str
    folder: OverrideFolder | None = None

    @property
    def url(self) -> str:
        return self.base.url

    @property
    def posted(self) -> bool:
        return self.base.posted


Source = Origin | Overridden


def origin(source: Source) -> Origin:
    """Where a model comes from when nothing is overridden."""
    return source.base if isinstance(source, Overridden) else source


def source_of(url: str) -> Source:
    """What a load request's url means: a folder of this container, where models may lie."""
    shown = url[:_SHOWN_URL]
    if url.startswith("s3://"):
        raise invalid_argument(f"url '{shown}' is not a folder of this container; serve S3 archives with --model-store")
    path = Path(url)
    if not path.is_absolute() or ".." in path.parts or "\0" in url:
        raise invalid_argument(f"url '{shown}' must be an absolute path without '..', like /opt/ml/models/<name>/model")
    path = Path("/", *path.parts[1:])  # two leading slashes are a root of their own to pathlib
    resolved = path.resolve()
    if any(either.is_relative_to(root) for either in (path, resolved) for root in _FORBIDDEN_ROOTS):
        raise invalid_argument(f"url '{shown}' points into a system folder; models live under /opt/ml/models")
    if not os.path.isdir(resolved):  # noqa: PTH112 - Path.is_dir raises for a name that is too long
        raise invalid_argument(f"url '{shown}' is not a folder; the platform unpacks the archive there before it loads")
    return Unpacked(resolved, url)


def is_plain(name: str) -> bool:
    """Whether a name can be that of one folder inside another, and of nothing else."""
    return bool(name) and "/" not in name and name not in {".", ".."} and "\0" not in name


def is_text(name: str) -> bool:
    """Whether the name of a file is UTF-8, without which no answer, index or metric can name it."""
    return not any("\ud800" <= c <= "\udfff" for c in name)
