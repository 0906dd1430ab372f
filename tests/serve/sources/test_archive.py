"""An archive becomes a directory, or nothing at all; a directory becomes an archive."""

import errno
import gzip
import io
import os
import string
import subprocess
import sys
import tarfile
import threading
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from model_handlers.errors import Kind, MmeError
from model_handlers.system.disk import remove_staging
from model_handlers.system.threads import CancelToken
from serve.sources.archive import ExtractLimits, extract, pack

pytestmark = pytest.mark.usefixtures("no_leaks")


def unpack(data, directory, **options):
    """Extract `data` into a new directory below `directory`."""
    return extract(io.BytesIO(data), directory / "model", name="a.tar.gz", **options)


def refused(data, directory, **options):
    """The sentence with which an archive is refused; nothing may be left of it."""
    with pytest.raises(MmeError) as caught:
        unpack(data, directory, **options)
    assert caught.value.kind is Kind.INVALID_MODEL
    assert "'a.tar.gz'" in caught.value.message
    assert list(directory.iterdir()) == []
    return caught.value.message


def content(directory):
    """Relative name -> bytes of every file below, None for a directory."""
    return {
        path.relative_to(directory).as_posix(): path.read_bytes() if path.is_file() else None
        for path in directory.rglob("*")
    }


def header(name, kind, **fields):
    """A member without data."""
    member = tarfile.TarInfo(name)
    member.type = kind
    for field, value in fields.items():
        setattr(member, field, value)
    return member


def test_files_and_directories_appear(tmp_path, targz_bytes):
    """Files arrive with their bytes and in their directories, listed in the archive or not."""
    data = targz_bytes(header("./1", tarfile.DIRTYPE), ("./1/model.onnx", b"x" * 3_000_000), ("a/b/c.txt", b""))

    written = unpack(data, tmp_path)

    assert content(tmp_path / "model") == {
        "1": None,
        "1/model.onnx": b"x" * 3_000_000,
        "a": None,
        "a/b": None,
        "a/b/c.txt": b"",
    }
    assert written == 3_000_000


def test_modes_and_owner_are_ours(tmp_path, targz_bytes):
    """Only the owner's execute bit is taken from the archive: no setuid, no owner, nothing from the umask."""
    script = header("run", tarfile.REGTYPE, mode=0o6711, uid=12345, gid=12345)
    secret = header("secret", tarfile.REGTYPE, mode=0o000)
    locked = header("locked", tarfile.DIRTYPE, mode=0o000)
    before = os.umask(0o077)
    try:
        unpack(targz_bytes(locked, script, secret), tmp_path)
    finally:
        os.umask(before)

    model = tmp_path / "model"
    modes = {path.name: path.stat().st_mode & 0o7777 for path in [model, *model.iterdir()]}
    assert modes == {"model": 0o755, "locked": 0o755, "run": 0o755, "secret": 0o644}
    assert (model / "run").stat().st_uid == os.getuid()


@pytest.mark.parametrize(
    "member",
    [
        header("/etc/passwd", tarfile.REGTYPE),
        header("//etc/passwd", tarfile.REGTYPE),
        header("../out", tarfile.REGTYPE),
        header("1/../../out", tarfile.REGTYPE),
        header("1/..", tarfile.DIRTYPE),
        header("link", tarfile.SYMTYPE, linkname="/etc"),
        header("link", tarfile.SYMTYPE, linkname="1"),
        header("link", tarfile.LNKTYPE, linkname="ok"),
        header("null", tarfile.CHRTYPE, devmajor=1, devminor=3),
        header("disk", tarfile.BLKTYPE, devmajor=8),
        header("pipe", tarfile.FIFOTYPE),
        header("new\nline", tarfile.REGTYPE),
        header("volume", b"V"),
        header("n" * 256, tarfile.REGTYPE),
        header("/".join("d" * 40), tarfile.REGTYPE),
        header("p/" * 20 + "n" * 200, tarfile.REGTYPE),
        header("./", tarfile.REGTYPE),
    ],
    ids=lambda member: f"{member.type.decode()}-{member.name[:20]!r}",
)
def test_refused_members(member, tmp_path, targz_bytes):
    """A member that leaves the directory, is no plain file, or has an impossible name is refused by its name."""
    limits = ExtractLimits(max_name_length=239)
    message = refused(targz_bytes(("ok", b"fine"), member), tmp_path, limits=limits)

    assert repr(member.name)[1:15] in message
    assert "\n" not in message
    assert not (tmp_path.parent / "out").exists()


