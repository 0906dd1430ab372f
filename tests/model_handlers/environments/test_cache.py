"""Packed environments made into folders: once, whole or not at all, whoever asks and whatever dies meanwhile."""

import os
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from model_handlers.environment import Patience, Prebuilt
from model_handlers.environment_cache import Environments
from model_handlers.errors import ElsewhereError, Kind, MmeError
from model_handlers.system.disk import locked
from model_handlers.system.threads import NEVER
from tests.environments import pack, venv

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("fork_server")]


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """An environment as it was before it was packed."""
    return venv(tmp_path_factory.mktemp("source") / "env", numpy=False)


@pytest.fixture
def folder(tmp_path):
    """Where environments are kept; the test before it is there."""
    return tmp_path / "cache/environments"


@pytest.fixture
def archive(tmp_path, source):
    """It, packed."""
    return pack(source, tmp_path / "env.tar.gz")


def with_script(source, folder, script):
    """It with a conda-unpack of the test's, packed."""
    whole = folder / "with script"
    subprocess.run(["cp", "-a", source, whole], check=True)
    (whole / "bin/conda-unpack").write_text(script)
    return pack(whole, folder / "relocated.tar.gz")


def names(folder):
    """What lies in the folder of environments."""
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


def refused(folder, archive, patience):
    """The error of one that can't be made; nothing is left of it."""
    with pytest.raises(MmeError) as raised:
        Environments(folder).provide(Prebuilt(archive), patience)
    assert names(folder) == []
    return raised.value


def test_a_packed_environment_becomes_a_folder_that_works(folder, archive, patience):
    """Named by its content, complete, its interpreter at home in its place; there is nothing before it is wanted."""
    environments = Environments(folder)
    assert environments.find(Prebuilt(archive), patience) is None
    assert not folder.exists()
    environment = environments.provide(Prebuilt(archive), patience)

    told = subprocess.run(
        [environment.python, "-c", "import sys; print(sys.prefix)"], capture_output=True, text=True, check=True
    )
    assert told.stdout.strip() == str(environment.prefix)
    assert environments.find(Prebuilt(archive), patience) == environment
    assert names(folder) == [environment.prefix.name, f"{environment.prefix.name}.complete"]
    assert folder.stat().st_mode & 0o077 == 0


def test_equal_content_is_unpacked_once(folder, archive, tmp_path, patience):
    """For any number of models, under any name, by this run of the server and by later ones."""
    first = Environments(folder).provide(Prebuilt(archive), patience)
    before = (first.prefix / "pyvenv.cfg").stat()
    copy = tmp_path / "other name"
    copy.write_bytes(archive.read_bytes())

    assert Environments(folder).provide(Prebuilt(copy), patience) == first
    assert (first.prefix / "pyvenv.cfg").stat().st_ino == before.st_ino


def test_other_content_under_the_same_name_is_another_environment(folder, archive, source, tmp_path, patience):
    """An archive that was replaced is noticed; the folder of the old one stays as it was."""
    environments = Environments(folder)
    first = environments.provide(Prebuilt(archive), patience)
    archive.write_bytes(with_script(source, tmp_path, "pass").read_bytes())
    second = environments.provide(Prebuilt(archive), patience)

    assert first != second
    assert (second.prefix / "bin/conda-unpack").exists()
    assert not (first.prefix / "bin/conda-unpack").exists()


SCRIPT = """
import os, sys
with open({log!r}, "a") as log:
    log.write(f"{{os.path.realpath(__file__)}} {{sys.prefix}}\\n")
"""


def test_condas_script_is_run_once_in_the_final_place(folder, source, tmp_path, patience):
    """By the environment's own interpreter, after which the environment does not move any more."""
    archive = with_script(source, tmp_path, SCRIPT.format(log=str(tmp_path / "log")))
    with ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(Environments(folder).provide, Prebuilt(archive), patience) for _ in range(4)]
        [environment] = {task.result() for task in asked}

    assert (tmp_path / "log").read_text() == f"{environment.prefix}/bin/conda-unpack {environment.prefix}\n"


def test_condas_script_that_fails_is_told_with_its_last_words(folder, source, tmp_path, patience):
    """The environment would not work: nothing of it stays."""
    archive = with_script(source, tmp_path, "raise SystemExit('no such prefix')")
    error = refused(folder, archive, patience)

    assert error.kind is Kind.INVALID_MODEL
    assert error.message == (
        f"model 'm': its environment {archive} can't be moved to its place: "
        "conda-unpack ended with exit code 1: no such prefix"
    )


