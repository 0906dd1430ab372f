"""ONNX models by ONNX Runtime: real graphs, built here, on the CPU."""

import gc
import sys
import weakref

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from model_handlers.base import CPU
from model_handlers.config.model_config import DynamicBatching, ModelConfig
from model_handlers.errors import Kind, MmeError
from model_handlers.onnx import OnnxHandler
from model_handlers.onnx.session import create_session, onnx_runtime
from model_handlers.system import memory, threads
from model_handlers.tensor import BY_NAME, BYTES, FP16, FP32, INT64, TensorSpec
from tests.onnx_types import ONNX_TYPES

X16 = ("x", TensorProto.FLOAT, ["batch", 16])
Y4 = ("y", TensorProto.FLOAT, ["batch", 4])


def graph(nodes, inputs, outputs, weights=()):
    """A model from nodes, (name, type, shape) of inputs and outputs, and named arrays."""
    values = [[helper.make_tensor_value_info(*tensor) for tensor in tensors] for tensors in (inputs, outputs)]
    initializers = [numpy_helper.from_array(array, name) for name, array in weights]
    made = helper.make_graph(nodes, "graph", *values, initializers)
    return helper.make_model(made, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


def identity(data_type=TensorProto.FLOAT, shape=("batch", 2), out=None):
    """A graph that returns its input."""
    y = ("y", data_type, list(shape if out is None else out))
    return graph([helper.make_node("Identity", ["x"], ["y"])], [("x", data_type, list(shape))], [y])


def mlp(width=16, hidden=8, classes=4):
    """Two dense layers with a ReLU between them, and their weights."""
    rng = np.random.default_rng(7)
    w1, w2 = (rng.standard_normal(shape).astype("f4") for shape in ((width, hidden), (hidden, classes)))
    nodes = [
        helper.make_node("MatMul", ["x", "w1"], ["h"]),
        helper.make_node("Relu", ["h"], ["r"]),
        helper.make_node("MatMul", ["r", "w2"], ["y"]),
    ]
    inputs, outputs = [("x", TensorProto.FLOAT, ["batch", width])], [("y", TensorProto.FLOAT, ["batch", classes])]
    return graph(nodes, inputs, outputs, [("w1", w1), ("w2", w2)]), w1, w2


def two_in_two_out():
    """A graph of the sum `s` and the difference `d` of two inputs."""
    tensors = {name: (name, TensorProto.FLOAT, ["batch", 3]) for name in "absd"}
    nodes = [helper.make_node("Add", ["a", "b"], ["s"]), helper.make_node("Sub", ["a", "b"], ["d"])]
    return graph(nodes, [tensors["a"], tensors["b"]], [tensors["s"], tensors["d"]])


@pytest.fixture
def save(tmp_path):
    """Writes a model, or raw bytes, and tells where."""

    def save(model):
        path = tmp_path / "model.onnx"
        path.write_bytes(model if isinstance(model, bytes) else model.SerializeToString())
        return path

    return save


@pytest.fixture
def load(save):
    """Writes and loads a model; closes what it loaded."""
    loaded = []

    def load(model, **config):
        loaded.append(OnnxHandler.load(ModelConfig("m", **config), save(model), CPU))
        return loaded[-1]

    yield load
    for handler in loaded:
        handler.close()


@pytest.fixture
def complete(save):
    """Writes a model and completes a configuration from it."""
    return lambda model, **config: OnnxHandler.autocomplete(ModelConfig("m", **config), save(model))


def refused(call, *args, **kwargs):
    """The error of a call that must be refused."""
    with pytest.raises(MmeError) as caught:
        call(*args, **kwargs)
    return caught.value


def options(handler):
    """The options of the session behind a handler."""
    return session_of(handler).get_session_options()


def session_of(handler):
    """The session behind a handler, wherever that keeps it."""
    (session,) = (each for each in vars(handler).values() if isinstance(each, onnxruntime.InferenceSession))
    return session


# -- executing -------------------------------------------------------------------------------------------------------


def test_an_mlp_computes_what_numpy_computes(load):
    """A batch goes in and the product of the layers comes out, whatever the batch size."""
    model, w1, w2 = mlp()
    handler = load(model)

    for batch in (1, 3, 8):
        x = np.random.default_rng(batch).standard_normal((batch, 16)).astype("f4")
        [y] = handler.execute({"x": x}, ["y"])
        np.testing.assert_allclose(y, np.maximum(x @ w1, 0) @ w2, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", [name for name in ONNX_TYPES if name != "BYTES"])
def test_every_data_type_passes_through_unchanged(load, name):
    """Each data type of the protocol that ONNX Runtime knows is declared as itself and keeps every bit."""
    dtype = BY_NAME[name].dtype
    handler = load(identity(ONNX_TYPES[name]))
    info = np.finfo(dtype) if dtype.kind == "f" else np.iinfo(dtype) if dtype.kind in "iu" else None
    x = np.array([[0, 1], [info.min, info.max] if info else [1, 0]], dtype=dtype)

    [y] = handler.execute({"x": x}, ["y"])

    assert handler.config.inputs == (TensorSpec("x", BY_NAME[name], (2,)),)
    assert handler.config.outputs == (TensorSpec("y", BY_NAME[name], (2,)),)
    assert y.dtype == dtype
    assert y.tolist() == x.tolist()


def test_half_precision_keeps_its_bits(load):
    """FP16 is not widened on the way: not-a-number, infinity and the smallest number come back as they were."""
    bits = np.array([[0x7E00, 0x7C00], [0x0001, 0x8000]], dtype=np.uint16)
    handler = load(identity(TensorProto.FLOAT16))

    [y] = handler.execute({"x": bits.view(np.float16)}, ["y"])

    assert handler.config.inputs[0].data_type is FP16
    assert y.view(np.uint16).tolist() == bits.tolist()


def test_strings_pass_through_unchanged(load):
    """BYTES elements reach the model as the text they spell, and come back as bytes: umlauts, zeros and nothing at all."""
    texts = ["plain", "größe 日本", "a\0b", ""]
    x = np.array([text.encode() for text in texts], dtype=np.object_).reshape(2, 2)
    handler = load(identity(TensorProto.STRING))

    [y] = handler.execute({"x": x}, ["y"])

    assert handler.config.inputs[0].data_type is BYTES
    assert y.shape == (2, 2)
    assert y.tolist() == x.tolist()


def test_a_model_sees_text_and_not_its_bytes(load):
    """A model that reads numbers from strings reads what was sent, and not what Python prints of bytes."""
    nodes = [helper.make_node("Cast", ["x"], ["y"], to=TensorProto.FLOAT)]
    handler = load(graph(nodes, [("x", TensorProto.STRING, ["n"])], [("y", TensorProto.FLOAT, ["n"])]))

    [y] = handler.execute({"x": np.array([b"12.5", b"-3"], dtype=np.object_)}, ["y"])

    assert y.tolist() == [12.5, -3]


def test_bytes_that_are_no_text_are_refused_by_input(load):
    """A BYTES element that is not UTF-8 is the client's error, and names the input."""
    handler = load(identity(TensorProto.STRING))

    error = refused(handler.execute, {"x": np.array([[b"a", b"\xff"]], dtype=np.object_)}, ["y"])

    assert error.kind is Kind.INVALID_ARGUMENT
    assert "input 'x' for model 'm' must hold UTF-8 text" in error.message


def test_outputs_come_in_the_order_asked_for(load):
    """`execute` returns one array a name, in the caller's order, and computes none that nobody asked for."""
    handler = load(two_in_two_out())
    inputs = {"a": np.full((1, 3), 5, "f4"), "b": np.full((1, 3), 2, "f4")}

    assert [y[0, 0] for y in handler.execute(inputs, ["d", "s"])] == [3, 7]
    assert [y[0, 0] for y in handler.execute(inputs, ["s"])] == [7]


def test_a_tensor_without_elements_is_valid(load):
    """A variable dimension may be 0."""
    handler = load(identity(shape=("batch", "any")))

    [y] = handler.execute({"x": np.zeros((2, 0), "f4")}, ["y"])

    assert y.shape == (2, 0)


def test_a_failing_execution_is_told_in_the_frameworks_words(load):
    """What ONNX Runtime raises while it runs is EXECUTION_FAILED, names the model, and the next execution works."""
    nodes = [helper.make_node("Gather", ["table", "x"], ["y"])]
    tensors = [("x", TensorProto.INT64, ["batch"])], [("y", TensorProto.FLOAT, ["batch"])]
    handler = load(graph(nodes, *tensors, [("table", np.array([10, 20], "f4"))]))

    error = refused(handler.execute, {"x": np.array([7])}, ["y"])

    assert error.kind is Kind.EXECUTION_FAILED
    assert "failed while running model 'm'" in error.message
    assert "indices element out of data bounds" in error.message
    assert "\n" not in error.message
    assert handler.execute({"x": np.array([1])}, ["y"])[0].tolist() == [20]


@pytest.mark.parametrize("inputs", [{"x": np.zeros((1, 3), "f4")}, {"x": np.zeros((1, 2), "f8")}, {}], ids=str)
def test_arrays_that_do_not_fit_are_an_error_of_ours(load, inputs):
    """A wrong shape, a wrong type or a missing input never leaves as ONNX Runtime's own exception."""
    assert refused(load(identity()).execute, inputs, ["y"]).kind is Kind.EXECUTION_FAILED


def test_an_execution_that_finds_no_memory_is_out_of_memory(load):
    """An allocation that can't succeed is OUT_OF_MEMORY, from the words of ONNX Runtime's allocator."""
    nodes = [helper.make_node("ConstantOfShape", ["x"], ["y"])]
    handler = load(graph(nodes, [("x", TensorProto.INT64, [1])], [("y", TensorProto.FLOAT, ["n"])]))

    # 2^52 bytes lie beyond the address space of a process, however much the system overcommits.
    error = refused(handler.execute, {"x": np.array([1 << 50])}, ["y"])

    assert error.kind is Kind.OUT_OF_MEMORY
    assert "model 'm' ran out of memory" in error.message


# -- completing a configuration --------------------------------------------------------------------------------------


def test_a_batching_graph_completes_an_empty_configuration(complete):
    """Inputs, outputs and batching come from a graph whose first dimensions are all variable; batch size is Triton's 4."""
    config = complete(mlp()[0])

    assert config.max_batch_size == 4
    assert config.dynamic_batching == DynamicBatching(preferred_batch_size=(4,))
    assert config.inputs == (TensorSpec("x", FP32, (16,)),)
    assert config.outputs == (TensorSpec("y", FP32, (4,)),)


def test_loading_completes_as_completing_does(complete, load):
    """`load` of an incomplete configuration ends with the configuration that `autocomplete` gives, and again with it."""
    model = mlp()[0]
    config = complete(model)

    assert load(model).config == config
    fields = {
        name: getattr(config, name) for name in ("max_batch_size", "dynamic_batching", "inputs", "outputs", "guess")
    }
    assert load(model, **fields).config == config


def test_a_given_batch_size_is_kept_and_batched(complete):
    """With a max_batch_size and no tensors the size stays, and requests are batched; a size of 1 leaves nothing to."""
    config = complete(mlp()[0], max_batch_size=32)

    assert config.max_batch_size == 32
    assert config.dynamic_batching == DynamicBatching(preferred_batch_size=(32,))
    assert complete(mlp()[0], max_batch_size=1).dynamic_batching is None


def test_given_batching_is_kept(complete):
    """A dynamic_batching block is the author's; its defaults follow from the batch size that was filled in."""
    config = complete(mlp()[0], dynamic_batching=DynamicBatching((), max_queue_delay_microseconds=5))

    assert config.dynamic_batching == DynamicBatching((4,), max_queue_delay_microseconds=5)


def test_a_complete_configuration_is_left_alone(complete):
    """Where inputs and outputs are declared, nothing is added: no batch size and no batching."""
    tensors = {"inputs": (TensorSpec("x", FP32, (-1, 16)),), "outputs": (TensorSpec("y", FP32, (-1, 4)),)}

    assert complete(mlp()[0], **tensors) == ModelConfig("m", **tensors)


def test_half_a_configuration_is_completed_like_none(complete):
    """With outputs declared and inputs not, the batch size is filled in as well, and the declared half is checked by it."""
    config = complete(mlp()[0], outputs=(TensorSpec("y", FP32, (4,), label_filename="labels.txt"),))

    assert config.max_batch_size == 4
    assert config.inputs == (TensorSpec("x", FP32, (16,)),)
    assert config.outputs == (TensorSpec("y", FP32, (4,), label_filename="labels.txt"),)


def test_an_undeclared_input_joins_the_declared_ones(complete):
    """Where outputs are left out, all is completed; an output that is not declared beside others is not served."""
    declared = {name: TensorSpec(name, FP32, (3,)) for name in "abd"}
    config = complete(two_in_two_out(), max_batch_size=8, inputs=(declared["b"],))
    both = complete(two_in_two_out(), max_batch_size=8, inputs=(declared["b"], declared["a"]), outputs=(declared["d"],))

    assert [spec.name for spec in config.inputs] == ["b", "a"]
    assert [spec.name for spec in both.outputs] == ["d"]


def test_a_fixed_first_dimension_means_no_batching(complete):
    """A graph that fixes the first dimension of one tensor is not batched, and keeps its full shapes."""
    config = complete(identity(shape=(1, "any"), out=(1, "any")))

    assert (config.max_batch_size, config.dynamic_batching) == (0, None)
    assert config.inputs == (TensorSpec("x", FP32, (1, -1)),)


def test_one_fixed_tensor_is_enough(complete):
    """Batching needs a variable first dimension everywhere: a variable input with a fixed output has none."""
    nodes = [helper.make_node("ReduceSum", ["x"], ["y"], keepdims=1)]
    model = graph(nodes, [("x", TensorProto.FLOAT, ["batch", 3])], [("y", TensorProto.FLOAT, [1, 1])])

    assert complete(model).max_batch_size == 0


def test_unnamed_dimensions_are_variable(complete):
    """A dimension without a name and without a size takes any size."""
    assert complete(identity(shape=("batch", None))).inputs == (TensorSpec("x", FP32, (-1,)),)


def test_an_output_that_is_not_served_may_have_no_batch_dimension(load):
    """Only declared outputs have to batch: one beside them, such as a loss, does not stand in the way."""
    nodes = [helper.make_node("Identity", ["x"], ["y"]), helper.make_node("ReduceSum", ["x"], ["loss"], keepdims=0)]
    x, y = (("x", TensorProto.FLOAT, ["batch", 2]), ("y", TensorProto.FLOAT, ["batch", 2]))
    model = graph(nodes, [x], [y, ("loss", TensorProto.FLOAT, [])])
    spec = TensorSpec("y", FP32, (2,))

    assert load(model, max_batch_size=8, inputs=(TensorSpec("x", FP32, (2,)),), outputs=(spec,)).config.outputs == (
        spec,
    )


# -- scalars ---------------------------------------------------------------------------------------------------------


def test_a_scalar_is_one_element_outside(load):
    """The protocol has no scalars: a graph's scalar is declared as one element, reshaped to nothing for the model."""
    handler = load(identity(shape=()))
    spec = TensorSpec("x", FP32, (1,), reshape=())

    assert handler.config.inputs == (spec,)
    assert handler.config.max_batch_size == 0
    assert handler.execute({"x": np.array([3], "f4").reshape(spec.reshape)}, ["y"])[0].reshape(spec.dims) == [3]


def test_a_vector_of_a_batch_is_one_element_each(load):
    """A batching graph's rank-1 tensor is, without its batch dimension, a scalar."""
    handler = load(identity(TensorProto.INT64, shape=("batch",)))

    assert handler.config.inputs == (TensorSpec("x", INT64, (1,), reshape=()),)
    assert handler.config.max_batch_size == 4


@pytest.mark.parametrize("dims", [(1,), (1, 1)])
def test_a_declared_scalar_needs_no_reshape(load, dims):
    """A configuration that declares a scalar with dims of 1, as Triton's do, gets the reshape that it may not write."""
    specs = {"inputs": (TensorSpec("x", FP32, dims),), "outputs": (TensorSpec("y", FP32, dims),)}

    config = load(identity(shape=()), **specs).config

    assert config.inputs == (TensorSpec("x", FP32, dims, reshape=()),)
    assert config.outputs == (TensorSpec("y", FP32, dims, reshape=()),)


def test_a_declared_reshape_is_what_the_graph_sees(complete):
    """Dims are the client's shape, the reshape is the graph's: the latter is compared."""
    spec = TensorSpec("x", FP32, (4, 4), reshape=(16,))

    assert complete(mlp()[0], max_batch_size=8, inputs=(spec,)).inputs == (spec,)
    assert (
        "specifies 3 dimensions"
        in refused(complete, mlp()[0], max_batch_size=8, inputs=(TensorSpec("x", FP32, (16,), reshape=(4, 4)),)).message
    )


# -- what is not completed -------------------------------------------------------------------------------------------


ALL = {"inputs": (TensorSpec("x", FP32, (16,)),), "outputs": (TensorSpec("y", FP32, (4,)),)}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {**ALL, "inputs": (*ALL["inputs"], TensorSpec("z", FP32, (1,)))},
            "configuration expects 2 inputs, model provides 1: x",
        ),
        ({**ALL, "inputs": (), "strict": True}, "configuration expects 0 inputs, model provides 1: x"),
        (
            {**ALL, "outputs": (), "strict": True},
            "model configuration must contain at least one output, none were specified for 'm'",
        ),
    ],
)
def test_a_configuration_that_is_not_completed_says_everything(complete, config, message):
    """One that names inputs and outputs names all inputs; and a server may want that of all of them."""
    assert message in refused(complete, mlp()[0], max_batch_size=8, **config).message


