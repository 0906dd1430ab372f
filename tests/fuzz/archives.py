"""Archives: each becomes a folder, complete and nowhere else, or nothing at all."""

from __future__ import annotations

import gzip
import io
import os
import shutil
import tarfile
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from hypothesis import strategies as st

from model_handlers.errors import Kind, MmeError
from serve.sources.archive import ExtractLimits, extract
from tests.fuzz.hunt import FindingError, Target

if TYPE_CHECKING:
    from collections.abc import Hashable

_LIMITS = ExtractLimits(max_bytes=1 << 18, max_files=20, max_name_length=200, max_depth=6)
_MEMORY = "/dev/shm"  # noqa: S108 - where syncing costs nothing
_NAMES = [
    "a",
    "a/b",
    "a/b/c",
    "./a",
    "../a",
    "/a",
    "a/../b",
    "1/model.onnx",
    "x" * 300,
    "a/",
    "",
    ".",
    "..",
    "a\\b",
    "\n",
]


def archive(data: bytes) -> Hashable:
    """A .tar.gz."""
    place = Path(tempfile.mkdtemp(prefix="fuzz-", dir=_MEMORY if Path(_MEMORY).is_dir() else None))
    model, outcome = place / "in" / "model", ""
    model.parent.mkdir()
    try:
        size = extract(io.BytesIO(data), model, name="a", packed=len(data), limits=_LIMITS)
    except MmeError as error:
        if error.kind is not Kind.INVALID_MODEL:
            raise FindingError(f"{error.kind}") from error
        if list(model.parent.iterdir()):
            raise FindingError("something is left of an archive that was refused") from error
        outcome = error.message[-40:]
    else:
        found = [Path(folder, name) for folder, folders, files in os.walk(model) for name in folders + files]
        if any(path.is_symlink() or not (path.is_file() or path.is_dir()) for path in found):
            raise FindingError("what is neither a file nor a folder")
        if size != sum(path.stat().st_size for path in found if path.is_file()) or size > _LIMITS.max_bytes:
            raise FindingError("not as many bytes as were told")
        outcome = str(len(found))
    finally:
        there = sorted(path.name for path in place.iterdir())
        shutil.rmtree(place, ignore_errors=True)
    if there != ["in"]:
        raise FindingError("something lies beside the folder")
    return outcome


def tar(data: bytes) -> Hashable:
    """A tar inside sound gzip data."""
    return archive(gzip.compress(data, 1, mtime=0))


@st.composite
def _tars(draw: st.DrawFn) -> bytes:
    file = io.BytesIO()
    form = draw(st.sampled_from([tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]))
    for _ in range(draw(st.integers(1, 4))):
        member = tarfile.TarInfo(draw(st.sampled_from(_NAMES)))
        member.type = draw(
            st.sampled_from([b"0"] * 6 + [b"5", b"5", b"1", b"2", b"3", b"6", b"7", b"S", b"L", b"x", b"g"])
        )
        content = draw(st.binary(max_size=20))
        member.size = len(content) if member.type in b"07S" else draw(st.sampled_from([0, 0, 5, 1 << 30]))
        member.linkname = draw(st.sampled_from(["", "a", "/etc/passwd"]))
        if form == tarfile.PAX_FORMAT and draw(st.booleans()):
            member.pax_headers = {
                draw(st.sampled_from(["path", "size", "linkpath", "GNU.sparse.map"])): draw(
                    st.sampled_from(["1", "../x", "-1", "9" * 20])
                )
            }
        try:
            file.write(member.tobuf(form, "utf-8", "surrogateescape"))
        except ValueError:  # a name that this form has no place for
            continue
        file.write(content + bytes(-len(content) % 512))
    return file.getvalue() + bytes(draw(st.sampled_from([1024, 512, 0, 10240])))


_WORDS = (
    b"ustar\x0000",
    b"ustar  \0",
    b"../",
    b"/",
    b"././@LongLink",
    b"\0" * 512,
    b"10 path=x\n",
    b"0000644\0",
    b"7777777777\0",
    b"\x80\0\0\0",
)
TARGETS = (
    Target(
        "archive",
        archive,
        _tars().map(lambda data: gzip.compress(data, mtime=0)),
        (b"\x1f\x8b\x08\0",),
        (16 << 20, 4096),
        2048,
    ),
    Target("tar", tar, _tars(), _WORDS, (16 << 20, 256), 8192),
)
