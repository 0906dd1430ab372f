"""What a machine with a GPU, Python 3.12 and PyTorch needs beside them: collected here, installed there offline.

    python3 -m benchmarks.gpu_wheels collect DIR [--mebibytes 48] [--plain]
    python3 -m benchmarks.gpu_wheels install DIR ENVIRONMENT

`collect` downloads the wheels of constraints.txt for that Python, whichever runs it, builds mme's own, compiled unless
`--plain`, and lays them out in DIR/1, DIR/2, …: folders of no more than so many MiB, larger wheels in pieces. PyTorch
and CUDA's libraries are left out. What compiling needs of Python are headers, which come in TensorFlow's wheel.
`install` puts the pieces together, checks every wheel by its sum, and makes an environment that sees the packages of
the Python that runs it. Needs the standard library and pip alone.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import site
import subprocess
import sys
import tempfile
from pathlib import Path
from zipfile import ZipFile

ROOT = Path(__file__).parents[1]
_MANIFEST = "wheels.json"
_PIECE = ".piece-"
_MIB = 1 << 20
_COMPILER = ("mypy", "types-cachetools", "types-protobuf", "types-psutil")  # as for the images
_PYTHON = "3.12"  # of the machine
_TAG = "cp312"
_GLIBC = (5, 12, 17, 24, 27, 28, 31, 34, 35)  # 2.x, of what wheels may need
_PLATFORMS = ["linux_x86_64", *(f"manylinux_2_{minor}_x86_64" for minor in _GLIBC)]
# What the report and the tests that need a GPU import. Without its extras ONNX Runtime brings no library of CUDA's:
# PyTorch's are loaded.
_WANTED = (
    "onnxruntime-gpu", "hpack", "rich", "onnx", "pytest", "pytest-xdist", "hypothesis", "cuda-bindings", "safetensors",
    "tokenizers",
)  # fmt: skip


def collect(folder: Path, most: int, *, compiled: bool) -> None:
    """Fill a folder that is new or empty; `most` is the bytes of each folder in it."""
    with tempfile.TemporaryDirectory() as scratch:
        wheels, tools = Path(scratch, "wheels"), Path(scratch, "tools")
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
        constraints = ["-c", str(ROOT / "constraints.txt")]
        target = ["--only-binary=:all:", "--implementation", "cp", "--python-version", _PYTHON]
        target += [word for abi in (_TAG, "abi3", "none") for word in ("--abi", abi)]
        target += [word for platform in _PLATFORMS for word in ("--platform", platform)]
        beside = [*pip, "install", "--quiet", "--upgrade", "--target", str(tools)]
        subprocess.run([*beside, *constraints, "setuptools", "wheel", *(_COMPILER if compiled else ())], check=True)
        own = _plain_wheel(pip, wheels, tools)
        subprocess.run(
            [*pip, "download", "--quiet", *target, *constraints, "--dest", str(wheels), str(own), *_WANTED], check=True
        )
        if compiled:
            others = [str(wheel) for wheel in wheels.glob("*.whl") if wheel != own]  # whose types are read
            subprocess.run([*beside, "--no-index", "--no-deps", "--no-compile", *target, *others], check=True)
            plain = ["--only-binary=:all:", "--implementation", "py", "--abi", "none", "--platform", "any"]
            subprocess.run([*beside, "--no-deps", *plain, *constraints, _COMPILER[0]], check=True)
            headers = _headers([*pip, "download", "--quiet", "--no-deps", *target, *constraints], Path(scratch))
            _compile_into(own, tools, headers, Path(scratch))
        divide(sorted(wheels.glob("*.whl")), folder, most)


def _plain_wheel(pip: list[str], wheels: Path, tools: Path) -> Path:
    """The wheel of this checkout, made by the tools in a folder."""
    build = [*pip, "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(wheels), str(ROOT)]
    subprocess.run(build, check=True, env={**os.environ, "PYTHONPATH": str(tools), "MME_COMPILE": "0"}, cwd=ROOT)
    (own,) = wheels.glob("mme-*.whl")
    return own


def _headers(download: list[str], scratch: Path) -> Path:
    """The folder of the machine's `Python.h`, out of a wheel that brings it."""
    subprocess.run([*download, "--dest", str(scratch), "tensorflow-cpu"], check=True)
    (wheel,) = scratch.glob("tensorflow_cpu-*.whl")
    with ZipFile(wheel) as archive:
        archive.extractall(scratch, [name for name in archive.namelist() if f"/include/python{_PYTHON}/" in name])
    (found,) = scratch.rglob(f"python{_PYTHON}/Python.h")
    return found.parent


