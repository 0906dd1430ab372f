"""One thread hears every channel, or an event loop; whoever posts never waits; each end is told once."""

import asyncio
import contextlib
import os
import socket
import threading

import numpy as np
import pytest
import uvloop

from model_handlers.worker import channel as channels
from model_handlers.worker.channel import LISTENER, Channel, DeafError
from model_handlers.worker.memory import INLINE, Frame, FrameReader
from model_handlers.worker.wire import Packing, ProtocolError, encode_message
from tests.waiting import PATIENCE, eventually

pytestmark = pytest.mark.usefixtures("nothing_held")


@pytest.fixture(autouse=True, params=["thread", "loop"])
def loop(request):
    """None; and once more with a loop that lends itself."""
    if request.param == "thread":
        yield None
        return
    loop = uvloop.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="loop")
    thread.start()
    LISTENER.lend(loop)
    yield loop
    loop.call_soon_threadsafe(LISTENER.take_back, loop)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


class Owner:
    """A channel, what came on it, and the other side."""

    def __init__(self, take=None):
        ours, self.theirs = socket.socketpair()
        self.came, self.ends = [], []
        self.lost = threading.Event()
        self._take = take
        self.channel = Channel(ours, self._taken, self._lost)
        self.channel.start()

    def _taken(self, message, _):
        if self._take is not None:
            self._take(message)
        self.came.append(message["n"])

    def _lost(self, error):
        self.ends.append(error)
        self.lost.set()

    def say(self, *numbers):
        """From the other side."""
        self.theirs.sendall(b"".join(bytes(encode_message({"n": number})) for number in numbers))

    def close(self):
        """Both sides."""
        self.channel.close()
        self.theirs.close()


@pytest.fixture
def owners(loop):
    """Makes them, once the loop reads if there is one, and closes them in the end."""
    made = []

    def make(take=None):
        made.append(Owner(take))
        eventually(lambda: loop is None or loop in LISTENER._loops)
        return made[-1]

    yield make
    for owner in made:
        owner.close()


def heard(end, count):
    """The numbers of the next frames that come out of the other side."""
    reader, found = FrameReader(), []
    while len(found) < count:
        while (frame := reader.next()) is not None:
            found.append(frame[0]["n"])
        if len(found) < count:
            assert reader.receive(end)
    return found


def large(number, size=INLINE + 1):
    """A frame with memory of its own."""
    packing = Packing()
    packing.add(np.zeros(size, np.uint8), "it")
    return Frame({"n": number}, packing)


def test_many_channels(owners):
    """Two hundred, all talking: each one's frames come in order, and none to another."""
    everybody = [owners() for _ in range(200)]
    for round_ in range(10):
        for number, owner in enumerate(everybody):
            owner.say(*(1000 * number + 10 * round_ + i for i in range(10)))
    for number, owner in enumerate(everybody):
        eventually(lambda owner=owner: len(owner.came) == 100)
        assert owner.came == list(range(1000 * number, 1000 * number + 100))


