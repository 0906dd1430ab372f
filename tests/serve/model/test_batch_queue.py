"""The dynamic batcher's queue: its rules one by one, and random lives of it against what must always hold."""

from dataclasses import dataclass, field
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from model_handlers.config.model_config import DynamicBatching, QueuePolicy, TimeoutAction
from model_handlers.errors import Kind, MmeError
from serve.model.batcher import BatchQueue

US = 1000  # nanoseconds


@dataclass(eq=False)
class Request:
    """What the queue knows of a request."""

    name: str
    batch_size: int = 1
    signature: object = None
    timeout_us: int = 0
    priority: int = 0
    cancelled: bool = False
    arrival_ns: int = 0
    deadline_ns: int = field(default=-1)

    def __repr__(self):
        return self.name


class Clocked:
    """A queue with a clock in microseconds."""

    def __init__(self, max_batch_size=8, preferred=None, delay=0, action=TimeoutAction.REJECT, *, batch=True, **policy):
        batching = DynamicBatching(
            preferred_batch_size=(max_batch_size,) if preferred is None else preferred,
            max_queue_delay_microseconds=delay,
            default_queue_policy=QueuePolicy(timeout_action=action, **policy),
        )
        self.queue = BatchQueue("m", max_batch_size, batching if batch else None)
        self.names = count(1)

    def push(self, *requests, at=0):
        """Push requests, or as many of batch size 1 as a number says; return them."""
        if isinstance(requests[0], int):
            requests = [Request(f"r{next(self.names)}") for _ in range(requests[0])]
        for request in requests:
            request.arrival_ns = at * US
            self.queue.push(request)
        return list(requests)

    def take(self, at=0):
        """What `take` decides at a time."""
        return self.queue.take(at * US)

    def batch(self, at=0):
        """The names in the batch taken at a time."""
        return [request.name for request in self.take(at).batch]

    def sizes(self, at=0):
        """The sizes of all batches that can be taken at a time."""
        found = []
        while batch := self.take(at).batch:
            found.append(sum(request.batch_size for request in batch))
        return found


def sized(*sizes, signature=None):
    """Requests of these batch sizes."""
    return [Request(f"b{index}", size, signature) for index, size in enumerate(sizes)]


# -- without a timer -------------------------------------------------------------------------------------------------


def test_an_empty_queue_has_nothing_to_do():
    """Nothing comes out, and nothing is to be waited for."""
    take = Clocked().take()

    assert (take.batch, take.wake_at, take.expired, take.cancelled) == ([], 0, [], [])


def test_what_waits_goes_at_once():
    """Without a delay whatever is queued is a batch, in the order in which it came."""
    clocked = Clocked()
    clocked.push(3)

    assert clocked.batch() == ["r1", "r2", "r3"]
    assert clocked.batch() == []


@pytest.mark.parametrize(
    ("requests", "batches"),
    [
        ([8], [8]),
        ([1] * 9, [8, 1]),
        ([1] * 20, [8, 8, 4]),
        ([3, 3, 3], [6, 3]),
        ([5, 4, 1], [5, 5]),
        ([8, 1, 8], [8, 1, 8]),
        ([7, 2, 1], [7, 3]),
    ],
    ids=str,
)
def test_a_batch_is_at_most_the_largest(requests, batches):
    """Sums of batch sizes never exceed max_batch_size; a request that does not fit any more begins the next batch."""
    clocked = Clocked()
    clocked.push(*sized(*requests))

    assert clocked.sizes() == batches


@pytest.mark.parametrize("max_batch_size", [0, 1])
def test_a_model_that_does_not_batch_runs_each_alone(max_batch_size):
    """With max_batch_size 0 or 1 every request is a batch of its own, delay or not."""
    clocked = Clocked(max_batch_size, delay=1000)
    clocked.push(3)

    assert [clocked.batch() for _ in range(4)] == [["r1"], ["r2"], ["r3"], []]


def test_without_a_dynamic_batcher_requests_run_alone():
    """A model that batches, but has no dynamic_batching, executes each request as it came: that is the client's batch."""
    clocked = Clocked(8, batch=False)
    clocked.push(*sized(3, 1))

    assert clocked.sizes() == [3, 1]


