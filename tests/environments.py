"""Environments as people make them, for tests: venvs, interpreters of other versions, wheels written by hand."""

from __future__ import annotations

import functools
import json
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import textwrap
import zipfile
from importlib.metadata import distribution
from pathlib import Path

from model_handlers import environment

_CONFIG = """
backend: "python"
max_batch_size: 8
input [ { name: "A" data_type: TYPE_FP32 dims: [ 2 ] }, { name: "S" data_type: TYPE_STRING dims: [ 1 ] optional: true } ]
output [ { name: "FACTS" data_type: TYPE_STRING dims: [ 1 ] } ]
"""
_MODEL = """
import json
import os
import sys
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.told = args
        print("printed by", sys.prefix)
        self.begun()

    def begun(self):
        pass

    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        rows = pb_utils.get_input_tensor_by_name(request, "A").as_numpy()
        text = json.dumps(self.facts(request))
        return pb_utils.InferenceResponse([pb_utils.Tensor("FACTS", np.array([[text]] * len(rows), object))])

    def facts(self, request):
        return {"prefix": sys.prefix, "pid": os.getpid()}
"""


def write_model(folder, facts="", begun="", *, methods="", parameters=None, files=None, head="", extra=""):
    """A model whose answer is what `facts`, the body of a method, returns; `begun` is called when it is loaded.

    Args:
        folder: where it goes; must not exist.
        facts: the body of the method, "" for what it answers by itself.
        begun: the body of the method, "" for one that does nothing.
        methods: more methods of its class.
        parameters: of its configuration.
        files: more files, by their paths.
        head: what comes before its class.
        extra: more of its configuration.

    Returns:
        the model's directory.
    """
    (folder / "1").mkdir(parents=True)
    told = "".join(
        f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}\n'
        for key, value in (parameters or {}).items()
    )
    (folder / "config.pbtxt").write_text(f"{_CONFIG}{told}{extra}\n")
    own = "".join(
        f"\n    def {method}:\n{textwrap.indent(textwrap.dedent(body).strip(), ' ' * 8)}\n"
        for method, body in (("facts(self, request)", facts), ("begun(self)", begun))
        if body
    )
    (folder / "1/model.py").write_text(f"{head}\n{_MODEL}{own}{textwrap.indent(textwrap.dedent(methods), ' ' * 4)}")
    for path, content in (files or {}).items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder


def venv(folder, python=sys.executable, *, numpy=True, copies=False, whole=False):
    """A venv of that interpreter with numpy in it, which for another version comes from PyPI, and nothing else.

    Args:
        folder: where it goes.
        python: the interpreter.
        numpy: whether it has one; of ours it has a link to it, unless it is `whole`, as what is packed has to be.
        copies: whether the interpreter is a file, instead of a link to the one that it was made of.
        whole: see `numpy`.
    """
    subprocess.run([python, "-m", "venv", "--without-pip", *["--copies"] * copies, folder], check=True)
    [packages] = folder.glob("lib/python3.*/site-packages")
    if numpy and whole and version_of(python)[:2] == sys.version_info[:2]:
        ours = Path(sysconfig.get_path("purelib"))
        for name in _numpy():
            shutil.copytree(ours / name, packages / name, ignore=shutil.ignore_patterns("tests", "__pycache__"))
    elif numpy and version_of(python)[:2] == sys.version_info[:2]:
        ours = Path(sysconfig.get_path("purelib"))
        for name in _numpy():
            (packages / name).symlink_to(ours / name)
    elif numpy:
        version = ".".join(map(str, version_of(python)[:2]))
        pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", packages]
        subprocess.run([*pip, "--python-version", version, "--only-binary", ":all:", "numpy"], check=True)
    return folder


def _numpy():
    """The folders of our own numpy."""
    return {file.parts[0] for file in distribution("numpy").files if file.parts[0] != ".."}


@functools.cache
def version_of(python):
    """The version of an interpreter."""
    asked = [python, "-c", "import sys; print(*sys.version_info[:3])"]
    return tuple(map(int, subprocess.run(asked, check=True, capture_output=True, text=True).stdout.split()))


def other_interpreters():
    """Interpreters of other minor versions on this machine, by version, newest first."""
    found = [shutil.which(f"python3.{minor}") for minor in range(6, 20)]
    found += map(str, (Path.home() / ".pyenv/versions").glob("3.*/bin/python"))
    versions = {}
    for python in filter(None, found):
        try:
            versions[version_of(python)] = python
        except subprocess.CalledProcessError:  # a shim of a version that is not chosen
            continue
    ours = sys.version_info[:2]
    return {version: versions[version] for version in sorted(versions, reverse=True) if version[:2] != ours}


def another_interpreter(which):
    """One that models may run on: the newest or the oldest of other minor versions on this machine, else ours."""
    found = [python for version, python in other_interpreters().items() if version >= (3, 10)]
    return found[0 if which == "newest" else -1] if found else sys.executable


def too_old(folder):
    """An environment whose Python is older than models may run on; a pretender where this machine has none."""
    for version, python in other_interpreters().items():
        if (3, 7) <= version < (3, 10):
            return venv(folder, python, numpy=False)
    (folder / "bin").mkdir(parents=True)
    code = "import runpy, sys; sys.version_info = (3, 9, 1, 'final', 0); sys.argv[:] = sys.argv[2:]; runpy.run_path(sys.argv[0], run_name='__main__')"
    script = folder / "bin/python"
    script.write_text(f'#!/bin/sh\nexec {sys.executable} -c "{code}" "$@"\n')
    script.chmod(0o755)
    return folder


def forget_installed():
    """Have the server look anew at what is installed, which it does once in its life."""
    for cache in (environment.installed, environment.required_by):
        cache.cache_clear()


def write_wheel(folder, name, version="1.0", requires=(), **modules):
    """A wheel of pure Python: modules by name and source."""
    info = f"{name}-{version}.dist-info"
    members = {f"{module}.py": source for module, source in (modules or {name: f"VERSION = {version!r}"}).items()}
    needs = "".join(f"Requires-Dist: {requirement}\n" for requirement in requires)
    members[f"{info}/METADATA"] = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}"
    members[f"{info}/WHEEL"] = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    members[f"{info}/RECORD"] = "".join(f"{member},,\n" for member in [*members, f"{info}/RECORD"])
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(file, "w") as archive:
        for member, content in members.items():
            archive.writestr(member, content)
    return file


def pack(folder, archive):
    """The folder's content as conda-pack and venv-pack lay it out."""
    with tarfile.open(archive, "w:gz", compresslevel=1) as file:
        for path in sorted(folder.iterdir()):
            file.add(path, path.name)
    return archive


def facts_of(result):
    """What a model answered, by its one row."""
    text = result.flat[0]
    return json.loads(text.decode() if isinstance(text, bytes) else text)
