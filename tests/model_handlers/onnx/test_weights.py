"""ONNX models taken apart, mapped, refined and packed: real graphs, and ONNX Runtime's own opinion of them."""

import struct

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from model_handlers.config.model_config import ModelConfig
from model_handlers.errors import Kind, MmeError
from model_handlers.mapped import Span
from model_handlers.onnx import OnnxHandler, weights
from model_handlers.onnx.weights import SMALLEST, BufferedReader, bytes_field, fields, varint
from serve.weights.store import Draft

SIDE = 256  # 256 KiB of FP32 a matrix
CONFIG = ModelConfig("m")


def matrix(seed, rows=SIDE, columns=SIDE):
    """Random weights, small enough that products do not overflow."""
    return (np.random.default_rng(seed).standard_normal((rows, columns)) / 16).astype("f4")


def model(nodes, weights, x=("batch", SIDE), y=("batch", SIDE), kind=TensorProto.FLOAT):
    """A model from `x` to `y`."""
    tensors = [helper.make_tensor_value_info(name, kind, list(shape)) for name, shape in (("x", x), ("y", y))]
    initializers = [
        weight if isinstance(weight, TensorProto) else numpy_helper.from_array(weight, name)
        for name, weight in weights.items()
    ]
    made = helper.make_graph(nodes, "graph", tensors[:1], tensors[1:], initializers)
    return helper.make_model(made, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


def mlp():
    """Two layers; `tied` is `w1` under another name, and `bias` is too small for a file."""
    nodes = [
        helper.make_node("MatMul", ["x", "w1"], ["a"]),
        helper.make_node("Add", ["a", "bias"], ["b"]),
        helper.make_node("Relu", ["b"], ["c"]),
        helper.make_node("MatMul", ["c", "w2"], ["d"]),
        helper.make_node("MatMul", ["d", "tied"], ["y"]),
    ]
    return model(nodes, {"w1": matrix(1), "w2": matrix(2), "tied": matrix(1), "bias": matrix(3, 1)[0]})


def branches():
    """An If whose branches hold weights of their own, inside the node."""
    arms = [
        helper.make_graph(
            [helper.make_node("MatMul", ["x", f"w{arm}"], [f"out{arm}"])],
            f"arm{arm}",
            [],
            [helper.make_tensor_value_info(f"out{arm}", TensorProto.FLOAT, None)],
            [numpy_helper.from_array(matrix(arm), f"w{arm}")],
        )
        for arm in (1, 2)
    ]
    nodes = [
        helper.make_node("ReduceSum", ["x"], ["sum"], keepdims=0),
        helper.make_node("Greater", ["sum", "zero"], ["positive"]),
        helper.make_node("If", ["positive"], ["y"], then_branch=arms[0], else_branch=arms[1]),
    ]
    return model(nodes, {"zero": np.array(0, "f4")})


def loops():
    """A Loop whose body multiplies by weights of its own three times."""
    body = helper.make_graph(
        [helper.make_node("Identity", ["going"], ["goes"]), helper.make_node("MatMul", ["carried", "w"], ["carries"])],
        "body",
        [
            helper.make_tensor_value_info("step", TensorProto.INT64, []),
            helper.make_tensor_value_info("going", TensorProto.BOOL, []),
            helper.make_tensor_value_info("carried", TensorProto.FLOAT, None),
        ],
        [
            helper.make_tensor_value_info("goes", TensorProto.BOOL, []),
            helper.make_tensor_value_info("carries", TensorProto.FLOAT, None),
        ],
        [numpy_helper.from_array(matrix(5), "w")],
    )
    nodes = [helper.make_node("Loop", ["times", "yes", "x"], ["y"], body=body)]
    return model(nodes, {"times": np.array(3, "i8"), "yes": np.array(True)})


def quantised():
    """A dynamically quantised product: UINT8 activations, INT8 weights."""
    nodes = [
        helper.make_node("DynamicQuantizeLinear", ["x"], ["q", "scale", "point"]),
        helper.make_node("MatMulInteger", ["q", "w", "point"], ["i"]),
        helper.make_node("Cast", ["i"], ["f"], to=TensorProto.FLOAT),
        helper.make_node("Mul", ["f", "scale"], ["y"]),
    ]
    return model(nodes, {"w": np.random.default_rng(4).integers(-127, 127, (SIDE, SIDE), np.int8)})


def convolution():
    """A convolution: its kernels want weights in blocks, which optimising makes new tensors of."""
    nodes = [helper.make_node("Conv", ["x", "w"], ["y"], pads=[1, 1, 1, 1])]
    weights = {"w": (np.random.default_rng(6).standard_normal((64, 64, 3, 3)) / 16).astype("f4")}
    return model(nodes, weights, ("batch", 64, 8, 8), ("batch", 64, 8, 8))


def half():
    """FP16 weights."""
    nodes = [
        helper.make_node("Cast", ["w"], ["wide"], to=TensorProto.FLOAT),
        helper.make_node("MatMul", ["x", "wide"], ["y"]),
    ]
    return model(nodes, {"w": matrix(7).astype("f2")})


def texts():
    """A large tensor of strings, which no file can hold, beside one of numbers."""
    labels = helper.make_tensor("labels", TensorProto.STRING, [SIDE], [b"label" * 80] * SIDE)
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["y"]),
        helper.make_node("Shape", ["labels"], ["unused"]),
    ]
    return model(nodes, {"labels": labels, "w": matrix(8)})


