"""A model in memory answers every request that it accepted exactly once, whatever its instances, clients and clock do."""

import asyncio
import contextlib
import threading
import time
import weakref

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from model_handlers.config.model_config import DynamicBatching, QueuePolicy, TimeoutAction
from model_handlers.errors import Kind, MmeError
from model_handlers.executor import Executors, Submission
from model_handlers.in_process import InlinePolicy, OverrunWatch
from model_handlers.worker.executor import PipelinedExecutor
from model_handlers.worker.limits import EXECUTION_TIMEOUT
from serve.model.model import Model
from serve.statistics import ModelStats
from tests.serve.inside import idle, known_layouts
from tests.waiting import until

FOR_EVER_US = 3_600_000_000
ALWAYS_NS = 10**12  # every execution is quick enough for the loop
BATCHING = DynamicBatching((8,))


def batching(**policy):
    """A dynamic batcher whose queue has this policy."""
    return DynamicBatching((8,), default_queue_policy=QueuePolicy(**policy))


@contextlib.asynccontextmanager
async def serving(toys, script=None, *, instances=1, inline_ns=0, handler=None, **config):
    """A started model with its handler; closed afterwards, when everybody has been answered."""
    config.setdefault("dynamic_batching", BATCHING)
    handler = handler or (toys.Inline if inline_ns else toys.Scripted)(toys.config(**config), script)
    loop = asyncio.get_running_loop()
    names = [(f"m_{index}", handler) for index in range(instances)]
    model = Model("m", 1, names, ModelStats(), loop, inline_ns)
    try:
        yield model, handler
        assert model.outstanding == 0
        assert model.queued == 0
    finally:
        if isinstance(handler.script, toys.Gate):
            handler.script.open()
        await asyncio.to_thread(model.close)
    assert handler.closed == 1


def ask(model, call):
    """Submit a call."""
    model.submit(call.request)
    return call


async def answers(*calls):
    """Everybody's answer."""
    return [await call.answer() for call in calls]


async def at_rest(model):
    """Wait until the instance waits as well; one that has just finished takes what comes next by itself."""
    while not idle(model):  # noqa: ASYNC110 - an instance sets no event when it comes to rest
        await asyncio.sleep(0)


def counts(model):
    """(succeeded, failed by reason, executions)."""
    return model.stats.success.count, dict(model.stats.failures), model.stats.execution_count


# -- limits ------------------------------------------------------------------------------------------------------------


async def test_an_execution_in_this_process_that_takes_too_long_is_answered_and_goes_on(toys):
    """Its batch is told at its time limit, and what it makes is dropped; the next batch waits for its end."""
    gate = toys.Gate()
    async with serving(toys, gate, parameters={EXECUTION_TIMEOUT: "0.1"}) as (model, handler):
        late = [ask(model, toys.Call(number)) for number in range(3)]
        told = await answers(*late)
        assert [error.kind for error in told] == [Kind.TIMED_OUT] * 3
        assert "takes longer than 0.1 s (MME_EXECUTION_TIMEOUT)" in told[0].message
        behind = ask(model, toys.Call(7))
        gate.open()
        await behind.answer()
        assert behind.kind is None
        assert handler.batches == [[0, 1, 2], [7]]
        assert [len(call.answers) for call in late] == [1, 1, 1]
        assert counts(model) == (1, {"BACKEND": 3}, 2)


async def test_a_batch_that_was_late_leaves_memory_when_it_ends():
    """It holds tensors: nothing that watched it keeps it until it looks again."""
    late, batch = [], Submission()
    seen = weakref.ref(batch)
    watch = OverrunWatch(0.1, asyncio.get_running_loop(), lambda _: late.append(1))
    watch.watch(0, batch)
    await until(lambda: late)
    watch.begun(0, None)
    del batch
    assert seen() is None
    watch.close()


# -- batches -----------------------------------------------------------------------------------------------------------


async def test_requests_of_one_turn_of_the_loop_share_a_batch(toys):
    """What arrives together executes together, without any delay being configured."""
    async with serving(toys) as (model, handler):
        calls = [ask(model, toys.Call(number)) for number in range(5)]
        await answers(*calls)
        assert handler.batches == [[0, 1, 2, 3, 4]]
        assert [call.kind for call in calls] == [None] * 5
        assert counts(model) == (5, {}, 1)


