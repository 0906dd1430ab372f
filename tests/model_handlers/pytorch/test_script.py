"""TorchScript models: names, types, batches, and what is said of those that can't be served."""

from __future__ import annotations

import os
import weakref

import numpy as np
import pytest

from model_handlers.base import CPU
from model_handlers.config.pbtxt import parse_config
from model_handlers.errors import Kind, MmeError
from model_handlers.pytorch import TorchHandler
from model_handlers.pytorch.programs import load_program
from model_handlers.pytorch.runtime import translated
from tests.frameworks import framework

torch = framework("torch")
X = np.arange(32, dtype="f4").reshape(8, 4)


class _Scaled(torch.nn.Module):
    """A linear layer times its second input, and the sum of the first."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 3)

    def forward(self, x: torch.Tensor, scale: torch.Tensor):
        return self.layer(x) * scale, x.sum(1, keepdim=True)


class _Named(torch.nn.Module):
    """A dictionary in, a dictionary out."""

    def forward(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"sum": tensors["a"] + tensors["b"], "difference": tensors["a"] - tensors["b"]}


class _Shout(torch.nn.Module):
    """Strings in, strings and their lengths out."""

    def forward(self, texts: list[str]) -> tuple[list[str], torch.Tensor]:
        loud = [text.upper() for text in texts]
        return loud, torch.tensor([[len(text)] for text in texts])


class _Optionally(torch.nn.Module):
    """A second input that may be left out."""

    def forward(self, x: torch.Tensor, shift: torch.Tensor | None = None):
        return x if shift is None else x + shift


class _Generous(torch.nn.Module):
    """As many results as its input has rows."""

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [x[0:1], x[0:1] * 2]


class _Own(torch.nn.Module):
    """Its input, of a module that calls itself otherwise."""

    def forward(module, x: torch.Tensor):  # noqa: N805 - the point of it
        return x


class _Same(torch.nn.Module):
    """Its input."""

    def forward(self, x: torch.Tensor):
        return x


NAMES = {
    "arguments": (("x", "scale"), ("OUTPUT__0", "OUTPUT__1")),
    "another order": (("scale", "x"), ("OUTPUT__1", "OUTPUT__0")),
    "positions": (("INPUT__0", "INPUT__1"), ("OUT__0", "OUT__1")),
    "positions out of order": (("b__1", "a__0"), ("RESULT[1]", "RESULT[0]")),
    "anything in order": (("one", "two"), ("three", "four")),
}


@pytest.mark.parametrize("convention", NAMES)
def test_names_follow_triton_s_rules(convention, save, load, specs):
    """By forward's arguments, by position, or by the order of the configuration: the same tensors meet."""
    module = _Scaled()
    inputs, outputs = NAMES[convention]
    is_x = [name in {"x", "INPUT__0", "a__0", "one"} for name in inputs]
    is_scaled = [name in {"OUTPUT__0", "OUT__0", "RESULT[0]", "three"} for name in outputs]
    handler = load(
        save(module),
        specs(**{name: ("FP32", [4] if x else [1]) for name, x in zip(inputs, is_x, strict=True)}),
        specs(**{name: ("FP32", [3] if scaled else [1]) for name, scaled in zip(outputs, is_scaled, strict=True)}),
    )
    two = np.full((8, 1), 2, "f4")
    answers = handler.execute(
        {name: X if x else two for name, x in zip(inputs, is_x, strict=True)},
        outputs,
    )
    wanted = [each.detach().numpy() for each in module(torch.from_numpy(X), torch.from_numpy(two))]

    for scaled, answer in zip(is_scaled, answers, strict=True):
        np.testing.assert_array_equal(answer, wanted[0 if scaled else 1])


def test_a_module_may_call_itself_anything(save, load, specs):
    """It is no argument that anybody sends."""
    handler = load(save(_Own()), specs(x=("FP32", [4])), specs(y=("FP32", [4])))

    np.testing.assert_array_equal(handler.execute({"x": X}, ["y"]), [X])


