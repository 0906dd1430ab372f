"""An archive of many files is refused by its own sentence, before it has cost what it would."""

from __future__ import annotations

import gzip
import io
import os
import tarfile
from pathlib import Path

import pytest

from container.settings import Settings, read_settings
from model_handlers.errors import Kind, MmeError
from serve.options import EngineOptions
from serve.sources.archive import ExtractLimits, extract

LIMIT = 300
SENTENCE = (
    f"archive 'a.tar.gz' has more than {LIMIT} members, the limit; pack fewer files, or raise MME_MAX_ARCHIVE_FILES"
)


def archive(kind, number):
    """A .tar.gz of so many files, or directories, of a byte each."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        for index in range(number):
            member = tarfile.TarInfo(f"1/{index}")
            member.type, member.size = kind, int(kind == tarfile.REGTYPE)
            tar.addfile(member, io.BytesIO(b"x"))
        tar.addfile(tarfile.TarInfo("config.pbtxt"))
    return io.BytesIO(gzip.compress(packed.getvalue(), 1))


@pytest.fixture
def synced(monkeypatch):
    """How often the disk was waited for."""
    calls = []
    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (calls.append(fd), fsync(fd))[1])
    return calls


@pytest.mark.parametrize("kind", [tarfile.REGTYPE, tarfile.DIRTYPE])
def test_the_member_beyond_the_limit_ends_the_unpacking(kind, tmp_path, synced):
    """Nothing of it is left, and nobody was asked for room for what follows."""
    claims = []
    with pytest.raises(MmeError) as raised:
        extract(
            archive(kind, 1000),
            tmp_path / "model",
            name="a.tar.gz",
            limits=ExtractLimits(max_files=LIMIT),
            claim=claims.append,
        )
    assert (raised.value.kind, raised.value.message) == (Kind.INVALID_MODEL, SENTENCE)
    assert len(claims) <= LIMIT
    assert len(synced) <= LIMIT
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", [tarfile.REGTYPE, tarfile.DIRTYPE])
def test_many_files_are_made_to_last_together(kind, tmp_path, synced):
    """A disk takes milliseconds for each by itself, and so minutes for an archive that is within the limit."""
    extract(archive(kind, 2000), tmp_path / "model", name="a.tar.gz")
    assert len(list((tmp_path / "model" / "1").iterdir())) == 2000
    assert len(synced) < 300


def test_the_limit_is_a_setting():
    """100,000 files are more than any honest archive has; one that has more than the default says which setting."""
    assert Settings().max_archive_files == EngineOptions(0, Path()).max_archive_files == 20_000
    assert ExtractLimits().max_files == 20_000
    assert read_settings({"MME_MAX_ARCHIVE_FILES": "50000"}).max_archive_files == 50_000
