"""The sequence batcher's queue: which requests run together, on which instance and row, and when a sequence is over."""

from collections import Counter, defaultdict

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from model_handlers.config.model_config import DirectStrategy, OldestStrategy, SequenceBatching
from model_handlers.errors import Kind, MmeError
from model_handlers.requests import FLAG_SEQUENCE_END as END
from model_handlers.requests import FLAG_SEQUENCE_KEPT as KEPT
from model_handlers.requests import FLAG_SEQUENCE_START as START
from serve.model.sequence_batcher import SequenceQueue

US = 1000
IDLE_US = 1000


class Request:
    """A request that remembers what became of it."""

    def __init__(self, number, correlation_id, flags=0, *, shape=None, timeout_us=0, batch_size=1):
        self.number = number
        self.correlation_id = correlation_id
        self.flags = flags
        self.signature = shape
        self.timeout_us = timeout_us
        self.batch_size = batch_size
        self.priority = 0
        self.arrival_ns = 0
        self.deadline_ns = 0
        self.cancelled = False

    def __repr__(self):
        return f"{self.correlation_id}.{self.number}"


class Bench:
    """A queue, and instances that do as the test says."""

    def __init__(self, strategy=None, *, instances=1, rows=4, **settings):
        batching = SequenceBatching(strategy or DirectStrategy(), settings.pop("idle_us", IDLE_US), **settings)
        self.queue = SequenceQueue("m", batching, rows, instances)
        self.instances = list(range(instances))
        self.now = 1
        self.numbers = Counter()

    def push(self, correlation_id, flags=0, **fields):
        """A request that has just come."""
        request = Request(self.numbers[correlation_id], correlation_id, flags, **fields)
        self.numbers[correlation_id] += 1
        request.arrival_ns = self.now
        self.queue.push(request)
        return request

    def take(self, *instances):
        """What the queue gives to one of these instances, or of all."""
        return self.queue.take(self.now, instances or self.instances)

    def rows(self, *instances):
        """The next batch as text, row by row, with - for a row that is nobody's."""
        batch = self.take(*instances).batch
        if not batch:
            return ""
        names = dict(zip(batch.rows, map(str, batch), strict=True))
        return " ".join(names.get(row, "-") for row in range(batch.height))

    def done(self, instance=0, *, after_us=0):
        """An instance has executed what it was given."""
        self.now += after_us * US
        self.queue.release(instance, self.now)

    def refused(self, *args, **fields):
        """Why a request is not accepted."""
        with pytest.raises(MmeError) as caught:
            self.push(*args, **fields)
        assert caught.value.kind is Kind.INVALID_ARGUMENT
        return caught.value.message


# -- who may come in ---------------------------------------------------------------------------------------------------


def test_a_sequence_begins_with_start():
    """A request of an unknown sequence without START is refused with Triton's sentence."""
    assert Bench().refused(7) == (
        "inference request for sequence 7 to model 'm' must specify the START flag on the first request of the sequence"
    )


@pytest.mark.parametrize("nobody", [0, ""])
def test_a_request_names_its_sequence(nobody):
    """Without an id there is no sequence."""
    assert Bench().refused(nobody, START) == (
        "inference request to model 'm' must specify a non-zero or non-empty correlation ID"
    )


def test_a_request_is_one_step():
    """A batch of several elements can't be a step of one sequence."""
    assert Bench().refused(7, START, batch_size=2) == (
        "inference request to model 'm' must specify batch-size 1 due to requirements of sequence batcher"
    )


def test_nothing_comes_after_the_end():
    """Once END was sent the id is free, whether or not it was executed."""
    bench = Bench()
    bench.push(7, START)
    bench.push(7, END)

    assert "must specify the START flag" in bench.refused(7)


def test_an_id_that_is_free_begins_another_sequence_of_that_name():
    """What comes after the END is another sequence, which does not wait for the slot of the first."""
    bench = Bench()
    bench.push(7, START | END)
    bench.push(7, START)

    assert bench.rows() == "7.0 7.1"


