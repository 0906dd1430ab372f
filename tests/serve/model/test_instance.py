"""One batch from requests to answers, and the instance that does it over and over."""

import gc
import threading
import weakref
from itertools import pairwise
from queue import SimpleQueue

import numpy as np
import pytest

from model_handlers.errors import Kind, MmeError
from model_handlers.executor import ExecutorLoop
from model_handlers.in_process import executors_for
from model_handlers.tensor import FP32, TensorSpec
from model_handlers.worker.executor import PipelinedExecutor
from serve.model.execution import Execution, execute_batch
from serve.model.layout_check import check_layout
from serve.model.tensors import TensorMap
from serve.request import InferenceRequest, InferenceResponse, Layout
from serve.threads import ThreadPool
from tests.waiting import eventually


class TwoOutputs:
    """Columns `a` (the sum of a row) and `b` (the row), as a model with two outputs gives them."""

    sees_requests = False

    def __init__(self):
        self.asked = []

    def execute(self, inputs, outputs):
        """What was asked for, in that order."""
        self.asked.append(list(outputs))
        rows = inputs["x"]
        return [{"a": rows.sum(axis=1), "b": rows}[name] for name in outputs]


def request_of(config, *rows, outputs=(), name="r"):
    """A request as a model's check leaves it."""
    array = np.array(rows, np.float32)
    request = InferenceRequest(Layout((("x", FP32, array.shape),), outputs), [array], lambda *_: None, name)
    checked = check_layout(request.layout, config)
    request.batch_size, request.order, request.signature = checked.batch_size, checked.order, checked.signature
    return request


def two_outputs(toys):
    """The configuration of such a model."""
    return toys.config(outputs=(TensorSpec("a", FP32, ()), TensorSpec("b", FP32, (2,))))


def shown(response):
    """Outputs by name."""
    return {name: array.tolist() for name, _, array in response.outputs}


def test_each_request_gets_its_own_rows(toys):
    """Requests of one, three and two rows executed together get back one, three and two rows, their own."""
    config = toys.config()
    batch = [
        request_of(config, [1, 1], name="first"),
        request_of(config, [2, 2], [3, 3], [4, 4], name="second"),
        request_of(config, [5, 5], [6, 6], name="third"),
    ]
    handler = toys.Scripted(config)
    execution = execute_batch(handler, TensorMap("m", 3, config), batch)
    assert handler.batches == [[1, 2, 3, 4, 5, 6]]
    assert execution.size == 6
    assert [(r.id, shown(r)["y"]) for r in execution.results] == [
        ("first", [[2, 2]]),
        ("second", [[4, 4], [6, 6], [8, 8]]),
        ("third", [[10, 10], [12, 12]]),
    ]
    assert {(r.model_name, r.model_version) for r in execution.results} == {("m", "3")}


@pytest.mark.parametrize(
    ("wanted", "computed", "second"),
    [(("a",), ["a", "b"], {"a": [7]}), (("b",), ["b"], {"b": [[3, 4]]}), (None, ["a", "b"], {"a": [7], "b": [[3, 4]]})],
)
def test_each_request_gets_the_outputs_it_asked_for(toys, wanted, computed, second):
    """A batch executes the union of them and no other, and each request sees its own only: all if it named none."""
    config = two_outputs(toys)
    handler = TwoOutputs()
    more = {} if wanted is None else {"outputs": wanted}
    batch = [request_of(config, [1, 2], outputs=("b",)), request_of(config, [3, 4], **more)]
    execution = execute_batch(handler, TensorMap("m", 1, config), batch)
    assert handler.asked == [computed]
    assert [shown(r) for r in execution.results] == [{"b": [[1, 2]]}, second]


@pytest.mark.parametrize("rows", [np.zeros((1, 2)), np.zeros((5, 2)), np.float32(0)], ids=["fewer", "more", "scalar"])
def test_another_number_of_rows_than_given_fails_the_whole_batch(toys, rows):
    """A model that returns another number of rows than it was given gives no rows to anybody, and is named."""
    config = toys.config()
    handler = toys.Scripted(config, lambda _: [np.asarray(rows, np.float32)])
    batch = [request_of(config, [1, 1]), request_of(config, [2, 2])]
    execution = execute_batch(handler, TensorMap("m", 1, config), batch)
    assert [result.kind for result in execution.results] == [Kind.EXECUTION_FAILED] * 2
    assert "model 'm' returned output 'y'" in execution.results[0].message
    assert "for a batch of 2" in execution.results[0].message