def elements_by_type():
    """A large tensor whose elements lie in `float_data` and not in `raw_data`."""
    weights = helper.make_tensor("w", TensorProto.FLOAT, [SIDE, SIDE], matrix(9).ravel().tolist())
    return model([helper.make_node("MatMul", ["x", "w"], ["y"])], {"w": weights})


# Of each: how many blobs there are when it is written, how many are mapped once it is refined.
MODELS = {
    "mlp": (mlp, 2, 2),
    "branches": (branches, 2, 2),
    "loops": (loops, 1, 1),
    "quantised": (quantised, 1, 1),
    "convolution": (convolution, 1, 1),
    "half": (half, 1, 1),
    "texts": (texts, 1, 1),
    "elements by type": (elements_by_type, 0, 1),
}


@pytest.fixture
def drafts(tmp_path):
    """Makes drafts that share their blobs."""
    (tmp_path / "files").mkdir()
    made = []

    def drafts():
        folder = tmp_path / f"draft {len(made)}"
        folder.mkdir()
        made.append(Draft(folder, tmp_path / "files"))
        return made[-1]

    yield drafts
    for draft in made:
        draft.close()


@pytest.fixture
def write(drafts, tmp_path):
    """Takes a model apart; returns its graph's file and its draft."""

    def write(path):
        draft = drafts()
        graph = tmp_path / "files" / f"written {draft.folder.name}"
        graph.write_bytes(OnnxHandler.write_form(CONFIG, path, draft))
        return graph, draft

    return write


@pytest.fixture
def refine(drafts, tmp_path):
    """Refines a written graph; returns its graph's file and its draft."""

    def refine(written):
        draft = drafts()
        graph = tmp_path / "files" / f"refined {draft.folder.name}"
        graph.write_bytes(OnnxHandler.refine_form(CONFIG, written, draft))
        return graph, draft

    return refine


@pytest.fixture
def save(tmp_path):
    """Writes a model's file."""

    def save(made, name="model.onnx"):
        path = tmp_path / "source" / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(made if isinstance(made, bytes) else made.SerializeToString())
        return path

    return save


def answer(handler, shape):
    """What a handler makes of the same random input each time; it is closed afterwards."""
    x = (np.random.default_rng(0).standard_normal(shape)).astype("f4")
    try:
        return handler.execute({"x": x}, ["y"])[0]
    finally:
        handler.close()


def plain_answer(path, shape):
    """What ONNX Runtime itself answers, from the model's own file."""
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return session.run(["y"], {"x": (np.random.default_rng(0).standard_normal(shape)).astype("f4")})[0]


def refused(call, *args, **kwargs):
    """The error of a call that must be refused."""
    with pytest.raises(MmeError) as caught:
        call(*args, **kwargs)
    return caught.value


