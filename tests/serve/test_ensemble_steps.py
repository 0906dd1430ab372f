"""The steps of an ensemble are the models that are served under those names: one copy, one queue, one set of counters."""

import asyncio
import contextlib
import json

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from model_handlers.base import Footprint
from model_handlers.errors import Kind, MmeError
from model_handlers.model_calls import Override
from serve.cache.eviction import Policy, Rules
from serve.loading.measuring import Scales
from serve.options import Control
from serve.request import InferenceResponse
from tests.serve.engines import PLENTY, answered, ask, engine_of, resident_models
from tests.serve.inside import evict
from tests.serve.integrity import check_integrity
from tests.waiting import until

STEP = 'step {{ model_name: "{}" {}input_map {{ key: "x" value: "{}" }} output_map {{ key: "y" value: "{}" }} }}'
TENSORS = 'input { name: "x" data_type: TYPE_FP32 dims: [ 2 ] } output { name: "y" data_type: TYPE_FP32 dims: [ 2 ] }'
SIZE = 4 << 20  # bytes of weights


def ensemble(*models, more="", version=""):
    """The configuration of an ensemble that asks models one after the other."""
    tensors = ["x", *(f"t{number}" for number in range(1, len(models))), "y"]
    steps = " ".join(STEP.format(model, version, tensors[i], tensors[i + 1]) for i, model in enumerate(models))
    return f'platform: "ensemble" max_batch_size: 8 {TENSORS} {more} ensemble_scheduling {{ {steps} }}'


def write_heavy(path, factor, weights):
    """An ONNX model `y = factor * x` that holds so many bytes, and computes next to nothing with them."""
    table = np.random.default_rng(weights).standard_normal((weights // 8, 2), np.float32)
    constants = {"factor": np.array([factor], np.float32), "zero": np.zeros(1, np.float32), "table": table}
    nodes = [
        helper.make_node("Shape", ["x"], ["numbers"]),
        helper.make_node("Gather", ["table", "numbers"], ["rows"]),
        helper.make_node("ReduceSum", ["rows"], ["sum"], keepdims=0),
        helper.make_node("Mul", ["sum", "zero"], ["nothing"]),
        helper.make_node("Mul", ["x", "factor"], ["product"]),
        helper.make_node("Add", ["product", "nothing"], ["y"]),
    ]
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", 2]) for name in "xy")
    initializers = [numpy_helper.from_array(array, name) for name, array in constants.items()]
    graph = helper.make_graph(nodes, "heavy", [x], [y], initializers)
    path.parent.mkdir(parents=True, exist_ok=True)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), path)


@pytest.fixture(autouse=True)
def weighed(monkeypatch):
    """A model takes its weights, and nothing beside: a process of many tests also measures what others take meanwhile."""
    monkeypatch.setattr(Scales, "measured", lambda _scales, load: (load(), Footprint()))


@pytest.fixture
def world(tmp_path, write_onnx):
    """Writes models that double, of so many bytes each, and ensembles of them; an engine over all."""

    class World:
        folder = tmp_path / "r"

        def models(self, names, weights=0, config="max_batch_size: 8"):
            for number, name in enumerate(names):  # no two share their weights
                file = self.folder / name / "1" / "model.onnx"
                if weights:
                    write_heavy(file, 2.0, weights + 64 * number)
                else:
                    write_onnx(file)
                (self.folder / name / "config.pbtxt").write_text(config)

        def ensembles(self, **configs):
            for name, config in configs.items():
                (self.folder / name / "1").mkdir(parents=True, exist_ok=True)
                (self.folder / name / "config.pbtxt").write_text(config)

        def engine(self, budget=PLENTY, **options):
            return engine_of(tmp_path, budget, repository=self.folder, **options)

    return World()


def ready(engine):
    """The models in memory, by name."""
    return sorted(each.name for each in engine.cache.residents.own if not each.leaving)


async def refused(engine, toys, name):
    """The kind and the sentence that a request is refused with."""
    with pytest.raises(MmeError) as caught:
        await ask(engine, toys.Call(1), name)
    return caught.value.kind, caught.value.message


