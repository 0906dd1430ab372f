"""The environments that were made for models: each once, by what is in it, for all models that want the same.

One folder holds them. An environment lies where it was made, since its scripts name it by its path; a file beside it,
written last, after everything else is on the disk, tells that it is complete:

    packed-<digest>/            the environment
    packed-<digest>.complete    it is
    packed-<digest>.lock        it is being made, or what was left of it is being removed

A folder without that file is what a failure or a crash left; it is removed with the next load that wants it, or when
the folder of all is taken over. Complete ones stay. Thread-safe; runs on load threads, shares the folder with other
processes; venv, pip and conda-unpack are processes of their own.

An installed environment is a venv on the interpreter of the server, which sees the packages of the server behind its
own: `--system-site-packages` would do that only where the server runs in no venv, so a `.pth` file names its folders.
"""

from __future__ import annotations

import errno
import functools
import importlib.metadata
import importlib.util
import json
import logging
import os
import re
import shlex
import shutil
import site
import sys
import tarfile
import threading
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from model_handlers.base import PLACEMENT, Placement
from model_handlers.environment import (
    NICENESS,
    Environment,
    Patience,
    Prebuilt,
    Requirements,
    Wanted,
    check_interpreter,
    lack_of,
)
from model_handlers.errors import ElsewhereError, MmeError, invalid_model
from model_handlers.system.disk import (
    DIGITS,
    Digests,
    directory_size,
    disk_errors,
    locked,
    own_directory,
    sync,
    sync_disk_of,
    text_digest,
)
from model_handlers.system.untar import InflatedStream, Parts, Unpacking, parts_of, shown
from model_handlers.worker import fork_client
from model_handlers.worker.fork_server import Program
from model_handlers.worker.limits import Deadlines

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator

    from model_handlers.config.model_config import ModelConfig
    from model_handlers.system.threads import CancelToken


_log = logging.getLogger("mme.cache")
_COMPLETE, _LOCK = ".complete", ".lock"
_NAME = re.compile(r"(packed|installed)-\w+")
_CONTINUED = re.compile(r"\\\n")  # a line that goes on
_COMMENT = re.compile(r"(^|\s+)#.*$")
_INCLUDES = re.compile(r"-[rc](?P<short>.*)|--(?:requirem|con)[a-z]*(?:=(?P<long>.*))?")  # pip takes abbreviations
_VARIABLE = re.compile(r"\$\{([A-Z0-9_]+)\}")  # what pip replaces by the value of an environment variable
_SHOWN = 200  # characters of a name in a message
_ERRORS = 3  # of pip's last ones, in an error message
_PIP = [
    *("-I", "-m", "pip", "install", "--no-input", "--no-color", "--progress-bar", "off"),
    *("--disable-pip-version-check", "--root-user-action", "ignore"),
    "--no-cache-dir",  # what is installed is kept itself
]
_SPARE_SHARE, _SPARE_BYTES = 0.05, 1 << 30  # of the disk, for all others: the smaller of the two
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


@dataclass(frozen=True, slots=True)
class Brought:
    """What environments a model's versions bring, by their model files.

    Of those that are `wanted` the server's own packages are enough for `met`; of the others those `there` were made.
    """

    wanted: dict[Path, Wanted]
    met: frozenset[Path]
    there: dict[Path, Environment]

    @property
    def complete(self) -> bool:
        return len(self.met) + len(self.there) == len(self.wanted)

    @property
    def mark(self) -> str:
        """Of footprints of models that share the server's packages: with another image, they may share nothing."""
        return " met" if self.met else ""

    def size_in(self, versions: Collection[Path]) -> int:
        """Bytes that they take in the directories of the model's versions, whose other bytes go into memory."""
        paths = {wanted.path if isinstance(wanted, Prebuilt) else wanted.wheels for wanted in self.wanted.values()}
        inside = (
            path for path in paths if path is not None and any(path.is_relative_to(version) for version in versions)
        )
        return sum(directory_size(path) if path.is_dir() else path.stat().st_size for path in inside)


