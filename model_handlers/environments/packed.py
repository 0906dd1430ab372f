"""Environments that conda-pack and venv-pack packed: unpacked, and told where they lie now. Runs on load threads."""

from __future__ import annotations

import errno
import os
import re
import shutil
import tarfile
from typing import TYPE_CHECKING

from model_handlers.environments.environment import NICENESS, check_interpreter
from model_handlers.errors import MmeError, invalid_model
from model_handlers.system.digests import DIGITS
from model_handlers.untar import InflatedStream, Unpacking, shown
from model_handlers.worker import fork_client

if TYPE_CHECKING:
    from pathlib import Path

    from model_handlers.cancel_token import CancelToken
    from model_handlers.environments.environment import Environment, Patience
    from model_handlers.environments.wanted import Given
    from model_handlers.system.digests import Digests
    from model_handlers.untar import Parts


_SPARE_SHARE, _SPARE_BYTES = 0.05, 1 << 30  # of the disk, for everybody else: the smaller of the two
_MOST_MEMBERS = 1_000_000  # ten times what large environments have: names are kept until the end
_LATEST = 1 << 33  # seconds: times beyond it are nonsense
_INTERPRETER = re.compile(r"python(3(\.\d+)?)?")
_BAD_NAMES = (errno.ENAMETOOLONG, errno.ENOENT, errno.ELOOP, errno.EINVAL, errno.EILSEQ)
_REFUSED = {
    tarfile.CHRTYPE: "a device",
    tarfile.BLKTYPE: "a device",
    tarfile.FIFOTYPE: "a named pipe",
    tarfile.GNUTYPE_SPARSE: "a sparse file",
}


def unpack(archive: Path, root: Path, subject: str, token: CancelToken) -> None:
    """Unpack an environment into the empty folder `root`. What is in it after a failure is the caller's to remove.

    Args:
        archive: the packed environment.
        root: the folder.
        subject: what errors call the archive: "model 'm': its environment …".
        token: checked for each file and each megabyte.

    Raises:
        MmeError: INVALID_MODEL when it is refused; as `CancelToken.check`.
        OSError: what the disk says; ENOSPC before it is quite full.
    """
    with InflatedStream(archive.open("rb"), subject, token) as source:
        try:
            unpacking = _Unpacking(subject, root, token)
            unpacking.run(source)
            unpacking.make_links()
        except OSError as error:
            if error.errno in _BAD_NAMES:
                raise invalid_model(f"{subject} has a name that can't be written: {error}") from error
            raise


class _Unpacking(Unpacking):
    """One environment on its way into one folder."""

    packer = "conda-pack or venv-pack"

    def __init__(self, subject: str, root: Path, token: CancelToken) -> None:
        super().__init__(subject, root, _MOST_MEMBERS)
        self._token = token
        self._links: dict[Parts, str] = {}
        self._hard_links: dict[Parts, Parts] = {}
        self._spare = min(int(shutil.disk_usage(root).total * _SPARE_SHARE), _SPARE_BYTES)

    def run(self, source: InflatedStream) -> None:
        """Take every member; links are only noted."""
        for member in self.members(source):
            self._token.check()
            self._take(member, source)
        for _ in source.remainder():  # to the end, where gzip's checksum is
            pass

    def make_links(self) -> None:
        """Make the links, and see where they lead."""
        for parts, target in self._hard_links.items():
            if self.made.get(target) is not False:
                what = f"{_path(parts)} to {_path(target)}, which is no file before it"
                raise self.refused(f"has a hard link {what}")
            os.link(self._root.joinpath(*target), self.place(parts))
        for parts, name in self._links.items():
            self.place(parts).symlink_to(name)
        inside = os.path.realpath(self._root)
        for parts, name in self._links.items():
            leads = os.path.realpath(self._root.joinpath(*parts))
            if not (leads == inside or leads.startswith(f"{inside}/") or _is_interpreter(parts)):
                raise self.refused(f"has a link {_path(parts)} to {name!r}, which leads out of it")

    def _take(self, member: tarfile.TarInfo, source: InflatedStream) -> None:
        if "\0" in member.name + member.linkname:  # as pax headers can have it, and no file system
            raise self.refused(f"has a name that can't be written: {shown(member.name)}")
        parts = self._parts(member.name)
        if member.isdir():
            self.make_directory(parts)
        elif member.issym():
            self._links[parts] = member.linkname
        elif member.islnk():
            self._hard_links[parts] = self._parts(member.linkname)
        elif member.isreg() and not member.issparse():
            path = self.place(parts)
            if member.size > shutil.disk_usage(self._root).free - self._spare:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self.write(path, member, source)
        else:
            what = _REFUSED.get(member.type, f"a member of type {member.type!r} and {member.size} bytes")
            raise self.refused(f"has {what}, {_path(parts)}: pack files, folders and links only")

    def _parts(self, name: str) -> Parts:
        parts = tuple(part for part in name.split("/") if part not in ("", "."))
        if name.startswith("/") or ".." in parts:
            raise self.refused(f"has a path that leaves it, {shown(name)}")
        return parts

    def complete(self, fd: int, member: tarfile.TarInfo) -> None:
        time = int(member.mtime) if 0 <= member.mtime <= _LATEST else 0
        os.utime(fd, (time, time))


def _is_interpreter(parts: Parts) -> bool:
    return len(parts) == 2 and parts[0] == "bin" and _INTERPRETER.fullmatch(parts[1]) is not None


def _path(parts: Parts) -> str:
    return shown("/".join(parts))


def name_of(wanted: Given, digests: Digests, patience: Patience) -> str:
    """What the folder of a packed environment is called: it tells what is in it.

    Raises:
        OSError: the file can't be read.
    """
    return f"packed-{digests.of(wanted.path, patience)[:DIGITS]}"


def make(environment: Environment, wanted: Given, patience: Patience) -> None:
    """Unpack a packed environment into its empty folder. What is in it after a failure is the caller's to remove.

    Raises:
        MmeError: INVALID_MODEL when it is refused; what `patience` raises.
        OSError: what the disk says.
    """
    subject = f"model '{patience.model}': {wanted.subject}"
    unpack(wanted.path, environment.prefix, subject, patience)
    check_interpreter(environment, subject)
    script = environment.prefix / "bin/conda-unpack"  # conda's scripts name their environment by its path
    if script.is_file():
        program = environment.program(str(script), niceness=NICENESS)
        ended = fork_client.run(program, patience.model, script.name, patience)
        if ended.code != 0:
            raise MmeError(ended.kind, f"{subject} can't be moved to its place: {script.name} {ended}")