async def test_a_step_answers_in_its_ensemble_as_it_does_by_itself(toys, world, tmp_path, write_onnx):
    """Also one that was loaded with other files, and when the ensemble is loaded again."""
    world.models("ab")
    world.ensembles(e=ensemble("a", "b"))
    write_onnx(tmp_path / "seven.onnx", 7.0)
    seven = (tmp_path / "seven.onnx").read_bytes()
    config = '{"max_batch_size": 8, "backend": "onnxruntime"}'
    async with world.engine(control=Control.EXPLICIT) as engine:
        await engine.reload("e")
        assert await answered(engine, toys, "e") == 4
        await engine.reload("b", Override(config, {"file:1/model.onnx": seven}))
        assert await answered(engine, toys, "b") == 7
        assert await answered(engine, toys, "e") == 14
        await engine.reload("e")
        assert await answered(engine, toys, "e") == 14
        await engine.reload("b")
        assert await answered(engine, toys, "e") == 4


async def test_a_step_may_exist_by_the_load_api_alone(toys, world, tmp_path, write_onnx):
    """Its files were sent with its load, and the repository has none."""
    world.models("a")
    world.ensembles(e=ensemble("a", "b"))
    write_onnx(tmp_path / "seven.onnx", 7.0)
    async with world.engine(control=Control.EXPLICIT) as engine:
        config = '{"max_batch_size": 8, "backend": "onnxruntime"}'
        await engine.reload("b", Override(config, {"file:1/model.onnx": (tmp_path / "seven.onnx").read_bytes()}))
        await engine.reload("e")
        assert await answered(engine, toys, "e") == 14


async def test_a_step_is_in_memory_once(toys, world):
    """However many ensembles ask it, and clients beside them; all are counted with it, and queue in one place."""
    world.models("ab")
    world.ensembles(e=ensemble("a", "b"), f=ensemble("b", "a", "a"), g=ensemble("e", "b"))
    async with world.engine() as engine:
        assert [await answered(engine, toys, name) for name in "efga"] == [4, 8, 8, 2]
        assert ready(engine) == ["a", "b", "e", "f", "g"]
        counted = {name: stats.success.count for (name, _), stats in engine.stats.items()}
        assert counted == {"a": 5, "b": 4, "e": 2, "f": 1, "g": 1}
        rows = {row["name"]: row["cache"] for row in engine.index.rows()}
        assert {name: row["hits"] + row["misses"] for name, row in rows.items()} == {
            "a": 4,
            "b": 3,
            "e": 2,
            "f": 1,
            "g": 1,
        }
        assert {name: row["loads"] for name, row in rows.items()} == dict.fromkeys("abefg", 1)
        models = [model for _, model in resident_models(engine)]
        assert len({id(model) for model in models}) == len(models) == 5
        assert engine.cache.room.used().host == sum(engine.cache.entries[name].footprint.host for name in "ab")


async def test_an_idle_step_is_evicted_and_comes_back(toys, world):
    """With the next request of the ensemble, which stays itself: it takes no memory."""
    world.models("abc", SIZE)
    world.ensembles(e=ensemble("a", "b"))
    async with world.engine(Footprint(int(2.7 * SIZE))) as engine:
        assert await answered(engine, toys, "e") == 4
        assert await answered(engine, toys, "c") == 2
        assert ready(engine) in (["a", "c", "e"], ["b", "c", "e"])
        assert await answered(engine, toys, "e") == 4
        assert ready(engine) == ["a", "b", "e"]


@pytest.mark.parametrize("policy", list(Policy))
async def test_steps_do_not_leave_for_each_other(toys, world, policy):
    """One that comes back has another model leave, however much more often and later that one was used."""
    world.models("abc", SIZE)
    world.ensembles(e=ensemble("a", "b"))
    async with world.engine(Footprint(int(2.7 * SIZE)), eviction=Rules(policy)) as engine:
        await answered(engine, toys, "e")
        await engine.unload("b")
        for _ in range(9):
            await answered(engine, toys, "c")
        assert await answered(engine, toys, "e") == 4
        evictions = {name: engine.cache.entries[name].stats.evictions.total() for name in "abc"}
        assert evictions == {"a": 0, "b": 0, "c": 1}


