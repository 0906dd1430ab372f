"""Models in real processes: what goes in comes out, whatever its type and size, and what is given back stays good."""

import gc
import os
import signal
import threading
from pathlib import Path

import numpy as np
import psutil
import pytest
from isolated_models import Echo, HoldsMemory, LoadsAside, Misbehaves, Requests

from model_handlers.base import CPU
from model_handlers.config.model_config import DynamicBatching, ModelConfig
from model_handlers.errors import Kind, MmeError
from model_handlers.executor import at_home
from model_handlers.onnx import OnnxHandler
from model_handlers.python.handler import PythonHandler
from model_handlers.requests import ModelRequest
from model_handlers.tensor import BYTES, DATA_TYPES, FP32, TensorSpec
from model_handlers.worker.start import start_isolated

MIB = 1 << 20


def do(handler, deed, x=None):
    """Have the misbehaving model do one thing."""
    inputs = {"do": np.array([deed.encode()], object)}
    if x is not None:
        inputs["x"] = x
    (result,) = handler.execute(inputs, ["y"])
    return result


def sample(data_type, shape):
    """Random bits, or strings of all kinds."""
    rng = np.random.default_rng(3)
    count = int(np.prod(shape))
    if data_type is BYTES:
        array = np.empty(count, object)
        array[:] = [bytes(rng.integers(0, 256, size=n % 5, dtype="u1")) for n in range(count)]
        return array.reshape(shape)
    if data_type.name == "BOOL":
        return rng.integers(0, 2, size=shape).astype(bool)
    return np.frombuffer(rng.bytes(count * data_type.itemsize), data_type.dtype).reshape(shape)


@pytest.mark.parametrize("shape", [(2, 3), (0, 4), (1,), ()], ids=str)
@pytest.mark.parametrize("data_type", DATA_TYPES, ids=repr)
def test_every_type_crosses_both_ways(echo, data_type, shape):
    """An array of any data type and shape, empty and scalar too, comes back bit by bit, as itself and as a copy."""
    x = sample(data_type, shape)

    for result in echo.execute({"x": x}, ["y", "copy"]):
        assert result.shape == x.shape
        assert result.dtype == x.dtype
        assert result.tobytes() == x.tobytes() if data_type is not BYTES else result.tolist() == x.tolist()


@pytest.fixture(scope="module")
def echo(fork_server, loop_thread, tmp_path_factory):
    """One process for all round trips."""
    with at_home(loop_thread.home):
        handler = start_isolated(Echo, ModelConfig("m"), tmp_path_factory.mktemp("echo") / "x", CPU, "m_0_0")
    # a first batch: what a process holds from then on is no leak of a test
    handler.execute({"x": np.zeros(1, "f4")}, ["y"])
    yield handler
    handler.close()


def test_strided_and_swapped_inputs(echo):
    """Arrays that are not contiguous, or of the other byte order, arrive by value."""
    x = np.arange(24, dtype="f4").reshape(4, 6)

    assert np.array_equal(echo.execute({"x": x.T[::2]}, ["y"])[0], x.T[::2])
    assert np.array_equal(echo.execute({"x": x.astype(">f4")}, ["y"])[0], x)


@pytest.mark.parametrize(
    ("deed", "expected"), [("swap", [0, 1, 2, 3]), ("strided", [0, 2]), ("text", [b"\xc3\xa4", b"b"])]
)
def test_odd_outputs(start, deed, expected):
    """A model may return views with strides, the other byte order and arrays of text."""
    result = do(start(Misbehaves), deed, np.arange(4, dtype="f4"))

    assert result.tolist() == expected


def test_big_tensors(start):
    """A tensor of 64 MiB makes the memory grow, and so does an output that was not announced."""
    handler = start(Misbehaves)
    x = np.random.default_rng(1).integers(0, 256, 64 * MIB, dtype="u1")

    assert np.array_equal(do(handler, "nothing", x), x)
    grown = do(handler, "grow", np.array([40 * MIB], "i8"))
    assert grown.nbytes == 40 * MIB
    assert grown[:3].tolist() == [0, 1, 2]
    assert grown[-1] == (40 * MIB - 1) % 256


def test_results_outlive_batches(start):
    """Results stay what they were while later batches run, though the first of them was let go early."""
    handler = start(Echo)
    results = [handler.execute({"x": np.full(1000, i, "f4")}, ["y", "copy"]) for i in range(20)]

    for i, (y, copy) in enumerate(results):
        assert (y == i).all()
        assert (copy == i).all()