@pytest.mark.parametrize("rows", [1, 3, 8])
def test_predictions_are_pytorch_s_own(rows, save, load, specs):
    """A traced model answers what the module does, whatever the batch."""
    module = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3)).eval()
    handler = load(save(module, torch.ones(2, 4)), specs(x=("FP32", [4])), specs(y=("FP32", [3])))
    (answer,) = handler.execute({"x": X[:rows]}, ["y"])

    np.testing.assert_allclose(answer, module(torch.from_numpy(X[:rows])).detach().numpy(), rtol=1e-6)


def test_only_wanted_outputs_are_returned(save, load, specs):
    """A client that wants one output gets that one."""
    handler = load(
        save(_Scaled()),
        specs(x=("FP32", [4]), scale=("FP32", [1])),
        specs(OUTPUT__0=("FP32", [3]), OUTPUT__1=("FP32", [1])),
    )
    (answer,) = handler.execute({"x": X, "scale": X[:, :1]}, ["OUTPUT__1"])

    np.testing.assert_array_equal(answer, X.sum(1, keepdims=True))


def test_a_dictionary_is_filled_and_read_by_name(save, load, specs):
    """A model of one Dict[str, Tensor] takes the inputs by their names and returns outputs by theirs."""
    handler = load(
        save(_Named()),
        specs(a=("FP32", [4]), b=("FP32", [4])),
        specs(difference=("FP32", [4]), sum=("FP32", [4])),
    )
    difference, total = handler.execute({"a": X, "b": 2 * X}, ["difference", "sum"])

    np.testing.assert_array_equal(difference, -X)
    np.testing.assert_array_equal(total, 3 * X)


def test_lists_of_strings_go_in_and_out(save, load, specs):
    """BYTES are List[str], one string a row."""
    handler = load(save(_Shout()), specs(texts=("BYTES", [1])), specs(A__0=("BYTES", [1]), A__1=("INT64", [1])))
    texts = np.array([["groß".encode()], [b"gott"], [b""]], dtype=object)
    loud, lengths = handler.execute({"texts": texts}, ["A__0", "A__1"])

    assert loud.tolist() == [["GROß".encode()], [b"GOTT"], [b""]]
    assert lengths.tolist() == [[5], [4], [0]]  # in bytes


def test_strings_must_be_text(save, load, specs):
    """Bytes that are no UTF-8 are the client's error."""
    handler = load(save(_Shout()), specs(texts=("BYTES", [1])), specs(A__0=("BYTES", [1])))
    with pytest.raises(MmeError, match="input 'texts' for model 'm' must hold UTF-8 text") as caught:
        handler.execute({"texts": np.array([[b"\xff"]], dtype=object)}, ["A__0"])

    assert caught.value.kind is Kind.INVALID_ARGUMENT


def test_an_optional_argument_may_be_left_out(save, load, specs):
    """What forward has a default for need not be declared."""
    path = save(_Optionally())

    assert load(path, specs(x=("FP32", [4])), specs(y=("FP32", [4]))).execute({"x": X}, ["y"])[0].tolist() == X.tolist()
    both = load(path, specs(x=("FP32", [4]), shift=("FP32", [4])), specs(y=("FP32", [4])))
    assert both.execute({"x": X, "shift": X}, ["y"])[0].tolist() == (2 * X).tolist()
    assert both.execute({"x": X}, ["y"])[0].tolist() == X.tolist()


KINDS = (
    "BOOL",
    "UINT8",
    "UINT16",
    "UINT32",
    "UINT64",
    "INT8",
    "INT16",
    "INT32",
    "INT64",
    "FP16",
    "FP32",
    "FP64",
    "BF16",
)


@pytest.mark.parametrize("kind", KINDS)
def test_every_type_passes_through(kind, save, load, specs):
    """Each type of the protocol that PyTorch has arrives and leaves with the same bits."""
    handler = load(save(_Same()), specs(x=(kind, [2])), specs(y=(kind, [2])))
    given = np.array([[0, 1], [1, 0]], handler.config.inputs[0].data_type.dtype)
    given.flags.writeable = False
    (answer,) = handler.execute({"x": given}, ["y"])

    assert answer.dtype == given.dtype
    assert answer.tolist() == given.tolist()