async def test_a_batch_forms_while_the_lane_is_busy(toys):
    """Requests that come one by one while an instance executes leave in one batch, pulled by the instance itself."""
    gate = toys.Gate()
    async with serving(toys, gate) as (model, handler):
        calls = [ask(model, toys.Call(0))]
        await gate.arrived()
        for number in range(1, 6):
            calls.append(ask(model, toys.Call(number)))
            await asyncio.sleep(0)
        assert (model.queued, model.outstanding) == (5, 6)
        gate.let(2)
        await answers(*calls)
        assert handler.batches == [[0], [1, 2, 3, 4, 5]]
        assert all(thread.startswith("m_") for thread in handler.threads)


async def test_a_batch_never_exceeds_the_maximum_and_never_splits_a_request(toys):
    """Requests of three rows each under a maximum of eight go two by two."""
    async with serving(toys) as (model, handler):
        calls = [ask(model, toys.Call(n, n, n)) for n in range(4)]
        await answers(*calls)
        assert handler.batches == [[0, 0, 0, 1, 1, 1], [2, 2, 2, 3, 3, 3]]
        assert [call.kind for call in calls] == [None] * 4


async def test_without_dynamic_batching_each_request_runs_alone(toys):
    """A model that asks for no batching executes requests one by one, in order."""
    async with serving(toys, dynamic_batching=None) as (model, handler):
        await answers(*[ask(model, toys.Call(number)) for number in range(3)])
        assert handler.batches == [[0], [1], [2]]


async def test_the_batcher_waits_for_a_preferred_size_no_longer_than_it_may(toys):
    """With a delay configured a full batch leaves at once, and a part of one when the delay is over."""
    policy = DynamicBatching((4,), max_queue_delay_microseconds=FOR_EVER_US)
    async with serving(toys, dynamic_batching=policy) as (model, handler):
        calls = [ask(model, toys.Call(number)) for number in range(3)]
        await asyncio.sleep(0)
        assert handler.batches == []
        calls.append(ask(model, toys.Call(3)))
        await answers(*calls)
        assert handler.batches == [[0, 1, 2, 3]]
    policy = DynamicBatching((4,), max_queue_delay_microseconds=1000)
    async with serving(toys, dynamic_batching=policy) as (model, handler):
        await answers(ask(model, toys.Call(0)), ask(model, toys.Call(1)))
        assert handler.batches == [[0, 1]]


# -- instances -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("turns", "expected"), [(True, [3, 3, 3]), (False, [0, 0, 9])], ids=["turns", "no turns"])
@pytest.mark.parametrize("inline", [False, True], ids=["on threads", "on the loop"])
async def test_free_lanes_take_turns_on_several_devices(toys, inline, turns, expected):
    """A model with an instance on each of three devices has all of them work; on one device the warmest goes on."""
    kind = toys.Inline if inline else toys.Scripted
    handlers = [kind(toys.config(dynamic_batching=None)) for _ in range(3)]
    instances = [(f"m_{index}", handler) for index, handler in enumerate(handlers)]
    model = Model("m", 1, instances, ModelStats(), asyncio.get_running_loop(), ALWAYS_NS * inline, turns=turns)
    for number in range(9):
        await answers(ask(model, toys.Call(number)))
        while idle(model) < len(instances):  # noqa: ASYNC110 - an instance sets no event when it comes to rest
            await asyncio.sleep(0)
    await asyncio.to_thread(model.close)
    assert [len(handler.batches) for handler in handlers] == expected


async def test_two_lanes_execute_at_the_same_time(toys):
    """Two batches are inside the handler at once when there are two instances, on two threads."""
    gate = toys.Gate()
    async with serving(toys, gate, instances=2, dynamic_batching=None) as (model, handler):
        calls = [ask(model, toys.Call(number)) for number in range(4)]
        await gate.arrived()
        await gate.arrived()
        assert model.queued == 2
        gate.open()
        await answers(*calls)
        assert sorted(handler.batches) == [[0], [1], [2], [3]]
        assert len(set(handler.threads)) >= 2
        assert [call.kind for call in calls] == [None] * 4


