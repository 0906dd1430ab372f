"""An untrusted tar becomes a folder: what holds for archives of models and for packed environments.

Headers are read by `tarfile`, everything else is ours: no member comes twice or over another, nothing is written
through a link, and what is made belongs to us, with rights of our choosing. Runs on load threads.
"""

from __future__ import annotations

import os
import queue
import stat
import tarfile
import threading
from typing import TYPE_CHECKING, Any, ClassVar, Self, cast

from isal import isal_zlib

from model_handlers.errors import DamagedError, Kind, MmeError, invalid_model
from model_handlers.system.disk import new_file
from model_handlers.system.threads import CancelToken, start_thread

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator
    from pathlib import Path
    from typing import BinaryIO


_READ_SIZE = 256 << 10  # compressed bytes asked of the source at a time
_BLOCK_SIZE = 1 << 20  # inflated bytes handed over at a time: a bomb is met one block at a time
_BLOCKS_AHEAD = 4
_HEAD_SIZE = 512  # enough to tell gzip from tar, and for the header of a gzip member, which isal has to see at once
_MOST_INFLATED = 1032  # bytes that one of deflate's can stand for
GZIP_WINDOW = 31  # zlib's way to say: a gzip header and trailer around the deflate stream
_CORRUPT = cast("type[Exception]", isal_zlib.error)  # isal's stubs say an instance

# What a tar header may take, long names and pax records included. tarfile keeps it in memory whole, whatever size the
# archive claims for it.
_HEADER_LIMIT = 1 << 20
Parts = tuple[str, ...]  # the names of a path


class InflatedStream:
    """A gzip stream as the file that `tarfile` reads, and as blocks; a thread inflates ahead, and leaving joins it."""

    def __init__(self, stream: BinaryIO, subject: str, token: CancelToken) -> None:
        self.last_read = b""  # what the latest `read` returned; tells how the headers of an archive ended
        self.header_bytes = 0  # read since it was set to 0, before each member's header
        self.token = token  # checked about twenty times a second, and for each megabyte
        self._stream = stream
        self._subject = subject
        self._blocks: queue.Queue[bytes | Exception] = queue.Queue(_BLOCKS_AHEAD)
        self._block = memoryview(b"")  # the rest of the block being read
        self._ended = False
        self._position = 0
        self._stopped = False
        self._thread = threading.Thread(target=self._inflate, name=f"inflate {subject}", daemon=True)
        start_thread(self._thread)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped = True
        self._stream.close()  # first: it may be what the thread waits for
        while True:  # make room, should the thread wait to hand over a block
            try:
                self._blocks.get_nowait()
            except queue.Empty:
                break
        self._thread.join()

    def tell(self) -> int:
        return self._position

    def read(self, size: int) -> bytes:
        """The next `size` bytes of a tar header, fewer only at the end."""
        self.header_bytes += size
        if size < 0 or self.header_bytes > _HEADER_LIMIT:
            raise invalid_model(f"{self._subject} has a tar header of more than {_HEADER_LIMIT} bytes")
        self.last_read = b"".join(self._take(size))
        return self.last_read

    def seek(self, position: int) -> None:
        if position < self._position:
            raise invalid_model(f"{self._subject} has a tar header that points backwards")
        for _ in self.blocks(position - self._position):
            pass

    def blocks(self, size: int) -> Iterator[memoryview]:
        """Exactly the next `size` bytes, in pieces that are valid until the next one is asked for."""
        end = self._position + size
        yield from self._take(size)
        if self._position < end:
            raise invalid_model(f"{self._subject} is truncated: its tar ends inside a member; upload it again")

    def remainder(self) -> Iterator[memoryview]:
        while self._fill():
            yield from self._take(len(self._block))

    def _take(self, size: int) -> Iterator[memoryview]:
        while size > 0 and self._fill():
            piece = self._block[:size]
            self._block = self._block[len(piece) :]
            self._position += len(piece)
            size -= len(piece)
            yield piece

    def _fill(self) -> bool:
        while not self._block and not self._ended:
            self.token.check()
            block = self.token.wait(self._next_block)
            self._block = memoryview(block)
            self._ended = not block
        return not self._ended

    def _next_block(self, seconds: float) -> bytes | None:
        try:
            block = self._blocks.get(timeout=seconds)
        except queue.Empty:
            return None
        if isinstance(block, Exception):
            raise block
        return block

    def _inflate(self) -> None:
        """The thread: hand over blocks, then an empty one, or the error that ended it."""
        try:
            for block in gunzip(self._stream, self._subject):
                self._blocks.put(block)
                if self._stopped:
                    return
            self._blocks.put(b"")
        except Exception as error:  # noqa: BLE001 - whatever the source raises is the reader's to see
            self._blocks.put(error)