class Environments:
    """The environments of one folder, which is made when the first of them is."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._digests = Digests()
        self._guard = threading.Lock()  # of what is done once
        self.taken_over = False

    def __repr__(self) -> str:
        return f"<Environments in {self._directory}>"

    def look(
        self, wanted: dict[Path, Wanted], config: ModelConfig, placement: Placement, token: CancelToken
    ) -> Brought:
        """What of the environments that the model files of its versions want is there. Nothing is made.

        Raises:
            MmeError: INVALID_MODEL when the model can't have an environment, or names what is none; CANCELLED.
        """
        if placement is Placement.INLINE:
            raise invalid_model(
                f"model '{config.name}' asks for an environment of its own, which only a process of its own can "
                f"have: remove its parameter '{PLACEMENT}'"
            )
        patience = _patience(config, token)
        met = frozenset(file for file, asked in wanted.items() if _is_met(asked, config.name))
        found = {file: self.find(asked, patience) for file, asked in wanted.items() if file not in met}
        return Brought(wanted, met, {file: there for file, there in found.items() if there is not None})

    def make(self, brought: Brought, config: ModelConfig, token: CancelToken) -> Brought:
        """Make those that are not there yet.

        Raises:
            MmeError: INVALID_MODEL when one can't be made in the time of a load; OUT_OF_MEMORY: the disk; CANCELLED.
        """
        patience = _patience(config, token)
        missing = {file: asked for file, asked in brought.wanted.items() if file not in brought.met}
        there = {file: self.provide(asked, patience) for file, asked in missing.items()}
        return replace(brought, there=there)

    def find(self, wanted: Wanted, patience: Patience) -> Environment | None:
        """The environment that a model wants; None where it is yet to be made.

        An `ElsewhereError` says that what the model names, and does not bring, is not there.
        """
        subject = f"model '{patience.model}': {wanted.subject}"
        if not isinstance(wanted, Requirements):
            if not os.path.exists(wanted.path):  # noqa: PTH110 - Path.exists raises for a name that is too long
                sentence = f"{subject} is not there: {wanted.remedy}"
                raise invalid_model(sentence) if wanted.brought else ElsewhereError(sentence)
            if wanted.path.is_dir():
                environment = Environment(wanted.path)
                check_interpreter(environment, subject)
                return environment
        with disk_errors(f"{subject} cannot be read"):
            environment = self.place(wanted, patience)
        return environment if _is_complete(environment) else None

    def provide(self, wanted: Wanted, patience: Patience) -> Environment:
        found = self.find(wanted, patience)
        if found is not None:
            return found
        with disk_errors(f"model '{patience.model}': {wanted.subject} cannot be made in {self._directory}"):
            self._take_over()
            environment = self.place(wanted, patience)
            with locked(_beside(environment, _LOCK), patience):
                if not _is_complete(environment):
                    _make(environment, wanted, patience)
        return environment

    def place(self, wanted: Wanted, patience: Patience) -> Environment:
        """The environment as it is or would be: its place tells what it is made of."""
        if isinstance(wanted, Requirements):
            return Environment(self._directory / installed_name(wanted, self._digests, patience))
        return Environment(self._directory / f"packed-{self._digests.of(wanted.path, patience)[:DIGITS]}")

    def _take_over(self) -> None:
        """Make the folder, also where it was removed; once, remove what runs that ended in the middle left in it."""
        own_directory(self._directory.parent)
        own_directory(self._directory)
        with self._guard:
            if self.taken_over:
                return
            names = {match[0] for path in self._directory.iterdir() if (match := _NAME.match(path.name))}
            for environment in (Environment(self._directory / name) for name in names):
                with locked(_beside(environment, _LOCK)) as held:
                    if held and not _is_complete(environment):
                        with suppress(OSError):  # a load that wants its place tells
                            _clear(environment)
            self.taken_over = True


def _is_met(wanted: Wanted, model: str) -> bool:
    if isinstance(wanted, Prebuilt):
        return False
    with disk_errors(f"model '{model}': {wanted.subject} cannot be read"):
        lack = lack_of(wanted.file)
    if lack:
        _log.info("it gets packages and a Python of its own: %s", lack, extra={"target_model": model})
    return not lack


def _patience(config: ModelConfig, token: CancelToken) -> Patience:
    return Patience(config.name, Deadlines.of(config).load, token)


def _make(environment: Environment, wanted: Wanted, patience: Patience) -> None:
    _clear(environment)
    try:
        environment.prefix.mkdir(mode=0o755)
        if isinstance(wanted, Requirements):
            install(environment, wanted, patience)
        else:
            unpack_environment(environment, wanted, patience)
        sync_disk_of(environment.prefix)
        _beside(environment, _COMPLETE).touch()
        sync(environment.prefix.parent)
    except BaseException:
        shutil.rmtree(environment.prefix, ignore_errors=True)
        raise


def _clear(environment: Environment) -> None:
    """The mark first, so that what is left is never taken for complete."""
    _beside(environment, _COMPLETE).unlink(missing_ok=True)
    if os.path.lexists(environment.prefix):
        shutil.rmtree(environment.prefix)


def _is_complete(environment: Environment) -> bool:
    return _beside(environment, _COMPLETE).exists() and environment.python.exists()


def _beside(environment: Environment, suffix: str) -> Path:
    return environment.prefix.with_name(environment.prefix.name + suffix)


def installed_name(wanted: Requirements, digests: Digests, patience: Patience) -> str:
    """What the folder of such an environment is called: it tells what was asked for, and on top of what."""
    wheels = sorted(path for path in wanted.wheels.iterdir() if path.is_file()) if wanted.wheels is not None else []
    asked = [
        list(sys.version_info),
        _server_packages(),
        _server_distributions(),
        [digests.of(file, patience) for file in _read_by_pip(wanted, patience.model)],
        [(wheel.name, digests.of(wheel, patience)) for wheel in wheels],
        wanted.wheels is None,
    ]
    return f"installed-{text_digest(json.dumps(asked), DIGITS)}"


def install(environment: Environment, wanted: Requirements, patience: Patience) -> None:
    """Make the venv in its empty folder and install. What is in it after a failure is the caller's to remove."""
    subject = f"model '{patience.model}': {wanted.subject}"
    if importlib.util.find_spec("pip") is None:
        raise invalid_model(f"{subject} can't be installed: the server's Python has no pip")
    venv = Program((sys.executable, "-I", "-m", "venv", "--without-pip", str(environment.prefix)), niceness=NICENESS)
    ended = fork_client.run(venv, patience.model, "venv", patience)
    if ended.code != 0:
        raise MmeError(ended.kind, f"{subject} can't be installed: venv {ended}")
    [packages] = environment.prefix.glob("lib/python3.*/site-packages")
    (packages / "mme-server.pth").write_text("\n".join(_server_packages()) + "\n")
    temporary = environment.prefix / "tmp"  # so that nothing is left anywhere else when pip is killed
    temporary.mkdir()
    pip = environment.program(
        *_PIP,
        *(("--no-index", "--find-links", str(wanted.wheels)) if wanted.wheels is not None else ()),
        "-r",
        str(wanted.file),
        directory=str(wanted.file.parent),
        variables={"TMPDIR": str(temporary)},
        niceness=NICENESS,
    )
    ended = fork_client.run(pip, patience.model, "pip", patience)
    if ended.code != 0:
        raise MmeError(
            ended.kind, f"{subject} can't be installed: {_told(ended, _read_by_pip(wanted, patience.model))}"
        )
    shutil.rmtree(temporary)