async def test_a_request_that_waits_for_a_load_found_nothing_in_memory(toys, world):
    """One to an ensemble that is not there misses that and its steps; of one whose step has left, the step alone."""
    world.models("ab")
    world.ensembles(e=ensemble("a", "b"))

    def counted(engine):
        stats = {name: engine.cache.entries[name].stats for name in "abe"}
        return {name: (each.hits, each.misses) for name, each in stats.items()}

    async with world.engine() as engine:
        await answered(engine, toys, "e")
        assert counted(engine) == {"a": (0, 1), "b": (0, 1), "e": (0, 1)}
        await answered(engine, toys, "e")
        assert counted(engine) == {"a": (1, 1), "b": (1, 1), "e": (1, 1)}
        await evict(engine.cache, "b")
        await answered(engine, toys, "e")
        assert counted(engine) == {"a": (2, 1), "b": (1, 2), "e": (2, 1)}


async def test_a_step_in_use_is_not_evicted(toys, world):
    """A request holds all of them from before the first one runs until its answer."""
    world.models("abc", SIZE)
    world.ensembles(e=ensemble("a", "b"))
    async with world.engine(Footprint(int(2.7 * SIZE))) as engine:
        await answered(engine, toys, "e")
        lease = engine.cache.ready.lease("e")
        assert [engine.cache.entries[name].leases for name in "abe"] == [1, 1, 1]
        call = toys.Call(1)
        other = asyncio.ensure_future(ask(engine, call, "c"))
        await until(lambda: engine.cache.room.claims)
        assert ready(engine) == ["a", "b", "e"]
        lease.release()
        await other
        await call.answer()
        assert "c" in ready(engine)


async def test_steps_that_can_not_be_resident_together_are_refused_and_nothing_is_evicted(toys, world):
    """When the ensemble is loaded: out of memory, which names both sizes."""
    world.models("abc", SIZE)
    world.ensembles(e=ensemble("a", "b"), f=ensemble("e", "c"))
    async with world.engine(Footprint(int(1.8 * SIZE))) as engine:
        assert await answered(engine, toys, "c") == 2
        for name in "ef":
            with pytest.raises(MmeError) as caught:
                await engine.reload(name)
            assert caught.value.kind is Kind.OUT_OF_MEMORY
            assert f"the models of ensemble '{name}' need" in caught.value.message
        assert (await refused(engine, toys, "e"))[0] is Kind.OUT_OF_MEMORY
        assert ready(engine) == ["c"]
        assert engine.cache.entries["c"].stats.evictions.total() == 0


@pytest.mark.parametrize("room", [1.8, 2.7])
async def test_ensembles_over_the_same_steps_in_either_order_wait_for_nothing_for_ever(toys, world, room):
    """With room for one and a half steps as with room for both: every request has its answer or is out of memory."""
    world.models("ab", SIZE)
    world.ensembles(e=ensemble("a", "b"), f=ensemble("b", "a"))
    async with world.engine(Footprint(int(room * SIZE)), load_patience=30.0) as engine, asyncio.timeout(60):

        async def outcome(name):
            try:
                return await answered(engine, toys, name)
            except MmeError as error:
                return error.kind

        found = await asyncio.gather(*(outcome(name) for name in "efab" * 5 + "ef" * 5))
        assert set(found) <= {2, 4, Kind.OUT_OF_MEMORY}
        assert (4 in found) == (room > 2)
        assert found.count(2) == 10
        check_integrity(engine.cache)


async def test_ensembles_that_put_each_other_out_take_turns(toys, world):
    """There is room for the steps of one of them: each has its answer all the same."""
    world.models("abcd", SIZE)
    world.ensembles(e=ensemble("a", "b"), f=ensemble("c", "d"))
    async with world.engine(Footprint(int(2.7 * SIZE))) as engine, asyncio.timeout(60):
        found = await asyncio.gather(*(answered(engine, toys, name) for name in "efef"))
        assert found == [4] * 4