@pytest.mark.parametrize("limited", [False, True])
def test_requests_that_run_alone_may_be_handed_out_together(limited):
    """As many as are asked for at most, whatever they look like, but nobody who has left or whose time is over."""
    policy = {"max_queue_size": 9, "default_timeout_microseconds": 50} if limited else {}
    queue = Clocked(1, batch=limited, **policy).queue
    first, gone, third, fourth, fifth = requests = sized(3, 1, 1, 1, 1)
    third.signature = ("other",)
    for request in requests:
        queue.push(request)
    gone.cancelled = True

    take = queue.take(0, (0,), 4)
    assert (take.batch, take.cancelled) == ([first, third, fourth], [gone])
    late = queue.take(60 * US, (0,), 4)
    assert (late.batch, late.expired) == (([], [fifth]) if limited else ([fifth], []))


@pytest.mark.parametrize("limited", [False, True])
def test_who_was_handed_out_in_vain_is_the_first_again(limited):
    """However many wait, of those of its own priority, and with what is left of its time."""
    policy = {"max_queue_size": 2, "default_timeout_microseconds": 50} if limited else {}
    clocked = Clocked(1, batch=limited, **policy)
    first, second = clocked.push(*sized(1, 1))
    assert clocked.queue.take(0, (0,), 2).batch == [first, second]
    clocked.push(*sized(1, 1), at=20)
    for request in (second, first):
        clocked.queue.push(request, first=True)

    assert clocked.queue.take(30 * US).batch == [first]
    late = clocked.queue.take(60 * US, (0,), 3)
    assert (len(late.batch), late.expired) == ((2, [second]) if limited else (3, []))


def test_only_equal_signatures_share_a_batch():
    """A request of another shape ends the batch, and nobody overtakes it."""
    clocked = Clocked()
    a, b = (sized(1, 1, signature=(shape,)) for shape in "ab")
    clocked.push(*a, *b, *sized(1, signature=("a",)))

    assert clocked.sizes() == [2, 2, 1]


@pytest.mark.parametrize(
    ("preferred", "requests", "batches"),
    [
        ((4,), [1] * 4, [4]),
        ((4,), [1] * 6, [4, 2]),
        ((4,), [1] * 3, [3]),
        ((2, 4), [1] * 3, [2, 1]),
        ((2, 4), [1] * 7, [4, 2, 1]),
        ((2, 4), [1] * 8, [4, 4]),
        ((4,), [3, 3], [3, 3]),
        ((4,), [3, 1, 1], [4, 1]),
        ((4,), [2, 1, 2], [3, 2]),
        ((4,), [6, 1], [6, 1]),
        ((4,), [6], [6]),
        ((6,), [4, 4], [4, 4]),
        ((2, 6), [2, 3, 3], [2, 6]),
        ((), [1] * 10, [8, 2]),
    ],
    ids=str,
)
def test_batches_are_cut_at_preferred_sizes(preferred, requests, batches):
    """The largest preferred size met is the batch, and a request that would carry it past the largest is cut off."""
    clocked = Clocked(8, preferred)
    clocked.push(*sized(*requests))

    assert clocked.sizes() == batches


def test_a_preferred_size_is_met_within_a_shape():
    """Where the shape changes, the last preferred size before it is the cut; without one all of the shape go."""
    clocked = Clocked(8, (2, 6))
    clocked.push(*sized(1, 1, 1), *sized(1, signature="other"), *sized(1))

    assert clocked.sizes() == [2, 1, 1, 1]


# -- max_queue_delay -------------------------------------------------------------------------------------------------


def test_a_batch_waits_for_a_preferred_size():
    """With a delay, fewer than a preferred size wait until the oldest has waited that long; then all go."""
    clocked = Clocked(8, (4,), delay=100)
    clocked.push(1, at=10)
    clocked.push(1, at=90)
    early = clocked.take(at=109)

    assert (early.batch, early.wake_at) == ([], 110 * US)
    assert clocked.batch(at=110) == ["r1", "r2"]


def test_a_preferred_size_does_not_wait():
    """The batch goes the moment a preferred size is met; what is beyond it waits on from its own arrival."""
    clocked = Clocked(8, (4,), delay=100)
    clocked.push(4, at=0)
    clocked.push(1, at=30)

    assert clocked.batch(at=30) == ["r1", "r2", "r3", "r4"]
    assert clocked.take(at=30).wake_at == 130 * US