# -- the same answers --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_a_model_answers_the_same_in_every_form(write, refine, save, name):
    """Plain, written, refined, mapped and packed: the numbers agree, and the model's own file is left as it was."""
    make, blobs, mapped = MODELS[name]
    shape = (3, 64, 8, 8) if name == "convolution" else (3, SIDE)
    path = save(make())
    before = path.read_bytes(), path.stat().st_mtime_ns
    expected = plain_answer(path, shape)

    written, draft = write(path)
    refined, better = refine(written)

    assert len(draft.blobs) == blobs
    assert len(better.blobs) == mapped
    assert OnnxHandler.try_form(CONFIG, refined).alike
    for form in (written, refined):
        for packed in (False, True):
            handler = OnnxHandler.load_form(CONFIG, form, refined=form == refined, packed=packed)
            np.testing.assert_allclose(answer(handler, shape), expected, rtol=1e-4, atol=1e-4)
    assert (path.read_bytes(), path.stat().st_mtime_ns) == before


def test_a_form_needs_its_blobs_and_nothing_else(write, refine, save):
    """Neither the model's file nor the written graph is needed any more; a form without a blob is refused."""
    path = save(mlp())
    expected = plain_answer(path, (1, SIDE))
    written, _ = write(path)
    refined, draft = refine(written)
    path.unlink()
    written.unlink()

    found = answer(OnnxHandler.load_form(CONFIG, refined, refined=True, packed=False), (1, SIDE))

    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
    (refined.parent / next(iter(draft.blobs))).unlink()
    assert refused(OnnxHandler.load_form, CONFIG, refined, refined=True, packed=False).kind is Kind.INVALID_MODEL


def test_a_form_completes_a_configuration_as_the_file_does(write, refine, save):
    """Inputs, outputs and batching come from a form as they come from the model's file."""
    path = save(mlp())
    written, _ = write(path)
    refined, _ = refine(written)
    expected = OnnxHandler.autocomplete(CONFIG, path)

    for form in (written, refined):
        handler = OnnxHandler.load_form(CONFIG, form, refined=form == refined, packed=False)
        assert handler.config == expected
        handler.close()


# -- what is in a form -------------------------------------------------------------------------------------------------


def test_equal_tensors_are_one_blob_and_small_ones_stay(write, save):
    """Weights of one content under two names are one file; a bias stays in the graph."""
    graph, draft = write(save(mlp()))

    assert sorted(draft.blobs.values()) == [SIDE * SIDE * 4] * 2
    tensors = {tensor.name: tensor for tensor in onnx.load(graph, load_external_data=False).graph.initializer}
    assert tensors["w1"].external_data[0].value == tensors["tied"].external_data[0].value
    assert numpy_helper.to_array(tensors["bias"]).tolist() == matrix(3, 1)[0].tolist()