async def test_a_step_that_changed_meanwhile_is_asked_as_it_is_now(toys, world):
    """It left memory, its files changed, and a request brings it back; one that fits no more is refused by name."""
    world.models("abc", SIZE)
    world.ensembles(e=ensemble("a", "b"))
    async with world.engine(Footprint(int(2.7 * SIZE))) as engine:
        await answered(engine, toys, "e")
        engine.cache.room.relieve("", Footprint(3 * SIZE), "load")
        await until(lambda: ready(engine) in ([], ["e"]))
        write_heavy(world.folder / "b" / "1" / "model.onnx", 5.0, SIZE)
        assert await answered(engine, toys, "e") == 10
        engine.cache.room.relieve("", Footprint(3 * SIZE), "load")
        await until(lambda: ready(engine) in ([], ["e"]))
        (world.folder / "b" / "config.pbtxt").write_text("max_batch_size: 4")
        kind, sentence = await refused(engine, toys, "e")
        assert (kind, "only allows maximum batch size to be 4" in sentence) == (Kind.INVALID_MODEL, True)


@pytest.mark.parametrize("space", ["e f", "f e"])
async def test_ensembles_in_a_circle_are_refused_though_a_client_made_it(world, space):
    """By a configuration that came with a load: the sentence names the way round."""
    world.models("ab")
    world.ensembles(e=ensemble("a", "f"), f=ensemble("a", "e"))
    async with world.engine() as engine, asyncio.timeout(30):
        for name in space.split():
            with pytest.raises(MmeError, match=r"circular dependency between ensembles: . -> . -> .") as caught:
                await engine.reload(name)
            assert caught.value.kind is Kind.INVALID_MODEL


async def test_a_circle_of_ensembles_in_memory_is_refused(toys, world):
    """By a configuration that came with a load of one of them: what serves goes on as it is."""
    world.models("ab")
    world.ensembles(e=ensemble("a", "f"), f=ensemble("a", "b"))
    tensor = {"data_type": "TYPE_FP32", "dims": [2]}
    step = {"model_name": "e", "model_version": -1, "input_map": {"x": "x"}, "output_map": {"y": "y"}}
    config = {"platform": "ensemble", "max_batch_size": 8, "ensemble_scheduling": {"step": [step]}}
    circle = json.dumps({**config, "input": [{"name": "x", **tensor}], "output": [{"name": "y", **tensor}]})
    async with world.engine() as engine:
        await engine.reload("e")
        with pytest.raises(MmeError, match="circular dependency between ensembles: f -> e -> f") as caught:
            await engine.reload("f", Override(circle, {}))
        assert caught.value.kind is Kind.INVALID_MODEL
        assert [row["state"] for row in engine.index.rows()] == ["READY"] * 4
        assert await answered(engine, toys, "e") == 8


async def test_an_ensemble_waits_from_its_arrival_until_its_first_step_begins(toys, world):
    """However long the steps behind it wait: the times in queues are not added up."""
    world.models("a")
    world.models("b", config="max_batch_size: 8 dynamic_batching { max_queue_delay_microseconds: 300000 }")
    world.ensembles(e=ensemble("a", "b", "a"))
    async with world.engine() as engine:
        await answered(engine, toys, "e")
        stats = engine.stats["e", 1]
        assert stats.queue.count == 1
        assert 0 < stats.queue.ns < engine.stats["b", 1].queue.ns
        assert stats.queue.ns + stats.compute_infer.ns < stats.success.ns


async def test_dependents_leave_with_an_ensemble_and_others_stay(toys, world):
    """As in Triton: with `unload_dependents` its steps go too, but for those that another ensemble has."""
    world.models("abc")
    world.ensembles(e=ensemble("a", "b"), f=ensemble("b", "c"))
    async with world.engine(control=Control.EXPLICIT) as engine:
        await engine.reload("e")
        await engine.reload("f")
        await engine.unload("e", dependents=True)
        assert ready(engine) == ["b", "c", "f"]
        await engine.unload("f")
        assert ready(engine) == ["b", "c"]
        with contextlib.suppress(MmeError):
            await answered(engine, toys, "b")