def test_after_the_delay_everything_goes_whatever_is_preferred():
    """When the oldest has waited long enough a preferred size is no reason to leave somebody behind."""
    clocked = Clocked(8, (2,), delay=100)
    clocked.push(*sized(2, 2, 2))

    assert sum(request.batch_size for request in clocked.take(at=99).batch) == 2
    assert clocked.sizes(at=100) == [4]


@pytest.mark.parametrize("sizes", [[3, 3, 3], [8], [5]], ids=str)
def test_no_waiting_for_what_cannot_come(sizes):
    """A batch past the largest preferred size, or with no room for the next request, is not made to wait."""
    clocked = Clocked(8, (4,), delay=100)
    clocked.push(*sized(*sizes))

    assert clocked.take().batch != []


def test_no_waiting_before_another_shape():
    """Requests behind another shape can't join, so those before it go."""
    clocked = Clocked(8, (4,), delay=100)
    clocked.push(*sized(1, 1), *sized(1, signature="other"))

    assert clocked.sizes() == [2]
    assert len(clocked.queue) == 1


def test_without_preferred_sizes_the_delay_waits_for_a_full_batch():
    """The largest size is the preferred one where none is named."""
    clocked = Clocked(4, (), delay=100)
    clocked.push(3)
    waiting = clocked.take()
    clocked.push(1)

    assert (waiting.batch, waiting.wake_at) == ([], 100 * US)
    assert clocked.sizes() == [4]


# -- timeouts --------------------------------------------------------------------------------------------------------


def test_a_request_out_of_time_is_rejected():
    """REJECT: who waited default_timeout_microseconds is handed out as expired, the others as a batch."""
    clocked = Clocked(default_timeout_microseconds=50)
    late, *_ = clocked.push(1, at=0)
    clocked.push(1, at=20)
    take = clocked.take(at=50)

    assert take.expired == [late]
    assert [request.name for request in take.batch] == ["r2"]


def test_a_request_with_time_left_is_run():
    """A nanosecond before its time is over a request is still executed."""
    clocked = Clocked(default_timeout_microseconds=50)
    clocked.push(1)
    take = clocked.queue.take(50 * US - 1)

    assert (len(take.batch), take.expired) == (1, [])


def test_without_a_timeout_nobody_expires():
    """Zero means no limit."""
    clocked = Clocked(delay=10)
    [request] = clocked.push(1)

    assert request.deadline_ns == 0
    assert clocked.queue.next_deadline() == 0
    assert clocked.batch(at=10**9) == ["r1"]


def test_a_delayed_request_goes_behind_everybody():
    """DELAY: who is out of time is executed after all that still have time, and joins their batch where it fits."""
    clocked = Clocked(4, action=TimeoutAction.DELAY, default_timeout_microseconds=50)
    clocked.push(2, at=0)
    clocked.push(3, at=20)
    take = clocked.take(at=50)

    assert take.expired == []
    assert [request.name for request in take.batch] == ["r3", "r4", "r5", "r1"]
    assert clocked.batch(at=50) == ["r2"]


def test_delayed_requests_of_another_shape_wait_for_their_turn():
    """A delayed request shares a batch only with its like."""
    clocked = Clocked(4, action=TimeoutAction.DELAY, default_timeout_microseconds=50)
    clocked.push(*sized(1, signature="other"), at=0)
    clocked.push(1, at=20)

    assert [clocked.batch(at=50) for _ in range(3)] == [["r1"], ["b0"], []]


def test_delayed_requests_keep_their_order():
    """Among themselves delayed requests go first come, first served, and their time is not asked for again."""
    clocked = Clocked(1, action=TimeoutAction.DELAY, default_timeout_microseconds=50)
    clocked.push(2, at=0)

    assert clocked.batch(at=60) == ["r1"]
    assert clocked.queue.next_deadline() == 0
    assert clocked.batch(at=10**6) == ["r2"]


