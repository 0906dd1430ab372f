"""What requirements.txt names, installed: from wheels of the test's own, so that no index is asked."""

import importlib.metadata
import logging
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import psutil
import pytest

from model_handlers import environment_cache as cache
from model_handlers.environment import Requirements
from model_handlers.environment_cache import Environments
from model_handlers.errors import Kind, MmeError
from tests.environments import write_wheel

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("fork_server")]


@pytest.fixture
def folder(tmp_path):
    """Where environments are kept; it is made when the first of them is."""
    return tmp_path / "cache/environments"


@pytest.fixture
def wheels(tmp_path):
    """A folder of wheels: `greeting` 1.0 and 2.0, of which the latter needs `voice`, and no `voice`."""
    write_wheel(tmp_path / "m/wheels", "greeting", "1.0")
    write_wheel(tmp_path / "m/wheels", "greeting", "2.0", ["voice"])
    return tmp_path / "m/wheels"


@pytest.fixture
def want(tmp_path, wheels):
    """What a model with this requirements.txt wants."""

    def want(text, wheels=wheels):
        (tmp_path / "m/requirements.txt").write_text(text)
        return Requirements(tmp_path / "m/requirements.txt", wheels)

    return want


def names(folder):
    """What lies in the folder of environments."""
    return sorted(path.name for path in folder.iterdir())


def told(environment, code):
    """What the environment's interpreter prints."""
    command = [environment.python, "-I", "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def refused(folder, wanted, patience):
    """The error of what can't be installed; nothing is left of it."""
    with pytest.raises(MmeError) as raised:
        Environments(folder).provide(wanted, patience)
    assert names(folder) == []
    return raised.value


def test_packages_are_installed_in_front_of_the_servers(folder, want, patience, caplog):
    """What the model asks for is there, and behind it what the server has: its numpy, above all.

    A second load finds it, as does a later run of the server: nothing runs for it.
    """
    environment = Environments(folder).provide(want("greeting==1.0\n"), patience)

    assert told(environment, "import greeting; print(greeting.VERSION, greeting.__file__)").startswith(
        f"1.0 {environment.prefix}/lib/"
    )
    assert told(environment, "import numpy; print(numpy.__file__)") == np.__file__
    assert names(folder) == [environment.prefix.name, f"{environment.prefix.name}.complete"]
    assert not (environment.prefix / "tmp").exists()

    with caplog.at_level(logging.INFO, "mme.model"):
        caplog.clear()
        assert Environments(folder).find(want("greeting==1.0\n"), patience) == environment
    assert caplog.records == []


@pytest.mark.long
def test_a_package_that_the_server_has_is_installed_in_another_version(folder, want, wheels, patience):
    """The model finds the version that it asked for; the server's stays what it is."""
    ours = importlib.metadata.version("iniconfig")
    write_wheel(wheels, "iniconfig", "99.0", iniconfig="VERSION = 99")
    environment = Environments(folder).provide(want("iniconfig==99.0\n"), patience)

    assert told(environment, "import iniconfig; print(iniconfig.VERSION)") == "99"
    assert importlib.metadata.version("iniconfig") == ours
    other = Environments(folder).provide(want("greeting==1.0"), patience)
    assert told(other, "import iniconfig; print(iniconfig.__file__)").startswith(str(Path(np.__file__).parents[1]))


@pytest.mark.long
def test_a_package_that_the_server_has_is_not_installed_again(folder, want, patience):
    """A requirement that it meets costs nothing: no wheel of it is looked for."""
    environment = Environments(folder).provide(want("numpy\niniconfig\n"), patience)

    assert told(environment, "import iniconfig; print(iniconfig.__file__)").startswith(
        str(Path(np.__file__).parents[1])
    )


@pytest.mark.parametrize(
    "line",
    [
        "-r /etc/passwd",
        "-r/etc/passwd",
        "--requirement=/etc/passwd",
        "--requirem /etc/passwd",
        "-c ../../../etc/passwd",
        "--constraint '/etc/passwd'",
        "--no-index -r /etc/passwd",
        "-r \\\n /etc/passwd",
        "-r file:///etc/passwd",
        "-r http://169.254.169.254/latest/meta-data/",
        "-r ${HOME}/secret.txt",
        "-r inside.txt",
        "-r link.txt",
    ],
)
def test_files_outside_of_the_models_folder_are_not_included(folder, want, patience, line):
    """Pip quotes the first line of what it can't read, and clients are told what pip says."""
    wanted = want(f"greeting==1.0\n{line}\n")
    (wanted.file.parent / "inside.txt").write_text("-r /etc/passwd")
    (wanted.file.parent / "link.txt").symlink_to("/etc/passwd")
    with pytest.raises(
        MmeError, match=r"requirements.txt includes '.+', which is outside of the model's folder"
    ) as error:
        Environments(folder).provide(wanted, patience)

    assert error.value.kind is Kind.INVALID_MODEL
    assert "root:" not in error.value.message


@pytest.mark.long
def test_files_inside_of_the_models_folder_are_included(folder, want, patience):
    """In folders below it, too."""
    wanted = want("# -r /etc/passwd\n-r more/requirements.txt\n")
    (wanted.file.parent / "more").mkdir()
    (wanted.file.parent / "more/requirements.txt").write_text("greeting==1.0  # -r /etc/passwd\n")

    assert told(Environments(folder).provide(wanted, patience), "import greeting; print(greeting.VERSION)") == "1.0"


def test_values_of_variables_are_not_told(folder, want, patience, monkeypatch):
    """Pip puts them into its requirements, and its errors."""
    monkeypatch.setenv("INDEX_TOKEN", "s3cret")
    error = refused(folder, want("greeting==1.0-${INDEX_TOKEN}\n"), patience)

    assert "s3cret" not in error.message
    assert "${INDEX_TOKEN}" in error.message


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("nosuchpackage==1.0\n", "ERROR: No matching distribution found for nosuchpackage==1.0"),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in (
                ("greeting==3.0\n", "ERROR: No matching distribution found for greeting==3.0"),
                ("greeting==2.0\n", "ERROR: No matching distribution found for voice"),
                ("what is this?\n", "ERROR: Invalid requirement: 'what is this?'"),
                ("-r nowhere.txt\n", "ERROR: Could not open requirements file"),
            )
        ),
        ("greeting==1.0\ngreeting==2.0\n", "ERROR: Cannot install greeting==1.0 and greeting==2.0"),
    ],
    ids=["unknown", "other version", "dependency", "nonsense", "no such file", "conflict"],
)
def test_what_can_not_be_installed_is_told_in_pips_words(folder, want, patience, text, words):
    """Its last errors are the load's, and nothing is left."""
    error = refused(folder, want(text), patience)

    assert error.kind is Kind.INVALID_MODEL
    assert error.message.startswith("model 'm': requirements.txt can't be installed: ERROR: ")
    assert words in error.message


