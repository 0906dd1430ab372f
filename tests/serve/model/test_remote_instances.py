"""A model in a process of its own is sent its batches by the event loop, and no request is lost or hurt by that."""

import asyncio
import contextlib
import inspect
from pathlib import Path

import numpy as np
import psutil
import pytest
import uvloop

from model_handlers.base import CPU
from model_handlers.config.model_config import DynamicBatching, InstanceGroup, Resource
from model_handlers.errors import Kind, MmeError
from model_handlers.executor import ExecutorLoop, at_home
from model_handlers.onnx import OnnxHandler
from model_handlers.python.handler import PythonHandler
from model_handlers.tensor import FP32, TensorSpec
from model_handlers.worker import policies
from model_handlers.worker.memory import SegmentPool
from model_handlers.worker.start import start_isolated
from serve.model.model import Model
from serve.model.rate_limiter import ResourcePool
from serve.request import Called, InferenceRequest, Layout
from serve.statistics import ModelStats
from serve.threads import ThreadPool
from tests.waiting import until

pytestmark = pytest.mark.usefixtures("fork_server")
CODE = """
import os, resource, signal, time
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request, len(requests)) for request in requests]

    def answer(self, request, count):
        x = pb_utils.get_input_tensor_by_name(request, "x").as_numpy()
        deed = request.request_id()
        if deed == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if deed == "hang":
            signal.pause()
        if deed == "forget":
            self.forgotten = request.get_response_sender()
            return None
        if deed == "dawdle":
            time.sleep(1.6)
        if deed == "raise":
            raise ValueError("not this one")
        if deed == "starve":  # such that what it answers finds no room
            time.sleep(0.1)
            resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, resource.RLIM_INFINITY))
            x = np.tile(x, 1 << 18)
        if deed.startswith("call"):
            pb_utils.InferenceRequest(model_name=deed, requested_output_names=[], inputs=[]).exec()
        if deed == "overtake":
            sender = request.get_response_sender()
            sender.send(self.answered(x, count), flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
            time.sleep(0.1)
            return None
        return self.answered(x, count)

    def answered(self, x, count):
        batch = pb_utils.Tensor("batch", np.full_like(x, count))
        return pb_utils.InferenceResponse([pb_utils.Tensor("y", x * 2), batch])
"""


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"], autouse=True)
def loop_factory(request):
    """Each test runs on a loop of either kind."""
    return request.param


@pytest.fixture
def model_file(tmp_path):
    """The model, in a repository's folder."""
    file = tmp_path / "m/1/model.py"
    file.parent.mkdir(parents=True)
    file.write_text(CODE)
    return file


def sockets():
    """Those that this process has."""
    links = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # that of the list itself
            links.add(str(descriptor.readlink()))
    return {link for link in links if link.startswith("socket:")}


class Threads(ThreadPool):
    """Those to which the loop leaves what it can't wait for, and how often it did."""

    def __init__(self):
        super().__init__("work", idle_seconds=0)
        self.given = 0

    def run(self, work):
        """See `ThreadPool`."""
        self.given += 1
        super().run(work)


@contextlib.asynccontextmanager
async def serving(toys, model_file, *, instances=1, batches=False, limited=False, ordered=False, **parameters):
    """A started model whose instances have processes; closed afterwards, with nothing left on the loop."""
    size = 8 if batches else int(ordered)
    config = toys.config(
        max_batch_size=size,
        dynamic_batching=DynamicBatching((size,), preserve_ordering=ordered) if size else None,
        parameters=parameters,
        inputs=(TensorSpec("x", FP32, (-1,)),),
        outputs=(TensorSpec("y", FP32, (-1,)), TensorSpec("batch", FP32, (-1,))),
    )
    before = sockets()
    names = [f"m_{index}" for index in range(instances)]
    loop = asyncio.get_running_loop()
    threads = Threads()
    home = ExecutorLoop(loop, threads)
    with at_home(home):
        handlers = [(name, start_isolated(PythonHandler, config, model_file, CPU, name)) for name in names]
    group = InstanceGroup("g", count=instances, resources=(Resource("r", 1),))
    on_devices = [(f"g_{index}", CPU) for index in range(instances)]
    limits = ResourcePool(loop, {("r", ""): 1}).instances("m", [group], on_devices) if limited else None
    model = Model("m", 1, handlers, ModelStats(), loop, limits=limits, home=home)
    try:
        yield model, [handler for _, handler in handlers], threads
        assert model.outstanding == 0
    finally:
        await asyncio.to_thread(model.close)
        await asyncio.sleep(0)
        assert sockets() <= before  # others' may go meanwhile


