"""Where archives come from: an S3 prefix or a local folder, behind one protocol.

A store lists, describes and opens archives by relative names such as `tenant/a.tar.gz`. It knows nothing of what is
inside them, and it never reads the environment: boto3 finds credentials, region and endpoint by its own rules. What
botocore raises becomes one of our errors at one border, by its code and never by its text. Synchronous and
thread-safe; runs on load threads.
"""

from __future__ import annotations

import errno
import itertools
import os
import re
import stat
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError, PartialCredentialsError

from model_handlers.errors import Kind, MmeError, invalid_argument
from serve.sources.ranged_download import RangedDownload

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from typing import BinaryIO

ARCHIVE_SUFFIX = ".tar.gz"
_MAX_NAME = 1024  # S3's own limit for a key

_BUCKET = re.compile(r"[a-z0-9][a-z0-9.\-]{1,61}[a-z0-9]")
_PART_SIZE = 12 << 20
_PARTS_AHEAD = 4
_CONNECTIONS = 64  # kept open: eight loads at a time, each with four parts, and a few files beside those
_CONNECT_SECONDS = 5
_READ_SECONDS = 15


@dataclass(frozen=True, slots=True)
class StoredObject:
    """An archive as its store knows it: relative name, bytes, and an etag that changes when the content does."""

    name: str
    size: int
    etag: str


class UntoldError(MmeError):
    """The store does not say whether there is such an archive. Kind UNAVAILABLE."""

    __slots__ = ()

    def __init__(self, message: str) -> None:
        super().__init__(Kind.UNAVAILABLE, message)


class UnreachableError(UntoldError):
    """The store can't be asked now; what it said before may hold still."""

    __slots__ = ()


class Store(Protocol):
    """A place that holds archives."""

    @property
    def uri(self) -> str:
        """The place as its user wrote it, for errors and logs."""

    def stat(self, name: str) -> StoredObject:
        """What the store holds under that name.

        Raises:
            MmeError: INVALID_ARGUMENT for a name that can't be one, UNKNOWN_MODEL when there is none, UNAVAILABLE
                as an `UntoldError` when the store refuses to say, as an `UnreachableError` when it cannot be asked.
        """

    def open(self, obj: StoredObject) -> BinaryIO:
        """The content of exactly that version, to be read once, forward, and closed.

        Reading raises UNAVAILABLE when the object was replaced since `stat`: two versions are never mixed.
        """

    def list(self, limit: int | None = None) -> Iterator[StoredObject]:
        """The archives (`*.tar.gz`) in the order of their names, at most `limit` of them."""


def open_store(uri: str) -> Store:
    """The store of `s3://bucket/prefix`, or of a local folder.

    Raises:
        MmeError: INVALID_ARGUMENT when it is neither.
    """
    scheme, separator, rest = uri.partition("://")
    if not separator:
        return LocalStore(Path(uri))
    if scheme == "file":
        return LocalStore(Path(rest))
    if scheme != "s3":
        raise invalid_argument(f"model store '{uri}' is neither s3://bucket/prefix nor a local folder")
    bucket, _, prefix = rest.partition("/")
    return S3Store(bucket, prefix)


def validate_name(name: str) -> str:
    """The name itself, if it can name an archive: relative, and inside its store under every reading of it.

    Raises:
        MmeError: INVALID_ARGUMENT, saying what is wrong with it.
    """
    reason = wrong_name(name)
    if reason:
        shown = ascii(name if len(name) <= 100 else f"{name[:100]}...")
        raise invalid_argument(f"model name {shown} {reason}: give a relative name such as 'tenant/model.tar.gz'")
    return name


def wrong_name(name: str) -> str:
    """What is wrong with a name that is to lie inside of a store; "" for nothing."""
    if not name:
        return "is empty"
    if any(c < " " or c == "\x7f" or "\ud800" <= c <= "\udfff" for c in name):
        return "has control characters or bad UTF-8"
    if len(name.encode()) > _MAX_NAME:
        return f"is longer than {_MAX_NAME} bytes"
    if name.startswith("/") or "\\" in name:
        return "starts with '/' or has a backslash"
    if any(part in ("", ".", "..") for part in name.split("/")):
        return "has an empty part, '.' or '..' between its slashes"
    return ""


def _unknown_model(name: str, uri: str) -> MmeError:
    return MmeError(
        Kind.UNKNOWN_MODEL, f"model '{name}' is not in the store {uri}: check the name, or put the archive there"
    )


def _replaced(name: str, uri: str) -> MmeError:
    return MmeError(Kind.UNAVAILABLE, f"model '{name}' in {uri} was replaced while it was downloaded: try again")