class InflightLimiter:
    """Holds back each batch until its own first number is called."""

    def __init__(self):
        self.arrived = {number: threading.Event() for number in range(8)}
        self.called = {number: threading.Event() for number in range(8)}

    def __call__(self, rows):
        """Wait to be called."""
        number = int(rows[0, 0])
        self.arrived[number].set()
        assert self.called[number].wait(60)
        return [rows * 2]


@pytest.mark.parametrize(("ordered", "expected"), [(True, [0, 1, 2]), (False, [1, 2, 0])])
async def test_preserve_ordering_holds_back_answers_that_overtook(toys, ordered, expected):
    """With two instances the quicker answers first, unless `preserve_ordering` makes it wait for those before it."""
    order = []
    turnstile = InflightLimiter()
    policy = DynamicBatching((1,), preserve_ordering=ordered)
    async with serving(toys, turnstile, instances=2, dynamic_batching=policy) as (model, _):
        calls = [ask(model, toys.Call(n, on_answer=lambda c: order.append(c.numbers[0]))) for n in range(3)]
        turnstile.called[1].set()
        turnstile.called[2].set()
        await asyncio.to_thread(turnstile.arrived[2].wait, 30)
        if not ordered:
            await answers(calls[1], calls[2])
        turnstile.called[0].set()
        await answers(*calls)
        assert order == expected


async def test_order_is_kept_when_a_batch_fails_or_is_cancelled(toys):
    """A failed batch keeps its place in the order, and a cancelled request leaves no gap that others wait for."""

    def script(rows):
        if rows[0, 0] == 0:
            raise MmeError(Kind.EXECUTION_FAILED, "zero")
        return [rows * 2]

    order = []
    policy = DynamicBatching((1,), preserve_ordering=True)
    async with serving(toys, script, instances=2, dynamic_batching=policy) as (model, _):
        calls = [ask(model, toys.Call(n, on_answer=lambda c: order.append(c.numbers[0]))) for n in range(5)]
        calls[2].request.cancelled = True
        await answers(*calls)
        assert [n for n in order if n != 2] == [0, 1, 3, 4]
        assert [call.kind for call in calls] == [Kind.EXECUTION_FAILED, None, Kind.CANCELLED, None, None]


# -- execution on the loop ---------------------------------------------------------------------------------------------


async def test_a_model_earns_the_loop_by_being_quick(toys):
    """The first execution of a size runs on an instance; later ones on the loop, since they are expected to be quick."""
    async with serving(toys, inline_ns=ALWAYS_NS) as (model, handler):
        await answers(ask(model, toys.Call(1)))
        await at_rest(model)
        await answers(ask(model, toys.Call(2)))
        assert handler.threads == ["m_0", threading.current_thread().name]
        await answers(ask(model, toys.Call(3, 3, 3, 3, 3, 3)))  # another size has to earn it anew
        assert handler.threads[2].startswith("m_")


async def test_a_slow_execution_loses_the_loop(toys):
    """One execution that took far too long sends the next of its size back to an instance."""
    slow = False

    def script(rows):
        # Burns the processor time that the model will measure; nothing waits for it.
        end = time.thread_time() + (0.02 if slow else 0)
        while time.thread_time() < end:
            pass
        return [rows * 2]

    async with serving(toys, script, inline_ns=1_000_000) as (model, handler):
        loop_thread = threading.current_thread().name
        for _ in range(200):  # on a machine this busy a first execution may look slow
            await answers(ask(model, toys.Call(1)))
            await at_rest(model)
            if handler.threads[-1] == loop_thread:
                break
        assert handler.threads[-1] == loop_thread
        slow = True
        await answers(ask(model, toys.Call(2)))
        await answers(ask(model, toys.Call(3)))
        assert handler.threads[-1].startswith("m_")


def test_costs_are_averages_that_one_accident_does_not_move_far():
    """A slow execution is forgiven, a model that became slow loses the loop, a far too slow one loses it at once."""
    costs = InlinePolicy(200_000)

    def observe(processor_ns, times=1):
        for _ in range(times):
            costs.observe(9, processor_ns)
        return costs.should_inline(9)

    assert not costs.should_inline(9)
    assert observe(100_000)
    assert observe(1_900_000)
    assert observe(100_000, 10)
    assert not observe(400_000, 10)
    assert observe(100_000, 20)
    assert not observe(2_100_000)
    assert not observe(100_000, 20)
    assert observe(100_000, 20)