def test_who_is_delayed_earlier_does_not_overtake_who_came_first():
    """Timeouts of their own end at different times: the delayed are executed in the order in which they came, as in Triton."""
    clocked = Clocked(4, action=TimeoutAction.DELAY, default_timeout_microseconds=50, allow_timeout_override=True)
    clocked.push(Request("patient"))
    clocked.push(Request("hasty", timeout_us=10), at=1)
    clocked.push(Request("late"), at=40)

    assert clocked.queue.take_expired(11 * US).expired == []
    assert clocked.batch(at=60) == ["late", "patient", "hasty"]


def test_the_delay_of_a_batch_counts_from_its_oldest():
    """A delayed request is older than those before it: max_queue_delay counts from its arrival."""
    clocked = Clocked(8, (4,), delay=100, action=TimeoutAction.DELAY, default_timeout_microseconds=50)
    clocked.push(1, at=0)
    clocked.push(1, at=60)

    assert clocked.take(at=60).wake_at == 100 * US
    assert clocked.batch(at=100) == ["r2", "r1"]


@pytest.mark.parametrize(
    ("default", "own", "allowed", "expected"),
    [
        (50, 20, True, 20),
        (50, 80, True, 50),
        (50, 0, True, 50),
        (50, 20, False, 50),
        (0, 20, True, 0),
        (0, 20, False, 0),
    ],
)
def test_a_requests_own_timeout(default, own, allowed, expected):
    """It counts where allow_timeout_override says so and it is shorter; without a default it never does."""
    clocked = Clocked(default_timeout_microseconds=default, allow_timeout_override=allowed)
    [request] = clocked.push(Request("r", timeout_us=own), at=7)

    assert request.deadline_ns == ((7 + expected) * US if expected else 0)


def test_the_nearest_deadline_need_not_be_the_first():
    """With timeouts of their own requests may run out of time before those that came earlier."""
    clocked = Clocked(default_timeout_microseconds=50, allow_timeout_override=True)
    clocked.push(Request("patient"), Request("hasty", timeout_us=10))

    assert clocked.queue.next_deadline() == 10 * US
    assert [request.name for request in clocked.queue.take_expired(10 * US).expired] == ["hasty"]
    assert clocked.queue.next_deadline() == 50 * US


@pytest.mark.parametrize(("timeout", "expected"), [(30, 30), (300, 100)])
def test_waiting_ends_at_the_nearer_of_delay_and_timeout(timeout, expected):
    """A batch that waits for more is looked at again when its delay, or somebody's time, is over."""
    clocked = Clocked(8, (4,), delay=100, default_timeout_microseconds=timeout)
    clocked.push(1)

    assert clocked.take().wake_at == expected * US


def test_expiry_without_a_free_lane():
    """`take_expired` hands out who is out of time, and leaves everybody else, though a batch be ready."""
    clocked = Clocked(default_timeout_microseconds=50)
    late, *_ = clocked.push(1, at=0)
    clocked.push(8, at=20)
    take = clocked.queue.take_expired(50 * US)

    assert (take.expired, take.batch) == ([late], [])
    assert len(clocked.queue) == 8


# -- the size of the queue -------------------------------------------------------------------------------------------


def test_a_full_queue_refuses():
    """One more than max_queue_size is QUEUE_FULL, names the model and the limit, and the queue stays as it was."""
    clocked = Clocked(max_queue_size=2)
    clocked.push(2)

    with pytest.raises(MmeError, match=r"Exceeds maximum queue size: model 'm' .* max_queue_size is 2") as caught:
        clocked.push(1)

    assert caught.value.kind is Kind.QUEUE_FULL
    assert clocked.batch() == ["r1", "r2"]
    assert clocked.push(1)


def test_delayed_requests_take_places_too():
    """The size of the queue is everybody in it, delayed or not."""
    clocked = Clocked(action=TimeoutAction.DELAY, default_timeout_microseconds=50, max_queue_size=1)
    clocked.push(1)
    clocked.queue.take_expired(60 * US)

    with pytest.raises(MmeError, match="has 1 requests waiting"):
        clocked.push(1, at=60)


def test_there_is_no_limit_by_default():
    """Zero means no limit."""
    clocked = Clocked()
    clocked.push(10_000)

    assert len(clocked.queue) == 10_000