@pytest.mark.parametrize("arrays", [[], [np.zeros((1, 2)), np.zeros((1, 2))]], ids=["none", "two"])
def test_another_number_of_outputs_than_asked_for_is_an_error(toys, arrays):
    """A handler that returns too few or too many arrays fails its batch, not the instance."""
    config = toys.config()
    execution = execute_batch(
        toys.Scripted(config, lambda _: arrays), TensorMap("m", 1, config), [request_of(config, [1, 1])]
    )
    assert [result.kind for result in execution.results] == [Kind.INTERNAL]


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (MmeError(Kind.EXECUTION_FAILED, "bad node"), Kind.EXECUTION_FAILED, "bad node"),
        (MmeError(Kind.OUT_OF_MEMORY, "no room"), Kind.OUT_OF_MEMORY, "no room"),
        (ZeroDivisionError("by zero"), Kind.INTERNAL, "model 'm' failed: ZeroDivisionError: by zero"),
        (MemoryError("1 TiB"), Kind.OUT_OF_MEMORY, "model 'm' ran out of memory: 1 TiB"),
    ],
    ids=["known", "memory", "foreign", "python memory"],
)
def test_whatever_a_handler_raises_becomes_everybodys_error(toys, error, kind, words):
    """An exception in `execute` reaches each request of the batch once, as one of ours."""
    config = toys.config()

    def fail(_rows):
        raise error

    batch = [request_of(config, [1, 1]), request_of(config, [2, 2])]
    execution = execute_batch(toys.Scripted(config, fail), TensorMap("m", 1, config), batch)
    assert [result.kind for result in execution.results] == [kind] * 2
    assert words in execution.results[0].message


def test_what_failed_is_gone_with_its_error(toys):
    """Bodies do not wait for the collector of garbage, whatever frames and errors the handler's error came through."""
    config = toys.config()

    def fail(_rows):
        try:
            int("a word")
        except ValueError:
            raise MmeError(Kind.INVALID_ARGUMENT, "no number") from None

    def failed():
        batch = [request_of(config, [1, 1])]
        execution = execute_batch(toys.Scripted(config, fail), TensorMap("m", 1, config), batch)
        return weakref.ref(batch[0].inputs[0]), execution.results[0]

    gc.disable()
    try:
        array, error = failed()
        assert error.message == "no number"
        assert array() is None
    finally:
        gc.enable()


def test_timings_add_up(toys):
    """Each response carries the times of its execution, none of them negative."""
    config = toys.config()
    execution = execute_batch(toys.Scripted(config), TensorMap("m", 1, config), [request_of(config, [1, 1])])
    timings = execution.results[0].timings
    assert timings is execution.timings
    assert timings.start > 0
    assert min(timings.compute_input, timings.compute_infer, timings.compute_output) >= 0


def test_one_request_alone_is_not_copied(toys):
    """A batch of one request hands its own array to the handler."""
    config = toys.config()
    request = request_of(config, [1, 2])
    assert TensorMap("m", 1, config).collate([request])[0]["x"] is request.inputs[0]


def test_unaligned_data_is_aligned_before_a_framework_sees_it(toys):
    """A view that starts at an odd byte of a body is copied; its values stay."""
    config = toys.config()
    request = request_of(config, [0, 0])
    body = b"!" + np.array([[1, 2]], np.float32).tobytes()
    request.inputs = [np.frombuffer(body, np.float32, offset=1).reshape(1, 2)]
    assert not request.inputs[0].flags.aligned
    array = TensorMap("m", 1, config).collate([request])[0]["x"]
    assert array.flags.aligned
    assert array.tolist() == [[1, 2]]