@pytest.mark.parametrize("case", ["handler that may not", "switched off"])
async def test_the_loop_executes_only_what_it_may(toys, case):
    """A handler that may block, or a setting of zero, keeps every execution on an instance however quick it is."""
    handler = (toys.Scripted if case == "handler that may not" else toys.Inline)(toys.config())
    inline_ns = ALWAYS_NS if case == "handler that may not" else 0
    async with serving(toys, handler=handler, inline_ns=inline_ns) as (model, _):
        for number in range(5):
            await answers(ask(model, toys.Call(number)))
        assert all(thread.startswith("m_") for thread in handler.threads)


async def test_an_execution_on_the_loop_that_fails_is_answered(toys):
    """An exception of a handler on the loop reaches its request and not the loop; the next one is served."""
    async with serving(toys, inline_ns=ALWAYS_NS) as (model, handler):
        await answers(ask(model, toys.Call(1)))
        await at_rest(model)
        good, handler.script = handler.script, lambda _: 1 / 0
        bad = ask(model, toys.Call(2))
        await answers(bad)
        assert bad.kind is Kind.INTERNAL
        assert handler.threads[-1] == threading.current_thread().name
        handler.script = good
        last = ask(model, toys.Call(3))
        await answers(last)
        assert last.kind is None


async def test_a_request_made_while_another_is_answered_on_the_loop_is_served(toys):
    """A completion that submits the next request, on the loop itself, neither recurses nor stands still."""
    async with serving(toys, inline_ns=ALWAYS_NS) as (model, _):
        calls = []

        def again(call):
            if len(calls) < 300:
                calls.append(ask(model, toys.Call(len(calls), on_answer=again)))
            else:
                done.set_result(None)

        done = asyncio.get_running_loop().create_future()
        calls.append(ask(model, toys.Call(0, on_answer=again)))
        await done
        assert [call.kind for call in calls] == [None] * 300


# -- what goes wrong ---------------------------------------------------------------------------------------------------


async def test_an_instance_executes_one_batch_at_a_time(toys):
    """One that is quick enough for the loop waits all the same behind one that is on the instance's thread."""
    gate = toys.Gate()
    async with serving(toys, inline_ns=ALWAYS_NS, max_batch_size=2) as (model, handler):
        first = toys.Call(1)
        model.submit(first.request)
        await first.answer()
        handler.script = gate
        large, small = toys.Call(2, 3), [toys.Call(4), toys.Call(5, 6)]
        model.submit(large.request)  # of a size that was not seen before
        await gate.arrived()
        for call in small:
            model.submit(call.request)
        for _ in range(5):
            await asyncio.sleep(0)
        assert handler.batches == [[1], [2, 3]]
        gate.open()
        await asyncio.gather(*(call.answer() for call in (large, *small)))
        assert handler.batches == [[1], [2, 3], [4], [5, 6]]


@pytest.mark.parametrize("inline_ns", [0, ALWAYS_NS], ids=["instance", "loop"])
async def test_an_answer_that_cannot_be_handed_over_does_not_cost_others_theirs(toys, caplog, inline_ns):
    """A completion that raises is logged; everybody else in its batch is answered and every lease ends."""

    class Lease:
        released = 0

        def release(self):
            Lease.released += 1

    def fail(_call):
        raise BrokenPipeError("gone")

    async with serving(toys, inline_ns=inline_ns) as (model, _):
        await answers(ask(model, toys.Call(9)))
        calls = [toys.Call(0), toys.Call(1, on_answer=fail), toys.Call(2)]
        for call in calls:
            call.request.lease = Lease()
            ask(model, call)
        await answers(*calls)
        assert [call.kind for call in calls] == [None] * 3
        assert Lease.released == 3
    assert "gone" in caplog.text


