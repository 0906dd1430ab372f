"""Models by OpenVINO: real ones, built here, on the CPU."""

import logging
import os
import subprocess
import sys
import threading
import weakref

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper, save

from model_handlers.base import CPU
from model_handlers.config.model_config import InstanceGroup, ModelConfig
from model_handlers.errors import Kind, MmeError
from model_handlers.openvino import OpenvinoHandler, core
from model_handlers.openvino import openvino as framework
from model_handlers.system import memory
from model_handlers.tensor import BYTES, FP16, FP32, TensorSpec
from tests.cgroups import few_tasks
from tests.frameworks import framework_later

openvino = framework_later("openvino")
ops = framework_later("openvino.opset13")

WEIGHTS = np.random.default_rng(3).normal(size=(16, 4)).astype(np.float32)
ROWS = np.random.default_rng(4).normal(size=(8, 16)).astype(np.float32)
EXPECTED = np.maximum(ROWS @ WEIGHTS, 0)


def dense(shape=(-1, 16), weights=WEIGHTS):
    """A layer, relu(x @ weights)."""
    x = ops.parameter(list(shape), np.float32, name="x")
    y = ops.relu(ops.matmul(x, ops.constant(weights), False, False))
    x.output(0).set_names({"x"})
    y.output(0).set_names({"y"})
    return openvino.Model([ops.result(y)], [x], "dense")


@pytest.fixture
def save_model(tmp_path):
    """Writes a model in OpenVINO's own format."""

    def save_model(model):
        openvino.save_model(model, tmp_path / "model.xml", compress_to_fp16=False)
        return tmp_path / "model.xml"

    return save_model


@pytest.fixture
def load(save_model):
    """Loads a model or a file; closes it afterwards."""
    loaded = []

    def load(model, max_batch_size=8, inputs=(), outputs=(), groups=(), **parameters):
        config = ModelConfig(
            "m", "openvino", max_batch_size, inputs, outputs, instance_group=groups, parameters=parameters
        )
        path = save_model(model) if isinstance(model, openvino.Model) else model
        loaded.append(OpenvinoHandler.load(config, path, CPU))
        return loaded[-1]

    yield load
    for handler in loaded:
        handler.close()


def property_of(handler, name):
    """A property of the compiled model behind a handler, wherever that keeps it."""
    (compiled,) = (each for each in vars(handler).values() if isinstance(each, openvino.CompiledModel))
    return compiled.get_property(name)


def refused(load, *arguments, **options):
    """The error of a model that is not loaded, which is one line."""
    with pytest.raises(MmeError) as caught:
        load(*arguments, **options)
    assert "\n" not in caught.value.message
    return caught.value


def answer(handler, rows):
    """What it answers."""
    return handler.execute({"x": rows}, ["y"])[0]