def test_a_strict_configuration_gets_nothing_from_the_model(complete):
    """Neither a batch size nor a scheduler; it is checked all the same."""
    config = complete(mlp()[0], max_batch_size=8, strict=True, **ALL)

    assert (config.max_batch_size, config.dynamic_batching) == (8, None)
    assert "specifies 1 dimensions" in refused(complete, mlp()[0], strict=True, **ALL).message


def test_the_server_may_say_how_large_batches_are(complete):
    """Of models that batch and whose configuration leaves it out; a configuration that says it is right."""
    config = complete(mlp()[0], default_max_batch_size=16)

    assert (config.max_batch_size, config.dynamic_batching.preferred_batch_size) == (16, (16,))
    assert complete(mlp()[0], default_max_batch_size=16, max_batch_size=2).max_batch_size == 2
    assert complete(mlp()[0], default_max_batch_size=1).dynamic_batching is None


# -- disagreements ---------------------------------------------------------------------------------------------------


def tensors(x=None, y=None):
    """The MLP's tensors with one of them declared otherwise."""
    return {
        "inputs": (x or TensorSpec("x", FP32, (16,)),),
        "outputs": (y or TensorSpec("y", FP32, (4,)),),
    }


BATCH = (
    "an initial batch dimension because max_batch_size > 0 followed by the explicit tensor shape, making complete shape"
)


