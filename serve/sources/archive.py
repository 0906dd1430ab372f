"""A .tar.gz becomes a directory while its bytes arrive, and a directory becomes a .tar.gz.

Archives come from customers and are not trusted: no member leaves the directory, nothing but files and directories is
made, and bytes, files and names are bounded while they are met, not after. A directory appears complete or not at all:
it grows in a staging directory beside its destination and is renamed. Refuses to know stores, names of models and
what is inside. Synchronous; runs on load threads, and touches no state but the disk.
"""

from __future__ import annotations

import os
import stat
import tarfile
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, cast

from isal import isal_zlib

from model_handlers.disk import disk_errors
from model_handlers.errors import MmeError, invalid_argument, invalid_model
from serve.sources.disk import publish, staging_directory
from serve.sources.inflate import GZIP_WINDOW, InflatedStream
from serve.sources.tar_member import ExtractLimits, checked_path, is_mac_metadata, shown

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import BinaryIO

_COPY_SIZE = 1 << 20


def extract(
    stream: BinaryIO,
    destination: Path,
    *,
    name: str,
    limits: ExtractLimits | None = None,
    claim: Callable[[int], None] = lambda _: None,
    cancelled: Callable[[], bool] = lambda: False,
) -> int:
    """Unpack the .tar.gz that `stream` delivers into the new directory `destination`, whose parent exists.

    Returns when the directory is complete and on the disk. After any failure nothing of it is left. The stream is
    read to its end and closed, whatever happens.

    Args:
        stream: the archive's bytes, read on another thread.
        destination: must not exist, or be empty.
        name: the archive's name, for errors.
        limits: what the archive may unpack to; the defaults of `ExtractLimits` if None.
        claim: called before each file is written, with its bytes; what it raises ends the unpacking.
        cancelled: polled about twenty times a second.

    Returns:
        the bytes of its files.

    Raises:
        MmeError: INVALID_MODEL when the archive is refused, OUT_OF_MEMORY when the disk is full, ALREADY_EXISTS when
            the destination is there, CANCELLED, or what reading the stream raised.
    """
    with stream, disk_errors(f"archive '{name}' cannot be unpacked into {destination.parent}"):
        with staging_directory(destination.parent) as staging:
            with InflatedStream(stream, name, cancelled) as source:
                unpacking = _Unpacking(name, staging, limits or ExtractLimits(), claim)
                unpacking.run(source)
            publish(staging, unpacking.directories(), destination)
        return unpacking.bytes