def test_pip_that_dies_is_told_with_its_signal(folder, want, tmp_path, patience):
    """Whatever it was that ended it, it says nothing of the model, whose archive would be thrown away."""
    package(tmp_path / "m/pkg", "import os, signal; os.kill(os.getppid(), signal.SIGKILL)")
    error = refused(folder, want("./pkg\n", None), patience)

    assert error.kind is Kind.EXECUTION_FAILED
    assert error.message.startswith(
        "model 'm': requirements.txt can't be installed: pip was killed by SIGKILL; load the"
    )


def test_a_server_without_pip_says_so(folder, want, patience, monkeypatch):
    """It can't be put in by us: whoever makes the image leaves it there."""
    monkeypatch.setattr(cache.importlib.util, "find_spec", lambda _: None)

    assert refused(folder, want("greeting==1.0"), patience).message == (
        "model 'm': requirements.txt can't be installed: the server's Python has no pip"
    )


@pytest.mark.long
def test_progress_is_logged_line_by_line_under_the_models_name(folder, want, patience, caplog):
    """A long install is seen to go on."""
    with caplog.at_level(logging.INFO, "mme.model"):
        Environments(folder).provide(want("greeting==1.0\n"), patience)
    lines = [(record.target_model, record.getMessage()) for record in caplog.records if record.name == "mme.model"]

    assert [line for line in lines if line[0] != "m"] == []
    assert any("greeting-1.0-py3-none-any.whl" in line for _, line in lines)
    assert ("m", "Successfully installed greeting-1.0") in lines