def dimensions(name, model, config):
    """The sentence about a tensor whose declared dimensions are not the graph's."""
    return f"model 'm', tensor '{name}': the model expects {model} but the model configuration specifies {config}"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"max_batch_size": 8, **tensors(x=TensorSpec("z", FP32, (16,)))},
            "unable to load model 'm', unexpected inference input 'z', allowed inputs are: x",
        ),
        (
            {"max_batch_size": 8, **tensors(y=TensorSpec("z", FP32, (4,)))},
            "unable to load model 'm', unexpected inference output 'z', allowed outputs are: y",
        ),
        (
            {"max_batch_size": 8, **tensors(x=TensorSpec("x", INT64, (16,)))},
            "unable to load model 'm', configuration expects datatype TYPE_INT64 for input 'x', model provides TYPE_FP32",
        ),
        (
            {"max_batch_size": 8, **tensors(y=TensorSpec("y", BYTES, (4,)))},
            "unable to load model 'm', configuration expects datatype TYPE_STRING for output 'y', model provides TYPE_FP32",
        ),
        (
            {"max_batch_size": 8, **tensors(x=TensorSpec("x", FP32, (16, 1)))},
            dimensions("x", "2 dimensions (shape [-1,16])", f"3 dimensions ({BATCH} [-1,16,1])"),
        ),
        (
            {"max_batch_size": 8, **tensors(y=TensorSpec("y", FP32, (5,)))},
            dimensions("y", "2 dimensions (shape [-1,4])", f"2 dimensions ({BATCH} [-1,5])"),
        ),
        (
            tensors(),
            dimensions("x", "2 dimensions (shape [-1,16])", "1 dimensions (shape [16])"),
        ),
        (
            {"max_batch_size": 8, **tensors(x=TensorSpec("x", FP32, (-1,)))},
            dimensions("x", "2 dimensions (shape [-1,16])", f"2 dimensions ({BATCH} [-1,-1])"),
        ),
    ],
    ids=["input name", "output name", "input type", "output type", "rank", "dimension", "no batch", "variable"],
)
def test_a_configuration_that_disagrees_is_refused(complete, load, config, message):
    """A declared name, type or shape that the graph does not have is INVALID_MODEL, in Triton's words."""
    for call in (complete, load):
        error = refused(call, mlp()[0], **config)
        assert error.kind is Kind.INVALID_MODEL
        assert error.message == message


