"""Repositories in S3: the models are the directories under prefixes, each brought to disk when it is loaded.

The names, sizes and etags of a model's objects make its own etag, by which it lies on disk as an archive does (see
`Artifacts`), in a directory of its name, without versions that its policy leaves out. Names of objects are not trusted:
none leaves the directory, which appears complete or not at all. `has` is for the event loop; the rest blocks.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import re
import threading
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from isal import isal_zlib

from model_handlers.config.bounds import MAX_CONFIG_SIZE
from model_handlers.errors import Kind, MmeError, invalid_argument, invalid_model
from model_handlers.system.disk import disk_errors, new_file, publish, staging_directory
from model_handlers.system.threads import NEVER
from serve.sources.artifacts import Artifacts, key_of
from serve.sources.layout import CONFIG_NAME, CONFIGS
from serve.sources.s3_rules import has_choice, served
from serve.sources.store import NO_CREDENTIALS, ReplacedError, StoredObject, UnreachableError, wrong_name
from serve.threads import watched

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path
    from typing import BinaryIO

    from model_handlers.system.threads import CancelToken
    from serve.sources.disk_budget import Derived, DiskClaim, Sums
    from serve.sources.s3 import S3Store


_log = logging.getLogger("mme.load")
_ENDPOINT = re.compile(r"(https?://)?([0-9A-Za-z.-]+|\[[0-9A-Fa-f:]+\]):([0-9]+)/(.+)")
_LANES = 4  # small objects at a time
_LARGE = 12 << 20  # bytes from which objects take turns: each is fetched in parts at a time, which are in memory
_COPY_SIZE = 1 << 20
_MOST_NAME = 255  # bytes, of file systems


@dataclass(frozen=True, slots=True)
class StoredDirectory(StoredObject):
    """A model's directory as its bucket has it: all bytes, and an etag that changes when any object does."""

    bucket: S3Store
    objects: tuple[StoredObject, ...]


def open_bucket(url: str, credentials: Mapping[str, str] = NO_CREDENTIALS) -> S3Store:
    """What lies under `s3://bucket/prefix`, or `s3://[https://]host:port/bucket/prefix` of an S3 that is not AWS's."""
    from serve.sources.s3 import S3Store  # noqa: PLC0415 - boto3 comes with it: folders need none

    place = url.removeprefix("s3://")
    endpoint = ""
    if elsewhere := _ENDPOINT.fullmatch(place):
        scheme, host, port, place = elsewhere.groups()
        endpoint = f"{scheme or 'http://'}{host}:{port}"
    bucket, _, prefix = place.partition("/")
    return S3Store(bucket, prefix, endpoint=endpoint, credentials=credentials)


class Directories(Artifacts):
    """The models of repositories in S3, and those that are on disk. Arguments as of `Artifacts`, and `Scripts`.

    Attributes:
        refused: name → why it can't be served, as of the last look at all of them.
    """

    def __init__(
        self,
        buckets: Sequence[S3Store],
        directory: Path,
        *,
        budget: int | None = None,
        evict: Callable[[str], bool] = lambda _: False,
        derived: Derived | None = None,
        config_name: str = "",
    ) -> None:
        super().__init__(buckets[0], directory, budget=budget, evict=evict, derived=derived)
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
        return ", ".join(bucket.uri for bucket in self._buckets)

    def has(self, name: str) -> bool:
        """Whether a repository had that model when it was asked last."""
        return name in self._places

    def place(self, name: str) -> str:
        """The prefix as an s3:// URI under which a model is, as far as is known."""
        return self._places.get(name, self._buckets[0].uri)

    def want_whole(self, name: str) -> None:
        """Fetch all versions of a model from now on: it is loaded with another configuration."""
        self._whole.add(name)

    def scan(self) -> dict[str, str]:
        """Every model, in order, and what its files look like. A directory with a file in it is a model."""
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

    def _bring(self, obj: StoredObject, unpacking: DiskClaim) -> int:
        assert isinstance(obj, StoredDirectory)  # noqa: S101 - as _stat returns them
        self.room.claim(unpacking, obj.size)
        bucket, token, note = obj.bucket, unpacking.token, functools.partial(self.room.appears, unpacking)

        def opened(each: StoredObject) -> BinaryIO:
            return watched(bucket.open(each), token)

        with _unless_removed(obj.name, bucket):
            transfer(obj.objects, opened, unpacking.path, what=f"model '{obj.name}'", note=note, token=token)
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
    return any(not obj.name.endswith("/") for obj in objects)