async def test_a_pinned_ensemble_keeps_its_steps(toys, world):
    """They are never evicted while it is there, also when they were loaded before."""
    world.models("abc", SIZE)
    pin = 'parameters { key: "MME_PIN" value: { string_value: "true" } }'
    world.ensembles(e=ensemble("a", "b", more=pin))
    async with world.engine(Footprint(int(2.7 * SIZE))) as engine:
        await answered(engine, toys, "a")
        await answered(engine, toys, "e")
        kind, sentence = await refused(engine, toys, "c")
        assert (kind, "pinned" in sentence) == (Kind.OUT_OF_MEMORY, True)
        await engine.unload("e")
        assert await answered(engine, toys, "c") == 2


async def test_a_request_whose_step_left_this_moment_begins_again(toys, world):
    """All leases are taken in one turn of the loop, or none."""
    world.models("ab")
    world.ensembles(e=ensemble("a", "b"))
    async with world.engine() as engine:
        await answered(engine, toys, "e")
        held = engine.cache.ready.lease("b")
        leaving = asyncio.ensure_future(engine.unload("b"))
        await until(lambda: engine.cache.entries["b"].state.shown == "UNLOADING")
        assert engine.cache.ready.lease("e") is None
        assert [engine.cache.entries[name].leases for name in "ae"] == [0, 0]
        held.release()
        await leaving
        call = toys.Call(1)
        await ask(engine, call, "e")
        assert isinstance(await call.answer(), InferenceResponse)


async def test_a_version_of_a_step_is_the_one_that_is_named(toys, world, write_repository_model):
    """The latest where none is, of those that are served."""
    write_repository_model(world.folder / "a", "max_batch_size: 8 version_policy { all { } }", versions=(1, 2))
    world.ensembles(e=ensemble("a", version="model_version: 1 "), f=ensemble("a", version="model_version: -1 "))
    async with world.engine() as engine:
        assert [await answered(engine, toys, name) for name in "ef"] == [2, 3]


@pytest.mark.parametrize(("name", "chain"), [("e", "b → e → b"), ("f", "b → f → e → b")])
async def test_a_step_that_waits_for_the_ensemble_can_not_call_it(toys, world, name, chain):
    """Its instance is busy until the answer: the call is refused, with the chain of those that wait."""
    world.models("ab")
    world.ensembles(e=ensemble("a", "b"), f=ensemble("a", "e"))
    async with world.engine() as engine:
        await answered(engine, toys, "f")
        call = toys.Call(1)
        call.request.callers = ("b",)
        try:
            assert engine.submit(name, None, call.request)
            error = await call.answer()
        except MmeError as refusal:
            error = refusal
        assert (error.kind, chain in error.message) == (Kind.INVALID_ARGUMENT, True), error
        await until(lambda: all(each.leases == 0 for each in engine.cache.residents.own))


async def test_an_ensemble_s_cached_answers_go_with_a_step_that_changed(toys, world, write_onnx):
    """What another model answered is not told again."""
    world.models("ab")
    world.ensembles(e=ensemble("a", "b", more="response_cache { enable: true }"))
    async with world.engine(response_cache_bytes=1 << 20) as engine:
        assert [await answered(engine, toys, "e") for _ in range(2)] == [4, 4]
        assert engine.stats["a", 1].success.count == 1
        write_onnx(world.folder / "b" / "1" / "model.onnx", 5.0)
        await engine.reload("b")
        assert [await answered(engine, toys, "e") for _ in range(2)] == [10, 10]


async def test_an_ensemble_s_cached_answers_go_with_a_step_of_a_step(toys, world):
    """It left memory, its files changed, and a request brings it back: only the models in the middle hear of that."""
    world.models("a", SIZE)
    world.ensembles(f=ensemble("a"), e=ensemble("f", more="response_cache { enable: true }"))
    async with world.engine(response_cache_bytes=1 << 20) as engine:
        assert [await answered(engine, toys, "e") for _ in range(2)] == [2, 2]
        await engine.cache.relieve("", Footprint(SIZE), "load")
        write_heavy(world.folder / "a" / "1" / "model.onnx", 5.0, SIZE)
        assert [await answered(engine, toys, "e") for _ in range(2)] == [5, 5]