def gunzip(stream: BinaryIO, subject: str) -> Iterator[bytes]:
    """The inflated blocks of `stream`, of at most 1 MiB each. Gzip members that follow each other are one content."""
    data = _head(stream, subject)
    while data:
        unused = yield from _gunzip_member(stream, data, subject)
        data = unused.lstrip(b"\0")  # some tools pad a member with zeros
        while not data and (more := _read(stream, subject)):
            data = more.lstrip(b"\0")
        data = _topped_up(stream, data, subject)
        if data and not data.startswith(b"\x1f"):
            raise invalid_model(f"{subject} has trailing garbage behind its gzip data; pack it again")


def _gunzip_member(stream: BinaryIO, data: bytes, subject: str) -> Generator[bytes, None, bytes]:
    """Yield the blocks of one gzip member that starts with `data`; return what was read beyond it."""
    inflater = isal_zlib.decompressobj(wbits=GZIP_WINDOW)
    try:
        while not inflater.eof:
            block = inflater.decompress(data, _BLOCK_SIZE)
            if block:
                yield block
            data = inflater.unconsumed_tail
            # a full block may leave more inside the inflater even when it has swallowed all of its input
            if not data and not inflater.eof and len(block) < _BLOCK_SIZE:
                data = _read(stream, subject)
                if not data:
                    raise invalid_model(f"{subject} is truncated: its gzip data ends early; upload it again")
    except _CORRUPT as error:
        raise DamagedError(Kind.INVALID_MODEL, f"{subject} is corrupt: {error}") from error
    unused: bytes = inflater.unused_data
    return unused


def _head(stream: BinaryIO, subject: str) -> bytes:
    head = _topped_up(stream, b"", subject)
    if head[:2] == b"\x1f\x8b":
        return head
    if not head:
        raise invalid_model(f"{subject} is empty: a .tar.gz file is expected")
    if head[257:262] == b"ustar":
        raise invalid_model(f"{subject} is a tar file that is not compressed: gzip it")
    raise DamagedError(Kind.INVALID_MODEL, f"{subject} is not a gzip file: a .tar.gz file is expected")


def _topped_up(stream: BinaryIO, data: bytes, subject: str) -> bytes:
    while len(data) < _HEAD_SIZE and (more := _read(stream, subject)):
        data += more
    return data


def _read(stream: BinaryIO, subject: str) -> bytes:
    try:
        return stream.read(_READ_SIZE)
    except OSError as error:
        raise MmeError(Kind.UNAVAILABLE, f"{subject} cannot be read: {error}") from error


