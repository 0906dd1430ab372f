"""What becomes of packed environments: everything in its place, or a sentence, and nothing ever outside."""

import errno
import gzip
import os
import shutil
import stat
import tarfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from model_handlers import environment_cache as cache
from model_handlers.environment_cache import unpack
from model_handlers.errors import Kind, MmeError
from model_handlers.system.threads import NEVER, CancelToken

SUBJECT = "model 'm': its environment /e.tar.gz"


@pytest.fixture
def root(tmp_path):
    """The folder to unpack into, beside one that nobody may write to."""
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside/secret").write_text("kept")
    (tmp_path / "root").mkdir()
    return tmp_path / "root"


@pytest.fixture
def unpacked(root):
    """Unpacks bytes."""

    def unpacked(data, token=NEVER):
        (root.parent / "e.tar.gz").write_bytes(data)
        unpack(root.parent / "e.tar.gz", root, SUBJECT, token)
        return root

    return unpacked


def names(folder):
    """What lies in a folder."""
    return sorted(path.name for path in folder.iterdir())


def refused(unpacked, data):
    """The sentence behind the subject."""
    with pytest.raises(MmeError) as raised:
        unpacked(data)
    assert raised.value.kind is Kind.INVALID_MODEL
    assert raised.value.message.startswith(f"{SUBJECT} ")
    return raised.value.message.removeprefix(f"{SUBJECT} ")


def test_files_folders_and_links_come_out_as_they_were(unpacked, archives):
    """Contents, rights to execute, and times to the second, which compiled Python files are compared by."""
    root = unpacked(
        archives.packed(
            archives.member("./", type=tarfile.DIRTYPE),
            archives.member("bin/tool", b"#!", mode=0o777, mtime=1_500_000_000),
            archives.member("lib/a.py", b"x = 1", mode=0o600, mtime=1_234_567_890),
            archives.member("empty", type=tarfile.DIRTYPE),
            archives.link("lib64", "lib"),
            archives.link("lib/b.py", "a.py"),
            archives.link("lib/up", "../bin/tool"),
            archives.link("lib/dangling", "nowhere"),
            archives.link("here", "."),
            archives.hard_link("lib/c.py", "lib/a.py"),
        )
    )

    assert (root / "lib64/b.py").read_text() == "x = 1"
    assert (root / "lib/up").read_text() == "#!"
    assert (root / "empty").is_dir()
    assert (root / "lib/c.py").samefile(root / "lib/a.py")
    assert not (root / "lib/dangling").exists()
    assert stat.S_IMODE((root / "bin/tool").stat().st_mode) == 0o755
    assert stat.S_IMODE((root / "lib/a.py").stat().st_mode) == 0o644
    assert (root / "lib/a.py").stat().st_mtime == 1_234_567_890


@pytest.mark.parametrize("to", ["/usr/bin/python3.11", "../../python3.11", "/nowhere"])
@pytest.mark.parametrize("name", ["python", "python3", "python3.12"])
def test_the_interpreter_may_be_a_link_out_of_it(unpacked, archives, name, to):
    """A venv names the Python that it was made of by such a link, and its other names by links to that one."""
    root = unpacked(archives.packed(archives.link(f"bin/{name}", to), archives.link("bin/python3.9", name)))

    assert (root / "bin" / name).readlink() == Path(to)


@pytest.mark.parametrize(
    ("name", "to"),
    [
        ("etc", "/etc"),
        ("lib/x", "../../outside/secret"),
        ("x", ".."),
        ("x", "../root beside"),
        ("bin/pip", "/usr/bin/pip"),
        ("lib/python", "/usr/bin/python"),
        ("bin/python3.11-config", "/usr/bin/python3.11-config"),
        ("bin/pythonX", "/usr/bin/python"),
    ],
)
def test_no_other_link_may_lead_out_of_it(unpacked, archives, name, to):
    """The sentence names the link and where it leads."""
    told = refused(unpacked, archives.packed(archives.link(name, to)))

    assert told == f"has a link '{name}' to '{to}', which leads out of it"


def test_a_link_may_not_lead_out_by_way_of_another(unpacked, archives):
    """`..` behind a link is not what it looks like."""
    members = [archives.link("a/b/up", "../.."), archives.link("out", "a/b/up/../outside")]

    assert "has a link 'out' to 'a/b/up/../outside', which leads out of it" in refused(
        unpacked, archives.packed(*members)
    )