def test_link_then_file_through_it(tmp_path, targz_bytes):
    """A link to a directory outside and a file through it write nothing outside."""
    outside = tmp_path / "outside"
    outside.mkdir()
    inside = tmp_path / "inside"
    inside.mkdir()
    data = targz_bytes(header("d", tarfile.SYMTYPE, linkname=str(outside)), ("d/file", b"evil"))

    assert "symbolic link" in refused(data, inside)
    assert list(outside.iterdir()) == []


@pytest.mark.parametrize("first", ["a", "./a", "a/"])
def test_duplicates(first, tmp_path, targz_bytes):
    """The same file twice is refused, however its path is written."""
    assert "twice" in refused(targz_bytes((first, b"1"), (".//a", b"2")), tmp_path)


@pytest.mark.parametrize(
    ("options", "place"),
    [("-C {0} m m/f", "m/f"), ("-C {0}/m . f", "f"), ("-P {0}/m {0}/m/f", "{0}/m/f"), ("-P {0}/m/f", "{0}/m/f")],
)
def test_what_tar_makes_of_a_file_that_it_is_given_twice(options, place, tmp_path):
    """GNU's links the second one to the file itself; with -P paths begin at the root, and become relative here."""
    source = tmp_path / "source"
    (source / "m").mkdir(parents=True)
    (source / "m" / "f").write_text("once")
    packed = tmp_path / "a.tar.gz"
    subprocess.run(["tar", "-czf", packed, *options.format(source).split()], check=True)
    unpack(packed.read_bytes(), tmp_path)

    files = {path: data for path, data in content(tmp_path / "model").items() if data is not None}
    assert files == {place.format(source).lstrip("/"): b"once"}


def test_a_link_to_another_file_or_to_none_is_refused(tmp_path, targz_bytes):
    """Though it has been unpacked before, or is to come."""
    for linked in ("b", "a"):
        data = targz_bytes(("b", b"1"), header("a", tarfile.LNKTYPE, linkname=linked), ("c", b"2"))
        assert "a hard link" in refused(data, tmp_path)


@pytest.mark.parametrize("first", ["/a", "a"])
def test_absolute_paths_beside_relative_ones_are_refused(first, tmp_path, targz_bytes):
    """`tar -P` makes all of one kind."""
    other = "b" if first == "/a" else "/b"
    message = refused(targz_bytes((first, b"1"), (other, b"2")), tmp_path)
    assert f"absolute paths beside relative ones (member '{other}')" in message


def test_file_as_directory(tmp_path, targz_bytes):
    """A name that is both a file and a directory is refused, whichever comes first."""
    assert "both as a file and as a directory" in refused(targz_bytes(("a", b""), ("a/b", b"")), tmp_path)
    assert "both as a file" in refused(targz_bytes(("a", b""), header("a", tarfile.DIRTYPE)), tmp_path)
    assert "twice" in refused(targz_bytes(("a/b", b""), ("a", b"")), tmp_path)


def test_repeated_directory(tmp_path, targz_bytes):
    """A directory listed twice holds what both list."""
    directory = header("1", tarfile.DIRTYPE)
    unpack(targz_bytes(directory, ("1/a", b"a"), directory, ("1/b", b"b")), tmp_path)

    assert content(tmp_path / "model") == {"1": None, "1/a": b"a", "1/b": b"b"}


