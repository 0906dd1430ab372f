"""Archives are downloaded once per etag, by one thread, and found again."""

import gc
import os
import threading
import weakref

import pytest

from model_handlers.errors import Kind, MmeError
from model_handlers.system.threads import CancelToken
from serve.sources.archive import ExtractLimits
from serve.sources.artifacts import Artifacts
from serve.sources.s3 import S3Store
from serve.sources.store import LocalStore, UnreachableError

pytestmark = pytest.mark.usefixtures("no_leaks")


class Counting:
    """A store that counts what is opened, and may hold an open back."""

    def __init__(self, store):
        self.store = store
        self.opened = 0
        self.stats = []
        self.away = lambda _name: None  # raises what a question for that name ends with
        self.asked = threading.Event()
        self.go = threading.Event()
        self.go.set()

    @property
    def uri(self):
        """That of the real one."""
        return self.store.uri

    def stat(self, name, *_, **__):
        """Ask the real one, unless it is away."""
        self.stats.append(name)
        self.away(name)
        return self.store.stat(name)

    def open(self, obj):
        """Count, wait for permission, open."""
        self.opened += 1
        self.asked.set()
        self.go.wait()
        return self.store.open(obj)


@pytest.fixture
def store(tmp_path, targz_bytes):
    """A folder with an archive `a.tar.gz`."""
    folder = tmp_path / "store"
    folder.mkdir()
    (folder / "a.tar.gz").write_bytes(targz_bytes(("1/model.onnx", b"first" * 1000)))
    return Counting(LocalStore(folder))


@pytest.fixture
def replace(tmp_path, targz_bytes):
    """Put another archive in the place of `a.tar.gz`."""

    def put(content):
        new = tmp_path / "new"
        new.write_bytes(targz_bytes(("1/model.onnx", content)))
        new.replace(tmp_path / "store" / "a.tar.gz")

    return put


def names(artifacts):
    """The directories on disk."""
    return sorted(path.name for path in artifacts.directory.iterdir() if path.name not in {".locks", ".sums"})


def test_known_etag_is_not_fetched_again(store, tmp_path):
    """The second fetch finds the directory, and so does a later run."""
    artifacts = Artifacts(store, tmp_path / "disk")
    first = artifacts.fetch("a.tar.gz")
    second = artifacts.fetch("a.tar.gz")
    later = Artifacts(store, tmp_path / "disk").fetch("a.tar.gz")

    assert (first.path / "1" / "model.onnx").read_bytes() == b"first" * 1000
    assert (first.downloaded, first.name) == (True, "a.tar.gz")
    assert first.seconds > 0
    assert (second.downloaded, second.seconds) == (False, 0.0)
    assert second.path == first.path == later.path
    assert second.identity == first.identity == first.path.name[-16:]
    assert not later.downloaded
    assert store.opened == 1


def test_new_etag_is_fetched_beside_the_old(store, replace, tmp_path):
    """A replaced archive is unpacked beside the old one, whose files are in use, until nobody holds it."""
    artifacts = Artifacts(store, tmp_path / "disk")
    old = artifacts.fetch("a.tar.gz")
    replace(b"second")
    new = artifacts.fetch("a.tar.gz")

    assert (old.path / "1" / "model.onnx").read_bytes() == b"first" * 1000
    assert (new.path / "1" / "model.onnx").read_bytes() == b"second"
    new.hold.release()
    artifacts.discard("a.tar.gz")
    assert names(artifacts) == [old.path.name]
    old.hold.release()
    artifacts.discard("a.tar.gz")
    assert names(artifacts) == []
    artifacts.discard("a.tar.gz")
    assert artifacts.fetch("a.tar.gz").downloaded