def test_a_declared_dimension_may_fix_a_variable_one(complete):
    """What the graph leaves open the configuration may fix."""
    assert complete(identity(shape=("batch", "any")), inputs=(TensorSpec("x", FP32, (3,)),)).inputs[0].dims == (3,)


def test_a_batch_size_for_a_graph_without_batches_is_refused(complete):
    """max_batch_size on a graph with a fixed first dimension names each tensor that is in the way."""
    error = refused(complete, identity(shape=(3, 4)), max_batch_size=8)

    assert error.kind is Kind.INVALID_MODEL
    assert error.message == (
        "autofill failed for model 'm': model does not support batching while non-zero max_batch_size is specified: "
        "'x' [3,4], 'y' [3,4] must have a variable first dimension"
    )


def test_a_scalar_of_many_elements_is_refused(complete):
    """A scalar of the graph can't be declared with dimensions other than 1."""
    error = refused(complete, identity(shape=()), inputs=(TensorSpec("x", FP32, (2,)),))

    assert error.kind is Kind.INVALID_MODEL
    assert error.message.startswith("unable to load model 'm', scalar tensor 'x', should only provide 1")
    assert error.message.endswith("provided: [2].")


def test_what_the_protocol_cannot_carry_is_unsupported(save):
    """A sequence of maps, such as classifiers return by default, is refused with the way to export it differently."""
    nodes = [helper.make_node("SequenceConstruct", ["x"], ["y"])]
    y = helper.make_tensor_sequence_value_info("y", TensorProto.FLOAT, None)
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 2])
    model = helper.make_model(
        helper.make_graph(nodes, "graph", [x], [y]), opset_imports=[helper.make_opsetid("", 17)], ir_version=9
    )

    error = refused(OnnxHandler.load, ModelConfig("m"), save(model), CPU)

    assert error.kind is Kind.UNSUPPORTED
    assert "tensor 'y' has ONNX type seq(tensor(float))" in error.message
    assert "zipmap=False" in error.message