def test_text_and_numbers_are_different_names():
    """7 and "7" are two sequences."""
    bench = Bench()
    bench.push(7, START)

    assert "must specify the START flag" in bench.refused("7")


# -- the direct strategy -----------------------------------------------------------------------------------------------


def test_a_sequence_keeps_its_row():
    """Rows in between are nobody's, and the batch ends with the last one that has something."""
    bench = Bench()
    for name in "abcd":
        bench.push(name, START)
    assert bench.rows() == "a.0 b.0 c.0 d.0"
    bench.done()
    bench.push("c")
    bench.push("a")

    assert bench.rows() == "a.1 - c.1"


def test_one_step_at_a_time():
    """Requests of one sequence go one by one, in the order in which they came."""
    bench = Bench()
    bench.push("a", START)
    bench.push("a")
    bench.push("a", END)

    assert [(bench.rows(), bench.done())[0] for _ in range(4)] == ["a.0", "a.1", "a.2", ""]


def test_the_lowest_slots_of_all_lanes_are_taken_first():
    """Sequences spread over the instances before they share one."""
    bench = Bench(instances=2, rows=2)
    for name in "abc":
        bench.push(name, START)

    assert (bench.rows(0), bench.rows(1)) == ("a.0 c.0", "b.0")


def test_a_lane_executes_one_batch_at_a_time():
    """A sequence whose instance is busy waits for it, whoever else is free."""
    bench = Bench(instances=2, rows=1)
    bench.push("a", START)
    assert bench.rows(0) == "a.0"
    bench.push("a")

    assert bench.rows(1) == ""
    bench.done(0)
    assert bench.rows(0) == "a.1"


def test_the_next_sequence_of_the_backlog_takes_a_slot_that_is_free():
    """Whole sequences wait, first come, first served, with everything they have sent."""
    bench = Bench(rows=1)
    bench.push("a", START | END)
    bench.push("b", START)
    bench.push("c", START | END)
    bench.push("b", END)

    assert [(bench.rows(), bench.done())[0] for _ in range(5)] == ["a.0", "b.0", "b.1", "c.0", ""]


def test_shapes_that_differ_do_not_share_a_batch():
    """Who does not fit the one who has waited longest waits on, and his row is nobody's meanwhile."""
    bench = Bench()
    bench.push("a", START, shape="wide")
    bench.now += 1
    bench.push("b", START, shape="tall")
    bench.push("c", START, shape="wide")

    assert bench.rows() == "a.0 - c.0"
    bench.done()
    bench.push("a", shape="wide")
    bench.now += 1
    assert bench.rows() == "- b.0"


def test_a_batch_waits_for_enough_rows_or_for_its_time():
    """`minimum_slot_utilization` is worth waiting for, `max_queue_delay_microseconds` long."""
    bench = Bench(DirectStrategy(max_queue_delay_microseconds=100, minimum_slot_utilization=0.75))
    bench.push("a", START)
    bench.push("b", START)
    take = bench.take()
    assert (list(take.batch), take.wake_at) == ([], bench.now + 100 * US)
    bench.push("c", START)
    assert bench.rows() == "a.0 b.0 c.0"
    bench.done()
    bench.push("a")
    bench.now += 100 * US
    assert bench.rows() == "a.1"


def test_a_slot_that_is_free_again_is_taken_before_a_higher_one():
    """The lowest of all that are free, whichever was given back first."""
    bench = Bench()
    for name in "abc":
        bench.push(name, START | (END if name != "b" else 0))
    assert bench.rows() == "a.0 b.0 c.0"
    bench.done()
    for name in "def":
        bench.push(name, START)

    assert bench.rows() == "d.0 - e.0 f.0"


# -- the oldest strategy -----------------------------------------------------------------------------------------------