# -- leaving ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gone", [[0], [1], [3], [0, 1, 2, 3], [0, 2]], ids=str)
def test_who_was_cancelled_is_not_executed(gone):
    """A cancelled request is handed out as such wherever it stood, and its place in the batch goes to another."""
    clocked = Clocked(4, (4,))
    requests = clocked.push(8)
    for index in gone:
        requests[index].cancelled = True
    take = clocked.take()

    assert take.cancelled == [requests[index] for index in gone]
    assert take.batch == [request for request in requests if not request.cancelled][:4]


def test_a_queue_of_cancelled_requests_has_nothing_to_execute():
    """They are handed out, and there is nothing to wait for."""
    clocked = Clocked(8, (4,), delay=100)
    requests = clocked.push(2)
    for request in requests:
        request.cancelled = True
    take = clocked.take()

    assert (take.cancelled, take.batch, take.wake_at) == (requests, [], 0)
    assert len(clocked.queue) == 0


def test_a_cancelled_request_of_another_shape_does_not_end_a_batch():
    """What nobody waits for stands in nobody's way."""
    clocked = Clocked()
    clocked.push(*sized(1), Request("gone", 8, "other", cancelled=True), *sized(1))
    take = clocked.take()

    assert len(take.batch) == 2
    assert len(take.cancelled) == 1


def test_clearing_hands_out_everybody():
    """Who is still queued when the model goes is handed out, delayed ones last, and the queue is empty."""
    clocked = Clocked(action=TimeoutAction.DELAY, default_timeout_microseconds=50)
    clocked.push(1, at=0)
    clocked.push(1, at=30)
    clocked.queue.take_expired(60 * US)

    assert [request.name for request in clocked.queue.clear()] == ["r2", "r1"]
    assert len(clocked.queue) == 0
    assert clocked.batch(at=100) == []


def test_a_queue_tells_how_long_it_is():
    """Its `repr` is fit for a log line."""
    clocked = Clocked(action=TimeoutAction.DELAY, default_timeout_microseconds=50)
    clocked.push(1, at=0)
    clocked.push(2, at=30)
    clocked.queue.take_expired(60 * US)

    assert repr(clocked.queue) == "<BatchQueue m: 2 waiting, 1 delayed>"


# -- priority levels -------------------------------------------------------------------------------------------------

REJECTING = QueuePolicy(default_timeout_microseconds=50)
DELAYING = QueuePolicy(TimeoutAction.DELAY, default_timeout_microseconds=50)


def levelled(levels, default=1, max_batch_size=8, delay=0, default_queue_policy=None, **policies):
    """A queue of so many priority levels; `level_2=` is the policy of the second."""
    own = {int(name.removeprefix("level_")): policy for name, policy in policies.items()}
    clocked = Clocked(max_batch_size)
    batching = DynamicBatching(
        (max_batch_size,), delay, False, levels, default, default_queue_policy or QueuePolicy(), own
    )
    clocked.queue = BatchQueue("m", max_batch_size, batching)
    return clocked


def of(*priorities, size=1):
    """Requests of these priorities, named by priority and place."""
    return [Request(f"p{priority}.{index}", size, priority=priority) for index, priority in enumerate(priorities)]


def test_a_lower_number_is_served_first():
    """Batches are filled from the first level on, each level in the order of arrival."""
    clocked = levelled(3, max_batch_size=2)
    clocked.push(*of(3, 2, 1, 2, 1, 1))

    assert [clocked.batch() for _ in range(4)] == [["p1.2", "p1.4"], ["p1.5", "p2.1"], ["p2.3", "p3.0"], []]


@pytest.mark.parametrize("priority", [0, 4, 2**64 - 1])
def test_a_priority_that_is_no_level_is_the_default_one(priority):
    """Neither 0 nor a number past the last level is refused; such a request waits with those of the default level."""
    clocked = levelled(3, default=2, max_batch_size=1)
    clocked.push(*of(3, priority, 2, 1))

    assert [clocked.batch()[0].partition(".")[0] for _ in range(4)] == ["p1", f"p{priority}", "p2", "p3"]


def test_without_levels_a_priority_means_nothing():
    """First come, first served."""
    clocked = Clocked(1)
    clocked.push(*of(3, 1))

    assert [clocked.batch() for _ in range(2)] == [["p3.0"], ["p1.1"]]


