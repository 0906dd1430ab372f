"""The flags and examples of the commands that take a model file to a live endpoint. Imports nothing heavy.

`container.cli.main` makes its parsers from COMMANDS; what a command does is in the module that its row names.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from container.cli.command import DAY, DEFAULT_URL, Command, add_identity, number, pairs, seconds, whole

__all__ = ["COMMANDS", "DEFAULT_URL", "pairs"]

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


def _hosts(text: str) -> tuple[str, ...]:
    from container.settings.protocol_values import hosts  # noqa: PLC0415 - with it come all settings

    try:
        return hosts(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"expected {error}") from None


def _add_local_flags(parser: argparse.ArgumentParser) -> None:
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


_PUSH_EXAMPLES = """\
examples:
  mme push bert-0.tar.gz bert-1.tar.gz s3://my-bucket/models
      what is there with the same content is skipped; another archive under the same name is not overwritten
  mme push archives/*.tar.gz s3://my-bucket/models --dry-run
"""
_DEPLOY_EXAMPLES = """\
examples:
  mme deploy bert --models s3://my-bucket/models --role SageMakerRole --instance-type ml.g5.xlarge \\
      --image 123456789012.dkr.ecr.eu-central-1.amazonaws.com/mme:0.1.0
      a multi-model endpoint; waits until it is in service, and tells why if it fails
  mme deploy bert ... --autoscale 1..4 --target-invocations 600 --alarms --dashboard
      with scaling, CloudWatch alarms and a CloudWatch dashboard
  mme deploy bert ... --dry-run
      the API calls, word for word, and none of them made
  mme deploy one --single s3://my-bucket/models/bert-0.tar.gz ...
      an endpoint of a single model, on any instance type
"""
_UPDATE_EXAMPLES = """\
examples:
  mme update bert --image 123456789012.dkr.ecr.eu-central-1.amazonaws.com/mme:2
      the rest stays as it is; requests move to the new instances when they are healthy, and none is lost
  mme update bert --instance-type ml.g5.2xlarge --canary 10 --bake-seconds 600
      a tenth of the capacity first; the alarms of `mme deploy --alarms` call it back
"""
_DELETE_EXAMPLES = """\
examples:
  mme delete bert --dry-run       what was made for it, whole or half made
  mme delete bert --yes           take that down, and nothing else; archives in S3 stay
"""


def _add_push_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("archives", type=Path, nargs="+", metavar="ARCHIVE", help="made by `mme pack`")
    parser.add_argument(
        "destination", metavar="s3://BUCKET/PREFIX", help="where they go; a key where it ends in .tar.gz"
    )
    parser.add_argument("--force", action="store_true", help="overwrite other archives of the same names")
    parser.add_argument("--dry-run", action="store_true", help="say what would be done")
    _add_region(parser)


def _add_deploy_flags(parser: argparse.ArgumentParser) -> None:
    _add_deployed(parser, otherwise="1", host_image="one for CUDA 13")
    parser.add_argument("--tag", metavar="NAME=VALUE", action="append", help="a tag for all that is made; repeatable")
    text = "in which the container is, with --security-group; repeatable"
    parser.add_argument("--subnet", metavar="ID", action="append", help=text)
    parser.add_argument("--security-group", metavar="ID", action="append", help="of the container; repeatable")
    parser.add_argument("--no-model-cache", action="store_true", help="unload each model after use: ModelCacheSetting")
    parser.add_argument("--volume-gb", type=whole(1, 512), default=0, metavar="GB", help="size of each instance's disk")
    text = "how long the container may take to be healthy, 60 to 3600"
    parser.add_argument("--startup-seconds", type=whole(60, 3600), default=0, metavar="SECONDS", help=text)
    parser.add_argument("--async-output", metavar="S3URI", help="an asynchronous endpoint; its answers go here")
    parser.add_argument("--autoscale", metavar="LEAST..MOST", help="scale between so many instances, as in 1..4")
    text = "requests a minute and instance that scaling aims at; default 600"
    parser.add_argument("--target-invocations", type=number(1, 1_000_000_000), default=0.0, metavar="N", help=text)
    parser.add_argument("--alarms", action="store_true", help="CloudWatch alarms: errors, latency, memory, thrashing")
    parser.add_argument("--alarm-topic", metavar="ARN", help="the SNS topic that they tell; means --alarms")
    parser.add_argument("--dashboard", action="store_true", help="a CloudWatch dashboard, called mme-NAME")


def _add_update_flags(parser: argparse.ArgumentParser) -> None:
    _add_deployed(parser, otherwise="as many as there are", host_image="what it was, or one for CUDA 13")
    parser.add_argument("--canary", type=int, default=0, metavar="PERCENT", help="move so much capacity first, 1 to 50")
    text = "how long the first of the new ones are watched; default 60"
    parser.add_argument("--bake-seconds", type=whole(0, 3600), default=60, metavar="SECONDS", help=text)
    parser.add_argument("--keep-old", action="store_true", help="keep the old model and configuration")


def _add_deployed(parser: argparse.ArgumentParser, *, otherwise: str, host_image: str) -> None:
    """What both making and changing take; how many instances, and of which image, where nothing is said."""
    parser.add_argument("name", metavar="NAME", help="the endpoint")
    parser.add_argument("--models", metavar="S3URI", help="the prefix with the archives of a multi-model endpoint")
    parser.add_argument("--single", metavar="S3URI", help="the archive of an endpoint of one model")
    parser.add_argument("--image", metavar="URI", help="the container's image, in ECR")
    parser.add_argument("--instance-type", metavar="TYPE", help="such as ml.g5.xlarge")
    text = "try a type that is not on the list of those that SageMaker runs multi-model endpoints on"
    parser.add_argument("--any-instance-type", action="store_true", help=text)
    text = f"InferenceAmiVersion, which has the GPU's driver: {host_image} unless told, `default` for SageMaker's own"
    parser.add_argument("--host-image", metavar="NAME", help=text)
    parser.add_argument("--instances", type=whole(1, 1000), metavar="N", help=f"how many; default {otherwise}")
    parser.add_argument("--role", metavar="ARN|NAME", help="the IAM role that the container runs as")
    parser.add_argument("--env", metavar="NAME=VALUE", action="append", help="a variable for the container; repeatable")
    parser.add_argument("--dry-run", action="store_true", help="print the API calls and make none of them")
    parser.add_argument("--no-wait", action="store_true", help="do not wait until the endpoint is in service")
    _add_region(parser)


def _add_delete_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help="the endpoint")
    parser.add_argument("--dry-run", action="store_true", help="list it and delete nothing")
    parser.add_argument("--yes", action="store_true", help="do not ask")
    _add_region(parser)


def _add_region(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--region", help="the AWS region; boto3's own choice by default")


_PACK_EXAMPLES = """\
examples:
  mme pack repository/bert-0 -o bert-0.tar.gz     a Triton model directory: config.pbtxt and versions
  mme pack resnet.onnx --name resnet50            a bare file becomes resnet50/1/model.onnx, and gets a config.pbtxt
  mme pack traced.pt --config config.pbtxt        a file that does not tell its shapes, and what does
  mme pack customers/*.json -o archives           an archive of each, in a folder that is there
  mme pack bert.onnx --copies 50                  bert-0.tar.gz to bert-49.tar.gz, a fleet to try things with
  mme pack search -o search.tar.gz                several models: the one with parameter MME_ENTRY calls the others
  mme pack pre bert.onnx post --ensemble pre,bert,post -o pipeline.tar.gz
      models one behind the other, wired by the names of their tensors
"""


def _add_pack_flags(parser: argparse.ArgumentParser) -> None:
    sources = "model directories, a folder of several, or files of ONNX, PyTorch, TensorRT, TensorFlow, OpenVINO, trees"
    parser.add_argument("models", type=Path, nargs="+", metavar="MODEL", help=f"{sources}; model.py, inference.py")
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="FILE|DIR",
        help="the archive; NAME.tar.gz by default; into a folder goes an archive of each model",
    )
    parser.add_argument("--name", help="the model's name; that of the directory or file by default")
    parser.add_argument("--config", type=Path, metavar="FILE", help="the config.pbtxt of a bare file")
    parser.add_argument("--ensemble", metavar="MODEL,MODEL...", help="run these one behind the other, as one model")
    parser.add_argument("--copies", type=int, default=1, metavar="N", help="the same as NAME-0 to NAME-(N-1)")
    parser.add_argument("--level", type=int, default=1, help="0 (fastest) to 3 (smallest); default 1")


_INVOKE_EXAMPLES = """\
examples:
  mme invoke my-endpoint --target bert-0.tar.gz --json request.json      boto3, on AWS
  mme invoke --local http://localhost:8080 --target bert-0.tar.gz --json -      boto3, against `mme local`
  mme invoke --target iris.tar.gz --json '{"inputs":[{"name":"X","shape":[1,4],"datatype":"FP32","data":[5,3,1,0]}]}'
  mme invoke --url http://localhost:9000 --target resnet.tar.gz --npy input=image.npy --output scores.npz
  mme invoke --target pipeline.tar.gz --text TEXT=sentences.txt     a line is an element of a tensor [lines, 1]
  mme invoke --target script.tar.gz --body rows.csv                  the content type is what its name tells
"""
_BENCH_EXAMPLES = """\
examples:
  mme bench http://localhost:8080 --target bert-0.tar.gz --json request.json
  mme bench my-endpoint --target 'bert-{0..49}.tar.gz' --zipf 1.1 --npy input=image.npy --concurrency 1,8,32
      fifty models, some asked for more than others
  mme bench --local http://localhost:8080 --target bert-0.tar.gz --json request.json --seconds 30 --png bench.png
"""


def _add_invoke_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", metavar="ENDPOINT", help="call this SageMaker endpoint through boto3")
    _add_sender(parser)
    parser.add_argument("--endpoint", metavar="NAME", help="the same as ENDPOINT")
    parser.add_argument("--target", metavar="NAME", help="the model: TargetModel, such as bert-0.tar.gz")
    _add_request(parser)
    parser.add_argument("--inference-id", metavar="ID", help="an id that the server logs")
    text = "write the answer here, as it came; its tensors as arrays where the name ends in .npz"
    parser.add_argument("--output", type=Path, metavar="FILE", help=text)


def _add_bench_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("where", nargs="?", metavar="URL|ENDPOINT", help="a server or `mme local`, or boto3 on AWS")
    _add_sender(parser)
    text = "a model; repeatable, and bert-{0..49}.tar.gz names fifty"
    parser.add_argument("--target", metavar="NAME", action="append", help=text)
    _add_request(parser)
    parser.add_argument("--concurrency", default="1,2,4,8,16", metavar="N,N...", help="clients; default 1,2,4,8,16")
    parser.add_argument("--seconds", type=float, default=5.0, metavar="S", help="for each of them; default 5")
    text = "ask for some models more than for others, with this exponent; by default for all alike"
    parser.add_argument("--zipf", type=number(0, 100), default=0.0, metavar="S", help=text)
    parser.add_argument("--png", type=Path, metavar="FILE", help="draw the figures into a picture")
    parser.add_argument("--report", type=Path, metavar="FILE", help="write the figures as JSON")


def _add_sender(parser: argparse.ArgumentParser) -> None:
    """Where requests go."""
    text = f"a server over plain HTTP, or `mme local`, which is asked through boto3; default {DEFAULT_URL}"
    parser.add_argument("--url", help=text)
    parser.add_argument("--local", metavar="URL", help="boto3 against this server, whatever it is")
    parser.add_argument("--timeout", type=seconds, default=70.0, metavar="SECONDS", help="default 70")
    add_identity(parser)
    _add_region(parser)


def _add_request(parser: argparse.ArgumentParser) -> None:
    """What is sent."""
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--json", metavar="FILE", help="a KServe v2 request: a file, - for standard input, or the JSON")
    text = "an input tensor out of a .npy file; may be repeated"
    what.add_argument("--npy", metavar="INPUT=FILE", action="append", help=text)
    text = "an input tensor of a text's lines, or without INPUT= the text as it is; may be repeated"
    what.add_argument("--text", metavar="[INPUT=]FILE", action="append", help=text)
    what.add_argument("--body", metavar="FILE", help="any body, for models that read them: CSV, images, ...")
    parser.add_argument("--content-type", metavar="TYPE", help="of --body and --text; else by the name of --body")
    parser.add_argument("--accept", metavar="TYPE", help="the content type that is wanted back")


COMMANDS = (
    Command(
        "pack",
        "make a .tar.gz that a multi-model endpoint can load",
        _PACK_EXAMPLES,
        _add_pack_flags,
        "container.ship.pack:run",
    ),
    Command(
        "local",
        "run a SageMaker endpoint on this machine, for boto3",
        _LOCAL_EXAMPLES,
        _add_local_flags,
        "container.local.command:run",
    ),
    Command(
        "invoke",
        "send one request and print the answer",
        _INVOKE_EXAMPLES,
        _add_invoke_flags,
        "container.ship.invoke:run",
    ),
    Command(
        "bench",
        "measure a server or an endpoint: rates and latencies by concurrency",
        _BENCH_EXAMPLES,
        _add_bench_flags,
        "container.ship.bench:run",
    ),
    Command("push", "upload archives to S3", _PUSH_EXAMPLES, _add_push_flags, "container.ship.push:run"),
    Command(
        "deploy", "make an endpoint on SageMaker", _DEPLOY_EXAMPLES, _add_deploy_flags, "container.ship.deploy:run"
    ),
    Command(
        "update",
        "bring something new behind an endpoint, without a gap",
        _UPDATE_EXAMPLES,
        _add_update_flags,
        "container.ship.deploy:run_update",
    ),
    Command(
        "delete",
        "take down what `mme deploy` made",
        _DELETE_EXAMPLES,
        _add_delete_flags,
        "container.ship.delete:run",
    ),
)