def test_a_graph_without_large_weights_is_copied_byte_for_byte(write, save):
    """What is of no interest is left as it is, even fields that the published schema does not know."""
    nodes = [helper.make_node("Relu", ["x"], ["y"])]
    content = model(nodes, {"w": matrix(1, 1, SMALLEST // 4 - 1)}).SerializeToString() + bytes_field(1000, b"unknown")

    graph, draft = write(save(content))

    assert draft.blobs == {}
    assert graph.read_bytes() == content


@pytest.mark.parametrize("threshold", [0, 1024], ids=["all tensors outside", "large tensors outside"])
def test_weights_that_lie_beside_the_model_are_taken_too(write, save, threshold):
    """External data becomes blobs, its small tensors part of the graph; the form is made from both files."""
    inside = save(mlp())
    expected = plain_answer(inside, (2, SIDE))
    path = inside.parent / "beside.onnx"
    onnx.save(mlp(), path, save_as_external_data=True, location="weights.bin", size_threshold=threshold)

    graph, draft = write(path)

    assert sorted(source.name for source in draft.sources) == ["beside.onnx", "weights.bin"]
    assert draft.blobs == write(inside)[1].blobs
    found = answer(OnnxHandler.load_form(CONFIG, graph, refined=False, packed=False), (2, SIDE))
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


def test_weights_inside_nodes_may_lie_beside_the_model(write, save):
    """The branches of an If find their external data too."""
    path = save(branches())
    expected = plain_answer(path, (2, SIDE))
    first, draft = write(path)  # a model with external data in its branches

    second, again = write(first)

    assert again.blobs == draft.blobs
    assert second.read_bytes() == first.read_bytes()
    found = answer(OnnxHandler.load_form(CONFIG, second, refined=False, packed=False), (2, SIDE))
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ({"location": "../secret"}, "outside of the model's folder"),
        ({"location": "/etc/passwd"}, "outside of the model's folder"),
        ({"location": "link"}, "outside of the model's folder"),
        ({"location": "gone"}, "can't be read"),
        ({"location": "weights", "offset": "-1"}, "beyond the end"),
        ({"location": "weights", "offset": "9", "length": "99999999"}, "beyond the end"),
        ({"location": "weights", "offset": "many"}, "no number of bytes"),
    ],
    ids=str,
)
def test_weights_are_taken_from_the_models_folder_alone(write, save, entries, words):
    """A model that names files elsewhere, or more than there is, is no model that can be taken apart."""
    weights = matrix(1)
    tensor = TensorProto(name="w", dims=weights.shape, data_type=TensorProto.FLOAT, data_location=TensorProto.EXTERNAL)
    for key, value in entries.items():
        tensor.external_data.add(key=key, value=value)
    path = save(model([helper.make_node("MatMul", ["x", "w"], ["y"])], {"w": tensor}))
    (path.parent / "weights").write_bytes(weights.tobytes())
    (path.parent.parent / "secret").write_bytes(weights.tobytes())
    (path.parent / "link").symlink_to(path.parent.parent / "secret")

    error = refused(write, path)

    assert error.kind is Kind.INVALID_MODEL
    assert words in error.message


@pytest.mark.parametrize(
    "content",
    [b"\0\0\0", b"\x3a\xff\x01", b"\xff" * 20, bytes_field(7, b"\x0b"), bytes_field(7, bytes_field(5, b"\x4a\x7f"))],
    ids=["no field", "cut", "no number", "a group", "a tensor beyond its end"],
)
def test_what_is_no_model_is_refused(write, save, content):
    """Bytes that are no message are INVALID_MODEL and never another exception."""
    assert refused(write, save(content)).kind is Kind.INVALID_MODEL


@pytest.mark.parametrize("share", np.linspace(0.01, 0.99, 12))
def test_a_model_that_was_cut_is_refused(write, save, share):
    """However much of a file is missing, it is INVALID_MODEL."""
    content = mlp().SerializeToString()

    assert refused(write, save(content[: int(share * len(content))])).kind is Kind.INVALID_MODEL


# -- the wire format ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [0, 1, 127, 128, 300, 2**31, 2**63 - 1])
def test_numbers_are_read_as_they_are_written(drafts, save, number):
    """Varints of every length."""
    source = drafts().source(save(varint(number) + b"\x01"))

    assert BufferedReader(Span(source, 0, source.size)).varint(0, source.size) == (number, source.size - 1)


def test_fields_of_every_type_are_found(drafts, save):
    """Numbers, bytes and both fixed lengths, with a window much smaller than the message."""
    content = varint(1 << 3) + varint(300) + bytes_field(2, b"bytes" * 20) + varint(3 << 3 | 1) + struct.pack("<d", 0.5)
    content += varint(4 << 3 | 5) + struct.pack("<f", 0.5)
    source = drafts().source(save(content))
    window = BufferedReader(Span(source, 0, source.size), 16)

    found = [(field.number, window.read(field.value, field.end)) for field in fields(window, 0, source.size)]

    expected = [(1, varint(300)), (2, b"bytes" * 20), (3, struct.pack("<d", 0.5)), (4, struct.pack("<f", 0.5))]
    assert found == expected


# -- trials ------------------------------------------------------------------------------------------------------------


def test_a_trial_says_what_packing_takes(write, refine, save):
    """Packed weights are private memory and are not mapped any more; mapped ones take next to nothing."""
    nodes = [helper.make_node("Gather", ["table", "x"], ["rows"]), helper.make_node("MatMul", ["rows", "w"], ["y"])]
    weights = {"table": matrix(1, 8192, 1024), "w": matrix(2, 1024, 4096)}
    made = model(nodes, weights, ("batch", 4), ("batch", 4, 4096))
    made.graph.input[0].type.tensor_type.elem_type = TensorProto.INT64
    refined, draft = refine(write(save(made))[0])

    trial = OnnxHandler.try_form(CONFIG, refined)

    assert [draft.blobs[name] for name in trial.mapped_when_packed] == [weights["table"].nbytes]
    assert trial.mapped_bytes < trial.packed_bytes / 2
    assert trial.packed_bytes > weights["w"].nbytes / 2
    assert trial.gain == trial.mapped_ns / trial.packed_ns > 0


@pytest.mark.parametrize("dims", [(-1, 16, SIDE), (1, 1, SIDE)], ids=["of several tokens", "of one alone"])
def test_a_trial_has_inputs_that_are_longer_than_one(write, refine, save, dims):
    """One token says little of many: variable dimensions are as requests have them, unless the model takes no such input."""
    nodes = [helper.make_node("Reshape", ["x", "dims"], ["tokens"]), helper.make_node("MatMul", ["tokens", "w"], ["y"])]
    weights = {"w": matrix(1), "dims": np.array(dims, "i8")}
    made = model(nodes, weights, ("batch", "tokens", SIDE), ("batch", "tokens", SIDE))
    refined, _ = refine(write(save(made))[0])

    assert OnnxHandler.try_form(CONFIG, refined).alike


def test_a_model_that_answers_differently_is_noticed(write, refine, save, monkeypatch):
    """Answers of the mapped and the packed model are compared, whatever their type."""
    refined, _ = refine(write(save(mlp()))[0])
    answers = iter([[np.ones(3, "f4"), np.arange(3)], [np.ones(3, "f4"), np.arange(3) + 1]])
    monkeypatch.setattr(weights, "_try", lambda *_args, **_more: (next(answers), 1, 1, ()))

    assert not OnnxHandler.try_form(CONFIG, refined).alike


@pytest.mark.parametrize(
    ("one", "other", "alike"),
    [
        ([1.0, 100.0], [1.0, 100.5], True),
        ([1.0, 100.0], [1.0, 120.0], False),
        ([0.0, np.nan], [0.0, np.nan], True),
        ([0.0, np.inf], [0.0, np.inf], True),
        ([0.0, np.nan], [0.0, 1.0], False),
        ([1, 2], [1, 2], True),
        ([1, 2], [1, 3], False),
        ([], [], True),
        ([1.0], [1.0, 1.0], False),
        (["a"], ["a"], True),
        (["a"], ["b"], False),
    ],
)
def test_rounding_is_no_difference(one, other, alike):
    """Numbers may differ by a hundredth of the largest; integers, texts, shapes, and what is no number may not."""
    assert weights.same_numbers(np.array(one), np.array(other)) is alike


def test_a_refinement_depends_on_the_level_and_on_what_is_tried(monkeypatch):
    """What is refined for one level of optimisation is not found by another, nor what was tried with other sizes."""
    one, same, other = (OnnxHandler.refinement(ModelConfig("m", optimization_level=level)) for level in (0, 0, 1))

    assert one == same != other
    assert onnxruntime.__version__ in one
    monkeypatch.setattr(weights, "_USUAL", 1)
    assert OnnxHandler.refinement(ModelConfig("m")) != one


def test_a_model_that_refuses_zeros_fails_its_trial(write, refine, save):
    """A trial that fails is told in the framework's words."""
    nodes = [
        helper.make_node("ArgMax", ["x"], ["first"], axis=1, keepdims=0),
        helper.make_node("Sub", ["first", "one"], ["before"]),
        helper.make_node("Sub", ["before", "many"], ["index"]),
        helper.make_node("Gather", ["w", "index"], ["y"]),
    ]
    weights = {"w": matrix(1), "one": np.array(1), "many": np.array(SIDE)}
    refined, _ = refine(write(save(model(nodes, weights)))[0])

    assert "indices element out of data bounds" in refused(OnnxHandler.try_form, CONFIG, refined).message