async def test_a_request_that_does_not_fit_is_refused_at_once(toys):
    """A wrong name, type or shape raises in `submit`, counts as failed, and nothing is executed or outstanding."""
    async with serving(toys) as (model, handler):
        wrong = toys.Call(*range(9))  # nine rows; the maximum is eight
        with pytest.raises(MmeError, match="batch-size must be <= 8") as caught:
            ask(model, wrong)
        assert caught.value.kind is Kind.INVALID_ARGUMENT
        assert (wrong.answers, handler.batches) == ([], [])
        assert counts(model) == (0, {"OTHER": 1}, 0)


async def test_a_full_queue_refuses_at_once_and_keeps_those_it_has(toys):
    """One request more than `max_queue_size` is refused, counted as rejected, and the others are served."""
    gate = toys.Gate()
    async with serving(toys, gate, dynamic_batching=batching(max_queue_size=2)) as (model, _):
        calls = [ask(model, toys.Call(0))]
        await gate.arrived()
        calls += [ask(model, toys.Call(1)), ask(model, toys.Call(2))]
        with pytest.raises(MmeError, match="2 requests waiting, max_queue_size is 2") as caught:
            ask(model, toys.Call(3))
        assert caught.value.kind is Kind.QUEUE_FULL
        gate.open()
        await answers(*calls)
        last = ask(model, toys.Call(4))
        await answers(last)
        assert [call.kind for call in [*calls, last]] == [None] * 4
        assert counts(model)[:2] == (4, {"REJECTED": 1})


async def test_time_in_the_queue_runs_out_while_every_lane_is_busy(toys):
    """Queued requests are told QUEUE_TIMEOUT when their time is over, though no instance ever comes to look."""
    gate = toys.Gate()
    policy = batching(default_timeout_microseconds=FOR_EVER_US, allow_timeout_override=True)
    async with serving(toys, gate, instances=2, dynamic_batching=policy) as (model, handler):
        busy = [ask(model, toys.Call(0))]
        await gate.arrived()
        busy.append(ask(model, toys.Call(1)))
        await gate.arrived()
        late = [ask(model, toys.Call(number, timeout_us=20_000)) for number in (2, 3)]
        await answers(*late)
        assert [call.kind for call in late] == [Kind.QUEUE_TIMEOUT] * 2
        assert model.outstanding == 2
        gate.open()
        await answers(*busy)
        assert sorted(handler.batches) == [[0], [1]]
        assert counts(model) == (2, {"REJECTED": 2}, 2)


async def test_a_request_may_ask_for_less_time_in_the_queue(toys):
    """A request's own, shorter timeout counts where the policy allows it; the one before it goes on waiting."""
    gate = toys.Gate()
    policy = batching(default_timeout_microseconds=FOR_EVER_US, allow_timeout_override=True)
    async with serving(toys, gate, dynamic_batching=policy) as (model, _):
        calls = [ask(model, toys.Call(0))]
        await gate.arrived()
        calls.append(ask(model, toys.Call(1)))
        await asyncio.sleep(0)  # the timer of the first is set
        hasty = ask(model, toys.Call(2, timeout_us=1000))
        await answers(hasty)
        assert hasty.kind is Kind.QUEUE_TIMEOUT
        assert model.queued == 1
        gate.open()
        await answers(*calls)
        assert [call.kind for call in calls] == [None] * 2


async def test_delayed_requests_are_executed_after_those_with_time(toys):
    """With the action DELAY a request whose time is over is served, but behind everybody who has time left."""
    gate = toys.Gate()
    policy = QueuePolicy(TimeoutAction.DELAY, 3_000_000, allow_timeout_override=True)
    async with serving(toys, gate, dynamic_batching=DynamicBatching((1,), default_queue_policy=policy)) as (
        model,
        handler,
    ):
        calls = [ask(model, toys.Call(0))]
        await gate.arrived()
        calls.append(ask(model, toys.Call(1, timeout_us=1)))
        await asyncio.sleep(0.002)
        calls.append(ask(model, toys.Call(2)))
        gate.open()
        await answers(*calls)
        assert [call.kind for call in calls] == [None] * 3
        assert handler.batches == [[0], [2], [1]]