def package(folder, code):
    """A package that runs `code` when it is built, without the help of any other package."""
    folder.mkdir(parents=True)
    (folder / "pyproject.toml").write_text(
        '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
        '[project]\nname = "pkg"\nversion = "1"\n'
    )
    (folder / "backend.py").write_text(f"def build_wheel(*args):\n    {code}\n")


@pytest.mark.parametrize("why", [pytest.param("cancelled", marks=pytest.mark.long), "deadline"])
def test_who_gives_up_ends_pip_and_all_that_it_started(
    folder, want, tmp_path, private_temporary_folder, ends_once, why
):
    """A build that hangs is gone with its children when the time of the load is over; nothing is left anywhere."""
    log = tmp_path / "log"
    hangs = "import subprocess, time; sleeper = subprocess.Popen(['sleep', '3600'], start_new_session=True); "
    package(tmp_path / "m/pkg", f"{hangs}open({str(log)!r}, 'w').write(str(sleeper.pid)); time.sleep(3600)")
    error = refused(folder, want("./pkg\n", None), ends_once(lambda: log.exists() and log.read_text(), why))

    assert not psutil.pid_exists(int(log.read_text()))
    assert error.kind is (Kind.CANCELLED if why == "cancelled" else Kind.INVALID_MODEL)
    assert ("was not there within 60 s" in error.message) == (why == "deadline")
    assert [path for path in private_temporary_folder.iterdir() if "pip" in path.name] == []


@pytest.mark.long
def test_models_of_equal_requirements_install_once(folder, want, tmp_path, caplog, patience):
    """At the same time: one installs, the others wait for it; where the files lie counts for nothing."""
    text = "greeting==1.0\n"
    here = want(text)
    (tmp_path / "n").mkdir()
    (tmp_path / "m/wheels").rename(tmp_path / "n/wheels")
    write_wheel(tmp_path / "m/wheels", "greeting", "1.0").write_bytes(b"")
    for name in ("greeting-1.0", "greeting-2.0"):
        file = f"{name}-py3-none-any.whl"
        (tmp_path / "m/wheels" / file).write_bytes((tmp_path / "n/wheels" / file).read_bytes())
    (tmp_path / "n/requirements.txt").write_text(text)
    there = Requirements(tmp_path / "n/requirements.txt", tmp_path / "n/wheels")
    with caplog.at_level(logging.INFO, "mme.model"), ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(Environments(folder).provide, wanted, patience) for wanted in (here, there) * 2]
        made = {task.result() for task in asked}

    assert len(made) == 1
    assert [record.getMessage() for record in caplog.records].count("Successfully installed greeting-1.0") == 1


def test_what_is_asked_for_makes_another_environment(want, tmp_path, wheels, patience, monkeypatch):
    """The text, files that it includes, the wheels, whether there are any, and what the server has itself."""
    (tmp_path / "m/more.txt").write_text("greeting==1.0\n")

    def name(text="greeting==1.0\n", wheels=wheels):
        return Environments(tmp_path).place(want(text, wheels), patience).prefix.name

    (tmp_path / "none").mkdir()
    seen = [name(), name("greeting>=1.0\n"), name("-r more.txt\n"), name(wheels=None), name(wheels=tmp_path / "none")]
    (tmp_path / "m/more.txt").write_text("greeting==2.0\n")
    seen.append(name("-r more.txt\n"))
    write_wheel(wheels, "voice")
    seen.append(name())
    write_wheel(wheels, "voice", voice="VERSION = 'patched'")
    seen.append(name())
    monkeypatch.setattr(cache, "_server_distributions", lambda: ["numpy==1.0"])
    seen.append(name())

    assert len(set(seen)) == len(seen)
    assert name() == name()


def test_python_that_was_upgraded_makes_another_environment(want, tmp_path, patience, monkeypatch):
    """A venv works on the interpreter that it was made of."""
    before = Environments(tmp_path).place(want("x"), patience)
    monkeypatch.setattr(sys, "version_info", (3, 99, 0, "final", 0))

    assert Environments(tmp_path).place(want("x"), patience) != before