def test_long_names(tmp_path, targz_bytes):
    """Names beyond the 100 bytes of the old header arrive whole, in GNU's and in POSIX's way to write them."""
    name = "/".join(["é" * 60, "b" * 120, "c" * 120])
    for number, kind in enumerate((tarfile.GNU_FORMAT, tarfile.PAX_FORMAT)):
        parent = tmp_path / str(number)
        parent.mkdir()
        unpack(targz_bytes((name, b"x"), format=kind), parent)
        assert (parent / "model" / name).read_bytes() == b"x"


def test_mac_metadata_is_skipped(tmp_path, targz_bytes):
    """What macOS adds beside the files is not unpacked."""
    data = targz_bytes(
        ("._1", b"junk" * 1000), ("1/._m", b""), ("1/.DS_Store", b"x"), ("__MACOSX/1/m", b""), ("1/m", b"m")
    )
    unpack(data, tmp_path)

    assert content(tmp_path / "model") == {"1": None, "1/m": b"m"}


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "is empty"),
        (b"PK\x03\x04 a zip file" * 100, "not a gzip file"),
        (b"\x1f", "not a gzip file"),
        (gzip.compress(b""), "holds no files"),
        (gzip.compress(b"weights" * 1000), "holds no tar archive"),
        (gzip.compress(b"short"), "holds no tar archive"),
        (gzip.compress(bytes(10240)), "holds no files"),
    ],
    ids=["empty", "zip", "one byte", "empty gzip", "gzip of a file", "gzip of little", "empty tar"],
)
def test_other_formats(data, words, tmp_path):
    """What is no .tar.gz is refused, saying what it is instead."""
    assert words in refused(data, tmp_path)


def test_plain_tar(tmp_path, tar_bytes):
    """A tar that is not compressed is refused with what to do."""
    assert "gzip it" in refused(tar_bytes(("1/model.onnx", b"x")), tmp_path)


def test_directories_alone(tmp_path, targz_bytes):
    """An archive without a file is refused."""
    assert "holds no files" in refused(targz_bytes(header("1", tarfile.DIRTYPE)), tmp_path)


@pytest.mark.parametrize("part", [0.001, 0.3, 0.9, 0.9999])
def test_truncated_gzip(part, tmp_path, targz_bytes):
    """An archive that ends too early is refused, wherever it ends."""
    data = targz_bytes(("1/model.onnx", os.urandom(300_000)))

    assert "truncated" in refused(data[: max(20, int(len(data) * part))], tmp_path)


def test_truncated_gzip_trailer(tmp_path, targz_bytes):
    """Every byte of the checksum counts."""
    assert "truncated" in refused(targz_bytes(("1/model.onnx", b"x"))[:-1], tmp_path)


@pytest.mark.parametrize("cut", [100, 512, 512 + 700, 512 + 1024, 512 + 1024 + 300, 512 + 1024 + 512 + 1])
def test_truncated_tar(cut, tmp_path, tar_bytes):
    """A tar that was cut before it was compressed is refused: inside a member, between two, or before its end."""
    tar = tar_bytes(("a", b"x" * 1000), ("b", b"y" * 1000))

    message = refused(gzip.compress(tar[:cut]), tmp_path)

    assert "truncated" in message or (cut < 512 and "no tar archive" in message)


def test_corrupt_header(tmp_path, tar_bytes):
    """A broken header is never taken for the end of the archive."""
    tar = bytearray(tar_bytes(("a", b"x" * 1000), ("b", b"y" * 1000)))
    tar[512 + 1024 + 10] ^= 0xFF

    assert "corrupt tar header behind member 1" in refused(gzip.compress(bytes(tar)), tmp_path)


@pytest.mark.parametrize("position", [40, -6, -2])
def test_corrupt_gzip(position, tmp_path, targz_bytes):
    """A bit that flipped in the data, the checksum or the length is found."""
    data = bytearray(targz_bytes(("1/model.onnx", bytes(range(256)) * 200)))
    data[position] ^= 0x40

    assert "corrupt" in refused(bytes(data), tmp_path)