class _Unpacking:
    """One archive on its way into one directory: what it may still hold and what it has put there."""

    def __init__(self, archive: str, root: Path, limits: ExtractLimits, claim: Callable[[int], None]) -> None:
        self.root = root
        self.bytes = 0
        self._empty = True
        self._archive = archive
        self._limits = limits
        self._claim = claim
        self._members = 0
        self._claimed = 0  # bytes of all members, skipped ones too
        self._made: dict[tuple[str, ...], bool] = {}  # path -> whether it is a directory

    def run(self, source: InflatedStream) -> None:
        """Take every member, then make sure that nothing follows."""
        for member in self._headers(source):
            self._take(member, source)
        self._expect_end(source)
        if self._empty:
            raise self._refused("holds no files: pack a model directory with `mme pack`")

    def directories(self) -> list[Path]:
        """Every directory that was made, the deepest first."""
        made = sorted((parts for parts, is_directory in self._made.items() if is_directory), key=len, reverse=True)
        return [self.root.joinpath(*parts) for parts in made] + [self.root]

    def _headers(self, source: InflatedStream) -> Iterator[tarfile.TarInfo]:
        """The members as tarfile reads them. Their data is for the caller to read."""
        archive: tarfile.TarFile | None = None
        while True:
            try:
                if archive is None:
                    file = cast("BinaryIO", source)  # tarfile wants read, tell and seek
                    archive = tarfile.TarFile(fileobj=file, encoding="utf-8", errors="surrogateescape")
                    if archive.firstmember is None:  # type: ignore[attr-defined]  # a header that it takes for the end
                        break
                member = archive.next()
            except (MmeError, OSError):
                raise
            except Exception as error:
                # tarfile documents TarError, and raises what its parsing meets besides: ValueError, RecursionError, ...
                raise self._bad_header(source, archive is None) from error
            if member is None:
                break
            yield member
        # tarfile takes any broken header after the first one for the end; only a block of zeros is one
        if len(source.last_read) != tarfile.BLOCKSIZE or any(source.last_read):
            raise self._bad_header(source, first=False)

    def _bad_header(self, source: InflatedStream, first: bool) -> MmeError:  # noqa: FBT001 - private, one word
        if first and source.tell() == 0:
            return self._refused("holds no files: its gzip data is empty")
        if first:
            return self._refused("holds no tar archive inside its gzip data: pack the directory with `mme pack`")
        if len(source.last_read) < tarfile.BLOCKSIZE:
            return self._refused("is truncated: its tar has no end; upload it again")
        return self._refused(f"has a corrupt tar header behind member {self._members}")

    def _take(self, member: tarfile.TarInfo, source: InflatedStream) -> None:
        self._count(member)
        parts = checked_path(member, self._archive, self._limits)
        if is_mac_metadata(parts):
            return  # the next header skips its data
        if member.isdir():
            self._make_directory(parts, member)
            return
        if not parts:
            raise self._refused(f"has a file without a name, {shown(member)}")
        self._make_directory(parts[:-1], member)
        if parts in self._made:
            raise self._refused(f"has member {shown(member)} twice")
        self._made[parts] = False
        self._claim(member.size)
        self._write(self.root.joinpath(*parts), member, source)

    def _count(self, member: tarfile.TarInfo) -> None:
        """Refuse what goes beyond the limits, before anything is read or written for it."""
        self._members += 1
        if self._members > self._limits.max_files:
            raise self._refused(f"has more than {self._limits.max_files} members, the limit")
        if member.size < 0:
            raise self._refused(f"has a negative size at member {shown(member)}")
        self._claimed += member.size
        if self._claimed > self._limits.max_bytes:
            raise self._refused(
                f"unpacks to more than {self._limits.max_bytes} bytes, the limit, at member {shown(member)}"
            )

    def _make_directory(self, parts: tuple[str, ...], member: tarfile.TarInfo) -> None:
        """Make the directory and those above it, where an archive does not list them."""
        for depth in range(1, len(parts) + 1):
            ancestor = parts[:depth]
            is_directory = self._made.get(ancestor)
            if is_directory is None:
                path = self.root.joinpath(*ancestor)
                path.mkdir()
                path.chmod(0o755)  # whatever the umask says: other users of the host may serve it
                self._made[ancestor] = True
            elif not is_directory:
                raise self._refused(f"has '{'/'.join(ancestor)}' both as a file and as a directory of {shown(member)}")

    def _write(self, path: Path, member: tarfile.TarInfo, source: InflatedStream) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with os.fdopen(os.open(path, flags, 0o600), "wb") as file:
            for block in source.blocks(member.size):
                file.write(block)
            file.flush()
            os.fchmod(file.fileno(), 0o755 if member.mode & stat.S_IXUSR else 0o644)
            os.fsync(file.fileno())
        self._empty = False
        self.bytes += member.size

    def _expect_end(self, source: InflatedStream) -> None:
        """Read to the end, where gzip's checksum is; tools pad the last record with zeros."""
        room = self._limits.max_bytes
        for block in source.remainder():
            room -= len(block)
            if room < 0 or any(block.tobytes().lstrip(b"\0")):
                raise self._refused("has trailing garbage behind its tar data; pack it again")

    def _refused(self, reason: str) -> MmeError:
        return invalid_model(f"archive '{self._archive}' {reason}")


def pack(directory: Path, output: Path, *, level: int = 1, progress: Callable[[int], None] | None = None) -> None:
    """Write the content of a model directory to the .tar.gz `output`, which appears complete or not at all.

    Equal content gives equal bytes: names in order, no owner, no time. Links are refused, since SageMaker refuses
    archives that hold them.

    Args:
        directory: its content lies at the root of the archive.
        output: replaced when it exists; must lie outside `directory`.
        level: 0 (fastest) to 3 (smallest), as igzip counts.
        progress: called with the number of bytes that were packed since the last call.

    Raises:
        MmeError: INVALID_ARGUMENT when an argument is wrong, INVALID_MODEL when the directory holds links, special
            files or nothing, OUT_OF_MEMORY when the disk is full.
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
        with _replacing(output) as file:
            _pack_members(members, file, level, progress or (lambda _: None))


def _files_below(directory: Path, prefix: str) -> Iterator[tuple[Path, str]]:
    """Every directory and file below, with its name in the archive, in the order of names."""
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


@contextmanager
def _replacing(output: Path) -> Iterator[BinaryIO]:
    """A file beside `output` that takes its place at the end, or goes."""
    fd, name = tempfile.mkstemp(prefix=f".{output.name}.", dir=output.parent)
    try:
        with os.fdopen(fd, "wb") as file:
            yield file
        Path(name).chmod(0o644)
        Path(name).replace(output)
    finally:
        Path(name).unlink(missing_ok=True)


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
    """A member's header and data."""
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
