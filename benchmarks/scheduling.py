"""What scheduling costs: a batcher over a plain queue, an ensemble over one of its models, many sequences over few.

    python -m benchmarks.scheduling [--seconds 3] [--repeats 3] [--only queue|sequences|batching|ensemble]

The first two parts drive queues alone, without a server; the others are processor time of a server a request, by wrk,
with models that hand their input through, so that what is measured is all scheduling. Reads as differences and ratios;
absolute figures belong to the machine.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import tempfile
import time
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import onnx
from onnx import TensorProto, helper

from benchmarks import load
from benchmarks.sequence_steps import measure_sequences
from benchmarks.servers import mme
from model_handlers.config.model_config import DynamicBatching
from serve.model.batcher import BatchQueue
from serve.request import InferenceRequest, Layout

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.servers import Server

_WIDTH = 16
_PUSHES = 40_000
_ASLEEP = {"MME_BUSY_POLL_MICROSECONDS": "0"}  # what a server uses while it waits is not what a request costs
_MOST_BATCHING_US = 3.0
_MOST_ENSEMBLE = 2.2
_STEP = 'step {{ model_name: "step{n}" input_map {{ key: "X" value: "{x}" }} output_map {{ key: "Y" value: "{y}" }} }}'
_STEPS = " ".join(_STEP.format(n=n, x=x, y=y) for n, x, y in ((1, "X", "a"), (2, "a", "b"), (3, "b", "Y")))
_ENSEMBLE = f"""platform: "ensemble"
max_batch_size: 64
input {{ name: "X" data_type: TYPE_FP32 dims: {_WIDTH} }}
output {{ name: "Y" data_type: TYPE_FP32 dims: {_WIDTH} }}
ensemble_scheduling {{ {_STEPS} }}
"""
_MODELS = {
    "plain": "max_batch_size: 64\n",
    "batched": "max_batch_size: 64\ndynamic_batching {}\n",
    "levels": "max_batch_size: 64\ndynamic_batching { priority_levels: 3 default_priority_level: 2 }\n",
    **{f"step{n}": "max_batch_size: 64\ndynamic_batching {}\n" for n in (1, 2, 3)},
}
_TENSORS = f"""input {{ name: "X" data_type: TYPE_FP32 dims: {_WIDTH} }}
output {{ name: "Y" data_type: TYPE_FP32 dims: {_WIDTH} }}
parameters {{ key: "intra_op_thread_count" value: {{ string_value: "1" }} }}
"""


def build_repository(folder: Path) -> Path:
    """Models that hand X through as Y, and an ensemble of three of them."""
    tensors = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", _WIDTH]) for name in "XY"]
    graph = helper.make_graph([helper.make_node("Identity", ["X"], ["Y"])], "identity", tensors[:1], tensors[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    for name, config in _MODELS.items():
        (folder / name / "1").mkdir(parents=True)
        (folder / name / "config.pbtxt").write_text(config + _TENSORS)
        onnx.save(model, folder / name / "1" / "model.onnx")
    (folder / "ensemble" / "1").mkdir(parents=True)
    (folder / "ensemble" / "config.pbtxt").write_text(_ENSEMBLE)
    return folder


# -- the queue alone -------------------------------------------------------------------------------------------------


def requests(count: int) -> list[InferenceRequest]:
    """Requests of one element, as a model's check of their layout leaves them."""
    layout = Layout((), ())
    made = [InferenceRequest(layout, [], lambda _request, _result: None) for _ in range(count)]
    for number, request in enumerate(made):
        request.signature, request.priority = ((), ()), number % 4
    return made


def through_deque(waiting: list[InferenceRequest]) -> Callable[[], None]:
    """The plainest queue there is: whoever waits, one after the other."""
    queue: deque[InferenceRequest] = deque()

    def turn() -> None:
        for request in waiting:
            queue.append(request)
        while queue:
            queue.popleft()

    return turn


def through_batcher(waiting: list[InferenceRequest], levels: int) -> Callable[[], None]:
    """The dynamic batcher's queue, taken from until it is empty."""
    batching = DynamicBatching((64,), priority_levels=levels, default_priority_level=min(levels, 2))
    queue: BatchQueue[InferenceRequest] = BatchQueue("m", 64, batching)

    def turn() -> None:
        for request in waiting:
            queue.push(request)
        while len(queue):
            queue.take(1)

    return turn


