"""The flags and examples of the commands that take a model file to a live endpoint. Imports nothing heavy.

`container.cli` makes its parsers from COMMANDS; what a command does is in the module that its row names.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

DEFAULT_URL = "http://127.0.0.1:8080"


class Command(NamedTuple):
    """A command: its name, a line of help, examples, its flags, and `module:function` that runs it."""

    name: str
    summary: str
    examples: str
    add_flags: Callable[[argparse.ArgumentParser], None]
    run: str


_LOCAL_EXAMPLES = """\
examples:
  mme local s3://my-bucket/models --endpoint bert
      a multi-model endpoint on this machine, for boto3.client("sagemaker-runtime", endpoint_url=...)
  mme local ./archives --port 9000 --throttle 50
      the same from a folder; more than 50 requests a second are throttled
  mme local ./bert.tar.gz --async-output s3://my-bucket/answers
      an endpoint of one model, which takes invoke_endpoint_async too
  mme local ./archives --emulate-platform http://localhost:8000 --unpack-to /opt/ml/models
      SageMaker's part towards a container that runs already
  mme local ./archives --mounted-at /opt/ml/models --emulate-platform \\
      'docker run --rm -p {port}:8080 -v {models}:/opt/ml/models -e SAGEMAKER_MULTI_MODEL=true my-image serve'
      towards any image that speaks the multi-model contract, Triton's included
"""


def _add_local_flags(parser: argparse.ArgumentParser) -> None:
    sources = "s3://bucket/prefix or a folder of archives; one .tar.gz is an endpoint of a single model"
    parser.add_argument("source", metavar="S3URI|DIR|ARCHIVE", help=sources)
    parser.add_argument("--endpoint", metavar="NAME", help="the only endpoint name that is answered; any by default")
    parser.add_argument("--host", default="127.0.0.1", help="where to listen; default 127.0.0.1")
    parser.add_argument("--port", type=int, default=8080, help="default 8080; 0 for any")
    what = "play SageMaker towards this container instead of mme's own: where it listens, or how to start it"
    parser.add_argument(
        "--emulate-platform", metavar="URL|COMMAND", help=f"{what}; {{port}} and {{models}} are filled in"
    )
    parser.add_argument("--env", metavar="NAME=VALUE", action="append", help="a variable for the container; repeatable")
    parser.add_argument("--container-port", type=int, metavar="PORT", help="where a started container listens; any")
    parser.add_argument("--unpack-to", type=Path, metavar="DIR", help="where archives are unpacked; a temporary folder")
    parser.add_argument(
        "--mounted-at", metavar="PATH", help="what the container calls that folder; the same by default"
    )
    parser.add_argument("--throttle", type=float, default=0.0, metavar="N", help="requests a second; default all")
    parser.add_argument("--async-output", metavar="S3URI", help="take asynchronous invocations; answers go here")
    parser.add_argument("--async-failure", metavar="S3URI", help="where their errors go; the same by default")
    parser.add_argument("--async-workers", type=int, default=4, metavar="N", help="of them at a time; default 4")
    for flag, seconds, help_text in (
        ("--invocation-seconds", 60.0, "how long a request may take, a load included"),
        ("--load-seconds", 360.0, "how long download and load may take"),
        ("--startup-seconds", 480.0, "how long the container may take to be healthy"),
    ):
        text = f"{help_text}; SageMaker's {seconds:.0f} by default"
        parser.add_argument(flag, type=float, default=seconds, metavar="SECONDS", help=text)


COMMANDS = (
    Command(
        "local",
        "run a SageMaker endpoint on this machine, for boto3",
        _LOCAL_EXAMPLES,
        _add_local_flags,
        "container.local.command:run",
    ),
)
