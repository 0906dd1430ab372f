"""What a member of an archive may be: its kind, its name, its place. Values in, values or one sentence out.

These are the rules that keep an untrusted archive inside its directory. Nothing here touches the disk, so that every
rule can be tried on a header alone.
"""

from __future__ import annotations

import tarfile
from dataclasses import dataclass

from model_handlers.errors import invalid_model
from model_handlers.untar import shown

_MAX_COMPONENT = 255  # bytes of one name between slashes, on every file system in use

_REFUSED_TYPES = {
    tarfile.SYMTYPE: "a symbolic link",
    tarfile.LNKTYPE: "a hard link",
    tarfile.CHRTYPE: "a device",
    tarfile.BLKTYPE: "a device",
    tarfile.FIFOTYPE: "a named pipe",
    tarfile.GNUTYPE_SPARSE: "a sparse file",
}


@dataclass(frozen=True, slots=True)
class ExtractLimits:
    """How much an archive may unpack to.

    Attributes:
        max_bytes: of all members together.
        max_files: members, directories included.
        max_name_length: UTF-8 bytes of a member's path.
        max_depth: names in a member's path.
    """

    max_bytes: int = 64 << 30
    max_files: int = 20_000
    max_name_length: int = 1024
    max_depth: int = 32


def checked_path(member: tarfile.TarInfo, archive: str, limits: ExtractLimits) -> tuple[str, ...]:
    """The names of the path of a file or directory, () for the root of the archive, where an absolute path begins too.

    Raises:
        MmeError: INVALID_MODEL, naming archive and member, for any other kind of member and for a path that leaves
            the directory, cannot be written, or goes beyond the limits.
    """
    reason = _wrong_kind(member)
    parts = parts_of(member.name)
    reason = reason or _wrong_names(parts, limits)
    if reason:
        raise invalid_model(f"archive '{archive}' has {reason} (member {shown(member.name)})")
    return parts


def parts_of(name: str) -> tuple[str, ...]:
    """The names of a path, without those that lead nowhere."""
    return tuple(part for part in name.split("/") if part not in ("", "."))


def names_itself(member: tarfile.TarInfo) -> bool:
    """Whether it is a hard link to the file of its own name: what GNU tar makes of a file that it is given twice."""
    return member.islnk() and not member.size and parts_of(member.linkname) == parts_of(member.name)


def _wrong_kind(member: tarfile.TarInfo) -> str:
    if member.type in _REFUSED_TYPES:
        return f"{_REFUSED_TYPES[member.type]}: pack plain files only"
    if member.issparse():
        return "a sparse file: pack plain files only"
    if not (member.isreg() or member.isdir()):
        return f"a member of the unknown type {member.type!r}"
    return ""


def _wrong_names(parts: tuple[str, ...], limits: ExtractLimits) -> str:
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


def is_mac_metadata(parts: tuple[str, ...]) -> bool:
    """Whether it is one of the files that the tools of macOS add to an archive without being asked."""
    return bool(parts) and (parts[0] == "__MACOSX" or parts[-1] == ".DS_Store" or parts[-1].startswith("._"))
