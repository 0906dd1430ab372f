"""Fetch Triton with its Python backend, the peer that Python models are compared with, from a PyPI wheel.

    python -m benchmarks.fetch_triton FOLDER

The wheel of nvidia-pytriton 0.7.0 (55 MB) carries the server (Triton 2.51.0), the backend, a stub for each version of
Python from 3.8 to 3.13 and the libraries that they link, all but libpython: the stub takes that of the Python that runs
us if it was built shared, else the system's (Debian: apt-get install libpython3.11). It needs glibc 2.35 and an x86-64
machine, and no GPU. Beside it goes a numpy of its own, for Python up to 3.12: with 2.0 and later the stub takes every
element for one of no bytes, so that models read one number again and again and answer with nothing. Wheels are
unpacked, never installed.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

_WHEEL = "nvidia-pytriton==0.7.0"
_NUMPY = "numpy==1.26.4"
_STUB = "triton_python_backend_stub"
_WANTED = ("pytriton/tritonserver/bin/", "pytriton/tritonserver/backends/", "nvidia_pytriton.libs/")


@dataclass(frozen=True, slots=True)
class Triton:
    """Where it lies, and how it is started."""

    folder: Path

    @property
    def command(self) -> list[str]:
        """The server's command, without what it is to serve."""
        root = self.folder / "pytriton/tritonserver"
        return [str(root / "bin/tritonserver"), "--backend-directory", str(root / "backends")]

    @property
    def environment(self) -> dict[str, str]:
        """Variables that make its stub run our Python's library."""
        libraries = [sysconfig.get_config_var("LIBDIR"), str(self.folder / "nvidia_pytriton.libs")]
        return {"LD_LIBRARY_PATH": ":".join(libraries), "PYTHONHOME": sys.base_prefix}


def fetch(folder: Path) -> Triton:
    """Download and unpack, unless it is there.

    Raises:
        RuntimeError: it can't be had here; says why.
    """
    if not (folder / "pytriton/tritonserver/backends/python" / _STUB).exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory() as wheels:
            _unpack(_download(_WHEEL, Path(wheels)), folder)
    _put_numpy(folder / "pytriton/tritonserver/backends/python")
    return Triton(folder.resolve())


def _put_numpy(backend: Path) -> None:
    """Where the stub finds it: it looks into the backend's folder, and takes no PYTHONPATH."""
    packages = [backend / name for name in ("numpy", "numpy.libs")]
    for package in packages:
        if package.is_symlink():  # to ours, as it was once
            package.unlink()
    if packages[0].exists():
        return
    with tempfile.TemporaryDirectory() as wheels, zipfile.ZipFile(_download(_NUMPY, Path(wheels))) as archive:
        archive.extractall(backend, [name for name in archive.namelist() if name.startswith(("numpy/", "numpy.libs/"))])


def _download(requirement: str, wheels: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", "-d", str(wheels)]
    if subprocess.run([*command, requirement], stdout=sys.stderr, check=False).returncode:
        raise RuntimeError(f"{requirement} can't be downloaded")
    return next(wheels.glob("*.whl"))


def _unpack(wheel: Path, folder: Path) -> None:
    stub = f"pytriton/tritonserver/python_backend_stubs/{sys.version_info.major}.{sys.version_info.minor}/{_STUB}"
    with zipfile.ZipFile(wheel) as archive:
        if stub not in archive.namelist():
            raise RuntimeError(f"{_WHEEL} has no stub for Python {sys.version_info.major}.{sys.version_info.minor}")
        archive.extractall(folder, [name for name in archive.namelist() if name.startswith(_WANTED) or name == stub])
    (folder / "pytriton/tritonserver/bin/tritonserver").chmod(0o755)
    target = folder / "pytriton/tritonserver/backends/python" / _STUB
    shutil.move(folder / stub, target)
    target.chmod(0o755)


if __name__ == "__main__":
    print(fetch(Path(sys.argv[1])).folder)