@pytest.mark.parametrize("order", [slice(None), slice(None, None, -1)], ids=["link first", "file first"])
def test_nothing_is_written_through_a_link(unpacked, archives, root, order):
    """A member below a link to another place is refused, whichever comes first, and that place stays as it was."""
    members = [archives.link("d", "../outside"), archives.member("d/secret", b"stolen")]
    refused(unpacked, archives.packed(*members[order]))

    assert (root.parent / "outside/secret").read_text() == "kept"
    assert names(root.parent / "outside") == ["secret"]


@pytest.mark.parametrize(
    ("member", "words"),
    [
        (("member", "/etc/x", b"x"), "has a path that leaves it, '/etc/x'"),
        (("member", "a/../../x", b"x"), "has a path that leaves it, 'a/../../x'"),
        (("link", "../x", "y"), "has a path that leaves it, '../x'"),
        (("hard_link", "x", "/etc/passwd"), "has a path that leaves it, '/etc/passwd'"),
        (("hard_link", "x", "../outside/secret"), "has a path that leaves it"),
        (("hard_link", "x", "y"), "has a hard link 'x' to 'y', which is no file before it"),
        (("link", "a" * 300, "b"), "has a name that can't be written: "),
        (("link", "x", ""), "has a name that can't be written: "),
    ],
)
def test_paths_stay_inside(unpacked, archives, member, words):
    """Absolute ones, those with `..`, and links to what is not there."""
    kind, *rest = member

    assert words in refused(unpacked, archives.packed(getattr(archives, kind)(*rest), format=tarfile.PAX_FORMAT))


@pytest.mark.parametrize("record", ["path", "linkpath"])
def test_a_name_that_holds_a_zero_is_refused(unpacked, archives, record):
    """As one that is too long is: no file system has it, but the header may."""
    member = archives.link("x", "y", pax_headers={record: "a\0b"})

    assert "has a name that can't be written" in refused(unpacked, archives.packed(member, format=tarfile.PAX_FORMAT))


@pytest.mark.parametrize(
    ("type", "words"),
    [
        (tarfile.CHRTYPE, "has a device, 'x': pack files, folders and links only"),
        (tarfile.BLKTYPE, "has a device"),
        (tarfile.FIFOTYPE, "has a named pipe"),
        (tarfile.GNUTYPE_SPARSE, "has a sparse file"),
        (b"Z", "a member of type b'Z'"),
    ],
)
def test_nothing_but_files_folders_and_links_is_made(unpacked, archives, root, type, words):  # noqa: A002
    """Whatever else a tar can hold is refused by its name."""
    data = archives.tar(archives.member("x"))
    header = archives.member("x", type=type)[0].tobuf(tarfile.USTAR_FORMAT)
    told = refused(unpacked, gzip.compress(header + data[512:]))

    assert words in told
    assert names(root) == []


@pytest.mark.parametrize(
    "names", [("a", "a"), ("a", "a/b"), ("a/b", "a")], ids=["twice", "file then folder", "folder then file"]
)
def test_no_member_comes_over_another(unpacked, archives, names):
    """Which of the two would count is nobody's to guess."""
    told = refused(unpacked, archives.packed(*((name, b"x") for name in names)))

    assert told.startswith(("has 'a' twice", "has 'a' both as a file and as a directory"))


