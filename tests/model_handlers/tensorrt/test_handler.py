"""Engines of TensorRT: how they are loaded, executed and refused, against a stand-in for TensorRT and CUDA.

No machine that these tests run on can execute an engine. What is real here: plans, which TensorRT-RTX builds on a CPU
where it is installed, and the look for a driver.
"""

import sys
import threading

import numpy as np
import pytest

from model_handlers.base import CPU, Device
from model_handlers.config.model_config import InstanceGroup, InstanceKind, ModelConfig
from model_handlers.errors import Kind, LostProcessError, MmeError
from model_handlers.system import devices
from model_handlers.tensor import BYTES, FP32, TensorSpec
from model_handlers.tensorrt import TensorrtHandler, engine
from model_handlers.tensorrt.engine import PlanHeader, Profile, read_header, select
from tests.fake_tensorrt import PLAN, DataType, FakeCuda, FakeTensorrt

GPU1 = Device("gpu", 1)
REQUIRE_DRIVER = engine.require_driver
ROWS = np.arange(24, dtype=np.float32).reshape(8, 3)
SMALL, LARGE = ((1, 3), (2, 3), (4, 3)), ((4, 3), (8, 3), (16, 3))


@pytest.fixture
def nvidia(monkeypatch):
    """TensorRT, stood in for, with CUDA as its `cuda`, on a machine whose driver answers."""
    made = FakeTensorrt(FakeCuda())
    monkeypatch.setattr(engine, "cuda", lambda: made.cuda)
    monkeypatch.setattr(engine, "installed", lambda *_: "tensorrt")
    monkeypatch.setitem(sys.modules, "tensorrt", made)
    monkeypatch.setattr(engine, "require_driver", lambda _: None)
    engine.tensorrt.cache_clear()
    yield made
    engine.tensorrt.cache_clear()


@pytest.fixture
def load(nvidia, tmp_path):
    """Loads the engine; closes it afterwards, when nothing may be left on the device, nor pinned."""
    (tmp_path / "model.plan").write_bytes(PLAN)
    loaded = []

    def load(max_batch_size=0, device=GPU1, inputs=(), groups=(), **parameters):
        config = ModelConfig("m", "tensorrt", max_batch_size, inputs, instance_group=groups, parameters=parameters)
        loaded.append(TensorrtHandler.load(config, tmp_path / "model.plan", device))
        return loaded[-1]

    yield load
    for each in loaded:
        each.close()
    assert (nvidia.cuda.device, nvidia.cuda.pinned, nvidia.cuda.streams) == ({}, {}, {})


def answer(engine, rows=ROWS):
    """What it answers."""
    return engine.execute({"x": rows}, ["y"])[0]


def refused(load, **options):
    """The error of an engine that is not loaded, which is one line."""
    with pytest.raises(MmeError) as caught:
        load(**options)
    assert "\n" not in caught.value.message
    return caught.value


def test_batches_are_executed(load, nvidia):
    """One row, the most that the profile takes and something between: copied there, computed, and copied back."""
    engine = load()

    for rows in (ROWS[:1], ROWS, ROWS[2:5]):
        np.testing.assert_array_equal(answer(engine, rows), rows * 2)
    assert nvidia.cuda.current == 1


def test_answers_are_not_written_over(load):
    """What an execution returned stays as it is when the next one uses the same pinned memory."""
    engine = load()
    first = answer(engine, ROWS[:2])
    answer(engine, ROWS[4:6])

    np.testing.assert_array_equal(first, ROWS[:2] * 2)


def test_the_profile_is_the_one_that_is_best_for_a_batch(load, nvidia):
    """Of the profiles that take a shape the one with the nearest best shape; one that is active is not set anew."""
    nvidia.profiles = [SMALL, LARGE]
    engine = load()
    nvidia.executed.clear()

    for size in (1, 4, 8):
        answer(engine, np.ones((size, 3), np.float32))
    assert [profile for _, profile, _ in nvidia.executed] == [0, 0, 1]


