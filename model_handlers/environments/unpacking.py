"""A tar in gzip becomes a folder with links: the rules by which a packed environment stays inside its folder.

Environments come from customers, and unlike archives of models they hold links. Files come first and links last, so
nothing is ever written through a link; then every link must lead to a place inside. Only those that are the
interpreter itself may lead out of the folder: that is how a venv names the Python it was made of. Nothing but files,
folders and links is made. There is no limit but the disk's: an environment has what size it has. Times stay, because
Python compares them with those in its compiled files.

Synchronous; runs on load threads.
"""

from __future__ import annotations

import errno
import gzip
import os
import re
import shutil
import stat
import tarfile
import zlib
from typing import TYPE_CHECKING, Any, cast

from isal import igzip, isal_zlib

from model_handlers.errors import MmeError, invalid_model

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path
    from typing import BinaryIO

_COPY_SIZE = 1 << 20
_SPARE_SHARE, _SPARE_BYTES = 0.05, 1 << 30  # of the disk, for everybody else: the smaller of the two
_MOST_MEMBERS = 1_000_000  # ten times what large environments have: names are kept until the end
_LATEST = 1 << 33  # seconds: times beyond it are nonsense
_INTERPRETER = re.compile(r"python(3(\.\d+)?)?")
_CORRUPT = (EOFError, gzip.BadGzipFile, zlib.error, cast("type[Exception]", isal_zlib.error), tarfile.TarError)
_BAD_NAMES = (errno.ENAMETOOLONG, errno.ENOENT, errno.ELOOP, errno.EINVAL, errno.EILSEQ)
_REFUSED = {
    tarfile.CHRTYPE: "a device",
    tarfile.BLKTYPE: "a device",
    tarfile.FIFOTYPE: "a named pipe",
    tarfile.GNUTYPE_SPARSE: "a sparse file",
}

Parts = tuple[str, ...]


def unpack(archive: Path, root: Path, subject: str, check: Callable[[], None]) -> None:
    """Unpack an environment into the empty folder `root`. What is in it after a failure is the caller's to remove.

    Args:
        archive: the packed environment.
        root: the folder.
        subject: what errors call the archive: "model 'm': its environment …".
        check: called at least once for each file and each megabyte; what it raises ends the unpacking.

    Raises:
        MmeError: INVALID_MODEL when it is refused; what `check` raises.
        OSError: what the disk says; ENOSPC before it is quite full.
    """
    with archive.open("rb") as file:
        if file.read(2) != b"\x1f\x8b":
            raise invalid_model(f"{subject} is not a gzip file: an environment is packed as .tar.gz")
        file.seek(0)
        opened: Any = igzip.IGzipFile  # has no types
        with opened(fileobj=file, mode="rb") as stream:
            try:
                unpacking = _Unpacking(root, subject, check)
                unpacking.run(_Source(stream))
                unpacking.make_links()
            except OSError as error:
                if error.errno in _BAD_NAMES:
                    raise invalid_model(f"{subject} has a name that can't be written: {error}") from error
                raise


class _Source:
    """The unpacked stream, as tarfile and we read it: forward only.

    Attributes:
        last_read: what the latest `read` returned; tells how the headers of an archive ended.
    """

    def __init__(self, stream: BinaryIO) -> None:
        self.last_read = b""
        self._stream = stream

    def read(self, size: int) -> bytes:
        if size > _COPY_SIZE:  # tarfile keeps a header in memory whole, whatever size the archive claims for it
            raise tarfile.ReadError(f"a header of {size} bytes")
        self.last_read = self._stream.read(size)
        return self.last_read

    def tell(self) -> int:
        return self._stream.tell()

    def seek(self, position: int) -> None:
        if position < self._stream.tell():
            raise tarfile.ReadError("a header that points backwards")
        while (left := position - self._stream.tell()) > 0 and self._stream.read(min(left, _COPY_SIZE)):
            pass


