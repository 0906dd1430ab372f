"""`mme local`: the endpoint on a laptop, for boto3; SageMaker's part towards any container.

What SageMaker would refuse is a RuntimeApiError; what `mme local` can't do itself an MmeError, as of every command.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from container.cli import DAY, Command, add_identity, number, whole

_EXAMPLES = """\
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


def _hosts(text: str) -> tuple[str, ...]:
    from container.settings.parsers import hosts  # noqa: PLC0415 - with it come all settings

    try:
        return hosts(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"expected {error}") from None


def _add_flags(parser: argparse.ArgumentParser) -> None:
    sources = "s3://bucket/prefix or a folder of archives; one .tar.gz is an endpoint of a single model"
    parser.add_argument("source", metavar="S3URI|DIR|ARCHIVE", help=sources)
    parser.add_argument("--endpoint", metavar="NAME", help="the only endpoint name that is answered; any by default")
    parser.add_argument("--host", default="127.0.0.1", help="where to listen; default 127.0.0.1")
    parser.add_argument("--port", type=whole(0, 65535), default=8080, help="default 8080; 0 for any")
    parser.add_argument(
        "--allowed-hosts",
        type=_hosts,
        default=os.environ.get("MME_ALLOWED_HOSTS", "") or (),
        metavar="NAME,…",
        help="hosts besides localhost that it answers to on loopback, and whose pages may ask [MME_ALLOWED_HOSTS]",
    )
    what = "play SageMaker towards this container instead of mme's own: where it listens, or how to start it"
    parser.add_argument(
        "--emulate-platform", metavar="URL|COMMAND", help=f"{what}; {{port}} and {{models}} are filled in"
    )
    add_identity(parser)
    parser.add_argument("--env", metavar="NAME=VALUE", action="append", help="a variable for the container; repeatable")
    parser.add_argument(
        "--container-port", type=whole(1, 65535), metavar="PORT", help="where a started container listens; any"
    )
    parser.add_argument("--unpack-to", type=Path, metavar="DIR", help="where archives are unpacked; a temporary folder")
    parser.add_argument(
        "--mounted-at", metavar="PATH", help="what the container calls that folder; the same by default"
    )
    parser.add_argument("--no-model-cache", action="store_true", help="unload each model after use: ModelCacheSetting")
    parser.add_argument(
        "--throttle", type=number(0, 1_000_000), default=0.0, metavar="N", help="requests a second; default all"
    )
    parser.add_argument("--async-output", metavar="S3URI", help="take asynchronous invocations; answers go here")
    parser.add_argument("--async-failure", metavar="S3URI", help="where their errors go; the same by default")
    parser.add_argument(
        "--async-workers", type=whole(1, 1000), default=4, metavar="N", help="of them at a time; default 4"
    )
    for flag, limit, help_text in (
        ("--invocation-seconds", 60.0, "how long a request may take, a load included"),
        ("--load-seconds", 360.0, "how long download and load may take"),
        ("--startup-seconds", 480.0, "how long the container may take to be healthy"),
    ):
        text = f"{help_text}; SageMaker's {limit:.0f} by default"
        parser.add_argument(flag, type=number(0, DAY), default=limit, metavar="SECONDS", help=text)


def run(arguments: argparse.Namespace) -> int:
    from container.local import running  # noqa: PLC0415 - boto3, and all of the server

    return running.run(arguments)


COMMAND = Command("local", "run a SageMaker endpoint on this machine, for boto3", _EXAMPLES, _add_flags, run)