def _told(ended: fork_client.Ended, files: Iterable[Path]) -> str:
    """Why pip failed, in its own words, but for the values of the environment variables that the files name."""
    errors = [line for line in ended.words if line.startswith("ERROR: ")]
    words = " | ".join(errors[-_ERRORS:]) or f"pip {ended}"
    for name in {name for file in files for name in _VARIABLE.findall(file.read_text(errors="replace"))}:
        if value := os.environ.get(name):
            words = words.replace(value, f"${{{name}}}")
    return words


def _read_by_pip(wanted: Requirements, model: str) -> Iterator[Path]:
    """The file of requirements, and those that it includes; one outside of the model's folder is refused.

    pip tells the first line of a file that holds no requirements, and clients are told what pip says.
    """
    folder = wanted.file.parent.resolve()
    pending, seen = [wanted.file], set()
    while pending:
        file = pending.pop()
        if file in seen or not file.is_file():
            continue
        seen.add(file)
        yield file
        for name in _included(file.read_text(errors="replace")):
            included = file.parent / name
            if "$" in name or ":" in name or not included.resolve().is_relative_to(folder):
                raise invalid_model(
                    f"model '{model}': {wanted.subject} includes '{name[:_SHOWN]}', which is outside of the model's "
                    "folder: put the file into the archive, beside requirements.txt"
                )
            pending.append(included)


