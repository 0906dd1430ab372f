"""Building engines: what is understood of shapes, and real engines, by TensorRT-RTX, which needs no GPU to build."""

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper, save

from container.cli import main
from model_handlers.errors import Kind, MmeError
from model_handlers.system import devices
from model_handlers.tensorrt import builder, engine
from model_handlers.tensorrt.builder import BuildOptions, profiles_of
from model_handlers.tensorrt.engine import TensorrtEngine, read_header
from tests.frameworks import framework

SHAPES = ("--min", "x:1x16", "--opt", "x:4x16", "--max", "x:8x16")


@pytest.fixture
def model(tmp_path):
    """The file of a model that takes x [any, 16]."""
    nodes = [helper.make_node("MatMul", ["x", "w"], ["h"]), helper.make_node("Relu", ["h"], ["y"])]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 16])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 4])
    graph = helper.make_graph(nodes, "g", [x], [y], [numpy_helper.from_array(np.ones((16, 4), np.float32), "w")])
    save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), tmp_path / "model.onnx")
    return tmp_path / "model.onnx"


@pytest.fixture
def build(model, capsys):
    """Runs `mme build-engine` on the model, really; returns its exit code and what it says."""
    framework("tensorrt_rtx_bindings")

    def build(*flags):
        code = main.main(["build-engine", str(model), "--builder", "tensorrt-rtx", *flags])
        said = capsys.readouterr()
        return code, said.out + said.err

    return build


def test_shapes_are_written_as_trtexec_writes_them():
    """Names, colons and sizes; one range a profile; the best stands for a limit that is not given."""
    assert profiles_of(["ids:1x16,a:b:2"], ["ids:8x16,a:b:2"], ["ids:32x16,a:b:4"]) == (
        {"ids": ((1, 16), (8, 16), (32, 16)), "a:b": ((2,), (2,), (4,))},
    )
    assert profiles_of([], ["x:1x3", "x:8x3"], ["x:4x3", "x:8x3"]) == (
        {"x": ((1, 3), (1, 3), (4, 3))},
        {"x": ((8, 3), (8, 3), (8, 3))},
    )
    assert profiles_of([], [], []) == ()


@pytest.mark.parametrize(
    ("shapes", "sentence"),
    [
        ((["x"], [], []), "'x' is no shape of an input; write its name and sizes, as in ids:1x16"),
        ((["x:1xa"], [], []), "'x:1xa' is no shape of an input"),
        ((["x:0x2"], [], []), "'x:0x2' is no shape of an input"),
        ((["x:2x2"], [], ["x:1x2"]), "must grow from --min 2x2 over --opt 1x2 to --max 1x2"),
        ((["x:1"], [], ["x:1x2"]), "in as many dimensions"),
        ((["x:1"], ["x:1", "x:2", "x:3"], []), "--min is given 1 times: once for each of the 3 profiles, or never"),
    ],
)
def test_text_that_is_no_shapes_is_refused(shapes, sentence):
    """What is wrong with it is the caller's to mend: INVALID_ARGUMENT."""
    with pytest.raises(MmeError) as caught:
        profiles_of(*shapes)

    assert caught.value.kind is Kind.INVALID_ARGUMENT
    assert sentence in caught.value.message


def test_an_engine_is_built_from_an_onnx_model(build, model):
    """The plan is there, whole, by the installed builder; nothing else is left beside it."""
    code, said = build(*SHAPES, "-o", str(model.parent / "1" / "model.plan"))

    assert (code, said.split(":")[0]) == (0, str(model.parent / "1" / "model.plan"))
    assert str(read_header("m", model.parent / "1" / "model.plan")) in said
    assert [path.name for path in (model.parent / "1").iterdir()] == ["model.plan"]


def test_a_model_is_converted_for_fp16_where_the_builder_takes_precisions_from_the_file(build, model):
    """With --fp16 the engine is another one; with two profiles too."""
    assert build(*SHAPES)[0] == 0
    plain = model.with_name("model.plan").read_bytes()

    assert build(*SHAPES, "--fp16")[0] == 0
    assert model.with_name("model.plan").read_bytes() != plain
    assert build(*SHAPES, *SHAPES, "--optimization-level", "0", "--workspace", "64")[0] == 0


@pytest.mark.parametrize(
    ("flags", "code", "sentence"),
    [
        ((), 2, "input 'x' takes any size in [-1, 16]: say which, as in --min x:1x16"),
        (("--opt", "z:1x16"), 2, "the model has no input 'z'; its inputs are x"),
        (("--opt", "x:1x5"), 1, "TensorRT can't build an engine of 'model.onnx': "),
        ((*SHAPES, "--int8"), 2, "'model.onnx' has no QuantizeLinear"),
    ],
    ids=["no shapes", "no such input", "other shapes", "nothing quantised"],
)
def test_what_can_not_be_built_is_one_sentence(build, model, flags, code, sentence):
    """The exit code tells a wrong command from a model that can't be built, and no plan is written."""
    found, said = build(*flags)

    assert found == code
    assert sentence in said
    assert said.count("\n") == 1
    assert not model.with_name("model.plan").exists()


def test_a_file_that_is_no_model_is_refused(build, model):
    """With the parser's words."""
    model.write_bytes(b"nonsense")
    code, said = build(*SHAPES)

    assert code == 1
    assert "TensorRT can't read 'model.onnx': " in said


def test_tensorrt_itself_builds_only_where_there_is_a_gpu(model, monkeypatch):
    """It tries kernels out while it builds, so the driver is asked for before anything is made."""
    made = type("framework", (), {"__name__": "tensorrt", "Builder": None})
    monkeypatch.setattr(builder, "tensorrt", lambda _: made)
    monkeypatch.setattr(builder, "installed", lambda _: "tensorrt")
    monkeypatch.setattr(engine, "_DRIVER", "libcuda-that-is-not-there.so.1")
    with pytest.raises(MmeError, match="no NVIDIA driver") as caught:
        builder.build(model, model.with_name("model.plan"), BuildOptions(), lambda *_: None)

    assert caught.value.kind is Kind.UNAVAILABLE


@pytest.mark.skipif(bool(devices.gpus()), reason="this machine has a GPU")
def test_the_real_runtime_refuses_an_engine_without_a_gpu(build, model, monkeypatch):
    """Past the look for a driver, TensorRT-RTX itself does not take the plan; what it says is in the sentence."""
    assert build(*SHAPES)[0] == 0
    monkeypatch.setattr(engine, "set_device", lambda _: None)
    monkeypatch.setattr(engine, "free_memory", lambda: 1 << 40)
    with pytest.raises(MmeError, match=r"its engine was built by TensorRT-RTX 1\.7.*deserializeCudaEngine") as caught:
        TensorrtEngine("m", model.with_name("model.plan"), 0)

    assert caught.value.kind is Kind.INVALID_MODEL