def test_a_level_may_have_a_size_and_a_timeout_of_its_own():
    """A full level refuses, the others have room; whose time is over is told by the policy of its level."""
    clocked = levelled(3, default_queue_policy=REJECTING, level_1=QueuePolicy(max_queue_size=1), level_3=DELAYING)
    first, second, third = clocked.push(*of(1, 2, 3))
    with pytest.raises(MmeError, match="max_queue_size is 1"):
        clocked.push(*of(1))
    take = clocked.take(at=50)

    assert take.expired == [second]
    assert take.batch == [first, third]


def test_the_delayed_of_a_level_go_before_the_next_level():
    """Out of time is not out of one's level."""
    clocked = levelled(2, max_batch_size=1, level_1=DELAYING)
    clocked.push(*of(2, 1, 1))
    [late] = clocked.push(*of(1), at=30)

    assert [clocked.batch(at=60) for _ in range(4)] == [[late.name], ["p1.1"], ["p1.2"], ["p2.0"]]


def test_the_delay_of_a_batch_counts_from_its_oldest_of_any_level():
    """One of low priority that came first is not made to wait longer because others came behind it."""
    clocked = levelled(2, delay=100)
    clocked.push(*of(2), at=0)
    clocked.push(*of(1), at=60)

    assert clocked.take(at=60).wake_at == 100 * US
    assert clocked.batch(at=100) == ["p1.0", "p2.0"]


def test_the_nearest_deadline_is_that_of_any_level():
    """Whoever waits on a timer waits for the level whose time is over first."""
    clocked = levelled(2, default_queue_policy=QueuePolicy(default_timeout_microseconds=500), level_2=REJECTING)
    clocked.push(*of(1, 2))

    assert clocked.queue.next_deadline() == 50 * US


def test_a_queue_of_levels_tells_how_long_each_is():
    """Its `repr` is fit for a log line."""
    clocked = levelled(2, level_1=DELAYING)
    clocked.push(*of(1, 2, 2))
    clocked.queue.take_expired(60 * US)

    assert repr(clocked.queue) == "<BatchQueue m: 0+2 waiting, 1+0 delayed>"
    assert len(clocked.queue) == 3


# -- against the algorithm written out -------------------------------------------------------------------------------


def written_out(sizes, signatures, max_batch_size, preferred, delay, age):
    """How many of the queued go now, by the published algorithm, statement by statement."""
    best, pending, number, best_number, send_now = 0, 0, 0, 0, False
    for size, signature in zip(sizes, signatures, strict=True):
        if pending:
            if pending + size > max(preferred) and best == 0:
                best, best_number = pending, number
            if pending + size > max_batch_size or signature != signatures[0]:
                send_now = True
                break
        pending, number = pending + size, number + 1
        if pending in preferred:
            best, best_number = pending, number
    delay_exceeded = delay != 0 and age >= delay
    if best and not delay_exceeded:
        return best_number
    if send_now or pending >= max(preferred) or delay_exceeded or delay == 0:
        return number
    return 0


@given(
    queued=st.lists(st.tuples(st.integers(1, 8), st.sampled_from("aab")), min_size=1, max_size=12),
    preferred=st.sets(st.integers(1, 8), min_size=1, max_size=3),
    delay=st.sampled_from([0, 100]),
    age=st.sampled_from([0, 99, 100]),
)
def test_batches_are_those_of_the_published_algorithm(queued, preferred, delay, age):
    """Whatever is queued, as many requests go as the published algorithm says, which is Triton's."""
    clocked = Clocked(8, tuple(sorted(preferred)), delay=delay)
    clocked.push(*(Request("r", size, signature) for size, signature in queued))
    sizes, signatures = zip(*queued, strict=True)

    assert len(clocked.take(at=age).batch) == written_out(sizes, signatures, 8, preferred, delay, age)


@pytest.mark.parametrize(
    ("sizes", "whole"),
    [([], False), ([1], False), ([3, 4], False), ([8], True), ([3, 5], True), ([5, 4], True), ([1, "b"], True)],
    ids=str,
)
def test_a_batch_is_whole_when_nothing_could_join_it(sizes, whole):
    """It is as large as may be, or the next in line does not fit it."""
    clocked = Clocked(8)
    for size in sizes:
        clocked.push(Request("r", 1, "b") if size == "b" else Request("r", size))

    assert clocked.queue.is_full() is whole