def test_slices_keep_results_alive(start):
    """A slice of a slice of a result is enough for its memory not to be written again."""
    handler = start(Echo)
    (whole,) = handler.execute({"x": np.full((4, 100), 7, "f4")}, ["copy"])
    part = whole[1:3].reshape(-1)[5:20].view("u4")[::2]
    before = part.copy()
    del whole
    for i in range(10):
        handler.execute({"x": np.full((4, 100), i, "f4")}, ["copy"])

    assert np.array_equal(part, before)


def test_memory_is_used_again(start):
    """Batches one after the other, each let go before the next, share one segment."""
    handler, before = start(Echo), mapped()
    for _ in range(100):
        handler.execute({"x": np.zeros(1000, "f4")}, ["y"])

    assert mapped() - before == 1
    assert do(start(Misbehaves), "segments").item() <= 2


def mapped():
    """Segments mapped in this process."""
    return Path("/proc/self/maps").read_text().count("mme-segment")


def test_small_batches_after_a_large_one(start):
    """Memory that is far too large for what came lately is given back while it holds a result, which stays good."""
    handler = start(Echo)
    large = np.ones(8 * MIB, "u1")
    (kept,) = handler.execute({"x": large}, ["y"])
    del kept
    for number in range(200):
        (result,) = handler.execute({"x": np.array([number])}, ["y"])
        assert result.tolist() == [number]

    (result,) = handler.execute({"x": large}, ["y"])
    np.testing.assert_array_equal(result, large)


def test_results_outlive_the_process(start):
    """Results stay good after the model was closed; their memory goes with them."""
    handler = start(Echo)
    before = mapped()
    (result,) = handler.execute({"x": np.arange(100, dtype="f4")}, ["y"])
    handler.close()

    assert result[99] == 99
    assert mapped() == before + 1
    del result
    assert mapped() == before


def test_results_are_read_only(start):
    """Nobody can write into a result, which a process may still read."""
    (result,) = start(Echo).execute({"x": np.zeros(4, "f4")}, ["y"])

    with pytest.raises(ValueError, match="read-only"):
        result[0] = 1
    with pytest.raises(ValueError, match="WRITEABLE"):
        result.flags.writeable = True


def test_inputs_are_read_only(start):
    """A model that writes into its input fails, and the caller's array is as it was."""
    x = np.zeros(4, "f4")
    with pytest.raises(MmeError, match="read-only"):
        do(start(Misbehaves), "write", x)

    assert x.tolist() == [0, 0, 0, 0]


def test_kept_inputs(start):
    """A model may keep its inputs: later batches do not change them."""
    handler = start(Misbehaves)
    results = [do(handler, "keep", np.full(3, i, "f4")).tolist() for i in range(5)]

    assert results[-1] == [0, 1, 2, 3, 4]
    assert do(handler, "segments").item() >= 5


def test_requests(start):
    """A handler that sees requests gets each one's inputs and facts, and answers or fails each for itself."""
    handler = start(Requests)
    requests = [
        ModelRequest({"x": np.full((i + 1, 2), i, "f4")}, ("y", "seen"), id_, {"a": 1.5, "b": "t", "c": True}, 7)
        for i, id_ in enumerate(["first", "bad", "complex", "last"])
    ]

    first, bad, unsendable, last = handler.execute_requests(requests)

    assert handler.sees_requests
    assert first.outputs["y"].tolist() == [[0, 0]]
    assert first.outputs["seen"].tolist() == [b"first [('a', 1.5), ('b', 't'), ('c', True)] 7 y,seen"]
    assert (bad.kind, bad.message) == (Kind.INVALID_ARGUMENT, "this one is bad")
    assert unsendable.kind is Kind.EXECUTION_FAILED
    assert "complex64" in unsendable.message
    assert last.outputs["y"].shape == (4, 2)


def test_parameters_too_large(start):
    """Parameters beyond what a message may hold are refused, and the next batch is served."""
    handler = start(Requests)
    x = np.zeros((1, 1), "f4")
    with pytest.raises(MmeError, match="at most") as raised:
        handler.execute_requests([ModelRequest({"x": x}, ("y",), parameters={"a": "x" * (17 * MIB)})])

    assert raised.value.kind is Kind.TOO_LARGE
    (answer,) = handler.execute_requests([ModelRequest({"x": x}, ("y",), parameters={"a": "x" * MIB})])
    assert answer.outputs["y"].shape == (1, 1)