def nanoseconds(turn: Callable[[], None], count: int) -> float:
    """Processor time a request, of the best of five."""
    best = float("inf")
    for _ in range(5):
        began = time.process_time_ns()
        for _ in range(_PUSHES // count):
            turn()
        best = min(best, (time.process_time_ns() - began) / (_PUSHES // count * count))
    return best


def measure_queue() -> None:
    """What the batcher's queue costs over a plain one, by how many requests wait."""
    print("The queue alone, ns of processor time a request\n")
    print("| waiting | plain | batcher | three levels | batcher over plain | levels over plain |")
    print("|---|---|---|---|---|---|")
    for count in (1, 8, 64):
        waiting = requests(count)
        plain = nanoseconds(through_deque(waiting), count)
        one, three = (nanoseconds(through_batcher(waiting, levels), count) for levels in (0, 3))
        print(f"| {count} | {plain:.0f} | {one:.0f} | {three:.0f} | {one - plain:.0f} | {three - plain:.0f} |")
    print(f"\nat most {_MOST_BATCHING_US * 1000:.0f} are allowed over the plain queue\n")


# -- through a server ------------------------------------------------------------------------------------------------


def processor_us(server: Server, model: str, connections: int, seconds: int) -> float:
    """Processor time of the server a request."""
    request = load.binary_request(model, {"X": np.zeros((1, _WIDTH), np.float32)})
    return load.wrk(server.url, request, server.pid, connections=connections, seconds=seconds).cpu


def medians(server: Server, models: tuple[str, ...], connections: int, seconds: int, repeats: int) -> list[float]:
    """Of each model, measured in turn: a machine whose speed drifts cheats all alike."""
    rounds = [[processor_us(server, model, connections, seconds) for model in models] for _ in range(repeats)]
    return [statistics.median(column) for column in zip(*rounds, strict=True)]


def measure_batching(server: Server, seconds: int, repeats: int) -> None:
    """A model without the dynamic batcher, with it, and with priority levels."""
    print("Through a server, µs of its processor time a request\n")
    print("| connections | no batcher | batcher | three levels | batcher over none |")
    print("|---|---|---|---|---|")
    for connections in (1, 32):
        none, one, three = medians(server, ("plain", "batched", "levels"), connections, seconds, repeats)
        print(f"| {connections} | {none:.1f} | {one:.1f} | {three:.1f} | {one - none:+.1f} |", flush=True)
    print(f"\nat most {_MOST_BATCHING_US:+.0f} is allowed\n")


def measure_ensemble(server: Server, seconds: int, repeats: int) -> None:
    """An ensemble of three models, and one of them."""
    print("An ensemble of three, µs of the server's processor time a request\n")
    print("| connections | one model | ensemble | ratio |")
    print("|---|---|---|---|")
    for connections in (1, 32):
        one, three = medians(server, ("step1", "ensemble"), connections, seconds, repeats)
        print(f"| {connections} | {one:.1f} | {three:.1f} | {three / one:.2f} |", flush=True)
    print(f"\nat most {_MOST_ENSEMBLE} is allowed\n")


def main() -> int:
    """Run everything and print Markdown."""
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=int, default=3, help="of each measurement (default 3)")
    parser.add_argument("--repeats", type=int, default=3, help="measurements of which the median counts (default 3)")
    parser.add_argument("--only", choices=("queue", "sequences", "batching", "ensemble"), help="one part")
    arguments = parser.parse_args()
    print(f"{load.setting()}\n")
    if arguments.only in (None, "queue"):
        measure_queue()
    if arguments.only in (None, "sequences"):
        measure_sequences()
    if arguments.only in ("queue", "sequences"):
        return 0
    if shutil.which("wrk") is None:
        print("wrk is not on the PATH; install it (Debian: apt-get install wrk)", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory() as folder, mme(build_repository(Path(folder)), _ASLEEP) as server:
        if arguments.only in (None, "batching"):
            measure_batching(server, arguments.seconds, arguments.repeats)
        if arguments.only in (None, "ensemble"):
            measure_ensemble(server, arguments.seconds, arguments.repeats)
    return 0


if __name__ == "__main__":
    sys.exit(main())