def test_discard_leaves_other_models(store, tmp_path, targz_bytes):
    """Only the named archive goes, not one whose name begins alike, nor one of another store."""
    (tmp_path / "store" / "a.tar.gz2").write_bytes(targz_bytes(("x", b"")))
    other = tmp_path / "other"
    other.mkdir()
    (other / "a.tar.gz").write_bytes(targz_bytes(("x", b"")))
    artifacts = Artifacts(store, tmp_path / "disk")
    elsewhere = Artifacts(LocalStore(other), tmp_path / "disk")
    for artifact in (artifacts.fetch("a.tar.gz"), artifacts.fetch("a.tar.gz2"), elsewhere.fetch("a.tar.gz")):
        assert artifact.downloaded
        artifact.hold.release()
    artifacts.discard("a.tar.gz")

    assert len(names(artifacts)) == 2
    assert not artifacts.fetch("a.tar.gz2").downloaded
    assert not elsewhere.fetch("a.tar.gz").downloaded


def test_fetched_at_once_is_downloaded_once(store, tmp_path):
    """Threads that want the same archive share one download; all get the same directory."""
    artifacts = Artifacts(store, tmp_path / "disk")
    store.go.clear()
    found = []
    threads = [threading.Thread(target=lambda: found.append(artifacts.fetch("a.tar.gz"))) for _ in range(8)]
    for thread in threads:
        thread.start()
    store.asked.wait()
    store.go.set()
    for thread in threads:
        thread.join()

    assert store.opened == 1
    assert len({artifact.path for artifact in found}) == 1
    assert sorted(artifact.downloaded for artifact in found) == [False] * 7 + [True]
    assert artifacts.busy == 0


def test_names_do_not_wait_for_each_other(store, tmp_path, targz_bytes):
    """While one archive is downloading, another one is fetched."""
    (tmp_path / "store" / "b.tar.gz").write_bytes(targz_bytes(("x", b"")))
    artifacts = Artifacts(store, tmp_path / "disk")
    store.go.clear()
    slow = threading.Thread(target=artifacts.fetch, args=("a.tar.gz",))
    slow.start()
    store.asked.wait()
    store.go, held = threading.Event(), store.go
    store.go.set()
    other = artifacts.fetch("b.tar.gz")
    held.set()
    slow.join()

    assert other.downloaded
    assert len(names(artifacts)) == 2


def test_waiter_can_leave(store, tmp_path):
    """A thread that waits for another one's download leaves when its own client has left."""
    artifacts = Artifacts(store, tmp_path / "disk")
    store.go.clear()
    slow = threading.Thread(target=artifacts.fetch, args=("a.tar.gz",))
    slow.start()
    store.asked.wait()
    with pytest.raises(MmeError) as caught:
        artifacts.fetch("a.tar.gz", token=CancelToken(cancelled=lambda: True))
    store.go.set()
    slow.join()

    assert caught.value.kind is Kind.CANCELLED
    assert len(names(artifacts)) == 1


def test_failed_fetch_leaves_nothing(store, tmp_path):
    """A refused archive leaves no directory, and the next fetch tries again."""
    path = tmp_path / "store" / "a.tar.gz"
    good = path.read_bytes()
    path.write_bytes(good[:-100])
    artifacts = Artifacts(store, tmp_path / "disk")
    with pytest.raises(MmeError, match="truncated"):
        artifacts.fetch("a.tar.gz")
    assert names(artifacts) == []
    path.write_bytes(good)

    assert artifacts.fetch("a.tar.gz").downloaded


def test_why_an_archive_was_condemned_is_remembered_without_its_error(store, tmp_path):
    """It is refused with the sentence; what the load had in hand, which the error's traceback holds, is let go."""
    artifacts = Artifacts(store, tmp_path / "disk")
    artifacts.fetch("a.tar.gz").hold.release()

    def load():
        weights = Counting(None)  # as a framework's loader holds a file's bytes
        made.append(weakref.ref(weights))
        raise MmeError(Kind.INVALID_MODEL, "no such graph")

    made = []
    try:
        load()
    except MmeError as error:
        artifacts.quarantine("a.tar.gz", error)

    with pytest.raises(MmeError, match=r"no such graph .so it was found within the last 60 s"):
        artifacts.fetch("a.tar.gz")
    gc.collect()
    assert made[0]() is None