def test_config_is_completed(start):
    """The configuration that the model completed in its process is the handler's."""
    handler = start(Echo, config=ModelConfig("m", max_batch_size=3))

    assert handler.config.max_batch_size == 3
    assert [spec.name for spec in handler.config.outputs] == ["y"]
    assert handler.inline is False


def test_onnx_in_a_process(start, tmp_path):
    """An ONNX model gives the same numbers in a process of its own as in ours."""
    onnx = pytest.importorskip("onnx")
    tensor = onnx.TensorProto.FLOAT
    weights = np.random.default_rng(5).standard_normal((16, 4)).astype("f4")
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("MatMul", ["x", "w"], ["y"])],
        "g",
        [onnx.helper.make_tensor_value_info("x", tensor, ["b", 16])],
        [onnx.helper.make_tensor_value_info("y", tensor, ["b", 4])],
        [onnx.numpy_helper.from_array(weights, "w")],
    )
    path = tmp_path / "model.onnx"
    path.write_bytes(
        onnx.helper.make_model(
            graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=9
        ).SerializeToString()
    )
    inside = OnnxHandler.load(ModelConfig("m"), path, CPU)
    outside = start(OnnxHandler, model_file=path)
    x = np.random.default_rng(6).standard_normal((3, 16)).astype("f4")

    assert outside.config == inside.config
    assert np.array_equal(outside.execute({"x": x}, ["y"])[0], inside.execute({"x": x}, ["y"])[0])
    inside.close()


def test_memory_is_the_process_own(start):
    """`memory` counts what the process holds for itself, and a light one takes little."""
    light, heavy = start(Echo).memory().host, start(HoldsMemory).memory().host

    assert 0 < light < 32 * MIB
    assert 64 * MIB < heavy < light + 72 * MIB


def test_memory_grows_with_the_model(start):
    """What a model takes later is seen too."""
    handler = start(Misbehaves)
    before = handler.memory().host
    do(handler, "grab")

    assert handler.memory().host >= before + 32 * MIB


def test_memory_shared_with_the_process_counts_and_is_given_back(start):
    """What a large batch took is the model's until it is given back; the process goes on with its next batch."""
    handler = start(Echo)
    x = np.ones(32 * MIB, "u1")
    before = handler.memory().host
    copy = handler.execute({"x": x}, ["copy"])
    assert handler.memory().host >= before + 64 * MIB
    assert not handler.give_back(idle=True)  # somebody has the answer
    assert int(copy[0].sum()) == x.size
    del copy

    assert handler.give_back(idle=True)
    assert handler.memory().host < before + 8 * MIB
    assert np.array_equal(handler.execute({"x": x}, ["copy"])[0], x)


def test_an_idle_process_gives_back_what_its_model_freed(start):
    """The C library keeps freed memory for later; of a model that nobody uses it is given back."""
    handler = start(Misbehaves)
    do(handler, "fragment")
    before = handler.memory().host
    assert handler.give_back(idle=True)

    assert handler.memory().host < before - 16 * MIB


def test_an_idle_process_may_give_back_for_longer_than_it_may_execute(start):
    """No batch waits for it, and a machine that is busy is no reason to end it."""
    handler = start(Echo, MME_EXECUTION_TIMEOUT="0.1")
    os.kill(handler.child.pid, signal.SIGSTOP)
    goes_on = threading.Timer(0.3, os.kill, (handler.child.pid, signal.SIGCONT))
    goes_on.start()

    assert handler.give_back(idle=True)
    assert handler.child.alive
    goes_on.join()


def test_a_process_that_died_has_given_back_all(start):
    """Its death is found then, and the next batch starts it again."""
    handler = start(Echo)
    psutil.Process(handler.child.pid).kill()

    assert handler.give_back(idle=True)
    assert not handler.child.alive
    assert np.array_equal(handler.execute({"x": np.ones(4, "u1")}, ["copy"])[0], np.ones(4, "u1"))