# -- parameters ------------------------------------------------------------------------------------------------------


def test_a_small_model_gets_one_thread_and_none_spins(load):
    """Without parameters a small model computes on the caller's thread alone, and idle threads sleep."""
    handler = load(mlp()[0])

    assert options(handler).intra_op_num_threads == 1
    assert options(handler).inter_op_num_threads == 1
    for scope in ("intra_op", "inter_op"):
        assert options(handler).get_session_config_entry(f"session.{scope}.allow_spinning") == "0"


def test_a_large_model_gets_a_thread_a_core(save, monkeypatch):
    """A model of a megabyte or more is worth splitting over the cores that this process may use."""
    monkeypatch.setattr(threads.os, "sched_getaffinity", lambda _pid: {0, 1, 2})
    handler = OnnxHandler.load(ModelConfig("m"), save(mlp(width=1024, hidden=512)[0]), CPU)

    assert options(handler).intra_op_num_threads == 3
    handler.close()


@pytest.mark.parametrize(
    ("parameters", "option", "expected"),
    [
        ({"intra_op_thread_count": "2"}, "intra_op_num_threads", 2),
        ({"intra_op_thread_count": "0"}, "intra_op_num_threads", 1),
        ({"inter_op_thread_count": "2"}, "inter_op_num_threads", 2),
        ({"execution_mode": "0"}, "execution_mode", "ORT_SEQUENTIAL"),
        ({"execution_mode": "1"}, "execution_mode", "ORT_PARALLEL"),
        ({"execution_mode": "1"}, "inter_op_num_threads", 3),
        ({"execution_mode": "1", "inter_op_thread_count": "2"}, "inter_op_num_threads", 2),
        ({"level": "-1"}, "graph_optimization_level", "ORT_DISABLE_ALL"),
        ({"level": "1"}, "graph_optimization_level", "ORT_ENABLE_BASIC"),
        ({"level": "2"}, "graph_optimization_level", "ORT_ENABLE_EXTENDED"),
        ({"level": "0"}, "graph_optimization_level", "ORT_ENABLE_ALL"),
        ({}, "graph_optimization_level", "ORT_ENABLE_ALL"),
        ({"enable_mem_arena": "0"}, "enable_cpu_mem_arena", False),
        ({"enable_mem_arena": "1"}, "enable_cpu_mem_arena", True),
        ({"enable_mem_pattern": "0"}, "enable_mem_pattern", False),
        ({"enable_mem_pattern": "1"}, "enable_mem_pattern", True),
    ],
    ids=str,
)
def test_parameters_reach_the_session(load, monkeypatch, parameters, option, expected):
    """Each parameter, named as Triton's backend names it, sets the session's option, and the model still runs."""
    monkeypatch.setattr(threads.os, "sched_getaffinity", lambda _pid: {0, 1, 2})
    handler = load(mlp()[0], parameters=parameters)

    value = getattr(options(handler), option)
    assert getattr(value, "name", value) == expected
    assert handler.execute({"x": np.zeros((2, 16), "f4")}, ["y"])[0].shape == (2, 4)


