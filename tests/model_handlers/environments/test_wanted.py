"""Which requirements the server's packages meet, with pip as the judge of what they do."""

import subprocess
import sys
import zipfile
from importlib.metadata import version

import pytest

from model_handlers import environment as wanted
from tests.environments import forget_installed, write_wheel

NUMPY = version("numpy")


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Have packages installed where models' processes look, too: name, version and what it requires."""

    def installed(name, number, requires=()):
        wheel = write_wheel(tmp_path / "wheels", name, number, requires)
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(tmp_path / "packages")

    monkeypatch.syspath_prepend(tmp_path / "packages")
    forget_installed()
    yield installed
    forget_installed()


@pytest.fixture
def lack(tmp_path):
    """What a requirements.txt of this text lacks."""

    def lack(text):
        file = tmp_path / "requirements.txt"
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
        return wanted.lack_of(file)

    return lack


MET = [
    "numpy\n",
    f"numpy=={NUMPY}\n",
    "NumPy >= 1.20, < 99  # as trained\n",
    "numpy~=2.0; python_version >= '3'\nnosuchpackage; sys_platform == 'win32'\n",
    "numpy[no_such_extra]\n",
    "\ufeff# made by hand\n\niniconfig\r\nflask\r\nboto3\r\n",
    "--extra-index-url https://example.com/simple\n-i https://example.com\n--no-index\n--only-binary=:all:\nnumpy\n",
    "iniconfig>=0.0.1rc1\niniconfig<99\n",
]


@pytest.mark.slow
@pytest.mark.parametrize(
    "text", [MET[3], *(pytest.param(text, marks=pytest.mark.long) for text in MET if text != MET[3])]
)
def test_what_is_met_has_pip_install_nothing(lack, tmp_path, text):
    """By names, versions, extras, markers, comments, and wherever else packages might come from."""
    assert lack(text) == ""

    pip = [sys.executable, "-m", "pip", "install", "--dry-run", "--no-index", "-r", tmp_path / "requirements.txt"]
    told = subprocess.run(pip, capture_output=True, text=True, check=True).stdout
    assert "Would install" not in told


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("nosuchpackage\n", "nosuchpackage is not installed"),
        ("numpy\nnumpy<2\n", f"numpy<2 is not met by {NUMPY}"),
        ("numpy==99.*; python_version >= '3'\n", f'numpy==99.*; python_version >= "3" is not met by {NUMPY}'),
        ("numpy\n-r more.txt\n", "'-r more.txt' is for pip to judge"),
        ("-c constraints.txt\nnumpy\n", "'-c constraints.txt' is for pip to judge"),
        ("--no-index -r more.txt\n", "'--no-index -r more.txt' is for pip to judge"),
        ("--require-hashes\nnumpy\n", "'--require-hashes' is for pip to judge"),
        ("numpy --hash=sha256:00\n", "'numpy --hash=sha256:00' is for pip to judge"),
        ("numpy \\\n  --hash=sha256:00\n", "'numpy \\' is for pip to judge"),
        ("numpy @ https://example.com/numpy.whl\n", "'numpy @ https://example.com/numpy.whl' is for pip to judge"),
        ("-e .\n", "'-e .' is for pip to judge"),
        ("./numpy\n", "'./numpy' is for pip to judge"),
        ("numpy==${VERSION}\n", "'numpy==${VERSION}' is for pip to judge"),
        (b"numpy # \xe9\n", "it is not in UTF-8"),
        ("numpy; " + "(" * 9999, f"'numpy; {'(' * 193}' is for pip to judge"),
    ],
)
def test_what_is_lacking_is_told(lack, text, expected):
    """The first of it; and what pip alone can judge is left to it."""
    assert lack(text) == expected


def test_what_a_package_requires_is_required(installed, lack):
    """However deep, as pip would install it; circles come to an end."""
    installed("outer", "1.0", ["middle>=1"])
    installed("middle", "1.0", ["inner", "outer"])
    assert lack("outer") == "inner is not installed"

    forget_installed()
    installed("inner", "1.0", ["numpy"])
    assert lack("outer") == ""


def test_extras_require_more(installed, lack):
    """Those that are asked for, by a package too, and no others."""
    installed("outer", "1.0", ["inner; extra == 'full'", "outer[full]; extra == 'all'", "numpy<1; extra == 'old'"])
    assert lack("outer") == ""
    assert lack("outer[full]") == 'inner; extra == "full" is not installed'
    assert lack("outer[all]") == 'inner; extra == "full" is not installed'


def test_a_prerelease_that_is_installed_will_do(installed, lack):
    """As it does for pip, which would install none by itself."""
    installed("outer", "2.0rc1")
    assert lack("outer>=1") == ""


@pytest.mark.parametrize("requires", ["inner @ https://example.com/inner.whl", "no requirement"])
def test_a_package_that_requires_what_can_not_be_told_is_not_met(installed, lack, requires):
    """Whatever it is: pip may know."""
    installed("inner", "1.0")
    installed("outer", "1.0", [requires])
    assert lack("outer") == f"'{requires}' is for pip to judge"