def test_posts_of_many_threads_are_whole(owners):
    """Frames are never mixed, and those of one thread keep their order."""
    owner = owners()

    def post(number):
        for i in range(200):
            frame = large(1000 * number + i) if i % 50 == 0 else Frame({"n": 1000 * number + i, "text": "x" * i * 20})
            owner.channel.post(frame)

    threads = [threading.Thread(target=post, args=(number,)) for number in range(5)]
    for thread in threads:
        thread.start()
    found = heard(owner.theirs, 1000)
    for thread in threads:
        thread.join()

    for number in range(5):
        assert [n for n in found if n // 1000 == number] == [1000 * number + i for i in range(200)]


def test_who_posts_never_waits(owners):
    """What the other side does not read is kept, and arrives when it does; others are heard meanwhile."""
    deaf, other = owners(), owners()
    for number in range(300):
        deaf.channel.post(large(number) if number % 100 == 0 else Frame({"n": number, "text": "x" * 10_000}))
    other.say(1)
    eventually(lambda: other.came == [1])
    assert deaf.channel.unsent

    assert heard(deaf.theirs, 300) == list(range(300))
    eventually(lambda: not deaf.channel.unsent)
    deaf.channel.post(Frame({"n": 300}))
    assert heard(deaf.theirs, 1) == [300]


def test_who_reads_nothing_at_all_is_lost(owners, monkeypatch):
    """What may wait has a bound; whoever is beyond it is told of once, and its frames are given back."""
    monkeypatch.setattr(channels, "_MAX_UNSENT", 1 << 20)
    owner = owners()
    for number in range(400):
        owner.channel.post(Frame({"n": number, "text": "x" * 10_000}))

    assert [type(error) for error in owner.ends] == [DeafError]
    assert "does not read what it is told" in str(owner.ends[0])
    assert not owner.channel.unsent


@pytest.mark.parametrize("what", ["nothing", "frames", "unread frames"])
def test_the_other_side_goes(owners, what):
    """All that it said is taken first; the end is told once; what is posted then is lost without a word."""
    owner = owners()
    if what == "unread frames":  # then the end of the stream comes as a reset
        owner.channel.post(Frame({"n": 0}))
    if what != "nothing":
        owner.say(*range(1000))
    owner.theirs.close()
    assert owner.lost.wait(PATIENCE)
    owner.channel.post(large(1))

    assert owner.ends == [None]
    assert owner.came == ([] if what == "nothing" else list(range(1000)))


def test_close_in_the_middle(owners):
    """Nothing is told, unsent frames give their descriptors back, and nothing comes any more."""
    owner = owners()
    for number in range(300):
        owner.channel.post(large(number))
    assert owner.channel.unsent
    assert owner.channel.close()
    assert not owner.channel.close()
    owner.channel.post(large(0))
    owner.channel.drain()

    assert owner.ends == []
    assert not owner.channel.unsent


def test_close_by_who_takes(owners):
    """A channel may be closed from within, by what came on it."""
    closing = owners(lambda _: closing.channel.close())
    closing.say(1)
    eventually(lambda: closing.channel.closed)
    other = owners()
    other.say(2)
    eventually(lambda: other.came == [2])

    assert closing.ends == []


@pytest.mark.parametrize("held", [False, True])
def test_drain_takes_what_came(owners, held):
    """To the end, or as far as it came where somebody else still holds the other side; then the channel is closed."""
    gate = threading.Event()
    owner = owners(lambda _: gate.wait(PATIENCE))
    owner.say(*range(5000))
    keeps = owner.theirs.dup() if held else None
    owner.theirs.close()
    threading.Timer(0.05, gate.set).start()
    owner.channel.drain()

    assert owner.came == list(range(5000))
    assert owner.channel.closed
    assert owner.ends == ([] if held else [None])
    if keeps is not None:
        keeps.close()


def test_what_cannot_be_taken_ends_the_channel_alone(owners):
    """Whatever is raised, by a frame or by whoever takes it, is told; other channels go on."""

    def refuse(message):
        raise ZeroDivisionError(message["n"])

    refusing, garbled, other = owners(refuse), owners(), owners()
    refusing.say(1, 2)
    garbled.theirs.sendall(b"\xff\xff\xff\xff")
    assert refusing.lost.wait(PATIENCE)
    assert garbled.lost.wait(PATIENCE)
    other.say(3)
    eventually(lambda: other.came == [3])

    assert [type(error) for error in refusing.ends + garbled.ends] == [ZeroDivisionError, ProtocolError]
    assert refusing.came == []


def test_an_owner_that_fails_at_the_end_is_logged(owners, caplog):
    """And the thread goes on."""
    owner, other = owners(), owners()
    owner.channel._lost = lambda _: 1 / 0
    owner.theirs.close()
    eventually(lambda: any("could not be served" in record.message for record in caplog.records))
    other.say(1)
    eventually(lambda: other.came == [1])


def test_channels_come_and_go(owners):
    """Numbers of descriptors are used again at once: nobody hears what was meant for another."""
    for number in range(300):
        owner = Owner()
        owner.say(number)
        if number % 3 == 0:
            owner.close()
            continue
        eventually(lambda owner=owner: owner.came)
        owner.close()
        assert owner.came == [number]
    assert not LISTENER._channels


def test_a_channel_that_cannot_be_heard_is_closed():
    """The system's refusal is the caller's, and nothing is held."""
    ours, theirs = socket.socketpair()
    channel = Channel(ours, print, print)
    with theirs, open(os.devnull, "rb") as null:  # noqa: PTH123 - epoll refuses it
        os.dup2(null.fileno(), ours.fileno())
        with pytest.raises(PermissionError):
            channel.start()

    assert channel.closed


def test_a_loop_reads_what_is_small(owners, loop):
    """A thread reads what is large, and nothing that came behind it is taken before."""
    places = []
    owner = owners(lambda _: places.append(threading.current_thread().name))
    for number in range(300):
        if number % 100 == 50:
            frame = large(number)
            with contextlib.closing(frame):
                socket.send_fds(owner.theirs, [frame.data], [frame.fd])
        else:
            owner.say(number)
    owner.theirs.sendall(encode_message({"n": 300, "text": "x" * INLINE}))
    owner.say(301)
    eventually(lambda: len(owner.came) == 302)
    owner.say(302)
    eventually(lambda: len(owner.came) == 303)

    assert owner.came == list(range(303))
    if loop is not None:
        assert {places[number] for number in (50, 150, 250, 300)} == {"model events"}
        assert {places[number] for number in (0, 49, 302)} == {"loop"}


def test_who_talks_faster_than_a_loop_hears_waits(owners, loop):
    """Nothing is read that the loop has not done with what came before it: not by anybody else, and not ahead."""
    if loop is None:
        pytest.skip("a thread reads on")
    owner, busy, gate = owners(), threading.Event(), threading.Event()
    loop.call_soon_threadsafe(lambda: (busy.set(), gate.wait(PATIENCE)))
    assert busy.wait(PATIENCE)
    owner.theirs.setblocking(False)
    said = 0
    with contextlib.suppress(BlockingIOError):  # its buffer is full
        while True:
            owner.theirs.send(encode_message({"n": said}))
            said += 1
    assert owner.came == []
    gate.set()
    eventually(lambda: len(owner.came) == said)


def test_loops_come_and_go(owners, loop):
    """One that ends leaves its channels to who is left, and none is needed."""
    places = []
    owner = owners(lambda _: places.append(threading.current_thread().name))
    other = asyncio.new_event_loop()
    for number in range(10):
        LISTENER.lend(other)
        thread = threading.Thread(target=other.run_forever, name="other")
        thread.start()
        owner.say(2 * number)
        eventually(lambda number=number: len(owner.came) == 2 * number + 1)
        other.call_soon_threadsafe(LISTENER.take_back, other)
        other.call_soon_threadsafe(other.stop)
        thread.join()
        owner.say(2 * number + 1)
        eventually(lambda number=number: len(owner.came) == 2 * number + 2)
    other.close()

    assert owner.came == list(range(20))
    assert set(places[1::2]) == {"model events" if loop is None else "loop"}


def test_who_is_handed_more_than_is_let_go_of_waits(owners, loop, monkeypatch):
    """Large frames are taken as their owners go; whoever keeps them for good holds each up for a moment alone."""
    if loop is None:
        pytest.skip("a thread reads on")
    monkeypatch.setattr(channels, "_MOST_ALIVE", 10)
    monkeypatch.setattr(channels, "_HELD_SECONDS", PATIENCE)
    kept = []
    owner = owners(lambda _: (kept.append(np.zeros(1)), owner.channel.keep(kept[-1], 4)))
    for number in range(12):
        with contextlib.closing(large(number)) as frame:
            socket.send_fds(owner.theirs, [frame.data], [frame.fd])
    eventually(lambda: LISTENER._full)
    assert owner.came == [0, 1, 2]
    kept.pop(0)
    eventually(lambda: len(owner.came) == 4)
    del kept[:2]
    eventually(lambda: len(owner.came) == 6)
    monkeypatch.setattr(channels, "_HELD_SECONDS", 0)
    kept.pop(0)
    eventually(lambda: len(owner.came) == 12)

    assert owner.came == list(range(12))
    kept.clear()
    assert not owner.channel.is_full()
