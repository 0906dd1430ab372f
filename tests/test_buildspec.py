"""What CodeBuild would do with the buildspec: its commands, run with an engine and an AWS that write down what they hear."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
import yaml

from tests import dockerfile

ROOT = Path(__file__).parents[1]
STAGES = dockerfile.stages(ROOT / "Dockerfile")
REGISTRY = "123456789012.dkr.ecr.eu-central-1.amazonaws.com"

_AWS = """\
case "$*" in
  *get-caller-identity*) echo 123456789012 ;;
  *get-login-password*) echo password ;;
  *) exit 1 ;;
esac
"""
_DOCKER = """\
echo "$*" >> "$LOG"
if [ -n "$FAIL" ]; then case "$*" in *"$FAIL"*) exit 1 ;; esac; fi
case "$*" in
  login*) grep -q password ;;
  *Health*) echo healthy ;;
  *ExitCode*) echo 0 ;;
  *--detach*) echo container ;;
esac
"""
_PHASES = """\
set -e
{pre_build}
set +e
(
set -e
{build}
)
[ $? = 0 ]; CODEBUILD_BUILD_SUCCEEDING=$((1 - $?))
set -e
{post_build}
"""


@pytest.fixture(name="codebuild")
def _codebuild(tmp_path):
    """Runs the phases with an engine and an AWS that only write down what they are told; post_build runs in any case.

    Give it a part of the engine's command that is to fail; it returns whether all went well, and the commands.
    """
    spec = yaml.safe_load((ROOT / "buildspec.yml").read_text())
    phases = {name: "\n".join(phase["commands"]) for name, phase in spec["phases"].items()}
    assert list(phases) == ["pre_build", "build", "post_build"]
    assert (spec["version"], spec["env"]["shell"]) == (0.2, "bash")
    for name, text in {"aws": _AWS, "docker": _DOCKER}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}")
        (tmp_path / name).chmod(0o755)

    def run(fail: str = "", **more: str) -> tuple[bool, list[str]]:
        environment = {
            **spec["env"]["variables"],
            "PATH": f"{tmp_path}:{os.environ['PATH']}",
            "LOG": str(tmp_path / "log"),
            "FAIL": fail,
            "AWS_REGION": "eu-central-1",
            "CODEBUILD_RESOLVED_SOURCE_VERSION": "c0ffee",
            **more,
        }
        script = _PHASES.format(**phases)
        done = subprocess.run(["bash", "-c", script], cwd=ROOT, env=environment, capture_output=True, check=False)
        log = tmp_path / "log"
        return done.returncode == 0, log.read_text().splitlines() if log.exists() else []

    return run


def test_codebuild_builds_checks_and_pushes_both_images(codebuild):
    """Every image is built from a stage that exists, checked, and only then pushed, under the commit's name."""
    well, commands = codebuild()
    images = [f"{REGISTRY}/mme:c0ffee", f"{REGISTRY}/mme:c0ffee-gpu"]
    built = [command for command in commands if command.startswith("build")]
    assert well
    assert commands[0] == f"login --username AWS --password-stdin {REGISTRY}"
    assert [re.search(r"--target (\w+) --tag (\S+)", command).groups() for command in built] == [
        ("cpu", images[0]),
        ("gpu", images[1]),
        ("check", "mme-check"),
    ]
    assert all(re.search(r"--target (\w+)", command)[1] in STAGES for command in built)
    assert all(re.search(r"--build-arg PYTHON_IMAGE=\S+/python:3\.11-slim-bookworm ", command) for command in built)
    assert "run --rm --init mme-check" in commands
    for image in images:
        assert f"run --detach --env SAGEMAKER_MULTI_MODEL=true {image} serve" in commands
    assert commands[-2:] == [f"push {image}" for image in images]


@pytest.mark.parametrize(
    "fail", ["--target gpu", "--version", "--detach", "run --rm --init mme-check", "stop", "login"]
)
def test_codebuild_pushes_nothing_when_a_step_fails(codebuild, fail):
    """An image that does not build, start, pass or stop reaches no registry."""
    well, commands = codebuild(fail)

    assert not well
    assert not [command for command in commands if command.startswith("push")]


def test_codebuild_takes_its_registry_and_repository_from_variables(codebuild):
    """A registry of another account and a repository of another name are used as they are given."""
    _, commands = codebuild(REGISTRY="1.dkr.ecr.eu-west-1.amazonaws.com", REPOSITORY="team/serving")

    assert commands[-1] == "push 1.dkr.ecr.eu-west-1.amazonaws.com/team/serving:c0ffee-gpu"


def test_codebuild_wants_a_commit(codebuild):
    """Without a commit there is no name for an image, and nothing is built."""
    assert codebuild(CODEBUILD_RESOLVED_SOURCE_VERSION="") == (False, [])