def test_inputs_are_told_apart_by_name_and_not_by_place(toys):
    """Two requests that send their inputs in another order are joined input by input."""
    specs = (TensorSpec("x", FP32, (2,)), TensorSpec("z", FP32, (2,)))
    config = toys.config(inputs=specs)
    requests = []
    for names in (("x", "z"), ("z", "x")):
        arrays = [np.full((1, 2), {"x": 1, "z": 9}[name], np.float32) for name in names]
        layout = Layout(tuple((name, FP32, (1, 2)) for name in names), ())
        request = InferenceRequest(layout, arrays, lambda *_: None)
        request.order = check_layout(layout, config).order
        requests.append(request)
    joined = TensorMap("m", 1, config).collate(requests)[0]
    assert {name: array.tolist() for name, array in joined.items()} == {"x": [[1, 1]] * 2, "z": [[9, 9]] * 2}


def test_an_optional_input_left_out_is_not_there(toys):
    """A handler sees only the inputs that the batch has."""
    specs = (TensorSpec("x", FP32, (2,)), TensorSpec("z", FP32, (2,), optional=True))
    config = toys.config(inputs=specs)
    assert set(TensorMap("m", 1, config).collate([request_of(config, [1, 1])])[0]) == {"x"}


@pytest.mark.parametrize("max_batch_size", [0, 8], ids=["without batches", "with batches"])
def test_reshape_hides_the_framework_shape_from_clients(toys, max_batch_size):
    """Where config.pbtxt reshapes, the framework sees its shape and the client the declared one."""
    specs = (TensorSpec("x", FP32, (2,), reshape=(2, 1)),)
    config = toys.config(
        max_batch_size=max_batch_size, inputs=specs, outputs=(TensorSpec("y", FP32, (2,), reshape=(1, 2, 1)),)
    )
    seen = []

    class Reshaping:
        sees_requests = False

        def execute(self, inputs, outputs):  # noqa: ARG002 - there is one
            seen.append(inputs["x"].shape)
            return [inputs["x"].reshape((-1, 1, 2, 1) if max_batch_size else (1, 2, 1))]

    request = request_of(config, [1, 2]) if max_batch_size else request_of(config, 1, 2)
    execution = execute_batch(Reshaping(), TensorMap("m", 1, config), [request])
    assert seen == [(1, 2, 1) if max_batch_size else (2, 1)]
    assert shown(execution.results[0]) == {"y": [[1, 2]] if max_batch_size else [1, 2]}


class Echo:
    """Returns its input, in another shape where one is given."""

    sees_requests = False

    def __init__(self, shape=None):
        self.shape = shape

    def execute(self, inputs, outputs):  # noqa: ARG002 - there is one
        """The input, reshaped."""
        x = inputs["x"]
        self.seen = x.shape
        return [x if self.shape is None else x.reshape(self.shape)]


def test_a_reshape_may_have_several_variable_dimensions(toys):
    """The variable dimensions of dims and reshape are the same ones, in order, on the way in and on the way out."""
    variable = {"data_type": FP32, "dims": (-1, -1), "reshape": (-1, 1, -1)}
    config = toys.config(inputs=(TensorSpec("x", **variable),), outputs=(TensorSpec("y", **variable),))
    echo = Echo()

    execution = execute_batch(echo, TensorMap("m", 1, config), [request_of(config, [[1, 2, 3], [4, 5, 6]])])

    assert echo.seen == (1, 2, 1, 3)
    assert shown(execution.results[0]) == {"y": [[[1, 2, 3], [4, 5, 6]]]}


@pytest.mark.parametrize(
    ("dims", "reshape", "shape"),
    [((1,), (), (1, 2)), ((3,), (3, 1), (1, 1, 2)), ((-1,), (-1, 1), (1, 2))],
    ids=["scalar", "sizes", "rank"],
)
def test_an_output_that_is_not_what_its_reshape_says_fails(toys, dims, reshape, shape):
    """An output of another shape than its configuration reshapes is EXECUTION_FAILED, and shows both."""
    config = toys.config(outputs=(TensorSpec("y", FP32, dims, reshape=reshape),))

    execution = execute_batch(Echo(shape), TensorMap("m", 1, config), [request_of(config, [1, 2])])

    [error] = execution.results
    assert error.kind is Kind.EXECUTION_FAILED
    assert error.message == f"model 'm' returned output 'y' with shape {list(shape)}, not {[-1, *reshape]}"


def threads():
    """A pool that leaves no thread to the next test."""
    return ThreadPool("instance", idle_seconds=0)