async def test_cancelled_requests_are_not_executed_and_are_counted(toys):
    """Requests whose client left while they queued, at the front, in the middle and at the end, never execute."""
    gate = toys.Gate()
    async with serving(toys, gate) as (model, handler):
        calls = [ask(model, toys.Call(0))]
        await gate.arrived()
        calls += [ask(model, toys.Call(number)) for number in range(1, 6)]
        for number in (1, 3, 5):
            calls[number].request.cancelled = True
        gate.open()
        await answers(*calls)
        assert handler.batches == [[0], [2, 4]]
        assert [call.kind for call in calls] == [None, Kind.CANCELLED] * 3
        assert counts(model)[:2] == (3, {"CANCELED": 3})


async def test_a_client_that_leaves_before_its_batch_is_formed_costs_nothing(toys):
    """Cancelled in the same turn of the loop, nothing executes at all."""
    async with serving(toys) as (model, handler):
        calls = [ask(model, toys.Call(number)) for number in range(3)]
        for call in calls:
            call.request.cancelled = True
        await answers(*calls)
        assert [call.kind for call in calls] == [Kind.CANCELLED] * 3
        assert handler.batches == []


async def test_a_client_that_leaves_while_its_batch_executes_is_answered_once(toys):
    """Cancelling what is being executed changes nothing: it is answered, once, and so are the others."""
    gate = toys.Gate()
    async with serving(toys, gate) as (model, _):
        calls = [ask(model, toys.Call(0)), ask(model, toys.Call(1))]
        await gate.arrived()
        calls[0].request.cancelled = True
        gate.open()
        await answers(*calls)
        assert [call.kind for call in calls] == [None] * 2


async def test_refusing_those_who_wait_leaves_those_who_execute(toys):
    """`refuse_waiting` tells the queued ones UNAVAILABLE at once and lets the executing batch finish."""
    gate = toys.Gate()
    async with serving(toys, gate, dynamic_batching=batching(default_timeout_microseconds=FOR_EVER_US)) as (
        model,
        handler,
    ):
        running = ask(model, toys.Call(0))
        await gate.arrived()
        waiting = [ask(model, toys.Call(number)) for number in (1, 2)]
        model.refuse_waiting()
        assert [call.kind for call in waiting] == [Kind.UNAVAILABLE] * 2
        assert running.answers == []
        gate.open()
        await answers(running)
        assert running.kind is None
        assert handler.batches == [[0]]


async def test_many_layouts_do_not_grow_a_model(toys):
    """A client that sends ever new layouts is served, and what is remembered of them stays bounded."""
    async with serving(toys) as (model, _):
        for number in range(2500):
            call = ask(model, toys.Call(number))
            if number % 50 == 0:
                await answers(call)
        await answers(call)
        assert known_layouts(model) <= 1024


async def test_closing_closes_every_handler_though_one_of_them_raises(toys):
    """A handler that fails to close does not keep another's memory; the error is told."""

    class Broken(toys.Scripted):
        def close(self):
            super().close()
            raise OSError("stuck")

    handlers = [Broken(toys.config()), toys.Scripted(toys.config()), Broken(toys.config())]
    instances = [(f"m_{index}", handler) for index, handler in enumerate(handlers)]
    model = Model("m", 1, instances, ModelStats(), asyncio.get_running_loop())
    with pytest.raises(OSError, match="stuck"):
        await asyncio.to_thread(model.close)
    assert [handler.closed for handler in handlers] == [1, 1, 1]


async def test_repr_is_fit_for_logs(toys):
    """A model says what is queued, accepted and idle."""
    gate = toys.Gate()
    async with serving(toys, gate, instances=2) as (model, _):
        assert repr(model) == "<Model m/1: 0 queued of 0 accepted, 2 of 2 instances idle>"
        call = ask(model, toys.Call(1))
        await gate.arrived()
        assert repr(model) == "<Model m/1: 0 queued of 1 accepted, 1 of 2 instances idle>"
        gate.open()
        await answers(call)


# -- everything at once ------------------------------------------------------------------------------------------------

ACTIONS = st.one_of(
    st.tuples(st.just("ask"), st.integers(1, 8)),
    st.tuples(st.just("cancel"), st.integers(0, 40)),
    st.tuples(st.just("open"), st.integers(1, 3)),
    st.tuples(st.just("turn"), st.integers(1, 3)),
    st.tuples(st.just("refuse"), st.just(0)),
)
BEHAVIOURS = st.sampled_from(["quick", "gated", "gated", "raises", "foreign", "rows", "outputs"])


