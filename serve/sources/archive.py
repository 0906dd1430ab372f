"""A .tar.gz becomes a directory while its bytes arrive, and a directory becomes a .tar.gz.

Archives are not trusted: no member leaves the directory, only files and directories are made, and bytes, files and
names are bounded while they are met. A directory appears complete or not at all: it grows in a staging directory beside
its destination, under a lock that dies with the process, and is renamed. Runs on load threads; touches only the disk.
"""

from __future__ import annotations

import os
import stat
import tarfile
from dataclasses import dataclass
from typing import TYPE_CHECKING

from isal import isal_zlib

from model_handlers.errors import invalid_argument, invalid_model
from model_handlers.system.disk import disk_errors, publish, replacing, staging_directory, sync_disk_of
from model_handlers.system.threads import NEVER
from model_handlers.system.untar import GZIP_WINDOW, InflatedStream, Unpacking, parts_of, shown

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path
    from typing import BinaryIO

    from model_handlers.system.threads import CancelToken
    from model_handlers.system.untar import Parts
    from serve.sources.disk_budget import Sums


_MAX_COMPONENT = 255  # bytes of one name between slashes, on every file system in use
_REFUSED_TYPES = {
    tarfile.SYMTYPE: "a symbolic link",
    tarfile.LNKTYPE: "a hard link",
    tarfile.CHRTYPE: "a device",
    tarfile.BLKTYPE: "a device",
    tarfile.FIFOTYPE: "a named pipe",
    tarfile.GNUTYPE_SPARSE: "a sparse file",
}
_COPY_SIZE = 1 << 20
_SYNCED_ALONE = 256  # files and directories, before all are made to last together


@dataclass(frozen=True, slots=True)
class ExtractLimits:
    """How much an archive may unpack to: bytes, members, UTF-8 bytes of a path, names in a path."""

    max_bytes: int = 64 << 30
    max_files: int = 20_000
    max_name_length: int = 1024
    max_depth: int = 32


def extract(
    stream: BinaryIO,
    destination: Path,
    *,
    name: str,
    packed: int | None = None,
    limits: ExtractLimits | None = None,
    claim: Callable[[int], None] = lambda _: None,
    note: Callable[[Sums], None] = lambda _: None,
    token: CancelToken = NEVER,
) -> int:
    """Unpack the .tar.gz that `stream` delivers into the new directory `destination`, whose parent exists.

    Returns the bytes of its files when the directory is complete and on the disk; after any failure nothing of it is
    left. The stream is read on another thread, to its end, and closed whatever happens. `packed` are its bytes, where
    they are known. `claim` is called with the bytes of each file before it is written, and ends the unpacking by what
    it raises; `note` with the checksums of all files before the directory appears.
    """
    with stream, disk_errors(f"archive '{name}' cannot be unpacked into {destination.parent}"):
        with staging_directory(destination.parent) as staging:
            with InflatedStream(stream, f"archive '{name}'", token) as source:
                unpacking = _Unpacking(name, staging, packed, limits or ExtractLimits(), claim)
                unpacking.run(source)
            note(unpacking.sums)
            publish(staging, unpacking.unsynced(), destination)
        return sum(size for size, _ in unpacking.sums.values())


class _Unpacking(Unpacking):
    packer = "`mme pack`"
    too_many = "; pack fewer files, or raise MME_MAX_ARCHIVE_FILES"

    def __init__(
        self, archive: str, root: Path, packed: int | None, limits: ExtractLimits, claim: Callable[[int], None]
    ) -> None:
        subject = f"archive '{archive}'"
        super().__init__(subject, root, most_members=limits.max_files, most_bytes=limits.max_bytes, packed=packed)
        self.sums: Sums = {}
        self._claim = claim
        self._limits = limits
        self._absolute: bool | None = None  # whether paths are, as `tar -P` leaves them

    def run(self, source: InflatedStream) -> None:
        super().run(source)
        if not self.sums:
            raise self.refused("holds no files: pack a model directory with `mme pack`")

    def unsynced(self) -> list[Path]:
        """Directories to be synced, the deepest first; where there are many, the whole disk was synced at once."""
        if len(self.made) > _SYNCED_ALONE:
            sync_disk_of(self._root)
            return [self._root]
        made = sorted((parts for parts, is_directory in self.made.items() if is_directory), key=len, reverse=True)
        return [self._root.joinpath(*parts) for parts in made]

    def checked(self, member: tarfile.TarInfo) -> Parts | None:
        absolute = member.name.startswith("/")
        if self._absolute is (not absolute):
            raise self.refused(
                f"has absolute paths beside relative ones (member {shown(member.name)}): pack with relative ones"
            )
        self._absolute = absolute
        parts = parts_of(member.name)
        if member.islnk() and not member.size and parts_of(member.linkname) == parts and self.made.get(parts) is False:
            return None  # a link to itself: what GNU tar makes of a file that it is given twice
        if reason := _wrong_kind(member) or _wrong_names(parts, self._limits):
            raise self.refused(f"has {reason} (member {shown(member.name)})")
        if is_mac_metadata(parts):
            return None
        if not parts and not member.isdir():
            raise self.refused(f"has a file without a name, {shown(member.name)}")
        return parts

    def claim(self, size: int) -> None:
        self._claim(size)

    def complete(self, fd: int, parts: Parts, member: tarfile.TarInfo, crc: int) -> None:
        self.sums["/".join(parts)] = member.size, crc
        if len(self.made) <= _SYNCED_ALONE:
            os.fsync(fd)


