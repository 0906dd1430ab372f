"""The image where no engine runs: what the Dockerfile says, what is pinned, and what its steps make."""

from __future__ import annotations

import configparser
import http.client
import importlib.metadata
import json
import re
import shutil
import signal
import socket
import subprocess
import zipfile
from pathlib import Path

import onnx
import pytest
from onnx import TensorProto, helper
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests import dockerfile

ROOT = Path(__file__).parents[1]
PACKAGES = ("container", "mme", "serve", "model_handlers")
IMAGES = ("cpu", "gpu")
NOT_PINNED = {"tensorrt", "cuda-python"}  # an extra that nothing here installs

STAGES = dockerfile.stages(ROOT / "Dockerfile")
IGNORED = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")]


def pins() -> dict[str, str]:
    """The versions of constraints.txt by canonical name; a line of another form fails."""
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    versions = dict(re.fullmatch(r"([a-z0-9-]+)==([\w.]+)", line).groups() for line in lines)
    assert len(versions) == len(lines), "a package is pinned twice"
    return versions


# what the Dockerfile says


@pytest.mark.parametrize("image", IMAGES)
def test_an_image_names_the_capabilities_that_are_served_and_no_other(image):
    """SageMaker reads two labels; the one of bidirectional streaming would promise a route that is not there."""
    prefix = "com.amazonaws.sagemaker.capabilities."

    assert STAGES[image].pairs("LABEL") == {f"{prefix}multi-models": "true", f"{prefix}accept-bind-to-port": "true"}


@pytest.mark.parametrize("image", IMAGES)
def test_an_image_runs_the_command_itself_as_root(image):
    """The entry point is in exec form, so that signals arrive, and `docker run IMAGE serve` is what CMD says anyway."""
    scripts = _setup()["options.entry_points"]["console_scripts"]

    assert STAGES[image].argv("ENTRYPOINT") == ["mme"]
    assert STAGES[image].argv("CMD") == ["serve"]
    assert re.search(r"^mme = container\.cli\.main:main$", scripts, re.MULTILINE)
    assert STAGES[image].every("USER") == []


@pytest.mark.parametrize("image", IMAGES)
def test_the_last_stage_of_an_image_builds_nothing(image):
    """What it adds to a Python is its bytecode, an environment and one wheel: no compiler, no package manager's cache."""
    steps = [step for stage in STAGES[image].lineage() for step in stage.steps]
    assert STAGES[image].lineage()[0].base == "python:3.11-slim-bookworm"
    assert [text for word, text in steps if word in {"COPY", "ADD"}] == [
        f"--from={image}-dependencies /opt/mme /opt/mme"
    ]
    compiled, run = [text for word, text in steps if word == "RUN"]
    assert re.fullmatch(r"python -m compileall -q -x '\S+' /usr/local/lib", compiled)
    assert dockerfile.pip_commands(run) == [["install", "--no-cache-dir", "--no-deps", "/dist/*.whl"]]
    assert STAGES[image].pairs("ENV")["PYTHONUNBUFFERED"] == "1"
    assert STAGES[image].pairs("ENV")["MME_HOST"] == "0.0.0.0"


def test_the_gpu_image_asks_for_a_driver():
    """NVIDIA's container runtime mounts the driver's libraries where these variables are set."""
    environment = STAGES["gpu"].pairs("ENV")

    assert environment["NVIDIA_VISIBLE_DEVICES"] == "all"
    assert set(environment["NVIDIA_DRIVER_CAPABILITIES"].split(",")) == {"compute", "utility"}


def test_a_build_without_a_target_makes_the_cpu_image():
    """The tests that stand between do not become what people deploy."""
    assert STAGES[""].lineage()[-2:] == [STAGES["cpu"], STAGES[""]]
    assert STAGES[""].steps == []