class Loop:
    """An event loop of a test, whose callbacks run where and when they are asked for."""

    def call_soon_threadsafe(self, callback, *arguments):
        """Call it on the calling thread."""
        callback(*arguments)


def executors_on(handlers, pool, inline_ns=0):
    """The executors of a model with such handlers."""
    named, home = [("instance", handler) for handler in handlers], ExecutorLoop(Loop(), pool)
    return executors_for(
        named, handlers[0].config, home, inline_ns=inline_ns, limited=False, larger=None, late=lambda *_: None
    )


def executor_of(handler, **options):
    """The executor of a model of one instance."""
    return executors_on([handler], threads(), **options).each[0]


def submit(executor, batch, reports):
    """Have it execute a batch."""
    execution = Execution(TensorMap("m", 1, executor.handler.config), batch)
    assert not executor.submit(execution, lambda _, execution: reports.put(execution))


def scripted(toys, script=None):
    """The executor of a model that follows a script, its handler and the queue of what it tells."""
    handler = toys.Scripted(toys.config(), script)
    return executor_of(handler), handler, SimpleQueue()


def test_an_executor_goes_on_until_it_has_no_batch_left(toys):
    """Each batch is executed once and in order, on one thread of the pool."""
    config, gate = toys.config(), toys.Gate()
    batches = [[request_of(config, [number, number])] for number in range(4)]
    executor, handler, reports = scripted(toys, gate)
    for batch in batches:
        submit(executor, batch, reports)
    gate.open()
    assert [reports.get(timeout=60).batch for _ in batches] == batches
    executor.stop()
    assert handler.batches == [[0], [1], [2], [3]]
    assert set(handler.threads) == {"instance_0"}


def test_an_idle_executor_keeps_nothing_of_what_it_has_executed(toys):
    """Every model has instances: their last batches, of bodies of any size, would stay as long as no request comes."""
    executor, _, _ = scripted(toys)
    ended = threading.Event()
    batch = [request_of(toys.config(), [1, 1])]
    seen = weakref.ref(batch[0].inputs[0])
    executor.submit(Execution(TensorMap("m", 1, toys.config()), batch), lambda *_: ended.set())
    del batch
    assert ended.wait(60)
    executor.stop()
    eventually(lambda: seen() is None)


def test_an_executor_survives_what_its_handler_throws(toys):
    """After an exception in the handler the same instance executes the next batch."""
    config = toys.config()
    outcomes = iter([ValueError("once"), None])

    def script(rows):
        outcome = next(outcomes)
        if outcome is not None:
            raise outcome
        return [rows * 2]

    executor, _, reports = scripted(toys, script)
    for expected in (MmeError, InferenceResponse):
        submit(executor, [request_of(config, [1, 1])], reports)
        assert isinstance(reports.get(timeout=60).results[0], expected)
    executor.stop()


def test_stopping_waits_for_what_is_executing(toys):
    """An executor told to stop in the middle of a batch finishes and tells it."""
    config = toys.config()
    gate = toys.Gate()
    executor, _, reports = scripted(toys, gate)
    submit(executor, [request_of(config, [1, 1])], reports)
    stopper = threading.Thread(target=executor.stop)
    stopper.start()
    gate.open()
    stopper.join(60)
    assert not stopper.is_alive()
    assert isinstance(reports.get(timeout=60).results[0], InferenceResponse)


def test_an_executor_that_never_executed_can_be_stopped(toys):
    """A model that is given up before it served a request has instances without threads to wait for."""
    executor, _, _ = scripted(toys)
    executor.stop()


def test_a_batch_waits_in_an_executor_only_behind_a_quick_one(toys):
    """Behind a slow one it stays in the queue, where it may grow, be cancelled, and time out."""
    config = toys.config()
    executor, reports = executor_of(toys.Inline(config), inline_ns=1), SimpleQueue()
    assert executor.depth == 1
    submit(executor, [request_of(config, [1, 1])], reports)
    reports.get(timeout=60)
    assert executor.depth == 2
    executor.stop()


def test_handlers_are_closed_side_by_side(toys):
    """What models say at their end takes no longer with many instances."""
    together = threading.Barrier(5)

    class Meeting(toys.Scripted):
        def close(self):
            together.wait(60)

    with ThreadPool("close", idle_seconds=0) as pool:
        executors_on([Meeting(toys.config()) for _ in range(5)], pool).close()
    assert not together.broken