FLAGS = (
    {},
    {"INFERENCE_MODE": "false"},
    {"DISABLE_OPTIMIZED_EXECUTION": "true"},
    {"DISABLE_CUDNN": "true", "ENABLE_CACHE_CLEANING": "true"},
    {"ENABLE_JIT_EXECUTOR": "true", "ENABLE_JIT_PROFILING": "true", "ENABLE_TENSOR_FUSER": "true"},
)


@pytest.mark.parametrize("parameters", FLAGS, ids=str)
def test_parameters_change_no_answer(parameters, save, load, specs):
    """Triton's parameters are taken, and answers stay what they are."""
    handler = load(save(_Same()), specs(x=("FP32", [4])), specs(y=("FP32", [4])), **parameters)

    for _ in range(3):
        assert handler.execute({"x": X}, ["y"])[0].tolist() == X.tolist()


def test_instances_of_one_process_share_a_model_if_asked_to(save, load, specs, monkeypatch):
    """ENABLE_WEIGHT_SHARING: one model for all on a device, for as long as any of them is there; a new file is another."""
    path, x, y = save(_Same()), specs(x=("FP32", [4])), specs(y=("FP32", [4]))
    held = weakref.WeakSet()

    def noted(*args):
        program = load_program(*args)
        held.add(program)
        return program

    for module in ("handler", "programs"):
        monkeypatch.setattr(f"model_handlers.pytorch.{module}.load_program", noted)
    one, two = (load(path, x, y, ENABLE_WEIGHT_SHARING="true") for _ in range(2))
    assert len(held) == 1
    alone = load(path, x, y)
    assert len(held) == 2

    one.close()
    assert two.execute({"x": X}, ["y"])[0].tolist() == X.tolist()
    os.utime(path, ns=(1, 1))
    another = load(path, x, y, ENABLE_WEIGHT_SHARING="true")
    assert len(held) == 3
    two.close()
    assert len(held) == 2
    alone.close()
    another.close()
    assert not held


@pytest.mark.parametrize("name", ["INTRA_OP_THREAD_COUNT", "NUM_THREADS"])
def test_thread_count(name, save, load, specs):
    """Both names for the number of threads are obeyed; a small model has one by itself."""
    before = torch.get_num_threads()
    try:
        load(save(_Same()), specs(x=("FP32", [4])), specs(y=("FP32", [4])), **{name: "3"})
        assert torch.get_num_threads() == 3
        load(save(_Same()), specs(x=("FP32", [4])), specs(y=("FP32", [4])))
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


def test_inference_mode(save, load, specs):
    """The model computes in inference mode, unless INFERENCE_MODE is false; never with gradients."""

    class Mode(torch.nn.Module):
        def forward(self, x: torch.Tensor):
            return torch.tensor([torch.is_grad_enabled(), (x + 1).is_inference()])

    path = save(Mode())
    x, y = specs(x=("FP32", [4])), specs(y=("BOOL", [1]))

    assert load(path, x, y).execute({"x": X}, ["y"])[0].tolist() == [False, True]
    assert load(path, x, y, INFERENCE_MODE="false").execute({"x": X}, ["y"])[0].tolist() == [False, False]