@pytest.mark.parametrize("stage", [stage for name, stage in STAGES.items() if name], ids=lambda stage: stage.name)
def test_pip_installs_only_pinned_versions_and_keeps_no_cache(stage):
    """Each `pip install` is held to constraints.txt or takes nothing but a file of ours."""
    cacheless = stage.pairs("ENV").get("PIP_NO_CACHE_DIR") == "1"
    commands = [command for word, text in stage.steps if word == "RUN" for command in dockerfile.pip_commands(text)]
    for command in (command for command in commands if command[0] != "uninstall"):
        constrained = "-c" in command and command[command.index("-c") + 1] == "constraints.txt"
        assert constrained or (command[-1] in {".", "/dist/*.whl"} and "--no-deps" in command), command
        assert not command[-1].startswith(".") or "--no-build-isolation" in command, command  # else pip picks a builder
        assert cacheless or "--no-cache-dir" in command, command


def test_what_tests_of_the_contract_read_is_copied_beside_them():
    """The folders of the project that they name: an image without one fails its own check."""
    text = "\n".join(path.read_text() for path in (ROOT / "tests" / "contract").glob("*.py"))
    copied = {source for step in STAGES["check"].every("COPY") for source in step.split()[:-1]}

    assert {"docs", "examples"} <= set(re.findall(r'ROOT / "(\w+)"', text)) <= copied


def test_what_is_copied_is_there_and_nothing_else_is_sent():
    """Every COPY finds its source in the context; secrets, environments and repositories stay out of it."""
    sources = {
        source
        for stage in STAGES.values()
        for word, text in stage.steps
        if word == "COPY" and not text.startswith("--from")
        for source in text.split()[:-1]
    }
    for source in sources:
        assert (ROOT / source).exists(), source
        assert dockerfile.in_context(IGNORED, source), source
    for path in (".git/config", ".venv/bin/python", ".env", ".demo/models/a", "serve/__pycache__/a.pyc", "build/x"):
        assert not dockerfile.in_context(IGNORED, path), path
    assert {pattern[1:] for pattern in IGNORED if pattern.startswith("!")} == sources


# what is pinned


def test_everything_that_an_installation_asks_for_is_pinned():
    """Each requirement of setup.cfg has one version in constraints.txt, and one that it allows."""
    options = _setup()
    texts = [options["options"]["install_requires"], *options["options.extras_require"].values()]
    requirements = [Requirement(line) for text in texts for line in text.split("\n") if line]
    versions = pins()
    for requirement in requirements:
        name = canonicalize_name(requirement.name)
        if name not in NOT_PINNED:
            assert requirement.specifier.contains(versions[name]), requirement


def test_what_is_tested_is_what_ships():
    """The packages that the image depends on are installed here in the versions that it gets."""
    direct = [*_setup()["options"]["install_requires"].split(), "onnxruntime"]
    names = [canonicalize_name(Requirement(line).name) for line in direct]
    versions = pins()

    assert {name: importlib.metadata.version(name) for name in names} == {name: versions[name] for name in names}


# what the steps make


@pytest.fixture(scope="module", name="build")
def _build(tmp_path_factory):
    """The CPU image's file system, from the files that a build would be sent."""
    folder = tmp_path_factory.mktemp("image")
    context = folder / "context"
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    for name in [name for name in listed.split("\0") if name and dockerfile.in_context(IGNORED, name)]:
        if (ROOT / name).exists():
            (context / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, context / name)
    build = dockerfile.Build(folder / "root", context, STAGES)
    build.environment = build.make(STAGES["cpu"])
    return build


def wheel_of(build):
    """The wheel of mme that was built."""
    (wheel,) = (build.folder / "dist").glob("*.whl")
    return wheel


@pytest.mark.long
def test_the_wheel_carries_every_module_and_no_test(build):
    """All of the three packages, what they read and that they are typed; nothing beside them but what is compiled."""
    carried = {name for name in zipfile.ZipFile(wheel_of(build)).namelist() if ".dist-info/" not in name}
    compiled = {name for name in carried if name.endswith(".so")}
    wanted = {
        str(path.relative_to(build.context))
        for package in PACKAGES
        for path in (build.context / package).rglob("*")
        if path.suffix in {".py", ".pyi", ".proto", ".html", ".css", ".js"} or path.name == "py.typed"
    }

    assert carried - compiled == wanted
    modules = {
        "container/inference/http",
        "serve/request",
        *(f"{package}/compiled__mypyc" for package in PACKAGES),
    }
    assert modules <= {name.partition(".")[0] for name in compiled} if dockerfile.COMPILES else not compiled
    assert {"container/codec/decode.py", "container/http1/server.py", "serve/model/batcher.py"} <= wanted
    assert {"container/observe/templates/dashboard.html", "container/observe/static/draw.js"} <= wanted
    assert {"model_handlers/proto/model_config.proto", *(f"{package}/py.typed" for package in PACKAGES)} <= wanted