def test_trailing_garbage(tmp_path, tar_bytes, targz_bytes):
    """Anything but padding behind the gzip data, or behind the tar inside it, is refused."""
    assert "trailing garbage behind its gzip" in refused(targz_bytes(("a", b"x")) + b"garbage", tmp_path)
    assert "behind its tar" in refused(gzip.compress(tar_bytes(("a", b"x")) + b"garbage"), tmp_path)
    assert "behind its tar" in refused(gzip.compress(tar_bytes(("a", b"x")) * 2), tmp_path)


def test_padding_and_several_gzip_members(tmp_path, tar_bytes):
    """Zeros behind the data are padding, and gzip members that follow each other are one content."""
    tar = tar_bytes(("a", b"x" * 5000))
    data = gzip.compress(tar[:700]) + gzip.compress(b"") + gzip.compress(tar[700:] + bytes(50_000)) + bytes(600_000)
    unpack(data, tmp_path)

    assert content(tmp_path / "model") == {"a": b"x" * 5000}


class InPieces(io.BytesIO):
    """Gives a few bytes at a time, as a network may."""

    def read(self, size=-1):
        """Seven at most."""
        return super().read(min(size, 7) if size >= 0 else 7)


def gzip_member(data):
    """Compressed as mgzip and others do it, with an extra field and a name in the header."""
    flags, extra, name = 4 | 8, b"\x08\0SZ\x04\0size", b"model.tar\0"
    return b"\x1f\x8b\x08" + bytes([flags]) + bytes(6) + extra + name + gzip.compress(data)[10:]


def test_gzip_members_whose_headers_come_in_pieces(tmp_path, tar_bytes):
    """Wherever a read ends: in the header of a member, too."""
    content_of_a = os.urandom(5000)
    tar = tar_bytes(("a", content_of_a))
    data = b"".join(gzip_member(tar[at : at + 1000]) for at in range(0, len(tar), 1000))
    extract(InPieces(data), tmp_path / "model", name="a.tar.gz")

    assert gzip.decompress(data) == tar
    assert content(tmp_path / "model") == {"a": content_of_a}


def test_bomb_in_one_file(tmp_path):
    """A gigabyte of zeros in a megabyte is refused by its header, before it is written."""
    big = header("zeros", tarfile.REGTYPE, size=1 << 30)
    data = gzip.compress(big.tobuf()) + gzip.compress(bytes(1 << 20)) * 1024

    assert "more than 1000000 bytes" in refused(data, tmp_path, limits=ExtractLimits(max_bytes=1_000_000))


def test_bomb_of_many_files(tmp_path, targz_bytes):
    """Files count together, in bytes and in number; what is skipped counts too."""
    members = [(f"{number}", b"x" * 1000) for number in range(20)]
    junk = [(f"._{number}", b"x" * 1000) for number in range(20)]

    assert "more than 10000 bytes" in refused(targz_bytes(*members), tmp_path, limits=ExtractLimits(max_bytes=10_000))
    assert "more than 10000 bytes" in refused(targz_bytes(*junk), tmp_path, limits=ExtractLimits(max_bytes=10_000))
    assert "more than 19 members" in refused(targz_bytes(*members), tmp_path, limits=ExtractLimits(max_files=19))
    unpack(targz_bytes(*members), tmp_path, limits=ExtractLimits(max_files=20, max_bytes=20_000))


@pytest.mark.parametrize("kind", [tarfile.GNUTYPE_LONGNAME, tarfile.XHDTYPE, tarfile.XGLTYPE])
def test_bomb_in_a_header(kind, tmp_path):
    """A header that claims gigabytes for a name does not get them."""
    claim = header("name", kind, size=4 << 30).tobuf(tarfile.GNU_FORMAT)
    data = gzip.compress(claim) + gzip.compress(bytes(1 << 20)) * 16

    assert "tar header of more than" in refused(data, tmp_path)


