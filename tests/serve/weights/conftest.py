"""Models whose weights are worth a form, and engines that serve them."""

import asyncio
import contextlib
import functools

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from model_handlers.errors import MmeError
from model_handlers.onnx.session import onnx_runtime
from model_handlers.system import memory
from model_handlers.tensor import FP32
from serve.request import InferenceRequest, Layout
from serve.weights import tiering
from serve.weights.forms import Tier
from tests.serve.engines import PLENTY, engine_of
from tests.serve.inside import evict, tiering_of, watched_by
from tests.waiting import until

SIDE = 1024
BACKBONE = SIDE * SIDE * 4 + SIDE * SIDE // 2 * 4  # bytes of the two matrices


def matrix(seed, columns=SIDE):
    """Random weights of 1024 rows."""
    return (np.random.default_rng(seed).standard_normal((SIDE, columns)) / 32).astype("f4")


@functools.cache
def backbone(name="m", head=None, seed=0):
    """A model of two layers, 6 MiB; `head` is one more of its own."""
    nodes = [
        helper.make_node("MatMul", ["x", "w1"], ["a"]),
        helper.make_node("Relu", ["a"], ["b"]),
        helper.make_node("MatMul", ["b", "w2"], ["c" if head else "y"]),
    ]
    weights = {"w1": matrix(seed), "w2": matrix(seed + 1, SIDE // 2)}
    if head:
        weights["w3"] = matrix(head, SIDE // 2)[: SIDE // 2]
        nodes.append(helper.make_node("MatMul", ["c", "w3"], ["y"]))
    tensors = [
        helper.make_tensor_value_info(tensor, TensorProto.FLOAT, ["batch", size])
        for tensor, size in (("x", SIDE), ("y", SIDE // 2))
    ]
    initializers = [numpy_helper.from_array(array, weight) for weight, array in weights.items()]
    graph = helper.make_graph(nodes, name, tensors[:1], tensors[1:], initializers)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    return model.SerializeToString()


def rows(count=1):
    """What clients send."""
    return np.random.default_rng(5).standard_normal((count, SIDE)).astype("f4")


class Served:
    """An engine, and how tests look at it."""

    def __init__(self, engine):
        self.engine = engine
        self.cache = engine.cache
        self.tiering = tiering_of(engine)

    async def ask(self, name="m", count=1):
        """What the model answers to the rows."""
        answered = asyncio.get_running_loop().create_future()
        inputs = [rows(count)]
        layout = Layout((("x", FP32, inputs[0].shape),), ("y",))
        request = InferenceRequest(layout, inputs, lambda _request, result: answered.set_result(result))
        if not self.engine.submit(name, None, request):
            await self.engine.submit_cold(name, None, request)
        result = await answered
        if isinstance(result, MmeError):
            raise result
        return np.array(result.outputs[0][2])

    def watched(self, name="m"):
        """What tiering knows of a model in memory, None if that is nothing."""
        found = [watched for watched in watched_by(self.tiering) if watched.target.name == name]
        return found[-1] if found else None

    def tier(self, name="m"):
        """How a model holds its weights."""
        entry = self.cache.entries[name]
        return Tier.PLAIN if entry.resident.forms is None else entry.resident.forms.tier

    async def settled(self, *names):
        """Wait until nothing can be made better of these models' forms."""
        await until(lambda: all((watched := self.watched(name)) and watched.settled for name in names or ("m",)))

    async def evict(self, name="m"):
        """Put a model out of memory, as the cache does for another."""
        await asyncio.shield(evict(self.cache, name))

    def charges(self):
        """Bytes that each model in memory is charged for."""
        return {name: entry.footprint.host for name, entry in self.cache.entries.items() if entry.resident}


@pytest.fixture
def serving(tmp_path):
    """An engine over the models below `tmp_path`/models; closed and audited afterwards."""
    memory.return_large_blocks()  # as the server does
    onnx_runtime()  # is no model's memory

    @contextlib.asynccontextmanager
    async def serving(budget=PLENTY, **options):
        options.setdefault("repository", tmp_path / "models")
        async with engine_of(tmp_path, budget, **options) as engine:
            yield Served(engine)
        assert repr(engine.cache.residents.shared) == "<SharedBytes 0 models map 0.0 MB>"
        assert [path.name for path in tmp_path.rglob(".staging-*")] == []

    return serving


@pytest.fixture
def write(tmp_path):
    """Writes a model of the repository."""

    def write(name="m", config="", **options):
        path = tmp_path / "models" / name / "1" / "model.onnx"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(backbone(name, **options))
        if config:
            (tmp_path / "models" / name / "config.pbtxt").write_text(config)
        return tmp_path / "models" / name

    return write


@pytest.fixture(scope="session")
def answer():
    """What ONNX Runtime itself answers of the first of them."""
    return onnx_runtime().InferenceSession(backbone()).run(None, {"x": rows()})[0]


@pytest.fixture
def quick(monkeypatch):
    """A second is a twentieth of one, and what is hot or cold is so at once."""
    monkeypatch.setattr(tiering, "_TICK_SECONDS", 0.05)
    monkeypatch.setattr(tiering, "HOT_SECONDS", 0.001)
    monkeypatch.setattr(tiering, "_COLD_SECONDS", 0.0005)


@pytest.fixture(autouse=True)
def noise_is_not_far_slower(monkeypatch):
    """A trial takes milliseconds of these models, of which a busy machine makes several times as many."""
    monkeypatch.setattr("serve.weights.forms._FAR_SLOWER", 1000.0)


@pytest.fixture
def settings():
    """What the tests compare with."""

    class Numbers:
        backbone = BACKBONE
        head = (SIDE // 2) ** 2 * 4

    return Numbers
