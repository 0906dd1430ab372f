"""What a step of a sequence costs, in processor time, without HTTP and without a framework: a part of `scheduling`.

Ten steps at a time while 10 or 1,000 sequences live: a step must not cost more for there being others. The model adds
up what each sequence sends, in an implicit state.
"""

from __future__ import annotations

import asyncio
import time
from statistics import median
from typing import TYPE_CHECKING

import numpy as np

from model_handlers.base import Handler
from model_handlers.config.model_config import (
    ControlInput,
    ControlKind,
    ModelConfig,
    OldestStrategy,
    SequenceBatching,
    SequenceControl,
    SequenceState,
)
from model_handlers.config.validate import normalise
from model_handlers.requests import FLAG_SEQUENCE_START
from model_handlers.tensor import FP32, TensorSpec
from serve.model.model import Model
from serve.request import InferenceRequest, Layout
from serve.statistics import ModelStats

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from model_handlers.base import Device
    from model_handlers.tensor import Array

_AT_ONCE = 10
_STEPS = 20_000
_ROUNDS = 5
_MOST = 1.3  # times what a step costs while ten sequences live
_ALWAYS_NS = 10**12  # every execution is quick enough for the loop


class _Sums(Handler):
    """X, START and a state → Y, which is the state: as quick as a model can be."""

    backend = "sums"
    default_filename = "model.sums"
    inline = True

    @classmethod
    def autocomplete(cls, config: ModelConfig, model_file: Path) -> ModelConfig:  # noqa: ARG003
        return config

    @classmethod
    def load(cls, config: ModelConfig, model_file: Path, device: Device, lane: str) -> Handler:
        raise NotImplementedError

    def execute(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> list[Array]:
        total = inputs["X"] + inputs["SUM"] * (1 - inputs["START"])
        return [total for _ in outputs]

    def close(self) -> None:
        pass


def _sequence_model(loop: asyncio.AbstractEventLoop, candidates: int) -> Model:
    start = SequenceControl(ControlKind.CONTROL_SEQUENCE_START, fp32_false_true=(0.0, 1.0))
    config = normalise(
        ModelConfig(
            "sums",
            max_batch_size=_AT_ONCE,
            inputs=(TensorSpec("X", FP32, (1,)),),
            outputs=(TensorSpec("Y", FP32, (1,)),),
            sequence_batching=SequenceBatching(
                OldestStrategy(candidates),
                max_sequence_idle_microseconds=3_600_000_000,
                control_input=(ControlInput("START", (start,)),),
                state=(SequenceState("SUM", "SUM_OUT", FP32, (1,)),),
            ),
        )
    )
    zero = {"SUM": np.zeros((1, 1), np.float32)}
    return Model("sums", 1, [("sums_0", _Sums(config))], ModelStats(), loop, _ALWAYS_NS, initial_states=zero)


async def _steps(sequences: int) -> float:
    """Nanoseconds of processor time that a step costs while so many sequences live."""
    loop = asyncio.get_running_loop()
    model = _sequence_model(loop, sequences)
    layout = Layout((("X", FP32, (1, 1)),), ())
    one = np.ones((1, 1), np.float32)
    answered = asyncio.Semaphore(0)
    wrong: list[object] = []

    def complete(_request: InferenceRequest, result: object) -> None:
        if isinstance(result, Exception):
            wrong.append(result)
        answered.release()

    async def round_of(first: int, flags: int) -> None:
        for number in range(first, first + _AT_ONCE):
            request = InferenceRequest(layout, [one], complete)
            request.correlation_id, request.flags = number % sequences + 1, flags
            model.submit(request)
        for _ in range(_AT_ONCE):
            await answered.acquire()

    for first in range(0, sequences, _AT_ONCE):
        await round_of(first, FLAG_SEQUENCE_START)
    began = time.process_time_ns()
    for first in range(0, _STEPS, _AT_ONCE):
        await round_of(first, 0)
    took = time.process_time_ns() - began
    if wrong:
        raise SystemExit(f"a step failed: {wrong[0]}")
    await asyncio.to_thread(model.close)
    return took / _STEPS


def measure_sequences() -> None:
    """Print what a step costs with few and with many sequences."""
    few, many = [], []
    for _ in range(_ROUNDS):  # one after the other, so that a slow moment of the machine meets both
        few.append(asyncio.run(_steps(10)))
        many.append(asyncio.run(_steps(1000)))
    ratio = median(many) / median(few)
    print(f"Steps of sequences on the oldest strategy, {_AT_ONCE} at a time, with an implicit state\n")
    print("| sequences | µs of processor time a step | |")
    print("|---|---|---|")
    print(f"| 10 | {median(few) / 1000:.1f} | |")
    print(f"| 1,000 | {median(many) / 1000:.1f} | {ratio:.2f} times |")
    print(f"\nat most {_MOST} is allowed\n")