def _wrong_kind(member: tarfile.TarInfo) -> str:
    if member.type in _REFUSED_TYPES:
        return f"{_REFUSED_TYPES[member.type]}: pack plain files only"
    if member.issparse():
        return "a sparse file: pack plain files only"
    if not (member.isreg() or member.isdir()):
        return f"a member of the unknown type {member.type!r}"
    return ""


def _wrong_names(parts: Parts, limits: ExtractLimits) -> str:
    if ".." in parts:
        return "a path with '..': pack with paths inside the directory"
    if any(c < " " or c == "\x7f" or "\ud800" <= c <= "\udfff" for part in parts for c in part):
        return "a name with control characters or bad UTF-8"
    if len("/".join(parts).encode()) > limits.max_name_length:
        return f"a path of more than {limits.max_name_length} bytes, the limit"
    if max((len(part.encode()) for part in parts), default=0) > _MAX_COMPONENT:
        return f"a name of more than {_MAX_COMPONENT} bytes"
    if len(parts) > limits.max_depth:
        return f"a path deeper than {limits.max_depth} directories, the limit"
    return ""


def is_mac_metadata(parts: Parts) -> bool:
    """Whether it is one of the files that the tools of macOS add to an archive without being asked."""
    return bool(parts) and (parts[0] == "__MACOSX" or parts[-1] == ".DS_Store" or parts[-1].startswith("._"))


def pack(directory: Path, output: Path, *, level: int = 1, progress: Callable[[int], None] | None = None) -> None:
    """Write the content of a model directory to the .tar.gz `output`, which appears complete or not at all.

    Equal content gives equal bytes: names in order, no owner, no time. SageMaker refuses archives that hold links.
    `level` is 0 (fastest) to 3 (smallest); `progress` is called with the bytes packed since the last call.
    """
    if level not in range(4):
        raise invalid_argument(f"compression level {level} is not one of 0, 1, 2, 3")
    if not directory.is_dir():
        raise invalid_argument(f"{directory} is not a directory: name the model directory to pack")
    if output.resolve().is_relative_to(directory.resolve()):
        raise invalid_argument(f"{output} lies inside {directory}: write the archive somewhere else")
    with disk_errors(f"{directory} cannot be packed into {output}"):
        members = list(_files_below(directory, ""))
        if not any(path.is_file() for path, _ in members):
            raise invalid_model(f"{directory} holds no files to pack")
        with replacing(output) as file:
            _pack_members(members, file, level, progress or (lambda _: None))


def _files_below(directory: Path, prefix: str) -> Iterator[tuple[Path, str]]:
    for path in sorted(directory.iterdir(), key=lambda path: path.name):
        name, mode = prefix + path.name, path.lstat().st_mode
        if is_mac_metadata(tuple(name.split("/"))):
            continue
        if stat.S_ISLNK(mode):
            raise invalid_model(f"'{path}' is a link, which SageMaker refuses: put a copy of its target there")
        if not (stat.S_ISDIR(mode) or stat.S_ISREG(mode)):
            raise invalid_model(f"'{path}' is neither a file nor a directory: remove it")
        yield path, name
        if stat.S_ISDIR(mode):
            yield from _files_below(path, f"{name}/")


def _pack_members(members: list[tuple[Path, str]], file: BinaryIO, level: int, progress: Callable[[int], None]) -> None:
    deflater = isal_zlib.compressobj(level, isal_zlib.DEFLATED, GZIP_WINDOW)
    written = 0
    for path, name in members:
        for block in _tar_blocks(path, name, progress):
            file.write(deflater.compress(block))
            written += len(block)
    # a tar ends with two blocks of zeros, and by custom with the record that they are in
    end = 2 * tarfile.BLOCKSIZE
    file.write(deflater.compress(bytes(end + -(written + end) % tarfile.RECORDSIZE)))
    file.write(deflater.flush())


def _tar_blocks(path: Path, name: str, progress: Callable[[int], None]) -> Iterator[bytes]:
    member, status = tarfile.TarInfo(name), path.lstat()
    if stat.S_ISDIR(status.st_mode):
        member.type, member.mode = tarfile.DIRTYPE, 0o755
        yield member.tobuf(tarfile.PAX_FORMAT, "utf-8")
        return
    member.size, member.mode = status.st_size, 0o755 if status.st_mode & stat.S_IXUSR else 0o644
    yield member.tobuf(tarfile.PAX_FORMAT, "utf-8")
    left = member.size
    with path.open("rb") as content:
        while left:
            block = content.read(min(left, _COPY_SIZE))
            if not block:
                raise invalid_model(f"'{path}' became shorter while it was packed: pack it when nobody writes to it")
            left -= len(block)
            yield block
            progress(len(block))
    yield bytes(-member.size % tarfile.BLOCKSIZE)