def test_bomb_of_headers(tmp_path):
    """Headers that only announce further headers come to an end."""
    record = header("x", tarfile.XHDTYPE, size=512).tobuf() + b"12 path=abc\n".ljust(512, b"\0")

    refused(gzip.compress(record * 100_000), tmp_path)


def test_a_size_that_the_archive_cannot_hold(tmp_path, tar_bytes):
    """Nobody leaves the disk for it, and it is the archive's fault, not the disk's; zeros, packed tightly, are taken."""
    data = gzip.compress(header("model.onnx", tarfile.REGTYPE, size=1 << 30).tobuf())
    claims = []

    words = refused(data, tmp_path, packed=len(data), claim=claims.append)

    assert f"claims {1 << 30} bytes for member 'model.onnx', more than its {len(data)} bytes can hold" in words
    assert claims == []
    zeros = gzip.compress(tar_bytes(("zeros", bytes(4 << 20))), 9)
    assert unpack(zeros, tmp_path, packed=len(zeros)) == 4 << 20
    assert (4 << 20) / len(zeros) > 900


def test_many_directories_in_a_row(tmp_path, targz_bytes):
    """Their headers follow one another without data, and are no header of a megabyte."""
    directories = [header(f"d{number}", tarfile.DIRTYPE) for number in range(3000)]

    assert unpack(targz_bytes(*directories, ("file", b"x")), tmp_path) == 1


def test_bomb_behind_the_end(tmp_path, tar_bytes):
    """Padding is bounded as well."""
    data = gzip.compress(tar_bytes(("a", b"x"))) + gzip.compress(bytes(1 << 20)) * 4

    assert "trailing garbage" in refused(data, tmp_path, limits=ExtractLimits(max_bytes=1 << 20))


def test_negative_size(tmp_path, targz_bytes):
    """A size below zero, which would turn the archive back on itself, is refused; newer Pythons refuse it themselves."""
    member = header("a", tarfile.REGTYPE, pax_headers={"size": "-1024"})
    said = refused(targz_bytes(member, format=tarfile.PAX_FORMAT), tmp_path)

    assert "negative size" in said or "corrupt tar header" in said


@pytest.mark.parametrize(
    "options",
    [["--format=gnu"], *(["--format=posix", f"--sparse-version={version}"] for version in ("0.0", "0.1", "1.0"))],
    ids=lambda options: options[-1],
)
def test_sparse(options, tmp_path):
    """A sparse file, which is longer than its data, is refused in each form that GNU tar writes."""
    with (tmp_path / "holes").open("wb") as file:
        file.truncate(1 << 20)
        file.seek(1 << 19)
        file.write(b"data")
    ended = subprocess.run(
        ["tar", "czf", "-", "--sparse", *options, "holes"], check=True, capture_output=True, cwd=tmp_path
    )
    (tmp_path / "out").mkdir()

    assert "sparse file" in refused(ended.stdout, tmp_path / "out")


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(st.data())
def test_damaged_tar_never_surprises(tmp_path_factory, tar_bytes, data):
    """Whatever bytes a tar is damaged with, it is refused by a sentence or unpacked inside its directory."""
    tar = bytearray(tar_bytes(("a" * 120, b"x" * 600), ("b/c", b"y"), format=tarfile.PAX_FORMAT))
    for _ in range(data.draw(st.integers(1, 4))):
        position = data.draw(st.integers(0, 512 * 9))
        patch = data.draw(st.binary(min_size=1, max_size=12))
        tar[position : position + len(patch)] = patch
        start = position - position % 512
        block = tar[start : start + 512]
        if data.draw(st.booleans()):  # a checksum that agrees lets the damage through to the parsing
            block[148:156] = b"%06o\0 " % (256 + sum(block[:148]) + sum(block[156:]))
            tar[start : start + 512] = block
    directory = tmp_path_factory.mktemp("damaged")
    try:
        unpack(gzip.compress(bytes(tar)), directory, limits=ExtractLimits(max_bytes=1 << 20))
    except MmeError as error:
        assert error.kind is Kind.INVALID_MODEL  # noqa: PT017 - either outcome is right
        assert list(directory.iterdir()) == []
    assert {path.name for path in directory.iterdir()} <= {"model"}