def truncated(file):
    """The end of it is missing."""
    file.write_bytes(file.read_bytes()[:100])


def zeroed(file):
    """As long as it was, and zeros."""
    file.write_bytes(bytes(file.stat().st_size))


def flipped(file):
    """One bit is another; no time tells."""
    status, content = file.stat(), bytearray(file.read_bytes())
    content[1000] ^= 1
    file.write_bytes(content)
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))


@pytest.mark.parametrize("damage", [truncated, zeroed, flipped, os.unlink])
@pytest.mark.parametrize("restarted", [False, True], ids=["", "after a start"])
def test_a_damaged_copy_is_fetched_again(store, tmp_path, caplog, damage, restarted):
    """Once, at once, with one warning; what is whole is not fetched again."""
    artifacts = Artifacts(store, tmp_path / "disk")
    first = artifacts.fetch("a.tar.gz")
    first.hold.release()
    damage(first.path / "1" / "model.onnx")
    artifacts = Artifacts(store, tmp_path / "disk") if restarted else artifacts
    again = artifacts.fetch("a.tar.gz")

    assert again.downloaded
    assert again.path == first.path
    assert (again.path / "1" / "model.onnx").read_bytes() == b"first" * 1000
    assert [record.message for record in caplog.records if "1/model.onnx" in record.message] != []
    assert not artifacts.fetch("a.tar.gz").downloaded
    assert store.opened == 2
    assert len(caplog.records) == 1


def test_a_damaged_copy_that_is_in_use_is_told(store, tmp_path):
    """Another server may read its files yet: it stays, and nothing is loaded from it."""
    used = Artifacts(store, tmp_path / "disk").fetch("a.tar.gz")
    zeroed(used.path / "1" / "model.onnx")
    with pytest.raises(MmeError, match=r"on disk is damaged \(1/model.onnx has other bytes") as caught:
        Artifacts(store, tmp_path / "disk").fetch("a.tar.gz")

    assert caught.value.kind is Kind.UNAVAILABLE
    assert used.path.is_dir()
    used.hold.release()


@pytest.mark.parametrize("torn", [False, True], ids=["none", "torn"])
def test_a_copy_without_checksums_is_fetched_again(store, tmp_path, torn):
    """An older version wrote it, or the machine went down; whether it is whole can't be told."""
    artifact = Artifacts(store, tmp_path / "disk").fetch("a.tar.gz")
    artifact.hold.release()
    sums = tmp_path / "disk" / ".sums" / artifact.path.name
    if torn:
        sums.write_bytes(sums.read_bytes()[:20])
    else:
        sums.unlink()

    assert Artifacts(store, tmp_path / "disk").fetch("a.tar.gz").downloaded


def test_a_copy_that_an_older_version_uses_is_used(store, tmp_path):
    """It can't be removed, and need not be damaged."""
    used = Artifacts(store, tmp_path / "disk").fetch("a.tar.gz")
    (tmp_path / "disk" / ".sums" / used.path.name).unlink()
    artifact = Artifacts(store, tmp_path / "disk").fetch("a.tar.gz")

    assert not artifact.downloaded
    used.hold.release()
    artifact.hold.release()


def test_checksums_go_with_their_copies(store, tmp_path):
    """Those of copies that are gone go at the next start, but for what another server may have just begun."""
    artifacts = Artifacts(store, tmp_path / "disk")
    artifacts.fetch("a.tar.gz").hold.release()
    sums = tmp_path / "disk" / ".sums"
    (name,) = (path.name for path in sums.iterdir())
    artifacts.discard("a.tar.gz")
    assert list(sums.iterdir()) == []
    (sums / name).touch()
    Artifacts(store, tmp_path / "disk")
    assert [path.name for path in sums.iterdir()] == [name]
    os.utime(sums / name, (0, 0))
    Artifacts(store, tmp_path / "disk")
    assert list(sums.iterdir()) == []