def test_instance_groups_choose_among_the_profiles(load, nvidia):
    """With `profile` in its group a model executes by those alone, and its batches are no larger than they take."""
    nvidia.profiles = [SMALL, LARGE]
    engine = load(groups=(InstanceGroup("g", InstanceKind.GPU, profile=("0",)),))

    assert engine.config.max_batch_size == 4
    with pytest.raises(
        MmeError, match=r"does not take 'x' \[8, 3\]; it was built for 'x' \[1, 3\] to \[4, 3\]"
    ) as caught:
        answer(engine)
    assert caught.value.kind is Kind.INVALID_ARGUMENT
    error = refused(load, groups=(InstanceGroup("g", InstanceKind.GPU, profile=("7",)),))
    assert "names profile '7', but the engine has 2: 0 to 1" in error.message


def test_shapes_that_no_profile_takes_are_the_clients_error(load):
    """The sentence has the shape and the ranges, and the next batch is executed as if nothing had been."""
    engine = load()
    with pytest.raises(MmeError, match=r"does not take 'x' \[9, 3\]; it was built for 'x' \[1, 3\] to \[8, 3\]"):
        answer(engine, np.ones((9, 3), np.float32))

    np.testing.assert_array_equal(answer(engine), ROWS * 2)


def test_the_engine_completes_the_configuration(load, nvidia):
    """Batches are as large as profiles take, and best at the sizes that they are best for."""
    nvidia.profiles = [SMALL, LARGE]
    config = load().config

    assert config.inputs == (TensorSpec("x", FP32, (3,)),)
    assert config.outputs == (TensorSpec("y", FP32, (3,)),)
    assert config.max_batch_size == 16
    assert config.dynamic_batching.preferred_batch_size == (2, 8, 16)


def test_an_engine_without_a_free_dimension_does_not_batch(load, nvidia):
    """Its shapes are all of it."""
    nvidia.shape, nvidia.profiles = (8, 3), [((8, 3),) * 3]
    engine = load()

    assert (engine.config.max_batch_size, engine.config.inputs[0].dims) == (0, (8, 3))
    np.testing.assert_array_equal(answer(engine), ROWS * 2)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"max_batch_size": 9}, "configuration specified max-batch 9 but TensorRT engine only supports max-batch 8"),
        ({"inputs": (TensorSpec("x", BYTES, (3,)),)}, "configuration expects datatype TYPE_STRING for input 'x'"),
        ({"inputs": (TensorSpec("z", FP32, (3,)),)}, "unexpected inference input 'z', allowed inputs are: x"),
        ({"execution_context_allocation_strategy": "LAZY"}, "must be one of STATIC, ON_PROFILE_CHANGE, got 'LAZY'"),
    ],
    ids=["batch", "type", "name", "parameter"],
)
def test_a_configuration_that_disagrees_with_the_engine_is_refused(load, options, sentence):
    """One sentence, and nothing stays on the device."""
    error = refused(load, **options)

    assert error.kind is Kind.INVALID_MODEL
    assert sentence in error.message


def test_instances_share_the_engine_and_have_contexts_of_their_own(load, nvidia):
    """A context for each instance on the device is made when the model is loaded, with the memory for its largest batch."""
    groups = (
        InstanceGroup("here", InstanceKind.GPU, 2, gpus=(1,)),
        InstanceGroup("elsewhere", InstanceKind.GPU, 5, gpus=(0,)),
        InstanceGroup("cpu", InstanceKind.CPU, 3),
    )
    engine = load(groups=groups, execution_context_allocation_strategy="ON_PROFILE_CHANGE")
    taken = nvidia.cuda.used()

    assert len(nvidia.contexts) == 2
    assert {strategy.name for strategy in nvidia.strategies} == {"ON_PROFILE_CHANGE"}
    answer(engine)
    assert nvidia.cuda.used() == taken == 2 * 2 * ROWS.nbytes