async def ask(model, deed="", shape=(2,), output=0):
    """One request's first output, or another one, or the error that it got."""
    result = await respond(model, deed, shape)
    return result if isinstance(result, MmeError) else result.outputs[output][2].copy()


async def respond(model, deed="", shape=(2,)):
    """The response to one request, or its error."""
    answered = asyncio.get_running_loop().create_future()
    x = np.ones(shape, np.float32)
    layout = Layout((("x", FP32, x.shape),), ())
    model.submit(InferenceRequest(layout, [x], lambda _, result: answered.set_result(result), deed))
    return await answered


async def at_rest(model, threads):
    """Ask until no thread has a part in it: what buries a process may be busy with that for a moment longer."""
    before = None
    while before != threads.given:
        before = threads.given
        assert (await ask(model)).tolist() == [2, 2]


async def test_small_batches_need_no_thread(toys, model_file):
    """Requests are answered one after another and side by side without the instance's thread; a failed one is no exception."""
    async with serving(toys, model_file) as (model, _, threads):
        for _ in range(3):
            assert (await ask(model)).tolist() == [2, 2]
        results = await asyncio.gather(*[ask(model, shape=(size,)) for size in range(1, 30)])
        assert [len(result) for result in results] == list(range(1, 30))
        error = await ask(model, "raise")
        assert error.kind is Kind.EXECUTION_FAILED
        assert "not this one" in error.message
        assert (await ask(model)).tolist() == [2, 2]
        assert (model.stats.success.count, model.stats.execution_count) == (33, 34)  # the failed one, too
        assert not threads.given


async def test_large_batches_take_the_thread_and_leave_it(toys, model_file):
    """What would keep the loop is the thread's; small batches are sent again after it, even while requests wait."""
    async with serving(toys, model_file) as (model, _, threads):
        sizes = [2, 50_000, 2, 2, 50_000, 2]
        results = await asyncio.gather(*[ask(model, shape=(size,)) for size in sizes])
        assert [len(result) for result in results] == sizes
        assert threads.given == 2


async def test_lanes_answer_side_by_side(toys, model_file):
    """Each instance has a batch of its own under way: one that hangs keeps nobody who has another instance."""
    async with serving(toys, model_file, instances=2) as (model, handlers, _):
        hanging = asyncio.ensure_future(ask(model, "hang"))
        await asyncio.sleep(0)
        for _ in range(5):
            assert (await ask(model)).tolist() == [2, 2]
        for handler in handlers:
            psutil.Process(handler.child.pid).kill()
        assert "SIGKILL" in (await hanging).message


async def test_a_death_under_way_costs_its_batch_alone(toys, model_file):
    """The request whose model dies gets the error; those that wait behind it are answered by a new process."""
    async with serving(toys, model_file) as (model, _, threads):
        results = await asyncio.gather(ask(model), ask(model, "die"), ask(model), ask(model))
        assert "SIGKILL" in results[1].message
        assert [result.tolist() for result in results if not isinstance(result, MmeError)] == [[2, 2]] * 3
        assert threads.given >= 2  # one hears what it died of, one starts the next
        await at_rest(model, threads)


async def test_a_death_while_idle_costs_nothing(toys, model_file):
    """A process that dies between batches is heard; the next request finds a new one."""
    async with serving(toys, model_file) as (model, [handler], threads):
        assert (await ask(model)).tolist() == [2, 2]
        first = handler.child.pid
        psutil.Process(first).kill()
        await until(lambda: not psutil.pid_exists(first))
        assert (await ask(model)).tolist() == [2, 2]
        assert threads.given
        await at_rest(model, threads)


