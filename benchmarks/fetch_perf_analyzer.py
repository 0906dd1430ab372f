"""Fetch perf_analyzer, the load generator of Triton's users, from the PyPI wheels that carry its binary.

    python -m benchmarks.fetch_perf_analyzer FOLDER

prints the path of a script that runs it. Newer wheels of tritonclient hold an empty placeholder; 2.51.0 holds the
program. It needs libb64 from the system (Debian: apt-get install libb64-0d).
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

_WHEELS = ("tritonclient==2.51.0", "nvidia-cuda-runtime-cu12==12.9.79")
_SCRIPT = """\
#!/bin/sh
LD_LIBRARY_PATH={libraries}${{LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}} exec {program} "$@"
"""


def fetch(folder: Path) -> Path:
    """Download and unpack, unless it is there; returns the script's path."""
    script = folder / "perf_analyzer"
    if script.exists():
        return script
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as wheels:
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", "-d", wheels]
        subprocess.run([*command, *_WHEELS], check=True, stdout=sys.stderr)
        for wheel in Path(wheels).glob("*.whl"):
            with zipfile.ZipFile(wheel) as archive:
                wanted = [n for n in archive.namelist() if n.endswith(("/bin/perf_analyzer", "/libcudart.so.12"))]
                archive.extractall(folder, wanted)
    program = next(folder.glob("*.data/data/bin/perf_analyzer")).resolve()
    libraries = next(folder.rglob("libcudart.so.12")).resolve().parent
    program.chmod(0o755)
    script.write_text(_SCRIPT.format(libraries=libraries, program=program))
    script.chmod(0o755)
    return script


if __name__ == "__main__":
    print(fetch(Path(sys.argv[1])))