@pytest.mark.parametrize(("level", "expected"), [(-1, "ORT_DISABLE_ALL"), (2, "ORT_ENABLE_EXTENDED")])
def test_the_graph_level_of_the_configuration_counts(load, level, expected):
    """optimization.graph.level means what the parameter means, and the parameter wins."""
    assert options(load(mlp()[0], optimization_level=level)).graph_optimization_level.name == expected
    both = load(mlp()[0], optimization_level=level, parameters={"level": "1"})
    assert options(both).graph_optimization_level.name == "ORT_ENABLE_BASIC"


@pytest.mark.parametrize(
    ("parameter", "value", "limits"),
    [
        ("intra_op_thread_count", "many", "from 0 to 1024"),
        ("intra_op_thread_count", "-1", "from 0 to 1024"),
        ("intra_op_thread_count", "1025", "from 0 to 1024"),
        ("inter_op_thread_count", "", "from 0 to 1024"),
        ("inter_op_thread_count", "1.5", "from 0 to 1024"),
        ("execution_mode", "2", "from 0 to 1"),
        ("level", "3", "from -1 to 2"),
        ("level", "all", "from -1 to 2"),
        ("enable_mem_arena", "true", "from 0 to 1"),
        ("enable_mem_pattern", "-1", "from 0 to 1"),
    ],
)
def test_a_bad_parameter_is_refused_by_name(load, parameter, value, limits):
    """A value that is no integer in range is INVALID_MODEL with the parameter, the range and the value."""
    error = refused(load, mlp()[0], parameters={parameter: value})

    assert error.kind is Kind.INVALID_MODEL
    assert error.message == f"model 'm': parameter '{parameter}' must be an integer {limits}, got '{value}'"


