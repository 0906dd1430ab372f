"""The models of repositories in S3: the directories under their prefixes, each brought to disk when it is loaded.

A model is what its objects are: their names, sizes and etags make its own etag, by which it lies on disk as an archive
does (see `Artifacts`), so that one that is there is not downloaded again, and never half. On disk it lies in a
directory of its name inside the one that is called by content, without the versions that its version policy leaves
out. One listing of a prefix tells all its models, another one a model. A name that two repositories have is refused, as
on disk.

`has` is for the event loop; the rest blocks, and is for threads.
"""

from __future__ import annotations

import hashlib
import logging
import re
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from model_handlers.config.bounds import MAX_CONFIG_SIZE
from model_handlers.errors import Kind, MmeError, invalid_argument, invalid_model
from serve.sources.artifacts import Artifacts, key_of
from serve.sources.bucket_versions import has_choice, served
from serve.sources.credentials import NO_CREDENTIALS
from serve.sources.layout import CONFIG_NAME, CONFIGS
from serve.sources.store import ReplacedError, StoredObject, UnreachableError, wrong_name
from serve.sources.transfer import check_names, transfer
from serve.threads import watched

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path
    from typing import BinaryIO

    from model_handlers.cancel_token import CancelToken
    from serve.sources.copy_sums import Sums
    from serve.sources.disk_room import Derived
    from serve.sources.s3_store import S3Store

_log = logging.getLogger("mme.load")
_ENDPOINT = re.compile(r"(https?://)?([0-9A-Za-z.-]+|\[[0-9A-Fa-f:]+\]):([0-9]+)/(.+)")


@dataclass(frozen=True, slots=True)
class StoredDirectory(StoredObject):
    """A model's directory as its bucket has it: all bytes, and an etag that changes when any object does.

    Attributes:
        bucket: where it is.
        objects: what lies in it; names begin with the model's.
    """

    bucket: S3Store
    objects: tuple[StoredObject, ...]


def open_bucket(url: str, credentials: Mapping[str, str] = NO_CREDENTIALS) -> S3Store:
    """What lies under `s3://bucket/prefix`, or `s3://https://host:port/bucket/prefix` of an S3 that is not AWS's.

    Without https:// such a one is asked by HTTP, as Triton does.

    Raises:
        MmeError: INVALID_ARGUMENT when it is neither.
    """
    from serve.sources.s3_store import S3Store  # noqa: PLC0415 - boto3 comes with it: who serves a folder needs none

    place = url.removeprefix("s3://")
    endpoint = ""
    if elsewhere := _ENDPOINT.fullmatch(place):
        scheme, host, port, place = elsewhere.groups()
        endpoint = f"{scheme or 'http://'}{host}:{port}"
    bucket, _, prefix = place.partition("/")
    return S3Store(bucket, prefix, endpoint=endpoint, credentials=credentials)