class Moody:
    """A handler's script that behaves in another way each time."""

    def __init__(self, gate, moods):
        self._gate = gate
        self._moods = moods
        self._next = 0
        self._lock = threading.Lock()

    def __call__(self, rows):
        """Do the next thing."""
        with self._lock:
            mood = self._moods[self._next % len(self._moods)]
            self._next += 1
        if mood == "gated":
            return self._gate(rows)
        if mood == "raises":
            raise MmeError(Kind.EXECUTION_FAILED, "a bad day")
        if mood == "foreign":
            raise KeyError(mood)
        return {"quick": [rows * 2], "rows": [np.zeros((len(rows) + 1, 2))], "outputs": []}[mood]


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(
    actions=st.lists(ACTIONS, max_size=40),
    moods=st.lists(BEHAVIOURS, min_size=1, max_size=6),
    instances=st.integers(1, 3),
    inline=st.booleans(),
    ordered=st.booleans(),
    limit=st.sampled_from([0, 3]),
    timeout_us=st.sampled_from([0, 500]),
)
async def test_every_accepted_request_is_answered_exactly_once(
    toys, actions, moods, instances, inline, ordered, limit, timeout_us
):
    """Under any mix of requests, departures, slow, failing and lying executions, timeouts and refusals."""
    gate = toys.Gate()
    if inline:
        moods[:] = [mood for mood in moods if mood != "gated"] or ["quick"]
    policy = DynamicBatching(
        (4, 8),
        preserve_ordering=ordered,
        default_queue_policy=QueuePolicy(default_timeout_microseconds=timeout_us, max_queue_size=limit),
    )
    handler = (toys.Inline if inline else toys.Scripted)(toys.config(dynamic_batching=policy), Moody(gate, moods))
    calls, refused = [], 0
    async with serving(toys, instances=instances, inline_ns=ALWAYS_NS * inline, handler=handler) as (model, _):
        for action, number in actions:
            if action == "ask":
                call = toys.Call(*[len(calls)] * number)
                try:
                    calls.append(ask(model, call))
                except MmeError:
                    assert model.queued == limit > 0
                    refused += 1
                    assert call.answers == []
            elif action == "cancel" and number < len(calls):
                calls[number].request.cancelled = True
            elif action == "open":
                gate.let(number)
            elif action == "refuse":
                model.refuse_waiting()
            elif action == "turn":
                for _ in range(number):
                    await asyncio.sleep(0)
        gate.open()
        await answers(*calls)
        kinds = [call.kind for call in calls]
        assert model.stats.success.count == kinds.count(None)
        assert sum(model.stats.failures.values()) == len(kinds) - kinds.count(None) + refused


async def test_no_batch_waits_behind_another_one_while_a_lane_is_idle(toys):
    """An instance that works ahead leaves a batch to the idle one, which is about to be given it."""
    loop, began = asyncio.get_running_loop(), []
    second = toys.Call(2)

    class Ahead(toys.Scripted):
        apart = True

        def executors(self, handlers, home, **_):
            return Executors(
                [PipelinedExecutor(name, i, handler, home) for i, (name, handler) in enumerate(handlers)], home
            )

        def begin(self, inputs, _outputs):
            number = int(inputs["x"][0, 0])
            began.append((self, number))
            if number == 1:  # the other request comes, and the loop does nothing else before this instance has looked
                loop.call_soon_threadsafe(come)
                assert came.wait(60)
            else:
                looked.set()
                both.set()
            return inputs["x"]

        def finish(self, rows):
            looked.set()
            assert both.wait(60)  # else this instance might be the next to be idle
            return self.script(rows)

    came, looked, both = (threading.Event() for _ in range(3))

    def come():
        model.submit(second.request)
        came.set()
        assert looked.wait(60)

    handlers = [Ahead(toys.config(max_batch_size=1)) for _ in range(2)]
    model = Model("m", 1, [(f"m_{index}", each) for index, each in enumerate(handlers)], ModelStats(), loop)
    first = ask(model, toys.Call(1))
    await answers(first, second)
    assert [call.kind for call in (first, second)] == [None, None]
    assert [number for _, number in began] == [1, 2]
    assert began[0][0] is not began[1][0]
    await asyncio.to_thread(model.close)