def _compile_into(own: Path, tools: Path, headers: Path, scratch: Path) -> None:
    """Put the compiled modules for the machine's Python into the plain wheel, which is another then."""
    environ = {**os.environ, "PYTHONPATH": f"{tools}{os.pathsep}{ROOT}"}
    sources = scratch / "sources"
    unpacked = scratch / "unpacked"
    subprocess.run(
        [sys.executable, "-m", "wheel", "unpack", "--dest", str(unpacked), str(own)], check=True, env=environ
    )
    (tree,) = unpacked.iterdir()
    shutil.copytree(ROOT, sources, ignore=shutil.ignore_patterns(".*", "build", "*.so", "tests"))
    cross = [sys.executable, "-m", "benchmarks.cross_compile", _PYTHON, str(headers), str(tree)]
    subprocess.run(cross, check=True, env=environ, cwd=sources)
    own.unlink()
    subprocess.run(
        [sys.executable, "-m", "wheel", "pack", "--dest-dir", str(own.parent), str(tree)], check=True, env=environ
    )
    tags = ["--remove", "--python-tag", _TAG, "--abi-tag", _TAG, "--platform-tag", "linux_x86_64"]
    subprocess.run([sys.executable, "-m", "wheel", "tags", *tags, str(own)], check=True, env=environ)


def divide(wheels: list[Path], folder: Path, most: int) -> None:
    """Lay files out in folders of no more than `most` bytes, and say in the first what all of them are."""
    if folder.exists() and any(folder.iterdir()):
        raise SystemExit(f"{folder} is not empty: name a new folder")
    number, room = 1, most - _MIB  # for the list
    (folder / "1").mkdir(parents=True)
    for wheel in wheels:
        content = wheel.read_bytes()
        pieces = 0
        while content or not pieces:
            if room < len(content) and (room < _MIB or len(content) <= most):
                number, room = number + 1, most
                (folder / str(number)).mkdir()
            piece, content = content[:room], content[room:]
            pieces += 1
            name = wheel.name if pieces == 1 and not content else f"{wheel.name}{_PIECE}{pieces:03}"
            (folder / str(number) / name).write_bytes(piece)
            room -= len(piece)
    sums = {wheel.name: hashlib.sha256(wheel.read_bytes()).hexdigest() for wheel in wheels}
    (folder / "1" / _MANIFEST).write_text(json.dumps(sums, indent=1))
    print(f"{len(wheels)} wheels in {number} folders of {folder}")


def joined(folder: Path, into: Path) -> list[Path]:
    """The wheels of a folder, whole, in another.

    Raises:
        SystemExit: the list, a wheel or a piece is missing, or a wheel is not what it was.
    """
    lists = list(folder.rglob(_MANIFEST))
    if len(lists) != 1:
        raise SystemExit(
            f"{folder} has {len(lists)} files {_MANIFEST}: one is wanted, of the folder 1 that make wheels made"
        )
    found, wrong = [], []
    for name, expected in json.loads(lists[0].read_text()).items():
        pieces = sorted(folder.rglob(f"{name}{_PIECE}*"), key=lambda piece: piece.name) or list(folder.rglob(name))[:1]
        whole = into / name
        with whole.open("wb") as out:
            for piece in pieces:
                out.write(piece.read_bytes())
        if hashlib.sha256(whole.read_bytes()).hexdigest() != expected:
            wrong.append(name)
        found.append(whole)
    if wrong:
        raise SystemExit(f"{folder} lacks these wheels, or pieces of them: {', '.join(wrong)}")
    return found


def install(folder: Path, environment: Path) -> None:
    """Make the environment, or leave it alone where it holds these wheels already."""
    mark = environment / _MANIFEST
    with tempfile.TemporaryDirectory() as scratch:
        wheels = joined(folder, Path(scratch))
        (manifest,) = folder.rglob(_MANIFEST)
        if mark.exists() and mark.read_text() == manifest.read_text():
            return
        subprocess.run([sys.executable, "-m", "venv", "--clear", "--without-pip", str(environment)], check=True)
        (packages,) = environment.glob("lib/python3*/site-packages")
        above = [path for path in site.getsitepackages() if Path(path).is_dir()]
        (packages / "above.pth").write_text("\n".join([*above, ""]))  # the wheels' own come first
        for path in above:  # ONNX Runtime looks for CUDA's libraries beside itself alone
            libraries = Path(path, "nvidia")
            if libraries.is_dir() and not (packages / "nvidia").exists():
                (packages / "nvidia").symlink_to(libraries)
        python = environment / "bin" / "python"
        pip = [sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check"]
        offline = ["install", "--quiet", "--no-index", "--no-deps", "--ignore-installed", "--no-compile"]
        subprocess.run([*pip, *offline, *map(str, wheels)], check=True)
        shutil.copy(manifest, mark)
    print(f"{len(wheels)} wheels are in {environment}")


def main() -> None:
    """Collect or install."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    collecting = verbs.add_parser("collect")
    collecting.add_argument("folder", type=Path)
    collecting.add_argument("--mebibytes", type=int, default=48, help="of each folder")
    collecting.add_argument("--plain", action="store_true", help="mme's wheel is not compiled")
    installing = verbs.add_parser("install")
    installing.add_argument("folder", type=Path)
    installing.add_argument("environment", type=Path)
    arguments = parser.parse_args()
    if arguments.verb == "collect":
        collect(arguments.folder, arguments.mebibytes * _MIB, compiled=not arguments.plain)
    else:
        install(arguments.folder, arguments.environment)


if __name__ == "__main__":
    main()