def broken(archives, what):
    """An archive that is none, by what is wrong with it."""
    data = archives.packed(("a", os.urandom(5000)), ("b", b"x" * 100))
    tar = archives.tar(("a", b"x" * 1000), ("b", b"y" * 100))
    second = 512 + 1024  # where the second header is
    return {
        "empty": b"",
        "a tar": tar,
        "text": b"nothing of the kind",
        "no tar inside": gzip.compress(b"nothing of the kind" * 100),
        "nothing inside": gzip.compress(b""),
        "cut in gzip": data[: len(data) // 2],
        "cut before its checksum": data[:-8],
        "flipped": data[:3000] + bytes([data[3000] ^ 255]) + data[3001:],
        "wrong checksum": data[:-8] + bytes(4) + data[-4:],
        "cut in a member": gzip.compress(tar[:1000]),
        "cut in a header": gzip.compress(tar[: second + 100]),
        "cut between members": gzip.compress(tar[:second]),
        "bad header": gzip.compress(tar[:second] + b"x" * 512 + tar[second + 512 :]),
        "two tars": gzip.compress(tar * 2),
        "huge claim": gzip.compress(archives.member("x", size=1 << 40)[0].tobuf(tarfile.GNU_FORMAT)),
        "huge header": gzip.compress(archives.member("x", size=1 << 33, type=b"x")[0].tobuf(tarfile.GNU_FORMAT)),
    }[what]


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("empty", "is empty: a .tar.gz file is expected"),
        ("a tar", "is a tar file that is not compressed: gzip it"),
        ("text", "is not a gzip file"),
        ("no tar inside", "holds no tar archive inside its gzip data: pack the directory with conda-pack or venv-pack"),
        ("nothing inside", "holds no files: its gzip data is empty"),
        ("cut in gzip", "is truncated: its gzip data ends early"),
        ("cut before its checksum", "is truncated: its gzip data ends early"),
        ("flipped", "is corrupt: "),
        ("wrong checksum", "is corrupt: "),
        ("cut in a member", "is truncated: its tar ends inside a member"),
        ("cut in a header", "is truncated: its tar has no end"),
        ("cut between members", "is truncated: its tar has no end"),
        ("bad header", "has a corrupt tar header behind member 1"),
        ("two tars", "has trailing garbage behind its tar data; pack it again"),
        ("huge claim", "claims 1099511627776 bytes for member 'x', more than its"),
        ("huge header", "has a tar header of more than 1048576 bytes"),
    ],
)
def test_what_is_no_archive_is_refused(unpacked, archives, what, words):
    """Cut, flipped or of another kind: it never passes for a smaller environment."""
    assert refused(unpacked, broken(archives, what)).startswith(words)


@given(data=st.data())
@settings(
    deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
def test_a_damaged_archive_is_unpacked_or_refused(archives, tmp_path_factory, data):
    """Whatever is flipped or cut, nothing but a sentence comes out, and nothing lands outside."""
    folder = tmp_path_factory.mktemp("damaged")
    (folder / "root").mkdir()
    tar = bytearray(
        archives.tar(archives.member("d/a", b"x" * 700), archives.link("d/l", "a"), archives.hard_link("h", "d/a"))
    )
    for _ in range(data.draw(st.integers(1, 4))):
        tar[data.draw(st.integers(0, len(tar) - 1))] = data.draw(st.integers(0, 255))
    packed = gzip.compress(bytes(tar[: data.draw(st.integers(len(tar) // 2, len(tar)))]), 1)
    (folder / "e.tar.gz").write_bytes(packed)
    try:
        unpack(folder / "e.tar.gz", folder / "root", SUBJECT, NEVER)
    except MmeError as error:
        kind = error.kind
    else:
        kind = None
    assert kind in {None, Kind.INVALID_MODEL}
    assert names(folder) == ["e.tar.gz", "root"]
    shutil.rmtree(folder)


def test_a_full_disk_is_noticed_before_it_is_full(unpacked, archives, monkeypatch):
    """A bomb is met by its claim; the last of the disk is for others."""
    written = cache.shutil.disk_usage

    def nearly_full(path):
        usage = written(path)
        return type(usage)(usage.total, usage.used, (1 << 30) + 1000)

    monkeypatch.setattr(cache.shutil, "disk_usage", nearly_full)
    with pytest.raises(OSError, match="No space left") as raised:
        unpacked(archives.packed(("small", b"x" * 1000), ("large", b"x" * 1001)))

    assert raised.value.errno == errno.ENOSPC


def test_members_are_counted(unpacked, archives, monkeypatch):
    """Millions of empty files would fit on any disk."""
    monkeypatch.setattr(cache, "_MOST_MEMBERS", 3)
    told = refused(unpacked, archives.packed(*((str(number), b"") for number in range(4))))

    assert told == "has more than 3 members, the limit"


def test_who_waits_may_stop_it(unpacked, archives):
    """It is asked with every file, and with every megabyte of a large one."""
    asked = []

    def cancelled():
        asked.append(1)
        return len(asked) == 4

    with pytest.raises(MmeError, match="the load of a model was cancelled"):
        unpacked(archives.packed(("a", b""), ("b", b"x" * (4 << 20))), CancelToken(cancelled=cancelled))