def test_a_broken_archive_leaves_nothing(folder, archive, patience):
    """The sentence names model and archive."""
    archive.write_bytes(archive.read_bytes()[:-1000])
    error = refused(folder, archive, patience)

    assert error.kind is Kind.INVALID_MODEL
    assert error.message.startswith(f"model 'm': its environment {archive} is truncated: ")


def test_an_archive_without_an_interpreter_leaves_nothing(folder, archives, tmp_path, patience):
    """What was packed was no environment."""
    (tmp_path / "a.tar.gz").write_bytes(archives.packed(("readme", b"x")))
    error = refused(folder, tmp_path / "a.tar.gz", patience)

    assert error.kind is Kind.INVALID_MODEL
    assert "has no bin/python that can be executed" in error.message


@pytest.mark.parametrize(
    ("members", "words"),
    [
        (
            lambda a: [a.link("bin/python", "/nowhere/python3.9")],
            "leads with bin/python to /nowhere/python3.9, which this machine does not have: pack it together",
        ),
        (
            lambda a: [
                a.member("bin/python", b"#!", mode=0o755),
                a.member("pyvenv.cfg", b"x = y\nhome = /nowhere/bin\n"),
            ],
            "is a venv of the Python in /nowhere/bin, which this machine does not have: pack it together",
        ),
    ],
    ids=["link", "home"],
)
def test_a_venv_from_elsewhere_is_refused_by_what_is_missing(folder, archives, tmp_path, patience, members, words):
    """A venv has no standard library of its own: it needs the Python that it was made of."""
    (tmp_path / "a.tar.gz").write_bytes(archives.packed(*members(archives)))

    assert words in refused(folder, tmp_path / "a.tar.gz", patience).message


def test_a_full_disk_is_out_of_memory(folder, archives, tmp_path, patience, monkeypatch):
    """The one error that has others put out, since it is about room; nothing is left."""
    from model_handlers import environment_cache as cache  # noqa: PLC0415 - beside what is changed

    (tmp_path / "a.tar.gz").write_bytes(archives.packed(("a", b"x" * 1000)))
    usage = cache.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(cache.shutil, "disk_usage", lambda _: type(usage)(usage.total, usage.used, 500))
    error = refused(folder, tmp_path / "a.tar.gz", patience)

    assert error.kind is Kind.OUT_OF_MEMORY
    assert (
        f"model 'm': its environment {tmp_path}/a.tar.gz cannot be made in {folder}: the disk is full" in error.message
    )


def test_an_environment_whose_interpreter_went_is_made_anew(folder, archive, patience):
    """A base Python that was upgraded, say; that the folder was complete once counts for nothing."""
    environment = Environments(folder).provide(Prebuilt(archive), patience)
    (environment.prefix / "bin/python").unlink()

    assert Environments(folder).find(Prebuilt(archive), patience) is None
    assert Environments(folder).provide(Prebuilt(archive), patience) == environment
    assert environment.python.exists()


DIES = """
import os, signal, sys
from pathlib import Path
from model_handlers.system.threads import CancelToken
from model_handlers.environment_cache import Environments
from model_handlers.environment import Patience
from model_handlers.environment import Prebuilt

folder, archive = map(Path, sys.argv[1:])


def cancelled():
    if len(list(folder.glob("packed-*/bin/*"))) >= 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return False


Environments(folder).provide(Prebuilt(archive), Patience("m", 60, CancelToken(cancelled=cancelled)))
"""


def killed_half_way(folder, archive):
    """What is left of an unpacking that was killed."""
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, "-c", DIES, folder, archive], env=environ, check=False)
    assert done.returncode == -signal.SIGKILL
    [left] = [path for path in folder.iterdir() if path.is_dir()]
    assert names(folder) == [left.name, f"{left.name}.lock"]
    return left


def test_what_a_kill_left_is_not_taken_for_an_environment(folder, archive, patience):
    """The next load of it begins anew, and ends with a whole one."""
    environments = Environments(folder)
    environments.taken_over = True  # so that it is this load which clears away
    left = killed_half_way(folder, archive)
    assert environments.find(Prebuilt(archive), patience) is None
    (left / "stray").touch()
    environment = environments.provide(Prebuilt(archive), patience)

    assert environment.prefix == left
    assert not (left / "stray").exists()
    assert (left / "pyvenv.cfg").exists()
    assert names(folder) == [left.name, f"{left.name}.complete"]