class LocalStore:
    """The archives in a folder and the folders below it."""

    def __init__(self, directory: Path) -> None:
        if not directory.is_dir():
            raise invalid_argument(f"model store '{directory}' is not a directory: create it, or name another")
        self._directory = directory

    @property
    def uri(self) -> str:
        """The folder's path."""
        return str(self._directory)

    def __repr__(self) -> str:
        return f"<LocalStore {self.uri}>"

    def stat(self, name: str) -> StoredObject:
        """See `Store.stat`."""
        path = self._directory / validate_name(name)
        with self._files(name):
            return self._described(name, path.stat())

    def open(self, obj: StoredObject) -> BinaryIO:
        """See `Store.open`. A file that is replaced by renaming another over it is read to its end as it was."""
        with self._files(obj.name):
            file = (self._directory / validate_name(obj.name)).open("rb")
        if self._described(obj.name, os.fstat(file.fileno())) != obj:
            file.close()
            raise _replaced(obj.name, self.uri)
        return file

    def list(self, limit: int | None = None) -> Iterator[StoredObject]:
        """See `Store.list`."""
        return itertools.islice(self._archives(), limit)

    def _archives(self) -> Iterator[StoredObject]:
        paths = (Path(base, file) for base, _, files in os.walk(self._directory) for file in files)
        for name in sorted(path.relative_to(self._directory).as_posix() for path in paths):
            if name.endswith(ARCHIVE_SUFFIX) and not wrong_name(name):
                try:
                    yield self.stat(name)
                except MmeError:  # gone since, or not a file: the list is of those that can be opened
                    continue

    def _described(self, name: str, status: os.stat_result) -> StoredObject:
        if not stat.S_ISREG(status.st_mode):
            raise _unknown_model(name, self.uri)
        return StoredObject(name, status.st_size, f"{status.st_size:x}-{status.st_mtime_ns:x}-{status.st_ino:x}")

    @contextmanager
    def _files(self, name: str) -> Iterator[None]:
        try:
            yield
        except (FileNotFoundError, NotADirectoryError) as error:
            if not self._directory.is_dir():
                raise UnreachableError(f"the folder {self.uri} is not there: mount it again") from error
            raise _unknown_model(name, self.uri) from error
        except OSError as error:
            if error.errno == errno.ENAMETOOLONG:
                raise _unknown_model(name, self.uri) from error
            reason = f"model '{name}' in {self.uri} cannot be opened: {error.strerror}; check its permissions"
            if isinstance(error, PermissionError):
                raise UntoldError(reason) from error
            raise UnreachableError(reason) from error


# What S3 answers, by its code; HEAD has no body and gives the status as the code.
_NO_KEY = ("NoSuchKey",)
_NO_BUCKET = ("NoSuchBucket",)
_ABSENT = ("NotFound", "404")  # the object, or its bucket
_REPLACED = ("PreconditionFailed", "412", "InvalidRange", "416")
_DENIED = (
    "AccessDenied",
    "AllAccessDisabled",
    "ExpiredToken",
    "Forbidden",
    "InvalidAccessKeyId",
    "InvalidToken",
    "SignatureDoesNotMatch",
    "400",  # HEAD with an expired token
    "403",
)
_ARCHIVED = ("InvalidObjectState",)
NO_CREDENTIALS: Mapping[str, str] = {}  # but those that boto3 finds
_BUSY = (429, *range(500, 600))  # statuses that say nothing about what was asked for