def test_the_oldest_strategy_batches_what_there_is():
    """Rows are nobody's own: a batch holds one request each of the sequences that have one."""
    bench = Bench(OldestStrategy(8, (4,)))
    for name in "abcdef":
        bench.push(name, START)

    assert bench.rows() == "a.0 b.0 c.0 d.0"
    bench.done()
    bench.push("d")
    assert bench.rows() == "e.0 f.0 d.1"


def test_candidates_are_as_many_as_the_configuration_says():
    """Others wait in the backlog until a candidate is over."""
    bench = Bench(OldestStrategy(2, (4,)))
    for name in "abc":
        bench.push(name, START)
    bench.push("a", END)

    assert [(bench.rows(), bench.done())[0] for _ in range(3)] == ["a.0 b.0", "a.1", "c.0"]


@pytest.mark.parametrize(("rows", "batches"), [(2, ["a.0 b.0", "a.1", "c.0"]), (0, ["a.0", "a.1", "b.0"])])
def test_candidates_are_as_many_as_fit_into_a_batch_where_nothing_is_said(rows, batches):
    """As in Triton: one of a model that does not batch."""
    bench = Bench(OldestStrategy(), rows=rows)
    for name in "abc":
        bench.push(name, START)
    bench.push("a", END)

    assert [(bench.rows(), bench.done())[0] for _ in batches] == batches


def test_the_oldest_strategy_waits_for_a_preferred_size():
    """As the dynamic batcher does, from the moment on in which a request could execute."""
    bench = Bench(OldestStrategy(8, (2,), max_queue_delay_microseconds=100))
    bench.push("a", START)
    bench.push("a")
    assert bench.take().wake_at == bench.now + 100 * US
    bench.now += 100 * US
    assert bench.rows() == "a.0"
    bench.done(after_us=50)
    assert bench.take().wake_at == bench.now + 100 * US
    bench.push("b", START)
    assert bench.rows() == "a.1 b.0"


def test_what_its_model_keeps_must_fit_a_batch_too():
    """Steps whose memory has other shapes go separately; a START has the shape that all begin with."""
    bench = Bench(OldestStrategy(8, (4,)))
    for name in "abc":
        bench.push(name, START)
    batch = bench.take().batch
    batch.sequences[0].state_shapes = "grown"
    bench.done()
    bench.push("a")
    bench.push("b")
    bench.push("c")
    assert bench.rows() == "a.1"
    bench.done()
    assert bench.rows() == "b.1 c.1"
    bench.done()
    bench.push("b")
    bench.push("a", START)
    assert bench.rows() == "b.2 a.2"


# -- beginnings and ends -----------------------------------------------------------------------------------------------


def test_a_sequence_may_begin_anew(caplog):
    """What it had sent is executed first, in its slot; people are told."""
    bench = Bench(rows=1)
    bench.push("a", START)
    bench.push("a")
    bench.push("a", START)
    bench.push("a", END)

    assert [(bench.rows(), bench.done())[0] for _ in range(4)] == ["a.0", "a.1", "a.2", "a.3"]
    assert "sequence a for model 'm' has a conflict" in caplog.text


def test_an_idle_sequence_ends():
    """After its time its slot is free, and what comes then needs a START."""
    bench = Bench(rows=1)
    bench.push("a", START)
    bench.push("b", START)
    assert bench.rows() == "a.0"
    bench.done(after_us=700)
    assert bench.queue.next_deadline() == bench.now + IDLE_US * US
    bench.now += IDLE_US * US - 1
    assert bench.queue.take_expired(bench.now).expired == []
    assert bench.rows() == ""
    bench.now += 1
    bench.queue.take_expired(bench.now)
    assert bench.rows() == "b.0"
    assert "must specify the START flag" in bench.refused("a")


def test_who_waits_for_the_server_is_not_idle():
    """A long execution, or a long queue, is no reason to end a sequence."""
    bench = Bench(rows=1)
    bench.push("a", START)
    assert bench.rows() == "a.0"
    bench.now += 5 * IDLE_US * US
    bench.queue.take_expired(bench.now)
    bench.done()
    bench.push("a")
    bench.now += 5 * IDLE_US * US
    bench.queue.take_expired(bench.now)

    assert bench.rows() == "a.1"