@pytest.mark.parametrize("level", [3, -2])
def test_a_graph_level_that_does_not_exist_is_refused(load, level):
    """optimization.graph.level has four values for ONNX Runtime, and another is refused by that name."""
    error = refused(load, mlp()[0], optimization_level=level)

    assert error.kind is Kind.INVALID_MODEL
    assert "optimization.graph.level must be -1, 0, 1 or 2" in error.message


# -- files -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "content",
    [b"", b"not a model\n", mlp()[0].SerializeToString()[:-100], mlp()[0].SerializeToString()[:40]],
    ids=["empty", "text", "cut in the weights", "cut in the graph"],
)
def test_a_broken_file_is_an_invalid_model(save, content):
    """A file that ONNX Runtime can't read is INVALID_MODEL, names the model, and is one line."""
    for call in (OnnxHandler.autocomplete, lambda *args: OnnxHandler.load(*args, CPU)):
        error = refused(call, ModelConfig("m"), save(content))
        assert error.kind is Kind.INVALID_MODEL
        assert error.message.startswith("ONNX Runtime can't load model 'm': ")
        assert "\n" not in error.message


def test_an_operator_nobody_knows_is_an_invalid_model(load):
    """A graph with a custom operator says which one."""
    error = refused(load, graph([helper.make_node("Frobnicate", ["x"], ["y"])], [X16], [Y4]))

    assert error.kind is Kind.INVALID_MODEL
    assert "Frobnicate" in error.message