def test_threads_do_not_share_a_context(load, nvidia):
    """Executions at the same time are in contexts of their own, and each gets the answers to its own rows."""
    engine, wrong = load(groups=(InstanceGroup("g", InstanceKind.GPU, 3),)), []
    together = threading.Barrier(3)

    def run(index):
        together.wait(60)
        rows = np.full((index + 1, 3), index, np.float32)
        wrong.extend(_ for _ in range(50) if not np.array_equal(answer(engine, rows), rows * 2))

    threads = [threading.Thread(target=run, args=(index,)) for index in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert wrong == []


def test_host_code_runs_only_where_the_parameter_says(load, nvidia):
    """A plan that fits several versions brings code for the host, which is refused unless `version-compatible` allows."""
    load()
    assert not nvidia.host_code
    load(**{"version-compatible": "true"})
    assert nvidia.host_code


# -- what can't be served --------------------------------------------------------------------------------------------


def test_a_plan_for_another_gpu_or_version_is_refused_with_both(load, nvidia):
    """The sentence says who built it, what is installed, what TensorRT says, and how to build it anew."""
    nvidia.refuses = "Target GPU SM 80 is not compatible\nwith SM 90"
    error = refused(load)

    assert error.kind is Kind.INVALID_MODEL
    assert error.message == (
        "model 'm': its engine was built by TensorRT 11.4.0.106, and TensorRT 11.4.0.106 can't run it on this GPU "
        "(Target GPU SM 80 is not compatible with SM 90); build it anew with this version on this kind of GPU: "
        "mme build-engine model.onnx"
    )


def test_a_plan_that_does_not_fit_is_out_of_memory(load, nvidia):
    """Where the device has less left than the plan is long, that is why TensorRT refused it; so are its buffers."""
    nvidia.refuses, nvidia.cuda.total = "Requested amount of GPU memory could not be allocated", 10
    assert refused(load).kind is Kind.OUT_OF_MEMORY

    nvidia.refuses, nvidia.cuda.total = "", ROWS.nbytes + 10
    error = refused(load)
    assert error.kind is Kind.OUT_OF_MEMORY
    assert "cudaErrorMemoryAllocation" in error.message


def test_an_execution_that_fails_has_tensorrts_words(load, nvidia):
    """EXECUTION_FAILED, and the next batch is executed as if nothing had been."""
    engine = load()
    nvidia.broken = True
    with pytest.raises(
        MmeError, match=r"TensorRT failed while running model 'm' \(it did not begin\): the kernel is br"
    ):
        answer(engine)

    nvidia.broken = False
    np.testing.assert_array_equal(answer(engine), ROWS * 2)


def test_a_type_that_the_protocol_does_not_have_is_refused(load, nvidia):
    """FP8 can't be sent."""
    nvidia.data_type = DataType.FP8
    error = refused(load)

    assert error.kind is Kind.UNSUPPORTED
    assert "tensor 'x' has TensorRT's type FP8" in error.message


def test_instances_on_the_cpu_are_refused(load):
    """An engine runs on no CPU, and the sentence says what to write instead."""
    assert "give them kind KIND_GPU" in refused(load, device=CPU).message


@pytest.mark.parametrize("content", [b"", b"nonsense", b"ftrt", b"onnx" + bytes(40)])
def test_a_file_that_is_no_plan_is_refused_before_anything_is_imported(tmp_path, content):
    """Its first bytes tell."""
    (tmp_path / "model.plan").write_bytes(content)
    with pytest.raises(MmeError, match=r"'model\.plan' is no engine of TensorRT; build one") as caught:
        TensorrtHandler.load(ModelConfig("m"), tmp_path / "model.plan", GPU1)

    assert caught.value.kind is Kind.INVALID_MODEL


@pytest.mark.parametrize(("plan", "extra"), [(PLAN, "tensorrt"), (b"vtrt" + PLAN[4:], "tensorrt-rtx")])
def test_without_tensorrt_the_sentence_names_the_extra(tmp_path, monkeypatch, plan, extra):
    """Where the TensorRT that built a plan is not installed it is said what to install."""
    (tmp_path / "model.plan").write_bytes(plan)
    monkeypatch.setattr(engine, "installed", lambda *_: "")
    engine.tensorrt.cache_clear()
    with pytest.raises(MmeError, match=rf"run `pip install 'mme\[{extra}\]'`") as caught:
        TensorrtHandler.load(ModelConfig("m"), tmp_path / "model.plan", GPU1)

    assert caught.value.kind is Kind.UNSUPPORTED
    engine.tensorrt.cache_clear()


def test_the_driver_is_asked_before_the_runtime_is_made(nvidia, tmp_path, monkeypatch):
    """A runtime made without a driver would end the process, so there is none: by the real look for a driver."""
    (tmp_path / "model.plan").write_bytes(PLAN)
    monkeypatch.setattr(engine, "require_driver", REQUIRE_DRIVER)
    monkeypatch.setattr(engine, "_DRIVER", "libcuda-that-is-not-there.so.1")
    with pytest.raises(MmeError, match="needs a GPU, but no NVIDIA driver") as caught:
        TensorrtHandler.load(ModelConfig("m"), tmp_path / "model.plan", GPU1)

    assert caught.value.kind is Kind.UNAVAILABLE
    assert nvidia.logger is None


def test_what_tensorrt_raises_is_a_failure_in_its_own_words(load, nvidia):
    """Shapes that an operator can't bring together, as one that was exported for a single row, and profiles."""
    engine = load()
    answer(engine)
    nvidia.raises = "reshape would change volume 30720 to 15360"
    with pytest.raises(MmeError, match=r"running model 'm' \(shapes that do not .*\): reshape would change") as caught:
        answer(engine)
    assert caught.value.kind is Kind.EXECUTION_FAILED
    nvidia.raises = ""
    answer(engine)

    nvidia.raises = "no memory for profile 0"
    with pytest.raises(MmeError, match=r"running model 'm' \(profile 0\): no memory for profile 0"):
        load()
    nvidia.raises = ""


def test_a_runtime_that_can_not_begin_is_no_fault_of_the_model(load, nvidia):
    """The bindings raise TypeError, since they got none; the logger has the reason."""
    nvidia.begins = False
    error = refused(load)

    assert error.kind is Kind.UNAVAILABLE
    assert "can't begin there (CUDA initialization failure with error: 35); check that the driver" in error.message


def test_a_gpu_that_answers_nothing_but_errors_is_lost_with_the_process(load, nvidia, monkeypatch):
    """Who fails asks the driver about the GPU of its own, when it executes and when it is loaded."""
    asked = []

    def trouble(_library, index):
        asked.append(index)
        return "CUDA error 719"

    engine = load()
    with monkeypatch.context() as patch:
        patch.setattr(devices, "_trouble", trouble)
        patch.setattr(devices, "_reasons", [])
        patch.setattr(nvidia.cuda, "cudaMemcpyAsync", lambda *_: (nvidia.cuda.cudaError_t.cudaErrorInvalidValue,))
        with pytest.raises(LostProcessError, match=r"the GPU failed .* nothing but errors now \(CUDA error 719\)"):
            answer(engine)
        patch.setattr(nvidia.cuda, "cudaSetDevice", lambda *_: (nvidia.cuda.cudaError_t.cudaErrorInvalidValue,))
        with pytest.raises(LostProcessError):
            load()
    assert asked == [1, 1]


# -- small parts -----------------------------------------------------------------------------------------------------


def test_headers_tell_who_built_a_plan(tmp_path):
    """TensorRT's tag and version, and those of TensorRT-RTX."""
    for tag, builder in ((b"ftrt", "TensorRT"), (b"vtrt", "TensorRT-RTX")):
        (tmp_path / "plan").write_bytes(tag + bytes(20) + bytes([10, 3, 0, 26]))
        assert read_header("m", tmp_path / "plan") == PlanHeader(builder, (10, 3, 0, 26))
    assert str(PlanHeader("TensorRT", (10, 3, 0, 26))) == "TensorRT 10.3.0.26"


def test_every_input_counts_when_a_profile_is_selected():
    """One that takes the first input and not the second does not take the request; ranks have to agree."""
    ranges = {"a": ((1,), (2,), (4,)), "b": ((1, 1), (2, 2), (4, 4))}
    profile = Profile(0, ranges)

    assert select("m", [profile], {"a": (4,), "b": (1, 4)}) is profile
    for shapes in ({"a": (4,), "b": (1, 5)}, {"a": (0,), "b": (1, 1)}, {"a": (1, 1), "b": (1, 1)}):
        with pytest.raises(MmeError, match="it was built for 'a'"):
            select("m", [profile], shapes)