class _Unpacking:
    """One environment on its way into one folder."""

    def __init__(self, root: Path, subject: str, check: Callable[[], None]) -> None:
        self._root = root
        self._subject = subject
        self._check = check
        self._members_seen = 0
        self._made: dict[Parts, bool] = {(): True}  # path → whether it is a folder
        self._links: dict[Parts, str] = {}
        self._hard_links: dict[Parts, Parts] = {}
        self._spare = min(int(shutil.disk_usage(root).total * _SPARE_SHARE), _SPARE_BYTES)

    def run(self, source: _Source) -> None:
        """Take every member; links are only noted."""
        try:
            for member in self._members(source):
                self._check()
                self._take(member, source)
            while source.read(_COPY_SIZE):  # to the end, where gzip's checksum is
                self._check()
        except _CORRUPT as error:
            raise self._refused(f"is corrupt or truncated: {error or type(error).__name__}") from error

    def make_links(self) -> None:
        """Make the links, and see where they lead."""
        for parts, target in self._hard_links.items():
            if self._made.get(target) is not False:
                raise self._refused(f"has a hard link {_shown(parts)} to {_shown(target)}, which is no file before it")
            os.link(self._root.joinpath(*target), self._place(parts))
        for parts, name in self._links.items():
            self._place(parts).symlink_to(name)
        inside = os.path.realpath(self._root)
        for parts, name in self._links.items():
            leads = os.path.realpath(self._root.joinpath(*parts))
            if not (leads == inside or leads.startswith(f"{inside}/") or _is_interpreter(parts)):
                raise self._refused(f"has a link {_shown(parts)} to {name!r}, which leads out of it")

    def _members(self, source: _Source) -> Iterator[tarfile.TarInfo]:
        try:
            archive: Any = tarfile.TarFile(fileobj=cast("BinaryIO", source), encoding="utf-8", errors="surrogateescape")
            while (member := archive.next()) is not None:
                archive.members.clear()  # which it keeps, for those who come back to them
                yield member
        except (MmeError, OSError, *_CORRUPT):
            raise
        except Exception as error:
            # it documents TarError, and raises what its parsing meets besides: ValueError, RecursionError, …
            raise self._refused(f"is no tar archive inside its gzip data: {error}") from error
        # tarfile takes any broken header after the first one for the end; only a block of zeros is one
        if len(source.last_read) != tarfile.BLOCKSIZE or any(source.last_read):
            raise self._refused("is corrupt or truncated: its tar has no end")

    def _take(self, member: tarfile.TarInfo, source: _Source) -> None:
        self._members_seen += 1
        if self._members_seen > _MOST_MEMBERS:
            raise self._refused(f"has more than {_MOST_MEMBERS} members, the limit")
        parts = self._parts(member.name)
        if member.isdir():
            self._make_folder(parts)
        elif member.issym():
            self._links[parts] = member.linkname
        elif member.islnk():
            self._hard_links[parts] = self._parts(member.linkname)
        elif member.isreg() and not member.issparse() and member.size >= 0:
            self._write(self._place(parts), member, source)
        else:
            what = _REFUSED.get(member.type, f"a member of type {member.type!r} and {member.size} bytes")
            raise self._refused(f"has {what}, {_shown(parts)}: pack files, folders and links only")

    def _parts(self, name: str) -> Parts:
        parts = tuple(part for part in name.split("/") if part not in ("", "."))
        if name.startswith("/") or ".." in parts:
            raise self._refused(f"has a path that leaves it, {name[:200]!r}")
        return parts

    def _place(self, parts: Parts) -> Path:
        """Where a new file or link goes; the folders above it are made."""
        if parts in self._made or not parts:
            raise self._refused(f"has {_shown(parts)} twice")
        self._make_folder(parts[:-1])
        self._made[parts] = False
        return self._root.joinpath(*parts)

    def _make_folder(self, parts: Parts) -> None:
        for depth in range(1, len(parts) + 1):
            above = parts[:depth]
            is_folder = self._made.get(above)
            if is_folder is None:
                folder = self._root.joinpath(*above)
                folder.mkdir()
                folder.chmod(0o755)
                self._made[above] = True
            elif not is_folder:
                raise self._refused(f"has {_shown(above)} both as a file and as a folder")

    def _write(self, path: Path, member: tarfile.TarInfo, source: _Source) -> None:
        if member.size > shutil.disk_usage(self._root).free - self._spare:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with os.fdopen(os.open(path, flags, 0o600), "wb") as file:
            left = member.size
            while left:
                block = source.read(min(left, _COPY_SIZE))
                if not block:
                    raise self._refused("is corrupt or truncated: its tar ends inside a member")
                self._check()
                file.write(block)
                left -= len(block)
            file.flush()
            os.fchmod(file.fileno(), 0o755 if member.mode & stat.S_IXUSR else 0o644)
            time = int(member.mtime) if 0 <= member.mtime <= _LATEST else 0
            os.utime(file.fileno(), (time, time))

    def _refused(self, reason: str) -> MmeError:
        return invalid_model(f"{self._subject} {reason}")


def _is_interpreter(parts: Parts) -> bool:
    return len(parts) == 2 and parts[0] == "bin" and _INTERPRETER.fullmatch(parts[1]) is not None


def _shown(parts: Parts) -> str:
    return repr("/".join(parts)[:200])