def test_surroundings(start):
    """A process is no child of ours but of the fork server, has normal priority, and /dev/null for standard input."""
    handler = start(Misbehaves)
    pid, parent, nice, stdin = do(handler, "where").tolist()

    assert pid == handler.child.pid
    assert parent != os.getpid()
    assert psutil.Process(parent).ppid() == os.getpid()
    assert nice == 0
    assert stdin == Path("/dev/null").stat().st_rdev
    assert do(handler, "stdin").tolist() == [b""]


def test_a_load_stands_back_and_the_model_does_not(start):
    """Nor does anything that it has started, thread or process: they are what executes later."""
    loading, executing = start(LoadsAside).execute({"x": np.zeros(1, "f4")}, ["y"])[0].tolist()
    assert loading == [10, 10, 10]
    assert executing == [0, 0, 0]


def test_main_is_not_imported(start):
    """What this process was started as is not run again in a child."""
    assert do(start(Misbehaves), "main").tolist() == [b"None"]


def test_random_numbers_differ(start):
    """Two processes draw different random numbers, though forked from one."""
    first, second = (do(start(Misbehaves), "random").tolist() for _ in range(2))

    assert first != second


def test_nothing_of_ours_is_inherited(start):
    """A process holds its two sockets, its pipes and its segments, and no descriptor of ours or of another child's."""
    other = start(Echo)
    other.execute({"x": np.zeros(1, "f4")}, ["y"])
    names = [name.decode() for name in do(start(Misbehaves), "descriptors").tolist()]

    sockets = [name for name in names if name.startswith("socket:")]
    pipes = [name for name in names if name.startswith("pipe:")]
    others = [name for name in names if name not in sockets + pipes and "mme-segment" not in name]
    assert len(sockets) == 2
    assert len(pipes) == 2
    assert set(others) <= {"/dev/null"} | {name for name in others if name.startswith("/proc/")}


def test_threads_at_once(start):
    """Several threads may execute: each gets its own answer."""
    handler = start(Echo)
    wrong = []

    def use(i):
        for _ in range(50):
            (y,) = handler.execute({"x": np.full(10, i, "f4")}, ["y"])
            if not (y == i).all():
                wrong.append(i)

    threads = [threading.Thread(target=use, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert not wrong


def test_many_processes_started_at_once(start, home):
    """Threads may start processes at the same time; each is its own."""
    handlers = []

    def load():
        with at_home(home):
            handlers.append(start(Misbehaves))

    threads = [threading.Thread(target=load) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len({do(handler, "where").tolist()[0] for handler in handlers}) == 8


def test_descriptors_do_not_grow(start):
    """A thousand batches of many sizes leave as many descriptors open as before."""
    handler = start(Echo)
    handler.execute({"x": np.zeros(1, "f4")}, ["y"])
    before = len(list(Path("/proc/self/fd").iterdir()))
    for i in range(1000):
        handler.execute({"x": np.zeros(1 + (i * 7919) % 40000, "f4")}, ["y"])
    gc.collect()

    assert len(list(Path("/proc/self/fd").iterdir())) <= before + 2


IN_PLACE = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request.inputs()[0].as_numpy()) for request in requests]

    def answer(self, x):
        x *= 2
        return pb_utils.InferenceResponse([pb_utils.Tensor("y", x)], parameters={"copied": x.base is None})
"""


@pytest.mark.parametrize(("count", "copied"), [(1, True), (64 << 10, False)])
def test_a_python_model_works_on_large_tensors_where_they_lie(fork_server, home, tmp_path, count, copied):
    """It may write to them and answer with them, and the caller's are as they were; small ones are copied."""
    file = tmp_path / "m/1/model.py"
    file.parent.mkdir(parents=True)
    file.write_text(IN_PLACE)
    tensors = {"inputs": (TensorSpec("x", FP32, (-1,)),), "outputs": (TensorSpec("y", FP32, (-1,)),)}
    config = ModelConfig("m", max_batch_size=4, dynamic_batching=DynamicBatching((4,)), **tensors)
    handler = start_isolated(PythonHandler, config, file, CPU, "m_0_0")
    sent = [np.full((1, count), number, "f4") for number in (1, 2, 3)]
    try:
        answers = handler.execute_requests([ModelRequest({"x": x}, ("y",)) for x in sent])
        assert [answer.parameters["copied"] for answer in answers] == [copied] * 3
        for x, answer in zip(sent, answers, strict=True):
            np.testing.assert_array_equal(answer.outputs["y"], 2 * x)
        assert [x[0, -1] for x in sent] == [1, 2, 3]
    finally:
        handler.close()
