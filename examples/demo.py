"""The main job, from models to meaning, on this machine alone.

    python -m examples.demo [--rounds N] [--keep-running] [--folder .demo]

1. builds nine real models and the examples of Python models, and packs them (kept in .demo/, so that a second run
   starts at once);
2. starts an S3 server on loopback and uploads the archives;
3. starts the container's own command `serve` on that store, with memory for about three of the five encoders;
4. calls it with plain boto3, as one calls an endpoint on AWS: models load when they are asked for and leave when
   memory is short, and a table shows each request as it is answered;
5. sends text to models that consist of several, and finds the sentences that answer questions;
6. has a model count, and shows each number as it comes;
7. sends rows of CSV to a script of scikit-learn, and shows the digits that it reads.

The servers are in `demo_servers`, the calls in `demo_client`, the sections on Python models in `demo_sections`, the
screen in `demo_screen`.
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np
from botocore.exceptions import BotoCoreError, ClientError
from rich.console import Console

from examples import classifiers, demo_screen, demo_sections
from examples.build_models import CLASSIFIERS, ENCODERS, EVERYTHING, MODELS, build_all
from examples.demo_client import BINARY_TYPE, ENDPOINT_NAME, Endpoint
from examples.demo_servers import REGION, STORE, Container, DemoError, asked_directly, s3_server, upload
from examples.minilm import SentenceTokenizer
from examples.sentences import SENTENCES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from examples.build_models import Layout

MEMORY_BUDGET = "350MB"  # an encoder takes 90 to 130 MB, a classifier next to nothing: room for about three encoders
SKEWED_REQUESTS = 40


def main() -> int:
    """Run the demo; answers the exit code."""
    arguments = _arguments()
    console = Console()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the servers are stopped on the way out
    try:
        return run(arguments, console)
    except KeyboardInterrupt:
        console.print("\nstopped")
        return 130
    except (DemoError, BotoCoreError, ClientError, subprocess.CalledProcessError) as error:
        console.print(f"the demo failed: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        return 1


def run(arguments: argparse.Namespace, console: Console) -> int:
    """The steps, in order. 0 if the server ended as it should."""
    console.rule("1  models")
    layout = build_all(arguments.folder, console)
    # A cache of this run's own: every archive is downloaded anew.
    with asked_directly(), s3_server() as s3_url, TemporaryDirectory(prefix="cache-", dir=arguments.folder) as cache:
        console.rule("2  model store")
        upload([layout.archive(name) for name in EVERYTHING], s3_url, console)
        console.rule("3  container")
        log = arguments.folder / "server.log"
        with Container(
            s3_url=s3_url, memory_budget=MEMORY_BUDGET, cache=Path(cache), log=log, console=console
        ) as container:
            console.print(
                f"serve answers on {container.url}, store {STORE}, {MEMORY_BUDGET} for models", soft_wrap=True
            )
            _use(Endpoint(container.url), layout, arguments.rounds, console)
            if arguments.keep_running:
                _keep_running(container, console)
            exit_code = container.stop()
    console.print(f"the server ended with exit code {exit_code} after SIGTERM")
    return 0 if exit_code == 0 else 1


def _use(endpoint: Endpoint, layout: Layout, rounds: int, console: Console) -> None:
    samples, tally = Samples(), demo_screen.Tally()
    console.rule("4  requests")
    with demo_screen.RequestTable(console, tally) as table:
        for count, (model, binary) in enumerate(plan(rounds)):
            answer = endpoint.invoke(model, samples.tensors(model, count), binary=binary)
            table.add(answer, endpoint.loaded_models())
    demo_screen.show_summary(console, tally)
    if not tally.evictions:
        raise DemoError(f"no model had to leave memory, though there is no room for all in {MEMORY_BUDGET}")
    console.rule("5  text in, embeddings out")
    demo_sections.embed_text(endpoint, layout.model("embedder") / "encoder" / "1" / "model.onnx", console)
    console.rule("6  answers in parts")
    demo_sections.count(endpoint, console)
    console.rule("7  CSV in, JSON out")
    demo_sections.read_digits(endpoint, console)


def plan(rounds: int) -> Iterator[tuple[str, bool]]:
    """Model and whether in binary, request by request.

    First every model in turn, which is the worst order for a cache that keeps what was used last; then as users are,
    most of them after a few favourites.
    """
    for turn in range(rounds):
        for index, model in enumerate(MODELS):
            yield model, (turn + index) % 2 == 0
    popularity = 1.0 / np.arange(1, len(MODELS) + 1) ** 1.2
    favourites = np.random.default_rng(7).choice(MODELS, SKEWED_REQUESTS, p=popularity / popularity.sum())
    for index, model in enumerate(favourites):
        yield str(model), index % 2 == 0


class Samples:
    """Inputs for every model: sentences for the encoders, rows that training never saw for the classifiers."""

    @cached_property
    def tokenizer(self) -> SentenceTokenizer:
        """The encoders' tokenizer."""
        return SentenceTokenizer()

    @cached_property
    def splits(self) -> dict[str, classifiers.Split]:
        """Each classifier's data."""
        return {name: classifiers.split_data(name) for name in CLASSIFIERS}

    def tensors(self, model: str, index: int) -> dict[str, NDArray[Any]]:
        """A batch of one for that model; another `index`, another sample."""
        if model in ENCODERS:
            return dict(self.tokenizer([SENTENCES[index % len(SENTENCES)]]))
        rows = self.splits[model].held_out_features
        return {"features": rows[index % len(rows)][np.newaxis]}


def _keep_running(container: Container, console: Console) -> None:
    console.rule("the server stays; Ctrl-C ends it")
    sample = '{"inputs": [{"name": "features", "shape": [1, 4], "datatype": "FP32", "data": [5.1, 3.5, 1.4, 0.2]}]}'
    console.print(
        f"""\
curl -s {container.url}/invocations -H 'X-Amzn-SageMaker-Target-Model: iris.tar.gz' \\
     -H 'Content-Type: application/json' -d '{sample}'
curl -s {container.url}/models
curl -s {container.url}/metrics

import boto3
runtime = boto3.client("sagemaker-runtime", endpoint_url="{container.url}", region_name="{REGION}",
                       aws_access_key_id="demo", aws_secret_access_key="demo")
response = runtime.invoke_endpoint(EndpointName="{ENDPOINT_NAME}", TargetModel="iris.tar.gz",
                                   ContentType="application/json", Body='{sample}')
print(response["Body"].read())
# with tensors as bytes: ContentType="{BINARY_TYPE}N", N the length of the JSON header before them
""",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )
    container.wait()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, prog="examples.demo", description="Serve nine real models from S3."
    )
    parser.add_argument("--rounds", type=int, default=2, help="times that every model is called in turn (2)")
    parser.add_argument("--keep-running", action="store_true", help="leave the server up until Ctrl-C")
    parser.add_argument("--folder", type=Path, default=Path(".demo"), help="where models and logs are kept (.demo)")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
