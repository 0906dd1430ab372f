"""A tar from somebody who is not trusted becomes a folder: what holds whatever is packed in it.

Headers are read by `tarfile`, everything else is ours: no member comes twice or over another, nothing is written
through a link, since none is made before all files are, and what is made belongs to us, with rights of our choosing.
Which members there may be, and where they may lie, is for whoever unpacks. Synchronous; runs on load threads.
"""

from __future__ import annotations

import os
import stat
import tarfile
from typing import TYPE_CHECKING, Any, ClassVar, cast

from model_handlers.errors import DamagedError, Kind, MmeError, invalid_model

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from typing import BinaryIO

    from model_handlers.inflate import InflatedStream

_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC

Parts = tuple[str, ...]  # the names of a path


class Unpacking:
    """One archive on its way into one folder.

    Attributes:
        packer: what it should have been packed with, for errors.
        too_many: what to do about too many members, for errors.
        made: every path that was made so far, the folder's own is (); whether it is a directory.

    Args:
        subject: what errors call the archive: "archive 'a.tar.gz'".
        root: the folder, which is empty.
        most_members: what it may hold.
    """

    packer: ClassVar[str]
    too_many: ClassVar[str] = ""

    def __init__(self, subject: str, root: Path, most_members: int) -> None:
        self.made: dict[Parts, bool] = {(): True}
        self._subject = subject
        self._root = root
        self._most_members = most_members
        self._members = 0

    def members(self, source: InflatedStream) -> Iterator[tarfile.TarInfo]:
        """The members, as far as their headers tell; their data is for the caller to read, or to leave.

        Raises:
            MmeError: INVALID_MODEL for what is no tar, is damaged or has too many members.
        """
        archive: Any = None
        while True:
            source.header_bytes = 0
            try:
                if archive is None:
                    file = cast("BinaryIO", source)  # tarfile wants read, tell and seek
                    archive = tarfile.TarFile(fileobj=file, encoding="utf-8", errors="surrogateescape")
                    if archive.firstmember is None:  # a header that it takes for the end
                        break
                member = archive.next()
                archive.members.clear()  # which it keeps, for those who come back to them
            except (MmeError, OSError):
                raise
            except Exception as error:
                # tarfile documents TarError, and raises what its parsing meets besides: ValueError, RecursionError, ...
                raise self._bad_header(source, first=archive is None) from error
            if member is None:
                break
            self._members += 1
            if self._members > self._most_members:
                raise self.refused(f"has more than {self._most_members} members, the limit{self.too_many}")
            if member.size < 0:
                raise self.refused(f"has a negative size at member {shown(member.name)}")
            yield member
        # tarfile takes any broken header after the first one for the end; only a block of zeros is one
        if len(source.last_read) != tarfile.BLOCKSIZE or any(source.last_read):
            raise self._bad_header(source, first=False)

    def _bad_header(self, source: InflatedStream, *, first: bool) -> MmeError:
        if first and source.tell() == 0:
            return self.refused("holds no files: its gzip data is empty")
        if first:
            return self.refused(f"holds no tar archive inside its gzip data: pack the directory with {self.packer}")
        if len(source.last_read) < tarfile.BLOCKSIZE:
            return self.refused("is truncated: its tar has no end; upload it again")
        return DamagedError(
            Kind.INVALID_MODEL, f"{self._subject} has a corrupt tar header behind member {self._members}"
        )

    def make_directory(self, parts: Parts) -> None:
        """Make the directory and those above it, where they are not there yet."""
        for depth in range(1, len(parts) + 1):
            above = parts[:depth]
            is_directory = self.made.get(above)
            if is_directory is None:
                path = self._root.joinpath(*above)
                path.mkdir()
                path.chmod(0o755)  # whatever the umask says: other users of the host may serve it
                self.made[above] = True
            elif not is_directory:
                raise self.refused(f"has {shown('/'.join(above))} both as a file and as a directory")

    def place(self, parts: Parts) -> Path:
        """Where a new file or link goes; the directories above it are made."""
        self.make_directory(parts[:-1])
        if parts in self.made:
            raise self.refused(f"has {shown('/'.join(parts))} twice")
        self.made[parts] = False
        return self._root.joinpath(*parts)

    def write(self, path: Path, member: tarfile.TarInfo, source: InflatedStream) -> None:
        """Write the data of a member, which come next, to a new file."""
        with os.fdopen(os.open(path, _NEW_FILE, 0o600), "wb") as file:
            for block in source.blocks(member.size):
                file.write(block)
                self.wrote(block)
            file.flush()
            os.fchmod(file.fileno(), 0o755 if member.mode & stat.S_IXUSR else 0o644)
            self.complete(file.fileno(), member)

    def wrote(self, block: memoryview) -> None:
        """Take note of bytes of the file that is being written."""

    def complete(self, fd: int, member: tarfile.TarInfo) -> None:
        """What is done with a file that has its data, while it is open."""
        raise NotImplementedError

    def refused(self, reason: str) -> MmeError:
        """The error of an archive that is not taken."""
        return invalid_model(f"{self._subject} {reason}")


def shown(name: str) -> str:
    """A member's name for a sentence: on one line, and not longer than it."""
    name = name if len(name) <= 100 else f"{name[:60]}...{name[-30:]}"
    return f"'{name}'" if name.isprintable() else ascii(name)