def test_destination_exists(tmp_path, targz_bytes):
    """A directory that is there already is not touched."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine").touch()

    with pytest.raises(MmeError) as caught:
        unpack(targz_bytes(("a", b"x")), tmp_path)

    assert caught.value.kind is Kind.ALREADY_EXISTS
    assert content(tmp_path / "model") == {"mine": b""}


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_disk_full(code, tmp_path, targz_bytes, monkeypatch):
    """A full disk is out of memory, says disk, and leaves nothing."""

    def full(_fd):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", full)  # no test may fill the disk of its machine
    with pytest.raises(MmeError, match="disk is full") as caught:
        unpack(targz_bytes(("a", b"x")), tmp_path)

    assert caught.value.kind is Kind.OUT_OF_MEMORY
    assert list(tmp_path.iterdir()) == []


def test_missing_parent(tmp_path, targz_bytes):
    """A directory that cannot be written to is named, and the stream is closed all the same."""
    stream = io.BytesIO(targz_bytes(("a", b"x")))
    with pytest.raises(MmeError, match="nowhere") as caught:
        extract(stream, tmp_path / "nowhere" / "model", name="a.tar.gz")

    assert caught.value.kind is Kind.INTERNAL
    assert stream.closed


class SlowStream(io.RawIOBase):
    """Gives what it has, then waits until it is closed or told to break."""

    def __init__(self, data, error=None):
        super().__init__()
        self.data = io.BytesIO(data)
        self.waits = threading.Event()
        self.go = threading.Event()
        self.error = error

    def readable(self):
        """Yes."""
        return True

    def readinto(self, buffer):
        """What is there; then wait."""
        count = self.data.readinto(buffer)
        if not count:
            self.waits.set()
            self.go.wait()
            if self.error:
                raise self.error
        return count

    def close(self):
        """End the wait."""
        self.go.set()
        super().close()


def test_cancelled_while_the_source_is_silent(tmp_path, targz_bytes):
    """A load whose client left ends although no byte arrives, and leaves neither directory nor thread."""
    stream = SlowStream(targz_bytes(("a", os.urandom(2_000_000)))[:1_500_000])
    with pytest.raises(MmeError) as caught:
        extract(stream, tmp_path / "model", name="a.tar.gz", token=CancelToken(cancelled=stream.waits.is_set))

    assert caught.value.kind is Kind.CANCELLED
    assert list(tmp_path.iterdir()) == []
    assert stream.closed


def test_refused_while_the_source_is_silent(tmp_path, targz_bytes):
    """A bad member ends the unpacking at once, however long the rest of the archive would take."""
    padding = ("pad", os.urandom(1_000_000))  # moves what has arrived out of the inflater
    stream = SlowStream(targz_bytes(header("../out", tarfile.REGTYPE), padding)[:600_000])
    with pytest.raises(MmeError, match=r"\.\."):
        extract(stream, tmp_path / "model", name="a.tar.gz")


def test_unpacks_while_bytes_arrive(tmp_path, targz_bytes):
    """Files are written before the last byte of the archive is there."""
    stream = SlowStream(targz_bytes(("first", b"1"), ("second", os.urandom(6_000_000)))[:4_000_000])
    written = []

    def cancelled():
        if not stream.waits.is_set():
            return False
        written.extend(path.name for path in tmp_path.glob(".staging-*/*"))
        return "second" in written

    with pytest.raises(MmeError, match="cancelled"):
        extract(stream, tmp_path / "model", name="a.tar.gz", token=CancelToken(cancelled=cancelled))
    assert "first" in written


def test_source_fails(tmp_path, targz_bytes):
    """What the source raises reaches the caller; an error of the operating system becomes one of ours."""
    half = targz_bytes(("a", os.urandom(600_000)))[:300_000]
    for error, kind in (
        (MmeError(Kind.UNKNOWN_MODEL, "gone"), Kind.UNKNOWN_MODEL),
        (ConnectionResetError("reset"), Kind.UNAVAILABLE),
    ):
        stream = SlowStream(half, error)
        stream.go.set()
        with pytest.raises(MmeError) as caught:
            extract(stream, tmp_path / "model", name="a.tar.gz")
        assert caught.value.kind is kind
        assert list(tmp_path.iterdir()) == []


def test_extracts_at_once(tmp_path, targz_bytes):
    """Threads that unpack at the same time do not meet."""
    data = targz_bytes(*((f"{number}", os.urandom(10_000)) for number in range(20)))
    threads = [
        threading.Thread(target=extract, args=(io.BytesIO(data), tmp_path / str(number)), kwargs={"name": "a"})
        for number in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert sorted(path.name for path in tmp_path.iterdir()) == list("012345")
    assert all(len(list(path.iterdir())) == 20 for path in tmp_path.iterdir())


def test_killed_in_the_middle(tmp_path, targz_bytes):
    """A process that dies while it unpacks leaves staging alone, which the next start removes."""
    (tmp_path / "half").write_bytes(targz_bytes(("first", b"1"), ("big", os.urandom(2_000_000)))[:1_500_000])
    program = (
        "import os, sys, io; from pathlib import Path; from serve.sources.archive import extract\n"
        "half = Path(sys.argv[1])\n"
        "class Dies(io.FileIO):\n"
        "    def read(self, size):\n"
        "        data = super().read(size)\n"
        "        while not data:\n"
        "            if list(half.parent.glob('.staging-*/first')): os._exit(9)\n"
        "        return data\n"
        "extract(Dies(half), half.parent / 'model', name='half')\n"
    )
    ended = subprocess.run([sys.executable, "-c", program, str(tmp_path / "half")], check=False, cwd=Path.cwd())

    assert ended.returncode == 9
    assert not (tmp_path / "model").exists()
    assert len(list(tmp_path.glob(".staging-*/first"))) == 1
    remove_staging(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["half"]


def tree(directory, files):
    """Write name -> bytes below `directory`."""
    for name, data in files.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return directory


def test_pack_is_deterministic(tmp_path):
    """Equal content gives equal bytes, whatever the order, the times and the modes in which it was made."""
    files = {"config.pbtxt": b'name: "m"', "1/model.onnx": os.urandom(100_000), "1/labels.txt": b"a\nb"}
    one = tree(tmp_path / "one", files)
    two = tree(tmp_path / "two", dict(reversed(files.items())))
    os.utime(two / "config.pbtxt", (1, 1))
    (two / "1" / "model.onnx").chmod(0o600)
    pack(one, tmp_path / "1.tar.gz")
    pack(two, tmp_path / "2.tar.gz")

    assert (tmp_path / "1.tar.gz").read_bytes() == (tmp_path / "2.tar.gz").read_bytes()
    with tarfile.open(tmp_path / "1.tar.gz", "r:gz") as archive:
        members = archive.getmembers()
    assert [member.name for member in members] == ["1", "1/labels.txt", "1/model.onnx", "config.pbtxt"]
    assert {(member.uid, member.gid, member.uname, member.mtime) for member in members} == {(0, 0, "", 0)}
    assert [member.mode for member in members] == [0o755, 0o644, 0o644, 0o644]


def test_pack_is_read_by_tar(tmp_path):
    """The tar of the system unpacks what was packed, without a warning."""
    files = {"config.pbtxt": b"x", f"1/{'n' * 150}.bin": os.urandom(10_000), "1/ünïcode": b"u", "empty": b""}
    pack(tree(tmp_path / "m", files), tmp_path / "m.tar.gz", level=3)
    (tmp_path / "out").mkdir()
    ended = subprocess.run(
        ["tar", "xzf", str(tmp_path / "m.tar.gz"), "-C", str(tmp_path / "out")], check=True, capture_output=True
    )

    assert ended.stderr == b""
    assert content(tmp_path / "out") == content(tmp_path / "m")


def test_pack_tells_its_progress(tmp_path):
    """Progress adds up to the bytes of the files, in more than one step for a large one."""
    steps = []
    directory = tree(tmp_path / "m", {"a": bytes(5_000_000), "b": b"xy"})
    pack(directory, tmp_path / "m.tar.gz", progress=steps.append)

    assert sum(steps) == 5_000_002
    assert len(steps) > 3


def test_pack_refuses_links(tmp_path):
    """A link is refused by its name, since SageMaker refuses the archive, and the old archive stays."""
    directory = tree(tmp_path / "m", {"1/model.onnx": b"x"})
    (directory / "1" / "weights").symlink_to(directory / "1" / "model.onnx")
    (tmp_path / "m.tar.gz").write_bytes(b"old")
    with pytest.raises(MmeError, match="weights' is a link") as caught:
        pack(directory, tmp_path / "m.tar.gz")

    assert caught.value.kind is Kind.INVALID_MODEL
    assert (tmp_path / "m.tar.gz").read_bytes() == b"old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m", "m.tar.gz"]


def test_pack_refuses_special_files(tmp_path):
    """A named pipe is refused instead of read."""
    directory = tree(tmp_path / "m", {"a": b""})
    os.mkfifo(directory / "pipe")

    with pytest.raises(MmeError, match="neither a file nor a directory"):
        pack(directory, tmp_path / "m.tar.gz")


def test_pack_refuses_wrong_arguments(tmp_path):
    """A missing directory, a level that igzip lacks, an output inside the input, and an empty directory are named."""
    directory = tree(tmp_path / "m", {"a": b""})
    (tmp_path / "empty" / "1").mkdir(parents=True)
    for arguments, words in (
        ((tmp_path / "nope", tmp_path / "o"), "not a directory"),
        ((directory, directory / "o.tar.gz"), "lies inside"),
        ((tmp_path / "empty", tmp_path / "o"), "holds no files"),
    ):
        with pytest.raises(MmeError, match=words):
            pack(*arguments)
    with pytest.raises(MmeError, match="level 9"):
        pack(directory, tmp_path / "o", level=9)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "m"]


def test_pack_that_fails_leaves_nothing(tmp_path):
    """An archive that could not be finished does not appear."""
    directory = tree(tmp_path / "m", {"a": bytes(3_000_000)})

    def stop(_size):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pack(directory, tmp_path / "m.tar.gz", progress=stop)
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


NAMES = st.text(string.ascii_letters + "é-_. ", min_size=1, max_size=30).filter(
    lambda name: name.strip(".") and not name.startswith("._") and name not in (".DS_Store", "__MACOSX")
)


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(
    files=st.dictionaries(
        st.lists(NAMES, min_size=1, max_size=3).map(
            lambda parts: "/".join(f"{i}{p}" for i, p in enumerate(parts[:-1])) + f"/f{parts[-1]}"
        ),
        st.binary(max_size=2000) | st.integers(0, 2_000_000).map(bytes),
        min_size=1,
        max_size=5,
    ),
    level=st.integers(0, 3),
)
def test_what_was_packed_is_unpacked(tmp_path_factory, files, level):
    """Packing and unpacking give back every file and directory with its bytes."""
    directory = tmp_path_factory.mktemp("round")
    tree(directory / "in", {name.lstrip("/"): data for name, data in files.items()})
    pack(directory / "in", directory / "m.tar.gz", level=level)
    with (directory / "m.tar.gz").open("rb") as stream:
        written = extract(stream, directory / "out", name="m.tar.gz")

    assert content(directory / "out") == content(directory / "in")
    assert written == sum(map(len, files.values()))
