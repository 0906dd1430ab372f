"""Archives share a byte budget on disk: who was used longest ago leaves, whoever is in use stays."""

import errno
import os
import random
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model_handlers.errors import Kind, MmeError
from model_handlers.system.threads import NEVER
from serve.sources.archive import pack
from serve.sources.artifacts import Artifacts
from serve.sources.disk_budget import ByteLocks, DiskBudget
from serve.sources.store import LocalStore

pytestmark = pytest.mark.usefixtures("no_leaks")

SIZE = 100_000  # of each archive's content


@pytest.fixture
def store(tmp_path, targz_bytes):
    """A folder with the archives a.tar.gz to f.tar.gz, which hardly compress."""
    folder = tmp_path / "store"
    folder.mkdir()
    for name in "abcdef":
        content = random.Random(name).randbytes(SIZE // 2)
        (folder / f"{name}.tar.gz").write_bytes(targz_bytes(("1/model.onnx", content), ("1/more", content)))
    return LocalStore(folder)


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    """The same store, for all tests."""
    folder = tmp_path_factory.mktemp("packed")
    for name in "abcdef":
        source = tmp_path_factory.mktemp(name)
        (source / "1").mkdir()
        for file in ("model.onnx", "more"):
            (source / "1" / file).write_bytes(bytes(SIZE // 2))
        pack(source, folder / f"{name}.tar.gz")
    return LocalStore(folder)


class Tier:
    """A disk tier of so many archives, and what is said about it.

    Attributes:
        asked: for whom somebody in memory was asked to go.
        goes: called then.
    """

    def __init__(self, store, folder, archives, **options):
        self.asked = []
        self.goes = lambda: False
        budget = int(archives * SIZE) if archives is not None else None
        self.artifacts = Artifacts(store, folder / "disk", budget=budget, evict=self._let_go, **options)
        self.room = self.artifacts.room
        self.holds = {}
        self.clock = 0

    def _let_go(self, name):
        self.asked.append(name)
        return self.goes()

    def fetch(self, name, *, hold=False):
        """Whether the archive had to be downloaded. Its last use is later than that of all before."""
        artifact = self.artifacts.fetch(f"{name}.tar.gz")
        if hold:
            self.holds[name] = artifact.hold
        else:
            artifact.hold.release()
        self.clock += 1
        os.utime(artifact.path, (self.clock, self.clock))
        return artifact.downloaded

    def there(self):
        """The archives on disk, by the letters of their names; complete ones only."""
        found = []
        for name in "abcdef":
            for path in self.artifacts.copies(f"{name}.tar.gz"):
                assert (path / "1" / "more").stat().st_size == SIZE // 2
                found.append(name)
        return "".join(found)

    def audit(self):
        """The books agree with the disk, and nothing is claimed by nobody."""
        assert self.room.used == self.room.archives == len(self.there()) * SIZE
        assert not list(self.artifacts.directory.glob(".staging-*"))


@pytest.fixture
def tier(store, tmp_path):
    """Makes a tier."""
    tiers = []

    def make(archives, **options):
        tiers.append(Tier(store, tmp_path, archives, **options))
        return tiers[-1]

    yield make
    for each in tiers:
        each.room.close()


def test_the_least_recently_used_leaves_and_is_downloaded_again(tier, caplog):
    """Room for three: the one whose last fetch is longest ago goes, with one line in the log, and may come back."""
    disk = tier(3)
    for name in "abc":
        assert disk.fetch(name)
    assert not disk.fetch("a")
    with caplog.at_level("INFO"):
        assert disk.fetch("d")

    assert disk.there() == "acd"
    (line,) = [record for record in caplog.records if record.message.startswith("removed ")]
    assert "for 'd.tar.gz', least recently used, 0.1 MB" in line.message
    assert (line.beneficiary, line.bytes, disk.room.evictions) == ("d.tar.gz", SIZE, 1)
    assert disk.fetch("b")
    assert disk.there() == "abd"
    disk.audit()


def test_what_is_held_stays(tier):
    """An archive that is in memory, or being loaded, is no victim, however long ago it was fetched."""
    disk = tier(3)
    for name in "abc":
        disk.fetch(name, hold=name != "b")
    disk.fetch("d")
    assert disk.there() == "acd"
    disk.holds["a"].release()
    disk.holds["a"].release()  # once is enough
    disk.fetch("e")
    assert "c" in disk.there()
    disk.audit()


def test_the_end_of_a_use_is_a_use(tier):
    """Whoever was in memory until a moment ago was not used longest ago."""
    disk = tier(3)
    disk.fetch("a", hold=True)
    disk.fetch("b")
    disk.fetch("c")
    disk.holds["a"].release()
    disk.fetch("d")

    assert disk.there() == "acd"


def test_a_disk_that_takes_no_times_keeps_nobody(tier, monkeypatch):
    """A use begins and ends though it can't be noted when, and what nobody uses any more may leave."""

    def read_only(*_args):
        raise OSError(errno.EROFS, "Read-only file system")

    disk = tier(1)
    disk.fetch("a")
    with monkeypatch.context() as patched:
        patched.setattr(os, "utime", read_only)
        (path,) = disk.artifacts.copies("a.tar.gz")
        disk.room.hold(path).release()
    disk.fetch("b")
    assert disk.there() == "b"
    disk.audit()


def test_when_all_is_in_memory_somebody_there_is_asked_to_go(tier):
    """With everything held, models leave memory one by one until there is room; each frees the archive that it held."""
    disk = tier(2)
    disk.fetch("a", hold=True)
    disk.fetch("b", hold=True)
    disk.goes = lambda: disk.holds["b"].release() or True

    assert disk.fetch("c")
    assert disk.asked == ["c.tar.gz"]
    assert disk.there() == "ac"
    disk.audit()


def test_when_nobody_may_go_it_is_out_of_room(tier):
    """The sentence says what holds the disk and which setting; nothing half is left, and nobody went for it."""
    disk = tier(2)
    disk.fetch("a", hold=True)
    disk.fetch("b", hold=True)
    with pytest.raises(MmeError, match=r"'c.tar.gz' finds no room on disk.*MME_DISK_BUDGET") as caught:
        disk.fetch("c")

    assert caught.value.kind is Kind.OUT_OF_MEMORY
    assert disk.there() == "ab"
    disk.audit()


def test_an_archive_larger_than_the_budget_is_refused(tier):
    """More than the whole budget never fits; who is in memory is not even asked."""
    disk = tier(0.8)
    with pytest.raises(MmeError, match=r"more than the whole disk budget of 0\.1 MB") as caught:
        disk.fetch("a")

    assert caught.value.kind is Kind.OUT_OF_MEMORY
    assert disk.asked == []
    disk.audit()


def test_a_disk_that_is_nearly_full_at_the_start_is_named(store, tmp_path, monkeypatch):
    """Where no budget was set there is none to be raised: it is the disk that has no room."""
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=1000))
    with pytest.raises(MmeError, match=r"0\.0 MB, 80% of what was free on the disk of .*/disk: free some") as caught:
        Tier(store, tmp_path, None).fetch("a")

    assert caught.value.kind is Kind.OUT_OF_MEMORY
    assert "MME_DISK_BUDGET" not in caught.value.message


def test_an_archive_that_is_larger_packed_costs_nobody_his_place(tier, tmp_path):
    """What can be known from the archive's own size is known before anybody leaves."""
    disk = tier(0.2)
    (tmp_path / "disk" / f"{'0' * 24}-{'0' * 16}").mkdir()
    with pytest.raises(MmeError, match="more than the whole disk budget"):
        disk.fetch("a")

    assert (tmp_path / "disk" / f"{'0' * 24}-{'0' * 16}").exists()
    assert disk.room.evictions == 0


def test_a_restart_knows_what_lies_there_and_who_was_used_last(tier):
    """Sizes and last uses are found on disk; what a smaller budget has no room for leaves with the next download."""
    disk = tier(4)
    for name in "abcd":
        disk.fetch(name)
    disk.fetch("a")
    disk.room.close()
    again = tier(3)
    again.clock = 100

    assert again.room.used == 4 * SIZE
    assert again.fetch("e")
    assert again.there() == "ade"


def test_by_default_most_of_what_is_free_is_for_archives(tier, tmp_path):
    """80 % of what is free at the start and of what lies there already; other files are not ours to count."""
    first = tier(None)
    first.fetch("a")
    (tmp_path / "disk" / "footprints.json").write_bytes(bytes(1000))
    second = tier(None)
    free = os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize

    assert second.room.used == SIZE
    assert second.room.budget == pytest.approx(0.8 * free, rel=0.2)


def test_two_servers_on_one_directory_do_not_rob_each_other(tier):
    """What one of them has in memory, the other does not remove; what neither uses counts for both and leaves."""
    one, other = tier(3), tier(3)
    one.fetch("a", hold=True)
    one.fetch("b")
    other.clock = 10
    other.fetch("c")
    other.fetch("d")

    assert other.there() == "acd"
    one.artifacts.discard("d.tar.gz")
    other.artifacts.discard("a.tar.gz")
    assert other.there() == "ac"
    one.holds["a"].release()
    other.artifacts.discard("a.tar.gz")
    assert one.there() == "c"
    one.clock = 20
    assert one.fetch("a")


def test_a_copy_keeps_its_checksums_while_another_server_forgets_those_of_the_one_before(tier, monkeypatch):
    """One removes an archive at the very moment in which the other downloads it again: what appears can be checked."""
    one, other = tier(3), tier(3)
    one.fetch("a")
    forget, again = other.room.sums.forget, threading.Thread(target=one.fetch, args=("a",))

    def late(name):
        again.start()
        again.join(0.1)
        forget(name)

    monkeypatch.setattr(other.room.sums, "forget", late)
    other.artifacts.discard("a.tar.gz")
    again.join()

    assert one.there() == "a"
    assert not tier(3).fetch("a")
    one.audit()


def test_the_directory_is_listed_once_for_any_number_of_fetches_and_evictions(tier, monkeypatch):
    """What lies there is known: neither a download, a use, a removal nor an eviction asks the disk for all of it."""
    disk = tier(3)
    listed, listing = [], Path.iterdir
    monkeypatch.setattr(Path, "iterdir", lambda path: listed.append(path) or listing(path))
    monkeypatch.setattr(Path, "glob", lambda path, _: listed.append(path) or iter(()))
    for name in "abcdefabcd":
        assert disk.artifacts.fetch(f"{name}.tar.gz", NEVER).hold.release() is None
    disk.artifacts.discard("a.tar.gz")

    assert disk.room.evictions == 7
    assert [path for path in listed if path == disk.artifacts.directory] == []


def test_what_a_person_did_is_seen_within_a_minute(tier):
    """Nothing tells of it: whoever has not looked for a minute looks."""
    now = [0.0]
    disk = tier(3, clock=lambda: now[0])
    (disk.artifacts.directory / f"{'0' * 24}-{'0' * 16}").mkdir()
    (disk.artifacts.directory / f"{'0' * 24}-{'0' * 16}" / "file").write_bytes(bytes(SIZE))
    disk.fetch("a")
    assert disk.room.archives == SIZE
    now[0] = 61.0
    disk.fetch("b")
    assert disk.room.archives == 3 * SIZE


def test_another_server_in_the_directory_is_told_from_none(tmp_path):
    """Whoever shares a byte of a file knows whether others do."""
    one, other = ByteLocks(tmp_path / "locks"), ByteLocks(tmp_path / "locks")
    assert one.share(7)
    assert not one.others_have(7)
    assert other.share(7)
    assert one.others_have(7)
    other.close()
    assert not one.others_have(7)
    one.close()


def test_a_directory_that_vanished_is_downloaded_again(tier):
    """Another server, or a person, removed an archive: it is fetched as if it had never been there."""
    disk = tier(3)
    disk.fetch("a")
    (path,) = disk.artifacts.copies("a.tar.gz")
    (path / "1" / "more").unlink()
    (path / "1" / "model.onnx").unlink()
    (path / "1").rmdir()
    path.rmdir()

    assert disk.fetch("a")
    disk.audit()


# -- a disk that is full -----------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path):
    """A file system of its own with room for two archives and a half."""
    folder = tmp_path / "small"
    folder.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={SIZE * 5 // 2}", "none", folder], check=False)
    if made.returncode:
        pytest.skip("no file system can be mounted here")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a file system")
def test_a_full_disk_has_others_leave_whatever_the_budget_says(store, small_disk):
    """Somebody else filled the disk: the least recently used leaves, the download begins again, and is whole."""
    disk = Tier(store, small_disk, 100)
    for name in "abc":
        assert disk.fetch(name)

    assert disk.there() == "bc"
    disk.audit()
    disk.fetch("b", hold=True)
    disk.fetch("c", hold=True)
    with pytest.raises(MmeError, match="the disk is full") as caught:
        disk.fetch("d")
    assert caught.value.kind is Kind.OUT_OF_MEMORY
    assert (disk.asked, disk.there()) == (["d.tar.gz"], "bc")
    disk.goes = lambda: disk.holds["b"].release() or True
    assert disk.fetch("d")
    assert disk.there() == "cd"
    disk.audit()
    disk.room.close()


# -- everything at once ------------------------------------------------------------------------------------------------


@settings(max_examples=25, deadline=None)
@given(
    actions=st.lists(st.tuples(st.sampled_from(["fetch", "fetch", "hold", "release", "discard"]), st.sampled_from("abcdef")), max_size=30),
    archives=st.sampled_from([1, 2.5, 4, 10]),
)  # fmt: skip
def test_any_sequence_keeps_the_budget(tmp_path_factory, packed, actions, archives):
    """Fetches, uses, ends of uses and removals in any order: never over the budget, never a used one removed."""
    disk = Tier(packed, tmp_path_factory.mktemp("any"), archives)
    for action, name in actions:
        if action in {"fetch", "hold"} and name not in disk.holds:
            if (len(disk.holds) + 1) * SIZE <= disk.room.budget:
                disk.fetch(name, hold=action == "hold")
            else:
                with pytest.raises(MmeError, match="disk"):
                    disk.fetch(name)
        elif action == "release" and name in disk.holds:
            disk.holds.pop(name).release()
        elif action == "discard":
            disk.artifacts.discard(f"{name}.tar.gz")
            assert (name in disk.there()) == (name in disk.holds)
        disk.audit()
        assert set(disk.holds) <= set(disk.there())
        assert disk.room.used <= disk.room.budget
    disk.room.close()


def test_threads_share_the_budget(tier):
    """Eight threads that fetch and let go of six archives with room for three: all are served, the books agree."""
    disk = tier(3)
    problems = []

    def work(seed):
        rng = random.Random(seed)
        for _ in range(20):
            try:
                disk.artifacts.fetch(f"{rng.choice('abcdef')}.tar.gz").hold.release()
            except MmeError as error:
                if error.kind is not Kind.OUT_OF_MEMORY:  # others may hold all of it for a moment
                    problems.append(error)
            except Exception as error:  # noqa: BLE001 - whatever it is
                problems.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []
    assert disk.room.used <= disk.room.budget
    assert disk.fetch("a") in {True, False}
    disk.audit()


# -- locks -------------------------------------------------------------------------------------------------------------


def test_locks_of_a_file_are_shared_or_exclusive(tmp_path):
    """Two open files exclude each other byte by byte, and what one gives back the other may have."""
    one, other = ByteLocks(tmp_path / "locks"), ByteLocks(tmp_path / "locks")
    assert one.share(7)
    assert other.share(7)
    assert not one.exclude(7)
    other.unlock(7)
    assert one.exclude(7)
    assert not other.share(7)
    assert other.exclude(2**60)
    one.close()
    assert other.exclude(7)
    other.close()
    other.close()


def test_locks_end_with_their_process(tmp_path):
    """A server that is killed leaves nothing locked."""
    code = (
        "import sys; from pathlib import Path; from serve.sources.disk_budget import ByteLocks\n"
        f"locks = ByteLocks(Path({str(tmp_path / 'locks')!r})); print(locks.exclude(7), flush=True); sys.stdin.read()"
    )
    holder = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    locks = ByteLocks(tmp_path / "locks")
    try:
        assert holder.stdout.readline() == b"True\n"
        assert not locks.share(7)
    finally:
        holder.kill()
        holder.wait()
        holder.stdin.close()
        holder.stdout.close()

    assert locks.share(7)
    locks.close()


def test_a_room_says_what_it_holds(tmp_path):
    """Its repr is fit for logs."""
    room = DiskBudget(tmp_path, 3_000_000)
    assert repr(room) == "<DiskBudget 0.0 MB of 3.0 MB taken by 0 archives>"
    room.close()


class Weights:
    """What was derived from archives: so many bytes for each that was unpacked, until its archive is gone.

    Attributes:
        of: name → bytes.
        there: names of the archives that are on disk.
    """

    def __init__(self):
        self.of = {}
        self.there = lambda: ""

    @property
    def taken(self):
        """Bytes of all."""
        return sum(self.of.values())

    def shrink(self):
        """Forget what was made of archives that are gone."""
        self.of = {name: size for name, size in self.of.items() if name in self.there()}


def test_what_was_derived_from_archives_counts_and_goes_with_them(tier):
    """Room for three archives, two of which have weights of half their size: those who leave leave them behind."""
    weights = Weights()
    disk = tier(3, derived=weights)
    weights.there = disk.there
    for name in "ab":
        disk.fetch(name)
        weights.of[name] = SIZE // 2
    assert disk.room.used == 3 * SIZE
    assert disk.room.archives == 2 * SIZE
    assert disk.room.has(0)
    assert not disk.room.has(1)

    disk.fetch("c")

    assert disk.there() == "bc"
    disk.fetch("d")

    assert disk.there() == "cd"
    assert weights.of == {"b": SIZE // 2}
    assert disk.room.used == 2 * SIZE + SIZE // 2
    assert disk.room.evictions == 2


def test_what_belongs_to_no_archive_any_more_goes_before_an_archive(tier):
    """It helps nobody."""
    weights = Weights()
    disk = tier(3, derived=weights)
    weights.there = disk.there
    disk.fetch("a")
    disk.fetch("b")
    weights.of["f"] = SIZE

    disk.fetch("c")

    assert disk.there() == "abc"
    assert disk.room.evictions == 0