async def test_patience_ends(toys, model_file):
    """A batch without an answer is ended when its time is over, not when the time of one before it was."""
    async with serving(toys, model_file, MME_EXECUTION_TIMEOUT="2") as (model, _, _):
        assert (await ask(model)).tolist() == [2, 2]
        began = asyncio.get_running_loop().time()
        error = await ask(model, "hang")
        assert "gave no answer within 2 s" in error.message
        assert asyncio.get_running_loop().time() - began >= 2
        assert (await ask(model)).tolist() == [2, 2]


async def test_a_request_that_is_left_open_for_too_long_is_told(toys, model_file):
    """Its batch has been answered, and the response that was to come of the model's own accord does not come."""
    async with serving(toys, model_file, MME_EXECUTION_TIMEOUT="0.4") as (model, _, _):
        error = await ask(model, "forget")
        assert error.kind is Kind.TIMED_OUT
        assert "while it had requests to answer" in error.message


@pytest.mark.parametrize("limited", [False, True])
async def test_an_end_waits_for_answers_that_the_last_response_overtook(toys, model_file, limited):
    """Clients that were answered hold the model no longer; the process still owes the batch's answers, and ends behind them."""
    async with serving(toys, model_file, limited=limited) as (model, _, _):
        assert (await ask(model, "overtake")).tolist() == [2, 2]
        assert model.outstanding == 0
        await asyncio.to_thread(model.close)


def note_batches_under_way(model):
    """For each batch that is answered from now on, whether the process has another one already."""
    under_way = []
    hand_over, executor = model._hand_over, model.executors.each[0]
    model._hand_over = lambda execution: (under_way.append(executor.pending > 0), hand_over(execution))
    return under_way


async def test_a_process_has_its_next_batch_before_the_last_is_answered(toys, model_file):
    """Who takes an answer finds the next batch sent already: the process does not wait for clients to be served."""
    async with serving(toys, model_file) as (model, _, _):
        under_way = note_batches_under_way(model)
        await asyncio.gather(ask(model), ask(model))
        assert under_way == [True, False]


async def test_who_is_answered_may_join_those_who_wait(toys, model_file, monkeypatch):
    """Who comes again within the turns of the loop that they wait, as a client does that was answered by a socket."""
    monkeypatch.setattr("model_handlers.worker.policies._LINGER_NS", 60_000_000_000)  # the machine may be busy
    async with serving(toys, model_file, batches=True) as (model, _, _):

        async def client():
            first = await ask(model, output=1, shape=(1, 1))
            await asyncio.sleep(0)
            again = await ask(model, output=1, shape=(1, 1))
            return [first.tolist(), again.tolist()]

        clients = [asyncio.ensure_future(client()) for _ in range(3)]
        await asyncio.sleep(0)  # they ask
        await asyncio.sleep(0)  # and are sent
        late = asyncio.ensure_future(ask(model, output=1, shape=(1, 1)))
        assert await asyncio.gather(*clients) == [[[[3]], [[4]]]] * 3
        assert (await late).tolist() == [[4]]


async def test_nobody_is_waited_for_in_vain(toys, model_file, monkeypatch):
    """Those who wait are sent after three turns, though nobody joins them; so is who comes later, at once."""
    monkeypatch.setattr("model_handlers.worker.policies._LINGER_NS", 60_000_000_000)
    async with serving(toys, model_file, batches=True) as (model, _, _):
        first = [asyncio.ensure_future(ask(model, output=1, shape=(1, 1))) for _ in range(3)]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        second = [asyncio.ensure_future(ask(model, output=1, shape=(1, 1))) for _ in range(2)]
        assert [result.tolist() for result in await asyncio.gather(*first)] == [[[3]]] * 3
        assert [result.tolist() for result in await asyncio.gather(*second)] == [[[2]]] * 2
        assert (await ask(model, output=1, shape=(1, 1))).tolist() == [[1]]


async def test_many_who_wait_are_sent_before_a_batch_is_answered(toys, model_file):
    """The process does not wait for so many answers to be written."""
    async with serving(toys, model_file, batches=True) as (model, _, _):
        under_way = note_batches_under_way(model)
        await asyncio.gather(*[ask(model, shape=(1, 1)) for _ in range(16)])
        assert under_way == [True, False]