def test_only_one_asks_whether_the_store_is_back(store, tmp_path, targz_bytes):
    """Where it can't be connected to, no name need try: while one load waits for it, others are served from disk."""
    now = [1000.0]
    (tmp_path / "store" / "b.tar.gz").write_bytes(targz_bytes(("x", b"")))
    artifacts = Artifacts(store, tmp_path / "disk", clock=lambda: now[0])
    artifacts.fetch("a.tar.gz").hold.release()
    artifacts.fetch("b.tar.gz").hold.release()

    def away(name):
        if name == "a.tar.gz" and now[0] > 2000:
            other = artifacts.fetch("b.tar.gz")
            other.hold.release()
            assert not other.downloaded
        raise UnreachableError("no connection")

    store.away = away
    store.stats.clear()
    for seconds in (1000.0, 3000.0):
        now[0] = seconds
        artifacts.fetch("a.tar.gz").hold.release()
    artifacts.fetch("b.tar.gz").hold.release()
    assert store.stats == ["a.tar.gz", "a.tar.gz"]
    store.away = lambda _name: None
    now[0] = 4000.0
    artifacts.fetch("b.tar.gz").hold.release()
    artifacts.fetch("a.tar.gz").hold.release()
    assert store.stats[2:] == ["b.tar.gz", "a.tar.gz"]


def test_a_use_that_is_noted_late_is_no_error(store, tmp_path, monkeypatch):
    """A start notes when models were used last; meanwhile another server may remove what it found of one."""
    artifacts = Artifacts(store, tmp_path / "disk")
    fetched = artifacts.fetch("a.tar.gz")
    fetched.hold.release()
    os.utime(fetched.path, (10, 10))
    artifacts.used("a.tar.gz", 9.0)
    assert fetched.path.stat().st_mtime == 10
    artifacts.used("a.tar.gz", 20.0)
    assert fetched.path.stat().st_mtime == 20
    monkeypatch.setattr(artifacts, "copies", lambda _: [tmp_path / "disk" / "left"])

    artifacts.used("a.tar.gz", 30.0)


def test_limits_are_passed_on(store, tmp_path):
    """What an archive may unpack to is the operator's to say."""
    artifacts = Artifacts(store, tmp_path / "disk", ExtractLimits(max_bytes=4999))

    with pytest.raises(MmeError, match="more than 4999 bytes"):
        artifacts.fetch("a.tar.gz")


def test_unknown_and_bad_names(store, tmp_path):
    """An unknown archive and a name that leads outside are refused alike: nothing on disk, no lock kept."""
    artifacts = Artifacts(store, tmp_path / "disk")
    for name, kind in (("b.tar.gz", Kind.UNKNOWN_MODEL), ("../a.tar.gz", Kind.INVALID_ARGUMENT)):
        with pytest.raises(MmeError) as caught:
            artifacts.fetch(name)
        assert caught.value.kind is kind
    assert names(artifacts) == []
    assert artifacts.busy == 0


def test_staging_of_a_crashed_run_is_removed(store, tmp_path):
    """What a crashed run had half unpacked goes at the next start; what it had finished stays."""
    artifact = Artifacts(store, tmp_path / "disk").fetch("a.tar.gz")
    left = tmp_path / "disk" / ".staging-x" / "1"
    left.mkdir(parents=True)
    (left / "model.onnx").write_bytes(b"half")
    artifacts = Artifacts(store, tmp_path / "disk")

    assert names(artifacts) == [artifact.path.name]