def test_who_may_not_end_is_not_looked_at_all_the_time():
    """However short the time is that a sequence may be idle."""
    bench = Bench(idle_us=1)
    bench.push("a", START)
    assert bench.rows() == "a.0"
    bench.now += 10 * US
    bench.queue.take_expired(bench.now)
    assert bench.queue.next_deadline() == bench.now + 50_000 * US
    bench.done()
    assert bench.queue.next_deadline() == bench.now + US


def test_the_backlog_has_the_patience_of_its_requests():
    """The shortest timeout of its requests ends a waiting sequence; one that has a slot has all the time."""
    bench = Bench(rows=1)
    bench.push("a", START, timeout_us=1)
    first = bench.push("b", START, timeout_us=500)
    second = bench.push("b", timeout_us=200)
    assert bench.queue.next_deadline() == bench.now + 200 * US
    bench.now += 200 * US

    assert bench.queue.take_expired(bench.now).expired == [first, second]
    assert "must specify the START flag" in bench.refused("b")
    assert bench.rows() == "a.0"
    assert len(bench.queue) == 0


def test_a_cancelled_request_takes_the_rest_along():
    """Nobody is interested in the rest of a sequence that has a hole; its slot is free."""
    bench = Bench(rows=1)
    one, two, three = bench.push("a", START), bench.push("a"), bench.push("a")
    bench.push("b", START)
    one.cancelled = True

    take = bench.take()
    assert take.cancelled == [one, two, three]
    assert [str(request) for request in take.batch] == ["b.0"]
    assert "must specify the START flag" in bench.refused("a")


def test_a_client_that_leaves_during_its_step_takes_the_rest_along():
    """What executes is executed; what waits behind it is not."""
    bench = Bench(rows=1)
    one, two = bench.push("a", START), bench.push("a")
    bench.push("b", START)
    assert bench.rows() == "a.0"
    one.cancelled = True
    bench.done()

    take = bench.take()
    assert take.cancelled == [two]
    assert [str(request) for request in take.batch] == ["b.0"]


def test_a_client_that_leaves_the_backlog_is_not_waited_for():
    """Its sequence is dropped at once, the END that was sent included; others keep their turns."""
    bench = Bench(rows=1)
    bench.push("a", START)
    one, two = bench.push("b", START, timeout_us=50), bench.push("b", END)
    bench.push("c", START)
    two.cancelled = True
    bench.queue.cancel(two)
    assert bench.queue.take_expired(bench.now).cancelled == [one, two]
    assert len(bench.queue) == 2
    bench.queue.cancel(two)  # who is gone is gone
    bench.push("a", END)
    assert [(bench.rows(), bench.done())[0] for _ in range(3)] == ["a.0", "a.1", "c.0"]


def test_everybody_is_sent_away():
    """When the model goes, whoever waits is told; what executes is left alone and ends quietly."""
    bench = Bench(rows=1)
    bench.push("a", START)
    assert bench.rows() == "a.0"
    waiting = [bench.push("a"), bench.push("b", START), bench.push("b")]

    assert bench.queue.clear() == waiting
    assert len(bench.queue) == 0
    bench.done()
    assert bench.rows() == ""
    assert bench.queue.next_deadline() == 0


def test_a_sequence_that_is_kept_is_never_idle():
    """Somebody else sees to its end: then its slot is the next one's at once, or when it has executed."""
    bench = Bench(rows=1)
    bench.push("a", START | KEPT)
    bench.push("b", START | KEPT)
    assert bench.rows() == "a.0"
    bench.done()
    bench.now += 5 * IDLE_US * US
    bench.queue.take_expired(bench.now)
    assert bench.rows() == ""
    bench.queue.end("a", bench.now)
    assert "must specify the START flag" in bench.refused("a")
    assert bench.rows() == "b.0"
    bench.push("b")
    bench.queue.end("b", bench.now)
    bench.queue.end("nobody", bench.now)
    bench.done()
    assert bench.rows() == "b.1"
    bench.done()
    assert bench.queue.next_deadline() == 0