REFUSED = {
    "one input of two": (
        {"x": ("FP32", [4])},
        {"y": ("FP32", [3]), "z": ("FP32", [1])},
        r"takes 2 inputs \(x, scale\) and its configuration declares 1: declare scale too",
    ),
    "three inputs of two": (
        {"a": ("FP32", [4]), "b": ("FP32", [1]), "c": ("FP32", [1])},
        {"y": ("FP32", [3]), "z": ("FP32", [1])},
        r"has 2 inputs \(x, scale\) and its configuration 3 \(a, b, c\), whose names fit none of them",
    ),
    "a position that is none": (
        {"INPUT__1": ("FP32", [4]), "INPUT__2": ("FP32", [1])},
        {"y": ("FP32", [3]), "z": ("FP32", [1])},
        "has no input of position 2, which the name 'INPUT__2' asks for: it has 2",
    ),
    "three outputs of two": (
        {"x": ("FP32", [4]), "scale": ("FP32", [1])},
        {"a": ("FP32", [3]), "b": ("FP32", [1]), "c": ("FP32", [1])},
        r"has 2 outputs \(OUTPUT__0, OUTPUT__1\) and its configuration 3 \(a, b, c\)",
    ),
    "strings for a tensor": (
        {"x": ("BYTES", [4]), "scale": ("FP32", [1])},
        {"y": ("FP32", [3]), "z": ("FP32", [1])},
        "configuration expects datatype TYPE_STRING for input 'x', model provides a tensor",
    ),
    "no outputs": (
        {"x": ("FP32", [4]), "scale": ("FP32", [1])},
        {},
        r"\(it takes x, scale and returns OUTPUT__0, OUTPUT__1\), and its configuration has no output: write into config",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_configuration_that_does_not_fit_is_refused(case, save, load, specs):
    """The sentence names what the model takes and gives, and what to write."""
    inputs, outputs, sentence = REFUSED[case]
    with pytest.raises(MmeError, match=sentence) as caught:
        load(save(_Scaled()), specs(**inputs), specs(**outputs))

    assert caught.value.kind is Kind.INVALID_MODEL


def test_a_list_of_tensors_has_as_many_outputs_as_it_has(save, load, specs):
    """Where only an execution tells how many results there are, it tells what is missing."""
    path = save(_Generous())
    x = specs(x=("FP32", [4]))

    assert load(path, x, specs(b__1=("FP32", [4]))).execute({"x": X[:1]}, ["b__1"])[0].tolist() == (2 * X[:1]).tolist()
    with pytest.raises(MmeError, match=r"returned 2 results \(0, 1\), none of which is output 'c__2'"):
        load(path, x, specs(c__2=("FP32", [4]))).execute({"x": X[:1]}, ["c__2"])


def test_an_input_of_the_wrong_type_is_named(save, load, specs):
    """TorchScript finds out when it computes; the error says so in one line."""
    handler = load(
        save(_Scaled()), specs(x=("FP64", [4]), scale=("FP32", [1])), specs(y=("FP32", [3]), z=("FP64", [1]))
    )
    with pytest.raises(MmeError, match=r"PyTorch execute failure: model 'm': .*dtype") as caught:
        handler.execute({"x": X.astype("f8"), "scale": X[:, :1]}, ["y", "z"])

    assert caught.value.kind is Kind.EXECUTION_FAILED
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(
    ("batch", "words"), [(8, "the first of them the batch"), (0, "none of them added for a batch")]
)
def test_shapes_that_a_model_cannot_take_are_told(save, load, specs, batch, words):
    """Dims with the batch dimension, or without it, are seen where they meet the file's."""
    handler = load(
        save(_Scaled()), specs(x=("FP32", [1, 5]), scale=("FP32", [1])), specs(y=("FP32", [3]), z=("FP32", [1])), batch
    )
    with pytest.raises(MmeError, match="PyTorch execute failure: model 'm'") as caught:
        handler.execute({"x": np.zeros((2, 1, 5), "f4"), "scale": X[:, :1]}, ["y"])

    assert "; it was given x [2, 1, 5], scale " in caught.value.message
    assert words in caught.value.message


def test_an_output_of_another_type_than_declared_is_named(save, load, specs):
    """An output is never handed on under a type that it has not."""
    handler = load(save(_Same()), specs(x=("FP32", [4])), specs(y=("FP16", [4])))
    with pytest.raises(MmeError, match="unexpected datatype TYPE_FP32 for inference output 'y', expecting TYPE_FP16"):
        handler.execute({"x": X}, ["y"])


def test_an_argument_that_nobody_can_send_is_refused(save, load, specs):
    """A list of numbers is neither a tensor nor one number."""

    class Powers(torch.nn.Module):
        def forward(self, x: torch.Tensor, exponents: list[int]):
            return x ** exponents[0]

    with pytest.raises(
        MmeError, match=r"forward's argument 'exponents' is List\[int\], and what can be sent is Tensor"
    ):
        load(save(Powers()), specs(x=("FP32", [4])), specs(y=("FP32", [4])))


class _Numbers(torch.nn.Module):
    """x times a whole number, plus a number, or less than that."""

    def forward(self, x: torch.Tensor, times: int, plus: float, negated: bool, power: int | None):  # noqa: FBT001 - what is tested
        y = x * times + plus
        if power is not None:
            y = y**power
        return -y if negated else y


NUMBERS = {"x": ("FP32", [4]), "times": ("INT64", [1]), "plus": ("FP32", [1]), "negated": ("BOOL", [1])}


@pytest.mark.parametrize(
    ("power", "expected"), [({}, -5.5), ({"power": np.array([2])}, -30.25), ({"power": np.array(2)}, -30.25)]
)
def test_numbers_are_tensors_of_one_element(save, load, specs, power, expected):
    """int, float and bool, with or without a dimension; an Optional without a default is None where it is left out."""
    handler = load(save(_Numbers()), specs(**NUMBERS, power=("INT64", [1])), specs(y=("FP32", [4])), 0)
    given = {"x": np.ones(4, "f4"), "times": np.array([3]), "plus": np.array([2.5], "f4"), "negated": np.array([True])}
    assert handler.execute({**given, **power}, ["y"])[0].tolist() == [expected] * 4


@pytest.mark.parametrize(
    ("wrong", "found"),
    [
        ({"times": np.array([3, 4])}, "'times' is int: it takes a tensor of one element of that kind, got int64 [2]"),
        ({"times": np.array([3.0])}, "'times' is int: it takes a tensor of one element of that kind, got float64 [1]"),
        ({"times": np.array([True])}, "'times' is int: it takes a tensor of one element of that kind, got bool [1]"),
        ({"negated": np.array([1])}, "'negated' is bool: it takes a tensor of one element of that kind, got int64 [1]"),
    ],
)
def test_what_is_not_that_number_is_the_clients_error(save, load, specs, wrong, found):
    """Several elements, or another kind of number."""
    handler = load(save(_Numbers()), specs(**NUMBERS), specs(y=("FP32", [4])), 0)
    given = {"x": np.ones(4, "f4"), "times": np.array([3]), "plus": np.array([1]), "negated": np.array([False])}
    with pytest.raises(MmeError) as caught:
        handler.execute({**given, **wrong}, ["y"])
    assert caught.value.kind is Kind.INVALID_ARGUMENT
    assert found in caught.value.message


class _Sums(torch.nn.Module):
    """A sum that begins anew at START."""

    def forward(self, X: torch.Tensor, START: torch.Tensor, SUM: torch.Tensor):  # noqa: N803 - the names of tensors
        kept = X + SUM * (1 - START)
        return kept, kept


def test_signals_and_states_of_sequences_are_arguments(save):
    """What no client sends is found by name like all else, and so is the state that is returned."""
    tensor = "data_type: TYPE_FP32 dims: [ 1 ]"
    config = parse_config(
        f"""max_batch_size: 4 input {{ name: "X" {tensor} }} output {{ name: "Y__0" {tensor} }}
        sequence_batching {{
          control_input {{ name: "START" control {{ kind: CONTROL_SEQUENCE_START fp32_false_true: [ 0, 1 ] }} }}
          state {{ input_name: "SUM" output_name: "SUM__1" {tensor} }} }}""",
        model="m",
    )
    handler = TorchHandler.load(config, save(_Sums()), CPU)
    rows = {name: np.full((2, 1), value, np.float32) for name, value in (("X", 1), ("START", 0), ("SUM", 5))}

    y, kept = handler.execute(rows, ["Y__0", "SUM__1"])
    handler.close()

    assert y.tolist() == kept.tolist() == [[6], [6]]
    assert [spec.name for spec in handler.config.inputs] == ["X"]


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        ("CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation'", Kind.OUT_OF_MEMORY),
        ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", Kind.OUT_OF_MEMORY),
        ("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED", Kind.OUT_OF_MEMORY),
        ("CUDA error: an illegal memory access was encountered", Kind.EXECUTION_FAILED),
    ],
    ids=["context", "cuBLAS", "cuDNN", "access"],
)
def test_a_full_gpu_is_known_by_whichever_library_finds_it_full(words, kind):
    """PyTorch's own class is of its allocator alone; the rest is RuntimeError."""
    assert translated(RuntimeError(words), "m", loading=False).kind is kind