def test_what_a_kill_left_goes_with_the_next_run(folder, archive, source, tmp_path, patience):
    """The first environment that is made clears the others' remains away, but for what somebody still makes."""
    killed_half_way(folder, archive)
    (folder / "installed-1").mkdir()
    with locked(folder / "installed-1.lock", NEVER):
        environment = Environments(folder).provide(Prebuilt(with_script(source, tmp_path, "pass")), patience)
        name = environment.prefix.name
        assert names(folder) == sorted([name, f"{name}.complete", "installed-1", "installed-1.lock"])


def test_what_is_not_an_environment_stays(folder, archive, patience):
    """A file that another program left, or the folder of a file system's own, is no reason to make no environment."""
    (folder / "lost+found").mkdir(parents=True)
    (folder / ".nfs0001").touch()
    environment = Environments(folder).provide(Prebuilt(archive), patience)
    name = environment.prefix.name

    assert names(folder) == sorted([".nfs0001", "lost+found", name, f"{name}.complete"])


def test_what_is_left_and_can_not_be_removed_keeps_no_other_away(folder, archive, patience):
    """A load that wants that very place is told."""
    folder.mkdir(parents=True)
    (folder / "installed-1").touch()
    environments = Environments(folder)
    place = environments.place(Prebuilt(archive), patience).prefix
    place.touch()
    with pytest.raises(MmeError, match="Not a directory") as raised:
        environments.provide(Prebuilt(archive), patience)
    assert raised.value.kind is Kind.INTERNAL
    place.unlink()

    assert environments.provide(Prebuilt(archive), patience).prefix == place


def test_a_folder_that_was_removed_by_hand_is_made_again(folder, archive, patience):
    """So is what was in it, as loads want it."""
    environments = Environments(folder)
    environment = environments.provide(Prebuilt(archive), patience)
    shutil.rmtree(folder)

    assert environments.find(Prebuilt(archive), patience) is None
    assert environments.provide(Prebuilt(archive), patience) == environment
    assert folder.stat().st_mode & 0o077 == 0


HANGS = """
import subprocess, sys, time
with open({log!r}, "w") as log:
    log.write(str(subprocess.Popen(["sleep", "3600"], start_new_session=True).pid))
time.sleep(3600)
"""


@pytest.mark.parametrize("why", ["cancelled", "deadline"])
def test_who_gives_up_ends_what_runs(folder, source, tmp_path, ends_once, why):
    """At the deadline, or when nobody wants the model any more: script and what it started are gone, nothing is left."""
    log = tmp_path / "log"
    archive = with_script(source, tmp_path, HANGS.format(log=str(log)))
    error = refused(folder, archive, ends_once(lambda: log.exists() and log.read_text(), why))

    assert not psutil.pid_exists(int(log.read_text()))
    assert error.kind is (Kind.CANCELLED if why == "cancelled" else Kind.INVALID_MODEL)
    if why == "deadline":
        assert error.message == (
            "model 'm': its environment was not there within 60 s; give it more by the parameter 'MME_LOAD_TIMEOUT'"
        )


def test_who_waits_for_somebody_elses_may_give_up_too(folder, archive, patience):
    """The one that makes it goes on."""
    environments = Environments(folder)
    environment = environments.provide(Prebuilt(archive), patience)
    (environment.prefix.with_name(f"{environment.prefix.name}.complete")).unlink()
    lock = environment.prefix.with_name(f"{environment.prefix.name}.lock")
    with locked(lock, NEVER):
        with pytest.raises(MmeError, match=r"was not there within 0\.1 s"):
            environments.provide(Prebuilt(archive), Patience("other", 0.1, NEVER))
        assert environment.prefix.exists()


def test_a_missing_archive_is_refused(folder, tmp_path, patience):
    """The sentence names it, and says what to do; it blames the model for what the model was to bring alone."""
    error = refused(folder, tmp_path / "nowhere.tar.gz", patience)
    with pytest.raises(ElsewhereError, match="is not there: put it there before the model is loaded") as raised:
        Environments(folder).find(Prebuilt(tmp_path / "nowhere.tar.gz", brought=False), patience)

    assert error.kind is raised.value.kind is Kind.INVALID_MODEL
    assert not isinstance(error, ElsewhereError)
    assert error.message.startswith(f"model 'm': its environment {tmp_path}/nowhere.tar.gz is not there: put it into")


def test_a_folder_that_can_not_be_made_is_told(archive, patience, tmp_path):
    """A file in its way, say: the sentence says what to look at."""
    (tmp_path / "cache").write_text("")
    with pytest.raises(MmeError, match="check the directory and its permissions") as raised:
        Environments(Path(tmp_path / "cache/environments")).provide(Prebuilt(archive), patience)

    assert raised.value.kind is Kind.INTERNAL