# -- iterations --------------------------------------------------------------------------------------------------------


def test_a_request_that_its_model_puts_back_is_the_next_of_its_sequence():
    """Without START, before what came later."""
    bench = Bench(iterative_sequence=True)
    one = bench.push("a", START)
    bench.push("a", END)
    batch = bench.take().batch
    batch.again.add(0)
    bench.done()
    assert one.flags == 0
    assert bench.rows() == "a.0"
    bench.done()
    assert bench.rows() == "a.1"


def test_a_request_without_an_id_is_a_sequence_of_its_own():
    """It gets an id and START, and its slot is free when its model has done with it."""
    bench = Bench(iterative_sequence=True, rows=1)
    one, two = bench.push(0), bench.push("")
    assert one.correlation_id != two.correlation_id
    assert one.flags == START
    batch = bench.take().batch
    assert list(batch) == [one]
    batch.again.add(0)
    bench.done()
    assert list(bench.take().batch) == [one]
    bench.done()
    assert list(bench.take().batch) == [two]


def test_a_sequence_of_iterations_ends_with_its_last_request():
    """Without END: its slot is the next one's, and what comes later begins anew."""
    bench = Bench(iterative_sequence=True, rows=1)
    bench.push("a", START)
    bench.push("a")
    bench.push("b", START)
    assert bench.rows() == "a.0"
    bench.done()
    assert bench.rows() == "a.1"
    bench.done()
    assert bench.rows() == "b.0"
    assert "must specify the START flag" in bench.refused("a")


def test_a_sequence_of_iterations_that_is_kept_goes_on():
    """Somebody else sees to its end."""
    bench = Bench(iterative_sequence=True, rows=1)
    bench.push("a", START | KEPT)
    assert bench.rows() == "a.0"
    bench.done()
    bench.push("a")
    assert bench.rows() == "a.1"


# -- any history -------------------------------------------------------------------------------------------------------

STRATEGIES = st.sampled_from(
    [
        DirectStrategy(),
        DirectStrategy(max_queue_delay_microseconds=50, minimum_slot_utilization=0.5),
        OldestStrategy(1, (1,)),
        OldestStrategy(3, (2,), max_queue_delay_microseconds=50),
        OldestStrategy(100, (4,)),
    ]
)
ACTIONS = st.lists(
    st.one_of(
        st.tuples(
            st.just("push"),
            st.integers(1, 6),
            st.sampled_from([0, START, START, END, START | END, START | KEPT]),
            st.sampled_from(["s", "t"]),
            st.sampled_from([0, 0, 40]),
        ),
        st.tuples(st.just("take"), st.integers(0, 2)),
        st.tuples(st.just("done"), st.integers(0, 2), st.booleans()),
        st.tuples(st.just("cancel"), st.integers(0, 30)),
        st.tuples(st.just("end"), st.integers(1, 6)),
        st.tuples(st.just("wait"), st.sampled_from([1, 20, 60, 2 * IDLE_US])),
    ),
    max_size=60,
)