def test_handlers_are_closed_without_a_free_thread(toys):
    """On a full system the calling thread closes them, each though another has something against it."""
    go, config = threading.Event(), toys.config()

    class Refusing(toys.Scripted):
        def close(self):
            super().close()
            raise ValueError("no")

    handlers = [Refusing(config), *(toys.Scripted(config) for _ in range(3))]
    with ThreadPool("close", most=1) as pool:
        pool.submit(go.wait, 60)
        with pytest.raises(ValueError, match="no"):
            executors_on(handlers, pool).close()
        go.set()
    assert [handler.closed for handler in handlers] == [1] * 4


def pipelined(toys, refused=()):
    """An executor whose handler works ahead, what befell that handler, and the queue of what it tells."""
    log, first = [], threading.Event()

    class Ahead(toys.Scripted):
        def begin(self, inputs, outputs):
            assert first.wait(60)
            number = int(inputs["x"][0, 0])
            log.append(f"begin {number}")
            if number in refused:
                raise MmeError(Kind.UNAVAILABLE, f"{number} can't be begun")
            return number, inputs, outputs

        def finish(self, begun):
            number, inputs, outputs = begun
            log.append(f"finish {number}")
            return self.execute(inputs, outputs)

    executor = PipelinedExecutor("instance", 0, Ahead(toys.config()), ExecutorLoop(Loop(), threads()))
    return executor, log, first


def test_a_batch_is_begun_before_the_last_one_has_ended(toys):
    """Batches are finished in their order, each with the next one begun."""
    config, reports = toys.config(), SimpleQueue()
    batches = [[request_of(config, [number, number])] for number in range(3)]
    executor, log, first = pipelined(toys)
    for batch in batches:
        submit(executor, batch, reports)
    first.set()
    executions = [reports.get(timeout=60) for _ in batches]
    executor.stop()
    assert [execution.batch for execution in executions] == batches
    assert [shown(execution.results[0]) for execution in executions] == [
        {"y": [[0, 0]]},
        {"y": [[2, 2]]},
        {"y": [[4, 4]]},
    ]
    assert log == ["begin 0", "begin 1", "finish 0", "begin 2", "finish 1", "finish 2"]
    for before, after in pairwise(execution.timings for execution in executions):
        assert after.start + after.compute_input >= before.start + before.compute_input + before.compute_infer


def test_a_batch_that_cannot_be_begun_is_its_own_misfortune(toys):
    """Those before it and behind it are executed."""
    config, reports = toys.config(), SimpleQueue()
    executor, log, first = pipelined(toys, refused={1})
    for number in range(3):
        submit(executor, [request_of(config, [number, number])], reports)
    first.set()
    results = [reports.get(timeout=60).results[0] for _ in range(3)]
    executor.stop()
    assert [getattr(result, "message", "good") for result in results] == ["good", "1 can't be begun", "good"]
    assert "finish 1" not in log


@pytest.mark.parametrize(
    ("answers", "kind"), [([], Kind.INTERNAL), (MmeError(Kind.UNAVAILABLE, "not now"), Kind.UNAVAILABLE)]
)
def test_answers_that_can_not_be_handed_out_are_the_error_of_all(toys, answers, kind):
    """Those of a batch that a process was sent: none waits for ever."""
    config = toys.config()
    execution = Execution(TensorMap("m", 1, config), [request_of(config, [1, 1]), request_of(config, [2, 2])])
    assert len(execution.to_requests()) == 2
    execution.answered(answers, 1, 2)
    assert [result.kind for result in execution.results] == [kind] * 2


def test_a_batch_that_can_not_be_made_is_the_error_of_all(toys, monkeypatch):
    """What finds no memory before anything is sent: none waits for ever."""

    def full(*_):
        raise MemoryError("1 TiB")

    config = toys.config()
    execution = Execution(TensorMap("m", 1, config), [request_of(config, [1, 1]), request_of(config, [2, 2])])
    monkeypatch.setattr(TensorMap, "to_model_requests", full)
    assert execution.to_requests() is None
    assert [result.kind for result in execution.results] == [Kind.OUT_OF_MEMORY] * 2
