"""The objects of a model's directory in S3 become a directory on disk: several small ones at once, large ones in parts.

Names come from whoever fills the bucket and are not trusted: none leaves the directory. A directory appears complete
or not at all: it grows in a staging directory beside its destination and is renamed. Refuses to know what is inside.
Called by one load thread; threads of its own fetch.
"""

from __future__ import annotations

import os
import threading
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from isal import isal_zlib

from model_handlers.cancel_token import NEVER
from model_handlers.errors import invalid_model
from model_handlers.system.disk import disk_errors
from serve.sources.disk import publish, staging_directory
from serve.sources.store import wrong_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path
    from typing import BinaryIO

    from model_handlers.cancel_token import CancelToken
    from serve.sources.copy_sums import Sums
    from serve.sources.store import StoredObject

_LANES = 4  # small objects at a time
_LARGE = 12 << 20  # bytes from which objects take turns: each is fetched in parts at a time, which are in memory
_COPY_SIZE = 1 << 20
_MOST_NAME = 255  # bytes, of file systems


def check_names(names: Iterable[str], where: str) -> None:
    """Refuse names of objects that are not those of files in a directory; one that ends with a slash is a directory's.

    Raises:
        MmeError: INVALID_MODEL, naming the object.
    """
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

    Returns when the directory is complete and on the disk. After any failure nothing of it is left.

    Args:
        objects: by their names below the destination; those that end with a slash are empty directories.
        open_object: opens one, as `Store.open`; called by several threads.
        destination: must not exist, or be empty.
        what: it is, for errors.
        note: called before the directory appears, with the checksums of its files.
        token: checked about twenty times a second.

    Raises:
        MmeError: OUT_OF_MEMORY when the disk is full, ALREADY_EXISTS when the destination is there, CANCELLED, or what
            opening or reading an object raised.
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
    """Every directory, the deepest first."""
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
    """Objects on their way, until the first one that fails.

    Attributes:
        sums: of what has arrived.
    """

    def __init__(self, open_object: Callable[[StoredObject], BinaryIO], root: Path) -> None:
        self.sums: Sums = {}
        self._open = open_object
        self._root = root
        self._guard = threading.Lock()  # of the two below
        self._streams: set[BinaryIO] = set()
        self._stopped = False
        self._large = threading.Lock()

    def run(self, objects: Sequence[StoredObject], token: CancelToken) -> None:
        """Return when all have arrived."""
        with ThreadPoolExecutor(_LANES, "download files") as lanes:
            waiting = {lanes.submit(self._fetch, obj) for obj in objects}

            def over(seconds: float) -> bool | None:
                done, going = wait(waiting, seconds, FIRST_EXCEPTION)
                for each in done:
                    each.result()
                return None if going else True

            try:
                token.wait(over)
            except BaseException:
                self._stop()
                lanes.shutdown(wait=False, cancel_futures=True)
                raise

    def _fetch(self, obj: StoredObject) -> None:
        if obj.size < _LARGE:
            self._copy(obj)
            return
        with self._large:
            self._copy(obj)

    def _copy(self, obj: StoredObject) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with os.fdopen(os.open(self._root / obj.name, flags, 0o600), "wb") as file:
            self.sums[obj.name] = obj.size, self._receive(obj, file) if obj.size else 0
            file.flush()
            os.fchmod(file.fileno(), 0o644)
            os.fsync(file.fileno())

    def _receive(self, obj: StoredObject, file: BinaryIO) -> int:
        """Write what comes; its CRC-32."""
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
        """Whoever waits for bytes is woken, and nobody asks for more."""
        with self._guard:
            self._stopped = True
            streams = list(self._streams)
        for stream in streams:
            stream.close()