class Life:
    """A queue, and everything that must hold of it whatever happens."""

    def __init__(self, strategy, instances, rows, *, iterative=True):
        self.bench = Bench(strategy, instances=instances, rows=rows, iterative_sequence=iterative)
        self.iterative = iterative
        self.strategy = strategy
        self.size = rows
        self.accepted = []
        self.ended = Counter()
        self.executing = {}
        self.places = {}  # sequence → (instance, row) of the direct strategy
        self.steps = defaultdict(list)  # sequence → its requests as they were executed

    def push(self, correlation_id, flags, shape, timeout_us):
        """One comes, maybe in vain."""
        try:
            self.accepted.append(self.bench.push(correlation_id, flags, shape=shape, timeout_us=timeout_us))
        except MmeError:
            return

    def drop(self, take):
        """Who has left ends so."""
        for request in (*take.expired, *take.cancelled):
            self.ended[request] += 1

    def take(self, instance):
        """An instance asks; whether anything happened."""
        if instance >= len(self.bench.instances) or instance in self.executing:
            return False
        take = self.bench.take(instance)
        self.drop(take)
        if not take.batch:
            return bool(take.cancelled)
        self.check_batch(instance, take.batch)
        self.executing[instance] = take.batch
        return True

    def check_batch(self, instance, batch):
        """What must hold of every batch."""
        assert len(batch) <= self.size
        assert batch.height <= self.size
        assert batch.rows == sorted(set(batch.rows))
        assert len({request.signature for request in batch}) == 1
        busy = {sequence for other in self.executing.values() for sequence in other.sequences}
        assert not busy & set(batch.sequences)
        for sequence, request, row in zip(batch.sequences, batch, batch.rows, strict=True):
            assert not request.cancelled
            steps = self.steps[sequence]
            assert not steps or steps[-1].number <= request.number
            steps.append(request)
            assert self.places.setdefault(sequence, sequence.instance) == instance
            if isinstance(self.strategy, DirectStrategy):
                assert sequence.slot == row
        if isinstance(self.strategy, OldestStrategy):
            assert batch.rows == list(range(len(batch)))

    def done(self, instance, again):
        """An instance is back, maybe with a request put back."""
        batch = self.executing.pop(instance, None)
        if batch is None:
            return
        if again and self.iterative:
            batch.again.add(0)
        for place, request in enumerate(batch):
            if place not in batch.again:
                self.ended[request] += 1
        self.bench.done(instance)

    def cancel(self, index):
        """A client leaves."""
        if index < len(self.accepted):
            self.accepted[index].cancelled = True
            self.bench.queue.cancel(self.accepted[index])

    def end(self, correlation_id):
        """Nothing more comes of a sequence."""
        self.bench.queue.end(correlation_id, self.bench.now)

    def wait(self, microseconds):
        """Time passes."""
        self.bench.now += microseconds * US
        self.drop(self.bench.queue.take_expired(self.bench.now))

    def run_dry(self):
        """Who keeps sequences lets go of them; instances execute what there is; time passes; nobody may be left."""
        for name in range(1, 7):
            self.end(name)
        for _ in range(1000):
            moved = False
            for instance in self.bench.instances:
                self.done(instance, again=False)
                moved = self.take(instance) or moved
            if not moved and not len(self.bench.queue):
                break
            self.wait(60)
        assert len(self.bench.queue) == 0
        assert Counter(self.accepted) == self.ended


@given(STRATEGIES, st.integers(1, 3), st.sampled_from([1, 3, 4]), st.booleans(), ACTIONS)
def test_every_request_ends_once_in_order_and_in_its_place(strategy, instances, rows, iterative, actions):
    """Whatever comes, leaves, runs out of time or is put back: one step at a time, on one instance and row, and an end."""
    life = Life(strategy, instances, rows, iterative=iterative)
    for name, *arguments in actions:
        getattr(life, name)(*arguments)
    life.run_dry()
    life.wait(2 * IDLE_US)
    life.wait(2 * IDLE_US)
    assert life.bench.queue.next_deadline() == 0
    for name in range(1, 4):  # every slot is free again
        life.push(name, START | END, "s", 0)
    life.run_dry()


@given(ACTIONS)
@settings(deadline=None, max_examples=100, suppress_health_check=[HealthCheck.too_slow])
def test_a_queue_can_be_cleared_at_any_time(actions):
    """Everybody who waits is named once, and what executes comes back without harm."""
    life = Life(DirectStrategy(), 2, 2)
    for name, *arguments in actions:
        getattr(life, name)(*arguments)
    for request in life.bench.queue.clear():
        life.ended[request] += 1
    for instance in (0, 1):
        life.done(instance, again=False)
    assert Counter(life.accepted) == life.ended
    assert len(life.bench.queue) == 0