@pytest.fixture
def together(monkeypatch):
    """Up to eight requests cross together, however quick the model is known to be, unless a process died."""
    monkeypatch.setattr(policies, "_MOST", 8)
    monkeypatch.setattr(policies, "_TOGETHER_NS", 1 << 60)


async def test_requests_that_wait_are_sent_together_and_executed_alone(toys, model_file, together):
    """Each is an execution of one, and is counted so, but they take two messages."""
    async with serving(toys, model_file) as (model, [handler], threads):
        shapes = [(size,) for size in range(1, 10)]
        results = await asyncio.gather(*[ask(model, output=1, shape=shape) for shape in shapes])
        assert [result.tolist() for result in results] == [[1] * size for size in range(1, 10)]
        assert handler.batches.number == 2
        assert not threads.given
        stats = model.stats
        assert (stats.execution_count, stats.inference_count, stats.success.count) == (9, 9, 9)
        assert {size: batch.compute_infer.count for size, batch in stats.batches.items()} == {1: 9}
        assert stats.compute_infer.ns == stats.batches[1].compute_infer.ns <= stats.success.ns


async def test_who_is_executed_behind_others_waits_for_them(toys, model_file, together):
    """That counts as its time in the queue, though all of them were sent at once."""
    async with serving(toys, model_file) as (model, [handler], _):
        await asyncio.gather(*[ask(model) for _ in range(8)])
        assert handler.batches.number == 1
        stats = model.stats
        computing = stats.compute_input.ns + stats.compute_infer.ns + stats.compute_output.ns
        assert stats.queue.ns >= computing * 7 // 2
        assert stats.queue.ns + computing <= stats.success.ns


async def test_calls_are_those_of_the_request_that_they_were_made_for(toys, model_file, together):
    """Of none that is executed in front of it, or behind, by the same process."""

    class Outside:
        def infer(self, call, responder):
            for each in call.waiting:
                each.called(Called(call.model, 0, 0))
            responder.send(MmeError(Kind.UNAVAILABLE, "not now"), final=True)

    async with serving(toys, model_file) as (model, [handler], _):
        handler.outside = Outside()
        deeds = ["", "call 1", "", "call 2", ""]
        timings = [result.timings for result in await asyncio.gather(*[respond(model, deed) for deed in deeds])]
        calls = [[call.model for call in each.calls or ()] for each in timings]
        assert calls == [[], ["call 1"], [], ["call 2"], []]
        assert handler.batches.number == 1


async def test_lanes_share_those_who_wait(toys, model_file, together):
    """Nobody is sent to an instance in company while another one has nothing to do."""
    async with serving(toys, model_file, instances=2) as (model, handlers, _):
        await asyncio.gather(*[ask(model) for _ in range(4)])
        assert sorted(handler.batches.number for handler in handlers) == [1, 2]  # two, then one to each


async def test_who_was_never_begun_is_executed_by_the_next_process(toys, model_file, together):
    """A death costs the request that it came of and those just before it; clients of the others hear nothing of it."""
    async with serving(toys, model_file) as (model, _, _):
        deeds = ["", "raise", "die", "", "", ""]
        results = await asyncio.gather(*[ask(model, deed) for deed in deeds])
        assert ["SIGKILL" in getattr(result, "message", "") for result in results] == [True] * 3 + [False] * 3
        assert [result.tolist() for result in results[3:]] == [[2, 2]] * 3
        assert (model.stats.success.count, model.stats.fail.count) == (3, 3)
        assert model.stats.queue.count == 3
        assert model.stats.execution_count == 6  # those that were begun


async def test_who_is_answered_in_order_waits_for_a_slow_one(toys, model_file, together):
    """Where a configuration asks for that, nobody is sent in company, to be answered before or executed elsewhere."""
    async with serving(toys, model_file, instances=2, ordered=True) as (model, _, _):
        order, deeds = [], ["", "dawdle", "", "", "", ""]
        asked = [asyncio.ensure_future(ask(model, deed, (1, 2))) for deed in deeds]
        for number, each in enumerate(asked):
            each.add_done_callback(lambda _, number=number: order.append(number))
        await asyncio.gather(*asked)
        assert order == list(range(len(deeds)))