def bare(path, rows):
    """What OpenVINO itself answers, in FP32."""
    compiled = openvino.Core().compile_model(path, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    return compiled({0: rows})[0]


def test_values_are_the_frameworks_own(load, save_model):
    """One row, the largest batch and something between get what OpenVINO answers by itself."""
    path = save_model(dense())
    handler = load(path)

    for rows in (ROWS[:1], ROWS, ROWS[2:5]):
        found = answer(handler, rows)
        np.testing.assert_allclose(found, bare(path, rows), rtol=1e-6)
        assert found.dtype == np.float32
    np.testing.assert_allclose(answer(handler, ROWS), EXPECTED, rtol=1e-4, atol=1e-5)


def test_answers_are_not_written_over(load):
    """What an execution returned stays as it is when the next one computes in the same buffers."""
    handler = load(dense())
    first = answer(handler, ROWS[:2])
    kept = first.copy()
    answer(handler, ROWS[2:4])

    np.testing.assert_array_equal(first, kept)


def test_inputs_are_not_kept(load):
    """Neither a request's body nor memory that is shared with a process is held by what waits for the next execution."""
    handler, body = load(dense()), ROWS.tobytes()
    shared = np.frombuffer(body, np.uint8)
    rows, alive = shared.view(np.float32).reshape(ROWS.shape), weakref.ref(shared)
    first = answer(handler, rows)
    del rows, shared

    assert alive() is None
    np.testing.assert_array_equal(answer(handler, ROWS), first)


def test_threads_execute_at_the_same_time(load):
    """Several lanes share the handler, and each gets the answers to its own rows."""
    weights = np.ones((512, 512), np.float32)  # so that an execution takes a while
    handler, wrong = load(dense((-1, 512), weights), groups=(InstanceGroup("g", count=2),)), []

    def run(index):
        rows = np.full((8, 512), index, np.float32)
        wrong.extend(_ for _ in range(50) if not np.allclose(answer(handler, rows), 512 * index))

    threads = [threading.Thread(target=run, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert wrong == []
    assert property_of(handler, "NUM_STREAMS") == 2


def test_onnx_is_read_too(load, tmp_path):
    """A file that ends with .onnx is a model like any other."""
    nodes = [helper.make_node("MatMul", ["x", "w"], ["h"]), helper.make_node("Relu", ["h"], ["y"])]
    tensors = [
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", size])] for name, size in (("x", 16), ("y", 4))
    ]
    graph = helper.make_graph(nodes, "g", *tensors, [numpy_helper.from_array(WEIGHTS, "w")])
    save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), tmp_path / "model.onnx")

    np.testing.assert_allclose(answer(load(tmp_path / "model.onnx"), ROWS), EXPECTED, rtol=1e-4, atol=1e-5)


def test_strings_go_in_and_out(load):
    """Elements of BYTES are strings of OpenVINO, whatever their bytes; a zero at the end is refused, not lost."""
    text = ops.parameter([-1, 2], openvino.Type.string, name="text")
    text.output(0).set_names({"text"})
    handler = load(openvino.Model([ops.result(text)], [text], "echo"))
    words = np.array([[b"a", "ü".encode()], [b"", b"\xff\x00b"]], dtype=np.object_)

    assert handler.config.inputs == (TensorSpec("text", BYTES, (2,)),)
    (found,) = handler.execute({"text": words}, ["text"])
    assert found.tolist() == words.tolist()
    with pytest.raises(MmeError, match="ends with a zero byte"):
        handler.execute({"text": np.array([[b"a", b"b\0"]], dtype=np.object_)}, ["text"])


def test_memory_is_given_back(load, save_model):
    """A model's weights, as the processor wants them, leave the process with it."""
    path = save_model(dense((-1, 1024), np.ones((1024, 8192), np.float32)))
    rows = np.ones((1, 1024), np.float32)
    config = ModelConfig("m", "openvino", max_batch_size=8)

    def loaded_and_closed():
        handler = OpenvinoHandler.load(config, path, CPU)
        answer(handler, rows)
        taken = memory.private_memory()
        handler.close()
        del handler
        memory.trim()
        return taken

    loaded_and_closed()  # what OpenVINO keeps for itself it has now
    before = memory.private_memory()
    grown = loaded_and_closed() - before

    assert grown > 16 << 20
    assert memory.private_memory() - before < 8 << 20


# -- parameters ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parameters", "name", "expected"),
    [
        ({}, "INFERENCE_PRECISION_HINT", "f32"),
        ({"HINT_BF16": "NO"}, "INFERENCE_PRECISION_HINT", "f32"),
        ({"INFERENCE_NUM_THREADS": "2"}, "INFERENCE_NUM_THREADS", 2),
        ({}, "INFERENCE_NUM_THREADS", 1),
        ({}, "NUM_STREAMS", 1),
        ({"NUM_STREAMS": "2", "INFERENCE_NUM_THREADS": "2"}, "NUM_STREAMS", 2),
        ({"PERFORMANCE_HINT": "LATENCY"}, "PERFORMANCE_HINT", "LATENCY"),
        ({}, "ENABLE_CPU_PINNING", False),
    ],
    ids=str,
)
def test_parameters_reach_the_model(load, parameters, name, expected):
    """Each parameter, named as Triton's backend names it, is what the model is compiled with; FP32 unless asked."""
    handler = load(dense(), **parameters)
    value = property_of(handler, name)

    found = {openvino.Type.f32: "f32"}.get(value, value) if name.endswith("PRECISION_HINT") else value
    assert getattr(found, "name", found) == expected
    np.testing.assert_allclose(answer(handler, ROWS), EXPECTED, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("parameters", "kind", "sentence"),
    [
        ({"NUM_STREAMS": "many"}, Kind.INVALID_MODEL, "'NUM_STREAMS' must be an integer from 1 to 256, got 'many'"),
        ({"INFERENCE_PRECISION_HINT": "fp8"}, Kind.INVALID_MODEL, "must be one of f32, bf16, f16, got 'fp8'"),
        ({"ENABLE_BATCH_PADDING": "maybe"}, Kind.INVALID_MODEL, "'ENABLE_BATCH_PADDING' must be 'true' or 'false'"),
        ({"TARGET_DEVICE": "NPU"}, Kind.UNAVAILABLE, "the devices that OpenVINO finds here are CPU"),
        ({"CPU_EXTENSION_PATH": "/x.so"}, Kind.UNSUPPORTED, "libraries of custom operations are not loaded"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_a_parameter_that_is_not_what_it_should_be_is_named(load, parameters, kind, sentence):
    """One sentence, with the parameter and its value."""
    error = refused(load, dense(), **parameters)

    assert error.kind is kind
    assert sentence in error.message


def test_other_parameters_are_logged(load, caplog):
    """A name that nobody knows changes nothing, and one line says so."""
    with caplog.at_level(logging.WARNING, "mme.openvino"):
        load(dense(), FOO="1", COMPILATION_NUM_THREADS="2")

    assert [record.getMessage() for record in caplog.records] == [
        "parameter 'COMPILATION_NUM_THREADS' changes nothing: a model is compiled by the thread that loads it",
        "parameters without effect on OpenVINO's models: 'FOO'",
    ]


# -- shapes and batches ----------------------------------------------------------------------------------------------


def test_the_graph_completes_the_configuration(save_model):
    """Inputs, outputs and batches are taken from the model; one without a free first dimension does not batch."""
    config = OpenvinoHandler.autocomplete(ModelConfig("m", "openvino"), save_model(dense()))

    assert config.inputs == (TensorSpec("x", FP32, (16,)),)
    assert config.outputs == (TensorSpec("y", FP32, (4,)),)
    assert config.max_batch_size == 4
    fixed = OpenvinoHandler.autocomplete(ModelConfig("m", "openvino"), save_model(dense((2, 16))))
    assert (fixed.max_batch_size, fixed.inputs[0].dims) == (0, (2, 16))


def test_a_model_of_one_batch_size_is_given_a_free_one(load):
    """With a max_batch_size a batch dimension of 1 takes any size."""
    handler = load(dense((1, 16)))

    assert handler.config.inputs == (TensorSpec("x", FP32, (16,)),)
    np.testing.assert_allclose(answer(handler, ROWS), EXPECTED, rtol=1e-4, atol=1e-5)


def test_small_batches_are_filled_up_for_a_model_that_keeps_its_size(load):
    """With SKIP_OV_DYNAMIC_BATCHSIZE and ENABLE_BATCH_PADDING the model gets full batches, and clients their rows."""
    handler = load(dense((8, 16)), SKIP_OV_DYNAMIC_BATCHSIZE="YES", ENABLE_BATCH_PADDING="YES")

    for rows, expected in ((ROWS, EXPECTED), (ROWS[:3], EXPECTED[:3])):
        np.testing.assert_allclose(answer(handler, rows), expected, rtol=1e-4, atol=1e-5)


def test_a_batch_that_is_too_small_is_refused_where_none_are_filled_up(load):
    """The sentence has both sizes, and the parameter that helps."""
    handler = load(dense((8, 16)), SKIP_OV_DYNAMIC_BATCHSIZE="YES")
    with pytest.raises(MmeError, match="takes batches of exactly 8, got 3: set the parameter ENABLE_BATCH_PADDING"):
        answer(handler, ROWS[:3])

    assert answer(handler, ROWS).shape == (8, 4)


def test_a_kept_batch_size_has_to_be_the_configured_one(load):
    """Another max_batch_size than the model's own is refused."""
    error = refused(load, dense((2, 16)), SKIP_OV_DYNAMIC_BATCHSIZE="YES")

    assert "max_batch_size is 8 and SKIP_OV_DYNAMIC_BATCHSIZE keeps the model's own batch dimension" in error.message


def test_inputs_are_reshaped_to_the_configuration_where_it_asks(load):
    """With RESHAPE_IO_LAYERS a model of any width is made one of the configured width."""
    x = ops.parameter([-1, -1], np.float32, name="x")
    y = ops.relu(x)
    x.output(0).set_names({"x"})
    y.output(0).set_names({"y"})
    model = openvino.Model([ops.result(y)], [x], "wide")
    handler = load(model, inputs=(TensorSpec("x", FP32, (3,)),), RESHAPE_IO_LAYERS="YES")

    assert handler.config.outputs == (TensorSpec("y", FP32, (3,)),)
    assert answer(handler, np.ones((2, 3), np.float32)).shape == (2, 3)


def test_any_of_a_tensors_names_may_be_declared(load):
    """OpenVINO's tensors have several names; the configuration's is the one that clients use."""
    model = dense()
    model.outputs[0].get_tensor().set_names({"a", "y", "z"})
    handler = load(model, outputs=(TensorSpec("z", FP32, (4,)),))

    (found,) = handler.execute({"x": ROWS}, ["z"])
    np.testing.assert_allclose(found, EXPECTED, rtol=1e-4, atol=1e-5)


# -- what can't be served --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("inputs", "sentence"),
    [
        ((TensorSpec("x", FP16, (16,)),), "configuration expects datatype TYPE_FP16 for input 'x', model provides TYPE_FP32"),
        ((TensorSpec("x", FP32, (5,)),), "tensor 'x': the model expects 2 dimensions (shape [-1,16])"),
        ((TensorSpec("rows", FP32, (16,)),), "unexpected inference input 'rows', allowed inputs are: x"),
    ],
    ids=["type", "shape", "name"],
)  # fmt: skip
def test_a_configuration_that_disagrees_with_the_graph_is_refused(load, inputs, sentence):
    """FP16 where the model takes FP32, other dimensions, another name: one sentence each."""
    error = refused(load, dense(), inputs=inputs)

    assert error.kind is Kind.INVALID_MODEL
    assert sentence in error.message


def test_rows_of_another_width_fail_with_the_frameworks_words(load):
    """What no configuration declares the framework refuses when it is executed."""
    handler = load(dense())
    with pytest.raises(MmeError, match="OpenVINO failed while running model 'm': ") as caught:
        answer(handler, np.ones((2, 5), np.float32))

    assert caught.value.kind is Kind.EXECUTION_FAILED
    assert answer(handler, ROWS).shape == (8, 4)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (b"nonsense", "OpenVINO can't load model 'm': No document element found"),
        (b"", "OpenVINO can't load model 'm': No document element found"),
        (b'<?xml version="1.0"?><net name="m" version="99"></net>', "is in version 99 of OpenVINO's format, and OpenVINO"),
        (b'<net name="m" version="11"><layers/><edges/></net>', "'model.xml' has no inputs or no outputs"),
    ],
    ids=["nonsense", "empty", "newer", "nothing inside"],
)  # fmt: skip
def test_a_bad_file_is_one_sentence(load, tmp_path, capfd, text, sentence):
    """INVALID_MODEL, and nothing is written where log lines are."""
    (tmp_path / "model.xml").write_bytes(text)
    error = refused(load, tmp_path / "model.xml")

    assert error.kind is Kind.INVALID_MODEL
    assert sentence in error.message
    assert capfd.readouterr() == ("", "")