class S3Store:
    """The archives under a prefix of a bucket.

    Large ones are downloaded in parts in parallel, each on the condition that the etag is still the one of `stat`.
    """

    def __init__(
        self,
        bucket: str,
        prefix: str = "",
        *,
        endpoint: str = "",
        credentials: Mapping[str, str] = NO_CREDENTIALS,
        part_size: int = _PART_SIZE,
        parts_ahead: int = _PARTS_AHEAD,
        attempts: int = 4,
    ) -> None:
        """Make the client; nothing is asked of S3 yet.

        Args:
            bucket: its name.
            prefix: what stands before every name, without slashes around it.
            endpoint: the URL of an S3 that is not AWS's; "" for the one that boto3 finds.
            credentials: what a session of boto3 is made with.
            part_size: bytes of a ranged GET; an object that is not larger is fetched by one plain GET.
            parts_ahead: parts of one object in memory and on the way.
            attempts: of each request, before its error counts.
        """
        if not _BUCKET.fullmatch(bucket):
            raise invalid_argument(f"'{bucket}' is not the name of a bucket: write s3://bucket/prefix")
        prefix = prefix.strip("/")
        self._bucket = bucket
        self._endpoint = endpoint
        self._prefix = f"{validate_name(prefix)}/" if prefix else ""
        self._part_size = part_size
        self._parts_ahead = parts_ahead
        with self._s3():
            self._client: Any = boto3.session.Session(**credentials).client(
                "s3",
                endpoint_url=endpoint or None,
                config=Config(
                    retries={"mode": "standard", "total_max_attempts": attempts},
                    max_pool_connections=_CONNECTIONS,
                    connect_timeout=_CONNECT_SECONDS,
                    read_timeout=_READ_SECONDS,
                ),
            )

    @property
    def uri(self) -> str:
        """The prefix as an s3:// URI."""
        return f"s3://{self._endpoint and f'{self._endpoint}/'}{self._bucket}/{self._prefix}"

    def __repr__(self) -> str:
        return f"<S3Store {self.uri}>"

    def stat(self, name: str) -> StoredObject:
        """See `Store.stat`."""
        validate_name(name)
        with self._s3(name):
            head = self._client.head_object(Bucket=self._bucket, Key=self._prefix + name)
        return StoredObject(name, head["ContentLength"], head["ETag"].strip('"'))

    def open(self, obj: StoredObject) -> BinaryIO:
        """See `Store.open`. Closing it early stops the parts that are on the way."""

        def open_range(start: int, stop: int) -> _Body:
            return self._get(obj, start, stop)

        download = RangedDownload(
            open_range, obj.size, part_size=self._part_size, ahead=self._parts_ahead, name=obj.name
        )
        # not in a BufferedReader: its lock would let no other thread close it while a read waits
        return cast("BinaryIO", download)

    def list(self, limit: int | None = None) -> Iterator[StoredObject]:
        """See `Store.list`."""
        return itertools.islice(self._archives(), limit)

    def _archives(self) -> Iterator[StoredObject]:
        return (obj for obj in self.objects() if obj.name.endswith(ARCHIVE_SUFFIX) and not wrong_name(obj.name))

    def objects(self, beginning: str = "") -> Iterator[StoredObject]:
        """Everything whose name begins like that, whatever it is and however it is called; `open` takes it."""
        prefix = self._prefix + beginning
        with self._s3(beginning):
            pages = self._client.get_paginator("list_objects_v2").paginate(Bucket=self._bucket, Prefix=prefix)
            for entry in itertools.chain.from_iterable(page.get("Contents", ()) for page in pages):
                name = entry["Key"].removeprefix(self._prefix)
                yield StoredObject(name, entry["Size"], entry["ETag"].strip('"'))

    def _get(self, obj: StoredObject, start: int, stop: int) -> _Body:
        condition = {"IfMatch": f'"{obj.etag}"'}
        if (start, stop) != (0, obj.size):
            condition["Range"] = f"bytes={start}-{stop - 1}"
        with self._s3(obj.name):
            answer = self._client.get_object(Bucket=self._bucket, Key=self._prefix + obj.name, **condition)
        body = _Body(self, obj.name, answer["Body"])
        if answer["ContentLength"] != stop - start:  # a server that ignores ranges, or the object is another one
            body.close()
            raise _replaced(obj.name, self.uri)
        return body

    @contextmanager
    def _s3(self, name: str = "") -> Iterator[None]:
        """The border: what botocore raises leaves as one of our errors."""
        try:
            yield
        except ClientError as error:
            raise self._refused(error, name) from error
        except (NoCredentialsError, PartialCredentialsError) as error:
            reason = f"no AWS credentials for {self.uri}: give the process a role or a profile"
            raise UntoldError(reason) from error
        except BotoCoreError as error:
            reason = f"the store {self.uri} cannot be reached, check network, endpoint and region: {error}"
            raise UnreachableError(reason) from error

    def _refused(self, error: ClientError, name: str) -> MmeError:
        """What an error that S3 answered means."""
        code = str(error.response.get("Error", {}).get("Code", ""))
        if code in _REPLACED:
            return _replaced(name, self.uri)
        if code in _NO_KEY or (code in _ABSENT and name and self._has_bucket()):
            return _unknown_model(name, self.uri)
        if code in _NO_BUCKET or code in _ABSENT:
            reason = f"the bucket of {self.uri} does not exist: create it, or name another"
        elif code in _DENIED:
            reason = (
                f"S3 denies access to {self.uri}{name}: allow s3:GetObject and s3:ListBucket to this role "
                "(without the latter, S3 denies what does not exist)"
            )
        elif code in _ARCHIVED:
            reason = f"{self.uri}{name} is archived in a cold storage class: restore it first"
            return MmeError(Kind.UNAVAILABLE, reason)
        else:
            reason = f"S3 answered {code or 'an error'} for {self.uri}{name}: try again"
            if error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0) in _BUSY:
                return UnreachableError(reason)
        return UntoldError(reason)

    def _has_bucket(self) -> bool:
        """False only when S3 says so: HEAD of an object answers 404 alike for the object and for the bucket."""
        try:
            self._client.head_bucket(Bucket=self._bucket)
        except ClientError as error:
            return str(error.response.get("Error", {}).get("Code", "")) not in (*_ABSENT, *_NO_BUCKET)
        except BotoCoreError:
            return True
        return True


class _Body:
    """A GET's body, whose errors are ours."""

    def __init__(self, store: S3Store, name: str, body: Any) -> None:
        self._store = store
        self._name = name
        self._body = body

    def readinto(self, buffer: memoryview) -> int:
        with self._store._s3(self._name):  # noqa: SLF001 - the same module's border
            received: int = self._body.readinto(buffer)
        return received

    def close(self) -> None:
        self._body.close()
