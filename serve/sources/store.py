"""Where archives come from: an S3 prefix (`s3`) or a local folder, behind one protocol; credentials of S3 in a file.

A store lists, describes and opens archives by relative names such as `tenant/a.tar.gz`, and never looks into them.
Thread-safe; runs on load threads.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from model_handlers.errors import Kind, MmeError, invalid_argument
from model_handlers.system.disk import etag_of
from model_handlers.system.threads import NEVER, advised

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from typing import BinaryIO

    from model_handlers.system.threads import CancelToken


ARCHIVE_SUFFIX = ".tar.gz"
_MAX_NAME = 1024  # S3's own limit for a key


# Fields of the file → what a session of boto3 calls them.
_FIELDS = {
    "key_id": "aws_access_key_id",
    "secret_key": "aws_secret_access_key",
    "session_token": "aws_session_token",
    "region": "region_name",
    "profile": "profile_name",
}
Credentials = dict[str, str]  # arguments of a session of boto3; none for those that boto3 finds by itself
NO_CREDENTIALS: Mapping[str, str] = {}  # but those that boto3 finds


@dataclass(frozen=True, slots=True)
class StoredObject:
    """An archive as its store knows it: relative name, bytes, and an etag that changes when the content does."""

    name: str
    size: int
    etag: str


class UntoldError(MmeError):
    """The store does not say whether there is such an archive. Kind UNAVAILABLE."""

    def __init__(self, message: str) -> None:
        super().__init__(Kind.UNAVAILABLE, message)


class ReplacedError(MmeError):
    """What the store holds under a name is not what it was when it was looked up. Kind UNAVAILABLE."""

    def __init__(self, name: str, uri: str) -> None:
        super().__init__(Kind.UNAVAILABLE, f"model '{name}' in {uri} was replaced while it was downloaded: try again")


class UnreachableError(UntoldError):
    """The store can't be asked now; what it said before may hold still.

    It is so of the `whole` store, or of what was asked for; `asked_pause` seconds it asks to be left alone for.
    """

    def __init__(self, message: str, *, whole: bool = True, asked_pause: float = 0.0) -> None:
        super().__init__(message)
        self.whole = whole
        self.asked_pause = asked_pause


class Store(Protocol):
    """A place that holds archives."""

    @property
    def uri(self) -> str:
        """The place as its user wrote it, for errors and logs."""

    def stat(self, name: str, token: CancelToken = ..., *, hurried: bool = ...) -> StoredObject:
        """What the store holds under that name; `hurried` where a late answer is of little use.

        An `UntoldError` says that the store refuses to say, an `UnreachableError` that it can't be asked.
        """

    def open(self, obj: StoredObject) -> BinaryIO:
        """The content of exactly that version, to be read once, forward, and closed.

        Reading raises a `ReplacedError` when the object was replaced since `stat`: two versions are never mixed.
        """

    def list(self) -> Iterator[StoredObject]:
        """The archives (`*.tar.gz`) in the order of their names, looked at as they are asked for."""


def open_store(uri: str) -> Store:
    """The store of `s3://bucket/prefix`, or of a local folder."""
    scheme, separator, rest = uri.partition("://")
    if not separator:
        return LocalStore(Path(uri))
    if scheme == "file":
        return LocalStore(Path(rest or "/"))
    if scheme != "s3":
        raise invalid_argument(f"model store '{uri}' is neither s3://bucket/prefix nor a local folder")
    from serve.sources.s3 import S3Store  # noqa: PLC0415 - boto3 comes with it: folders need none

    bucket, _, prefix = rest.partition("/")
    return S3Store(bucket, prefix)


def validate_name(name: str) -> str:
    """The name itself, if it can name an archive: relative, and inside its store under every reading of it."""
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


def unknown_model(name: str, uri: str) -> MmeError:
    return MmeError(
        Kind.UNKNOWN_MODEL, f"model '{name}' is not in the store {uri}: check the name, or put the archive there"
    )


class LocalStore:
    """The archives in a folder and the folders below it."""

    def __init__(self, directory: Path) -> None:
        if directory.is_file():
            raise invalid_argument(
                f"model store '{directory}' is a file: name the folder that holds the archives, which "
                "`mme pack` makes of models"
            )
        if not directory.is_dir():
            raise invalid_argument(f"model store '{directory}' is not a directory: create it, or name another")
        self._directory = directory

    @property
    def uri(self) -> str:
        return str(self._directory)

    def __repr__(self) -> str:
        return f"<LocalStore {self.uri}>"

    def stat(
        self,
        name: str,
        token: CancelToken = NEVER,  # noqa: ARG002 - a disk answers
        *,
        hurried: bool = False,  # noqa: ARG002
    ) -> StoredObject:
        path = self._directory / validate_name(name)
        with self._files(name):
            return self._described(name, path.stat())

    def open(self, obj: StoredObject) -> BinaryIO:
        """A file that is replaced by renaming another over it is read to its end as it was."""
        with self._files(obj.name):
            file = (self._directory / validate_name(obj.name)).open("rb")
        if self._described(obj.name, os.fstat(file.fileno())) != obj:
            file.close()
            raise ReplacedError(obj.name, self.uri)
        return file

    def list(self) -> Iterator[StoredObject]:
        paths = (Path(base, file) for base, _, files in os.walk(self._directory) for file in files)
        for name in sorted(path.relative_to(self._directory).as_posix() for path in paths):
            if name.endswith(ARCHIVE_SUFFIX) and not wrong_name(name):
                try:
                    yield self.stat(name)
                except MmeError:  # gone since, or not a file: the list is of those that can be opened
                    continue

    def _described(self, name: str, status: os.stat_result) -> StoredObject:
        if not stat.S_ISREG(status.st_mode):
            raise unknown_model(name, self.uri)
        return StoredObject(name, status.st_size, etag_of(status))

    @contextmanager
    def _files(self, name: str) -> Iterator[None]:
        try:
            yield
        except (FileNotFoundError, NotADirectoryError) as error:
            if not self._directory.is_dir():
                raise UnreachableError(f"the folder {self.uri} is not there: mount it again") from error
            raise unknown_model(name, self.uri) from error
        except OSError as error:
            if error.errno == errno.ENAMETOOLONG:
                raise unknown_model(name, self.uri) from error
            reason = f"model '{name}' in {self.uri} cannot be opened: "
            if isinstance(error, PermissionError):
                raise UntoldError(f"{reason}{error.strerror}; check its permissions") from error
            raise UnreachableError(reason + advised(error), whole=False) from error


def read_credentials(path: Path) -> dict[str, Credentials]:
    """Prefix → the credentials for what begins with it, as Triton's TRITON_CLOUD_CREDENTIAL_PATH has them.

    {"s3": {"": {"key_id": "…", "secret_key": "…"}, "s3://bucket/prefix": {"profile": "…", "region": "…"}}}
    """
    try:
        document = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise invalid_argument(f"the credentials in {path} can't be read: {error}") from None
    known = document.get("s3", {}) if isinstance(document, dict) else None
    if not isinstance(known, dict) or not all(map(_is_entry, known.values())):
        entry = f'{{"s3": {{"s3://bucket": {{{", ".join(f"{chr(34)}{name}{chr(34)}: …" for name in _FIELDS)}}}}}}}'
        raise invalid_argument(f"the credentials in {path} are not of the form {entry}, all of them texts")
    for prefix, entry in known.items():
        if bool(entry.get("key_id")) != bool(entry.get("secret_key")):
            raise invalid_argument(f"the credentials in {path} have half a key for '{prefix}': key_id and secret_key")
    return {
        prefix: {_FIELDS[name]: text for name, text in entry.items() if name in _FIELDS and text}
        for prefix, entry in known.items()
    }


def credentials_for(url: str, known: Mapping[str, Credentials]) -> Credentials:
    """Those for what is at a URL: of the prefixes that it begins with the longest counts."""
    prefixes = [prefix for prefix in known if url.startswith(prefix)]
    return known[max(prefixes, key=len)] if prefixes else {}


def _is_entry(entry: Any) -> bool:
    return isinstance(entry, dict) and all(isinstance(value, str) for value in entry.values())