@pytest.mark.long
def test_the_image_holds_what_mme_needs_in_the_pinned_versions(build):
    """mme, what it depends on and ONNX Runtime, each as constraints.txt says; no test or build tool came along."""
    listed = subprocess.run(
        [build.folder / "opt/mme/bin/pip", "list", "--format=json"], capture_output=True, check=True
    ).stdout
    installed = {canonicalize_name(row["name"]): row["version"] for row in json.loads(listed)}
    assert installed.pop("mme") == _setup()["metadata"]["version"]
    installed.pop("pip")  # the one of the base image's Python
    versions = pins()

    assert installed == {name: versions.get(name) for name in installed}
    assert "onnxruntime" in installed
    assert not {"pytest", "onnx", "moto", "mypy", "grpcio-tools"} & set(installed)


@pytest.mark.long
def test_the_image_serves_and_ends_on_sigterm(build, tmp_path):
    """Started as SageMaker does, in an empty folder: healthy, without models, loads and runs one, ends with 0."""
    port = _free_port()
    environment = build.environment | {"SAGEMAKER_MULTI_MODEL": "true", "SAGEMAKER_BIND_TO_PORT": str(port)}
    environment["HOME"] = environment["TMPDIR"] = str(tmp_path)
    command, *arguments = STAGES["cpu"].argv("ENTRYPOINT") + STAGES["cpu"].argv("CMD")
    empty = tmp_path / "empty"
    empty.mkdir()
    program = shutil.which(command, path=environment["PATH"])
    with subprocess.Popen(
        [program, *arguments], cwd=empty, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as server:
        try:
            seen = _until(server, "Listening at")
            assert _ask(port, "GET", "/ping") == (200, None), seen
            assert _health(environment) == 0
            assert _ask(port, "GET", "/models") == (200, {"models": []})
            assert _ask(port, "POST", "/models", {"model_name": "same", "url": str(_model(tmp_path))})[0] == 200
            tensor = {"name": "x", "shape": [1, 2], "datatype": "FP32", "data": [1.5, 2.5]}
            status, answer = _ask(port, "POST", "/models/same/invoke", {"inputs": [tensor]})
            assert (status, answer["outputs"][0]["data"]) == (200, [1.5, 2.5])
        finally:
            server.send_signal(signal.SIGTERM)
            log = server.stdout.read()
    assert server.returncode == 0, log
    assert _health(environment) != 0
    assert list(empty.iterdir()) == []


def _health(environment: dict[str, str]) -> int:
    """What HEALTHCHECK's command says, run as an engine does: with the image's environment."""
    command, *arguments = STAGES["cpu"].health_check()
    program = shutil.which(command, path=environment["PATH"])
    return subprocess.run([program, *arguments], env=environment, capture_output=True, check=False).returncode


def _until(server: subprocess.Popen, text: str) -> str:
    """Read the log up to the first line that holds the text; the end of the log fails."""
    seen = ""
    for line in server.stdout:
        seen += line
        if text in line:
            return seen
    raise AssertionError(seen)


def _ask(port: int, method: str, path: str, body: dict | None = None):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        headers = {"Content-Type": "application/json"} if body else {}
        connection.request(method, path, json.dumps(body) if body else None, headers)
        response = connection.getresponse()
        return response.status, json.loads(response.read() or "null")
    finally:
        connection.close()


def _model(folder: Path) -> Path:
    """A model that answers what it is asked, where SageMaker would have unpacked it."""
    tensors = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 2]) for name in ("x", "y")]
    graph = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "same", tensors[:1], tensors[1:])
    version = folder / "same" / "model" / "same" / "1"
    version.mkdir(parents=True)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)
    onnx.save(model, version / "model.onnx")
    return version.parents[1]


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def _setup() -> configparser.ConfigParser:
    options = configparser.ConfigParser()
    options.read(ROOT / "setup.cfg")
    return options