class Directories(Artifacts):
    """The models of repositories in S3, and those that are on disk.

    Attributes:
        refused: name → why it is none that can be served, as of the last look at all of them.

    Args:
        buckets: what lies under the prefix of each.
        directory: see `Artifacts`.
        budget: see `DiskRoom`.
        let_go: see `DiskRoom`.
        derived: see `DiskRoom`.
        config_name: see `Scripts`.
    """

    def __init__(
        self,
        buckets: Sequence[S3Store],
        directory: Path,
        *,
        budget: int | None = None,
        let_go: Callable[[str], bool] = lambda _: False,
        derived: Derived | None = None,
        config_name: str = "",
    ) -> None:
        super().__init__(buckets[0], directory, budget=budget, let_go=let_go, derived=derived)
        self.refused: dict[str, str] = {}
        self._buckets = tuple(buckets)
        self._places: dict[str, str] = {}  # model → where it was when that was asked last
        self._empty: set[str] = set()
        self._config_name = config_name
        self._configs: dict[str, tuple[str, str]] = {}  # model → etag and text, of those with several versions
        self._whole: set[str] = set()  # models of which all versions are wanted

    def __repr__(self) -> str:
        return f"<Directories of {self.uri}>"

    @property
    def uri(self) -> str:
        """The prefixes as s3:// URIs."""
        return ", ".join(bucket.uri for bucket in self._buckets)

    def has(self, name: str) -> bool:
        """Whether a repository had that model when it was asked last."""
        return name in self._places

    def place(self, name: str) -> str:
        """The prefix as an s3:// URI under which a model is, as far as is known."""
        return self._places.get(name, self._buckets[0].uri)

    def want_whole(self, name: str) -> None:
        """Fetch all versions of a model from now on: a client has it loaded with another configuration."""
        self._whole.add(name)

    def scan(self) -> dict[str, str]:
        """Every model, in order, and what its files look like. As to Triton, a directory with a file in it is a model.

        Raises:
            MmeError: as `Store.stat`; INVALID_ARGUMENT when a prefix is that of one model.
        """
        prints, places, refused = dict[str, str](), dict[str, str](), dict[str, str]()
        for bucket in self._buckets:
            for name, etag in self._scan(bucket).items():
                if name in places:
                    refused[name] = _ambiguous(name, [places[name], bucket.uri]).message
                prints[name] = refused.get(name, etag)
                places[name] = bucket.uri
        self._places, self.refused = places, refused
        return dict(sorted(prints.items()))

    def _scan(self, bucket: S3Store) -> dict[str, str]:
        """Every model of one repository by its etag."""
        found: dict[str, list[StoredObject]] = {}
        has_config = False
        for obj in bucket.objects():
            has_config |= obj.name == CONFIG_NAME
            name, slash, _ = obj.name.partition("/")
            if slash and not name.startswith(".") and not wrong_name(name):
                found.setdefault(name, []).append(obj)
        models = {name: _etag(objects) for name, objects in found.items() if _has_files(objects)}
        if has_config and all(name.isdigit() for name in models):
            raise invalid_argument(
                f"{bucket.uri}{CONFIG_NAME} is a model's: name the prefix above it, under which a repository has models"
            )
        if models:
            self._empty.discard(bucket.uri)
        elif bucket.uri not in self._empty:
            self._empty.add(bucket.uri)
            _log.warning("the repository %s has no models: put directories there, or name another prefix", bucket.uri)
        return models

    def _stat(self, name: str, token: CancelToken, *, hurried: bool = False) -> StoredDirectory:
        """The model's directory.

        Raises:
            MmeError: UNKNOWN_MODEL when there is none, INVALID_MODEL for one that can be none on disk, or that two
                repositories have; else as `Store.stat`.
        """
        holders = self._holders(name, token, hurried=hurried)
        if not holders:
            self._places.pop(name, None)
            raise MmeError(
                Kind.UNKNOWN_MODEL,
                f"Request for unknown model: '{name}' is not found: there is nothing under "
                f"{' or '.join(f'{bucket.uri}{name}/' for bucket in self._buckets)}, put {CONFIG_NAME} and 1/ there",
            )
        bucket, objects = holders[0]
        self._places[name] = bucket.uri
        if len(holders) > 1:
            raise _ambiguous(name, [each.uri for each, _ in holders])
        if not _has_files(objects):
            raise invalid_model(
                f"model '{name}' has no files in {bucket.uri}{name}/: put {CONFIG_NAME} and 1/model.onnx there, or "
                "what its backend loads"
            )
        check_names((obj.name for obj in objects), bucket.uri)
        if name not in self._whole and has_choice(objects):
            objects = served(objects, self._config(bucket, name, objects), name)
        return StoredDirectory(name, sum(obj.size for obj in objects), _etag(objects), bucket, objects)

    def _holders(
        self, name: str, token: CancelToken, *, hurried: bool
    ) -> list[tuple[S3Store, tuple[StoredObject, ...]]]:
        """The repositories that have something under a name. One that can't be asked is no outage of another's."""
        holders, outage = [], None
        for bucket in self._buckets:
            try:
                objects = tuple(bucket.objects(f"{name}/", token, hurried=hurried))
            except UnreachableError as error:
                outage = error
                continue
            if objects:
                holders.append((bucket, objects))
        if outage is not None and not holders:
            whole = outage.whole and len(self._buckets) == 1
            raise UnreachableError(outage.message, whole=whole, asked_pause=outage.asked_pause) from outage
        return holders

    def _config(self, bucket: S3Store, name: str, objects: Sequence[StoredObject]) -> str:
        """What the configuration of a model says, "" where there is none to be read."""
        places = (f"{name}/{CONFIGS}/{self._config_name}.pbtxt", f"{name}/{CONFIG_NAME}")
        by_name = {obj.name: obj for obj in objects if 0 < obj.size <= MAX_CONFIG_SIZE}
        found = next((by_name[place] for place in places if place in by_name), None)
        if found is None:
            return ""
        etag, text = self._configs.get(name, ("", ""))
        if etag != found.etag:
            with _unless_removed(name, bucket), closing(bucket.open(found)) as stream:
                text = b"".join(iter(lambda: stream.read(MAX_CONFIG_SIZE), b"")).decode(errors="replace")
            self._configs[name] = found.etag, text
        return text

    def _bring(
        self,
        obj: StoredObject,
        path: Path,
        claim: Callable[[int], None],
        note: Callable[[Sums], None],
        token: CancelToken,
    ) -> int:
        assert isinstance(obj, StoredDirectory)  # noqa: S101 - as _stat returns them
        claim(obj.size)
        with _unless_removed(obj.name, obj.bucket):
            bucket = obj.bucket

            def opened(each: StoredObject) -> BinaryIO:
                return watched(bucket.open(each), token)

            transfer(obj.objects, opened, path, what=f"model '{obj.name}'", note=note, token=token)
        return obj.size

    def _key(self, name: str) -> str:
        return key_of(self.uri, name)


@contextmanager
def _unless_removed(name: str, bucket: S3Store) -> Iterator[None]:
    try:
        yield
    except MmeError as error:
        if error.kind is not Kind.UNKNOWN_MODEL:
            raise
        raise ReplacedError(name, bucket.uri) from error


def _ambiguous(name: str, places: Sequence[str]) -> MmeError:
    where = " and ".join(places)
    return invalid_model(f"model '{name}' is in {len(places)} repositories, {where}: rename or remove one")


def _has_files(objects: Iterable[StoredObject]) -> bool:
    """Whether any is more than a mark of a directory, as the console makes them."""
    return any(not obj.name.endswith("/") for obj in objects)


def _etag(objects: Iterable[StoredObject]) -> str:
    digest = hashlib.sha256()
    for obj in sorted(objects, key=lambda obj: obj.name):
        digest.update(f"{obj.name}\0{obj.size}\0{obj.etag}\0".encode())
    return digest.hexdigest()