async def test_who_was_never_begun_is_refused_by_a_model_that_goes(toys, model_file, together):
    """It would wait for an instance that nobody serves any more."""
    async with serving(toys, model_file) as (model, [handler], _):
        asked = [asyncio.ensure_future(ask(model, deed)) for deed in ("hang", "")]
        while not model.executors.each[0].pending:  # noqa: ASYNC110 - nothing tells
            await asyncio.sleep(0)
        model.refuse_waiting()
        psutil.Process(handler.child.pid).kill()
        hanging, waiting = await asyncio.gather(*asked)
        assert hanging.kind is waiting.kind is Kind.UNAVAILABLE or "SIGKILL" in hanging.message
        assert waiting.kind is Kind.UNAVAILABLE
        assert "is being unloaded" in waiting.message


async def test_each_execution_has_its_own_time(toys, model_file, together):
    """Those that are sent together may take longer all together than one may."""
    async with serving(toys, model_file, MME_EXECUTION_TIMEOUT="3") as (model, _, _):
        results = await asyncio.gather(*[ask(model, deed) for deed in ("dawdle", "dawdle", "")])
        assert [result.tolist() for result in results] == [[2, 2]] * 3


async def test_models_that_share_resources_are_sent_one_at_a_time(toys, model_file, together):
    """Others may be in turn after each."""
    async with serving(toys, model_file, limited=True) as (model, [handler], _):
        await asyncio.gather(*[ask(model) for _ in range(4)])
        assert handler.batches.number == 4


async def test_batches_form_while_the_process_is_busy(toys, model_file):
    """With dynamic batching, what comes while a batch is under way leaves as one."""
    async with serving(toys, model_file, batches=True) as (model, _, _):
        first = asyncio.ensure_future(ask(model, shape=(1, 2)))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        results = await asyncio.gather(*[ask(model, shape=(1, 2)) for _ in range(9)])
        assert [result.tolist() for result in [await first, *results]] == [[[2, 2]]] * 10
        assert (model.stats.success.count, model.stats.execution_count) == (10, 3)


@pytest.mark.parametrize(("largest", "executions"), [(1, 40), (4, 10)], ids=["alone", "batched"])
async def test_a_process_is_given_batches_ahead_and_everybody_gets_their_own(
    tmp_path, write_onnx, toys, largest, executions
):
    """Of many requests at once, each executed once, in whole batches where they are batched."""
    write_onnx(tmp_path / "model.onnx")
    config = toys.config(max_batch_size=largest, dynamic_batching=DynamicBatching((largest,)))
    loop = asyncio.get_running_loop()
    home = ExecutorLoop(loop, Threads())
    with at_home(home):
        handler = start_isolated(OnnxHandler, config, tmp_path / "model.onnx", CPU, "m_0_0")
    model = Model("m", 1, [("m_0_0", handler)], ModelStats(), loop, home=home)
    calls = [toys.Call(number) for number in range(40)]
    for call in calls:
        model.submit(call.request)
    for call in calls:
        await call.answer()
    assert [call.kind for call in calls] == [None] * 40
    assert (model.stats.inference_count, model.stats.execution_count) == (40, executions)
    await asyncio.to_thread(model.close)


async def test_a_batch_that_the_loop_can_not_send_is_left_to_the_thread(toys, model_file, monkeypatch):
    """Whatever is in its way: no request waits for ever, and the instance is sent the next one."""

    def failing_once(take):
        left = [MemoryError("1 TiB")]

        def take_or_fail(*size):
            if left:
                raise left.pop()
            return take(*size)

        return take_or_fail

    if not inspect.isfunction(SegmentPool.take):
        pytest.skip("what is compiled can't be replaced")
    async with serving(toys, model_file) as (model, [handler], threads):
        with monkeypatch.context() as short:
            segments = handler.process.segments
            short.setattr(segments, "take", failing_once(segments.take))
            assert (await ask(model)).tolist() == [2, 2]
        assert threads.given == 1
        await at_rest(model, threads)