def test_missing_or_cut_weights_are_one_sentence(load, save_model):
    """model.bin is part of the model."""
    path = save_model(dense())
    weights = path.with_suffix(".bin")
    weights.write_bytes(weights.read_bytes()[:50])

    assert "Incorrect weights in bin file" in refused(load, path).message
    weights.unlink()
    assert "bin file cannot be found" in refused(load, path).message


def test_nobody_is_told_that_the_framework_is_used(tmp_path):
    """Importing OpenVINO by itself reports to its maker, and notes in the home directory that it did; ours does not."""
    program = "from model_handlers.openvino import core; print(core().available_devices)"
    said = subprocess.check_output(
        [sys.executable, "-c", program], env={**os.environ, "HOME": str(tmp_path)}, text=True
    )

    assert "CPU" in said
    assert list(tmp_path.iterdir()) == []


def test_without_the_framework_the_sentence_names_the_extra(monkeypatch):
    """Where OpenVINO is not installed it is said what to install."""
    monkeypatch.setitem(sys.modules, "openvino", None)
    framework.cache_clear()
    core.cache_clear()
    with pytest.raises(MmeError, match=r"run `pip install 'mme\[openvino\]'`") as caught:
        OpenvinoHandler.traits(ModelConfig("m"), None).runtime.provide()

    assert caught.value.kind is Kind.UNSUPPORTED
    framework.cache_clear()


# Joins the group that is named first, and loads the file behind it.
LOADS = """
import sys
from pathlib import Path

from model_handlers.base import CPU
from model_handlers.config.model_config import ModelConfig
from model_handlers.errors import MmeError
from model_handlers.openvino import OpenvinoHandler

config, file = ModelConfig("m", "openvino"), Path(sys.argv[2])
OpenvinoHandler.autocomplete(config, file)
Path(sys.argv[1], "cgroup.procs").write_text("0")
try:
    OpenvinoHandler.load(config, file, CPU)
except MmeError as error:
    print(error.kind.name, error.message)
"""


def test_a_model_that_finds_no_room_for_its_threads_is_refused(save_model):
    """With what to raise, and nothing said of the file."""
    with few_tasks(3) as group:
        command = [sys.executable, "-c", LOADS, str(group), str(save_model(dense()))]
        told = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    assert told == (
        "UNAVAILABLE thread 'worker of 'm'' can't be started: raise the limit of processes and threads (ulimit -u, or the "
        "container's pids limit)\n"
    )