def _included(text: str) -> Iterator[str]:
    for line in _CONTINUED.sub("", text.replace("\r\n", "\n")).splitlines():
        words = iter(_words(_COMMENT.sub("", line)))
        for word in words:
            if match := _INCLUDES.fullmatch(word):
                yield match["short"] or match["long"] or next(words, "")


def _words(line: str) -> list[str]:
    try:
        return shlex.split(line)
    except ValueError:  # pip refuses a line whose quotes do not end
        return line.split()


@functools.cache
def _server_packages() -> list[str]:
    folders = [*site.getsitepackages(), str(Path(np.__file__).parents[1])]
    if site.ENABLE_USER_SITE:
        folders.append(site.getusersitepackages())
    return [folder for folder in dict.fromkeys(folders) if Path(folder).is_dir()]


@functools.cache
def _server_distributions() -> list[str]:
    found = importlib.metadata.distributions(path=_server_packages())
    return sorted({f"{distribution.name}=={distribution.version}" for distribution in found})


def unpack(archive: Path, root: Path, subject: str, token: CancelToken) -> None:
    """Unpack an environment into an empty folder, which the caller removes where it fails; ENOSPC: nearly full."""
    with InflatedStream(archive.open("rb"), subject, token) as source:
        try:
            unpacking = _Unpacking(subject, root, most_members=_MOST_MEMBERS, packed=archive.stat().st_size)
            unpacking.run(source)
            unpacking.make_links()
        except OSError as error:
            if error.errno in _BAD_NAMES:
                raise invalid_model(f"{subject} has a name that can't be written: {error}") from error
            raise


class _Unpacking(Unpacking):
    """Links are noted, made after all files, and may not lead out."""

    packer = "conda-pack or venv-pack"

    def __init__(self, subject: str, root: Path, *, most_members: int, packed: int) -> None:
        super().__init__(subject, root, most_members=most_members, packed=packed)
        self._links: dict[Parts, str] = {}
        self._hard_links: dict[Parts, Parts] = {}
        self._spare = min(int(shutil.disk_usage(root).total * _SPARE_SHARE), _SPARE_BYTES)

    def make_links(self) -> None:
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

    def checked(self, member: tarfile.TarInfo) -> Parts | None:
        if "\0" in member.name + member.linkname:  # as pax headers can have it, and no file system
            raise self.refused(f"has a name that can't be written: {shown(member.name)}")
        parts = self._parts(member.name)
        if member.issym():
            self._links[parts] = member.linkname
        elif member.islnk():
            self._hard_links[parts] = self._parts(member.linkname)
        elif member.isdir() or (member.isreg() and not member.issparse()):
            return parts
        else:
            what = _REFUSED.get(member.type, f"a member of type {member.type!r} and {member.size} bytes")
            raise self.refused(f"has {what}, {_path(parts)}: pack files, folders and links only")
        return None

    def claim(self, size: int) -> None:
        if size > shutil.disk_usage(self._root).free - self._spare:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def complete(self, fd: int, parts: Parts, member: tarfile.TarInfo, crc: int) -> None:  # noqa: ARG002
        time = int(member.mtime) if 0 <= member.mtime <= _LATEST else 0
        os.utime(fd, (time, time))  # compiled Python files are compared by it

    def _parts(self, name: str) -> Parts:
        parts = parts_of(name)
        if name.startswith("/") or ".." in parts:
            raise self.refused(f"has a path that leaves it, {shown(name)}")
        return parts


def _is_interpreter(parts: Parts) -> bool:
    return len(parts) == 2 and parts[0] == "bin" and _INTERPRETER.fullmatch(parts[1]) is not None


def _path(parts: Parts) -> str:
    return shown("/".join(parts))


def unpack_environment(environment: Environment, wanted: Prebuilt, patience: Patience) -> None:
    subject = f"model '{patience.model}': {wanted.subject}"
    unpack(wanted.path, environment.prefix, subject, patience)
    check_interpreter(environment, subject)
    script = environment.prefix / "bin/conda-unpack"  # conda's scripts name their environment by its path
    if script.is_file():
        program = environment.program(str(script), niceness=NICENESS)
        ended = fork_client.run(program, patience.model, script.name, patience)
        if ended.code != 0:
            raise MmeError(ended.kind, f"{subject} can't be moved to its place: {script.name} {ended}")