class Unpacking:
    """One archive on its way into one folder. What its members may be, and where they may lie, subclasses say."""

    packer: ClassVar[str]  # what it should have been packed with, for errors
    too_many: ClassVar[str] = ""  # what to do about too many members, for errors

    def __init__(
        self, subject: str, root: Path, *, most_members: int, most_bytes: int = 1 << 62, packed: int | None = None
    ) -> None:
        # every path that was made so far, the folder's own is (); whether it is a directory
        self.made: dict[Parts, bool] = {(): True}
        self._subject = subject
        self._root = root
        self._most_members = most_members
        self._most_bytes = most_bytes  # of all members, skipped ones too; and of the zeros behind them
        # bytes of the archive, where they are known: its headers may not claim more than those can hold
        self._packed = packed
        self._members = 0
        self._claimed = 0

    def run(self, source: InflatedStream) -> None:
        """Take every member, then make sure that nothing but padding follows, up to gzip's checksum."""
        for member in self._headers(source):
            source.token.check()
            self._count(member)
            parts = self.checked(member)
            if parts is None:
                continue  # the next header skips its data
            if member.isdir():
                self._make_directory(parts)
            else:
                self._write(parts, member, source)
        room = self._most_bytes
        for block in source.remainder():
            room -= len(block)
            if room < 0 or any(block.tobytes().lstrip(b"\0")):
                raise self.refused("has trailing garbage behind its tar data; pack it again")

    def checked(self, member: tarfile.TarInfo) -> Parts | None:
        """The path of a file or directory that is to be made; None for what is not unpacked now."""
        raise NotImplementedError

    def claim(self, size: int) -> None:
        """Called before a file of so many bytes is written; what it raises ends the unpacking."""
        raise NotImplementedError

    def complete(self, fd: int, parts: Parts, member: tarfile.TarInfo, crc: int) -> None:
        """Called with a file that has its data, while it is open; `crc` is the CRC-32 of that."""
        raise NotImplementedError

    def place(self, parts: Parts) -> Path:
        self._make_directory(parts[:-1])
        if parts in self.made:
            raise self.refused(f"has {shown('/'.join(parts))} twice")
        self.made[parts] = False
        return self._root.joinpath(*parts)

    def refused(self, reason: str) -> MmeError:
        return invalid_model(f"{self._subject} {reason}")

    def _headers(self, source: InflatedStream) -> Iterator[tarfile.TarInfo]:
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
                archive.members.clear()  # which it keeps for good
            except (MmeError, OSError):
                raise
            except Exception as error:
                # tarfile documents TarError, and raises what its parsing meets besides: ValueError, RecursionError, ...
                raise self._bad_header(source, first=archive is None) from error
            if member is None:
                break
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

    def _count(self, member: tarfile.TarInfo) -> None:
        self._members += 1
        if self._members > self._most_members:
            raise self.refused(f"has more than {self._most_members} members, the limit{self.too_many}")
        if member.size < 0:
            raise self.refused(f"has a negative size at member {shown(member.name)}")
        self._claimed += member.size
        if self._packed is not None and self._claimed > self._packed * _MOST_INFLATED:
            raise self.refused(
                f"claims {member.size} bytes for member {shown(member.name)}, more than its {self._packed} bytes can "
                "hold: its header is wrong; pack it again"
            )
        if self._claimed > self._most_bytes:
            raise self.refused(
                f"unpacks to more than {self._most_bytes} bytes, the limit, at member {shown(member.name)}"
            )

    def _make_directory(self, parts: Parts) -> None:
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

    def _write(self, parts: Parts, member: tarfile.TarInfo, source: InflatedStream) -> None:
        path, crc = self.place(parts), 0
        self.claim(member.size)
        with new_file(path) as file:
            for block in source.blocks(member.size):
                file.write(block)
                crc = isal_zlib.crc32(block, crc)
            file.flush()
            os.fchmod(file.fileno(), 0o755 if member.mode & stat.S_IXUSR else 0o644)
            self.complete(file.fileno(), parts, member, crc)


def parts_of(name: str) -> Parts:
    return tuple(part for part in name.split("/") if part not in ("", "."))


def shown(name: str) -> str:
    """A member's name for a sentence: on one line, and not longer than it."""
    name = name if len(name) <= 100 else f"{name[:60]}...{name[-30:]}"
    return f"'{name}'" if name.isprintable() else ascii(name)
