"""mme's compiled modules for another version of Python than the one that runs, of which only the headers are needed.

    python -m benchmarks.cross_compile 3.12 HEADERS DIR

HEADERS is the folder of its `Python.h`. What the C that mypyc writes depends on is `sys.version_info`, so that says the
other version meanwhile. mypy has to be its wheel of plain Python: the compiled one knows the version it was made for.
"""

from __future__ import annotations

import os
import runpy
import sys
import sysconfig
from typing import NamedTuple


class Version(NamedTuple):
    """What `sys.version_info` says."""

    major: int
    minor: int
    micro: int = 0
    releaselevel: str = "final"
    serial: int = 0


def main(version: str, headers: str, folder: str) -> None:
    """Compile what setup.py lists into a folder, from the sources in the current directory."""
    target = Version(*map(int, version.split(".")))
    suffix = str(sysconfig.get_config_var("EXT_SUFFIX"))
    running = f"cpython-{sys.version_info.major}{sys.version_info.minor}"
    os.environ["SETUPTOOLS_EXT_SUFFIX"] = suffix.replace(running, f"cpython-{target.major}{target.minor}")
    os.environ["CFLAGS"] = f"-I{headers}"  # before those of the Python that runs
    os.environ["MME_COMPILE"] = "1"
    sys.argv = ["setup.py", "--quiet", "build_ext", "--build-lib", folder, "--build-temp", f"{folder}.objects"]
    sys.version_info = target  # type: ignore[misc, assignment]
    runpy.run_path("setup.py", run_name="__main__")


if __name__ == "__main__":
    main(*sys.argv[1:])
