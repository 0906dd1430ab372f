"""The models of a repository in S3: the directories under a prefix, each brought to disk when it is loaded.

A model is what its objects are: their names, sizes and etags make its own etag, by which it lies on disk as an archive
does (see `Artifacts`), so that one that is there is not downloaded again, and never half. On disk it lies in a
directory of its name inside the one that is called by content. One listing tells all models, another one a model.

`has` is for the event loop; the rest blocks, and is for threads.
"""

from __future__ import annotations

import hashlib
import logging
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from model_handlers.errors import Kind, MmeError, invalid_argument, invalid_model
from serve.sources.artifacts import Artifacts
from serve.sources.store import S3Store, StoredObject, wrong_name
from serve.sources.transfer import check_names, transfer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path
    from typing import BinaryIO

    from serve.sources.disk_room import Derived

_log = logging.getLogger("mme.load")
_ENDPOINT = re.compile(r"(https?://)?([0-9A-Za-z.-]+|\[[0-9A-Fa-f:]+\]):([0-9]+)/(.+)")
_CONFIG = "config.pbtxt"


@dataclass(frozen=True, slots=True)
class StoredDirectory(StoredObject):
    """A model's directory as its bucket has it: all bytes, and an etag that changes when any object does.

    Attributes:
        objects: what lies in it; names begin with the model's.
    """

    objects: tuple[StoredObject, ...] = ()


def open_bucket(url: str) -> S3Store:
    """What lies under `s3://bucket/prefix`, or `s3://https://host:port/bucket/prefix` of an S3 that is not AWS's.

    Without https:// such a one is asked by HTTP, as Triton does.

    Raises:
        MmeError: INVALID_ARGUMENT when it is neither.
    """
    place = url.removeprefix("s3://")
    endpoint = ""
    if elsewhere := _ENDPOINT.fullmatch(place):
        scheme, host, port, place = elsewhere.groups()
        endpoint = f"{scheme or 'http://'}{host}:{port}"
    bucket, _, prefix = place.partition("/")
    return S3Store(bucket, prefix, endpoint=endpoint)


class Directories(Artifacts):
    """The models of one repository in S3, and those that are on disk.

    Args:
        bucket: what lies under the prefix.
        directory: see `Artifacts`.
        budget: see `DiskRoom`.
        let_go: see `DiskRoom`.
        derived: see `DiskRoom`.
    """

    def __init__(
        self,
        bucket: S3Store,
        directory: Path,
        *,
        budget: int | None = None,
        let_go: Callable[[str], bool] = lambda _: False,
        derived: Derived | None = None,
    ) -> None:
        super().__init__(bucket, directory, budget=budget, let_go=let_go, derived=derived)
        self._bucket = bucket
        self._known: set[str] = set()
        self._was_empty = False

    def __repr__(self) -> str:
        return f"<Directories of {self._bucket.uri}>"

    @property
    def uri(self) -> str:
        """The prefix as an s3:// URI."""
        return self._bucket.uri

    def has(self, name: str) -> bool:
        """Whether the repository had that model when it was asked last."""
        return name in self._known

    def scan(self) -> dict[str, str]:
        """Every model by its etag, in order. As to Triton, each directory with a file in it is a model.

        Raises:
            MmeError: as `Store.stat`; INVALID_ARGUMENT when the prefix is that of one model.
        """
        found: dict[str, list[StoredObject]] = {}
        has_config = False
        for obj in self._bucket.objects():
            has_config |= obj.name == _CONFIG
            name, slash, _ = obj.name.partition("/")
            if slash and not name.startswith(".") and not wrong_name(name):
                found.setdefault(name, []).append(obj)
        models = {name: _etag(found[name]) for name in sorted(found) if _has_files(found[name])}
        if has_config and all(name.isdigit() for name in models):
            raise invalid_argument(
                f"{self.uri}{_CONFIG} is a model's: name the prefix above it, under which a repository has models"
            )
        if not models and not self._was_empty:
            _log.warning("the repository %s has no models: put directories there, or name another prefix", self.uri)
        self._known, self._was_empty = set(models), not models
        return models

    def _stat(self, name: str) -> StoredDirectory:
        """The model's directory.

        Raises:
            MmeError: UNKNOWN_MODEL when there is none, INVALID_MODEL for one that can be none on disk; else as
                `Store.stat`.
        """
        objects = tuple(self._bucket.objects(f"{name}/"))
        if not objects:
            self._known.discard(name)
            raise MmeError(
                Kind.UNKNOWN_MODEL,
                f"Request for unknown model: '{name}' is not found: there is nothing under {self.uri}{name}/, put "
                f"{_CONFIG} and 1/ there",
            )
        self._known.add(name)
        if not _has_files(objects):
            raise invalid_model(
                f"model '{name}' has no files in {self.uri}{name}/: put {_CONFIG} and 1/model.onnx there, or what its "
                "backend loads"
            )
        check_names((obj.name for obj in objects), self.uri)
        return StoredDirectory(name, sum(obj.size for obj in objects), _etag(objects), objects)

    def _bring(self, obj: StoredObject, path: Path, claim: Callable[[int], None], cancelled: Callable[[], bool]) -> int:
        assert isinstance(obj, StoredDirectory)  # noqa: S101 - as _stat returns them
        claim(obj.size)
        try:
            transfer(obj.objects, self._open, path, what=f"model '{obj.name}'", cancelled=cancelled)
        except MmeError as error:
            if error.kind is not Kind.UNKNOWN_MODEL:
                raise
            reason = f"an object of model '{obj.name}' in {self.uri} was removed while it was downloaded: try again"
            raise MmeError(Kind.UNAVAILABLE, reason) from error
        return obj.size

    def _open(self, obj: StoredObject) -> BinaryIO:
        return self._bucket.open(obj)


def _has_files(objects: Iterable[StoredObject]) -> bool:
    """Whether any is more than a mark of a directory, as the console makes them."""
    return any(not obj.name.endswith("/") for obj in objects)


def _etag(objects: Iterable[StoredObject]) -> str:
    digest = hashlib.sha256()
    for obj in sorted(objects, key=lambda obj: obj.name):
        digest.update(f"{obj.name}\0{obj.size}\0{obj.etag}\0".encode())
    return digest.hexdigest()