@pytest.mark.parametrize("max_batch_size", [0, 1])
def test_a_request_that_is_executed_alone_is_whole(max_batch_size):
    """Nothing will join it."""
    clocked = Clocked(max_batch_size)
    assert not clocked.queue.is_full()
    clocked.push(1)
    assert clocked.queue.is_full()


@given(
    queued=st.lists(st.tuples(st.integers(1, 8), st.sampled_from("aab")), max_size=8),
    more=st.lists(st.tuples(st.integers(1, 8), st.sampled_from("aab")), max_size=3),
    preferred=st.sets(st.integers(1, 8), min_size=1, max_size=3),
    delay=st.sampled_from([0, 100]),
)
def test_a_whole_batch_is_the_same_early_and_late(queued, more, preferred, delay):
    """What comes behind it changes nothing about it, and it waits for nothing."""
    early, late = (Clocked(8, tuple(sorted(preferred)), delay=delay) for _ in range(2))
    for clocked in (early, late):
        for number, each in enumerate(queued):
            clocked.push(Request(str(number), *each))
    if not early.queue.is_full():
        return
    for each in more:
        late.push(Request("late", *each))
    names = [request.name for request in early.take(at=0).batch]

    assert names
    assert names == [request.name for request in late.take(at=0).batch]


# -- random lives ----------------------------------------------------------------------------------------------------

policies = st.builds(
    QueuePolicy,
    timeout_action=st.sampled_from(TimeoutAction),
    default_timeout_microseconds=st.sampled_from([0, 30, 200]),
    allow_timeout_override=st.booleans(),
    max_queue_size=st.sampled_from([0, 0, 6]),
)