def test_a_missing_file_is_an_invalid_model(tmp_path):
    """Neither a path to nothing nor a directory without the model in it leaves as an OSError."""
    for path in (tmp_path / "gone.onnx", tmp_path):
        for call in (OnnxHandler.autocomplete, lambda *args: OnnxHandler.load(*args, CPU)):
            assert refused(call, ModelConfig("m"), path).kind is Kind.INVALID_MODEL


def test_a_directory_holds_a_model_and_its_data(tmp_path):
    """A model whose weights lie beside it in files is a directory with model.onnx in it."""
    model, w1, w2 = mlp()
    onnx.save(model, tmp_path / "model.onnx", save_as_external_data=True, location="weights.bin", size_threshold=0)

    assert OnnxHandler.autocomplete(ModelConfig("m"), tmp_path).inputs == (TensorSpec("x", FP32, (16,)),)
    handler = OnnxHandler.load(ModelConfig("m"), tmp_path, CPU)
    x = np.ones((1, 16), "f4")
    np.testing.assert_allclose(handler.execute({"x": x}, ["y"])[0], np.maximum(x @ w1, 0) @ w2, rtol=1e-4)
    handler.close()

    (tmp_path / "weights.bin").unlink()
    assert refused(OnnxHandler.load, ModelConfig("m"), tmp_path, CPU).kind is Kind.INVALID_MODEL


# -- memory and devices ----------------------------------------------------------------------------------------------


def test_closing_frees_the_session(save):
    """After `close` nobody holds the session, without any help of the garbage collector."""
    handler = OnnxHandler.load(ModelConfig("m"), save(mlp()[0]), CPU)
    session = weakref.ref(session_of(handler))

    gc.disable()
    try:
        handler.close()
        assert session() is None
    finally:
        gc.enable()


def test_closing_gives_the_weights_back(save):
    """The memory that loading took, at least the weights, is the system's again after `close`."""
    memory.return_large_blocks()
    weights = np.full((4096, 2304), 0.5, "f4")  # larger than any block that the C library would keep
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"])]
    x, y = (("x", TensorProto.FLOAT, ["batch", 4096]), ("y", TensorProto.FLOAT, ["batch", 2304]))
    path = save(graph(nodes, [x], [y], [("w", weights)]))
    gc.collect()
    memory.trim()
    before = memory.private_memory()

    handler = OnnxHandler.load(ModelConfig("m"), path, CPU)
    loaded = memory.private_memory() - before
    handler.close()
    memory.trim()
    left = memory.private_memory() - before

    assert loaded > weights.nbytes * 0.9
    assert left < weights.nbytes * 0.25


def test_without_onnx_runtime_the_error_says_what_to_install(save, monkeypatch):
    """ONNX Runtime is optional: where it is missing, loading a model names the extra to install."""
    path = save(mlp()[0])
    onnx_runtime.cache_clear()
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    try:
        for call in (OnnxHandler.autocomplete, lambda *args: OnnxHandler.load(*args, CPU)):
            error = refused(call, ModelConfig("m"), path)
            assert error.kind is Kind.UNSUPPORTED
            assert "pip install onnxruntime" in error.message
    finally:
        onnx_runtime.cache_clear()


def test_parameters_without_effect_are_named_once(load, caplog):
    """A parameter that ONNX models here do not know is named in the log, so that nobody believes it is honoured."""
    load(mlp()[0], parameters={"enable_fp8": "1000", "intra_op_thread_count": "1"})

    assert [record.getMessage() for record in caplog.records] == [
        "parameters without effect on ONNX models: 'enable_fp8'"
    ]


def test_a_file_that_is_no_onnx_says_what_to_do(tmp_path):
    """Behind ONNX Runtime's own words, which name nothing to do."""
    (tmp_path / "model.onnx").write_bytes(b"version https://git-lfs.github.com/spec/v1")
    with pytest.raises(
        MmeError, match=r"Protobuf parsing failed\.; the file is no ONNX model, or was cut off"
    ) as caught:
        create_session(tmp_path / "model.onnx", onnx_runtime().SessionOptions(), "m")
    assert caught.value.kind is Kind.INVALID_MODEL