def _etag(objects: Iterable[StoredObject]) -> str:
    digest = hashlib.sha256()
    for obj in sorted(objects, key=lambda obj: obj.name):
        digest.update(f"{obj.name}\0{obj.size}\0{obj.etag}\0".encode())
    return digest.hexdigest()


def check_names(names: Iterable[str], where: str) -> None:
    """Refuse names that are not those of files in a directory; one that ends with a slash is a directory's."""
    files, folders = set[str](), set[str]()
    for name in names:
        path = name.removesuffix("/")
        reason = wrong_name(path)
        if not reason and any(len(part.encode()) > _MOST_NAME for part in path.split("/")):
            reason = f"has a name of more than {_MOST_NAME} bytes between its slashes"
        if reason:
            raise invalid_model(f"object {name!a} in {where} {reason}: rename or remove it")
        (files if path == name else folders).add(path)
        folders.update(str(parent) for parent in PurePosixPath(path).parents)
    both = min(files & folders, default="")
    if both:
        raise invalid_model(f"'{both}' in {where} is an object and has objects below it: rename or remove it")


def transfer(
    objects: Sequence[StoredObject],
    open_object: Callable[[StoredObject], BinaryIO],
    destination: Path,
    *,
    what: str,
    note: Callable[[Sums], None] = lambda _: None,
    token: CancelToken = NEVER,
) -> None:
    """Bring objects, whose names were checked, into the new directory `destination`, whose parent exists.

    Several small ones are fetched at once, large ones in turn, each in parts. Returns when the directory is complete
    and on the disk; after any failure nothing of it is left. Objects have names below the destination; one that ends
    with a slash is an empty directory. `note` is told the checksums before the directory appears.
    """
    parent = destination.parent
    with disk_errors(f"{what} cannot be written to {parent}"), staging_directory(parent) as staging:
        folders = _make_folders(objects, staging)
        files = sorted((obj for obj in objects if not obj.name.endswith("/")), key=lambda obj: obj.size)
        moving = _Transfer(open_object, staging)
        moving.run(files, token)
        note(moving.sums)
        publish(staging, folders, destination)


def _make_folders(objects: Iterable[StoredObject], root: Path) -> list[Path]:
    wanted = {PurePosixPath()}
    for obj in objects:
        path = PurePosixPath(obj.name)
        wanted.update([path] if obj.name.endswith("/") else (), path.parents)
    ordered = sorted(wanted, key=lambda path: len(path.parts))
    for path in ordered[1:]:
        (root / path).mkdir()
        (root / path).chmod(0o755)  # whatever the umask says: other users of the host may serve it
    return [root / path for path in reversed(ordered)]


class _Transfer:
    def __init__(self, open_object: Callable[[StoredObject], BinaryIO], root: Path) -> None:
        self.sums: Sums = {}
        self._open = open_object
        self._root = root
        self._guard = threading.Lock()  # of the two below
        self._streams: set[BinaryIO] = set()
        self._stopped = False
        self._large = threading.Lock()

    def run(self, objects: Sequence[StoredObject], token: CancelToken) -> None:
        with ThreadPoolExecutor(_LANES, "download files") as lanes:
            waiting = {lanes.submit(self._fetch, obj) for obj in objects}

            def over(seconds: float) -> bool | None:
                nonlocal waiting
                done, waiting = wait(waiting, seconds, FIRST_EXCEPTION)
                for each in done:
                    each.result()
                return None if waiting else True

            try:
                token.wait(over)
            except BaseException:
                self._stop()
                lanes.shutdown(wait=False, cancel_futures=True)
                raise

    def _fetch(self, obj: StoredObject) -> None:
        with self._large if obj.size >= _LARGE else nullcontext(), new_file(self._root / obj.name) as file:
            self.sums[obj.name] = obj.size, self._receive(obj, file) if obj.size else 0
            file.flush()
            os.fchmod(file.fileno(), 0o644)
            os.fsync(file.fileno())

    def _receive(self, obj: StoredObject, file: BinaryIO) -> int:
        crc = 0
        with self._guard:
            if self._stopped:
                return crc
            stream = self._open(obj)
            self._streams.add(stream)
        try:
            while block := stream.read(_COPY_SIZE):
                file.write(block)
                crc = isal_zlib.crc32(block, crc)
        finally:
            with self._guard:
                self._streams.discard(stream)
            stream.close()
        return crc

    def _stop(self) -> None:
        with self._guard:
            self._stopped = True
            streams = list(self._streams)
        for stream in streams:
            stream.close()