class QueueLife(RuleBasedStateMachine):
    """Pushes, cancellations, takes and time in any order; everything that leaves is checked on its way out."""

    def __init__(self):
        super().__init__()
        self.now = 1
        self.inside = []  # in the order of arrival
        self.names = count()
        self.delayed = []  # whose time was found to be over

    @initialize(
        max_batch_size=st.integers(0, 8),
        fractions=st.sets(st.floats(0.01, 1), max_size=2),
        delay=st.sampled_from([0, 0, 50]),
        policy=policies,
        levels=st.sampled_from([0, 0, 1, 3]),
        own=st.dictionaries(st.integers(1, 3), policies, max_size=2),
        default=st.integers(1, 3),
        batches=st.sampled_from([True, True, True, False]),
    )
    def make(self, max_batch_size, fractions, delay, policy, levels, own, default, batches):
        """Begin with any settings."""
        largest = max(max_batch_size, 1)
        preferred = sorted({max(1, int(fraction * largest)) for fraction in fractions}) or [largest]
        self.largest = max_batch_size if batches and max_batch_size > 1 else 1
        self.delay = delay * US if self.largest > 1 else 0
        self.levels = levels if batches else 0
        self.default = min(default, levels)
        own = {level: policy for level, policy in own.items() if level <= levels}
        batching = DynamicBatching(tuple(preferred), delay, False, levels, self.default, policy, own)
        self.policies = batching.policies if batches else (QueuePolicy(),)
        self.queue = BatchQueue("m", max_batch_size, batching if batches else None)

    def level(self, request):
        """Which level it waits in, from 0."""
        if not self.levels:
            return 0
        return (request.priority if 1 <= request.priority <= self.levels else self.default) - 1

    def policy(self, request):
        """The limits of its level."""
        return self.policies[self.level(request)]

    def rejects(self, request):
        """Whether its level rejects who is out of time."""
        return self.policy(request).timeout_action is TimeoutAction.REJECT

    def late(self, request):
        """Whether its time in the queue is over."""
        return 0 < request.deadline_ns <= self.now

    @rule(
        size=st.integers(1, 8),
        signature=st.sampled_from("aab"),
        timeout=st.sampled_from([0, 10, 500]),
        priority=st.integers(0, 4),
    )
    def push(self, size, signature, timeout, priority):
        """A request comes, and is refused only by a full queue."""
        request = Request(f"r{next(self.names)}", min(size, self.largest), signature, timeout, priority)
        self.now += 1  # no two come in the same nanosecond
        request.arrival_ns = self.now
        limit = self.policy(request).max_queue_size
        peers = [other for other in self.inside if self.level(other) == self.level(request)]
        if limit and len(peers) >= limit:
            with pytest.raises(MmeError):
                self.queue.push(request)
        else:
            self.queue.push(request)
            self.inside.append(request)

    @precondition(lambda self: self.inside)
    @rule(data=st.data())
    def cancel(self, data):
        """A client leaves."""
        data.draw(st.sampled_from(self.inside)).cancelled = True

    @rule(us=st.integers(1, 120))
    def wait(self, us):
        """Time goes by."""
        self.now += us * US

    @rule()
    def expire(self):
        """No instance is free."""
        self.note_late()
        self.leave(self.queue.take_expired(self.now), instance=False)

    @rule()
    def take(self):
        """An instance is free."""
        self.note_late()
        take = self.queue.take(self.now)
        self.check_batch(take.batch)
        self.leave(take, instance=True)
        if not take.batch:
            self.check_wait(take)

    def check_batch(self, batch):
        """What may be executed together, and in which order."""
        assert sum(request.batch_size for request in batch) <= self.largest
        assert len({request.signature for request in batch}) <= 1
        assert not any(request.cancelled for request in batch)
        assert not any(self.late(request) and self.rejects(request) for request in batch)
        # PriorityLevel by level, those with time left first, each group in its order, and none that fits was overtaken.
        assert batch == self.in_line()[: len(batch)]

    def note_late(self):
        """The queue is about to look at the time."""
        late = [r for r in self.inside if self.late(r) and not self.rejects(r) and r not in self.delayed]
        self.delayed += late

    def in_line(self):
        """Who may be executed, in the order in which they are to be."""
        candidates = [r for r in self.inside if not r.cancelled and not (self.late(r) and self.rejects(r))]
        return sorted(candidates, key=lambda r: (self.level(r), r in self.delayed))  # inside, they are as they came

    def check_wait(self, take):
        """No batch: there must be a reason, and a time to ask again that lies ahead."""
        if not self.inside:
            assert take.wake_at == 0
            return
        assert self.delay
        assert take.wake_at > self.now
        oldest = min(request.arrival_ns for request in self.inside)
        assert take.wake_at <= max(oldest, self.now) + self.delay
        deadlines = [r.deadline_ns for r in self.inside if r.deadline_ns and not self.late(r)]
        assert take.wake_at <= min(deadlines, default=take.wake_at)

    def leave(self, take, *, instance):
        """Everybody leaves once, for a reason that holds."""
        assert instance or not (take.batch or take.cancelled)
        assert all(request.cancelled for request in take.cancelled)
        assert all(self.late(request) for request in take.expired)
        assert all(self.rejects(request) for request in take.expired)
        for request in [*take.batch, *take.cancelled, *take.expired]:
            self.inside.remove(request)  # a ValueError for one that left before
        assert not any(self.late(request) and self.rejects(request) for request in self.inside)

    @invariant()
    def nobody_is_lost(self):
        """The queue holds those who came and did not leave."""
        if hasattr(self, "queue"):
            assert len(self.queue) == len(self.inside)
            waiting = [r.deadline_ns for r in self.inside if r.deadline_ns and not self.late(r)]
            nearest = self.queue.next_deadline()
            assert 0 < nearest <= min(waiting) if waiting else nearest <= self.now

    def teardown(self):
        """No request starves: with an instance that is always free, asking when told to empties the queue."""
        if not hasattr(self, "queue"):
            return
        for _ in range(3 * len(self.inside) + 3):
            self.note_late()
            take = self.queue.take(self.now)
            self.check_batch(take.batch)
            self.leave(take, instance=True)
            if not take.batch:
                self.check_wait(take)
                if not self.inside:
                    break
                self.now = take.wake_at
        assert self.inside == []
        assert self.queue.clear() == []


TestQueueLife = QueueLife.TestCase
TestQueueLife.settings = settings(deadline=None, max_examples=150, stateful_step_count=25)