def test_directory_that_cannot_be_made(store, tmp_path):
    """A place that cannot hold directories is refused at the start, by its name."""
    (tmp_path / "file").touch()

    with pytest.raises(MmeError, match="file/disk cannot hold unpacked models"):
        Artifacts(store, tmp_path / "file" / "disk")


@pytest.fixture
def s3_artifacts(s3_bucket, s3_client, tmp_path, targz_bytes):
    """An archive of 20 parts in S3, and the tier for it."""
    data = targz_bytes(("config.pbtxt", b"x"), ("1/model.onnx", os.urandom(2_000_000)))
    s3_client.put_object(Bucket=s3_bucket, Key="models/t/a.tar.gz", Body=data)
    artifacts = Artifacts(S3Store(s3_bucket, "models", part_size=100_000, parts_ahead=3), tmp_path / "disk")
    yield artifacts
    artifacts.room.close()


def test_from_s3(s3_artifacts):
    """An archive comes out of S3 in parts, onto the disk as files."""
    artifact = s3_artifacts.fetch("t/a.tar.gz")

    assert (artifact.path / "config.pbtxt").read_bytes() == b"x"
    assert (artifact.path / "1" / "model.onnx").stat().st_size == 2_000_000
    assert not s3_artifacts.fetch("t/a.tar.gz").downloaded


def test_cancelled_in_the_middle_of_s3(s3_artifacts):
    """A client that leaves while the archive arrives leaves nothing behind: no directory, no thread."""
    directory = s3_artifacts.directory

    def model_is_being_written():
        return any(path.stat().st_size for path in directory.glob(".staging-*/1/model.onnx"))

    with pytest.raises(MmeError) as caught:
        s3_artifacts.fetch("t/a.tar.gz", token=CancelToken(cancelled=model_is_being_written))

    assert caught.value.kind is Kind.CANCELLED
    assert names(s3_artifacts) == []
    assert s3_artifacts.fetch("t/a.tar.gz").downloaded


@pytest.mark.parametrize("times", [1, 3])
def test_replaced_in_s3_while_downloading(s3_artifacts, s3_client, s3_bucket, targz_bytes, times):
    """What an archive is replaced with while it arrives is fetched, whole; who replaces it again and again is told so."""
    seen = set()

    def replace():
        begun = set(s3_artifacts.directory.glob(".staging-*/config.pbtxt")) - seen
        if begun and len(seen) < times:
            seen.update(begun)
            content = targz_bytes(("config.pbtxt", b"%d" % len(seen)), ("1/model.onnx", os.urandom(2_000_000)))
            s3_client.put_object(Bucket=s3_bucket, Key="models/t/a.tar.gz", Body=content)
        return False

    if times > 1:
        with pytest.raises(MmeError, match="replaced while it was downloaded") as caught:
            s3_artifacts.fetch("t/a.tar.gz", token=CancelToken(cancelled=replace))
        assert caught.value.kind is Kind.UNAVAILABLE
        assert names(s3_artifacts) == []
    fetched = s3_artifacts.fetch("t/a.tar.gz", token=CancelToken(cancelled=replace))
    assert fetched.downloaded
    assert (fetched.path / "config.pbtxt").read_bytes() == b"%d" % times
    assert names(s3_artifacts) == [fetched.path.name]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory to somebody else")
def test_directory_that_another_user_made_in_a_shared_folder(store, tmp_path):
    """A directory that somebody else may have filled beforehand is refused, since models would come from it."""
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    (shared / "cache").mkdir()
    os.chown(shared / "cache", 12345, 12345)

    with pytest.raises(MmeError) as refused:
        Artifacts(store, shared / "cache")

    assert refused.value.kind is Kind.INVALID_ARGUMENT
    assert "MME_CACHE_DIR" in refused.value.message


def test_directory_is_for_us_alone(store, tmp_path):
    """Nobody else reads unpacked models."""
    Artifacts(store, tmp_path / "cache")

    assert (tmp_path / "cache").stat().st_mode & 0o077 == 0
